"""What the NVIDIA driver says: cards, memory, versions, use. Asked through NVML, or `nvidia-smi` without it.

Nothing here touches CUDA: reading these numbers makes no context, takes no GPU memory and is safe in the kernel.
"""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from os import environ
from typing import Any, NamedTuple

MIB = 1024**2
# `nvidia-smi` waits without end on a card that hangs; nobody should wait with it.
SMI_SECONDS = 2.0
# Not always on PATH: older Colab images, and the Windows driver's copy inside WSL.
SMI_PLACES = ("/opt/bin", "/usr/lib/wsl/lib")


@dataclass(frozen=True)
class GPU:
    """One NVIDIA card. Memory in bytes, 0 where the driver does not tell. `index` counts in PCI bus order."""

    index: int
    name: str
    memory_total: int = 0
    memory_free: int = 0
    capability: tuple[int, int] | None = None
    uuid: str = ""


@dataclass(frozen=True)
class Driver:
    """The driver's version, the newest CUDA it can run, the cards, and why it did not answer (if it did not)."""

    version: str = ""
    cuda: tuple[int, int] | None = None
    gpus: tuple[GPU, ...] = ()
    error: str = ""


class GPUUsage(NamedTuple):
    """Use of one card: `utilization` 0..1 (None where the driver does not tell), memory in bytes."""

    utilization: float | None
    memory_used: int
    memory_total: int


def load_nvml() -> Any | None:
    """The `pynvml` module, or None. The one seam to NVML: tests put a recorded driver here."""
    try:
        import pynvml
    except Exception:  # absent, or an unrelated package of that name that does not import
        return None
    return pynvml


def read_driver(env: Mapping[str, str] = environ) -> Driver:
    """Ask the driver. Without a driver this takes about a millisecond and gives an empty `Driver`."""
    nvml = load_nvml()
    driver = _from_nvml(nvml) if nvml else Driver()
    if driver.gpus or driver.version:
        return driver
    from_smi = _from_smi(env)
    return from_smi if from_smi.gpus or from_smi.version else Driver(error=driver.error or from_smi.error)


def gpu_usage(index: int, env: Mapping[str, str] = environ) -> GPUUsage | None:
    """Use of card `index` (as in `Machine.gpus`) right now, or None where no driver answers."""
    nvml = load_nvml()
    if nvml and not _open(nvml):
        handle = _ask(nvml.nvmlDeviceGetHandleByIndex, index)
        memory = None if handle is None else _ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        if memory:
            rates = _ask(nvml.nvmlDeviceGetUtilizationRates, handle)  # not told for MIG slices and some laptops
            return GPUUsage(None if rates is None else rates.gpu / 100, int(memory.used), int(memory.total))
    rows, _ = _query_smi(["utilization.gpu", "memory.used", "memory.total"], env, card=index)
    if not rows or len(rows[0]) != 3:
        return None
    share, used, total = (_number(cell) for cell in rows[0])
    return GPUUsage(None if share is None else share / 100, int((used or 0) * MIB), int((total or 0) * MIB))


def visible_gpus(setting: str | None, gpus: tuple[GPU, ...]) -> tuple[int, ...]:
    """Indices of the cards that CUDA shows under this `CUDA_VISIBLE_DEVICES` value, in its order.

    `None` (not set) shows all; an empty value shows none. As CUDA does it, the list ends at the first entry that
    names no card. A MIG slice does not say which card it is on: then all cards count as visible.
    """
    if setting is None:
        return tuple(gpu.index for gpu in gpus)
    if "MIG-" in setting:
        return tuple(gpu.index for gpu in gpus)
    visible: list[int] = []
    for entry in (part.strip() for part in setting.split(",")):
        if entry.isdecimal():
            found = [gpu.index for gpu in gpus if gpu.index == int(entry)]
        else:
            found = [gpu.index for gpu in gpus if entry.startswith("GPU-") and gpu.uuid.startswith(entry)]
        if len(found) != 1:
            break
        visible += [index for index in found if index not in visible]
    return tuple(visible)


def _open(nvml: Any) -> str:
    """Open NVML; what went wrong, or "". Left open, so that opening it again for the live meters costs nothing."""
    try:
        nvml.nvmlInit()
    except Exception as error:
        return str(error) or type(error).__name__
    return ""


