"""The device that trains, told apart from what was asked for, and set up."""

from __future__ import annotations

import os
import platform

import torch
from settings import ACCELERATOR, CUDNN_BENCHMARK, DETERMINISTIC, DEVICE_INDEX, PRECISION, STRATEGY


def find_device() -> tuple[torch.device, str, dict[str, str]]:
    """The device, its name, and the versions of what drives it."""
    if DETERMINISTIC:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
        torch.use_deterministic_algorithms(True)
    if ACCELERATOR == "cpu":
        device = torch.device("cpu")
        device_name = platform.processor() or platform.machine()
        versions = {"torch": torch.__version__}
    elif ACCELERATOR == "gpu":
        if STRATEGY in ("ddp", "fsdp"):
            index = int(os.environ["LOCAL_RANK"])
        if STRATEGY not in ("ddp", "fsdp"):
            index = DEVICE_INDEX
        if torch.cuda.device_count() <= index:
            raise RuntimeError(
                f"This run wants GPU {index}, "
                f"but PyTorch {torch.__version__} sees {torch.cuda.device_count()} GPUs here."
            )
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = CUDNN_BENCHMARK
        if PRECISION == "fp32":
            torch.set_float32_matmul_precision("highest")
            torch.backends.cudnn.allow_tf32 = False
        elif PRECISION == "tf32":
            torch.set_float32_matmul_precision("high")
            torch.backends.cudnn.allow_tf32 = True
        device_name = torch.cuda.get_device_name(device)
        versions = {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    elif ACCELERATOR == "mps":
        if not torch.backends.mps.is_available():
            raise RuntimeError(f"This run wants an Apple GPU, but PyTorch {torch.__version__} sees none here.")
        device = torch.device("mps")
        device_name = "Apple GPU"
        versions = {"torch": torch.__version__}
    elif ACCELERATOR == "tpu":
        here = torch.accelerator.current_accelerator()  # torch_tpu, where it is installed, comes with torch
        if here is None or here.type != "tpu":
            raise RuntimeError(
                f"This run wants a TPU, but PyTorch {torch.__version__} "
                f"finds {here or 'no accelerator'} here: it needs torch_tpu."
            )
        device = torch.device("tpu")
        device_name = "TPU"
        versions = {"torch": torch.__version__}
    return device, device_name, versions
