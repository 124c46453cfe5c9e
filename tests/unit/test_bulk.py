"""Loads by many processes: what is registered when, and what becomes of them when their shards are split."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate import bulk
from headgate.manifest.model import ShardManifest

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("v", pa.string())])


def rows(first: int, last: int, v: str = "a") -> pa.Table:
    return pa.table({"id": range(first, last), "v": [v] * (last - first)}, schema=SCHEMA)


def manifest(table: hg.Table, shard: str = "0000") -> ShardManifest:
    return table.shard(shard).places.open_log(shard, table.shard(shard).table_id).manifests.load()


def ids(table: hg.Table) -> list[int]:
    return sorted(table.scan(["id"]).to_arrow().column("id").to_pylist())


@pytest.fixture
def table(tmp_path: Path) -> hg.Table:
    return hg.create_table(tmp_path / "t", SCHEMA, key="id", sharding=hg.bucket("id", 2))


def test_loads_that_come_often_write_nothing_but_their_rows(table: hg.Table) -> None:
    versions = []
    for number in range(4):
        load = pickle.loads(pickle.dumps(table.bulk_load("stream", number, query="q", often=True)))
        load.commit([load.write(rows(number * 10, number * 10 + 10))])
        load.abort()
        versions.append(manifest(table).version)
    assert [b - a for a, b in pairwise(versions)] == [2, 2, 2], "announced and placed, nothing else"
    assert len(manifest(table).attempts) == 1
    assert ids(table) == list(range(40))


def test_what_a_stream_left_behind_is_collected_when_its_day_is_long_over(table: hg.Table, monkeypatch: pytest.MonkeyPatch) -> None:
    load = table.bulk_load("stream", 0, often=True)
    load.write(rows(0, 10))  # by a task that died
    assert table.gc(dry_run=False, min_age=0).objects.get("orphan", 0) == 0
    now = table._places.clock.now()
    monkeypatch.setattr(type(table._places.clock), "now", lambda self: now + 4 * 86_400)
    assert table.gc(dry_run=False, min_age=0).objects["orphan"] > 0
    again = table.bulk_load("stream", 0, often=True)
    assert again.attempt != load.attempt
    again.commit([again.write(rows(0, 10))])
    assert ids(table) == list(range(10))


def test_slices_of_a_load_are_about_the_same_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the last one of each would be small, and compaction would write it again every time."""
    monkeypatch.setattr("headgate.bulk_files.SLICE_ROWS", 10)
    table = hg.create_table(tmp_path / "one", SCHEMA, key="id")
    table.load(rows(0, 21))
    (run,) = manifest(table).runs
    assert [part.rows for part in run.slices] == [7, 7, 7]


def test_more_memory_makes_fewer_runs_of_a_load(tmp_path: Path) -> None:
    table = hg.create_table(tmp_path / "one", SCHEMA, key="id")
    mixed = [pa.table({"id": range(first, 210_000, 3), "v": ["a"] * 70_000}, schema=SCHEMA) for first in range(3)]
    table.load(mixed, max_memory=1 << 20)
    several = len(manifest(table).runs)
    assert several > 1
    table.load(mixed)
    assert len(manifest(table).runs) == several + 1
    assert ids(table) == list(range(210_000))


@pytest.mark.parametrize("max_memory", [0, -1, 1.5, True, None, "x"])
def test_a_memory_that_is_none_is_refused_before_anything_is_written(table: hg.Table, max_memory: Any) -> None:
    with pytest.raises(hg.InvalidInputError, match="max_memory"):
        table.load(rows(0, 10), max_memory=max_memory)
    assert not manifest(table).attempts


def test_a_shard_that_gets_no_rows_needs_no_attempt(table: hg.Table) -> None:
    load = replace(table.bulk_load("app", 1, often=True), attempt="never")
    report = load.commit([])
    assert report.committed
    assert not table.bulk_load("app", 1, often=True).commit([]).committed


