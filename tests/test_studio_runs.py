"""The panel's runs and its errors: buttons are pressed, real workers train."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import pytest
from panel import PATIENCE, every_widget, message, settle, text_of, there, until, write

import accel_nb as anb
from accel_nb import api
from accel_nb.diagnose import diagnose
from accel_nb.studio.curves_tab import short_name
from accel_nb.studio.desk import Desk

LONG = 100_000  # epochs of a run that has to be stopped

# Every panel of these tests is made as in a kernel: what a front end would not understand is an error.
pytestmark = pytest.mark.filterwarnings("error:Passing unrecognized arguments:DeprecationWarning")


@pytest.fixture
def studio(runs_folder: Path) -> Iterator[anb.Studio]:
    made = settle(anb.Studio())
    yield made
    if made.run is not None and not made.run.ended:
        made.run.kill()
        made.run._ended.wait(PATIENCE)


def test_an_interrupt_while_the_run_is_starting_stops_it(
    studio: anb.Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(studio, "epochs", str(LONG))
    settle(studio)
    begin, go_on = api.start, threading.Event()

    def slow(*given: Any, **more: Any) -> anb.Run:
        assert go_on.wait(PATIENCE)
        return begin(*given, **more)

    monkeypatch.setattr(api, "start", slow)
    studio._runner.train.click()
    starting = studio._runner._starting
    assert starting is not None
    result = starting.result

    def interrupted(timeout: float | None = None) -> anb.Run:
        if not go_on.is_set():
            go_on.set()
            raise KeyboardInterrupt
        return result(timeout)

    monkeypatch.setattr(starting, "result", interrupted)
    run = studio.wait(PATIENCE)
    assert run.status == "stopped"
    assert len(run.history) < 1000


# ---- errors


def test_an_error_in_a_handler_is_shown_in_the_panel(
    studio: anb.Studio, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks(*_: Any, **__: Any) -> None:
        raise RuntimeError("no <b>way</b>")

    monkeypatch.setattr(api, "start", breaks)
    studio._runner.train.click()
    shown = until(lambda: studio._words.error.value, "the error in the panel")
    assert "RuntimeError: no &lt;b&gt;way&lt;/b&gt;" in shown
    assert shown.index("no &lt;b&gt;way") < shown.index("<details>") < shown.index("Traceback (most recent")
    assert "<b>way" not in shown
    assert 'role="alert"' in shown
    until(lambda: not studio._runner.train.disabled, "Train can be pressed again")
    with pytest.raises(RuntimeError, match="no <b>way"):
        studio.train()
    monkeypatch.setattr(Desk, "look", breaks)
    write(studio, "epochs", "3")
    assert "RuntimeError" in studio._words.error.value
    assert capsys.readouterr() == ("", "")


def test_an_error_in_the_background_is_shown_in_the_panel(
    studio: anb.Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: Any, **__: Any) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr("accel_nb.studio.view.directories", breaks)
    studio._tabs.selected_index = 2
    settle(studio)
    assert "OSError: the disk is gone" in studio._words.error.value


def test_markup_in_paths_and_names_is_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    studio = anb.Studio(directory="<b>runs", data="<script>.npz")
    settle(studio)
    assert "&lt;script&gt;.npz" in studio._words.message.value
    studio._tabs.selected_index = 2
    settle(studio)
    assert "&lt;b&gt;runs" in studio._runs_tab.head.value
    for one in every_widget(studio.ui):
        value = getattr(one, "value", "")
        assert "<script" not in str(value)
        assert not isinstance(one, widgets.HTML) or "<b>runs" not in value


def test_commands_without_a_run_say_so(studio: anb.Studio) -> None:
    for command in (studio.pause, studio.stop, studio.wait):
        with pytest.raises(anb.AccelNbError, match="No run was started"):
            command()
    with pytest.raises(anb.AccelNbError, match="Nothing to resume"):
        studio.resume()
    with pytest.raises(anb.AccelNbError, match="No run was started"):
        studio.set_learning_rate(0.1)


# ---- runs


def stopped_run(framework: str = "pytorch") -> anb.Run:
    """A run of six epochs that was stopped early."""
    run = anb.train(data="digits", framework=framework, accelerator="cpu", batch_size=32, epochs=6, wait=False)
    until(lambda: len(run.history) > 3 or run.ended, "steps")
    run.stop().wait(PATIENCE)
    assert len(run.history) < 270
    return run


def test_the_newest_run_is_offered_and_goes_on_where_it_was_stopped(runs_folder: Path) -> None:
    run = stopped_run()
    steps = len(run.history)
    studio = settle(anb.Studio())
    runner = studio._runner
    assert (there(runner.resume), there(runner.pause), runner.resume.disabled) == (True, False, False)
    assert runner.resume.tooltip == f"Go on with {run.name}, from its checkpoint"
    assert f"Resume goes on with {run.name} at step {steps:,} of 270" in text_of(runner.line.value)
    runner.pause.click()  # a late click on what is hidden by now
    runner.resume.click()
    runner.resume.click()  # pressed twice: it is on its way
    until(lambda: studio.run is run and run.ended, "the run goes on to its end")
    assert run.status == "done"
    assert len(run.history) == 270
    assert not studio._words.error.value
    until(lambda: runner.pause.disabled and there(runner.pause), "nothing is left to resume")
    assert not there(runner.resume)
    with pytest.raises(anb.AccelNbError, match="Nothing to resume"):
        studio.resume()


def test_a_run_on_drive_goes_on_here_also_without_its_accelerator(
    runs_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stopped_run()
    drive = tmp_path / "drive"
    drive.mkdir()
    kept = Path(shutil.move(run.directory, drive / run.name))
    for name in ("worker.json", "lock", "control.json"):
        (kept / name).unlink(missing_ok=True)
    plan = json.loads((kept / "plan.json").read_text())
    gone = "tpu" if not diagnose().usable("pytorch", "tpu") else "mps"
    plan["plan"]["accelerator"] = plan["asked"]["accelerator"] = gone
    (kept / "plan.json").write_text(json.dumps(plan))
    monkeypatch.setattr("accel_nb.studio.view.drive_folder", lambda: drive)
    studio = settle(anb.Studio())
    assert run.name in studio._runner.resume.tooltip
    back = studio.resume()
    assert back.directory == runs_folder / run.name
    back.wait(PATIENCE)
    assert len(back.history) == 270
    assert back.settled["accelerator"] == "cpu"
    assert f"{run.name} goes on on cpu: " in message(studio)


def test_a_run_that_cannot_go_on_is_not_offered(runs_folder: Path) -> None:
    run = anb.train(data="digits", framework="pytorch", accelerator="cpu", epochs=1)
    assert run.status == "done"
    studio = settle(anb.Studio())
    assert not there(studio._runner.resume)
    run = stopped_run()
    checkpoint = run.directory / "checkpoint.pt"
    checkpoint.write_bytes(checkpoint.read_bytes()[:-900])
    studio = settle(anb.Studio())
    studio._runner.resume.click()
    until(lambda: "is damaged" in message(studio), "the reason")
    assert not studio._runner.train.disabled


def test_a_run_from_press_to_stop(studio: anb.Studio) -> None:
    """Two clicks start one run; pause, resume, another rate, stop; then the panel is ready for the next."""
    runner, desk = studio._runner, studio._desk
    write(studio, "epochs", str(LONG))
    runner.train.click()
    runner.train.click()
    run = studio.train()  # the third press: the run that is on its way
    assert run is studio.run
    assert runner.train.disabled is True
    assert runner.train.description == "Training…"
    assert not runner.stop.disabled
    until(lambda: len(run.history) > 3, "steps")
    assert len(anb.runs()) == 1
    until(lambda: "<circle" in studio._curves.picture.value, "the curve")
    until(lambda: f"/{LONG}" in runner.line.value, "the line beside the buttons")

    runner.pause.click()
    until(lambda: runner.pause.description.endswith("Resume"), "paused")
    assert run.status == "paused"
    settle(studio)
    steps = len(run.history)
    write(studio, "learning_rate", "0.0003")
    assert "Learning rate 0.0003 for" in message(studio)
    assert len(run.history) == steps
    assert not runner.pause.disabled
    runner.pause.click()
    until(lambda: runner.pause.description.endswith("Pause") and len(run.history) > steps, "going on")
    until(lambda: run.history.learning_rate == pytest.approx(0.0003), "the new rate")
    studio.set_learning_rate(0.0002)
    until(lambda: run.history.learning_rate == pytest.approx(0.0002), "the rate set by the method")
    assert desk.training.numbers["learning_rate"].text == "0.0002"

    # a number that is none reaches no run
    write(studio, "learning_rate", "0")
    assert "learning_rate = 0" in message(studio)
    assert not run.ended
    write(studio, "learning_rate", "0.0002")

    other = anb.Studio()  # as after a reload of the page
    assert other.run is run
    assert other._runner.stop.disabled is False
    until(lambda: "<circle" in other._curves.picture.value, "the curve in the second panel")

    runner.stop.click()
    assert studio.wait(PATIENCE) is run
    assert run.status == "stopped"
    assert run.directory.joinpath("model.pt").is_file()
    until(other._runner.finished.is_set, "the end in the second panel")
    for panel in (studio, other):
        assert panel._runner.stop.disabled is True
        assert panel._runner.train.disabled is False
        assert panel._runner.train.description.endswith("Train")
        assert "stopped in" in panel._runner.line.value
    assert run._listeners == []
    with pytest.raises(anb.AccelNbError, match="No run is going on"):
        studio.pause()


def test_runs_in_a_row_are_compared_and_let_go(studio: anb.Studio) -> None:
    """Program, table of runs and earlier curves; the panel shows at most five of them."""
    curves, program = studio._curves, studio._program
    write(studio, "epochs", "1")
    studio._tabs.selected_index = 1
    settle(studio)
    planned = copied(program)
    names = []
    for seed in range(2):
        write(studio, "seed", str(seed))
        studio.train()
        run = studio.wait(PATIENCE)
        names.append(run.name)
        if seed == 0:
            assert run.program == planned
    settle(studio)
    program.ran.click()
    settle(studio)
    assert copied(program) == studio.run.program != planned
    earlier = short_name(names[0])
    assert re.fullmatch(r"\d\d:\d\d:\d\d pytorch-mlp-digits", earlier)
    assert [one.description for one in curves.earlier.children] == [earlier]
    assert "earlier runs: " in curves.picture.value
    curves.earlier.children[0].click()
    assert "earlier runs: " not in curves.picture.value
    assert curves.earlier.children[0].description == f"{earlier} (hidden)"
    curves.log.ui.value = True
    assert ">log<" in curves.picture.value
    curves.smooth.value = 0.6
    assert "smooth 0.6" in curves.picture.value

    studio._tabs.selected_index = 2
    settle(studio)
    rows = [
        [text_of(getattr(cell, "value", "")).strip() for cell in one.children]
        for one in studio._runs_tab.table.children
    ]
    assert [row[0] for row in rows] == names[::-1]
    assert all(row[1] == "done" and row[2].startswith("best validation accuracy") for row in rows)
    assert studio._tabs.get_title(2) == "Runs (2)"
    studio._runs_tab.table.children[1].children[-1].click()
    settle(studio)
    assert studio._tabs.selected_index == 0
    assert studio._curves._run.name == names[0]

    studio._tabs.selected_index = 3
    settle(studio)
    assert "PyTorch on" in text_of(studio._machine.worker.value)
    assert "no GPU" in text_of(studio._machine.choices.value)

    for number in range(8):  # as after eight more runs
        curves.show(Shown(f"run {number}", studio.run.history))
    assert len(curves._kept) == len(curves.earlier.children) == 5


class Shown:
    """What the curves ask of a run."""

    ended, total_steps = True, None

    def __init__(self, name: str, history: Any) -> None:
        self.name, self.history = name, history


def copied(program: Any) -> str:
    """The program as the panel offers it for copying."""
    return html.unescape(re.search(r"<textarea[^>]*>(.*)</textarea>", program.code.value, re.DOTALL)[1])


def test_a_run_that_fails_says_where(runs_folder: Path) -> None:
    def broken(outputs):
        raise ValueError(f"no model with {outputs} <outputs>")

    studio = anb.Studio(model=broken)
    studio.train()
    with pytest.raises(anb.RunFailed, match="no model with 10 <outputs>"):
        studio.wait(PATIENCE)
    shown = studio._words.error.value
    assert "ValueError: no model with 10 &lt;outputs&gt;" in shown
    assert "program.py, line" in shown
    assert "<details><summary>Traceback" in shown
    assert studio._runner.train.disabled is False
    assert "failed" in studio._runner.line.value


def test_a_worker_that_does_not_stop_is_ended_by_the_second_press(studio: anb.Studio) -> None:
    write(studio, "epochs", str(LONG))
    run = studio.train()
    until(lambda: len(run.history) > 1, "steps")
    os.kill(run._worker.pid, signal.SIGSTOP)  # it hears nothing any more
    studio._runner.stop.click()
    assert studio._runner.stop.description == "Stopping…"
    assert "Press again" in studio._runner.stop.tooltip
    assert not studio._runner.stop.disabled
    studio._runner.stop.click()
    studio.wait(PATIENCE)
    assert run.status == "stopped"
    assert "the model is not" in message(studio)
    assert studio._runner.train.disabled is False


def test_a_worker_that_was_killed_is_told(studio: anb.Studio) -> None:
    write(studio, "epochs", str(LONG))
    run = studio.train()
    until(lambda: len(run.history) > 1, "steps")
    os.kill(run._worker.pid, signal.SIGKILL)
    with pytest.raises(anb.RunFailed, match="was killed"):
        studio.wait(PATIENCE)
    assert "The worker process was killed (SIGKILL)" in studio._words.error.value
    assert len(run.history) > 1
    write(studio, "epochs", "1")  # the next run is as any other
    assert studio._words.error.value == ""
    assert studio.train().wait(PATIENCE).status == "done"


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "file"
    folder.write_text("not a folder")
    studio = anb.Studio(directory=folder)
    with pytest.raises(anb.PlanError, match="No run can be written there"):
        studio.train()
    assert "No run can be written there" in message(studio)
    assert studio._runner.train.disabled is False
