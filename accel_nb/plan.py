"""Plan: the frozen description of one run, and every refusal that needs no look at the machine or the data."""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from accel_nb.errors import PlanError, shown

FRAMEWORKS = ("pytorch", "tensorflow")
ACCELERATORS = ("auto", "cpu", "gpu", "mps", "tpu")
PRECISIONS = ("auto", "fp32", "tf32", "bf16", "fp16")
# Strategies by framework: single, then several devices of one machine or of several machines.
STRATEGIES = {
    "pytorch": ("single", "ddp", "fsdp", "tpu"),
    "tensorflow": ("single", "mirrored", "multi_worker", "tpu"),
}
SEVERAL_MACHINES = ("ddp", "fsdp", "multi_worker")
SCHEDULES = ("constant", "cosine")
MODELS = ("mlp", "cnn", "resnet50")
OWN = "own:"  # what stands before the name of a user's model where a plan is told in words
MOST = 10**9  # of what is counted: beyond it frameworks, clocks and floats fail in ways of their own
MOST_LAYERS = 1000  # of a named model
ACTIVATIONS = ("relu", "gelu", "tanh", "sigmoid", "silu", "leaky_relu", "elu")

# Learning rates: PyTorch's and Keras's own default for Adam, AdamW, RMSprop's is 0.001 in Keras (0.01 in PyTorch);
# 0.01 for SGD is Keras's. One number for both frameworks, so that the same plan means the same mathematics.
LEARNING_RATES = {"adam": 0.001, "adamw": 0.001, "sgd": 0.01, "rmsprop": 0.001}
# Names are PyTorch's. AdamW's decay 0.01 is PyTorch's default; RMSprop's alpha 0.9 is Keras's rho.
OPTIMIZER_ARGS: dict[str, dict[str, Any]] = {
    "adam": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    "adamw": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
    "sgd": {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0},
    "rmsprop": {"alpha": 0.9, "eps": 1e-8, "momentum": 0.0, "weight_decay": 0.0},
}
MODEL_ARGS: dict[str, dict[str, Any]] = {
    "mlp": {"layers": [512], "activation": "relu", "dropout": 0.2},
    "cnn": {"filters": [32, 64], "activation": "relu", "dropout": 0.25},
    "resnet50": {},
}


