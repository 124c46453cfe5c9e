"""What rows may look like: the table's schema, and the check of every batch against it.

Owns: refusing, before the WAL sees it, whatever replay or Lance could not take back; reading
rows of any age as the table of now. Does not own: which shard a row goes to (sharding), changing
a table's schema (life), learning that it was changed (watch).

A column is known by its id, not by its name: ids are given once and never again. Rows carry the
ids of their columns wherever they are, in the log, in memory and in runs, so a column that was
renamed keeps its values, and one that was dropped does not lend them to its successor in name.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pyarrow as pa
import pyarrow.types as types

from headgate.errors import InvalidInputError, SchemaMismatchError, SnapshotExpiredError

RESERVED = frozenset(
    {
        "_op", "_epoch", "_position", "_load", "_time", "_rowid", "_rowaddr", "_rowoffset", "_distance", "_score",
        "_relevance_score", "_row_created_at_version", "_row_last_updated_at_version",
    }
)  # fmt: skip
RESERVED_PREFIX = "__headgate"

FIELD_ID = b"headgate.field_id"
"""In the metadata of a field: which column it is, whatever it was called then."""
FIELD_IDS = b"headgate.field_ids"
"""In the metadata of a schema: the same for all its fields, which is cheaper to put there."""

_KEY_TYPES = (
    types.is_integer, types.is_string, types.is_large_string, types.is_binary, types.is_large_binary, types.is_fixed_size_binary,
    types.is_date, types.is_timestamp, types.is_boolean, types.is_decimal128,
)  # fmt: skip
_PLAIN_TYPES = (
    types.is_boolean, types.is_integer, types.is_floating, types.is_decimal128, types.is_decimal256, types.is_date, types.is_time,
    types.is_timestamp, types.is_duration, types.is_string, types.is_large_string, types.is_binary, types.is_large_binary,
    types.is_fixed_size_binary, types.is_null,
)  # fmt: skip
_TEXT = (types.is_string, types.is_large_string, types.is_string_view)
_BYTES = (types.is_binary, types.is_large_binary, types.is_binary_view)


def encode_schema(schema: pa.Schema) -> str:
    return base64.b64encode(schema.serialize()).decode()


def decode_schema(text: str) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))


def _storable(kind: pa.DataType) -> pa.DataType:
    """Views become plain. A vector's elements become nullable: Lance takes no null vector otherwise, and a tombstone has one."""
    if types.is_string_view(kind):
        return pa.string()
    if types.is_binary_view(kind):
        return pa.binary()
    if types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_nullable(True), kind.list_size)
    if types.is_list(kind) or types.is_large_list(kind):
        value = kind.value_field.with_type(_storable(kind.value_type))
        return pa.list_(value) if types.is_list(kind) else pa.large_list(value)
    if types.is_struct(kind):
        return pa.struct([child.with_type(_storable(child.type)) for child in _children(kind)])
    return kind


def check_schema(schema: pa.Schema, key: str | Sequence[str] | None) -> tuple[pa.Schema, tuple[str, ...]]:
    """The schema and key that a table gets, types normalised to what is stored.

    Raises:
        InvalidInputError: something in it could not be stored, read back or told apart.
    """
    if not isinstance(schema, pa.Schema):
        raise InvalidInputError(
            f"the schema is a {type(schema).__name__}", hint="pass a pyarrow.Schema, e.g. pa.schema([('id', pa.int64())])"
        )
    if len(schema) == 0:
        raise InvalidInputError("the schema has no columns", hint="a table needs at least one")
    seen: dict[str, str] = {}
    fields = []
    for column in schema:
        name = column.name
        if not name or "." in name or "\0" in name or name != name.strip():
            raise InvalidInputError(f"a column is called {name!r}", hint="names are not empty and have no dots, NULs or outer spaces")
        if name in RESERVED or name.startswith(RESERVED_PREFIX):
            raise InvalidInputError(f"the column name {name!r} is reserved", hint=f"rename it; reserved are {', '.join(sorted(RESERVED))}")
        if name.casefold() in seen:
            other = seen[name.casefold()]
            what = f"two columns are called {name!r}" if other == name else f"columns {other!r} and {name!r} differ in case only"
            raise InvalidInputError(what, hint="rename one: SQL and Spark cannot tell them apart")
        seen[name.casefold()] = name
        kind = _storable(column.type)
        _check_type(name, kind)
        metadata = {key: value for key, value in (column.metadata or {}).items() if key != FIELD_ID}
        fields.append(pa.field(name, kind, column.nullable, metadata or None))
    names = (key,) if isinstance(key, str) else tuple(key or ())
    checked = pa.schema(fields)
    for name in names:
        if name not in checked.names:
            raise InvalidInputError(f"the key column {name!r} is not in the schema", hint=f"columns are {', '.join(checked.names)}")
        kind = checked.field(name).type
        if not any(check(kind) for check in _KEY_TYPES):
            raise InvalidInputError(
                f"the key column {name!r} has type {kind}",
                hint="keys are integers, strings, binary, booleans, dates, timestamps or decimals",
            )
    if len(set(names)) != len(names):
        raise InvalidInputError(f"the key names a column twice: {', '.join(names)}", hint="name each once")
    return checked, names


