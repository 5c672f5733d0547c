"""What the training script stands on: data, layer table, learning rate, files, reports."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from settings import ACCELERATOR, ACCUMULATE, DATA_ON_DEVICE, HERE, INPUT_SHAPE, MODEL, OUTPUTS, STRATEGY
from torch import nn


def layer_table(model: nn.Module, device: torch.device) -> list[list[Any]]:
    """Rows of name, kind, output shape without the batch, and parameters, from two samples of zeros."""
    names = {layer: name or "model" for name, layer in model.named_modules() if not any(layer.children())}
    rows = {}

    def note(layer: nn.Module, _: Any, output: Any) -> None:
        shape = list(getattr(output, "shape", ())[1:])
        rows[layer] = [names[layer], type(layer).__name__, shape, sum(p.numel() for p in layer.parameters())]

    hooks = [layer.register_forward_hook(note) for layer in names]
    x = torch.zeros(2, *INPUT_SHAPE, device=device)
    if MODEL in ("cnn", "resnet50"):
        x = x.movedim(-1, 1)
    elif MODEL == "own":
        x = x.movedim(-1, 1).clone(memory_format=torch.contiguous_format)
    model.eval()
    with torch.no_grad():
        if MODEL == "own":
            try:
                outputs = model(x)
            except Exception as error:
                raise ValueError(f"own_model() cannot take inputs of shape {tuple(x.shape)}: {error}") from error
            shape = tuple(outputs.shape) if isinstance(outputs, torch.Tensor) else type(outputs).__name__
            if shape != (2, OUTPUTS):
                raise ValueError(f"own_model() gives {shape} for 2 samples, but this data needs {(2, OUTPUTS)}.")
        else:
            model(x)
    for hook in hooks:
        hook.remove()
    return list(rows.values())


def stored(name: str, device: torch.device) -> Any:
    """An array of data/."""
    if DATA_ON_DEVICE:
        array = torch.from_numpy(np.load(HERE / "data" / f"{name}.npy")).to(device)
    if not DATA_ON_DEVICE:
        array = np.load(HERE / "data" / f"{name}.npy", mmap_mode="r")
    return array


def parts_of(size: int, ranks: int) -> int:
    """In how many parts each rank computes its rows of a batch; each part has a row of some rank."""
    return min(ACCUMULATE, math.ceil(size / ranks))


def shares(order: Any, size: int) -> Iterator[Any]:
    """The rows that are computed at a time: of each `size` samples in this order."""
    for start in range(0, len(order), size):
        batch = order[start : start + size]
        if STRATEGY in ("ddp", "fsdp"):
            # Each rank takes its own rows, and all compute equally often, for they wait for each other each time.
            # One that has no row left takes another's; as only the rows of y count, it adds nothing.
            rank, count = dist.get_rank(), dist.get_world_size()
            if ACCUMULATE == 1:
                rows = batch[rank::count]
                yield (rows, rows) if len(rows) > 0 else (batch[:1], rows)
            else:
                for part in range(parts_of(len(batch), count)):
                    rows = batch[rank::count][part::ACCUMULATE]
                    yield (rows, rows) if len(rows) > 0 else (batch[:1], rows)
        elif ACCUMULATE > 1:
            for part in range(parts_of(len(batch), 1)):
                yield batch[part::ACCUMULATE]
        else:
            yield batch


def batches_on_device(x: torch.Tensor, y: torch.Tensor, order: torch.Tensor, size: int) -> Iterator[Any]:
    """Batches of the samples in this order."""
    for rows in shares(order, size):
        if STRATEGY in ("ddp", "fsdp"):
            yield x.index_select(0, rows[0]), y.index_select(0, rows[1])
        else:
            yield x.index_select(0, rows), y.index_select(0, rows)


def batches_from_files(x: Any, y: Any, order: np.ndarray, size: int, device: torch.device) -> Iterator[Any]:
    """Batches of the samples in this order, read by two threads while the batches before them compute."""

    def read(rows: Any) -> list[torch.Tensor]:
        if STRATEGY in ("ddp", "fsdp"):
            batch = [torch.from_numpy(x[rows[0]]), torch.from_numpy(y[rows[1]])]
        else:
            batch = [torch.from_numpy(x[rows]), torch.from_numpy(y[rows])]
        if ACCELERATOR == "gpu":
            batch = [part.pin_memory() for part in batch]  # copied to the GPU while it computes
        return batch

    readers = ThreadPoolExecutor(max_workers=2)
    try:
        waiting = deque()  # four batches at most
        for rows in shares(order, size):
            waiting.append(readers.submit(read, rows))
            if len(waiting) == 4:
                yield [part.to(device, non_blocking=True) for part in waiting.popleft().result()]
        while waiting:
            yield [part.to(device, non_blocking=True) for part in waiting.popleft().result()]
    finally:
        readers.shutdown(cancel_futures=True)


def computed_as_here(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's state from a checkpoint; how its steps are computed is a matter of the device here."""
    for mine, theirs in zip(optimizer.param_groups, state["param_groups"], strict=True):
        theirs.update({name: mine[name] for name in ("fused", "foreach", "capturable") if name in mine})
    return state


def save(content: Any, path: Path) -> None:
    """Writes beside and renames, so that nobody ever meets half a file."""
    if STRATEGY in ("ddp", "fsdp"):
        saves = dist.get_rank() == 0  # for all
        if not saves:
            return
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    try:
        with open(beside, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())  # a rename may reach the disk before what it names
    except BaseException as problem:
        beside.unlink(missing_ok=True)  # half a file on a full disk keeps it full
        if isinstance(problem.__context__, OSError):  # PyTorch tells a full disk as trouble with its own format
            raise problem.__context__ from None
        raise
    beside.replace(path)
