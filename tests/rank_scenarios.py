"""Runs of the PyTorch program on several ranks, one after the other: what tests/test_programs_ranks.py looks at.

Under torchrun, `rank_scenarios.py FOLDER STRATEGY:NAME...` trains each scenario; what rank R heard and ended with
is in FOLDER/NAME-STRATEGY-COUNT/R.json, the saved files beside it. Each scenario also runs in a single process.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
from pytorch_program import digits, load
from torch import nn

PLAIN = {"layers": [24], "activation": "relu", "dropout": 0.0}
ADAM = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
SGD = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
RMSPROP = {"alpha": 0.9, "eps": 1e-6, "momentum": 0.5, "weight_decay": 0.01}
BASE = {"MODEL": "mlp", "MODEL_ARGS": PLAIN, "BATCH_SIZE": 32, "EPOCHS": 2, "LEARNING_RATE": 0.003}
CNN = {"MODEL": "cnn", "MODEL_ARGS": {"filters": [4, 8], "activation": "relu", "dropout": 0.0}, "X_SCALE": 16.0}
STEPWISE = {"BLOCK_SECONDS": 0}  # a block of one step each

# name -> training samples, validation samples, settings; "images" is told by the model
SCENARIOS = {
    "uneven": (301, 70, {}),  # a last batch of 13
    "one row": (65, 33, {"OPTIMIZER": "adamw", "OPTIMIZER_ARGS": ADAM | {"weight_decay": 0.1}}),
    "one small batch": (21, 1, {"OPTIMIZER": "sgd", "OPTIMIZER_ARGS": SGD}),
    "odd": (100, 301, {"BATCH_SIZE": 33, "OPTIMIZER": "rmsprop", "OPTIMIZER_ARGS": RMSPROP}),
    "drop last": (70, 5, {"DROP_LAST": True, "SCHEDULE": "cosine", "WARMUP_STEPS": 2}),
    "accumulate": (71, 40, {"ACCUMULATE": 3}),  # a last batch of 7
    "accumulate little": (65, 0, {"ACCUMULATE": 3, "VALIDATION": False}),  # a last batch of one row
    "regression": (100, 37, {"TASK": "regression", "OUTPUTS": 2}),
    "streamed": (301, 70, {"DATA_ON_DEVICE": False}),
    "streamed images": (67, 35, {**CNN, "DATA_ON_DEVICE": False}),
    "cnn": (67, 35, CNN),  # a last batch of 3: fewer than four ranks
    "cnn dropout": (67, 35, {**CNN, "MODEL_ARGS": {**CNN["MODEL_ARGS"], "dropout": 0.5}}),
    "resnet50": (10, 0, {"MODEL": "resnet50", "MODEL_ARGS": {}, "X_SCALE": 16.0, "OUTPUTS": 3, "VALIDATION": False,
                        "BATCH_SIZE": 6, "EPOCHS": 1, "OPTIMIZER": "sgd", "OPTIMIZER_ARGS": SGD}),
    "own": (67, 35, {"MODEL": "own", "X_SCALE": 16.0}),
    "bf16": (100, 40, {"PRECISION": "bf16"}),
    "fp16": (100, 40, {"PRECISION": "fp16"}),
    "fp16 overflow": (100, 0, {"PRECISION": "fp16", "VALIDATION": False}),
    "again": (100, 40, {"ACTIVATION_CHECKPOINTING": True}),
    "cnn again": (67, 35, {**CNN, "ACTIVATION_CHECKPOINTING": True}),
    "own again": (67, 35, {"MODEL": "own", "X_SCALE": 16.0, "ACTIVATION_CHECKPOINTING": True}),
    "own in two": (67, 35, {"MODEL": "own", "X_SCALE": 16.0, **STEPWISE}),
    "stop": (301, 70, STEPWISE),
    "rate": (301, 0, {"VALIDATION": False, **STEPWISE}),
    "diverges": (100, 0, {"VALIDATION": False, "LEARNING_RATE": 1e30, "OPTIMIZER": "sgd", "OPTIMIZER_ARGS": SGD}),
}  # fmt: skip
RESUMED = ("own in two",)  # stopped, then taken up again
CONTROLS = {"stop": (13, {"stop": True}), "own in two": (3, {"stop": True}), "rate": (6, {"learning_rate": 0.001})}


class Own(nn.Module):
    """A user's model with all that is awkward: no empty batch, batch norm, a weight twice and one never used."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, bias=False)  # a bias has a gradient of 0, whose rounding Adam blows up
        self.norm = nn.BatchNorm2d(4, momentum=None)
        self.towers = nn.ModuleList([nn.Linear(144, 16), nn.Linear(144, 16)])
        self.bottom, self.top = nn.Linear(16, 16), nn.Linear(16, 16)
        self.top.weight = self.bottom.weight
        self.out = nn.Linear(16, 10)
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Parameter(torch.ones(16), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.conv(x))).view(len(x), -1)  # fails on a batch of none
        x = sum(tower(x) for tower in self.towers)
        return self.out(self.top(torch.tanh(self.bottom(x)) * self.frozen))


