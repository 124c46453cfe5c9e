"""Is this the WAL store that the table was written with?

Owns: the marker object, and putting back what a wipe took. Does not own: when a shard is clean.

The marker stands in the WAL store and names table, shard and WAL id. A store without it is
accepted only if the manifest says ``clean``: nothing in the WAL is needed, and whoever last
wrote must first commit to the manifest before it acknowledges again. Then the seals are put
back from ``segments``, before the marker: a writer fenced long ago may still wake up and must
find its seal. If the process dies in between, the marker is still missing and it is all done again.
"""

from __future__ import annotations

from headgate.clock import map_ordered
from headgate.errors import DataLossError, NotFoundError, ObjectMissingError, WalStoreMismatchError
from headgate.failpoint import failpoint
from headgate.manifest import ChainPoint, ShardManifest
from headgate.manifest.document import decode_document, encode_document
from headgate.manifest.model import WalMarker
from headgate.store import create_exactly
from headgate.wal.entry import Header, decode_entry, encode_seal
from headgate.wal.log import ShardLog
from headgate.wal.space import WalSpace


def marker_stands(log: ShardLog, space: WalSpace) -> bool:
    """Is the marker there? Raises WalStoreMismatchError if it is another's."""
    try:
        data = space.store.get(space.marker_key)
    except ObjectMissingError:
        return False
    marker = decode_document(data, WalMarker, space.marker_key)
    if (marker.wal_id, marker.table_id, marker.shard) != (space.wal_id, space.table_id, space.shard):
        raise WalStoreMismatchError(
            f"the WAL store {space.store.uri} belongs to table {marker.table_id}, shard {marker.shard}, not to table "
            f"{space.table_id}, shard {space.shard}",
            hint="pass the wal_uri that this table was written with",
        )
    return True


def check_marker(log: ShardLog, manifest: ShardManifest) -> bool:
    """True: all is well. False: the marker is missing and, the shard being clean, may be put back.

    Raises:
        WalStoreMismatchError: a wrong store, or an empty one that was not clean.
        NotFoundError: it was dropped meanwhile, with its log.
    """
    space = log.space(manifest)
    if marker_stands(log, space):
        return True
    if manifest.is_clean:
        return False
    if log.manifests.load().state == "dropped":
        raise NotFoundError(f"shard {log.shard} was dropped", hint="open the table again, if there is one")
    where = manifest.wal.uri or "the table's own store"
    raise WalStoreMismatchError(
        f"the WAL store {space.store.uri} holds nothing of WAL {space.wal_id}, shard {space.shard}, and the shard still needs "
        f"its log (cursor {manifest.cursor.position}, last seen {manifest.wal_position_last_seen}); it was written to {where}",
        hint="pass the right wal_uri; if its objects were deleted, restore them: acknowledged rows are gone with them",
    )


def check_place(log: ShardLog, manifest: ShardManifest) -> None:
    """For readers: is this where the manifest's log is? Another store looks like an empty log, and hides what was acknowledged.

    Raises:
        WalStoreMismatchError: it is not.
    """
    if manifest.wal.id not in log.wals_seen and check_marker(log, manifest):
        log.wals_seen.add(manifest.wal.id)


def put_back(log: ShardLog, manifest: ShardManifest) -> None:
    """Every seal that the manifest knows of, then the marker. Can be repeated."""
    space = log.space(manifest)
    list(map_ordered(log.clock, lambda seal: _put_seal_back(log, space, manifest, seal), manifest.seals(), parallel=16))
    failpoint("marker.seals-back")
    body = encode_document(WalMarker(wal_id=space.wal_id, table_id=space.table_id, shard=space.shard))
    occupant = create_exactly(space.store, space.marker_key, body, log.clock, log.policy)
    if occupant is not None:
        marker_stands(log, space)  # another's: says so
    failpoint("marker.made")


def _put_seal_back(log: ShardLog, space: WalSpace, manifest: ShardManifest, seal: ChainPoint) -> None:
    occupant = put_seal(log, space, seal, by_epoch=manifest.epoch, durable_through=seal.position - 1, writer_id="put-back")
    if occupant is None:
        return
    key = space.key(*seal)
    if not decode_entry(occupant, key, space.wal_id, space.shard, *seal).is_seal:
        raise DataLossError(
            f"{key} holds rows where epoch {seal.epoch} was sealed: its fenced writer wrote after the WAL store was wiped, and may "
            f"have acknowledged them",
            object=key,
            hint="the rows are in that object; put them again, delete it, and never wipe a WAL store that an earlier writer can reach",
        )


def put_seal(log: ShardLog, space: WalSpace, at: ChainPoint, *, by_epoch: int, durable_through: int, writer_id: str) -> memoryview | None:
    """End an epoch. None: our seal stands there; otherwise what stands there instead."""
    header = Header(
        wal_id=space.wal_id,
        shard=space.shard,
        epoch=at.epoch,
        position=at.position,
        kind="seal",
        entry_id=log.clock.token(),
        writer_id=writer_id,
        durable_through=durable_through,
        time=log.clock.now(),
        by_epoch=by_epoch,
    )
    return create_exactly(space.store, space.key(*at), encode_seal(header), log.clock, log.policy)
