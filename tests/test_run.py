"""Runs for real: worker processes, control while training, and each way in which a run can come to harm."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

import accel_nb as anb
from accel_nb import launch
from accel_nb.files import write_atomic
from accel_nb.folder import directories, known
from accel_nb.run import Run

FRAMEWORKS = ["pytorch", "tensorflow"]
PATIENCE = 90  # seconds until something that must happen counts as not happening, on a slow and busy machine


def until(condition, what, patience=PATIENCE):
    """Wait for a condition; a test that waits in vain fails with its name."""
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, f"in vain: {what}"
        time.sleep(0.02)


@pytest.fixture
def start(runs_folder):
    """Start a run that does not wait; whatever happens, its worker ends with the test."""
    started = []

    def begin(**fields):
        run = anb.train(**{"epochs": 2000, "wait": False, **fields})
        started.append(run)
        return run

    yield begin
    for run in started:
        if not run.ended:
            run.kill()
            until(lambda run=run: run.ended, "a killed run ends")


def training(run):
    until(lambda: len(run.history) > 3 or run.ended, "steps arrive")
    assert not run.ended, run.error
    return run


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_run_trains_and_leaves_all_of_itself_in_its_directory(framework, runs_folder):
    run = anb.train(framework=framework, epochs=4, seed=1)
    assert run.status == "done"
    assert run.plan.learning_rate == 0.001
    assert run.plan.accelerator == "cpu" or run.plan.accelerator.startswith(("gpu", "mps"))
    assert "learning_rate" in run.reasons
    frame = run.history.to_frame()
    assert list(frame.columns) == ["step", "epoch", "loss", "accuracy", "val_loss", "val_accuracy"]
    assert len(frame) == 4 * 12
    assert frame.val_accuracy.notna().sum() == 4
    assert frame.val_accuracy.iloc[-1] > 0.85
    assert run.parameters == 407_050
    assert run.started["asked"] == "auto"
    assert run.started["learning_rate"] == pytest.approx(0.001)
    assert run.program == (run.directory / "program.py").read_text()
    names = {path.name for path in run.directory.iterdir()}
    weights = "model.pt" if framework == "pytorch" else "model.keras"
    checkpoint = "checkpoint.pt" if framework == "pytorch" else "checkpoint.npz"
    told = {"data", "events.jsonl", "log.txt", "lock", "plan.json", "program.py", "worker.json"}
    assert names == {*told, weights, checkpoint}
    assert len(run.plot().axes) == 2
    assert run.log == ""
    assert run.error is None
    saved = json.loads((run.directory / "plan.json").read_text())
    assert saved["asked"]["accelerator"] == "auto"


def test_pytorch_tensorflow_and_pytorch_again_in_one_kernel_without_either(runs_folder):
    """The kernel holds no framework after all of it; only `model()` brings one in."""
    code = """
        import sys
        import accel_nb as anb
        order = ("pytorch", "tensorflow", "pytorch")
        finals = [anb.train(framework=f, epochs=2).history.last["val_loss"] for f in order]
        frameworks = {"torch", "tensorflow", "keras", "jax"} & {name.partition(".")[0] for name in sys.modules}
        assert not frameworks, frameworks
        assert finals[0] == finals[2] != finals[1], finals
        model = anb.runs()[-1].model()
        assert "torch" in sys.modules and "tensorflow" not in sys.modules
        import torch, numpy as np
        x = np.load(anb.runs()[-1].directory / "data" / "x_val.npy")
        y = np.load(anb.runs()[-1].directory / "data" / "y_val.npy")
        with torch.no_grad():
            outputs = model(torch.from_numpy(x) / 16)
        loss = torch.nn.functional.cross_entropy(outputs, torch.from_numpy(y)).item()
        assert abs(loss - finals[2]) < 1e-5, (loss, finals)
    """
    check = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=600, check=False
    )
    assert check.returncode == 0, check.stdout + check.stderr


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_pause_resume_learning_rate_and_stop_while_training(framework, start):
    run = training(start(framework=framework))
    assert run.pause() is run
    until(lambda: run.status == "paused", "the run pauses")
    steps = len(run.history)
    time.sleep(0.7)
    assert len(run.history) == steps
    run.set_learning_rate(0.0005)
    run.resume()
    until(lambda: len(run.history) > steps, "the run goes on")
    assert run.status == "running"

    def rates():
        events = [json.loads(line) for line in (run.directory / "events.jsonl").read_text().splitlines()]
        return [event["learning_rate"] for event in events if event["event"] == "batch"]

    until(lambda: rates()[-1] == pytest.approx(0.0005), "the new learning rate holds")
    assert rates()[0] == pytest.approx(0.001)
    run.stop()
    run.wait(30)
    assert run.status == "stopped"
    assert list(run.directory.glob("checkpoint.*"))
    assert list(run.directory.glob("model.*"))
    with pytest.raises(anb.AccelNbError, match="ended"):
        run.pause()
    with pytest.raises(anb.PlanError, match="above 0"):
        run.set_learning_rate(-1)


def test_stop_before_the_first_step(start):
    run = start()
    run.stop()
    run.wait(PATIENCE)
    assert run.status == "stopped"
    assert len(run.history) <= 1


def test_an_interrupt_of_a_waiting_cell_stops_and_a_second_one_kills(start, monkeypatch):
    run = training(start())
    once = iter([True])

    def interrupted(timeout=None):
        if next(once, False):
            raise KeyboardInterrupt
        time.sleep(timeout)

    monkeypatch.setattr(run._ended, "wait", interrupted)
    run.wait(PATIENCE)
    assert run.status == "stopped"
    assert list(run.directory.glob("model.pt"))

    between = training(start())
    looks, look = iter([False, True]), type(between).ended.fget

    def looked(run):  # between two waits
        if run is between and threading.current_thread() is threading.main_thread() and next(looks, False):
            raise KeyboardInterrupt
        return look(run)

    with monkeypatch.context() as patched:
        patched.setattr(type(between), "ended", property(looked))
        between.wait(PATIENCE)
    assert between.status == "stopped"

    slow = start(model=sleeper, model_args={"seconds": 60.0, "after": 1})
    until(lambda: len(slow.history) == 1, "the first step arrives")
    twice = iter([True, True])

    def pressed(timeout=None):
        if next(twice, False):
            raise KeyboardInterrupt
        time.sleep(timeout)

    monkeypatch.setattr(slow._ended, "wait", pressed)
    slow.wait(20)
    assert slow.status == "stopped"
    assert not list(slow.directory.glob("model.pt"))
    assert any("not" in text for text in slow.warnings)


def sleeper(outputs, seconds, after):
    """A model that sleeps in its forward pass after some steps, as a hanging device would."""
    import time

    import torch

    class Sleeper(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.LazyLinear(outputs)
            self.layer(torch.zeros(1, 784))
            self.count = 0

        def forward(self, x):
            if self.training:
                self.count += 1
                if self.count > after:
                    time.sleep(seconds)
            return self.layer(x.flatten(1))

    return Sleeper()


def raiser(outputs):
    """A model that fails in its third training step."""
    import torch

    class Raiser(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(784, outputs)
            self.count = 0

        def forward(self, x):
            self.count += self.training
            if self.count == 3:
                raise ZeroDivisionError("three")
            return self.layer(x.flatten(1))

    return Raiser()


def test_a_worker_that_raises_at_step_3_is_told_with_its_place(runs_folder):
    with pytest.raises(anb.RunFailed, match=r"ZeroDivisionError: three") as failed:
        anb.train(model=raiser)
    assert "program.py, line" in str(failed.value)
    run = anb.runs()[-1]
    assert run.status == "failed"
    assert run.error["kind"] == "ZeroDivisionError"
    place = run.error["where"]
    number = int(place.split("line ")[1].split(":")[0])
    assert 'raise ZeroDivisionError("three")' in run.program.splitlines()[number - 1]
    assert "worker.py" not in run.error["traceback"]
    assert "own_model" in run.program
    with pytest.raises(anb.RunFailed, match="three"):
        run.wait()


def test_a_worker_killed_is_a_failed_run_and_the_next_one_works(start, runs_folder):
    run = training(start())
    steps = len(run.history)
    os.kill(run._identity[0], signal.SIGKILL)
    with pytest.raises(anb.RunFailed, match="SIGKILL"):
        run.wait(PATIENCE)
    assert len(run.history) >= steps
    assert anb.train(epochs=1).status == "done"


def kernel(code, **env):
    """A process that plays the notebook's kernel."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        text=True,
    )


