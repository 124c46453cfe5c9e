"""Telling the tip of the log from a hole in it.

Owns: the evidence that a missing entry was once durable. Does not own: the walk that asks.

A missing entry is the tip, unless somebody knew it durable: a later entry whose
``durable_through`` reaches it, or the manifest's ``wal_position_last_seen``. Entries in
flight are no evidence (``durable_through`` counts the acknowledged prefix only), so a healthy
writer with a gap among its PUTs is never taken for a damaged log.
"""

from __future__ import annotations

from collections import deque

from headgate.errors import DataLossError, ObjectMissingError, WalHoleError, WalTruncatedError
from headgate.manifest import ChainPoint, ShardManifest
from headgate.wal.entry import SEAL_BYTES, decode_entry
from headgate.wal.space import WalSpace

_NEWEST_READ = 8


def evidence_of_loss(space: WalSpace, manifest: ShardManifest, missing: ChainPoint) -> DataLossError | None:
    """The error to raise if the entry stays missing; None if nobody knew it durable."""
    later = _newest_later(space, missing)
    for point in later:
        key = space.key(*point)
        try:
            data = space.store.get(key)
        except ObjectMissingError:  # collected meanwhile
            continue
        entry = decode_entry(data, key, space.wal_id, space.shard, *point)
        if entry.header.durable_through >= missing.position:
            name = space.key(*missing)
            return WalHoleError(
                f"{space.store.uri}/{name} is missing; the later entry {key} says that all up to position "
                f"{entry.header.durable_through} was durable",
                object=name,
            )
    if manifest.wal_position_last_seen >= missing.position:
        name = space.key(*missing)
        return WalTruncatedError(
            f"{space.store.uri}/{name} is missing; the manifest (version {manifest.version}) has seen position "
            f"{manifest.wal_position_last_seen} acknowledged",
            object=name,
        )
    return None


def _newest_later(space: WalSpace, missing: ChainPoint) -> list[ChainPoint]:
    """The highest few names of each epoch from the missing one on, data and seals apart.

    ``durable_through`` never falls within an epoch, so its newest entries know the most. Seals may
    stand far ahead and know little; they must not crowd out the data.
    """
    newest: dict[tuple[int, bool], deque[ChainPoint]] = {}
    for point, info in space.list_from(*missing):
        if point != missing:
            newest.setdefault((point.epoch, info.size_bytes == SEAL_BYTES), deque(maxlen=_NEWEST_READ)).append(point)
    return [point for kind in sorted(newest, reverse=True) for point in reversed(newest[kind])]
