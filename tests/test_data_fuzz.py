"""Any data at all: either one clear DataError, or a Dataset of which all holds that the programs rely on."""

from __future__ import annotations

import contextlib
import io
import time

import numpy as np
import pandas as pd
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from accel_nb.data import Dataset, describe, last_batch, load
from accel_nb.errors import DataError

SETTINGS = settings(deadline=None, max_examples=150)

numbers = st.sampled_from(["?", "u1", "i1", "u2", "i4", "i8", "u8", "f2", "f4", "f8", ">f4", ">i2", "g"])
others = st.sampled_from(["c8", "O", "U3", "S3", "M8[D]", "m8[s]"])
sizes = st.sampled_from([0, 1, 2, 3, 4, 5, 8])
shapes = st.lists(sizes, max_size=5).map(tuple)


def values(dtype: str):
    """Arrays of any shape: arbitrary ones, and those that look like data."""
    kind = np.dtype(dtype).kind
    if kind == "O":
        elements = st.one_of(st.none(), st.integers(), st.floats(), st.text(max_size=3), st.booleans())
        return npst.arrays(dtype, shapes, elements=elements)
    free = npst.arrays(dtype, shapes)
    if kind not in "?uif":
        return free
    return st.one_of(free, npst.arrays(dtype, shapes, elements=small(kind)))


def small(kind: str):
    if kind == "f":
        return st.sampled_from([0.0, 0.5, 1.0, 2.0, 16.0])
    return st.booleans() if kind == "b" else st.integers(0, 3)


