"""The Keras program: its losses against other loops, its files, its refusals. Its runs: keras_scenarios.py."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from keras_scenarios import BASE, OPTIMIZERS, TRAIN, VAL, digits, store

from accel_nb.joining import joined

pytestmark = pytest.mark.skipif(find_spec("tensorflow") is None, reason="TensorFlow is not installed")
SCENARIOS = Path(__file__).parent / "keras_scenarios.py"
# TensorFlow 2.21 and Keras 3.15 under NumPy 2 when a variable is saved; nothing of ours can change it.
QUIET = ["-W", "error", "-W", "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"]

# makes TensorFlow log each XLA compilation
LOGS = {"xla": {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "device_compilation_profiler=1"}}


def run_python(*args, cwd=None, **environment):
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"} | environment
    done = subprocess.run([sys.executable, *QUIET, *map(str, args)], cwd=cwd, env=environment, text=True,
                          capture_output=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """The results of a group of runs, each group run once."""
    known = {}

    def results(name):
        if name not in known:
            folder = tmp_path_factory.mktemp(name)
            done = run_python(SCENARIOS, name, folder, **LOGS.get(name, {}))
            known[name] = json.loads((folder / f"{name}.json").read_text()) | {"log": done.stderr}
        return known[name]

    return results


@pytest.fixture(scope="module")
def runs(group):
    return group("runs")


@pytest.fixture(scope="module")
def files(group):
    return group("files")


def column(run, name):
    return [value for event in run["events"] if event["event"] == "batch" for value in event[name]]


def kinds(run, kind):
    return [event for event in run["events"] if event["event"] == kind]


def test_losses_are_those_of_a_plain_eager_loop(runs):
    base, plain = runs["base"], runs["eager"]
    assert len(plain["loss"]) == 10
    np.testing.assert_allclose(column(base, "loss"), plain["loss"], rtol=1e-5)
    np.testing.assert_allclose(column(base, "accuracy"), plain["accuracy"], rtol=1e-6)


def test_events_tell_the_run(runs):
    base = runs["base"]
    assert base["error"] is None
    assert [event["event"] for event in base["events"][:4]] == ["model", "started", "status", "batch"]
    model, started = kinds(base, "model")[0], kinds(base, "started")[0]
    assert model["parameters"] == 64 * 16 + 16 + 16 * 10 + 10
    assert [row[1:] for row in model["layers"]] == [
        ["Flatten", [64], 0], ["Dense", [16], 1040], ["Activation", [16], 0], ["Dense", [10], 170],
    ]  # fmt: skip
    told = {name: started[name] for name in ("device", "steps_per_epoch", "train_samples", "val_samples")}
    assert told == {"device": "cpu", "steps_per_epoch": 5, "train_samples": TRAIN, "val_samples": VAL}
    assert started["learning_rate"] == float(np.float32(0.001))
    assert set(started["versions"]) == {"tensorflow", "keras"}
    batches = kinds(base, "batch")
    assert len(batches[0]["loss"]) == 1
    firsts = np.cumsum([1, *(len(event["loss"]) for event in batches)])
    assert [event["first"] for event in batches] == firsts[:-1].tolist()
    assert [event["step"] for event in kinds(base, "epoch")] == [5, 10]
    assert base["files"] == ["checkpoint.npz", "model.keras"]


def test_epoch_loss_weighs_the_smaller_last_batch_by_its_samples(runs):
    losses, accuracies = column(runs["base"], "loss"), column(runs["base"], "accuracy")
    sizes = [64, 64, 64, 64, 44]
    for epoch, first in zip(kinds(runs["base"], "epoch"), (0, 5), strict=True):
        assert epoch["loss"] == pytest.approx(np.average(losses[first : first + 5], weights=sizes), rel=1e-9)
        mean = np.average(accuracies[first : first + 5], weights=sizes)
        assert epoch["accuracy"] == pytest.approx(mean, rel=1e-9)


@pytest.mark.parametrize("other", ["again", "blocks_of_one", "long_blocks", "streamed"])
def test_same_seed_same_bits(runs, other):
    assert runs[other]["error"] is None
    for name in ("loss", "accuracy"):
        assert column(runs[other], name) == column(runs["first"], name)
    for a, b in zip(kinds(runs[other], "epoch"), kinds(runs["first"], "epoch"), strict=True):
        assert a["val_loss"] == b["val_loss"]


def test_block_lengths_differed_in_that_comparison(runs):
    lengths = {name: [len(event["loss"]) for event in kinds(runs[name], "batch")] for name in
               ("blocks_of_one", "long_blocks")}  # fmt: skip
    assert lengths == {"blocks_of_one": [1] * 10, "long_blocks": [1, 4, 5]}


def test_convolutions_with_dropout_and_batch_norm_repeat_too(runs):
    assert column(runs["cnn"], "loss") == column(runs["cnn_again"], "loss")
    assert column(runs["cnn"], "loss")[-1] < column(runs["cnn"], "loss")[0]


def test_another_seed_gives_another_curve(runs):
    assert column(runs["other_seed"], "loss") != column(runs["base"], "loss")


@pytest.mark.parametrize("name", ["base", "streamed", "long_blocks", "drop_last"])
def test_one_graph_for_every_block(runs, name):
    traces = runs[name]["traces"]
    assert traces["train_block"] == traces["train_step"] == 1
    assert set(traces.values()) == {1}


def test_drop_last_and_no_validation(runs):
    run = runs["drop_last"]
    assert len(column(run, "loss")) == 8
    assert column(run, "loss")[:4] == column(runs["base"], "loss")[:4]
    assert kinds(run, "started")[0]["val_samples"] == 0
    assert not any("val_loss" in event or "val_accuracy" in event for event in kinds(run, "epoch"))


def test_cosine_with_warm_up(runs):
    rates = [event["learning_rate"] for event in kinds(runs["cosine"], "batch")]
    expected = [0.01 * (s + 1) / 3 if s < 3 else 0.005 * (1 + math.cos(math.pi * (s - 3) / 7)) for s in range(10)]
    np.testing.assert_allclose(rates, expected, rtol=1e-6)
    assert kinds(runs["cosine"], "started")[0]["learning_rate"] == rates[0]


def test_warm_up_then_constant(runs):
    rates = [event["learning_rate"] for event in kinds(runs["warm_constant"], "batch")]
    np.testing.assert_allclose(rates, [0.00025, 0.0005, 0.00075, *[0.001] * 7], rtol=1e-6)


def test_a_new_learning_rate_holds_from_the_next_step(runs):
    rates = [event["learning_rate"] for event in kinds(runs["new_rate"], "batch")]
    np.testing.assert_allclose(rates, [0.001] * 3 + [0.1] * 7, rtol=1e-6)
    losses, before = column(runs["new_rate"], "loss"), column(runs["base"], "loss")
    assert losses[:4] == before[:4]  # the fourth loss is measured before the first large update
    assert losses[4] != before[4]
    assert runs["new_rate"]["traces"]["train_block"] == 1


def test_a_loss_that_is_not_finite_ends_the_run_and_names_the_step(runs):
    run = runs["explodes"]
    losses = column(run, "loss")
    bad = next(i for i, loss in enumerate(losses) if not math.isfinite(loss))
    assert run["error"].startswith(f"FloatingPointError: The loss is {losses[bad]} at step {bad + 1} (epoch 1).")
    assert not kinds(run, "epoch")


def test_a_gpu_that_is_not_there_is_an_error(runs):
    assert runs["no_gpu"]["error"].startswith("RuntimeError: GPU 99 was asked for, and TensorFlow ")
    assert not runs["no_gpu"]["events"]


def reference(name, args, start, rate, epochs):
    """Softmax regression in NumPy, float64, with the updates as PyTorch's documentation writes them."""
    x, y = digits()
    x, y = x[:TRAIN].reshape(TRAIN, 64) / 16, y[:TRAIN]
    weights = [np.array(part, "float64") for part in start]
    memory = [{} for _ in weights]
    losses, t = [], 0
    decay = args["weight_decay"]
    for epoch in range(epochs):
        order = np.random.default_rng([0, epoch]).permutation(TRAIN)
        for rows in np.split(order, range(64, TRAIN, 64)):
            t += 1
            logits = x[rows] @ weights[0] + weights[1]
            chances = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
            losses.append(-np.log(chances[np.arange(len(rows)), y[rows]]).mean())
            wrong = (chances - np.eye(10)[y[rows]]) / len(rows)
            for w, slope, m in zip(weights, (x[rows].T @ wrong, wrong.sum(0)), memory, strict=True):
                g = slope if name == "adamw" else slope + decay * w
                first, second = args.get("betas", (0, 0))
                if name == "sgd":
                    m["b"] = args["momentum"] * m.get("b", 0) + g
                    change = g + args["momentum"] * m["b"] if args["nesterov"] else m["b"]
                elif name == "rmsprop":
                    m["v"] = args["alpha"] * m.get("v", 0) + (1 - args["alpha"]) * g**2
                    m["b"] = args["momentum"] * m.get("b", 0) + g / (np.sqrt(m["v"]) + args["eps"])
                    change = m["b"]
                else:
                    m["m"] = first * m.get("m", 0) + (1 - first) * g
                    m["v"] = second * m.get("v", 0) + (1 - second) * g**2
                    change = m["m"] / (1 - first**t) / (np.sqrt(m["v"] / (1 - second**t)) + args["eps"])
                if name == "adamw":
                    change = change + decay * w
                w -= rate * change  # noqa: PLW2901 - in place, so that the next step sees it
    return losses


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_follow_the_formulas_of_pytorch(runs, name):
    run = runs[name]
    expected = reference(name.split("_")[0], OPTIMIZERS[name], run["start"], 0.01, 4)
    np.testing.assert_allclose(column(run, "loss"), expected, rtol=2e-4)


