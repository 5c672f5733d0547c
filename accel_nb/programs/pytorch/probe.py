"""What PyTorch can use on this machine, printed as one line of JSON (the last line of stdout).

Run it by itself, in the Python that trains: python probe.py
Every failure is an answer here, told in the JSON. TPUs are not touched: opening one would take it from its user.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # add-on back ends (TPU) would open their device at import
os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # cards counted as nvidia-smi counts them


def attempt(action: Callable[[], Any]) -> tuple[Any, str]:
    """The action's result and "", or None and the error's text."""
    try:
        return action(), ""
    except BaseException as error:
        return None, f"{type(error).__name__}: {error}"


def convolve(torch: Any, device: str) -> str:
    """One tiny convolution there and back: what fails first when libraries or card do not fit the build."""
    image = torch.ones((1, 3, 8, 8), device=device, requires_grad=True)
    weights = torch.ones((4, 3, 3, 3), device=device, requires_grad=True)
    result = torch.nn.functional.conv2d(image, weights).sum()
    result.backward()
    if result.item() != 4 * 6 * 6 * 27 or weights.grad.sum().item() != 4 * 3 * 9 * 36:
        raise ArithmeticError(f"a convolution of ones gave {result.item()}, not {4 * 6 * 6 * 27}")
    return "ok"


def look(facts: dict[str, Any]) -> None:
    torch, facts["import_error"] = attempt(lambda: __import__("torch"))
    if torch is None:
        return
    facts["version"] = str(torch.__version__)
    facts["cuda"] = torch.version.cuda or ""
    facts["hip"] = getattr(torch.version, "hip", None) or ""
    facts["cuda_build"] = bool(facts["cuda"] or facts["hip"])

    # The list the build was made for; torch.cuda.get_arch_list() is empty while no GPU is available.
    flags, _ = attempt(getattr(torch._C, "_cuda_getArchFlags", str))  # noqa: SLF001 - told nowhere else
    facts["arch_list"] = (flags or "").split() or torch.cuda.get_arch_list()

    cudnn, _ = attempt(lambda: torch._C._cudnn)  # noqa: SLF001 - both versions are told nowhere else
    for name, ask in (("cudnn_built", "getCompileVersion"), ("cudnn_loaded", "getRuntimeVersion")):
        version, _ = attempt(lambda ask=ask: getattr(cudnn, ask)())
        facts[name] = ".".join(map(str, version)) if version else ""

    facts["available"], facts["error"] = attempt(torch.cuda.is_available)
    facts["available"] = bool(facts["available"])
    if facts["cuda_build"] and not facts["available"]:
        facts["error"] = attempt(torch.cuda.init)[1]  # says why
    count = attempt(torch.cuda.device_count)[0] or 0
    for index in range(count if facts["available"] else 0):
        properties, error = attempt(lambda index=index: torch.cuda.get_device_properties(index))
        smoke, smoke_error = attempt(lambda index=index: convolve(torch, f"cuda:{index}"))
        facts["devices"].append(
            {
                "index": index,
                "name": properties.name if properties else "",
                "capability": [properties.major, properties.minor] if properties else None,
                "memory_total": properties.total_memory if properties else 0,
                "smoke": smoke or error or smoke_error,
            }
        )

    facts["mps_built"] = bool(attempt(torch.backends.mps.is_built)[0])
    facts["mps_available"] = bool(attempt(torch.backends.mps.is_available)[0])
    if facts["mps_available"]:
        smoke, error = attempt(lambda: convolve(torch, "mps"))
        facts["mps_smoke"] = smoke or error
    smoke, error = attempt(lambda: convolve(torch, "cpu"))
    facts["cpu_smoke"] = smoke or error


def leave_with(parent: int) -> None:
    """A probe must not outlive who asked for it."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def main() -> None:
    threading.Thread(target=leave_with, args=(os.getppid(),), daemon=True).start()
    facts = {"framework": "pytorch", "devices": []}
    facts["probe_error"] = attempt(lambda: look(facts))[1]
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
