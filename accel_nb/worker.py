"""The process side of a run: runs `program.py`, writes its events, obeys the control file.

`python -m accel_nb.worker ENGINE PID BIRTH` imports the engine's framework, then waits for one line on standard
input: a JSON object with `directory` (the run's). A run with a process per device goes on in `ranks.py`. A worker
that waits is the spare one. It ends when its owner, the kernel that started it, is gone: at once while it waits,
after a checkpoint (4 seconds at most) while it trains.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import linecache
import math
import os
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accel_nb import memory_killer, out_of_memory, process_memory
from accel_nb.events import DIRECTORY_FAILED, Events
from accel_nb.files import TAKEN, claim, write_atomic
from accel_nb.processes import alive, born
from accel_nb.reporter import Reporter, Told
from accel_nb.resuming import checkpoint_in
from accel_nb.waiting import Watch

OWNER_GONE = 75  # exit code: the kernel is gone and the program did not end in time
GRACE = 3.5  # seconds from the owner's end to the worker's; the promise is 5
POLL = 0.25  # seconds between looks at the owner

# PyTorch's optimizers import torch._dynamo when the first one is made, which takes as long as torch itself: time
# better spent while the spare worker waits.
# torch_xla, JAX and a TPU's TensorFlow read variables that the program sets: it imports them itself.
MODULES = {
    "pytorch": ("torch", "torch._dynamo"),
    "torch_tpu": ("torch", "torch._dynamo"),
    "torch_xla": ("torch",),
    "tensorflow": ("tensorflow", "keras"),
    "keras_jax": ("numpy",),
    "ranks": (),  # the supervisor of TensorFlow's processes needs none itself
}


class Owner:
    """The process that this worker belongs to: the kernel."""

    def __init__(self, pid: int, birth: float) -> None:
        self.pid, self.birth = pid, birth

    def alive(self) -> bool:
        return alive(self.pid, self.birth)


class Control:
    """The control file as the program sees it: called once a block, and slow only while the run is paused."""

    def __init__(self, path: Path, events: Events) -> None:
        self.path, self.events = path, events
        self.every, self.every_epochs = math.inf, 0  # when a checkpoint is due: seconds, and epochs (0: never)
        self.epoch = lambda: 0  # epochs done
        self._kept = (time.monotonic(), 0)  # when the last checkpoint was asked for, and after which epoch
        self.stop = threading.Event()
        self.alive: Callable[[], None] = lambda: None  # told while the run is paused: that is no silence
        self._seen: tuple[int, int] | None = None
        self._said: dict[str, Any] = {}

    def __call__(self) -> dict[str, Any]:
        said = self._read()
        if said.get("pause") and not self._stopping(said):
            self.events.write("status", text="paused")
            while said.get("pause") and not self._stopping(said):
                self.alive()
                time.sleep(0.05)
                said = self._read()
            if not self._stopping(said):
                self.events.write("status", text="training")
        if self._stopping(said):
            return {"stop": True}
        asked = {} if said.get("learning_rate") is None else {"learning_rate": said["learning_rate"]}
        return {**asked, "checkpoint": True} if self._due() else asked

    def _due(self) -> bool:
        now, epoch = time.monotonic(), self.epoch()
        due = now - self._kept[0] >= self.every or 0 < self.every_epochs <= epoch - self._kept[1]
        if due:
            self._kept = (now, epoch)
        return due

    def _stopping(self, said: dict[str, Any]) -> bool:
        if said.get("stop"):
            self.stop.set()
        return self.stop.is_set()

    def _read(self) -> dict[str, Any]:
        try:
            stat = self.path.stat()
            now = (stat.st_mtime_ns, stat.st_ino)
            if now != self._seen:
                self._said = json.loads(self.path.read_text(encoding="utf-8"))
                self._seen = now
        except (OSError, ValueError):
            pass  # no command yet, or a directory that is gone: the last word counts
        return self._said


def load_program(path: Path) -> types.ModuleType:
    """`program.py` as a module, without running its last lines."""
    module = types.ModuleType("program")
    module.__file__ = str(path)
    source = path.read_text(encoding="utf-8")
    sys.modules["program"] = module  # classes defined in it must be found again when they are stored
    exec(compile(source, str(path), "exec"), module.__dict__)  # noqa: S102 - the run's own program
    return module


def describe_error(error: BaseException, directory: Path) -> dict[str, Any]:
    """An error as an event: one line, the place in the program, the traceback from the program on."""
    frames = traceback.extract_tb(error.__traceback__)
    program = str(directory / "program.py")
    inside = [i for i, frame in enumerate(frames) if frame.filename == program]
    text = str(error).strip() or type(error).__name__
    kind = type(error).__name__
    event: dict[str, Any] = {"kind": kind, "text": f"{kind}: {text}" if kind not in text else text}
    if inside:
        frame = frames[inside[-1]]
        event["where"] = f"program.py, line {frame.lineno}: {(frame.line or '').strip()}"
        frames = traceback.StackSummary.from_list(frames[inside[0] :])
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    told = "" if cause is None else "".join(traceback.format_exception(cause)) + "\nwhich led to\n\n"
    lines = traceback.format_exception_only(type(error), error)
    event["traceback"] = told + "Traceback (most recent call last):\n" + "".join([*frames.format(), *lines])
    shortage = out_of_memory.recognise(error, directory)
    return event if shortage is None else {**event, "told": event["text"], **shortage.fields()}


def run(directory: Path, owner: Owner, rank: int = 0, marks: Events | None = None, *, resume: bool = False) -> int:
    """Run the program in `directory` to its end; the process's exit code.

    Rank 0 writes the run's events. Where there are several ranks, `marks` is this one's own file: a rank that
    fails tells it there, and the supervisor (`ranks.py`) tells the failure that came first.
    """
    began = time.monotonic()
    try:
        events = Events(directory / "events.jsonl")
    except OSError as problem:
        print(f"The run's directory cannot be written: {problem}", file=sys.stderr)
        return DIRECTORY_FAILED
    control = Control(directory / "control.json", events)
    threading.Thread(target=_watch, args=(owner, control), daemon=True).start()
    reporter = watch = None
    status = "failed"
    plan: dict[str, Any] = {}
    try:
        process_memory.limit_memory()
        plan = json.loads((directory / "plan.json").read_text(encoding="utf-8"))
        reporter = Reporter(events, plan)
        reporter.ranks = marks is not None
        if rank == 0:  # the others write none
            control.every = plan["plan"].get("checkpoint_seconds") or math.inf
            control.every_epochs = plan["plan"].get("checkpoint_epochs") or 0
        control.epoch = lambda: reporter.epoch
        program_file = directory / "program.py"
        watch = Watch(
            program_file, lambda text: events.write("waiting", text=f"rank {rank}: {text}" if marks else text)
        )
        report = Told(reporter, watch, rank, marks)
        if rank == 0:
            control.alive = watch.news
            report("status", text="loading the data and the model")
            watch.start()
        program = load_program(program_file)
        found = checkpoint_in(directory) if resume else None
        if resume and rank == 0:
            events.write("resumed")
        more = {} if found is None else {"resume_from": found}
        program.train(report=report, control=control, save_to=directory, **more)
        status = "stopped" if control.stop.is_set() and reporter.step < reporter.planned else "done"
    except BaseException as error:  # SystemExit from the user's model included: each end must be told
        _quiet(reporter, watch)
        linecache.checkcache()
        traceback.print_exc()
        (marks or events).write("error", **describe_error(error, directory))
        if marks is not None:
            return 1
    _quiet(reporter, watch)
    if rank > 0:
        return 0
    device = str(plan.get("plan", {}).get("accelerator", "")).partition(":")[0]
    events.write(
        "finished",
        status=status,
        step=reporter.step if reporter else 0,
        seconds=time.monotonic() - began,
        memory_peak=process_memory.peak(device),
    )
    give_up = time.monotonic() + 60
    while not events.flush() and owner.alive() and time.monotonic() < give_up:
        time.sleep(0.2)  # a full disk may be freed
    if events.waiting:
        print(f"The run's directory cannot be written: {events.problem}", file=sys.stderr)
        return DIRECTORY_FAILED
    return 1 if status == "failed" else 0


def _quiet(reporter: Reporter | None, watch: Watch | None) -> None:
    """The meter and the watch say nothing after the end."""
    if reporter is not None and reporter.meter is not None:
        reporter.meter.ended.set()
    if watch is not None:
        watch.ended.set()


def _watch(owner: Owner, control: Control) -> None:
    """Stop the program politely when the owner is gone, then for certain."""
    while owner.alive():
        time.sleep(POLL)
    control.stop.set()
    time.sleep(GRACE)
    os._exit(OWNER_GONE)


def _watch_idle(owner: Owner, busy: threading.Event) -> None:
    while not busy.is_set():
        if not owner.alive():
            os._exit(0)
        time.sleep(POLL)


def main() -> None:
    if sys.path and sys.path[0] in ("", str(Path.cwd())):
        del sys.path[0]  # a torch.py that lies around must not be taken for the framework
    engine = sys.argv[1]
    owner = Owner(int(sys.argv[2]), float(sys.argv[3]))
    faulthandler.enable()  # a crash in native code leaves its Python stack in the log
    busy = threading.Event()
    threading.Thread(target=_watch_idle, args=(owner, busy), daemon=True).start()
    failed = None
    try:
        for name in MODULES[engine]:
            importlib.import_module(name)
    except BaseException as error:
        failed = error
        traceback.print_exc()
    line = sys.stdin.readline()
    busy.set()
    if not line:
        os._exit(0)  # the owner let go of an unused spare
    job = json.loads(line)
    directory = Path(job["directory"])
    sys.path[:] = [*sys.path, *(p for p in job.get("sys_path", []) if p not in sys.path)]
    with contextlib.suppress(OSError):
        # from here on the run's own log; what was said before moves there
        log = os.open(directory / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        sys.stdout.flush()
        sys.stderr.flush()
        with contextlib.suppress(OSError, KeyError):
            before = Path(job["early_log"])
            os.write(log, before.read_bytes())
            before.unlink()
        os.dup2(log, 1)
        os.dup2(log, 2)
    with contextlib.suppress(OSError):
        os.chdir(directory)
    if failed is not None:
        with contextlib.suppress(OSError):
            events = Events(directory / "events.jsonl")
            events.write("error", **describe_error(failed, directory))
            events.write("finished", status="failed", step=0, seconds=0.0)
        code = 1
    else:
        try:
            code = _work(directory, owner, job)
        except OSError as problem:
            print(f"The run's directory cannot be written: {problem}", file=sys.stderr)
            code = DIRECTORY_FAILED
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no framework's own clean-up can hang or crash a run that has ended


def _work(directory: Path, owner: Owner, job: dict[str, Any]) -> int:
    """The run, in this process or, with a process per device, in several."""
    from accel_nb import ranks

    resume = bool(job.get("resume"))
    taken = claim(directory)
    if taken is None:
        return TAKEN
    pid = os.getpid()
    with contextlib.suppress(OSError):  # a full disk is told by the events
        write_atomic(directory / "worker.json", json.dumps({"pid": pid, "birth": born(pid)}))
    with contextlib.suppress(OSError):  # a directory that cannot be written is told below
        Events(directory / "events.jsonl").write("memory", **memory_killer.before())
    with contextlib.suppress(OSError, ValueError, KeyError):
        plan = json.loads((directory / "plan.json").read_text(encoding="utf-8"))
        if ranks.needed(plan):
            inherited = [*os.environ.get("PYTHONPATH", "").split(os.pathsep), *job.get("sys_path", [])]
            os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(part for part in inherited if part))
            return ranks.supervise(directory, owner, plan, resume=resume)
    return run(directory, owner, resume=resume)


if __name__ == "__main__":
    main()
