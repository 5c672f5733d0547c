"""The settings side of the panel: what the controls say, the plan it makes, and what that plan comes to here.

No decision is made here. `Plan` and `resolve` refuse and choose; the desk asks them, and shows their reasons.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from accel_nb.data import NAMED
from accel_nb.diagnose import Accelerators, Diagnosis, diagnose
from accel_nb.errors import AccelNbError, Refusal
from accel_nb.plan import FRAMEWORKS, Plan, make_plan
from accel_nb.resolve import Resolved, resolve
from accel_nb.studio.cards import Cards
from accel_nb.studio.controls import Data, RunWith, Training
from accel_nb.studio.fields import row, text_html
from accel_nb.studio.model_editor import ModelEditor
from accel_nb.studio.spreading import Spreading, brings, lit
from accel_nb.studio.style import esc
from accel_nb.studio.tabs import MachineTab
from accel_nb.studio.words import Words
from accel_nb.studio.work import Background


class Desk:
    """Controls, the plan they make, and its resolution.

    Attributes
    ----------
    fields : field of the Plan -> what the controls say, valid or not.
    refusal : why this cannot be trained, or None.
    resolved : the last plan that could be, resolved; None before the first one.
    """

    def __init__(
        self,
        fields: dict[str, Any],
        words: Words,
        machine_tab: MachineTab,
        background: Background,
        told: Callable[[dict[str, Any]], None],
    ) -> None:
        plan = make_plan(**fields)
        self.fields: dict[str, Any] = plan._fields()
        self.refusal: BaseException | None = None
        self.resolved: Resolved | None = None
        self.diagnosis: Diagnosis = diagnose(probe=False)
        self._words, self._machine_tab, self._background, self._told = words, machine_tab, background, told
        self._lock = threading.RLock()
        self._number = 0  # of the newest change; an answer to an older one is not shown
        self._facts: tuple[Any, Any, list[str]] | None = None  # key, facts and notes of the data looked at last
        change, refuse = words.guard(self.change), self._bounce
        self.cards = Cards(words.guard(self._pick_card), refuse)
        self.spreading = Spreading(change)
        self.run_with = RunWith(change, refuse, self.spreading.more, tpu=self.diagnosis.machine.tpu is not None)
        self.data = Data(plan.data, plan.data_args, change, refuse)
        self.model = ModelEditor(plan.model, change, refuse)
        self.training = Training(change, refuse)
        self.notes = text_html("", "anb-dim")
        self._notes_row = row("Notes", self.notes)
        self._notes_row.layout.display = "none"
        self.rows = [
            row("Accelerator", self.cards.ui),
            self.run_with.ui,
            self.spreading.ui,
            self.data.ui,
            self.model.ui,
            self.training.ui,
            self._notes_row,
        ]
        self.after: Callable[[], None] = lambda: None  # called when plan, refusal or resolution changed
        self._fill()
        self._light(None)

    @property
    def plan(self) -> Plan:
        """What the controls say, as a Plan; PlanError where it is none."""
        return make_plan(**self.fields)

    # ---- from the person

    def change(self, **fields: Any) -> None:
        """Other values for some fields, as a person sets them; what they leave no place for follows."""
        with self._lock:
            for name in tuple(fields):
                fields = {**self._brings(self.fields, name, fields[name]), **fields}
            self.fields = {**self.fields, **fields}
        self._words.clear_error()
        if not self._words.refusing:  # a refusal stays until the answer is there, so that the panel does not jump
            self._words.clear()
        self._fill()
        if self.look():
            self._told(fields)

    def _brings(self, before: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
        """A choice with what follows from it; for another framework a strategy that this one has here."""
        machine = self.diagnosis.machine
        changes = brings(before, name, value, tpu=machine.tpu is not None, gpus=len(machine.visible_gpus))
        if name == "framework" and before["strategy"] not in ("auto", "single"):
            problem = self._problem({**before, **changes})
            if problem is not None and problem.field in ("strategy", "nodes", "devices"):
                changes["strategy"] = "auto"
        return changes

    def _pick_card(self, value: str) -> None:
        self.change(accelerator=value)

    def _bounce(self, reason: str) -> None:
        self._words.say(reason, bad=True)

    def see(self, diagnosis: Diagnosis) -> None:
        """A newer diagnosis, for example with the probes' answers."""
        self.diagnosis = diagnosis
        self._machine_tab.show_machine(Accelerators(diagnosis)._repr_html_(), diagnosis.checking)
        self.look()

    # ---- to the screen

    def _fill(self) -> None:
        fields = self.fields
        self.run_with.fill(fields)
        self.spreading.fill(fields)
        self.data.fill(fields)
        self.model.fill(fields["model"], fields["model_args"])
        self.training.fill(fields)

    def look(self, *, here: bool = False) -> bool:
        """Judge what the controls say: at once what a Plan refuses, the rest in the background (or `here`).

        False if no Plan can be made of it.
        """
        with self._lock:
            self._number += 1
            number = self._number
        try:
            plan = self.plan
        except AccelNbError as problem:
            self._refuse(problem)
            return False
        if here:
            self._judge(plan, number)
        else:
            self._background.submit("plan", lambda: self._judge(plan, number))
        return True

    def _judge(self, plan: Plan, number: int) -> None:
        diagnosis = self.diagnosis
        try:
            resolved = self._resolve(plan, diagnosis)
        except AccelNbError as problem:
            with self._lock:
                if number != self._number:
                    return
                self._refuse(problem)
        else:
            with self._lock:
                if number != self._number:
                    return
                self._accept(resolved)
        self._cross_out(plan, diagnosis, number)

    def _resolve(self, plan: Plan, diagnosis: Diagnosis) -> Resolved:
        """`resolve`, with the data looked at once as long as they stay the same."""
        which = plan.data if isinstance(plan.data, str) else id(plan.data)
        key = (which, repr(plan.data_args), plan.validation, plan.seed)
        if self._facts is not None and self._facts[0] == key:
            _, facts, notes = self._facts
            resolved = resolve(plan, machine=diagnosis.machine, diagnosis=diagnosis, facts=facts)
            resolved.notes[:0] = notes
            return resolved
        resolved = resolve(plan, machine=diagnosis.machine, diagnosis=diagnosis)
        loaded, resolved.loaded = resolved.loaded, None  # a panel that is open holds no data
        self._facts = (key, resolved.facts, list(loaded.notes) if loaded is not None else [])
        return resolved

    def _refuse(self, problem: AccelNbError) -> None:
        self.refusal = problem
        field = problem.field if isinstance(problem, Refusal) else ""
        self._mark(field)
        known = self.resolved is not None and self.fields["accelerator"] == "auto"
        self._light(self.resolved.plan if known and self.resolved else None)
        self.spreading.clear()
        if field == "data":
            self.data.clear()
        if self.diagnosis.checking and field == "accelerator":
            self._words.say(str(problem))
            self._words.refusing = True
        else:
            self._words.refuse(problem)
        self.after()

    def _accept(self, resolved: Resolved) -> None:
        before, self.refusal, self.resolved = self.resolved, None, resolved
        self._mark("")
        if self._words.refusing:
            self._words.clear()
        chosen, reason = resolved.plan.accelerator, resolved.reasons.get("accelerator")
        self._light(resolved.plan)
        moved = before is None or before.plan.accelerator != chosen
        if reason and chosen == "cpu" and moved and self.cards.attached and not self.diagnosis.checking:
            self._words.say(f"This will run on the CPU; {reason}")  # never a silent fall
        self.run_with.show(resolved)
        self.spreading.show(resolved)
        self.data.show(resolved)
        self.model.show(resolved)
        self.training.show(resolved)
        self._machine_tab.show_choices(resolved)
        self.notes.value = "<br>".join(esc(note) for note in resolved.notes)
        self._notes_row.layout.display = None if resolved.notes else "none"
        self.after()

    def _mark(self, field: str) -> None:
        self.training.mark(field)
        self.model.mark(field)
        self.spreading.mark(field)

    def _light(self, plan: Plan | None) -> None:
        """Mark the cards that a resolved plan uses; without one those that are asked for."""
        accelerator, devices = self.fields["accelerator"], self.fields["devices"]
        if plan is not None:
            accelerator, devices = plan.accelerator, plan.devices
        self.cards.show(self.diagnosis, lit(accelerator, devices))

    def _cross_out(self, plan: Plan, diagnosis: Diagnosis, number: int) -> None:
        """Try each other choice, and grey out those that would be refused, with the reason."""
        choices = {name: [value for _, value in one.entries] for name, one in self.run_with.choices.items()}
        choices["model"] = [value for _, value in self.model.choice.entries]
        choices["framework"] = list(FRAMEWORKS)
        why = {
            name: [self._why_not(plan, diagnosis, name, value) for value in values]
            for name, values in choices.items()
        }
        with self._lock:
            if number != self._number:
                return
            for name, one in self.run_with.choices.items():
                one.reasons(why[name])
            self.model.reasons(why["model"])
            self.run_with.framework.reasons(dict(zip(FRAMEWORKS, why["framework"], strict=True)))

    def _why_not(self, plan: Plan, diagnosis: Diagnosis, name: str, value: Any) -> str:
        # an own model belongs to its framework: another framework is refused because of the model; and a strategy
        # may be no match for what is set beside it, unless that is refused as it is
        about = {name, "model"} if name == "framework" else {name}
        if name == "strategy" and self.refusal is None:
            about |= {"devices", "nodes", "activation_checkpointing"}
        fields = plan._fields()
        fields = {**fields, **self._brings(fields, name, value)}
        if name == "model" and value is not plan.model:
            fields["model_args"] = {}
        problem = self._problem(fields, diagnosis)
        return f"{problem.why} {problem.do}" if problem is not None and problem.field in about else ""

    def _problem(self, fields: dict[str, Any], diagnosis: Diagnosis | None = None) -> Refusal | None:
        """Why these fields would be refused, as far as the data are known; None if they would not."""
        diagnosis = self.diagnosis if diagnosis is None else diagnosis
        try:
            plan = make_plan(**fields)
            if self._facts is not None:
                resolve(plan, machine=diagnosis.machine, diagnosis=diagnosis, facts=self._facts[1])
        except Refusal as problem:
            return problem
        return None

    @property
    def worker_kind(self) -> str:
        """Which spare worker suits the plan; "" for none."""
        framework, resolved = self.fields["framework"], self.resolved
        if self.refusal is not None or resolved is None or resolved.plan.framework != framework:
            return framework if self.diagnosis.usable(framework, "cpu") else ""
        if resolved.plan.nodes > 1 or resolved.environment:
            return ""  # they start on other machines; a worker with variables of its own is a new one
        return "ranks" if resolved.plan.strategy == "multi_worker" else resolved.engine

    @property
    def own_data(self) -> bool:
        """Whether the data have to be read before the plan can be judged."""
        return not (isinstance(self.fields["data"], str) and self.fields["data"] in NAMED)
