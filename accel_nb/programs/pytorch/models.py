"""Models built from PyTorch layers. Each takes the shape of one sample, channels last, and gives logits."""

from __future__ import annotations

import math

import torch
from torch import nn

ACTIVATIONS = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU,
}


def mlp(input_shape: tuple, outputs: int, layers: list[int], activation: str, dropout: float) -> nn.Module:
    """A multilayer perceptron: (samples, *input_shape) -> (samples, outputs)."""
    modules: list[nn.Module] = [nn.Flatten()]
    size = math.prod(input_shape)
    for width in layers:
        modules += [nn.Linear(size, width), ACTIVATIONS[activation]()]
        if dropout > 0:
            modules.append(nn.Dropout(dropout))
        size = width
    modules.append(nn.Linear(size, outputs))
    return nn.Sequential(*modules)


def cnn(input_shape: tuple, outputs: int, filters: list[int], activation: str, dropout: float) -> nn.Module:
    """A small convolutional network: (samples, channels, height, width) -> (samples, outputs).

    Each entry of `filters` halves height and width.
    """
    height, width, channels = input_shape
    modules: list[nn.Module] = []
    for count in filters:
        modules += [
            nn.Conv2d(channels, count, kernel_size=3, padding=1, bias=False),  # batch norm has a bias of its own
            nn.BatchNorm2d(count),
            ACTIVATIONS[activation](),
            nn.MaxPool2d(2),
        ]
        height, width, channels = height // 2, width // 2, count
    modules.append(nn.Flatten())
    if dropout > 0:
        modules.append(nn.Dropout(dropout))
    modules.append(nn.Linear(height * width * channels, outputs))
    return nn.Sequential(*modules)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around a shortcut. The stride is in the 3x3 one ("ResNet v1.5")."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or channels != 4 * width:  # the shortcut must arrive with the same shape
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        x = self.bn3(self.conv3(x))
        return self.relu(x + shortcut)


class ResNet50(nn.Module):
    """ResNet-50 with the parameter names of torchvision, so that its weights load.

    (samples, channels, height, width) -> (samples, outputs). The network halves height and width five times,
    so a side under 32 is padded with zeros to 32.
    """

    def __init__(self, input_shape: tuple, outputs: int) -> None:
        super().__init__()
        height, width, channels = input_shape
        rows, columns = max(0, 32 - height), max(0, 32 - width)
        self.border = (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2)
        self.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = self.stage(64, 64, blocks=3, stride=1)
        self.layer2 = self.stage(256, 128, blocks=4, stride=2)
        self.layer3 = self.stage(512, 256, blocks=6, stride=2)
        self.layer4 = self.stage(1024, 512, blocks=3, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(2048, outputs)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    @staticmethod
    def stage(channels: int, width: int, blocks: int, stride: int) -> nn.Sequential:
        first = Bottleneck(channels, width, stride)
        return nn.Sequential(first, *(Bottleneck(4 * width, width, 1) for _ in range(blocks - 1)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if any(self.border):
            x = nn.functional.pad(x, self.border)
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


def resnet50(input_shape: tuple, outputs: int) -> nn.Module:
    """ResNet-50 with random weights: (samples, channels, height, width) -> (samples, outputs)."""
    return ResNet50(input_shape, outputs)
