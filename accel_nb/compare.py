"""The same training in several ways, each measured here: what a precision, a compiler or a device really gives."""

from __future__ import annotations

import base64
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accel_nb.api import start
from accel_nb.errors import AccelNbError, PlanError
from accel_nb.live import in_notebook
from accel_nb.plan import Plan, make_plan
from accel_nb.run import Run


@dataclass(frozen=True)
class Measured:
    """One way: `samples_per_second` of training (0 where it cannot run here, then `why` says so)."""

    name: str
    samples_per_second: float
    why: str = ""
    run: Run | None = None


class Comparison:
    """Measured ways to train, in the order given: a bar picture in a notebook, lines elsewhere."""

    def __init__(self, ways: list[Measured]) -> None:
        self.ways = ways

    @property
    def fastest(self) -> Measured:
        return max(self.ways, key=lambda way: way.samples_per_second)

    def ratio(self, name: str, base: str | None = None) -> float:
        """How many times as fast `name` is as `base` (the first way that ran); 0 if it cannot run here."""
        by_name = {way.name: way.samples_per_second for way in self.ways}
        if base is None:
            base = next((way.name for way in self.ways if way.samples_per_second), name)
        return by_name[name] / by_name[base] if by_name[base] else 0.0

    def to_dict(self) -> dict[str, float]:
        """Way -> samples per second, 0 where it cannot run here."""
        return {way.name: way.samples_per_second for way in self.ways}

    def __str__(self) -> str:
        wide = max(len(way.name) for way in self.ways)
        lines = []
        for way in self.ways:
            told = way.why or f"{way.samples_per_second:12,.0f} samples/s  × {self.ratio(way.name):.2f}"
            lines.append(f"{way.name:{wide}}  {told}")
        return "\n".join(lines)

    __repr__ = __str__

    def plot(self) -> Any:
        """Horizontal bars of samples per second, a matplotlib Figure; what cannot run here says why."""
        from accel_nb.figure import bars

        ran = [way.samples_per_second for way in self.ways]
        notes = [
            f"not here: {way.why}" if way.why else f"{way.samples_per_second:,.0f}  (× {self.ratio(way.name):.2f})"
            for way in self.ways
        ]
        return bars([way.name for way in self.ways], ran, notes, label="samples/s in training, more is better")

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        picture = base64.b64encode(self.plot().small_png()).decode()
        return {"text/plain": str(self), "image/png": picture}


def compare(
    plan: Plan | None = None, ways: Mapping[str, Mapping[str, Any]] | None = None, **fields: Any
) -> Comparison:
    """Train the same model in several ways, one after the other, and measure each on this machine.

    Parameters
    ----------
    plan, fields : what all ways share, as for `train`. Data default to random images, as only the speed counts.
    ways : name -> the fields in which this way differs, such as {"fp32": {}, "bf16": {"precision": "bf16"}}.

    Returns
    -------
    Comparison
        Samples per second of each way: the median over the epochs after the first, which starts up and compiles.
        A way that this machine refuses stays in the picture with its reason. RunFailed if a run fails.
    """
    if not ways:
        raise PlanError("ways", ways, "There is nothing to compare.", "Pass {name: fields}, such as {'fp32': {}}.")
    base = make_plan(**{"data": "random", "epochs": 4, "validation": 0, **fields}) if plan is None else plan
    measured = []
    for name, changes in ways.items():
        try:
            run = start(base.replace(**(fields if plan is not None else {}), **changes))
        except AccelNbError as refused:
            measured.append(Measured(name, 0.0, getattr(refused, "why", str(refused))))
            continue
        run.wait()
        measured.append(Measured(name, speed(run), run=run))
        if not in_notebook():
            print(f"{name}: {measured[-1].samples_per_second:,.0f} samples/s", flush=True)
    return Comparison(measured)


def speed(run: Run) -> float:
    """Samples per second of training: the median over the epochs after the first, or of the only one."""
    rows = list(run.history.epochs)
    seconds = statistics.median(row["seconds"] for row in rows[1:] or rows)
    return float(run.started["train_samples"] / max(seconds, 1e-9))
