"""One trial of a batch size: the real program, on a few batches, in a process of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from accel_nb.errors import PlanError, RunFailed
from accel_nb.facts import Facts
from accel_nb.machine import machine
from accel_nb.out_of_memory import ADVICE, KIND, gib
from accel_nb.plan import Plan
from accel_nb.process_memory import VARIABLE
from accel_nb.resolve import Resolved, resolve
from accel_nb.run import Run
from accel_nb.spread import OWN_PROCESSES

STEPS = 4  # of an epoch of a trial, where the data have as many
MEASURED = 1.0  # seconds of training that are measured, after the first epoch
LONG = 10.0  # seconds of a first epoch after which no second one is waited for
RESERVE = 0.5 * 2**30  # bytes of host memory, at least, that no trial takes from the rest of the machine
GONE = ("WorkerLost", "RankLost", "RankMissing")  # kinds of errors of processes that left no word


class Ended(Exception):  # noqa: N818 - no error: a search ends
    """Cancelled, or as many trials as allowed."""


Part = Callable[[str, int], np.ndarray]  # name of an array of the data, count -> its first rows


@dataclass(frozen=True)
class Trial:
    """One batch size, tried.

    `batch_size`: samples in one step, over all devices. `accumulate`: parts in which a device computes its share.
    `samples_per_second`: of training, 0.0 where it does not fit. `memory`: bytes at the peak, of one process, on
    its GPU or, on a CPU, in all; None where that is not known. `why` it does not fit; "" where it does.
    """

    batch_size: int
    accumulate: int
    fits: bool
    samples_per_second: float = 0.0
    memory: int | None = None
    why: str = ""

    def __str__(self) -> str:
        parts = f" in {self.accumulate} parts" if self.accumulate > 1 else ""
        if not self.fits:
            return f"batch {self.batch_size:,}{parts}: does not fit. {self.why}"
        held = "" if self.memory is None else f", {gib(self.memory)} GiB at the peak"
        return f"batch {self.batch_size:,}{parts}: fits, {self.samples_per_second:,.0f} samples/s{held}"


@dataclass
class Trials:
    """Runs trials of a plan, one after the other, in folders that vanish with each.

    `part` gives the samples. `seconds`: how long a trial may take. `own`: the text that makes an own model, where
    the plan only names it; `pickled`: the file that it reads. `cancelled` ends a trial from another thread.
    """

    plan: Plan
    facts: Facts
    part: Part
    folder: Path
    seconds: float
    own: str | None = None
    pickled: Path | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)

    def resolved(self, batch_size: int, accumulate: int, facts: Facts | None = None) -> Resolved:
        """The plan with this batch, and nothing in it that could end a trial early or make it last."""
        fields: dict[str, Any] = {
            "batch_size": batch_size,
            "accumulate": accumulate,
            "epochs": 1_000_000,
            "learning_rate": 1e-12,
        }
        fields |= {"schedule": "constant", "warmup_steps": 0, "checkpoint_seconds": 0, "checkpoint_epochs": 0}
        return resolve(self.plan.replace(**fields), facts=self.facts if facts is None else facts)

    def small(self, at_most: int) -> Resolved:
        """The plan with the largest batch up to `at_most` that is not refused for its size alone."""
        while True:
            try:
                return self.resolved(at_most, 1)
            except PlanError as refused:
                if not too_large(refused) or at_most == 1:
                    raise
                at_most //= 2

    def __call__(self, batch_size: int, accumulate: int = 1) -> Trial:
        """Train with this batch. RunFailed for an error that has nothing to do with memory, Ended if cancelled."""
        rows = min(self.facts.train_samples, STEPS * batch_size)
        val = min(self.facts.val_samples, batch_size)
        facts = dataclasses.replace(self.facts, train_samples=rows, val_samples=val)
        try:
            resolved = self.resolved(batch_size, accumulate, facts)
        except PlanError as refused:
            if too_large(refused):
                return Trial(batch_size, accumulate, fits=False, why=refused.why)
            raise
        path = self.folder / f"batch-{batch_size}-{accumulate}"
        path.mkdir(parents=True)
        try:
            self._write(path, resolved)
            return self._train(path, resolved, rows)
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def _write(self, path: Path, resolved: Resolved) -> None:
        program = resolved.program(self.own)
        (path / "program.py").write_text(program.text, encoding="utf-8")
        if program.pickled is not None:
            (path / "model.pkl").write_bytes(program.pickled)
        elif self.pickled is not None and self.pickled.is_file():
            shutil.copyfile(self.pickled, path / "model.pkl")
        saved = resolved.to_dict()
        saved["environment"] = {**resolved.environment, **memory_limit(resolved)}
        (path / "plan.json").write_text(json.dumps(saved, default=str), encoding="utf-8")
        (path / "data").mkdir()
        facts = resolved.facts
        arrays = {name: self.part(f"{name}_train", facts.train_samples) for name in ("x", "y")}
        if facts.val_samples:
            arrays |= {f"{name}_val": self.part(f"{name}_val", facts.val_samples) for name in ("x", "y")}
        # Data that lie on the device take their room there, and a trial's own are few: one array gets more rows,
        # that no step reads. The programs count samples by y_train (PyTorch) or x_train (Keras): it is the other.
        torch = resolved.engine in ("pytorch", "torch_xla", "torch_tpu")
        extra = facts.nbytes - sum(array.nbytes for array in arrays.values()) if resolved.data_on_device else 0
        for name, array in arrays.items():
            more = 0
            if name == ("x" if torch else "y") and extra > 0:
                more = extra // max(1, array.nbytes // len(array))
                if resolved.engine == "keras_jax" and facts.task == "classification":
                    more *= 2  # labels are int32 there
            write_rows(path / "data" / f"{name if '_' in name else name + '_train'}.npy", array, more)

    def _train(self, path: Path, resolved: Resolved, rows: int) -> Trial:
        batch, parts = resolved.plan.batch_size, resolved.plan.accumulate
        run = Run(path)
        run.begin()
        try:
            late = self._wait(run)
        except BaseException:  # an interrupt, or cancelled
            run.kill()
            raise
        finally:
            with contextlib.suppress(RunFailed, TimeoutError):
                run.wait(10)  # until its processes are gone
        error, peak = run.error, peak_memory(path / "events.jsonl")
        if late:
            steps = min(STEPS, -(-rows // batch))
            why = f"It was not through its first {steps} steps within {self.seconds:.0f} s."
            return Trial(batch, parts, fits=False, why=why)
        if run.status != "failed":
            speed = samples_per_second(path / "events.jsonl", batch, rows)
            return Trial(batch, parts, fits=True, samples_per_second=speed, memory=peak)
        error = error or {"kind": "", "text": "It failed without a word."}
        if error["kind"] == KIND or error["kind"] in GONE:
            why = str(error["text"]).replace(f" {ADVICE}", "")
            return Trial(batch, parts, fits=False, memory=peak, why=why)
        run.raise_if_failed()
        raise AssertionError("a failed run raises")

    def _wait(self, run: Run) -> bool:
        """Until the trial has ended, or enough is known; whether it took too long."""
        began, first, stopped = time.monotonic(), 0.0, False
        while not run.ended:
            now = time.monotonic()
            epochs = len(run.history.epochs)
            if self.cancelled.is_set():
                raise Ended
            if now - began > self.seconds:
                run.kill()
                return not epochs  # one that trains, only slowly, fits
            if epochs and not stopped:
                first = first or now
                stopped = (now - first > MEASURED and epochs > 1) or first - began > LONG
                if stopped:
                    run.stop()
            time.sleep(0.03)
        if self.cancelled.is_set():
            raise Ended
        return False


def too_large(refused: BaseException) -> bool:
    """Whether a plan was refused because it cannot fit by its numbers."""
    return isinstance(refused, PlanError) and refused.field == "batch_size" and "GiB" in refused.why


def memory_limit(resolved: Resolved) -> dict[str, str]:
    """The variable that keeps each process of a trial on the CPU within what is free now, less a reserve.

    So a batch that does not fit fails by itself, in place of calling the system's memory killer.
    """
    here = machine().cpu
    if not resolved.plan.accelerator.startswith("cpu") or not here.memory_free:
        return {}
    count = (resolved.plan.devices or 1) if resolved.plan.strategy in OWN_PROCESSES else 1
    room = (here.memory_free - max(RESERVE, 0.05 * here.memory_total)) / count / 2**30
    with contextlib.suppress(ValueError):
        room = min(room, float(os.environ.get(VARIABLE) or "inf"))
    return {VARIABLE: f"{max(room, 0.01):.3f}"}


def write_rows(path: Path, array: np.ndarray, more: int = 0) -> None:
    """Write rows as a `.npy` file, and behind them so many rows of zeros, which take no room on most disks."""
    array = np.ascontiguousarray(array)
    shape = (len(array) + more, *array.shape[1:])
    with path.open("wb") as file:
        head = {"descr": np.lib.format.dtype_to_descr(array.dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, head)
        file.write(array.data)
        file.truncate(file.tell() + more * (array.nbytes // len(array)))


def peak_memory(events: Path) -> int | None:
    """What the worker told at its end, in bytes; None if it has told nothing."""
    with contextlib.suppress(OSError, ValueError):  # none was written, or half a line
        for line in reversed(events.read_text(encoding="utf-8").splitlines()):
            if '"memory_peak":' in line:
                found: int | None = json.loads(line)["memory_peak"]
                return found
    return None


def samples_per_second(events: Path, batch_size: int, rows: int) -> float:
    """Of training: from the second epoch on, or from the second block of steps, where there is but one epoch."""
    blocks: list[tuple[int, float, int]] = []  # epoch, seconds, samples
    before: float | None = None
    steps = -(-rows // batch_size)
    for line in events.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError, KeyError):
            event: dict[str, Any] = json.loads(line)
            if event["event"] == "batch":
                places = ((event["first"] - 1 + i) % steps for i in range(len(event["loss"])))
                samples = sum(min(batch_size, rows - place * batch_size) for place in places)
                if before is not None:
                    blocks.append((event["epoch"], event["t"] - before, samples))
            if event["event"] in ("batch", "epoch"):
                before = event["t"]
    later = [block for block in blocks if block[0] > 1] or blocks
    return sum(block[2] for block in later) / max(sum(block[1] for block in later), 1e-3) if later else 0.0
