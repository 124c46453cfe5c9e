"""The example of a declarative pipeline, run as its page says: every change once, also when it is run again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "flights"
PATIENCE = float(os.environ.get("HEADGATE_TEST_PATIENCE", "170"))


def run(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.long
def test_the_declarative_pipeline_of_the_examples_runs(spark_environment: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("grpc", reason="the extra headgate[pipelines] is not installed")
    program = shutil.which("spark-pipelines", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if program is None:
        pytest.skip("there is no spark-pipelines")
    place = tmp_path / "flights"
    shutil.copytree(EXAMPLE, place)
    spec = place / "spark-pipeline.yml"
    spec.write_text(spec.read_text().replace("/tmp/headgate-example", str(tmp_path / "data")))
    run([sys.executable, "make_table.py", str(tmp_path / "data" / "flights")], place, spark_environment)
    said = run([program, "run"], place, {**spark_environment, "PYSPARK_PYTHON": sys.executable})
    assert "FAILED" not in said
    assert (place / "spark-warehouse" / "per_carrier").exists()
