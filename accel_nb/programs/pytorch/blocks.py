"""The blocks of a model: to shard them one by one (FSDP), to compute them anew instead of keeping activations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from models import Bottleneck
from settings import COMPILE, MODEL
from spread import Ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint


def blocks(model: nn.Module) -> list[nn.Module]:
    """The parts of a model that hold most of its weights."""
    if MODEL in ("mlp", "cnn"):
        found = [layer for layer in model if isinstance(layer, (nn.Linear, nn.Conv2d))]
    elif MODEL == "resnet50":
        found = [block for block in model.modules() if isinstance(block, Bottleneck)]
    elif MODEL == "own":
        found = []
        for child in model.children():
            holder = isinstance(child, (nn.ModuleList, nn.ModuleDict))  # never called itself, only what it holds
            found += [*child.children()] if holder else [child]
        found = [block for block in found if any(True for _ in block.parameters())]
    return found


def shard(model: nn.Module, device: torch.device, ranks: Ranks) -> None:
    """FSDP: each rank keeps a part of every weight, and fetches a block's whole ones while it computes it."""
    mesh = DeviceMesh.from_group(ranks.group, device.type)
    if MODEL == "own":
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), 0, group=ranks.group)  # whatever drew the random numbers
        uses = Counter(p for _, p in model.named_parameters(remove_duplicate=False))
        for block in blocks(model):
            if all(uses[p] == 1 for p in block.parameters()):  # a weight in two blocks belongs to neither
                fully_shard(block, mesh=mesh)
    if MODEL != "own":
        for block in blocks(model):
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def whole(state: Any) -> Any:
    """A state_dict with whole tensors on the CPU, as on one device. All ranks call it; rank 0 gets the tensors."""
    if isinstance(state, dict):
        return {name: whole(value) for name, value in state.items()}
    if isinstance(state, DTensor):
        state = state.full_tensor()
    if isinstance(state, torch.Tensor):
        state = state.cpu() if dist.get_rank() == 0 else None
    return state


def recompute_activations(model: nn.Module) -> None:
    """Activation checkpointing: of each block only the input is kept, to compute the block again when needed."""
    if MODEL in ("mlp", "cnn"):
        layers = [*model]
        starts = [i for i, layer in enumerate(layers) if isinstance(layer, (nn.Linear, nn.Conv2d))]
        edges = [0, *starts[1:], len(layers)]
        groups = [nn.Sequential(*layers[i:j]) for i, j in pairwise(edges)]
        model.forward = partial(one_by_one, groups)
    else:
        for block in blocks(model):
            block.forward = partial(computed_twice, block, block.forward)


def one_by_one(groups: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
    """A sequence of layers, in groups that are computed twice; the last one not."""
    for group in groups[:-1]:
        x = computed_twice(group, group, x)
    return groups[-1](x)


def computed_twice(block: nn.Module, forward: Any, *inputs: Any, **more: Any) -> Any:
    """A block's outputs. What comes between is forgotten, and computed again when the backward pass needs it."""
    if COMPILE:
        outputs = checkpoint(forward, *inputs, use_reentrant=False, **more)  # a part of the compiled graph
    else:
        contexts = partial(first_and_second, block)
        outputs = checkpoint(forward, *inputs, use_reentrant=False, context_fn=contexts, **more)
    return outputs


def first_and_second(block: nn.Module) -> tuple[AbstractContextManager, AbstractContextManager]:
    """What surrounds the first and the second computation of a block."""
    return nullcontext(), statistics_kept(block)


@contextmanager
def statistics_kept(block: nn.Module) -> Iterator[None]:
    """Batch norm computes as ever, but its running statistics, which have seen this batch already, stay."""
    norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    layers = [layer for layer in block.modules() if isinstance(layer, norms) and layer.running_mean is not None]
    before = [(layer.momentum, layer.num_batches_tracked) for layer in layers]
    for layer in layers:
        layer.momentum, layer.num_batches_tracked = 0.0, layer.num_batches_tracked.clone()
    try:
        yield
    finally:
        for layer, (momentum, tracked) in zip(layers, before, strict=True):
            layer.momentum, layer.num_batches_tracked = momentum, tracked
