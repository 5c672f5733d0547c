"""Batches of one shape for a compiled step: the last one of an epoch is filled up with rows that do not count."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from settings import BATCH_SIZE


def padded(order: np.ndarray, steps: int, width: int) -> np.ndarray:
    """The rows of each step, (steps, width), of width >= BATCH_SIZE; a batch's last row is repeated to fill it."""
    rows = np.pad(order[: steps * BATCH_SIZE], (0, max(0, steps * BATCH_SIZE - len(order))), mode="edge")
    rows = rows.reshape(steps, BATCH_SIZE)
    return np.pad(rows, ((0, 0), (0, width - BATCH_SIZE)), mode="edge").astype(np.int32)


def batches_of_rows(
    x: np.ndarray, y: np.ndarray, orders: Iterable[np.ndarray]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The samples of each row of these tables, read by two threads while the batches before them compute."""
    readers = ThreadPoolExecutor(max_workers=2)
    waiting = deque()  # four batches at most
    try:
        for rows in (rows for order in orders for rows in order):
            waiting.append(readers.submit(lambda rows=rows: (x[rows], y[rows])))
            if len(waiting) == 4:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        readers.shutdown(cancel_futures=True)
