"""The rows "Run with", "Data" and "Training"."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from accel_nb.data import NAMED, describe
from accel_nb.errors import shown
from accel_nb.plan import FRAMEWORKS, OPTIMIZER_ARGS, PRECISIONS, SCHEDULES
from accel_nb.resolve import NAMES
from accel_nb.studio.fields import Choice, Field, Segments, Tick, number, row, text_html
from accel_nb.studio.spreading import strategies
from accel_nb.studio.style import esc

Changed = Callable[..., None]
Refused = Callable[[str], None]

# field of the plan -> label and width
NUMBERS = {
    "learning_rate": ("lr", "88px"),
    "batch_size": ("batch", "92px"),
    "epochs": ("epochs", "100px"),
    "seed": ("seed", "76px"),
    "validation": ("validation", "106px"),
    "warmup_steps": ("warm-up", "96px"),
}
OPTIMIZERS = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD", "rmsprop": "RMSprop"}


class RunWith:
    """Framework, strategy, precision, compile; behind them `more`. `tpu`: this machine has one."""

    def __init__(self, changed: Changed, refused: Refused, more: Any, *, tpu: bool) -> None:
        self.framework = Segments(
            "Framework",
            [(NAMES[name], name) for name in FRAMEWORKS],
            lambda value: changed(framework=value),
            refused,
        )
        self.strategy = Choice(
            "Strategy",
            strategies(FRAMEWORKS[0], tpu=tpu),
            lambda value: changed(strategy=value),
            refused,
            brief=True,
        )
        self.precision = Choice(
            "Precision", [(name, name) for name in PRECISIONS], lambda value: changed(precision=value), refused
        )
        self.compile = Choice(
            "Compile",
            [("auto", "auto"), ("on", True), ("off", False)],
            lambda value: changed(compile=value),
            refused,
        )
        self.choices = {"strategy": self.strategy, "precision": self.precision, "compile": self.compile}
        self._tpu = tpu
        self._fields: dict[str, Any] = {}
        self.ui = row("Run with", self.framework.ui, *(one.ui for one in self.choices.values()), more)

    def fill(self, fields: Mapping[str, Any]) -> None:
        self._fields = dict(fields)
        self.framework.fill(fields["framework"])
        if fields["framework"] in FRAMEWORKS:
            self.strategy.offer(strategies(fields["framework"], tpu=self._tpu), fields["strategy"])
        self.precision.fill(fields["precision"])
        self.compile.fill(fields["compile"])

    def show(self, resolved: Any) -> None:
        """What "auto" comes to stands in its entry."""
        plan = resolved.plan
        told = {"strategy": plan.strategy, "precision": plan.precision, "compile": "on" if plan.compile else "off"}
        for name, one in self.choices.items():
            one.rename(0, f"auto ({told[name]})" if self._fields.get(name) == "auto" else "auto")


class Data:
    """Which data, and what they are."""

    def __init__(self, own: Any, own_args: dict[str, Any], changed: Changed, refused: Refused) -> None:
        names: list[tuple[str, Any]] = [(describe(name).label, name) for name in NAMED]
        self._args: dict[Any, dict[str, Any]] = {}
        if not (isinstance(own, str) and own in NAMED):
            names.append((f"own data {shown(own, 60)}", own))
        self._own = (own, own_args)

        def pick(value: Any) -> None:
            mine = value is self._own[0] or (isinstance(value, str) and value == self._own[0])
            changed(data=value, data_args=dict(self._own[1]) if mine else {})

        self.choice = Choice("Data set", names, pick, refused, bare=True)
        self.summary = text_html("", "anb-dim")
        self.ui = row("Data", self.choice.ui, self.summary)

    def fill(self, fields: Mapping[str, Any]) -> None:
        self.choice.fill(fields["data"])

    def show(self, resolved: Any) -> None:
        self.summary.value = esc(summary(resolved.facts))

    def clear(self) -> None:
        self.summary.value = ""


class Training:
    """Optimizer, learning rate, batch, epochs and the rest of what a run is told."""

    def __init__(self, changed: Changed, refused: Refused) -> None:
        self._changed = changed
        self._fields: dict[str, Any] = {}
        self.optimizer = Choice(
            "Optimizer",
            [(OPTIMIZERS[name], name) for name in OPTIMIZER_ARGS],
            lambda value: changed(optimizer=value, optimizer_args={}),
            refused,
            bare=True,
        )
        self.schedule = Choice(
            "Schedule of the learning rate",
            [(f"{name} lr", name) for name in SCHEDULES],
            lambda value: changed(schedule=value),
            refused,
            bare=True,
        )
        self.numbers = {
            name: Field(label, partial(self._number, name), width) for name, (label, width) in NUMBERS.items()
        }
        self.momentum = Field("momentum", lambda text: self._argument(momentum=number(text)), "118px")
        self.nesterov = Tick("Nesterov", lambda value: self._argument(nesterov=value))
        sgd = [self.momentum.ui, self.nesterov.ui]
        order = ["learning_rate", "batch_size", "epochs", "seed", "validation"]
        self._plain = [self.optimizer.ui, *(self.numbers[name].ui for name in order)]
        self._tail = [self.schedule.ui, self.numbers["warmup_steps"].ui]
        self._sgd = sgd
        self.ui = row("Training", *self._plain, *self._tail)
        self._flow = self.ui.children[1]

    def _number(self, name: str, text: str) -> None:
        value = number(text)
        if name == "learning_rate" and value == "":
            value = None  # an empty field: the optimizer's usual rate
        self._changed(**{name: value})

    def _argument(self, **change: Any) -> None:
        self._changed(optimizer_args={**self._fields["optimizer_args"], **change})

    def fill(self, fields: Mapping[str, Any]) -> None:
        self._fields = dict(fields)
        self.optimizer.fill(fields["optimizer"])
        self.schedule.fill(fields["schedule"])
        for name, field in self.numbers.items():
            if name != "learning_rate" or fields[name] is not None:
                field.fill(fields[name])
        args = {**OPTIMIZER_ARGS.get(fields["optimizer"], {}), **fields["optimizer_args"]}
        sgd = fields["optimizer"] == "sgd"
        if sgd:
            self.momentum.fill(args["momentum"])
            self.nesterov.fill(bool(args["nesterov"]))
        children = (*self._plain, *(self._sgd if sgd else []), *self._tail)
        if self._flow.children != children:
            self._flow.children = children

    def show(self, resolved: Any) -> None:
        """The rate that a plan without one comes to."""
        if self._fields.get("learning_rate") is None:
            self.numbers["learning_rate"].fill(resolved.plan.learning_rate)

    def mark(self, field: str) -> None:
        """Frame the field that a refusal is about; "" for none."""
        for name, one in self.numbers.items():
            one.mark(bad=field == name)
        self.momentum.mark(bad="momentum" in field or "nesterov" in field)


def summary(facts: Any) -> str:
    """Counts of a data set: "1,437 train · 360 validation · 10 classes"."""
    kinds = f"{facts.outputs:,} classes"
    if facts.task == "regression":
        kinds = f"{facts.outputs:,} target{'s' * (facts.outputs != 1)}"
    held = f"{facts.val_samples:,} validation" if facts.val_samples else "no validation"
    return f"{facts.train_samples:,} train · {held} · {kinds}"
