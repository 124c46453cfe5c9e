"""Compaction by many workers: each range by itself, one commit for all of them."""

from __future__ import annotations

import pickle
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import headgate as hg
from headgate.compact_ranges import ShardCompaction, plan_compaction
from headgate.errors import StoreSyncError
from headgate.failpoint import hooked
from headgate.manifest.model import SliceRecord

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("v", pa.int64())])
CONFIG = hg.ShardWriterConfig(fsync=False)
FOR_NOW = {"max_memory": 1 << 28}


def rows(ids: np.ndarray, v: int) -> pa.Table:
    return pa.table({"id": ids, "v": np.full(len(ids), v)}, schema=SCHEMA)


def filled(place: Path, key: str | None = "id") -> hg.Table:
    """A large run and three smaller ones over some of its keys, with tombstones."""
    table = hg.create_table(place / "t", SCHEMA, key=key)
    random = np.random.default_rng(5)
    with table.writer(CONFIG) as writer:
        writer.put(rows(np.arange(4_000), 0)).wait()
        writer.flush()
        for version in range(1, 4):
            writer.put(rows(np.unique(random.integers(0, 5_000, 300)), version)).wait()
            if key:
                writer.delete(pa.table({"id": np.unique(random.integers(0, 5_000, 50))})).wait()
            writer.flush()
    return table


def planned(table: hg.Table, *, range_rows: int, slice_rows: int = 1 << 20, full: bool = True) -> ShardCompaction:
    shard = table.shards[0]
    found = plan_compaction(shard, lambda: shard.rules, full=full, range_rows=range_rows, slice_rows=slice_rows, **FOR_NOW)
    assert found is not None
    return found


def carried_out(work: ShardCompaction) -> hg.CompactionReport:
    written = [pickle.loads(pickle.dumps(work)).write(number) for number in range(len(work.ranges))]
    return work.commit(pickle.loads(pickle.dumps(written))[::-1])


@pytest.mark.parametrize("key", ["id", None])
@pytest.mark.parametrize("range_rows", [10_000, 1_500, 100])
def test_ranges_come_to_the_same_rows_as_one_compaction(tmp_path: Path, key: str | None, range_rows: int) -> None:
    table = filled(tmp_path, key)
    before = table.scan().to_arrow().sort_by([("id", "ascending"), ("v", "ascending")])
    work = planned(table, range_rows=range_rows)
    assert len(work.ranges) >= work.rows // range_rows
    report = carried_out(work)
    assert (report.runs_before, report.runs_after) == (4, 1)
    assert report.rows_read == work.rows
    assert table.scan().to_arrow().sort_by([("id", "ascending"), ("v", "ascending")]) == before
    (run,) = table.runs()
    assert sum(part.rows for part in run.slices) == before.num_rows, "no tombstone is left"
    assert table.verify(deep=True).ok
    assert not table.shards[0].log.manifests.load().attempts


def test_a_merge_above_the_oldest_run_keeps_tombstones(tmp_path: Path) -> None:
    table = filled(tmp_path)
    before = table.scan().to_arrow().sort_by("id")
    work = planned(table, range_rows=200, full=False)
    assert not work.with_oldest
    assert carried_out(work).runs_after == 2
    assert table.scan().to_arrow().sort_by("id") == before
    assert table.verify(deep=True).ok


def test_slices_that_nothing_newer_touches_are_named_again_whatever_range_they_are_in(tmp_path: Path) -> None:
    table = hg.create_table(tmp_path / "t", SCHEMA, key="id")
    with table.writer(CONFIG) as writer:
        writer.put(rows(np.arange(0, 4_000), 0)).wait()
        writer.flush()
        writer.put(rows(np.arange(4_000, 8_000), 0)).wait()
        writer.flush()
        carried_out(planned(table, range_rows=500, slice_rows=500))
        old = {part.uri for run in table.runs() for part in run.slices}
        assert len(old) >= 16
        writer.put(rows(np.arange(1_000, 1_100), 1)).wait()
        writer.put(rows(np.arange(9_000, 9_100), 1)).wait()
        writer.flush()
    report = carried_out(planned(table, range_rows=1_200, slice_rows=500))
    now = {part.uri for run in table.runs() for part in run.slices}
    assert report.slices_kept == len(old & now) >= len(old) - 2
    assert report.rows_written < 2_000
    assert table.scan(filter="v = 1").count() == 200
    assert table.scan().count() == 8_100
    assert table.verify(deep=True).ok


