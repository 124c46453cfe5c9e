"""Running the command line: in this process for speed, as a real process where signals and pipes matter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

import headgate as hg
from headgate.cli.main import app

WAL_ONLY = hg.ShardWriterConfig(enable_memtable=False)


@dataclass
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one document on stdout."""
        assert self.out.count("\n") == 1, self.out
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        """The documents on stdout, one per line."""
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def error(self) -> dict[str, Any]:
        """The JSON error object on stderr."""
        assert self.out == ""
        found: dict[str, Any] = json.loads(self.err)["error"]
        return found


@pytest.fixture
def headgate() -> Callable[..., Ran]:
    """``headgate("status", uri)`` in this process; ``stdin`` is what it reads there."""

    def run(*arguments: object, env: dict[str, str] | None = None, stdin: bytes | str | None = None) -> Ran:
        result = CliRunner().invoke(app, [str(a) for a in arguments], env=env, input=stdin, catch_exceptions=False)
        return Ran(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture
def process() -> Callable[..., subprocess.Popen[str]]:
    """``process("tail", uri)`` as a process of its own."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: object, **options: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "headgate.cli", *(str(a) for a in arguments)]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        one = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **options)
        started.append(one)
        return one

    yield start
    for one in started:
        one.kill()
        one.communicate()


@pytest.fixture
def schema_file(tmp_path: Path) -> Path:
    path = tmp_path / "schema.json"
    path.write_text('{"fields": [{"name": "id", "type": "int64", "nullable": false}, {"name": "note", "type": "string"}]}')
    return path


@pytest.fixture
def table(tmp_path: Path) -> hg.Table:
    """Two shards; the first has entries at 0 to 2 of epoch 1, a seal at 3 and an entry at 4 of epoch 2."""
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("note", pa.string())])
    made = hg.create_table(tmp_path / "table", schema, key="id", sharding=hg.bucket("id", 2))
    shard = made.shard("0000")
    with shard.writer(WAL_ONLY) as writer:
        writer.put([{"id": 1, "note": "one"}]).wait()
        writer.put([{"id": 2, "note": "two"}, {"id": 3, "note": "three"}], producer="p", sequence=0).wait()
        writer.delete([{"id": 1}]).wait()
    with shard.writer(WAL_ONLY) as writer:
        writer.put([{"id": 4, "note": None}]).wait()
    return made
