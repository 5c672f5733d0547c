"""What all tests share: surroundings of their own, and a watch over worker processes that outlive their test."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest

PATIENCE = 5  # seconds that a worker may take to end; what the package promises
HOME: pytest.StashKey[Path] = pytest.StashKey()  # this session's folder for caches, runs and settings

# No test is timed. In CI the same examples each time: a failure there must be one that can be seen again.
hypothesis.settings.register_profile("accel_nb", deadline=None, derandomize="CI" in os.environ, print_blob=True)
hypothesis.settings.load_profile("accel_nb")


def pytest_configure(config: pytest.Config) -> None:
    """Set the surroundings, once: the processes that share out the tests inherit them."""
    if hasattr(config, "workerinput"):
        return
    home = Path(tempfile.mkdtemp(prefix="accel_nb-tests-"))
    config.stash[HOME] = home
    for name in ("ACCEL_NB_QUICK", "TF_CONFIG", "KERAS_BACKEND", "PYTHONWARNINGS"):
        os.environ.pop(name, None)  # a setting of the caller's would change what is tested
    os.environ.update(
        ACCEL_NB_CACHE=str(home / "cache"),
        ACCEL_NB_RUNS=str(home / "runs"),
        KERAS_HOME=str(home / "keras"),
        IPYTHONDIR=str(home / "ipython"),
        JUPYTER_CONFIG_DIR=str(home / "jupyter-config"),
        JUPYTER_DATA_DIR=str(home / "jupyter-data"),
        JUPYTER_RUNTIME_DIR=str(home / "jupyter-runtime"),
        MPLBACKEND="agg",
    )
    # Several processes share few cores here: threads that wait must not spin. It changes no result, and no number
    # of threads, on which the last digits of a sum depend.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


@pytest.hookimpl(trylast=True)  # after the fixtures' own ends
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the session if a worker is left that belongs to no process of ours any more (its kernel was killed)."""
    home = session.config.stash.get(HOME, None)
    if home is None:
        return
    left = end([process for process in psutil.process_iter() if is_worker(process, str(home / "cache"))])
    if left:
        session.config.get_terminal_writer().line(f"\nWorkers left after the tests: {'; '.join(left)}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    shutil.rmtree(home, ignore_errors=True)


def is_worker(process: psutil.Process, cache: str | None = None) -> bool:
    """Whether it is a worker of this package that lives; with `cache`, one with this ACCEL_NB_CACHE."""
    with contextlib.suppress(psutil.Error, OSError):
        ours = {"accel_nb.worker", "accel_nb.ranks"} & set(process.cmdline())
        return bool(ours) and cache in (None, process.environ().get("ACCEL_NB_CACHE"))
    return False  # gone meanwhile, or not ours to look at


def workers() -> set[psutil.Process]:
    """The workers that this process has started and that live."""
    return {child for child in psutil.Process().children() if is_worker(child)}


def end(processes: list[psutil.Process]) -> list[str]:
    """Wait for processes to end by themselves, kill those that do not; their command lines."""
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE)
    left = []
    for process in alive:
        with contextlib.suppress(psutil.Error):
            if is_worker(process):  # one that has ended and waits to be read is none
                left.append(f"{process.pid}: {' '.join(process.cmdline())}")
                process.kill()
    return left


@pytest.fixture(autouse=True)
def _no_worker_is_left() -> Iterator[None]:
    """After each test: the spare worker ends, and none that the test has started lives on."""
    before = workers()  # those of fixtures that several tests share may stay
    yield
    launch = sys.modules.get("accel_nb.launch")
    if launch is not None:
        launch.spares.close()
    left = end(list(workers() - before))
    assert not left, f"left after the test: {'; '.join(left)}"


@pytest.fixture
def runs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that this test's runs go to."""
    folder = tmp_path / "runs"
    monkeypatch.setenv("ACCEL_NB_RUNS", str(folder))
    return folder
