"""G. Collection: safe at ``min_age=0``, at any moment, beside anything, however often it is interrupted."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate.clock import SystemClock
from headgate.columnar.arrow import ArrowColumnar
from headgate.compact import compact_shard
from headgate.failpoint import hooked
from headgate.life.gc import GcReport, collect_shard
from headgate.query.scan import Scan
from headgate.store.faulty import Fault

RUNS, MANIFESTS, LOG = "/runs/", "/manifest/", "/0000/"
STEPS = ["gc.listed", "gc.committed", "gc.runs", "gc.manifests", "collect.listed", "collect.committed"]


class Jumping(SystemClock):
    """A clock that a test may set forward."""

    ahead = 0.0

    def now(self) -> float:
        return super().now() + self.ahead


def compact(bench: Any, store: Any = None, *, full: bool = True, slice_rows: int = 1 << 20) -> None:
    log = bench.log(store)
    compact_shard(log, ArrowColumnar(log.wal_store), bench.rules, max_memory=1 << 28, full=full, slice_rows=slice_rows)


def collect(bench: Any, store: Any = None, *, min_age: float = 0.0, dry_run: bool = False, sweep: bool = False) -> GcReport:
    """As another process would."""
    log = bench.log(store)
    return collect_shard(log, log.wal_store, dry_run=dry_run, min_age=min_age, sweep=sweep)


def keys(bench: Any, part: str = "") -> set[str]:
    return {info.key for info in bench.inner.list("") if part in info.key}


def run_files(bench: Any) -> set[str]:
    return {key.rsplit("/", 1)[0] for key in keys(bench, RUNS)}


def named_files(bench: Any) -> set[str]:
    return {part.path for run in bench.manifest.runs for part in run.slices}


def put(writer: Any, rows: dict[int, str], *, flush: bool = True) -> dict[int, str]:
    writer.put([{"id": id, "value": value} for id, value in rows.items()]).wait(timeout=30)
    if flush:
        writer.flush()
    return rows


def state_at(bench: Any, at: str) -> dict[int, str]:
    rows = Scan(lambda: [bench.reader().view(at)], bench.rules).to_arrow().to_pylist()
    state = {row["id"]: row["value"] for row in rows}
    assert len(state) == len(rows)
    return state


def busy_past(bench: Any) -> dict[int, str]:
    """A shard with something of every kind to collect: entries, replaced runs, orphans, manifests."""
    writer = bench.memtable_writer(bench.faulty())
    model: dict[int, str] = {}
    for number in range(4):
        model |= put(writer, dict.fromkeys(range(number * 2, number * 2 + 6), f"{number}"))
    broken = bench.faulty()
    broken.add(Fault("create", "fail", key=f"{RUNS}c", skip=1))
    with pytest.raises(hg.HeadgateError):
        compact(bench, broken, slice_rows=3)
    compact(bench)
    model |= put(writer, {100: "tail"})
    writer.close()
    return model


@pytest.fixture
def few_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """All versions but the latest may be collected at once."""
    monkeypatch.setattr("headgate.life.gc._VERSIONS_KEPT", 0)


# -- G01


@pytest.mark.parametrize("seed", range(16))
def test_g01_everything_reachable_is_there_whenever_collection_runs(make_bench: Any, seed: int) -> None:
    """Random work, and collection at any failpoint of it: what the latest manifest and every live checkpoint name reads right."""
    pick = random.Random(seed)
    clock = Jumping()
    bench = make_bench(clock=clock)
    table = bench.table
    store = bench.faulty()
    writer = bench.memtable_writer(store, max_memtable_age=1e6)
    model: dict[int, str] = {}
    pinned: dict[str, tuple[float, dict[int, str]]] = {}
    inside = False

    def anywhere(name: str) -> None:
        nonlocal inside
        if inside or pick.random() > 0.1:
            return
        inside = True
        try:
            collect(bench, sweep=pick.random() < 0.2)
        finally:
            inside = False

    def live() -> dict[str, dict[int, str]]:
        return {id: rows for id, (expires, rows) in pinned.items() if clock.now() < expires}

    with hooked(anywhere):
        for number in range(50):
            what = pick.random()
            if what < 0.35:
                model |= put(writer, {pick.randrange(40): f"{number}-{n}" for n in range(pick.choice([1, 8]))}, flush=False)
            elif what < 0.45:
                gone = [pick.randrange(40) for _ in range(3)]
                writer.delete([{"id": id} for id in gone]).wait(timeout=30)
                model = {id: value for id, value in model.items() if id not in gone}
            elif what < 0.6:
                writer.flush()
            elif what < 0.75:
                compact(bench, full=pick.random() < 0.5, slice_rows=pick.choice([4, 1000]))
            elif what < 0.87:
                ttl = pick.choice([None, 600.0])
                checkpoint = writer.checkpoint(scope=pick.choice(["all", "durable"]), ttl=ttl)
                pinned[checkpoint.id] = (float("inf") if ttl is None else clock.now() + ttl, dict(model))
            elif what < 0.9 and pinned:
                id = pick.choice(list(pinned))
                was_live = id in live()
                try:
                    table.drop_checkpoint(id)
                except hg.NotFoundError:
                    assert not was_live
                del pinned[id]
            elif what < 0.94:
                clock.ahead += 300.0
            elif what < 0.97:
                writer.abort()
                writer = bench.memtable_writer(store, max_memtable_age=1e6)
            collect(bench)
            if pick.random() < 0.4:
                assert bench.state() == model
                for id, rows in live().items():
                    assert state_at(bench, id) == rows
    writer.flush()
    collect(bench)
    assert bench.state() == model == bench.state(writer.view())
    for id, rows in live().items():
        assert state_at(bench, id) == rows
    for id in list(bench.manifest.checkpoints):
        table.drop_checkpoint(id)
    clock.ahead += 2 * 3600.0
    for _ in range(3):
        collect(bench, sweep=True)
    assert bench.state() == model
    assert run_files(bench) == named_files(bench), "and nothing is left that nothing names"
    assert len(keys(bench, MANIFESTS)) <= 68, "the newest are kept"


# -- G02


@pytest.mark.parametrize("step", STEPS)
def test_g02_a_flush_and_a_compaction_that_commit_between_the_steps_lose_nothing(bench: Any, crew: Any, step: str) -> None:
    model = busy_past(bench)
    writer = bench.memtable_writer(bench.faulty(), max_memtable_age=1e6)
    ahead = Jumping()
    ahead.ahead = 1000.0  # what is new looks old to it
    log = bench.log(clock=ahead)
    crew.stops = {step}
    collector = crew.actor(lambda: collect_shard(log, log.wal_store, dry_run=False, min_age=0.0))
    collector.step_to(step)
    model |= put(writer, {1: "during", 300: "during"})
    compact(bench, slice_rows=4)
    model |= put(writer, {2: "during"})
    pinned = dict(model)
    bench.table.checkpoint("during")
    model |= put(writer, {2: "later", 301: "unflushed"}, flush=False)
    crew.stops = {"nowhere"}
    collector.finish()
    assert bench.state() == model == bench.state(writer.view())
    assert state_at(bench, "during") == pinned
    assert named_files(bench) <= run_files(bench)
    collect(bench)
    assert bench.state() == model
    assert state_at(bench, "during") == pinned


@pytest.mark.parametrize("point", ["flush.", "compact.registered", "compact.slice", "compact.written", "commit.loaded", "commit.created"])
def test_g02_collection_takes_nothing_in_flight(bench: Any, point: str) -> None:
    """Another process collects at every step of a flush and of a compaction."""
    writer = bench.memtable_writer(bench.faulty(), max_memtable_age=1e6)
    model: dict[int, str] = {}
    inside, met = False, 0

    def collecting(name: str) -> None:
        nonlocal inside, met
        if inside or not name.startswith(point):
            return
        met += 1
        if point == "commit.loaded" and met % 2 == 0:
            return  # it commits itself: at every try it would overtake for ever
        inside = True
        collect(bench)
        inside = False

    with hooked(collecting):
        for number in range(4):
            model |= put(writer, dict.fromkeys(range(number, number + 6), f"{number}"))
        compact(bench, slice_rows=4)
        model |= put(writer, {3: "x"})
        compact(bench, slice_rows=4)
    assert met
    assert bench.state() == model == bench.state(writer.view())
    assert len(bench.manifest.runs) == 1
    writer.close()
    with bench.memtable_writer(bench.faulty()) as successor:
        assert bench.state(successor.view()) == model


def test_g02_the_files_of_a_flush_whose_writer_was_fenced_are_taken_and_its_rows_are_there(bench: Any, crew: Any) -> None:
    store = bench.faulty()
    stalled = bench.memtable_writer(store, max_memtable_age=1e6)
    model = put(stalled, {1: "a", 2: "b"}, flush=False)
    store.add(Fault("create", "hang", key=MANIFESTS))  # its files are written, its commit hangs
    flushing = crew.actor(stalled.flush)
    flushing._go.release()
    while not keys(bench, RUNS):
        pass
    collect(bench)
    assert keys(bench, RUNS), "its turn is not over"
    with bench.memtable_writer(bench.faulty()) as successor:
        model |= put(successor, {2: "c"})
    collect(bench)
    assert run_files(bench) == named_files(bench)
    store.clear()
    assert flushing._back.acquire(timeout=30)
    assert isinstance(flushing.error, hg.HeadgateError)
    collect(bench)
    assert bench.state() == model
    assert run_files(bench) == named_files(bench)


# -- G03


def test_g03_a_scan_that_holds_a_view_of_collected_runs_begins_again(bench: Any) -> None:
    model = busy_past(bench)
    with bench.memtable_writer(bench.faulty()) as writer:
        model |= put(writer, {5: "x"})
    reader, taken = bench.reader(), []

    def load() -> list[Any]:
        taken.append(reader.view())
        if len(taken) == 1:
            compact(bench)
            collect(bench)
        return [taken[-1]]

    rows = Scan(load, bench.rules).to_arrow().to_pylist()
    assert {row["id"]: row["value"] for row in rows} == model
    assert len(taken) == 2


def test_g03_a_scan_under_which_runs_vanish_time_and_again_ends_with_a_clear_error(bench: Any) -> None:
    busy_past(bench)
    writer = bench.memtable_writer(bench.faulty())
    reader, views = bench.reader(), 0

    def load() -> list[Any]:
        nonlocal views
        views += 1
        view = reader.view()
        put(writer, {views: "x"})
        compact(bench)
        collect(bench)
        return [view]

    with pytest.raises(hg.SnapshotExpiredError):
        Scan(load, bench.rules).to_arrow()
    assert views < 20


def test_g03_a_run_that_is_lost_and_was_not_collected_is_told_as_loss(bench: Any) -> None:
    busy_past(bench)
    bench.inner.delete([key for key in keys(bench, RUNS) if key.rsplit("/", 1)[0] in named_files(bench)])
    with pytest.raises(hg.DataLossError):
        bench.state()


def test_g03_two_collectors_beside_each_other(bench: Any, crew: Any) -> None:
    model = busy_past(bench)
    actors = [crew.actor(lambda: collect(bench)) for _ in range(2)]
    pick = random.Random(3)
    while any(not actor.ended for actor in actors):
        pick.choice([actor for actor in actors if not actor.ended]).step()
    assert [actor.error for actor in actors] == [None, None]
    assert bench.state() == model
    assert run_files(bench) == named_files(bench)


@pytest.mark.parametrize("step", ["gc.listed", "gc.committed"])
def test_g03_a_collector_whose_checkpoint_is_dropped_and_collected_by_another_one_goes_on(bench: Any, crew: Any, step: str) -> None:
    model = busy_past(bench)
    bench.table.checkpoint("x")
    with bench.memtable_writer(bench.faulty()) as writer:
        model |= put(writer, {1: "later"})
    compact(bench)
    crew.stops = {step}
    slow = crew.actor(lambda: collect(bench))
    slow.step()
    bench.table.drop_checkpoint("x")
    collect(bench)
    slow.finish()
    assert bench.state() == model
    collect(bench)
    assert run_files(bench) == named_files(bench)


# -- G04


@pytest.mark.parametrize("place", [RUNS, MANIFESTS, LOG])
@pytest.mark.usefixtures("few_versions")
def test_g04_a_delete_that_fails_in_part_is_told_and_the_rest_goes_the_next_time(bench: Any, place: str) -> None:
    model = busy_past(bench)
    planned = collect(bench, dry_run=True).objects
    assert all(planned[kind] >= 2 for kind in ("entry", "run", "orphan", "manifest") if kind != "orphan"), planned
    store = bench.faulty()
    store.add(Fault("delete", "apply-then-fail", key=place))
    with pytest.raises(hg.HeadgateError):
        collect(bench, store)
    assert bench.state() == model
    collect(bench)
    collect(bench)
    assert bench.state() == model
    assert run_files(bench) == named_files(bench)
    assert set(collect(bench, dry_run=True).objects) <= {"manifest"}, "its own commits"


# -- G05


@pytest.mark.parametrize("skip", [0, 1])
@pytest.mark.parametrize("step", [*STEPS, "collect.deleted", "commit.loaded", "commit.created"])
def test_g05_interrupted_anywhere_and_run_again_it_ends_the_same(make_bench: Any, crash: Any, step: str, skip: int) -> None:
    clock = Jumping()
    bench = make_bench(clock=clock)
    bench.table.checkpoint("over", ttl=1.0)
    model = busy_past(bench)
    clock.ahead = 2 * 3600.0
    store, met = bench.faulty(), 0

    def die(name: str) -> None:
        nonlocal met
        met += name == step
        if name == step and met == skip + 1:
            store.add(Fault("any", "fail"))
            raise crash

    with hooked(die):
        try:
            collect(bench, store)
        except crash:
            pass
        else:
            assert met <= skip
    assert bench.state() == model
    for _ in range(3):
        collect(bench)
        assert bench.state() == model
    assert run_files(bench) == named_files(bench)
    assert bench.manifest.checkpoints == {}
    assert collect(bench, dry_run=True).objects == {}
    assert len(keys(bench, MANIFESTS)) <= 66, "the newest are kept"
    with bench.memtable_writer(bench.faulty()) as writer:
        assert bench.state(writer.view()) == model


# -- G06


def _agree(planned: GcReport, done: GcReport) -> None:
    assert (planned.objects, planned.bytes) == (done.objects, done.bytes)
    assert sorted(planned.leases_ended) == sorted(done.leases_ended)
    assert planned.held == done.held


def test_g06_dry_run_and_real_run_agree_on_a_quiet_table(bench: Any) -> None:
    busy_past(bench)
    before = bench.contents()
    planned = collect(bench, dry_run=True)
    assert bench.contents() == before, "a dry run changes nothing"
    done = collect(bench)
    _agree(planned, done)
    gone = before.keys() - bench.contents().keys()
    assert len(gone) == sum(done.objects.values())
    assert sum(len(before[key]) for key in gone) == sum(done.bytes.values())


def test_g06_they_agree_about_what_a_lease_held_that_is_over(make_bench: Any) -> None:
    clock = Jumping()
    bench = make_bench(clock=clock)
    writer = bench.memtable_writer()
    put(writer, {1: "a", 2: "b"}, flush=False)
    bench.table.checkpoint("short", ttl=1.0)
    put(writer, {1: "b"})
    writer.close()
    compact(bench)
    clock.ahead = 3600.0
    _agree(collect(bench, dry_run=True), collect(bench))


def test_g06_what_is_held_is_told_with_its_holder(bench: Any) -> None:
    busy_past(bench)
    bench.table.checkpoint("x")
    with bench.memtable_writer(bench.faulty()) as writer:
        put(writer, {1: "later"})
    compact(bench)
    planned, done = collect(bench, dry_run=True), collect(bench)
    assert planned.held == done.held
    assert planned.held["a checkpoint"] >= 1
    old = collect(bench, dry_run=True, min_age=3600.0)
    assert old.objects.get("run", 0) == 0


# -- G07


def test_g07_a_lease_that_is_over_is_honoured_for_a_grace_and_then_ended(make_bench: Any) -> None:
    clock = Jumping()
    bench = make_bench(clock=clock)
    with bench.memtable_writer() as writer:
        then = put(writer, {1: "a", 2: "b"}, flush=False)
        checkpoint = bench.table.checkpoint(ttl=600.0)
        now = then | put(writer, {1: "c"})
    compact(bench)
    clock.ahead = 630.0
    assert collect(bench).leases_ended == ()
    assert state_at(bench, checkpoint.id) == then
    bench.table.refresh_checkpoint(checkpoint.id, ttl=4000.0)  # by the table's own clock, which has not jumped
    clock.ahead = 3000.0
    collect(bench)
    assert state_at(bench, checkpoint.id) == then
    clock.ahead = 4100.0
    assert collect(bench).leases_ended == (f"checkpoint {checkpoint.id}",)
    with pytest.raises(hg.NotFoundError):
        bench.table.refresh_checkpoint(checkpoint.id, ttl=4000.0)
    with pytest.raises(hg.NotFoundError):
        state_at(bench, checkpoint.id)
    assert bench.state() == now
    assert run_files(bench) == named_files(bench)


@pytest.mark.parametrize("step", ["gc.listed", "commit.loaded", "gc.committed"])
def test_g07_a_refresh_beside_the_end_of_a_lease_is_refused_or_holds(make_bench: Any, crew: Any, step: str) -> None:
    clock = Jumping()
    bench = make_bench(clock=clock)
    with bench.memtable_writer() as writer:
        then = put(writer, {1: "a", 2: "b"})
        checkpoint = bench.table.checkpoint(ttl=600.0)
        now = then | put(writer, {1: "c"})
    compact(bench)
    clock.ahead = 700.0
    crew.stops = {step}
    collector = crew.actor(lambda: collect(bench))
    collector.step_to(step)
    try:
        bench.table.refresh_checkpoint(checkpoint.id, ttl=1e6)
    except hg.NotFoundError:
        refreshed = False
    else:
        refreshed = True
    crew.stops = {"nowhere"}
    collector.finish()
    collect(bench)
    assert refreshed == (step != "gc.committed")
    if refreshed:
        assert state_at(bench, checkpoint.id) == then
    else:
        with pytest.raises(hg.NotFoundError):
            state_at(bench, checkpoint.id)
    assert bench.state() == now


@pytest.mark.parametrize("step", STEPS)
def test_g07_a_checkpoint_taken_beside_collection_reads_right(bench: Any, crew: Any, step: str) -> None:
    model = busy_past(bench)
    writer = bench.memtable_writer(bench.faulty(), max_memtable_age=1e6)
    model |= put(writer, {7: "unflushed"}, flush=False)
    crew.stops = {step}
    collector = crew.actor(lambda: collect(bench))
    collector.step_to(step)
    durable = bench.table.checkpoint("durable")
    then = dict(model)
    model |= put(writer, {7: "later", 8: "later"})
    whole = writer.checkpoint("whole")
    compact(bench)
    crew.stops = {"nowhere"}
    collector.finish()
    collect(bench)
    assert state_at(bench, durable.id) == then
    assert state_at(bench, whole.id) == model == bench.state()


def test_g07_a_flush_with_an_unknown_outcome_beside_collection_loses_nothing(bench: Any) -> None:
    store = bench.faulty()
    writer = bench.memtable_writer(store, max_memtable_age=1e6)
    model = put(writer, {1: "a"}, flush=False)
    store.add(Fault("create", "apply-then-fail", key=MANIFESTS, times=3))
    writer.flush()
    collect(bench)
    assert bench.state() == model == bench.state(writer.view())
    model |= put(writer, {2: "b"})
    collect(bench)
    assert bench.state() == model


# -- a listing of a folder is no snapshot: names that come while it is read may be missed, names that go are gone


class Listings:
    """Something happens right after the names of a folder were read, before anybody looks at them. Once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._act: Callable[[], None] | None = None
        self._part = ""
        scandir = os.scandir

        @contextmanager
        def listing(path: str) -> Iterator[Iterator[os.DirEntry[str]]]:
            with scandir(path) as entries:
                rows = list(entries)
            if self._act is not None and self._part in f"{path}/":
                act, self._act = self._act, None
                act()
            yield iter(rows)

        monkeypatch.setattr("headgate.store.local.os.scandir", listing)

    def during(self, part: str, act: Callable[[], None]) -> None:
        self._part, self._act = part, act


