"""The curves of a run as a matplotlib Figure, for a report. This module imports matplotlib, but never pyplot."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from accel_nb.history import History
from accel_nb.lines import extremes, smoothed
from accel_nb.thinning import Floats, Stretches

_BLUE, _ORANGE, _GREY, _MARK = "#1f6fd0", "#c8550a", "#9a9a9a", "#a83f8f"
_HUGE = 1e300  # matplotlib works out margins around the values; those next to the largest float leave it no room


class CurvesFigure(Figure):
    """A matplotlib Figure that shows itself in a notebook, although pyplot knows nothing of it."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=self.dpi)
        return buffer.getvalue()

    def small_png(self) -> bytes:
        """The figure as a PNG of 64 colours: a third of the size, hardly seen in lines on white."""
        from PIL import Image  # matplotlib itself needs it

        canvas = FigureCanvasAgg(self)
        canvas.draw()
        picture = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB").quantize(64)
        buffer = io.BytesIO()
        picture.save(buffer, format="png", optimize=True)
        return buffer.getvalue()


def draw(
    history: History,
    earlier: Sequence[tuple[str, History]] = (),
    *,
    log: bool = False,
    smooth: float = 0.0,
    title: str = "",
    thin: bool = False,
) -> CurvesFigure:
    """Loss and accuracy over the steps (the loss alone for a regression), every measured step drawn.

    `log` gives the loss a logarithmic axis (values of 0 or less are left out, and the legend says so);
    `smooth` (0 to 1, 1 excluded) draws an exponential moving average before the faint values; `earlier` runs
    are grey and thinned; `thin` thins this run too, for a quick small picture. Steps with a loss that is NaN
    or infinite leave a gap and a mark on the axis. The Figure belongs to the caller: restyle it, or save it
    with `savefig`; pyplot does not hold it.
    """
    if not 0.0 <= smooth < 1.0:
        raise ValueError(f"smooth={smooth!r}: not a weight. Give a number from 0 (off) up to, but not, 1.")
    names = ["loss", "accuracy"] if history.has_accuracy or not history.has_loss else ["loss"]
    figure = CurvesFigure(figsize=(9.0, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(names), squeeze=False)[0]
    for ax, name in zip(axes, names, strict=True):
        with history.lock:
            _draw_chart(ax, name, history, earlier, log=log and name == "loss", smooth=smooth, thin=thin)
    if not len(history):
        for ax in axes:
            ax.text(0.5, 0.5, "waiting for the first step", transform=ax.transAxes, ha="center", color="#777777")
    handles, labels = [], []
    for ax in axes:  # one legend for both, each entry once, outside the data
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            if label not in labels:
                handles.append(handle)
                labels.append(label)
    if handles:
        # As many columns as the longest text leaves room for; a line and a gap take about 8 characters.
        ncols = max(1, min(len(labels), 125 // (max(map(len, labels)) + 8)))
        figure.legend(handles, labels, loc="outside lower center", ncols=ncols, frameon=False, fontsize=9)
    figure.suptitle(_text(title) or ("Training curves" if len(names) == 2 else "Training curve"))
    return figure


def _draw_chart(
    ax: Axes,
    name: str,
    history: History,
    earlier: Sequence[tuple[str, History]],
    *,
    log: bool,
    smooth: float,
    thin: bool,
) -> None:
    step, train = _line(history, name, thin)
    validation = _drawable(history.columns()[f"val_{name}"])
    ax.plot(step, train, color=_BLUE, label="train, each step" if smooth else "train", zorder=2,
            lw=0.8 if smooth else 1.5 if len(history) < 500 else 1.0, alpha=0.35 if smooth else 1.0)  # fmt: skip
    if smooth:
        parts = smoothed(history.stretches(name), smooth)
        ax.plot(_middle(parts), _drawable(parts.mean), color=_BLUE, lw=2, zorder=3,
                label=f"train, averaged ({smooth:g})")  # fmt: skip
    alone = _alone(train)
    if alone.any():
        ax.plot(step[alone], train[alone], ".", color=_BLUE, zorder=3)
    measured = np.isfinite(validation)
    if measured.any():
        marker = "o" if measured.sum() <= 60 else None
        ax.plot(history.step[measured], validation[measured], "--", color=_ORANGE, lw=1.5, marker=marker, ms=4,
                zorder=4, label="validation")  # fmt: skip
    for number, (label, run) in enumerate(earlier):
        means = run.stretches(name, 256)
        ax.plot(_middle(means), _drawable(means.mean), color=_GREY, lw=0.9, alpha=0.7, zorder=1,
                label=_text(f"earlier: {label}", 28) if number < 3 else None)  # fmt: skip
    lost = np.flatnonzero(~np.isfinite(history.columns()[name])) + 1
    if name == "loss" or len(lost) < len(history):  # an accuracy that is nowhere was not measured
        _mark_gaps(ax, lost)
    ax.set_xlabel("step")
    ax.set_ylabel(name)
    ax.set_title(name)
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    if log:
        _log_axis(ax, np.concatenate([history.loss, history.val_loss]))
    elif name == "accuracy":
        ax.set_ylim(min(0.0, _least(train, validation)), None)


def _log_axis(ax: Axes, values: Floats) -> None:
    finite = values[np.isfinite(values)]
    if len(finite) and not (finite > 0).any():
        ax.plot([], [], " ", label="no loss above 0: linear axis instead of a log one")
        return
    ax.set_yscale("log", nonpositive="mask")
    left_out = int((finite <= 0).sum())
    if left_out:
        ax.plot(
            [], [], " ", label=f"{left_out:,} value{'s' * (left_out != 1)} of 0 or less left out on the log axis"
        )


def _mark_gaps(ax: Axes, steps: Any) -> None:
    if len(steps):
        shown = steps[:: max(1, len(steps) // 200)]
        ax.plot(shown, np.zeros(len(shown)), "|", color=_MARK, ms=8, mew=2, transform=ax.get_xaxis_transform(),
                clip_on=False, zorder=5, label="NaN or infinite")  # fmt: skip


def bars(names: Sequence[str], values: Sequence[float], notes: Sequence[str], *, label: str) -> CurvesFigure:
    """Horizontal bars, the first on top, each with its note behind it; a bar of 0 shows its note alone."""
    figure = CurvesFigure(figsize=(8, 0.9 + 0.42 * len(names)), dpi=100, layout="constrained")
    axes: Axes = figure.add_subplot()
    places = np.arange(len(names))
    axes.barh(places, values, color=_BLUE, height=0.62)
    top = max([*values, 1e-9])
    for place, value, note in zip(places, values, notes, strict=True):
        inside = value > 0.6 * top  # a long bar carries its note, behind a short one there is room
        axes.text(
            value - 0.01 * top if inside else value + 0.01 * top,
            float(place),
            _text(note, 70),
            va="center",
            ha="right" if inside else "left",
            color="white" if inside else "#444444",
            fontsize=9,
        )
    axes.set_yticks(places, [_text(name, 30) for name in names])
    axes.set_xlim(0, top * 1.02)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.ticklabel_format(axis="x", style="plain")
    return figure


def _line(history: History, name: str, thin: bool) -> tuple[Any, Floats]:
    """Steps and values of one line; NaN where it is broken."""
    if not thin:
        columns = history.columns()
        return columns["step"], _drawable(columns[name])
    points = extremes(history.stretches(name), log=False)
    step, value = points.step, _drawable(points.value)
    if points.piece is not None:
        breaks = np.flatnonzero(np.diff(points.piece)) + 1
        step, value = np.insert(step, breaks, step[breaks]), np.insert(value, breaks, np.nan)
    return step, value


def _drawable(values: Floats) -> Floats:
    """The values, with a gap (NaN) where one is infinite or too large to draw."""
    with np.errstate(invalid="ignore"):
        return np.where(np.abs(values) < _HUGE, values, np.nan)


def _alone(values: Floats) -> Any:
    """Where a value stands between two gaps: a line alone would not show it."""
    here = np.concatenate([[False], np.isfinite(values), [False]])
    return here[1:-1] & ~here[:-2] & ~here[2:]


def _least(*several: Floats) -> float:
    finite = [float(values[np.isfinite(values)].min()) for values in several if np.isfinite(values).any()]
    return min(finite, default=0.0)


def _middle(parts: Stretches) -> Floats:
    """The middle step of each stretch."""
    return np.cumsum(parts.size) - (parts.size - 1) / 2


def _text(text: str, limit: int = 90) -> str:
    """Text that matplotlib shows as it is, cut to `limit` characters: a dollar sign would start a formula."""
    text = " ".join(str(text).split())
    return (text if len(text) <= limit else text[: limit - 1] + "…").replace("$", r"\$")
