"""Hazards of reads beside writers: one state, never an older one; and names that no read could tell apart."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

import pyarrow as pa
import pytest

import headgate as hg

SCHEMA = pa.schema([pa.field("id", pa.int64(), False), pa.field("version", pa.int64())])


def rows(ids: range, version: int) -> pa.RecordBatch:
    return pa.record_batch([pa.array(list(ids), pa.int64()), pa.array([version] * len(ids), pa.int64())], schema=SCHEMA)


# -- Q07


@pytest.mark.parametrize("place", ["disk", "memory"])
@pytest.mark.parametrize("handle", ["the writer's", "another one"])
def test_q07_a_read_in_several_parts_under_writes_sees_one_state(tmp_path: Path, place: str, handle: str) -> None:
    uri = str(tmp_path / "t") if place == "disk" else f"memory://q07-{tmp_path.name}-{handle[:3].strip()}"
    table = hg.create_table(uri, SCHEMA, key="id")
    with table.shard("0000").writer() as writer:
        writer.put(rows(range(300_000), 1)).wait()
        writer.flush()
        writer.put(rows(range(100, 200), 2)).wait()
        scan = writer.scan() if handle == "the writer's" else hg.open_table(uri).scan()
        parts = scan.to_batches()
        seen = [next(parts)]
        # All rows change under the read, by memory, a flush and a compaction.
        writer.put(rows(range(300_000), 3)).wait()
        seen.append(next(parts))
        writer.flush()
        table.compact(full=True)
        writer.delete(pa.table({"id": pa.array(range(250_000, 300_000))})).wait()
        seen += parts
    found = pa.Table.from_batches(seen)
    assert found.num_rows == 300_000
    versions = dict(zip(found["id"].to_pylist(), found["version"].to_pylist(), strict=True))
    assert len(versions) == 300_000
    assert {versions[i] for i in range(100, 200)} == {2}
    assert {versions[i] for i in (0, 99, 200, 299_999)} == {1}


def test_q07_a_sum_that_every_put_conserves_is_the_same_in_every_read(tmp_path: Path) -> None:
    table = hg.create_table(tmp_path / "t", SCHEMA, key="id")
    other = hg.open_table(tmp_path / "t")
    with table.shard("0000").writer(hg.ShardWriterConfig(max_memtable_rows=7)) as writer:
        writer.put([{"id": i, "version": 100} for i in range(10)]).wait()
        for step in range(40):
            # What one loses the other gains, in one put.
            a, b = step % 10, (step * 3 + 1) % 10
            if a == b:
                continue
            now = {row["id"]: row["version"] for row in table.lookup([a, b]).to_pylist()}
            writer.put([{"id": a, "version": now[a] - step}, {"id": b, "version": now[b] + step}])
            for reading in (writer.scan(), writer.scan(freshness="memory"), other.scan(), other.scan(filter="id >= 0")):
                assert sum(row["version"] for row in reading.to_arrow().to_pylist()) == 1000
            writer.flush() if step % 11 == 0 else None
            writer.put([{"id": a, "version": now[a] - step}]).wait()  # the same again: durable by now


# -- Q12


def _poll(uri: str, pipe: Connection) -> None:
    """Another process: what it sees of one key, whenever it is asked."""
    table = hg.open_table(uri)
    while pipe.recv():
        found = table.lookup([1]).to_pylist()
        whole = table.scan(filter="id = 1").to_arrow().to_pylist()
        pipe.send((found[0]["version"] if found else None, whole[0]["version"] if whole else None))


def test_q12_a_reader_in_another_process_never_goes_back_and_misses_nothing_acknowledged(tmp_path: Path) -> None:
    uri = str(tmp_path / "t")
    table = hg.create_table(uri, SCHEMA, key="id")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_poll, args=(uri, theirs), daemon=True)
    child.start()
    with table.shard("0000").writer(hg.ShardWriterConfig(max_memtable_rows=5)) as writer:
        for version in range(1, 60):
            writer.put(rows(range(3), version)).wait()
            if version % 9 == 0:
                writer.flush()
            if version % 20 == 0:
                table.compact(full=True)
                table.gc(dry_run=False, min_age=0)
            ours.send(True)
            assert ours.poll(60), "the reader died"
            # Nothing is written while it looks: it must see the newest, by every kind of read.
            assert ours.recv() == (version, version)
        writer.delete(pa.table({"id": [1]})).wait()
        ours.send(True)
        assert ours.recv() == (None, None)
    ours.send(False)
    child.join(30)


# -- Q13


@pytest.mark.parametrize(
    "names", [["_rowid"], ["_distance"], ["_op"], ["__headgate_deleted"], ["id", "ID"], ["straße", "STRASSE"], ["a.b"], [""], [" a"]]
)
def test_q13_names_that_a_read_could_not_tell_apart_are_refused_at_creation(tmp_path: Path, names: list[str]) -> None:
    with pytest.raises(hg.InvalidInputError):
        hg.create_table(tmp_path / "t", pa.schema([(name, pa.int64()) for name in names]))
    assert not (tmp_path / "t").exists()


def test_q13_a_column_of_such_a_name_cannot_be_added_or_made_by_renaming(tmp_path: Path) -> None:
    table = hg.create_table(tmp_path / "t", SCHEMA, key="id")
    for name in ("_score", "ID", "Version", "__headgate_x", "a.b"):
        with pytest.raises(hg.InvalidInputError):
            table.add_columns(pa.schema([(name, pa.int64())]))
        with pytest.raises(hg.InvalidInputError):
            table.rename_column("id", name) if name != "ID" else table.rename_column("version", name)
    assert table.refresh().schema.names == ["id", "version"]