@st.composite
def matching(draw):
    """(x, y), or with a validation part, of matching lengths and of kinds that may well be right."""
    samples = draw(st.integers(2, 12))
    shape = draw(st.sampled_from([(3,), (64,), (5, 4), (5, 4, 3), (3, 5, 4), (3, 5, 3), (1, 1, 1), (2, 2, 2)]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    parts = []
    make = draw(st.sampled_from(["unit", "byte", "grey", "normal", "bool"]))
    label = draw(st.sampled_from(["int", "from 1", "gap", "one-hot", "text", "bool", "float", "whole", "column"]))
    dtype = draw(numbers)
    for count in (samples, draw(st.integers(1, 4)))[: draw(st.integers(1, 2))]:
        x = {
            "unit": rng.random,
            "byte": lambda size: rng.integers(0, 256, size),
            "grey": lambda size: rng.integers(0, 17, size),
            "normal": rng.normal,
            "bool": lambda size: rng.integers(0, 2, size),
        }[make](size=(count, *shape))
        with np.errstate(all="ignore"):
            x = x.astype(dtype)
        y = rng.integers(0, 3, count)
        y = {
            "int": y,
            "from 1": y + 1,
            "gap": y * 2,
            "one-hot": np.eye(3)[y],
            "text": np.array(["a", "b", "ü<b>"])[y],
            "bool": y > 0,
            "float": rng.normal(size=count),
            "whole": y.astype(float),
            "column": y[:, None],
        }[label]
        parts += [x, y]
    return tuple(parts)


data_args = st.one_of(
    st.none(),
    st.fixed_dictionaries(
        {},
        optional={
            "task": st.sampled_from(["classification", "regression"]),
            "classes": st.integers(-1, 6),
            "remap_labels": st.booleans(),
            "scale": st.sampled_from([1, 2.5, 255]),
            "channels": st.sampled_from(["first", "last"]),
        },
    ),
)
validations = st.one_of(st.none(), st.sampled_from([0, 0.1, 0.2, 0.5, 0.9]), st.floats(0, 1))


def attempt(data, **kwargs) -> Dataset | None:
    """The Dataset, checked; None where it is refused in one sentence."""
    try:
        dataset = load(data, **kwargs)
    except DataError as error:
        refused = error
    else:
        check(dataset)
        return dataset
    assert refused.why.endswith((".", "?"))
    assert refused.do.endswith((".", "?"))
    assert len(str(refused)) < 700
    assert "\n" not in refused.why + refused.do
    return None


def check(dataset: Dataset) -> None:
    parts = [(dataset.x_train, dataset.y_train, dataset.train_samples)]
    if dataset.x_val is not None:
        assert dataset.y_val is not None
        parts.append((dataset.x_val, dataset.y_val, dataset.val_samples))
    else:
        assert dataset.y_val is None
        assert dataset.val_samples == 0
    for x, y, samples in parts:
        assert len(x) == len(y) == samples > 0
        assert x.shape[1:] == dataset.input_shape
        assert x.ndim in {2, 4}
        assert 0 not in x.shape
        assert x.dtype in (np.float32, np.uint8)
        assert x.dtype == np.float32 or dataset.scale > 1 or (dataset.scale > 0 and dataset.scale != 1)
        assert np.isfinite(x).all()
        if dataset.task == "classification":
            assert y.shape == (samples,)
            assert y.dtype == np.int64
            assert 0 <= y.min() <= y.max() < dataset.outputs
        else:
            assert dataset.task == "regression"
            assert y.shape == (samples, dataset.outputs)
            assert y.dtype == np.float32
            assert np.isfinite(y).all()
    assert dataset.scale > 0
    assert dataset.outputs >= (2 if dataset.task == "classification" else 1)
    assert dataset.class_names is None or len(dataset.class_names) == dataset.outputs
    assert dataset.nbytes == sum(x.nbytes + y.nbytes for x, y, _ in parts)
    assert all(note.endswith(".") for note in dataset.notes)
    assert f"{dataset.train_samples:,} train" in dataset.summary()


@SETTINGS
@given(
    st.one_of(numbers, others).flatmap(values), st.one_of(numbers, others).flatmap(values), data_args, validations
)
def test_any_two_arrays(x, y, args, validation):
    attempt((x, y), data_args=args, validation=validation)


@SETTINGS
@given(matching(), data_args, validations)
def test_arrays_that_belong_together(data, args, validation):
    attempt(data, data_args=args, validation=validation)


@SETTINGS
@given(matching(), st.floats(0.01, 0.99), st.integers(0, 10))
def test_a_split_loses_no_sample_and_gives_none_twice(data, validation, seed):
    x = np.arange(len(data[0]), dtype=np.float32)[:, None] + 0.5  # a sample tells which one it is
    dataset = attempt((x, data[1]), validation=validation, seed=seed)
    whole = attempt((x, data[1]), validation=0)
    if dataset is None or whole is None:
        return
    both = np.concatenate([dataset.x_train, dataset.x_val])
    order = np.argsort(both[:, 0])
    np.testing.assert_array_equal(both[order], x)
    np.testing.assert_array_equal(np.concatenate([dataset.y_train, dataset.y_val])[order], whole.y_train)
    assert 0 <= dataset.val_samples - len(x) * validation < 1 + 1e-6


@SETTINGS
@given(
    st.recursive(
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(),
            st.floats(),
            st.complex_numbers(),
            st.text(max_size=5),
            st.binary(max_size=5),
        ),
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.tuples(inner, inner),
            st.dictionaries(st.text(max_size=2), inner, max_size=3),
        ),
        max_leaves=12,
    )
)
@example(data=("x.npz",))
@example(data="\ud800.npz")
@example(data="a" * 100_000)
@example(data="a" * 100_000 + ".npz")
@example(data=([10**400], [1]))
@example(data=([[float("nan")]], [[]]))
def test_any_python_value(data):
    assert attempt(data) is None or isinstance(data, list | tuple | str)


@SETTINGS
@given(
    st.dictionaries(
        st.sampled_from(["task", "classes", "remap_labels", "scale", "channels", "samples", "shape", "x"]),
        st.one_of(
            st.none(),
            st.text(max_size=3),
            st.integers(),
            st.floats(),
            st.lists(st.integers(), max_size=4),
            st.just(np.ones(3)),
        ),
        max_size=3,
    ),
    st.sampled_from(["arrays", "random", "digits"]),
    st.one_of(st.floats(), st.integers(), st.text(max_size=3), st.just(np.ones(3))),
    st.one_of(st.none(), st.floats(), st.integers()),
)
def test_any_settings(args, what, validation, batch_size):
    if what == "random":
        args = {"samples": 20, "shape": (3,), **args}
    data = (np.eye(20, dtype=np.float32), np.arange(20) % 4) if what == "arrays" else what
    dataset = attempt(data, data_args=args, validation=validation, batch_size=batch_size, batch_norm=True)
    if isinstance(data, str):
        try:
            told = describe(data, data_args=args, validation=validation)
        except DataError:
            assert dataset is None
        else:
            assert dataset is None or told.train_samples == dataset.train_samples


