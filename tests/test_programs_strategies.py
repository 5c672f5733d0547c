"""The Keras program on several devices: the run of one device, whatever it is spread over; how it ends.

Its runs: strategy_scenarios.py. Two processors that one plays stand in for GPUs and for TPU chips.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import socket
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from strategy_scenarios import CASES, FOUR, MIRRORED, TPU, WORKERS, XLA, data

from accel_nb.export import program_text
from accel_nb.machine import machine

pytestmark = pytest.mark.skipif(find_spec("tensorflow") is None, reason="TensorFlow is not installed")
TESTS = Path(__file__).parent
SCENARIOS = TESTS / "strategy_scenarios.py"
# TensorFlow 2.21 and Keras 3.15 under NumPy 2 when a variable is saved; nothing of ours can change it.
QUIET = ["-W", "error", "-W", "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"]
OTHER_TENSORFLOW = os.environ.get("ACCEL_NB_TENSORFLOW_TPU")  # a Python that has tensorflow-tpu

EXACT = {"rtol": 2e-6, "atol": 1e-6}  # float32, added up in another order
# Batch normalisation over replicas takes the variance from sums of squares; half precision rounds each part.
SQUARES = {"rtol": 2e-5, "atol": 1e-5}
HALF = {"rtol": 2e-3, "atol": 2e-3}
TOLERANCE = {"cnn": SQUARES, "own": SQUARES, "fp16": HALF, "bf16": HALF}


def python(*args, cwd=None, interpreter=sys.executable, **environment):
    """A started Python of one thread."""
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"} | environment
    return subprocess.Popen([interpreter, *QUIET, *map(str, args)], cwd=cwd, env=environment, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip


def clusters(count, more=0):
    """TF_CONFIG for each of `count` workers on free ports of this machine; `more` workers are only named."""
    with contextlib.ExitStack() as stack:
        doors = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count + more)]
        addresses = [f"127.0.0.1:{door.getsockname()[1]}" for door in doors]
    task = [{"type": "worker", "index": i} for i in range(count)]
    return [json.dumps({"cluster": {"worker": addresses}, "task": task[i]}) for i in range(count)]


def ended(*processes):
    """The exit codes, outputs and logs of processes, once all have ended."""
    try:
        texts = [process.communicate(timeout=900) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *text) for process, text in zip(processes, texts, strict=True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One for all processes that share out the tests: what one of them has run, the others read."""
    base = tmp_path_factory.getbasetemp()
    place = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "strategies"
    place.mkdir(exist_ok=True)
    return place


CLUSTERS = {"workers": (2, 0), "alone": (1, 2)}  # workers that are started, and others that are only named
AT_ONCE = ("two", "four", "workers")
ENDS = {"workers": [0, -9]}  # the second one is killed in the end


@pytest.fixture(scope="module")
def group(folder):
    """The results of a group of runs, each group run once; of the two workers, a list."""
    known = {}

    def run(name):
        configs = clusters(*CLUSTERS[name]) if name in CLUSTERS else []
        started = [python(SCENARIOS, name, folder, TF_CONFIG=config) for config in configs]
        results = ended(*(started or [python(SCENARIOS, name, folder)]))
        codes = [code for code, _, _ in results]
        return "" if codes == ENDS.get(name, [0] * len(codes)) else "\n".join(log[-4000:] for _, _, log in results)

    def run_batch(last):
        """What went wrong; "plain" comes last, as it loads what the others have saved."""
        try:
            with ThreadPoolExecutor() as pool:
                logs = "\n".join(pool.map(run, AT_ONCE if last == "plain" else ()))
            return logs.strip() or run(last)
        except Exception:  # the others wait for a word, whatever it is
            return traceback.format_exc()

    def results(name):
        if name in known:
            return known[name]
        last = "alone" if name == "alone" else "plain"
        done = folder / f"{last}.done"
        try:
            (folder / f"{last}.begun").touch(exist_ok=False)
        except FileExistsError:  # another process runs it
            while not done.exists():
                time.sleep(0.1)
        else:
            (folder / f"{last}.ends").write_text(run_batch(last))
            (folder / f"{last}.ends").rename(done)
        assert not done.read_text(), done.read_text()
        told = [json.loads(file.read_text()) for file in sorted(folder.glob(f"{name}*.json"))]
        known[name] = told if len(told) > 1 else told[0]
        return known[name]

    return results


