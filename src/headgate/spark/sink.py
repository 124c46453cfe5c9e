"""``df.write`` and ``df.writeStream``: rows of Spark's into a table, beside its live writers.

Owns: what Spark calls when it writes, and which load that is. Does not own: how a load comes in exactly once
(bulk, transaction), which rows fit (rows).

A batch write is one load. The driver registers it, each task writes its rows as runs that nobody sees, and the
driver brings in those that Spark's commit messages name: what a task that failed, or that another overtook,
has written counts for nothing (P02), and is collected later.

A stream is a load for each of its batches, by (appId, batch id), counted by the query's id. Spark makes a new
writer for every batch, and another one for its commit, so nothing is kept in them: a task reads the id of its
query and of its batch from its own properties, and sends them along with what it wrote.

- A batch again, after a crash anywhere: its first attempt is finished if it was decided, and else it is
  committed with the files of the second (P01, P04, P11).
- ``abort`` after a ``commit`` that raised: what was announced may be decided, so nothing is deleted, ever. What
  nobody names is collected when its attempt is over (P09).
- A checkpoint that was deleted: another query counts from 0 again; refused, with what to do (P03, P10). One that was
  restored: its batches are lower than the last one; refused.
- No appId: the query's id is the name, so a new checkpoint is a new application. Its rows are written again; with
  a key that changes nothing.

``autoCompact`` tidies up after a batch, once in a while: many small runs become few, and what nothing needs any more
is collected, so that a batch costs the same after a year. It runs in the commit, after the rows are in: if it is
interrupted, the next one does it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from headgate import (
    BulkLoad,
    CommitConflictError,
    DataLossError,
    HeadgateError,
    InvalidInputError,
    LoadedFiles,
    LoadReport,
    NotFoundError,
    Table,
)
from headgate.spark.options import Parse, Place, number, one_of, parsed, size, text, truth
from headgate.spark.rows import Incoming
from headgate.spark.worker import begin_task

_SHARED: dict[str, Parse] = {
    "appId": text,
    "op": one_of("upsert", "delete"),
    "onBadRows": one_of("fail", "quarantine"),
    "maxMemory": size,
}
WRITE_OPTIONS: dict[str, Parse] = {**_SHARED, "txnVersion": number, "autoCompact": truth}
STREAM_OPTIONS: dict[str, Parse] = {**_SHARED, "autoCompact": truth, "checkpointLocation": text, "queryName": text}
_QUERY, _BATCH = "sql.streaming.queryId", "streaming.sql.batchId"
_RUNS_BETWEEN = 16
"""So many runs come together in a shard before a stream merges them."""
_COLLECT_EVERY = 2
"""Every so many times that a stream merges, it collects, too."""
_COMFORT_SECONDS = 60.0
"""For readers that hold nothing: what a stream has made garbage of stays so long."""
_KEPT_MAX = 4


@dataclass(frozen=True)
class Written(WriterCommitMessage):
    """What one task wrote, for which load."""

    load: BulkLoad
    files: LoadedFiles


# -- one write


def batch_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> BatchSink:
    """Called once, in the driver, before any task runs: everything that can be refused is refused here."""
    if overwrite:
        raise InvalidInputError(
            'mode("overwrite") would drop what is in the table', hint='mode("append") upserts by key; option("op", "delete") deletes'
        )
    place, values = parsed(options, WRITE_OPTIONS)
    app, version = values.get("appId"), values.get("txnVersion")
    if (app is None) != (version is None):
        raise InvalidInputError(
            f"{'txnVersion' if app is None else 'appId'} is given alone",
            hint="appId and txnVersion make a write safe to repeat: give both, or neither",
        )
    table = place.open()
    incoming = _incoming(values)
    incoming.check(schema, table.schema, table.key)
    load = table.bulk_load(app, version, **_limits(values))
    is_there = False
    if app is not None:
        try:
            is_there = load.is_committed()  # what can never be committed is refused before anything is written
        except BaseException:
            load.abort()
            raise
    return BatchSink(place, load, incoming, is_there, values.get("autoCompact", False))


class BatchSink(DataSourceArrowWriter):
    """One load, by all tasks of one write."""

    def __init__(self, place: Place, load: BulkLoad, incoming: Incoming, is_there: bool, tidies: bool) -> None:
        self._place, self._load, self._incoming, self._is_there, self._tidies = place, load, incoming, is_there, tidies

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        begin_task()
        if self._is_there:
            return Written(self._load, LoadedFiles({}))
        return Written(self._load, self._load.write(iterator, self._incoming.op, self._incoming))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._load.commit([message.files for message in _written(messages)])
        _afterwards(self._load.abort)
        if self._tidies:
            _afterwards(lambda: self._place.open().compact())

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Also called after a commit that raised, whose outcome nobody knows: nothing is deleted."""
        self._load.abort()


