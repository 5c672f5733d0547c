"""The project as a whole: what it installs and imports, what its files may hold, and that its commands exist."""

from __future__ import annotations

import ast
import email.parser
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import accel_nb

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it there

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGE = ROOT / "accel_nb"
FRAMEWORKS = {"torch", "torchvision", "tensorflow", "keras", "jax", "tf_keras", "torch_xla"}
PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
# what Google Colab's kernels hold: only these may be required there
COLAB = {"numpy", "ipywidgets", "ipython", "matplotlib", "cloudpickle", "psutil", "scikit-learn"}


def run(*command: str, **how) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    env.update(how.pop("env", {}))
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env, **how)


def python(source: str, folder: Path, *options: str, **env: str) -> str:
    """What a new Python prints, started in an empty folder."""
    done = run(sys.executable, *options, "-c", source, cwd=folder, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


# ---- what an import loads

LOADED = "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"


def test_importing_accel_nb_loads_nothing_but_itself_and_the_standard_library(tmp_path):
    loaded = set(json.loads(python(f"import json, sys; import accel_nb; {LOADED}", tmp_path)))
    before = set(json.loads(python(f"import json, sys; {LOADED}", tmp_path)))
    assert loaded - before - set(sys.stdlib_module_names) == {"accel_nb"}


def test_every_public_name_is_found_without_a_framework(tmp_path):
    source = (
        f"import json, sys; from accel_nb import *; import accel_nb; {LOADED}\nprint(json.dumps(sorted(dir())))"
    )
    loaded, names = map(json.loads, python(source, tmp_path).splitlines())
    assert not FRAMEWORKS & set(loaded)
    assert set(accel_nb.__all__) <= set(names)


def test_public_names_are_those_of_the_issue():
    assert {"accelerators", "Studio", "train", "runs", "Plan", "__version__"} <= set(accel_nb.__all__)
    assert set(accel_nb.__all__) <= set(dir(accel_nb))
    for name in set(accel_nb.__all__) - {"__version__"}:
        assert getattr(accel_nb, name).__doc__, f"{name} says nothing of itself"


def test_an_unknown_name_is_told_with_the_known_ones():
    with pytest.raises(AttributeError, match=r"no attribute 'tain'.*Studio.*\btrain\b"):
        accel_nb.tain  # noqa: B018 - the access is the test


# ---- what source files import


def imports(path: Path) -> set[str]:
    """Top names of all modules that a file imports anywhere in it, `importlib.import_module("name")` included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("accel_nb" if node.level else node.module or "")
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and node.args and isinstance(node.args[0], ast.Constant):
                found.add(str(node.args[0].value))
    return {name.partition(".")[0] for name in found}


PROGRAMS = sorted((PACKAGE / "programs").rglob("*.py"))
SOURCES = sorted(set(PACKAGE.rglob("*.py")) - set(PROGRAMS))


def test_imports_are_found_wherever_they_stand(tmp_path):
    path = tmp_path / "source.py"
    path.write_text(
        "def f():\n    import torch.nn\n    from jax import numpy\n    x.import_module('keras.layers')\n"
    )
    assert imports(path) == {"torch", "jax", "keras"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_the_kernels_side_imports_no_framework(path):
    assert not imports(path) & FRAMEWORKS


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_programs_import_their_framework_and_nothing_of_accel_nb(path):
    folder = path.parent.name
    own = {"pytorch": {"torch"}, "torch_xla": {"torch", "torch_xla"}, "keras_jax": {"jax", "keras"}}
    files = {
        beside.stem for parent in (path.parent, *path.parent.parent.iterdir()) for beside in parent.glob("*.py")
    }
    allowed = own.get(folder, {"tensorflow", "keras"}) | {"numpy"} | (files - {"probe"})
    assert imports(path) <= allowed | set(sys.stdlib_module_names)


def test_there_is_something_to_scan():
    names = {path.name for path in SOURCES} | {f"{path.parent.name}/{path.name}" for path in PROGRAMS}
    assert {"run.py", "plan.py", "worker.py", "pytorch/train.py", "keras/train.py"} <= names


# ---- metadata and the wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy: a build leaves files beside its source."""
    folder = tmp_path_factory.mktemp("wheel")
    copy_project(folder / "source")
    done = run(
        *(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"),
        *("--wheel-dir", str(folder), str(folder / "source")),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return built


def copy_project(to: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "runs")
    for name in ("accel_nb", "tests", "notebooks", "benchmarks"):
        shutil.copytree(ROOT / name, to / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE", "constraints.txt", "environment.yml"):
        shutil.copy(ROOT / name, to / name)


def test_the_wheel_holds_the_whole_package_and_nothing_else(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    kept = [path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    wanted = {path.relative_to(ROOT).as_posix() for path in kept}
    assert {
        "accel_nb/programs/pytorch/train.py",
        "accel_nb/programs/keras/models.py",
        "accel_nb/py.typed",
    } <= wanted
    assert names == wanted


def test_the_wheel_requires_what_colab_has_without_upper_limits(wheel):
    with zipfile.ZipFile(wheel) as opened:
        (name,) = [name for name in opened.namelist() if name.endswith(".dist-info/METADATA")]
        told = email.parser.Parser().parsestr(opened.read(name).decode())
    required = [Requirement(line) for line in told.get_all("Requires-Dist")]
    core = {requirement.name for requirement in required if requirement.marker is None}
    assert core == COLAB
    limits = {spec.operator for requirement in required for spec in requirement.specifier}
    assert limits == {">="}
    assert told["Version"] == accel_nb.__version__
    assert told["License-Expression"] == "MIT"
    assert set(told.get_all("Provides-Extra")) == {"pytorch", "tensorflow", "jax", "gpu", "lab", "test"}


def test_a_program_can_be_made_from_an_installed_wheel(wheel, tmp_path):
    target = tmp_path / "site"
    done = run(
        *(sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    source = (
        "import accel_nb; print(accel_nb.__file__)\n"
        "print(accel_nb.Plan(framework='pytorch', accelerator='cpu').resolve().program().text)"
    )
    where, _, program = python(source, tmp_path, PYTHONPATH=str(target)).partition("\n")
    assert Path(where).parent.parent == target
    assert "def train(" in program
    assert "import torch" in program


def test_python_versions_agree_everywhere():
    versions = [
        word.rpartition(" ")[2] for word in PROJECT["project"]["classifiers"] if re.search(r":: 3\.", word)
    ]
    assert versions == PYTHONS
    assert PROJECT["project"]["requires-python"] == f">={PYTHONS[0]}"
    assert PROJECT["tool"]["ruff"]["target-version"] == "py" + PYTHONS[0].replace(".", "")
    suits = re.search(r"^SUITS := .*\((3, \d+)\) <= .* <= \((3, \d+)\)", text("Makefile"), re.MULTILINE)
    assert [version.replace(", ", ".") for version in suits.groups()] == [PYTHONS[0], PYTHONS[-1]]


# ---- constraints.txt and environment.yml


def constraints() -> dict[str, list[Requirement]]:
    found: dict[str, list[Requirement]] = {}
    for line in text("constraints.txt").splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            found.setdefault(requirement.name, []).append(requirement)
    return found


def requirements() -> dict[str, SpecifierSet]:
    """Every package that the project names, extras included."""
    groups = [PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"].values()]
    return {Requirement(line).name: Requirement(line).specifier for group in groups for line in group}


def test_every_package_that_is_named_has_a_tested_version():
    assert set(requirements()) == set(constraints())


def test_the_tests_run_with_the_versions_that_are_told():
    for name, lines in constraints().items():
        (line,) = [line for line in lines if line.marker is None or line.marker.evaluate()]
        assert line.specifier.contains(metadata.version(name)), f"{name} {metadata.version(name)} is not {line}"


@pytest.mark.parametrize("version", PYTHONS)
def test_each_python_has_one_version_of_each(version):
    for name, lines in constraints().items():
        fitting = [
            line for line in lines if line.marker is None or line.marker.evaluate({"python_version": version})
        ]
        assert len(fitting) == 1, f"{name}: {fitting}"


def conda() -> tuple[list[str], list[str]]:
    """environment.yml's own dependencies, and those of its pip part."""
    found = yaml.safe_load(text("environment.yml"))
    assert found["name"] == "accel_nb"
    (pip,) = [entry["pip"] for entry in found["dependencies"] if isinstance(entry, dict)]
    return [entry for entry in found["dependencies"] if isinstance(entry, str)], pip


def test_conda_gives_what_make_lab_gives():
    own, pip = conda()
    assert [entry.partition("=")[0] for entry in own] == ["python", "pip"]
    assert own[0].partition("=")[2] in PYTHONS
    (editable,) = [re.fullmatch(r"-e \.\[(.+)\]", line)[1] for line in pip if line.startswith("-e")]
    extras = re.search(r"^EXTRAS := (.+)$", text("Makefile"), re.MULTILINE)[1]
    known = PROJECT["project"]["optional-dependencies"]
    assert editable.split(",") == [extra for extra in extras.split(",") if extra != "test"]
    assert extras.split(",") == list(known)
    assert [line for line in pip if not line.startswith("-e")] == ["-c constraints.txt"]


def test_condas_pip_part_installs(tmp_path):
    """As conda does it: the lines in a file beside environment.yml. All of it is installed here, so no network."""
    project = tmp_path / "project"
    copy_project(project)
    _, pip = conda()
    (project / "condaenv.requirements.txt").write_text("\n".join(pip) + "\n", encoding="utf-8")
    command = (sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--no-build-isolation")
    done = run(*command, "-r", "condaenv.requirements.txt", cwd=project)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Would install accel_nb-" in done.stdout
    # and pip reads the constraints: with one that cannot be met it refuses
    with (project / "constraints.txt").open("a", encoding="utf-8") as file:
        file.write("psutil<1\n")
    assert run(*command, "-r", "condaenv.requirements.txt", cwd=project).returncode != 0


# ---- the files of the repository


def files() -> list[str]:
    """All files that are, or would be, committed."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: which files belong to it is not known")
    done = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_the_files_are_found():
    assert {"pyproject.toml", "Makefile", ".ci/run", "accel_nb/plan.py", "tests/test_project.py"} <= set(files())


def hits(pattern: str, names: list[str]) -> list[str]:
    found = []
    for name in names:
        with (ROOT / name).open("rb") as file:
            content = file.read()
        for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), 1):
            if b"\0" not in content and re.search(pattern, line):
                found.append(f"{name}:{number}: {line.strip()[:120]}")
    return found


def test_no_file_names_a_place_of_one_machine():
    folders = "root|work|workspace|home/[a-z]+|tmp/[a-z]+|Users/[A-Za-z]+"
    # tests make up such places, to see that they are found or kept
    names = [name for name in files() if not name.startswith("tests/")]
    assert hits(rf"(?<![\w.~])/({folders})/", names) == []


def test_no_file_names_a_registrys_host():
    hosts = ["pypi" + ".org", "python" + "hosted", "anaconda" + ".org", "download.py" + "torch", "npm" + "js"]
    assert hits("|".join(map(re.escape, hosts)), files()) == []


def test_no_file_is_large():
    sizes = {name: (ROOT / name).stat().st_size for name in files()}
    assert {name: size for name, size in sizes.items() if size > 400_000} == {}


def test_every_exception_from_a_lint_rule_has_its_reason():
    sections = text("pyproject.toml")
    ignored = re.search(r"^ignore = \[\n(.*?)^\]", sections, re.MULTILINE | re.DOTALL)[1].splitlines()
    per_file = re.search(r"per-file-ignores\]\n(.*?)\n\n", sections, re.DOTALL)[1].splitlines()
    assert len(ignored) > 10
    assert len(per_file) > 3
    assert [line for line in [*ignored, *per_file] if not re.search(r'"[\],]*\s+# .{10,}', line)] == []
    names = [name for name in files() if name.startswith(("accel_nb/", "benchmarks/", "notebooks/"))]
    single = hits(r"# noqa", names)
    assert single
    assert [hit for hit in single if not re.search(r"# noqa: [A-Z0-9, ]+ - \S.+", hit)] == []


# ---- the commands


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    return run("make", *arguments, cwd=ROOT)


def targets() -> set[str]:
    return set(re.search(r"^\.PHONY: (.+)$", text("Makefile"), re.MULTILINE)[1].split())


def test_make_alone_lists_every_target():
    done = make()
    assert done.returncode == 0, done.stderr
    listed = set(re.findall(r"^  ([a-z-]+) ", done.stdout, re.MULTILINE))
    assert listed == targets() - {"check-python"}  # a step of others, not a command


@pytest.mark.parametrize("name", ["README.md", ".ci/run", ".pre-commit-config.yaml"])
def test_commands_that_are_told_exist(name):
    told = set(re.findall(r"\bmake(?: [A-Z_]+=\S+)* ([a-z]+)\b(?=[`\s\")]|$)", text(name)))
    assert told, "no command found"
    assert told <= targets()


def test_the_readme_gives_the_two_commands():
    assert {"make lab", "make test"} <= set(re.findall(r"^make \w+", text("README.md"), re.MULTILINE))


@pytest.mark.parametrize("target", ["lab", "test", "format", "notebooks", "bench"])
def test_make_would_install_first(target):
    done = make("--dry-run", target, "VENV=.venv-that-is-not-there")
    assert done.returncode == 0, done.stderr
    commands = done.stdout
    assert 0 < commands.find("pip install") < commands.rfind(".venv-that-is-not-there/bin/python ")


def test_make_refuses_a_python_that_does_not_suit(tmp_path):
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = make("install", f"VENV={tmp_path / 'venv'}", f"PYTHON={old}")
    assert done.returncode != 0
    assert "does not suit: Python 3.10 to 3.13" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_make_refuses_an_environment_of_another_python(tmp_path):
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    other = venv / "bin" / "python"
    other.write_text("#!/bin/sh\necho 3.9.0\n")
    other.chmod(0o755)
    done = make("install", f"VENV={venv}", f"PYTHON={sys.executable}")
    assert done.returncode != 0
    assert "was made with Python 3.9.0" in done.stderr
    assert "make clean" in done.stderr


def test_ci_runs_make_test():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert run("bash", "-n", str(script)).returncode == 0
    assert re.search(r"^make test\b", text(".ci/run"), re.MULTILINE)
    assert "set -euo pipefail" in text(".ci/run")


def test_hooks_of_pre_commit_download_nothing_and_start_what_exists():
    for repo in yaml.safe_load(text(".pre-commit-config.yaml"))["repos"]:
        assert repo["repo"] == "local"
        for hook in repo["hooks"]:
            assert hook["language"] == "system"
            interpreter, *words = hook["entry"].split()
            assert interpreter == ".venv/bin/python"
            if words[0] == "-m":
                assert words[1] in requirements()
            else:
                assert (ROOT / words[0]).is_file()
