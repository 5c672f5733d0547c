"""Copies of runs in another folder: whole, verified, while a run trains, and loud when they fail."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec

import nbformat
import pytest
from nbclient import NotebookClient
from panel import until

import accel_nb as anb
from accel_nb import copies as module
from accel_nb.colab import bring_back, keep_on_drive
from accel_nb.copies import Copies, copy
from accel_nb.errors import AccelNbError
from accel_nb.folder import known

# what these tests train with; an environment may hold one framework alone
FRAMEWORK = "pytorch" if find_spec("torch") else "tensorflow"
CHECKPOINT = "checkpoint.pt" if FRAMEWORK == "pytorch" else "checkpoint.npz"


@pytest.fixture
def kept(tmp_path):
    folder = tmp_path / "kept"
    folder.mkdir()
    return folder


@pytest.fixture
def keep(kept, monkeypatch):
    """Copies of a folder's runs, which end with the test."""
    monkeypatch.setattr(module, "PERIOD", 0.02)
    started = []

    def start(source) -> Copies:
        started.append(keep_on_drive(source, to=kept))
        return started[-1]

    yield start
    for one in started:
        one.stop()


def made(folder, name="20261130-120000-made", events=("started", "batch", "finished")):
    """A run's directory, as its worker leaves it."""
    run = folder / name
    (run / "data").mkdir(parents=True)
    (run / "data" / "x_train.npy").write_bytes(os.urandom(3_000_000))
    (run / "checkpoint.pt").write_bytes(os.urandom(1000))
    for spared in ("lock", "control.json", ".hidden"):
        (run / spared).write_text("of the processes here")
    tell(run, *events)
    (run / "plan.json").write_text("{}")
    return run


def tell(run, *events):
    with (run / "events.jsonl").open("a") as file:
        file.writelines(json.dumps({"event": event, "status": "done"}) + "\n" for event in events)


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_that_has_ended_is_copied_whole(tmp_path, kept, keep):
    run = made(tmp_path / "runs")
    copies = keep(tmp_path / "runs").wait(60)
    assert copies.copied == [run.name]
    assert repr(copies) == f"Copies of runs in {kept}: 1 kept"
    whole = contents(run)
    for spared in ("lock", "control.json", ".hidden"):
        whole.pop(spared)
    assert contents(kept / run.name) == whole


def test_one_run_may_be_kept_alone(tmp_path, kept, keep):
    run = made(tmp_path / "runs")
    made(tmp_path / "runs", "20261130-120001-other")
    keep(run).wait(60)
    assert [path.name for path in kept.iterdir()] == [run.name]


def test_runs_that_end_later_are_copied_too(tmp_path, kept, keep):
    (tmp_path / "runs").mkdir()
    copies = keep(tmp_path / "runs").wait(60)
    assert copies.copied == []
    run = made(tmp_path / "runs")
    until(lambda: copies.copied == [run.name], "the copy, without being asked for")


def test_a_run_that_trains_is_copied_with_its_newest_checkpoint(tmp_path, kept, keep, monkeypatch):
    monkeypatch.setattr(module, "TRAINING", 0.05)
    run = made(tmp_path / "runs", events=("started", "batch"))
    copies = keep(tmp_path / "runs")
    there = kept / run.name
    until((there / "events.jsonl").exists, "the first copy")
    assert copies.copied == []
    for number in range(3):
        new = os.urandom(1000)  # of the same size: a checkpoint is
        (run / "checkpoint.new").write_bytes(new)
        (run / "checkpoint.new").replace(run / "checkpoint.pt")
        tell(run, "checkpoint")
        until(lambda new=new: (there / "checkpoint.pt").read_bytes() == new, f"checkpoint {number}")
    tell(run, "finished")
    until(lambda: copies.copied == [run.name], "its end")
    assert (there / "events.jsonl").read_bytes() == (run / "events.jsonl").read_bytes()


def test_between_two_copies_of_a_run_that_trains_there_is_time(tmp_path, kept, keep):
    run = made(tmp_path / "runs", events=("started", "batch"))
    copies = keep(tmp_path / "runs").wait(60)
    before = (kept / run.name / "events.jsonl").read_bytes()
    tell(run, "batch")
    copies.wait(60)  # looks twice, and copies nothing: a minute has not gone by
    assert (kept / run.name / "events.jsonl").read_bytes() == before


def test_what_makes_a_run_comes_last(tmp_path, kept, keep, monkeypatch):
    """A copy that is cut short is no run, or one that was cut short, never one that claims to be whole."""
    order = []
    monkeypatch.setattr(module, "copy", lambda source, target: order.append(source.name) or copy(source, target))
    keep(made(tmp_path / "runs")).wait(60)
    assert order[-2:] == ["plan.json", "events.jsonl"]
    assert set(order[:-2]) == {"x_train.npy", "checkpoint.pt"}