def test_bad_rows_of_a_task_that_is_run_again_are_kept_once(tmp_path: Path) -> None:
    table = hg.create_table(tmp_path / "t", SCHEMA, key="id")
    bad = pa.table({"id": pa.array([1, None]), "v": ["x", "y"]})
    load = table.bulk_load("app", 1, on_bad_rows="quarantine")
    assert [load.write(bad).quarantined_rows for _ in range(2)] == [1, 1]
    assert len(list((tmp_path / "t" / "quarantine").iterdir())) == 1


def test_an_identity_shard_that_another_writer_made_does_not_stop_a_load(tmp_path: Path) -> None:
    table = hg.create_table(tmp_path / "t", SCHEMA, key=["id", "v"], sharding=hg.identity("v"))
    load = table.bulk_load("app", 1)
    files = load.write(rows(0, 5, "mine"))
    with table.writer() as writer:
        writer.put(rows(0, 5, "theirs")).wait()
    assert load.commit([files]).committed
    assert table.scan().count() == 10


def test_p14_what_was_written_for_a_shard_that_was_split_since_is_written_again_for_its_parts(table: hg.Table) -> None:
    with table.writer(hg.ShardWriterConfig(fsync=False)) as writer:
        writer.put(rows(0, 100)).wait()
    load = table.bulk_load("app", 1)
    early = load.write(rows(50, 150, "b"))
    gone = load.write(pa.table({"id": range(10), "_op": ["delete"] * 10, "v": pa.nulls(10, pa.string())}))
    table.split_shard("0000")
    late = load.write(rows(150, 200, "c"))  # by a task that knows the parts, in which nobody has registered the load
    table.gc(dry_run=False, min_age=0)
    assert load.commit([early, gone, late]).committed
    assert not load.commit([early, gone, late]).committed
    load.abort()
    found = hg.open_table(table.uri).scan().to_arrow().sort_by("id").to_pylist()
    assert found == [{"id": i, "v": "a" if i < 50 else "b" if i < 150 else "c"} for i in range(10, 200)]
    assert table.verify(deep=True).ok


@pytest.mark.parametrize("step", ["split.claimed", "split.flushed", "split.pinned", "split.child", "split.retired", "split.published"])
def test_p14_a_split_in_the_midst_of_a_commit_loses_and_doubles_nothing(table: hg.Table, step: str) -> None:
    """The split goes up to a step, the commit begins and finds it so; then the split goes on."""
    import threading

    from headgate.failpoint import hooked

    load = table.bulk_load("app", 1)
    files = load.write(rows(0, 100))
    reached, go_on, splitter = threading.Event(), threading.Event(), threading.Event()

    def stop(name: str) -> None:
        if threading.current_thread().name == "splitter" and name == step:
            reached.set()
            assert go_on.wait(30)
        if threading.current_thread().name != "splitter" and name == "bulk.joined" and not splitter.is_set():
            splitter.set()
            threading.Timer(0.05, go_on.set).start()

    with hooked(stop):
        thread = threading.Thread(target=lambda: hg.open_table(table.uri).split_shard("0000"), name="splitter")
        thread.start()
        assert reached.wait(30)
        if step in ("split.retired", "split.published"):
            go_on.set()
        report = load.commit([files])
        go_on.set()
        thread.join()
    assert report.committed
    assert ids(hg.open_table(table.uri)) == list(range(100))
    assert len(hg.open_table(table.uri).shards) == 3
    assert table.verify(deep=True).ok


def test_a_lease_that_is_over_brings_in_nothing(table: hg.Table) -> None:
    load = table.bulk_load("app", 1)
    files = load.write(rows(0, 10))
    load.abort()
    with pytest.raises(hg.CommitConflictError, match="lease"):
        load.commit([files])
    assert ids(table) == []
    assert load.lease_seconds == bulk.LEASE_SECONDS
