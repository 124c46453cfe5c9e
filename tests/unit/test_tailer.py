"""Reading the log as it grows, and giving up its beginning."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import headgate as hg
from headgate.failpoint import hooked
from headgate.manifest.model import ChainPoint, CheckpointRecord, ConsumerRecord
from headgate.store.faulty import Fault
from headgate.wal.collect import collect_entries, trim
from headgate.wal.entry import SEAL_BYTES, Entry
from headgate.wal.fence import open_epoch


def tailer(bench: Any, store: Any = None) -> hg.WalTailer:
    return hg.WalTailer(bench.fresh(store), poll_interval=0.001, max_poll_interval=0.002)


def write_epochs(bench: Any, *counts: int) -> Any:
    """An epoch for each count, with that many entries; returns the last appender, still open."""
    number = 0
    for count in counts:
        appender = bench.appender()
        for _ in range(count):
            appender.append([bench.rows(number)])
            number += 1
    return appender


# -- reading


def test_a_range_over_several_epochs_comes_in_order_with_and_without_seals(bench: Any) -> None:
    write_epochs(bench, 3, 0, 2, 1)  # positions: 0 1 2 | seal 3 | seal 4 | 5 6 | seal 7 | 8
    assert [(e.epoch, e.position) for e in tailer(bench).read()] == [(1, 0), (1, 1), (1, 2), (3, 5), (3, 6), (4, 8)]
    assert [e.kind[0] for e in tailer(bench).read(include_seals=True)] == list("dddssddsd")
    for start in range(12):
        assert [e.position for e in tailer(bench).read(start)] == [p for p in (0, 1, 2, 5, 6, 8) if p >= start]
        assert [e.position for e in tailer(bench).read(start, include_seals=True)] == list(range(start, 9))


def test_first_and_next_position_of_an_empty_a_full_and_a_trimmed_log(bench: Any) -> None:
    assert (tailer(bench).first_position(), tailer(bench).next_position()) == (0, 0)
    assert list(tailer(bench).read()) == []
    write_epochs(bench, 2, 2)
    assert (tailer(bench).first_position(), tailer(bench).next_position()) == (0, 5)
    trim(bench.log(), 4)
    assert tailer(bench).first_position() == 0, "given up, and still there"
    collect_entries(bench.log(), dry_run=False)
    assert (tailer(bench).first_position(), tailer(bench).next_position()) == (4, 5)


def test_an_entry_by_its_position(bench: Any) -> None:
    write_epochs(bench, 2, 1)
    reader = tailer(bench)
    assert [reader.read_entry(p).kind for p in range(4)] == ["data", "data", "seal", "data"]
    assert reader.read_entry(3).batches[0].equals(bench.rows(2).cast(bench.rules.log_schema))


@pytest.mark.parametrize("position", [4, 5, 1000])
def test_a_position_not_yet_written_is_not_found_and_not_truncated(bench: Any, position: int) -> None:
    write_epochs(bench, 2, 1)
    with pytest.raises(hg.NotFoundError):
        tailer(bench).read_entry(position)


def test_a_collected_position_is_truncated_and_says_where_the_log_begins(bench: Any) -> None:
    write_epochs(bench, 3, 3)
    trim(bench.log(), 5)
    collect_entries(bench.log(), dry_run=False)
    for position in range(5):
        with pytest.raises(hg.WalTruncatedError, match="begins at 5"):
            tailer(bench).read_entry(position)
        with pytest.raises(hg.WalTruncatedError):
            list(tailer(bench).read(position))
    assert [e.position for e in tailer(bench).read(5)] == [5, 6]


@pytest.mark.parametrize("start", [-1, 1.5, "0"])
def test_a_start_that_is_no_position_is_refused(bench: Any, start: Any) -> None:
    with pytest.raises(hg.InvalidInputError):
        list(tailer(bench).read(start))


def test_a_reader_writes_nothing(bench: Any) -> None:
    write_epochs(bench, 3, 0, 3)
    before = bench.contents()
    reader = tailer(bench)
    list(reader.read())
    reader.next_position()
    reader.first_position()
    bench.table.status()
    bench.table.verify(deep=True)
    assert bench.contents() == before


def test_a_gap_among_entries_in_flight_is_the_tip(bench: Any, arrivals: Any) -> None:
    came = arrivals("create", ".arrow")
    store = bench.faulty(before=came)
    writer = bench.writer(store, max_wal_buffer_size=1, max_inflight=3)
    store.add(Fault("create", "hang", key=f"{1:020d}.arrow"))
    acks = [writer.put(bench.rows(number)) for number in range(4)]
    came.wait_for(3)
    acks[0].wait(bench.PATIENCE)
    assert bench.ids() == [0]
    assert tailer(bench).next_position() == 1
    store.release()
    writer.flush()
    assert bench.ids() == [0, 1, 2, 3]


def test_a_long_log_is_read_ahead_and_whole(bench: Any) -> None:
    write_epochs(bench, 60, 0, 0, 60, 1)
    store = bench.faulty()
    assert [e.position for e in tailer(bench, store).read()] == [e.position for e in bench.entries()]
    assert len(bench.ids()) == 121
    assert store.requests["get"] <= 125 + 10, "each entry is fetched once"


def test_void_entries_are_never_shown(bench: Any, arrivals: Any) -> None:
    came = arrivals("create", ".arrow")
    slow = bench.faulty(before=came)
    writer = bench.writer(slow, max_wal_buffer_size=1, max_inflight=2)
    slow.add(Fault("create", "hang", key=f"{0:020d}.arrow"))
    acks = [writer.put(bench.rows(number)) for number in (0, 1)]
    came.wait_for(2)
    bench.appender().append([bench.rows(2)])  # seals position 0: what lies at 1 is void
    slow.release()
    for ack in acks:
        with pytest.raises(hg.FencedError):
            ack.wait(bench.PATIENCE)
    writer.abort()  # ends its threads
    assert bench.inner.head(bench.entry_key(1, 1)).size_bytes > SEAL_BYTES
    assert bench.ids() == [2]
    assert bench.table.verify(deep=True).ok


# -- following


def test_a_follower_sees_what_comes_after_it_waited(bench: Any) -> None:
    appender = write_epochs(bench, 1)
    follower = tailer(bench).read(0, follow=True)
    assert next(follower).position == 0
    timer = threading.Timer(0.02, appender.append, ([bench.rows(7)],))
    timer.start()
    assert next(follower).batches[0].column("id").to_pylist() == [7]
    timer.join()
    follower.close()


def test_a_follower_may_start_beyond_the_tip(bench: Any) -> None:
    appender = write_epochs(bench, 1)
    found: list[Entry] = []
    follower = tailer(bench).read(3, follow=True)
    thread = threading.Thread(target=lambda: found.append(next(follower)))
    thread.start()
    for number in (1, 2, 3):
        appender.append([bench.rows(number)])
    thread.join(bench.PATIENCE)
    assert [entry.position for entry in found] == [3]


def test_a_reader_overtaken_by_collection_is_told(bench: Any) -> None:
    appender = write_epochs(bench, 1)
    follower = tailer(bench).read(0, follow=True)
    next(follower)
    for number in range(1, 5):
        appender.append([bench.rows(number)])
    trim(bench.log(), 4)
    collect_entries(bench.log(), dry_run=False)
    with pytest.raises(hg.WalTruncatedError):
        next(follower)
    assert [entry.position for entry in tailer(bench).read(4)] == [4]


def test_a_follower_at_the_tip_costs_one_request_a_poll(bench: Any) -> None:
    write_epochs(bench, 3)
    polls: list[float] = []

    class Counting(type(bench.clock)):  # type: ignore[misc]
        def sleep(self, seconds: float) -> None:
            polls.append(seconds)
            if len(polls) >= 100:
                raise StopIteration("enough")

    store = bench.faulty()
    holder = bench.fresh()
    holder.log = bench.log(store, clock=Counting())
    follower = hg.WalTailer(holder, poll_interval=0.01, max_poll_interval=0.5).read(0, follow=True)
    for _ in range(3):
        next(follower)
    store.requests.clear()
    with pytest.raises(RuntimeError):
        next(follower)
    assert store.requests["get"] <= 100 + 20
    assert store.requests["list"] <= 2 * (100 // 16 + 2)
    assert polls[0] == 0.01
    assert max(polls) == 0.5


# -- trim and collection


def test_trim_gives_up_and_collection_deletes_and_a_reopen_goes_on(bench: Any) -> None:
    appender = write_epochs(bench, 4, 4)
    trim(bench.log(), 6)
    assert bench.ids(6) == [5, 6, 7]
    planned = collect_entries(bench.log(), dry_run=True)
    before = bench.contents()
    assert planned.entries == 5
    done = collect_entries(bench.log(), dry_run=False)
    assert (done.entries, done.bytes, done.floor) == (planned.entries, planned.bytes, planned.floor)
    gone = set(before) - set(bench.contents())
    assert len(gone) == 5
    assert all(len(before[key]) > SEAL_BYTES for key in gone)
    appender.append([bench.rows(8)])
    bench.appender().append([bench.rows(9)])
    assert bench.ids() == [5, 6, 7, 8, 9]
    assert collect_entries(bench.log(), dry_run=False).entries == 0


@pytest.mark.parametrize("before", [-1, 1.5, "3", None])
def test_trim_refuses_what_is_no_position(bench: Any, before: Any) -> None:
    with pytest.raises(hg.InvalidInputError):
        trim(bench.log(), before)


def test_trim_refuses_to_go_beyond_the_tip_and_never_goes_back(bench: Any) -> None:
    write_epochs(bench, 4)
    with pytest.raises(hg.InvalidInputError, match="ends at 4"):
        trim(bench.log(), 5)
    trim(bench.log(), 4)
    trim(bench.log(), 1)
    assert bench.manifest.cursor.position == 4


@pytest.mark.parametrize("kind", ["consumers", "checkpoints"])
def test_a_hold_stops_trim_and_collection(bench: Any, kind: str) -> None:
    write_epochs(bench, 5)
    bench.log().manifests.commit(
        lambda m: m.but(**{kind: {"c": CheckpointRecord(position=2) if kind == "checkpoints" else ConsumerRecord(position=2)}})
    )
    with pytest.raises(hg.InvalidInputError, match="'c'"):
        trim(bench.log(), 3)
    trim(bench.log(), 2)
    bench.log().manifests.commit(lambda m: m.but(cursor=ChainPoint(1, 5)))  # as a flush moves it
    assert collect_entries(bench.log(), dry_run=False).floor == 2
    assert bench.ids() == [2, 3, 4]


def test_trim_is_refused_where_flushes_move_the_cursor(bench: Any) -> None:
    write_epochs(bench, 2)
    bench.log().manifests.commit(lambda m: m.but(next_generation=2))
    with pytest.raises(hg.InvalidInputError):
        trim(bench.log(), 1)


@pytest.mark.parametrize("step", ["collect.listed", "collect.committed"])
def test_collection_interrupted_between_its_steps_is_run_again_to_the_same_end(bench: Any, step: str, crash: type[Exception]) -> None:
    write_epochs(bench, 3, 3)
    trim(bench.log(), 5)

    def die(name: str) -> None:
        if name == step:
            raise crash(name)

    with hooked(die), pytest.raises(crash):
        collect_entries(bench.log(), dry_run=False)
    assert bench.ids(5) == [4, 5]
    collect_entries(bench.log(), dry_run=False)
    assert bench.ids() == [4, 5]
    data = [key for key, body in bench.contents().items() if key.endswith(".arrow") and len(body) > SEAL_BYTES]
    assert len(data) == 2


def test_collection_interrupted_in_its_deletions_is_finished_by_the_next(bench: Any) -> None:
    write_epochs(bench, 6)
    trim(bench.log(), 6)
    store = bench.faulty()
    store.add(Fault("delete", "apply-then-fail"))
    with pytest.raises(hg.StoreUnavailableError):
        collect_entries(bench.log(store), dry_run=False)
    collect_entries(bench.log(), dry_run=False)
    assert not [key for key in bench.contents() if key.endswith(".arrow")]


def test_what_is_written_while_collection_runs_is_never_taken(bench: Any) -> None:
    appender = write_epochs(bench, 3)
    trim(bench.log(), 3)

    def write(name: str) -> None:
        if name in ("collect.listed", "collect.committed"):
            with hooked(lambda n: None):
                appender.append([bench.rows(50)])

    with hooked(write):
        collect_entries(bench.log(), dry_run=False)
    assert bench.ids() == [50, 50]


def test_a_sweep_takes_what_stalled_writers_left_in_epochs_long_past(bench: Any) -> None:
    stalled = bench.appender()
    log = bench.log()
    space = log.space(bench.manifest)
    body = stalled._writer.encode(1, -1, bench.rules.log_schema, [hg.Put(bench.rows(66))])
    for _ in range(3):
        bench.appender().append([bench.rows(1)])
    trim(bench.log(), bench.entries()[-1].position + 1)
    collect_entries(bench.log(), dry_run=False)
    space.store.create(space.key(1, 1), body)  # arrives long after its epoch ended at 0
    assert collect_entries(bench.log(), dry_run=False).entries == 0
    assert collect_entries(bench.log(), dry_run=False, sweep=True).entries == 1


def test_after_a_trim_to_the_tip_nothing_is_replayed(bench: Any) -> None:
    write_epochs(bench, 3, 2)
    bench.table.trim({"0000": 6})
    replayed: list[Entry] = []
    claim = open_epoch(bench.log(), replay=replayed.append)
    assert replayed == []
    assert claim.first.position == 7
