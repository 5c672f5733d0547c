"""Trains a PyTorch model on TPU through torch_xla: a script to read, to run and to change.

`python train.py` trains on the arrays in `data/` and prints one line per epoch.
`python train.py history.csv` also writes every step to that file.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.pop("PJRT_DEVICE", None)  # torch_xla then takes a TPU only if it sees one on the bus
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's own log: errors only

import numpy as np
import torch
import torch_xla
from devices import everywhere, find_device, on_cpu
from models import cnn, mlp, resnet50
from norms import as_elsewhere
from parts import computed_as_here, layer_table, save, stored
from reports import csv_report, no_control, print_report, rate_factor
from rows import batches_of_files, batches_of_lines, real_rows, row_table
from settings import (
    ACCELERATOR,
    ACCUMULATE,
    BATCH_SIZE,
    DATA_ON_DEVICE,
    DEVICES,
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
    STRATEGY,
    TASK,
    VALIDATION,
    WARMUP_STEPS,
    X_SCALE,
)
from torch import nn
from torch_xla.core import xla_model

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
    if MODEL != "mlp":
        x = x.movedim(-1, 1)  # channels first
    if PRECISION == "fp32":
        outputs = model(x)
    elif PRECISION == "bf16":
        with torch.autocast("xla", torch.bfloat16):
            outputs = model(x)
    return outputs.float()


def measure(outputs: torch.Tensor, y: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Sums over the real rows: of the loss and, for classes, of the hits."""
    if TASK == "classification":
        losses = nn.functional.cross_entropy(outputs, y, reduction="none")
        hits = (outputs.argmax(1) == y) & real
    else:
        losses = (outputs - y).square().mean(1)
        hits = torch.zeros_like(real)  # there are no classes to hit
    return torch.stack([torch.where(real, losses, torch.zeros_like(losses)).sum(), hits.float().sum()])


