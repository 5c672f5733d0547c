"""The panel's controls: fields, dropdowns with greyed entries, rows. Each tells its owner what a person chose.

Threads fill controls while a person uses them. A control tells its owner only what came from the person: a change
made by `fill` arrives in the very thread that fills, and is kept quiet.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ipywidgets as widgets

from accel_nb.studio.style import esc

CROSS = "✕"  # the style sheet greys options that hold it


class Quiet:
    """Remembers which thread fills a control at the moment."""

    def __init__(self) -> None:
        self._filling: set[int] = set()

    @contextlib.contextmanager
    def filling(self) -> Iterator[None]:
        me = threading.get_ident()
        self._filling.add(me)
        try:
            yield
        finally:
            self._filling.discard(me)

    @property
    def now(self) -> bool:
        return threading.get_ident() in self._filling


class Field:
    """A one-line text field in a frame with its label. `told(text)` when a person has left it or pressed Enter."""

    def __init__(self, label: str, told: Callable[[str], None], width: str = "90px") -> None:
        layout = widgets.Layout(width=width)
        self.ui = widgets.Text(
            description=label, continuous_update=False, layout=layout, style=_style(widgets.Text)
        )
        _classes(self.ui, "anb-field", "anb-num")
        self._quiet, self._told = Quiet(), told
        self.ui.observe(self._changed, "value")

    def _changed(self, change: Any) -> None:
        if not self._quiet.now:
            self._told(change["new"])

    @property
    def text(self) -> str:
        return str(self.ui.value)

    def fill(self, value: Any) -> None:
        with self._quiet.filling():
            self.ui.value = number_text(value)

    def mark(self, *, bad: bool) -> None:
        (self.ui.add_class if bad else self.ui.remove_class)("anb-bad")


class Tick:
    """A checkbox."""

    def __init__(self, label: str, told: Callable[[bool], None]) -> None:
        self.ui = widgets.Checkbox(description=label, indent=False, layout=widgets.Layout(width="auto"))
        _classes(self.ui, "anb-check")
        self._quiet = Quiet()
        self.ui.observe(lambda change: None if self._quiet.now else told(change["new"]), "value")

    def fill(self, value: bool) -> None:
        with self._quiet.filling():
            self.ui.value = value


class Choice:
    """A dropdown in a frame with its label (`bare`: a label for screen readers only).

    What cannot be chosen is shown grey with the reason, and bounces back. `entries` are (text, value) pairs; a
    value may be anything. `picked(value)` for a choice that holds; `refused(reason)` for one that does not.
    `brief`: of the chosen entry only what stands before " · ", so that a description takes room in the list alone.
    """

    def __init__(
        self,
        label: str,
        entries: Sequence[tuple[str, Any]],
        picked: Callable[[Any], None],
        refused: Callable[[str], None],
        *,
        bare: bool = False,
        brief: bool = False,
    ) -> None:
        self.entries, self._brief = list(entries), brief
        self._picked, self._refused = picked, refused
        self._why: dict[int, str] = {}
        self._now: int | None = 0
        self._quiet = Quiet()
        layout = widgets.Layout(width="auto")
        self.ui = widgets.Dropdown(description=label, layout=layout, style=_style(widgets.Dropdown))
        _classes(self.ui, "anb-field")
        if bare:
            _classes(self.ui, "anb-bare")
        self._label()
        self.ui.observe(self._changed, "value")

    def _label(self) -> None:
        options = [(self._text(i), i) for i in range(len(self.entries))]
        with self._quiet.filling(), self.ui.hold_sync():
            if list(self.ui.options) != options:
                self.ui.options = options
            self.ui.value = self._now

    def _text(self, i: int) -> str:
        text = self.entries[i][0]
        if i in self._why:
            return f"{text} {CROSS} {short(self._why[i])}"
        return text.partition(" · ")[0] if self._brief and i == self._now else text

    def _changed(self, change: Any) -> None:
        chosen = change["new"]
        if self._quiet.now or chosen is None or chosen == self._now:
            return
        if chosen in self._why:
            text = self.entries[chosen][0]
            self._label()
            self._refused(f"{self.ui.description} {text}: {self._why[chosen]}".strip())
            return
        self._now = chosen
        if self._brief:
            self._label()
        self._picked(self.entries[chosen][1])

    def fill(self, value: Any) -> None:
        """Show `value` as chosen; a value that is no entry shows as none."""
        for i, (_, known) in enumerate(self.entries):
            if known is value or (type(known) is type(value) and isinstance(value, str | int) and known == value):
                self._now = i
                break
        else:
            self._now = None
        self._label()

    def offer(self, entries: Sequence[tuple[str, Any]], value: Any) -> None:
        """Other entries, with `value` as chosen."""
        if [known for _, known in entries] != [known for _, known in self.entries]:
            self.entries, self._why = list(entries), {}
        self.fill(value)

    def reasons(self, why: Sequence[str]) -> None:
        """For each entry "" or why it cannot be chosen. The entry that is chosen now is never greyed."""
        self._why = {i: text for i, text in enumerate(why) if text and i != self._now}
        self._label()

    def rename(self, index: int, text: str) -> None:
        self.entries[index] = (text, self.entries[index][1])
        self._label()


class Segments:
    """Buttons side by side of which one is on."""

    def __init__(
        self,
        label: str,
        entries: Sequence[tuple[str, str]],
        picked: Callable[[str], None],
        refused: Callable[[str], None],
    ) -> None:
        self.label, self.entries = label, list(entries)
        self._why: dict[str, str] = {}
        self._on = ""
        self.buttons = {value: button(text, "") for text, value in entries}
        self.ui = widgets.HBox(list(self.buttons.values()))
        _classes(self.ui, "anb-seg")

        def press(value: str) -> None:
            why = self._why.get(value)
            if why:
                refused(why)
            elif value != self._on:
                picked(value)

        for value, one in self.buttons.items():
            one.on_click(lambda _, value=value: press(value))

    def fill(self, value: str) -> None:
        self._on = value
        self._draw()

    def reasons(self, why: dict[str, str]) -> None:
        self._why = {value: text for value, text in why.items() if text}
        self._draw()

    def _draw(self) -> None:
        for text, value in self.entries:
            one, why = self.buttons[value], self._why.get(value, "")
            one.description = f"{text} {CROSS}" if why else text
            state = "chosen" if value == self._on else "not usable: " + why if why else "choose it"
            one.tooltip = f"{self.label} {text}, {state}"
            (one.add_class if value == self._on else one.remove_class)("anb-on")
            (one.add_class if why else one.remove_class)("anb-off")


def button(text: str, tooltip: str, *classes: str) -> widgets.Button:
    layout = widgets.Layout(width="auto")
    made = widgets.Button(description=text, tooltip=tooltip or text, layout=layout, style=_style(widgets.Button))
    return _classes(made, "anb-btn", *classes)


_styles: dict[type, Any] = {}


def _style(kind: Any) -> Any:
    """The style object that all widgets of a kind share: each of its own would be stored in the notebook."""
    of = kind.class_traits()["style"].klass
    known = _styles.get(of)
    if known is None or known.comm is None:  # a person may have closed all widgets
        known = _styles[of] = of()
        if known.has_trait("description_width"):
            known.description_width = "initial"
    return known


def discard(widget: Any) -> None:
    """Close a widget that is shown no more, with its parts: what is open stays in kernel and notebook."""
    for child in getattr(widget, "children", ()):
        discard(child)
    parts = [getattr(widget, name, None) for name in ("layout", "style")]
    widget.close()
    for part in parts:
        if part is not None and part not in _styles.values():
            part.close()


def text_html(value: str = "", *classes: str) -> widgets.HTML:
    return _classes(widgets.HTML(value, style=_style(widgets.HTML)), *classes)


def row(key: str, *children: widgets.Widget) -> widgets.Box:
    """A row of the panel: its name on the left, the controls in a flow that wraps where it is narrow."""
    flow = _classes(widgets.Box(list(children)), "anb-flow")
    return _classes(widgets.Box([text_html(f'<span class="anb-key">{esc(key)}</span>'), flow]), "anb-row")


def _classes(widget: Any, *classes: str) -> Any:
    for name in classes:
        widget.add_class(name)
    return widget


def number(text: str) -> Any:
    """A number as a person writes it: int, else float, else the text itself, for the plan to refuse."""
    cleaned = text.strip()
    try:
        return int(cleaned)
    except ValueError:
        pass
    try:
        value = float(cleaned)
    except ValueError:
        return cleaned
    return int(value) if value.is_integer() and abs(value) < 1e15 and "." not in cleaned else value


def number_text(value: Any) -> str:
    return repr(value) if isinstance(value, float) else str(value)


def short(reason: str, limit: int = 44) -> str:
    """The first clause of a reason, for a place that has little room."""
    clause = re.split(r"(?<=\w)[.;:](?:\s|$)", reason, maxsplit=1)[0]
    return clause if len(clause) <= limit else clause[: limit - 1].rstrip() + "…"
