"""A Plan, looked at on this machine and with these data: every open choice made, with its reason, or refused."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from accel_nb import __version__, layers
from accel_nb.errors import PlanError
from accel_nb.facts import Facts, dataset_of, facts_of
from accel_nb.limits import compile_refused, precisions
from accel_nb.placing import NAMES, place
from accel_nb.plan import LEARNING_RATES, Plan, model_name, plan_from_dict, quick
from accel_nb.spread import least_part, normalises, replicas, spread

# What cuDNN, cuBLAS and the framework itself take on a GPU beside the model: measured values are 300 to 600 MiB.
DEVICE_OVERHEAD = 400 * 2**20


class Program(NamedTuple):
    """`text` of program.py, the model.pkl that it reads, if any, and the text in it that makes a user's model."""

    text: str
    pickled: bytes | None
    own: str | None


@dataclass
class Resolved:
    """A plan with nothing left open.

    Attributes
    ----------
    plan : the Plan, every field with its value.
    reasons : field -> why this value, for each choice that was left to us.
    notes : what a person should know before training; plain sentences.
    table : the layers of a named model, with output shapes and parameters; empty for an own model.
    parameters : their sum; None for an own model (the worker counts it).
    memory_needed, memory_total, memory_free : bytes on the device; 0 where unknown.
    drop_last : whether each epoch leaves out its last, smaller batch.
    engine : whose program runs: a name of `joining.ENGINES`, or "torch_tpu" (PyTorch's program on that backend).
    environment : variables that the worker needs before it imports anything.
    replicas, per_replica : devices on all machines, and how many samples of a batch each computes at most.
    """

    asked: Plan
    plan: Plan
    facts: Facts
    reasons: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    table: list[Any] = field(default_factory=list)
    parameters: int | None = None
    memory_needed: int = 0
    memory_total: int = 0
    memory_free: int = 0
    drop_last: bool = False
    data_on_device: bool = True
    gpu: int | None = None  # the card's index as the driver counts, for the meter
    gpus: list[int] = field(default_factory=list)  # all of the run's cards, where it uses several
    engine: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    static_shapes: bool = False  # every step of one shape: XLA compiles once
    loaded: Any = field(default=None, repr=False)  # the Dataset, where it had to be read to be known

    @property
    def data(self) -> dict[str, Any]:
        return self.facts.to_dict()

    @property
    def replicas(self) -> int:
        return replicas(self.plan)

    @property
    def per_replica(self) -> int:
        return math.ceil(min(self.batch_size, self.facts.train_samples) / self.replicas)

    @property
    def batch_size(self) -> int:
        """The global batch as the program computes it: one larger than the data would only be padding."""
        samples = self.facts.train_samples
        if not self.static_shapes or self.plan.batch_size <= samples:
            return self.plan.batch_size
        return samples - samples % (self.replicas * self.plan.accumulate) if self.drop_last else samples

    @property
    def steps_per_epoch(self) -> int:
        full, rest = divmod(self.facts.train_samples, self.batch_size)
        return full if self.drop_last else full + (rest > 0)

    def dataset(self) -> Any:
        """The data themselves, loaded once; from here on the facts are theirs."""
        if self.loaded is None:
            self.loaded = dataset_of(self.plan)
            self.facts = Facts.of(self.loaded)
        return self.loaded

    def settings(self) -> dict[str, Any]:
        """The values of the program's settings block."""
        plan, facts = self.plan, self.facts
        kind, _, index = plan.accelerator.partition(":")
        own = not isinstance(plan.model, str)
        return {
            "MODEL": "own" if own else plan.model,
            "MODEL_ARGS": {} if own else plan.model_args,
            "INPUT_SHAPE": tuple(facts.input_shape),
            "OUTPUTS": facts.outputs,
            "TASK": facts.task,
            "X_SCALE": float(facts.scale),
            "BATCH_SIZE": self.batch_size,
            "EPOCHS": plan.epochs,
            "OPTIMIZER": plan.optimizer,
            "OPTIMIZER_ARGS": plan.optimizer_args,
            "LEARNING_RATE": plan.learning_rate,
            "SCHEDULE": plan.schedule,
            "WARMUP_STEPS": plan.warmup_steps,
            "SEED": plan.seed,
            "ACCELERATOR": kind,
            "DEVICE_INDEX": int(index or 0),
            "PRECISION": plan.precision,
            "COMPILE": plan.compile,
            "DETERMINISTIC": plan.deterministic,
            "CUDNN_BENCHMARK": plan.cudnn_benchmark,
            "DATA_ON_DEVICE": self.data_on_device,
            "DROP_LAST": self.drop_last,
            "VALIDATION": facts.val_samples > 0,
            "STRATEGY": plan.strategy,
            "DEVICES": plan.devices,
            "NODES": plan.nodes,
            "ACCUMULATE": plan.accumulate,
            "ACTIVATION_CHECKPOINTING": plan.activation_checkpointing,
        }

    def program(self, own: str | None = None) -> Program:
        """The program that this plan runs. `own`: the text that makes an own model, where it is known already."""
        from accel_nb.export import program_text

        plan, facts = self.plan, self.facts
        kind, _, index = plan.accelerator.partition(":")
        device = {"cpu": "the CPU", "mps": "the Apple GPU"}.get(kind, f"{kind.upper()} {index or 0}")
        if plan.strategy != "single":
            device = f"{self.replicas} × {kind.upper()} ({plan.strategy})"
        title = f"{NAMES[plan.framework]}: {model_name(plan.model)} on {facts.name}, on {device}."
        engine = "pytorch" if self.engine == "torch_tpu" else self.engine
        pickled = None
        if not isinstance(plan.model, str) and own is None:
            from accel_nb.own_model import own_model

            made = own_model(plan.model, plan.model_args, input_shape=facts.input_shape, outputs=facts.outputs)
            own, pickled = made.text, made.pickled
        return Program(program_text(engine, self.settings(), title, own), pickled, own)

    def __str__(self) -> str:
        """The choices with their reasons, the layers, parameters and memory, as text."""
        lines = [f"{self.facts.label}: {self.facts.summary()}, {self.steps_per_epoch} steps an epoch"]
        for name, value in self.plan.to_dict().items():
            reason = self.reasons.get(name)
            if reason:
                lines.append(f"{name:16} {value!s:12} {reason}")
        if self.table:
            lines.append("")
            for layer in self.table:
                shape = " × ".join(str(size) for size in layer.shape)
                lines.append(f"{layer.label:28} {shape:>16} {layer.parameters:>14,}")
            lines.append(f"{'parameters':28} {'':16} {self.parameters:>14,}")
        if self.memory_needed:
            needed, total = self.memory_needed / 2**20, self.memory_total / 2**30
            lines.append(f"needs about {needed:,.0f} MiB of {total:.1f} GiB to train")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def to_dict(self) -> dict[str, Any]:
        """What plan.json holds."""
        return {
            "accel_nb": __version__,
            "asked": self.asked.to_dict(),
            "plan": self.plan.to_dict(),
            "reasons": self.reasons,
            "notes": self.notes,
            "data": self.data,
            "parameters": self.parameters,
            "memory_needed": self.memory_needed,
            "steps_per_epoch": self.steps_per_epoch,
            "gpu": self.gpu,
            "gpus": self.gpus,
            "engine": self.engine,
            "environment": self.environment,
            "replicas": self.replicas,
            "per_replica": self.per_replica,
        }


