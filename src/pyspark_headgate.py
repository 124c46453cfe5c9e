"""Where Spark finds ``format("headgate")``: it looks into every top-level module whose name begins with ``pyspark_``."""

from headgate.spark.source import HeadgateDataSource as DefaultSource

__all__ = ["DefaultSource"]