def column(run, name):
    return [value for event in run["events"] if event["event"] == "batch" for value in event[name]]


def kinds(run, kind):
    return [event for event in run["events"] if event["event"] == kind]


def epochs(run):
    names = ("loss", "accuracy", "val_loss", "val_accuracy")
    return [[event[name] for name in names if name in event] for event in kinds(run, "epoch")]


def differs(run, one, name):
    """Nothing if two runs are the same run, up to rounding."""
    assert run["error"] is None, run["traceback"]
    near = TOLERANCE.get(name.split("_")[0], EXACT)
    for what in ("loss", "accuracy")[: 1 if "regression" in name else 2]:
        assert len(column(run, what)) == len(column(one, what))
        np.testing.assert_allclose(column(run, what), column(one, what), err_msg=f"{name}: {what}", **near)
    np.testing.assert_allclose(epochs(run), epochs(one), err_msg=name, **near)


@pytest.mark.parametrize("name", MIRRORED)
def test_a_mirrored_run_is_the_run_on_one_device(group, name):
    differs(group("two")[f"mirrored/{name}"], group("plain")[name], name)


@pytest.mark.parametrize("name", TPU)
def test_a_run_in_static_shapes_is_the_run_on_one_device(group, name):
    differs(group("two")[f"tpu/{name}"], group("plain")[name], name)


def test_four_devices_give_what_one_gives(group):
    for name in FOUR:
        differs(group("four")[f"mirrored4/{name}"], group("plain")[name], name)


@pytest.mark.parametrize("name", WORKERS)
def test_workers_give_what_one_device_gives(group, name):
    differs(group("workers")[0][f"workers/{name}"], group("plain")[name], name)


@pytest.mark.parametrize("name", XLA)
def test_xla_compiles_the_step_for_a_tpu(group, name):
    differs(group("plain")[f"xla/{name}"], group("plain")[name], name)


def test_parts_add_up_to_the_batch(group):
    plain = group("plain")
    differs(plain["parts"], plain["whole"], "parts")
    differs(plain["many"], plain["whole"], "parts")  # more parts than the last batch has rows
    assert plain["many"]["traces"] == plain["parts"]["traces"]


def test_replicas_stay_equal(group):
    runs = group("two") | group("four")
    unequal = {name: run["unequal"] for name, run in runs.items() if run.get("unequal")}
    assert not unequal
    first, second = group("workers")
    for name, run in first.items():
        if name != "killed":
            assert run["weights"] == second[name]["weights"], name


def test_one_graph_for_training_and_one_for_validation(group):
    runs = group("two") | {name: run for name, run in group("plain").items() if name.startswith("xla")}
    del runs["mixed"]  # refused
    for name, run in runs.items():
        expected = {"train_block": 1} | ({} if name.startswith("resnet") else {"validate": 1})
        assert {kind: run["traces"].get(kind) for kind in expected} == expected, name


def test_resnet50_takes_a_step(group):
    for strategy in ("tpu", "mirrored"):
        run = group("two")[f"resnet/{strategy}"]
        assert run["error"] is None
        assert len(column(run, "loss")) == 1
        assert np.isfinite(column(run, "loss")).all()
    tpu, mirrored = (column(group("two")[f"resnet/{name}"], "loss") for name in ("tpu", "mirrored"))
    np.testing.assert_allclose(tpu, mirrored, rtol=1e-4)


def test_an_overflow_on_one_replica_is_a_step_that_all_leave_out(group):
    for run in (group("plain")["fp16"], group("two")["mirrored/fp16"], group("workers")[0]["workers/fp16"]):
        losses = column(run, "loss")
        assert np.isnan(losses).tolist() == [False, True, False] * 2
    assert group("two")["mirrored/fp16"]["iterations"] == 4


