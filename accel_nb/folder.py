"""The folder in which runs live: finding it, making a directory for a run, finding runs again."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from accel_nb.errors import AccelNbError
from accel_nb.run import Run

_known: weakref.WeakValueDictionary[Path, Run] = weakref.WeakValueDictionary()  # a run nobody holds is let go
_known_lock = threading.Lock()


def runs_folder(folder: str | os.PathLike[str] | None = None) -> Path:
    """Where runs live: `folder`, else the variable ACCEL_NB_RUNS, else `runs` in the working directory."""
    return Path(folder or os.environ.get("ACCEL_NB_RUNS") or "runs").absolute()


def new_directory(label: str, folder: Path) -> Path:
    """A new, empty directory `<time>-<label>`; a number behind it if there is one of that name."""
    stem = f"{datetime.now().astimezone():%Y%m%d-%H%M%S}-{label}"
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(1, 1000):
        path = folder / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir(mode=0o755)  # whatever the umask: code in it runs as this user
        except FileExistsError:
            continue
        return path
    raise AccelNbError(f"There are 999 runs named {stem} already.")


def known(directory: Path) -> Run:
    """The Run of a directory: one object per directory in a kernel, so that its events are read once."""
    directory = directory.absolute()
    with _known_lock:
        run = _known.get(directory)
        if run is None:
            run = _known[directory] = Run(directory)
        return run


def running_here(folder: Path) -> list[Run]:
    """The runs in a folder that this kernel started and that have not ended, the newest last."""
    with _known_lock:
        mine = [run for run in _known.values() if run.ours and run.directory.parent == folder]
    return sorted((run for run in mine if not run.ended), key=lambda run: run.name)


def runs(folder: str | os.PathLike[str] | None = None) -> list[Run]:
    """All runs in `folder` (default: as `runs_folder` says), the newest last: `runs()[-1].show()`."""
    found = (attached(path) for path in directories(runs_folder(folder)))
    return [run for run in found if run is not None]


def attached(directory: Path) -> Run | None:
    """The run in a directory, read and followed; None where the plan cannot be read, as after a crash."""
    with contextlib.suppress(OSError, ValueError):
        return known(directory).attach()
    return None


def directories(folder: Path) -> Iterable[Path]:
    """The run directories in a folder, the oldest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if (path / "plan.json").is_file()]
    # names begin with the second; the plan's time orders those of one second
    return sorted(found, key=lambda path: (path.name[:15], (path / "plan.json").stat().st_mtime_ns))
