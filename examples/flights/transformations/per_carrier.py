"""A declarative pipeline over the change feed of a Headgate table: every change once, then sums per carrier.

    python examples/flights/make_table.py /tmp/headgate-example/flights
    cd examples/flights && spark-pipelines run

The package must be importable where Spark's Python workers run; then Spark finds the format by itself.
"""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

spark = SparkSession.active()


@dp.table
def flight_changes() -> DataFrame:
    """Puts and deletes, as they happened; a stream, so each run goes on where the last one ended."""
    table = spark.conf.get("headgate.example.table")
    return spark.readStream.format("headgate").option("startingOffsets", "earliest").load(table)


@dp.materialized_view
def per_carrier() -> DataFrame:
    """How often each carrier's flights were put and deleted."""
    changes = spark.read.table("flight_changes")
    is_delete = f.col("_op") == "delete"
    return changes.groupBy("carrier").agg(
        f.sum(f.when(is_delete, 0).otherwise(1)).alias("puts"), f.sum(f.when(is_delete, 1).otherwise(0)).alias("deletes")
    )
