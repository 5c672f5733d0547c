"""Which precisions and compilers a device has: facts about hardware and frameworks, each with its source."""

from __future__ import annotations

import shutil


def precisions(framework: str, kind: str, capability: tuple[int, int] | None) -> dict[str, str]:
    """For each precision "" if the device has it, else why not.

    TF32 and bfloat16 units came with NVIDIA's Ampere, compute capability 8.0; fp16 tensor cores with 7.0, fp16
    arithmetic with 5.3 (CUDA C++ Programming Guide, "Compute Capabilities").
    """
    told = dict.fromkeys(("fp32", "tf32", "bf16", "fp16"), "")
    if kind == "cpu":
        told["tf32"] = "TF32 is a mode of NVIDIA's tensor cores."
        told["fp16"] = "float16 training needs a GPU; on a CPU bf16 is the short type."
    elif kind == "tpu":
        told["tf32"] = "TF32 is a mode of NVIDIA's tensor cores."
        told["fp16"] = "A TPU's short type is bf16."
    elif kind == "mps":
        told["tf32"] = "TF32 is a mode of NVIDIA's tensor cores."
        told["bf16"] = "Not every Apple GPU has bfloat16."
        if framework == "tensorflow":
            told["fp16"] = "TensorFlow's Apple plug-in has no tested mixed precision."
    elif capability is not None and capability < (8, 0):
        old = f"This GPU has compute capability {capability[0]}.{capability[1]}; {{}} came with 8.0."
        told["tf32"], told["bf16"] = old.format("TF32"), old.format("bfloat16")
        if capability < (5, 3):
            told["fp16"] = f"This GPU has compute capability {capability[0]}.{capability[1]}; fp16 came with 5.3."
    return told


def compile_refused(framework: str, kind: str) -> str:
    """Why a model cannot be compiled there; "" if it can."""
    if framework == "tensorflow":
        return "XLA does not work on TensorFlow's Apple plug-in." if kind == "mps" else ""
    if kind == "cpu" and not any(shutil.which(name) for name in ("g++", "clang++", "cl")):
        return "torch.compile on a CPU needs a C++ compiler, and there is none here."
    if kind == "mps":
        return "torch.compile on an Apple GPU is not ready in PyTorch."
    return ""
