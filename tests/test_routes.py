"""By which way a framework reaches a TPU, or the CPU that stands in for one; and why not, with the fix."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from accel_nb.diagnose import Diagnosis, diagnose
from accel_nb.framework_facts import Facts
from accel_nb.joining import ENGINES
from accel_nb.machine import TPU, Machine
from accel_nb.routes import ENVIRONMENTS, Route, tpu_route

BARE, VM, POD = Machine(), Machine(tpu=TPU("v5e", 1)), Machine(tpu=TPU("v4", 4))
TORCH = Facts("pytorch", True, "torch", "2.13.0+cpu", cuda_build=False, outcome="ok", cpu_smoke="ok")
TORCH_29 = replace(TORCH, version="2.9.0+cpu")
TF = Facts("tensorflow", True, "tensorflow", "2.21.0", "3.15.1", cuda_build=False, outcome="ok", cpu_smoke="ok")
TF_TPU = replace(TF, distribution="tensorflow-tpu", version="2.20.0", tpu_build=True)
NO_TORCH, NO_TF = Facts("pytorch"), Facts("tensorflow")
JAX = {"keras": "3.13.2", "jax": "0.7.2"}
LIB = {"libtpu": "0.0.21.1"}
XLA = {"torch_xla": "2.9.0"}

# machine, facts, packages, accelerator, engine, words of why, words of the fix ("" where the route is usable)
ROUTES = {
    "tensorflow-tpu": (VM, TF_TPU, LIB, "tpu", "tensorflow", "the build for TPUs; here: 1 x TPU v5e", ""),
    "tensorflow-tpu before jax": (POD, TF_TPU, JAX | LIB, "tpu", "tensorflow", "here: 4 x TPU v4", ""),
    "keras on jax": (VM, NO_TF, JAX | LIB, "tpu", "keras_jax", "tensorflow-tpu would be the other way", ""),
    "jax beside plain tf": (VM, TF, JAX | LIB, "tpu", "keras_jax", "TensorFlow 2.21.0 has no TPU kernels", ""),
    "plain tf": (VM, TF, {}, "tpu", "", "has no TPU kernels", "pip install 'jax[tpu]'"),
    "torch_xla": (VM, TORCH_29, XLA | LIB, "tpu", "torch_xla", "through torch_xla 2.9.0", ""),
    "torch_tpu": (VM, TORCH, {"torch_tpu": "0.2.0"} | LIB, "tpu", "torch_tpu", "through torch_tpu 0.2.0", ""),
    "both": (VM, TORCH, XLA | {"torch_tpu": "0.2.0"} | LIB, "tpu", "torch_tpu", "through torch_tpu", ""),
    "no torch": (VM, NO_TORCH, {}, "tpu", "", "PyTorch is not installed", "torch_xla[tpu]"),
    "no tpu": (BARE, TF, JAX | LIB, "tpu", "", "no TPU", "another accelerator"),
    # ---- the stand-in, with a TPU here or without
    "stand-in, jax": (BARE, TF, JAX, "cpu", "keras_jax", "Keras 3.13.2 on JAX 0.7.2, as on a TPU", ""),
    "stand-in, jax alone": (BARE, NO_TF, JAX, "cpu", "keras_jax", "on devices that the CPU plays", ""),
    "stand-in, keras without jax": (BARE, TF, {"keras": "3.15.1"}, "cpu", "tensorflow", "TensorFlow 2.21.0", ""),
    "stand-in, old keras": (BARE, TF, JAX | {"keras": "2.15.0"}, "cpu", "tensorflow", "loop for TPUs", ""),
    "stand-in, on a tpu": (VM, TF_TPU, LIB, "cpu", "tensorflow", "TensorFlow 2.20.0", ""),
    "stand-in, nothing": (BARE, NO_TF, {}, "cpu", "", "TensorFlow is not installed", "pip install keras jax"),
    "stand-in, torch_xla": (BARE, TORCH_29, XLA, "cpu", "torch_xla", "its runtime for CPUs", ""),
    "stand-in, other torch": (BARE, TORCH, XLA, "cpu", "", "2.9.0 does not fit PyTorch 2.13.0", "'torch==2.9.*'"),
    "stand-in, new torch": (BARE, TORCH, {}, "cpu", "", "The last one, 2.9", "'torch==2.9.*' 'torch_xla==2.9.*'"),
    "stand-in, torch 2.9": (BARE, TORCH_29, {}, "cpu", "", "not installed", "pip install 'torch_xla==2.9.*'"),
    "stand-in, torch_tpu": (VM, TORCH, {"torch_tpu": "0.2.0"} | LIB, "cpu", "", "torch_xla", "of its own"),
    "stand-in, no torch": (BARE, NO_TORCH, {}, "cpu", "", "torch_xla is not installed", "'torch==2.9.*'"),
}  # fmt: skip


def diagnosis(machine: Machine, facts: Facts, packages: dict[str, str]) -> Diagnosis:
    others = {"pytorch": NO_TORCH, "tensorflow": NO_TF}
    return diagnose(machine, others | {facts.framework: replace(facts, packages=packages)})


@pytest.mark.parametrize("case", ROUTES.values(), ids=ROUTES)
def test_the_route_and_why(case):
    machine, facts, packages, accelerator, engine, why, fix = case
    route = tpu_route(facts.framework, diagnosis(machine, facts, packages), accelerator)
    assert (route.engine, route.usable) == (engine, bool(engine))
    assert why in route.text
    assert route.text.endswith(".")
    assert fix in route.fix
    assert bool(route.fix) == (not route.usable)


@pytest.mark.parametrize("case", ROUTES.values(), ids=ROUTES)
def test_the_verdict_tells_the_same(case):
    machine, facts, packages, _, _, _, _ = case
    here = diagnosis(machine, facts, packages)
    told = here.verdict(facts.framework, "tpu")
    assert told.details["route"] == tpu_route(facts.framework, here, "tpu").engine
    assert Route(**told.details["stand_in"]) == tpu_route(facts.framework, here, "cpu")
    assert told.usable == tpu_route(facts.framework, here, "tpu").usable


def test_only_torch_tpu_may_load_itself_with_torch():
    assert set(ENVIRONMENTS) == {"torch_tpu", *ENGINES} - {"pytorch"}
    assert [name for name, more in ENVIRONMENTS.items() if more] == ["torch_tpu"]
    here = diagnosis(VM, TORCH, {"torch_tpu": "0.2.0"} | LIB)
    assert tpu_route("pytorch", here, "tpu").environment == {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}


def test_nothing_is_imported_to_find_out():
    code = (
        "import sys, accel_nb.diagnose as d, accel_nb.routes as r\n"
        "here = d.diagnose(probe=False)\n"
        "for framework in d.FRAMEWORKS:\n"
        "    for kind in ('tpu', 'cpu'):\n"
        "        r.tpu_route(framework, here, kind)\n"
        "names = ('torch', 'torch_xla', 'torch_tpu', 'libtpu', 'jax', 'keras', 'tensorflow')\n"
        "print([name for name in names if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
