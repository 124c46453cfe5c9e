"""C. Loads: rows that come as files beside a live writer have one place in the order, whatever happens between the steps."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate.clock import SystemClock
from headgate.columnar.arrow import ArrowColumnar
from headgate.compact import compact_shard
from headgate.failpoint import hooked
from headgate.load import place, withdraw
from headgate.manifest.model import Intent
from headgate.transaction import Transactions

PATIENCE = 30.0
LOADING = ("bulk.", "transaction.", "load.", "commit.")
Rows = dict[int, str | None]
"""Key -> value; None: deleted."""


class Dead(BaseException):
    """A process ends here, and runs nothing of what it would have done on the way out."""


class Jumping(SystemClock):
    """A clock that a test may set forward."""

    ahead = 0.0

    def now(self) -> float:
        return super().now() + self.ahead


def batch_of(rows: Rows) -> pa.RecordBatch:
    """Both kinds at once, as loads take them."""
    ops = ["upsert" if value is not None else "delete" for value in rows.values()]
    return pa.RecordBatch.from_pydict({"id": list(rows), "value": list(rows.values()), "_op": ops})


class Story:
    """One shard, its writer, its loads, and what they come to by the places that they got."""

    def __init__(self, bench: Any, **config: Any) -> None:
        self.bench, self.config = bench, config
        self.table: hg.Table = bench.table
        self.writer = bench.memtable_writer(**config)
        self.puts: list[tuple[int, Rows]] = []
        self.loads: dict[int, tuple[int, Rows]] = {}
        self.loaded: dict[tuple[str, int], Rows] = {}
        self.acknowledged = 0

    def put(self, rows: Rows, *, flush: bool = False) -> None:
        upserts = [{"id": id, "value": value} for id, value in rows.items() if value is not None]
        deletes = [{"id": id} for id, value in rows.items() if value is None]
        for part, send in ((upserts, self.writer.put), (deletes, self.writer.delete)):
            if part:
                position = send(part).wait(timeout=PATIENCE)["0000"][1]
                self.puts.append((position, {row["id"]: row.get("value") for row in part}))
                self.acknowledged = max(self.acknowledged, position + 1)
        if flush:
            self.writer.flush()

    def load(self, rows: Rows, app: str | None = None, version: int | None = None) -> hg.LoadReport:
        load = self.table.bulk_load(app, version)
        self.loaded[load.app, load.version] = rows
        report = load.commit([load.write(batch_of(rows))])
        load.abort()
        return report

    def reopen(self, *, close: bool = False) -> None:
        """Another writer takes over."""
        if close:
            self.writer.close()
        self.writer = self.bench.memtable_writer(self.bench.faulty(), **self.config)

    def compact(self, *, full: bool = True) -> None:
        log = self.bench.log()
        compact_shard(log, ArrowColumnar(log.wal_store), self.bench.rules, max_memory=1 << 28, full=full)

    def gc(self) -> None:
        self.note_places()
        self.table.gc(dry_run=False, min_age=0)

    def note_places(self) -> None:
        """The manifest says where each load stands, until collection forgets it."""
        for load in self.bench.manifest.loads:
            self.loads.setdefault(load.number, (load.position, self.loaded[load.app, load.version]))

    def expected(self) -> dict[int, str]:
        self.note_places()
        steps = [(position, 0, number, rows) for number, (position, rows) in self.loads.items()]
        steps += [(position, 1, 0, rows) for position, rows in self.puts]
        state: dict[int, str] = {}
        for *_, rows in sorted(steps, key=lambda step: step[:3]):
            for id, value in rows.items():
                state.pop(id, None)
                if value is not None:
                    state[id] = value
        return state

    def check(self) -> None:
        want = self.expected()
        assert self.bench.state(self.writer.view()) == want, "in the writer's view"
        assert self.bench.state(self.writer.view("memory")) == want, "with what is in memory"
        assert self.bench.state() == want, "from outside"


def failing(hook: Callable[[str], None]) -> Any:
    """Called at each step of a load, on whatever thread that is; not for what the writer's own threads do."""
    busy = threading.local()

    def at(name: str) -> None:
        if getattr(busy, "inside", False) or not name.startswith(LOADING):
            return
        if threading.current_thread().name.startswith(("headgate-flush", "headgate-records", "headgate-wal", "headgate-abort")):
            return
        busy.inside = True
        try:
            hook(name)
        finally:
            busy.inside = False

    return hooked(at)


def steps_of(load: Callable[[], object]) -> list[str]:
    """The names of all steps that a load takes."""
    names: list[str] = []
    with failing(names.append):
        load()
    return names


# -- C10


