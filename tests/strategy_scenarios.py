"""Runs of the Keras program on several devices, told as JSON: what tests/test_programs_strategies.py looks at.

TensorFlow's devices belong to a whole process, and workers are processes of their own; so many runs share a start.
`python strategy_scenarios.py GROUP FOLDER` writes FOLDER/GROUP.json; a worker writes its number into the name.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
import types
from pathlib import Path

import numpy as np
from keras_scenarios import BASE, OPTIMIZERS, CountingTensorFlow, digits, told

from accel_nb.export import program_text, settings_of

MLP = {"MODEL_ARGS": {"layers": [8], "activation": "tanh", "dropout": 0.0}}
CNN = {"MODEL": "cnn", "MODEL_ARGS": {"filters": [4], "activation": "relu", "dropout": 0.0}}
DROPOUT = {"MODEL_ARGS": {"layers": [16], "activation": "relu", "dropout": 0.2}}
# name: samples, settings. A batch is of 64 unless told; one row at the end is the hardest to share.
CASES = {
    "one_left": (129, MLP),
    "tiny": (7, MLP | {"BATCH_SIZE": 3}),
    "cnn": (129, CNN),
    "cnn_even": (128, CNN),
    "cnn_parts": (129, CNN | {"ACCUMULATE": 3}),
    "parts": (131, MLP | {"ACCUMULATE": 3, "X_SCALE": 16.0}),
    "files_parts": (131, MLP | {"DATA_ON_DEVICE": False, "ACCUMULATE": 3}),
    "regression": (50, MLP | {"TASK": "regression", "OUTPUTS": 2, "ACCUMULATE": 2}),  # fewer samples than a batch
    "own": (130, {"MODEL": "own"}),
    "own_even": (128, {"MODEL": "own"}),
    "own_norm": (130, {"MODEL": "own"}),
    "own_mixed": (130, {"MODEL": "own"}),
    "bf16": (129, MLP | {"PRECISION": "bf16"}),
    "fp16": (129, MLP | {"PRECISION": "fp16", "ACCUMULATE": 2}),
    **{
        name: (130, MLP | {"OPTIMIZER": name, "OPTIMIZER_ARGS": OPTIMIZERS[name], "LEARNING_RATE": 0.01,
                           "BATCH_SIZE": 63})
        for name in ("sgd", "adam")
    },
}  # fmt: skip
VAL = 65  # one left over
ELSEWHERE = ("cnn_even", "own_even", "own_mixed", "bf16", "adam")
MIRRORED = [name for name in CASES if name not in ELSEWHERE]
TPU = ["tiny", "parts", "files_parts", "cnn_even", "own_even", "adam"]
XLA = ["one_left", "parts", "cnn_even", "bf16"]
FOUR = ["cnn", "files_parts"]
WORKERS = ["one_left", "cnn", "parts", "files_parts", "own_mixed", "fp16", "adam"]


def data(folder: Path, name: str) -> None:
    """The arrays of a case."""
    x, y = digits()
    x = x.astype("uint8") if name == "parts" else x / 16
    if name == "regression":
        y = np.stack([x.mean((1, 2, 3)), x.max((1, 2, 3))], axis=1).astype("float32")
    if name == "fp16":
        x[np.random.default_rng([0, 0]).permutation(129)[65]] *= 1e6  # of the second batch, for the second replica
    samples, _ = CASES[name]
    (folder / "data").mkdir(parents=True)
    for kind, array in (("x", x), ("y", y)):
        np.save(folder / "data" / f"{kind}_train.npy", array[:samples])
        np.save(folder / "data" / f"{kind}_val.npy", array[300 : 300 + (64 if name.endswith("even") else VAL)])


def program(folder: Path, name: str, **settings):
    """The program of a case as a reader gets it, with its data, ready to train; its model is kept in `kept`."""
    import keras

    keras.config.set_dtype_policy("float32")  # the last program of this process may have left another
    if not folder.exists():
        data(folder, name)
    settings = BASE | CASES[name][1] | settings
    text = program_text("tensorflow", settings, "A test.")
    module = types.ModuleType("program")
    module.__file__ = str(folder / "program.py")
    Path(module.__file__).write_text(text)  # AutoGraph reads the source of what it compiles
    exec(compile(text, module.__file__, "exec"), vars(module))
    assert settings_of(text).get("STRATEGY", "single") == settings.get("STRATEGY", "single")
    module.tf = CountingTensorFlow(module.tf)
    module.BLOCK_SECONDS = 1e9
    module.own_model = lambda: own_model(name)
    module.kept = []
    build = module.build_model

    def build_and_keep():
        module.kept.append(build())
        return module.kept[0]

    module.build_model = build_and_keep
    return module


def own_model(name: str):
    """A user's model: with losses of activations, with batch normalisation, or with both."""
    import keras

    layers = keras.layers
    activity = None if name == "own_norm" else "l2"
    norm = [layers.BatchNormalization(momentum=0.9)] if name in ("own_norm", "own_mixed") else []
    hidden = layers.Dense(8, use_bias=False, kernel_regularizer="l2", activity_regularizer=activity)
    last = layers.Dense(10, bias_regularizer="l1")
    return keras.Sequential(
        [keras.Input((8, 8, 1)), layers.Flatten(), hidden, *norm, layers.Activation("tanh"), last]
    )


