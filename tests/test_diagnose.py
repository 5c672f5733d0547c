"""The diagnosis as a whole: asked quickly or thoroughly, shown as text and as a table, and held against a run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from dataclasses import replace
from html.parser import HTMLParser

import psutil
import pytest

from accel_nb import diagnose as module
from accel_nb import probing
from accel_nb.diagnose import Accelerators, accelerators, check_used, diagnose, machine_lines
from accel_nb.errors import AcceleratorError
from accel_nb.framework_facts import Device, Facts
from accel_nb.machine import CPU, GPU, TPU, Machine

GIB = 1024**3
CPU2 = CPU("Intel Xeon", 2, ("AVX-512", "AVX2"), 12 * GIB, 11 * GIB)
T4 = GPU(0, "Tesla T4", 15 * GIB, 14 * GIB, (7, 5), "GPU-1")
BARE = Machine(cpu=CPU2)
ON_T4 = Machine(cpu=CPU2, gpus=(T4,), driver="550.54.15", driver_cuda=(12, 4), nvidia_pci=1, visible=(0,))
MAC = Machine(
    cpu=replace(CPU2, name="Apple M3", features=("NEON",)), mps=True, system="Darwin", architecture="arm64"
)

TORCH = Facts("pytorch", True, "torch", "2.13.0+cpu", cuda_build=False, outcome="ok", cpu_smoke="ok")
TF = Facts("tensorflow", True, "tensorflow", "2.21.0", "3.15.1", cuda_build=True, cuda="12.5.1", outcome="ok")
TF = replace(TF, cpu_smoke="ok")
TF_ON_T4 = replace(TF, devices=(Device(0, "Tesla T4", (7, 5), 0, "ok"),), available=True)
PROBES = {"pytorch": TORCH, "tensorflow": TF}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCEL_NB_CACHE", str(tmp_path / "cache"))
    probing.forget()
    yield
    probing.forget()


@pytest.fixture
def shared_cache(monkeypatch, tmp_path_factory):
    """One cache for the tests that really look: the probes run once."""
    monkeypatch.setenv("ACCEL_NB_CACHE", str(tmp_path_factory.getbasetemp() / "shared-cache"))


@pytest.fixture
def no_process(monkeypatch):
    """Any probe that is started fails the test."""

    def refuse(*_, **__):
        pytest.fail("a probe was started")

    monkeypatch.setattr(probing, "run_probe", refuse)


def test_every_pair_is_judged():
    diagnosis = diagnose(BARE, PROBES)
    assert len(diagnosis.verdicts) == 8
    assert diagnosis.verdict("pytorch", "cpu").usable
    assert diagnosis.usable("tensorflow", "cpu")
    assert diagnosis.verdict("tensorflow", "gpu").reason == "no_gpu"
    assert diagnosis.verdict("tensorflow", "gpu:1").reason == "no_gpu"


def test_one_framework_may_see_the_card_and_the_other_not():
    diagnosis = diagnose(ON_T4, {"pytorch": TORCH, "tensorflow": TF_ON_T4})
    assert diagnosis.usable("tensorflow", "gpu")
    assert diagnosis.verdict("pytorch", "gpu").reason == "cpu_build"
    assert (diagnosis.best("tensorflow"), diagnosis.best("pytorch")) == ("gpu", "cpu")


def test_the_best_on_a_mac():
    facts = replace(TORCH, mps_built=True, mps_available=True, mps_smoke="ok")
    diagnosis = diagnose(MAC, {**PROBES, "pytorch": facts})
    assert (diagnosis.best("pytorch"), diagnosis.best("tensorflow")) == ("mps", "cpu")


@pytest.mark.parametrize("pair", [("jax", "cpu"), ("pytorch", "npu")])
def test_a_pair_that_does_not_exist(pair):
    with pytest.raises(KeyError, match="frameworks pytorch, tensorflow; accelerators cpu, gpu, mps, tpu"):
        diagnose(BARE, PROBES).verdict(*pair)


def test_the_first_answer_starts_no_process(no_process):
    diagnosis = diagnose(ON_T4, {"tensorflow": replace(TF, outcome="not run", cpu_smoke="")}, probe=False)
    assert diagnosis.checking
    assert diagnosis.verdict("tensorflow", "gpu").reason == "checking"
    assert diagnosis.verdict("tensorflow", "cpu").usable
    assert diagnosis.verdict("tensorflow", "tpu").reason == "no_tpu"  # needs no probe
    assert not diagnose(BARE, PROBES).checking


def test_the_first_answer_knows_what_was_found_before(no_process, monkeypatch):
    monkeypatch.setattr(module, "known", lambda framework, here: PROBES[framework])
    assert not diagnose(BARE, probe=False).checking


def test_both_frameworks_are_asked_at_the_same_time(monkeypatch):
    both = threading.Barrier(2, timeout=30)  # opens only when two are there

    def meet(framework, here, refresh):
        both.wait()
        return PROBES[framework]

    monkeypatch.setattr(module, "run_probe", meet)
    assert diagnose(BARE).facts == PROBES


def test_an_error_while_asking_is_not_lost(monkeypatch):
    def fail(framework, here, refresh):
        raise PermissionError(framework)

    monkeypatch.setattr(module, "run_probe", fail)
    with pytest.raises(PermissionError):
        diagnose(BARE)


def test_an_interrupt_does_not_wait_for_the_probes(tmp_path):
    """A cell that is interrupted returns although a probe hangs, and no process is left when the kernel ends."""
    stub = tmp_path / "stub.py"
    stub.write_text(f"""
