"""Keys: one total order over them, exact, and the newest row of each.

Owns: how keys compare, finding one among others, the rows that puts come to. Does not own: where
rows are kept (memtable, run) or which source of a read is newer (query).

The order, everywhere the same, of runs, merges and ranges: numbers, decimals, dates and times by
value, false before true, text by its UTF-8 bytes, bytes as they stand, shorter before longer, and
several columns one after the other. It does not change when a column's type is widened.

For work on whole columns keys take one of two forms. One column that fits 64 bits, or several that
fit together, are numbers in numpy. Everything else is bytes whose own order is the order of the
keys: numbers big-endian with the sign flipped, text and bytes in front of another column ended by
00 00 with 00 inside as 00 FF. Two different keys never come to the same bytes: nothing is hashed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as types

from headgate.schema import RowRules, as_now
from headgate.wal.entry import Put

Offsets: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]

_DENSE = 4  # a table by direct address may be this much larger than the keys
_SEARCH_COST = 50
_TABLE_LEAST = 1 << 21
_TAKE_BYTES_MAX = 1 << 30  # text columns count their bytes in 31 bits


class Keys:
    """The keys of some rows, in the rows' order. Never changes."""

    __slots__ = ()

    def __len__(self) -> int:
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        raise NotImplementedError

    def part(self, start: int, stop: int) -> Keys:
        """Some that follow each other; nothing is copied."""
        raise NotImplementedError

    def take(self, offsets: Offsets) -> Keys:
        raise NotImplementedError

    def joined(self, *others: Keys) -> Keys:
        """These and then others, all of one table."""
        raise NotImplementedError

    def owned(self) -> Keys:
        """The same in memory of their own: what they were cut from may go."""
        raise NotImplementedError

    def order(self) -> Offsets:
        """The offsets in key order; equal keys in their own order."""
        raise NotImplementedError

    def same_as_next(self) -> Bools:
        """For each but the last, if the next one is equal."""
        raise NotImplementedError

    def is_ascending(self) -> bool:
        """Each is less than the next, so all are different."""
        raise NotImplementedError

    def positions(self, others: Keys) -> Offsets:
        """Where others would stand among these, which ascend: how many of these are less than each."""
        raise NotImplementedError

    def equal(self, others: Keys) -> Bools:
        """One by one."""
        raise NotImplementedError

    def find(self, others: Keys) -> Offsets:
        """Where others are among these, which ascend; -1 for those that are not."""
        if not len(self) or not len(others):
            return np.full(len(others), -1, np.int64)
        at = self.positions(others)
        inside = np.minimum(at, len(self) - 1)
        return np.where((at < len(self)) & self.take(inside).equal(others), at, -1)

    def overlap(self, others: Keys) -> Offsets:
        """The offsets, ascending, of these that are also among others; both ascend."""
        if not len(self) or not len(others):
            return np.zeros(0, np.int64)
        first, last = self.positions(others.part(0, 1))[0], self.positions(others.part(len(others) - 1, len(others)))[0]
        mine = self.part(first, min(int(last) + 1, len(self)))
        if len(mine) < len(others):  # search the fewer among the more
            return np.asarray(np.flatnonzero(others.find(mine) >= 0) + first)
        found = mine.find(others)
        return np.asarray(found[found >= 0] + first)

    def newest(self) -> Offsets | None:
        """The offsets of the last row of each key, in key order. None: all rows, as they stand."""
        if len(self) <= 1 or self.is_ascending():
            return None
        order = self.order()
        return np.asarray(order[np.append(~self.take(order).same_as_next(), True)])