names = st.sampled_from(["x", "y", "x_train", "y_train", "x_val", "X", "../x", "a\nb", "<script>", "\ud800", "é"])
COLUMNS = ["?", "u1", "i4", "i8", "f4", "f8", "c16", "O", "U3"]
NAMES = ["a", "b", "<img src=x onerror=alert(1)>", "\n", "é", "", 0, None, ("a", "b"), 1.5, "a"]


@SETTINGS
@given(st.dictionaries(names, st.one_of(numbers, others).flatmap(values), max_size=3), st.integers(0, 200))
def test_any_npz_file(tmp_path_factory, arrays, cut):
    """Any names and arrays in it, and the whole of the file or its beginning."""
    buffer = io.BytesIO()
    with contextlib.suppress(ValueError, UnicodeError, OverflowError):  # what NumPy itself does not store
        np.savez(buffer, **arrays)
    path = tmp_path_factory.getbasetemp() / "any.npz"
    content = buffer.getvalue()
    path.write_bytes(content[: len(content) * cut // 100 + 1])
    attempt(str(path))


@SETTINGS
@given(st.binary(max_size=80), st.sampled_from([b"", b"PK\x03\x04", b"\x93NUMPY\x01\x00", b"\x80\x04"]))
def test_any_bytes_in_a_file(tmp_path_factory, content, start):
    for name in ("any.npz", "any.npy", "x.csv", "x.pkl"):
        path = tmp_path_factory.getbasetemp() / name
        path.write_bytes(start + content)
        assert attempt(str(path)) is None


@settings(SETTINGS, max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(COLUMNS)), min_size=1, max_size=4),
    st.integers(0, 8),
    st.data(),
)
def test_any_data_frame(columns, samples, data):
    """Any names of columns, twice the same too, and any types."""
    parts = [data.draw(npst.arrays(dtype, samples) if dtype != "O" else objects(samples)) for _, dtype in columns]
    frame = pd.DataFrame(dict(enumerate(parts)))
    frame.columns = pd.Index([name for name, _ in columns], dtype=object)
    labels = pd.Series(np.arange(samples) % 2)
    for y in (labels, frame.iloc[:, 0], labels.astype("category"), labels.astype("Int64").mask(labels > 0)):
        attempt((frame, y))


def objects(samples: int):
    return st.lists(
        st.one_of(st.none(), st.integers(), st.text(max_size=3)), min_size=samples, max_size=samples
    ).map(lambda values: np.array([*values, None], dtype=object)[:-1])


class Rude:
    """Data that fail whenever they are asked anything."""

    def __getattr__(self, name):
        raise RuntimeError(f"no {name}")

    def __repr__(self):
        raise RuntimeError("no words")


class Liar:
    """Data that say of themselves what no array can be."""

    shape, dtype, ndim = (10**30, -1), "float32", "two"

    def __array__(self, *_, **__):
        return [[1.0]]

    def __len__(self):
        return 10**18


def test_objects_that_fail_or_lie_are_refused():
    y = np.arange(4) % 2
    for thing in (Rude(), Liar(), [Rude()], type, Rude, iter([[1]])):
        for data in (thing, (thing, y), (np.eye(4), thing), (np.eye(4), y, thing, thing)):
            assert attempt(data) is None


@pytest.mark.parametrize("shape", [(10**12, 4), (4, 10**12), (10**9, 10, 10, 3)])
def test_arrays_that_claim_more_than_any_disk_are_refused_at_once(shape):
    claims = np.broadcast_to(np.float32(0.5), shape)
    labels = np.broadcast_to(np.int64(0), shape[:1])
    began = time.monotonic()
    assert attempt((claims, labels)) is None
    assert attempt((claims, labels), validation=0) is None
    assert time.monotonic() - began < 10  # it would take hours to look at all of it


@given(st.integers(1, 10**9), st.integers(1, 10**9))
def test_batches_add_up(samples, batch_size):
    last = last_batch(samples, batch_size)
    assert 1 <= last <= batch_size
    assert (samples - last) % batch_size == 0
