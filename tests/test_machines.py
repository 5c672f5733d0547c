"""Several machines: the lines to start, and two machines played by two network namespaces with a cable between."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import accel_nb as anb
from accel_nb.machines import commands, own_address

DIRECTORY = Path("/runs/a b")
PYTORCH = {"framework": "pytorch", "nodes": 2, "devices": 4}
TENSORFLOW = {"framework": "tensorflow", "nodes": 2, "devices": 2}
SMALL = {"data": "digits", "model": "mlp", "model_args": {"layers": [16], "dropout": 0}, "epochs": 2}
PATIENCE = 120  # seconds


def option(words, name):
    return next(word.partition("=")[2] for word in words if word.startswith(name + "="))


def test_torchruns_lines_differ_in_the_machine_only():
    lines = [shlex.split(line) for line in commands(DIRECTORY, PYTORCH, ["10.0.0.1", "10.0.0.2"], 1234)]
    assert [line[0] for line in lines] == ["torchrun", "torchrun"]
    assert [option(line, "--node-rank") for line in lines] == ["0", "1"]
    for line in lines:
        assert line[-1] == "/runs/a b/program.py"
        assert (option(line, "--master-addr"), option(line, "--master-port")) == ("10.0.0.1", "1234")
        assert (option(line, "--nnodes"), option(line, "--nproc-per-node")) == ("2", "4")


def test_tensorflows_lines_name_every_worker():
    lines = commands(DIRECTORY, TENSORFLOW, ["10.0.0.1", "fd00::2"], 5000)
    workers = ["10.0.0.1:5000", "10.0.0.1:5001", "[fd00::2]:5000", "[fd00::2]:5001"]
    tasks = []
    for line in lines:
        for part in line.split(" & "):
            words = shlex.split(part)
            name, _, value = words[0].partition("=")
            assert name == "TF_CONFIG"
            config = json.loads(value)
            assert config["cluster"] == {"worker": workers}
            tasks.append(config["task"])
            assert words[1:] == ["python", "/runs/a b/program.py"]
    assert tasks == [{"type": "worker", "index": index} for index in range(4)]


def test_an_address_that_nobody_gave_is_a_place_to_fill_in():
    lines = commands(DIRECTORY, {**TENSORFLOW, "devices": 1})
    assert f"{own_address()}:29500" in lines[0]
    assert "ADDRESS-OF-MACHINE-2:29500" in lines[0]
    assert len(commands(DIRECTORY, {**PYTORCH, "nodes": 3})) == 3


@pytest.mark.parametrize("address", ["<b>", "a b", "x;y", "$(x)"])
def test_what_is_no_address_gets_into_no_shell_line(address):
    with pytest.raises(anb.PlanError, match="no host name"):
        commands(DIRECTORY, PYTORCH, [address])


def test_one_machine_has_one_line():
    assert commands(DIRECTORY, {**PYTORCH, "nodes": 1}) == [
        "torchrun --standalone --nproc-per-node=4 '/runs/a b/program.py'"
    ]


def test_a_run_on_several_machines_waits_for_them_and_can_be_given_up(runs_folder):
    run = anb.train(framework="pytorch", accelerator="cpu", nodes=2, devices=1, wait=False, **SMALL)
    assert (run.status, run.machines, run.activity) == ("starting", 2, "waiting for 2 machines")
    assert len(run.commands(["10.0.0.1"])) == 2
    run.stop().wait(20)
    assert run.status == "stopped"
    assert anb.Run(run.directory).attach().status == "stopped"  # another kernel sees it too


# ---- two machines on one


def namespaces() -> str:
    """Why no two network namespaces can be made here; "" if they can."""
    if sys.platform != "linux" or os.getuid() != 0 or not shutil.which("ip"):
        return "two machines are played by network namespaces: that needs Linux, root and `ip`"
    made = subprocess.run(["ip", "netns", "add", "anb-probe"], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", "anb-probe"], capture_output=True, check=False)
    return "" if made.returncode == 0 else f"no network namespace can be made here: {made.stderr.strip()}"


WHY_NOT = namespaces()


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def two_machines():
    """Two network namespaces with a cable between them: 10.77.0.1 and 10.77.0.2, each without a way elsewhere."""
    names = [f"anb-{os.getpid()}-{number}" for number in (1, 2)]
    try:
        for name in names:
            ip("netns", "add", name)
        ip(
            "link",
            "add",
            "anbcable1",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            "anbcable2",
            "netns",
            names[1],
        )
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", f"anbcable{number}")
            ip("-n", name, "link", "set", f"anbcable{number}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@contextlib.contextmanager
def started(lines, names):
    """Each line in a shell of its machine; what is left of it ends with the block."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    shells = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, "sh", "-c", line],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )
        for name, line in zip(names, lines, strict=True)
    ]  # fmt: skip
    try:
        yield shells
    finally:
        for shell in shells:
            with contextlib.suppress(OSError):
                os.killpg(shell.pid, 9)
            shell.wait()
            shell.stdout.close()


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "they can be made")
@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_two_machines_train_one_model_and_the_curve_comes_back(framework, two_machines, runs_folder):
    alone = anb.train(framework=framework, accelerator="cpu", **SMALL)
    run = anb.train(framework=framework, accelerator="cpu", nodes=2, devices=1, wait=False, **SMALL)
    lines = run.commands(["10.77.0.1", "10.77.0.2"])
    with started(lines, two_machines) as shells:
        deadline = time.monotonic() + PATIENCE
        while not run.ended and time.monotonic() < deadline and all(shell.poll() in (None, 0) for shell in shells):
            time.sleep(0.1)
        if not run.ended:
            for shell in shells:
                with contextlib.suppress(OSError):
                    os.killpg(shell.pid, 9)
            pytest.fail("\n".join(shell.stdout.read()[-3000:] for shell in shells))
    run.wait(10)
    assert run.status == "done"
    assert run.started["replicas"] == 2
    assert run.history.loss == pytest.approx(alone.history.loss, abs=2e-5)
    assert run.history.last["val_loss"] == pytest.approx(alone.history.last["val_loss"], abs=2e-5)
    assert run.model() is not None