class NumberKeys(Keys):
    """Keys that fit 64 bits: int64, or uint64 where that is what orders them."""

    __slots__ = ("_table", "values")

    def __init__(self, values: npt.NDArray[Any]) -> None:
        self.values = values
        self._table: tuple[int, Bools] | None = None

    def __len__(self) -> int:
        return len(self.values)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def part(self, start: int, stop: int) -> NumberKeys:
        return NumberKeys(self.values[start:stop])

    def take(self, offsets: Offsets) -> NumberKeys:
        return NumberKeys(self.values[offsets])

    def joined(self, *others: Keys) -> NumberKeys:
        return NumberKeys(np.concatenate([self.values, *(other.values for other in others if isinstance(other, NumberKeys))]))

    def owned(self) -> NumberKeys:
        return NumberKeys(self.values.copy())

    def order(self) -> Offsets:
        return np.argsort(self.values, kind="stable")

    def same_as_next(self) -> Bools:
        return np.asarray(self.values[1:] == self.values[:-1])

    def is_ascending(self) -> bool:
        return bool((self.values[1:] > self.values[:-1]).all())

    def positions(self, others: Keys) -> Offsets:
        assert isinstance(others, NumberKeys)
        return np.searchsorted(self.values, others.values)

    def equal(self, others: Keys) -> Bools:
        assert isinstance(others, NumberKeys)
        return np.asarray(self.values == others.values)

    def overlap(self, others: Keys) -> Offsets:
        assert isinstance(others, NumberKeys)
        if not len(self) or not len(others):
            return np.zeros(0, np.int64)
        wanted = others.values
        first, last = np.searchsorted(self.values, wanted[[0, -1]])
        mine = self.values[first : last + 1]
        if len(mine) and mine[-1] > wanted[-1]:
            mine = mine[:-1]
        table = others._by_address() if len(mine) <= _SEARCH_COST * len(wanted) else None
        if table is None:
            return super().overlap(others)
        least, there = table
        return np.asarray(np.flatnonzero(there[_places(mine, least)]) + first)

    def _by_address(self) -> tuple[int, Bools] | None:
        """For each number from the least of these to the greatest, if it is one of them. None: they are too far apart.

        Looking up each of many in it costs about a fiftieth of a search among them. It is kept for the next ones.
        """
        if self._table is None:
            least, most = int(self.values[0]), int(self.values[-1])
            if most - least >= max(_DENSE * len(self), _TABLE_LEAST):
                return None
            if 0 < least <= most - least:
                least = 0
            there = np.zeros(most - least + 1, np.bool_)
            there[_places(self.values, least)] = True
            self._table = least, there
        return self._table

    def newest(self) -> Offsets | None:
        values = self.values
        if len(values) <= 1 or self.is_ascending():
            return None
        least, most = int(values.min()), int(values.max())
        if most - least < _DENSE * len(values):
            last = np.full(most - least + 1, -1, np.int64)
            last[_places(values, least)] = np.arange(len(values))  # of equal ones the last stays
            return last[last >= 0]
        order = np.argsort(values)  # not stable, and twice as fast: the last of equal ones is the greatest offset
        ordered = values[order]
        starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
        return np.maximum.reduceat(order, starts) if len(starts) < len(order) else order


def _places(values: npt.NDArray[Any], least: int) -> Offsets:
    return (values - values.dtype.type(least) if least else values).astype(np.int64, copy=False)


