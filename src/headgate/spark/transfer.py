"""``hgs.load`` and ``hgs.reshard``: all rows of a table at once, sorted by Spark.

Owns: the shuffle, and what must be true before and after it. Does not own: how files come in (bulk), reading (frame).

Rows are shuffled by shard and key, so that each task has its own range of keys of one shard, or of a few, in order.
What tasks write fits together, end to end: it comes in as one sorted run in each shard, which is what
compaction would have made of it. One load, so all of it or nothing; killed anywhere it is begun again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import TypeAdapter

from headgate import BulkLoad, InvalidInputError, LoadedFiles, LoadReport, SchemaMismatchError, Table, create_table, open_table
from headgate.spark.frame import snapshot
from headgate.spark.rows import Incoming
from headgate.spark.worker import begin_task

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

MEMORY_BYTES = 256 << 20
_SHARD = "__headgate_shard"
_APP_CHARACTERS_MAX = 200


def load(
    spark: SparkSession,
    df: DataFrame,
    uri: str | os.PathLike[str],
    *,
    app: str | None = None,
    partitions: int | None = None,
    max_memory: int = MEMORY_BYTES,
    storage_options: Mapping[str, Any] | None = None,
    wal_uri: str | os.PathLike[str] | None = None,
    wal_storage_options: Mapping[str, Any] | None = None,
) -> LoadReport:
    """Fill an empty table: the rows, sorted by key, as one run in each shard. All of them or none.

    For a table with rows, or with consumers, use ``df.write.format("headgate")``, which needs no shuffle.

    Args:
        app: a name for this load. With it, it can be repeated: the second one finds that it is done, and does nothing.
        partitions: so many tasks write; None: as many as Spark shuffles into (``spark.sql.shuffle.partitions``).
        max_memory: bytes that each task may hold, about.

    Raises:
        InvalidInputError: the table is not empty, or has consumers.
        SchemaMismatchError: the columns do not fit.
    """
    table = open_table(uri, storage_options=storage_options, wal_uri=wal_uri, wal_storage_options=wal_storage_options)
    Incoming().check(df.schema, table.schema, table.key)
    return _load(spark, df, table, app, partitions, max_memory)


def reshard(
    spark: SparkSession,
    uri: str | os.PathLike[str],
    target_uri: str | os.PathLike[str],
    sharding: Any,
    *,
    partitions: int | None = None,
    max_memory: int = MEMORY_BYTES,
    lease_ttl: timedelta | float | None = None,
    storage_options: Mapping[str, Any] | None = None,
    wal_uri: str | os.PathLike[str] | None = None,
    wal_storage_options: Mapping[str, Any] | None = None,
    target_storage_options: Mapping[str, Any] | None = None,
    target_wal_uri: str | os.PathLike[str] | None = None,
    target_wal_storage_options: Mapping[str, Any] | None = None,
) -> LoadReport:
    """Copy a table, as of one moment, into a new one with other shards: another number of them, or another rule.

    The source is left as it is, and can be written meanwhile; what comes after the moment is not in the copy. Run again
    after it died, it begins anew; run again after it was done, it does nothing (``committed`` is False).

    Args:
        sharding: ``hg.bucket("id", 16)``, ``hg.identity("tenant")``, ``hg.unsharded()``.
        lease_ttl: how long the source's moment is held, a day unless told.
        target_storage_options, …: of the new table; None: those of the source.

    Raises:
        SchemaMismatchError: there is a table with other columns, another key or other shards at ``target_uri``.
        InvalidInputError: there is one with rows that are not from here.
    """
    place = {"storage_options": storage_options, "wal_uri": wal_uri, "wal_storage_options": wal_storage_options}
    source = open_table(uri, **place)  # type: ignore[arg-type]
    if str(uri).rstrip("/") == str(target_uri).rstrip("/"):
        raise InvalidInputError("source and target are the same table", hint="split_shard makes two shards of one in place")
    target = create_table(
        target_uri,
        source.schema,
        key=list(source.key) or None,
        sharding=sharding,
        storage_options=target_storage_options if target_storage_options is not None else storage_options,
        wal_uri=target_wal_uri,
        wal_storage_options=target_wal_storage_options,
        indexes=list(source.indexes) or None,
        if_exists="open",
    )
    app = f"reshard:{source.uri}"[-_APP_CHARACTERS_MAX:]
    with snapshot(spark, uri, lease_ttl=lease_ttl, **place) as rows:  # type: ignore[arg-type]
        return _load(spark, rows, target, app, partitions, max_memory)


def _load(spark: SparkSession, df: DataFrame, table: Table, app: str | None, partitions: int | None, max_memory: int) -> LoadReport:
    for name, value in (("partitions", 1 if partitions is None else partitions), ("max_memory", max_memory)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidInputError(f"{name} is {value!r}", hint="a whole number, 1 or more")
    bulk = table.bulk_load(app, None if app is None else 0, max_memory=max_memory)
    try:
        if app is not None and bulk.is_committed():
            return LoadReport(bulk.app, bulk.version, committed=False, rows=0, bytes=0)
        _check_empty(table)
        return bulk.commit(_written(_sorted(spark, df, table, partitions), bulk))
    finally:
        bulk.abort()


def _check_empty(table: Table) -> None:
    """Not for safety: a load comes in as newer than whatever is there. But then it is not what was meant."""
    hint = 'df.write.format("headgate") brings rows into a table that is in use'
    consumers = table.consumers()
    if consumers:
        raise InvalidInputError(f"{table.uri} has a consumer, {consumers[0].name!r}", hint=hint)
    for shard in table.status().shards:
        if shard.runs or shard.tip > shard.first_position or shard.rows:
            raise InvalidInputError(f"{table.uri} is not empty: shard {shard.shard} has rows, or had some", hint=hint)


def _sorted(spark: SparkSession, df: DataFrame, table: Table, partitions: int | None) -> DataFrame:
    """By shard, then by key: each task has a stretch of that order."""
    from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it
    from pyspark.sql.pandas.functions import arrow_udf

    names = {name.casefold(): name for name in df.columns}

    def column(name: str) -> Column:
        if name.casefold() not in names:
            raise SchemaMismatchError(f"the column {name!r} is missing", hint="key and sharding need it; see df.withColumn")
        return F.col(f"`{names[name.casefold()]}`")

    count = partitions or int(spark.conf.get("spark.sql.shuffle.partitions") or 1)
    key = [column(name) for name in table.key]
    shards = [shard.id for shard in table.shards]
    rule = table.sharding
    by: list[Column] = key
    if rule.kind == "identity":
        by = [column(rule.column or ""), *key]
    elif len(shards) > 1:
        field, known = table.schema.field(rule.column), pa.array(shards)

        def numbers(values: pa.Array) -> pa.Array:
            found = table.shard_ids(pa.RecordBatch.from_arrays([values.cast(field.type)], names=[field.name]))
            return pc.index_in(found.dictionary, known).take(found.indices)

        hashed: Any = arrow_udf  # its overloads do not know functions of one array
        df = df.withColumn(_SHARD, hashed(numbers, "int")(column(rule.column or "")))
        by = [F.col(_SHARD), *key]
    if not by:
        return df.repartition(count)
    return df.repartitionByRange(count, *by).sortWithinPartitions(*by).drop(_SHARD)


def _written(df: DataFrame, bulk: BulkLoad) -> list[LoadedFiles]:
    """What the tasks wrote, of which only what they answered counts."""
    incoming = Incoming()

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        begin_task()
        files = bulk.write(batches, "upsert", incoming)
        if files.rows:
            yield pa.RecordBatch.from_pydict({"files": [TypeAdapter(LoadedFiles).dump_json(files).decode()]})

    form = TypeAdapter(LoadedFiles)
    return [form.validate_json(row["files"]) for row in df.mapInArrow(write, "files string").collect()]
