"""Which shard a row goes to: for ever the same, whatever the layout, and as the format says."""

from __future__ import annotations

import datetime
import decimal
import hashlib
import json
import re
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headgate as hg
from headgate.sharding import (
    IDENTITY_BYTES_MAX,
    SHARDS_MAX,
    bucket_of,
    check_sharding,
    first_shards,
    hash_values,
    identity_shard,
    identity_values,
    keeps_shards,
    shards_of,
    split_rows,
)

FORMAT = Path(__file__).parents[2] / "docs" / "format.md"
KINDS = {
    "int64": pa.int64(),
    "int32": pa.int32(),
    "uint64": pa.uint64(),
    "bool": pa.bool_(),
    "date32": pa.date32(),
    "timestamp[us]": pa.timestamp("us"),
    "decimal128(10, 2)": pa.decimal128(10, 2),
    "string": pa.string(),
    "binary": pa.binary(),
}


# -- the hash as docs/format.md has it, in plain Python


def mix(x: int) -> int:
    mask = 2**64 - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def model(value: Any) -> int:
    if value is None:
        return 0
    if isinstance(value, int):
        return mix(value % 2**64)
    body = value.encode() if isinstance(value, str) else value
    total = len(body)
    for number in range(-(-len(body) // 8)):
        (word,) = struct.unpack("<Q", body[8 * number : 8 * number + 8].ljust(8, b"\0"))
        total += mix(word ^ mix(number))
    return mix(total % 2**64)


def as_stored(kind: str, value: Any) -> Any:
    """What the model hashes: the number or the bytes that Arrow stores."""
    if value is None or kind in ("string", "binary", "int64", "int32", "uint64"):
        return value
    if kind == "bool":
        return int(value)
    if kind == "date32":
        return (value - datetime.date(1970, 1, 1)).days
    if kind == "timestamp[us]":
        return (value - datetime.datetime(1970, 1, 1)) // datetime.timedelta(microseconds=1)
    return int(value.scaleb(2)).to_bytes(16, "little", signed=True)


def spelled(kind: str, text: str) -> Any:
    if text == "null":
        return None
    if kind == "string":
        return json.loads(text)
    if kind == "binary":
        return bytes.fromhex(text.removeprefix("0x"))
    if kind == "bool":
        return text == "true"
    if kind == "date32":
        return datetime.date.fromisoformat(text)
    if kind.startswith("timestamp"):
        return datetime.datetime.fromisoformat(text)
    return decimal.Decimal(text) if kind.startswith("decimal") else int(text)


def rows_of(heading: str) -> list[list[str]]:
    """The rows of the first table under a heading of docs/format.md, without its head."""
    section = FORMAT.read_text().split(heading, 1)[1].split("\n#", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


VECTORS = rows_of("### `bucket`")
NAMES = rows_of("### `identity`")


def test_the_format_has_vectors_for_every_kind_of_value() -> None:
    assert len(VECTORS) >= 19
    assert {row[0] for row in VECTORS} == set(KINDS)
    assert len(NAMES) >= 10


@pytest.mark.parametrize("vector", VECTORS, ids=lambda row: f"{row[0]} {row[1]}")
def test_a_vector_of_the_format_holds_for_the_code_and_for_a_model_of_it(vector: list[str]) -> None:
    kind, text, wanted, of_4, of_1000 = vector
    value = spelled(kind, text)
    column = pa.array([value], KINDS[kind])
    assert f"{model(as_stored(kind, value)):016x}" == wanted
    assert f"{int(hash_values(column)[0]):016x}" == wanted
    assert [int(bucket_of(column, n)[0]) for n in (4, 1000)] == [int(of_4), int(of_1000)]


@pytest.mark.parametrize("vector", NAMES, ids=lambda row: row[0])
def test_a_name_of_the_format_is_the_name_of_its_shard(vector: list[str]) -> None:
    text, wanted = vector
    value = json.loads(text)
    assert identity_shard(value) == wanted
    if wanted.startswith("x-") and value:
        assert wanted.endswith(hashlib.blake2b(value.encode(), digest_size=16).hexdigest())


# -- the hash


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.none(), st.binary(max_size=40)), max_size=20), st.integers(0, 5))
def test_bytes_hash_as_the_model_says_wherever_they_lie(values: list[bytes | None], skipped: int) -> None:
    wanted = [model(value) for value in values[skipped:]]
    for kind in (pa.binary(), pa.large_binary()):
        assert hash_values(pa.array(values, kind).slice(skipped)).tolist() == wanted
    whole = pa.array([b"before", *values, b"after"], pa.binary())
    assert hash_values(whole.slice(1 + skipped, max(0, len(values) - skipped))).tolist() == wanted


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(st.none(), st.text(max_size=20)), min_size=1, max_size=20))
def test_text_hashes_the_same_in_every_layout(values: list[str | None]) -> None:
    wanted = [model(value) for value in values]
    assert hash_values(pa.array(values, pa.string())).tolist() == wanted
    assert hash_values(pa.array(values, pa.large_string())).tolist() == wanted
    chunk = pa.chunked_array([values[:1], values[1:]], pa.string()).combine_chunks()
    assert hash_values(chunk).tolist() == wanted


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(st.none(), st.integers(-128, 127)), min_size=1, max_size=20), st.integers(0, 3))
def test_an_integer_hashes_the_same_in_every_width(values: list[int | None], skipped: int) -> None:
    wanted = [model(value) for value in values[skipped:]]
    for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64()):
        assert hash_values(pa.array(values, kind).slice(skipped)).tolist() == wanted
    small = [None if value is None else abs(value) for value in values]
    for kind in (pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64(), pa.int64()):
        assert hash_values(pa.array(small, kind).slice(skipped)).tolist() == [model(value) for value in small[skipped:]]


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 16])
def test_bytes_of_a_fixed_size_hash_as_any_others(size: int) -> None:
    values = [bytes(range(i, i + size)) for i in range(20)]
    fixed = pa.array(values, pa.binary(size))
    assert hash_values(fixed.slice(3)).tolist() == hash_values(pa.array(values[3:])).tolist() == [model(v) for v in values[3:]]


