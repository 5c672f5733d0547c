"""Steps per second of the Keras program against `model.fit`, side by side in one process.

    python benchmarks/keras_loop.py [--repeats 5] [--samples 6400] [--batch 128] [--models mlp cnn] [--compile]

Both train the same model on the same arrays with the same batch size and number of steps; epochs of the two take
Both train the same model on the same arrays with the same batch size and number of steps; epochs of the two take
write it, with the running mean of loss and accuracy that it shows.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np

from accel_nb.joining import joined

ARGS = {
    "mlp": {"layers": [512], "activation": "relu", "dropout": 0.2},
    "cnn": {"filters": [32, 64], "activation": "relu", "dropout": 0.25},
}


def program(folder: Path, **settings):
    """The program of the package as a module of its own, with other settings."""
    module = ModuleType("program")
    module.__file__ = str(folder / "train.py")
    Path(module.__file__).write_text(joined("tensorflow"))  # AutoGraph reads the source of what it compiles
    exec(compile(joined("tensorflow"), module.__file__, "exec"), vars(module))
    vars(module).update(settings, HERE=folder)
    return module


class Epochs:
    """Notes when each epoch ended; the first one, which compiles, is only the start."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def __call__(self, event: str, **_) -> None:
        if event == "epoch":
            self.ends.append(time.perf_counter())

    def seconds(self) -> list[float]:
        return [end - start for start, end in pairwise(self.ends)]


def measure(model: str, args: argparse.Namespace) -> tuple[float, float, float]:
    """Median seconds of an epoch with the program and with fit, and the median of their ratio."""
    import keras

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "data").mkdir()
        rng = np.random.default_rng(0)
        x = rng.random((args.samples, 28, 28, 1), dtype=np.float32)
        y = rng.integers(0, 10, args.samples)
        np.save(folder / "data" / "x_train.npy", x)
        np.save(folder / "data" / "y_train.npy", y)
        settings = {
            "MODEL": model, "MODEL_ARGS": ARGS[model], "INPUT_SHAPE": x.shape[1:], "BATCH_SIZE": args.batch,
            "VALIDATION": False, "COMPILE": args.compile,
        }  # fmt: skip
        ours = program(folder, **settings, EPOCHS=3)
        plain = ours.build_model()
        plain.compile(
            "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"],
            jit_compile=True if args.compile else "auto",
        )  # fmt: skip
        plain.fit(x, y, batch_size=args.batch, epochs=2, verbose=0)
        block_seconds, fit_seconds = [], []
        for _ in range(args.repeats):
            epochs = Epochs()
            ours.train(report=epochs, save_to=folder)
            block_seconds.append(min(epochs.seconds()))
            times = []
            for _ in range(2):
                began = time.perf_counter()
                plain.fit(x, y, batch_size=args.batch, epochs=1, verbose=0)
                times.append(time.perf_counter() - began)
            fit_seconds.append(min(times))
    ratios = [fit / block for fit, block in zip(fit_seconds, block_seconds, strict=True)]
    return statistics.median(block_seconds), statistics.median(fit_seconds), statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--samples", type=int, default=6400)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--models", nargs="+", default=list(ARGS), choices=list(ARGS))
    parser.add_argument("--compile", action="store_true", help="XLA on both sides")
    args = parser.parse_args()
    steps = -(-args.samples // args.batch)
    print(f"{'model':<8}{'program, ms a step':>20}{'fit, ms a step':>18}{'fit / program':>16}")
    for model in args.models:
        block, fit, ratio = measure(model, args)
        print(f"{model:<8}{1000 * block / steps:>20.2f}{1000 * fit / steps:>18.2f}{ratio:>16.2f}", flush=True)


if __name__ == "__main__":
    main()
