"""Several processes for one run on one machine: a supervisor, and one process ("rank") per device.

The supervisor is the run's worker: the process that the kernel knows. It starts the ranks (torchrun's agent does
so for PyTorch, TF_CONFIG for TensorFlow), ends them all when one fails, and tells which failed first and why. A
rank runs `program.py`; rank 0 writes the events and obeys the control file, the program passes its word on.
`python -m accel_nb.ranks DIRECTORY PARENT PID BIRTH begin|resume` is one rank; PID and BIRTH name the kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from accel_nb import worker
from accel_nb.errors import ProgramError
from accel_nb.events import Events
from accel_nb.joining import PROGRAMS
from accel_nb.lost import lost_event
from accel_nb.processes import alive, born
from accel_nb.spread import OWN_PROCESSES

JOIN = 13.0  # seconds from the first rank that waits for the others to the last; the programs' own limit is 12
# What a rank says whose neighbour is gone: not the cause of a failure.
NEIGHBOUR_GONE = re.compile(
    r"closed by peer|reset by peer|connection refused|broken pipe|socket closed|unavailable|"
    r"timed? ?out|timeout|aborted|NCCL|collective|coordination service|heartbeat|store->get|DistStoreError",
    re.IGNORECASE,
)


def needed(plan: dict[str, Any]) -> bool:
    """Whether the run of a stored plan (the content of plan.json) has a process per device."""
    return plan["plan"].get("strategy") in OWN_PROCESSES


def supervise(directory: Path, owner: worker.Owner, plan: dict[str, Any], *, resume: bool = False) -> int:
    """Start the ranks, wait for their end, tell a failure; the supervisor's exit code."""
    began = time.monotonic()
    devices = int(plan["plan"]["devices"])
    marks = directory / "ranks"
    shutil.rmtree(marks, ignore_errors=True)  # of an earlier start of this run
    marks.mkdir()
    parent = os.getpid()
    command = [sys.executable, "-m", "accel_nb.ranks", str(directory), str(parent)]
    command += [str(owner.pid), repr(owner.birth), "resume" if resume else "begin"]
    threading.Thread(target=_watch_owner, args=(owner,), daemon=True).start()
    threading.Thread(target=_watch_joining, args=(directory, devices, began), daemon=True).start()
    try:
        if plan["plan"]["framework"] == "pytorch":
            launch = runpy.run_path(str(PROGRAMS / "pytorch" / "launch.py"))["launch"]
            failures = launch(command, devices)
        else:
            failures = start_workers(command, devices)
    except BaseException as error:
        traceback.print_exc()
        return _tell(directory, worker.describe_error(error, directory), began)
    if not failures and _ended(directory):
        return 0  # rank 0 has said its last word; what failed after that was a clean-up
    return _tell(directory, first_failure(failures, read_marks(directory), directory), began)


def _watch_owner(owner: worker.Owner) -> None:
    """The ranks look after themselves when the kernel is gone; this ends what is left of them."""
    while owner.alive():
        time.sleep(worker.POLL)
    time.sleep(worker.GRACE + 0.4)
    os._exit(worker.OWNER_GONE)


def _watch_joining(directory: Path, devices: int, began: float) -> None:
    """End a run in which some rank does not come: it may hang before it can fail."""
    waiting_since: float | None = None
    while True:
        time.sleep(0.25)
        marks = read_marks(directory)
        stages = [{mark["event"] for mark in marks.get(rank, [])} for rank in range(devices)]
        if all("joined" in stage for stage in stages):
            return
        if waiting_since is None and any("joining" in stage for stage in stages):
            waiting_since = time.monotonic()
        if waiting_since is not None and time.monotonic() - waiting_since > JOIN:
            _tell(directory, _absent(marks, devices, directory), began)
            os._exit(1)  # the ranks die with their parent


def _absent(marks: dict[int, list[dict[str, Any]]], devices: int, directory: Path) -> dict[str, Any]:
    missing = [r for r in range(devices) if not {"joining", "joined"} & {m["event"] for m in marks.get(r, [])}]
    text = f"Rank {missing[0]} did not join the others" if missing else "The ranks did not find each other"
    where = {m["event"]: m for m in marks.get(missing[0], [])} if missing else {}
    hint = "it has not even started" if missing and not where else "it hangs before the program's first collective"
    tail = _log_tail(directory)
    return {"kind": "RankMissing", "text": f"{text} within {JOIN:.0f} s: {hint}.", "traceback": tail}


def read_marks(directory: Path) -> dict[int, list[dict[str, Any]]]:
    """Rank -> what it wrote of itself: "started", "joining", "joined", "error"."""
    found: dict[int, list[dict[str, Any]]] = {}
    for path in (directory / "ranks").glob("*.jsonl"):
        lines = []
        with contextlib.suppress(OSError, ValueError):
            lines = [
                json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")
            ]
        found[int(path.stem)] = lines
    return found


