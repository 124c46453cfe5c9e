"""Column types as text, and back: what a schema file says, and what `status --json` prints.

Owns: one spelling per type, which reads back as that type. Some other common spellings are
understood too, among them those that pyarrow prints.

    bool  int8 int16 int32 int64  uint8 uint16 uint32 uint64  float16 float32 float64
    string  large_string  binary  large_binary  fixed_size_binary[16]
    date32  date64  time32[s] time32[ms] time64[us] time64[ns]
    timestamp[s|ms|us|ns]  timestamp[us, UTC]  duration[s|ms|us|ns]
    decimal128(38, 9)  decimal256(76, 9)
    list<T>  large_list<T>  fixed_size_list<T, 3>  struct<a: T, b: T not null>
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.types as types

from headgate import InvalidInputError

KNOWN = (
    "bool, int8 … int64, uint8 … uint64, float16, float32, float64, string, large_string, binary, large_binary, fixed_size_binary[n], "
    "date32, date64, time32[s|ms], time64[us|ns], timestamp[s|ms|us|ns], timestamp[us, UTC], duration[s|ms|us|ns], decimal128(p, s), "
    "decimal256(p, s), list<T>, large_list<T>, fixed_size_list<T, n>, struct<name: T, …>"
)

_PLAIN: dict[str, pa.DataType] = {
    "null": pa.null(),
    "bool": pa.bool_(),
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "uint8": pa.uint8(),
    "uint16": pa.uint16(),
    "uint32": pa.uint32(),
    "uint64": pa.uint64(),
    "float16": pa.float16(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "string": pa.string(),
    "large_string": pa.large_string(),
    "binary": pa.binary(),
    "large_binary": pa.large_binary(),
    "date32": pa.date32(),
    "date64": pa.date64(),
}
_ALIASES = {
    "boolean": "bool",
    "halffloat": "float16",
    "float": "float32",
    "double": "float64",
    "str": "string",
    "utf8": "string",
    "large_utf8": "large_string",
    "bytes": "binary",
    "date32[day]": "date32",
    "date64[ms]": "date64",
}
_SPELLED = {kind: name for name, kind in _PLAIN.items()}
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def spell(kind: pa.DataType) -> str:
    """The text of a type, which ``parse`` reads back."""
    if kind in _SPELLED:
        return _SPELLED[kind]
    if types.is_timestamp(kind):
        return f"timestamp[{kind.unit}, {kind.tz}]" if kind.tz else f"timestamp[{kind.unit}]"
    if types.is_time32(kind) or types.is_time64(kind) or types.is_duration(kind):
        return str(kind)
    if types.is_decimal(kind):
        return f"decimal{kind.bit_width}({kind.precision}, {kind.scale})"
    if types.is_fixed_size_binary(kind):
        return f"fixed_size_binary[{kind.byte_width}]"
    if types.is_fixed_size_list(kind):
        return f"fixed_size_list<{_spell_child(kind.value_field)}, {kind.list_size}>"
    if types.is_list(kind) or types.is_large_list(kind):
        return f"{'list' if types.is_list(kind) else 'large_list'}<{_spell_child(kind.value_field)}>"
    if types.is_struct(kind):
        children = [kind.field(i) for i in range(kind.num_fields)]
        named = (f"{c.name if _PLAIN_NAME.fullmatch(c.name) else json.dumps(c.name)}: {_spell_child(c)}" for c in children)
        return f"struct<{', '.join(named)}>"
    return str(kind)


def _spell_child(child: pa.Field) -> str:
    return spell(child.type) + ("" if child.nullable else " not null")


def parse(text: str) -> pa.DataType:
    """The type that a text names.

    Raises:
        InvalidInputError: it names none; the hint lists those there are.
    """
    return _Parser(text).whole()


class _Parser:
    """Recursive descent over one type's text."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def whole(self) -> pa.DataType:
        kind = self._type()
        if self._rest():
            self._fail()
        return kind

    def _rest(self) -> str:
        return self._text[self._at :].lstrip()

    def _fail(self) -> NoReturn:
        raise InvalidInputError(f"{self._text!r} is not a type", hint=f"types are {KNOWN}")

    def _take(self, pattern: str) -> re.Match[str] | None:
        match = re.compile(r"\s*" + pattern).match(self._text, self._at)
        if match is not None:
            self._at = match.end()
        return match

    def _need(self, pattern: str) -> re.Match[str]:
        return self._take(pattern) or self._fail()

    def _type(self) -> pa.DataType:
        name = self._need(r"(date32\[day\]|date64\[ms\]|[A-Za-z_][A-Za-z0-9_]*)")[1].lower()
        name = _ALIASES.get(name, name)
        if name in _PLAIN:
            return _PLAIN[name]
        try:
            return self._made(name)
        except (pa.ArrowException, ValueError, OverflowError) as error:  # for example a precision that is too large
            if isinstance(error, InvalidInputError):
                raise
            raise InvalidInputError(f"{self._text!r} is not a type: {error}", hint=f"types are {KNOWN}") from None

    def _made(self, name: str) -> pa.DataType:
        units: dict[str, Callable[[str], Any]] = {"time32": pa.time32, "time64": pa.time64, "duration": pa.duration}
        if name in units:
            return units[name](self._need(r"\[\s*(s|ms|us|ns)\s*\]")[1])
        if name == "timestamp":
            inside = self._need(r"\[\s*(s|ms|us|ns)\s*(?:,\s*(?:tz=)?\s*([^\],\s]+)\s*)?\]")
            return pa.timestamp(inside[1], tz=inside[2])
        if name in ("decimal", "decimal128", "decimal256"):
            inside = self._need(r"\(\s*(\d+)\s*,\s*(-?\d+)\s*\)")
            return (pa.decimal256 if name == "decimal256" else pa.decimal128)(int(inside[1]), int(inside[2]))
        if name == "fixed_size_binary":
            return pa.binary(int(self._need(r"\[\s*(\d+)\s*\]")[1]))
        if name in ("list", "large_list"):
            self._need("<")
            item = self._item()
            self._need(">")
            return pa.list_(item) if name == "list" else pa.large_list(item)
        if name == "fixed_size_list":
            self._need("<")
            item = self._item()
            size = self._need(r",\s*(\d+)\s*>")[1] if not self._take(">") else self._need(r"\[\s*(\d+)\s*\]")[1]
            return pa.list_(item, int(size))
        if name == "struct":
            return pa.struct(self._children())
        return self._fail()

    def _item(self) -> pa.Field:
        self._take(r"(?:item|element)\s*:")
        return self._child("item")

    def _child(self, name: str) -> pa.Field:
        kind = self._type()
        return pa.field(name, kind, nullable=self._take(r"not\s+null\b") is None)

    def _children(self) -> list[pa.Field]:
        self._need("<")
        children = []
        while True:
            name = self._need(r'("(?:[^"\\]|\\.)*"|[^:<>,"\s]+)\s*:')[1]
            children.append(self._child(json.loads(name) if name.startswith('"') else name))
            if not self._take(","):
                break
        self._need(">")
        return children