def test_events_tell_how_the_run_is_spread(group):
    first, second = group("workers")
    told = {
        "mirrored": group("two")["mirrored/sgd"],
        "tpu": group("two")["tpu/adam"],
        "multi_worker": first["workers/adam"],
    }
    for strategy, run in told.items():
        started = kinds(run, "started")[0]
        assert {name: started[name] for name in ("strategy", "replicas", "per_replica", "backend", "device")} == {
            "strategy": strategy, "replicas": 2, "per_replica": 32, "backend": "ring", "device": "cpu",
        }  # fmt: skip
    assert [event["event"] for event in first["workers/one_left"]["events"]][:4] == [
        "joining",
        "joined",
        "model",
        "started",
    ]
    assert [event["event"] for event in second["workers/one_left"]["events"]] == ["joining", "joined"]
    assert second["workers/one_left"]["files"] == []
    parts = kinds(group("plain")["parts"], "started")[0]
    assert (parts["strategy"], parts["replicas"], parts["per_replica"]) == ("single", 1, 64)
    assert "strategy" not in kinds(group("plain")["one_left"], "started")[0]


def test_saved_models_load_without_a_strategy(group):
    found = group("plain")["stored"]
    assert {name.split("/")[0] for name in found} == {"plain", "mirrored", "tpu", "mirrored4", "workers"}
    for path, model in found.items():
        name = path.split("/")[1]
        near = TOLERANCE.get(name.split("_")[0], EXACT)
        one = found[f"plain/{name}"]
        for what in ("weights", "statistics", "moments"):
            for a, b in zip(model[what], one[what], strict=True):
                np.testing.assert_allclose(a, b, err_msg=f"{path}: {what}", **near)
        assert model["iterations"] == one["iterations"]
        assert not any(model["synchronized"])  # as on one device, so that any framework of Keras's loads it


def test_losses_that_replicas_would_mix_up_are_refused(group):
    error = group("two")["mixed"]["error"]
    assert error.startswith("ValueError: The model has losses of its activations")
    assert group("workers")[0]["workers/own_mixed"]["error"] is None  # a process for each replica mixes nothing up


def test_stop_and_learning_rate_hold_at_the_same_step_for_all(group):
    one, two = group("plain")["steered"], group("two")["steered"]
    first, second = [run["steered"] for run in group("workers")]
    for run in (one, two, first):
        assert run["error"] is None
        assert len(column(run, "loss")) == 4
        rates = [event["learning_rate"] for event in kinds(run, "batch")]
        np.testing.assert_allclose(rates, [0.001, 0.001, 0.1, 0.1], rtol=1e-6)
        assert kinds(run, "checkpoint")[0]["step"] == 4
    assert second["error"] is None  # it was not asked
    assert (second["iterations"], second["learning_rate"]) == (first["iterations"], first["learning_rate"])
    assert second["weights"] == first["weights"]
    assert second["files"] == []


def test_a_checkpoint_is_that_of_one_device(group):
    one = group("plain")["steered"]
    for other in (group("two")["steered"], group("workers")[0]["steered"]):
        assert {name: np.shape(array) for name, array in other["arrays"].items()} == {
            name: np.shape(array) for name, array in one["arrays"].items()
        }
        assert set(other["progress"]) == set(one["progress"])
        for name in ("step", "epoch", "position", "learning_rate"):
            assert other["progress"][name] == one["progress"][name]


def test_each_replica_draws_its_own_dropout(group):
    [[alone, other]] = group("two")["steered"]["seeds"]
    assert alone in group("plain")["steered"]["arrays"].values()  # the first one draws what a single device draws
    assert other == [alone[0] + 1, alone[1]]
    first, second = [run["steered"] for run in group("workers")]
    assert (first["seeds"], second["seeds"]) == ([[alone]], [[other]])


# ---- how it ends


def test_a_tpu_that_tensorflow_is_not_built_for_is_said_and_the_cpu_still_trains(group):
    run = group("plain")["no_tpu"]
    assert run["error"].startswith("RuntimeError: This TensorFlow 2.")
    assert run["error"].endswith("pip install tensorflow-tpu in place of tensorflow, then start anew.")
    assert not run["events"]
    assert group("plain")["one_left"]["error"] is None  # trained afterwards, in the same process


NO_CHIP = "RuntimeError: No TPU chip is on this machine's PCI bus: pick a TPU as hardware, then start anew."


