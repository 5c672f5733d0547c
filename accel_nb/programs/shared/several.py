"""A run on several machines: what happens goes to a file that all see, and so does the wish to stop or pause."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from typing import Any

from settings import EPOCHS, HERE


def train_on_machines(train: Callable[..., None]) -> None:
    """Trains, writes `events.jsonl` and obeys `control.json`, both beside this file: a panel elsewhere follows.

    Each process calls it; the first one (rank 0) tells what happens, another one only its failure.
    """
    began = time.monotonic()
    done, planned, stopping = 0, 0, False

    def tell(event: str, **values: Any) -> None:
        line = json.dumps({"t": time.time(), "event": event, **values}, separators=(",", ":"))
        with open(HERE / "events.jsonl", "a") as file:
            file.write(line + "\n")

    def report(event: str, **values: Any) -> None:
        nonlocal done, planned
        if event in ("joining", "joined"):
            return
        tell(event, **values)
        if event == "started":
            planned = values["steps_per_epoch"] * EPOCHS
            print(f"training on {values['device']}, {planned} steps", flush=True)
        elif event == "batch":
            done = values["first"] + len(values["loss"]) - 1

    def asked() -> dict[str, Any]:
        try:
            return json.loads((HERE / "control.json").read_text())
        except (OSError, ValueError):
            return {}  # no wish yet, or one that is being written

    def control() -> dict[str, Any]:
        nonlocal stopping
        wish = asked()
        if wish.get("pause") and not wish.get("stop"):
            tell("status", text="paused")
            while wish.get("pause") and not wish.get("stop"):
                time.sleep(0.2)
                wish = asked()
            tell("status", text="training")
        stopping = bool(wish.get("stop"))
        return {name: wish[name] for name in ("stop", "learning_rate") if wish.get(name)}

    try:
        train(report, control, HERE)
    except BaseException as error:
        kind = type(error).__name__
        tell("error", kind=kind, text=f"{kind}: {error}", traceback=traceback.format_exc())
        if planned:
            tell("finished", status="failed", step=done, seconds=time.monotonic() - began)
        raise
    if planned:
        status = "stopped" if stopping and done < planned else "done"
        tell("finished", status=status, step=done, seconds=time.monotonic() - began)
