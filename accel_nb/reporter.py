"""What a program calls as `report`: its words, completed and written as events, and a meter beside it."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from typing import Any

from accel_nb.events import Events
from accel_nb.waiting import Watch


class Meter(threading.Thread):
    """Samples per second, memory and use of the device, about once a second, in a thread that never disturbs."""

    def __init__(self, events: Events, cards: list[int], *, ranks: bool = False) -> None:
        super().__init__(daemon=True)
        self.events = events
        self.cards = cards  # the GPUs' indexes as the driver counts; none for the CPU
        self.ranks = ranks  # whether this process is one of several that work on the run
        self.samples, self.since = 0, time.monotonic()
        self.ended = threading.Event()
        self.period = 1.0

    def count(self, samples: int) -> None:
        self.samples += samples

    def run(self) -> None:
        import psutil

        me = psutil.Process()
        family = [me]
        me.cpu_percent()
        while not self.ended.wait(self.period):
            now = time.monotonic()
            samples, self.samples = self.samples, 0
            seconds, self.since = now - self.since, now
            with contextlib.suppress(Exception):  # a meter that fails is no reason to fail
                if self.ranks and len(family) == 1:
                    family = [me, *(one for one in psutil.Process(os.getppid()).children() if one.pid != me.pid)]
                self.events.write("meter", samples_per_second=samples / seconds, **self._use(family))
            self.period = min(self.period * 1.02, 5.0)  # a long run's file grows slowly

    def _use(self, family: list[Any]) -> dict[str, Any]:
        """Memory in bytes, summed over devices (`memory_free`: of the host); utilization 0 to 1, their mean."""
        from accel_nb import machine

        host = sum(process.memory_info().rss for process in family)
        usages = [usage for usage in map(machine.gpu_usage, self.cards) if usage is not None]
        if usages:
            told = {
                "memory": sum(usage.memory_used for usage in usages),
                "memory_total": sum(usage.memory_total for usage in usages),
                "host_memory": host,
                "memory_free": machine.memory_free(),
            }
            used = [usage.utilization for usage in usages if usage.utilization is not None]
            return {"utilization": sum(used) / len(used), **told} if used else told
        here = machine.machine()
        share = sum(process.cpu_percent() for process in family) / 100 / max(1, here.cpu.cores)
        return {
            "utilization": min(1.0, share),
            "memory": host,
            "memory_total": here.cpu.memory_total,
            "host_memory": host,
            "memory_free": here.cpu.memory_free,
        }


class Reporter:
    """What the program calls as `report(event, ...)`."""

    def __init__(self, events: Events, plan: dict[str, Any]) -> None:
        self.events, self.plan = events, plan
        self.step = self.planned = self.epoch = 0
        self.began = time.monotonic()
        self.meter: Meter | None = None
        self.ranks = False
        self.cards = list(plan.get("gpus") or ([] if plan.get("gpu") is None else [plan["gpu"]]))

    def __call__(self, event: str, **values: Any) -> None:
        if event == "started":
            self._check_device(values)
            self.planned = values["steps_per_epoch"] * self.plan["plan"]["epochs"]
            if values["device"] == "cpu":
                from accel_nb.machine import machine

                values["device_name"] = machine().cpu.name  # the frameworks tell no more than the architecture
            values["asked"] = self.plan["asked"]["accelerator"]
            values["reasons"] = self.plan["reasons"]
            self.events.write("started", **values)
            self.meter = Meter(self.events, self.cards, ranks=self.ranks)
            self.meter.start()
            return
        self.events.write(event, **values)
        if event == "model" and self.plan.get("parameters") is None:
            self._weigh(values)
        if event == "epoch":
            self.epoch = values["epoch"]
        if event == "batch":
            self.step = values["first"] + len(values["loss"]) - 1
            if self.meter is not None:
                self.meter.count(len(values["loss"]) * self.plan["plan"]["batch_size"])

    def _weigh(self, values: dict[str, Any]) -> None:
        """Warn if a user's own model, whose size only its making tells, will hardly fit.

        Weights, gradients and two moments of Adam are 16 bytes a parameter; each layer's output is kept in float32
        for the backward pass, with its gradient.
        """
        from accel_nb import machine

        usage = machine.gpu_usage(self.cards[0]) if self.cards else None
        free = machine.memory_free() if usage is None else usage.memory_total - usage.memory_used
        outputs = sum(math.prod(row[2]) for row in values["layers"])
        share = self.plan.get("per_replica") or self.plan["plan"]["batch_size"]
        need = 16 * values["parameters"] + 8 * math.ceil(share / self.plan["plan"].get("accumulate", 1)) * outputs
        if free and need > free:
            text = f"The model needs about {need / 2**30:.1f} GiB to train, and {free / 2**30:.1f} GiB are free."
            self.events.write("warning", text=text)

    def _check_device(self, values: dict[str, Any]) -> None:
        from accel_nb.diagnose import check_used

        check_used(self.plan["plan"]["accelerator"], str(values["device"]), self.plan["plan"]["framework"])


class Told:
    """`report` as a rank's program calls it: rank 0's words are the run's, the others only tell that they come."""

    def __init__(self, reporter: Reporter, watch: Watch, rank: int, marks: Events | None) -> None:
        self.reporter, self.watch, self.rank, self.marks = reporter, watch, rank, marks

    def __call__(self, event: str, **values: Any) -> None:
        self.watch.news()
        if event in ("joining", "joined"):
            if self.marks is not None:
                self.marks.write(event)
            if self.rank == 0 and event == "joining":
                self.reporter(
                    "status", text="waiting for the other processes" if self.marks else "finding the devices"
                )
        elif self.rank == 0:
            self.reporter(event, **values)