import os, runpy, threading, time
probe = runpy.run_path({str(probing.PROBES["pytorch"])!r}, run_name="probe")
threading.Thread(target=probe["leave_with"], args=(os.getppid(),), daemon=True).start()
open({str(tmp_path)!r} + f"/{{os.getpid()}}.pid", "w").close()
time.sleep(600)
""")
    code = f"""
import os, pathlib, signal, threading, time
from accel_nb import probing
from accel_nb.diagnose import diagnose
here = pathlib.Path({str(tmp_path)!r})
probing.PROBES.update(pytorch=here / "stub.py", tensorflow=here / "stub.py")
def interrupt():
    while len(list(here.glob("*.pid"))) < 2:
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt, daemon=True).start()
try:
    diagnose(refresh=True)
except KeyboardInterrupt:
    print("interrupted")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert (done.stdout, done.returncode) == ("interrupted\n", 0), done.stderr
    left = [int(file.stem) for file in tmp_path.glob("*.pid")]
    assert len(left) == 2
    give_up = time.monotonic() + 30
    while any(psutil.pid_exists(pid) for pid in left) and time.monotonic() < give_up:
        time.sleep(0.05)
    assert not [pid for pid in left if psutil.pid_exists(pid)]


def test_this_machine_for_real(shared_cache):
    pytest.importorskip("torch")
    pytest.importorskip("tensorflow")
    table = accelerators()
    for framework in ("pytorch", "tensorflow"):
        assert table.verdict(framework, "cpu").reason == "ready"
        for kind in ("gpu", "mps", "tpu"):
            assert table.verdict(framework, kind).reason != "checking"
        assert table.usable(framework, table.best(framework))
    assert not diagnose(probe=False).checking  # kept by now


