"""Rows as JSON values, as one line, and as a table that fits the terminal.

JSON has no bytes, times or exact decimals: bytes become base64, times and dates ISO-like text,
decimals text, durations whole numbers in their unit, and floats that are no number text.
"""

from __future__ import annotations

import base64
import json
import math
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.types as types
from rich.cells import cell_len
from rich.table import Table

from headgate.cli.output import screen

_VALUE_CHARACTERS_MAX = 60
_COLUMN_WIDTH_MIN = 8
_GAP = 2


def json_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Every row as a dict of JSON values."""
    columns = [_plain_column(column).to_pylist() for column in batch.columns]
    return [{name: _plain(value) for name, value in zip(batch.schema.names, row)} for row in zip(*columns)]


def one_line(batch: pa.RecordBatch) -> str:
    """The first row, and how many there are besides."""
    first = " ".join(f"{name}={_short(value)}" for name, value in json_rows(batch.slice(0, 1))[0].items())
    return f"{first} (+{batch.num_rows - 1:,} rows)" if batch.num_rows > 1 else first


def json_text(value: Any) -> str:
    """A JSON value on one line."""
    return json.dumps(value, ensure_ascii=False, default=str)


def print_rows(rows: pa.Table) -> None:
    """All rows as a table. On a terminal values are cut to its width, and columns that have no place in it are named below."""
    names = [_short(name) for name in rows.schema.names]
    columns = [
        [_short(row["x"]) for batch in rows.select([number]).rename_columns(["x"]).to_batches() for row in json_rows(batch)]
        for number in range(rows.num_columns)
    ]
    natural = [max(map(cell_len, [name, *texts])) for name, texts in zip(names, columns, strict=True)]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    widths = natural if width is None else fitting(natural, width)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for name, kind, wide in zip(names, rows.schema.types, widths, strict=False):
        is_number = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
        table.add_column(name, justify="right" if is_number else "left", no_wrap=True, overflow="ellipsis", width=wide)
    for row in zip(*columns[: len(widths)], strict=True):
        table.add_row(*row)
    out = screen()
    if width is None:
        out.width = sum(widths) + _GAP * len(widths) + 1
    out.print(table)
    if len(widths) < len(names):
        out.print(f"… and {len(names) - len(widths):,} more columns: {', '.join(names[len(widths) :])}")


def fitting(natural: Sequence[int], width: int) -> list[int]:
    """How wide columns become so that they fit beside each other: the widest give way first. Those at the end may have no place."""
    widths = list(natural)
    while len(widths) > 1 and sum(min(wide, _COLUMN_WIDTH_MIN) + _GAP for wide in widths) > width:
        widths.pop()
    excess = sum(wide + _GAP for wide in widths) - width
    while excess > 0 and (widest := max(widths)) > _COLUMN_WIDTH_MIN:
        second = max((wide for wide in widths if wide < widest), default=_COLUMN_WIDTH_MIN)
        at = [number for number, wide in enumerate(widths) if wide == widest]
        step = min(widest - max(second, _COLUMN_WIDTH_MIN), -(-excess // len(at))) or 1
        for number in at:
            widths[number] -= step
            excess -= step
    return widths


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json_text(value)
    if not text.isprintable():  # a line stays a line, and nothing in a row commands the terminal
        text = text.encode("unicode_escape").decode()
    return text if len(text) <= _VALUE_CHARACTERS_MAX else text[: _VALUE_CHARACTERS_MAX - 1] + "…"


def _plain_column(column: pa.Array) -> pa.Array:
    kind = plain_type(column.type)
    return column if kind.equals(column.type) else column.cast(kind)


def plain_type(kind: pa.DataType) -> pa.DataType:
    """What a type is cast to before it becomes Python: nanoseconds, for one, have no Python form."""
    if types.is_timestamp(kind) or types.is_date(kind) or types.is_time(kind) or types.is_decimal(kind):
        return pa.string()
    if types.is_duration(kind):
        return pa.int64()
    if types.is_fixed_size_list(kind):
        return pa.list_(plain_type(kind.value_type), kind.list_size)
    if types.is_list(kind) or types.is_large_list(kind):
        inner = plain_type(kind.value_type)
        return pa.list_(inner) if types.is_list(kind) else pa.large_list(inner)
    if types.is_struct(kind):
        return pa.struct([pa.field(kind.field(i).name, plain_type(kind.field(i).type)) for i in range(kind.num_fields)])
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
