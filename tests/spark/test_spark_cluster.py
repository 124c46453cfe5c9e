"""Reads by executors that are processes of their own: ``local-cluster``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("v", pa.float64())])


@pytest.mark.timeout(600)
def test_executors_read_one_snapshot_though_the_table_goes_on(on_cluster: Callable[..., Any], tmp_path: Path) -> None:
    table = hg.create_table(tmp_path / "t", SCHEMA, key="id", sharding=hg.bucket("id", 2))
    with table.writer(hg.ShardWriterConfig(fsync=False)) as writer:
        writer.put(pa.table({"id": range(20_000), "v": [1.0] * 20_000}, schema=SCHEMA)).wait()
    found = on_cluster(
        """
        import pyarrow as pa
        from pyspark.sql import functions as f

        uri = args[0]
        one = hgs.read(spark, uri, rows_per_partition=3_000)
        two = spark.read.format("headgate").option("rowsPerPartition", 3_000).load(uri)
        first = [frame.agg(f.count("*"), f.sum("v")).first() for frame in (one, two)]
        table = hg.open_table(uri)
        with table.writer(hg.ShardWriterConfig(fsync=False)) as writer:
            writer.put(pa.table({"id": range(10_000, 30_000), "v": [2.0] * 20_000})).wait()
        table.compact(full=True)
        table.gc(dry_run=False, min_age=0)
        again = [frame.agg(f.count("*"), f.sum("v")).first() for frame in (one, two)]
        now = hgs.read(spark, uri).agg(f.count("*"), f.sum("v")).first()
        workers = one.mapInArrow(lambda batches: (pa.record_batch({"pid": [__import__("os").getppid()]}) for _ in batches), "pid long")
        answer({
            "first": [list(row) for row in first],
            "again": [list(row) for row in again],
            "now": list(now),
            "executors": workers.distinct().count(),
        })
        """,
        table.uri,
    )
    assert found["first"] == [[20_000, 20_000.0]] * 2
    assert found["again"] == found["first"]
    assert found["now"] == [30_000, 50_000.0]
    assert found["executors"] == 2
