"""One run on several devices, with a process ("rank") for each: how they meet and what they tell each other."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from settings import ACCELERATOR, DEVICES, MODEL, NODES
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Ranks:
    """The processes that work together."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group  # what they exchange things in
        self.rank = dist.get_rank()  # this one's number; 0 speaks for all
        self.count = dist.get_world_size()
        self.idle = False  # whether this one has no sample of what is computed now


def join() -> Ranks:
    """Meets the other ranks."""
    if "RANK" not in os.environ:
        if NODES == 1:
            start = f"torchrun --standalone --nproc-per-node={DEVICES} {sys.argv[0]}"
        else:
            start = f"torchrun --nnodes={NODES} --nproc-per-node={DEVICES} ... {sys.argv[0]}, on each machine"
        raise RuntimeError(f"This program runs as one process per device: start it with {start}")
    if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:
        limit = timedelta(seconds=12)
        if sys.platform == "linux":  # one machine: what it is called in a network must not matter
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    else:
        limit = timedelta(minutes=10)
        if NODES > 1:
            choose_interface()
    if ACCELERATOR == "gpu":
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=limit)
    else:
        dist.init_process_group("gloo", timeout=limit)
    # All are here. From now on a rank may wait for the others for days: that is a pause.
    group = dist.new_group(timeout=timedelta(days=365))
    return Ranks(group)


def choose_interface() -> None:
    """Has gloo use the network interface that leads to the first machine; by itself it goes by the host's name."""
    if sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ:
        os.environ["GLOO_SOCKET_IFNAME"] = interface_to(os.environ["MASTER_ADDR"])


def interface_to(address: str) -> str:
    """The name of the network interface through which this machine reaches another one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # looks for the way; nothing is sent
        mine = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                question = struct.pack("256s", name.encode())
                answer = fcntl.ioctl(probe.fileno(), 0x8915, question)  # SIOCGIFADDR: its address
                if socket.inet_ntoa(answer[20:24]) == mine:
                    return name
    raise RuntimeError(f"No network interface here has the address {mine}, from which {address} is reached.")


def leave(ranks: Ranks) -> None:
    """Waits for rank 0, which saves, then ends the work together."""
    dist.broadcast(torch.zeros(1), 0, group=ranks.group)
    dist.destroy_process_group()


def silent(event: str, **values: Any) -> None:
    """The report of all ranks but the first."""


def ask(control: Callable[[], dict[str, Any]], rate: float, block: int, ranks: Ranks) -> tuple[Any, ...]:
    """Whether to stop, whether to write a checkpoint, the base learning rate, the steps of the next block.

    All as rank 0 has them. The others wait on the CPU, at no cost, for as long as `control` takes.
    """
    word = torch.zeros(4, dtype=torch.float64)
    if ranks.rank == 0:
        asked = control()
        wishes = [bool(asked.get("stop")), bool(asked.get("checkpoint")), asked.get("learning_rate", rate), block]
        word = torch.tensor(wishes, dtype=torch.float64)
    dist.broadcast(word, 0, group=ranks.group)
    stop, due, rate, block = word.tolist()
    return bool(stop), bool(due), rate, int(block)


def summed(parts: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Sums over all ranks of numbers, or of lists as long as each other."""
    sums = torch.tensor(list(parts.values()), dtype=torch.float64)
    dist.all_reduce(sums, group=ranks.group)
    return dict(zip(parts, sums.tolist(), strict=True))


def replicate(model: nn.Module, ranks: Ranks) -> nn.Module:
    """DDP: each rank holds the whole model; the backward pass averages the gradients of all."""
    if MODEL in ("cnn", "resnet50", "own"):
        # a convolution of 1x1 has its gradient in another memory layout, which costs nearly nothing
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
    if MODEL == "own":
        # a model may have weights that it does not use, as on one device; that all are used is no news either
        warnings.filterwarnings("ignore", "find_unused_parameters=True was specified")
        return DistributedDataParallel(model, process_group=ranks.group, find_unused_parameters=True)
    return DistributedDataParallel(model, process_group=ranks.group)


def whole_batch_norm(model: nn.Module, ranks: Ranks) -> nn.Module:
    """Batch norm that normalises over the samples of all ranks, as one device would."""
    if ACCELERATOR == "gpu":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        for layer in model.modules():
            if isinstance(layer, nn.SyncBatchNorm):
                layer.process_group = ranks.group
                layer.forward = partial(normalise_on_gpus, layer, layer.forward, ranks)
    else:
        for layer in model.modules():
            if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
                layer.forward = partial(normalise, layer, layer.forward, ranks)
    return model


@torch.compiler.disable
def normalise_on_gpus(layer: nn.Module, forward: Callable, ranks: Ranks, x: torch.Tensor) -> torch.Tensor:
    """What SyncBatchNorm does, and of an idle rank no samples."""
    if not (ranks.idle and layer.training):
        return forward(x)
    nothing = forward(x[:0].float())  # the others wait for each rank's part, here and in the backward pass
    if layer.running_mean is None:
        return x + nothing.sum()
    usual = (layer.running_mean, layer.running_var, layer.weight, layer.bias)
    return nn.functional.batch_norm(x, *usual, eps=layer.eps) + nothing.sum()


@torch.compiler.disable
def normalise(layer: nn.Module, forward: Callable, ranks: Ranks, x: torch.Tensor) -> torch.Tensor:
    """What SyncBatchNorm, which is made for GPUs, does there."""
    if not layer.training:
        return forward(x)
    shape = (1, -1) + (1,) * (x.dim() - 2)
    others = [i for i in range(x.dim()) if i != 1]  # all dimensions but the channels
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mine = wide[: 0 if ranks.idle else len(x)]
    count = torch.tensor([mine.numel() // mine.shape[1]])
    sums = SumOverRanks.apply(torch.cat([mine.sum(others, dtype=torch.float64), count]), ranks.group)
    count = int(sums[-1].detach())
    if count == 1:
        raise ValueError("Expected more than 1 value per channel when training: the batch is too small.")
    mean = (sums[:-1] / count).to(wide.dtype)
    squares = (mine - mean.view(shape)).square().sum(others, dtype=torch.float64)
    variance = (SumOverRanks.apply(squares, ranks.group) / count).to(wide.dtype)
    if layer.running_mean is not None:
        with torch.no_grad():
            layer.num_batches_tracked += 1
            momentum = 1 / int(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
            layer.running_mean += momentum * (mean - layer.running_mean)
            layer.running_var += momentum * (variance * count / (count - 1) - layer.running_var)
    y = (wide - mean.view(shape)) * torch.rsqrt(variance + layer.eps).view(shape)
    if layer.weight is not None:
        y = y * layer.weight.view(shape)
    if layer.bias is not None:
        y = y + layer.bias.view(shape)
    return y.to(x.dtype)


class SumOverRanks(torch.autograd.Function):
    """The sum of a tensor over all ranks; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None
