"""The PyTorch program as it stands in accel_nb/programs/pytorch: its mathematics, against plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
from pytorch_program import SMALL_CNN, Heard, after, digits, make_program, plain_loop, plain_torch, run, small_mlp  # noqa: F401 - fixtures

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from torch import nn  # noqa: E402

ADAM = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
OPTIMIZERS = {
    "adam": (ADAM, lambda p: torch.optim.Adam(p, lr=0.01, foreach=False)),
    "adamw": (
        ADAM | {"weight_decay": 0.1},
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, foreach=False),
    ),
    "sgd": (
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.001},
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.001, foreach=False),
    ),
    "rmsprop": (
        {"alpha": 0.9, "eps": 1e-8, "momentum": 0.5, "weight_decay": 0.0},
        lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.9, momentum=0.5, foreach=False),
    ),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_history_is_that_of_a_plain_loop(make, optimizer):
    data = digits(301, 70)  # the last batch has 13 samples
    arguments, build = OPTIMIZERS[optimizer]
    heard = run(make(data, OPTIMIZER=optimizer, OPTIMIZER_ARGS=arguments, LEARNING_RATE=0.01))
    model = small_mlp()
    losses, accuracies = plain_loop(model, build(model.parameters()), *data[:2])
    assert heard.column("loss") == pytest.approx(losses, rel=1e-4)
    assert heard.column("accuracy") == pytest.approx(accuracies, abs=1e-6)
    steps = [values["first"] + i for values in heard.all("batch") for i in range(len(values["loss"]))]
    assert steps == list(range(1, 21))
    assert [values["epoch"] for values in heard.all("epoch")] == [1, 2]
    assert [values["step"] for values in heard.all("epoch")] == [10, 20]
    sizes = [32] * 9 + [13]
    assert heard.all("epoch")[1]["loss"] == pytest.approx(np.average(losses[10:], weights=sizes), rel=1e-4)
    assert heard.all("epoch")[1]["accuracy"] == pytest.approx(np.average(accuracies[10:], weights=sizes), abs=1e-6)
    with torch.no_grad():
        outputs, truth = model(torch.from_numpy(data[2])), torch.from_numpy(data[3])
    last = heard.all("epoch")[1]
    assert last["val_loss"] == pytest.approx(nn.functional.cross_entropy(outputs, truth).item(), rel=1e-4)
    assert last["val_accuracy"] == pytest.approx((outputs.argmax(1) == truth).float().mean().item(), abs=1e-6)


def test_cnn_on_whole_numbers_is_a_plain_loop_on_scaled_images(make):
    x, y, x_val, y_val = digits(129, 0, images=True)  # a last batch of one
    heard = run(make((x, y, x_val, y_val), **SMALL_CNN, LEARNING_RATE=0.01))
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.25), nn.Linear(32, 10)),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, foreach=False)
    losses, _ = plain_loop(model, optimizer, (x / 16).astype(np.float32).transpose(0, 3, 1, 2).copy(), y)
    assert heard.column("loss") == pytest.approx(losses, rel=2e-3)  # convolutions sum in another order
    assert "val_loss" not in heard.all("epoch")[0]
    assert heard.all("started")[0]["val_samples"] == 0


def test_scaled_whole_numbers_train_like_the_floats_they_stand_for(make):
    x, y, x_val, y_val = digits(100, 50, images=True)
    whole = run(make((x, y, x_val, y_val), X_SCALE=16.0))
    floats = run(make(((x / 16).astype(np.float32), y, (x_val / 16).astype(np.float32), y_val)))
    assert whole.column("loss") == floats.column("loss")
    assert whole.all("epoch")[1]["val_loss"] == floats.all("epoch")[1]["val_loss"]


def test_regression(make):
    x, y, x_val, _ = digits(150, 40)
    weights = np.random.default_rng(0).normal(size=(64, 2)).astype(np.float32)
    y, y_val = x @ weights, x_val @ weights
    heard = run(make((x, y, x_val, y_val), TASK="regression", OUTPUTS=2, LEARNING_RATE=0.01))
    model = small_mlp(outputs=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, foreach=False)
    losses, _ = plain_loop(model, optimizer, x, y, loss_function=nn.functional.mse_loss)
    assert heard.column("loss") == pytest.approx(losses, rel=1e-4)
    with torch.no_grad():
        exact = nn.functional.mse_loss(model(torch.from_numpy(x_val)), torch.from_numpy(y_val)).item()
    assert heard.all("epoch")[1]["val_loss"] == pytest.approx(exact, rel=1e-4)
    assert all("accuracy" not in values for _, values in heard)


def test_validation_counts_every_sample_once_in_several_uneven_chunks(make):
    data = digits(64, 601)
    program = make(data)
    last = run(program).all("epoch")[-1]
    model = program.load_model(program.HERE / "out" / "model.pt")
    with torch.no_grad():
        outputs, truth = model(torch.from_numpy(data[2])), torch.from_numpy(data[3])
    assert last["val_loss"] == pytest.approx(nn.functional.cross_entropy(outputs, truth).item(), rel=1e-6)
    assert last["val_accuracy"] == (outputs.argmax(1) == truth).double().mean().item()


def test_drop_last_leaves_out_the_smaller_batch_only(make):
    data = digits(301, 0)
    whole, dropped = run(make(data, EPOCHS=1)), run(make(data, EPOCHS=1, DROP_LAST=True))
    assert len(whole.column("loss")) == 10
    assert dropped.column("loss") == whole.column("loss")[:9]
    assert dropped.all("started")[0]["steps_per_epoch"] == 9
    assert dropped.all("epoch")[0]["loss"] == pytest.approx(np.mean(dropped.column("loss")))


def with_batch_norm():
    return nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))


def test_a_last_batch_of_one_with_batch_norm_needs_drop_last(make):
    data = digits(65, 0)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        run(make(data, own_model=with_batch_norm))
    assert len(run(make(data, own_model=with_batch_norm, DROP_LAST=True)).column("loss")) == 4


def expected_rates(base, total, warmup, *, cosine):
    rates = []
    for step in range(total):
        if step < warmup:
            rates.append(base * (step + 1) / warmup)
        elif cosine:
            rates.append(base * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup))))
        else:
            rates.append(base)
    return rates


@pytest.mark.parametrize(("schedule", "warmup"), [("cosine", 0), ("cosine", 5), ("constant", 7), ("cosine", 20)])
def test_schedule_is_in_force_at_each_step(make, schedule, warmup):
    data = digits(301, 0)
    heard = run(make(data, SCHEDULE=schedule, WARMUP_STEPS=warmup, LEARNING_RATE=0.01, BLOCK_SECONDS=0))
    rates = expected_rates(0.01, 20, warmup, cosine=schedule == "cosine")
    assert [values["learning_rate"] for values in heard.all("batch")] == pytest.approx(rates)
    assert heard.all("started")[0]["learning_rate"] == pytest.approx(rates[0])
    model = small_mlp()
    losses, _ = plain_loop(model, torch.optim.Adam(model.parameters(), foreach=False), *data[:2], rates=rates)
    assert heard.column("loss") == pytest.approx(losses, rel=1e-4)


def test_a_new_learning_rate_is_in_force_from_the_next_step_on(make):
    data = digits(301, 0)
    program = make(data, LEARNING_RATE=0.01, BLOCK_SECONDS=0)
    heard = run(program, control=after(6, {"learning_rate": 0.003}))
    rates = [0.01] * 6 + [0.003] * 14
    assert [values["learning_rate"] for values in heard.all("batch")] == rates
    model = small_mlp()
    losses, _ = plain_loop(model, torch.optim.Adam(model.parameters(), foreach=False), *data[:2], rates=rates)
    assert heard.column("loss") == pytest.approx(losses, rel=1e-4)


def test_a_new_learning_rate_is_the_base_of_a_schedule(make):
    program = make(digits(301, 0), LEARNING_RATE=0.01, SCHEDULE="cosine", BLOCK_SECONDS=0)
    heard = run(program, control=after(6, {"learning_rate": 0.1}))
    rates = expected_rates(0.01, 20, 0, cosine=True)[:6] + expected_rates(0.1, 20, 0, cosine=True)[6:]
    assert [values["learning_rate"] for values in heard.all("batch")] == pytest.approx(rates)


def test_same_seed_same_history_whatever_the_block_length(make):
    data = digits(301, 70)
    single = run(make(data, BLOCK_SECONDS=0))
    long = run(make(data, BLOCK_SECONDS=1e9))
    assert len(single.all("batch")) == 20
    assert len(long.all("batch")) < 6
    for name in ("loss", "accuracy"):
        assert single.column(name) == long.column(name)
    timeless = [
        [{k: v for k, v in values.items() if k != "seconds"} for values in heard.all("epoch")]
        for heard in (single, long)
    ]
    assert timeless[0] == timeless[1]
    other = run(make(data, SEED=1))
    assert other.column("loss") != single.column("loss")


def test_streaming_gives_the_same_bits_as_data_on_the_device(make):
    data = digits(301, 300, images=True)
    on_device = run(make(data, **SMALL_CNN))
    streamed = run(make(data, **SMALL_CNN, DATA_ON_DEVICE=False))
    assert streamed.column("loss") == on_device.column("loss")
    assert streamed.column("accuracy") == on_device.column("accuracy")
    for here, there in zip(streamed.all("epoch"), on_device.all("epoch"), strict=True):
        assert (here["val_loss"], here["val_accuracy"]) == (there["val_loss"], there["val_accuracy"])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_trains_with_loss_and_outputs_in_float32(make, precision):
    data = digits(600, 200)
    program = make(data, PRECISION=precision, EPOCHS=6, LEARNING_RATE=0.01)
    heard = run(program)
    full = run(make(data, EPOCHS=6, LEARNING_RATE=0.01))
    assert heard.column("loss") != full.column("loss")  # half precision was really used
    assert heard.column("loss")[0] == pytest.approx(full.column("loss")[0], rel=0.02)
    accuracy = full.all("epoch")[-1]["val_accuracy"]
    assert accuracy > 0.8
    assert heard.all("epoch")[-1]["val_accuracy"] == pytest.approx(accuracy, abs=0.05)
    model = program.load_model(program.HERE / "out" / "model.pt")
    assert {weight.dtype for weight in model.state_dict().values()} == {torch.float32}
    assert program.forward(model, torch.from_numpy(data[0])).dtype == torch.float32


def where_seen(sample, samples, batch_size=32):
    """The step (from 1) of the first epoch in which a sample is used."""
    order = np.random.default_rng([0, 0]).permutation(samples)
    return int(np.flatnonzero(order == sample)[0]) // batch_size + 1


@pytest.mark.parametrize("block_seconds", [0, 1e9])
def test_a_loss_that_is_no_number_ends_the_run_with_its_step(make, block_seconds):
    x, y, x_val, y_val = digits(301, 70)
    x[5, 3] = np.nan
    program = make((x, y, x_val, y_val), BLOCK_SECONDS=block_seconds)
    heard = Heard()
    with pytest.raises(FloatingPointError, match=rf"loss is nan at step {where_seen(5, 301)} \(epoch 1\)"):
        program.train(report=heard, save_to=program.HERE / "out")
    assert heard[-1][0] == "batch"
    assert any(math.isnan(loss) for loss in heard[-1][1]["loss"])


def test_fp16_leaves_out_steps_that_overflow_and_gives_up_after_ten(make):
    x, y, x_val, y_val = digits(640, 70)
    x[5] = 1e6  # beyond float16
    program = make((x, y, x_val, y_val), PRECISION="fp16", BLOCK_SECONDS=1e9)
    losses = run(program).column("loss")
    bad = [i + 1 for i, loss in enumerate(losses) if not math.isfinite(loss)]
    assert bad[0] == where_seen(5, 640)
    assert len(bad) == 2  # once in each epoch, and training went on
    x[:] = 1e6
    with pytest.raises(FloatingPointError, match="at step 10 "):
        run(make((x, y, x_val, y_val), PRECISION="fp16"))
