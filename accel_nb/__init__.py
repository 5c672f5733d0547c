"""accel_nb: pick an accelerator and a framework, build a model, press Train and watch it live.

The public names are loaded on first use, so that `import accel_nb` is quick and imports no framework.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# public name -> module that holds it
_HOMES = {
    "accelerators": "diagnose",
    "Studio": "studio",
    "train": "api",
    "compare": "compare",
    "largest_batch": "fitting",
    "runs": "api",
    "Plan": "plan",
    "Run": "run",
    "AccelNbError": "errors",
    "AcceleratorError": "errors",
    "PlanError": "errors",
    "DataError": "errors",
    "RunFailed": "errors",
}
__all__ = [
    "AccelNbError",
    "AcceleratorError",
    "DataError",
    "Plan",
    "PlanError",
    "Run",
    "RunFailed",
    "Studio",
    "__version__",
    "accelerators",
    "compare",
    "largest_batch",
    "runs",
    "train",
]

if TYPE_CHECKING:
    from accel_nb.api import runs, train
    from accel_nb.compare import compare
    from accel_nb.diagnose import accelerators
    from accel_nb.errors import AcceleratorError, AccelNbError, DataError, PlanError, RunFailed
    from accel_nb.fitting import largest_batch
    from accel_nb.plan import Plan
    from accel_nb.run import Run
    from accel_nb.studio import Studio


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value  # next time without this function
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}. Public names: {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])


if "IPython" in sys.modules:  # a notebook, whose kernel may hold other versions than a cell has just installed
    from accel_nb.colab import warn_if_changed

    warn_if_changed()
