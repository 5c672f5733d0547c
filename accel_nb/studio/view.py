"""Studio: the panel."""

from __future__ import annotations

import threading
import uuid
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ipywidgets as widgets

from accel_nb import launch
from accel_nb.colab import drive_folder, warn_if_changed
from accel_nb.data import NAMED, describe
from accel_nb.diagnose import Accelerators, diagnose
from accel_nb.errors import AccelNbError
from accel_nb.folder import attached, directories, known, running_here, runs_folder
from accel_nb.live import in_notebook, status_line
from accel_nb.plan import LEARNING_RATES, Plan
from accel_nb.resuming import unfinished
from accel_nb.run import Run
from accel_nb.studio.curves_tab import CurvesTab
from accel_nb.studio.desk import Desk
from accel_nb.studio.fitting import SEARCHING, Fitting
from accel_nb.studio.kept import Kept
from accel_nb.studio.runner import Runner
from accel_nb.studio.style import style_sheet
from accel_nb.studio.tabs import ROWS, MachineTab, ProgramTab, RunsTab, summary_of
from accel_nb.studio.words import Words
from accel_nb.studio.work import Background

CURVES, PROGRAM, RUNS, MACHINE = range(4)


class Studio:
    """The panel: pick accelerator and framework, build a model, press Train and watch it live.

    `Studio()` as the last line of a cell shows it. Every button has a method that does the same, for the next
    cell: `studio.train()`, `studio.pause()`, `studio.resume()`, `studio.stop()`, `studio.set_learning_rate(1e-4)`,
    and `studio.wait()`, which waits for the run and raises if it failed.

    A panel that is made while a run of this kernel still trains shows that run: after a reload of the page, or in
    another cell, it is there again with its buttons.

    Parameters
    ----------
    directory : folder for the runs' directories; default the variable ACCEL_NB_RUNS, else `runs`.
    fields : any field of Plan, as the first settings: Studio(data=(x, y), model=my_function, epochs=3).
        PlanError, in the cell, for a value that no plan can have.

    Attributes
    ----------
    ui : the root widget.
    plan : what the controls say, as a Plan; PlanError while they hold a value that none can have.
    run : the run that was started last or that is followed; None before the first one.
    """

    def __init__(self, *, directory: str | Path | None = None, **fields: Any) -> None:
        warn_if_changed()
        self._directory = directory
        self._id = uuid.uuid4().hex[:10]
        self._words = Words()
        self._background = Background(self._words.failed)
        self._curves = CurvesTab(self._words.failed)
        self._program = ProgramTab(self._words.guard(self._refresh_program))
        self._runs_tab = RunsTab(self._words.guard(self._show_run), self._refresh_runs)
        self._machine = MachineTab()
        self._desk = Desk(fields, self._words, self._machine, self._background, self._changed)
        self._runner = Runner(self._words, directory, self._begin, self._curves.draw, self._at_end)
        self._fitting = Fitting(
            self._words, directory, lambda: self._desk.plan, self._desk.change, self._after_search
        )
        self._kept = Kept(self._id)
        self._summaries: dict[str, dict[str, Any]] = {}  # of ended runs, by directory: they change no more
        self._awake = False

        runner, words = self._runner, self._words
        runner.train.on_click(words.guard(lambda _: self._start()))
        runner.pause.on_click(words.guard(lambda _: runner.pausing()))
        runner.resume.on_click(words.guard(lambda _: runner.resuming()))
        runner.stop.on_click(words.guard(lambda _: runner.stopping()))

        self._tabs = widgets.Tab([self._curves.ui, self._program.ui, self._runs_tab.ui, self._machine.ui])
        for number, title in enumerate(("Curves", "Program", "Runs", "Machine")):
            self._tabs.set_title(number, title)
        self._tabs.selected_index = CURVES
        self._tabs.add_class("anb-tabs")
        self._tabs.observe(words.guard(lambda _: self._refresh_tab()), "selected_index")
        style = widgets.HTML(f"<style>{style_sheet()}\n.{self._kept.css_class}{{display:none}}</style>")
        style.layout.height = "0px"
        under = [runner.ui, runner.machines.ui, words.ui, self._fitting.ui, self._tabs]
        self.ui = widgets.VBox([style, *self._desk.rows, *under])
        self.ui.add_class("anb")

        self._desk.after = self._after_look
        self._machine.show_machine(Accelerators(self._desk.diagnosis)._repr_html_(), self._desk.diagnosis.checking)
        # named data are told without being read, so the first picture is complete; own data may take a while
        self._desk.look(here=not self._desk.own_data)
        self._count_runs()
        for run in running_here(runs_folder(directory))[-1:]:
            self._runner.adopt(run)
        self._background.submit("offer", self._offer)

    # ---- the buttons, for the next cell

    @property
    def plan(self) -> Plan:
        return self._desk.plan

    @property
    def run(self) -> Run | None:
        return self._runner.run

    def train(self) -> Run:
        """Start a run, exactly as the button does, and return it once its worker has it.

        While a run is on its way no second one starts: that run is returned. PlanError or DataError if the plan
        cannot run here.
        """
        return self._start().result()

    def _start(self) -> Future[Run]:
        self._fitting.stop()
        plan = self._desk.plan
        named = isinstance(plan.data, str) and plan.data in NAMED
        first = describe(plan.data, data_args=plan.data_args).why if named else ""
        return self._runner.begin(plan, f"{plan.data}: {first}" if first else "writing the run's directory")

    def pause(self) -> Run:
        """Hold the run at the end of the present steps, with everything in memory."""
        run = self._the_run()
        if run.status != "paused":
            self._runner.pausing()
        return run

    def resume(self) -> Run:
        """Let a paused run go on; else take up the newest run, if it ended too early, from its checkpoint.

        AccelNbError if there is none. Where the accelerator it was on is gone, it goes on with what is here.
        """
        if self._runner.live:
            return self._the_run().resume()
        found = self._unfinished()
        if found is None:
            raise AccelNbError("Nothing to resume: no run is paused, and the newest one has not ended too early.")
        return self._runner.take_up(found).result()

    def stop(self) -> Run:
        """Stop the run after its present steps; model, checkpoint and curve are kept. Again: end it at once."""
        run = self._the_run()
        self._runner.stopping()
        return run

    def set_learning_rate(self, rate: float) -> Run:
        """A new learning rate (above 0) for the run that trains, from its next steps on, and for the next run."""
        run = self._the_run()
        run.set_learning_rate(rate)
        self._desk.change(learning_rate=rate)
        return run

    def wait(self, timeout: float | None = None) -> Run:
        """Wait for the end of the run; RunFailed if it failed, TimeoutError after `timeout` seconds.

        The first interrupt stops the run and keeps what it has, the second one ends it at once.
        """
        return self._runner.wait(timeout)

    def settled(self, timeout: float | None = 30) -> bool:
        """Wait until the panel has judged what its controls say; False after `timeout` seconds."""
        return self._background.settled(timeout)

    def _unfinished(self) -> Run | None:
        """The newest run, here or on a Drive that is mounted, if it can go on."""
        return unfinished(runs_folder(self._directory), drive_folder())

    def _offer(self) -> None:
        if not self._runner.live:
            self._runner.offer(self._unfinished())

    def _the_run(self) -> Run:
        if self.run is None:
            raise AccelNbError("No run was started. Press Train, or call train().")
        return self.run

    # ---- on the screen

    def __repr__(self) -> str:
        run = "no run yet" if self.run is None else f"run {self.run.name}: {self.run.status}"
        return f"<accel_nb.Studio: {run}>"

    def _ipython_display_(self) -> None:
        from IPython.display import display

        if not in_notebook():
            print("The panel needs a notebook; accel_nb.train(...) does the same here.")
            return
        # by hand, because both ipywidgets 7 and 8 understand this, and the text beside it is ours
        view = {"version_major": 2, "version_minor": 0, "model_id": self.ui.model_id}
        text = "The panel of accel_nb; it needs a running kernel."
        display({"text/plain": text, "application/vnd.jupyter.widget-view+json": view}, raw=True)
        self._kept.display()
        self._wake()

    def _wake(self) -> None:
        """What takes seconds starts once the panel is on the screen: the spare worker, the probes."""
        if self._awake:
            return
        self._awake = True
        self._spare()
        if self._desk.diagnosis.checking:
            threading.Thread(target=self._ask, name="accel_nb probes", daemon=True).start()

    def _ask(self) -> None:
        try:
            self._desk.see(diagnose(self._desk.diagnosis.machine))
        except Exception as problem:
            self._words.failed(problem)

    def _spare(self) -> None:
        """Have a worker of the kind that the plan needs ready, so that Train starts at once."""
        if self._awake and not self._runner.live:
            self._background.submit("spare", self._prepare)

    def _prepare(self) -> None:
        kind = self._desk.worker_kind
        if kind and not self._runner.live:
            launch.spares.prepare(kind)

    def _changed(self, fields: dict[str, Any]) -> None:
        """A person changed some fields."""
        if not fields.keys().isdisjoint(("framework", "strategy", "accelerator", "devices", "nodes")):
            self._spare()
        run = self.run
        if "learning_rate" in fields and run is not None and not run.ended:
            rate = fields["learning_rate"]
            rate = LEARNING_RATES[self._desk.fields["optimizer"]] if rate is None else rate
            run.set_learning_rate(rate)
            self._words.say(f"Learning rate {rate:g} for {run.name}, from its next steps on.")

    def _after_look(self) -> None:
        refusal = self._desk.refusal
        self._runner.refuse(SEARCHING if self._fitting.busy else "" if refusal is None else str(refusal))
        self._fitting.judged(refusal)
        if self._tabs.selected_index == PROGRAM:
            self._refresh_program()

    def _after_search(self) -> None:
        """A search for the batch that fits has begun or ended."""
        self._after_look()
        if not self._fitting.busy:
            self._spare()

    # ---- the tabs

    def _refresh_tab(self) -> None:
        {PROGRAM: self._refresh_program, RUNS: self._refresh_runs, MACHINE: self._refresh_worker}.get(
            self._tabs.selected_index, lambda: None
        )()

    def _refresh_program(self) -> None:
        self._background.submit("program", self._draw_program)

    def _draw_program(self) -> None:
        run, desk = self.run, self._desk
        if self._program.shows_run and run is not None:
            self._program.show(run.program, f"It is in {run.directory}")
        elif desk.refusal is not None or desk.resolved is None:
            self._program.refuse(str(desk.refusal or "The settings are being looked at."))
        else:
            try:
                text = desk.resolved.program().text
            except AccelNbError as problem:
                self._program.refuse(str(problem))
                return
            self._program.show(text, "Train writes it into the run's directory")

    def _refresh_runs(self) -> None:
        self._background.submit("runs", self._draw_runs)

    def _count_runs(self) -> int:
        count = len(list(directories(runs_folder(self._directory))))
        self._tabs.set_title(RUNS, f"Runs ({count})" if count else "Runs")
        return count

    def _draw_runs(self) -> None:
        folder = runs_folder(self._directory)
        count = self._count_runs()
        told = []
        for path in reversed(list(directories(folder))[-ROWS:]):
            summary = self._summaries.get(str(path))
            if summary is None:
                run = attached(path)
                if run is None:
                    continue
                summary = summary_of(run)
                if run.ended:
                    self._summaries[str(path)] = summary
            told.append(summary)
        self._runs_tab.show(told, str(folder), count)

    def _show_run(self, directory: str) -> None:
        """The curve of a run in the table; one that still trains gets the buttons too."""

        def show() -> None:  # a long run takes a moment to read
            run = known(Path(directory)).attach()
            if not run.ended and not self._runner.live:
                self._runner.adopt(run)
            else:
                self._curves.show(run)
            self._tabs.selected_index = CURVES

        self._background.submit("show", show)

    def _refresh_worker(self) -> None:
        run = self.run
        if run is not None:
            self._background.submit("worker", lambda: self._machine.show_worker(run))

    # ---- the run

    def _begin(self, run: Run) -> None:
        """A run that this panel follows from now on."""
        self._fitting.clear()
        self._curves.show(run)
        self._program.follow(run)
        self._count_runs()
        self._refresh_tab()

    def _at_end(self, run: Run) -> None:
        """From the run's thread, at its end."""
        self._curves.draw(now=True)
        self._program.follow(run)
        self._curves.offer(self._kept.update(run, status_line(run), **self._curves.settings))
        self._count_runs()
        self._fitting.offer(run)
        self._background.submit("offer", self._offer)
        self._refresh_tab()
        self._spare()
