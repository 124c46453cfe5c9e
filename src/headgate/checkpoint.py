"""Checkpoints: a named pin on what a shard is now.

Owns: adding, refreshing and dropping pins. Does not own: what they hold back (gc, collect), how
they are read (view).

A checkpoint pins the very version of the manifest that adds it, so there is no moment between
looking and pinning in which something it names could be collected. Of the log it holds what lies
between that version's cursor and the tip that was read before; with everything flushed that is
nothing at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headgate.config import Duration
from headgate.errors import AlreadyExistsError, InvalidInputError, NotFoundError, ShardSplitError
from headgate.manifest.model import IN_TABLE, CheckpointRecord, ShardManifest
from headgate.view import find_checkpoint
from headgate.wal.log import ShardLog
from headgate.wal.tip import find_tip

NAME_CHARACTERS_MAX = 200


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint over all shards of a table. Times are seconds since 1970."""

    id: str
    name: str | None
    created: float
    expires: float | None
    """None: until it is dropped."""
    complete: bool = True
    """False: some shards have it not, because it was cut short, dropped in part or has expired there."""
    clone: str | None = None
    """The URI of a clone that needs it."""


def check_lease(name: str | None, ttl: Duration | None) -> float | None:
    """The seconds of a lease; refuses what is none."""
    if name is not None and (not isinstance(name, str) or not name.strip() or len(name) > NAME_CHARACTERS_MAX):
        raise InvalidInputError(f"the checkpoint's name is {name!r}", hint=f"1 to {NAME_CHARACTERS_MAX} characters, or None")
    if ttl is None:
        return None
    seconds = ttl if isinstance(ttl, int | float) else ttl.total_seconds() if hasattr(ttl, "total_seconds") else None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < 1e10:
        raise InvalidInputError(f"the lease is {ttl!r}", hint="a timedelta, seconds, or None to keep it until it is dropped")
    return float(seconds)


def pin(
    log: ShardLog,
    id: str,
    *,
    name: str | None,
    created_at: float,
    expires_at: float | None,
    end: int | None = None,
    shards: Sequence[str] = (),
) -> ShardManifest:
    """Pin what is durable now in one shard. Can be repeated.

    Args:
        shards: all shards that get it; a shard made later is not part of it, and was empty then.
        end: past the last position that belongs to it; None: the tip as of now.
    """
    if end is None:
        end = find_tip(log)[1].position

    def add(manifest: ShardManifest) -> ShardManifest | None:
        return with_checkpoint(log, manifest, id, name=name, created_at=created_at, expires_at=expires_at, end=end, shards=shards)

    return log.manifests.commit(add)


def with_checkpoint(
    log: ShardLog,
    manifest: ShardManifest,
    id: str,
    *,
    name: str | None,
    created_at: float,
    expires_at: float | None,
    end: int,
    shards: Sequence[str] = (),
) -> ShardManifest | None:
    """The manifest with one checkpoint more, of the version that it becomes."""
    if id in manifest.checkpoints:
        return None
    if manifest.state == "retired":
        raise ShardSplitError(f"shard {log.shard} was split", shard=log.shard, state=manifest.state)
    if manifest.state == "dropped":
        raise NotFoundError(f"shard {log.shard} was dropped", hint="open the table again to see its shards of now")
    if name is not None and find_checkpoint(manifest, name) is not None:
        raise AlreadyExistsError(f"shard {log.shard} has a checkpoint {name!r}", hint="drop it first, or choose another name")
    cursor = manifest.cursor.position
    record = CheckpointRecord(
        position=cursor,
        # A load is newer than the entries before its place: they belong to it too.
        end=max(end, manifest.last_place()),
        version=manifest.version + 1,
        name=name,
        created_at=created_at,
        expires_at=expires_at,
        shards=tuple(shards),
    )
    return manifest.but(checkpoints={**manifest.checkpoints, id: record})


def refresh_pin(log: ShardLog, id: str, expires_at: float | None) -> None:
    """Another end for a lease. Refused once it is gone: what it held may be collected by now."""

    def change(manifest: ShardManifest) -> ShardManifest:
        found = find_checkpoint(manifest, id)
        if found is None:
            raise NotFoundError(
                f"shard {log.shard} has no checkpoint {id!r}", hint="it was dropped, or its lease is over; take another one"
            )
        return manifest.but(checkpoints={**manifest.checkpoints, found[0]: found[1].but(expires_at=expires_at)})

    log.manifests.commit(change)


def unpin(log: ShardLog, id: str) -> bool:
    """Drop a checkpoint. False: this shard has it not (any more)."""
    was_there = False

    def change(manifest: ShardManifest) -> ShardManifest | None:
        nonlocal was_there
        found = find_checkpoint(manifest, id)
        if found is None:
            return None
        if found[1].clone is not None:
            raise InvalidInputError(
                f"checkpoint {id!r} holds what the clone at {found[1].clone} reads", hint="detach or drop the clone, which drops it"
            )
        was_there = True
        return manifest.but(checkpoints={other: record for other, record in manifest.checkpoints.items() if other != found[0]})

    log.manifests.commit(change)
    return was_there


def listed(manifests: Sequence[ShardManifest]) -> list[Checkpoint]:
    """The checkpoints of a table, oldest first."""
    found: dict[str, list[CheckpointRecord]] = {}
    for manifest in manifests:
        for id, record in manifest.checkpoints.items():
            if not (record.clone or "").startswith(IN_TABLE):
                found.setdefault(id, []).append(record)

    def is_complete(rows: list[CheckpointRecord]) -> bool:
        return len(rows) == (len(rows[0].shards) or len(manifests))

    return sorted(
        (
            Checkpoint(id, rows[0].name, rows[0].created_at, rows[0].expires_at, is_complete(rows), rows[0].clone)
            for id, rows in found.items()
        ),
        key=lambda checkpoint: (checkpoint.created, checkpoint.id),
    )


def resolved(manifests: Sequence[ShardManifest], at: str) -> tuple[str, list[str]]:
    """The id of a checkpoint of a table, given by id or name, and the shards it is read from.

    Raises:
        NotFoundError: a shard that was there then has it no more, or none has it.
    """
    ids = [found[0] for manifest in manifests if (found := find_checkpoint(manifest, at)) is not None]
    id = at if at in ids else ids[0] if ids else at  # once: two of one name must not be mixed
    held = {manifest.shard: manifest.checkpoints[id] for manifest in manifests if id in manifest.checkpoints}
    wanted = next((record.shards for record in held.values() if record.shards), ()) or tuple(manifest.shard for manifest in manifests)
    missing = [shard for shard in wanted if shard not in held]
    if missing or not held:
        where = f" in shard {missing[0]}" if held else ""
        raise NotFoundError(f"there is no checkpoint {at!r}{where}", hint="see table.checkpoints(); leases expire")
    return id, list(wanted)
