"""Trains a PyTorch model: a script to read, to run and to change.

`python train.py` trains on the arrays in `data/` and prints one line per epoch.
`python train.py history.csv` also writes every step to that file.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blocks import recompute_activations, shard, whole
from checkpoint import read_checkpoint, restore_optimizer, restore_random, snapshot
from devices import find_device
from models import cnn, mlp, resnet50
from parts import batches_from_files, batches_on_device, layer_table, parts_of, save, stored
from reports import csv_report, no_control, print_report, rate_factor
from settings import (
    ACCELERATOR,
    ACCUMULATE,
    ACTIVATION_CHECKPOINTING,
    BATCH_SIZE,
    COMPILE,
    DATA_ON_DEVICE,
    DROP_LAST,
    EPOCHS,
    HERE,
    INPUT_SHAPE,
    LEARNING_RATE,
    MODEL,
    MODEL_ARGS,
    NODES,
    OPTIMIZER,
    OPTIMIZER_ARGS,
    OUTPUTS,
    PRECISION,
    SCHEDULE,
    SEED,
    STRATEGY,
    TASK,
    VALIDATION,
    WARMUP_STEPS,
    X_SCALE,
)
from several import train_on_machines
from spread import ask, join, leave, replicate, silent, summed, whole_batch_norm
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
        x = x.movedim(-1, 1).clone(memory_format=torch.contiguous_format)
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
    if DATA_ON_DEVICE:
        if STRATEGY in ("ddp", "fsdp"):
            batches = batches_on_device(x_val, y_val, torch.arange(len(y_val), device=y_val.device), BATCH_SIZE)
        else:
            if ACCUMULATE == 1:
                size = BATCH_SIZE
            if ACCUMULATE > 1:
                size = math.ceil(BATCH_SIZE / ACCUMULATE)  # as many as in training: it needs no more memory
            batches = zip(x_val.split(size), y_val.split(size), strict=True)
    else:
        device = next(model.parameters()).device
        batches = batches_from_files(x_val, y_val, np.arange(len(y_val)), BATCH_SIZE, device)
    for x, y in batches:
        outputs = forward(model, x)
        if STRATEGY in ("ddp", "fsdp"):
            outputs = outputs[: len(y)]
        if TASK == "classification":
            losses.append(nn.functional.cross_entropy(outputs, y, reduction="sum"))
            hits.append((outputs.argmax(1) == y).sum())
        else:
            losses.append(nn.functional.mse_loss(outputs, y, reduction="sum") / OUTPUTS)
    measured = {"val_loss": sum(torch.stack(losses).tolist()) / len(y_val)}
    if TASK == "classification":
        measured["val_accuracy"] = sum(torch.stack(hits).tolist()) / len(y_val)
    return measured


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights on the CPU, under the names that they have in a fresh model."""
    if STRATEGY == "ddp":
        found = model.module.cpu().state_dict()
    elif STRATEGY == "fsdp":
        found = whole(model.state_dict())
    else:
        found = model.cpu().state_dict()
    return found


