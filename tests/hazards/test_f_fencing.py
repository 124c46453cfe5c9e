"""Hazards of fencing: one writer at a time can acknowledge, however slow, late or dead the others are."""

from __future__ import annotations

import itertools
import multiprocessing
import random
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import headgate as hg
from headgate.clock import SYSTEM_CLOCK, Clock, SystemClock, ulid
from headgate.failpoint import hooked
from headgate.manifest import ChainPoint, ManifestChain
from headgate.manifest.model import HISTORY_VERSIONS_MAX, ConsumerRecord
from headgate.store.faulty import Fault
from headgate.store.memory import MemoryStore
from headgate.wal.block import Entries
from headgate.wal.collect import collect_entries, trim
from headgate.wal.entry import SEAL_BYTES, Entry
from headgate.wal.fence import open_epoch
from headgate.wal.marker import put_seal
from headgate.wal.tip import find_tip

OPEN_STEPS = [
    "marker.made",
    "fence.surveyed",
    "commit.loaded",
    "commit.created",
    "fence.claimed",
    "fence.before-seal",
    "fence.sealed",
    "fence.walked",
    "fence.verified",
]


def give_up_all(bench: Any, *, sweep: bool = True) -> None:
    """What a flush and a collection at ``min_age=0`` do to the log, as far as it can be done."""
    trim(bench.log(bench.inner), find_tip(bench.log(bench.inner))[1].position)
    collect_entries(bench.log(bench.inner), dry_run=False, sweep=sweep)


# -- the scenarios: each is a hazard of its own, and F15 runs them again under strange clocks


def two_writers_interleaved(bench: Any, seed: int) -> None:
    rng = random.Random(seed)
    held: list[Any] = [None, None]
    acked: list[int] = []
    sent = itertools.count()
    for _ in range(40):
        who = rng.randrange(2)
        if held[who] is None or rng.random() < 0.15:
            held[who] = bench.appender()
            continue
        number = next(sent)
        try:
            held[who].append([bench.rows(number)])
            acked.append(number)
        except hg.FencedError:
            held[who] = None
    assert acked, "somebody wrote"
    bench.appender()
    assert bench.ids() == acked, f"seed {seed}"


def a_claim_alone_fences(bench: Any, crew: Any) -> None:
    first = bench.appender()
    first.append([bench.rows(1)])
    second = crew.actor(bench.appender)
    second.step_to("fence.sealed")  # claimed and sealed, and does nothing more
    with pytest.raises(hg.FencedError):
        first.append([bench.rows(2)])
    with pytest.raises(hg.FencedError):
        first.append([bench.rows(3)])
    assert bench.ids() == [1]
    assert second.finish().append([bench.rows(4)])[0] == 2


def places_of(replayed: list[Entry | Entries]) -> list[tuple[int, int]]:
    """Epoch and position of each; entries that follow each other may come together."""
    return [(e.epoch, e.position + n) for e in replayed for n in range(len(e) if isinstance(e, Entries) else 1)]


def acks_during_a_claim_are_in_its_replay(bench: Any) -> None:
    for step in OPEN_STEPS:
        incumbent = bench.appender()
        incumbent.append([bench.rows(0)])
        acked: list[tuple[int, int]] = []
        replayed: list[Entry | Entries] = []

        def append_at(name: str, at: str = step, writer: Any = incumbent, told: list[tuple[int, int]] = acked) -> None:
            if name != at or told:
                return
            for number in (1, 2):
                try:
                    told.append(writer.append([bench.rows(number)]))
                except hg.FencedError:
                    return

        with hooked(append_at):
            claim = open_epoch(bench.log(), replay=replayed.append)
        places = places_of(replayed)
        assert len(places) == len(set(places)), step
        assert set(acked) <= set(places), step
        assert all(position < claim.first.position for _, position in acked)
        if step in ("fence.surveyed", "commit.loaded", "fence.before-seal"):
            assert acked, f"the incumbent could still write at {step}"
        if step in ("fence.sealed", "fence.walked", "fence.verified"):
            assert not acked, f"the incumbent was fenced by {step}"


def a_stalled_writer_wakes_after_collection(bench: Any) -> None:
    stalled = bench.appender()
    for i in range(3):
        stalled.append([bench.rows(i)])
    for generation in range(4):
        bench.appender().append([bench.rows(100 + generation)])
        give_up_all(bench)
        with pytest.raises(hg.FencedError):
            stalled.append_puts([hg.Put(bench.rows(66))])
        stalled._failure = None  # a process that stalled before it noticed, not one that knows
    assert 66 not in bench.ids()


def a_slow_claimant_over_collected_entries(bench: Any, crew: Any, at: str) -> None:
    """B stops in its open; the incumbent goes on; C takes over, flushes, collects; B goes on."""
    incumbent = bench.appender()
    incumbent.append([bench.rows(0)])
    slow = crew.actor(bench.appender)
    slow.step_to("fence.surveyed")
    for i in (1, 2, 3):
        incumbent.append([bench.rows(i)])
    if at != "fence.surveyed":
        slow.step_to(at)
    quick = bench.appender()
    quick.append([bench.rows(4)])
    give_up_all(bench)
    quick.append([bench.rows(5)])
    if at in ("fence.surveyed", "commit.loaded"):
        # It had not claimed yet: it is not slow, it is next.
        assert slow.finish().append([bench.rows(6)])[0] == 3
        with pytest.raises(hg.FencedError):
            quick.append([bench.rows(7)])
        assert bench.ids() == [5, 6]
    else:
        with pytest.raises(hg.FencedError):
            slow.finish()
        quick.append([bench.rows(6)])
        bench.appender().append([bench.rows(7)])
        assert bench.ids() == [5, 6, 7]
    assert bench.table.verify(deep=True).ok


