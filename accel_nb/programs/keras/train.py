"""Trains a Keras model on TensorFlow: a script to read, to run and to change.

`python train.py` trains on the arrays in `data/` and prints one line per epoch.
`python train.py history.csv` also writes every step to that file.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow's own log: errors only
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")  # take GPU memory as it is needed, not all at once

import keras
import numpy as np
import tensorflow as tf
from arrays import read_arrays, write_arrays
from batches import batches_from_files
from building import build_model
from devices import choose_device, name_of_device
from parts import build_optimizer, layer_table, parameter_count, restore, save, shuffled
from reports import csv_report, no_control, print_report, rate_factor
from settings import (
    ACCELERATOR,
    ACCUMULATE,
    BATCH_SIZE,
    COMPILE,
    DATA_ON_DEVICE,
    DETERMINISTIC,
    DEVICE_INDEX,
    DROP_LAST,
    EPOCHS,
    HERE,
    LEARNING_RATE,
    MODEL,
    NODES,
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
from several import train_on_machines
from shares import on_each_device, padded, shares_from_files
from spread import from_first, make_strategy, over_workers, prepare_replicas, synchronize, unheard
from steps import compile_training, compile_validation

BLOCK_SECONDS = 0.15  # losses stay on the device and are fetched about this often: each fetch makes it wait


def load_model(path: str | Path = HERE / "model.keras") -> keras.Model:
    """The trained model, on the CPU."""
    with tf.device("/CPU:0"):
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
    """Train; `report` hears what happens, `control` is asked about every 0.15 s whether to stop.

    `resume_from`: a checkpoint of this run, to go on from there.
    """
    save_to = Path(save_to)
    save_to.mkdir(parents=True, exist_ok=True)
    keras.utils.set_random_seed(SEED)
    if DETERMINISTIC:
        tf.config.experimental.enable_op_determinism()

    choose_device()
    if STRATEGY == "multi_worker":
        report("joining")
    if STRATEGY != "single":
        strategy = make_strategy()
        replicas = strategy.num_replicas_in_sync
    if STRATEGY == "multi_worker":
        report("joined")
        first_worker = strategy.cluster_resolver.task_id == 0
        if not first_worker:
            report, control = unheard, no_control  # one worker tells, and is asked for all
    device_name = name_of_device()

    begin, position, step = 0, 0, 0  # the first epoch, and how many of its batches and of all steps are done
    base_rate = LEARNING_RATE
    history, seconds = [], 0.0  # of this epoch
    if PRECISION == "fp16":
        skipped = 0  # steps in a row without a finite loss
    if resume_from is not None:
        progress, saved = read_arrays(resume_from)
        begin, position, step = progress["epoch"], progress["position"], progress["step"]
        base_rate, seconds = progress["learning_rate"], progress["seconds"]
        if progress["measured"]:
            history = [np.array(progress["measured"], np.float32)]
        if PRECISION == "fp16":
            skipped = progress.get("skipped", 0)

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
        if STRATEGY == "single" and ACCUMULATE > 1:
            val_batch = math.ceil(BATCH_SIZE / ACCUMULATE)  # as many as in training: it needs no more memory
        if STRATEGY != "single" or ACCUMULATE == 1:
            val_batch = BATCH_SIZE
        val_steps = math.ceil(val_samples / val_batch)
        val_sizes = [min(val_batch, val_samples - i * val_batch) for i in range(val_steps)]
    else:
        val_samples = 0
    if STRATEGY == "single" and DATA_ON_DEVICE:
        x_train, y_train = tf.Variable(x_train, trainable=False), tf.Variable(y_train, trainable=False)
    if STRATEGY == "single" and DATA_ON_DEVICE and VALIDATION:
        x_val, y_val = tf.constant(x_val), tf.constant(y_val)
    if STRATEGY == "single" and not DATA_ON_DEVICE:
        orders = (shuffled(samples, epoch) for epoch in range(begin, EPOCHS))
        batches = batches_from_files(x_train, y_train, orders, steps_per_epoch, BATCH_SIZE)
        for _ in range(position):
            next(batches)  # these are done
    if STRATEGY == "single" and VALIDATION and not DATA_ON_DEVICE:
        val_orders = [np.arange(val_samples)] * EPOCHS
        val_batches = batches_from_files(x_val, y_val, val_orders, val_steps, val_batch)
    if STRATEGY != "single" and DATA_ON_DEVICE:
        train_data = on_each_device(strategy, x_train, y_train)
    if STRATEGY != "single" and DATA_ON_DEVICE and VALIDATION:
        val_data = on_each_device(strategy, x_val, y_val)
    if STRATEGY != "single" and not DATA_ON_DEVICE:
        orders = (shuffled(samples, epoch) for epoch in range(begin, EPOCHS))
        train_data = shares_from_files(strategy, x_train, y_train, orders, steps=steps_per_epoch, parts=ACCUMULATE)
        for size in sizes[:position]:
            for _ in range(ACCUMULATE if STRATEGY == "tpu" else min(ACCUMULATE, size)):
                next(train_data)  # these are done
    if STRATEGY != "single" and VALIDATION and not DATA_ON_DEVICE:
        val_orders = [np.arange(val_samples)] * EPOCHS
        val_data = shares_from_files(strategy, x_val, y_val, val_orders, steps=val_steps, parts=1)

    # The model, its loss and its optimizer; compiled only so that the saved file holds all three.
    if STRATEGY == "single":
        model = build_model()
        optimizer = build_optimizer()
        optimizer.build(model.trainable_variables)
        if resume_from is not None:
            restore(saved, model, optimizer)
    if STRATEGY != "single":
        with strategy.scope():  # every replica gets a copy of each variable
            model = build_model()
            optimizer = build_optimizer()
            optimizer.build(model.trainable_variables)
            if resume_from is not None:
                restore(saved, model, optimizer)
        prepare_replicas(strategy, model)
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
    if ACCELERATOR == "tpu":
        device = "/TPU:0"
    versions = {"tensorflow": tf.__version__, "keras": keras.__version__}
    if ACCELERATOR == "gpu":
        versions["cuda"] = tf.sysconfig.get_build_info().get("cuda_version", "")
        versions["cudnn"] = tf.sysconfig.get_build_info().get("cudnn_version", "")
    if SCHEDULE != "constant" or WARMUP_STEPS > 0:
        total_steps = EPOCHS * steps_per_epoch
        optimizer.learning_rate.assign(LEARNING_RATE * rate_factor(0, total_steps))
    report("model", parameters=parameter_count(model), layers=layer_table(model))
    started = {
        "device": device,
        "device_name": device_name,
        "versions": versions,
        "steps_per_epoch": steps_per_epoch,
        "train_samples": samples,
        "val_samples": val_samples,
        "learning_rate": float(optimizer.learning_rate.numpy()),
    }
    if STRATEGY == "single" and ACCUMULATE > 1:
        started |= {"strategy": STRATEGY, "replicas": 1, "per_replica": BATCH_SIZE}
    if STRATEGY != "single":
        started |= {"strategy": STRATEGY, "replicas": replicas, "per_replica": math.ceil(BATCH_SIZE / replicas)}
        started["backend"] = {"cpu": "ring", "gpu": "nccl", "tpu": "xla"}[ACCELERATOR]
    report("started", **started)

    if STRATEGY == "single":

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

        if ACCUMULATE == 1:

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

        if ACCUMULATE > 1:
            totals = [tf.Variable(tf.zeros(weight.shape), trainable=False) for weight in model.trainable_variables]

            @tf.function(autograph=False, jit_compile=COMPILE)
            def add_part(x: tf.Tensor, y: tf.Tensor, portion: tf.Tensor) -> tf.Tensor:
                """Adds up the gradients of a part, this portion of its batch; gives what was measured."""
                with tf.GradientTape() as tape:
                    measured = measure(x, y, training=True)
                    objective = portion * measured[0]
                    if OPTIMIZER != "adamw" and OPTIMIZER_ARGS["weight_decay"] > 0:
                        # The gradient of half the squared weights is what PyTorch adds: weight_decay * weight.
                        squares = tf.add_n([tf.nn.l2_loss(weight) for weight in model.trainable_variables])
                        objective += portion * OPTIMIZER_ARGS["weight_decay"] * squares
                    if PRECISION == "fp16":
                        objective = optimizer.scale_loss(objective)
                gradients = tape.gradient(objective, model.trainable_variables)
                for total, gradient in zip(totals, gradients, strict=True):
                    total.assign_add(gradient)
                return measured

            @tf.function
            def train_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
                """One update of the weights with the gradients of all parts; gives what was measured before it."""
                rows = tf.cast(tf.shape(y)[0], tf.float32)
                if TASK == "classification":
                    sums = tf.zeros([2])
                if TASK == "regression":
                    sums = tf.zeros([1])
                for j in tf.range(
                    tf.minimum(ACCUMULATE, tf.shape(y)[0])
                ):  # a graph of the same size for any number
                    size = tf.cast(tf.shape(y[j::ACCUMULATE])[0], tf.float32)
                    sums += size * add_part(x[j::ACCUMULATE], y[j::ACCUMULATE], size / rows)
                optimizer.apply([tf.identity(total) for total in totals], model.trainable_variables)
                for total in totals:
                    total.assign(tf.zeros_like(total))
                return sums / rows

        kinds = [tf.TensorSpec([None], tf.int64), tf.TensorSpec([], tf.int32), tf.TensorSpec([None], tf.float32)]

        @tf.function(input_signature=kinds)  # one graph for blocks of any length
        def train_block(order: tf.Tensor, first: tf.Tensor, rates: tf.Tensor) -> tf.Tensor:
            """One step for each learning rate, from batch `first` of the epoch on: (steps, measured values)."""
            measured = tf.TensorArray(tf.float32, size=tf.size(rates))
            for i in tf.range(tf.size(rates)):
                if DATA_ON_DEVICE:
                    rows = order[
                        (first + i) * BATCH_SIZE : (first + i + 1) * BATCH_SIZE
                    ]  # the last ones may be fewer
                    x, y = tf.gather(x_train, rows), tf.gather(y_train, rows)
                else:
                    x, y = next(batches)
                optimizer.learning_rate.assign(rates[i])
                measured = measured.write(i, train_step(x, y))
            return measured.stack()

    if STRATEGY == "single" and VALIDATION:
        val_step = tf.function(measure, autograph=False, jit_compile=COMPILE)

        @tf.function
        def validate() -> tf.Tensor:
            """The whole validation set, each sample once: (batches, measured values)."""
            measured = tf.TensorArray(tf.float32, size=val_steps)
            for i in tf.range(val_steps):
                if DATA_ON_DEVICE:
                    rows = slice(i * val_batch, (i + 1) * val_batch)
                    x, y = x_val[rows], y_val[rows]
                else:
                    x, y = next(val_batches)
                measured = measured.write(i, val_step(x, y, training=False))
            return measured.stack()

    if STRATEGY != "single":
        train_block = compile_training(strategy, model, optimizer, train_data, sizes)
    if STRATEGY != "single" and VALIDATION:
        validate = compile_validation(strategy, model, val_data, val_sizes)

    def keep(epoch: int, position: int) -> None:
        """Write the checkpoint: `position` batches of this epoch are done."""
        progress = {"step": step, "epoch": epoch, "position": position, "learning_rate": base_rate}
        progress |= {"seconds": seconds, "measured": [row for block in history for row in block.tolist()]}
        if PRECISION == "fp16":
            progress["skipped"] = skipped
        groups = [[variable.numpy() for variable in owner.variables] for owner in (model, optimizer)]
        try:
            write_arrays(save_to / "checkpoint.npz", progress, *groups)
            report("checkpoint", path=str(save_to / "checkpoint.npz"), step=step)
        except OSError as problem:
            report("warning", text=f"The checkpoint of step {step} was not written: {problem}")

    def end(epoch: int, position: int) -> None:
        """Write the checkpoint and the model."""
        if STRATEGY != "single" and MODEL != "mlp":
            synchronize(model, over_replicas=False)
        if STRATEGY != "multi_worker":
            keep(epoch, position)
            save(model, save_to / "model.keras")
        if STRATEGY == "multi_worker":
            if first_worker:
                keep(epoch, position)
                save(model, save_to / "model.keras")
            over_workers(strategy, tf.constant(0.0))  # the others wait until the files are there

    report("status", text="compiling")
    length = 1  # steps in a block
    for epoch in range(begin, EPOCHS):
        if STRATEGY != "tpu":
            order = tf.constant(shuffled(samples, epoch))
        if STRATEGY == "tpu":
            order = tf.constant(padded(shuffled(samples, epoch), steps_per_epoch, replicas, ACCUMULATE))
        while position < steps_per_epoch:
            asked = control()
            if asked.get("checkpoint"):
                keep(epoch, position)
            if STRATEGY == "multi_worker":
                asked, length = from_first(strategy, asked, base_rate, length)
            if asked.get("stop"):
                end(epoch, position)
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
        history, seconds, position = [], 0.0, 0

    end(EPOCHS, 0)  # the checkpoint is there to train longer


if __name__ == "__main__":
    if NODES > 1:
        train_on_machines(train)
    elif len(sys.argv) > 1:
        train(csv_report(sys.argv[1]))
    else:
        train()
