"""The accelerator cards: what is here, what each framework can use of it, and how to get what is not here."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import ipywidgets as widgets

from accel_nb.diagnose import FRAMEWORKS, Diagnosis
from accel_nb.resolve import NAMES
from accel_nb.studio.style import esc

GIB = 2**30


@dataclass(frozen=True)
class Card:
    """One accelerator as the panel shows it. `value`: what the plan's field `accelerator` would be.

    `there`: it is in this machine. `why`: framework -> why it cannot be used, "" if it can.
    """

    value: str
    title: str
    more: str
    lines: tuple[str, ...]
    there: bool
    why: dict[str, str]
    checking: tuple[str, ...] = ()
    fix: str = ""

    @property
    def usable(self) -> bool:
        return any(not why for why in self.why.values())


def cards_of(diagnosis: Diagnosis) -> list[Card]:
    """The cards of a machine: its GPUs (or how to get one), the Apple GPU on a Mac, the TPU, the CPU."""
    machine = diagnosis.machine
    cards = []
    if not machine.mps:
        visible = {card.index: number for number, card in enumerate(machine.visible_gpus)}
        for gpu in machine.gpus:
            number = visible.get(gpu.index)
            driver = f"driver {machine.driver}" if machine.driver else ""
            room = _room(gpu.memory_free, gpu.memory_total)
            cards.append(
                _card(
                    diagnosis,
                    "gpu" if number is None else f"gpu:{number}",
                    gpu.name,
                    "hidden" if number is None else f"GPU {number}",
                    " · ".join(part for part in (room, driver) if part),
                )
            )
        if not machine.gpus:
            cards.append(_card(diagnosis, "gpu", "GPU", "", "attached, but not usable"))
    else:
        cards.append(_card(diagnosis, "mps", "Apple GPU", "mps", "shares the memory of the CPU"))
    tpu = machine.tpu
    named, chips = (f"TPU {tpu.generation}", f"{tpu.chips} chip{'s' * (tpu.chips != 1)}") if tpu else ("TPU", "")
    cards.append(_card(diagnosis, "tpu", named, chips, ""))
    cpu = machine.cpu
    cores = f"{cpu.cores} core{'s' * (cpu.cores != 1)}"
    parts = [f"{cpu.memory_total / GIB:.1f} GiB" if cpu.memory_total else "", *cpu.features[:1]]
    cards.append(_card(diagnosis, "cpu", "CPU", cores, " · ".join(part for part in parts if part)))
    return cards


def _room(free: int, total: int) -> str:
    return f"{free / GIB:.1f} GiB free of {total / GIB:.1f}" if total else ""


def _card(diagnosis: Diagnosis, value: str, title: str, more: str, line: str) -> Card:
    kind = value.partition(":")[0]
    told = {framework: diagnosis.verdict(framework, kind) for framework in FRAMEWORKS}
    machine = diagnosis.machine
    there = {"gpu": machine.has_nvidia, "tpu": machine.tpu is not None, "mps": machine.mps, "cpu": True}[kind]
    number = value.partition(":")[2]
    why = {}
    for framework, verdict in told.items():
        fix = f" Fix: {verdict.fix}" if verdict.fix else ""
        why[framework] = "" if verdict.usable else verdict.text + fix
        failed = verdict.details.get("failed", {}) if verdict.usable and number else {}
        if int(number or -1) in failed:
            why[framework] = f"A tiny convolution on this card fails: {failed[int(number)]}"
    checking = tuple(framework for framework, verdict in told.items() if verdict.reason == "checking")
    fixes = list(dict.fromkeys(verdict.fix for verdict in told.values() if not verdict.usable and verdict.fix))
    lines = tuple(part for part in (line if there else "not attached",) if part)
    return Card(value, title, more, lines, there, why, checking, "" if there or not fixes else fixes[0])


def card_html(card: Card) -> str:
    """The face of a card."""
    more = f" · {esc(card.more)}" if card.more else ""
    parts = [f"<b>{esc(card.title)}</b>{more}", *(f"<p>{esc(line)}</p>" for line in card.lines)]
    if not card.there:
        return "".join([*parts, f'<p class="anb-fix">{esc(card.fix)}</p>'])
    chips = []
    for framework, why in card.why.items():
        name = esc(NAMES[framework])
        if framework in card.checking and why:
            chips.append(f'<span class="anb-chip anb-wait">{name} …</span>')
        elif why:
            chips.append(
                f'<details class="anb-chip anb-no"><summary title="{esc(why)}">{name} ✕ why?</summary>'
                f"<div>{esc(why)}</div></details>"
            )
        else:
            chips.append(f'<span class="anb-chip">{name} ✓</span>')
    return "".join([*parts, f'<div class="anb-chips">{"".join(chips)}</div>'])


class Cards:
    """The row of cards: `picked(value)` if one that some framework can use is pressed, else `refused(reason)`."""

    def __init__(self, picked: Callable[[str], None], refused: Callable[[str], None]) -> None:
        self.ui = widgets.Box([])
        self.ui.add_class("anb-cards")
        self.buttons: dict[str, Any] = {}
        self._picked, self._refused = picked, refused
        self._cards: list[Card] = []
        self._boxes: list[Any] = []

    @property
    def attached(self) -> bool:
        """Whether there is more here than a CPU."""
        return any(card.there and card.value != "cpu" for card in self._cards)

    def show(self, diagnosis: Diagnosis, on: Collection[str]) -> None:
        """Draw the cards of this diagnosis, with those in `on` as chosen; what did not change is left alone."""
        cards = cards_of(diagnosis)
        if [card.value for card in cards] != [card.value for card in self._cards]:
            self._make(cards)
        for card, box in zip(cards, self._boxes, strict=True):
            face, press = box.children
            drawn = card_html(card)
            if face.value != drawn:
                face.value = drawn
            chosen = card.value in on
            (box.add_class if chosen else box.remove_class)("anb-on")
            (box.remove_class if card.usable else box.add_class)("anb-off")
            state = "chosen" if chosen else "choose it" if card.usable else "not usable"
            told = f"{card.title} {card.more}, {state}".replace(" ,", ",")
            press.description = told
            press.tooltip = told if card.usable else f"{told}: {card.fix or next(iter(card.why.values()))}"
        self._cards = cards

    def _make(self, cards: list[Card]) -> None:
        self._boxes, self.buttons = [], {}
        for number, card in enumerate(cards):
            press = widgets.Button(description=card.title)
            press.on_click(lambda _, number=number: self._press(number))
            box = widgets.Box([widgets.HTML(""), press])
            box.add_class("anb-card")
            self._boxes.append(box)
            self.buttons[card.value] = press
        self.ui.children = self._boxes

    def _press(self, number: int) -> None:
        card = self._cards[number]
        if card.usable:
            self._picked(card.value)
            return
        texts = list(dict.fromkeys(card.why.values()))
        self._refused(f"{card.title}: {' '.join(texts) if card.there else texts[0]}")
