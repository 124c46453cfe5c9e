"""Loads and those who are late: views, committers and attempts that stall while everybody else goes on."""

from __future__ import annotations

import pickle
from pathlib import Path

import pyarrow as pa
import pytest

import headgate as hg
from headgate import bulk
from headgate.failpoint import hooked

SCHEMA = pa.schema([pa.field("id", pa.int64(), False), pa.field("v", pa.string())])


def rows(*ids: int, v: str = "a") -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.int64()), "v": [v] * len(ids)}, schema=SCHEMA)


@pytest.mark.parametrize("key", [None, "id"])
def test_c10_a_view_of_a_memtable_that_grew_was_cut_at_a_load_and_flushed_in_part_shows_no_row_twice(
    tmp_path: Path, key: str | None
) -> None:
    # t0 a view takes entry 0 · t1 entry 1, a load, entry 2 · t2 the MemTable is cut, its older part flushed · t3 it reads the manifest
    table = hg.create_table(tmp_path / "t", SCHEMA, key=key)
    writer = table.shard("0000").writer(hg.ShardWriterConfig(max_memtable_age=1e6))
    writer.put(rows(0, v="old")).wait()
    stalled = iter([True])

    def hook(name: str) -> None:
        if name == "view.memory" and next(stalled, False):
            writer.put(rows(1, v="old")).wait()
            table.load(rows(0, v="load"))
            writer.put(rows(2, v="old")).wait()
            writer.view()  # cuts, and the older part is flushed
            generations = writer._generations
            assert generations is not None
            with generations.lock:
                while len(generations._tables) > 1:
                    generations._flushed.wait(10)

    with hooked(hook):
        found = writer.scan().to_arrow().to_pylist()
    writer.abort()
    shown = sorted((row["id"], row["v"]) for row in found)
    assert shown == ([(0, "load"), (1, "old")] if key else [(0, "load"), (0, "old"), (1, "old")])


BY_VALUE = pa.schema([pa.field("kind", pa.string(), False), pa.field("id", pa.int64())])


def of_kind(*ids: int) -> pa.Table:
    return pa.table({"kind": ["x"] * len(ids), "id": pa.array(ids, pa.int64())}, schema=BY_VALUE)


@pytest.mark.parametrize("often", [False, True])
def test_g07_files_that_were_collected_are_not_committed_because_their_attempt_is_registered_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, often: bool
) -> None:
    # t0 task A makes a shard and writes · t1 the lease is over, A's files are collected · t2 task B registers, writes · t3 commit
    table = hg.create_table(tmp_path / "t", BY_VALUE, sharding=hg.identity("kind"))
    load = table.bulk_load("first", 1, often=often)
    early = pickle.loads(pickle.dumps(load)).write(of_kind(1, 2))
    clock = type(table._places.clock)
    now = clock.now
    with monkeypatch.context() as later:
        later.setattr(clock, "now", lambda self: now(self) + 10 * 86_400)
        assert table.gc(dry_run=False, min_age=0).objects["orphan"] > 0
    bulk._kept.clear()  # another process
    late = pickle.loads(pickle.dumps(load)).write(of_kind(3))
    with pytest.raises(hg.CommitConflictError, match="is over"):
        pickle.loads(pickle.dumps(load)).commit([early, late])
    again = table.bulk_load("first", 1, often=often)
    assert again.commit([again.write(of_kind(1, 2, 3))]).committed
    assert sorted(table.refresh().scan(["id"]).to_arrow()["id"].to_pylist()) == [1, 2, 3]


def test_g07_a_load_that_is_committed_again_hours_later_is_still_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The reply to its commit was lost, and it is a load without a name: collection must not forget it while it may come again.
    table = hg.create_table(tmp_path / "t", SCHEMA)
    load = table.bulk_load()
    files = [load.write(rows(1, 2))]
    assert load.commit(files).committed
    clock = type(table._places.clock)
    now = clock.now
    monkeypatch.setattr(clock, "now", lambda self: now(self) + 2 * 3600)
    for _ in range(2):
        table.gc(dry_run=False, min_age=0)
    assert not load.commit(files).committed
    assert sorted(table.scan(["id"]).to_arrow()["id"].to_pylist()) == [1, 2]
    load.abort()
    for _ in range(2):
        table.gc(dry_run=False, min_age=0)
    assert not table.shard("0000").log.manifests.load().transactions, "nobody can commit it any more"


@pytest.mark.parametrize("at", ["transaction.announced", "transaction.decided"])
def test_p11_two_queries_that_begin_as_one_application_at_once_are_not_taken_for_one_another(tmp_path: Path, at: str) -> None:
    # Both are at version 0, and the shard has no mark yet. Whoever is second was not brought in, and must not be told so.
    table = hg.create_table(tmp_path / "t", SCHEMA)
    first, second = (table.bulk_load("app", 0, query=query) for query in ("first", "second"))
    files = {"first": [first.write(rows(1))], "second": [second.write(rows(2))]}
    stalled = iter([True])
    refused: list[str] = []

    def hook(name: str) -> None:
        if name == at and next(stalled, False):
            try:
                second.commit(files["second"])
            except hg.TransactionConflictError:
                refused.append("second")

    with hooked(hook):
        try:
            first.commit(files["first"])
        except hg.TransactionConflictError:
            refused.append("first")
    brought = table.scan(["id"]).to_arrow()["id"].to_pylist()
    assert (brought, refused) in (([1], ["second"]), ([2], ["first"]))