def _check_type(name: str, kind: pa.DataType) -> None:
    if any(check(kind) for check in _PLAIN_TYPES):
        return
    if types.is_list(kind) or types.is_large_list(kind):
        _check_type(name, kind.value_type)
        return
    if types.is_fixed_size_list(kind) and kind.list_size > 0 and (types.is_integer(kind.value_type) or types.is_floating(kind.value_type)):
        return
    if types.is_struct(kind) and kind.num_fields:
        children = [kind.field(i) for i in range(kind.num_fields)]
        if len({child.name.casefold() for child in children}) < len(children):
            raise InvalidInputError(f"the column {name!r} has two fields of one name", hint="rename one; case does not tell them apart")
        for child in children:
            _check_type(f"{name}.{child.name}", child.type)
        return
    hint = "decode it to its values first" if types.is_dictionary(kind) else "use plain types, lists, structs or vectors of numbers"
    raise InvalidInputError(f"the column {name!r} has type {kind}, which cannot be stored", hint=hint)


class RowRules:
    """Turns what a user puts into one batch that the log can take, or refuses it."""

    def __init__(
        self, schema: pa.Schema, key: tuple[str, ...], field_ids: tuple[int, ...] = (), names_without_ids: tuple[str, ...] = ()
    ) -> None:
        self.schema, self.key = schema, key
        self.field_ids = field_ids or tuple(range(1, len(schema) + 1))
        self.names_without_ids = dict(enumerate(names_without_ids, 1)) or dict(zip(self.field_ids, schema.names, strict=True))
        """What columns are called, by id, in rows that carry no ids."""
        # In the log deletes share a stream with upserts: nulls stand where a delete has no value.
        # Each field carries its id, so that old rows are read right after columns were renamed or dropped.
        self.log_schema = pa.schema(
            [
                pa.field(f.name, f.type, f.name not in key, {FIELD_ID: b"%d" % number})
                for f, number in zip(schema, self.field_ids, strict=True)
            ]
        )
        self.key_schema = pa.schema([self.log_schema.field(name) for name in key])
        self._ids = pa.KeyValueMetadata({FIELD_IDS: b",".join(b"%d" % number for number in self.field_ids)})
        self._nested = [number for number, field in enumerate(schema) if _has_required_child(field.type)]
        self._required = [schema.names.index(f.name) for f in schema if not f.nullable or f.name in key]

    def upsert(self, data: Any) -> pa.RecordBatch:
        """One batch with the log's schema, which says which columns these are.

        Raises:
            SchemaMismatchError: columns, order or types differ from the table's.
            InvalidInputError: no rows, or nulls where there may be none.
        """
        rows = self.checked(data)
        return rows if rows.schema.equals(self.log_schema, check_metadata=True) else rows.replace_schema_metadata(self._ids)

    def checked(self, data: Any) -> pa.RecordBatch:
        """The same, for whoever keeps the log's schema beside the rows.

        To give a batch another schema, Arrow lets go of the interpreter: where many threads put, each of them would be woken for nothing.
        """
        rows = data if type(data) is pa.RecordBatch else one_batch(data, self.schema)
        if not rows.schema.equals(self.log_schema):
            rows = _fitted(rows, self.log_schema, "the table")
        if rows.num_rows == 0:
            raise InvalidInputError("the batch has no rows", hint="put only batches with rows")
        for index in self._required:
            if rows.column(index).null_count:
                raise self._null(self.schema.field(index).name)
        for index in self._nested:
            _check_nested(rows.column(index), self.schema.field(index), self.schema.field(index).name)
        return rows

    def delete(self, data: Any) -> pa.RecordBatch:
        """The key columns of what is to be deleted."""
        if not self.key:
            raise InvalidInputError("the table has no key, so nothing can be deleted by key", hint="append-only tables keep every row")
        rows = data if type(data) is pa.RecordBatch else one_batch(data, self.key_schema, others="ignored")
        missing = [name for name in self.key if name not in rows.schema.names]
        if missing:
            raise SchemaMismatchError(f"the key column {missing[0]!r} is missing", hint=f"pass the key columns: {', '.join(self.key)}")
        rows = _fitted(rows.select(list(self.key)), self.key_schema, "the key")
        if rows.num_rows == 0:
            raise InvalidInputError("the batch has no rows", hint="delete at least one key")
        for name in self.key:
            if rows.column(name).null_count:
                raise self._null(name)
        return rows

    def names_in(self, schema: pa.Schema) -> dict[int, str]:
        """What rows with this schema call their columns, by id; also if they were written before there were ids."""
        return ids_in(schema) or self.names_without_ids

    def _null(self, name: str) -> InvalidInputError:
        what = "the key column" if name in self.key else "the column"
        return InvalidInputError(f"{what} {name!r} has nulls", hint="drop those rows, or give them a value")


