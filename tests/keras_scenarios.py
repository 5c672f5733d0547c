"""Runs of the Keras program, each in its own folder, told as JSON: what tests/test_programs_keras.py looks at.

TensorFlow's devices and Keras's policy belong to a whole process, so the runs happen in processes of their own:
`python keras_scenarios.py GROUP FOLDER` writes FOLDER/GROUP.json.
"""

from __future__ import annotations

import json
import sys
import traceback
import types
from pathlib import Path

import numpy as np

from accel_nb.joining import joined

BASE = {
    "MODEL": "mlp",
    "MODEL_ARGS": {"layers": [16], "activation": "relu", "dropout": 0.0},
    "INPUT_SHAPE": (8, 8, 1),
    "OUTPUTS": 10,
    "BATCH_SIZE": 64,
    "EPOCHS": 2,
}
TRAIN, VAL = 300, 97  # five batches with a last one of 44; two batches with a last one of 33
CNN = {"MODEL": "cnn", "MODEL_ARGS": {"filters": [4], "activation": "silu", "dropout": 0.25}}
DROPOUT = {"MODEL_ARGS": {"layers": [16], "activation": "relu", "dropout": 0.2}}
LINEAR = {"MODEL_ARGS": {"layers": [], "activation": "relu", "dropout": 0.0}}
OPTIMIZERS = {
    "sgd": {"momentum": 0.9, "nesterov": False, "weight_decay": 0.1},
    "sgd_nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.0},
    "adam": {"betas": (0.8, 0.99), "eps": 1e-8, "weight_decay": 0.1},
    "adamw": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1},
    "rmsprop": {"alpha": 0.9, "eps": 1e-8, "momentum": 0.5, "weight_decay": 0.01},
}


def digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    found = load_digits()
    return found.images[..., None].astype("float32"), found.target.astype("int64")


def store(folder: Path, x: np.ndarray, y: np.ndarray) -> Path:
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    for name, array in (("x", x), ("y", y)):
        np.save(data / f"{name}_train.npy", array[:TRAIN])
        np.save(data / f"{name}_val.npy", array[TRAIN : TRAIN + VAL])
    return folder


class CountingTensorFlow:
    """TensorFlow, with a note of each compiled function that is made through it."""

    def __init__(self, real) -> None:
        self.real, self.made = real, {}

    def __getattr__(self, name):
        return getattr(self.real, name)

    def function(self, target=None, **options):
        if target is None:
            return lambda late: self.function(late, **options)
        made = self.real.function(target, **options)
        self.made[target.__name__] = made
        return made


def program(folder: Path, **settings):
    module = types.ModuleType("program")
    module.__file__ = str(folder / "train.py")
    Path(module.__file__).write_text(joined("tensorflow"))  # AutoGraph reads the source of what it compiles
    exec(compile(joined("tensorflow"), module.__file__, "exec"), vars(module))
    unknown = set(settings) - set(vars(module))
    assert not unknown, unknown
    vars(module).update(BASE | settings, HERE=folder)
    module.tf = CountingTensorFlow(module.tf)
    return module


def told(module, control=dict) -> dict:
    """What a run reported, its traces, and its error if it ended in one."""
    events: list[dict] = []
    out = {"events": events, "error": None}
    calls = 0

    def counted():
        nonlocal calls
        calls += 1
        return control(calls) if control is not dict else {}

    try:
        module.train(report=lambda event, **v: events.append({"event": event, **v}), control=counted,
                     save_to=module.HERE / "repeat")  # fmt: skip
    except Exception as error:
        out["error"] = f"{type(error).__name__}: {error}"
        out["traceback"] = traceback.format_exc()
    out["traces"] = {name: made.experimental_get_tracing_count() for name, made in module.tf.made.items()}
    out["files"] = sorted(path.name for path in (module.HERE / "repeat").glob("*"))
    return out


