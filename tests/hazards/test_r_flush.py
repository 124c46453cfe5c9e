"""Hazards of flush, rotation and replay: whatever fails, dies or waits, every acknowledged row is there, once, and the newest wins."""

from __future__ import annotations

import gc
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate.failpoint import hooked
from headgate.flush import Generations
from headgate.manifest import ChainPoint
from headgate.store import RetryPolicy
from headgate.store.faulty import Fault, FaultyStore
from headgate.wal.collect import collect_entries
from headgate.wal.entry import Entry
from headgate.wal.reader import ChainReader

LOG, RUNS, MANIFESTS = "/0000/", "/runs/", "/manifest/"  # entries of the log of shard 0000; its marker is 0000.json
QUICK_TRIES = RetryPolicy(retries=7, base_delay=0.0001, max_delay=0.001)


@pytest.fixture(autouse=True)
def quick_flushes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tries as ever, with pauses that take no time."""
    monkeypatch.setattr("headgate.flush._TRIES", QUICK_TRIES)


def cut_off(store: FaultyStore) -> None:
    """What a crash is to everybody else: whatever uses this store changes nothing any more."""
    store.add(Fault("any", "fail"))


def expected(*numbers: int) -> dict[int, str]:
    return {number: f"v{number}" for number in numbers}


def stored_rows(bench: Any) -> int:
    """Every row of every run and of the log's tail, versions of one key counted apart."""
    view = bench.reader().view()
    return sum(run.rows for run in view.runs) + sum(put.rows.num_rows for part in view.fresh for put in part.puts)


def until(holds: Callable[[], bool], patience: float = 30.0) -> None:
    deadline = time.monotonic() + patience
    while not holds():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.001)


def a_dead_writers_log(bench: Any, rows: int, **config: Any) -> None:
    """Acknowledged, never flushed, an entry a row."""
    store = bench.faulty()
    writer = bench.memtable_writer(store, **{"max_memtable_age": 1e6, **config})
    for number in range(rows):
        writer.put(bench.rows(number)).wait()
    cut_off(store)


# -- R01


@pytest.mark.parametrize("place", [RUNS, MANIFESTS])
def test_r01_a_flush_fails_the_next_is_ready_and_a_crash_loses_nothing(bench: Any, place: str) -> None:
    store = bench.faulty()
    writer = bench.memtable_writer(store, max_memtable_rows=2)
    store.add(Fault("create", "fail", key=place))
    acks = [writer.put(bench.rows(number)) for number in range(6)]
    with pytest.raises(hg.WriterPoisonedError):
        writer.flush()
    acknowledged = writer.wal_stats().puts_acknowledged
    assert acknowledged >= 2
    assert sum(ack.done() for ack in acks) == 6
    cut_off(store)
    assert bench.manifest.cursor.position == 0
    assert bench.manifest.runs == ()
    with bench.memtable_writer(bench.faulty()) as successor:
        assert set(range(acknowledged)) <= bench.state(successor.view()).keys()
    assert set(range(acknowledged)) <= bench.state().keys()


def test_r01_a_failed_flush_is_tried_again_and_the_next_one_waits_for_it(bench: Any) -> None:
    bench.store.add(Fault("create", "fail", key=f"{RUNS}g0000000001-", times=3))
    writer = bench.memtable_writer(max_memtable_rows=2)
    for number in range(8):
        writer.put(bench.rows(number)).wait()
    writer.flush()
    assert writer.memtable_stats().flush_failures == 3
    runs = bench.manifest.runs
    assert [(run.first, run.end) for run in runs] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert [run.id.split("-")[0] for run in runs] == [f"g{number:010d}" for number in (1, 2, 3, 4)]
    attempts = [key for operation, key in bench.store.asked if operation == "create" and RUNS in key]
    order = [attempt.split(RUNS)[1].split("-")[0] for attempt in attempts]
    assert order == sorted(order), "no generation is begun before the one before it is committed"
    assert len(set(attempts)) == len(attempts), "a fresh name for every try"


