"""What saves memory in the PyTorch program changes no result: batches in parts, activations computed anew."""

from __future__ import annotations

import numpy as np
import pytest
from pytorch_program import SMALL_CNN, digits, make_program, plain_torch, run  # noqa: F401 - fixtures

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from torch import nn  # noqa: E402

PLAIN = {"MODEL_ARGS": {"layers": [32], "activation": "relu", "dropout": 0.0}}
SHOWN = ("loss", "accuracy", "val_loss", "val_accuracy")


def epochs(heard):
    return [[values[name] for name in SHOWN if name in values] for values in heard.all("epoch")]


def saved(program):
    return torch.load(program.HERE / "out" / "model.pt", weights_only=True)


class Residual(nn.Module):
    """Blocks in a list, one of them without weights, keyword arguments, dropout, batch norm."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.act = nn.ReLU(inplace=True)
        self.out = nn.Linear(64, 10)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x, scale=0.5)
        return self.out(self.act(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(64, momentum=None)
        self.inner, self.outer = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x, *, scale):
        hidden = torch.relu(self.inner(self.norm(x)))
        return scale * self.outer(nn.functional.dropout(hidden, 0.3, self.training))


MODELS = {
    "mlp": {"MODEL_ARGS": {"layers": [32, 32], "activation": "gelu", "dropout": 0.2}},
    "cnn": SMALL_CNN,
    "resnet50": {"MODEL": "resnet50", "MODEL_ARGS": {}, "X_SCALE": 16.0, "EPOCHS": 1},
    "own": {"MODEL": "own"},
}


@pytest.mark.parametrize(
    ("model", "precision"),
    [*((name, "fp32") for name in MODELS), ("mlp", "bf16"), ("cnn", "bf16"), ("own", "fp16")],
)
def test_activations_computed_anew_give_the_same_bits(make, model, precision):
    """Dropout has the same masks, and batch norm counts each batch once."""
    samples = 9 if model == "resnet50" else 101
    data = digits(samples, 20, images=model in ("cnn", "resnet50"))
    settings = {**MODELS[model], "PRECISION": precision, "BATCH_SIZE": 5 if model == "resnet50" else 32}
    own = {"own_model": Residual} if model == "own" else {}
    program = make(data, **own, **settings)
    kept = run(program)
    weights = saved(program)
    again = make(data, **own, **settings, ACTIVATION_CHECKPOINTING=True)
    told = run(again)
    assert told.column("loss") == kept.column("loss")
    assert epochs(told) == epochs(kept)
    assert list(saved(again)) == list(weights)
    for name, value in saved(again).items():
        assert torch.equal(value, weights[name]), name


@pytest.mark.parametrize("model", ["mlp", "cnn", "resnet50", "own"])
def test_activations_computed_anew_are_not_kept(make, model):
    data = digits(8, 0, images=model in ("cnn", "resnet50"))
    own = {"own_model": Residual} if model == "own" else {}
    program = make(data, **own, **MODELS[model])
    x = torch.from_numpy(data[0])

    def elements(model):
        """Of what the forward pass keeps for the backward pass, weights aside."""
        held = {p.untyped_storage().data_ptr() for p in model.parameters()}
        count = 0

        def keep(tensor):
            nonlocal count
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in held:
                held.add(storage.data_ptr())
                count += storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            program.forward(model.train(), x)
        return count

    module = program.build_model()
    before = elements(module)
    program.recompute_activations(module)
    assert elements(module) < 0.7 * before


def test_parts_of_a_batch_give_the_run_of_the_whole_batches(make):
    data = digits(301, 70)  # the last batch has 13 samples
    whole = run(make(data, **PLAIN))
    for parts in (3, 13, 32):  # 32 parts of one sample, and of the last batch 13
        told = run(make(data, **PLAIN, ACCUMULATE=parts))
        assert told.column("loss") == pytest.approx(whole.column("loss"), rel=1e-5)
        assert told.column("accuracy") == pytest.approx(whole.column("accuracy"), abs=1e-6)
        np.testing.assert_allclose(epochs(told), epochs(whole), rtol=1e-5)
        about = told.all("started")[0]
        assert (about["replicas"], about["strategy"], about["per_replica"]) == (1, "single", 32)


def test_parts_of_a_batch_are_forwarded_one_by_one(make):
    sizes = []

    class Own(nn.Linear):
        def forward(self, x):
            sizes.append(len(x))
            return super().forward(x)

    data = digits(39, 0)
    for on_device in (True, False):
        sizes.clear()
        run(make(data, own_model=lambda: Own(64, 10), ACCUMULATE=3, EPOCHS=1, DATA_ON_DEVICE=on_device))
        assert sizes == [2, 11, 11, 10, 3, 2, 2]  # the layer table's two; 32 samples; 7 samples


@pytest.mark.parametrize("settings", [{"TASK": "regression", "OUTPUTS": 2}, {"PRECISION": "fp16"}])
def test_parts_of_a_batch_with_other_losses(make, settings):
    x, y, x_val, y_val = digits(100, 30)
    if "TASK" in settings:
        weights = np.random.default_rng(0).normal(size=(64, 2)).astype(np.float32)
        y, y_val = x @ weights, x_val @ weights
    data, settings = (x, y, x_val, y_val), {**PLAIN, **settings}
    whole, told = run(make(data, **settings)), run(make(data, **settings, ACCUMULATE=4))
    assert told.column("loss") == pytest.approx(
        whole.column("loss"), rel=1e-3 if "PRECISION" in settings else 1e-5
    )
    assert ("accuracy" in told.all("batch")[0]) == ("TASK" not in settings)