def _checkpointed(story: Story) -> None:
    id = story.writer.checkpoint(scope="all").id
    want = story.expected()
    assert story.bench.state(story.bench.reader().view(id)) == want


MEANWHILE: dict[str, Callable[[Story], object]] = {
    "put": lambda s: s.put({1: "meanwhile", 5: "meanwhile"}),
    "delete": lambda s: s.put({1: None, 2: None}),
    "put and flush": lambda s: s.put({1: "meanwhile", 2: None}, flush=True),
    "flush": lambda s: s.writer.flush(),
    "flush, compact": lambda s: (s.writer.flush(), s.compact()),
    "put, flush, compact, collect": lambda s: (s.put({2: "meanwhile"}, flush=True), s.compact(), s.gc()),
    "collect": lambda s: s.gc(),
    "another load": lambda s: s.load({1: "other load", 6: "other load"}),
    "put, another load, put": lambda s: (s.put({1: "before"}), s.load({1: "other load", 2: None}), s.put({3: "after"})),
    "takeover": lambda s: s.reopen(),
    "put, close, takeover, put": lambda s: (s.put({2: "meanwhile"}), s.reopen(close=True), s.put({4: None})),
    "put, read": lambda s: (s.put({1: "meanwhile"}), s.check()),
    "put, checkpoint of all": lambda s: (s.put({2: "meanwhile"}), _checkpointed(s)),
}


def begun(bench: Any, **config: Any) -> Story:
    """Rows in a run, and rows in memory."""
    story = Story(bench, **config)
    story.put({1: "run", 2: "run", 3: "run", 4: "run"}, flush=True)
    story.put({1: "memory", 3: None})
    return story


LOAD: Rows = {1: "load", 2: None, 3: "load", 7: "load"}


@pytest.mark.parametrize("meanwhile", sorted(MEANWHILE))
def test_c10_no_older_row_wins_whatever_happens_between_any_two_steps_of_a_load(make_bench: Callable[..., Any], meanwhile: str) -> None:
    probe = begun(make_bench())
    steps = steps_of(lambda: probe.load(LOAD))
    for at in range(steps.index("bulk.slice"), len(steps) - 2):  # before it, and after, an attempt is registered and given back
        story = begun(make_bench())
        seen = iter(range(len(steps)))

        def stop(name: str, story: Story = story, seen: Iterator[int] = seen, at: int = at) -> None:
            if next(seen, None) == at:
                MEANWHILE[meanwhile](story)
                story.check()

        durable = len(story.puts)
        with failing(stop):
            story.load(LOAD)
        story.check()
        mine = next(position for position, rows in story.loads.values() if rows is LOAD)
        assert all(position < mine for position, _ in story.puts[:durable]), "after all that was durable when it began"
        story.put({2: "last", 7: None})
        story.check()
        story.writer.flush()
        story.compact()
        story.gc()
        story.reopen()
        story.check()


@pytest.mark.parametrize("stop", ["flush.merged", "flush.written", "commit.loaded", "flush.committed"])
@pytest.mark.parametrize("puts", [1, 3])
def test_c10_a_load_that_is_placed_while_a_flush_is_under_way_is_newer_than_what_was_before_it(bench: Any, stop: str, puts: int) -> None:
    story = Story(bench)
    for number in range(puts):
        story.put({1: f"before {number}", 2: f"before {number}"})
    with held("headgate-flush", stop) as hold:
        flushing = in_thread(story.writer.flush)
        hold.reached()
        story.load({1: "load", 3: "load"})
        story.put({3: "after"})
        story.load({4: "load", 3: None})
        story.check()
    flushing.join(PATIENCE)
    story.check()
    story.writer.flush()
    story.check()


@pytest.mark.parametrize("view", ["durable", "memory"])
def test_c10_a_view_that_took_its_memtables_before_a_flush_has_cut_them_at_a_load(bench: Any, view: Any) -> None:
    story = Story(bench)
    story.put({1: "old"})
    story.load({1: "load"})
    story.put({2: "new"})
    found: list[dict[int, str]] = []
    with held("viewer", "view.memory") as viewing:
        reading = in_thread(lambda: found.append(bench.state(story.writer.view(view))), name="viewer")
        viewing.reached()
        with held("headgate-flush", "flush.committed", before=viewing) as hold:
            flushing = in_thread(story.writer.flush)
            hold.reached()
            viewing.let_go()
            reading.join(PATIENCE)
        flushing.join(PATIENCE)
    assert found == [{1: "load", 2: "new"}]