def test_stop_writes_a_checkpoint_and_the_model(files):
    run = files["stopped"]
    assert run["error"] is None
    assert len(column(run, "loss")) == 7
    assert run["draws"] == [7]  # dropout's random numbers can go on where they stopped
    assert run["state"] == {"step": 7, "epoch": 1, "position": 2, "learning_rate": 0.001}  # epochs count from 0
    assert [row[0] for row in run["measured"]] == column(run, "loss")[5:]
    assert run["files"] == ["checkpoint.npz", "model.keras"]
    assert run["iterations"] == 7
    assert run["moments"] > 0
    assert run["same_weights"]
    assert kinds(run, "checkpoint")[0]["step"] == 7
    assert len(kinds(run, "epoch")) == 1


def test_validation_covers_every_sample_once(files):
    run = files["finished"]
    last = kinds(run, "epoch")[-1]
    assert last["val_loss"] == pytest.approx(run["val_loss"], rel=1e-5)
    assert last["val_accuracy"] == pytest.approx(run["val_accuracy"], rel=1e-6)
    np.testing.assert_allclose(run["evaluate"], [run["val_loss"], run["val_accuracy"]], rtol=1e-5)


@pytest.mark.parametrize("name", ["bytes", "bytes_streamed"])
def test_bytes_are_scaled_in_the_graph(files, name):
    assert column(files[name], "loss") == column(files["floats"], "loss")


