"""Hazards of acknowledgement, with a MemTable: who gives an ack, what a failure shows, what a close leaves, what a retry doubles."""

from __future__ import annotations

import linecache
import random
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate.failpoint import hooked
from headgate.flush import Generations
from headgate.manifest import ChainPoint
from headgate.memtable import MemTable
from headgate.store import RetryPolicy
from headgate.store.faulty import Fault, FaultyStore
from headgate.wal.collect import collect_entries
from headgate.wal.pipeline import Pipeline
from headgate.writer import ShardWriter

LOG, RUNS, MANIFESTS = "/0000/", "/runs/", "/manifest/"  # entries of the log of shard 0000; its marker is 0000.json


@pytest.fixture(autouse=True)
def quick_flushes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tries as ever, with pauses that take no time."""
    monkeypatch.setattr("headgate.flush._TRIES", RetryPolicy(retries=7, base_delay=0.0001, max_delay=0.001))


def cut_off(store: FaultyStore) -> None:
    """What a crash is to everybody else: whatever uses this store changes nothing any more."""
    store.add(Fault("any", "fail"))


def stored_rows(bench: Any) -> int:
    """Every row of every run and of the log's tail, versions of one key counted apart."""
    view = bench.reader().view()
    return sum(run.rows for run in view.runs) + sum(put.rows.num_rows for part in view.fresh for put in part.puts)


# -- A02


def test_a02_a_put_after_a_rotation_fails_by_its_own_entry(bench: Any) -> None:
    writer = bench.memtable_writer(max_memtable_rows=1, max_wal_persist_retries=0)
    writer.put(bench.rows(1)).wait()
    bench.store.add(Fault("create", "fail", key=LOG))
    with pytest.raises(hg.WriterPoisonedError):
        writer.put(bench.rows(2)).wait()
    bench.store.clear()
    assert bench.state() == {1: "v1"}
    with bench.memtable_writer() as successor:
        assert bench.state(successor.view()) == {1: "v1"}


def test_a02_an_ack_is_never_given_by_another_generations_flush(bench: Any, arrivals: Any) -> None:
    runs, log = arrivals("create", RUNS), arrivals("create", LOG)
    store = bench.faulty(before=lambda operation, key: (runs(operation, key), log(operation, key)))
    runs.hold()
    writer = bench.memtable_writer(store, max_memtable_rows=1, max_wal_persist_retries=0)
    writer.put(bench.rows(1)).wait()
    runs.wait_for(1)  # generation 1 is being flushed
    log.hold()
    store.add(Fault("create", "fail", key=LOG))
    second = writer.put(bench.rows(2))
    log.wait_for(2)
    runs.let_go()
    while writer.memtable_stats().flushed == 0:
        threading.Event().wait(0.001)
    assert len(bench.manifest.runs) == 1
    assert not second.done()
    log.let_go()
    with pytest.raises(hg.WriterPoisonedError):
        second.wait(bench.PATIENCE)
    assert bench.state() == {1: "v1"}


def test_a02_a_durable_put_is_in_the_log_before_it_is_in_a_run(bench: Any) -> None:
    """A run holds nothing that was not acknowledged first."""
    seen: list[tuple[int, int]] = []

    def look(name: str) -> None:
        if name == "flush.merged":
            seen.append((writer.wal_stats().acknowledged_position, writer.memtable_stats().frozen_rows))

    with hooked(look):
        writer = bench.memtable_writer(max_memtable_rows=2, max_wal_buffer_size=1)
        for number in range(10):
            writer.put(bench.rows(number))
        writer.close()
    assert len(seen) == 5
    assert all(acknowledged + 1 >= 2 * (number + 1) for number, (acknowledged, _) in enumerate(seen))


# -- A03


@pytest.mark.parametrize("kind", ["fail", "apply-then-fail", "refuse", "sync"])
def test_a03_a_failed_append_shows_nothing_and_takes_nothing_back(bench: Any, kind: Any) -> None:
    store = bench.faulty()
    writer = bench.memtable_writer(store, max_wal_persist_retries=1, max_memtable_rows=3)
    for number in range(4):
        writer.put(bench.rows(number)).wait()
    before = bench.state(writer.view())
    seen: list[dict[int, str]] = []

    def look(name: str) -> None:
        if name == "pipeline.encoded" and not seen:
            seen.append(bench.state(writer.view()))

    store.add(Fault("create", kind, key=LOG))
    if kind == "apply-then-fail":
        store.add(Fault("get", "fail", key=LOG))  # nor can it be read back
    with hooked(look), pytest.raises(hg.WriterPoisonedError):
        writer.put(bench.rows(9)).wait()
    assert seen == [before] == [{number: f"v{number}" for number in range(4)}]
    for freshness in ("durable", "memory"):
        with pytest.raises(hg.WriterPoisonedError):
            writer.scan(freshness=freshness).to_arrow()
    with bench.memtable_writer(bench.faulty()) as successor:
        after = bench.state(successor.view())
    assert after == before or (kind in ("apply-then-fail", "sync") and after == before | {9: "v9"})
    assert bench.state() == after


