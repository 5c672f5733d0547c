"""The model of a run, from the settings; a user's own one is checked first."""

from __future__ import annotations

import keras
import numpy as np
from models import cnn, mlp, resnet50
from settings import INPUT_SHAPE, MODEL, MODEL_ARGS, OUTPUTS


def own_model() -> keras.Model:
    """The place of your own model: logits of shape (samples, OUTPUTS) for inputs (samples, *INPUT_SHAPE)."""
    raise RuntimeError("MODEL is 'own': write your model into own_model().")


def build_model() -> keras.Model:
    """A fresh model with random weights."""
    if MODEL == "mlp":
        model = mlp(INPUT_SHAPE, OUTPUTS, **MODEL_ARGS)
    elif MODEL == "cnn":
        model = cnn(INPUT_SHAPE, OUTPUTS, **MODEL_ARGS)
    elif MODEL == "resnet50":
        model = resnet50(INPUT_SHAPE, OUTPUTS, **MODEL_ARGS)
    elif MODEL == "own":
        model = checked(own_model())
    return model


def checked(model: keras.Model) -> keras.Model:
    """The same model, built; one that cannot learn this task is refused in words."""
    if not isinstance(model, keras.Model):
        raise TypeError(f"own_model() must return a keras.Model. Got {type(model).__name__}.")
    try:
        outputs = model(np.zeros((2, *INPUT_SHAPE), "float32"))
    except Exception as error:
        made_for = getattr(model, "input_shape", None)
        why = f"it is made for {made_for}." if made_for else f"{type(error).__name__}: {error}"
        raise ValueError(f"The model cannot take a batch of shape {(2, *INPUT_SHAPE)}: {why}") from error
    shape = tuple(outputs.shape) if hasattr(outputs, "shape") else f"of a {type(outputs).__name__}"
    if shape != (2, OUTPUTS):
        raise ValueError(f"The model answers a batch of 2 with shape {shape}; it must be {(2, OUTPUTS)}.")
    if getattr(model.layers[-1], "activation", None) is keras.activations.softmax:
        raise ValueError("The model ends in softmax, but the loss takes logits: leave that activation out.")
    try:
        keras.saving.serialize_keras_object(model)
    except Exception:  # a class without get_config(): the file will hold weights, load_model() builds the rest
        model.get_config = dict
    return model
