"""Limits and ticks of axes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from accel_nb.scales import scale, steps

finite = st.floats(allow_nan=False, allow_infinity=False)
positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False)


def labels(axis):
    return [label for _, label in axis.ticks]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.198, 2.31, ["0.0", "0.5", "1.0", "1.5", "2.0", "2.5"]),
        (0.0, 1.0, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (0.0, 0.0, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (0.90, 0.99, ["0.90", "0.92", "0.94", "0.96", "0.98", "1.00"]),
        (-1.0, 1.0, ["-1.0", "-0.5", "0.0", "0.5", "1.0"]),
        (0.5, 1e9, ["0", "0.2e9", "0.4e9", "0.6e9", "0.8e9", "1.0e9"]),
        (1200.0, 41000.0, ["0", "10,000", "20,000", "30,000", "40,000", "50,000"]),
    ],
)
def test_linear_ticks_are_round(low, high, expected):
    assert labels(scale(low, high)) == expected


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.198, 2.31, ["0.1", "0.2", "0.5", "1", "2", "5"]),
        (1e-5, 10.0, ["1e-5", "0.0001", "0.001", "0.01", "0.1", "1", "10"]),
        (1.0, 1.0, ["0.5", "1", "2"]),
        (0.11, 0.12, ["0.1", "0.2"]),
    ],
)
def test_log_ticks_are_round(low, high, expected):
    assert labels(scale(low, high, log=True)) == expected


def good(axis, low, high):
    ups = [up for up, _ in axis.ticks]
    assert 2 <= len(ups) <= 13
    assert ups == sorted(ups)
    assert ups[0] == 0
    assert ups[-1] <= 1 + 1e-9
    assert all(len(label) <= 12 and "nan" not in label for label in labels(axis))
    with np.errstate(over="ignore"):
        at = axis.up(np.array([low, high]))
    assert np.isfinite(at).all()
    assert 0 <= at[0] <= at[1] <= 1


@given(finite, finite)
@example(5e-324, 5e-324)
@example(-1.7e308, 1.7e308)
@example(1e300, 1.0000000000000002e300)
@example(-5.0, -4.0)
@example(0.0, 3.7e-306)
def test_a_linear_axis_holds_any_values(a, b):
    low, high = min(a, b), max(a, b)
    good(scale(low, high), low, high)


@given(positive, positive)
@example(5e-324, 1.7e308)
@example(1.7e308, 1.7e308)
def test_a_log_axis_holds_any_positive_values(a, b):
    low, high = min(a, b), max(a, b)
    good(scale(low, high, log=True), low, high)


def test_places_on_the_axis():
    np.testing.assert_allclose(scale(0, 2.5).up(np.array([0.0, 1.25, 2.5])), [0, 0.5, 1])
    np.testing.assert_allclose(scale(0.01, 100, log=True).up(np.array([0.01, 1.0, 100.0])), [0, 0.5, 1])


@pytest.mark.parametrize(
    ("highest", "expected"),
    [
        (10, ["0", "2", "4", "6", "8", "10"]),
        (1000, ["0", "200", "400", "600", "800", "1,000"]),
        (1_000_000, ["0", "200k", "400k", "600k", "800k", "1M"]),
        (2_600_000, ["0", "500k", "1M", "1.5M", "2M", "2.5M"]),
        (20_000, ["0", "5,000", "10k", "15k", "20k"]),
    ],
)
def test_steps_are_counted_in_round_numbers(highest, expected):
    assert [label for _, label in steps(highest)] == expected


@given(st.integers(1, 10**9))
def test_any_number_of_steps(highest):
    ticks = steps(highest)
    assert 2 <= len(ticks) <= 9
    assert all(0 <= along <= 1 for along, _ in ticks)
