"""What is missing is said, with what to do; nothing is loaded before it is needed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib import util
from pathlib import Path

import pytest

import headgate as hg
import headgate.spark as hgs
from headgate.spark import environment


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    environment.require_pyspark.cache_clear()
    yield
    environment.require_pyspark.cache_clear()


def test_importing_it_loads_no_pyspark() -> None:
    subprocess.run([sys.executable, "-c", "import headgate.spark, sys; assert 'pyspark' not in sys.modules"], check=True)


def test_every_public_name_is_there_and_no_module_stands_in_its_place() -> None:
    pytest.importorskip("pyspark")
    modules = {path.stem for path in Path(hgs.__file__).parent.glob("*.py")}
    for name in hgs.__all__:
        assert callable(getattr(hgs, name)), name
        assert name not in modules, name
    with pytest.raises(AttributeError):
        _ = hgs.nothing


def test_without_pyspark_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    with pytest.raises(hg.NotFoundError, match="PySpark is not installed") as missing:
        _ = hgs.read
    assert "headgate[spark]" in missing.value.hint


def test_an_old_pyspark_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyspark")
    monkeypatch.setattr(environment.metadata, "version", lambda name: "3.5.1")
    with pytest.raises(hg.NotFoundError, match=r"PySpark 3\.5\.1"):
        environment.require_pyspark()


def test_without_java_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environment, "_java_homes", lambda: iter([tmp_path]))
    with pytest.raises(hg.NotFoundError, match="Java 17") as missing:
        environment.require_java()
    assert "JAVA_HOME" in missing.value.hint


@pytest.mark.parametrize(("said", "number"), [('openjdk version "21.0.2" 2024', 21), ('java version "1.8.0_292"', 1), ("no java", 0)])
def test_the_version_of_a_java_is_asked_for(tmp_path: Path, said: str, number: int) -> None:
    program = tmp_path / "bin" / "java"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho '{said}' >&2\n")
    program.chmod(0o755)
    assert environment.java_version(tmp_path) == number


def test_what_spark_looks_into_loads_nothing_of_the_package() -> None:
    pytest.importorskip("pyspark")
    program = "import pyspark_headgate as p, sys; assert p.DefaultSource.name() == 'headgate'; assert 'headgate' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