TRAINS = """
    import time
    import accel_nb as anb
    run = anb.train(framework={framework!r}, epochs=100000, wait=False)
    while len(run.history) < 4:
        assert not run.ended, run.error
        time.sleep(0.05)
    print("four are done", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_killed_kernel_leaves_a_checkpoint_and_no_process(framework, runs_folder):
    process = kernel(TRAINS.format(framework=framework))
    try:
        assert process.stdout is not None
        while "four are done" not in (line := process.stdout.readline()):
            assert line, "the kernel ended before it trained"
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive
    (path,) = directories(runs_folder)
    assert list(path.glob("checkpoint.*"))
    # another kernel shows the run again, whole
    run = known(path).attach()
    assert run.status == "stopped"
    assert len(run.history) >= 4
    assert not np.isnan(run.history.loss).any()


def test_two_kernels_train_side_by_side_in_one_folder(runs_folder):
    code = "import accel_nb as anb; run = anb.train(epochs=2); print(run.status, run.history.last['val_loss'])"
    pair = [kernel(code), kernel(code)]
    told = [process.communicate(timeout=300)[0].splitlines()[-1] for process in pair]
    assert told[0].startswith("done")
    assert told[0] == told[1]
    assert len(list(directories(runs_folder))) == 2


def test_another_kernel_follows_and_steers_a_living_run(start):
    run = training(start())
    again = Run(run.directory).attach()  # as a second kernel finds it
    assert again.status == "running"
    steps = len(again.history)
    until(lambda: len(again.history) > steps, "the second kernel sees new steps")
    again.stop()
    until(lambda: again.ended, "the second kernel stops the run")
    assert run.wait(PATIENCE).status == "stopped"
    assert again.wait(PATIENCE).status == "stopped"
    assert len(again.history) == len(run.history)


def test_the_run_directory_is_removed_while_it_trains(start):
    run = training(start())
    shutil.rmtree(run.directory)
    until(lambda: run.ended, "the run ends")
    with pytest.raises(anb.RunFailed, match="removed"):
        run.wait(PATIENCE)


def fill(path):
    """Write until the disk is full."""
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(b"0" * 4096)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounting a tiny disk needs root")
def test_a_full_disk_is_told_and_frees_itself(tmp_path, monkeypatch):
    """On a disk of 6 MiB: filled while the run trains, the events wait; once freed, none is missing."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(disk)], check=False)
    if mounted.returncode:
        pytest.skip("this container may not mount")
    monkeypatch.setenv("ACCEL_NB_RUNS", str(disk))
    run = None
    try:
        run = training(anb.train(epochs=100_000, model_args={"layers": [8]}, wait=False))
        filler = disk / "filler"
        with pytest.raises(OSError, match="space"):
            fill(filler)
        until(lambda: any("full" in text for text in run.warnings), "the full disk is told")
        filler.unlink()
        steps = len(run.history)
        until(lambda: len(run.history) > steps + 5, "steps arrive again")
        run.stop()
        run.wait(PATIENCE)
        assert run.status == "stopped"
        assert (np.diff(run.history.step) == 1).all()
        assert not np.isnan(run.history.loss).any()
    finally:
        if run is not None and not run.ended:
            run.kill()
            until(lambda: run.ended, "the run ends")
        subprocess.run(["umount", "-l", str(disk)], check=False)


