"""Places of loads around seals, compactions and flushes: one order, whatever has been merged meanwhile."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

import headgate as hg
from headgate.manifest.model import ChainPoint

SCHEMA = pa.schema([pa.field("id", pa.int64(), False), pa.field("v", pa.string())])


def rows(*ids: int, v: str) -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.int64()), "v": [v] * len(ids)}, schema=SCHEMA)


def test_a_flush_after_seals_and_loads_that_were_merged_comes_after_them(tmp_path: Path) -> None:
    # The writer replays nothing, its first entry comes two seals later, and a load at the tip has been merged with what is older.
    table = hg.create_table(str(tmp_path / "t"), SCHEMA, key="id")
    shard = table.shard("0000")
    first = shard.writer()
    first.put(rows(1, 2, v="first")).wait()
    first.abort()
    shard.writer().abort()
    with shard.writer(hg.ShardWriterConfig(max_memtable_age=1e6)) as writer:
        writer.flush()
        table.load(rows(2, 3, v="load"))
        table.compact(full=True)
        writer.put(rows(3, 4, v="last")).wait()
        writer.flush()
        found = {row["id"]: row["v"] for row in table.scan().to_arrow().to_pylist()}
    assert found == {1: "first", 2: "load", 3: "last", 4: "last"}
    runs = shard.log.manifests.load().runs
    assert [(run.first, run.end) for run in runs] == sorted((run.first, run.end) for run in runs)
    assert table.verify(deep=True).ok


def test_a_change_that_would_make_a_manifest_contradict_itself_is_not_made(tmp_path: Path) -> None:
    table = hg.create_table(str(tmp_path / "t"), SCHEMA, key="id")
    manifests = table.shard("0000").log.manifests
    before = manifests.load().version
    with pytest.raises(hg.DataLossError, match="contradict itself"):
        manifests.commit(lambda manifest: manifest.but(cursor=ChainPoint(9, 9)))
    assert manifests.load().version == before
