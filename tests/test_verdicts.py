"""Every reason a framework may have not to use an accelerator, driven through recorded and made-up facts."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from accel_nb.framework_facts import Facts, facts_from
from accel_nb.machine import GPU, TPU, Machine
from accel_nb.verdicts import ACCELERATORS, FRAMEWORKS, REASONS, runs_on, verdict

GIB = 1024**3
T4 = GPU(0, "Tesla T4", 15 * GIB, 14 * GIB, (7, 5), "GPU-1")
BLACKWELL = GPU(0, "NVIDIA GeForce RTX 5090", 32 * GIB, 31 * GIB, (12, 0), "GPU-2")
PASCAL = GPU(0, "NVIDIA GeForce GTX 1080 Ti", 11 * GIB, 11 * GIB, (6, 1), "GPU-3")


def with_gpus(*gpus: GPU, cuda=(12, 8), driver="570.86.15", **more) -> Machine:
    visible = more.pop("visible", tuple(gpu.index for gpu in gpus))
    return Machine(gpus=gpus, driver=driver, driver_cuda=cuda, nvidia_pci=len(gpus), visible=visible, **more)


BARE = Machine()
MAC = Machine(mps=True, system="Darwin", architecture="arm64")
TPU_VM = Machine(tpu=TPU("v5e", 1), colab=True)
ON_T4 = with_gpus(T4)
ON_OLD_DRIVER = with_gpus(T4, cuda=(12, 2), driver="535.104.05")

# What the files tell.
TORCH_CPU = Facts("pytorch", True, "torch", "2.13.0+cpu", cuda_build=False)
TORCH_CUDA = Facts("pytorch", True, "torch", "2.11.0+cu128", cuda_build=True, cuda="12.8")
TORCH_13 = replace(TORCH_CUDA, version="2.13.0+cu130", cuda="13.0")
TORCH_MAC = Facts("pytorch", True, "torch", "2.13.0", cuda_build=False)
TF_CUDA = Facts(
    "tensorflow",
    True,
    "tensorflow",
    "2.21.0",
    "3.15.1",
    cuda_build=True,
    cuda="12.5.1",
    cudnn_built="9",
    arch_list=("sm_60", "sm_70", "sm_80", "sm_89", "compute_90"),
    packages={"keras": "3.15.1"},
)
TF_CPU = Facts("tensorflow", True, "tensorflow-cpu", "2.20.0", "3.13.2", cuda_build=False)
TF_TPU = Facts(
    "tensorflow",
    True,
    "tensorflow-tpu",
    "2.20.0",
    "3.13.2",
    cuda_build=False,
    tpu_build=True,
    packages={"keras": "3.13.2", "libtpu": "0.0.21.1"},
)
NO_TORCH, NO_TF = Facts("pytorch"), Facts("tensorflow")
COLAB_TPU_PACKAGES = {"keras": "3.13.2", "jax": "0.7.2", "libtpu": "0.0.21.1", "torch_xla": "2.9.0"}


def probed(base: Facts, told: str | dict | None = None, **more) -> Facts:
    """`base` after a probe that told this (JSON as it stands in a probe's output)."""
    told = json.loads(told) if isinstance(told, str) else told or {}
    return facts_from({"outcome": "ok", "returncode": 0, "cpu_smoke": "ok", **told, **more}, base)


# Answers of probes, as `probe.py` prints them.
TORCH_ON_T4 = """
{"framework": "pytorch", "devices": [{"index": 0, "name": "Tesla T4", "capability": [7, 5],
"memory_total": 15828320256, "smoke": "ok"}], "import_error": "", "version": "2.11.0+cu128", "cuda": "12.8",
"hip": "", "cuda_build": true,
"arch_list": ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"],
"cudnn_built": "9.10.2", "cudnn_loaded": "9.10.2", "available": true, "error": "", "mps_built": false,
"mps_available": false, "cpu_smoke": "ok", "probe_error": ""}
"""
TF_ON_T4 = """
{"framework": "tensorflow", "devices": [{"index": 0, "name": "Tesla T4", "capability": [7, 5],
"memory_total": 0, "smoke": "ok"}], "version": "2.20.0", "import_error": "", "keras_error": "",
"keras": "3.13.2", "cuda_build": true, "cuda": "12.5.1", "hip": "", "cudnn_built": "9", "cudnn_loaded": "9.3.0",
"arch_list": ["sm_60", "sm_70", "sm_80", "sm_89", "compute_90"], "error": "", "available": true,
"cpu_smoke": "ok", "probe_error": ""}
"""


def torch_fails(base=TORCH_CUDA, smoke="", error="", name="Tesla T4", capability=(7, 5), **more) -> Facts:
    device = {"index": 0, "name": name, "capability": list(capability), "memory_total": 1, "smoke": smoke}
    return probed(base, {"devices": [device] if smoke else [], "error": error}, **more)


TOO_OLD = (
    "RuntimeError: The NVIDIA driver on your system is too old (found version 12020). Please update your GPU "
    "driver by downloading and installing a new version."
)
CUDNN_TORCH = (
    "RuntimeError: cuDNN version incompatibility: PyTorch was compiled  against (9, 10, 2) but found runtime "
    "version (9, 1, 0). PyTorch already comes bundled with cuDNN."
)
CUDNN_TF = (
    "E0000 00:00:1738697930.2 7665 cuda_dnn.cc:522] Loaded runtime CuDNN library: 9.1.0 but source was "
    "compiled with: 9.3.0.  CuDNN library needs to have matching major version and equal or higher minor one.\n"
)
DLOPEN = (
    "W0000 00:00:1700000000.5 9 gpu_device.cc:1] Cannot dlopen some GPU libraries. Please make sure the missing "
    "libraries mentioned above are installed properly if you would like to use GPU.\nSkipping registering GPU\n"
)
OLD_LOADER = (
    "W tensorflow/stream_executor/platform/default/dso_loader.cc:60] Could not load dynamic library "
    "'libcusolver.so.11'; dlerror: libcusolver.so.11: cannot open shared object file\n"
)
NO_IMAGE = "AcceleratorError: CUDA error: no kernel image is available for execution on the device"
OOM = "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 14.74 GiB"
ARCHES = ("sm_75", "sm_80", "sm_86", "sm_90")

# (framework, accelerator, machine, facts, reason, words of the text, words of the fix)
CASES = {
    "torch cpu": ("pytorch", "cpu", BARE, probed(TORCH_CPU), "ready", "PyTorch 2.13.0+cpu runs on this CPU", ""),
    "tf cpu": ("tensorflow", "cpu", BARE, probed(TF_CUDA), "ready", "TensorFlow 2.21.0 runs on this CPU", ""),
    "tf for tpus, cpu": ("tensorflow", "cpu", TPU_VM, TF_TPU, "ready", "build for TPUs", ""),
    "torch cpu, not probed": ("pytorch", "cpu", BARE, TORCH_CPU, "checking", "is being checked", ""),
    "torch absent": (
        "pytorch",
        "cpu",
        BARE,
        NO_TORCH,
        "not_installed",
        "PyTorch is not installed",
        "pip install torch",
    ),
    "tf absent": ("tensorflow", "gpu", ON_T4, NO_TF, "not_installed", "not installed", "pip install tensorflow"),
    "keras absent": (
        "tensorflow",
        "cpu",
        BARE,
        probed(TF_CUDA, keras_error="ModuleNotFoundError: No module named 'keras'"),
        "not_installed",
        "Keras is not",
        "pip install keras",
    ),
    "torch does not import": (
        "pytorch",
        "cpu",
        BARE,
        probed(TORCH_CPU, cpu_smoke="", import_error="OSError: libgomp.so.1: cannot open shared object file"),
        "import_failed",
        "libgomp.so.1",
        "pip install --force-reinstall torch",
    ),
    "keras does not import": (
        "tensorflow",
        "gpu",
        ON_T4,
        probed(TF_CUDA, TF_ON_T4, keras_error="ImportError: cannot import name 'Tape'"),
        "import_failed",
        "import keras",
        "keras",
    ),
    "torch crashes": (
        "pytorch",
        "cpu",
        BARE,
        probed(TORCH_CPU, cpu_smoke="", outcome="crashed", returncode=-11, stderr="Segmentation fault\n"),
        "probe_crashed",
        "by signal SIGSEGV while it was looked at. Its last words: Segmentation fault",
        "pip install --force-reinstall torch",
    ),
    "tf on a processor without AVX": (
        "tensorflow",
        "cpu",
        BARE,
        probed(TF_CUDA, cpu_smoke="", outcome="crashed", returncode=-4),
        "probe_crashed",
        "illegal instruction",
        "pip install --force-reinstall tensorflow",
    ),
    "the probe prints nonsense": (
        "pytorch",
        "cpu",
        BARE,
        probed(TORCH_CPU, cpu_smoke="", outcome="unreadable"),
        "probe_crashed",
        "without an answer",
        "torch",
    ),
    "tf hangs": (
        "tensorflow",
        "gpu",
        ON_T4,
        probed(TF_CUDA, cpu_smoke="", outcome="timed out", returncode=-9, stderr="waiting for the card\n"),
        "probe_timeout",
        "Its last words: waiting for the card",
        "accelerators(refresh=True)",
    ),
    "the cpu fails": (
        "pytorch",
        "cpu",
        BARE,
        probed(TORCH_CPU, cpu_smoke="RuntimeError: could not create a primitive"),
        "smoke_failed",
        "could not create a primitive",
        "torch",
    ),
    # ---- NVIDIA
    "torch on a T4": ("pytorch", "gpu", ON_T4, probed(TORCH_CUDA, TORCH_ON_T4), "ready", "Tesla T4", ""),
    "tf on a T4": ("tensorflow", "gpu", ON_T4, probed(TF_CUDA, TF_ON_T4), "ready", "cuDNN 9.3.0", ""),
    "torch for AMD": (
        "pytorch",
        "gpu",
        BARE,
        torch_fails(replace(TORCH_CPU, cuda_build=True, hip="6.4"), "ok", name="AMD Instinct MI300X"),
        "ready",
        "AMD Instinct MI300X (built for ROCm 6.4)",
        "",
    ),
    # An older driver of the same generation is enough: the probe says so.
    "older driver, same generation": (
        "pytorch",
        "gpu",
        ON_OLD_DRIVER,
        probed(TORCH_CUDA, TORCH_ON_T4),
        "ready",
        "built for CUDA 12.8, the driver runs up to CUDA 12.2",
        "",
    ),
    "not probed yet": ("pytorch", "gpu", ON_T4, TORCH_CUDA, "checking", "being checked", "Wait"),
    "build unknown, not probed": (
        "tensorflow",
        "gpu",
        ON_T4,
        replace(TF_CUDA, cuda_build=None),
        "checking",
        "being checked",
        "Wait",
    ),
    "no gpu": ("pytorch", "gpu", BARE, probed(TORCH_CPU), "no_gpu", "no NVIDIA GPU", "accelerator='cpu'"),
    "no gpu on a mac": ("pytorch", "gpu", MAC, TORCH_MAC, "no_gpu", "no NVIDIA GPU", "accelerator='mps'"),
    "no gpu and no framework": ("tensorflow", "gpu", BARE, NO_TF, "no_gpu", "no NVIDIA GPU", "cpu"),
    "colab, cpu runtime": (
        "pytorch",
        "gpu",
        Machine(colab=True),
        probed(TORCH_CPU),
        "colab_runtime",
        "no GPU",
        "Runtime → Change runtime type → T4 GPU",
    ),
    "colab, tpu runtime": (
        "tensorflow",
        "gpu",
        TPU_VM,
        NO_TF,
        "colab_runtime",
        "no GPU",
        "Change runtime type → T4 GPU",
    ),
    "card without driver": (
        "pytorch",
        "gpu",
        Machine(nvidia_pci=1),
        probed(TORCH_CUDA),
        "no_driver",
        "An NVIDIA card found, but no driver",
        "Install the NVIDIA driver",
    ),
    "cards without driver": (
        "pytorch",
        "gpu",
        Machine(nvidia_pci=4),
        TORCH_CUDA,
        "no_driver",
        "4 NVIDIA cards",
        "Install",
    ),
    "wsl without driver": (
        "tensorflow",
        "gpu",
        Machine(wsl=True),
        probed(TF_CUDA),
        "no_driver",
        "inside WSL",
        "on Windows (not in WSL)",
    ),
    "driver updated, not restarted": (
        "pytorch",
        "gpu",
        Machine(nvidia_pci=1, driver_loaded=True, driver_error="RM has detected an NVML/RM version mismatch."),
        probed(TORCH_CUDA),
        "driver_broken",
        "version mismatch",
        "Restart the machine",
    ),
    "container without the card": (
        "pytorch",
        "gpu",
        Machine(nvidia_pci=1, driver="535.104.05", driver_loaded=True),
        probed(TORCH_CUDA),
        "no_gpu_in_container",
        "driver 535.104.05 is loaded, but this container was given no GPU",
        "--gpus all",
    ),
    "torch cpu build": (
        "pytorch",
        "gpu",
        ON_T4,
        probed(TORCH_CPU),
        "cpu_build",
        "PyTorch 2.13.0+cpu is a CPU-only build; the machine has Tesla T4",
        "Install the CUDA build",
    ),
    "torch cpu build, not probed": (
        "pytorch",
        "gpu",
        ON_T4,
        TORCH_CPU,
        "cpu_build",
        "CPU-only build",
        "CUDA build",
    ),
    "tf cpu build": (
        "tensorflow",
        "gpu",
        ON_T4,
        probed(TF_CPU),
        "cpu_build",
        "CPU-only build",
        "pip uninstall -y tensorflow-cpu, then: pip install 'tensorflow[and-cuda]'",
    ),
    "tf on windows": (
        "tensorflow",
        "gpu",
        with_gpus(T4, system="Windows"),
        replace(TF_CUDA, cuda_build=False, cuda=""),
        "cpu_build",
        "CPU-only build",
        "WSL2",
    ),
    "tf on arm": (
        "tensorflow",
        "gpu",
        with_gpus(T4, architecture="aarch64"),
        replace(TF_CUDA, cuda_build=False, cuda=""),
        "cpu_build",
        "CPU-only build",
        "tensorflow[and-cuda]",
    ),
    "colab, torch replaced by a cpu build": (
        "pytorch",
        "gpu",
        with_gpus(T4, colab=True),
        probed(TORCH_CPU),
        "colab_replaced",
        "CPU-only build",
        "Runtime → Disconnect and delete runtime",
    ),
    "hidden by an empty value": (
        "pytorch",
        "gpu",
        with_gpus(T4, visible=(), visible_devices=""),
        probed(TORCH_CUDA, error="RuntimeError: No CUDA GPUs are available"),
        "hidden",
        "CUDA_VISIBLE_DEVICES='' hides Tesla T4",
        "os.environ.pop('CUDA_VISIBLE_DEVICES')",
    ),
    "hidden, several": (
        "tensorflow",
        "gpu",
        with_gpus(T4, replace(T4, index=1), visible=(), visible_devices="-1"),
        probed(TF_CUDA),
        "hidden",
        "CUDA_VISIBLE_DEVICES='-1' hides 2 x Tesla T4",
        "os.environ.pop",
    ),
    "driver too old": (
        "pytorch",
        "gpu",
        ON_OLD_DRIVER,
        torch_fails(TORCH_13, error=TOO_OLD),
        "driver_too_old",
        "built for CUDA 13.0; the driver (535.104.05) runs CUDA 12.2 at most",
        "version 580 or newer",
    ),
    "driver too old, by the probe's word": (
        "pytorch",
        "gpu",
        ON_OLD_DRIVER,
        torch_fails(
            smoke="RuntimeError: CUDA error: the provided PTX was compiled with an unsupported toolchain."
        ),
        "driver_too_old",
        "built for CUDA 12.8; the driver (535.104.05) runs CUDA 12.2 at most",
        "one for CUDA 12.8 or newer",
    ),
    "driver too old, wsl": (
        "pytorch",
        "gpu",
        with_gpus(T4, cuda=(12, 2), driver="535.1", wsl=True),
        torch_fails(TORCH_13, error=TOO_OLD),
        "driver_too_old",
        "CUDA 12.2",
        "driver on Windows to version 580",
    ),
    "tf, driver too old": (
        "tensorflow",
        "gpu",
        with_gpus(T4, cuda=(11, 4), driver="470.1"),
        probed(TF_CUDA),
        "driver_too_old",
        "built for CUDA 12.5.1; the driver (470.1) runs CUDA 11.4",
        "525",
    ),
    "colab, torch replaced by a newer build": (
        "pytorch",
        "gpu",
        with_gpus(T4, cuda=(12, 4), driver="550.54.15", colab=True),
        torch_fails(TORCH_13, error=TOO_OLD),
        "colab_replaced",
        "built for CUDA 13.0; the driver (550.54.15) runs CUDA 12.4",
        "Disconnect and delete runtime",
    ),
    "card too new": (
        "pytorch",
        "gpu",
        with_gpus(BLACKWELL),
        torch_fails(smoke=NO_IMAGE, name=BLACKWELL.name, capability=(12, 0), arch_list=list(ARCHES)),
        "architecture",
        "no code for NVIDIA GeForce RTX 5090 (12.0): it was built for the compute capabilities sm_75, sm_80",
        "Install a newer PyTorch",
    ),
    "card too old": (
        "pytorch",
        "gpu",
        with_gpus(PASCAL),
        torch_fails(smoke=NO_IMAGE, name=PASCAL.name, capability=(6, 1), arch_list=[*ARCHES, "compute_120"]),
        "architecture",
        "GTX 1080 Ti (6.1)",
        "Install an older PyTorch",
    ),
    "card not in the list, not even listed": (
        "tensorflow",
        "gpu",
        with_gpus(replace(PASCAL, capability=(5, 0))),
        probed(TF_CUDA),
        "architecture",
        "(5.0)",
        "older TensorFlow",
    ),
    "tf without its libraries": (
        "tensorflow",
        "gpu",
        ON_T4,
        probed(TF_CUDA, missing_libraries=["cuSPARSE", "cuDNN"], stderr=DLOPEN),
        "tf_libraries",
        "does not find its CUDA libraries: cuSPARSE, cuDNN.",
        "pip install 'tensorflow[and-cuda]'",
    ),
    "tf without a library, by its log": (
        "tensorflow",
        "gpu",
        ON_T4,
        probed(TF_CUDA, stderr=OLD_LOADER + DLOPEN),
        "tf_libraries",
        "libraries: cuSOLVER.",
        "pip install 'tensorflow[and-cuda]'",
    ),
    "tf without it knows not what": (
        "tensorflow",
        "gpu",
        ON_T4,
        probed(TF_CUDA, stderr=DLOPEN),
        "tf_libraries",
        "does not say which",
        "pip install 'tensorflow[and-cuda]'",
    ),
    "tf finds no cuDNN at the first convolution": (
        "tensorflow",
        "gpu",
        ON_T4,
        torch_fails(TF_CUDA, smoke="UnimplementedError: DNN library is not found. [Op:Conv2D]"),
        "tf_libraries",
        "libraries: cuDNN.",
        "pip install 'tensorflow[and-cuda]'",
    ),
    "colab, tf without its libraries": (
        "tensorflow",
        "gpu",
        with_gpus(T4, colab=True),
        probed(TF_CUDA, missing_libraries=["cuDNN"]),
        "colab_replaced",
        "cuDNN",
        "Disconnect and delete runtime",
    ),
    "tf with an older cuDNN": (
        "tensorflow",
        "gpu",
        ON_T4,
        torch_fails(TF_CUDA, smoke="FailedPreconditionError: DNN library initialization failed.", stderr=CUDNN_TF),
        "cudnn_old",
        "wants cuDNN 9.3.0 or newer, but cuDNN 9.1.0 is loaded",
        "pip install --upgrade nvidia-cudnn-cu12",
    ),
    "torch with an older cuDNN": (
        "pytorch",
        "gpu",
        ON_T4,
        torch_fails(smoke=CUDNN_TORCH),
        "cudnn_old",
        "wants cuDNN 9.10.2 or newer, but cuDNN 9.1.0 is loaded",
        "LD_LIBRARY_PATH",
    ),
    "colab, an older cuDNN": (
        "tensorflow",
        "gpu",
        with_gpus(T4, colab=True),
        torch_fails(TF_CUDA, smoke="FailedPreconditionError: DNN library", stderr=CUDNN_TF),
        "colab_replaced",
        "cuDNN 9.1.0",
        "Disconnect and delete runtime",
    ),
    "memory taken": (
        "pytorch",
        "gpu",
        ON_T4,
        torch_fails(smoke=OOM, arch_list=list(ARCHES)),
        "gpu_memory_full",
        "out of memory",
        "End the program that holds the memory",
    ),
    "tf, memory taken": (
        "tensorflow",
        "gpu",
        ON_T4,
        torch_fails(TF_CUDA, smoke="ResourceExhaustedError: OOM when allocating tensor"),
        "gpu_memory_full",
        "OOM",
        "nvidia-smi",
    ),
    "something else": (
        "pytorch",
        "gpu",
        ON_T4,
        torch_fails(smoke="AcceleratorError: CUDA error: all CUDA-capable devices are busy or unavailable"),
        "smoke_failed",
        "(built for CUDA 12.8, the driver runs up to CUDA 12.8): AcceleratorError: CUDA error: all CUDA-capable",
        "Restart the machine",
    ),
    "tf sees no card and does not say why": (
        "tensorflow",
        "gpu",
        ON_T4,
        probed(
            TF_CUDA, stderr="E0000 00:00:1.5 9 x.cc:52] failed call to cuInit: CUDA_ERROR_UNKNOWN: unknown error\n"
        ),
        "smoke_failed",
        "CUDA_ERROR_UNKNOWN",
        "Restart",
    ),
    "colab, something else": (
        "pytorch",
        "gpu",
        with_gpus(T4, colab=True),
        torch_fails(error="RuntimeError: Unexpected error from cudaGetDeviceCount()"),
        "smoke_failed",
        "Unexpected error",
        "Disconnect and delete runtime",
    ),
    # ---- Apple
    "mps elsewhere": (
        "pytorch",
        "mps",
        ON_T4,
        probed(TORCH_CUDA),
        "not_apple",
        "not a Mac",
        "another accelerator",
    ),
    "mps": (
        "pytorch",
        "mps",
        MAC,
        probed(TORCH_MAC, mps_built=True, mps_available=True, mps_smoke="ok"),
        "ready",
        "Apple GPU",
        "",
    ),
    "mps, not probed": ("pytorch", "mps", MAC, TORCH_MAC, "checking", "being checked", "Wait"),
    "mps, not built": ("pytorch", "mps", MAC, probed(TORCH_MAC), "mps_build", "built without", "arm64"),
    "mps, old macOS": (
        "pytorch",
        "mps",
        MAC,
        probed(TORCH_MAC, mps_built=True),
        "mps_unavailable",
        "does not offer",
        "Update macOS",
    ),
    "mps, fails": (
        "pytorch",
        "mps",
        MAC,
        probed(TORCH_MAC, mps_built=True, mps_available=True, mps_smoke="RuntimeError: MPS backend out of memory"),
        "smoke_failed",
        "MPS backend out of memory",
        "Update PyTorch",
    ),
    "mps, no torch": ("pytorch", "mps", MAC, NO_TORCH, "not_installed", "not installed", "pip install torch"),
    "tf, mps": (
        "tensorflow",
        "mps",
        MAC,
        probed(TF_CPU),
        "mps_not_supported",
        "no support",
        "framework='pytorch'",
    ),
    "tf with metal": (
        "tensorflow",
        "mps",
        MAC,
        torch_fails(replace(TF_CPU, packages={"tensorflow-metal": "1.2.0"}), smoke="ok", name="METAL"),
        "ready",
        "tensorflow-metal",
        "",
    ),
    "tf with metal, not probed": (
        "tensorflow",
        "mps",
        MAC,
        replace(TF_CPU, packages={"tensorflow-metal": "1.2.0"}),
        "checking",
        "being checked",
        "Wait",
    ),
    # ---- Google
    "no tpu": ("pytorch", "tpu", BARE, probed(TORCH_CPU), "no_tpu", "no TPU", "another accelerator"),
    "no tpu, tf for tpus": ("tensorflow", "tpu", BARE, TF_TPU, "no_tpu", "no TPU", "another accelerator"),
    "colab without tpu": (
        "tensorflow",
        "tpu",
        Machine(colab=True),
        TF_CUDA,
        "colab_runtime",
        "no TPU",
        "v5e-1 TPU",
    ),
    "tpu image without tf": (
        "tensorflow",
        "tpu",
        TPU_VM,
        replace(NO_TF, packages=COLAB_TPU_PACKAGES),
        "ready",
        "Keras 3.13.2 on JAX 0.7.2 drives 1 x TPU v5e: TensorFlow is not installed; the package tensorflow-tpu",
        "",
    ),
    "tpu image without tf, its keras too old for jax": (
        "tensorflow",
        "tpu",
        TPU_VM,
        replace(NO_TF, packages=COLAB_TPU_PACKAGES | {"keras": "2.15.0"}),
        "tpu_no_tensorflow",
        "neither TensorFlow for TPUs nor Keras on JAX",
        "tensorflow-tpu",
    ),
    "tpu image without tf, jax without libtpu": (
        "tensorflow",
        "tpu",
        TPU_VM,
        replace(NO_TF, packages={"keras": "3.13.2", "jax": "0.7.2"}),
        "tpu_no_tensorflow",
        "nor Keras on JAX",
        "pip install keras 'jax[tpu]'",
    ),
    "tpu without tf and jax": (
        "tensorflow",
        "tpu",
        TPU_VM,
        NO_TF,
        "tpu_no_tensorflow",
        "TPU v5e",
        "tensorflow-tpu",
    ),
    "plain tf on a tpu": (
        "tensorflow",
        "tpu",
        TPU_VM,
        TF_CUDA,
        "tf_no_tpu_kernels",
        "TensorFlow 2.21.0 has no TPU kernels",
        "pip uninstall -y tensorflow, then: pip install tensorflow-tpu",
    ),
    "plain tf on a tpu, jax there": (
        "tensorflow",
        "tpu",
        TPU_VM,
        replace(TF_CUDA, packages=COLAB_TPU_PACKAGES),
        "ready",
        "Keras 3.13.2 on JAX 0.7.2 drives 1 x TPU v5e: TensorFlow 2.21.0 has no TPU kernels",
        "",
    ),
    "tf for tpus": ("tensorflow", "tpu", TPU_VM, TF_TPU, "ready", "1 x TPU v5e", ""),
    "tf for tpus without libtpu": (
        "tensorflow",
        "tpu",
        TPU_VM,
        replace(TF_TPU, packages={}),
        "tpu_packages",
        "libtpu is missing",
        "pip install libtpu",
    ),
    "torch_xla": (
        "pytorch",
        "tpu",
        TPU_VM,
        replace(TORCH_CPU, version="2.9.0+cpu", packages=COLAB_TPU_PACKAGES),
        "ready",
        "through torch_xla 2.9.0",
        "",
    ),
    "torch_tpu": (
        "pytorch",
        "tpu",
        TPU_VM,
        replace(TORCH_CPU, packages={"torch_tpu": "0.2.0", "libtpu": "0.0.50"}),
        "ready",
        "through torch_tpu 0.2.0",
        "",
    ),
    "torch_tpu beside a torch that is too old for it": (
        "pytorch",
        "tpu",
        TPU_VM,
        replace(TORCH_CPU, version="2.10.0", packages={"torch_tpu": "0.2.0", "libtpu": "0.0.50"}),
        "tpu_packages",
        "missing: torch_xla",
        "torch==2.9.*",
    ),
    "torch without torch_xla": (
        "pytorch",
        "tpu",
        TPU_VM,
        replace(TORCH_CPU, version="2.9.0+cpu", packages={"libtpu": "0.0.21.1"}),
        "tpu_packages",
        "missing: torch_xla.",
        "pip install 'torch_xla[tpu]==2.9.*'",
    ),
    "torch without libtpu": (
        "pytorch",
        "tpu",
        TPU_VM,
        replace(TORCH_CPU, version="2.9.0+cpu", packages={"torch_xla": "2.9.0"}),
        "tpu_packages",
        "missing: libtpu.",
        "torch_xla[tpu]",
    ),
    "torch newer than torch_xla": (
        "pytorch",
        "tpu",
        TPU_VM,
        replace(TORCH_CPU, packages=COLAB_TPU_PACKAGES),
        "tpu_packages",
        "torch_xla 2.9.0 does not fit PyTorch 2.13.0+cpu",
        "pip install torch-tpu libtpu",
    ),
    "torch 2.10 has neither": (
        "pytorch",
        "tpu",
        TPU_VM,
        replace(TORCH_CPU, version="2.10.0"),
        "tpu_packages",
        "missing: torch_xla, libtpu",
        "torch==2.9.*",
    ),
    "tpu without torch": ("pytorch", "tpu", TPU_VM, NO_TORCH, "not_installed", "not installed", "torch_xla"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_verdict(case):
    framework, accelerator, machine, facts, reason, text, fix = case
    told = verdict(framework, accelerator, machine, facts)
    assert told.reason == reason, told
    assert text in told.text
    assert fix in told.fix
    assert (told.framework, told.accelerator) == (framework, accelerator)
    # A verdict is a sentence, and says what to do if and only if something is to be done.
    assert told.text.endswith((".", "…"))
    assert "\n" not in told.text
    assert "\n" not in told.fix
    assert told.usable == (reason == "ready" or (reason, accelerator) == ("checking", "cpu"))
    assert bool(told.fix) == (not told.usable)


def test_every_reason_is_driven():
    assert {case[4] for case in CASES.values()} == set(REASONS)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("accelerator", ACCELERATORS)
def test_every_pair_has_a_verdict_on_every_machine_seen_here(framework, accelerator):
    machines = {repr(case[2]): case[2] for case in CASES.values()}.values()
    known = {repr(case[3]): case[3] for case in CASES.values() if case[3].framework == framework}.values()
    for machine in machines:
        for facts in known:
            told = verdict(framework, accelerator, machine, facts)
            assert told.reason in REASONS
            assert bool(told.fix) == (not told.usable)


def test_a_usable_gpu_tells_which_and_which_not():
    other = replace(PASCAL, index=1)
    devices = [
        {"index": 0, "name": "Tesla T4", "capability": [7, 5], "smoke": "ok"},
        {"index": 1, "name": other.name, "capability": [6, 1], "smoke": NO_IMAGE},
    ]
    told = verdict("pytorch", "gpu", with_gpus(T4, other), probed(TORCH_CUDA, devices=devices))
    assert told.usable
    assert told.text.startswith("PyTorch 2.11.0+cu128 runs on Tesla T4 (built for CUDA 12.8")
    assert told.details == {"devices": [0], "failed": {1: NO_IMAGE}}


def test_a_working_card_outweighs_what_its_numbers_say():
    """A compatibility package lets an older driver run a newer CUDA; the probe has seen it work."""
    told = verdict("pytorch", "gpu", ON_OLD_DRIVER, torch_fails(TORCH_13, smoke="ok"))
    assert told.usable


def test_a_crash_on_the_gpu_leaves_the_cpu_usable():
    facts = probed(TORCH_CUDA, outcome="crashed", returncode=-6, cpu_smoke="ok")
    assert verdict("pytorch", "cpu", ON_T4, facts).usable
    told = verdict("pytorch", "gpu", ON_T4, facts)
    assert (told.usable, told.reason) == (False, "probe_crashed")


def test_numbers_for_a_program_that_wants_them():
    told = verdict("pytorch", "gpu", ON_OLD_DRIVER, torch_fails(TORCH_13, error=TOO_OLD))
    assert told.details == {"build_cuda": "13.0", "driver_cuda": (12, 2)}
    told = verdict("tensorflow", "gpu", ON_T4, probed(TF_CUDA, missing_libraries=["cuDNN"]))
    assert told.details == {"missing": ["cuDNN"]}


@pytest.mark.parametrize(
    ("capability", "arch_list", "runs"),
    [
        ((7, 5), ("sm_75",), True),
        ((8, 6), ("sm_80",), True),  # same major number, higher minor one
        ((8, 0), ("sm_86",), False),  # not the other way round
        ((9, 0), ("sm_80", "sm_86"), False),
        ((9, 0), ("sm_80", "compute_80"), True),  # portable code
        ((7, 5), ("compute_80",), False),  # is for what is newer
        ((12, 0), ("sm_100",), False),  # 10.0 and 12.0 share no major number
        ((12, 1), ("sm_120",), True),
        ((9, 0), ("sm_90a",), True),
        ((10, 0), ("compute_90a",), False),  # for that one card alone
        ((10, 3), ("sm_100f",), True),  # for its family
        ((12, 0), ("compute_100f",), False),
        ((8, 9), (), False),
        ((9, 4), ("gfx90a", "gfx942"), True),  # AMD's own names
        ((7, 5), ("nonsense", ""), False),
    ],
)
def test_which_code_runs_on_which_card(capability, arch_list, runs):
    assert runs_on(capability, arch_list) is runs
