"""Batches read from the files of the data set while training runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import tensorflow as tf


def batches_from_files(
    x: np.ndarray, y: np.ndarray, orders: Iterable[np.ndarray], steps: int, size: int
) -> Iterator[tuple[tf.Tensor, tf.Tensor]]:
    """Batches of `size` samples in these orders, one per epoch, read ahead while earlier ones are used."""

    def read() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for order in orders:
            for start in range(0, steps * size, size):
                rows = order[start : start + size]
                yield x[rows], y[rows]

    kinds = tuple(tf.TensorSpec((None, *array.shape[1:]), array.dtype) for array in (x, y))
    with tf.device("/CPU:0"):
        return iter(tf.data.Dataset.from_generator(read, output_signature=kinds).prefetch(4))
