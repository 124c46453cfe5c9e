"""Jobs on Spark: what do more shards, or more tasks for one shard, bring?

    python benchmarks/spark_jobs.py [--quick] [--rounds N] [--only NAME …] [--out FILE]

A table with a base of all rows and four newer runs with some of them again is compacted on two cores: as four shards
beside each other, one of these four alone, as one shard with all rows by one task, and by four. Each round compacts a
copy of its own. A time counts only after the rows were counted.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import headgate as hg
import headgate.spark as hgs
from harness import Measurements, Question, Scale, Target, main

ONE_OF_FOUR, FOUR_SHARDS = "one of four shards", "four shards"
ONE, FOUR_TASKS, HERE = "one shard, one task", "one shard, four tasks", "one shard, without Spark"
_ROWS = 8_000_000
_NEWER = 0.05
_PUT_ROWS = 200_000
SCHEMA = pa.schema(
    [pa.field("id", pa.int64(), False), pa.field("a", pa.int64()), pa.field("b", pa.float64()), pa.field("text", pa.string())]
)


class Data:
    """The tables, made once in the folder of the run, and a session that is warm."""

    def __init__(self) -> None:
        self._made: dict[int, Path] = {}
        self._spark: Any = None

    def spark(self) -> Any:
        if self._spark is None:
            self._spark = hgs.session(
                "local[2]", app_name="headgate-bench", config={"spark.driver.memory": "2g", "spark.log.level": "ERROR"}
            )
            hgs.register(self._spark)
        return self._spark

    def table(self, folder: Path, shards: int, rows: int) -> hg.Table:
        """A copy of its own."""
        if shards not in self._made:
            self._made[shards] = self._make(folder.parent / f"jobs-{shards}", shards, rows)
        shutil.copytree(self._made[shards], folder / "t")
        return hg.open_table(folder / "t")

    def _make(self, place: Path, shards: int, rows: int) -> Path:
        table = hg.create_table(place, SCHEMA, key="id", sharding=hg.bucket("id", shards))
        random = np.random.default_rng(1)
        config = hg.ShardWriterConfig(fsync=False, max_memtable_rows=1 << 40, max_memtable_size=1 << 40, max_pending_generations=10_000)
        table.load(self._rows(np.arange(start, min(rows, start + _PUT_ROWS))) for start in range(0, rows, _PUT_ROWS))
        with table.writer(config) as writer:
            for _ in range(4):
                writer.put(self._rows(np.sort(random.choice(rows, int(rows * _NEWER), replace=False)))).wait()
                writer.flush()
        return place

    @staticmethod
    def _rows(ids: Any) -> pa.Table:
        text = pa.array(np.char.add("row ", (ids % 1000).astype("U4")))
        return pa.table({"id": ids, "a": ids * 7, "b": ids / 3, "text": text}, schema=SCHEMA)


data = Data()


def compacted(shards: int, tasks: int | None, folder: Path, scale: Scale, alone: bool = False) -> Measurements:
    """``alone``: the first shard only."""
    rows = scale.of(_ROWS)
    table = data.table(folder, shards, rows)
    spark = data.spark()
    hgs.verify(spark, table.uri)  # the workers are there, and have imported what they need
    chosen = [shard.id for shard in table.shards][: 1 if alone else shards]
    read = sum(part.rows for run in table.runs() if run.shard in chosen for part in run.slices)
    os.sync()  # the copy is on the disk before the work begins: else its tasks would wait for that, too
    start = time.perf_counter()
    if tasks is None:
        report = table.compact(full=True)
    else:
        report = hgs.compact(spark, table.uri, full=True, shards=chosen, rows_per_task=-(-read // tasks))
    seconds = time.perf_counter() - start
    assert report.runs_after == len(chosen), report
    assert report.rows_read == read, report
    assert table.scan().count() == rows
    shutil.rmtree(folder / "t")
    return {"rows_per_second": read / seconds, "seconds": seconds}


QUESTIONS = [
    Question(
        "compact",
        f"Compaction of {_ROWS:,} rows with {4 * _NEWER:.0%} of them again in newer runs, on two cores",
        {
            ONE_OF_FOUR: partial(compacted, 4, 1, alone=True),
            FOUR_SHARDS: partial(compacted, 4, 1),
            ONE: partial(compacted, 1, 1),
            FOUR_TASKS: partial(compacted, 1, 4),
            HERE: partial(compacted, 1, None),
        },
        targets=[
            Target(
                "four shards on two cores beside one, rows/s",
                f"{FOUR_SHARDS}.rows_per_second",
                f"{ONE_OF_FOUR}.rows_per_second",
                at_least=1.7,
            ),
            Target("four shards beside all rows in one, by one task", f"{FOUR_SHARDS}.rows_per_second", f"{ONE}.rows_per_second"),
            Target("one shard by four tasks beside one", f"{FOUR_TASKS}.rows_per_second", f"{ONE}.rows_per_second"),
            Target("one task beside table.compact", f"{ONE}.rows_per_second", f"{HERE}.rows_per_second"),
        ],
    ),
]


if __name__ == "__main__":
    sys.exit(
        main(QUESTIONS, default_out=Path(__file__).parent / "results" / "spark_jobs.json", packages=["headgate", "pyspark", "pylance"])
    )
