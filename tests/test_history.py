"""Events in, columns out."""

from __future__ import annotations

import json
import math
import sys
import threading
import tracemalloc

import numpy as np
import pytest
from histories import falling, made
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_nb.history import COLUMNS, History


def batch(first, loss, epoch=1, **more):
    return {"event": "batch", "epoch": epoch, "first": first, "loss": loss, **more}


def same(a, b):
    for name in COLUMNS:
        np.testing.assert_array_equal(a.columns()[name], b.columns()[name])


def test_columns_hold_every_step_and_nan_where_nothing_was_measured():
    history = History()
    history.add(batch(1, [2.0, 1.5], accuracy=[0.0, 0.5]))
    history.add({"event": "epoch", "epoch": 1, "step": 2, "loss": 1.75, "val_loss": 0.0, "val_accuracy": 0.25})
    history.add(batch(3, [1.0], epoch=2))
    assert len(history) == 3
    assert history.step.tolist() == [1, 2, 3]
    assert history.epoch.tolist() == [1, 1, 2]
    assert history.loss.tolist() == [2.0, 1.5, 1.0]
    np.testing.assert_array_equal(history.accuracy, [0.0, 0.5, np.nan])
    np.testing.assert_array_equal(history.val_loss, [np.nan, 0.0, np.nan])  # 0.0 is a value
    np.testing.assert_array_equal(history.val_accuracy, [np.nan, 0.25, np.nan])


def test_an_empty_history_is_whole():
    history = History()
    assert len(history) == 0
    assert {name: len(values) for name, values in history.columns().items()} == dict.fromkeys(COLUMNS, 0)
    assert history.last["step"] == history.last["epoch"] == 0
    assert math.isnan(history.last["loss"])
    assert history.best() is None
    assert history.epochs == []
    assert history.epochs_done() == 0.0
    assert not history.has_accuracy
    assert history.summary() == "waiting for the first step"
    assert "waiting" in repr(history)


def test_unknown_events_change_nothing():
    history = falling(20)
    version, before = history.version, history.columns()
    history.add({"event": "meter", "samples_per_second": 3.0})
    history.add({"event": "of a later version"})
    history.add({})
    assert history.version == version
    np.testing.assert_array_equal(history.loss, before["loss"])


def test_values_as_json_may_write_them():
    line = '{"event": "batch", "epoch": 1, "first": 1, "loss": [null, NaN, "NaN", "Infinity", -Infinity, 0]}'
    history = History([json.loads(line)])
    np.testing.assert_array_equal(history.loss, [np.nan, np.nan, np.nan, np.inf, -np.inf, 0.0])
    history.add({"event": "epoch", "epoch": 1, "step": 6, "loss": None, "val_loss": "NaN"})
    assert math.isnan(history.epochs[0]["loss"])
    assert history.trouble("val_loss") == (1, 6, 0)
    assert history.trouble("loss") == (5, 1, 1)


def test_a_value_keeps_every_digit():
    history = History([batch(1, [0.123456789, 1e-300, 1e300])])
    assert history.loss.tolist() == [0.123456789, 1e-300, 1e300]


def test_epochs_and_last():
    history = made([4.0, 2.0, 1.0, 0.5, 0.25], [0.1, 0.2, 0.3, 0.4, 0.5], per_epoch=2)
    first, second = history.epochs
    assert (first["epoch"], first["step"], first["loss"], first["seconds"]) == (1, 2, 3.0, 0.5)
    assert second["val_loss"] == pytest.approx(0.85)
    last = history.last
    assert (last["step"], last["epoch"], last["loss"], last["accuracy"]) == (5, 3, 0.25, 0.5)
    assert last["val_loss"] == pytest.approx(0.85)
    assert last["learning_rate"] == 0.001
    history.add({**batch(6, [0.2], epoch=3), "learning_rate": 0.0})
    assert history.last["learning_rate"] == 0.0