def ids_in(schema: pa.Schema) -> dict[int, str]:
    """The names that columns had when these rows were written, by id. Empty: written before there were ids."""
    together = (schema.metadata or {}).get(FIELD_IDS)
    if together is not None:
        return {int(number): name for number, name in zip(together.split(b","), schema.names, strict=True)}
    return {int(f.metadata[FIELD_ID]): f.name for f in schema if f.metadata and FIELD_ID in f.metadata}


def as_now(rows: pa.RecordBatch, names: Mapping[int, str], rules: RowRules, columns: Sequence[str]) -> pa.RecordBatch:
    """Rows that were written under ``names`` (by field id), with these ``columns`` of the table of now, in this order.

    A column that did not exist then, or that a delete has not, is null; a type that was widened since is cast.
    The fields are nullable and bare, whatever the rows' age: batches of any age go together.

    Raises:
        SnapshotExpiredError: the rows are newer than ``rules``, and of a wider type.
    """
    arrays, fields = [], []
    places = {name: number for number, name in enumerate(rows.schema.names)}
    for name in columns:
        index = rules.schema.get_field_index(name)
        kind = rules.schema.field(index).type
        then = (names or rules.names_without_ids).get(rules.field_ids[index])
        place = places.get(then) if then is not None else None
        if place is None:
            array = pa.nulls(rows.num_rows, kind)
        else:
            array = rows.column(place)
            if not array.type.equals(kind):
                if widens(kind, array.type):
                    raise SnapshotExpiredError(f"the column {name!r} was widened to {array.type} meanwhile", hint="read again")
                array = array.cast(kind)
        arrays.append(array)
        fields.append(pa.field(name, kind))
    if not arrays:
        return pa.RecordBatch.from_struct_array(pa.Array.from_buffers(pa.struct([]), rows.num_rows, [None]))
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def widens(old: pa.DataType, new: pa.DataType) -> bool:
    """Does every value of ``old`` have an equal one in ``new``, and in the same order?

    So rows of both types compare as they should, runs stay sorted, and keys find their shard: integers to
    wider integers, floats to wider floats, decimals to more digits before the point, text and bytes to
    large ones. Not integers to floats, not seconds to nanoseconds: some values would not fit.
    """
    if types.is_integer(old) and types.is_integer(new):
        if types.is_signed_integer(old) == types.is_signed_integer(new):
            return bool(old.bit_width < new.bit_width)
        return bool(types.is_unsigned_integer(old) and old.bit_width < new.bit_width)
    if types.is_floating(old) and types.is_floating(new):
        return bool(old.bit_width < new.bit_width)
    if types.is_decimal128(old) and types.is_decimal128(new):
        return bool(old.scale == new.scale and old.precision < new.precision)
    return bool((types.is_string(old) and types.is_large_string(new)) or (types.is_binary(old) and types.is_large_binary(new)))


def _children(kind: pa.DataType) -> list[pa.Field]:
    return [kind.field(i) for i in range(kind.num_fields)] if types.is_nested(kind) else []


def _same_values(one: pa.DataType, two: pa.DataType) -> bool:
    """Do they differ only in whether parts may be null, and in what a list calls its elements?"""
    if one.id != two.id or one.num_fields != two.num_fields or not one.num_fields:
        return bool(one.equals(two))
    if types.is_fixed_size_list(one) and one.list_size != two.list_size:
        return False
    pairs = list(zip(_children(one), _children(two), strict=True))
    if types.is_struct(one) and any(a.name != b.name for a, b in pairs):
        return False
    return all(_same_values(a.type, b.type) for a, b in pairs)


def _has_required_child(kind: pa.DataType) -> bool:
    return any(not child.nullable or _has_required_child(child.type) for child in _children(kind))


