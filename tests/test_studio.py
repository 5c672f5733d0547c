"""The panel without a browser: its controls are set and pressed as a front end does it, its runs are real ones."""

from __future__ import annotations

import ast
import html
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import numpy as np
import pytest

import accel_nb as anb
from accel_nb import api
from accel_nb.diagnose import diagnose
from accel_nb.facts import Facts
from accel_nb.framework_facts import Facts as FrameworkFacts
from accel_nb.machine import GPU, Machine
from accel_nb.studio import fields as fields_module
from accel_nb.studio.cards import card_html, cards_of
from accel_nb.studio.controls import summary
from accel_nb.studio.curves_tab import short_name
from accel_nb.studio.desk import Desk
from accel_nb.studio.style import style_sheet

LONG = 100_000  # epochs of a run that has to be stopped
PATIENCE = 180  # seconds, on a slow and busy machine

# Every panel of these tests is made as in a kernel: what a front end would not understand is an error.
pytestmark = pytest.mark.filterwarnings("error:Passing unrecognized arguments:DeprecationWarning")


@pytest.fixture
def studio(runs_folder: Path) -> Iterator[anb.Studio]:
    made = anb.Studio()
    assert made.settled(PATIENCE)
    yield made
    if made.run is not None and not made.run.ended:
        made.run.kill()
        made.run._ended.wait(PATIENCE)


def until(true: Callable[[], Any], what: str) -> Any:
    """Wait until something is so."""
    end = time.monotonic() + PATIENCE
    while not (answer := true()):
        assert time.monotonic() < end, f"not within {PATIENCE} s: {what}"
        time.sleep(0.02)
    return answer


def write(studio: anb.Studio, name: str, text: str) -> None:
    """Write into one of the fields of the row "Training"."""
    studio._desk.training.numbers[name].ui.value = text
    assert studio.settled(PATIENCE)


def choose(studio: anb.Studio, choice: Any, start: str) -> None:
    """Choose the entry of a dropdown that begins with `start`."""
    choice.ui.value = next(value for label, value in choice.ui.options if label.startswith(start))
    assert studio.settled(PATIENCE)


def label(choice: Any) -> str:
    """The entry that a dropdown shows."""
    return next((text for text, value in choice.ui.options if value == choice.ui.value), "")


def message(studio: anb.Studio) -> str:
    return text_of(studio._words.message.value)


def text_of(markup: str) -> str:
    return html.unescape(re.sub(r"<[^>]*>", " ", markup))


def every_widget(root: Any) -> Iterator[Any]:
    yield root
    for child in getattr(root, "children", ()):
        yield from every_widget(child)


# ---- what it shows before anything is pressed


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
    precision, strategy = studio._desk.run_with.precision, studio._desk.run_with.strategy
    assert next(text for text, _ in precision.ui.options if text.startswith("fp16")).startswith("fp16 ✕ float16 ")
    choose(studio, precision, "fp16")
    assert label(precision) == "auto (fp32)"
    assert studio.plan.precision == "auto"
    assert "float16 training needs a GPU" in message(studio)
    choose(studio, strategy, "Several")
    assert label(strategy) == "Single device"
    assert "This version trains on one device." in message(studio)
    choose(studio, precision, "bf16")
    assert studio.plan.precision == "bf16"
    assert message(studio) == ""


def test_cards_that_cannot_be_used_say_how_to_get_them(studio: anb.Studio) -> None:
    studio._desk.cards.buttons["tpu"].click()
    assert "This machine has no TPU" in message(studio)
    assert "v5e-1 TPU" in message(studio)
    assert studio.plan.accelerator == "auto"
    studio._desk.cards.buttons["cpu"].click()
    assert studio.settled(PATIENCE)
    assert studio.plan.accelerator == "cpu"
    assert message(studio) == ""


def test_layers_are_added_removed_and_resized(studio: anb.Studio) -> None:
    model = studio._desk.model
    choose(studio, model.preset, "784-128-10")
    assert studio.plan.model_args == {"layers": [128], "activation": "relu", "dropout": 0.0}
    assert "101,770 parameters" in model.summary.value
    assert model._drop not in model.chips.children
    model.add.click()
    assert studio.settled(PATIENCE)
    assert studio.plan.model_args["layers"] == [128, 128]
    assert label(model.preset) == "other layers"
    model._hidden[1].width.ui.value = "64"
    model.dropout.ui.value = "0.5"
    choose(studio, model.activation, "GELU")
    assert studio.plan.model_args == {"layers": [128, 64], "activation": "gelu", "dropout": 0.5}
    assert "100,480" in model._hidden[0]._note.value
    assert "8,256" in model._hidden[1]._note.value
    model._hidden[0].remove.click()
    assert studio.settled(PATIENCE)
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
    assert studio.settled(PATIENCE)
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
    assert studio.settled(PATIENCE)
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
    assert studio.settled(PATIENCE)
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


