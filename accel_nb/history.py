"""The history of one run: events in, columns out.

`History` is fed with the events of a run, in their order, by one thread; any other thread may read it
meanwhile. The full data are kept (a column value per step), and beside them the thinned form that a drawing
needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from threading import RLock
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from accel_nb.thinning import LIMIT, Floats, Ints, Stretches, Thinned

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("step", "epoch", "loss", "accuracy", "val_loss", "val_accuracy")
MEASURED = COLUMNS[2:]
_BATCH = ("loss", "accuracy")  # one value a step
_VALIDATION = ("val_loss", "val_accuracy")  # one value an epoch
_EPOCH = ("epoch", "step", "loss", "accuracy", "val_loss", "val_accuracy", "seconds")


class _Grown:
    """A numpy array that grows at its end; room doubles, so that a value costs the same however many there are."""

    __slots__ = ("_room", "length")

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self._room = np.empty(256, dtype=dtype)
        self.length = 0

    @property
    def now(self) -> npt.NDArray[Any]:
        return self._room[: self.length]

    def extend(self, values: npt.NDArray[Any]) -> None:
        end = self.length + len(values)
        if end > len(self._room):
            room = np.empty(max(end, 2 * len(self._room)), dtype=self._room.dtype)
            room[: self.length] = self.now
            self._room = room
        self._room[self.length : end] = values
        self.length = end

    def append(self, value: float) -> None:
        self.extend(np.array([value], dtype=self._room.dtype))


def _number(value: Any) -> float:
    """A float from JSON: null is NaN (not measured); "NaN" and "Infinity" are what they say."""
    return float("nan") if value is None else float(value)


def _pick(values: npt.NDArray[Any], at: Ints, missing: float) -> npt.NDArray[Any]:
    """`values` at the positions `at`; `missing` where the position is -1."""
    if not len(values):
        return np.full(len(at), missing, dtype=values.dtype)
    return np.where(at < 0, missing, values[at])


class History:
    """What a run has measured so far.

    Feed it with `add(event)`, one `dict` per event, in the order of the run. `len(history)` is the number of
    steps. The columns `step`, `epoch` (integers, from 1), `loss`, `accuracy`, `val_loss`, `val_accuracy`
    (float64; accuracy is a fraction, 0 to 1) are numpy arrays of shape `(steps,)`, NaN where nothing was
    measured; validation stands at the last step of its epoch. Each access is a copy of that moment;
    `columns()` gives all of one moment.

    A block that starts at a step already here replaces it and everything after it: so a run that goes on from
    a checkpoint continues its history. Steps that were never reported are NaN. Where a long run tells the mean of
    several steps (see `accel_nb.events`), each of them has it.

    >>> history = History([{"event": "batch", "epoch": 1, "first": 1, "loss": [2.0, 1.5], "accuracy": [0.1, 0.5]}])
    >>> len(history), history.loss.tolist()
    (2, [2.0, 1.5])
    """

    def __init__(self, events: Iterable[Mapping[str, Any]] = ()) -> None:
        self.lock = RLock()  # hold it to read several things of one moment
        self.version = 0  # grows with every event that changes what is drawn
        self.steps_per_epoch: int | None = None
        self.learning_rate = float("nan")
        self.status: str | None = None  # "done", "stopped" or "failed" once the run has ended
        self._batch = {name: _Grown(np.float64) for name in _BATCH}
        self._epochs = {name: _Grown(np.int64 if name in ("epoch", "step") else np.float64) for name in _EPOCH}
        # Where an epoch begins: the 0-based position of its first step, and its number.
        self._begins, self._numbers = _Grown(np.int64), _Grown(np.int64)
        # Validation where it was measured: the last steps of those epochs, and the values.
        self._measured = {name: (_Grown(np.int64), _Grown(np.float64)) for name in _VALIDATION}
        self._thinned = {name: Thinned() for name in MEASURED}
        for event in events:
            self.add(event)

    # ---- events in

    def add(self, event: Mapping[str, Any]) -> None:
        """Take in one event of the run; kinds that say nothing about the curves are ignored.

        Raises `ValueError` for a block of steps that starts before step 1.
        """
        take = {
            "batch": self._add_batch,
            "epoch": self._add_epoch,
            "started": self._start,
            "finished": self._finish,
        }.get(event.get("event", ""))
        if take is not None:
            with self.lock:
                take(event)
                self.version += 1

    def _start(self, event: Mapping[str, Any]) -> None:
        self.status = None
        if event.get("steps_per_epoch") is not None:
            self.steps_per_epoch = int(event["steps_per_epoch"])
        if event.get("learning_rate") is not None:
            self.learning_rate = float(event["learning_rate"])

    def _finish(self, event: Mapping[str, Any]) -> None:
        self.status = event.get("status")

    def _add_batch(self, event: Mapping[str, Any]) -> None:
        loss = np.array(event["loss"], dtype=np.float64).reshape(-1)
        if event.get("learning_rate") is not None:
            self.learning_rate = float(event["learning_rate"])
        if len(loss) == 0:
            return
        accuracy = np.full(len(loss), np.nan)
        if event.get("accuracy") is not None:
            given = np.array(event["accuracy"], dtype=np.float64).reshape(-1)[: len(loss)]
            accuracy[: len(given)] = given
        if event.get("every") is not None:  # means of several steps: what a long run tells
            every, steps = int(event["every"]), int(event["steps"])
            loss, accuracy = (np.repeat(values, every)[:steps] for values in (loss, accuracy))
        start = len(self) if event.get("first") is None else int(event["first"]) - 1
        if start < 0:
            raise ValueError(f"A block of steps starts at first={start + 1}; steps count from 1.")
        if start < len(self):
            self._rewind(start)
        elif start > len(self):
            self._append(np.full(start - len(self), np.nan), np.full(start - len(self), np.nan))
        numbers = self._numbers.now
        epoch = event.get("epoch")
        epoch = (int(numbers[-1]) if len(numbers) else 1) if epoch is None else int(epoch)
        if not len(numbers) or numbers[-1] != epoch:
            self._begins.append(start if len(numbers) else 0)
            self._numbers.append(epoch)
        self._append(loss, accuracy)

    def _append(self, loss: Floats, accuracy: Floats) -> None:
        self._batch["loss"].extend(loss)
        self._batch["accuracy"].extend(accuracy)

    def _add_epoch(self, event: Mapping[str, Any]) -> None:
        step = len(self) if event.get("step") is None else int(event["step"])
        self._cut_epochs(step - 1)  # sent again after a resume: the newer one holds
        values = {name: _number(event.get(name)) for name in _EPOCH[2:]}
        for name, value in (("epoch", int(event["epoch"])), ("step", step), *values.items()):
            self._epochs[name].append(value)
        for name in _VALIDATION:
            if event.get(name) is not None:
                steps, measured = self._measured[name]
                steps.append(step)
                measured.append(values[name])

    def _rewind(self, length: int) -> None:
        """Forget every step after the first `length` ones. Rare, so the thinned form is simply made anew."""
        for name in _BATCH:
            self._batch[name].length = length
            self._thinned[name] = Thinned()
        kept = int(np.searchsorted(self._begins.now, length))  # epochs that begin before `length`
        self._begins.length = self._numbers.length = kept
        self._cut_epochs(length)

    def _cut_epochs(self, length: int) -> None:
        """Forget the epochs that ended after step `length`."""
        ends = self._epochs["step"].now
        kept = int(np.searchsorted(ends, length, side="right"))
        if kept == len(ends):
            return
        for name in _EPOCH:
            self._epochs[name].length = kept
        for name in _VALIDATION:
            steps, values = self._measured[name]
            steps.length = values.length = int(np.searchsorted(steps.now, length, side="right"))
            self._thinned[name] = Thinned()

    def _source(self, name: str) -> Floats:
        """The full data of a measured column: one value a step, or one per measured validation."""
        return self._batch[name].now if name in _BATCH else self._measured[name][1].now

    # ---- columns out

    def __len__(self) -> int:
        return self._batch["loss"].length

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """All columns of one moment, by name, each of shape `(steps,)`."""
        with self.lock:
            return {name: self._column(name) for name in COLUMNS}

    def _column(self, name: str) -> npt.NDArray[Any]:
        with self.lock:
            length = len(self)
            if name == "step":
                return np.arange(1, length + 1)
            if name == "epoch":
                return np.repeat(self._numbers.now, np.diff(self._begins.now, append=length))
            if name in _BATCH:
                return self._batch[name].now.copy()
            column = np.full(length, np.nan)
            steps = self._measured[name][0].now
            here = (steps >= 1) & (steps <= length)
            column[steps[here] - 1] = self._measured[name][1].now[here]
            return column

    @property
    def step(self) -> Ints:
        return self._column("step")

    @property
    def epoch(self) -> Ints:
        return self._column("epoch")

    @property
    def loss(self) -> Floats:
        return self._column("loss")

    @property
    def accuracy(self) -> Floats:
        return self._column("accuracy")

    @property
    def val_loss(self) -> Floats:
        return self._column("val_loss")

    @property
    def val_accuracy(self) -> Floats:
        return self._column("val_accuracy")

    @property
    def epochs(self) -> list[dict[str, Any]]:
        """One `dict` per finished epoch: epoch, step (its last), loss, accuracy (means over the epoch's samples),
        val_loss, val_accuracy, seconds; NaN where not measured.
        """
        with self.lock:
            rows = zip(*(self._epochs[name].now.tolist() for name in _EPOCH), strict=True)
            return [dict(zip(_EPOCH, row, strict=True)) for row in rows]

    @property
    def last(self) -> dict[str, Any]:
        """The newest values: step, epoch (0 before the first step), loss and accuracy of the newest step, val_loss
        and val_accuracy of the newest epoch, learning_rate; NaN where not measured.
        """
        with self.lock:
            last: dict[str, Any] = {"step": len(self), "epoch": 0}
            if self._numbers.length:
                last["epoch"] = int(self._numbers.now[-1])
            for name in MEASURED:
                values = self._source(name)
                last[name] = float(values[-1]) if len(values) else float("nan")
            last["learning_rate"] = self.learning_rate
            return last

    @property
    def has_accuracy(self) -> bool:
        """Whether an accuracy was measured: False for a regression, and before the first step."""
        with self.lock:
            return self._any("accuracy") or self._any("val_accuracy")

    @property
    def has_loss(self) -> bool:
        """Whether a finite loss was measured."""
        with self.lock:
            return self._any("loss")

    def _any(self, name: str) -> bool:
        thinned = self._thin(name)
        return thinned.length > thinned.bad

    def best(self, column: str = "val_loss") -> dict[str, Any] | None:
        """The best value of `column` with its step and epoch: the largest accuracy, the smallest loss; None if no
        finite value was measured. Raises `ValueError` for a column that is not a measured one.
        """
        if column not in MEASURED:
            raise ValueError(f"column={column!r}: not a measured column. Choose one of: {', '.join(MEASURED)}.")
        with self.lock:
            at = self._thin(column).position(largest=column.endswith("accuracy"))
            if at < 0:
                return None
            step = at + 1 if column in _BATCH else int(self._measured[column][0].now[at])
            epoch = int(self.epoch_at(np.array([step]))[0])
            return {"step": step, "epoch": epoch, column: float(self._source(column)[at])}

    def epoch_at(self, steps: Ints) -> Ints:
        """The number of the epoch of each of some steps, from 1 on, of a history that has some."""
        with self.lock:
            return self._numbers.now[np.searchsorted(self._begins.now, steps - 1, side="right") - 1]

    def epochs_done(self, step: int | None = None) -> float:
        """How many epochs were through after `step` (default: the newest), e.g. 3.2; the number of the epoch where
        it is not known how many steps one has.
        """
        with self.lock:
            step = len(self) if step is None else step
            return float(self.epochs_done_at(np.array([step]))[0]) if len(self) and step >= 1 else 0.0

    def epochs_done_at(self, steps: Ints) -> Floats:
        """`epochs_done` of several steps, from 1 on, of a history that has some."""
        with self.lock:
            where = np.searchsorted(self._begins.now, steps - 1, side="right") - 1
            numbers = self._numbers.now[where]
            if not self.steps_per_epoch:
                return numbers.astype(np.float64)
            return numbers - 1 + np.minimum(1.0, (steps - self._begins.now[where]) / self.steps_per_epoch)

    def values_at(self, column: str, steps: Ints) -> Floats:
        """A measured column at some steps, shape as `steps`: for validation the newest value at that step, NaN
        where there was none yet.
        """
        with self.lock:
            if column in _BATCH:
                return self._batch[column].now[steps - 1]
            steps_measured, values = (grown.now for grown in self._measured[column])
            return _pick(values, np.searchsorted(steps_measured, steps, side="right") - 1, np.nan)

    def validated_at(self, steps: Ints) -> Ints:
        """The step of the newest validation at each of some steps; 0 where there was none yet."""
        with self.lock:
            measured = self._measured["val_loss"][0].now
            return _pick(measured, np.searchsorted(measured, steps, side="right") - 1, 0)

    def to_frame(self) -> pd.DataFrame:
        """A pandas DataFrame, one row a step: step, epoch, loss, accuracy, val_loss, val_accuracy.

        Raises `ImportError` where pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError(
                "to_frame() needs pandas, which is not installed here. Run `pip install pandas`, or use "
                "history.columns(), the same columns as numpy arrays."
            ) from error
        return pd.DataFrame(self.columns())

    # ---- for drawing

    def _thin(self, name: str) -> Thinned:
        """The thinned form, brought up to date: what was added since costs once, here."""
        thinned = self._thinned[name]
        full = self._source(name)
        if thinned.length < len(full):
            thinned.extend(full[thinned.length :])
        return thinned

    def stretches(self, column: str, limit: int = LIMIT) -> Stretches:
        """The thinned form of a measured column, at most `limit` stretches.

        The cost does not depend on the number of steps.
        """
        with self.lock:
            thinned = self._thin(column)
            return thinned.stretches(limit, None if column in _BATCH else self._measured[column][0].now)

    def limits(self, column: str) -> tuple[float, float, float]:
        """The smallest, the largest and the smallest positive finite value of a measured column; +inf, -inf, +inf
        if there is none.
        """
        with self.lock:
            return self._thin(column).limits()

    def trouble(self, column: str) -> tuple[int, int, int]:
        """Of a measured column: how many values are NaN or infinite, the step of the first of them (0: none), and
        how many are finite but 0 or less.
        """
        with self.lock:
            thinned = self._thin(column)
            first = thinned.first_bad
            if column not in _BATCH and first >= 0:
                first = int(self._measured[column][0].now[first]) - 1
            return thinned.bad, first + 1, thinned.not_positive

    def summary(self) -> str:
        """One line of text with the newest values."""
        with self.lock:
            if not len(self):
                return "waiting for the first step" if self.status is None else "no step was trained"
            last, done = self.last, self.epochs_done()
            parts = [f"step {last['step']:,}", f"epoch {done:.1f}".removesuffix(".0"), f"loss {last['loss']:.4g}"]
            if self.has_accuracy:
                parts.append(f"accuracy {last['accuracy']:.4g}")
            parts += [
                f"{words} {last[name]:.4g}"
                for name, words in (("val_loss", "validation loss"), ("val_accuracy", "validation accuracy"))
                if self._any(name)
            ]
            bad, first, _ = self.trouble("loss")
            if bad:
                steps = f"{bad:,} step{'s' * (bad != 1)}"
                parts.append(f"loss not a finite number at {steps}, first at step {first:,}")
            return " · ".join(parts)

    def __repr__(self) -> str:
        return f"<History: {self.summary()}>"
