"""Framework x accelerator: usable, or exactly why not and the one fix. Facts in, a sentence out."""

from __future__ import annotations

from accel_nb.framework_facts import Facts
from accel_nb.gpu_verdict import judge_gpu, runs_on
from accel_nb.machine import Machine
from accel_nb.reasons import (
    ACCELERATORS,
    COLAB_TPU,
    FRAMEWORKS,
    REASONS,
    Answer,
    Case,
    Verdict,
    cannot_start,
    checking,
    no,
    pair,
    ready,
    short,
)

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


# ---- Google. From the PCI bus and the packages alone: opening a TPU to ask it would take it from its user.


def _tpu(case: Case) -> Answer:
    machine, facts, packages = case.machine, case.facts, case.facts.packages
    if machine.tpu is None:
        if machine.colab:
            return no("colab_runtime", "This Colab runtime has no TPU.", COLAB_TPU)
        return no("no_tpu", "This machine has no TPU.", f"Use another accelerator, or Colab: {COLAB_TPU}")
    chips = f"{machine.tpu.chips} x TPU {machine.tpu.generation}"
    keras_on_jax = {"keras", "jax", "libtpu"} <= set(packages)
    if case.framework == "tensorflow":
        if not facts.installed:
            text = f"{chips}, but TPU images hold no TensorFlow any more."
            if keras_on_jax:
                text += " Keras on JAX is here and drives the TPU; tensorflow-tpu would be the other way."
                return no("tpu_no_tensorflow", text, "Use Keras on JAX (KERAS_BACKEND=jax).", keras_on_jax=True)
            return no("tpu_no_tensorflow", text, "pip install tensorflow-tpu", keras_on_jax=False)
        if not facts.tpu_build:
            text = f"{chips}, but {case.name} has no TPU kernels; only the package tensorflow-tpu has."
            if keras_on_jax:
                text += " Keras on JAX (KERAS_BACKEND=jax) is here and drives the TPU too."
            fix = f"pip uninstall -y {facts.distribution or 'tensorflow'}, then: pip install tensorflow-tpu"
            return no("tf_no_tpu_kernels", text, fix, keras_on_jax=keras_on_jax)
        if "libtpu" not in packages:
            return no("tpu_packages", f"{chips}, but the package libtpu is missing.", "pip install libtpu")
        return ready(f"{case.name} is the build for TPUs; here: {chips}.", keras_on_jax=keras_on_jax)
    if not facts.installed:
        return no("not_installed", f"{chips}, but PyTorch is not installed.", _install_xla(None), chips=chips)
    missing = [name for name in ("torch_xla", "libtpu") if name not in packages]
    if not missing or {"torch_tpu", "libtpu"} <= set(packages):
        own, xla = pair(facts.version), pair(packages.get("torch_xla", ""))
        if xla and own != xla and "torch_tpu" not in packages:
            text = f"{chips}, but torch_xla {packages['torch_xla']} does not fit {case.name}."
            return no("tpu_packages", text, _install_xla(own))
        through = "torch_tpu" if "torch_tpu" in packages else "torch_xla"
        return ready(f"{case.name} reaches {chips} through {through} {packages[through]}.", through=through)
    text = f"{chips}, but PyTorch reaches it only through add-ons; missing: {', '.join(missing)}."
    return no("tpu_packages", text, _install_xla(pair(facts.version)), missing=missing)


def _install_xla(torch: tuple[int, int] | None) -> str:
    """torch_xla ends with 2.9 and fits one PyTorch each; torch-tpu takes over from 2.11 on."""
    if torch and torch >= (2, 11):
        return "pip install torch-tpu libtpu"
    if torch and torch <= (2, 9):
        return f"pip install 'torch_xla[tpu]=={torch[0]}.{torch[1]}.*'"
    return "pip install 'torch==2.9.*' 'torch_xla[tpu]==2.9.*'"
