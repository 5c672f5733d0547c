"""What every training script has, whatever its framework: learning rate over time, reports, no control."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from settings import SCHEDULE, WARMUP_STEPS


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
                if "accuracy" in values:
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
