"""Trains a Keras model on TensorFlow: a script to read, to run and to change.

`python train.py` trains on the arrays in `data/` and prints one line per epoch.
`python train.py history.csv` also writes every step to that file.
"""

from __future__ import annotations

import csv
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow's own log: errors only
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")  # take GPU memory as it is needed, not all at once

import keras
import numpy as np
import tensorflow as tf
from models import cnn, mlp, resnet50

# ---- settings
MODEL = "mlp"  # mlp, cnn, resnet50, own
MODEL_ARGS = {"layers": [512], "activation": "relu", "dropout": 0.2}
INPUT_SHAPE = (784,)  # of one sample; images are (height, width, channels)
OUTPUTS = 10  # classes, or numbers to predict
TASK = "classification"  # or regression
X_SCALE = 1.0  # the stored inputs are divided by this
BATCH_SIZE = 128
EPOCHS = 5
OPTIMIZER = "adam"  # adam, adamw, sgd, rmsprop
OPTIMIZER_ARGS = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
LEARNING_RATE = 0.001
SCHEDULE = "constant"  # or cosine: falls to 0 over the run
WARMUP_STEPS = 0  # steps in which the learning rate rises to its full value
SEED = 0  # of the weights, the order of the samples and dropout
ACCELERATOR = "cpu"  # cpu, gpu, mps
DEVICE_INDEX = 0  # which GPU
PRECISION = "fp32"  # fp32, tf32, bf16, fp16
COMPILE = False  # XLA: a slow first step, then faster ones
DETERMINISTIC = False  # only operations that give the same bits each time
CUDNN_BENCHMARK = True  # let cuDNN try out which convolution is fastest
DATA_ON_DEVICE = True  # False: read batches from the files while training
DROP_LAST = False  # leave out the last, smaller batch of each epoch
VALIDATION = True
STRATEGY = "single"
# ---- end of settings

HERE = Path(__file__).parent
BLOCK_SECONDS = 0.15  # losses stay on the device and are fetched about this often: each fetch makes it wait


def own_model() -> keras.Model:
    """The place of your own model: logits of shape (samples, OUTPUTS) for inputs (samples, *INPUT_SHAPE)."""
    raise RuntimeError("MODEL is 'own': write your model into own_model().")


def build_model() -> keras.Model:
    """A fresh model with random weights."""
    if MODEL == "mlp":
        model = mlp(INPUT_SHAPE, OUTPUTS, **MODEL_ARGS)
    elif MODEL == "cnn":
        model = cnn(INPUT_SHAPE, OUTPUTS, **MODEL_ARGS)
    elif MODEL == "resnet50":
        model = resnet50(INPUT_SHAPE, OUTPUTS, **MODEL_ARGS)
    elif MODEL == "own":
        model = checked(own_model())
    return model


def checked(model: keras.Model) -> keras.Model:
    """The same model, built; one that cannot learn this task is refused in words."""
    if not isinstance(model, keras.Model):
        raise TypeError(f"own_model() must return a keras.Model. Got {type(model).__name__}.")
    try:
        outputs = model(tf.zeros((2, *INPUT_SHAPE)))
    except Exception as error:
        made_for = getattr(model, "input_shape", None)
        why = f"it is made for {made_for}." if made_for else f"{type(error).__name__}: {error}"
        raise ValueError(f"The model cannot take a batch of shape {(2, *INPUT_SHAPE)}: {why}") from error
    shape = tuple(outputs.shape) if hasattr(outputs, "shape") else f"of a {type(outputs).__name__}"
    if shape != (2, OUTPUTS):
        raise ValueError(f"The model answers a batch of 2 with shape {shape}; it must be {(2, OUTPUTS)}.")
    if getattr(model.layers[-1], "activation", None) is keras.activations.softmax:
        raise ValueError("The model ends in softmax, but the loss takes logits: leave that activation out.")
    try:
        keras.saving.serialize_keras_object(model)
    except Exception:  # a class without get_config(): the file will hold weights, load_model() builds the rest
        model.get_config = dict
    return model


