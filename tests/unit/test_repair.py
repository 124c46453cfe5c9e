"""Repair: every kind of damage, what it says about it before, what it does, and what is there afterwards."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate.compact import compact_shard
from headgate.failpoint import hooked
from headgate.manifest import ChainPoint, ShardManifest

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("note", pa.string())])
WAL_ONLY = hg.ShardWriterConfig(enable_memtable=False)


class Broken:
    """A table on disk whose files a test may break."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.table = hg.create_table(path, SCHEMA, key="id")

    @property
    def shard(self) -> hg.Shard:
        return self.table.shard("0000")

    @property
    def manifest(self) -> ShardManifest:
        return self.fresh().shard("0000").log.manifests.load()

    def fresh(self) -> hg.Table:
        """As another process opens it."""
        return hg.open_table(self.path)

    def put(self, *ids: int, flush: bool = False, wal_only: bool = True) -> None:
        """Each in an entry of its own, by one writer, which then stops."""
        with self.shard.writer(WAL_ONLY if wal_only and not flush else None) as writer:
            for id in ids:
                writer.put(rows(id)).wait()
            if not flush:
                writer.abort()

    def entry(self, epoch: int, position: int) -> Path:
        return self.path / self.shard.log.space(self.manifest).key(epoch, position)

    @property
    def marker(self) -> Path:
        return self.path / self.shard.log.space(self.manifest).marker_key

    def slice(self, run: int = 0, part: int = 0) -> Path:
        return self.path / self.manifest.runs[run].slices[part].path

    def manifest_file(self, version: int | None = None) -> Path:
        log = self.shard.log
        return self.path / log.manifests.key(self.manifest.version if version is None else version)

    def ids(self) -> list[int]:
        return sorted(self.fresh().scan().to_arrow()["id"].to_pylist())

    def files(self) -> set[str]:
        return {str(path.relative_to(self.path)) for path in self.path.rglob("*") if path.is_file()}

    def repair(self, **changes: Any) -> hg.RepairReport:
        """First said, which changes nothing; then done, which does what was said; then all is well."""
        before = self.files()
        planned = self.fresh().repair()
        assert self.files() == before, "a dry run writes nothing"
        assert planned.dry_run
        assert planned.steps, "there is something to do"
        done = self.fresh().repair(dry_run=False)
        assert not done.dry_run
        assert [(s.kind, s.object, s.gives_up, s.rows) for s in done.steps] == [
            (s.kind, s.object, s.gives_up, s.rows) for s in planned.steps
        ]
        self.is_well()
        assert done.ok
        return done

    def is_well(self) -> None:
        report = self.fresh().verify(deep=True)
        assert report.ok, report.problems
        assert self.fresh().repair() == hg.RepairReport(dry_run=True, ok=True)
        with self.fresh().writer() as writer:
            writer.put(rows(999)).wait()
        assert 999 in self.ids()
        with self.fresh().writer() as writer:
            writer.delete(pa.table({"id": [999]})).wait()
        assert 999 not in self.ids()


def rows(*ids: int, note: str = "") -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"id": id, "note": note or f"n{id}"} for id in ids], schema=SCHEMA)


def flip(path: Path, at: int = 200) -> bytes:
    """Turn one bit over. Returns what is there then."""
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= 1
    path.write_bytes(data)
    return bytes(data)


@pytest.fixture
def broken(tmp_path: Path) -> Broken:
    return Broken(tmp_path / "t")


# -- nothing is wrong


def test_a_table_that_is_whole_is_not_touched(broken: Broken) -> None:
    broken.put(1, 2, flush=True)
    broken.put(3)
    before = broken.files()
    for dry_run in (True, False):
        report = broken.fresh().repair(dry_run=dry_run)
        assert report.ok
        assert report.steps == report.left == report.kept == ()
    assert broken.files() == before
    assert broken.manifest.epoch == 2


