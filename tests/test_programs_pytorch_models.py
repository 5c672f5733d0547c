"""The models of accel_nb/programs/pytorch/models.py: shapes, counts, names."""

from __future__ import annotations

import pytest
from pytorch_program import FOLDER, load

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from torch import nn  # noqa: E402

models = load(FOLDER / "train.py")


def count(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("layers", "parameters"), [([512], 407_050), ([128], 101_770), ([], 7_850), ([4, 3], 3_195)]
)
def test_mlp(layers, parameters):
    model = models.mlp((784,), 10, layers=layers, activation="relu", dropout=0.2)
    assert count(model) == parameters
    assert model(torch.zeros(3, 784)).shape == (3, 10)
    kinds = [type(layer).__name__ for layer in model]
    assert kinds == ["Flatten", *["Linear", "ReLU", "Dropout"] * len(layers), "Linear"]
    assert all(layer.p == 0.2 for layer in model if isinstance(layer, nn.Dropout))


def test_mlp_flattens_images_and_has_no_dropout_of_zero():
    model = models.mlp((28, 28, 3), 5, layers=[8], activation="tanh", dropout=0)
    assert model(torch.zeros(2, 28, 28, 3)).shape == (2, 5)
    assert [type(layer).__name__ for layer in model] == ["Flatten", "Linear", "Tanh", "Linear"]


@pytest.mark.parametrize(
    ("name", "at_minus_one"),
    [
        ("relu", 0.0),
        ("gelu", -0.158655),  # exact, not the tanh approximation (-0.158808)
        ("tanh", -0.761594),
        ("sigmoid", 0.268941),
        ("silu", -0.268941),
        ("leaky_relu", -0.01),
        ("elu", -0.632121),
    ],
)
def test_activations(name, at_minus_one):
    assert models.ACTIVATIONS[name]()(torch.tensor(-1.0)).item() == pytest.approx(at_minus_one, abs=1e-6)


@pytest.mark.parametrize(
    ("shape", "filters", "parameters"),
    [
        ((28, 28, 1), [32, 64], 9 * 32 + 64 + 9 * 32 * 64 + 128 + 7 * 7 * 64 * 10 + 10),
        ((9, 5, 3), [4], 27 * 4 + 8 + 4 * 2 * 4 * 10 + 10),
    ],
)
def test_cnn(shape, filters, parameters):
    model = models.cnn(shape, 10, filters=filters, activation="relu", dropout=0.25)
    assert count(model) == parameters
    height, width, channels = shape
    assert model(torch.zeros(2, channels, height, width)).shape == (2, 10)
    norms = [layer for layer in model if isinstance(layer, nn.BatchNorm2d)]
    assert [(norm.eps, norm.momentum) for norm in norms] == [(1e-5, 0.1)] * len(filters)


def torchvision_names(channels, outputs):
    """Names and shapes of torchvision's ResNet-50 weights, written from its published structure."""

    def norm(name, width):
        values = {f"{name}.{part}": (width,) for part in ("weight", "bias", "running_mean", "running_var")}
        return {**values, f"{name}.num_batches_tracked": ()}

    found = {"conv1.weight": (64, channels, 7, 7), **norm("bn1", 64)}
    arriving = 64
    for stage, blocks in enumerate([3, 4, 6, 3], start=1):
        width = 32 * 2**stage
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            found |= {f"{name}.conv1.weight": (width, arriving, 1, 1), **norm(f"{name}.bn1", width)}
            found |= {f"{name}.conv2.weight": (width, width, 3, 3), **norm(f"{name}.bn2", width)}
            found |= {f"{name}.conv3.weight": (4 * width, width, 1, 1), **norm(f"{name}.bn3", 4 * width)}
            if block == 0:
                found[f"{name}.downsample.0.weight"] = (4 * width, arriving, 1, 1)
                found |= norm(f"{name}.downsample.1", 4 * width)
            arriving = 4 * width
    return {**found, "fc.weight": (outputs, 2048), "fc.bias": (outputs,)}


@pytest.mark.parametrize(("channels", "outputs"), [(3, 1000), (1, 10)])
def test_resnet50_has_the_weights_of_torchvision(channels, outputs):
    model = models.resnet50((224, 224, channels), outputs)
    assert {name: tuple(w.shape) for name, w in model.state_dict().items()} == torchvision_names(channels, outputs)
    assert list(model.state_dict()) == list(torchvision_names(channels, outputs))
    if (channels, outputs) == (3, 1000):
        assert count(model) == 25_557_032


def test_resnet50_starts_and_strides_as_torchvision_does():
    halving = {f"layer{stage}.0.{part}" for stage in (2, 3, 4) for part in ("conv2", "downsample.0")} | {"conv1"}
    torch.manual_seed(0)
    model = models.resnet50((32, 32, 3), 10)
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.out_channels * module.kernel_size[0] * module.kernel_size[1]
            assert module.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.05), name
            assert module.stride == ((2, 2) if name in halving else (1, 1)), name
        if isinstance(module, nn.BatchNorm2d):
            assert module.weight.eq(1).all()
            assert module.bias.eq(0).all()


@pytest.mark.parametrize("shape", [(28, 28, 1), (8, 40, 3), (32, 32, 3), (65, 50, 3)])
def test_resnet50_takes_small_images_with_a_border(shape):
    height, width, channels = shape
    torch.manual_seed(0)
    model = models.resnet50(shape, 4).eval()
    x = torch.rand(2, channels, height, width)
    padded = torch.zeros(2, channels, max(32, height), max(32, width))
    top, left = (padded.shape[2] - height) // 2, (padded.shape[3] - width) // 2
    padded[:, :, top : top + height, left : left + width] = x
    with torch.no_grad():
        outputs = model(x)
        model.border = (0, 0, 0, 0)
        assert outputs.shape == (2, 4)
        assert torch.equal(outputs, model(padded))
