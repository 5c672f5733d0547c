"""What a reader takes away: the exporter's four steps, and programs for every combination of settings."""

from __future__ import annotations

import ast
import itertools
import subprocess
import sys

import pytest

from accel_nb import export, joining
from accel_nb.errors import ProgramError

SOURCE = '''"""Title.

Run `python train.py`.
"""

import math
import sys
from collections import OrderedDict, deque

from models import build

from settings import MODE, SIZE


def helper():
    """Only the slow way needs it."""
    return math.pi


def train():
    total = SIZE
    # explained here
    if MODE == "slow":
        total += helper()
    if MODE == "slow":
        total += 1
    elif MODE in ("fast", "faster"):
        # the usual way
        for i in range(2):
            total += i
    else:
        total = None
    if MODE == "fast" and total:
        total += len(deque())
    while total:
        if MODE == "slow":
            total -= 1
        break
    return build(total)
'''
SETTINGS = '''"""Settings."""

# ---- settings
MODE = "fast"  # fast or slow
SIZE = 3
UNUSED = [1, 2]
# ---- end of settings
'''
MODELS = '''"""Models."""

import math
import json


def build(size):
    """Use the other."""
    return other(size)


def other(size):
    return json.dumps(size)


def never():
    return 1
'''


def exported(**settings):
    joined = joining.join({"train": SOURCE, "settings": SETTINGS, "models": MODELS, "other": "never = 1"})
    text = export.set_values(joined, settings)
    text = export.fold(text, export.settings_of(text))
    return export.tidy(export.shake(export.retitle(text, 'A "title"')))


def functions(text):
    return [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]


def test_only_the_branch_taken_stays_and_runs():
    space: dict = {}
    text = exported(SIZE=4)
    exec(text, space)
    assert space["train"]() == "5"
    assert "slow" not in text.replace("# fast or slow", "")
    assert "elif" not in text
    assert "explained here" not in text  # it belonged to the branch that went
    assert "# the usual way" in text
    assert "if total" not in text  # a test on more than settings is left alone
    assert 'if MODE == "fast" and total:' in text


def test_the_other_branch_brings_its_helper_and_import():
    text = exported(MODE="slow")
    assert functions(text) == ["build", "other", "helper", "train"]
    assert "import math" in text
    assert "helper" not in exported()
    assert "import math" not in exported()


def test_a_branch_keeps_the_decorators_of_its_first_function():
    text = "MODE = 1\nif MODE == 1:\n\n    @property\n    def f():\n        return 1\n"
    assert "@property\ndef f():" in export.fold(text, {"MODE": 1})


def test_an_argument_that_is_not_there_leaves_the_test_alone():
    text = 'ARGS = {"a": 1}\nif ARGS["a"] > 0:\n    x = 1\nif ARGS["b"] > 0:\n    y = 1\n'
    assert export.fold(text, {"ARGS": {"a": 1}}) == 'ARGS = {"a": 1}\nx = 1\nif ARGS["b"] > 0:\n    y = 1\n'


def test_what_nothing_uses_is_dropped():
    text = exported()
    assert "UNUSED" not in text
    assert "never" not in text
    assert "OrderedDict" not in text
    assert "from collections import deque" in text
    assert "import sys" not in text


def test_an_emptied_block_gets_pass():
    text = export.fold(
        "MODE = 1\ndef f():\n    while True:\n        if MODE == 2:\n            x = 1\n", {"MODE": 1}
    )
    compile(text, "x", "exec")
    assert "pass" in text


def test_the_comment_behind_a_setting_and_the_docstring_stay():
    text = exported(MODE="faster")
    assert "MODE = 'faster'  # fast or slow" in text
    assert text.startswith('"""A \'title\'\n\nRun `python program.py`.')


def test_an_unknown_setting_or_one_without_literal_form_is_refused():
    with pytest.raises(ProgramError, match="no COLOR"):
        exported(COLOR=1)
    with pytest.raises(ProgramError, match="no literal form"):
        exported(SIZE=float("nan"))


def test_a_setting_of_several_lines_is_replaced_whole():
    text = "# ---- settings\nA = [\n    1,\n]  # kept\nB = 2\n# ---- end of settings\n"
    assert export.settings_of(export.set_values(text, {"A": {"ü": 1}})) == {"A": {"ü": 1}, "B": 2}
    assert "# kept" in export.set_values(text, {"A": 5})


