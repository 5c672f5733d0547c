"""The exceptions of accel_nb. Each message says what was passed, why not, what to do, and what is here."""

from __future__ import annotations

from typing import Any

SHOWN = 8  # parts of a tuple or list that a message shows


class AccelNbError(Exception):
    """Any error that accel_nb raises on purpose."""


class Refusal(AccelNbError):  # noqa: N818 - the common form of the errors below
    """A request that cannot be carried out, told in four parts.

    Attributes: `field` (the argument's name), `passed` (its value), `why`, `do` (the one fix), `here` (what is
    available instead; may be empty).
    """

    def __init__(self, field: str, passed: Any, why: str, do: str, here: str = "") -> None:
        self.field, self.passed = field, passed
        # names from files and frames stand in them, and may hold anything: a sentence stays one line
        self.why, self.do, self.here = (" ".join(text.split()) for text in (why, do, here))
        super().__init__(field, passed, why, do, here)  # all of args: a refusal survives pickling

    def __str__(self) -> str:
        text = f"{self.field}={shown(self.passed)}: {self.why} {self.do}"
        return f"{text} Here: {self.here}" if self.here else text


class PlanError(Refusal, ValueError):
    """A plan that cannot run here, or not at all."""


class DataError(Refusal, ValueError):
    """Data that no model should see as they are."""


class AcceleratorError(AccelNbError, RuntimeError):
    """The accelerator that was asked for is not the one that runs."""


class RunFailed(AccelNbError, RuntimeError):  # noqa: N818 - says what happened, as users read it
    """A run that ended without a trained model; the text points to the cause."""


class ProgramError(AccelNbError):
    """A program that cannot be put together, for example from a model whose source cannot be found."""


def shown(value: Any, limit: int = 80) -> str:
    """A value as a message shows it: `repr`, cut to `limit` characters, with an array told by shape and type."""
    try:
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        if dtype is not None and isinstance(shape, tuple | list) and len(shape):
            return f"<array of shape {tuple(shape)}, {dtype}>"
        if isinstance(value, tuple | list) and any(hasattr(part, "shape") for part in value[:SHOWN]):
            more = [", …"] * (len(value) > SHOWN)
            return "(" + ", ".join(shown(part, limit) for part in value[:SHOWN]) + "".join([*more, ")"])
        text = repr(value)
    except Exception:  # an object may fail in any way when it is asked about itself
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else text[: limit - 1] + "…"
