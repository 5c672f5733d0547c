"""What is known about one framework, and what its files tell without importing it."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

MODULES = {"pytorch": "torch", "tensorflow": "tensorflow"}
DISTRIBUTIONS = {
    "pytorch": ("torch",),
    "tensorflow": (
        "tensorflow",
        "tensorflow-cpu",
        "tensorflow-tpu",
        "tensorflow-macos",
        "tensorflow-intel",
        "tensorflow-cpu-aws",
        "tf-nightly",
        "tf-nightly-cpu",
        "tf-nightly-tpu",
    ),
}
ADD_ONS = ("torch_xla", "torch_tpu", "libtpu", "jax", "keras", "tensorflow-metal")


@dataclass(frozen=True)
class Device:
    """One GPU as the framework sees it. `smoke`: "ok" if a tiny convolution ran, else the error's text."""

    index: int
    name: str = ""
    capability: tuple[int, int] | None = None
    memory_total: int = 0
    smoke: str = ""


@dataclass(frozen=True)
class Facts:
    """What is known about one framework.

    `outcome`: "not run", or how the probe ended: "ok", "crashed", "timed out", "unreadable". `cuda`, `hip`: the
    version the build was made for, "" if none. `cuda_build`: made for GPUs; None if only the probe can tell.
    `packages`: versions of the add-ons that matter here, found without importing them.
    """

    framework: str
    installed: bool = False
    distribution: str = ""
    version: str = ""
    keras: str = ""
    cuda_build: bool | None = None
    cuda: str = ""
    hip: str = ""
    cudnn_built: str = ""
    cudnn_loaded: str = ""
    arch_list: tuple[str, ...] = ()
    tpu_build: bool = False
    packages: Mapping[str, str] = field(default_factory=dict)
    outcome: str = "not run"
    available: bool = False
    devices: tuple[Device, ...] = ()
    error: str = ""
    import_error: str = ""
    keras_error: str = ""
    probe_error: str = ""
    cpu_smoke: str = ""
    mps_built: bool = False
    mps_available: bool = False
    mps_smoke: str = ""
    missing_libraries: tuple[str, ...] = ()
    stderr: str = ""
    returncode: int | None = None

    @property
    def clean(self) -> bool:
        """The probe ran, and nothing it tried went wrong."""
        troubles = (self.error, self.import_error, self.keras_error, self.probe_error)
        smokes = [device.smoke for device in self.devices] + [self.mps_smoke or "ok", self.cpu_smoke or "ok"]
        return self.outcome == "ok" and not any(troubles) and all(smoke == "ok" for smoke in smokes)


def facts_from(told: Mapping[str, Any], base: Facts) -> Facts:
    """`base` with what a probe (or the cache) told; keys that are unknown or of a wrong type are left out."""
    values: dict[str, Any] = {}
    for part in fields(Facts):
        value = told.get(part.name)
        kinds = (bool,) if part.name == "cuda_build" else (int,) if part.name == "returncode" else None
        if isinstance(value, kinds or type(getattr(base, part.name))):
            values[part.name] = value
        elif isinstance(value, list) and part.name in ("arch_list", "missing_libraries"):
            values[part.name] = tuple(str(item) for item in value)
        elif isinstance(value, list) and part.name == "devices":
            values[part.name] = tuple(device for item in value if (device := _device(item)))
    # Text that is empty does not replace what the files told.
    return replace(base, **{name: value for name, value in values.items() if value != ""})


def _device(told: Any) -> Device | None:
    try:
        capability = told.get("capability")
        return Device(
            index=int(told["index"]),
            name=str(told.get("name", "")),
            capability=(int(capability[0]), int(capability[1])) if capability else None,
            memory_total=int(told.get("memory_total", 0)),
            smoke=str(told.get("smoke", "")),
        )
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        return None


def installed(framework: str) -> Facts:
    """What the framework's files tell; nothing is imported, no process is started."""
    packages = {name: version for name in ADD_ONS if (version := _version(name))}
    try:
        spec = importlib.util.find_spec(MODULES[framework])
    except (ImportError, ValueError):  # ValueError: a stand-in without a spec sits in sys.modules
        spec = None
    if spec is None or not spec.origin:
        return Facts(framework, packages=packages)
    found = [(name, version) for name in DISTRIBUTIONS[framework] if (version := _version(name))]
    distribution, version = found[0] if found else ("", "")
    # Every TensorFlow is imported under one name; the one for TPUs must not be missed.
    for name, other in found:
        if name.endswith("-tpu"):
            distribution, version = name, other
    build = _torch_build(spec.origin) if framework == "pytorch" else _tensorflow_build(spec.origin)
    return Facts(
        framework,
        installed=True,
        distribution=distribution,
        version=build.pop("version", "") or version,
        keras=packages.get("keras", "") if framework == "tensorflow" else "",
        tpu_build=distribution.endswith("-tpu"),
        packages=packages,
        **build,
    )


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution) or ""
    except importlib.metadata.PackageNotFoundError:
        return ""


def _torch_build(origin: str) -> dict[str, Any]:
    """CUDA and ROCm of the build, from torch/version.py, which is made with it."""
    text = _text(Path(origin).parent / "version.py")
    told = dict(re.findall(r"^(__version__|cuda|hip)\b[^=\n]*=\s*'([^']*)'", text, re.MULTILINE))
    if "__version__" not in told:
        return {}
    cuda, hip = told.get("cuda", ""), told.get("hip", "")
    return {"version": told["__version__"], "cuda": cuda, "hip": hip, "cuda_build": bool(cuda or hip)}


def _tensorflow_build(origin: str) -> dict[str, Any]:
    """CUDA, cuDNN and architectures of the build, from the dictionary TensorFlow keeps of it."""
    text = _text(Path(origin).parent / "python" / "platform" / "build_info.py")
    written = re.search(r"OrderedDict\((\[.*\])\)", text, re.DOTALL)
    try:
        build = dict(ast.literal_eval(written[1])) if written else {}
    except (ValueError, SyntaxError, TypeError):
        build = {}
    if not build:
        return {}
    return {
        "cuda_build": bool(build.get("is_cuda_build") or build.get("is_rocm_build")),
        "cuda": str(build.get("cuda_version", "")) if build.get("is_cuda_build") else "",
        "hip": str(build.get("rocm_version", "")) if build.get("is_rocm_build") else "",
        "cudnn_built": str(build.get("cudnn_version", "")),
        "arch_list": tuple(build.get("cuda_compute_capabilities", ())),
    }


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
