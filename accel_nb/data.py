"""The data of a run: named sets and the user's own arrays, checked, cast, split, and stored for the worker.

>>> dataset = load("digits")
>>> dataset.x_train.shape, dataset.y_train.shape, dataset.summary()
((1437, 28, 28, 1), (1437,), '1,437 train · 360 validation · 10 classes')
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from accel_nb.checks import features
from accel_nb.datasets import SOURCES, is_here, load_named, random_data, random_settings
from accel_nb.download import Progress
from accel_nb.errors import DataError
from accel_nb.forms import NAMED, check_arguments, check_name, four_parts, read_npz
from accel_nb.labels import Labels, targets
from accel_nb.rows import Rows, size_text

__all__ = ["NAMED", "Dataset", "Description", "describe", "last_batch", "load", "split", "store"]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Data that can be trained on as they are.

    x is `(samples, height, width, channels)` or `(samples, features)`, float32, or uint8 to be divided by `scale`
    in the program. y is int64 `(samples,)` in 0..outputs-1 for task "classification", float32 `(samples, outputs)`
    for "regression". `x_val` and `y_val` are None where there is no validation. `notes` are sentences about each
    conversion.

    `x_train` and `x_val` are read when they are first asked for; the sizes and `store` work without that, so that
    a file larger than the memory can be trained on. The user's arrays are shared, not copied.
    """

    task: str
    outputs: int
    scale: float
    name: str
    label: str
    y_train: np.ndarray = field(repr=False)
    y_val: np.ndarray | None = field(repr=False)
    rows_train: Rows = field(repr=False)
    rows_val: Rows | None = field(repr=False)
    class_names: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()

    @cached_property
    def x_train(self) -> np.ndarray:
        return self.rows_train.read()

    @cached_property
    def x_val(self) -> np.ndarray | None:
        return None if self.rows_val is None else self.rows_val.read()

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return self.rows_train.shape[1:]

    @property
    def train_samples(self) -> int:
        return len(self.rows_train)

    @property
    def val_samples(self) -> int:
        return 0 if self.rows_val is None else len(self.rows_val)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, as they are stored and as they lie on a device."""
        arrays = [self.rows_train, self.rows_val, self.y_train, self.y_val]
        return sum(array.nbytes for array in arrays if array is not None)

    def summary(self) -> str:
        kinds = f"{self.outputs:,} classes"
        if self.task == "regression":
            kinds = "1 target" if self.outputs == 1 else f"{self.outputs:,} targets"
        val = f"{self.val_samples:,} validation" if self.val_samples else "no validation"
        return f"{self.train_samples:,} train · {val} · {kinds}"


@dataclass(frozen=True)
class Description:
    """A data set as it is known without loading it.

    `samples` counts all of them; `train_samples`, `val_samples` and `nbytes` are those of the Dataset that `load`
    will give. `available` is True where nothing has to be downloaded first; else `why` says what will happen.
    """

    label: str
    samples: int
    input_shape: tuple[int, ...]
    classes: int
    scale: float
    train_samples: int
    val_samples: int
    available: bool = True
    why: str = ""

    @property
    def nbytes(self) -> int:
        return (self.train_samples + self.val_samples) * (math.prod(self.input_shape) + 8)


def describe(
    name: str, *, data_args: Mapping[str, Any] | None = None, validation: float | None = 0.2
) -> Description:
    """What is known of a named set at once, without loading it. Raises DataError as `load` does."""
    check_name(name)
    args, fraction = check_arguments(name, data_args), _fraction(validation)
    if name == "random":
        samples, shape, classes = random_settings(args)
        label, scale, own, why = _random_label(samples, shape), 255.0, 0, ""
    else:
        source = SOURCES[name]
        samples, shape, classes = source.samples, source.input_shape, len(source.class_names)
        label, scale, own = source.label, source.scale, source.own_validation
        why = "" if is_here(name) else f"It is downloaded on first use ({source.download_bytes / 1e6:.0f} MB)."
    val = own or _validation_count(samples, fraction)
    train, val = samples - val, val if fraction else 0
    return Description(label, samples, shape, classes, scale, train, val, not why, why)


def load(
    data: Any,
    *,
    data_args: Mapping[str, Any] | None = None,
    validation: float | None = 0.2,
    seed: int = 0,
    batch_size: int | None = None,
    batch_norm: bool = False,
    progress: Progress | None = None,
) -> Dataset:
    """Data by name, from an `.npz` file or from arrays, checked and split.

    Parameters
    ----------
    data
        A name of NAMED; the path of an `.npz` file (x, y or x_train, y_train, and x_val, y_val or x_test, y_test);
        `(x, y)` or `(x, y, x_val, y_val)` of arrays, lists, data frames or tensors.
    data_args
        For own arrays: `task` "classification" or "regression", `classes`, `remap_labels` True, `scale` (what x is
        divided by), `channels` "first" or "last". For "random": `samples`, `shape`, `classes`.
    validation
        The share from 0 to below 1 of the samples that is kept for validation, rounded up to whole samples; 0 or
        None for none. Samples are picked by `seed`, from each class its share where each class has at least two.
        Data with a validation part of their own keep it, unless this is 0.
    batch_size, batch_norm
        Only for notes: what the sizes of the batches will mean for the run.
    progress
        Is called with a line of text while something is downloaded.

    Raises DataError for data that no model should see, in one sentence, before any device is used.
    """
    fraction = _fraction(validation)
    if not isinstance(seed, int | np.integer) or isinstance(seed, bool) or seed < 0:
        raise DataError("seed", seed, "It must be a whole number from 0 on.", "Pass for example 0.")
    if batch_size is not None and (
        not isinstance(batch_size, int | np.integer) or isinstance(batch_size, bool) or batch_size < 1
    ):
        raise DataError("batch_size", batch_size, "It must be a whole number from 1 on.", "Pass for example 128.")
    args = check_arguments(data, data_args)
    if isinstance(data, str) and not data.lower().endswith((".npz", ".npy")):
        dataset = _named_set(data, args, fraction, int(seed), progress)
    else:
        dataset = _own_set(data, args, fraction, int(seed))
    if batch_size is None:
        return dataset
    extra = _batch_notes(dataset.train_samples, int(batch_size), batch_norm)
    return replace(dataset, notes=dataset.notes + extra)


def store(
    dataset: Dataset, folder: str | os.PathLike[str], shared: str | os.PathLike[str] | None = None
) -> list[Path]:
    """Write the arrays into `folder`: `x_train.npy`, `y_train.npy` and, with validation, `x_val.npy`, `y_val.npy`.

    Returns their paths. With `shared`, each content is kept once in that folder under its checksum, and the files
    are hard links to it (copies where the file system has no links), so that many runs of the same data take their
    room once. Every file is written beside its place and renamed. Raises OSError where a folder cannot be written.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    parts = {"x_train": dataset.rows_train, "y_train": _rows(dataset.y_train)}
    if dataset.rows_val is not None and dataset.y_val is not None:
        parts |= {"x_val": dataset.rows_val, "y_val": _rows(dataset.y_val)}
    paths = []
    for name, rows in parts.items():
        path = folder / f"{name}.npy"
        if shared is None:
            rows.write(path)
        else:
            rows.write_shared(path, Path(shared))
        paths.append(path)
    for name in {"x_val", "y_val"} - set(parts):  # of an earlier plan in the same folder
        (folder / f"{name}.npy").unlink(missing_ok=True)
    return paths


