"""Files from the network: with a checksum, a cache, and an answer within seconds where there is no network."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

SILENCE = 8.0  # seconds that all addresses together may keep us waiting for nothing
SLOWEST = 64 << 10  # bytes a second; a slower network counts as none
BLOCK = 256 << 10
Progress = Callable[[str], None]


class DownloadError(Exception):
    """No address gave the right file; the text says for each address why."""


@dataclass(frozen=True)
class Remote:
    """A file to fetch: its name below each address, its SHA-256 in hex, and its size in bytes."""

    name: str
    sha256: str
    size: int


def cache_folder() -> Path:
    """Where downloads are kept: `ACCEL_NB_CACHE`, else the platform's cache folder."""
    if own := os.environ.get("ACCEL_NB_CACHE"):
        return Path(own).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "accel_nb" / "cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "accel_nb"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "accel_nb"


def is_cached(files: Sequence[Remote], folder: Path) -> bool:
    """True where every file is there in its full size (its checksum is compared when it is read)."""
    try:
        return all((folder / file.name).stat().st_size == file.size for file in files)
    except OSError:
        return False


def fetch(
    files: Sequence[Remote], addresses: Sequence[str], folder: Path, progress: Progress | None = None
) -> dict[str, bytes]:
    """The content of each file by name, from `folder`, else from the first of `addresses` that has it.

    Every content has been compared with its checksum. A download is written beside its place and renamed, so that
    neither a crash nor a second process leaves a half file. Raises DownloadError, after SILENCE seconds without
    progress at the latest, and OSError where the folder cannot be written.
    """
    patience = _Patience(SILENCE)
    order = list(addresses)
    contents: dict[str, bytes] = {}
    for file in files:
        path = folder / file.name
        with contextlib.suppress(FileNotFoundError):
            content = path.read_bytes()
            if hashlib.sha256(content).hexdigest() == file.sha256:
                contents[file.name] = content
                continue
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        reasons: list[str] = []
        for tried, address in enumerate(list(order)):
            url = f"{address.rstrip('/')}/{file.name}"
            transfer = _Transfer(url, file)
            # Each address gets its share of what is left, so that a dead first one leaves time for the next.
            reason = transfer.follow(patience, len(order) - tried, progress)
            if not reason:
                order.remove(address)
                order.insert(0, address)  # the one that works goes first for the next file
                _write(path, transfer.content)
                contents[file.name] = bytes(transfer.content)
                break
            reasons.append(f"{urlsplit(url).hostname}: {reason}")
        else:
            raise DownloadError("; ".join(dict.fromkeys(reasons)))
    return contents


STALLED = "no answer, or too slow a one"


class _Patience:
    """The seconds left in which nothing happens."""

    def __init__(self, seconds: float) -> None:
        self.left = seconds


class _Transfer:
    """One file from one address, in a thread of its own: a name look-up or a connect that hangs cannot be ended.

    A thread that hangs is left behind; it ends at its own time-out, and drops what it has.
    """

    def __init__(self, url: str, file: Remote) -> None:
        self.url, self.file = url, file
        self.content = bytearray()
        self.failure = ""
        self.abandoned = False
        self.thread = threading.Thread(target=self._work, name="accel_nb download", daemon=True)

    def follow(self, patience: _Patience, shares: int, progress: Progress | None) -> str:
        """Wait for the end: "" when `content` is the file, else the reason in words."""
        self.thread.start()
        share = patience.left / shares
        quiet_since, quiet_from = time.monotonic(), 0  # a window in which SLOWEST bytes a second must come
        while self.thread.is_alive():
            self.thread.join(0.05)
            now, received = time.monotonic(), len(self.content)
            if received - quiet_from >= SLOWEST * max(1.0, now - quiet_since):
                quiet_since, quiet_from = now, received
                if progress:
                    size = self.file.size / 1e6
                    progress(f"downloading {self.file.name}: {received / 1e6:.0f} of {size:.0f} MB")
            if now - quiet_since > share:
                self.abandoned = True
                patience.left = max(0.0, patience.left - share)
                return STALLED
        if self.failure:
            return self.failure
        if len(self.content) < self.file.size:
            return f"only {len(self.content):,} of {self.file.size:,} bytes came"
        if hashlib.sha256(self.content).hexdigest() != self.file.sha256:
            return "the file there is another one (wrong checksum)"
        return ""

    def _work(self) -> None:
        try:
            # The addresses are constants of `datasets`, and what comes is compared with a checksum.
            request = urllib.request.Request(self.url, headers={"User-Agent": "accel_nb"})  # noqa: S310 - https, see above
            with urllib.request.urlopen(request, timeout=SILENCE) as answer:  # noqa: S310 - the same
                while not self.abandoned and len(self.content) <= self.file.size:
                    try:
                        block = answer.read1(BLOCK)
                    except http.client.IncompleteRead:
                        break  # told by the size
                    if not block:
                        break
                    self.content += block
        except urllib.error.HTTPError as error:
            self.failure = f"the server says {error.code} {error.reason}"
            error.close()
        except TimeoutError:
            self.failure = STALLED
        except Exception as error:  # urllib raises OSError, HTTPException and ValueError, each in many kinds
            reason = getattr(error, "reason", None) or error
            told = " ".join(str(reason).split()) or type(error).__name__
            self.failure = STALLED if isinstance(reason, TimeoutError) else told


def _write(path: Path, content: bytes | bytearray) -> None:
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        beside.write_bytes(content)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _sweep(folder: Path) -> None:
    """Remove what a process that was killed left half written more than a day ago."""
    for path in folder.glob(".*.part"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > 86_400:
                path.unlink()
