"""`python program.py` in a run's directory repeats the run's losses exactly on a CPU, without accel_nb."""

from __future__ import annotations

import csv
import os
import subprocess
import sys

import numpy as np
import pytest

import accel_nb as anb

SMALL = {"samples": 60, "shape": (32, 32, 3), "classes": 5}
PLANS = {
    "mlp": {"model_args": {"layers": [64, 32], "dropout": 0.3}, "epochs": 2},
    "cnn": {"model": "cnn", "epochs": 2, "schedule": "cosine", "warmup_steps": 3, "optimizer": "adamw"},
    "resnet50": {"model": "resnet50", "data": "random", "data_args": SMALL, "batch_size": 16, "epochs": 1},
    "own": {"epochs": 2, "optimizer": "sgd", "optimizer_args": {"momentum": 0.9, "nesterov": True}},
    "stored": {"epochs": 2, "optimizer": "rmsprop"},
}


def torch_net(outputs, width=24):
    from torch import nn

    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, outputs)
    )


def keras_net(input_shape, outputs, width=24):
    import keras

    layers = keras.layers
    hidden = [layers.Flatten(), layers.Dense(width, "tanh"), layers.Dropout(0.1)]
    return keras.Sequential([keras.Input(input_shape), *hidden, layers.Dense(outputs)])


NETS = {"pytorch": torch_net, "tensorflow": keras_net}


def repeat(run, tmp_path):
    """Run program.py as a person would, with accel_nb out of reach; the rows of the CSV file it writes."""
    hide = tmp_path / "hide" / "accel_nb"
    hide.mkdir(parents=True)
    (hide / "__init__.py").write_text("raise ImportError('accel_nb must not be needed')\n")
    target = tmp_path / "history.csv"
    env = {**os.environ, "PYTHONPATH": str(hide.parent)}
    check = subprocess.run(
        [sys.executable, "program.py", str(target)],
        cwd=run.directory,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert check.returncode == 0, check.stderr
    assert "epoch" in check.stdout
    with target.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("model", PLANS)
@pytest.mark.parametrize("framework", NETS)
def test_the_program_repeats_the_run(framework, model, runs_folder, tmp_path):
    plan = dict(PLANS[model])
    if model == "own":
        plan["model"] = NETS[framework]
    if model == "stored":
        # a closure has no source that stands alone, so it travels stored
        width = 20
        torch_made = lambda outputs: torch_net(outputs, width)  # noqa: E731
        keras_made = lambda input_shape, outputs: keras_net(input_shape, outputs, width)  # noqa: E731
        plan["model"] = torch_made if framework == "pytorch" else keras_made
    run = anb.train(framework=framework, accelerator="cpu", seed=5, **plan)
    assert (run.directory / "model.pkl").exists() == (model == "stored")
    rows = repeat(run, tmp_path)
    history = run.history
    assert len(rows) == len(history)
    for name in ("loss", "accuracy", "val_loss", "val_accuracy"):
        told = np.array([float(row[name]) if row[name] else np.nan for row in rows])
        ours = np.array([float(f"{value:.9g}") for value in getattr(history, name)])
        np.testing.assert_array_equal(told, ours, err_msg=name)
    assert list((run.directory / "repeat").glob("model.*"))
