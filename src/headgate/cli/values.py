"""Values that people and files write, as the values of a column.

Owns: what a text or a JSON value means to a column of a given type. Does not own: where they come
from (files), the way back (rows).

It takes what ``rows`` writes: bytes are base64, times and dates text, decimals text or numbers,
durations whole numbers in their unit, and "NaN", "Infinity" and "-Infinity" are floats. Nothing is
guessed from the values: the column's type alone decides, so the same text means the same in every row.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as types

from headgate import InvalidInputError
from headgate.cli.type_names import spell

_FLOATS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
_UNREADABLE = (pa.ArrowException, TypeError, ValueError, OverflowError, RecursionError)


class _Number(float):
    """A JSON number with a point, and how it was written: a decimal wants every digit."""

    text: str

    def __new__(cls, text: str) -> _Number:
        number = super().__new__(cls, text)
        number.text = text
        return number


def parse_json(text: str | bytes) -> Any:
    """A JSON value whose numbers lose nothing."""
    return json.loads(text, parse_float=_Number)


# -- from text


def from_text(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    """A column of text as values of a type; nulls stay. Raises what Arrow or Python raises."""
    if _is_text(kind):
        return texts.cast(kind)
    if types.is_nested(kind):
        return from_json([None if text is None else parse_json(text) for text in texts.to_pylist()], kind)
    if _is_bytes(kind):
        return pa.array([None if text is None else _bytes(text) for text in texts.to_pylist()], kind)
    texts = pc.utf8_trim_whitespace(texts)
    if types.is_time(kind):  # Arrow reads times only as part of a day
        return pc.binary_join_element_wise("1970-01-01 ", texts, "").cast(pa.timestamp(kind.unit)).cast(kind)
    if types.is_duration(kind):
        return texts.cast(pa.int64()).cast(kind)
    if types.is_null(kind):
        if texts.null_count < len(texts):
            raise ValueError("the column holds nothing but nulls")
        return pa.nulls(len(texts))
    return texts.cast(kind)


# -- from JSON


def from_json(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """JSON values, as ``parse_json`` gives them, as values of a type. Raises what Arrow or Python raises."""
    return _cast(pa.array([_plain(value, kind) for value in values], _plain_type(kind)), kind)


def _cast(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Part by part: where a struct is null its parts are not, and Arrow's own cast would try to read what stands there."""
    if array.type.equals(kind):
        return array
    if types.is_struct(kind):
        parts = [_cast(part, kind.field(i).type) for i, part in enumerate(array.flatten())]
        return pa.StructArray.from_arrays(parts, fields=[kind.field(i) for i in range(kind.num_fields)], mask=array.is_null())
    if types.is_list(kind) or types.is_large_list(kind):
        make = pa.ListArray if types.is_list(kind) else pa.LargeListArray
        offsets = array.offsets.cast(pa.int32() if types.is_list(kind) else pa.int64())
        return make.from_arrays(offsets, _cast(array.values, kind.value_type), type=kind, mask=array.is_null())
    return from_text(array, kind) if types.is_string(array.type) else array.cast(kind)


def _plain(value: Any, kind: pa.DataType) -> Any:
    """What Arrow can take for a value of ``_plain_type``."""
    if value is None:
        return None
    if types.is_struct(kind):
        if not isinstance(value, dict):
            raise TypeError(f"{_told(value)} is no object")
        children = {kind.field(i).name: kind.field(i).type for i in range(kind.num_fields)}
        unknown = next((name for name in value if name not in children), None)
        if unknown is not None:
            raise ValueError(f"there is no field {unknown!r}")
        return {name: _plain(value.get(name), child) for name, child in children.items()}
    if types.is_nested(kind):
        if not isinstance(value, list):
            raise TypeError(f"{_told(value)} is no list")
        return [_plain(item, kind.value_type) for item in value]
    wanted, convert = _leaf(kind)
    if isinstance(value, bool) is not (wanted is bool) or not isinstance(value, wanted):
        raise TypeError(f"{_told(value)} is no {spell(kind)}")
    return convert(value)


