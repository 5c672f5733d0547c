"""A run in a cell: what is sent while it trains, what stays in the saved notebook, and lines for a shell."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import threading

import nbformat
import pytest
from kernel_client import Kernel
from nbclient import NotebookClient
from nbconvert import HTMLExporter

import accel_nb as anb
from accel_nb.live import clock, status_line


def executed(cells, runs_folder):
    """A notebook of these cells, run in a real kernel."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    env = {**os.environ, "ACCEL_NB_RUNS": str(runs_folder)}
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute(env=env)
    return notebook


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("live")
    cells = [
        "import accel_nb as anb",
        "run = anb.train(epochs=3, name='<b>markup</b>')",
        "run.plot()",
        "anb.runs()[-1].show()",
        "anb.compare(data_args={'samples': 256}, epochs=2, ways={'a': {}, 'tf32': {'precision': 'tf32'}})",
    ]
    return executed(cells, folder)


def test_the_saved_cell_holds_the_final_curve_and_one_line(saved):
    (output,) = [o for o in saved.cells[1].outputs if o.output_type == "display_data"]
    assert set(output.data) == {"image/svg+xml", "image/png", "text/plain"}
    assert output.data["image/svg+xml"].startswith("<svg")
    assert "done" in output.data["text/plain"]
    assert output.data["text/plain"].count("\n") == 0
    assert len(json.dumps(saved)) < 300_000


def test_a_page_made_of_it_shows_the_curve_without_kernel_or_widget_state(saved):
    page, _ = HTMLExporter().from_notebook_node(saved)
    pictures = [
        base64.b64decode(text).decode() for text in re.findall(r'"data:image/svg\+xml;base64,([^"]+)"', page)
    ]
    assert len(pictures) == 2
    for picture in pictures:
        assert picture == saved.cells[1].outputs[0].data["image/svg+xml"]
        assert "<title>" in picture
        assert "<desc>" in picture
        assert '<path class="' in picture
    assert "model not found" not in page
    assert "<b>markup</b>" not in page


def test_plot_shows_a_picture_and_show_shows_the_run_again(saved):
    assert "image/png" in saved.cells[2].outputs[0].data
    (again,) = [o for o in saved.cells[3].outputs if o.output_type == "display_data"]
    assert again.data["image/svg+xml"] == saved.cells[1].outputs[0].data["image/svg+xml"]


def test_a_comparison_shows_bars_and_what_cannot_run(saved):
    data = saved.cells[4].outputs[-1].data
    assert "image/png" in data
    assert "tensor cores" in data["text/plain"]
    assert "× 1.00" in data["text/plain"]


def test_a_shell_gets_plain_lines(runs_folder):
    command = [sys.executable, "-m", "accel_nb", "train", "--epochs", "2", "--model-args", "{'layers': [16]}"]
    check = subprocess.run([*command, "--seed", "3"], capture_output=True, text=True, timeout=300, check=False)
    assert check.returncode == 0, check.stderr
    lines = check.stdout.splitlines()
    assert "mlp on digits" in lines[0]
    assert sum(line.startswith("epoch ") for line in lines) == 2
    assert lines[-1].startswith("kept in ")
    assert check.stderr == ""
    (run,) = anb.runs()
    assert run.settled["model_args"]["layers"] == [16]
    assert run.settled["seed"] == 3


def test_a_shell_is_told_what_cannot_be():
    command = [sys.executable, "-m", "accel_nb", "train"]
    refused = subprocess.run([*command, "--epochs", "0"], capture_output=True, text=True, timeout=100, check=False)
    assert refused.returncode == 2
    assert refused.stderr.startswith("epochs=0")
    assert "Traceback" not in refused.stderr
    listed = subprocess.run(
        [sys.executable, "-m", "accel_nb", "accelerators"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert listed.returncode == 0
    assert "PyTorch" in listed.stdout
    assert "TensorFlow" in listed.stdout


def test_the_status_line_of_a_finished_run(runs_folder):
    run = anb.train(epochs=1, model_args={"layers": [8]})
    line = status_line(run)
    assert line.startswith("done in 0:")
    assert "validation loss" in line


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (4.4, "0:04"), (59.6, "1:00"), (3725, "1:02:05")])
def test_seconds_as_a_clock(seconds, text):
    assert clock(seconds) == text


def test_interrupting_the_waiting_cell_stops_the_run_and_keeps_what_it_has(tmp_path, runs_folder):
    """The kernel is interrupted as JupyterLab's stop button does it; the worker must not hear of it."""
    kernel = Kernel(tmp_path)
    try:
        kernel.run("import accel_nb as anb, time; run = anb.train(epochs=100000, wait=False)")
        kernel.run("while len(run.history) < 4: time.sleep(0.05)")
        pressed = threading.Timer(1.0, kernel.manager.interrupt_kernel)
        pressed.start()
        kernel.run("run.wait()")
        told = kernel.run("print(run.status, len(run.history) >= 4, (run.directory / 'model.pt').is_file())")
        assert told == "stopped True True\n"
        assert kernel.run("print(anb.train(epochs=1, model_args={'layers': [8]}).status)") == "done\n"
    finally:
        kernel.close()


def test_plain_lines_in_a_notebook_where_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCEL_NB_PLAIN", "1")
    code = "import accel_nb as anb\nrun = anb.train(epochs=1, model_args={'layers': [8]})"
    (cell,) = executed([code], tmp_path).cells
    assert {output.output_type for output in cell.outputs} == {"stream"}
    assert "epoch 1/1" in "".join(output.text for output in cell.outputs)