def test_c10_a_view_waits_for_entries_that_stand_before_a_load_and_are_not_acknowledged_here_yet(bench: Any, arrivals: Any) -> None:
    story = Story(bench)
    story.put({1: "before"})
    with held("headgate-wal", "pipeline.persisted", prefix="headgate") as hold:
        ack = story.writer.put([{"id": 1, "value": "on its way"}])
        hold.reached()
        story.load({2: "load"})
        assert bench.state() == {1: "on its way", 2: "load"}
        found: list[dict[int, str]] = []
        reading = in_thread(lambda: found.append(bench.state(story.writer.view())))
        hold.let_go()
        reading.join(PATIENCE)
    story.puts.append((ack.wait(timeout=PATIENCE)["0000"][1], {1: "on its way"}))
    assert found == [{1: "on its way", 2: "load"}]
    story.check()


def test_c10_a_flush_across_several_loads_writes_a_generation_on_each_side(bench: Any) -> None:
    story = Story(bench)
    for number in range(4):
        story.put({1: f"put {number}", number + 10: "put"})
        story.load({1: f"load {number}", number + 10: None})
    story.put({1: None})
    story.check()
    story.writer.flush()
    runs = bench.manifest.runs
    assert [(run.first, run.end) for run in runs] == [(0, 1), (1, 1), (1, 2), (2, 2), (2, 3), (3, 3), (3, 4), (4, 4), (4, 5)]
    assert story.writer.memtable_stats().flushed == 5
    assert story.writer.backpressure_stats().held_bytes == 0
    story.check()
    assert bench.state() == {}


def test_c10_a_replay_across_loads_and_seals_puts_everything_back_in_its_place(bench: Any) -> None:
    story = Story(bench)
    for number in range(5):
        story.put({1: f"put {number}", 2: f"put {number}"})
        story.load({1: f"load {number}"})
        story.reopen()
        if number % 2:
            story.load({2: None, 3: f"after seal {number}"})
        story.check()
    story.put({3: "last"})
    story.reopen()
    story.check()
    story.writer.flush()
    story.check()


@pytest.mark.parametrize("rows", [1, 2, 100])
def test_c10_a_replay_that_is_flushed_on_the_way_is_cut_at_loads(bench: Any, rows: int) -> None:
    story = Story(bench)
    for number in range(6):
        story.put({1: f"put {number}", number + 10: "put"})
        if number % 2:
            story.load({1: f"load {number}", number + 9: None})
    story.config = {"max_memtable_rows": rows}
    story.reopen()
    story.check()
    story.reopen(close=True)
    story.check()


def test_c10_compaction_leaves_loads_past_the_cursor_alone(bench: Any) -> None:
    story = begun(bench)
    story.load({1: "load", 3: "load"})
    story.put({1: "newer"})
    before = [run.id for run in bench.manifest.runs]
    story.compact()
    assert bench.manifest.runs[-1].id == before[-1], "what is before its place is still in the log"
    story.check()
    story.writer.flush()
    story.compact()
    assert len(bench.manifest.runs) == 1
    story.check()


def test_c10_a_tombstone_of_a_load_hides_what_is_still_in_memory_and_survives_compaction_above_the_base(bench: Any) -> None:
    story = Story(bench)
    story.put(dict.fromkeys(range(50), "base"), flush=True)
    story.put({1: "memory", 60: "memory"})
    story.load({1: None, 60: None, 2: None})
    story.check()
    story.writer.flush()
    story.compact(full=False)
    story.check()
    story.compact()
    story.check()


def test_c10_many_writers_loads_and_readers_at_once_on_one_shard(bench: Any) -> None:
    """Real threads; every key is written by one of them, with values that grow, so nobody may see one go back."""
    story = Story(bench, max_memtable_rows=7)
    stop, seen, failures = threading.Event(), dict.fromkeys(range(4), -1), []

    def read() -> None:
        reader = bench.reader()
        low = {"outside": dict(seen), "writer": dict(seen)}
        while not stop.is_set():
            for who, view in (("outside", reader.view), ("writer", story.writer.view)):
                for id, value in bench.state(view()).items():
                    if int(value) < low[who].get(id, -1):
                        failures.append((who, id, value, low[who][id]))
                    low[who][id] = int(value)

    reading = in_thread(read)
    for number in range(25):
        story.writer.put([{"id": 0, "value": f"{number}"}, {"id": 1, "value": f"{number}"}])
        story.load({2: f"{number}", 3: f"{number}"})
        if number % 5 == 4:
            story.compact()
    stop.set()
    reading.join(PATIENCE)
    assert not failures
    assert bench.state() == dict.fromkeys(range(4), "24")


# -- what else reads a cut MemTable