def test_a03_entries_past_a_failed_one_are_not_seen_by_anybody(bench: Any, arrivals: Any) -> None:
    """Two entries under way, the later one lands, the earlier one fails for good."""
    came = arrivals("create", LOG)
    store = bench.faulty(before=came)
    writer = bench.memtable_writer(store, max_wal_buffer_size=1, max_wal_persist_retries=0, max_inflight=2)
    writer.put(bench.rows(1)).wait()
    store.add(Fault("create", "hang", key=bench.entry_key(1, 1)))
    store.add(Fault("create", "fail", key=bench.entry_key(1, 1)))
    acks = [writer.put(bench.rows(2)), writer.put(bench.rows(3))]
    came.wait_for(3)
    while bench.entry_key(1, 2) not in bench.contents():
        threading.Event().wait(0.001)
    assert bench.state(writer.view()) == bench.state() == {1: "v1"}
    assert bench.state(writer.view("memory")) == {1: "v1", 2: "v2", 3: "v3"}
    cut_off(store)
    with bench.memtable_writer(bench.faulty()) as successor:
        assert bench.state(successor.view()) == {1: "v1"}
        successor.put(bench.rows(4)).wait()
    store.clear()
    for ack in acks:
        with pytest.raises(hg.HeadgateError):
            ack.wait(bench.PATIENCE)
    assert bench.state() == {1: "v1", 4: "v4"}


# -- A04


def test_a04_a_flush_that_fails_for_good_hands_back_what_was_not_acknowledged(bench: Any, arrivals: Any) -> None:
    runs, log = arrivals("create", RUNS), arrivals("create", LOG)
    store = bench.faulty(before=lambda operation, key: (runs(operation, key), log(operation, key)))
    runs.hold()
    store.add(Fault("create", "fail", key=RUNS))
    writer = bench.memtable_writer(store, max_memtable_rows=1, max_wal_buffer_size=1, max_inflight=1)
    writer.put(bench.rows(1)).wait()
    runs.wait_for(1)
    log.hold()
    acks = [writer.put(bench.rows(2)), writer.put(bench.rows(3), producer="p", sequence=0)]
    log.wait_for(2)
    runs.let_go()
    for ack in acks:
        with pytest.raises(hg.WriterPoisonedError) as caught:
            ack.wait(bench.PATIENCE)
        assert [put.rows.column("id").to_pylist() for put in caught.value.unacknowledged] == [[2], [3]]
        assert "could not be flushed" in str(caught.value)
    log.let_go()


# -- A09


@pytest.mark.parametrize("rows_per_memtable", [1, 3, 1000])
def test_a09_after_a_clean_close_every_row_is_in_a_run_and_the_tail_is_empty(bench: Any, rows_per_memtable: int) -> None:
    with bench.memtable_writer(max_memtable_rows=rows_per_memtable) as writer:
        for number in range(10):
            writer.put(bench.rows(number))
        writer.delete(pa.table({"id": [3, 4]}))
    expected = {number: f"v{number}" for number in range(10) if number not in (3, 4)}
    manifest, view = bench.manifest, bench.reader().view()
    assert bench.state(view) == expected
    assert not any(part.count for part in view.fresh)
    assert manifest.cursor == ChainPoint(1, writer.wal_stats().next_wal_entry_position)
    assert manifest.wal.clean_at == manifest.cursor.position
    assert writer.threads_alive() == 0
    collect_entries(bench.log(), dry_run=False)
    assert bench.entries(include_seals=True) == []
    with bench.memtable_writer() as successor:
        assert successor.memtable_stats().replayed_rows == 0
        assert bench.state(successor.view()) == expected
    assert bench.state() == expected


