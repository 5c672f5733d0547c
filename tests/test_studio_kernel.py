"""The panel in a real kernel, driven by the messages that a front end sends; and in a notebook that is saved."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from kernel_client import PATIENCE, Kernel
from nbclient import NotebookClient
from nbconvert import HTMLExporter
from nbformat.v4 import new_code_cell, new_notebook

FRAMEWORKS = ("torch", "tensorflow", "keras", "jax")
ROOM = 40 * 2**20  # bytes by which a kernel may grow in five runs: caches that fill up, not the data of runs


@pytest.fixture
def kernel(tmp_path: Path, runs_folder: Path) -> Iterator[Kernel]:
    made = Kernel(tmp_path)
    yield made
    made.close()


def test_both_frameworks_train_and_none_enters_the_kernel(kernel: Kernel, runs_folder: Path) -> None:
    """One panel: PyTorch, TensorFlow, then five runs in a row, which leave the kernel's memory flat."""
    kernel.run("import accel_nb as anb\nstudio = anb.Studio(epochs=1)\nstudio")
    kept = kernel.until(
        lambda: [name for name in kernel.displays if name.startswith("accel_nb-")], "the kept output"
    )
    assert "img" not in kernel.displays[kept[0]]["text/html"]
    train = kernel.button("Train")
    kernel.click(train)
    kernel.until(lambda: kernel.shows("done in"), "the end of the run with PyTorch")
    kernel.until(lambda: "image/png" in kernel.displays[kept[0]], "the picture that stays")
    assert len(list(runs_folder.glob("2*"))) == 1
    kernel.click(kernel.button("TensorFlow"))
    kernel.until(lambda: kernel.found("ButtonModel", tooltip="Framework TensorFlow, chosen"), "TensorFlow chosen")
    kernel.click(train)
    kernel.until(lambda: kernel.models[train]["description"] == "Training…", "the run with TensorFlow")
    kernel.run("studio.wait()")
    assert kernel.run("print(studio.run.settled['framework'], studio.run.status)") == "tensorflow done\n"
    assert len(list(runs_folder.glob("2*"))) == 2

    html = kernel.displays[kept[0]]["text/html"]
    css_class = re.search(r'class="(anb-kept-\w+)"', html)[1]
    assert "tensorflow-mlp-digits" in html
    assert kernel.shows(f".{css_class}{{display:none}}")
    assert sum(len(part) for part in kernel.displays[kept[0]].values()) < 150_000
    assert kernel.shows('tensorflow-mlp-digits.png" href="data:image/png;base64,')

    loaded = kernel.run(f"import sys\nprint([name for name in {FRAMEWORKS} if name in sys.modules])")
    assert loaded == "[]\n"
    grown = kernel.run(
        "import gc, psutil\n"
        "studio._desk.change(framework='pytorch')\n"
        "def room():\n"
        "    gc.collect()\n"
        "    return psutil.Process().memory_info().rss\n"
        "def again(seed):\n"
        "    studio._desk.change(seed=seed)\n"
        "    studio.train()\n"
        "    studio.wait()\n"
        "again(1)\n"
        "before = room()\n"
        "for seed in range(2, 7):\n"
        "    again(seed)\n"
        "print(room() - before)\n"
    )
    assert int(grown) < ROOM
    assert kernel.noise == []


def test_two_clicks_start_one_run_and_stop_ends_it(kernel: Kernel, runs_folder: Path) -> None:
    kernel.run("import accel_nb as anb\nstudio = anb.Studio(epochs=100_000)\nstudio")
    train = kernel.button("Train")
    kernel.click(train)
    kernel.click(train)
    kernel.until(lambda: kernel.shows("<circle"), "points")
    assert len(list(runs_folder.glob("2*"))) == 1
    assert kernel.models[train]["description"] == "Training…"
    kernel.write("lr", "-3")
    kernel.until(lambda: kernel.shows("A step must have a length."), "the refusal")
    kernel.write("lr", "0.01")
    kernel.until(lambda: kernel.shows("Learning rate 0.01 for"), "the new rate")
    kernel.click(kernel.button("Stop"))
    kernel.until(lambda: kernel.shows("stopped in"), "the end")
    kernel.until(lambda: kernel.models[train]["disabled"] is False, "ready for the next run")
    kernel.run("studio.wait()")
    assert kernel.noise == []


