"""Machines that are not here, with what real diagnoses say of them; for tests of what a plan becomes on each."""

from __future__ import annotations

from dataclasses import replace

from accel_nb.diagnose import Diagnosis, diagnose
from accel_nb.framework_facts import Device, Facts
from accel_nb.machine import CPU, GPU, TPU, Machine

GIB = 2**30
HOST = CPU(name="CPU", cores=2, memory_total=128 * GIB, memory_free=120 * GIB)
BARE = Machine(cpu=HOST)
BROKEN = "no kernel image is available"

TORCH = Facts("pytorch", True, "torch", "2.13.0", cuda_build=False, outcome="ok", cpu_smoke="ok")
TF = Facts("tensorflow", True, "tensorflow", "2.21.0", "3.15.1", cuda_build=False, outcome="ok", cpu_smoke="ok")


def gpus(count: int, failing: tuple[int, ...] = ()) -> Diagnosis:
    """A machine with so many A100s, of which some cannot run anything."""
    cards = tuple(GPU(i, "A100", 40 * GIB, 39 * GIB, (8, 0), f"GPU-{i}") for i in range(count))
    machine = Machine(
        cpu=HOST, gpus=cards, visible=tuple(range(count)), driver="580.65", driver_cuda=(13, 0),
        driver_loaded=True, nvidia_nodes=True, nvidia_pci=count,
    )  # fmt: skip
    devices = tuple(Device(i, "A100", (8, 0), 40 * GIB, BROKEN if i in failing else "ok") for i in range(count))
    seen = {"cuda_build": True, "cuda": "12.8", "available": True, "devices": devices}
    return diagnose(machine, {"pytorch": replace(TORCH, **seen), "tensorflow": replace(TF, **seen)})


def tpus(chips: int, generation: str = "v5e", *, tensorflow: bool = True) -> Diagnosis:
    """A machine with TPU chips and the packages of Colab's TPU runtime; `tensorflow`: tensorflow-tpu, too."""
    packages = {"torch_xla": "2.9.0", "libtpu": "0.0.21.1", "jax": "0.7.2", "keras": "3.13.2"}
    torch = replace(TORCH, version="2.9.0", packages=packages)
    keras = Facts("tensorflow", keras="3.13.2", packages=packages)
    if tensorflow:
        keras = replace(TF, distribution="tensorflow-tpu", version="2.20.0", tpu_build=True, packages=packages)
    machine = Machine(cpu=HOST, tpu=TPU(generation, chips), colab=True)
    return diagnose(machine, {"pytorch": torch, "tensorflow": keras})


def torch_tpu(chips: int) -> Diagnosis:
    """A machine with TPU chips and PyTorch's newer add-on for them."""
    packages = {"torch_tpu": "0.2.0", "libtpu": "0.0.50"}
    machine = Machine(cpu=HOST, tpu=TPU("v6e", chips))
    return diagnose(machine, {"pytorch": replace(TORCH, packages=packages), "tensorflow": Facts("tensorflow")})


def mac() -> Diagnosis:
    machine = replace(BARE, mps=True, system="Darwin", architecture="arm64")
    torch = replace(TORCH, mps_built=True, mps_available=True, mps_smoke="ok")
    return diagnose(machine, {"pytorch": torch, "tensorflow": TF})


def bare(memory: int = 120 * GIB) -> Diagnosis:
    """A machine with a CPU and nothing else."""
    return diagnose(replace(BARE, cpu=replace(HOST, memory_free=memory)), {"pytorch": TORCH, "tensorflow": TF})


MACHINES = {
    "cpu": bare(),
    "1 GPU": gpus(1),
    "4 GPUs": gpus(4),
    "GPU 0 fails": gpus(4, (0,)),
    "GPU 2 fails": gpus(4, (2,)),
    "Apple": mac(),
    "1 TPU chip": tpus(1),
    "4 TPU chips": tpus(4),
    "TPU v3": tpus(4, "v3"),
    "torch_tpu": torch_tpu(4),
    "Colab's TPU": tpus(1, tensorflow=False),
}