def _from_nvml(nvml: Any) -> Driver:
    error = _open(nvml)
    if error:
        # Without a driver there is no NVML library either: that is not an error of a driver.
        return Driver(error="" if "Not Found" in error else error)
    ask_cuda = getattr(nvml, "nvmlSystemGetCudaDriverVersion_v2", None) or nvml.nvmlSystemGetCudaDriverVersion
    cuda = _ask(ask_cuda)
    gpus = []
    for index in range(_ask(nvml.nvmlDeviceGetCount) or 0):
        handle = _ask(nvml.nvmlDeviceGetHandleByIndex, index)
        if handle is None:  # a card that fell off the bus has no handle
            continue
        memory = _ask(nvml.nvmlDeviceGetMemoryInfo, handle)  # not told where CPU and GPU share their memory
        capability = _ask(nvml.nvmlDeviceGetCudaComputeCapability, handle)
        gpus.append(
            GPU(
                index=index,
                name=_text(_ask(nvml.nvmlDeviceGetName, handle)) or "NVIDIA GPU",
                memory_total=int(memory.total) if memory else 0,
                memory_free=int(memory.free) if memory else 0,
                capability=(int(capability[0]), int(capability[1])) if capability else None,
                uuid=_text(_ask(nvml.nvmlDeviceGetUUID, handle)),
            )
        )
    version = _text(_ask(nvml.nvmlSystemGetDriverVersion))
    return Driver(version, (cuda // 1000, cuda % 1000 // 10) if cuda else None, tuple(gpus))


def _ask(function: Any, *arguments: Any) -> Any:
    """One NVML answer, or None: drivers leave out what a card does not have, each in its own way."""
    try:
        return function(*arguments)
    except Exception:
        return None


def _text(value: Any) -> str:
    """NVML text: bytes in older versions of the package."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")


def _from_smi(env: Mapping[str, str]) -> Driver:
    fields = ["index", "name", "uuid", "memory.total", "memory.free", "driver_version"]
    rows, error = _query_smi([*fields, "compute_cap"], env)
    if "not a valid field" in error:  # drivers before 2022 do not know the capability
        rows, error = _query_smi(fields, env)
    gpus, version = [], ""
    for row in rows:
        number = _number(row[0]) if len(row) >= len(fields) else None
        if number is None:
            continue
        capability = re.fullmatch(r"(\d+)\.(\d+)", row[6]) if len(row) > len(fields) else None
        version = row[5]
        gpus.append(
            GPU(
                index=int(number),
                name=row[1],
                memory_total=int((_number(row[3]) or 0) * MIB),
                memory_free=int((_number(row[4]) or 0) * MIB),
                capability=(int(capability[1]), int(capability[2])) if capability else None,
                uuid=row[2],
            )
        )
    if not gpus:
        return Driver(error=error)
    header, _ = _run_smi([], env)  # the CUDA version stands only in the head of the plain table
    cuda = re.search(r"CUDA (?:\w+ )?Version\s*:\s*(\d+)\.(\d+)", header)
    return Driver(version, (int(cuda[1]), int(cuda[2])) if cuda else None, tuple(gpus))


def _query_smi(fields: list[str], env: Mapping[str, str], card: int | None = None) -> tuple[list[list[str]], str]:
    arguments = [f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    out, error = _run_smi(arguments + ([] if card is None else ["-i", str(card)]), env)
    return [[cell.strip() for cell in row] for row in csv.reader(out.splitlines()) if row], error


def _run_smi(arguments: list[str], env: Mapping[str, str]) -> tuple[str, str]:
    """Output of `nvidia-smi`, and what went wrong ("" when nothing did, or when there is no such command)."""
    paths = [env.get("PATH", ""), *SMI_PLACES]
    command = next((found for path in paths if (found := shutil.which("nvidia-smi", path=path))), None)
    if command is None:
        return "", ""
    try:
        done = subprocess.run(
            [command, *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SMI_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "", f"nvidia-smi gave no answer within {SMI_SECONDS:g} s."
    except OSError as error:
        return "", f"nvidia-smi does not start: {error}"
    if done.returncode:
        return "", (done.stdout + done.stderr).strip() or f"nvidia-smi ended with code {done.returncode}."
    return done.stdout, ""


def _number(cell: str) -> float | None:
    """A number of `nvidia-smi`; None for its `[N/A]` and `[Not Supported]`."""
    try:
        return float(cell)
    except ValueError:
        return None
