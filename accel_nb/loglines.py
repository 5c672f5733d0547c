"""Start-up lines of the frameworks that look alarming and mean nothing: kept off the screen, and nothing else is.

A line is hidden only if all of its message is known here. What is not known is always shown.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator

# The message is what follows TensorFlow's or abseil's prefix: "I0000 00:00:17... 1 port.cc:153] message".
PREFIX = re.compile(
    r"(?:\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: )?"  # TensorFlow before 2.18
    r"(?:[IWEF]\d{4} \d\d:\d\d:[\d.]+\s+\d+ |[IWEF] )"  # level, and abseil's time and thread
    r"\S+:\d+\] "  # file:line]
)

# Each pattern must match a whole message. The comment above it says why the message is harmless.
KNOWN_HARMLESS = tuple(
    re.compile(pattern)
    for pattern in (
        # Logging had not been set up yet when the next lines were written.
        r"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR",
        # oneDNN is TensorFlow's ordinary library on the CPU.
        r"oneDNN custom operations are on\. You may see slightly different numerical results [^.]*\. [^.]*\.",
        # Two parts of TensorFlow register the same CUDA library; the first one serves both.
        r"Unable to register cu[A-Z]+ factory: Attempting to register factory for plugin \w+ when one has [\w ]+",
        r"computation placer already registered\. Please check linkage and avoid linking [\w ]+\.",
        # Says what the binary could do if built for this very processor.
        r"This TensorFlow binary is optimized to use available CPU instructions in [\w -]+\.",
        r"This TensorFlow binary is optimized with oneAPI [^.]*\.",
        r"To enable (?:them|the following instructions: [\w .]+,) in other operations, rebuild [\w ]+\.",
        # What a TensorFlow with CUDA says where there is no GPU. That a GPU was asked for and is not used is
        # found, with its reason, by comparing devices, not by these lines.
        r"Could not find cuda drivers on your machine, GPU will not be used\.",
        r"failed call to cuInit: (?:INTERNAL: CUDA error: Failed call to cuInit: )?UNKNOWN ERROR \(303\)",
        r"failed call to cuInit: (?:INTERNAL: CUDA error: Failed call to cuInit: )?CUDA_ERROR_NO_DEVICE: [\w -]+",
        r"no NVIDIA GPU device is present: /dev/nvidia0 does not exist",
        r"retrieving CUDA diagnostic information for host: \S+",
        r"hostname: \S+",
        # TensorRT serves finished models; training does not use it.
        r"TF-TRT Warning: Could not find TensorRT",
        r"TF-TRT Warning: Cannot dlopen some TensorRT libraries\..*",
        # Virtual machines do not tell which memory is near a card.
        r"successful NUMA node read from SysFS had negative value \(-1\), but there must be .*",
        # A card at work.
        r"Created device \S+ with \d+ MB memory:\s+-> device: \d+, name: .*, compute capability: [\d.]+\w*",
        r"XLA service 0x[0-9a-f]+ initialized for platform \w+ \(this does not guarantee [\w ]+\)\. Devices:",
        r"StreamExecutor (?:\[\d+\]|device \(\d+\)): .*",
        r"Loaded cuDNN version \d+",
        r"Compiled cluster using XLA!\s+This line is logged at most once for the lifetime of the process\.",
        r"disabling MLIR crash reproducer, set env var `MLIR_CRASH_REPRODUCER_DIRECTORY` to enable\.",
        # The end of a data set is how a loop over it ends.
        r"Local rendezvous is aborting with status: OUT_OF_RANGE: End of sequence",
    )
)


def is_harmless(line: str) -> bool:
    """Whether this line is a known harmless one."""
    message = PREFIX.sub("", line.strip(), count=1).strip()
    return any(pattern.fullmatch(message) for pattern in KNOWN_HARMLESS)


def split_log(text: str) -> tuple[list[str], list[str]]:
    """The lines to show, in order, and the known harmless ones. Blank lines stay within what is shown."""
    shown: list[str] = []
    harmless: list[str] = []
    for line in text.splitlines():
        if is_harmless(line):
            harmless.append(line)
        elif line.strip() or shown:
            shown.append(line)
    while shown and not shown[-1].strip():
        shown.pop()
    return shown, harmless


@contextlib.contextmanager
def quiet_start() -> Iterator[None]:
    """Inside: what native code writes on standard error is held back, and only unknown lines are shown."""
    try:
        kept = os.dup(2)
    except OSError:  # a process without standard error
        yield
        return
    with tempfile.TemporaryFile() as file:
        sys.stderr.flush()
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            shown, _ = split_log(file.read().decode(errors="replace"))
            if any(line.strip() for line in shown):
                print("\n".join(shown), file=sys.stderr)
