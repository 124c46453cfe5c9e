"""What puts come to: the newest row of each key.

Owns: which rows, in which order, with which columns. Does not own: how keys compare (form), when (flush).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from headgate.keys.form import Bools, Offsets
from headgate.keys.order import KeyOrder, whole_column
from headgate.schema import RowRules, as_now
from headgate.wal.entry import Put

_PIECE_ROWS_LEAST = 1 << 12
_TAKE_BYTES_MAX = 1 << 30  # text columns count their bytes in 31 bits


@dataclass(frozen=True)
class RunRows:
    """What puts come to: the newest row of each key, sorted by key; without a key all rows, in order."""

    _all: pa.Table
    _order: Offsets | None = None
    """Which rows, in which order; None: all, as they stand."""
    deleted: Bools | None = None
    """Which rows are tombstones. None: none is."""

    @property
    def is_sorted(self) -> bool:
        """Did they stand as they are wanted? Else each batch is gathered when it is asked for."""
        return self._order is None

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
        if self._order is None:
            rows = self._all
            for start in range(0, rows.num_rows, batch_rows):
                yield from rows.slice(start, batch_rows).combine_chunks().to_batches()
            return
        pieces = self._all.to_batches()
        if len(pieces) * _PIECE_ROWS_LEAST > self._all.num_rows:  # many small ones: one copy of all is cheaper
            pieces = self._all.combine_chunks().to_batches()
        starts = np.cumsum([0, *(piece.num_rows for piece in pieces)])
        for start in range(0, len(self._order), batch_rows):
            yield _gathered(pieces, starts, self._order[start : start + batch_rows])


def _gathered(pieces: Sequence[pa.RecordBatch], starts: Offsets, offsets: Offsets) -> pa.RecordBatch:
    """Rows of several batches, in the order of ``offsets``, without joining the batches first."""
    if len(pieces) == 1:
        return pieces[0].take(pa.array(offsets))
    which = np.searchsorted(starts, offsets, side="right") - 1
    by_piece = np.argsort(which, kind="stable")
    counts = np.bincount(which, minlength=len(pieces))
    local = (offsets - starts[which])[by_piece]
    parts, at = [], 0
    for number in np.flatnonzero(counts):
        count = int(counts[number])
        parts.append(pieces[int(number)].take(pa.array(local[at : at + count])))
        at += count
    rows = pa.concat_batches(parts)
    if (by_piece[1:] > by_piece[:-1]).all():
        return rows
    back = np.empty_like(by_piece)
    back[by_piece] = np.arange(len(by_piece))
    return rows.take(pa.array(back))


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
        then = puts[start].columns
        stop = start + 1
        while stop < len(puts) and ((now := puts[stop].columns) is then or now.equals(then, check_metadata=True)):
            stop += 1
        rows = pa.Table.from_batches([put.rows for put in puts[start:stop]])
        tables.append(_aligned(rows, rules.names_in(then), rules, columns))
        start = stop
    schema = pa.schema([rules.log_schema.field(name) for name in columns])
    return pa.concat_tables(tables) if tables else schema.empty_table()


def deleted_of(puts: Sequence[Put]) -> Bools | None:
    """Which of the rows are tombstones. None: none is."""
    if all(put.op == "upsert" for put in puts):
        return None
    counts = [put.rows.num_rows for put in puts]
    return np.repeat(np.array([put.op == "delete" for put in puts]), counts)


def _aligned(rows: pa.Table, names: Mapping[int, str], rules: RowRules, columns: Sequence[str]) -> pa.Table:
    schema = pa.schema([rules.log_schema.field(name) for name in columns])
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
        columns.append(pa.chunked_array(_narrowed(whole_column(taken), kind), kind))
    return pa.Table.from_arrays(columns, schema=rows.schema)


def _narrowed(column: pa.Array, kind: pa.DataType) -> list[pa.Array]:
    """As ``kind``, in as many pieces as it takes."""
    if column.nbytes <= _TAKE_BYTES_MAX or len(column) <= 1:
        return [column.cast(kind)]
    half = len(column) // 2
    return _narrowed(column.slice(0, half), kind) + _narrowed(column.slice(half), kind)
