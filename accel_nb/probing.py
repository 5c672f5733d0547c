"""The facts about one framework: from its package's files at once, from a probe in its own process when asked.

The kernel imports no framework. What the files tell (version, the CUDA it was built for) costs a few milliseconds.
What only the framework knows (does it see the card, does a convolution run) is told by `programs/*/probe.py`; its
answer is kept in memory and, when nothing went wrong, in the cache directory.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from accel_nb.framework_facts import MODULES, Facts, facts_from, installed
from accel_nb.machine import Machine, cache_directory, machine

PROGRAMS = Path(__file__).parent / "programs"
PROBES = {"pytorch": PROGRAMS / "pytorch" / "probe.py", "tensorflow": PROGRAMS / "keras" / "probe.py"}
PROBE_SECONDS = 120.0  # a first import from a slow disk on a busy machine takes most of a minute
KEPT_STDERR = 20_000  # characters, from the end: where the reason stands
KEPT_FILES = 20

_lock = threading.Lock()
_locks = {framework: threading.Lock() for framework in PROBES}
_answers: dict[str, Facts] = {}


def known(framework: str, here: Machine | None = None) -> Facts:
    """What can be told at once: the files' facts, with the probe's answer if there is one already."""
    base = installed(framework)
    if not base.installed or base.tpu_build:
        return base
    return _kept(_key(base, here or machine()), base) or base


def probe(framework: str, here: Machine | None = None, refresh: bool = False) -> Facts:
    """All that is known, the probe's answer included: from memory, from the cache, or by running it (seconds).

    `refresh`: run it anyway. A framework that is not there, or whose import could open a TPU, is not run.
    """
    if refresh:
        importlib.invalidate_caches()  # a package installed a moment ago counts
    base = installed(framework)
    if not base.installed or base.tpu_build:
        return base
    here = here or machine()
    key = _key(base, here)
    with _locks[framework]:  # a second asker waits for the first one's answer
        kept = None if refresh else _kept(key, base)
        if kept:
            return kept
        told = run_probe(framework)
        if told["outcome"] in ("crashed", "timed out") and here.has_nvidia:
            # A card or its driver can end the process; the CPU may be fine.
            without = run_probe(framework, hide_gpus=True)
            told = {**{name: value for name, value in without.items() if name != "devices"}, **told}
        facts = facts_from(told, base)
        with _lock:
            _answers[key] = facts
        # Trouble may be over a moment later, and a card that is not seen may be seen after the next fix.
        if facts.clean and (facts.devices or facts.cuda_build is False or not here.has_nvidia):
            _save(key, facts)
        return facts


def _kept(key: str, base: Facts) -> Facts | None:
    with _lock:
        answer = _answers.get(key)
    if answer is None:
        answer = _load(key, base)
        if answer is not None:
            with _lock:
                _answers[key] = answer
    if answer is not None and answer.packages != base.packages:
        # what lies beside the framework (JAX, torch_xla) may have come or gone since, and costs nothing to ask
        answer = replace(answer, packages=base.packages)
    return answer


def forget() -> None:
    """Forget what earlier probes told in this process; the cache directory stays."""
    with _lock:
        _answers.clear()


def run_probe(
    framework: str, seconds: float = PROBE_SECONDS, script: Path | None = None, hide_gpus: bool = False
) -> dict[str, Any]:
    """Run the probe in a process of its own; what it told, with `outcome`, `stderr` and `returncode` added.

    Never raises for anything the process does, and ends within `seconds` and a moment: a probe that hangs is
    killed, with all it started.
    """
    from accel_nb.launch import environment

    command = [sys.executable, str(script or PROBES[framework])]
    env = environment()
    if hide_gpus:
        env["CUDA_VISIBLE_DEVICES"] = "-1"
    # Files, not pipes: a grandchild that keeps a pipe open would keep this waiting.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                env=env,
                cwd=tempfile.gettempdir(),
                start_new_session=True,
            )
        except OSError as error:
            return {"outcome": "crashed", "stderr": f"The probe does not start: {error}", "devices": []}
        outcome = "ok"
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            outcome = "timed out"
        finally:
            _end(process)
        told = _last_json(_tail(out, 1_000_000))
        if outcome == "ok" and process.returncode:
            outcome = "crashed"
        elif outcome == "ok" and not told:
            outcome = "unreadable"
        return {**told, "outcome": outcome, "stderr": _tail(errors, KEPT_STDERR), "returncode": process.returncode}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the probe, its children too."""
    if process.poll() is None:
        with suppress(OSError):
            if hasattr(os, "killpg"):
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
    process.wait()


def _tail(stream: Any, size: int) -> str:
    end = stream.seek(0, os.SEEK_END)
    stream.seek(max(0, end - size))
    return str(stream.read().decode(errors="replace"))


def _last_json(text: str) -> dict[str, Any]:
    """The last line that is a JSON object; a library may print before and after it."""
    for line in reversed(text.splitlines()):
        if line.lstrip().startswith("{"):
            with suppress(ValueError, RecursionError):
                told = json.loads(line)
                if isinstance(told, dict):
                    return told
    return {}


def _key(base: Facts, here: Machine) -> str:
    """Everything the answer may depend on, as one short text: another value means another probe."""
    watched = {name: os.environ.get(name) for name in WATCHED}
    script = PROBES[base.framework]
    spec = importlib.util.find_spec(MODULES[base.framework])
    parts = [
        base.framework,
        hashlib.sha256(script.read_bytes()).hexdigest(),
        [sys.executable, sys.prefix, _changed(sys.executable)],
        [base.distribution, base.version, base.keras, _changed(spec.origin if spec and spec.origin else "")],
        _nvidia_packages(),
        [here.driver, here.driver_cuda, [[gpu.name, gpu.uuid] for gpu in here.gpus]],
        watched,
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


# Set differently, these show a framework other cards or other libraries.
WATCHED = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "CUDA_HOME",
    "HIP_VISIBLE_DEVICES",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "PYTHONPATH",
)


def _changed(path: str) -> float:
    try:
        return Path(path).stat().st_mtime
    except OSError:
        return 0.0


def _nvidia_packages() -> list[str]:
    """The CUDA libraries installed by pip: `tensorflow[and-cuda]` changes these and not TensorFlow's version."""
    found = set()
    for place in sys.path:
        with suppress(OSError):
            found |= {
                entry.name for entry in Path(place).iterdir() if re.match(r"nvidia_.*\.dist-info$", entry.name)
            }
    return sorted(found)


def _load(key: str, base: Facts) -> Facts | None:
    """A kept answer; None if there is none or it cannot be used."""
    try:
        told = json.loads((cache_directory() / "probes" / f"{key}.json").read_text(encoding="utf-8"))
        if told["key"] != key or told["facts"]["outcome"] != "ok":
            return None
        return facts_from(told["facts"], base)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _save(key: str, facts: Facts) -> None:
    """Keep an answer; without a word if the directory cannot be written."""
    folder = cache_directory() / "probes"
    told = {part.name: getattr(facts, part.name) for part in fields(Facts)}
    told["devices"] = [vars(device) for device in facts.devices]
    written = folder / f".{key}-{os.getpid()}-{time.monotonic_ns()}"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        written.write_text(json.dumps({"key": key, "facts": told}), encoding="utf-8")
        written.replace(folder / f"{key}.json")
        kept = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for old in kept[:-KEPT_FILES]:
            old.unlink()
