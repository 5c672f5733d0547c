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
    if plan.strategy == "tpu" and kind not in ("auto", "tpu", "cpu"):
        raise PlanError(
            "strategy", "tpu", f"It spreads a run over TPU chips, and the accelerator is {kind}.", "Pass 'auto'."
        )
    if plan.strategy == "tpu" and kind == "auto":
        kind = "tpu"
    if kind == "tpu":
        return _tpu(site)
    cpu = site.diagnosis.verdict(framework, "cpu")
    if plan.strategy == "tpu":
        return _stand_in(site)
    can = [kind for kind in KINDS if site.diagnosis.verdict(framework, kind).usable]
    if kind == "auto" and "tpu" in can and "gpu" not in can and plan.strategy == "auto":
        made.reasons["accelerator"] = "the TPU is usable, and the fastest here"
        return _tpu(site)
    if not cpu.usable:
        raise PlanError("framework", framework, cpu.text, cpu.fix, here(site.diagnosis))
    if kind == "auto":
        if "gpu" in can:
            kind = "gpu"
            made.reasons["accelerator"] = "the GPU is usable, and the fastest here"
        elif "mps" in can and plan.strategy in ("auto", "single"):
            kind = "mps"
            made.reasons["accelerator"] = "the Apple GPU is usable, and faster than the CPU"
        else:
            kind = "cpu"
            made.reasons["accelerator"] = f"no GPU: {site.diagnosis.verdict(framework, 'gpu').text}"
    elif kind not in can:
        verdict = site.diagnosis.verdict(framework, kind)
        raise PlanError("accelerator", plan.accelerator, verdict.text, verdict.fix, here(site.diagnosis))
    if kind != "gpu":
        return {"accelerator": kind}
    return _gpu(site, number)


def _gpu(site: Any, number: str) -> dict[str, Any]:
    plan, made = site.plan, site.made
    verdict = site.diagnosis.verdict(plan.framework, "gpu")
    works, failed = list(verdict.details["devices"]), verdict.details.get("failed", {})  # by the framework's count
    cards = site.machine.visible_gpus
    told = ", ".join(f"gpu:{i} ({cards[i].name})" if i < len(cards) else f"gpu:{i}" for i in works)
    index = int(number) if number else works[0]
    if index in failed:
        why = f"A tiny convolution on it fails: {failed[index]}"
        raise PlanError("accelerator", plan.accelerator, why, "Pass one that works.", told)
    if index not in works:
        why = f"{NAMES[plan.framework]} sees {len(works) + len(failed)} GPUs, counted from 0."
        raise PlanError("accelerator", plan.accelerator, why, "Pass one of them.", told)
    made.gpu = cards[index].index if index < len(cards) else None
    if plan.accelerator in ("gpu", "auto") and len(works) > 1:
        made.reasons["accelerator"] = f"the first of {len(works)} usable GPUs"
    return {"accelerator": f"gpu:{index}"}


def _tpu(site: Any) -> dict[str, Any]:
    """A TPU, by the route that the framework has to it: its own, Keras on JAX, torch_xla or torch_tpu."""
    plan, made = site.plan, site.made
    route = tpu_route(plan.framework, site.diagnosis, "tpu")
    if not route.usable:
        do = route.fix or "Pass 'auto'."
        if site.machine.tpu is None:
            do += " To try the TPU's program without one, pass strategy='tpu', accelerator='cpu'."
        raise PlanError("accelerator", plan.accelerator, route.text, do, here(site.diagnosis))
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
        if diagnosis.verdict(framework, kind).usable
    ]
    return ", ".join(usable) or "no framework that works"
