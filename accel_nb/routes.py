"""placeholder until the routes are written"""

from __future__ import annotations
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Route:
    engine: str
    usable: bool
    text: str
    fix: str = ""
    environment: dict[str, str] = field(default_factory=dict)


def tpu_route(framework: str, diagnosis: Any, accelerator: str) -> Route:
    return Route(
        "tensorflow" if framework == "tensorflow" else "torch_xla",
        accelerator == "cpu" and framework == "tensorflow",
        "no route",
        "none",
    )
