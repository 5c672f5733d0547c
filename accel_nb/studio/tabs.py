"""The tabs "Program", "Runs" and "Machine"."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets as widgets

from accel_nb.live import clock, who
from accel_nb.resolve import NAMES
from accel_nb.studio.fields import button, discard, text_html
from accel_nb.studio.style import details, esc, style_sheet

ROWS = 12  # runs in the table


class ProgramTab:
    """The program: what would run now, or what runs and ran. `asked()` if a person wants to see the other one."""

    def __init__(self, asked: Callable[[], None]) -> None:
        self.planned = button("What would run now", "The program of the settings above")
        self.ran = button("What runs", "The program of the run")
        self.ran.disabled = True
        self.planned.on_click(lambda _: self._choose(False, asked))
        self.ran.on_click(lambda _: self._choose(True, asked))
        self.note = text_html("", "anb-dim")
        self.code = text_html("")
        which = widgets.HBox([self.planned, self.ran])
        which.add_class("anb-seg")
        switch = widgets.Box([which, self.note])
        switch.add_class("anb-flow")
        self.ui = widgets.VBox([switch, self.code])
        self.shows_run = False
        self._drawn = ("", "")
        self._mark()

    def _choose(self, run: bool, asked: Callable[[], None]) -> None:
        self.shows_run = run
        self._mark()
        asked()

    def follow(self, run: Any) -> None:
        """There is a run whose program can be shown."""
        self.ran.disabled = False
        self.ran.description = "What ran" if run.ended else "What runs"

    def _mark(self) -> None:
        for one, on in ((self.planned, not self.shows_run), (self.ran, self.shows_run)):
            (one.add_class if on else one.remove_class)("anb-on")

    def show(self, text: str, note: str) -> None:
        if (text, note) == self._drawn:
            return
        self._drawn = (text, note)
        self.note.value = f"{esc(note)}; <code>python program.py</code> there repeats the run."
        coded = base64.b64encode(text.encode()).decode("ascii")
        self.code.value = (
            f'<p><a download="program.py" href="data:text/x-python;base64,{coded}">Download program.py</a> '
            f'<span class="anb-dim">· {len(text.splitlines())} lines, no import from accel_nb</span></p>'
            f'<div class="anb-code" tabindex="0" role="region" aria-label="program.py">'
            f"<pre>{highlighted(text)}</pre></div>"
            f"<details><summary>Plain text to copy</summary><textarea class='anb-copy' readonly "
            f"aria-label='program.py as plain text'>{esc(text)}</textarea></details>"
        )

    def refuse(self, text: str) -> None:
        self._drawn = ("", text)
        self.note.value, self.code.value = "", f"<p>{esc(text)}</p>"


def highlighted(text: str) -> str:
    """Python source as HTML with pygments' short class names; plain, escaped text where pygments is missing."""
    try:
        from pygments import highlight
        from pygments.formatters import HtmlFormatter
        from pygments.lexers import PythonLexer
    except ImportError:
        return esc(text)
    return _plain_spans(str(highlight(text, PythonLexer(), HtmlFormatter(nowrap=True))))


def _plain_spans(markup: str) -> str:
    """Without the spans that the style sheet gives no colour: most of them, and a saved notebook keeps it all."""
    coloured = set(re.findall(r"\.anb-code \.(\w+)", style_sheet()))
    return re.sub(
        r'<span class="(\w+)">([^<]*)</span>', lambda one: one[0] if one[1] in coloured else one[2], markup
    )


