"""The process side of a run: runs `program.py`, writes its events, obeys the control file.

`python -m accel_nb.worker pytorch` imports the framework, then waits for one line on standard input: a JSON object
with `directory` (the run's). A worker that waits is the spare one. It ends when its owner, the kernel that started
it, is gone: at once while it waits, after a checkpoint (4 seconds at most) while it trains.
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
from pathlib import Path
from typing import Any

from accel_nb.processes import alive

DIRECTORY_FAILED = 74  # exit code: the run's directory cannot be written (EX_IOERR of sysexits.h)
OWNER_GONE = 75  # exit code: the kernel is gone and the program did not end in time
GRACE = 3.5  # seconds from the owner's end to the worker's; the promise is 5
POLL = 0.25  # seconds between looks at the owner

# PyTorch's optimizers import torch._dynamo when the first one is made, which takes as long as torch itself: time
# better spent while the spare worker waits.
MODULES = {"pytorch": ("torch", "torch._dynamo"), "tensorflow": ("tensorflow", "keras")}


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
        self._lock = threading.Lock()
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, event: str, **values: Any) -> None:
        record = {"t": round(time.time(), 3), "event": event, **plain(values)}
        line = json.dumps(record, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        with self._lock:
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
        self.stop = threading.Event()
        self._seen: tuple[int, int] | None = None
        self._said: dict[str, Any] = {}

    def __call__(self) -> dict[str, Any]:
        said = self._read()
        if said.get("pause") and not self._stopping(said):
            self.events.write("status", text="paused")
            while said.get("pause") and not self._stopping(said):
                time.sleep(0.05)
                said = self._read()
            if not self._stopping(said):
                self.events.write("status", text="training")
        if self._stopping(said):
            return {"stop": True}
        rate = said.get("learning_rate")
        return {} if rate is None else {"learning_rate": rate}

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
    return event


class Meter(threading.Thread):
    """Samples per second, memory and use of the device, about once a second, in a thread that never disturbs."""

    def __init__(self, events: Events, card: int | None) -> None:
        super().__init__(daemon=True)
        self.events = events
        self.card = card  # the GPU's index as the driver counts; None for the CPU
        self.samples, self.since = 0, time.monotonic()
        self.ended = threading.Event()
        self.period = 1.0

    def count(self, samples: int) -> None:
        self.samples += samples

    def run(self) -> None:
        import psutil

        process = psutil.Process()
        process.cpu_percent()
        while not self.ended.wait(self.period):
            now = time.monotonic()
            samples, self.samples = self.samples, 0
            seconds, self.since = now - self.since, now
            with contextlib.suppress(Exception):  # a meter that fails is no reason to fail
                self.events.write("meter", samples_per_second=samples / seconds, **self._use(process))
            self.period = min(self.period * 1.02, 5.0)  # a long run's file grows slowly

    def _use(self, process: Any) -> dict[str, Any]:
        from accel_nb import machine

        host = process.memory_info().rss
        if self.card is not None:
            usage = machine.gpu_usage(self.card)
            if usage is not None:
                told = {"memory": usage.memory_used, "memory_total": usage.memory_total, "host_memory": host}
                return told if usage.utilization is None else {"utilization": usage.utilization, **told}
        here = machine.machine()
        return {
            "utilization": min(1.0, process.cpu_percent() / 100 / max(1, here.cpu.cores)),
            "memory": host,
            "memory_total": here.cpu.memory_total,
            "host_memory": host,
        }


class Reporter:
    """What the program calls as `report(event, ...)`."""

    def __init__(self, events: Events, plan: dict[str, Any]) -> None:
        self.events, self.plan = events, plan
        self.step = self.planned = 0
        self.began = time.monotonic()
        self.meter: Meter | None = None

    def __call__(self, event: str, **values: Any) -> None:
        if event == "started":
            self._check_device(values)
            self.planned = values["steps_per_epoch"] * self.plan["plan"]["epochs"]
            if values["device"] == "cpu":
                from accel_nb.machine import machine

                values["device_name"] = machine().cpu.name  # the frameworks tell no more than the architecture
            values["asked"] = self.plan["asked"]["accelerator"]
            values["reasons"] = self.plan["reasons"]
            self.events.write("started", **values)
            self.meter = Meter(self.events, self.plan.get("gpu"))
            self.meter.start()
            return
        self.events.write(event, **values)
        if event == "model" and self.plan.get("parameters") is None:
            self._weigh(values)
        if event == "batch":
            self.step = values["first"] + len(values["loss"]) - 1
            if self.meter is not None:
                self.meter.count(len(values["loss"]) * self.plan["plan"]["batch_size"])

    def _weigh(self, values: dict[str, Any]) -> None:
        """Warn if a user's own model, whose size only its making tells, will hardly fit.

        Weights, gradients and two moments of Adam are 16 bytes a parameter; each layer's output is kept in float32
        for the backward pass, with its gradient.
        """
        from accel_nb import machine

        card = self.plan.get("gpu")
        usage = None if card is None else machine.gpu_usage(card)
        free = machine.memory_free() if usage is None else usage.memory_total - usage.memory_used
        outputs = sum(math.prod(row[2]) for row in values["layers"])
        need = 16 * values["parameters"] + 8 * self.plan["plan"]["batch_size"] * outputs
        if free and need > free:
            text = f"The model needs about {need / 2**30:.1f} GiB to train, and {free / 2**30:.1f} GiB are free."
            self.events.write("warning", text=text)

    def _check_device(self, values: dict[str, Any]) -> None:
        from accel_nb.diagnose import check_used

        check_used(self.plan["plan"]["accelerator"], str(values["device"]), self.plan["plan"]["framework"])


def run(directory: Path, owner: Owner) -> int:
    """Run the program in `directory` to its end; the process's exit code."""
    began = time.monotonic()
    try:
        events = Events(directory / "events.jsonl")
    except OSError as problem:
        print(f"The run's directory cannot be written: {problem}", file=sys.stderr)
        return DIRECTORY_FAILED
    control = Control(directory / "control.json", events)
    threading.Thread(target=_watch, args=(owner, control), daemon=True).start()
    reporter = None
    status = "failed"
    try:
        plan = json.loads((directory / "plan.json").read_text(encoding="utf-8"))
        reporter = Reporter(events, plan)
        events.write("status", text="loading the data and the model")
        program = load_program(directory / "program.py")
        program.train(report=reporter, control=control, save_to=directory)
        status = "stopped" if control.stop.is_set() and reporter.step < reporter.planned else "done"
    except BaseException as error:  # SystemExit from the user's model included: each end must be told
        if reporter is not None and reporter.meter is not None:
            reporter.meter.ended.set()
        linecache.checkcache()
        traceback.print_exc()
        events.write("error", **describe_error(error, directory))
    step = reporter.step if reporter is not None else 0
    if reporter is not None and reporter.meter is not None:
        reporter.meter.ended.set()
    events.write("finished", status=status, step=step, seconds=time.monotonic() - began)
    give_up = time.monotonic() + 60
    while not events.flush() and owner.alive() and time.monotonic() < give_up:
        time.sleep(0.2)  # a full disk may be freed
    if events.waiting:
        print(f"The run's directory cannot be written: {events.problem}", file=sys.stderr)
        return DIRECTORY_FAILED
    return 1 if status == "failed" else 0


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
    framework = sys.argv[1]
    owner = Owner(int(sys.argv[2]), float(sys.argv[3]))
    faulthandler.enable()  # a crash in native code leaves its Python stack in the log
    busy = threading.Event()
    threading.Thread(target=_watch_idle, args=(owner, busy), daemon=True).start()
    failed = None
    try:
        for name in MODULES[framework]:
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
        code = run(directory, owner)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no framework's own clean-up can hang or crash a run that has ended


if __name__ == "__main__":
    main()