def build_optimizer() -> keras.optimizers.Optimizer:
    """The optimizer, with its arguments under PyTorch's names: eps is Keras's epsilon, alpha its rho."""
    if OPTIMIZER == "adam":
        optimizer = keras.optimizers.Adam(
            LEARNING_RATE,
            beta_1=OPTIMIZER_ARGS["betas"][0],
            beta_2=OPTIMIZER_ARGS["betas"][1],
            epsilon=OPTIMIZER_ARGS["eps"],
        )
    elif OPTIMIZER == "adamw":
        # Each step first shrinks every weight by learning rate * weight_decay, biases too, as in PyTorch.
        optimizer = keras.optimizers.AdamW(
            LEARNING_RATE,
            beta_1=OPTIMIZER_ARGS["betas"][0],
            beta_2=OPTIMIZER_ARGS["betas"][1],
            epsilon=OPTIMIZER_ARGS["eps"],
            weight_decay=OPTIMIZER_ARGS["weight_decay"],
        )
    elif OPTIMIZER == "sgd":
        optimizer = keras.optimizers.SGD(
            LEARNING_RATE, momentum=OPTIMIZER_ARGS["momentum"], nesterov=OPTIMIZER_ARGS["nesterov"]
        )
    elif OPTIMIZER == "rmsprop":
        optimizer = keras.optimizers.RMSprop(
            LEARNING_RATE,
            rho=OPTIMIZER_ARGS["alpha"],
            epsilon=OPTIMIZER_ARGS["eps"] ** 2,  # Keras adds it under the square root, PyTorch eps after it
            momentum=OPTIMIZER_ARGS["momentum"],
        )
    if PRECISION == "fp16":
        # Small float16 gradients would round to zero: the loss is scaled up, the gradients back down.
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    return optimizer


def rate_factor(step: int, total_steps: int) -> float:
    """What the learning rate is multiplied with at a step (the first one is 0)."""
    if SCHEDULE == "constant":
        factor = 1.0
    if SCHEDULE == "cosine":
        done = (step - WARMUP_STEPS) / max(1, total_steps - WARMUP_STEPS)
        factor = (1 + math.cos(math.pi * done)) / 2
    if step < WARMUP_STEPS:
        factor = (step + 1) / WARMUP_STEPS
    return factor


def shuffled(samples: int, epoch: int) -> np.ndarray:
    """The order of the samples in an epoch (the first one is 0): the same for a seed on every machine."""
    return np.random.default_rng([SEED, epoch]).permutation(samples)


def batches_from_files(
    x: np.ndarray, y: np.ndarray, orders: Iterable[np.ndarray], steps: int
) -> Iterator[tuple[tf.Tensor, tf.Tensor]]:
    """Batches of the samples in these orders, one per epoch, read ahead while earlier ones are used."""

    def read() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for order in orders:
            for start in range(0, steps * BATCH_SIZE, BATCH_SIZE):
                rows = order[start : start + BATCH_SIZE]
                yield x[rows], y[rows]

    kinds = tuple(tf.TensorSpec((None, *array.shape[1:]), array.dtype) for array in (x, y))
    with tf.device("/CPU:0"):
        return iter(tf.data.Dataset.from_generator(read, output_signature=kinds).prefetch(4))


def parameter_count(layer: keras.layers.Layer) -> int:
    """Numbers that training changes; a summary by Keras also counts the running statistics of batch norm."""
    return sum(math.prod(weight.shape) for weight in layer.trainable_variables)


def layer_table(model: keras.Model) -> list[list[Any]]:
    """Rows of name, kind, output shape without the batch, and parameters; models inside the model are opened."""
    rows: list[list[Any]] = []
    for layer in model.layers:
        if isinstance(layer, keras.Model):
            rows += layer_table(layer)
        elif not isinstance(layer, keras.layers.InputLayer):
            try:
                shape = list(layer.output.shape[1:])
            except (AttributeError, ValueError):  # a layer that was only ever called inside a model's own call()
                shape = []
            rows.append([layer.name, type(layer).__name__, shape, parameter_count(layer)])
    return rows


def save(model: keras.Model, path: Path) -> None:
    """Writes beside and renames, so that nobody ever meets half a file."""
    fresh = path.with_name("new-" + path.name)
    model.save(fresh)
    fresh.replace(path)


