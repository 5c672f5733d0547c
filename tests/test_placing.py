"""Which accelerator a plan gets on each machine, and by which route a framework reaches a TPU."""

from __future__ import annotations

from typing import Any

import pytest
from fake_machines import BROKEN, MACHINES

import accel_nb as anb
from accel_nb.facts import Facts
from accel_nb.placing import here
from accel_nb.resolve import Resolved, resolve
from accel_nb.routes import tpu_route

FACTS = Facts("own", "own arrays", (28, 28, 1), 10, "classification", 1.0, 1437, 360, 1437 * 784)
KERAS = {"framework": "tensorflow"}


def resolved(machine: str, **fields: Any) -> Resolved:
    diagnosis = MACHINES[machine]
    return resolve(anb.Plan(**fields), machine=diagnosis.machine, diagnosis=diagnosis, facts=FACTS)


# machine, what is asked, the accelerator, a part of its reason
PLACED = [
    ("cpu", {}, "cpu", "no GPU: This machine has no NVIDIA GPU."),
    ("1 GPU", {}, "gpu:0", "the GPU is usable"),
    ("4 GPUs", {}, "gpu:0", "the first of 4 usable GPUs"),
    ("4 GPUs", {"strategy": "fsdp"}, "gpu", "counted from 0"),
    ("GPU 0 fails", {}, "gpu:1", "the first of 3 usable GPUs"),
    ("GPU 2 fails", KERAS, "gpu:0", "the first of 3 usable GPUs"),
    ("Apple", {}, "mps", "the Apple GPU is usable"),
    ("Apple", {"strategy": "single"}, "mps", "the Apple GPU is usable"),
    ("Apple", {"devices": 2}, "cpu", "one device"),
    ("Apple", KERAS, "cpu", "no GPU"),
    ("4 TPU chips", {}, "tpu", "the TPU is usable"),
    ("4 TPU chips", KERAS, "tpu", "the TPU is usable"),
    ("4 TPU chips", {"strategy": "tpu"}, "tpu", "what the strategy 'tpu' is for"),
    ("4 TPU chips", {"strategy": "fsdp"}, "cpu", "not with strategy='fsdp'"),
    ("Colab's TPU", KERAS, "tpu", "the TPU is usable"),
]


@pytest.mark.parametrize(("machine", "asked", "got", "reason"), PLACED)
def test_an_open_accelerator_gets_the_best_with_its_reason(
    machine: str, asked: dict[str, Any], got: str, reason: str
) -> None:
    made = resolved(machine, **asked)
    assert made.plan.accelerator == got
    assert reason in made.reasons["accelerator"]


@pytest.mark.parametrize("machine", ["1 TPU chip", "4 TPU chips", "Colab's TPU"])
@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_the_route_to_a_tpu_is_told_with_why(machine: str, framework: str) -> None:
    made = resolved(machine, framework=framework, accelerator="tpu")
    route = tpu_route(framework, MACHINES[machine], "tpu")
    assert route.usable
    assert (made.engine, made.environment) == (route.engine, route.environment)
    assert made.reasons["strategy"] == route.text
    assert "engine" not in made.reasons  # told once
    named = resolved(machine, framework=framework, accelerator="tpu", strategy="tpu")
    assert named.reasons["engine"] == route.text
    assert named.engine == route.engine
    assert made.to_dict()["engine"] == route.engine
    assert f"{framework.replace('pyt', 'PyT').replace('tensorf', 'TensorF')} on TPU" in here(MACHINES[machine])


def test_keras_on_jax_is_the_route_where_there_is_no_tensorflow() -> None:
    made = resolved("Colab's TPU", **KERAS)
    assert made.engine == "keras_jax"
    assert made.static_shapes
    with pytest.raises(anb.PlanError, match="TensorFlow is not installed") as refused:
        resolved("Colab's TPU", accelerator="cpu", **KERAS)
    assert refused.value.field == "framework"
    assert refused.value.here == "PyTorch on TPU, PyTorch on CPU, TensorFlow on TPU"


def test_the_stand_in_for_a_tpu_runs_the_same_engine_and_says_what_it_is() -> None:
    made = resolved("cpu", strategy="tpu", accelerator="cpu", devices=2, **KERAS)
    route = tpu_route("tensorflow", MACHINES["cpu"], "cpu")
    assert (made.plan.accelerator, made.plan.strategy, made.engine) == ("cpu", "tpu", route.engine)
    assert made.reasons["engine"] == route.text
    assert any("stand-in" in note for note in made.notes)
    assert made.plan.precision == "fp32"


# machine, what is asked, the field, a part of why, a part of what to do
REFUSED = [
    ("cpu", {"accelerator": "gpu"}, "accelerator", "no NVIDIA GPU", "accelerator='cpu'"),
    ("cpu", {"accelerator": "mps"}, "accelerator", "not a Mac", "another accelerator"),
    ("cpu", {"accelerator": "tpu"}, "accelerator", "no TPU", "strategy='tpu', accelerator='cpu'."),
    ("cpu", {"strategy": "tpu"}, "strategy", "no TPU", "strategy='tpu', accelerator='cpu'."),
    ("1 GPU", {"strategy": "tpu", "accelerator": "gpu:0"}, "strategy", "accelerator is gpu", "'tpu'"),
    ("Apple", {"strategy": "tpu", "accelerator": "mps"}, "strategy", "accelerator is mps", "'tpu'"),
    ("Apple", {**KERAS, "accelerator": "mps"}, "accelerator", "no support", "PyTorch"),
    ("GPU 0 fails", {"accelerator": "gpu:0"}, "accelerator", f"{BROKEN}.", "one that works"),
    ("GPU 0 fails", {"accelerator": "gpu:4"}, "accelerator", "sees 4 GPUs", "one of them"),
]  # fmt: skip


@pytest.mark.parametrize(("machine", "asked", "field", "why", "do"), REFUSED)
def test_what_cannot_be_used_is_refused_with_the_fix(
    machine: str, asked: dict[str, Any], field: str, why: str, do: str
) -> None:
    with pytest.raises(anb.PlanError) as refused:
        resolved(machine, **asked)
    assert refused.value.field == field
    assert refused.value.passed == asked[field]
    assert why in refused.value.why
    assert do in refused.value.do
    assert refused.value.here