def test_epochs_done_counts_parts_of_an_epoch():
    history = falling(25, per_epoch=10)
    assert [history.epochs_done(step) for step in (1, 10, 11, 25)] == pytest.approx([0.1, 1.0, 1.1, 2.5])
    assert history.epochs_done() == 2.5
    assert history.epoch_at(np.array([1, 10, 11, 25])).tolist() == [1, 1, 2, 3]
    assert History([batch(1, [1.0, 1.0], epoch=4)]).epochs_done() == 4.0  # how many steps one has was never said


def test_best():
    history = made([3.0, 1.0, math.nan, 1.0, 2.0], [0.1, 0.9, 0.2, 0.9, math.inf], per_epoch=2)
    assert history.best("loss") == {"step": 2, "epoch": 1, "loss": 1.0}
    assert history.best("accuracy") == {"step": 2, "epoch": 1, "accuracy": 0.9}
    assert history.best() == {"step": 2, "epoch": 1, "val_loss": 2.1}
    with pytest.raises(ValueError, match=r"column='seconds'.*loss, accuracy, val_loss"):
        history.best("seconds")


def test_summary_says_what_is_there_and_what_went_wrong():
    history = made([2.0, 1.0], [0.0, 0.5], per_epoch=2)
    assert history.summary() == (
        "step 2 · epoch 1 · loss 1 · accuracy 0.5 · validation loss 1.6 · validation accuracy 0.25"
    )
    assert made([1.0] * 1234, per_epoch=1000).summary().startswith("step 1,234 · epoch 1.2 · loss 1 ·")
    assert "accuracy" not in made([1.0]).summary()
    text = made([1.0, math.nan, math.inf], validation=False).summary()
    assert text == "step 3 · epoch 1 · loss inf · loss not a finite number at 2 steps, first at step 2"


# ---- a run that goes on from a checkpoint


def test_a_block_that_is_sent_again_replaces_what_came_after_it():
    history = falling(100, per_epoch=20)
    history.add(batch(51, [9.0, 8.0], epoch=3))
    expected = [*falling(100, per_epoch=20).loss[:50].tolist(), 9.0, 8.0]
    assert history.loss.tolist() == expected
    assert [row["epoch"] for row in history.epochs] == [1, 2]
    assert history.epoch.tolist() == [1] * 20 + [2] * 20 + [3] * 12
    assert np.isfinite(history.val_loss).sum() == 2
    assert history.stretches("loss", 512).high.max() == 9.0


