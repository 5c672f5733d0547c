"""The torch_xla program on 1, 2 and 4 CPU devices against the plain PyTorch one. Its runs: xla_scenarios.py.

`make test-xla` runs these in an environment of their own.
"""

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

if find_spec("torch_xla") is None:
    pytest.skip("torch_xla is not installed: make test-xla", allow_module_level=True)

from xla_scenarios import ACCUMULATED, BASE, OPTIMIZERS, SAME, TRAIN, VAL, homes

from accel_nb.export import program_text

SCENARIOS = Path(__file__).parent / "xla_scenarios.py"
GROUPS = ("4", "2", "resnet50", "1", "pytorch")


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    """The results of all groups of runs, two processes at a time."""

    def results(name):
        folder = tmp_path_factory.mktemp(name)
        done = subprocess.run([sys.executable, str(SCENARIOS), name, str(folder)],
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
    np.testing.assert_allclose(column(run, "loss"), column(reference, "loss"), rtol=5e-6)
    epochs, references = kinds(run, "epoch"), kinds(reference, "epoch")
    for name in ("loss", "val_loss"):
        np.testing.assert_allclose([e[name] for e in epochs], [e[name] for e in references], rtol=5e-6)
    if "accuracy" in references[0]:
        # A count of hits over the number of samples, both whole: one hit more would be seen.
        np.testing.assert_allclose(column(run, "accuracy"), column(reference, "accuracy"), rtol=1e-6)
        for name in ("accuracy", "val_accuracy"):
            np.testing.assert_allclose([e[name] for e in epochs], [e[name] for e in references], rtol=1e-6)
    assert list(run["weights"]) == list(reference["weights"])  # no wrapper's prefix
    for weight, expected in zip(run["weights"].values(), reference["weights"].values(), strict=True):
        np.testing.assert_allclose(weight, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(("devices", "name"), [
    *(("4", name) for name in SAME | ACCUMULATED),
    *itertools.product("12", ("odd", "cnn")), ("1", "mlp"), ("1", "accumulated"),
])  # fmt: skip
def test_any_number_of_devices_trains_as_plain_pytorch_does(groups, devices, name):
    assert_same(groups[devices][name], groups["pytorch"][name])


def test_the_references_are_runs_worth_comparing_with(groups):
    """Full and uneven batches, batches that devices cannot share evenly, losses that go somewhere."""
    steps = {name: len(column(run, "loss")) for name, run in groups["pytorch"].items()}
    assert (steps["mlp"], steps["odd"], steps["cnn"]) == (10, 9, 8)
    for name, run in groups["pytorch"].items():
        assert np.ptp(column(run, "loss")) > (1e-3 if name == "regression" else 0.02), name
        assert kinds(run, "started")[0]["val_samples"] == VAL
    assert len({json.dumps(groups["pytorch"][name]["weights"]) for name in OPTIMIZERS}) == len(OPTIMIZERS)


@pytest.mark.parametrize("devices", ["1", "2", "4"])
def test_each_shape_is_compiled_once(groups, devices):
    """A graph of a step and one of a validation batch; on one device also a tiny one for the optimizer's zeros.

    With accumulation the first part, the later ones and the last one with the update are a graph each. Graphs that
    an earlier run of the process had made are not counted again.
    """
    first, *later = [run for run in groups[devices].values() if not run["error"]]
    tiny = 1 if devices == "1" else 0
    assert first["compiled"] == 2 + tiny
    for run in later:
        accumulates = any("accumulated" in name for name, one in groups[devices].items() if one is run)
        assert run["compiled"] <= (4 if accumulates else 2) + tiny
    assert groups["2"]["dropout_blocks_of_one"]["compiled"] == 0
    assert groups["2"]["dropout_long_blocks"]["compiled"] == 0
    assert groups["2"]["new_rate"]["compiled"] <= 2


def test_started_tells_devices_and_shares(groups):
    for devices, backend in (("1", None), ("2", "xla"), ("4", "xla")):
        started = kinds(groups[devices]["odd"], "started")[0]
        assert (started["device"], started["steps_per_epoch"], started["train_samples"]) == ("cpu", 9, TRAIN)
        assert set(started["versions"]) == {"torch", "torch_xla"}
        assert started["learning_rate"] == 0.001
        assert started.get("backend") == backend
        if backend:
            assert (started["replicas"], started["strategy"]) == (int(devices), "tpu")
            assert started["per_replica"] == {"2": 19, "4": 10}[devices]
    assert kinds(groups["1"]["accumulated"], "started")[0]["replicas"] == 1
    names = [event["event"] for event in groups["4"]["mlp"]["events"]]
    assert names[:4] == ["model", "started", "status", "batch"]
    assert kinds(groups["4"]["mlp"], "status")[0]["text"] == "compiling"


def test_dropout_does_not_depend_on_the_number_of_devices(groups):
    losses = [column(groups[devices]["dropout"], "loss") for devices in ("1", "2", "4")]
    np.testing.assert_allclose(losses[1], losses[0], rtol=5e-6)
    np.testing.assert_allclose(losses[2], losses[0], rtol=5e-6)
    assert abs(losses[0][0] - column(groups["1"]["mlp"], "loss")[0]) > 1e-3


@pytest.mark.parametrize("other", ["dropout_blocks_of_one", "dropout_long_blocks", "dropout_streamed"])
def test_same_seed_same_losses_whatever_the_blocks(groups, other):
    run, again = groups["2"]["dropout"], groups["2"][other]
    if other == "dropout_streamed":
        np.testing.assert_allclose(column(again, "loss"), column(run, "loss"), rtol=5e-6)
        return
    assert column(again, "loss") == column(run, "loss")
    assert again["weights"] == run["weights"]
    lengths = [len(event["loss"]) for event in kinds(again, "batch")]
    assert lengths == ([1] * 10 if other == "dropout_blocks_of_one" else [1, 4, 5])


def test_a_new_rate_holds_from_the_next_step_on_and_the_file_is_the_model(groups):
    run, plain = groups["2"]["new_rate"], groups["4"]["mlp"]
    assert [event["learning_rate"] for event in kinds(run, "batch")] == [0.001] * 3 + [0.1] * 7
    assert abs(column(run, "loss")[-1] - column(plain, "loss")[-1]) > 0.01
    last = kinds(run, "epoch")[-1]
    assert run["evaluate"] == pytest.approx([last["val_loss"], last["val_accuracy"]], rel=1e-5)
    assert run["files"] == ["checkpoint.pt", "model.pt"]


def test_stop_leaves_a_checkpoint_and_a_model_that_plain_pytorch_loads(groups):
    run = groups["2"]["stopped"]
    assert len(column(run, "loss")) == 7
    assert column(run, "loss") == column(groups["2"]["dropout"], "loss")[:7]
    assert run["state"] == {"step": 7, "epoch": 2, "position": 2, "learning_rate": 0.001}
    assert run["steps"] == [8.0] * 4
    assert run["files"] == ["checkpoint.pt", "model.pt"]
    assert run["events"][-1]["event"] == "checkpoint"


@pytest.mark.parametrize("name", ["resumed", "resumed_streamed"])
def test_a_stopped_run_goes_on_from_its_checkpoint(groups, name):
    """The same bits as in a run that was never stopped: dropout, the mean of the epoch, the weights."""
    run, whole = groups["2"][name], groups["2"]["dropout_streamed" if "streamed" in name else "dropout"]
    assert kinds(run, "batch")[0]["first"] == 8
    rest = column(whole, "loss")[7:]
    np.testing.assert_allclose(column(run, "loss"), rest, rtol=5e-6 if "streamed" in name else 0)
    last, expected = kinds(run, "epoch")[-1], kinds(whole, "epoch")[-1]
    for part in ("step", "loss", "accuracy", "val_loss", "val_accuracy"):
        assert last[part] == pytest.approx(expected[part], rel=5e-6 if "streamed" in name else 0)
    if name == "resumed":
        assert run["weights"] == whole["weights"]


def test_what_cannot_be_is_said(groups):
    two = groups["2"]
    assert "3 devices were asked for, and torch_xla works on all 2 or on one" in two["too_many"]["error"]
    assert "batch normalisation" in two["own_normal"]["error"]
    assert "divides 300" in two["own_normal"]["error"]
    assert two["explodes"]["error"].startswith("FloatingPointError: The loss is ")
    assert not kinds(two["explodes"], "epoch")


def test_without_a_chip_nothing_waits_for_one(tmp_path):
    """PJRT_DEVICE=TPU makes torch_xla's runtime ask the cloud for minutes; the program does not let it."""
    home = homes(tmp_path)["plain"]
    settings = BASE | {"ACCELERATOR": "tpu", "DEVICES": 1}
    (home / "program.py").write_text(program_text("torch_xla", settings, "A test."))
    done = subprocess.run([sys.executable, str(home / "program.py")], env=os.environ | {"PJRT_DEVICE": "TPU"},
                          text=True, capture_output=True, check=False, timeout=100)  # fmt: skip
    assert done.returncode == 1
    assert "RuntimeError: A TPU was asked for" in done.stderr


def test_the_program_runs_by_hand(tmp_path):
    home = homes(tmp_path)["plain"]
    (home / "program.py").write_text(program_text("torch_xla", BASE | {"DEVICES": 2}, "A test.", None))
    done = subprocess.run([sys.executable, str(home / "program.py"), str(home / "history.csv")],
                          text=True, capture_output=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("epoch 1  loss 2.")
    assert len((home / "history.csv").read_text().splitlines()) == 1 + 10


def test_bfloat16_is_near_and_not_the_same(groups):
    short, exact = groups["1"]["bf16"], groups["1"]["dropout"]
    difference = np.abs(np.subtract(column(short, "loss"), column(exact, "loss")))
    assert 1e-5 < difference.max() < 0.05
    fine = [w for w in short["weights"].values() if len(np.unique(np.float32(w).view(np.uint32) & 0xFFFF)) > 1]
    assert len(fine) == len(short["weights"])  # kept in float32


def test_resnet50_trains_a_step_on_two_devices(groups):
    run, reference = groups["resnet50"]["torch_xla"], groups["resnet50"]["pytorch"]
    np.testing.assert_allclose(column(run, "loss"), column(reference, "loss"), rtol=5e-3)
    assert run["compiled"] == 1
    assert "model.pt" in run["files"]


def test_the_package_runs_it_and_says_so(runs_folder):
    """From the call to the curve: resolved to this route, started in a worker of its own, the same losses."""
    import accel_nb as anb

    plan = {"framework": "pytorch", "accelerator": "cpu", "data": "digits", "model": "mlp", "epochs": 1}
    plan["model_args"] = {"layers": [16], "dropout": 0.0}
    run = anb.train(**plan, strategy="tpu", devices=2)
    assert run.status == "done"
    assert run.reasons["engine"] == "torch_xla 2.9.0, as on a TPU, with its runtime for CPUs."
    np.testing.assert_allclose(run.history.loss, anb.train(**plan).history.loss, rtol=1e-5)
