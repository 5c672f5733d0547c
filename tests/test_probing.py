"""Facts from a framework's files, the probe's process, and how long its answer is kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from accel_nb import framework_facts, probing
from accel_nb.framework_facts import Device, Facts, facts_from, installed
from accel_nb.loglines import split_log
from accel_nb.machine import GPU, Machine
from accel_nb.probing import PROBES, forget, known, probe, run_probe

BARE = Machine()
WITH_CARD = Machine(gpus=(GPU(0, "Tesla T4"),), driver="550.54.15", driver_cuda=(12, 4), visible=(0,))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCEL_NB_CACHE", str(tmp_path / "cache"))
    forget()
    yield tmp_path / "cache"
    forget()


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """Put another script in the probe's place; each of its starts leaves a line. Called with lines of Python."""
    starts = tmp_path / "starts"

    def write(body: str, framework: str = "pytorch") -> Path:
        script = tmp_path / f"stub_{framework}.py"
        script.write_text(f"open({str(starts)!r}, 'a').write('started\\n')\n{body}\n")
        monkeypatch.setitem(probing.PROBES, framework, script)
        return script

    write.count = lambda: len(starts.read_text().splitlines()) if starts.exists() else 0
    return write


def answer(**told) -> str:
    return f"print({json.dumps(json.dumps({'devices': [], 'cpu_smoke': 'ok', **told}))})"


# ---- the real probes


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_the_real_probe(framework):
    pytest.importorskip({"pytorch": "torch", "tensorflow": "tensorflow"}[framework])
    told = run_probe(framework)
    assert told["outcome"] == "ok", told["stderr"]
    assert told["framework"] == framework
    assert (told["import_error"], told["probe_error"], told["cpu_smoke"]) == ("", "", "ok")
    before = installed(framework)
    facts = facts_from(told, before)
    # What the files told without an import is what the framework says of itself.
    assert (facts.version, facts.cuda, facts.cuda_build) == (before.version, before.cuda, before.cuda_build)
    if framework == "tensorflow":
        assert (facts.keras, facts.arch_list) == (before.keras, before.arch_list)
    for device in facts.devices:
        assert device.smoke == "ok"
    if not facts.devices:
        assert not facts.available
        assert split_log(facts.stderr)[0] == []  # nothing but what is known to be harmless


