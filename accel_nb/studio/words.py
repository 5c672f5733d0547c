"""What the panel says: a line for refusals and news, and a box for errors with their traceback folded."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import wraps
from typing import Any

import ipywidgets as widgets

from accel_nb.errors import AccelNbError, Refusal, shown
from accel_nb.studio.fields import text_html
from accel_nb.studio.style import details, esc


class Words:
    """The message line and the error box. All text is escaped here."""

    def __init__(self) -> None:
        self.message, self.error = text_html(""), text_html("")
        self.ui = widgets.VBox([self.message, self.error])
        self.refusing = False

    def say(self, text: str, *, bad: bool = False) -> None:
        """A sentence; `bad` for one that says no."""
        self._put(f'<div class="anb-say{" anb-no" * bad}" role="status">{esc(text)}</div>')
        self.refusing = False

    def refuse(self, problem: BaseException) -> None:
        """A refusal, in its parts; it stands until the plan is good again."""
        self._put(f'<div class="anb-say anb-no" role="status">{refusal_html(problem)}</div>')
        self.refusing = True

    def clear(self) -> None:
        self._put("")
        self.refusing = False

    def _put(self, html: str) -> None:
        if self.message.value != html:
            self.message.value = html

    def fail(self, text: str, trace: str = "") -> None:
        """An error: its short text first, the traceback folded."""
        folded = details("Traceback", trace) if trace.strip() else ""
        self.error.value = f'<div class="anb-say anb-no" role="alert"><b>{esc(text)}</b>{folded}</div>'

    def failed(self, problem: BaseException) -> None:
        """An exception of the panel's own: a refusal in the message line, anything else in the error box."""
        if isinstance(problem, Refusal):
            self.refuse(problem)
        elif isinstance(problem, AccelNbError):
            self.say(str(problem), bad=True)
        else:
            trace = "".join(traceback.format_exception(problem))
            self.fail(f"{type(problem).__name__}: {problem}", trace)

    def clear_error(self) -> None:
        if self.error.value:
            self.error.value = ""

    def guard(self, handler: Callable[..., Any]) -> Callable[..., None]:
        """The handler, with what it raises shown here: front ends hide it in a log otherwise."""

        @wraps(handler)
        def guarded(*args: Any, **kwargs: Any) -> None:
            try:
                handler(*args, **kwargs)
            except Exception as problem:
                self.failed(problem)

        return guarded


def refusal_html(problem: BaseException) -> str:
    if not isinstance(problem, Refusal):
        return esc(problem)
    here = f' <span class="anb-dim">Here: {esc(problem.here)}</span>' if problem.here else ""
    name = {"nodes": "nodes (machines)", "accumulate": "accumulate (parts per batch)"}.get(problem.field)
    what = f"{name or problem.field} = {shown(problem.passed)}"  # the panel calls these two by other words
    return f"<b>{esc(what)}</b>: {esc(problem.why)} {esc(problem.do)}{here}"
