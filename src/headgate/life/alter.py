"""Changing a table's columns while it is written and read.

Owns: what each change makes of the table's manifest, and what is refused. Does not own: the commit
(watch), reading old rows (schema).

No row is rewritten. A change is one commit on the table's manifest; rows that were written before
it are read as the table of now, by the ids of their columns. Each function here is given the latest
manifest, and again if another commit came first: so of two changes at once neither is lost (K12),
and what is refused is refused by what the table is at that moment, with nothing written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from headgate.errors import InvalidInputError
from headgate.manifest import TableManifest
from headgate.schema import check_schema, decode_schema, encode_schema, widens
from headgate.sharding import keeps_shards


def with_columns(manifest: TableManifest, columns: pa.Schema) -> TableManifest:
    """The table with further columns, after those it has. They are null in every row there is."""
    if not isinstance(columns, pa.Schema) or not len(columns):
        raise InvalidInputError(f"the columns to add are {columns!r}", hint="pass a schema, e.g. pa.schema([('note', pa.string())])")
    schema = decode_schema(manifest.arrow_schema)
    known = {name.casefold(): name for name in schema.names}
    for field in columns:
        if field.name.casefold() in known:
            raise InvalidInputError(
                f"the table has a column {known[field.name.casefold()]!r} already",
                hint="choose another name; case does not tell names apart",
            )
        if not field.nullable:
            raise InvalidInputError(
                f"the new column {field.name!r} may not be null", hint="make it nullable: the rows that are there have no value for it"
            )
    ids, after = _ids(manifest, len(schema))
    new = tuple(range(after, after + len(columns)))
    return _changed(manifest, [*schema, *columns], ids + new, after + len(columns))


def without_columns(manifest: TableManifest, names: Sequence[str]) -> TableManifest:
    """The table without some columns. Their values are gone from every read."""
    if isinstance(names, str) or not isinstance(names, Sequence) or not names:
        raise InvalidInputError(f"the columns to drop are {names!r}", hint="pass a list of names")
    schema = decode_schema(manifest.arrow_schema)
    for name in names:
        _index(schema, name)
        role = _role(manifest, name)
        if role is not None:
            raise InvalidInputError(f"the column {name!r} cannot be dropped: {role}", hint="copy the rows into a table without it")
    kept = [number for number, field in enumerate(schema) if field.name not in names]
    if not kept:
        raise InvalidInputError("a table needs at least one column", hint="add another before you drop the last")
    ids, after = _ids(manifest, len(schema))
    return _changed(manifest, [schema.field(number) for number in kept], tuple(ids[number] for number in kept), after)


def with_renamed(manifest: TableManifest, old: str, new: str) -> TableManifest | None:
    """The table with a column under another name. Key, sharding and indexes follow."""
    schema = decode_schema(manifest.arrow_schema)
    index = _index(schema, old)
    if not isinstance(new, str):
        raise InvalidInputError(f"the new name is {new!r}", hint="pass a string")
    if new == old:
        return None
    taken = next((name for name in schema.names if name.casefold() == new.casefold() and name != old), None)
    if taken is not None:
        raise InvalidInputError(f"the table has a column {taken!r} already", hint="choose another name; case does not tell names apart")
    fields = [field.with_name(new) if number == index else field for number, field in enumerate(schema)]
    renamed = manifest.but(
        key=tuple(new if name == old else name for name in manifest.key),
        sharding=manifest.sharding.but(column=new) if manifest.sharding.column == old else manifest.sharding,
        indexes=tuple(index.but(column=new) if index.column == old else index for index in manifest.indexes),
    )
    return _changed(renamed, fields, *_ids(manifest, len(schema)))


def with_widened(manifest: TableManifest, name: str, kind: pa.DataType) -> TableManifest | None:
    """The table with a column of a type that holds all it held, and more."""
    schema = decode_schema(manifest.arrow_schema)
    index = _index(schema, name)
    if not isinstance(kind, pa.DataType):
        raise InvalidInputError(f"the new type of {name!r} is {kind!r}", hint="pass a pyarrow type, e.g. pa.int64()")
    field = schema.field(index)
    if field.type.equals(kind):
        return None
    if not widens(field.type, kind) or (name == manifest.sharding.column and not keeps_shards(field.type, kind)):
        raise InvalidInputError(
            f"the column {name!r} of type {field.type} cannot become {kind}",
            hint="integers, floats and decimals can become wider ones of their kind, string large_string, binary large_binary",
        )
    fields = [field.with_type(kind) if number == index else other for number, other in enumerate(schema)]
    return _changed(manifest, fields, *_ids(manifest, len(schema)))


def _ids(manifest: TableManifest, columns: int) -> tuple[tuple[int, ...], int]:
    """The columns' ids, and the next that was never used; old tables have them in order."""
    return manifest.field_ids or tuple(range(1, columns + 1)), manifest.next_field_id or columns + 1


def _changed(manifest: TableManifest, fields: Sequence[pa.Field], ids: tuple[int, ...], next_id: int) -> TableManifest:
    """With these columns, checked as those of a new table are."""
    before = decode_schema(manifest.arrow_schema)
    schema, _ = check_schema(pa.schema(fields), manifest.key)
    # In a table that had no ids yet rows are known by the names that columns have now, before its first change.
    unnumbered = manifest.names_without_ids or (() if manifest.field_ids else tuple(before.names))
    return manifest.but(
        arrow_schema=encode_schema(schema.with_metadata(before.metadata)),
        field_ids=ids,
        next_field_id=next_id,
        names_without_ids=unnumbered,
    )


def _index(schema: pa.Schema, name: Any) -> int:
    if not isinstance(name, str) or name not in schema.names:
        raise InvalidInputError(f"the table has no column {name!r}", hint=f"columns are {', '.join(schema.names)}")
    return int(schema.get_field_index(name))


def _role(manifest: TableManifest, name: str) -> str | None:
    """Why the table cannot be without a column."""
    if name in manifest.key:
        return "it is part of the key"
    if name == manifest.sharding.column:
        return "rows find their shard by it"
    kind = next((index.kind for index in manifest.indexes if index.column == name), None)
    return None if kind is None else f"it has a {kind} index"
