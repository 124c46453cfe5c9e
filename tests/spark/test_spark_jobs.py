"""Jobs: the maintenance of all shards by Spark's tasks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

import headgate as hg
import headgate.spark as hgs
from headgate.cli.main import app

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string()), pa.field("v", pa.float64())])
CONFIG = hg.ShardWriterConfig(fsync=False)


def rows(ids: Any, v: float = 0.0) -> pa.Table:
    ids = np.asarray(ids)
    return pa.table({"id": ids, "name": [f"n{i}" for i in ids], "v": np.full(len(ids), v)}, schema=SCHEMA)


def filled(place: Path, shards: int = 4, key: str | None = "id") -> hg.Table:
    """Several runs in each shard, with deletes."""
    table = hg.create_table(place / "t", SCHEMA, key=key, sharding=hg.bucket("id", shards))
    random = np.random.default_rng(7)
    with table.writer(CONFIG) as writer:
        writer.put(rows(np.arange(4_000))).wait()
        writer.flush()
        for version in range(1, 4):
            writer.put(rows(np.unique(random.integers(0, 6_000, 800)), version)).wait()
            if key:
                writer.delete(pa.table({"id": np.unique(random.integers(0, 6_000, 100))})).wait()
            writer.flush()
    return hg.open_table(place / "t")


def in_order(table: hg.Table) -> pa.Table:
    return table.scan().to_arrow().sort_by([("id", "ascending"), ("v", "ascending")])


def attempts(table: hg.Table) -> list[str]:
    return [id for shard in table.shards for id in shard.log.manifests.load().attempts]


@pytest.mark.parametrize(("shards", "key", "rows_per_task"), [(4, "id", None), (1, "id", 1_000), (2, None, 1_500)])
def test_compaction_leaves_the_same_rows_in_few_runs(
    spark: Any, tmp_path: Path, shards: int, key: str | None, rows_per_task: int | None
) -> None:
    table = filled(tmp_path, shards, key)
    before, told = in_order(table), []
    report = hgs.compact(
        spark, table.uri, full=True, rows_per_task=rows_per_task, progress=lambda shard, done, total: told.append((shard, done, total))
    )
    assert (report.runs_before, report.runs_after) == (4 * shards, shards)
    assert report.shards == {shard.id: 1 for shard in table.shards}
    assert report.rows_written == before.num_rows
    assert report.rows_read >= report.rows_written
    assert in_order(table) == before
    assert {shard for shard, _, _ in told} == set(report.shards)
    assert all(0 <= done <= total for _, done, total in told)
    assert table.verify(deep=True).ok
    assert attempts(table) == []
    again = hgs.compact(spark, table.uri, full=True)
    assert (again.runs_before, again.runs_after, again.rows_read) == (shards, shards, 0)


def test_a_compaction_of_some_shards_and_by_size(spark: Any, tmp_path: Path) -> None:
    table = filled(tmp_path, 2)
    before = in_order(table)
    report = hgs.compact(spark, table.uri, shards=["0001"])
    assert list(report.shards) == ["0001"]
    assert report.runs_after < report.runs_before == 4
    assert len([run for run in table.runs() if run.shard == "0000"]) == 4
    assert in_order(table) == before
    with pytest.raises(hg.NotFoundError, match="0007"):
        hgs.compact(spark, table.uri, shards=["0007"])
    with pytest.raises(hg.InvalidInputError, match="max_memory"):
        hgs.compact(spark, table.uri, max_memory=0)


def test_a_compaction_goes_on_beside_a_writer_and_another_compaction(spark: Any, tmp_path: Path) -> None:
    table = filled(tmp_path, 2)
    stop, rivals = threading.Event(), []

    def write() -> None:
        with hg.open_table(table.uri).writer(CONFIG) as writer:
            version = 10.0
            while not stop.is_set():
                writer.put(rows(np.arange(2_000, 2_500), version)).wait()
                writer.flush()
                version += 1
                rivals.append(hg.open_table(table.uri).compact(full=True).runs_after)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(3):
            hgs.compact(spark, table.uri, full=True)
    finally:
        stop.set()
        thread.join()
    assert rivals
    found = table.scan(filter="id >= 2000 and id < 2500").to_arrow()
    assert found.num_rows == 500
    assert len(set(found.column("v").to_pylist())) == 1, "the last version of all of them"
    assert table.verify(deep=True).ok
    assert attempts(table) == []


def test_a_task_that_fails_fails_the_job_and_leaves_nothing_registered(spark: Any, tmp_path: Path) -> None:
    table = filled(tmp_path, 1)
    before = in_order(table)
    lost = table.runs()[0].slices[0].uri
    gone = Path(lost.removeprefix("file://"))
    hidden = gone.rename(gone.with_suffix(".hidden"))
    with pytest.raises(hg.DataLossError, match="is missing"):
        hgs.compact(spark, table.uri, full=True)
    assert attempts(table) == []
    hidden.rename(gone)
    assert hgs.compact(spark, table.uri, full=True).runs_after == 1
    assert in_order(table) == before


def test_collection_and_verification_by_tasks_say_what_the_table_says(spark: Any, tmp_path: Path) -> None:
    table = filled(tmp_path, 3)
    table.compact(full=True)
    assert hgs.verify(spark, table.uri, deep=True) == table.verify(deep=True)
    planned = hgs.gc(spark, table.uri, min_age=0)
    assert planned.dry_run
    assert planned.objects == table.gc(min_age=0).objects
    assert planned.objects["run"] > 0
    done = hgs.gc(spark, table.uri, dry_run=False, min_age=0)
    assert done.objects["run"] == planned.objects["run"]
    assert table.gc(min_age=0).objects.get("run", 0) == 0
    assert hgs.verify(spark, table.uri).ok
    lost = Path(table.runs()[1].slices[0].uri.removeprefix("file://"))
    lost.rename(lost.with_suffix(".hidden"))
    report = hgs.verify(spark, table.uri)
    assert not report.ok
    assert report.problems[0].shard == table.runs()[1].shard


def test_a_first_load_is_one_run_in_each_shard_sorted_by_key(spark: Any, tmp_path: Path) -> None:
    table = hg.create_table(tmp_path / "t", SCHEMA, key="id", sharding=hg.bucket("id", 3))
    ids = np.random.default_rng(3).permutation(20_000)
    frame = spark.createDataFrame(rows(ids, 1.0).to_pandas()).repartition(3)
    report = hgs.load(spark, frame, table.uri, partitions=4, app="first")
    assert (report.committed, report.rows) == (True, 20_000)
    assert report.runs == {"0000": 1, "0001": 1, "0002": 1}
    assert in_order(table) == rows(np.arange(20_000), 1.0)
    assert table.verify(deep=True).ok
    assert attempts(table) == []
    assert not hgs.load(spark, frame, table.uri, app="first").committed, "done already"
    with pytest.raises(hg.InvalidInputError, match="not empty"):
        hgs.load(spark, frame, table.uri)
    with pytest.raises(hg.SchemaMismatchError, match="other"):
        hgs.load(spark, frame.withColumnRenamed("v", "other"), table.uri)


def test_a_first_load_refuses_a_table_with_a_consumer(spark: Any, tmp_path: Path) -> None:
    table = hg.create_table(tmp_path / "t", SCHEMA, key="id")
    table.open_consumer("index")
    with pytest.raises(hg.InvalidInputError, match="consumer, 'index'"):
        hgs.load(spark, spark.createDataFrame(rows(range(3)).to_pandas()), table.uri)
    assert attempts(table) == []


@pytest.mark.parametrize("rule", [hg.bucket("id", 5), hg.identity("name"), hg.unsharded()])
def test_resharding_copies_one_moment_into_other_shards(spark: Any, tmp_path: Path, rule: Any) -> None:
    source = hg.create_table(tmp_path / "t", SCHEMA, key=["id", "name"], sharding=hg.bucket("id", 2))
    some = rows(np.arange(900), 1.0).set_column(1, "name", pa.array([f"g{i % 3}" for i in range(900)]))
    with source.writer(CONFIG) as writer:
        writer.put(some).wait()
        writer.flush()
        writer.delete(some.slice(0, 100).select(["id", "name"])).wait()
        writer.put(some.slice(100, 50).set_column(2, "v", pa.array(np.full(50, 2.0)))).wait()
    before = in_order(source)
    report = hgs.reshard(spark, source.uri, tmp_path / "new", rule, partitions=3)
    target = hg.open_table(tmp_path / "new")
    assert (report.committed, report.rows) == (True, 800)
    assert target.sharding == rule
    assert set(report.runs.values()) == {1}
    assert in_order(target) == before == in_order(source)
    assert source.checkpoints() == [], "the moment is let go"
    with source.writer(CONFIG) as writer:
        writer.put(some.slice(0, 10)).wait()
    assert not hgs.reshard(spark, source.uri, tmp_path / "new", rule).committed, "run again it does nothing"
    with pytest.raises(hg.SchemaMismatchError):
        hgs.reshard(spark, source.uri, tmp_path / "new", hg.bucket("id", 9))
    with pytest.raises(hg.InvalidInputError, match="same table"):
        hgs.reshard(spark, source.uri, source.uri, rule)


def test_a_reshard_that_died_is_run_again(spark: Any, tmp_path: Path) -> None:
    source = filled(tmp_path, 1)
    target = hg.create_table(tmp_path / "new", SCHEMA, key="id", sharding=hg.bucket("id", 3))
    dead = target.bulk_load(f"reshard:{source.uri}", 0)
    dead.write(rows(range(100)))  # killed before the commit
    assert hgs.reshard(spark, source.uri, tmp_path / "new", hg.bucket("id", 3), partitions=2).committed
    assert in_order(hg.open_table(tmp_path / "new")) == in_order(source)
    with target.writer(CONFIG) as writer:
        writer.put(rows(range(3))).wait()
    other = hg.create_table(tmp_path / "other", SCHEMA, key="id")
    with pytest.raises(hg.InvalidInputError, match="not empty"):
        hgs.reshard(spark, other.uri, tmp_path / "new", hg.bucket("id", 3))


def test_the_commands_with_spark_say_what_they_say_without_it(spark: Any, tmp_path: Path) -> None:
    table = filled(tmp_path, 2)
    before = in_order(table)

    def said(*words: str) -> Any:
        ran = CliRunner().invoke(app, [words[0], table.uri, *words[1:], "--json"], catch_exceptions=False)
        assert ran.exit_code == 0, ran.output
        return json.loads(ran.stdout)

    compacted = said("compact", "--spark", "--full")
    assert (compacted["runs_before"], compacted["runs_after"]) == (8, 2)
    assert said("verify", "--spark", "--deep") == said("verify", "--deep")
    assert said("gc", "--spark", "--min-age", "0") == said("gc", "--min-age", "0")
    assert said("gc", "--spark", "--yes", "--min-age", "0")["objects"]["run"] > 0
    assert in_order(table) == before
    assert spark.range(3).count() == 3, "a session that was there is left alone"


@pytest.mark.slow
def test_compaction_and_a_first_load_by_real_executors(on_cluster: Callable[..., Any], tmp_path: Path) -> None:
    table = filled(tmp_path, 2)
    before = table.scan().count()
    said = on_cluster(
        """
        report = hgs.compact(spark, args[0], full=True, rows_per_task=1000)
        copied = hgs.reshard(spark, args[0], args[1], hg.bucket("id", 3), partitions=3)
        ok = hgs.verify(spark, args[1], deep=True).ok
        hgs.gc(spark, args[0], dry_run=False, min_age=0)
        answer({"runs": report.runs_after, "rows": copied.rows, "parts": copied.runs, "ok": ok})
        """,
        table.uri,
        str(tmp_path / "copy"),
    )
    assert said == {"runs": 2, "rows": before, "parts": {"0000": 1, "0001": 1, "0002": 1}, "ok": True}
    assert in_order(hg.open_table(tmp_path / "copy")) == in_order(table)


def test_jobs_and_reads_need_no_spark_context(tmp_path: Path, spark_environment: dict[str, str]) -> None:
    """A server of Spark Connect, in a process of its own, and a client that has no context."""
    script = """
    import sys
    import pyarrow as pa
    from pyspark.sql import SparkSession
    import headgate as hg
    import headgate.spark as hgs
    spark = SparkSession.builder.remote("local[1]").config("spark.driver.memory", "512m").getOrCreate()
    assert getattr(spark, "sparkContext", None) is None
    schema = pa.schema([pa.field("id", pa.int64(), False), ("v", pa.int64())])
    table = hg.create_table(sys.argv[1], schema, key="id", sharding=hg.bucket("id", 2))
    with table.writer(hg.ShardWriterConfig(fsync=False)) as writer:
        for turn in range(2):
            writer.put(pa.table({"id": range(500), "v": [turn] * 500}, schema=schema)).wait()
            writer.flush()
    assert hgs.compact(spark, table.uri, full=True).shards == {"0000": 1, "0001": 1}
    assert hgs.verify(spark, table.uri).ok
    assert hgs.gc(spark, table.uri, dry_run=False, min_age=0).objects
    assert hgs.read(spark, table.uri).where("v = 1").count() == 500
    print("HELD")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "t")],
        env={**os.environ, **spark_environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert "HELD" in done.stdout, done.stderr[-3000:]
