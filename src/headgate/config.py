"""How a writer behaves: every knob, its default and its bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, Literal

from headgate.errors import InvalidInputError

Duration = timedelta | float
"""A length of time: a timedelta, or seconds."""


@dataclass(frozen=True, kw_only=True)
class ShardWriterConfig:
    """The knobs of a ``ShardWriter``. Checked when it is made; times are seconds, sizes bytes.

    Attributes:
        enable_memtable: False: WAL-only, the same pipeline with no MemTable, no indexes, no flush.
        durable_write: True: ``put`` returns only when durable.
        index_configs: None: the table's indexes. Must be empty in WAL-only mode.
        max_wal_buffer_size: an entry takes no further put once it holds this much. One put is never
            split, so a larger put makes a larger entry.
        max_wal_flush_interval: least time between the starts of two entries; bounds the number of
            requests (cost). The first put after idle is never delayed.
        max_inflight: entries under way at once.
        max_wal_persist_retries: how often a failed PUT is sent again before the writer is poisoned.
        wal_persist_retry_base_delay: the first wait between them; it doubles, with jitter.
        max_memtable_size, max_memtable_rows, max_memtable_batches, max_memtable_age: a MemTable that
            reaches one of them is frozen and flushed. Ignored in WAL-only mode.
        max_unflushed_memtable_bytes: ``put`` blocks above this. In WAL-only mode it bounds what is
            queued and in flight.
        max_pending_generations: ``put`` blocks above this. Ignored in WAL-only mode.
        put_timeout: how long ``put`` blocks; None: as long as it takes.
        fsync: on a local disk, sync before acknowledging. False: a power cut may lose acknowledged rows.
        on_bad_rows: "fail" refuses a batch with rows that cannot be taken.
        auto_compact: after flushes, merge runs in a thread of the writer, within ``max_memtable_size`` of memory.
            Ignored in WAL-only mode.
        producer_retention: a producer unheard of for longer, and for 10,000 positions, is forgotten.
        sync_indexed_write, async_index_buffer_rows, async_index_interval: what the MemTable's indexes keep.
            Ignored in WAL-only mode.
    """

    enable_memtable: bool = True
    durable_write: bool = False
    index_configs: Sequence[Any] | None = None
    max_wal_buffer_size: int = 8 << 20
    max_wal_flush_interval: float = 0.0
    max_inflight: int = 4
    max_wal_persist_retries: int = 3
    wal_persist_retry_base_delay: float = 0.05
    max_memtable_size: int = 256 << 20
    max_memtable_rows: int = 1_000_000
    max_memtable_batches: int = 8_000
    max_memtable_age: float = 60.0
    max_unflushed_memtable_bytes: int = 1 << 30
    max_pending_generations: int = 64
    put_timeout: float | None = None
    fsync: bool = True
    on_bad_rows: Literal["fail", "quarantine"] = "fail"
    auto_compact: bool = False
    producer_retention: timedelta = timedelta(days=7)
    sync_indexed_write: bool = True
    async_index_buffer_rows: int = 10_000
    async_index_interval: float = 1.0

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < least:
                raise InvalidInputError(f"{name} is {value!r}", hint=f"a finite number, at least {least}")
            if name not in _SECONDS and not isinstance(value, int):
                raise InvalidInputError(f"{name} is {value!r}", hint="a whole number")
        for field in fields(self):
            if field.type == "bool" and not isinstance(getattr(self, field.name), bool):
                raise InvalidInputError(f"{field.name} is {getattr(self, field.name)!r}", hint="True or False")
        if self.max_inflight > 64:
            raise InvalidInputError(f"max_inflight is {self.max_inflight}", hint="64 at most: each is a thread")
        timeout = self.put_timeout
        if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 <= timeout < 1e9):
            raise InvalidInputError(f"put_timeout is {self.put_timeout!r}", hint="seconds, or None to wait as long as it takes")
        if self.on_bad_rows not in ("fail", "quarantine"):
            raise InvalidInputError(f"on_bad_rows is {self.on_bad_rows!r}", hint='"fail" or "quarantine"')
        if not isinstance(self.producer_retention, timedelta) or self.producer_retention < timedelta(0):
            raise InvalidInputError(f"producer_retention is {self.producer_retention!r}", hint="a timedelta")
        if not self.enable_memtable and self.index_configs:
            raise InvalidInputError("a WAL-only writer keeps no indexes", hint="leave index_configs empty, or set enable_memtable=True")


_SECONDS = {"max_wal_flush_interval", "wal_persist_retry_base_delay", "max_memtable_age", "async_index_interval"}
_LEAST: dict[str, float] = {
    "max_wal_buffer_size": 1,
    "max_wal_flush_interval": 0.0,
    "max_inflight": 1,
    "max_wal_persist_retries": 0,
    "wal_persist_retry_base_delay": 0.0,
    "max_memtable_size": 1,
    "max_memtable_rows": 1,
    "max_memtable_batches": 1,
    "max_memtable_age": 0.0,
    "max_unflushed_memtable_bytes": 1,
    "max_pending_generations": 1,
    "async_index_buffer_rows": 1,
    "async_index_interval": 0.0,
}


def check_memory(max_memory: object) -> None:
    """Raises InvalidInputError for what is no number of bytes."""
    if isinstance(max_memory, bool) or not isinstance(max_memory, int) or max_memory < 1:
        raise InvalidInputError(f"max_memory is {max_memory!r}", hint="bytes, a whole number")
