"""The words of a verdict: every reason by name, and what all accelerators ask of a framework."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from accel_nb.framework_facts import Facts
from accel_nb.loglines import split_log
from accel_nb.machine import Machine

FRAMEWORKS = ("pytorch", "tensorflow")
ACCELERATORS = ("cpu", "gpu", "mps", "tpu")
NAMES = {"pytorch": "PyTorch", "tensorflow": "TensorFlow"}
# The first driver of each CUDA generation. Within a generation an older driver runs a newer build.
FIRST_DRIVERS = {11: 450, 12: 525, 13: 580}
COLAB_GPU = "Runtime → Change runtime type → T4 GPU"
COLAB_TPU = "Runtime → Change runtime type → v5e-1 TPU"
COLAB_RESET = "Reset the runtime: Runtime → Disconnect and delete runtime, then run the notebook from the top."

REASONS = {
    "ready": "usable",
    "checking": "the probe has not answered yet",
    "not_installed": "the framework is not installed",
    "import_failed": "the framework does not import",
    "probe_crashed": "the probe's process ended without an answer",
    "probe_timeout": "the probe gave no answer in time",
    "no_gpu": "no NVIDIA GPU in this machine",
    "colab_runtime": "Colab, with another runtime type than needed",
    "no_driver": "a card, but no driver",
    "driver_broken": "a driver that does not answer",
    "no_gpu_in_container": "a driver, but no card given to this container",
    "cpu_build": "the framework was built for CPUs only",
    "hidden": "CUDA_VISIBLE_DEVICES hides the cards",
    "driver_too_old": "the build wants a newer CUDA than the driver runs",
    "colab_replaced": "Colab, with a framework that does not fit its machine",
    "architecture": "the build has no code for this card",
    "tf_libraries": "TensorFlow does not find its CUDA libraries",
    "cudnn_old": "the cuDNN found is older than the build wants",
    "gpu_memory_full": "the card's memory is taken",
    "smoke_failed": "a tiny convolution fails for another reason",
    "not_apple": "not a Mac with Apple silicon",
    "mps_build": "this PyTorch was built without Apple GPU support",
    "mps_unavailable": "this macOS does not offer the GPU to PyTorch",
    "mps_not_supported": "TensorFlow has no Apple GPU support of its own",
    "no_tpu": "no TPU in this machine",
    "tpu_no_tensorflow": "a TPU image without TensorFlow",
    "tf_no_tpu_kernels": "this TensorFlow has no TPU kernels",
    "tpu_packages": "a package for TPUs is missing or does not fit",
}


@dataclass(frozen=True)
class Verdict:
    """May this framework use this accelerator here? `reason`: a key of `REASONS`; `fix`: "" when usable.

    `details` of a usable GPU: `devices` (indices as the framework counts them), `failed` (index -> why not).
    """

    framework: str
    accelerator: str
    usable: bool
    reason: str
    text: str
    fix: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)


Answer = tuple[bool, str, str, str, dict[str, Any]]


@dataclass(frozen=True)
class Case:
    framework: str
    machine: Machine
    facts: Facts

    @property
    def name(self) -> str:
        return f"{NAMES[self.framework]} {self.facts.version}".strip()


def ready(text: str, **details: Any) -> Answer:
    return True, "ready", text, "", details


def no(reason: str, text: str, fix: str, **details: Any) -> Answer:
    ended = text if text.endswith((".", "…", "!")) else f"{text}."  # a quoted error often has no full stop
    return False, reason, ended, fix, details


def checking(case: Case, usable: bool = False) -> Answer:
    return usable, "checking", f"{case.name} is being checked.", "" if usable else "Wait for the check to end.", {}


# ---- the framework itself


def cannot_start(case: Case) -> Answer | None:
    """Why the framework does not even start; None if it does, or if nothing is known yet."""
    facts, name = case.facts, NAMES[case.framework]
    package = "torch" if case.framework == "pytorch" else "tensorflow"
    if not facts.installed:
        return no("not_installed", f"{name} is not installed in this Python.", f"pip install {package}")
    trouble = facts.import_error or facts.keras_error
    if trouble:
        module = package if facts.import_error else "keras"
        if not facts.import_error and "ModuleNotFoundError" in trouble and "keras" in trouble:
            return no("not_installed", f"{case.name} is here, but Keras is not.", "pip install keras")
        text = f"{case.name} is installed, but `import {module}` fails: {short(trouble)}"
        return no("import_failed", text, f"pip install --force-reinstall {module}", error=trouble)
    if facts.outcome == "timed out":
        text = f"{case.name} gave no answer in time.{last_words(facts)}"
        return no("probe_timeout", text, "Check again: accelerators(refresh=True).", stderr=facts.stderr)
    if facts.outcome in ("crashed", "unreadable") or facts.probe_error:
        text = f"{case.name} ended {_how(facts)} while it was looked at.{last_words(facts)}"
        return no("probe_crashed", text, f"pip install --force-reinstall {package}", stderr=facts.stderr)
    return None


def _how(facts: Facts) -> str:
    code = facts.returncode or 0
    if code == -getattr(signal, "SIGILL", 4):
        return "by an illegal instruction (this processor lacks one that the build needs, such as AVX)"
    if code < 0:
        try:
            return f"by signal {signal.Signals(-code).name}"
        except ValueError:
            return f"by signal {-code}"
    return f"with code {code}" if code else "without an answer"


def last_words(facts: Facts) -> str:
    """The last lines of the probe's log that mean something."""
    lines = split_log("\n".join(part for part in (facts.stderr, facts.probe_error) if part))[0]
    told = [line.strip() for line in lines if line.strip()][-3:]
    return f" Its last words: {short(' / '.join(told), 400)}" if told else ""


def short(text: str, limit: int = 200) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def pair(version: str) -> tuple[int, int] | None:
    found = re.match(r"(\d+)(?:\.(\d+))?", version)
    return (int(found[1]), int(found[2] or 0)) if found else None


def dotted(pair: tuple[int, int] | None) -> str:
    return f"{pair[0]}.{pair[1]}" if pair else "unknown"
