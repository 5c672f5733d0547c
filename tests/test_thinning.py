"""A series kept small enough to draw, with every extreme."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from accel_nb.thinning import LIMIT, Thinned


def thinned(values, block=None):
    series = Thinned()
    for begin in range(0, len(values), block or max(1, len(values))):
        series.extend(values[begin : begin + (block or len(values))])
    return series


def check(values, limit):
    """Every stretch against its values, worked out plainly."""
    series = thinned(values, block=13)
    parts = series.stretches(limit)
    assert len(parts.size) <= limit
    assert parts.size.sum() == len(values)
    begin = 0
    for i, size in enumerate(parts.size):
        steps = np.arange(begin + 1, begin + size + 1)
        here = values[begin : begin + size]
        steps, here = steps[np.isfinite(here)], here[np.isfinite(here)]
        assert parts.finite[i] == len(here)
        if len(here):
            assert (parts.low[i], parts.low_at[i]) == (here.min(), steps[here.argmin()])
            assert (parts.high[i], parts.high_at[i]) == (here.max(), steps[here.argmax()])
            slack = 1e-9 * np.abs(here).max()  # halves: the sums stay within what a float holds
            assert here.min() / 2 - slack <= parts.mean[i] / 2 <= here.max() / 2 + slack
        else:
            assert (parts.low_at[i], parts.high_at[i]) == (0, 0)
            assert np.isnan(parts.mean[i])
        positive = here > 0
        if positive.any():
            assert parts.least[i] == here[positive].min()
            assert parts.least_at[i] == steps[positive][here[positive].argmin()]
        else:
            assert parts.least_at[i] == 0
        begin += size


@pytest.mark.parametrize("length", [1, 2, 511, 512, 513, 1024, 1025, 5000])
@pytest.mark.parametrize("limit", [1, 7, 100, LIMIT])
def test_every_stretch_holds_its_extremes(length, limit):
    values = np.random.default_rng(length).standard_normal(length)
    values[length // 3] = np.nan
    check(values, limit)


@settings(max_examples=60, deadline=None)
@given(arrays(np.float64, st.integers(0, 1500), elements=st.floats(), fill=st.floats()), st.integers(1, 600))
def test_any_values(values, limit):
    check(values, limit)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(0, 9))
def test_the_size_of_the_blocks_does_not_matter(length, block, seed):
    values = np.random.default_rng(seed).standard_normal(length)
    for a, b in zip(thinned(values, block).stretches(), thinned(values).stretches(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)


def test_one_spike_among_a_million_is_kept():
    values = np.full(1_000_000, 0.5)
    values[654_321], values[123] = 99.0, -1.0
    parts = thinned(values, 10_000).stretches(90)
    assert parts.high.max() == 99.0
    assert parts.high_at[parts.high.argmax()] == 654_322
    assert parts.low_at[parts.low.argmin()] == 124


def test_reading_costs_no_more_at_a_million():
    # Not a matter of time: what is held and what is read have the same size.
    short, long = thinned(np.ones(600)), thinned(np.ones(1_000_000))
    assert {name: getattr(short, name).shape for name in ("_best", "_at", "_total", "_finite")} == {
        name: getattr(long, name).shape for name in ("_best", "_at", "_total", "_finite")
    }
    assert len(long.stretches().size) <= LIMIT


def test_the_mean_survives_values_near_the_largest_float():
    parts = thinned(np.full(4000, 1.7e308)).stretches(3)
    assert np.isfinite(parts.mean).all()
    assert parts.mean == pytest.approx(1.7e308)


def test_steps_of_its_own():
    series = thinned(np.array([3.0, 1.0, np.nan]))
    parts = series.stretches(1, np.array([10, 20, 30]))
    assert (parts.low_at.tolist(), parts.high_at.tolist()) == ([20], [10])
    assert (series.bad, series.first_bad, series.not_positive) == (1, 2, 0)


def test_limits_and_positions():
    series = thinned(np.array([2.0, -1.0, 0.0, 5.0, np.inf]))
    assert series.limits() == (-1.0, 5.0, 2.0)
    assert (series.position(largest=False), series.position(largest=True)) == (1, 3)
    assert series.not_positive == 2
    assert Thinned().limits() == (np.inf, -np.inf, np.inf)
    assert Thinned().position(largest=True) == -1
    assert len(Thinned().stretches().size) == 0
