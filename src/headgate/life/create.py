"""Bringing a table into being: its first manifests, and what opening one has to check or finish.

Owns: the steps after the table's manifest stands, and whether it says what can be. Does not own:
what a table may look like (schema, sharding, indexes).

The table's manifest is created first and decides. The shards' manifests follow, then the word that
the table is there. Whoever opens a table whose creation was cut short does the rest.
"""

from __future__ import annotations

import re

import pyarrow as pa

from headgate.errors import CorruptEntryError, NotFoundError
from headgate.failpoint import failpoint
from headgate.manifest import ManifestChain, ShardManifest, TableManifest
from headgate.manifest.model import WalState
from headgate.schema import decode_schema
from headgate.shard import Places
from headgate.store import Store


def load_if_there(chain: ManifestChain[TableManifest]) -> TableManifest | None:
    """The table's latest manifest; None: there is no table."""
    try:
        return chain.load()
    except NotFoundError:
        return None


def opened(places: Places, store: Store, chain: ManifestChain[TableManifest], manifest: TableManifest) -> TableManifest:
    """The manifest of a table that is there, its creation finished if it was not.

    Raises:
        NotFoundError: it was dropped, or is a clone that was never finished.
        CorruptEntryError: the manifest says what cannot be.
    """
    _check(chain, manifest)
    uri = places.table.uri
    if manifest.state == "cloning":
        # Never made into an empty table (K10).
        parent = manifest.parent.uri if manifest.parent is not None else "another table"
        at = manifest.parent.checkpoint if manifest.parent is not None else ""
        raise NotFoundError(
            f"the table at {uri} is a clone of {parent} that was begun and not finished",
            hint=f"clone({parent!r}, {uri!r}, checkpoint={at!r}) finishes it; drop_table({uri!r}) gives it up",
        )
    if manifest.state == "dropping":
        raise NotFoundError(f"the table at {uri} is being dropped", hint=f"drop_table({uri!r}) finishes that")
    if manifest.state == "creating":
        manifest = _finish_creating(places, store, chain, manifest)
        _check(chain, manifest)
    if manifest.state == "dropped":
        raise NotFoundError(f"the table at {uri} was dropped", hint="create it again under this or another URI")
    return manifest


def _check(chain: ManifestChain[TableManifest], manifest: TableManifest) -> None:
    """A table manifest that is whole and says what cannot be is damaged too."""
    try:
        names = decode_schema(manifest.arrow_schema).names
        ids = manifest.field_ids
        if ids and (len(ids) != len(names) or len(set(ids)) != len(ids) or min(ids) < 1 or max(ids) >= manifest.next_field_id):
            raise ValueError(f"its {len(names)} columns cannot have the ids {ids}")
        used = [*manifest.key, *(index.column for index in manifest.indexes), manifest.sharding.column]
        wrong = next((name for name in used if name is not None and name not in names), None)
        wrong = wrong or next((name for name in manifest.shards if not re.fullmatch("[A-Za-z0-9_-]{1,64}", name)), None)
        if wrong is not None:
            raise ValueError(f"{wrong!r} is no column or no shard")
    except (pa.ArrowException, ValueError, OSError) as error:
        key = chain.key(manifest.version)
        raise CorruptEntryError(f"{key} is no table's manifest: {error}", object=key) from None


def _finish_creating(places: Places, store: Store, chain: ManifestChain[TableManifest], manifest: TableManifest) -> TableManifest:
    """Make the shards' first manifests, then say that the table is there. Can be repeated, by anyone."""
    for name in manifest.shards:
        first = ShardManifest(
            version=0,
            id=places.clock.token(),
            table_id=manifest.table_id,
            shard=name,
            wal=WalState(id=manifest.wal_id, uri=manifest.wal_uri, clean_at=0),
        )
        places.manifests(store, name, manifest.table_id).create_first(first)
    failpoint("create.shards")
    return chain.commit(lambda m: m.but(state="active") if m.state == "creating" else None)
