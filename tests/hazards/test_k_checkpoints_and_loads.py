"""Checkpoints beside loads over several shards: a load is in all of a checkpoint's shards, or in none."""

from __future__ import annotations

import threading
from pathlib import Path

import pyarrow as pa
import pytest

import headgate as hg
from headgate.failpoint import hooked

SCHEMA = pa.schema([pa.field("id", pa.int64(), False)])
ROWS = 10


@pytest.mark.parametrize("taken_by", ["the table", "its writer"])
def test_a_checkpoint_between_two_shards_of_a_load_has_all_of_it(tmp_path: Path, taken_by: str) -> None:
    table = hg.create_table(str(tmp_path / "t"), SCHEMA, key="id", sharding=hg.bucket("id", 2))
    writer = table.writer()
    is_pinned, lock = threading.Event(), threading.Lock()
    tips: list[int] = []
    pinned: list[int] = []

    def hook(name: str) -> None:
        if name == "load.tip":
            with lock:
                tips.append(1)
                is_second = len(tips) == 2
            if is_second:
                is_pinned.wait(20)
        if name == "transaction.placed" and not pinned:
            pinned.append(1)
            table.checkpoint("between") if taken_by == "the table" else writer.checkpoint("between")
            is_pinned.set()

    with hooked(hook):
        table.load(pa.table({"id": list(range(ROWS))}, schema=SCHEMA), app="stream", version=7)
    assert table.scan(at="between").count() == ROWS
    twin = hg.clone(table.uri, str(tmp_path / "twin"), "between")
    assert not twin.load(pa.table({"id": list(range(ROWS))}, schema=SCHEMA), app="stream", version=7).committed
    assert twin.scan().count() == ROWS
    writer.close()
