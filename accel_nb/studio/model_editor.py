"""The model row: which model, its layers as chips with their parameters, and for an MLP the layers to edit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets as widgets

from accel_nb.plan import ACTIVATIONS, MODEL_ARGS, MODELS, model_name
from accel_nb.studio.fields import Choice, Field, button, number, row, text_html
from accel_nb.studio.style import esc

LABELS = {"mlp": "MLP", "cnn": "CNN", "resnet50": "ResNet50"}
ACTIVATION_LABELS = {"relu": "ReLU", "gelu": "GELU", "silu": "SiLU", "leaky_relu": "Leaky ReLU", "elu": "ELU"}
PRESETS = (
    ("784-512-dropout-10", {"layers": [512], "activation": "relu", "dropout": 0.2}),
    ("784-128-10", {"layers": [128], "activation": "relu", "dropout": 0.0}),
)
CHIPS = 8  # a longer model is told by its first and last layers


class ModelEditor:
    """The row of the model. `changed(field=value, ...)` with the plan's fields `model` and `model_args`."""

    def __init__(self, own: Any, changed: Callable[..., None], refused: Callable[[str], None]) -> None:
        self._changed = changed
        entries: list[tuple[str, Any]] = [(LABELS[name], name) for name in MODELS]
        if not isinstance(own, str):
            entries.append((f"{model_name(own)} (own)", own))
        self.choice = Choice("Model", entries, self._pick, refused, bare=True)
        self.preset = Choice("Preset", [*PRESETS, ("other layers", None)], self._preset, refused, bare=True)
        self.activation = Choice(
            "activation",
            [(ACTIVATION_LABELS.get(name, name), name) for name in ACTIVATIONS],
            lambda value: self._set(activation=value),
            refused,
        )
        self.dropout = Field("dropout", lambda text: self._set(dropout=number(text)), "104px")
        self.filters = Field("filters", lambda text: self._set(filters=sizes(text)), "150px")
        self.add = button("+ layer", "Add a dense layer before the output", "anb-small", "anb-link")
        self.add.on_click(lambda _: self._add())
        self.summary = text_html("", "anb-right", "anb-dim")
        self.chips = widgets.Box([])
        self.chips.add_class("anb-inline")
        self.settings = widgets.Box([])
        self.settings.add_class("anb-flow")
        self._hidden: list[_Hidden] = []
        self._input, self._drop, self._output = (text_html("", "anb-layer") for _ in range(3))
        self._plain = text_html("", "anb-layers")
        self.ui = row("Model", self.choice.ui, self.chips, self.settings)
        self._kept: dict[Any, dict[str, Any]] = {}  # what was set for a model comes back with it
        self._model: Any = None
        self._args: dict[str, Any] = {}

    # ---- from the person

    def _pick(self, model: Any) -> None:
        self._kept[_key(self._model)] = self._args
        self._changed(model=model, model_args=self._kept.get(_key(model), {}))

    def _preset(self, args: dict[str, Any] | None) -> None:
        if args is None:
            self.fill(self._model, self._args)  # "other" says what is so; it changes nothing
        else:
            self._changed(model_args={**args, "layers": list(args["layers"])})

    def _set(self, **change: Any) -> None:
        self._changed(model_args={**self._args, **change})

    def _layers(self) -> list[Any]:
        return list(self._args.get("layers", []))

    def _add(self) -> None:
        layers = self._layers()
        last = layers[-1] if layers and isinstance(layers[-1], int) else 128
        self._set(layers=[*layers, last])

    def _resize(self, place: int, text: str) -> None:
        layers = self._layers()
        layers[place] = number(text)
        self._set(layers=layers)

    def _remove(self, place: int) -> None:
        layers = self._layers()
        del layers[place]
        self._set(layers=layers)

    # ---- to the screen

    def fill(self, model: Any, args: dict[str, Any]) -> None:
        """Show what is set, valid or not."""
        self._model = model
        known = MODEL_ARGS.get(model, {}) if isinstance(model, str) else {}
        self._args = {**known, **args}
        self.choice.fill(model)
        if "activation" in self._args and isinstance(model, str):
            self.activation.fill(self._args["activation"])
            self.dropout.fill(self._args["dropout"])
        if model == "mlp":
            self.preset.fill(None)
            for _, preset in PRESETS:
                if preset == self._args:
                    self.preset.fill(preset)
            layers = self._layers()
            while len(self._hidden) < len(layers):
                place = len(self._hidden)
                self._hidden.append(_Hidden(place, self._resize, self._remove))
            for one, units in zip(self._hidden, layers, strict=False):
                one.fill(units, ACTIVATION_LABELS.get(self._args["activation"], self._args["activation"]))
            shown = [one.ui for one in self._hidden[: len(layers)]]
            dropped = [self._drop] if self._args["dropout"] and layers else []
            self._place(
                [self._input, *shown, *dropped, self._output, self.add],
                [self.preset.ui, self.activation.ui, self.dropout.ui],
            )
        elif model == "cnn":
            self.filters.fill(", ".join(str(size) for size in self._args["filters"]))
            self._place([self._plain], [self.filters.ui, self.activation.ui, self.dropout.ui])
        else:
            self._place([self._plain], [])

    def _place(self, chips: list[Any], settings: list[Any]) -> None:
        for box, children in ((self.chips, tuple(chips)), (self.settings, (*settings, self.summary))):
            if box.children != children:
                box.children = children

    def show(self, resolved: Any) -> None:
        """Show what the layers cost, as the resolved plan tells."""
        table = list(resolved.table)
        if resolved.plan.model == "mlp":
            dense = [layer for layer in table if layer.kind == "Dense"]
            size = 1
            for part in resolved.facts.input_shape:
                size *= part
            self._input.value = chip("Input", size, raw=True)
            for one, layer in zip(self._hidden, dense, strict=False):
                one.cost(layer.parameters)
            for layer in table:
                if layer.kind == "Dropout":
                    self._drop.value = chip(layer.label, layer.parameters)
            self._output.value = chip(dense[-1].label, dense[-1].parameters)
        elif table:
            self._plain.value = chips_html(resolved.facts.input_shape, table)
        else:
            self._plain.value = '<span class="anb-dim">its layers are counted when the worker builds it</span>'
        self.summary.value = esc(cost_line(resolved))

    def reasons(self, why: Sequence[str]) -> None:
        self.choice.reasons(why)

    def mark(self, field: str) -> None:
        """Frame the control that a refusal is about; "" for none."""
        for one, name in ((self.dropout, "dropout"), (self.filters, "filters")):
            one.mark(bad=name in field)
        for layer in self._hidden:
            layer.width.mark(bad="layers" in field and not isinstance(number(layer.width.text), int))


