"""A user's own y: classes or quantities, in every form, and the labels that have no class."""

from __future__ import annotations

import numpy as np
import pytest

from accel_nb.data import load
from accel_nb.errors import DataError

N = 60
X = np.random.default_rng(1).random((N, 5), np.float32)
Y = np.arange(N) % 3


def loaded(y, y_val=None, **kwargs):
    data = (X, y) if y_val is None else (X, y, X[: len(y_val)], y_val)
    return load(data, **{"validation": 0 if y_val is None else 0.2, **kwargs})


def refusal(y, y_val=None, **kwargs) -> DataError:
    with pytest.raises(DataError) as caught:
        loaded(y, y_val, **kwargs)
    return caught.value


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "int64", "uint64", ">i4"])
def test_whole_number_labels_become_int64(dtype):
    dataset = loaded(Y.astype(dtype))
    assert (dataset.task, dataset.outputs, dataset.y_train.dtype) == ("classification", 3, np.int64)
    np.testing.assert_array_equal(dataset.y_train, Y)
    assert dataset.class_names is None


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "bool", "uint8"])
def test_one_hot_rows_become_labels_with_a_note(dtype):
    dataset = loaded(np.eye(4, dtype=dtype)[Y])  # the fourth class has no sample; its column says that it exists
    np.testing.assert_array_equal(dataset.y_train, Y)
    assert (dataset.task, dataset.outputs) == ("classification", 4)
    assert dataset.notes[0] == "y: one-hot rows of 4 became whole-number labels."
    assert "1 of the 4 classes have no training sample" in dataset.notes[1]


def test_a_column_of_labels_is_squeezed():
    dataset = loaded(Y[:, None])
    np.testing.assert_array_equal(dataset.y_train, Y)
    assert "squeezed" in dataset.notes[0]


def test_soft_labels_are_refused():
    soft = np.eye(3)[Y] * 0.9 + 0.1 / 3
    error = refusal(soft)
    assert "soft labels" in error.why
    assert "argmax" in error.do
    assert loaded(soft, data_args={"task": "regression"}).outputs == 3


def test_several_classes_per_sample_are_refused():
    y = np.eye(3, dtype=int)[Y]
    y[5] = 1
    assert "several classes per sample" in refusal(y).why
    y[5] = 0
    assert "several classes per sample" in refusal(y.astype(float)).why


def test_several_whole_numbers_per_sample_are_refused():
    assert "neither labels nor one-hot" in refusal(np.stack([Y, Y], 1)).why


@pytest.mark.parametrize("kind", [list, np.array, lambda y: np.array(y, object), lambda y: np.array(y, "S")])
def test_text_labels_become_classes_in_sorted_order(kind):
    names = ("ant", "bee", "cat")
    dataset = loaded(kind([names[2 - place] for place in Y]))
    assert (dataset.class_names, dataset.outputs) == (names, 3)
    np.testing.assert_array_equal(dataset.y_train, 2 - Y)
    assert "'ant', 'bee', 'cat' became the classes 0 to 2" in dataset.notes[0]


def test_text_with_a_missing_value_is_refused():
    y = np.array(["a", "b", None] * 20, object)
    assert "20 are no text; the first is y[2]" in refusal(y).why


def test_a_text_per_sample_is_no_class():
    error = refusal([f"id{number}" for number in range(N)])
    assert "60 different texts for 60 samples" in error.why
    assert loaded([f"id{number}" for number in range(N)], data_args={"classes": N}).outputs == N


def test_boolean_labels():
    dataset = loaded(Y == 1)
    assert (dataset.outputs, dataset.class_names) == (2, ("False", "True"))
    np.testing.assert_array_equal(dataset.y_train, Y == 1)


@pytest.mark.parametrize(
    ("values", "shown"),
    [((1, 2, 3), "1, 2, 3"), ((-1, 0, 1), "-1, 0, 1"), ((0, 1, 255), "0, 1, 255"), ((0, 2, 4), "0, 2, 4")],
)
def test_labels_without_a_class_are_shown_and_can_be_renumbered(values, shown):
    y = np.array(values)[Y]
    error = refusal(y)
    assert f"must be 0 to 2; these are {shown}" in error.why
    assert '{"remap_labels": True}' in error.do
    dataset = loaded(y, data_args={"remap_labels": True})
    np.testing.assert_array_equal(dataset.y_train, Y)
    assert dataset.class_names == tuple(str(value) for value in values)
    assert f"the labels {shown} were renumbered 0 to 2" in dataset.notes[0]


def test_a_gap_may_be_a_class_without_samples():
    y = np.array((0, 2, 4))[Y]
    assert '{"classes": 5}' in refusal(y).do
    dataset = loaded(y, data_args={"classes": 5})
    assert dataset.outputs == 5
    assert "2 of the 5 classes have no training sample" in dataset.notes[0]


def test_the_number_of_classes_can_be_said():
    assert loaded(Y, data_args={"classes": 7}).outputs == 7
    error = refusal(Y, data_args={"classes": 2})
    assert "Labels of 2 classes must be 0 to 1 for 2 classes; these are 0, 1, 2" in error.why
    assert "3 different labels" in refusal(list("abc" * 20), data_args={"classes": 2}).why
    assert loaded(list("abc" * 20), data_args={"classes": 4}).outputs == 4


def test_many_values_are_shown_by_their_ends():
    error = refusal(np.arange(N) % 30 + 1)
    assert "these are 1, 2, 3, 4, 5, 6, 7, …, 30" in error.why


