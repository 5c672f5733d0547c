"""The classic: 784-512-dropout-10 on real handwritten digits, as every tutorial has it, through `anb.train`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import accel_nb as anb

BESIDE = Path(__file__).parents[2] / "shared" / "data" / "mnist10k.npz"  # 10,000 digits, not part of the project
MNIST = Path(os.environ.get("ACCEL_NB_MNIST", BESIDE))


@pytest.mark.skipif(not MNIST.is_file(), reason="needs 10,000 MNIST digits as .npz (x, y): ACCEL_NB_MNIST=path")
@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_the_classic_mlp_learns_the_real_digits(framework, runs_folder):
    run = anb.train(
        framework=framework,
        data=str(MNIST),
        model="mlp",
        model_args={"layers": [512], "dropout": 0.2},
        optimizer="adam",
        batch_size=128,
        epochs=10,
    )
    assert (run.data["train_samples"], run.data["val_samples"]) == (8_000, 2_000)
    assert run.history.last["val_accuracy"] >= 0.93
