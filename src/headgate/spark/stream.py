"""``spark.readStream.format("headgate")``: the changes of a table as a stream.

Owns: what Spark calls of a streaming source, offsets as JSON, limits, waiting. Does not own: what lies between
two offsets, and where batches end (the table's ``change_batches``).

How Spark 4.2 and later call this, and what follows from it:

- One process of the driver's has the reader while the query runs. Offsets are compared as text, so the same
  offset must be the same text: an end that has not moved is the start as it came (P05).
- A new query: ``prepareForTriggerAvailableNow`` if so triggered, then ``initialOffset``, twice. Both calls get the
  same answer, and only one consumer is claimed, one snapshot pinned (P12).
- A query that goes on: the first call may be ``partitions(start, end)``, for a batch that was cut short. All before
  ``start`` is done with, whatever ``commit`` said: there a consumer goes on.
- ``commit(end)`` comes when the next batch is planned, and for the last batch of a query never. So a consumer is one
  batch behind at the end, and catches up when the query goes on.
- After ``prepareForTriggerAvailableNow`` no end may lie past what was there then, and every query must come to an end.
- Tasks get a reader of their own, pickled. It holds options; a worker opens the table once, and keeps it.
- Spark asks for the columns before it says that this is a stream. So an option that only streams have must be there.

Two queries with one consumer (P15): whichever begins later takes it over; the other's next ``commit`` fails.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from headgate import ChangeBatches, ChangePart, InvalidInputError, Table
from headgate.spark.options import Parse, Place, duration, names, one_of, size, text, truth, whole
from headgate.spark.types import Nanoseconds, carried_schema, same_columns, spark_schema, to_spark
from headgate.spark.worker import begin_task

MARKS = ("_op", "_epoch", "_position", "_load", "_time")


def _start(value: str) -> str:
    word = value.strip().lower()
    if word in ("earliest", "latest", "snapshot"):
        return word
    try:
        if isinstance(json.loads(value), dict):
            return value
    except ValueError:
        pass
    raise InvalidInputError("it is no start", hint='earliest, latest, snapshot, or {"0000": [position, load], …}')


_STREAM_ONLY: dict[str, Parse] = {
    "startingOffsets": _start,
    "maxEntriesPerTrigger": whole,
    "maxBytesPerTrigger": size,
    "consumer": text,
    "failOnDataLoss": truth,
    "pollInterval": duration,
    "minPartitions": whole,
}
STREAM_OPTIONS: dict[str, Parse] = {**_STREAM_ONLY, "columns": names, "leaseTtl": duration, "nanoseconds": one_of("fail", "truncate")}
LEASE_SECONDS = 24 * 3600.0
POLL_SECONDS = 0.5
_FIRST_WAIT = 0.01
_TABLES_KEPT = 4

_tables: dict[str, Table] = {}
"""What this process has opened, the last used last."""


def is_stream(options: Mapping[str, str]) -> bool:
    """Do these options say that a stream is meant? Spark itself does not, when it asks for the columns."""
    known = {name.lower() for name in _STREAM_ONLY}
    return any(name.lower() in known for name in options)


def stream_schema(table: Table, columns: list[str] | None) -> StructType:
    """The table's columns, or those of them that were chosen, and where each row comes from."""
    return spark_schema(_chosen(table, columns))


def _chosen(table: Table, columns: list[str] | None) -> pa.Schema:
    schema = table.change_schema
    if columns is None:
        return schema
    wanted = table.scan(columns).columns  # checks them
    return pa.schema([schema.field(name) for name in (*wanted, *MARKS)])


