"""The panel with ipywidgets 7.7.1, which Colab has: the first notebook in the classic notebook 6.5.7, in Chromium.

Run by `make test-colab`, in the environment that it makes. The clicks are those of `tests/browser/test_lab.py`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell

TESTS = Path(__file__).resolve().parents[1]
NOTEBOOK = TESTS.parent / "notebooks" / "01_start.ipynb"
MARK = "all-cells-ran"  # a file that a last cell, added here, writes


def _beside(path: Path) -> Any:
    """A file of another folder of tests, under a name of its own: each folder's is called conftest."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


browser = _beside(TESTS / "browser" / "conftest.py")
PATIENCE, chromium = browser.PATIENCE, browser.chromium

# Colab's page in its two themes, as far as the panel looks at it
THEMES = {
    "light": "",
    "dark": """html[theme=dark] { --colab-primary-surface-color: #383838; --colab-primary-text-color: #d5d5d5; }
        html[theme=dark] body { background: #383838; color: #d5d5d5; }""",
}

# The contrast of an element's colour to the panel's background, as WCAG 2.2 defines it
CONTRAST = """(element) => {
    const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
    const light = (colour) => {
        canvas.fillStyle = "#000"; canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
        const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((part) => {
            const share = part / 255;
            return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
        });
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const panel = getComputedStyle(element.closest(".anb")).backgroundColor;
    const own = getComputedStyle(element);
    const ink = element instanceof SVGElement ? own.fill : own.color;
    const pair = [light(panel), light(ink)].sort((a, b) => b - a);
    return (pair[0] + 0.05) / (pair[1] + 0.05);
}"""

# What a screen reader says of each control that a person can reach; "" is a control without a name
NAMES = """() => [...document.querySelectorAll(".anb button, .anb input, .anb select")]
    .filter((one) => one.offsetParent !== null && one.type !== "hidden")
    .map((one) => [one.outerHTML.slice(0, 120),
                   (one.labels?.[0]?.textContent || one.textContent || one.title || "").trim()])"""


