"""Hazards of memory and flow, with a MemTable: what is held is what is counted, and there is always progress."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate.store import RetryPolicy
from headgate.store.faulty import Fault, FaultyStore

LOG, RUNS, MANIFESTS = "/0000/", "/runs/", "/manifest/"  # entries of the log of shard 0000; its marker is 0000.json
SMALLEST = {
    "max_wal_buffer_size": 1,
    "max_inflight": 1,
    "max_memtable_size": 1,
    "max_memtable_rows": 1,
    "max_memtable_batches": 1,
    "max_memtable_age": 0.0,
    "max_unflushed_memtable_bytes": 1,
    "max_pending_generations": 1,
}


@pytest.fixture(autouse=True)
def quick_flushes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tries as ever, with pauses that take no time."""
    monkeypatch.setattr("headgate.flush._TRIES", RetryPolicy(retries=7, base_delay=0.0001, max_delay=0.001))


def until(holds: Callable[[], bool], patience: float = 30.0) -> None:
    deadline = time.monotonic() + patience
    while not holds():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.001)


def in_time(run: Callable[[], Any], patience: float = 30.0) -> Any:
    """The result of something that must not hang."""
    told: list[Any] = []
    failed: list[BaseException] = []

    def body() -> None:
        try:
            told.append(run())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join(patience)
    assert not thread.is_alive(), "it hangs"
    if failed:
        raise failed[0]
    return told[0]


def rows_of(count: int, first: int = 0, width: int = 100) -> pa.RecordBatch:
    ids = pa.array(range(first, first + count), pa.int64())
    return pa.RecordBatch.from_arrays(
        [ids, pa.array(["x" * width] * count)], schema=pa.schema([pa.field("id", pa.int64(), False), pa.field("value", pa.string())])
    )


# -- M01


def a_warm_writer(bench: Any) -> hg.ShardWriter:
    """With nothing in its MemTable, and the memory it takes once and keeps."""
    writer = bench.memtable_writer(max_memtable_age=1e6)
    writer.put(bench.rows(-1)).wait()
    writer.flush()
    return writer


def comes_down_to(start_bytes: int, most_bytes: float) -> bool:
    """Is no more held than that, once the threads that sent it have let go of what they sent?"""
    deadline = time.monotonic() + 10.0
    while pa.total_allocated_bytes() - start_bytes > most_bytes:
        if time.monotonic() > deadline:
            return False
        gc.collect()
        time.sleep(0.01)
    return True


def test_m01_first_rows_of_many_small_batches_pin_their_own_rows(bench: Any) -> None:
    writer = a_warm_writer(bench)
    start = pa.total_allocated_bytes()
    for number in range(500):
        writer.put(rows_of(500, 500 * number).slice(0, 1))
    writer._pipeline.drain()
    # All of the batches would be 28 MB; a few MiB are for entries under way, whatever is in them.
    assert comes_down_to(start, 4 * writer.backpressure_stats().held_bytes + (4 << 20))


def test_m01_a_hundred_slices_of_one_large_table_count_and_pin_their_own_rows(bench: Any) -> None:
    writer = a_warm_writer(bench)
    start = pa.total_allocated_bytes()
    large = rows_of(200_000)
    whole = large.nbytes
    for at in range(0, 100_000, 1000):
        writer.put(large.slice(at, 10))
    writer._pipeline.drain()
    own = 100 * large.slice(0, 10).nbytes
    counted = writer.backpressure_stats().held_bytes
    assert counted == writer.memtable_stats().active_bytes
    assert own <= counted <= 3 * own + 100 * 1024
    del large
    assert 2 * counted + 100 * 1024 < whole / 20
    assert comes_down_to(start, 2 * counted + 100 * 1024)
    assert writer.memtable_stats().active_rows == 1000