def test_every_operation_of_the_graphs_exists_on_a_gpu(files):
    found = files["gpu_gaps"]
    if not found["cuda"]:
        pytest.skip("this TensorFlow is built without CUDA and knows no GPU kernels")
    assert not found["known_gap_has_kernel"]  # gathering bytes from a constant: what the variables are there for
    assert found["gaps"] == []


def test_regression(files):
    run = files["regression"]
    assert run["error"] is None
    assert all("accuracy" not in event for event in kinds(run, "batch") + kinds(run, "epoch"))
    assert kinds(run, "epoch")[-1]["val_loss"] == pytest.approx(run["val_loss"], rel=1e-5)
    assert kinds(run, "epoch")[-1]["loss"] < kinds(run, "epoch")[0]["loss"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("own_shape", "ValueError: The model answers a batch of 2 with shape (2, 7); it must be (2, 10)."),
        ("own_unflat", "ValueError: The model answers a batch of 2 with shape (2, 8, 8, 10); it must be (2, 10)."),
        ("own_input", "ValueError: The model cannot take a batch of shape (2, 8, 8, 1): it is made for (None,"),
        ("own_softmax", "ValueError: The model ends in softmax, but the loss takes logits: "),
        ("own_no_model", "TypeError: own_model() must return a keras.Model. Got int."),
    ],
)
def test_own_models_that_cannot_train_are_refused_before_the_first_step(files, name, words):
    assert files[name]["error"].startswith(words)
    assert not kinds(files[name], "batch")
    assert "model.keras" not in files[name]["files"]


@pytest.mark.parametrize("name", ["own", "own_without_config"])
def test_own_models_train_and_load(files, name):
    run = files[name]
    assert run["error"] is None
    assert run["evaluated"] == pytest.approx(kinds(run, "epoch")[-1]["val_accuracy"], rel=1e-6)


def test_the_regularisation_that_layers_ask_for_is_part_of_the_loss(files):
    run = files["own"]
    assert run["penalty"] > 0.01
    assert kinds(run, "epoch")[-1]["val_loss"] == pytest.approx(run["entropy"] + run["penalty"], rel=1e-5)


