"""Every example of the guides runs, from top to bottom, in an empty folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.test_docs_examples import examples

GUIDES = sorted((Path(__file__).resolve().parents[2] / "docs").glob("spark*.md"))


@pytest.mark.timeout(600)  # a session and its workers start: seconds, and minutes where much else runs
@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.name)
def test_the_examples_of_a_guide_run(spark_environment: dict[str, str], tmp_path: Path, guide: Path) -> None:
    program = f"exec(compile({examples(guide)!r}, {str(guide)!r}, 'exec'))"
    ran = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, **spark_environment},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert ran.returncode == 0, ran.stderr[-6000:]