class _Hidden:
    """The chip of a hidden layer of an MLP: its units to edit, its parameters, and a button that removes it."""

    def __init__(self, place: int, resize: Callable[[int, str], None], remove: Callable[[int], None]) -> None:
        self.width = Field("Dense", lambda text: resize(place, text), "92px")
        self.remove = button("✕", f"Remove dense layer {place + 1}")
        self.remove.on_click(lambda _: remove(place))
        self._note = text_html("")
        self._activation, self._cost = "", ""
        self.ui = widgets.HBox([widgets.VBox([self.width.ui, self._note]), self.remove])
        self.ui.add_class("anb-layer")

    def fill(self, units: Any, activation: str) -> None:
        self.width.fill(units)
        self._activation = activation
        self._draw()

    def cost(self, parameters: int) -> None:
        self._cost = f"{parameters:,}"
        self._draw()

    def _draw(self) -> None:
        self._note.value = f"<small>{esc(self._activation)} · {esc(self._cost)}</small>"


def chip(name: str, parameters: int, *, raw: bool = False) -> str:
    return f"{esc(name)}<small>{parameters if raw else f'{parameters:,}'}</small>"


def chips_html(input_shape: Sequence[int], table: Sequence[Any]) -> str:
    """Layers as chips; of a long model the first and the last."""
    parts = [("Input", "×".join(str(size) for size in input_shape))]
    layers = [(layer.label, f"{layer.parameters:,}") for layer in table]
    if len(layers) > CHIPS:
        left_out = len(layers) - CHIPS
        parameters = sum(layer.parameters for layer in table[CHIPS // 2 : CHIPS // 2 + left_out])
        middle = (f"… {left_out} layers …", f"{parameters:,}")
        layers = [*layers[: CHIPS // 2], middle, *layers[CHIPS // 2 + left_out :]]
    return "".join(
        f'<div class="anb-layer"><div>{esc(name)}<small>{esc(size)}</small></div></div>'
        for name, size in [*parts, *layers]
    )


def cost_line(resolved: Any) -> str:
    """Parameters and memory in a line: "407,050 parameters · needs ≈ 21 MiB of 15.0 GiB to train"."""
    parts = []
    if resolved.parameters is not None:
        parts.append(f"{resolved.parameters:,} parameters")
    if resolved.memory_needed and resolved.parameters is not None:
        total = f" of {size_text(resolved.memory_total)}" if resolved.memory_total else ""
        parts.append(f"needs ≈ {size_text(resolved.memory_needed)}{total} to train")
    return " · ".join(parts)


def size_text(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{max(1, round(size / 2**20))} MiB"


def sizes(text: str) -> Any:
    """The text "32, 64" as [32, 64]; what is no number stays text, for the plan to refuse."""
    return [number(part) for part in text.replace("-", ",").split(",") if part.strip()]


def _key(model: Any) -> Any:
    return model if isinstance(model, str) else id(model)
