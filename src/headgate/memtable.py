"""MemTable: acknowledged entries that are in no committed run yet, in the order they came.

Owns: the puts, their sizes, when it is full. Does not own: which row of a key is the newest
(query), how it becomes a run (flush), what is not acknowledged yet (pipeline).

An entry goes in when it is acknowledged, whole, and in order. So a MemTable never holds a row
that could vanish, an entry never spans two of them, and the positions it covers follow each
other without a gap: the cursor of the run it becomes is exact.

A load that was placed among its entries is newer than those before its place and older than the
rest. So a MemTable that turns out to span a load is cut there: two MemTables, with the same puts.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import pyarrow as pa

from headgate.manifest.model import ChainPoint
from headgate.wal.block import Entries
from headgate.wal.entry import Put

_PINNED_SLACK_BYTES = 1 << 10
_GIVEN_BACK_BYTES = 8 << 20


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
        return self.memtable.first_puts(self.count)

    def places(self) -> tuple[int, int]:
        """The position of its first entry, and the one past its last."""
        return self.memtable.places(self.count)

    def spans(self, place: int) -> bool:
        """Are there entries on both sides of a place?"""
        first, end = self.places()
        return first < place < end


class _Entry(NamedTuple):
    """What a MemTable held after an entry."""

    epoch: int
    batches: int
    rows: int
    bytes: int


class _Held(NamedTuple):
    """What a MemTable holds: replaced as a whole, so that taking an entry is one step, whatever interrupts it."""

    batches: int
    entries: int
    rows: int
    bytes: int
    end: ChainPoint
    born: float | None


class MemTable:
    """Grows by whole entries, under its writer's lock; what is in it stays as it is."""

    __slots__ = ("__weakref__", "_entries", "_held", "_positions", "_puts", "cache", "first", "run")

    def __init__(self, first: ChainPoint) -> None:
        self.first = first
        """Where it begins: everything before it is in runs or in older MemTables."""
        self._puts: list[Put] = []
        self._positions: list[int] = []
        self._entries: list[_Entry] = []
        self._held = _Held(0, 0, 0, 0, first, None)
        self.cache: Any = None
        """What readers made of its puts, kept for the next one; any reader may replace it by a longer one."""
        self.run: Any = None
        """The same as a run, where something newer is a run already (view)."""

    def append(self, epoch: int, position: int, puts: list[Put], size_bytes: int, now: float) -> None:
        """Take an acknowledged entry. Taking one again that was taken changes nothing."""
        held = self._held
        if position < held.end.position:
            return
        batches, bytes_ = held.batches + len(puts), held.bytes + size_bytes
        rows = held.rows + (puts[0].rows.num_rows if len(puts) == 1 else sum([put.rows.num_rows for put in puts]))
        if len(self._entries) != held.entries or len(self._puts) != held.batches or len(self._positions) != held.entries:
            self._sweep()
        self._puts += puts
        self._positions.append(position)
        self._entries.append(_Entry(epoch, batches, rows, bytes_))
        born = now if held.born is None else held.born
        self._held = _Held(batches, held.entries + 1, rows, bytes_, ChainPoint(epoch, position + 1), born)

    def _sweep(self) -> None:
        """Take out what an interrupted call left."""
        held = self._held
        del self._puts[held.batches :], self._positions[held.entries :], self._entries[held.entries :]

    def append_all(self, entries: Entries, now: float) -> None:
        """Take entries that follow each other; none of them was taken before."""
        held, epoch = self._held, entries.epoch
        assert entries.position >= held.end.position, "in order, each once"
        self._sweep()
        rows = [0, *accumulate(put.rows.num_rows for put in entries.puts)]
        ends = list(accumulate(entries.counts))
        sizes = accumulate(entries.sizes)
        self._puts += entries.puts
        self._positions += range(entries.position, entries.end.position)
        self._entries += [_Entry(epoch, held.batches + n, held.rows + rows[n], held.bytes + s) for n, s in zip(ends, sizes, strict=True)]
        last, born = self._entries[-1], now if held.born is None else held.born
        self._held = _Held(last.batches, held.entries + len(entries), last.rows, last.bytes, entries.end, born)

    @property
    def puts(self) -> list[Put]:
        return self._puts[: self._held.batches]

    @property
    def batches(self) -> int:
        return self._held.batches

    @property
    def entries(self) -> int:
        return self._held.entries

    @property
    def rows(self) -> int:
        return self._held.rows

    @property
    def bytes(self) -> int:
        return self._held.bytes

    @property
    def end(self) -> ChainPoint:
        """Past its last entry."""
        return self._held.end

    @property
    def born(self) -> float | None:
        """When its first row came, by the monotonic clock."""
        return self._held.born

    def first_puts(self, count: int) -> list[Put]:
        return self._puts[:count]

    def places(self, count: int | None = None) -> tuple[int, int]:
        """The position of the first entry, and the one past the last, of the first ``count`` puts."""
        held = self._held
        if not held.entries:
            return self.first.position, self.first.position
        last = held.entries - 1
        if count is not None and count < held.batches:
            last = bisect_left(self._entries, count, hi=held.entries, key=lambda entry: entry.batches)
        return self._positions[0], self._positions[last] + 1

    def cut(self, place: int) -> tuple[MemTable, MemTable] | None:
        """The entries before a place, and the others. None: they are all on one side of it."""
        held = self._held
        at = bisect_left(self._positions, place, hi=held.entries)
        if at in (0, held.entries):
            return None
        last = self._entries[at - 1]
        older = MemTable(self.first)
        older._puts, older._positions, older._entries = self._puts[: last.batches], self._positions[:at], self._entries[:at]
        end = ChainPoint(last.epoch, self._positions[at - 1] + 1)
        older._held = _Held(last.batches, at, last.rows, last.bytes, end, held.born)
        newer = MemTable(end)
        newer._puts, newer._positions = self._puts[last.batches : held.batches], self._positions[at : held.entries]
        newer._entries = [
            _Entry(epoch, batches - last.batches, rows - last.rows, size - last.bytes)
            for epoch, batches, rows, size in self._entries[at : held.entries]
        ]
        whole = newer._entries[-1]
        newer._held = _Held(whole.batches, held.entries - at, whole.rows, whole.bytes, held.end, held.born)
        return older, newer

    def view(self) -> Fresh:
        """All of it as of now."""
        return Fresh(self, self._held.batches)


def give_back(size_bytes: int) -> None:
    """So much was freed: give it back to the system. The C library keeps the pages of rows that went, where others lie between."""
    if size_bytes < _GIVEN_BACK_BYTES:
        return
    pa.default_memory_pool().release_unused()
    if _trim is not None:
        _trim(0)


def _found_trim() -> Any:
    try:
        return getattr(ctypes.CDLL(None), "malloc_trim", None)
    except (OSError, TypeError):  # a system that has no such thing
        return None


_trim = _found_trim()


def unpinned(rows: pa.RecordBatch, size_bytes: int) -> pa.RecordBatch:
    """The same rows in memory of their own, if they keep much more of somebody else's alive than the ``size_bytes`` they count.

    A thousand slices of one large table would each pin all of it: what is accounted for must be
    what is held.
    """
    if rows.get_total_buffer_size() <= 2 * size_bytes + _PINNED_SLACK_BYTES:
        return rows
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_batch(rows)
    return pa.ipc.open_stream(sink.getvalue()).read_next_batch()
