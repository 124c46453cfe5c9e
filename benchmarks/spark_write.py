"""Writing by Spark: bulk writes beside Spark's own Parquet, and what a stream's batch costs as there are more of them.

    python benchmarks/spark_write.py [--rows N] [--batches N] [--quick] [--rounds N] [--only NAME …] [--out FILE]

Bulk writes take the rows of the benchmark of reads (TPC-H's lineitem, five columns, key (l_orderkey, l_linenumber))
from Parquet files, and write them again: as Parquet, as plain Lance through a data source as ours is, and into tables of
one and of four shards. Ours are sorted by key, synced to disk, and read by any reader as one version; the
others are neither.

The stream has small batches, one after the other. What Spark takes by itself is measured with a sink that does nothing.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage

import headgate as hg
import headgate.spark as hgs
import spark as reads
from harness import Contestant, Measurements, Question, Scale, Target, main

PARQUET, LANCE, ONE, FOUR, ROUTED = "parquet", "plain lance", "one shard", "four shards", "four shards, partition_by_shard"
NOTHING, SINK = "a sink that does nothing", 'format("headgate"), autoCompact'
batches_asked = 500
_TASKS = 8


class LanceSink(DataSource):
    """Plain datasets, one for each task."""

    @classmethod
    def name(cls) -> str:
        return "plainlancesink"

    def writer(self, schema: Any, overwrite: bool) -> LanceWriter:
        return LanceWriter(self.options["path"])


class LanceWriter(DataSourceArrowWriter):
    def __init__(self, folder: str) -> None:
        self._folder = folder

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        import lance
        from pyspark import TaskContext

        task = TaskContext.get()
        assert task is not None
        first = next(iterator, None)
        if first is not None:
            batches = (batch for part in ([first], iterator) for batch in part)
            reader = pa.RecordBatchReader.from_batches(first.schema, batches)
            lance.write_dataset(reader, f"{self._folder}/{task.partitionId()}.lance", data_storage_version="2.0", max_rows_per_file=1 << 31)
        return WriterCommitMessage()


class Source:
    """The rows to write, made once."""

    def __init__(self) -> None:
        self.folder = Path()
        self.rows = 0
        self.schema: pa.Schema | None = None

    def at(self, folder: Path, scale: Scale) -> Source:
        if not self.rows:
            self.folder = folder.parent / "source"
            self.folder.mkdir()
            rows = scale.of(reads.rows_asked)
            data = reads.lineitem(self.folder, rows)
            self.schema = data.schema
            (self.folder / "parquet").mkdir()
            for number in range(_TASKS):
                start, stop = rows * number // _TASKS, rows * (number + 1) // _TASKS
                pq.write_table(data.slice(start, stop - start), self.folder / "parquet" / f"{number}.parquet")
            self.rows = rows
            reads.DATA.spark.dataSource.register(LanceSink)
        return self

    def frame(self) -> Any:
        return reads.DATA.spark.read.parquet(str(self.folder / "parquet"))


SOURCE = Source()


def write_of(name: str, folder: Path, scale: Scale) -> Measurements:
    source = SOURCE.at(folder, scale)
    target = str(folder / "written")
    table = None
    if name not in (PARQUET, LANCE):
        sharding = hg.unsharded() if name == ONE else hg.bucket("l_orderkey", 4)
        table = hg.create_table(target, source.schema, key=reads.KEY, sharding=sharding)
    cpu, start = reads.cpu_seconds(), time.perf_counter()
    frame = source.frame()
    if name == PARQUET:
        frame.write.mode("append").parquet(target)
    elif name == LANCE:
        frame.write.format("plainlancesink").mode("append").save(target)
    else:
        frame = hgs.partition_by_shard(frame, target) if name == ROUTED else frame
        frame.write.format("headgate").mode("append").save(target)
    taken = {"s": time.perf_counter() - start, "CPU s": reads.cpu_seconds() - cpu}
    if table is not None:
        assert table.scan().count() == source.rows
        taken["runs"] = len(table.runs())
    return taken


def stream_of(name: str, folder: Path, scale: Scale) -> Measurements:
    """What a batch takes, early and late: the first and the last fifth, but for the first ten, in which all is cold."""
    spark, wanted = reads.DATA.spark, scale.of(batches_asked)
    spark.conf.set("spark.sql.streaming.numRecentProgressUpdates", str(wanted + 100))
    table = hg.create_table(
        folder / "t", pa.schema([("timestamp", pa.timestamp("us", "UTC")), pa.field("value", pa.int64(), False)]), key="value"
    )
    frame = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1_000).option("numPartitions", 2).load()
    writer = frame.writeStream.option("checkpointLocation", str(folder / "checkpoint"))
    chosen = writer.format("noop") if name == NOTHING else writer.format("headgate").option("autoCompact", "true").option("path", table.uri)
    query = chosen.start()
    while query.isActive and (query.lastProgress is None or query.lastProgress["batchId"] < wanted):
        time.sleep(0.2)
    if query.exception() is not None:
        raise RuntimeError(str(query.exception()))
    query.stop()
    took = [progress["durationMs"]["triggerExecution"] for progress in query.recentProgress if progress["numInputRows"]][10:wanted]
    part = max(1, len(took) // 5)
    return {"ms": statistics.fmean(took), "ms early": statistics.fmean(took[:part]), "ms late": statistics.fmean(took[-part:])}


def questions() -> list[Question]:
    writers: dict[str, Contestant] = {name: partial(write_of, name) for name in (PARQUET, LANCE, ONE, FOUR, ROUTED)}
    return [
        Question(
            "write",
            f"Bulk write of {reads.rows_asked:,} rows",
            writers,
            [
                Target("one shard over Spark's Parquet write", f"{ONE}.s", f"{PARQUET}.s", at_most=2.0),
                Target("four shards over Spark's Parquet write", f"{FOUR}.s", f"{PARQUET}.s", at_most=2.0),
                Target("four shards, shuffled, over Spark's Parquet write", f"{ROUTED}.s", f"{PARQUET}.s"),
                Target("one shard over plain Lance the same way", f"{ONE}.s", f"{LANCE}.s"),
                Target("one shard over Parquet, in CPU time", f"{ONE}.CPU s", f"{PARQUET}.CPU s"),
            ],
            notes=["From Parquet files to committed rows, two cores. Ours are sorted and synced."],
        ),
        Question(
            "sink",
            f"A stream of {batches_asked} batches of 1,000 rows",
            {name: partial(stream_of, name) for name in (NOTHING, SINK)},
            [
                Target("a batch late over one early", f"{SINK}.ms late", f"{SINK}.ms early", at_most=1.25),
                Target("a batch over one that is not written", f"{SINK}.ms", f"{NOTHING}.ms"),
            ],
            notes=["Early and late: the first and the last fifth of the batches."],
            max_rounds=1,
        ),
    ]


def asked(argv: list[str]) -> list[str]:
    """Takes ``--batches N`` out of the arguments."""
    global batches_asked
    if "--batches" in argv:
        at = argv.index("--batches")
        batches_asked = int(argv[at + 1])
        argv = argv[:at] + argv[at + 2 :]
    return argv


if __name__ == "__main__":
    arguments = asked(reads.asked(sys.argv[1:]))
    sys.exit(
        main(
            questions(),
            default_out=Path(__file__).parent / "results" / "spark_write.json",
            packages=["headgate", "pyspark", "pyarrow", "pylance", "numpy"],
            argv=arguments,
        )
    )