def test_a_live_writer_of_a_whole_table_is_not_fenced_by_a_repair(broken: Broken) -> None:
    with broken.table.writer() as writer:
        writer.put(rows(1)).wait()
        assert broken.fresh().repair(dry_run=False).steps == ()
        writer.put(rows(2)).wait()
    assert broken.ids() == [1, 2]


# -- the log


def test_a_hole_in_the_log_costs_its_rows_and_no_others(broken: Broken) -> None:
    broken.put(1, 2, 3, 4)
    broken.entry(1, 1).unlink()
    with pytest.raises(hg.WalHoleError):
        broken.fresh().writer()
    report = broken.repair()
    (step,) = report.steps
    assert (step.kind, step.first_position, step.end_position, step.rows) == ("entry", 1, 2, None)
    assert "position 1" in step.gives_up
    assert "in no run" in step.gives_up
    assert broken.ids() == [1, 3, 4]


def test_a_log_that_ends_too_early_costs_what_is_missing(broken: Broken) -> None:
    with broken.shard.writer(WAL_ONLY) as writer:
        for id in range(6):
            writer.put(rows(id)).wait()
    for position in (3, 4, 5):
        broken.entry(1, position).unlink()
    report = broken.repair()
    (step,) = report.steps
    assert (step.first_position, step.end_position) == (3, 6)
    assert broken.ids() == [0, 1, 2]
    assert broken.manifest.wal_position_last_seen >= 5, "positions are never used twice"


def test_a_damaged_entry_is_kept_aside(broken: Broken) -> None:
    broken.put(1, 2, 3)
    damaged = flip(broken.entry(1, 1), 1400)
    report = broken.repair()
    (step,) = report.steps
    assert "kept aside" in step.action
    assert "damaged" in step.problem
    (copy,) = report.kept
    assert Path(copy).read_bytes() == damaged
    assert broken.ids() == [1, 3]


def test_the_rows_of_a_damaged_entry_are_counted_if_they_can_be(broken: Broken) -> None:
    broken.put(1, 2, 3)
    path = broken.entry(1, 1)
    path.write_bytes(path.read_bytes()[:-4] + b"HGW9")
    (step,) = broken.repair().steps
    assert step.rows == 1
    assert "1 rows" in step.gives_up


def test_a_damaged_entry_at_the_tip_does_not_take_its_predecessors_along(broken: Broken) -> None:
    broken.put(1, 2)
    flip(broken.entry(1, 1))
    broken.repair()
    assert broken.ids() == [1]


def test_holes_that_nobody_needs_cost_nothing(broken: Broken) -> None:
    broken.put(1, 2, 3, flush=True)
    broken.entry(1, 0).unlink()
    flip(broken.entry(1, 1))
    assert not broken.fresh().verify(deep=True).ok
    report = broken.repair()
    (step,) = report.steps
    assert step.gives_up == ""
    assert (step.first_position, step.end_position) == (0, 2)
    assert broken.ids() == [1, 2, 3]
    assert broken.manifest.wal_floor >= 2


def test_what_a_checkpoint_holds_of_the_log_goes_with_the_checkpoint(broken: Broken) -> None:
    broken.put(1, 2, 3)
    broken.table.checkpoint("kept")
    broken.put(4, flush=True)
    assert broken.manifest.cursor.position > 3
    broken.entry(1, 1).unlink()
    report = broken.repair()
    assert [step.kind for step in report.steps] == ["entry", "checkpoint"]
    assert "checkpoint kept" in report.steps[0].gives_up
    assert "in runs" in report.steps[0].gives_up
    assert broken.ids() == [1, 2, 3, 4]
    assert broken.fresh().checkpoints() == []


def test_a_missing_marker_is_put_back(broken: Broken) -> None:
    broken.put(1, 2)
    broken.marker.unlink()
    with pytest.raises(hg.WalStoreMismatchError):
        broken.fresh().writer()
    report = broken.repair()
    assert [step.kind for step in report.steps] == ["marker"]
    assert report.gives_up == ()
    assert broken.ids() == [1, 2]


