"""``hgs.read`` and ``hgs.snapshot``: a table, merged, as a DataFrame.

Owns: the functions. Does not own: what a task reads (plan), ``format("headgate")`` (source).

There is one task for each part of the snapshot. It gets the number of its part as its only row, and
gives the rows of that part, in Arrow, through ``mapInArrow``: less lies between the files and Spark's
columns than with a data source, which takes about twice as long.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from headgate import Checkpoint, NotFoundError, Table, open_table
from headgate.spark.plan import ReadPlan, planned
from headgate.spark.types import Nanoseconds, spark_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def read(
    spark: SparkSession,
    uri: str | os.PathLike[str],
    columns: Sequence[str] | None = None,
    filter: str | None = None,
    at: str | Checkpoint | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
    wal_uri: str | os.PathLike[str] | None = None,
    wal_storage_options: Mapping[str, Any] | None = None,
    lease_ttl: timedelta | float | None = None,
    partitions: int | None = None,
    rows_per_partition: int | None = None,
    nanoseconds: Nanoseconds = "fail",
) -> DataFrame:
    """The table as of now, merged, as a DataFrame: one snapshot for its whole life, however often it is used.

    Args:
        columns: which, in this order; None: all. Only these are read: a ``select`` later does not make it less.
        filter: a SQL expression over any columns of the table, applied by the workers.
        at: a checkpoint, its id or its name: the table as of then. Writes nothing.
        lease_ttl: how long the snapshot is held, a day unless told. A DataFrame used after that ends in
            SnapshotExpiredError. 0: nothing is written and nothing is held: good until collection runs.
        partitions: at least so many tasks, if there are as many rows.
        rows_per_partition: about how many rows a task reads at most.
        nanoseconds: "fail": values that are not whole microseconds are refused; "truncate": cut off.
    """
    table = open_table(uri, storage_options=storage_options, wal_uri=wal_uri, wal_storage_options=wal_storage_options)
    plan = planned(
        table,
        columns=columns,
        filter=filter,
        at=at,
        lease_ttl=lease_ttl,
        partitions=partitions,
        rows_per_partition=rows_per_partition,
        nanoseconds=nanoseconds,
    )
    return _frame(spark, plan)


@contextmanager
def snapshot(
    spark: SparkSession,
    uri: str | os.PathLike[str],
    columns: Sequence[str] | None = None,
    filter: str | None = None,
    at: str | Checkpoint | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
    wal_uri: str | os.PathLike[str] | None = None,
    wal_storage_options: Mapping[str, Any] | None = None,
    lease_ttl: timedelta | float | None = None,
    partitions: int | None = None,
    rows_per_partition: int | None = None,
    nanoseconds: Nanoseconds = "fail",
) -> Iterator[DataFrame]:
    """The same, held while inside ``with`` and let go after it.

    Example:
        >>> with hgs.snapshot(spark, "s3://bucket/orders") as orders:
        ...     orders.groupBy("carrier").count().show()
    """
    table = open_table(uri, storage_options=storage_options, wal_uri=wal_uri, wal_storage_options=wal_storage_options)
    plan = planned(
        table,
        columns=columns,
        filter=filter,
        at=at,
        lease_ttl=lease_ttl,
        partitions=partitions,
        rows_per_partition=rows_per_partition,
        nanoseconds=nanoseconds,
    )
    try:
        yield _frame(spark, plan)
    finally:
        if at is None:
            _let_go(table, plan)


def _let_go(table: Table, plan: ReadPlan) -> None:
    if plan.snapshot.checkpoint is not None:
        try:
            table.drop_checkpoint(plan.snapshot.checkpoint)
        except NotFoundError:  # its lease was over
            pass


def _frame(spark: SparkSession, plan: ReadPlan) -> DataFrame:
    parts = plan.parts()

    def rows_of(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                yield from plan.rows(parts[number])

    schema = spark_schema(pa.schema([plan.snapshot.schema.field(name) for name in plan.columns]))
    return spark.range(0, len(parts), 1, max(1, len(parts))).mapInArrow(rows_of, schema)
