"""The notebooks as files: their form, their stored outputs, their run through nbval.

    python tests/notebook_files.py lint    [PATH ...]   # is each as it should be committed?
    python tests/notebook_files.py stamp   [PATH ...]   # write the project's address into each
    python tests/notebook_files.py refresh [PATH ...]   # run each, store the outputs that are compared
    python tests/notebook_files.py check   [PATH ...] [--PYTEST-OPTION=VALUE ...]   # run each, compare (nbval)
    python tests/notebook_files.py check   [PATH ...] --times=20   # so often in a row: which fail now and then

Without paths: all of notebooks/. `check` compares what a code cell prints with its stored outputs, unless it has
the tag `nbval-ignore-output`: such a cell is live (a panel, a curve, a time) and stored without outputs. nbval
compares only cells with an execution count, so `refresh` gives each one.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
NOTEBOOKS = ROOT / "notebooks"

LINES = 15  # of a code cell at most
STORED = 4000  # characters of a cell's stored outputs at most
CELL_SECONDS = 300  # a cell that takes longer, in quick mode on two cores, hangs
LIVE, RAISES = "nbval-ignore-output", "raises-exception"
METADATA: dict[str, Any] = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
RUNTIMES = {"GPU": "T4", "TPU": "V5E1"}  # `accelerator` and `colab.gpuType`: what Colab opens; without them a CPU
TEXT = {"text/plain", "text/html", "text/markdown"}  # what can be compared, and read in a diff
PATH = re.compile(r"(?<![\w.~/:<])/(?:home|root|Users|work|tmp|usr|opt|mnt|srv|var|content)/|\b[A-Z]:\\")
CHANGES = re.compile(r"0x[0-9a-f]{6,}|<[\w.]+ (?:object )?at ")


def repository() -> str:
    """The address of the project, from pyproject.toml: the one place where it is set."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return re.search(r'^Repository = "(.+)"$', text, re.MULTILINE)[1]  # type: ignore[index] - a test wants it there


def setup() -> str:
    """The first code cell of every notebook."""
    return (
        "# On Google Colab: install accel_nb alone, in seconds. Elsewhere: nothing to do.\n"
        "import sys\n"
        "\n"
        'if "google.colab" in sys.modules:\n'
        f"    %pip install --quiet --no-deps git+{repository()}"
    )


def stamp(path: Path, notebook: Any) -> None:
    """Put the project's address where a notebook needs it: in the set-up cell and in the links to Colab."""
    place = repository().removeprefix("https://github.com/")
    cells = code_cells(notebook)
    if cells and "google.colab" in cells[0].source:
        cells[0].source = setup()
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            here = f"\\g<1>{place}/blob/main/notebooks/{path.name}"
            cell.source = re.sub(r"(colab\.research\.google\.com/github/)[^\s)]+", here, cell.source)


def notebooks() -> list[Path]:
    return sorted(NOTEBOOKS.glob("*.ipynb"))


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def write(path: Path, notebook: Any) -> None:
    """The same bytes for the same notebook."""
    nbformat.validate(notebook)
    path.write_text(nbformat.writes(notebook).rstrip("\n") + "\n", encoding="utf-8")


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def tags(cell: Any) -> list[str]:
    return list(cell.metadata.get("tags", []))


def compared(cell: Any) -> bool:
    return LIVE not in tags(cell)


def lint(path: Path) -> list[str]:
    """What is wrong with a notebook as a committed file; empty if nothing is."""
    try:
        notebook = read(path)
        nbformat.validate(notebook)
    except Exception as error:
        return [f"no valid notebook: {error}"]
    found = [*_metadata(notebook.metadata), *_runtime(path, notebook.metadata)]
    cells = code_cells(notebook)
    if not cells or cells[0].source != setup():
        found.append(f"the first code cell is not the set-up cell (`stamp` mends it):\n{setup()}")
    if not any(compared(cell) and cell.outputs for cell in cells):
        found.append("no cell has a stored output that is compared")
    stamped = copy.deepcopy(notebook)
    stamp(path, stamped)
    for number, (cell, right) in enumerate(zip(notebook.cells, stamped.cells, strict=True)):
        found += [f"cell {number}: {text}" for text in _cell(cell)]
        if cell.cell_type == "markdown" and cell.source != right.source:
            found.append(f"cell {number}: its link to Colab does not lead to this notebook (`stamp` mends it)")
    for number, cell in enumerate(cells, 1):
        count = cell.execution_count
        if count != number:
            found.append(
                f"code cell {number}: execution count {count}; nbval compares nothing without one (refresh)"
            )
    found += _failures_are_seen(cells)
    return found


