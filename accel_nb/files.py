"""Files that a reader must never meet half written."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def write_atomic(path: Path, text: str) -> None:
    """Write beside and rename, so that a reader sees the old text or the new one, never half of it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
