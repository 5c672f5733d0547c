"""What the named models are made of, counted without a framework: layers, parameters, memory needed.

The panel shows these numbers before any worker exists, and the plan is checked against the machine's memory
with them. The tests hold them equal to the real models of both frameworks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Names as people write them; an activation without an entry is written as it is.
_WRITTEN = {"relu": "ReLU", "gelu": "GELU", "silu": "SiLU", "leaky_relu": "Leaky ReLU", "elu": "ELU"}
# The backward pass of these needs what went in; that of the others only what came out.
_KEEPS_INPUT = ("gelu", "silu", "leaky_relu", "elu")
# Numbers that an optimizer keeps for each parameter.
_STATES = {"adam": 2, "adamw": 2, "sgd": 0, "rmsprop": 1}
RESNET_SIDE = 32  # a smaller image gets a border of zeros up to this


@dataclass(frozen=True)
class Layer:
    """One layer of a model.

    Attributes
    ----------
    name : unique in the table; for resnet50 the name that PyTorch's weights have.
    kind : "Dense", "Conv", "BatchNorm", "MaxPool", "AveragePool", "Add", "Pad", "Flatten" or "Dropout".
    shape : of one sample's output: (height, width, channels) or (features,).
    parameters : those that training changes; Keras's summary adds the running mean and variance of batch norm.
    activations : numbers per sample that the forward pass keeps for the backward pass.
    label : a few words for the panel: "Dense 512 · ReLU".
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    parameters: int
    activations: int
    label: str


def layer_table(
    model: str, input_shape: Sequence[int], outputs: int, model_args: Mapping[str, Any], framework: str
) -> list[Layer]:
    """The layers of "mlp", "cnn" or "resnet50"; an activation is told with the layer it follows.

    Parameters
    ----------
    input_shape : of one sample: (height, width, channels) or (features,).
    outputs : number of classes, or of values to predict.
    model_args : complete, as in a Plan: layers or filters, activation, dropout.
    framework : "pytorch" or "tensorflow": Keras's ResNet has biases and other strides.

    >>> [layer.label for layer in layer_table("mlp", (784,), 10, {"layers": [512], "activation": "relu",
    ...                                                            "dropout": 0.2}, "pytorch")]
    ['Dense 512 · ReLU', 'Dropout 0.2', 'Dense 10']
    """
    if model not in _BUILDERS:
        raise ValueError(f"model={model!r}: only the layers of {', '.join(_BUILDERS)} are known before a run.")
    table = _Table(tuple(input_shape), keras=framework == "tensorflow")
    _BUILDERS[model](table, outputs, **model_args)
    return table.layers


def parameter_count(
    model: str, input_shape: Sequence[int], outputs: int, model_args: Mapping[str, Any], framework: str
) -> int:
    """Parameters of the whole model that training changes; see `layer_table`.

    >>> parameter_count("mlp", (784,), 10, {"layers": [128], "activation": "relu", "dropout": 0.0}, "pytorch")
    101770
    """
    return sum(layer.parameters for layer in layer_table(model, input_shape, outputs, model_args, framework))


def least_size(model: str, model_args: Mapping[str, Any]) -> int:
    """The least height and width of the images that a model takes.

    Each entry of a cnn's filters halves the image, rounding down, and one pixel must be left. ResNet50 pads with
    zeros up to 32; below 8 nearly all that it sees would be that border.

    >>> least_size("cnn", {"filters": [32, 64]})
    4
    """
    if model == "cnn":
        return int(2 ** len(model_args["filters"]))
    return 8 if model == "resnet50" else 1


def memory_needed(
    table: Sequence[Layer],
    batch_size: int,
    optimizer: str,
    precision: str,
    data_bytes: int,
    *,
    optimizer_args: Mapping[str, Any] | None = None,
) -> int:
    """Bytes that training needs on the device; an estimate, without what the framework takes for itself.

    With P parameters, S numbers of optimizer state per parameter (Adam and AdamW 2: both moments; RMSprop 1:
    the mean square; with momentum 1 more) and A numbers per sample kept for the backward pass, each b bytes:

        4 P (weights) + 4 P (gradients) + 4 S P + batch_size * (A + 2 * largest layer) * b + data_bytes

    Twice the largest layer is for the gradients that flow between two layers. b is 4, in bf16 and fp16 2;
    these two also hold a 2-byte copy of the weights. A is what the backward pass needs: a layer's input, of
    batch norm its input and output, of max-pooling also the places of the maxima, of dropout its mask.
    """
    parameters = sum(layer.parameters for layer in table)
    states = _STATES[optimizer] + bool((optimizer_args or {}).get("momentum"))
    half = precision in ("bf16", "fp16")
    kept = sum(layer.activations for layer in table) + 2 * max(math.prod(layer.shape) for layer in table)
    weights = parameters * (4 + 4 + 4 * states + (2 if half else 0))
    return weights + batch_size * kept * (2 if half else 4) + data_bytes


