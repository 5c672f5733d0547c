"""Markup in any text that comes from outside is shown as text: in the panel, in a cell, in a saved picture."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from panel import every_widget, settle, until

import accel_nb as anb
from accel_nb.api import prepare
from accel_nb.copies import Copies
from accel_nb.curves import curves_svg, figure, static_bundle
from accel_nb.diagnose import Accelerators, diagnose
from accel_nb.folder import known
from accel_nb.live import LiveCurve
from accel_nb.resolve import resolve
from accel_nb.studio.kept import Kept
from accel_nb.studio.view import CURVES, MACHINE, PROGRAM, RUNS

BAD = "<img src=x onerror=alert(1)><script>alert(2)</script>\"'`$\\frac{}${{x}}"
FILE = "<img src=x onerror=alert(1)><script>alert(2)&'$x"  # what a file may be called


class Seen(HTMLParser):
    """The elements and attributes that a browser would make of a text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.bad: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        told = dict(attrs)
        wrong = [name for name in told if name.startswith("on")]
        wrong += [value for value in told.values() if value and value.strip().lower().startswith("javascript:")]
        if tag in ("script", "iframe", "object", "embed") or wrong or told.get("src") == "x":
            self.bad.append(f"{tag} {attrs}")

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def harmless(text: str, what: str) -> str:
    """What a browser shows of it; no element of it came from outside."""
    seen = Seen(text)
    assert not seen.bad, f"{what}: {seen.bad}"
    return "".join(seen.text)


def spoiled(value: Any) -> Any:
    """Markup in each text of a stored value."""
    if isinstance(value, str):
        return value + BAD
    if isinstance(value, dict):
        return {key: spoiled(item) for key, item in value.items()}
    return [spoiled(item) for item in value] if isinstance(value, list) else value


@pytest.fixture
def run(runs_folder: Path) -> anb.Run:
    """A run, found in its directory, of which each text is spoiled."""
    made = resolve(anb.Plan(accelerator="cpu", name=BAD))
    directory = prepare(made, runs_folder)
    directory = directory.rename(runs_folder / f"20260101-000000-{FILE}")
    saved = json.loads((directory / "plan.json").read_text())
    for name in ("reasons", "notes", "data"):
        saved[name] = spoiled(saved[name])
    saved["notes"] = [BAD]
    saved["plan"] |= {name: spoiled(saved["plan"][name]) for name in ("name", "model", "data", "optimizer")}
    (directory / "plan.json").write_text(json.dumps(saved))
    (directory / "log.txt").write_text(f"a line {BAD}\n")
    (directory / "program.py").write_text(f'"""{BAD.replace(chr(92), "/")}"""\nx = "<script>"\n')
    started = {"steps_per_epoch": 2, "device": f"cpu{BAD}", "device_name": BAD, "versions": {BAD: BAD}}
    started |= {"learning_rate": 0.1, "asked": BAD, "strategy": BAD, "backend": BAD, "replicas": 2}
    events = [
        {"event": "status", "text": BAD},
        {"event": "model", "parameters": 1, "layers": [[BAD, BAD, [1], 1]]},
        {"event": "started", **started, "per_replica": 3},
        {
            "event": "batch",
            "epoch": 1,
            "first": 1,
            "loss": [1.5, 0.5],
            "accuracy": [0.1, 0.5],
            "learning_rate": 0.1,
        },
        {"event": "epoch", "epoch": 1, "step": 2, "loss": 1.0, "val_loss": 1.0, "seconds": 0.1},
        {"event": "meter", "samples_per_second": 3.0, "utilization": 0.5, "memory": 1, "memory_total": 2},
        {"event": "waiting", "text": BAD},
        {"event": "warning", "text": BAD},
        {"event": "error", "kind": BAD, "text": BAD, "where": BAD, "traceback": BAD},
        {"event": "finished", "status": "failed", "step": 2, "seconds": 1.0},
    ]
    (directory / "events.jsonl").write_text("".join(json.dumps({"t": 0.0, **event}) + "\n" for event in events))
    return known(directory).attach()