def load_model(path: str | Path = HERE / "model.keras") -> keras.Model:
    """The trained model, on the CPU."""
    with tf.device("/CPU:0"):
        if MODEL == "own":
            model = build_model()  # the file alone does not hold your classes and functions
            model.load_weights(path)
        else:
            model = keras.saving.load_model(path)
    return model


def print_report(event: str, **values: Any) -> None:
    """Prints one line per epoch."""
    if event == "epoch":
        names = ("loss", "accuracy", "val_loss", "val_accuracy")
        numbers = "  ".join(f"{name} {values[name]:.4f}" for name in names if name in values)
        print(f"epoch {values['epoch']}  {numbers}  seconds {values['seconds']:.1f}", flush=True)


def csv_report(path: str | Path) -> Callable[..., None]:
    """A report that prints, and writes every step to a CSV file at the end of each epoch."""
    columns = ("step", "epoch", "loss", "accuracy", "val_loss", "val_accuracy")
    rows: list[dict[str, Any]] = []

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
            with open(path, "w", newline="") as file:
                writer = csv.DictWriter(file, columns)
                writer.writeheader()
                writer.writerows(rows)

    return report


def no_control() -> dict[str, Any]:
    """Nobody steers: no stop, no new learning rate."""
    return {}


def train(
    report: Callable[..., None] = print_report,
    control: Callable[[], dict[str, Any]] = no_control,
    save_to: str | Path = HERE / "repeat",
) -> None:
    """Train; `report` hears what happens, `control` is asked about every 0.15 s whether to stop."""
    save_to = Path(save_to)
    save_to.mkdir(parents=True, exist_ok=True)
    keras.utils.set_random_seed(SEED)
    if DETERMINISTIC:
        tf.config.experimental.enable_op_determinism()

    # Only the chosen device stays visible, so that nothing can run on another one unnoticed.
    if ACCELERATOR == "cpu":
        tf.config.set_visible_devices([], "GPU")
        device_name = platform.processor() or platform.machine()
    if ACCELERATOR in ("gpu", "mps"):
        gpus = tf.config.list_physical_devices("GPU")
        if len(gpus) <= DEVICE_INDEX:
            raise RuntimeError(
                f"GPU {DEVICE_INDEX} was asked for, and TensorFlow {tf.__version__} sees {len(gpus)} GPUs here. "
                "Nothing was trained."
            )
        tf.config.set_visible_devices(gpus[DEVICE_INDEX], "GPU")
        device_name = tf.config.experimental.get_device_details(gpus[DEVICE_INDEX]).get("device_name", "GPU")
    if ACCELERATOR == "gpu" and not CUDNN_BENCHMARK:
        os.environ["TF_CUDNN_USE_AUTOTUNE"] = "0"
    if ACCELERATOR == "gpu" and PRECISION == "fp32":
        tf.config.experimental.enable_tensor_float_32_execution(False)
    if PRECISION == "bf16":
        keras.config.set_dtype_policy("mixed_bfloat16")
    if PRECISION == "fp16":
        keras.config.set_dtype_policy("mixed_float16")

    # Data that fits goes to the device once, into variables: a GPU gathers bytes from these, not from constants.
    x_train = np.load(HERE / "data" / "x_train.npy", mmap_mode="r")
    y_train = np.load(HERE / "data" / "y_train.npy", mmap_mode="r")
    if VALIDATION:
        x_val = np.load(HERE / "data" / "x_val.npy", mmap_mode="r")
        y_val = np.load(HERE / "data" / "y_val.npy", mmap_mode="r")
    samples = len(x_train)
    if DROP_LAST:
        steps_per_epoch = samples // BATCH_SIZE
    if not DROP_LAST:
        steps_per_epoch = math.ceil(samples / BATCH_SIZE)
    sizes = [min(BATCH_SIZE, samples - i * BATCH_SIZE) for i in range(steps_per_epoch)]
    if VALIDATION:
        val_samples = len(x_val)
        val_steps = math.ceil(val_samples / BATCH_SIZE)
        val_sizes = [min(BATCH_SIZE, val_samples - i * BATCH_SIZE) for i in range(val_steps)]
    else:
        val_samples = 0
    if DATA_ON_DEVICE:
        x_train, y_train = tf.Variable(x_train, trainable=False), tf.Variable(y_train, trainable=False)
    if DATA_ON_DEVICE and VALIDATION:
        x_val, y_val = tf.constant(x_val), tf.constant(y_val)
    if not DATA_ON_DEVICE:
        orders = (shuffled(samples, epoch) for epoch in range(EPOCHS))
        batches = batches_from_files(x_train, y_train, orders, steps_per_epoch)
    if VALIDATION and not DATA_ON_DEVICE:
        val_batches = batches_from_files(x_val, y_val, [np.arange(val_samples)] * EPOCHS, val_steps)

    # The model, its loss and its optimizer; compiled only so that the saved file holds all three.
    model = build_model()
    optimizer = build_optimizer()
    optimizer.build(model.trainable_variables)
    if TASK == "classification":
        loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss_function, metrics=["accuracy"])
    if TASK == "regression":
        loss_function = keras.losses.MeanSquaredError()
        model.compile(optimizer, loss_function)

    if ACCELERATOR == "cpu":
        device = "cpu"
    if ACCELERATOR in ("gpu", "mps"):
        if "GPU" not in model.variables[0].value.device:
            raise RuntimeError(f"A GPU was asked for, but the weights lie on {model.variables[0].value.device}.")
        device = f"/GPU:{DEVICE_INDEX}"
    versions = {"tensorflow": tf.__version__, "keras": keras.__version__}
    if ACCELERATOR == "gpu":
        versions["cuda"] = tf.sysconfig.get_build_info().get("cuda_version", "")
        versions["cudnn"] = tf.sysconfig.get_build_info().get("cudnn_version", "")
    if SCHEDULE != "constant" or WARMUP_STEPS > 0:
        total_steps = EPOCHS * steps_per_epoch
        optimizer.learning_rate.assign(LEARNING_RATE * rate_factor(0, total_steps))
    report("model", parameters=parameter_count(model), layers=layer_table(model))
    report(
        "started",
        device=device,
        device_name=device_name,
        versions=versions,
        steps_per_epoch=steps_per_epoch,
        train_samples=samples,
        val_samples=val_samples,
        learning_rate=float(optimizer.learning_rate.numpy()),
    )

    def measure(x: tf.Tensor, y: tf.Tensor, training: bool) -> tf.Tensor:
        """The loss of this one batch and, for classes, its accuracy."""
        if X_SCALE != 1.0:
            x = tf.cast(x, tf.float32) / X_SCALE
        logits = tf.cast(model(x, training=training), tf.float32)
        loss = loss_function(y, logits)
        if MODEL == "own":
            loss += sum(model.losses)  # the regularisation that your layers ask for
        if TASK == "classification":
            accuracy = tf.reduce_mean(tf.cast(tf.argmax(logits, axis=1) == y, tf.float32))
            measured = tf.stack([loss, accuracy])
        if TASK == "regression":
            measured = tf.stack([loss])
        return measured

    @tf.function(autograph=False, jit_compile=COMPILE)
    def train_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        """One update of the weights; gives what was measured before it."""
        with tf.GradientTape() as tape:
            measured = measure(x, y, training=True)
            objective = measured[0]
            if OPTIMIZER != "adamw" and OPTIMIZER_ARGS["weight_decay"] > 0:
                # The gradient of half the squared weights is what PyTorch adds: weight_decay * weight.
                squares = tf.add_n([tf.nn.l2_loss(weight) for weight in model.trainable_variables])
                objective += OPTIMIZER_ARGS["weight_decay"] * squares
            if PRECISION == "fp16":
                objective = optimizer.scale_loss(objective)
        gradients = tape.gradient(objective, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return measured

    kinds = [tf.TensorSpec([None], tf.int64), tf.TensorSpec([], tf.int32), tf.TensorSpec([None], tf.float32)]

    @tf.function(input_signature=kinds)  # one graph for blocks of any length
    def train_block(order: tf.Tensor, first: tf.Tensor, rates: tf.Tensor) -> tf.Tensor:
        """One step for each learning rate, from batch `first` of the epoch on: (steps, measured values)."""
        measured = tf.TensorArray(tf.float32, size=tf.size(rates))
        for i in tf.range(tf.size(rates)):
            if DATA_ON_DEVICE:
                rows = order[(first + i) * BATCH_SIZE : (first + i + 1) * BATCH_SIZE]  # the last ones may be fewer
                x, y = tf.gather(x_train, rows), tf.gather(y_train, rows)
            else:
                x, y = next(batches)
            optimizer.learning_rate.assign(rates[i])
            measured = measured.write(i, train_step(x, y))
        return measured.stack()

    if VALIDATION:
        val_step = tf.function(measure, autograph=False, jit_compile=COMPILE)

        @tf.function
        def validate() -> tf.Tensor:
            """The whole validation set, each sample once: (batches, measured values)."""
            measured = tf.TensorArray(tf.float32, size=val_steps)
            for i in tf.range(val_steps):
                if DATA_ON_DEVICE:
                    rows = slice(i * BATCH_SIZE, (i + 1) * BATCH_SIZE)
                    x, y = x_val[rows], y_val[rows]
                else:
                    x, y = next(val_batches)
                measured = measured.write(i, val_step(x, y, training=False))
            return measured.stack()

    report("status", text="compiling")
    base_rate = LEARNING_RATE
    step = 0  # steps done
    length = 1  # steps in a block
    if PRECISION == "fp16":
        skipped = 0  # steps in a row without a finite loss
    for epoch in range(EPOCHS):
        order = tf.constant(shuffled(samples, epoch))
        history = []
        seconds = 0.0
        position = 0  # batches done in this epoch
        while position < steps_per_epoch:
            asked = control()
            if asked.get("stop"):
                save(model, save_to / "checkpoint.keras")
                seeds = [v.numpy().tolist() for v in model.variables if "seed_generator_state" in v.path]
                state = {"step": step, "epoch": epoch + 1, "position": position, "learning_rate": base_rate}
                state["seeds"] = seeds  # where dropout's random numbers go on; Keras's file leaves them out
                (save_to / "new-checkpoint.json").write_text(json.dumps(state))
                (save_to / "new-checkpoint.json").replace(save_to / "checkpoint.json")
                report("checkpoint", path=str(save_to / "checkpoint.keras"), step=step)
                save(model, save_to / "model.keras")
                return
            base_rate = asked.get("learning_rate", base_rate)
            count = min(length, steps_per_epoch - position)
            if SCHEDULE == "constant" and WARMUP_STEPS == 0:
                rates = [base_rate] * count
            else:
                rates = [base_rate * rate_factor(step + i, total_steps) for i in range(count)]
            began = time.perf_counter()
            measured = train_block(order, tf.constant(position), tf.constant(rates)).numpy()
            took = time.perf_counter() - began
            values = {"loss": measured[:, 0].tolist()}
            if TASK == "classification":
                values["accuracy"] = measured[:, 1].tolist()
            learning_rate = float(optimizer.learning_rate.numpy())
            report("batch", epoch=epoch + 1, first=step + 1, **values, learning_rate=learning_rate)
            for number, loss in enumerate(values["loss"], start=step + 1):
                if PRECISION == "fp16":
                    skipped = 0 if math.isfinite(loss) else skipped + 1
                    if 0 < skipped < 10:
                        continue  # loss scaling leaves out a step that overflows; ten in a row are a failure
                if not math.isfinite(loss):
                    raise FloatingPointError(
                        f"The loss is {loss} at step {number} (epoch {epoch + 1}). "
                        "Try a smaller learning rate, or look for very large values in the data."
                    )
            history.append(measured)
            seconds += took
            step += count
            position += count
            length = max(1, min(4 * count, round(count * BLOCK_SECONDS / took)))

        means = np.average(np.concatenate(history).astype(np.float64), axis=0, weights=sizes)
        values = {"loss": float(means[0])}  # over the samples of the epoch
        if TASK == "classification":
            values["accuracy"] = float(means[1])
        if VALIDATION:
            began = time.perf_counter()
            means = np.average(validate().numpy().astype(np.float64), axis=0, weights=val_sizes)
            seconds += time.perf_counter() - began
            values["val_loss"] = float(means[0])
        if VALIDATION and TASK == "classification":
            values["val_accuracy"] = float(means[1])
        report("epoch", epoch=epoch + 1, step=step, **values, seconds=seconds)

    save(model, save_to / "model.keras")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(csv_report(sys.argv[1]))
    else:
        train()
