"""The PyTorch program as a run: stopped, streamed, compiled, refused, as a script, on a GPU."""

from __future__ import annotations

import csv
import gc
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from pytorch_program import FOLDER, SMALL_CNN, after, digits, make_program, plain_torch, run  # noqa: F401 - fixtures

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from torch import nn  # noqa: E402

from accel_nb.joining import joined  # noqa: E402

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def test_stop_leaves_a_model_and_a_checkpoint_from_which_the_next_steps_follow(make):
    data = digits(301, 70)
    program = make(data, BLOCK_SECONDS=0)
    whole = run(program)
    heard = run(program, control=after(13, {"stop": True}), save_to=program.HERE / "stopped")
    assert heard.column("loss") == whole.column("loss")[:13]
    assert len(heard.all("epoch")) == 1
    assert heard[-1] == ("checkpoint", {"path": str(program.HERE / "stopped" / "checkpoint.pt"), "step": 13})
    assert {path.name for path in (program.HERE / "stopped").iterdir()} == {"checkpoint.pt", "model.pt"}

    state = torch.load(program.HERE / "stopped" / "checkpoint.pt", weights_only=True)
    assert (state["epoch"], state["step"], state["position"], state["learning_rate"]) == (2, 13, 3, 0.001)
    model = program.build_model()
    model.load_state_dict(state["model"], strict=True)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random_cpu"][0])
    order = np.random.default_rng([0, 1]).permutation(301)
    x, y = torch.from_numpy(data[0]), torch.from_numpy(data[1])
    for step in range(13, 20):
        rows = torch.from_numpy(order[32 * (step - 10) : 32 * (step - 9)])
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        assert loss.item() == whole.column("loss")[step]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    saved = program.load_model(program.HERE / "stopped" / "model.pt")
    assert not saved.training
    assert all(torch.equal(saved.state_dict()[name], value) for name, value in state["model"].items())


def test_stop_before_the_first_step(make):
    program = make(digits(64, 0))
    heard = run(program, control=lambda: {"stop": True})
    assert [event for event, _ in heard] == ["model", "started", "checkpoint"]
    program.load_model(program.HERE / "out" / "model.pt")


@pytest.mark.parametrize("how", ["end", "stop", "error"])
def test_reading_threads_end_with_the_training(make, how):
    program = make(digits(301, 70), DATA_ON_DEVICE=False, BLOCK_SECONDS=0)
    before = set(threading.enumerate())
    seen = []

    def control():
        seen.append(len(set(threading.enumerate()) - before))
        if how == "error" and len(seen) > 3:
            raise OSError("the run's folder is gone")
        return {"stop": True} if how == "stop" and len(seen) > 3 else {}

    try:
        run(program, control=control)
    except OSError:
        assert how == "error"
    gc.collect()
    assert max(seen) > 0
    assert set(threading.enumerate()) == before


def test_an_unreadable_file_ends_the_run_with_its_error(make):
    program = make(digits(301, 0), DATA_ON_DEVICE=False)
    np.save(program.HERE / "data" / "x_train.npy", np.zeros((50, 64), np.float32))  # fewer than labels
    with pytest.raises(IndexError):
        run(program)


@pytest.mark.parametrize("channels", [1, 3])
def test_own_model_gets_images_channels_first_that_can_be_viewed(make, channels):
    shapes = set()

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(channels, 4, 3)
            self.out = nn.Linear(4 * 6 * 6, 10)

        def forward(self, x):
            shapes.add(tuple(x.shape[1:]))
            return self.out(self.conv(x).view(len(x), -1))  # refuses channels-last memory

    x, y, x_val, y_val = digits(64, 40, images=True)
    data = x.repeat(channels, axis=-1), y, x_val.repeat(channels, axis=-1), y_val
    heard = run(make(data, own_model=Own, X_SCALE=16.0))
    assert shapes == {(channels, 8, 8)}
    layers = heard.all("model")[0]["layers"]
    assert layers == [["conv", "Conv2d", [4, 6, 6], 36 * channels + 4], ["out", "Linear", [10], 1450]]


@pytest.mark.parametrize(
    ("own_model", "sentence"),
    [
        (lambda: nn.Linear(64, 7), r"gives \(2, 7\) for 2 samples, but this data needs \(2, 10\)"),
        (lambda: nn.LSTM(64, 10), r"gives tuple for 2 samples, but this data needs \(2, 10\)"),
        (lambda: nn.Linear(65, 10), r"cannot take inputs of shape \(2, 64\): mat1 and mat2"),
        (lambda: nn.Flatten(0), r"gives \(128,\) for 2 samples"),
    ],
)
def test_own_model_that_does_not_fit_is_refused_before_training(make, own_model, sentence):
    with pytest.raises(ValueError, match=sentence):
        run(make(digits(64, 0), own_model=own_model))


