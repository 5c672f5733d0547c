"""What this machine has: processor, memory, NVIDIA GPUs, TPU chips, Apple GPU, Colab. Imports no framework.

`machine()` takes about two milliseconds and may be called often. Whether a framework can *use* what is here is
another question: see `diagnose`.
"""

from __future__ import annotations

import math
import os
import platform
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from os import environ
from pathlib import Path

from accel_nb.colab import in_colab
from accel_nb.nvidia import GPU, MIB, Driver, GPUUsage, gpu_usage, read_driver, visible_gpus

__all__ = [
    "CPU",
    "GPU",
    "MIB",
    "TPU",
    "Driver",
    "GPUUsage",
    "Machine",
    "cache_directory",
    "gpu_usage",
    "machine",
    "memory_free",
]

NVIDIA, GOOGLE = 0x10DE, 0x1AE0  # PCI vendors; Google's also makes network cards and disks, so the device counts
TPU_DEVICES = {0x0027: "v2 or v3", 0x005E: "v4", 0x0062: "v5p", 0x0063: "v5e", 0x006F: "v6e", 0x0076: "v7x"}
CPU_FEATURES = {
    "amx_tile": "AMX",
    "avx512f": "AVX-512",
    "avx2": "AVX2",
    "sve": "SVE",
    "asimd": "NEON",
    "neon": "NEON",
}


@dataclass(frozen=True)
class CPU:
    """The processor as this process may use it.

    `cores`: what affinity and the container's quota leave, at least 1. Memory in bytes, the container's limit
    included. `features`: vector units, the widest first, such as ("AVX-512", "AVX2").
    """

    name: str = "CPU"
    cores: int = 1
    features: tuple[str, ...] = ()
    memory_total: int = 0
    memory_free: int = 0


@dataclass(frozen=True)
class TPU:
    """Google TPU chips on the PCI bus; `generation` such as "v5e"."""

    generation: str
    chips: int


@dataclass(frozen=True)
class Machine:
    """What is here. All fields have defaults, so that a machine can be made up for a test.

    `gpus`: the NVIDIA cards the driver names. `driver`, `driver_cuda`: its version and the newest CUDA it runs.
    `driver_error`: why an installed driver did not answer. `driver_loaded`: the kernel module is there (also in a
    container that was given no card). `nvidia_nodes`: device files exist. `nvidia_pci`: number of cards on the
    bus, driver or not. `visible_devices`: CUDA_VISIBLE_DEVICES as set, None if not; `visible`: indices of the
    `gpus` it leaves, so that a framework's device N is card `visible[N]`.
    """

    cpu: CPU = field(default_factory=CPU)
    gpus: tuple[GPU, ...] = ()
    driver: str = ""
    driver_cuda: tuple[int, int] | None = None
    driver_error: str = ""
    driver_loaded: bool = False
    nvidia_nodes: bool = False
    nvidia_pci: int = 0
    visible_devices: str | None = None
    visible: tuple[int, ...] = ()
    tpu: TPU | None = None
    mps: bool = False
    colab: bool = False
    wsl: bool = False
    system: str = "Linux"
    architecture: str = "x86_64"

    @property
    def visible_gpus(self) -> tuple[GPU, ...]:
        """The cards that CUDA_VISIBLE_DEVICES leaves, in the order in which a framework counts them."""
        by_index = {gpu.index: gpu for gpu in self.gpus}
        return tuple(by_index[index] for index in self.visible if index in by_index)

    @property
    def has_nvidia(self) -> bool:
        """Some sign of an NVIDIA card, with or without a driver."""
        return bool(self.gpus or self.driver or self.driver_loaded or self.nvidia_nodes or self.nvidia_pci)


def machine(root: str | Path = "/", env: Mapping[str, str] = environ) -> Machine:
    """Look at this machine. `root`: where /proc, /sys and /dev are read (another place in tests)."""
    at = Path(root)
    system, architecture = platform.system(), platform.machine()
    driver = read_driver(env)
    setting = env.get("CUDA_VISIBLE_DEVICES")
    loaded = _read(at / "proc/driver/nvidia/version")
    version = re.search(r"Module\b.*?\s(\d+\.\d[\d.]*)", loaded)
    nodes = any(re.fullmatch(r"nvidia\d+", name) for name in _names(at / "dev"))
    pci = [_pci(device) for device in _entries(at / "sys/bus/pci/devices")]
    return Machine(
        cpu=_cpu(at, system),
        gpus=driver.gpus,
        driver=driver.version or (version[1] if version else ""),
        driver_cuda=driver.cuda,
        driver_error=driver.error,
        driver_loaded=bool(loaded),
        nvidia_nodes=nodes,
        nvidia_pci=sum(vendor == NVIDIA and kind >> 16 == 0x03 for vendor, _, kind in pci),
        visible_devices=setting,
        visible=visible_gpus(setting, driver.gpus),
        tpu=_tpu([device for vendor, device, _ in pci if vendor == GOOGLE], env),
        mps=system == "Darwin" and architecture == "arm64",
        colab=in_colab(env),
        wsl=(at / "dev/dxg").exists() or "microsoft" in _read(at / "proc/version").lower(),
        system=system,
        architecture=architecture,
    )


def memory_free(root: str | Path = "/") -> int:
    """Bytes of host memory that a new process can use right now, the container's limit included."""
    return _memory(Path(root), platform.system())[1]


