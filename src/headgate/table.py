"""Tables: a schema, an optional key, a sharding rule and a list of shards.

Owns: creating and opening. Does not own: what happens inside a shard.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from headgate.clock import SYSTEM_CLOCK
from headgate.errors import AlreadyExistsError, CorruptEntryError, InvalidInputError, NotFoundError, SchemaMismatchError
from headgate.failpoint import failpoint
from headgate.life.status import TableStatus, shard_status
from headgate.life.verify import VerifyReport, verify_shard
from headgate.manifest import ManifestChain, ShardManifest, TableManifest
from headgate.manifest.model import ShardingRule, WalState
from headgate.schema import check_schema, decode_schema, encode_schema
from headgate.shard import Places, Shard
from headgate.sharding import check_sharding, first_shards, unsharded
from headgate.store import Location, Store, probe
from headgate.wal.collect import check_trim, trim

_FOLDER = "table/"


@dataclass(frozen=True)
class Table:
    """A handle on a table. Holds no connection, pickles, and can be used from many threads."""

    _places: Places
    _manifest: TableManifest

    @property
    def uri(self) -> str:
        return self._places.table.uri

    @property
    def schema(self) -> pa.Schema:
        return decode_schema(self._manifest.arrow_schema)

    @property
    def key(self) -> tuple[str, ...]:
        return self._manifest.key

    @property
    def sharding(self) -> ShardingRule:
        return self._manifest.sharding

    @property
    def shards(self) -> list[Shard]:
        schema = self.schema
        return [Shard(name, self._manifest.table_id, self._places, schema, self.key) for name in self._manifest.shards]

    def shard(self, id: str) -> Shard:
        """One shard, by its id."""
        for shard in self.shards:
            if shard.id == id:
                return shard
        raise NotFoundError(f"{self.uri} has no shard {id!r}", hint=f"it has {', '.join(self._manifest.shards[:20]) or 'none yet'}")

    def status(self) -> TableStatus:
        """The state of every shard, read now. Writes nothing."""
        return TableStatus(uri=self.uri, shards=tuple(shard_status(shard.log) for shard in self.shards))

    def verify(self, deep: bool = False) -> VerifyReport:
        """Walk every shard's log and say what is wrong where. ``deep`` also reads and checks every entry that is left."""
        return VerifyReport.of([verify_shard(shard.log, deep=deep) for shard in self.shards])

    def trim(self, before: int | Mapping[str, int]) -> None:
        """Give up the log before a position, for good. For tables written in WAL-only mode.

        Args:
            before: a position for every shard, or one per shard id. Nothing is deleted yet; collection may then.
        """
        wanted = before if isinstance(before, Mapping) else {shard.id: before for shard in self.shards}
        logs = [(self.shard(name).log, position) for name, position in wanted.items()]
        for log, position in logs:
            check_trim(log, position)  # all are checked before any is trimmed
        for log, position in logs:
            trim(log, position)

    def __repr__(self) -> str:
        return f"Table({self.uri!r}, key={list(self.key)}, shards={len(self._manifest.shards)})"


def create_table(
    uri: str | os.PathLike[str],
    schema: pa.Schema,
    key: str | Sequence[str] | None = None,
    *,
    sharding: ShardingRule | None = None,
    storage_options: Mapping[str, Any] | None = None,
    wal_uri: str | os.PathLike[str] | None = None,
    wal_storage_options: Mapping[str, Any] | None = None,
    indexes: Sequence[Any] | None = None,
    if_exists: Literal["error", "open"] = "error",
) -> Table:
    """Create a table.

    Args:
        uri: a path, or ``s3://``, ``gs://``, ``az://``, ``memory://``.
        key: the column or columns that identify a row; None: append-only.
        sharding: ``unsharded()`` (the default), ``bucket("id", 4)`` or ``identity("tenant")``.
        storage_options: credentials and settings, with object_store's names (``aws_…``, …).
        wal_uri: keep the log in another store, for example a faster one.
        if_exists: "open" returns a table that is there already, if its schema and key are the same.

    Raises:
        InvalidInputError: something in it cannot be; nothing was written.
        UnsupportedStoreError: the store lacks what the protocol needs.
        AlreadyExistsError: there is a table.
    """
    if if_exists not in ("error", "open"):
        raise InvalidInputError(f"if_exists is {if_exists!r}", hint='"error" or "open"')
    checked, names = check_schema(schema, key)
    rule = sharding or unsharded()
    check_sharding(rule, checked, names)
    if indexes:
        raise InvalidInputError("indexes are not available in this version", hint="leave indexes out")
    places = _places(uri, storage_options, wal_uri, wal_storage_options)
    store = places.table_store()
    chain = _chain(store, places)
    existing = _load(chain)
    if existing is None:
        probe(store, places.clock)
        if places.wal_uri is not None:
            probe(places.wal_store(), places.clock)
        clock = places.clock
        first = TableManifest(
            version=0,
            id=clock.token(),
            table_id=clock.token(),
            arrow_schema=encode_schema(checked),
            key=names,
            sharding=rule,
            shards=first_shards(rule),
            wal_id=clock.token(),
            wal_uri=places.wal_uri,
            created_at=clock.now(),
        )
        # The table manifest is created first and decides: of two creators one wins, and its shards are made.
        if chain.create_first(first):
            failpoint("create.table")
            return _finish_creating(places, store, chain, chain.load())
        existing = chain.load()
    if if_exists == "error":
        raise AlreadyExistsError(f"there is a table at {places.table.uri}", hint="open it with open_table, or pass if_exists='open'")
    table = _opened(places, store, chain, existing)
    if not table.schema.equals(checked) or table.key != names or table.sharding != rule:
        raise SchemaMismatchError(
            f"the table at {table.uri} has another schema, key or sharding", hint="open it with open_table to see what it has"
        )
    return table


