"""The compiled loops of a run on several replicas."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from settings import (
    ACCUMULATE,
    BATCH_SIZE,
    DATA_ON_DEVICE,
    MODEL,
    OPTIMIZER,
    OPTIMIZER_ARGS,
    PRECISION,
    STRATEGY,
    TASK,
    X_SCALE,
)
from shares import padded, share
from spread import over_workers


@tf.autograph.experimental.do_not_convert
def on_replicas(strategy: tf.distribute.Strategy, function: Callable[..., tf.Tensor], *args: Any) -> tf.Tensor:
    """Call it on every replica of this process; the sum of what they answer."""
    return tf.add_n(strategy.experimental_local_results(strategy.run(function, args=args)))


def measure(model: keras.Model, x: tf.Tensor, y: tf.Tensor, counts: tf.Tensor, training: bool) -> tf.Tensor:
    """The sums over these rows of the loss and, for classes, of what was told right."""
    if X_SCALE != 1.0:
        x = tf.cast(x, tf.float32) / X_SCALE
    logits = tf.cast(model(x, training=training), tf.float32)
    if TASK == "classification":
        losses = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
    if TASK == "regression":
        losses = keras.losses.mean_squared_error(y, logits)
    if MODEL == "own":
        losses += sum(model.losses)  # the regularisation that your layers ask for
    if TASK == "classification":
        right = tf.cast(tf.argmax(logits, axis=1) == y, tf.float32)
        measured = tf.stack([losses, right])
    if TASK == "regression":
        measured = tf.stack([losses])
    return tf.reduce_sum(counts * measured, axis=1)


def part_of(data: Any, order: tf.Tensor, i: tf.Tensor, j: tf.Tensor | int, parts: int) -> Any:
    """What all replicas compute at the same time, part j of batch i: row numbers, or the samples themselves."""
    if not DATA_ON_DEVICE:
        part = next(data)
    elif STRATEGY == "tpu":
        part = order[i, j]
    else:
        part = order[i * BATCH_SIZE : (i + 1) * BATCH_SIZE][j::parts]  # the last batch may be smaller
    return part


def compile_training(
    strategy: tf.distribute.Strategy,
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    data: Any,
    sizes: list[int],
) -> Callable[..., tf.Tensor]:
    """A function that takes steps of an epoch whose batches have these sizes, on all replicas."""
    replicas = strategy.num_replicas_in_sync
    batch_sizes = tf.constant(sizes, tf.float32)
    if ACCUMULATE > 1 and TASK == "classification":
        columns = 2
    if ACCUMULATE > 1 and TASK == "regression":
        columns = 1
    if ACCUMULATE > 1:
        with strategy.scope():
            totals = [tf.Variable(tf.zeros(weight.shape), trainable=False) for weight in model.trainable_variables]

    def compute(part: Any, size: tf.Tensor) -> tf.Tensor:
        """What this replica has to do for an update, or a part of it; gives the sums, measured before it."""
        if DATA_ON_DEVICE:
            rows, counts = share(part, replicas)
            x, y = (tf.gather(array, rows) for array in data)
        else:
            x, y, counts = part
        with tf.GradientTape() as tape:
            sums = measure(model, x, y, counts, training=True)
            objective = sums[0] / size  # all replicas together: the mean over the batch
            if OPTIMIZER != "adamw" and OPTIMIZER_ARGS["weight_decay"] > 0:
                # The gradient of half the squared weights is what PyTorch adds: weight_decay * weight.
                squares = tf.add_n([tf.nn.l2_loss(weight) for weight in model.trainable_variables])
                objective += OPTIMIZER_ARGS["weight_decay"] * squares * tf.reduce_sum(counts) / size
            if PRECISION == "fp16":
                objective = optimizer.scale_loss(objective)
        gradients = tape.gradient(objective, model.trainable_variables)
        if ACCUMULATE == 1:
            update(gradients)
        if ACCUMULATE > 1:
            for total, gradient in zip(totals, gradients, strict=True):
                total.assign_add(gradient)
        return sums

    def update(gradients: list[tf.Tensor]) -> None:
        if PRECISION == "fp16":
            # All must agree on whether the sum is finite, so each gets it first; apply() then adds up equal parts.
            sums = tf.distribute.get_replica_context().all_reduce("SUM", gradients)
            gradients = [total / replicas for total in sums]
        optimizer.apply(gradients, model.trainable_variables)  # adds up the gradients of all replicas

    if ACCUMULATE > 1:

        def update_from_totals() -> tf.Tensor:
            update([tf.identity(total) for total in totals])
            for total in totals:
                total.assign(tf.zeros_like(total))
            return tf.constant(0.0)

    if STRATEGY == "tpu" and ACCUMULATE > 1:
        parts = tf.constant([ACCUMULATE] * len(sizes))
    if STRATEGY != "tpu" and ACCUMULATE > 1:
        parts = tf.constant([min(ACCUMULATE, size) for size in sizes])
    if STRATEGY == "tpu":
        rows_each = math.ceil(BATCH_SIZE / (replicas * ACCUMULATE))
        kinds = [tf.TensorSpec([None, ACCUMULATE, rows_each, replicas], tf.int64)]
    else:
        kinds = [tf.TensorSpec([None], tf.int64)]
    kinds += [tf.TensorSpec([], tf.int32), tf.TensorSpec([None], tf.float32)]

    @tf.function(input_signature=kinds)  # one graph for blocks of any length
    def train_block(order: tf.Tensor, first: tf.Tensor, rates: tf.Tensor) -> tf.Tensor:
        """One step for each learning rate, from batch `first` of the epoch on: (steps, measured values)."""
        measured = tf.TensorArray(tf.float32, size=tf.size(rates))
        for i in tf.range(tf.size(rates)):
            optimizer.learning_rate.assign(rates[i])
            size = batch_sizes[first + i]
            if ACCUMULATE == 1:
                part = part_of(data, order, first + i, 0, 1)
                measured = measured.write(i, on_replicas(strategy, compute, part, size))
            if ACCUMULATE > 1:
                sums = tf.zeros([columns])
                for j in tf.range(parts[first + i]):
                    part = part_of(data, order, first + i, j, ACCUMULATE)
                    sums += on_replicas(strategy, compute, part, size)
                on_replicas(strategy, update_from_totals)
                measured = measured.write(i, sums)
        measured = measured.stack()
        if STRATEGY == "multi_worker":
            measured = over_workers(strategy, measured)
        return measured / batch_sizes[first : first + tf.size(rates), None]

    return train_block


def compile_validation(
    strategy: tf.distribute.Strategy, model: keras.Model, data: Any, sizes: list[int]
) -> Callable[[], tf.Tensor]:
    """A function that measures the model with the validation set, in batches of these sizes, on all replicas."""
    replicas = strategy.num_replicas_in_sync
    steps = len(sizes)
    if STRATEGY == "tpu":
        order = tf.constant(padded(np.arange(sum(sizes)), steps, replicas, parts=1))
    else:
        order = tf.range(sum(sizes), dtype=tf.int64)

    def compute(part: Any) -> tf.Tensor:
        if DATA_ON_DEVICE:
            rows, counts = share(part, replicas)
            x, y = (tf.gather(array, rows) for array in data)
        else:
            x, y, counts = part
        return measure(model, x, y, counts, training=False)

    @tf.function
    def validate() -> tf.Tensor:
        """The whole validation set, each sample once: (batches, measured values)."""
        measured = tf.TensorArray(tf.float32, size=steps)
        for i in tf.range(steps):
            part = part_of(data, order, i, 0, 1)
            measured = measured.write(i, on_replicas(strategy, compute, part))
        measured = measured.stack()
        if STRATEGY == "multi_worker":
            measured = over_workers(strategy, measured)
        return measured / tf.constant(sizes, tf.float32)[:, None]

    return validate