def test_what_lies_under_a_null_does_not_matter() -> None:
    mask = np.array([False, True, False])
    column = pa.Array.from_buffers(
        pa.string(), 3, [pa.array([True, False, True]).buffers()[1], *pa.array(["aa", "secret", "b"]).buffers()[1:]], null_count=1
    )
    assert column.to_pylist() == ["aa", None, "b"]
    assert hash_values(column).tolist() == [model("aa"), 0, model("b")]
    assert hash_values(pa.array(np.array([1, 2, 3]), mask=mask)).tolist() == [model(1), 0, model(3)]


def test_long_values_among_short_ones_hash_as_the_model_says() -> None:
    values = ["short", "x" * 700_003, "", "y" * 9, None, "z" * 600_000, *["more"] * 100]
    assert hash_values(pa.array(values)).tolist() == [model(value) for value in values]


def test_a_slice_costs_its_own_bytes_only() -> None:
    whole = pa.array(["a" * 1000] * 64_000)
    tracemalloc.start()
    assert hash_values(whole.slice(63_000, 1)).tolist() == [model("a" * 1000)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


@pytest.mark.parametrize("values", [range(100_000), [f"user-{i}" for i in range(100_000)], [i << 32 for i in range(100_000)]])
def test_buckets_are_filled_evenly(values: Any) -> None:
    counts = np.bincount(bucket_of(pa.array(list(values)), 16), minlength=16)
    assert counts.min() > 0.95 * 100_000 / 16
    assert counts.max() < 1.05 * 100_000 / 16


@pytest.mark.parametrize("buckets", [1, 2, 3, 1000, SHARDS_MAX])
def test_buckets_are_ranges_of_the_hash_in_order(buckets: int) -> None:
    column = pa.array(range(5_000))
    order = np.argsort(hash_values(column))
    numbers = bucket_of(column, buckets)[order]
    assert (np.diff(numbers) >= 0).all()
    assert 0 <= numbers[0] <= numbers[-1] < buckets
    halves = bucket_of(column, 2 * buckets)[order]
    assert (halves // 2 == numbers).all(), "half a shard is half a range"


# -- names for identity


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(max_size=30) | st.text("abcAB01-_x", max_size=60), max_size=30, unique=True))
def test_every_value_has_a_name_of_its_own_that_any_store_can_take(values: list[str]) -> None:
    names = [identity_shard(value) for value in [None, *values]]
    assert len({name.lower() for name in names}) == len(values) + 1
    assert all(re.fullmatch("[a-z0-9][a-z0-9_-]{0,63}", name) for name in names)


@pytest.mark.parametrize(
    ("column", "wanted"),
    [
        (pa.array([7, -7, None], pa.int16()), ["7", "-7", None]),
        (pa.array([True, False]), ["true", "false"]),
        (pa.array(["a", "Ä"], pa.large_string()), ["a", "Ä"]),
        (pa.array([b"\x00\xff", None]), ["00ff", None]),
        (pa.array([b"ab"], pa.binary(2)), ["6162"]),
        (pa.array([datetime.date(2024, 2, 29)]), ["2024-02-29"]),
        (pa.array([datetime.datetime(1970, 1, 1, 0, 0, 1)], pa.timestamp("ms", "UTC")), ["1000"]),
        (pa.array([datetime.date(1970, 1, 2)], pa.date64()), ["86400000"]),
        (pa.array([decimal.Decimal("-12.30"), decimal.Decimal("0.00")], pa.decimal128(10, 2)), ["-12.30", "0.00"]),
    ],
)
def test_a_value_is_spelled_in_one_way(column: pa.Array, wanted: list[str | None]) -> None:
    assert identity_values(column) == wanted


