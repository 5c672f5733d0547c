"""What the tests of the panel share: they set controls and press buttons as a front end does."""

from __future__ import annotations

import html
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import accel_nb as anb

PATIENCE = 180  # seconds, on a slow and busy machine


def until(true: Callable[[], Any], what: str) -> Any:
    """Wait until something is so."""
    end = time.monotonic() + PATIENCE
    while not (answer := true()):
        assert time.monotonic() < end, f"not within {PATIENCE} s: {what}"
        time.sleep(0.02)
    return answer


def settle(studio: anb.Studio) -> anb.Studio:
    """The panel, once it has judged what its controls say."""
    assert studio.settled(PATIENCE)
    return studio


def write(studio: anb.Studio, name: str, text: str) -> None:
    """Write into one of the fields of the rows "Training" and "Devices"."""
    fields = {**studio._desk.training.numbers, **studio._desk.spreading.counts}
    fields[name].ui.value = text
    settle(studio)


def choose(studio: anb.Studio, choice: Any, start: str) -> None:
    """Choose the entry of a dropdown that begins with `start`."""
    choice.ui.value = next(value for label, value in choice.ui.options if label.startswith(start))
    settle(studio)


def label(choice: Any) -> str:
    """The entry that a dropdown shows."""
    return next((text for text, value in choice.ui.options if value == choice.ui.value), "")


def entries(choice: Any) -> dict[str, str]:
    """The entries of a dropdown: the first word of each -> all of it."""
    return {re.split(r"\s", text)[0]: text for text, _ in choice.ui.options}


def there(widget: Any) -> bool:
    """Whether a widget is shown."""
    return widget.layout.display != "none"


def message(studio: anb.Studio) -> str:
    return text_of(studio._words.message.value)


def text_of(markup: str) -> str:
    return html.unescape(re.sub(r"<[^>]*>", " ", markup))


def every_widget(root: Any) -> Iterator[Any]:
    yield root
    for child in getattr(root, "children", ()):
        yield from every_widget(child)
