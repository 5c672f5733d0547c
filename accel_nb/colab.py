"""Google Colab: what is special there, in a few functions. Elsewhere each of them says that it is not Colab.

Colab's own package is called in a few places only: guarded, because it changes, and with a time limit, because it
waits for a page that may be closed.
"""

from __future__ import annotations

import contextlib
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike, environ
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_nb.errors import AccelNbError

if TYPE_CHECKING:
    from accel_nb.copies import Copies
    from accel_nb.machine import Machine
    from accel_nb.run import Run

MOUNT = Path("/content/drive")  # where Colab's own notebooks mount Google Drive
KEPT = "accel_nb-runs"  # the folder on Drive
ANSWER = 3.0  # seconds that the page has to tell what the notebook asks for

# What a notebook asks for, in its metadata -> the kind of accelerator, a part of its name, as Colab's menu says it
TYPES = {
    "T4": ("gpu", "T4", "T4 GPU"),
    "L4": ("gpu", "L4", "L4 GPU"),
    "A100": ("gpu", "A100", "A100 GPU"),
    "H100": ("gpu", "H100", "H100 GPU"),
    "G4": ("gpu", "RTX PRO 6000", "G4 GPU"),
    "V28": ("tpu", "v2", "v2-8 TPU"),
    "V5E1": ("tpu", "v5e", "v5e-1 TPU"),
    "V6E1": ("tpu", "v6e", "v6e-1 TPU"),
}

# a module that a kernel may hold -> the packages that bring it
LOADED = {
    "numpy": ("numpy",),
    "ipywidgets": ("ipywidgets",),
    "IPython": ("ipython",),
    "matplotlib": ("matplotlib",),
    "torch": ("torch",),
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-tpu"),
}


def in_colab(env: Mapping[str, str] = environ) -> bool:
    """Whether this process is a Colab kernel: its package is loaded from the start, or the variable tells it."""
    return "google.colab" in sys.modules or "COLAB_RELEASE_TAG" in env


# ---- the runtime


@dataclass(frozen=True)
class Runtime:
    """The runtime that Colab gave: `got` such as "Tesla T4", "TPU v5e" or "CPU".

    `asked`: what the notebook asks for, such as "T4 GPU"; "" if for nothing, or if the page did not tell. `fits`:
    whether `got` is that.
    """

    got: str
    asked: str = ""
    fits: bool = True

    def __str__(self) -> str:
        if self.fits:
            return f"{self.got}, as the notebook asks" if self.asked else self.got
        # with fewer accelerators than people Colab gives another one, or none, and says nothing
        how = f"Runtime → Change runtime type → {self.asked}; Colab may have none free just now"
        return f"{self.got}, not the {self.asked} that the notebook asks for. To get it: {how}."


def runtime(machine: Machine | None = None) -> Runtime | None:
    """What Colab gave, and whether it is what the notebook asks for; None where this is not Colab."""
    if machine is None:
        from accel_nb.machine import machine as look

        machine = look()
    if not machine.colab:
        return None
    names = {"gpu": [gpu.name for gpu in machine.gpus], "tpu": []}
    if machine.tpu:
        chips = f"{machine.tpu.chips} x " if machine.tpu.chips > 1 else ""
        names["tpu"] = [f"{chips}TPU {machine.tpu.generation}"]
    got = ", ".join([*names["gpu"], *names["tpu"]]) or "CPU"
    metadata = _asked()
    if metadata is None:
        return Runtime(got)
    kind = str(metadata.get("accelerator") or "").lower()
    colab = metadata.get("colab")
    exact = str(colab.get("gpuType") or "") if isinstance(colab, Mapping) else ""
    if kind not in names:
        return Runtime(got)  # it asks for none
    family, part, words = TYPES.get(exact, (kind, "", f"{exact} {kind.upper()}".strip()))
    fits = any(re.search(rf"(?<!\w){re.escape(part)}(?!\w)" if part else "", name) for name in names[family])
    return Runtime(got, words, fits)


_notebook: list[Mapping[str, Any] | None] = []  # the answer, once there was one: a page is asked once per kernel


def _asked() -> Mapping[str, Any] | None:
    """The notebook's metadata, from the page that shows it; None if it does not tell.

    The page's answers come in on the channel that the main thread reads: no other thread may take them from it.
    """
    if not _notebook and threading.current_thread() is threading.main_thread():
        answer: Mapping[str, Any] | None = None
        with contextlib.suppress(Exception), _limit(2 * ANSWER):
            from google.colab import _message

            told = _message.blocking_request("get_ipynb", request="", timeout_sec=ANSWER)
            answer = dict(told["ipynb"]["metadata"])
        _notebook.append(answer)
    return _notebook[0] if _notebook else None


# ---- what is loaded


