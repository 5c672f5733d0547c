"""What the training script stands on, whatever computes: optimizer, order of the samples, layer table, files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import keras
import numpy as np
from settings import LEARNING_RATE, OPTIMIZER, OPTIMIZER_ARGS, PRECISION, SEED


def build_optimizer() -> keras.optimizers.Optimizer:
    """The optimizer, with its arguments under PyTorch's names: eps is Keras's epsilon, alpha its rho."""
    if OPTIMIZER == "adam":
        optimizer = keras.optimizers.Adam(
            LEARNING_RATE,
            beta_1=OPTIMIZER_ARGS["betas"][0],
            beta_2=OPTIMIZER_ARGS["betas"][1],
            epsilon=OPTIMIZER_ARGS["eps"],
        )
    elif OPTIMIZER == "adamw":
        # Each step first shrinks every weight by learning rate * weight_decay, biases too, as in PyTorch.
        optimizer = keras.optimizers.AdamW(
            LEARNING_RATE,
            beta_1=OPTIMIZER_ARGS["betas"][0],
            beta_2=OPTIMIZER_ARGS["betas"][1],
            epsilon=OPTIMIZER_ARGS["eps"],
            weight_decay=OPTIMIZER_ARGS["weight_decay"],
        )
    elif OPTIMIZER == "sgd":
        optimizer = keras.optimizers.SGD(
            LEARNING_RATE, momentum=OPTIMIZER_ARGS["momentum"], nesterov=OPTIMIZER_ARGS["nesterov"]
        )
    elif OPTIMIZER == "rmsprop":
        optimizer = keras.optimizers.RMSprop(
            LEARNING_RATE,
            rho=OPTIMIZER_ARGS["alpha"],
            epsilon=OPTIMIZER_ARGS["eps"] ** 2,  # Keras adds it under the square root, PyTorch eps after it
            momentum=OPTIMIZER_ARGS["momentum"],
        )
    if PRECISION == "fp16":
        # Small float16 gradients would round to zero: the loss is scaled up, the gradients back down.
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    return optimizer


def shuffled(samples: int, epoch: int) -> np.ndarray:
    """The order of the samples in an epoch (the first one is 0): the same for a seed on every machine."""
    return np.random.default_rng([SEED, epoch]).permutation(samples)


def parameter_count(layer: keras.layers.Layer) -> int:
    """Numbers that training changes; a summary by Keras also counts the running statistics of batch norm."""
    return sum(math.prod(weight.shape) for weight in layer.trainable_variables)


def layer_table(model: keras.Model) -> list[list[Any]]:
    """Rows of name, kind, output shape without the batch, and parameters; models inside the model are opened."""
    rows: list[list[Any]] = []
    for layer in model.layers:
        if isinstance(layer, keras.Model):
            rows += layer_table(layer)
        elif not isinstance(layer, keras.layers.InputLayer):
            try:
                shape = list(layer.output.shape[1:])
            except (AttributeError, ValueError):  # a layer that was only ever called inside a model's own call()
                shape = []
            rows.append([layer.name, type(layer).__name__, shape, parameter_count(layer)])
    return rows


def save(model: keras.Model, path: Path) -> None:
    """Writes beside and renames, so that nobody ever meets half a file."""
    fresh = path.with_name("new-" + path.name)
    try:
        model.save(fresh)
    except BaseException:
        fresh.unlink(missing_ok=True)  # half a file on a full disk keeps it full
        raise
    fresh.replace(path)


def restore(saved: list[list[np.ndarray]], model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
    """Gives the model and the optimizer the values of a checkpoint, the states of random numbers included."""
    weights, moments = saved
    for variable, value in zip(model.variables, weights, strict=True):
        variable.assign(value)
    # from the back: what scales the loss comes first, and a run that goes on in float16 or leaves it has it or not
    for variable, value in zip(reversed(optimizer.variables), reversed(moments), strict=False):
        variable.assign(value)