def test_the_kernel_imports_no_framework_for_it(shared_cache):
    code = (
        "import sys, accel_nb\nprint(accel_nb.accelerators())\n"
        "assert not {'torch', 'tensorflow', 'keras', 'jax', 'numpy', 'IPython'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "PyTorch     CPU" in done.stdout
    assert done.stderr == ""  # no start-up line of a framework gets through


# ---- how it shows itself


def test_the_machine_in_lines():
    hidden = replace(T4, index=1)
    machine = replace(ON_T4, gpus=(T4, hidden), tpu=TPU("v5e", 4))
    card = "Tesla T4 · 14.0 of 15.0 GiB free · compute capability 7.5 · driver 550.54.15 (runs up to CUDA 12.4)"
    assert machine_lines(machine) == [
        ("CPU", "Intel Xeon · 2 cores · AVX-512 · AVX2 · 11.0 of 12.0 GiB free"),
        ("GPU", f"0: {card}"),
        ("GPU", f"1: {card} · hidden by CUDA_VISIBLE_DEVICES"),
        ("TPU", "4 x v5e"),
    ]


def test_numbers_that_are_not_known_are_left_out():
    machine = Machine(cpu=CPU("Some CPU", 1), gpus=(GPU(0, "Orin"),), visible=(0,))
    assert machine_lines(machine) == [("CPU", "Some CPU · 1 core"), ("GPU", "0: Orin")]


def test_plain_text_is_aligned_and_says_the_fix():
    text = str(Accelerators(diagnose(ON_T4, {"pytorch": TORCH, "tensorflow": TF_ON_T4})))
    lines = text.splitlines()
    assert lines[0].startswith("CPU  Intel Xeon · 2 cores")
    assert lines[1].startswith("GPU  0: Tesla T4")
    rows = [line for line in lines if re.match(r"(PyTorch|TensorFlow) ", line)]
    assert len(rows) == 6  # the Apple GPU is beside the point here
    assert {row.index("✓" if "✓" in row else "✗") for row in rows} == {17}
    assert "TensorFlow  GPU  ✓ TensorFlow 2.21.0 runs on Tesla T4" in text
    place = lines.index(next(line for line in lines if line.startswith("PyTorch     GPU")))
    assert lines[place].endswith("PyTorch 2.13.0+cpu is a CPU-only build; the machine has Tesla T4.")
    assert lines[place + 1].startswith(" " * 19 + "Fix: Install the CUDA build")
    assert repr(Accelerators(diagnose(BARE, PROBES))) == str(Accelerators(diagnose(BARE, PROBES)))


def test_a_mac_is_told_of_its_own_gpu():
    text = str(Accelerators(diagnose(MAC, PROBES)))
    assert "PyTorch     MPS" in text
    assert "PyTorch     GPU" not in text
    assert "Apple silicon" in text


def test_what_is_being_checked_is_neither_right_nor_wrong():
    facts = replace(TF, outcome="not run", cpu_smoke="")
    text = str(Accelerators(diagnose(ON_T4, {**PROBES, "tensorflow": facts})))
    assert "TensorFlow  GPU  … TensorFlow 2.21.0 is being checked." in text


class Tags(HTMLParser):
    """Collects tags, attributes and text; fails on tags that do not close."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def parsed(machine, probes) -> Tags:
    tags = Tags()
    tags.feed(Accelerators(diagnose(machine, probes))._repr_html_())
    tags.close()
    assert tags.open == []
    return tags


def test_the_table_tells_what_the_text_tells():
    probes = {"pytorch": TORCH, "tensorflow": TF_ON_T4}
    tags = parsed(ON_T4, probes)
    assert tags.tags.count("tr") == 6
    assert {"caption", "th"} <= set(tags.tags)
    for line in str(Accelerators(diagnose(ON_T4, probes))).splitlines()[3:]:
        assert line.split("✓ ")[-1].split("✗ ")[-1].strip() in tags.text


def test_the_table_brings_no_colours_of_its_own():
    """Text and background are the page's, so that dark and light themes both can be read."""
    html = Accelerators(diagnose(ON_T4, PROBES))._repr_html_()
    assert set(re.findall(r"(?<![-\w])color:\s*([^;\"]+)", html)) == {"inherit"}
    assert set(re.findall(r"background:\s*([^;\"]+)", html)) == {"transparent"}


def test_hostile_names_do_not_get_into_the_page():
    evil = '<script>alert("x")</script><img src=x onerror=alert(1)>&"\''
    card = replace(T4, name=evil)
    machine = replace(ON_T4, gpus=(card,), driver=evil, cpu=replace(CPU2, name=evil))
    facts = replace(TF_ON_T4, version=evil, devices=(Device(0, evil, (7, 5), 0, "ok"),))
    broken = replace(TORCH, cuda_build=True, cuda=evil, version=evil, error=evil, stderr=evil)
    tags = parsed(machine, {"pytorch": broken, "tensorflow": facts})
    assert not {"script", "img"} & set(tags.tags)
    assert "onerror" not in tags.attributes
    assert evil in tags.text


def test_as_plain_values():
    told = Accelerators(diagnose(ON_T4, {"pytorch": TORCH, "tensorflow": TF_ON_T4})).to_dict()
    assert json.loads(json.dumps(told)) == told
    assert told["machine"]["gpus"][0]["capability"] == [7, 5]
    assert told["verdicts"]["tensorflow"]["gpu"]["details"] == {"devices": [0], "failed": {}}
    assert told["verdicts"]["pytorch"]["gpu"]["reason"] == "cpu_build"


# ---- asked and used


@pytest.mark.parametrize(
    ("asked", "used"),
    [
        ("auto", "cpu"),
        ("cpu", "cpu"),
        ("cpu", "/CPU:0"),
        ("gpu", "cuda:0"),
        ("gpu", "cuda"),
        ("gpu", "/job:localhost/replica:0/task:0/device:GPU:0"),
        ("gpu", "/physical_device:GPU:1"),
        ("gpu:1", "cuda:1"),
        ("gpu:0", "cuda"),
        ("mps", "mps:0"),
        ("tpu", "xla:0"),
        ("tpu", "/TPU:0"),
    ],
)
def test_agreement_costs_nothing(monkeypatch, asked, used):
    monkeypatch.setattr(module, "diagnose", lambda *_, **__: pytest.fail("looked up without need"))
    check_used(asked, used)


@pytest.mark.parametrize("used", ["cpu", "/CPU:0", "/job:localhost/replica:0/task:0/device:CPU:0"])
def test_a_silent_fall_to_the_cpu_is_an_error_that_tells_why(used):
    diagnosis = diagnose(ON_T4, PROBES)
    with pytest.raises(AcceleratorError) as raised:
        check_used("gpu", used, "pytorch", diagnosis)
    text = str(raised.value)
    assert text.startswith(f"Asked for GPU, got CPU ({used}). PyTorch 2.13.0+cpu is a CPU-only build")
    assert "\nFix: Install the CUDA build" in text
    assert text.endswith("pass accelerator='cpu'.")


def test_a_usable_card_that_was_not_used():
    diagnosis = diagnose(ON_T4, {**PROBES, "tensorflow": TF_ON_T4})
    with pytest.raises(AcceleratorError, match="can use it here: the program placed its work elsewhere"):
        check_used("gpu:0", "/CPU:0", "tensorflow", diagnosis)


def test_another_card_than_asked():
    with pytest.raises(AcceleratorError, match=r"Asked for GPU:1, but the run uses GPU:0 \(cuda:0\)"):
        check_used("gpu:1", "cuda:0", "pytorch", diagnose(ON_T4, PROBES))


def test_a_gpu_where_the_cpu_was_asked_for():
    with pytest.raises(AcceleratorError, match=r"Asked for CPU, got GPU \(cuda:0\)"):
        check_used("cpu", "cuda:0", "pytorch", diagnose(ON_T4, PROBES))


def test_tensorflow_calls_the_apple_gpu_gpu():
    check_used("mps", "/GPU:0", "tensorflow", diagnose(MAC, PROBES))
    with pytest.raises(AcceleratorError):
        check_used("mps", "/GPU:0", "tensorflow", diagnose(ON_T4, PROBES))


def test_the_framework_of_a_worker_is_the_one_it_has_imported(monkeypatch):
    monkeypatch.setattr(module, "diagnose", lambda: diagnose(ON_T4, PROBES))
    monkeypatch.setitem(sys.modules, "tensorflow", object())
    with pytest.raises(AcceleratorError, match=r"TensorFlow 2\.21\.0"):
        check_used("gpu", "/CPU:0")
    monkeypatch.delitem(sys.modules, "tensorflow")
    with pytest.raises(AcceleratorError, match=r"PyTorch 2\.13\.0"):
        check_used("gpu", "cpu")