def test_parameter_counts(group):
    counts = group("models")
    assert counts["mlp_512"] == [407_050, 407_050]
    assert counts["mlp_128"] == [101_770, 101_770]
    assert counts["cnn"] == [50_474, 50_282]  # the difference: two running statistics for each filter
    assert counts["resnet50"][0] == 25_636_712


def test_small_images_are_padded_for_resnet50(group):
    assert group("models")["resnet50_small"] == [[2, 7], [None, 32, 32, 1]]


def test_layers(group):
    found = group("models")
    assert found["no_dropout"] == ["InputLayer", "Flatten", "Dense", "Activation", "Dense"]
    assert found["cnn_layers"] == [
        "InputLayer", "Conv2D", "BatchNormalization", "Activation", "MaxPooling2D", "Flatten", "Dropout", "Dense",
    ]  # fmt: skip
    assert found["norm"] == [0.9, 1e-5]


def test_activations(group):
    x = np.array([-2.0, -0.5, 0.0, 1.5])
    sigmoid = 1 / (1 + np.exp(-x))
    expected = {
        "relu": np.maximum(x, 0),
        "gelu": [v * (1 + math.erf(v / math.sqrt(2))) / 2 for v in x],
        "tanh": np.tanh(x),
        "sigmoid": sigmoid,
        "silu": x * sigmoid,
        "leaky_relu": np.where(x > 0, x, 0.01 * x),
        "elu": np.where(x > 0, x, np.exp(x) - 1),
    }
    found = group("models")["activations"]
    assert set(found) == set(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5, atol=1e-6, err_msg=name)


def test_xla_gives_the_same_losses_from_two_compilations(group):
    found = group("xla")
    assert found["compiled"]["error"] is None
    np.testing.assert_allclose(column(found["compiled"], "loss"), column(found["plain"], "loss"), rtol=1e-4)
    assert found["compiled"]["traces"]["train_step"] == 1
    import tensorflow as tf

    if tuple(map(int, tf.__version__.split(".")[:2])) >= (2, 21):  # earlier ones do not count in their log
        # the last batch is smaller
        assert len(re.findall(r"Compiled \S*train_step\S* \d+ times", found["log"])) == 2


@pytest.mark.parametrize(("name", "kind"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_half_precision_keeps_weights_logits_and_loss_in_float32(group, name, kind):
    run = group("half")[name]
    assert run["error"] is None
    assert (run["logits"], run["hidden"], run["weights"]) == ("float32", kind, "float32")
    assert run["optimizer"] == ("LossScaleOptimizer" if name == "fp16" else "Adam")
    losses = column(run, "loss")
    assert losses[-1] < losses[0]


def test_ten_overflowing_steps_in_a_row_end_an_fp16_run(group):
    run = group("half")["overflow"]
    assert run["error"].startswith("FloatingPointError: The loss is nan at step 10 (epoch 2).")


def test_python_train_py_writes_the_same_numbers(runs, tmp_path):
    x, y = digits()
    store(tmp_path, x / 16, y)
    lines = joined("tensorflow").splitlines()
    settled = [f"{name} = {BASE[name]!r}" if (name := line.split(" = ")[0]) in BASE else line for line in lines]
    (tmp_path / "train.py").write_text("\n".join(settled))
    done = run_python("train.py", "history.csv", cwd=tmp_path)
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [["epoch", "1"], ["epoch", "2"]]
    assert (tmp_path / "repeat" / "model.keras").exists()
    with open(tmp_path / "history.csv") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["step", "epoch", "loss", "accuracy", "val_loss", "val_accuracy"]
    assert [int(row["step"]) for row in rows] == list(range(1, 11))
    assert [int(row["epoch"]) for row in rows] == [1] * 5 + [2] * 5
    assert [row["loss"] for row in rows] == [f"{loss:.9g}" for loss in column(runs["base"], "loss")]
    told = [f"{event['val_loss']:.9g}" for event in kinds(runs["base"], "epoch")]
    assert [row["val_loss"] for row in rows] == [*[""] * 4, told[0], *[""] * 4, told[1]]


@pytest.mark.hardware
def test_a_gpu_really_trains(group):
    asked = "import tensorflow as tf; print(len(tf.config.list_physical_devices('GPU')))"
    if run_python("-c", asked).stdout.strip() == "0":
        pytest.skip("TensorFlow sees no GPU here")
    for run in group("gpu").values():
        assert run["error"] is None
        assert kinds(run, "started")[0]["device"] == "/GPU:0"
        assert column(run, "loss")[-1] < column(run, "loss")[0]
