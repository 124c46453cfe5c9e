"""Quarantine: bad rows are kept with the reason before the good ones go on, and never twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tables import PATIENCE, MakeTables, Tables, make_tables

import headgate as hg
from headgate.clock import SYSTEM_CLOCK
from headgate.failpoint import hooked
from headgate.quarantine import Quarantine, split_bad
from headgate.schema import RowRules
from headgate.store.faulty import Fault, FaultyStore
from headgate.store.memory import Heap, MemoryStore

__all__ = ["make_tables"]
SCHEMA = pa.schema([pa.field("id", pa.int64()), pa.field("value", pa.string()), pa.field("amount", pa.float64(), nullable=False)])


def rules(schema: pa.Schema = SCHEMA, key: tuple[str, ...] = ("id",)) -> RowRules:
    return RowRules(schema, key)


def batch(*rows: tuple[Any, ...], schema: pa.Schema = SCHEMA) -> pa.RecordBatch:
    columns = [pa.array([row[i] for row in rows], field.type) for i, field in enumerate(schema)]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema([field.with_nullable(True) for field in schema]))


# -- telling them apart


def test_rows_without_fault_are_passed_as_ever() -> None:
    rows = batch((1, "a", 1.0), (2, None, 2.0))
    good, bad = split_bad(rules(), rows)
    assert bad is None
    assert good is not None
    assert good.equals(rules().upsert(rows))


def test_nulls_where_there_may_be_none_are_told_row_by_row() -> None:
    good, bad = split_bad(rules(), batch((1, "a", 1.0), (None, "b", 2.0), (3, "c", None), (None, None, None), (5, None, 5.0)))
    assert good is not None
    assert bad is not None
    assert good["id"].to_pylist() == [1, 5]
    assert good.schema.equals(rules().log_schema)
    assert bad.to_pylist() == [
        {"id": None, "value": "b", "amount": 2.0, "_reason": "the key column 'id' is null"},
        {"id": 3, "value": "c", "amount": None, "_reason": "the column 'amount' is null"},
        {"id": None, "value": None, "amount": None, "_reason": "the key column 'id' is null"},
    ]
    assert all(field.nullable and not field.metadata for field in bad.schema)


def test_nothing_good_and_nothing_bad_are_told() -> None:
    good, bad = split_bad(rules(), batch((None, "a", 1.0)))
    assert good is None
    assert bad is not None
    assert bad.num_rows == 1


def test_deletes_are_looked_at_by_their_keys_alone() -> None:
    schema = pa.schema([("a", pa.int64()), ("b", pa.string()), ("c", pa.int64())])
    data = pa.table({"c": [9, 9, 9], "b": ["x", None, "z"], "a": [1, 2, None]})
    good, bad = split_bad(rules(schema, ("a", "b")), data, "delete")
    assert good is not None
    assert bad is not None
    assert good.to_pylist() == [{"a": 1, "b": "x"}]
    assert [row["_reason"] for row in bad.to_pylist()] == ["the key column 'b' is null", "the key column 'a' is null"]


@pytest.mark.parametrize(
    "data",
    [
        pa.table({"id": [1]}),
        pa.table({"id": [1], "value": ["a"], "amount": [1.0], "more": [1]}),
        pa.table({"id": ["1"], "value": ["a"], "amount": [1.0]}),
        pa.table({"value": ["a"], "id": [None], "amount": [1.0]}),
        [{"id": 1, "other": 2}],
        [{"id": "x", "other": 2}],
        [1, 2],
        batch(),
        [],
        "rows",
    ],
)
def test_what_is_no_matter_of_single_rows_stays_an_error(data: Any) -> None:
    with pytest.raises(hg.InvalidInputError):
        split_bad(rules(), data)


def test_values_of_dicts_that_their_columns_cannot_hold_are_told_with_the_whole_row() -> None:
    rows = [
        {"id": 1, "value": "a", "amount": 1.0},
        {"id": "two", "value": "b", "amount": 2.0},
        {"id": 3, "value": 3, "amount": 3.0},
        {"id": 2**70, "value": "d", "amount": "four"},
        {"id": None, "value": "e", "amount": 5.0},
        {"id": 6, "value": "\ud800", "amount": 6.0},
    ]
    good, bad = split_bad(rules(), rows)
    assert good is not None
    assert bad is not None
    assert good["id"].to_pylist() == [1]
    told = bad.to_pylist()
    assert [(row["id"], row["value"], row["amount"]) for row in told] == [
        (None, "b", 2.0),
        (3, None, 3.0),
        (None, "d", None),
        (None, "e", 5.0),
        (6, None, 6.0),
    ]
    assert "'id' cannot be read as int64" in told[0]["_reason"]
    assert told[0]["_row"] == '{"id": "two", "value": "b", "amount": 2.0}'
    assert told[3]["_reason"] == "the key column 'id' is null"
    assert told[3]["_row"] is None
    assert "ud800" in told[4]["_row"]


def test_columns_of_ours_make_way_for_the_tables() -> None:
    schema = pa.schema([("id", pa.int64()), ("_reason", pa.string())])
    _, bad = split_bad(rules(schema), pa.table({"id": pa.array([None], pa.int64()), "_reason": ["mine"]}))
    assert bad is not None
    assert bad.to_pylist() == [{"id": None, "_reason": "mine", "__reason": "the key column 'id' is null"}]


def test_a_stream_is_read_once() -> None:
    reader = pa.RecordBatchReader.from_batches(batch().schema, [batch((1, "a", 1.0)), batch((None, "b", 2.0))])
    good, bad = split_bad(rules(), reader)
    assert (good and good.num_rows, bad and bad.num_rows) == (1, 1)


PART = pa.struct([pa.field("must", pa.int64(), nullable=False), pa.field("may", pa.int64())])
NESTED = pa.schema(
    [
        ("id", pa.int64()),
        pa.field("one", PART),
        pa.field("many", pa.list_(pa.field("item", PART, nullable=False))),
        pa.field("deep", pa.large_list(pa.struct([pa.field("inner", pa.list_(pa.field("item", pa.int64(), nullable=False)))]))),
    ]
)
parts = st.one_of(st.none(), st.fixed_dictionaries({"must": st.one_of(st.none(), st.just(1)), "may": st.none()}))
rows_nested = st.fixed_dictionaries(
    {
        "id": st.one_of(st.none(), st.just(1)),
        "one": parts,
        "many": st.one_of(st.none(), st.lists(parts, max_size=3)),
        "deep": st.one_of(
            st.none(),
            st.lists(
                st.one_of(
                    st.none(),
                    st.fixed_dictionaries({"inner": st.one_of(st.none(), st.lists(st.one_of(st.none(), st.just(1)), max_size=3))}),
                ),
                max_size=3,
            ),
        ),
    }
)


def is_bad(row: dict[str, Any]) -> bool:
    def part_is_bad(part: dict[str, Any] | None) -> bool:
        return part is not None and part["must"] is None

    return (
        row["id"] is None
        or part_is_bad(row["one"])
        or any(part is None or part_is_bad(part) for part in row["many"] or ())
        or any(None in (part["inner"] or ()) for part in row["deep"] or () if part is not None)
    )


@settings(max_examples=150, deadline=None)
@given(st.lists(rows_nested, min_size=1, max_size=8), st.integers(0, 3))
def test_nulls_at_any_depth_are_told_as_a_model_tells_them(data: list[dict[str, Any]], skipped: int) -> None:
    whole = pa.Table.from_pylist(data, schema=NESTED).to_batches()[0]
    rows = whole.slice(min(skipped, len(data) - 1))
    wanted = rows.to_pylist()
    good, bad = split_bad(rules(NESTED), rows)
    assert (good.to_pylist() if good else []) == [row for row in wanted if not is_bad(row)]
    kept = bad.to_pylist() if bad else []
    assert all(row.pop("_reason") for row in kept)
    assert kept == [row for row in wanted if is_bad(row)]


def test_fixed_size_lists_and_values_under_nulls_are_told_right() -> None:
    kind = pa.list_(pa.field("item", pa.int64(), nullable=False), 2)
    schema = pa.schema([("id", pa.int64()), pa.field("pair", kind)])
    inner = pa.array([1, 2, None, None, 5, None, 7, 8], pa.int64())
    pairs = pa.FixedSizeListArray.from_arrays(inner, type=kind, mask=pa.array([False, True, False, False]))
    rows = pa.RecordBatch.from_arrays([pa.array([1, 2, 3, 4]), pairs], schema=schema)
    for start, wanted in ((0, [3]), (1, [3]), (3, [])):
        _, bad = split_bad(rules(schema), rows.slice(start))
        assert (bad["id"].to_pylist() if bad else []) == wanted


def test_what_lies_under_a_null_struct_is_nobodys_fault() -> None:
    child = pa.field("must", pa.int64(), nullable=False)
    schema = pa.schema([("id", pa.int64()), pa.field("part", pa.struct([child]))])
    parts = pa.StructArray.from_arrays([pa.array([None, None, 3], pa.int64())], fields=[child], mask=pa.array([True, False, False]))
    rows = pa.RecordBatch.from_arrays([pa.array([1, 2, 3]), parts], schema=schema)
    good, bad = split_bad(rules(schema), rows)
    assert good is not None
    assert bad is not None
    assert (good["id"].to_pylist(), bad["id"].to_pylist()) == ([1, 3], [2])
    assert bad["_reason"].to_pylist() == ["the column 'part' has a null in 'must'"]


def test_a_million_rows_are_told_apart_without_a_loop() -> None:
    count = 1_000_000
    ids = pa.array(np.arange(count), mask=np.arange(count) % 1000 == 7)
    rows = pa.RecordBatch.from_arrays([ids, pa.nulls(count, pa.string()), pa.array(np.zeros(count))], schema=SCHEMA)
    good, bad = split_bad(rules(), rows)
    assert good is not None
    assert bad is not None
    assert (good.num_rows, bad.num_rows) == (999_000, 1_000)


# -- keeping them


def test_kept_rows_are_counted_and_named_after_their_producer_once() -> None:
    store = MemoryStore("q", heap=Heap())
    quarantine = Quarantine(store, SYSTEM_CLOCK)
    _, bad = split_bad(rules(), batch((None, "a", 1.0), (None, "b", 1.0)))
    _, other = split_bad(rules(), batch((None, "c", 1.0)))
    assert bad is not None
    assert other is not None
    first = quarantine.keep(bad, "p", 7)
    assert quarantine.keep(bad, "p", 7) == first
    assert Quarantine(store, SYSTEM_CLOCK).keep(bad, "p", 7) == first, "by another process too"
    assert quarantine.rows == 2
    names = {quarantine.keep(other, "p", 7), quarantine.keep(bad, "p", 8), quarantine.keep(bad, "q", 7), quarantine.keep(bad)}
    names |= {quarantine.keep(bad), Quarantine(store, SYSTEM_CLOCK, "0000").keep(bad, "p", 7)}
    assert len({first, *names}) == 7
    assert quarantine.rows == 2 + 1 + 2 + 2 + 2 + 2
    assert len(list(store.list("quarantine/"))) == 7


@pytest.mark.parametrize("kind", ["apply-then-fail", "fail", "conflict"])
def test_a_lost_request_or_reply_keeps_them_once(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.clock.SystemClock.sleep", lambda clock, seconds: None)
    store = FaultyStore(MemoryStore("q", heap=Heap()))
    store.add(Fault("create", kind, times=2))
    _, bad = split_bad(rules(), batch((None, "a", 1.0)))
    assert bad is not None
    Quarantine(store, SYSTEM_CLOCK).keep(bad)
    assert len(list(store.list("quarantine/"))) == 1


# -- in a TableWriter


@pytest.fixture
def tables(make_tables: MakeTables) -> Tables:
    return make_tables(schema=SCHEMA)


MIXED = batch(*((i, "good", 1.0) for i in range(20)), (None, "no key", 1.0), (21, "no amount", None))


def test_good_rows_go_on_and_bad_ones_are_kept_first(tables: Tables) -> None:
    writer = tables.writer(on_bad_rows="quarantine")
    seen: list[tuple[int, list[int]]] = []

    def look(name: str) -> None:
        if name == "quarantine.kept":
            seen.append((len(tables.quarantined()), tables.ids()))

    with hooked(look):
        ack = writer.put(MIXED)
    assert set(ack.wait(PATIENCE)) == {"0000", "0001", "0002", "0003"}
    assert seen == [(1, [])]
    assert writer.quarantined_rows == 2
    (kept,) = tables.quarantined().values()
    assert kept["value"].to_pylist() == ["no key", "no amount"]
    assert tables.ids() == list(range(20))


def test_a_put_with_no_good_row_is_done_at_once_and_goes_nowhere(tables: Tables) -> None:
    writer = tables.writer(on_bad_rows="quarantine")
    for sequence in (0, 1):
        ack = writer.put(batch((None, "bad", 1.0)), producer="p", sequence=sequence)
        assert ack.done()
        receipt = ack.wait()
        assert (dict(receipt), receipt.duplicate) == ({}, False)
    assert not writer.put(batch((1, "good", 1.0)), producer="p", sequence=2).wait(PATIENCE).duplicate
    assert (writer.quarantined_rows, len(tables.quarantined()), tables.ids()) == (2, 2, [1])


def test_without_quarantine_one_bad_row_refuses_the_put(tables: Tables) -> None:
    writer = tables.writer()
    with pytest.raises(hg.InvalidInputError, match="nulls"):
        writer.put(MIXED)
    assert writer.quarantined_rows == 0
    assert (tables.ids(), tables.quarantined()) == ([], {})


def test_deletes_with_bad_keys_are_kept_too(tables: Tables) -> None:
    writer = tables.writer(on_bad_rows="quarantine")
    writer.delete(pa.table({"id": [1, None, 3]})).wait(PATIENCE)
    (kept,) = tables.quarantined().values()
    assert kept.to_pylist() == [{"id": None, "_reason": "the key column 'id' is null"}]
    assert tables.ids() == [1, 3]


def test_a_put_that_finds_no_room_keeps_no_bad_rows(tables: Tables) -> None:
    writer = tables.writer(on_bad_rows="quarantine", max_unflushed_memtable_bytes=1000, put_timeout=0.02)
    tables.store.add(Fault("create", "hang", key="/0003/"))
    crowd = writer.put(batch((tables.id_in("0003"), "x" * 2000, 1.0)))
    with pytest.raises(hg.BackpressureTimeoutError):
        writer.put(MIXED)
    assert tables.quarantined() == {}
    tables.store.clear()
    crowd.wait(PATIENCE)


def test_if_the_bad_rows_cannot_be_kept_nothing_is_put(tables: Tables) -> None:
    writer = tables.writer(on_bad_rows="quarantine")
    tables.store.add(Fault("create", "fail", key="quarantine/"))
    with pytest.raises(hg.HeadgateError, match="quarantine/"):
        writer.put(MIXED, producer="p", sequence=0)
    assert [one.backpressure_stats().held_bytes for one in writer.writers.values()] == [0, 0, 0, 0]
    tables.store.clear()
    writer.put(MIXED, producer="p", sequence=0).wait(PATIENCE)
    assert (writer.quarantined_rows, len(tables.quarantined()), tables.ids()) == (2, 1, list(range(20)))


def test_a_retry_after_a_crash_keeps_its_bad_rows_once(tables: Tables) -> None:
    writer = tables.writer(on_bad_rows="quarantine", max_wal_persist_retries=0)
    tables.store.add(Fault("create", "fail", key="/0002/"))
    with pytest.raises(hg.WriterPoisonedError):
        writer.put(MIXED, producer="p", sequence=0).wait(PATIENCE)
    writer.abort()
    tables.store.clear()
    with tables.writer(on_bad_rows="quarantine") as successor:
        successor.put(MIXED, producer="p", sequence=0).wait(PATIENCE)
        successor.put(MIXED, producer="p", sequence=0).wait(PATIENCE)
    assert len(tables.quarantined()) == 1
    assert tables.ids() == list(range(20))
    assert set(tables.copies().values()) == {1}


def test_a_batch_for_columns_that_were_added_since_is_taken(tables: Tables) -> None:
    writer = tables.writer(on_bad_rows="quarantine")
    tables.table().add_columns(pa.schema([("note", pa.string())]))
    wider = SCHEMA.append(pa.field("note", pa.string()))
    writer.put(batch((1, "a", 1.0, "n"), (None, "b", 1.0, "n"), schema=wider)).wait(PATIENCE)
    (kept,) = tables.quarantined().values()
    assert kept.column_names == ["id", "value", "amount", "note", "_reason"]