def test_c10_searches_see_what_is_in_memory_below_a_load_once_and_in_its_place(tmp_path: Any) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), False), ("body", pa.string()), ("e", pa.list_(pa.float32(), 2))])
    indexes = [hg.text_index("body"), hg.vector_index("e")]
    table = hg.create_table(tmp_path / "t", schema, key="id", indexes=indexes)

    def rows(**bodies: str) -> pa.Table:
        return pa.Table.from_pylist(
            [{"id": int(id[1:]), "body": body, "e": [float(id[1:]), 0.0]} for id, body in bodies.items()], schema=schema
        )

    for flushed in (False, True):
        with table.writer(hg.ShardWriterConfig(sync_indexed_write=True)) as writer:
            writer.put(rows(k1="red fox", k2="red hen", k3="blue cow")).wait()
            table.load(rows(k1="green fox", k4="red pig"))
            writer.put(rows(k4="black pig", k5="red owl")).wait()
            if flushed:
                writer.flush()
            for one in (table, hg.open_table(tmp_path / "t")):
                assert sorted(one.search_text("body", "red")["id"].to_pylist()) == [2, 5]
                assert one.search_text("body", "green")["id"].to_pylist() == [1]
                assert one.search("e", [1.0, 0.0], k=2)["id"].to_pylist()[0] == 1
                assert sorted(one.search("e", [0.0, 0.0], k=10)["id"].to_pylist()) == [1, 2, 3, 4, 5]
                assert one.lookup([1, 4])["body"].to_pylist() == ["green fox", "black pig"]
                assert one.scan(filter="body like '%pig%'").to_arrow()["body"].to_pylist() == ["black pig"]
                assert one.scan(freshness="memory").count() == 5
                assert one.sql("select count(*) as n from t where body like 'red%'")["n"].to_pylist() == [2]


def test_c10_what_is_held_in_memory_is_counted_the_same_after_a_cut(bench: Any) -> None:
    story = Story(bench)
    for number in range(6):
        story.put({number: "x" * 1000})
    held_bytes = story.writer.backpressure_stats().held_bytes
    story.load({1: "load"})
    story.put({8: "x" * 1000})
    stats = story.writer.memtable_stats()
    assert (stats.active_rows, stats.frozen_rows) == (7, 0)
    with held("headgate-flush", "flush.merged") as hold:
        story.check()  # cuts, and what is cut off is flushed
        hold.reached()
        after = story.writer.memtable_stats()
        assert (after.active_rows, after.frozen_rows) == (1, 6)
        assert after.active_bytes + after.frozen_bytes == stats.active_bytes
        assert story.writer.backpressure_stats().held_bytes == stats.active_bytes + 2 * held_bytes, "and what the flush makes of it"
    story.writer.flush()
    assert story.writer.backpressure_stats().held_bytes == 0


# -- checkpoints


def test_c10_a_checkpoint_keeps_loads_past_the_cursor_with_what_is_before_and_after_them(bench: Any) -> None:
    story = begun(bench)
    story.load({1: "load", 2: None})
    story.put({2: "newer", 8: "newer"})
    want = story.expected()
    checkpoints = [story.writer.checkpoint(scope="durable").id, story.table.checkpoint().id]
    story.put({1: "later"})
    story.load({8: None, 3: "later"})
    checkpoints.append(story.writer.checkpoint(scope="durable").id)
    last = story.expected()
    for _ in range(2):
        for id, state in zip(checkpoints, (want, want, last), strict=True):
            assert bench.state(bench.reader().view(id)) == state
        story.writer.flush()
        story.compact()
        story.gc()
        story.reopen()
    story.check()


@pytest.mark.parametrize("stop", ["checkpoint.flushed", "commit.loaded"])
def test_k04_a_checkpoint_of_all_that_meets_a_load_past_the_cursor_flushes_again(bench: Any, crew: Any, stop: str) -> None:
    story = begun(bench)
    crew.stops = {stop}
    taking = crew.actor(lambda: story.writer.checkpoint(scope="all").id)
    taking.step_to(stop)
    crew.stops = {"nowhere"}
    if stop == "checkpoint.flushed":  # later no entry is sent until it is known whether the log is clean
        story.put({1: "after the flush"})
    story.load({1: "load", 9: "load"})
    id = taking.finish()
    record = bench.manifest.checkpoints[id]
    assert record.position == record.end, "it needs nothing of the log"
    pinned = bench.log().manifests.at(record.version)
    assert not pinned.loads_past_cursor()
    state = bench.state(bench.reader().view(id))
    assert state == story.expected() or 9 not in state, "with the load and all before it, or without it"
    story.put({1: "at last"})
    story.check()
    story.reopen()
    story.check()


