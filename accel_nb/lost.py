"""Why a worker ended without a last word, as far as its exit code and its directory tell."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from accel_nb import memory_killer, out_of_memory
from accel_nb.events import DIRECTORY_FAILED


def why_lost(code: int | str, directory: Path) -> str:
    """One sentence or two. `code`: the exit code (below 0: a signal), "removed", or "unknown" (another kernel)."""
    if code == "removed" or not directory.is_dir():
        return f"The run's directory was removed while it trained: {directory}"
    if code == DIRECTORY_FAILED:
        free = shutil.disk_usage(directory).free / 2**20
        told = f"The run's directory cannot be written ({free:.0f} MiB free on its disk)."
        return f"{told} Free some space, then train again."
    if code == "unknown":
        return "The worker process is gone and left no last word; its kernel or its machine was shut down."
    if isinstance(code, int) and code < 0:
        try:
            label = signal.Signals(-code).name
        except ValueError:
            label = f"signal {-code}"
        hint = ""
        if label == "SIGKILL":
            hint = " If nobody did that, the system ran out of memory: try a smaller batch or model."
        return f"The worker process was killed ({label}).{hint}"
    return f"The worker process ended without a last word (exit code {code})."


def lost_event(
    code: int | str,
    directory: Path,
    log: str,
    pids: Iterable[int] = (),
    *,
    who: str = "",
    kind: str = "WorkerLost",
) -> dict[str, Any]:
    """The error event of a process that left no last word.

    `log`: its last lines, to be shown. `pids`: what the system's log may call it. `who` it was, if not the worker.
    """
    who = who or "The worker process"
    text = why_lost(code, directory).replace("The worker process", who, 1)
    event: dict[str, Any] = {"kind": kind, "text": text, "traceback": log}
    if not isinstance(code, int) or not directory.is_dir():
        return event
    if code == -signal.SIGKILL:
        found, known = memory_killer.killed(directory, pids)
        if found is not None:
            return {**event, **found, "text": f"{who} was killed {found['text']}"}
        return {**event, "text": f"{who} was killed (SIGKILL). {known}"}
    shortage = out_of_memory.in_log(directory) if code else None
    if shortage is not None:
        return {**event, **shortage.fields(), "text": f"{shortage} {text} {out_of_memory.ADVICE}"}
    return event