def eager(folder: Path, epochs: int) -> dict:
    """A loop that shares nothing with the program: eager, plain Keras, one batch after the other."""
    import keras
    import tensorflow as tf

    x, y = np.load(folder / "data/x_train.npy"), np.load(folder / "data/y_train.npy")
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Flatten(), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((8, 8, 1)), *layers])
    optimizer = keras.optimizers.Adam(0.001, epsilon=1e-8)
    losses, accuracies = [], []
    for epoch in range(epochs):
        order = np.random.default_rng([0, epoch]).permutation(len(x))
        for rows in np.split(order, range(64, len(x), 64)):
            with tf.GradientTape() as tape:
                logits = model(x[rows], training=True)
                each = tf.nn.sparse_softmax_cross_entropy_with_logits(y[rows], logits)
                loss = tf.reduce_mean(each)
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            losses.append(float(loss))
            accuracies.append(float(np.mean(np.argmax(logits, 1) == y[rows])))
    return {"loss": losses, "accuracy": accuracies}


def gpu_gaps(module) -> dict:
    """Operations of the training graphs without a kernel for their types on a GPU, and a known one beside them."""
    import tensorflow as tf
    from tensorflow.python.framework import kernels

    def has_kernel(op, types):
        for kernel in kernels.get_registered_kernels_for_op(op).kernel:
            allowed = {part.name: set(part.allowed_values.list.type) for part in kernel.constraint}
            fits = all(not some or some & set(types.get(name, [])) for name, some in allowed.items())
            if kernel.device_type in ("GPU", "DEFAULT") and fits:
                return True
        return False

    gaps = set()
    for made in module.tf.made.values():
        for concrete in made._list_all_concrete_functions():
            graph = concrete.graph.as_graph_def()
            own = {function.signature.name for function in graph.library.function}
            nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
            for node in nodes:
                types = {key: list(value.list.type) or [value.type] for key, value in node.attr.items()}
                if node.op != "Placeholder" and node.op not in own and not has_kernel(node.op, types):
                    gaps.add(node.op)
    uint8, int64 = tf.uint8.as_datatype_enum, tf.int64.as_datatype_enum
    known = has_kernel("GatherV2", {"Tparams": [uint8], "Tindices": [int64]})
    return {"cuda": tf.test.is_built_with_cuda(), "gaps": sorted(gaps), "known_gap_has_kernel": known}


def subclass(keras, outputs: int):
    class Net(keras.Model):
        def __init__(self, outputs, **kwargs):
            super().__init__(**kwargs)
            self.flat, self.out = keras.layers.Flatten(), keras.layers.Dense(outputs, kernel_regularizer="l2")

        def call(self, x):
            return self.out(self.flat(x))

    return Net(outputs)


def without_config(keras):
    class Scale(keras.layers.Layer):
        def __init__(self, by):
            super().__init__()
            self.by = by

        def call(self, x):
            return self.by(x)

    layers = [keras.layers.Flatten(), Scale(lambda x: 2 * x), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers])


def group_runs(folder: Path) -> dict:
    x, y = digits()
    home = store(folder / "plain", x / 16, y)
    out = {"base": told(program(home)), "eager": eager(home, 2)}
    for name, more in {
        "first": DROPOUT,
        "again": DROPOUT,
        "blocks_of_one": DROPOUT | {"BLOCK_SECONDS": 1e-9},
        "long_blocks": DROPOUT | {"BLOCK_SECONDS": 1e9},
        "streamed": DROPOUT | {"DATA_ON_DEVICE": False},
        "cnn": CNN,
        "cnn_again": CNN | {"BLOCK_SECONDS": 1e9, "DATA_ON_DEVICE": False},
        "drop_last": {"DROP_LAST": True, "VALIDATION": False},
        "other_seed": {"SEED": 1},
        "cosine": {"SCHEDULE": "cosine", "WARMUP_STEPS": 3, "BLOCK_SECONDS": 1e-9, "LEARNING_RATE": 0.01},
        "warm_constant": {"WARMUP_STEPS": 4, "BLOCK_SECONDS": 1e-9},
        "explodes": {"OPTIMIZER": "sgd", "LEARNING_RATE": 1e30,
                     "OPTIMIZER_ARGS": {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0}},
        "no_gpu": {"ACCELERATOR": "gpu", "DEVICE_INDEX": 99},
    }.items():  # fmt: skip
        out[name] = told(program(home, **more))
    rate = {"BLOCK_SECONDS": 1e-9}
    out["new_rate"] = told(program(home, **rate), lambda call: {"learning_rate": 0.1} if call > 3 else {})
    for name, args in OPTIMIZERS.items():
        settings = {"OPTIMIZER": name.split("_")[0], "OPTIMIZER_ARGS": args, "LEARNING_RATE": 0.01, "EPOCHS": 4}
        module = program(folder / "plain", **LINEAR, **settings)
        kept = []
        build = module.build_model

        def build_and_keep(build=build, kept=kept):
            model = build()
            kept.append([weight.numpy().tolist() for weight in model.trainable_variables])
            return model

        module.build_model = build_and_keep
        out[name] = told(module) | {"start": kept[0]}
    return out


