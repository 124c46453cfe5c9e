"""Loads and those who are late: views, committers and attempts that stall while everybody else goes on."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

import headgate as hg
from headgate.failpoint import hooked

SCHEMA = pa.schema([pa.field("id", pa.int64(), False), pa.field("v", pa.string())])


def rows(*ids: int, v: str = "a") -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.int64()), "v": [v] * len(ids)}, schema=SCHEMA)


@pytest.mark.parametrize("key", [None, "id"])
def test_c10_a_view_of_a_memtable_that_grew_was_cut_at_a_load_and_flushed_in_part_shows_no_row_twice(
    tmp_path: Path, key: str | None
) -> None:
    # t0 a view takes entry 0 · t1 entry 1, a load, entry 2 · t2 the MemTable is cut, its older part flushed · t3 it reads the manifest
    table = hg.create_table(tmp_path / "t", SCHEMA, key=key)
    writer = table.shard("0000").writer(hg.ShardWriterConfig(max_memtable_age=1e6))
    writer.put(rows(0, v="old")).wait()
    stalled = iter([True])

    def hook(name: str) -> None:
        if name == "view.memory" and next(stalled, False):
            writer.put(rows(1, v="old")).wait()
            table.load(rows(0, v="load"))
            writer.put(rows(2, v="old")).wait()
            writer.view()  # cuts, and the older part is flushed
            generations = writer._generations
            assert generations is not None
            with generations.lock:
                while len(generations._tables) > 1:
                    generations._flushed.wait(10)

    with hooked(hook):
        found = writer.scan().to_arrow().to_pylist()
    writer.abort()
    shown = sorted((row["id"], row["v"]) for row in found)
    assert shown == ([(0, "load"), (1, "old")] if key else [(0, "load"), (0, "old"), (1, "old")])