def claimants_that_die_at_a_step(bench: Any, step: str, crash: type[Exception], times: int) -> None:
    def die(name: str) -> None:
        if name == step:
            raise crash(name)

    with bench.appender() as first:
        first.append([bench.rows(1)])
    for _ in range(times):
        with hooked(die):
            try:
                bench.appender()
            except crash:
                pass
    last = bench.appender()
    last.append([bench.rows(2)])
    assert bench.ids() == [1, 2]
    assert bench.table.verify(deep=True).ok
    assert len(bench.manifest.segments) <= 2, "reopens in a row are one row of the table of ends"

    give_up_all(bench)
    bench.store.requests.clear()
    bench.appender().append([bench.rows(3)])
    assert sum(bench.store.requests.values()) < 30, "what lies before the flush costs nothing"
    assert bench.ids() == [3]


# -- F01


@pytest.mark.parametrize("seed", range(8))
def test_f01_two_writers_interleaved_keep_every_acknowledged_row_once(bench: Any, seed: int) -> None:
    two_writers_interleaved(bench, seed)


def test_f01_writers_that_take_over_from_each_other_in_threads_lose_and_double_nothing(bench: Any) -> None:
    acked: list[int] = []
    numbers = itertools.count()
    lock = threading.Lock()

    def work() -> None:
        for _ in range(4):
            try:
                writer = bench.writer(bench.faulty(), max_wal_buffer_size=1)
                for _ in range(5):
                    with lock:
                        number = next(numbers)
                    writer.put(bench.rows(number)).wait(bench.PATIENCE)
                    with lock:
                        acked.append(number)
            except hg.FencedError:
                continue

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(bench.PATIENCE)
        assert not thread.is_alive()
    bench.writer()
    found = bench.ids()
    assert acked
    assert set(acked) <= set(found)
    assert len(found) == len(set(found))


# -- F02


def test_f02_a_claim_that_does_nothing_more_fences_the_incumbent(bench: Any, crew: Any) -> None:
    a_claim_alone_fences(bench, crew)


def test_f02_whatever_the_incumbent_acknowledged_during_a_claim_is_replayed(bench: Any) -> None:
    acks_during_a_claim_are_in_its_replay(bench)


def test_f02_a_busy_incumbent_racing_a_claim_loses_nothing_it_acknowledged(bench: Any) -> None:
    incumbent = bench.writer(bench.faulty(), max_wal_buffer_size=1, max_inflight=4)
    acked: set[tuple[int, int]] = set()
    started = threading.Event()

    def write() -> None:
        try:
            for number in itertools.count():
                acked.add(incumbent.put(bench.rows(number)).wait(bench.PATIENCE)["0000"])
                started.set()
        except hg.FencedError:
            return

    thread = threading.Thread(target=write)
    thread.start()
    assert started.wait(bench.PATIENCE)
    replayed: list[Entry | Entries] = []
    open_epoch(bench.log(), replay=replayed.append)
    thread.join(bench.PATIENCE)
    assert not thread.is_alive()
    assert acked <= set(places_of(replayed))


# -- F03


def test_f03_a_writer_that_wakes_after_collection_never_acknowledges(bench: Any) -> None:
    a_stalled_writer_wakes_after_collection(bench)


def test_f03_a_put_on_its_way_while_all_that_happens_is_refused(bench: Any, crew: Any) -> None:
    crew.stops = {"append.encoded"}
    incumbent = bench.appender()
    incumbent.append([bench.rows(0)])
    stalled = crew.actor(lambda: incumbent.append([bench.rows(1)]))
    stalled.step_to("append.encoded")
    for _ in range(3):
        bench.appender().append([bench.rows(2)])
        give_up_all(bench)
    with pytest.raises(hg.FencedError):
        stalled.finish()
    assert bench.ids() == []


def test_f03_collection_deletes_data_and_never_a_seal(bench: Any) -> None:
    for i in range(4):
        bench.appender().append([bench.rows(i)])
    give_up_all(bench)
    left = [key for key in bench.contents() if key.endswith(".arrow")]
    assert [len(bench.contents()[key]) for key in left] == [SEAL_BYTES] * 3


# -- F04


@dataclass
class Schedule:
    """One interleaving that was run: who was chosen, and who could have been."""

    chosen: list[int]
    alive: list[list[int]]


