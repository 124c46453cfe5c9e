"""Hazards of memory and flow: what waits is bounded, and whoever waits for room is woken."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate.errors import ObjectExistsError
from headgate.store import Data
from headgate.store.faulty import Fault, FaultyStore
from headgate.store.memory import MemoryStore

# -- M03


class Blocked:
    """A caller that waits for room, and what it was told in the end."""

    def __init__(self, bench: Any, writer: hg.ShardWriter) -> None:
        self.error: BaseException | None = None
        self.ack: hg.Ack | None = None
        before = writer.backpressure_stats().blocked_puts
        self._thread = threading.Thread(target=self._run, args=(bench, writer), daemon=True)
        self._thread.start()
        while writer.backpressure_stats().blocked_puts == before:
            self._thread.join(0.001)
            assert self._thread.is_alive(), f"it did not block: {self.error!r}"

    def _run(self, bench: Any, writer: hg.ShardWriter) -> None:
        try:
            self.ack = writer.put(bench.rows(7))
        except hg.HeadgateError as error:
            self.error = error

    def end(self, bench: Any) -> None:
        self._thread.join(bench.PATIENCE)
        assert not self._thread.is_alive(), "still blocked"


@pytest.fixture
def full(bench: Any, arrivals: Any) -> Iterator[tuple[hg.ShardWriter, FaultyStore]]:
    """A writer with no room left, its one entry hanging in the store."""
    came = arrivals("create", ".arrow")
    store = bench.faulty(before=came)
    writer = bench.writer(store, max_unflushed_memtable_bytes=1, max_wal_persist_retries=0)
    store.add(Fault("create", "hang", key=".arrow"))
    writer.put(bench.rows(1))
    came.wait_for(1)
    yield writer, store
    store.clear()


def test_m03_a_fence_wakes_callers_blocked_by_backpressure(bench: Any, full: tuple[hg.ShardWriter, FaultyStore]) -> None:
    writer, store = full
    blocked = [Blocked(bench, writer) for _ in range(3)]
    bench.appender(bench.faulty())
    store.release()
    for caller in blocked:
        caller.end(bench)
        assert isinstance(caller.error, hg.FencedError)


def test_m03_a_poison_wakes_callers_blocked_by_backpressure(bench: Any, arrivals: Any) -> None:
    came = arrivals("create", ".arrow")
    store = bench.faulty(before=came)
    writer = bench.writer(store, max_unflushed_memtable_bytes=1, max_wal_persist_retries=0)
    store.add(Fault("create", "fail", key=".arrow"))
    came.hold()
    writer.put(bench.rows(1))
    blocked = [Blocked(bench, writer) for _ in range(3)]
    came.let_go()
    for caller in blocked:
        caller.end(bench)
        assert isinstance(caller.error, hg.WriterPoisonedError)


@pytest.mark.parametrize("how", ["close", "abort"])
def test_m03_an_end_wakes_callers_blocked_by_backpressure(
    bench: Any, full: tuple[hg.ShardWriter, FaultyStore], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headgate.writer._ABORT_SECONDS", 0.05)
    writer, store = full
    blocked = [Blocked(bench, writer) for _ in range(3)]
    ending = threading.Thread(target=getattr(writer, how), daemon=True)
    ending.start()
    for caller in blocked:
        caller.end(bench)  # woken while the store still hangs
        assert isinstance(caller.error, hg.ClosedError)
    store.clear()
    ending.join(bench.PATIENCE)
    assert not ending.is_alive()


def test_m03_room_wakes_callers_one_after_another(bench: Any, full: tuple[hg.ShardWriter, FaultyStore]) -> None:
    writer, store = full
    blocked = [Blocked(bench, writer) for _ in range(3)]
    store.clear()
    for caller in blocked:
        caller.end(bench)
        assert caller.ack is not None
        caller.ack.wait(bench.PATIENCE)
    assert len(bench.ids()) == 4
    assert writer.backpressure_stats().blocked_puts == 3
    assert writer.backpressure_stats().unacknowledged_bytes == 0


def test_m03_a_timeout_ends_the_wait_and_accepts_nothing(bench: Any, arrivals: Any) -> None:
    came = arrivals("create", ".arrow")
    store = bench.faulty(before=came)
    writer = bench.writer(store, max_unflushed_memtable_bytes=1, put_timeout=0.01)
    store.add(Fault("create", "hang", key=".arrow"))
    writer.put(bench.rows(1))
    came.wait_for(1)
    with pytest.raises(hg.BackpressureTimeoutError) as caught:
        writer.put(bench.rows(2))
    assert caught.value.retryable
    assert writer.backpressure_stats().timeouts == 1
    store.clear()
    writer.close()
    assert bench.ids() == [1]


def test_m03_one_put_larger_than_the_limit_goes_through_alone(bench: Any) -> None:
    writer = bench.writer(max_unflushed_memtable_bytes=1)
    for number in range(3):
        writer.put(bench.rows(*range(100 * number, 100 * number + 50)))
    writer.close()
    assert len(bench.ids()) == 150


# -- M05


class Forgetful(MemoryStore):
    """Keeps no entry's bytes, so that what is measured is the writer's; counts what was under way at once."""

    def __init__(self, heap: Any, watch: Callable[[], None]) -> None:
        super().__init__("", heap=heap)
        self._watch = watch
        self._seen: set[str] = set()

    def create(self, key: str, data: Data) -> None:
        self._watch()
        if not key.endswith(".arrow"):
            return super().create(key, data)
        if key in self._seen:
            raise ObjectExistsError(f"{key} exists", object=key)
        self._seen.add(key)
        return None


@pytest.mark.parametrize("threads", [1, 4])
def test_m05_a_fast_producer_on_a_slow_store_stays_within_its_budget(bench: Any, arrivals: Any, threads: int) -> None:
    budget, each, puts = 1_000_000, 50_000, 80
    seen: list[tuple[int, int]] = []
    came = arrivals("create", ".arrow")

    def watch() -> None:
        if writer is not None:
            seen.append((writer.backpressure_stats().unacknowledged_bytes, pa.total_allocated_bytes() - start))

    writer: hg.ShardWriter | None = None
    start = pa.total_allocated_bytes()
    store = FaultyStore(Forgetful(bench.inner._heap, watch), latency=0.002, before=came)
    writer = bench.writer(store, max_unflushed_memtable_bytes=budget, max_wal_buffer_size=200_000)
    value = "x" * (each // 100)

    def produce(first: int) -> None:
        for number in range(first, puts, threads):
            writer.put(bench.rows(*range(100 * number, 100 * number + 100), value=value))

    came.hold()  # slower than any producer, at first
    workers = [threading.Thread(target=produce, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    while writer.backpressure_stats().blocked_puts < threads:
        workers[0].join(0.001)
    came.let_go()
    for worker in workers:
        worker.join(bench.PATIENCE)
        assert not worker.is_alive()
    writer.flush()
    assert writer.wal_stats().puts_acknowledged == puts
    tracked, traced = (max(column) for column in zip(*seen, strict=True))
    assert budget // 2 < tracked <= budget
    # The rows that wait, and the bytes of the entries under way beside them.
    assert traced <= 2 * budget + 8 * each
    assert writer.backpressure_stats().unacknowledged_bytes == 0


def test_m05_what_is_tracked_is_what_an_entry_takes(bench: Any, arrivals: Any) -> None:
    came = arrivals("create", ".arrow")
    store = bench.faulty(before=came)
    writer = bench.writer(store, max_wal_buffer_size=1, max_inflight=1)
    store.add(Fault("create", "hang", key=".arrow"))
    for number in range(10):
        writer.put(bench.rows(*range(1000 * number, 1000 * number + 1000), value="y" * 50))
    tracked = writer.backpressure_stats().unacknowledged_bytes
    store.clear()
    writer.flush()
    written = writer.wal_stats().bytes_written
    assert tracked <= written <= tracked + 10 * 2048


def test_m05_a_slice_of_a_large_table_counts_as_its_own_rows(bench: Any, arrivals: Any) -> None:
    came = arrivals("create", ".arrow")
    store = bench.faulty(before=came)
    writer = bench.writer(store, max_wal_buffer_size=1, max_inflight=1)
    store.add(Fault("create", "hang", key=".arrow"))
    large = bench.rows(*range(100_000))
    for start in range(0, 1000, 10):
        writer.put(large.slice(start, 10))
    assert writer.backpressure_stats().unacknowledged_bytes < 100 * 2000
