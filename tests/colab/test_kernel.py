"""The panel in a kernel of Colab's versions with TensorFlow alone: what Python 3.12 and 3.13 can run here, too."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import nbformat
import pytest
from kernel_client import PATIENCE, Kernel
from nbclient import NotebookClient

# A stand-in for Colab's package, put in before the first cell, as the real one is
COLAB = """
import pathlib, sys, types

package = types.ModuleType("google.colab")
asked = package.asked = []

def blocking_request(kind, request="", timeout_sec=None):
    asked.append((kind, timeout_sec))
    return {"ipynb": {"metadata": {"accelerator": "GPU", "colab": {"gpuType": "T4"}}}}

def mount(mountpoint, timeout_ms):
    asked.append((mountpoint, timeout_ms))
    (pathlib.Path(mountpoint) / "MyDrive").mkdir(parents=True)

package._message = types.SimpleNamespace(blocking_request=blocking_request)
package.drive = types.SimpleNamespace(mount=mount)
sys.modules["google.colab"] = package
"""


@pytest.fixture
def kernel(tmp_path: Path, runs_folder: Path) -> Iterator[Kernel]:
    made = Kernel(tmp_path)
    yield made
    made.close()


def test_this_is_what_colab_has() -> None:
    have = {name: metadata.version(name) for name in ("ipywidgets", "ipykernel", "ipython", "tensorflow", "keras")}
    colab = {"ipywidgets": "7.7.1", "ipykernel": "6.17.1", "ipython": "7.34.0", "tensorflow": "2.20.0"}
    assert have == {**colab, "keras": "3.13.2"}


def test_buttons_work_while_the_kernel_is_free(kernel: Kernel) -> None:
    kernel.run("import accel_nb as anb\nstudio = anb.Studio(framework='tensorflow', epochs=100_000)\nstudio")
    kernel.click(kernel.button("Train"))
    kernel.until(lambda: kernel.shows("<circle"), "points")
    pause = kernel.button("Pause")
    kernel.click(pause)
    kernel.until(lambda: kernel.shows("paused"), "the pause")
    kernel.click(pause)
    kernel.until(lambda: "Pause" in kernel.models[pause]["description"], "the end of the pause")
    kernel.write("lr", "0.01")
    kernel.until(lambda: kernel.shows("Learning rate 0.01 for"), "the new rate")
    kernel.click(kernel.button("Stop"))
    kernel.until(lambda: kernel.shows("stopped in"), "the end")
    assert kernel.run("print(studio.wait().status)") == "stopped\n"
    assert kernel.noise == []


def test_a_waiting_cell_is_ended_by_an_interrupt(kernel: Kernel) -> None:
    """In Colab's kernel no button works while a cell runs, not even while it awaits: there the interrupt stops."""
    kernel.run("import accel_nb as anb\nstudio = anb.Studio(framework='tensorflow', epochs=100_000)\nstudio")
    kernel.run("run = studio.train()")
    kernel.until(lambda: kernel.shows("<circle"), "points")
    sent = kernel.client.execute("print('waiting')\nstudio.wait()", store_history=False)
    kernel.click(kernel.button("Pause"))  # which is handled when the cell has ended
    idle = False
    end = time.monotonic() + PATIENCE
    while not idle:
        assert time.monotonic() < end
        message = kernel._next(0.2)
        if message is None or message["parent_header"].get("msg_id") != sent:
            continue
        if message["msg_type"] == "stream":  # the cell's own code has begun
            kernel.manager.interrupt_kernel()
        idle = message["content"].get("execution_state") == "idle"
    assert kernel.run("print(run.status, run.directory.joinpath('model.keras').is_file())") == "stopped True\n"
    assert kernel.noise == []


def execute(cells: list[str], folder: Path, **env: str) -> nbformat.NotebookNode:
    """A notebook of these cells, run and saved as Colab saves one: with the widgets' state."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    profile = folder / "ipython" / "profile_default" / "startup"
    profile.mkdir(parents=True)
    (profile / "00-colab.py").write_text(COLAB)
    surroundings = {**os.environ, "ACCEL_NB_RUNS": str(folder / "runs"), **env}
    surroundings["IPYTHONDIR"] = str(folder / "ipython")
    client = NotebookClient(notebook, timeout=PATIENCE, kernel_name="python3", store_widget_state=True)
    client.execute(env=surroundings)
    return notebook


def test_a_notebook_in_colab_tells_what_was_got_and_stays_small(tmp_path: Path) -> None:
    cells = [
        "import sys\nimport accel_nb as anb\nfrom accel_nb import colab",
        "print(anb.accelerators())",
        "studio = anb.Studio(framework='tensorflow', epochs=3)\nstudio",
        "studio.train()\nrun = studio.wait()",
        f"import pathlib\ncolab.MOUNT = pathlib.Path({str(tmp_path / 'drive')!r})\ncopies = colab.keep_on_drive()",
        "print(copies.wait(60).copied == [run.name], len(anb.runs(colab.drive_folder())))",
        "print(sys.modules['google.colab'].asked)",
        "import sys\nprint([name for name in ('torch', 'tensorflow', 'keras', 'jax') if name in sys.modules])",
    ]
    notebook = execute(cells, tmp_path)
    told = notebook.cells[1].outputs[0].text
    assert "Colab CPU, not the T4 GPU that the notebook asks for. To get it: Runtime" in told
    assert "This Colab runtime has no GPU." in told
    assert notebook.cells[5].outputs[0].text == "True 1\n"
    assert notebook.cells[6].outputs[0].text == f"[('get_ipynb', 3.0), ({str(tmp_path / 'drive')!r}, 120000)]\n"
    assert notebook.cells[7].outputs[0].text == "[]\n"
    assert any("not the T4 GPU" in json.dumps(state) for state in notebook.metadata.widgets.values())
    # a run's picture, twice; and the panel itself, of which Colab keeps the state of each widget
    assert len(json.dumps(notebook.cells)) < 60_000
    assert len(json.dumps(notebook.metadata.widgets)) < 300_000
