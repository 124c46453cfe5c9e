"""Rows as JSON values, and as one line for people.

JSON has no bytes, times or exact decimals: bytes become base64, times and dates ISO-like text,
decimals text, durations whole numbers in their unit, and floats that are no number text.
"""

from __future__ import annotations

import base64
import math
from typing import Any

import pyarrow as pa
import pyarrow.types as types

_VALUE_CHARACTERS_MAX = 60


def json_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Every row as a dict of JSON values."""
    columns = [_plain_column(column).to_pylist() for column in batch.columns]
    return [{name: _plain(value) for name, value in zip(batch.schema.names, row)} for row in zip(*columns)]


def one_line(batch: pa.RecordBatch) -> str:
    """The first row, and how many there are besides."""
    first = " ".join(f"{name}={_short(value)}" for name, value in json_rows(batch.slice(0, 1))[0].items())
    return f"{first} (+{batch.num_rows - 1:,} rows)" if batch.num_rows > 1 else first


def _short(value: Any) -> str:
    text = "null" if value is None else str(value)
    if not text.isprintable():  # a line stays a line, and nothing in a row commands the terminal
        text = text.encode("unicode_escape").decode()
    return text if len(text) <= _VALUE_CHARACTERS_MAX else text[: _VALUE_CHARACTERS_MAX - 1] + "…"


def _plain_column(column: pa.Array) -> pa.Array:
    kind = _plain_type(column.type)
    return column if kind.equals(column.type) else column.cast(kind)


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """What a type is cast to before it becomes Python: nanoseconds, for one, have no Python form."""
    if types.is_timestamp(kind) or types.is_date(kind) or types.is_time(kind) or types.is_decimal(kind):
        return pa.string()
    if types.is_duration(kind):
        return pa.int64()
    if types.is_fixed_size_list(kind):
        return pa.list_(_plain_type(kind.value_type), kind.list_size)
    if types.is_list(kind) or types.is_large_list(kind):
        inner = _plain_type(kind.value_type)
        return pa.list_(inner) if types.is_list(kind) else pa.large_list(inner)
    if types.is_struct(kind):
        return pa.struct([pa.field(kind.field(i).name, _plain_type(kind.field(i).type)) for i in range(kind.num_fields)])
    return kind


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value