def run_openers(bench: Any, crew: Any, openers: int, choose: Callable[[int, list[int]], int]) -> Schedule:
    """Openers and their incumbent, one step at a time as ``choose`` says; then the laws of fencing are checked."""
    acked: list[tuple[int, int]] = []
    incumbent = bench.appender(bench.inner)
    acked.append((incumbent.append([bench.rows(0)])[0], 0))

    def incumbent_life() -> None:
        acked.append((incumbent.append([bench.rows(1)])[0], 1))

    def opener_life(number: int) -> Callable[[], Any]:
        def run() -> Any:
            appender = bench.appender(bench.inner)
            acked.append((appender.append([bench.rows(number)])[0], number))
            return appender

        return run

    actors = [crew.actor(incumbent_life)] + [crew.actor(opener_life(10 + number)) for number in range(openers)]
    schedule = Schedule([], [])
    while alive := [number for number, actor in enumerate(actors) if not actor.ended]:
        pick = choose(len(schedule.chosen), alive)
        schedule.chosen.append(pick)
        schedule.alive.append(alive)
        actors[pick].step()

    where = f"schedule {schedule.chosen}"
    for actor in actors:
        assert actor.error is None or isinstance(actor.error, hg.FencedError), f"{where}: {actor.error!r}"
    assert [epoch for epoch, _ in acked] == sorted(epoch for epoch, _ in acked), f"{where}: an older epoch acknowledged after a newer one"
    able = 0
    for actor in actors[1:]:
        if actor.result is not None:
            try:
                acked.append((actor.result.append([bench.rows(90 + able)])[0], 90 + able))
                able += 1
            except hg.FencedError:
                continue
    assert able == 1, f"{where}: {able} of them can acknowledge"
    bench.appender(bench.inner)
    found = bench.ids()
    assert [number for _, number in acked] == found, where
    return schedule


def every_schedule(bench: Any, crew: Any, openers: int) -> int:
    """All interleavings, depth first, each from the same store."""
    template = dict(bench.inner._heap.objects)
    pending: list[list[int]] = [[]]
    count = 0
    while pending:
        prefix = pending.pop()
        heap = bench.inner._heap
        heap.objects, heap.keys = dict(template), sorted(template)
        crew._actors.clear()
        ran = run_openers(bench, crew, openers, lambda at, alive, p=prefix: p[at] if at < len(p) else alive[0])
        for at in range(len(prefix), len(ran.chosen)):
            pending += [[*ran.chosen[:at], other] for other in ran.alive[at] if other != ran.chosen[at]]
        count += 1
    return count


@pytest.mark.parametrize(
    ("stops", "least"),
    [
        ({"fence.claimed", "fence.sealed"}, 100),
        ({"fence.claimed", "fence.walked"}, 100),
        ({"fence.surveyed", "fence.sealed"}, 100),
        ({"fence.before-seal"}, 20),
        ({"fence.verified"}, 20),
        ({"append.encoded"}, 20),
        ({"commit.created"}, 50),
        pytest.param({"fence.surveyed", "fence.before-seal"}, 200, marks=pytest.mark.slow),
        pytest.param({"fence.verified", "append.encoded"}, 200, marks=pytest.mark.slow),
        pytest.param({"fence.surveyed", "fence.claimed", "fence.sealed", "fence.verified"}, 500, marks=pytest.mark.slow),
    ],
    ids=lambda value: "+".join(sorted(value)) if isinstance(value, set) else "",
)
def test_f04_of_two_openers_stopped_anywhere_at_most_one_can_acknowledge(bench: Any, crew: Any, stops: set[str], least: int) -> None:
    crew.stops = stops
    assert every_schedule(bench, crew, 2) > least


@pytest.mark.parametrize("seed", range(4))
def test_f04_of_three_openers_stopped_after_every_step_at_most_one_can_acknowledge(bench: Any, crew: Any, seed: int) -> None:
    rng = random.Random(seed)
    template = dict(bench.inner._heap.objects)
    for _ in range(25):
        bench.inner._heap.objects, bench.inner._heap.keys = dict(template), sorted(template)
        crew._actors.clear()
        run_openers(bench, crew, 3, lambda at, alive: rng.choice(alive))


# -- F05, F06


@pytest.mark.parametrize("at", [step for step in OPEN_STEPS if step not in ("marker.made", "commit.created", "fence.verified")])
def test_f05_a_slow_claimant_is_fenced_before_it_acknowledges(bench: Any, crew: Any, at: str) -> None:
    a_slow_claimant_over_collected_entries(bench, crew, at)


def test_f05_a_seal_that_lands_behind_the_cursor_changes_nothing(bench: Any, crew: Any) -> None:
    incumbent = bench.appender()
    slow = crew.actor(bench.appender)
    slow.step_to("fence.before-seal")  # about to seal position 0
    incumbent.append([bench.rows(0)])
    quick = bench.appender()
    quick.append([bench.rows(1)])
    give_up_all(bench)
    with pytest.raises(hg.FencedError):
        slow.finish()
    assert bench.inner.head(bench.entry_key(1, 0)).size_bytes == SEAL_BYTES, "it did land, behind the cursor"
    quick.append([bench.rows(2)])
    bench.appender().append([bench.rows(3)])
    assert bench.ids() == [2, 3]
    assert bench.table.verify(deep=True).ok