def own_model() -> nn.Module:
    model = Own()
    with torch.no_grad():  # random in a way that no seed of the program's tames
        model.out.bias.copy_(torch.from_numpy(np.random.default_rng(OWN_SEED).normal(size=10)))
    return model


OWN_SEED = int(os.environ.get("RANK", "0"))
PORTS = iter(os.environ.get("PORTS", "").split())


def store(folder: Path, name: str) -> dict:
    """The scenario's data as files, once; its settings."""
    samples, validation, settings = SCENARIOS[name]
    images = settings.get("MODEL", "mlp") != "mlp"
    x, y, x_val, y_val = digits(samples, validation, images=images)
    if settings.get("TASK") == "regression":
        weights = np.random.default_rng(0).normal(size=(64, 2)).astype(np.float32)
        y, y_val = x @ weights, x_val @ weights
    if name == "resnet50":
        y, y_val = y % 3, y_val % 3
    if int(os.environ.get("RANK", "0")) == 0:
        (folder / "data").mkdir(parents=True)
        for file, array in {"x_train": x, "y_train": y, "x_val": x_val, "y_val": y_val}.items():
            np.save(folder / "data" / f"{file}.npy", array)
    return {**BASE, "INPUT_SHAPE": x.shape[1:], **settings}


def scenario(home: Path, name: str, strategy: str) -> dict:
    """Train it; what this process heard, computed and ended with."""
    count, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    folder = home / f"{name}-{strategy}-{count}"
    program = load(folder / "train.py")
    settings = store(folder, name)
    assert settings.keys() <= vars(program).keys()
    vars(program).update(settings, STRATEGY=strategy, HERE=folder, own_model=own_model)
    events, rows, saved, kept = [], [], {}, []
    shares, save = program.shares, program.save

    def noted_shares(order, size):
        for share in shares(order, size):
            chosen = share if strategy == "single" else share[1]
            rows.append((len(order), chosen.tolist()))
            yield share

    def noted_save(content, path):
        weights = content if path.name == "model.pt" else content["model"]
        saved[path.name] = hashlib.sha1(b"".join(w.numpy().tobytes() for w in weights.values() if w is not None))
        save(content, path)

    after, wish = CONTROLS.get(name, (0, {}))
    calls = iter(range(10**9))
    if name == "fp16 overflow":
        program.forward = overflowing(program.forward)
    program.shares, program.save = noted_shares, noted_save
    if strategy == "fsdp":
        program.shard = noted_shard(program.shard, kept)
    error = ""
    # Fifty batch norms of a few values each make much of float32's rounding: in float64 the mathematics shows.
    torch.set_default_dtype(torch.float64 if name == "resnet50" else torch.float32)

    def train(**more):
        if strategy != "single":  # ranks that meet again and again need another place each time
            os.environ.update(MASTER_PORT=next(PORTS), TORCHELASTIC_USE_AGENT_STORE="False")
        program.train(
            report=lambda event, **values: events.append([event, values]), save_to=folder / "out", **more
        )

    try:
        train(control=lambda: wish if next(calls) >= after else {})
        if name in RESUMED:
            train(resume_from=folder / "out" / "checkpoint.pt")
    except FloatingPointError as problem:
        error = str(problem)
        if strategy != "single":
            torch.distributed.destroy_process_group()  # as the end of a process does
    return {
        "rank": rank,
        "events": events,
        "asked": next(calls),
        "rows": [chosen for length, chosen in rows if length == SCENARIOS[name][0]],
        "kept": kept,
        "seed": torch.initial_seed(),
        "saved": {name: digest.hexdigest() for name, digest in saved.items()},
        "error": error,
    }


def noted_shard(shard, kept):
    """Notes how many weights this rank keeps of how many."""

    def noted(model, device, ranks):
        shard(model, device, ranks)
        kept[:] = [
            sum(part(p).numel() for p in model.parameters()) for part in (lambda p: p.to_local(), lambda p: p)
        ]

    return noted


def overflowing(forward):
    """Outputs that are too large for float16 in the second step, on the last rank only."""
    steps = iter(range(10**9))
    last = int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1

    def scaled(model, x):
        return forward(model, x) * (1e30 if last and next(steps) == 1 else 1.0)

    return scaled


def main() -> None:
    torch.set_num_threads(1)
    home, count, rank = Path(sys.argv[1]), os.environ["WORLD_SIZE"], os.environ["RANK"]
    for wanted in sys.argv[2:]:
        strategy, name = wanted.split(":")
        told = scenario(home, name, strategy)
        (home / f"{name}-{strategy}-{count}" / f"{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
