"""Knowing a process again: its id can be given to another one, its time of birth cannot."""

from __future__ import annotations

import os
from pathlib import Path


def born(pid: int) -> float:
    """When a process started, in seconds of a clock of its own; 0 if it is gone, or dead and not yet waited for.

    On Linux the clock counts from the machine's start, so that a change of the time of day (a network clock, a
    laptop that wakes up) makes no process a stranger. Elsewhere it is the time of day that psutil tells.
    """
    try:
        # the name in the second field may hold blanks and brackets; the fields after it do not
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return 0.0 if fields[0] in "ZX" else int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return 0.0
    except (OSError, ValueError, IndexError):
        return 0.0
    import psutil

    try:
        process = psutil.Process(pid)
        return 0.0 if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.Error:
        return 0.0


def alive(pid: int, birth: float) -> bool:
    """Whether the process of that id and birth (see `born`) lives."""
    found = born(pid)
    return found > 0 and abs(found - birth) < 0.5