def test_the_kernel_stays_free_of_frameworks():
    code = (
        "import sys\n"
        "from accel_nb.framework_facts import installed\n"
        "assert installed('pytorch').installed and installed('tensorflow').installed\n"
        "print(sorted({'torch', 'tensorflow', 'keras', 'jax', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_probe_does_not_outlive_who_asked(tmp_path):
    """The asking process dies without a word, as a kernel that is killed does."""
    left = tmp_path / "pid"
    child = f"""
import runpy, os, threading, time
probe = runpy.run_path({str(PROBES["pytorch"])!r}, run_name="probe")
threading.Thread(target=probe["leave_with"], args=(os.getppid(),), daemon=True).start()
open({str(left)!r} + ".new", "w").write(str(os.getpid()))
os.rename({str(left)!r} + ".new", {str(left)!r})
time.sleep(300)
"""
    parent = f"""
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {child!r}])
while not os.path.exists({str(left)!r}):
    time.sleep(0.05)
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", parent], check=False, timeout=60)
    assert gone(int(left.read_text()))


def gone(pid: int) -> bool:
    give_up = time.monotonic() + 30
    while time.monotonic() < give_up:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


# ---- a probe that misbehaves


def run(tmp_path, body: str, seconds: float = 60.0):
    script = tmp_path / "probe.py"
    script.write_text(body)
    return run_probe("pytorch", seconds, script)


def test_a_probe_that_hangs_is_killed_with_its_children(tmp_path):
    body = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("stuck in the driver", file=sys.stderr, flush=True)
open("CHILD", "w").write(str(child.pid))
time.sleep(600)
""".replace("CHILD", (tmp_path / "child").as_posix())
    told = run(tmp_path, body, seconds=3)
    assert (told["outcome"], told["returncode"]) == ("timed out", -9)
    assert "stuck in the driver" in told["stderr"]
    assert gone(int((tmp_path / "child").read_text()))


def test_a_probe_that_crashes(tmp_path):
    told = run(tmp_path, "import os, sys; print('oh', file=sys.stderr, flush=True); os.kill(os.getpid(), 11)")
    assert (told["outcome"], told["returncode"], told["stderr"]) == ("crashed", -11, "oh\n")


def test_a_probe_that_raises(tmp_path):
    told = run(tmp_path, "raise RuntimeError('no such luck')")
    assert (told["outcome"], told["returncode"]) == ("crashed", 1)
    assert "RuntimeError: no such luck" in told["stderr"]


@pytest.mark.parametrize(
    "body",
    [
        "",
        "print('hello')",
        "print('{not json')",
        "print('[1, 2]')",
        "print('{' * 100000)",
        "import sys; sys.stdout.buffer.write(bytes(range(256)) * 50)",
    ],
)
def test_a_probe_that_prints_garbage(tmp_path, body):
    told = run(tmp_path, body)
    assert told["outcome"] == "unreadable"
    assert facts_from(told, Facts("pytorch")).outcome == "unreadable"


def test_lines_around_the_answer_do_no_harm(tmp_path):
    told = run(tmp_path, "print('a library says hello')\nprint('{\"version\": \"1.2\"}')\nprint('and good bye')")
    assert (told["outcome"], told["version"]) == ("ok", "1.2")


def test_a_long_log_is_kept_from_its_end(tmp_path):
    told = run(tmp_path, "import sys\nsys.stderr.write('x' * 500_000 + 'the reason')\nprint('{\"a\": 1}')")
    assert len(told["stderr"]) == probing.KEPT_STDERR
    assert told["stderr"].endswith("the reason")


def test_a_python_that_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    told = run_probe("pytorch")
    assert told["outcome"] == "crashed"
    assert "does not start" in told["stderr"]


def test_a_crash_with_a_card_is_tried_again_without_it(stub):
    stub(
        "import os\n"
        "if os.environ.get('CUDA_VISIBLE_DEVICES') != '-1': os.abort()\n" + answer(version="2.11.0", cuda="12.8")
    )
    facts = probe("pytorch", WITH_CARD)
    assert (facts.outcome, facts.returncode, facts.cpu_smoke, facts.cuda) == ("crashed", -6, "ok", "12.8")
    assert stub.count() == 2
    probe("pytorch", BARE, refresh=True)
    assert stub.count() == 3  # without a card there is nothing to hide


# ---- what a probe tells, and what it may not


def test_facts_take_what_fits_and_leave_the_rest():
    base = Facts("pytorch", True, "torch", "2.13.0", arch_list=("sm_80",))
    told = {
        "version": "",  # nothing told: the files' word stays
        "cuda": 12,  # not text
        "cuda_build": True,
        "arch_list": ["sm_75", 80],
        "devices": [
            {"index": 0, "name": "A", "capability": [8, 0], "smoke": "ok"},
            {"index": "x"},
            {"name": "no index"},
            "garbage",
            {"index": 1, "capability": [8]},
            {"index": 2, "capability": None},
        ],
        "outcome": "ok",
        "unknown": 3,
        "stderr": None,
        "available": 1,
    }
    facts = facts_from(told, base)
    assert facts == replace(
        base,
        cuda_build=True,
        arch_list=("sm_75", "80"),
        devices=(Device(0, "A", (8, 0), 0, "ok"), Device(2)),
        outcome="ok",
    )


@pytest.mark.parametrize(
    "trouble",
    [
        {"import_error": "ImportError: x"},
        {"error": "RuntimeError: x"},
        {"keras_error": "x"},
        {"probe_error": "x"},
        {"cpu_smoke": "RuntimeError: x"},
        {"mps_smoke": "RuntimeError: x"},
        {"devices": (Device(0, smoke="ok"), Device(1, smoke="RuntimeError: x"))},
        {"outcome": "crashed"},
        {"outcome": "not run"},
    ],
)
def test_any_trouble_spoils_a_clean_answer(trouble):
    clean = Facts("pytorch", True, outcome="ok", cpu_smoke="ok", devices=(Device(0, smoke="ok"),))
    assert clean.clean
    assert not replace(clean, **trouble).clean


# ---- what the files tell


def package(root: Path, module: str, version_text: str, where: str) -> None:
    file = root / module / where
    file.parent.mkdir(parents=True)
    (root / module / "__init__.py").write_text("raise SystemExit('imported in the kernel')")
    file.write_text(version_text)


def distribution(root: Path, name: str, version: str) -> None:
    folder = root / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A site-packages of its own, with nothing else on the path."""
    root = tmp_path / "site"
    root.mkdir()
    monkeypatch.setattr(sys, "path", [str(root)])
    for name in ("torch", "tensorflow", "keras"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return root


TORCH_VERSION = """\
from typing import Optional
__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip']
__version__ = '{version}'
debug = False
cuda: Optional[str] = {cuda}
git_version = 'abc'
hip: Optional[str] = {hip}
"""


@pytest.mark.parametrize(
    ("version", "cuda", "hip", "expected"),
    [
        ("2.13.0+cpu", "None", "None", (False, "", "")),
        ("2.11.0+cu128", "'12.8'", "None", (True, "12.8", "")),
        ("2.9.0+rocm6.4", "None", "'6.4.43484'", (True, "", "6.4.43484")),
    ],
)
def test_torch_tells_its_build_without_an_import(site, version, cuda, hip, expected):
    package(site, "torch", TORCH_VERSION.format(version=version, cuda=cuda, hip=hip), "version.py")
    distribution(site, "torch", version.partition("+")[0])
    facts = installed("pytorch")
    assert (facts.installed, facts.distribution, facts.version) == (True, "torch", version)
    assert (facts.cuda_build, facts.cuda, facts.hip) == expected


BUILD_INFO = (
    "import collections\nbuild_info = collections.OrderedDict([('cpu_compiler', 'clang'), "
    "('cuda_compute_capabilities', ['sm_80', 'compute_90']), ('cuda_version', '12.5.1'), ('cudnn_version', '9'), "
    "('is_cuda_build', True), ('is_rocm_build', False)])\n"
)


def test_tensorflow_tells_its_build_without_an_import(site):
    package(site, "tensorflow", BUILD_INFO, "python/platform/build_info.py")
    distribution(site, "tensorflow", "2.21.0")
    distribution(site, "keras", "3.15.1")
    facts = installed("tensorflow")
    assert (facts.distribution, facts.version, facts.keras) == ("tensorflow", "2.21.0", "3.15.1")
    assert (facts.cuda_build, facts.cuda, facts.cudnn_built) == (True, "12.5.1", "9")
    assert (facts.arch_list, facts.tpu_build) == (("sm_80", "compute_90"), False)


def test_the_tensorflow_for_tpus_is_known_by_its_package_and_never_run(site, stub):
    package(site, "tensorflow", BUILD_INFO.replace("True", "False"), "python/platform/build_info.py")
    distribution(site, "tensorflow", "2.20.0")
    distribution(site, "tensorflow-tpu", "2.20.1")
    stub(answer(), "tensorflow")
    facts = probe("tensorflow", BARE, refresh=True)
    assert (facts.distribution, facts.version, facts.tpu_build) == ("tensorflow-tpu", "2.20.1", True)
    assert (facts.outcome, stub.count()) == ("not run", 0)  # importing it could open a TPU


def test_the_probe_itself_does_not_import_a_tensorflow_for_tpus(site):
    package(site, "tensorflow", "", "python/platform/build_info.py")  # exits the process when imported
    distribution(site, "tensorflow-tpu", "2.20.1")
    script = f"import sys; sys.path.insert(0, {str(site)!r}); sys.argv = ['probe.py']\n"
    script += f"import runpy; runpy.run_path({str(PROBES['tensorflow'])!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["tpu_build"], told["version"], told["devices"]) == (True, "2.20.1", [])


@pytest.mark.parametrize("text", ["", "build_info = 3", "OrderedDict([(])", "OrderedDict([1, 2])", "\x00"])
def test_files_that_tell_nothing_leave_it_to_the_probe(site, text):
    package(site, "tensorflow", text, "python/platform/build_info.py")
    package(site, "torch", text, "version.py")
    distribution(site, "torch", "2.13.0")
    assert installed("tensorflow") == Facts("tensorflow", installed=True)
    assert installed("pytorch") == Facts("pytorch", True, "torch", "2.13.0")


def test_what_is_left_of_a_removed_package_is_not_the_package(site):
    distribution(site, "torch", "2.13.0")
    (site / "tensorflow").mkdir()  # a folder without code
    assert not installed("pytorch").installed
    assert not installed("tensorflow").installed


def test_a_stand_in_without_a_spec(site, monkeypatch):
    module = type(sys)("torch")
    module.__spec__ = None
    monkeypatch.setitem(sys.modules, "torch", module)
    assert not installed("pytorch").installed


def test_add_ons_are_found_without_an_import(site):
    for name, version in (("torch_xla", "2.9.0"), ("libtpu", "0.0.21.1"), ("jax", "0.7.2")):
        distribution(site, name, version)
    assert installed("pytorch").packages == {"torch_xla": "2.9.0", "libtpu": "0.0.21.1", "jax": "0.7.2"}


def test_a_framework_that_is_absent_starts_no_process(site, stub):
    stub(answer())
    assert probe("pytorch", BARE, refresh=True) == Facts("pytorch")
    assert stub.count() == 0


# ---- the cache


def test_a_package_that_came_beside_the_framework_is_seen_though_the_answer_is_kept(stub, own_cache, monkeypatch):
    stub(answer())
    probe("pytorch", BARE)
    real = probing.installed
    monkeypatch.setattr(probing, "installed", lambda name: replace(real(name), packages={"torch_xla": "2.9.0"}))
    assert probe("pytorch", BARE).packages == {"torch_xla": "2.9.0"}
    forget()
    assert known("pytorch", BARE).packages == {"torch_xla": "2.9.0"}
    assert stub.count() == 1


def test_an_answer_is_kept_in_memory_and_on_disk(stub, own_cache):
    stub(answer(cudnn_built="9.1"))
    assert known("pytorch", BARE).outcome == "not run"
    first = probe("pytorch", BARE)
    assert (first.outcome, first.cudnn_built) == ("ok", "9.1")
    assert probe("pytorch", BARE) == first
    forget()  # as in another kernel
    assert known("pytorch", BARE) == replace(first, stderr=first.stderr)
    assert probe("pytorch", BARE) == first
    assert stub.count() == 1
    assert len(list(own_cache.glob("probes/*.json"))) == 1
    probe("pytorch", BARE, refresh=True)
    assert stub.count() == 2


def test_devices_come_back_from_the_disk_as_they_were(stub):
    device = {"index": 0, "name": "Tesla T4", "capability": [7, 5], "memory_total": 5, "smoke": "ok"}
    stub(answer(devices=[device], available=True, arch_list=["sm_75"]))
    first = probe("pytorch", WITH_CARD)
    forget()
    assert probe("pytorch", WITH_CARD) == first
    assert first.devices == (Device(0, "Tesla T4", (7, 5), 5, "ok"),)
    assert stub.count() == 1


@pytest.mark.parametrize("variable", ["CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "CUDA_HOME"])
def test_another_environment_asks_again(stub, monkeypatch, variable):
    stub(answer())
    probe("pytorch", BARE)
    monkeypatch.setenv(variable, "/another")
    probe("pytorch", BARE)
    assert stub.count() == 2
    monkeypatch.delenv(variable)
    probe("pytorch", BARE)
    assert stub.count() == 2  # the first answer still holds


def test_another_driver_or_card_asks_again(stub):
    stub(answer())
    for machine in (BARE, WITH_CARD, replace(WITH_CARD, driver="580.1"), replace(WITH_CARD, gpus=(GPU(0, "L4"),))):
        probe("pytorch", machine)
    assert stub.count() == 4


def test_another_version_asks_again(stub, monkeypatch):
    stub(answer())
    probe("pytorch", BARE)
    now = installed("pytorch")
    monkeypatch.setattr(probing, "installed", lambda framework: replace(now, version="9.9.9"))
    probe("pytorch", BARE)
    assert stub.count() == 2


def test_newly_installed_cuda_libraries_ask_again(stub, monkeypatch, tmp_path):
    """`pip install 'tensorflow[and-cuda]'` changes neither TensorFlow nor its version."""
    stub(answer(), "tensorflow")
    probe("tensorflow", BARE)
    distribution(tmp_path / "more", "nvidia-cudnn-cu12", "9.3.0")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "more")])
    probe("tensorflow", BARE)
    assert stub.count() == 2


def test_another_probe_script_asks_again(stub):
    stub(answer())
    probe("pytorch", BARE)
    stub(answer() + "\n# a newer version of the package")
    probe("pytorch", BARE)
    assert stub.count() == 2


@pytest.mark.parametrize(
    ("machine", "told"),
    [
        (BARE, {"cpu_smoke": "RuntimeError: x"}),
        (BARE, {"import_error": "ImportError: x"}),
        (WITH_CARD, {"devices": [{"index": 0, "smoke": "OutOfMemoryError: x"}]}),
        (WITH_CARD, {"cuda_build": True}),  # a card that is not seen: the next fix changes that
    ],
)
def test_trouble_is_not_kept_for_the_next_kernel(stub, own_cache, machine, told):
    stub(answer(**told))
    probe("pytorch", machine)
    probe("pytorch", machine)
    assert stub.count() == 1  # in this one it is
    forget()
    probe("pytorch", machine)
    assert stub.count() == 2
    assert not list(own_cache.glob("probes/*.json"))


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "null",
        "[]",
        '{"key": "another", "facts": {"outcome": "ok"}}',
        '{"key": "KEY"}',
        '{"key": "KEY", "facts": 3}',
        '{"key": "KEY", "facts": {"outcome": "crashed"}}',
        "\x00\x01",
    ],
)
def test_a_spoiled_cache_is_ignored(stub, own_cache, content):
    stub(answer())
    probe("pytorch", BARE)
    (file,) = own_cache.glob("probes/*.json")
    file.write_text(content.replace("KEY", file.stem))
    forget()
    assert probe("pytorch", BARE).outcome == "ok"
    assert stub.count() == 2


def test_a_cache_that_is_not_text_is_ignored(stub, own_cache):
    stub(answer())
    probe("pytorch", BARE)
    (file,) = own_cache.glob("probes/*.json")
    file.write_bytes(b"\xff\xfe\xfa")
    forget()
    assert probe("pytorch", BARE).outcome == "ok"


def test_a_cache_that_cannot_be_written_is_no_trouble(stub, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("ACCEL_NB_CACHE", str(tmp_path / "file" / "cache"))
    stub(answer())
    assert probe("pytorch", BARE).outcome == "ok"
    forget()
    assert probe("pytorch", BARE).outcome == "ok"
    assert stub.count() == 2


def test_old_answers_are_cleared_away(stub, own_cache, monkeypatch):
    monkeypatch.setattr(probing, "KEPT_FILES", 2)
    stub(answer())
    for index in range(4):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", str(index))
        probe("pytorch", BARE)
    assert len(list(own_cache.glob("probes/*"))) == 2


def test_two_that_ask_at_once_start_one_process(stub):
    from concurrent.futures import ThreadPoolExecutor

    stub("import time; time.sleep(0.5)\n" + answer())
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: probe("pytorch", BARE), range(4)))
    assert stub.count() == 1
    assert len({id(facts) for facts in answers}) == 1


def test_the_probe_runs_with_the_environment_of_a_worker(stub):
    stub("import os, json\nprint(json.dumps({'devices': [], 'stderr': '', 'error': os.environ['KERAS_BACKEND']}))")
    assert probe("pytorch", BARE).error == os.environ.get("KERAS_BACKEND", "tensorflow")


def test_every_framework_has_a_probe():
    assert set(PROBES) == set(framework_facts.MODULES) == set(framework_facts.DISTRIBUTIONS)
    assert all(path.is_file() for path in PROBES.values())
