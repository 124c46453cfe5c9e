"""Types: what a table's columns are in Spark, and back.

Owns: which Spark type an Arrow type is, the Arrow form in which rows cross over, and casting there and back.
Does not own: which rows a table takes (schema).

Spark knows fewer types than Arrow. A column whose every value has a place in a wider type of Spark's is
read as that one: unsigned integers as the next larger signed ones, 64 bits of them as decimal(20), half
floats as floats, seconds and milliseconds as microseconds, vectors and large lists as arrays. Back in the
table they are cast to its own types, and a value that does not fit is refused. What has no such place is
refused by name. Nanoseconds may be whole microseconds, which only the values tell: by default those that
are not are refused when they are met, with ``nanoseconds="truncate"`` what is below a microsecond is cut off.

Rows cross over as Spark has them in Arrow: timestamps in microseconds and UTC, or without a zone; lists
whose elements are called "element". A timestamp with a zone is a moment: Spark shows it in the zone of the
session, and it is the same moment when it comes back. One without a zone is Spark's timestamp_ntz.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as types

from headgate import InvalidInputError, SchemaMismatchError

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

Nanoseconds = Literal["fail", "truncate"]

_DECIMAL_DIGITS_MAX = 38
_WIDER = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
    pa.float16(): pa.float32(),
    pa.date64(): pa.date32(),
    pa.large_string(): pa.string(),
    pa.string_view(): pa.string(),
    pa.large_binary(): pa.binary(),
    pa.binary_view(): pa.binary(),
}
_SAME = {
    pa.null(): "void",
    pa.bool_(): "boolean",
    pa.int8(): "tinyint",
    pa.int16(): "smallint",
    pa.int32(): "int",
    pa.int64(): "bigint",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.string(): "string",
    pa.binary(): "binary",
    pa.date32(): "date",
}


def carried_type(kind: pa.DataType, name: str = "") -> pa.DataType:
    """The Arrow type in which values of a type cross over to Spark.

    Raises:
        InvalidInputError: Spark has no type for them.
    """
    if kind in _SAME:
        return kind
    if kind in _WIDER:
        return _WIDER[kind]
    if types.is_timestamp(kind):
        return pa.timestamp("us", None if kind.tz is None else "UTC")
    if types.is_duration(kind):
        return pa.duration("us")
    if types.is_time(kind):
        return pa.time64("ns")
    if types.is_decimal(kind) and kind.precision <= _DECIMAL_DIGITS_MAX and 0 <= kind.scale <= kind.precision:
        return pa.decimal128(kind.precision, kind.scale)
    if types.is_fixed_size_binary(kind):
        return pa.binary()
    if types.is_dictionary(kind):
        return carried_type(kind.value_type, name)
    if types.is_map(kind):
        key, item = carried_type(kind.key_type, f"{name}.key"), carried_type(kind.item_type, f"{name}.value")
        return pa.map_(pa.field("key", key, nullable=False), pa.field("value", item, kind.item_field.nullable))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return pa.list_(pa.field("element", carried_type(kind.value_type, f"{name}[]"), kind.value_field.nullable))
    if types.is_struct(kind):
        fields = [kind.field(number) for number in range(kind.num_fields)]
        return pa.struct([pa.field(f.name, carried_type(f.type, f"{name}.{f.name}"), f.nullable) for f in fields])
    raise InvalidInputError(
        f"the column {name!r} has type {kind}, which Spark has not", hint="choose other columns, or change the column's type in the table"
    )


def carried_schema(schema: pa.Schema) -> pa.Schema:
    """The same for all columns."""
    return pa.schema([pa.field(f.name, carried_type(f.type, f.name), f.nullable) for f in schema])


def spark_schema(schema: pa.Schema) -> StructType:
    """A table's columns as Spark has them.

    Raises:
        InvalidInputError: Spark has no type for one of them.
    """
    from pyspark.sql.types import StructField, StructType

    return StructType([StructField(f.name, _spark_type(f.type), f.nullable) for f in carried_schema(schema)])


def _spark_type(kind: pa.DataType) -> DataType:
    """Of a type that crosses over."""
    from pyspark.sql import types as spark

    if kind in _SAME:
        plain: dict[str, DataType] = {
            one.simpleString(): one
            for one in (
                spark.NullType(), spark.BooleanType(), spark.ByteType(), spark.ShortType(), spark.IntegerType(), spark.LongType(),
                spark.FloatType(), spark.DoubleType(), spark.StringType(), spark.BinaryType(), spark.DateType(),
            )
        }  # fmt: skip
        return plain[_SAME[kind]]
    if types.is_timestamp(kind):
        return spark.TimestampNTZType() if kind.tz is None else spark.TimestampType()
    if types.is_duration(kind):
        return spark.DayTimeIntervalType()
    if types.is_time(kind):
        return spark.TimeType()
    if types.is_decimal(kind):
        return spark.DecimalType(kind.precision, kind.scale)
    if types.is_map(kind):
        return spark.MapType(_spark_type(kind.key_type), _spark_type(kind.item_type), kind.item_field.nullable)
    if types.is_list(kind):
        return spark.ArrayType(_spark_type(kind.value_type), kind.value_field.nullable)
    assert types.is_struct(kind), kind
    return spark.StructType([spark.StructField(f.name, _spark_type(f.type), f.nullable) for f in map(kind.field, range(kind.num_fields))])


def arrow_schema(schema: StructType) -> pa.Schema:
    """The schema of a table that holds such rows: ``hg.create_table(uri, hgs.arrow_schema(df.schema), key=…)``.

    Raises:
        InvalidInputError: no column of a table can hold one of the types.
    """
    return pa.schema([pa.field(f.name, _arrow_type(f.dataType, f.name), f.nullable) for f in schema.fields])


def _arrow_type(kind: DataType, name: str) -> pa.DataType:
    from pyspark.sql import types as spark

    if isinstance(kind, spark.CharType | spark.VarcharType):
        return pa.string()
    plain = {text: arrow for arrow, text in _SAME.items()}
    if kind.simpleString() in plain:
        return plain[kind.simpleString()]
    if isinstance(kind, spark.StringType):  # with a collation
        return pa.string()
    if isinstance(kind, spark.TimestampType | spark.TimestampNTZType):
        return pa.timestamp("us", "UTC" if isinstance(kind, spark.TimestampType) else None)
    if isinstance(kind, spark.DayTimeIntervalType):
        return pa.duration("us")
    if isinstance(kind, spark.TimeType):
        return pa.time64("ns") if kind.precision > 6 else pa.time64("us")
    if isinstance(kind, spark.DecimalType):
        return pa.decimal128(kind.precision, kind.scale)
    if isinstance(kind, spark.ArrayType):
        return pa.list_(pa.field("item", _arrow_type(kind.elementType, f"{name}[]"), kind.containsNull))
    if isinstance(kind, spark.StructType) and type(kind) is spark.StructType:
        return pa.struct([pa.field(f.name, _arrow_type(f.dataType, f"{name}.{f.name}"), f.nullable) for f in kind.fields])
    hint = "map_entries() makes an array of structs of it" if isinstance(kind, spark.MapType) else "cast it, or leave it out"
    raise InvalidInputError(f"the column {name!r} has type {kind.simpleString()}, which a table cannot hold", hint=hint)


# -- rows


def to_spark(rows: pa.RecordBatch, schema: pa.Schema, nanoseconds: Nanoseconds = "fail") -> pa.RecordBatch:
    """Rows of a table in the form in which they cross over; ``schema`` is their ``carried_schema``.

    Raises:
        InvalidInputError: a value has no place in Spark's type.
    """
    columns = []
    for column, field in zip(rows.columns, schema, strict=True):
        if not column.type.equals(field.type):
            try:
                column = (_truncated(column) if nanoseconds == "truncate" else column).cast(field.type)
            except pa.ArrowInvalid as error:
                raise InvalidInputError(
                    f"the column {field.name!r} has a value that Spark's type cannot hold: {error}",
                    hint='nanoseconds="truncate" cuts off what is below a microsecond; or leave the column out',
                ) from None
        columns.append(column)
    if not columns:
        return rows
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _truncated(column: pa.Array) -> pa.Array:
    """Nanoseconds down to whole microseconds, at any depth."""
    kind = column.type
    if types.is_timestamp(kind) and kind.unit == "ns":
        return pc.floor_temporal(column, unit="microsecond")
    if types.is_duration(kind) and kind.unit == "ns":
        count = column.cast(pa.int64())
        rest = pc.subtract(count, pc.multiply(pc.divide(count, 1000), 1000))
        down = pc.subtract(count, pc.if_else(pc.less(rest, 0), pc.add(rest, 1000), rest))
        return down.cast(kind)
    if types.is_list(kind) or types.is_large_list(kind):
        column = pa.concat_arrays([column, column.slice(0, 0)]) if column.offset else column  # a mask goes with whole arrays only
        whole = _truncated(column.values)
        build = pa.ListArray if types.is_list(kind) else pa.LargeListArray
        return build.from_arrays(column.offsets, whole, type=kind, mask=column.is_null() if column.null_count else None)
    if types.is_struct(kind):
        fields = [kind.field(number) for number in range(kind.num_fields)]
        parts = [_truncated(column.field(number)) for number in range(kind.num_fields)]
        return pa.StructArray.from_arrays(parts, fields=fields, mask=column.is_null() if column.null_count else None)
    return column


def to_table(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Rows from Spark with exactly a table's columns, in its order; they are matched by name. Missing ones are null.

    Raises:
        SchemaMismatchError: a column is not the table's, cannot be missing, or has a value that does not fit.
    """
    check_columns(rows.schema.names, schema)
    there = {name.casefold(): number for number, name in enumerate(rows.schema.names)}
    columns = []
    for field in schema:
        number = there.get(field.name.casefold())
        if number is None:
            columns.append(pa.nulls(rows.num_rows, field.type))
            continue
        column = rows.column(number)
        if not column.type.equals(field.type):
            try:
                column = column.cast(field.type)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise SchemaMismatchError(
                    f"the column {field.name!r} has a value that {field.type} cannot hold: {error}", hint="drop those rows, or cast them"
                ) from None
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def check_columns(names: Sequence[str], schema: pa.Schema, also: Sequence[str] = ()) -> None:
    """Are these columns, matched by name whatever its case, enough for a table, and all of them its own or among ``also``?

    Raises:
        SchemaMismatchError: one is not, or one is missing that may not be null.
    """
    known = {field.name.casefold() for field in schema} | {name.casefold() for name in also}
    given = {name.casefold() for name in names}
    for name in names:
        if name.casefold() not in known:
            raise SchemaMismatchError(f"the table has no column {name!r}", hint=f"columns are {', '.join(schema.names)}; see df.drop")
    for field in schema:
        if not field.nullable and field.name.casefold() not in given:
            raise SchemaMismatchError(f"the column {field.name!r} is missing, and may not be null", hint="add it, e.g. with df.withColumn")


def same_columns(given: StructType, expected: StructType) -> list[str]:
    """The columns of ``given``, by name, in its order, if each is one of ``expected``'s with the same type.

    Raises:
        SchemaMismatchError: one is not.
    """
    there = {field.name.casefold(): field for field in expected.fields}
    chosen = []
    for field in given.fields:
        mine = there.get(field.name.casefold())
        if mine is None or mine.dataType != field.dataType:
            what = "is not in the table" if mine is None else f"is {mine.dataType.simpleString()}, not {field.dataType.simpleString()}"
            raise SchemaMismatchError(
                f"the column {field.name!r} {what}",
                hint="leave out schema(…), and choose columns by option; or the table changed: load again",
            )
        chosen.append(mine.name)
    return chosen
