"""The memory of this process: a limit that a person may set, what it leaves, and the most that was held."""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
from pathlib import Path

from accel_nb.machine import machine

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

VARIABLE = "ACCEL_NB_MEMORY_LIMIT"  # GiB of host memory that a worker (of several processes: each) may hold
LEAST = 64 * 2**20  # bytes that a worker needs beside what its framework holds already
# MiB that TensorFlow takes past its allocator: for graphs and files, and for each core the stacks of its threads.
TF_REST, TF_CORE = 160, 24


def limit_memory() -> None:
    """Set the limit of ACCEL_NB_MEMORY_LIMIT, if there is one: more memory is refused to this process from now on.

    So it fails by itself, with an error that can be told, before the system's memory killer ends this process or
    another one. It counts what the process has reserved to write to (Linux's RLIMIT_DATA). MemoryError where the
    limit leaves nothing to work with; ValueError for a value that is no size.
    """
    told = os.environ.get(VARIABLE, "")
    if not told or resource is None or not sys.platform.startswith("linux"):
        return
    try:
        size = float(told) * 2**30
    except ValueError:
        size = math.nan
    if not 0 < size < 2**62:
        raise ValueError(f"{VARIABLE}={told!r}: It is no size. Pass GiB, such as {VARIABLE}=4.")
    if size < held() + LEAST:
        raise MemoryError(
            f"{VARIABLE}={told} allows {size / 2**30:.2f} GiB, and this process holds {held() / 2**30:.2f} GiB "
            "before it trains."
        )
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    allowed = int(size) if hard == resource.RLIM_INFINITY else min(int(size), hard)
    # TensorFlow does not look at each answer of the system's own allocator, and may crash without a word. The one
    # that it has for GPUs tells first.
    os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"
    rest = TF_REST + TF_CORE * machine().cpu.cores
    os.environ["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = str(max(1, (allowed - held()) // 2**20 - rest))
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, hard))


def held() -> int:
    """Bytes that this process has reserved to write to; 0 where that is not told."""
    with contextlib.suppress(OSError):
        found = re.search(r"^VmData:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else 0
    return 0


def room() -> tuple[int, int]:
    """Bytes of host memory that are free for this process, and in all, within its limit."""
    here = machine().cpu
    free, total = here.memory_free, here.memory_total
    if resource is not None and sys.platform.startswith("linux"):
        limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
        if limit != resource.RLIM_INFINITY and limit < total:
            free, total = min(free, max(0, limit - held())), limit
    return free, total


def peak(accelerator: str) -> int | None:
    """The most bytes that this process has held so far, on its GPU or, on a CPU, in host memory; None: unknown."""
    with contextlib.suppress(Exception):  # a figure for people is no reason to fail
        torch, tensorflow, jax = (sys.modules.get(name) for name in ("torch", "tensorflow", "jax"))
        if accelerator == "cpu" and resource is not None:
            unit = 1 if sys.platform == "darwin" else 1024
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        if accelerator == "gpu" and torch is not None and torch.cuda.is_initialized():
            return int(torch.cuda.max_memory_reserved())
        if accelerator == "gpu" and tensorflow is not None:
            return int(tensorflow.config.experimental.get_memory_info("GPU:0")["peak"])
        if accelerator in ("gpu", "tpu") and jax is not None:
            return int(jax.local_devices()[0].memory_stats()["peak_bytes_in_use"])
    return None
