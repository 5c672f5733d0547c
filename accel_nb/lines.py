"""From a thinned series to the text of an SVG path: a bounded number of points, short relative coordinates."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from accel_nb.scales import Scale
from accel_nb.thinning import Floats, Ints, Stretches

FINE = 4  # path units per pixel: whole numbers are short, quarters of a pixel smooth


class Points(NamedTuple):
    """Points of a line, in the order of the steps; all of shape `(points,)`. `piece` numbers the unbroken pieces;
    None stands for a single one.
    """

    step: npt.NDArray[Any]
    value: Floats
    piece: Ints | None


class _Texts(dict[int, str]):
    """The text of a coordinate after another one: a minus sign parts numbers as well as a space does. To look it
    up is several times quicker than to make it.
    """

    def __missing__(self, number: int) -> str:
        text = self[number] = str(number) if number < 0 else f" {number}"
        return text


_text_of = _Texts().__getitem__


def _pieces(gap: npt.NDArray[np.bool_]) -> Ints:
    """Numbers that change before and after each gap."""
    return 2 * np.cumsum(gap) - gap


def extremes(parts: Stretches, *, log: bool) -> Points:
    """The smallest and the largest value of each stretch where they were measured: at most two points a stretch.

    The line is broken where a stretch holds a value that is NaN or infinite; on a log axis, values of 0 or
    less are left out, and break it where a stretch has no other.
    """
    low, low_at = (parts.least, parts.least_at) if log else (parts.low, parts.low_at)
    high, high_at = parts.high, parts.high_at
    gap = (low_at == 0) | (parts.finite < parts.size)
    whole = not gap.any()
    same = low_at == high_at
    if whole and same.all():  # nothing was thinned
        return Points(low_at, low, None)
    swap = low_at > high_at
    step, value = np.empty((len(low), 2), dtype=np.int64), np.empty((len(low), 2))
    step[:, 0], step[:, 1] = np.minimum(low_at, high_at), np.maximum(low_at, high_at)
    value[:, 0], value[:, 1] = np.where(swap, high, low), np.where(swap, low, high)
    if whole and not same.any():
        return Points(step.ravel(), value.ravel(), None)
    keep = np.empty((len(low), 2), dtype=np.bool_)
    keep[:, 0] = low_at > 0
    keep[:, 1] = keep[:, 0] & ~same
    return Points(step[keep], value[keep], None if whole else np.repeat(_pieces(gap), 2)[keep.ravel()])


def means(parts: Stretches, *, log: bool) -> Points:
    """The mean of each stretch, at its middle."""
    step = np.cumsum(parts.size) - (parts.size - 1) / 2
    some = parts.mean > (0 if log else -np.inf)  # False for NaN
    gap = ~some | (parts.finite < parts.size)
    if not gap.any():
        return Points(step, parts.mean, None)
    return Points(step[some], parts.mean[some], _pieces(gap)[some])


def smoothed(parts: Stretches, smooth: float) -> Stretches:
    """The same stretches with `mean` replaced by its exponential moving average, without the pull of a start at 0.

    `smooth` (0 to 1, 1 excluded) is the weight that is left after one step in a run of up to 128 steps; in a
    longer one, after 1/128 of its steps. So 0.6 looks the same for any number of steps, and however the
    series was thinned: a stretch counts with the number of its values.
    """
    length = int(parts.size.sum())
    per_step = smooth ** (min(1.0, 128 / length) if length else 1.0)
    left = per_step**parts.finite  # of the past, after each stretch; 1 where nothing was measured
    new = np.where(parts.finite > 0, (1.0 - left) * parts.mean, 0.0)
    total = weight = 0.0
    totals, weights = [], []
    for keep, more, share in zip(left.tolist(), new.tolist(), (1.0 - left).tolist(), strict=True):
        total = keep * total + more
        weight = keep * weight + share
        totals.append(total)
        weights.append(weight)
    average = np.full(len(totals), np.nan)
    np.divide(totals, weights, out=average, where=parts.finite > 0)
    return parts._replace(mean=average)


def _places(points: Points, scale: Scale, steps: float, width: float, height: float) -> Ints:
    """Where points stand in a box of `width` x `height` pixels that spans the steps 0 to `steps`: shape
    `(points, 2)`, in units of 1/FINE pixel from the top left.
    """
    where = np.empty((len(points.step), 2))
    where[:, 0] = points.step * (width * FINE / steps)
    where[:, 1] = (1.0 - scale.up(points.value)) * (height * FINE)
    return np.rint(where).astype(np.int64)


def path(points: Points, scale: Scale, steps: float, width: float, height: float) -> str:
    """The `d` of an SVG path over a box of `width` x `height` pixels that spans the steps 0 to `steps`; in units
    of 1/FINE pixel. A point alone between two breaks becomes a dot (with round line ends).
    """
    if not len(points.step):
        return ""
    at = _places(points, scale, steps, width, height)
    moves = (at[1:] - at[:-1]).ravel().tolist()
    cuts = [0, len(at)]
    if points.piece is not None:
        cuts[1:1] = (np.flatnonzero(points.piece[1:] != points.piece[:-1]) + 1).tolist()
    text = []
    for begin, end in pairwise(cuts):
        x, y = at[begin].tolist()
        tail = "".join(map(_text_of, moves[2 * begin : 2 * end - 2]))
        text.append(f"M{x} {y}l{tail}" if tail else f"M{x} {y}h0")
    return "".join(text).replace("l ", "l")


def dots(points: Points, scale: Scale, steps: float, width: float, height: float) -> str:
    """As `path`, but each point a dot."""
    return "".join([f"M{x} {y}h0" for x, y in _places(points, scale, steps, width, height).tolist()])


def gaps(parts: Stretches, steps: float, width: float, height: float) -> str:
    """The `d` of bars along the bottom of the box, one wherever neighbouring stretches hold a value that is NaN or
    infinite; at least 4 pixels wide, so that a single step is seen.
    """
    bad = parts.finite < parts.size
    if not bad.any():
        return ""
    change = np.flatnonzero(np.diff(bad, prepend=False, append=False))
    ends = np.append(0, np.cumsum(parts.size))
    unit = width * FINE / steps
    left = np.rint((ends[change[0::2]] + 0.5) * unit)
    wide = np.maximum(np.rint((ends[change[1::2]] + 0.5) * unit) - left, 4 * FINE)
    left = np.minimum(left, width * FINE - wide)
    bottom = round(height * FINE)
    return "".join(f"M{x:.0f} {bottom}h{w:.0f}" for x, w in zip(left.tolist(), wide.tolist(), strict=True))
