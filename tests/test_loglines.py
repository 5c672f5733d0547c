"""Known harmless start-up lines are kept back; every other line is shown."""

from pathlib import Path

import pytest

from accel_nb.loglines import is_harmless, split_log

RECORDED = Path(__file__).parent / "recorded"
# Written by TensorFlow 2.21 on a machine without a GPU, as captured.
CAPTURED = (RECORDED / "tensorflow-2.21-no-gpu.log").read_text()
# Older prefixes, and machines with a GPU.
OTHERS = (RECORDED / "harmless-others.log").read_text().splitlines()
TROUBLE = (RECORDED / "trouble.log").read_text().splitlines()


def test_captured_start_up_lines_are_all_harmless():
    shown, harmless = split_log(CAPTURED)
    assert shown == []
    assert harmless == CAPTURED.splitlines()
    assert len(harmless) == 6


@pytest.mark.parametrize("line", OTHERS)
def test_known_lines_of_other_versions(line):
    assert is_harmless(line)
    assert is_harmless(f"  {line}  ")


@pytest.mark.parametrize("line", TROUBLE)
def test_what_may_matter_is_shown(line):
    assert not is_harmless(line)
    assert split_log(line) == ([line], [])


def test_order_is_kept_and_only_harmless_lines_go():
    known = CAPTURED.splitlines()
    mixed = [known[0], "first", known[1], known[2], "", "second", "", known[3]]
    assert split_log("\n".join(mixed)) == (["first", "", "second"], known[:4])


def test_no_line_gets_lost():
    lines = [*CAPTURED.splitlines(), *OTHERS, *TROUBLE]
    shown, harmless = split_log("\n".join(lines))
    assert sorted(shown + harmless) == sorted(lines)
    assert shown == TROUBLE


@pytest.mark.parametrize("text", ["", "\n", "   \n\n"])
def test_nothing_is_nothing(text):
    assert split_log(text) == ([], [])