class ByteKeys(Keys):
    """All other keys: bytes (``large_binary``) that are ordered as the keys are."""

    __slots__ = ("values",)

    def __init__(self, values: pa.LargeBinaryArray) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes)

    def part(self, start: int, stop: int) -> ByteKeys:
        return ByteKeys(self.values.slice(start, max(0, stop - start)))

    def take(self, offsets: Offsets) -> ByteKeys:
        return ByteKeys(self.values.take(pa.array(offsets)))

    def joined(self, *others: Keys) -> ByteKeys:
        return ByteKeys(pa.concat_arrays([self.values, *(other.values for other in others if isinstance(other, ByteKeys))]))

    def owned(self) -> ByteKeys:
        return ByteKeys(pa.concat_arrays([self.values, self.values.slice(0, 0)]))

    def order(self) -> Offsets:
        """By eight bytes of each first, those that differ soonest; the few that are equal so far, by all of them."""
        prefixes = self._prefixes()
        order = np.argsort(prefixes, kind="stable")
        ordered = prefixes[order]
        same = ordered[1:] == ordered[:-1]
        tied = np.flatnonzero(np.append(same, False) | np.append(False, same))
        if len(tied):
            rows = np.sort(order[tied])
            order[tied] = rows[pc.sort_indices(self.values.take(pa.array(rows))).to_numpy()]
        return order

    def _prefixes(self) -> npt.NDArray[np.uint64]:
        """Eight bytes of each, from where not all are alike, as numbers of the same order; too short ones end in zeros."""
        count = len(self.values)
        bounds = pc.min_max(self.values)
        least, most = bounds["min"].as_py() or b"", bounds["max"].as_py() or b""
        alike = next((i for i, (a, b) in enumerate(zip(least, most, strict=False)) if a != b), min(len(least), len(most)))
        _, ends_buffer, data = self.values.buffers()
        ends = np.frombuffer(ends_buffer, np.int64)[self.values.offset : self.values.offset + count + 1]
        if count == 0 or data is None or ends[-1] == ends[0]:
            return np.zeros(count, np.uint64)
        padded = np.append(np.frombuffer(data, np.uint8)[ends[0] : ends[-1]], np.zeros(8, np.uint8))
        words = np.ndarray(len(padded) - 7, ">u8", padded, strides=(1,))
        starts = np.minimum(ends[:-1] + alike, ends[1:]) - ends[0]
        have = np.minimum(ends[1:] - ends[0] - starts, 8).astype(np.uint64)
        found: npt.NDArray[np.uint64] = words[starts].astype(np.uint64)
        drop = (np.uint64(8) - have) * np.uint64(8)
        kept = np.where(have == 0, np.uint64(0), ~np.uint64(0) << np.minimum(drop, np.uint64(63)))
        return found & kept

    def same_as_next(self) -> Bools:
        return _bools(pc.equal(self.values.slice(1), self.values.slice(0, max(0, len(self.values) - 1))))

    def is_ascending(self) -> bool:
        return bool(_bools(pc.greater(self.values.slice(1), self.values.slice(0, max(0, len(self.values) - 1)))).all())

    def positions(self, others: Keys) -> Offsets:
        assert isinstance(others, ByteKeys)
        if hasattr(pc, "search_sorted"):
            return np.asarray(pc.search_sorted(self.values, others.values)).astype(np.int64)
        return _positions(self.values, others.values)

    def equal(self, others: Keys) -> Bools:
        assert isinstance(others, ByteKeys)
        return _bools(pc.equal(self.values, others.values))


def _bools(array: pa.BooleanArray) -> Bools:
    return np.asarray(array.to_numpy(zero_copy_only=False), np.bool_)


def _positions(values: pa.Array, wanted: pa.Array) -> Offsets:
    """Search by halves, all at once: for versions of Arrow that cannot do it."""
    low, high = np.zeros(len(wanted), np.int64), np.full(len(wanted), len(values), np.int64)
    for _ in range(len(values).bit_length()):
        middle = (low + high) // 2
        inside = np.minimum(middle, max(0, len(values) - 1))
        less = _bools(pc.less(values.take(pa.array(inside)), wanted)) & (low < high)
        low, high = np.where(less, middle + 1, low), np.where(less, high, middle)
    return low


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

    def keys(self, columns: Sequence[pa.Array]) -> Keys:
        """Of the key columns of some rows, in the key's order, with the types of now."""
        if self._is_one_number:
            return NumberKeys(_number(columns[0]))
        if self._total is not None and len(columns) > 1:
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
        return self.keys([_whole(rows.column(name)) for name in self.names])

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


