"""The forms in which data are passed: names, `.npz` files, tuples of arrays, and the settings beside them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from accel_nb.datasets import RANDOM, SOURCES
from accel_nb.errors import DataError, shown

NAMED = (*SOURCES, "random")
FORMS = f"data may be a name ({', '.join(NAMED)}), the path of an .npz file, (x, y), or (x, y, x_val, y_val)."
_EXPECTED = "Expected are x and y (or x_train and y_train); for validation x_val and y_val (or x_test and y_test)."


def check_name(name: str) -> None:
    """Raise DataError unless `name` is one of NAMED."""
    if name in NAMED:
        return
    close = difflib.get_close_matches(name.lower()[:100].replace("-", "_").replace(" ", "_"), NAMED, 1, 0.6)
    do = f'Did you mean "{close[0]}"?' if close else "Pass one of the names, or your own arrays."
    raise DataError("data", name, "There is no data set of this name.", do, FORMS)


_OWN_ARGS = ("task", "classes", "remap_labels", "scale", "channels")


def check_arguments(data: Any, data_args: Any) -> dict[str, Any]:
    """`data_args` as a dict, each checked by name and value; a setting of None is left out. Raises DataError."""
    if data_args is None:
        return {}
    if not isinstance(data_args, Mapping):
        raise DataError("data_args", data_args, "It must be a dict.", 'Pass for example {"task": "regression"}.')
    known: tuple[str, ...] = _OWN_ARGS
    if isinstance(data, str) and data in NAMED:
        known = tuple(RANDOM) if data == "random" else ()
    for key in data_args:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, 1, 0.7)
            why = f"There is no setting {shown(key)} for these data."
            here = f"data_args may hold: {', '.join(known) or 'nothing'}."
            do = f'Did you mean "{close[0]}"?' if close else "Leave it out."
            raise DataError("data_args", dict(data_args), why, do, here)
    args = {key: value for key, value in data_args.items() if value is not None}
    if known != _OWN_ARGS:
        return args  # checked where the random data are made
    for key, allowed in (("task", ("classification", "regression")), ("channels", ("first", "last"))):
        if key in args and not (isinstance(args[key], str) and args[key] in allowed):
            do = f'Pass "{allowed[0]}" or "{allowed[1]}".'
            raise DataError(key, args[key], "There is no such choice.", do)
    if "remap_labels" in args and not isinstance(args["remap_labels"], bool):
        raise DataError(
            "remap_labels", args["remap_labels"], "It must be True or False.", "Pass True to renumber."
        )
    classes = args.get("classes", 2)
    if not isinstance(classes, int | np.integer) or isinstance(classes, bool) or not 2 <= classes <= 10_000_000:
        raise DataError("classes", classes, "It must be a whole number from 2 on.", "Pass the number of classes.")
    scale = args.get("scale", 1.0)
    number = isinstance(scale, int | float | np.integer | np.floating) and not isinstance(scale, bool)
    if not number or not 1e-30 < scale < 1e30:
        raise DataError(
            "scale", scale, "It must be a number above 0.", "Pass for example 255, or 1 for no scaling."
        )
    if args.get("task") == "regression" and ("classes" in args or args.get("remap_labels")):
        why = "A regression has no classes."
        raise DataError("data_args", dict(data_args), why, "Leave out `classes` and `remap_labels`, or the task.")
    return args


def four_parts(data: Any, notes: list[str]) -> tuple[Any, Any, Any, Any]:
    """(x, y, x_val, y_val) of what was passed; the last two may be None."""
    if not isinstance(data, tuple | list):
        why = f"A {type(data).__name__} does not say which part of it is x and which is y."
        raise DataError("data", data, why, "Pass (x, y), or (x, y, x_val, y_val).", FORMS)
    if len(data) == 2 and all(
        isinstance(pair, tuple) and len(pair) == 2 and all(_shape(part) is not None for part in pair)
        for pair in data
    ):
        notes.append("data: read as ((x, y), (x_val, y_val)).")
        data = (*data[0], *data[1])
    if len(data) == 2:
        return data[0], data[1], None, None
    if len(data) != 4:
        why = f"It has {len(data)} parts; two or four are expected."
        raise DataError("data", data, why, "Pass (x, y), or (x, y, x_val, y_val).", FORMS)
    sizes = [_shape(part) or () for part in data]
    if len(sizes[0]) > 1 and sizes[0][1:] == sizes[1][1:] and len(sizes[2]) == 1 == len(sizes[3]):
        why = "These are (x, x_val, y, y_val), going by their shapes."
        raise DataError("data", data, why, "Pass them in the order (x, y, x_val, y_val).")
    if (data[2] is None) != (data[3] is None):
        raise DataError("data", data, "Only one of x_val and y_val is given.", "Pass both, or (x, y) alone.")
    return data[0], data[1], data[2], data[3]


def _shape(part: Any) -> tuple[Any, ...] | None:
    try:
        shape = part.shape
    except Exception:  # it has none, or fails in a way of its own when it is asked
        return None
    return tuple(shape) if isinstance(shape, tuple | list) else ()


def read_npz(path: Path) -> tuple[Any, Any, Any, Any]:
    """(x, y, x_val, y_val) of an `.npz` file, the last two None where it has none; nothing in it is unpickled."""
    given = str(path)
    if path.suffix.lower() != ".npz":
        do = "Save the arrays with numpy.savez(path, x=x, y=y)."
        raise DataError("data", given, "It is not the path of an .npz file.", do)
    try:
        # opened here, because np.load leaves a damaged file open
        with path.expanduser().open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            return _parts(file, given)
    except DataError:
        raise
    except FileNotFoundError:
        do = f"Check the path; relative ones start at {Path.cwd()}."
        raise DataError("data", given, "There is no such file.", do) from None
    except Exception as error:  # a damaged zip or header raises many kinds
        text = "it holds pickled objects" if "pickle" in str(error) else " ".join(str(error).split())[:120]
        why = f"It cannot be read ({text or type(error).__name__})."
        raise DataError("data", given, why, "Save the arrays again with numpy.savez(path, x=x, y=y).") from error


def _parts(file: Any, given: str) -> tuple[Any, Any, Any, Any]:
    keys = {key.lower(): key for key in file.files}
    found: list[Any] = []
    for names in (("", "_train"), ("_val", "_valid", "_validation"), ("_test",)):
        x_key = next((keys["x" + name] for name in names if "x" + name in keys), None)
        y_key = next((keys["y" + name] for name in names if "y" + name in keys), None)
        if (x_key is None) != (y_key is None) or (x_key is None and not found):
            why = f"It holds the arrays {', '.join(file.files[:8]) or 'nothing'}."
            raise DataError("data", given, why, _EXPECTED)
        if x_key is not None and len(found) < 4:
            found += [file[x_key], file[y_key]]
    x, y, x_val, y_val = [*found, None, None][:4]
    return x, y, x_val, y_val
