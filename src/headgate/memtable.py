"""MemTable: acknowledged entries that are in no committed run yet, in the order they came.

Owns: the puts, their sizes, when it is full. Does not own: which row of a key is the newest
(query), how it becomes a run (flush), what is not acknowledged yet (pipeline).

An entry goes in when it is acknowledged, whole, and in order. So a MemTable never holds a row
that could vanish, an entry never spans two of them, and the positions it covers follow each
other without a gap: the cursor of the run it becomes is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from headgate.manifest.model import ChainPoint
from headgate.wal.entry import Put

_PINNED_SLACK_BYTES = 1 << 16


@dataclass(frozen=True)
class MemTableStats:
    """A moment of a writer's MemTables."""

    active_rows: int
    active_batches: int
    active_bytes: int
    frozen: int
    frozen_rows: int
    frozen_bytes: int
    generation: int
    """The number of the generation that the active one becomes."""
    flushed: int
    """Generations committed by this writer."""
    flush_failures: int
    replayed_entries: int
    replayed_rows: int


@dataclass(frozen=True, slots=True)
class Fresh:
    """Part of a MemTable that never changes: its first ``count`` puts, in order."""

    memtable: MemTable
    count: int

    @property
    def puts(self) -> list[Put]:
        return self.memtable.puts[: self.count]


class MemTable:
    """Grows by whole entries, under its writer's lock; what is in it stays as it is."""

    __slots__ = ("__weakref__", "born", "bytes", "cache", "end", "entries", "first", "puts", "rows")

    def __init__(self, first: ChainPoint) -> None:
        self.first = first
        """Where it begins: everything before it is in runs or in older MemTables."""
        self.end = first
        """Past its last entry."""
        self.puts: list[Put] = []
        self.entries = 0
        self.rows = 0
        self.bytes = 0
        self.born: float | None = None
        """When its first row came, by the monotonic clock."""
        self.cache: Any = None
        """What readers made of its puts, kept for the next one; any reader may replace it by a longer one."""

    def append(self, epoch: int, position: int, puts: list[Put], size_bytes: int, now: float) -> None:
        """Take an acknowledged entry."""
        assert position >= self.end.position, "entries come in order"
        self.puts += puts
        self.entries += 1
        self.rows += sum(put.rows.num_rows for put in puts)
        self.bytes += size_bytes
        self.end = ChainPoint(epoch, position + 1)
        if self.born is None:
            self.born = now

    def view(self) -> Fresh:
        """All of it as of now."""
        return Fresh(self, len(self.puts))


def unpinned(rows: pa.RecordBatch) -> pa.RecordBatch:
    """The same rows in memory of their own, if they keep much more of somebody else's alive.

    A thousand slices of one large table would each pin all of it: what is accounted for must be
    what is held.
    """
    if rows.get_total_buffer_size() <= 2 * rows.nbytes + _PINNED_SLACK_BYTES:
        return rows
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_batch(rows)
    return pa.ipc.open_stream(sink.getvalue()).read_next_batch()