def first_failure(
    failures: dict[int, int], marks: dict[int, list[dict[str, Any]]], directory: Path
) -> dict[str, Any]:
    """The event of the failure that began it all: its neighbours fail too, because it is gone."""
    told = sorted(
        ((mark["t"], rank, mark) for rank, lines in marks.items() for mark in lines if mark["event"] == "error"),
        key=lambda one: one[0],
    )
    causes = [one for one in told if not NEIGHBOUR_GONE.search(one[2]["text"])]
    # SIGTERM is how torchrun's agent ends the neighbours of a rank that failed
    quiet = [rank for rank in failures if rank not in {rank for _, rank, _ in told}]
    silent = sorted(rank for rank in quiet if not told or failures[rank] != -signal.SIGTERM)
    absent = [rank for rank, lines in marks.items() if "joining" not in {mark["event"] for mark in lines}]
    if causes or (told and not silent and not absent):
        _, rank, mark = (causes or told)[0]
        event = {key: value for key, value in mark.items() if key not in ("t", "event")}
        return {**event, "text": f"Rank {rank}: {event['text']}", "rank": rank}
    if silent:
        rank = silent[0]
        pids = [mark["pid"] for mark in marks.get(rank, []) if mark["event"] == "started"]
        who, tail = f"Rank {rank}", _log_tail(directory)
        return {**lost_event(failures[rank], directory, tail, pids, who=who, kind="RankLost"), "rank": rank}
    if absent:
        return _absent(marks, max(marks) + 1, directory)
    text = "The ranks ended without a last word."
    return {"kind": "RankLost", "text": text, "traceback": _log_tail(directory)}


def _log_tail(directory: Path) -> str:
    with contextlib.suppress(OSError):
        lines = (directory / "log.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return "\n".join(lines[-15:])
    return ""


def _ended(directory: Path) -> bool:
    return '"event":"finished"' in _tail_of(directory / "events.jsonl")


def _tail_of(path: Path) -> str:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 64 * 1024))
        return file.read().decode(errors="replace")
    return ""


def _tell(directory: Path, error: dict[str, Any], began: float) -> int:
    """Write the failure as the run's last words; 1, the exit code."""
    with contextlib.suppress(OSError):
        events = Events(directory / "events.jsonl")
        steps = re.findall(r'"event":"batch".*?"first":(\d+)', _tail_of(directory / "events.jsonl"))
        events.write("error", **error)
        step = int(steps[-1]) if steps else 0
        events.write("finished", status="failed", step=step, seconds=time.monotonic() - began)
    return 1


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that nobody listens on, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def start_workers(command: list[str], devices: int) -> dict[int, int]:
    """Start TensorFlow's workers, which find each other through TF_CONFIG; their failures, told as by `launch`."""
    cluster = {"worker": [f"127.0.0.1:{port}" for port in free_ports(devices)]}
    processes = []
    for rank in range(devices):
        config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}})
        processes.append(subprocess.Popen(command, env={**os.environ, "TF_CONFIG": config}))
    try:
        while True:
            codes = [process.poll() for process in processes]
            failed = {rank: code for rank, code in enumerate(codes) if code}
            if failed or None not in codes:
                return failed
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


# ---- one rank


def _die_with(parent: int) -> None:
    """Have the system end this process when its parent ends, however that happens."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    birth = born(parent)
    if os.getppid() != parent:
        os._exit(worker.OWNER_GONE)  # it was gone before we asked

    def watch() -> None:
        while alive(parent, birth):
            time.sleep(worker.POLL)
        os._exit(worker.OWNER_GONE)

    threading.Thread(target=watch, daemon=True).start()


def rank_of_environment() -> int:
    """The rank of this process, as torchrun or TF_CONFIG tells it."""
    if "RANK" in os.environ:
        return int(os.environ["RANK"])
    if "TF_CONFIG" in os.environ:
        return int(json.loads(os.environ["TF_CONFIG"])["task"]["index"])
    raise ProgramError("A rank learns its number from RANK or TF_CONFIG, and neither is set.")


def main() -> None:
    if sys.path and sys.path[0] in ("", str(Path.cwd())):
        del sys.path[0]  # a torch.py that lies around must not be taken for the framework
    directory, parent = Path(sys.argv[1]), int(sys.argv[2])
    owner = worker.Owner(int(sys.argv[3]), float(sys.argv[4]))
    _die_with(parent)
    faulthandler.enable()
    rank = rank_of_environment()
    marks = Events(directory / "ranks" / f"{rank}.jsonl")
    marks.write("started", pid=os.getpid())
    code = worker.run(directory, owner, rank, marks, resume=sys.argv[5] == "resume")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no framework's own clean-up can hang or crash a run that has ended


if __name__ == "__main__":
    main()
