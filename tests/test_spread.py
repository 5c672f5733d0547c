"""How a run is spread: what each strategy becomes on each machine, and what does not go together."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from fake_machines import GIB, MACHINES, bare
from hypothesis import given
from hypothesis import strategies as st

import accel_nb as anb
from accel_nb.diagnose import Diagnosis
from accel_nb.facts import Facts
from accel_nb.plan import STRATEGIES, Plan
from accel_nb.resolve import Resolved, resolve
from accel_nb.spread import least_part


def facts(train: int = 1437) -> Facts:
    return Facts("own", "own arrays", (28, 28, 1), 10, "classification", 1.0, train, 360, train * 784)


def resolved(here: str | Diagnosis, train: int = 1437, **fields: Any) -> Resolved:
    diagnosis = MACHINES[here] if isinstance(here, str) else here
    return resolve(Plan(**fields), machine=diagnosis.machine, diagnosis=diagnosis, facts=facts(train))


# here, what is asked, and what becomes of it: accelerator, strategy, devices, replicas
KERAS = {"framework": "tensorflow"}
MADE = [
    ("cpu", {}, ("cpu", "single", 1, 1)),
    ("cpu", {"devices": 1}, ("cpu", "single", 1, 1)),
    ("cpu", {"devices": 4}, ("cpu", "ddp", 4, 4)),
    ("cpu", {**KERAS, "devices": 3}, ("cpu", "mirrored", 3, 3)),
    ("cpu", {"strategy": "ddp"}, ("cpu", "ddp", 2, 2)),
    ("cpu", {"strategy": "fsdp", "devices": 1}, ("cpu", "fsdp", 1, 1)),
    ("cpu", {**KERAS, "strategy": "multi_worker"}, ("cpu", "multi_worker", 2, 2)),
    ("cpu", {"nodes": 2}, ("cpu", "ddp", 1, 2)),
    ("cpu", {**KERAS, "nodes": 3, "devices": 2}, ("cpu", "multi_worker", 2, 6)),
    ("1 GPU", {}, ("gpu:0", "single", 1, 1)),
    ("1 GPU", {"strategy": "ddp"}, ("gpu:0", "ddp", 1, 1)),
    ("1 GPU", {"nodes": 4}, ("gpu:0", "ddp", 1, 4)),
    ("1 GPU", {**KERAS, "strategy": "mirrored", "accelerator": "cpu"}, ("cpu", "mirrored", 2, 2)),
    ("4 GPUs", {}, ("gpu:0", "single", 1, 1)),
    ("4 GPUs", {"accelerator": "gpu:2"}, ("gpu:2", "single", 1, 1)),
    ("4 GPUs", {"devices": 2}, ("gpu", "ddp", 2, 2)),
    ("4 GPUs", {"strategy": "fsdp"}, ("gpu", "fsdp", 4, 4)),
    ("4 GPUs", {"strategy": "fsdp", "accelerator": "gpu"}, ("gpu", "fsdp", 4, 4)),
    ("4 GPUs", {"strategy": "ddp", "accelerator": "gpu:0"}, ("gpu:0", "ddp", 1, 1)),
    ("4 GPUs", {**KERAS, "strategy": "mirrored"}, ("gpu", "mirrored", 4, 4)),
    ("4 GPUs", {"nodes": 2}, ("gpu", "ddp", 4, 8)),
    ("GPU 0 fails", {}, ("gpu:1", "single", 1, 1)),
    ("GPU 2 fails", {"devices": 2}, ("gpu", "ddp", 2, 2)),
    ("Apple", {}, ("mps", "single", 1, 1)),
    ("Apple", {"devices": 2}, ("cpu", "ddp", 2, 2)),
    ("Apple", {"strategy": "ddp"}, ("cpu", "ddp", 2, 2)),
    ("Apple", {"nodes": 2}, ("cpu", "ddp", 1, 2)),
    ("cpu", {**KERAS, "strategy": "tpu", "accelerator": "cpu"}, ("cpu", "tpu", 1, 1)),
    ("cpu", {**KERAS, "strategy": "tpu", "accelerator": "cpu", "devices": 4}, ("cpu", "tpu", 4, 4)),
    ("1 TPU chip", {}, ("tpu", "tpu", 1, 1)),
    ("4 TPU chips", {}, ("tpu", "tpu", 4, 4)),
    ("4 TPU chips", {**KERAS, "strategy": "tpu"}, ("tpu", "tpu", 4, 4)),
    ("4 TPU chips", {"accelerator": "tpu", "devices": 4}, ("tpu", "tpu", 4, 4)),
    ("TPU v3", {}, ("tpu", "tpu", 8, 8)),
    ("torch_tpu", {}, ("tpu", "tpu", 1, 1)),
    ("1 TPU chip", {"strategy": "ddp"}, ("cpu", "ddp", 2, 2)),
    ("1 TPU chip", {"strategy": "single"}, ("cpu", "single", 1, 1)),
    ("Colab's TPU", KERAS, ("tpu", "tpu", 1, 1)),
]  # fmt: skip


@pytest.mark.parametrize(("here", "asked", "got"), MADE)
def test_what_a_plan_becomes(here: str, asked: dict[str, Any], got: tuple[str, str, int, int]) -> None:
    made = resolved(here, **asked)
    plan = made.plan
    assert (plan.accelerator, plan.strategy, plan.devices, made.replicas) == got
    for field in ("accelerator", "strategy", "devices"):
        if getattr(made.asked, field) in ("auto", None) and (field != "devices" or plan.strategy != "single"):
            assert made.reasons[field]
    settings = made.settings()
    assert settings["STRATEGY"] == plan.strategy
    assert settings["DEVICES"] * settings["NODES"] == made.replicas
    assert settings["ACCELERATOR"] == plan.accelerator.partition(":")[0]
    assert made.gpus == (list(range(plan.devices)) if plan.accelerator == "gpu" else [])
    json.dumps(made.to_dict())


# here, what is asked, the field that the refusal is about, a part of why, a part of what to do
REFUSED = [
    ("cpu", {"strategy": "single", "devices": 2}, "devices", "is one device", "strategy='auto'"),
    ("cpu", {"strategy": "single", "nodes": 2}, "nodes", "works on one machine", "'ddp' or 'fsdp'"),
    ("cpu", {**KERAS, "strategy": "mirrored", "nodes": 2}, "nodes", "on one machine", "'multi_worker'"),
    ("cpu", {"strategy": "tpu"}, "strategy", "no TPU", "accelerator='cpu'"),
    ("cpu", {"strategy": "tpu", "accelerator": "tpu"}, "accelerator", "no TPU", "strategy='tpu', acc"),
    ("cpu", {"devices": 200}, "batch_size", "200 devices share a batch", "Pass 200 or more"),
    ("1 GPU", {"devices": 2}, "devices", "not here", "Pass fewer"),
    ("1 GPU", {"strategy": "tpu", "accelerator": "gpu"}, "strategy", "over TPU chips", "accelerator='tpu'"),
    ("4 GPUs", {"devices": 5}, "devices", "not here", "Pass fewer"),
    ("4 GPUs", {"devices": 2, "accelerator": "gpu:1"}, "accelerator", "takes the first GPUs", "Pass 'gpu'"),
    ("4 GPUs", {"strategy": "ddp", "accelerator": "gpu:1"}, "accelerator", "the first GPUs", "'single'"),
    ("4 GPUs", {"strategy": "single", "devices": 4}, "devices", "one device", "strategy='auto'"),
    ("GPU 0 fails", {"strategy": "ddp"}, "strategy", "GPU 0 does not work", "CUDA_VISIBLE_DEVICES=1,2,3"),
    ("GPU 0 fails", {"nodes": 2}, "nodes", "GPU 0 does not work", "CUDA_VISIBLE_DEVICES=1,2,3"),
    ("GPU 0 fails", {"devices": 2}, "devices", "GPU 0 does not work", "CUDA_VISIBLE_DEVICES=1,2,3"),
    ("GPU 2 fails", {"strategy": "fsdp"}, "strategy", "GPU 2 does not work", "CUDA_VISIBLE_DEVICES=0,1,3"),
    ("GPU 2 fails", {"devices": 3}, "devices", "GPU 2 does not work", "CUDA_VISIBLE_DEVICES=0,1,3"),
    ("GPU 2 fails", {"devices": 4}, "devices", "not here", "Pass fewer"),
    ("Apple", {"accelerator": "mps", "devices": 2}, "devices", "one device", "accelerator='cpu'"),
    ("Apple", {"accelerator": "mps", "nodes": 2}, "nodes", "one device", "accelerator='cpu'"),
    ("Apple", {"accelerator": "mps", "strategy": "ddp"}, "strategy", "one device", "accelerator='cpu'"),
    ("1 TPU chip", {"devices": 2}, "devices", "not here", "Pass fewer"),
    ("4 TPU chips", {"devices": 2}, "devices", "takes all", "Pass 4, or leave it out"),
    ("torch_tpu", {"devices": 2}, "devices", "not here", "Pass fewer"),
    ("4 TPU chips", {"accelerator": "tpu", "strategy": "ddp"}, "strategy", "of its own", "'auto'"),
    ("4 TPU chips", {"nodes": 2}, "nodes", "on one machine", "nodes=1"),
    ("cpu", {"accumulate": 129}, "accumulate", "128 samples", "1 to 128"),
    ("cpu", {"devices": 128, "accumulate": 2}, "accumulate", "1 sample of a batch", "Pass 1."),
    ("cpu", {"devices": 2, "accumulate": 65}, "accumulate", "64 samples", "1 to 64"),
    ("cpu", {"model": "cnn", "accumulate": 128}, "accumulate", "two samples", "smaller"),
    ("cpu", {"model": "cnn", "batch_size": 1}, "batch_size", "two samples", "2 or more"),
    ("cpu", {**KERAS, "activation_checkpointing": True}, "activation_checkpointing", "PyTorch", "or framework"),
    ("4 TPU chips", {"activation_checkpointing": True}, "activation_checkpointing", "PyTorch", "False."),
    ("4 TPU chips", {"model": "cnn", "batch_size": 130}, "batch_size", "share evenly", "Pass 128"),
    ("4 TPU chips", {"model": "cnn", "accumulate": 3}, "batch_size", "evenly in each of 3 parts", "Pass 120"),
    ("4 TPU chips", {"model": "cnn", "batch_size": 8, "accumulate": 3}, "accumulate", "2 samples", "1 to 2"),
]  # fmt: skip


@pytest.mark.parametrize(("here", "asked", "field", "why", "do"), REFUSED)
def test_what_does_not_go_together(here: str, asked: dict[str, Any], field: str, why: str, do: str) -> None:
    with pytest.raises(anb.PlanError) as refused:
        resolved(here, **asked)
    assert refused.value.field == field
    assert why in refused.value.why
    assert do in refused.value.do
    assert refused.value.passed in (asked.get(field), Plan(**asked)._fields()[field])


def test_more_processes_than_memory() -> None:
    small = bare(memory=1 * GIB)
    with pytest.raises(anb.PlanError, match="9 processes need about") as refused:
        resolved(small, strategy="ddp", devices=9)
    assert (refused.value.field, refused.value.here) == ("devices", "1.0 GiB free")
    assert resolved(small, strategy="mirrored", devices=9, framework="tensorflow").replicas == 9  # one process


def test_batches_are_shared_out() -> None:
    made = resolved("cpu", devices=3, batch_size=100, accumulate=4)
    assert (made.replicas, made.per_replica, made.batch_size, made.steps_per_epoch) == (3, 34, 100, 15)
    assert made.settings()["BATCH_SIZE"] == 100
    assert made.settings()["ACCUMULATE"] == 4
    assert not made.drop_last
    few = resolved("cpu", train=50, devices=2)
    assert (few.per_replica, few.batch_size, few.steps_per_epoch) == (25, 128, 1)


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize(("train", "batch"), [(1437, 128), (50, 128), (3, 128), (129, 128), (128, 128)])
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_steps_of_one_shape(devices: int, train: int, batch: int, model: str) -> None:
    """What a TPU computes: each step the same number of rows; with batch normalisation all of them real."""
    fields = {"strategy": "tpu", "accelerator": "cpu", "framework": "tensorflow", "devices": devices}
    if model == "cnn" and train < devices:
        with pytest.raises(anb.PlanError, match="a sample for each"):
            resolved("cpu", train=train, model=model, batch_size=batch, **fields)
        return
    made = resolved("cpu", train=train, model=model, batch_size=batch, **fields)
    assert made.static_shapes
    assert 0 < made.batch_size <= train
    left = train - made.steps_per_epoch * made.batch_size
    if model == "cnn":
        assert made.batch_size % devices == 0
        assert made.drop_last == (left > 0)
        assert 0 <= left < made.batch_size
        assert (f"leaves out {left} samples" in " ".join(made.notes)) == made.drop_last
    else:
        assert not made.drop_last
        assert left <= 0


def test_a_tpu_on_which_nothing_is_compiled_for_one_shape() -> None:
    made = resolved("torch_tpu", model="cnn", train=1437)
    assert (made.engine, made.static_shapes, made.drop_last) == ("torch_tpu", False, False)
    assert made.plan.devices == 1
    assert "4 TPU chips" in made.reasons["devices"]
    assert resolved("torch_tpu", activation_checkpointing=True).plan.activation_checkpointing


@pytest.mark.parametrize(
    ("rows", "count", "parts"), [(64, 2, 1), (7, 2, 2), (5, 4, 2), (3, 8, 4), (97, 6, 11), (1, 1, 1)]
)
def test_the_smallest_part_of_a_batch(rows: int, count: int, parts: int) -> None:
    shares = [np.arange(rows)[replica::count] for replica in range(count)]
    sizes = [sum(len(share[part::parts]) for share in shares) for part in range(parts)]
    assert sum(sizes) == rows
    assert least_part(rows, count, parts) == min(size for size in sizes if size)


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_a_last_batch_with_too_small_a_part_for_normalisation_is_left_out(devices: int, accumulate: int) -> None:
    """Three devices in two parts: of a last batch of 4, part 1 would be one row of the first device."""
    for rest in range(1, 32):
        made = resolved("cpu", train=32 + rest, model="cnn", batch_size=32, devices=devices, accumulate=accumulate)
        assert made.drop_last or least_part(rest, devices, accumulate) >= 2
        assert made.drop_last == ("drop_last" in made.reasons)
        assert sum("leaves out" in note for note in made.notes) == made.drop_last
        assert made.steps_per_epoch == 2 - made.drop_last
        if rest >= 2 * devices * accumulate:
            assert not made.drop_last


def test_normalisation_in_parts_is_told() -> None:
    made = resolved("cpu", model="cnn", accumulate=4, devices=2)
    assert "sees 32 of 128 samples at a time" in " ".join(made.notes)
    assert "normalisation" not in " ".join(resolved("cpu", accumulate=4).notes)
    assert "if the model has any" in " ".join(resolved("cpu", model=lambda: None, accumulate=4).notes)


def test_devices_of_a_cpu_are_no_faster() -> None:
    assert "2 devices share this computer's 2 cores" in " ".join(resolved("cpu", devices=2).notes)
    assert "share this computer" not in " ".join(resolved("cpu", nodes=2).notes)
    assert "devices=4 uses all of them" in " ".join(resolved("4 GPUs").notes)
    assert resolved("4 GPUs", devices=1).notes == resolved("4 GPUs", accelerator="gpu:1").notes == []


whole = {
    "framework": st.sampled_from(["pytorch", "tensorflow"]),
    "accelerator": st.sampled_from(["auto", "cpu", "gpu", "gpu:0", "gpu:1", "gpu:7", "mps", "tpu"]),
    "strategy": st.sampled_from(sorted({"auto", *STRATEGIES["pytorch"], *STRATEGIES["tensorflow"]})),
    "devices": st.none() | st.integers(1, 9) | st.sampled_from([1024]),
    "nodes": st.sampled_from([1, 1, 1, 2, 3, 1024]),
    "accumulate": st.sampled_from([1, 1, 2, 3, 8, 200]),
    "activation_checkpointing": st.booleans(),
    "batch_size": st.sampled_from([1, 2, 7, 32, 128, 129, 5000]),
    "model": st.sampled_from(["mlp", "cnn", "resnet50"]),
    "precision": st.sampled_from(["auto", "fp32", "bf16"]),
    "compile": st.sampled_from(["auto", True, False]),
    "deterministic": st.booleans(),
}


@given(st.sampled_from(sorted(MACHINES)), st.integers(1, 300) | st.just(1437), st.fixed_dictionaries(whole))
def test_whatever_is_asked_is_resolved_or_refused_in_words(here: str, train: int, fields: dict[str, Any]) -> None:
    try:
        made = resolved(here, train=train, **fields)
    except (anb.PlanError, anb.DataError) as refusal:
        problem: Any = refusal
    else:
        problem = None
        consistent(made, fields, train)
    if problem is not None:
        assert problem.field in {*fields, "data"}
        assert problem.why.endswith((".", ")", "!"))
        assert problem.do
        if problem.field in fields:
            assert problem.passed == fields[problem.field] or fields[problem.field] is None


def consistent(made: Resolved, fields: dict[str, Any], train: int) -> None:
    """What holds for every resolved plan."""
    plan = made.plan
    assert plan.strategy in STRATEGIES[plan.framework]
    assert plan.devices * plan.nodes == made.replicas >= 1
    assert fields["strategy"] in ("auto", plan.strategy)
    assert fields["devices"] in (None, plan.devices)
    assert fields["accelerator"] in ("auto", plan.accelerator, plan.accelerator.partition(":")[0])
    assert (plan.strategy == "single") <= (made.replicas == 1)
    assert (plan.accelerator == "tpu") <= (plan.strategy == "tpu")
    assert 1 <= made.per_replica <= plan.batch_size
    assert plan.accumulate <= made.per_replica
    assert made.steps_per_epoch >= 1
    rows = min(plan.batch_size, train)
    if plan.model != "mlp":
        assert least_part(rows, made.replicas, plan.accumulate) >= 2
        rest = train % plan.batch_size
        if not made.drop_last and rest:
            assert least_part(rest, made.replicas, plan.accumulate) >= 2
    if made.static_shapes:
        assert made.batch_size <= train
        assert plan.model == "mlp" or made.batch_size % (made.replicas * plan.accumulate) == 0
    json.dumps(made.to_dict())
    assert str(made)
