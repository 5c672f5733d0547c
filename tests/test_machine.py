"""What a machine has, read from made-up /proc, /sys and /dev trees, and from the real ones."""

import os
import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from fake_nvidia import A100, NVML, T4

from accel_nb import machine as module
from accel_nb import nvidia
from accel_nb.machine import CPU, GPU, TPU, Machine, cache_directory, machine, memory_free

KIB, GIB = 1024, 1024**3


class Tree:
    """A small Linux under `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/cpuinfo", XEON)
        self.write("proc/meminfo", "MemTotal:       13290480 kB\nMemFree: 1 kB\nMemAvailable:    9290480 kB\n")
        self.write("proc/self/status", "Name:\tpython\nCpus_allowed:\tff\nCpus_allowed_list:\t0-3,6,8-10\n")
        self.devices = 0

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def pci(self, vendor: str, device: str, kind: str) -> None:
        self.devices += 1
        place = f"sys/bus/pci/devices/0000:00:{self.devices:02x}.0"
        for name, value in (("vendor", vendor), ("device", device), ("class", kind)):
            self.write(f"{place}/{name}", value + "\n")

    def look(self, **env: str) -> Machine:
        return machine(self.root, {"PATH": "", **env})


XEON = """\
processor	: 0
model name	: Intel(R) Xeon(R) CPU @ 2.20GHz
flags		: fpu sse2 avx avx2 fma avx512f avx512bw

