"""Lives of runs in which all goes wrong, at random moments: what is left is whole, and the run can be taken up.

ACCEL_NB_FAULTS: how many lives each framework has (1). ACCEL_NB_SEED: the first one's seed, to see it again.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import is_worker
from test_resume import same, until

import accel_nb as anb
from accel_nb.resuming import checkpoint_in, whole

LIVES = int(os.environ.get("ACCEL_NB_FAULTS", "1"))
SEED = int(os.environ.get("ACCEL_NB_SEED", "0"))
PATIENCE = 120  # seconds until something that must happen counts as a hang, on a slow and busy machine
ORPHAN = 6.0  # seconds from the end of a kernel to that of the last process: the package promises 5
PLAN = {"data": "digits", "model": "mlp", "model_args": {"layers": [24], "dropout": 0.3}, "accelerator": "cpu"}
PLAN |= {"epochs": 20, "batch_size": 8, "checkpoint_epochs": 1}

# Another kernel: it takes the run up when it is told to, and follows it to its end.
KERNEL = """
import sys
import accel_nb as anb
run = anb.Run(sys.argv[1]).attach()
print("ready", flush=True)
sys.stdin.readline()
try:
    run.resume()
    run.wait()
    print("won" if run.ours else "followed", run.status, flush=True)
except anb.AccelNbError as told:
    print("told" if "Another kernel trains" in str(told) else f"failed {told}", flush=True)
