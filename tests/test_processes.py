"""A process is known by its id and its birth, whatever the time of day says."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path as FilePath

import psutil
import pytest

from accel_nb.processes import alive, born


def test_this_process_lives_and_a_stranger_of_its_id_does_not():
    birth = born(os.getpid())
    assert alive(os.getpid(), birth)
    assert not alive(os.getpid(), birth - 1000)
    assert born(os.getpid()) == birth


def test_a_dead_process_that_nobody_has_waited_for_is_dead():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    birth = born(process.pid)
    assert alive(process.pid, birth)
    process.stdin.close()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not alive(process.pid, birth)
    process.wait()
    assert not alive(process.pid, birth)
    assert born(process.pid) == 0


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux tells a time from the machine's start"
)
def test_a_clock_that_jumps_makes_no_process_a_stranger(monkeypatch):
    """Psutil works out the time of birth from the time of day; what it says must not count here."""
    birth = born(os.getpid())
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: time.time() + 9999)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert alive(os.getpid(), birth)


def test_without_proc_psutil_is_asked(monkeypatch):
    monkeypatch.setattr("accel_nb.processes.Path", lambda *_: FilePath("/nowhere/at/all"))
    assert alive(os.getpid(), born(os.getpid()))
    assert born(os.getpid()) == psutil.Process().create_time()
    assert born(2**22 + 1) == 0
