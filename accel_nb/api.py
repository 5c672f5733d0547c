"""The calls behind the panel: `train` and `runs`."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

from accel_nb import launch
from accel_nb.errors import AccelNbError, PlanError
from accel_nb.files import write_atomic
from accel_nb.folder import known, new_directory, runs, runs_folder
from accel_nb.live import in_notebook, show
from accel_nb.plan import Plan, make_plan, model_name
from accel_nb.resolve import Resolved, resolve
from accel_nb.run import Run
from accel_nb.trust import closed

__all__ = ["runs", "start", "train"]


def train(
    plan: Plan | None = None, *, wait: bool = True, directory: str | Path | None = None, **fields: Any
) -> Run:
    """Train a model as a Plan says, in a process of its own, and show its curves live in the cell.

    Parameters
    ----------
    plan : a Plan to start from; `fields` then replace single fields of it.
    wait : True: wait for the end, RunFailed if the run failed; an interrupt stops the run and keeps what it has.
        False: come back at once, `run.wait()` waits later.
    directory : folder for the run's directory; default the variable ACCEL_NB_RUNS, else `runs`.
    fields : any field of Plan, such as framework="pytorch", data="digits", model="mlp", epochs=5.

    Returns
    -------
    Run
        The run. PlanError or DataError, before anything starts, if the plan cannot run here; AccelNbError if this
        machine can start no process.
    """
    run = start(make_plan(**fields) if plan is None else plan.replace(**fields), directory)
    show(run)
    if wait:
        run.wait()
    return run


def start(plan: Plan, directory: str | Path | None = None, *, spare: bool = True) -> Run:
    """Resolve a plan, write its run directory and hand it to a worker.

    `spare`: in a notebook, have a worker of the same framework ready once this run has ended.
    """
    resolved = resolve(plan)
    run = known(prepare(resolved, runs_folder(directory)))
    try:
        run.begin()
    except AccelNbError:
        _discard(run.directory)
        raise
    if spare and in_notebook():
        # the next run finds its framework imported; not before this one's own import is over
        run.listen(lambda ended: launch.spares.prepare(ended.worker_kind) if ended.ended else None)
    return run


def prepare(resolved: Resolved, folder: Path) -> Path:
    """A new run directory with all that its worker needs: plan, program, data, the user's own model."""
    from accel_nb.data import store

    plan = resolved.plan
    dataset = resolved.dataset()
    parts = [plan.framework, model_name(plan.model), plan.name or resolved.data["name"]]
    label = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(parts)).strip("-.")[:80] or "run"
    program = resolved.program()  # before anything is written: it may refuse
    try:
        path = new_directory(label, folder)
        with contextlib.ExitStack() as stack:
            stack.callback(_discard, path)
            store(dataset, path / "data", shared=folder / ".data")
            if program.pickled is not None:
                (path / "model.pkl").write_bytes(program.pickled)
                closed(path / "model.pkl")
            write_atomic(path / "program.py", program.text)
            saved = json.dumps({**resolved.to_dict(), "own_model": program.own}, indent=1, default=str)
            write_atomic(path / "plan.json", saved + "\n")
            stack.pop_all()  # all there: nothing to discard
    except OSError as problem:
        why = f"No run can be written there ({problem.strerror})."
        raise PlanError("directory", str(folder), why, "Pass another directory, or free some space.") from problem
    return path


def _discard(path: Path) -> None:
    import shutil

    shutil.rmtree(path, ignore_errors=True)
