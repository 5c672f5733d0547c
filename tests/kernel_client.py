"""A real kernel, and the part of a front end that tests of the panel need: it knows every widget's state."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jupyter_client.manager import KernelManager

PATIENCE = 180  # seconds, on a slow and busy machine


class Kernel:
    """A kernel in its own process, in `folder`; runs code, presses buttons and writes into fields.

    Attributes: `models` (widget -> its state as the kernel last told it), `displays` (display id -> its newest
    content), `noise` (what was written to stderr and raised anywhere, in order).
    """

    def __init__(self, folder: Path) -> None:
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(cwd=str(folder))
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE)
        self.models: dict[str, dict[str, Any]] = {}
        self.displays: dict[str, dict[str, Any]] = {}
        self.noise: list[str] = []

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=False)
        self.manager.cleanup_resources()

    def run(self, code: str) -> str:
        """Run code to its end; what it printed. An error in it is one here."""
        sent = self.client.execute(code, store_history=False)
        printed, done = [], False
        end = time.monotonic() + PATIENCE
        while not done:
            assert time.monotonic() < end, f"not at its end after {PATIENCE} s: {code}"
            message = self._next(1.0)
            if message is None or message["parent_header"].get("msg_id") != sent:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream" and content["name"] == "stdout":
                printed.append(content["text"])
            elif kind == "error":
                raise AssertionError("\n".join(content["traceback"]))
            done = kind == "status" and content["execution_state"] == "idle"
        return "".join(printed)

    def until(self, true: Callable[[], Any], what: str) -> Any:
        """Take in what the kernel says until something is so."""
        end = time.monotonic() + PATIENCE
        while not (answer := true()):
            assert time.monotonic() < end, f"not within {PATIENCE} s: {what}. Noise: {self.noise}"
            self._next(0.2)
        return answer

    def _next(self, seconds: float) -> dict[str, Any] | None:
        message = None
        with contextlib.suppress(queue.Empty):
            message = self.client.get_iopub_msg(timeout=seconds)
        if message is None:
            return None
        kind, content = message["msg_type"], message["content"]
        if kind == "comm_open":
            self.models[content["comm_id"]] = dict(content["data"].get("state", {}))
        elif kind == "comm_msg" and content["data"].get("method") == "update":
            self.models.setdefault(content["comm_id"], {}).update(content["data"]["state"])
        elif kind == "comm_close":
            self.models.pop(content["comm_id"], None)
        elif kind in ("display_data", "update_display_data"):
            name = content.get("transient", {}).get("display_id")
            if name:
                self.displays[name] = content["data"]
        elif kind == "stream" and content["name"] == "stderr":
            self.noise.append(content["text"])
        elif kind == "error":
            self.noise.append("\n".join(content["traceback"]))
        return message

    # ---- as a front end

    def found(self, model: str, **state: str) -> list[str]:
        """The ids of the widgets of a kind whose state holds these texts."""
        return [
            name
            for name, told in self.models.items()
            if told.get("_model_name") == model
            and all(value in str(told.get(key)) for key, value in state.items())
        ]

    def button(self, description: str) -> str:
        """The id of the one button of this description."""
        (name,) = self.found("ButtonModel", description=description)
        return name

    def click(self, button: str) -> None:
        self._send(button, {"method": "custom", "content": {"event": "click"}})

    def write(self, description: str, text: str) -> None:
        """Write into a text field."""
        (field,) = self.found("TextModel", description=description)
        self._send(field, {"method": "update", "state": {"value": text}, "buffer_paths": []})

    def _send(self, widget: str, data: dict[str, Any]) -> None:
        message = self.client.session.msg("comm_msg", {"comm_id": widget, "data": data})
        self.client.shell_channel.send(message)

    def shows(self, text: str) -> bool:
        """Whether some HTML of the panel holds this text."""
        return any(
            text in str(state.get("value", ""))
            for state in self.models.values()
            if state.get("_model_name") == "HTMLModel"
        )