class RunsTab:
    """The table of runs. `show(directory)` when a person wants to see the curve of one."""

    def __init__(self, show: Callable[[str], None], refresh: Callable[[], None]) -> None:
        self._show = show
        self.again = button("Look again", "Read the runs folder again", "anb-small")
        self.again.on_click(lambda _: refresh())
        self.head = text_html("")
        self.table = widgets.VBox([])
        top = widgets.Box([self.head, self.again])
        top.add_class("anb-flow")
        self.ui = widgets.VBox([top, self.table])
        self._drawn: Any = None

    def show(self, summaries: Sequence[dict[str, Any]], folder: str, total: int) -> None:
        drawn = (tuple(tuple(one.items()) for one in summaries), folder, total)
        if drawn == self._drawn:
            return
        self._drawn = drawn
        newest = f", the newest {len(summaries)} are shown" if total > len(summaries) else ""
        self.head.value = f'<span class="anb-dim">{total} in {esc(folder)}{newest}</span>'
        rows = [self._row(one) for one in summaries]
        old, self.table.children = self.table.children, rows
        for one in old:
            discard(one)

    def _row(self, told: dict[str, Any]) -> widgets.Box:
        name = told["name"]
        press = button("Show", f"Show the curve of {name}", "anb-small")
        press.on_click(lambda _: self._show(told["directory"]))
        cells = [f"<b>{esc(name)}</b>", esc(told["status"]), esc(told["best"]), esc(told["seconds"])]
        made = widgets.Box([*(text_html(cell) for cell in cells), press])
        made.add_class("anb-run-row")
        return made


def summary_of(run: Any) -> dict[str, Any]:
    """What the table of runs tells of one; plain values, so that it holds on to no history."""
    best = run.history.best("val_accuracy") or run.history.best("val_loss")
    told = "–"
    if best:
        column, value = next((key, best[key]) for key in ("val_accuracy", "val_loss") if key in best)
        words = column.replace("val_", "validation ").replace("_", " ")
        told = f"best {words} {value:.4g} (epoch {best['epoch']})"
    seconds = run.seconds
    return {
        "name": run.name,
        "directory": str(run.directory),
        "status": run.status,
        "best": told,
        "seconds": "–" if seconds is None else clock(seconds),
    }


class MachineTab:
    """What is here and why choices were made; the worker's warnings and its log."""

    def __init__(self) -> None:
        self.table, self.choices, self.worker = text_html(""), text_html(""), text_html("")
        self.ui = widgets.VBox([self.table, self.choices, self.worker])

    def show_machine(self, html: str, checking: bool) -> None:
        wait = '<p class="anb-dim">The frameworks are being asked; this table will follow.</p>' if checking else ""
        if self.table.value != html + wait:
            self.table.value = html + wait

    def show_choices(self, resolved: Any) -> None:
        """The reasons and notes of a resolved plan."""
        fields = {"engine": resolved.engine, **resolved.plan.to_dict()}
        rows = "".join(
            f"<tr><td>{esc(field)}</td><td>{esc(fields.get(field, ''))}</td><td>{esc(reason)}</td></tr>"
            for field, reason in resolved.reasons.items()
        )
        notes = "".join(f"<li>{esc(note)}</li>" for note in resolved.notes)
        text = f"<h4>What was chosen for you, and why</h4><table>{rows}</table>" if rows else ""
        self.choices.value = text + (f"<h4>Notes</h4><ul>{notes}</ul>" if notes else "")

    def show_worker(self, run: Any) -> None:
        """What the worker of a run says."""
        parts = [f"<h4>Worker of {esc(run.name)}</h4>"]
        versions = run.started.get("versions") or {}
        if run.started:
            told = " · ".join(f"{name} {version}" for name, version in versions.items() if version)
            device = run.started.get("device_name") or run.started.get("device", "")
            asked = run.started.get("asked")  # a program that was started by hand knows only what it got
            team, share = who(run), run.started.get("per_replica")
            on = f"{team}, {share} samples of a batch on each at most, on {device}" if team and share else device
            where = f"{NAMES[run.settled['framework']]} on {on}" + (f" (asked for {asked})" if asked else "")
            parts.append(f"<p>{esc(' · '.join(part for part in (where, told) if part))}</p>")
        parts += [f"<p>Warning: {esc(text)}</p>" for text in run.warnings[-20:]]
        log = run.log.strip()
        nothing = '<p class="anb-dim">It printed nothing.</p>'
        parts.append(details("What the worker printed", log[-20_000:]) if log else nothing)
        text = "".join(parts)
        if self.worker.value != text:
            self.worker.value = text
