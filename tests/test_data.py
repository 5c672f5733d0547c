"""Loading, splitting and storing data, whatever they are."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from accel_nb.data import last_batch, load, split, store
from accel_nb.errors import DataError

X = np.random.default_rng(0).random((50, 6), np.float32)
Y = np.arange(50) % 5


def refusal(data, **kwargs) -> DataError:
    with pytest.raises(DataError) as caught:
        load(data, **kwargs)
    return caught.value


# ---- the split


def test_digits_split_into_1437_and_360():
    dataset = load("digits")
    assert dataset.summary() == "1,437 train · 360 validation · 10 classes"
    assert dataset.class_names == tuple("0123456789")
    assert dataset.label == "digits · 1,797 real 8×8 scans, built in"
    assert (dataset.x_train.shape, dataset.x_val.shape) == ((1437, 28, 28, 1), (360, 28, 28, 1))
    assert dataset.nbytes == 1797 * (784 + 8)


@pytest.mark.parametrize("samples", [2, 3, 10, 30, 97])
@pytest.mark.parametrize("fraction", [1e-300, 0.01, 0.1, 0.2, 0.25, 0.499])
@pytest.mark.parametrize("classes", [None, 1, 2, 3, 7])
def test_a_split_is_disjoint_complete_and_of_the_right_size(samples, fraction, classes):
    labels = None if classes is None else np.arange(samples) % classes
    train, val = split(samples, fraction, 0, labels)
    np.testing.assert_array_equal(np.sort(np.concatenate([train, val])), np.arange(samples))
    assert len(val) - 1 < samples * fraction <= len(val)
    assert np.all(np.diff(train) > 0)
    assert np.all(np.diff(val) > 0)


def test_a_split_is_shuffled_by_the_seed():
    one, again, other = (split(1000, 0.2, seed)[1].tolist() for seed in (0, 0, 1))
    assert one == again != other
    assert one != list(range(one[0], one[0] + 200))


def test_each_class_gives_its_share_to_validation():
    labels = np.repeat([0, 1, 2], [900, 90, 10])
    _, val = split(1000, 0.1, 3, labels)
    assert np.bincount(labels[val]).tolist() == [90, 9, 1]


def test_each_class_keeps_a_training_sample():
    labels = np.repeat(np.arange(10), 2)
    train, val = split(20, 0.5, 0, labels)
    assert sorted(labels[train]) == sorted(labels[val]) == list(range(10))


def test_a_class_of_one_sample_makes_the_split_plain():
    dataset = load((X, np.append(Y[:-1], 5)), validation=0.9)
    assert (dataset.train_samples, dataset.val_samples) == (5, 45)
    assert "no training sample is left" in dataset.notes[-1]


def test_x_and_y_stay_together():
    x = np.arange(50, dtype=np.float32)[:, None] + 0.5
    dataset = load((x, Y))
    np.testing.assert_array_equal(dataset.x_train[:, 0].astype(int) % 5, dataset.y_train)
    np.testing.assert_array_equal(dataset.x_val[:, 0].astype(int) % 5, dataset.y_val)
    assert len(np.unique(np.concatenate([dataset.x_train, dataset.x_val]))) == 50


@pytest.mark.parametrize("validation", [0, None, 0.0])
def test_no_validation(validation):
    dataset = load((X, Y), validation=validation)
    assert (dataset.x_val, dataset.y_val, dataset.val_samples) == (None, None, 0)
    assert dataset.summary() == "50 train · no validation · 5 classes"


@pytest.mark.parametrize("validation", [1, 1.0, -0.1, 2, float("nan"), "0.2", True, [0.2], 1j])
def test_a_share_that_is_none(validation):
    error = refusal((X, Y), validation=validation)
    assert (error.field, error.why) == ("validation", "It must be a share from 0 to below 1.")


def test_a_split_that_leaves_nothing_to_train_on():
    error = refusal((X[:3], Y[:3]), validation=0.9)
    assert error.field == "validation"
    assert error.why == "Of 3 samples it takes 3 for validation, which leaves none to train on."
    assert load((X[:3], Y[:3]), validation=0.1).summary() == "2 train · 1 validation · 3 classes"


# ---- the forms of data


def test_a_validation_part_of_its_own():
    dataset = load((X[:40], Y[:40], X[40:], Y[40:]), validation=0.5)
    assert dataset.summary() == "40 train · 10 validation · 5 classes"
    np.testing.assert_array_equal(dataset.x_val, X[40:])
    assert dataset.name == "own arrays"
    assert dataset.label == "own arrays · 50 samples of 6"
    dataset = load((X[:40], Y[:40], X[40:], Y[40:]), validation=0)
    assert dataset.val_samples == 0
    assert dataset.notes == ("The validation part is left out because validation is 0.",)


def test_pairs_as_keras_gives_them():
    dataset = load(((X[:40], Y[:40]), (X[40:], Y[40:])))
    assert dataset.summary() == "40 train · 10 validation · 5 classes"
    assert "read as ((x, y), (x_val, y_val))" in dataset.notes[0]


def test_lists():
    dataset = load([X.tolist(), Y.tolist()], validation=0)
    np.testing.assert_array_equal(dataset.x_train, X)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (X, "does not say which part of it is x"),
        (None, "does not say"),
        (7, "does not say"),
        ({"x": X, "y": Y}, "does not say"),
        ((X,), "It has 1 parts"),
        ((X, Y, X), "It has 3 parts"),
        ((), "It has 0 parts"),
        ((X[:40], X[40:], Y[:40], Y[40:]), "These are (x, x_val, y, y_val)"),
        ((X, Y, X, None), "Only one of x_val and y_val"),
    ],
    ids=str,
)
def test_forms_that_are_none(data, words):
    error = refusal(data)
    assert error.field == "data"
    assert words in error.why


def test_an_unknown_name_lists_the_names():
    error = refusal("fashion mnist")
    assert error.do == 'Did you mean "fashion_mnist"?'
    assert all(name in error.here for name in ("digits", "mnist", "fashion_mnist", "cifar10", "random", ".npz"))
    assert "Pass one of the names" in refusal("<b>zebra</b>").do
    assert refusal("data.csv").why == "There is no data set of this name."


@pytest.mark.parametrize(
    ("keys", "val"),
    [
        (("x", "y"), False),
        (("X", "Y"), False),
        (("x_train", "y_train"), False),
        (("x_train", "y_train", "x_val", "y_val"), True),
        (("x", "y", "x_test", "y_test"), True),
    ],
)
def test_an_npz_file(tmp_path, keys, val):
    path = tmp_path / "own data.npz"
    np.savez(path, **dict(zip(keys, (X[:40], Y[:40], X[40:], Y[40:]), strict=False)))
    for given in (path, str(path)):
        dataset = load(given, validation=0.25)
        assert dataset.summary() == f"{40 if val else 30} train · 10 validation · 5 classes"
        assert dataset.name == "own data.npz"


def test_validation_comes_before_test_in_an_npz_file(tmp_path):
    np.savez(tmp_path / "a.npz", x=X, y=Y, x_val=X[:7], y_val=Y[:7], x_test=X[:9], y_test=Y[:9])
    assert load(tmp_path / "a.npz").val_samples == 7


def test_npz_files_that_cannot_be_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("pickled.npz", x=np.array([{"a": 1}], object), y=Y)
    np.savez("keys.npz", images=X, labels=Y)
    np.savez("half.npz", x=X, y=Y, x_val=X)
    np.savez("empty.npz")
    Path("text.npz").write_text("no zip")
    Path("cut.npz").write_bytes(b"PK\x03\x04")
    Path("nothing.npz").touch()
    Path("folder.npz").mkdir()
    np.save("array.npy", X)
    shutil.copy("array.npy", "array.npz")
    for name, words in {
        "pickled.npz": "it holds pickled objects",
        "keys.npz": "It holds the arrays images, labels.",
        "half.npz": "It holds the arrays x, y, x_val.",
        "empty.npz": "It holds the arrays nothing.",
        "text.npz": "cannot be read",
        "cut.npz": "cannot be read",
        "nothing.npz": "cannot be read",
        "folder.npz": "cannot be read",
        "array.npz": "cannot be read",
        "absent.npz": "There is no such file.",
        "array.npy": "not the path of an .npz file",
        "a\0b.npz": "cannot be read",
        "~no-such-user/a.npz": "cannot be read",
    }.items():
        error = refusal(name)
        assert (error.field, error.passed) == ("data", name)
        assert words in error.why, name
    assert "not the path" in refusal(tmp_path).why


@pytest.mark.parametrize(
    ("kwargs", "field"),
    [
        ({"seed": -1}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"seed": True}, "seed"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 2.5}, "batch_size"),
        ({"data_args": 7}, "data_args"),
        ({"data_args": {"clases": 5}}, "data_args"),
        ({"data_args": {7: 5}}, "data_args"),
        ({"data_args": {"task": "clustering"}}, "task"),
        ({"data_args": {"task": X}}, "task"),
        ({"data_args": {"channels": "middle"}}, "channels"),
        ({"data_args": {"remap_labels": "yes"}}, "remap_labels"),
        ({"data_args": {"classes": 1}}, "classes"),
        ({"data_args": {"classes": "5"}}, "classes"),
        ({"data_args": {"scale": 0}}, "scale"),
        ({"data_args": {"scale": "255"}}, "scale"),
        ({"data_args": {"scale": float("inf")}}, "scale"),
        ({"data_args": {"task": "regression", "classes": 5}}, "data_args"),
    ],
)
def test_settings_that_are_none(kwargs, field):
    assert refusal((X, Y), **kwargs).field == field


def test_a_setting_with_a_slip_is_corrected():
    error = refusal((X, Y), data_args={"clases": 5})
    assert error.do == 'Did you mean "classes"?'
    assert "remap_labels" in error.here
    assert "data_args may hold: nothing." in refusal("digits", data_args={"classes": 5}).here


def test_a_setting_of_none_is_not_set():
    assert load((X, Y), data_args={"classes": None, "task": None}).outputs == 5


# ---- batches


@pytest.mark.parametrize("batch_size", [1, 2, 7, 32, 33, 100])
@pytest.mark.parametrize("samples", [1, 2, 33, 64, 65])
def test_the_last_batch_is_that_of_the_plain_loop(samples, batch_size):
    batches = [min(batch_size, samples - start) for start in range(0, samples, batch_size)]
    assert last_batch(samples, batch_size) == batches[-1]


def test_a_batch_larger_than_the_set_is_a_note():
    note = load((X, Y), batch_size=128).notes[-1]
    assert note.startswith("The batch is smaller than asked: 128 are asked for, the training set has 40 samples")


def test_a_last_batch_of_one_is_a_note_where_there_is_batch_normalisation():
    assert "holds one sample" in load((X, Y), batch_size=39, batch_norm=True).notes[-1]
    assert load((X, Y), batch_size=39).notes == load((X, Y), batch_size=20, batch_norm=True).notes == ()


# ---- stored for the worker


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", ["digits", "channels first", "regression"])
def test_what_is_stored_is_what_was_loaded(tmp_path, shared, kind):
    data = {
        "digits": "digits",
        "channels first": (np.random.default_rng(0).random((50, 3, 5, 6)), Y),
        "regression": (X, X[:, :2]),
    }[kind]
    dataset = load(data)
    paths = store(dataset, tmp_path / "run" / "data", shared=tmp_path / "shared" if shared else None)
    assert files(tmp_path / "run" / "data") == ["x_train.npy", "x_val.npy", "y_train.npy", "y_val.npy"]
    for path in paths:
        stored, array = np.load(path, mmap_mode="r"), getattr(dataset, path.stem)
        assert stored.dtype == array.dtype
        assert stored.flags.c_contiguous
        np.testing.assert_array_equal(stored, array)


def test_without_validation_two_files(tmp_path):
    store(load((X, Y)), tmp_path)
    store(load((X, Y), validation=0), tmp_path)  # those of the earlier plan must not stay
    assert files(tmp_path) == ["x_train.npy", "y_train.npy"]


def test_runs_of_the_same_data_take_their_room_once(tmp_path):
    shared = tmp_path / "shared"
    for number in range(3):
        store(load("digits"), tmp_path / str(number), shared=shared)
    assert len(files(shared)) == 4
    for name in ("x_train.npy", "x_val.npy", "y_train.npy", "y_val.npy"):
        numbers = {(tmp_path / str(run) / name).stat().st_ino for run in range(3)}
        assert len(numbers) == 1
        assert (tmp_path / "0" / name).stat().st_nlink == 4
    store(load("digits", seed=1), tmp_path / "3", shared=shared)
    assert len(files(shared)) == 8


def test_storing_again_in_the_same_folder_replaces_the_files(tmp_path):
    for seed in (0, 1, 1):
        dataset = load((X, Y), seed=seed)
        store(dataset, tmp_path / "run", shared=tmp_path / "shared")
        np.testing.assert_array_equal(np.load(tmp_path / "run" / "x_train.npy"), dataset.x_train)
    assert files(tmp_path / "run") == ["x_train.npy", "x_val.npy", "y_train.npy", "y_val.npy"]


def test_where_links_fail_files_are_copied(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)  # as on a mounted drive
    dataset = load("digits")
    store(dataset, tmp_path / "run", shared=tmp_path / "shared")
    assert (tmp_path / "run" / "x_train.npy").stat().st_nlink == 1
    np.testing.assert_array_equal(np.load(tmp_path / "run" / "x_train.npy"), dataset.x_train)


def test_a_damaged_shared_file_is_written_anew(tmp_path):
    dataset = load((X, Y))
    store(dataset, tmp_path / "1", shared=tmp_path / "shared")
    for path in (tmp_path / "shared").iterdir():
        path.unlink()
        path.write_bytes(b"cut")
    store(dataset, tmp_path / "2", shared=tmp_path / "shared")
    np.testing.assert_array_equal(np.load(tmp_path / "2" / "x_val.npy"), dataset.x_val)


@pytest.mark.skipif(os.name == "nt", reason="files are not made read-only on Windows")
def test_shared_files_are_protected_and_go_with_their_run(tmp_path):
    store(load((X, Y)), tmp_path / "run", shared=tmp_path / "shared")
    assert not (tmp_path / "run" / "x_train.npy").stat().st_mode & 0o222
    shutil.rmtree(tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("shared", [False, True])
def test_a_full_disk_leaves_no_half_file(tmp_path, monkeypatch, shared):
    from accel_nb.rows import Rows

    dataset = load((X, Y))
    whole = Rows.pieces

    def pieces(rows):
        yield from whole(rows)
        raise OSError(errno.ENOSPC, "No space left on device")

    if shared:
        dataset.rows_train.digest()
    monkeypatch.setattr(Rows, "pieces", pieces)
    with pytest.raises(OSError, match="No space left"):
        store(dataset, tmp_path / "run", shared=tmp_path / "shared" if shared else None)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


# ---- real pictures of another source

MNIST = Path(__file__).parents[2] / "shared" / "data" / "mnist10k.npz"


@pytest.mark.skipif(not MNIST.exists(), reason="the 10,000 MNIST pictures are not beside this folder")
def test_ten_thousand_real_digits():
    dataset = load(MNIST)
    assert dataset.summary() == "8,000 train · 2,000 validation · 10 classes"
    assert (dataset.input_shape, dataset.scale, dataset.x_train.dtype) == ((28, 28, 1), 255.0, np.uint8)
    shares = np.bincount(dataset.y_val) / np.bincount(np.concatenate([dataset.y_train, dataset.y_val]))
    np.testing.assert_allclose(shares, 0.2, atol=0.001)
