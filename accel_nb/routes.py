"""How a framework reaches a TPU, or the CPU that stands in for one. From the packages alone: see `verdicts.py`.

No package is imported to find out: a TPU belongs to one process at a time, and opening it would take it from its
user; torch_tpu ends the process that imports torch where there is no TPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from accel_nb.reasons import COLAB_TPU, Answer, Case, no, pair, ready

# What each engine's process needs before its first import, beyond what every worker gets (see `launch.py`).
ENVIRONMENTS: dict[str, dict[str, str]] = {
    "tensorflow": {},
    "keras_jax": {},  # the program itself picks JAX's platform, before JAX looks for devices
    "torch_xla": {},  # the program itself lets torch_xla look for a TPU, on the bus, and waits for none
    "torch_tpu": {
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"
    },  # `import torch` brings it in; every other worker forbids that
}
LAST_XLA = "2.9"  # the last torch_xla, and the PyTorch that it fits


@dataclass(frozen=True)
class Route:
    """One way to a TPU.

    `engine`: "tensorflow" (tensorflow-tpu), "keras_jax", "torch_xla" or "torch_tpu"; "" if there is none. `text`:
    why this one, or why none. `fix`: what to do, "" if usable. `environment`: variables for its process.
    """

    engine: str
    usable: bool
    text: str
    fix: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


def tpu_route(framework: str, diagnosis: Any, accelerator: str) -> Route:
    """The route of "pytorch" or "tensorflow" to the accelerator "tpu", or to its stand-in on the "cpu"."""
    told = diagnosis.verdict(framework, "tpu")
    if accelerator == "cpu":
        return Route(**told.details["stand_in"])
    engine = told.details["route"]
    return Route(engine, told.usable, told.text, told.fix, ENVIRONMENTS.get(engine, {}))


def judge_tpu(case: Case, cpu: Answer) -> Answer:
    """The verdict on a TPU, with `route` (an engine's name) and `stand_in` (a Route, as a dict) in its details.

    `cpu`: the same framework's verdict on the CPU.
    """
    engine, (usable, reason, text, fix, details) = _to_tpu(case)
    stand_in = _keras_stand_in(case, cpu) if case.framework == "tensorflow" else _torch_stand_in(case)
    return usable, reason, text, fix, {**details, "route": engine, "stand_in": asdict(stand_in)}


def _to_tpu(case: Case) -> tuple[str, Answer]:
    machine = case.machine
    if machine.tpu is None:
        if machine.colab:
            return "", no("colab_runtime", "This Colab runtime has no TPU.", COLAB_TPU)
        return "", no("no_tpu", "This machine has no TPU.", f"Use another accelerator, or Colab: {COLAB_TPU}")
    chips = f"{machine.tpu.chips} x TPU {machine.tpu.generation}"
    return _tensorflow(case, chips) if case.framework == "tensorflow" else _pytorch(case, chips)


# ---- TensorFlow and Keras


def _keras_on_jax(packages: Mapping[str, str], *needed: str) -> bool:
    """Whether Keras can work on JAX: Keras does so since 3.0."""
    return {"keras", "jax", *needed} <= set(packages) and (pair(packages["keras"]) or (0, 0)) >= (3, 0)


def _tensorflow(case: Case, chips: str) -> tuple[str, Answer]:
    facts, packages = case.facts, case.facts.packages
    if facts.tpu_build:
        if "libtpu" in packages:
            return "tensorflow", ready(f"{case.name} is the build for TPUs; here: {chips}.")
        return "tensorflow", no(
            "tpu_packages", f"{chips}, but the package libtpu is missing.", "pip install libtpu"
        )
    if _keras_on_jax(packages, "libtpu"):
        if facts.installed:
            why = f"{case.name} has no TPU kernels; only the package tensorflow-tpu has"
        else:
            why = "TensorFlow is not installed; the package tensorflow-tpu would be the other way"
        text = f"Keras {packages['keras']} on JAX {packages['jax']} drives {chips}: {why}."
        return "keras_jax", ready(text)
    if not facts.installed:
        text = f"{chips}, but neither TensorFlow for TPUs nor Keras on JAX is installed."
        return "", no("tpu_no_tensorflow", text, "pip install tensorflow-tpu, or: pip install keras 'jax[tpu]'")
    text = f"{chips}, but {case.name} has no TPU kernels; only the package tensorflow-tpu has."
    fix = "pip install 'jax[tpu]' (Keras then works on JAX), or replace TensorFlow: "
    fix += f"pip uninstall -y {facts.distribution or 'tensorflow'}, then: pip install tensorflow-tpu"
    return "", no("tf_no_tpu_kernels", text, fix)


def _keras_stand_in(case: Case, cpu: Answer) -> Route:
    packages = case.facts.packages
    if _keras_on_jax(packages):
        text = f"Keras {packages['keras']} on JAX {packages['jax']}, as on a TPU, on devices that the CPU plays."
        return Route("keras_jax", True, text)
    usable, _, text, fix, _ = cpu
    if usable:
        return Route("tensorflow", True, f"TensorFlow's loop for TPUs, on the CPU with {case.name}.")
    return Route("", False, text, f"{fix.rstrip('.')}, or: pip install keras jax")


# ---- PyTorch


def _pytorch(case: Case, chips: str) -> tuple[str, Answer]:
    facts, packages = case.facts, case.facts.packages
    own, xla = pair(facts.version), pair(packages.get("torch_xla", ""))
    if not facts.installed:
        return "", no("not_installed", f"{chips}, but PyTorch is not installed.", _install(None), chips=chips)
    if {"torch_tpu", "libtpu"} <= set(packages) and (own is None or own >= (2, 11)):
        return "torch_tpu", ready(f"{case.name} reaches {chips} through torch_tpu {packages['torch_tpu']}.")
    if xla and own != xla:
        text = f"{chips}, but torch_xla {packages['torch_xla']} does not fit {case.name}."
        return "", no("tpu_packages", text, _install(own))
    missing = [name for name in ("torch_xla", "libtpu") if name not in packages]
    if missing:
        text = f"{chips}, but PyTorch reaches it only through add-ons; missing: {', '.join(missing)}."
        return "", no("tpu_packages", text, _install(own), missing=missing)
    return "torch_xla", ready(f"{case.name} reaches {chips} through torch_xla {packages['torch_xla']}.")


def _install(torch: tuple[int, int] | None) -> str:
    """torch_xla ends with 2.9 and fits one PyTorch each; torch-tpu takes over from 2.11 on."""
    if torch and torch >= (2, 11):
        return "pip install torch-tpu libtpu"
    if torch and torch <= (2, 9):
        return f"pip install 'torch_xla[tpu]=={torch[0]}.{torch[1]}.*'"
    return f"pip install 'torch=={LAST_XLA}.*' 'torch_xla[tpu]=={LAST_XLA}.*'"


def _torch_stand_in(case: Case) -> Route:
    """torch_xla has a runtime for CPUs; torch_tpu has none."""
    facts, xla = case.facts, case.facts.packages.get("torch_xla", "")
    own = pair(facts.version)
    alone = f"In an environment of its own: pip install 'torch=={LAST_XLA}.*' 'torch_xla=={LAST_XLA}.*'"
    if xla and facts.installed and pair(xla) == own:
        return Route("torch_xla", True, f"torch_xla {xla}, as on a TPU, with its runtime for CPUs.")
    if xla and facts.installed:
        return Route("", False, f"The stand-in is torch_xla, and torch_xla {xla} does not fit {case.name}.", alone)
    text = "The stand-in for a TPU is torch_xla with its runtime for CPUs, and torch_xla is not installed."
    if not facts.installed or own is None or own > (2, 9):
        return Route("", False, f"{text} The last one, {LAST_XLA}, wants PyTorch {LAST_XLA}.", alone)
    return Route("", False, text, f"pip install 'torch_xla=={own[0]}.{own[1]}.*'")