"""


@pytest.fixture(scope="session")
def through():
    """through(plan): a run of this plan that nothing disturbed; one for all tests."""
    made = {}

    def run(plan):
        key = repr(plan)
        if key not in made:
            made[key] = anb.train(**plan)
        return made[key]

    return run


@pytest.fixture(scope="session")
def clock(tmp_path_factory):
    """(library that moves the time of day, file that says by how much); None where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not sys.platform.startswith("linux") or compiler is None:
        return None
    folder = tmp_path_factory.mktemp("clock")
    library, shift = folder / "clock.so", folder / "shift"
    source = Path(__file__).with_name("clock.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    shift.write_text("0")
    return library, shift


@pytest.fixture
def disk(tmp_path):
    """A disk of its own of 16 MiB, where this system lets us mount one; else a folder."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    mounted = os.geteuid() == 0 and not subprocess.run(command, check=False, capture_output=True).returncode
    yield folder
    if mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def begun(clock):
    """begun(plan, folder, number): a life; whatever becomes of it, it ends with the test."""
    lives = []

    def begin(plan, folder, number):
        lives.append(Life(plan, folder, number, clock))
        return lives[-1]

    yield begin
    for life in lives:
        for kernel in life.kernels:
            kernel.kill()
            kernel.communicate()
        if not life.run.ended:
            life.run.kill()
            until(lambda life=life: life.run.ended, "a killed run ends")


class Life:
    """A run and all that is done to it."""

    def __init__(self, plan, folder, number, clock=None):
        self.random = random.Random(SEED + number)
        print(f"{plan['framework']}: ACCEL_NB_SEED={SEED + number}")
        self.clock = clock
        self.processes: dict[int, psutil.Process] = {}  # all that ever worked on it
        self.run = anb.train(**plan, directory=folder, wait=False)
        self.kernels: list[subprocess.Popen[str]] = []
        self.harm: list[str] = []

    # ---- moments

    def moment(self):
        """A random moment: of the start, or some steps later."""
        if self.random.random() < 0.2:
            time.sleep(self.random.uniform(0, 3))
        else:
            steps = len(self.run.history) + self.random.randint(1, 300)
            until(lambda: len(self.run.history) >= steps or self.run.ended, "steps arrive", PATIENCE)
        self.remember()

    def remember(self):
        with contextlib.suppress(psutil.Error, TypeError):
            self.run._find_worker()
            worker = psutil.Process(self.run._identity[0])
            if is_worker(worker):
                self.processes |= {one.pid: one for one in [worker, *worker.children(recursive=True)]}

    def worker(self):
        self.run._find_worker()
        return self.run._identity[0]

    # ---- what a run survives

    def move_clock(self):
        """The time of day jumps, to and fro."""
        if self.clock is not None:
            self.moment()
            for _ in range(3):
                self.clock[1].write_text(str(self.random.randint(-(10**8), 10**8)))
                self.moment()
            self.clock[1].write_text("0")

    def freeze(self):
        """All of its processes stand still for a while, as on a laptop that sleeps."""
        self.moment()
        stopped = [one for one in self.processes.values() if one.is_running()]
        for one in stopped:
            one.suspend()
        time.sleep(self.random.uniform(0, 2))
        for one in stopped:
            one.resume()

    def cut_writes(self):
        """A file of the run can grow to a part of a checkpoint's size only: each write of one fails half way."""
        until(lambda: checkpoint_in(self.run.directory) or self.run.ended, "a checkpoint", PATIENCE)
        self.moment()
        size = checkpoint_in(self.run.directory).stat().st_size
        limits = {}
        for one in self.processes.values():
            with contextlib.suppress(psutil.Error):
                limits[one] = one.rlimit(resource.RLIMIT_FSIZE)
                one.rlimit(resource.RLIMIT_FSIZE, (self.random.randint(1, size - 1), limits[one][1]))
        self.moment()
        self.moment()
        assert whole(checkpoint_in(self.run.directory))
        told = [text for text in self.run.warnings if "not written" in text]
        assert all("Errno" in text for text in told), told  # the system's own words
        for one, limit in limits.items():
            with contextlib.suppress(psutil.Error):
                one.rlimit(resource.RLIMIT_FSIZE, limit)

    def fill_disk(self):
        """The disk is full for a while, after a random part of a checkpoint."""
        disk = self.run.directory.parents[1]
        if not disk.is_mount():
            return
        self.moment()
        filler = disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            file.truncate(0)
            free = shutil.disk_usage(disk).free
            file.write(b"0" * (free - self.random.choice([0, self.random.randint(0, 300_000)])))
        time.sleep(self.random.uniform(0, 2))
        self.remember()
        filler.unlink()

    # ---- what ends it

    def kill_worker(self):
        self.moment()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.worker(), signal.SIGKILL)

    def kill_rank(self):
        """One of its processes, the one that starts the others included."""
        self.moment()
        alive = [one for one in self.processes.values() if one.is_running()]
        if alive:
            self.random.choice(alive).kill()

    def kill_in_write(self):
        """While a checkpoint is half written."""
        self.moment()
        end = time.monotonic() + 20
        while not self.run.ended and time.monotonic() < end:
            names = {one.name for one in os.scandir(self.run.directory)}
            if names & {"checkpoint.part", "new-checkpoint.npz"}:
                self.harm.append("caught it writing")
                break
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.worker(), signal.SIGKILL)

    def kill_kernel(self):
        """The kernel that took it up."""
        self.moment()
        for kernel in self.kernels:
            kernel.kill()

    def remove(self):
        self.moment()
        shutil.rmtree(self.run.directory, ignore_errors=True)

    # ---- and what must hold

    def ended(self):
        """It ends, nothing hangs, nothing is left, all of it can be read."""
        until(lambda: self.run.ended, f"the end is noticed ({self.run.status}; {self.harm})", PATIENCE)
        deadline = time.monotonic() + ORPHAN
        for one in self.processes.values():
            while is_worker(one):
                assert time.monotonic() < deadline, f"left: {one.pid} {one.cmdline()}; {self.harm}"
                time.sleep(0.05)
        for kernel in self.kernels:
            kernel.communicate(timeout=PATIENCE)
        self.kernels = []

    def readable(self):
        checkpoint = checkpoint_in(self.run.directory)
        assert checkpoint is None or whole(checkpoint), self.harm
        again = anb.Run(self.run.directory).attach()
        until(lambda: again.ended, "another kernel reads it", PATIENCE)
        assert list(again.history.step) == list(range(1, len(again.history) + 1)), self.harm
        assert again.plot().axes

    def take_up(self):
        if self.run.status != "done":
            self.run.resume()

    def take_up_twice(self):
        """Two kernels take it up in the same moment: one trains, the other one is told."""
        command = [sys.executable, "-c", KERNEL, str(self.run.directory)]
        env = dict(os.environ)
        if self.clock is not None:
            env |= {"LD_PRELOAD": str(self.clock[0]), "ACCEL_NB_CLOCK": str(self.clock[1])}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": env}
        self.kernels = [subprocess.Popen(command, cwd=Path(__file__).parents[1], **pipes) for _ in range(2)]
        for kernel in self.kernels:
            assert kernel.stdout.readline().strip() == "ready"
        for kernel in self.kernels:
            kernel.stdin.write("\n")
            kernel.stdin.flush()
        taken = "one of the kernels has taken it up"
        until(lambda: self.run.status not in ("failed", "stopped"), taken, PATIENCE)
        self.run.attach()
        workers = [child for kernel in self.kernels for child in _workers_of(kernel)]
        assert workers or self.run.ended, self.harm
        self.processes |= {one.pid: one for one in workers}


