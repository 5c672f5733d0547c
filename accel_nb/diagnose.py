"""Which framework can use which accelerator here; if not, why not, and the one fix. Shown as a table."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from accel_nb.colab import runtime
from accel_nb.errors import AcceleratorError
from accel_nb.framework_facts import Facts
from accel_nb.machine import Machine
from accel_nb.machine import machine as look
from accel_nb.probing import known
from accel_nb.probing import probe as run_probe
from accel_nb.reasons import ACCELERATORS, FRAMEWORKS, NAMES, REASONS, Verdict
from accel_nb.verdicts import verdict

__all__ = [
    "ACCELERATORS",
    "FRAMEWORKS",
    "REASONS",
    "Accelerators",
    "Diagnosis",
    "Verdict",
    "accelerators",
    "check_used",
    "diagnose",
    "verdict",
]


@dataclass(frozen=True)
class Diagnosis:
    """The machine, the facts about each framework, and the verdict on each pair."""

    machine: Machine
    facts: Mapping[str, Facts]
    verdicts: Mapping[tuple[str, str], Verdict]

    def verdict(self, framework: str, accelerator: str) -> Verdict:
        """The verdict on a pair: "pytorch" or "tensorflow", and "cpu", "gpu" (or "gpu:1"), "mps" or "tpu"."""
        kind = str(accelerator).partition(":")[0]
        if (framework, kind) not in self.verdicts:
            pairs = f"frameworks {', '.join(FRAMEWORKS)}; accelerators {', '.join(ACCELERATORS)}"
            raise KeyError(f"There is no verdict on {framework!r} with {accelerator!r}. There are: {pairs}.")
        return self.verdicts[framework, kind]

    def usable(self, framework: str, accelerator: str) -> bool:
        """Whether the framework can use the accelerator here."""
        return self.verdict(framework, accelerator).usable

    def best(self, framework: str) -> str:
        """The accelerator to use if none is asked for: "gpu", else "mps", else "cpu"."""
        return next((kind for kind in ("gpu", "mps") if self.usable(framework, kind)), "cpu")

    @property
    def checking(self) -> bool:
        """Whether some verdicts still wait for a probe."""
        return any(one.reason == "checking" for one in self.verdicts.values())


def diagnose(
    machine: Machine | None = None,
    probes: Mapping[str, Facts] | None = None,
    refresh: bool = False,
    probe: bool = True,
) -> Diagnosis:
    """Judge every framework on every accelerator here.

    Parameters
    ----------
    machine : what is here; looked up if not given.
    probes : framework -> Facts already known (recorded ones in tests); the others are found here.
    refresh : run the probes anew, whatever is kept (seconds; both at the same time).
    probe : False gives a first answer within milliseconds, in which what needs a probe has the reason "checking".
    """
    here = look() if machine is None else machine
    facts = dict(probes or {})
    missing = [framework for framework in FRAMEWORKS if framework not in facts]
    if missing and probe:
        facts.update(_ask(missing, here, refresh))
    elif missing:
        facts.update({framework: known(framework, here) for framework in missing})
    pairs = [(framework, kind) for framework in FRAMEWORKS for kind in ACCELERATORS]
    return Diagnosis(here, facts, {pair: verdict(*pair, here, facts[pair[0]]) for pair in pairs})


def _ask(frameworks: list[str], here: Machine, refresh: bool) -> dict[str, Facts]:
    """Probe several frameworks at the same time.

    Daemon threads, not a pool: an interrupted cell returns at once, and a kernel that ends does not wait for them.
    """
    answers: dict[str, Facts] = {}
    errors: list[BaseException] = []

    def ask(framework: str) -> None:
        try:
            answers[framework] = run_probe(framework, here, refresh)
        except BaseException as error:  # raised again below, in the thread that asked
            errors.append(error)

    threads = [threading.Thread(target=ask, args=(framework,), daemon=True) for framework in frameworks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return answers


def check_used(asked: str, device_used: str, framework: str = "", diagnosis: Diagnosis | None = None) -> None:
    """AcceleratorError, with the reason, if a run asked for one accelerator and runs on another.

    `asked`: "cpu", "gpu", "gpu:1", "mps", "tpu" or "auto" (anything is right). `device_used`: as the framework
    names it, such as "cuda:0", "/GPU:1", "cpu", "xla:0". Costs nothing while both agree.
    """
    kind, _, index = asked.partition(":")
    used, used_index = _device(device_used)
    if kind == "auto" or (kind == used and (not index or used_index in ("", index))):
        return
    if (kind, used) == ("mps", "gpu") and (diagnosis.machine if diagnosis else look()).mps:
        return  # TensorFlow calls the Apple GPU "GPU"
    if kind == used:
        raise AcceleratorError(
            f"Asked for {asked.upper()}, but the run uses {used.upper()}:{used_index} ({device_used}). "
            "Take the number of a GPU that accelerators() lists."
        )
    if not framework:
        framework = "tensorflow" if "tensorflow" in sys.modules else "pytorch"
    why = (diagnosis or diagnose()).verdict(framework, kind)
    told = f"{why.text}\nFix: {why.fix}"
    if why.usable:
        told = "The framework can use it here: the program placed its work elsewhere.\nFix: look at its device."
    raise AcceleratorError(
        f"Asked for {asked.upper()}, got {used.upper()} ({device_used}). {told}\n"
        f"To train there on purpose, pass accelerator={used!r}."
    )


def _device(name: str) -> tuple[str, str]:
    """("gpu", "0") from "cuda:0", "/GPU:0" or "/job:localhost/replica:0/task:0/device:GPU:0"."""
    found = re.search(r"([A-Za-z]+)(?::(\d+))?$", name.strip())
    kind, index = (found[1].lower(), found[2] or "") if found else (name.lower(), "")
    return {"cuda": "gpu", "hip": "gpu", "xla": "tpu"}.get(kind, kind), index


def accelerators(refresh: bool = False) -> Accelerators:
    """What is here, and what each framework can use of it; shows itself as a table.

    `refresh=True` asks the frameworks anew (seconds), for example after an installation. Usable in code too:
    `accelerators().best("pytorch")`, `.usable("tensorflow", "gpu")`, `.verdict(...)`, `.to_dict()`.
    """
    return Accelerators(diagnose(refresh=refresh))


class Accelerators:
    """A diagnosis that shows itself: as text in a terminal, as a table in a notebook."""

    def __init__(self, diagnosis: Diagnosis) -> None:
        self.diagnosis = diagnosis
        self.machine = diagnosis.machine

    def best(self, framework: str) -> str:
        """The accelerator to use if none is asked for: "gpu", else "mps", else "cpu"."""
        return self.diagnosis.best(framework)

    def usable(self, framework: str, accelerator: str) -> bool:
        """Whether the framework can use the accelerator here."""
        return self.diagnosis.usable(framework, accelerator)

    def verdict(self, framework: str, accelerator: str) -> Verdict:
        """Usable or not, the reason's name, a sentence, and the fix."""
        return self.diagnosis.verdict(framework, accelerator)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, ready for JSON: `machine` and, by framework and accelerator, `verdicts`."""
        verdicts: dict[str, dict[str, Any]] = {framework: {} for framework in FRAMEWORKS}
        for (framework, kind), one in self.diagnosis.verdicts.items():
            verdicts[framework][kind] = {**asdict(one), "details": _plain(dict(one.details))}
        return {"machine": _plain(asdict(self.machine)), "verdicts": verdicts}

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        told = machine_lines(self.machine)
        width = max(5, *(len(label) + 1 for label, _ in told))
        lines = [f"{label:<{width}}{text}" for label, text in told]
        lines.append("")
        for one in self._rows():
            head = f"{NAMES[one.framework]:<12}{one.accelerator.upper():<5}{_mark(one)} "
            lines.append(head + one.text)
            if one.fix and not one.usable:
                lines.append(" " * len(head) + f"Fix: {one.fix}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        cell = "padding:.3em .8em;text-align:left;vertical-align:top;border-top:1px solid rgba(128,128,128,.35)"
        faint = "opacity:.75"
        parts = [
            # The notebook's own text colour on its own background: right in light and in dark themes.
            '<div style="color:inherit;line-height:1.45;max-width:64em">',
            "".join(
                f"<div><b>{escape(label)}</b> {escape(text)}</div>" for label, text in machine_lines(self.machine)
            ),
            '<table style="border-collapse:collapse;color:inherit;background:transparent;margin-top:.6em">',
            f'<caption style="text-align:left;{faint}">What each framework can use here</caption><tbody>',
        ]
        for one in self._rows():
            fix = f'<div style="{faint}">Fix: {escape(one.fix)}</div>' if one.fix and not one.usable else ""
            said = "usable" if one.usable else "not usable"
            parts.append(
                f'<tr style="background:transparent"><th scope="row" style="{cell};font-weight:600">'
                f"{escape(NAMES[one.framework])}</th>"
                f'<td style="{cell}">{escape(one.accelerator.upper())}</td>'
                f'<td style="{cell}" title="{said}" aria-label="{said}">{_mark(one)}</td>'
                f'<td style="{cell}">{escape(one.text)}{fix}</td></tr>'
            )
        return "".join([*parts, "</tbody></table></div>"])

    def _rows(self) -> list[Verdict]:
        """All but what is beside the point here: an Apple GPU elsewhere than on a Mac, an NVIDIA GPU on a Mac."""
        beside = ("mps",) if not self.machine.mps else ("gpu",) if not self.machine.has_nvidia else ()
        return [one for one in self.diagnosis.verdicts.values() if one.accelerator not in beside or one.usable]


def _mark(one: Verdict) -> str:
    return "…" if one.reason == "checking" and not one.usable else "✓" if one.usable else "✗"


def machine_lines(machine: Machine) -> list[tuple[str, str]]:
    """The machine in a few lines: (label, text), such as ("GPU", "0: Tesla T4 · 14.6 of 15.0 GiB free · ...")."""
    cpu = machine.cpu
    cores = f"{cpu.cores} core{'s' if cpu.cores != 1 else ''}"
    parts = [cpu.name, cores, *cpu.features[:2], _memory(cpu.memory_free, cpu.memory_total)]
    lines = [("CPU", " · ".join(part for part in parts if part))]
    version = f"driver {machine.driver}" if machine.driver else ""
    if machine.driver_cuda:
        version += f" (runs up to CUDA {machine.driver_cuda[0]}.{machine.driver_cuda[1]})"
    for gpu in machine.gpus:
        capability = f"compute capability {gpu.capability[0]}.{gpu.capability[1]}" if gpu.capability else ""
        hidden = "" if gpu.index in machine.visible else "hidden by CUDA_VISIBLE_DEVICES"
        parts = [
            f"{gpu.index}: {gpu.name}",
            _memory(gpu.memory_free, gpu.memory_total),
            capability,
            version,
            hidden,
        ]
        lines.append(("GPU", " · ".join(part for part in parts if part)))
    if machine.tpu:
        lines.append(("TPU", f"{machine.tpu.chips} x {machine.tpu.generation}"))
    if machine.mps:
        lines.append(("GPU", "Apple silicon, shares the memory of the CPU"))
    if machine.colab:
        lines.append(("Colab", str(runtime(machine))))
    return lines


def _memory(free: int, total: int) -> str:
    gib = 1024**3
    return f"{free / gib:.1f} of {total / gib:.1f} GiB free" if total else ""


def _plain(value: Any) -> Any:
    """Tuples as lists and keys as text, as JSON has them."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value
