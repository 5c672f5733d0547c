"""Runs of the torch_xla program on 1, 2 and 4 devices that the CPU plays, and of the plain PyTorch one, as JSON.

The number of devices is fixed for a whole process, so `python xla_scenarios.py GROUP FOLDER` writes
FOLDER/GROUP.json for the group "pytorch", a number of devices, or "resnet50". The programs are what a reader gets.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import types
from pathlib import Path

import numpy as np

from accel_nb.export import program_text

TRAIN, VAL = 300, 97
BASE = {
    "MODEL": "mlp",
    "MODEL_ARGS": {"layers": [16], "activation": "relu", "dropout": 0.0},
    "INPUT_SHAPE": (8, 8, 1),
    "OUTPUTS": 10,
    "BATCH_SIZE": 64,
    "EPOCHS": 2,
    "ACCELERATOR": "cpu",
}
CNN = {"MODEL": "cnn", "MODEL_ARGS": {"filters": [4, 6], "activation": "silu", "dropout": 0.0}, "DROP_LAST": True}
LINEAR = {"MODEL_ARGS": {"layers": [], "activation": "relu", "dropout": 0.0}, "LEARNING_RATE": 0.01, "EPOCHS": 1}
DROPOUT = {"MODEL_ARGS": {"layers": [16], "activation": "relu", "dropout": 0.4}}
OPTIMIZERS = {
    "sgd": {"momentum": 0.9, "nesterov": False, "weight_decay": 0.1},
    "sgd_nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.0},
    "sgd_plain": {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0},
    "adam": {"betas": (0.8, 0.99), "eps": 1e-8, "weight_decay": 0.1},
    "adamw": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1},
    "rmsprop": {"alpha": 0.9, "eps": 1e-8, "momentum": 0.5, "weight_decay": 0.01},
}
OWN = """
def own_model():
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden = torch.nn.Linear(64, 12)
            self.out = torch.nn.Linear(12, 10)

        def forward(self, x):
            return self.out(torch.tanh(self.hidden(x.reshape(len(x), -1))))

    return Net()
"""
OWN_NORMAL = """
def own_model():
    from torch import nn

    return nn.Sequential(nn.Flatten(), nn.Sequential(nn.BatchNorm1d(64)), nn.Linear(64, 10))
