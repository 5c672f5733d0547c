"""The verdict on NVIDIA GPUs.

The order of the questions is that of the stack: is the hardware there, does its driver answer, is the framework
there and built for it, may it see the card, does the build fit driver and card, do its libraries load, does a
convolution run. A probe that used the card successfully ends the matter before any of them.
"""

from __future__ import annotations

import re

from accel_nb.framework_facts import Facts
from accel_nb.machine import Machine
from accel_nb.reasons import (
    COLAB_GPU,
    COLAB_RESET,
    FIRST_DRIVERS,
    NAMES,
    Answer,
    Case,
    cannot_start,
    checking,
    dotted,
    last_words,
    no,
    pair,
    ready,
    short,
)


def judge_gpu(case: Case) -> Answer:
    machine, facts = case.machine, case.facts
    good = [device for device in facts.devices if device.smoke == "ok"]
    if good and not facts.keras_error:
        return ready(
            f"{case.name} runs on {_cards(case, [device.index for device in good])}{_numbers(case)}.",
            devices=[device.index for device in good],
            failed={device.index: device.smoke for device in facts.devices if device.smoke != "ok"},
        )
    for question in (_hardware, cannot_start, _build, _visibility, _fit, _libraries):
        trouble = question(case)
        if trouble:
            return trouble
    if facts.outcome == "not run":
        return checking(case)
    told = _told(facts) or "it sees no GPU and does not say why."
    text = f"{case.name} cannot use {_cards(case)}{_numbers(case)}: {short(told, 400)}"
    smokes = " ".join(device.smoke for device in facts.devices)
    if re.search(r"out of memory|OOM|RESOURCE_EXHAUSTED", smokes):
        fix = "End the program that holds the memory (nvidia-smi names it), often an earlier notebook's kernel."
        return no("gpu_memory_full", text, fix, error=told)
    fix = COLAB_RESET if machine.colab else "Restart the machine (a card or driver in a bad state recovers so)."
    return no("smoke_failed", text, fix, error=told)


def _hardware(case: Case) -> Answer | None:
    machine = case.machine
    if machine.gpus:
        return None
    if machine.wsl and not machine.nvidia_pci:
        text = f"No NVIDIA driver answers inside WSL{_because(machine)}."
        return no("no_driver", text, "Install the NVIDIA driver on Windows (not in WSL), then: wsl --shutdown")
    if not machine.has_nvidia:
        if machine.colab:
            return no("colab_runtime", "This Colab runtime has no GPU.", COLAB_GPU)
        text = "This machine has no NVIDIA GPU."
        if machine.mps:
            return no("no_gpu", text, "Use the Apple GPU: accelerator='mps'.")
        return no("no_gpu", text, "Use accelerator='cpu' here, or a machine with an NVIDIA GPU.")
    if machine.driver_error:
        text = f"The NVIDIA driver does not answer: {short(machine.driver_error)}"
        fix = COLAB_RESET if machine.colab else "Restart the machine (needed after each driver update)."
        return no("driver_broken", text, fix, error=machine.driver_error)
    if machine.driver_loaded and not machine.nvidia_nodes:
        text = f"The NVIDIA driver {machine.driver} is loaded, but this container was given no GPU.".replace(
            "  ", " "
        )
        return no("no_gpu_in_container", text, "Start the container with: --gpus all")
    count = f"{machine.nvidia_pci} NVIDIA cards" if machine.nvidia_pci > 1 else "An NVIDIA card"
    fix = COLAB_RESET if machine.colab else "Install the NVIDIA driver for this system, then restart the machine."
    return no("no_driver", f"{count} found, but no driver answers.", fix)


def _because(machine: Machine) -> str:
    return f" ({short(machine.driver_error)})" if machine.driver_error else ""


def _build(case: Case) -> Answer | None:
    """A build without CUDA; the files tell this before any probe."""
    if case.facts.cuda_build is not False:
        return None
    text = f"{case.name} is a CPU-only build; the machine has {_cards(case)}."
    if case.machine.colab:
        return no("colab_replaced", text, COLAB_RESET)
    if case.framework == "pytorch":
        fix = "Install the CUDA build, with the command that pytorch.org/get-started shows for this system."
    elif case.machine.system == "Windows":
        fix = "Use WSL2 (TensorFlow has no GPU code for Windows since 2.11): pip install 'tensorflow[and-cuda]'"
    elif case.facts.distribution not in ("", "tensorflow"):
        fix = f"pip uninstall -y {case.facts.distribution}, then: pip install 'tensorflow[and-cuda]'"
    else:
        fix = "pip install --force-reinstall 'tensorflow[and-cuda]'"
    return no("cpu_build", text, fix)


