"""What a reader of the torch_xla program gets. That it trains, in an environment of its own: tests/xla."""

from __future__ import annotations

import itertools
import subprocess
import sys

from test_export import settings_for

from accel_nb.export import program_text

OWN = "def own_model():\n    return None\n"


def test_every_combination_gives_a_program_without_loose_ends(tmp_path):
    """As in test_export.py: ruff's view of programs for every choice that matters here."""
    choices = itertools.product(
        ("torch_xla",), ("mlp", "cnn", "resnet50", "own"), ("cpu", "tpu"), ("fp32", "bf16"),
        ("adam", "adamw", "sgd", "rmsprop"), ("classification", "regression"),
    )  # fmt: skip
    for i, combination in enumerate(itertools.islice(choices, 0, None, 5)):
        more = {"DEVICES": (1, 8)[i % 2], "ACCUMULATE": (1, 2)[i // 2 % 2], "STRATEGY": ("tpu", "single")[i % 2]}
        settings = settings_for(combination, i) | more
        text = program_text("torch_xla", settings, "Title.", OWN if settings["MODEL"] == "own" else None)
        (tmp_path / f"program_{i}.py").write_text(text, encoding="utf-8")
        assert ("spmd" in text) == (settings["DEVICES"] > 1)
        assert ("ThreadPoolExecutor" in text) == (not settings["DATA_ON_DEVICE"])
        for absent in ("accel_nb", "torch.distributed", "cuda", "fused=True", "GradScaler"):
            assert absent not in text, absent
        # torch_xla reads it while it is imported
        assert text.index('os.environ.pop("PJRT_DEVICE"') < text.index("import torch_xla")
    rules = "F,E9,B006,PLE"
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", rules, "--no-cache", str(tmp_path)]
    check = subprocess.run(command, capture_output=True, text=True, check=False)
    assert check.returncode == 0, check.stdout[-3000:]
