"""Rows of any age, read as the table of now; and which types are wider than others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headgate as hg
from headgate.life.alter import with_columns, with_renamed, with_widened, without_columns
from headgate.manifest import TableManifest
from headgate.schema import FIELD_ID, RowRules, as_now, encode_schema, ids_in, widens
from headgate.sharding import hash_values
from headgate.wal.entry import Header, Put, decode_entry, encode_entry
from headgate.watch import rules_of

SCHEMA = pa.schema([pa.field("id", pa.int32(), nullable=False), pa.field("name", pa.string()), pa.field("size", pa.int8())])


def test_rows_in_memory_know_which_columns_they_are() -> None:
    rules = RowRules(SCHEMA, ("id",), (7, 3, 5))
    plain = pa.RecordBatch.from_pylist([{"id": 1, "name": "a", "size": 1}], schema=SCHEMA)
    bare = pa.RecordBatch.from_arrays(plain.columns, names=plain.schema.names)
    lying = pa.RecordBatch.from_arrays(
        plain.columns, schema=pa.schema([pa.field(f.name, f.type, f.nullable, {FIELD_ID: b"99"}) for f in rules.log_schema])
    )
    for rows in (plain, bare, lying, plain.cast(rules.log_schema), plain.replace_schema_metadata({"pandas": "…"})):
        assert ids_in(rules.upsert(rows).schema) == {7: "id", 3: "name", 5: "size"}
    assert ids_in(rules.delete(plain).schema) == {7: "id"}


def test_rows_newer_than_the_reader_and_of_a_wider_type_are_not_cut() -> None:
    old, new = RowRules(SCHEMA, ("id",)), RowRules(SCHEMA.set(2, pa.field("size", pa.int64())), ("id",))
    rows = new.upsert([{"id": 1, "size": 2**40}])
    with pytest.raises(hg.SnapshotExpiredError, match="size"):
        as_now(rows, ids_in(rows.schema), old, ["id", "size"])


def test_as_many_rows_without_a_column_are_as_many_rows() -> None:
    rules = RowRules(SCHEMA, ("id",))
    rows = rules.upsert([{"id": number} for number in range(5)])
    assert as_now(rows, ids_in(rows.schema), rules, []).num_rows == 5


# -- property: any changes, by every way that rows are kept

KINDS: list[list[pa.DataType]] = [
    [pa.int8(), pa.int16(), pa.int64()],
    [pa.uint8(), pa.uint32(), pa.int64()],
    [pa.float16(), pa.float32(), pa.float64()],
    [pa.string(), pa.large_string()],
    [pa.binary(), pa.large_binary()],
    [pa.decimal128(5, 2), pa.decimal128(20, 2)],
    [pa.list_(pa.struct([("a", pa.int8())]))],
]


def value_of(kind: pa.DataType, number: int) -> Any:
    """A value that the narrowest type of its kind has."""
    if number % 5 == 0:
        return None
    if pa.types.is_list(kind):
        return [{"a": number % 100}]
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return f"v{number}"
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return b"%d" % number
    return Decimal(number % 100) if pa.types.is_decimal(kind) else number % 100


def apply(draw: Callable[[Any], Any], manifest: TableManifest) -> TableManifest:
    """Some change that the table allows, or none."""
    rules = rules_of(manifest)
    column = draw(st.sampled_from(rules.schema.names))
    fresh = [name for name in ("a", "b", "c", "d", "e") if name not in rules.schema.names]
    op = draw(st.sampled_from(["add", "drop", "rename", "widen"]))
    if op == "add" and fresh:
        kind = draw(st.sampled_from(KINDS))[0]
        return with_columns(manifest, pa.schema([(draw(st.sampled_from(fresh)), kind)]))
    if op == "drop" and column not in manifest.key:
        return without_columns(manifest, [column])
    if op == "rename" and fresh:
        return with_renamed(manifest, column, draw(st.sampled_from(fresh))) or manifest
    if op == "widen":
        chain = next(kinds for kinds in KINDS if rules.schema.field(column).type in kinds)
        wider = [kind for kind in chain if widens(rules.schema.field(column).type, kind)]
        return (with_widened(manifest, column, wider[0]) or manifest) if wider else manifest
    return manifest


def header() -> Header:
    return Header("w", "0000", 1, 0, "data", "e", "me", -1, 0.0)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_rows_of_any_age_show_the_values_of_their_columns_and_no_others(data: st.DataObject) -> None:
    draw = data.draw
    has_ids = draw(st.booleans())
    schema = pa.schema([("k", pa.int8()), ("a", pa.string()), ("b", pa.int8())])
    manifest = TableManifest(
        version=0, id="m", table_id="t", wal_id="w", shards=("0000",), key=("k",), arrow_schema=encode_schema(schema),
        field_ids=(1, 2, 3) if has_ids else (), next_field_id=4 if has_ids else 0,
    )  # fmt: skip
    kept: list[tuple[pa.RecordBatch, dict[int, str] | None, dict[int, Any]]] = []
    used = {1, 2, 3}
    for step in range(draw(st.integers(1, 8))):
        rules = rules_of(manifest)
        row = {f.name: value_of(f.type, 11 * step + number) if f.name not in rules.key else step for number, f in enumerate(rules.schema)}
        by_id = {number: row[name] for number, name in zip(rules.field_ids, rules.schema.names, strict=True)}
        put = Put(rules.upsert([row]))
        if draw(st.booleans()):
            put = Put(rules.delete([row]), "delete")
            by_id = {number: value for number, value in by_id.items() if rules.schema.names[rules.field_ids.index(number)] in rules.key}
        way = draw(st.sampled_from(["memory", "log", "run", "no ids"]))
        if way == "memory":
            kept.append((put.rows, None, by_id))
        elif way == "log":
            (read_back,) = decode_entry(memoryview(encode_entry(header(), rules.log_schema, [put])), "k", "w", "0000", 1, 0).puts
            kept.append((read_back.rows, None, by_id))
        elif way == "run" and put.op == "upsert":
            bare = pa.RecordBatch.from_arrays(put.rows.columns, names=put.rows.schema.names)
            kept.append((bare, dict(zip(rules.field_ids, rules.schema.names, strict=True)), by_id))
        elif not manifest.field_ids:  # only tables that were never changed have rows without ids
            kept.append((pa.RecordBatch.from_arrays(put.rows.columns, names=put.rows.schema.names), None, by_id))
        before = set(rules.field_ids)
        manifest = apply(draw, manifest)
        after = set(rules_of(manifest).field_ids)
        assert not (after - before) & used, "an id is never given twice"
        used |= after

    rules = rules_of(manifest)
    columns = draw(st.lists(st.sampled_from(rules.schema.names), unique=True))
    for rows, names, by_id in kept:
        found = as_now(rows, ids_in(rows.schema) if names is None else names, rules, columns)
        found.validate(full=True)
        assert found.num_rows == 1
        assert found.schema.equals(pa.schema([(name, rules.schema.field(name).type) for name in columns]))
        expected = {name: by_id.get(rules.field_ids[rules.schema.names.index(name)]) for name in columns}
        if columns:
            assert found.to_pylist() == [expected]


# -- widening


def all_types() -> Iterator[pa.DataType]:
    for bits in (8, 16, 32, 64):
        yield getattr(pa, f"int{bits}")()
        yield getattr(pa, f"uint{bits}")()
    yield from (pa.float16(), pa.float32(), pa.float64(), pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.binary(4))
    yield from (pa.decimal128(5, 2), pa.decimal128(9, 2), pa.decimal128(9, 3), pa.decimal256(50, 2), pa.bool_(), pa.null())
    yield from (pa.date32(), pa.date64(), pa.time32("s"), pa.timestamp("s"), pa.timestamp("us"), pa.duration("s"), pa.list_(pa.int8()))


def extremes(kind: pa.DataType) -> pa.Array:
    if pa.types.is_integer(kind):
        info = np.iinfo(kind.to_pandas_dtype())
        return pa.array(sorted({info.min, info.min + 1, 0, 1, info.max - 1, info.max}), kind)
    if pa.types.is_floating(kind):
        finite = np.finfo(kind.to_pandas_dtype())
        values = [-np.inf, finite.min, -finite.tiny, 0, finite.smallest_subnormal, finite.tiny, 1, finite.max, np.inf]
        return pa.array(np.array(values, kind.to_pandas_dtype()))
    if pa.types.is_decimal(kind):
        return pa.array([f"-{'9' * (kind.precision - kind.scale)}.{'9' * kind.scale}", "0.00", "1.10"]).cast(kind)
    if pa.types.is_binary(kind):
        return pa.array([b"", b"\0", b"a", b"b\0", b"\xff" * 9], kind)
    return pa.array(["", "\0", "a", "ab", "é" * 9, "\U0010ffff"], kind)


WIDER = [(old, new) for old in all_types() for new in all_types() if widens(old, new)]


@pytest.mark.parametrize(("old", "new"), WIDER, ids=lambda kind: str(kind))
def test_a_wider_type_holds_every_value_in_the_same_order_and_the_same_shard(old: pa.DataType, new: pa.DataType) -> None:
    values = extremes(old)
    wide = values.cast(new)
    assert wide.cast(old).equals(values)
    plain = wide.to_pylist()
    assert plain == sorted(plain)
    if not pa.types.is_floating(old):
        assert (hash_values(values) == hash_values(wide)).all()


def test_which_types_are_wider() -> None:
    assert all(not widens(kind, kind) for kind in all_types())
    assert all(not widens(new, old) for old, new in WIDER)
    assert len(WIDER) == 6 + 6 + 6 + 3 + 1 + 1 + 1
