"""A checkpoint as a file of plain arrays: all that is needed to go on with a run, for any device."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np


def write_arrays(path: Path, progress: dict[str, Any], *groups: Iterable[np.ndarray]) -> None:
    """Writes beside and renames, so that nobody ever meets half a file; each array has a checksum in it."""
    arrays = {f"{i}.{j}": array for i, group in enumerate(groups) for j, array in enumerate(group)}
    beside = path.with_name("new-" + path.name)
    try:
        with open(beside, "wb") as file:
            np.savez(file, progress=np.array(json.dumps(progress)), **arrays)
            file.flush()
            os.fsync(file.fileno())  # a rename may reach the disk before what it names
    except BaseException:
        beside.unlink(missing_ok=True)  # half a file on a full disk keeps it full
        raise
    beside.replace(path)


def read_arrays(path: str | Path) -> tuple[dict[str, Any], list[list[np.ndarray]]]:
    """How far the run was, and the groups of arrays."""
    groups: list[list[np.ndarray]] = []
    with np.load(path) as stored:
        for name in stored.files:
            if name != "progress":
                group = int(name.partition(".")[0])
                groups += [[] for _ in range(group + 1 - len(groups))]
                groups[group].append(stored[name])
        return json.loads(str(stored["progress"])), groups
