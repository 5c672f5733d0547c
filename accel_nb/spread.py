"""How a run is spread over devices and machines, and what cannot be spread so."""

from __future__ import annotations

import math
from typing import Any

from accel_nb.errors import PlanError
from accel_nb.plan import SEVERAL_MACHINES, STRATEGIES, Plan, plan_from_dict

# A process that has imported PyTorch holds about 0.3 GiB, one with TensorFlow 0.7 GiB: measured on CPU builds.
PROCESS_MEMORY = {"pytorch": 300 * 2**20, "tensorflow": 700 * 2**20}
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


def spread(site: Any) -> dict[str, Any]:
    """Strategy and devices, each with its reason; PlanError for what cannot work together."""
    plan, made, kind = site.plan, site.made, site.kind
    strategy = _strategy(site)
    available, what = _available(site)
    if plan.nodes > 1 and strategy not in SEVERAL_MACHINES:
        several = [name for name in STRATEGIES[plan.framework] if name in SEVERAL_MACHINES]
        why = f"The strategy {strategy!r} works on one machine."
        raise PlanError("nodes", plan.nodes, why, "Pass one that spreads over machines.", ", ".join(several))
    if strategy == "single":
        if plan.devices not in (None, 1):
            why = "The strategy 'single' is one device."
            raise PlanError("devices", plan.devices, why, "Pass strategy='auto', or devices=1.")
        if kind == "gpu" and available > 1:
            made.notes.append(f"{what} are here, and one is used: devices={available} uses all of them.")
        devices = 1
    else:
        devices = _devices(site, strategy, available, what)
    choices = {"strategy": strategy, "devices": devices}
    made.static_shapes = strategy == "tpu"
    _checked(site, plan_from_dict({**plan._fields(), **choices}))
    if devices > 1 and kind == "gpu":
        made.reasons.pop("accelerator", None)
        choices["accelerator"] = "gpu"
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


def _available(site: Any) -> tuple[int, str]:
    """Devices of the chosen kind that can work together here, and in words; 0 where any number can."""
    if site.kind == "gpu":
        works = site.diagnosis.verdict(site.plan.framework, "gpu").details["devices"]
        return len(works), f"{len(works)} usable GPU{'s' if len(works) != 1 else ''}"
    if site.kind == "mps":
        return 1, "One Apple GPU"
    if site.kind == "tpu":
        chips = site.machine.tpu.chips
        return chips, f"{chips} TPU chip{'s' if chips != 1 else ''}"
    return 0, ""


def _devices(site: Any, strategy: str, available: int, what: str) -> int:
    plan, made, kind = site.plan, site.made, site.kind
    if kind == "mps" and (plan.devices or 1) * plan.nodes > 1:
        raise PlanError(
            "devices", plan.devices, "An Apple GPU is one device.", "Pass accelerator='cpu', or devices=1."
        )
    if plan.devices is None:
        if kind == "cpu":
            devices = 1 if strategy == "tpu" or plan.nodes > 1 else 2
            made.reasons["devices"] = (
                "the least that shows how the strategy works" if devices > 1 else "one of them"
            )
        else:
            devices = available
            made.reasons["devices"] = f"all: {what}" if available > 1 else what
        return devices
    if available and plan.devices > available:
        raise PlanError("devices", plan.devices, "So many devices are not here.", "Pass fewer.", what)
    if kind == "gpu" and plan.devices > 1:
        verdict = site.diagnosis.verdict(plan.framework, "gpu")
        first = list(range(plan.devices))
        if ":" in plan.accelerator or list(verdict.details["devices"])[: plan.devices] != first:
            why = "Several GPUs are the first ones, counted from 0, and each must work."
            do = (
                "Pass accelerator='gpu'; CUDA_VISIBLE_DEVICES, set before the kernel starts, hides one that fails."
            )
            raise PlanError("devices", plan.devices, why, do, f"accelerator={plan.accelerator!r}; {what}")
    if kind == "cpu" and strategy in OWN_PROCESSES:
        need, free = plan.devices * PROCESS_MEMORY[plan.framework], site.machine.cpu.memory_free
        if free and need > free:
            why = f"{plan.devices} processes need about {need / 2**30:.1f} GiB only to start."
            raise PlanError("devices", plan.devices, why, "Pass fewer.", f"{free / 2**30:.1f} GiB free")
    return int(plan.devices)


def _checked(site: Any, plan: Plan) -> None:
    """Refuse what the chosen spreading cannot do; tell what a person should know of it."""
    made, kind = site.made, site.kind
    count = replicas(plan)
    samples = made.facts.train_samples
    share = per_replica(plan, samples)
    if plan.batch_size < count:
        why = f"{count} devices share a batch, and each needs a sample of it."
        raise PlanError("batch_size", plan.batch_size, why, f"Pass {count} or more, or fewer devices.")
    if plan.accumulate > share:
        why = f"Each device has {share} samples of a batch to compute in parts."
        raise PlanError("accumulate", plan.accumulate, why, "Pass a smaller number.", f"1 to {share}")
    if plan.activation_checkpointing and made.engine not in ("pytorch", "torch_tpu"):
        why = "It is built for PyTorch's own program."
        raise PlanError("activation_checkpointing", True, why, "Pass framework='pytorch', or False.")
    if made.static_shapes and normalises(plan) and plan.batch_size % count:
        why = f"Batch normalisation on {count} TPU chips needs a batch that they share evenly."
        near = max(count, plan.batch_size - plan.batch_size % count)
        raise PlanError("batch_size", plan.batch_size, why, f"Pass {near}.")
    if kind == "cpu" and count > 1 and plan.nodes == 1:
        cores = site.machine.cpu.cores
        made.notes.append(
            f"{count} devices share this computer's {cores} core{'s' if cores != 1 else ''}: "
            "that shows how the strategy works, and is not faster."
        )
    if plan.accumulate > 1 and normalises(plan):
        made.notes.append(
            f"Batch normalisation sees {math.ceil(share / plan.accumulate) * count} samples at a time: "
            f"accumulate={plan.accumulate} computes a batch in parts."
        )