def _visibility(case: Case) -> Answer | None:
    machine = case.machine
    if machine.visible or machine.visible_devices is None:
        return None
    text = f"CUDA_VISIBLE_DEVICES={machine.visible_devices!r} hides {_cards(case, every=True)}."
    fix = "Run here: import os; os.environ.pop('CUDA_VISIBLE_DEVICES'). The next run sees the GPU."
    return no("hidden", text, fix, visible_devices=machine.visible_devices)


# PyTorch's, the CUDA runtime's and (for portable code made by a newer CUDA) the driver's words for it.
TOO_OLD = r"driver on your system is too old|driver version is insufficient|unsupported toolchain"


def _fit(case: Case) -> Answer | None:
    """Does the build fit the driver and the card? Only asked once the probe has failed to use the card."""
    machine, facts = case.machine, case.facts
    if facts.outcome == "not run":
        return None
    told = _told(facts)
    built = pair(facts.cuda)
    # Within one generation an older driver is enough; and where cards are listed, the driver was new enough.
    newer = bool(built and machine.driver_cuda and built[0] > machine.driver_cuda[0] and not facts.devices)
    if newer or re.search(TOO_OLD, told):
        runs = f"CUDA {dotted(machine.driver_cuda)}" if machine.driver_cuda else "an older CUDA"
        text = f"{case.name} is built for CUDA {facts.cuda}; the driver ({machine.driver}) runs {runs} at most."
        if machine.colab:
            return no("colab_replaced", text, COLAB_RESET, build_cuda=facts.cuda, driver_cuda=machine.driver_cuda)
        first = FIRST_DRIVERS.get(built[0]) if built and newer else None
        least = f"version {first}" if first else f"one for CUDA {facts.cuda}"
        where = " on Windows" if machine.wsl else ""
        fix = f"Update the NVIDIA driver{where} to {least} or newer."
        return no("driver_too_old", text, fix, build_cuda=facts.cuda, driver_cuda=machine.driver_cuda)
    cards: dict[str, tuple[int, int] | None] = {gpu.name: gpu.capability for gpu in machine.visible_gpus}
    cards.update((device.name, device.capability) for device in facts.devices)
    arch_list = facts.arch_list
    lacking = [name for name, can in cards.items() if can and arch_list and not runs_on(can, arch_list)]
    if (lacking and len(lacking) == len(cards)) or "no kernel image is available" in told:
        lacking = lacking or list(cards)
        shown = ", ".join(f"{name} ({dotted(cards[name])})" for name in lacking)
        made_for = ", ".join(arch_list) or "others"
        text = f"{case.name} has no code for {shown}: it was built for the compute capabilities {made_for}."
        newest = max(filter(None, map(_architecture, arch_list)), default=(0, 0))
        too_new = any((cards[name] or newest) > newest for name in lacking)
        fix = f"Install {'a newer' if too_new else 'an older'} {NAMES[case.framework]}, one built for this card."
        return no("architecture", text, fix, arch_list=list(facts.arch_list))
    return None


def _libraries(case: Case) -> Answer | None:
    """CUDA libraries that are not found or too old."""
    facts, colab = case.facts, case.machine.colab
    told = f"{_told(facts)}\n{facts.stderr}"
    versions = _cudnn_versions(told)
    if versions:
        loaded, wanted = versions
        text = f"{case.name} wants cuDNN {wanted} or newer, but cuDNN {loaded} is loaded."
        fix = f"pip install --upgrade nvidia-cudnn-cu{(facts.cuda or '12').partition('.')[0]}"
        if case.framework == "pytorch":
            fix = "Take the older cuDNN out of LD_LIBRARY_PATH: PyTorch brings its own."
        reason = "colab_replaced" if colab else "cudnn_old"
        return no(reason, text, COLAB_RESET if colab else fix, built=wanted, loaded=loaded)
    no_cudnn = "DNN library is not found" in told  # the card is listed, and the first convolution fails
    if case.framework != "tensorflow" or facts.outcome == "not run" or (facts.devices and not no_cudnn):
        return None
    missing = list(facts.missing_libraries) or _missing_in(told)
    if not missing and "Cannot dlopen some GPU libraries" not in facts.stderr:
        return None
    shown = ", ".join(missing) or "some of them (its log does not say which)"
    text = f"{case.name} does not find its CUDA libraries: {shown}."
    reason = "colab_replaced" if colab else "tf_libraries"
    return no(reason, text, COLAB_RESET if colab else "pip install 'tensorflow[and-cuda]'", missing=missing)