# -- a stream


def stream_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> StreamSink:
    """Called in the driver for each batch, and again for its commit."""
    if overwrite:
        raise InvalidInputError(
            'outputMode("complete") would replace the table with every batch',
            hint='outputMode("append"); for aggregates write each batch by foreachBatch, with appId and txnVersion',
        )
    place, values = parsed(options, STREAM_OPTIONS)
    table = _opened(place)
    incoming = _incoming(values)
    incoming.check(schema, table.schema, table.key)
    # The name of the query is known to its tasks only: they put it in.
    load = table.bulk_load(values.get("appId", _QUERY), 0, often=True, **_limits(values))
    return StreamSink(place, load, incoming, "appId" in values, values.get("autoCompact", False))


class StreamSink(DataSourceStreamArrowWriter):
    """A load for each batch of a stream."""

    def __init__(self, place: Place, load: BulkLoad, incoming: Incoming, has_name: bool, tidies: bool) -> None:
        self._place, self._load, self._incoming, self._has_name, self._tidies = place, load, incoming, has_name, tidies

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        begin_task()
        task = TaskContext.get()
        query, batch = (task.getLocalProperty(name) if task is not None else None for name in (_QUERY, _BATCH))
        if query is None or batch is None:
            raise InvalidInputError("this is no task of a stream", hint="use df.writeStream; for a single DataFrame df.write")
        load = replace(self._load, app=self._load.app if self._has_name else query, query=query, version=int(batch))
        return Written(load, load.write(iterator, self._incoming.op, self._incoming))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  # Spark's name
        written = _written(messages)
        if not written:
            return  # a batch without tasks has no rows, also if it comes again
        load = written[0].load
        if any((one.load.query, one.load.version, one.load.attempt) != (load.query, batchId, load.attempt) for one in written):
            raise CommitConflictError(f"batch {batchId} has files of another batch", hint="nothing was brought in; start the query again")
        report = load.commit([one.files for one in written])
        if self._tidies:
            _tidy_up(_opened(self._place), report, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  # Spark's name
        """Also called after a commit that raised, whose outcome nobody knows: nothing is deleted (P09)."""


def _tidy_up(table: Table, report: LoadReport, batch: int) -> None:
    """Now and then, by the number of the batch: nothing has to be remembered."""
    every = max(1, _RUNS_BETWEEN // max(1, *report.runs.values())) if report.runs else _RUNS_BETWEEN
    if batch % every == every - 1:
        _afterwards(table.compact)
    if batch % (every * _COLLECT_EVERY) == every * _COLLECT_EVERY - 1:
        _afterwards(lambda: table.gc(dry_run=False, min_age=_COMFORT_SECONDS))


def _afterwards(act: Callable[[], object]) -> None:
    """The rows are in, and that is what the caller is told: others may be faster, the store may be away; it is done next time.

    Raises:
        DataLossError: something that should be there is not. That does not wait.
    """
    try:
        act()
    except DataLossError:
        raise
    except HeadgateError:
        return


# -- what both have


def _incoming(values: Mapping[str, Any]) -> Incoming:
    return Incoming(values.get("op", "upsert"), values.get("onBadRows") == "quarantine")


def _limits(values: Mapping[str, Any]) -> dict[str, Any]:
    limits: dict[str, Any] = {"on_bad_rows": values.get("onBadRows", "fail")}
    if "maxMemory" in values:
        limits["max_memory"] = values["maxMemory"]
    return limits


def _written(messages: list[WriterCommitMessage | None]) -> list[Written]:
    return [message for message in messages if isinstance(message, Written)]


_kept: list[tuple[Place, Table]] = []


def _opened(place: Place) -> Table:
    """The table, as this process had it before if it had it: a stream comes back with every batch."""
    for at, (known, table) in enumerate(_kept):
        if known == place:
            try:
                return table.refresh()
            except NotFoundError:  # dropped; there may be another one in its place
                del _kept[at]
                break
    _kept.append((place, place.open()))
    del _kept[:-_KEPT_MAX]
    return _kept[-1][1]