def test_of_two_compactions_one_wins_and_a_range_that_was_not_written_is_refused(tmp_path: Path) -> None:
    table = filled(tmp_path)
    first, second = planned(table, range_rows=2_000), planned(table, range_rows=1_000)
    with pytest.raises(hg.InvalidInputError, match="range 1 of"):
        first.commit([first.write(0)])
    before = table.scan().to_arrow().sort_by("id")
    carried_out(second)
    with pytest.raises(hg.CommitConflictError):
        carried_out(first)
    assert table.scan().to_arrow().sort_by("id") == before
    assert not table.shards[0].log.manifests.load().attempts


def test_what_a_job_that_died_has_written_is_held_while_it_may_be_committed_and_collected_after(tmp_path: Path) -> None:
    table = filled(tmp_path)
    work = planned(table, range_rows=2_000)
    written = [work.write(number) for number in range(len(work.ranges))]
    work.write(0)  # a task that was run twice
    table.gc(dry_run=False, min_age=0)
    work.commit(written)
    assert table.gc(dry_run=False, min_age=0).objects["orphan"] > 0, "what the second try wrote"
    assert table.verify(deep=True).ok
    again = filled(tmp_path / "again")
    dead = planned(again, range_rows=2_000)
    dead.write(0)
    dead.abort()
    assert again.gc(dry_run=False, min_age=0).objects["orphan"] > 0
    with pytest.raises(hg.CommitConflictError, match="lease"):
        carried_out(dead)


class Killed(BaseException):
    """A process that ends: nothing is tidied up after it."""


@pytest.mark.parametrize("point", ["compact_ranges.registered", "compact.slice", "compact_ranges.written", "compact_ranges.committed"])
@pytest.mark.parametrize("collects", [False, True])
def test_a_compaction_that_is_killed_anywhere_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, collects: bool
) -> None:
    table = filled(tmp_path)
    before = table.scan().to_arrow().sort_by("id")
    monkeypatch.setattr("headgate.compact_ranges.withdraw", lambda log, attempt: None)

    def kill(name: str) -> None:
        if name == point:
            raise Killed(name)

    with hooked(kill), pytest.raises(Killed):
        carried_out(planned(table, range_rows=1_500))
    if collects:
        table.gc(dry_run=False, min_age=0)
    if point != "compact_ranges.committed":
        assert carried_out(planned(table, range_rows=1_500)).runs_after == 1
    assert table.scan().to_arrow().sort_by("id") == before
    assert len(table.runs()) == 1
    assert table.verify(deep=True).ok


def test_a_file_that_is_lost_is_told_and_one_that_was_collected_is_a_conflict(tmp_path: Path) -> None:
    table = filled(tmp_path)
    late = planned(table, range_rows=10_000)
    carried_out(planned(table, range_rows=2_000))
    table.gc(dry_run=False, min_age=0)
    with pytest.raises(hg.CommitConflictError, match="another compaction"):
        carried_out(late)
    again = filled(tmp_path / "again")
    broken = planned(again, range_rows=10_000)
    lost = Path(again.runs()[0].slices[0].uri.removeprefix("file://"))
    lost.rename(lost.with_suffix(".hidden"))
    with pytest.raises(hg.DataLossError, match="is missing"):
        carried_out(broken)


class Disk:
    """Syncs that take a while, and may fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails_at: int = -1) -> None:
        self.synced: list[str] = []
        self._begun, self._fails_at = 0, fails_at
        monkeypatch.setattr("headgate.columnar.lance.sync_tree", self._sync)

    def _sync(self, folder: str, *, above: str) -> None:
        number, self._begun = self._begun, self._begun + 1
        time.sleep(0.05)
        if number == self._fails_at:
            raise StoreSyncError(f"{folder} could not be synced", object=folder)
        self.synced.append(folder)


def test_c09_every_slice_of_a_range_is_durable_when_it_is_said_to_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Syncing goes on beside the merging of the next slice, and no further than that."""
    work = planned(filled(tmp_path), range_rows=10_000, slice_rows=500)
    disk = Disk(monkeypatch)
    written = work.write(0)
    assert len(written.slices) > 5
    assert sorted(disk.synced) == sorted(f"{tmp_path}/t/{SliceRecord.model_validate_json(part).path}" for part in written.slices)


@pytest.mark.parametrize("fails_at", [0, 3])
def test_c09_a_slice_of_a_range_that_cannot_be_synced_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    work = planned(filled(tmp_path), range_rows=10_000, slice_rows=500)
    Disk(monkeypatch, fails_at)
    with pytest.raises(StoreSyncError):
        work.write(0)
    assert not [thread.name for thread in threading.enumerate() if thread.name == "headgate-sync"]
