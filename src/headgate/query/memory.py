"""Rows in memory, as reads see them: a MemTable's puts, and which row of each key is the newest.

Owns: the newest rows of puts, and what is kept of that for the next read. Does not own: rows
(memtable), what they hide elsewhere, put together (sources).

Rows stay where they are, in the order they came: only keys are sorted, and rows that do not count
are masked. What was learnt of the first puts of a MemTable holds for good, so the next read learns
of the puts since and no more. That comes in segments, each about half of the one before or less:
a small put costs little, and there are never many to look through.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Protocol

import numpy as np
import pyarrow as pa

from headgate.columnar.base import rows_without_columns
from headgate.keys import Bools, KeyOrder, Keys, Offsets, deleted_of, rows_of
from headgate.memtable import Fresh
from headgate.query.mask import Mask
from headgate.schema import RowRules
from headgate.wal.entry import Put

_tokens = count()
_SMALL_CHUNK_ROWS = 4096


class Target(Protocol):
    """Something older whose rows may be hidden: a run's index, or rows in memory."""

    @property
    def token(self) -> object: ...

    @property
    def rows(self) -> int: ...

    def overlap(self, keys: Keys) -> Offsets:
        """The offsets of the rows that have one of these keys, which ascend."""
        ...


class Segment:
    """Puts that follow each other: their rows in the order they came, and their keys sorted."""

    def __init__(self, puts: Sequence[Put], rules: RowRules, order: KeyOrder | None) -> None:
        self.puts, self._rules = puts, rules
        self.rows = sum(put.rows.num_rows for put in puts)
        self._columns: dict[str, pa.ChunkedArray] = {}
        self.deleted = deleted_of(puts)
        self.mask = Mask(self.rows)
        """Each key's last row, unless that deletes it."""
        if order is None:
            return
        keys = order.of(pa.table([self.column(name) for name in order.names], names=list(order.names)))
        self._newest = keys.newest()
        self.keys = keys if self._newest is None else keys.take(self._newest)
        if self._newest is not None:
            counts = np.zeros(self.rows, np.bool_)
            counts[self._newest] = True
            self.mask = Mask.of(counts if self.deleted is None else counts & ~self.deleted)
        elif self.deleted is not None:
            self.mask = Mask.of(~self.deleted)

    def column(self, name: str) -> pa.ChunkedArray:
        """One column of the table of now, kept: thousands of small puts are not joined twice."""
        known = self._columns.get(name)
        if known is None:
            known = rows_of(self.puts, self._rules, [name]).column(0)
            if known.num_chunks > 1 + self.rows // _SMALL_CHUNK_ROWS:
                known = pa.chunked_array([known.combine_chunks()] if self.rows else [], known.type)
            self._columns[name] = known
        return known

    def find(self, keys: Keys) -> Offsets:
        """The offset of each key's newest row, tombstones too; -1: not here."""
        at = self.keys.find(keys)
        if self._newest is None:
            return at
        return np.where(at >= 0, self._newest[at], -1)

    def offsets(self, start: int, stop: int) -> Offsets:
        """Where the newest rows of some keys that follow each other are."""
        return np.arange(start, stop) if self._newest is None else self._newest[start:stop]

    def overlap(self, keys: Keys) -> Offsets:
        """The offsets of the newest rows of those of these keys that are here; they ascend."""
        at = self.keys.overlap(keys)
        return at if self._newest is None else np.asarray(self._newest[at])


