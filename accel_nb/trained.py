"""The trained model of a run, loaded into this process: the one place that imports a framework into a kernel."""

from __future__ import annotations

import os
import sys
import types
from typing import TYPE_CHECKING, Any

from accel_nb.errors import AccelNbError
from accel_nb.loglines import quiet_start
from accel_nb.trust import check_ours

if TYPE_CHECKING:
    from accel_nb.run import Run


def load(run: Run) -> Any:
    """The model of a run, on the CPU; AccelNbError if the run stored none yet, or another user could write it."""
    name = "model.pt" if run.settled["framework"] == "pytorch" else "model.keras"
    path = run.directory / name
    if not path.is_file():
        raise AccelNbError(
            f"The run {run.name} ({run.status}) has stored no model: it is written when a run ends or stops."
        )
    check_ours(run.directory)
    module = types.ModuleType(f"accel_nb_program_{abs(hash(run.directory))}")
    module.__file__ = str(run.directory / "program.py")
    sys.modules[module.__name__] = module
    if run.settled["framework"] == "tensorflow":
        os.environ.setdefault("KERAS_BACKEND", "tensorflow")
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with quiet_start():
        exec(compile(run.program, module.__file__, "exec"), module.__dict__)  # noqa: S102 - the run's own program
        return module.load_model(path)
