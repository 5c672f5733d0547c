"""Runs of the Keras-on-JAX program on 1, 2 and 8 devices, and of the TensorFlow program, told as JSON.

JAX fixes its devices for a whole process, so `python jax_scenarios.py GROUP FOLDER` writes FOLDER/GROUP.json for
the group "tensorflow", or for a number of devices. The programs are what a reader gets, settings folded in.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import traceback
import types
from pathlib import Path

import numpy as np
from keras_scenarios import BASE, LINEAR, OPTIMIZERS, TRAIN, digits, store

from accel_nb.export import program_text

CNN = {"MODEL": "cnn", "MODEL_ARGS": {"filters": [4, 6], "activation": "silu", "dropout": 0.0}, "DROP_LAST": True}
DROPOUT = {"MODEL_ARGS": {"layers": [16], "activation": "relu", "dropout": 0.4}}
OWN = """
def own_model():
    import keras

    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.flat = keras.layers.Flatten()
            self.hidden = keras.layers.Dense(12, activation="tanh", kernel_regularizer="l2")
            self.out = keras.layers.Dense(10)

        def call(self, x):
            return self.out(self.hidden(self.flat(x)))

    return Net()
"""
OWN_NORMAL = """
def own_model():
    import keras

    layers = keras.layers
    inner = keras.Sequential([layers.BatchNormalization()])
    return keras.Sequential([keras.Input((8, 8, 1)), layers.Flatten(), inner, layers.Dense(10)])
"""
# Of 300 samples in batches of 64 the last one has 44; 37 is no multiple of 2 or 8 and leaves a last batch of 4.
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
    name: LINEAR | {"OPTIMIZER": name.split("_")[0], "OPTIMIZER_ARGS": args, "LEARNING_RATE": 0.01, "EPOCHS": 1}
    for name, args in OPTIMIZERS.items()
}  # fmt: skip
ACCUMULATED = {
    "accumulated": {"ACCUMULATE": 3, "OPTIMIZER_ARGS": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}},
    "accumulated_own": {"ACCUMULATE": 3, "MODEL": "own", "EPOCHS": 1},
}
WHOLE = {name: dict(more, ACCUMULATE=1) for name, more in ACCUMULATED.items()}


def program(engine: str, folder: Path, own: str = "", **settings):
    settings = BASE | {"ACCELERATOR": "cpu"} | settings
    (folder / "program.py").write_text(program_text(engine, settings, "A test.", own or None))
    module = types.ModuleType("program")
    module.__file__ = str(folder / "program.py")
    exec(compile((folder / "program.py").read_text(), module.__file__, "exec"), vars(module))
    return module


def begin_equal(module):
    """Make the program start from weights that do not depend on a framework's random numbers."""
    build = module.build_model

    def build_model():
        model = build()
        rng = np.random.default_rng(1)
        for weight in model.trainable_variables:
            if len(weight.shape) > 1:
                weight.assign(rng.normal(size=weight.shape) / np.sqrt(np.prod(weight.shape[:-1])))
        return model

    module.build_model = build_model
    return module


class HostDevicesAsTPU:
    """JAX, on a machine whose host devices it takes for TPU chips: the lines for a TPU run, on these."""

    def __init__(self, real) -> None:
        self.real = real

    def __getattr__(self, name):
        return getattr(self.real, name)

    def devices(self, kind):
        return self.real.devices("cpu" if kind == "tpu" else kind)


class Compilations(logging.Handler):
    """How often JAX compiled each function."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[str, int] = {}

    def emit(self, record) -> None:
        found = re.match(r"Compiling (?:jit\()?(\w+)", record.getMessage())
        if found:
            self.made[found[1]] = self.made.get(found[1], 0) + 1


compilations = Compilations()


def listen() -> None:
    """Count JAX's compilations from here on, in a process that has not imported Keras yet."""
    os.environ["KERAS_BACKEND"] = "jax"
    import jax

    jax.config.update("jax_log_compiles", True)
    logging.getLogger("jax").addHandler(compilations)
    logging.getLogger("jax").propagate = False


def told(module, control=None) -> dict:
    """What a run reported, what it compiled, its weights at the end, and its error if it ended in one."""
    events: list[dict] = []
    out = {"events": events, "error": None}
    compilations.made = {}
    calls = 0

    def counted():
        nonlocal calls
        calls += 1
        return control(calls) if control else {}

    try:
        module.train(report=lambda event, **v: events.append({"event": event, **v}), control=counted,
                     save_to=module.HERE / "repeat")  # fmt: skip
    except Exception as error:
        out["error"] = f"{type(error).__name__}: {error}"
        out["traceback"] = traceback.format_exc()
        return out
    names = ("train_block", "update", "val_step", "take")
    out["compiled"] = {name: count for name, count in compilations.made.items() if name in names}
    out["files"] = sorted(path.name for path in (module.HERE / "repeat").glob("*"))
    model = module.load_model(module.HERE / "repeat/model.keras")
    out["weights"] = [weight.tolist() for weight in model.get_weights() if weight.dtype.kind == "f"]
    return out


def homes(folder: Path) -> dict[str, Path]:
    x, y = digits()
    targets = np.stack([x.mean((1, 2, 3)), x.max((1, 2, 3))], axis=1) / 16
    return {
        "plain": store(folder / "plain", x / 16, y),
        "bytes": store(folder / "bytes", x.astype("uint8"), y),
        "regression": store(folder / "regression", x / 16, targets.astype("float32")),
    }