def _check_nested(column: pa.Array, field: pa.Field, name: str) -> None:
    """No nulls in a child that may have none, where its parent is not null."""
    kind = field.type
    if types.is_struct(kind):
        present = column.drop_null() if column.null_count else column
        parts = [(present.field(i), kind.field(i)) for i in range(kind.num_fields)]
    elif types.is_nested(kind):
        parts = [(column.flatten(), kind.field(0))]
    else:
        return
    for part, child in parts:
        if not child.nullable and part.null_count:
            raise InvalidInputError(f"the column {name!r} has nulls in {child.name!r}", hint="drop those rows, or give them a value")
        _check_nested(part, child, f"{name}.{child.name}")


def one_batch(data: Any, schema: pa.Schema, *, others: Literal["refused", "ignored"] = "refused") -> pa.RecordBatch:
    """Anything that holds rows, as one batch: a put is atomic, so it is never cut.

    Only dicts need ``schema``; ``others`` says what becomes of what they have besides.
    """
    try:
        if isinstance(data, pa.RecordBatch):
            return data
        if isinstance(data, pa.Table):
            table = data
        elif isinstance(data, list | tuple) and all(isinstance(row, Mapping) for row in data):
            unknown = sorted({str(name) for row in data for name in row} - set(schema.names))
            if unknown and others == "refused":
                raise SchemaMismatchError(
                    f"the rows have a column {unknown[0]!r} that the table has not", hint=f"columns are {', '.join(schema.names)}"
                )
            _check_whole_numbers(data, schema)
            table = pa.Table.from_pylist([dict(row) for row in data], schema=schema)
        elif hasattr(data, "__arrow_c_array__") and not hasattr(data, "__arrow_c_stream__"):
            return pa.record_batch(data)
        elif hasattr(data, "__arrow_c_stream__"):
            table = pa.table(data)
        else:
            raise InvalidInputError(
                f"a {type(data).__name__} holds no rows that can be put",
                hint="pass a pyarrow RecordBatch or Table, a pandas or polars DataFrame, or a list of dicts",
            )
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        if isinstance(error, InvalidInputError):
            raise
        raise SchemaMismatchError(f"the rows cannot be read as the table's: {error}", hint=f"the schema is {_spelled(schema)}") from error
    batches = table.combine_chunks().to_batches()
    if not batches:
        return pa.RecordBatch.from_arrays([pa.array([], f.type) for f in table.schema], schema=table.schema)
    if len(batches) > 1:
        raise InvalidInputError(f"{table.num_rows} rows do not fit into one batch", hint="put fewer rows at a time")
    return batches[0]


def _check_whole_numbers(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> None:
    """Refuse 1.5 for an integer: Arrow would take it for 1."""
    for field in schema:
        if types.is_integer(field.type):
            for row in rows:
                value = row.get(field.name)
                if isinstance(value, float) and not value.is_integer():
                    raise SchemaMismatchError(
                        f"the column {field.name!r} is {field.type}, and a row has {value!r}", hint="round it, or widen the column's type"
                    )


def _fitted(rows: pa.RecordBatch, schema: pa.Schema, whose: str) -> pa.RecordBatch:
    """The same rows with exactly ``schema``, if only the layout of text or bytes differs."""
    if rows.schema.names != schema.names:
        missing = [name for name in schema.names if name not in rows.schema.names]
        extra = [name for name in rows.schema.names if name not in schema.names]
        if missing:
            what = f"the column {missing[0]!r} is missing"
        elif extra:
            what = f"the column {extra[0]!r} is not one of {whose}'s"
        else:
            what = f"the columns come in another order: {', '.join(rows.schema.names)}"
        since = "if it was added since, put nulls in it" if missing else "see pa.Table.select"
        raise SchemaMismatchError(what, hint=f"{whose} has {', '.join(schema.names)}; {since}")
    columns = []
    for column, field in zip(rows.columns, schema, strict=True):
        if column.type.equals(field.type):
            columns.append(column)
            continue
        same_kind = any(all(any(c(t) for c in kinds) for t in (column.type, field.type)) for kinds in (_TEXT, _BYTES))
        if not same_kind and not _same_values(column.type, field.type):
            raise SchemaMismatchError(
                f"the column {field.name!r} has type {column.type}, and {whose} has {field.type}",
                hint="cast it first, e.g. table.cast(schema)",
            )
        try:
            columns.append(column.cast(field.type))
        except pa.ArrowInvalid as error:
            raise InvalidInputError(
                f"the column {field.name!r} has values that {field.type} cannot hold: {error}", hint="drop those rows, or mend them"
            ) from None
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _spelled(schema: pa.Schema) -> str:
    return ", ".join(f"{f.name} {f.type}" for f in schema)
