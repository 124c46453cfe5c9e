"""The state of a table, for people and machines. Reads only."""

from __future__ import annotations

import re
from dataclasses import dataclass

from headgate import meters
from headgate.wal.log import ShardLog
from headgate.wal.tip import find_tip

_GENERATION = re.compile(r"g\d{10}-")
"""How the runs that flushes make are called."""


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """One shard, at one moment."""

    shard: str
    state: str
    epoch: int
    tip: int
    """The first position with no entry."""
    cursor: int
    """Everything before it is in runs, or was given up."""
    lag: int
    """Entries between cursor and tip, in no run yet: what a restart has to replay."""
    first_position: int
    """The log may have been collected before it."""
    clean: bool
    """Nothing in the log is needed."""
    manifest_version: int
    wal_store: str
    owner: str | None
    claimed_at: float | None
    producers: int
    consumers: int
    checkpoints: int
    runs: int
    rows: int
    """In its runs, tombstones and old versions of keys included."""
    bytes: int
    """Of its runs."""
    tombstones: int
    generations: int
    """Those of its runs that are generations: flushed, and not compacted yet."""
    next_generation: int
    consumer_lag: int = 0
    """Entries that the slowest consumer has not read."""


@dataclass(frozen=True, slots=True)
class SliceInfo:
    """Part of a run, or all of it: a Lance dataset, written once."""

    uri: str
    rows: int
    bytes: int


@dataclass(frozen=True, slots=True)
class RunInfo:
    """Rows of a shard sorted by key, keys unique, as positions ``first`` to ``end - 1`` of its log left them."""

    shard: str
    id: str
    first: int
    end: int
    rows: int
    """Tombstones included."""
    bytes: int
    tombstones: int
    """Rows that only say that their key is deleted; a column ``__headgate_deleted`` marks them if there are any."""
    created_at: float
    columns: dict[str, int]
    """What its columns are called in the files, and their ids."""
    slices: tuple[SliceInfo, ...]


@dataclass(frozen=True, slots=True)
class TableStatus:
    """A table, shard by shard."""

    uri: str
    shards: tuple[ShardStatus, ...]


def shard_status(log: ShardLog) -> ShardStatus:
    """Look at a shard without touching it."""
    manifest, tip = find_tip(log)
    generations = sum(_GENERATION.match(run.id) is not None for run in manifest.runs)
    meters.show_shard(
        log.manifests.place,
        log.shard,
        lag=tip.position - manifest.cursor.position,
        runs=manifest.runs,
        generations=generations,
        checkpoints=len(manifest.checkpoints),
        consumers={name: max(0, tip.position - hold.position) for name, hold in manifest.consumers.items()},
    )
    return ShardStatus(
        shard=log.shard,
        state=manifest.state,
        epoch=manifest.epoch,
        tip=tip.position,
        cursor=manifest.cursor.position,
        lag=tip.position - manifest.cursor.position,
        first_position=manifest.wal_floor,
        clean=manifest.is_clean,
        manifest_version=manifest.version,
        wal_store=log.wal_store.uri,
        owner=manifest.owner.writer if manifest.owner else None,
        claimed_at=manifest.owner.claimed_at if manifest.owner else None,
        producers=len(manifest.producers),
        consumers=len(manifest.consumers),
        checkpoints=len(manifest.checkpoints),
        runs=len(manifest.runs),
        rows=sum(run.rows for run in manifest.runs),
        bytes=sum(run.bytes for run in manifest.runs),
        tombstones=sum(run.tombstones for run in manifest.runs),
        generations=generations,
        next_generation=manifest.next_generation,
        consumer_lag=max((tip.position - hold.position for hold in manifest.consumers.values()), default=0),
    )


def shard_runs(log: ShardLog, table_uri: str) -> list[RunInfo]:
    """The runs that the latest manifest names, oldest first."""
    return [
        RunInfo(
            shard=log.shard,
            id=run.id,
            first=run.first,
            end=run.end,
            rows=run.rows,
            bytes=run.bytes,
            tombstones=run.tombstones,
            created_at=run.created_at,
            columns={name: number for number, name in run.fields},
            slices=tuple(SliceInfo(f"{part.uri or table_uri}/{part.path}", part.rows, part.bytes) for part in run.slices),
        )
        for run in log.manifests.load().runs
    ]