def open_table(
    uri: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None = None,
    wal_uri: str | os.PathLike[str] | None = None,
    wal_storage_options: Mapping[str, Any] | None = None,
) -> Table:
    """Open a table. Fences nobody, and writes nothing, unless its creation was cut short: then it is finished.

    Args:
        wal_uri: where its log is; None: where it was when the table was created.

    Raises:
        NotFoundError: there is no table.
    """
    places = _places(uri, storage_options, wal_uri, wal_storage_options)
    store = places.table_store()
    chain = _chain(store, places)
    manifest = _load(chain)
    if manifest is None:
        raise NotFoundError(
            f"there is no table at {places.table.uri}", hint="check the URI and the storage options; create_table makes one"
        )
    if wal_uri is None and manifest.wal_uri is not None:
        places = _places(uri, storage_options, manifest.wal_uri, wal_storage_options)
    return _opened(places, store, chain, manifest)


def _places(
    uri: str | os.PathLike[str],
    options: Mapping[str, Any] | None,
    wal_uri: str | os.PathLike[str] | None,
    wal_options: Mapping[str, Any] | None,
) -> Places:
    table = Location.parse(uri, options)
    if wal_uri is None:
        return Places(table, None, SYSTEM_CLOCK)
    wal = Location.parse(wal_uri, wal_options)
    if wal_options is None and wal.scheme == table.scheme:
        wal = Location.parse(wal_uri, options)
    return Places(table, wal, SYSTEM_CLOCK)


def _chain(store: Store, places: Places) -> ManifestChain[TableManifest]:
    return ManifestChain(store, _FOLDER, TableManifest, places.clock)


def _load(chain: ManifestChain[TableManifest]) -> TableManifest | None:
    try:
        return chain.load()
    except NotFoundError:
        return None


def _check(chain: ManifestChain[TableManifest], manifest: TableManifest) -> None:
    """A table manifest that is whole and says what cannot be is damaged too."""
    try:
        names = decode_schema(manifest.arrow_schema).names
        wrong = next((name for name in manifest.key if name not in names), None)
        wrong = wrong or next((name for name in manifest.shards if not re.fullmatch("[A-Za-z0-9_-]{1,64}", name)), None)
        if wrong is not None:
            raise ValueError(f"{wrong!r} is no column or no shard")
    except (pa.ArrowException, ValueError, OSError) as error:
        key = chain.key(manifest.version)
        raise CorruptEntryError(f"{key} is no table's manifest: {error}", object=key) from None


def _opened(places: Places, store: Store, chain: ManifestChain[TableManifest], manifest: TableManifest) -> Table:
    _check(chain, manifest)
    if manifest.state == "dropped":
        raise NotFoundError(f"the table at {places.table.uri} was dropped", hint="create it again under this or another URI")
    if manifest.state == "creating":
        return _finish_creating(places, store, chain, manifest)
    return Table(places, manifest)


def _finish_creating(places: Places, store: Store, chain: ManifestChain[TableManifest], manifest: TableManifest) -> Table:
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
    active = chain.commit(lambda m: m.but(state="active") if m.state == "creating" else None)
    return _opened(places, store, chain, active)
