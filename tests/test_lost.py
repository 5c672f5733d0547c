"""A worker's silent end in words."""

from __future__ import annotations

import shutil

import pytest

from accel_nb.lost import why_lost


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("removed", "removed"),
        ("unknown", "shut down"),
        (74, "MiB free"),
        (-9, "SIGKILL"),
        (-11, "SIGSEGV"),
        (-250, "signal 250"),
        (3, "exit code 3"),
    ],
)
def test_each_end_has_its_sentence(tmp_path, code, words):
    text = why_lost(code, tmp_path)
    assert words in text
    assert ("memory" in text) == (code == -9)


def test_a_lost_directory_explains_any_code(tmp_path):
    shutil.rmtree(tmp_path)
    assert "removed" in why_lost(74, tmp_path)
