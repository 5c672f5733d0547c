"""What the panel says of a run on several machines: the line to start on each."""

from __future__ import annotations

from typing import Any

from accel_nb.errors import PlanError
from accel_nb.studio.fields import Field, row, text_html
from accel_nb.studio.style import esc

LEAD = (
    "Start one line on each machine, in any order. All of them must see the run's directory under the same path "
    "(shared storage). The curves appear here as soon as all machines have started."
)


class MachineLines:
    """The row "Machines": for a run on several of them the line that starts it on each, until it has started."""

    def __init__(self, guard: Any) -> None:
        self.addresses = Field("addresses", guard(lambda _: self._draw()), "340px")
        self.addresses.ui.add_class("anb-text")
        self.lead = text_html("")
        self.hint = text_html(
            "host names or IP addresses under which the machines reach each other, the first machine's first",
            "anb-dim",
        )
        self.lines = text_html("", "anb-whole")
        self.ui = row("Machines", self.lead, self.addresses.ui, self.hint, self.lines)
        self.ui.layout.display = "none"
        self._run: Any = None

    def follow(self, run: Any) -> None:
        """Show the lines of this run if it needs any."""
        self._run = run
        self.update(run)
        if self.shown:
            self.lead.value = esc(LEAD)
            self._draw()

    @property
    def shown(self) -> bool:
        return self.ui.layout.display != "none"

    def update(self, run: Any) -> None:
        """From any thread, after each change of the run: once it has started, its lines are of no use."""
        if run is self._run:
            there = getattr(run, "machines", 1) > 1 and not run.started and not run.ended
            if there != self.shown:
                self.ui.layout.display = None if there else "none"

    def _draw(self) -> None:
        addresses = self.addresses.text.replace(",", " ").split()
        try:
            commands = self._run.commands(addresses)
        except PlanError as refused:
            self.lines.value = f'<div class="anb-dim">{esc(refused)}</div>'
            return
        self.lines.value = "".join(
            f'<div class="anb-dim">machine {number} of {len(commands)}</div>'
            f'<pre class="anb-command">{esc(line)}</pre>'
            for number, line in enumerate(commands, start=1)
        )
