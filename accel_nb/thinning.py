"""A series of any length, kept small enough to draw: the extremes of at most `LIMIT` equal stretches.

Adding k values costs the same at the first step and at the millionth, and so does reading: when the stretches
run out, neighbours are joined in pairs and each stretch becomes twice as wide. No extreme is ever lost on the
way.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

LIMIT = 512  # stretches; even, so that they join in pairs
_ROWS = np.arange(3)[:, None] * 2 * LIMIT  # where each row of the extremes begins, counted flat
_CHUNK = 1 << 16  # values handled at once: bounds the memory of one very long block


class Stretches(NamedTuple):
    """Neighbouring stretches of a series, one entry each; all arrays have shape `(stretches,)`.

    `low`, `high`, `least` are the smallest, the largest and the smallest positive of a stretch's finite
    values (+inf, -inf, +inf where there is none); `low_at`, `high_at`, `least_at` the 0-based positions of
    the first of them (-1 where there is none). `mean` is that of the finite values (NaN where there is none),
    `finite` their number, `size` the number of all values, NaN and infinite ones included.
    """

    low: Floats
    low_at: Ints
    high: Floats
    high_at: Ints
    least: Floats
    least_at: Ints
    mean: Floats
    finite: Ints
    size: Ints


class Thinned:
    """The thinned form of a series that grows at its end.

    `width` is the number of values in a stretch (a power of 2, set by the length alone), `bad` the number of
    values that are NaN or infinite, `first_bad` the 0-based position of the first of them (-1: none),
    `not_positive` the number of finite values of 0 or less.
    """

    __slots__ = ("_at", "_best", "_finite", "_total", "bad", "first_bad", "length", "not_positive", "width")

    def __init__(self) -> None:
        self.width, self.length = 1, 0
        self.bad, self.first_bad, self.not_positive = 0, -1, 0
        # Rows: low, high with its sign turned, least. With the sign turned all three are minima. The second half
        # stays empty: a last group of stretches may reach into it.
        self._best = np.full((3, 2 * LIMIT), np.inf)
        self._at = np.full((3, 2 * LIMIT), -1, dtype=np.int64)
        self._total = np.zeros(2 * LIMIT)
        self._finite = np.zeros(2 * LIMIT, dtype=np.int64)

    def extend(self, values: Floats) -> None:
        """Add `values`, shape `(k,)`, at the end: O(k) however long the series is."""
        for begin in range(0, len(values), _CHUNK):
            self._extend(values[begin : begin + _CHUNK])

    def _extend(self, values: Floats) -> None:
        start, count = self.length, len(values)
        while start + count > LIMIT * self.width:
            self._join_pairs()
        width = self.width
        first, last = start // width, (start + count - 1) // width
        if first == last:  # the usual case of a long run: no stretch ends within the block
            rows, origin = values[None, :], np.array([start])
        else:
            rows = np.full((last - first + 1, width), np.nan)
            front = start - first * width
            rows.reshape(-1)[front : front + count] = values
            origin = np.arange(first, last + 1) * width
        finite = np.isfinite(rows)
        here = slice(first, last + 1)
        lines = np.arange(len(rows))
        positive = finite & (rows > 0)
        for row, candidates in enumerate(
            (np.where(finite, rows, np.inf), np.where(finite, -rows, np.inf), np.where(positive, rows, np.inf))
        ):
            column = candidates.argmin(axis=1)
            found = candidates[lines, column]
            better = found < self._best[row, here]  # not <=: the first of equal ones stays
            np.copyto(self._best[row, here], found, where=better)
            np.copyto(self._at[row, here], origin + column, where=better)
        with np.errstate(over="ignore"):  # values near the largest float; the mean is held between low and high
            self._total[here] += np.where(finite, rows, 0.0).sum(axis=1)
        number = finite.sum(axis=1)
        self._finite[here] += number
        all_finite = int(number.sum())
        self.not_positive += all_finite - int(positive.sum())
        if all_finite != count:
            if self.bad == 0:
                self.first_bad = start + int(np.flatnonzero(~np.isfinite(values))[0])
            self.bad += count - all_finite
        self.length = start + count

    def _join_pairs(self) -> None:
        half = LIMIT // 2
        left, right = slice(0, LIMIT, 2), slice(1, LIMIT, 2)
        turned = self._best[:, right] < self._best[:, left]
        best = np.where(turned, self._best[:, right], self._best[:, left])
        at = np.where(turned, self._at[:, right], self._at[:, left])
        self._best[:, :half], self._best[:, half:] = best, np.inf
        self._at[:, :half], self._at[:, half:] = at, -1
        with np.errstate(over="ignore", invalid="ignore"):
            self._total[:half] = self._total[left] + self._total[right]
        self._finite[:half] = self._finite[left] + self._finite[right]
        self._total[half:], self._finite[half:] = 0.0, 0
        self.width *= 2

    def stretches(self, limit: int = LIMIT, steps: Ints | None = None) -> Stretches:
        """At most `limit` stretches (at least 1): copies, so that the series may grow meanwhile.

        `steps` holds the step of each value, shape `(length,)`; without it, steps count from 1.
        """
        used = -(-self.length // self.width)
        group = max(1, -(-used // limit))
        number = -(-used // group)
        here = number * group
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            if group == 1:
                best, at = self._best[:, :here].copy(), self._at[:, :here].copy()
                total, finite = self._total[:here], self._finite[:here].copy()
            else:
                parts = self._best[:, :here].reshape(3, number, group)
                # Where the winners stand in the flat arrays: each row of three, each group, the best within it.
                flat = parts.argmin(axis=2) + np.arange(0, here, group) + _ROWS
                best, at = self._best.take(flat), self._at.take(flat)
                total = np.add.reduce(self._total[:here].reshape(number, group), axis=1)
                finite = np.add.reduce(self._finite[:here].reshape(number, group), axis=1)
            mean = total / finite
        low, high = best[0], -best[1]
        if not np.isfinite(total).all():  # a sum beyond the largest float
            lost = ~np.isfinite(total) & (finite > 0)
            mean[lost] = low[lost] / 2 + high[lost] / 2
        if steps is None:
            at += 1
        elif number:
            at = np.where(at < 0, 0, steps[at])
        size = np.full(number, group * self.width)
        if number:
            size[-1] = self.length - (number - 1) * group * self.width
        return Stretches(low, at[0], high, at[1], best[2], at[2], mean, finite, size)

    def limits(self) -> tuple[float, float, float]:
        """The smallest, the largest and the smallest positive finite value; +inf, -inf, +inf if there is none."""
        low, high, least = self._best.min(axis=1).tolist()
        return low, -high, least

    def position(self, largest: bool) -> int:
        """The 0-based position of the first of the largest, or smallest, finite values; -1 if there is none."""
        row = int(largest)
        return int(self._at[row, self._best[row].argmin()])
