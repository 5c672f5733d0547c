"""History -> curves: one SVG string for the screen (live), a bundle for the saved notebook, a matplotlib Figure.

A redraw costs the same however long the run: at most 1 ms and 15 KB. The SVG stands alone: styles are its
own, values show on hover by CSS, and it is legible on light and on dark pages.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from accel_nb import scales
from accel_nb.frame import BELOW, BETWEEN, BOX, HEIGHT, LEFT, RIGHT, TOP, frame, style_sheet
from accel_nb.history import History
from accel_nb.lines import FINE, dots, extremes, gaps, means, path, smoothed
from accel_nb.scales import Scale
from accel_nb.thinning import Ints, Stretches

if TYPE_CHECKING:
    from accel_nb.figure import CurvesFigure

Earlier = Sequence[tuple[str, History]]

MAX_BYTES = 15_000

# Drawn stretches per line; a stretch is at most two points. Small enough for MAX_BYTES in the worst case.
_TRAIN, _VALIDATION, _EARLIER = 76, 48, 144  # the earlier runs of a chart share theirs
_MAX_EARLIER = 6


def curves_svg(
    history: History,
    earlier: Earlier = (),
    *,
    log: bool = False,
    smooth: float = 0.0,
    width: int = 1080,
    total: int | None = None,
) -> str:
    """The curves of a run as one SVG string: loss and accuracy side by side, or one wide loss for a regression.

    Parameters
    ----------
    history
        The run. Its batch values are the solid line, its validation the dashed one.
    earlier
        Runs to compare with, as (name, history) pairs; the last 6 are drawn, faintly.
    log
        A logarithmic axis for the loss. Values of 0 or less have no place on it and are left out, which is said.
    smooth
        0 (off) to 1 (excluded): see `accel_nb.lines.smoothed`. The measured values stay, faint, behind it.
    width
        Of the picture in pixels (at least 400); a page with less room scales it down. The height is fixed.
    total
        The number of steps the run will have, if known: the axis then stands still or grows in few jumps, see
        `axis_end`.

    Raises
    ------
    ValueError
        For a `smooth` or `width` outside its range.
    """
    if not 0.0 <= smooth < 1.0:
        raise ValueError(f"smooth={smooth!r}: not a weight. Give a number from 0 (off) up to, but not, 1.")
    if width < 400:
        raise ValueError(f"width={width!r}: too narrow for two charts. Give 400 or more (pixels).")
    with history.lock, np.errstate(over="ignore", invalid="ignore"):  # values near the largest float
        return _Drawing(history, earlier, log=log, smooth=float(smooth), width=width, total=total).svg()


class _Chart(NamedTuple):
    """One chart: where it stands, and what belongs to its lines."""

    column: str
    left: float
    scale: Scale
    parts: Stretches
    smooth: Stretches | None
    validation: Stretches


class _Drawing:
    """All that one redraw needs; made, used once and dropped."""

    def __init__(
        self, history: History, earlier: Earlier, *, log: bool, smooth: float, width: int, total: int | None
    ) -> None:
        self.history, self.smooth, self.width = history, smooth, width
        self.length = len(history)
        self.hidden = max(0, len(earlier) - _MAX_EARLIER)
        self.earlier = [(_plain(name), run) for name, run in earlier[-_MAX_EARLIER:]]
        two = history.has_accuracy or not history.has_loss
        self.chart_width = (width - LEFT - BETWEEN - RIGHT) / 2 if two else width - LEFT - RIGHT
        self.steps = max(10, axis_end(self.length, total), self.length, *(len(run) for _, run in self.earlier))
        self.lost: list[str] = []  # what is said about values that are NaN or infinite,
        self.notes: list[str] = []  # and about the log axis
        columns = ("loss", "accuracy") if two else ("loss",)
        self.charts = [self._chart(column, number, log) for number, column in enumerate(columns)]
        self.log = self.charts[0].scale.log
        self.validated = any(len(chart.validation.size) for chart in self.charts)

    def _chart(self, column: str, number: int, log: bool) -> _Chart:
        history = self.history
        parts = history.stretches(column, _TRAIN)
        validation = history.stretches(f"val_{column}", _VALIDATION)
        bad, first, below = history.trouble(column)
        bad_too, first_too, below_too = history.trouble(f"val_{column}")
        missing = bad == self.length and column == "accuracy"  # not measured at all
        if bad and not missing:
            self.lost.append(f"{column} NaN or infinite at {_times(bad, 'step')}, first at step {first:,}")
        if bad_too:
            times = _times(bad_too, "epoch")
            self.lost.append(f"validation {column} NaN or infinite in {times}, first at step {first_too:,}")
        if missing:
            parts = parts._replace(size=parts.finite)  # then it is no gap either
        if column == "accuracy":
            scale = self._scale(column, log=False)
        else:
            scale = self._scale(column, log=log)
            if log and not scale.log:
                self.notes.append("no loss above 0: linear axis instead of a log one")
            elif log and below + below_too:
                self.notes.append(f"{_times(below + below_too, 'value')} of 0 or less left out on the log axis")
        smooth = smoothed(parts, self.smooth) if self.smooth else None
        left = LEFT + number * (self.chart_width + BETWEEN)
        return _Chart(column, left, scale, parts, smooth, validation)

    def _scale(self, column: str, *, log: bool) -> Scale:
        """The value axis. The run itself always fits; earlier runs as far as they do not make it tiny."""
        low, high, least = self.history.limits(column)
        low_too, high_too, least_too = self.history.limits(f"val_{column}")
        low, high, least = min(low, low_too), max(high, high_too), min(least, least_too)
        for _, run in self.earlier:
            other_low, other_high, other_least = _cached(run, ("limits", column), lambda r: r.limits(column))
            if not self.length or high < low:
                low, high, least = min(low, other_low), max(high, other_high), min(least, other_least)
            elif other_low <= other_high:
                room = high - low if math.isfinite(high - low) else 0.0
                low, high = max(min(low, other_low), low - room), min(max(high, other_high), high + room)
                least = max(min(least, other_least), least / 10 or least)  # or: the smallest float
        if column == "accuracy":
            low, high = min(low, 0.0), max(high, 1.0)
        if log and least <= high:
            return scales.scale(least, high, log=True)
        return scales.scale(low, high) if low <= high else scales.scale(0.0, 1.0)

    # ---- the picture

    def svg(self) -> str:
        height = TOP + HEIGHT + BELOW
        style, name = style_sheet(len(self.charts), self.chart_width, self.validated)
        what = "Training curves: loss and accuracy" if len(self.charts) == 2 else "Training curve: loss"
        text = [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="{name}" viewBox="0 0 {self.width} {height}"',
            f' width="{self.width}" height="{height}" role="img" style="max-width:100%;height:auto">',
            f"<title>{what}</title><desc>{escape(self._description())}</desc><style>{style}</style>",
        ]
        ticks = scales.steps(self.steps)
        for chart in self.charts:
            text.append(frame(chart.column, chart.left, self.chart_width, chart.scale.ticks, ticks))
            text.append(self._lines(chart))
        text.append(self._words())
        end = "</svg>"
        used = sum(map(_size, text)) + len(end)
        if self.length:
            text.append(self._hover(MAX_BYTES - used))
        text.append(end)
        return "".join(text)

    def _lines(self, chart: _Chart) -> str:
        box = (self.steps, self.chart_width, HEIGHT)
        scale, parts, log = chart.scale, chart.parts, chart.scale.log
        text = [f'<g transform="translate({chart.left:g} {TOP})scale({1 / FINE})">']
        share = _EARLIER // max(2, len(self.earlier))
        for _, run in self.earlier:
            line = _cached(
                run,
                ("line", chart.column, scale, share, self.chart_width),
                # Its own length is the width here, so that the text stays when the axis grows.
                lambda r: path(
                    means(r.stretches(chart.column, share), log=log), scale, len(r), self.chart_width, HEIGHT
                ),
            )
            if line:
                text.append(f'<path class="p" transform="scale({len(run) / self.steps:.6g} 1)" d="{line}"/>')
        measured = extremes(parts, log=log)
        end = None
        if chart.smooth is not None:
            average = means(chart.smooth, log=log)
            text.append(_drawn("r", path(measured, scale, *box)) + _drawn("t", path(average, scale, *box)))
            if len(average.step) and parts.finite[-1]:
                end = average.step[-1:], average.value[-1:]
        else:
            text.append(_drawn("t", path(measured, scale, *box)))
            newest = (
                self.history.values_at(chart.column, np.array([self.length]))
                if self.length
                else np.array([np.nan])
            )
            if np.isfinite(newest[0]) and (newest[0] > 0 or not log):
                end = np.array([self.length]), newest
        checked = extremes(chart.validation, log=log)
        text.append(_drawn("v", path(checked, scale, *box)))
        if len(checked.step) <= 24:
            text.append(_drawn("d", dots(checked, scale, *box)))
        text.append(_drawn("x", gaps(parts, *box)))
        if end is not None:
            x, y = end[0][0] / self.steps * self.chart_width * FINE, (1 - scale.up(end[1])[0]) * HEIGHT * FINE
            text.append(f'<circle cx="{x:.0f}" cy="{y:.0f}" r="{4 * FINE}"/>')
        text.append("</g>")
        return "".join(text)

    def _words(self) -> str:
        """The line below the charts: what is what, and what is missing; and how the loss is shown, above it."""
        state = " · ".join(["log"] * self.log + [f"smooth {self.smooth:g}"] * (self.smooth > 0))
        text = [f'<text class="e" x="{LEFT + self.chart_width:g}" y="14">{state}</text>'] if state else []
        words = ['<tspan class="k">—</tspan> train']
        if self.smooth:
            words = ['<tspan class="k">—</tspan> train, averaged (faint: each step)']
        if self.validated:
            words.append('<tspan class="w">- -</tspan> validation')
        if self.earlier:
            names = ", ".join(escape(name) for name, _ in self.earlier[-3:])
            more = len(self.earlier) + self.hidden - 3
            words.append(
                f'<tspan class="q">—</tspan> earlier: {names}' + (f" and {more} more" if more > 0 else "")
            )
        words += [f'<tspan class="y">▬</tspan> {note}' for note in self.lost[:2]] + self.notes
        text.append(f'<text x="{LEFT}" y="{TOP + HEIGHT + 34}">{"&#8195;".join(words)}</text>')
        if not self.length:
            text += [
                f'<text class="m" x="{chart.left + self.chart_width / 2:g}" y="{TOP + HEIGHT / 2:g}">'
                "waiting for the first step</text>"
                for chart in self.charts
            ]
        return "".join(text)

    def _description(self) -> str:
        """What the picture shows, for those who do not see it."""
        text = [self.history.summary()]
        for column, words in (("loss", "lowest loss"), ("val_loss", "lowest validation loss"),
                              ("val_accuracy", "highest validation accuracy")):  # fmt: skip
            best = self.history.best(column)
            if best is not None:
                text.append(f"{words} {best[column]:.4g} at step {best['step']:,}")
        text += self.lost + self.notes
        if self.earlier:
            text.append("earlier runs: " + ", ".join(name for name, _ in self.earlier))
        return "; ".join(text) + "."

    # ---- values on hover

    def _hover(self, room: int) -> str:
        """As many zones as `room` bytes hold; each shows the values of one step while the pointer is in it."""
        across = self.length / self.steps * self.chart_width
        # What a zone takes: its frame, and in each chart the box, "step 1,234 · epoch 5.6" and the values.
        lines = 64 + len(f"{self.length:,}") + 18 * bool(self.smooth) + 34 * self.validated
        zone = 66 + (lines + 30) * len(self.charts)
        number = min(self.length, 60, max(1, int(across / 6)), max(0, room - 150) // zone)
        while number > 0:
            text = self._zones(number, max(across / number + 1, 8))
            if _size(text) <= room:
                return text
            number = min(number - 1, number * room // _size(text))
        return ""

    def _zones(self, number: int, wide: float) -> str:
        edges = np.arange(number + 1) * self.length // number
        first, last = edges[:-1] + 1, edges[1:]
        checked = self.history.validated_at(last)
        # The middle step of the zone, or the one in it where validation was measured; the newest step at the end.
        steps = np.where(checked >= first, checked, (first + last) // 2)
        steps[-1] = self.length
        at = steps / self.steps * self.chart_width
        off = (first + last) / 2 / self.steps * self.chart_width - at
        step_words = [
            f"<text>step {step:,} · epoch {f'{done:.1f}'.removesuffix('.0')}</text>"
            for step, done in zip(steps.tolist(), self.history.epochs_done_at(steps).tolist(), strict=True)
        ]
        values = [self._values(chart, steps) for chart in self.charts]
        if self.validated:
            # The epoch is said where the value is not of this very step.
            epochs = self.history.epoch_at(np.maximum(newest := self.history.validated_at(steps), 1))
            when = [
                f" · epoch {epoch}" if 0 < at < step else ""
                for at, step, epoch in zip(newest.tolist(), steps.tolist(), epochs.tolist(), strict=True)
            ]
            measured = (newest > 0).tolist()
            for chart, lines in zip(self.charts, values, strict=True):
                for i, value in enumerate(self.history.values_at(f"val_{chart.column}", steps).tolist()):
                    lines[i] += f"<text>validation {f'{value:.4g}' if measured[i] else '–'}{when[i]}</text>"
        second = f"m{self.chart_width + BETWEEN:g} 0v-{HEIGHT}" if len(self.charts) == 2 else ""
        boxes = "<rect/>" * len(self.charts)
        zones = [
            f"<g{' class=' + chr(34) + 'f' + chr(34) if x > self.chart_width - BOX - 12 else ''} "
            f'transform="translate({x:.0f})"><path d="M{dx:.0f} 0v{HEIGHT}{second}"/>'
            f'<path d="M0 0v{HEIGHT}{second}"/><g>{boxes}'
            + "".join(words + chart[i] for chart in values)
            + "</g></g>"
            for i, (x, dx, words) in enumerate(zip(at.tolist(), off.tolist(), step_words, strict=True))
        ]
        return (
            f'<g class="h" transform="translate({LEFT} {TOP})" visibility="hidden" pointer-events="none" '
            # An empty title: browsers would show that of the whole picture as a box of their own.
            f'stroke-width="{wide:.1f}"><title/>{"".join(zones).replace("nan", "NaN")}</g>'
        )

    def _values(self, chart: _Chart, steps: Ints) -> list[str]:
        """For each of the steps, the line of text with the train value of one chart."""
        train = self.history.values_at(chart.column, steps).tolist()
        if chart.smooth is None:
            return [f"<text>train {value:.4g}</text>" for value in train]
        average = chart.smooth.mean[np.searchsorted(np.cumsum(chart.smooth.size), steps)].tolist()
        return [f"<text>train {t:.4g} (average {a:.4g})</text>" for t, a in zip(train, average, strict=True)]


# ---- small parts


def axis_end(length: int, total: int | None) -> int:
    """The last step on the axis of a run that has `length` of `total` steps.

    A short run has its whole length before it. A long one begins on a part of it, which doubles each time that it
    is full: so its first hour can be seen too, and the axis moves a few times only.

    >>> [axis_end(length, 64_000) for length in (1, 500, 600, 1_001, 40_000)]
    [500, 500, 1000, 2000, 64000]
    """
    end = total or 0
    while end // 2 >= max(length, 500):
        end = -(-end // 2)
    return end


def _size(text: str) -> int:
    return len(text.encode())


def _drawn(kind: str, d: str) -> str:
    return f'<path class="{kind}" d="{d}"/>' if d else ""


def _times(number: int, word: str) -> str:
    return f"{number:,} {word}{'s' * (number != 1)}"


def _plain(name: Any) -> str:
    """A name for one line of an XML file: what XML does not allow is left out, and it is cut to 18 characters."""
    text = re.sub(r"[^\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "", str(name))
    return text if len(text) <= 18 else text[:17] + "…"


_CACHE: WeakKeyDictionary[History, dict[Any, Any]] = WeakKeyDictionary()


def _cached(run: History, key: tuple[Any, ...], make: Any) -> Any:
    """What is drawn of an earlier run changes only with the run and with `key`: made once, kept with the run."""
    kept = _CACHE.setdefault(run, {})
    key = (run.version, *key)
    if key not in kept:
        if len(kept) > 16:
            kept.clear()
        with run.lock:
            kept[key] = make(run)
    return kept[key]


# ---- what stays


def figure(
    history: History, earlier: Earlier = (), *, log: bool = False, smooth: float = 0.0, title: str = ""
) -> CurvesFigure:
    """The curves as a matplotlib Figure for a report; see `accel_nb.figure.draw`."""
    from accel_nb.figure import draw  # matplotlib: only when somebody asks for it

    return draw(history, earlier, log=log, smooth=smooth, title=title)


def static_bundle(
    history: History,
    earlier: Earlier = (),
    *,
    log: bool = False,
    smooth: float = 0.0,
    width: int = 1080,
    total: int | None = None,
) -> dict[str, str]:
    """What stays in a saved notebook, as a MIME bundle: the SVG, a PNG (base64) for viewers without it, one line.

    Arguments as for `curves_svg`. Together less than 100 KB. Viewers, JupyterLab among them, show such an SVG as a
    plain picture: it fits the width of the page, and has no values on hover.
    """
    from accel_nb.figure import draw

    drawn = draw(history, earlier, log=log, smooth=smooth, thin=True)
    drawn.set_size_inches(8, 3)
    svg = curves_svg(history, earlier, log=log, smooth=smooth, width=width, total=total)
    return {
        # a picture without a size of its own takes the width that the page has for it
        "image/svg+xml": re.sub(r' width="\d+" height="\d+"', "", svg, count=1),
        "image/png": base64.b64encode(drawn.small_png()).decode("ascii"),
        "text/plain": history.summary(),
    }
