"""Code in a run's directory runs as this user: pickles and programs that others could have written are refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import accel_nb as anb
from accel_nb.trust import check_ours

pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="Windows has no such permissions")
PACKAGE = Path(anb.__file__).parent
PLANTED = b"cos\nsystem\n(S'touch PLANTED'\ntR."  # a pickle that runs a command when it is read


@pytest.fixture
def run(runs_folder):
    """A complete run of a model that travels as a pickle."""
    size = 3

    def own(outputs):
        import torch

        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, size), torch.nn.Linear(size, outputs))

    made = anb.train(model=own, epochs=1, accelerator="cpu")
    assert (made.directory / "model.pkl").is_file()
    return made


def refused(run, match):
    for call in (run.model, lambda: run.resume(epochs=9)):
        with pytest.raises(anb.AccelNbError, match=match) as told:
            call()
        assert "run here as you" in str(told.value)
        assert re.search(r"chmod -R go-w|cp -r", str(told.value))
    assert run.status == "done"


def test_what_others_could_have_written_is_not_run(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pickled = run.directory / "model.pkl"
    good = pickled.read_bytes()
    pickled.write_bytes(PLANTED.replace(b"PLANTED", str(tmp_path / "PLANTED").encode()))
    for path in (pickled, run.directory / "program.py", run.directory):
        for more in (0o020, 0o002):
            mode = path.stat().st_mode
            path.chmod(mode | more)
            refused(run, "can be written by other users")
            path.chmod(mode)
    if os.getuid() == 0:
        for path in (pickled, run.directory):
            os.chown(path, 54321, -1)
            refused(run, "belongs to the user 54321")
            os.chown(path, 0, -1)
    assert not (tmp_path / "PLANTED").exists()
    pickled.write_bytes(good)
    assert run.model() is not None


def test_a_run_is_closed_to_others_whatever_the_umask(runs_folder):
    code = """
        import os
        os.umask(0)
        import accel_nb as anb
        size = 3
        def outer():
            def own(outputs):
                import torch
                return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, size * outputs // outputs))
            return own
        run = anb.train(model=lambda: __import__("torch").nn.Sequential(
            __import__("torch").nn.Flatten(), __import__("torch").nn.Linear(784, 10)), epochs=1, accelerator="cpu")
        run.resume(epochs=2).wait()
        run.model()
        print(run.status)
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[-1] == "done"
    (run,) = anb.runs()
    assert (run.directory / "model.pkl").is_file()
    check_ours(run.directory)


def test_a_disk_without_permissions_is_taken_as_it_is(tmp_path, monkeypatch):
    tmp_path.chmod(0o777)
    with pytest.raises(anb.AccelNbError, match="can be written by other users"):
        check_ours(tmp_path)
    monkeypatch.setattr("accel_nb.trust.stat.S_IMODE", lambda mode: 0o777)
    check_ours(tmp_path)


def test_nothing_else_is_unpickled():
    """The one place is the program of a run with a model that travelled as a pickle."""
    pattern = re.compile(r"(?<!\w)(?:pickle|cloudpickle|joblib|dill)\.loads?\(|allow_pickle=True|safe_mode=False")
    found = {}
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for line in text.splitlines():
            if pattern.search(line) or ("torch.load(" in line and "weights_only=True" not in line):
                found.setdefault(path.name, []).append(line.strip())
    assert found == {"own_model.py": ["return pickle.load(file){call}"]}
