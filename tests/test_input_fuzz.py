"""Any values in any fields of a Plan, alone and in pairs: a plan that holds together, or one clear sentence."""

from __future__ import annotations

import dataclasses
import json
import math
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from fake_machines import MACHINES
from hypothesis import given, settings
from hypothesis import strategies as st

import accel_nb as anb
from accel_nb.errors import shown
from accel_nb.export import settings_of
from accel_nb.plan import plan_from_dict
from accel_nb.resolve import resolve

FIELDS = [field.name for field in dataclasses.fields(anb.Plan)]
HERE = MACHINES["cpu"]


class Rude:
    """An object that fails whenever it is asked anything."""

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        raise RuntimeError("no words")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")


class RudeModel(Rude):
    __eq__ = object.__eq__
    __hash__ = object.__hash__  # type: ignore[assignment]

    def __call__(self) -> None:
        raise RuntimeError("no call")


NUMBERS = (0, 1, -1, 2, 3, 10**6, 2**31, 2**63, 10**400, -(10**400), 0.0, 0.5, -0.5, 1e-300, 1e300, True, False)
STRANGE = (math.nan, math.inf, -math.inf, 1j, Fraction(1, 3), Decimal("NaN"), Decimal(1))
OF_NUMPY = (np.float32("nan"), np.int64(3), np.float64(0.1), np.bool_(True), np.datetime64("2020"))
WORDS = ("", "a", "auto", "cpu", "gpu:0", "gpu:99999999", "mlp", "adam", "ddp", "mirrored", "1", "-1", "digits")
PLACES = (
    "../../etc",
    "/etc/passwd",
    "C:\\x",
    "x.npz",
    "-rf",
    "*",
    "\0",
    "\ud800",
    "a\nb",
    "ünïcode",
    "x" * 100_000,
)
MARKUP = ("<img src=x onerror=alert(1)>", "<script>alert(1)</script>", "${x}", "{0}", "%s")
LAYERS = ([10**400], [1] * 100_000, [3.0], [np.int64(3)], "abc", [True], np.arange(2), [])
BETAS = ((10**400, 0.9), (math.nan, 0.9), (True, False), np.ones(2), (0.9,), (0.5, 0.9))
ARGS = (
    *({"layers": sizes} for sizes in LAYERS),
    *({"dropout": part} for part in (math.nan, 10**400, "<b>", 0.5, None)),
    *({"filters": [1] * 64}, {"activation": ["relu"]}, {"<script>": 1}, {"\ud800": 1}, {1: 2}, {"": 0}),
    *({"betas": pair} for pair in BETAS),
    *({"eps": 1e-400}, {"eps": 1e308}, {"momentum": 0.9, "nesterov": True}, {"weight_decay": 10**400}),
    *({"samples": count} for count in (0, 20, 10**12, 10**400, "many")),
    *({"shape": shape} for shape in ((10**9, 10**9), [], "abc", (4,), (0,))),
    *({"samples": 20, "shape": (4,)}, {"classes": 10**9}, {"task": "regression"}),
)
OTHERS = (None, b"x", [], [1], ["a"], [[1]], (1,), {}, set(), range(3), object(), Ellipsis, int, len, slice(1), np)
OBJECTS = (lambda: None, Path("x.npz"))
ARRAYS = (np.array(3), np.array([1, 2]), np.zeros((2, 2)), np.array(None), (1, 2, 3))
PAIRS = ((np.eye(4, 3), np.arange(4) % 2), [np.eye(4), [0, 1, 0, 1]])

texts = st.sampled_from((*WORDS, *PLACES, *MARKUP)) | st.text(max_size=6)
numbers = st.sampled_from((*NUMBERS, *STRANGE, *OF_NUMPY))
anything = numbers | texts | st.sampled_from(ARGS) | st.sampled_from((*OTHERS, *OBJECTS, *ARRAYS, *PAIRS))


def sentence(refused: anb.AccelNbError) -> None:
    text = str(refused)
    assert 10 < len(text) < 900
    assert "\n" not in text
    text.encode("utf-8", "backslashreplace")


def attempt(fields: dict[str, Any]) -> None:
    """Resolved and written out as a run would be, or refused in a sentence; nothing else."""
    try:
        plan = anb.Plan(**fields)
        made = resolve(plan, machine=HERE.machine, diagnosis=HERE)
        program = made.program()
    except anb.AccelNbError as refused:
        sentence(refused)
        return
    stored = json.loads(json.dumps(made.to_dict(), allow_nan=False))
    again = plan_from_dict(stored["plan"])
    assert (again.framework, again.epochs, again.seed) == (plan.framework, made.plan.epochs, plan.seed)
    assert settings_of(program.text)["SEED"] == plan.seed
    assert str(made)


@settings(max_examples=150)
@given(st.sampled_from(FIELDS), anything)
def test_any_value_of_one_field(field: str, value: Any) -> None:
    attempt({field: value})


@settings(max_examples=150)
@given(st.lists(st.tuples(st.sampled_from(FIELDS), anything), min_size=2, max_size=2).map(dict))
def test_any_values_of_two_fields(fields: dict[str, Any]) -> None:
    attempt(fields)


good = st.fixed_dictionaries(
    {},
    optional={
        "framework": st.sampled_from(["pytorch", "tensorflow"]),
        "name": texts,
        "seed": st.integers(0, 2**32 - 1),
        "epochs": st.integers(1, 10**9),
        "batch_size": st.integers(1, 10**9),
        "warmup_steps": st.integers(0, 10**9),
        "learning_rate": st.floats(1e-300, 1e300),
        "checkpoint_seconds": st.floats(0, 1e300),
        "validation": st.floats(0, 1, exclude_max=True),
        "model": st.sampled_from(["mlp", "cnn"]),
        "optimizer": st.sampled_from(["adam", "adamw", "sgd", "rmsprop"]),
        "schedule": st.sampled_from(["constant", "cosine"]),
    },
)


@settings(max_examples=10)
@given(good)
def test_extreme_values_that_are_allowed(fields: dict[str, Any]) -> None:
    attempt(fields)


def test_an_object_that_fails_at_every_question_is_refused() -> None:
    for field in FIELDS:
        for value in (Rude(), RudeModel(), [Rude()], (Rude(), RudeModel())):
            attempt({field: value})


def test_whatever_was_passed_can_be_told() -> None:
    for value in (Rude(), RudeModel(), np, [Rude()], {"a": Rude()}, "x" * 10**6, [np.eye(2)] * 999):
        assert 0 < len(shown(value)) <= 500
