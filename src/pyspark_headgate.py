"""Where Spark finds ``format("headgate")``: it looks into every top-level module whose name begins with ``pyspark_``.

It does so in every session, as soon as any Python function or source is used, ours or not. So this
loads nothing of the package: that comes when the format is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, DataSourceStreamWriter, DataSourceWriter
from pyspark.sql.types import StructType

if TYPE_CHECKING:
    from headgate.spark.source import HeadgateDataSource

__all__ = ["DefaultSource"]


class DefaultSource(DataSource):
    """``headgate.spark.source.HeadgateDataSource``, loaded when it is asked for something."""

    @classmethod
    def name(cls) -> str:
        return "headgate"

    @property
    def _source(self) -> HeadgateDataSource:
        from headgate.spark.source import HeadgateDataSource

        return HeadgateDataSource(self.options)

    def schema(self) -> StructType:
        return self._source.schema()

    def reader(self, schema: StructType) -> DataSourceReader:
        return self._source.reader(schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        return self._source.writer(schema, overwrite)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  # Spark's name
        return self._source.streamReader(schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802  # Spark's name
        return self._source.streamWriter(schema, overwrite)