def test_a_damaged_marker_is_put_back(broken: Broken) -> None:
    broken.put(1, 2)
    flip(broken.marker, 30)
    report = broken.repair()
    assert report.gives_up == ()
    assert len(report.kept) == 1
    assert broken.ids() == [1, 2]


def test_a_log_that_is_gone_is_given_up_only_in_its_own_place(tmp_path: Path) -> None:
    table = hg.create_table(tmp_path / "t", SCHEMA, key="id", wal_uri=tmp_path / "wal")
    with table.shard("0000").writer(WAL_ONLY) as writer:
        writer.put(rows(1)).wait()
    elsewhere = hg.open_table(tmp_path / "t", wal_uri=tmp_path / "other")
    for dry_run in (True, False):
        with pytest.raises(hg.WalStoreMismatchError, match="holds nothing"):
            elsewhere.repair(dry_run=dry_run)
    assert not (tmp_path / "other" / "wal").exists()
    shutil.rmtree(tmp_path / "wal" / "wal")
    planned = hg.open_table(tmp_path / "t").repair()
    assert [step.kind for step in planned.steps] == ["marker", "entry"]
    assert planned.steps[1].end_position == 1
    assert hg.open_table(tmp_path / "t").repair(dry_run=False).ok
    assert hg.open_table(tmp_path / "t").scan().count() == 0
    with hg.open_table(tmp_path / "t").writer() as writer:
        assert writer.put(rows(2)).wait() is not None


def test_missing_seals_are_put_back_and_hold_the_stalled_writer(broken: Broken) -> None:
    stalled = broken.shard.writer(WAL_ONLY)
    stalled.put(rows(1)).wait()
    broken.put(2)
    broken.put(3)
    broken.entry(1, 1).unlink()
    problems = broken.fresh().verify().problems
    assert problems[0].kind == "SealMissing"
    assert "life-cycle rule" in problems[0].message
    report = broken.repair()
    assert [step.kind for step in report.steps] == ["seal"]
    assert report.gives_up == ()
    with pytest.raises(hg.FencedError):
        stalled.put(rows(7)).wait()
    stalled.abort()
    assert broken.ids() == [1, 2, 3]


def test_an_entry_that_a_fenced_writer_put_where_its_seal_had_been_is_kept_aside(broken: Broken) -> None:
    stalled = broken.shard.writer(WAL_ONLY)
    stalled.put(rows(1)).wait()
    broken.put(2)
    broken.put(3)
    broken.entry(1, 1).unlink()
    stalled.put(rows(7)).wait()  # acknowledged, into a place that nobody reads
    stalled.abort()
    report = broken.repair()
    (step,) = report.steps
    assert step.kind == "seal"
    assert "fenced writer" in step.gives_up
    assert step.rows == 1
    assert len(report.kept) == 1
    assert broken.ids() == [1, 2, 3]


def test_a_damaged_seal_is_put_back(broken: Broken) -> None:
    broken.put(1)
    broken.put(2)
    broken.put(3)
    flip(broken.entry(1, 1), 100)
    report = broken.repair()
    assert [step.kind for step in report.steps] == ["seal"]
    assert report.gives_up == ()
    assert broken.ids() == [1, 2, 3]


# -- runs


def test_a_generation_whose_entries_are_left_is_written_again(broken: Broken) -> None:
    broken.put(1, 2, 3, flush=True)
    broken.put(2, 4, flush=True)
    shutil.rmtree(broken.slice(0))
    with pytest.raises(hg.DataLossError):
        broken.ids()
    report = broken.repair()
    (step,) = report.steps
    assert (step.kind, step.gives_up) == ("slice", "")
    assert "written again" in step.action
    assert broken.ids() == [1, 2, 3, 4]