def test_a_later_kernel_copies_only_what_is_new(tmp_path, kept, keep, monkeypatch):
    run = made(tmp_path / "runs")
    keep(run).wait(60).stop()
    order = []
    monkeypatch.setattr(module, "copy", lambda source, target: order.append(source.name) or copy(source, target))
    later = keep(run).wait(60)
    later.stop()
    assert later.copied == [run.name]
    assert order == []
    (run / "checkpoint.pt").write_bytes(os.urandom(1000))
    keep(run).wait(60)
    assert order == ["checkpoint.pt"]


def test_a_copy_that_reads_other_than_it_was_written_is_none(tmp_path, monkeypatch):
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"new")
    target.write_bytes(b"old")
    spoil = lambda number: os.pwrite(number, b"N", 0)  # noqa: E731 - a disk that keeps something else
    monkeypatch.setattr(module.os, "fsync", spoil)
    with pytest.raises(OSError, match="was read back other than it was written"):
        copy(source, target)
    assert target.read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]


def test_a_failure_is_loud_and_tried_again(tmp_path, kept, keep, capfd, monkeypatch):
    run = made(tmp_path / "runs")
    (kept / run.name).write_text("a file where the copy should be")
    seen = known(run)
    copies = keep(tmp_path / "runs")
    with pytest.raises(AccelNbError, match=rf"Not copied to .*{run.name}: .*The runs are still in .*runs"):
        copies.wait(60)
    assert copies.copied == []
    assert "FAILED" in repr(copies)
    assert f"the run itself is whole, in {run}" in seen.warnings[0]
    assert "warning: The copy in" in capfd.readouterr().err
    (kept / run.name).unlink()
    assert copies.wait(60).copied == [run.name]  # waiting tries at once
    assert copies.failed == {}
    assert "FAILED" not in repr(copies)


def test_a_folder_that_goes_away_is_a_failure_and_not_made_anew(tmp_path, kept, keep):
    (tmp_path / "runs").mkdir()
    copies = keep(tmp_path / "runs").wait(60)
    kept.rmdir()
    made(tmp_path / "runs")
    with pytest.raises(AccelNbError, match="is not there any more"):
        copies.wait(60)
    assert not kept.exists()


def test_a_folder_that_is_none_is_refused(tmp_path):
    with pytest.raises(AccelNbError, match="is no folder"):
        keep_on_drive(tmp_path, to=tmp_path / "nowhere")


def test_a_real_run_is_copied_while_it_trains_and_can_be_read_there(
    tmp_path, runs_folder, kept, keep, monkeypatch
):
    monkeypatch.setattr(module, "TRAINING", 0.1)
    copies = keep(runs_folder)
    run = anb.train(framework=FRAMEWORK, epochs=3, wait=False)
    run.wait()
    assert copies.wait(60).copied == [run.name]
    (again,) = anb.runs(kept)
    assert again.status == "done"
    assert (again.history.loss == run.history.loss).all()
    assert again.model() is not None


def test_a_run_is_brought_back_and_trained_on(runs_folder, kept, keep, monkeypatch):
    """A machine is lost while a run trains on it; the next one takes the run up from what was copied of it."""
    monkeypatch.setattr(module, "TRAINING", 0.1)
    copies = keep(runs_folder)
    run = anb.train(framework=FRAMEWORK, epochs=60, checkpoint_epochs=1, wait=False)
    until((kept / run.name / CHECKPOINT).is_file, "a checkpoint in the copy")
    until((kept / run.name / "events.jsonl").is_file, "the events of it")
    copies.stop()
    run.kill()
    monkeypatch.setenv("ACCEL_NB_RUNS", str(runs_folder.with_name("another-machine")))
    back = bring_back(kept=kept)
    assert back.directory != run.directory
    assert (back.name, back.status) == (run.name, "failed")
    assert bring_back(run.name, kept=kept) is back  # it is here now
    before = back.history.loss.copy()
    back.resume().wait()
    assert back.status == "done"
    assert len(back.history) == back.total_steps > len(before)
    assert (back.history.loss[: len(before)] == before).all()


def test_a_run_that_was_not_kept_is_told_with_those_that_were(tmp_path, kept):
    with pytest.raises(AccelNbError, match=r"no run '' in .*newest first: none"):
        bring_back(kept=kept)
    made(kept)
    with pytest.raises(AccelNbError, match=r"no run 'x' in .*newest first: 20261130-120000-made\."):
        bring_back("x", kept=kept)


def test_the_cell_shows_one_line_that_is_replaced(tmp_path):
    """In a real kernel; markup in a folder's name is text."""
    folder = tmp_path / "<b>runs"
    cells = [
        "import accel_nb as anb\nfrom accel_nb.colab import bring_back, keep_on_drive",
        f"copies = keep_on_drive(to={str(tmp_path)!r})",
        f"anb.train(framework={FRAMEWORK!r}, epochs=1)",
        "copies.wait(60);",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    env = {**os.environ, "ACCEL_NB_RUNS": str(folder)}
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute(env=env)
    (shown,) = notebook.cells[1].outputs
    assert shown.data["text/plain"] == f"Copies of runs in {tmp_path}: 1 kept"
    assert "<b>" not in shown.data["text/html"]
    assert "color:inherit" in shown.data["text/html"]
    assert notebook.cells[3].outputs == []
    assert len(json.dumps(notebook)) < 300_000