def test_k04_after_a_checkpoint_of_all_with_loads_the_log_may_go(bench: Any) -> None:
    story = begun(bench)
    story.load({1: "load"})
    story.put({2: "newer"})
    story.load({2: None})
    story.writer.checkpoint("end", scope="all")
    want = story.expected()
    story.writer.abort()
    for info in list(bench.inner.list("wal/")):
        bench.inner.delete([info.key])
    assert bench.state() == want
    assert bench.state(bench.reader().view("end")) == want
    story.reopen()
    story.check()


@pytest.mark.parametrize("scope", ["all", "durable"])
def test_k04_a_fenced_writer_takes_no_checkpoint_that_misses_what_its_successor_has_acknowledged(bench: Any, scope: Any) -> None:
    story = begun(bench)
    fenced = story.writer
    story.reopen()
    story.put({1: "successor"})
    with pytest.raises(hg.FencedError):
        fenced.checkpoint(scope=scope)
    assert bench.manifest.checkpoints == {}


# -- G02, G07: collection beside loads


def test_g07_a_load_whose_attempt_ended_before_it_was_announced_is_refused_and_nothing_is_named(bench: Any) -> None:
    clock = Jumping()
    table = later(bench.table, clock)
    load = table.bulk_load("app", 1, lease=10)
    files = load.write(batch_of({1: "load"}))
    clock.ahead = 1000.0
    table.gc(dry_run=False, min_age=0)
    with pytest.raises(hg.CommitConflictError, match="lease"):
        load.commit([files])
    assert bench.state() == {}
    assert bench.manifest.announced == {}
    assert bench.manifest.loads == ()
    table.load(batch_of({1: "again"}), app="app", version=1)
    assert bench.state() == {1: "again"}


@pytest.mark.parametrize("at", ["transaction.announced", "transaction.decided", "load.tip"])
def test_g07_lease_expiry_beside_an_announced_load_takes_nothing_that_can_still_be_placed(bench: Any, at: str) -> None:
    """Collection comes an hour later, while the loader sleeps. Whatever it decides, the loader and the readers agree."""
    clock = Jumping()
    patient, sleepy = later(bench.table, clock), bench.table
    load = sleepy.bulk_load("app", 1)
    files = load.write(batch_of({1: "load", 2: "load"}))

    def sleep(name: str) -> None:
        if name == at:
            clock.ahead += 100_000.0
            patient.gc(dry_run=False, min_age=0)
            patient.gc(dry_run=False, min_age=0)

    with failing(sleep):
        if at == "transaction.announced":
            with pytest.raises(hg.TransactionConflictError, match=r"aborted|withdrawn"):
                load.commit([files])
            assert bench.state() == {}
        else:
            load.commit([files])
            assert bench.state() == {1: "load", 2: "load"}
    patient.gc(dry_run=False, min_age=0)
    assert bench.state() == ({} if at == "transaction.announced" else {1: "load", 2: "load"})
    sleepy.load(batch_of({1: "second"}), app="app", version=2)
    assert bench.state()[1] == "second", "the application goes on"
    assert bench.manifest.announced == {}


def test_g07_an_aborted_try_that_was_collected_can_not_be_carried_out_by_whoever_wakes_up(bench: Any) -> None:
    """The name of an intent that is free again must not be taken by those whose announcements were withdrawn."""
    clock = Jumping()
    patient = later(bench.table, clock)
    load = bench.table.bulk_load("app", 1)
    files = load.write(batch_of({1: "sleeper"}))

    def sleep(name: str) -> None:
        if name == "transaction.announced":
            clock.ahead += 100_000.0
            for _ in range(3):
                patient.gc(dry_run=False, min_age=0)
                clock.ahead += 100_000.0

    with failing(sleep), pytest.raises(hg.TransactionConflictError):
        load.commit([files])
    # Neither it, nor another attempt, nor the next version is stuck.
    assert bench.table.load(batch_of({1: "again"}), app="app", version=1).committed
    assert bench.table.load(batch_of({1: "next"}), app="app", version=2).committed
    assert bench.state() == {1: "next"}


def test_g07_a_load_without_a_name_that_sleeps_until_it_is_forgotten_says_that_it_does_not_know(bench: Any) -> None:
    """Others carry it out, collect its intent, and days later its mark. Told that it failed, somebody would load it again."""
    clock = Jumping()
    patient = later(bench.table, clock)
    load = bench.table.bulk_load()
    files = load.write(batch_of({1: "load"}))

    def sleep(name: str) -> None:
        if name == "transaction.decided":
            for _ in range(4):
                clock.ahead += 100_000.0
                patient.gc(dry_run=False, min_age=0)

    with failing(sleep), pytest.raises(hg.OutcomeUnknownError):
        load.commit([files])
    assert bench.manifest.transactions == {}
    assert bench.state() == {1: "load"}


