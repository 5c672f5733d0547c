"""Kinds of plans through `train` itself, from the call to the history; and what the two frameworks agree on."""

from __future__ import annotations

import math

import numpy as np
import pytest

import accel_nb as anb
from accel_nb.limits import compile_refused

FRAMEWORKS = ["pytorch", "tensorflow"]
RANDOM = np.random.default_rng(0)
FEATURES = RANDOM.normal(size=(330, 6))
AMOUNTS = FEATURES @ RANDOM.normal(size=(6, 1)) + 0.1
SMALL = {"model_args": {"layers": [16]}, "batch_size": 64, "accelerator": "cpu"}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_float_targets_train_a_regression(framework, runs_folder):
    run = anb.train(framework=framework, data=(FEATURES, AMOUNTS), epochs=8, learning_rate=0.01, **SMALL)
    assert run.data["task"] == "regression"
    assert np.isnan(run.history.accuracy).all()
    checked = run.history.val_loss[~np.isnan(run.history.val_loss)]
    assert len(checked) == 8
    assert checked[-1] < 0.8 * checked[0]
    assert any("float32" in note for note in run.notes)
    assert len(run.plot().axes) == 1


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_without_validation_there_is_none(framework, runs_folder):
    run = anb.train(framework=framework, validation=0, epochs=1, **SMALL)
    assert len(run.history) == math.ceil(1797 / 64)
    assert np.isnan(run.history.val_loss).all()
    assert not (run.directory / "data" / "x_val.npy").exists()


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("fields", [{"precision": "bf16"}, {"compile": True}, {"deterministic": True}], ids=str)
def test_each_switch_that_a_cpu_has_trains(framework, fields, runs_folder):
    if fields.get("compile") and compile_refused(framework, "cpu"):
        pytest.skip(compile_refused(framework, "cpu"))
    run = anb.train(framework=framework, epochs=2, **SMALL, **fields)
    assert run.status == "done"
    assert run.history.last["val_accuracy"] > 0.3


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_own_arrays_with_their_own_validation_part(framework, runs_folder):
    images = RANDOM.integers(0, 256, (101, 3, 12, 12), dtype=np.uint8)  # channels first
    labels = np.eye(4)[RANDOM.integers(0, 4, 101)]  # one-hot
    data = (images[:65], labels[:65], images[65:], labels[65:])
    run = anb.train(framework=framework, data=data, model="cnn", batch_size=32, epochs=2, accelerator="cpu")
    assert run.data["input_shape"] == [12, 12, 3]
    assert (run.data["train_samples"], run.data["val_samples"], run.data["outputs"]) == (65, 36, 4)
    # 65 = 2 x 32 + 1: batch norm cannot use the one that is left
    assert len(run.history) == 4
    assert any("one sample" in note for note in run.notes)


def test_the_two_frameworks_agree_in_kind(runs_folder):
    plan = {"epochs": 3, "schedule": "cosine", "warmup_steps": 5, "batch_size": 100, "accelerator": "cpu"}
    torch_run, keras_run = (anb.train(framework=framework, **plan) for framework in FRAMEWORKS)
    assert torch_run.parameters == keras_run.parameters
    np.testing.assert_array_equal(torch_run.history.step, keras_run.history.step)
    np.testing.assert_array_equal(torch_run.history.epoch, keras_run.history.epoch)
    for name in ("val_loss", "val_accuracy"):
        one, other = getattr(torch_run.history, name), getattr(keras_run.history, name)
        np.testing.assert_array_equal(np.isnan(one), np.isnan(other))
    assert torch_run.started["learning_rate"] == pytest.approx(keras_run.started["learning_rate"])
    # each sample counts once: a share of 360
    for run in (torch_run, keras_run):
        hits = run.history.last["val_accuracy"] * 360
        assert hits == pytest.approx(round(hits), abs=1e-3)
        # a batch's own accuracy, too: a share of 100, or of the 37 in the last one
        own = run.history.accuracy
        sizes = np.where(run.history.step % 15 == 0, 37, 100)
        np.testing.assert_allclose(own * sizes, np.rint(own * sizes), atol=1e-3)
