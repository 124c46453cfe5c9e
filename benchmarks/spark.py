"""The pipeline on Spark beside Spark's own Parquet and beside plain Lance.

    python benchmarks/spark.py [--rows N] [--quick] [--rounds N] [--only NAME …] [--out FILE]

The rows are TPC-H's lineitem (the package ``tpchgen-cli``), five columns of it, with the key
(l_orderkey, l_linenumber). Ours has a base with all of them and 5 % of them again, newer, in three
more runs; the others have the final rows, with nothing to merge. "Plain lance" goes the same way into
Spark as we do, once through mapInArrow and once through a data source: what is above it is the merging.
A time counts only after the result was compared with what must come out.
"""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import headgate as hg
import headgate.spark as hgs
from harness import Contestant, Measurements, NotHere, Question, Scale, Target, main

PARQUET, READ, FORMAT = "parquet", "hgs read", 'format("headgate")'
FIRST = "hgs read, the workers' first"
LANCE_MAP, LANCE_SOURCE = "plain lance, mapInArrow", "plain lance, data source"
KEY = ["l_orderkey", "l_linenumber"]
COLUMNS = [*KEY, "l_partkey", "l_extendedprice", "l_shipdate"]
READ_COLUMNS = ["l_partkey", "l_extendedprice"]
_ROWS_PER_SCALE = 6_000_000
_PUT_ROWS = 100_000
_PART_ROWS = 1 << 21  # as ours
_TIMES = 3

rows_asked = 20_000_000


# -- the rows


