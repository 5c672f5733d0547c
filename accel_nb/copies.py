"""Copies of runs in a second folder, such as one on Google Drive: read back, and loud if they fail."""

from __future__ import annotations

import contextlib
import hashlib
import html
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accel_nb.errors import AccelNbError
from accel_nb.folder import directories, known
from accel_nb.live import in_notebook

PERIOD = 2.0  # seconds between two looks at the runs
TRAINING = 60.0  # seconds between two copies of a run that trains: what a lost machine may cost
AGAIN = 30.0  # seconds until what failed is tried again
PIECE = 1 << 20  # bytes read at a time
SPARED = {
    "lock",
    "worker.json",
    "control.json",
    "__pycache__",
}  # of the processes here; they mean nothing elsewhere
LAST = ("plan.json", "events.jsonl")  # a copy that was cut short looks like a run that was cut short, or like none


class Copies:
    """Copies of the runs in `source`, kept up to date in a folder, from a thread of this kernel.

    A run that has ended is copied at once; one that trains once a minute, with its newest checkpoint. Each file is
    written beside, read back, compared and renamed. A failure is told in the cell and in the run's warnings, and
    tried again.

    Attributes
    ----------
    folder : where the copies are.
    copied : names of the runs that have ended and are there whole.
    failed : name of a run -> why its copy failed.
    """

    def __init__(self, source: Path, base: Path, name: str = "") -> None:
        if not base.is_dir():
            raise AccelNbError(f"{base} is no folder. Runs are copied to a folder that exists.")
        self.source, self.base, self.folder = source, base, base / name
        self._disk = base.stat().st_dev
        self.copied: list[str] = []
        self.failed: dict[str, str] = {}
        self._seen: dict[str, tuple[Any, float]] = {}  # of a run: its files when it was copied, and when that was
        self._files: dict[Path, tuple[int, int]] = {}  # of a file's copy: size and time of its source
        self._look, self._end = threading.Event(), threading.Event()
        self._looked = threading.Condition()
        self._round = 0
        self._handle: Any = None
        self._shown = ""
        self._show()
        self._thread = threading.Thread(target=self._keep, name="accel_nb copies", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return self._text()

    def wait(self, timeout: float | None = None) -> Copies:
        """Wait until each run that has ended is copied; AccelNbError if one failed, TimeoutError if it lasts."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._looked:
            wanted = self._round + 2  # the look that is under way may have passed a run already
            self._seen = {name: seen for name, seen in self._seen.items() if name not in self.failed}
            while self._round < wanted and self._thread.is_alive():
                self._look.set()
                if deadline is not None and time.monotonic() > deadline:
                    raise TimeoutError(f"The runs are not copied to {self.folder} after {timeout} s.")
                self._looked.wait(0.1)
        if self.failed:
            why = "; ".join(f"{name}: {text}" for name, text in self.failed.items())
            raise AccelNbError(f"Not copied to {self.folder}: {why}. The runs are still in {self.source}.")
        return self

    def stop(self) -> None:
        """Copy no more."""
        self._end.set()
        self._look.set()
        self._thread.join()

    # ---- the thread

    def _keep(self) -> None:
        while not self._end.is_set():
            for run in self._runs():
                if self._end.is_set():
                    break
                self._see(run)
            with self._looked:
                self._round += 1
                self._looked.notify_all()
            self._look.wait(PERIOD)
            self._look.clear()

    def _runs(self) -> list[Path]:
        if (self.source / "plan.json").is_file():
            return [self.source]
        with contextlib.suppress(OSError):
            return list(directories(self.source))
        return []

    def _see(self, run: Path) -> None:
        """Copy a run if there is something new in it, and if it is time to."""
        name = run.name
        try:
            now, (before, when) = _state(run), self._seen.get(name, (None, 0.0))
            ended = _ended(run)
            pause = AGAIN if name in self.failed else 0.0 if ended else TRAINING
            if now == before or (when and time.monotonic() - when < pause):
                return
            self._check_base()
            self._copy(run, self.folder / name)
            self._seen[name] = (now, time.monotonic())
            self.failed.pop(name, None)
            if ended and name not in self.copied:
                self.copied.append(name)
        except Exception as problem:
            self._seen[name] = (None, time.monotonic())
            self._tell(run, f"{type(problem).__name__}: {problem}")
        self._show()

    def _check_base(self) -> None:
        """OSError if the folder is another one: where a Drive goes away, a folder of this machine may stay."""
        if not self.base.is_dir() or self.base.stat().st_dev != self._disk:
            raise OSError(f"{self.base} is not there any more")
        self.folder.mkdir(exist_ok=True)

    def _copy(self, run: Path, to: Path) -> None:
        for path, target in pairs(run, to):
            with contextlib.suppress(FileNotFoundError):  # a temporary file, renamed meanwhile
                told = path.stat()
                mark = (told.st_size, told.st_mtime_ns)
                if self._files.get(target) != mark and not _same(path, target):
                    copy(path, target)
                self._files[target] = mark

    def _tell(self, run: Path, why: str) -> None:
        new = run.name not in self.failed
        self.failed[run.name] = why
        if not new:
            return
        text = f"The copy in {self.folder} failed ({why}); the run itself is whole, in {run}."
        with contextlib.suppress(Exception):
            known(run).warnings.append(text)  # the panel shows it
        if self._handle is None:
            print(f"warning: {text}", file=sys.stderr, flush=True)

    # ---- what it shows

    def _text(self) -> str:
        parts = [f"Copies of runs in {self.folder}: {len(self.copied)} kept"]
        parts += [f"FAILED: {name} ({why})" for name, why in self.failed.items()]
        return "; ".join(parts)

    def _show(self) -> None:
        """One line in the cell that asked for the copies, replaced in place; a failure stands out."""
        text = self._text()
        if text == self._shown or not in_notebook():
            return
        self._shown = text
        style = "color:#c5221f;font-weight:600" if self.failed else "color:inherit"
        bundle = {
            "text/html": f'<div role="status" style="{style}">{html.escape(text)}</div>',
            "text/plain": text,
        }
        from IPython.display import display

        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            display(bundle, raw=True, display_id=self._handle.display_id, update=True)


def pairs(run: Path, to: Path) -> list[tuple[Path, Path]]:
    """Each file of a run and where its copy goes, in the order in which they are to be copied."""
    files = sorted(_files(run), key=lambda path: (LAST.index(path.name) if path.name in LAST else -1, path))
    return [(path, to / path.relative_to(run)) for path in files]


def bring_back(kept: Path, folder: Path) -> Path:
    """Copy a run from where it was kept into the folder of runs; its directory there. One that is there stays."""
    directory = folder / kept.name
    if not (directory / "plan.json").is_file():
        for path, target in pairs(kept, directory):
            copy(path, target)
    return directory


def copy(source: Path, target: Path) -> None:
    """Copy a file: written beside, read back, compared, renamed. OSError if what is read back differs.

    A file that grows meanwhile is copied as far as it had grown at the start.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.part")
    try:
        with source.open("rb") as file, beside.open("wb") as out:
            written, left = hashlib.sha256(), os.fstat(file.fileno()).st_size
            while left and (piece := file.read(min(PIECE, left))):
                out.write(piece)
                written.update(piece)
                left -= len(piece)
            out.flush()
            os.fsync(out.fileno())
        read = hashlib.sha256()
        with beside.open("rb") as file:
            while piece := file.read(PIECE):
                read.update(piece)
        if read.digest() != written.digest():
            raise OSError(f"{target} was read back other than it was written")
        told = source.stat()
        os.utime(beside, ns=(told.st_atime_ns, told.st_mtime_ns))
        beside.replace(target)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


def _same(source: Path, target: Path) -> bool:
    """Whether the copy of a file is there from an earlier kernel: of its size and time, which `copy` hands on."""
    try:
        here, there = source.stat(), target.stat()
    except FileNotFoundError:
        return False
    # a disk may keep less of a time than another one; two states of one file are further apart
    return here.st_size == there.st_size and abs(here.st_mtime_ns - there.st_mtime_ns) < 2_000_000


def _files(run: Path) -> Iterator[Path]:
    """The files of a run that make sense on another machine."""
    for path in run.rglob("*"):
        inside = path.relative_to(run).parts
        if path.is_file() and not SPARED.intersection(inside) and not any(part[0] == "." for part in inside):
            yield path


def _state(run: Path) -> dict[str, tuple[int, int]]:
    """Size and time of each file: what says that something is new."""
    found = {}
    for path in _files(run):
        with contextlib.suppress(OSError):
            told = path.stat()
            found[str(path)] = (told.st_size, told.st_mtime_ns)
    return found


def _ended(run: Path) -> bool:
    """Whether the last event of a run says that it has ended."""
    with contextlib.suppress(OSError, ValueError), (run / "events.jsonl").open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - 64 * 1024))
        last = file.read().splitlines()[-1:]
        return bool(last) and json.loads(last[0]).get("event") == "finished"
    return False
