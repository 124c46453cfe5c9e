"""Shards for new values: how an identity-sharded table grows.

Owns: making a shard, and telling the table. Does not own: which shard a value belongs to (sharding).

Two steps, each of which can be repeated by anyone, in this order: the shard's first manifest, then
one commit on the table's manifest. So a shard that the table names can always be opened. Whoever
dies in between leaves a manifest that nobody reads and that the next one finds in its place; of
two at once, both end with the same shard.
"""

from __future__ import annotations

from collections.abc import Mapping

from headgate.clock import map_ordered
from headgate.errors import CorruptEntryError, InvalidInputError
from headgate.failpoint import failpoint
from headgate.manifest.model import ShardManifest, TableManifest, WalState
from headgate.shard import Places
from headgate.sharding import SHARDS_MAX, identity_shard
from headgate.watch import SchemaWatch

_CREATES_AT_ONCE = 16


def add_shards(watch: SchemaWatch, places: Places, values: Mapping[str, str | None]) -> TableManifest:
    """See that the table has a shard for each of these values (shard -> value). Can be repeated.

    Raises:
        InvalidInputError: there would be too many shards; none was made.
        NotFoundError: the table was dropped.
    """
    if not missing(watch.manifest, values):
        return watch.manifest
    manifest = watch.refresh()
    wanted = missing(manifest, values)
    if not wanted:
        return manifest
    store = places.table_store()

    # 1. The shards' first manifests. False: somebody else's stands there, and it says the same.
    def make(shard: str) -> bool:
        first = ShardManifest(
            version=0,
            id=places.clock.token(),
            table_id=manifest.table_id,
            shard=shard,
            wal=WalState(id=manifest.wal_id, uri=manifest.wal_uri, clean_at=0),
        )
        return places.manifests(store, shard, manifest.table_id).create_first(first)

    for _ in map_ordered(places.clock, make, list(wanted), parallel=_CREATES_AT_ONCE):
        pass
    failpoint("identity.shards")

    # 2. The table names them: from now on they exist.
    def named(latest: TableManifest) -> TableManifest | None:
        new = missing(latest, wanted)
        if not new:
            return None
        return latest.but(shards=(*latest.shards, *new), shard_values={**latest.shard_values, **new})

    return watch.commit(named)


def missing(manifest: TableManifest, values: Mapping[str, str | None]) -> dict[str, str | None]:
    """Those for which the table has no shard yet.

    Raises:
        InvalidInputError: there would be too many.
        CorruptEntryError: a shard is for another value.
    """
    known, new = manifest.shard_values, {}
    for shard, value in values.items():
        assert shard == identity_shard(value), "a shard is named after its value"
        if shard not in known:
            new[shard] = value
        elif known[shard] != value:
            raise CorruptEntryError(
                f"shard {shard} is for the value {known[shard]!r} by the table's manifest, and not for {value!r}", object=shard
            )
    if new and len(known) + len(new) > SHARDS_MAX:
        raise InvalidInputError(
            f"the table has {len(known)} shards, and {len(new)} more would be too many, the first for {next(iter(new.values()))!r}",
            hint=f"{SHARDS_MAX} at most; shard by bucket, or by a column with fewer values",
        )
    return new