class Data:
    """Made once, in the folder of the run, and read in every round."""

    def __init__(self) -> None:
        self.folder = Path()
        self.rows = 0
        self.sums: tuple[int, int, float] = (0, 0, 0.0)
        self._spark: Any = None

    def at(self, folder: Path, scale: Scale) -> Data:
        if not self.rows:
            self.folder = folder.parent / "spark"
            self.folder.mkdir()
            self._make(scale.of(rows_asked))
        return self

    @property
    def spark(self) -> Any:
        if self._spark is None:
            settings = {"spark.driver.memory": "3g", "spark.sql.session.timeZone": "UTC", "spark.log.level": "ERROR"}
            self._spark = hgs.session("local[2]", app_name="headgate-bench", config=settings)
            self._spark.dataSource.register(LanceSource)
        return self._spark

    @property
    def table(self) -> str:
        return str(self.folder / "table")

    @property
    def parquet(self) -> str:
        return str(self.folder / "parquet")

    @property
    def lance(self) -> str:
        return str(self.folder / "plain.lance")

    def _make(self, rows: int) -> None:
        import lance

        base = lineitem(self.folder, rows)
        schema, random = base.schema, np.random.default_rng(6)
        config = hg.ShardWriterConfig(fsync=False, max_memtable_rows=4_000_000, max_memtable_size=1 << 30)
        table = hg.create_table(self.table, schema, key=KEY)
        with table.writer(config) as writer:
            for batch in base.to_batches(max_chunksize=_PUT_ROWS):
                writer.put(batch)
            writer.flush()
        table.compact(full=True)
        price = base.column("l_extendedprice").to_numpy().copy()
        with table.writer(config) as writer:
            for _ in range(3):
                chosen = np.sort(random.choice(rows, rows // 60, replace=False))
                price[chosen] += 1.0
                newer = base.take(pa.array(chosen)).set_column(3, schema.field(3), pa.array(price[chosen]))
                for batch in newer.to_batches(max_chunksize=_PUT_ROWS):
                    writer.put(batch)
                writer.flush()
        final = base.set_column(3, schema.field(3), pa.array(price))
        (self.folder / "parquet").mkdir()
        for number in range(4):
            start, stop = rows * number // 4, rows * (number + 1) // 4
            pq.write_table(final.slice(start, stop - start), f"{self.parquet}/{number}.parquet")
        lance.write_dataset(final, self.lance, data_storage_version="2.0", max_rows_per_file=1 << 31)
        self.rows = rows
        self.sums = rows, pc.sum(final.column("l_partkey")).as_py(), float(price.sum())

    def check(self, found: Any) -> None:
        count, parts, price = found
        assert (count, parts) == self.sums[:2], found
        assert math.isclose(price, self.sums[2], rel_tol=1e-9), "the newest rows are there"


def lineitem(folder: Path, rows: int) -> pa.Table:
    """The first rows of TPC-H's lineitem; prices as floats, for Spark reads decimals from Arrow one object at a time."""
    scale = math.ceil(100 * rows / _ROWS_PER_SCALE * 1.01) / 100
    program = Path(sys.executable).parent / "tpchgen-cli"
    if not program.exists():
        raise NotHere("tpchgen-cli is not installed: pip install 'headgate[bench]'")
    made = folder / "tpch"
    subprocess.run(
        [str(program), "parquet", "-s", str(scale), "--tables=lineitem", f"--output-dir={made}"], check=True, capture_output=True
    )
    table = pq.read_table(made / "lineitem.parquet", columns=COLUMNS).slice(0, rows)
    assert table.num_rows == rows, table.num_rows
    table = table.set_column(3, "l_extendedprice", table.column("l_extendedprice").cast(pa.float64()))
    return table.cast(pa.schema([pa.field(f.name, f.type, f.name not in KEY) for f in table.schema])).combine_chunks()


DATA = Data()


# -- plain lance, the way we go


def lance_rows(uri: str, start: int, stop: int) -> Iterator[pa.RecordBatch]:
    import lance

    dataset = lance.dataset(uri)
    yield from dataset.scanner(columns=READ_COLUMNS, offset=start, limit=stop - start, batch_size=1 << 18).to_batches()


def lance_parts(rows: int) -> list[tuple[int, int]]:
    count = -(-rows // _PART_ROWS)
    return [(rows * at // count, rows * (at + 1) // count) for at in range(count)]


def lance_frame(spark: Any, uri: str, rows: int) -> Any:
    parts = lance_parts(rows)

    def read(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                yield from lance_rows(uri, *parts[number])

    return spark.range(0, len(parts), 1, len(parts)).mapInArrow(read, "l_partkey bigint, l_extendedprice double")


try:
    from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
except ImportError as missing:
    raise SystemExit(f"{missing}: pip install 'headgate[spark]'") from None


class LanceSource(DataSource):
    """A plain dataset, in Arrow."""

    @classmethod
    def name(cls) -> str:
        return "plainlance"

    def schema(self) -> str:
        return "l_partkey bigint, l_extendedprice double"

    def reader(self, schema: Any) -> DataSourceReader:
        return LanceReader(self.options["path"], int(self.options["rows"]))


class LanceReader(DataSourceReader):
    def __init__(self, uri: str, rows: int) -> None:
        self._uri, self._rows = uri, rows

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(part) for part in lance_parts(self._rows)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return lance_rows(self._uri, *partition.value)


# -- reading


def frame_of(name: str, data: Data) -> Any:
    spark = data.spark
    if name == PARQUET:
        return spark.read.parquet(data.parquet).select(*READ_COLUMNS)
    if name == LANCE_MAP:
        return lance_frame(spark, data.lance, data.rows)
    if name == LANCE_SOURCE:
        return spark.read.format("plainlance").option("rows", data.rows).load(data.lance)
    if name == READ:
        return hgs.read(spark, data.table, columns=READ_COLUMNS, lease_ttl=3600)
    if name == FIRST:  # opened in another way each time: the workers find nothing that they know
        options = {"aws_region": f"region-{next(_openings)}"}
        return hgs.read(spark, data.table, columns=READ_COLUMNS, lease_ttl=3600, storage_options=options)
    return spark.read.format("headgate").option("columns", ",".join(READ_COLUMNS)).option("leaseTtl", "1h").load(data.table)


def cpu_seconds() -> float:
    """Of this process, Spark's and all workers together."""
    total = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def summed(name: str, data: Data) -> tuple[float, float]:
    """Seconds from nothing to the sums, planning, pinning and reading; on the clock, and on all cores together."""
    from pyspark.sql import functions as f

    cpu, start = cpu_seconds(), time.perf_counter()
    found = frame_of(name, data).agg(f.count("*"), f.sum("l_partkey"), f.sum("l_extendedprice")).first()
    taken = time.perf_counter() - start, cpu_seconds() - cpu
    data.check(found)
    return taken


_warm: set[str] = set()
_openings = count()


def read_of(name: str, folder: Path, scale: Scale) -> Measurements:
    data = DATA.at(folder, scale)
    if name not in _warm:
        for _ in range(_TIMES):
            summed(name, data)
        _warm.add(name)
    clock, cpu = zip(*(summed(name, data) for _ in range(_TIMES)), strict=True)
    return {"s": statistics.median(clock), "CPU s": statistics.median(cpu)}


def readers() -> dict[str, Contestant]:
    return {name: partial(read_of, name) for name in (PARQUET, LANCE_MAP, READ, FIRST, LANCE_SOURCE, FORMAT)}


def questions() -> list[Question]:
    return [
        Question(
            "read",
            f"Merged read of {rows_asked:,} rows, two columns, 5 % of them in newer runs",
            readers(),
            [
                Target("hgs.read over Spark's Parquet scan", f"{READ}.s", f"{PARQUET}.s", at_most=2.5),
                Target('format("headgate") over Spark\'s Parquet scan', f"{FORMAT}.s", f"{PARQUET}.s", at_most=4.5),
                Target("hgs.read over plain Lance the same way", f"{READ}.s", f"{LANCE_MAP}.s", at_most=1.5),
                Target('format("headgate") over plain Lance the same way', f"{FORMAT}.s", f"{LANCE_SOURCE}.s", at_most=1.5),
                Target("hgs.read for the first time over plain Lance", f"{FIRST}.s", f"{LANCE_MAP}.s"),
                Target("hgs.read over Parquet, in CPU time", f"{READ}.CPU s", f"{PARQUET}.CPU s"),
                Target('format("headgate") over Parquet, in CPU time', f"{FORMAT}.CPU s", f"{PARQUET}.CPU s"),
                Target("hgs.read over plain Lance, in CPU time", f"{READ}.CPU s", f"{LANCE_MAP}.CPU s"),
                Target('format("headgate") over plain Lance, in CPU time', f"{FORMAT}.CPU s", f"{LANCE_SOURCE}.CPU s"),
            ],
            notes=[
                "From nothing to the sums of both columns, two cores, warm; the median of three in each round.",
                "Warm: workers have read the table before, and know which of its rows count; the workers' first read finds that out.",
                "Neither column is part of the key. Parquet and plain Lance hold the final rows: nothing to merge.",
            ],
        ),
    ]


def asked(argv: list[str]) -> list[str]:
    """Takes ``--rows N`` out of the arguments; the rest is the harness's."""
    global rows_asked
    if "--rows" in argv:
        at = argv.index("--rows")
        rows_asked = int(float(argv[at + 1].replace("_", "").replace(",", "")))
        argv = argv[:at] + argv[at + 2 :]
    return argv


if __name__ == "__main__":
    arguments = asked(sys.argv[1:])
    sys.exit(
        main(
            questions(),
            default_out=Path(__file__).parent / "results" / "spark.json",
            packages=["headgate", "pyspark", "pyarrow", "pylance", "numpy"],
            argv=arguments,
        )
    )