def test_files_that_are_given_twice_are_refused(tmp_path: Path) -> None:
    table = hg.create_table(tmp_path / "t", SCHEMA)
    load = table.bulk_load("app", 1)
    files = load.write(rows(1, 2))
    with pytest.raises(hg.InvalidInputError, match="twice"):
        load.commit([files, files])
    assert load.commit([files]).committed
    assert sorted(table.scan(["id"]).to_arrow()["id"].to_pylist()) == [1, 2]


@pytest.mark.parametrize("full", [False, True])
def test_c05_loads_are_merged_where_a_dead_writer_has_left_rows_in_the_log_and_nobody_writes(tmp_path: Path, full: bool) -> None:
    # All of them stand past the cursor, at one place. Nothing can come between them; but the log is older, so tombstones stay.
    table = hg.create_table(tmp_path / "t", SCHEMA, key="id")
    writer = table.writer(hg.ShardWriterConfig(max_memtable_age=1e6))
    writer.put(rows(1, 2, v="log")).wait()
    writer.abort()
    manifests = table.shard("0000").log.manifests
    table.load(pa.table({"id": pa.array([1], pa.int64())}), "delete")
    for number in range(3, 8):
        table.load(rows(number, v="load"))
    table.load(rows(2, v="load"))
    table.compact(full=full)
    assert manifests.load().cursor.position == 0
    assert len(manifests.load().runs) == 1
    shown = [(2, "load"), *((number, "load") for number in range(3, 8))]

    def found() -> list[tuple[int, str]]:
        return sorted((row["id"], row["v"]) for row in table.scan().to_arrow().to_pylist())

    assert found() == shown
    assert sum(batch.num_rows for batch in table.changes(start="earliest")) == 9, "those who follow get every change"
    with table.writer() as writer:
        writer.put(rows(9, v="log")).wait()
    table.compact(full=True)
    assert found() == [*shown, (9, "log")]
    assert table.verify(deep=True).ok


def test_a_column_that_is_widened_between_two_tasks_of_a_load_makes_no_run_of_two_types(tmp_path: Path) -> None:
    narrow = pa.schema([pa.field("id", pa.int64(), False), pa.field("n", pa.int32())])
    table = hg.create_table(tmp_path / "t", narrow, key="id")
    load = table.bulk_load("app", 1)
    before = load.write(pa.table({"id": [1, 2], "n": [1, 2]}, schema=narrow))
    table.widen_column("n", pa.int64())
    after = [load.write(pa.table({"id": [id], "n": [1 << 40]}, schema=table.refresh().schema)) for id in (3, 4)]
    load.commit([before, *after])
    assert [len(run.slices) for run in table.shard("0000").log.manifests.load().runs] == [1, 2]
    assert table.lookup([2, 4]).to_pylist() == [{"id": 2, "n": 2}, {"id": 4, "n": 1 << 40}]


def test_a_drop_that_another_has_finished_takes_nothing_of_the_table_that_was_made_since(tmp_path: Path) -> None:
    uri = str(tmp_path / "t")
    hg.create_table(uri, SCHEMA).load(rows(1), app="app", version=1)
    stalled = iter([True])

    def hook(name: str) -> None:
        if name == "drop.log" and next(stalled, False):
            hg.drop_table(uri, uri)
            table = hg.create_table(uri, SCHEMA, key="id")
            table.load(pa.table({"id": [2, None], "v": ["a", "b"]}), app="app", version=1, on_bad_rows="quarantine")

    with hooked(hook):
        hg.drop_table(uri, uri)
    assert list((tmp_path / "t" / "txn").rglob("*.json")), "the decision of its load"
    assert any(path.is_file() for path in (tmp_path / "t" / "quarantine").rglob("*")), "its bad rows"
    assert hg.open_table(uri).scan(["id"]).to_arrow()["id"].to_pylist() == [2]


@pytest.mark.parametrize("step", ["transaction.announced", "transaction.decided"])
def test_f12_a_load_that_stalls_over_drop_and_create_is_told_so_and_decides_nothing_about_the_new_table(tmp_path: Path, step: str) -> None:
    uri = str(tmp_path / "t")
    old = hg.create_table(uri, SCHEMA)
    stalled = iter([True])

    def hook(name: str) -> None:
        if name == step and next(stalled, False):
            hg.drop_table(uri, uri)
            hg.create_table(uri, SCHEMA)

    with hooked(hook), pytest.raises(hg.NotFoundError):
        old.load(rows(1), app="app", version=1)
    table = hg.open_table(uri)
    assert table.load(rows(2), app="app", version=1).committed
    assert not table.load(rows(2), app="app", version=1).committed
    table.gc(dry_run=False, min_age=0)
    assert table.scan(["id"]).to_arrow()["id"].to_pylist() == [2]
    assert not list((tmp_path / "t" / "txn").rglob("*.json"))


def test_a_load_of_nothing_into_a_table_without_shards_is_there_once(tmp_path: Path) -> None:
    table = hg.create_table(tmp_path / "t", BY_VALUE, sharding=hg.identity("kind"))
    assert table.load(of_kind(), app="app", version=1).committed
    assert not table.load(of_kind(), app="app", version=1).committed
