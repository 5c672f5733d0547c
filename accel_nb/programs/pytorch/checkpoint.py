"""All that is needed to go on with a run: written while it trains, read when it is taken up again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from blocks import whole
from settings import ACCELERATOR, STRATEGY
from torch import nn
from torch.distributed.tensor import distribute_tensor


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Weights, the optimizer's state and the states of random numbers, under the names of a run on one device.

    All ranks call it; the random numbers are those of each.
    """
    if STRATEGY == "fsdp":
        state = {"model": whole(model.state_dict()), "optimizer": whole(optimizer.state_dict())}
    elif STRATEGY == "ddp":
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
    else:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state["random_cpu"] = of_each_rank(torch.get_rng_state())
    if ACCELERATOR == "gpu":
        state["random_gpu"] = of_each_rank(torch.cuda.get_rng_state())
    return state


def of_each_rank(mine: torch.Tensor) -> list[torch.Tensor]:
    """A small tensor of each rank, in their order."""
    if STRATEGY in ("ddp", "fsdp"):
        found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(found, mine)
    else:
        found = [mine]
    return found


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """A checkpoint, on the CPU, wherever it was written."""
    return torch.load(path, map_location="cpu", weights_only=True)


def restore_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Gives the optimizer its state back."""
    if STRATEGY == "fsdp":
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for parameter, values in zip(parameters, state["state"].values(), strict=False):
            for name, value in values.items():
                if value is not None and value.shape == parameter.shape:
                    values[name] = distribute_tensor(value, parameter.device_mesh, parameter.placements)
    optimizer.load_state_dict(state)


def restore_random(state: dict[str, Any]) -> None:
    """Lets dropout's random numbers go on where they were."""
    rank = 0
    if STRATEGY in ("ddp", "fsdp"):
        rank = dist.get_rank()
    torch.set_rng_state(state["random_cpu"][rank])
    if ACCELERATOR == "gpu":
        torch.cuda.set_rng_state(state["random_gpu"][rank])
