"""A run that goes on in another place: on another accelerator, or spread over devices in another way.

A checkpoint belongs to no device, and the mathematics of a run is the same on any number of them. So the rest of a
run is a program of its own, for the new place, that begins at the checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_nb.errors import AccelNbError, PlanError
from accel_nb.export import settings_of
from accel_nb.facts import Facts
from accel_nb.files import write_atomic
from accel_nb.plan import make_plan
from accel_nb.resolve import Program, Resolved, resolve
from accel_nb.saved import read_plan

if TYPE_CHECKING:
    from accel_nb.run import Run

# What may change in the middle of a run; all else would make it another one.
WHERE = ("accelerator", "strategy", "devices", "accumulate", "precision", "compile", "cudnn_benchmark")
# What was chosen for the old accelerator, and is chosen again for another one.
FOLLOWS = ("strategy", "devices", "precision", "compile", "cudnn_benchmark")
OWN = "own:"  # what stands before the name of a user's model in plan.json


def check_place(run: Run) -> None:
    """PlanError if the accelerator that the run was on is not here."""
    saved = read_plan(run.directory)
    if saved["plan"]["accelerator"] == "cpu":
        return
    try:
        _resolved(saved, {})
    except PlanError as problem:
        if problem.field != "accelerator":
            raise
        do = "run.resume(accelerator='auto') goes on with what is here."
        raise PlanError("accelerator", problem.passed, problem.why, do, problem.here) from problem


def elsewhere(run: Run, where: Mapping[str, Any]) -> tuple[Resolved, Program]:
    """The rest of a run in another place, and its program; nothing is written. PlanError for what cannot be."""
    for name, value in where.items():
        if name not in WHERE:
            why = "It cannot change in the middle of a run."
            raise PlanError(name, value, why, "Pass what says where the run goes on.", ", ".join(WHERE))
    saved = read_plan(run.directory)
    own = saved.get("own_model")
    if own is None and str(saved["plan"]["model"]).startswith(OWN):
        raise AccelNbError(f"The run {run.name} does not hold its model's text: it can only go on where it was.")
    resolved = _resolved(saved, where)
    resolved.drop_last = resolved.drop_last or bool(settings_of(run.program).get("DROP_LAST"))
    return resolved, resolved.program(own)


def _resolved(saved: Mapping[str, Any], where: Mapping[str, Any]) -> Resolved:
    fields = {**saved["plan"], **where}
    if "accelerator" in where:
        fields |= {name: saved["asked"][name] for name in FOLLOWS if name not in where}
    if "strategy" in where and "devices" not in where:
        fields["devices"] = None
    model = str(fields["model"])
    if model.startswith(OWN):  # its text is there, what makes it is not

        def stand_in() -> None:
            raise AssertionError("the model's text is in plan.json")

        stand_in.__name__ = model[len(OWN) :]
        fields["model"] = stand_in
    data = saved["data"]
    facts = Facts(**{**data, "input_shape": tuple(data["input_shape"])})
    try:
        return resolve(make_plan(**fields), facts=facts)
    except PlanError as problem:
        if problem.field != "precision" or "precision" in where:
            raise
        resolved = resolve(make_plan(**{**fields, "precision": "auto"}), facts=facts)
        resolved.notes.append(f"The precision is {resolved.plan.precision} from here on: {problem.why}")
        return resolved


def write(directory: Path, resolved: Resolved, program: Program) -> None:
    """Put the plan and the program of the rest of a run in place of the old ones; what was asked first stays."""
    saved = read_plan(directory)
    saved |= {**resolved.to_dict(), "asked": saved["asked"], "own_model": saved.get("own_model")}
    write_atomic(directory / "program.py", program.text)
    write_atomic(directory / "plan.json", json.dumps(saved, indent=1, default=str) + "\n")
