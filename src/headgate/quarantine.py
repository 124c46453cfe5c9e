"""Quarantine: rows that cannot be taken, kept beside the table with the reason.

Owns: telling bad rows from good ones, and keeping them. Does not own: what a row must look like
(schema), putting the good ones (writer).

Only rows are bad: a null in the key or in a column that may have none, at any depth; in a list of
dicts also a value that its column's type cannot hold. A batch with wrong columns or types is an
error, as ever. Bad rows are kept before the good ones of their put are accepted, so nothing is
dropped without a trace. A put with a producer and a sequence that is sent again is kept once.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as types

from headgate.clock import Clock
from headgate.errors import CorruptEntryError, InvalidInputError, SchemaMismatchError
from headgate.failpoint import failpoint
from headgate.meters import QUARANTINED_ROWS
from headgate.schema import RowRules, one_batch
from headgate.store import RetryPolicy, Store, create_exactly
from headgate.wal.entry import Op

FOLDER = "quarantine/"
REASON = "_reason"
ROW = "_row"
_NAMES_KEPT = 1024

Mask = npt.NDArray[np.bool_]


# -- telling them apart


def split_bad(rules: RowRules, data: Any, op: Op = "upsert") -> tuple[pa.RecordBatch | None, pa.RecordBatch | None]:
    """The rows that can be taken, as ``rules`` passes them, and those that cannot, with ``_reason``. None: there are none.

    Rows without fault cost nothing more than ``rules.upsert`` does.

    Raises:
        SchemaMismatchError, InvalidInputError: it is not a matter of single rows.
    """
    fit = rules.upsert if op == "upsert" else rules.delete
    schema = rules.schema if op == "upsert" else rules.key_schema
    if type(data) is not pa.RecordBatch and not isinstance(data, list | tuple):
        data = one_batch(data, schema)  # a stream can be read once only
    try:
        return fit(data), None
    except SchemaMismatchError:
        if isinstance(data, pa.RecordBatch) or not _are_rows(data, schema):
            raise
        rows, unreadable = _readable(data, schema)
        if not unreadable:
            raise
    except InvalidInputError:
        rows, unreadable = one_batch(data, schema), {}
        if not _has_columns(rows, rules, op):
            raise
        if not any(mask.any() for _, mask in _faults(rows, rules, op)):
            raise
    reasons = np.full(rows.num_rows, -1, np.int64)
    texts: list[str] = []
    for number, text in unreadable.items():
        reasons[number] = len(texts)
        texts.append(text)
    for text, mask in _faults(rows, rules, op):
        reasons[mask & (reasons < 0)] = len(texts)
        texts.append(text)
    is_bad = reasons >= 0
    good = rows.filter(pa.array(~is_bad))
    numbers = np.flatnonzero(is_bad)
    originals = [data[number] if number in unreadable else None for number in numbers.tolist()] if unreadable else None
    bad = _with_reasons(rows.take(pa.array(numbers)), pa.array(texts, pa.string()).take(pa.array(reasons[numbers])), originals)
    return fit(good) if good.num_rows else None, bad


def _has_columns(rows: pa.RecordBatch, rules: RowRules, op: Op) -> bool:
    """Could it be a matter of single rows at all?"""
    return rows.schema.names == rules.schema.names if op == "upsert" else all(name in rows.schema.names for name in rules.key)


def _faults(rows: pa.RecordBatch, rules: RowRules, op: Op) -> list[tuple[str, Mask]]:
    """What may be wrong with a row, and which rows it is wrong with."""
    faults: list[tuple[str, Mask]] = []
    for field in rules.schema:
        if op == "delete" and field.name not in rules.key:
            continue
        column = rows.column(field.name)
        is_key = field.name in rules.key
        if column.null_count and (is_key or not field.nullable):
            faults.append((f"the {'key ' if is_key else ''}column {field.name!r} is null", _nulls(column)))
        if types.is_nested(field.type):
            _nested_faults(column, field.type, field.name, faults)
    return faults


def _nulls(column: pa.Array) -> Mask:
    nulls: Mask = column.is_null().to_numpy(zero_copy_only=False)
    return nulls


def _nested_faults(column: pa.Array, kind: pa.DataType, name: str, faults: list[tuple[str, Mask]]) -> None:
    """Nulls in a part that may have none, where what holds it is not null; told of the row they are in."""
    if types.is_struct(kind):
        present = ~_nulls(column)
        parts = [(column.field(number), kind.field(number)) for number in range(kind.num_fields)]
        rows_of = None
    else:
        parts = [(column.flatten(), kind.field(0))]
        lengths = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
        rows_of = np.repeat(np.arange(len(column)), lengths)
    for part, child in parts:
        inside: list[tuple[str, Mask]] = []
        if not child.nullable and part.null_count:
            inside.append((f"the column {name!r} has a null in {child.name!r}", _nulls(part)))
        if types.is_nested(child.type):
            _nested_faults(part, child.type, f"{name}.{child.name}", inside)
        for text, mask in inside:
            if rows_of is None:
                faults.append((text, mask & present))
            else:
                rows = np.zeros(len(column), np.bool_)
                rows[rows_of[mask]] = True
                faults.append((text, rows))


def _are_rows(data: Any, schema: pa.Schema) -> bool:
    """A list of dicts with no columns but the table's: then a value may be at fault."""
    names = set(schema.names)
    return all(isinstance(row, Mapping) and names.issuperset(row) for row in data)


