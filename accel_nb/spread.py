"""How a run is spread over devices and machines, and what cannot be spread so."""

from __future__ import annotations

import math
from typing import Any

from accel_nb.errors import PlanError
from accel_nb.plan import SEVERAL_MACHINES, STRATEGIES, Plan, plan_from_dict

# A process that has imported PyTorch holds about 0.3 GiB, one with TensorFlow 0.7 GiB: measured on CPU builds.
PROCESS_MEMORY = {"pytorch": 300 * 2**20, "tensorflow": 700 * 2**20}
# Cores that a program sees as devices: generations whose two cores do not join into one. docs.jax.dev, ChipVersion
DEVICES_PER_CHIP = {"v2": 2, "v3": 2, "v2 or v3": 2, "v7x": 2}
OWN_PROCESSES = ("ddp", "fsdp", "multi_worker")  # strategies with a process per device


def replicas(plan: Plan) -> int:
    """Devices that work together, on all machines; of a resolved plan."""
    return (plan.devices or 1) * plan.nodes


def per_replica(plan: Plan, samples: int) -> int:
    """Samples of one batch that a device computes, at most."""
    return math.ceil(min(plan.batch_size, samples) / replicas(plan))


def normalises(plan: Plan) -> bool:
    """Whether the model has batch normalisation; of an own model only its run tells, so it may."""
    return plan.model in ("cnn", "resnet50") or not isinstance(plan.model, str)


def least_part(rows: int, count: int, parts: int) -> int:
    """Rows of a batch that are computed at a time, at least: what batch normalisation has to do with.

    Device r of `count` takes rows r, r + count, ... of the batch, and of these in part j of `parts` the ones at
    j, j + parts, ... A part is what all devices compute at the same time; a part without rows is passed over.

    >>> least_part(64, 2, 1), least_part(7, 2, 2), least_part(5, 4, 2)
    (64, 3, 1)
    """
    share, more = divmod(rows, count)  # `more` devices have one row beyond their share
    last = min(parts - 1, share if more else share - 1)  # the last part with rows, which is the smallest
    return more * math.ceil((share + 1 - last) / parts) + (count - more) * math.ceil((share - last) / parts)


def spread(site: Any) -> dict[str, Any]:
    """Strategy and devices, each with its reason; PlanError for what cannot work together."""
    plan, made, kind = site.plan, site.made, site.kind
    strategy = _strategy(site)
    if plan.nodes > 1 and strategy not in SEVERAL_MACHINES:
        several = [name for name in STRATEGIES[plan.framework] if name in SEVERAL_MACHINES]
        why = f"The strategy {strategy!r} works on one machine."
        do = f"Pass nodes=1, or a strategy for several machines: {' or '.join(map(repr, several))}."
        raise PlanError("nodes", plan.nodes, why, do)
    if strategy == "single":
        if plan.devices not in (None, 1):
            why = "The strategy 'single' is one device."
            raise PlanError("devices", plan.devices, why, "Pass strategy='auto', or devices=1.")
        if kind == "gpu" and plan.devices is None and not _by_index(plan):
            together = _first_gpus(site)
            if together > 1:
                made.notes.append(f"{together} usable GPUs are here; devices={together} uses all of them.")
        devices = 1
    else:
        devices = _devices(site, strategy)
    choices: dict[str, Any] = {"strategy": strategy, "devices": devices}
    made.static_shapes = strategy == "tpu" and made.engine != "torch_tpu"
    _checked(site, plan_from_dict({**plan._fields(), **choices}))
    if devices > 1 and kind == "gpu":
        made.reasons["accelerator"] = "the first GPUs, counted from 0, as many as there are devices"
        choices["accelerator"] = "gpu"
        made.gpus = [card.index for card in site.machine.visible_gpus[:devices]]
    return choices


