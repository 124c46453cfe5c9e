"""What a writer tells of itself: for its user, and as metrics.

Owns: the numbers. Does not own: what they count.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from headgate import meters
from headgate.config import ShardWriterConfig
from headgate.flush import Generations
from headgate.wal.log import ShardLog
from headgate.wal.pipeline import Pipeline

_GENERATION = re.compile(r"g\d{10}-")


@dataclass(frozen=True, slots=True)
class WalStats:
    """The log of a writer. Right from the moment ``open`` returns."""

    epoch: int
    next_wal_entry_position: int
    acknowledged_position: int
    queued_puts: int
    queued_bytes: int
    inflight_entries: int
    entries_written: int
    puts_acknowledged: int
    bytes_written: int


@dataclass(frozen=True, slots=True)
class BackpressureStats:
    """How often and how long ``put`` had to wait for room."""

    limit_bytes: int
    unacknowledged_bytes: int
    held_bytes: int
    """All that counts against the limit: not acknowledged, not flushed, or reserved."""
    blocked_puts: int
    blocked_seconds: float
    timeouts: int


def wal_stats(epoch: int, pipeline: Pipeline) -> WalStats:
    stats = pipeline.stats()
    return WalStats(
        epoch=epoch,
        next_wal_entry_position=stats.next_position,
        acknowledged_position=stats.acknowledged_position,
        queued_puts=stats.queued_puts,
        queued_bytes=stats.queued_bytes,
        inflight_entries=stats.inflight_entries,
        entries_written=stats.entries,
        puts_acknowledged=stats.puts,
        bytes_written=stats.bytes,
    )


def backpressure_stats(limit_bytes: int, pipeline: Pipeline) -> BackpressureStats:
    stats = pipeline.stats()
    return BackpressureStats(
        limit_bytes=limit_bytes,
        unacknowledged_bytes=pipeline.unacknowledged_bytes,
        held_bytes=pipeline.held_bytes,
        blocked_puts=stats.blocked_puts,
        blocked_seconds=stats.blocked_seconds,
        timeouts=stats.timeouts,
    )


def gauges(
    log: ShardLog, epoch: int, pipeline: Pipeline, generations: Generations | None, config: ShardWriterConfig
) -> Iterator[tuple[meters.Gauge, float, meters.Labels]]:
    """What an open writer knows of itself and, from the manifests that it has seen, of its shard. Asks no store."""
    place, stats = (log.manifests.place, log.shard), pipeline.stats()
    yield meters.WRITERS, 1, place
    yield meters.WRITER_EPOCH, epoch, place
    yield meters.WAL_QUEUED_PUTS, stats.queued_puts, place
    yield meters.WAL_QUEUED_BYTES, stats.queued_bytes, place
    yield meters.WAL_INFLIGHT_ENTRIES, stats.inflight_entries, place
    yield meters.HELD_BYTES, pipeline.held_bytes, place
    yield meters.HELD_BYTES_LIMIT, config.max_unflushed_memtable_bytes, place
    if generations is not None:
        held = generations.stats()
        yield meters.MEMTABLE_ROWS, held.active_rows, (*place, "active")
        yield meters.MEMTABLE_ROWS, held.frozen_rows, (*place, "frozen")
        yield meters.MEMTABLE_BYTES, held.active_bytes, (*place, "active")
        yield meters.MEMTABLE_BYTES, held.frozen_bytes, (*place, "frozen")
        yield meters.FROZEN_MEMTABLES, held.frozen, place
        yield meters.PENDING_GENERATIONS_LIMIT, config.max_pending_generations, place
    manifest, tip = log.manifests.seen, stats.acknowledged_position + 1
    if manifest is None:
        return
    yield meters.LAG_ENTRIES, max(0, tip - manifest.cursor.position), place
    yield meters.RUNS, len(manifest.runs), place
    yield meters.PENDING_GENERATIONS, sum(_GENERATION.match(run.id) is not None for run in manifest.runs), place
    yield meters.RUN_ROWS, sum(run.rows for run in manifest.runs), place
    yield meters.RUN_BYTES, sum(run.bytes for run in manifest.runs), place
    yield meters.CHECKPOINTS, len(manifest.checkpoints), place
    yield meters.CONSUMERS, len(manifest.consumers), place
    for name, hold in manifest.consumers.items():
        yield meters.CONSUMER_LAG_ENTRIES, max(0, tip - hold.position), (*place, name)
