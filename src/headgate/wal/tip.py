"""Finding a position on the chain, and the chain's end.

Owns: going from a number to a point without reading the whole log. Does not own: loss (loss).

``segments`` says where finished epochs ended, so any position below the last end is found by
arithmetic. In the open epoch everything up to ``wal_position_last_seen`` was acknowledged by
its writer, so it is on the chain too. Only what lies beyond is walked.
"""

from __future__ import annotations

from headgate.manifest import ChainPoint, ShardManifest
from headgate.wal.log import ShardLog
from headgate.wal.reader import ChainReader


def locate(manifest: ShardManifest, position: int) -> ChainPoint:
    """The point of the chain at ``position``, or the last one before it that the manifest knows of."""
    point = manifest.ends().locate(position)
    if point.position < position:
        point = point._replace(position=max(point.position, min(position, manifest.wal_position_last_seen + 1)))
    return point


def find_tip(log: ShardLog) -> tuple[ShardManifest, ChainPoint]:
    """The first point with no entry, and a manifest that was the latest at that time.

    Writes nothing. In an epoch that nobody has claimed past there can be no seal, so names in a
    listing that follow each other without a gap are all on the chain; else they are read.
    """
    manifest = log.manifests.load()
    point = max(locate(manifest, manifest.wal_position_last_seen + 1), manifest.cursor)
    while True:
        if point.epoch == manifest.epoch:
            tip = point
            for found, _ in log.space(manifest).list_epoch(point.epoch, point.position):
                if found.position != tip.position:
                    break
                tip = tip.past_data()
            now = log.manifests.load()
            if now.epoch == manifest.epoch:
                return now, tip
            manifest = now
        # Claimed past: some entry from here on may be a seal. Read.
        reader = ChainReader(log.space(manifest), log.clock, eager=True)
        try:
            while (entry := reader.read(point)) is not None:
                point = point.past_seal() if entry.is_seal else point.past_data()
        finally:
            reader.close()
        now = log.manifests.load()
        if now.epoch == manifest.epoch:
            return now, point
        manifest = now
        point = max(point, manifest.cursor)