def test_g07_a_withdrawn_load_is_not_placed(bench: Any) -> None:
    load = bench.table.bulk_load("app", 1)
    files = load.write(batch_of({1: "load"}))

    def take_away(name: str) -> None:
        if name == "transaction.decided":
            for id in bench.manifest.announced:
                withdraw(bench.log(), id)

    with failing(take_away), pytest.raises(hg.TransactionConflictError, match="withdrawn"):
        load.commit([files])
    assert bench.state() == {}


@pytest.mark.parametrize("full", [False, True])
def test_g02_files_of_a_load_in_the_making_outlive_any_collection(bench: Any, full: bool) -> None:
    story = begun(bench)
    load = story.table.bulk_load()
    story.loaded[load.app, load.version] = LOAD
    story.gc()
    files = load.write(batch_of(LOAD))
    story.gc()
    overtaken = 0

    def between(name: str) -> None:
        nonlocal overtaken
        overtaken += name == "commit.loaded"
        if name != "commit.loaded" or overtaken % 2:  # every other time, so that commits get through
            story.gc()

    with failing(between):
        load.commit([files])
    load.abort()
    story.check()
    story.writer.flush()
    story.compact(full=full)
    story.gc()
    story.check()
    log = bench.log()
    named = {part.path for run in bench.manifest.runs for part in run.slices}
    there = {info.key.rsplit("/", 1)[0] for info in bench.inner.list(f"shards/0000-{log.table_id}/runs/")}
    assert there == named, "and nothing else is left"
    assert not list(bench.inner.list("txn/"))