def test_two_processes_train_and_stop_together(kernel: Kernel) -> None:
    """A strategy chosen in the panel: two ranks start, are named, stop at the same step and leave nothing."""
    kernel.run("import accel_nb as anb\nstudio = anb.Studio(epochs=100_000)\nstudio")
    choose(kernel, "Strategy", "ddp")
    kernel.until(lambda: kernel.shows("batch 128 = 2 × 64 · 12 steps per epoch"), "how the batch is shared")
    kernel.click(kernel.button("Train"))
    kernel.until(lambda: kernel.shows("2 replicas (ddp, gloo)"), "who works on it")
    kernel.until(lambda: kernel.shows("<circle"), "points")
    (pids,) = kernel.run(
        "import psutil\nprint([child.pid for child in psutil.Process().children(recursive=True)])"
    ).splitlines()
    assert len(pids.split(",")) >= 3  # the one that started the ranks, and they
    kernel.click(kernel.button("Stop"))
    kernel.until(lambda: kernel.shows("stopped in"), "the end")
    kernel.run("studio.wait()")
    assert kernel.run("print(studio.run.directory.joinpath('model.pt').is_file())") == "True\n"
    left = kernel.run(
        f"import time\nend = time.monotonic() + 5\n"
        f"while (left := [pid for pid in {pids} if psutil.pid_exists(pid)]) and time.monotonic() < end:\n"
        "    time.sleep(0.1)\n"
        "print(left)"
    )
    assert left == "[]\n"
    loaded = kernel.run(f"import sys\nprint([name for name in {FRAMEWORKS} if name in sys.modules])")
    assert loaded == "[]\n"
    assert kernel.noise == []


def test_the_replicas_of_one_process_train(kernel: Kernel) -> None:
    kernel.run("import accel_nb as anb\nstudio = anb.Studio(framework='tensorflow', epochs=1)\nstudio")
    choose(kernel, "Strategy", "mirrored")
    kernel.write("parts per batch", "2")
    kernel.until(lambda: kernel.shows("batch 128 = 2 × 64 in 2 parts of 32"), "how the batch is shared")
    kernel.click(kernel.button("Train"))
    kernel.until(lambda: kernel.shows("2 replicas (mirrored"), "who works on it")
    kernel.run("studio.wait()")
    assert kernel.run("print(studio.run.status, studio.run.started['replicas'])") == "done 2\n"
    assert kernel.noise == []


def choose(kernel: Kernel, description: str, start: str) -> None:
    """Choose the entry of a dropdown that begins with `start`."""
    (dropdown,) = kernel.found("DropdownModel", description=description)
    labels = kernel.models[dropdown]["_options_labels"]
    index = next(i for i, text in enumerate(labels) if text.startswith(start))
    kernel._send(dropdown, {"method": "update", "state": {"index": index}, "buffer_paths": []})


def test_a_model_from_a_cell_trains(kernel: Kernel) -> None:
    kernel.run(
        "import accel_nb as anb, numpy as np\n"
        "def net(input_shape, outputs):\n"
        "    import torch\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(input_shape[0], outputs))\n"
        "x = np.random.default_rng(0).random((60, 4), dtype=np.float32)\n"
        "studio = anb.Studio(data=(x, np.arange(60) % 3), model=net, epochs=2)\n"
        "studio"
    )
    kernel.until(lambda: kernel.shows("48 train · 12 validation · 3 classes"), "the data")
    kernel.run("run = studio.train()\nstudio.wait()")
    assert kernel.run("print(run.status, len(run.history), run.parameters)") == "done 2 15\n"
    assert kernel.noise == []


def test_a_saved_notebook_shows_the_curve_without_a_kernel(tmp_path: Path, runs_folder: Path) -> None:
    cells = ["import accel_nb as anb\nstudio = anb.Studio(epochs=2)\nstudio", "studio.train()\nstudio.wait();"]
    notebook = new_notebook(cells=[new_code_cell(text) for text in cells])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # of the tools that run and convert it
        NotebookClient(notebook, timeout=PATIENCE, resources={"metadata": {"path": str(tmp_path)}}).execute()
        notebook.metadata.pop("widgets", None)  # the state of the widgets is not saved
        path = tmp_path / "saved.ipynb"
        nbformat.write(notebook, path)
        page, _ = HTMLExporter().from_filename(str(path))
    assert path.stat().st_size < 150_000
    picture = re.search(
        r'<div class="anb-kept-\w+"><img alt="([^"]+)"[^>]*src="data:image/png;base64,([^"]+)"', page
    )
    assert picture is not None
    assert "validation accuracy" in picture[1]
    assert len(picture[2]) > 5_000
    assert "pytorch-mlp-digits: done in" in page
    assert "display:none}" not in re.sub(r"<style.*?</style>", "", page, flags=re.DOTALL)
    assert "model not found" not in page.lower()
    plain = notebook.cells[0].outputs[-1].data
    assert set(plain) == {"text/html", "text/plain", "image/png"}
