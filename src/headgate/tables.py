"""Making, opening, cloning, dropping and repairing tables: all that begins with a URI.

Owns: the functions, and finding the stores that a URI and its options mean. Does not own: the handle that
they give (table), the steps (life).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pyarrow as pa

from headgate.checkpoint import Checkpoint
from headgate.clock import SYSTEM_CLOCK
from headgate.errors import AlreadyExistsError, InvalidInputError, NotFoundError, SchemaMismatchError
from headgate.failpoint import failpoint
from headgate.indexes import check_indexes
from headgate.life.clone import clone_table
from headgate.life.create import load_if_there, opened
from headgate.life.drop import DropReport, drop
from headgate.life.mend import Progress as RepairProgress
from headgate.life.repair import RepairReport, repair_table_manifest, shown
from headgate.manifest import TableManifest
from headgate.manifest.model import ShardingRule
from headgate.schema import check_schema, encode_schema
from headgate.shard import Places
from headgate.sharding import check_sharding, first_shards, unsharded
from headgate.store import Location, probe
from headgate.table import Table


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
    existing = load_if_there(chain)
    if existing is None or existing.state == "dropped":
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
        # Where one was dropped the versions go on: whoever still holds the old one cannot commit over the new one.
        if existing is None and not chain.create_first(first):
            existing = chain.load()
        if existing is not None and existing.state == "dropped":
            chain.commit(lambda latest: first if latest.state == "dropped" else None)
        existing = chain.load()
        if existing.table_id == first.table_id:
            failpoint("create.table")
            return Table(places, opened(places, store, chain, existing))
    if if_exists == "error":
        raise AlreadyExistsError(f"there is a table at {places.table.uri}", hint="open it with open_table, or pass if_exists='open'")
    table = Table(places, opened(places, store, chain, existing))
    differs = not table.schema.equals(checked) or table.key != names or _at_first(table.sharding) != _at_first(rule)
    if differs or (indexes is not None and set(table.indexes) != set(kept)):
        raise SchemaMismatchError(
            f"the table at {table.uri} has another schema, key, sharding or indexes", hint="open it with open_table to see what it has"
        )
    return table


def _at_first(rule: ShardingRule) -> ShardingRule:
    """A rule as it was before any shard was split."""
    return rule.but(ranges=(), column=None if rule.kind == "unsharded" else rule.column)


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
    places, manifest = _found(uri, storage_options, wal_uri, wal_storage_options)
    if manifest is None:
        raise NotFoundError(
            f"there is no table at {places.table.uri}", hint="check the URI and the storage options; create_table makes one"
        )
    store = places.table_store()
    return Table(places, opened(places, store, places.table_manifests(store), manifest))


def clone(
    source_uri: str | os.PathLike[str],
    target_uri: str | os.PathLike[str],
    checkpoint: str | Checkpoint | None = None,
    *,
    wal_uri: str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    wal_storage_options: Mapping[str, Any] | None = None,
    source_wal_uri: str | os.PathLike[str] | None = None,
    source_wal_storage_options: Mapping[str, Any] | None = None,
) -> Table:
    """Make a table that begins with the rows of another one's checkpoint. No row is copied, however many there are.

    The clone reads the parent's files until compaction has rewritten them or ``detach`` does; a pin in the parent holds
    them that long. It has a log of its own, and both are written independently. If it is interrupted, call it again
    with the same arguments: it goes on where it was.

    Args:
        checkpoint: which of the source's states, by its id or name. None: what is durable now.
        wal_uri: where the clone's log is to be; None: beside it. The source's is not inherited.
        storage_options: for source and target.
        source_wal_uri: where the source's log is; None: where it was when the table was created. Not needed if the
            checkpoint needs nothing of it (``scope="all"``).

    Raises:
        NotFoundError: there is no such table, or no such checkpoint (its lease may be over).
        AlreadyExistsError: there is another table at the target, or a clone of another checkpoint.
        DataLossError: part of the log that the checkpoint needs is gone.
    """
    at = checkpoint.id if isinstance(checkpoint, Checkpoint) else checkpoint
    if at is not None and (not isinstance(at, str) or not at):
        raise InvalidInputError(f"checkpoint is {checkpoint!r}", hint="a checkpoint, its id or its name")
    source, _ = _found(source_uri, storage_options, source_wal_uri, source_wal_storage_options)
    target = _places(target_uri, storage_options, wal_uri, wal_storage_options)
    return Table(target, clone_table(source, target, at))


def drop_table(
    uri: str | os.PathLike[str],
    confirm: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None = None,
    wal_uri: str | os.PathLike[str] | None = None,
    wal_storage_options: Mapping[str, Any] | None = None,
) -> DropReport:
    """Delete a table with all its rows, its log and its checkpoints. If it is interrupted, call it again.

    Nobody can claim it from the first step on. A writer that is still open learns of it when it next commits, within half
    a minute; what it is told to be durable until then is gone with the rest, so close writers first. One small object for the
    table and one for each shard stay, so that whoever still holds a handle learns that it is gone; a new table may be
    created at the same URI.

    Args:
        confirm: the URI once more.
        wal_uri: where its log is; None: where it was when the table was created.

    Raises:
        InvalidInputError: ``confirm`` is not the URI, or clones read the table's files. Nothing was dropped.
        NotFoundError: there is no table.
    """
    if os.fspath(confirm) != os.fspath(uri):
        raise InvalidInputError(f"confirm is {confirm!r}, and the table is {uri!r}", hint="pass the same URI twice: all its rows go")
    places, _ = _found(uri, storage_options, wal_uri, wal_storage_options)
    return drop(places)


def repair_table(
    uri: str | os.PathLike[str],
    dry_run: bool = True,
    *,
    storage_options: Mapping[str, Any] | None = None,
    wal_uri: str | os.PathLike[str] | None = None,
    wal_storage_options: Mapping[str, Any] | None = None,
    progress: RepairProgress | None = None,
) -> RepairReport:
    """``Table.repair`` for a table that may be too damaged to be opened: its own manifest comes first.

    With ``dry_run`` and a table manifest that cannot be read, the shards are not looked at: which there are is not known.
    """
    places = _places(uri, storage_options, wal_uri, wal_storage_options)
    store = places.table_store()
    first = repair_table_manifest(store, places.table_manifests(store), places.clock, dry_run=dry_run)
    if dry_run and first.steps:
        return first
    rest = open_table(uri, storage_options, wal_uri, wal_storage_options).repair(dry_run, progress)
    return RepairReport.of([shown(first, places.table.uri), rest], dry_run=dry_run)


def _found(
    uri: str | os.PathLike[str],
    options: Mapping[str, Any] | None,
    wal_uri: str | os.PathLike[str] | None,
    wal_options: Mapping[str, Any] | None,
) -> tuple[Places, TableManifest | None]:
    """A table that should be there, with its log where it was said to be, else where the table itself says."""
    places = _places(uri, options, wal_uri, wal_options)
    manifest = load_if_there(places.table_manifests())
    if wal_uri is None and manifest is not None and manifest.wal_uri is not None:
        places = _places(uri, options, manifest.wal_uri, wal_options)
    return places, manifest


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
