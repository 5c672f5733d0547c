"""Installing accel_nb over what Colab holds changes nothing there. `make test-colab` runs these tests."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import notebook_files as nf
import pytest
from packaging.requirements import Requirement

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RUNTIMES = ["cpu-gpu", "tpu"]
PYTHON = "3.13"  # Colab's


def pip(*arguments: str, python: str = sys.executable, **env: str) -> subprocess.CompletedProcess[str]:
    """pip, that of this environment, for any Python."""
    command = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **env})


def held(runtime: str) -> dict[str, Requirement]:
    """What a runtime of Colab holds: name -> requirement, with a version where it is known."""
    found = {}
    for name in (runtime, "installed"):
        for line in (HERE / f"{name}.txt").read_text(encoding="utf-8").splitlines():
            if line and not line.startswith(("#", "-r")):
                one = Requirement(line)
                found[plain(one.name)] = one
    return found


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def version(one: Requirement) -> str:
    return next(iter(one.specifier)).version if one.specifier else "1"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: a build leaves files beside its source."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT / "accel_nb", source / "accel_nb", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    done = pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder), str(source))
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def colab_pythons(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Runtime -> a Python in which pip finds installed what that runtime holds: the metadata of it, no code."""
    pythons = {}
    for runtime in RUNTIMES:
        folder = tmp_path_factory.mktemp(runtime)
        venv.create(folder, with_pip=False)
        site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
        for one in held(runtime).values():
            told = site / f"{one.name.replace('-', '_')}-{version(one)}.dist-info"
            told.mkdir(parents=True)
            metadata = f"Metadata-Version: 2.1\nName: {one.name}\nVersion: {version(one)}\n"
            (told / "METADATA").write_text(metadata)
            (told / "INSTALLER").write_text("pip\n")
            (told / "RECORD").write_text("")
        pythons[runtime] = str(folder / "bin" / "python")
    return pythons


def would_install(*arguments: str, **how: str) -> dict[str, str]:
    """What pip would install: name -> version. AssertionError if it cannot."""
    done = pip("install", "--dry-run", "--quiet", "--report", "-", *arguments, **how)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    told = [part["metadata"] for part in json.loads(done.stdout)["install"]]
    return {plain(part["name"]): part["version"] for part in told}


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_nothing_but_the_package_is_installed(runtime, colab_pythons, wheel):
    found = would_install("--no-index", str(wheel), python=colab_pythons[runtime])
    assert list(found) == ["accel-nb"]


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_requirement_that_colab_does_not_meet_would_be_seen(runtime, colab_pythons, wheel, tmp_path):
    """The same with a package that wants what the panel must not: ipywidgets 8."""
    stricter = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(stricter, "w") as new:
        for name in old.namelist():
            text = old.read(name)
            if name.endswith("/METADATA"):
                assert b"ipywidgets>=7.7" in text
                text = text.replace(b"ipywidgets>=7.7", b"ipywidgets>=8")
            new.writestr(name, text)
    with pytest.raises(AssertionError, match="No matching distribution found for ipywidgets>=8"):
        would_install("--no-index", str(stricter), python=colab_pythons[runtime])


@pytest.fixture(scope="module")
def _index(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A package index that answers; in CI there is one."""
    folder = str(tmp_path_factory.mktemp("index"))
    patience = ("--retries", "1", "--timeout", "20")
    done = pip("download", "--no-deps", "--quiet", *patience, "--dest", folder, "cloudpickle==3.1.2")
    if done.returncode and "CI" not in os.environ:
        pytest.skip(f"no package index answers: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("_index")
def test_all_that_is_required_is_held_in_versions_that_fit(wheel, tmp_path):
    """The whole tree of requirements, as the index tells it, under Colab's versions: no conflict, nothing new."""
    found = would_install(
        *("--ignore-installed", "--only-binary=:all:", "--python-version", PYTHON, "--target", str(tmp_path)),
        *("--constraint", str(HERE / "installed.txt"), str(wheel)),
    )
    assert found.pop("accel-nb")
    assert {"numpy", "ipywidgets", "notebook", "joblib"} <= set(found)
    for runtime in RUNTIMES:
        colab = held(runtime)
        assert set(found) <= set(colab)
        assert {name: told for name, told in found.items() if not colab[name].specifier.contains(told)} == {}


def test_the_constraints_are_what_colab_holds():
    """But for torch and setuptools, of which `constraints.txt` says why."""
    colab = held("cpu-gpu")
    for line in (HERE / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        one = Requirement(line)
        old = one.marker is not None and not one.marker.evaluate({"python_version": PYTHON})
        if one.name not in ("torch", "setuptools") and not old and plain(one.name) in colab:
            there = colab[plain(one.name)]
            assert not there.specifier or one.specifier.contains(version(there)), line


# ---- the set-up cell


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """A new environment without accel_nb that finds all packages of this one."""
    folder = tmp_path / "colab"
    venv.create(folder, with_pip=False, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    shared = tmp_path / "shared"
    shared.mkdir()
    # links, all but those of accel_nb: what leads to its sources here must not be found
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "accel_nb" not in path.name:
            (shared / path.name).symlink_to(path)
    (site / "of-the-tests.pth").write_text(f"{shared}\n")
    return folder


def test_the_set_up_cell_installs_the_package_from_its_repository(fresh, tmp_path):
    """In an IPython with a stand-in for Colab's package; git is told that the repository is this checkout."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: there is nothing to install from")
    cell = tmp_path / "cell.ipy"
    cell.write_text(
        f"import sys, types\nsys.modules['google.colab'] = types.ModuleType('google.colab')\n{nf.setup()}\n"
        "import accel_nb\nprint(accel_nb.__file__)\n"
    )
    env = {
        **os.environ,
        "GIT_CONFIG_COUNT": "2",
        "GIT_CONFIG_KEY_0": f"url.{ROOT.as_uri()}.insteadOf",
        "GIT_CONFIG_VALUE_0": nf.repository(),
        "GIT_CONFIG_KEY_1": "safe.directory",
        "GIT_CONFIG_VALUE_1": "*",
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip's way to say: none, so that no index is needed
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "PYTHONNOUSERSITE": "1",
    }
    python = str(fresh / "bin" / "python")
    before = listed(python)
    assert "accel-nb" not in before
    command = [python, "-m", "IPython", "--no-banner", "--no-confirm-exit", str(cell)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    assert str(fresh) in done.stdout.splitlines()[-1], told
    after = listed(python)
    assert after.pop("accel-nb"), told
    assert after == before


def listed(python: str) -> dict[str, str]:
    """What is installed: name -> version."""
    told = json.loads(pip("list", "--format=json", python=python).stdout)
    return {plain(one["name"]): one["version"] for one in told}
