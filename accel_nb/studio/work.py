"""Work that must not hold up the kernel's main thread, where clicks arrive."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

Job = Callable[[], None]
IDLE = 2.0  # seconds after which a thread without work ends; an old panel holds none


class Background:
    """One thread that does the newest job of each kind. A newer one takes the place of one that still waits.

    `failed` is called with the exception of a job that raises, in that thread.
    """

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._jobs: dict[str, Job] = {}
        self._change = threading.Condition()
        self._alive = self._busy = False

    def submit(self, kind: str, job: Job) -> None:
        with self._change:
            self._jobs.pop(kind, None)  # behind the others: it may build on them
            self._jobs[kind] = job
            if not self._alive:
                self._alive = True
                threading.Thread(target=self._work, name="accel_nb panel", daemon=True).start()
            self._change.notify_all()

    def settled(self, timeout: float | None = None) -> bool:
        """Wait until nothing is left to do; False after `timeout` seconds."""
        with self._change:
            return self._change.wait_for(lambda: not self._jobs and not self._busy, timeout)

    def _work(self) -> None:
        while True:
            with self._change:
                self._busy = False
                self._change.notify_all()
                end = time.monotonic() + IDLE
                while not self._jobs:
                    if not self._change.wait(max(0.0, end - time.monotonic())) and not self._jobs:
                        self._alive = False
                        return
                job = self._jobs.pop(next(iter(self._jobs)))
                self._busy = True
            try:
                job()
            except Exception as problem:
                self._failed(problem)