def same_runs(engine: str, home: dict[str, Path], runs: dict[str, dict], **more) -> dict:
    out = {}
    for name, settings in runs.items():
        own = OWN if settings.get("MODEL") == "own" else ""
        module = program(engine, home.get(name, home["plain"]), own, **settings, **more)
        out[name] = told(begin_equal(module))
    return out


def group_tensorflow(folder: Path) -> dict:
    return same_runs("tensorflow", homes(folder), SAME | WHOLE, STRATEGY="single")


def group_1(folder: Path) -> dict:
    listen()
    home = homes(folder)
    out = same_runs("keras_jax", home, {name: SAME[name] for name in ("mlp", "odd", "cnn")}, STRATEGY="single")
    out |= same_runs("keras_jax", home, {"accumulated": ACCUMULATED["accumulated"]})
    out["dropout"] = told(program("keras_jax", home["plain"], **DROPOUT))
    return out


def group_8(folder: Path) -> dict:
    listen()
    home = homes(folder)
    out = same_runs("keras_jax", home, SAME | ACCUMULATED, DEVICES=8)
    out["dropout"] = told(program("keras_jax", home["plain"], **DROPOUT, DEVICES=8))
    return out


def group_2(folder: Path) -> dict:
    """Two devices: what differs from eight, and what does not depend on the number of devices."""
    listen()

    home = homes(folder)
    plain = home["plain"]
    two = {"DEVICES": 2}
    out = same_runs("keras_jax", home, {"odd": SAME["odd"], "cnn": SAME["cnn"]}, **two)
    for name, more in {
        "dropout": DROPOUT,
        "dropout_blocks_of_one": DROPOUT | {"BLOCK_SECONDS": 1e-9},
        "dropout_long_blocks": DROPOUT | {"BLOCK_SECONDS": 1e9},
        "dropout_streamed": DROPOUT | {"DATA_ON_DEVICE": False},
        "explodes": {"OPTIMIZER": "sgd", "LEARNING_RATE": 1e30,
                     "OPTIMIZER_ARGS": {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0}},
        "no_tpu": {"ACCELERATOR": "tpu"},
        "too_many": {"DEVICES": 3},
    }.items():  # fmt: skip
        out[name] = told(blocks_of(program("keras_jax", plain, **two | settings_in(more)), more))
    module = program("keras_jax", plain, ACCELERATOR="tpu", **two)
    module.jax = HostDevicesAsTPU(module.jax)
    out["as_on_tpu"] = told(begin_equal(module))
    out["own_normal"] = told(program("keras_jax", plain, OWN_NORMAL, MODEL="own", **two))
    module = blocks_of(program("keras_jax", plain, **two), {"BLOCK_SECONDS": 1e-9})
    out["new_rate"] = told(module, lambda call: {"learning_rate": 0.1} if call > 3 else {})
    model = module.load_model(plain / "repeat/model.keras")
    x_val, y_val = np.load(plain / "data/x_val.npy"), np.load(plain / "data/y_val.npy")
    out["new_rate"]["evaluate"] = [float(v) for v in model.evaluate(x_val, y_val, verbose=0)]

    module = blocks_of(program("keras_jax", plain, **DROPOUT, **two), {"BLOCK_SECONDS": 1e-9})
    stopped = told(module, lambda call: {"stop": True} if call > 7 else {})
    state, (weights, moments) = module.read_arrays(plain / "repeat/checkpoint.npz")
    stopped["state"] = {name: state[name] for name in ("step", "epoch", "position", "learning_rate")}
    stopped["draws"] = [int(array[1]) for array in weights if array.dtype == np.uint32]
    stopped["iterations"] = int(moments[0])
    stopped["moments"] = max(float(np.abs(array).max()) for array in moments[2:])
    rest: list[dict] = []
    module.train(lambda event, **v: rest.append({"event": event, **v}), dict, plain / "repeat",
                 plain / "repeat/checkpoint.npz")  # fmt: skip
    stopped["resumed"] = [loss for event in rest if event["event"] == "batch" for loss in event["loss"]]
    out["stopped"] = stopped
    out["bf16"] = told(program("keras_jax", plain, PRECISION="bf16", **two))  # last: its policy stays
    return out


def settings_in(more: dict) -> dict:
    return {name: value for name, value in more.items() if name != "BLOCK_SECONDS"}


def blocks_of(module, more: dict):
    module.BLOCK_SECONDS = more.get("BLOCK_SECONDS", module.BLOCK_SECONDS)
    return module


def group_resnet50(folder: Path) -> dict:
    """One step with four images on two devices."""
    listen()
    x, y = digits()
    home = store(folder / "few", x[:TRAIN], y[:TRAIN])
    for name in ("x_train", "y_train"):
        np.save(home / f"data/{name}.npy", np.load(home / f"data/{name}.npy")[:4])
    settings = {"MODEL": "resnet50", "MODEL_ARGS": {}, "EPOCHS": 1, "BATCH_SIZE": 4, "VALIDATION": False}
    module = program("keras_jax", home, **settings, DEVICES=2)
    module.load_model = lambda path: types.SimpleNamespace(get_weights=list)  # 100 MB of JSON would tell nothing
    return {"resnet50": told(module)}


def main() -> None:
    group, folder = sys.argv[1], Path(sys.argv[2])
    out = globals()[f"group_{group}"](folder)
    (folder / f"{group}.json").write_text(json.dumps(out))


if __name__ == "__main__":
    main()
