"""What the panel offers when memory has run out: to find the batch that fits, and to set it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accel_nb.fitting import BatchFit, Search, searching
from accel_nb.fitting_picture import draw
from accel_nb.out_of_memory import KIND
from accel_nb.plan import Plan
from accel_nb.studio.fields import button, row, text_html
from accel_nb.studio.style import esc
from accel_nb.studio.words import Words
from accel_nb.trials import too_large

SEARCHING = "The batch that fits is being looked for; cancel that to train."


class Fitting:
    """The row "Memory": shown after a run that ran out of it, and for a plan that cannot fit.

    `plan()` is what the controls say, `use(fields)` sets some of them, `changed()` is called when a search begins
    and ends, from its own thread at the end.
    """

    def __init__(
        self,
        words: Words,
        directory: str | Path | None,
        plan: Callable[[], Plan],
        use: Callable[..., None],
        changed: Callable[[], None],
    ) -> None:
        self._words, self._directory, self._plan, self._use, self._changed = words, directory, plan, use, changed
        self._search: Search | None = None
        self._thread: threading.Thread | None = None
        self._cancelled = False
        self._said = ""  # the message that asks for Train: of no use once it trains
        self.fit: BatchFit | None = None  # what the last search found
        self.find = button("Find the batch that fits", "Try batch sizes, each in a process of its own", "anb-go")
        self.cancel = button("Cancel", "End the search; what it has found stays")
        self.line = text_html("", "anb-wide")
        self.picture = text_html("", "anb-whole")
        self.parts = button("", "Each step as before, computed in parts", "anb-go")
        self.alone = button("", "Smaller steps: another batch size is another training")
        self.find.on_click(words.guard(lambda _: self.begin()))
        self.cancel.on_click(words.guard(lambda _: self.stop(wait=False)))
        self.parts.on_click(words.guard(lambda _: self._set(in_parts=True)))
        self.alone.on_click(words.guard(lambda _: self._set(in_parts=False)))
        self.ui = row("Memory", self.find, self.cancel, self.parts, self.alone, self.line, self.picture)
        self.clear()

    @property
    def busy(self) -> bool:
        """Whether a search is going on."""
        return self._thread is not None

    # ---- when it is there

    def offer(self, run: Any) -> None:
        """After the end of a run: the search, if memory ran out."""
        if run.status == "failed" and (run.error or {}).get("kind") == KIND:
            self._offer()

    def judged(self, refusal: BaseException | None) -> None:
        """After a look at what the controls say: the search, if the batch is too large by its numbers."""
        if refusal is not None and too_large(refusal) and not self.busy and not _there(self.ui):
            self._offer()

    def _offer(self) -> None:
        self.fit = None
        self._show(
            find=True, line="Trials in a process of their own tell how many samples fit, and how fast they train."
        )

    def clear(self) -> None:
        """Nothing to offer; a search that goes on ends."""
        self.stop(wait=False)
        self.fit = None
        self._show()
        if self._said and self._words.message.value == self._said:
            self._words.clear()
        self._said = ""

    # ---- the search

    def begin(self) -> None:
        """Look for the largest batch up to the one that the controls say."""
        if self.busy:
            return
        plan = self._plan()
        self._cancelled = False
        self._words.clear()
        self._words.clear_error()
        self._thread = threading.Thread(target=self._find, args=(plan,), name="accel_nb fitting", daemon=True)
        self._show(cancel=True, line="starting the first trial …")
        self._changed()
        self._thread.start()

    def stop(self, *, wait: bool = True) -> None:
        """End a search that goes on; `wait` until its process is gone."""
        self._cancelled = True
        search, thread = self._search, self._thread
        if search is not None:
            search.cancel()
        if wait and thread is not None and thread is not threading.current_thread():
            thread.join(30)

    def _find(self, plan: Plan) -> None:
        fit, problem = None, None
        try:
            with searching(
                plan, at_most=plan.batch_size, directory=self._directory, told=self._trying
            ) as self._search:
                if self._cancelled:
                    self._search.cancel()
                fit = self._search.run()
        except BaseException as raised:  # the person waits for an answer, whatever it is
            problem = raised
        try:
            if problem is not None:
                self._show(find=True)
                self._words.failed(problem)
            elif fit is not None:
                self._answer(fit)
        finally:
            self._search = self._thread = None  # the answer is there
            self._changed()

    def _trying(self, search: Search) -> None:
        size, parts = search.trying
        trials = search.fit.trials
        told = [f"{one.batch_size:,}{_in_parts(one.accumulate)} {'fits' if one.fits else '✕'}" for one in trials]
        last = trials[-1] if trials else None
        if last is None or (last.batch_size, last.accumulate) != (size, parts):
            told.append(f"{size:,}{_in_parts(parts)} …")
        self.line.value = esc(" · ".join(told))
        self.picture.value = draw(search.fit) if any(one.fits for one in trials) else ""

    def _answer(self, fit: BatchFit) -> None:
        self.fit = fit
        parts = f"Use batch {fit.batch_size:,} in {fit.accumulate} parts" if fit.accumulate > 1 else ""
        alone = f"Use batch {fit.largest:,}" if fit.largest and fit.largest < fit.batch_size else ""
        line = " ".join([fit.advice, *fit.notes])
        self._show(find=not fit.complete, parts=parts, alone=alone, line=line)
        self.picture.value = draw(fit) if fit.trials else ""

    def _set(self, *, in_parts: bool) -> None:
        fit = self.fit
        if fit is None:
            return
        size, count = (fit.batch_size, fit.accumulate) if in_parts else (fit.largest, 1)
        self._show()
        self._use(batch_size=size, accumulate=count)
        self._words.say(f"Batch {size:,}{_in_parts(count)} is set. Press Train.")
        self._said = self._words.message.value

    def _show(
        self, *, find: bool = False, cancel: bool = False, parts: str = "", alone: str = "", line: str = ""
    ) -> None:
        """Show these buttons and this line, and nothing else; the whole row only where there is anything."""
        for one, there in ((self.find, find), (self.cancel, cancel), (self.parts, parts), (self.alone, alone)):
            one.layout.display = None if there else "none"
        self.parts.description, self.alone.description = parts, alone
        self.line.value = esc(line)
        if not line or find or cancel:
            self.picture.value = ""
        self.ui.layout.display = None if find or cancel or parts or alone or line else "none"


def _in_parts(count: int) -> str:
    return f" in {count} parts" if count > 1 else ""


def _there(widget: Any) -> bool:
    return bool(widget.layout.display != "none")
