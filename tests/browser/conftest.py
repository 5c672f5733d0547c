"""A real JupyterLab and a real Chromium for the tests in this folder."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PATIENCE = 180  # seconds, on a slow and busy machine
SWITCHES = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def absent(what: str) -> None:
    """Skip, with the reason; in CI a browser has to be there."""
    if os.environ.get("CI"):
        pytest.fail(f"{what}, and CI is set: the tests in a browser have to run there")
    pytest.skip(what)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """The browser."""
    path = next(
        filter(None, (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if path is None:
        absent("no Chromium is installed here")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        absent("the package playwright is not installed here")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=SWITCHES)
        yield browser
        browser.close()


class Lab:
    """A JupyterLab whose files are in `folder`."""

    def __init__(self, folder: Path, private: Path) -> None:
        self.folder, self.token = folder, secrets.token_hex(8)
        settings = private / "settings/@jupyterlab/apputils-extension/notification.jupyterlab-settings"
        settings.parent.mkdir(parents=True)
        settings.write_text(json.dumps({"checkForUpdates": False, "doNotDisturbMode": True, "fetchNews": "false"}))
        names = {
            "JUPYTER_CONFIG_DIR": "config",
            "JUPYTER_DATA_DIR": "data",
            "JUPYTER_RUNTIME_DIR": "runtime",
            "JUPYTERLAB_SETTINGS_DIR": "settings",
            "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
        }
        environment = {**os.environ, **{name: str(private / place) for name, place in names.items()}}
        command = [
            *(sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", "--port=0"),
            *(f"--IdentityProvider.token={self.token}", f"--ServerApp.root_dir={folder}"),
            *(["--allow-root"] if hasattr(os, "getuid") and os.getuid() == 0 else []),
        ]
        self.log = private / "lab.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        self.url = self._address(private / "runtime")

    def _address(self, runtime: Path) -> str:
        """Where it listens: on a port that was free."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log.read_text(errors="replace")
            for told in runtime.glob("jpserver-*.json"):
                try:
                    url = str(json.loads(told.read_text())["url"])
                    with urllib.request.urlopen(f"{url}api", timeout=5):
                        return url.rstrip("/")
                except (OSError, ValueError, KeyError):
                    break
            time.sleep(0.1)
        raise AssertionError(f"JupyterLab does not answer: {self.log.read_text(errors='replace')}")

    def start_kernel(self, notebook: str) -> None:
        """Start the kernel of a notebook before a page opens it, so that no dialog asks for one."""
        session = {"path": notebook, "name": notebook, "type": "notebook", "kernel": {"name": "python3"}}
        request = urllib.request.Request(
            f"{self.url}/api/sessions", json.dumps(session).encode(), {"Authorization": f"token {self.token}"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            assert answer.status == 201

    def close(self) -> None:
        """End the server and its kernels."""
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    """A JupyterLab on an empty folder."""
    monkeypatch.setenv("ACCEL_NB_RUNS", str(tmp_path / "runs"))
    folder = tmp_path / "files"
    folder.mkdir()
    server = Lab(folder, tmp_path / "private")
    yield server
    server.close()


@pytest.fixture
def screenshots() -> Path:
    """Where pictures of the panel go; the variable ACCEL_NB_SCREENSHOTS chooses another folder."""
    folder = Path(os.environ.get("ACCEL_NB_SCREENSHOTS") or Path(__file__).parent / "screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