@dataclass(frozen=True, eq=False)
class Plan:
    """One run, described whole. `resolve()` (in `resolve.py`) turns each "auto" into a choice with its reason.

    Attributes
    ----------
    framework : "pytorch" or "tensorflow".
    accelerator : "auto", "cpu", "gpu" (the first), "gpu:1" (by index), "mps", "tpu".
    strategy : how a run is spread. "auto"; "single"; in PyTorch "ddp" (each device holds the model) or "fsdp"
        (each holds a part of it); in TensorFlow "mirrored" (devices of one machine) or "multi_worker" (a process
        per device, machines too); in both "tpu" (all chips; on accelerator="cpu" a stand-in for a missing TPU).
    devices : how many devices of each machine work together; None: one, or all for a named strategy.
    nodes : machines, 1 or more. With more, `Run.commands()` gives the line to start on each.
    accumulate : parts in which a device computes its share of a batch, one after the other, to save memory.
    activation_checkpointing : compute activations anew in the backward pass instead of keeping them (PyTorch).
    precision : "auto", "fp32", "tf32", "bf16", "fp16". Logits and loss are float32 in each.
    compile : "auto", True or False: torch.compile, or XLA in TensorFlow.
    data : a name ("digits", "mnist", "fashion_mnist", "cifar10", "random"), the path of an .npz file, or arrays
        `(x, y)` or `(x, y, x_val, y_val)`; x `(samples, height, width, channels)` or `(samples, features)`.
    data_args : for "random" samples, shape, classes; for own arrays task, classes, remap_labels.
    model : "mlp", "cnn", "resnet50", or your own function, class or instance.
    model_args : for "mlp" layers (units of each hidden layer), activation, dropout; for "cnn" filters, activation,
        dropout; for your own function or class its keyword arguments.
    optimizer, optimizer_args : "adam", "adamw", "sgd", "rmsprop" and its arguments, by PyTorch's names.
    learning_rate : None (the optimizer's default) or a number above 0.
    schedule, warmup_steps : "constant" or "cosine" (to 0 at the last step), after so many steps of linear warm-up.
    batch_size : samples in one optimizer step, over all devices.
    epochs : passes over the training data, at least 1.
    checkpoint_seconds, checkpoint_epochs : how often all that is needed to go on is stored; 0 for never. It is
        also stored at the end, at a stop and when the notebook's kernel dies.
    validation : fraction of the samples held out, 0 to below 1; 0 for none. Data that bring their own ignore it.
    seed : 0 to 2**32 - 1; sets the split, the weights, the order and the dropout.
    deterministic : only algorithms that give the same bits each time; slower on a GPU.
    cudnn_benchmark : "auto", True or False: let cuDNN time its algorithms first and keep the fastest.
    name : a word for the run's directory; the data's name if empty.
    """

    framework: str = "pytorch"
    accelerator: str = "auto"
    strategy: str = "auto"
    devices: int | None = None
    nodes: int = 1
    accumulate: int = 1
    activation_checkpointing: bool = False
    precision: str = "auto"
    compile: bool | str = "auto"
    data: Any = "digits"
    data_args: dict[str, Any] = field(default_factory=dict)
    model: Any = "mlp"
    model_args: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "adam"
    optimizer_args: dict[str, Any] = field(default_factory=dict)
    learning_rate: float | None = None
    schedule: str = "constant"
    warmup_steps: int = 0
    batch_size: int = 128
    epochs: int = 5
    checkpoint_seconds: float = 60.0
    checkpoint_epochs: int = 0
    validation: float = 0.2
    seed: int = 0
    deterministic: bool = False
    cudnn_benchmark: bool | str = "auto"
    name: str = ""

    def __post_init__(self) -> None:
        normalise(self)

    def replace(self, **changes: Any) -> Plan:
        """A plan with some fields changed; the same refusals as at the start.

        Another optimizer, model or data set brings its own default arguments, unless they are given too.
        """
        for owner in ("optimizer", "model", "data"):
            if owner in changes and changes[owner] is not getattr(self, owner):
                changes.setdefault(f"{owner}_args", {})
        return make_plan(**{**self._fields(), **changes})

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready. Own arrays and own models are told in words: they live in the run's directory."""
        fields = self._fields()
        if not isinstance(self.data, str):
            fields["data"] = "arrays"
        if not isinstance(self.model, str):
            fields["model"] = OWN + model_name(self.model)
        return {name: _json_ready(value) for name, value in fields.items()}

    def resolve(self, **here: Any) -> Any:
        """The plan with nothing left open, and the reason of each choice: see `resolve.resolve`."""
        from accel_nb.resolve import resolve

        return resolve(self, **here)

    def _fields(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}


def make_plan(**fields: Any) -> Plan:
    """A Plan; an unknown field is told with the nearest known one."""
    known = [f.name for f in dataclasses.fields(Plan)]
    for name, value in fields.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise PlanError(
                name,
                value,
                "A plan has no such field.",
                f"Did you mean {near[0]}?" if near else "Leave it out.",
                ", ".join(known),
            )
    return Plan(**fields)


def plan_from_dict(fields: Mapping[str, Any]) -> Plan:
    """A plan as `to_dict` stored it. Own arrays and own models stay the words that stand for them."""
    plan = object.__new__(Plan)
    for known in dataclasses.fields(Plan):
        default = known.default if known.default is not dataclasses.MISSING else {}
        object.__setattr__(plan, known.name, fields.get(known.name, default))
    return plan


def quick() -> bool:
    """Whether ACCEL_NB_QUICK asks for runs of a few seconds, as tests of notebooks do."""
    return os.environ.get("ACCEL_NB_QUICK", "") not in ("", "0")


def model_name(model: Any) -> str:
    """A short name for a model: its own for a named one, the function's or class's for the user's."""
    if isinstance(model, str):
        return model
    try:
        return str(model.__name__)
    except Exception:  # an instance has none, and an object may fail in any way when it is asked
        return type(model).__name__