def test_a_damaged_file_of_a_generation_is_written_again_too(broken: Broken) -> None:
    broken.put(*range(20), flush=True)
    (file,) = (broken.slice() / "data").iterdir()
    file.write_bytes(file.read_bytes()[:100])
    assert not broken.fresh().verify(deep=True).ok
    report = broken.repair()
    assert report.gives_up == ()
    assert any(copy.endswith(file.name) for copy in report.kept)
    assert broken.ids() == list(range(20))


def test_a_run_whose_entries_are_collected_goes_on_without_its_files(broken: Broken) -> None:
    broken.put(1, 2, flush=True)
    with broken.table.writer() as writer:
        writer.put(rows(2, 3, note="newer")).wait()
        writer.delete(pa.table({"id": [1]})).wait()
    broken.table.gc(dry_run=False, min_age=0)
    path = broken.manifest.runs[1].slices[0].path
    shutil.rmtree(broken.path / path)
    report = broken.repair()
    (step,) = report.steps
    assert (step.kind, step.object, step.rows) == ("slice", path, 3)
    assert "3 rows" in step.gives_up
    assert "show again" in step.gives_up
    assert broken.ids() == [1, 2], "what it hid and deleted shows again, as was said"


def test_only_the_slice_that_is_gone_is_given_up(broken: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compact_shard.__kwdefaults__, "slice_rows", 10)
    with broken.table.writer() as writer:
        writer.put(rows(*range(20))).wait()
        writer.flush()
        writer.put(rows(*range(20, 40))).wait()
    broken.table.compact(full=True)
    assert len(broken.manifest.runs[0].slices) == 4
    shutil.rmtree(broken.slice(0, 1))
    (step,) = broken.repair().steps
    assert step.rows == 10
    assert step.keys == ("after 9", "before 20")
    assert broken.ids() == [*range(10), *range(20, 40)]


def test_a_checkpoint_whose_files_are_gone_is_dropped(broken: Broken) -> None:
    broken.put(1, 2, flush=True)
    broken.table.checkpoint("old")
    old = broken.slice()
    broken.put(3, flush=True)
    broken.table.compact(full=True)
    shutil.rmtree(old)
    assert broken.fresh().verify().problems[0].kind == "CheckpointBroken"
    report = broken.repair()
    (step,) = report.steps
    assert step.kind == "checkpoint"
    assert "old" in step.gives_up
    assert broken.fresh().checkpoints() == []
    assert broken.ids() == [1, 2, 3]


def test_a_load_whose_files_are_gone_is_given_up_in_reads_and_in_the_changes(broken: Broken) -> None:
    broken.put(1, 2, flush=True)
    broken.table.load(pa.Table.from_batches([rows(2, 3, note="loaded")]), app="a", version=1)
    broken.put(4, flush=True)
    loaded = next(run for run in broken.manifest.runs if run.first == run.end)
    shutil.rmtree(broken.path / loaded.slices[0].path)
    report = broken.repair()
    (step,) = report.steps
    assert (step.kind, step.rows) == ("slice", 2)
    assert "a load placed at position" in step.gives_up
    assert broken.ids() == [1, 2, 4]
    assert broken.manifest.transactions["a"].version == 1, "the transaction happened: it is not to be repeated by itself"


# -- manifests


def test_an_unreadable_manifest_is_followed_by_the_one_before_it(broken: Broken) -> None:
    broken.put(1, 2, flush=True)
    broken.put(3)
    broken.table.checkpoint("last")
    version = broken.manifest.version
    damaged = flip(broken.manifest_file(version), 100)
    with pytest.raises(hg.CorruptEntryError):
        broken.fresh().status()
    before = broken.files()
    planned = broken.fresh().repair()
    assert broken.files() == before
    assert [step.kind for step in planned.steps] == ["manifest"]
    assert f"version {version}" in planned.steps[0].problem
    assert "checkpoint" in planned.steps[0].gives_up
    done = broken.fresh().repair(dry_run=False)
    assert done.ok
    assert Path(done.kept[0]).read_bytes() == damaged
    broken.is_well()
    assert broken.ids() == [1, 2, 3]
    assert broken.fresh().checkpoints() == []