def _workers_of(kernel):
    with contextlib.suppress(psutil.Error):
        return [one for one in psutil.Process(kernel.pid).children(recursive=True) if is_worker(one)]
    return []


@pytest.mark.parametrize("number", range(LIVES))
@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_a_run_survives_its_faults(framework, number, disk, begun, through):
    plan = {**PLAN, "framework": framework}
    life = begun(plan, disk / "runs", number)
    once = [life.cut_writes, life.fill_disk, life.freeze]
    ends = [life.kill_worker, life.kill_in_write, "kernels"]
    life.random.shuffle(once)
    life.random.shuffle(ends)
    for survived, end in zip(once, ends, strict=True):
        if end == "kernels":
            if not life.run.ended:
                life.kill_worker()
                life.ended()
            if life.run.status == "done":
                continue
            life.harm.append("two kernels")
            life.take_up_twice()
            life.move_clock()
            life.harm.append("kernel killed")
            life.kill_kernel()
        else:
            life.take_up() if life.run.ended else None
            for do in (survived, end):
                life.harm.append(do.__name__)
                do()
        life.ended()
        life.readable()
    life.take_up()
    life.run.wait(PATIENCE)
    same(life.run, through(plan))
    life.run.resume(epochs=40)
    life.remove()
    life.ended()
    with pytest.raises(anb.AccelNbError, match="removed"):
        life.run.resume()


def test_on_a_full_disk_a_run_is_refused_in_words_and_stays_as_it_was(disk):
    if not disk.is_mount():
        pytest.skip("a full disk needs one of its own, which this system lets nobody mount")
    plan = {**PLAN, "framework": "pytorch", "epochs": 1}
    run = anb.train(**plan, directory=disk / "runs")
    filler = disk / "filler"
    with pytest.raises(OSError, match="space"):
        filler.write_bytes(b"0" * 2**25)
    with pytest.raises(anb.AccelNbError, match=r"cannot be taken up.*space"):
        run.resume(epochs=2)
    assert (run.status, run.plan.epochs) == ("done", 1)
    with pytest.raises(anb.PlanError, match=r"directory=.*space"):
        anb.train(**plan, directory=disk / "others")
    assert not list((disk / "others").glob("*/*"))  # no part of a run is left
    filler.unlink()
    assert run.resume(epochs=2).wait(PATIENCE).status == "done"


RANKS = {
    "ddp": {"framework": "pytorch", "strategy": "ddp", "devices": 2},
    "multi_worker": {"framework": "tensorflow", "strategy": "multi_worker", "devices": 2},
}


@pytest.mark.parametrize("number", range(LIVES))
@pytest.mark.parametrize("strategy", list(RANKS))
def test_a_run_survives_the_death_of_a_rank(strategy, number, tmp_path, begun, through):
    # often by the clock too: each process has one, and a single process writes
    plan = {**PLAN, **RANKS[strategy], "epochs": 8, "checkpoint_seconds": 0.05}
    if strategy == "multi_worker":
        plan["model_args"] = {"layers": [24]}  # the second worker's dropout begins anew
    life = begun(plan, tmp_path / "runs", number)
    for _ in range(1 if LIVES == 1 else 3):
        if life.run.status == "done":
            break
        life.take_up() if life.run.ended else None
        life.kill_rank()
        life.ended()
        life.readable()
    life.take_up()
    life.run.wait(PATIENCE)
    assert life.run.status == "done"
    assert not [text for text in life.run.warnings if "not written" in text]
    if LIVES > 1:
        same(life.run, through({**plan, "checkpoint_seconds": 0}))
