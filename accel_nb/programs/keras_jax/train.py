"""Trains a Keras model on JAX: a script to read, to run and to change.

`python train.py` trains on the arrays in `data/` and prints one line per epoch.
`python train.py history.csv` also writes every step to that file.
"""

from __future__ import annotations

import math
import os
import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # Keras opens TensorFlow's files, if it is there, when it saves

import jax
import jax.numpy as jnp
import keras
import numpy as np
from arrays import read_arrays, write_arrays
from building import build_model
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from parts import build_optimizer, layer_table, parameter_count, restore, save, shuffled
from reports import csv_report, no_control, print_report, rate_factor
from rows import batches_of_rows, padded
from settings import (
    ACCELERATOR,
    ACCUMULATE,
    BATCH_SIZE,
    DATA_ON_DEVICE,
    DEVICES,
    DROP_LAST,
    EPOCHS,
    HERE,
    LEARNING_RATE,
    MODEL,
    OPTIMIZER,
    OPTIMIZER_ARGS,
    PRECISION,
    SCHEDULE,
    SEED,
    STRATEGY,
    TASK,
    VALIDATION,
    WARMUP_STEPS,
    X_SCALE,
)

BLOCK_SECONDS = 0.15  # losses stay on the device and are fetched about this often: each fetch makes it wait
LONGEST_BLOCK = 2000  # steps


def load_model(path: str | Path = HERE / "model.keras") -> keras.Model:
    """The trained model, on the CPU."""
    jax.config.update("jax_platforms", "cpu")  # a TPU is left to the process that trains on it
    with jax.default_device(jax.devices("cpu")[0]):
        if MODEL == "own":
            model = build_model()  # the file alone does not hold your classes and functions
            model.load_weights(path)
        else:
            model = keras.saving.load_model(path)
    return model