def test_a_claim_in_an_unreadable_manifest_is_fenced_all_the_same(broken: Broken) -> None:
    """The epoch goes on past every one that the lost versions may have claimed."""
    broken.put(1)
    stalled = broken.shard.writer(WAL_ONLY)
    epoch = broken.manifest.epoch
    for version in (broken.manifest.version, broken.manifest.version - 1):
        flip(broken.path / broken.shard.log.manifests.key(version), 100)
    assert broken.fresh().repair(dry_run=False).ok
    assert broken.manifest.epoch > epoch
    with pytest.raises(hg.FencedError):
        stalled.put(rows(5)).wait()
    stalled.abort()
    broken.is_well()
    assert broken.ids() == [1]


def test_without_any_readable_manifest_nothing_can_be_done(broken: Broken) -> None:
    broken.put(1)
    folder = broken.manifest_file(0).parent
    for path in folder.iterdir():
        flip(path, 100)
    with pytest.raises(hg.DataLossError, match="no version"):
        hg.open_table(broken.path).repair(dry_run=False)


# -- beside others


def test_a_live_writer_is_fenced_by_a_repair_and_loses_nothing_acknowledged(broken: Broken) -> None:
    writer = broken.shard.writer(WAL_ONLY)
    for id in (1, 2, 3):
        writer.put(rows(id)).wait()
    broken.entry(1, 1).unlink()

    def hook(name: str) -> None:
        if name == "repair.claimed":
            writer.put(rows(4)).wait()  # not sealed yet: still acknowledged

    with hooked(hook):
        assert broken.fresh().repair(dry_run=False).ok
    with pytest.raises(hg.FencedError):
        writer.put(rows(5)).wait()
    writer.abort()
    assert broken.ids() == [1, 3, 4]
    broken.is_well()


STEPS = ["repair.looked", "repair.claimed", "repair.kept", "repair.deleted", "repair.sealed", "repair.filled", "repair.rebuilt"]
STEPS += ["repair.runs", "repair.mended", "repair.opened"]


def break_all(broken: Broken) -> None:
    """A bit of everything: 3 is lost, the rest is not."""
    broken.put(1, 2, flush=True)
    broken.put(3, 4)
    broken.put(5)
    shutil.rmtree(broken.slice())
    flip(broken.entry(2, 3), 1400)
    broken.entry(1, 2).unlink()
    os.unlink(broken.marker)


@pytest.mark.parametrize("step", STEPS)
def test_a_repair_that_dies_anywhere_is_done_by_the_next_one(broken: Broken, step: str, crash: type[Exception]) -> None:
    break_all(broken)
    died = False

    def hook(name: str) -> None:
        nonlocal died
        if name == step and not died:
            died = True
            raise crash(name)

    with hooked(hook), pytest.raises(crash):
        broken.fresh().repair(dry_run=False)
    report = broken.fresh().repair(dry_run=False)
    if step != "repair.opened":
        assert report.steps or step in ("repair.mended", "repair.runs")
    broken.is_well()
    assert set(broken.ids()) >= {4, 5}


def test_of_two_repairs_the_last_to_claim_goes_on(broken: Broken, crew: Any) -> None:
    broken.put(1, 2, 3)
    flip(broken.entry(1, 1), 1400)
    crew.stops = {"repair.claimed"}
    first = crew.actor(lambda: broken.fresh().repair(dry_run=False))
    first.step_to("repair.claimed")
    second = broken.fresh().repair(dry_run=False)
    assert second.ok
    with pytest.raises(hg.FencedError):
        first.finish()
    broken.is_well()
    assert broken.ids() == [1, 3]


