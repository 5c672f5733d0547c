"""The curves as a matplotlib Figure."""

from __future__ import annotations

import math

import matplotlib.pyplot as plt
import numpy as np
import pytest
from histories import falling, made
from IPython.core.formatters import DisplayFormatter
from matplotlib.figure import Figure

from accel_nb.curves import figure
from accel_nb.history import History


def line(ax, label):
    return next(line for line in ax.lines if line.get_label() == label)


def legend(drawn):
    return [text.get_text() for text in drawn.legends[0].get_texts()]


def test_every_measured_step_is_in_it():
    history = falling(3000)
    drawn = figure(history, title="digits, mlp")
    loss, accuracy = drawn.axes
    for ax, name in ((loss, "loss"), (accuracy, "accuracy")):
        columns = history.columns()
        np.testing.assert_array_equal(line(ax, "train").get_xdata(), columns["step"])
        np.testing.assert_array_equal(line(ax, "train").get_ydata(), columns[name])
        measured = np.isfinite(columns[f"val_{name}"])
        np.testing.assert_array_equal(line(ax, "validation").get_xdata(), columns["step"][measured])
        np.testing.assert_array_equal(line(ax, "validation").get_ydata(), columns[f"val_{name}"][measured])
        assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_title()) == ("step", name, name)
    assert line(loss, "validation").get_marker() == "o"
    assert drawn.get_suptitle() == "digits, mlp"
    assert legend(drawn) == ["train", "validation"]


def test_the_legend_stands_outside_the_data():
    drawn = figure(falling(500), [("first", falling(300))], smooth=0.6)
    drawn.draw_without_rendering()
    box = drawn.legends[0].get_window_extent()
    assert all(not box.overlaps(ax.get_window_extent()) for ax in drawn.axes)
    assert box.x0 >= 0
    assert box.x1 <= drawn.bbox.x1


def test_a_regression_has_one_chart():
    assert [ax.get_ylabel() for ax in figure(falling(100, accuracy=False)).axes] == ["loss"]


def test_smoothing_and_earlier_runs():
    drawn = figure(falling(400), [("a $x$", falling(500, seed=1))] * 5, smooth=0.6)
    assert legend(drawn) == ["train, each step", "train, averaged (0.6)", "validation", r"earlier: a \$x\$"]
    assert line(drawn.axes[0], "train, each step").get_alpha() < 1
    assert len(drawn.axes[0].lines) == 3 + 5
    assert drawn._repr_png_()  # the dollar signs are no formula


def test_nan_is_a_gap_with_a_mark():
    drawn = figure(made([1.0, math.nan, 3.0, math.inf, 2.0], validation=False))
    (ax,) = drawn.axes
    np.testing.assert_array_equal(line(ax, "train").get_ydata(), [1.0, np.nan, 3.0, np.nan, 2.0])
    assert line(ax, "NaN or infinite").get_xdata().tolist() == [2, 4]
    dots = [found for found in ax.lines if found.get_marker() == "."]
    assert dots[0].get_xdata().tolist() == [1, 3, 5]  # each stands alone between gaps


def test_a_single_step_is_a_dot():
    (ax,) = figure(made([0.0], validation=False)).axes
    assert any(found.get_marker() == "." and found.get_ydata().tolist() == [0.0] for found in ax.lines)


def test_log_axis():
    loss, accuracy = figure(falling(100), log=True).axes
    assert (loss.get_yscale(), accuracy.get_yscale()) == ("log", "linear")
    drawn = figure(made([1.0, 0.0, 0.5], validation=False), log=True)
    assert "1 value of 0 or less left out on the log axis" in legend(drawn)
    drawn = figure(made([0.0, 0.0], validation=False), log=True)
    assert drawn.axes[0].get_yscale() == "linear"
    assert "no loss above 0: linear axis instead of a log one" in legend(drawn)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(("smooth", "thin"), [(0.0, False), (0.6, True)])
def test_odd_histories_draw_without_a_warning(log, smooth, thin):
    from accel_nb.figure import draw

    odd = [
        History(),
        made([0.0]),
        made([math.nan] * 3),
        made([1e308, -1e308, math.inf]),
        made([5e-324, 1.0]),
        made([1.0, math.nan] * 700, [math.nan, 1.0] * 700),
        falling(5),
    ]
    for history in odd:
        drawn = draw(history, [("e", other) for other in odd], log=log, smooth=smooth, thin=thin)
        assert drawn._repr_png_().startswith(b"\x89PNG")


def test_the_thin_one_shows_the_same_extremes():
    from accel_nb.figure import draw

    loss = np.full(50_000, 0.5)
    loss[[7, 40_000]] = 3.0, math.nan
    drawn = draw(made(loss, block=500, validation=False), thin=True)
    y = line(drawn.axes[0], "train").get_ydata()
    assert len(y) < 1100
    assert np.nanmax(y) == 3.0
    assert np.isnan(y).any()


def test_thirty_figures_leave_none_open():
    before = plt.get_fignums()
    for _ in range(30):  # matplotlib warns from the 21st open one on, and a warning is an error here
        assert isinstance(figure(falling(20)), Figure)
    assert plt.get_fignums() == before == []


def test_a_notebook_shows_it_without_pyplot():
    data, _ = DisplayFormatter().format(figure(falling(20)))
    assert data["image/png"].startswith(b"\x89PNG")


def test_a_weight_that_is_none_is_refused():
    with pytest.raises(ValueError, match="not a weight"):
        figure(falling(5), smooth=1.0)
