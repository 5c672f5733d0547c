"""The checks of a user's own y: classes or quantities, in which form, and whether every label has its class.

A label outside 0..C-1 spoils a GPU process long after the mistake was made; here it is one sentence at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from accel_nb.checks import refuse_not_finite
from accel_nb.errors import DataError
from accel_nb.rows import chunks, look, numpy_array

MANY = 50  # more different labels than this, and more than half as many as samples, are hardly classes
ASK_TASK = 'Say which: data_args={"task": "classification"} or data_args={"task": "regression"}.'


@dataclass(frozen=True)
class Labels:
    """The labels of a data set as a program takes them.

    y and y_val are int64 (samples,) in 0..outputs-1 for classification, float32 (samples, outputs) for regression.
    """

    y: np.ndarray
    y_val: np.ndarray | None
    task: str
    outputs: int
    class_names: tuple[str, ...] | None = None


def targets(
    y: Any, y_val: Any | None, *, task: str | None, classes: int | None, remap: bool, notes: list[str]
) -> Labels:
    """What y and y_val mean, checked.

    `task`, `classes` and `remap` are the user's word in `data_args`; None, None, False where there is none.
    Sentences about each conversion are added to `notes`. Raises DataError.
    """
    if classes is not None or remap:
        task = task or "classification"
    train = _plain(numpy_array(y, "y"), "y", notes)
    val = None if y_val is None else _plain(numpy_array(y_val, "y_val"), "y_val", [])
    if val is not None and _family(val) != _family(train):
        why = f"It holds {_family(val)}, y holds {_family(train)}."
        raise DataError("y_val", val, why, "Prepare both in the same way.")
    task = task or _task(train)
    if task == "regression":
        return _quantities(train, val, notes)
    coded = _as_labels(train, "y", notes)
    coded_val = None if val is None else _as_labels(val, "y_val", [])
    if train.ndim == 2 and classes is None and not remap:
        classes = train.shape[1]  # one-hot: its columns are the classes, also those without a sample
    if coded.dtype.kind in "OU":
        return _named(coded, coded_val, classes, notes)
    if coded.dtype.kind == "b":
        notes.append("y: False and True became the classes 0 and 1.")
        labels = _numbered(coded.astype(np.int64), coded_val, classes, False, notes)
        return replace(labels, class_names=("False", "True")) if labels.outputs == 2 else labels
    return _numbered(coded, coded_val, classes, remap, notes)


def _plain(array: np.ndarray, name: str, notes: list[str]) -> np.ndarray:
    """Refuse what cannot be labels by type, size and dimensions; (samples, 1) becomes (samples,)."""
    if array.ndim == 0:
        raise DataError(name, array, "It is a single value, not an array of labels.", "Pass one label per sample.")
    kind = array.dtype.kind
    if kind == "c":
        raise DataError(name, array, "Complex numbers cannot be labels or targets.", "Pass real numbers.")
    if kind not in "biufOUS":
        why = f"Values of type {array.dtype} cannot be labels."
        raise DataError(name, array, why, "Pass whole numbers, text or, for regression, floating-point numbers.")
    if array.ndim > 2:
        why = f"It has {array.ndim} dimensions; one label or one row of targets per sample is supported."
        raise DataError(name, array, why, "Pass labels of shape (samples,).")
    if 0 in array.shape:
        raise DataError(name, array, "It is empty.", "Pass one label per sample.")
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
        notes.append("y: (samples, 1) was squeezed to (samples,).")
    if kind in "OS":
        array = _text(array, name)
    if kind in "OSU" and array.ndim == 2:
        raise DataError(name, array, "It holds several texts per sample.", "Pass one label per sample.")
    if kind == "f":
        refuse_not_finite(array, name, look(array))
    return array


def _text(array: np.ndarray, name: str) -> np.ndarray:
    """Text of bytes or objects as objects of type str."""
    flat = array.ravel().tolist()
    texts = [part.decode("utf-8", "backslashreplace") if isinstance(part, bytes) else part for part in flat]
    others = [place for place, part in enumerate(texts) if not isinstance(part, str)]
    if len(others) == len(texts):
        why = f"It holds Python objects ({type(flat[0]).__name__} first), neither numbers nor text."
        raise DataError(name, array, why, "Convert it, for example with .astype('int64').")
    if others:
        why = f"It mixes text with other values: {len(others):,} are no text; the first is {name}[{others[0]}]."
        raise DataError(name, array, why, "Leave out or fill these samples, so that every label is text.")
    result = np.empty(len(texts), object)
    result[:] = texts
    return result.reshape(array.shape)


def _family(array: np.ndarray) -> str:
    return "text" if array.dtype.kind in "OU" else "numbers"


def _task(array: np.ndarray) -> str:
    """The task where y says it by itself; else DataError."""
    if array.ndim == 2:
        if _ones_per_row(array) == "one":
            return "classification"
        if array.dtype.kind == "f" and _ones_per_row(array) == "none":
            total = array.sum(axis=1, dtype=np.float64)
            if array.min() >= 0 and np.allclose(total, 1.0, atol=1e-3):
                why = "Each row adds up to 1 without being one-hot: soft labels, which no loss here takes."
                do = 'Pass y.argmax(axis=1) for hard labels, or data_args={"task": "regression"}.'
                raise DataError("y", array, why, do)
            return "regression"
        if _ones_per_row(array) == "several":
            why = "Its rows of 0 and 1 do not hold exactly one 1: several classes per sample are not supported."
        else:
            why = f"It holds {array.shape[1]} whole numbers per sample: neither labels nor one-hot."
        raise DataError("y", array, why, 'Pass one label per sample, or data_args={"task": "regression"}.')
    if array.dtype.kind in "bOU":
        return "classification"
    if array.dtype.kind == "f":
        if look(array).whole and len(values := np.unique(array)) <= 1000:
            why = f"It holds whole numbers ({_listed(values)}) as {array.dtype}: classes, or quantities?"
            raise DataError("y", array, why, ASK_TASK)
        return "regression"
    different = len(np.unique(array))
    if different > MANY and different > len(array) // 2:
        why = f"It holds {different:,} different whole numbers for {len(array):,} samples: classes, or quantities?"
        raise DataError("y", array, why, ASK_TASK)
    return "classification"


def _ones_per_row(array: np.ndarray) -> str:
    """Tell all one-hot rows ("one") from other rows of 0 and 1 ("several") and from any numbers ("none")."""
    if array.dtype.kind not in "biuf":
        return "none"
    one = True
    for _, part in chunks(array):
        if not np.all((part == 0) | (part == 1)):
            return "none"
        one = one and bool(np.all(part.sum(axis=1, dtype=np.int64) == 1))
    return "one" if one else "several"


def _as_labels(array: np.ndarray, name: str, notes: list[str]) -> np.ndarray:
    """Labels (samples,) of a boolean, whole or text type."""
    if array.ndim == 2:
        if _ones_per_row(array) != "one":
            why = f"Its rows of {array.shape[1]} numbers are not one-hot."
            raise DataError(name, array, why, "Pass one label per sample, or rows with exactly one 1.")
        notes.append(f"y: one-hot rows of {array.shape[1]} became whole-number labels.")
        return array.argmax(axis=1).astype(np.int64)
    if array.dtype.kind == "f":
        seen = look(array)
        if not seen.whole:
            why = "Its values have fractions, which labels of classes cannot have."
            raise DataError(name, array, why, 'Pass whole numbers, or data_args={"task": "regression"}.')
        if max(-seen.low, seen.high) >= 2**53:
            raise DataError(name, array, "Its values are too large for labels.", "Pass whole numbers from 0 on.")
        notes.append(f"y: {array.dtype} was converted to whole-number labels.")
        return array.astype(np.int64)
    return array


def _numbered(
    y: np.ndarray, y_val: np.ndarray | None, classes: int | None, remap: bool, notes: list[str]
) -> Labels:
    """Whole-number labels, which must be 0..C-1, or are renumbered so."""
    values = np.unique(y)
    if remap:
        if y_val is not None:
            known = set(values.tolist())
            _refuse_unknown(y_val, [value for value in np.unique(y_val).tolist() if value not in known])
            y_val = y_val.astype(values.dtype)  # exact, as all of its values are known
        names = tuple(str(value) for value in values.tolist())
        if classes is not None and classes != len(names):
            why = f"y holds {len(names)} different labels."
            raise DataError("classes", classes, why, "Leave `classes` out where labels are renumbered.")
        if names != tuple(str(number) for number in range(len(names))):
            notes.append(f"y: the labels {_listed(values)} were renumbered 0 to {len(names) - 1}.")
        coded_val = None if y_val is None else np.searchsorted(values, y_val).astype(np.int64)
        return _with_names(np.searchsorted(values, y).astype(np.int64), coded_val, None, names)
    low, high = int(values[0]), int(values[-1])
    count = classes or high + 1
    renumber = 'To renumber them pass data_args={"remap_labels": True}'
    if low < 0 or high >= count or (classes is None and len(values) < count and len(values) > 1):
        wanted = f"0 to {count - 1} for {count:,} classes" if classes else f"0 to {len(values) - 1}"
        why = f"Labels of {classes or len(values)} classes must be {wanted}; these are {_listed(values)}."
        gap = low >= 0 and classes is None
        more = f'; if the missing ones are classes too, data_args={{"classes": {count}}}.' if gap else "."
        do = renumber + more
        raise DataError("y", y, why, do)
    if classes is not None and y_val is not None:
        outside = [value for value in np.unique(y_val).tolist() if not 0 <= value < count]
        if outside:
            why = f"Labels of {count:,} classes must be 0 to {count - 1}; here are {_listed(np.array(outside))}."
            raise DataError("y_val", y_val, why, "Correct these labels or leave the samples out.")
    elif y_val is not None:
        _refuse_unknown(y_val, [value for value in np.unique(y_val).tolist() if not 0 <= value < count])
    coded_val = None if y_val is None else y_val.astype(np.int64)
    labels = _with_names(y.astype(np.int64), coded_val, classes, None)
    unused = labels.outputs - len(values)
    if unused:
        notes.append(f"y: {unused:,} of the {labels.outputs:,} classes have no training sample.")
    return labels


def _named(y: np.ndarray, y_val: np.ndarray | None, classes: int | None, notes: list[str]) -> Labels:
    """Text labels: the classes are their values in sorted order."""
    texts = y.tolist()
    names = tuple(sorted(set(texts)))
    if classes is None and len(names) > MANY and len(names) > len(texts) // 2:
        why = f"It holds {len(names):,} different texts for {len(texts):,} samples; these are hardly classes."
        do = f'Pass the column of the labels, or data_args={{"classes": {len(names)}}} if they are.'
        raise DataError("y", y, why, do)
    if classes is not None and classes < len(names):
        why = f"y holds {len(names):,} different labels."
        raise DataError("classes", classes, why, f"Pass {len(names)} or leave it out.")
    number = {name: place for place, name in enumerate(names)}
    if y_val is not None:
        _refuse_unknown(y_val, sorted({text for text in y_val.tolist() if text not in number}))
    notes.append(f"y: the texts {_listed(np.array(names, object))} became the classes 0 to {len(names) - 1}.")
    coded = np.fromiter((number[text] for text in texts), np.int64, len(texts))
    coded_val = None
    if y_val is not None:
        coded_val = np.fromiter((number[text] for text in y_val.tolist()), np.int64, len(y_val))
    return _with_names(coded, coded_val, classes, names)


def _refuse_unknown(y_val: np.ndarray, unknown: list[Any]) -> None:
    if unknown:
        why = f"It holds labels that no training sample has: {_listed(np.array(unknown, object))}."
        raise DataError("y_val", y_val, why, "Put samples of every class into the training set.")


def _with_names(
    y: np.ndarray, y_val: np.ndarray | None, classes: int | None, names: tuple[str, ...] | None
) -> Labels:
    """The last check: at least two classes to tell apart."""
    if y.min() == y.max():
        only = repr(names[int(y[0])]) if names else str(y[0])
        why = f"All {len(y):,} labels are {_cut(only)}: there is nothing to tell apart."
        raise DataError("y", y, why, "Pass samples of at least two classes.")
    outputs = classes or (len(names) if names else int(y.max()) + 1)
    if names and len(names) < outputs:
        names = None
    return Labels(y, y_val, "classification", outputs, names)


def _quantities(y: np.ndarray, y_val: np.ndarray | None, notes: list[str]) -> Labels:
    def columns(array: np.ndarray, name: str) -> np.ndarray:
        if array.dtype.kind in "OU":
            raise DataError(name, array, "Text cannot be the target of a regression.", "Pass numbers.")
        seen = look(array)
        if max(-seen.low, seen.high) > float(np.finfo(np.float32).max):
            why = f"It holds values up to {max(-seen.low, seen.high):.3g}, more than float32 can hold."
            raise DataError(name, array, why, "Scale the values, or take their logarithm.")
        return np.ascontiguousarray(array.astype(np.float32).reshape(len(array), -1))

    train = columns(y, "y")
    val = None if y_val is None else columns(y_val, "y_val")
    if val is not None and val.shape[1] != train.shape[1]:
        why = f"It has {val.shape[1]} targets per sample, y has {train.shape[1]}."
        raise DataError("y_val", y_val, why, "Prepare both in the same way.")
    if y.dtype != np.float32:
        notes.append(f"y: {y.dtype} was converted to float32.")
    if bool(np.all(train == train[0])):
        notes.append("y: all targets are the same; the model will learn this constant.")
    return Labels(train, val, "regression", train.shape[1])


def _listed(values: np.ndarray, most: int = 8) -> str:
    """Values as a message lists them: the first ones and the last one."""
    shown = [f"{value:g}" if isinstance(value, float) else _cut(repr(value)) for value in values.tolist()]
    return ", ".join(shown if len(shown) <= most else [*shown[: most - 1], "…", shown[-1]])


def _cut(text: str) -> str:
    return text if len(text) <= 30 else text[:29] + "…"