def test_f06_entries_collected_under_a_superseded_opener_mean_fenced_and_not_lost(bench: Any, crew: Any) -> None:
    incumbent = bench.appender()
    incumbent.append([bench.rows(0)])
    slow = crew.actor(bench.appender)
    slow.step_to("fence.surveyed")
    for i in (1, 2, 3):
        incumbent.append([bench.rows(i)])
    slow.step_to("fence.claimed")
    quick = bench.appender()
    epoch, position = quick.append([bench.rows(4)])
    give_up_all(bench, sweep=False)
    quick.append([bench.rows(5)])
    before = {key for key in bench.contents() if key.endswith(".arrow")}
    with pytest.raises(hg.FencedError):
        slow.finish()
    made = {key for key in bench.contents() if key.endswith(".arrow")} - before
    assert not [key for key in made if f"/{epoch:010d}/" in key], "no seal among live entries"
    assert quick.append([bench.rows(6)]) == (epoch, position + 2)


def test_f06_an_opener_whose_survey_is_overtaken_by_trim_and_collection_begins_again(bench: Any) -> None:
    with bench.appender() as incumbent:
        for i in range(6):
            incumbent.append([bench.rows(i)])
    done = []

    def collect_once(operation: str, key: str) -> None:
        if operation == "get" and key.endswith(".arrow") and not done:
            done.append(key)
            give_up_all(bench)

    store = bench.faulty(before=collect_once)
    replayed: list[Entry | Entries] = []
    claim = open_epoch(bench.log(store), replay=replayed.append)
    assert done
    assert claim.epoch == 2
    assert replayed == []


# -- F08


def test_f08_a_cached_manifest_never_hides_a_successor(bench: Any) -> None:
    writer = bench.writer()
    writer.put(bench.rows(1)).wait()
    writer.check_fenced()
    reader = bench.log()
    assert reader.manifests.load().epoch == 1
    for epoch in (2, 3, 4):
        bench.appender(bench.faulty())
        assert reader.manifests.load().epoch == epoch
        with pytest.raises(hg.FencedError) as caught:
            writer.check_fenced()
        assert caught.value.by_epoch == epoch


def test_f08_nor_after_the_cached_version_was_collected(bench: Any) -> None:
    reader = bench.log()
    known = reader.manifests.load()
    bench.appender(bench.faulty())
    latest = bench.manifest
    bench.inner.delete([reader.manifests.key(version) for version in range(known.version, latest.version)])
    assert reader.manifests.load() == latest