def test_data_that_no_model_should_see_are_refused_in_the_panel(runs_folder: Path) -> None:
    x = np.zeros((20, 3), dtype=np.float32)
    x[3, 1] = np.nan
    studio = anb.Studio(data=(x, np.arange(20) % 2))
    assert studio.settled(PATIENCE)
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


# ---- errors


def test_an_error_in_a_handler_is_shown_in_the_panel(
    studio: anb.Studio, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks(*_: Any, **__: Any) -> None:
        raise RuntimeError("no <b>way</b>")

    monkeypatch.setattr(api, "start", breaks)
    studio._runner.train.click()
    shown = until(lambda: studio._words.error.value, "the error in the panel")
    assert "RuntimeError: no &lt;b&gt;way&lt;/b&gt;" in shown
    assert shown.index("no &lt;b&gt;way") < shown.index("<details>") < shown.index("Traceback (most recent")
    assert "<b>way" not in shown
    assert 'role="alert"' in shown
    until(lambda: not studio._runner.train.disabled, "Train can be pressed again")
    with pytest.raises(RuntimeError, match="no <b>way"):
        studio.train()
    monkeypatch.setattr(Desk, "look", breaks)
    write(studio, "epochs", "3")
    assert "RuntimeError" in studio._words.error.value
    assert capsys.readouterr() == ("", "")


def test_an_error_in_the_background_is_shown_in_the_panel(
    studio: anb.Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: Any, **__: Any) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr("accel_nb.studio.view.directories", breaks)
    studio._tabs.selected_index = 2
    assert studio.settled(PATIENCE)
    assert "OSError: the disk is gone" in studio._words.error.value


def test_markup_in_paths_and_names_is_escaped(tmp_path: Path) -> None:
    folder = tmp_path / "<b>runs"
    studio = anb.Studio(directory=folder, data=str(tmp_path / "<script>.npz"))
    assert studio.settled(PATIENCE)
    assert "&lt;script&gt;.npz" in studio._words.message.value
    studio._tabs.selected_index = 2
    assert studio.settled(PATIENCE)
    assert "&lt;b&gt;runs" in studio._runs_tab.head.value
    for one in every_widget(studio.ui):
        value = getattr(one, "value", "")
        assert "<script" not in str(value)
        assert not isinstance(one, widgets.HTML) or "<b>runs" not in value


def test_commands_without_a_run_say_so(studio: anb.Studio) -> None:
    for command in (studio.pause, studio.resume, studio.stop, studio.wait):
        with pytest.raises(anb.AccelNbError, match="No run was started"):
            command()
    with pytest.raises(anb.AccelNbError, match="No run was started"):
        studio.set_learning_rate(0.1)


# ---- runs


def test_a_run_from_press_to_stop(studio: anb.Studio) -> None:
    """Two clicks start one run; pause, resume, another rate, stop; then the panel is ready for the next."""
    runner, desk = studio._runner, studio._desk
    write(studio, "epochs", str(LONG))
    runner.train.click()
    runner.train.click()
    run = studio.train()  # the third press: the run that is on its way
    assert run is studio.run
    assert runner.train.disabled is True
    assert runner.train.description == "Training…"
    assert not runner.stop.disabled
    until(lambda: len(run.history) > 3, "steps")
    assert len(anb.runs()) == 1
    until(lambda: "<circle" in studio._curves.picture.value, "the curve")
    until(lambda: f"/{LONG}" in runner.line.value, "the line beside the buttons")

    runner.pause.click()
    until(lambda: runner.pause.description.endswith("Resume"), "paused")
    assert run.status == "paused"
    assert studio.settled(PATIENCE)
    steps = len(run.history)
    write(studio, "learning_rate", "0.0003")
    assert "Learning rate 0.0003 for" in message(studio)
    assert len(run.history) == steps
    assert not runner.pause.disabled
    runner.pause.click()
    until(lambda: runner.pause.description.endswith("Pause") and len(run.history) > steps, "going on")
    until(lambda: run.history.learning_rate == pytest.approx(0.0003), "the new rate")
    studio.set_learning_rate(0.0002)
    until(lambda: run.history.learning_rate == pytest.approx(0.0002), "the rate set by the method")
    assert desk.training.numbers["learning_rate"].text == "0.0002"

    # a number that is none reaches no run
    write(studio, "learning_rate", "0")
    assert "learning_rate = 0" in message(studio)
    assert not run.ended
    write(studio, "learning_rate", "0.0002")

    other = anb.Studio()  # as after a reload of the page
    assert other.run is run
    assert other._runner.stop.disabled is False
    until(lambda: "<circle" in other._curves.picture.value, "the curve in the second panel")

    runner.stop.click()
    assert studio.wait(PATIENCE) is run
    assert run.status == "stopped"
    assert run.directory.joinpath("model.pt").is_file()
    until(other._runner.finished.is_set, "the end in the second panel")
    for panel in (studio, other):
        assert panel._runner.stop.disabled is True
        assert panel._runner.train.disabled is False
        assert panel._runner.train.description.endswith("Train")
        assert "stopped in" in panel._runner.line.value
    assert run._listeners == []
    with pytest.raises(anb.AccelNbError, match="No run is going on"):
        studio.pause()


def test_runs_in_a_row_are_compared_and_let_go(studio: anb.Studio) -> None:
    """Program, table of runs and earlier curves; the panel shows at most five of them."""
    curves, program = studio._curves, studio._program
    write(studio, "epochs", "1")
    studio._tabs.selected_index = 1
    assert studio.settled(PATIENCE)
    planned = copied(program)
    names = []
    for seed in range(2):
        write(studio, "seed", str(seed))
        studio.train()
        run = studio.wait(PATIENCE)
        names.append(run.name)
        if seed == 0:
            assert run.program == planned
    assert studio.settled(PATIENCE)
    program.ran.click()
    assert studio.settled(PATIENCE)
    assert copied(program) == studio.run.program != planned
    earlier = short_name(names[0])
    assert re.fullmatch(r"\d\d:\d\d:\d\d pytorch-mlp-digits", earlier)
    assert [one.description for one in curves.earlier.children] == [earlier]
    assert "earlier runs: " in curves.picture.value
    curves.earlier.children[0].click()
    assert "earlier runs: " not in curves.picture.value
    assert curves.earlier.children[0].description == f"{earlier} (hidden)"
    curves.log.ui.value = True
    assert ">log<" in curves.picture.value
    curves.smooth.value = 0.6
    assert "smooth 0.6" in curves.picture.value

    studio._tabs.selected_index = 2
    assert studio.settled(PATIENCE)
    rows = [
        [text_of(getattr(cell, "value", "")).strip() for cell in one.children]
        for one in studio._runs_tab.table.children
    ]
    assert [row[0] for row in rows] == names[::-1]
    assert all(row[1] == "done" and row[2].startswith("best validation accuracy") for row in rows)
    assert studio._tabs.get_title(2) == "Runs (2)"
    studio._runs_tab.table.children[1].children[-1].click()
    assert studio._tabs.selected_index == 0
    assert studio._curves._run.name == names[0]

    studio._tabs.selected_index = 3
    assert studio.settled(PATIENCE)
    assert "PyTorch on" in text_of(studio._machine.worker.value)
    assert "no GPU" in text_of(studio._machine.choices.value)

    for number in range(8):  # as after eight more runs
        curves.show(Shown(f"run {number}", studio.run.history))
    assert len(curves._kept) == len(curves.earlier.children) == 5


class Shown:
    """What the curves ask of a run."""

    ended, total_steps = True, None

    def __init__(self, name: str, history: Any) -> None:
        self.name, self.history = name, history


def copied(program: Any) -> str:
    """The program as the panel offers it for copying."""
    return html.unescape(re.search(r"<textarea[^>]*>(.*)</textarea>", program.code.value, re.DOTALL)[1])


def test_a_run_that_fails_says_where(runs_folder: Path) -> None:
    def broken(outputs):
        raise ValueError(f"no model with {outputs} <outputs>")

    studio = anb.Studio(model=broken)
    studio.train()
    with pytest.raises(anb.RunFailed, match="no model with 10 <outputs>"):
        studio.wait(PATIENCE)
    shown = studio._words.error.value
    assert "ValueError: no model with 10 &lt;outputs&gt;" in shown
    assert "program.py, line" in shown
    assert "<details><summary>Traceback" in shown
    assert studio._runner.train.disabled is False
    assert "failed" in studio._runner.line.value


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "file"
    folder.write_text("not a folder")
    studio = anb.Studio(directory=folder)
    with pytest.raises(anb.PlanError, match="No run can be written there"):
        studio.train()
    assert "No run can be written there" in message(studio)
    assert studio._runner.train.disabled is False


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
                assert given <= WIDGETS[name] | {"layout"}, f"{path.name}, line {node.lineno}: {given}"
    assert {"Tab", "Text", "Dropdown", "Button"} <= used


def test_the_style_sheet_stays_within_the_panel() -> None:
    sheet = style_sheet()
    assert "/*" not in sheet
    assert len(sheet) < 16_000
    for selector in re.findall(r"([^{}]+)\{", re.sub(r"@container[^{]*\{", "", sheet)):
        for one in selector.split(","):
            assert ".anb" in one, one


def test_a_summary_of_data_names_what_is_there() -> None:
    regression = Facts("own", "own", (3,), 1, "regression", 1.0, 1200, 0, 0)
    assert summary(regression) == "1,200 train · no validation · 1 target"
