"""`events.jsonl`: what happens in a run, one JSON object a line, written by its worker.

Every step of the first million is told. What comes after is told sparingly: the file of a run of days grows by
some 25 MB an hour at most, however short its steps and epochs are.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

DETAIL = 1_000_000  # steps that are told one by one
PAUSE = 0.1  # seconds between lines of steps, and of epochs, after that
VALUES = 10  # of each measure in such a line, at most
MEASURED = ("loss", "accuracy")
DIRECTORY_FAILED = 74  # exit code: the run's directory cannot be written (EX_IOERR of sysexits.h)


def plain(value: Any) -> Any:
    """A value as JSON can hold it: floats to 9 significant digits (exact for float32), no NaN literals."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        if math.isnan(value):
            return "NaN"
        if math.isinf(value):
            return "Infinity" if value > 0 else "-Infinity"
        return float(f"{value:.9g}")
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return str(value)


class Events:
    """`events.jsonl`, appended line by line. A full disk holds lines back and ends no training.

    A directory that was removed ends the process: the run has no place any more.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waiting: list[bytes] = []
        self.problem: OSError | None = None
        self._steps: dict[str, Any] | None = None  # measured, and not yet told
        self._epoch: dict[str, Any] | None = None  # the newest one, if it is not yet told
        self._told = 0.0
        self._lock = threading.Lock()
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        with path.open("rb") as written:
            if written.seek(0, os.SEEK_END):
                written.seek(-1, os.SEEK_END)
                if written.read() != b"\n":
                    # a worker was killed in the middle of a line, which must not take the next one with it
                    self.waiting.append(b"\n")

    def write(self, event: str, **values: Any) -> None:
        with self._lock:
            if event == "batch" and values["first"] > DETAIL:
                self._keep(values)
            elif event == "epoch" and values["step"] > DETAIL:
                self._epoch = values
            else:
                self._tell()
                self._write(event, values)
                return
            if time.monotonic() - self._told >= PAUSE:
                self._tell()

    def _keep(self, values: dict[str, Any]) -> None:
        """Put steps behind those that wait."""
        kept = self._steps
        if kept is not None and kept["first"] + len(kept["loss"]) == values["first"]:
            values = {**values, "epoch": kept["epoch"], "first": kept["first"]}
            values |= {name: [*kept[name], *values[name]] for name in MEASURED if name in kept}
        elif kept is not None:
            self._tell()
        self._steps = values

    def _tell(self) -> None:
        """Write the steps that wait, as means of so many that few values are left, and the newest epoch."""
        steps, epoch, self._steps, self._epoch = self._steps, self._epoch, None, None
        if steps is not None:
            count = len(steps["loss"])
            every = math.ceil(count / VALUES)
            if every > 1:
                pieces = [slice(at, at + every) for at in range(0, count, every)]
                for name in MEASURED:
                    if name in steps:
                        steps[name] = [sum(steps[name][piece]) / len(steps[name][piece]) for piece in pieces]
                steps |= {"every": every, "steps": count}
            self._write("batch", steps)
        if epoch is not None:
            self._write("epoch", epoch)
        self._told = time.monotonic()

    def _write(self, event: str, values: dict[str, Any]) -> None:
        record = {"t": round(time.time(), 3), "event": event, **plain(values)}
        line = json.dumps(record, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        self.waiting.append(line)
        self._flush()

    def flush(self) -> bool:
        """Try again to write what waits; whether all is written."""
        with self._lock:
            self._flush()
        return not self.waiting

    def _flush(self) -> None:
        try:
            if os.fstat(self._file).st_nlink == 0:
                # deleted under our feet: nothing of this run can be kept any more, so it ends here
                print("The run's directory was removed.", file=sys.stderr, flush=True)
                os._exit(DIRECTORY_FAILED)
            while self.waiting:
                done = os.write(self._file, self.waiting[0])
                # a line cut by a full disk goes on where it stopped
                self.waiting[0] = self.waiting[0][done:]
                if not self.waiting[0]:
                    self.waiting.pop(0)
            self.problem = None
        except OSError as problem:
            self.problem = problem
