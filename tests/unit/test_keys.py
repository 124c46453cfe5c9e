"""Keys: one order, exact; the newest row of each."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headgate.keys.columns as columns
import headgate.keys.form as form
import headgate.keys.newest as newest
from headgate.keys import ByteKeys, ColumnKeys, KeyOrder, NumberKeys, newest_rows
from headgate.schema import RowRules
from headgate.wal.entry import Put


def rules_of(*key: pa.DataType, value: pa.DataType | None = None) -> RowRules:
    names = [f"k{i}" for i in range(len(key))]
    fields = [pa.field(n, t, False) for n, t in zip(names, key, strict=True)]
    return RowRules(pa.schema([*fields, pa.field("v", value or pa.int64())]), tuple(names))


def put(rules: RowRules, keys: list[tuple[Any, ...]], values: list[Any]) -> Put:
    columns = [pa.array([k[i] for k in keys], f.type) for i, f in enumerate(rules.key_schema)]
    return Put(pa.RecordBatch.from_arrays([*columns, pa.array(values, rules.schema.field("v").type)], schema=rules.log_schema))


def delete(rules: RowRules, keys: list[tuple[Any, ...]]) -> Put:
    columns = [pa.array([k[i] for k in keys], f.type) for i, f in enumerate(rules.key_schema)]
    return Put(pa.RecordBatch.from_arrays(columns, schema=rules.key_schema), "delete")


_DATE = st.dates(dt.date(1900, 1, 1), dt.date(2100, 1, 1))
_TIME = st.datetimes(dt.datetime(1900, 1, 1), dt.datetime(2100, 1, 1))
KINDS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "int8": (pa.int8(), st.integers(-128, 127)),
    "int16": (pa.int16(), st.integers(-(1 << 15), (1 << 15) - 1)),
    "int32": (pa.int32(), st.integers(-(1 << 31), (1 << 31) - 1)),
    "int64": (pa.int64(), st.integers(-(1 << 63), (1 << 63) - 1)),
    "uint8": (pa.uint8(), st.integers(0, 255)),
    "uint16": (pa.uint16(), st.integers(0, (1 << 16) - 1)),
    "uint32": (pa.uint32(), st.integers(0, (1 << 32) - 1)),
    "uint64": (pa.uint64(), st.integers(0, (1 << 64) - 1)),
    "bool": (pa.bool_(), st.booleans()),
    "date32": (pa.date32(), _DATE),
    "date64": (pa.date64(), _DATE),
    "timestamp": (pa.timestamp("us"), _TIME),
    "string": (pa.string(), st.text(alphabet="aé€😀\0b", max_size=12)),
    "large_string": (pa.large_string(), st.text(max_size=5)),
    "binary": (pa.binary(), st.binary(max_size=4) | st.binary(max_size=12)),
    "large_binary": (pa.large_binary(), st.lists(st.sampled_from([b"\0", b"\xff", b"a"]), max_size=11).map(b"".join)),
    "fixed": (pa.binary(3), st.binary(min_size=3, max_size=3)),
    "decimal": (pa.decimal128(20, 2), st.decimals(-(10**17), 10**17, places=2)),
}


def comparable(value: Any) -> Any:
    return value.encode() if isinstance(value, str) else value


def ordered(keys: Any) -> list[tuple[Any, ...]]:
    return sorted(keys, key=lambda key: tuple(comparable(part) for part in key))


@st.composite
def tables(draw: st.DrawFn) -> tuple[RowRules, list[tuple[str, list[tuple[Any, ...]]]]]:
    kinds = draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3))
    pool = draw(st.lists(st.tuples(*(KINDS[k][1] for k in kinds)), min_size=1, max_size=12))
    some = st.lists(st.sampled_from(pool), min_size=1, max_size=10)
    return rules_of(*(KINDS[k][0] for k in kinds)), draw(st.lists(st.tuples(st.sampled_from(["upsert", "delete"]), some), max_size=5))


@settings(max_examples=300, deadline=None)
@given(tables())
def test_puts_come_to_the_newest_row_of_each_key_in_key_order_for_every_type_of_key(case: Any) -> None:
    rules, ops = case
    puts, number = [], 0
    model: dict[tuple[Any, ...], int | None] = {}
    for op, keys in ops:
        if op == "delete":
            puts.append(delete(rules, keys))
            model |= dict.fromkeys(keys)
            continue
        values = list(range(number, number + len(keys)))
        number += len(keys)
        puts.append(put(rules, keys, values))
        model |= dict(zip(keys, values, strict=True))

    got = newest_rows(puts, rules)

    assert got.rows.schema.equals(rules.log_schema, check_metadata=True)
    rows = [tuple(row.values()) for row in got.rows.to_pylist()]
    assert rows == [(*key, model[key]) for key in ordered(model)]
    deleted = got.deleted if got.deleted is not None else np.zeros(len(rows), bool)
    assert deleted.tolist() == [row[-1] is None for row in rows]
    assert got.tombstones == sum(v is None for v in model.values())
    assert (got.deleted is None) == (got.tombstones == 0)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_keys_are_found_where_they_are_and_nowhere_else(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3))
    pool = st.lists(st.tuples(*(KINDS[k][1] for k in kinds)), max_size=12)
    rules = rules_of(*(KINDS[k][0] for k in kinds))
    mine, others = ordered(set(data.draw(pool))), data.draw(pool)
    others += data.draw(st.lists(st.sampled_from(mine), max_size=5)) if mine else []

    def keys(values: list[tuple[Any, ...]]) -> Any:
        return KeyOrder(rules).keys([pa.array([v[i] for v in values], f.type) for i, f in enumerate(rules.key_schema)])

    here = keys(mine)
    assert here.is_ascending()
    assert here.find(keys(others)).tolist() == [mine.index(k) if k in mine else -1 for k in others]
    distinct = ordered(set(others))
    assert here.overlap(keys(distinct)).tolist() == [i for i, k in enumerate(mine) if k in distinct]
    assert keys(others).order().tolist() == [
        i for i, _ in sorted(enumerate(others), key=lambda pair: (tuple(comparable(p) for p in pair[1]), pair[0]))
    ]
    if isinstance(here, ByteKeys):
        assert form._positions(here.values, keys(others).values).tolist() == here.positions(keys(others)).tolist()


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_columns_of_numbers_compare_as_tuples_do_whether_they_fit_one_number_or_not(data: st.DataObject) -> None:
    number = st.integers(-3, 4) | st.sampled_from([-(2**63), 2**63 - 1, 1 << 40, -(1 << 40)])
    pool = st.lists(st.tuples(number, number), max_size=25)
    mine, others = sorted(set(data.draw(pool))), data.draw(pool)
    others += data.draw(st.lists(st.sampled_from(mine), max_size=5)) if mine else []

    def keys(values: list[tuple[int, int]]) -> ColumnKeys:
        return ColumnKeys([np.array([v[i] for v in values], np.int64) for i in range(2)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "_FEW", data.draw(st.sampled_from([1, 64])))
        here, there = keys(mine), keys(others)
        assert here.find(there).tolist() == [mine.index(k) if k in mine else -1 for k in others]
        assert here.positions(there).tolist() == [sum(m < k for m in mine) for k in others]
        assert here.is_ascending()
        assert there.is_ascending() == all(a < b for a, b in pairwise(others))
        assert there.order().tolist() == sorted(range(len(others)), key=lambda i: (others[i], i))
        assert here.overlap(keys(sorted(set(others)))).tolist() == [i for i, k in enumerate(mine) if k in others]
        newest = there.newest()
        last = {k: i for i, k in enumerate(others)}
        assert (list(range(len(others))) if newest is None else newest.tolist()) == [last[k] for k in sorted(last)]
        half = here.part(len(mine) // 2, len(mine))
        assert half.find(there).tolist() == [mine.index(k) - len(mine) // 2 if k in mine[len(mine) // 2 :] else -1 for k in others]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_words_never_decide_more_than_they_can(data: st.DataObject) -> None:
    """Long keys that differ late, early, in length or by zeros only: found by words, as one by one."""
    text = st.lists(st.sampled_from([b"\0", b"a", b"\xff", b"abcdefgh", b"same-prefix-"]), max_size=5).map(b"".join)
    mine, others = sorted(data.draw(st.sets(text, min_size=1, max_size=25))), sorted(data.draw(st.sets(text, min_size=1, max_size=25)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(form, "_MANY", 1)
        one, two = (ByteKeys(pa.array(some, pa.large_binary())) for some in (mine, others))
        assert one.find(two).tolist() == [mine.index(key) if key in mine else -1 for key in others]
        assert one.overlap(two).tolist() == [number for number, key in enumerate(mine) if key in others]
        half = one.part(len(mine) // 2, len(mine))
        assert half.find(two).tolist() == [mine[len(mine) // 2 :].index(key) if key in mine[len(mine) // 2 :] else -1 for key in others]


def test_rows_that_ascend_are_not_copied() -> None:
    rules = rules_of(pa.int64())
    one = put(rules, [(i,) for i in range(100)], list(range(100)))
    got = newest_rows([one], rules).rows
    assert got.column("v").chunk(0).buffers()[1].address == one.rows.column("v").buffers()[1].address


@pytest.mark.parametrize("spread", [1, 1 << 40])
def test_within_one_put_the_later_row_wins(spread: int) -> None:
    rules = rules_of(pa.int64())
    got = newest_rows([put(rules, [(k * spread,) for k in (5, 3, 5, 3, 4, 5)], [0, 1, 2, 3, 4, 5])], rules)
    assert got.rows.column("v").to_pylist() == [3, 4, 5]


def test_without_a_key_all_rows_stay_in_the_order_they_came() -> None:
    rules = RowRules(pa.schema([("v", pa.int64())]), ())
    got = newest_rows([Put(pa.record_batch({"v": [3, 3]})), Put(pa.record_batch({"v": [1]}))], rules)
    assert got.rows.column("v").to_pylist() == [3, 3, 1]
    assert got.deleted is None


def test_no_puts_are_no_rows() -> None:
    rules = rules_of(pa.string())
    got = newest_rows([], rules)
    assert got.rows.num_rows == 0
    assert got.rows.schema.equals(rules.log_schema)


def test_rows_written_before_a_change_of_the_schema_are_read_by_field_id() -> None:
    then = RowRules(pa.schema([("id", pa.int32()), ("a", pa.int64()), ("b", pa.int64())]), ("id",), (1, 2, 3))
    now = RowRules(pa.schema([("key", pa.int64()), ("b", pa.int64()), ("c", pa.string())]), ("key",), (1, 2, 4))
    old = Put(pa.RecordBatch.from_arrays([pa.array([2, 1], pa.int32()), pa.array([20, 10]), pa.array([7, 7])], schema=then.log_schema))
    new = Put(pa.RecordBatch.from_arrays([pa.array([3]), pa.array([30]), pa.array(["x"])], schema=now.log_schema))
    gone = Put(pa.RecordBatch.from_arrays([pa.array([2])], schema=now.log_schema.empty_table().select(["key"]).schema), "delete")

    got = newest_rows([old, new, gone], now)

    assert got.rows.to_pylist() == [{"key": 1, "b": 10, "c": None}, {"key": 2, "b": None, "c": None}, {"key": 3, "b": 30, "c": "x"}]
    assert got.deleted is not None
    assert got.deleted.tolist() == [False, True, False]


def test_more_text_than_one_array_holds_is_taken_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newest, "_TAKE_BYTES_MAX", 64)
    rules = rules_of(pa.int64(), value=pa.string())
    got = newest_rows([put(rules, [(i,) for i in range(50, 0, -1)], [f"text {i}" for i in range(50)])], rules)
    assert got.rows.column("v").num_chunks > 1
    assert got.rows.to_pylist() == [{"k0": i, "v": f"text {50 - i}"} for i in range(1, 51)]


def test_two_small_columns_are_one_number_larger_ones_stay_columns_and_others_are_bytes() -> None:
    def made_of(*kinds: pa.DataType) -> type:
        return type(KeyOrder(rules_of(*kinds)).none())

    assert made_of(pa.int32(), pa.int32()) is NumberKeys
    assert made_of(pa.int64(), pa.bool_()) is made_of(pa.int64(), pa.timestamp("us"), pa.date32()) is ColumnKeys
    assert made_of(pa.uint64(), pa.bool_()) is made_of(pa.int64(), pa.string()) is ByteKeys
    assert made_of(pa.int64()) is made_of(pa.uint64()) is made_of(pa.timestamp("ns")) is NumberKeys
    assert made_of(pa.decimal128(5, 2)) is made_of(pa.string()) is ByteKeys


def test_decimals_are_ordered_by_value() -> None:
    rules = rules_of(pa.decimal128(10, 2))
    values = [Decimal("1.00"), Decimal("-2.50"), Decimal("0.00"), Decimal("-0.01"), Decimal("99999999.99")]
    got = newest_rows([put(rules, [(v,) for v in values], [1, 2, 3, 4, 5])], rules)
    assert got.rows.column("k0").to_pylist() == sorted(values)


@pytest.mark.parametrize(("left", "right"), [(("a", "\0b"), ("a\0", "b")), (("", "ab"), ("a", "b")), (("a\0\0", ""), ("a", "\0\0"))])
def test_q09_composite_keys_that_read_alike_when_joined_are_different(left: tuple[str, str], right: tuple[str, str]) -> None:
    rules = rules_of(pa.string(), pa.string())
    got = newest_rows([put(rules, [left, right], [1, 2])], rules)
    assert got.rows.num_rows == 2


def test_the_schema_beside_the_rows_says_which_columns_they_are() -> None:
    """A user's batch may say what it likes about its columns, and mostly says nothing."""
    rules = RowRules(pa.schema([pa.field("key", pa.int64(), False), pa.field("v", pa.int64())]), ("key",), (1, 7), ("key", "other"))
    bare = pa.record_batch([pa.array([1]), pa.array([10])], schema=pa.schema([field.remove_metadata() for field in rules.log_schema]))
    lying = bare.replace_schema_metadata({b"headgate.field_ids": b"7,1"})
    rows = newest.rows_of([Put(bare, schema=rules.log_schema), Put(lying, schema=rules.log_schema)], rules, ["key", "v"])
    assert rows.to_pydict() == {"key": [1, 1], "v": [10, 10]}