def _commit_and_collect(bench: Any) -> None:
    log = bench.log()
    log.manifests.commit(lambda m: m.but(wal_collected=m.wal_collected))
    collect(bench)


def test_g03_the_latest_manifest_is_found_although_it_is_replaced_and_collected_while_the_folder_is_listed(
    disk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with disk.memtable_writer(disk.faulty()) as writer:
        model = put(writer, {1: "a"})
    collect(disk)
    listings = Listings(monkeypatch)
    log = disk.log()
    listings.during(MANIFESTS, lambda: _commit_and_collect(disk))
    assert log.manifests.load().version == disk.manifest.version
    assert disk.state() == model


def test_g03_no_pinned_version_is_taken_for_the_latest_while_the_folder_is_listed(disk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    log = disk.log()
    writer = disk.memtable_writer(disk.faulty())
    put(writer, {1: "a"})
    disk.table.checkpoint("x")
    assert log.manifests.load().checkpoints
    put(writer, {2: "b"})
    collect(disk)
    listings = Listings(monkeypatch)
    listings.during(MANIFESTS, lambda: _commit_and_collect(disk))
    assert log.manifests.load().version == disk.manifest.version


def test_g01_a_collector_that_lists_at_a_bad_moment_deletes_no_run_that_the_latest_manifest_names(
    disk: Any, crew: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows the version that a checkpoint pins; while it lists, a compaction commits and the version before that is collected."""
    slow = disk.log()
    writer = disk.memtable_writer(disk.faulty())
    model = put(writer, {1: "a"})
    writer.flush()
    disk.table.checkpoint("x")
    slow.manifests.load()
    model |= put(writer, {2: "b"})
    writer.close()
    crew.stops = {"compact.written"}
    compactor = crew.actor(lambda: compact(disk))
    compactor.step_to("compact.written")
    collect(disk)
    listings = Listings(monkeypatch)

    def overtaken() -> None:
        compactor.finish()
        collect(disk)

    armed: list[str] = []

    def arm(name: str) -> None:
        crew.hook(name)
        if name == "gc.listed" and not armed:
            armed.append(name)
            listings.during(MANIFESTS, overtaken)

    with hooked(arm):
        collect_shard(slow, slow.wal_store, dry_run=False, min_age=0.0)
    assert named_files(disk) <= run_files(disk)
    assert disk.state() == model


# -- on a disk, with Lance


def test_collection_on_a_disk_leaves_nothing_behind_and_nothing_out(tmp_path: Any) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), False), pa.field("value", pa.string())])
    table = hg.create_table(tmp_path / "t", schema, key="id", sharding=hg.bucket("id", 2))
    with table.writer() as writer:
        for number in range(3):
            writer.put([{"id": id, "value": f"{number}"} for id in range(number, number + 20)])
            writer.flush()
        then = table.checkpoint("then")
        table.compact(full=True)
        writer.put([{"id": 1, "value": "last"}])
        writer.flush()
        table.gc(dry_run=False, min_age=0)
        assert sorted(row["value"] for row in table.scan(at=then).to_arrow().to_pylist()) == ["0"] + ["1"] + ["2"] * 20
        table.drop_checkpoint("then")
        table.compact(full=True)
    for _ in range(3):
        table.gc(dry_run=False, min_age=0)
    slices = {path.parent if path.name == "data" else path for path in (tmp_path / "t").rglob("*.lance") if path.is_dir()}
    assert len(slices) == 2
    assert not list((tmp_path / "t").rglob("*.arrow*")) or table.verify(deep=True).ok
    empty = [path for path in (tmp_path / "t" / "shards").rglob("*") if path.is_dir() and not any(path.iterdir())]
    assert empty == []
    assert table.scan().count() == 22
