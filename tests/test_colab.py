"""What is special in Colab, with a stand-in for its package and without one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import warnings
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import pytest

import accel_nb
from accel_nb import colab
from accel_nb.diagnose import machine_lines
from accel_nb.errors import AccelNbError
from accel_nb.machine import GPU, TPU, Machine

CARD = {"T4": "Tesla T4", "L4": "NVIDIA L4", "A100": "NVIDIA A100-SXM4-40GB", "H100": "NVIDIA H100 80GB HBM3"}
CARD["G4"] = "NVIDIA RTX PRO 6000 Blackwell Server Edition"


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch):
    """No Colab, and no page that has been asked."""
    monkeypatch.delitem(sys.modules, "google.colab", raising=False)
    monkeypatch.delenv("COLAB_RELEASE_TAG", raising=False)
    monkeypatch.setattr(colab, "_notebook", [])


@pytest.fixture
def package(monkeypatch, tmp_path):
    """A stand-in for Colab's package, with what a test puts in; Drive is mounted in the test's folder."""
    stub = ModuleType("google.colab")
    monkeypatch.setitem(sys.modules, "google.colab", stub)
    monkeypatch.setattr(colab, "MOUNT", tmp_path / "drive")
    return stub


def page(package, answer):
    """A page that gives this answer; what it was asked is collected."""
    asked = []

    def blocking_request(kind, request, timeout_sec):
        asked.append((kind, request, timeout_sec))
        if isinstance(answer, BaseException):
            raise answer
        return answer

    package._message = SimpleNamespace(blocking_request=blocking_request)
    return asked


def notebook(accelerator=None, kind=None):
    metadata = {"accelerator": accelerator, "colab": {"gpuType": kind, "provenance": []}}
    return {"ipynb": {"metadata": {key: value for key, value in metadata.items() if value}, "cells": []}}


def with_gpu(name: str) -> Machine:
    return Machine(colab=True, gpus=(GPU(0, name, 16 * 2**30, 15 * 2**30, (7, 5), "GPU-0"),), visible=(0,))


def with_tpu(generation: str, chips: int = 1) -> Machine:
    return Machine(colab=True, tpu=TPU(generation, chips))


# ---- whether it is Colab


def test_colab_is_known_by_its_package_or_its_variable(package, monkeypatch):
    assert colab.in_colab({})
    monkeypatch.delitem(sys.modules, "google.colab")
    assert not colab.in_colab({"COLAB_TPU_ADDR": "10.0.0.2:8470", "PATH": "/content"})
    assert colab.in_colab({"COLAB_RELEASE_TAG": "release-colab-20260818"})


# ---- the runtime


@pytest.mark.parametrize(
    ("accelerator", "kind", "machine", "told"),
    [
        ("GPU", "T4", with_gpu(CARD["T4"]), "Tesla T4, as the notebook asks"),
        ("GPU", "L4", with_gpu(CARD["L4"]), "NVIDIA L4, as the notebook asks"),
        ("GPU", "A100", with_gpu(CARD["A100"]), "NVIDIA A100-SXM4-40GB, as the notebook asks"),
        ("GPU", "H100", with_gpu(CARD["H100"]), "NVIDIA H100 80GB HBM3, as the notebook asks"),
        ("GPU", "G4", with_gpu(CARD["G4"]), f"{CARD['G4']}, as the notebook asks"),
        ("TPU", "V5E1", with_tpu("v5e"), "TPU v5e, as the notebook asks"),
        ("TPU", "V6E1", with_tpu("v6e"), "TPU v6e, as the notebook asks"),
        ("TPU", "V28", with_tpu("v2", 4), "4 x TPU v2, as the notebook asks"),
        ("GPU", None, with_gpu("NVIDIA B200"), "NVIDIA B200, as the notebook asks"),
        ("GPU", "A100", with_gpu(CARD["T4"]), "Tesla T4, not the A100 GPU that"),
        ("GPU", "L4", with_gpu("NVIDIA L40S"), "NVIDIA L40S, not the L4 GPU that"),
        ("GPU", "B200", with_gpu("NVIDIA B200"), "NVIDIA B200, as the notebook asks"),
        ("GPU", "T4", Machine(colab=True), "CPU, not the T4 GPU that"),
        ("TPU", "V5E1", Machine(colab=True), "CPU, not the v5e-1 TPU that"),
        ("TPU", "V5E1", with_tpu("v6e"), "TPU v6e, not the v5e-1 TPU that"),
        ("TPU", "V5E1", with_gpu(CARD["T4"]), "Tesla T4, not the v5e-1 TPU that"),
        (None, None, Machine(colab=True), "CPU"),
        (None, None, with_gpu(CARD["T4"]), "Tesla T4"),
    ],
)
def test_what_was_got_is_compared_with_what_the_notebook_asks_for(accelerator, kind, machine, told, package):
    page(package, notebook(accelerator, kind))
    found = colab.runtime(machine)
    assert str(found).startswith(told)
    assert found.fits == ("not the" not in told)
    if not found.fits:
        assert f"Runtime → Change runtime type → {found.asked}" in str(found)


def test_the_machine_tells_it(package):
    page(package, notebook("GPU", "A100"))
    assert machine_lines(with_gpu(CARD["T4"]))[-1][1].startswith("Tesla T4, not the A100 GPU")
    assert machine_lines(with_gpu(CARD["T4"]))[-1][0] == "Colab"


def test_elsewhere_there_is_no_runtime():
    assert colab.runtime(Machine()) is None
    assert colab.runtime() is None
    assert "Colab" not in dict(machine_lines(Machine()))


def test_the_page_is_asked_once_and_never_without_a_limit(package):
    asked = page(package, notebook("GPU", "T4"))
    for _ in range(3):
        colab.runtime(with_gpu(CARD["T4"]))
    assert asked == [("get_ipynb", "", colab.ANSWER)]


@pytest.mark.parametrize(
    "answer",
    [
        None,
        {},
        {"ipynb": None},
        {"ipynb": {"metadata": 3}},
        "",
        RuntimeError("the page is gone"),
        TypeError("new"),
    ],
    ids=repr,
)
def test_a_page_that_does_not_tell_leaves_what_was_got(answer, package):
    page(package, answer)
    assert str(colab.runtime(with_gpu(CARD["T4"]))) == "Tesla T4"
    assert colab.runtime(Machine(colab=True)) == colab.Runtime("CPU")


def test_colab_without_that_call_or_without_its_package_leaves_what_was_got(package, monkeypatch):
    assert str(colab.runtime(with_tpu("v5e"))) == "TPU v5e"
    monkeypatch.delitem(sys.modules, "google.colab")
    monkeypatch.setattr(colab, "_notebook", [])
    assert str(colab.runtime(with_tpu("v5e"))) == "TPU v5e"


def test_a_call_that_keeps_no_limit_is_ended(package, monkeypatch):
    monkeypatch.setattr(colab, "ANSWER", 0.05)
    package._message = SimpleNamespace(blocking_request=lambda *_, **__: time.sleep(3600))
    assert str(colab.runtime(with_tpu("v5e"))) == "TPU v5e"


def test_only_the_main_thread_asks_the_page(package):
    asked = page(package, notebook("GPU", "A100"))
    found = []
    thread = threading.Thread(target=lambda: found.append(colab.runtime(with_gpu(CARD["T4"]))))
    thread.start()
    thread.join()
    assert found == [colab.Runtime("Tesla T4")]
    assert asked == []
    assert not colab.runtime(with_gpu(CARD["T4"])).fits  # and it still may
    thread = threading.Thread(target=lambda: found.append(colab.runtime(with_gpu(CARD["T4"]))))
    thread.start()
    thread.join()
    assert not found[-1].fits


@pytest.mark.parametrize("metadata", [{"accelerator": 3}, {"accelerator": "GPU", "colab": "T4"}, {"colab": []}])
def test_odd_metadata_are_no_error(metadata, package):
    page(package, {"ipynb": {"metadata": metadata}})
    assert colab.runtime(with_gpu(CARD["T4"])).fits


# ---- what is loaded


def other_version(folder, name, version):
    """A folder in which a package is installed in another version, for those who only read what is installed."""
    told = folder / f"{name}-{version}.dist-info"
    told.mkdir(parents=True)
    (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_what_is_loaded_here_is_what_is_installed():
    for module in colab.LOADED:
        if module not in ("torch", "tensorflow"):
            import_module(module)
    assert colab.changed() == {}


def test_a_package_replaced_after_it_was_loaded_is_named(tmp_path, monkeypatch):
    import numpy as np

    other_version(tmp_path, "numpy", "9.9.9")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert colab.changed() == {"numpy": (np.__version__, "9.9.9")}
    with pytest.warns(RuntimeWarning, match=r"numpy 9\.9\.9 is installed, .* is loaded\. Restart the kernel"):
        colab.warn_if_changed()
    monkeypatch.setenv("COLAB_RELEASE_TAG", "x")
    with pytest.warns(RuntimeWarning, match="Runtime → Restart session, then run the notebook from the top"):
        colab.warn_if_changed()


@pytest.mark.parametrize(
    ("loaded", "installed"),
    [("2.9.0", "2.9.0+cpu"), ("2.9.0+cu128", "2.9.0"), ("2.9.0", "2.9.0.post1"), ("2.9.0a0+git1", "2.9.0")],
)
def test_builds_of_one_release_are_no_change(loaded, installed, tmp_path, monkeypatch):
    other_version(tmp_path, "torch", installed)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__=loaded))
    assert colab.changed() == {}


def test_tensorflow_may_come_from_several_packages(tmp_path, monkeypatch):
    other_version(tmp_path, "tensorflow", "2.19.0")
    other_version(tmp_path, "tensorflow_tpu", "2.20.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "tensorflow", SimpleNamespace(__version__="2.20.0"))
    assert colab.changed() == {}
    monkeypatch.setitem(sys.modules, "tensorflow", SimpleNamespace(__version__="2.18.0"))
    assert colab.changed()["tensorflow"][0] == "2.18.0"


IMPORT = "import {first}; import accel_nb, sys; print([m for m in ('torch', 'tensorflow') if m in sys.modules])"


def importing(folder, first: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-W", "always::RuntimeWarning", "-c", IMPORT.format(first=first)]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_importing_accel_nb_in_a_notebook_says_restart(tmp_path):
    other_version(tmp_path, "numpy", "9.9.9")
    done = importing(tmp_path, "numpy, IPython")
    assert done.returncode == 0, done.stderr
    assert "numpy 9.9.9 is installed" in done.stderr
    assert done.stdout == "[]\n"  # and no framework was loaded to find out


def test_importing_accel_nb_says_nothing_where_all_is_well(tmp_path):
    assert importing(tmp_path, "numpy, IPython").stderr == ""
    other_version(tmp_path, "numpy", "9.9.9")
    assert importing(tmp_path, "numpy").stderr == ""  # a script, which has no kernel to restart


# ---- Drive


def drive(package, problem=None):
    """Colab's module for Drive, which mounts a folder or fails."""
    asked = []

    def mount(mountpoint, timeout_ms):
        asked.append((mountpoint, timeout_ms))
        if problem is not None:
            raise problem
        (colab.MOUNT / "MyDrive").mkdir(parents=True, exist_ok=True)

    package.drive = SimpleNamespace(mount=mount)
    return asked


