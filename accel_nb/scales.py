"""Axes for curves: limits and ticks that people read easily, and where a value stands between them.

Everything is finite for every finite float, the largest and the smallest included.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from accel_nb.thinning import Floats


class Scale(NamedTuple):
    """A value axis. A value v stands at `(v / unit - low) / (high - low)` of the way up; on a log axis log10(v)
    takes the place of v / unit. `ticks` holds (way up, label) pairs, from the bottom to the top.
    """

    low: float
    high: float
    unit: float
    log: bool
    ticks: tuple[tuple[float, str], ...]

    def up(self, values: Floats) -> Floats:
        """How far up the axis finite values stand, 0 (bottom) to 1 (top); held there if they are beyond it.

        On a log axis the values must be positive.
        """
        at = np.log10(values) if self.log else values / self.unit
        return np.minimum(np.maximum((at - self.low) / (self.high - self.low), 0.0), 1.0)


def scale(low: float, high: float, *, log: bool = False) -> Scale:
    """An axis that holds everything from `low` to `high` (finite, low <= high; for a log axis low > 0)."""
    return _log(low, high) if log else _linear(low, high)


@lru_cache(maxsize=64)
def _linear(low: float, high: float) -> Scale:
    # Zero belongs to the picture unless the values are far from it compared with their spread.
    if 0 < low <= high / 2 or low == high > 0:
        low = 0.0
    elif low / 2 <= high < 0 and (high >= low / 2 or low == high):
        high = 0.0
    if low == high:
        high = 1.0
    # In units of a power of ten, so that neither the difference nor a tick can overflow.
    power = max(math.floor(math.log10(max(abs(low), abs(high)))), -300)
    unit = 10.0**power
    low, high = low / unit, high / unit
    step = _round_step((high - low) / 5.5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    if last - first > 12:  # a spread too small for floats of this size to divide
        first, last = 0, 1
        step = high - low
    else:
        low, high = first * step, last * step
    values = [low + (number - first) * step for number in range(first, last + 1)]
    labels = _labels(values, step, power)
    return Scale(
        low, high, unit, False, tuple(((v - low) / (high - low), t) for v, t in zip(values, labels, strict=True))
    )


def _round_step(about: float) -> float:
    """The step 1, 2 or 5 times a power of ten that is next above `about`."""
    power = 10.0 ** math.floor(math.log10(about))
    return next(power * times for times in (1, 2, 5, 10) if power * times >= about * (1 - 1e-9))


def _labels(values: list[float], step: float, power: int) -> list[str]:
    """Labels with just the decimals that tell the ticks apart; `values` and `step` are in units of 10**power."""
    decimals = max(0, -(math.floor(math.log10(step) + 1e-9) + power))
    if -5 < power < 5 and decimals <= 7:
        return [f"{value * 10.0**power:,.{decimals}f}" for value in values]
    inner = max(0, -math.floor(math.log10(step) + 1e-9))
    labels = ["0" if value == 0 else f"{value:.{inner}f}e{power}" for value in values]
    if max(map(len, labels)) <= 12:
        return labels
    # Next to nothing between them: a short label is worth more than one that tells them apart.
    return [f"{value * 10.0**power:.3g}" for value in values]


@lru_cache(maxsize=64)
def _log(low: float, high: float) -> Scale:
    bottom, top = math.log10(low), math.log10(high)
    if top - bottom < 0.02:  # one value: room on both sides
        bottom, top = bottom - 0.15, top + 0.15
    ones = [(power + shift, power, times) for power in range(math.floor(bottom), math.ceil(top) + 1)
            for times, shift in ((1, 0.0), (2, math.log10(2)), (5, math.log10(5)))]  # fmt: skip
    if top - bottom > 2:
        ones = [one for one in ones if one[2] == 1]
    below = max(i for i, one in enumerate(ones) if one[0] <= bottom + 1e-9)
    above = min((i for i, one in enumerate(ones) if one[0] >= top - 1e-9), default=len(ones) - 1)
    ones = ones[below : above + 1]
    every = max(1, -(-(len(ones) - 1) // 6))
    bottom, top = ones[0][0], ones[-1][0]
    ticks = tuple(((at - bottom) / (top - bottom), _power(times, power)) for at, power, times in ones[::every])
    return Scale(bottom, top, 1.0, True, ticks)


def _power(times: int, power: int) -> str:
    return f"{times * 10.0**power:,.{max(0, -power)}f}" if -4 <= power <= 4 else f"{times}e{power}"


@lru_cache(maxsize=64)
def steps(highest: int) -> tuple[tuple[float, str], ...]:
    """Ticks of an axis of steps from 0 to `highest`: (way along, label) pairs at round numbers of steps."""
    step = max(1, round(_round_step(highest / 7)))
    return tuple((at / highest, _count(at)) for at in range(0, highest + 1, step))


def _count(number: int) -> str:
    for size, letter in ((1_000_000_000, "G"), (1_000_000, "M"), (10_000, "k")):
        if number >= size:
            return f"{number / min(size, 1000 if letter == 'k' else size):g}{letter}"
    return f"{number:,}"
