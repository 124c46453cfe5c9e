"""Snapshots: parts that together are the table, in any process, as it was."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

import headgate as hg
from headgate.snapshot import Snapshot

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string()), pa.field("v", pa.float64())])


def rows(first: int, last: int, v: float = 0.0) -> pa.Table:
    ids = list(range(first, last))
    return pa.table({"id": ids, "name": [f"n{i}" for i in ids], "v": [v] * len(ids)}, schema=SCHEMA)


def filled(place: Path, key: str | None = "id", shards: int = 2) -> hg.Table:
    """Two runs, a log that is in none, and deletes."""
    table = hg.create_table(place / "t", SCHEMA, key=key, sharding=hg.bucket("id", shards))
    with table.writer(hg.ShardWriterConfig(fsync=False)) as writer:
        writer.put(rows(0, 4_000)).wait()
        writer.flush()
        writer.put(rows(3_000, 5_000, 1.0)).wait()
        writer.flush()
        writer.put(rows(4_500, 5_500, 2.0)).wait()
        if key:
            writer.delete(pa.table({"id": [1, 2, 3_500, 5_499]})).wait()
        writer.abort()
    return hg.open_table(place / "t")


def all_rows(snapshot: Snapshot, part_rows: int, columns: list[str] | None = None, filter: str | None = None) -> pa.Table:
    there = pickle.loads(pickle.dumps(snapshot))
    parts = snapshot.parts(columns, part_rows=part_rows)
    batches = [batch for part in parts for batch in there.read(pickle.loads(pickle.dumps(part)), columns, filter)]
    names = columns or SCHEMA.names
    return pa.Table.from_batches(batches, schema=pa.schema([SCHEMA.field(name) for name in names]))


def by_id(table: pa.Table) -> pa.Table:
    return table.sort_by([("id", "ascending"), ("v", "ascending")]).combine_chunks()


@pytest.mark.parametrize("key", ["id", None])
@pytest.mark.parametrize("part_rows", [100, 1_700, 10**6])
@pytest.mark.parametrize("ttl", [None, 60.0])
def test_the_parts_of_a_snapshot_are_the_table(tmp_path: Path, key: str | None, part_rows: int, ttl: float | None) -> None:
    table = filled(tmp_path, key)
    snapshot = table.snapshot(ttl=ttl)
    assert by_id(all_rows(snapshot, part_rows)).equals(by_id(table.scan().to_arrow()))
    some = all_rows(snapshot, part_rows, ["v", "id"], "v > 0 and id < 4800")
    assert by_id(some.select(["id", "v"])).equals(by_id(table.scan(["id", "v"], filter="v > 0 and id < 4800").to_arrow()))


def test_a_part_has_about_as_many_rows_as_asked_for_and_is_small_when_it_travels(tmp_path: Path) -> None:
    snapshot = filled(tmp_path).snapshot()
    parts = snapshot.parts(part_rows=500)
    assert 12 <= len(parts) <= 18
    assert max(len(pickle.dumps(part)) for part in parts) < 1_000
    assert len(snapshot.parts()) == 2, "a shard that is small is not cut"
    assert len(snapshot.parts(parts_min=8)) >= 8


@pytest.mark.parametrize("ttl", [None, 60.0])
def test_a_snapshot_shows_nothing_that_came_later(tmp_path: Path, ttl: float | None) -> None:
    table = filled(tmp_path)
    before = by_id(table.scan().to_arrow())
    snapshot = table.snapshot(ttl=ttl)
    with table.writer(hg.ShardWriterConfig(fsync=False)) as writer:
        writer.put(rows(0, 6_000, 9.0)).wait()
    table.compact(full=True)
    table.add_columns(pa.schema([("more", pa.int64())]))
    assert by_id(all_rows(snapshot, 1_000)).equals(before)


def test_only_what_a_lease_holds_outlives_collection(tmp_path: Path) -> None:
    table = filled(tmp_path)
    before = by_id(table.scan().to_arrow())
    held, loose = table.snapshot(ttl=60.0), table.snapshot()
    with table.writer(hg.ShardWriterConfig(fsync=False)) as writer:
        writer.put(rows(0, 6_000, 9.0)).wait()
    table.compact(full=True)
    for _ in range(3):
        table.gc(dry_run=False, min_age=0)
    assert by_id(all_rows(held, 1_000)).equals(before)
    table.drop_checkpoint(held.checkpoint or "")
    with table.writer(hg.ShardWriterConfig(fsync=False)) as writer:
        writer.put(rows(0, 10, 9.0)).wait()
    table.gc(dry_run=False, min_age=0)
    for snapshot in (held, loose):
        with pytest.raises(hg.SnapshotExpiredError):
            all_rows(snapshot, 1_000)


def test_a_lease_that_is_over_ends_reads_though_nothing_was_collected_yet(tmp_path: Path) -> None:
    table = filled(tmp_path)
    snapshot = table.snapshot(ttl=1e-6)
    with pytest.raises(hg.SnapshotExpiredError, match="lease"):
        snapshot.parts()
    table.refresh_checkpoint(snapshot.checkpoint or "", ttl=60.0)
    assert all_rows(snapshot, 1_000).num_rows == table.scan().count()


def test_a_snapshot_of_a_checkpoint_writes_nothing(tmp_path: Path) -> None:
    table = filled(tmp_path)
    made = table.checkpoint(name="then")
    before = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    for at in (made, made.id, "then"):
        assert all_rows(table.snapshot(at=at), 10**6).num_rows == table.scan().count()
    assert all_rows(table.snapshot(), 10**6).num_rows == table.scan().count()
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == before
    with pytest.raises(hg.NotFoundError):
        table.snapshot(at="never")
    with pytest.raises(hg.InvalidInputError):
        table.snapshot(at="then", ttl=5)


def test_an_empty_table_has_no_parts(tmp_path: Path) -> None:
    table = hg.create_table(tmp_path / "t", SCHEMA, key=["name", "id"], sharding=hg.identity("name"))
    assert table.snapshot(ttl=60.0).parts() == []


@pytest.mark.parametrize("ttl", [None, 60.0])
def test_a_later_snapshot_opens_only_the_runs_that_are_new(tmp_path: Path, ttl: float | None) -> None:
    table = filled(tmp_path, shards=1)
    first = table.snapshot(ttl=ttl)
    (before,) = first.views()
    with table.writer(hg.ShardWriterConfig(fsync=False)) as writer:
        writer.put(rows(0, 100, 7.0)).wait()
        writer.flush()
    second = replace(table.snapshot(ttl=ttl), shards=first.shards)
    (after,) = second.views()
    there = {run.record.id: run for run in before.runs}
    assert [there.get(run.record.id) is run for run in after.runs] == [True, True, *[False] * (len(after.runs) - 2)]
    assert len(after.runs) > 2
    assert first.views()[0].runs == before.runs, "and the first is what it was"
