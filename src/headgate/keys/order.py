"""How the columns of a table's key become keys of one form.

Owns: the encoding. Does not own: what is done with keys (form).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as types

from headgate.keys.columns import ColumnKeys
from headgate.keys.form import ByteKeys, Keys, NumberKeys
from headgate.schema import RowRules


class KeyOrder:
    """How a table's keys become ``Keys``."""

    def __init__(self, rules: RowRules) -> None:
        self.names = rules.key
        self.types = [rules.schema.field(name).type for name in rules.key]
        self._widths = [_width(kind) for kind in self.types]
        fixed = [width for width in self._widths if width is not None]
        self._total = sum(fixed) if len(fixed) == len(self._widths) else None
        kind = self.types[0] if len(self.types) == 1 else None
        self._is_one_number = kind is not None and _is_number(kind)
        self._are_numbers = (self._total or 0) > 8 and all(_is_number(kind) and not types.is_uint64(kind) for kind in self.types)

    def keys(self, columns: Sequence[pa.Array]) -> Keys:
        """Of the key columns of some rows, in the key's order, with the types of now."""
        if self._is_one_number:
            return NumberKeys(_number(columns[0]))
        if self._total is not None and len(columns) > 1:
            if self._are_numbers:
                return ColumnKeys([_number(column) for column in columns])
            matrix = np.concatenate([_fixed(column) for column in columns], axis=1)
            if self._total <= 8:
                padded = np.zeros((len(matrix), 8), np.uint8)
                padded[:, 8 - self._total :] = matrix
                return NumberKeys(padded.view(">u8").reshape(-1).astype(np.uint64))
            return ByteKeys(_from_matrix(matrix))
        if len(columns) == 1:
            return ByteKeys(_bytes(columns[0], self._widths[0]))
        parts = [_bytes(column, width) for column, width in zip(columns, self._widths, strict=True)]
        for number, width in enumerate(self._widths[:-1]):
            if width is None:
                escaped = pc.replace_substring(parts[number], pattern=b"\0", replacement=b"\0\xff")
                parts[number] = pc.binary_join_element_wise(escaped, _constant(b"\0\0"), _constant(b""))
        return ByteKeys(pc.binary_join_element_wise(*parts, _constant(b"")))

    def of(self, rows: pa.Table | pa.RecordBatch) -> Keys:
        """Of rows that have the key columns under their names of now."""
        return self.keys([whole_column(rows.column(name)) for name in self.names])

    def none(self) -> Keys:
        return self.keys([pa.array([], kind) for kind in self.types])


def _is_number(kind: pa.DataType) -> bool:
    return bool(types.is_integer(kind) or types.is_date(kind) or types.is_timestamp(kind) or types.is_boolean(kind))


def _width(kind: pa.DataType) -> int | None:
    """How many bytes every value takes in a key; None: they differ."""
    if types.is_boolean(kind):
        return 1
    if _is_number(kind) or types.is_decimal128(kind) or types.is_fixed_size_binary(kind):
        return int(kind.bit_width) // 8
    return None


def _number(column: pa.Array) -> npt.NDArray[Any]:
    """Any column of at most 64 bits as int64, or uint64, of the same order."""
    kind = column.type
    if types.is_uint64(kind):
        return np.asarray(column.to_numpy(zero_copy_only=False))
    if types.is_boolean(kind):
        column = column.cast(pa.int8())
    elif types.is_date(kind) or types.is_timestamp(kind):
        column = column.view(pa.int32() if kind.bit_width == 32 else pa.int64())
    return np.asarray(column.cast(pa.int64()).to_numpy(zero_copy_only=False))


def _fixed(column: pa.Array) -> npt.NDArray[np.uint8]:
    """A row of bytes for each value, of the same order."""
    kind, count = column.type, len(column)
    if types.is_decimal128(kind) or types.is_fixed_size_binary(kind):
        width = kind.bit_width // 8
        data = column.buffers()[1]
        if not count or not width or data is None:
            return np.zeros((count, width), np.uint8)
        stored = np.frombuffer(data, np.uint8)[column.offset * width : (column.offset + count) * width].reshape(count, width)
        if types.is_fixed_size_binary(kind):
            return stored
        flipped = stored[:, ::-1].copy()
        flipped[:, 0] ^= 0x80
        return flipped
    width = _width(kind) or 8
    values = _number(column)
    narrow = values.astype(f">u{width}")  # the low bytes: two's complement
    matrix = narrow.view(np.uint8).reshape(count, width)
    if not types.is_unsigned_integer(kind) and not types.is_boolean(kind):
        matrix[:, 0] ^= 0x80
    return matrix


def _from_matrix(matrix: npt.NDArray[np.uint8]) -> pa.LargeBinaryArray:
    count, width = matrix.shape
    ends = np.arange(count + 1, dtype=np.int64) * width
    data = np.ascontiguousarray(matrix)
    return pa.Array.from_buffers(pa.large_binary(), count, [None, pa.py_buffer(ends), pa.py_buffer(data.reshape(-1))])


def _bytes(column: pa.Array, width: int | None) -> pa.LargeBinaryArray:
    return column.cast(pa.large_binary()) if width is None else _from_matrix(_fixed(column))


def _constant(value: bytes) -> pa.Scalar:
    return pa.scalar(value, pa.large_binary())


def whole_column(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    if not isinstance(column, pa.ChunkedArray):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    if types.is_string(column.type) or types.is_binary(column.type):
        column = column.cast(pa.large_binary())  # more than 2 GB of text do not fit one array of it
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
