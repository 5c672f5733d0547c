"""Whose code a run's directory holds: its program, and a model of the user's own as a pickle, run as this user."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from accel_nb.errors import AccelNbError

CODE = ("program.py", "model.pkl")
OTHERS = stat.S_IWGRP | stat.S_IWOTH


def closed(path: Path) -> None:
    """Take the right to write a file from others, whatever the umask gave them."""
    with contextlib.suppress(OSError):  # a file system without permissions
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~OTHERS)


def check_ours(directory: Path) -> None:
    """AccelNbError if another user may have written the code in a run's directory, which would run here."""
    if not hasattr(os, "getuid"):
        return  # Windows keeps a user's files from others by other means
    for path in (directory, *(directory / name for name in CODE)):
        try:
            told = path.stat()
        except FileNotFoundError:
            continue
        runs = "and the code in it would run here as you. Read its program.py"
        if told.st_uid != os.getuid():
            do = f"then make a copy of your own: cp -r {directory} {directory}-mine"
            raise AccelNbError(f"{path} belongs to the user {_name(told.st_uid)}, {runs}; {do}")
        if told.st_mode & OTHERS and _has_permissions(directory):
            raise AccelNbError(f"{path} can be written by other users, {runs}; then: chmod -R go-w {directory}")


def _name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _has_permissions(directory: Path) -> bool:
    """Whether the file system keeps permissions: Windows' disks and some network drives allow all to all."""
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".") as probe:
            path = Path(probe.name)
            path.chmod(0o600)
            return stat.S_IMODE(path.stat().st_mode) == 0o600
    except OSError:
        return True