def spread(module, strategy) -> dict:
    """What became of the model: the copies of its variables on the replicas of this process."""
    [model] = module.kept[:1]
    copies = {
        v.path: [np.asarray(c) for c in strategy.experimental_local_results(v.value)] for v in model.variables
    }
    seeds = [[c.tolist() for c in values] for path, values in copies.items() if "seed_generator" in path]
    equal = {path for path, values in copies.items() if all(np.array_equal(c, values[0]) for c in values)}
    return {
        "unequal": [path for path in copies if path not in equal and "seed_generator" not in path],
        "seeds": seeds,
        "weights": [v.numpy().tolist() for v in model.trainable_variables],
        "iterations": int(model.optimizer.iterations.numpy()),
        "learning_rate": float(model.optimizer.learning_rate.numpy()),
    }


def run(folder: Path, name: str, strategy=None, control=dict, blocks=1e9, **settings) -> dict:
    """One run. A process makes one strategy, as TensorFlow's collectives want it."""
    module = program(folder, name, **settings)
    module.BLOCK_SECONDS = blocks
    if strategy is not None:
        module.make_strategy = lambda: strategy
    out = told(module, control)
    if out["error"] is None and strategy is not None:
        out |= spread(module, strategy)
    return out


def checkpoint(folder: Path) -> dict:
    with np.load(folder / "repeat/checkpoint.npz") as stored:
        arrays = {name: stored[name].tolist() for name in stored.files if name != "progress"}
        return {"progress": json.loads(str(stored["progress"])), "arrays": arrays}


def prepared() -> None:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.get_logger().setLevel("ERROR")  # many programs in one process look like one that compiles again and again


def stored(path: Path, name: str) -> dict:
    """A saved model, loaded in a process without a strategy."""
    module = program(path.parent.parent, name)
    model = module.load_model(path)
    optimizer = getattr(model, "optimizer", None)  # of an own model only the weights are in the file
    return {
        "weights": [v.numpy().tolist() for v in model.trainable_variables],
        "statistics": [v.numpy().tolist() for v in model.non_trainable_variables if "moving" in v.path],
        "synchronized": [layer.synchronized for layer in model.layers if hasattr(layer, "synchronized")],
        "moments": [v.numpy().tolist() for v in optimizer.variables[2:]] if optimizer else [],
        "iterations": int(optimizer.iterations.numpy()) if optimizer else None,
    }


def compiled_strategy():
    """One device, each step compiled by XLA as on a TPU: what XLA cannot compile fails here."""
    import tensorflow as tf

    class Compiled(tf.distribute.OneDeviceStrategy):
        def run(self, fn, args=(), kwargs=None, options=None):
            compiled = tf.function(fn, autograph=False, jit_compile=True)
            return super().run(compiled, args, kwargs, options)

    return Compiled("/cpu:0")


def steered(call: int) -> dict:
    """A new learning rate before the third block, the end before the fifth."""
    return {1: {}, 2: {}, 3: {"learning_rate": 0.1}, 4: {"learning_rate": 0.1}}.get(call, {"stop": True})


def group_plain(folder: Path) -> dict:
    """Each case on one device, some as on one TPU chip; then the models that all groups have left."""
    prepared()
    home = folder / "plain"
    out = {
        "no_tpu": run(home / "no_tpu", "one_left", STRATEGY="tpu", ACCELERATOR="tpu")
    }  # all others run after it
    out |= {name: run(home / name, name) for name in CASES}
    out["whole"] = run(home / "whole", "parts", ACCUMULATE=1)
    out["many"] = run(home / "many", "parts", ACCUMULATE=60)
    out["steered"] = run(home / "steered", "one_left", None, steered, 1e-9, **DROPOUT) | checkpoint(
        home / "steered"
    )
    xla = compiled_strategy()
    out |= {f"xla/{name}": run(home / f"xla_{name}", name, xla, STRATEGY="tpu") for name in XLA}
    found = {path.parts[-4:-2]: path for path in sorted(folder.glob("*/*/repeat/model.keras"))}
    out["stored"] = {
        f"{group}/{name}": stored(path, name) for (group, name), path in found.items() if name in CASES
    }
    return out


