"""Trains a PyTorch model: a script to read, to run and to change.

It trains on the arrays in `data/` and prints one line per epoch. With a file name behind it
(`python train.py history.csv`) it also writes every step to that file.
"""

from __future__ import annotations

import math
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from models import cnn, mlp, resnet50
from parts import batches_from_files, layer_table, save, stored
from reports import csv_report, no_control, print_report, rate_factor
from settings import (
    ACCELERATOR,
    BATCH_SIZE,
    COMPILE,
    CUDNN_BENCHMARK,
    DATA_ON_DEVICE,
    DETERMINISTIC,
    DEVICE_INDEX,
    DROP_LAST,
    EPOCHS,
    HERE,
    INPUT_SHAPE,
    LEARNING_RATE,
    MODEL,
    MODEL_ARGS,
    OPTIMIZER,
    OPTIMIZER_ARGS,
    OUTPUTS,
    PRECISION,
    SCHEDULE,
    SEED,
    TASK,
    VALIDATION,
    WARMUP_STEPS,
    X_SCALE,
)
from torch import nn

BLOCK_SECONDS = 0.15  # losses stay on the device and are fetched about this often: each fetch makes it wait


def own_model() -> nn.Module:
    """The place of your own model: gives (samples, OUTPUTS) for (samples, channels, height, width)."""
    raise RuntimeError("MODEL is 'own': write your model into own_model().")


def build_model() -> nn.Module:
    """A fresh model with random weights."""
    if MODEL == "mlp":
        model = mlp(INPUT_SHAPE, OUTPUTS, **MODEL_ARGS)
    elif MODEL == "cnn":
        model = cnn(INPUT_SHAPE, OUTPUTS, **MODEL_ARGS)
    elif MODEL == "resnet50":
        model = resnet50(INPUT_SHAPE, OUTPUTS)
    elif MODEL == "own":
        model = own_model()
    return model


def load_model(path: str | Path = HERE / "model.pt") -> nn.Module:
    """The trained model, on the CPU, ready to use."""
    model = build_model()
    model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return model.eval()


def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The model's outputs, in float32, for a batch as it is stored."""
    if X_SCALE == 1.0:
        x = x.float()
    if X_SCALE != 1.0:
        x = x / X_SCALE  # whole numbers become float32 here
    if MODEL in ("cnn", "resnet50"):
        x = x.movedim(-1, 1)  # channels first by name, last in memory: the layout fastest for convolutions
    elif MODEL == "own":
        x = x.movedim(-1, 1).contiguous()
    if PRECISION in ("fp32", "tf32"):
        outputs = model(x)
    elif PRECISION == "bf16":
        with torch.autocast(x.device.type, torch.bfloat16):
            outputs = model(x)
    elif PRECISION == "fp16":
        with torch.autocast(x.device.type, torch.float16):
            outputs = model(x)
    return outputs.float()


@torch.no_grad()
def evaluate(model: nn.Module, x_val: Any, y_val: Any) -> dict[str, float]:
    """Loss and accuracy over the whole validation set, each sample counted once."""
    model.eval()
    losses = []
    if TASK == "classification":
        hits = []
    size = max(BATCH_SIZE, 256)
    if DATA_ON_DEVICE:
        batches = zip(x_val.split(size), y_val.split(size), strict=True)
    else:
        device = next(model.parameters()).device
        batches = batches_from_files(x_val, y_val, np.arange(len(y_val)), size, device)
    for x, y in batches:
        outputs = forward(model, x)
        if TASK == "classification":
            losses.append(nn.functional.cross_entropy(outputs, y, reduction="sum"))
            hits.append((outputs.argmax(1) == y).sum())
        else:
            losses.append(nn.functional.mse_loss(outputs, y, reduction="sum") / OUTPUTS)
    measured = {"val_loss": sum(torch.stack(losses).tolist()) / len(y_val)}
    if TASK == "classification":
        measured["val_accuracy"] = sum(torch.stack(hits).tolist()) / len(y_val)
    return measured