def test_a_run_that_was_compacted_meanwhile_is_left_alone(broken: Broken) -> None:
    """The damage was seen, and is not there any more when it is to be mended."""
    broken.put(1, 2, flush=True)
    broken.put(3, flush=True)
    path = broken.slice()
    aside = path.with_name("aside")
    path.rename(aside)

    def hook(name: str) -> None:
        if name == "repair.sealed":
            aside.rename(path)
            broken.fresh().compact(full=True)

    with hooked(hook):
        assert broken.fresh().repair(dry_run=False).ok
    assert broken.ids() == [1, 2, 3]
    broken.is_well()


def test_a_store_that_does_not_answer_is_no_damage(broken: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
    broken.put(1, 2, flush=True)
    from headgate.columnar.lance import LanceColumnar
    from headgate.store.local import LocalStore

    def unavailable(*_: Any, **__: Any) -> Any:
        raise hg.StoreUnavailableError("no answer")

    monkeypatch.setattr("headgate.clock.SystemClock.sleep", lambda clock, seconds: None)
    monkeypatch.setattr(LanceColumnar, "open", unavailable)
    monkeypatch.setattr(LocalStore, "get_range", unavailable)
    with pytest.raises(hg.StoreUnavailableError):
        broken.fresh().repair(dry_run=False)
    assert broken.manifest.epoch == 1


# -- verify


def test_verify_compares_generations_with_the_log(broken: Broken) -> None:
    broken.put(1, 2, 3, flush=True)
    assert broken.fresh().verify(deep=True).counts["generations_compared"] == 1
    log = broken.shard.log

    def forget(manifest: ShardManifest) -> ShardManifest:
        run = manifest.runs[0]
        return manifest.but(runs=(run.but(slices=(run.slices[0].but(rows=2),)),))

    log.manifests.commit(forget)
    kinds = {problem.kind for problem in broken.fresh().verify(deep=True).problems}
    assert "RowsMissing" in kinds


def test_verify_finds_rows_that_a_flush_forgot(broken: Broken) -> None:
    broken.put(1, 2, 3, flush=True)
    broken.put(4, flush=True)
    log = broken.shard.log
    manifest = log.manifests.load()
    whole, last = manifest.runs
    log.manifests.commit(lambda m: m.but(runs=(last.but(id=whole.id, first=whole.first),)))
    problems = broken.fresh().verify(deep=True).problems
    assert [problem.kind for problem in problems] == ["RowsNotConserved"]
    assert "has 1 rows" in problems[0].message


def test_verify_counts_what_nothing_names(broken: Broken) -> None:
    broken.put(1, flush=True)
    assert "orphan_objects" not in broken.fresh().verify().counts
    dead = broken.slice().parent.with_name(f"g{0:010d}-{'0' * 26}") / "00000.lance"
    dead.mkdir(parents=True)
    (dead / "left").write_bytes(b"12345")
    report = broken.fresh().verify()
    assert report.ok
    assert (report.counts["orphan_objects"], report.counts["orphan_bytes"]) == (1, 5)


def test_points_of_broken_entries_are_named_in_full(broken: Broken) -> None:
    broken.put(1, 2, 3)
    broken.entry(1, 1).unlink()
    (step,) = broken.fresh().repair().steps
    assert step.object == broken.shard.log.space(broken.manifest).key(*ChainPoint(1, 1))


def test_progress_is_told(broken: Broken) -> None:
    broken.put(1, 2, 3)
    broken.entry(1, 1).unlink()
    told: list[tuple[str, str]] = []
    tell: Callable[[str, str], None] = lambda shard, what: told.append((shard, what))  # noqa: E731
    broken.fresh().repair(dry_run=False, progress=tell)
    assert told[0] == ("0000", "looking")
    assert ("0000", "entry 1 of 1") in told
