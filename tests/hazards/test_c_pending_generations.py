"""C05: nobody compacts. What is pending stays bounded, can be seen, and reads cost no more than so much."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate import auto_compact
from headgate.compact import compact_shard, pick

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("note", pa.string())])
LIMIT = 4


class Compaction:
    """The writer's own, stopped until it is let go; how often it was tried."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_stopped, self.tries = True, threading.Semaphore(0)
        monkeypatch.setattr(auto_compact, "compact_shard", self)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.tries.release()
        if self.is_stopped:
            raise hg.StoreUnavailableError("compaction is stopped")
        return compact_shard(*arguments, **options)


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Compaction:
    return Compaction(monkeypatch)


@pytest.fixture
def table(tmp_path: Path) -> hg.Table:
    return hg.create_table(tmp_path / "t", SCHEMA, key="id")


def rows(id: int) -> list[dict[str, Any]]:
    return [{"id": id, "note": f"n{id}"}]


def config(**changes: Any) -> hg.ShardWriterConfig:
    return hg.ShardWriterConfig(**{"max_pending_generations": LIMIT, "put_timeout": 0.05, **changes})


def fill(writer: hg.ShardWriter, count: int, told: list[str] | None = None) -> int:
    """Put and flush until a put is refused, or so often. How often it was."""
    for id in range(count):
        try:
            writer.put(rows(id)).wait()
        except hg.BackpressureTimeoutError as refused:
            if told is not None:
                told.append(refused.hint)
            return id
        writer.flush()
    return count


def metric(name: str, table: hg.Table) -> float:
    return sum(row["value"] for row in hg.metrics.snapshot()[name] if row["labels"].get("table") == table.uri)


def test_c05_with_compaction_stopped_generations_are_bounded_by_backpressure(table: hg.Table, stopped: Compaction) -> None:
    told: list[str] = []
    with table.shard("0000").writer(config()) as writer:
        assert fill(writer, 50, told) == LIMIT + 1
        assert writer.backpressure_stats().timeouts == 1
    assert "compact the table" in told[0]
    assert len(table.runs()) == LIMIT + 1


def test_c05_it_can_be_seen_in_status_and_metrics(table: hg.Table, stopped: Compaction) -> None:
    with table.shard("0000").writer(config()) as writer:
        fill(writer, 50)
        assert table.status().shards[0].generations == LIMIT + 1
        assert metric("headgate_pending_generations", table) == LIMIT + 1
        assert metric("headgate_pending_generations_limit", table) == LIMIT
        assert metric("headgate_backpressure_timeouts_total", table) == 1
        assert metric("headgate_backpressure_seconds_total", table) >= 0.05


def test_c05_a_blocked_put_goes_on_when_somebody_compacts(table: hg.Table, stopped: Compaction) -> None:
    with table.shard("0000").writer(config(put_timeout=None, max_memtable_age=0.05)) as writer:
        for id in range(LIMIT + 1):
            writer.put(rows(id)).wait()
            writer.flush()
        blocked = threading.Thread(target=lambda: writer.put(rows(99)).wait())
        blocked.start()
        stopped.tries.acquire()
        assert blocked.is_alive()
        hg.open_table(table.uri).compact()  # another process
        blocked.join(30)
        assert not blocked.is_alive()
    assert table.scan().count() == LIMIT + 2


def test_c05_the_writer_compacts_itself_before_it_lets_puts_wait_for_ever(table: hg.Table) -> None:
    """``auto_compact`` is off: it is the last resort."""
    most = 0
    with table.shard("0000").writer(config(put_timeout=30.0)) as writer:
        for id in range(30):
            writer.put(rows(id)).wait()
            writer.flush()
            most = max(most, len(table.runs()))
    assert most <= LIMIT + 6
    assert table.scan().count() == 30
    assert table.verify(deep=True).ok


