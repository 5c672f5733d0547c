"""The largest batch that fits into the memory here, found by trials, each in a process of its own.

A process that has run out of memory keeps pieces of it, and its next attempt fails where a fresh one would not; a
kernel that has run out must be restarted. So nothing is tried in the kernel, and nothing twice in one process.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from accel_nb import launch
from accel_nb.errors import AccelNbError, PlanError
from accel_nb.facts import Facts, facts_of
from accel_nb.folder import runs_folder
from accel_nb.live import in_notebook
from accel_nb.plan import Plan, make_plan, plan_from_dict
from accel_nb.processes import alive, born
from accel_nb.saved import own_text, plan_again, read_plan
from accel_nb.spread import normalises
from accel_nb.trials import Ended, Part, Trial, Trials

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from accel_nb.saved import SavedRun

TRIALS = 16  # at most
SECONDS = 180.0  # of one trial, at most; importing a framework and compiling are part of it
FOLDER = ".trials"  # in the folder of the runs: on its disk there is room for a checkpoint


class BatchFit:
    """What trials of batch sizes found: a picture in a notebook, lines elsewhere.

    Attributes
    ----------
    trials : the Trials, in their order.
    largest : the largest batch that fits, in samples over all devices; 0 if none does.
    batch_size : the batch that was asked for.
    accumulate : parts in which a device computes its share of that batch so that it fits; 0 if there is no number
        that does it.
    notes : what a person should know of it, such as what parts mean to batch normalisation.
    complete : False if the search was interrupted or cancelled: then a larger batch may fit.
    """

    def __init__(self, plan: Plan | None, batch_size: int) -> None:
        self._plan = plan
        self.batch_size = batch_size
        self.trials: list[Trial] = []
        self.largest = self.accumulate = 0
        self.notes: list[str] = []
        self.complete = False

    @property
    def settings(self) -> dict[str, int]:
        """Fields of Plan that keep the batch that was asked for, in parts; else the largest batch that fits.

        AccelNbError if no batch fits.
        """
        if self.accumulate:
            return {"batch_size": self.batch_size, "accumulate": self.accumulate}
        if self.largest:
            return {"batch_size": self.largest, "accumulate": 1}
        raise AccelNbError("No batch was found that fits: a smaller model or shorter precision needs less.")

    @property
    def plan(self) -> Plan:
        """The plan with `settings`, for `accel_nb.train`."""
        if self._plan is None:
            raise AccelNbError("The run's own data or model are not here: pass `settings` beside them to train().")
        return self._plan.replace(**self.settings)

    @property
    def samples_per_second(self) -> float:
        """Of training with `settings`; 0.0 where that was not measured."""
        wanted = self.settings
        found = [one for one in self.trials if (one.batch_size, one.accumulate) == tuple(wanted.values())]
        return found[-1].samples_per_second if found and found[-1].fits else 0.0

    @property
    def advice(self) -> str:
        """One or two sentences."""
        if not self.trials:
            return "Nothing was tried."
        end = "" if self.complete else " The search was ended early."
        if not self.largest:
            least = min(one.batch_size for one in self.trials)
            return f"Not even a batch of {least:,} fits: use a smaller model or a shorter precision.{end}"
        if self.accumulate == 1:
            return f"The batch of {self.batch_size:,} fits.{end}"
        if not self.accumulate:
            return f"The largest batch that fits has {self.largest:,} samples.{end}"
        how = f"batch_size={self.batch_size}, accumulate={self.accumulate}"
        return (
            f"At most {self.largest:,} samples fit at a time. The batch of {self.batch_size:,} in "
            f"{self.accumulate} parts takes the same steps: {how}.{end}"
        )

    def __str__(self) -> str:
        return "\n".join([*map(str, self.trials), self.advice, *self.notes])

    __repr__ = __str__

    def svg(self) -> str:
        """Samples per second of each batch, as one SVG string."""
        from accel_nb.fitting_picture import draw

        return draw(self)

    def plot(self) -> Figure:
        """The same as a matplotlib Figure."""
        from accel_nb.fitting_picture import figure

        return figure(self)

    def _repr_html_(self) -> str:
        from accel_nb.fitting_picture import html

        return html(self)


class Search:
    """A search for the largest batch that fits. `run()` does it, `cancel()` ends it from another thread.

    `told(search)` is called when a trial begins (`trying` holds its batch size and number of parts) and after it.
    """

    def __init__(
        self,
        trials: Trials,
        fit: BatchFit,
        *,
        at_most: int,
        most_trials: int = TRIALS,
        told: Callable[[Search], None] = lambda _: None,
    ) -> None:
        self.fit, self.trying = fit, (0, 1)
        self._trials, self._told, self._left = trials, told, most_trials
        self._at_most = at_most
        small = trials.small(at_most)
        self._devices, self._normalises = small.replicas, normalises(small.plan)
        self._most = math.ceil(at_most / self._devices)

    def cancel(self) -> None:
        self._trials.cancelled.set()

    def run(self) -> BatchFit:
        """Try, until the answer is known; RunFailed for an error that has nothing to do with memory."""
        launch.spares.close()  # it holds memory
        fit = self.fit
        least = math.ceil(2 / self._devices) if self._normalises else 1
        try:
            largest = largest_size(min(least, self._most), self._most, self._fits)
            fit.largest = min(largest * self._devices, self._at_most)
            self._keep_batch(largest)
            fit.complete = True
        except (KeyboardInterrupt, Ended) as early:
            fitting = [one.batch_size for one in fit.trials if one.fits and one.accumulate == 1]
            fit.largest = max(fitting, default=0)
            if isinstance(early, KeyboardInterrupt) and not fitting:
                raise
        return fit

    def _fits(self, size: int) -> bool:
        """Whether so many samples of a batch fit on each device."""
        return self._try(min(size * self._devices, self._at_most), 1)

    def _try(self, batch_size: int, accumulate: int) -> bool:
        for known in self.fit.trials:
            if (known.batch_size, known.accumulate) == (batch_size, accumulate):
                return known.fits
        if self._left <= 0 or self._trials.cancelled.is_set():
            raise Ended
        self._left -= 1
        self.trying = (batch_size, accumulate)
        self._told(self)
        trial = self._trials(batch_size, accumulate)
        self.fit.trials.append(trial)
        self._told(self)
        return trial.fits

    def _keep_batch(self, largest: int) -> None:
        """Find the number of parts with which the batch that was asked for fits, and try it."""
        fit = self.fit
        samples = self._trials.facts.train_samples
        share = math.ceil(min(fit.batch_size, samples) / self._devices)  # samples of it on a device
        if not largest:
            return
        if share <= largest:
            fit.accumulate = 1
            return
        parts = math.ceil(share / largest)
        for _ in range(4):  # gradients are added up in memory of their own: a part may have to be smaller
            if parts > share:
                return
            try:
                notes = self._trials.resolved(fit.batch_size, parts).notes
                if self._try(fit.batch_size, parts):
                    fit.accumulate = parts
                    fit.notes = [note for note in notes if f"accumulate={parts}" in note]
                    return
            except PlanError as refused:
                fit.notes = [f"accumulate={parts} is refused: {refused.why}"]
            parts += max(1, parts // 4)


def largest_size(least: int, most: int, fits: Callable[[int], bool]) -> int:
    """The largest of the sizes from `least` to `most` that fits, to within an eighth; 0 if `least` does not.

    Tried are powers of two from a sixteenth of `most` on, upward until one does not fit or downward until one
    does, and then sizes in between by halves.

    >>> tried = []
    >>> largest_size(1, 1024, lambda size: tried.append(size) or size <= 200)
    192
    >>> tried
    [64, 128, 256, 192, 224, 208]
    """
    size = max(least, 2 ** max(0, (most // 16).bit_length() - 1))
    good, bad = 0, most + 1
    if fits(size):
        good = size
        while good < most:
            size = min(2 * good, most)
            if not fits(size):
                bad = size
                break
            good = size
    else:
        bad = size
        while bad > least and not good:
            size = max(least, bad // 2)
            if fits(size):
                good = size
            else:
                bad = size
    while good and bad - good > max(1, good // 8) and bad <= most:
        size = (good + bad) // 2
        if fits(size):
            good = size
        else:
            bad = size
    return good


# ---- from outside


def largest_batch(
    plan: Plan | None = None,
    *,
    at_most: int | None = None,
    trials: int = TRIALS,
    seconds: float = SECONDS,
    directory: str | Path | None = None,
    **fields: Any,
) -> BatchFit:
    """Find the largest batch that fits into the memory here, and how fast each one trains.

    Parameters
    ----------
    plan, fields : what to train, as for `accel_nb.train`. Of the data only a few batches are used.
    at_most : the largest batch to try, in samples over all devices; default all training samples.
    trials : how many batch sizes are tried at most.
    seconds : how long a trial may take, starting up and compiling included; one that takes longer counts as one
        that does not fit.
    directory : folder for the trials' passing files; default as for `train`.

    Returns
    -------
    BatchFit
        `largest`, samples per second of each batch, and `settings` (`plan`: all of it) with which the batch size
        that was asked for fits, computed in parts.

    Each trial trains the real program on a few batches, in a process that ends with it. On a CPU (Linux) a trial
    is kept within the memory that is free, so that it fails by itself. PlanError or DataError for a plan that
    cannot run here, RunFailed for an error in a trial that has nothing to do with memory. An interrupt ends the
    search with what it has found.
    """
    asked = make_plan(**fields) if plan is None else plan.replace(**fields)
    with searching(asked, at_most=at_most, trials=trials, seconds=seconds, directory=directory, told=_tell) as one:
        return one.run()


def of_run(
    run: SavedRun, *, at_most: int | None = None, trials: int = TRIALS, seconds: float = SECONDS
) -> BatchFit:
    """The same for a run, from its directory; `at_most` is its batch size if not given."""
    check(at_most, trials, seconds)
    saved = read_plan(run.directory)
    plan, facts = plan_again(saved), Facts.from_dict(run.data)
    _one_machine(plan)
    again = saved["asked"]["data"] != "arrays" and isinstance(plan.model, str)
    fit = BatchFit(plan_from_dict(saved["asked"]) if again else None, plan.batch_size)
    source = _of_files(run.directory / "data")
    own, pickled = own_text(saved), run.directory / "model.pkl"
    with _folder(run.directory.parent) as folder:
        tried = Trials(plan, facts, source, folder, seconds=seconds, own=own, pickled=pickled)
        most = min(at_most or plan.batch_size, facts.train_samples)
        return Search(tried, fit, at_most=most, most_trials=trials, told=_tell).run()


@contextlib.contextmanager
def searching(
    plan: Plan,
    *,
    at_most: int | None = None,
    trials: int = TRIALS,
    seconds: float = SECONDS,
    directory: str | Path | None = None,
    told: Callable[[Search], None] = lambda _: None,
) -> Any:
    """A Search for a plan, inside which its passing files exist."""
    check(at_most, trials, seconds)
    _one_machine(plan)
    facts, dataset = facts_of(plan)
    source = _made_up(facts) if dataset is None else _of_dataset(dataset)
    with _folder(runs_folder(directory)) as folder:
        tried = Trials(plan, facts, source, folder, seconds=seconds)
        most = min(at_most or facts.train_samples, facts.train_samples)
        fit = BatchFit(plan, plan.batch_size)
        yield Search(tried, fit, at_most=most, most_trials=trials, told=told)


def _one_machine(plan: Plan) -> None:
    if plan.nodes > 1:
        why = "The trials run on this machine alone."
        raise PlanError("nodes", plan.nodes, why, "Pass nodes=1: a device's share is what has to fit.")


def check(at_most: int | None, trials: int, seconds: float) -> None:
    """PlanError for numbers that are none."""
    for name, value, least in (("at_most", at_most, 1), ("trials", trials, 1)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise PlanError(name, value, "It counts something.", f"Pass a whole number, {least} or more.")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise PlanError("seconds", seconds, "It is the time of one trial.", "Pass seconds, such as 180.")


@contextlib.contextmanager
def _folder(runs: Path) -> Any:
    """A folder for the passing files of one search; what a killed kernel has left of earlier ones goes too."""
    for old in (runs / FOLDER).glob("*"):
        with contextlib.suppress(ValueError):
            owner, birth = old.name.partition("-")[0].split("_")
            if not alive(int(owner), float(birth)):
                shutil.rmtree(old, ignore_errors=True)
    pid = os.getpid()
    folder = runs / FOLDER / f"{pid}_{born(pid)!r}-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir(parents=True)
    except OSError as problem:
        why = f"No trial can be written there ({problem.strerror})."
        raise PlanError("directory", str(runs), why, "Pass another directory.") from problem
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # another search is at work there
            (runs / FOLDER).rmdir()


def _of_files(folder: Path) -> Part:
    return lambda name, count: np.load(folder / f"{name}.npy", mmap_mode="r")[:count]


def _of_dataset(dataset: Any) -> Part:
    def part(name: str, count: int) -> np.ndarray:
        kind, _, which = name.partition("_")
        rows = getattr(dataset, f"rows_{which}")
        return rows.pick(np.arange(count)).read() if kind == "x" else getattr(dataset, name)[:count]

    return part


def _made_up(facts: Facts) -> Part:
    """Noise in the shape of a named set, which may not be on this machine yet: images of whole numbers."""

    def part(name: str, count: int) -> np.ndarray:
        random = np.random.default_rng(0)
        if name.startswith("x"):
            return random.integers(0, round(facts.scale) + 1, (count, *facts.input_shape), np.uint8)
        return random.integers(0, facts.outputs, count, np.int64)

    return part


_printing = threading.Lock()


def _tell(search: Search) -> None:
    """A line for each trial; in a notebook one line, replaced in place."""
    trials = search.fit.trials
    if in_notebook():
        _show(search)
    elif trials and (trials[-1].batch_size, trials[-1].accumulate) == search.trying:
        print(trials[-1], flush=True)


def _show(search: Search) -> None:
    from IPython.display import display

    with _printing:
        size, parts = search.trying
        line = f"batch {size:,}" + (f" in {parts} parts" if parts > 1 else "")
        text = f"{line}: training a few steps …  " + "  ".join(
            f"{one.batch_size:,}{'' if one.fits else ' ✕'}" for one in search.fit.trials
        )
        bundle = {"text/plain": text}
        shown = getattr(search, "display_id", None)
        if shown is None:
            search.display_id = display(bundle, raw=True, display_id=True).display_id  # type: ignore[attr-defined]
        else:
            display(bundle, raw=True, display_id=shown, update=True)