def test_a_rewound_history_equals_one_that_was_never_ahead():
    straight, events = History(), []
    for first in range(0, 1400, 35):
        values = np.random.default_rng(first).random(35).tolist()
        events.append(batch(first + 1, values, epoch=first // 700 + 1, accuracy=values))
    for event in events:
        straight.add(event)
    rewound = History(events[:30])
    for event in events[20:]:
        rewound.add(event)
    same(rewound, straight)
    for name in ("loss", "accuracy"):
        for a, b in zip(rewound.stretches(name, 60), straight.stretches(name, 60), strict=True):
            np.testing.assert_allclose(a, b)


def test_a_run_that_starts_again_replaces_everything():
    history = falling(60, per_epoch=20)
    history.add(batch(1, [5.0]))
    assert history.loss.tolist() == [5.0]
    assert history.epochs == []
    assert history.epoch.tolist() == [1]
    assert history.best() is None


def test_an_epoch_that_is_sent_again_counts_once():
    history = made([1.0, 1.0], per_epoch=2)
    history.add({"event": "epoch", "epoch": 1, "step": 2, "loss": 1.0, "val_loss": 7.0})
    assert len(history.epochs) == 1
    assert history.val_loss[-1] == 7.0
    assert history.stretches("val_loss").high.tolist() == [7.0]


def test_steps_that_were_never_reported_are_nan():
    history = History([batch(1, [1.0]), batch(4, [2.0], epoch=2)])
    np.testing.assert_array_equal(history.loss, [1.0, np.nan, np.nan, 2.0])
    assert history.epoch.tolist() == [1, 1, 1, 2]


def test_a_block_before_the_first_step_is_refused():
    with pytest.raises(ValueError, match="first=0; steps count from 1"):
        History([batch(0, [1.0])])


def test_status_is_that_of_the_last_run():
    history = falling(10)
    assert history.status is None
    history.add({"event": "finished", "status": "stopped"})
    assert history.status == "stopped"
    history.add({"event": "started", "steps_per_epoch": 5})
    assert history.status is None


# ---- reading while it grows


def test_values_at():
    history = made([4.0, 3.0, 2.0, 1.0, 0.5], per_epoch=2)
    steps = np.array([1, 2, 3, 5])
    assert history.values_at("loss", steps).tolist() == [4.0, 3.0, 2.0, 0.5]
    np.testing.assert_allclose(history.values_at("val_loss", steps), [np.nan, 3.6, 3.6, 1.6])
    assert history.validated_at(steps).tolist() == [0, 2, 2, 4]


def test_columns_are_copies_of_one_moment():
    history = falling(30)
    columns = history.columns()
    columns["loss"][:] = -1
    assert history.loss.min() > 0


def test_another_thread_may_read():
    history, stop, lengths, errors = History(), threading.Event(), [], []

    def read():
        while not stop.is_set():
            columns = history.columns()
            lengths.append({len(values) for values in columns.values()})
            if not np.array_equal(columns["loss"], columns["step"]):
                errors.append(columns)
            history.stretches("loss", 50)
            history.summary()

    reader = threading.Thread(target=read)
    reader.start()
    for first in range(0, 6000, 3):
        history.add(batch(first + 1, [first + 1.0, first + 2.0, first + 3.0], epoch=first // 500 + 1))
    stop.set()
    reader.join()
    assert lengths
    assert all(len(length) == 1 for length in lengths)
    assert not errors


# ---- a data frame


def test_to_frame():
    frame = made([2.0, 1.0, 0.5], [0.1, 0.2, 0.3], per_epoch=2).to_frame()
    assert list(frame.columns) == ["step", "epoch", "loss", "accuracy", "val_loss", "val_accuracy"]
    assert frame["step"].tolist() == [1, 2, 3]
    assert str(frame["step"].dtype) == str(frame["epoch"].dtype) == "int64"
    assert frame["val_loss"].isna().tolist() == [True, False, True]
    assert History().to_frame().shape == (0, 6)


def test_without_pandas_to_frame_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)  # the import then fails, as where pandas is missing
    with pytest.raises(ImportError, match="pip install pandas"):
        falling(3).to_frame()


# ---- size


def test_a_million_steps_stay_modest_in_memory():
    values = np.random.default_rng(0).random(1000).tolist()
    tracemalloc.start()
    try:
        history = History()
        for first in range(0, 1_000_000, 1000):
            history.add(batch(first + 1, values, epoch=first // 50_000 + 1, accuracy=values))
        history.stretches("loss", 100)
        history.stretches("accuracy", 100)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(history) == 1_000_000
    assert held < 40 * 2**20


numbers = st.one_of(st.none(), st.floats(), st.sampled_from([0.0, 1.0, 1.7e308, -1.7e308, 5e-324]))
blocks = st.lists(st.tuples(st.integers(1, 60), st.lists(numbers, min_size=1, max_size=12)), max_size=12)


@settings(max_examples=60, deadline=None)
@given(blocks)
def test_any_order_of_blocks_gives_the_same_as_plain_lists(blocks):
    history, plain = History(), []
    for first, values in blocks:
        history.add(batch(first, values))
        plain = plain[: first - 1] + [math.nan] * (first - 1 - len(plain))
        plain += [math.nan if value is None else value for value in values]
    np.testing.assert_array_equal(history.loss, np.array(plain, dtype=float))
    assert len(history.summary()) < 300
    finite = [value for value in plain if math.isfinite(value)]
    assert history.limits("loss")[:2] == ((min(finite), max(finite)) if finite else (math.inf, -math.inf))