def test_r01_acks_go_on_while_a_flush_fails(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.flush._TRIES", RetryPolicy(retries=100_000, base_delay=0.001, max_delay=0.001))
    bench.store.add(Fault("create", "fail", key=RUNS))
    writer = bench.memtable_writer(max_memtable_rows=2)
    for number in range(20):
        writer.put(bench.rows(number)).wait()
        assert len(bench.state(writer.view())) == number + 1
    until(lambda: writer.memtable_stats().flush_failures > 2)
    assert writer.memtable_stats().frozen == 10
    bench.store.clear()
    writer.close()
    assert bench.state() == expected(*range(20))
    assert len(bench.manifest.runs) == 10


def test_r01_freezes_do_not_cut_the_pauses_between_tries_short(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An outage of a second must not be the end of a writer that rotates a thousand times in it."""
    monkeypatch.setattr("headgate.flush._TRIES", RetryPolicy(retries=7, base_delay=100.0, max_delay=100.0))
    writer = bench.memtable_writer(max_memtable_rows=1, max_memtable_age=1e6)
    bench.store.add(Fault("create", "fail", key=RUNS))
    for number in range(20):
        writer.put(bench.rows(number)).wait()
    until(lambda: writer.memtable_stats().flush_failures == 1)
    for number in range(20, 40):
        writer.put(bench.rows(number)).wait()
        time.sleep(0.001)
    assert writer.memtable_stats().flush_failures == 1
    writer.abort()
    assert writer.threads_alive() == 0


# -- R02


CHILD = """
import sys, headgate as hg
table = hg.open_table(sys.argv[1])
first = int(sys.argv[2])
writer = table.shard("0000").writer(hg.ShardWriterConfig(max_memtable_rows=25))
number = first
while True:
    writer.put([{"id": number, "value": f"v{number}"}, {"id": -1, "value": str(number)}]).wait()
    print(number, writer.memtable_stats().flushed, flush=True)
    number += 1
"""


def test_r02_kill_nine_after_acks_and_flushes_then_reopen_and_count(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), False), pa.field("value", pa.string())])
    table = hg.create_table(tmp_path / "table", schema, key="id")
    first = 0
    for flushes in (0, 2):
        child = subprocess.Popen([sys.executable, "-c", CHILD, table.uri, str(first)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        acknowledged, flushed = -1, 0
        while acknowledged < first + 10 or flushed < flushes:
            acknowledged, flushed = map(int, child.stdout.readline().split())
        child.send_signal(signal.SIGKILL)
        told = [int(line.split()[0]) for line in child.stdout.read().splitlines() if len(line.split()) == 2]
        child.wait()
        child.stdout.close()
        acknowledged = max([acknowledged, *told])
        with table.shard("0000").writer() as writer:
            rows = {row["id"]: row["value"] for row in writer.scan().to_arrow().to_pylist()}
        newest = int(rows.pop(-1))
        assert newest in (acknowledged, acknowledged + 1)  # what it had sent when it died may be there
        assert rows == expected(*range(newest + 1))
        first = newest + 1
    runs = table.shard("0000").log.manifests.load().runs
    assert len(runs) >= 4
    assert sum(run.rows for run in runs) == first + len(runs), "each row in one run, and -1 in each"


# -- R03


def test_r03_the_cursor_decides_what_is_replayed_not_the_list_of_runs(bench: Any) -> None:
    """As after a compaction that merged all generations away."""
    with bench.memtable_writer(max_memtable_rows=2) as writer:
        for number in range(6):
            writer.put(bench.rows(number))
    bench.log().manifests.commit(lambda manifest: manifest.but(runs=()))
    with bench.memtable_writer(bench.faulty()) as successor:
        assert successor.memtable_stats().replayed_entries == 0
        assert bench.state(successor.view()) == {}
        successor.put(bench.rows(9)).wait()
        assert successor.memtable_stats().generation == writer.memtable_stats().generation
    assert bench.state() == expected(9)
    assert stored_rows(bench) == 1


def test_r03_what_was_flushed_between_survey_and_claim_is_not_replayed(bench: Any, crew: Any) -> None:
    writer = bench.memtable_writer()
    for number in range(4):
        writer.put(bench.rows(number)).wait()
    crew.stops = {"fence.surveyed"}
    opener = crew.actor(lambda: bench.memtable_writer(bench.faulty()))
    opener.step_to("fence.surveyed")
    writer.flush()
    writer.put(bench.rows(4)).wait()
    collect_entries(bench.log(), dry_run=False)
    successor = opener.finish()
    assert successor.memtable_stats().replayed_rows == 1
    assert bench.state(successor.view()) == expected(*range(5))
    successor.close()
    assert stored_rows(bench) == 5


# -- R04


def test_r04_reopening_without_a_write_adds_seals_only(bench: Any) -> None:
    a_dead_writers_log(bench, 5)
    for reopens in range(1, 7):
        store = bench.faulty()
        writer = bench.memtable_writer(store)
        assert writer.memtable_stats().replayed_rows == 5
        assert bench.state(writer.view()) == expected(*range(5))
        entries = bench.entries(0, include_seals=True)
        assert [entry.position for entry in entries if not entry.is_seal] == list(range(5))
        assert [entry.position for entry in entries if entry.is_seal] == list(range(5, 5 + reopens))
        assert writer.wal_stats().next_wal_entry_position == 5 + reopens
        cut_off(store)
    with bench.memtable_writer(bench.faulty()):
        pass
    assert stored_rows(bench) == 5
    assert len(bench.manifest.runs) == 1


# -- R05


def entries_alive() -> int:
    """Bytes of all entries of logs that anybody holds."""
    gc.collect()
    return sum(entry.size_bytes for entry in gc.get_objects() if isinstance(entry, Entry))


@pytest.mark.parametrize(
    ("config", "bound"),
    [
        ({"max_memtable_rows": 10}, lambda stats: stats.active_rows + stats.frozen_rows <= 10),
        ({"max_memtable_rows": 1}, lambda stats: stats.active_rows + stats.frozen_rows <= 1),
        ({"max_memtable_batches": 7}, lambda stats: stats.active_batches + stats.frozen_rows <= 7),
        ({"max_memtable_size": 20_000}, lambda stats: stats.frozen_bytes <= 20_000),
        ({"max_memtable_size": 1}, lambda stats: stats.active_rows + stats.frozen_rows <= 1),
    ],
)
def test_r05_a_log_of_many_memtables_reopens_in_bounded_memory(
    bench: Any, monkeypatch: pytest.MonkeyPatch, config: dict[str, int], bound: Callable[[Any], bool]
) -> None:
    a_dead_writers_log(bench, 90)
    # What it reads ahead is bounded by constants of its own, in megabytes: here they are small.
    monkeypatch.setattr("headgate.writer._REPLAY_KEPT_BYTES_MAX", 10_000)
    monkeypatch.setattr("headgate.wal.reader._DECODED_AT_ONCE", 4)
    monkeypatch.setattr("headgate.wal.fence.ChainReader", partial(ChainReader, parallel=1))
    held: list[int] = []
    alive: list[int] = []
    opened: list[Generations] = []
    begin = Generations.begin
    monkeypatch.setattr(Generations, "begin", lambda self, *rest: (opened.append(self), begin(self, *rest))[1])
    largest = max(entry.size_bytes for entry in bench.entries(0))
    before = entries_alive()

    def look(name: str) -> None:
        if name == "flush.merged":
            (generations,) = opened
            stats = generations.stats()
            assert stats.frozen <= 2
            assert bound(stats)
            held.append(stats.active_bytes + stats.frozen_bytes)
            if len(held) % 20 == 3:
                alive.append(entries_alive() - before)

    with hooked(look):
        writer = bench.memtable_writer(bench.faulty(), **config)
    assert len(held) >= 3
    cap = config.get("max_memtable_size", 10 * largest)
    assert max(held) <= cap + largest
    assert max(alive) <= 10_000 + cap + 10 * largest < 90 * largest
    stats = writer.memtable_stats()
    assert stats.replayed_rows == stats.replayed_entries == 90
    assert stats.flushed == len(held) == len(bench.manifest.runs)
    assert writer.backpressure_stats().held_bytes == stats.active_bytes
    assert bench.state(writer.view()) == bench.state() == expected(*range(90))
    assert writer.wal_stats().next_wal_entry_position == 91
    writer.close()
    assert stored_rows(bench) == 90


def test_r05_what_fits_is_not_flushed(bench: Any) -> None:
    a_dead_writers_log(bench, 20)
    writer = bench.memtable_writer(bench.faulty())
    assert writer.memtable_stats().active_rows == 20
    assert bench.manifest.runs == ()


def test_r05_a_long_log_of_several_epochs_reopens_with_smaller_caps_on_a_real_disk(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), False), pa.field("value", pa.string())])
    shard = hg.create_table(tmp_path / "table", schema, key="id").shard("0000")
    for epoch in range(3):
        writer = shard.writer()
        for start in range(0, 100, 10):
            writer.put([{"id": 100 * epoch + start + i, "value": "x" * 100} for i in range(10)]).wait()
        writer.abort()
    with shard.writer(hg.ShardWriterConfig(max_memtable_rows=100)) as writer:
        assert writer.memtable_stats().flushed == 3
        assert writer.scan().count() == 300
    assert [run.rows for run in shard.log.manifests.load().runs] == [100, 100, 100]


# -- R06


@pytest.mark.parametrize("point", [None, "flush.merged", "flush.written", "flush.committed"])
@pytest.mark.parametrize("newest", ["after", None])
def test_r06_the_newest_wins_on_both_sides_of_a_rotation(bench: Any, crash: Any, point: str | None, newest: str | None) -> None:
    store = bench.faulty()
    writer = bench.memtable_writer(store, max_memtable_age=1e6)

    def die(name: str) -> None:
        if name == point:
            cut_off(store)
            raise crash

    writer.put(bench.rows(1, 2, value="before")).wait()
    with hooked(die):
        try:
            writer.flush()
        except hg.WriterPoisonedError:
            pass
    if point is None:
        if newest is None:
            writer.delete(pa.table({"id": [1]})).wait()
        else:
            writer.put(bench.rows(1, value=newest)).wait()
        cut_off(store)
    want = {1: newest, 2: "before"} if newest is not None else {2: "before"}
    with bench.memtable_writer(bench.faulty(), max_memtable_rows=1) as successor:
        if point is not None:
            assert bench.state(successor.view()) == {1: "before", 2: "before"}
            if newest is None:
                successor.delete(pa.table({"id": [1]})).wait()
            else:
                successor.put(bench.rows(1, value=newest)).wait()
        assert bench.state(successor.view()) == want
    assert bench.state() == want
    assert bench.state(bench.memtable_writer(bench.faulty()).view()) == want


def test_r06_one_memtable_with_many_versions_of_a_key_becomes_one_row(bench: Any) -> None:
    with bench.memtable_writer() as writer:
        for number in range(50):
            writer.put(bench.rows(7, value=f"version {number}"))
            writer.delete(pa.table({"id": [8]}))
            writer.put(bench.rows(8, value=f"version {number}"))
        writer.delete(pa.table({"id": [9]}))
    (run,) = bench.manifest.runs
    assert (run.rows, run.tombstones) == (3, 1)
    assert bench.state() == {7: "version 49", 8: "version 49"}


# -- R07


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_r07_the_count_never_falls_under_constant_rotation(bench: Any, rows: int) -> None:
    with bench.memtable_writer(max_memtable_rows=rows) as writer:
        for number in range(60):
            writer.put(bench.rows(number)).wait()
            assert len(bench.state(writer.view())) == number + 1
            assert len(bench.state(writer.view("memory"))) == number + 1
    assert bench.state() == expected(*range(60))


def test_r07_a_deleted_key_never_comes_back_under_constant_rotation(bench: Any) -> None:
    with bench.memtable_writer(max_memtable_rows=2) as writer:
        for number in range(40):
            writer.put(bench.rows(number)).wait()
            writer.delete(pa.table({"id": [number]})).wait()
            for freshness in ("durable", "memory"):
                assert bench.state(writer.view(freshness)) == {}
    assert bench.state() == {}


class Watcher:
    """Looks all the time, and remembers what must not be."""

    def __init__(self, look: Callable[[], dict[int, str]], acknowledged: Callable[[], int]) -> None:
        self.wrong: list[str] = []
        self.looks = 0
        self._look, self._acknowledged, self._stop = look, acknowledged, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        last = 0
        while not self._stop.is_set():
            known = self._acknowledged()
            try:
                state = self._look()
            except Exception as error:
                self.wrong.append(repr(error))
                return
            count = sum(key >= 0 for key in state)
            if count < last or count < known or sorted(key for key in state if key >= 0) != list(range(count)):
                self.wrong.append(f"{count} rows after {last}, {known} acknowledged before")
            if -2 in state:
                self.wrong.append("a deleted key came back")
            last = count
            self.looks += 1

    def end(self) -> None:
        self._stop.set()
        self._thread.join(30)
        assert not self._thread.is_alive()
        assert self.wrong == []
        assert self.looks > 3


def test_r07_readers_beside_the_writer_never_see_fewer_rows(bench: Any) -> None:
    writer = bench.memtable_writer(max_memtable_rows=3)
    acknowledged = 0
    reader = bench.reader()
    writer.put(bench.rows(-2)).wait()
    writer.delete(pa.table({"id": [-2]})).wait()
    watchers = [
        Watcher(lambda: bench.state(writer.view()), lambda: acknowledged),
        Watcher(lambda: bench.state(writer.view("memory")), lambda: acknowledged),
        Watcher(lambda: bench.state(reader.view()), lambda: acknowledged),
    ]
    while acknowledged < 150 or any(watcher.looks < 5 for watcher in watchers if not watcher.wrong):
        writer.put(bench.rows(acknowledged)).wait()
        acknowledged += 1
        if acknowledged % 20 == 0:
            collect_entries(bench.log(), dry_run=False)
    for watcher in watchers:
        watcher.end()
    writer.close()
    assert bench.state() == expected(*range(acknowledged))


READER = """
import sys, headgate as hg
table = hg.open_table(sys.argv[1])
reader = table.shard("0000").reader
from headgate.query.scan import Scan
while sys.stdin.readline():
    rows = Scan(lambda: [reader.view()], table.shard("0000").rules).to_arrow()
    print(rows.num_rows, flush=True)
"""


def test_r07_a_reader_in_another_process_never_sees_fewer_rows(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), False), pa.field("value", pa.string())])
    table = hg.create_table(tmp_path / "table", schema, key="id")
    child = subprocess.Popen([sys.executable, "-c", READER, table.uri], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    counts: list[tuple[int, int]] = []
    with table.shard("0000").writer(hg.ShardWriterConfig(max_memtable_rows=4)) as writer:
        number = 0
        for _ in range(12):
            known = number
            child.stdin.write("look\n")
            child.stdin.flush()
            answer = threading.Thread(target=lambda: counts.append((known, int(child.stdout.readline()))))  # noqa: B023
            answer.start()
            while answer.is_alive() or number == known:
                writer.put([{"id": number, "value": "x"}]).wait()
                number += 1
                if number % 8 == 0:
                    collect_entries(table.shard("0000").log, dry_run=False)
                answer.join(0.002)
    child.stdin.close()
    assert child.wait(30) == 0
    child.stdout.close()
    assert len(counts) == 12
    assert all(seen >= known for known, seen in counts)
    assert [seen for _, seen in counts] == sorted(seen for _, seen in counts)


# -- R08


def test_r08_a_reader_that_pauses_between_its_reads_misses_nothing(bench: Any, crew: Any) -> None:
    writer = bench.memtable_writer(max_memtable_age=1e6)
    for number in range(4):
        writer.put(bench.rows(number)).wait()
    crew.stops = {"view.memory"}
    reading = crew.actor(lambda: bench.state(writer.view()))
    reading.step_to("view.memory")
    writer.flush()
    writer.put(bench.rows(4)).wait()
    writer.flush()
    writer.delete(pa.table({"id": [0]})).wait()
    assert reading.finish().keys() >= {0, 1, 2, 3}


def test_r08_a_reader_that_pauses_sees_one_state(bench: Any, crew: Any) -> None:
    """Each put changes both keys at once: they are never seen apart."""
    writer = bench.memtable_writer(max_memtable_age=1e6)
    for number in range(3):
        writer.put(bench.rows(1, 2, value=f"round {number}")).wait()
        if number == 1:
            writer.flush()
    crew.stops = {"view.memory"}
    for between in (["put"], ["flush"], ["put", "flush"], ["flush", "put"], ["put", "flush", "put", "flush"]):
        reading = crew.actor(lambda: bench.state(writer.view()))
        reading.step_to("view.memory")
        for what in between:
            if what == "put":
                writer.put(bench.rows(1, 2, value=f"between {between}")).wait()
            else:
                writer.flush()
        seen = reading.finish()
        assert seen[1] == seen[2]
        writer.put(bench.rows(1, 2, value="again")).wait()


def test_r08_a_log_that_moves_under_a_reader_hides_nothing_wherever_it_is(make_bench: Any) -> None:
    """Before each request of a view in turn: flush, collect, put more. A reader with a tail of its own, and a fresh one."""
    for kept in (False, True):
        requests = 1
        at = 0
        while at < requests:
            bench = make_bench()
            writer = bench.memtable_writer(max_memtable_age=1e6)
            for number in range(4):
                writer.put(bench.rows(number)).wait()
            seen: list[str] = []
            armed = [False]

            def move(operation: str, key: str, bench: Any = bench, writer: Any = writer, seen: Any = seen, armed: Any = armed) -> None:
                if armed[0]:
                    seen.append(f"{operation} {key}")
                    if len(seen) - 1 == at:  # noqa: B023
                        armed[0] = False
                        writer.put(bench.rows(10)).wait()
                        writer.flush()
                        collect_entries(bench.log(), dry_run=False)
                        writer.put(bench.rows(11)).wait()
                        armed[0] = True

            reader = bench.reader(bench.faulty(before=move))
            if kept:
                reader.view()
                writer.put(bench.rows(4)).wait()
            armed[0] = True
            state = bench.state(reader.view())
            armed[0] = False
            if len(seen) <= at:
                break  # it was through before that request
            requests = max(requests, len(seen))
            assert state.keys() >= set(range(5 if kept else 4)), seen
            assert 11 not in state or 10 in state
            assert bench.state(reader.view()) == expected(*range(5 if kept else 4), 10, 11)
            at += 1
        assert requests > 4


def test_r08_a_part_of_the_log_that_is_flushed_and_collected_under_a_reader_hides_nothing(make_bench: Any, arrivals: Any) -> None:
    """The first of its entries are gone when it comes to them, and the rest is still in the log."""
    requests, at = 1, 0
    while at < requests:
        bench, runs = make_bench(), arrivals("create", RUNS)
        runs.hold()
        writer = bench.memtable_writer(bench.faulty(before=runs), max_memtable_rows=2, max_memtable_age=1e6)
        for number in range(3):
            writer.put(bench.rows(number)).wait()
        seen: list[str] = []

        def move(operation: str, key: str, bench: Any = bench, runs: Any = runs, seen: Any = seen) -> None:
            seen.append(f"{operation} {key}")
            if len(seen) - 1 == at:  # noqa: B023
                runs.let_go()
                until(lambda: len(bench.manifest.runs) == 1)
                collect_entries(bench.log(), dry_run=False)

        state = bench.state(bench.reader(bench.faulty(before=move)).view())
        runs.let_go()
        assert state == expected(0, 1, 2), seen
        if len(seen) <= at:
            break
        requests = max(requests, len(seen))
        at += 1
    assert requests > 4


@pytest.mark.parametrize("between", ["flush", "new", "delete"])
def test_r08_memory_never_shows_an_older_row_above_a_newer_one(bench: Any, arrivals: Any, between: str) -> None:
    """What was pending when the view began may be flushed, below something newer, before it reads the manifest."""
    came = arrivals("create", LOG)
    writer = bench.memtable_writer(bench.faulty(before=came), max_memtable_age=1e6)
    came.hold()
    pending = writer.put(bench.rows(1, value="old"))
    came.wait_for(1)
    met: list[str] = []

    def move(name: str) -> None:
        if name == "view.memory" and not met:
            met.append(name)
            came.let_go()
            pending.wait(bench.PATIENCE)
            if between == "new":
                writer.put(bench.rows(1, value="new")).wait()
            elif between == "delete":
                writer.delete(pa.table({"id": [1]})).wait()
            writer.put(bench.rows(2)).wait()
            writer.flush()

    with hooked(move):
        view = writer.view("memory")
    after = {"flush": {1: "old", 2: "v2"}, "new": {1: "new", 2: "v2"}, "delete": {2: "v2"}}[between]
    assert bench.state(view) == after
    rows = sum(run.rows for run in view.runs) + sum(put.rows.num_rows for put in view.pending)
    assert rows == 2, "no row is in two places"


def test_r08_a_flush_in_every_round_of_a_reader_does_not_keep_it_from_its_view(bench: Any) -> None:
    """The cursor has moved each time it looks again: as long as it is within what was read, both are of one moment."""
    writer = bench.memtable_writer(max_memtable_age=1e6)
    writer.put(bench.rows(0)).wait()
    number = 0

    def flush(operation: str, key: str) -> None:
        nonlocal number
        if operation == "get" and LOG in key:
            writer.flush()
            number += 1
            writer.put(bench.rows(number)).wait()

    reader = bench.reader(bench.faulty(before=flush))
    for _ in range(5):
        known = number
        state = bench.state(reader.view())
        assert len(state) > known
        assert state == expected(*range(len(state))), "nothing is seen before what was put first"
    assert number < 50


def test_r08_a_reader_does_not_chase_a_writer_that_is_faster(bench: Any) -> None:
    writer = bench.memtable_writer(max_memtable_age=1e6)
    for number in range(3):
        writer.put(bench.rows(number)).wait()
    number = 3

    def write(operation: str, key: str) -> None:
        nonlocal number
        if operation == "get" and LOG in key:
            assert number < 200, "it reads on as long as somebody writes"
            writer.put(bench.rows(number)).wait()
            number += 1

    assert bench.state(bench.reader(bench.faulty(before=write)).view()).keys() >= {0, 1, 2}


def test_r08_a_takeover_under_a_reader_hides_nothing(make_bench: Any) -> None:
    requests, at = 1, 0
    while at < requests:
        bench = make_bench()
        a_dead_writers_log(bench, 6)
        seen: list[str] = []
        armed = [True]

        def move(operation: str, key: str, bench: Any = bench, seen: Any = seen, armed: Any = armed) -> None:
            if armed[0]:
                seen.append(f"{operation} {key}")
                if len(seen) - 1 == at:  # noqa: B023
                    armed[0] = False
                    successor = bench.memtable_writer(bench.faulty(), max_memtable_rows=2)
                    collect_entries(bench.log(), dry_run=False)
                    successor.put(bench.rows(6)).wait()
                    armed[0] = True

        state = bench.state(bench.reader(bench.faulty(before=move)).view())
        requests = max(requests, len(seen))
        assert state in (expected(*range(6)), expected(*range(7)))
        at += 1
    assert requests > 4


# -- R09


def test_r09_a_record_that_fails_does_not_end_the_flushes(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper both records progress and looks at ages: one failing does not end the other."""
    monkeypatch.setattr("headgate.writer._RECORD_IDLE_SECONDS", 0.01)
    monkeypatch.setattr("headgate.writer._TICK_SECONDS_MIN", 0.01)
    store = bench.faulty()
    writer = bench.memtable_writer(store, max_memtable_age=0.3)
    writer.put(bench.rows(1)).wait()
    store.add(Fault("create", "fail", key=MANIFESTS, times=12))
    until(lambda: not store._faults or store._faults[0].times == 0)
    until(lambda: len(bench.manifest.runs) == 1)
    writer.put(bench.rows(2)).wait()
    until(lambda: len(bench.manifest.runs) == 2)
    assert bench.state(writer.view()) == expected(1, 2)
    writer.close()


def test_r09_a_flush_that_failed_does_not_end_the_next_ones(bench: Any) -> None:
    writer = bench.memtable_writer()
    for number in range(5):
        bench.store.add(Fault("create", "fail", key=RUNS, times=2), Fault("create", "apply-then-fail", key=RUNS, times=1))
        writer.put(bench.rows(number)).wait()
        writer.flush()
    assert writer.memtable_stats().flush_failures == 15
    assert [run.rows for run in bench.manifest.runs] == [1] * 5
    writer.close()
    assert bench.state() == expected(*range(5))


# -- R10


@pytest.mark.parametrize("point", ["pipeline.encoded", "pipeline.persisted"])
def test_r10_a_row_between_the_log_and_the_memtable_is_not_passed_by_a_flush(bench: Any, point: str) -> None:
    store = bench.faulty()
    writer = bench.memtable_writer(store, max_memtable_age=1e6)
    writer.put(bench.rows(1)).wait()
    reached, go_on = threading.Event(), threading.Event()

    def pause(name: str) -> None:
        if name == point and not reached.is_set():
            reached.set()
            go_on.wait(bench.PATIENCE)

    with hooked(pause):
        ack = writer.put(bench.rows(2))
        assert reached.wait(bench.PATIENCE)
        writer._generations.flush()  # as by age or size: it waits for nobody's entry
        assert [(run.first, run.end) for run in bench.manifest.runs] == [(0, 1)]
        assert bench.manifest.cursor.position == 1
        assert bench.state(writer.view()) == expected(1)
        assert not ack.done()
        cut_off(store)
        successor = bench.memtable_writer(bench.faulty())
        want = expected(1, 2) if point == "pipeline.persisted" else expected(1)
        assert bench.state(successor.view()) == want
        successor.close()
        go_on.set()
    assert bench.state() == want


# -- R11


@pytest.mark.parametrize("point", ["flush.merged", "flush.written", "flush.committed", "replay.flushed"])
@pytest.mark.parametrize("collecting", [False, True])
def test_r11_a_crash_after_each_step_of_each_flush_of_a_replay_skips_nothing(bench: Any, crash: Any, point: str, collecting: bool) -> None:
    for start in (0, 10, 20):  # three epochs
        store = bench.faulty()
        writer = bench.memtable_writer(store, max_memtable_age=1e6)
        for number in range(start, start + 5):
            writer.put(bench.rows(number)).wait()
        cut_off(store)
    want = expected(*range(5), *range(10, 15), *range(20, 25))
    survived = -1
    for dies_at in range(1, 20):
        met = 0
        store = bench.faulty()

        def die(name: str, store: FaultyStore = store, dies_at: int = dies_at) -> None:
            nonlocal met
            if name == point:
                met += 1
                if met >= dies_at:
                    cut_off(store)
                    raise crash

        with hooked(die):
            try:
                writer = bench.memtable_writer(store, max_memtable_rows=2)
            except (crash, hg.HeadgateError):
                pass
            else:
                survived = dies_at
                break
        assert bench.state() == want
        assert stored_rows(bench) == len(want)
        if collecting:
            collect_entries(bench.log(), dry_run=False)
    assert survived > 1
    assert bench.state(writer.view()) == bench.state() == want
    writer.close()
    assert stored_rows(bench) == len(want)
    runs = bench.manifest.runs
    assert all(before.end <= after.first for before, after in itertools.pairwise(runs))
    # What became of a fenced put is told by where its epoch ended: a cursor that passes an end brings it along.
    ends = bench.manifest.ends()
    seals = {entry.epoch: entry.position for entry in bench.entries(0, include_seals=True) if entry.is_seal} if not collecting else {}
    for epoch in range(1, writer.epoch):
        assert ends.end_of(epoch) == seals.get(epoch, ends.end_of(epoch)) is not None, f"the end of epoch {epoch}"


# -- R12


def test_r12_a_flush_returns_under_a_storm_of_writes(bench: Any) -> None:
    writer = bench.memtable_writer(max_memtable_rows=50)
    stop = threading.Event()
    sent = [0, 0]

    def storm(which: int) -> None:
        while not stop.is_set():
            writer.put(bench.rows(1_000_000 * which + sent[which])).wait()
            sent[which] += 1

    threads = [threading.Thread(target=storm, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        until(lambda: min(sent) > 0)
        before = writer.wal_stats().acknowledged_position
        flushing = threading.Thread(target=writer.flush)
        flushing.start()
        flushing.join(bench.PATIENCE)
        assert not flushing.is_alive()
        assert bench.manifest.cursor.position > before
    stop.set()
    for thread in threads:
        thread.join(bench.PATIENCE)
    writer.close()
    assert len(bench.state()) == sum(sent)


def test_r12_a_flush_raises_if_its_own_flush_failed(bench: Any) -> None:
    writer = bench.memtable_writer()
    writer.put(bench.rows(1)).wait()
    bench.store.add(Fault("create", "fail", key=RUNS))
    for _ in range(2):
        with pytest.raises(hg.WriterPoisonedError) as caught:
            writer.flush()
    assert "could not be flushed" in str(caught.value)
    assert "injected fail" in str(caught.value)
    with pytest.raises(hg.WriterPoisonedError):
        writer.put(bench.rows(2))
    bench.store.clear()
    assert bench.state(bench.memtable_writer(bench.faulty()).view()) == expected(1)


def test_r12_a_flush_of_nothing_returns_and_makes_no_run(bench: Any) -> None:
    writer = bench.memtable_writer()
    writer.flush()
    writer.put(bench.rows(1)).wait()
    writer.flush()
    writer.flush()
    assert len(bench.manifest.runs) == 1


# -- R14


def test_r14_slow_writers_flush_by_age_so_reopening_replays_little(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.writer._TICK_SECONDS_MIN", 0.005)
    store = bench.faulty()
    writer = bench.memtable_writer(store, max_memtable_age=0.01)
    for number in range(30):
        writer.put(bench.rows(number)).wait()
        time.sleep(0.002)
    until(lambda: writer.memtable_stats().active_rows == 0 and writer.memtable_stats().frozen == 0)
    assert len(bench.manifest.runs) >= 2
    cut_off(store)
    successor = bench.memtable_writer(bench.faulty())
    assert successor.memtable_stats().replayed_entries == 0
    assert bench.state(successor.view()) == expected(*range(30))


def test_r14_replayed_rows_age_too(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.writer._TICK_SECONDS_MIN", 0.005)
    a_dead_writers_log(bench, 3)
    successor = bench.memtable_writer(bench.faulty(), max_memtable_age=0.01)
    until(lambda: len(bench.manifest.runs) == 1)
    assert bench.state(successor.view()) == expected(0, 1, 2)


def test_r14_ten_thousand_tiny_entries_leave_a_short_log(bench: Any) -> None:
    """By number of batches too: no MemTable holds more than its share of them."""
    store = bench.faulty()
    writer = bench.memtable_writer(store, max_wal_buffer_size=1, max_memtable_age=1e6, max_memtable_batches=500)
    rows = [bench.rows(number) for number in range(100)]
    for number in range(10_000):
        writer.put(rows[number % 100])
    writer._pipeline.drain()
    until(lambda: writer.memtable_stats().frozen == 0)
    cut_off(store)
    assert bench.manifest.cursor.position == 10_000
    started = time.monotonic()
    successor = bench.memtable_writer(bench.faulty())
    assert time.monotonic() - started < 2
    assert successor.memtable_stats().replayed_entries == 0
    assert bench.state(successor.view()) == expected(*range(100))


# -- R17


class Syncs:
    """What was synced and when, and what was named by a manifest and when, by a count of all steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.synced: dict[str, list[int]] = {}
        self.named: dict[str, int] = {}
        self.fails: Callable[[str], bool] = lambda path: False
        self.failed: list[str] = []
        self._step = 0
        fsync, link = os.fsync, os.link

        def counting_fsync(descriptor: int) -> None:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            if self.fails(path):
                self.failed.append(path)
                raise OSError(5, "injected: Input/output error")
            fsync(descriptor)
            self._step += 1
            self.synced.setdefault(path, []).append(self._step)

        def counting_link(source: str, target: str) -> None:
            link(source, target)
            self._step += 1
            self.named[target] = self._step

        monkeypatch.setattr(os, "fsync", counting_fsync)
        monkeypatch.setattr(os, "link", counting_link)


@pytest.fixture
def syncs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Syncs]:
    yield Syncs(monkeypatch)
    monkeypatch.undo()


def lance_table(tmp_path: Path) -> hg.Table:
    schema = pa.schema([pa.field("id", pa.int64(), False), pa.field("value", pa.string())])
    return hg.create_table(tmp_path / "new" / "table", schema, key="id")


def runs_by_version(shard: hg.Shard) -> dict[str, set[str]]:
    """Which run paths the versions of a manifest name for the first time, by the version's file."""
    root = shard.places.table.path
    known: set[str] = set()
    found: dict[str, set[str]] = {}
    folder = f"{root}/shards/{shard.id}-{shard.table_id}/manifest"
    for name in sorted(os.listdir(folder)):
        if name.endswith(".json"):
            text = Path(folder, name).read_text()
            body = json.loads(text)["body"]
            paths = {part["path"] for run in body.get("runs", ()) for part in run["slices"]}
            if paths - known:
                found[f"{folder}/{name}"] = paths - known
            known |= paths
    return found


def test_r17_every_file_and_folder_of_a_run_is_synced_before_a_manifest_names_it(tmp_path: Path, syncs: Syncs) -> None:
    table = lance_table(tmp_path)
    shard = table.shard("0000")
    with shard.writer(hg.ShardWriterConfig(max_memtable_rows=3)) as writer:
        for number in range(7):
            writer.put([{"id": number, "value": "x"}]).wait()
        writer.delete(pa.table({"id": [1]}))
    named = runs_by_version(shard)
    assert sum(map(len, named.values())) == 3
    since = 0
    for version, paths in named.items():
        at = syncs.named[version]
        for path in paths:
            run = f"{table.uri}/{path}"
            parts = [run, *(os.path.join(place, name) for place, folders, files in os.walk(run) for name in (*folders, *files))]
            assert len(parts) >= 7, "a dataset has data, a version and a transaction, each in a folder"
            above = os.path.dirname(run)
            while len(above) > len(str(tmp_path)):
                parts.append(above)
                above = os.path.dirname(above)
            for name in parts:
                # Since the last flush: a folder that was synced before this run was in it does not lead to it.
                assert any(since < step < at for step in syncs.synced.get(name, ())), f"{name} was not synced before {version} named it"
        since = at


def test_r17_new_folders_are_synced_into_their_parents_before_the_manifest(
    tmp_path: Path, syncs: Syncs, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = lance_table(tmp_path)
    shard = table.shard("0000")
    writer = shard.writer()
    writer.put([{"id": 1, "value": "x"}]).wait()
    syncs.synced.clear()
    seen: dict[str, set[str]] = {}

    def look(name: str) -> None:
        if name == "flush.written":
            seen["before"] = set(syncs.synced)

    with hooked(look):
        writer.flush()
    (path,) = next(iter(runs_by_version(shard).values()))
    parts = path.split("/")
    folders = {"/".join([table.uri, *parts[:depth]]) for depth in range(len(parts) + 1)} | {str(tmp_path / "new")}
    assert folders <= seen["before"]
    writer.close()


@pytest.mark.parametrize("which", ["data/", "_versions", ".lance", "/runs"])
def test_r17_a_failed_fsync_of_a_run_poisons_and_is_not_tried_again(tmp_path: Path, syncs: Syncs, which: str) -> None:
    table = lance_table(tmp_path)
    shard = table.shard("0000")
    writer = shard.writer()
    writer.put([{"id": 1, "value": "x"}]).wait()
    syncs.fails = lambda path: "/runs" in path and (path.endswith(which) if which in (".lance", "/runs") else which in f"{path}/")
    with pytest.raises(hg.WriterPoisonedError, match="fsync"):
        writer.flush()
    assert len(syncs.failed) == 1, "a second fsync would find its own bytes in the page cache, and lie"
    with pytest.raises(hg.WriterPoisonedError):
        writer.put([{"id": 2, "value": "x"}])
    with pytest.raises(hg.WriterPoisonedError):
        writer.close()
    assert writer.threads_alive() == 0
    assert shard.log.manifests.load().runs == ()
    syncs.fails = lambda path: False
    with shard.writer() as successor:
        assert successor.scan().to_arrow().to_pylist() == [{"id": 1, "value": "x"}]


def test_r17_a_failed_fsync_of_the_manifest_poisons(tmp_path: Path, syncs: Syncs) -> None:
    shard = lance_table(tmp_path).shard("0000")
    writer = shard.writer()
    writer.put([{"id": 1, "value": "x"}]).wait()

    def arm(name: str) -> None:
        if name == "flush.written":
            syncs.fails = lambda path: "/manifest" in path

    with hooked(arm), pytest.raises(hg.WriterPoisonedError, match="fsync"):
        writer.flush()
    assert len(syncs.failed) == 1
    with pytest.raises(hg.WriterPoisonedError):
        writer.close()
    syncs.fails = lambda path: False
    with shard.writer() as successor:
        assert successor.scan().to_arrow().to_pylist() == [{"id": 1, "value": "x"}]
    runs = shard.log.manifests.load().runs
    assert sum(run.rows for run in runs) == 1


# -- R18


def test_r18_the_cursor_passes_seals_a_flush_collection_and_a_takeover(bench: Any) -> None:
    for start in range(0, 12, 3):  # rows, then two reopens without any
        store = bench.faulty()
        writer = bench.memtable_writer(store, max_memtable_age=1e6)
        for number in range(start, start + 3):
            writer.put(bench.rows(number)).wait()
        cut_off(store)
        for _ in range(2):
            store = bench.faulty()
            bench.memtable_writer(store)
            cut_off(store)
    want = expected(*range(12))
    assert bench.manifest.cursor == ChainPoint(1, 0)
    store = bench.faulty()
    writer = bench.memtable_writer(store, max_memtable_rows=5)  # flushes twice on its way, over several ends
    assert writer.memtable_stats().replayed_rows == 12
    assert [run.rows for run in bench.manifest.runs] == [5, 5]
    assert collect_entries(bench.log(), dry_run=False, sweep=True).entries == 10
    assert bench.state(writer.view()) == bench.state() == want
    cut_off(store)
    successor = bench.memtable_writer(bench.faulty())
    assert successor.memtable_stats().replayed_rows == 2
    assert bench.state(successor.view()) == want
    successor.close()
    assert bench.manifest.cursor == ChainPoint(successor.epoch, successor.wal_stats().next_wal_entry_position)
    assert stored_rows(bench) == 12
    assert bench.table.verify().ok


@pytest.mark.parametrize("seed", range(16))
def test_r18_takeovers_flushes_and_collections_in_any_order_skip_and_double_nothing(bench: Any, crash: Any, seed: int) -> None:
    dice = random.Random(seed)
    state: dict[int, str] = {}
    put = 0
    writer: hg.ShardWriter | None = None
    for _ in range(40):
        if writer is None:
            store = bench.faulty()
            dies_at = dice.choice(["flush.merged", "flush.written", "flush.committed", "replay.flushed", "fence.walked", "none", "none"])

            def die(name: str, store: FaultyStore = store, dies_at: str = dies_at) -> None:
                # Only while it opens: those that were cut off before still try to flush, in threads of their own.
                if name == dies_at and threading.current_thread() is threading.main_thread() and dice.random() < 0.5:
                    cut_off(store)
                    raise crash

            with hooked(die):
                try:
                    writer = bench.memtable_writer(store, max_memtable_rows=dice.choice([1, 3, 1000]), max_memtable_age=1e6)
                except (crash, hg.HeadgateError):
                    continue
        what = dice.choice(["put", "put", "put", "flush", "collect", "takeover", "close", "read"])
        if what == "put":
            number = dice.randrange(put + 1)  # a new key, or one of before
            value = f"version {put}"
            writer.put(bench.rows(number, value=value)).wait()
            state[number] = value
            put += 1
        elif what == "flush":
            writer.flush()
        elif what == "collect":
            collect_entries(bench.log(), dry_run=False, sweep=dice.random() < 0.5)
        elif what == "takeover":
            cut_off(store)
            writer = None
        elif what == "close":
            writer.close()
            writer = None
        else:
            assert bench.state(writer.view()) == state, f"seed {seed}"
        assert bench.state() == state, f"seed {seed}"
    bench.memtable_writer(bench.faulty()).close()
    assert bench.state() == state
    runs = bench.manifest.runs
    assert all(before.end <= after.first for before, after in itertools.pairwise(runs))
    assert bench.table.verify().ok


# -- unknown outcomes, fences, ends


@pytest.mark.parametrize("kind", ["apply-then-fail", "fail", "conflict"])
@pytest.mark.parametrize("times", [1, 4, 9])
def test_r_the_unknown_outcome_of_a_flushs_commit_makes_exactly_one_run(bench: Any, kind: Any, times: int) -> None:
    writer = bench.memtable_writer(max_memtable_age=1e6)
    writer.put(bench.rows(1, 2)).wait()
    bench.store.add(Fault("create", kind, key=MANIFESTS, times=times))
    writer.flush()
    bench.store.clear()
    (run,) = bench.manifest.runs
    assert (run.first, run.end, run.rows) == (0, 1, 2)
    writer.put(bench.rows(3)).wait()
    writer.close()
    assert [(run.first, run.end) for run in bench.manifest.runs] == [(0, 1), (1, 2)]
    assert bench.manifest.next_generation == 3
    assert bench.state() == expected(1, 2, 3)


def test_r_a_commit_whose_reply_and_reading_are_lost_is_not_made_twice(bench: Any) -> None:
    """Neither the create's reply nor the next reading comes through: the flush as a whole is tried again."""
    writer = bench.memtable_writer(max_memtable_age=1e6)
    writer.put(bench.rows(1)).wait()

    def arm(name: str) -> None:
        if name == "flush.written":
            bench.store.add(Fault("create", "apply-then-fail", key=MANIFESTS, times=1))
        elif name == "commit.created" and not bench.store.requests["armed"]:
            bench.store.requests["armed"] = 1
            bench.store.add(Fault("list", "fail", key=MANIFESTS, times=bench.QUICK.retries + 1))

    with hooked(arm):
        writer.flush()
    assert writer.memtable_stats().flush_failures == 1
    (run,) = bench.manifest.runs
    assert run.rows == 1
    writer.close()
    assert bench.state() == expected(1)


@pytest.mark.parametrize("point", ["flush.merged", "flush.written", "commit.loaded"])
def test_r_a_fenced_writers_late_flush_commits_nothing(bench: Any, point: str) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def pause(name: str) -> None:
        if name == point and threading.current_thread().name.startswith("headgate-flush"):
            reached.set()
            go_on.wait(bench.PATIENCE)

    with hooked(pause):
        writer = bench.memtable_writer(bench.faulty(), max_memtable_age=1e6)
        for number in range(3):
            writer.put(bench.rows(number)).wait()
        told: list[hg.HeadgateError] = []

        def flush() -> None:
            try:
                writer.flush()
            except hg.HeadgateError as error:
                told.append(error)

        flushing = threading.Thread(target=flush, daemon=True)
        flushing.start()
        assert reached.wait(bench.PATIENCE)
        successor = bench.memtable_writer(bench.faulty(), max_memtable_age=1e6)
        assert bench.state(successor.view()) == expected(0, 1, 2)
        go_on.set()
        flushing.join(bench.PATIENCE)
        assert [type(error) for error in told] == [hg.FencedError]
        assert bench.manifest.runs == ()
        assert bench.manifest.epoch == successor.epoch
    for use in (lambda: writer.put(bench.rows(9)), writer.flush, writer.view, writer.close):
        with pytest.raises(hg.FencedError):
            use()
    assert writer.threads_alive() == 0
    successor.close()
    assert stored_rows(bench) == 3


def test_r_a_fenced_writer_shows_nothing_any_more(bench: Any) -> None:
    writer = bench.memtable_writer(bench.faulty(), max_memtable_age=1e6)
    writer.put(bench.rows(1)).wait()
    bench.memtable_writer(bench.faulty())
    with pytest.raises(hg.FencedError):
        writer.scan().to_arrow()


@pytest.mark.parametrize("point", ["flush.merged", "flush.written"])
def test_r_an_abort_during_a_flush_ends_and_flushes_nothing_more(bench: Any, point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.writer._ABORT_SECONDS", 0.1)
    reached, go_on = threading.Event(), threading.Event()

    def pause(name: str) -> None:
        if name == point:
            reached.set()
            go_on.wait(bench.PATIENCE)

    with hooked(pause):
        writer = bench.memtable_writer(max_memtable_rows=1)
        for number in range(3):
            writer.put(bench.rows(number)).wait()
        assert reached.wait(bench.PATIENCE)
        started = time.monotonic()
        writer.abort()
        assert time.monotonic() - started < 5
        go_on.set()
        until(lambda: writer.threads_alive() == 0)
    assert bench.manifest.runs == ()
    with pytest.raises(hg.ClosedError):
        writer.flush()
    with pytest.raises(hg.ClosedError):
        writer.view()
    assert bench.state(bench.memtable_writer(bench.faulty()).view()) == expected(0, 1, 2)


def test_r_an_abort_wakes_whoever_waits_for_a_flush(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.writer._ABORT_SECONDS", 0.1)
    monkeypatch.setattr("headgate.flush._TRIES", RetryPolicy(retries=7, base_delay=100.0, max_delay=100.0))
    writer = bench.memtable_writer()
    writer.put(bench.rows(1)).wait()
    bench.store.add(Fault("create", "fail", key=RUNS))
    told: list[BaseException] = []

    def flush() -> None:
        try:
            writer.flush()
        except hg.HeadgateError as error:
            told.append(error)

    waiting = threading.Thread(target=flush, daemon=True)
    waiting.start()
    until(lambda: writer.memtable_stats().flush_failures == 1)  # a pause of a hundred seconds began
    started = time.monotonic()
    writer.abort()
    waiting.join(bench.PATIENCE)
    assert not waiting.is_alive()
    assert time.monotonic() - started < 5
    assert isinstance(told[0], hg.ClosedError)
    until(lambda: writer.threads_alive() == 0)


def test_r_a_close_whose_flush_fails_raises_and_leaves_no_thread(bench: Any) -> None:
    writer = bench.memtable_writer()
    writer.put(bench.rows(1))
    bench.store.add(Fault("create", "fail", key=RUNS))
    with pytest.raises(hg.WriterPoisonedError) as caught:
        writer.close()
    assert "could not be flushed" in str(caught.value)
    assert writer.threads_alive() == 0
    bench.store.clear()
    assert bench.manifest.wal.clean_at is None
    with bench.memtable_writer(bench.faulty()) as successor:
        assert bench.state(successor.view()) == expected(1)


def test_r_a_with_block_tells_the_failed_flush_of_its_close(bench: Any) -> None:
    def use() -> None:
        with bench.memtable_writer() as writer:
            writer.put(bench.rows(1))
            bench.store.add(Fault("create", "fail", key=RUNS))

    with pytest.raises(hg.WriterPoisonedError):
        use()


# -- freshness


def test_r_memory_shows_what_is_not_acknowledged_and_durable_does_not(bench: Any, arrivals: Any) -> None:
    came = arrivals("create", LOG)
    store = bench.faulty(before=came)
    writer = bench.memtable_writer(store, max_wal_buffer_size=1, max_inflight=1)
    writer.put(bench.rows(1, 2)).wait()
    came.hold()
    acks = [writer.put(bench.rows(3)), writer.put(bench.rows(1, value="newer")), writer.delete(pa.table({"id": [2]}))]
    came.wait_for(2)  # one under way, the others queued
    assert bench.state(writer.view()) == bench.state() == expected(1, 2)
    assert bench.state(writer.view("memory")) == {1: "newer", 3: "v3"}
    came.let_go()
    for ack in acks:
        ack.wait(bench.PATIENCE)
    assert bench.state(writer.view()) == bench.state(writer.view("memory")) == {1: "newer", 3: "v3"}
    with pytest.raises(hg.InvalidInputError):
        writer.view("eventual")  # type: ignore[arg-type]


# -- trim, and the two modes one after the other


def test_r_a_log_beside_a_memtable_is_not_trimmed(bench: Any) -> None:
    writer = bench.memtable_writer(max_memtable_age=1e6)
    for number in range(4):
        writer.put(bench.rows(number)).wait()
    with pytest.raises(hg.InvalidInputError, match="flushes its rows"):
        bench.table.trim(before=2)
    writer.flush()
    with pytest.raises(hg.InvalidInputError, match="flushes its rows"):
        bench.table.trim(before=4)
    writer.close()
    appender = bench.appender(bench.faulty())  # a WAL-only owner now, and still there are runs
    appender.append([bench.rows(9)])
    with pytest.raises(hg.InvalidInputError, match="flushes its rows"):
        bench.table.trim(before=6)
    assert bench.state() == expected(*range(4), 9)


@pytest.mark.parametrize("ends", ["close", "crash"])
def test_r_switching_between_the_modes_loses_nothing(bench: Any, ends: str) -> None:
    number = 0
    for turn in range(6):
        store = bench.faulty()
        opener = bench.memtable_writer if turn % 2 else bench.writer
        writer = opener(store, max_memtable_rows=3)
        for _ in range(4):
            writer.put(bench.rows(number), producer="p", sequence=number).wait()
            number += 1
        if ends == "close":
            writer.close()
        else:
            cut_off(store)
        collect_entries(bench.log(), dry_run=False, sweep=True)
        assert bench.state() == expected(*range(number))
        assert stored_rows(bench) == number
    with bench.memtable_writer(bench.faulty()) as last:
        assert last.put(bench.rows(number - 1), producer="p", sequence=number - 1).wait().duplicate
    assert stored_rows(bench) == number
    assert bench.table.verify().ok
