"""The system's memory killer: whether it ended a process of a run, and how sure that is.

On Linux a machine or a container that runs out of memory ends one of its processes with SIGKILL, which leaves no
word. What tells it from another SIGKILL: the system's log names the process, or the counters of such kills have
grown since the run began, or hardly any memory was free shortly before.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from accel_nb.machine import cgroups, machine
from accel_nb.out_of_memory import ADVICE, KIND, gib

SYSTEM = "proc/vmstat"  # its counter is the whole machine's; those of control groups are this container's
SCARCE = 0.05  # the share of the memory that is free at most when memory runs out


def counters(root: str | Path = "/") -> dict[str, int]:
    """How often the memory killer has struck, by file; empty where nothing tells it."""
    at = Path(root)
    files = [SYSTEM]
    for directory in cgroups(at, "memory"):
        files += [str((directory / name).relative_to(at)) for name in ("memory.events", "memory.oom_control")]
    return _read(at, files)


def _read(root: Path, files: Iterable[str]) -> dict[str, int]:
    told = {}
    for name in files:
        with contextlib.suppress(OSError):
            found = re.search(r"^oom_kill (\d+)$", (root / name).read_text(), re.MULTILINE)
            if found:
                told[name] = int(found[1])
    return told


def before(root: str | Path = "/") -> dict[str, Any]:
    """What a worker notes at its begin, for a comparison later."""
    here = machine(root).cpu
    return {"pid": os.getpid(), "kills": counters(root), "free": here.memory_free, "total": here.memory_total}


def killed(directory: Path, pids: Iterable[int], root: str | Path = "/") -> tuple[dict[str, Any] | None, str]:
    """Of a process that SIGKILL ended: an error event if memory ran out, and a sentence on what is known.

    `pids` are the processes that may be named in the system's log. The event's text begins with what happened to
    the process, without naming it: ", because ...".
    """
    noted, meter = _notes(directory)
    was = noted.get("kills") or {}
    free, total = meter.get("memory_free"), noted.get("total")
    short = total is not None and free is not None and free < SCARCE * total
    figures = f" Shortly before, {gib(free)} of {gib(total)} GiB were free." if total and free is not None else ""
    line = _log_line(set(pids), noted.get("t", time.time()), root)
    now = _read(Path(root), was)  # the worker's own control group may be another one than this process's
    grown = {name for name, count in now.items() if count > was[name]}
    if line is not None:
        size = re.search(r"anon-rss:(\d+)kB", line)
        held = f", when it held {gib(int(size[1]) * 1024)} GiB" if size else ""
        return _event(f"by the system's memory killer{held}.{figures}", free, total, certain=True), ""
    if grown - {SYSTEM}:
        why = "The system's memory killer has struck here while it trained, so memory ran out."
        return _event(f"(SIGKILL). {why}{figures}", free, total, certain=True), ""
    if grown:
        why = "The machine's memory killer has struck while it trained, so most likely memory ran out."
        return _event(f"(SIGKILL). {why}{figures}", free, total, certain=False), ""
    if short:
        why = "Most likely memory ran out: a guard such as systemd-oomd or earlyoom ends processes then."
        return _event(f"(SIGKILL). {why}{figures}", free, total, certain=False), ""
    if was:
        return (
            None,
            f"The system's memory killer has not struck meanwhile: somebody or something else did it.{figures}",
        )
    return None, "If nobody did that, the system ran out of memory: try a smaller batch or model."


def _event(text: str, free: int | None, total: int | None, *, certain: bool) -> dict[str, Any]:
    told = {"kind": KIND, "text": f"{text} {ADVICE}", "place": "cpu", "needed": None, "free": free, "total": total}
    return {**told, "certain": certain}


def _notes(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the run's worker noted at its begin, and the last reading of its meter."""
    found: dict[str, bytes] = {}
    with contextlib.suppress(OSError), (directory / "events.jsonl").open("rb") as file:
        for line in file:
            for kind in ("memory", "meter"):
                if f'"event":"{kind}"'.encode() in line:
                    found[kind] = line
    told = []
    for kind in ("memory", "meter"):
        event: dict[str, Any] = {}
        with contextlib.suppress(ValueError):
            event = json.loads(found.get(kind, b"{}"))
        told.append(event)
    return told[0], told[1]


def _log_line(pids: set[int], since: float, root: str | Path) -> str | None:
    """The line of the system's log that tells the end of one of these processes, since that time; None if none.

    In a container the log, where it can be read at all, may know the processes by other numbers.
    """
    boot = time.time() - time.monotonic()
    for line in _kernel_log(Path(root)):
        head, _, text = line.partition(";")
        named = re.search(r"[Kk]illed process (\d+)", text)
        parts = head.split(",")
        if not named or int(named[1]) not in pids or len(parts) < 3 or not parts[2].isdecimal():
            continue
        if boot + int(parts[2]) / 1e6 > since - 5:  # no earlier process of this number
            return text
    return None


def _kernel_log(root: Path) -> list[str]:
    """Records "priority,number,microseconds,...;text", as /dev/kmsg gives them; else those of the journal."""
    try:
        log = os.open(root / "dev/kmsg", os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return _journal()
    text = b""
    try:
        while True:
            try:
                record = os.read(log, 8192)
            except BrokenPipeError:  # some were overwritten meanwhile: the reading goes on with the oldest left
                continue
            if not record:
                break
            text += record
    except OSError:  # EAGAIN: no more
        pass
    finally:
        os.close(log)
    return text.decode(errors="replace").splitlines()


def _journal() -> list[str]:
    program = shutil.which("journalctl")
    if program is None:
        return []
    command = [program, "-k", "-b", "-n", "500", "--no-pager", "-o", "short-monotonic"]
    try:
        told = subprocess.run(
            command, capture_output=True, text=True, timeout=3, check=False, errors="replace"
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    found = (re.match(r"\[\s*(\d+\.\d+)\] (.*)", line) for line in told.splitlines())
    return [f"0,0,{float(one[1]) * 1e6:.0f};{one[2]}" for one in found if one]