def _readable(data: Sequence[Mapping[str, Any]], schema: pa.Schema) -> tuple[pa.RecordBatch, dict[int, str]]:
    """The rows with nulls where a value cannot be read as its column's, and which rows these are."""
    reasons: dict[int, str] = {}
    columns = []
    for field in schema:
        values = [row.get(field.name) for row in data]
        try:
            columns.append(pa.array(values, field.type))
            continue
        except _UNREADABLE:
            pass  # one of them cannot be read: find out which
        for number, value in enumerate(values):
            try:
                pa.array([value], field.type)
            except _UNREADABLE as error:
                why = str(error).encode(errors="backslashreplace").decode()
                reasons.setdefault(number, f"the column {field.name!r} cannot be read as {field.type}: {why}")
                values[number] = None
        columns.append(pa.array(values, field.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema), reasons


_UNREADABLE = (pa.ArrowException, TypeError, ValueError, OverflowError)


def _with_reasons(rows: pa.RecordBatch, reasons: pa.Array, originals: Sequence[Mapping[str, Any] | None] | None) -> pa.RecordBatch:
    columns = [*rows.columns, reasons]
    fields = [_nullable(field) for field in rows.schema]
    fields.append(pa.field(_free(REASON, rows.schema), pa.string()))
    if originals is not None:
        texts = [None if row is None else json.dumps(dict(row), default=str) for row in originals]
        columns.append(pa.array(texts, pa.string()))
        fields.append(pa.field(_free(ROW, rows.schema), pa.string()))
    return pa.RecordBatch.from_arrays([c.cast(f.type) for c, f in zip(columns, fields, strict=True)], schema=pa.schema(fields))


def _nullable(field: pa.Field) -> pa.Field:
    """The same at every depth, and nothing of ours in its metadata."""
    kind = field.type
    if types.is_struct(kind):
        kind = pa.struct([_nullable(kind.field(number)) for number in range(kind.num_fields)])
    elif types.is_fixed_size_list(kind):
        kind = pa.list_(_nullable(kind.value_field), kind.list_size)
    elif types.is_large_list(kind):
        kind = pa.large_list(_nullable(kind.value_field))
    elif types.is_list(kind):
        kind = pa.list_(_nullable(kind.value_field))
    return pa.field(field.name, kind, True)


def _free(name: str, schema: pa.Schema) -> str:
    while name in schema.names:
        name = f"_{name}"
    return name


# -- keeping them


class Quarantine:
    """Where a writer keeps the rows that it could not take. Safe for many threads.

    Args:
        store: the table's.
        scope: "table", or the shard whose writer this is: what a producer's sequences are counted in.
    """

    def __init__(self, store: Store, clock: Clock, scope: str = "table", policy: RetryPolicy | None = None) -> None:
        self._store, self._clock, self._scope, self._policy = store, clock, scope, policy or RetryPolicy()
        self._lock = clock.lock()
        self._names: OrderedDict[str, None] = OrderedDict()
        self._rows = 0

    @property
    def rows(self) -> int:
        """How many rows were kept."""
        return self._rows

    def keep(self, bad: pa.RecordBatch, producer: str | None = None, sequence: int | None = None) -> str:
        """Write them, durably; returns the object's name. Sent again with the same producer, sequence and rows: once.

        Raises:
            StoreUnavailableError: they may or may not be there; put again.
        """
        body = _encoded(bad)
        key = f"{FOLDER}{self._name(body, producer, sequence)}.parquet"
        if create_exactly(self._store, key, body, self._clock, self._policy) is not None:
            raise CorruptEntryError(f"{key} is there with other bytes than its name says", object=key)
        failpoint("quarantine.kept")
        with self._lock:
            if key not in self._names:
                self._rows += bad.num_rows
                QUARANTINED_ROWS.add(bad.num_rows, self._store.uri)
                self._names[key] = None
                if len(self._names) > _NAMES_KEPT:
                    self._names.popitem(last=False)
        return key

    def _name(self, body: memoryview, producer: str | None, sequence: int | None) -> str:
        if producer is None or sequence is None:
            return self._clock.token()
        # The content is part of the name: a sequence that was refused may come again with other rows.
        content = hashlib.blake2b(body, digest_size=16).hexdigest()
        whose = hashlib.blake2b(producer.encode(errors="surrogatepass"), digest_size=8).hexdigest()
        return f"{self._scope}-{whose}-{sequence:020d}-{content}"


def _encoded(bad: pa.RecordBatch) -> memoryview:
    import pyarrow.parquet  # only those who have bad rows pay for it

    sink = pa.BufferOutputStream()
    pyarrow.parquet.write_table(pa.Table.from_batches([bad]), sink, compression="zstd")
    return memoryview(sink.getvalue())
