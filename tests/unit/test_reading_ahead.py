"""Reading many sources at once where each begins with waiting: in order, bounded, and the same rows as one after the other."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests import servers
from tests.reading import Shelf, on_disk

import headgate as hg
import headgate.query.scan as scan_module
import headgate.query.shadow as shadow
from headgate.clock import SYSTEM_CLOCK, Clock, in_order_ahead
from headgate.columnar import Slice
from headgate.columnar.arrow import ArrowColumnar
from headgate.columnar.base import Offsets
from headgate.columnar.lance import LanceColumnar
from headgate.errors import DataLossError, ObjectMissingError, SnapshotExpiredError
from headgate.manifest.model import RunRecord
from headgate.query.lookup import lookup
from headgate.query.ranges import cut_ranges, scan_range
from headgate.query.scan import Scan
from headgate.query.sources import sources_of
from headgate.query.vector import search
from headgate.schema import RowRules
from headgate.simulation.scheduler import Scheduler
from headgate.simulation.world import Faults, Process, SimClock, World
from headgate.store import Location
from headgate.store.memory import MemoryStore
from headgate.view import ReadView

PATIENCE = 30.0
SEEDS = range(60)

# -- the helper, by schedules that a seed decides


def scheduled(seed: int, work: Callable[[Clock, Callable[[], None]], None]) -> None:
    """``work`` in a simulated thread; it is given the clock, and a call at which any other thread may go on."""
    rng = random.Random(seed)
    scheduler = Scheduler(rng)
    process = Process(World(scheduler, rng, Faults()), f"seed {seed}", 1.0)
    task = process.start(lambda: work(SimClock(process), scheduler.turn))
    scheduler.run(lambda: task.done)
    assert not scheduler.escaped, (seed, scheduler.escaped)
    assert all(other.done for other in process.tasks), f"seed {seed}: a thread was left behind"


def counts_of(seed: int) -> list[int]:
    """How many results each of some items gives."""
    rng = random.Random(f"counts {seed}")
    return [rng.choice([0, 1, 1, 2, 5]) for _ in range(rng.choice([1, 3, 12]))]


@pytest.mark.parametrize("parallel", [1, 2, 5, 50])
def test_results_come_in_the_order_of_their_items_by_any_schedule(parallel: int) -> None:
    for seed in SEEDS:
        counts = counts_of(seed)
        sizes = [random.Random(f"{seed} {number}").choice([None, 0, 1, 3, 100]) for number in range(len(counts))]

        def work(clock: Clock, turn: Callable[[], None], counts: list[int] = counts, sizes: list[int | None] = sizes) -> None:
            def read(number: int) -> Iterator[tuple[int, int]]:
                for at in range(counts[number]):
                    turn()
                    yield number, at

            found = list(in_order_ahead(clock, read, range(len(counts)), parallel=parallel, sizes=sizes, budget=4))
            assert found == [(number, at) for number, count in enumerate(counts) for at in range(count)]

        scheduled(seed, work)


def test_no_more_is_read_ahead_than_may_be_held() -> None:
    parallel, held, budget = 3, 2, 10
    for seed in SEEDS:
        rng = random.Random(f"sizes {seed}")
        sizes = [rng.choice([1, 2, 4, 9, 50]) for _ in range(20)]

        def work(clock: Clock, turn: Callable[[], None], sizes: list[int] = sizes) -> None:
            made = dict.fromkeys(range(20), 0)
            running = 0

            def read(number: int) -> Iterator[int]:
                nonlocal running
                running += 1
                assert running <= parallel
                for _ in range(6):
                    turn()
                    made[number] += 1
                    yield number
                running -= 1

            given = dict.fromkeys(range(20), 0)
            for number in in_order_ahead(clock, read, range(20), parallel=parallel, sizes=sizes, budget=budget, held=held):
                given[number] += 1
                for _ in range(5):
                    turn()
                begun = [other for other in range(20) if made[other] and given[other] < 6]
                assert len(begun) <= 2 * parallel
                assert sum(sizes[other] for other in begun) <= budget or len(begun) == 1
                assert all(made[other] - given[other] <= held + 1 for other in begun)

        scheduled(seed, work)


def test_an_error_comes_after_the_results_before_it_by_any_schedule() -> None:
    for seed in SEEDS:

        def work(clock: Clock, turn: Callable[[], None]) -> None:
            def read(number: int) -> Iterator[str]:
                turn()
                yield f"{number} first"
                turn()
                if number in (2, 3):
                    raise KeyError(number)
                yield f"{number} second"

            results, found = in_order_ahead(clock, read, range(6), parallel=4, sizes=[0] * 6, budget=0), list[str]()
            with pytest.raises(KeyError) as raised:
                found.extend(results)
            assert raised.value.args == (2,)
            assert found == ["0 first", "0 second", "1 first", "1 second", "2 first"]

        scheduled(seed, work)


def test_leaving_early_stops_and_joins_the_threads_by_any_schedule() -> None:
    for seed in SEEDS:
        begun: list[int] = []

        def work(clock: Clock, turn: Callable[[], None], begun: list[int] = begun, seed: int = seed) -> None:
            def read(number: int) -> Iterator[int]:
                begun.append(number)
                for _ in range(10):
                    turn()
                    yield number

            results = in_order_ahead(clock, read, range(100), parallel=4, sizes=[1] * 100, budget=100)
            for _ in range(seed % 25):
                next(results)
            results.close()  # type: ignore[attr-defined]

        scheduled(seed, work)  # it looks for threads that go on
        assert len(begun) <= 8 + 3


def test_one_at_once_is_plain_iteration_without_threads() -> None:
    read: list[int] = []

    def numbers(number: int) -> Iterator[int]:
        read.append(number)
        yield number
        yield number

    before = threading.active_count()
    results = in_order_ahead(SYSTEM_CLOCK, numbers, range(5), parallel=1, sizes=[0] * 5, budget=100)
    assert next(results) == 0
    assert (read, threading.active_count()) == ([0], before)
    none = in_order_ahead(SYSTEM_CLOCK, numbers, range(5), parallel=8, sizes=[None] * 5, budget=100)
    assert next(none) == 0
    assert (read, threading.active_count()) == ([0, 0], before)


def test_what_is_not_read_ahead_is_read_by_the_callers_thread() -> None:
    readers: dict[int, str] = {}

    def numbers(number: int) -> Iterator[int]:
        readers[number] = threading.current_thread().name
        yield number

    sizes = [1, None, 1, None, 1]
    assert list(in_order_ahead(SYSTEM_CLOCK, numbers, range(5), parallel=3, sizes=sizes, budget=9)) == list(range(5))
    mine = threading.current_thread().name
    assert [readers[number] == mine for number in range(5)] == [False, True, False, True, False]


# -- reads

PLAIN = RowRules(pa.schema([pa.field("id", pa.int64(), False), pa.field("value", pa.float64()), pa.field("name", pa.string())]), ("id",))
VECTORS = RowRules(pa.schema([pa.field("id", pa.int64(), False), pa.field("vector", pa.list_(pa.float32(), 2))]), ("id",))


class Far(ArrowColumnar):
    """Files that many threads read at once; it knows who reads, and some may be gone."""

    def __init__(self, at_once: int) -> None:
        super().__init__(MemoryStore(f"far-{random.random()}", ""))
        self.scans_at_once = at_once
        self.gone: set[str] = set()
        self.scans: list[str] = []
        self.meeting: threading.Barrier | None = None

    def open(self, path: str) -> Slice:
        return FarSlice(super().open(path), path, self)


class FarSlice(Slice):
    def __init__(self, inner: Slice, path: str, far: Far) -> None:
        self._inner, self._path, self._far = inner, path, far
        self.num_rows, self.schema = inner.num_rows, inner.schema

    def scan(
        self, columns: Sequence[str], *, start: int = 0, stop: int | None = None, batch_rows: int = 1 << 16
    ) -> Iterator[pa.RecordBatch]:
        self._far.scans.append(self._path)
        if self._far.meeting is not None:
            self._far.meeting.wait(PATIENCE)
        for batch in self._inner.scan(columns, start=start, stop=stop, batch_rows=min(batch_rows, 50)):
            if self._path in self._far.gone:
                raise ObjectMissingError(f"{self._path} is missing", object=self._path)
            yield batch

    def matching(self, filter: str, columns: Sequence[str]) -> Iterator[tuple[Offsets, pa.RecordBatch]]:
        return self._inner.matching(filter, columns)

    def take(self, offsets: Offsets, columns: Sequence[str]) -> pa.RecordBatch:
        return self._inner.take(offsets, columns)

    def nearest(self, *args: Any, **options: Any) -> None:
        return None


def shards(far: Far, seed: int = 0, rules: RowRules = PLAIN, count: int = 3, runs: int = 5) -> list[Shelf]:
    """Shards with some runs each, rows that hide others, tombstones, and rows in memory in some of them."""
    rng = random.Random(seed)
    shelves = []
    for number in range(count):
        shelf = Shelf(rules, far)
        for _ in range(runs):
            ids = [count * rng.randrange(400) + number for _ in range(rng.choice([1, 60, 200]))]
            if rules is VECTORS:
                shelf.put([{"id": id, "vector": [rng.random(), rng.random()]} for id in ids])
            else:
                shelf.put([{"id": id, "value": rng.random(), "name": f"n{rng.randrange(9)}"} for id in ids])
            if rng.random() < 0.5:
                shelf.delete([{"id": id} for id in ids[:3]])
            shelf.flush()
        if rng.random() < 0.5:
            shelf.put([{"id": count * rng.randrange(400) + number} for _ in range(30)])
        shelves.append(shelf)
    return shelves


def small_shards(far: Far) -> list[Shelf]:
    """Four with two runs each, all rows of which count."""
    shelves = [Shelf(PLAIN, far) for _ in range(4)]
    for number in range(8):
        shelves[number % 4].put([{"id": 8 * number + at, "value": 0.5, "name": "x"} for at in range(8)])
        shelves[number % 4].flush()
    return shelves


def loading(shelves: list[Shelf]) -> Callable[[], list[ReadView]]:
    return lambda: [shelf.view() for shelf in shelves]


@pytest.mark.parametrize("key_budget", [shadow.KEY_BUDGET_BYTES, 4000, 0])
def test_reads_are_the_same_at_once_and_one_after_the_other(key_budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_module, "KEY_BUDGET_BYTES", key_budget)
    for seed in range(2):
        alone, together = (loading(shards(Far(at_once), seed)) for at_once in (1, 8))
        wanted = list(range(0, 1200, 7))
        for _ in range(2):  # the second finds all that the first has learnt
            for options in ({}, {"columns": ["name"]}, {"filter": "value > 0.5"}, {"limit": 70}):
                ours, theirs = (Scan(load, PLAIN, **options) for load in (together, alone))
                assert ours.to_arrow().equals(theirs.to_arrow()), (seed, options)
                assert ours.count() == theirs.count()
            assert lookup(together, PLAIN, wanted).equals(lookup(alone, PLAIN, wanted))


def test_vectors_are_found_the_same_at_once_and_one_after_the_other() -> None:
    alone, together = (loading(shards(Far(at_once), 3, VECTORS)) for at_once in (1, 8))
    assert search(together, VECTORS, "vector", [0.5, 0.5], 20).equals(search(alone, VECTORS, "vector", [0.5, 0.5], 20))


def test_ranges_of_keys_are_the_same_at_once_and_one_after_the_other() -> None:
    alone, together = (shards(Far(at_once), 1, count=1)[0].view() for at_once in (1, 8))
    for part in cut_ranges(alone, 3):
        found = [pa.Table.from_batches(scan_range(view, None, part.low, part.high, bounds=part.bounds)) for view in (alone, together)]
        assert found[0].equals(found[1])
        assert found[0].num_rows


def test_tables_without_a_key_are_read_in_order_too() -> None:
    rules = RowRules(PLAIN.schema, ())
    found = []
    for at_once in (1, 8):
        shelf = Shelf(rules, Far(at_once))
        for run in range(12):
            shelf.put([{"id": 100 * run + number, "value": 1.0, "name": "x"} for number in range(99)])
            shelf.flush()
        found.append(Scan(shelf.load, rules).to_arrow().column("id").to_pylist())
    assert found[0] == found[1] == [100 * run + number for run in range(12) for number in range(99)]


def test_keys_and_rows_of_many_runs_are_read_at_the_same_time() -> None:
    far = Far(8)
    load = loading(small_shards(far))
    far.meeting = threading.Barrier(8)  # none goes on before all are there
    assert Scan(load, PLAIN).to_arrow().num_rows == 64


def test_the_keys_of_all_shards_are_read_at_once_before_any_row() -> None:
    far = Far(2)
    next(Scan(loading(small_shards(far)), PLAIN).to_batches())
    assert len(set(far.scans[:8])) == 8


def test_a_small_limit_looks_at_no_more_shards_than_it_needs() -> None:
    far = Far(8)
    shelves = small_shards(far)
    assert Scan(loading(shelves), PLAIN, limit=5).to_arrow().num_rows == 5
    mine = {part.path for run in shelves[0].runs for part in run.slices}
    assert set(far.scans) <= mine


def test_the_newest_runs_keep_their_keys_when_all_are_read_at_once() -> None:
    far = Far(8)
    shelf = Shelf(PLAIN, far)
    for run in range(6):
        shelf.put([{"id": number} for number in range(run, 1000 + run)])
        shelf.flush()
    view = shelf.view()
    for source in sources_of(view, key_budget_bytes=3 * 8100):
        assert source.rows == 1000
    known = view.cache.masks
    assert [known.indexes[run.id].keys is not None for run in shelf.runs] == [False, False, False, True, True, True]
    assert sum(index.kept_bytes for index in known.indexes.values()) <= 3 * 8100 + 3 * 8


def test_a_run_that_is_collected_before_any_row_was_given_out_is_no_harm() -> None:
    far = Far(8)
    shelf = shards(far, count=1)[0]
    old, views = shelf.view(), 0
    whole = Shelf(PLAIN, far)
    whole.put(shelf.expected())
    whole.flush()

    def load() -> list[ReadView]:
        nonlocal views
        views += 1
        return [old] if views == 1 else [_newer(whole)]

    far.gone = {part.path for run in shelf.runs[2:3] for part in run.slices}
    found = Scan(load, PLAIN).to_arrow()
    assert sorted(found.column("id").to_pylist()) == sorted(row["id"] for row in shelf.expected())
    assert views == 2


def _newer(shelf: Shelf) -> ReadView:
    shelf.version += 1
    return shelf.view()


def test_a_run_that_is_collected_in_the_middle_ends_the_scan() -> None:
    rules = RowRules(PLAIN.schema, ())
    far = Far(4)
    shelf = Shelf(rules, far)
    for run in range(6):
        shelf.put([{"id": 100 * run + number, "value": 1.0, "name": "x"} for number in range(99)])
        shelf.flush()
    far.gone = {part.path for part in shelf.runs[3].slices}
    before, found = threading.active_count(), list[pa.RecordBatch]()
    batches = Scan(lambda: [_newer(shelf)], rules).to_batches()
    with pytest.raises(SnapshotExpiredError):
        found.extend(batches)
    ids = [id for batch in found for id in batch.column("id").to_pylist()]
    assert ids == [100 * run + number for run in range(3) for number in range(99)]
    assert threading.active_count() == before
    with pytest.raises(DataLossError):  # nothing newer is there, and the manifest names it
        Scan(shelf.load, rules).to_arrow()


def test_of_a_scan_that_is_not_taken_little_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = RowRules(PLAIN.schema, ())
    far = Far(4)
    shelf = Shelf(rules, far)
    for run in range(40):
        shelf.put([{"id": 100 * run + number, "value": 1.0, "name": "x"} for number in range(99)])
        shelf.flush()
    before = threading.active_count()
    batches = Scan(shelf.load, rules).to_batches()
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert len(far.scans) <= 8
    assert threading.active_count() == before
    far.scans.clear()
    monkeypatch.setattr(scan_module, "AHEAD_BYTES", 1)
    batches = Scan(shelf.load, rules).to_batches()
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert len(far.scans) == 1


def test_slices_of_a_run_are_opened_at_once_and_stay_in_order() -> None:
    far = Far(4)
    shelf = Shelf(PLAIN, far)
    shelf.put([{"id": number} for number in range(400)])
    shelf.freeze()
    shelf.flush(slices=8)
    record: RunRecord = shelf.runs[0]
    assert len(record.slices) == 8
    assert Scan(shelf.load, PLAIN).to_arrow().column("id").to_pylist() == list(range(400))


def test_lance_is_read_at_once_where_answers_take_time_and_not_on_disk(tmp_path: Path) -> None:
    far = LanceColumnar(Location.parse("s3://bucket/table", {"aws_region": "nowhere"}))
    assert (far.scans_at_once, far.parallel_reads) == (16, 16)
    assert on_disk(tmp_path).scans_at_once == 1


def test_a_table_on_s3_is_read_whole_and_in_order_at_once() -> None:
    with servers.moto_server() as server:
        table = hg.create_table(server.uri("t"), PLAIN.schema, "id", sharding=hg.bucket("id", 4), storage_options=server.options)
        with table.writer() as writer:
            for run in range(3):
                writer.put(pa.table({"id": range(100 * run, 100 * run + 200), "value": [float(run)] * 200, "name": ["x"] * 200})).wait()
                writer.flush()
        reader = hg.open_table(server.uri("t"), server.options)
        for _ in range(2):
            found = reader.scan(columns=["id", "value"]).to_arrow()
            expected = {id: float(min(id // 100, 2)) for id in range(400)}
            assert dict(zip(found.column("id").to_pylist(), found.column("value").to_pylist(), strict=True)) == expected
        assert found.equals(pa.Table.from_batches(reader.scan(columns=["id", "value"], limit=400).to_batches()))  # one after the other
        assert reader.lookup(list(range(0, 400, 9))).num_rows == 45
        assert not any("headgate-ahead" in thread.name for thread in threading.enumerate())