def _leaf(kind: pa.DataType) -> tuple[type | tuple[type, ...], Callable[[Any], Any]]:
    """Which JSON values a plain type takes, and what is made of them first."""
    if types.is_boolean(kind):
        return bool, bool
    if types.is_integer(kind) or types.is_duration(kind):
        return int, int  # not floats: Arrow would cut off what stands behind the point
    if types.is_floating(kind):
        return (int, float, str), lambda value: _FLOATS[value] if isinstance(value, str) else float(value)
    if types.is_decimal(kind):
        return (int, float, str), lambda value: getattr(value, "text", None) or str(value)
    if _is_bytes(kind):
        return str, _bytes
    if types.is_time(kind):
        return str, lambda value: from_text(pa.array([value], pa.string()), kind)[0].value
    return str, str


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """What values are taken as before they are cast; parts may be null here, and the table checks later whether they may."""
    if types.is_decimal(kind) or types.is_date(kind) or types.is_timestamp(kind):
        return pa.string()
    if types.is_time(kind):
        return pa.int32() if types.is_time32(kind) else pa.int64()
    if types.is_duration(kind):
        return pa.int64()
    if types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(_plain_type(kind.value_type)), kind.list_size)
    if types.is_list(kind) or types.is_large_list(kind):
        item = kind.value_field.with_type(_plain_type(kind.value_type))
        return pa.list_(item) if types.is_list(kind) else pa.large_list(item)
    if types.is_struct(kind):
        return pa.struct([kind.field(i).with_type(_plain_type(kind.field(i).type)) for i in range(kind.num_fields)])
    return kind


# -- from JSON, by Arrow's own reader


def arrow_schema(schema: pa.Schema) -> pa.Schema | None:
    """What Arrow's JSON reader is asked for, so that ``from_arrow_json`` can make the columns of it. None: it cannot."""
    kinds = [pa.string() if _is_bytes(f.type) or types.is_time(f.type) else _arrow_type(f.type) for f in schema]
    return None if None in kinds else pa.schema(list(zip(schema.names, kinds, strict=True)))


def _arrow_type(kind: pa.DataType) -> pa.DataType | None:
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_float32(kind) or types.is_float64(kind):
        return kind
    if _is_text(kind) or types.is_decimal(kind) or types.is_date(kind) or types.is_timestamp(kind):
        return pa.string()
    if types.is_duration(kind):
        return pa.int64()
    if types.is_struct(kind):
        children = [(kind.field(i).name, _arrow_type(kind.field(i).type)) for i in range(kind.num_fields)]
        return None if any(child is None for _, child in children) else pa.struct(children)
    if types.is_nested(kind):
        inner = _arrow_type(kind.value_type)
        return None if inner is None else pa.list_(inner)
    return None


def from_arrow_json(chunk: bytes, schema: pa.Schema, asked: pa.Schema) -> pa.Table:
    """Lines of JSON as columns, all at once. Raises if anything is out of the ordinary, and then it is done value by value."""
    import pyarrow.json as arrow_json  # only those who need it pay for loading it

    found = arrow_json.read_json(
        io.BytesIO(chunk),
        arrow_json.ReadOptions(block_size=len(chunk) + 1),
        arrow_json.ParseOptions(explicit_schema=asked, unexpected_field_behavior="error"),
    )
    columns = []
    for field in schema:
        columns.append(_cast(found.column(field.name).combine_chunks(), field.type))
    return pa.table(columns, schema=pa.schema([pa.field(f.name, f.type) for f in schema]))


# -- what cannot be read


def read_column(values: Sequence[Any] | pa.Array, field: pa.Field, where: Callable[[int], str]) -> pa.Array:
    """A column of text (an Arrow array) or of JSON values.

    Raises:
        InvalidInputError: it names the first value that cannot be; ``where`` says where the value with that offset stands.
    """
    convert: Callable[[Any, pa.DataType], pa.Array] = from_text if isinstance(values, pa.Array) else from_json
    try:
        return convert(values, field.type)
    except _UNREADABLE:
        pass  # which of them?
    start, count = 0, len(values)
    while count > 1:
        half = count // 2
        try:
            convert(values[start : start + half], field.type)
            start, count = start + half, count - half
        except _UNREADABLE:
            count = half
    try:
        convert(values[start : start + 1], field.type)
        why = "together with its neighbours"
    except _UNREADABLE as error:
        why = (str(error) or type(error).__name__).splitlines()[0]
    raise InvalidInputError(
        f"{where(start)}, column {field.name!r}: {why}", hint=f"the column is {spell(field.type)}{_example(field.type)}"
    )


def _example(kind: pa.DataType) -> str:
    if types.is_timestamp(kind):
        return "; write 2024-02-29T12:00:00" + ("Z, or another offset" if kind.tz else ", without an offset")
    if _is_bytes(kind):
        return "; bytes are written in base64"
    if types.is_duration(kind):
        return f"; write whole numbers of {kind.unit}"
    if types.is_nested(kind):
        return "; write it as JSON"
    return ""


def _is_text(kind: pa.DataType) -> bool:
    return bool(types.is_string(kind) or types.is_large_string(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind))


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"{_told(text)} is not base64: {error}") from None


def _told(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:59] + "…"