@pytest.mark.parametrize("outcome", ["lost_reply", "fail"])
def test_g07_an_intent_with_an_unknown_outcome_is_found_or_not_by_the_next_attempt_and_its_rows_never_mix(
    bench: Any, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = bench.table.bulk_load("app", 1)
    files = load.write(batch_of({1: "first", 2: "first"}))
    from headgate import transaction

    create = transaction.create_exactly

    def unknown(store: Any, key: str, body: Any, *rest: Any) -> Any:
        if outcome == "lost_reply":
            create(store, key, body, *rest)
        raise hg.StoreUnavailableError(f"no answer to create {key}", object=key)

    monkeypatch.setattr(transaction, "create_exactly", unknown)
    with pytest.raises(hg.StoreUnavailableError):
        load.commit([files])
    load.abort()
    monkeypatch.undo()
    assert bench.state() == {}
    bench.table.gc(dry_run=False, min_age=0)
    report = bench.table.load(batch_of({2: "second", 3: "second"}), app="app", version=1)
    assert report.committed == (outcome == "fail")
    first, second = {1: "first", 2: "first"}, {2: "second", 3: "second"}
    assert bench.state() == (first if outcome == "lost_reply" else second)
    bench.table.gc(dry_run=False, min_age=0)
    assert bench.manifest.announced == {}
    assert not list(bench.inner.list("txn/"))


# -- several shards


class Shards:
    """A table with several shards, and attempts at one transaction that die at any step."""

    def __init__(self, uri: str, shards: int = 3) -> None:
        schema = pa.schema([pa.field("id", pa.int64(), False), ("value", pa.string())])
        self.clock = Jumping()
        self.table = hg.create_table(uri, schema, key="id", sharding=hg.bucket("id", shards))
        self.late = later(self.table, self.clock)

    def load(self, value: str, version: int = 1, table: hg.Table | None = None) -> hg.LoadReport:
        load = (table or self.table).bulk_load("app", version)
        return load.commit([load.write(batch_of(dict.fromkeys(range(20), f"{value}")))])

    def values(self) -> set[str]:
        """What is there of each shard, with how many rows; a whole attempt has one value and 20 rows."""
        rows = self.table.scan().to_arrow().to_pylist()
        assert len(rows) in (0, 20), f"{len(rows)} rows of 20 are there"
        return {row["value"] for row in rows}

    def die_at(self, number: int, value: str) -> bool:
        """An attempt that ends after its n-th step, on all its threads. False: it was done before."""
        count = 0
        lock = threading.Lock()

        def step(name: str) -> None:
            nonlocal count
            with lock:
                count += 1
                if count > number:
                    raise Dead

        try:
            with failing(step):
                self.load(value)
        except Dead:
            return True
        return False


_numbers = iter(range(10**9))


def shards(count: int = 3) -> Shards:
    return Shards(f"memory://loads-{next(_numbers)}", count)


def test_c09_whatever_a_dead_attempt_left_another_one_ends_with_one_of_the_two_in_all_shards() -> None:
    number = 0
    while (made := shards()) and made.die_at(number, "dead"):
        number += 1
        decided = bool(list(store_of(made.table).list("txn/")))
        report = made.load("second")
        assert made.values() == ({"dead"} if decided else {"second"})
        assert report.committed is not decided
        made.late.gc(dry_run=False, min_age=0)
        assert made.load("third").committed is False, "the version is there"
        assert made.load("next", 2).committed
        assert made.values() == {"next"}
    assert number > 20, "it died at every step"


@pytest.mark.parametrize("who", ["collection", "feed"])
def test_p11_a_transaction_that_died_half_way_is_finished_or_undone_by_whoever_meets_it(who: str) -> None:
    number = 0
    while (made := shards()) and made.die_at(number, "dead"):
        number += 3
        made.clock.ahead = 100_000.0
        decided = bool(list(store_of(made.table).list("txn/")))
        if who == "collection":
            made.late.gc(dry_run=False, min_age=0)
        else:
            delivered = sum(batch.num_rows for batch in made.late.changes(start="earliest"))
            assert delivered in (0, 20)
        assert made.values() == ({"dead"} if decided else set())
        assert all(not shard.log.manifests.load().announced for shard in made.table.shards)
        assert made.load("second").committed is not decided
        assert len(made.values()) == 1
    assert number > 20


@pytest.mark.parametrize("seed", range(4))
def test_p11_attempts_at_once_bring_in_one_of_them(seed: int) -> None:
    made, rng = shards(), random.Random(seed)
    reports: list[hg.LoadReport] = []
    errors: list[BaseException] = []
    start = threading.Barrier(3)

    def attempt(number: int) -> None:
        load = made.table.bulk_load("app", 1)
        files = load.write(batch_of(dict.fromkeys(range(20), f"{number}")))
        start.wait(PATIENCE)
        try:
            reports.append(load.commit([files]))
        except hg.HeadgateError as error:
            errors.append(error)

    def disturb(name: str) -> None:
        if rng.random() < 0.3:
            threading.Event().wait(rng.random() / 500)

    with failing(disturb):
        threads = [in_thread(lambda number=number: attempt(number)) for number in range(3)]
        for thread in threads:
            thread.join(PATIENCE)
    assert not errors
    assert len(made.values()) == 1
    assert sum(report.committed for report in reports) == 1
    made.table.gc(dry_run=False, min_age=0)
    assert len(made.values()) == 1


def test_p11_a_stalled_attempt_that_wakes_up_after_all_is_over_and_collected_brings_in_nothing() -> None:
    """At each of its steps in turn."""
    steps = steps_of(lambda: shards().load("probe"))
    for at in range(len(steps)):
        made = shards()
        seen = iter(range(len(steps)))

        def stop(name: str, made: Shards = made, seen: Iterator[int] = seen, at: int = at) -> None:
            if next(seen, None) == at:
                made.clock.ahead += 100_000.0
                made.late.gc(dry_run=False, min_age=0)
                made.load("faster", table=made.late)
                made.late.gc(dry_run=False, min_age=0)
                made.clock.ahead += 100_000.0
                made.late.gc(dry_run=False, min_age=0)

        with failing(stop):
            try:
                made.load("stalled")
            except (hg.CommitConflictError, hg.TransactionConflictError):
                assert made.values() == {"faster"}, steps[at]
        assert len(made.values()) == 1, steps[at]
        made.late.gc(dry_run=False, min_age=0)
        assert made.load("next", 2).committed, steps[at]
        assert made.values() == {"next"}


@pytest.mark.parametrize("at", ["bulk.joined", "transaction.announced", "transaction.decided", "load.tip", "transaction.placed"])
def test_p11_an_earlier_version_that_is_overtaken_comes_whole_before_the_later_one_or_not_at_all(at: str) -> None:
    made, done = shards(), False

    def overtake(name: str) -> None:
        nonlocal done
        if name == at and not done:
            done = True
            load = made.table.bulk_load("app", 2)
            load.commit([load.write(batch_of(dict.fromkeys(range(10), "later")))])

    with failing(overtake):
        try:
            is_there = made.load("earlier").committed
        except hg.TransactionConflictError:
            is_there = False
    assert is_there == (at not in ("bulk.joined", "transaction.announced"))
    rows = {row["id"]: row["value"] for row in made.table.scan().to_arrow().to_pylist()}
    later = dict.fromkeys(range(10), "later")
    assert rows == (dict.fromkeys(range(20), "earlier") | later if is_there else later)
    assert all(not shard.log.manifests.load().announced for shard in made.table.shards)


def test_p11_a_version_that_was_aborted_by_a_later_one_and_forgotten_is_not_told_that_it_came_in() -> None:
    made, done = shards(), False

    def overtake(name: str) -> None:
        nonlocal done
        if name == "transaction.announced" and not done:
            done = True
            made.load("later", 2)
            made.late.gc(dry_run=False, min_age=0)

    with failing(overtake), pytest.raises(hg.OutcomeUnknownError, match="a later one has overtaken it"):
        made.load("earlier")
    assert made.values() == {"later"}


def test_p11_collection_keeps_the_intent_of_a_transaction_that_a_new_shard_has_not_got_yet(tmp_path: Any) -> None:
    """t0 collection knows two shards · t1 a load makes a third, decides, and dies before it is placed there · t2 it collects."""
    schema = pa.schema([pa.field("tenant", pa.string(), False), pa.field("id", pa.int64(), False), ("value", pa.string())])
    table = hg.create_table(tmp_path / "t", schema, key=["tenant", "id"], sharding=hg.identity("tenant"))

    def rows(tenants: str, value: str) -> pa.Table:
        return pa.Table.from_pylist([{"tenant": tenant, "id": 1, "value": value} for tenant in tenants], schema=schema)

    table.load(rows("ab", "old"))
    collecting = hg.open_table(tmp_path / "t")

    def load_and_die() -> None:
        load = table.bulk_load("app", 1)
        files = load.write(rows("abc", "new"))
        last = hg.open_table(tmp_path / "t").shards[-1].id

        def partly(self: Transactions, found: Intent) -> None:
            for shard in sorted(found.loads):
                if shard != last:
                    place(self.log_of(shard), found.loads[shard], found.app, found.version)
            raise Dead

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Transactions, "carry_out", partly)
            with pytest.raises(Dead):
                load.commit([files])

    done = False

    def meanwhile(name: str) -> None:
        nonlocal done
        if name == "gc.intents.listing" and not done:
            done = True
            load_and_die()

    with hooked(meanwhile):
        collecting.gc(dry_run=False, min_age=0)
    assert done
    clock = Jumping()
    clock.ahead = 100_000.0
    later(hg.open_table(tmp_path / "t"), clock).gc(dry_run=False, min_age=0)
    found = hg.open_table(tmp_path / "t").scan().to_arrow()
    assert sorted(zip(found["tenant"].to_pylist(), found["value"].to_pylist(), strict=True)) == [("a", "new"), ("b", "new"), ("c", "new")]


