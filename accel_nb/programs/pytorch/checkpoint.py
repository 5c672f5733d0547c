"""All that is needed to go on with a run: written while it trains, read when it is taken up again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from blocks import whole
from parts import computed_as_here
from settings import ACCELERATOR, STRATEGY
from torch import nn
from torch.distributed.tensor import distribute_tensor


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer, group: Any = None) -> dict[str, Any]:
    """Weights, the optimizer's state and the states of random numbers, under the names of a run on one device."""
    if STRATEGY == "fsdp":
        state = {"model": whole(model.state_dict()), "optimizer": whole(optimizer.state_dict())}
    elif STRATEGY == "ddp":
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
    else:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if STRATEGY in ("ddp", "fsdp"):
        state["random_cpu"] = of_each_rank(torch.get_rng_state(), group)
        if ACCELERATOR == "gpu":
            state["random_gpu"] = of_each_rank(torch.cuda.get_rng_state(), group)
    else:
        state["random_cpu"] = [torch.get_rng_state()]
        if ACCELERATOR == "gpu":
            state["random_gpu"] = [torch.cuda.get_rng_state()]
    return state


def of_each_rank(mine: torch.Tensor, group: Any) -> list[torch.Tensor]:
    """A small tensor of each rank, in their order; all ranks call it."""
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine, group=group)
    return found


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """A checkpoint, on the CPU, wherever it was written."""
    return torch.load(path, map_location="cpu", weights_only=True)


def restore_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Gives the optimizer its state back."""
    if STRATEGY == "fsdp":
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for number, values in state["state"].items():  # weights that nothing uses have none
            parameter = parameters[number]
            for name, value in values.items():
                if value is not None and value.shape == parameter.shape:
                    values[name] = distribute_tensor(value, parameter.device_mesh, parameter.placements)
    optimizer.load_state_dict(computed_as_here(state, optimizer))


def restore_random(state: dict[str, Any]) -> None:
    """Lets dropout's random numbers go on where they were; a device that the run did not have starts its own."""
    if STRATEGY in ("ddp", "fsdp"):
        mine = dist.get_rank()
    if STRATEGY not in ("ddp", "fsdp"):
        mine = 0
    drawn = state.get("random_cpu", [])
    if mine < len(drawn):
        torch.set_rng_state(drawn[mine])
    if ACCELERATOR == "gpu":
        drawn = state.get("random_gpu", [])
        if mine < len(drawn):
            torch.cuda.set_rng_state(drawn[mine])
