"""Run: one training run, seen from a kernel. Its truth is its directory; this object tails the events in it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from accel_nb import launch
from accel_nb.errors import AccelNbError, RunFailed
from accel_nb.files import TAKEN, write_atomic
from accel_nb.history import History
from accel_nb.lost import lost_event
from accel_nb.plan import checked_learning_rate
from accel_nb.processes import alive
from accel_nb.saved import SavedRun, read_plan
from accel_nb.trained import load

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENDED = ("done", "stopped", "failed")
PIECE = 1 << 22  # bytes of events read at a time: a long run has gigabytes of them
TAIL_PERIOD = 0.12  # seconds between looks at the events: about 8 a second
SETTLED = 2.0  # seconds in which the end of a run whose worker is gone is told; it takes a few milliseconds
LOST = 2.0  # seconds without the run's directory after which it counts as removed; a network disk may blink
SILENCE = 15.0  # seconds without a step after which the panel says so

Listener = Callable[["Run"], None]


class Run(SavedRun):
    """A training run: started by `accel_nb.train` or the panel, or found again by `accel_nb.runs()`.

    Attributes
    ----------
    directory : path of the run's directory.
    plan : the resolved Plan, without own arrays or models.
    reasons : field of the plan -> why its automatic choice was made.
    history : History with a value per step; it grows while the run trains.
    status : "starting", "running", "paused", "stopping", "done", "stopped" or "failed".
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        super().__init__(directory)
        self.history = History()
        self.error: dict[str, Any] | None = None
        self.warnings: list[str] = []
        self.started: dict[str, Any] = {}
        self.layers: list[Any] = []
        self.parameters: int | None = None
        self.meter: dict[str, Any] = {}
        self.activity = "starting the worker"
        self.waiting = ""  # what a silent run waits in, such as a collective; "" if it does not
        self._worker: launch.Worker | None = None
        self._identity: tuple[int, float] | None = None
        self._finished: dict[str, Any] | None = None
        self._paused = self._full = False
        self._stopping = self._killed = self._begun = False
        self._ended = threading.Event()
        self._listeners: list[Listener] = []
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._offset, self._partial = 0, b""
        self._last_step = time.monotonic()
        self._control = {"seq": 0}

    # ---- what it is

    @property
    def status(self) -> str:
        self.refresh()
        with self._lock:
            if self._finished is not None:
                return str(self._finished["status"])
            if self._stopping:
                return "stopping"
            if self._paused:
                return "paused"
            return "running" if self.started else "starting"

    @property
    def ours(self) -> bool:
        """Whether this kernel started it, or waits with it for other machines."""
        return self._worker is not None or self._begun

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    @property
    def seconds(self) -> float | None:
        """How long the program ran, in seconds; None while it runs."""
        return None if self._finished is None else self._finished.get("seconds")

    def __repr__(self) -> str:
        return f"<Run {self.name}: {self.status}, {self.history.summary()}>"

    # ---- life

    def begin(self) -> None:
        """Hand the directory to a worker and follow it; a run on several machines waits for `commands` there.

        AccelNbError if no worker can be started.
        """
        self._begun = True
        if self.machines > 1:
            self.activity = f"waiting for {self.machines} machines"
            self.follow()
            return
        worker = self._hand_over()
        record = {"pid": worker.pid, "birth": worker.birth}
        with contextlib.suppress(OSError):  # a disk that is full by now is told while it is followed
            write_atomic(self.directory / "worker.json", json.dumps(record))
        self.follow()

    def _hand_over(self, *, resume: bool = False) -> launch.Worker:
        environment = self._saved.get("environment")
        try:
            worker = launch.hand_over(self.worker_kind, self.directory, environment, resume=resume)
        except OSError as problem:
            why = f"no worker process can be started ({problem})"
            do = "Free memory and disk space, or close other processes, then try again."
            raise AccelNbError(f"The run {self.name} cannot begin: {why}. {do}") from problem
        self._worker, self._identity = worker, (worker.pid, worker.birth)
        return worker

    def follow(self) -> None:
        """Tail the events in a thread until the run has ended."""
        with self._lock:
            following = self._thread is not None and self._thread.is_alive()
            if following or self._finished is not None:
                return
            self._ended.clear()
            self._thread = threading.Thread(target=self._tail, name=f"accel_nb {self.name}", daemon=True)
            self._thread.start()

    def attach(self) -> Run:
        """For a run found in its directory: read what there is, follow it if its worker still lives."""
        self._find_worker()
        self.refresh()
        if self._finished is None:
            self.follow()
            if self._worker_gone() is not None:
                self._ended.wait(SETTLED)  # it is lost, which the thread tells after its first look
        return self

    def _find_worker(self) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError):
            record = json.loads((self.directory / "worker.json").read_text(encoding="utf-8"))
            self._identity = (int(record["pid"]), float(record["birth"]))

    def listen(self, listener: Listener) -> None:
        """Call `listener(run)` after each change (about 8 times a second at most) and at the end."""
        with self._lock:
            self._listeners.append(listener)
        if self._finished is not None:
            listener(self)

    def unlisten(self, listener: Listener) -> None:
        with self._lock, contextlib.suppress(ValueError):
            self._listeners.remove(listener)

    def _tail(self) -> None:
        try:
            self._follow()
        except Exception as problem:  # a defect here must not leave `wait()` waiting for ever
            self.error = {"kind": type(problem).__name__, "text": f"The run cannot be followed: {problem!r}"}
            self._finished = {"status": "failed", "step": len(self.history)}
        worker = self._worker
        if worker is not None:
            # the worker has said its last word; what keeps it alive now is a framework's own clean-up
            deadline = time.monotonic() + 3
            while worker.ended() is None and time.monotonic() < deadline:
                time.sleep(0.02)
            worker.kill()
        self._tell()
        self._ended.set()  # after the last picture: who waits finds it drawn
        with self._lock:
            self._listeners.clear()  # a finished run holds on to no panel

    def _follow(self) -> None:
        """Read the events until the last one, or until no more can come."""
        seen = time.monotonic()
        told = 0  # looks since the last news
        while True:
            if self.directory.is_dir():
                seen = time.monotonic()
            elif time.monotonic() - seen > LOST:
                self.kill()
                self._killed = False  # not by a person: the run has failed
                self._lost("removed")
                return
            gone = self._worker_gone()
            changed = self.refresh()
            if self._finished is None and gone is not None and not self.refresh():
                self._lost(gone)
                changed = True
            if self._finished is not None:
                return
            changed = self._look_at_disk() or changed
            told = 0 if changed else told + 1
            # a listener that has just drawn waits before it draws again: a few more calls bring it the last news
            if told <= 3 or self.silence is not None:
                self._tell()
            time.sleep(TAIL_PERIOD)

    def _look_at_disk(self) -> bool:
        """Tell once when the run's disk is full: its events wait in the worker, and the curve stands still."""
        full = False
        if time.monotonic() - self._last_step > 1:
            with contextlib.suppress(OSError):
                full = shutil.disk_usage(self.directory).free < 64 * 1024
        changed, self._full = full != self._full, full
        if full and changed:
            self.warnings.append("The run's disk is full: training goes on, the curve waits until there is space.")
        return changed

    def _tell(self) -> None:
        for listener in list(self._listeners):
            try:
                listener(self)
            except Exception as problem:
                # a picture that cannot be drawn must end no training; it is told once, in the run
                self.unlisten(listener)
                self.warnings.append(f"The display failed: {type(problem).__name__}: {problem}")

    def _worker_gone(self) -> int | str | None:
        """None while the worker lives; else its exit code, or "unknown" when another kernel started it."""
        if self._worker is not None:
            code = self._worker.ended()
            if code != TAKEN:
                return code
            self._worker = None  # another kernel was quicker: it is followed
            self.warnings.append("Another kernel has taken the run up: it is followed here.")
            self._find_worker()
        if self.machines > 1:
            return None  # its processes may be anywhere
        if self._identity is not None and alive(*self._identity):
            return None
        return "unknown"

    def _lost(self, code: int | str) -> None:
        """The worker ended without a last word."""
        tail = "\n".join(self.log.strip().splitlines()[-15:])
        self.error = lost_event(code, self.directory, tail, [self._identity[0]] if self._identity else [])
        self._finished = {"status": "failed", "step": len(self.history)}
        if self._killed:
            self.error = None
            self.warnings.append("Ended at once on request: the curve is kept, the model is not.")
            self._finished["status"] = "stopped"

    def refresh(self) -> bool:
        """Read what is new in the events; whether anything was."""
        told = False
        with self._lock, contextlib.suppress(OSError), (self.directory / "events.jsonl").open("rb") as file:
            file.seek(self._offset)
            while new := file.read(PIECE):
                self._offset += len(new)
                *lines, self._partial = (self._partial + new).split(b"\n")
                for line in lines:
                    # a line that a crash has cut tells nothing; the ones after it do
                    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
                        self._take(json.loads(line))
                told = told or bool(lines)
        return told

    def _take(self, event: dict[str, Any]) -> None:
        kind = event.get("event")
        self.history.add(event)
        if kind == "batch":
            self._last_step = time.monotonic()
            self.activity, self.waiting = "training", ""
        elif kind == "waiting":
            self.waiting = str(event.get("text", ""))
        elif kind == "status":
            self.activity = str(event.get("text", ""))
            self._paused = self.activity == "paused"
            self._last_step = time.monotonic()
        elif kind == "started":
            self.started, self.activity = event, "training"
        elif kind == "model":
            self.layers, self.parameters = event.get("layers", []), event.get("parameters")
        elif kind == "meter":
            self.meter = event
        elif kind == "warning":
            self.warnings.append(str(event.get("text", "")))
        elif kind == "error":
            self.error = self.error or event  # the first one is the cause
        elif kind == "finished":
            self._finished = event
        elif kind == "resumed":
            self._finished = self.error = None
            self._paused = self._stopping = self._killed = False
            self.activity, self.meter = "reading the checkpoint", {}

    @property
    def silence(self) -> float | None:
        """Seconds since the last sign of life, once they are worth telling; None otherwise."""
        quiet = time.monotonic() - self._last_step
        return quiet if quiet > SILENCE and not self._paused and self._finished is None else None

    @property
    def total_steps(self) -> int | None:
        """Steps planned for the whole run; None until the worker has told."""
        steps = self.started.get("steps_per_epoch")
        return None if steps is None else int(steps) * int(self.settled["epochs"])

    # ---- control

    def _command(self, **change: Any) -> None:
        if self.ended:
            raise AccelNbError(f"The run {self.name} has ended ({self.status}); it takes no commands any more.")
        with self._lock:
            self._control = {**self._control, **change, "seq": self._control["seq"] + 1}
            write_atomic(self.directory / "control.json", json.dumps(self._control))

    def stop(self) -> Run:
        """Stop at the end of the present block of steps; model, checkpoint and history are kept. Again: kill."""
        if self.ended:
            return self
        if self._stopping:
            self.kill()
            return self
        self._stopping = True
        try:
            self._command(stop=True)
            if self.machines > 1 and not self.started:
                self.kill()  # nobody is there to read it
        except OSError:
            self.kill()  # a directory that cannot be written carries no polite word
        except AccelNbError:
            pass  # it ended by itself at this very moment
        return self

    def kill(self) -> None:
        """End the worker at once. What it had not written is lost."""
        self._killed = True
        if self.machines > 1:
            # no process of it can be reached from here: the run is closed, and its processes stop when they look
            with contextlib.suppress(OSError), (self.directory / "events.jsonl").open("a") as file:
                line = {"t": time.time(), "event": "finished", "status": "stopped", "step": len(self.history)}
                file.write(json.dumps(line) + "\n")
        elif self._worker is not None:
            if self._worker.ended() is None:
                launch.kill_group(self._worker.pid)
        elif self._identity is not None and alive(*self._identity):
            launch.kill_group(self._identity[0])

    def pause(self) -> Run:
        """Hold the run at the end of the present block of steps, with everything in memory."""
        self._command(pause=True)
        return self

    def resume(self, epochs: int | None = None, **where: Any) -> Run:
        """Let a paused run go on; take up a stopped, failed or lost one, in place, from its checkpoint.

        Parameters
        ----------
        epochs : passes over the data in all, to train longer than planned.
        where : accelerator, strategy, devices, accumulate, precision, compile or cudnn_benchmark, to go on in
            another place: run.resume(accelerator="auto") where the GPU it was on is gone. A new accelerator brings
            the strategy, devices and precision that were asked for at first, unless they are given too.

        Without a checkpoint the run begins anew, in its directory. AccelNbError if it trains already (here or in
        another kernel), is complete, or the checkpoint is damaged; PlanError for fewer epochs than planned, or a
        place that is not here.
        """
        if self.status == "paused" and not where:
            self._command(pause=False)
            return self
        from accel_nb.resuming import ready

        ended = self._finished, self.error
        try:
            with ready(self, epochs, where):  # while the lock is held nobody else begins it
                self._reset()
        except OSError as problem:  # the run stays as it ended
            why = f"its directory cannot be written ({problem.strerror})"
            raise AccelNbError(f"The run {self.name} cannot be taken up: {why}. Free some space.") from problem
        try:
            self._hand_over(resume=True)
        except AccelNbError:
            self._finished, self.error = ended
            raise
        self.follow()
        return self

    def set_learning_rate(self, rate: float) -> Run:
        """A new base learning rate (above 0) from the next block of steps on; a schedule goes on from it."""
        self._command(learning_rate=checked_learning_rate(rate))
        return self

    def wait(self, timeout: float | None = None) -> Run:
        """Wait for the end. RunFailed if the run failed; TimeoutError after `timeout` seconds.

        The first interrupt stops the run politely and keeps model and history, the second one kills it.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        interrupts = 0
        while True:
            try:
                if self.ended and (self._thread is None or self._ended.is_set()):
                    break
                if deadline is not None and time.monotonic() > deadline:
                    raise TimeoutError(f"The run {self.name} is not at its end after {timeout} s.")
                self._ended.wait(0.1)
            except KeyboardInterrupt:
                interrupts += 1
                if interrupts > 1:
                    self.kill()
                else:
                    self.stop()
        self.raise_if_failed()
        return self

    def raise_if_failed(self) -> None:
        """RunFailed, with the reason and the place in `program.py`, if the run failed."""
        if self.status == "failed":
            error = self.error or {"text": "The run failed without a word.", "traceback": ""}
            where = f"\nat {error['where']}" if error.get("where") else ""
            tail = str(error.get("traceback", "")).strip()
            raise RunFailed(f"{self.name}: {error['text']}{where}" + (f"\n\n{tail}" if tail else ""))

    def _reset(self) -> None:
        """Forget the end, before a new worker takes the run up."""
        with self._lock:
            control = {"seq": self._control["seq"] + 1}
            saved = read_plan(self.directory)
            write_atomic(self.directory / "control.json", json.dumps(control))
            self._saved, self._control = saved, control  # from here on nothing can fail
            self._finished = self.error = None
            self._paused = self._stopping = self._killed = self._full = False
            self.warnings.clear()
            self._worker = self._identity = None
            self.waiting, self.activity, self.meter = "", "starting the worker", {}
            self._last_step = time.monotonic()

    # ---- what is left of it

    def show(self) -> None:
        """Show the curve in this cell, live while the run trains."""
        from accel_nb.live import show

        show(self)

    def plot(self, **how: Any) -> Figure:
        """The curves as a matplotlib Figure; `log=True` and `smooth=0.6` as in the panel."""
        from accel_nb.curves import figure

        return figure(self.history, **how)

    def model(self) -> Any:
        """The trained model, on the CPU, in this kernel: the one call that imports a framework here.

        AccelNbError if the run stored no model yet.
        """
        return load(self)