class Classic:
    """A classic notebook server whose files are in `folder`."""

    def __init__(self, folder: Path, private: Path) -> None:
        self.folder, self.token = folder, secrets.token_hex(8)
        names = {"JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data", "JUPYTER_RUNTIME_DIR": "runtime"}
        environment = {**os.environ, **{name: str(private / place) for name, place in names.items()}}
        private.mkdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [
            *(sys.executable, "-m", "notebook", "--no-browser", "--ip=127.0.0.1", f"--port={port}"),
            *(f"--NotebookApp.token={self.token}", f"--notebook-dir={folder}"),
            *(["--allow-root"] if hasattr(os, "getuid") and os.getuid() == 0 else []),
        ]
        self.log = private / "notebook.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        self.url = self._address(private / "runtime")

    def _address(self, runtime: Path) -> str:
        """Where it listens: on the port that was free, or on another one if that was taken meanwhile."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log.read_text(errors="replace")
            for told in runtime.glob("nbserver-*.json"):
                try:
                    url = str(json.loads(told.read_text())["url"])
                    with urllib.request.urlopen(f"{url}api", timeout=5):
                        return url.rstrip("/")
                except (OSError, ValueError, KeyError):
                    break
            time.sleep(0.1)
        raise AssertionError(f"the classic notebook does not answer: {self.log.read_text(errors='replace')}")

    def close(self) -> None:
        """End the server and its kernels."""
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def classic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Classic]:
    """A classic notebook server on a folder with a copy of the first notebook."""
    monkeypatch.setenv("ACCEL_NB_RUNS", str(tmp_path / "runs"))
    folder = tmp_path / "files"
    folder.mkdir()
    made = nbformat.read(NOTEBOOK, as_version=4)
    made.cells.append(new_code_cell(f"from pathlib import Path\n\nPath({MARK!r}).touch()"))
    nbformat.write(made, folder / NOTEBOOK.name)
    server = Classic(folder, tmp_path / "private")
    yield server
    server.close()


@pytest.fixture(scope="session")
def screenshots() -> Path:
    """Where pictures of the panel go; the variable ACCEL_NB_SCREENSHOTS chooses another folder."""
    folder = Path(os.environ.get("ACCEL_NB_SCREENSHOTS") or TESTS / "browser" / "screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class Page:
    """The notebook in a page of the browser."""

    def __init__(self, chromium: Any, classic: Classic) -> None:
        self.context = chromium.new_context(viewport={"width": 1400, "height": 1300})
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE * 1000)
        self.problems: list[str] = []
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.classic = classic
        self.page.goto(f"{classic.url}/notebooks/{NOTEBOOK.name}?token={classic.token}")
        self.page.locator("#kernel_indicator .kernel_indicator_name").wait_for()

    def until(self, true: Callable[[], Any], what: str) -> Any:
        end = time.monotonic() + PATIENCE
        while not (answer := true()):
            assert time.monotonic() < end, f"not within {PATIENCE} s: {what}. On the page: {self.problems}"
            self.page.wait_for_timeout(20)
        return answer

    def menu(self, bar: str, entry: str) -> None:
        self.page.locator("#menus").get_by_text(bar, exact=True).click()
        self.page.locator(f"#{entry} a").first.click()

    def run_all(self) -> None:
        """Run all cells, and wait for the panel and for the end of the last cell."""
        self.page.locator("#kernel_indicator_icon.kernel_idle_icon").wait_for()
        self.menu("Cell", "run_all_cells")
        self.panel.wait_for()
        self.until((self.classic.folder / MARK).exists, "the end of the last cell")
        self.panel.scroll_into_view_if_needed()

    @property
    def panel(self) -> Any:
        return self.page.locator(".anb").first

    def button(self, text: str) -> Any:
        return self.panel.get_by_role("button").filter(has_text=text).first

    def line(self) -> str:
        return str(self.panel.locator(".anb-line").inner_text())

    def steps(self) -> int:
        """The newest step, as the picture's description for screen readers tells it."""
        told = self.panel.locator("svg desc").first.text_content() or ""
        found = re.match(r"step ([\d,]+)", told)
        return int(found[1].replace(",", "")) if found else 0

    def write(self, label: str, text: str) -> None:
        field = self.panel.get_by_label(label, exact=True).first
        field.fill(text)
        field.press("Enter")

    def save(self) -> dict[str, Any]:
        """Save the notebook; what is in its file then."""
        self.menu("File", "save_checkpoint")
        self.until(lambda: not self.page.evaluate("() => Jupyter.notebook.dirty"), "the notebook is saved")
        return dict(json.loads((self.classic.folder / NOTEBOOK.name).read_text(encoding="utf-8")))


@pytest.fixture
def seen(chromium: Any, classic: Classic) -> Iterator[Page]:
    page = Page(chromium, classic)
    page.run_all()
    yield page
    page.context.close()


def test_this_is_what_colab_has() -> None:
    have = {name: metadata.version(name) for name in ("notebook", "ipywidgets", "ipykernel", "ipython")}
    assert have == {"notebook": "6.5.7", "ipywidgets": "7.7.1", "ipykernel": "6.17.1", "ipython": "7.34.0"}


