"""Tables: a schema, an optional key, a sharding rule and a list of shards.

Owns: creating, opening, and the handle. Does not own: what happens inside a shard, what a change of
columns means (life), how rows are read (query).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import pyarrow as pa

from headgate.clock import SYSTEM_CLOCK
from headgate.errors import AlreadyExistsError, CorruptEntryError, InvalidInputError, NotFoundError, SchemaMismatchError
from headgate.failpoint import failpoint
from headgate.indexes import check_indexes
from headgate.life.alter import with_columns, with_renamed, with_widened, without_columns
from headgate.life.status import RunInfo, TableStatus, shard_runs, shard_status
from headgate.life.verify import VerifyReport, verify_shard
from headgate.manifest import ManifestChain, ShardManifest, TableManifest
from headgate.manifest.model import AnyIndex, ShardingRule, WalState
from headgate.schema import RowRules, check_schema, decode_schema, encode_schema
from headgate.shard import Places, Shard
from headgate.sharding import check_sharding, first_shards, unsharded
from headgate.store import Location, Store, probe
from headgate.wal.collect import check_trim, trim
from headgate.watch import SchemaWatch


class Table:
    """A handle on a table. Pickles, and can be used from many threads.

    It shows the table as last seen: when it was opened, or by ``refresh``, a read or a change through
    it. Reads always look at the latest. It keeps what its shards have read for the next read; nothing
    of that is pickled.
    """

    def __init__(self, places: Places, manifest: TableManifest) -> None:
        self._places, self._first = places, manifest
        self._known: tuple[TableManifest, RowRules, dict[str, Shard]] | None = None

    @cached_property
    def _watch(self) -> SchemaWatch:
        return SchemaWatch(self._places.table_manifests(), self.uri, self._places.clock, self._first)

    @property
    def _manifest(self) -> TableManifest:
        return self._watch.manifest

    def __getstate__(self) -> dict[str, object]:
        return {"_places": self._places, "_first": self._manifest, "_known": None}

    def __eq__(self, other: object) -> bool:
        """Is it the same table, in the same place?"""
        return isinstance(other, Table) and (self._places, self._first.table_id) == (other._places, other._first.table_id)

    def __hash__(self) -> int:
        return hash((self.uri, self._first.table_id))

    # -- what it is

    @property
    def uri(self) -> str:
        return self._places.table.uri

    @property
    def schema(self) -> pa.Schema:
        return self._watch.rules.schema

    @property
    def key(self) -> tuple[str, ...]:
        return self._manifest.key

    @property
    def sharding(self) -> ShardingRule:
        return self._manifest.sharding

    @property
    def indexes(self) -> tuple[AnyIndex, ...]:
        return self._manifest.indexes

    @property
    def shards(self) -> list[Shard]:
        """The same objects as before, as long as rows look the same: they keep what they have read."""
        return list(self._shards().values())

    def shard(self, id: str) -> Shard:
        """One shard, by its id."""
        shards = self._shards()
        if id not in shards:
            raise NotFoundError(f"{self.uri} has no shard {id!r}", hint=f"it has {', '.join(list(shards)[:20]) or 'none yet'}")
        return shards[id]

    def _shards(self) -> dict[str, Shard]:
        manifest, rules = self._watch.seen
        known = self._known
        if known is not None and known[0] is manifest:
            return known[2]
        same = known[2] if known is not None and known[1] is rules else {}
        shards = {name: same.get(name) or Shard.of(name, self._places, self._watch) for name in manifest.shards}
        self._known = manifest, rules, shards
        return shards

    def refresh(self) -> Table:
        """Look at the latest table manifest: columns and shards that others changed. Returns this handle.

        Raises:
            NotFoundError: the table was dropped.
        """
        self._watch.refresh()
        return self

    def status(self) -> TableStatus:
        """The state of every shard, read now. Writes nothing."""
        self.refresh()
        return TableStatus(uri=self.uri, shards=tuple(shard_status(shard.log) for shard in self.shards))

    def runs(self) -> list[RunInfo]:
        """Every run and slice with its URI: plain Lance datasets, sorted by key, for any Lance reader. Reads only."""
        self.refresh()
        return [run for shard in self.shards for run in shard_runs(shard.log, self.uri)]

    def verify(self, deep: bool = False) -> VerifyReport:
        """Walk every shard's log and say what is wrong where. ``deep`` also reads and checks every entry that is left."""
        return VerifyReport.of([verify_shard(shard.log, deep=deep) for shard in self.shards])

    # -- its columns

    def add_columns(self, columns: pa.Schema) -> None:
        """Add nullable columns at the end. Rows that are there have nulls in them. No row is rewritten.

        A live writer learns of it when a put does not fit what it knows, and within about a second by
        itself; from then on it takes only rows that have the new columns (dicts may leave them out).

        Raises:
            InvalidInputError: a name is taken (whatever its case) or reserved, a type cannot be stored,
                or a column is not nullable. Nothing was written.
        """
        self._watch.commit(lambda manifest: with_columns(manifest, columns))

    def drop_columns(self, names: Sequence[str]) -> None:
        """Drop columns, with their values. A column that is added later under the same name starts empty.

        Writers in other processes learn of it within about a second. Until then they take rows with the
        dropped columns, whose values are not kept. So wait that long before you use a name again.

        Raises:
            InvalidInputError: there is no such column, it belongs to the key, the sharding or an index, or it
                is the last one. Nothing was written.
        """
        self._watch.commit(lambda manifest: without_columns(manifest, names))

    def rename_column(self, old: str, new: str) -> None:
        """Give a column another name; its values stay. Key, sharding and indexes follow.

        Raises:
            InvalidInputError: there is no such column, or the new name cannot be. Nothing was written.
        """
        self._watch.commit(lambda manifest: with_renamed(manifest, old, new))

    def widen_column(self, name: str, type: pa.DataType) -> None:
        """Give a column a type that holds every value it can hold now, in the same order.

        Integers become wider integers (unsigned ones also wider signed ones), floats wider floats,
        decimals of the same scale more precise ones, ``string`` ``large_string``, ``binary``
        ``large_binary``. Key columns too. Nothing else: not integers to floats, not parts of lists or structs.

        Raises:
            InvalidInputError: there is no such column, or some value might not fit. Nothing was written.
        """
        self._watch.commit(lambda manifest: with_widened(manifest, name, type))

    # -- its log

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
        indexes: ``vector_index("embedding")``, ``text_index("body")``, ``scalar_index("ts")``.
        if_exists: "open" returns a table that is there already, if its schema and key are the same (and its
            indexes, if any are given).

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
    kept = check_indexes(indexes, checked)
    places = _places(uri, storage_options, wal_uri, wal_storage_options)
    store = places.table_store()
    chain = places.table_manifests(store)
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
            field_ids=tuple(range(1, len(checked) + 1)),
            next_field_id=len(checked) + 1,
            key=names,
            indexes=kept,
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
    differs = not table.schema.equals(checked) or table.key != names or table.sharding != rule
    if differs or (indexes is not None and set(table.indexes) != set(kept)):
        raise SchemaMismatchError(
            f"the table at {table.uri} has another schema, key, sharding or indexes", hint="open it with open_table to see what it has"
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
    chain = places.table_manifests(store)
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


def _load(chain: ManifestChain[TableManifest]) -> TableManifest | None:
    try:
        return chain.load()
    except NotFoundError:
        return None


def _check(chain: ManifestChain[TableManifest], manifest: TableManifest) -> None:
    """A table manifest that is whole and says what cannot be is damaged too."""
    try:
        names = decode_schema(manifest.arrow_schema).names
        used = [*manifest.key, *(index.column for index in manifest.indexes), manifest.sharding.column]
        wrong = next((name for name in used if name is not None and name not in names), None)
        ids = manifest.field_ids
        if ids and (len(ids) != len(names) or len(set(ids)) != len(ids) or min(ids) < 1 or max(ids) >= manifest.next_field_id):
            wrong = str(ids)
        wrong = wrong or next((name for name in manifest.shards if not re.fullmatch("[A-Za-z0-9_-]{1,64}", name)), None)
        if wrong is not None:
            raise ValueError(f"{wrong} is no column or no shard")
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