def test_a_value_that_is_too_long_or_no_text_is_refused() -> None:
    assert identity_values(pa.array(["x" * IDENTITY_BYTES_MAX]))
    with pytest.raises(hg.InvalidInputError, match="513 bytes"):
        identity_values(pa.array(["x" * (IDENTITY_BYTES_MAX + 1)]))
    broken = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff\xfe"]).buffers())
    with pytest.raises(hg.InvalidInputError, match="no text"):
        identity_values(broken)


# -- taking a batch apart


def batch(ids: list[Any], kind: pa.DataType | None = None) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(ids, kind), pa.array(range(len(ids)))], ["id", "n"])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=200), st.integers(1, 20), st.integers(0, 10))
def test_every_row_is_in_exactly_one_part_in_its_order(ids: list[int], buckets: int, skipped: int) -> None:
    rows = batch(ids).slice(min(skipped, len(ids) - 1))
    parts = split_rows(hg.bucket("id", buckets), rows)
    assert [part.shard for part in parts] == sorted({part.shard for part in parts})
    assert sorted(n for part in parts for n in part.rows["n"].to_pylist()) == rows["n"].to_pylist()
    for part in parts:
        assert part.rows["n"].to_pylist() == sorted(part.rows["n"].to_pylist())
        assert set(bucket_of(part.rows["id"], buckets)) == {int(part.shard)}
        assert part.rows.schema.equals(rows.schema)


@pytest.mark.parametrize("rule", [hg.unsharded(), hg.bucket("id", 1), hg.bucket("id", 8), hg.identity("id")])
def test_rows_for_one_shard_are_not_copied(rule: Any) -> None:
    rows = batch([5, 5, 5])
    (part,) = split_rows(rule, rows)
    assert part.rows is rows


@pytest.mark.parametrize("rule", [hg.unsharded(), hg.bucket("id", 8), hg.identity("id")])
def test_no_rows_have_no_parts(rule: Any) -> None:
    assert split_rows(rule, batch([], pa.int64())) == []


def test_a_part_keeps_nothing_of_the_others_in_memory() -> None:
    rows = batch([f"{i:0100d}" for i in range(1000)])
    for part in split_rows(hg.bucket("id", 10), rows):
        assert part.rows.get_total_buffer_size() < rows.get_total_buffer_size() / 4


def test_identity_takes_rows_apart_by_value() -> None:
    parts = split_rows(hg.identity("id"), batch(["b", "A", "b", None, "a"]))
    assert [(part.value, part.rows["n"].to_pylist()) for part in parts] == [("a", [4]), ("b", [0, 2]), ("A", [1]), (None, [3])]
    assert [part.shard for part in parts] == [identity_shard(part.value) for part in parts]


def test_identity_refuses_more_values_than_there_may_be_shards() -> None:
    with pytest.raises(hg.InvalidInputError, match="each would be a shard"):
        split_rows(hg.identity("id"), batch(list(range(SHARDS_MAX + 1))))


@pytest.mark.parametrize("rule", [hg.unsharded(), hg.bucket("id", 1), hg.bucket("id", 8), hg.identity("id")])
def test_the_shards_of_rows_are_those_of_their_parts(rule: Any) -> None:
    rows = batch([3, 1, 4, 1, 5, 9, 2, 6, None])
    assert shards_of(rule, rows) == {part.shard for part in split_rows(rule, rows)}
    assert shards_of(rule, batch([], pa.int64())) == set()


def test_values_that_can_be_in_no_shard_are_looked_for_all_the_same() -> None:
    values = [str(i) for i in range(SHARDS_MAX + 1)] + ["x" * 1000]
    assert len(shards_of(hg.identity("id"), batch(values))) == len(values)


# -- rules


@pytest.mark.parametrize("kind", [pa.float64(), pa.list_(pa.int64()), pa.null(), pa.time32("s"), pa.decimal256(50, 2)])
@pytest.mark.parametrize("rule", [hg.bucket("c", 2), hg.identity("c")])
def test_a_column_that_cannot_decide_is_refused(rule: Any, kind: pa.DataType) -> None:
    with pytest.raises(hg.InvalidInputError, match="has type"):
        check_sharding(rule, pa.schema([("c", kind)]), ())


def test_a_table_starts_with_a_shard_per_bucket_and_none_per_value() -> None:
    assert first_shards(hg.unsharded()) == ("0000",)
    assert first_shards(hg.bucket("c", 3)) == ("0000", "0001", "0002")
    assert first_shards(hg.identity("c")) == ()


@pytest.mark.parametrize(
    ("old", "new", "keeps"),
    [
        (pa.int32(), pa.int64(), True),
        (pa.string(), pa.large_string(), True),
        (pa.binary(), pa.large_binary(), True),
        (pa.decimal128(5, 2), pa.decimal128(9, 2), True),
        (pa.decimal128(5, 2), pa.decimal128(9, 3), False),
        (pa.date32(), pa.timestamp("us"), False),
        (pa.timestamp("s"), pa.timestamp("ms"), False),
        (pa.int64(), pa.string(), False),
    ],
)
def test_widening_that_moves_no_row_is_told_from_what_would(old: pa.DataType, new: pa.DataType, keeps: bool) -> None:
    assert keeps_shards(old, new) is keeps