def _metadata(metadata: Any) -> Iterator[str]:
    for key, value in metadata.items():
        if key in METADATA:
            continue
        if key == "accelerator" and value in RUNTIMES:
            continue
        if key == "colab" and set(value) <= {"gpuType", "provenance"} and not value.get("provenance"):
            continue
        yield f"metadata {key}: {str(value)[:60]} is not wanted"
    for key, value in METADATA.items():
        if metadata.get(key) != value:
            yield f"metadata {key} must be {value}"


def _runtime(path: Path, metadata: Any) -> Iterator[str]:
    """A notebook named for an accelerator opens a runtime that has it, and each that asks for one says which."""
    asked, exact = metadata.get("accelerator"), dict(metadata.get("colab") or {}).get("gpuType")
    wanted = next((kind for kind in RUNTIMES if kind.lower() in path.stem.split("_")), asked)
    if asked != wanted:
        yield f"metadata accelerator must be {wanted}, as the name of the notebook says"
    if exact != RUNTIMES.get(wanted):
        yield f"metadata colab.gpuType must be {RUNTIMES.get(wanted)} where accelerator is {wanted}, not {exact}"


def _cell(cell: Any) -> Iterator[str]:
    if cell.get("attachments"):
        yield "a picture is stored in it; link to one in docs/ instead"
    strange = set(cell.metadata) - {"tags"}
    if strange:
        yield f"metadata {', '.join(sorted(strange))} is not wanted"
    if PATH.search(cell.source):
        yield f"an absolute path: {PATH.search(cell.source)[0]}"  # type: ignore[index] - just matched
    if cell.cell_type != "code":
        return
    if not cell.source.strip():
        yield "it is empty"
    if len(cell.source.splitlines()) > LINES:
        yield f"{len(cell.source.splitlines())} lines; {LINES} at most"
    unknown = set(tags(cell)) - {LIVE, RAISES}
    if unknown:
        yield f"tag {', '.join(sorted(unknown))}; known are {LIVE} and {RAISES}"
    if re.search(r"^\s*#\s*NBVAL_", cell.source, re.MULTILINE):
        yield f"a learner reads the comment for nbval; use the tag {LIVE}"
    if not compared(cell):
        if cell.outputs:
            yield "a live cell is stored without outputs (refresh)"
        return
    for output in cell.outputs:
        yield from _output(output, RAISES in tags(cell))
    size = sum(len(text) for output in cell.outputs for text in texts(output))
    if size > STORED:
        yield f"{size} characters of output; {STORED} at most, or tag it {LIVE}"


def texts(output: Any) -> list[str]:
    """The texts of an output."""
    if output.output_type == "stream":
        return [output.text]
    return [value for value in output.get("data", {}).values() if isinstance(value, str)]


def _output(output: Any, may_raise: bool) -> Iterator[str]:
    if output.output_type == "error":
        if not may_raise:
            yield f"it failed: {output.ename}: {output.evalue}"
        return
    if output.output_type == "stream" and output.name != "stdout":
        yield f"text on {output.name}: {output.text[:80]!r}"
    strange = set(output.get("data", {})) - TEXT
    if strange:
        yield f"output of type {', '.join(sorted(strange))} cannot be compared: tag the cell {LIVE}"
    for text in texts(output):
        for pattern, what in ((PATH, "an absolute path"), (CHANGES, "an address that changes")):
            if match := pattern.search(text):
                yield f"{what} in the output: {match[0]}"


def _failures_are_seen(cells: list[Any]) -> Iterator[str]:
    """A run that nobody waits for, or a click, can fail without a sign: a later `wait()` raises if it did."""
    last = max((i for i, cell in enumerate(cells) if re.search(r"\bwait\(", cell.source)), default=-1)
    for number, cell in enumerate(cells):
        if re.search(r"wait=False|\.click\(|(?<!anb)\.train\(", cell.source) and number > last:
            yield f"code cell {number + 1} starts what no later cell waits for: a failure would stay unseen"


