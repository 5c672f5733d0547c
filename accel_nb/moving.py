"""A run that goes on in another place: on another accelerator, or spread over devices in another way.

A checkpoint belongs to no device, and the mathematics of a run is the same on any number of them. So the rest of a
run is a program of its own, for the new place, that begins at the checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_nb.errors import PlanError
from accel_nb.export import settings_of
from accel_nb.facts import Facts
from accel_nb.files import write_atomic
from accel_nb.resolve import Program, Resolved, resolve
from accel_nb.saved import own_text, plan_again, read_plan

if TYPE_CHECKING:
    from accel_nb.run import Run

# What may change in the middle of a run; all else would make it another one.
WHERE = ("accelerator", "strategy", "devices", "accumulate", "precision", "compile", "cudnn_benchmark")
# What was chosen for the old accelerator, and is chosen again for another one.
FOLLOWS = ("strategy", "devices", "precision", "compile", "cudnn_benchmark")


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
    own = own_text(saved)
    resolved = _resolved(saved, where)
    resolved.drop_last = resolved.drop_last or bool(settings_of(run.program).get("DROP_LAST"))
    return resolved, resolved.program(own)


def _resolved(saved: Mapping[str, Any], where: Mapping[str, Any]) -> Resolved:
    changes = dict(where)
    if "accelerator" in where:
        changes |= {name: saved["asked"][name] for name in FOLLOWS if name not in where}
    if "strategy" in where and "devices" not in where:
        changes["devices"] = None
    facts = Facts.from_dict(saved["data"])
    try:
        return resolve(plan_again(saved, **changes), facts=facts)
    except PlanError as problem:
        if problem.field != "precision" or "precision" in where:
            raise
        resolved = resolve(plan_again(saved, **{**changes, "precision": "auto"}), facts=facts)
        resolved.notes.append(f"The precision is {resolved.plan.precision} from here on: {problem.why}")
        return resolved


def write(directory: Path, resolved: Resolved, program: Program) -> None:
    """Put the plan and the program of the rest of a run in place of the old ones; what was asked first stays."""
    saved = read_plan(directory)
    saved |= {**resolved.to_dict(), "asked": saved["asked"], "own_model": saved.get("own_model")}
    write_atomic(directory / "program.py", program.text)
    write_atomic(directory / "plan.json", json.dumps(saved, indent=1, default=str) + "\n")