"""
# Of 300 samples in batches of 64 the last one has 44; 37 is no multiple of 2 or 4 and leaves a last batch of 4.
SAME = {
    "mlp": {},
    "odd": {"BATCH_SIZE": 37, "EPOCHS": 1},
    "cnn": CNN,
    "streamed": {"DATA_ON_DEVICE": False},
    "bytes": {"X_SCALE": 16.0, "EPOCHS": 1},
    "regression": {"TASK": "regression", "OUTPUTS": 2, "EPOCHS": 1},
    "own": {"MODEL": "own", "EPOCHS": 1},
    "schedule": {"SCHEDULE": "cosine", "WARMUP_STEPS": 3, "LEARNING_RATE": 0.01},
} | {
    name: LINEAR | {"OPTIMIZER": name.split("_")[0], "OPTIMIZER_ARGS": args} for name, args in OPTIMIZERS.items()
}  # fmt: skip
ACCUMULATED = {
    "accumulated": {"ACCUMULATE": 3},
    "accumulated_streamed": {"ACCUMULATE": 2, "DATA_ON_DEVICE": False, "EPOCHS": 1},
}
WHOLE = {name: more | {"ACCUMULATE": 1} for name, more in ACCUMULATED.items()}


def homes(folder: Path) -> dict[str, Path]:
    from sklearn.datasets import load_digits

    scans = load_digits()
    x, y = scans.images[..., None].astype("float32"), scans.target.astype("int64")
    targets = np.stack([x.mean((1, 2, 3)), x.max((1, 2, 3))], axis=1) / 16
    return {
        "plain": store(folder / "plain", x / 16, y),
        "bytes": store(folder / "bytes", x.astype("uint8"), y),
        "regression": store(folder / "regression", x / 16, targets.astype("float32")),
    }


def store(folder: Path, x: np.ndarray, y: np.ndarray, samples: int = TRAIN) -> Path:
    (folder / "data").mkdir(parents=True)
    for name, array in (("x", x), ("y", y)):
        np.save(folder / f"data/{name}_train.npy", array[:samples])
        np.save(folder / f"data/{name}_val.npy", array[TRAIN : TRAIN + VAL])
    return folder


def program(engine: str, folder: Path, own: str = "", **settings):
    (folder / "program.py").write_text(program_text(engine, BASE | settings, "A test.", own or None))
    module = types.ModuleType("program")
    module.__file__ = str(folder / "program.py")
    exec(compile((folder / "program.py").read_text(), module.__file__, "exec"), vars(module))
    os.environ["PJRT_DEVICE"] = (
        "CPU"  # a program forgets it for the sake of its own process; here several share one
    )
    return module


def compilations() -> int:
    if "torch_xla" not in sys.modules:
        return 0
    from torch_xla.debug import metrics

    return metrics.counter_value("UncachedCompile") or 0


def told(module, control=None, **more) -> dict:
    """What a run reported, how many graphs it compiled, its weights at the end, and its error if it has one."""
    events: list[dict] = []
    out = {"events": events, "error": None}
    calls, before = 0, compilations()

    def counted():
        nonlocal calls
        calls += 1
        return control(calls) if control else {}

    try:
        module.train(report=lambda event, **v: events.append({"event": event, **v}), control=counted,
                     save_to=module.HERE / "repeat", **more)  # fmt: skip
    except Exception as error:
        out["error"] = f"{type(error).__name__}: {error}"
        out["traceback"] = traceback.format_exc()
        return out
    out["compiled"] = compilations() - before
    out["files"] = sorted(path.name for path in (module.HERE / "repeat").glob("*"))
    weights = module.load_model(module.HERE / "repeat/model.pt").state_dict()
    out["weights"] = {name: weight.tolist() for name, weight in weights.items()}
    return out


def same_runs(engine: str, home: dict[str, Path], runs: dict[str, dict], **more) -> dict:
    out = {}
    for name, settings in runs.items():
        own = OWN if settings.get("MODEL") == "own" else ""
        out[name] = told(program(engine, home.get(name, home["plain"]), own, **settings, **more))
    return out


def group_pytorch(folder: Path) -> dict:
    return same_runs("pytorch", homes(folder), SAME | WHOLE, STRATEGY="single")


def group_1(folder: Path) -> dict:
    home = homes(folder)
    out = same_runs("torch_xla", home, {name: SAME[name] for name in ("mlp", "odd", "cnn")}, STRATEGY="single")
    out |= same_runs("torch_xla", home, {"accumulated": ACCUMULATED["accumulated"]})
    out["dropout"] = told(program("torch_xla", home["plain"], **DROPOUT))
    out["bf16"] = told(program("torch_xla", home["plain"], **DROPOUT, PRECISION="bf16"))
    return out


def group_4(folder: Path) -> dict:
    home = homes(folder)
    out = same_runs("torch_xla", home, SAME | ACCUMULATED, DEVICES=4)
    out["dropout"] = told(program("torch_xla", home["plain"], **DROPOUT, DEVICES=4))
    return out


def group_2(folder: Path) -> dict:
    """Two devices: what differs from four, and what does not depend on the number of devices."""
    import torch

    home = homes(folder)
    plain = home["plain"]
    two = {"DEVICES": 2}
    out = same_runs("torch_xla", home, {"odd": SAME["odd"], "cnn": SAME["cnn"]}, **two)
    for name, more in {
        "dropout": DROPOUT,
        "dropout_blocks_of_one": DROPOUT | {"BLOCK_SECONDS": 1e-9},
        "dropout_long_blocks": DROPOUT | {"BLOCK_SECONDS": 1e9},
        "dropout_streamed": DROPOUT | {"DATA_ON_DEVICE": False},
        "explodes": {"OPTIMIZER": "sgd", "LEARNING_RATE": 1e30, "OPTIMIZER_ARGS": OPTIMIZERS["sgd_plain"]},
        "too_many": {"DEVICES": 3},
    }.items():
        out[name] = told(blocks_of(program("torch_xla", plain, **two | settings_in(more)), more))
    out["own_normal"] = told(program("torch_xla", plain, OWN_NORMAL, MODEL="own", **two))
    module = blocks_of(program("torch_xla", plain, **two), {"BLOCK_SECONDS": 1e-9})
    out["new_rate"] = told(module, lambda call: {"learning_rate": 0.1} if call > 3 else {})
    x_val, y_val = (torch.from_numpy(np.load(plain / f"data/{name}_val.npy")) for name in "xy")
    with torch.no_grad():
        logits = module.load_model(plain / "repeat/model.pt")(x_val)
    loss = torch.nn.functional.cross_entropy(logits, y_val).item()
    out["new_rate"]["evaluate"] = [loss, (logits.argmax(1) == y_val).double().mean().item()]

    module = blocks_of(program("torch_xla", plain, **DROPOUT, **two), {"BLOCK_SECONDS": 1e-9})
    out["stopped"] = told(module, lambda call: {"stop": True} if call > 7 else {})
    (plain / "repeat/checkpoint.pt").rename(plain / "seven.pt")
    for name, more in {"resumed": {}, "resumed_streamed": {"DATA_ON_DEVICE": False}}.items():
        module = program("torch_xla", plain, **DROPOUT, **two, **more)
        out[name] = told(module, resume_from=plain / "seven.pt")
    state = torch.load(plain / "seven.pt", weights_only=True)
    names = ("step", "epoch", "position", "learning_rate")
    out["stopped"]["state"] = {name: state[name] for name in names}
    model = module.build_model()  # a plain one, and a plain optimizer: both take what was saved
    model.load_state_dict(state["model"])
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.load_state_dict(state["optimizer"])
    optimizer.zero_grad()
    model(x_val).sum().backward()
    optimizer.step()
    out["stopped"]["steps"] = [float(one["step"]) for one in optimizer.state.values()]
    return out


def settings_in(more: dict) -> dict:
    return {name: value for name, value in more.items() if name != "BLOCK_SECONDS"}


def blocks_of(module, more: dict):
    module.BLOCK_SECONDS = more.get("BLOCK_SECONDS", module.BLOCK_SECONDS)
    return module


def group_resnet50(folder: Path) -> dict:
    """One step with four images on two devices."""
    home = store(folder / "few", np.random.default_rng(0).random((TRAIN + VAL, 8, 8, 1), np.float32),
                 np.arange(TRAIN + VAL) % 10, samples=4)  # fmt: skip
    settings = {"MODEL": "resnet50", "MODEL_ARGS": {}, "EPOCHS": 1, "BATCH_SIZE": 4, "VALIDATION": False}
    out = {}
    for engine, more in (("torch_xla", {"DEVICES": 2}), ("pytorch", {"STRATEGY": "single"})):
        run = told(program(engine, home, **settings, **more))
        run.pop("weights")  # 100 MB of JSON would tell nothing
        out[engine] = run
    return out


def main() -> None:
    group, folder = sys.argv[1], Path(sys.argv[2])
    out = globals()[f"group_{group}"](folder)
    (folder / f"{group}.json").write_text(json.dumps(out))


if __name__ == "__main__":
    main()
