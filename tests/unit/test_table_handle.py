"""The table's handle: reading through it, what it sees of others, what it says of itself."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate.clock import SYSTEM_CLOCK
from headgate.manifest import ManifestChain, TableManifest
from headgate.shard import Places
from headgate.store import Location
from headgate.store.faulty import FaultyStore
from headgate.store.memory import MemoryStore
from headgate.watch import SchemaWatch

SCHEMA = pa.schema([("id", pa.int32()), ("name", pa.string()), ("size", pa.int8())])
WAL_ONLY = hg.ShardWriterConfig(enable_memtable=False)


def new_uri() -> str:
    return f"memory://handle-{SYSTEM_CLOCK.token()}"


@pytest.fixture
def table() -> hg.Table:
    return hg.create_table(new_uri(), SCHEMA, key="id", sharding=hg.bucket("id", 3))


def in_another_process(table: hg.Table) -> hg.Table:
    """A handle that nobody in this process tells anything."""
    other: hg.Table = pickle.loads(pickle.dumps(table))
    place = f"another process {SYSTEM_CLOCK.token()}"
    other.__dict__["_watch"] = SchemaWatch(table._places.table_manifests(), place, SYSTEM_CLOCK, table._manifest)
    return other


def put(table: hg.Table, *rows: dict[str, Any], config: hg.ShardWriterConfig | None = None) -> None:
    with table.writer(config) as writer:
        writer.put(list(rows)).wait()


def rows_of(scan: hg.Scan, by: str = "id") -> list[dict[str, Any]]:
    return sorted(scan.to_arrow().to_pylist(), key=lambda row: row[by])


# -- reading


def test_rows_go_in_by_one_handle_and_come_out_by_another(table: hg.Table) -> None:
    put(table, *({"id": number, "name": f"n{number}", "size": number} for number in range(20)))
    other = in_another_process(table)
    assert rows_of(other.scan(columns=["size", "id"], filter="size > 17")) == [{"size": 18, "id": 18}, {"size": 19, "id": 19}]
    assert other.scan().count() == 20
    assert other.scan(limit=3).to_arrow().num_rows == 3
    assert other.lookup([5, 99, 3, 5], columns=["name"]).to_pylist() == [{"name": "n5"}, {"name": "n3"}]


def test_a_read_sees_columns_that_another_process_changed(table: hg.Table) -> None:
    reader = in_another_process(table)
    put(table, {"id": 1, "name": "a", "size": 1}, config=WAL_ONLY)
    assert rows_of(reader.scan()) == [{"id": 1, "name": "a", "size": 1}]
    table.rename_column("id", "number")
    table.widen_column("number", pa.int64())
    table.drop_columns(["size"])
    table.add_columns(pa.schema([("size", pa.string())]))
    put(table, {"number": 2**40, "name": "b", "size": "large"})
    expected = [{"number": 1, "name": "a", "size": None}, {"number": 2**40, "name": "b", "size": "large"}]
    assert rows_of(reader.scan(), by="number") == expected
    assert reader.schema.equals(table.schema)
    assert reader.sql("select sum(number) as s, max(size) as z from t").to_pylist() == [{"s": 2**40 + 1, "z": "large"}]
    assert in_another_process(table).lookup([2**40, 1]).to_pylist() == expected[::-1]


def test_a_read_sees_shards_that_another_process_made() -> None:
    table = hg.create_table(new_uri(), pa.schema([("tenant", pa.string()), ("v", pa.int8())]), key="tenant", sharding=hg.identity("tenant"))
    reader = in_another_process(table)
    assert reader.shards == []
    assert reader.scan().count() == 0
    put(table, {"tenant": "a", "v": 1}, {"tenant": "b", "v": 2})
    assert reader.scan().count() == 2
    put(table, {"tenant": "c", "v": 3})
    assert reader.lookup(["c", "a", "nobody"]).to_pylist() == [{"tenant": "c", "v": 3}, {"tenant": "a", "v": 1}]
    assert len(reader.shards) == 3


def test_a_read_looks_at_the_table_once(table: hg.Table) -> None:
    put(table, {"id": 1})
    store = FaultyStore(MemoryStore(table.uri.removeprefix("memory://")))
    reader = in_another_process(table)
    chain = ManifestChain(store, "table/", TableManifest, SYSTEM_CLOCK)
    reader.__dict__["_watch"] = SchemaWatch(chain, "elsewhere", SYSTEM_CLOCK, table._manifest)
    reader.scan().count()
    store.requests.clear()
    reader.scan().to_arrow()
    reader.lookup([1])
    assert store.requests == {"list": 2}


def test_a_lookup_leaves_other_shards_alone(table: hg.Table) -> None:
    put(table, *({"id": number} for number in range(20)))
    reader = in_another_process(table)
    assert reader.lookup([7]).num_rows == 1
    assert sum("reader" in shard.__dict__ for shard in reader.shards) == 1


def test_what_a_shard_has_read_is_kept_for_the_next_read(table: hg.Table) -> None:
    put(table, *({"id": number} for number in range(20)), config=WAL_ONLY)
    reader = in_another_process(table)
    assert reader.scan().count() == 20
    first = [shard.reader.view().fresh[0].memtable for shard in reader.shards]
    assert reader.scan().count() == 20
    assert all(shard.reader.view().fresh[0].memtable is known for shard, known in zip(reader.shards, first, strict=True))


def test_a_scan_of_a_column_that_was_widened_since_says_read_again(table: hg.Table) -> None:
    scan = in_another_process(table).scan()
    table.widen_column("size", pa.int64())
    put(table, {"id": 1, "size": 2**40})
    with pytest.raises(hg.SnapshotExpiredError, match="size") as caught:
        scan.to_arrow()
    assert caught.value.retryable


@pytest.mark.parametrize(
    "options",
    [
        {"freshness": "stale"},
        {"at": 7},
        {"at": ""},
        {"at": "cp", "freshness": "memory"},
        {"columns": ["nope"]},
        {"columns": "id"},
        {"filter": "nope > 1"},
        {"filter": "id"},
        {"limit": -1},
    ],
    ids=str,
)
def test_q08_options_that_cannot_be_honoured_raise_before_anything_is_read(table: hg.Table, options: dict[str, Any]) -> None:
    with pytest.raises(hg.InvalidInputError) as caught:
        table.scan(**options)
    assert caught.value.hint
    assert not any("reader" in shard.__dict__ for shard in table.shards)


def test_an_unknown_checkpoint_is_not_found(table: hg.Table) -> None:
    with pytest.raises(hg.NotFoundError, match="nightly") as caught:
        table.scan(at="nightly").to_arrow()
    assert "checkpoints" in caught.value.hint


def test_searches_follow_their_index_and_its_column_whatever_it_is_called() -> None:
    schema = pa.schema([("id", pa.int64()), ("v", pa.list_(pa.float32(), 2)), ("body", pa.string()), ("plain", pa.string())])
    indexes = [hg.vector_index("v", metric="cosine"), hg.text_index("body", ascii_folding=True)]
    table = hg.create_table(new_uri(), schema, key="id", sharding=hg.bucket("id", 2), indexes=indexes)
    reader = in_another_process(table)
    put(
        table,
        {"id": 1, "v": [100.0, 0.0], "body": "café gate", "plain": "café"},
        {"id": 2, "v": [0.0, 1.0], "body": "gate", "plain": "tea"},
    )
    table.rename_column("v", "w")
    table.rename_column("body", "text")
    assert reader.search("w", [1.0, 0.0], k=1, columns=["id"]).to_pylist() == [{"id": 1, "_distance": 0.0}]
    assert reader.search("w", [1.0, 0.0], filter="id > 1").column("id").to_pylist() == [2]
    assert reader.search_text("text", "cafe", columns=["id"]).column("id").to_pylist() == [1]
    assert reader.search_text("plain", "cafe").num_rows == 0
    with pytest.raises(hg.InvalidInputError, match="body"):
        reader.search_text("body", "cafe")


# -- live writers learn of changes


@pytest.fixture(params=[True, False], ids=["with a MemTable", "WAL-only"])
def live(table: hg.Table, request: Any) -> Iterator[hg.TableWriter]:
    """A writer in another process, which has taken some rows."""
    writer = in_another_process(table).writer(hg.ShardWriterConfig(enable_memtable=request.param))
    writer.put([{"id": number, "name": f"n{number}", "size": number} for number in range(6)]).wait()
    yield writer
    writer.close()


def test_a_live_writer_takes_rows_with_a_column_that_was_just_added(table: hg.Table, live: hg.TableWriter) -> None:
    table.add_columns(pa.schema([("note", pa.string())]))
    live.put([{"id": 1, "name": "x", "size": 1, "note": "new"}]).wait()
    assert rows_of(table.scan(columns=["id", "note"]))[:2] == [{"id": 0, "note": None}, {"id": 1, "note": "new"}]


def test_a_live_writer_takes_rows_with_names_and_types_that_were_just_changed(table: hg.Table, live: hg.TableWriter) -> None:
    table.rename_column("id", "number")
    table.widen_column("number", pa.int64())
    table.rename_column("name", "title")
    rows = pa.table({"number": pa.array([2**40, 2], pa.int64()), "title": ["far", "two"], "size": pa.array([None, None], pa.int8())})
    live.put(rows).wait()
    live.delete(pa.table({"number": pa.array([3, 2**41], pa.int64())})).wait()
    found = {row["number"]: row["title"] for row in table.scan().to_arrow().to_pylist()}
    assert found == {0: "n0", 1: "n1", 2: "two", 4: "n4", 5: "n5", 2**40: "far"}


def test_a_live_writer_that_has_not_heard_of_a_rename_goes_on_and_its_rows_are_read_right(table: hg.Table, live: hg.TableWriter) -> None:
    table.rename_column("id", "number")
    table.rename_column("name", "title")
    live.put([{"id": 1, "name": "late", "size": 9}]).wait()
    live.delete([{"id": 2}]).wait()
    found = {row["number"]: row["title"] for row in table.scan().to_arrow().to_pylist()}
    assert found == {0: "n0", 1: "late", 3: "n3", 4: "n4", 5: "n5"}


def test_a_live_writer_learns_by_itself(table: hg.Table, live: hg.TableWriter) -> None:
    table.drop_columns(["size"])
    deadline = SYSTEM_CLOCK.monotonic() + 30
    while "size" in live._watch.rules.schema.names:
        assert SYSTEM_CLOCK.monotonic() < deadline
        SYSTEM_CLOCK.sleep(0.02)
    with pytest.raises(hg.SchemaMismatchError, match="size"):
        live.put([{"id": 1, "name": "x", "size": 1}])


def test_in_one_process_a_name_that_is_used_again_is_the_new_column_at_once(table: hg.Table) -> None:
    with table.writer() as writer:
        writer.put([{"id": 1, "name": "a", "size": 1}]).wait()
        other = hg.open_table(table.uri)
        other.drop_columns(["size"])
        other.add_columns(pa.schema([("size", pa.int8())]))
        writer.put([{"id": 2, "name": "b", "size": 2}]).wait()
        expected = [{"id": 1, "name": "a", "size": None}, {"id": 2, "name": "b", "size": 2}]
        assert rows_of(table.scan()) == expected  # from the MemTable
        writer.flush()
        assert rows_of(table.scan()) == expected  # from a run
    assert rows_of(hg.open_table(table.uri).scan()) == expected


def test_rows_in_a_memtable_outlive_every_change_and_the_flush_after_it(table: hg.Table) -> None:
    with table.writer() as writer:
        writer.put([{"id": number, "name": f"n{number}", "size": number} for number in range(6)]).wait()
        writer.delete([{"id": 5}]).wait()
        table.rename_column("name", "other")
        table.rename_column("size", "name")
        table.widen_column("name", pa.int32())
        table.add_columns(pa.schema([("size", pa.list_(pa.float32(), 2))]))
        table.rename_column("id", "key")
        writer.put([{"key": 1, "other": "x", "name": 1000, "size": [1.0, 2.0]}]).wait()
        expected = [
            {"key": number, "other": f"n{number}", "name": number, "size": None}
            if number != 1
            else {"key": 1, "other": "x", "name": 1000, "size": [1.0, 2.0]}
            for number in range(5)
        ]
        assert rows_of(table.scan(), by="key") == expected
        writer.flush()
        assert rows_of(table.scan(), by="key") == expected
    assert rows_of(hg.open_table(table.uri).scan(), by="key") == expected


def test_an_old_handle_opens_a_writer_that_knows_the_table_of_now(table: hg.Table) -> None:
    old = in_another_process(table)
    table.add_columns(pa.schema([("note", pa.string())]))
    put(table, {"id": 1, "name": "a", "note": "kept"}, config=WAL_ONLY)
    with old.writer() as writer:  # it replays and flushes rows with a column that its handle had not heard of
        writer.put([{"id": 2, "name": "b", "note": "also"}]).wait()
    assert [row["note"] for row in rows_of(table.scan())] == ["kept", "also"]


# -- what it says of itself


def test_the_status_counts_runs_and_what_is_in_none(table: hg.Table) -> None:
    table = hg.create_table(new_uri(), SCHEMA, key="id")
    shard = table.shard("0000")
    with shard.writer() as writer:
        writer.put([{"id": 1}, {"id": 2}]).wait()
        writer.flush()
        writer.delete([{"id": 1}]).wait()
        writer.flush()
        writer.put([{"id": 3}]).wait()
        (status,) = table.status().shards
        assert (status.runs, status.rows, status.tombstones, status.generations, status.next_generation) == (2, 3, 1, 2, 3)
        assert (status.cursor, status.tip, status.lag) == (2, 3, 1)
        assert status.bytes == sum(run.bytes for run in table.runs()) > 0
    (status,) = table.status().shards
    assert (status.runs, status.lag, status.clean) == (3, 0, True)


def test_runs_are_plain_lance_datasets(tmp_path: Any) -> None:
    import lance

    table = hg.create_table(tmp_path / "t", SCHEMA, key="id", sharding=hg.bucket("id", 2))
    put(table, *({"id": number, "name": f"n{number}"} for number in range(10)), config=hg.ShardWriterConfig(fsync=False))
    runs = table.runs()
    assert {run.shard for run in runs} == {"0000", "0001"}
    assert all(run.columns == {"id": 1, "name": 2, "size": 3} for run in runs)
    found = [row for run in runs for part in run.slices for row in lance.dataset(part.uri).to_table().to_pylist()]
    assert sorted(row["id"] for row in found) == list(range(10))
    assert [part.rows for run in runs for part in run.slices] == [run.rows for run in runs]


def test_a_used_handle_pickles_without_what_it_holds_open(table: hg.Table) -> None:
    put(table, {"id": 1})
    assert table.scan().count() == 1
    again = pickle.loads(pickle.dumps(table))
    assert "_watch" not in again.__dict__
    assert len(pickle.dumps(table)) < 4096
    assert again.scan().count() == 1


@pytest.mark.parametrize(
    ("table", "wal", "is_near"),
    [
        ("/data/t", None, True),
        ("memory://t", None, True),
        ("s3://b/t", None, False),
        ("/data/t", "s3://b/w", False),
        ("s3://b/t", "/w", False),
    ],
)
def test_many_shards_are_looked_at_at_once_where_every_answer_takes_a_while(table: str, wal: str | None, is_near: bool) -> None:
    places = Places(Location.parse(table), None if wal is None else Location.parse(wal))
    assert (places.at_once, places.patience is not None) == ((4, True) if is_near else (16, False))