def test_a09_a_close_flushes_what_was_only_replayed(bench: Any) -> None:
    store = bench.faulty()
    writer = bench.memtable_writer(store)
    for number in range(5):
        writer.put(bench.rows(number)).wait()
    cut_off(store)
    with bench.memtable_writer(bench.faulty()) as successor:
        assert successor.memtable_stats().replayed_rows == 5
    view = bench.reader().view()
    assert not any(part.count for part in view.fresh)
    assert bench.manifest.wal.clean_at == bench.manifest.cursor.position
    assert len(bench.state(view)) == 5


def test_a09_a_close_with_nothing_written_makes_no_run(bench: Any) -> None:
    for _ in range(3):
        bench.memtable_writer().close()
    assert bench.manifest.runs == ()
    assert bench.manifest.wal.clean_at == bench.manifest.cursor.position


def test_a09_on_a_real_disk_with_lance(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), False), pa.field("tag", pa.string(), False), pa.field("score", pa.float64())])
    table = hg.create_table(tmp_path / "table", schema, key="id")
    with table.shard("0000").writer(hg.ShardWriterConfig(max_memtable_rows=40)) as writer:
        for start in range(0, 100, 10):
            writer.put([{"id": i, "tag": f"t{i}", "score": i / 2} for i in range(start, start + 10)]).wait()
        writer.delete(pa.table({"id": list(range(0, 100, 2))}))
    view = table.shard("0000").reader.view()
    assert not any(part.count for part in view.fresh)
    assert len(view.runs) >= 2
    with table.shard("0000").writer() as writer:
        assert writer.memtable_stats().replayed_rows == 0
        rows = writer.scan().to_arrow().sort_by("id")
    assert rows.column("id").to_pylist() == list(range(1, 100, 2))
    assert rows.column("tag").to_pylist() == [f"t{i}" for i in range(1, 100, 2)]


# -- A12


class Interrupts:
    """Raises KeyboardInterrupt in this thread at the n-th line of the code that takes an entry; 0: counts the lines only."""

    STEPS = (Pipeline._fly, Pipeline._acknowledge, Pipeline.retain, ShardWriter._acknowledged, Generations.take, Generations._take)
    STEPS += (Generations.freeze, Generations._account, MemTable.append)  # type: ignore[assignment]

    def __init__(self, at: int) -> None:
        self._at, self.lines = at, 0
        self._codes = {step.__code__ for step in self.STEPS}

    def __enter__(self) -> Interrupts:
        sys.settrace(lambda frame, event, argument: self._line if frame.f_code in self._codes else None)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        # Python lets no signal in between a block's end and the release of its lock; a trace it does.
        if event == "line" and not linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with "):
            self.lines += 1
            if self.lines == self._at:
                raise KeyboardInterrupt
        return self._line


def test_a12_a_waiter_interrupted_anywhere_leaves_an_entry_taken_once(make_bench: Any, arrivals: Any) -> None:
    at, lines = 0, 0
    while at <= lines:
        bench, runs = make_bench(), arrivals("create", RUNS)
        runs.hold()
        writer = bench.memtable_writer(bench.faulty(before=runs), max_memtable_rows=4, max_memtable_age=1e6)
        writer.put(bench.rows(0)).wait()
        ack = writer.put(bench.rows(1, 2, 3))  # with it the MemTable is full
        with Interrupts(at) as interrupts:
            try:
                ack.wait()
            except KeyboardInterrupt:
                pass
        if at == 0:
            lines = interrupts.lines
        ack.wait(bench.PATIENCE)
        writer.put(bench.rows(4)).wait()
        stats, taken = writer.memtable_stats(), [put.rows.num_rows for part in writer.view().fresh for put in part.puts]
        assert taken == [1, 3, 1], f"interrupted at line {at}"
        assert (stats.frozen_rows, stats.active_rows) == (4, 1)
        # What is being flushed counts thrice.
        held = writer.backpressure_stats().held_bytes - stats.frozen_bytes - stats.active_bytes
        assert held in (0, 2 * stats.frozen_bytes)
        assert writer.wal_stats().puts_acknowledged == 3
        runs.let_go()
        writer.close()
        assert [(run.rows, run.first, run.end) for run in bench.manifest.runs] == [(4, 0, 2), (1, 2, 3)]
        at += lines > 0  # none: a thread of the writer's was faster than we were


# -- A13


