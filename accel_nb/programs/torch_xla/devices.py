"""The devices that train: TPU chips, or the processor in their place."""

from __future__ import annotations

import os
import platform
from typing import Any

import numpy as np
import torch
import torch_xla
from settings import ACCELERATOR, DEVICES, PRECISION
from torch_xla import runtime
from torch_xla.distributed import spmd


def find_device() -> tuple[torch.device, str, Any]:
    """The device, its name and, for several chips, their mesh: to PyTorch they are one device."""
    if ACCELERATOR == "cpu":
        runtime.set_device_type("CPU")
        os.environ["CPU_NUM_DEVICES"] = str(DEVICES)  # the processor stands in for several chips
        device_name = platform.processor() or platform.machine()
    if ACCELERATOR == "tpu":
        # torch_xla has looked on the bus: opening a TPU that is not there would wait for minutes.
        if runtime.device_type() != "TPU":
            raise RuntimeError(
                f"A TPU was asked for, but torch_xla {torch_xla.__version__} found no chip on this machine's bus, "
                f"or no libtpu: it would use the {runtime.device_type()}. Nothing was trained."
            )
        device_name = os.environ.get("TPU_ACCELERATOR_TYPE", "TPU")
    if ACCELERATOR == "tpu" and PRECISION == "fp32":
        torch_xla.backends.set_mat_mul_precision("highest")  # else a TPU multiplies float32 as bfloat16
    if DEVICES > 1:
        runtime.use_spmd()  # one program for all chips; which rows each computes is told by `split`
        count = runtime.global_runtime_device_count()
        if count != DEVICES:
            raise RuntimeError(f"{DEVICES} devices were asked for, and torch_xla works on all {count} or on one.")
        mesh = spmd.Mesh(np.arange(DEVICES), (DEVICES,), ("batch",))
    if DEVICES == 1:
        mesh = None
    return torch_xla.device(), device_name, mesh


def split(batch: list[torch.Tensor], mesh: Any) -> None:
    """Gives each chip its part of the rows of these tensors."""
    for tensor in batch:
        spmd.mark_sharding(tensor, mesh, ("batch", *[None] * (tensor.dim() - 1)))


def everywhere(tensors: Any, mesh: Any) -> None:
    """Gives each chip all of these tensors. Said in the beginning, it also holds for what becomes of them."""
    for tensor in tensors:
        spmd.mark_sharding(tensor, mesh, (None,) * tensor.dim())


def on_cpu(state: Any) -> Any:
    """A state_dict with its tensors on the CPU, as a program without torch_xla loads it."""
    if isinstance(state, dict):
        return {name: on_cpu(value) for name, value in state.items()}
    if isinstance(state, list):
        return [on_cpu(value) for value in state]
    if isinstance(state, torch.Tensor):
        state = state.cpu()
    return state
