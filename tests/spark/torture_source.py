"""The source under torture: a driver that follows a table is killed, again and again; each change counts once.

    python tests/spark/torture_source.py --kills 30 --seed 1

A table is written, loaded, compacted, collected and split, while a Spark driver, a process of its own, follows its changes. It is
killed with SIGKILL at random moments: while it starts, between the steps of a batch, and while a batch runs. What each
batch had is written to a file named after it, by a rename, so a batch that is done again replaces what it wrote; and it is
written into a second table, as (appId, batch id). At the end all files together must have every change exactly
once, and the second table must be equal to the first.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa

import headgate as hg
from headgate.spark.environment import require_java

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("v", pa.int64())])
CONFIG = hg.ShardWriterConfig(fsync=False)
PATIENCE = 600.0
KEYS = 500
SETTINGS = {
    "spark.driver.memory": "1g",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.session.timeZone": "UTC",
}


# -- the driver, in a process of its own


def drive(place: Path, to_the_end: bool) -> None:
    from pyspark.sql import SparkSession

    import headgate.spark as hgs

    builder = SparkSession.builder.master("local[2]").appName("torture")
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    hgs.register(spark)
    spark.sparkContext.setLogLevel("OFF")
    say("STARTED")

    def take(frame: Any, number: int) -> None:
        say(f"BATCH {number}")
        frame = frame.persist()
        rows = frame.toArrow()
        written = place / "batches" / f".{number}.{os.getpid()}"
        written.write_text(json.dumps(rows.select(["id", "v", "_op"]).to_pylist()))
        written.rename(place / "batches" / f"{number:06d}.json")
        say(f"WRITTEN {number}")
        (
            frame.select("id", "v", "_op")
            .write.format("headgate")
            .mode("append")
            .option("appId", "replica")
            .option("txnVersion", number)
            .save(str(place / "replica"))
        )
        frame.unpersist()
        say(f"DONE {number}")

    stream = (
        spark.readStream.format("headgate")
        .option("startingOffsets", "snapshot")
        .option("consumer", "torture")
        .option("maxEntriesPerTrigger", 1_000_000 if to_the_end else 12)
        .load(str(place / "source"))
        .writeStream.foreachBatch(take)
        .option("checkpointLocation", str(place / "checkpoint"))
    )
    while True:
        try:
            stream.trigger(**({"availableNow": True} if to_the_end else {"processingTime": "0 seconds"})).start().awaitTermination()
            break
        except Exception as error:
            if "failed to connect back" not in str(error):
                raise  # else: Spark gives the process of a source 10 seconds to start, and this machine is busy
    say("ENDED")


def say(what: str) -> None:
    print(what, flush=True)


# -- around it


def environment(scratch: Path) -> dict[str, str]:
    """What a driver and its workers need."""
    sources = str(Path(hg.__file__).parent.parent)
    return {
        "JAVA_HOME": str(require_java()),
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys([sources, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])),
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": str(scratch / "bytecode"),
        "PYTHONWARNINGS": "ignore:lance is not fork-safe",
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(scratch / "spark"),
    }


class Driver:
    """One life of the driver."""

    def __init__(self, place: Path, environment: dict[str, str], *, to_the_end: bool = False) -> None:
        command = [sys.executable, __file__, "--drive", str(place), *(["--to-the-end"] if to_the_end else [])]
        with (place / "driver.log").open("a") as log:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, **environment}, start_new_session=True
            )
        self.said: collections.deque[str] = collections.deque()
        self.event = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self.event:
                self.said.append(line.strip())
                self.event.notify_all()
        with self.event:
            self.said.append("OVER")
            self.event.notify_all()

    def wait_for(self, is_it: Any, seconds: float = PATIENCE) -> str | None:
        """The next thing it says of which this is true; None: it said no such thing in time."""
        deadline = time.monotonic() + seconds
        with self.event:
            while True:
                while self.said:
                    line = self.said.popleft()
                    if is_it(line) or line == "OVER":
                        return line
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self.event.wait(left)

    def kill(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)  # a group of its own: the driver, and its JVM
        except ProcessLookupError:
            pass
        self.process.wait()


class Writing:
    """Writes the source, and does all else to it, until it is told to stop."""

    def __init__(self, table: hg.Table, seed: int) -> None:
        self.table, self.random = table, random.Random(seed)
        self.made: set[tuple[int, int | None]] = set()
        """Every change, once: a value is never used again."""
        self.next, self.splits = 1, 0
        self.stop = threading.Event()
        self.error: BaseException | None = None
        self.done: collections.Counter[str] = collections.Counter()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Writing:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop.set()
        self._thread.join()

    def _rows(self, count: int) -> pa.Table:
        ids = self.random.sample(range(KEYS), count)
        values = list(range(self.next, self.next + count))
        self.next += count
        self.made |= set(zip(ids, values, strict=True))
        return pa.table({"id": ids, "v": values}, schema=SCHEMA)

    def _run(self) -> None:
        try:
            while not self.stop.is_set():
                self._round()
        except BaseException as error:
            self.error = error

    def _round(self) -> None:
        with hg.open_table(self.table.uri).writer(CONFIG) as writer:
            for _ in range(self.random.randint(2, 8)):
                if self.stop.wait(0.4):
                    break
                writer.put(self._rows(self.random.randint(1, 20))).wait()
                self.done["put"] += 1
                if self.random.random() < 0.2:
                    writer.flush()
                    self.done["flush"] += 1
        what = self.random.random()
        if what < 0.3:
            self.table.refresh().load(self._rows(self.random.randint(1, 60)))
            self.done["load"] += 1
        elif what < 0.5:
            self.table.refresh().compact()
            self.table.gc(dry_run=False, min_age=0)
            self.done["compact and gc"] += 1
        elif what < 0.53 and self.splits < 2:
            self.splits += 1
            self.table.split_shard(self.random.choice(self.table.refresh().shards).id)
            self.done["split"] += 1


def torture(place: Path, kills: int, seed: int, environment: dict[str, str], tell: Any = print) -> dict[str, Any]:
    """Kill the driver so many times, then let it come to the end; what was found. Raises AssertionError: something is wrong."""
    pick = random.Random(seed)
    (place / "batches").mkdir(parents=True)
    source = hg.create_table(place / "source", SCHEMA, key="id", sharding=hg.bucket("id", 2))
    hg.create_table(place / "replica", SCHEMA, key="id", sharding=hg.bucket("id", 2))
    with source.writer(CONFIG) as writer:  # what the snapshot finds: the values below 0 are not changes
        writer.put(pa.table({"id": list(range(50)), "v": [-1 - n for n in range(50)]}, schema=SCHEMA)).wait()
        writer.flush()
    snapshot = {(n, -1 - n) for n in range(50)}
    source.open_consumer("torture", start="snapshot")  # what comes from now on is a change, whenever the first driver starts
    moments: collections.Counter[str] = collections.Counter()
    overtaken = 0
    with Writing(source, seed) as writing:
        while sum(moments.values()) < kills:
            log = place / "driver.log"
            said = log.stat().st_size if log.exists() else 0
            driver = Driver(place, environment)
            kind = pick.choice(["starting", "BATCH", "BATCH", "WRITTEN", "WRITTEN", "DONE", "DONE", "DONE"])
            if kind == "starting":
                driver.wait_for(lambda line: line == "STARTED")
                time.sleep(pick.uniform(0, 3.0))
            else:
                for _ in range(pick.randint(1, 3)):
                    if driver.wait_for(lambda line, kind=kind: line.startswith(kind)) in (None, "OVER"):
                        break
                time.sleep(pick.uniform(0, 0.8))
            alive = driver.process.poll() is None
            driver.kill()
            if not alive and b"ConsumerTakenError" in log.read_bytes()[said:]:
                overtaken += 1  # by a worker that a killed driver left behind; whoever starts the query again goes on
                assert overtaken <= kills, "the consumer is taken again and again"
                continue
            assert alive, f"the driver ended by itself: see {log}"
            moments[kind] += 1
            batches = len(list((place / "batches").glob("0*")))
            tell(f"kill {sum(moments.values())} of {kills}, while {kind}; {len(writing.made):,} changes, {batches} batches")
            assert writing.error is None, writing.error
    for _ in range(2):  # a query that ends with what was there when it began
        driver = Driver(place, environment, to_the_end=True)
        ended = driver.wait_for(lambda line: line == "ENDED")
        driver.kill()
        assert ended == "ENDED", f"the driver did not come to the end: see {place / 'driver.log'}"
    return {
        **checked(place, source.refresh(), writing.made | snapshot),
        "kills": dict(moments),
        "overtaken": overtaken,
        "done": dict(writing.done),
    }


def checked(place: Path, source: hg.Table, expected: set[tuple[int, int | None]]) -> dict[str, Any]:
    seen: collections.Counter[tuple[int, int]] = collections.Counter()
    files = sorted((place / "batches").glob("0*.json"))
    for file in files:
        seen.update((row["id"], row["v"]) for row in json.loads(file.read_text()))
    twice = [change for change, count in seen.items() if count > 1]
    missing = expected - seen.keys()
    strange = seen.keys() - expected
    assert not twice, f"{len(twice)} changes were given twice, e.g. {twice[:3]}"
    assert not missing, f"{len(missing)} changes are missing, e.g. {sorted(missing)[:3]}"
    assert not strange, f"{len(strange)} changes were never made, e.g. {sorted(strange)[:3]}"
    mine, theirs = (
        {row["id"]: row["v"] for row in table.scan().to_arrow().to_pylist()} for table in (source, hg.open_table(place / "replica"))
    )
    differ = {id for id in mine.keys() | theirs.keys() if mine.get(id) != theirs.get(id)}
    assert not differ, f"the replica differs in {len(differ)} rows, e.g. {sorted(differ)[:3]}"
    assert source.verify(deep=True).ok
    return {"changes": len(seen), "batches": len(files), "rows": len(mine)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--place", type=Path, default=None)
    parser.add_argument("--drive", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--to-the-end", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.drive is not None:
        drive(given.drive, given.to_the_end)
        return
    seed = random.randrange(1 << 30) if given.seed is None else given.seed
    place = given.place or Path(tempfile.mkdtemp(prefix="torture-source-"))
    place.mkdir(parents=True, exist_ok=True)
    print(f"seed {seed}, in {place}", flush=True)
    found = torture(place, given.kills, seed, environment(place), tell=lambda line: print(line, flush=True))
    print(f"exactly once: {json.dumps(found)}")


if __name__ == "__main__":
    main()