def prepare(optimizer: torch.optim.Optimizer) -> None:
    """Gives the optimizer what it else makes in its first step, which would be another graph than the others."""
    names = []
    if OPTIMIZER in ("adam", "adamw"):
        names += ["exp_avg", "exp_avg_sq"]
    if OPTIMIZER == "rmsprop":
        names += ["square_avg"]
    if OPTIMIZER in ("sgd", "rmsprop") and OPTIMIZER_ARGS["momentum"] > 0:
        names += ["momentum_buffer"]
    for weight in optimizer.param_groups[0]["params"]:
        state = {name: torch.zeros(weight.shape).to(weight.device) for name in names}
        if OPTIMIZER != "sgd":
            state["step"] = torch.zeros(()).to(weight.device)
        optimizer.state[weight].update(state)


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
        saved = torch.load(resume_from, map_location="cpu", weights_only=True)
    device, device_name, mesh = find_device()

    # The model: its first weights, its table of layers and its checks need no TPU.
    torch.manual_seed(SEED)
    model = build_model()
    layers = layer_table(model, torch.device("cpu"))
    report("model", parameters=sum(p.numel() for p in model.parameters()), layers=layers)
    if resume_from is not None:
        model.load_state_dict(saved["model"])
    model = model.to(device)
    torch_xla.manual_seed(SEED)  # dropout's random numbers

    # The optimizers count their steps on the device ("capturable"), so that no step differs from the others.
    weights = model.parameters()
    if OPTIMIZER == "adam":
        optimizer = torch.optim.Adam(weights, lr=LEARNING_RATE, foreach=False, capturable=True, **OPTIMIZER_ARGS)
    elif OPTIMIZER == "adamw":
        optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE, foreach=False, capturable=True, **OPTIMIZER_ARGS)
    elif OPTIMIZER == "sgd":
        optimizer = torch.optim.SGD(weights, lr=LEARNING_RATE, foreach=False, **OPTIMIZER_ARGS)
    elif OPTIMIZER == "rmsprop":
        optimizer = torch.optim.RMSprop(
            weights, lr=LEARNING_RATE, foreach=False, capturable=True, **OPTIMIZER_ARGS
        )
    prepare(optimizer)
    if resume_from is not None:
        optimizer.load_state_dict(computed_as_here(saved["optimizer"], optimizer))
    if DEVICES > 1:
        everywhere([*model.parameters(), *model.buffers()], mesh)
        everywhere([value for state in optimizer.state.values() for value in state.values()], mesh)
    torch_xla.sync()
    group = optimizer.param_groups[0]

    # Each step has the same shape, so that it is compiled once: a batch is filled up to `width` rows.
    width = math.ceil(BATCH_SIZE / (DEVICES * ACCUMULATE)) * DEVICES * ACCUMULATE
    x_train, y_train = stored("x_train", device), stored("y_train", device)
    samples = len(y_train)  # used in each epoch
    if DROP_LAST:
        samples -= samples % BATCH_SIZE
    batch_sizes = [min(BATCH_SIZE, samples - start) for start in range(0, samples, BATCH_SIZE)]
    steps_per_epoch = len(batch_sizes)
    if VALIDATION:
        x_val, y_val = stored("x_val", device), stored("y_val", device)
        val_samples = len(y_val)
        val_table = row_table(np.arange(val_samples), width, 1)
    if not VALIDATION:
        val_samples = 0
    if DATA_ON_DEVICE and VALIDATION:
        val_table = torch.from_numpy(val_table).to(device)
    if MODEL != "mlp":
        normalises = as_elsewhere(model)
        if normalises and (width != BATCH_SIZE or batch_sizes[-1] != BATCH_SIZE):
            raise ValueError(
                "The model has batch normalisation, which would also see the rows that fill up a batch. It needs "
                f"full batches: a batch size that {DEVICES * ACCUMULATE} divides and that divides {samples}."
            )
    if SCHEDULE != "constant" or WARMUP_STEPS > 0:
        group["lr"] = LEARNING_RATE * rate_factor(0, EPOCHS * steps_per_epoch)
    if ACCELERATOR == "cpu":
        started = {"device": "cpu"}
    if ACCELERATOR == "tpu":
        started = {"device": "tpu:0"}
    if DEVICES > 1 or ACCUMULATE > 1:
        per_replica = math.ceil(BATCH_SIZE / DEVICES)
        started.update(replicas=DEVICES, strategy=STRATEGY, per_replica=per_replica, backend="xla")
    report(
        "started",
        **started,
        device_name=device_name,
        versions={"torch": torch.__version__, "torch_xla": torch_xla.__version__},
        steps_per_epoch=steps_per_epoch,
        train_samples=len(y_train),
        val_samples=val_samples,
        learning_rate=group["lr"],
    )

    def batches(x: Any, y: Any, table: Any, at: torch.Tensor) -> Iterator[Any]:
        """The samples of each line of a table, on the device; `at` is moved on by who has used them."""
        if DATA_ON_DEVICE:
            found = batches_of_lines(x, y, table, at, mesh)
        else:
            found = batches_of_files(x, y, table, device, mesh)
        return found

    if VALIDATION:

        @torch.no_grad()
        def evaluate() -> dict[str, float]:
            """Loss and accuracy over the whole validation set, each sample counted once."""
            model.eval()
            at = torch.zeros(1, dtype=torch.int64).to(device)
            sums = torch.zeros(len(val_table), 2).to(device)
            if DEVICES > 1:
                everywhere([at, sums], mesh)
            for x, y in batches(x_val, y_val, val_table, at):
                real, _ = real_rows(at, width, val_samples, 1)
                sums.index_add_(0, at, measure(forward(model, x), y, real)[None])
                at += 1
                torch_xla.sync()
            means = sums.cpu().double().sum(0) / val_samples
            if TASK == "classification":
                measured = {"val_loss": means[0].item(), "val_accuracy": means[1].item()}
            else:
                measured = {"val_loss": means[0].item()}
            return measured

    # PyTorch only notes down what is to be computed; `sync` has XLA compile the notes, if it does not know their
    # like yet, and starts the computation. Once a step: as one graph, each length of a block would be compiled.
    report("status", text="compiling")
    base_rate = LEARNING_RATE
    step = 0  # steps done
    block = 1  # steps from one fetch of the losses to the next
    begin, begun = 1, 0  # the first epoch, and the step of an epoch with which a block begins
    epoch_losses, seconds = [], 0.0
    if TASK == "classification":
        epoch_accuracies = []
    if resume_from is not None:
        begin, begun, step, base_rate = saved["epoch"], saved["position"], saved["step"], saved["learning_rate"]
        epoch_losses, seconds = saved["losses"], saved["seconds"]
        if TASK == "classification":
            epoch_accuracies = saved["accuracies"]
        if "random_xla" in saved:
            xla_model.set_rng_state(saved["random_xla"])
        report("status", text=f"going on from step {step}")

    def keep(epoch: int, position: int) -> None:
        """Writes the checkpoint: `position` batches of this epoch are done."""
        state = {"step": step, "epoch": epoch, "position": position, "learning_rate": base_rate}
        state.update(model=on_cpu(model.state_dict()), optimizer=on_cpu(optimizer.state_dict()))
        state["optimizer"]["param_groups"][0].pop("capturable", None)  # as elsewhere
        state.update(random_xla=xla_model.get_rng_state(), losses=epoch_losses, seconds=seconds)
        if TASK == "classification":
            state["accuracies"] = epoch_accuracies
        try:
            save(state, save_to / "checkpoint.pt")
            report("checkpoint", path=str(save_to / "checkpoint.pt"), step=step)
        except (OSError, RuntimeError) as problem:  # PyTorch tells a full disk as the latter
            report("warning", text=f"The checkpoint of step {step} was not written: {problem}")

    for epoch in range(begin, EPOCHS + 1):
        order = np.random.default_rng([SEED, epoch - 1]).permutation(len(y_train))[:samples]
        table = row_table(order, width, ACCUMULATE)
        if DATA_ON_DEVICE:
            table = torch.from_numpy(table).to(device)
        if not DATA_ON_DEVICE:
            table = table[begun * ACCUMULATE :]
        at = torch.full((1,), begun * ACCUMULATE).to(device)  # the line of the table
        kept = torch.zeros(steps_per_epoch, 2).to(device)  # what is measured in the steps of this epoch
        if DEVICES > 1:
            everywhere([at, kept], mesh)
        parts = batches(x_train, y_train, table, at)
        model.train()
        for position in range(begun, steps_per_epoch):
            if position == begun:
                asked = control()  # may wait here: that is the pause
                base_rate = asked.get("learning_rate", base_rate)
                if asked.get("stop") or asked.get("checkpoint"):
                    keep(epoch, position)
                if asked.get("stop"):
                    save(on_cpu(model.state_dict()), save_to / "model.pt")
                    return
                block_began = time.perf_counter()
            if SCHEDULE == "constant" and WARMUP_STEPS == 0:
                group["lr"] = base_rate
            else:
                group["lr"] = base_rate * rate_factor(step, EPOCHS * steps_per_epoch)
            optimizer.zero_grad()
            for part in range(ACCUMULATE):
                if part > 0:
                    torch_xla.sync()  # the part before is computed and its activations are gone
                x, y = next(parts)
                real, count = real_rows(at, width // ACCUMULATE, samples, ACCUMULATE)
                measured = measure(forward(model, x), y, real) / count
                measured[0].backward()
                kept.index_add_(0, at // ACCUMULATE, measured.detach()[None])
                at += 1
            optimizer.step()
            torch_xla.sync()
            step += 1
            done = position + 1 - begun  # steps of this block
            if done < block and position + 1 < steps_per_epoch:
                continue

            # A block is done: fetch what was measured, all at once.
            values = kept.cpu()[begun : position + 1].T.tolist()
            begun = position + 1
            measured = {"loss": values[0]}
            epoch_losses += measured["loss"]
            if TASK == "classification":
                measured["accuracy"] = values[1]
                epoch_accuracies += measured["accuracy"]
            took = time.perf_counter() - block_began
            seconds += took
            block = max(1, min(10 * block, round(done * BLOCK_SECONDS / took)))
            report("batch", epoch=epoch, first=step - done + 1, **measured, learning_rate=group["lr"])
            for number, value in enumerate(measured["loss"], start=step - done + 1):
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
            measured.update(evaluate())
            seconds += time.perf_counter() - began
        report("epoch", epoch=epoch, step=step, **measured, seconds=seconds)
        begun, epoch_losses, seconds = 0, [], 0.0
        if TASK == "classification":
            epoch_accuracies = []
    keep(EPOCHS + 1, 0)  # to train longer from here
    save(on_cpu(model.state_dict()), save_to / "model.pt")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(csv_report(sys.argv[1]))
    else:
        train()
