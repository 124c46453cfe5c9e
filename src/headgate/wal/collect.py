"""Giving up entries, and deleting what was given up.

Owns: ``trim`` (moving the cursor of a WAL-only log) and the deletion of dead entries.
Does not own: what else holds the log back (the manifest says).

A data entry is dead when its position is below the cursor and below every hold, whatever its
epoch; there is no other rule. A seal is never deleted: the next position of a stalled writer is
the one its seal holds, so however late it wakes, it collides. No clock takes part in this.

Order: list, then ONE commit that raises the floor, then delete only what was listed and lies
below the committed floor. A consumer that registers in between is refused below the floor.
"""

from __future__ import annotations

from dataclasses import dataclass

from headgate.errors import CommitConflictError, InvalidInputError
from headgate.failpoint import failpoint
from headgate.manifest import ChainPoint, ShardManifest
from headgate.manifest.model import ProducerMark
from headgate.wal.entry import SEAL_BYTES
from headgate.wal.fence import over_seals
from headgate.wal.log import ShardLog
from headgate.wal.marker import check_place
from headgate.wal.producers import marks_of, merge
from headgate.wal.reader import ChainReader
from headgate.wal.tip import find_tip, locate

_DELETES_AT_ONCE = 1000
_WALKS_MAX = 32


@dataclass(frozen=True, slots=True)
class Collected:
    """What was, or would be, deleted from one shard's log."""

    shard: str
    entries: int
    bytes: int
    floor: int


def trim(log: ShardLog, before: int) -> ShardManifest:
    """Give up all rows before a position. Only where no flush moves the cursor: WAL-only logs.

    Raises:
        InvalidInputError: beyond the tip, or below what a consumer or a checkpoint still needs.
    """
    for _ in range(_WALKS_MAX):
        manifest = check_trim(log, before)
        walked = _walk_to(log, manifest, before)
        try:
            return log.manifests.commit(lambda current, walked=walked: _trimmed(log, current, before, *walked))  # type: ignore[misc]
        except _WalkedAstray:
            continue  # others trim too, and what we walked over was collected meanwhile
    raise CommitConflictError(f"shard {log.shard} is trimmed by others at the same time", hint="try again")


class _WalkedAstray(Exception):
    """The walk met a seal that does not end its epoch."""


def _trimmed(
    log: ShardLog, current: ShardManifest, before: int, point: ChainPoint, ends: dict[int, int], producers: dict[str, ProducerMark]
) -> ShardManifest | None:
    if current.next_generation > 1 or (current.owner is not None and current.owner.flushes):
        raise InvalidInputError(
            f"shard {log.shard} flushes its rows, so its log is not trimmed by hand", hint="collection takes what flushes have covered"
        )
    for kind, holds in (("consumer", current.consumers), ("checkpoint", current.checkpoints)):
        for name, hold in holds.items():
            if hold.position < before:
                raise InvalidInputError(
                    f"the {kind} {name!r} still needs position {hold.position}", hint=f"trim to {hold.position} at most, or drop it"
                )
    if before <= current.cursor.position:
        return None
    if point.position < before or current.contradicts(ends):
        raise _WalkedAstray
    merged = dict(current.producers)
    merge(merged, producers.items())
    segments = current.ends().adding(ends)
    return current.but(cursor=over_seals(point, segments), segments=segments.rows, producers=merged)


def check_trim(log: ShardLog, before: int) -> ShardManifest:
    """Refuse what cannot be trimmed, without trimming. Returns the manifest it looked at."""
    if isinstance(before, bool) or not isinstance(before, int) or before < 0:
        raise InvalidInputError(f"before is {before!r}", hint="a position, a whole number from 0")
    manifest, tip = find_tip(log)
    if before > tip.position:
        raise InvalidInputError(f"shard {log.shard} ends at {tip.position}; {before} lies beyond", hint=f"trim to {tip.position} at most")
    return manifest


def _walk_to(log: ShardLog, manifest: ShardManifest, position: int) -> tuple[ChainPoint, dict[int, int], dict[str, ProducerMark]]:
    """The chain's point at a position below its tip, and what lies before it: where epochs ended, who produced what.

    A successor starts at the cursor. What it will not read must be in the manifest: ends, or a
    fenced put's outcome and a wiped seal could not be told; marks, or a retry would be taken
    for new (A13).
    """
    ends: dict[int, int] = {}
    producers: dict[str, ProducerMark] = {}
    known = manifest.walk_from(replay=False)
    if position <= known.position:
        return locate(manifest, position), ends, producers
    point = known
    reader = ChainReader(log.space(manifest), log.clock)
    try:
        while point.position < position:
            entry = reader.read(point)
            if entry is None:
                break
            merge(producers, marks_of(entry))
            if entry.is_seal:
                ends[point.epoch] = point.position
            point = point.past_seal() if entry.is_seal else point.past_data()
    finally:
        reader.close()
    return point, ends, producers


def collect_entries(log: ShardLog, *, dry_run: bool, sweep: bool = False, planned: ShardManifest | None = None) -> Collected:
    """Delete dead data entries; seals stay.

    Lists from the epoch up to which all was deleted before, so the cost follows what is deleted; ``sweep`` lists
    everything, for what stalled writers left behind in epochs long past. ``planned``: a dry run of what would be
    deleted if this were the manifest.
    """
    manifest = planned or log.manifests.load()
    check_place(log, manifest)
    first_epoch = 0 if sweep else locate(manifest, manifest.wal_collected).epoch
    listed = [(point, info) for point, info in log.space(manifest).list_from(first_epoch) if info.size_bytes > SEAL_BYTES]
    failpoint("collect.listed")
    if dry_run:
        floor = max(manifest.wal_floor, manifest.hold_position())
    else:

        def raise_floor(current: ShardManifest) -> ShardManifest | None:
            hold = current.hold_position()
            return current.but(wal_floor=hold) if hold > current.wal_floor else None

        committed = log.manifests.commit(raise_floor)
        if committed.wal.id != manifest.wal.id:
            listed = []  # the log went on elsewhere meanwhile: the next run lists there
        floor = committed.wal_floor
    failpoint("collect.committed")
    dead = [info for point, info in listed if point.position < floor]
    if not dry_run:
        for start in range(0, len(dead), _DELETES_AT_ONCE):
            log.wal_store.delete([info.key for info in dead[start : start + _DELETES_AT_ONCE]])
            failpoint("collect.deleted")
        if committed.wal_collected < floor and committed.wal.id == manifest.wal.id:
            # Only now, so that a collection that dies before leaves nothing behind that the next one would not list.
            log.manifests.commit(lambda current: current.but(wal_collected=floor) if current.wal_collected < floor else None)
    return Collected(log.shard, len(dead), sum(info.size_bytes for info in dead), floor)