def changed() -> dict[str, tuple[str, str]]:
    """Packages that were replaced after they had been loaded: name -> (version in memory, version on the disk)."""
    from importlib import metadata

    found = {}
    for module, packages in LOADED.items():
        loaded = str(getattr(sys.modules.get(module), "__version__", ""))
        installed = []
        for package in packages if loaded else ():
            with contextlib.suppress(metadata.PackageNotFoundError):
                installed.append(metadata.version(package))
        # builds of one release, such as 2.9.0 and 2.9.0+cpu, are told in one place and not in the other
        if installed and _release(loaded) not in map(_release, installed):
            found[module] = (loaded, installed[0])
    return found


def warn_if_changed() -> None:
    """Warn, naming the packages, if the kernel must be restarted before what is installed can be used."""
    found = changed()
    if found:
        what = "; ".join(f"{name} {new} is installed, {old} is loaded" for name, (old, new) in found.items())
        how = "Runtime → Restart session" if in_colab() else "Restart the kernel"
        warnings.warn(f"{what}. {how}, then run the notebook from the top.", RuntimeWarning, stacklevel=2)


def _release(version: str) -> str:
    found = re.match(r"\d+(?:\.\d+)*", version)
    return found[0] if found else version


# ---- where runs live


def mount_drive(timeout: float = 120) -> Path:
    """Mount Google Drive, and return its folder. Colab asks the person, who has `timeout` seconds to answer.

    AccelNbError where this is not Colab, and if Drive is not there after that time.
    """
    if not in_colab():
        raise AccelNbError(
            "This is not Google Colab, so there is no Drive to mount: runs are on your own disk here. "
            "keep_on_drive(to=folder) keeps copies in another folder."
        )
    try:
        with _limit(timeout + 30):  # it has its own time limit, which one step of it may overrun
            from google.colab import drive

            drive.mount(str(MOUNT), timeout_ms=int(timeout * 1000))
    except Exception as problem:
        raise AccelNbError(
            f"Google Drive was not mounted: {_told(problem)}. Runs stay on this machine, which Colab takes away "
            f"in the end. Run the cell again and allow the access within {timeout:.0f} s, or take the runs "
            "away as files: the folder icon on the left."
        ) from problem
    folder = MOUNT / "MyDrive"
    if not folder.is_dir():
        raise AccelNbError(f"Google Drive is mounted, but {folder} is not there. Run the cell again.")
    return folder


def drive_folder() -> Path | None:
    """The folder of kept runs on a Drive that is mounted already; None if there is none. Asks nobody."""
    folder = MOUNT / "MyDrive" / KEPT
    return folder if in_colab() and folder.is_dir() else None


def keep_on_drive(
    what: Run | str | PathLike[str] | None = None,
    to: str | PathLike[str] | None = None,
    timeout: float = 120,
) -> Copies:
    """Keep copies of runs on Google Drive, from now on, in a thread: training goes on on the local disk.

    Parameters
    ----------
    what : one run, or a folder of runs; default the folder that runs go to.
    to : another folder to copy to, which must exist; Drive is not mounted then, and this works anywhere.
    timeout : seconds in which the person may allow the access to Drive.

    Returns the Copies: shown in the cell, and `copies.wait()` raises if a copy failed. AccelNbError if the folder
    to copy to cannot be had.
    """
    from accel_nb.copies import Copies
    from accel_nb.folder import runs_folder
    from accel_nb.run import Run

    source = what.directory if isinstance(what, Run) else runs_folder(what)
    if to is None:
        base = mount_drive(timeout)
        return Copies(source, base, KEPT)
    return Copies(source, Path(to).expanduser().absolute())


def bring_back(name: str = "", kept: str | PathLike[str] | None = None, timeout: float = 120) -> Run:
    """A run that was kept on Google Drive, copied to this machine: `bring_back().resume()` trains it on.

    Parameters
    ----------
    name : of the run; default the newest one there.
    kept : another folder in which runs were kept; Drive is not mounted then, and this works anywhere.
    timeout : seconds in which the person may allow the access to Drive.

    A run that is on this machine already is returned as it is. AccelNbError if there is none of that name.
    """
    from accel_nb.copies import bring_back as copied
    from accel_nb.folder import directories, known, runs_folder

    folder = mount_drive(timeout) / KEPT if kept is None else Path(kept).expanduser().absolute()
    there = {path.name: path for path in directories(folder)}
    wanted = name or next(reversed(there), "")
    if wanted not in there:
        newest = ", ".join(list(there)[:-6:-1]) or "none"
        raise AccelNbError(f"There is no run {wanted!r} in {folder}. There are, the newest first: {newest}.")
    return known(copied(there[wanted], runs_folder())).attach()


def _told(problem: BaseException) -> str:
    text = str(problem).strip().rstrip(".")
    return f"{type(problem).__name__}: {text}" if text else type(problem).__name__


@contextlib.contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """TimeoutError in the main thread after some seconds, whatever it waits in. Elsewhere no limit."""
    alarm = getattr(signal, "SIGALRM", None)
    if alarm is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: Any) -> None:
        raise TimeoutError(f"no answer within {seconds:.0f} s")

    before: Callable[..., Any] | int | None = signal.signal(alarm, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(alarm, before)
