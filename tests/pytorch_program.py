"""The PyTorch program for tests: made with settings and data of a test's own, run in this process, heard."""

from __future__ import annotations

import types
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from accel_nb.joining import joined

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from torch import nn  # noqa: E402

FOLDER = Path(__file__).parents[1] / "accel_nb" / "programs" / "pytorch"
SMALL = {"MODEL_ARGS": {"layers": [32], "activation": "relu", "dropout": 0.2}, "EPOCHS": 2, "BATCH_SIZE": 32}
SMALL_CNN = {
    "MODEL": "cnn",
    "MODEL_ARGS": {"filters": [4, 8], "activation": "relu", "dropout": 0.25},
    "INPUT_SHAPE": (8, 8, 1),
    "X_SCALE": 16.0,
}


class Heard(list):
    """A report that keeps what it is told."""

    def __call__(self, event, **values):
        self.append((event, values))

    def all(self, event):
        return [values for name, values in self if name == event]

    def column(self, name):
        return [value for values in self.all("batch") for value in values[name]]


@pytest.fixture(autouse=True)
def plain_torch():
    """One thread (test machines are shared), and no global setting left behind."""
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(state)
    torch.use_deterministic_algorithms(False)


def digits(samples, validation, *, images=False):
    """Real scans: features in 0..1 as float32, or images of 0..16 as uint8."""
    scans = load_digits()
    x = scans.images[..., None].astype(np.uint8) if images else (scans.data / 16).astype(np.float32)
    y = scans.target.astype(np.int64)
    return x[:samples], y[:samples], x[samples : samples + validation], y[samples : samples + validation]


def load(path, engine="pytorch"):
    """The program before anything is chosen, as a module that believes to lie at `path`."""
    module = types.ModuleType("program")
    module.__file__ = str(path)
    exec(compile(joined(engine), str(path), "exec"), vars(module))
    return module


@pytest.fixture(name="make")
def make_program(tmp_path):
    """make(data, own_model=None, **settings): the program, with its data in a folder of its own."""

    def make(data, own_model=None, **settings):
        x, y, x_val, y_val = data
        (tmp_path / "data").mkdir(exist_ok=True)
        for name, array in {"x_train": x, "y_train": y, "x_val": x_val, "y_val": y_val}.items():
            np.save(tmp_path / "data" / f"{name}.npy", array)
        program = load(tmp_path / "train.py")
        settings = {"INPUT_SHAPE": x.shape[1:], "VALIDATION": len(y_val) > 0, **SMALL, **settings}
        assert settings.keys() <= vars(program).keys()
        vars(program).update(settings, HERE=tmp_path)
        if own_model is not None:
            vars(program).update(MODEL="own", own_model=own_model)
        return program

    return make


def run(program, control=dict, save_to=None):
    heard = Heard()
    program.train(report=heard, control=control, save_to=save_to or program.HERE / "out")
    return heard


def after(calls, wish):
    """A control that asks for nothing, and from the call after `calls` on for `wish`."""
    count = iter(range(10**9))
    return lambda: wish if next(count) >= calls else {}


def small_mlp(dropout=0.2, outputs=10):
    torch.manual_seed(0)
    parts = [nn.Linear(64, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, outputs)]
    return nn.Sequential(*parts)


def plain_loop(
    model, optimizer, x, y, *, batch_size=32, epochs=2, loss_function=nn.functional.cross_entropy, rates=None
):
    """The loop that a textbook has, over the samples in the order that both frameworks' programs promise."""
    x, y = torch.from_numpy(x), torch.from_numpy(y)
    losses, accuracies = [], []
    for epoch in range(epochs):
        order = np.random.default_rng([0, epoch]).permutation(len(y))
        model.train()
        for start in range(0, len(y), batch_size):
            rows = torch.from_numpy(order[start : start + batch_size])
            if rates is not None:
                for group in optimizer.param_groups:
                    group["lr"] = rates[len(losses)]
            outputs = model(x[rows])
            loss = loss_function(outputs, y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if loss_function is nn.functional.cross_entropy:
                accuracies.append((outputs.argmax(1) == y[rows]).float().mean().item())
    model.eval()
    return losses, accuracies