def test_a_person_trains_watches_and_stops(seen: Page, screenshots: Path) -> None:
    page = seen.page
    page.screenshot(path=screenshots / "classic-first.png")

    # a number that is none
    seen.write("lr", "-1")
    seen.panel.get_by_text("A step must have a length.").wait_for()
    assert seen.button("Train").is_disabled()
    seen.write("lr", "0.001")
    seen.panel.get_by_text("A step must have a length.").wait_for(state="hidden")

    # a run to its end; what stays of it is hidden while the panel lives, and saved with the notebook
    seen.write("epochs", "2")
    seen.button("Train").click()
    seen.until(lambda: "done in" in seen.line(), "the end of the first run")
    kept = page.locator("[class^=anb-kept-] img").first
    kept.wait_for(state="attached")
    assert not kept.is_visible()
    saved = seen.save()
    outputs = [output for cell in saved["cells"] for output in cell.get("outputs", [])]
    assert any("anb-kept-" in "".join(output.get("data", {}).get("text/html", "")) for output in outputs)
    assert len(json.dumps(outputs)) < 300_000

    # the other framework, and a run that is long enough to be stopped; the first one stays as a faint curve
    seen.write("epochs", "100000")
    seen.button("TensorFlow").click()
    page.locator(".anb button.anb-on", has_text="TensorFlow").first.wait_for()
    seen.button("Train").click()
    seen.button("Training…").wait_for()
    seen.until(lambda: "/100000" in seen.line(), "steps")
    seen.until(lambda: seen.steps() > 5, "points")
    seen.panel.locator(".anb-small", has_text="pytorch-mlp-digits").first.wait_for()

    seen.button("Pause").click()
    seen.button("Resume").wait_for()
    seen.until(lambda: "paused" in seen.line(), "the line says it")
    page.wait_for_timeout(1000)  # the picture may lag the line by a redraw
    held = seen.steps()
    page.wait_for_timeout(1500)  # long enough for a dozen blocks of steps, if there were any
    assert seen.steps() == held
    page.screenshot(path=screenshots / "classic-paused.png")
    seen.button("Resume").click()
    seen.until(lambda: seen.steps() > held, "points after the pause")

    seen.write("lr", "0.0003")
    seen.panel.get_by_text("Learning rate 0.0003 for").wait_for()
    page.screenshot(path=screenshots / "classic-training.png")

    # a reload in the middle: the kernel and the worker go on, and so does the panel
    seen.save()
    before = seen.steps()
    page.reload()
    seen.panel.wait_for()
    seen.until(lambda: seen.steps() > before, "the curve after the reload")
    assert seen.button("Training…").is_disabled()

    seen.button("Stop").click()
    seen.until(lambda: "stopped in" in seen.line(), "the run is stopped")
    seen.until(lambda: seen.button("Train").is_enabled(), "ready for the next run")

    # back to the first framework, in the same kernel
    seen.button("PyTorch").click()
    page.locator(".anb button.anb-on", has_text="PyTorch").first.wait_for()
    seen.button("Train").click()
    seen.until(lambda: "/100000" in seen.line(), "steps with PyTorch")
    seen.until(lambda: seen.steps() > 5, "points with PyTorch")
    seen.button("Stop").click()
    seen.until(lambda: "stopped in" in seen.line(), "the second one is stopped")

    for tab, inside in (("Program", ".anb-code"), ("Runs", ".anb-run-row"), ("Machine", "caption")):
        page.locator(".anb-tabs .lm-TabBar-tab, .anb-tabs .p-TabBar-tab", has_text=tab).first.click()
        seen.panel.locator(inside).first.wait_for()
        page.screenshot(path=screenshots / f"classic-{tab.lower()}.png")
    assert seen.problems == []
    assert not seen.panel.locator("[role=alert]").count()


def test_the_panel_is_legible_and_labelled_in_colabs_themes(seen: Page, screenshots: Path) -> None:
    """The classic notebook has no dark theme: Colab's is put on, as its page says it."""
    page = seen.page
    for theme, style in THEMES.items():
        page.evaluate("(name) => document.documentElement.setAttribute('theme', name)", theme)
        page.add_style_tag(content=style or "html { }")
        for place in (
            ".anb-key",
            ".anb-card b",
            ".anb-chip",
            ".anb-line",
            ".anb-dim",
            "select",
            ".anb-field label",
            "svg .n",
        ):
            ratio = seen.panel.locator(place).first.evaluate(CONTRAST)
            assert ratio >= 4.5, f"{place} in the {theme} theme: {ratio:.1f}"
        page.screenshot(path=screenshots / f"classic-{theme}.png")
    names = page.evaluate(NAMES)
    assert len(names) > 20
    assert [html for html, name in names if not name] == []

    # the keyboard alone: the card of the CPU
    card = seen.panel.locator(".anb-card button").last
    card.focus()
    card.press("Enter")
    seen.panel.locator(".anb-card.anb-on").last.wait_for()
    for width in (1400, 700):  # nothing sticks out where it is narrow
        page.set_viewport_size({"width": width, "height": 1300})
        seen.until(
            lambda: seen.panel.evaluate("(panel) => panel.scrollWidth <= panel.clientWidth + 1"),
            f"fits at {width}",
        )
    page.screenshot(path=screenshots / "classic-narrow.png")
    assert seen.problems == []
