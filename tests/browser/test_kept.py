"""The curve is there each time: tab closed, page reloaded, kernel restarted or gone, converted, seen elsewhere."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import nbformat
from conftest import PATIENCE, Lab
from nbconvert import HTMLExporter
from nbformat.v4 import new_code_cell, new_notebook
from test_lab import MARK, Page

NAME = "kept.ipynb"
CELLS = (
    "import accel_nb as anb\n\nstudio = anb.Studio(epochs=3, accelerator='cpu')\nstudio",
    "run = studio.train()\nstudio.wait()",
    "anb.train(epochs=2, accelerator='cpu')",
    f"from pathlib import Path\n\nPath({MARK!r}).touch()",
)

# The curves that a person sees: pictures of some size, and drawings of some size with lines in them.
CURVES = """() => [...document.querySelectorAll("img, svg")].filter((one) => {
    const size = one.getBoundingClientRect();
    if (size.width < 300 || size.height < 80 || !one.checkVisibility()) return false;
    if (one.tagName === "IMG") return one.complete && one.naturalWidth >= 300;
    return one.querySelectorAll("path").length > 1;
}).length"""


HEIGHT = "(panel) => panel.getBoundingClientRect().height"
TALL = {"width": 1300, "height": 2600}  # JupyterLab draws the cells that are in sight


def curves(page: Any) -> int:
    return int(page.evaluate(CURVES))


def end_kernels(lab: Lab) -> None:
    """End every kernel of the server, as a machine that was switched off."""

    def ask(path: str, method: str = "GET") -> bytes:
        head = {"Authorization": f"token {lab.token}"}
        request = urllib.request.Request(f"{lab.url}/api/{path}", headers=head, method=method)
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return bytes(answer.read())

    for session in json.loads(ask("sessions")):
        ask(f"sessions/{session['id']}", "DELETE")


def opened(chromium: Any, path: Path, screenshot: Path) -> int:
    """The curves in a file that is opened by itself, without any network."""
    context = chromium.new_context(viewport={"width": 1300, "height": 1800}, offline=True)
    page = context.new_page()
    page.goto(path.as_uri(), wait_until="domcontentloaded")
    page.wait_for_timeout(500)
    count = curves(page)
    page.screenshot(path=screenshot, full_page=True)
    context.close()
    return count


def test_the_curve_is_there_each_time(chromium: Any, lab: Lab, screenshots: Path, tmp_path: Path) -> None:
    metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    made = new_notebook(cells=[new_code_cell(text) for text in CELLS], metadata=metadata)
    nbformat.write(made, lab.folder / NAME)
    seen = Page(chromium, lab, NAME)
    seen.page.set_viewport_size(TALL)
    seen.menu("Settings", "Save Widget State Automatically")
    seen.run_all()
    assert seen.until(lambda: curves(seen.page) == 2, "the panel's curve and that of the cell")
    seen.save()

    # the tab is closed, and opened again while the kernel lives
    seen.page.close()
    seen.page = seen.context.new_page()
    seen.page.set_viewport_size(TALL)
    seen.page.goto(f"{lab.url}/lab/tree/{NAME}?reset&token={lab.token}")
    seen.until(lambda: not seen.accept() and curves(seen.page) == 2, "both after the tab was closed")
    seen.page.reload()
    seen.until(lambda: not seen.accept() and curves(seen.page) == 2, "both after a reload")
    seen.page.screenshot(path=screenshots / "kept-reloaded.png")
    high = seen.panel.evaluate(HEIGHT)

    # the kernel is restarted: what is on the page stays, and a run is shown again from its directory
    seen.menu("Kernel", "Restart Kernel…")
    seen.until(seen.accept, "the question is answered")
    seen.until(seen.idle, "a new kernel")
    assert curves(seen.page) == 2
    seen.page.screenshot(path=screenshots / "kept-restarted.png")

    # from the saved file: with a kernel that knows nothing of it, and with none
    end_kernels(lab)
    seen.page.close()
    seen.page = seen.context.new_page()
    seen.page.set_viewport_size(TALL)
    seen.page.goto(f"{lab.url}/lab/tree/{NAME}?reset&token={lab.token}")
    seen.until(lambda: not seen.accept() and curves(seen.page) == 2, "both from the file")
    seen.until(seen.idle, "a new kernel")
    seen.menu("Kernel", "Shut Down Kernel")
    seen.until(lambda: "No Kernel" in seen.page.locator(".jp-Toolbar-kernelName").inner_text(), "no kernel")
    seen.page.wait_for_timeout(500)
    assert curves(seen.page) == 2
    assert "run its cell again" in seen.panel.evaluate("(panel) => getComputedStyle(panel, '::before').content")
    assert seen.panel.evaluate(HEIGHT) < high + 60  # and its parts stand where they stood
    seen.page.screenshot(path=screenshots / "kept-no-kernel.png")
    assert seen.problems == []
    seen.context.close()

    # the file itself: with the state of its widgets and without it, converted to HTML, and as a careful viewer
    saved = lab.folder / NAME
    size = saved.stat().st_size
    print(f"the saved notebook: {size / 1000:.0f} KB")
    assert size < 300_000
    with_state = nbformat.read(saved, as_version=4)
    assert with_state.metadata["widgets"]
    plain = nbformat.read(saved, as_version=4)
    del plain.metadata["widgets"]
    # a viewer that trusts no HTML takes the panel's picture out and leaves its text; the cell's picture is no HTML
    for name, notebook, how, expected in (
        ("html-state", with_state, {}, 2),
        ("html", plain, {}, 2),
        ("careful", plain, {"sanitize_html": True}, 1),
    ):
        html, _ = HTMLExporter(**how).from_notebook_node(notebook)
        assert html.count("done in 0:") >= 1
        path = tmp_path / f"{name}.html"
        path.write_text(html, encoding="utf-8")
        assert opened(chromium, path, screenshots / f"kept-{name}.png") == expected, name
