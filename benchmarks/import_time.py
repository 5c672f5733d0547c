"""How long `import accel_nb` takes in a new Python. The promise: under 0.15 s.

Each measurement is a process of its own; told are the median and the slowest, without Python's own start.
"""

from __future__ import annotations

import statistics
import subprocess
import sys

TIMES = 15
PROMISE = 0.15  # seconds
SOURCE = "import time; began = time.perf_counter(); import accel_nb; print(time.perf_counter() - began)"


def main() -> None:
    seconds = []
    for _ in range(TIMES):
        done = subprocess.run([sys.executable, "-c", SOURCE], check=True, capture_output=True, text=True)
        seconds.append(float(done.stdout))
    middle, slowest = statistics.median(seconds), max(seconds)
    print(f"import accel_nb: median {middle * 1000:.1f} ms, slowest {slowest * 1000:.1f} ms of {TIMES}")
    print(f"promised: under {PROMISE * 1000:.0f} ms, {PROMISE / middle:.0f} times the median")


if __name__ == "__main__":
    main()