# -- identity tables


def test_c10_a_load_makes_the_shards_it_needs_also_those_that_somebody_else_has_just_made(tmp_path: Any) -> None:
    schema = pa.schema([pa.field("tenant", pa.string(), False), pa.field("id", pa.int64(), False)])
    table = hg.create_table(tmp_path / "t", schema, key=["tenant", "id"], sharding=hg.identity("tenant"))
    load = table.bulk_load("app", 1)
    with table.writer() as writer:
        writer.put([{"tenant": "made by a writer", "id": 1}]).wait()
    other = table.bulk_load()
    other.commit([other.write(pa.Table.from_pylist([{"tenant": "made by a load", "id": 1}], schema=schema))])
    rows = [{"tenant": tenant, "id": 2} for tenant in ("made by a writer", "made by a load", "new")]
    files = load.write(pa.Table.from_pylist(rows, schema=schema))
    table.gc(dry_run=False, min_age=0)
    with table.writer() as writer:
        writer.put([{"tenant": "made later", "id": 1}]).wait()
    assert load.commit([files]).committed
    assert sorted(hg.open_table(tmp_path / "t").scan().to_arrow()["id"].to_pylist()) == [1, 1, 1, 2, 2, 2]


# -- threads and clocks


def later(table: hg.Table, clock: Any) -> hg.Table:
    """The same table, by another clock."""
    return hg.Table(replace(table._places, clock=clock), table._watch.refresh())


def store_of(table: hg.Table) -> Any:
    return table._places.table_store()


def in_thread(run: Callable[[], object], name: str = "test") -> threading.Thread:
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


class Hold:
    """A thread that stops at a step, once, until it is let go."""

    def __init__(self, thread: str, step: str, before: Hold | None) -> None:
        self._thread, self._step, self._before = thread, step, before
        self._there, self._go = threading.Event(), threading.Event()

    def __call__(self, name: str) -> None:
        if self._before is not None:
            self._before(name)
        if name == self._step and threading.current_thread().name.startswith(self._thread) and not self._there.is_set():
            self._there.set()
            assert self._go.wait(PATIENCE)

    def reached(self) -> None:
        assert self._there.wait(PATIENCE), f"nobody came to {self._step}"

    def let_go(self) -> None:
        self._go.set()


@contextmanager
def held(thread: str, step: str, *, before: Hold | None = None, prefix: str | None = None) -> Iterator[Hold]:
    hold = Hold(prefix or thread, step, before)
    with hooked(hold):
        try:
            yield hold
        finally:
            hold.let_go()
