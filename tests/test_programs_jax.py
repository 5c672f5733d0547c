"""The Keras-on-JAX program on 1, 2 and 8 host devices against TensorFlow's. Its runs: jax_scenarios.py."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from jax_scenarios import ACCUMULATED, OWN, SAME
from keras_scenarios import OPTIMIZERS, TRAIN, VAL
from test_export import settings_for

from accel_nb.export import program_text

SCENARIOS = Path(__file__).parent / "jax_scenarios.py"
MISSING = [name for name in ("jax", "keras", "tensorflow") if find_spec(name) is None]
needs_jax = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
# TensorFlow 2.21 and Keras 3.15 under NumPy 2 when a variable is saved; nothing of ours can change it.
QUIET = ["-W", "error", "-W", "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"]
# Tiny models: making fast code for them takes much longer than running slow code. The program keeps such flags.
FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
GROUPS = ("resnet50", "8", "2", "1", "tensorflow")


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    """The results of all groups of runs, two processes at a time."""

    def results(name):
        folder = tmp_path_factory.mktemp(name)
        environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "XLA_FLAGS": FLAGS}
        done = subprocess.run([sys.executable, *QUIET, str(SCENARIOS), name, str(folder)], env=environment,
                              text=True, capture_output=True, check=False)  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads((folder / f"{name}.json").read_text())

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(GROUPS, pool.map(results, GROUPS), strict=True))


def column(run, name):
    assert run["error"] is None, run["traceback"]
    return [value for event in run["events"] if event["event"] == "batch" for value in event[name]]


def kinds(run, kind):
    return [event for event in run["events"] if event["event"] == kind]


def assert_same(run, reference):
    """The same losses, accuracies, validation and weights, to what float32 leaves of differently ordered sums."""
    np.testing.assert_allclose(column(run, "loss"), column(reference, "loss"), rtol=2e-6)
    epochs, references = kinds(run, "epoch"), kinds(reference, "epoch")
    for name in ("loss", "val_loss"):
        np.testing.assert_allclose([e[name] for e in epochs], [e[name] for e in references], rtol=2e-6)
    if "accuracy" in references[0]:
        # A count of hits over the number of samples, both whole: one hit more would be seen.
        np.testing.assert_allclose(column(run, "accuracy"), column(reference, "accuracy"), rtol=1e-6)
        for name in ("accuracy", "val_accuracy"):
            np.testing.assert_allclose([e[name] for e in epochs], [e[name] for e in references], rtol=1e-6)
    for weight, expected in zip(run["weights"], reference["weights"], strict=True):
        np.testing.assert_allclose(weight, expected, rtol=1e-5, atol=2e-6)


@needs_jax
@pytest.mark.parametrize(("devices", "name"), [
    *(("8", name) for name in SAME | ACCUMULATED),
    *itertools.product("12", ("odd", "cnn")), ("1", "mlp"), ("1", "accumulated"),
])  # fmt: skip
def test_any_number_of_devices_trains_as_tensorflow_does(groups, devices, name):
    assert_same(groups[devices][name], groups["tensorflow"][name])


@needs_jax
def test_the_references_are_runs_worth_comparing_with(groups):
    """Full and uneven batches, batches that devices cannot share evenly, losses that go somewhere."""
    steps = {name: len(column(run, "loss")) for name, run in groups["tensorflow"].items()}
    assert (steps["mlp"], steps["odd"], steps["cnn"]) == (10, 9, 8)
    for name, run in groups["tensorflow"].items():
        losses = column(run, "loss")
        assert np.ptp(losses) > (1e-3 if name == "regression" else 0.02), name
        assert kinds(run, "started")[0]["val_samples"] == VAL
    assert len({json.dumps(groups["tensorflow"][name]["weights"]) for name in OPTIMIZERS}) == len(OPTIMIZERS)


@needs_jax
@pytest.mark.parametrize("devices", ["1", "2", "8"])
def test_each_function_is_compiled_once(groups, devices):
    for name, run in groups[devices].items():
        if run["error"]:
            continue
        loops = {"train_block": 1} if "take" in run["compiled"] and name != "cnn" and "own" not in name else {}
        steps = {} if loops else {"update": 1}
        assert {**loops, **steps, "val_step": 1}.items() <= run["compiled"].items(), name
        # The gather is compiled for the training set and for the validation set, of which the loop holds one.
        assert run["compiled"].get("take", 0) == (0 if "streamed" in name else 1 if loops else 2), name
        assert not {"train_block", "update"} <= set(run["compiled"])


@needs_jax
def test_started_tells_devices_and_shares(groups):
    for devices, backend in (("1", None), ("2", "xla"), ("8", "xla")):
        started = kinds(groups[devices]["odd"], "started")[0]
        assert (started["device"], started["steps_per_epoch"], started["train_samples"]) == ("cpu", 9, TRAIN)
        assert set(started["versions"]) == {"jax", "jaxlib", "keras"}
        assert started["learning_rate"] == float(np.float32(0.001))
        assert started.get("backend") == backend
        if backend:
            assert (started["replicas"], started["strategy"]) == (int(devices), "tpu")
            assert started["per_replica"] == {"2": 19, "8": 5}[devices]
    assert kinds(groups["1"]["accumulated"], "started")[0]["replicas"] == 1
    names = [event["event"] for event in groups["8"]["mlp"]["events"]]
    assert names[:4] == ["model", "started", "status", "batch"]
    assert kinds(groups["8"]["mlp"], "status")[0]["text"] == "compiling"


@needs_jax
def test_the_lines_for_a_tpu_train_alike(groups):
    """Run on host devices that pass for chips; what a real TPU does to the numbers is not seen here."""
    run = groups["2"]["as_on_tpu"]
    assert_same(run, groups["tensorflow"]["mlp"])
    started = kinds(run, "started")[0]
    assert (started["device"], started["device_name"]) == ("tpu:0", "cpu")


@needs_jax
def test_dropout_does_not_depend_on_the_number_of_devices(groups):
    losses = [column(groups[devices]["dropout"], "loss") for devices in ("1", "2", "8")]
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-6)
    np.testing.assert_allclose(losses[2], losses[0], rtol=2e-6)
    assert abs(losses[0][0] - column(groups["1"]["mlp"], "loss")[0]) > 1e-3


@needs_jax
@pytest.mark.parametrize("other", ["dropout_blocks_of_one", "dropout_long_blocks", "dropout_streamed"])
def test_same_seed_same_losses_whatever_the_blocks(groups, other):
    run, again = groups["2"]["dropout"], groups["2"][other]
    if other == "dropout_streamed":
        np.testing.assert_allclose(column(again, "loss"), column(run, "loss"), rtol=2e-6)
        return
    assert column(again, "loss") == column(run, "loss")
    assert again["weights"] == run["weights"]
    lengths = [len(event["loss"]) for event in kinds(again, "batch")]
    assert lengths == ([1] * 10 if other == "dropout_blocks_of_one" else [1, 4, 5])


@needs_jax
def test_a_new_rate_holds_from_the_next_step_on_and_the_file_is_the_model(groups):
    run, plain = groups["2"]["new_rate"], groups["8"]["mlp"]
    rates = [event["learning_rate"] for event in kinds(run, "batch")]
    assert rates == [float(np.float32(0.001))] * 3 + [float(np.float32(0.1))] * 7
    assert abs(column(run, "loss")[-1] - column(plain, "loss")[-1]) > 0.01
    last = kinds(run, "epoch")[-1]
    assert run["evaluate"] == pytest.approx([last["val_loss"], last["val_accuracy"]], rel=1e-5)
    assert run["files"] == ["checkpoint.npz", "model.keras"]


@needs_jax
def test_stop_leaves_checkpoint_and_model(groups):
    run = groups["2"]["stopped"]
    assert len(column(run, "loss")) == 7
    assert column(run, "loss") == column(groups["2"]["dropout"], "loss")[:7]
    assert run["state"] == {"step": 7, "epoch": 1, "position": 2, "learning_rate": 0.001}  # epochs count from 0
    assert run["draws"] == [7]  # dropout has drawn once a step
    assert run["resumed"] == column(groups["2"]["dropout"], "loss")[7:]  # taken up, it goes on as if never stopped
    assert run["iterations"] == 7
    assert run["moments"] > 0
    assert run["files"] == ["checkpoint.npz", "model.keras"]
    assert run["events"][-1]["event"] == "checkpoint"


@needs_jax
def test_what_cannot_be_is_said(groups):
    two = groups["2"]
    assert two["no_tpu"]["error"].startswith("RuntimeError: A TPU was asked for; JAX ")
    assert "3 devices (CPU) were asked for" in two["too_many"]["error"]
    assert "sees 2 here" in two["too_many"]["error"]
    assert "batch normalisation" in two["own_normal"]["error"]
    assert "divides 300" in two["own_normal"]["error"]
    assert two["explodes"]["error"].startswith("FloatingPointError: The loss is ")
    assert not kinds(two["explodes"], "epoch")


@needs_jax
def test_bfloat16_is_near_and_not_the_same(groups):
    short, exact = groups["2"]["bf16"], groups["2"]["dropout"]
    assert np.isfinite(column(short, "loss")).all()
    assert abs(column(short, "loss")[-1] - column(exact, "loss")[-1]) < 0.3
    assert (
        max(len(np.unique(np.float32(w).view(np.uint32) & 0xFFFF)) for w in short["weights"]) > 1
    )  # kept in float32


@needs_jax
def test_resnet50_trains_a_step_on_two_devices(groups):
    run = groups["resnet50"]["resnet50"]
    assert np.isfinite(column(run, "loss")).all()
    assert len(column(run, "loss")) == 1
    assert run["compiled"] == {"take": 1, "update": 1}
    assert run["files"] == ["checkpoint.npz", "model.keras"]
    assert kinds(run, "model")[0]["parameters"] == 25_583_592 - 990 * 2049 - 2 * 49 * 64


def test_every_combination_gives_a_program_without_loose_ends(tmp_path):
    """As in test_export.py: ruff's view of programs for every choice that matters here."""
    choices = itertools.product(
        ("keras_jax",), ("mlp", "cnn", "resnet50", "own"), ("cpu", "tpu"), ("fp32", "bf16"),
        ("adam", "adamw", "sgd", "rmsprop"), ("classification", "regression"),
    )  # fmt: skip
    for i, combination in enumerate(itertools.islice(choices, 0, None, 5)):
        more = {"DEVICES": (1, 8)[i % 2], "ACCUMULATE": (1, 2)[i // 2 % 2], "STRATEGY": "tpu"}
        settings = settings_for(combination, i) | more
        text = program_text("keras_jax", settings, "Title.", OWN if settings["MODEL"] == "own" else None)
        (tmp_path / f"program_{i}.py").write_text(text, encoding="utf-8")
        assert "accel_nb" not in text
        assert "tensorflow as tf" not in text
        assert ("train_block" in text) == (settings["MODEL"] == "mlp" and settings["DATA_ON_DEVICE"])
    rules = "F,E9,B006,PLE"
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", rules, "--no-cache", str(tmp_path)]
    check = subprocess.run(command, capture_output=True, text=True, check=False)
    assert check.returncode == 0, check.stdout[-3000:]
