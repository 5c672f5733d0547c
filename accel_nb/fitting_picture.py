"""The picture of a search for the largest batch: samples per second of those that fit, crosses for the others.

The SVG stands alone and is legible on light and on dark pages, as the curves are.
"""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from accel_nb.scales import scale

if TYPE_CHECKING:
    from accel_nb.figure import CurvesFigure
    from accel_nb.fitting import BatchFit
    from accel_nb.trials import Trial

WIDTH, LEFT, RIGHT = 660, 64, 30
TOP, HEIGHT, BELOW = 34, 150, 62
LABEL = 44  # pixels that the label of a batch size takes

# The colours of the curves: the two differ for every kind of colour vision, and the crosses need none.
BLUE, ORANGE, MARK = "#2b7de0", "#d1610c", "#b5489b"
_TEXT = (
    "var(--colab-primary-text-color,var(--jp-ui-font-color2,var(--vscode-descriptionForeground,#7a7a7a)))",
    "var(--colab-primary-text-color,var(--jp-ui-font-color1,#7a7a7a))",
)
_PAPER = "var(--colab-primary-surface-color,var(--jp-layout-color1,#fff))"
_RULES = (
    "{font:11px var(--jp-ui-font-family,system-ui,sans-serif);max-width:100%;height:auto}",
    f" text{{fill:{_TEXT[0]}}}",
    f" .n{{font-weight:600;fill:{_TEXT[1]}}}",
    " .e{text-anchor:end}",
    " .m{text-anchor:middle}",
    " path{fill:none;stroke-linejoin:round;stroke-linecap:round}",
    " .g{stroke:#888;stroke-opacity:.22}",
    " .a{stroke:#888;stroke-opacity:.5}",
    f" .t{{stroke:{BLUE};stroke-width:1.7}}",
    f" .x{{stroke:{MARK};stroke-width:2.2}}",
    f" .o{{fill:{BLUE}}}",
    f" .b{{fill:{_PAPER};stroke:{BLUE};stroke-width:2.4}}",
    f" .p{{fill:{ORANGE}}}",
)
_STYLE = "".join(f".anb-fit{rule}" for rule in _RULES)


def draw(fit: BatchFit) -> str:
    """One SVG string; the values of a mark show on hover."""
    tried = sorted(fit.trials, key=lambda one: (one.batch_size, one.accumulate))
    tall = TOP + HEIGHT + BELOW
    told = escape(" ".join(str(one) for one in tried) + " " + fit.advice)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="anb-fit" viewBox="0 0 {WIDTH} {tall}" width="{WIDTH}" '
        f'height="{tall}" role="img"><title>Samples per second of each batch size</title><desc>{told}</desc>'
        f'<style>{_STYLE}</style><text class="n" x="{LEFT}" y="16">samples/s in training</text>'
    )
    return "".join([head, *(_chart(fit, tried) if tried else []), "</svg>"])


def _chart(fit: BatchFit, tried: list[Trial]) -> list[str]:
    bottom, width = TOP + HEIGHT, WIDTH - LEFT - RIGHT
    axis = scale(0.0, max([one.samples_per_second for one in tried], default=0.0) or 1.0)
    low, high = (math.log2(tried[end].batch_size) for end in (0, -1))

    def x(one: Trial) -> float:
        along = (math.log2(one.batch_size) - low) / (high - low) if high > low else 0.5
        return LEFT + 22 + along * (width - 44)

    def y(one: Trial) -> float:
        return bottom - HEIGHT * (one.samples_per_second / axis.unit - axis.low) / (axis.high - axis.low)

    parts = [f'<path class="a" d="M{LEFT} {TOP}v{HEIGHT}h{width}"/>']
    for up, label in axis.ticks:
        at = bottom - up * HEIGHT
        line = f'<path class="g" d="M{LEFT} {at:.1f}h{width}"/>' if up else ""
        parts.append(f'{line}<text class="e" x="{LEFT - 8}" y="{at + 4:.1f}">{label}</text>')
    whole = [one for one in tried if one.fits and one.accumulate == 1]
    if len(whole) > 1:
        parts.append('<path class="t" d="M' + "L".join(f"{x(one):.1f} {y(one):.1f}" for one in whole) + '"/>')
    parts += [_mark(fit, one, x(one), y(one)) for one in tried]
    wanted = {fit.largest, fit.batch_size}
    labels: dict[float, str] = {}
    for one in sorted(tried, key=lambda one: (one.batch_size not in wanted, not one.fits, one.batch_size)):
        if all(abs(x(one) - at) > LABEL for at in labels):
            kind = "m n" if one.batch_size == fit.largest else "m"
            labels[x(one)] = f'<text class="{kind}" x="{x(one):.1f}" y="{bottom + 17}">{one.batch_size:,}</text>'
    parts += labels.values()
    parts.append(f'<text class="e" x="{WIDTH - RIGHT}" y="{bottom + 34}">batch size, in samples</text>')
    return [*parts, *_legend(tried, bottom + 53)]