def train(
    report: Callable[..., None] = print_report,
    control: Callable[[], dict[str, Any]] = no_control,
    save_to: str | Path = HERE / "repeat",
    resume_from: str | Path | None = None,
) -> None:
    """Train; `report` hears what happens, `control` is asked about every 0.15 s whether to stop."""
    save_to = Path(save_to)
    save_to.mkdir(parents=True, exist_ok=True)
    if keras.config.backend() != "jax":
        raise RuntimeError(f"Keras was imported with the backend {keras.config.backend()}: start a fresh Python.")

    # The devices. A TPU that was asked for and is not there is an error: JAX alone would go on without a word.
    if ACCELERATOR == "cpu":
        jax.config.update("jax_platforms", "cpu")
    if ACCELERATOR == "cpu" and DEVICES > 1:
        # The processor stands in for several chips. JAX reads this when it first looks for devices.
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={DEVICES}"
    try:
        devices = jax.devices(ACCELERATOR)
    except RuntimeError as error:
        raise RuntimeError(
            f"A {ACCELERATOR.upper()} was asked for; JAX {jax.__version__} got none: {error}"
        ) from error
    if len(devices) < DEVICES:
        raise RuntimeError(
            f"{DEVICES} devices ({ACCELERATOR.upper()}) were asked for, and JAX {jax.__version__} sees "
            f"{len(devices)} here. Nothing was trained."
        )
    devices = devices[:DEVICES]
    if ACCELERATOR == "cpu":
        device = "cpu"
        device_name = platform.processor() or platform.machine()
    if ACCELERATOR == "tpu":
        device = f"tpu:{devices[0].id}"
        device_name = devices[0].device_kind
    if ACCELERATOR == "tpu" and PRECISION == "fp32":
        jax.config.update("jax_default_matmul_precision", "highest")  # else a TPU multiplies float32 as bfloat16
    if PRECISION == "bf16":
        keras.config.set_dtype_policy("mixed_bfloat16")
    mesh = Mesh(np.array(devices), ("batch",))
    everywhere = NamedSharding(mesh, PartitionSpec())  # each device holds all of it
    split = NamedSharding(mesh, PartitionSpec("batch"))  # each device holds a part of the rows

    # Each step has the same shape, so that it is compiled once: a batch is filled up to `width` rows.
    x_train = np.load(HERE / "data" / "x_train.npy", mmap_mode="r")
    y_train = np.load(HERE / "data" / "y_train.npy", mmap_mode="r")
    if TASK == "classification":
        y_train = y_train.astype(np.int32)
    begin, position, step = 0, 0, 0  # the first epoch, and how many of its batches and of all steps are done
    base_rate = LEARNING_RATE
    history, seconds = [], 0.0  # of this epoch
    if resume_from is not None:
        progress, saved = read_arrays(resume_from)
        begin, position, step = progress["epoch"], progress["position"], progress["step"]
        base_rate, seconds = progress["learning_rate"], progress["seconds"]
        if progress["measured"]:
            history = [np.array(progress["measured"], np.float32)]

    width = math.ceil(BATCH_SIZE / (DEVICES * ACCUMULATE)) * DEVICES * ACCUMULATE
    samples = len(x_train)
    if DROP_LAST:
        steps_per_epoch = samples // BATCH_SIZE
    if not DROP_LAST:
        steps_per_epoch = math.ceil(samples / BATCH_SIZE)
    sizes = [min(BATCH_SIZE, samples - i * BATCH_SIZE) for i in range(steps_per_epoch)]
    if VALIDATION:
        x_val = np.load(HERE / "data" / "x_val.npy", mmap_mode="r")
        y_val = np.load(HERE / "data" / "y_val.npy", mmap_mode="r")
        val_samples = len(x_val)
        val_steps = math.ceil(val_samples / BATCH_SIZE)
        val_sizes = [min(BATCH_SIZE, val_samples - i * BATCH_SIZE) for i in range(val_steps)]
        val_order = padded(np.arange(val_samples), val_steps, width)
    else:
        val_samples = 0
    if VALIDATION and TASK == "classification":
        y_val = y_val.astype(np.int32)
    if DATA_ON_DEVICE:
        x_train, y_train = jax.device_put((np.asarray(x_train), np.asarray(y_train)), everywhere)
    if DATA_ON_DEVICE and VALIDATION:
        x_val, y_val = jax.device_put((np.asarray(x_val), np.asarray(y_val)), everywhere)
    if not DATA_ON_DEVICE:
        orders = (padded(shuffled(samples, epoch), steps_per_epoch, width) for epoch in range(begin, EPOCHS))
        batches = batches_of_rows(x_train, y_train, orders)
        for _ in range(position):
            next(batches)  # these are done

    # The model, its loss and its optimizer; compiled by Keras only so that the saved file holds all three.
    keras.utils.set_random_seed(SEED)
    model = build_model()
    optimizer = build_optimizer()
    optimizer.build(model.trainable_variables)
    if TASK == "classification":
        loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss_function, metrics=["accuracy"])
    if TASK == "regression":
        model.compile(optimizer, keras.losses.MeanSquaredError())
    if MODEL != "mlp":
        normalises = any("moving_mean" in variable.path for variable in model.non_trainable_variables)
        if normalises and (width != BATCH_SIZE or sizes[-1] != BATCH_SIZE):
            raise ValueError(
                "The model has batch normalisation, which would also see the rows that fill up a batch. It needs "
                f"full batches: a batch size that {DEVICES * ACCUMULATE} divides and that divides {samples}."
            )
    if SCHEDULE != "constant" or WARMUP_STEPS > 0:
        total_steps = EPOCHS * steps_per_epoch
        optimizer.learning_rate.assign(LEARNING_RATE * rate_factor(0, total_steps))

    started = {"device": device, "device_name": device_name}
    started["versions"] = {"jax": jax.__version__, "jaxlib": jax.lib.__version__, "keras": keras.__version__}
    if DEVICES > 1 or ACCUMULATE > 1:
        started.update(
            replicas=DEVICES, strategy=STRATEGY, per_replica=math.ceil(BATCH_SIZE / DEVICES), backend="xla"
        )
    report("model", parameters=parameter_count(model), layers=layer_table(model))
    report(
        "started",
        **started,
        steps_per_epoch=steps_per_epoch,
        train_samples=samples,
        val_samples=val_samples,
        learning_rate=float(optimizer.learning_rate.numpy()),
    )

    # A function of JAX keeps nothing: all that a step changes goes in and comes out again.
    groups = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    if resume_from is not None:
        restore(saved, model, optimizer)
    values = jax.device_put([[np.array(variable.numpy()) for variable in group] for group in groups], everywhere)
    rate_at = next(i for i, variable in enumerate(optimizer.variables) if variable is optimizer.learning_rate)

    def measure(weights: list, state: list, batch: tuple, count: Any, training: bool) -> tuple:
        """What training makes smaller; and the model's new state, and what is measured: loss and accuracy.

        `batch`: x, y and which rows are real. `count`: the real rows of the whole batch, if this is a part of it.
        """
        x, y, real = batch
        if X_SCALE != 1.0:
            x = x.astype(jnp.float32) / X_SCALE
        known = [*zip(groups[0], weights, strict=True), *zip(groups[1], state, strict=True)]
        with keras.StatelessScope(known, collect_losses=True) as scope:  # the variables have these values here
            logits = model(x, training=training)
            if MODEL == "own":
                penalties = sum(model.losses)  # the regularisation that your layers ask for
        state = [scope.get_current_value(variable) for variable in groups[1]]
        logits = logits.astype(jnp.float32)
        if TASK == "classification":
            losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=1)[:, 0]
            hits = jnp.sum(jnp.logical_and(real, jnp.argmax(logits, axis=1) == y))
        if TASK == "regression":
            losses = jnp.mean(jnp.square(logits - y), axis=1)
            hits = 0  # there are no classes to hit
        objective = jnp.sum(jnp.where(real, losses, 0.0)) / count
        if MODEL == "own":
            objective += penalties * jnp.sum(real) / count  # a part of a batch adds its share
        measured = jnp.stack([objective, hits / count])
        if OPTIMIZER != "adamw" and OPTIMIZER_ARGS["weight_decay"] > 0:
            # The gradient of half the squared weights is what PyTorch adds: weight_decay * weight.
            squares = sum(jnp.sum(jnp.square(weight)) / 2 for weight in weights)
            objective += OPTIMIZER_ARGS["weight_decay"] * squares * jnp.sum(real) / count
        return objective, (state, measured)

    slopes = jax.value_and_grad(partial(measure, training=True), has_aux=True)

    def update(values: list, x: Any, y: Any, count: Any, rate: Any) -> tuple:
        """One update of the weights; gives what was measured before it."""
        weights, state, moments = values
        batch = (x, y, jnp.arange(width) < count)
        if ACCUMULATE == 1:
            (_, (state, measured)), gradients = slopes(weights, state, batch, count)
        if ACCUMULATE > 1:

            def add(sums: tuple, part: tuple) -> tuple:
                state, measured, gradients = sums
                (_, (state, more)), steeper = slopes(weights, state, part, count)
                return (state, measured + more, jax.tree.map(jnp.add, gradients, steeper)), None

            # Part j holds the rows j, j + ACCUMULATE, ... of the batch: some on every device.
            parts = tuple(a.reshape(-1, ACCUMULATE, *a.shape[1:]).swapaxes(0, 1) for a in batch)
            nothing = (state, jnp.zeros(2), jax.tree.map(jnp.zeros_like, weights))
            (state, measured, gradients), _ = jax.lax.scan(add, nothing, parts)
        moments[rate_at] = rate
        weights, moments = optimizer.stateless_apply(moments, gradients, weights)
        return [weights, state, moments], measured

    if DATA_ON_DEVICE:

        @partial(jax.jit, out_shardings=split)
        def take(x: Any, y: Any, order: Any, i: Any) -> tuple:
            """Batch i of the samples in this order, each device its part of the rows."""
            return x[order[i]], y[order[i]]

    if MODEL == "mlp" and DATA_ON_DEVICE:

        @partial(jax.jit, donate_argnums=0, out_shardings=everywhere)
        def train_block(values: list, data: tuple, first: Any, rates: Any, length: Any) -> tuple:
            """`length` steps from batch `first` of the epoch on: one compiled loop for blocks of any length.

            It pays because a step of such a model takes no longer than its start from Python. Models with
            convolutions are stepped from Python: on a CPU, XLA computes those in a loop with one thread only.
            """

            def step(i: Any, kept: tuple) -> tuple:
                values, measured = kept
                count = jnp.minimum(BATCH_SIZE, samples - (first + i) * BATCH_SIZE)
                values, now = update(values, *take(*data, first + i), count, rates[i])
                return values, measured.at[i].set(now)

            return jax.lax.fori_loop(0, length, step, (values, jnp.zeros((len(rates), 2))))
    else:
        train_step = jax.jit(update, donate_argnums=0, out_shardings=everywhere)

    if VALIDATION:

        @jax.jit
        def val_step(values: list, x: Any, y: Any, count: Any) -> Any:
            """What is measured of one batch of the validation set."""
            weights, state, _ = values
            batch = (x, y, jnp.arange(width) < count)
            return measure(weights, state, batch, count, training=False)[1][1]

    def fetch() -> None:
        """Give the model and the optimizer the values that are on the devices by now."""
        for group, fresh in zip(groups, jax.device_get(values), strict=True):
            for variable, value in zip(group, fresh, strict=True):
                variable.assign(value)

    def save_model(path: Path) -> None:
        """The model's file."""
        fetch()
        save(model, path)

    def keep(epoch: int, position: int) -> None:
        """Write the checkpoint: `position` batches of this epoch are done."""
        progress = {"step": step, "epoch": epoch, "position": position, "learning_rate": base_rate}
        progress |= {"seconds": seconds, "measured": [row for block in history for row in block.tolist()]}
        fetch()
        arrays = [[variable.numpy() for variable in owner.variables] for owner in (model, optimizer)]
        try:
            write_arrays(save_to / "checkpoint.npz", progress, *arrays)
            report("checkpoint", path=str(save_to / "checkpoint.npz"), step=step)
        except OSError as problem:
            report("warning", text=f"The checkpoint of step {step} was not written: {problem}")

    report("status", text="compiling")
    length = 1  # steps in a block
    longest = min(steps_per_epoch, LONGEST_BLOCK)
    for epoch in range(begin, EPOCHS):
        if DATA_ON_DEVICE:
            order = jax.device_put(padded(shuffled(samples, epoch), steps_per_epoch, width), everywhere)
        while position < steps_per_epoch:
            asked = control()
            if asked.get("stop") or asked.get("checkpoint"):
                keep(epoch, position)
            if asked.get("stop"):
                save_model(save_to / "model.keras")
                return
            base_rate = asked.get("learning_rate", base_rate)
            count = min(length, steps_per_epoch - position)
            rates = np.full(longest, base_rate, np.float32)
            if SCHEDULE != "constant" or WARMUP_STEPS > 0:
                rates[:count] = [base_rate * rate_factor(step + i, total_steps) for i in range(count)]
            began = time.perf_counter()
            if MODEL == "mlp" and DATA_ON_DEVICE:
                values, measured = train_block(values, (x_train, y_train, order), position, rates, count)
                measured = np.asarray(measured)[:count]
            else:
                measured = []
                for i in range(position, position + count):
                    if DATA_ON_DEVICE:
                        x, y = take(x_train, y_train, order, i)
                    else:
                        x, y = jax.device_put(next(batches), split)
                    values, now = train_step(values, x, y, sizes[i], rates[i - position])
                    measured.append(now)
                measured = np.stack(jax.device_get(measured))
            took = time.perf_counter() - began
            losses = {"loss": measured[:, 0].tolist()}
            if TASK == "classification":
                losses["accuracy"] = measured[:, 1].tolist()
            learning_rate = float(values[2][rate_at])
            report("batch", epoch=epoch + 1, first=step + 1, **losses, learning_rate=learning_rate)
            for number, loss in enumerate(losses["loss"], start=step + 1):
                if not math.isfinite(loss):
                    raise FloatingPointError(
                        f"The loss is {loss} at step {number} (epoch {epoch + 1}). "
                        "Try a smaller learning rate, or look for very large values in the data."
                    )
            history.append(measured)
            seconds += took
            step += count
            position += count
            length = max(1, min(4 * count, longest, round(count * BLOCK_SECONDS / took)))

        means = np.average(np.concatenate(history).astype(np.float64), axis=0, weights=sizes)
        losses = {"loss": float(means[0])}  # over the samples of the epoch
        if TASK == "classification":
            losses["accuracy"] = float(means[1])
        if VALIDATION:
            began = time.perf_counter()
            measured = []
            if not DATA_ON_DEVICE:
                val_batches = batches_of_rows(x_val, y_val, [val_order])
            for i, count in enumerate(val_sizes):
                if DATA_ON_DEVICE:
                    x, y = take(x_val, y_val, val_order, i)
                else:
                    x, y = jax.device_put(next(val_batches), split)
                measured.append(val_step(values, x, y, count))
            means = np.average(np.float64(jax.device_get(measured)), axis=0, weights=val_sizes)
            seconds += time.perf_counter() - began
            losses["val_loss"] = float(means[0])
        if VALIDATION and TASK == "classification":
            losses["val_accuracy"] = float(means[1])
        report("epoch", epoch=epoch + 1, step=step, **losses, seconds=seconds)
        history, seconds, position = [], 0.0, 0
    keep(EPOCHS, 0)  # to train longer from here

    save_model(save_to / "model.keras")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(csv_report(sys.argv[1]))
    else:
        train()
