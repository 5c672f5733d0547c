"""A run in a cell: a live picture in a notebook, plain lines elsewhere."""

from __future__ import annotations

import html
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from accel_nb.curves import curves_svg, static_bundle

if TYPE_CHECKING:
    from accel_nb.run import Run

REDRAW = 0.25  # seconds between two pictures: 4 a second at most


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


def status_line(run: Run) -> str:
    """One line on where a run stands: "epoch 5/10 · 184,200 samples/s · 0:04 left · GPU 71 % · 1.1/15.8 GiB"."""
    status, epochs = run.status, run.settled["epochs"]
    if status == "failed":
        return f"failed · {(run.error or {}).get('text', '')}"
    history = run.history
    if status in ("done", "stopped"):
        seconds = run.seconds
        took = f" in {clock(seconds)}" if seconds is not None else ""
        return f"{status}{took} · {history.summary()}"
    if run.machines > 1 and not run.started:
        return f"waiting for {run.machines} machines"  # for as long as a person needs to start them
    parts = []
    total, steps = run.total_steps, len(history)
    if total:
        parts.append(f"epoch {min(epochs, steps * epochs // total + 1)}/{epochs}")
    team = who(run)
    if team:
        parts.append(team)
    if status in ("paused", "stopping"):
        parts.insert(0, status)
    elif run.activity != "training":
        parts.append(run.activity)
    quiet = run.silence
    if quiet is not None:
        parts.append(f"no step for {quiet:.0f} s")
        if run.waiting:
            parts.append(run.waiting)
    meter = run.meter
    if meter and steps and status == "running":
        rate = meter.get("samples_per_second") or 0
        if rate:
            parts.append(f"{rate:,.0f} samples/s")
            if total:
                left = (total - steps) * run.settled["batch_size"] / rate
                parts.append(f"{clock(left)} left")
        if meter.get("utilization") is not None:
            device = run.settled["accelerator"].partition(":")[0].upper()
            parts.append(f"{device} {meter['utilization'] * 100:.0f} %")
        if meter.get("memory_total"):
            parts.append(f"{meter['memory'] / 2**30:.1f}/{meter['memory_total'] / 2**30:.1f} GiB")
    return " · ".join(parts) or status


def who(run: Run) -> str:
    """Who works on a run: "2 replicas (ddp, gloo)"; "" if one device does."""
    started = run.started
    count = started.get("replicas") or 1
    if count == 1:
        return ""
    how = ", ".join(str(started[name]) for name in ("strategy", "backend") if started.get(name))
    return f"{count} replicas ({how})" if how else f"{count} replicas"


def clock(seconds: float) -> str:
    """Seconds as "0:04", "12:30" or "1:05:00"."""
    whole = int(seconds + 0.5)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def progress(run: Run) -> float:
    """The part of the planned steps that is done, 0 to 1."""
    total = run.total_steps
    return min(1.0, len(run.history) / total) if total else 0.0


class LiveCurve:
    """One output in a notebook cell, replaced in place while the run trains; at the end a picture that stays.

    What stays needs no kernel and no widget: an SVG, a PNG for viewers that show no SVG, and a line of text.
    """

    def __init__(self, run: Run) -> None:
        from IPython.display import display

        self.last, self.final = 0.0, False
        self._lock = threading.Lock()
        self.handle: Any = display(self._picture(run), raw=True, display_id=True)
        run.listen(self)

    def __call__(self, run: Run) -> None:
        with self._lock:
            ended = run.ended
            now = time.monotonic()
            if self.final or (not ended and now - self.last < REDRAW):
                return
            if ended:
                self._print(run)
            self.last, self.final = now, ended
            bundle = self._kept(run) if ended else self._picture(run)
            # one publisher at a time; the handle finds the output by its id, from any thread
            from IPython.display import display

            display(bundle, raw=True, display_id=self.handle.display_id, update=True)

    def _picture(self, run: Run) -> dict[str, str]:
        line = html.escape(status_line(run))
        head = (
            f'<div style="font:13px sans-serif;margin:2px 0"><b>{html.escape(run.name)}</b> &nbsp;{line}'
            f'<div style="height:4px;background:#8884;border-radius:2px;margin-top:4px"><div style="height:4px;'
            f'width:{progress(run) * 100:.1f}%;background:#0969da;border-radius:2px"></div></div></div>'
        )
        curves = curves_svg(run.history, total=run.total_steps)
        said = [*run.warnings[-2:], *run.log.splitlines()[-6:]]
        if said:
            curves += f'<pre style="font-size:11px;margin:0">{html.escape(chr(10).join(said))}</pre>'
        return {"text/html": head + curves, "text/plain": f"{run.name}: {status_line(run)}"}

    def _print(self, run: Run) -> None:
        """Warnings and what the program printed stay in the cell as text, the last lines of it."""
        said = [*(f"warning: {text}" for text in run.warnings[-5:]), *run.log.splitlines()[-30:]]
        if said and run.status != "failed":  # a failure tells its log itself
            print("\n".join(said))

    def _kept(self, run: Run) -> dict[str, Any]:
        bundle = dict(static_bundle(run.history))
        bundle["text/plain"] = f"{run.name}: {status_line(run)}"
        return bundle


class PrintLines:
    """Plain lines for a shell: the start, each epoch, warnings and the end."""

    def __init__(self, run: Run) -> None:
        self.epochs, self.warnings, self.started, self.ended = 0, 0, False, False
        print(f"{run.name}: {run.settled['model']} on {run.data['label']}, {run.settled['framework']}")
        run.listen(self)

    def __call__(self, run: Run) -> None:
        if run.started and not self.started:
            self.started = True
            start = run.started
            told = [who(run), f"{run.parameters:,} parameters", f"{run.total_steps:,} steps"]
            told.append(f"learning rate {start['learning_rate']:.4g}")
            device = start.get("device_name") or start["device"]
            print(f"{device}: {', '.join(part for part in told if part)}", flush=True)
        for row in list(run.history.epochs)[self.epochs :]:
            self.epochs += 1
            values = [("loss", "loss"), ("accuracy", "accuracy"), ("val_loss", "validation loss")]
            values.append(("val_accuracy", "validation accuracy"))
            told = [f"{label} {row[key]:.4f}" for key, label in values if row.get(key) == row.get(key) is not None]
            print(f"epoch {int(row['epoch'])}/{run.settled['epochs']}  " + "  ".join(told), flush=True)
        for text in run.warnings[self.warnings :]:
            self.warnings += 1
            print(f"warning: {text}", flush=True)
        if run.ended and not self.ended:
            self.ended = True
            if run.log and run.status != "failed":
                print("\n".join(run.log.splitlines()[-30:]))
            print(f"{status_line(run)}\nkept in {run.directory}", flush=True)


def show(run: Run) -> None:
    """Show a run here: live in a notebook, a few lines elsewhere or where ACCEL_NB_PLAIN asks for them."""
    if in_notebook() and os.environ.get("ACCEL_NB_PLAIN", "") in ("", "0"):
        LiveCurve(run)
    else:
        PrintLines(run)
