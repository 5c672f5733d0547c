"""The data of a run on several replicas: each one's share of a batch, from the device or from the files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from settings import BATCH_SIZE, STRATEGY


def on_each_device(strategy: tf.distribute.Strategy, *arrays: np.ndarray) -> list[tf.Variable]:
    """The arrays in variables, a copy on each device of this process; a GPU cannot gather bytes from constants."""
    if STRATEGY == "multi_worker":
        with tf.device(strategy.extended.worker_devices[0]):  # each worker has read them itself
            return [tf.Variable(array, trainable=False) for array in arrays]
    with strategy.scope():
        return [tf.Variable(array, trainable=False) for array in arrays]


def share(part: tf.Tensor, replicas: int) -> tuple[tf.Tensor, tf.Tensor]:
    """The rows of this replica, of those that all compute at the same time, and how much each counts."""
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    if STRATEGY == "tpu":
        rows = tf.gather(part, replica, axis=1)
        counts = tf.cast(rows >= 0, tf.float32)
        rows = tf.maximum(rows, 0)
    else:
        # Fewer rows than replicas go to each of them and count less: not every layer takes a batch without rows,
        # and batch normalisation still sees the same.
        shares = tf.where(tf.size(part) < replicas, 1, replicas)
        rows = tf.gather(part, tf.range(replica % shares, tf.size(part), shares))
        counts = tf.fill(tf.shape(rows), tf.cast(shares / replicas, tf.float32))
    return rows, counts


def padded(order: np.ndarray, steps: int, replicas: int, parts: int) -> np.ndarray:
    """The order as (steps, parts, rows, replicas), where -1 is no row: the same shape for each step."""
    width = replicas * parts
    batches = np.full((steps, math.ceil(BATCH_SIZE / width) * width), -1)
    for batch, first in zip(batches, range(0, steps * BATCH_SIZE, BATCH_SIZE), strict=True):
        rows = order[first : first + BATCH_SIZE]
        batch[: len(rows)] = rows
    return np.moveaxis(batches.reshape(steps, -1, replicas, parts), 3, 1)


def shares_from_files(
    strategy: tf.distribute.Strategy,
    x: np.ndarray,
    y: np.ndarray,
    orders: Iterable[np.ndarray],
    *,
    steps: int,
    parts: int,
) -> Iterator[Any]:
    """For each part of each batch, every replica's samples and how much each counts; read ahead."""
    replicas = strategy.num_replicas_in_sync

    def rows_together() -> Iterator[np.ndarray]:
        for order in orders:
            if STRATEGY == "tpu":
                for batch in padded(order, steps, replicas, parts):
                    yield from batch
            else:
                for start in range(0, steps * BATCH_SIZE, BATCH_SIZE):
                    batch = order[start : start + BATCH_SIZE]
                    yield from (batch[j::parts] for j in range(min(parts, len(batch))))

    def pipeline(context: tf.distribute.InputContext) -> tf.data.Dataset:
        here = replicas // context.num_input_pipelines
        first = context.input_pipeline_id * here

        def read() -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
            for part in rows_together():
                for replica in range(first, first + here):
                    if STRATEGY == "tpu":
                        rows = np.maximum(part[:, replica], 0)
                        counts = part[:, replica] >= 0
                    else:
                        shares = replicas if len(part) >= replicas else 1
                        rows = part[replica % shares :: shares]
                        counts = np.full(len(rows), shares / replicas)
                    yield x[rows], y[rows], counts.astype("float32")

        if STRATEGY == "tpu":
            rows = math.ceil(BATCH_SIZE / (replicas * parts))
        if STRATEGY != "tpu":
            rows = None
        kinds = tuple(tf.TensorSpec((rows, *array.shape[1:]), array.dtype) for array in (x, y))
        kinds += (tf.TensorSpec((rows,), tf.float32),)
        # Without an end: the strategy would else ask all workers before each batch whether one is left.
        return tf.data.Dataset.from_generator(read, output_signature=kinds).repeat().prefetch(4 * here)

    return iter(strategy.distribute_datasets_from_function(pipeline))
