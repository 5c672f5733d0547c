# ruff: noqa: N802 - the names are NVML's own
"""A made-up NVIDIA driver: NVML with a Tesla T4 as in Colab and an A100, and an `nvidia-smi` that prints."""

from __future__ import annotations

import stat
from pathlib import Path
from types import SimpleNamespace

T4 = {
    "name": "Tesla T4",
    "uuid": "GPU-3e7a0d3c-4c5b-5f0e-9d51-0b6f4f2a7c11",
    "total": 16106127360,
    "used": 268435456,
    "capability": (7, 5),
    "busy": 71,
}
A100 = {
    "name": "NVIDIA A100-SXM4-40GB",
    "uuid": "GPU-91b2d5aa-0c8e-1f3d-6d20-77c0aa4be9f0",
    "total": 42949672960,
    "used": 1073741824,
    "capability": (8, 0),
    "busy": 5,
}


class NVMLError(Exception):
    """The base of NVML's errors; each text is the one the library gives."""


class NVML:
    """The part of `pynvml` that is used. `fails`: function name -> error text."""

    def __init__(self, cards=(), driver="550.54.15", cuda=12040, fails=None, old=False):
        self.cards, self.driver, self.cuda, self.fails, self.old = cards, driver, cuda, fails or {}, old
        self.opened = 0

    def _answer(self, name, value):
        if name in self.fails:
            raise NVMLError(self.fails[name])
        return value.encode() if self.old and isinstance(value, str) else value

    def nvmlInit(self):
        self._answer("nvmlInit", None)
        self.opened += 1

    def nvmlSystemGetDriverVersion(self):
        return self._answer("nvmlSystemGetDriverVersion", self.driver)

    def nvmlSystemGetCudaDriverVersion(self):
        return self._answer("nvmlSystemGetCudaDriverVersion", self.cuda)

    def nvmlDeviceGetCount(self):
        return self._answer("nvmlDeviceGetCount", len(self.cards))

    def nvmlDeviceGetHandleByIndex(self, index):
        if not 0 <= index < len(self.cards):
            raise NVMLError("Invalid Argument")
        return self._answer(f"nvmlDeviceGetHandleByIndex({index})", self.cards[index])

    def nvmlDeviceGetMemoryInfo(self, card):
        memory = SimpleNamespace(total=card["total"], used=card["used"], free=card["total"] - card["used"])
        return self._answer("nvmlDeviceGetMemoryInfo", memory)

    def nvmlDeviceGetCudaComputeCapability(self, card):
        return self._answer("nvmlDeviceGetCudaComputeCapability", card["capability"])

    def nvmlDeviceGetName(self, card):
        return self._answer("nvmlDeviceGetName", card["name"])

    def nvmlDeviceGetUUID(self, card):
        return self._answer("nvmlDeviceGetUUID", card["uuid"])

    def nvmlDeviceGetUtilizationRates(self, card):
        return self._answer("nvmlDeviceGetUtilizationRates", SimpleNamespace(gpu=card["busy"], memory=3))


SMI_HEAD = """\
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 550.54.15              Driver Version: 550.54.15      CUDA Version: 12.4     |
|-----------------------------------------+------------------------+----------------------+
"""
SMI_ROW = f"0, Tesla T4, {T4['uuid']}, 15360, 15101, 550.54.15, 7.5"


def write_smi(folder: Path, script: str) -> dict[str, str]:
    """Put an `nvidia-smi` made of shell lines into `folder`; the environment that finds it."""
    folder.mkdir(parents=True, exist_ok=True)
    command = folder / "nvidia-smi"
    command.write_text("#!/bin/sh\n" + script)
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    return {"PATH": str(folder)}


def smi_script(row=SMI_ROW, head=SMI_HEAD):
    """Shell lines that answer as `nvidia-smi` does: rows for a query, the table's head otherwise."""
    return f"""case "$*" in
*utilization.gpu*) echo "71, 259, 15360" ;;
*--query-gpu*) echo "{row}" ;;
*) cat <<'END'
{head}END
;;
esac
"""