COMBINATIONS = list(
    itertools.product(
        ("pytorch", "tensorflow"),
        ("mlp", "cnn", "resnet50", "own"),
        ("cpu", "gpu", "mps"),
        ("fp32", "tf32", "bf16", "fp16"),
        ("adam", "adamw", "sgd", "rmsprop"),
        ("classification", "regression"),
    )
)


def settings_for(combination, i):
    """One plan's settings; the switches that only depend on themselves take turns."""
    from accel_nb.plan import MODEL_ARGS, OPTIMIZER_ARGS

    _, model, accelerator, precision, optimizer, task = combination
    return {
        "MODEL": model,
        "MODEL_ARGS": MODEL_ARGS.get(model, {}),
        "INPUT_SHAPE": (28, 28, 1),
        "OUTPUTS": 10,
        "TASK": task,
        "X_SCALE": (1.0, 255.0)[i % 2],
        "OPTIMIZER": optimizer,
        "OPTIMIZER_ARGS": OPTIMIZER_ARGS[optimizer],
        "SCHEDULE": ("constant", "cosine")[i // 2 % 2],
        "WARMUP_STEPS": (0, 5)[i // 4 % 2],
        "ACCELERATOR": accelerator,
        "PRECISION": precision,
        "COMPILE": bool(i // 8 % 2),
        "DETERMINISTIC": bool(i // 16 % 2),
        "CUDNN_BENCHMARK": bool(i // 3 % 2),
        "DATA_ON_DEVICE": bool(i // 5 % 2),
        "DROP_LAST": bool(i // 7 % 2),
        "VALIDATION": bool(i // 9 % 2),
    }


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_every_combination_gives_a_program_without_loose_ends(framework, tmp_path):
    """Each text compiles, names nothing that it lacks and imports nothing in vain: ruff's own view of it.

    Every seventh combination: 7 shares no factor with the numbers of choices, so each pair of choices still meets.
    """
    own = "def own_model():\n    return None\n"
    for i, combination in enumerate([c for c in COMBINATIONS if c[0] == framework][::7]):
        settings = settings_for(combination, i)
        text = export.program_text(framework, settings, "Title.", own if settings["MODEL"] == "own" else None)
        (tmp_path / f"program_{i}.py").write_text(text, encoding="utf-8")
        assert "accel_nb" not in text
    rules = "F,E9,B006,PLE"
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", rules, "--no-cache", str(tmp_path)]
    check = subprocess.run(command, capture_output=True, text=True, check=False)
    assert check.returncode == 0, check.stdout[-3000:]


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_the_usual_program_is_short_and_has_no_trace_of_other_choices(framework):
    text = export.program_text(framework, {"MODEL": "mlp", "ACCELERATOR": "cpu", "PRECISION": "fp32"}, "Title.")
    lines = [line for line in text.splitlines() if line.strip()]
    assert len(lines) < 330
    for absent in ("cuda", "autocast", "mixed_", "GradScaler", "Conv2", "resnet", "jit_compile=True"):
        assert absent not in text, absent
    longest = max(len(line) for line in lines)
    assert longest <= 130


OWN = '''import math
from torch import nn

SEED = 41  # the program has one too


def build_model(width):
    """A net.

  of the user's
    """
    return math.floor(width) + SEED


def own_model():
    return build_model(2.5)
'''


def test_a_users_names_and_those_of_the_program_do_not_mix():
    program = ast.parse("from torch import nn\nSEED = 0\n\n\ndef build_model():\n    return own_model()\n")
    text = export.apart(OWN, program)
    space: dict = {}
    exec(text.replace("    from torch import nn\n", ""), space)
    assert [name for name in space if not name.startswith("__")] == ["own_model"]
    assert space["own_model"]() == 43
    assert "\n  of the user's\n" in text  # what stands in a text is moved nowhere
    same = "from torch import nn\n\n\ndef own_model():\n    return nn.Linear(1, 1)\n"
    assert export.apart(same, program) == same


def test_a_users_function_may_have_the_name_that_the_program_calls():
    text = "def own_model(n=3):\n    return n\n\n\ndef own_model():\n    return own_model(n=4)\n"
    space: dict = {}
    exec(export.apart(text, ast.parse("import os")), space)
    assert space["own_model"]() == 4
