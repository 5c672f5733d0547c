"""A run of a million steps: what it takes of the disk, the kernel's memory, a redraw and a saved notebook."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import ipywidgets as widgets
import numpy as np
import pytest
from panel import settle

import accel_nb as anb
from accel_nb.api import prepare
from accel_nb.events import DETAIL, PAUSE, Events
from accel_nb.history import History
from accel_nb.reporter import Reporter
from accel_nb.resolve import resolve

STEPS = 1_000_000
MIB = 2**20


def written(folder: Path, per_epoch: int, steps: int = STEPS, block: int = 100) -> Path:
    """A run's directory with events as its worker writes them, at full speed and without the training."""
    epochs = steps // per_epoch
    made = resolve(anb.Plan(accelerator="cpu", epochs=epochs, batch_size=max(1, 1437 // per_epoch)))
    directory = prepare(made, folder)
    events = Events(directory / "events.jsonl")
    report = Reporter(events, json.loads((directory / "plan.json").read_text()))
    facts = {"device": "cpu", "device_name": "", "versions": {}, "learning_rate": 0.001, "train_samples": 1437}
    report("started", steps_per_epoch=per_epoch, **facts)
    random, step = np.random.default_rng(0), 0
    for epoch in range(1, epochs + 1):
        for first in range(0, per_epoch, block):
            count = min(block, per_epoch - first)
            noise = random.random((2, count), dtype=np.float32)
            loss = (2.3 * np.exp(-step / 2e5) + 0.1 * noise[0]).tolist()
            values = {"loss": loss, "accuracy": noise[1].tolist(), "learning_rate": 0.001}
            report("batch", epoch=epoch, first=step + 1, **values)
            step += count
        report(
            "epoch", epoch=epoch, step=step, loss=0.5, accuracy=0.5, val_loss=0.6, val_accuracy=0.7, seconds=1.0
        )
    report.meter.ended.set()
    report.meter.join()
    events.write("finished", status="done", step=step, seconds=10.0)
    return directory


READ = """
    import sys, time
    import psutil
    import accel_nb as anb
    from accel_nb.curves import curves_svg, static_bundle
    me = psutil.Process()
    curves_svg(anb.Run(sys.argv[1]).history)
    before, began = me.memory_info().rss, time.perf_counter()
    run = anb.Run(sys.argv[1]).attach()
    read, held = time.perf_counter() - began, me.memory_info().rss - before
    times = []
    for _ in range(9):
        began = time.perf_counter()
        picture = curves_svg(run.history)
        times.append(time.perf_counter() - began)
    kept = sum(map(len, static_bundle(run.history).values()))
    print(len(run.history), read, held, sorted(times)[4], len(picture), kept)
    """


@pytest.mark.long
@pytest.mark.parametrize("per_epoch", [1437, 12])
def test_a_million_steps(per_epoch: int, tmp_path: Path) -> None:
    directory = written(tmp_path, per_epoch)
    size = (directory / "events.jsonl").stat().st_size
    command = [sys.executable, "-c", textwrap.dedent(READ), str(directory)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    steps, read, held, redraw, picture, kept = (float(word) for word in told)
    print(f"{steps:,.0f} steps, {per_epoch} an epoch: {size / steps:.1f} bytes a step in the file")
    print(f"read in {read:.1f} s, {held / MIB:.0f} MiB of the kernel's memory, redrawn in {redraw * 1000:.1f} ms")
    print(f"picture of {picture / 1000:.0f} KB, in a saved notebook {kept / 1000:.0f} KB")
    assert steps == STEPS // per_epoch * per_epoch
    assert size < 60 * steps
    assert held < 200 * MIB
    assert redraw < 0.1
    assert picture < 100_000
    assert kept < 150_000


@pytest.mark.long
def test_what_is_written_by_the_clock_grows_slowly(tmp_path: Path) -> None:
    """A run that takes an hour for a step still tells its memory and its use: at most so many bytes an hour."""
    events = Events(tmp_path / "events.jsonl")
    facts = {"steps_per_epoch": 1, "device": "cpu", "device_name": "", "versions": {}, "learning_rate": 0.1}
    plan = {
        "plan": {"epochs": 1, "accelerator": "cpu", "framework": "pytorch"},
        "asked": {"accelerator": "cpu"},
        "reasons": {},
    }
    report = Reporter(events, plan)
    report("started", **facts)
    report.meter.period = 5.0  # where it comes to, from 1, within the first minutes
    time.sleep(21)
    report.meter.ended.set()
    report.meter.join()
    lines = [line for line in (tmp_path / "events.jsonl").read_text().splitlines() if '"meter"' in line]
    assert 2 <= len(lines) <= 5
    hourly = max(map(len, lines)) * 3600 / 5
    print(f"{hourly / 1000:.0f} KB an hour")
    assert hourly < 300_000


def test_steps_after_the_first_million_are_told_sparingly(tmp_path: Path) -> None:
    """However short steps and epochs are, the file grows by a bounded number of bytes an hour."""
    path = tmp_path / "events.jsonl"
    events, random = Events(path), np.random.default_rng(0)
    step, all_losses, began = 0, [], time.monotonic()
    epoch, block = 0, 12
    while time.monotonic() - began < 1.5:
        loss = random.random(block).tolist()
        first = DETAIL + step + 1
        accuracy = [0.123456789] * block
        events.write("batch", epoch=epoch + 1, first=first, loss=loss, accuracy=accuracy, learning_rate=0.001)
        step, epoch = step + block, epoch + 1
        values = dict.fromkeys(("loss", "accuracy", "val_loss", "val_accuracy"), 0.123456789)
        events.write("epoch", epoch=epoch, step=DETAIL + step, **values, seconds=0.00123)
        all_losses += loss
    events.write("finished", status="done", step=DETAIL + step, seconds=1.5)
    hourly = path.stat().st_size * 3600 / 1.5
    print(f"{step / 1.5:,.0f} steps a second: {hourly / 1e6:.0f} MB an hour")
    assert step > 10_000
    assert hourly < 30e6
    history = History(map(json.loads, path.read_text().splitlines()))
    assert len(history) == DETAIL + step
    assert history.epochs[-1]["epoch"] == epoch
    assert history.epochs[-1]["step"] == DETAIL + step
    told = history.loss[DETAIL:]
    np.testing.assert_allclose(told.mean(), np.mean(all_losses), rtol=1e-6)
    assert len(np.unique(told)) < step / 10


def test_a_slow_run_tells_each_step_after_the_first_million_too(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    events = Events(path)
    for step in range(3):
        events.write("batch", epoch=2, first=DETAIL + step + 1, loss=[float(step)], learning_rate=0.1)
        time.sleep(1.2 * PAUSE)
    lines = list(map(json.loads, path.read_text().splitlines()))
    assert [line["loss"] for line in lines] == [[0.0], [1.0], [2.0]]
    assert all("every" not in line for line in lines)


def test_pieces_of_events_are_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = written(tmp_path, 12, steps=1200)
    whole = anb.Run(directory).attach()
    monkeypatch.setattr("accel_nb.run.PIECE", 97)
    pieces = anb.Run(directory).attach()
    assert len(pieces.history) == 1200
    np.testing.assert_array_equal(pieces.history.loss, whole.history.loss)
    assert pieces.status == "done"


def test_a_panel_in_use_holds_no_more_widgets_than_a_new_one(runs_folder: Path) -> None:
    for _ in range(3):
        written(runs_folder, 12, steps=24)
    studio = settle(anb.Studio())
    studio._tabs.selected_index = 2
    settle(studio)

    def count() -> int:
        return len(widgets.Widget.get_manager_state(drop_defaults=True)["state"])

    def again() -> None:
        written(runs_folder, 12, steps=24)  # another row
        studio._runs_tab.again.click()
        settle(studio)

    again()
    before, rows = count(), len(studio._runs_tab.table.children)
    for _ in range(5):
        again()
    each = (count() - before) / (len(studio._runs_tab.table.children) - rows)
    assert (
        each == 2 + 5 * 2
    )  # a box and its layout; four texts and a button, each with a layout: styles are shared