def _strategy(site: Any) -> str:
    plan, made, kind = site.plan, site.made, site.kind
    if plan.strategy != "auto":
        if kind == "tpu" and plan.strategy != "tpu":
            why = "A TPU has a strategy of its own."
            raise PlanError("strategy", plan.strategy, why, "Pass 'auto', or another accelerator.")
        return str(plan.strategy)
    if kind == "tpu":
        made.reasons["strategy"] = made.reasons.pop("engine", "the TPU's own")
        return "tpu"
    if plan.nodes > 1:
        made.reasons["strategy"] = f"{plan.nodes} machines"
        return "ddp" if plan.framework == "pytorch" else "multi_worker"
    if (plan.devices or 1) > 1:
        made.reasons["strategy"] = f"{plan.devices} devices on one machine"
        return "ddp" if plan.framework == "pytorch" else "mirrored"
    made.reasons["strategy"] = "one device"
    return "single"


# ---- how many devices


def _devices(site: Any, strategy: str) -> int:
    kind = site.kind
    if kind == "gpu":
        return _gpus(site, strategy)
    if kind == "tpu":
        return _chips(site)
    if kind == "mps":
        raise _apple(site.plan)
    return _cpus(site, strategy)


def _by_index(plan: Plan) -> bool:
    """Whether the plan asks for one GPU by its number."""
    return ":" in plan.accelerator


def _first_gpus(site: Any) -> int:
    """How many of the GPUs, counted from 0 without a gap, work: these can work together."""
    works = list(site.diagnosis.verdict(site.plan.framework, "gpu").details["devices"])
    return next((number for number, index in enumerate(works) if number != index), len(works))


def _gpus(site: Any, strategy: str) -> int:
    plan, made = site.plan, site.made
    works = list(site.diagnosis.verdict(plan.framework, "gpu").details["devices"])
    together = _first_gpus(site)
    what = f"{len(works)} usable GPU{'s' * (len(works) != 1)}"
    asked = plan.devices or (1 if _by_index(plan) else len(works))
    if asked > len(works):
        raise PlanError("devices", plan.devices, "So many GPUs are not here.", "Pass fewer.", what)
    if _by_index(plan) and (asked > 1 or plan.accelerator != "gpu:0"):
        why = f"The strategy {strategy!r} takes the first GPUs, counted from 0."
        raise PlanError("accelerator", plan.accelerator, why, "Pass 'gpu', or strategy='single'.", what)
    if asked > together:
        field = "devices" if plan.devices is not None else "nodes" if plan.strategy == "auto" else "strategy"
        cards = site.machine.visible_gpus
        good = ",".join(str(cards[index].index) for index in works if index < len(cards))
        why = f"Several GPUs are the first ones, counted from 0, and GPU {together} does not work."
        do = f"Start the kernel with CUDA_VISIBLE_DEVICES={good} in its environment, or use one GPU."
        raise PlanError(field, getattr(plan, field), why, do, what)
    if plan.devices is None:
        made.reasons["devices"] = "the GPU asked for" if _by_index(plan) else f"all: {what}" if asked > 1 else what
    return int(asked)


def _apple(plan: Plan) -> PlanError:
    field = "nodes" if plan.nodes > 1 else "devices" if (plan.devices or 1) > 1 else "strategy"
    why = "An Apple GPU is one device, and nothing joins it with others."
    do = "Pass accelerator='cpu' to see how it works, or leave strategy, devices and nodes alone."
    return PlanError(field, getattr(plan, field), why, do)


def _chips(site: Any) -> int:
    plan, made, tpu = site.plan, site.made, site.machine.tpu
    available = tpu.chips * DEVICES_PER_CHIP.get(tpu.generation, 1)
    what = f"{tpu.chips} TPU chip{'s' * (tpu.chips != 1)}"
    if available != tpu.chips:
        what += f" with {available} devices"
    if made.engine == "torch_tpu":
        available, what = 1, f"{what}, of which torch_tpu's program uses one"
    if plan.devices is None:
        made.reasons["devices"] = f"all: {what}" if available > 1 else what
    elif plan.devices > available:
        raise PlanError("devices", plan.devices, "So many devices are not here.", "Pass fewer.", what)
    elif plan.devices < available and made.engine != "keras_jax":
        why = "A program of this route takes all of a TPU's devices."
        raise PlanError("devices", plan.devices, why, f"Pass {available}, or leave it out.", what)
    return int(plan.devices or available)