def resolve(plan: Plan, *, machine: Any = None, diagnosis: Any = None, facts: Facts | None = None) -> Resolved:
    """Make every open choice of a plan, each with its reason; PlanError or DataError for what cannot run here.

    `machine`, `diagnosis` and `facts` default to what is here: `machine()`, `diagnose()`, the plan's own data.
    """
    from accel_nb.diagnose import diagnose
    from accel_nb.machine import machine as look

    machine = look() if machine is None else machine
    if diagnosis is None:
        diagnosis = diagnose(machine, probe=False)
        kinds = ("gpu", "mps", "tpu") if plan.accelerator == "auto" else (plan.accelerator.partition(":")[0],)
        if any(diagnosis.verdict(plan.framework, kind).reason == "checking" for kind in kinds if kind != "cpu"):
            diagnosis = diagnose(machine)  # seconds, and only where an accelerator waits for its word
    dataset = None
    if facts is None:
        facts, dataset = facts_of(plan)
    made = Resolved(plan, plan, facts, notes=list(dataset.notes) if dataset is not None else [], loaded=dataset)
    site = _Site(plan, made, machine, diagnosis)
    for step in (place, spread, _precision, _compile, _cudnn, _rate, _batches):
        site.choices.update(step(site))
        made.plan = plan_from_dict({**plan._fields(), **site.choices})
    _model(made)
    _memory(made, machine)
    return made


