"""A short soak: everything at once, for a few seconds. The long one: see soak.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "soak.py"


@pytest.mark.slow
def test_a_table_lives_through_everything_at_once(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), "--minutes", "0.35", "--seed", "4", "--dir", str(tmp_path / "soak")],
        capture_output=True,
        text=True,
        timeout=170,
    )
    print(ran.stdout, ran.stderr)
    assert ran.returncode == 0
