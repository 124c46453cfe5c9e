"""Every example of the guide runs, from top to bottom, in an empty folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.test_docs_examples import examples

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "spark.md"


@pytest.mark.timeout(600)  # a session and its workers start: seconds, and minutes where much else runs
def test_the_examples_of_the_guide_run(spark_environment: dict[str, str], tmp_path: Path) -> None:
    program = f"exec(compile({examples(GUIDE)!r}, {str(GUIDE)!r}, 'exec'))"
    ran = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, **spark_environment},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert ran.returncode == 0, ran.stderr[-6000:]