def _whole(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    if not isinstance(column, pa.ChunkedArray):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    if types.is_string(column.type) or types.is_binary(column.type):
        column = column.cast(pa.large_binary())  # more than 2 GB of text do not fit one array of it
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


@dataclass(frozen=True)
class RunRows:
    """What puts come to: the newest row of each key, sorted by key; without a key all rows, in order."""

    _all: pa.Table
    _order: Offsets | None = None
    """Which rows, in which order; None: all, as they stand."""
    deleted: Bools | None = None
    """Which rows are tombstones. None: none is."""

    @property
    def num_rows(self) -> int:
        return self._all.num_rows if self._order is None else len(self._order)

    @property
    def schema(self) -> pa.Schema:
        """The log's, of now."""
        return self._all.schema

    @property
    def tombstones(self) -> int:
        return 0 if self.deleted is None else int(self.deleted.sum())

    @property
    def rows(self) -> pa.Table:
        """With the columns of the log's schema of now; those of tombstones are null but for the key."""
        return self._all if self._order is None else _taken(self._all, self._order)

    def batches(self, batch_rows: int) -> Iterator[pa.RecordBatch]:
        """The same, a batch at a time: thousands of small puts become few batches, and no second copy of all is held."""
        if self._order is None or self._all.nbytes > _TAKE_BYTES_MAX:
            rows = self.rows
            for start in range(0, rows.num_rows, batch_rows):
                yield from rows.slice(start, batch_rows).combine_chunks().to_batches()
            return
        whole = self._all.combine_chunks()
        for start in range(0, len(self._order), batch_rows):
            yield from whole.take(pa.array(self._order[start : start + batch_rows])).to_batches()


def newest_rows(puts: Sequence[Put], rules: RowRules) -> RunRows:
    """The newest row of each key of puts in the order they came; within a put later rows are newer too.

    Rows that are in order already are not copied.
    """
    rows = rows_of(puts, rules, rules.schema.names)
    if not rules.key or not rows.num_rows:
        return RunRows(rows)
    newest = KeyOrder(rules).of(rows).newest()
    deleted = deleted_of(puts)
    if newest is None:
        return RunRows(rows, None, deleted)
    if deleted is not None:
        deleted = deleted[newest]
    return RunRows(rows, newest, deleted if deleted is not None and deleted.any() else None)


def rows_of(puts: Sequence[Put], rules: RowRules, columns: Sequence[str]) -> pa.Table:
    """All rows of puts, in order, with these columns of the table of now."""
    tables = []
    start = 0
    while start < len(puts):  # those that were written alike are taken together
        then = puts[start].rows.schema
        stop = start + 1
        while stop < len(puts) and puts[stop].rows.schema.equals(then, check_metadata=True):
            stop += 1
        tables.append(_aligned(pa.Table.from_batches([put.rows for put in puts[start:stop]]), rules, columns))
        start = stop
    schema = pa.schema([rules.log_schema.field(name) for name in columns])
    return pa.concat_tables(tables) if tables else schema.empty_table()


def deleted_of(puts: Sequence[Put]) -> Bools | None:
    """Which of the rows are tombstones. None: none is."""
    if all(put.op == "upsert" for put in puts):
        return None
    counts = [put.rows.num_rows for put in puts]
    return np.repeat(np.array([put.op == "delete" for put in puts]), counts)


def _aligned(rows: pa.Table, rules: RowRules, columns: Sequence[str]) -> pa.Table:
    schema = pa.schema([rules.log_schema.field(name) for name in columns])
    names = rules.names_in(rows.schema)
    then = [names.get(rules.field_ids[rules.schema.get_field_index(name)]) for name in columns]
    if all(name is not None and rows.schema.get_field_index(name) >= 0 for name in then):
        same = rows.select(then)
        if same.schema.types == schema.types:
            return pa.Table.from_arrays(same.columns, schema=schema)
    batches = [as_now(batch, names, rules, columns) for batch in rows.combine_chunks().to_batches()]
    return pa.Table.from_batches([pa.RecordBatch.from_arrays(batch.columns, schema=schema) for batch in batches], schema)


def _taken(rows: pa.Table, offsets: Offsets) -> pa.Table:
    if rows.nbytes <= _TAKE_BYTES_MAX:
        return rows.combine_chunks().take(pa.array(offsets))
    columns = []
    for column in rows.columns:
        kind = column.type
        wide = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}.get(kind, kind)
        taken = column.cast(wide).combine_chunks().take(pa.array(offsets))
        columns.append(pa.chunked_array(_narrowed(_whole(taken), kind), kind))
    return pa.Table.from_arrays(columns, schema=rows.schema)


def _narrowed(column: pa.Array, kind: pa.DataType) -> list[pa.Array]:
    """As ``kind``, in as many pieces as it takes."""
    if column.nbytes <= _TAKE_BYTES_MAX or len(column) <= 1:
        return [column.cast(kind)]
    half = len(column) // 2
    return _narrowed(column.slice(0, half), kind) + _narrowed(column.slice(half), kind)
