"""Types: every Arrow type that Spark has a place for, there and back; the others by name."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import headgate as hg
from headgate.spark import types as t

pytest.importorskip("pyspark")

NOON = datetime(2024, 3, 31, 12, 0, 0, 123456)
COLUMNS: dict[str, tuple[pa.DataType, list[Any], str]] = {
    "nothing": (pa.null(), [None, None], "void"),
    "truth": (pa.bool_(), [True, None], "boolean"),
    "i8": (pa.int8(), [-128, None], "tinyint"),
    "i16": (pa.int16(), [-32768, 1], "smallint"),
    "i32": (pa.int32(), [-(2**31), 1], "int"),
    "i64": (pa.int64(), [-(2**63), 2**63 - 1], "bigint"),
    "u8": (pa.uint8(), [255, None], "smallint"),
    "u16": (pa.uint16(), [65535, 0], "int"),
    "u32": (pa.uint32(), [2**32 - 1, 0], "bigint"),
    "u64": (pa.uint64(), [2**64 - 1, 0], "decimal(20,0)"),
    "f16": (pa.float16(), [np.float16(1.5), None], "float"),
    "f32": (pa.float32(), [1.25, None], "float"),
    "f64": (pa.float64(), [0.1, float("inf")], "double"),
    "dec": (pa.decimal128(10, 2), [Decimal("-1.25"), None], "decimal(10,2)"),
    "dec38": (pa.decimal128(38, 38), [Decimal("0.1"), None], "decimal(38,38)"),
    "dec256": (pa.decimal256(20, 3), [Decimal("1.125"), None], "decimal(20,3)"),
    "s": (pa.string(), ["ä€🎈", None], "string"),
    "ls": (pa.large_string(), ["x", ""], "string"),
    "b": (pa.binary(), [b"\x00\xff", None], "binary"),
    "lb": (pa.large_binary(), [b"x", b""], "binary"),
    "fsb": (pa.binary(3), [b"abc", None], "binary"),
    "d32": (pa.date32(), [date(1582, 10, 15), date(9999, 12, 31)], "date"),
    "d64": (pa.date64(), [date(1969, 12, 31), None], "date"),
    "ts_s": (pa.timestamp("s"), [NOON.replace(microsecond=0), None], "timestamp_ntz"),
    "ts_ms": (pa.timestamp("ms"), [NOON.replace(microsecond=123000), None], "timestamp_ntz"),
    "ts_us": (pa.timestamp("us"), [NOON, datetime(1901, 1, 1)], "timestamp_ntz"),
    "ts_ns": (pa.timestamp("ns"), [NOON, None], "timestamp_ntz"),
    "ts_utc": (pa.timestamp("us", "UTC"), [NOON.replace(tzinfo=UTC), None], "timestamp"),
    "ts_vienna": (pa.timestamp("ms", "Europe/Vienna"), [NOON.replace(microsecond=0, tzinfo=UTC), None], "timestamp"),
    "dur": (pa.duration("ms"), [timedelta(days=2, milliseconds=-5), None], "interval day to second"),
    "t32": (pa.time32("s"), [time(23, 59, 59), None], "time(6)"),
    "t64": (pa.time64("us"), [time(1, 2, 3, 4), None], "time(6)"),
    "vec": (pa.list_(pa.float32(), 2), [[1.0, 2.0], None], "array<float>"),
    "half_vec": (pa.list_(pa.float16(), 2), [[np.float16(1), np.float16(2)], None], "array<float>"),
    "list": (pa.list_(pa.string()), [["a", None], []], "array<string>"),
    "large": (pa.large_list(pa.uint8()), [[1], None], "array<smallint>"),
    "nested": (
        pa.struct([("a", pa.list_(pa.struct([("b", pa.timestamp("ns", "Asia/Tokyo")), ("c", pa.uint16())]))), ("d", pa.decimal128(5, 1))]),
        [{"a": [{"b": NOON.replace(tzinfo=UTC), "c": 7}, None], "d": Decimal("1.5")}, None],
        "struct<a:array<struct<b:timestamp,c:int>>,d:decimal(5,1)>",
    ),
}  # fmt: skip
TABLE = pa.table({name: pa.array(values, kind) for name, (kind, values, _) in COLUMNS.items()})


def test_every_column_is_what_spark_calls_it() -> None:
    found = {field.name: field.dataType.simpleString() for field in t.spark_schema(TABLE.schema).fields}
    assert found == {name: spark for name, (_, _, spark) in COLUMNS.items()}


def test_rows_cross_over_and_come_back_as_they_were() -> None:
    rows = TABLE.to_batches()[0]
    over = t.to_spark(rows, t.carried_schema(rows.schema))
    back = t.to_table(over, rows.schema)
    for name in COLUMNS:
        assert back.column(name).equals(rows.column(name)), name
    back.validate(full=True)


def test_what_crosses_over_is_the_form_that_spark_itself_uses() -> None:
    from pyspark.sql.pandas.types import to_arrow_schema

    assert to_arrow_schema(t.spark_schema(TABLE.schema), timezone="UTC").equals(t.carried_schema(TABLE.schema))


def test_whether_a_column_may_be_null_crosses_over_too() -> None:
    kind = pa.list_(pa.field("item", pa.int64(), nullable=False))
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("l", kind)])
    spark = t.spark_schema(schema)
    assert [f.nullable for f in spark.fields] == [False, True]
    assert spark["l"].dataType.containsNull is False  # type: ignore[attr-defined]
    assert t.arrow_schema(spark).equals(schema)


@pytest.mark.parametrize("kind", [pa.decimal256(60, 2), pa.decimal128(5, -2), pa.month_day_nano_interval()])
def test_a_type_that_spark_has_no_place_for_is_refused_by_name(kind: pa.DataType) -> None:
    for nested in (kind, pa.list_(kind), pa.struct([("inner", kind)])):
        with pytest.raises(hg.InvalidInputError, match="'odd"):
            t.carried_schema(pa.schema([("odd", nested)]))


def test_nanoseconds_that_are_not_whole_microseconds_are_refused_or_cut_off_as_told() -> None:
    kind = pa.struct([("t", pa.timestamp("ns")), ("l", pa.list_(pa.timestamp("ns", "UTC")))])
    batch = pa.record_batch(
        {
            "t": pa.array([1_001, -1, None], pa.timestamp("ns")),
            "d": pa.array([1_001, -1, None], pa.duration("ns")),
            "n": pa.array([{"t": 1_999, "l": [-1, None]}, None, {"t": None, "l": None}], kind),
        }
    )
    schema = t.carried_schema(batch.schema)
    with pytest.raises(hg.InvalidInputError, match="'t'") as refused:
        t.to_spark(batch, schema)
    assert "truncate" in refused.value.hint
    cut = t.to_spark(batch, schema, "truncate")
    assert cut.column("t").cast(pa.int64()).to_pylist() == [1, -1, None]
    assert cut.column("d").cast(pa.int64()).to_pylist() == [1, -1, None]
    inner = cut.column("n").field(1).flatten().cast(pa.int64()).to_pylist()
    assert inner == [-1, None]
    assert cut.column("n").is_null().to_pylist() == [False, True, False]


def test_a_value_that_does_not_fit_back_is_refused() -> None:
    for kind, value in [(pa.uint8(), -1), (pa.int8(), 300), (pa.list_(pa.float32(), 2), [1.0])]:
        rows = pa.record_batch({"x": pa.array([value])})
        with pytest.raises(hg.SchemaMismatchError, match="'x'"):
            t.to_table(rows, pa.schema([("x", kind)]))


def test_columns_are_matched_by_name_and_may_be_left_out_if_they_may_be_null() -> None:
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("V", pa.float64()), pa.field("w", pa.string())])
    rows = t.to_table(pa.record_batch({"v": [1.5], "ID": [7]}), schema)
    assert rows.to_pylist() == [{"id": 7, "V": 1.5, "w": None}]
    with pytest.raises(hg.SchemaMismatchError, match="'id' is missing"):
        t.to_table(pa.record_batch({"v": [1.5]}), schema)
    with pytest.raises(hg.SchemaMismatchError, match="no column 'x'"):
        t.to_table(pa.record_batch({"id": [1], "x": [2]}), schema)
    t.check_columns(["id", "_op"], schema, also=["_op"])


def test_a_table_for_rows_of_spark_can_be_made() -> None:
    from pyspark.sql.types import StructType, _parse_datatype_string  # noqa: F401

    spark = t.spark_schema(TABLE.schema)
    again = t.spark_schema(t.arrow_schema(spark))
    assert again == spark


def test_what_no_table_can_hold_is_refused_with_another_way() -> None:
    from pyspark.sql.types import IntegerType, MapType, StringType, StructField, StructType, YearMonthIntervalType

    for kind, says in [(MapType(StringType(), IntegerType()), "map_entries"), (YearMonthIntervalType(), "cast")]:
        with pytest.raises(hg.InvalidInputError, match="'odd'") as refused:
            t.arrow_schema(StructType([StructField("odd", kind)]))
        assert says in refused.value.hint