def test_a_different_whole_number_per_sample_is_a_question():
    y = np.arange(N)
    error = refusal(y)
    assert "60 different whole numbers for 60 samples: classes, or quantities?" in error.why
    assert loaded(y, data_args={"task": "regression"}).task == "regression"
    assert loaded(y, data_args={"task": "classification"}).outputs == N


def test_whole_numbers_as_floats_are_a_question():
    error = refusal(Y.astype(np.float64))
    assert "0, 1, 2" in error.why
    assert '{"task": "classification"}' in error.do
    dataset = loaded(Y.astype(np.float64), data_args={"task": "classification"})
    assert dataset.y_train.dtype == np.int64
    dataset = loaded(Y.astype(np.float64), data_args={"task": "regression"})
    assert (dataset.y_train.dtype, dataset.y_train.shape) == (np.float32, (N, 1))


@pytest.mark.parametrize(("shape", "outputs"), [((N,), 1), ((N, 1), 1), ((N, 3), 3)])
def test_float_targets_are_a_regression(shape, outputs):
    y = np.random.default_rng(0).normal(size=shape)
    dataset = loaded(y)
    assert (dataset.task, dataset.outputs) == ("regression", outputs)
    assert (dataset.y_train.dtype, dataset.y_train.shape) == (np.float32, (N, outputs))
    np.testing.assert_array_equal(dataset.y_train, y.reshape(N, outputs).astype(np.float32))
    assert dataset.summary() == f"60 train · no validation · {'1 target' if outputs == 1 else '3 targets'}"


def test_constant_targets_are_told():
    assert "all targets are the same" in loaded(np.full(N, 0.5)).notes[-1]


@pytest.mark.parametrize(
    ("y", "data_args", "words"),
    [
        (np.array(1), None, "single value"),
        (np.zeros(0), None, "empty"),
        (np.zeros((N, 0)), None, "empty"),
        (np.zeros((N, 1, 1)), None, "3 dimensions"),
        (np.zeros(N, complex), None, "Complex"),
        (np.zeros(N, "M8[D]"), None, "cannot be labels"),
        (np.array([object()] * N), None, "Python objects"),
        ([None] * N, None, "Python objects"),
        ([1, "a"] * (N // 2), None, "mixes text and numbers"),
        ([["a", "b"]] * N, None, "several texts"),
        (np.zeros(N, int), None, "All 60 labels are 0"),
        (np.full(N, 7), None, "All 60 labels are 7"),
        (["a"] * N, None, "All 60 labels are 'a'"),
        (np.ones(N, bool), None, "All 60 labels are 1"),
        (np.eye(3)[np.zeros(N, int)], None, "All 60 labels are 0"),
        (np.full(N, 7), {"remap_labels": True}, "All 60 labels are '7'"),
        (np.linspace(0, 1, N), {"task": "classification"}, "fractions"),
        (np.arange(N) * 1e30, {"task": "classification"}, "too large for labels"),
        (["a", "b"] * (N // 2), {"task": "regression"}, "Text cannot be the target"),
        (np.stack([Y, Y], 1), {"task": "classification"}, "not one-hot"),
        (np.array([1e300, 0.5] * (N // 2)), None, "more than float32 can hold"),
        (np.where(np.arange(N) == 3, np.nan, Y), None, "the first is y[3] = nan"),
        (np.where(np.arange(N) == 3, np.inf, Y + 0.5), None, "the first is y[3] = inf"),
        (Y[:-1], None, "x has 60 samples, y has 59"),
        (np.array([2**63, 0], np.uint64)[Y % 2], None, "9223372036854775808"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_y_that_no_loss_should_see(y, data_args, words):
    error = refusal(y, data_args=data_args)
    assert error.field == "y"
    assert words in error.why


def test_labels_that_only_validation_has():
    error = refusal(Y, np.array([0, 1, 5]))
    assert (error.field, error.why) == ("y_val", "It holds labels that no training sample has: 5.")
    assert "no training sample has: 'd'" in refusal(list("abc" * 20), list("abd")).why
    assert "no training sample has: 9" in refusal(Y + 1, [1, 9], data_args={"remap_labels": True}).why
    error = refusal(Y, np.array([0, 7]), data_args={"classes": 5})
    assert "here are 7" in error.why
    assert loaded(Y, np.array([0, 4]), data_args={"classes": 5}).val_samples == 2


def test_validation_labels_are_coded_like_those_of_training():
    np.testing.assert_array_equal(loaded(list("abc" * 20), list("cab")).y_val, [2, 0, 1])
    np.testing.assert_array_equal(loaded(Y, np.eye(3)[[2, 0, 1]]).y_val, [2, 0, 1])
    np.testing.assert_array_equal(loaded(Y * 10, [20, 0], data_args={"remap_labels": True}).y_val, [2, 0])
    assert loaded(np.linspace(0, 1, N), [0.5, 0.25]).y_val.shape == (2, 1)


def test_validation_labels_of_another_kind_are_refused():
    assert "It holds text, y holds numbers" in refusal(Y, list("abc")).why
    assert "no training sample has: 7" in refusal(Y > 0, [0, 7]).why
    assert (
        "has 2 targets per sample, y has 1"
        in refusal(np.linspace(0, 1, N), np.random.default_rng(0).random((3, 2))).why
    )
    with pytest.raises(DataError, match="x_val has 60 samples, y_val has 3"):
        load((X, Y, X, Y[:3]))
