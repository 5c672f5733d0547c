"""layers.py against the real models of both frameworks, and its arithmetic by hand."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from accel_nb.layers import layer_table, least_size, memory_needed, parameter_count

PROGRAMS = Path(__file__).parents[1] / "accel_nb" / "programs"
MLP = {"layers": [512], "activation": "relu", "dropout": 0.2}
CNN = {"filters": [32, 64], "activation": "relu", "dropout": 0.25}
CASES = [
    ("mlp", (784,), 10, MLP),
    ("mlp", (28, 28, 1), 10, {"layers": [128], "activation": "gelu", "dropout": 0.0}),
    ("mlp", (5,), 2, {"layers": [], "activation": "relu", "dropout": 0.5}),
    ("mlp", (64,), 3, {"layers": [20, 30, 40], "activation": "leaky_relu", "dropout": 0.1}),
    ("cnn", (28, 28, 1), 10, CNN),
    ("cnn", (13, 9, 3), 4, {"filters": [5, 6, 7], "activation": "silu", "dropout": 0.0}),
    ("resnet50", (32, 32, 3), 10, {}),
    ("resnet50", (28, 28, 1), 10, {}),
    ("resnet50", (75, 50, 3), 7, {}),
]
# What this table has no row for: an activation is told with the layer before it, the rest has no numbers.
SILENT = ("ReLU", "GELU", "SiLU", "LeakyReLU", "Activation", "ZeroPadding2D")


def real_rows(framework):
    """The parameters and output shapes of the real models, from a process of its own."""
    name = {"pytorch": "pytorch", "tensorflow": "keras"}[framework]
    done = subprocess.run(
        [sys.executable, __file__, name],
        input=json.dumps(CASES),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def pytorch():
    pytest.importorskip("torch", reason="PyTorch is not installed")
    return real_rows("pytorch")


@pytest.fixture(scope="module")
def tensorflow():
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("TensorFlow is not installed")
    return real_rows("tensorflow")


@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_table_is_the_real_model(request, framework, case):
    real = request.getfixturevalue(framework)[case]
    model, shape, outputs, args = CASES[case]
    table = layer_table(model, shape, outputs, args, framework)
    assert sum(layer.parameters for layer in table) == real["parameters"]
    assert parameter_count(model, shape, outputs, args, framework) == real["parameters"]
    rows = sorted([list(layer.shape), layer.parameters] for layer in table if layer.parameters)
    assert rows == sorted(real["rows"])


@pytest.mark.parametrize("case", range(len(CASES)))
def test_activations_are_what_the_backward_pass_really_keeps(pytorch, case):
    model, shape, outputs, args = CASES[case]
    told = sum(layer.activations for layer in layer_table(model, shape, outputs, args, "pytorch"))
    assert told == pytest.approx(pytorch[case]["kept"], rel=0.1, abs=2)  # the label: 8 bytes


def test_published_counts():
    assert parameter_count("resnet50", (224, 224, 3), 1000, {}, "pytorch") == 25_557_032
    # Keras prints 25,636,712: with the 53,120 running statistics of batch norm
    assert parameter_count("resnet50", (224, 224, 3), 1000, {}, "tensorflow") == 25_636_712 - 53_120
    for framework in ("pytorch", "tensorflow"):
        assert parameter_count("mlp", (784,), 10, MLP, framework) == 407_050
        assert parameter_count("mlp", (784,), 10, {**MLP, "layers": [128]}, framework) == 101_770


def test_labels_are_a_few_words():
    def labels(*case):
        return [layer.label for layer in layer_table(*case, "pytorch")]

    assert labels("mlp", (784,), 10, MLP) == ["Dense 512 · ReLU", "Dropout 0.2", "Dense 10"]
    assert labels("cnn", (8, 8, 1), 3, {"filters": [4], "activation": "tanh", "dropout": 0}) == [
        "Conv 4 3×3",
        "BatchNorm · tanh",
        "MaxPool",
        "Flatten",
        "Dense 3",
    ]


@pytest.mark.parametrize("case", CASES)
def test_names_are_unique(case):
    names = [layer.name for layer in layer_table(*case, "pytorch")]
    assert len(set(names)) == len(names)


def test_an_own_model_is_refused():
    with pytest.raises(ValueError, match="only the layers of mlp, cnn, resnet50 are known before a run"):
        layer_table("own", (784,), 10, {}, "pytorch")


@pytest.mark.parametrize(("filters", "least"), [([8], 2), ([8, 8], 4), ([8, 8, 8], 8)])
def test_least_size_is_the_least_that_leaves_a_pixel(filters, least):
    args = {"filters": filters, "activation": "relu", "dropout": 0.0}
    assert least_size("cnn", args) == least
    assert all(min(layer.shape) > 0 for layer in layer_table("cnn", (least, least, 1), 2, args, "pytorch"))
    below = layer_table("cnn", (least - 1, least - 1, 1), 2, args, "pytorch")
    assert any(math.prod(layer.shape) == 0 for layer in below)
    assert least_size("mlp", MLP) == 1
    assert least_size("resnet50", {}) == 8


def test_memory_is_the_sum_in_the_docstring():
    table = layer_table("mlp", (784,), 10, {"layers": [128], "activation": "relu", "dropout": 0.0}, "pytorch")
    parameters, kept = 101_770, 784 + 128 + 10 + 2 * 128
    assert memory_needed(table, 32, "sgd", "fp32", 0) == 8 * parameters + 32 * 4 * kept
    assert memory_needed(table, 32, "adam", "tf32", 1000) == 16 * parameters + 32 * 4 * kept + 1000
    assert memory_needed(table, 32, "adamw", "bf16", 0) == 18 * parameters + 32 * 2 * kept
    assert memory_needed(table, 1, "rmsprop", "fp16", 0) == 14 * parameters + 2 * kept
    momentum = {"momentum": 0.9}
    assert memory_needed(table, 1, "sgd", "fp32", 0, optimizer_args=momentum) == 12 * parameters + 4 * kept
    assert memory_needed(table, 1, "rmsprop", "fp32", 0, optimizer_args=momentum) == 16 * parameters + 4 * kept


def pytorch_facts(models, case):
    """Parameters and output shapes by layer, and the numbers per sample that autograd saves."""
    import torch

    model_name, shape, outputs, args = case
    model = getattr(models, model_name)(tuple(shape), outputs, **args).train()
    rows, saved = [], {}

    def note(layer, _, output):
        size = sum(p.numel() for p in layer.parameters())
        if size:
            rows.append([[*output.shape[2:], *output.shape[1:2]], size])

    for layer in model.modules():
        if not any(layer.children()):
            layer.register_forward_hook(note)
    own = {tensor.data_ptr() for tensor in model.state_dict().values()}
    batch = 4

    def pack(tensor):
        if tensor.data_ptr() not in own and tensor.dim() and len(tensor) == batch:
            saved[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        keep.append(tensor)  # its address is not given to another one meanwhile
        return tensor

    keep = []
    x = torch.rand(batch, *shape)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        x = x if model_name == "mlp" else x.movedim(-1, 1)
        torch.nn.functional.cross_entropy(model(x), torch.zeros(batch, dtype=torch.long))
    parameters = sum(p.numel() for p in model.parameters())
    return {"parameters": parameters, "rows": rows, "kept": sum(saved.values()) / 4 / batch}


def keras_facts(models, case):
    """Parameters and output shapes by layer, models inside the model opened."""
    import keras

    model_name, shape, outputs, args = case
    model = getattr(models, model_name)(tuple(shape), outputs, **args)

    def count(layer):
        return sum(math.prod(weight.shape) for weight in layer.trainable_variables)

    def rows(parts):
        for layer in parts:
            if isinstance(layer, keras.Model):
                yield from rows(layer.layers)
            elif count(layer):
                yield [list(layer.output.shape[1:]), count(layer)]

    return {"parameters": count(model), "rows": list(rows(model.layers))}


if __name__ == "__main__":
    sys.path.insert(0, str(PROGRAMS / sys.argv[1]))
    facts = {"pytorch": pytorch_facts, "keras": keras_facts}[sys.argv[1]]
    the_models = importlib.import_module("models")
    print(json.dumps([facts(the_models, case) for case in json.load(sys.stdin)]))