def group_two(folder: Path) -> dict:
    """Two processors that one plays."""
    prepared()
    two = {"DEVICES": 2, "STRATEGY": "mirrored"}
    strategy = program(folder / "two/first", "one_left", **two).make_strategy()
    out = {f"mirrored/{name}": run(folder / "mirrored" / name, name, strategy, **two) for name in MIRRORED}
    out["mixed"] = run(folder / "two/mixed", "own_mixed", strategy, **two)
    home = folder / "mirrored/steered"
    out["steered"] = run(home, "one_left", strategy, steered, 1e-9, **two, **DROPOUT) | checkpoint(home)
    two["STRATEGY"] = "tpu"
    out |= {f"tpu/{name}": run(folder / "tpu" / name, name, strategy, **two) for name in TPU}
    for name in ("tpu", "mirrored"):
        out[f"resnet/{name}"] = resnet(folder / f"two/resnet_{name}", strategy, name)
    return out


def resnet(folder: Path, strategy, name: str) -> dict:
    """The network is large, so one step of it, and nothing spent on making its graph faster."""
    import tensorflow as tf

    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    settings = {"MODEL": "resnet50", "MODEL_ARGS": {}, "EPOCHS": 1, "BATCH_SIZE": 6, "DROP_LAST": True}
    settings |= {"OPTIMIZER": "sgd", "OPTIMIZER_ARGS": OPTIMIZERS["sgd_nesterov"], "VALIDATION": False}
    module = program(folder, "tiny", STRATEGY=name, DEVICES=2, **settings)
    module.make_strategy = lambda: strategy
    out = told(module) | {"unequal": spread(module, strategy)["unequal"]}
    shutil.rmtree(folder / "repeat")
    return out


def group_four(folder: Path) -> dict:
    prepared()
    four = {"DEVICES": 4, "STRATEGY": "mirrored"}
    strategy = program(folder / "four/first", "one_left", **four).make_strategy()
    return {f"mirrored4/{name}": run(folder / "mirrored4" / name, name, strategy, **four) for name in FOUR}


# ---- a process for each worker


def worker() -> int:
    return json.loads(os.environ["TF_CONFIG"])["task"]["index"]


def never(call: int) -> dict:
    raise AssertionError("only the first worker is asked")


def slowly(call: int) -> dict:
    """Stop and learning rate, after some thinking."""
    if call == 2:
        time.sleep(2)
    return steered(call)


def group_workers(folder: Path) -> dict:
    """Two workers; the second one dies in their last run."""
    prepared()
    two = {"DEVICES": 2, "STRATEGY": "multi_worker"}
    home = folder / ("others" if worker() else "workers")
    strategy = program(home / "first", "one_left", **two).make_strategy()
    control = never if worker() else dict
    out = {f"workers/{name}": run(home / name, name, strategy, control, **two) for name in WORKERS}
    control = never if worker() else slowly
    out["steered"] = run(home / "steered", "one_left", strategy, control, 1e-9, **two, **DROPOUT)
    if not worker():
        out["steered"] |= checkpoint(home / "steered")
    write(folder, "workers", out)
    module = program(home / "killed", "one_left", **two)
    module.make_strategy, module.BLOCK_SECONDS = lambda: strategy, 1e-9
    asked, calls = module.from_first, []

    def from_first(*args):
        calls.append(args)
        if worker() and len(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return asked(*args)

    module.from_first = from_first
    return out | {"killed": told(module)}


def group_alone(folder: Path) -> dict:
    """Workers whose others never come, that are not told of them, or of too many."""
    prepared()
    config = json.loads(os.environ.pop("TF_CONFIG"))
    out = {}
    for name, workers, index in (("untold", None, 0), ("three", 3, 0), ("first", 2, 0), ("second", 2, 1)):
        if workers:
            cluster = {"worker": config["cluster"]["worker"][:workers]}
            os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})
        out[name] = told(program(folder / "alone" / name, "one_left", STRATEGY="multi_worker", DEVICES=2))
    os.environ["TF_CONFIG"] = json.dumps(config)
    return out


def write(folder: Path, group: str, out: dict) -> None:
    number = worker() if "TF_CONFIG" in os.environ else ""
    (folder / f"{group}{number}.json").write_text(json.dumps(out))


if __name__ == "__main__":
    write(Path(sys.argv[2]), sys.argv[1], globals()[f"group_{sys.argv[1]}"](Path(sys.argv[2])))
    os._exit(0)  # TensorFlow takes half a minute to take apart the strategies' threads of so many programs