def normalise(plan: Plan) -> None:
    """Check each field on its own and give numbers their plain Python types."""

    def put(name: str, value: Any) -> None:
        object.__setattr__(plan, name, value)

    put("framework", _one_of("framework", _alias(plan.framework), FRAMEWORKS))
    put("accelerator", _accelerator(plan.accelerator))
    put("strategy", _strategy(plan.strategy, plan.framework))
    put("precision", _one_of("precision", plan.precision, PRECISIONS))
    put("optimizer", _one_of("optimizer", plan.optimizer, tuple(OPTIMIZER_ARGS)))
    put("schedule", _one_of("schedule", plan.schedule, SCHEDULES))
    for name in ("compile", "cudnn_benchmark"):
        value = getattr(plan, name)
        if not (isinstance(value, bool) or (isinstance(value, str) and value == "auto")):
            raise PlanError(name, value, "It is a choice.", "Pass True, False or 'auto'.")
    for name in ("deterministic", "activation_checkpointing"):
        if not isinstance(getattr(plan, name), bool):
            raise PlanError(name, getattr(plan, name), "It is a choice.", "Pass True or False.")
    put("nodes", _whole("nodes", plan.nodes, 1, 1024))
    put("accumulate", _whole("accumulate", plan.accumulate, 1))
    if plan.devices is not None:
        put("devices", _whole("devices", plan.devices, 1, 1024))
    put("batch_size", _whole("batch_size", plan.batch_size, 1))
    put("epochs", _whole("epochs", plan.epochs, 1))
    put("checkpoint_epochs", _whole("checkpoint_epochs", plan.checkpoint_epochs, 0))
    put("checkpoint_seconds", _number("checkpoint_seconds", plan.checkpoint_seconds))
    if plan.checkpoint_seconds < 0:
        why = "It is a time in seconds."
        raise PlanError("checkpoint_seconds", plan.checkpoint_seconds, why, "Pass 0 (never) or more.")
    put("warmup_steps", _whole("warmup_steps", plan.warmup_steps, 0))
    put("seed", _whole("seed", plan.seed, 0, 2**32 - 1))
    put("validation", 0.0 if plan.validation is None else _number("validation", plan.validation))
    if not 0 <= plan.validation < 1:
        raise PlanError(
            "validation",
            plan.validation,
            "It is the fraction of samples held out.",
            "Pass 0 (none) to below 1, such as 0.2.",
        )
    if plan.learning_rate is not None:
        put("learning_rate", checked_learning_rate(plan.learning_rate))
    if not isinstance(plan.name, str):
        raise PlanError("name", plan.name, "It is a word for the run's directory.", "Pass text.")
    for name in ("data_args", "model_args", "optimizer_args"):
        value = getattr(plan, name)
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise PlanError(name, value, "It holds named arguments.", f"Pass a dict, such as {name}=dict(...).")
        put(name, dict(value))
    put("optimizer_args", optimizer_args(plan.optimizer, plan.optimizer_args))
    if isinstance(plan.model, str):
        put("model", _one_of("model", plan.model, MODELS))
        put("model_args", model_args(plan.model, plan.model_args))
    elif not callable(plan.model):
        raise PlanError(
            "model",
            plan.model,
            "It is neither a name nor something that makes a model.",
            "Pass a name, a function, a class or a model.",
            ", ".join(MODELS),
        )


def checked_learning_rate(value: Any) -> float:
    """A learning rate as a float; PlanError unless it is a finite number above 0."""
    rate = _number("learning_rate", value)
    if not rate > 0:
        raise PlanError(
            "learning_rate", value, "A step must have a length.", "Pass a number above 0, such as 0.001."
        )
    return rate


