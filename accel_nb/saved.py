"""What a run's directory tells of the run, whether it trains or not."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_nb.errors import PlanError
from accel_nb.loglines import split_log
from accel_nb.machines import commands
from accel_nb.plan import OWN, Plan, make_plan, plan_from_dict

if TYPE_CHECKING:
    from accel_nb.fitting import BatchFit


def read_plan(directory: Path) -> dict[str, Any]:
    """The content of plan.json; OSError or ValueError where there is none that can be read."""
    saved: dict[str, Any] = json.loads((directory / "plan.json").read_text(encoding="utf-8"))
    return saved


def plan_again(saved: Mapping[str, Any], **changes: Any) -> Plan:
    """The resolved plan of a plan.json with some fields changed, checked again; PlanError as for a new one.

    An own model is not there, only its text (`own_text`): a function without a body stands for it.
    """
    fields = {**saved["plan"], **changes}
    if str(fields["model"]).startswith(OWN):

        def stand_in() -> None:
            raise AssertionError("the model's text is in plan.json")

        stand_in.__name__ = str(fields["model"])[len(OWN) :]
        fields["model"] = stand_in
    return make_plan(**fields)


def own_text(saved: Mapping[str, Any]) -> str | None:
    """The text that makes a run's own model; None for a named model. PlanError if plan.json does not hold it."""
    text: str | None = saved.get("own_model")
    if text is None and str(saved["plan"]["model"]).startswith(OWN):
        why = "The run's directory does not hold its text."
        raise PlanError("model", saved["plan"]["model"], why, "Train anew, with the model itself.")
    return text


class SavedRun:
    """The plan, program and log of a run."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory).absolute()
        self._log = (0, "")  # size of the file when it was read, and what of it is worth showing
        self._saved = read_plan(self.directory)

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def plan(self) -> Plan:
        return plan_from_dict(self._saved["plan"])

    @property
    def settled(self) -> dict[str, Any]:
        """The resolved plan as stored: field -> value."""
        return dict(self._saved["plan"])

    @property
    def reasons(self) -> dict[str, str]:
        return dict(self._saved["reasons"])

    @property
    def notes(self) -> list[str]:
        return list(self._saved["notes"])

    @property
    def data(self) -> dict[str, Any]:
        """What the run trains on: label, samples, shape, outputs."""
        return dict(self._saved["data"])

    @property
    def program(self) -> str:
        """The text of the program that ran."""
        return (self.directory / "program.py").read_text(encoding="utf-8")

    @property
    def machines(self) -> int:
        """On how many machines it trains."""
        return int(self.settled.get("nodes") or 1)

    @property
    def worker_kind(self) -> str:
        """Which spare worker suits it: the engine's, or one without a framework that only starts others."""
        engine = str(self._saved.get("engine") or self.settled["framework"])
        return "ranks" if self.settled.get("strategy") == "multi_worker" else engine

    def largest_batch(self, **how: Any) -> BatchFit:
        """The largest batch that fits here, up to the run's own, for its model and data; how fast each trains.

        `how` (at_most, trials, seconds) and what comes back are as for `accel_nb.largest_batch`. A run that failed
        for lack of memory goes on with `run.resume(accumulate=...)`, in the parts that were found.
        """
        from accel_nb.fitting import of_run

        return of_run(self, **how)

    def commands(self, addresses: Sequence[str] = (), port: int = 29500) -> list[str]:
        """The line to start on each machine: see `machines.commands`."""
        return commands(self.directory, self.settled, addresses, port)

    @property
    def log(self) -> str:
        """What the worker printed (the last 64 KiB), without lines that are known to be harmless."""
        with contextlib.suppress(OSError), (self.directory / "log.txt").open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != self._log[0]:  # asked for with each redraw, and it hardly ever changes
                file.seek(max(0, size - 64 * 1024))
                self._log = size, "\n".join(split_log(file.read().decode(errors="replace"))[0])
        return self._log[1]