def runs_on(capability: tuple[int, int], arch_list: tuple[str, ...]) -> bool:
    """Whether a build for `arch_list` has code for a card of this compute capability.

    `sm_86` is binary code: it runs on the same major number with an equal or higher minor one. `compute_90` is
    portable code (PTX): it runs on that and everything newer. With the ending `a` it is for that one alone.

    >>> runs_on((8, 9), ("sm_75", "sm_80"))
    True
    >>> runs_on((12, 0), ("sm_80", "sm_90"))
    False
    >>> runs_on((12, 0), ("sm_80", "compute_90"))
    True
    """
    if any(entry.startswith("gfx") for entry in arch_list):  # AMD's names say nothing about compute capabilities
        return True
    for entry in arch_list:
        made_for = _architecture(entry)
        if made_for is None:
            continue
        if entry.endswith("a"):
            fits = capability == made_for
        elif entry.startswith("compute") and not entry.endswith("f"):
            fits = capability >= made_for
        else:
            fits = capability[0] == made_for[0] and capability[1] >= made_for[1]
        if fits:
            return True
    return False


def _architecture(entry: str) -> tuple[int, int] | None:
    found = re.fullmatch(r"(?:sm|compute)_(\d+)(\d)[af]?", entry)
    return (int(found[1]), int(found[2])) if found else None


LIBRARY_GROUPS = {
    "libcudart": "CUDA runtime",
    "libcublas": "cuBLAS",
    "libcufft": "cuFFT",
    "libcurand": "cuRAND",
    "libcusolver": "cuSOLVER",
    "libcusparse": "cuSPARSE",
    "libcudnn": "cuDNN",
}


def _missing_in(log: str) -> list[str]:
    """The groups that TensorFlow's log names as not found."""
    names = re.findall(r"Could not load dynamic library '(lib[a-z]+)|Unable to load (lib[a-z]+)", log)
    groups = [LIBRARY_GROUPS[name] for pair in names for name in pair if name in LIBRARY_GROUPS]
    if "DNN library is not found" in log:
        groups.append("cuDNN")
    return list(dict.fromkeys(groups))


def _cudnn_versions(told: str) -> tuple[str, str] | None:
    """(loaded, wanted) from TensorFlow's or PyTorch's complaint about an older cuDNN."""
    found = re.search(r"Loaded runtime CuDNN library: ([\d.]+\d) but source was compiled with: ([\d.]+\d)", told)
    if found:
        return found[1], found[2]
    found = re.search(
        r"compiled\s+against \(([\d, ]+)\) but (?:found runtime version|linked against) \(([\d, ]+)\)", told
    )
    return (found[2].replace(", ", "."), found[1].replace(", ", ".")) if found else None


def _told(facts: Facts) -> str:
    """What went wrong with the GPU, in the framework's own words."""
    smokes = [device.smoke for device in facts.devices if device.smoke != "ok"]
    return "\n".join([part for part in [*smokes, facts.error] if part]) or last_words(facts).strip()


def _cards(case: Case, indices: list[int] | None = None, every: bool = False) -> str:
    """Names of cards, for a sentence: those with these framework indices, those visible, or all."""
    gpus = case.machine.gpus if every else case.machine.visible_gpus or case.machine.gpus
    names = [gpu.name for gpu in gpus]
    if indices is not None:
        seen = {device.index: device.name for device in case.facts.devices}
        names = [seen.get(i) or (names[i] if i < len(names) else f"GPU {i}") for i in indices]
    return ", ".join(
        f"{names.count(name)} x {name}" if names.count(name) > 1 else name for name in dict.fromkeys(names)
    )


def _numbers(case: Case) -> str:
    """Both CUDA numbers side by side, which people mix up."""
    facts = case.facts
    parts = [f"built for CUDA {facts.cuda}" if facts.cuda else f"built for ROCm {facts.hip}" if facts.hip else ""]
    if case.machine.driver_cuda and facts.cuda:
        parts.append(f"the driver runs up to CUDA {dotted(case.machine.driver_cuda)}")
    if facts.cudnn_loaded:
        parts.append(f"cuDNN {facts.cudnn_loaded}")
    shown = ", ".join(part for part in parts if part)
    return f" ({shown})" if shown else ""
