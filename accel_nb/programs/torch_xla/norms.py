"""Batch normalisation as PyTorch has it elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn


def as_elsewhere(model: nn.Module) -> bool:
    """Makes the model's batch norms do what they do on other devices; False if there is none."""
    layers = [one for one in model.modules() if isinstance(one, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d))]
    for layer in layers:
        layer.forward = partial(normalise, layer, layer.forward)
    return bool(layers)


def normalise(layer: nn.Module, forward: Callable, x: torch.Tensor) -> torch.Tensor:
    """Into the running variance goes the batch's variance * n / (n - 1); torch_xla forgets the factor."""
    if not layer.training or layer.running_var is None or layer.momentum is None:
        return forward(x)
    mean, variance = layer.running_mean.clone(), layer.running_var.clone()
    y = nn.functional.batch_norm(
        x, mean, variance, layer.weight, layer.bias, training=True, momentum=layer.momentum, eps=layer.eps
    )
    count = x.numel() // x.shape[1]
    with torch.no_grad():
        layer.num_batches_tracked += 1
        layer.running_mean.copy_(mean)
        kept = layer.running_var * (1 - layer.momentum)
        layer.running_var.copy_(kept + (variance - kept) * (count / (count - 1)))
    return y
