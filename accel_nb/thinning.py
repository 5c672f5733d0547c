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
        # Rows: low, high with its sign turned, least. With the sign turned all three are minima.
        self._best = np.full((3, LIMIT), np.inf)
        self._at = np.full((3, LIMIT), -1, dtype=np.int64)
        self._total = np.zeros(LIMIT)
        self._finite = np.zeros(LIMIT, dtype=np.int64)

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
        left, right = self._best[:, 0::2], self._best[:, 1::2]
        turned = right < left
        best = np.where(turned, right, left)
        at = np.where(turned, self._at[:, 1::2], self._at[:, 0::2])
        self._best[:, :half], self._best[:, half:] = best, np.inf
        self._at[:, :half], self._at[:, half:] = at, -1
        with np.errstate(over="ignore", invalid="ignore"):
            self._total[:half] = self._total[0::2] + self._total[1::2]
        self._finite[:half] = self._finite[0::2] + self._finite[1::2]
        self._total[half:], self._finite[half:] = 0.0, 0
        self.width *= 2

    def stretches(self, limit: int = LIMIT) -> Stretches:
        """At most `limit` stretches (at least 1): copies, so that the series may grow meanwhile."""
        used = -(-self.length // self.width)
        group = max(1, -(-used // limit))
        number = -(-used // group)
        if number * group > LIMIT:  # the last group would reach past the end: give it room
            room = number * group - LIMIT
            best = np.pad(self._best, ((0, 0), (0, room)), constant_values=np.inf)
            at = np.pad(self._at, ((0, 0), (0, room)), constant_values=-1)
            total, finite = np.pad(self._total, (0, room)), np.pad(self._finite, (0, room))
        else:
            best, at = self._best[:, : number * group], self._at[:, : number * group]
            total, finite = self._total[: number * group], self._finite[: number * group]
        if group == 1:
            best, at, finite = best.copy(), at.copy(), finite.copy()
        else:
            parts = best.reshape(3, number, group)
            which = parts.argmin(axis=2)[:, :, None]
            best = np.take_along_axis(parts, which, axis=2)[:, :, 0]
            at = np.take_along_axis(at.reshape(3, number, group), which, axis=2)[:, :, 0]
            with np.errstate(over="ignore", invalid="ignore"):
                total = total.reshape(number, group).sum(axis=1)
            finite = finite.reshape(number, group).sum(axis=1)
        size = np.full(number, group * self.width)
        if number:
            size[-1] = self.length - (number - 1) * group * self.width
        low, high = best[0], -best[1]
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = total / finite
        lost = ~np.isfinite(mean) & (finite > 0)  # a sum beyond the largest float
        if lost.any():
            mean[lost] = low[lost] / 2 + high[lost] / 2
        return Stretches(low, at[0], high, at[1], best[2], at[2], mean, finite, size)
