"""What a read gives to its tasks: which state, which rows and columns, and how they cross over.

Owns: taking the snapshot of a read, and reading a part of it in a worker. Does not own: how parts come to
workers (frame, source), which rows a part has (snapshot).

A worker serves many tasks of a read, one after the other, and many reads. It keeps the last snapshots that it
had, so that manifests, files and the log's tail are opened once by each worker, and not by each task. A later
snapshot of the same table is read through the same shards: the runs that both have are open, and known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import Any

import pyarrow as pa

from headgate import Checkpoint, InvalidInputError, Snapshot, Table
from headgate.spark.options import Parse, duration, names, one_of, text, whole
from headgate.spark.types import Nanoseconds, carried_schema, to_spark
from headgate.spark.worker import begin_task

LEASE_SECONDS = 24 * 3600.0
READ_OPTIONS: dict[str, Parse] = {
    "columns": names,
    "filter": text,
    "at": text,
    "leaseTtl": duration,
    "partitions": whole,
    "rowsPerPartition": whole,
    "nanoseconds": one_of("fail", "truncate"),
}
_KEPT_MAX = 4

_kept: dict[str, Snapshot] = {}
"""By id, the last used last: what this process has opened."""


@dataclass(frozen=True)
class ReadPlan:
    """A read of one state of a table. Pickles, and is small."""

    snapshot: Snapshot
    columns: tuple[str, ...]
    filter: str | None = None
    nanoseconds: Nanoseconds = "fail"
    partitions: int | None = field(default=None, compare=False)
    rows_per_partition: int | None = field(default=None, compare=False)

    @cached_property
    def schema(self) -> pa.Schema:
        """Of the rows as they cross over."""
        return carried_schema(pa.schema([self.snapshot.schema.field(name) for name in self.columns]))

    def parts(self) -> list[Any]:
        """What each task reads."""
        return self.snapshot.parts(self.columns, part_rows=self.rows_per_partition, parts_min=self.partitions or 1)

    def rows(self, part: Any) -> Iterator[pa.RecordBatch]:
        """The rows of a part, as Spark takes them."""
        begin_task()
        schema = self.schema
        for rows in _in_this_process(self.snapshot).read(part, self.columns, self.filter):
            yield to_spark(rows, schema, self.nanoseconds)


def planned(
    table: Table,
    *,
    columns: Sequence[str] | None = None,
    filter: str | None = None,
    at: str | Checkpoint | None = None,
    lease_ttl: timedelta | float | None = None,
    partitions: int | None = None,
    rows_per_partition: int | None = None,
    nanoseconds: Nanoseconds = "fail",
) -> ReadPlan:
    """Take a snapshot to be read. Everything that can be refused is refused before anything is written.

    Args:
        lease_ttl: for how long it is held; None: a day; 0: not at all.
    """
    scan = table.scan(columns, filter)  # checks them
    if not scan.columns:
        raise InvalidInputError("no column is chosen", hint="choose one or more; None for all of them")
    carried_schema(scan.schema)
    for name, value in (("partitions", partitions), ("rows_per_partition", rows_per_partition)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InvalidInputError(f"{name} is {value!r}", hint="a whole number, 1 or more")
    if nanoseconds not in ("fail", "truncate"):
        raise InvalidInputError(f"nanoseconds is {nanoseconds!r}", hint='"fail" or "truncate"')
    if at is not None and lease_ttl:
        raise InvalidInputError("a checkpoint has its own lease", hint="leave out at, or the lease; see refresh_checkpoint")
    ttl = None if at is not None or lease_ttl == 0 else LEASE_SECONDS if lease_ttl is None else lease_ttl
    if ttl == timedelta(0):
        ttl = None
    snapshot = table.snapshot(at=at, ttl=ttl)
    return ReadPlan(snapshot, tuple(scan.columns), filter, nanoseconds, partitions, rows_per_partition)


def _in_this_process(snapshot: Snapshot) -> Snapshot:
    """The same snapshot, with what this process has opened of it, or of others of the same table, before."""
    known = _kept.pop(snapshot.id, None)
    if known is None:
        there = {shard.id: shard for kept in _kept.values() if kept.uri == snapshot.uri for shard in kept.shards}
        # Equal: of the same table, with the same columns, and opened in the same way.
        known = replace(snapshot, shards=tuple(there[mine.id] if there.get(mine.id) == mine else mine for mine in snapshot.shards))
    while len(_kept) >= _KEPT_MAX:
        del _kept[next(iter(_kept))]
    _kept[snapshot.id] = known
    return known