def optimizer_args(optimizer: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's arguments, all of them: the given ones checked, the defaults filled in."""
    args = dict(OPTIMIZER_ARGS[optimizer])
    _known("optimizer_args", given, args, optimizer)
    for name, value in given.items():
        label = f"optimizer_args[{name!r}]"
        if name == "betas":
            pair = list(value) if isinstance(value, list | tuple) else []
            if len(pair) != 2 or not all(isinstance(b, int | float) and 0 <= b < 1 for b in pair):
                raise PlanError(
                    label, value, "Adam averages with two factors.", "Pass two numbers from 0 to below 1."
                )
            args[name] = (float(pair[0]), float(pair[1]))
        elif name == "nesterov":
            if not isinstance(value, bool):
                raise PlanError(label, value, "It is a choice.", "Pass True or False.")
            args[name] = value
        else:
            number = _number(label, value)
            top = 1.0 if name in ("momentum", "alpha") else math.inf
            if not 0 <= number < top or (name == "eps" and number == 0):
                raise PlanError(
                    label,
                    value,
                    "It is out of range.",
                    "Pass a number above 0."
                    if name == "eps"
                    else "Pass a number from 0 to below 1."
                    if top == 1
                    else "Pass 0 or more.",
                )
            args[name] = number
    if args.get("nesterov") and not args["momentum"]:
        raise PlanError(
            "optimizer_args['nesterov']",
            True,
            "Nesterov looks ahead along the momentum, and there is none.",
            "Add momentum=0.9.",
        )
    return args


def model_args(model: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """A named model's arguments, all of them: the given ones checked, the defaults filled in."""
    args = {key: list(value) if isinstance(value, list) else value for key, value in MODEL_ARGS[model].items()}
    _known("model_args", given, args, model)
    for name, value in given.items():
        label = f"model_args[{name!r}]"
        if name in ("layers", "filters"):
            sizes = list(value) if isinstance(value, list | tuple) else None
            if sizes is not None and len(sizes) > MOST_LAYERS:
                why = f"It lists {len(sizes):,} layers."
                raise PlanError(label, f"<{len(sizes):,} sizes>", why, f"Pass {MOST_LAYERS:,} at most.")
            if sizes is None or (name == "filters" and not sizes):
                raise PlanError(
                    label, value, "It lists the size of each layer.", f"Pass a list, such as {args[name]}."
                )
            args[name] = [_whole(label, size, 1, 1_000_000) for size in sizes]
        elif name == "activation":
            args[name] = _one_of(label, value, ACTIVATIONS)
        else:
            number = _number(label, value)
            if not 0 <= number < 1:
                raise PlanError(label, value, "It is the fraction of values set to zero.", "Pass 0 to below 1.")
            args[name] = number
    return args


def _json_ready(value: Any) -> Any:
    """The value as JSON can hold it; what it cannot hold is told in words."""
    if isinstance(value, Mapping):
        return {str(key): _json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_ready(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value if value is None or isinstance(value, str | bool | int | float) else shown(value)


def _known(field_name: str, given: Mapping[str, Any], args: Mapping[str, Any], owner: str) -> None:
    for name in given:
        if name not in args:
            near = difflib.get_close_matches(name, list(args), 1)
            here = f"{owner} takes {', '.join(args) or 'no arguments'}"
            raise PlanError(
                f"{field_name}[{name!r}]",
                given[name],
                f"{owner} has no such argument.",
                f"Did you mean {near[0]}?" if near else "Leave it out.",
                here,
            )


def _alias(framework: Any) -> Any:
    aliases = {"torch": "pytorch", "tf": "tensorflow", "keras": "tensorflow"}
    text = framework.lower() if isinstance(framework, str) else framework
    return aliases.get(text, text) if isinstance(text, str) else text


def _one_of(name: str, value: Any, choices: tuple[str, ...]) -> str:
    if isinstance(value, str) and value in choices:
        return value
    near = difflib.get_close_matches(value, choices, 1) if isinstance(value, str) else []
    do = f"Did you mean {near[0]!r}?" if near else "Pass one of the names."
    raise PlanError(name, value, "There is no such choice.", do, ", ".join(choices))


def _accelerator(value: Any) -> str:
    text = value.strip().lower() if isinstance(value, str) else ""
    text = {"cuda": "gpu"}.get(text, text.replace("cuda:", "gpu:"))
    if text in ACCELERATORS or re.fullmatch(r"gpu:\d{1,4}", text):
        return text
    raise PlanError(
        "accelerator",
        value,
        "There is no such accelerator.",
        "Pass one of the names.",
        "auto, cpu, gpu, gpu:1 (by index), mps, tpu",
    )


# What does the same in the other framework.
_COUNTERPARTS = {"mirrored": "ddp", "multi_worker": "ddp", "ddp": "mirrored", "fsdp": "mirrored"}


def _strategy(value: Any, framework: str) -> str:
    mine = ("auto", *STRATEGIES[framework])
    if isinstance(value, str) and value not in mine and value in _COUNTERPARTS:
        other = "TensorFlow" if framework == "pytorch" else "PyTorch"
        why = f"It is a strategy of {other}, and the framework is {framework}."
        raise PlanError("strategy", value, why, f"Pass {_COUNTERPARTS[value]!r}.", ", ".join(mine))
    return _one_of("strategy", value, mine)


def _whole(name: str, value: Any, least: int, most: int = MOST) -> int:
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or not least <= value <= most:
        limits = f"{least} to {most:,}" if most != MOST or (whole and value > most) else f"{least} or more"
        raise PlanError(name, value, "It counts something.", f"Pass a whole number, {limits}.")
    return int(value)


def _number(name: str, value: Any) -> float:
    try:
        number = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
    except OverflowError:  # a whole number beyond all floats
        number = math.inf
    if not math.isfinite(number):
        raise PlanError(name, value, "It is not a number that can be used.", "Pass a finite number.")
    return number
