"""``format("headgate")``: the data source that Spark finds.

Owns: what Spark calls. Does not own: what it means (plan).

``pushFilters`` is not here, and must not be: Spark shares what one use of a ``load()`` pushed with every
other use of it, and returns too few rows. Filters that are given to a DataFrame are applied by Spark;
those in the option ``filter`` by the workers, to every use.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from headgate.spark.options import parsed
from headgate.spark.plan import READ_OPTIONS, ReadPlan, planned
from headgate.spark.sink import BatchSink, StreamSink, batch_writer, stream_writer
from headgate.spark.stream import STREAM_OPTIONS, ChangeStreamReader, StreamPlan, is_stream, stream_schema
from headgate.spark.types import same_columns, spark_schema


class HeadgateDataSource(DataSource):
    """A table, by its URI: ``spark.read.format("headgate").load(uri)``."""

    @classmethod
    def name(cls) -> str:
        return "headgate"

    def schema(self) -> StructType:
        if is_stream(self.options):
            place, options = parsed(self.options, STREAM_OPTIONS)
            return stream_schema(place.open(), options.get("columns"))
        place, options = parsed(self.options, READ_OPTIONS)
        return spark_schema(place.open().scan(options.get("columns")).schema)

    def writer(self, schema: StructType, overwrite: bool) -> BatchSink:
        return batch_writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamSink:  # noqa: N802  # Spark's name
        return stream_writer(self.options, schema, overwrite)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Called once for each ``load()``, when Spark first plans it: this is its snapshot."""
        place, options = parsed(self.options, READ_OPTIONS)
        table = place.open()
        columns = same_columns(schema, spark_schema(table.scan(options.get("columns")).schema))
        plan = planned(
            table,
            columns=columns,
            filter=options.get("filter"),
            at=options.get("at"),
            lease_ttl=options.get("leaseTtl"),
            partitions=options.get("partitions"),
            rows_per_partition=options.get("rowsPerPartition"),
            nanoseconds=options.get("nanoseconds", "fail"),
        )
        return TableReader(plan)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  # Spark's name
        """Called in the process that plans the stream, and again for its tasks."""
        return ChangeStreamReader(StreamPlan.of(*parsed(self.options, STREAM_OPTIONS), schema))


class TableReader(DataSourceReader):
    """One snapshot, in parts."""

    def __init__(self, plan: ReadPlan) -> None:
        self._plan = plan

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(part) for part in self._plan.parts()]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # Spark makes a partition of nothing where there are none.
        return iter(()) if partition.value is None else self._plan.rows(partition.value)