def test_m01_slices_that_make_up_the_whole_table_are_counted_once_each(bench: Any) -> None:
    writer = a_warm_writer(bench)
    start = pa.total_allocated_bytes()
    large = rows_of(50_000)
    for at in range(0, 50_000, 500):
        writer.put(large.slice(at, 500))
    writer._pipeline.drain()
    whole = large.nbytes
    del large
    counted = writer.backpressure_stats().held_bytes
    assert whole <= counted <= 1.2 * whole
    assert comes_down_to(start, 1.2 * counted)


def test_m01_what_was_flushed_is_let_go(tmp_path: Path) -> None:
    shard = hg.create_table(tmp_path / "table", rows_of(1).schema, key="id").shard("0000")
    writer = shard.writer(hg.ShardWriterConfig(max_memtable_age=1e6))
    writer.put(rows_of(1)).wait()
    writer.flush()
    start = pa.total_allocated_bytes()
    for first in range(0, 50_000, 5000):
        writer.put(rows_of(5000, first))
    writer._pipeline.drain()
    held = writer.backpressure_stats().held_bytes
    assert 5_000_000 < held <= pa.total_allocated_bytes() - start + 100_000
    writer.flush()
    assert writer.backpressure_stats().held_bytes == 0
    stats = writer.memtable_stats()
    assert (stats.active_bytes, stats.frozen_bytes, stats.frozen, stats.active_rows) == (0, 0, 0, 0)
    until(lambda: pa.total_allocated_bytes() - start < 0.1 * held)
    writer.close()


def test_m01_replayed_rows_are_counted_as_they_are_held(bench: Any) -> None:
    store = bench.faulty()
    writer = bench.memtable_writer(store, max_memtable_age=1e6)
    for first in range(0, 1000, 100):
        writer.put(rows_of(100, first)).wait()
    held = writer.backpressure_stats().held_bytes
    store.add(Fault("any", "fail"))
    successor = bench.memtable_writer(bench.faulty(), max_memtable_age=1e6)
    assert held <= successor.backpressure_stats().held_bytes <= held + 10 * 2048
    assert successor.backpressure_stats().held_bytes == successor.memtable_stats().active_bytes
    successor.flush()
    assert successor.backpressure_stats().held_bytes == 0


