"""The panel's strategies, devices and machines, set as a front end sets them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_machines import MACHINES
from panel import choose, entries, label, message, settle, text_of, there, until, write

import accel_nb as anb
from accel_nb.facts import Facts
from accel_nb.resolve import resolve
from accel_nb.studio.spreading import share_text

# Every panel of these tests is made as in a kernel: what a front end would not understand is an error.
pytestmark = pytest.mark.filterwarnings("error:Passing unrecognized arguments:DeprecationWarning")

Make = Callable[..., anb.Studio]


@pytest.fixture
def panel(runs_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """`panel(machine, **fields)`: a panel on one of the machines that are not here."""

    def make(machine: str = "cpu", **fields: Any) -> anb.Studio:
        monkeypatch.setattr("accel_nb.studio.desk.diagnose", lambda **_: MACHINES[machine])
        return settle(anb.Studio(**fields))

    return make


def press(studio: anb.Studio, framework: str) -> None:
    studio._desk.run_with.framework.buttons[framework].click()
    settle(studio)


def card(studio: anb.Studio, value: str) -> None:
    studio._desk.cards.buttons[value].click()
    settle(studio)


def lit(studio: anb.Studio) -> list[str]:
    """The cards that are marked as used."""
    cards = studio._desk.cards
    return [one.value for one, box in zip(cards._cards, cards._boxes, strict=True) if "anb-on" in box._dom_classes]


def share(studio: anb.Studio) -> str:
    return text_of(studio._desk.spreading.summary.value)


def test_one_device_needs_no_row(panel: Make) -> None:
    studio = panel()
    spreading = studio._desk.spreading
    assert label(studio._desk.run_with.strategy) == "auto (single)"
    assert not there(spreading.ui)
    assert there(spreading.more)
    spreading.more.click()
    assert there(spreading.ui)
    assert not there(spreading.more)
    assert {name: field.text for name, field in spreading.counts.items()} == {
        "devices": "auto (1)",
        "nodes": "1",
        "accumulate": "1",
    }
    assert share(studio) == ""
    assert studio.plan.devices is None


def test_a_strategy_brings_its_row_and_tells_how_the_batch_is_shared(panel: Make) -> None:
    studio = panel()
    strategy, spreading = studio._desk.run_with.strategy, studio._desk.spreading
    assert list(entries(strategy)) == ["auto", "single", "ddp", "fsdp", "tpu"]
    assert entries(strategy)["fsdp"] == "fsdp · each device holds a part of the model"
    choose(studio, strategy, "fsdp")
    assert there(spreading.ui)
    choose(studio, strategy, "auto")
    assert not there(spreading.ui)
    choose(studio, strategy, "ddp")
    assert label(strategy) == "ddp"  # the description is in the list only
    assert (studio.plan.strategy, studio.plan.devices, studio.plan.accelerator) == ("ddp", None, "auto")
    assert there(spreading.ui)
    assert spreading.counts["devices"].text == "auto (2)"
    assert share(studio) == "batch 128 = 2 × 64 · 12 steps per epoch"
    assert "2 devices share this computer's 2 cores" in studio._desk.notes.value.replace("&#x27;", "'")

    write(studio, "devices", "3")
    write(studio, "accumulate", "4")
    assert (studio.plan.devices, studio.plan.accumulate) == (3, 4)
    assert share(studio) == "batch 128 = 3 × at most 43 in 4 parts of 11 · 12 steps per epoch"
    for automatic in ("", "auto", " Auto (7)"):
        write(studio, "devices", "3")
        write(studio, "devices", automatic)
        assert studio.plan.devices is None
        assert spreading.counts["devices"].text == "auto (2)"
    choose(studio, strategy, "auto")
    write(studio, "accumulate", "1")
    assert there(spreading.ui)  # a person has written in it
    assert share(studio) == ""


def test_devices_alone_choose_a_strategy(panel: Make) -> None:
    studio = panel()
    write(studio, "devices", "2")
    assert label(studio._desk.run_with.strategy) == "auto (ddp)"
    write(studio, "nodes", "2")
    assert share(studio) == "batch 128 = 4 × 32 · 2 machines × 2 devices · 12 steps per epoch"
    press(studio, "tensorflow")
    assert label(studio._desk.run_with.strategy) == "auto (multi_worker)"
    write(studio, "nodes", "1")
    assert label(studio._desk.run_with.strategy) == "auto (mirrored)"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("devices", "two", "devices = 'two': It counts something."),
        ("devices", "0", "devices = 0: It counts something. Pass a whole number, 1 to 1,024."),
        ("devices", "200", "batch_size = 128: 200 devices share a batch, and each needs a sample of it."),
        ("nodes", "0.5", "nodes (machines) = 0.5: It counts something."),
        ("accumulate", "129", "accumulate (parts per batch) = 129: A device has 128 samples of a batch"),
        ("accumulate", "", "accumulate (parts per batch) = ''"),
    ],
)
def test_a_bad_number_is_refused_at_once(panel: Make, name: str, text: str, words: str) -> None:
    studio = panel()
    field = studio._desk.spreading.counts[name]
    good = field.text
    write(studio, name, text)
    assert words in " ".join(message(studio).split()).replace(" :", ":")
    assert studio._runner.train.disabled is True
    marked = studio._desk.training.numbers["batch_size"] if words.startswith("batch_size") else field
    assert "anb-bad" in marked.ui._dom_classes
    assert there(studio._desk.spreading.ui)
    assert share(studio) == ""
    write(studio, name, good)
    assert message(studio) == ""
    assert "anb-bad" not in marked.ui._dom_classes
    assert studio._runner.train.disabled is False


@pytest.mark.parametrize(
    ("framework", "before", "other", "after"),
    [
        ("pytorch", {"strategy": "ddp"}, "tensorflow", "mirrored"),
        ("pytorch", {"strategy": "fsdp", "devices": 3}, "tensorflow", "mirrored"),
        ("pytorch", {"strategy": "ddp", "nodes": 2}, "tensorflow", "multi_worker"),
        ("tensorflow", {"strategy": "mirrored"}, "pytorch", "ddp"),
        ("tensorflow", {"strategy": "multi_worker", "nodes": 2}, "pytorch", "ddp"),
        ("tensorflow", {"strategy": "single"}, "pytorch", "single"),
        # PyTorch has no stand-in for a TPU on this machine
        ("tensorflow", {"strategy": "tpu", "accelerator": "cpu"}, "pytorch", "auto"),
    ],
)
def test_the_other_framework_gets_a_strategy_that_it_has(
    panel: Make, framework: str, before: dict[str, Any], other: str, after: str
) -> None:
    studio = panel(framework=framework, **before)
    assert message(studio) == ""
    press(studio, other)
    assert (studio.plan.framework, studio.plan.strategy) == (other, after)
    assert studio.plan.devices == before.get("devices")
    assert message(studio) == ""
    assert studio._runner.train.disabled is False
    assert label(studio._desk.run_with.strategy).split()[0] == after
    known = {"pytorch": ["ddp", "fsdp"], "tensorflow": ["mirrored", "multi_worker"]}[other]
    assert list(entries(studio._desk.run_with.strategy)) == ["auto", "single", *known, "tpu"]


def test_activation_checkpointing_is_pytorchs(panel: Make) -> None:
    studio = panel(strategy="fsdp")
    tick = studio._desk.spreading.checkpointing.ui
    assert there(tick)
    tick.value = True
    settle(studio)
    assert studio.plan.activation_checkpointing is True
    choose(studio, studio._desk.run_with.strategy, "auto")
    assert there(studio._desk.spreading.ui)  # as long as something of it is set
    press(studio, "tensorflow")
    assert studio.plan.activation_checkpointing is False
    assert message(studio) == ""
    assert not there(tick)
    press(studio, "pytorch")
    assert there(tick)
    assert tick.value is False


def test_strategies_that_do_not_fit_are_greyed_with_the_reason(panel: Make) -> None:
    studio = panel(framework="tensorflow", nodes=2)
    strategy = studio._desk.run_with.strategy
    assert "✕ The strategy 'mirrored' works on one machine" in entries(strategy)["mirrored"]
    assert "✕" in entries(strategy)["single"]
    assert "✕" not in entries(strategy)["multi_worker"]
    choose(studio, strategy, "mirrored")
    assert studio.plan.strategy == "auto"
    assert label(strategy) == "auto (multi_worker)"
    assert "Pass nodes=1, or a strategy for several machines: 'multi_worker'." in message(studio)
    # what is refused as it stands greys no way out
    studio = panel(framework="tensorflow", strategy="mirrored", nodes=2)
    assert "nodes (machines) = 2" in message(studio)
    assert not any("✕" in text for name, text in entries(studio._desk.run_with.strategy).items() if name != "tpu")
    choose(studio, studio._desk.run_with.strategy, "multi_worker")
    assert message(studio) == ""

    studio = panel()
    assert "✕ The stand-in for a TPU is torch_xla" in entries(studio._desk.run_with.strategy)["tpu"]
    studio = panel("GPU 0 fails")
    choose(studio, studio._desk.run_with.strategy, "ddp")
    assert studio.plan.strategy == "auto"
    assert "Start the kernel with CUDA_VISIBLE_DEVICES=1,2,3" in message(studio)


def test_a_strategy_lights_all_cards_that_it_uses(panel: Make) -> None:
    studio = panel("4 GPUs")
    strategy = studio._desk.run_with.strategy
    assert lit(studio) == ["gpu:0"]
    assert "devices=4 uses all of them" in studio._desk.notes.value
    choose(studio, strategy, "fsdp")
    assert lit(studio) == ["gpu:0", "gpu:1", "gpu:2", "gpu:3"]
    assert studio._desk.spreading.counts["devices"].text == "auto (4)"
    assert share(studio) == "batch 128 = 4 × 32 · 12 steps per epoch"
    write(studio, "devices", "2")
    assert lit(studio) == ["gpu:0", "gpu:1"]
    # one card by its name: that card alone
    card(studio, "gpu:2")
    assert (studio.plan.accelerator, studio.plan.strategy, studio.plan.devices) == ("gpu:2", "auto", None)
    assert lit(studio) == ["gpu:2"]
    # and from there all of them again
    choose(studio, strategy, "ddp")
    assert (studio.plan.accelerator, studio.plan.strategy) == ("gpu", "ddp")
    assert lit(studio) == ["gpu:0", "gpu:1", "gpu:2", "gpu:3"]
    assert message(studio) == ""
    card(studio, "cpu")
    assert (studio.plan.strategy, lit(studio)) == ("ddp", ["cpu"])


def test_a_tpu_tells_its_route(panel: Make) -> None:
    studio = panel("1 TPU chip")
    run_with, spreading = studio._desk.run_with, studio._desk.spreading
    assert label(run_with.strategy) == "auto (tpu)"
    assert lit(studio) == ["tpu"]
    assert there(spreading.ui)
    assert text_of(spreading.route.value) == "Route: PyTorch 2.9.0 reaches 1 x TPU v5e through torch_xla 2.9.0."
    press(studio, "tensorflow")
    assert "is the build for TPUs" in text_of(spreading.route.value)
    card(studio, "cpu")
    assert (studio.plan.strategy, lit(studio), spreading.route.value) == ("auto", ["cpu"], "")
    choose(studio, run_with.strategy, "mirrored")
    card(studio, "tpu")
    assert (studio.plan.strategy, lit(studio)) == ("auto", ["tpu"])
    assert entries(run_with.strategy)["mirrored"].endswith("✕ A TPU has a strategy of its own")
    card(studio, "cpu")
    choose(studio, run_with.strategy, "tpu")
    assert (studio.plan.strategy, studio.plan.accelerator, lit(studio)) == ("tpu", "tpu", ["tpu"])
    studio._tabs.selected_index = 3
    settle(studio)
    assert "is the build for TPUs" in text_of(studio._machine.choices.value)


def test_a_stand_in_for_a_tpu_is_chosen_by_name(panel: Make) -> None:
    studio = panel(framework="tensorflow")
    strategy = studio._desk.run_with.strategy
    assert entries(strategy)["tpu"] == "tpu (stand-in) · a TPU's program on the CPU"
    choose(studio, strategy, "tpu")
    assert (studio.plan.strategy, studio.plan.accelerator) == ("tpu", "cpu")
    assert label(strategy) == "tpu (stand-in)"
    assert "Route: TensorFlow's loop for TPUs, on the CPU" in text_of(studio._desk.spreading.route.value)
    assert "A stand-in" in studio._desk.notes.value
    write(studio, "devices", "4")
    assert share(studio) == "batch 128 = 4 × 32 · 12 steps per epoch"


@pytest.mark.parametrize(
    ("machine", "fields", "kind"),
    [
        ("cpu", {}, "pytorch"),
        ("cpu", {"strategy": "ddp"}, "pytorch"),
        ("cpu", {"framework": "tensorflow", "strategy": "mirrored"}, "tensorflow"),
        ("cpu", {"framework": "tensorflow", "strategy": "multi_worker"}, "ranks"),
        ("cpu", {"nodes": 2}, ""),
        ("cpu", {"devices": 1000}, "pytorch"),  # refused as it stands: the next plan may not be
        ("Colab's TPU", {"framework": "tensorflow"}, "keras_jax"),
        ("torch_tpu", {}, ""),  # with variables of its own
    ],
)
def test_the_spare_worker_is_of_the_kind_that_the_plan_needs(
    panel: Make, machine: str, fields: dict[str, Any], kind: str
) -> None:
    assert panel(machine, **fields)._desk.worker_kind == kind


@pytest.mark.parametrize(
    ("fields", "train", "text"),
    [
        ({}, 1437, ""),
        ({"devices": 2}, 1437, "batch 128 = 2 × 64 · 12 steps per epoch"),
        ({"devices": 2}, 50, "batch 50 = 2 × 25 · 1 step per epoch"),
        ({"devices": 2, "batch_size": 2000}, 1437, "batch 1,437 = 2 × at most 719 · 1 step per epoch"),
        ({"accumulate": 4}, 1437, "batch 128 in 4 parts of 32 · 12 steps per epoch"),
        ({"accumulate": 3}, 1437, "batch 128 in 3 parts of at most 43 · 12 steps per epoch"),
        ({"devices": 2, "accumulate": 2}, 1437, "batch 128 = 2 × 64 in 2 parts of 32 · 12 steps per epoch"),
        ({"nodes": 3}, 1437, "batch 128 = 3 × at most 43 · 3 machines × 1 device · 12 steps per epoch"),
    ],
)
def test_how_a_batch_is_shared_out(fields: dict[str, Any], train: int, text: str) -> None:
    facts = Facts("own", "own arrays", (28, 28, 1), 10, "classification", 1.0, train, 360, train * 784)
    here = MACHINES["cpu"]
    assert share_text(resolve(anb.Plan(**fields), machine=here.machine, diagnosis=here, facts=facts)) == text


# ---- several machines


def tell(run: anb.Run, event: str, **values: Any) -> None:
    """Write an event as the first machine's program does."""
    with run.directory.joinpath("events.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"t": time.time(), "event": event, **values}) + "\n")


STARTED = {
    "device": "cpu", "device_name": "a processor", "versions": {"torch": "2.13.0"}, "steps_per_epoch": 12,
    "train_samples": 1437, "val_samples": 360, "learning_rate": 0.001,
    "replicas": 4, "strategy": "ddp", "per_replica": 32, "backend": "gloo",
}  # fmt: skip


def test_the_line_for_each_machine_is_shown_until_all_have_started(runs_folder: Path) -> None:
    studio = settle(anb.Studio(nodes=2, devices=2, name="<b>two</b>", accelerator="cpu"))
    runner = studio._runner
    machines = runner.machines
    assert not there(machines.ui)
    run = studio.train()
    assert there(machines.ui)
    assert runner.train.description == "Waiting…"
    assert runner.train.disabled
    assert runner.pause.disabled
    assert not runner.stop.disabled
    until(lambda: "waiting for 2 machines" in runner.line.value, "what it waits for")
    assert "as soon as all machines have started" in machines.lead.value
    for number, line in enumerate(run.commands(), start=1):
        assert line in text_of(machines.lines.value)
        assert f"machine {number} of 2" in machines.lines.value
    assert machines.lines.value.count("<pre") == 2

    machines.addresses.ui.value = "10.0.0.1,  <i>b</i>"
    assert "It is no host name and no IP address." in text_of(machines.lines.value)
    assert "<i>" not in machines.lines.value
    machines.addresses.ui.value = "10.0.0.1,  10.0.0.2"
    shown = text_of(machines.lines.value)
    assert all(line in shown for line in run.commands(["10.0.0.1", "10.0.0.2"]))
    assert "10.0.0.1" in shown

    tell(run, "started", **STARTED)
    until(lambda: not there(machines.ui), "the lines are gone")
    tell(run, "batch", epoch=1, first=1, loss=[2.3, 2.2], accuracy=[0.1, 0.2], learning_rate=0.001)
    until(lambda: "epoch 1/5 · 4 replicas (ddp, gloo)" in runner.line.value, "who works on it")
    until(lambda: "<circle" in studio._curves.picture.value, "the curve")
    assert runner.train.description == "Training…"
    assert not runner.pause.disabled
    studio._tabs.selected_index = 3
    until(lambda: "a processor" in studio._machine.worker.value, "the tab Machine")
    told = text_of(studio._machine.worker.value)
    assert "4 replicas (ddp, gloo), 32 samples of a batch on each at most, on a processor · torch 2.13.0" in told

    # nobody has told anything for a while: the line says for how long, and in what the program waits
    tell(run, "waiting", text="all_reduce, program.py, line 210: <dist>")
    until(lambda: run.waiting, "what it waits in")
    run._last_step -= 60
    until(lambda: "no step for " in runner.line.value, "the silence")
    assert "s · all_reduce, program.py, line 210: &lt;dist&gt;" in runner.line.value
    tell(run, "finished", status="done", step=2, seconds=1.5)
    studio.wait(60)
    assert "done in" in runner.line.value
    assert runner.train.disabled is False


def test_a_run_that_no_machine_has_started_can_be_stopped(runs_folder: Path) -> None:
    studio = settle(anb.Studio(nodes=2, framework="tensorflow", accelerator="cpu"))
    run = studio.train()
    assert "TF_CONFIG=" in text_of(studio._runner.machines.lines.value)
    studio._runner.stop.click()
    studio.wait(60)
    assert run.status == "stopped"
    assert not there(studio._runner.machines.ui)
    assert studio._runner.train.disabled is False
