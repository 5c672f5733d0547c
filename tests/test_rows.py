"""Arrays of other libraries, and arrays larger than one would like to copy."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import tracemalloc

import numpy as np
import pandas as pd
import pytest

from accel_nb.data import load, store
from accel_nb.errors import DataError
from accel_nb.rows import Rows, chunks, look, numpy_array

Y = np.arange(40) % 4


def refusal(value) -> str:
    with pytest.raises(DataError) as caught:
        numpy_array(value, "x")
    return caught.value.why


# ---- data frames


def test_a_frame_of_one_type_is_shared():
    frame = pd.DataFrame(np.arange(12, dtype=np.float32).reshape(4, 3))
    assert np.shares_memory(numpy_array(frame, "x"), frame.to_numpy())


def test_a_frame_of_numbers_of_several_types():
    frame = pd.DataFrame({"a": [1, 2], "b": [0.5, 1.5], "c": [True, False]})
    np.testing.assert_array_equal(numpy_array(frame, "x"), [[1, 0.5, 1], [2, 1.5, 0]])


def test_columns_that_are_no_numbers_are_named():
    frame = pd.DataFrame({"a": [1, 2], "town": ["x", "y"], "day": pd.to_datetime(["2020-01-01", "2020-01-02"])})
    assert refusal(frame) == "Of its columns, 2 do not hold numbers: town, day."


def test_nullable_columns_and_their_gaps():
    full = pd.DataFrame({"a": pd.array([1, 2], "Int64"), "b": pd.array([True, False], "boolean")})
    np.testing.assert_array_equal(numpy_array(full, "x"), [[1, 1], [2, 0]])
    gaps = pd.DataFrame({"a": pd.array([1, None], "Int64")})
    np.testing.assert_array_equal(numpy_array(gaps, "x"), [[1], [np.nan]])
    np.testing.assert_array_equal(numpy_array(gaps["a"], "y"), [1, np.nan])
    assert numpy_array(full["a"], "y").dtype == np.int64
    assert numpy_array(full["b"], "y").dtype == bool


def test_a_frame_with_its_label_column_trains():
    frame = pd.DataFrame({"a": np.arange(40.0), "b": 1, "kind": [f"k{number}" for number in Y]})
    for labels in (frame["kind"], frame[["kind"]], frame["kind"].astype("category")):
        dataset = load((frame[["a", "b"]], labels), validation=0)
        assert dataset.class_names == ("k0", "k1", "k2", "k3")
        np.testing.assert_array_equal(dataset.y_train, Y)
        np.testing.assert_array_equal(dataset.x_train[:, 0], frame["a"])


# ---- other libraries


def test_anything_with_an_array_method():
    class Own:
        def __array__(self, dtype=None, copy=None):
            return np.ones((3, 2), np.float32)

    class Broken:
        def __array__(self, dtype=None, copy=None):
            raise RuntimeError("the device\nis gone")

    assert numpy_array(Own(), "x").shape == (3, 2)
    assert refusal(Broken()) == "It cannot be read as an array (the device is gone)."


def test_a_sparse_matrix_is_refused():
    from scipy.sparse import eye

    with pytest.raises(DataError, match=r"\.toarray\(\)"):
        numpy_array(eye(3), "x")


def test_lists_that_are_no_array():
    deep: list = []
    for _ in range(100):
        deep = [deep]
    own: list = []
    own.append(own)
    for value in (deep, own, [np.zeros((2, 2)), np.zeros((3, 3))], [[1], [2, 3]]):
        with pytest.raises(DataError):
            load((value, Y))


@pytest.mark.parametrize(
    ("framework", "code"),
    [
        (
            "torch",
            """
            x = torch.rand(40, 3, 5, 6, requires_grad=True)
            y = torch.arange(40) % 4
            half = x.to(torch.bfloat16)
            again = x.detach().numpy()
            listed = [part for part in x.detach()]
            """,
        ),
        (
            "tensorflow",
            """
            x = tensorflow.random.uniform((40, 3, 5, 6))
            y = tensorflow.range(40) % 4
            half = tensorflow.cast(x, tensorflow.bfloat16)
            again = x.numpy()
            listed = list(x)
            """,
        ),
    ],
)
def test_tensors_of_the_frameworks(framework, code):
    """In a process of its own: the kernel, of which these tests are a picture, never imports a framework."""
    if framework not in _installed():
        pytest.skip(f"{framework} is not installed")
    script = f"import {framework}, numpy as np\nfrom accel_nb.data import load\n" + textwrap.dedent(code)
    script += textwrap.dedent("""
        for given in (x, listed):
            dataset = load((given, y), validation=0)
            assert dataset.input_shape == (5, 6, 3), dataset
            np.testing.assert_array_equal(dataset.x_train, again.transpose(0, 2, 3, 1))
            assert dataset.y_train.tolist() == [0, 1, 2, 3] * 10
        np.testing.assert_allclose(load((half, y), validation=0).x_train, again.transpose(0, 2, 3, 1), atol=0.01)
        print("done")
    """)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.stdout.strip() == "done", ended.stderr[-2000:]


def _installed() -> set[str]:
    import importlib.util

    return {name for name in ("torch", "tensorflow") if importlib.util.find_spec(name)}


# ---- rows


def test_a_look_at_an_array_sees_what_numpy_sees():
    array = np.random.default_rng(0).normal(size=(3000, 500))  # of several chunks
    assert sum(1 for _ in chunks(array)) > 1
    array[2500, 17] = np.nan
    array[2999, 499] = np.inf
    seen = look(array)
    assert (seen.low, seen.high) == (array[np.isfinite(array)].min(), array[np.isfinite(array)].max())
    assert (seen.not_finite, seen.first_not_finite) == (2, (2500, 17))
    assert np.isnan(seen.first_value)
    assert not seen.whole
    assert look(np.full((3, 2), np.nan)).not_finite == 6
    assert look(np.array([[1.0, -2.0]])).whole


def test_picking_twice_reads_the_right_rows():
    source = np.arange(20, dtype=np.int16)[:, None]
    rows = Rows(source, np.dtype(np.float32)).pick(np.arange(0, 20, 2)).pick(np.array([1, 3]))
    assert rows.shape == (2, 1)
    assert rows.nbytes == 8
    np.testing.assert_array_equal(rows.read(), np.array([[2], [6]], np.float32))


def peak(action) -> int:
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.fixture
def large(tmp_path):
    """A memory-mapped file of 300 MB that takes no room on the disk: all zeros but the corners."""
    array = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float32, (100_000, 750))
    array[0, 0], array[-1, -1] = 0.25, 0.75
    return array


def test_a_file_of_300_mb_is_checked_and_split_in_little_memory(large):
    y = np.arange(len(large)) % 2
    kept = []
    used = peak(lambda: kept.append(load((large, y))))
    dataset = kept[0]
    assert dataset.nbytes > 300e6
    assert dataset.summary() == "80,000 train · 20,000 validation · 2 classes"
    assert used < 40e6
    assert isinstance(load((large, y), validation=0).x_train, np.memmap)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_large_file_is_stored_in_little_memory_also_when_it_is_cast(tmp_path, dtype):
    array = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", dtype, (60_000, 1, 16, 16))
    array[7, 0, 3, 4] = 0.5
    dataset = load((array, np.arange(len(array)) % 2), validation=0.1, data_args={"channels": "first"})
    used = peak(lambda: store(dataset, tmp_path / "run"))
    assert used < 40e6
    stored = np.load(tmp_path / "run" / "x_train.npy", mmap_mode="r")
    assert (stored.dtype, stored.shape) == (np.float32, (54_000, 16, 16, 1))
    np.testing.assert_array_equal(stored[:100], dataset.x_train[:100])