class _Table:
    """Layers, added one after the other; `shape` is that of one sample behind the last one."""

    def __init__(self, shape: tuple[int, ...], *, keras: bool) -> None:
        self.layers: list[Layer] = []
        self.shape = shape
        self.keras = keras
        self._waiting = math.prod(shape)  # numbers kept of the inputs themselves: told with the first layer
        self._counts: dict[str, int] = {}

    def add(
        self,
        kind: str,
        words: Any = "",
        *,
        activation: str = "",
        parameters: int = 0,
        kept: float = 0,
        name: str = "",
    ) -> None:
        """Add a layer whose output has the shape `self.shape`; it keeps `kept` times as many numbers."""
        if not name:
            self._counts[kind] = self._counts.get(kind, 0) + 1
            name = f"{kind.lower()}_{self._counts[kind]}"
        if activation:
            kept += 1 if activation in _KEEPS_INPUT else 0
        label = f"{kind} {words}".strip()
        if activation:
            label += f" · {_WRITTEN.get(activation, activation)}"
        numbers = round(kept * math.prod(self.shape)) + self._waiting
        self._waiting = 0
        self.layers.append(Layer(name, kind, self.shape, parameters, numbers, label))

    def dense(self, units: int, activation: str = "", *, kept: int = 1, name: str = "") -> None:
        inputs = math.prod(self.shape)
        self.shape = (units,)
        self.add("Dense", units, activation=activation, parameters=(inputs + 1) * units, kept=kept, name=name)

    def conv(self, filters: int, size: int, stride: int = 1, *, bias: bool = False, name: str = "") -> None:
        height, width, channels = self.shape
        self.shape = (-(-height // stride), -(-width // stride), filters)
        parameters = (size * size * channels + bias) * filters
        self.add("Conv", f"{filters} {size}×{size}", parameters=parameters, kept=1, name=name)

    def norm(self, activation: str = "", *, kept: int = 1, name: str = "") -> None:
        numbers = 2  # scale and shift
        parameters = numbers * self.shape[-1]
        self.add("BatchNorm", activation=activation, parameters=parameters, kept=kept, name=name)

    def pool(self, name: str = "") -> None:
        self.add("MaxPool", kept=3, name=name)  # the output, and the place of each maximum in 8 bytes

    def flatten(self) -> None:
        if len(self.shape) > 1:
            self.shape = (math.prod(self.shape),)
            self.add("Flatten")

    def dropout(self, rate: float) -> None:
        if rate > 0:
            self.add("Dropout", f"{rate:g}", kept=2)  # the output and the mask


def _mlp(table: _Table, outputs: int, layers: Sequence[int], activation: str, dropout: float) -> None:
    table.flatten()
    for units in layers:
        # dropout needs its mask only: what went into it is kept if the activation needs it
        kept = 0 if dropout > 0 and activation in _KEEPS_INPUT else 1
        table.dense(units, activation, kept=kept)
        table.dropout(dropout)
    table.dense(outputs)


def _cnn(table: _Table, outputs: int, filters: Sequence[int], activation: str, dropout: float) -> None:
    for count in filters:
        table.conv(count, 3)
        table.norm(activation)
        height, width, _ = table.shape
        table.shape = (height // 2, width // 2, count)
        table.pool()
    table.flatten()
    table.dropout(dropout)
    table.dense(outputs)


def _resnet50(table: _Table, outputs: int) -> None:
    """ResNet-50 under PyTorch's names. Keras: convolutions have biases, a block's stride is in its first."""
    height, width, channels = table.shape
    if min(height, width) < RESNET_SIDE:
        table.shape = (max(height, RESNET_SIDE), max(width, RESNET_SIDE), channels)
        table.add("Pad", kept=1)
    bias = table.keras
    table.conv(64, 7, 2, bias=bias, name="conv1")
    table.norm("relu", name="bn1")
    height, width, _ = table.shape
    table.shape = (-(-height // 2), -(-width // 2), 64)
    table.pool(name="maxpool")
    for stage, (blocks, filters) in enumerate([(3, 64), (4, 128), (6, 256), (3, 512)], start=1):
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            stride = 2 if stage > 1 and block == 0 else 1
            strides = (stride, 1) if table.keras else (1, stride)
            arriving = table.shape
            if block == 0:  # the shortcut gets the new shape
                table.conv(4 * filters, 1, stride, bias=bias, name=f"{name}.downsample.0")
                table.norm(kept=0, name=f"{name}.downsample.1")
            table.shape = arriving
            table.conv(filters, 1, strides[0], bias=bias, name=f"{name}.conv1")
            table.norm("relu", name=f"{name}.bn1")
            table.conv(filters, 3, strides[1], bias=bias, name=f"{name}.conv2")
            table.norm("relu", name=f"{name}.bn2")
            table.conv(4 * filters, 1, bias=bias, name=f"{name}.conv3")
            table.norm(kept=0, name=f"{name}.bn3")
            table.add("Add", activation="relu", kept=1, name=f"{name}.add")
    table.shape = (table.shape[-1],)
    table.add("AveragePool", kept=1, name="avgpool")
    table.dense(outputs, name="fc")


_BUILDERS: dict[str, Any] = {"mlp": _mlp, "cnn": _cnn, "resnet50": _resnet50}