@dataclass
class _Site:
    """What the steps of `resolve` look at, and the choices made so far."""

    plan: Plan
    made: Resolved
    machine: Any
    diagnosis: Any
    choices: dict[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The accelerator without its index."""
        return str(self.choices["accelerator"]).partition(":")[0]


def _precision(site: _Site) -> dict[str, Any]:
    plan, made = site.plan, site.made
    kind = site.kind
    asked = plan.precision
    capability = None
    if kind == "gpu":
        known = [card.capability for card in _cards(made, site.machine) if card.capability]
        capability = min(known, default=None)  # of several cards what the oldest one can
    allowed = precisions(plan.framework, kind, capability)
    if asked == "auto":
        if kind == "gpu" and not allowed["tf32"]:
            made.reasons["precision"] = "this GPU has tensor cores for TF32: float32 range, faster products"
            return {"precision": "tf32"}
        made.reasons["precision"] = (
            "exact and safe on every device; bf16 or fp16 are faster on GPUs that have them"
        )
        return {"precision": "fp32"}
    if allowed[asked]:
        here = ", ".join(name for name, why in allowed.items() if not why)
        raise PlanError("precision", asked, allowed[asked], "Pass one that this device has.", here)
    return {"precision": asked}


def _cards(made: Resolved, machine: Any) -> list[Any]:
    """The GPUs that the run uses."""
    indexes: list[int | None] = [*made.gpus] or [made.gpu]
    return [card for card in machine.gpus if card.index in indexes]


def _compile(site: _Site) -> dict[str, Any]:
    plan, made = site.plan, site.made
    kind = site.kind
    refused = compile_refused(plan.framework, kind)
    if plan.framework == "tensorflow" and not refused and made.replicas > 1:
        refused = "XLA does not compile a step that MirroredStrategy spreads over devices."
    if made.engine == "pytorch" and plan.activation_checkpointing and made.replicas > 1 and normalises(plan):
        refused = "Compiled activation checkpointing would count the statistics of batch normalisation twice."
    if made.engine in ("keras_jax", "torch_xla", "torch_tpu") or made.static_shapes:
        if plan.compile is True:
            made.notes.append("XLA compiles every step of this program; compile=True adds nothing.")
        made.reasons["compile"] = "XLA compiles every step of this program anyway"
        return {"compile": False}
    if plan.compile == "auto":
        long = plan.framework == "tensorflow" or (plan.model in ("cnn", "resnet50") and plan.epochs > 3)
        wants = kind == "gpu" and long and not plan.deterministic
        made.reasons["compile"] = refused or (
            "pays on a GPU" if wants else "compiling takes longer here than it saves"
        )
        return {"compile": bool(wants and not refused)}
    if plan.compile and refused:
        raise PlanError("compile", True, refused, "Pass False or 'auto'.")
    if plan.compile and plan.deterministic and plan.framework == "tensorflow":
        why = "XLA's kernels are outside TensorFlow's promise of deterministic operations."
        raise PlanError("compile", True, why, "Pass compile=False, or deterministic=False.")
    return {"compile": bool(plan.compile)}


def _cudnn(site: _Site) -> dict[str, Any]:
    plan, made = site.plan, site.made
    gpu = site.kind == "gpu"
    if plan.cudnn_benchmark == "auto":
        made.reasons["cudnn_benchmark"] = (
            "there is no cuDNN without an NVIDIA GPU"
            if not gpu
            else "off: deterministic is asked for"
            if plan.deterministic
            else "the shapes stay the same, so the trial pays"
        )
        return {"cudnn_benchmark": gpu and not plan.deterministic}
    if plan.cudnn_benchmark and plan.deterministic:
        raise PlanError(
            "cudnn_benchmark",
            True,
            "The fastest algorithm of a trial may differ from run to run, and deterministic is asked for.",
            "Pass one of the two.",
        )
    if plan.cudnn_benchmark and not gpu:
        made.notes.append("cudnn_benchmark has no effect without an NVIDIA GPU.")
    return {"cudnn_benchmark": bool(plan.cudnn_benchmark)}


def _rate(site: _Site) -> dict[str, Any]:
    plan, made = site.plan, site.made
    if plan.learning_rate is not None:
        return {}
    made.reasons["learning_rate"] = f"the usual one for {plan.optimizer}"
    return {"learning_rate": LEARNING_RATES[plan.optimizer]}


def _batches(site: _Site) -> dict[str, Any]:
    plan, made = site.plan, site.made
    choices: dict[str, Any] = {}
    samples = made.facts.train_samples
    if quick() and plan.epochs > 2:
        choices["epochs"] = 2
        made.reasons["epochs"] = f"2 instead of {plan.epochs}: ACCEL_NB_QUICK is set"
    if plan.batch_size > samples:
        made.notes.append(
            f"The batch of {plan.batch_size} is larger than the {samples} training samples: one step an epoch."
        )
    rest = samples % plan.batch_size
    norm, shares = normalises(plan), made.replicas * plan.accumulate
    if made.static_shapes and norm and rest and (samples > plan.batch_size or samples % shares):
        made.drop_last = True
        made.reasons["drop_last"] = "batch normalisation with steps of one shape has no place for a smaller batch"
        left = samples - made.steps_per_epoch * made.batch_size
        made.notes.append(f"Each epoch leaves out {left} samples, others each time: {made.reasons['drop_last']}.")
    elif rest and norm and samples > plan.batch_size and least_part(rest, made.replicas, plan.accumulate) < 2:
        made.drop_last = True
        if rest == 1:
            made.reasons["drop_last"] = (
                "the last batch would hold one sample, which batch normalisation cannot use"
            )
            who = "one sample, another"
        else:
            made.reasons["drop_last"] = (
                f"a part of the last batch would hold one sample: accumulate={plan.accumulate}"
            )
            who = f"{rest} samples, others"
        made.notes.append(f"Each epoch leaves out {who} each time: {made.reasons['drop_last']}.")
    epochs = choices.get("epochs", plan.epochs)
    total = made.steps_per_epoch * epochs
    if plan.warmup_steps >= total and plan.warmup_steps > 0:
        if "epochs" in choices:
            choices["warmup_steps"] = total - 1
        else:
            raise PlanError(
                "warmup_steps",
                plan.warmup_steps,
                f"The whole run has {total} steps.",
                "Pass fewer.",
                f"{made.steps_per_epoch} steps an epoch, {epochs} epochs",
            )
    return choices


def _model(made: Resolved) -> None:
    from accel_nb.own_model import framework_of

    plan, facts = made.plan, made.facts
    if not isinstance(plan.model, str):
        other = framework_of(plan.model)
        if other is not None and other != plan.framework:
            raise PlanError(
                "model",
                model_name(plan.model),
                f"It is a {NAMES[other]} model, and the framework is {NAMES[plan.framework]}.",
                f"Pass framework={other!r}.",
            )
        return
    if plan.model != "mlp":
        if len(facts.input_shape) != 3:
            raise PlanError(
                "model",
                plan.model,
                f"It looks at images, and one sample here has the shape {facts.input_shape}.",
                "Pass model='mlp', or data of shape (samples, height, width, channels).",
            )
        least = layers.least_size(plan.model, plan.model_args)
        if min(facts.input_shape[:2]) < least:
            height, width, _ = facts.input_shape
            raise PlanError(
                "model",
                plan.model,
                f"It needs images of at least {least}×{least}, and these are {height}×{width}.",
                "Pass larger images or a smaller model." if plan.model == "resnet50" else "Pass fewer filters.",
            )
        if plan.model == "resnet50" and min(facts.input_shape[:2]) < 32:
            made.notes.append("ResNet50 works on 32×32 and more: the images get a border of zeros.")
    made.table = layers.layer_table(plan.model, facts.input_shape, facts.outputs, plan.model_args, plan.framework)
    made.parameters = sum(layer.parameters for layer in made.table)


def _memory(made: Resolved, machine: Any) -> None:
    plan, facts = made.plan, made.facts
    kind = plan.accelerator.partition(":")[0]
    made.memory_total, made.memory_free = machine.cpu.memory_total, machine.cpu.memory_free
    if kind == "tpu":
        made.memory_total = made.memory_free = 0  # nothing here tells it before the TPU is opened
    if kind == "gpu":
        cards = _cards(made, machine)
        made.memory_total = min((card.memory_total for card in cards), default=0)
        made.memory_free = min((card.memory_free for card in cards), default=0)
    need = 0
    if made.table:
        batch = math.ceil(made.per_replica / plan.accumulate)
        need = layers.memory_needed(
            made.table, batch, plan.optimizer, plan.precision, 0, optimizer_args=plan.optimizer_args
        )
    if kind == "cpu":
        need *= plan.devices or 1  # they share this computer's memory
    extra = DEVICE_OVERHEAD if kind == "gpu" else 0
    room = made.memory_free or made.memory_total
    made.data_on_device = not room or facts.nbytes + need + extra < 0.7 * room
    if not made.data_on_device:
        made.reasons["data_on_device"] = (
            "the data do not fit beside the model, so batches are read while it trains"
        )
    made.memory_needed = need + (facts.nbytes if made.data_on_device else 0)
    if not made.table or not made.memory_total:
        return
    if need + extra > made.memory_total:
        raise PlanError(
            "batch_size",
            plan.batch_size,
            f"Training needs about {need / 2**30:.1f} GiB, the device has {made.memory_total / 2**30:.1f} GiB.",
            "Pass a smaller batch or a smaller model.",
        )
    if need + extra > room:
        made.notes.append(
            f"Training needs about {need / 2**30:.1f} GiB, and {room / 2**30:.1f} GiB are free: it may run out."
        )
