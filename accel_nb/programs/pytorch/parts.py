"""What the training script stands on: data, layer table, learning rate, files, reports."""

from __future__ import annotations

import csv
import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from settings import ACCELERATOR, DATA_ON_DEVICE, HERE, INPUT_SHAPE, MODEL, OUTPUTS, SCHEDULE, TASK, WARMUP_STEPS
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
        x = x.movedim(-1, 1).contiguous()
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


def batches_from_files(x: Any, y: Any, order: np.ndarray, size: int, device: torch.device) -> Iterator[Any]:
    """Batches of the samples in this order, read by two threads while the batches before them compute."""

    def read(rows: np.ndarray) -> list[torch.Tensor]:
        batch = [torch.from_numpy(x[rows]), torch.from_numpy(y[rows])]
        if ACCELERATOR == "gpu":
            batch = [part.pin_memory() for part in batch]  # copied to the GPU while it computes
        return batch

    readers = ThreadPoolExecutor(max_workers=2)
    try:
        waiting = deque()  # four batches at most
        for start in range(0, len(order), size):
            waiting.append(readers.submit(read, order[start : start + size]))
            if len(waiting) == 4:
                yield [part.to(device, non_blocking=True) for part in waiting.popleft().result()]
        while waiting:
            yield [part.to(device, non_blocking=True) for part in waiting.popleft().result()]
    finally:
        readers.shutdown(cancel_futures=True)


def rate_factor(step: int, total_steps: int) -> float:
    """The part of the base learning rate that is in force at a step, counted from 0."""
    if SCHEDULE == "constant":
        factor = 1.0
    elif SCHEDULE == "cosine":
        done = max(0, step - WARMUP_STEPS) / max(1, total_steps - WARMUP_STEPS)
        factor = (1 + math.cos(math.pi * done)) / 2
    if WARMUP_STEPS > 0:
        factor *= min(1.0, (step + 1) / WARMUP_STEPS)
    return factor


def save(content: Any, path: Path) -> None:
    """Writes beside and renames, so that nobody ever meets half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    torch.save(content, beside)
    beside.replace(path)


def print_report(event: str, **values: Any) -> None:
    """Prints one line per epoch."""
    if event == "epoch":
        names = ("loss", "accuracy", "val_loss", "val_accuracy")
        numbers = "  ".join(f"{name} {values[name]:.4f}" for name in names if name in values)
        print(f"epoch {values['epoch']}  {numbers}  {values['seconds']:.1f} s", flush=True)


def csv_report(path: str | Path) -> Callable[..., None]:
    """A report that prints, and writes every step to a CSV file at the end of each epoch."""
    columns = ("step", "epoch", "loss", "accuracy", "val_loss", "val_accuracy")
    rows: list[dict[str, Any]] = [dict(zip(columns, columns, strict=True))]

    def report(event: str, **values: Any) -> None:
        print_report(event, **values)
        if event == "batch":
            for i, loss in enumerate(values["loss"]):
                row = {"step": values["first"] + i, "epoch": values["epoch"], "loss": f"{loss:.9g}"}
                if TASK == "classification":
                    row["accuracy"] = f"{values['accuracy'][i]:.9g}"
                rows.append(row)
        if event == "epoch":
            rows[-1].update({name: f"{values[name]:.9g}" for name in columns[4:] if name in values})
            with open(path, "w" if values["epoch"] == 1 else "a", newline="") as file:
                csv.DictWriter(file, columns).writerows(rows)
            rows.clear()

    return report


def no_control() -> dict[str, Any]:
    """Nobody steers: no stop, no new learning rate."""
    return {}