def train(
    report: Callable[..., None] = print_report,
    control: Callable[[], dict[str, Any]] = no_control,
    save_to: str | Path = HERE / "repeat",
) -> None:
    """Trains, tells `report` what happens, obeys `control` between blocks of steps, saves to `save_to`."""
    save_to = Path(save_to)
    if DETERMINISTIC:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
        torch.use_deterministic_algorithms(True)
    if ACCELERATOR == "cpu":
        device = torch.device("cpu")
        device_name = platform.processor() or platform.machine()
        versions = {"torch": torch.__version__}
    elif ACCELERATOR == "gpu":
        if torch.cuda.device_count() <= DEVICE_INDEX:
            raise RuntimeError(
                f"This run wants GPU {DEVICE_INDEX}, "
                f"but PyTorch {torch.__version__} sees {torch.cuda.device_count()} GPUs here."
            )
        device = torch.device("cuda", DEVICE_INDEX)
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

    torch.manual_seed(SEED)
    model = build_model().to(device)
    if ACCELERATOR == "gpu" and MODEL in ("cnn", "resnet50"):
        model.to(memory_format=torch.channels_last)
    layers = layer_table(model, device)
    report("model", parameters=sum(p.numel() for p in model.parameters()), layers=layers)

    if OPTIMIZER == "adam":
        optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, fused=True, **OPTIMIZER_ARGS)
    elif OPTIMIZER == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True, **OPTIMIZER_ARGS)
    elif OPTIMIZER == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, fused=True, **OPTIMIZER_ARGS)
    elif OPTIMIZER == "rmsprop":
        optimizer = torch.optim.RMSprop(model.parameters(), lr=LEARNING_RATE, **OPTIMIZER_ARGS)
    group = optimizer.param_groups[0]
    if PRECISION == "fp16":
        scaler = torch.amp.GradScaler(device.type)
        skipped = 0  # steps in a row

    x_train, y_train = stored("x_train", device), stored("y_train", device)
    if VALIDATION:
        x_val, y_val = stored("x_val", device), stored("y_val", device)
        val_samples = len(y_val)
    if not VALIDATION:
        val_samples = 0
    samples = len(y_train)  # used in each epoch
    if DROP_LAST:
        samples -= samples % BATCH_SIZE
    batch_sizes = [min(BATCH_SIZE, samples - start) for start in range(0, samples, BATCH_SIZE)]
    steps_per_epoch = len(batch_sizes)
    if SCHEDULE != "constant" or WARMUP_STEPS > 0:
        group["lr"] = LEARNING_RATE * rate_factor(0, EPOCHS * steps_per_epoch)
    report(
        "started",
        device=str(device),
        device_name=device_name,
        versions=versions,
        steps_per_epoch=steps_per_epoch,
        train_samples=len(y_train),
        val_samples=val_samples,
        learning_rate=group["lr"],
    )
    if COMPILE:
        model.compile(dynamic=False)  # in place: the names of the weights stay as they are
        report("status", text="compiling")

    base_rate = LEARNING_RATE
    step = 0  # steps done
    block = 1  # steps from one fetch of the losses to the next
    for epoch in range(1, EPOCHS + 1):
        order = np.random.default_rng([SEED, epoch - 1]).permutation(len(y_train))[:samples]
        if DATA_ON_DEVICE:
            order = torch.from_numpy(order).to(device)
            batches = ((x_train.index_select(0, i), y_train.index_select(0, i)) for i in order.split(BATCH_SIZE))
        else:
            batches = batches_from_files(x_train, y_train, order, BATCH_SIZE, device)
        losses, epoch_losses = [], []  # since the last fetch, still on the device; of the whole epoch
        if TASK == "classification":
            accuracies, epoch_accuracies = [], []
        seconds = 0.0
        model.train()
        for position, (x, y) in enumerate(batches):
            if not losses:  # a block of steps begins
                asked = control()  # may wait here: that is the pause
                base_rate = asked.get("learning_rate", base_rate)
                if asked.get("stop"):
                    # `position` counts the batches done in this epoch
                    state = {"step": step, "epoch": epoch, "position": position, "learning_rate": base_rate}
                    state.update(model=model.state_dict(), optimizer=optimizer.state_dict())
                    state["random_cpu"] = torch.get_rng_state()
                    if ACCELERATOR == "gpu":
                        state["random_gpu"] = torch.cuda.get_rng_state(device)
                    if PRECISION == "fp16":
                        state["scaler"] = scaler.state_dict()
                    save(state, save_to / "checkpoint.pt")
                    report("checkpoint", path=str(save_to / "checkpoint.pt"), step=step)
                    save(model.cpu().state_dict(), save_to / "model.pt")
                    return
                block_began = time.perf_counter()
            if SCHEDULE == "constant" and WARMUP_STEPS == 0:
                group["lr"] = base_rate
            else:
                group["lr"] = base_rate * rate_factor(step, EPOCHS * steps_per_epoch)
            outputs = forward(model, x)
            if TASK == "classification":
                loss = nn.functional.cross_entropy(outputs, y)
                accuracies.append((outputs.argmax(1) == y).float().mean())
            else:
                loss = nn.functional.mse_loss(outputs, y)
            losses.append(loss.detach())
            optimizer.zero_grad()
            if PRECISION == "fp16":
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                loss.backward()
                optimizer.step()
            step += 1
            if len(losses) < block and position + 1 < steps_per_epoch:
                continue

            # A block is done: fetch what was measured, all at once.
            first = step - len(losses) + 1
            measured = {"loss": torch.stack(losses).tolist()}
            epoch_losses += measured["loss"]
            if TASK == "classification":
                measured["accuracy"] = torch.stack(accuracies).tolist()
                epoch_accuracies += measured["accuracy"]
                accuracies = []
            took = time.perf_counter() - block_began
            seconds += took
            block = max(1, min(10 * block, round(len(losses) * BLOCK_SECONDS / took)))
            losses = []
            report("batch", epoch=epoch, first=first, **measured, learning_rate=group["lr"])
            for number, value in enumerate(measured["loss"], start=first):
                if PRECISION == "fp16":
                    skipped = 0 if math.isfinite(value) else skipped + 1
                    if 0 < skipped < 10:
                        continue  # the scaler leaves out a step that overflows; ten in a row are a failure
                if not math.isfinite(value):
                    raise FloatingPointError(
                        f"The loss is {value} at step {number} (epoch {epoch}). "
                        "Try a smaller learning rate, or look for very large values in the data."
                    )

        measured = {"loss": float(np.average(epoch_losses, weights=batch_sizes))}
        if TASK == "classification":
            measured["accuracy"] = float(np.average(epoch_accuracies, weights=batch_sizes))
        if VALIDATION:
            began = time.perf_counter()
            measured.update(evaluate(model, x_val, y_val))
            seconds += time.perf_counter() - began
        report("epoch", epoch=epoch, step=step, **measured, seconds=seconds)
    save(model.cpu().state_dict(), save_to / "model.pt")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(csv_report(sys.argv[1]))
    else:
        train()
