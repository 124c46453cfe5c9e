"""Columns that come, go and change while rows are written and read."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate.clock import SYSTEM_CLOCK
from headgate.life.alter import with_columns
from headgate.manifest import ManifestChain, TableManifest
from headgate.run import DELETED
from headgate.schema import FIELD_ID, RowRules, as_now, ids_in
from headgate.store.faulty import FaultyStore
from headgate.store.memory import MemoryStore
from headgate.watch import SchemaWatch

SCHEMA = pa.schema([pa.field("id", pa.int32(), nullable=False), pa.field("name", pa.string()), pa.field("size", pa.int8())])
WAL_ONLY = hg.ShardWriterConfig(enable_memtable=False)
_numbers = itertools.count()


def new_uri() -> str:
    return f"memory://schema-{SYSTEM_CLOCK.token()}"


@pytest.fixture
def table() -> hg.Table:
    return hg.create_table(new_uri(), SCHEMA, key="id")


def write(table: hg.Table, *ops: Any, flush: bool = False) -> None:
    """Rows (dicts) are put, numbers are keys to delete. With ``flush`` they end up in a run."""
    key = table.key[0]
    with table.shard("0000").writer(hg.ShardWriterConfig() if flush else WAL_ONLY) as writer:
        for op in ops:
            if isinstance(op, dict):
                writer.put([op]).wait()
            else:
                writer.delete([{key: op}]).wait()


def read(table: hg.Table) -> list[dict[str, Any]]:
    """The newest row of each key, by the plainest way there is."""
    newest: dict[Any, dict[str, Any] | None] = {}
    names = table.schema.names

    def take(rows: pa.RecordBatch, deleted: list[bool]) -> None:
        for row, gone in zip(rows.to_pylist(), deleted, strict=True):
            newest[tuple(row[name] for name in table.key)] = None if gone else row

    for shard in table.shards:
        view = shard.reader.view()
        for run in view.runs:
            for part in run.slices:
                for rows in part.scan(part.schema.names):
                    marks = rows.column(DELETED).to_pylist() if DELETED in rows.schema.names else [False] * rows.num_rows
                    take(as_now(rows, run.names, view.rules, names), marks)
        for put in [put for fresh in view.fresh for put in fresh.puts]:
            take(as_now(put.rows, ids_in(put.rows.schema), view.rules, names), [put.op == "delete"] * put.rows.num_rows)
    return sorted((row for row in newest.values() if row is not None), key=lambda row: row[table.key[0]])


def contents(table: hg.Table) -> dict[str, bytes]:
    store = MemoryStore(table.uri.removeprefix("memory://"))
    return {info.key: bytes(store.get(info.key)) for info in store.list("")}


def elsewhere(table: hg.Table) -> SchemaWatch:
    """The watch of another process: nobody tells it anything."""
    return SchemaWatch(table._places.table_manifests(), f"another process {next(_numbers)}", SYSTEM_CLOCK, table._manifest)


# -- what each change does to the rows that are there, in the log and in runs

in_log_and_run = pytest.mark.parametrize("flush", [False, True], ids=["in the log", "in a run"])


@in_log_and_run
def test_an_added_column_is_null_in_the_rows_that_are_there(table: hg.Table, flush: bool) -> None:
    write(table, {"id": 1, "name": "a", "size": 1}, flush=flush)
    table.add_columns(pa.schema([("tags", pa.list_(pa.string())), ("at", pa.struct([("x", pa.int8()), ("y", pa.int8())]))]))
    write(table, {"id": 2, "name": "b", "tags": ["t"], "at": {"x": 1, "y": 2}})
    assert table.schema.names == ["id", "name", "size", "tags", "at"]
    assert read(table) == [
        {"id": 1, "name": "a", "size": 1, "tags": None, "at": None},
        {"id": 2, "name": "b", "size": None, "tags": ["t"], "at": {"x": 1, "y": 2}},
    ]


@in_log_and_run
def test_a_dropped_column_is_gone(table: hg.Table, flush: bool) -> None:
    write(table, {"id": 1, "name": "a", "size": 1}, flush=flush)
    table.drop_columns(["size"])
    write(table, {"id": 2, "name": "b"})
    assert read(table) == [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}]


@in_log_and_run
@pytest.mark.parametrize("kind", [pa.int8(), pa.string()], ids=str)
def test_a_column_dropped_and_added_again_does_not_show_old_values(table: hg.Table, flush: bool, kind: pa.DataType) -> None:
    write(table, {"id": 1, "name": "a", "size": 1}, flush=flush)
    table.drop_columns(["size"])
    table.add_columns(pa.schema([("size", kind)]))
    value = pa.scalar(7).cast(kind).as_py()
    write(table, {"id": 2, "name": "b", "size": value})
    assert read(table) == [{"id": 1, "name": "a", "size": None}, {"id": 2, "name": "b", "size": value}]


@in_log_and_run
def test_a_renamed_column_keeps_its_values_and_its_old_name_starts_anew(table: hg.Table, flush: bool) -> None:
    write(table, {"id": 1, "name": "a", "size": 1}, flush=flush)
    table.rename_column("name", "title")
    table.add_columns(pa.schema([("name", pa.string())]))
    write(table, {"id": 2, "title": "b", "size": 2, "name": "new"})
    assert read(table) == [
        {"id": 1, "title": "a", "size": 1, "name": None},
        {"id": 2, "title": "b", "size": 2, "name": "new"},
    ]


def test_two_columns_swap_their_names(table: hg.Table) -> None:
    table.widen_column("size", pa.int64())
    write(table, {"id": 1, "name": "a", "size": 1})
    table.rename_column("name", "other")
    table.rename_column("size", "name")
    table.rename_column("other", "size")
    assert read(table) == [{"id": 1, "size": "a", "name": 1}]


@in_log_and_run
def test_deletes_find_their_rows_after_the_key_was_renamed_and_widened(table: hg.Table, flush: bool) -> None:
    write(table, {"id": 1, "name": "a"}, {"id": 2, "name": "b"}, {"id": 3, "name": "c"}, 1, flush=flush)
    table.rename_column("id", "number")
    table.widen_column("number", pa.int64())
    write(table, 2, {"number": 2**40, "name": "d"})
    assert table.key == ("number",)
    assert [row["number"] for row in read(table)] == [3, 2**40]


@in_log_and_run
def test_a_widened_column_keeps_old_values_and_takes_larger_ones(table: hg.Table, flush: bool) -> None:
    write(table, {"id": 1, "size": 127}, flush=flush)
    with pytest.raises(hg.SchemaMismatchError):
        write(table, {"id": 2, "size": 128})
    table.widen_column("size", pa.int16())
    write(table, {"id": 2, "size": 128})
    assert [row["size"] for row in read(table)] == [127, 128]
    assert table.schema.field("size").type == pa.int16()


def test_runs_of_every_age_are_read_as_the_table_of_now(table: hg.Table) -> None:
    write(table, {"id": 1, "name": "a", "size": 1}, {"id": 9, "name": "gone"}, flush=True)
    table.add_columns(pa.schema([("note", pa.string())]))
    write(table, {"id": 2, "name": "b", "size": 2, "note": "n"}, 9, flush=True)
    table.drop_columns(["name"])
    table.rename_column("note", "name")
    write(table, {"id": 3, "size": 3, "name": "m"}, flush=True)
    assert read(table) == [{"id": 1, "size": 1, "name": None}, {"id": 2, "size": 2, "name": "n"}, {"id": 3, "size": 3, "name": "m"}]
    assert [sorted(run.columns) for run in table.runs()] == [["id", "name", "size"], ["id", "name", "note", "size"], ["id", "name", "size"]]
    assert [run.tombstones for run in table.runs()] == [0, 1, 0]


def test_a_required_column_may_be_dropped(table: hg.Table) -> None:
    schema = pa.schema([("id", pa.int8()), pa.field("must", pa.string(), False)])
    table = hg.create_table(new_uri(), schema, key="id")
    write(table, {"id": 1, "must": "a"})
    table.drop_columns(["must"])
    write(table, {"id": 2})
    assert read(table) == [{"id": 1}, {"id": 2}]


def test_a_writer_that_knows_nothing_of_a_change_writes_rows_that_are_read_right(table: hg.Table) -> None:
    rules = table.shard("0000").rules
    writer = hg.ShardWriter(table.shard("0000").log, rules, WAL_ONLY)
    table.rename_column("name", "title")
    table.rename_column("id", "number")
    table.drop_columns(["size"])
    table.add_columns(pa.schema([("size", pa.int8())]))
    writer.put([{"id": 1, "name": "a", "size": 1}, {"id": 2, "name": "b", "size": 2}]).wait()
    writer.delete([{"id": 2}]).wait()
    writer.close()
    assert read(table) == [{"number": 1, "title": "a", "size": None}]


def test_key_sharding_and_indexes_follow_a_renamed_column() -> None:
    table = hg.create_table(
        new_uri(),
        pa.schema([("tenant", pa.string()), ("id", pa.int64()), ("body", pa.string())]),
        key=["tenant", "id"],
        sharding=hg.bucket("tenant", 3),
        indexes=[hg.text_index("body"), hg.scalar_index("id")],
    )
    for old, new in (("tenant", "who"), ("id", "number"), ("body", "text")):
        table.rename_column(old, new)
    for handle in (table, hg.open_table(table.uri)):
        assert handle.key == ("who", "number")
        assert handle.sharding == hg.bucket("who", 3)
        assert handle.indexes == (hg.text_index("text"), hg.scalar_index("number"))
        assert handle.shard("0001").key == ("who", "number")
    for name in ("who", "number", "text"):
        with pytest.raises(hg.InvalidInputError, match=name):
            table.drop_columns([name])


# -- what is refused, and leaves nothing behind

Change = Callable[[hg.Table], None]
REFUSED: dict[str, tuple[Change, str]] = {
    "add: a name that is there": (lambda t: t.add_columns(pa.schema([("name", pa.int8())])), "name"),
    "add: but for case": (lambda t: t.add_columns(pa.schema([("NAME", pa.int8())])), "case"),
    "add: two of one name": (lambda t: t.add_columns(pa.schema([("x", pa.int8()), ("x", pa.int8())])), "two columns"),
    "add: two but for case": (lambda t: t.add_columns(pa.schema([("x", pa.int8()), ("X", pa.int8())])), "case"),
    "add: required": (lambda t: t.add_columns(pa.schema([pa.field("x", pa.int8(), False)])), "nullable"),
    "add: reserved": (lambda t: t.add_columns(pa.schema([("_op", pa.int8())])), "reserved"),
    "add: reserved by prefix": (lambda t: t.add_columns(pa.schema([("__headgate_x", pa.int8())])), "reserved"),
    "add: a dot": (lambda t: t.add_columns(pa.schema([("a.b", pa.int8())])), "dots"),
    "add: no name": (lambda t: t.add_columns(pa.schema([("", pa.int8())])), "empty"),
    "add: a type that cannot be stored": (lambda t: t.add_columns(pa.schema([("x", pa.dictionary(pa.int8(), pa.string()))])), "stored"),
    "add: nothing": (lambda t: t.add_columns(pa.schema([])), "schema"),
    "add: no schema": (lambda t: t.add_columns({"x": pa.int8()}), "schema"),
    "drop: the key": (lambda t: t.drop_columns(["id"]), "key"),
    "drop: the key among others": (lambda t: t.drop_columns(["name", "id"]), "key"),
    "drop: unknown": (lambda t: t.drop_columns(["nope"]), "nope"),
    "drop: unknown by case": (lambda t: t.drop_columns(["Name"]), "Name"),
    "drop: nothing": (lambda t: t.drop_columns([]), "list"),
    "drop: a string": (lambda t: t.drop_columns("name"), "list"),
    "rename: unknown": (lambda t: t.rename_column("nope", "x"), "nope"),
    "rename: taken": (lambda t: t.rename_column("name", "size"), "size"),
    "rename: taken but for case": (lambda t: t.rename_column("name", "SIZE"), "size"),
    "rename: reserved": (lambda t: t.rename_column("name", "_rowid"), "reserved"),
    "rename: spaces": (lambda t: t.rename_column("name", " x"), "spaces"),
    "rename: no string": (lambda t: t.rename_column("name", 7), "string"),  # type: ignore[arg-type]
    "widen: unknown": (lambda t: t.widen_column("nope", pa.int64()), "nope"),
    "widen: narrower": (lambda t: t.widen_column("id", pa.int16()), "int16"),
    "widen: integer to float": (lambda t: t.widen_column("id", pa.float64()), "double"),
    "widen: signed to unsigned": (lambda t: t.widen_column("id", pa.uint64()), "uint64"),
    "widen: text to bytes": (lambda t: t.widen_column("name", pa.binary()), "binary"),
    "widen: no type": (lambda t: t.widen_column("name", "large_string"), "type"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_change_that_cannot_be_is_refused_with_the_reason_and_writes_nothing(table: hg.Table, case: str) -> None:
    change, word = REFUSED[case]
    before, schema = contents(table), table.schema
    with pytest.raises(hg.InvalidInputError, match=word) as caught:
        change(table)
    assert caught.value.hint
    assert contents(table) == before
    assert table.schema.equals(schema)


def test_the_last_column_stays() -> None:
    table = hg.create_table(new_uri(), pa.schema([("a", pa.int8()), ("b", pa.int8())]))
    table.drop_columns(["a"])
    with pytest.raises(hg.InvalidInputError, match="at least one"):
        table.drop_columns(["b"])


def test_a_sharding_column_outside_the_key_stays() -> None:
    table = hg.create_table(new_uri(), pa.schema([("a", pa.int8()), ("b", pa.int8())]), sharding=hg.bucket("a", 2))
    with pytest.raises(hg.InvalidInputError, match="shard"):
        table.drop_columns(["a"])


def test_a_change_that_is_there_already_writes_nothing(table: hg.Table) -> None:
    before = contents(table)
    table.rename_column("name", "name")
    table.widen_column("size", pa.int8())
    assert contents(table) == before


def test_a_change_whose_reply_is_lost_is_made_once(table: hg.Table) -> None:
    from headgate.store import RetryingStore, RetryPolicy
    from headgate.store.faulty import Fault

    store = FaultyStore(MemoryStore(table.uri.removeprefix("memory://")))
    quick = RetryPolicy(retries=3, base_delay=0.0001)
    chain = ManifestChain(RetryingStore(store, SYSTEM_CLOCK, quick), "table/", TableManifest, SYSTEM_CLOCK, quick)
    watch = SchemaWatch(chain, table.uri, SYSTEM_CLOCK, table._manifest)
    store.add(Fault("create", "apply-then-fail", key="table/", times=1))
    columns = pa.schema([("x", pa.int8())])
    watch.commit(lambda manifest: with_columns(manifest, columns))
    assert hg.open_table(table.uri).schema.names == ["id", "name", "size", "x"]
    assert hg.open_table(table.uri)._manifest.field_ids == (1, 2, 3, 4)


# -- handles


def test_a_handle_shows_its_own_change_at_once_and_others_after_refresh(table: hg.Table) -> None:
    other = pickle.loads(pickle.dumps(table))
    other.__dict__["_watch"] = elsewhere(table)
    table.add_columns(pa.schema([("x", pa.int8())]))
    assert "x" in table.schema.names
    assert "x" in table.shard("0000").schema.names
    assert "x" not in other.schema.names
    assert "x" in other.refresh().schema.names
    assert other.shard("0000").field_ids == (1, 2, 3, 4)


def test_two_handles_in_one_process_see_each_others_changes_at_once(table: hg.Table) -> None:
    other = hg.open_table(table.uri)
    assert "x" not in other.schema.names
    table.add_columns(pa.schema([("x", pa.int8())]))
    assert "x" in other.schema.names


def test_a_table_copied_to_another_place_is_another_table(table: hg.Table) -> None:
    copy = new_uri()
    store = MemoryStore(copy.removeprefix("memory://"))
    for key, body in contents(table).items():
        store.create(key, body)
    twin = hg.open_table(copy)
    table.add_columns(pa.schema([("x", pa.int8())]))
    assert "x" not in twin.schema.names
    assert "x" not in twin.refresh().schema.names


def test_shards_are_the_same_objects_until_rows_look_different(table: hg.Table) -> None:
    shard = table.shard("0000")
    assert table.shards[0] is shard
    table.refresh()
    assert table.shard("0000") is shard
    table.add_columns(pa.schema([("x", pa.int8())]))
    assert table.shard("0000") is not shard
    assert table.shards[0] is table.shard("0000")


def test_a_new_shard_leaves_the_others_as_they_are(table: hg.Table) -> None:
    shard = table.shard("0000")
    table._watch.commit(lambda manifest: manifest.but(shards=(*manifest.shards, "0001")))
    assert [found.id for found in table.shards] == ["0000", "0001"]
    assert table.shard("0000") is shard


def test_a_pickled_handle_knows_what_the_first_one_knew(table: hg.Table) -> None:
    table.add_columns(pa.schema([("x", pa.int8())]))
    again = pickle.loads(pickle.dumps(table))
    assert again == table
    assert hash(again) == hash(table)
    assert again.schema.equals(table.schema)
    shard = pickle.loads(pickle.dumps(table.shard("0000")))
    assert shard == table.shard("0000")
    assert shard.watch.rules.field_ids == (1, 2, 3, 4)


def test_an_old_handle_opens_and_reads_a_changed_table(table: hg.Table) -> None:
    write(table, {"id": 1, "name": "a", "size": 1})
    old = pickle.dumps(table)
    table.rename_column("name", "title")
    table.drop_columns(["size"])
    handle: hg.Table = pickle.loads(old)
    assert read(handle) == [{"id": 1, "name": "a", "size": 1}]  # as it was last seen
    assert read(handle.refresh()) == [{"id": 1, "title": "a"}]


def test_the_schema_that_users_see_carries_no_ids(table: hg.Table) -> None:
    entry_schema = table.shard("0000").rules.log_schema
    again = hg.create_table(new_uri(), entry_schema, key="id")
    table.add_columns(pa.schema([pa.field("x", pa.int8(), metadata={FIELD_ID: b"1", b"mine": b"kept"})]))
    for schema in (table.schema, again.schema):
        assert all(FIELD_ID not in (field.metadata or {}) for field in schema)
    assert table.schema.field("x").metadata == {b"mine": b"kept"}
    assert table.shard("0000").field_ids == (1, 2, 3, 4)


def test_a_dropped_table_is_not_refreshed_or_changed(table: hg.Table) -> None:
    table._watch.chain.commit(lambda manifest: manifest.but(state="dropped"))
    before = contents(table)
    with pytest.raises(hg.NotFoundError, match="dropped"):
        table.refresh()
    with pytest.raises(hg.NotFoundError, match="dropped"):
        table.add_columns(pa.schema([("x", pa.int8())]))
    shard = pickle.loads(pickle.dumps(table.shard("0000")))
    with pytest.raises(hg.NotFoundError, match="dropped"):
        _ = shard.watch
    assert contents(table) == before


# -- how a live writer learns of it


class Times:
    """A clock whose time stands still until it is moved."""

    def __init__(self) -> None:
        self.time = 100.0

    def __getattr__(self, name: str) -> Any:
        return getattr(SYSTEM_CLOCK, name)

    def monotonic(self) -> float:
        return self.time


def test_a_watch_looks_once_a_second_and_at_once_when_it_must(table: hg.Table) -> None:
    clock: Any = Times()
    store = FaultyStore(MemoryStore(table.uri.removeprefix("memory://")))
    watch = SchemaWatch(ManifestChain(store, "table/", TableManifest, clock), "elsewhere", clock, table._manifest)
    rules = watch.latest(force=True)
    store.requests.clear()
    for _ in range(100):
        assert watch.latest() is rules
    assert not store.requests
    clock.time += 1.0
    for _ in range(100):
        assert watch.latest() is rules
    assert store.requests == {"list": 1}
    table.add_columns(pa.schema([("x", pa.int8())]))
    assert watch.latest() is rules
    assert "x" in watch.latest(force=True).schema.names
    assert watch.latest(force=True) is watch.rules


def test_rules_stay_the_same_object_when_only_shards_change(table: hg.Table) -> None:
    watch = elsewhere(table)
    rules = watch.rules
    table._watch.commit(lambda manifest: manifest.but(shards=(*manifest.shards, "0001")))
    assert watch.latest(force=True) is rules
    assert watch.manifest.shards == ("0000", "0001")


def test_a_put_that_does_not_fit_is_tried_against_the_latest_table(table: hg.Table) -> None:
    watches = [elsewhere(table) for _ in range(4)]
    table.add_columns(pa.schema([("x", pa.int8())]))
    batch = pa.table({"id": pa.array([1], pa.int32()), "name": ["a"], "size": pa.array([1], pa.int8()), "x": pa.array([1], pa.int8())})
    stream = pa.RecordBatchReader.from_batches(batch.schema, batch.to_batches())
    for watch, data in zip(watches, (batch, batch.to_batches()[0], batch.to_pylist(), stream), strict=True):
        rules, rows = watch.upsert(data)
        assert rules is watch.rules
        assert rules.field_ids == (1, 2, 3, 4)
        assert rows.to_pylist() == batch.to_pylist()


def test_a_delete_by_a_key_that_was_renamed_is_tried_against_the_latest_table(table: hg.Table) -> None:
    watch = elsewhere(table)
    table.rename_column("id", "number")
    rules, rows = watch.delete(pa.table({"number": pa.array([1], pa.int32())}))
    assert rules.key == ("number",)
    assert rows.schema.names == ["number"]
    assert ids_in(rows.schema) == {1: "number"}


def test_a_put_that_fits_no_table_is_refused_after_one_look(table: hg.Table) -> None:
    store = FaultyStore(MemoryStore(table.uri.removeprefix("memory://")))
    watch = SchemaWatch(ManifestChain(store, "table/", TableManifest, SYSTEM_CLOCK), "elsewhere", SYSTEM_CLOCK, table._manifest)
    watch.latest(force=True)
    store.requests.clear()
    with pytest.raises(hg.SchemaMismatchError, match="nope"):
        watch.upsert([{"id": 1, "nope": 1}])
    assert store.requests == {"list": 1}


def test_rows_of_the_schema_before_an_addition_are_refused_and_the_hint_says_why(table: hg.Table) -> None:
    old = pa.table({"id": pa.array([1], pa.int32()), "name": ["a"], "size": pa.array([1], pa.int8())})
    table.add_columns(pa.schema([("x", pa.int8())]))
    with pytest.raises(hg.SchemaMismatchError, match="'x' is missing") as caught:
        table._watch.upsert(old)
    assert "added since" in caught.value.hint


# -- rows of any age


def test_rows_from_before_there_were_ids_are_known_by_the_names_of_then() -> None:
    """A table of an early version: no ids in its manifest, none in its entries."""
    uri = new_uri()
    table = hg.create_table(uri, SCHEMA, key="id")
    table._watch.chain.commit(lambda manifest: manifest.but(field_ids=(), next_field_id=0))
    table = hg.open_table(uri)
    assert table.shard("0000").rules.field_ids == (1, 2, 3)
    rules = RowRules(SCHEMA, ("id",))
    rules.log_schema = pa.schema([pa.field(f.name, f.type, f.nullable) for f in rules.log_schema])
    rules.key_schema = pa.schema([pa.field(f.name, f.type, f.nullable) for f in rules.key_schema])
    with hg.ShardWriter(table.shard("0000").log, rules, WAL_ONLY) as writer:
        writer.put([{"id": 1, "name": "a", "size": 1}, {"id": 2, "name": "b", "size": 2}]).wait()
        writer.delete([{"id": 2}]).wait()
    assert [ids_in(batch.schema) for entry in table.shard("0000").tail(0, follow=False) for batch in entry.batches] == [{}, {}]
    assert read(table) == [{"id": 1, "name": "a", "size": 1}]
    table.rename_column("id", "number")
    table.rename_column("name", "title")
    table.drop_columns(["size"])
    table.add_columns(pa.schema([("size", pa.int8()), ("name", pa.string())]))
    assert table._manifest.field_ids == (1, 2, 4, 5)
    write(table, {"number": 3, "title": "t", "size": 3, "name": "n"})
    assert read(table) == [
        {"number": 1, "title": "a", "size": None, "name": None},
        {"number": 3, "title": "t", "size": 3, "name": "n"},
    ]


NESTED = [
    pa.list_(pa.string()),
    pa.large_list(pa.field("x", pa.int8(), False)),
    pa.list_(pa.float32(), 2),
    pa.struct([pa.field("a", pa.int32(), False), pa.field("b", pa.list_(pa.field("element", pa.string(), False)))]),
]


@pytest.mark.parametrize("kind", NESTED, ids=str)
@in_log_and_run
def test_nested_columns_outlive_every_change(kind: pa.DataType, flush: bool) -> None:
    value = {"list": ["a", "b"], "large_list": [1, 2], "fixed_size_list": [1.5, 2.5], "struct": {"a": 1, "b": ["x"]}}[
        str(kind).split("<")[0]
    ]
    table = hg.create_table(new_uri(), pa.schema([("id", pa.int64()), ("v", kind)]), key="id")
    write(table, {"id": 1, "v": value}, {"id": 2, "v": None}, 2, flush=flush)
    table.rename_column("v", "w")
    table.add_columns(pa.schema([("v", kind)]))
    write(table, {"id": 3, "w": None, "v": value}, 2, flush=flush)
    assert read(table) == [{"id": 1, "w": value, "v": None}, {"id": 3, "w": None, "v": value}]


def test_vectors_whose_elements_may_not_be_null_can_be_null_and_deleted(tmp_path: Any) -> None:
    """Lance takes no null vector whose elements may not be null, and a tombstone has one."""
    kind = pa.list_(pa.field("item", pa.float32(), False), 2)
    table = hg.create_table(tmp_path / "t", pa.schema([("id", pa.int64()), ("v", kind)]), key="id")
    rows = pa.table({"id": [1, 2], "v": pa.array([[1, 2], None], kind)})
    with table.shard("0000").writer(hg.ShardWriterConfig(fsync=False)) as writer:
        writer.put(rows).wait()
        writer.delete([{"id": 3}]).wait()
    assert read(table) == [{"id": 1, "v": [1.0, 2.0]}, {"id": 2, "v": None}]
    assert hg.create_table(tmp_path / "t", pa.schema([("id", pa.int64()), ("v", kind)]), key="id", if_exists="open") == table
