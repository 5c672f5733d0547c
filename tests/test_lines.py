"""From stretches to the text of a path."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from histories import falling, made
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_nb.lines import FINE, dots, extremes, gaps, means, path, smoothed
from accel_nb.scales import scale


def pieces(d):
    """The points of each unbroken piece of a path, in pixels."""
    found = []
    for piece in re.findall(r"M[^M]*", d):
        head, _, tail = piece[1:].replace("h0", "").partition("l")
        points = [tuple(map(int, head.split()))]
        numbers = [int(number) for number in re.findall(r"-?\d+", tail)]
        for dx, dy in zip(numbers[::2], numbers[1::2], strict=True):
            points.append((points[-1][0] + dx, points[-1][1] + dy))
        found.append(np.array(points) / FINE)
    return found


def drawn(history, limit=90, *, log=False, column="loss", width=470, height=190):
    parts = history.stretches(column, limit)
    low, high, least = history.limits(column)
    axis = scale(least if log else low, high, log=log)
    return path(extremes(parts, log=log), axis, len(history), width, height), axis


def test_a_short_run_is_drawn_step_by_step():
    values = [2.0, 0.0, 1.0, 1.5]
    d, axis = drawn(made(values))
    (points,) = pieces(d)
    np.testing.assert_allclose(points[:, 0], np.arange(1, 5) * 470 / 4, atol=0.5 / FINE)
    np.testing.assert_allclose(points[:, 1], (1 - axis.up(np.array(values))) * 190, atol=0.5 / FINE)


@pytest.mark.parametrize("steps", [1000, 54_321])
def test_drawn_points_are_measured_ones(steps):
    history = falling(steps)
    points = extremes(history.stretches("loss", 90), log=False)
    assert len(points.step) <= 180
    assert points.piece is None
    assert (np.diff(points.step) > 0).all()
    np.testing.assert_array_equal(points.value, history.loss[points.step - 1])


def test_a_single_spike_in_a_long_run_is_drawn():
    loss = np.full(300_000, 0.5)
    loss[222_222] = 3.0
    d, axis = drawn(made(loss, block=5000))
    (points,) = pieces(d)
    top = points[points[:, 1].argmin()]
    assert top[0] == pytest.approx(222_223 / 300_000 * 470, abs=0.5)
    assert top[1] == pytest.approx((1 - axis.up(np.array([3.0]))[0]) * 190, abs=0.5)


def test_nan_and_infinite_values_break_the_line():
    d, _ = drawn(made([1.0, 2.0, math.nan, 2.0, math.inf, 1.0, 1.5]))
    assert [len(points) for points in pieces(d)] == [2, 1, 2]
    assert "h0" in d  # the point that stands alone is a dot


def test_a_stretch_that_is_bad_in_part_breaks_the_line_too():
    loss = np.ones(10_000)
    loss[5000] = math.nan
    d, _ = drawn(made(loss, block=100))
    assert len(pieces(d)) == 3  # before it, the rest of it, after it


def test_a_log_axis_leaves_out_what_has_no_logarithm():
    history = made([1.0, 0.0, 0.5, -3.0, 0.25])
    d, _ = drawn(history, log=True)
    assert sum(len(points) for points in pieces(d)) == 3
    many = falling(4000)
    values = many.loss
    values[::50] = 0.0
    points = extremes(made(values, block=100).stretches("loss", 90), log=True)
    assert points.value.min() == values[values > 0].min()
    assert points.piece is None  # each stretch has others


def test_nothing_to_draw():
    for values in ([], [math.nan], [math.nan] * 2000):
        history = made(values)
        assert path(extremes(history.stretches("loss", 90), log=False), scale(0, 1), 10, 100, 100) == ""
        assert path(means(history.stretches("loss", 90), log=False), scale(0, 1), 10, 100, 100) == ""


def test_means_stand_in_the_middle():
    history = made(np.arange(1.0, 1025.0), block=64)
    points = means(history.stretches("loss", 64), log=False)
    np.testing.assert_allclose(points.step, points.value)  # the value of each step is its number


def test_dots_stand_where_the_line_has_its_points():
    points = extremes(made([2.0, 0.0, 1.0, 1.5]).stretches("loss"), log=False)
    found = pieces(dots(points, scale(0, 2), 4, 470, 190))
    np.testing.assert_array_equal(np.concatenate(found), pieces(path(points, scale(0, 2), 4, 470, 190))[0])


def average(values, weight):
    """The same plainly, step by step."""
    total = known = 0.0
    result = []
    for value in values:
        total, known = weight * total + (1 - weight) * value, weight * known + (1 - weight)
        result.append(total / known)
    return np.array(result)


def test_smoothing_a_short_run_is_the_exponential_average_of_its_steps():
    history = falling(80)
    parts = smoothed(history.stretches("loss", 90), 0.6)
    np.testing.assert_allclose(parts.mean, average(history.loss, 0.6))
    assert parts.mean[0] == pytest.approx(history.loss[0])  # no pull towards 0 at the start


def test_smoothing_hardly_depends_on_the_thinning():
    history = falling(20_000)
    exact = average(history.loss, 0.9 ** (128 / 20_000))
    for limit in (90, 200, 512):
        parts = smoothed(history.stretches("loss", limit), 0.9)
        ends = np.cumsum(parts.size)
        late = ends > 2000  # a stretch is one value: where the loss falls steeply that is coarse
        np.testing.assert_allclose(parts.mean[late], exact[ends - 1][late], rtol=0.06)


def test_smoothing_looks_the_same_however_long_the_run():
    short, long = falling(1280), falling(128_000)
    a = smoothed(short.stretches("loss", 64), 0.6)
    b = smoothed(long.stretches("loss", 64), 0.6)
    along = np.linspace(0.1, 1, 20)
    at = [np.interp(along, np.cumsum(p.size) / p.size.sum(), p.mean) for p in (a, b)]
    np.testing.assert_allclose(*at, rtol=0.12)


def test_smoothing_skips_what_is_not_a_number():
    parts = smoothed(made([1.0, math.nan, 1.0, math.inf]).stretches("loss", 90), 0.5)
    np.testing.assert_array_equal(parts.mean, [1.0, np.nan, 1.0, np.nan])


def test_no_smoothing_changes_nothing():
    parts = falling(500).stretches("loss", 90)
    np.testing.assert_allclose(smoothed(parts, 0.0).mean, parts.mean)


def bars(d):
    return [(int(x) / FINE, int(w) / FINE) for x, w in re.findall(r"M(\d+) \d+h(\d+)", d)]


def test_gaps_are_bars_where_they_are():
    history = made([1.0] * 100 + [math.nan] * 100 + [1.0] * 200)
    (bar,) = bars(gaps(history.stretches("loss", 512), 400, 400, 190))
    assert bar == pytest.approx((100.5, 100), abs=0.3)


def test_the_gap_of_one_step_is_wide_enough_to_see_and_stays_inside():
    for bad in (0, 5000, 9999):
        loss = np.ones(10_000)
        loss[bad] = math.inf
        ((left, wide),) = bars(gaps(made(loss, block=100).stretches("loss", 90), 10_000, 470, 190))
        assert wide >= 4
        assert left >= 0
        assert left + wide <= 470
    assert gaps(made([1.0, 2.0]).stretches("loss"), 10, 470, 190) == ""


@settings(max_examples=60)
@given(
    st.lists(st.one_of(st.floats(), st.sampled_from([0.0, 1.0])), max_size=400), st.booleans(), st.floats(0, 0.99)
)
def test_any_values_give_a_path_of_whole_numbers(values, log, smooth):
    history = made(values, block=50)
    low, high, least = history.limits("loss")
    log = log and high > 0
    axis = scale(least, high, log=True) if log else scale(low, high) if low <= high else scale(0, 1)
    parts = history.stretches("loss", 90)
    with np.errstate(over="ignore", invalid="ignore"):
        for points in (extremes(parts, log=log), means(parts, log=log), means(smoothed(parts, smooth), log=log)):
            d = path(points, axis, max(1, len(values)), 470, 190)
            assert re.fullmatch(r"(M\d+ \d+(h0|l-?\d+([ -]\d+)*))*", d)
            for piece in pieces(d):
                assert (piece >= 0).all()
                assert (piece[:, 0] <= 470 + 1 / FINE).all()
                assert (piece[:, 1] <= 190 + 1 / FINE).all()