def test_model_and_start_are_told(make):
    heard = run(make(digits(100, 30), BATCH_SIZE=32))
    assert [event for event, _ in heard][:2] == ["model", "started"]
    told = heard.all("model")[0]
    assert told["parameters"] == 64 * 32 + 32 + 330
    assert told["layers"] == [
        ["0", "Flatten", [64], 0],
        ["1", "Linear", [32], 2080],
        ["2", "ReLU", [32], 0],
        ["3", "Dropout", [32], 0],
        ["4", "Linear", [10], 330],
    ]
    started = heard.all("started")[0]
    assert started.pop("device_name")
    assert started == {
        "device": "cpu",
        "versions": {"torch": torch.__version__},
        "steps_per_epoch": 4,
        "train_samples": 100,
        "val_samples": 30,
        "learning_rate": 0.001,
    }


def test_deterministic_is_asked_of_torch(make, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # restored afterwards
    run(make(digits(64, 0), DETERMINISTIC=True))
    assert torch.are_deterministic_algorithms_enabled()


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # raised by torch's own import
def test_compiled_training_is_the_same_and_saves_plain_names(make):
    data = digits(100, 40)
    eager = run(make(data))
    program = make(data, COMPILE=True)
    heard = run(program)
    events = [event for event, _ in heard]
    assert events[:4] == ["model", "started", "status", "batch"]
    assert heard.all("status") == [{"text": "compiling"}]
    assert len(heard.column("loss")) == 8
    assert heard.column("loss")[0] == pytest.approx(eager.column("loss")[0], rel=0.2)  # another dropout mask
    saved = torch.load(program.HERE / "out" / "model.pt", weights_only=True)
    assert list(saved) == ["1.weight", "1.bias", "4.weight", "4.bias"]


@pytest.mark.parametrize(("accelerator", "name"), [("gpu", "GPU 0"), ("mps", "Apple GPU"), ("tpu", "TPU")])
def test_an_accelerator_that_is_not_there_is_an_error(make, accelerator, name):
    current = torch.accelerator.current_accelerator()
    tpu = current is not None and current.type == "tpu"
    here = {"gpu": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "tpu": tpu}
    if here[accelerator]:
        pytest.skip(f"a usable {accelerator} is here")
    with pytest.raises(RuntimeError, match=f"wants (an? )?{name}, but PyTorch"):
        run(make(digits(64, 0), ACCELERATOR=accelerator))


def script(folder, *arguments):
    command = [sys.executable, "-W", "error", "train.py", *arguments]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_as_a_script_it_writes_the_same_numbers(make, tmp_path):
    program = make(digits(301, 70), EPOCHS=2)
    vars(program).update(MODEL_ARGS={"layers": [512], "activation": "relu", "dropout": 0.2}, BATCH_SIZE=128)
    heard = run(program)
    text = joined("pytorch")
    text = text.replace("\nINPUT_SHAPE = (784,)", "\nINPUT_SHAPE = (64,)").replace("\nEPOCHS = 5", "\nEPOCHS = 2")
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    lines = script(tmp_path, "history.csv")
    epochs = heard.all("epoch")
    assert [line.rsplit("  ", 1)[0] for line in lines] == [
        f"epoch {e['epoch']}  loss {e['loss']:.4f}  accuracy {e['accuracy']:.4f}  "
        f"val_loss {e['val_loss']:.4f}  val_accuracy {e['val_accuracy']:.4f}"
        for e in epochs
    ]
    with open(tmp_path / "history.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["step", "epoch", "loss", "accuracy", "val_loss", "val_accuracy"]
    assert [int(row["step"]) for row in rows] == list(range(1, 7))
    assert [int(row["epoch"]) for row in rows] == [1, 1, 1, 2, 2, 2]
    for name in ("loss", "accuracy"):
        assert [row[name] for row in rows] == [f"{value:.9g}" for value in heard.column(name)]
    for name in ("val_loss", "val_accuracy"):
        assert [row[name] for row in rows] == [
            "",
            "",
            f"{epochs[0][name]:.9g}",
            "",
            "",
            f"{epochs[1][name]:.9g}",
        ]
    assert (tmp_path / "repeat" / "model.pt").is_file()


@pytest.mark.hardware
@needs_cuda
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("on_device", [True, False])
def test_gpu_learns_what_the_cpu_learns(make, precision, on_device):
    data = digits(600, 200, images=True)
    cpu = run(make(data, **SMALL_CNN, EPOCHS=3))
    program = make(data, **SMALL_CNN, EPOCHS=3, ACCELERATOR="gpu", PRECISION=precision, DATA_ON_DEVICE=on_device)
    gpu = run(program)
    assert gpu.all("started")[0]["device"] == "cuda:0"
    assert gpu.column("loss")[0] == pytest.approx(cpu.column("loss")[0], rel=0.1)
    assert gpu.all("epoch")[-1]["val_accuracy"] == pytest.approx(cpu.all("epoch")[-1]["val_accuracy"], abs=0.1)
    assert torch.backends.cudnn.allow_tf32 == (precision != "fp32")
    program.load_model(program.HERE / "out" / "model.pt")


@pytest.mark.hardware
@needs_cuda
def test_gpu_repeats_itself_when_deterministic(make):
    data = digits(600, 200, images=True)
    settings = {**SMALL_CNN, "ACCELERATOR": "gpu", "DETERMINISTIC": True}
    assert run(make(data, **settings)).column("loss") == run(make(data, **settings)).column("loss")
