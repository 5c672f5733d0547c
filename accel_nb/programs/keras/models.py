"""Models built from Keras layers. Each takes the shape of one sample (channels last) and gives float32 logits."""

from __future__ import annotations

import keras


def activation_layer(name: str) -> keras.layers.Layer:
    """A fresh layer for an activation: relu, gelu, tanh, sigmoid, silu, leaky_relu or elu."""
    if name == "leaky_relu":
        return keras.layers.LeakyReLU(negative_slope=0.01)  # Keras's own default is 0.3
    return keras.layers.Activation(name)


def mlp(
    input_shape: tuple[int, ...], outputs: int, layers: list[int], activation: str, dropout: float
) -> keras.Model:
    """A multilayer perceptron: (samples, *input_shape) -> (samples, outputs)."""
    inputs = keras.Input(input_shape)
    x = keras.layers.Flatten()(inputs)
    for units in layers:
        x = keras.layers.Dense(units)(x)
        x = activation_layer(activation)(x)
        if dropout > 0:
            x = keras.layers.Dropout(dropout)(x)
    logits = keras.layers.Dense(outputs, dtype="float32")(x)
    return keras.Model(inputs, logits, name="mlp")


def cnn(
    input_shape: tuple[int, ...], outputs: int, filters: list[int], activation: str, dropout: float
) -> keras.Model:
    """A small convolutional network: (samples, height, width, channels) -> (samples, outputs).

    Each entry of `filters` halves height and width.
    """
    inputs = keras.Input(input_shape)
    x = inputs
    for count in filters:
        x = keras.layers.Conv2D(count, 3, padding="same", use_bias=False)(x)
        x = keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(x)
        x = activation_layer(activation)(x)
        x = keras.layers.MaxPooling2D(2)(x)
    x = keras.layers.Flatten()(x)
    if dropout > 0:
        x = keras.layers.Dropout(dropout)(x)
    logits = keras.layers.Dense(outputs, dtype="float32")(x)
    return keras.Model(inputs, logits, name="cnn")


def resnet50(input_shape: tuple[int, ...], outputs: int) -> keras.Model:
    """ResNet-50 with random weights: (samples, height, width, channels) -> (samples, outputs).

    The network halves height and width five times, so a side under 32 is padded with zeros to 32.
    """
    height, width, channels = input_shape
    inputs = keras.Input(input_shape)
    x = inputs
    if height < 32 or width < 32:
        top, left = max(32 - height, 0) // 2, max(32 - width, 0) // 2
        bottom, right = max(32 - height, 0) - top, max(32 - width, 0) - left
        x = keras.layers.ZeroPadding2D(((top, bottom), (left, right)))(x)
    body = keras.applications.ResNet50(
        include_top=False,
        weights=None,
        pooling="avg",
        input_shape=(max(height, 32), max(width, 32), channels),
    )
    logits = keras.layers.Dense(outputs, dtype="float32")(body(x))
    return keras.Model(inputs, logits, name="resnet50")
