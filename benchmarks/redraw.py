"""What one redraw of the curves costs, in time and in bytes, for runs of 1e3, 1e5 and 1e6 steps.

Each redraw is that of a live panel: a new block of steps has arrived, with validation, smoothing 0.6 and 3 earlier
runs. The time is processor time of the drawing thread, the median of several rounds; the ratio to the shortest run
shows whether a long run costs more. `python benchmarks/redraw.py` prints one line per length.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

from accel_nb.curves import curves_svg
from accel_nb.history import History

LENGTHS = (1_000, 100_000, 1_000_000)
ROUNDS = 200


def run(steps: int, seed: int) -> History:
    """A noisy run with 20 epochs: the loss falls from 2.3 to 0.1, the accuracy climbs to 1."""
    random, history, per_epoch = np.random.default_rng(seed), History(), steps // 20
    history.add({"event": "started", "steps_per_epoch": per_epoch})
    for epoch in range(20):
        along = (epoch * per_epoch + np.arange(per_epoch)) / steps
        loss = (0.1 + 2.2 * np.exp(-6 * along)) * np.exp(0.1 * random.standard_normal(per_epoch))
        accuracy = np.clip(1 - 0.9 * np.exp(-6 * along) + 0.03 * random.standard_normal(per_epoch), 0, 1)
        first = epoch * per_epoch + 1
        history.add({"event": "batch", "epoch": epoch + 1, "first": first, "loss": loss, "accuracy": accuracy})
        history.add(
            {
                "event": "epoch",
                "epoch": epoch + 1,
                "step": first + per_epoch - 1,
                "val_loss": float(loss.mean()),
                "val_accuracy": float(accuracy.mean()),
            }
        )
    return history


def measure(history: History, earlier: list[tuple[str, History]]) -> tuple[float, int]:
    """Median seconds of one redraw, and the most bytes of one."""
    seconds, size = [], 0
    for _ in range(ROUNDS):
        first = len(history) + 1
        history.add({"event": "batch", "epoch": 21, "first": first, "loss": [0.1] * 10, "accuracy": [0.95] * 10})
        begin = time.thread_time()
        picture = curves_svg(history, earlier, smooth=0.6)
        seconds.append(time.thread_time() - begin)
        size = max(size, len(picture.encode()))
    return statistics.median(seconds), size


def main() -> None:
    """Print the table."""
    earlier = [(f"run {number}", run(5_000, number + 1)) for number in range(3)]
    base = None
    print("     steps   ms a redraw   ratio   bytes")
    for steps in LENGTHS:
        history = run(steps, 0)
        curves_svg(history, earlier, smooth=0.6)  # the first one takes in the whole history
        seconds, size = measure(history, earlier)
        base = base or seconds
        print(f"{steps:>10,}   {seconds * 1e3:>11.3f}   {seconds / base:>5.2f}   {size:>5,}")


if __name__ == "__main__":
    main()