def cache_directory(env: Mapping[str, str] = environ) -> Path:
    """Where accel_nb keeps what it can make again: `ACCEL_NB_CACHE`, or the system's place for caches."""
    if env.get("ACCEL_NB_CACHE"):
        return Path(env["ACCEL_NB_CACHE"]).expanduser()
    system = platform.system()
    if system == "Windows" and env.get("LOCALAPPDATA"):
        return Path(env["LOCALAPPDATA"]) / "accel_nb" / "Cache"
    if system == "Darwin":
        return Path("~/Library/Caches/accel_nb").expanduser()
    return Path(env.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "accel_nb"


def _tpu(devices: list[int], env: Mapping[str, str]) -> TPU | None:
    chips = [TPU_DEVICES[device] for device in devices if device in TPU_DEVICES]
    if not chips:
        return None
    told = re.match(r"v[23]", env.get("TPU_ACCELERATOR_TYPE", ""))  # one PCI number stands for both generations
    return TPU(told[0] if told and chips[0] == "v2 or v3" else chips[0], len(chips))


def _cpu(root: Path, system: str) -> CPU:
    info = _read(root / "proc/cpuinfo")
    named = re.search(r"^(?:model name|Model|Hardware)\s*:\s*(.+)$", info, re.MULTILINE)
    if named:
        name = named[1]
    elif system == "Darwin":
        name = _sysctl("machdep.cpu.brand_string")
    else:
        name = platform.processor()
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", info, re.MULTILINE)
    words = set(flags[1].split()) if flags else set()
    features = tuple(dict.fromkeys(shown for flag, shown in CPU_FEATURES.items() if flag in words))
    if system == "Darwin" and platform.machine() == "arm64":
        features = ("NEON",)
    total, free = _memory(root, system)
    tidy = " ".join(re.sub(r"\((?:R|TM|r|tm)\)|\bCPU\b|@.*", " ", name).split())
    return CPU(tidy or f"{platform.machine()} processor", _cores(root), features, total, free)


def _cores(root: Path) -> int:
    """Cores by affinity, cut by the container's quota (rounded up: 1.5 cores keep two threads busy)."""
    allowed = re.search(r"^Cpus_allowed_list:\s*([\d,-]+)", _read(root / "proc/self/status"), re.MULTILINE)
    cores = os.cpu_count() or 1
    if allowed:
        spans = [part.split("-") for part in allowed[1].split(",") if part]
        cores = sum(int(span[-1]) - int(span[0]) + 1 for span in spans)
    quotas = []
    for directory in cgroups(root, "cpu"):
        words = _read(directory / "cpu.max").split()  # version 2: "150000 100000", or "max 100000"
        if not words:
            words = [_read(directory / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):
            quotas.append(int(words[0]) / int(words[1]))
    return max(1, min([cores, *(math.ceil(quota) for quota in quotas)]))


def _memory(root: Path, system: str) -> tuple[int, int]:
    """Bytes in all and free, within every memory limit that holds for this process."""
    told = dict(re.findall(r"^(Mem\w+):\s+(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE))
    if "MemTotal" in told:
        total = int(told["MemTotal"]) * 1024
        free = int(told.get("MemAvailable") or told.get("MemFree") or 0) * 1024
    elif system == "Linux":
        return 0, 0
    else:
        import psutil

        memory = psutil.virtual_memory()
        total, free = memory.total, memory.available
    for directory in cgroups(root, "memory"):
        limit = _read(directory / "memory.max").strip() or _read(directory / "memory.limit_in_bytes").strip()
        if not limit.isdecimal() or int(limit) >= total:  # "max", or version 1's huge number for "no limit"
            continue
        used = _read(directory / "memory.current").strip() or _read(directory / "memory.usage_in_bytes").strip()
        # Cached files count as used here, but go when a process wants the memory.
        stat = _read(directory / "memory.stat")
        cached = re.search(r"^(?:total_)?inactive_file (\d+)", stat, re.MULTILINE)
        taken = int(used or 0) - (int(cached[1]) if cached else 0)
        total = int(limit)
        free = min(free, total - taken)
    return total, max(0, free)


def cgroups(root: Path, controller: str) -> Iterator[Path]:
    """The control groups this process is in, from its own up to the root; versions 1 and 2."""
    base = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            mounts = [base, base / "unified"]
        elif controller in controllers.split(","):
            mounts = [base / controllers, base / controller]
        else:
            continue
        mount = next((place for place in mounts if place.is_dir()), None)
        if mount is None:
            continue
        # Inside a container the path may be the host's and not exist here; what exists above it still holds.
        own = mount / path.strip().lstrip("/")
        for directory in [own, *own.parents]:
            yield directory
            if directory == mount:
                break


def _pci(device: Path) -> tuple[int, int, int]:
    """Vendor, device and class numbers of one PCI device; zeros where it does not tell."""
    numbers = []
    for name in ("vendor", "device", "class"):
        try:
            numbers.append(int(_read(device / name), 16))
        except ValueError:
            numbers.append(0)
    return numbers[0], numbers[1], numbers[2]


def _sysctl(name: str) -> str:
    try:
        return subprocess.run(
            ["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, timeout=2, check=False
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _read(path: Path) -> str:
    """Text of a small system file; "" where there is none or it may not be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []


def _names(directory: Path) -> list[str]:
    return [entry.name for entry in _entries(directory)]
