"""Runs: what MemTables become, and what reads find below them.

Owns: reading a run by offset, whatever its slices. Does not own: what goes into a run (keys,
flush, compaction), which of several runs' rows count (query).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headgate.clock import SYSTEM_CLOCK, map_ordered
from headgate.columnar import Columnar, Slice
from headgate.columnar.arrow import ArrowSlice
from headgate.keys import RunRows, newest_rows
from headgate.manifest.model import RunRecord, SliceRecord
from headgate.schema import RowRules
from headgate.sharding import is_inside
from headgate.wal.entry import Put

DELETED = "__headgate_deleted"
"""The column that marks tombstones, in runs that have any."""

Offsets = npt.NDArray[np.int64]

SLICE_ROWS = 1 << 19
"""Of a slice that a load or a compaction writes, at most. Smaller ones are kept more often when something newer comes, and are more
to open, and more indexes to ask (docs/why/0022)."""

_BATCH_ROWS = 1 << 16
_numbers = count()
Value = TypeVar("Value")


class read_once(Generic[Value]):  # noqa: N801  # used as a decorator, like the one it stands for
    """A property that is read on first use, and kept.

    ``functools.cached_property`` holds a lock that all objects of a class share (up to Python 3.11): of many runs that
    are opened at once, each would wait for the one before. Of two threads that read the same here, one is forgotten.
    """

    def __init__(self, read: Callable[[Any], Value]) -> None:
        self._read, self.__doc__ = read, read.__doc__

    def __get__(self, owner: Any, kind: type | None = None) -> Value:
        value = self._read(owner)
        owner.__dict__[self._read.__name__] = value  # found there from now on
        return value


@dataclass(frozen=True)
class OpenRun:
    """A run of a manifest, open for reading. Its slices follow each other by key; offsets count through all of them.

    Columns are named as they are in the files; tombstones are rows like others.
    """

    record: RunRecord
    columnar: Columnar

    @property
    def rows(self) -> int:
        return self.record.rows

    @cached_property
    def names(self) -> dict[int, str]:
        """What its columns are called in the files, by field id."""
        return dict(self.record.fields)

    @read_once
    def slices(self) -> list[Slice]:
        """Opened on first use. Raises ObjectMissingError."""
        columnar = self.columnar
        return list(map_ordered(SYSTEM_CLOCK, columnar.open_record, self.record.slices, parallel=columnar.scans_at_once))

    @cached_property
    def starts(self) -> Offsets:
        """The offset of each slice's first row, and of the row after the last."""
        return np.cumsum([0, *(part.rows for part in self.record.slices)])

    @property
    def schema(self) -> pa.Schema:
        """As it was written; tombstones' mark included."""
        return self.slices[0].schema if self.slices else pa.schema([])

    @read_once
    def outside(self) -> npt.NDArray[np.bool_] | None:
        """Which rows are in the files and do not belong to the run: those of another part of a shard that was split. None: all do."""
        keep = self.record.keep
        if keep is None:
            return None
        name = self.names.get(keep.column)
        if name is None:
            return np.full(self.rows, keep.low > 0)
        parts = [~is_inside(batch.column(0), keep.low, keep.high) for batch in self.scan([name], batch_rows=1 << 18)]
        return np.concatenate(parts) if parts else np.zeros(0, np.bool_)

    def belonging(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Rows of it, with all the files' columns, without those that do not belong to it."""
        keep = self.record.keep
        if keep is None:
            return batch
        name = self.names.get(keep.column)
        if name is None:
            return batch if keep.low == 0 else batch.slice(0, 0)
        inside = is_inside(batch.column(name), keep.low, keep.high)
        return batch if inside.all() else batch.take(pa.array(np.flatnonzero(inside)))

    def scan(
        self, columns: Sequence[str], *, start: int = 0, stop: int | None = None, batch_rows: int = 1 << 16
    ) -> Iterator[pa.RecordBatch]:
        """The rows ``start`` to ``stop - 1``, in order."""
        end = self.rows if stop is None else min(stop, self.rows)
        for number, part in enumerate(self.slices):
            first = int(self.starts[number])
            low, high = max(start - first, 0), min(end - first, part.num_rows)
            if low < high:
                yield from part.scan(columns, start=low, stop=high, batch_rows=batch_rows)

    def matching(self, filter: str, columns: Sequence[str]) -> Iterator[tuple[Offsets, pa.RecordBatch]]:
        """The rows for which a SQL expression over the files' columns is true, with their offsets, in order."""
        for number, part in enumerate(self.slices):
            first = self.starts[number]
            for offsets, batch in part.matching(filter, columns):
                yield offsets + first, batch

    def take(self, offsets: Offsets, columns: Sequence[str]) -> pa.RecordBatch:
        """The rows at these offsets, in the order asked for. At least one column."""
        if len(self.slices) == 1:
            return self.slices[0].take(offsets, columns)
        which = np.searchsorted(self.starts, offsets, side="right") - 1
        parts = []
        for number in np.unique(which):
            chosen = np.flatnonzero(which == number)
            parts.append((chosen, self.slices[number].take(offsets[chosen] - self.starts[number], columns)))
        if not parts:
            return pa.RecordBatch.from_pylist([], schema=pa.schema([self.schema.field(name) for name in columns]))
        back = np.argsort(np.concatenate([chosen for chosen, _ in parts]))
        table = pa.Table.from_batches([rows for _, rows in parts]).combine_chunks()
        return table.take(pa.array(back)).combine_chunks().to_batches()[0]


def run_schema(merged: RunRows) -> pa.Schema:
    """Of a run's files: the log's columns, and the mark of tombstones where there are any."""
    return merged.schema if merged.deleted is None else merged.schema.append(pa.field(DELETED, pa.bool_(), False))


def run_batches(merged: RunRows) -> Generator[pa.RecordBatch]:
    """A run's rows, with the column that marks tombstones where there are any."""
    start, schema = 0, run_schema(merged)
    for batch in merged.batches(_BATCH_ROWS):
        if merged.deleted is not None:
            marks = pa.array(merged.deleted[start : start + batch.num_rows])
            batch = pa.RecordBatch.from_arrays([*batch.columns, marks], schema=schema)
        start += batch.num_rows
        yield batch


def run_in_memory(puts: Sequence[Put], rules: RowRules, first: int, end: int) -> OpenRun:
    """What puts come to, as a run that no file holds: for views in which something newer is a run already."""
    merged = newest_rows(puts, rules)
    rows = pa.Table.from_batches(run_batches(merged), schema=run_schema(merged))
    id = f"memory-{next(_numbers)}"
    record = RunRecord(
        id=id,
        first=first,
        end=end,
        slices=(SliceRecord(path=id, rows=rows.num_rows, bytes=rows.nbytes),),
        fields=tuple(zip(rules.field_ids, rules.schema.names, strict=True)),
        tombstones=merged.tombstones,
    )
    return OpenRun(record, _InMemory(rows))


class _InMemory(Columnar):
    """The one slice of such a run."""

    def __init__(self, rows: pa.Table) -> None:
        self._slice = ArrowSlice(rows)

    def write(self, path: str, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> SliceRecord:
        raise NotImplementedError("rows in memory are not written")

    def open(self, path: str) -> Slice:
        return self._slice

    def drop(self, path: str) -> None:
        raise NotImplementedError("rows in memory go by themselves")