def _mark(fit: BatchFit, one: Trial, x: float, y: float) -> str:
    """A dot, a ring for the largest that fits, a diamond for a batch in parts, a cross for what does not fit."""
    title = f"<title>{escape(str(one))}</title>"
    if not one.fits:
        return f"<g>{title}{_sign('x', x, y - 8)}</g>"
    kind = "p" if one.accumulate > 1 else "b" if one.batch_size == fit.largest else "o"
    return f"<g>{title}{_sign(kind, x, y)}</g>"


def _sign(kind: str, x: float, y: float) -> str:
    if kind == "x":
        return f'<path class="x" d="M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8"/>'
    if kind == "p":
        corners = ((0, -6), (6, 0), (0, 6), (-6, 0))
        return f'<polygon class="p" points="{" ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)}"/>'
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{4.5 if kind == "b" else 3.2}"/>'


def _legend(tried: list[Trial], y: float) -> list[str]:
    entries = [("b", "the largest that fits")] if any(one.fits and one.accumulate == 1 for one in tried) else []
    entries += [("p", f"in {one.accumulate} parts") for one in tried if one.fits and one.accumulate > 1]
    entries += [("x", "does not fit")] if not all(one.fits for one in tried) else []
    parts, x = [], float(LEFT)
    for kind, text in entries:
        parts.append(f'{_sign(kind, x + 6, y - 4)}<text x="{x + 17:.0f}" y="{y}">{text}</text>')
        x += 36 + 6.0 * len(text)
    return parts


def html(fit: BatchFit) -> str:
    """The picture with its advice, for a notebook."""
    notes = "".join(f"<br>{escape(note)}" for note in fit.notes)
    return f'<div style="font:13px sans-serif;margin:2px 0">{escape(fit.advice)}{notes}</div>{draw(fit)}'


def figure(fit: BatchFit) -> CurvesFigure:
    """The same as a matplotlib Figure, for a report."""
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.ticker import FuncFormatter, NullLocator

    from accel_nb.figure import CurvesFigure

    tried = sorted(fit.trials, key=lambda one: one.batch_size)
    made = CurvesFigure(figsize=(7, 3.4), layout="constrained")
    FigureCanvasAgg(made)
    axes: Axes = made.subplots()
    whole = [one for one in tried if one.fits and one.accumulate == 1]
    axes.plot([one.batch_size for one in whole], [one.samples_per_second for one in whole], "o-", color=BLUE,
              label="fits")  # fmt: skip
    for one in tried:
        if one.fits and one.accumulate > 1:
            label = f"in {one.accumulate} parts"
            axes.plot([one.batch_size], [one.samples_per_second], "D", color=ORANGE, label=label)
    bad = [one.batch_size for one in tried if not one.fits]
    if bad:
        axes.plot(bad, [0.0] * len(bad), "x", color=MARK, mew=2, clip_on=False, label="does not fit")
    axes.set_xscale("log", base=2)
    top = max(fit.largest, 1)
    sizes = sorted({one.batch_size for one in tried if one.batch_size & (one.batch_size - 1) == 0} | {fit.largest})
    axes.set_xticks([size for size in sizes if size == fit.largest or abs(math.log2(size / top)) > 0.5])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("batch size, in samples")
    axes.set_ylabel("samples/s in training")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return made
