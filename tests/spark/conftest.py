"""One Spark for all tests of a process, and another way to run: real executors, in a process of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import headgate
from headgate.errors import NotFoundError
from headgate.spark.environment import require_java, require_pyspark

SOURCES = str(Path(headgate.__file__).parent.parent)
PATIENCE = 580.0
"""How long a test may take where much else runs; on an idle machine it is seconds."""
SETTINGS = {
    "spark.driver.memory": "1g",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.default.parallelism": "2",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.metricsEnabled": "false",
    "spark.sql.warehouse.dir": "/nonexistent/warehouse",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test of a process starts Spark, and its workers import the package: give it time."""
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(PATIENCE))


def _environment(scratch: Path) -> dict[str, str]:
    """What a process that runs Spark, and every worker below it, must have."""
    path = os.pathsep.join(dict.fromkeys([SOURCES, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]))
    return {
        "JAVA_HOME": str(require_java()),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONPATH": path,
        "PYTHONDONTWRITEBYTECODE": "",  # each worker would compile the package again
        "PYTHONPYCACHEPREFIX": str(scratch / "bytecode"),
        "PYTHONWARNINGS": "ignore:lance is not fork-safe",
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(scratch / "spark"),
    }


@pytest.fixture(scope="session")
def spark_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    try:
        require_pyspark()
        require_java()
    except NotFoundError as missing:
        pytest.skip(str(missing))
    scratch = tmp_path_factory.mktemp("spark")
    yield _environment(scratch)
    shutil.rmtree(scratch, ignore_errors=True)


@pytest.fixture(scope="session")
def spark(spark_environment: dict[str, str]) -> Iterator[Any]:
    """A session on two cores, in this process. Settings that a test changes it puts back."""
    from pyspark.sql import SparkSession

    os.environ.update(spark_environment)
    builder = SparkSession.builder.appName("headgate-tests").master("local[2]")
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


@pytest.fixture
def on_cluster(spark_environment: dict[str, str], tmp_path: Path) -> Callable[..., Any]:
    """Run a script with ``spark`` on ``local-cluster[2,1,1024]``: two executors that are processes of their own.

    The script has ``spark``, ``hg``, ``hgs`` and ``args``, and calls ``answer(…)`` with something that JSON can hold.
    """

    def run(script: str, *args: str, master: str = "local-cluster[2,1,1024]", settings: dict[str, str] | None = None) -> Any:
        program = tmp_path / "program.py"
        program.write_text(_PROGRAM + textwrap.dedent(script))
        given = {**SETTINGS, "spark.executorEnv.PYTHONPATH": spark_environment["PYTHONPATH"], **(settings or {})}
        done = subprocess.run(
            [sys.executable, str(program), master, json.dumps(given), *args],
            env={**os.environ, **spark_environment},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            cwd=tmp_path,
        )
        said = [line.removeprefix("ANSWER ") for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
        assert said, done.stdout[-2000:]
        return json.loads(said[-1])

    return run


_PROGRAM = """
import json, sys
from pyspark.sql import SparkSession
import headgate as hg
import headgate.spark as hgs

builder = SparkSession.builder.master(sys.argv[1])
for name, value in json.loads(sys.argv[2]).items():
    builder = builder.config(name, value)
spark = builder.getOrCreate()
spark.sparkContext.setLogLevel("OFF")
args = sys.argv[3:]

def answer(value):
    print("ANSWER " + json.dumps(value), flush=True)
"""
