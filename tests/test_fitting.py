"""The search for the largest batch: its order, real trials under a memory limit, and the panel's way to it."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import psutil
import pytest
from conftest import is_worker
from hypothesis import given
from hypothesis import strategies as st
from panel import PATIENCE, message, settle, there, until

import accel_nb as anb
from accel_nb import process_memory
from accel_nb.fitting import FOLDER, BatchFit, Search, largest_size, searching
from accel_nb.plan import make_plan
from accel_nb.run import Run
from accel_nb.trials import Trial, samples_per_second, too_large

FRAMEWORKS = ["pytorch", "tensorflow"]


def hungry(input_shape, outputs):
    """A PyTorch model that asks for 400 MiB for each sample and writes to none of it."""
    import math

    import torch

    class Hungry(torch.nn.Linear):
        def forward(self, x):
            wide = torch.empty(len(x), 100 * 2**20)
            return super().forward(x.flatten(1)) + wide[:, :0].sum()

    return Hungry(math.prod(input_shape), outputs)


def wide(**fields):
    """A plan for both frameworks whose batch takes memory and little time: 192 KiB for a sample."""
    shape = {"data": "random", "data_args": {"samples": 4096, "shape": (4, 4, 1)}, "validation": 0}
    model = {"model": "mlp", "model_args": {"layers": [16384], "dropout": 0}, "accelerator": "cpu"}
    return {**shape, **model, "batch_size": 4096, "epochs": 1, **fields}


def narrow(**fields):
    """A plan whose batch of five does not fit into 2 GiB."""
    data = {"data": "random", "data_args": {"samples": 10, "shape": (4, 4, 1), "classes": 2}, "validation": 0}
    return {**data, "model": hungry, "accelerator": "cpu", "batch_size": 5, "epochs": 1, **fields}


# ---- the order of sizes


@given(st.integers(1, 100_000), st.integers(0, 100_000), st.integers(1, 4))
def test_the_largest_size_is_found_to_within_an_eighth_in_few_trials(most, holds, least):
    least = min(least, most)
    tried = []

    def fits(size):
        assert least <= size <= most
        assert size not in tried
        tried.append(size)
        return size <= holds

    found = largest_size(least, most, fits)
    assert len(tried) <= 20
    if holds >= most:
        assert found == most
        assert len(tried) <= 7
    elif holds < least:
        assert found == 0
    else:
        assert least <= found <= holds
        assert holds <= found + max(1, found // 8)


class Numbers:
    """Trials without a process: what fits is a matter of numbers."""

    def __init__(self, plan, holds, extra=0):
        with searching(plan) as real:
            self.real = real._trials
        self.facts, self.holds, self.extra, self.tried = self.real.facts, holds, extra, []
        self.cancelled = threading.Event()
        self.small, self.resolved = self.real.small, self.real.resolved

    def __call__(self, batch_size, accumulate=1):
        self.tried.append((batch_size, accumulate))
        try:
            devices = self.resolved(batch_size, accumulate).replicas
        except anb.PlanError as refused:
            if not too_large(refused):
                raise
            return Trial(batch_size, accumulate, fits=False, why=refused.why)
        part = math.ceil(math.ceil(batch_size / devices) / accumulate) + (self.extra if accumulate > 1 else 0)
        return Trial(batch_size, accumulate, fits=part <= self.holds, samples_per_second=1.0)


@pytest.fixture
def search(runs_folder):
    def make(holds, extra=0, at_most=None, **fields):
        plan = make_plan(**{"data": "random", "validation": 0, "accelerator": "cpu", **fields})
        trials = Numbers(plan, holds, extra)
        most = min(at_most or plan.batch_size, trials.facts.train_samples)
        return Search(trials, BatchFit(plan, plan.batch_size), at_most=most)

    return make


def test_a_batch_in_parts_is_tried_before_it_is_offered(search):
    fit = search(130, extra=0, batch_size=1000).run()
    assert fit.complete
    assert fit.largest == 128
    assert fit.settings == {"batch_size": 1000, "accumulate": 8}
    assert fit.trials[-1].accumulate == 8
    assert fit.plan.accumulate == 8
    assert fit.plan.batch_size == 1000
    # the gradients' own place takes room for 30 samples: smaller parts
    fit = search(130, extra=30, batch_size=1000).run()
    assert fit.settings == {"batch_size": 1000, "accumulate": 10}
    assert "in 10 parts" in fit.advice


def test_several_devices_share_the_batch(search):
    fit = search(100, batch_size=1001, framework="pytorch", strategy="ddp", devices=2).run()
    assert fit.largest == 192  # of which each has 96
    assert fit.accumulate == 6
    assert fit.plan.resolve().per_replica == 501
    assert search(10**6, batch_size=1001, strategy="ddp", devices=2).run().settings["accumulate"] == 1


def test_a_batch_that_fits_stays_whole_and_nothing_that_fits_is_said(search):
    assert search(10**6, batch_size=300).run().settings == {"batch_size": 300, "accumulate": 1}
    fit = search(0, batch_size=300).run()
    assert fit.largest == fit.accumulate == 0
    assert "Not even a batch of 1 fits" in fit.advice
    with pytest.raises(anb.AccelNbError, match="No batch was found"):
        _ = fit.plan
    assert ET.fromstring(fit.svg()) is not None


def test_batch_normalisation_gets_two_samples_at_a_time(search):
    fit = search(2, batch_size=9, model="cnn", data_args={"shape": (8, 8, 1)}, model_args={"filters": [4]}).run()
    assert fit.largest == 2
    # nine samples in five parts would leave one alone, and in four of two or three not all fit
    assert fit.settings == {"batch_size": 2, "accumulate": 1}
    assert "is refused" in fit.notes[0]
    fit = search(3, batch_size=9, model="cnn", data_args={"shape": (8, 8, 1)}, model_args={"filters": [4]}).run()
    assert fit.settings == {"batch_size": 9, "accumulate": 3}
    assert fit.notes == [
        "Batch normalisation sees 3 of 9 samples at a time: accumulate=3 computes a batch in parts."
    ]


def test_a_search_ends_early_with_what_it_has(search):
    one = search(10**6, batch_size=4096)
    one._told = lambda search: one.cancel() if len(one.fit.trials) == 2 else None
    fit = one.run()
    assert not fit.complete
    assert fit.largest == 512
    assert "ended early" in fit.advice
    one = search(100, batch_size=4096)
    one._left = 1
    assert not one.run().complete


def test_a_search_cancelled_before_its_process_has_said_a_word_ends(runs_folder):
    """There are no events to read then: that was an error in place of an answer."""
    told = []
    with searching(
        make_plan(**narrow()), told=lambda search: (told.append(search.trying), search.cancel())
    ) as one:
        fit = one.run()
    assert told == [one.trying]
    assert not fit.complete
    assert fit.trials == []
    assert no_trial_is_left(runs_folder)


def test_a_plan_that_is_too_large_by_its_numbers_is_looked_for_all_the_same(search):
    """`resolve` refuses the batch before training; what is asked here is which one it would take."""
    rows = {"samples": 2**22, "shape": (2, 2, 1), "classes": 2}
    fields = {"batch_size": 2**22, "data_args": rows, "model_args": {"layers": [65536]}}
    with pytest.raises(anb.PlanError, match="GiB"):
        make_plan(data="random", validation=0, accelerator="cpu", **fields).resolve()
    assert search(4096, **fields).run().largest == 4096


@pytest.mark.parametrize(
    "numbers", [{"at_most": 0}, {"at_most": 2.5}, {"trials": 0}, {"seconds": 0}, {"seconds": float("nan")}]
)
def test_numbers_that_are_none_are_refused(numbers, runs_folder):
    with pytest.raises(anb.PlanError, match=next(iter(numbers))):
        anb.largest_batch(**numbers)
    with pytest.raises(anb.PlanError, match="this machine alone"):
        anb.largest_batch(nodes=2)
    assert not (runs_folder / FOLDER).exists()


def test_the_speed_leaves_out_the_first_epoch_and_validation(tmp_path):
    events = tmp_path / "events.jsonl"
    told = [
        {"event": "batch", "t": 10.0, "epoch": 1, "first": 1, "loss": [1.0]},  # compiles
        {"event": "batch", "t": 10.5, "epoch": 1, "first": 2, "loss": [1.0]},
        {"event": "epoch", "t": 12.0, "epoch": 1},
        {"event": "batch", "t": 12.5, "epoch": 2, "first": 3, "loss": [1.0, 1.0]},
        {"event": "epoch", "t": 14.0, "epoch": 2},
        {"event": "batch", "t": 14.5, "epoch": 3, "first": 5, "loss": [1.0, 1.0]},
    ]
    events.write_text("".join(json.dumps(one) + "\n" for one in told))
    assert samples_per_second(events, 100, 150) == pytest.approx(300)  # 100 and then 50 samples, in half a second
    events.write_text("".join(json.dumps(one) + "\n" for one in told[:2]))
    assert samples_per_second(events, 100, 150) == pytest.approx(100)


def test_the_picture_is_a_whole_svg_with_each_batch_and_no_markup_from_outside():
    fit = BatchFit(make_plan(batch_size=512), 512)
    fit.trials = [
        Trial(64, 1, fits=True, samples_per_second=1000.0, memory=2**30),
        Trial(128, 1, fits=True, samples_per_second=1800.0),
        Trial(256, 1, fits=False, why="<b>no</b> & no"),
        Trial(512, 4, fits=True, samples_per_second=1700.0),
    ]
    fit.largest, fit.accumulate, fit.notes = 128, 4, ["<i>note</i>"]
    root = ET.fromstring(fit.svg())
    space = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f".//{space}g")) == 4
    assert "<b>" not in fit._repr_html_()
    assert "<i>" not in fit._repr_html_()
    words = [one.text for one in root.iter(f"{space}text")]
    assert {"64", "128", "512", "in 4 parts", "does not fit"} <= set(words)
    assert "1.00 GiB at the peak" in str(fit)
    assert len(fit.plot().axes[0].lines) == 3
    assert fit.samples_per_second == 1700.0


# ---- real trials


def no_trial_is_left(folder: Path) -> bool:
    running = [child for child in psutil.Process().children(recursive=True) if is_worker(child)]
    return not running and not (folder / FOLDER).exists()


@pytest.fixture
def panel(runs_folder):
    """Make a panel; a run that it has started ends with the test."""
    made = []

    def make(**fields):
        made.append(settle(anb.Studio(**fields)))
        return made[-1]

    yield make
    for one in made:
        one._fitting.stop()
        if one.run is not None and not one.run.ended:
            one.run.kill()
            one.run._ended.wait(PATIENCE)


def fail(studio):
    """Press Train, and wait for a run that ends for lack of memory."""
    studio._runner.train.click()
    failed = until(lambda: studio.run, "a run")
    until(lambda: failed.ended and studio._runner.finished.is_set(), "its end")
    assert failed.error["kind"] == "OutOfMemory", failed.error
    assert "Out of memory on this computer" in studio._words.error.value
    assert there(studio._fitting.ui)
    assert there(studio._fitting.find)
    return failed


def from_a_shortage_to_a_trained_model(studio, runs_folder):
    """A run that fails for memory, then the search, its answer, and Train: all in one panel."""
    row, batch = studio._fitting, studio.plan.batch_size
    assert not there(row.ui)
    failed = fail(studio)
    row.find.click()
    assert studio._runner.train.disabled
    assert there(row.cancel)
    until(lambda: " fits" in row.line.value or not row.busy, "the first size that fits")
    searching = row._thread
    if searching is not None:
        searching.join(1200)
    fit = row.fit
    assert fit is not None, studio._words.message.value + studio._words.error.value
    assert fit.complete, fit
    assert 1 <= fit.largest < batch, fit
    assert fit.accumulate > 1
    assert all(one.samples_per_second > 0 for one in fit.trials if one.fits)
    assert all(one.memory > 2**27 for one in fit.trials if one.fits)
    assert not all(one.fits for one in fit.trials)
    assert "<svg" in row.picture.value
    assert row.parts.description == f"Use batch {batch:,} in {fit.accumulate} parts"
    assert row.alone.description == f"Use batch {fit.largest:,}"
    assert not studio._runner.train.disabled
    assert no_trial_is_left(runs_folder)

    row.parts.click()
    settle(studio)
    assert studio.plan.accumulate == fit.accumulate
    assert studio.plan.batch_size == batch
    assert "Press Train" in message(studio)
    studio._runner.train.click()
    until(lambda: studio.run is not failed, "the next run")
    assert studio.run.wait(PATIENCE).status == "done"
    assert not there(row.ui)


def test_from_a_shortage_to_a_trained_model_in_the_panel(panel, runs_folder, monkeypatch):
    monkeypatch.setenv(process_memory.VARIABLE, "2")
    from_a_shortage_to_a_trained_model(panel(**narrow()), runs_folder)


@pytest.mark.long
@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_from_a_shortage_to_a_trained_model_in_both_frameworks(framework, panel, runs_folder, monkeypatch):
    monkeypatch.setenv(process_memory.VARIABLE, {"pytorch": "0.8", "tensorflow": "1.0"}[framework])
    from_a_shortage_to_a_trained_model(panel(framework=framework, **wide()), runs_folder)


def test_a_search_is_cancelled_in_the_panel(panel, runs_folder):
    studio = panel(**narrow())
    row = studio._fitting
    row._offer()
    row.find.click()
    until(lambda: " …" in row.line.value and (runs_folder / FOLDER).exists(), "the first trial")
    row.cancel.click()
    until(lambda: not row.busy, "its end")
    assert no_trial_is_left(runs_folder)
    assert not row.fit.complete
    assert row.fit.trials == []
    assert there(row.find)
    assert not there(row.parts)
    until(lambda: not studio._runner.train.disabled, "Train can be pressed")
    studio._desk.change(batch_size=6)
    settle(studio)
    row.clear()
    assert not there(row.ui)


def broken(input_shape, outputs):
    raise ZeroDivisionError("an error of its own")


def test_another_error_ends_the_search_and_a_trial_that_takes_too_long_does_not_fit(runs_folder, capsys):
    with pytest.raises(anb.RunFailed, match="an error of its own"):
        anb.largest_batch(**narrow(model=broken))
    fit = anb.largest_batch(**narrow(), seconds=0.3, trials=1)
    assert fit.largest == 0
    assert "within 0 s" in fit.trials[0].why
    assert "does not fit" in capsys.readouterr().out
    assert no_trial_is_left(runs_folder)


@pytest.mark.long
@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_a_run_finds_its_batch_and_goes_on_in_parts(framework, runs_folder, monkeypatch):
    """From the run's own directory, as after a restart: own arrays, their last rows and all."""
    monkeypatch.setenv(process_memory.VARIABLE, {"pytorch": "0.8", "tensorflow": "1.0"}[framework])
    random = np.random.default_rng(0)
    data = (random.normal(size=(3000, 16)).astype(np.float32), random.normal(size=(3000, 2)).astype(np.float32))
    run = anb.train(framework=framework, **wide(data=data, data_args={}, batch_size=3000, wait=False))
    with pytest.raises(anb.RunFailed):
        run.wait(PATIENCE)
    again = Run(run.directory).attach()
    fit = again.largest_batch()
    assert fit.batch_size == 3000
    assert fit.accumulate > 1
    with pytest.raises(anb.AccelNbError, match="not here"):
        _ = fit.plan
    assert run.resume(accumulate=fit.accumulate).wait(PATIENCE).status == "done"
    assert no_trial_is_left(runs_folder)


@pytest.mark.long
@pytest.mark.parametrize(
    ("framework", "strategy"),
    [("pytorch", "ddp"), ("pytorch", "fsdp"), ("tensorflow", "mirrored"), ("tensorflow", "tpu")],
)
def test_trials_on_several_devices(framework, strategy, runs_folder, monkeypatch):
    monkeypatch.setenv(process_memory.VARIABLE, "1.1" if framework == "tensorflow" else "0.6")
    fields = wide(framework=framework, strategy=strategy, devices=2)
    fit = anb.largest_batch(**fields, at_most=4096, trials=12)
    assert fit.complete, fit
    assert 2 <= fit.largest < 4096, fit
    assert fit.largest % 2 == 0
    assert fit.accumulate > 1
    assert anb.train(fit.plan).status == "done"