def test_the_panel_shows_it_as_text(run: anb.Run, runs_folder: Path) -> None:
    def model(outputs: int) -> None:
        """A model."""

    model.__name__ = FILE
    data = (np.eye(8, 4, dtype="f4"), np.array([f"{BAD}{number % 2}" for number in range(8)]))
    studio = settle(anb.Studio(data=data, model=model, name=BAD))
    studio._runner.adopt(run)
    until(lambda: studio._words.error.value, "the error of the run")
    studio._words.say(BAD)
    shown = []
    for tab in (PROGRAM, RUNS, MACHINE, CURVES):
        studio._tabs.selected_index = tab
        if tab == PROGRAM:
            studio._program.ran.click()
        assert studio.settled()
        values = [str(getattr(widget, "value", "")) for widget in every_widget(studio.ui)]
        shown += [harmless(value, f"tab {tab}") for value in values]
    for press in studio._runs_tab.table.children:
        press.children[-1].click()  # Show
    assert studio.settled()
    texts = "\n".join(shown)
    for what in ("a line <img", "Warning: <img", "Worker of 20260101-000000-<img", 'x = "<script>"', "At <img"):
        assert what in texts, what
    assert f"{FILE[:20]}" in texts


def test_a_refusal_shows_it_as_text(runs_folder: Path) -> None:
    for fields in ({"data": BAD}, {"data": f"{FILE}.npz"}, {"model_args": {BAD: 1}}, {"data_args": {BAD: BAD}}):
        try:
            studio = settle(anb.Studio(**fields))
        except anb.AccelNbError:
            continue
        shown = [harmless(str(getattr(one, "value", "")), repr(fields)) for one in every_widget(studio.ui)]
        assert any("<img src=x" in text for text in shown), fields


def test_a_cell_shows_it_as_text(run: anb.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, str]] = []
    monkeypatch.setattr("IPython.display.display", lambda bundle, **how: shown.append(bundle) or handle())
    run.warnings.append(BAD)
    live = LiveCurve(run)
    shown.append(live._picture(run))
    told = Kept("x").bundle(f"{run.name}: {BAD}", BAD, "")
    parts = [*shown, told, static_bundle(run.history, [(BAD, run.history)])]
    for part in parts:
        for kind in ("text/html", "image/svg+xml"):
            if kind in part:
                harmless(part[kind], kind)
    assert "a line <img" in harmless(shown[0]["text/html"], "live")
    assert "<img src=x" in harmless(told["text/html"], "kept")
    svg = curves_svg(run.history, [(BAD, run.history)] * 3)
    assert "<img src=x" in harmless(svg, "curves")
    ET.fromstring(svg)  # well-formed, so that viewers of pictures show it too


def handle() -> Any:
    return type("Handle", (), {"display_id": "x"})()


def test_a_figure_takes_it_as_text(run: anb.Run) -> None:
    drawn = figure(run.history, [(BAD, run.history), (FILE, run.history)])
    drawn.canvas.draw()  # where matplotlib would read $…$ as a formula
    names = [line.get_label() for axes in drawn.axes for line in axes.lines]
    assert any("<img" in str(name) for name in names), names


def test_tables_and_lines_show_it_as_text(run: anb.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel_nb.copies.in_notebook", lambda: True)
    shown: list[dict[str, str]] = []
    monkeypatch.setattr("IPython.display.display", lambda bundle, **how: shown.append(bundle) or handle())
    target = tmp_path / FILE
    target.mkdir()
    copies = Copies(run.directory.parent, target)
    copies._tell(run.directory, BAD)
    copies._show()
    copies.stop()
    assert any("<img src=x" in harmless(part["text/html"], "copies") for part in shown)
    harmless(Accelerators(diagnose(probe=False))._repr_html_(), "accelerators")
