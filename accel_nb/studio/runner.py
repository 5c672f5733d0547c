"""The running side of the panel: Train, Pause and Stop, the progress of the run, and what it leaves behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import ipywidgets as widgets

from accel_nb import api
from accel_nb.errors import AccelNbError
from accel_nb.folder import runs_folder
from accel_nb.live import progress, status_line
from accel_nb.plan import Plan
from accel_nb.resuming import go_on
from accel_nb.run import Run
from accel_nb.studio.fields import button, row, text_html
from accel_nb.studio.machines import MachineLines
from accel_nb.studio.style import bar
from accel_nb.studio.words import Words

READY = "ready"


class Runner:
    """Starts a run, follows it, and hands on what a person asks of it.

    `began(run)` is called when a run is followed from then on, `draw()` after each change of it, `ended(run)` once
    at its end; the last two from the run's own thread.
    """

    def __init__(
        self,
        words: Words,
        directory: str | Path | None,
        began: Callable[[Run], None],
        draw: Callable[[], None],
        ended: Callable[[Run], None],
    ) -> None:
        self.run: Run | None = None
        self._words, self._directory = words, directory
        self._began, self._draw, self._ended = began, draw, ended
        self._lock = threading.RLock()
        self._starting: Future[Run] | None = None
        self._asked = ""  # "pause", "resume" or "stop": what was pressed and has not happened yet
        self._seen_end, self._warned = True, 0
        self._refused = ""
        self._offered: Run | None = None  # an earlier run that can go on
        self.finished = threading.Event()  # set when all that a run leaves in the notebook is there
        self.train = button("▶\ufe0e Train", "Train the model as set above", "anb-go")
        self.pause = button("❚❚ Pause", "Hold the run with everything in memory")
        self.resume = button("▶\ufe0e Resume", "")  # one of its own: a late click on Pause must resume nothing
        self.stop = button("■ Stop", "Stop after the present steps; model and curve are kept", "anb-stop")
        self.line = text_html(bar(0, READY), "anb-wide")
        self.machines = MachineLines(words.guard)
        self.ui = row("", self.train, self.pause, self.resume, self.stop, self.line)
        self.buttons()

    @property
    def live(self) -> bool:
        """Whether a run is starting or has not ended."""
        return self._starting is not None or (self.run is not None and not self.run.ended)

    # ---- what is asked

    def begin(self, plan: Plan, line: str) -> Future[Run]:
        """Start a run, unless one is on its way: then that one. The future holds the Run, or what stopped it.

        `line` says what happens first.
        """
        with self._lock:
            if self._starting is None and self.run is not None and not self.run.ended:
                future: Future[Run] = Future()
                future.set_result(self.run)
                return future
        return self._launch(lambda: api.start(plan, self._directory, spare=False), line)

    def take_up(self, run: Run) -> Future[Run]:
        """Let a run that has ended too early go on. The future holds the Run, or why it cannot."""

        def begin() -> Run:
            here, moved = go_on(run.directory, runs_folder(self._directory))
            if moved:
                self._words.say(f"{here.name} goes on on {here.settled['accelerator']}: {moved}")
            return here

        return self._launch(begin, f"reading {run.name}")

    def _launch(self, begin: Callable[[], Run], line: str) -> Future[Run]:
        """What gives a run, in a thread of its own, unless one is on its way: then that one."""
        with self._lock:
            if self._starting is not None:
                return self._starting
            future: Future[Run] = Future()
            self._starting, self._offered = future, None
        self._words.clear_error()
        self.buttons()
        self._show_line(0, line)
        threading.Thread(target=self._start, args=(begin, future), name="accel_nb start", daemon=True).start()
        return future

    def offer(self, run: Run | None) -> None:
        """The earlier run that can go on, for the button Resume; None for none."""
        with self._lock:
            self._offered = run
            fresh = self.run is None and self._starting is None
        if run is not None and fresh:
            total = f" of {run.total_steps:,}" if run.total_steps else ""
            self._show_line(0, f"{READY} · Resume goes on with {run.name} at step {len(run.history):,}{total}")
        self.buttons()

    def _start(self, begin: Callable[[], Run], future: Future[Run]) -> None:
        try:
            run = begin()
            self.adopt(run)
        except BaseException as problem:  # the person waits for an answer, whatever it is
            with self._lock:
                self._starting = None
            self._show_line(0, "not started")
            self._words.failed(problem)
            self.buttons()
            future.set_exception(problem)
        else:
            with self._lock:
                self._starting = None
            self.buttons()
            future.set_result(run)

    def adopt(self, run: Run) -> None:
        """Follow this run from now on."""
        with self._lock:
            before, self.run = self.run, run
            self._asked, self._seen_end, self._warned = "", False, 0
            self.finished.clear()
        if before is not None:
            before.unlisten(self._changed)
        self.machines.follow(run)
        self._began(run)
        run.listen(self._changed)
        self.buttons()

    def resuming(self) -> None:
        """Take up the run that is offered, unless one is on its way."""
        offered = self._offered
        if offered is not None and not self.live:
            self.take_up(offered)

    def pausing(self) -> None:
        """Pause a running run, let a paused one go on."""
        run = self._live_run()
        if run.status == "paused":
            run.resume()
            self._asked = "resume"
        else:
            run.pause()
            self._asked = "pause"
        self.buttons()

    def stopping(self) -> None:
        """Stop the run politely; pressed again, end it at once."""
        if self._starting is not None:
            return
        self._live_run().stop()
        self._asked = "stop"
        self.buttons()

    def _live_run(self) -> Run:
        run = self.run
        if run is None or run.ended:
            raise AccelNbError("No run is going on. Press Train, or call train().")
        return run

    def wait(self, timeout: float | None = None) -> Run:
        """Wait for the end of the run; RunFailed if it failed."""
        starting = self._starting
        if starting is not None:
            try:
                starting.result(timeout)
            except KeyboardInterrupt:  # as in `Run.wait`: it is stopped, as soon as it has begun
                starting.result(timeout).stop()
        if self.run is None:
            raise AccelNbError("No run was started. Press Train, or call train().")
        try:
            return self.run.wait(timeout)
        finally:
            if self.run.ended:
                self.finished.wait(30)  # the picture that stays belongs to this cell

    # ---- what happens

    def _changed(self, run: Run) -> None:
        """From the run's thread, after each change."""
        if run is not self.run:
            run.unlisten(self._changed)
            return
        try:
            status = run.status
            if (self._asked, status) in (("pause", "paused"), ("resume", "running")):
                self._asked = ""
            self.machines.update(run)
            self.buttons()
            self._show_line(progress(run), status_line(run))
            self._draw()
            self._warn(run)
            if run.ended and not self._seen_end:
                self._seen_end = True
                self._at_end(run)
        except Exception as problem:
            self._words.failed(problem)

    def _warn(self, run: Run) -> None:
        """What the worker warns of, once; all of it stays in the tab "Machine"."""
        if len(run.warnings) > self._warned:
            self._warned = len(run.warnings)
            self._words.say(run.warnings[-1])

    def _at_end(self, run: Run) -> None:
        if run.status == "failed":
            error = run.error or {"text": "The run failed without a word."}
            where = f" At {error['where']}." if error.get("where") else ""
            self._words.fail(f"{error['text']}{where}", str(error.get("traceback", "")))
        try:
            self._ended(run)
        finally:
            self.finished.set()

    def refuse(self, reason: str) -> None:
        """Why Train cannot be pressed; "" if it can."""
        if reason != self._refused:
            self._refused = reason
            self.buttons()

    def buttons(self) -> None:
        """The buttons tell how things are."""
        with self._lock:
            starting = self._starting is not None
            status = "" if self.run is None else self.run.status
            live = status not in ("", "done", "stopped", "failed")
            busy = starting or live
            waits = live and self.machines.shown
            label = "Starting…" if starting else "Waiting…" if waits else "Training…" if live else "▶\ufe0e Train"
            told = self._refused or "Train the model as set above"
            if busy:
                told = "A run is on its way; stop it to start another"
            _set(self.train, label, told, disabled=busy or bool(self._refused))
            stop = "Stopping…" if status == "stopping" else "■ Stop"
            told = "Stop after the present steps; model and curve are kept"
            if status == "stopping":
                told = "Press again to end the run at once, without its model"
            _set(self.stop, stop, told, disabled=not live)
            paused, offered = status == "paused", None if busy else self._offered
            label, told = "❚❚ Pause", "Hold the run with everything in memory"
            if paused:
                label, told = "▶\ufe0e Resume", "Let the run go on where it was held"
            told_of = "" if offered is None else f"Go on with {offered.name}, from its checkpoint"
            _set(self.resume, self.resume.description, told_of, disabled=offered is None)
            self.resume.layout.display = "none" if offered is None else None
            self.pause.layout.display = None if offered is None else "none"
            waiting = {"pause": "Pausing…", "resume": "Resuming…"}.get(self._asked, "") if live else ""
            _set(
                self.pause,
                waiting or label,
                told,
                disabled=not live or waits or status == "stopping" or bool(waiting),
            )

    def _show_line(self, part: float, line: str) -> None:
        html = bar(part, line)
        if self.line.value != html:
            self.line.value = html


def _set(one: widgets.Button, text: str, tooltip: str, *, disabled: bool) -> None:
    for name, value in (("description", text), ("tooltip", tooltip), ("disabled", disabled)):
        if getattr(one, name) != value:
            setattr(one, name, value)
