"""How worker processes start, and the spare one that has imported its framework before Train is pressed."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from accel_nb.machine import memory_free
from accel_nb.processes import born

# A worker that has imported TensorFlow holds 0.7 GiB, one with a CUDA build of PyTorch about as much.
SPARE_MEMORY = 2 * 2**30
CLUSTER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TF_CONFIG")
PACKAGE_PARENT = Path(__file__).resolve().parent.parent


def environment(engine: str = "pytorch", more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of a worker: this process's own, and a few that must be set before a framework is imported.

    `more`: what the run's route to a TPU needs, see `routes.py`.
    """
    env = dict(os.environ)
    paths = [str(PACKAGE_PARENT), *env.get("PYTHONPATH", "").split(os.pathsep)]
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path for path in paths if path))
    env["PYTHONUNBUFFERED"] = "1"
    env["PYTHONIOENCODING"] = "utf-8"
    env["KERAS_BACKEND"] = "jax" if engine == "keras_jax" else "tensorflow"
    if engine != "torch_tpu":
        # torch_tpu loads itself with every `import torch`, and ends the process where it finds no TPU
        env["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    # "gpu:1" is the driver's second card; CUDA alone counts the fastest one first
    env.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    # Threads of GNU's and LLVM's OpenMP that wait for work soon sleep instead of spinning. On a busy machine (a
    # browser, a second kernel) spinning threads keep each other from the cores: a step of a small MLP took 42 ms
    # there, 7 ms with this, 4 ms on an idle machine either way. It changes no result.
    env.setdefault("GOMP_SPINCOUNT", "1000")
    env.setdefault("KMP_BLOCKTIME", "1")
    # cuBLAS reads it when it starts; it only takes effect in runs that ask for deterministic algorithms
    env.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    env.pop("MPLBACKEND", None)  # a notebook's backend cannot be loaded outside its kernel
    for name in CLUSTER:
        env.pop(name, None)  # a kernel that a cluster's scheduler started is no rank of this run
    return {**env, **(more or {})}


@dataclass(eq=False)
class Worker:
    """A worker process of this kernel."""

    engine: str
    process: subprocess.Popen[bytes]
    early_log: Path
    birth: float  # with the pid it names the process for good, see `processes`

    @property
    def pid(self) -> int:
        return self.process.pid

    def ended(self) -> int | None:
        """Its exit code (negative: the signal that killed it), or None while it lives."""
        return self.process.poll()

    def give(self, directory: Path, *, resume: bool = False) -> None:
        """Hand over a run, to begin or to resume. BrokenPipeError or OSError if the worker is dead."""
        # the kernel's own folder stands in its path as ""
        path = [str(Path(part).absolute()) for part in sys.path if not part.endswith(".zip")]
        job = {"directory": str(directory), "sys_path": path, "early_log": str(self.early_log), "resume": resume}
        pipe: IO[bytes] = self.process.stdin  # type: ignore[assignment]
        pipe.write(json.dumps(job).encode() + b"\n")
        pipe.flush()

    def kill(self) -> None:
        """End it and what it started, for certain. The id of one that has ended may be another's by now."""
        if self.ended() is None:
            kill_group(self.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        self.release()

    def release(self) -> None:
        """Close the pipe and drop the early log."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        with contextlib.suppress(OSError):
            self.early_log.unlink()


def kill_group(pid: int) -> None:
    """SIGKILL to a worker and to all of its process group (a worker leads its own)."""
    with contextlib.suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGTERM)


def start(engine: str, more: Mapping[str, str] | None = None) -> Worker:
    """A new worker; it imports the engine's framework, then waits for a run."""
    handle, name = tempfile.mkstemp(prefix="accel_nb-", suffix=".log")
    pid = os.getpid()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "accel_nb.worker", engine, str(pid), repr(born(pid))],
            stdin=subprocess.PIPE,
            stdout=handle,
            stderr=handle,
            env=environment(engine, more),
            cwd=tempfile.gettempdir(),  # the kernel's folder may vanish, or hold a torch.py
            start_new_session=True,  # the kernel's interrupt must not reach it
        )
    finally:
        os.close(handle)
    return Worker(engine, process, Path(name), born(process.pid))


class Spares:
    """At most one spare worker: that of the engine used or chosen last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spare: Worker | None = None

    def prepare(self, engine: str) -> None:
        """Have a spare for this engine; one for another engine ends. Errors wait until a run needs it."""
        with self._lock:
            spare = self._spare
            if spare is not None and spare.engine == engine and spare.ended() is None:
                return
            self._spare = None
            if spare is not None:
                spare.kill()
            if 0 < memory_free() < SPARE_MEMORY:
                return  # it would take from the run what it saves the next one
            with contextlib.suppress(OSError):
                self._spare = start(engine)

    def take(self, engine: str, more: Mapping[str, str] | None = None) -> Worker:
        """The spare if there is one for this engine, else a new worker, as for a run with variables of its own."""
        with self._lock:
            spare, fits = self._spare, False
            if spare is not None:
                fits = spare.engine == engine and not more and spare.ended() is None
                if fits:
                    self._spare = None
        return spare if spare is not None and fits else start(engine, more)

    def close(self) -> None:
        with self._lock:
            spare, self._spare = self._spare, None
        if spare is not None:
            spare.kill()


spares = Spares()
atexit.register(spares.close)


def hand_over(
    engine: str, directory: Path, more: Mapping[str, str] | None = None, *, resume: bool = False
) -> Worker:
    """Give a run's directory to a worker; a spare that died meanwhile is replaced by a new one, once."""
    worker = spares.take(engine, more)
    try:
        worker.give(directory, resume=resume)
    except OSError:
        worker.kill()
        worker = start(engine, more)
        worker.give(directory, resume=resume)
    return worker
