"""The state of a table, for people and machines. Reads only."""

from __future__ import annotations

from dataclasses import dataclass

from headgate.wal.log import ShardLog
from headgate.wal.tip import find_tip


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
    """Entries between cursor and tip: what a restart has to replay."""
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


@dataclass(frozen=True, slots=True)
class TableStatus:
    """A table, shard by shard."""

    uri: str
    shards: tuple[ShardStatus, ...]


def shard_status(log: ShardLog) -> ShardStatus:
    """Look at a shard without touching it."""
    manifest, tip = find_tip(log)
    return ShardStatus(
        shard=log.shard,
        state=manifest.state,
        epoch=manifest.epoch,
        tip=tip.position,
        cursor=manifest.cursor.position,
        lag=tip.position - manifest.cursor.position,
        first_position=manifest.wal_floor,
        clean=manifest.wal.clean_at is not None,
        manifest_version=manifest.version,
        wal_store=log.wal_store.uri,
        owner=manifest.owner.writer if manifest.owner else None,
        claimed_at=manifest.owner.claimed_at if manifest.owner else None,
        producers=len(manifest.producers),
        consumers=len(manifest.consumers),
        checkpoints=len(manifest.checkpoints),
    )
