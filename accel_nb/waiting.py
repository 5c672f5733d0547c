"""What a silent program waits in: told from the stack of its main thread, by a thread beside it."""

from __future__ import annotations

import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

SILENT = 8.0  # seconds without news after which it is worth telling; the panel speaks up after 15
# Functions of torch.distributed and tf.distribute in which a rank waits for the others.
_COLLECTIVE = re.compile(r"all_reduce|all_gather|reduce_scatter|broadcast|barrier|reduce|gather|scatter|monitored")


class Watch(threading.Thread):
    """Calls `tell(text)` when the main thread has been silent for a while, again when it waits elsewhere."""

    def __init__(self, program: Path, tell: Callable[[str], None]) -> None:
        super().__init__(daemon=True)
        self.program, self.tell = str(program), tell
        self.last = time.monotonic()
        self.ended = threading.Event()
        self._main = threading.main_thread().ident
        self._told = ""

    def news(self) -> None:
        """There was a sign of life."""
        self.last, self._told = time.monotonic(), ""

    def run(self) -> None:
        while not self.ended.wait(1.0):
            if time.monotonic() - self.last < SILENT:
                continue
            text = self.where()
            if text and text != self._told:
                self._told = text
                self.tell(text)

    def where(self) -> str:
        """Such as "all_reduce, program.py, line 210: dist.all_reduce(sums)"; "" outside the program."""
        frame = sys._current_frames().get(self._main or 0)  # noqa: SLF001 - documented, in spite of its name
        if frame is None:
            return ""
        stack = traceback.extract_stack(frame)
        inside = [i for i, entry in enumerate(stack) if entry.filename == self.program]
        if not inside:
            return ""
        here = stack[inside[-1]]
        below = stack[inside[-1] + 1 :]
        called = [
            entry.name for entry in below if "distributed" in entry.filename and _COLLECTIVE.search(entry.name)
        ]
        what = called[0] if called else ""
        if not what and any("autograd" in entry.filename for entry in below):
            what = "the backward pass"
        place = f"program.py, line {here.lineno}: {(here.line or '').strip()}"
        return f"{what}, {place}" if what else place
