"""Arrays seen row by row: read from any library into NumPy, looked at in chunks, picked, cast and written lazily.

A data set may be a memory-mapped file larger than the memory. So nothing here copies a whole array: the checks go
through it in chunks, the split is a list of row numbers, and the cast happens when a chunk is read.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from accel_nb.errors import DataError

MOST_BYTES = 1 << 40  # of one array: to look at all of it takes an hour
CHUNK_BYTES = 8 << 20  # of one chunk: large enough to be quick, small enough to be nothing beside the data


def numpy_array(value: Any, name: str) -> np.ndarray:
    """`value` as a NumPy array, not copied where it can be shared, whatever library it comes from.

    Takes NumPy arrays, lists, tuples, data frames and series, tensors of any framework, and anything else with
    `__array__`. No other library is imported for it. Raises DataError, with `name` as its field, for the rest.
    """
    try:
        array = _numpy_array(value, name)
    except DataError:
        raise
    except Exception as error:  # any library may raise anything here: ragged lists, deep nesting, a broken method
        if isinstance(value, list | tuple):
            why = "Its rows have different lengths or types, so that they do not form one array."
            do = "Give every sample the same shape (pad or cut), as numbers."
            raise DataError(name, value, why, do) from error
        why = f"It cannot be read as an array ({_one_line(error)})."
        raise DataError(name, value, why, "Turn it into a NumPy array of numbers first.") from error
    if array.nbytes > MOST_BYTES:  # a view that repeats itself claims whatever it likes
        size = f"{array.nbytes / 2**40:,.1f} TiB"
        raise DataError(name, array, f"It claims to hold {size}.", "Pass data that fit on a disk.")
    return array


def _numpy_array(value: Any, name: str) -> np.ndarray:
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        hidden = int(np.ma.count_masked(value))
        raise DataError(name, value, f"{hidden:,} of its values are masked.", "Fill or leave out those samples.")
    if isinstance(value, np.ndarray):
        array = value if type(value) in (np.ndarray, np.memmap) else np.asarray(value)
    elif callable(getattr(value, "detach", None)):  # a PyTorch tensor, on whatever device
        tensor = value.detach().cpu()
        array = (tensor.float() if "bfloat16" in str(tensor.dtype) else tensor).numpy()
    elif hasattr(value, "nnz") and hasattr(value, "toarray"):
        raise DataError(name, value, "It is a sparse matrix.", "Pass its dense form, .toarray().")
    elif hasattr(getattr(value, "dtypes", None), "items"):
        array = _frame(value, name)
    elif callable(getattr(value, "to_numpy", None)):
        kind = getattr(getattr(value, "dtype", None), "kind", "O")
        missing = bool(getattr(value, "hasnans", False)) and kind in "biuf"
        array = value.to_numpy(dtype="float64", na_value=math.nan) if missing else np.asarray(value.to_numpy())
        if array.dtype == object and kind in "biuf":  # a nullable column without a missing value
            array = array.astype(value.dtype.kind + str(getattr(value.dtype, "itemsize", 8)))
    elif hasattr(value, "__array__"):
        array = np.asarray(value)
    elif isinstance(value, list | tuple):
        array = np.asarray(value)
        if array.dtype.kind in "US" and not all(isinstance(part, str | bytes) for part in _leaves(value)):
            raise DataError(name, value, "It mixes text and numbers.", "Give all values one type.")
    else:
        why = f"A {type(value).__name__} is not an array of samples."
        raise DataError(name, value, why, "Pass a NumPy array, a list, a data frame or a tensor.")
    if array.dtype.name == "bfloat16":  # known to NumPy only as an extension type
        array = array.astype(np.float32)
    return array


def _frame(frame: Any, name: str) -> np.ndarray:
    """A data frame as one array of numbers; columns of anything else are refused by name."""
    others = [str(label) for label, dtype in frame.dtypes.items() if getattr(dtype, "kind", "O") not in "biuf"]
    if others and len(frame.columns) > 1:
        listed = ", ".join(others[:5]) + (", …" if len(others) > 5 else "")
        why = f"Of its columns, {len(others)} do not hold numbers: {listed}."
        raise DataError(name, frame, why, "Leave these columns out or encode them as numbers.")
    if others:
        return np.asarray(frame.to_numpy())
    if len({str(dtype) for dtype in frame.dtypes}) == 1 and all(isinstance(d, np.dtype) for d in frame.dtypes):
        return np.asarray(frame.to_numpy())
    return np.asarray(frame.to_numpy(dtype="float64", na_value=math.nan))


def _leaves(value: Any) -> Iterator[Any]:
    for part in value:
        if isinstance(part, list | tuple):
            yield from _leaves(part)
        elif isinstance(part, np.ndarray):
            yield from part.ravel().tolist()
        else:
            yield part


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 120 else text[:119] + "…"


def size_text(shape: tuple[int, ...]) -> str:
    """A shape as people write sizes.

    >>> size_text((28, 28, 1))
    '28×28×1'
    """
    return "×".join(str(size) for size in shape)


@dataclass(frozen=True)
class Look:
    """What one pass over an array saw. `low` and `high` are of the finite values (0.0 where there are none)."""

    low: float
    high: float
    whole: bool  # every finite value is a whole number
    not_finite: int = 0
    first_not_finite: tuple[int, ...] = ()
    first_value: float = 0.0


def look(array: np.ndarray) -> Look:
    """One pass in chunks over an array (samples, ...) of a boolean, whole or floating type."""
    low, high, whole, bad, first_value = math.inf, -math.inf, True, 0, 0.0
    first: tuple[int, ...] = ()
    for start, part in chunks(array):
        values = part
        if part.dtype.kind == "f":
            finite = np.isfinite(part)
            count = part.size - int(np.count_nonzero(finite))
            if count:
                if not bad:
                    where = np.unravel_index(int(np.argmin(finite)), part.shape)
                    first, first_value = (start + int(where[0]), *map(int, where[1:])), float(part[where])
                bad += count
                values = part[finite]
                if not values.size:
                    continue
            whole = whole and bool(np.array_equal(values, np.floor(values)))
        low, high = min(low, float(values.min())), max(high, float(values.max()))
    if low > high:
        low = high = 0.0
    return Look(low, high, whole, bad, first, first_value)


def chunks(array: np.ndarray, index: np.ndarray | None = None) -> Iterator[tuple[int, np.ndarray]]:
    """(first row, rows) of an array, or of its rows `index`, in pieces of about CHUNK_BYTES."""
    count = len(array) if index is None else len(index)
    row_bytes = max(1, array.itemsize * math.prod(array.shape[1:]))
    step = max(1, CHUNK_BYTES // row_bytes)
    for start in range(0, count, step):
        stop = min(start + step, count)
        yield start, array[start:stop] if index is None else array[index[start:stop]]


@dataclass(eq=False)
class Rows:
    """Rows `index` (all where None) of `source` (samples, ...), as `dtype`; nothing is copied until it is read."""

    source: np.ndarray
    dtype: np.dtype[Any]
    index: np.ndarray | None = None
    _digest: str = field(default="", repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self), *self.source.shape[1:])

    def __len__(self) -> int:
        return len(self.source) if self.index is None else len(self.index)

    @property
    def nbytes(self) -> int:
        """Bytes that the array takes once it is read."""
        return self.dtype.itemsize * math.prod(self.shape)

    def pick(self, index: np.ndarray) -> Rows:
        return Rows(self.source, self.dtype, index if self.index is None else self.index[index])

    def pieces(self) -> Iterator[np.ndarray]:
        """The rows in C order, chunk by chunk."""
        for _, part in chunks(self.source, self.index):
            yield np.ascontiguousarray(part, dtype=self.dtype)

    def read(self) -> np.ndarray:
        """All rows as one array; the source itself where neither rows are picked nor the type changes."""
        if self.index is None:
            return self.source if self.source.dtype == self.dtype else self.source.astype(self.dtype)
        result = np.empty(self.shape, self.dtype)
        start = 0
        for part in self.pieces():
            result[start : start + len(part)] = part
            start += len(part)
        return result

    def _header(self) -> bytes:
        buffer = io.BytesIO()
        described = {
            "descr": np.lib.format.dtype_to_descr(self.dtype),
            "fortran_order": False,
            "shape": self.shape,
        }
        np.lib.format.write_array_header_1_0(buffer, described)
        return buffer.getvalue()

    def digest(self) -> str:
        """SHA-256 of the `.npy` file, in hex, computed once."""
        if not self._digest:
            total = hashlib.sha256(self._header())
            for part in self.pieces():
                total.update(part.data)
            self._digest = total.hexdigest()
        return self._digest

    def write(self, path: Path) -> None:
        """Write the rows as a `.npy` file: beside `path`, then renamed, so that no half file has the name."""
        beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
        try:
            with beside.open("wb") as file:
                file.write(self._header())
                for part in self.pieces():
                    file.write(part.data)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)

    def write_shared(self, path: Path, shared: Path) -> None:
        """Like `write`, with the content kept once in the folder `shared`, and `path` a hard link to it.

        Where the file system knows no hard links (a mounted drive), `path` is a copy.
        """
        stored = shared / f"{self.digest()[:32]}.npy"
        size = len(self._header()) + self.nbytes
        if not stored.exists() or stored.stat().st_size != size:
            shared.mkdir(parents=True, exist_ok=True)
            self.write(stored)
            if os.name != "nt":  # there a read-only file could not be deleted with its run
                stored.chmod(0o444)  # one run's file is every run's file
        beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
        try:
            try:
                os.link(stored, beside)
            except OSError:
                shutil.copyfile(stored, beside)
            # Renaming one link of a file over another link of it does nothing at all, so the old one goes first.
            path.unlink(missing_ok=True)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
