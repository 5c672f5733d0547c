"""The tab "Curves": the picture of the run that is shown, with earlier runs to compare it with."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Any

import ipywidgets as widgets

from accel_nb.curves import curves_svg
from accel_nb.history import History
from accel_nb.studio.fields import Tick, button, discard, text_html
from accel_nb.studio.style import esc

REDRAW = 0.25  # seconds between two pictures: 4 a second at most
EARLIER = 5  # histories kept for comparison


class CurvesTab:
    """Draws `run` when told to, at most 4 times a second while it trains.

    `failed(exception)` is called for a picture that cannot be drawn.
    """

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self.log = Tick("log scale", lambda _: self._again())
        self.smooth = widgets.FloatSlider(
            value=0.0, min=0.0, max=0.95, step=0.05, description="smooth", readout_format=".2f"
        )
        self.smooth.style.description_width = "initial"
        self.smooth.observe(lambda _: self._again(), "value")
        self.earlier = widgets.Box([])
        self.earlier.add_class("anb-inline")
        self._save = text_html("")  # a link to the picture of a run that has ended
        tools = widgets.Box([self.log.ui, self.smooth, self._save, self.earlier])
        tools.add_class("anb-flow")
        self.picture = text_html(curves_svg(History()))
        self.ui = widgets.VBox([tools, self.picture])
        self._run: Any = None
        self._kept: dict[str, History] = {}
        self._hidden: set[str] = set()
        self._lock = threading.Lock()
        self._last, self._version = 0.0, -1
        self._timer: threading.Timer | None = None

    def show(self, run: Any) -> None:
        """Show this run from now on; the one before it stays as a faint curve."""
        with self._lock:
            before = self._run
            if before is not None and before is not run and len(before.history):
                self._kept[short_name(before.name)] = before.history
            self._kept.pop(short_name(run.name), None)
            for name in list(self._kept)[:-EARLIER]:
                del self._kept[name]
            self._hidden &= set(self._kept)
            self._run, self._version = run, -1
        self.offer("")
        self._toggles()
        self.draw(now=True)

    def draw(self, *, now: bool = False) -> None:
        """Draw what is new, unless the last picture is younger than a quarter of a second. From any thread."""
        with self._lock:
            run, moment = self._run, time.monotonic()
            version = -1 if run is None else run.history.version
            if run is None or (not now and version == self._version):
                return
            early = self._last + REDRAW - moment
            if early > 0 and not now:
                self._later(early)
                return
            self._last, self._version = moment, version
            earlier = [(name, kept) for name, kept in self._kept.items() if name not in self._hidden]
            total = None if run.ended else run.total_steps  # a run that was stopped fills the picture, too
            self.picture.value = curves_svg(
                run.history, earlier, log=self.log.ui.value, smooth=self.smooth.value, total=total
            )

    def offer(self, png: str) -> None:
        """Offer a picture (base64) for download; "" for none."""
        name = "" if self._run is None else f"{self._run.name}.png"
        link = (
            f'<a download="{esc(name)}" href="data:image/png;base64,{png}" title="Download {esc(name)}">↓ PNG</a>'
        )
        if png or self._save.value:
            self._save.value = link if png else ""

    def _later(self, seconds: float) -> None:
        """What came too early for a picture is drawn by itself, also when nothing comes after it."""
        if self._timer is None or not self._timer.is_alive():
            self._timer = threading.Timer(seconds, self._again, kwargs={"now": False})
            self._timer.daemon = True
            self._timer.start()

    def _again(self, *, now: bool = True) -> None:
        try:
            self.draw(now=now)
        except Exception as problem:
            self._failed(problem)

    @property
    def settings(self) -> dict[str, Any]:
        """How the picture is drawn now, for the one that stays in the notebook."""
        earlier = [(name, kept) for name, kept in self._kept.items() if name not in self._hidden]
        return {"earlier": earlier, "log": self.log.ui.value, "smooth": self.smooth.value}

    def _toggles(self) -> None:
        """A button for each earlier run, to hide its curve and to bring it back."""
        made = []
        for name in self._kept:
            one = button(name, "", "anb-small")
            self._label(one, name)
            one.on_click(lambda one, name=name: self._toggle(one, name))
            made.append(one)
        old, self.earlier.children = self.earlier.children, made
        for one in old:
            discard(one)

    def _toggle(self, one: Any, name: str) -> None:
        self._hidden ^= {name}
        self._label(one, name)
        self._again()

    def _label(self, one: Any, name: str) -> None:
        hidden = name in self._hidden
        one.description = name + (" (hidden)" if hidden else "")
        one.tooltip = f"{'Show' if hidden else 'Hide'} the curve of the earlier run {name}"


def short_name(name: str) -> str:
    """A run's name without its day: "15:33:58 pytorch-mlp-digits"."""
    return re.sub(r"^\d{8}-(\d\d)(\d\d)(\d\d)-", r"\1:\2:\3 ", name)