def test_f08_an_idle_writer_learns_of_its_successor_from_its_next_record(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.writer._RECORD_IDLE_SECONDS", 0.001)
    writer = bench.writer()
    writer.put(bench.rows(1)).wait()
    other = bench.appender(bench.faulty())
    blocked = threading.Event()
    for _ in range(10_000):
        if writer._pipeline.failure is not None:
            break
        blocked.wait(0.001)
    # Either a record was made before the claim, and then the next put meets the seal, or it tells.
    with pytest.raises(hg.FencedError):
        writer.put(bench.rows(2)).wait(bench.PATIENCE)
    other.append([bench.rows(3)])
    assert bench.ids() == [1, 3]


# -- F09


def refusals() -> dict[str, Callable[[Any], Any]]:
    wal_only = {"enable_memtable": False}
    return {
        "an index of no column": lambda b: b.shard.writer(hg.ShardWriterConfig(index_configs=[hg.text_index("nothing")])),
        "something that is no index": lambda b: b.shard.writer(hg.ShardWriterConfig(index_configs=["x"])),
        "indexes in WAL-only mode": lambda b: b.shard.writer(hg.ShardWriterConfig(**wal_only, index_configs=["x"])),
        "an inflight of 0": lambda b: b.shard.writer(hg.ShardWriterConfig(**wal_only, max_inflight=0)),
        "an unknown shard": lambda b: b.table.shard("0001").writer(hg.ShardWriterConfig(**wal_only)),
        "another schema": lambda b: hg.create_table(b.uri, b.SCHEMA.append(b.SCHEMA.field(0).with_name("x")), key="id", if_exists="open"),
        "a table that is there": lambda b: hg.create_table(b.uri, b.SCHEMA, key="id"),
    }


@pytest.mark.parametrize("why", list(refusals()))
def test_f09_an_open_that_fails_for_a_local_reason_leaves_the_incumbent_alone(bench: Any, why: str) -> None:
    incumbent = bench.writer()
    incumbent.put(bench.rows(1)).wait()
    before = bench.contents()
    with pytest.raises(hg.HeadgateError):
        refusals()[why](bench)
    assert bench.contents() == before
    incumbent.put(bench.rows(2)).wait()
    incumbent.check_fenced()


@pytest.mark.parametrize("fault", ["fail", "refuse"])
@pytest.mark.parametrize("operation", ["get", "list"])
def test_f09_an_open_that_cannot_read_leaves_the_incumbent_alone(bench: Any, operation: Any, fault: Any) -> None:
    incumbent = bench.writer(bench.faulty())
    incumbent.put(bench.rows(1)).wait()
    before = bench.contents()
    store = bench.faulty()
    store.add(Fault(operation, fault))
    with pytest.raises(hg.StoreError):
        bench.appender(store)
    assert bench.contents() == before
    incumbent.put(bench.rows(2)).wait()


def test_f09_an_open_on_a_shard_that_takes_no_writers_is_refused(bench: Any) -> None:
    bench.log().manifests.commit(lambda m: m.but(state="retired"))
    before = bench.contents()
    with pytest.raises(hg.ShardSplitError):
        bench.appender()
    assert bench.contents() == before


# -- F10


def claim_in_a_loop(path: str, number: int, rounds: int, results: Any) -> None:
    """A process: claim, write, be fenced or close, again."""
    import pyarrow as pa

    shard = hg.open_table(path).shard("0000")
    acked, fenced = [], 0
    for turn in range(rounds):
        row = 1000 * number + turn
        batch = pa.RecordBatch.from_arrays([pa.array([row], pa.int64()), pa.array(["x"])], schema=shard.schema)
        try:
            with shard.writer(hg.ShardWriterConfig(enable_memtable=False, fsync=False)) as writer:
                writer.put(batch).wait(60)
                acked.append(row)
        except hg.FencedError:
            fenced += 1
    results.put((number, acked, fenced))


def test_f10_processes_that_claim_in_a_loop_all_end_and_the_last_one_writes(disk: Any) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    rounds, processes = 6, []
    for number in range(3):
        processes.append(context.Process(target=claim_in_a_loop, args=(disk.uri, number, rounds, results), daemon=True))
        processes[-1].start()
    told = [results.get(timeout=90) for _ in processes]
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    acked = [row for _, rows, _ in told for row in rows]
    assert acked, "somebody wrote"
    assert sum(len(rows) + fenced for _, rows, fenced in told) >= 3 * rounds
    last = disk.appender()
    last.append([disk.rows(9)])
    found = disk.ids()
    assert found[-1] == 9
    assert set(acked) <= set(found)
    assert len(found) == len(set(found))
    assert disk.table.verify(deep=True).ok


def test_f10_a_claim_does_not_wait_for_the_end_of_a_busy_incumbent(bench: Any) -> None:
    """An incumbent that writes whenever the claimant looks around never lets it see a quiet tip."""
    incumbent = bench.appender(bench.faulty())
    written = itertools.count()
    claimed_at: list[int] = []
    lock = threading.Lock()

    def write_on(operation: str, key: str) -> None:
        with lock:
            if claimed_at or operation != "list" or "wal/" not in key:
                return
            for _ in range(3):
                number = next(written)
                assert number < 500, "500 entries later the claimant is still reading to the tip"
                incumbent.append([bench.rows(number)])

    def note(name: str) -> None:
        if name == "fence.claimed":
            claimed_at.append(next(written))

    with hooked(note):
        successor = bench.appender(bench.faulty(before=write_on))
    assert claimed_at
    assert successor.append([bench.rows(10_000)])[0] == 2
    assert len(bench.ids()) == claimed_at[0] + 1


# -- F13


@pytest.mark.parametrize("step", OPEN_STEPS)
def test_f13_claimants_that_die_after_a_step_leave_a_log_that_opens(bench: Any, step: str, crash: type[Exception]) -> None:
    claimants_that_die_at_a_step(bench, step, crash, 20)


def test_f13_claimants_that_die_anywhere_leave_a_log_that_opens(bench: Any, crash: type[Exception]) -> None:
    rng = random.Random(13)
    first = bench.appender()
    first.append([bench.rows(0)])
    acked = [0]
    for number in range(1, 60):
        left = rng.randrange(14)

        def die(name: str) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise crash(name)

        with hooked(die):
            try:
                appender = bench.appender()
                appender.append([bench.rows(number)])
                acked.append(number)
            except crash:
                continue
    bench.appender()
    assert len(acked) > 3
    assert bench.ids() == acked
    assert bench.table.verify(deep=True).ok


# -- F14


def test_f14_seals_do_not_bother_readers_trim_collection_or_verify(bench: Any) -> None:
    for i in range(4):
        with bench.appender() as appender:
            appender.append([bench.rows(i)])
        bench.appender()  # an idle reopen: two seals in a row
    tailer = hg.WalTailer(bench.fresh())
    assert bench.ids() == [0, 1, 2, 3]
    everything = bench.entries(include_seals=True)
    assert [entry.position for entry in everything] == list(range(len(everything)))
    assert [entry.kind for entry in everything] == ["data", "seal", "seal"] * 3 + ["data", "seal"]
    for entry in everything:
        assert tailer.read_entry(entry.position).kind == entry.kind
        assert next(tailer.read(entry.position, include_seals=True)).position == entry.position
    assert tailer.next_position() == len(everything)
    replayed: list[Entry | Entries] = []
    open_epoch(bench.log(), replay=replayed.append)
    assert len(places_of(replayed)) == 4
    for position in range(len(everything) + 1):
        bench.table.trim(position)
        collect_entries(bench.log(), dry_run=False)
        assert bench.ids() == [i for i in range(4) if 3 * i >= position]
        assert bench.table.verify(deep=True).ok


def test_f14_a_follower_passes_over_a_takeover_without_noticing(bench: Any) -> None:
    first = bench.appender()
    first.append([bench.rows(0)])
    follower = hg.WalTailer(bench.fresh(), poll_interval=0.001, max_poll_interval=0.002).read(0, follow=True)
    assert next(follower).position == 0
    for number in (1, 2, 3):
        bench.appender().append([bench.rows(number)])
        assert next(follower).batches[0].column("id").to_pylist() == [number]
    follower.close()


# -- F15


class Jumping(SystemClock):
    """``now`` is anything."""

    def __init__(self) -> None:
        self._rng = random.Random(15)

    def now(self) -> float:
        return self._rng.uniform(0.0, 4e9)

    def token(self) -> str:
        return ulid(int(self.now() * 1000), secrets.randbits(80))


class Backwards(Jumping):
    """``now`` falls by a day each time it is asked."""

    def __init__(self) -> None:
        self._at = 4e9

    def now(self) -> float:
        self._at -= 86_400.0
        return self._at


class Stopped(Jumping):
    """``now`` never changes."""

    def now(self) -> float:
        return 0.0


@pytest.fixture(params=[Jumping, Backwards, Stopped])
def strange(request: pytest.FixtureRequest, make_bench: Callable[..., Any]) -> Any:
    clock: Clock = request.param()
    return make_bench("memory", clock)


def test_f15_f01_holds_under_any_clock(strange: Any) -> None:
    two_writers_interleaved(strange, 1)
    assert strange.table.verify(deep=True).ok


def test_f15_f02_holds_under_any_clock(strange: Any, crew: Any) -> None:
    a_claim_alone_fences(strange, crew)


def test_f15_f02_replay_holds_under_any_clock(strange: Any) -> None:
    acks_during_a_claim_are_in_its_replay(strange)


def test_f15_f03_holds_under_any_clock(strange: Any) -> None:
    a_stalled_writer_wakes_after_collection(strange)


def test_f15_f04_holds_under_any_clock(strange: Any, crew: Any) -> None:
    rng = random.Random(4)
    run_openers(strange, crew, 3, lambda at, alive: rng.choice(alive))


@pytest.mark.parametrize("at", ["fence.claimed", "fence.before-seal", "fence.walked"])
def test_f15_f05_and_f06_hold_under_any_clock(strange: Any, crew: Any, at: str) -> None:
    a_slow_claimant_over_collected_entries(strange, crew, at)


@pytest.mark.parametrize("step", ["fence.claimed", "fence.sealed"])
def test_f15_f13_holds_under_any_clock(strange: Any, step: str, crash: type[Exception]) -> None:
    claimants_that_die_at_a_step(strange, step, crash, 5)


def test_f15_producers_are_remembered_under_any_clock(strange: Any) -> None:
    with strange.writer() as writer:
        for sequence in range(5):
            writer.put(strange.rows(sequence), producer="p", sequence=sequence).wait()
    with strange.writer() as writer:
        writer.put(strange.rows(50), producer="q", sequence=0).wait()
    again = strange.writer()
    assert all(again.put(strange.rows(s), producer="p", sequence=s).wait().duplicate for s in range(5))
    assert strange.ids() == [0, 1, 2, 3, 4, 50]


# -- F16


def test_f16_a_seal_of_a_higher_epoch_in_the_walk_means_fenced(bench: Any, crew: Any) -> None:
    bench.appender().append([bench.rows(0)])
    slow = crew.actor(bench.appender)
    slow.step_to("fence.claimed")
    log = bench.log()
    put_seal(log, log.space(bench.manifest), ChainPoint(1, 1), by_epoch=7, durable_through=0, writer_id="later")
    with pytest.raises(hg.FencedError) as caught:
        slow.finish()
    assert (caught.value.epoch, caught.value.by_epoch) == (2, 7)


def test_f16_check_fenced_before_between_and_after_the_claims_of_others(bench: Any, crew: Any) -> None:
    writer = bench.writer(bench.faulty())
    writer.check_fenced()
    other = crew.actor(bench.appender)
    other.step_to("fence.surveyed")
    writer.check_fenced()
    writer.put(bench.rows(1)).wait()
    for step in ("fence.claimed", "fence.sealed", "fence.verified"):
        other.step_to(step)
        with pytest.raises(hg.FencedError) as caught:
            writer.check_fenced()
        assert (caught.value.epoch, caught.value.by_epoch) == (1, 2)
    other.finish()
    bench.appender()
    with pytest.raises(hg.FencedError) as caught:
        writer.check_fenced()
    assert caught.value.by_epoch == 3


def test_f16_check_fenced_notices_a_put_that_met_the_seal_without_asking_again(bench: Any) -> None:
    store = bench.faulty()
    writer = bench.writer(store)
    bench.appender()
    with pytest.raises(hg.FencedError):
        writer.put(bench.rows(1)).wait(bench.PATIENCE)
    store.add(Fault("any", "fail"))
    with pytest.raises(hg.FencedError):
        writer.check_fenced()


# -- F17


def epoch_with_several_seals(bench: Any, crew: Any) -> Any:
    """Epochs 1 and 2 get a seal each behind the floor, besides the ones that end them."""
    incumbent = bench.appender()
    slow = crew.actor(bench.appender)
    slow.step_to("fence.before-seal")  # of position 0 of epoch 1
    for i in range(5):
        incumbent.append([bench.rows(i)])
    quick = bench.appender()
    quick.append([bench.rows(5)])
    trim(bench.log(), 3)
    collect_entries(bench.log(), dry_run=False)
    with pytest.raises(hg.FencedError):
        slow.finish()
    seals = [key for key, body in bench.contents().items() if key.endswith(".arrow") and len(body) == SEAL_BYTES]
    assert bench.entry_key(1, 0) in seals
    assert bench.entry_key(1, 5) in seals
    return quick


def test_f17_an_epoch_with_several_seals_keeps_all_that_was_acknowledged(bench: Any, crew: Any) -> None:
    quick = epoch_with_several_seals(bench, crew)
    assert bench.ids() == [3, 4, 5]
    quick.append([bench.rows(6)])
    collect_entries(bench.log(), dry_run=False, sweep=True)
    assert bench.ids() == [3, 4, 5, 6]
    assert [entry.position for entry in bench.entries(3)][:2] == [3, 4]
    assert bench.table.verify(deep=True).ok
    replayed: list[Entry | Entries] = []
    open_epoch(bench.log(), replay=replayed.append)
    assert [batch.column("id").to_pylist() for entry in replayed for batch in entry.batches] == [[3], [4], [5], [6]]


def test_f17_a_seal_request_that_arrives_twice_or_late_ends_nothing_else(bench: Any) -> None:
    first = bench.appender()
    first.append([bench.rows(0)])
    second = bench.appender()
    second.append([bench.rows(1)])
    log, manifest = bench.log(), bench.manifest
    # The same claimant's seal again, where the epoch ended and past it: the second is in no one's way.
    for position in (1, 2, 3):
        put_seal(log, log.space(manifest), ChainPoint(1, position), by_epoch=2, durable_through=0, writer_id="again")
    second.append([bench.rows(2)])
    bench.appender().append([bench.rows(3)])
    assert bench.ids() == [0, 1, 2, 3]
    assert bench.table.verify(deep=True).ok


def test_f17_an_outcome_is_told_by_the_end_of_the_epoch_and_by_no_other_seal(bench: Any, crew: Any) -> None:
    epoch_with_several_seals(bench, crew)
    assert bench.shard.outcome(1, 4) == "durable"
    assert bench.shard.outcome(1, 5) == "void"


# -- F18


def adding(name: str) -> Callable[[Any], Any]:
    """A change that shows how often it was made: a name, and a count of versions that brought it."""
    return lambda m: m.but(consumers={**m.consumers, name: ConsumerRecord(position=0)}, next_generation=m.next_generation + 1)


def test_f18_a_manifest_create_whose_reply_is_lost_is_there_exactly_once(bench: Any) -> None:
    before = bench.manifest
    bench.store.add(Fault("create", "apply-then-fail", key="/manifest/", times=1))
    made = bench.log().manifests.commit(adding("mine"))
    assert (made.version, made.next_generation) == (before.version + 1, 2)
    assert bench.manifest == made


def test_f18_nor_is_it_made_twice_when_its_retries_fail_too(bench: Any) -> None:
    bench.store.add(Fault("create", "apply-then-fail", key="/manifest/", times=1), Fault("create", "fail", key="/manifest/", times=3))
    made = bench.log().manifests.commit(adding("mine"))
    assert bench.manifest == made
    assert made.next_generation == 2


@pytest.mark.parametrize("others", [1, 5, HISTORY_VERSIONS_MAX - 1])
def test_f18_a_version_collected_before_it_was_checked_still_counts(bench: Any, crew: Any, others: int) -> None:
    crew.stops = {"commit.created"}
    chain = bench.log().manifests
    slow = crew.actor(lambda: chain.commit(adding("mine")))
    slow.step_to("commit.created")
    other = bench.log().manifests
    for number in range(others):
        other.commit(lambda m, n=number: m.but(wal_floor=n + 1))
    latest = bench.manifest.version
    bench.inner.delete([chain.key(version) for version in range(latest)])
    assert slow.finish().next_generation == 2
    assert bench.manifest.next_generation == 2, "once"
    assert bench.manifest.version == latest, "no version was added for it"


@pytest.mark.parametrize("others", [2, 5])
def test_f18_a_collected_version_created_again_is_no_commit(bench: Any, crew: Any, others: int) -> None:
    crew.stops = {"commit.loaded"}
    chain = bench.log().manifests
    slow = crew.actor(lambda: chain.commit(adding("mine")))
    slow.step_to("commit.loaded")
    other = bench.log().manifests
    for number in range(others):
        other.commit(lambda m, n=number: m.but(wal_floor=n + 1))
    latest = bench.manifest.version
    bench.inner.delete([chain.key(version) for version in range(latest)])  # the slow one's name is free again
    mine = slow.finish()
    assert bench.manifest == mine
    assert (mine.version, mine.next_generation, mine.wal_floor) == (latest + 1, 2, others)


def test_f18_beyond_its_history_the_outcome_is_unknown_and_nothing_is_redone(bench: Any, crew: Any) -> None:
    crew.stops = {"commit.created"}
    chain = bench.log().manifests
    slow = crew.actor(lambda: chain.commit(adding("mine")))
    slow.step_to("commit.created")
    other = bench.log().manifests
    for number in range(HISTORY_VERSIONS_MAX + 1):
        other.commit(lambda m, n=number: m.but(wal_floor=n + 1))
    latest = bench.manifest.version
    with pytest.raises(hg.OutcomeUnknownError):
        slow.finish()
    assert bench.manifest.version == latest
    assert bench.manifest.next_generation == 2


def test_f18_changes_of_many_committers_are_all_there_once(bench: Any) -> None:
    def work(number: int) -> None:
        store = bench.faulty()
        store.add(Fault("create", "apply-then-fail", skip=number % 3, times=2))
        chain = bench.log(store).manifests
        for turn in range(5):
            chain.commit(adding(f"{number}-{turn}"))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(bench.PATIENCE)
    assert len(bench.manifest.consumers) == 20
    assert bench.manifest.next_generation == 1 + 20


# -- F19


def test_f19_readers_and_committers_are_not_stuck_where_a_prober_would_be(bench: Any) -> None:
    reader, committer = bench.log().manifests, bench.log().manifests
    known = reader.load()
    committer.load()
    for turn in range(6):
        bench.log().manifests.commit(lambda m, t=turn: m.but(wal_floor=t + 1))
        latest = bench.manifest
        bench.inner.delete([reader.key(version) for version in range(latest.version)])
    assert reader.load().version == known.version + 6
    assert committer.commit(lambda m: m.but(next_generation=5)).version == known.version + 7
    assert bench.manifest.wal_floor == 6


def test_f19_a_table_whose_old_manifests_are_collected_opens_writes_and_verifies(bench: Any) -> None:
    stale = bench.writer()
    for turn in range(3):
        bench.appender().append([bench.rows(turn)])
        chain = bench.log().manifests
        bench.inner.delete([chain.key(version) for version in range(bench.manifest.version)])
    with pytest.raises(hg.FencedError):
        stale.check_fenced()
    assert hg.open_table(bench.uri).verify(deep=True).ok
    assert bench.ids() == [0, 1, 2]


# -- F20


def test_f20_two_tables_on_one_wal_store_share_no_name(bench: Any, tmp_path: Path) -> None:
    wal = str(tmp_path / "wal")
    tables = [hg.create_table(str(tmp_path / name), bench.SCHEMA, key="id", wal_uri=wal) for name in ("one", "two")]
    config = hg.ShardWriterConfig(enable_memtable=False, fsync=False)
    writers = [table.shard("0000").writer(config) for table in tables]
    for number in range(3):
        for which, writer in enumerate(writers):
            writer.put(bench.rows(10 * which + number)).wait(bench.PATIENCE)
    for writer in writers:
        writer.close()
    for which, table in enumerate(tables):
        ids = [i for e in table.shard("0000").tail(0, follow=False) for b in e.batches for i in b.column("id").to_pylist()]
        assert ids == [10 * which + number for number in range(3)]
        assert hg.open_table(table.uri).verify(deep=True).ok
    assert {name.name for name in (tmp_path / "wal" / "wal").iterdir()} == {table._manifest.wal_id for table in tables}


@pytest.mark.parametrize("wiped", [True, False])
def test_f20_a_table_made_again_under_a_stalled_writer_never_meets_it(bench: Any, wiped: bool) -> None:
    wal_name, table_name = f"f20-wal-{SYSTEM_CLOCK.token()}", f"f20-table-{SYSTEM_CLOCK.token()}"

    def create() -> hg.Table:
        return hg.create_table(f"memory://{table_name}", bench.SCHEMA, key="id", wal_uri=f"memory://{wal_name}")

    stalled = hg.WalAppender.open(create().shard("0000"))
    stalled.append([bench.rows(1)])
    for name in (table_name, wal_name) if wiped else (table_name,):  # what dropping the table leaves
        store = MemoryStore(name)
        store.delete([info.key for info in store.list("")])
    table = create()
    fresh = hg.WalAppender.open(table.shard("0000"))
    names = {info.key for info in MemoryStore(wal_name).list(f"wal/{table._manifest.wal_id}/")}
    stalled.append([bench.rows(2)])  # it may write, but only where nobody looks
    assert fresh.append([bench.rows(3)]) == (1, 0)
    assert len({info.key for info in MemoryStore(wal_name).list(f"wal/{table._manifest.wal_id}/")} - names) == 1
    ids = [i for e in table.shard("0000").tail(0, follow=False) for b in e.batches for i in b.column("id").to_pylist()]
    assert ids == [3]
    assert table.verify(deep=True).ok


def test_f20_manifests_of_a_table_and_its_namesake_are_apart(bench: Any) -> None:
    name = f"f20-{SYSTEM_CLOCK.token()}"
    first = hg.create_table(f"memory://{name}", bench.SCHEMA, key="id")
    old = first.shard("0000").log.manifests
    MemoryStore(name).delete([info.key for info in MemoryStore(name).list("table/")])
    second = hg.create_table(f"memory://{name}", bench.SCHEMA, key="id")
    new: ManifestChain[Any] = second.shard("0000").log.manifests
    assert old.folder != new.folder
    old.commit(lambda m: m.but(epoch=99))
    assert new.load().epoch == 0
