"""A Plan's own checks: every field refuses nonsense in one sentence, and nothing else is raised."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import accel_nb as anb
from accel_nb.plan import FRAMEWORKS, MODEL_ARGS, OPTIMIZER_ARGS, STRATEGIES, make_plan, plan_from_dict

BAD = [
    ("framework", "jax"),
    ("framework", None),
    ("accelerator", "gpu:x"),
    ("accelerator", "gpu:-1"),
    ("accelerator", 0),
    ("strategy", "everything"),
    ("strategy", None),
    ("strategy", "mirrored"),  # of the other framework
    ("strategy", "multi_worker"),
    ("devices", 0),
    ("devices", -1),
    ("devices", "all"),
    ("devices", True),
    ("devices", 1025),
    ("nodes", 0),
    ("nodes", 1.0),
    ("nodes", None),
    ("nodes", 1025),
    ("accumulate", 0),
    ("accumulate", None),
    ("accumulate", 1.5),
    ("accumulate", True),
    ("activation_checkpointing", 1),
    ("activation_checkpointing", "auto"),
    ("activation_checkpointing", None),
    ("precision", "float32"),
    ("compile", 1),
    ("compile", "yes"),
    ("cudnn_benchmark", None),
    ("deterministic", "no"),
    ("data_args", [1]),
    ("model", "vgg"),
    ("model", 7),
    ("model_args", {"layers": 512}),
    ("model_args", {"layers": [0]}),
    ("model_args", {"layers": [1.5]}),
    ("model_args", {"dropout": 1}),
    ("model_args", {"dropout": -0.1}),
    ("model_args", {"activation": "swish"}),
    ("model_args", {"filters": [3]}),
    ("model_args", {1: 2}),
    ("optimizer", "lion"),
    ("optimizer_args", {"beta1": 0.9}),
    ("optimizer_args", {"betas": 0.9}),
    ("optimizer_args", {"betas": (0.9, 1)}),
    ("optimizer_args", {"betas": ("a", 0.9)}),
    ("optimizer_args", {"eps": 0}),
    ("optimizer_args", {"weight_decay": -1}),
    ("learning_rate", 0),
    ("learning_rate", -1),
    ("learning_rate", "fast"),
    ("learning_rate", float("nan")),
    ("learning_rate", float("inf")),
    ("schedule", "linear"),
    ("warmup_steps", -1),
    ("batch_size", 0),
    ("batch_size", True),
    ("batch_size", 12.5),
    ("epochs", 0),
    ("epochs", 10**400),
    ("batch_size", 10**10),
    ("compile", np.ones(2)),
    ("learning_rate", 10**400),
    ("model_args", {"layers": [1] * 1001}),
    ("epochs", None),
    ("validation", 1),
    ("validation", -0.1),
    ("validation", "half"),
    ("seed", -1),
    ("seed", 2**32),
    ("checkpoint_seconds", -1),
    ("checkpoint_seconds", "often"),
    ("checkpoint_seconds", float("inf")),
    ("checkpoint_epochs", -1),
    ("checkpoint_epochs", 0.5),
    ("name", 5),
]


@pytest.mark.parametrize(("field", "value"), BAD)
def test_a_field_refuses_what_it_cannot_hold(field, value):
    with pytest.raises(anb.PlanError) as refused:
        anb.Plan(**{field: value})
    assert refused.value.field.startswith(field)
    text = str(refused.value)
    assert refused.value.do
    assert text.count("\n") == 0
    assert len(text) < 400


def test_each_field_has_a_bad_value_in_the_table_or_takes_anything():
    free = {"data"}  # judged when it is loaded
    assert {field.name for field in dataclasses.fields(anb.Plan)} - free == {field for field, _ in BAD}


def test_a_strategy_of_the_other_framework_names_its_counterpart():
    for framework, strategy, counterpart in (
        ("pytorch", "mirrored", "ddp"),
        ("pytorch", "multi_worker", "ddp"),
        ("tensorflow", "ddp", "mirrored"),
        ("tensorflow", "fsdp", "mirrored"),
    ):
        with pytest.raises(anb.PlanError, match=f"Pass '{counterpart}'") as refused:
            anb.Plan(framework=framework, strategy=strategy)
        assert refused.value.field == "strategy"
        assert "strategy of" in refused.value.why
        assert strategy not in refused.value.here
        anb.Plan(framework=framework, strategy=counterpart)
    with pytest.raises(anb.PlanError, match="Did you mean 'mirrored'"):
        anb.Plan(framework="tensorflow", strategy="miror")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_strategy_of_a_framework_makes_a_plan(framework):
    for strategy in ("auto", *STRATEGIES[framework]):
        plan = anb.Plan(framework=framework, strategy=strategy, devices=np.int64(2), nodes=3, accumulate=4)
        assert (plan.strategy, plan.devices, plan.nodes, plan.accumulate) == (strategy, 2, 3, 4)
        assert type(plan.devices) is int
        again = plan_from_dict(json.loads(json.dumps(plan.to_dict())))
        assert (again.strategy, again.devices, again.nodes, again.accumulate) == (strategy, 2, 3, 4)
    plan = anb.Plan(framework=framework, activation_checkpointing=True)
    assert plan.to_dict()["activation_checkpointing"] is True
    assert plan.replace(activation_checkpointing=False).activation_checkpointing is False


def test_an_unknown_field_names_the_nearest():
    with pytest.raises(anb.PlanError, match="Did you mean model"):
        anb.train(modle="mlp")
    with pytest.raises(anb.PlanError, match="no such field"):
        make_plan(zzz=1)


def test_nesterov_needs_momentum():
    with pytest.raises(anb.PlanError, match="momentum"):
        anb.Plan(optimizer="sgd", optimizer_args={"nesterov": True})
    plan = anb.Plan(optimizer="sgd", optimizer_args={"nesterov": True, "momentum": 0.9})
    assert plan.optimizer_args == {"momentum": 0.9, "nesterov": True, "weight_decay": 0.0}


def test_numbers_of_numpy_and_other_names_of_frameworks_are_taken():
    plan = anb.Plan(framework="torch", epochs=np.int64(3), learning_rate=np.float32(0.5), accelerator="cuda:1")
    assert (plan.framework, plan.epochs, plan.learning_rate, plan.accelerator) == ("pytorch", 3, 0.5, "gpu:1")
    assert type(plan.epochs) is int
    assert anb.Plan(framework="Keras").framework == "tensorflow"
    json.dumps(plan.to_dict())


def test_a_plan_is_frozen_and_replace_makes_another():
    plan = anb.Plan()
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.epochs = 3
    other = plan.replace(optimizer="sgd", epochs=2)
    assert other.optimizer_args == OPTIMIZER_ARGS["sgd"]
    assert other.model_args == MODEL_ARGS["mlp"]
    assert plan.optimizer == "adam"
    assert plan.replace(model="cnn").model_args == MODEL_ARGS["cnn"]
    with pytest.raises(anb.PlanError):
        plan.replace(epochs=-1)


def test_defaults_are_not_shared_between_plans():
    first = anb.Plan()
    first.model_args["layers"].append(3)
    assert anb.Plan().model_args["layers"] == [512]
    assert MODEL_ARGS["mlp"]["layers"] == [512]


def test_a_stored_plan_comes_back():
    plan = anb.Plan(framework="tensorflow", schedule="cosine", warmup_steps=3, model_args={"layers": [7, 8]})
    again = plan_from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again.to_dict()["model_args"] == plan.to_dict()["model_args"]
    assert again.schedule == "cosine"
    own = anb.Plan(data=(np.zeros((4, 2)), np.zeros(4)), model=lambda: None)
    assert own.to_dict()["data"] == "arrays"
    json.dumps(own.to_dict())


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from([f.name for f in dataclasses.fields(anb.Plan) if f.name != "data"]), anything)
def test_any_value_at_all_makes_a_plan_or_one_clear_refusal(field, value):
    try:
        plan = anb.Plan(**{field: value})
    except anb.PlanError as refused:
        assert str(refused)  # noqa: PT017 - a refusal is one of two right answers
    else:
        text = json.dumps(plan.to_dict())
        assert all(not isinstance(v, float) or math.isfinite(v) for v in json.loads(text).values())