def last_batch(samples: int, batch_size: int) -> int:
    """The size of an epoch's last batch, from 1 to `batch_size`.

    >>> last_batch(33, 32), last_batch(64, 32), last_batch(5, 32)
    (1, 32, 5)
    """
    return samples % batch_size or batch_size


def _validation_count(samples: int, fraction: float) -> int:
    """How many of `samples` are kept for validation: the fraction, rounded up. DataError if none would be left.

    >>> _validation_count(1797, 0.2), _validation_count(30, 0.1), _validation_count(10, 0)
    (360, 3, 0)
    """
    # 30 * 0.1 is a little more than 3 in binary, so the product is rounded; but any share is at least one sample.
    count = max(math.ceil(round(samples * fraction, 9)), 1 if fraction else 0)
    if count >= samples:
        why = f"Of {samples:,} samples it takes {count:,} for validation, which leaves none to train on."
        raise DataError("validation", fraction, why, "Pass a smaller share, 0 for none, or more samples.")
    return count


def split(
    samples: int, fraction: float, seed: int, labels: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers for training and for validation, both ascending (a file is read in order), picked by `seed`.

    With integer `labels` (samples,) of which each has at least two samples, validation takes its share of each
    class, and leaves each at least one; else it takes any. Raises DataError where nothing is left to train on.
    """
    count = _validation_count(samples, fraction)
    order = np.random.default_rng(seed).permutation(samples)
    picked = np.zeros(samples, bool)
    kept = None if labels is None else np.unique(labels, return_inverse=True, return_counts=True)
    if kept is None or kept[2].min() < 2 or len(kept[2]) > samples - count:
        picked[order[:count]] = True
    else:
        _, place, sizes = kept
        shares = _shares(sizes, count)
        order = order[np.argsort(place[order], kind="stable")]  # by class, shuffled within each
        rank = np.arange(samples) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        picked[order[rank < np.repeat(shares, sizes)]] = True
    return np.flatnonzero(~picked), np.flatnonzero(picked)


def _shares(sizes: np.ndarray, count: int) -> np.ndarray:
    """Share out `count` over classes in proportion to their sizes, largest remainders first; each keeps one."""
    ideal = sizes * (count / sizes.sum())
    shares = np.minimum(np.floor(ideal).astype(np.int64), sizes - 1)
    while (missing := count - int(shares.sum())) > 0:
        order = np.argsort(-(ideal - shares), kind="stable")
        open_ones = order[shares[order] < sizes[order] - 1][:missing]
        shares[open_ones] += 1
    return shares


def _fraction(validation: Any) -> float:
    if validation is None:
        return 0.0
    number = isinstance(validation, int | float | np.integer | np.floating) and not isinstance(validation, bool)
    if not number or not 0 <= validation < 1:
        do = "Pass for example 0.2 for a fifth of the samples, or 0 for none."
        raise DataError("validation", validation, "It must be a share from 0 to below 1.", do)
    return float(validation)


def _named_set(name: str, args: dict[str, Any], fraction: float, seed: int, progress: Progress | None) -> Dataset:
    check_name(name)
    names: tuple[str, ...] | None = None
    if name == "random":
        samples, shape, classes = random_settings(args)
        loaded = random_data(samples, shape, classes, seed)
        label, scale = _random_label(samples, shape), 255.0
    else:
        source = SOURCES[name]
        loaded = load_named(name, progress)
        label, scale, names, classes = source.label, source.scale, source.class_names, len(source.class_names)
    # With validation=0 a test part of the set is neither trained on nor validated on.
    x_val = None if loaded.x_val is None or not fraction else _rows(loaded.x_val)
    labels = Labels(loaded.y, None if x_val is None else loaded.y_val, "classification", classes, names)
    x = _rows(loaded.x)
    return _finish(x, x_val, labels, split_by=(fraction, seed), notes=[], name=name, label=label, scale=scale)


def _own_set(data: Any, args: dict[str, Any], fraction: float, seed: int) -> Dataset:
    notes: list[str] = []
    name = "own arrays"
    if isinstance(data, str | os.PathLike):
        path = Path(data)
        name, data = path.name, read_npz(path)
    x, y, x_val, y_val = four_parts(data, notes)
    if x_val is not None and not fraction:
        x_val = y_val = None
        notes.append("The validation part is left out because validation is 0.")
    scale = args.get("scale")
    rows, rows_val, divide_by = features(
        x, x_val, scale=None if scale is None else float(scale), channels=args.get("channels"), notes=notes
    )
    labels = targets(
        y,
        y_val,
        task=args.get("task"),
        classes=args.get("classes"),
        remap=args.get("remap_labels", False),
        notes=notes,
    )
    for one, other, what in ((rows, labels.y, ("x", "y")), (rows_val, labels.y_val, ("x_val", "y_val"))):
        if one is not None and other is not None and len(one) != len(other):
            why = f"{what[0]} has {len(one):,} samples, {what[1]} has {len(other):,}."
            raise DataError(what[1], other, why, "Pass one label for each sample, in the same order.")
    label = f"{name} · {len(rows) + len(rows_val or ()):,} samples of {size_text(rows.shape[1:])}"
    by = (fraction, seed)
    return _finish(rows, rows_val, labels, split_by=by, notes=notes, name=name, label=label, scale=divide_by)


def _finish(
    rows: Rows,
    rows_val: Rows | None,
    labels: Labels,
    *,
    split_by: tuple[float, int],
    notes: list[str],
    **about: Any,
) -> Dataset:
    """The Dataset; a validation part is split off by (fraction, seed) where one is wanted and missing."""
    y, y_val = labels.y, labels.y_val
    fraction, seed = split_by
    if rows_val is None and fraction:
        train, val = split(len(rows), fraction, seed, y if labels.task == "classification" else None)
        rows, rows_val, y, y_val = rows.pick(train), rows.pick(val), y[train], y[val]
        if labels.task == "classification" and (missing := len(np.setdiff1d(y_val, y))):
            notes.append(
                f"Validation holds {missing:,} of the classes that no training sample is left of, because some "
                "classes have a single sample."
            )
    return Dataset(
        task=labels.task,
        outputs=labels.outputs,
        y_train=y,
        y_val=y_val,
        rows_train=rows,
        rows_val=rows_val,
        class_names=labels.class_names,
        notes=tuple(notes),
        **about,
    )


def _batch_notes(samples: int, batch_size: int, batch_norm: bool) -> tuple[str, ...]:
    if batch_size > samples:
        note = (
            f"The batch is smaller than asked: {batch_size:,} are asked for, the training set has {samples:,} "
            "samples, so that each epoch is one step."
        )
        return (note,)
    if batch_norm and last_batch(samples, batch_size) == 1:
        note = (
            f"The last batch of each epoch holds one sample ({samples:,} samples in batches of {batch_size:,}), "
            "of which batch normalisation can take no statistics."
        )
        return (note,)
    return ()


def _rows(array: np.ndarray) -> Rows:
    return Rows(array, array.dtype)


def _random_label(samples: int, shape: tuple[int, ...]) -> str:
    return f"random · {samples:,} samples of {size_text(shape)}, for speed work"
