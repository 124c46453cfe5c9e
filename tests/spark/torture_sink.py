"""A stream whose driver is killed again and again, and what is in the table when it has come to its end.

    python tests/spark/torture_sink.py --kills 30 --seed 1

The driver and its JVM are killed at once, by SIGKILL, at moments that the seed chooses; every other time its Python
workers too, the one that commits among them. Those that are left find out when they next speak to the JVM: until then
they go on with what they do, beside the next driver. The stream reads files, one for each batch, and begins again from
its checkpoint. A writer puts rows of its own meanwhile, compaction and collection run beside it. At the end every row
of every file is there, once, and the table verifies.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

import headgate as hg

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string()), pa.field("v", pa.float64())])
FILE_ROWS = 50
MINE = 1 << 40
"""Where the ids of the writer beside the stream begin."""

DRIVER = """
import sys
from pyspark.sql import SparkSession
uri, place = sys.argv[1:]
builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").config("spark.driver.memory", "1g")
for name, value in {"spark.sql.shuffle.partitions": "2", "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1",
                    "spark.ui.showConsoleProgress": "false", "spark.local.dir": f"{place}/scratch"}.items():
    builder = builder.config(name, value)
spark = builder.getOrCreate()
spark.sparkContext.setLogLevel("OFF")
frame = spark.readStream.schema("id bigint, name string, v double").option("maxFilesPerTrigger", 1).parquet(f"{place}/files").repartition(2)
writer = frame.writeStream.format("headgate").option("appId", "torture").option("autoCompact", "true")
query = writer.option("checkpointLocation", f"{place}/checkpoint").trigger(availableNow=True).start(uri)
print("STARTED", flush=True)
query.awaitTermination()
print("ENDED", flush=True)
"""


@dataclass(frozen=True)
class Outcome:
    kills: int
    kills_in_batches: int
    """Of those, how many fell between a batch's begin and its end."""
    batches: int
    rows: int
    seconds: float


def torture(place: Path, kills: int, seed: int, patience: float = 3600.0, environment: dict[str, str] | None = None) -> Outcome:
    """Run until the stream has ended and ``kills`` drivers were killed.

    Raises:
        AssertionError: a row is missing or doubled, or the table does not verify.
    """
    chance, began = random.Random(seed), time.monotonic()
    table = hg.create_table(place / "t", SCHEMA, sharding=hg.bucket("id", 2))
    (place / "files").mkdir()
    files = done = in_batches = puts = 0
    program = place / "driver.py"
    program.write_text(DRIVER)
    span = 2.0  # about what a batch takes
    while True:
        assert time.monotonic() - began < patience, f"{done} of {kills} kills after {patience:g} s"
        for _ in range(chance.randint(3, 6)) if done < kills else ():
            _write_file(place / "files", files)
            files += 1
        with open(place / "said", "ab") as said:
            driver = subprocess.Popen(
                [sys.executable, str(program), table.uri, str(place)],
                stdout=subprocess.PIPE, stderr=said, start_new_session=True, env={**os.environ, **(environment or {})},
            )  # fmt: skip
        assert driver.stdout is not None
        try:
            driver.stdout.readline()  # it has started, or ended
            if done >= kills:
                assert driver.wait(patience) == 0, (place / "said").read_text()[-3000:]
                break
            before, more, since = _batches(place), chance.randint(0, 3), time.monotonic()
            while driver.poll() is None and _batches(place) < before + more:
                time.sleep(0.05)
            if more:
                span = 0.5 * span + 0.5 * (time.monotonic() - since) / more
            time.sleep(chance.uniform(0.0, span if more else 3 * span))  # the first batch takes longer
            puts += _meanwhile(table, puts, chance)
            if driver.poll() is None:
                _kill(driver.pid, with_workers=chance.random() < 0.5)
                done += 1
                in_batches += _is_at_work(place)
                print(f"kill {done} of {kills}, {_batches(place)} batches", flush=True)
        finally:
            if driver.poll() is None:
                _kill(driver.pid, with_workers=True)
            driver.wait()
    _check(table, files, puts)
    return Outcome(done, in_batches, _batches(place), files * FILE_ROWS, time.monotonic() - began)


def _kill(driver: int, with_workers: bool) -> None:
    """The driver and its JVM are one group of processes; the workers have groups of their own."""
    workers = _below(driver) if with_workers else []
    os.killpg(driver, signal.SIGKILL)
    for pid in workers:
        with suppress(ProcessLookupError):  # it went with the driver, or before
            os.kill(pid, signal.SIGKILL)


def _below(parent: int) -> list[int]:
    found, parents = [], {parent}
    lines = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout.splitlines()
    pairs = sorted(tuple(map(int, line.split())) for line in lines)
    for _ in range(4):  # driver, JVM, daemon, worker
        for pid, above in pairs:
            if above in parents and pid not in parents:
                parents.add(pid)
                found.append(pid)
    return found


def _write_file(folder: Path, number: int) -> None:
    ids = list(range(number * FILE_ROWS, (number + 1) * FILE_ROWS))
    path = folder / f"{number:05d}.parquet"
    hidden = folder / f".{path.name}"
    pyarrow.parquet.write_table(
        pa.table({"id": ids, "name": [f"n{i}" for i in ids], "v": [float(number)] * len(ids)}, schema=SCHEMA), hidden
    )
    os.utime(hidden, (1_000_000 + number, 1_000_000 + number))  # files come in the order of their times
    hidden.rename(path)


def _meanwhile(table: hg.Table, puts: int, chance: random.Random) -> int:
    """A writer, a compaction or a collection beside the stream. How many rows were put."""
    what = chance.choice(["put", "compact", "gc", "nothing"])
    if what == "put":
        with table.writer() as writer:
            writer.put([{"id": MINE + puts, "name": "mine", "v": 0.0}]).wait()
        return 1
    if what == "compact":
        table.compact(full=chance.random() < 0.5)
    if what == "gc":
        table.gc(dry_run=False, min_age=0)
    return 0


def _batches(place: Path) -> int:
    return 1 + _highest(place / "checkpoint" / "commits")


def _highest(folder: Path) -> int:
    """Spark keeps the last hundred only: the number tells how many there were."""
    return max((int(name.name) for name in folder.iterdir() if name.name.isdecimal()), default=-1) if folder.exists() else -1


def _is_at_work(place: Path) -> bool:
    """Was a batch begun, and not ended?"""
    return 1 + _highest(place / "checkpoint" / "offsets") > _batches(place)


def _check(table: hg.Table, files: int, puts: int) -> None:
    for again in range(2):
        found = Counter(hg.open_table(table.uri).scan(["id"]).to_arrow().column("id").to_pylist())
        expected = [*range(files * FILE_ROWS), *range(MINE, MINE + puts)]
        missing, doubled = [id for id in expected if id not in found], [id for id, count in found.items() if count > 1]
        assert not missing, f"{len(missing)} rows are missing, from {missing[0]}"
        assert not doubled, f"{len(doubled)} rows are doubled, from {doubled[0]}"
        assert len(found) == len(expected)
        if not again:
            table.compact(full=True)
            table.gc(dry_run=False, min_age=0)
    report = table.verify(deep=True)
    assert report.ok, report.problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--patience", type=float, default=3600.0, help="seconds")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="headgate-torture-") as place:
        outcome = torture(Path(place), given.kills, given.seed, given.patience)
    print(json.dumps({"seed": given.seed, **outcome.__dict__}))


if __name__ == "__main__":
    main()
