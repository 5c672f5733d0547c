"""Batches of one shape for a compiled step: the last one of an epoch is filled up with rows that do not count."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from devices import split
from settings import BATCH_SIZE, DEVICES


def row_table(order: np.ndarray, width: int, parts: int) -> np.ndarray:
    """The rows that are computed at a time, (steps * parts, width / parts).

    A batch has `width` >= BATCH_SIZE rows, filled up with its last one; part j takes its rows j, j + parts, ...
    """
    steps = -(-len(order) // BATCH_SIZE)
    rows = np.pad(order, (0, steps * BATCH_SIZE - len(order)), mode="edge").reshape(steps, BATCH_SIZE)
    rows = np.pad(rows, ((0, 0), (0, width - BATCH_SIZE)), mode="edge")
    return rows.reshape(steps, width // parts, parts).swapaxes(1, 2).reshape(steps * parts, width // parts)


def real_rows(at: torch.Tensor, rows: int, samples: int, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of the rows in line `at` of a table count, and how many the whole batch has of these.

    All on the device, from a number that lies there: with numbers from Python each step would be another graph.
    """
    count = (samples - at // parts * BATCH_SIZE).clamp(max=BATCH_SIZE)
    return torch.arange(rows, device=at.device) * parts + at % parts < count, count


def batches_of_lines(x: Any, y: Any, table: torch.Tensor, at: torch.Tensor, mesh: Any) -> Iterator[Any]:
    """The samples of each line of the table, on the device; who uses them moves `at` on."""
    for _ in range(len(table)):
        rows = table.index_select(0, at)[0]
        batch = [x.index_select(0, rows), y.index_select(0, rows)]
        if DEVICES > 1:
            split(batch, mesh)
        yield batch


def batches_of_files(x: Any, y: Any, table: np.ndarray, device: torch.device, mesh: Any) -> Iterator[Any]:
    """The samples of each line of the table, read by two threads while the batches before them compute."""

    def read(rows: np.ndarray) -> list[torch.Tensor]:
        return [torch.from_numpy(x[rows]), torch.from_numpy(y[rows])]

    readers = ThreadPoolExecutor(max_workers=2)
    waiting = deque()  # four batches at most
    try:
        for i in range(len(table) + 3):
            if i < len(table):
                waiting.append(readers.submit(read, table[i]))
            if waiting and i >= 3:
                batch = [part.to(device) for part in waiting.popleft().result()]
                if DEVICES > 1:
                    split(batch, mesh)
                yield batch
    finally:
        readers.shutdown(cancel_futures=True)
