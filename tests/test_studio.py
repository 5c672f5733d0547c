"""The panel's controls, set as a front end sets them; nothing is trained here."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from panel import choose, every_widget, label, message, settle, text_of, write

import accel_nb as anb
from accel_nb.diagnose import diagnose
from accel_nb.facts import Facts
from accel_nb.framework_facts import Device
from accel_nb.framework_facts import Facts as FrameworkFacts
from accel_nb.machine import GPU, Machine
from accel_nb.studio import fields as fields_module
from accel_nb.studio.cards import card_html, cards_of
from accel_nb.studio.controls import summary
from accel_nb.studio.style import style_sheet

# Every panel of these tests is made as in a kernel: what a front end would not understand is an error.
pytestmark = pytest.mark.filterwarnings("error:Passing unrecognized arguments:DeprecationWarning")


@pytest.fixture
def studio(runs_folder: Path) -> anb.Studio:
    return settle(anb.Studio())


def test_the_first_look_is_complete(studio: anb.Studio) -> None:
    desk = studio._desk
    assert [card.description for card in desk.cards.buttons.values()][-1].startswith("CPU")
    assert text_of(desk.data.summary.value) == "1,437 train · 360 validation · 10 classes"
    assert "407,050 parameters · needs ≈ " in text_of(desk.model.summary.value)
    assert [text_of(chip.value).split() for chip in (desk.model._input, desk.model._drop, desk.model._output)] == [
        ["Input", "784"],
        ["Dropout", "0.2", "0"],
        ["Dense", "10", "5,130"],
    ]
    assert "401,920" in text_of(desk.model._hidden[0]._note.value)
    assert desk.training.numbers["learning_rate"].text == "0.001"
    assert studio._runner.train.disabled is False
    assert studio._runner.pause.disabled is True
    assert studio._runner.stop.disabled is True
    assert studio._words.message.value == studio._words.error.value == ""
    assert "<svg" in studio._curves.picture.value


def test_each_call_makes_a_new_panel(studio: anb.Studio) -> None:
    other = anb.Studio()
    first, second = ({id(one) for one in every_widget(panel.ui)} for panel in (studio, other))
    assert len(first) > 50
    assert not first & second
    write(other, "epochs", "7")
    assert (studio.plan.epochs, other.plan.epochs) == (5, 7)
    assert studio._kept.css_class != other._kept.css_class


def test_fields_of_the_call_are_the_first_settings(runs_folder: Path) -> None:
    studio = anb.Studio(
        framework="tensorflow", model_args={"layers": [128], "dropout": 0}, optimizer="sgd",
        optimizer_args={"momentum": 0.9, "nesterov": True}, learning_rate=0.05, epochs=3, seed=11,
        schedule="cosine", warmup_steps=4, validation=0.1, batch_size=64, precision="bf16",
    )  # fmt: skip
    desk, numbers = studio._desk, studio._desk.training.numbers
    shown = {name: field.text for name, field in numbers.items()}
    assert shown == {
        "learning_rate": "0.05",
        "batch_size": "64",
        "epochs": "3",
        "seed": "11",
        "validation": "0.1",
        "warmup_steps": "4",
    }
    assert desk.training.momentum.text == "0.9"
    assert desk.training.nesterov.ui.value is True
    assert label(desk.model.preset) == "784-128-10"
    assert label(desk.run_with.precision) == "bf16"
    assert studio.plan.optimizer_args["nesterov"] is True
    assert "101,770 parameters" in desk.model.summary.value


def test_a_call_with_a_value_that_no_plan_has_is_refused(runs_folder: Path) -> None:
    with pytest.raises(anb.PlanError, match="learning_rate=-1"):
        anb.Studio(learning_rate=-1)
    with pytest.raises(anb.PlanError, match="Did you mean epochs"):
        anb.Studio(epoch=3)


# ---- controls


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("learning_rate", "-1", "learning_rate = -1: A step must have a length."),
        ("learning_rate", "fast", "learning_rate = 'fast': It is not a number that can be used."),
        ("learning_rate", "nan", "learning_rate = nan"),
        ("epochs", "", "epochs = '': It counts something. Pass a whole number, 1 or more."),
        ("epochs", "0.5", "epochs = 0.5"),
        ("batch_size", "0", "batch_size = 0"),
        ("seed", "4294967296", "seed = 4294967296"),
        ("validation", "1", "validation = 1"),
        ("warmup_steps", "60", "warmup_steps = 60: The whole run has 60 steps. Pass fewer."),
    ],
)
def test_a_bad_number_is_refused_at_once(studio: anb.Studio, name: str, text: str, words: str) -> None:
    field = studio._desk.training.numbers[name]
    good = field.text
    write(studio, name, text)
    assert words in " ".join(message(studio).split()).replace(" :", ":")
    assert studio._runner.train.disabled is True
    assert name in studio._runner.train.tooltip
    assert "anb-bad" in field.ui._dom_classes
    assert studio._words.error.value == ""
    write(studio, name, good)
    assert message(studio) == ""
    assert studio._runner.train.disabled is False
    assert "anb-bad" not in field.ui._dom_classes


def test_what_cannot_be_chosen_says_why_and_bounces(studio: anb.Studio) -> None:
    precision = studio._desk.run_with.precision
    assert next(text for text, _ in precision.ui.options if text.startswith("fp16")).startswith("fp16 ✕ float16 ")
    choose(studio, precision, "fp16")
    assert label(precision) == "auto (fp32)"
    assert studio.plan.precision == "auto"
    assert "float16 training needs a GPU" in message(studio)
    choose(studio, precision, "bf16")
    assert studio.plan.precision == "bf16"
    assert message(studio) == ""


def test_cards_that_cannot_be_used_say_how_to_get_them(studio: anb.Studio) -> None:
    studio._desk.cards.buttons["tpu"].click()
    assert "This machine has no TPU" in message(studio)
    assert "v5e-1 TPU" in message(studio)
    assert studio.plan.accelerator == "auto"
    studio._desk.cards.buttons["cpu"].click()
    settle(studio)
    assert studio.plan.accelerator == "cpu"
    assert message(studio) == ""


def test_layers_are_added_removed_and_resized(studio: anb.Studio) -> None:
    model = studio._desk.model
    choose(studio, model.preset, "784-128-10")
    assert studio.plan.model_args == {"layers": [128], "activation": "relu", "dropout": 0.0}
    assert "101,770 parameters" in model.summary.value
    assert model._drop not in model.chips.children
    model.add.click()
    settle(studio)
    assert studio.plan.model_args["layers"] == [128, 128]
    assert label(model.preset) == "other layers"
    model._hidden[1].width.ui.value = "64"
    model.dropout.ui.value = "0.5"
    choose(studio, model.activation, "GELU")
    assert studio.plan.model_args == {"layers": [128, 64], "activation": "gelu", "dropout": 0.5}
    assert "100,480" in model._hidden[0]._note.value
    assert "8,256" in model._hidden[1]._note.value
    model._hidden[0].remove.click()
    settle(studio)
    assert studio.plan.model_args["layers"] == [64]
    model._hidden[0].width.ui.value = "many"
    assert "model_args['layers'] = 'many'" in message(studio)
    assert "anb-bad" in model._hidden[0].width.ui._dom_classes
    assert studio._runner.train.disabled is True


def test_models_keep_what_was_set_for_them(studio: anb.Studio) -> None:
    model = studio._desk.model
    model._hidden[0].width.ui.value = "99"
    choose(studio, model.choice, "CNN")
    model.filters.ui.value = "8, 16"
    settle(studio)
    assert studio.plan.model_args["filters"] == [8, 16]
    assert "Conv 16 3×3" in model._plain.value
    choose(studio, model.choice, "ResNet50")
    assert "23,522,250 parameters" in model.summary.value
    choose(studio, model.choice, "MLP")
    assert studio.plan.model_args["layers"] == [99]
    choose(studio, model.choice, "CNN")
    assert studio.plan.model_args["filters"] == [8, 16]


def test_the_rate_follows_the_optimizer_until_it_is_set(studio: anb.Studio) -> None:
    training = studio._desk.training
    choose(studio, training.optimizer, "SGD")
    assert training.numbers["learning_rate"].text == "0.01"
    assert training.momentum.ui in training._flow.children
    training.nesterov.ui.value = True
    assert "Nesterov looks ahead along the momentum" in message(studio)
    training.momentum.ui.value = "0.9"
    settle(studio)
    assert studio.plan.optimizer_args == {"momentum": 0.9, "nesterov": True, "weight_decay": 0.0}
    write(studio, "learning_rate", "0.3")
    choose(studio, training.optimizer, "Adam")
    assert training.momentum.ui not in training._flow.children
    assert studio.plan.learning_rate == 0.3
    write(studio, "learning_rate", "")
    assert training.numbers["learning_rate"].text == "0.001"
    assert studio.plan.learning_rate is None


def test_own_data_and_own_model_are_entries(runs_folder: Path) -> None:
    def small_net(outputs):
        return outputs

    rng = np.random.default_rng(0)
    x, y = rng.random((50, 6), dtype=np.float32), np.arange(50) % 5
    studio = anb.Studio(data=(x, y), model=small_net)
    settle(studio)
    desk = studio._desk
    assert text_of(desk.data.summary.value) == "40 train · 10 validation · 5 classes"
    assert label(desk.data.choice).startswith("own data (<array of shape (50, 6), float32>")
    assert label(desk.model.choice) == "small_net (own)"
    assert studio.plan.data[0] is x
    assert next(text for text, _ in desk.model.choice.ui.options if "CNN" in text).startswith(
        "CNN ✕ It looks at images"
    )
    choose(studio, desk.data.choice, "digits")
    choose(studio, desk.model.choice, "CNN")
    assert (studio.plan.data, studio.plan.model) == ("digits", "cnn")
    choose(studio, desk.model.choice, "small_net")
    choose(studio, desk.data.choice, "own data")
    assert studio.plan.data[0] is x
    assert studio.plan.model is small_net


def test_notes_on_the_data_are_shown(studio: anb.Studio) -> None:
    desk = studio._desk
    assert desk._notes_row.layout.display == "none"
    write(studio, "batch_size", "5000")
    assert "larger than the 1437 training samples" in desk.notes.value.replace("1,437", "1437")
    assert desk._notes_row.layout.display is None
    write(studio, "batch_size", "128")
    assert desk._notes_row.layout.display == "none"


def test_data_that_no_model_should_see_are_refused_in_the_panel(runs_folder: Path) -> None:
    x = np.zeros((20, 3), dtype=np.float32)
    x[3, 1] = np.nan
    studio = anb.Studio(data=(x, np.arange(20) % 2))
    settle(studio)
    assert "nan" in message(studio).lower()
    assert studio._runner.train.disabled is True
    choose(studio, studio._desk.data.choice, "digits")
    assert message(studio) == ""
    assert studio._runner.train.disabled is False


def test_what_a_person_chooses_wins_over_what_a_thread_fills(studio: anb.Studio) -> None:
    """Refreshing the greyed entries must not look like a choice, and must not undo one."""
    told: list[Any] = []
    choice = fields_module.Choice("x", [("a", "a"), ("b", "b"), ("c", "c")], told.append, told.append)
    choice.fill("b")
    choice.reasons(["not here. Really.", "", ""])
    assert (told, choice.ui.value, label(choice)) == ([], 1, "b")
    choice.ui.value = 2
    assert told == ["c"]
    choice.ui.value = 0
    assert told == ["c", "x a: not here. Really."]
    assert label(choice) == "c"


# ---- cards of other machines


T4 = GPU(0, "NVIDIA T4", 16 * 2**30, 15 * 2**30, (7, 5), "GPU-1")
CARDS = Machine(
    gpus=(T4,), visible=(0,), driver="550.54", driver_cuda=(12, 8), nvidia_nodes=True, driver_loaded=True
)


def known(framework: str, **told: Any) -> FrameworkFacts:
    return FrameworkFacts(framework, installed=True, version="2.0", outcome="ok", cpu_smoke="ok", **told)


def test_a_card_names_the_gpu_and_why_a_framework_cannot_use_it() -> None:
    facts = {
        "pytorch": known("pytorch", cuda_build=False),
        "tensorflow": FrameworkFacts("tensorflow"),
    }
    gpu, tpu, cpu = cards_of(diagnose(CARDS, facts))
    assert (gpu.value, gpu.title, gpu.more, gpu.lines) == (
        "gpu:0",
        "NVIDIA T4",
        "GPU 0",
        ("15.0 GiB free of 16.0 · driver 550.54",),
    )
    face = card_html(gpu)
    assert face.count("✕ why?") == 2
    assert "TensorFlow is not installed" in text_of(face)
    assert not gpu.usable
    assert not tpu.there
    assert "✓" in card_html(cpu)


def test_a_fall_to_the_cpu_is_told(runs_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = Device(0, "T4", (7, 5), 16 * 2**30, "ok")
    facts = {
        "pytorch": known("pytorch", cuda_build=True, cuda="12.8", available=True, devices=(card,)),
        "tensorflow": known("tensorflow", cuda_build=False, keras="3"),
    }
    there = diagnose(CARDS, facts)
    monkeypatch.setattr("accel_nb.studio.desk.diagnose", lambda **_: there)
    studio = settle(anb.Studio())
    gpu, cpu = (studio._desk.cards._boxes[place] for place in (0, -1))
    assert "anb-on" in gpu._dom_classes
    assert label(studio._desk.run_with.compile).startswith("auto")
    assert message(studio) == ""
    studio._desk.run_with.framework.buttons["tensorflow"].click()
    settle(studio)
    assert "This will run on the CPU; no GPU: TensorFlow 2.0 is a CPU-only build" in message(studio)
    assert "anb-on" in cpu._dom_classes
    assert "anb-on" not in gpu._dom_classes
    studio._desk.cards.buttons["gpu:0"].click()  # asked for by name it is refused, never replaced
    settle(studio)
    assert "accelerator = 'gpu:0'" in message(studio)
    assert studio._runner.train.disabled is True
    studio._desk.run_with.framework.buttons["pytorch"].click()
    settle(studio)
    assert message(studio) == ""
    assert studio.plan.accelerator == "gpu:0"
    assert studio._runner.train.disabled is False


def test_a_card_waits_for_the_probe() -> None:
    facts = {
        name: FrameworkFacts(name, installed=True, version="2.0", cuda_build=True, cuda="12.4")
        for name in ("pytorch", "tensorflow")
    }
    gpu = cards_of(diagnose(CARDS, facts, probe=False))[0]
    assert card_html(gpu).count("…") == 2
    assert not gpu.usable


def test_names_from_the_machine_are_escaped() -> None:
    machine = Machine(gpus=(GPU(0, "<b>T4</b>&"),), visible=(0,), driver="<i>", nvidia_nodes=True)
    facts = {name: FrameworkFacts(name) for name in ("pytorch", "tensorflow")}
    face = card_html(cards_of(diagnose(machine, facts))[0])
    assert "&lt;b&gt;T4&lt;/b&gt;&amp;" in face
    assert "<i>" not in face


# ---- what both versions of ipywidgets understand

# In 7.7.1 and 8.1 alike, read off both; `tooltip` only on buttons, `style` and `layout` everywhere.
WIDGETS = {
    "Box": set(),
    "HBox": set(),
    "VBox": set(),
    "Tab": set(),
    "HTML": set(),
    "Button": {"description", "tooltip"},
    "Text": {"description", "continuous_update"},
    "Checkbox": {"description", "indent"},
    "Dropdown": {"description"},
    "FloatSlider": {"value", "min", "max", "step", "description", "readout_format"},
    "Layout": {"width"},
    "Widget": set(),
}


def test_only_widgets_and_arguments_of_both_versions_are_used() -> None:
    used = set()
    for path in sorted(Path(anb.__file__).parent.joinpath("studio").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "widgets"):
                continue
            assert node.attr in WIDGETS, f"{path.name}: widgets.{node.attr}"
            used.add(node.attr)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(node.func, "attr", "") if isinstance(node, ast.Call) else ""
            if name in WIDGETS and getattr(node.func.value, "id", "") == "widgets":
                given = {keyword.arg for keyword in node.keywords}
                assert given <= WIDGETS[name] | {"layout", "style"}, f"{path.name}, line {node.lineno}: {given}"
    assert {"Tab", "Text", "Dropdown", "Button"} <= used


def test_the_style_sheet_stays_within_the_panel() -> None:
    sheet = style_sheet()
    assert "/*" not in sheet
    assert len(sheet) < 16_000
    for selector in re.findall(r"([^{}]+)\{", re.sub(r"@(container|supports)[^{]*\{", "", sheet)):
        for one in selector.split(","):
            assert ".anb" in one, one


def test_a_summary_of_data_names_what_is_there() -> None:
    regression = Facts("own", "own", (3,), 1, "regression", 1.0, 1200, 0, 0)
    assert summary(regression) == "1,200 train · no validation · 1 target"