def test_drive_is_mounted_with_a_limit(package):
    asked = drive(package)
    assert colab.drive_folder() is None
    assert colab.mount_drive(timeout=45) == colab.MOUNT / "MyDrive"
    assert asked == [(str(colab.MOUNT), 45000)]
    assert colab.drive_folder() is None  # nothing was kept there yet


def test_elsewhere_there_is_no_drive():
    with pytest.raises(AccelNbError, match=r"not Google Colab.*keep_on_drive\(to=folder\)"):
        colab.mount_drive()
    with pytest.raises(AccelNbError, match="not Google Colab"):
        colab.keep_on_drive()
    assert colab.drive_folder() is None


UNSUPPORTED = NotImplementedError(
    "google.colab.drive is unsupported in this environment."
)  # a local runtime's word


@pytest.mark.parametrize("problem", [ValueError("mount failed"), UNSUPPORTED, RuntimeError()])
def test_a_mount_that_fails_says_why_and_what_to_do(problem, package):
    drive(package, problem)
    with pytest.raises(AccelNbError, match=f"not mounted: {type(problem).__name__}.*Run the cell again and allow"):
        colab.keep_on_drive()


def test_a_mount_that_never_ends_is_ended(package, monkeypatch):
    package.drive = SimpleNamespace(mount=lambda *_, **__: time.sleep(3600))
    with pytest.raises(AccelNbError, match=r"not mounted: TimeoutError: no answer within"):
        colab.mount_drive(timeout=-29.9)


def test_a_colab_without_drive_or_one_that_lies_is_told(package):
    with pytest.raises(AccelNbError, match="not mounted: ImportError"):
        colab.mount_drive()
    package.drive = SimpleNamespace(mount=lambda *_, **__: None)
    with pytest.raises(AccelNbError, match="is not there"):
        colab.mount_drive()


def test_an_interrupt_ends_the_wait_for_drive(package):
    drive(package, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        colab.mount_drive()


def test_runs_are_kept_on_drive(package, runs_folder):
    drive(package)
    framework = "pytorch" if find_spec("torch") else "tensorflow"
    run = accel_nb.train(framework=framework, epochs=1)
    copies = colab.keep_on_drive()
    copies.wait(60)
    kept = colab.drive_folder()
    copies.stop()
    assert copies.copied == [run.name]
    (again,) = accel_nb.runs(kept)
    assert again.status == "done"
    assert (again.history.loss == run.history.loss).all()
    assert {path.name for path in (kept / run.name).rglob("*.npy")} == {
        path.name for path in run.directory.rglob("*.npy")
    }


def test_no_alarm_is_left_behind(package):
    drive(package)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        colab.mount_drive()
    import signal

    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
