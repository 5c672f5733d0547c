"""The PyTorch program against loops written by hand, side by side in one process.

    python benchmarks/pytorch_loop.py [--repeats 7] [--threads 1] [--cpu-time] [--accelerator gpu]

- plain: what most people write: DataLoader over a TensorDataset, `.item()` after each step;
- tight: the same steps as short as they can be written by someone who knows how.

All three train the same model with Adam for the same number of steps on the same synthetic data, and know the
loss and the accuracy of every step at the end. Repeats take turns, so that a busy machine slows all alike;
where other work makes times useless, `--threads 1 --cpu-time` compares processor time.
A ratio over 1 means that the program is faster than that loop.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_nb.joining import joined

clock = time.perf_counter
CASES = {
    "mlp, batch 128": {
        "MODEL": "mlp",
        "MODEL_ARGS": {"layers": [512], "activation": "relu", "dropout": 0.2},
        "INPUT_SHAPE": (784,),
        "samples": 16_000,
        "EPOCHS": 3,
    },
    "mlp, batch 32": {
        "MODEL": "mlp",
        "MODEL_ARGS": {"layers": [128], "activation": "relu", "dropout": 0.0},
        "INPUT_SHAPE": (784,),
        "samples": 16_000,
        "EPOCHS": 2,
        "BATCH_SIZE": 32,
    },
    "cnn, batch 128": {
        "MODEL": "cnn",
        "MODEL_ARGS": {"filters": [32, 64], "activation": "relu", "dropout": 0.25},
        "INPUT_SHAPE": (28, 28, 1),
        "samples": 2_560,
        "EPOCHS": 1,
    },
}


def load_program(folder: Path, settings: dict) -> ModuleType:
    program = ModuleType("program")
    program.__file__ = str(folder / "train.py")
    exec(compile(joined("pytorch"), program.__file__, "exec"), vars(program))
    vars(program).update(settings, HERE=folder)
    return program


def ours(program: ModuleType, folder: Path) -> float:
    """Seconds from the first batch to the end of the last epoch."""
    times = []

    def report(event: str, **_: object) -> None:
        if event in ("started", "epoch"):
            times.append(clock())

    program.train(report=report, save_to=folder / "repeat")
    return times[-1] - times[0]


def channels_first(x: torch.Tensor) -> torch.Tensor:
    return x.movedim(-1, 1).contiguous() if x.dim() == 4 else x


def start(program: ModuleType, device: torch.device, *, fused: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = program.build_model().to(device).train()
    return model, torch.optim.Adam(model.parameters(), lr=0.001, fused=fused or None)


def plain(program: ModuleType, x: torch.Tensor, y: torch.Tensor, device: torch.device) -> float:
    model, optimizer = start(program, device, fused=False)
    loss_function = nn.CrossEntropyLoss()
    loader = DataLoader(TensorDataset(channels_first(x), y), batch_size=program.BATCH_SIZE, shuffle=True)
    losses, accuracies = [], []
    began = clock()
    for _ in range(program.EPOCHS):
        for inputs, labels in loader:
            inputs, labels = inputs.to(device), labels.to(device)  # noqa: PLW2901 - as people write it
            optimizer.zero_grad()
            outputs = model(inputs)
            loss = loss_function(outputs, labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            accuracies.append((outputs.argmax(1) == labels).float().mean().item())
    return clock() - began


def tight(program: ModuleType, x: torch.Tensor, y: torch.Tensor, device: torch.device) -> float:
    model, optimizer = start(program, device, fused=True)
    x, y = x.to(device), y.to(device)
    losses, accuracies = [], []
    began = clock()
    for _ in range(program.EPOCHS):
        for rows in torch.randperm(len(y), device=device).split(program.BATCH_SIZE):
            inputs, labels = x.index_select(0, rows), y.index_select(0, rows)
            outputs = model(inputs.movedim(-1, 1) if x.dim() == 4 else inputs)
            loss = nn.functional.cross_entropy(outputs, labels)
            losses.append(loss.detach())
            accuracies.append((outputs.argmax(1) == labels).float().mean())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    torch.stack(losses).tolist()
    torch.stack(accuracies).tolist()
    return clock() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--accelerator", choices=["cpu", "gpu"], default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.cpu_time:
        global clock  # noqa: PLW0603 - one clock for all loops
        clock = time.process_time
    device = torch.device("cuda:0" if options.accelerator == "gpu" else "cpu")
    print(f"{'':16}{'program':>14}{'against plain':>16}{'against tight':>16}")
    for name, case in CASES.items():
        settings = {key: value for key, value in case.items() if key.isupper()}
        settings |= {"ACCELERATOR": options.accelerator, "VALIDATION": False}
        rng = np.random.default_rng(0)
        x = rng.random((case["samples"], *case["INPUT_SHAPE"]), dtype=np.float32)
        y = rng.integers(0, 10, case["samples"])
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            (folder / "data").mkdir()
            np.save(folder / "data" / "x_train.npy", x)
            np.save(folder / "data" / "y_train.npy", y)
            program = load_program(folder, settings)
            tensors = torch.from_numpy(x), torch.from_numpy(y)
            loops = {
                "ours": lambda program=program, folder=folder: ours(program, folder),
                "plain": lambda program=program, tensors=tensors: plain(program, *tensors, device),
                "tight": lambda program=program, tensors=tensors: tight(program, *tensors, device),
            }
            for loop in loops.values():  # once without counting: caches, threads, first kernels
                loop()
            times = {name: [] for name in loops}
            for _ in range(options.repeats):
                for loop_name, loop in loops.items():
                    times[loop_name].append(loop())
        steps = program.EPOCHS * -(-case["samples"] // program.BATCH_SIZE)
        per_step = statistics.median(times["ours"]) / steps * 1e3
        ratios = [
            statistics.median(b / a for a, b in zip(times["ours"], times[other], strict=True))
            for other in ("plain", "tight")
        ]
        print(f"{name:16}{per_step:>8.3f} ms/step{ratios[0]:>14.2f} x{ratios[1]:>14.2f} x")


if __name__ == "__main__":
    main()
