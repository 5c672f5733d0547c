"""What a plan becomes on a machine: each choice with its reason, and the whole table of what is refused."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from fake_machines import MACHINES

import accel_nb as anb
from accel_nb.export import settings_of
from accel_nb.facts import Facts
from accel_nb.limits import precisions
from accel_nb.machine import CPU, GPU, Machine
from accel_nb.reasons import Verdict
from accel_nb.resolve import resolve

GIB = 2**30
T4 = GPU(0, "Tesla T4", 15 * GIB, 14 * GIB, (7, 5), "GPU-a")
A100 = GPU(1, "A100", 40 * GIB, 39 * GIB, (8, 0), "GPU-b")
OLD = GPU(0, "Tesla K80", 11 * GIB, 11 * GIB, (3, 7), "GPU-c")
HOST = CPU(name="CPU", cores=2, memory_total=12 * GIB, memory_free=10 * GIB)


def a_machine(*gpus, mps=False):
    return Machine(cpu=HOST, gpus=gpus, visible=tuple(gpu.index for gpu in gpus), mps=mps)


class Diagnosed:
    """A diagnosis in which exactly these accelerators are usable."""

    machine = Machine(cpu=HOST)  # without a TPU

    def __init__(self, *usable, devices=(0,), failed=None):
        self.usable, self.devices, self.failed = set(usable), list(devices), failed or {}

    def verdict(self, framework, kind):
        usable = kind in self.usable
        nothing = {"engine": "", "usable": False, "text": "No stand-in.", "fix": "Leave it."}
        details = {"route": "", "stand_in": nothing} if kind == "tpu" else {}
        if kind == "gpu" and usable:
            details = {"devices": self.devices, "failed": self.failed}
        return Verdict(framework, kind, usable, "ok" if usable else "no", f"{kind} told.", f"Fix {kind}.", details)


CPU_ONLY = (a_machine(), Diagnosed("cpu"))
ON_T4 = (a_machine(T4), Diagnosed("cpu", "gpu"))
ON_A100 = (a_machine(A100), Diagnosed("cpu", "gpu"))
TWO = (a_machine(T4, A100), Diagnosed("cpu", "gpu", devices=(0, 1)))
NO_TPU = (MACHINES["cpu"].machine, MACHINES["cpu"])
ON_MPS = (a_machine(mps=True), Diagnosed("cpu", "mps"))


def resolved(here, facts=None, **fields):
    machine, diagnosis = here
    return resolve(anb.Plan(**fields), machine=machine, diagnosis=diagnosis, facts=facts)


def facts(shape=(28, 28, 1), train=1437, outputs=10, nbytes=None):
    size = int(train * np.prod(shape)) if nbytes is None else nbytes
    return Facts("own", "own arrays", tuple(shape), outputs, "classification", 1.0, train, 360, size)


def test_every_open_choice_is_made_with_a_reason():
    made = resolved(CPU_ONLY)
    plan = made.plan
    for field in ("accelerator", "strategy", "precision", "compile", "learning_rate", "cudnn_benchmark"):
        assert getattr(plan, field) not in ("auto", None)
        assert made.reasons[field]
    assert (plan.accelerator, plan.strategy, plan.precision, plan.devices) == ("cpu", "single", "fp32", 1)
    assert "gpu told." in made.reasons["accelerator"]
    assert made.parameters == 407_050
    assert made.steps_per_epoch == 12
    assert made.facts.summary() == "1,437 train · 360 validation · 10 classes"
    json.dumps(made.to_dict())


@pytest.mark.parametrize(
    ("here", "asked", "got"),
    [
        (CPU_ONLY, "auto", "cpu"),
        (ON_T4, "auto", "gpu:0"),
        (ON_T4, "cpu", "cpu"),
        (ON_T4, "gpu", "gpu:0"),
        (TWO, "gpu:1", "gpu:1"),
        (ON_MPS, "auto", "mps"),
        ((a_machine(T4, A100), Diagnosed("cpu", "gpu", devices=(1,), failed={0: "no kernel"})), "auto", "gpu:1"),
    ],
)
def test_the_accelerator(here, asked, got):
    made = resolved(here, accelerator=asked)
    assert made.plan.accelerator == got
    assert made.settings()["DEVICE_INDEX"] == int(got[-1] if got[-1].isdigit() else 0)


def test_the_best_precision_and_the_card_behind_it():
    assert resolved(ON_A100).plan.precision == "tf32"
    assert resolved(ON_T4).plan.precision == "fp32"
    assert resolved(TWO, accelerator="gpu:1").plan.precision == "tf32"
    assert resolved(TWO, accelerator="gpu:1").gpu == 1
    assert resolved(ON_A100).plan.cudnn_benchmark is True
    assert resolved(ON_A100, deterministic=True).plan.cudnn_benchmark is False


# here, fields, the field that the refusal must name, a part of its text
REFUSED = [
    (CPU_ONLY, {"accelerator": "gpu"}, "accelerator", "gpu told"),
    (NO_TPU, {"accelerator": "tpu"}, "accelerator", "This machine has no TPU."),
    (CPU_ONLY, {"accelerator": "mps"}, "accelerator", "mps told"),
    (TWO, {"accelerator": "gpu:2"}, "accelerator", "2 GPUs"),
    ((a_machine(T4, A100), Diagnosed("cpu", "gpu", devices=(1,), failed={0: "no kernel"})),
     {"accelerator": "gpu:0"}, "accelerator", "no kernel"),
    ((a_machine(), Diagnosed()), {}, "framework", "cpu told"),
    (ON_T4, {"devices": 2}, "devices", "1 usable GPU"),
    (CPU_ONLY, {"strategy": "single", "nodes": 2}, "nodes", "one machine"),
    (CPU_ONLY, {"precision": "tf32"}, "precision", "tensor cores"),
    (CPU_ONLY, {"precision": "fp16"}, "precision", "GPU"),
    (ON_T4, {"precision": "bf16"}, "precision", "8.0"),
    (ON_T4, {"precision": "tf32"}, "precision", "8.0"),
    ((a_machine(OLD), Diagnosed("cpu", "gpu")), {"precision": "fp16"}, "precision", "5.3"),
    (ON_MPS, {"precision": "bf16"}, "precision", "Apple"),
    (ON_MPS, {"precision": "tf32"}, "precision", "tensor cores"),
    (ON_MPS, {"framework": "tensorflow", "precision": "fp16"}, "precision", "plug-in"),
    (ON_MPS, {"compile": True}, "compile", "Apple"),
    (ON_MPS, {"framework": "tensorflow", "compile": True}, "compile", "Apple"),
    (ON_T4, {"deterministic": True, "cudnn_benchmark": True}, "cudnn_benchmark", "deterministic"),
    (CPU_ONLY, {"framework": "tensorflow", "compile": True, "deterministic": True}, "compile", "deterministic"),
    (CPU_ONLY, {"warmup_steps": 60, "epochs": 5}, "warmup_steps", "60 steps"),
    (CPU_ONLY, {"model": "cnn", "data": (np.zeros((9, 4), "f4"), np.arange(9) % 3)}, "model", "images"),
    (CPU_ONLY, {"model": "resnet50", "data": (np.zeros((9, 4), "f4"), np.arange(9) % 3)}, "model", "images"),
    (CPU_ONLY, {"model": "cnn", "model_args": {"filters": [8] * 6}}, "model", "64×64"),
    (CPU_ONLY, {"model_args": {"layers": [1_000_000, 1_000_000]}}, "batch_size", "GiB"),
]  # fmt: skip


@pytest.mark.parametrize(("here", "fields", "field", "text"), REFUSED)
def test_the_table_of_what_cannot_be(here, fields, field, text):
    with pytest.raises((anb.PlanError, anb.DataError)) as refused:
        resolved(here, **fields)
    assert refused.value.field == field
    assert text in str(refused.value)
    assert refused.value.do


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_all_combinations_resolve_or_are_refused_in_words(framework):
    """Machine x accelerator x precision x compile x deterministic x benchmark: a choice, or a refusal in words."""
    heres = [CPU_ONLY, ON_T4, ON_A100, TWO, ON_MPS, (a_machine(OLD), Diagnosed("cpu", "gpu"))]
    choices = itertools.product(
        heres,
        ("auto", "cpu", "gpu", "gpu:1", "mps", "tpu"),
        ("auto", "fp32", "tf32", "bf16", "fp16"),
        ("auto", True, False),
        (True, False),
        ("auto", True, False),
    )
    good = 0
    for here, accelerator, precision, compiled, deterministic, benchmark in choices:
        fields = {"accelerator": accelerator, "precision": precision, "compile": compiled, "framework": framework}
        fields |= {"deterministic": deterministic, "cudnn_benchmark": benchmark}
        try:
            made = resolved(here, facts=facts(), **fields)
        except anb.PlanError as refused:
            assert refused.do, fields  # noqa: PT017 - a refusal is one of two right answers
            continue
        good += 1
        kind = made.plan.accelerator.partition(":")[0]
        capability = here[0].gpus[made.gpu if len(here[0].gpus) > 1 else 0].capability if kind == "gpu" else None
        assert not precisions(framework, kind, capability)[made.plan.precision]
        assert not (made.plan.deterministic and made.plan.cudnn_benchmark)
        assert accelerator in ("auto", kind, made.plan.accelerator)
    assert good > 200


def test_a_compiler_must_be_there_for_the_cpu(monkeypatch):
    monkeypatch.setattr("accel_nb.limits.shutil.which", lambda name: None)
    with pytest.raises(anb.PlanError, match="compiler"):
        resolved(CPU_ONLY, compile=True)
    assert "compiler" in resolved(CPU_ONLY).reasons["compile"]
    assert resolved(CPU_ONLY, framework="tensorflow", compile=True).plan.compile is True


def test_a_last_batch_of_one_sample_is_foreseen():
    made = resolved(CPU_ONLY, facts=facts(train=257), model="cnn", batch_size=128)
    assert made.drop_last
    assert made.steps_per_epoch == 2
    assert any("one sample" in note for note in made.notes)
    assert not resolved(CPU_ONLY, facts=facts(train=257), model="mlp", batch_size=128).drop_last
    assert not resolved(CPU_ONLY, facts=facts(train=258), model="cnn", batch_size=128).drop_last
    with pytest.raises(anb.PlanError, match="one training sample"):
        resolved(CPU_ONLY, facts=facts(train=1), model="cnn")


def test_a_batch_larger_than_the_set_is_told():
    made = resolved(CPU_ONLY, facts=facts(train=50), batch_size=128)
    assert made.steps_per_epoch == 1
    assert any("larger" in note for note in made.notes)


def test_data_too_large_for_the_device_are_streamed():
    assert resolved(CPU_ONLY, facts=facts(nbytes=9 * GIB)).data_on_device is False
    assert resolved(CPU_ONLY, facts=facts(nbytes=1 * GIB)).data_on_device is True


def test_a_model_of_the_other_framework_is_refused():
    class Net:
        pass

    Net.__module__ = "torch.nn.modules.linear"
    with pytest.raises(anb.PlanError, match="PyTorch model"):
        resolved(CPU_ONLY, framework="tensorflow", model=Net)


def test_quick_mode_is_told(monkeypatch):
    monkeypatch.setenv("ACCEL_NB_QUICK", "1")
    made = resolved(CPU_ONLY, epochs=10, warmup_steps=100)
    assert made.plan.epochs == 2
    assert "QUICK" in made.reasons["epochs"]
    assert made.plan.warmup_steps < 24


def test_resnet_pads_small_images_and_refuses_tiny_ones():
    made = resolved(CPU_ONLY, model="resnet50")
    assert any("32" in note for note in made.notes)
    with pytest.raises(anb.PlanError, match="at least"):
        resolved(CPU_ONLY, facts=facts(shape=(2, 2, 1)), model="resnet50")


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_the_program_holds_what_was_resolved(framework):
    made = resolved(CPU_ONLY, framework=framework, batch_size=77, seed=9, epochs=3)
    text = made.program().text
    settings = settings_of(text)
    assert settings["BATCH_SIZE"] == 77
    assert settings["SEED"] == 9
    assert settings["X_SCALE"] == 16.0
    assert settings["INPUT_SHAPE"] == (28, 28, 1)
    assert "mlp on digits, on the CPU" in text.splitlines()[0]
    assert set(settings) <= set(made.settings())
