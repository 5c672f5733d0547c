"""Where the model is trained, and in which precision."""

from __future__ import annotations

import os
import platform

import keras
import tensorflow as tf
from settings import ACCELERATOR, CUDNN_BENCHMARK, DEVICE_INDEX, PRECISION, STRATEGY


def choose_device() -> None:
    """Hide all devices but the chosen one, so that nothing runs on another unnoticed, and set the precision."""
    if ACCELERATOR == "cpu":
        tf.config.set_visible_devices([], "GPU")
    if STRATEGY == "single" and ACCELERATOR in ("gpu", "mps"):
        gpus = tf.config.list_physical_devices("GPU")
        if len(gpus) <= DEVICE_INDEX:
            raise RuntimeError(
                f"GPU {DEVICE_INDEX} was asked for, and TensorFlow {tf.__version__} sees {len(gpus)} GPUs here. "
                "Nothing was trained."
            )
        tf.config.set_visible_devices(gpus[DEVICE_INDEX], "GPU")
    if ACCELERATOR == "gpu" and not CUDNN_BENCHMARK:
        os.environ["TF_CUDNN_USE_AUTOTUNE"] = "0"
    if ACCELERATOR == "gpu" and PRECISION == "fp32":
        tf.config.experimental.enable_tensor_float_32_execution(False)
    if PRECISION == "bf16":
        keras.config.set_dtype_policy("mixed_bfloat16")
    if PRECISION == "fp16":
        keras.config.set_dtype_policy("mixed_float16")


def name_of_device() -> str:
    """Of the device that trains, or of the first one; known once the devices are chosen."""
    if ACCELERATOR == "cpu":
        name = platform.processor() or platform.machine()
    if ACCELERATOR in ("gpu", "mps"):
        gpu = tf.config.get_visible_devices("GPU")[0]
        name = tf.config.experimental.get_device_details(gpu).get("device_name", "GPU")
    if ACCELERATOR == "tpu":
        name = os.environ.get("TPU_ACCELERATOR_TYPE", "TPU")
    return name
