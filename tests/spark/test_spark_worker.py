"""The processes that run Spark's tasks, and how a session of ours talks to them."""

from __future__ import annotations

import gc
import os
import pickle
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate.compact import compact_shard
from headgate.spark import plan
from headgate.spark.worker import begin_task
from headgate.view import RunCache


def test_what_a_worker_has_loaded_is_not_looked_at_by_every_collection_after_a_task(spark: Any) -> None:
    def look(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        begin_task()
        for _ in batches:
            pass
        yield pa.RecordBatch.from_pydict({"process": [os.getpid()], "frozen": [gc.get_freeze_count()]})

    tasks: dict[int, list[int]] = {}
    for _ in range(4):
        for row in spark.range(0, 2, 1, 2).mapInArrow(look, "process long, frozen long").collect():
            tasks.setdefault(row["process"], []).append(row["frozen"])
    often = [counts for counts in tasks.values() if len(counts) > 1]
    assert often, "no process had two tasks"
    for counts in often:
        assert counts[-1] > 10_000
        assert counts[1:] == sorted(counts[1:], reverse=True), "it is done once: nothing is added later"


def test_a_process_of_the_users_own_is_left_alone() -> None:
    before = gc.get_freeze_count()
    for _ in range(3):
        begin_task()
    assert gc.get_freeze_count() == before


def test_a_session_of_ours_talks_to_its_workers_through_sockets_that_are_gone_after_it(spark_environment: dict[str, str]) -> None:
    script = """
    import os, stat, sys
    import headgate.spark as hgs
    spark = hgs.session("local[1]", config={"spark.log.level": "OFF", "spark.driver.memory": "512m"})
    folder = spark.conf.get("spark.python.unix.domain.socket.dir")
    assert spark.range(3).mapInArrow(lambda batches: batches, "id long").count() == 3
    assert any(stat.S_ISSOCK(os.stat(f"{folder}/{name}").st_mode) for name in os.listdir(folder))
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    print("FOLDER", folder)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, **spark_environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    folder = next(line.split()[1] for line in done.stdout.splitlines() if line.startswith("FOLDER"))
    assert not os.path.exists(folder)


SCHEMA = pa.schema([pa.field("id", pa.int64(), False), ("v", pa.int64())])


def rows(*ids: int) -> pa.Table:
    return pa.table({"id": list(ids), "v": [7] * len(ids)}, schema=SCHEMA)


class Worker:
    """What a process of Spark's keeps from one read to the next."""

    def read(self, snapshot: hg.Snapshot) -> list[int]:
        mine = plan._in_this_process(pickle.loads(pickle.dumps(snapshot)))
        return sorted(id for part in snapshot.parts() for batch in mine.read(part, ["id"]) for id in batch.column(0).to_pylist())


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    monkeypatch.setattr(plan, "_kept", {})
    return Worker()


def test_a_process_that_knew_a_run_does_not_take_what_a_repair_left_of_it_for_the_same(tmp_path: Path, worker: Worker) -> None:
    place = tmp_path / "t"
    table = hg.create_table(place, SCHEMA, key="id")
    for start in (0, 1):
        with table.writer(hg.ShardWriterConfig(fsync=False)) as writer:
            writer.put(rows(*range(start, 40, 2))).wait()
    shard = table.shard("0000")
    compact_shard(shard.log, shard.places.columnar(), shard.rules, max_memory=1 << 26, full=True, slice_rows=10)
    before = hg.open_table(place).snapshot()
    assert worker.read(before) == list(range(40))
    assert table.scan().count() == 40

    shutil.rmtree(place / shard.log.manifests.load().runs[0].slices[1].path)
    hg.open_table(place).repair(dry_run=False)
    left = [*range(10), *range(20, 40)]
    after = hg.open_table(place).snapshot(ttl=3600)
    assert worker.read(after) == left
    assert sorted(table.scan(["id"]).to_arrow().column(0).to_pylist()) == left, "nor does a handle"
    plan._kept.clear()
    assert worker.read(after) == left
    with pytest.raises(hg.SnapshotExpiredError):
        worker.read(before)


def test_runs_of_one_id_with_other_slices_are_other_runs(tmp_path: Path) -> None:
    """As a repair by an earlier version left them."""
    table = hg.create_table(tmp_path / "t", SCHEMA, key="id")
    with table.writer(hg.ShardWriterConfig(fsync=False)) as writer:
        writer.put(rows(1, 2, 3)).wait()
    (run,) = table.shard("0000").log.manifests.load().runs
    cache = RunCache(table.shard("0000").places.columnar())
    (first,) = cache.open((run,))
    assert cache.open((run.but(created_at=1.0),)) == (first,)
    (second,) = cache.open((run.but(slices=()),))
    assert second is not first
    assert second.rows == 0


def test_a_snapshot_of_a_table_that_was_restored_from_a_copy_is_not_taken_for_one_of_before(tmp_path: Path, worker: Worker) -> None:
    place, copy = tmp_path / "t", tmp_path / "copy"

    def write(id: int) -> None:
        with hg.open_table(place).writer(hg.ShardWriterConfig(fsync=False)) as writer:
            writer.put(rows(id)).wait()

    hg.create_table(place, SCHEMA, key="id")
    write(1)
    shutil.copytree(place, copy)
    write(100)
    assert worker.read(hg.open_table(place).snapshot(ttl=3600)) == [1, 100]
    shutil.rmtree(place)
    shutil.copytree(copy, place)
    write(200)
    restored = hg.open_table(place).snapshot(ttl=3600)
    write(300)
    assert worker.read(restored) == [1, 200]


def test_a_process_reads_a_later_snapshot_through_what_it_has_open_if_the_table_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "_kept", {})
    table = hg.create_table(tmp_path / "t", SCHEMA, key="id")

    def sent(of: hg.Table) -> hg.Snapshot:
        return plan._in_this_process(pickle.loads(pickle.dumps(of.snapshot())))

    first = sent(table)
    assert sent(table).shards[0] is first.shards[0]
    assert plan._in_this_process(pickle.loads(pickle.dumps(first))) is first

    other = sent(hg.open_table(tmp_path / "t", storage_options={"aws_region": "elsewhere"}))
    assert other.shards[0] is not first.shards[0], "opened in another way"
    table.add_columns(pa.schema([("w", pa.int64())]))
    later = sent(hg.open_table(tmp_path / "t"))
    assert later.schema.names == ["id", "v", "w"]
    assert later.shards[0] is not first.shards[0], "other columns"
    for _ in range(5):
        sent(table)
    assert len(plan._kept) == 4
