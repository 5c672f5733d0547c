"""The checks of a user's own x: what is certain is converted and said, what is not is refused in plain words.

Nothing of this needs a device, and nothing copies the data (see `rows`).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from accel_nb.errors import DataError
from accel_nb.rows import Look, Rows, look, numpy_array, size_text

FLOAT32 = np.dtype(np.float32)
UINT8 = np.dtype(np.uint8)
_CHANNELS = (1, 3, 4)  # grey, colour, colour with transparency
_SAY_CHANNELS = (
    'Say it with data_args={"channels": "first"} or data_args={"channels": "last"}, or move them yourself: '
    "np.moveaxis(x, 1, -1)."
)
_LARGEST = float(np.finfo(np.float32).max)


def features(
    x: Any, x_val: Any | None, *, scale: float | None, channels: str | None, notes: list[str]
) -> tuple[Rows, Rows | None, float]:
    """The rows of x and x_val, and what to divide them by.

    The rows are (samples, height, width, channels) or (samples, features), float32 or uint8. Sentences about each
    conversion are added to `notes`. Raises DataError.
    """
    train = _numbers(numpy_array(x, "x"), "x")
    val = None if x_val is None else _numbers(numpy_array(x_val, "x_val"), "x_val")
    if val is not None and val.shape[1:] != train.shape[1:]:
        why = f"Its samples have the shape {size_text(val.shape[1:])}, those of x {size_text(train.shape[1:])}."
        raise DataError("x_val", val, why, "Prepare both in the same way.")
    seen = _finite(train, "x")
    seen_val = None if val is None else _finite(val, "x_val")
    moved, note = _layout(train, channels)
    if note:
        notes.append(note)
    if seen_val is not None and val is not None and scale is None:
        _same_scale(seen, seen_val, val)
    dtype, divide_by = _storage(moved, [seen] if seen_val is None else [seen, seen_val], scale, notes)
    rows_val = None if val is None else Rows(_layout(val, channels)[0], dtype)
    return Rows(moved, dtype), rows_val, divide_by


def _numbers(array: np.ndarray, name: str) -> np.ndarray:
    """Refuse what cannot be samples of numbers: by type, number of dimensions, size."""
    kind = array.dtype.kind
    if array.ndim == 0:
        raise DataError(name, array, "It is a single value, not an array of samples.", "Pass one row per sample.")
    refused = {
        "O": ("It holds Python objects, not numbers.", "Convert it, for example with .astype('float32')."),
        "c": ("Complex numbers cannot be trained on.", "Pass the real and the imaginary part as two features."),
        "U": ("It holds text, not numbers.", "Encode the text as numbers first."),
        "S": ("It holds text, not numbers.", "Encode the text as numbers first."),
        "M": ("It holds dates, not numbers.", "Turn the dates into numbers, for example days since a start."),
        "m": ("It holds time spans, not numbers.", "Turn them into numbers, for example seconds."),
    }
    if kind not in "biuf":
        why, do = refused.get(kind, (f"Arrays of type {array.dtype} are not numbers.", "Pass one plain array."))
        raise DataError(name, array, why, do)
    if len(array) == 0:
        raise DataError(name, array, "It holds no samples.", "Pass at least two samples.")
    if array.ndim == 1:
        why = "It has one dimension, so that it is not clear what one sample is."
        raise DataError(name, array, why, f"For one feature per sample pass {name}.reshape(-1, 1).")
    if 0 in array.shape:
        why = f"Its samples are empty (shape {size_text(array.shape[1:])})."
        raise DataError(name, array, why, "Pass at least one feature per sample.")
    if array.ndim > 4:
        why = f"Samples of {array.ndim - 1} dimensions are not supported."
        do = "Pass (samples, features) or (samples, height, width, channels)."
        raise DataError(name, array, why, do)
    return array


def _finite(array: np.ndarray, name: str) -> Look:
    seen = look(array)
    refuse_not_finite(array, name, seen)
    if max(-seen.low, seen.high) > _LARGEST:
        why = f"It holds values up to {max(-seen.low, seen.high):.3g}, more than float32 can hold."
        raise DataError(name, array, why, "Scale the values, or take their logarithm.")
    return seen


def refuse_not_finite(array: np.ndarray, name: str, seen: Look) -> None:
    """Raise DataError with the count and the place of the first NaN or infinity, where there are any."""
    if seen.not_finite:
        where = ", ".join(str(number) for number in seen.first_not_finite)
        many = "1 value is" if seen.not_finite == 1 else f"{seen.not_finite:,} values are"
        why = f"{many} not finite; the first is {name}[{where}] = {seen.first_value}."
        raise DataError(name, array, why, "Leave out these samples, or fill in the values.")


def _layout(array: np.ndarray, channels: str | None) -> tuple[np.ndarray, str]:
    """A view with the channels last, and the note about it."""
    if array.ndim == 2:
        return array, ""
    if array.ndim == 3:
        height, width = array.shape[1:]
        return array[..., None], f"x: a channel was added to the {height}×{width} grey images: {height}×{width}×1."
    _, first, middle, last = array.shape
    if channels is None:
        if first == last == 1 and middle == 1:
            return array, ""
        if first in _CHANNELS and last in _CHANNELS:
            size = size_text(array.shape[1:])
            why = f"In samples of {size}, both {first} (first) and {last} (last) can be the channels."
            raise DataError("x", array, why, _SAY_CHANNELS)
        if first in _CHANNELS:
            channels = "first"
        elif last in _CHANNELS or last < min(first, middle):
            channels = "last"
        else:
            why = f"It is not clear which dimension of samples of {size_text(array.shape[1:])} is the channels."
            raise DataError("x", array, why, _SAY_CHANNELS)
    if channels == "last":
        return array, ""
    moved = np.moveaxis(array, 1, -1)
    return moved, f"x: the channels were moved from first to last: {size_text(moved.shape[1:])}."


def _storage(
    x: np.ndarray, seen: list[Look], scale: float | None, notes: list[str]
) -> tuple[np.dtype[Any], float]:
    """The type to store x in, and what to divide it by; a note for each conversion.

    Whole numbers from 0 to 255 in the shape of pictures are pixels: they stay (or become) bytes, a quarter of the
    memory of float32, and the program divides them on the device.
    """
    low, high = min(part.low for part in seen), max(part.high for part in seen)
    bytes_fit = all(part.whole for part in seen) and low >= 0 and high <= 255
    if scale is not None:
        dtype = UINT8 if bytes_fit and scale != 1.0 else FLOAT32
        notes.append(f"x: the program divides it by {scale:g}, as asked.")
        _say_cast(x, dtype, max(-low, high), notes)
        return dtype, scale
    if x.dtype.kind == "b" or high <= 1 or not (bytes_fit and _is_pixels(x, high)):
        _refuse_unscaled(x, low, high)
        _say_cast(x, FLOAT32, max(-low, high), notes)
        if high > 1000 or low < -1000:
            notes.append(
                f"x: its values run from {low:g} to {high:g}; networks learn best from values around 0 to 1. "
                "Consider standardising each feature."
            )
        return FLOAT32, 1.0
    # Pictures of few grey levels (0 to 16, say) would be nearly black if they were divided by 255.
    divide_by = 255.0 if high > 127 else high
    how = "kept as bytes" if x.dtype == UINT8 else f"stored as bytes instead of {x.dtype}"
    notes.append(
        f"x: pixels from {low:g} to {high:g}, {how}; the program divides them by {divide_by:g}. "
        'For another divisor pass data_args={"scale": ...}.'
    )
    return UINT8, divide_by


def _is_pixels(x: np.ndarray, high: float) -> bool:
    if x.ndim == 4:
        return True
    # Rows: pixels where they use the range of a byte and their number is that of a square picture, grey or colour.
    count = x.shape[1]
    pictures = [count, count // 3] if count % 3 == 0 else [count]
    return high > 127 and any(math.isqrt(size) ** 2 == size >= 64 for size in pictures)


def _refuse_unscaled(x: np.ndarray, low: float, high: float) -> None:
    if x.dtype.kind == "f" and x.ndim == 4 and low >= 0 and 127 < high <= 255:
        why = f"Its values run from {low:g} to {high:g} with fractions: pixels of 0 to 255, or quantities to keep."
        do = 'Say it with data_args={"scale": 255} (divides by 255) or data_args={"scale": 1} (keeps them).'
        raise DataError("x", x, why, do)


def _same_scale(seen: Look, seen_val: Look, val: np.ndarray) -> None:
    for one, other in ((seen, seen_val), (seen_val, seen)):
        bytes_like = one.whole and one.low >= 0 and 127 < one.high <= 255
        if bytes_like and not other.whole and other.low >= 0 and other.high <= 1:
            why = f"It reaches {seen_val.high:g}, x {seen.high:g}: one is scaled to 0..1, the other is not."
            raise DataError("x_val", val, why, "Scale both in the same way.")


def _say_cast(x: np.ndarray, dtype: np.dtype[Any], largest: float, notes: list[str]) -> None:
    if x.dtype == dtype:
        return
    more = " (False 0, True 1)" if x.dtype.kind == "b" else ""
    if x.dtype.kind in "iu" and largest > 2**24:
        more = "; whole numbers beyond 16,777,216 are rounded"
    notes.append(f"x: {x.dtype} was converted to {dtype}{more}.")