class FreshRows:
    """All of a MemTable's first puts as one source. Never changes, but for what it remembers."""

    def __init__(self, rules: RowRules, puts: Sequence[Put], segments: Sequence[Segment], masks: Sequence[Mask]) -> None:
        self.rules, self.puts = rules, puts
        self.segments, self._masks = tuple(segments), tuple(masks)
        self.token = next(_tokens)
        self.starts = np.cumsum([0, *(segment.rows for segment in segments)])
        self.rows = int(self.starts[-1])
        self.mask = Mask.joined([*masks]) if masks else Mask(0)
        self._hidden: dict[object, Offsets] = {}
        self._before: dict[object, Offsets] = {}
        self._since: Keys | None = None

    def grown(self, puts: Sequence[Put], order: KeyOrder | None) -> FreshRows:
        """These and the puts since; ``puts`` are all of them."""
        added = Segment(puts[len(self.puts) :], self.rules, order)
        segments, masks = list(self.segments), list(self._masks)
        last = added
        while segments and segments[-1].rows < 2 * last.rows:
            merged = segments.pop()
            masks.pop()
            last = Segment([*merged.puts, *last.puts], self.rules, order)
        if order is not None:
            masks = [mask.hiding(segment.overlap(added.keys)) for segment, mask in zip(segments, masks, strict=True)]
        rows = FreshRows(self.rules, puts, [*segments, last], [*masks, last.mask])
        if order is not None:
            rows._before, rows._since = self._hidden, added.keys
        return rows

    def hidden_in(self, target: Target) -> Offsets:
        """The offsets of a target's rows whose keys are here, in no order, some perhaps twice."""
        token = target.token
        known = self._hidden.get(token)
        if known is None:
            before = self._before.get(token)
            if before is not None and self._since is not None:
                parts = [before, target.overlap(self._since)]
            else:
                parts = [target.overlap(segment.keys) for segment in self.segments]
            known = np.concatenate(parts) if parts else np.zeros(0, np.int64)
            if len(known) > target.rows:
                known = np.unique(known)
            self._hidden[token] = known
        return known

    def find(self, keys: Keys) -> Offsets:
        """The offset of each key's newest row, tombstones too; -1: not here."""
        found = np.full(len(keys), -1, np.int64)
        for start, segment in zip(self.starts[:-1], self.segments, strict=True):  # oldest first: newer ones write over it
            at = segment.find(keys)
            found = np.where(at >= 0, at + start, found)
        return found

    def overlap(self, keys: Keys) -> Offsets:
        """The offsets of rows with these keys, which ascend: all that may count, at least."""
        parts = [segment.overlap(keys) + start for start, segment in zip(self.starts[:-1], self.segments, strict=True)]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def between(self, low: Keys | None, high: Keys | None) -> tuple[Keys, Offsets]:
        """The keys from ``low`` up to, not including, ``high``, each once, ascending, with the offsets of their newest rows."""
        keys, offsets = [], []
        for start, segment in zip(self.starts[:-1], self.segments, strict=True):
            first = 0 if low is None else int(segment.keys.positions(low)[0])
            last = len(segment.keys) if high is None else int(segment.keys.positions(high)[0])
            keys.append(segment.keys.part(first, max(first, last)))
            offsets.append(segment.offsets(first, max(first, last)) + start)
        together, at = keys[0].joined(*keys[1:]), np.concatenate(offsets)
        newest = together.newest()
        return (together, at) if newest is None else (together.take(newest), at[newest])

    def is_deleted(self, offsets: Offsets) -> Bools:
        gone = np.zeros(len(offsets), np.bool_)
        for start, segment in zip(self.starts[:-1], self.segments, strict=True):
            if segment.deleted is not None:
                inside = (offsets >= start) & (offsets < start + segment.rows)
                gone[inside] = segment.deleted[offsets[inside] - start]
        return gone

    def table(self, columns: Sequence[str]) -> pa.Table:
        """All rows in the order they came, tombstones too."""
        schema = pa.schema([self.rules.log_schema.field(name) for name in columns])
        tables = [pa.Table.from_arrays([segment.column(name) for name in columns], schema=schema) for segment in self.segments]
        return pa.concat_tables(tables) if tables else schema.empty_table()

    def scan(
        self, columns: Sequence[str], *, start: int = 0, stop: int | None = None, batch_rows: int = 1 << 16
    ) -> Iterator[pa.RecordBatch]:
        end = self.rows if stop is None else min(stop, self.rows)
        if not columns:
            for at in range(start, end, batch_rows):
                yield rows_without_columns(min(batch_rows, end - at))
            return
        yield from self.table(columns).slice(start, max(0, end - start)).to_batches(max_chunksize=batch_rows)

    def take(self, offsets: Offsets, columns: Sequence[str]) -> pa.RecordBatch:
        if not columns:
            return rows_without_columns(len(offsets))
        return one_batch_of(self.table(columns).take(pa.array(offsets, pa.int64())))


def fresh_rows(fresh: Fresh, rules: RowRules, order: KeyOrder | None) -> FreshRows:
    """What is known of part of a MemTable; kept with it for the next read."""
    memtable = fresh.memtable
    known = memtable.cache
    if isinstance(known, FreshRows) and same_table(known.rules, rules):
        if len(known.puts) == fresh.count:
            return known
        if len(known.puts) < fresh.count:
            known = known.grown(memtable.puts[: fresh.count], order)
            memtable.cache = known  # of two readers at once one is forgotten: both are right
            return known
        return FreshRows(rules, (), (), ()).grown(fresh.puts, order)  # an older view than others have taken since
    known = FreshRows(rules, (), (), ())
    if fresh.count:
        known = known.grown(fresh.puts, order)
    memtable.cache = known
    return known


def same_table(one: RowRules, two: RowRules) -> bool:
    """Do they read rows alike?"""
    return one is two or (one.key == two.key and one.log_schema.equals(two.log_schema, check_metadata=True))


def one_batch_of(table: pa.Table) -> pa.RecordBatch:
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_arrays([pa.array([], f.type) for f in table.schema], schema=table.schema)