def train(
    report: Callable[..., None] = print_report,
    control: Callable[[], dict[str, Any]] = no_control,
    save_to: str | Path = HERE / "repeat",
    resume_from: str | Path | None = None,
) -> None:
    """Trains, tells `report` what happens, obeys `control` between blocks of steps, saves to `save_to`.

    `resume_from`: a checkpoint of this run, to go on from there.
    """
    save_to = Path(save_to)
    if resume_from is not None:
        saved = read_checkpoint(resume_from)
    if STRATEGY in ("ddp", "fsdp"):
        report("joining")
        ranks = join()
        report("joined")
        if ranks.rank > 0:
            report = silent
    device, device_name, versions = find_device()
    torch.manual_seed(SEED)
    model = build_model().to(device)
    if ACCELERATOR == "gpu" and MODEL in ("cnn", "resnet50") and STRATEGY != "fsdp":
        model.to(memory_format=torch.channels_last)
    layers = layer_table(model, device)
    report("model", parameters=sum(p.numel() for p in model.parameters()), layers=layers)
    if resume_from is not None:
        model.load_state_dict(saved["model"])
    if STRATEGY in ("ddp", "fsdp") and MODEL in ("cnn", "resnet50", "own"):
        model = whole_batch_norm(model, ranks)
    if ACTIVATION_CHECKPOINTING:
        recompute_activations(model)
    if STRATEGY in ("ddp", "fsdp"):
        if STRATEGY == "ddp":
            model = replicate(model, ranks)
        else:
            shard(model, device, ranks)
        # the weights are the same everywhere, dropout is not
        torch.manual_seed(int(np.random.SeedSequence([SEED, ranks.rank]).generate_state(1, np.uint64)[0]))

    if OPTIMIZER == "rmsprop":
        optimizer = torch.optim.RMSprop(model.parameters(), lr=LEARNING_RATE, **OPTIMIZER_ARGS)
    elif ACCELERATOR == "tpu" or (STRATEGY == "fsdp" and OPTIMIZER == "sgd"):  # nothing fused is made for these
        if OPTIMIZER == "adam":
            optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, **OPTIMIZER_ARGS)
        elif OPTIMIZER == "adamw":
            optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, **OPTIMIZER_ARGS)
        elif OPTIMIZER == "sgd":
            optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, **OPTIMIZER_ARGS)
    elif OPTIMIZER == "adam":
        optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, fused=True, **OPTIMIZER_ARGS)
    elif OPTIMIZER == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True, **OPTIMIZER_ARGS)
    elif OPTIMIZER == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, fused=True, **OPTIMIZER_ARGS)
    if PRECISION == "fp16":
        scaler = torch.amp.GradScaler(device.type)
        skipped = 0  # steps in a row

    if resume_from is not None:
        restore_optimizer(optimizer, saved["optimizer"])
        if PRECISION == "fp16":
            scaler.load_state_dict(saved.get("scaler", scaler.state_dict()))
    group = optimizer.param_groups[0]

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
    about = {
        "device": str(device),
        "device_name": device_name,
        "versions": versions,
        "steps_per_epoch": steps_per_epoch,
        "train_samples": len(y_train),
        "val_samples": val_samples,
        "learning_rate": group["lr"],
    }
    if STRATEGY in ("ddp", "fsdp"):
        about.update(strategy=STRATEGY, replicas=ranks.count, per_replica=math.ceil(BATCH_SIZE / ranks.count))
        if ACCELERATOR == "gpu":
            about["backend"] = "nccl"
        else:
            about["backend"] = "gloo"
    elif ACCUMULATE > 1:
        about.update(strategy=STRATEGY, replicas=1, per_replica=BATCH_SIZE)
    report("started", **about)
    if COMPILE:
        # in place: the names of the weights stay as they are
        if STRATEGY == "ddp":
            model.module.compile(dynamic=False)
        else:
            model.compile(dynamic=False)
        report("status", text="compiling")

    if STRATEGY in ("ddp", "fsdp") or ACCUMULATE > 1:

        def compute(x: torch.Tensor, y: torch.Tensor, size: int) -> torch.Tensor:
            """Adds the gradients of some of the `size` samples of a batch; their part of its loss and accuracy."""
            if STRATEGY in ("ddp", "fsdp"):
                if MODEL in ("cnn", "resnet50", "own"):
                    ranks.idle = len(y) == 0
                outputs = forward(model, x)[: len(y)]
            else:
                outputs = forward(model, x)
            if TASK == "classification":
                loss = nn.functional.cross_entropy(outputs, y, reduction="sum") / size
                parts = torch.stack([loss.detach(), (outputs.argmax(1) == y).sum() / size])
            else:
                loss = nn.functional.mse_loss(outputs, y, reduction="sum") / (size * OUTPUTS)
                parts = loss.detach()[None]
            if STRATEGY in ("ddp", "fsdp"):
                loss = loss * ranks.count  # of the gradients of all ranks the mean is taken, and the sum is meant
            if PRECISION == "fp16":
                loss = scaler.scale(loss)
            loss.backward()
            return parts

    base_rate = LEARNING_RATE
    step = 0  # steps done
    block = 1  # steps from one fetch of the losses to the next
    begin, done = 1, 0  # the first epoch, and how many of its batches are done
    losses, epoch_losses = [], []  # since the last fetch, still on the device; of the whole epoch
    if TASK == "classification":
        accuracies, epoch_accuracies = [], []
    seconds = 0.0  # of this epoch
    if resume_from is not None:
        begin, done, step, base_rate = saved["epoch"], saved["position"], saved["step"], saved["learning_rate"]
        epoch_losses, seconds = saved["losses"], saved["seconds"]
        if TASK == "classification":
            epoch_accuracies = saved["accuracies"]
        if PRECISION == "fp16":
            skipped = saved.get("skipped", 0)
        restore_random(saved)
        report("status", text=f"going on from step {step}")

    def keep(epoch: int, position: int) -> None:
        """Writes the checkpoint: `position` batches of this epoch are done."""
        state = {"step": step, "epoch": epoch, "position": position, "learning_rate": base_rate}
        state.update(losses=epoch_losses, seconds=seconds)
        if STRATEGY in ("ddp", "fsdp"):
            state.update(snapshot(model, optimizer, ranks.group))
        else:
            state.update(snapshot(model, optimizer))
        if TASK == "classification":
            state["accuracies"] = epoch_accuracies
        if PRECISION == "fp16":
            state.update(scaler=scaler.state_dict(), skipped=skipped)
        try:
            save(state, save_to / "checkpoint.pt")
            report("checkpoint", path=str(save_to / "checkpoint.pt"), step=step)
        except (OSError, RuntimeError) as problem:  # PyTorch tells a full disk as the latter
            report("warning", text=f"The checkpoint of step {step} was not written: {problem}")

    for epoch in range(begin, EPOCHS + 1):
        order = np.random.default_rng([SEED, epoch - 1]).permutation(len(y_train))[done * BATCH_SIZE : samples]
        if DATA_ON_DEVICE:
            batches = batches_on_device(x_train, y_train, torch.from_numpy(order).to(device), BATCH_SIZE)
        else:
            batches = batches_from_files(x_train, y_train, order, BATCH_SIZE, device)
        model.train()
        for position in range(done, steps_per_epoch):
            if STRATEGY in ("ddp", "fsdp") or ACCUMULATE > 1:
                size = batch_sizes[position]
            if not losses:  # a block of steps begins
                # may wait here: that is the pause
                if STRATEGY in ("ddp", "fsdp"):
                    stop, due, base_rate, block = ask(control, base_rate, block, ranks)
                else:
                    asked = control()
                    stop, due = asked.get("stop"), asked.get("checkpoint")
                    base_rate = asked.get("learning_rate", base_rate)
                if stop or due:
                    keep(epoch, position)
                if stop:
                    save(weights(model), save_to / "model.pt")
                    if STRATEGY in ("ddp", "fsdp"):
                        leave(ranks)
                    return
                block_began = time.perf_counter()
            if SCHEDULE == "constant" and WARMUP_STEPS == 0:
                group["lr"] = base_rate
            else:
                group["lr"] = base_rate * rate_factor(step, EPOCHS * steps_per_epoch)
            optimizer.zero_grad()
            if ACCUMULATE > 1:
                parts = 0
                if STRATEGY in ("ddp", "fsdp"):
                    count = parts_of(size, ranks.count)
                if STRATEGY not in ("ddp", "fsdp"):
                    count = parts_of(size, 1)
                for part in range(count):
                    # the ranks exchange gradients once, in the last part
                    if STRATEGY == "ddp":
                        model.require_backward_grad_sync = part + 1 == count
                    elif STRATEGY == "fsdp":
                        model.set_requires_gradient_sync(part + 1 == count)
                    parts = parts + compute(*next(batches), size)
                losses.append(parts[0])
                if TASK == "classification":
                    accuracies.append(parts[1])
            elif STRATEGY in ("ddp", "fsdp"):
                parts = compute(*next(batches), size)
                losses.append(parts[0])
                if TASK == "classification":
                    accuracies.append(parts[1])
            else:
                x, y = next(batches)
                outputs = forward(model, x)
                if TASK == "classification":
                    loss = nn.functional.cross_entropy(outputs, y)
                    accuracies.append((outputs.argmax(1) == y).float().mean())
                else:
                    loss = nn.functional.mse_loss(outputs, y)
                losses.append(loss.detach())
                if PRECISION == "fp16":
                    scaler.scale(loss).backward()
                else:
                    loss.backward()
            if PRECISION == "fp16":
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            step += 1
            if len(losses) < block and position + 1 < steps_per_epoch:
                continue

            # A block is done: fetch what was measured, all at once.
            first = step - len(losses) + 1
            measured = {"loss": torch.stack(losses).tolist()}
            if TASK == "classification":
                measured["accuracy"] = torch.stack(accuracies).tolist()
                accuracies = []
            if STRATEGY in ("ddp", "fsdp"):
                measured = summed(measured, ranks)
            epoch_losses += measured["loss"]
            if TASK == "classification":
                epoch_accuracies += measured["accuracy"]
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
            if STRATEGY == "ddp":
                measured.update(summed(evaluate(model.module, x_val, y_val), ranks))
            elif STRATEGY == "fsdp":
                measured.update(summed(evaluate(model, x_val, y_val), ranks))
            else:
                measured.update(evaluate(model, x_val, y_val))
            seconds += time.perf_counter() - began
        report("epoch", epoch=epoch, step=step, **measured, seconds=seconds)
        done, epoch_losses, seconds = 0, [], 0.0
        if TASK == "classification":
            epoch_accuracies = []
    keep(EPOCHS + 1, 0)  # to train longer from here
    save(weights(model), save_to / "model.pt")
    if STRATEGY in ("ddp", "fsdp"):
        leave(ranks)


if __name__ == "__main__":
    if NODES > 1:
        train_on_machines(train)
    elif len(sys.argv) > 1:
        train(csv_report(sys.argv[1]))
    else:
        train()
