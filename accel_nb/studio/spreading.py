"""How a run is spread: the strategies by name, and the row "Devices" with what it comes to."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from accel_nb.plan import STRATEGIES
from accel_nb.studio.fields import Field, Tick, button, number, row, text_html
from accel_nb.studio.style import esc

TEXTS = {
    "single": "single · one device",
    "ddp": "ddp · each device holds the model",
    "fsdp": "fsdp · each device holds a part of the model",
    "mirrored": "mirrored · each device holds the model",
    "multi_worker": "multi_worker · a process for each device",
    "tpu": "tpu · all chips",
}
STAND_IN = "tpu (stand-in) · a TPU's program on the CPU"
# field of the plan -> label and width; what it is called, for a tooltip, is in the refusals
COUNTS = {
    "devices": ("devices", "118px"),
    "nodes": ("machines", "104px"),
    "accumulate": ("parts per batch", "142px"),
}
# What does the same in the other framework.
COUNTERPARTS = {"mirrored": "ddp", "multi_worker": "ddp"}


def strategies(framework: str, *, tpu: bool) -> list[tuple[str, Any]]:
    """The entries of the dropdown; `tpu`: there is one, and no stand-in is needed."""
    texts = TEXTS if tpu else {**TEXTS, "tpu": STAND_IN}
    return [("auto", "auto"), *((texts[name], name) for name in STRATEGIES[framework])]


def brings(fields: Mapping[str, Any], name: str, value: Any, *, tpu: bool, gpus: int) -> dict[str, Any]:
    """What choosing `value` for the field `name` means: other fields follow, so that no impossible plan is left.

    `tpu`: this machine has one. `gpus`: how many GPUs a framework may see here.
    """
    changes = {name: value}
    strategy, accelerator = fields["strategy"], fields["accelerator"]
    if name == "framework" and value != fields["framework"]:
        if strategy in ("ddp", "fsdp") and value == "tensorflow":
            changes["strategy"] = "multi_worker" if fields["nodes"] != 1 else "mirrored"
        elif strategy in COUNTERPARTS and value == "pytorch":
            changes["strategy"] = COUNTERPARTS[strategy]
        if value == "tensorflow":
            changes["activation_checkpointing"] = False  # its box is not there any more
    elif name == "strategy" and value == "tpu":
        changes["accelerator"] = "tpu" if tpu else "cpu"
    elif name == "strategy" and value not in ("auto", "single") and accelerator.startswith("gpu:"):
        changes["accelerator"] = "gpu"  # several are the first ones
    elif name == "accelerator" and value != accelerator:
        many = strategy not in ("auto", "single") or fields["devices"] not in (None, 1)
        if value == "tpu" or (value.startswith("gpu:") and many and gpus > 1) or strategy == "tpu":
            changes |= {"strategy": "auto", "devices": None}
    return changes


class Spreading:
    """The row "Devices". `changed(field=value)` with the plan's fields.

    A run on one device needs nothing of it: the row is there when something of it is set, after `more`, and once
    a person has written in it.
    """

    def __init__(self, changed: Callable[..., None]) -> None:
        self.counts = {
            name: Field(label, partial(self._count, name), width) for name, (label, width) in COUNTS.items()
        }
        self.checkpointing = Tick(
            "activation checkpointing", lambda value: changed(activation_checkpointing=value)
        )
        self.summary = text_html("", "anb-right", "anb-dim")
        self.route = text_html("", "anb-whole", "anb-dim")
        self.ui = row(
            "Devices",
            *(self.counts[name].ui for name in COUNTS),
            self.checkpointing.ui,
            self.summary,
            self.route,
        )
        self.more = button("+ devices", "Several devices or machines, batches in parts", "anb-small", "anb-link")
        self.more.on_click(lambda _: self._open())
        self._changed = changed
        self._opened = False
        self._fields: dict[str, Any] = {}
        self._place()

    def _open(self) -> None:
        self._opened = True
        self._place()

    def _count(self, name: str, text: str) -> None:
        self._opened = True  # a row that a person writes in does not vanish with what is written
        automatic = name == "devices" and text.strip().lower().partition(" ")[0] in ("", "auto")
        self._changed(**{name: None if automatic else number(text)})

    def _place(self) -> None:
        plain = {"strategy": ("auto", "single"), "devices": (None,), "nodes": (1,), "accumulate": (1,)}
        used = any(self._fields.get(name, right[0]) not in right for name, right in plain.items())
        used = used or bool(self.route.value) or self._fields.get("activation_checkpointing", False) is not False
        shown = self._opened or used
        for one, there in ((self.ui, shown), (self.more, not shown)):
            _there(one, there=there)

    def fill(self, fields: Mapping[str, Any]) -> None:
        self._fields = dict(fields)
        for name, field in self.counts.items():
            if fields[name] is not None:
                field.fill(fields[name])
            elif not field.text.startswith("auto"):
                field.fill("auto")  # how many that is follows with the answer
        ticked = fields["activation_checkpointing"]
        self.checkpointing.fill(ticked is True)
        _there(self.checkpointing.ui, there=fields["framework"] == "pytorch" or ticked is True)
        self._place()

    def show(self, resolved: Any) -> None:
        """What the choices come to: how the batch is shared out, and by which route a TPU is reached."""
        if self._fields.get("devices") is None:
            self.counts["devices"].fill(f"auto ({resolved.plan.devices})")
        self._say(share_text(resolved), route_text(resolved))

    def clear(self) -> None:
        """What was said holds no more."""
        self._say("", "")

    def _say(self, share: str, route: str) -> None:
        for one, text in ((self.summary, share), (self.route, route)):
            if one.value != esc(text):
                one.value = esc(text)
            _there(one, there=bool(text))
        self._place()

    def mark(self, field: str) -> None:
        """Frame the field that a refusal is about; "" for none."""
        for name, one in self.counts.items():
            one.mark(bad=field == name)


def share_text(resolved: Any) -> str:
    """How a batch is shared out: "batch 128 = 2 × 64 · 12 steps per epoch"; "" for one device in one go."""
    plan, count, parts = resolved.plan, resolved.replicas, resolved.plan.accumulate
    if count == parts == 1:
        return ""
    rows = min(resolved.batch_size, resolved.facts.train_samples)
    share = math.ceil(rows / count)
    piece = math.ceil(share / parts)
    text, most = f"batch {rows:,}", "at most " * (rows % (count * parts) > 0)
    if count > 1:
        text += f" = {count} × {most}{share:,}"
    if parts > 1:
        text += f" in {parts} parts of {most * (count == 1)}{piece:,}"
    if plan.nodes > 1:
        text += f" · {plan.nodes} machines × {plan.devices} device{'s' * (plan.devices != 1)}"
    steps = resolved.steps_per_epoch
    return f"{text} · {steps:,} step{'s' * (steps != 1)} per epoch"


def route_text(resolved: Any) -> str:
    """By which route a TPU is reached, and why by this one; "" without one."""
    if resolved.plan.strategy != "tpu":
        return ""
    why = resolved.reasons.get("engine") or resolved.reasons.get("strategy", "")
    return f"Route: {why}" if why else ""


def lit(accelerator: str, devices: Any) -> set[str]:
    """The cards of a plan, by the values that they stand for: "gpu" means the first ones."""
    if accelerator != "gpu":
        return {accelerator}
    return {"gpu", *(f"gpu:{i}" for i in range(devices if isinstance(devices, int) else 1))}


def _there(widget: Any, *, there: bool) -> None:
    display = None if there else "none"
    if widget.layout.display != display:
        widget.layout.display = display
