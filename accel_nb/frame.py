"""The parts of the curves' SVG that stand still: layout, grid and labels, and the style sheet."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from zlib import crc32

from accel_nb.lines import FINE

# Pixels: above the charts, their height, below them; left of the first chart, between the two, right of the last;
# the width of the box with the values.
TOP, HEIGHT, BELOW = 26, 190, 40
LEFT, BETWEEN, RIGHT = 50, 66, 8
BOX = 192

# Blue and orange differ for every kind of colour vision, and both stand out from white and from near black; the
# dashes tell validation apart without any colour.
_BLUE, _ORANGE, _MARK = "#2b7de0", "#d1610c", "#b5489b"
# Colab's colours before Jupyter's: its page is dark or light, while its widgets bring Jupyter's light ones along.
_INK, _PAPER = "--colab-primary-text-color", "--colab-primary-surface-color"
_TEXT = f"var({_INK},var(--jp-ui-font-color2,var(--vscode-descriptionForeground,#7a7a7a)))"
_STRONG = f"var({_INK},var(--jp-ui-font-color1,#7a7a7a))"


@lru_cache(maxsize=64)
def frame(
    title: str, left: float, width: float, ticks: Iterable[tuple[float, str]], steps: Iterable[tuple[float, str]]
) -> str:
    """The parts of a chart that stand still: title, grid, axes and labels."""
    bottom = TOP + HEIGHT
    heights = [(bottom - up * HEIGHT, label) for up, label in ticks]
    grid = "".join(f"M{left:g} {y:.4g}h{width:g}" for y, _ in heights[1:])
    text = [
        f'<text class="n" x="{left:g}" y="14">{title}</text><path class="g" d="{grid}"/>',
        f'<path class="a" d="M{left:g} {TOP}v{HEIGHT}h{width:g}"/>',
    ]
    text += [f'<text class="e" x="{left - 8:g}" y="{y + 4:.4g}">{label}</text>' for y, label in heights]
    text += [
        f'<text class="m" x="{left + along * width:.4g}" y="{bottom + 15}">{label}</text>'
        for along, label in steps
        if along * width + 3.2 * len(label) < width - 30  # there stands the name of the axis
    ]
    text.append(f'<text class="e" x="{left + width:g}" y="{bottom + 15}">step</text>')
    return "".join(text)


@lru_cache(maxsize=16)
def style_sheet(charts: int, chart_width: float, validated: bool) -> tuple[str, str]:
    """The style sheet and the class it is bound to.

    The class is made from the rules themselves, so that two pictures on a page share it only if they share
    every rule.
    """
    # Where the lines of text of the box stand: one under the other, then the same in the second chart.
    lines = 3 if validated else 2
    far = chart_width + BETWEEN
    tall = 10 + 15 * lines
    low = HEIGHT - tall - 8  # accuracy climbs: its box stands at the bottom, that of the loss at the top
    tops = (8, low)
    places = [(far * chart + 16, tops[chart] + 17 + 15 * line) for chart in range(charts) for line in range(lines)]
    box = f"width:{BOX}px;height:{tall}px;rx:4px;fill:var({_PAPER},var(--jp-layout-color1,#fff));stroke-width:1"
    dashes = f"stroke-dasharray:{6 * FINE} {4 * FINE}"
    # No two classes differ in case alone: pages without a doctype take them for the same.
    rules = [
        "{font:11px var(--jp-ui-font-family,system-ui,sans-serif)}",
        f" text{{fill:{_TEXT}}}",
        f" .n{{font-weight:600;fill:{_STRONG}}}",
        " .e{text-anchor:end}",
        " .m{text-anchor:middle}",
        " path{fill:none;stroke-linejoin:round;stroke-linecap:round}",
        " .g{stroke:#888;stroke-opacity:.22}",
        " .a{stroke:#888;stroke-opacity:.5}",
        f" .t{{stroke:{_BLUE};stroke-width:{1.7 * FINE:g}}}",
        f" .r{{stroke:{_BLUE};stroke-width:{FINE};opacity:.35}}",
        f" .v{{stroke:{_ORANGE};stroke-width:{2 * FINE};{dashes};stroke-linecap:butt}}",
        f" .d{{stroke:{_ORANGE};stroke-width:{5 * FINE}}}",
        " .p{stroke:#888;stroke-width:1.3px;opacity:.6;vector-effect:non-scaling-stroke}",
        f" .x{{stroke:{_MARK};stroke-width:{6 * FINE};stroke-linecap:butt}}",
        f" circle{{fill:{_BLUE}}}",
        f" .k{{fill:{_BLUE};font-weight:600}}",
        f" .w{{fill:{_ORANGE};font-weight:600}}",
        " .q{fill:#888}",
        f" .y{{fill:{_MARK}}}",
        " .h g:hover{visibility:visible}",
        " .h path{pointer-events:stroke;stroke-linecap:butt}",
        " .h path+path{pointer-events:none;stroke:#888;stroke-width:1;stroke-dasharray:2 3}",
        f" .h .f g{{transform:translate(-{BOX + 16}px)}}",
        f" .h rect{{{box};stroke:var(--jp-border-color1,#bbb);transform:translate(8px,8px)}}",
        f" .h rect+rect{{transform:translate({far + 8:g}px,{low}px)}}",
        f" .h text{{fill:var({_INK},var(--jp-ui-font-color1,#222))}}",
        f" .h text:nth-of-type({lines}n+2){{fill:{_BLUE}}}",
        *([f" .h text:nth-of-type({lines}n){{fill:{_ORANGE}}}"] if validated else []),
        *(
            f" .h text:nth-of-type({number}){{transform:translate({x:g}px,{y}px)}}"
            for number, (x, y) in enumerate(places, 1)
        ),
    ]
    name = f"a{crc32(''.join(rules).encode()):08x}"
    return "".join(f".{name}{rule}" for rule in rules), name