def group_files(folder: Path) -> dict:
    import keras

    x, y = digits()
    out = {}

    home = store(folder / "stopped", x / 16, y)
    module = program(home, **DROPOUT, BLOCK_SECONDS=1e-9)
    out["stopped"] = told(module, lambda call: {"stop": True} if call > 7 else {})
    state, (weights, moments) = module.read_arrays(home / "repeat/checkpoint.npz")
    again = module.load_model(home / "repeat/model.keras")
    pairs = zip(weights, again.variables, strict=True)
    same = [np.array_equal(a, b.numpy()) for a, b in pairs if "seed_generator" not in b.path]
    out["stopped"] |= {
        "state": {name: state[name] for name in ("step", "epoch", "position", "learning_rate")},
        "measured": state["measured"],
        "draws": [int(a[1]) for a, b in zip(weights, again.variables, strict=True) if "seed_generator" in b.path],
        "iterations": int(moments[0]),
        "moments": max(float(np.abs(array).max()) for array in moments[2:]),
        "same_weights": all(same),
    }

    home = store(folder / "finished", x / 16, y)
    module = program(home)
    out["finished"] = told(module)
    model = module.load_model(home / "repeat/model.keras")
    x_val, y_val = np.load(home / "data/x_val.npy"), np.load(home / "data/y_val.npy")
    logits = np.asarray(model(x_val), dtype="float64")
    each = np.log(np.exp(logits).sum(1)) - logits[np.arange(VAL), y_val]
    out["finished"] |= {
        "val_loss": float(each.mean()),
        "val_accuracy": float((logits.argmax(1) == y_val).mean()),
        "evaluate": [float(v) for v in model.evaluate(x_val, y_val, verbose=0)],
    }

    home = store(folder / "bytes", x.astype("uint8"), y)
    out["bytes"] = told(program(home, X_SCALE=16.0))
    module = program(home, X_SCALE=16.0, **CNN)
    out["bytes_cnn"] = told(module)
    out["gpu_gaps"] = gpu_gaps(module)
    out["bytes_streamed"] = told(program(home, X_SCALE=16.0, DATA_ON_DEVICE=False))
    home = store(folder / "floats", x / 16, y)
    out["floats"] = told(program(home))

    targets = np.stack([x.mean((1, 2, 3)), x.max((1, 2, 3))], axis=1) / 16
    home = store(folder / "regression", x / 16, targets.astype("float32"))
    module = program(home, TASK="regression", OUTPUTS=2)
    out["regression"] = told(module)
    model = module.load_model(home / "repeat/model.keras")
    wrong = np.asarray(model(np.load(home / "data/x_val.npy")), "float64") - np.load(home / "data/y_val.npy")
    out["regression"]["val_loss"] = float((wrong**2).mean())

    home = store(folder / "own", x / 16, y)
    dense = keras.layers.Dense
    wrong_models = {
        "own_shape": lambda: keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), dense(7)]),
        "own_unflat": lambda: keras.Sequential([keras.Input((8, 8, 1)), dense(10)]),
        "own_input": lambda: keras.Sequential([keras.Input((9,)), dense(10)]),
        "own_softmax": lambda: keras.Sequential([keras.layers.Flatten(), dense(10, activation="softmax")]),
        "own_no_model": lambda: 3,
    }
    for name, make in wrong_models.items():
        out[name] = told(program(store(folder / name, x / 16, y), MODEL="own", own_model=make))
    x_val, y_val = np.load(home / "data/x_val.npy"), np.load(home / "data/y_val.npy")
    makers = {"own": lambda: subclass(keras, 10), "own_without_config": lambda: without_config(keras)}
    for name, make in makers.items():
        module = program(home, MODEL="own", own_model=make)
        out[name] = told(module)
        model = module.load_model(home / "repeat/model.keras")
        logits = np.asarray(model(x_val), "float64")
        each = np.log(np.exp(logits).sum(1)) - logits[np.arange(VAL), y_val]
        out[name]["evaluated"] = float((logits.argmax(1) == y_val).mean())
        out[name]["entropy"] = float(each.mean())
        out[name]["penalty"] = float(0.01 * np.square(model.trainable_variables[0].numpy()).sum())
    return out


