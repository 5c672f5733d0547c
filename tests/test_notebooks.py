"""The notebooks' form, and that nbval really compares them. `make nbval` runs them whole."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import nbformat
import notebook_files as nf
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

ALL = nf.notebooks()
COLAB = "https://colab.research.google.com/github/"
NAMES = [path.stem for path in ALL]


def small() -> nbformat.NotebookNode:
    """A notebook in form: a set-up cell, one whose text is compared, a live one."""
    cells = [
        new_markdown_cell("# A title", id="title"),
        new_code_cell(nf.setup(), execution_count=1, id="setup"),
        new_code_cell(
            "print('two')\n1 + 1",
            execution_count=2,
            id="compared",
            outputs=[
                new_output("stream", name="stdout", text="two\n"),
                new_output("execute_result", {"text/plain": "2"}, execution_count=2),
            ],
        ),
        new_code_cell(
            "import time\ntime.time()", execution_count=3, id="live", metadata={"tags": ["nbval-ignore-output"]}
        ),
    ]
    return new_notebook(cells=cells, metadata=nbformat.from_dict(nf.METADATA))


def written(notebook: nbformat.NotebookNode, folder: Path) -> Path:
    path = folder / "small.ipynb"
    path.write_text(nbformat.writes(notebook), encoding="utf-8")
    return path


def test_there_are_notebooks():
    assert "01_start" in NAMES


@pytest.mark.parametrize("path", ALL, ids=NAMES)
def test_is_in_form(path):
    assert nf.lint(path) == []


@pytest.mark.parametrize("path", ALL, ids=NAMES)
def test_is_stored_as_refresh_stores_it(path, tmp_path):
    again = tmp_path / path.name
    nf.write(again, nf.read(path))
    assert again.read_bytes() == path.read_bytes(), "run: make notebooks"


def test_lint_finds_nothing_in_a_notebook_in_form(tmp_path):
    assert nf.lint(written(small(), tmp_path)) == []


def _output(**data):
    return [new_output("display_data", data)]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda n: n.metadata.update(widgets={"state": {}}), "metadata widgets"),
        (lambda n: n.metadata.update(colab={"provenance": [{"file_id": "1"}]}), "metadata colab"),
        (lambda n: n.metadata.update(accelerator="T4"), "metadata accelerator"),
        (lambda n: n.metadata.update(accelerator="GPU"), "colab.gpuType must be T4 where accelerator is GPU"),
        (lambda n: n.metadata.update(colab={"gpuType": "T4"}), "must be None where accelerator is None, not T4"),
        (
            lambda n: n.metadata.update(accelerator="TPU", colab={"gpuType": "T4"}),
            "must be V5E1 where accelerator is TPU",
        ),
        (lambda n: n.metadata.update(colab={"collapsed_sections": []}), "metadata colab"),
        (lambda n: n.metadata.update(colab={"name": "a.ipynb"}), "metadata colab"),
        (lambda n: n.metadata.update(machine_shape="hm"), "metadata machine_shape"),
        (lambda n: n.cells[0].update(attachments={"a.png": {"image/png": "AA=="}}), "a picture is stored in it"),
        (lambda n: n.metadata.kernelspec.update(name="own"), "metadata kernelspec must be"),
        (lambda n: n.metadata.language_info.update(version="3.11.7"), "metadata language_info must be"),
        (lambda n: n.cells[2].metadata.update(collapsed=True), "cell 2: metadata collapsed"),
        (lambda n: n.cells[2].metadata.update(tags=["nbval-skip"]), "tag nbval-skip"),
        (lambda n: n.cells.pop(1), "the first code cell is not the set-up cell"),
        (lambda n: n.cells[1].update(source="%pip install torch"), "the first code cell is not the set-up cell"),
        (lambda n: n.cells[2].update(outputs=[]), "no cell has a stored output"),
        (lambda n: n.cells[2].update(execution_count=None), "code cell 2: execution count None"),
        (lambda n: n.cells[2].update(source="x = 1\n" * 16), "16 lines; 15 at most"),
        (lambda n: n.cells[3].update(source=""), "it is empty"),
        (lambda n: n.cells[2].update(source="# NBVAL_IGNORE_OUTPUT\n1"), "use the tag"),
        (lambda n: n.cells[0].update(source="see /home/me/notes"), "an absolute path: /home/"),
        (lambda n: n.cells[2].update(source="open('C:\\\\x')"), "an absolute path: C:"),
        (lambda n: n.cells[3].update(outputs=_output(**{"text/plain": "1"})), "stored without outputs"),
        (lambda n: n.cells[2].update(outputs=_output(**{"image/png": "AA=="})), "image/png cannot be compared"),
        (
            lambda n: n.cells[2].update(outputs=_output(**{"application/vnd.jupyter.widget-view+json": {}})),
            "widget-view",
        ),
        (lambda n: n.cells[2].update(outputs=_output(**{"text/plain": "a" * 5000})), "5000 characters of output"),
        (
            lambda n: n.cells[2].update(outputs=_output(**{"text/plain": "<Figure at 0x7f12345678>"})),
            "that changes",
        ),
        (lambda n: n.cells[2].update(outputs=_output(**{"text/plain": "in /tmp/x"})), "an absolute path"),
        (lambda n: n.cells[2].update(outputs=[new_output("stream", name="stderr", text="W")]), "text on stderr"),
        (lambda n: n.cells[2].update(outputs=[new_output("error", ename="E", evalue="no")]), "it failed: E: no"),
        (lambda n: n.cells[3].update(source="anb.train(wait=False)"), "a failure would stay unseen"),
        (lambda n: n.cells[3].update(source="button.click()"), "a failure would stay unseen"),
        (lambda n: n.cells[3].update(source="panel.train()"), "a failure would stay unseen"),
        (lambda n: n.cells[0].update(source=f"[Colab]({COLAB}me/mine/blob/main/a.ipynb)"), "its link to Colab"),
    ],
)
def test_lint_finds(change, told, tmp_path):
    notebook = small()
    change(notebook)
    assert told in "\n".join(nf.lint(written(notebook, tmp_path)))


@pytest.mark.parametrize(
    ("name", "metadata", "told"),
    [
        ("02_gpu", {"accelerator": "GPU", "colab": {"gpuType": "T4", "provenance": []}}, ""),
        ("04_tpu", {"accelerator": "TPU", "colab": {"gpuType": "V5E1", "provenance": []}}, ""),
        ("02_gpu", {}, "accelerator must be GPU"),
        ("04_tpu", {"accelerator": "GPU", "colab": {"gpuType": "T4"}}, "accelerator must be TPU"),
        ("02_gpu", {"accelerator": "GPU", "colab": {"gpuType": "A100"}}, "gpuType must be T4"),
        ("05_gpus", {}, ""),
    ],
)
def test_a_notebook_named_for_an_accelerator_asks_colab_for_it(name, metadata, told, tmp_path):
    notebook = small()
    notebook.metadata.update(metadata)
    path = tmp_path / f"{name}.ipynb"
    path.write_text(nbformat.writes(notebook), encoding="utf-8")
    found = "\n".join(nf.lint(path))
    assert (told in found) if told else (found == "")


def test_stamp_writes_the_address_of_pyproject_and_nothing_else(tmp_path, capsys):
    notebook = small()
    notebook.cells[0].source = f"[one]({COLAB}me/mine/blob/main/a.ipynb) and [two](02.ipynb)"
    notebook.cells[1].source = nf.setup().replace("git+", "git+old")
    path = written(notebook, tmp_path)
    assert nf.main(["stamp", str(path)]) == 0
    assert nf.lint(path) == []
    assert nf.repository() in capsys.readouterr().out
    stamped = nf.read(path)
    assert (
        f"{nf.repository().removeprefix('https://github.com/')}/blob/main/notebooks/small"
        in stamped.cells[0].source
    )
    for cell, before in zip(stamped.cells[2:], notebook.cells[2:], strict=True):
        assert cell == before


def test_the_set_up_cell_touches_nothing_but_the_package():
    """One line of it installs, without what the package requires: Colab has that, and it must stay as it is."""
    (line,) = [line.split() for line in nf.setup().splitlines() if "pip" in line and not line.startswith("#")]
    assert line == ["%pip", "install", "--quiet", "--no-deps", f"git+{nf.repository()}"]
    for path in ALL:
        for cell in nf.code_cells(nf.read(path))[1:]:
            assert not re.search(r"pip install|%pip|!pip|load_ext|= *!", cell.source), path.name


def test_lint_accepts_a_run_that_is_waited_for_and_an_error_that_is_meant(tmp_path):
    notebook = small()
    notebook.cells[3].source = "run = anb.train(wait=False)\nrun.wait()"
    notebook.cells[2].metadata = nbformat.from_dict({"tags": ["raises-exception"]})
    notebook.cells[2].outputs.append(new_output("error", ename="E", evalue="no"))
    assert nf.lint(written(notebook, tmp_path)) == []


def test_lint_tells_what_is_no_notebook(tmp_path):
    path = tmp_path / "broken.ipynb"
    path.write_text("{")
    assert nf.lint(path)[0].startswith("no valid notebook")


def test_refresh_brings_a_notebook_into_form_and_stores_the_same_bytes_twice(tmp_path):
    notebook = small()
    notebook.metadata.update(widgets={"state": {}}, colab={"provenance": [{"id": 1}], "gpuType": "T4"})
    notebook.metadata.accelerator = "GPU"
    notebook.cells[0].source = f"[one]({COLAB}me/mine/blob/main/a.ipynb) and [two](02.ipynb)"
    notebook.cells[1].source = nf.setup().replace("git+", "git+old")
    notebook.cells[2].update(
        source="import os\nfor _ in range(3):\n    print('again', flush=True)\nos.environ['ACCEL_NB_QUICK']",
        outputs=[],
        execution_count=None,
    )
    notebook.cells[3].metadata.update(collapsed=True)
    path = written(notebook, tmp_path)
    nf.refresh(path)
    first = path.read_bytes()
    assert nf.lint(path) == []
    made = nf.read(path)
    assert made.metadata.colab == {"provenance": [], "gpuType": "T4"}
    assert [nf.texts(output) for output in made.cells[2].outputs] == [["again\n" * 3], ["'1'"]]
    assert made.cells[3].outputs == []
    place = nf.repository().removeprefix("https://github.com/")
    assert made.cells[0].source == f"[one]({COLAB}{place}/blob/main/notebooks/small.ipynb) and [two](02.ipynb)"
    nf.refresh(path)
    assert path.read_bytes() == first


def test_refresh_stores_nothing_if_a_cell_fails(tmp_path):
    notebook = small()
    notebook.cells[3].source = "1 / 0"
    path = written(notebook, tmp_path)
    before = path.read_bytes()
    with pytest.raises(Exception, match="ZeroDivisionError"):
        nf.refresh(path)
    assert path.read_bytes() == before


def nbval(path: Path) -> tuple[str, dict[int, str]]:
    """What nbval says, and its verdict on each code cell."""
    done = nf.check([path], ["-v", "--color=no", f"--rootdir={path.parent}"], capture_output=True)
    verdicts = re.findall(r"::Cell (\d+) ([A-Z]+)", done.stdout)
    assert done.returncode == any(verdict != "PASSED" for _, verdict in verdicts), done.stdout
    return done.stdout + done.stderr, {int(number): verdict for number, verdict in verdicts}


RUN = "{} done in {}, {} s, loss {}\n"


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    """A notebook with cells that print what is stored and cells that do not, as nbval judges them."""
    notebook = small()
    stored = notebook.cells[2]
    sources = {
        "the same": stored.source,
        "another text": "print('three')\n1 + 1",
        "another value": "print('two')\n1 + 2",
        "no text": "1 + 1",
        "no value": "print('two')",
        "an error": "print('two')\n1 / 0",
        "a warning more": "import sys\nsys.stderr.write('W\\n'); print('two')\n1 + 1",
    }
    for place, source in enumerate(sources.values()):
        cell = copy.deepcopy(stored)
        cell.update(source=source, id=f"c{place}")
        notebook.cells.append(cell)
    runs = {
        "other times": RUN.format("20271112-131415-mlp-2", "1:10", 31.25, 0.25),
        "another loss": RUN.format("20271112-131415-mlp-2", "1:10", 31.25, 0.26),
    }
    for place, text in enumerate(runs.values()):
        cell = new_code_cell(f"print({text[:-1]!r})", execution_count=1, id=f"r{place}")
        cell.outputs = [
            new_output("stream", name="stdout", text=RUN.format("20260102-030405-mlp", "0:04", 2.5, 0.25))
        ]
        notebook.cells.append(cell)
    told, found = nbval(written(notebook, tmp_path_factory.mktemp("verdicts")))
    assert len(found) == 3 + len(sources) + len(runs), told
    names = ["set-up", "in form", "live", *sources, *runs]
    return dict(zip(names, found.values(), strict=True))


@pytest.mark.parametrize("name", ["set-up", "in form", "live", "the same", "other times"])
def test_nbval_passes(name, verdicts):
    assert verdicts[name] == "PASSED"


@pytest.mark.parametrize(
    "name",
    ["another text", "another value", "no text", "no value", "an error", "a warning more", "another loss"],
)
def test_nbval_fails(name, verdicts):
    assert verdicts[name] == "FAILED"


def test_nbval_sees_a_changed_output_of_a_real_notebook(tmp_path):
    """01 up to its first stored output, with that output changed. Unchanged, `make nbval` passes it."""
    notebook = nf.read(nf.NOTEBOOKS / "01_start.ipynb")
    place = next(i for i, cell in enumerate(notebook.cells) if cell.get("outputs"))
    notebook.cells = notebook.cells[: place + 1]
    output = notebook.cells[place].outputs[0]
    if output.output_type == "stream":
        output.text += "x"
    else:
        output.data[next(iter(output.data))] += "x"
    told, found = nbval(written(notebook, tmp_path))
    *before, changed = found.values()
    assert set(before) == {"PASSED"}, told
    assert changed == "FAILED", told
    assert "Cell outputs differ" in told
