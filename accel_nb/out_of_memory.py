"""An error or the log of a worker -> whether memory ran out, where, what was needed and what there was.

Recognised are types of errors and the frameworks' own sentences, never the word "memory" alone: a model may well
raise an error of its own that speaks of it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accel_nb import machine, process_memory

KIND = "OutOfMemory"  # the `kind` of such an error event
ADVICE = "A smaller batch, or the same batch in parts (accumulate), needs less: run.largest_batch() finds it."
PLACES = {"gpu": "the GPU", "cpu": "this computer", "tpu": "the TPU", "mps": "the Apple GPU", "": "the device"}

# Sentences of PyTorch, TensorFlow, JAX, XLA, CUDA, cuDNN and C++, each with the place whose memory ran out.
SENTENCES = [
    ("gpu", r"\b(?:CUDA|HIP|XPU) out of memory\. Tried to allocate"),
    ("gpu", r"\b(?:CUDA|HIP|XPU) error: out of memory"),
    ("gpu", r"\b(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE|HIPBLAS|MIOPEN)_STATUS_ALLOC_FAILED"),
    ("gpu", r"\bCUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    ("gpu", r"\bCUDA_ERROR_OUT_OF_MEMORY\b|\bcudaErrorMemoryAllocation\b|\bhipErrorOutOfMemory\b"),
    ("gpu", r"Cuda failure (?:\d+ )?'out of memory'"),
    ("gpu", r"initialization on GPU:\d+ failed\. Status: out of memory"),
    ("gpu", r"Dst tensor is not initialized"),  # TensorFlow could not make the place to copy to
    ("mps", r"\bMPS backend out of memory"),
    ("cpu", r"\bCUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
    ("cpu", r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)"),
    ("cpu", r"unable to (?:mmap|allocate shared memory).*Cannot allocate memory"),
    ("cpu", r"\bstd::bad_alloc\b"),
    ("tpu", r"RESOURCE_EXHAUSTED: .*hbm"),
    ("", r"OOM when allocating tensor with shape"),
    ("", r"\bout of memory (?:allocating|while trying to allocate) \d+ bytes"),
    ("", r"RESOURCE_EXHAUSTED: .*(?:out of memory|failed to allocate|attempting to (?:allocate|reserve))"),
]
# Sentences that may have another cause: they count only where little memory is left.
LIKELY = [
    ("gpu", r"Unable to find a valid cuDNN algorithm to run convolution"),
    ("gpu", r"(?:FIND|GET) was unable to find an engine to execute this computation"),
    ("gpu", r"\bNo algorithm worked!"),
    ("cpu", r"could not (?:create|execute) a primitive|could not create a memory object"),
    ("cpu", r"can't start new thread|pthread_create failed"),
]
# What TensorFlow and gRPC also call an exhausted resource.
OTHER_RESOURCES = re.compile(r"no space left on device|larger than max|too many open files|quota", re.IGNORECASE)

_NUMBER = r"([\d.]+) ?([KMGT]?i?B?(?:ytes)?|bytes)\b"
NEEDED = [
    rf"[Tt]ried to allocate {_NUMBER}",
    rf"Unable to allocate {_NUMBER} for an array",
    rf"(?:trying to allocate|[Oo]ut of memory allocating|[Ff]ailed to allocate(?: request for)?) {_NUMBER}",
    rf"[Aa]ttempting to (?:allocate|reserve) {_NUMBER}",
    rf"Used {_NUMBER} of [\d.]+[KMGT] hbm",
    rf"unable to mmap {_NUMBER}",
]
FREE = [rf"of which {_NUMBER} is free", rf"; {_NUMBER} free;", rf"There (?:are|is) {_NUMBER} free"]
TOTAL = [
    rf"total capacity of {_NUMBER}",
    rf"; {_NUMBER} total capacity",
    rf"of {_NUMBER} hbm",
    rf"max allowed: {_NUMBER}",
]
_SIZES = {"half": 2, "bfloat16": 2, "double": 8, "int64": 8, "uint8": 1, "int8": 1, "bool": 1}  # the others: 4


@dataclass(frozen=True)
class Shortage:
    """Memory that ran out.

    `place`: whose, a key of PLACES. `needed`: bytes that were asked for and not got. `free`, `total`: bytes there
    were; None for what is not known. `certain`: False where the error may have another cause.
    """

    place: str
    needed: int | None = None
    free: int | None = None
    total: int | None = None
    certain: bool = True

    def __str__(self) -> str:
        """One or two sentences, in GiB."""
        figures = []
        if self.needed is not None:
            figures.append(f"{gib(self.needed)} GiB more were needed")
        if self.free is not None and self.total is not None:
            figures.append(f"{gib(self.free)} of {gib(self.total)} GiB were free")
        elif self.free is not None or self.total is not None:
            known, word = (self.free, "free") if self.free is not None else (self.total, "there in all")
            figures.append(f"{gib(known or 0)} GiB were {word}")
        head = "Out of memory" if self.certain else "Most likely out of memory"
        told = f": {', and '.join(figures)}" if figures else ""
        return f"{head} on {PLACES[self.place]}{told}."

    def fields(self) -> dict[str, Any]:
        """What the error event holds of it; sizes in bytes."""
        return {
            "kind": KIND,
            "text": f"{self} {ADVICE}",
            "place": self.place,
            "needed": self.needed,
            "free": self.free,
            "total": self.total,
            "certain": self.certain,
        }


def gib(size: float) -> str:
    """Bytes as GiB, with as many digits as tell something.

    >>> gib(20 * 2**30), gib(2**29), gib(3 * 2**20)
    ('20.0', '0.50', '0.003')
    """
    value = size / 2**30
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def recognise(error: BaseException, directory: Path | None = None) -> Shortage | None:
    """The shortage of memory that this error tells of; None if it tells of something else.

    An error that was raised from such an error (`raise ... from`) tells of it too. `directory` is the run's: its
    plan knows the accelerator, for figures that the framework does not give.
    """
    seen: BaseException | None = error
    for _ in range(10):
        if seen is None:
            break
        kinds = {kind.__name__ for kind in type(seen).__mro__}
        roots = {kind.__module__.partition(".")[0] for kind in type(seen).__mro__}
        found = shortage(kinds, roots, str(seen), getattr(seen, "errno", None))
        if found is not None:
            return measured(found, directory)
        seen = seen.__cause__
    return _at_the_limit(error)


def _at_the_limit(error: BaseException) -> Shortage | None:
    """A guess for an error of any words, where this process has used up the limit that was set for it.

    Libraries in C that get no memory say so in many ways: HDF5 tells of a closed file, for example.
    """
    if not os.environ.get(process_memory.VARIABLE) or not isinstance(error, RuntimeError | OSError | ValueError):
        return None
    free, total = process_memory.room()
    return Shortage("cpu", free=free, total=total, certain=False) if free < 0.04 * total else None


def shortage(kinds: set[str], roots: set[str], text: str, number: int | None = None) -> Shortage | None:
    """The same from names of the error's types, the packages that define them, and its text, without a look here.

    `number` is the `errno` of an OSError.
    """
    if "MemoryError" in kinds:
        return parsed("cpu", text)
    if "OutOfMemoryError" in kinds and "torch" in roots:
        place = next((p for p, sentence in SENTENCES if re.search(sentence, text)), "gpu")
        return parsed(place, text)
    if "OSError" in kinds and number == errno.ENOMEM:
        return parsed("cpu", text)
    theirs = roots & {"torch", "tensorflow", "keras", "jax", "jaxlib"}
    if not theirs and "RuntimeError" not in kinds:
        return None
    if OTHER_RESOURCES.search(text):
        return None
    if "ResourceExhaustedError" in kinds and "tensorflow" in roots:
        return parsed(_device(text), text)
    if theirs & {"jax", "jaxlib"} and text.startswith("RESOURCE_EXHAUSTED"):
        return parsed("tpu" if re.search("hbm", text, re.IGNORECASE) else "", text)
    for sentences, certain in ((SENTENCES, True), (LIKELY, False)):
        for place, sentence in sentences:
            if re.search(sentence, text, re.DOTALL | re.IGNORECASE):
                return replace(parsed(place or _device(text), text), certain=certain)
    return None


def _device(text: str) -> str:
    """The place in a message of TensorFlow."""
    found = re.search(r"device:(CPU|GPU|TPU):\d", text) or re.search(r"by allocator (cpu|GPU)", text)
    return found[1].lower() if found else ""


def parsed(place: str, text: str) -> Shortage:
    """The figures in a message."""
    needed = _size(NEEDED, text)
    tensor = re.search(r"shape\s*\[([\d,]+)\] and type (\w+)", text)
    if needed is None and tensor:
        needed = math.prod(int(size) for size in tensor[1].split(",")) * _SIZES.get(tensor[2], 4)
    return Shortage(place, needed, _size(FREE, text), _size(TOTAL, text))


def _size(patterns: list[str], text: str) -> int | None:
    """The first of the sizes, in bytes; all of these programs mean 1024 by a kilo."""
    for pattern in patterns:
        found = re.search(pattern, text)
        if found:
            number, unit = found.groups()
            with contextlib.suppress(ValueError):  # "1.2.3"
                return int(float(number) * 1024 ** ("KMGT".find(unit[:1]) + 1 if unit else 0))
    return None


def measured(found: Shortage, directory: Path | None, *, there: bool = True) -> Shortage | None:
    """With what can be measured here for what was not told; None if it was a guess, and memory is there.

    `there`: whether this is the process that ran out.
    """
    saved = _saved(directory)
    if found.place == "":
        found = replace(found, place=str(saved.get("plan", {}).get("accelerator", "")).partition(":")[0])
    if found.place not in PLACES:
        found = replace(found, place="")
    free = total = 0
    if not there:
        return found
    if found.place == "cpu":
        free, total = process_memory.room()
    elif found.place == "gpu":
        card = saved.get("gpu")
        usage = None if card is None else machine.gpu_usage(card)
        if usage is not None:
            free, total = usage.memory_total - usage.memory_used, usage.memory_total
    if not found.certain and (not total or free > 0.1 * total):
        return None
    if found.free is None and found.total is None and total:
        found = replace(found, free=free, total=total)
    return found


def _saved(directory: Path | None) -> dict[str, Any]:
    if directory is not None:
        with contextlib.suppress(OSError, ValueError):
            saved: dict[str, Any] = json.loads((directory / "plan.json").read_text(encoding="utf-8"))
            return saved
    return {}


def in_log(directory: Path) -> Shortage | None:
    """The shortage that the log of a crashed worker tells of: C++ ends a process after its own words."""
    try:
        with (directory / "log.txt").open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 64 * 1024))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        for place, sentence in SENTENCES:
            if re.search(sentence, line, re.IGNORECASE):
                return measured(parsed(place or _device(line), line), directory, there=False)
    return None