def group_models(folder: Path) -> dict:
    import keras

    models = program(folder)

    def count(model):
        return [int(model.count_params()), int(sum(np.prod(w.shape) for w in model.trainable_variables))]

    mlp = {"activation": "relu", "dropout": 0.2}
    out = {
        "mlp_512": count(models.mlp((28, 28, 1), 10, layers=[512], **mlp)),
        "mlp_128": count(models.mlp((784,), 10, layers=[128], **mlp)),
        "cnn": count(models.cnn((28, 28, 1), 10, filters=[32, 64], **mlp)),
        "resnet50": count(models.resnet50((224, 224, 3), 1000)),
    }
    small = models.resnet50((8, 20, 1), 7)
    logits = small(np.zeros((2, 8, 20, 1), "float32"))
    out["resnet50_small"] = [list(logits.shape), list(small.layers[1].output.shape)]
    line = np.array([[-2.0, -0.5, 0.0, 1.5]], "float32")
    names = ("relu", "gelu", "tanh", "sigmoid", "silu", "leaky_relu", "elu")
    out["activations"] = {name: np.asarray(models.activation_layer(name)(line))[0].tolist() for name in names}
    out["no_dropout"] = [type(layer).__name__ for layer in models.mlp((4,), 2, [3], "relu", 0.0).layers]
    with_dropout = models.cnn((8, 8, 1), 2, [3], "relu", 0.1).layers
    out["cnn_layers"] = [type(layer).__name__ for layer in with_dropout]
    norm = next(layer for layer in with_dropout if isinstance(layer, keras.layers.BatchNormalization))
    out["norm"] = [norm.momentum, norm.epsilon]
    return out


def group_xla(folder: Path) -> dict:
    x, y = digits()
    home = store(folder / "xla", x / 16, y)
    return {"plain": told(program(home)), "compiled": told(program(home, COMPILE=True))}


def group_half(folder: Path) -> dict:
    import keras

    x, y = digits()
    home = store(folder / "half", x / 16, y)
    out = {}
    tiny = {"LEARNING_RATE": 0.05, "MODEL_ARGS": {"layers": [4], "activation": "relu", "dropout": 0.0}}
    for name, precision in (("bf16", "bf16"), ("fp16", "fp16")):
        module = program(home, PRECISION=precision, **tiny)
        out[name] = told(module)
        model = module.load_model(home / "repeat/model.keras")
        hidden = next(layer for layer in model.layers if isinstance(layer, keras.layers.Dense))
        out[name] |= {
            "logits": model(x[:2]).dtype.name,
            "hidden": hidden.compute_dtype,
            "weights": hidden.kernel.dtype,
            "optimizer": type(model.optimizer).__name__,
        }
    huge = store(folder / "huge", x * 1e30, y)
    out["overflow"] = told(program(huge, PRECISION="fp16", EPOCHS=3, **tiny))
    return out


def group_gpu(folder: Path) -> dict:
    x, y = digits()
    home = store(folder / "gpu", x.astype("uint8"), y)
    runs = {"fp32": {}, "tf32": CNN, "fp16": CNN, "bf16": CNN | {"COMPILE": True}}
    return {name: told(program(home, X_SCALE=16.0, ACCELERATOR="gpu", PRECISION=name, **more))
            for name, more in runs.items()}  # fmt: skip


def main() -> None:
    group, folder = sys.argv[1], Path(sys.argv[2])
    out = globals()[f"group_{group}"](folder)
    (folder / f"{group}.json").write_text(json.dumps(out))


if __name__ == "__main__":
    main()