def test_a_folder_that_cannot_be_written_is_refused_before_anything_starts(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(anb.PlanError, match="directory"):
        anb.train(directory=file)


def test_a_refused_plan_leaves_no_directory(runs_folder):
    with pytest.raises(anb.PlanError):
        anb.train(accelerator="gpu:77")
    with pytest.raises(anb.DataError):
        anb.train(data="digitz")
    assert not runs_folder.exists() or not list(directories(runs_folder))


def test_where_no_process_can_be_started_nothing_is_left_and_nothing_lost(runs_folder, monkeypatch):
    def without_processes():
        launch.spares.close()
        monkeypatch.setattr(tempfile, "tempdir", str(runs_folder / "missing"))  # as on a machine that is full

    tiny = {"model_args": {"layers": [4]}}
    without_processes()
    with pytest.raises(anb.AccelNbError, match="no worker process can be started"):
        anb.train(**tiny)
    assert not runs_folder.exists() or not list(directories(runs_folder))

    monkeypatch.undo()
    monkeypatch.setenv("ACCEL_NB_RUNS", str(runs_folder))
    run = anb.train(epochs=1, **tiny)
    without_processes()
    with pytest.raises(anb.AccelNbError, match="no worker process can be started"):
        run.resume(epochs=2)
    assert (run.status, run.error) == ("done", None)
    run.wait(1)
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert run.resume(epochs=2).wait(PATIENCE).status == "done"
    assert run.history.epochs[-1]["epoch"] == 2


def test_an_exploding_loss_ends_the_run_with_the_step(runs_folder):
    with pytest.raises(anb.RunFailed, match=r"loss is (nan|inf) at step"):
        anb.train(optimizer="sgd", learning_rate=1e30, model_args={"layers": [64, 64]}, epochs=3)
    assert len(anb.runs()[-1].history) >= 1


def test_a_spare_worker_is_taken_and_one_for_the_other_framework_ends():
    launch.spares.prepare("pytorch")
    first = launch.spares._spare
    launch.spares.prepare("pytorch")
    assert launch.spares._spare is first
    launch.spares.prepare("tensorflow")
    assert first.ended() is not None
    second = launch.spares._spare
    assert launch.spares.take("tensorflow") is second
    second.kill()
    assert second.ended() is not None
    assert not second.early_log.exists()


def test_a_spare_that_died_is_replaced(runs_folder):
    launch.spares.prepare("pytorch")
    launch.spares._spare.process.kill()
    launch.spares._spare.process.wait()
    assert anb.train(epochs=1).status == "done"


def test_a_spare_ends_with_its_kernel():
    process = kernel("""
        import time
        from accel_nb import launch
        launch.spares.prepare("pytorch")
        print(launch.spares._spare.pid, flush=True)
        time.sleep(600)
    """)
    assert process.stdout is not None
    worker = psutil.Process(int(process.stdout.readline()))
    process.kill()
    process.wait()
    process.stdout.close()
    psutil.wait_procs([worker], timeout=5)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


def test_a_torch_py_beside_the_notebook_is_not_taken_for_the_framework(tmp_path, monkeypatch, runs_folder):
    (tmp_path / "torch.py").write_text("raise RuntimeError('the wrong torch')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    assert anb.train(epochs=1).status == "done"


def test_half_a_line_of_events_is_waited_for(tmp_path):
    directory = tmp_path / "run"
    directory.mkdir()
    write_atomic(
        directory / "plan.json", json.dumps({"plan": {"epochs": 1}, "reasons": {}, "notes": [], "data": {}})
    )
    line = json.dumps({"event": "batch", "epoch": 1, "first": 1, "loss": [1.5, 0.5]})
    events = directory / "events.jsonl"
    events.write_text(line[:20])
    run = Run(directory)
    run.refresh()
    assert len(run.history) == 0
    events.write_text(line + "\n")
    run.refresh()
    assert list(run.history.loss) == [1.5, 0.5]
    more = json.dumps({"event": "batch", "epoch": 1, "first": 3, "loss": [0.25]})
    events.write_text(f'{line}\nno json\n[1]\n{{"event": "batch"}}\n{more}\n')
    run.refresh()
    assert list(run.history.loss) == [1.5, 0.5, 0.25]


def test_a_directory_that_is_no_run_is_passed_over(runs_folder):
    anb.train(epochs=1, model_args={"layers": [4]})
    for name, text in (("20260101-000000-torn", "{"), ("20260101-000000-empty", None)):
        (runs_folder / name).mkdir()
        if text is not None:
            (runs_folder / name / "plan.json").write_text(text)
    (run,) = anb.runs()
    assert run.status == "done"


def test_runs_of_one_second_get_names_of_their_own_and_keep_their_order(runs_folder):
    made = [anb.train(epochs=1, data="random", data_args={"samples": 40}, wait=False) for _ in range(3)]
    for run in made:
        run.wait(PATIENCE)
    assert [run.directory for run in anb.runs()] == [run.directory for run in made]
    assert anb.runs()[-1] is made[-1]
    stored = list((runs_folder / ".data").iterdir())
    assert len(stored) <= 4  # the same data three times, kept once
    assert Path(made[0].directory / "data" / "x_train.npy").stat().st_nlink >= 4
