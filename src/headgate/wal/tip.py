"""Finding a position on the chain, and the chain's end.

Owns: going from a number to a point without reading the whole log. Does not own: loss (loss).

``segments`` says where finished epochs ended, so any position below the last end is found by
arithmetic. In the open epoch everything that the manifest has seen acknowledged, resumed or
trimmed is on the chain too. Only what lies beyond is walked.
"""

from __future__ import annotations

from headgate.failpoint import failpoint
from headgate.manifest import ChainPoint, ShardManifest
from headgate.wal.log import ShardLog
from headgate.wal.marker import check_place
from headgate.wal.reader import ChainReader


def locate(manifest: ShardManifest, position: int) -> ChainPoint:
    """The point of the chain at ``position``, or the last one before it that the manifest knows of."""
    point = manifest.ends().locate(position)
    known = [manifest.wal_position_last_seen + 1, manifest.cursor.position]
    if manifest.resume is not None:
        known.append(manifest.resume.position)
    # Whoever moves cursor, resume or last seen over the end of an epoch records that end with it,
    # so what lies past the last end, up to the highest of them, is in the one epoch that is open.
    return point._replace(position=max(point.position, min(position, max(known))))


def find_tip(log: ShardLog) -> tuple[ShardManifest, ChainPoint]:
    """The first point with no entry, and a manifest that was the latest at that time.

    Writes nothing. In an epoch that nobody has claimed past there can be no seal, so names in a
    listing that follow each other without a gap are all on the chain; else they are read.
    """
    manifest = log.manifests.load()
    point = manifest.walk_from(replay=False)
    while True:
        check_place(log, manifest)
        # What the manifest knows may have moved past us, and what lies before it been collected.
        known = max(locate(manifest, manifest.wal_position_last_seen + 1), manifest.walk_from(replay=False))
        point = max(point, known) if point.position >= known.position else known
        tip = _listed_end(log, manifest, point) if point.epoch == manifest.epoch else _read_end(log, manifest, point)
        failpoint("tip.found")
        # After the tip, for those who ask what may be placed before it (feed), too.
        now = log.manifests.load()
        # With the cursor where it was, nothing from there on was collected, so every seal met is real.
        if now.epoch == manifest.epoch and now.cursor == manifest.cursor and now.wal.id == manifest.wal.id:
            return now, tip
        if manifest.epoch != point.epoch and now.cursor == manifest.cursor:
            point = tip  # read, so on the chain whoever claimed since
        manifest = now


def _listed_end(log: ShardLog, manifest: ShardManifest, point: ChainPoint) -> ChainPoint:
    for found, _ in log.space(manifest).list_epoch(point.epoch, point.position):
        if found.position != point.position:
            break
        point = point.past_data()
    return point


def _read_end(log: ShardLog, manifest: ShardManifest, point: ChainPoint) -> ChainPoint:
    reader = ChainReader(log.space(manifest), log.clock, eager=True)
    try:
        while (entry := reader.read(point)) is not None:
            point = point.past_seal() if entry.is_seal else point.past_data()
    finally:
        reader.close()
    return point
