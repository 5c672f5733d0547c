"""Taking runs up again: what is trained in two goes is what would have been trained in one, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

import accel_nb as anb
from accel_nb.diagnose import diagnose
from accel_nb.files import claim
from accel_nb.resuming import checkpoint_in, whole

PATIENCE = 90  # seconds until something that must happen counts as not happening, on a slow and busy machine
PLAN = {"data": "digits", "model": "mlp", "model_args": {"layers": [24], "dropout": 0.3}, "batch_size": 32}
WAYS = {
    "pytorch": {"framework": "pytorch"},
    "tensorflow": {"framework": "tensorflow"},
    "ddp": {"framework": "pytorch", "strategy": "ddp", "devices": 2},
    "fsdp": {"framework": "pytorch", "strategy": "fsdp", "devices": 2},
    "mirrored": {"framework": "tensorflow", "strategy": "mirrored", "devices": 2},
}


def until(condition, what, patience=PATIENCE):
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, f"in vain: {what}"
        time.sleep(0.01)


def weights(run):
    model = run.model()
    if run.settled["framework"] == "pytorch":
        return [value.numpy() for value in model.state_dict().values()]
    return model.get_weights()


def same(one, other):
    """The same history, to the bit that nine digits hold, and the same weights."""
    np.testing.assert_array_equal(one.history.loss, other.history.loss)
    for mine, theirs in zip(one.history.epochs, other.history.epochs, strict=True):
        assert {**mine, "seconds": 0} == {**theirs, "seconds": 0}
    for mine, theirs in zip(weights(one), weights(other), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.fixture
def interrupted(runs_folder):
    """interrupted(steps, **plan): a run that was stopped politely after about so many steps."""
    started = []

    def begin(steps, **plan):
        run = anb.train(**plan, wait=False)
        started.append(run)
        until(lambda: len(run.history) >= steps or run.ended, "steps arrive")
        run.stop().wait(PATIENCE)
        return run

    yield begin
    for run in started:
        if not run.ended:
            run.kill()
            until(lambda run=run: run.ended, "a killed run ends")


@pytest.mark.parametrize("way", list(WAYS))
def test_a_stopped_run_goes_on_as_if_nothing_had_been(way, interrupted):
    plan = {**PLAN, **WAYS[way], "accelerator": "cpu", "epochs": 12, "schedule": "cosine", "warmup_steps": 5}
    through = anb.train(**plan)
    run = interrupted(3, **plan)
    if run.status == "done":
        pytest.fail("it was over before it could be stopped")
    assert 3 <= len(run.history) < len(through.history)
    run.meter = {"samples_per_second": 5.0}
    assert run.resume() is run
    assert run.meter == {}  # of its first life: it computes nothing yet
    run.wait(PATIENCE)
    assert run.status == "done"
    same(run, through)
    again = anb.Run(run.directory).attach()  # another kernel reads the same curve
    np.testing.assert_array_equal(again.history.loss, through.history.loss)
    assert again.status == "done"


def own_model():
    from torch import nn

    return nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.Tanh(), nn.Linear(16, 10))


PYTORCH = {"framework": "pytorch"}
MOVES = {
    "one device to two": (PYTORCH, {"strategy": "ddp"}, 2),
    "two shards to one device": (
        {**PYTORCH, "strategy": "fsdp", "devices": 2, "optimizer": "sgd"},
        {"strategy": "single"},
        None,
    ),
    "an own model": ({**PYTORCH, "model": own_model, "model_args": {}}, {"strategy": "fsdp", "accumulate": 2}, 2),
    "a TPU's program to the CPU's": (
        {"framework": "tensorflow", "strategy": "tpu"},
        {"accelerator": "cpu", "strategy": "single"},
        None,
    ),
    "one device to two replicas": ({"framework": "tensorflow"}, {"strategy": "mirrored"}, 2),
}


@pytest.mark.parametrize("move", list(MOVES))
def test_a_run_goes_on_in_another_place_with_the_same_losses(move, interrupted):
    begin, where, replicas = MOVES[move]
    plan = {**PLAN, "model_args": {"layers": [24], "dropout": 0.0}, **begin, "accelerator": "cpu", "epochs": 6}
    through = anb.train(**plan)
    run = interrupted(3, **plan)
    assert 3 <= len(run.history) < len(through.history)
    run.resume(**where).wait(PATIENCE)
    np.testing.assert_allclose(run.history.loss, through.history.loss, rtol=2e-5)
    assert run.settled["strategy"] == where["strategy"]
    assert run.started.get("replicas") == replicas
    for mine, theirs in zip(weights(run), weights(through), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-4)


def on_a_gpu(run):
    """The directory as a run on a GPU in float16 leaves it."""
    import torch

    from accel_nb.export import settings_of
    from accel_nb.files import write_atomic

    saved = json.loads((run.directory / "plan.json").read_text())
    saved["plan"] |= {"accelerator": "gpu:0", "precision": "fp16"}
    saved["asked"] |= {"accelerator": "gpu", "precision": "fp16"}
    write_atomic(run.directory / "plan.json", json.dumps(saved))
    text = run.program.replace('ACCELERATOR = "cpu"', 'ACCELERATOR = "gpu"')
    write_atomic(run.directory / "program.py", text)
    assert settings_of(text)["EPOCHS"]
    file = run.directory / "checkpoint.pt"
    state = torch.load(file, weights_only=True)
    state |= {"random_gpu": state["random_cpu"], "scaler": {"scale": 2.0**16}, "skipped": 0}
    state["optimizer"]["param_groups"][0] |= {"capturable": True}
    torch.save(state, file)


def test_the_checkpoint_of_a_gpu_goes_on_where_there_is_none(interrupted, monkeypatch):
    if diagnose().usable("pytorch", "gpu"):
        pytest.skip("PyTorch has a GPU here")
    plan = {**PLAN, "framework": "pytorch", "accelerator": "cpu", "epochs": 6}
    through = anb.train(**plan)
    run = interrupted(3, **plan)
    on_a_gpu(run)
    run = anb.Run(run.directory).attach()
    with pytest.raises(anb.PlanError, match=r"accelerator='gpu:0'.*run\.resume\(accelerator='auto'\)"):
        run.resume()
    run.resume(accelerator="auto").wait(PATIENCE)
    same(run, through)
    assert run.settled["accelerator"] == "cpu"
    assert any("precision is fp32 from here on" in note for note in run.notes)


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_a_run_whose_worker_was_killed_goes_on_from_its_last_checkpoint(framework, interrupted, runs_folder):
    plan = {**PLAN, "framework": framework, "accelerator": "cpu", "epochs": 40, "checkpoint_epochs": 1}
    through = anb.train(**plan)
    run = anb.train(**plan, wait=False)
    until(lambda: checkpoint_in(run.directory) is not None and len(run.history) > 60, "a checkpoint is written")
    os.kill(run._worker.pid, signal.SIGKILL)
    until(lambda: run.ended, "the end is noticed")
    assert run.status == "failed"
    assert whole(checkpoint_in(run.directory))
    run.resume().wait(PATIENCE)
    same(run, through)


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_a_complete_run_can_be_trained_longer(framework, runs_folder):
    plan = {**PLAN, "framework": framework, "accelerator": "cpu"}
    long = anb.train(**plan, epochs=3)
    run = anb.train(**plan, epochs=2)
    with pytest.raises(anb.AccelNbError, match="has trained its 2 epochs"):
        run.resume()
    with pytest.raises(anb.PlanError, match="was planned with 2"):
        run.resume(epochs=1)
    run.resume(epochs=3).wait(PATIENCE)
    same(run, long)
    assert run.plan.epochs == 3
    assert "EPOCHS = 3" in run.program


def test_a_run_that_died_before_its_first_checkpoint_begins_anew_in_place(runs_folder):
    plan = {**PLAN, "framework": "pytorch", "accelerator": "cpu", "epochs": 2}
    through = anb.train(**plan)
    run = anb.train(**{**plan, "checkpoint_seconds": 0}, wait=False)
    run.kill()
    until(lambda: run.ended, "the end is noticed")
    assert checkpoint_in(run.directory) is None
    run.resume().wait(PATIENCE)
    same(run, through)


def test_what_cannot_be_taken_up_is_refused(interrupted):
    run = interrupted(3, **PLAN, framework="pytorch", accelerator="cpu", epochs=500)
    with claim(run.directory), pytest.raises(anb.AccelNbError, match="Another kernel trains the run"):
        run.resume()
    with pytest.raises(anb.PlanError, match=r"batch_size=64: It cannot change.*accelerator, strategy"):
        run.resume(batch_size=64)
    with pytest.raises(anb.PlanError, match="strategy='mirrored'"):
        run.resume(strategy="mirrored")
    checkpoint = checkpoint_in(run.directory)
    content = bytearray(checkpoint.read_bytes())
    content[len(content) // 2] ^= 0xFF
    checkpoint.write_bytes(content)
    with pytest.raises(anb.AccelNbError, match=r"checkpoint of .* is damaged"):
        run.resume()


def test_of_two_kernels_that_take_a_run_up_one_wins_and_the_other_follows(interrupted):
    run = interrupted(3, **PLAN, framework="pytorch", accelerator="cpu", epochs=60)
    code = f"""
        import accel_nb as anb
        run = anb.Run({str(run.directory)!r}).attach()
        print("ready", flush=True)
        input()
        try:
            run.resume().wait({PATIENCE})
            print("won" if run.ours else "followed", run.status)
        except anb.AccelNbError as told:
            print("told", "Another kernel trains" in str(told))
        """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": Path(__file__).parents[1]}
    kernels = [subprocess.Popen(command, **pipes) for _ in range(2)]
    try:
        for kernel in kernels:
            assert kernel.stdout.readline().strip() == "ready"
        for kernel in kernels:
            kernel.stdin.write("\n")
            kernel.stdin.flush()
        said = [kernel.communicate(timeout=PATIENCE)[0].split() for kernel in kernels]
    finally:
        for kernel in kernels:
            kernel.kill()
            kernel.wait()
    assert sorted(words[0] for words in said) in (["told", "won"], ["followed", "won"]), said
    assert ["told", "False"] not in said
    assert anb.Run(run.directory).attach().status == "done"
