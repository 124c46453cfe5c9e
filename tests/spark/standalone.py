"""Everything once on a standalone cluster: a master and two workers from the PySpark distribution, on loopback.

    python tests/spark/standalone.py [--rows N]

Writes with Spark, reads back both ways, follows the changes with a stream, compacts, verifies, and compares.
Not part of the tests: it starts three JVMs besides the driver's.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyspark

HOST = "127.0.0.1"
START_SECONDS = 120.0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])


@contextmanager
def cluster(place: Path, workers: int = 2) -> Iterator[str]:
    """The URI of a master with so many workers of one core each."""
    home = Path(pyspark.__file__).parent
    environment = {
        **os.environ,
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": HOST,
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": f"{Path(__file__).parent.parent.parent / 'src'}:{os.environ.get('PYTHONPATH', '')}",
    }
    launch, port, page = str(home / "bin" / "spark-class"), free_port(), free_port()
    master = [launch, "org.apache.spark.deploy.master.Master", "--host", HOST, "--port", str(port), "--webui-port", str(page)]
    uri = f"spark://{HOST}:{port}"
    processes: list[subprocess.Popen[bytes]] = []

    def start(command: list[str], name: str) -> Path:
        log = place / f"{name}.log"
        with log.open("wb") as out:
            processes.append(subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT))
        return log

    def wait(log: Path, words: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while words not in log.read_text(errors="replace"):
            if time.monotonic() > deadline or any(process.poll() is not None for process in processes):
                raise RuntimeError(f"{log.name} does not say {words!r}:\n{log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.2)

    try:
        wait(start(master, "master"), "I have been elected leader")
        for number in range(workers):
            worker = [launch, "org.apache.spark.deploy.worker.Worker", "--host", HOST, "--cores", "1", "--memory", "1g"]
            log = start([*worker, "--webui-port", str(free_port()), "-d", str(place / f"work-{number}"), uri], f"worker-{number}")
            wait(log, "Successfully registered with master")
        yield uri
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(30)


def main(rows: int) -> None:
    import pyarrow as pa

    import headgate as hg
    import headgate.spark as hgs

    with tempfile.TemporaryDirectory(prefix="headgate-standalone-") as folder, cluster(Path(folder)) as master:
        print(f"a cluster at {master}", flush=True)
        os.environ["SPARK_LOCAL_IP"] = HOST
        config = {
            "spark.driver.memory": "1g",
            "spark.executor.memory": "600m",
            "spark.driver.host": HOST,
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.sql.shuffle.partitions": "2",
            "spark.log.level": "ERROR",
        }
        spark = hgs.session(master, config=config)
        uri = f"{folder}/table"
        schema = pa.schema([pa.field("id", pa.int64(), False), pa.field("value", pa.float64())])
        table = hg.create_table(uri, schema, key="id", sharding=hg.bucket("id", 4))
        frame = spark.range(rows).selectExpr("id", "cast(id as double) as value")
        frame.write.format("headgate").mode("append").option("appId", "standalone").option("txnVersion", 1).save(uri)
        with table.writer() as writer:
            writer.put([{"id": 0, "value": -1.0}]).wait()
            writer.delete([{"id": 1}]).wait()
            for name, read in (("hgs.read", hgs.read(spark, uri)), ('format("headgate")', spark.read.format("headgate").load(uri))):
                count, total = read.selectExpr("count(*)", "sum(value)").first()
                assert (count, total) == (rows - 1, rows * (rows - 1) / 2 - 2.0), f"{name}: {count} rows, {total}"
                print(f"{name}: {count:,} rows, as they should be", flush=True)
        changes = spark.readStream.format("headgate").option("startingOffsets", "earliest").load(uri)
        query = (
            changes.groupBy("_op").count().writeStream.outputMode("complete").format("memory").queryName("ops").trigger(availableNow=True)
        )
        query.option("checkpointLocation", f"{folder}/checkpoint").start().awaitTermination()
        seen = {row["_op"]: row["count"] for row in spark.sql("select * from ops").collect()}
        assert seen == {"upsert": rows + 1, "delete": 1}, seen
        print(f"the stream has seen every change once: {seen}", flush=True)
        report = hgs.compact(spark, uri)
        assert hg.open_table(uri).scan().count() == rows - 1
        assert hgs.verify(spark, uri, deep=True).ok
        print(f"compacted: {report.runs_before} runs are {report.runs_after}; verified", flush=True)
        spark.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Everything once on a standalone cluster.")
    parser.add_argument("--rows", type=int, default=200_000)
    main(parser.parse_args().rows)
