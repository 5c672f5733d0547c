"""Taking a run up again: in its own directory, from its checkpoint, with the same curve."""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from accel_nb.errors import AccelNbError, PlanError
from accel_nb.export import set_values
from accel_nb.files import claim, write_atomic
from accel_nb.trust import check_ours

if TYPE_CHECKING:
    from accel_nb.run import Run

CHECKPOINTS = ("checkpoint.pt", "checkpoint.npz")


def checkpoint_in(directory: Path) -> Path | None:
    """The checkpoint of a run's directory; None where none was written yet."""
    return next((directory / name for name in CHECKPOINTS if (directory / name).is_file()), None)


def can_go_on(run: Run) -> bool:
    """Whether a run has ended before its time and left what the rest can begin with."""
    early = run.status == "stopped" or (run.status == "failed" and checkpoint_in(run.directory) is not None)
    return early and run.machines == 1 and len(run.history) < (run.total_steps or math.inf)


def newest(*folders: Path | None) -> Path | None:
    """The directory of the newest run in these folders; of one that is in two, that in the first."""
    from accel_nb.folder import directories

    found = [list(directories(folder))[-1:] for folder in folders if folder is not None]
    return max((path for paths in found for path in paths), key=lambda path: path.name[:15], default=None)


def unfinished(*folders: Path | None) -> Run | None:
    """The newest run in these folders, if it can go on."""
    from accel_nb.folder import attached

    path = newest(*folders)
    run = None if path is None else attached(path)
    return run if run is not None and can_go_on(run) else None


def go_on(directory: Path, folder: Path) -> tuple[Run, str]:
    """Take up a run, copied into the folder of runs if it is elsewhere; where its accelerator is gone with what is
    here. The Run, and why it goes on elsewhere ("" if it does not); the errors are those of `Run.resume`.
    """
    from accel_nb.copies import bring_back
    from accel_nb.folder import known

    run = known(bring_back(directory, folder)).attach()
    try:
        return run.resume(), ""
    except PlanError as gone:
        if gone.field != "accelerator":
            raise
        run.resume(accelerator="auto")
        return run, gone.why


def whole(checkpoint: Path) -> bool:
    """Whether every byte of it is as it was written: both forms are zip files, with a checksum of each part."""
    try:
        with zipfile.ZipFile(checkpoint) as file:
            return file.testzip() is None
    except (OSError, zipfile.BadZipFile):
        return False


def ready(run: Run, epochs: int | None, where: Mapping[str, Any]) -> IO[str]:
    """Refuse what cannot be taken up; else set the plan and give the lock, to be let go when all is set.

    `where`: fields of the plan that say in which other place it goes on. AccelNbError if the run trains already
    (here or in another kernel), is complete, or its checkpoint is damaged; PlanError for `epochs` that are fewer
    than planned, and for a place that is not here.
    """
    from accel_nb.moving import check_place, elsewhere, write

    if not run.ended:
        hint = " Stop it first, to go on in another place." if where else ""
        raise AccelNbError(f"The run {run.name} is {run.status}: there is nothing to take up.{hint}")
    if not run.directory.is_dir():
        raise AccelNbError(f"The directory of {run.name} was removed: {run.directory}. Train anew.")
    check_ours(run.directory)
    if run.machines > 1:
        raise AccelNbError(f"The run {run.name} is on several machines: start the lines of run.commands() again.")
    planned = int(run.settled["epochs"])
    if epochs is not None and (isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < planned):
        raise PlanError("epochs", epochs, f"The run was planned with {planned}.", "Pass as many or more.")
    trained = max((int(epoch["epoch"]) for epoch in run.history.epochs), default=planned)
    if run.status == "done" and (epochs or planned) <= trained:
        raise AccelNbError(
            f"The run {run.name} has trained its {trained} epochs: pass epochs={trained + 1} or more."
        )
    found = checkpoint_in(run.directory)
    if found is not None and not whole(found):
        raise AccelNbError(f"The checkpoint of {run.name} is damaged: {found.name}. Train anew.")
    if not where:
        check_place(run)
    moved = elsewhere(run, where) if where else None
    lock = claim(run.directory)
    if lock is None:
        run.attach()
        raise AccelNbError(f"Another kernel trains the run {run.name} now: it is followed here.")
    try:
        if moved is not None:
            write(run.directory, *moved)
        if epochs is not None and epochs != planned:
            _raise_epochs(run.directory, epochs)
    except BaseException:
        lock.close()  # nobody begins it now, and a later try may
        raise
    return lock


def _raise_epochs(directory: Path, epochs: int) -> None:
    path = directory / "program.py"
    write_atomic(path, set_values(path.read_text(encoding="utf-8"), {"EPOCHS": epochs}))
    saved: dict[str, Any] = json.loads((directory / "plan.json").read_text(encoding="utf-8"))
    saved["plan"]["epochs"] = epochs
    write_atomic(directory / "plan.json", json.dumps(saved, indent=1) + "\n")
