"""Which accelerator a run gets: the one asked for if it is usable, else the best one, with the reason."""

from __future__ import annotations

from typing import Any

from accel_nb.errors import PlanError
from accel_nb.plan import FRAMEWORKS
from accel_nb.routes import tpu_route

NAMES = {"pytorch": "PyTorch", "tensorflow": "TensorFlow"}
KINDS = ("gpu", "mps", "tpu", "cpu")


def place(site: Any) -> dict[str, Any]:
    """The accelerator; PlanError, with the fix, for one that the framework cannot use here."""
    plan, made = site.plan, site.made
    framework = plan.framework
    made.engine = framework
    kind, _, number = plan.accelerator.partition(":")
    if plan.strategy == "tpu":
        return _tpu_strategy(site, kind)
    if kind == "tpu":
        return _tpu(site, "accelerator")
    can = [kind for kind in KINDS if _usable(site.diagnosis, framework, kind)]
    if kind == "auto" and "tpu" in can and "gpu" not in can and plan.strategy == "auto":
        made.reasons["accelerator"] = "the TPU is usable, and the fastest here"
        return _tpu(site, "accelerator")
    if "cpu" not in can:  # the framework itself is not right
        verdict = site.diagnosis.verdict(framework, "cpu")
        raise PlanError("framework", framework, verdict.text, verdict.fix, here(site.diagnosis))
    if kind == "auto":
        kind, made.reasons["accelerator"] = _best(site, can)
    elif kind not in can:
        verdict = site.diagnosis.verdict(framework, kind)
        raise PlanError("accelerator", plan.accelerator, verdict.text, verdict.fix, here(site.diagnosis))
    if kind != "gpu":
        return {"accelerator": kind}
    return _gpu(site, number)


def _best(site: Any, can: list[str]) -> tuple[str, str]:
    """The accelerator for a plan that leaves it open, and why; a TPU is looked at before."""
    plan = site.plan
    if "gpu" in can:
        return "gpu", "the GPU is usable, and the fastest here"
    if "mps" in can:
        if plan.strategy in ("auto", "single") and plan.devices in (None, 1) and plan.nodes == 1:
            return "mps", "the Apple GPU is usable, and faster than the CPU"
        return "cpu", "the Apple GPU is one device, which nothing joins with others"
    if "tpu" in can:
        return "cpu", f"the TPU is usable, but not with strategy={plan.strategy!r}"
    return "cpu", f"no GPU: {site.diagnosis.verdict(plan.framework, 'gpu').text}"


def _usable(diagnosis: Any, framework: str, kind: str) -> bool:
    """Whether a framework can use an accelerator here. To a TPU it may have a route through another package."""
    if kind == "tpu":
        return diagnosis.machine.tpu is not None and tpu_route(framework, diagnosis, "tpu").usable
    return bool(diagnosis.verdict(framework, kind).usable)


def _gpu(site: Any, number: str) -> dict[str, Any]:
    plan, made = site.plan, site.made
    verdict = site.diagnosis.verdict(plan.framework, "gpu")
    works, failed = list(verdict.details["devices"]), verdict.details.get("failed", {})  # by the framework's count
    cards = site.machine.visible_gpus
    told = ", ".join(f"gpu:{i} ({cards[i].name})" if i < len(cards) else f"gpu:{i}" for i in works)
    index = int(number) if number else works[0]
    if index in failed:
        why = f"A tiny convolution on it fails: {failed[index].rstrip('.')}."
        raise PlanError("accelerator", plan.accelerator, why, "Pass one that works.", told)
    if index not in works:
        why = f"{NAMES[plan.framework]} sees {len(works) + len(failed)} GPUs, counted from 0."
        raise PlanError("accelerator", plan.accelerator, why, "Pass one of them.", told)
    made.gpu = cards[index].index if index < len(cards) else None
    if plan.accelerator in ("gpu", "auto") and len(works) > 1:
        made.reasons["accelerator"] = f"the first of {len(works)} usable GPUs"
    return {"accelerator": f"gpu:{index}"}


def _tpu_strategy(site: Any, kind: str) -> dict[str, Any]:
    """The strategy "tpu": over the chips that are here or, where the CPU is asked for, its stand-in."""
    if kind in ("gpu", "mps"):
        why = f"It spreads a run over TPU chips, and the accelerator is {kind}."
        raise PlanError(
            "strategy", "tpu", why, "Pass strategy='auto', or accelerator='tpu'.", here(site.diagnosis)
        )
    if kind == "cpu":
        return _stand_in(site)
    if kind == "auto":
        site.made.reasons["accelerator"] = "what the strategy 'tpu' is for"
    return _tpu(site, "strategy" if kind == "auto" else "accelerator")


def _tpu(site: Any, field: str) -> dict[str, Any]:
    """A TPU, by the route that the framework has to it: its own, Keras on JAX, torch_xla or torch_tpu.

    `field`: the one that asked for it, and that a refusal is about.
    """
    plan, made = site.plan, site.made
    route = tpu_route(plan.framework, site.diagnosis, "tpu")
    if not route.usable:
        do = route.fix or "Pass 'auto'."
        if site.machine.tpu is None:
            do = f"{do.rstrip('.')}. To try a TPU's program without one, pass strategy='tpu', accelerator='cpu'."
        raise PlanError(field, getattr(plan, field), route.text, do, here(site.diagnosis))
    made.engine, made.environment = route.engine, dict(route.environment)
    made.reasons["engine"] = route.text
    return {"accelerator": "tpu"}


def _stand_in(site: Any) -> dict[str, Any]:
    """The TPU's program on devices that the CPU plays."""
    plan, made = site.plan, site.made
    route = tpu_route(plan.framework, site.diagnosis, "cpu")
    if not route.usable:
        raise PlanError("strategy", "tpu", route.text, route.fix, here(site.diagnosis))
    made.engine, made.environment = route.engine, dict(route.environment)
    made.reasons["engine"] = route.text
    made.notes.append("A stand-in: the program for TPUs, run on the CPU to see how it works, not to be fast.")
    return {"accelerator": "cpu"}


def here(diagnosis: Any) -> str:
    """What works on this machine, in words."""
    usable = [
        f"{NAMES[framework]} on {kind.upper()}"
        for framework in FRAMEWORKS
        for kind in KINDS
        if _usable(diagnosis, framework, kind)
    ]
    return ", ".join(usable) or "no framework that works"
