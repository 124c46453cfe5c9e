"""C. Compaction: fewer runs, the same rows, whoever else is at work and wherever it dies."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import headgate as hg
from headgate.clock import SystemClock
from headgate.columnar import Columnar, Slice
from headgate.columnar.arrow import ArrowColumnar
from headgate.compact import CompactionReport, compact_shard
from headgate.errors import StoreSyncError
from headgate.failpoint import hooked
from headgate.life.gc import GcReport, collect_shard
from headgate.manifest.model import ChainPoint, RunRecord, SliceRecord
from headgate.store.faulty import Fault, FaultyStore

RUNS = "/runs/"
POINTS = ["compact.registered", "compact.slice", "compact.written", "compact.committed"]
LARGE = 1 << 28


class Jumping(SystemClock):
    """A clock that a test may set forward."""

    ahead = 0.0

    def now(self) -> float:
        return super().now() + self.ahead


def compact(bench: Any, store: Any = None, *, rules: Any = None, full: bool = True, slice_rows: int = 1 << 20) -> CompactionReport:
    """As another process would."""
    log = bench.log(store)
    return compact_shard(log, ArrowColumnar(log.wal_store), rules or bench.rules, max_memory=LARGE, full=full, slice_rows=slice_rows)


def collect(bench: Any, *, min_age: float = 0.0) -> GcReport:
    log = bench.log()
    return collect_shard(log, log.wal_store, dry_run=False, min_age=min_age)


def run_files(bench: Any) -> set[str]:
    """The slices that have files."""
    return {info.key.rsplit("/", 1)[0] for info in bench.inner.list("") if RUNS in info.key}


def named_files(bench: Any) -> set[str]:
    return {part.path for run in bench.manifest.runs for part in run.slices}


def flushed(bench: Any, *puts: dict[int, str | None], writer: Any = None) -> dict[int, str]:
    """Each of these is a run; None deletes. What they come to."""
    writing = writer or bench.memtable_writer(bench.faulty())
    model: dict[int, str] = {}
    for put in puts:
        rows = {id: value for id, value in put.items() if value is not None}
        gone = [id for id, value in put.items() if value is None]
        if rows:
            writing.put([{"id": id, "value": value} for id, value in rows.items()])
        if gone:
            writing.delete([{"id": id} for id in gone])
        writing.flush()
        model.update(rows)
        for id in gone:
            model.pop(id, None)
    if writer is None:
        writing.close()
    return model


def until(holds: Callable[[], bool], patience: float = 30.0) -> None:
    deadline = time.monotonic() + patience
    while not holds():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.002)


def overlapping(runs: int = 4, rows: int = 12) -> list[dict[int, str | None]]:
    """Runs that share keys, with tombstones."""
    puts: list[dict[int, str | None]] = []
    for number in range(runs):
        put: dict[int, str | None] = dict.fromkeys(range(number * 3, number * 3 + rows), f"r{number}")
        put[number * 3 + 1] = None
        puts.append(put)
    return puts


# -- C01


@pytest.mark.parametrize("point", [*POINTS, "commit.loaded", "commit.created"])
@pytest.mark.parametrize("collecting", [False, True])
def test_c01_of_two_compactors_on_the_same_runs_one_wins_and_the_other_changes_nothing(
    bench: Any, crew: Any, point: str, collecting: bool
) -> None:
    model = flushed(bench, *overlapping())
    crew.stops = {point}
    slow = crew.actor(lambda: compact(bench, bench.faulty(), slice_rows=5))
    assert slow.step() == point
    compact(bench, slice_rows=5)
    assert bench.state() == model
    if collecting:
        collect(bench)
        assert bench.state() == model
    crew.stops = {"nowhere"}
    slow.finish()
    assert bench.state() == model
    assert len(bench.manifest.runs) == 1
    assert bench.manifest.attempts == {}
    assert named_files(bench) <= run_files(bench)
    collect(bench)
    assert run_files(bench) == named_files(bench)
    assert bench.state() == model


@pytest.mark.parametrize("seed", range(8))
def test_c01_two_compactors_a_collector_and_a_writer_in_any_order(bench: Any, crew: Any, seed: int) -> None:
    pick = random.Random(seed)
    writer = bench.memtable_writer(bench.faulty(), max_memtable_age=1e6)
    model = flushed(bench, *overlapping(5), writer=writer)
    actors = [
        crew.actor(lambda: compact(bench, bench.faulty(), slice_rows=pick.choice([3, 100]))),
        crew.actor(lambda: compact(bench, bench.faulty(), full=False, slice_rows=4)),
        crew.actor(lambda: collect(bench)),
        crew.actor(lambda: collect(bench)),
    ]
    while any(not actor.ended for actor in actors):
        pick.choice([actor for actor in actors if not actor.ended]).step()
        if pick.random() < 0.1:
            id, value = pick.randrange(20), f"w{pick.random()}"
            flushed(bench, {id: value}, writer=writer)
            model[id] = value
        if pick.random() < 0.2:
            assert bench.state() == model
    assert [actor.error for actor in actors] == [None] * 4
    assert bench.state() == model
    assert bench.manifest.attempts == {}
    collect(bench)
    assert run_files(bench) == named_files(bench)
    assert bench.state() == model == bench.state(writer.view())


# -- C02


@pytest.mark.parametrize("key", ["id", None])
def test_c02_flush_compaction_and_collection_keep_the_count(key: str | None, tmp_path: Path) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), False), pa.field("value", pa.string())])
    table = hg.create_table(tmp_path / "t", schema, key=key, sharding=hg.bucket("id", 2) if key else None)
    count = 0
    with table.writer() as writer:
        for number in range(6):
            ids = range(number * 5, number * 5 + 10)
            writer.put([{"id": id, "value": str(number)} for id in ids]).wait()
            count = len(ids) + number * 5 if key else count + len(ids)
            assert table.scan().count() == count
            writer.flush()
            assert table.scan().count() == count
        for full in (False, True):
            report = table.compact(full=full)
            assert report.runs_after == len({(run.shard, run.id) for run in table.runs()})
            assert table.scan().count() == count
            table.gc(dry_run=False, min_age=0)
            assert table.scan().count() == count == table.sql("select count(*) as n from t").to_pylist()[0]["n"]
    assert hg.open_table(tmp_path / "t").scan().to_arrow().num_rows == count
    assert table.verify(deep=True).ok


# -- C03


@pytest.mark.parametrize("point", POINTS)
def test_c03_a_writer_goes_on_beside_a_compaction_and_is_never_fenced(bench: Any, crew: Any, point: str) -> None:
    writer = bench.memtable_writer(bench.faulty())
    model = flushed(bench, *overlapping(), writer=writer)
    epoch = bench.manifest.epoch
    crew.stops = {point}
    compactor = crew.actor(lambda: compact(bench, bench.faulty()))
    assert compactor.step() == point
    for number in range(3):
        writer.put(bench.rows(number, 100 + number, value=f"late{number}")).wait(timeout=30)
        model |= {number: f"late{number}", 100 + number: f"late{number}"}
        assert bench.state(writer.view()) == model
        writer.flush()
    compactor.finish()
    writer.check_fenced()
    assert bench.manifest.epoch == epoch
    assert len(bench.manifest.runs) == 4, "what was merged, and the three that came meanwhile"
    assert bench.state() == model == bench.state(writer.view())
    writer.put(bench.rows(500)).wait(timeout=30)
    writer.close()


def test_c03_a_writer_that_takes_over_beside_a_compaction_is_not_held_up(bench: Any, crew: Any) -> None:
    model = flushed(bench, *overlapping())
    crew.stops = {"compact.written"}
    compactor = crew.actor(lambda: compact(bench, bench.faulty()))
    compactor.step()
    model |= flushed(bench, {7: "new"})
    compactor.finish()
    assert bench.state() == model
    assert len(bench.manifest.runs) == 2


# -- C04, C08, C09


@pytest.mark.parametrize("point", [*POINTS, "commit.loaded", "commit.created"])
@pytest.mark.parametrize("skip", [0, 1])
def test_c08_a_crash_after_each_step_loses_and_doubles_nothing_and_leaves_only_garbage(
    make_bench: Any, crash: Any, point: str, skip: int
) -> None:
    clock = Jumping()
    bench = make_bench(clock=clock)
    model = flushed(bench, *overlapping(4, 16))
    store: FaultyStore = bench.faulty()
    met: list[str] = []

    def die(name: str) -> None:
        if name != point:
            return
        met.append(name)
        if len(met) == skip + 1:
            store.add(Fault("any", "fail"))
            raise crash

    with hooked(die):
        try:
            compact(bench, store, slice_rows=5)
        except crash:
            dead = True
        else:
            dead = False  # it has no such step a second time
    assert bench.state() == model
    left = run_files(bench) - named_files(bench)
    collect(bench)
    assert bench.state() == model
    if dead and bench.manifest.attempts:
        assert run_files(bench) - named_files(bench) >= {path for path in left if f"{RUNS}c" in path}, "it might still be at work"
    compact(bench, slice_rows=7)
    assert bench.state() == model
    assert not named_files(bench) & {path for path in left if f"{RUNS}c" in path}, "what a dead attempt wrote never shows (C09)"
    clock.ahead = 2 * 3600.0
    collect(bench)
    assert bench.manifest.attempts == {}
    assert run_files(bench) == named_files(bench), "C04: it is gone in the end"
    assert bench.state() == model
    assert len(bench.manifest.runs) == 1


def test_c08_a_compactor_whose_lease_was_ended_cannot_commit_and_begins_again(make_bench: Any, crew: Any) -> None:
    clock = Jumping()
    bench = make_bench(clock=clock)
    model = flushed(bench, *overlapping())
    crew.stops = {"compact.written"}
    slow = crew.actor(lambda: compact(bench, bench.faulty()))
    slow.step()
    clock.ahead = 2 * 3600.0
    report = collect(bench)
    assert [lease.split()[0] for lease in report.leases_ended] == ["attempt"]
    assert run_files(bench) == named_files(bench), "its files are gone"
    crew.stops = {"nowhere"}
    slow.finish()
    assert bench.state() == model
    assert len(bench.manifest.runs) == 1
    assert named_files(bench) <= run_files(bench)


def test_c08_a_commit_whose_reply_is_lost_counts_once(bench: Any) -> None:
    model = flushed(bench, *overlapping())
    store = bench.faulty()
    store.add(Fault("create", "apply-then-fail", key="/manifest/", times=50))
    compact(bench, store)
    assert bench.state() == model
    assert len(bench.manifest.runs) == 1
    collect(bench)
    assert bench.state() == model


@pytest.mark.parametrize("fault", ["fail", "refuse"])
def test_c04_a_compaction_that_cannot_write_withdraws_and_collection_takes_the_rest(bench: Any, fault: Any) -> None:
    model = flushed(bench, *overlapping(4, 16))
    store = bench.faulty()
    store.add(Fault("create", fault, key=f"{RUNS}c", skip=1))
    with pytest.raises(hg.HeadgateError):
        compact(bench, store, slice_rows=5)
    assert bench.manifest.attempts == {}
    assert len(bench.manifest.runs) == 4
    assert run_files(bench) > named_files(bench)
    collect(bench)
    assert run_files(bench) == named_files(bench)
    assert bench.state() == model


# -- C06


class _Made(Slice):
    """Rows that are made when they are read, so that only what a reader holds takes memory."""

    def __init__(self, rows: int, every: int, first: int, width: int) -> None:
        self.num_rows, self._every, self._first, self._width = rows, every, first, width
        self.schema = pa.schema([pa.field("id", pa.int64(), False), pa.field("value", pa.string())])

    def scan(
        self, columns: Sequence[str], *, start: int = 0, stop: int | None = None, batch_rows: int = 1 << 16
    ) -> Iterator[pa.RecordBatch]:
        end = self.num_rows if stop is None else min(stop, self.num_rows)
        for at in range(start, end, batch_rows):
            ids = np.arange(at, min(at + batch_rows, end)) * self._every + self._first
            yield pa.RecordBatch.from_arrays([pa.array(ids), pa.array(["x" * self._width] * len(ids))], schema=self.schema).select(
                list(columns)
            )

    def take(self, offsets: Any, columns: Sequence[str]) -> pa.RecordBatch:
        raise NotImplementedError

    def matching(self, filter: str, columns: Sequence[str]) -> Any:
        raise NotImplementedError

    def nearest(self, *args: Any, **options: Any) -> None:
        return None


class _Gauged(Columnar):
    """Writes nothing, and looks how much is held at every batch."""

    def __init__(self, slices: dict[str, _Made], parallel_reads: int) -> None:
        self._slices, self.peak, self.rows, self.parallel_reads = slices, 0, 0, parallel_reads

    def write(self, path: str, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> SliceRecord:
        rows = 0
        for batch in batches:
            rows += batch.num_rows
            self.peak = max(self.peak, pa.total_allocated_bytes())
        self.rows += rows
        return SliceRecord(path=path, rows=rows)

    def open(self, path: str) -> Slice:
        return self._slices[path]

    def drop(self, path: str) -> None:
        raise NotImplementedError


def _peak_of_a_compaction(bench: Any, threads: int, *, runs: int, rows: int, width: int, max_memory: int) -> tuple[int, int]:
    columnar = _Gauged({f"run{number}": _Made(rows, runs, number, width) for number in range(runs)}, threads)
    fields = tuple(zip(bench.rules.field_ids, bench.rules.schema.names, strict=True))
    records = tuple(
        RunRecord(id=f"run{number}", first=number, end=number + 1, slices=(SliceRecord(path=f"run{number}", rows=rows),), fields=fields)
        for number in range(runs)
    )
    log = bench.log()
    log.manifests.commit(lambda m: m.but(cursor=ChainPoint(1, runs), runs=records))
    before = pa.total_allocated_bytes()
    compact_shard(log, columnar, bench.rules, max_memory=max_memory, full=True)
    return columnar.peak - before, columnar.rows


@pytest.mark.parametrize("threads", [1, 4])
def test_c06_peak_memory_stays_below_the_limit_at_ten_times_the_data(bench: Any, threads: int) -> None:
    peak, rows = _peak_of_a_compaction(bench, threads, runs=8, rows=42_000, width=250, max_memory=8 << 20)
    assert rows == 8 * 42_000
    assert rows * 258 > 80 << 20
    assert peak < 8 << 20


def test_c06_threads_that_read_merge_and_write_at_once_stay_below_the_limit_too(bench: Any) -> None:
    peak, rows = _peak_of_a_compaction(bench, 4, runs=8, rows=42_000, width=250, max_memory=32 << 20)
    assert rows == 8 * 42_000
    assert peak < 32 << 20


@pytest.mark.parametrize("threads", [1, 4])
def test_c06_wide_rows_are_held_few_at_a_time(bench: Any, threads: int) -> None:
    peak, rows = _peak_of_a_compaction(bench, threads, runs=4, rows=300, width=64 << 10, max_memory=12 << 20)
    assert rows == 1200
    assert peak < 12 << 20


# -- what takes the place of other files is durable


class _Syncing(ArrowColumnar):
    """Takes its time to make what it has written durable, and may fail at it."""

    parallel_reads = 4

    def __init__(self, store: Any, fails: bool = False) -> None:
        super().__init__(store)
        self.fails, self.written, self.synced = fails, list[str](), list[str]()

    def write(self, path: str, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> SliceRecord:
        self.written.append(path)
        made = super().write(path, schema, batches)
        time.sleep(0.01)
        if self.fails:
            raise StoreSyncError(f"{path} could not be synced", object=path)
        self.synced.append(path)
        return made


def test_c09_every_slice_is_synced_before_the_commit_names_it(bench: Any) -> None:
    model = flushed(bench, dict.fromkeys(range(40), "base"), dict.fromkeys(range(20, 60), "newer"))
    columnar = _Syncing(bench.log().wal_store)
    at_commit: list[list[str]] = []
    with hooked(lambda point: at_commit.append(list(columnar.synced)) if point == "compact.written" else None):
        compact_shard(bench.log(), columnar, bench.rules, max_memory=1 << 20, full=True, slice_rows=16)
    assert len(columnar.written) == 4
    assert [sorted(synced) for synced in at_commit] == [sorted(columnar.written)]
    named = [part.path for part in bench.manifest.runs[0].slices]
    assert named == sorted(columnar.written), "in the order of their keys, whichever was done first"
    assert bench.state() == model


def test_c09_a_slice_that_cannot_be_synced_takes_the_place_of_nothing(bench: Any) -> None:
    model = flushed(bench, dict.fromkeys(range(40), "base"), dict.fromkeys(range(20, 60), "newer"))
    before = bench.manifest.runs
    columnar = _Syncing(bench.log().wal_store, fails=True)
    with pytest.raises(StoreSyncError):
        compact_shard(bench.log(), columnar, bench.rules, max_memory=1 << 20, full=True, slice_rows=16)
    assert bench.manifest.runs == before
    assert bench.state() == model


# -- C07


def test_c07_tombstones_stay_until_the_oldest_run_is_merged(bench: Any) -> None:
    writer = bench.memtable_writer()
    model = flushed(bench, dict.fromkeys(range(40), "base"), {5: None, 6: None}, {6: "again"}, writer=writer)
    model = dict.fromkeys(range(40), "base") | {6: "again"}
    del model[5]
    compact(bench, full=False)
    runs = bench.manifest.runs
    assert [run.rows for run in runs] == [40, 2], "only the newer part"
    assert runs[1].tombstones == 1
    assert bench.state() == model == bench.state(writer.view())
    assert 5 not in bench.state()
    compact(bench)
    runs = bench.manifest.runs
    assert [(run.rows, run.tombstones) for run in runs] == [(39, 0)]
    assert bench.state() == model
    writer.put(bench.rows(5, value="back")).wait()
    writer.flush()
    assert bench.state() == model | {5: "back"}


def test_c07_a_deletion_overwritten_in_a_part_that_is_merged_leaves_a_run_that_reads_right(bench: Any) -> None:
    flushed(bench, dict.fromkeys(range(40), "base"), {5: None}, {5: "again"})
    compact(bench, full=False)
    assert [(run.rows, run.tombstones) for run in bench.manifest.runs] == [(40, 0), (1, 0)]
    model = dict.fromkeys(range(40), "base") | {5: "again"}
    assert bench.state() == model
    flushed(bench, {6: None})
    compact(bench, full=False)
    del model[6]
    assert bench.state() == model
    compact(bench)
    assert bench.state() == model


@pytest.mark.parametrize("point", POINTS)
def test_c07_what_is_put_while_runs_are_merged_wins(bench: Any, crew: Any, point: str) -> None:
    writer = bench.memtable_writer(bench.faulty())
    model = flushed(bench, *overlapping(), writer=writer)
    crew.stops = {point}
    compactor = crew.actor(lambda: compact(bench, bench.faulty()))
    compactor.step()
    model |= flushed(bench, {0: "newest", 1: "newest"}, writer=writer)
    model.pop(4, None)
    writer.delete([{"id": 4}, {"id": 3}])
    model.pop(3, None)
    writer.flush()
    compactor.finish()
    assert bench.state() == model
    compact(bench)
    assert bench.state() == model
    assert len(bench.manifest.runs) == 1


def test_c07_everything_deleted_leaves_no_run_and_a_table_that_goes_on(bench: Any) -> None:
    flushed(bench, dict.fromkeys(range(10), "x"), dict.fromkeys(range(10)))
    compact(bench)
    assert bench.manifest.runs == ()
    assert bench.state() == {}
    collect(bench)
    assert run_files(bench) == set()
    assert flushed(bench, {1: "y"}) == bench.state() == {1: "y"}


@pytest.mark.parametrize("seed", range(12))
def test_c07_random_puts_deletes_and_compactions_read_as_the_model(bench: Any, seed: int) -> None:
    pick = random.Random(seed)
    writer = bench.memtable_writer(max_memtable_age=1e6)
    model: dict[int, str] = {}
    for number in range(60):
        what = pick.random()
        if what < 0.45:
            start, span = pick.randrange(200), pick.choice([1, 5, 40])
            ids = pick.sample(range(start, start + span), pick.randint(1, span))
            writer.put([{"id": id, "value": f"{number}"} for id in ids])
            model |= dict.fromkeys(ids, f"{number}")
        elif what < 0.6:
            ids = [pick.randrange(240) for _ in range(pick.choice([1, 8]))]
            writer.delete([{"id": id} for id in ids])
            for id in ids:
                model.pop(id, None)
        elif what < 0.8:
            writer.flush()
        elif what < 0.95:
            compact(bench, full=pick.random() < 0.5, slice_rows=pick.choice([3, 10, 1000]))
        else:
            collect(bench)
        if pick.random() < 0.3:
            writer.flush()
            assert bench.state() == model
    writer.flush()
    assert bench.state() == model == bench.state(writer.view())
    for run in bench.manifest.runs:
        ids = [
            id for part in run.slices for id in ArrowColumnar(bench.inner).open(part.path).take(np.arange(part.rows), ["id"])[0].to_pylist()
        ]
        assert ids == sorted(set(ids)), "sorted, each key once"


KEYS: dict[str, tuple[list[pa.DataType], Callable[[random.Random], tuple[Any, ...]]]] = {
    "int8": ([pa.int8()], lambda pick: (pick.randint(-128, 127),)),
    "uint64": ([pa.uint64()], lambda pick: (pick.choice([0, 1, 2**63 - 1, 2**63, 2**64 - 1, pick.randrange(60)]),)),
    "date and bool": ([pa.date32(), pa.bool_()], lambda pick: (date(1970, 1, 1) + timedelta(pick.randint(-9, 9)), pick.random() < 0.5)),
    "string": ([pa.string()], lambda pick: ("".join(pick.choice(["", "a", "b", "\u00e4", "\0", "\U0001f600"]) for _ in range(3)),)),
    "binary": ([pa.binary()], lambda pick: (bytes(pick.choice([0, 1, 127, 255]) for _ in range(pick.randint(0, 3))),)),
    "timestamp": ([pa.timestamp("us")], lambda pick: (datetime(2000, 1, 1) + timedelta(days=pick.randint(-20000, 20000) // 500),)),
    "decimal": ([pa.decimal128(20, 2)], lambda pick: (Decimal(pick.randint(-50, 50)) / 4,)),
    "string and int64": ([pa.string(), pa.int64()], lambda pick: (pick.choice(["", "a", "aa", "b"]), pick.randint(-6, 6))),
    "int64 and binary": (
        [pa.int64(), pa.binary()],
        lambda pick: (pick.choice([-(2**63), -1, 0, 2**63 - 1]), bytes([pick.choice([0, 255])]) * pick.randint(0, 3)),
    ),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KEYS)
def test_c07_runs_merged_a_few_rows_at_a_time_read_as_the_model_whatever_the_key(
    kind: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pick = random.Random(f"{kind} {seed}")
    monkeypatch.setattr("headgate.run_writer._BATCH_ROWS_MAX", pick.choice([1, 2, 5]))
    monkeypatch.setattr("headgate.run_writer._BATCH_ROWS_MIN", 1)
    types, key_of = KEYS[kind]
    names = [f"k{number}" for number in range(len(types))]
    schema = pa.schema([*(pa.field(name, type, False) for name, type in zip(names, types, strict=True)), pa.field("value", pa.int64())])
    table = hg.create_table(f"memory://c-{random.getrandbits(64):x}", schema, key=names)
    log, columnar = table.shard("0000").log, table._places.columnar()
    model: dict[tuple[Any, ...], int] = {}
    with table.shard("0000").writer(hg.ShardWriterConfig(max_memtable_age=1e6)) as writer:
        for number in range(14):
            some = [key_of(pick) for _ in range(pick.choice([1, 3, 25]))]
            if pick.random() < 0.3:
                writer.delete([dict(zip(names, key, strict=True)) for key in some])
                for key in some:
                    model.pop(key, None)
            else:
                writer.put([{**dict(zip(names, key, strict=True)), "value": number} for key in dict.fromkeys(some)])
                model |= dict.fromkeys(some, number)
            writer.flush()
            if pick.random() < 0.5:
                slice_rows = pick.choice([1, 2, 6])
                compact_shard(log, columnar, table._watch.rules, max_memory=1, full=pick.random() < 0.6, slice_rows=slice_rows)
            if pick.random() < 0.3:
                table.gc(dry_run=False, min_age=0)
            rows = table.scan().to_arrow().to_pylist()
            assert len(rows) == len(model)
            assert {tuple(row[name] for name in names): row["value"] for row in rows} == model
    assert table.verify(deep=True).ok
    kept = list(model)[:5]
    if kept:
        wanted = pa.Table.from_pylist([dict(zip(names, key, strict=True)) for key in kept], schema=schema.remove(len(names)))
        assert [row["value"] for row in table.lookup(wanted).to_pylist()] == [model[key] for key in kept]


# -- slices that nothing touches


def test_untouched_slices_are_named_again_and_collection_leaves_them(bench: Any) -> None:
    model = flushed(bench, dict.fromkeys(range(0, 200, 2), "base"), {999: "x"})
    compact(bench, slice_rows=10)
    before = [part.path for part in bench.manifest.runs[0].slices]
    assert len(before) >= 10
    model |= flushed(bench, {44: "touched", 45: "touched"})
    report = compact(bench, slice_rows=10)
    after = {part.path for part in bench.manifest.runs[0].slices}
    assert report.slices_kept >= 8
    assert len(after & set(before)) == report.slices_kept
    assert report.rows_written <= 30
    assert bench.state() == model
    replaced = {part.path for run in bench.manifest.replaced for part in run.slices}
    assert not replaced & after
    collect(bench)
    assert bench.state() == model
    assert run_files(bench) == after
    model |= flushed(bench, {-5: "first", 2000: "last", 101: "gap"})
    compact(bench, slice_rows=10)
    collect(bench)
    assert bench.state() == model
    assert run_files(bench) == named_files(bench)


@pytest.mark.parametrize(
    ("id", "is_kept"),
    [(4, True), (39, True), (150, False), (500, False), (130, False), (162, False), (164, False)],
    ids=["far away", "in a gap far away", "before it", "after it", "in its neighbour", "in it", "its last key"],
)
def test_a_small_slice_is_written_again_only_with_something_beside_it(bench: Any, id: int, is_kept: bool) -> None:
    model = flushed(bench, dict.fromkeys(range(0, 140, 2), "base"), dict.fromkeys([160, 162, 164], "base"))
    compact(bench, slice_rows=10)
    before = bench.manifest.runs[0].slices
    assert [part.rows for part in before] == [10] * 7 + [3]
    model |= flushed(bench, {id: "new"})
    compact(bench, slice_rows=10)
    assert bench.state() == model
    assert (before[-1].path in {part.path for part in bench.manifest.runs[0].slices}) == is_kept


def test_untouched_slices_that_a_checkpoint_shares_outlive_either_of_the_two(bench: Any) -> None:
    table = bench.table
    model = flushed(bench, dict.fromkeys(range(100), "base"), {100: "x"})
    compact(bench, slice_rows=10)
    table.checkpoint("then")
    now = model | flushed(bench, dict.fromkeys(range(50), "late"))
    compact(bench, slice_rows=10)
    collect(bench)
    then = {row["id"]: row["value"] for row in table.scan(at="then").to_arrow().to_pylist()}
    assert then == model
    assert bench.state() == now
    table.drop_checkpoint("then")
    collect(bench)
    assert bench.state() == now
    assert run_files(bench) == named_files(bench)


def test_slices_do_not_become_ever_more_with_ascending_keys(bench: Any) -> None:
    writer = bench.memtable_writer()
    model: dict[int, str] = {}
    for number in range(40):
        model |= flushed(bench, {number * 5 + i: "x" for i in range(5)}, writer=writer)
        compact(bench, slice_rows=20)
    assert bench.state() == model
    assert sum(len(run.slices) for run in bench.manifest.runs) <= 2 * (200 // 20) + 1


# -- columns that change


def _table(key: str | None = "id", type: pa.DataType | None = None, id: pa.DataType | None = None, **options: Any) -> hg.Table:
    schema = pa.schema([pa.field("id", id or pa.int64(), False), pa.field("value", type or pa.string())])
    return hg.create_table(f"memory://c-{random.getrandbits(64):x}", schema, key=key, **options)


def _values(table: hg.Table, **options: Any) -> dict[int, Any]:
    found = table.scan(**options).to_arrow().to_pylist()
    assert len({row["id"] for row in found}) == len(found)
    return {row.pop("id"): tuple(row.values()) for row in found}


@pytest.mark.parametrize("point", [*POINTS, "commit.loaded"])
def test_a_column_added_while_runs_are_merged_keeps_its_values(point: str) -> None:
    table = _table()
    writer = table.shard("0000").writer()
    for number in range(3):
        writer.put([{"id": number, "value": "old"}])
        writer.flush()
    stale = hg.open_table(table.uri)
    done: list[str] = []

    def add(name: str) -> None:
        if name == point and not done:
            done.append(name)
            table.add_columns(pa.schema([pa.field("more", pa.int64())]))
            writer.put([{"id": 1, "value": "new", "more": 11}, {"id": 9, "value": "new", "more": 99}]).wait()
            writer.flush()

    with hooked(add):
        stale.compact(full=True)
    assert done
    expected = {0: ("old", None), 1: ("new", 11), 2: ("old", None), 9: ("new", 99)}
    assert _values(hg.open_table(table.uri)) == expected
    stale.compact(full=True)
    assert _values(hg.open_table(table.uri)) == expected
    assert len(table.shard("0000").log.manifests.load().runs) == 1
    writer.close()


def test_a_handle_that_never_heard_of_a_column_keeps_its_values_when_it_compacts() -> None:
    table = _table()
    stale = hg.open_table(table.uri)
    with table.shard("0000").writer() as writer:
        writer.put([{"id": 1, "value": "a"}])
        writer.flush()
        table.add_columns(pa.schema([pa.field("more", pa.int64())]))
        writer.put([{"id": 2, "value": "b", "more": 2}])
        writer.flush()
        stale.compact(full=True)
    assert _values(hg.open_table(table.uri)) == {1: ("a", None), 2: ("b", 2)}


def test_columns_are_looked_up_after_the_runs_are_known() -> None:
    """The other way round, a column that is added in between, with a run that has it, would lose its values."""
    table = _table()
    writer = table.shard("0000").writer()
    for number in (1, 2):
        writer.put([{"id": number, "value": "a"}])
        writer.flush()
    done: list[int] = []

    def looked_up() -> Any:
        rules = table._watch.latest(force=True)
        if not done:
            done.append(1)
            table.add_columns(pa.schema([pa.field("more", pa.int64())]))
            writer.put([{"id": 2, "value": "b", "more": 2}])
            writer.flush()
        return rules

    compact_shard(table.shard("0000").log, table._places.columnar(), looked_up, max_memory=LARGE, full=True)
    assert _values(hg.open_table(table.uri)) == {1: ("a", None), 2: ("b", 2)}
    writer.close()


def test_a_dropped_and_added_column_stays_empty_and_a_renamed_one_stays_full_through_compaction() -> None:
    table = _table()
    with table.shard("0000").writer() as writer:
        table.add_columns(pa.schema([pa.field("a", pa.int64()), pa.field("b", pa.int64())]))
        writer.put([{"id": 1, "value": "x", "a": 1, "b": 1}])
        writer.flush()
        table.drop_columns(["a"])
        table.add_columns(pa.schema([pa.field("a", pa.int64())]))
        table.rename_column("b", "c")
    with table.shard("0000").writer() as writer:
        writer.put([{"id": 2, "value": "y", "c": 2, "a": 2}])
        writer.flush()
    expected = {1: ("x", 1, None), 2: ("y", 2, 2)}
    assert _values(table) == expected
    table.compact(full=True)
    assert _values(table) == expected


@pytest.mark.parametrize("what", ["key", "value"])
def test_a_widened_column_beside_slices_that_nothing_touches(what: str) -> None:
    narrow = {"key": {"id": pa.int32()}, "value": {"type": pa.int8()}}[what]
    table = _table(**({"type": pa.int64()} | narrow))
    shard = table.shard("0000")

    def merge() -> None:
        log, columnar = shard.log, table._places.columnar()
        compact_shard(log, columnar, lambda: table._watch.latest(force=True), max_memory=LARGE, full=True, slice_rows=4)

    with shard.writer() as writer:
        writer.put([{"id": id, "value": 1} for id in range(-20, 20)])
        writer.flush()
        writer.put([{"id": 100, "value": 1}])
        writer.flush()
        merge()
    expected = dict.fromkeys([*range(-20, 20), 100], (1,))
    table.widen_column("id" if what == "key" else "value", pa.int64())
    with table.shard("0000").writer() as writer:
        for id in (5, 300, -300):
            writer.put([{"id": id, "value": 50 if what == "key" else 2**40}])
            expected[id] = (50 if what == "key" else 2**40,)
            writer.flush()
            merge()
            assert _values(table) == expected
    found = table.lookup([-20, 300, 5]).to_pylist()
    assert [(row["id"], row["value"]) for row in found] == [(-20, 1), (300, *expected[300]), (5, *expected[5])]
    assert table.verify(deep=True).ok


# -- without a key


def test_a_table_without_a_key_keeps_every_row_in_the_order_it_came() -> None:
    table = _table(key=None)
    expected = []
    with table.shard("0000").writer() as writer:
        for number in range(6):
            rows = [{"id": id % 3, "value": f"{number}"} for id in range(4)]
            writer.put(rows)
            writer.flush()
            expected += rows
            if number in (2, 5):
                compact_shard(table.shard("0000").log, table._places.columnar(), table._watch.rules, max_memory=LARGE, slice_rows=5)
            assert table.scan().to_arrow().to_pylist() == expected
        table.compact(full=True)
        assert table.scan().to_arrow().to_pylist() == expected
        table.gc(dry_run=False, min_age=0)
    assert hg.open_table(table.uri).scan().to_arrow().to_pylist() == expected
    assert len(table.runs()) == 1


# -- I01


def test_i01_nearest_neighbours_are_the_same_before_and_after_each_flush_and_compaction(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), False), pa.field("vector", pa.list_(pa.float32(), 8))])
    table = hg.create_table(tmp_path / "t", schema, key="id", indexes=[hg.vector_index("vector")])
    numbers = np.random.default_rng(7)
    known: dict[int, Any] = {}
    queries = numbers.random((3, 8), np.float32)

    def agrees() -> None:
        ids = np.array(list(known))
        vectors = np.stack([known[id] for id in ids])
        for query in queries:
            nearest = ids[np.argsort(((vectors - query) ** 2).sum(axis=1))[:10]].tolist()
            assert table.search("vector", query, k=10).column("id").to_pylist() == nearest

    with table.shard("0000").writer() as writer:
        for _ in range(4):
            ids = numbers.choice(400, 100, replace=False).tolist()
            vectors = numbers.random((100, 8), np.float32)
            writer.put([{"id": id, "vector": vector.tolist()} for id, vector in zip(ids, vectors, strict=True)]).wait()
            known |= dict(zip(ids, vectors, strict=True))
            gone = [next(iter(known))]
            writer.delete([{"id": id} for id in gone]).wait()
            for id in gone:
                del known[id]
            agrees()
            writer.flush()
            agrees()
            table.compact()
            agrees()
        table.compact(full=True)
        agrees()


# -- auto_compact


def test_a_writer_with_auto_compact_keeps_its_runs_few_and_writes_on(bench: Any) -> None:
    writer = bench.memtable_writer(bench.faulty(), auto_compact=True, max_memtable_rows=2, max_memtable_age=0.02)
    for number in range(40):
        writer.put(bench.rows(number, number + 1, value=f"{number}")).wait(timeout=30)
    writer.flush()
    until(lambda: len(bench.manifest.runs) <= 8)
    assert bench.state() == {id: f"{min(id, 39)}" for id in range(41)} == bench.state(writer.view())
    writer.close()
    assert writer.threads_alive() == 0
    assert bench.state() == {id: f"{min(id, 39)}" for id in range(41)}
    assert bench.manifest.attempts == {}


def test_an_auto_compaction_that_fails_does_not_stop_the_writer(bench: Any) -> None:
    store = bench.faulty()
    store.add(Fault("create", "fail", key=f"{RUNS}c"))
    writer = bench.memtable_writer(store, auto_compact=True, max_memtable_rows=1, max_memtable_age=0.02)
    for number in range(10):
        writer.put(bench.rows(number)).wait(timeout=30)
    writer.flush()
    until(lambda: any(f"{RUNS}c" in key for operation, key in store.asked if operation == "create"))
    writer.put(bench.rows(99)).wait(timeout=30)
    store.clear()
    writer.put(bench.rows(100)).wait(timeout=30)
    writer.close()
    assert sorted(bench.state()) == [*range(10), 99, 100]


def test_a_writer_is_aborted_in_bounded_time_while_it_compacts(bench: Any) -> None:
    store, ended = bench.faulty(), threading.Event()
    store.add(Fault("create", "hang", key=f"{RUNS}c"))
    writer = bench.memtable_writer(store, auto_compact=True, max_memtable_rows=1, max_memtable_age=0.02)
    for number in range(4):
        writer.put(bench.rows(number)).wait(timeout=30)
    writer.flush()
    until(lambda: any(f"{RUNS}c" in key for operation, key in store.asked if operation == "create"))

    def abort() -> None:
        writer.abort()
        ended.set()

    aborting = threading.Thread(target=abort, daemon=True)
    aborting.start()
    assert ended.wait(20), "abort waits for a compaction that hangs"
    assert bench.state() == {number: f"v{number}" for number in range(4)}
    store.clear()
    until(lambda: writer.threads_alive() == 0)
    assert bench.state() == {number: f"v{number}" for number in range(4)}


def test_a_compaction_that_fails_half_way_leaves_no_thread_behind(bench: Any) -> None:
    flushed(bench, dict.fromkeys(range(2000), "base"), dict.fromkeys(range(1000, 3000), "newer"))
    before = threading.active_count()
    columnar = _Failing(bench.log().wal_store)
    with pytest.raises(OSError, match="the disk is full"):
        compact_shard(bench.log(), columnar, bench.rules, max_memory=1 << 18, full=True, slice_rows=600)
    assert columnar.written == 1
    assert threading.active_count() == before


class _Failing(ArrowColumnar):
    """Writes one slice, and takes a few rows of the next."""

    parallel_reads = 4

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        self.written = 0

    def write(self, path: str, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> SliceRecord:
        if self.written:
            next(batches)
            raise OSError("the disk is full")
        self.written += 1
        return super().write(path, schema, batches)
