"""Runs of several processes: how they start, how each way of failing ends them all, and whose failure is told."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from conftest import is_worker

import accel_nb as anb
from accel_nb import ranks
from accel_nb.api import prepare
from accel_nb.folder import known
from accel_nb.resolve import resolve

PROGRAM = (Path(__file__).parent / "ranks_program.py").read_text()
PATIENCE = 90  # seconds until something that must happen counts as not happening, on a slow and busy machine


def until(condition, what, patience=PATIENCE):
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, f"in vain: {what}"
        time.sleep(0.02)


def pids(run):
    marks = ranks.read_marks(run.directory)
    return {rank: lines[0]["pid"] for rank, lines in marks.items() if lines}


def none_left(run):
    """No process of the run lives, its supervisor included."""

    def gone(pid):
        try:
            return not is_worker(psutil.Process(pid))
        except psutil.Error:
            return True

    until(lambda: all(map(gone, pids(run).values())), f"no rank of {run.name} is left", 5)


@pytest.fixture
def start(runs_folder, monkeypatch):
    """start(fault): a DDP run of two ranks whose program is `ranks_program.py`; it ends with the test."""
    started = []

    def begin(fault=""):
        monkeypatch.setenv("RANKS_FAULT", fault)
        plan = anb.Plan(framework="pytorch", accelerator="cpu", strategy="ddp", devices=2, epochs=1)
        resolved = resolve(plan)
        resolved.program = lambda: SimpleNamespace(text=PROGRAM, pickled=None, own=None)
        run = known(prepare(resolved, runs_folder))
        run.begin()
        started.append(run)
        return run

    yield begin
    for run in started:
        if not run.ended:
            run.kill()
            until(lambda run=run: run.ended, "a killed run ends")
        none_left(run)


def training(run):
    until(lambda: len(run.history) > 3 or run.ended, "steps arrive")
    assert not run.ended, run.error
    return run


def told(run):
    return run.error["text"], run.error.get("traceback", "")


def test_a_rank_that_raises_ends_the_run_with_its_own_traceback(start):
    run = start("raise")
    with pytest.raises(anb.RunFailed, match="Rank 1: ValueError: rank 1 met a bad batch"):
        run.wait(PATIENCE)
    text, traceback = told(run)
    assert "Connection" not in text
    assert 'raise ValueError("rank 1 met a bad batch")' in traceback
    assert run.error["where"].startswith("program.py, line ")
    assert len(run.history) >= 18  # what was trained until then is kept
    none_left(run)


def test_a_rank_that_is_killed_is_named_within_ten_seconds(start):
    run = training(start())
    os.kill(pids(run)[1], signal.SIGKILL)
    killed = time.monotonic()
    until(lambda: run.ended, "the run ends")
    assert time.monotonic() - killed < 10  # what the package promises
    assert told(run)[0].startswith("Rank 1 was killed (SIGKILL).")
    none_left(run)


def test_a_rank_that_never_joins_is_named_within_fifteen_seconds(start):
    run = start("absent")
    until(lambda: run.activity == "waiting for the other processes", "rank 0 waits")
    waits = time.monotonic()
    until(lambda: run.ended, "the run ends")
    assert time.monotonic() - waits < 15
    assert run.status == "failed"
    assert told(run)[0].startswith("Rank 1 did not join the others within 13 s")
    none_left(run)


def test_a_rank_that_hangs_is_told_and_stop_ends_the_run(start):
    run = start("hang")
    until(lambda: run.waiting, "the run says what it waits in")
    assert run.waiting.startswith("rank 0: all_reduce, program.py, line ")
    run.stop()
    run.stop()  # nobody listens to the polite word
    until(lambda: run.ended, "the run ends", 10)
    assert run.status == "stopped"
    assert len(run.history) == 19
    none_left(run)


def test_two_runs_at_once_beside_a_busy_default_port_stop_and_are_followed_by_a_third(start):
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 29500))  # torchrun's default
        holder.listen()
        both = [start(), start()]
        for run in both:
            training(run)
        for run in both:
            run.stop()
        for run in both:
            run.wait(PATIENCE)
            assert run.status == "stopped"
            assert set(run.history.loss) == {2.0}  # each step summed over both ranks
    training(start()).stop().wait(PATIENCE)


def test_when_the_kernel_dies_no_rank_is_left(runs_folder, monkeypatch):
    code = f"""
        import sys, time
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import test_ranks, accel_nb as anb
        from accel_nb.api import prepare
        from accel_nb.folder import known, runs_folder
        from types import SimpleNamespace
        plan = anb.Plan(framework="pytorch", accelerator="cpu", strategy="ddp", devices=2, epochs=1)
        resolved = test_ranks.resolve(plan)
        resolved.program = lambda: SimpleNamespace(text=test_ranks.PROGRAM, pickled=None, own=None)
        run = known(prepare(resolved, runs_folder(None)))
        run.begin()
        test_ranks.training(run)
        print(run.directory, flush=True)
        time.sleep(1000)
        """
    kernel = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        run = anb.runs()[-1] if (line := kernel.stdout.readline().strip()) else None
        assert line, "the kernel's run trains"
        assert str(run.directory) == line
    finally:
        kernel.kill()
        kernel.wait()
        kernel.stdout.close()
    none_left(run)
    until(lambda: run.ended, "the run ends")
    assert run.status == "stopped"  # rank 0 still said its last word


@pytest.mark.skipif(
    os.name != "posix" or os.getuid() != 0 or not shutil.which("unshare"), reason="needs root: another host name"
)
def test_a_host_name_that_leads_nowhere_does_not_matter(runs_folder):
    code = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import accel_nb as anb
        run = anb.train(framework="pytorch", accelerator="cpu", strategy="ddp", devices=2, epochs=1)
        print(run.status, run.started["replicas"])
        """
    command = ["unshare", "--uts", "sh", "-c", 'hostname nowhere.invalid && exec "$@"', "sh"]
    done = subprocess.run(
        [*command, sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.stdout.split()[-2:] == ["done", "2"], done.stdout + done.stderr


def test_the_cause_is_told_and_not_what_it_led_to(tmp_path):
    """Neighbours of a dead rank fail too, and may do so first."""
    gone = {
        "t": 1.0,
        "event": "error",
        "text": "RuntimeError: Connection closed by peer [127.0.0.1]:5",
        "kind": "R",
    }
    cause = {"t": 2.0, "event": "error", "text": "ValueError: no", "kind": "ValueError"}
    joining = {"t": 0.0, "event": "joining"}
    first = ranks.first_failure({0: 1}, {0: [joining, gone], 1: [joining, cause]}, tmp_path)
    assert (first["rank"], first["text"]) == (1, "Rank 1: ValueError: no")
    first = ranks.first_failure({0: 1, 1: -11}, {0: [joining, gone], 1: [joining]}, tmp_path)
    assert first["text"].startswith("Rank 1 was killed (SIGSEGV)")
    first = ranks.first_failure({0: 1, 1: -15}, {0: [joining, gone], 1: []}, tmp_path)
    assert first["text"].startswith("Rank 1 did not join")
    first = ranks.first_failure({0: 1}, {0: [joining, gone], 1: [joining]}, tmp_path)
    assert first["text"].startswith("Rank 0: RuntimeError: Connection closed")


def test_free_ports_are_different_and_free():
    ports = ranks.free_ports(5)
    assert len(set(ports)) == 5
    for port in ports:
        with socket.socket() as one:
            one.bind(("127.0.0.1", port))


def test_a_rank_needs_its_number(monkeypatch):
    for name in ("RANK", "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(anb.AccelNbError, match="RANK or TF_CONFIG"):
        ranks.rank_of_environment()
    monkeypatch.setenv("TF_CONFIG", json.dumps({"task": {"type": "worker", "index": 3}}))
    assert ranks.rank_of_environment() == 3
