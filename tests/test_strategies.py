"""The same plan by every strategy, through the call that users make: the same run, whatever it is spread over."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from importlib.util import find_spec

import numpy as np
import psutil
import pytest
from panel import PATIENCE, until

import accel_nb as anb
from accel_nb.resuming import checkpoint_in, whole

# 1,437 samples in batches of 101: 14 full ones, which no two devices share evenly, and a last one of 23
PLAN = {
    "data": "digits",
    "model": "mlp",
    "model_args": {"layers": [24], "dropout": 0},
    "batch_size": 101,
    "epochs": 2,
}
WAYS = {
    "ddp": {"framework": "pytorch", "strategy": "ddp", "devices": 2},
    "fsdp": {"framework": "pytorch", "strategy": "fsdp", "devices": 2, "activation_checkpointing": True},
    "accumulate": {"framework": "pytorch", "accumulate": 3},
    "mirrored": {"framework": "tensorflow", "strategy": "mirrored", "devices": 2},
    "mirrored 3, accumulate": {"framework": "tensorflow", "strategy": "mirrored", "devices": 3, "accumulate": 2},
    "multi_worker": {"framework": "tensorflow", "strategy": "multi_worker", "devices": 2},
    "tpu": {"framework": "tensorflow", "strategy": "tpu", "devices": 2},
}


@functools.cache
def alone(framework, strategy, folder):
    plan = {"framework": framework, "accelerator": "cpu", "strategy": strategy, "devices": 1}
    return anb.train(**plan, directory=folder, **PLAN)


@pytest.mark.parametrize("way", list(WAYS))
def test_the_same_losses_by_every_strategy(way, runs_folder, tmp_path_factory, capsys):
    plan = WAYS[way]
    # with JAX below it, Keras draws other first weights than with TensorFlow
    strategy = "tpu" if way == "tpu" else "single"
    one = alone(plan["framework"], strategy, tmp_path_factory.getbasetemp() / "alone")
    run = anb.train(accelerator="cpu", **plan, **PLAN)
    assert run.status == "done"
    devices = plan.get("devices", 1)
    assert (devices == 1) or f"{devices} replicas (" in capsys.readouterr().out
    assert run.started["replicas"] == devices
    assert run.started["per_replica"] == -(-101 // devices)
    assert run.started["steps_per_epoch"] == one.started["steps_per_epoch"] == 15
    np.testing.assert_allclose(run.history.loss, one.history.loss, atol=2e-5)
    np.testing.assert_allclose(run.history.accuracy, one.history.accuracy, atol=1e-6)
    for name in ("val_loss", "val_accuracy", "loss", "accuracy"):
        mine, theirs = ([row[name] for row in which.history.epochs] for which in (run, one))
        np.testing.assert_allclose(mine, theirs, atol=2e-5)
    assert run.model() is not None
    if way == "tpu" and find_spec("jax"):
        assert "jax" in run.started["versions"]


TOGETHER = [way for way, plan in WAYS.items() if plan.get("devices") == 2]
ENDLESS = {"data": "digits", "model_args": {"layers": [16]}, "epochs": 100_000, "batch_size": 101}


@pytest.mark.parametrize("way", TOGETHER)
def test_several_devices_pause_take_a_rate_and_end_by_an_interrupt(way, runs_folder):
    run = anb.train(accelerator="cpu", wait=False, **WAYS[way], **ENDLESS)
    until(lambda: len(run.history) > 3 or run.ended, "steps")
    run.pause()
    until(lambda: run.status == "paused" or run.ended, "the pause")
    steps = len(run.history)
    time.sleep(1.5)  # many blocks of steps, if there were any
    assert (run.status, len(run.history)) == ("paused", steps)
    run.set_learning_rate(0.125).resume()
    until(lambda: run.history.learning_rate == 0.125 or run.ended, "steps with the new rate")
    assert len(run.history) > steps
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    run.wait(PATIENCE)
    assert run.status == "stopped"
    assert checkpoint_in(run.directory) is not None


def lives(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("way", TOGETHER)
def test_when_the_kernel_dies_several_devices_stop_and_leave_a_checkpoint(way, runs_folder):
    code = f"""
        import accel_nb as anb, time
        run = anb.train(accelerator="cpu", wait=False, **{WAYS[way]!r}, **{ENDLESS!r})
        while len(run.history) < 3:
            time.sleep(0.05)
        print("trains", flush=True)
        time.sleep(1000)
        """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    kernel = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert any(line.strip() == "trains" for line in kernel.stdout)
        [run] = anb.runs()
        family = psutil.Process(kernel.pid).children(recursive=True)
        assert len(family) >= (1 if WAYS[way]["strategy"] in ("mirrored", "tpu") else 3)
    finally:
        kernel.kill()
        kernel.wait()
        kernel.stdout.close()
    until(lambda: not any(map(lives, family)), "no process is left")
    until(lambda: run.ended, "the end")
    assert run.status == "stopped"
    assert whole(checkpoint_in(run.directory))


def test_a_worker_that_raises_ends_a_run_of_several_with_its_error(runs_folder):
    data = (np.full((64, 4), 1e30, np.float32), np.arange(64) % 2)
    plan = {
        "data": data,
        "model": "mlp",
        "epochs": 2,
        "learning_rate": 1e30,
        "accelerator": "cpu",
        "validation": 0,
    }
    run = anb.train(framework="tensorflow", strategy="multi_worker", devices=2, wait=False, **plan)
    with pytest.raises(anb.RunFailed, match=r"The loss is (nan|inf)"):
        run.wait(120)
    assert run.error["rank"] in (0, 1)