def test_m01_held_bytes_stay_within_the_limit_under_a_slow_flush(bench: Any, arrivals: Any) -> None:
    limit, each = 400_000, rows_of(100).nbytes
    runs = arrivals("create", RUNS)
    store = bench.faulty(before=runs)
    writer = bench.memtable_writer(store, max_unflushed_memtable_bytes=limit, max_memtable_size=limit // 4, max_memtable_age=1e6)
    runs.hold()
    seen: list[int] = []

    def produce() -> None:
        for number in range(100):
            writer.put(rows_of(100, 100 * number)).wait()

    producer = threading.Thread(target=produce, daemon=True)
    producer.start()
    until(lambda: writer.backpressure_stats().blocked_puts > 0)
    seen.append(writer.backpressure_stats().held_bytes)
    assert limit - 3 * each <= seen[0] <= limit
    runs.let_go()
    while producer.is_alive():
        seen.append(writer.backpressure_stats().held_bytes)
        producer.join(0.001)
    assert max(seen) <= limit + 2 * (limit // 4), "what is being flushed counts thrice"
    writer.close()
    assert len(bench.state()) == 10_000


# -- M02


@pytest.mark.parametrize("limit", [1, 1000, 5000])
def test_m02_a_tiny_ceiling_makes_progress(bench: Any, limit: int) -> None:
    """Nothing freezes by itself here: a put that finds no room sees that what is held goes."""
    writer = bench.memtable_writer(max_unflushed_memtable_bytes=limit, max_memtable_age=1e6)

    def use() -> None:
        for number in range(20):
            writer.put(rows_of(10, 10 * number)).wait()
        writer.close()

    in_time(use)
    assert len(bench.state()) == 200
    assert len(bench.manifest.runs) >= 4


def test_m02_a_tiny_ceiling_and_puts_that_nobody_waits_for(bench: Any) -> None:
    writer = bench.memtable_writer(max_unflushed_memtable_bytes=1, max_memtable_age=1e6)
    in_time(lambda: [writer.put(bench.rows(number)) for number in range(20)])
    in_time(writer.close)
    assert len(bench.state()) == 20


def test_m02_many_threads_under_a_tiny_ceiling_all_get_through(bench: Any) -> None:
    writer = bench.memtable_writer(max_unflushed_memtable_bytes=1, max_memtable_age=1e6, max_pending_generations=1)
    threads = [
        threading.Thread(target=lambda n=n: [writer.put(bench.rows(100 * n + i)).wait() for i in range(10)], daemon=True) for n in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(bench.PATIENCE)
        assert not thread.is_alive(), "it hangs"
    writer.close()
    assert len(bench.state()) == 60


def test_m02_a_replay_larger_than_the_ceiling_opens_and_goes_on(bench: Any) -> None:
    store = bench.faulty()
    writer = bench.memtable_writer(store, max_memtable_age=1e6)
    for number in range(20):
        writer.put(bench.rows(number)).wait()
    store.add(Fault("any", "fail"))
    successor = bench.memtable_writer(bench.faulty(), max_unflushed_memtable_bytes=1, max_memtable_age=1e6)
    in_time(lambda: successor.put(bench.rows(20)).wait())
    in_time(successor.close)
    assert len(bench.state()) == 21


def test_m02_reserved_room_under_a_tiny_ceiling_is_given_in_turn(bench: Any) -> None:
    writer = bench.memtable_writer(max_unflushed_memtable_bytes=1, max_memtable_age=1e6)

    def use() -> None:
        for number in range(10):
            rows = writer.rules.upsert(bench.rows(number))
            size = writer.size_of(rows)
            writer.reserve(size)
            writer.put_reserved(rows, "upsert", None, None, size).wait()

    in_time(use)
    writer.close()
    assert len(bench.state()) == 10


def test_m02_too_many_pending_generations_block_until_one_is_committed(bench: Any, arrivals: Any) -> None:
    runs = arrivals("create", RUNS)
    store = bench.faulty(before=runs)
    writer = bench.memtable_writer(store, max_memtable_rows=1, max_pending_generations=2, put_timeout=0.05, max_memtable_age=1e6)
    runs.hold()
    for number in range(3):
        writer.put(bench.rows(number)).wait()
    with pytest.raises(hg.BackpressureTimeoutError):
        writer.put(bench.rows(3))  # two may be pending, and there is one over it
    assert writer.memtable_stats().frozen == 3
    runs.let_go()
    until(lambda: writer.memtable_stats().frozen <= 2)
    writer.put(bench.rows(9)).wait()
    writer.close()
    assert set(bench.state()) == {0, 1, 2, 9}


# -- M03


class Blocked:
    """A caller that waits for room, and what it was told in the end."""

    def __init__(self, bench: Any, writer: hg.ShardWriter, number: int) -> None:
        self.error: BaseException | None = None
        before = writer.backpressure_stats().blocked_puts
        self._thread = threading.Thread(target=self._run, args=(bench, writer, number), daemon=True)
        self._thread.start()
        until(lambda: writer.backpressure_stats().blocked_puts > before)

    def _run(self, bench: Any, writer: hg.ShardWriter, number: int) -> None:
        try:
            writer.put(bench.rows(number)).wait()
        except hg.HeadgateError as error:
            self.error = error

    def end(self, bench: Any) -> None:
        self._thread.join(bench.PATIENCE)
        assert not self._thread.is_alive(), "still blocked"


@pytest.mark.parametrize("why", ["bytes", "generations"])
@pytest.mark.parametrize("how", ["fence", "poison", "close", "abort", "room"])
def test_m03_callers_blocked_by_flushes_are_woken(bench: Any, arrivals: Any, how: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.writer._ABORT_SECONDS", 0.05)
    runs = arrivals("create", RUNS)
    store: FaultyStore = bench.faulty(before=runs)
    limit = {"max_unflushed_memtable_bytes": 1} if why == "bytes" else {"max_pending_generations": 1}
    writer = bench.memtable_writer(store, max_memtable_rows=1, max_memtable_age=1e6, **limit)
    runs.hold()
    acknowledged = 1 if why == "bytes" else 2
    for number in range(acknowledged):
        writer.put(bench.rows(number)).wait()
    runs.wait_for(1)
    blocked = [Blocked(bench, writer, number) for number in (10, 11, 12)]
    if how == "fence":
        bench.memtable_writer(bench.faulty())
        runs.let_go()
    elif how == "poison":
        store.add(Fault("create", "refuse", key=RUNS))
        store.add(Fault("create", "fail", key=MANIFESTS))
        runs.let_go()
    elif how in ("close", "abort"):
        ending = threading.Thread(target=getattr(writer, how), daemon=True)
        ending.start()  # while the flush still hangs
    else:
        runs.let_go()
    for caller in blocked:
        caller.end(bench)
    kinds = {
        "fence": hg.FencedError,
        "poison": hg.WriterPoisonedError,
        "close": hg.ClosedError,
        "abort": hg.ClosedError,
        "room": type(None),
    }
    assert [type(caller.error) for caller in blocked] == [kinds[how]] * 3
    runs.let_go()
    if how in ("close", "abort"):
        ending.join(bench.PATIENCE)
        assert not ending.is_alive()
    store.clear()
    assert len(bench.state()) == acknowledged + (3 if how == "room" else 0)


# -- M04


@pytest.mark.parametrize("seed", range(10))
def test_m04_the_smallest_caps_and_random_failures_always_make_progress(bench: Any, seed: int) -> None:
    dice = random.Random(seed)
    acknowledged: dict[int, str] = {}
    opens = 0

    class Dice:
        def __call__(self, operation: str, key: str) -> None:
            if dice.random() < 0.05:
                kind = dice.choice(["fail", "apply-then-fail", "throttle", "conflict"])
                store.add(Fault("create", kind, key=dice.choice([LOG, RUNS, MANIFESTS]), times=dice.randint(1, 3)))  # type: ignore[arg-type]

    number = 0
    while number < 40:
        opens += 1
        assert opens < 40, "no progress"
        store = bench.faulty(before=Dice())
        try:
            writer = in_time(lambda store=store: bench.memtable_writer(store, **SMALLEST))
            while number < 40:
                in_time(lambda writer=writer, number=number: writer.put(bench.rows(number, value=f"value {number}")).wait())
                acknowledged[number] = f"value {number}"
                number += 1
            in_time(writer.close)
        except hg.HeadgateError:
            assert acknowledged.items() <= bench.state().items(), f"seed {seed}"
    assert acknowledged.items() <= bench.state().items(), f"seed {seed}"
    with bench.memtable_writer(bench.faulty(), **SMALLEST) as last:
        assert bench.state(last.view()) == acknowledged, f"seed {seed}"
    assert bench.state() == acknowledged
    runs = bench.manifest.runs
    assert sum(run.rows for run in runs) <= len(acknowledged) + opens, "each row once; what a failed put left may be there too"


def test_m04_the_smallest_caps_on_a_real_disk(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), False), pa.field("value", pa.string())])
    shard = hg.create_table(tmp_path / "table", schema, key="id").shard("0000")
    for turn in range(2):
        with shard.writer(hg.ShardWriterConfig(**SMALLEST)) as writer:  # type: ignore[arg-type]
            for number in range(6):
                in_time(lambda number=number, turn=turn, writer=writer: writer.put([{"id": number, "value": f"{turn}"}]).wait())
            assert writer.scan().count() == 6
    manifest = shard.log.manifests.load()
    assert manifest.next_generation == 13, "a generation for each put"
    assert len(manifest.runs) < 12, "more than one of them that can be merged makes puts wait, and the writer merge them"