class Sender:
    """A producer that sends the same sequence again until it is acknowledged, through one writer after another."""

    def __init__(self, bench: Any) -> None:
        self.bench = bench
        self.store: FaultyStore = bench.faulty()
        self.writer = bench.memtable_writer(self.store, max_memtable_rows=3, max_wal_persist_retries=0)
        self.sent = 0
        self.places: dict[int, tuple[int, int]] = {}

    def send(self, sequence: int) -> hg.Receipt:
        receipt = self.writer.put(self.bench.rows(sequence), producer="p", sequence=sequence).wait()
        first = self.places.setdefault(sequence, receipt["0000"])
        assert receipt["0000"] == first or receipt.duplicate
        return receipt

    def take_over(self) -> None:
        """The writer before is left as it is: fenced as soon as it looks."""
        self.store = self.bench.faulty()
        self.writer = self.bench.memtable_writer(self.store, max_memtable_rows=3, max_wal_persist_retries=0)

    def crash(self) -> None:
        cut_off(self.store)
        self.take_over()

    def lose_reply(self) -> None:
        """The next one lands, and nobody is told: the sender has to ask again, elsewhere."""
        self.store.add(Fault("create", "apply-then-fail", key=LOG), Fault("get", "fail", key=LOG))
        with pytest.raises(hg.WriterPoisonedError):
            self.send(self.sent)
        self.crash()
        assert self.send(self.sent).duplicate
        self.sent += 1

    def lose_request(self) -> None:
        self.store.add(Fault("create", "fail", key=LOG))
        with pytest.raises(hg.WriterPoisonedError):
            self.send(self.sent)
        self.crash()

    def flush(self) -> None:
        self.writer.flush()

    def reopen(self) -> None:
        self.writer.close()
        self.take_over()

    def collect(self) -> None:
        collect_entries(self.bench.log(), dry_run=False, sweep=True)


STEPS = ("take_over", "crash", "lose_reply", "lose_request", "flush", "reopen", "collect")


@pytest.mark.parametrize("step", STEPS)
def test_a13_a_retry_after_each_kind_of_end_is_not_a_second_copy(bench: Any, step: str) -> None:
    sender = Sender(bench)
    for _ in range(8):
        sender.send(sender.sent)
        sender.sent += 1
        getattr(sender, step)()
        if sender.sent:
            assert sender.send(sender.sent - 1)["0000"] == sender.places[sender.sent - 1]
    assert stored_rows(bench) == sender.sent
    assert bench.state() == {number: f"v{number}" for number in range(sender.sent)}


@pytest.mark.parametrize("seed", range(12))
def test_a13_exactly_once_across_crash_flush_takeover_and_collection(bench: Any, seed: int) -> None:
    dice = random.Random(seed)
    sender = Sender(bench)
    for _ in range(30):
        sender.send(sender.sent)
        sender.sent += 1
        for _ in range(dice.randint(0, 3)):
            getattr(sender, dice.choice(STEPS))()
        for again in range(max(0, sender.sent - 3), sender.sent):
            sender.send(again)
    assert stored_rows(bench) == sender.sent, f"seed {seed}"
    assert bench.state() == {number: f"v{number}" for number in range(sender.sent)}


@pytest.mark.parametrize("point", ["flush.merged", "flush.written", "flush.committed", "replay.flushed"])
def test_a13_a_claimant_that_dies_while_it_flushes_a_replay_leaves_the_marks(bench: Any, crash: Any, point: str) -> None:
    """Its cursor passes entries that no successor reads again, so what they say of producers goes along."""
    store = bench.faulty()
    writer = bench.memtable_writer(store)
    for number in range(9):
        writer.put(bench.rows(number), producer=f"p{number}", sequence=0).wait()
    cut_off(store)

    def die(name: str) -> None:
        if name == point:
            raise crash

    with hooked(die), pytest.raises((crash, hg.WriterPoisonedError)):
        bench.memtable_writer(bench.faulty(), max_memtable_rows=4)
    collect_entries(bench.log(), dry_run=False, sweep=True)
    successor = bench.memtable_writer(bench.faulty(), max_memtable_rows=4)
    for number in range(9):
        assert successor.put(bench.rows(number), producer=f"p{number}", sequence=0).wait().duplicate
    successor.put(bench.rows(9), producer="p0", sequence=1).wait()
    successor.close()
    assert stored_rows(bench) == 10


def test_a13_two_threads_of_one_producer_under_rotation_are_never_doubled(bench: Any) -> None:
    with bench.memtable_writer(max_memtable_rows=2) as writer:

        def send() -> None:
            for sequence in range(40):
                writer.put(bench.rows(sequence), producer="p", sequence=sequence).wait()

        threads = [threading.Thread(target=send) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(bench.PATIENCE)
            assert not thread.is_alive()
    assert stored_rows(bench) == 40
