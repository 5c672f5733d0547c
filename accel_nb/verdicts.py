"""Framework x accelerator: usable, or exactly why not and the one fix. Facts in, a sentence out."""

from __future__ import annotations

from accel_nb.framework_facts import Facts
from accel_nb.gpu_verdict import judge_gpu, runs_on
from accel_nb.machine import Machine
from accel_nb.reasons import (
    ACCELERATORS,
    FRAMEWORKS,
    REASONS,
    Answer,
    Case,
    Verdict,
    cannot_start,
    checking,
    no,
    ready,
    short,
)
from accel_nb.routes import judge_tpu

__all__ = ["ACCELERATORS", "FRAMEWORKS", "REASONS", "Verdict", "runs_on", "verdict"]


def verdict(framework: str, accelerator: str, machine: Machine, facts: Facts) -> Verdict:
    """The verdict for one pair, from facts alone: "cpu", "gpu", "mps" or "tpu" with "pytorch" or "tensorflow"."""
    judge = {"cpu": _cpu, "gpu": judge_gpu, "mps": _mps, "tpu": _tpu}[accelerator]
    usable, reason, text, fix, details = judge(Case(framework, machine, facts))
    return Verdict(framework, accelerator, usable, reason, text, fix, details)


def _cpu(case: Case) -> Answer:
    facts = case.facts
    if facts.cpu_smoke == "ok" and not facts.keras_error:
        return ready(f"{case.name} runs on this CPU.")
    trouble = cannot_start(case)
    if trouble:
        return trouble
    if facts.tpu_build:
        return ready(f"{case.name} (the build for TPUs) runs on this CPU.")
    if facts.outcome == "not run":
        return checking(case, usable=True)  # it is installed; that is nearly always enough
    text = f"{case.name} starts, but a tiny convolution on the CPU fails: {short(facts.cpu_smoke)}"
    package = "torch" if case.framework == "pytorch" else "tensorflow"
    return no("smoke_failed", text, f"pip install --force-reinstall {package}", error=facts.cpu_smoke)


# ---- Apple


def _mps(case: Case) -> Answer:
    machine, facts = case.machine, case.facts
    if not machine.mps:
        fix = "Use another accelerator here; 'mps' is the GPU of Apple silicon."
        return no("not_apple", "This is not a Mac with Apple silicon.", fix)
    trouble = cannot_start(case)
    if trouble:
        return trouble
    if case.framework == "tensorflow":
        if any(device.smoke == "ok" for device in facts.devices):
            return ready(f"{case.name} runs on the Apple GPU through tensorflow-metal.", devices=[0])
        if facts.outcome == "not run" and "tensorflow-metal" in facts.packages:
            return checking(case)
        text = f"{case.name} has no support for the Apple GPU of its own."
        return no("mps_not_supported", text, "Use PyTorch for the Apple GPU: framework='pytorch'.")
    if facts.outcome == "not run":
        return checking(case)
    if not facts.mps_built:
        text = f"{case.name} was built without support for the Apple GPU."
        return no("mps_build", text, "pip install --force-reinstall torch (with a Python built for arm64)")
    if not facts.mps_available:
        return no(
            "mps_unavailable", f"macOS does not offer its GPU to {case.name}.", "Update macOS (14 or newer)."
        )
    if facts.mps_smoke != "ok":
        text = f"{case.name} sees the Apple GPU, but a tiny convolution fails: {short(facts.mps_smoke)}"
        return no("smoke_failed", text, "Update PyTorch: pip install --upgrade torch", error=facts.mps_smoke)
    return ready(f"{case.name} runs on the Apple GPU.")


# ---- Google


def _tpu(case: Case) -> Answer:
    return judge_tpu(case, _cpu(case))
