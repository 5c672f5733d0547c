"""Files that a reader must never meet half written, and the lock of a run's directory."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import IO

from accel_nb.trust import closed

TAKEN = 76  # exit code: another worker trains this run


def claim(directory: Path) -> IO[str] | None:
    """The lock of a run's directory, held until this process ends or closes it; None if another one holds it.

    Where the file system knows no locks (some network drives, Windows) there is none, and the claim succeeds.
    """
    try:
        file = (directory / "lock").open("a")
    except OSError:
        return open(os.devnull)
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except (ImportError, OSError):
        pass
    return file


def write_atomic(path: Path, text: str) -> None:
    """Write beside and rename, so that a reader sees the old text or the new one, never half of it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        beside.write_text(text, encoding="utf-8")
        closed(beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
