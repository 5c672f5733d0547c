"""What TensorFlow (with Keras) can use on this machine, printed as one line of JSON (the last line of stdout).

Run it by itself, in the Python that trains: python probe.py
Every failure is an answer here, told in the JSON. TPUs are not touched: opening one would take it from its user.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import site
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # cards counted as nvidia-smi counts them
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "0"  # the log says why a GPU is not used

# What TensorFlow opens when it looks for GPUs, by CUDA's major version; a group is what one package installs.
LIBRARIES = {
    "12": {
        "CUDA runtime": "libcudart.so.12",
        "cuBLAS": "libcublas.so.12",
        "cuFFT": "libcufft.so.11",
        "cuSOLVER": "libcusolver.so.11",
        "cuSPARSE": "libcusparse.so.12",
    },
    "13": {
        "CUDA runtime": "libcudart.so.13",
        "cuBLAS": "libcublas.so.13",
        "cuFFT": "libcufft.so.12",
        "cuSOLVER": "libcusolver.so.12",
        "cuSPARSE": "libcusparse.so.12",
    },
}


def attempt(action: Callable[[], Any]) -> tuple[Any, str]:
    """The action's result and "", or None and the error's text."""
    try:
        return action(), ""
    except BaseException as error:
        return None, f"{type(error).__name__}: {error}"


def major(version: str) -> str:
    return version.partition(".")[0]


def tpu_build() -> str:
    """Whether the installed TensorFlow is the one for TPUs: importing that one can open the TPU."""
    for name in ("tensorflow-tpu", "tf-nightly-tpu"):
        version, _ = attempt(lambda name=name: importlib.metadata.version(name))
        if version:
            return version
    return ""


def convolve(tf: Any, device: str) -> str:
    """One tiny convolution there and back: what fails first when libraries or card do not fit the build."""
    with tf.device(device):
        image = tf.ones((1, 8, 8, 3))
        weights = tf.ones((3, 3, 3, 4))
        with tf.GradientTape() as tape:
            tape.watch(weights)
            result = tf.reduce_sum(tf.nn.conv2d(image, weights, strides=1, padding="VALID"))
        slope = float(tf.reduce_sum(tape.gradient(result, weights)))
    if float(result) != 4 * 6 * 6 * 27 or slope != 4 * 3 * 9 * 36:
        raise ArithmeticError(f"a convolution of ones gave {float(result)}, not {4 * 6 * 6 * 27}")
    return "ok"


def missing_libraries(cuda: str, cudnn: str) -> list[str]:
    """The groups of CUDA libraries that TensorFlow would not find, on the search path or as pip packages."""
    wanted = dict(LIBRARIES.get(major(cuda), {}))
    if cudnn:
        wanted["cuDNN"] = f"libcudnn.so.{major(cudnn)}"
    places = {*site.getsitepackages(), site.getusersitepackages(), *sys.path}
    missing = []
    for group, library in wanted.items():
        packaged = any(any(Path(place, "nvidia").glob(f"*/lib*/{library}")) for place in places)
        if not packaged and attempt(lambda library=library: ctypes.CDLL(library))[0] is None:
            missing.append(group)
    return missing


def cudnn_version(cudnn: str) -> str:
    """Version of the cuDNN that is loaded by now, as 9.3.0."""
    number = ctypes.CDLL(f"libcudnn.so.{major(cudnn)}").cudnnGetVersion()
    if number >= 90000:
        return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    return f"{number // 1000}.{number // 100 % 10}.{number % 100}"


def look(facts: dict[str, Any]) -> None:
    facts["version"] = tpu_build()
    if facts["version"]:
        facts["tpu_build"] = True
        return
    tf, facts["import_error"] = attempt(lambda: __import__("tensorflow"))
    if tf is None:
        return
    facts["version"] = tf.__version__
    keras, facts["keras_error"] = attempt(lambda: __import__("keras"))
    facts["keras"] = keras.__version__ if keras else ""

    build, _ = attempt(tf.sysconfig.get_build_info)
    build = build or {}
    facts["cuda_build"] = bool(build.get("is_cuda_build") or build.get("is_rocm_build"))
    facts["cuda"] = str(build.get("cuda_version") or "") if build.get("is_cuda_build") else ""
    facts["hip"] = str(build.get("rocm_version") or "") if build.get("is_rocm_build") else ""
    facts["cudnn_built"] = str(build.get("cudnn_version") or "")
    facts["arch_list"] = list(build.get("cuda_compute_capabilities") or [])

    gpus, facts["error"] = attempt(lambda: tf.config.list_physical_devices("GPU"))
    for gpu in gpus or []:
        attempt(lambda gpu=gpu: tf.config.experimental.set_memory_growth(gpu, True))  # leave room for a run
    for index, gpu in enumerate(gpus or []):
        details, _ = attempt(lambda gpu=gpu: tf.config.experimental.get_device_details(gpu))
        details = details or {}
        smoke, error = attempt(lambda index=index: convolve(tf, f"/GPU:{index}"))
        facts["devices"].append(
            {
                "index": index,
                "name": details.get("device_name", ""),
                "capability": list(details["compute_capability"]) if details.get("compute_capability") else None,
                "memory_total": 0,
                "smoke": smoke or error,
            }
        )
    facts["available"] = bool(facts["devices"])
    if facts["cuda"] and sys.platform.startswith("linux"):
        if facts["devices"]:
            facts["cudnn_loaded"] = attempt(lambda: cudnn_version(facts["cudnn_built"]))[0] or ""
        else:
            facts["missing_libraries"] = missing_libraries(facts["cuda"], facts["cudnn_built"])
    smoke, error = attempt(lambda: convolve(tf, "/CPU:0"))
    facts["cpu_smoke"] = smoke or error


def leave_with(parent: int) -> None:
    """A probe must not outlive who asked for it."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def main() -> None:
    threading.Thread(target=leave_with, args=(os.getppid(),), daemon=True).start()
    facts = {"framework": "tensorflow", "devices": []}
    facts["probe_error"] = attempt(lambda: look(facts))[1]
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