processor	: 1
model name	: Intel(R) Xeon(R) CPU @ 2.20GHz
flags		: fpu sse2 avx avx2 fma avx512f avx512bw
"""
ARM = "processor	: 0\nBogoMIPS	: 243.75\nFeatures	: fp asimd evtstrm sve\nCPU implementer	: 0x41\n"


@pytest.fixture(autouse=True)
def linux_without_a_driver(monkeypatch):
    monkeypatch.setattr(nvidia, "load_nvml", lambda: None)
    monkeypatch.setattr(nvidia, "SMI_PLACES", ())
    monkeypatch.setattr(module.platform, "system", lambda: "Linux")
    monkeypatch.setattr(module.platform, "machine", lambda: "x86_64")
    monkeypatch.delitem(sys.modules, "google.colab", raising=False)


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


def test_the_processor(tree):
    cpu = tree.look().cpu
    assert (cpu.name, cpu.features) == ("Intel Xeon", ("AVX-512", "AVX2"))
    assert cpu.cores == 8  # 0-3, 6, 8-10: what this process may use, not what the machine has
    assert (cpu.memory_total, cpu.memory_free) == (13290480 * KIB, 9290480 * KIB)


def test_an_arm_processor_has_no_model_name(tree, monkeypatch):
    monkeypatch.setattr(module.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(module.platform, "processor", lambda: "")
    tree.write("proc/cpuinfo", ARM)
    cpu = tree.look().cpu
    assert (cpu.name, cpu.features) == ("aarch64 processor", ("SVE", "NEON"))


def test_an_empty_system_tells_nothing_and_raises_nothing(tmp_path):
    here = machine(tmp_path / "nothing", {})
    assert here.cpu.cores == os.cpu_count()
    assert (here.cpu.memory_total, here.gpus, here.tpu, here.nvidia_pci) == (0, (), None, 0)
    assert memory_free(tmp_path / "nothing") == 0


def test_control_group_version_2(tree):
    tree.write("proc/self/cgroup", "0::/user/box\n")
    tree.write("sys/fs/cgroup/user/memory.max", str(8 * GIB))
    tree.write("sys/fs/cgroup/user/memory.current", str(3 * GIB))
    tree.write("sys/fs/cgroup/user/memory.stat", f"anon 5\ninactive_file {1 * GIB}\n")
    tree.write("sys/fs/cgroup/user/box/memory.max", "max\n")
    tree.write("sys/fs/cgroup/user/box/cpu.max", "150000 100000\n")
    cpu = tree.look().cpu
    assert cpu.cores == 2  # one and a half keep two busy
    assert (cpu.memory_total, cpu.memory_free) == (8 * GIB, 6 * GIB)  # cached files can go
    assert memory_free(tree.root) == 6 * GIB


def test_control_group_version_1(tree):
    tree.write("proc/self/cgroup", "9:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/\n")
    # In the container the host's path does not exist; the limits stand at the mount.
    tree.write("sys/fs/cgroup/memory/memory.limit_in_bytes", str(2 * GIB))
    tree.write("sys/fs/cgroup/memory/memory.usage_in_bytes", str(3 * GIB))
    tree.write("sys/fs/cgroup/memory/memory.stat", f"total_inactive_file {GIB // 2}\n")
    tree.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "300000")
    tree.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000")
    cpu = tree.look().cpu
    assert (cpu.cores, cpu.memory_total, cpu.memory_free) == (3, 2 * GIB, 0)  # never below nothing


@pytest.mark.parametrize("limit", ["9223372036854771712", "max", ""])
def test_no_limit_is_no_limit(tree, limit):
    tree.write("proc/self/cgroup", "9:memory:/\n8:cpu:/\n")
    tree.write("sys/fs/cgroup/memory/memory.limit_in_bytes", limit)
    tree.write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1")
    tree.write("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000")
    cpu = tree.look().cpu
    assert (cpu.cores, cpu.memory_total) == (8, 13290480 * KIB)


def test_gpus_and_driver(tree, monkeypatch):
    monkeypatch.setattr(nvidia, "load_nvml", lambda: NVML(cards=[T4, A100]))
    here = tree.look()
    assert [gpu.name for gpu in here.gpus] == ["Tesla T4", "NVIDIA A100-SXM4-40GB"]
    assert (here.driver, here.driver_cuda, here.visible_devices, here.visible) == (
        "550.54.15",
        (12, 4),
        None,
        (0, 1),
    )
    chosen = tree.look(CUDA_VISIBLE_DEVICES="1")
    assert (chosen.visible_devices, chosen.visible) == ("1", (1,))
    assert [gpu.name for gpu in chosen.visible_gpus] == ["NVIDIA A100-SXM4-40GB"]
    assert len(chosen.gpus) == 2  # what the machine has does not depend on what is shown


def test_the_order_of_cards_is_that_of_the_setting(tree, monkeypatch):
    monkeypatch.setattr(nvidia, "load_nvml", lambda: NVML(cards=[T4, A100]))
    assert [gpu.index for gpu in tree.look(CUDA_VISIBLE_DEVICES="1,0").visible_gpus] == [1, 0]


def test_cards_without_a_driver(tree):
    tree.pci("0x10de", "0x1eb8", "0x030200")
    tree.pci("0x10de", "0x10f8", "0x040300")  # the sound part of the same card
    tree.pci("0x8086", "0x0d57", "0x060000")
    here = tree.look()
    assert (here.nvidia_pci, here.has_nvidia, here.driver, here.gpus) == (1, True, "", ())


@pytest.mark.parametrize(
    "line",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.104.05  Release Build  (root@host)",
    ],
)
def test_a_loaded_driver_without_a_card(tree, line):
    tree.write("proc/driver/nvidia/version", line + "\nGCC version:  gcc version 12.3.0\n")
    here = tree.look()
    assert (here.driver, here.driver_loaded, here.nvidia_nodes, here.gpus) == ("535.104.05", True, False, ())


def test_device_files(tree):
    tree.write("dev/nvidiactl", "")
    assert not tree.look().nvidia_nodes
    tree.write("dev/nvidia0", "")
    assert tree.look().nvidia_nodes


def test_wsl(tree):
    assert not tree.look().wsl
    tree.write("proc/version", "Linux version 5.15.90.1-microsoft-standard-WSL2 (oe-user@oe-host)")
    assert tree.look().wsl
    tree.write("proc/version", "Linux version 5.15")
    tree.write("dev/dxg", "")
    assert tree.look().wsl


@pytest.mark.parametrize(
    ("device", "generation"),
    [
        ("0x0027", "v2 or v3"),
        ("0x005e", "v4"),
        ("0x0062", "v5p"),
        ("0x0063", "v5e"),
        ("0x006f", "v6e"),
        ("0x0076", "v7x"),
    ],
)
def test_tpu_chips(tree, device, generation):
    for _ in range(4):
        tree.pci("0x1ae0", device, "0x120000")
    assert tree.look().tpu == TPU(generation, 4)


def test_other_google_devices_are_no_tpu(tree):
    tree.pci("0x1ae0", "0x0042", "0x020000")  # the network card of Google's virtual machines
    tree.pci("0x1ae0", "0x001f", "0x010802")  # their disk
    assert tree.look().tpu is None


def test_the_environment_tells_v2_from_v3(tree):
    tree.pci("0x1ae0", "0x0027", "0x120000")
    assert tree.look(TPU_ACCELERATOR_TYPE="v3-8").tpu == TPU("v3", 1)
    assert tree.look(TPU_ACCELERATOR_TYPE="v5litepod-1").tpu == TPU("v2 or v3", 1)


def test_variables_a_user_sets_are_no_tpu(tree):
    assert tree.look(TPU_NAME="local", PJRT_DEVICE="TPU").tpu is None


def test_colab_by_its_module_or_its_variable(tree, monkeypatch):
    assert not tree.look().colab
    assert tree.look(COLAB_RELEASE_TAG="release-colab-20260818").colab
    monkeypatch.setitem(sys.modules, "google.colab", object())
    assert tree.look().colab


@pytest.mark.parametrize(
    ("system", "processor", "mps"),
    [("Darwin", "arm64", True), ("Darwin", "x86_64", False), ("Linux", "arm64", False)],
)
def test_the_apple_gpu(tree, monkeypatch, system, processor, mps):
    monkeypatch.setattr(module.platform, "system", lambda: system)
    monkeypatch.setattr(module.platform, "machine", lambda: processor)
    assert tree.look().mps is mps


def test_garbage_in_system_files_is_survived(tree):
    tree.write("proc/cpuinfo", "\x00\xff nothing here")
    tree.write("proc/meminfo", "MemTotal: many kB\n")
    tree.write("proc/self/status", "Cpus_allowed_list:\t\n")
    tree.write("proc/self/cgroup", "what\n0::\n:::\n")
    tree.write("proc/driver/nvidia/version", "?")
    tree.pci("", "xyz", "0x")
    here = tree.look()
    assert here.cpu.cores >= 1
    assert (here.nvidia_pci, here.tpu, here.driver) == (0, None, "")


def test_a_machine_is_a_value():
    here = Machine(cpu=CPU(cores=2), gpus=(GPU(0, "Tesla T4"),), visible=(0,))
    assert here == Machine(cpu=CPU(cores=2), gpus=(GPU(0, "Tesla T4"),), visible=(0,))
    with pytest.raises(FrozenInstanceError):
        here.colab = True


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="reads the real /proc")
def test_this_machine():
    psutil = pytest.importorskip("psutil")
    cpu = machine().cpu
    assert 1 <= cpu.cores <= psutil.cpu_count()
    assert 0 < cpu.memory_free <= cpu.memory_total <= psutil.virtual_memory().total
    assert 0 < memory_free() <= cpu.memory_total
    assert "\n" not in cpu.name


@pytest.mark.parametrize(
    ("system", "env", "ending"),
    [
        ("Linux", {"ACCEL_NB_CACHE": "/somewhere/kept"}, "/somewhere/kept"),
        ("Linux", {"XDG_CACHE_HOME": "/home/a/xdg"}, "/home/a/xdg/accel_nb"),
        ("Linux", {}, ".cache/accel_nb"),
        ("Darwin", {}, "Library/Caches/accel_nb"),
        ("Windows", {"LOCALAPPDATA": "/Users/a/AppData/Local"}, "/Users/a/AppData/Local/accel_nb/Cache"),
    ],
)
def test_where_the_cache_is(monkeypatch, system, env, ending):
    monkeypatch.setattr(module.platform, "system", lambda: system)
    assert cache_directory(env).as_posix().endswith(ending)
    assert cache_directory(env).is_absolute()


def test_looking_imports_no_framework_and_nothing_heavy():
    code = (
        "import sys; from accel_nb.machine import machine; machine()\n"
        "print(sorted({'torch', 'tensorflow', 'keras', 'jax', 'numpy', 'psutil'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
