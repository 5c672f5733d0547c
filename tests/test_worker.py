"""The process side in small: events on a disk that fails, the control file, errors told from the program on."""

from __future__ import annotations

import errno
import json
import math
import os
import threading

import numpy as np
import pytest

from accel_nb import worker
from accel_nb.events import Events, plain
from accel_nb.files import write_atomic
from accel_nb.launch import environment
from accel_nb.processes import born
from accel_nb.reporter import Reporter


def test_values_become_plain_json():
    made = plain(
        {"a": float("nan"), "b": [math.inf, -math.inf], "c": np.float32(0.1), 1: np.arange(2), "d": (True, None)}
    )
    assert made == {"a": "NaN", "b": ["Infinity", "-Infinity"], "c": 0.100000001, "1": [0, 1], "d": [True, None]}
    json.dumps(made, allow_nan=False)


def test_nine_digits_hold_every_float32():
    values = np.random.default_rng(0).integers(0, 2**32, 5000, dtype=np.uint32).view(np.float32)
    values = values[np.isfinite(values)]
    again = np.array([plain(float(value)) for value in values], dtype=np.float32)
    np.testing.assert_array_equal(again.view(np.uint32), values.view(np.uint32))


def test_events_wait_for_space_and_none_is_lost_or_torn(tmp_path, monkeypatch):
    events = Events(tmp_path / "events.jsonl")
    real, room = os.write, [25]

    def short(handle, data):
        """A disk with a little room left: a first write is cut, the next ones fail."""
        if room[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = min(room[0], len(data))
        room[0] -= count
        return real(handle, data[:count])

    monkeypatch.setattr(worker.os, "write", short)
    for step in range(3):
        events.write("batch", first=step)
    assert not events.flush()
    assert events.problem.errno == errno.ENOSPC
    room[0] = 10**6
    assert events.flush()
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["first"] for line in lines] == [0, 1, 2]
    os.close(events._file)


def test_a_line_that_a_killed_worker_left_open_takes_no_other_one_with_it(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"event":"batch","fir')
    events = Events(path)
    events.write("resumed")
    os.close(events._file)
    torn, *lines = path.read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["resumed"]
    assert torn == '{"event":"batch","fir'
    again = Events(path)
    again.write("status")
    os.close(again._file)
    assert path.read_text().splitlines()[:2] == [torn, *lines]


def test_events_of_many_threads_are_whole_lines(tmp_path):
    events = Events(tmp_path / "events.jsonl")
    threads = [
        threading.Thread(target=lambda i=i: [events.write("x", i=i, text="ü" * 50) for _ in range(200)])
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = (tmp_path / "events.jsonl").read_text(encoding="utf-8").splitlines()
    assert sorted(json.loads(line)["i"] for line in lines) == sorted([0, 1, 2, 3] * 200)
    os.close(events._file)


def test_control_obeys_the_last_word_and_survives_half_a_file(tmp_path):
    events = Events(tmp_path / "events.jsonl")
    control = worker.Control(tmp_path / "control.json", events)
    assert control() == {}
    write_atomic(tmp_path / "control.json", json.dumps({"learning_rate": 0.5}))
    assert control() == {"learning_rate": 0.5}
    (tmp_path / "control.json").write_text('{"learning_r')
    assert control() == {"learning_rate": 0.5}
    write_atomic(tmp_path / "control.json", json.dumps({"pause": True}))
    told = []
    thread = threading.Thread(target=lambda: told.append(control()))
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    write_atomic(tmp_path / "control.json", json.dumps({"pause": True, "stop": True}))
    thread.join(5)
    assert told == [{"stop": True}]
    assert control() == {"stop": True}
    assert '"paused"' in (tmp_path / "events.jsonl").read_text()
    os.close(events._file)


def test_of_several_ranks_the_first_one_writes_checkpoints(tmp_path):
    plan = {"plan": {"checkpoint_seconds": 1e-6, "checkpoint_epochs": 0, "epochs": 1, "accelerator": "cpu"}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    (tmp_path / "program.py").write_text(
        "import time\ndef train(report, control, save_to):\n"
        "    time.sleep(0.01)\n    (save_to / 'asked').write_text(repr(control()))\n"
    )
    me = worker.Owner(os.getpid(), born(os.getpid()))
    for rank, asked in ((0, "{'checkpoint': True}"), (1, "{}")):
        assert worker.run(tmp_path, me, rank, Events(tmp_path / f"{rank}.jsonl")) == 0
        assert (tmp_path / "asked").read_text() == asked


def test_an_own_model_that_hardly_fits_is_told_before_the_first_step(tmp_path):
    events = Events(tmp_path / "events.jsonl")
    report = Reporter(events, {"parameters": None, "gpu": None, "plan": {"batch_size": 128}})
    report("model", parameters=1000, layers=[["a", "Linear", [10], 1000]])
    report("model", parameters=10**12, layers=[["a", "Linear", [10], 10**12]])
    told = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in told] == ["model", "model", "warning"]
    assert "GiB" in told[-1]["text"]
    os.close(events._file)


def test_an_error_is_told_from_the_programs_first_line_on(tmp_path):
    (tmp_path / "program.py").write_text(
        "def train():\n    return helper()\n\ndef helper():\n    return {}['key']\n"
    )
    program = worker.load_program(tmp_path / "program.py")
    with pytest.raises(KeyError) as caught:
        program.train()
    event = worker.describe_error(caught.value, tmp_path)
    assert event["where"] == "program.py, line 5: return {}['key']"
    assert event["text"] == "KeyError: 'key'"
    assert "test_worker.py" not in event["traceback"]
    assert event["traceback"].count("program.py") == 2


def test_the_reason_behind_an_error_is_told_too(tmp_path):
    (tmp_path / "program.py").write_text(
        "def train():\n    try:\n        1 / 0\n"
        "    except ZeroDivisionError as e:\n        raise ValueError('told') from e\n"
    )
    with pytest.raises(ValueError, match="told") as caught:
        worker.load_program(tmp_path / "program.py").train()
    event = worker.describe_error(caught.value, tmp_path)
    assert "division by zero" in event["traceback"]
    assert event["text"] == "ValueError: told"


def test_a_worker_starts_with_threads_that_soon_sleep_unless_told_otherwise(monkeypatch):
    for name in ("GOMP_SPINCOUNT", "KMP_BLOCKTIME", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    told = environment()
    assert (told["GOMP_SPINCOUNT"], told["KMP_BLOCKTIME"]) == ("1000", "1")
    assert told["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    monkeypatch.setenv("GOMP_SPINCOUNT", "5")
    assert environment()["GOMP_SPINCOUNT"] == "5"
