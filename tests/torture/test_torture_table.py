"""A short torture of tables, and the proof that it would notice. The long one: see torture_table.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "torture_table.py"

pytestmark = pytest.mark.slow


def torture(*options: str) -> subprocess.CompletedProcess[str]:
    ran = subprocess.run([sys.executable, str(SCRIPT), *options], capture_output=True, text=True, timeout=170)
    print(ran.stdout, ran.stderr)
    return ran


def test_a14_r07_killed_writers_compactors_and_collectors_lose_double_and_hide_nothing(tmp_path):
    ran = torture("--kills", "20", "--stalls", "20", "--seed", "7", "--dir", str(tmp_path))

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "violations 0" in ran.stdout


@pytest.mark.parametrize("plant", ["cursor_is_one_past", "dedup_keeps_the_oldest", "flushes_under_way_are_collected"])
def test_a_planted_bug_is_noticed(tmp_path, plant):
    """Real processes and real time: it gets harder from try to try."""
    for seed in range(5):
        strokes = str(15 + 10 * seed)
        ran = torture("--kills", strokes, "--stalls", strokes, "--seed", str(seed), "--dir", str(tmp_path / str(seed)), "--plant", plant)
        if ran.returncode == 1 and "VIOLATION" in ran.stdout:
            return
    pytest.fail(f"{plant} went unnoticed")