def by_hand_on_a_tpu(home, **how):
    """What the program for a TPU says at its end, started by hand; the exit code must be 1."""
    data(home, "one_left")
    text = program_text("tensorflow", CASES["one_left"][1] | {"STRATEGY": "tpu", "ACCELERATOR": "tpu"}, "A test.")
    (home / "program.py").write_text(text)
    # else the library asks Google's cloud for a TPU, for minutes, while it is imported
    [(code, _, log)] = ended(python("program.py", cwd=home, TPU_SKIP_MDS_QUERY="1", **how))
    assert code == 1
    return log.rstrip()


@pytest.mark.skipif(not OTHER_TENSORFLOW, reason="ACCEL_NB_TENSORFLOW_TPU names no Python with tensorflow-tpu")
def test_tensorflow_tpu_without_a_chip_says_so(folder):
    assert by_hand_on_a_tpu(folder / "tensorflow_tpu", interpreter=OTHER_TENSORFLOW).endswith(NO_CHIP)


@pytest.mark.skipif(machine().tpu is not None, reason="a TPU chip is here")
def test_tensorflow_tpu_is_known_by_the_name_that_its_installer_wrote(folder, tmp_path):
    told = tmp_path / "tensorflow_tpu-2.20.0.dist-info" / "METADATA"
    told.parent.mkdir()
    told.write_text("Metadata-Version: 2.1\nName: tensorflow_tpu\nVersion: 2.20.0\n")
    assert by_hand_on_a_tpu(folder / "installer", PYTHONPATH=str(tmp_path)).endswith(NO_CHIP)


def test_a_killed_worker_ends_the_others_with_an_error(group):
    killed = group("workers")[0]["killed"]
    assert killed["error"].startswith("UnavailableError: ")
    assert len(column(killed, "loss")) == 2


def test_a_worker_that_never_comes_is_named(group):
    first, second = group("alone")["first"], group("alone")["second"]
    assert re.fullmatch(r"TimeoutError: Missing after 12 s: worker 1 \(127\.0\.0\.1:\d+\)\.", first["error"])
    assert second["error"].startswith("TimeoutError: Worker 0 (127.0.0.1:")
    assert [event["event"] for event in second["events"]] == ["joining"]


def test_a_program_for_workers_says_how_to_start_it(group):
    error = group("alone")["untold"]["error"]
    assert error.startswith(
        "RuntimeError: This program is for 2 workers that train together: start it once for each"
    )
    assert (
        'TF_CONFIG=\'{"cluster": {"worker": ["HOST:PORT", ...]}, "task": {"type": "worker", "index": I}}\''
        in error
    )
    assert group("alone")["three"]["error"] == "RuntimeError: TF_CONFIG names 3 workers; this program is for 2."


def test_two_clusters_at_once_where_only_the_first_worker_prints_and_writes(group, folder):
    settings = {"INPUT_SHAPE": (8, 8, 1), "BATCH_SIZE": 64, "EPOCHS": 2, **CASES["one_left"][1]}
    text = program_text("tensorflow", settings | {"STRATEGY": "multi_worker", "DEVICES": 2}, "A test.")
    homes = [folder / "by_hand", folder / "by_hand_too"]
    for home in homes:
        data(home, "one_left")
        (home / "program.py").write_text(text)
    started = [python("program.py", f"history{i}.csv", cwd=home, TF_CONFIG=config)
               for home in homes for i, config in enumerate(clusters(2))]  # fmt: skip
    ends = ended(*started)
    assert [code for code, _, _ in ends] == [0] * 4, [log for _, _, log in ends]
    for home, (_, told, _), (_, other, _) in zip(homes, ends[::2], ends[1::2], strict=True):
        assert [line.split()[:2] for line in told.splitlines()] == [["epoch", "1"], ["epoch", "2"]]
        assert other == ""
        assert [path.name for path in home.glob("*.csv")] == ["history0.csv"]
        with open(home / "history0.csv") as file:
            losses = [float(row["loss"]) for row in csv.DictReader(file)]
        np.testing.assert_allclose(losses, column(group("plain")["one_left"], "loss"), **EXACT)