def _cpus(site: Any, strategy: str) -> int:
    plan, made = site.plan, site.made
    if plan.devices is None:
        if plan.nodes > 1:
            made.reasons["devices"] = "one on each machine"
            return 1
        if strategy == "tpu":
            made.reasons["devices"] = "one, as most TPUs that one can get have one chip"
            return 1
        made.reasons["devices"] = "the least that shows how the strategy works"
        return 2
    if strategy in OWN_PROCESSES:
        need, free = plan.devices * PROCESS_MEMORY[plan.framework], site.machine.cpu.memory_free
        if free and need > free:
            why = f"{plan.devices} processes need about {need / 2**30:.1f} GiB only to start."
            raise PlanError("devices", plan.devices, why, "Pass fewer.", f"{free / 2**30:.1f} GiB free")
    return int(plan.devices)


# ---- what does not go together


def _checked(site: Any, plan: Plan) -> None:
    """Refuse what the chosen spreading cannot do; tell what a person should know of it."""
    made, kind = site.made, site.kind
    count = replicas(plan)
    samples = made.facts.train_samples
    rows = min(plan.batch_size, samples)
    share = per_replica(plan, samples)
    if plan.batch_size < count:
        why = f"{count:,} devices share a batch, and each needs a sample of it."
        raise PlanError("batch_size", plan.batch_size, why, f"Pass {count} or more, or fewer devices.")
    if plan.accumulate > share:
        why = f"A device has {share} sample{'s' * (share != 1)} of a batch to compute in parts."
        do = "Pass 1." if share == 1 else f"Pass 1 to {share}."
        raise PlanError("accumulate", plan.accumulate, why, do)
    if plan.activation_checkpointing and made.engine not in ("pytorch", "torch_tpu"):
        why = "It is built for PyTorch's own program."
        do = "Pass False." if plan.framework == "pytorch" else "Pass False, or framework='pytorch'."
        raise PlanError("activation_checkpointing", True, why, do)
    if normalises(plan):
        _check_normalisation(made, plan, rows, samples)
    if kind == "cpu" and count > 1 and plan.nodes == 1:
        cores = site.machine.cpu.cores
        made.notes.append(
            f"{count} devices share this computer's {cores} core{'s' * (cores != 1)}: "
            "that shows how the strategy works, and is not faster."
        )


def _check_normalisation(made: Any, plan: Plan, rows: int, samples: int) -> None:
    """Batch normalisation works on all rows that the devices compute at a time, and wants two of them."""
    count = replicas(plan)
    named = isinstance(plan.model, str)
    shares = count * plan.accumulate  # of one size each where every step has one shape
    if made.static_shapes and samples < count:
        why = f"Batch normalisation on {count} TPU chips needs a sample for each, and there are {samples}."
        raise PlanError("devices", plan.devices, why, f"Pass {samples} or fewer.")
    if made.static_shapes and rows < shares:
        why = f"Batch normalisation on {count} TPU chips needs a sample for each in every part of a batch."
        raise PlanError("accumulate", plan.accumulate, why, f"Pass 1 to {rows // count}.")
    if made.static_shapes and rows == plan.batch_size and rows % shares:
        parts = f" in each of {plan.accumulate} parts" if plan.accumulate > 1 else ""
        why = f"Batch normalisation on {count} TPU chips needs a batch that they share evenly{parts}."
        raise PlanError("batch_size", plan.batch_size, why, f"Pass {rows - rows % shares}.")
    least = least_part(rows, count, plan.accumulate)
    if least < 2 and named:
        if samples == 1:
            why = "There is one training sample, and batch normalisation needs two in a batch."
            raise PlanError("data", made.facts.label, why, "Pass more samples.")
        why = "Batch normalisation needs two samples at a time, and would get one."
        if plan.accumulate > 1:
            raise PlanError("accumulate", plan.accumulate, why, "Pass a smaller number.")
        raise PlanError("batch_size", plan.batch_size, why, "Pass 2 or more, or model='mlp'.")
    if plan.accumulate > 1:
        who = "Batch normalisation" if named else "Batch normalisation, if the model has any,"
        parts = f"accumulate={plan.accumulate} computes a batch in parts"
        made.notes.append(f"{who} sees {least} of {rows} samples at a time: {parts}.")