@contextlib.contextmanager
def surroundings() -> Iterator[dict[str, str]]:
    """The environment in which notebooks are run: quick, with runs and caches that are thrown away after."""
    with tempfile.TemporaryDirectory(prefix="notebooks-", ignore_cleanup_errors=True) as folder:
        foreign = ("PYTEST_", "MAKE", "MFLAGS")  # of the process that started this one
        env = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
        env["ACCEL_NB_QUICK"] = "1"
        env["ACCEL_NB_RUNS"] = str(Path(folder, "runs"))
        env.setdefault("ACCEL_NB_CACHE", str(Path(folder, "cache")))
        for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):  # a person's own settings stay out
            env[name] = str(Path(folder, name.lower()))
        yield env


def tidy(notebook: Any) -> None:
    """Bring a notebook that has been run into the form it is stored in."""
    metadata = {key: notebook.metadata[key] for key in ("accelerator", "colab") if key in notebook.metadata}
    if "colab" in metadata:
        kept = {key: value for key, value in metadata["colab"].items() if key == "gpuType"}
        metadata["colab"] = {"provenance": [], **kept}
    notebook.metadata = nbformat.from_dict({**metadata, **METADATA})
    for number, cell in enumerate(code_cells(notebook), 1):
        cell.execution_count = number
        if not compared(cell):
            cell.outputs = []
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = number
            if output.output_type == "error":
                output.traceback = []  # holds paths; nbval does not compare it
    for cell in notebook.cells:
        kept_tags = tags(cell)
        cell.metadata = nbformat.from_dict({"tags": kept_tags} if kept_tags else {})


def refresh(path: Path) -> None:
    """Run a notebook and store it with the outputs that are compared. CellExecutionError if a cell fails."""
    from nbclient import NotebookClient

    notebook = read(path)
    stamp(path, notebook)
    with surroundings() as env:
        client = NotebookClient(
            notebook,
            timeout=CELL_SECONDS,
            kernel_name="python3",
            resources={"metadata": {"path": str(path.parent)}},
            record_timing=False,
            store_widget_state=False,
            coalesce_streams=True,
        )
        client.execute(env=env)
    tidy(notebook)
    write(path, notebook)


def check(paths: list[Path], options: list[str], **how: Any) -> subprocess.CompletedProcess[str]:
    """Run notebooks through nbval, which compares what cells print with what is stored."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--nbval", "--nbval-current-env"]
    command += ["--nbval-sanitize-with", str(HERE / "nbval.cfg"), f"--nbval-cell-timeout={CELL_SECONDS}"]
    with surroundings() as env:
        return subprocess.run([*command, *options, *map(str, paths)], env=env, check=False, text=True, **how)


def check_often(paths: list[Path], options: list[str], times: int) -> int:
    """Check notebooks several times in a row; how often one failed, which also is the exit code."""
    failed = 0
    for number in range(1, times + 1):
        done = check(paths, ["-q", *options], capture_output=True)
        last = (done.stdout.strip().splitlines() or [""])[-1]
        print(f"{number}/{times}: {'FAILED' if done.returncode else 'passed'}: {last}", flush=True)
        if done.returncode:
            failed += 1
            print(done.stdout, done.stderr, sep="\n", flush=True)
    print(f"The notebooks ran {times} times in a row: {failed} times with a failure")
    return min(failed, 100)


def main(arguments: list[str]) -> int:
    command, *rest = arguments or ["help"]
    paths = [Path(word) for word in rest if not word.startswith("-")] or notebooks()
    options = [word for word in rest if word.startswith("-")]
    if command == "check":
        times = [word for word in options if word.startswith("--times=")]
        options = [word for word in options if word not in times]
        if times:
            return check_often(paths or [NOTEBOOKS], options, int(times[-1].partition("=")[2]))
        return check(paths or [NOTEBOOKS], options).returncode
    if command == "stamp":
        for path in paths:
            notebook = read(path)
            stamp(path, notebook)
            write(path, notebook)
        print(f"{len(paths)} notebooks lead to {repository()}")
        return 0
    if command == "refresh":
        for path in paths:
            print(f"{path.name}: running", flush=True)
            refresh(path)
    if command in ("lint", "refresh"):
        found = [f"{path.name}: {text}" for path in paths for text in lint(path)]
        print("\n".join(found) or f"{len(paths)} notebooks are in form")
        return 1 if found else 0
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