@dataclass(frozen=True)
class StreamPlan:
    """What a stream's reader is made of. Pickles."""

    place: Place
    options: dict[str, Any]
    columns: tuple[str, ...]

    @classmethod
    def of(cls, place: Place, options: dict[str, Any], schema: StructType) -> StreamPlan:
        """Check that Spark's schema is one that the table's changes can have."""
        if "_op" not in {field.name.casefold() for field in schema.fields}:
            raise InvalidInputError(
                "the columns of this stream are not those of changes: there is no _op, so a delete could not be told from an upsert",
                hint='say where to begin, e.g. .option("startingOffsets", "earliest"), so that Spark gets them',
            )
        table = place.open()
        columns = same_columns(schema, stream_schema(table, options.get("columns")))
        if options.get("maxBytesPerTrigger") == 0:
            raise InvalidInputError("the option 'maxBytesPerTrigger' is 0", hint="a size, e.g. 64m")
        if options.get("leaseTtl") == 0:
            raise InvalidInputError("the option 'leaseTtl' is 0", hint="a snapshot to begin with must be held for a while, e.g. 24h")
        return cls(place, options, tuple(columns))

    @property
    def fails_on_loss(self) -> bool:
        return bool(self.options.get("failOnDataLoss", True))

    @property
    def nanoseconds(self) -> Nanoseconds:
        return self.options.get("nanoseconds", "fail")  # type: ignore[no-any-return]

    def batches(self) -> ChangeBatches:
        return self.place.open().change_batches(
            self.options.get("startingOffsets"),
            self.options.get("consumer"),
            fail_on_data_loss=self.fails_on_loss,
            pin_ttl=self.options.get("leaseTtl", LEASE_SECONDS),
        )

    def rows(self, part: ChangePart) -> Iterator[pa.RecordBatch]:
        """The rows of a part, as Spark takes them."""
        begin_task()
        table = _table(self.place)
        # The columns are fixed when the query starts. Those that were added since are left out.
        found = table.read_changes(part, fail_on_data_loss=self.fails_on_loss)
        carried: pa.Schema | None = None
        for rows in found:
            missing = [name for name in self.columns if rows.schema.get_field_index(name) < 0]
            if missing:
                raise InvalidInputError(f"the table has no column {missing[0]!r} any more", hint="start the query again, with new columns")
            chosen = rows.select(list(self.columns))
            carried = carried or carried_schema(chosen.schema.remove_metadata())
            yield to_spark(chosen, carried, self.nanoseconds)


def _table(place: Place) -> Table:
    key = json.dumps(asdict(place), sort_keys=True)
    known = _tables.pop(key, None) or place.open()
    while len(_tables) >= _TABLES_KEPT:
        del _tables[next(iter(_tables))]
    _tables[key] = known
    return known


class ChangeStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The stream, as Spark calls it. Nothing is opened or written before the first call."""

    def __init__(self, plan: StreamPlan) -> None:
        self._plan = plan
        self._until: dict[str, Any] | None = None
        self._waits, self._looked_at = 0, 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {"_plan": self._plan, "_until": None, "_waits": 0, "_looked_at": 0.0}

    @cached_property
    def _batches(self) -> ChangeBatches:
        return self._plan.batches()

    # -- offsets

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802  # Spark's name
        return ChangeBatches.to_json(self._batches.begin())

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._until = dict(self._batches.latest())

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """One limit at a time is Spark's; ours are in the options, both of them."""
        options = self._plan.options
        if options.get("maxEntriesPerTrigger") is not None:
            return ReadMaxRows(options["maxEntriesPerTrigger"])
        if options.get("maxBytesPerTrigger") is not None:
            return ReadMaxBytes(options["maxBytesPerTrigger"])
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        cut = ChangeBatches.from_json(start)
        self._batches.resume(cut)
        limited = not isinstance(limit, ReadAllAvailable)
        options = self._plan.options
        self._wait()
        end = self._batches.plan(
            cut,
            max_entries=options.get("maxEntriesPerTrigger") if limited else None,
            max_bytes=options.get("maxBytesPerTrigger") if limited else None,
            until=self._until,
        )
        if end == cut:
            self._waits += 1
            return start  # as it came: the same text
        self._waits = 0
        return ChangeBatches.to_json(end)

    def _wait(self) -> None:
        """Spark asks again every 10 ms. While nothing comes, look less and less often."""
        if self._waits and self._until is None:
            pause = min(float(self._plan.options.get("pollInterval", POLL_SECONDS)), _FIRST_WAIT * (1 << min(self._waits, 16)))
            time.sleep(max(0.0, self._looked_at + pause - time.monotonic()))
        self._looked_at = time.monotonic()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        return ChangeBatches.to_json(self._batches.seen) if self._batches.seen else None

    # -- batches

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        before, after = ChangeBatches.from_json(start), ChangeBatches.from_json(end)
        self._batches.resume(before)
        columns = [name for name in self._plan.columns if name not in MARKS]
        found = self._batches.parts(before, after, columns or None, parts_min=self._plan.options.get("minPartitions", 1))
        return [InputPartition(part) for part in found]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # Spark makes a partition of nothing where there are none.
        return iter(()) if partition.value is None else self._plan.rows(partition.value)

    def commit(self, end: dict[str, Any]) -> None:
        self._batches.done(ChangeBatches.from_json(end))

    def stop(self) -> None:
        """Nothing is open. A pin stays: its batch may be read again."""