def test_c05_a_compaction_that_fails_is_tried_again_and_not_in_a_rush(table: hg.Table, stopped: Compaction) -> None:
    with table.shard("0000").writer(config(put_timeout=None, max_memtable_age=0.05)) as writer:
        for id in range(LIMIT + 1):
            writer.put(rows(id)).wait()
            writer.flush()
        blocked = threading.Thread(target=lambda: writer.put(rows(99)).wait())
        blocked.start()
        for _ in range(2):
            assert stopped.tries.acquire(timeout=30)
        stopped.is_stopped = False
        blocked.join(30)
        assert not blocked.is_alive()
    assert table.scan().count() == LIMIT + 2


@pytest.mark.parametrize("end", ["close", "abort", "fence"])
def test_c05_an_end_of_the_writer_wakes_who_waits_for_a_compaction(table: hg.Table, stopped: Compaction, end: str) -> None:
    writer = table.shard("0000").writer(config(put_timeout=None, max_memtable_age=0.05))
    for id in range(LIMIT + 1):
        writer.put(rows(id)).wait()
        writer.flush()
    ended: list[BaseException] = []

    def put() -> None:
        try:
            writer.put(rows(99)).wait()
        except hg.HeadgateError as error:
            ended.append(error)

    blocked = threading.Thread(target=put)
    blocked.start()
    assert stopped.tries.acquire(timeout=30)
    successor = None
    if end == "fence":
        successor = hg.open_table(table.uri).shard("0000").writer(config())
    else:
        getattr(writer, end)()
    blocked.join(30)
    assert not blocked.is_alive()
    assert isinstance(ended[0], hg.FencedError if end == "fence" else hg.ClosedError)
    for one in (writer, successor):
        if one is not None:
            one.abort()


def test_c05_a_writer_that_opens_on_too_many_generations_compacts_before_it_takes_more(table: hg.Table) -> None:
    with table.shard("0000").writer(config(max_pending_generations=1000)) as writer:
        assert fill(writer, 20) == 20
    assert len(table.runs()) == 20
    with table.shard("0000").writer(config(put_timeout=30.0)) as writer:
        writer.put(rows(50)).wait()
        assert len(table.runs()) < 20
    assert table.scan().count() == 21


def test_c05_runs_that_do_not_pay_to_be_merged_keep_nobody_waiting(table: hg.Table, stopped: Compaction) -> None:
    """Each much larger than the next: there are few of them however many rows there are, and merging them is for later."""
    with table.shard("0000").writer(config()) as writer:
        for size in (4096, 1024, 256, 64, 16, 4, 1):
            writer.put(pa.RecordBatch.from_pylist([{"id": id, "note": "x"} for id in range(size)], schema=SCHEMA)).wait()
            writer.flush()
        manifest = writer.manifest()
    assert pick(manifest.runs, manifest.cursor.position, full=False) is None
    assert len(manifest.runs) == 7 > LIMIT


def test_c05_flushes_by_age_and_close_do_not_wait(table: hg.Table, stopped: Compaction) -> None:
    writer = table.shard("0000").writer(config(put_timeout=0.05))
    for id in range(LIMIT):
        writer.put(rows(id)).wait()
        writer.flush()
    first = writer.put(rows(100))
    second = writer.put(rows(101))
    first.wait()
    second.wait()
    writer.close()
    assert table.status().shards[0].lag == 0
    assert table.scan().count() == LIMIT + 2


def test_c05_loads_do_not_count(table: hg.Table, stopped: Compaction) -> None:
    """They have a bound of their own: a sink without compaction never blocks a live writer."""
    with table.shard("0000").writer(config()) as writer:
        fill(writer, LIMIT)
        generation = writer.manifest().runs[-1]
        many = tuple(generation.but(id=f"l{number:026d}", first=generation.end, end=generation.end) for number in range(20))
        table.shard("0000").log.manifests.commit(lambda m: m.but(runs=(*m.runs, *many)))
        writer._compactor.recount()
        assert not writer._generations.stalled
        table.shard("0000").log.manifests.commit(lambda m: m.but(runs=tuple(run for run in m.runs if run.id[0] == "g")))
