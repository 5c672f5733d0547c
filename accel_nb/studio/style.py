"""The panel's looks: its style sheet, and small pieces of HTML. Text from outside is escaped here, and only here.

Colours follow the front end's theme: JupyterLab, Colab and VS Code say on a parent element whether they are dark.
Elsewhere the panel brings its own light background, so that it is legible anywhere.
"""

from __future__ import annotations

import html
import re
from functools import cache
from pathlib import Path
from typing import Any


@cache
def style_sheet() -> str:
    """The text of `panel.css`, without what only its readers need."""
    text = Path(__file__).with_name("panel.css").read_text(encoding="utf-8")
    return re.sub(r"\s*\n\s*", "\n", re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)).strip()


def esc(text: Any) -> str:
    """Text as HTML shows it literally."""
    return html.escape(str(text), quote=True)


def details(summary: str, text: str) -> str:
    """A folded block of plain text; both parts are escaped."""
    return f"<details><summary>{esc(summary)}</summary><pre>{esc(text)}</pre></details>"


def bar(part: float, line: str) -> str:
    """The progress bar with its line of text; `part` is 0 to 1."""
    percent = max(0.0, min(1.0, part)) * 100
    return (
        f'<div class="anb-run"><div class="anb-bar" role="progressbar" aria-label="Progress of the run" '
        f'aria-valuemin="0" aria-valuemax="100" aria-valuenow="{percent:.0f}">'
        f'<div style="width:{percent:.1f}%"></div></div><span class="anb-line">{esc(line)}</span></div>'
    )
