"""Every knob of ShardWriterConfig does what its documentation says; what cannot work is refused before the claim.

Those of indexes and of compaction have tests beside what they govern.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate.store.faulty import Fault

LOG, RUNS, MANIFESTS = "/0000/", "/runs/", "/manifest/"  # entries of the log of shard 0000; its marker is 0000.json
ELSEWHERE = {"index_configs", "sync_indexed_write", "async_index_buffer_rows", "async_index_interval", "auto_compact", "on_bad_rows"}
"""Governed and tested with indexes, compaction and quarantine."""


def until(holds: Callable[[], bool], patience: float = 30.0) -> None:
    deadline = time.monotonic() + patience
    while not holds():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.001)


def entries_of(bench: Any) -> list[int]:
    """How many puts each entry holds."""
    return [len(entry.puts) for entry in bench.entries(0)]


def both_modes(bench: Any) -> dict[str, Callable[..., hg.ShardWriter]]:
    return {"WAL-only": bench.writer, "MemTable": bench.memtable_writer}


MODES = pytest.mark.parametrize("mode", ["WAL-only", "MemTable"])


def test_every_knob_is_documented_and_has_a_test_here_or_elsewhere() -> None:
    told = hg.ShardWriterConfig.__doc__ or ""
    here = Path(__file__).read_text()
    for knob in fields(hg.ShardWriterConfig):
        assert knob.name in told, f"{knob.name} is not documented"
        assert knob.name in ELSEWHERE or f"{knob.name}=" in here, f"{knob.name} is not tested"


# -- modes


def test_enable_memtable_is_the_default_and_makes_runs_of_rows(bench: Any) -> None:
    assert hg.ShardWriterConfig().enable_memtable
    with bench.memtable_writer(enable_memtable=True) as writer:
        writer.put(bench.rows(1))
    assert len(bench.manifest.runs) == 1


def test_without_a_memtable_nothing_is_flushed_and_its_methods_say_so(bench: Any) -> None:
    assert not hg.ShardWriterConfig(enable_memtable=False).enable_memtable
    with bench.writer() as writer:
        writer.put(bench.rows(1)).wait()
        writer.flush()
        for use in (writer.scan, writer.view, writer.memtable_stats, writer.active_memtable):
            with pytest.raises(hg.InvalidInputError, match="WAL-only"):
                use()
    assert bench.manifest.runs == ()
    assert bench.manifest.cursor.position == 0


def test_memtable_knobs_are_ignored_in_wal_only_mode(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.writer._TICK_SECONDS_MIN", 0.001)
    ignored = {
        "max_memtable_size": 1,
        "max_memtable_rows": 1,
        "max_memtable_batches": 1,
        "max_memtable_age": 0.0,
        "max_pending_generations": 1,
        "sync_indexed_write": False,
        "async_index_buffer_rows": 1,
        "async_index_interval": 0.0,
    }
    with bench.writer(**ignored) as writer:
        for number in range(10):
            writer.put(bench.rows(number)).wait()
        assert writer.backpressure_stats().blocked_puts == 0
    assert bench.manifest.runs == ()
    assert bench.ids() == list(range(10))


# -- the log


@MODES
def test_durable_write_returns_only_when_durable(bench: Any, mode: str, arrivals: Any) -> None:
    came = arrivals("create", LOG)
    store = bench.faulty(before=came)
    writer = both_modes(bench)[mode](store, durable_write=True)
    came.hold()
    acks: list[hg.Ack] = []
    putting = threading.Thread(target=lambda: acks.append(writer.put(bench.rows(1))), daemon=True)
    putting.start()
    came.wait_for(1)
    putting.join(0.05)
    assert putting.is_alive()
    assert acks == []
    came.let_go()
    putting.join(bench.PATIENCE)
    assert acks[0].done()
    assert writer.delete(pa.table({"id": [1]})).done()
    assert bench.ids() == [1, 1]


@MODES
def test_without_durable_write_a_put_returns_at_once(bench: Any, mode: str, arrivals: Any) -> None:
    came = arrivals("create", LOG)
    store = bench.faulty(before=came)
    writer = both_modes(bench)[mode](store, durable_write=False)
    came.hold()
    ack = writer.put(bench.rows(1))
    assert not ack.done()
    came.let_go()
    ack.wait(bench.PATIENCE)


@MODES
def test_max_wal_buffer_size_bounds_an_entry_and_splits_no_put(bench: Any, mode: str, arrivals: Any) -> None:
    came = arrivals("create", LOG)
    store = bench.faulty(before=came)
    size = both_modes(bench)[mode](bench.faulty()).size_of(bench.rows(1))
    writer = both_modes(bench)[mode](store, max_wal_buffer_size=3 * size, max_inflight=1)
    came.hold()
    acks = [writer.put(bench.rows(0))]
    until(lambda: writer.wal_stats().inflight_entries == 1)
    acks += [writer.put(bench.rows(number)) for number in range(1, 8)]
    acks.append(writer.put(bench.rows(*range(100, 200))))  # larger than an entry may be: alone, and whole
    came.let_go()
    for ack in acks:
        ack.wait(bench.PATIENCE)
    assert entries_of(bench) == [1, 3, 3, 1, 1]


@MODES
def test_max_wal_flush_interval_bounds_the_rate_and_never_delays_the_first(bench: Any, mode: str) -> None:
    interval = 0.4
    writer = both_modes(bench)[mode](max_wal_flush_interval=interval)
    started = time.monotonic()
    writer.put(bench.rows(0)).wait()
    assert time.monotonic() - started < interval
    for number in range(1, 20):
        last = writer.put(bench.rows(number))
    last.wait()
    took = time.monotonic() - started
    assert took >= 0.95 * interval
    assert 2 <= len(entries_of(bench)) <= 2 + int(took / interval)
    time.sleep(interval)
    started = time.monotonic()
    writer.put(bench.rows(20)).wait()
    assert time.monotonic() - started < interval


@MODES
@pytest.mark.parametrize("slots", [1, 3])
def test_max_inflight_entries_are_under_way_at_once(bench: Any, mode: str, slots: int, arrivals: Any) -> None:
    came = arrivals("create", LOG)
    store = bench.faulty(before=came)
    writer = both_modes(bench)[mode](store, max_inflight=slots, max_wal_buffer_size=1)
    came.hold()
    acks = [writer.put(bench.rows(number)) for number in range(8)]
    came.wait_for(slots)
    time.sleep(0.02)
    assert came.count == writer.wal_stats().inflight_entries == slots
    came.let_go()
    for ack in acks:
        ack.wait(bench.PATIENCE)
    assert bench.ids() == list(range(8))


@MODES
@pytest.mark.parametrize("retries", [0, 1, 4])
def test_max_wal_persist_retries_is_how_often_a_put_is_sent_again(bench: Any, mode: str, retries: int) -> None:
    store = bench.faulty()
    writer = both_modes(bench)[mode](store, max_wal_persist_retries=retries)
    store.add(Fault("create", "fail", key=LOG, times=retries))
    writer.put(bench.rows(1)).wait()
    store.asked.clear()
    store.add(Fault("create", "fail", key=LOG))
    with pytest.raises(hg.WriterPoisonedError):
        writer.put(bench.rows(2)).wait()
    assert sum(operation == "create" and LOG in key for operation, key in store.asked) == retries + 1


class Slept:
    """The real clock, and how long each sleep was; none of them takes any time."""

    def __init__(self, clock: Any) -> None:
        self._clock, self.seconds = clock, []

    def sleep(self, seconds: float) -> None:
        self.seconds.append(seconds)

    def jitter(self) -> float:
        return 1.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._clock, name)


@MODES
def test_wal_persist_retry_base_delay_is_the_first_wait_and_doubles(bench: Any, mode: str) -> None:
    store, clock = bench.faulty(), Slept(bench.clock)
    writer = both_modes(bench)[mode](store, clock=clock, max_wal_persist_retries=3, wal_persist_retry_base_delay=0.07)
    clock.seconds.clear()
    store.add(Fault("create", "fail", key=LOG, times=3))
    writer.put(bench.rows(1)).wait()
    assert clock.seconds == pytest.approx([0.07, 0.14, 0.28])


# -- the MemTable


def flushed_after(bench: Any, puts: int, **config: Any) -> list[tuple[int, int]]:
    """Which positions became runs, of ``puts`` entries of one put each, before anybody asked for a flush."""
    writer = bench.memtable_writer(**{"max_memtable_age": 1e6, "max_wal_buffer_size": 1, **config})
    for number in range(puts):
        writer.put(bench.rows(number)).wait()
    until(lambda: writer.memtable_stats().frozen == 0)
    return [(run.first, run.end) for run in bench.manifest.runs]


def test_max_memtable_rows_freezes(bench: Any) -> None:
    assert flushed_after(bench, 11, max_memtable_rows=5) == [(0, 5), (5, 10)]


def test_max_memtable_batches_freezes(bench: Any) -> None:
    assert flushed_after(bench, 11, max_memtable_batches=4) == [(0, 4), (4, 8)]


def test_max_memtable_size_freezes_before_it_is_passed(bench: Any) -> None:
    size = bench.memtable_writer(bench.faulty()).size_of(bench.rows(1))
    assert flushed_after(bench, 11, max_memtable_size=4 * size + size // 2) == [(1, 5), (5, 9)]  # 0 is the seal of the first writer
    assert all(run.end - run.first == 4 for run in bench.manifest.runs)


def test_max_memtable_size_smaller_than_a_put_takes_it_alone(bench: Any) -> None:
    assert flushed_after(bench, 3, max_memtable_size=1) == [(0, 1), (1, 2), (2, 3)]


def test_max_memtable_age_freezes(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.writer._TICK_SECONDS_MIN", 0.005)
    writer = bench.memtable_writer(max_memtable_age=0.02)
    writer.put(bench.rows(1)).wait()
    until(lambda: len(bench.manifest.runs) == 1)
    writer.put(bench.rows(2)).wait()
    until(lambda: len(bench.manifest.runs) == 2)
    assert writer.memtable_stats().active_rows == 0


def test_none_of_the_caps_reached_nothing_is_flushed(bench: Any) -> None:
    assert flushed_after(bench, 20) == []


@MODES
def test_max_unflushed_memtable_bytes_and_put_timeout(bench: Any, mode: str, arrivals: Any) -> None:
    came = arrivals("create", LOG if mode == "WAL-only" else RUNS)
    store = bench.faulty(before=came)
    size = both_modes(bench)[mode](bench.faulty()).size_of(bench.rows(1))
    writer = both_modes(bench)[mode](store, max_unflushed_memtable_bytes=4 * size, put_timeout=0.05, max_memtable_rows=1, max_inflight=1)
    came.hold()
    accepted: list[hg.Ack] = []

    def fill() -> None:
        for number in range(20):
            accepted.append(writer.put(bench.rows(number)))
            if mode == "MemTable":
                accepted[-1].wait()

    with pytest.raises(hg.BackpressureTimeoutError) as caught:
        fill()
    assert caught.value.retryable
    assert 1 <= len(accepted) <= 4
    stats = writer.backpressure_stats()
    assert stats.limit_bytes == 4 * size
    assert stats.unacknowledged_bytes <= 4 * size
    assert stats.held_bytes <= 8 * size  # what is under way is held twice: as rows, and encoded
    assert (stats.blocked_puts, stats.timeouts) == (1, 1)
    assert stats.blocked_seconds >= 0.04
    came.let_go()
    writer.flush()
    assert writer.backpressure_stats().held_bytes == 0
    writer.put(bench.rows(50)).wait()
    writer.close()
    assert len(bench.state()) == len(accepted) + 1


def test_max_pending_generations_blocks(bench: Any, arrivals: Any) -> None:
    came = arrivals("create", RUNS)
    store = bench.faulty(before=came)
    writer = bench.memtable_writer(store, max_pending_generations=3, max_memtable_rows=1, put_timeout=0.0, max_memtable_age=1e6)
    came.hold()
    for number in range(4):
        writer.put(bench.rows(number)).wait()
    assert writer.memtable_stats().frozen == 4
    with pytest.raises(hg.BackpressureTimeoutError):
        writer.put(bench.rows(4))
    came.let_go()
    until(lambda: writer.memtable_stats().frozen == 0)

    def is_taken() -> bool:
        try:
            return bool(writer.put(bench.rows(4)).wait())
        except hg.BackpressureTimeoutError as error:
            return "compacted" not in error.message  # four generations are one too many, until the writer has merged them

    until(is_taken)
    assert len(writer.manifest().runs) < 4


@MODES
def test_put_timeout_none_waits_as_long_as_it_takes(bench: Any, mode: str, arrivals: Any) -> None:
    came = arrivals("create", LOG)
    store = bench.faulty(before=came)
    writer = both_modes(bench)[mode](store, put_timeout=None, max_unflushed_memtable_bytes=1)
    came.hold()
    writer.put(bench.rows(1))
    putting = threading.Thread(target=lambda: writer.put(bench.rows(2)), daemon=True)
    putting.start()
    until(lambda: writer.backpressure_stats().blocked_puts == 1)
    putting.join(0.05)
    assert putting.is_alive()
    came.let_go()
    putting.join(bench.PATIENCE)
    assert not putting.is_alive()
    assert writer.backpressure_stats().timeouts == 0


# -- fsync


@pytest.mark.parametrize("memtable", [False, True])
@pytest.mark.parametrize("fsync", [False, True])
def test_fsync_decides_whether_entries_manifests_and_runs_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync: bool, memtable: bool
) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), False)])
    shard = hg.create_table(tmp_path / "table", schema, key="id").shard("0000")
    synced: list[str] = []
    real = os.fsync

    def counting(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", counting)
    with shard.writer(hg.ShardWriterConfig(fsync=fsync, enable_memtable=memtable)) as writer:
        writer.put([{"id": 1}]).wait()
    monkeypatch.undo()
    kinds = {part for path in synced for part in ("/wal/", MANIFESTS, RUNS) if part in f"{path}/"}
    assert kinds == (({"/wal/", MANIFESTS} | ({RUNS} if memtable else set())) if fsync else set())


# -- producers


@MODES
def test_producer_retention_forgets_who_is_both_old_and_far_behind(bench: Any, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.wal.producers.POSITIONS_KEPT_MIN", 3)
    opener = both_modes(bench)[mode]
    with opener(producer_retention=timedelta(0)) as writer:
        writer.put(bench.rows(1), producer="old", sequence=0).wait()
        for number in range(6):
            writer.put(bench.rows(number), producer="busy", sequence=number).wait()
    assert set(bench.manifest.producers) == {"busy"}
    with opener(bench.faulty(), producer_retention=timedelta(days=7)) as writer:
        for number in range(6):
            writer.put(bench.rows(number), producer="new", sequence=number).wait()
    assert set(bench.manifest.producers) == {"busy", "new"}


# -- what cannot be


WRONG: list[dict[str, Any]] = [
    *({name: 0} for name in ("max_wal_buffer_size", "max_inflight", "max_memtable_size", "max_memtable_rows", "max_memtable_batches")),
    *({name: 0} for name in ("max_unflushed_memtable_bytes", "max_pending_generations", "async_index_buffer_rows")),
    *({name: -1} for name in ("max_wal_flush_interval", "max_wal_persist_retries", "wal_persist_retry_base_delay", "max_memtable_age")),
    *({name: -0.1} for name in ("put_timeout", "async_index_interval", "max_memtable_age")),
    *({name: float("nan")} for name in ("max_memtable_age", "max_wal_flush_interval", "put_timeout")),
    *({name: float("inf")} for name in ("max_memtable_age", "put_timeout")),
    *({name: 1.5} for name in ("max_memtable_size", "max_memtable_rows", "max_inflight", "max_pending_generations")),
    *({name: "1"} for name in ("max_memtable_size", "max_memtable_age", "put_timeout", "enable_memtable", "durable_write", "fsync")),
    *({name: True} for name in ("max_memtable_rows", "max_memtable_age", "put_timeout")),
    *({name: 1} for name in ("enable_memtable", "durable_write", "fsync", "auto_compact", "sync_indexed_write")),
    {"max_inflight": 65},
    {"on_bad_rows": "ignore"},
    {"producer_retention": 7},
    {"producer_retention": timedelta(seconds=-1)},
    {"enable_memtable": False, "index_configs": [hg.text_index("body")] if hasattr(hg, "text_index") else ["body"]},
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: ", ".join(f"{name}={value!r}" for name, value in wrong.items()))
def test_a_value_that_cannot_be_is_refused_by_name_with_a_hint(wrong: dict[str, Any]) -> None:
    with pytest.raises(hg.InvalidInputError) as caught:
        hg.ShardWriterConfig(**wrong)
    assert caught.value.hint
    name = list(wrong)[-1]
    assert name in str(caught.value) or "index" in str(caught.value)


def test_an_unknown_knob_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        hg.ShardWriterConfig(max_memtable_bytes=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        hg.ShardWriterConfig(True)  # type: ignore[misc]


def test_a_writer_that_cannot_be_opened_leaves_the_incumbent_alone(bench: Any) -> None:
    incumbent = bench.memtable_writer(max_memtable_age=1e6)
    incumbent.put(bench.rows(1)).wait()
    before = bench.contents()
    with pytest.raises(hg.InvalidInputError):  # a MemTable, and no place for its runs
        hg.ShardWriter(bench.log(), bench.rules, hg.ShardWriterConfig())
    assert bench.contents() == before
    incumbent.put(bench.rows(2)).wait()
    incumbent.check_fenced()
