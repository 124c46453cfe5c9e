"""Hazards A11, A13 and A15 over several shards: whole in each or absent, exactly once, in order, whatever fails."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest
from tests.tables import PATIENCE, MakeTables, Tables, make_tables, tables

import headgate as hg
from headgate.failpoint import hooked
from headgate.sharding import split_rows
from headgate.store.faulty import Fault
from headgate.table_writer import TableWriter

__all__ = ["make_tables", "tables"]
ALL = ["0000", "0001", "0002", "0003"]


def in_shards(tables: Tables, *shards: str, number: int = 0) -> pa.RecordBatch:
    """Rows for exactly these shards, two for each, others for each number."""
    return tables.rows(*(tables.id_in(shard, 2 * number + i) for shard in shards for i in (0, 1)))


def outcomes(ack: Any) -> dict[str, Any]:
    with pytest.raises(hg.HeadgateError) as caught:
        ack.wait(PATIENCE)
    found: dict[str, Any] = caught.value.outcomes  # type: ignore[attr-defined]
    return found


# -- A11


def test_a11_a_put_over_several_shards_reports_each(tables: Tables) -> None:
    writer = tables.writer(max_wal_persist_retries=0)
    tables.store.add(Fault("create", "fail", key="/0001/"), Fault("create", "apply-then-fail", key="/0002/"))
    told = outcomes(writer.put(in_shards(tables, *ALL)))
    assert told["0000"] == told["0003"] == (1, 0)
    assert isinstance(told["0001"], hg.WriterPoisonedError)
    assert isinstance(told["0002"], hg.WriterPoisonedError)
    assert [len(tables.ids(shard)) for shard in ALL] == [2, 0, 2, 2], "in 0002 it landed, and nobody could know"


def test_a11_an_awaited_put_reports_each_too(tables: Tables) -> None:
    import asyncio

    async def put() -> dict[str, Any]:
        try:
            await writer.put(in_shards(tables, *ALL))
        except hg.HeadgateError as error:
            return error.outcomes  # type: ignore[attr-defined,no-any-return]
        raise AssertionError("it failed in a shard")

    writer = tables.writer(max_wal_persist_retries=0)
    tables.store.add(Fault("create", "fail", key="/0001/"))
    told = asyncio.run(put())
    assert {shard: isinstance(outcome, tuple) for shard, outcome in told.items()} == {
        "0000": True, "0001": False, "0002": True, "0003": True,
    }  # fmt: skip


@pytest.mark.parametrize("size", [1, 200, 1 << 20])
def test_a11_each_shards_part_is_whole_in_one_entry_whatever_the_timing(tables: Tables, size: int) -> None:
    writer = tables.writer(max_wal_buffer_size=size, max_inflight=3)
    with ThreadPoolExecutor(4) as pool:
        acks = list(pool.map(lambda n: writer.put(in_shards(tables, *ALL, number=n), producer=f"p{n}", sequence=0), range(40)))
    for ack in acks:
        assert set(ack.wait(PATIENCE)) == set(ALL)
    for shard in ALL:
        parts = {put.producer: put.rows["id"].to_pylist() for put in tables.puts(shard)}
        assert parts == {f"p{n}": [tables.id_in(shard, 2 * n), tables.id_in(shard, 2 * n + 1)] for n in range(40)}


def test_a11_a_refused_put_leaves_nothing_in_any_shard(tables: Tables) -> None:
    writer = tables.writer(max_unflushed_memtable_bytes=1000, put_timeout=0.01)
    before = tables.contents()
    refusals: list[tuple[type[Exception], Any, dict[str, Any]]] = [
        (hg.InvalidInputError, [{"id": 1, "value": "a"}, {"id": None, "value": "b"}], {}),
        (hg.SchemaMismatchError, pa.table({"id": [1, 2, 3]}), {}),
        (hg.InvalidInputError, tables.rows(*range(20)), {"producer": "p"}),
        (hg.InvalidInputError, tables.rows(*range(20)), {"producer": "", "sequence": 0}),
        (hg.InvalidInputError, tables.rows(), {}),
    ]
    for error, data, more in refusals:
        with pytest.raises(error):
            writer.put(data, **more)
    assert tables.contents() == before


def test_a11_a_shard_that_fails_between_room_and_rows_says_so_in_the_ack(tables: Tables) -> None:
    writer = tables.writer()

    def abort_one(name: str) -> None:
        if name == "table.reserved":
            writer.writers["0002"].abort()

    with hooked(abort_one):
        ack = writer.put(in_shards(tables, *ALL), producer="p", sequence=0)
    told = outcomes(ack)
    assert isinstance(told.pop("0002"), hg.ClosedError)
    assert told == dict.fromkeys(["0000", "0001", "0003"], (1, 0))
    with tables.writer() as successor:
        assert not successor.put(in_shards(tables, *ALL), producer="p", sequence=0).wait(PATIENCE).duplicate
    assert set(tables.copies().values()) == {1}
    assert len(tables.copies()) == 4


# -- A13


@pytest.mark.parametrize("memtable", [False, True])
@pytest.mark.parametrize("kind", ["fail", "apply-then-fail"])
def test_a13_a_retry_reaches_the_shards_that_missed_the_first_copy_and_no_others(tables: Tables, kind: Any, memtable: bool) -> None:
    writer = tables.writer(max_wal_persist_retries=0, enable_memtable=memtable)
    writer.put(in_shards(tables, *ALL), producer="p", sequence=4).wait(PATIENCE)
    tables.store.add(Fault("create", kind, key="/0001/"), Fault("create", kind, key="/0003/"))
    told = outcomes(writer.put(in_shards(tables, *ALL, number=1), producer="p", sequence=5))
    assert [isinstance(told[shard], tuple) for shard in ALL] == [True, False, True, False]
    tables.store.clear()
    writer.abort()
    with tables.writer(enable_memtable=memtable) as successor:
        receipt = successor.put(in_shards(tables, *ALL, number=1), producer="p", sequence=5).wait(PATIENCE)
        assert receipt.duplicate == (kind == "apply-then-fail")
        assert receipt["0000"] == told["0000"]
        successor.flush()
        assert successor.put(in_shards(tables, *ALL, number=1), producer="p", sequence=5).wait(PATIENCE)
        assert successor.put(in_shards(tables, *ALL), producer="p", sequence=4).wait(PATIENCE).duplicate
    assert tables.copies() == {(shard, "p", sequence): 1 for shard in ALL for sequence in (4, 5)}


def test_a13_a_pipelined_producer_sends_what_was_not_acknowledged_again_in_order(tables: Tables) -> None:
    """Shard A got 1 and 3, shard B lost 0 and 2: after the failure all four come again."""
    writer = tables.writer(max_wal_persist_retries=0)
    tables.store.add(Fault("create", "fail", key="/0001/"))
    batches = [in_shards(tables, "0000" if n % 2 else "0001", number=n) for n in range(4)]
    acks = []
    for n, rows in enumerate(batches):
        try:
            acks.append(writer.put(rows, producer="p", sequence=n))
        except hg.WriterPoisonedError:
            break  # it was refused: nothing after it may be sent
    for ack in acks:
        try:
            ack.wait(PATIENCE)
        except hg.WriterPoisonedError:
            pass
    tables.store.clear()
    with tables.writer() as successor:
        for n, rows in enumerate(batches):
            successor.put(rows, producer="p", sequence=n).wait(PATIENCE)
        successor.put(in_shards(tables, *ALL, number=4), producer="p", sequence=4).wait(PATIENCE)
    assert set(tables.copies().values()) == {1}
    assert {(shard, n) for shard, _, n in tables.copies()} == {
        *((("0000", "0001")[n % 2 == 0], n) for n in range(4)),
        *((shard, 4) for shard in ALL),
    }


def test_a13_a_sequence_that_a_later_one_overtook_is_refused_and_never_said_to_be_there(tables: Tables) -> None:
    writer = tables.writer(max_wal_persist_retries=0)
    writer.put(in_shards(tables, "0000", "0001"), producer="p", sequence=0).wait(PATIENCE)
    tables.store.add(Fault("create", "fail", key="/0001/"))
    outcomes(writer.put(in_shards(tables, "0000", "0001", number=1), producer="p", sequence=1))
    tables.store.clear()
    with tables.writer() as successor:
        # The producer forgets about 1, and remembers it when it is too late.
        successor.put(in_shards(tables, "0001", number=2), producer="p", sequence=2).wait(PATIENCE)
        with pytest.raises(hg.OutOfSequenceError, match="shard 0001 never got it"):
            successor.put(in_shards(tables, "0000", "0001", number=1), producer="p", sequence=1)
        assert successor.put(in_shards(tables, "0000", "0001"), producer="p", sequence=0).wait(PATIENCE).duplicate
        assert successor.put(in_shards(tables, "0000", number=1), producer="p", sequence=1).wait(PATIENCE), "0000 had it"
    assert set(tables.copies().values()) == {1}


def test_a13_gaps_inside_a_shard_are_no_gaps(tables: Tables) -> None:
    with tables.writer() as writer:
        for n in range(12):
            shards = [ALL[n % 4]] if n % 3 else [ALL[n % 4], ALL[(n + 1) % 4]]
            assert not writer.put(in_shards(tables, *sorted(shards), number=n), producer="p", sequence=n).wait(PATIENCE).duplicate
    with tables.writer() as writer:
        assert not writer.put(in_shards(tables, "0000", number=20), producer="p", sequence=12).wait(PATIENCE).duplicate
    assert set(tables.copies().values()) == {1}


def test_a13_a_takeover_of_some_shards_leaves_every_row_once(tables: Tables) -> None:
    writer = tables.writer()
    writer.put(in_shards(tables, *ALL), producer="p", sequence=0).wait(PATIENCE)
    thief = tables.writer(shards=["0001", "0002"])
    try:
        told = outcomes(writer.put(in_shards(tables, *ALL, number=1), producer="p", sequence=1))
    except hg.FencedError:  # known before anything was accepted
        told = {}
    assert all(isinstance(told[shard], hg.FencedError) for shard in ("0001", "0002") if told)
    thief.close()
    writer.abort()
    with tables.writer() as successor:
        successor.put(in_shards(tables, *ALL, number=1), producer="p", sequence=1).wait(PATIENCE)
    assert tables.copies() == {(shard, "p", sequence): 1 for shard in ALL for sequence in (0, 1)}


def test_a13_a_put_interrupted_between_its_shards_can_be_sent_again(tables: Tables) -> None:
    writer = tables.writer()
    writer.put(in_shards(tables, *ALL), producer="p", sequence=0).wait(PATIENCE)
    placed = []

    def interrupt(name: str) -> None:
        if name == "table.placed":
            placed.append(name)
            if len(placed) == 2:
                raise KeyboardInterrupt

    with hooked(interrupt), pytest.raises(KeyboardInterrupt):
        writer.put(in_shards(tables, *ALL, number=1), producer="p", sequence=1)
    with pytest.raises(hg.OutOfSequenceError):
        writer.put(in_shards(tables, *ALL, number=2), producer="p", sequence=2)
    writer.put(in_shards(tables, *ALL, number=1), producer="p", sequence=1).wait(PATIENCE)
    writer.put(in_shards(tables, *ALL, number=2), producer="p", sequence=2).wait(PATIENCE)
    assert [one.backpressure_stats().held_bytes for one in writer.writers.values()] == [0, 0, 0, 0]
    assert tables.copies() == {(shard, "p", sequence): 1 for shard in ALL for sequence in (0, 1, 2)}


# -- A15


def test_a15_a_retry_while_the_first_copy_is_under_way_gets_its_ack(tables: Tables) -> None:
    writer = tables.writer()
    tables.store.add(Fault("create", "hang", key="wal/"))
    first = writer.put(in_shards(tables, *ALL), producer="p", sequence=0)
    again = writer.put(in_shards(tables, *ALL), producer="p", sequence=0)
    assert again is first
    tables.store.clear()
    assert set(again.wait(PATIENCE)) == set(ALL)
    assert set(tables.copies().values()) == {1}


def test_a15_a_refused_sequence_is_free_in_every_shard(tables: Tables) -> None:
    writer = tables.writer(max_unflushed_memtable_bytes=1000, put_timeout=0.01)
    tables.store.add(Fault("create", "hang", key="/0003/"))
    crowd = writer.put(tables.rows(tables.id_in("0003"), value="x" * 2000))
    for _ in range(3):
        with pytest.raises(hg.BackpressureTimeoutError):
            writer.put(in_shards(tables, *ALL), producer="p", sequence=0)
    tables.store.clear()
    crowd.wait(PATIENCE)
    assert not writer.put(in_shards(tables, *ALL), producer="p", sequence=0).wait(PATIENCE).duplicate
    assert [tables.copies()[shard, "p", 0] for shard in ALL] == [1, 1, 1, 1]


def test_a15_sequences_follow_each_other_over_all_shards(tables: Tables) -> None:
    writer = tables.writer()
    writer.put(in_shards(tables, "0000"), producer="p", sequence=7).wait(PATIENCE)
    with pytest.raises(hg.OutOfSequenceError, match="sent sequence 9 after 7") as caught:
        writer.put(in_shards(tables, "0001"), producer="p", sequence=9)
    assert "send 8" in caught.value.hint
    writer.put(in_shards(tables, "0001"), producer="p", sequence=8).wait(PATIENCE)
    writer.put(in_shards(tables, "0001", number=1), producer="q", sequence=0).wait(PATIENCE)
    assert len(tables.copies()) == 3


def test_a15_threads_with_the_same_sequence_put_it_once(tables: Tables) -> None:
    writer = tables.writer()
    meeting = threading.Barrier(6)

    def put(_: int) -> list[hg.Receipt]:
        receipts = []
        for n in range(10):
            meeting.wait(PATIENCE)
            receipts.append(writer.put(in_shards(tables, *ALL, number=n), producer="p", sequence=n).wait(PATIENCE))
        return receipts

    with ThreadPoolExecutor(6) as pool:
        received = list(pool.map(put, range(6)))
    assert all([dict(r) for r in receipts] == [dict(r) for r in received[0]] for receipts in received)
    assert tables.copies() == {(shard, "p", n): 1 for shard in ALL for n in range(10)}


def test_a15_of_two_threads_on_one_producer_neither_overtakes(tables: Tables) -> None:
    """Both send what they have next; what is out of order is refused and sent again."""
    writer = tables.writer(max_unflushed_memtable_bytes=2000)
    count = 60

    def send(parity: int) -> None:
        for n in range(parity, count, 2):
            while True:
                try:
                    writer.put(in_shards(tables, *ALL[n % 3 :], number=n), producer="p", sequence=n)
                    break
                except hg.OutOfSequenceError:
                    threading.Event().wait(0.0005)

    writer.put(tables.rows(1), producer="q", sequence=0)
    first = writer.put(in_shards(tables, *ALL, number=0), producer="p", sequence=0)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(send, (0, 1)))
    writer.flush()
    first.wait(PATIENCE)
    for shard in ALL:
        sequences = [put.sequence for put in tables.puts(shard) if put.producer == "p"]
        assert sequences == sorted(set(sequences))
        assert sequences == [n for n in range(count) if shard in (ALL if n == 0 else ALL[n % 3 :])]


def test_a15_a_second_thread_waits_until_the_first_ones_put_is_in_every_shard(tables: Tables) -> None:
    """Else shard B could get sequence 1 while sequence 0 is on its way from shard A to B."""
    writer = tables.writer()
    half_way, go_on = threading.Event(), threading.Event()

    def pause(name: str) -> None:
        if name == "table.placed" and not half_way.is_set():
            half_way.set()
            go_on.wait(PATIENCE)

    with hooked(pause), ThreadPoolExecutor(2) as pool:
        first = pool.submit(writer.put, in_shards(tables, *ALL), producer="p", sequence=0)
        assert half_way.wait(PATIENCE)
        second = pool.submit(writer.put, in_shards(tables, *ALL, number=1), producer="p", sequence=1)
        with pytest.raises(TimeoutError):
            second.result(0.05)
        others = writer.put(in_shards(tables, *ALL, number=2), producer="q", sequence=0)
        assert others.wait(PATIENCE), "other producers do not wait"
        go_on.set()
        for put in (first, second):
            assert set(put.result(PATIENCE).wait(PATIENCE)) == set(ALL)
    assert all([put.sequence for put in tables.puts(shard) if put.producer == "p"] == [0, 1] for shard in ALL)


def test_a15_those_who_wait_for_their_turn_are_woken_by_a_close(tables: Tables) -> None:
    writer = tables.writer(max_unflushed_memtable_bytes=1000)
    tables.store.add(Fault("create", "hang", key="/0003/"))
    crowd = writer.put(tables.rows(tables.id_in("0003"), value="x" * 2000))
    with ThreadPoolExecutor(4) as pool:
        blocked = [pool.submit(writer.put, in_shards(tables, *ALL), producer="p", sequence=0) for _ in range(3)]
        with pytest.raises(TimeoutError):
            blocked[0].result(0.05)
        closed = pool.submit(writer.close)
        for put in blocked:
            with pytest.raises(hg.ClosedError):
                put.result(PATIENCE)
        tables.store.clear()
        closed.result(PATIENCE)
    crowd.wait(PATIENCE)
    assert len(tables.copies()) == 1


def test_a15_waiting_for_a_turn_counts_against_the_time_to_put(tables: Tables) -> None:
    writer = tables.writer(max_unflushed_memtable_bytes=1000, put_timeout=0.1)
    tables.store.add(Fault("create", "hang", key="/0003/"))
    crowd = writer.put(tables.rows(tables.id_in("0003"), value="x" * 2000))
    with ThreadPoolExecutor(3) as pool:
        blocked = [pool.submit(writer.put, in_shards(tables, *ALL), producer="p", sequence=0) for _ in range(3)]
        for put in blocked:
            with pytest.raises(hg.BackpressureTimeoutError):
                put.result(PATIENCE)
    tables.store.clear()
    crowd.wait(PATIENCE)


def test_a15_an_old_retry_that_is_no_longer_remembered_gets_an_answer_from_every_shard(
    tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    for room in ("headgate.table_writer", "headgate.admission"):
        monkeypatch.setattr(f"{room}._ACKS_KEPT_PER_PRODUCER", 3)
    writer = tables.writer()
    for n in range(20):
        writer.put(in_shards(tables, *ALL, number=n), producer="p", sequence=n).wait(PATIENCE)
    receipt = writer.put(in_shards(tables, *ALL), producer="p", sequence=0).wait(PATIENCE)
    assert receipt.duplicate
    assert set(receipt) == set(ALL)
    assert set(tables.copies().values()) == {1}


# -- everything at once


class Client:
    """One producer that sends numbered batches, several under way, and after any error opens another writer
    and sends all that was not acknowledged again, in order."""

    def __init__(self, tables: Tables, seed: int, *, memtable: bool) -> None:
        self.tables, self.random, self.memtable = tables, random.Random(seed), memtable
        self.acknowledged: dict[int, dict[str, tuple[int, int]]] = {}
        self.reopened = self.refused = 0
        self.writer: TableWriter | None = None
        self.batches: dict[int, pa.RecordBatch] = {}

    def batch(self, sequence: int) -> pa.RecordBatch:
        if sequence not in self.batches:
            first = sequence * 100
            self.batches[sequence] = self.tables.rows(*range(first, first + self.random.choice([1, 2, 3, 10])))
        return self.batches[sequence]

    def disturb(self) -> None:
        """Faults that the next requests meet; none for ever."""
        store, choice = self.tables.store, self.random.choice
        store._faults = [fault for fault in store._faults if fault.times > 0][-3:]
        for _ in range(self.random.randrange(3)):
            key = choice(["/0000/", "/0001/", "/0002/", ".arrow", "/manifest/", ".json"])
            kind = choice(["fail", "apply-then-fail", "conflict", "throttle"])
            store.add(Fault("create", kind, key=key, times=self.random.randrange(1, 6), skip=self.random.randrange(3)))

    def open(self) -> TableWriter:
        while self.writer is None:
            self.reopened += 1
            assert self.reopened < 2000
            try:
                self.writer = self.tables.writer(
                    max_wal_persist_retries=self.random.randrange(3),
                    max_inflight=self.random.choice([1, 3]),
                    max_wal_buffer_size=self.random.choice([1, 300, 1 << 20]),
                    max_unflushed_memtable_bytes=self.random.choice([1, 2000, 1 << 20]),
                    enable_memtable=self.memtable,
                    max_memtable_rows=self.random.choice([1, 20, 1000]),
                )
            except hg.HeadgateError:
                continue
        return self.writer

    def drop(self) -> None:
        """The writer's end: a crash, an abort, or a close that may fail."""
        writer, self.writer = self.writer, None
        if writer is None:
            return
        ending = self.random.choice(["crash", "abort", "close"])
        if ending == "abort":
            writer.abort()
        elif ending == "close":
            try:
                writer.close()
            except hg.HeadgateError:
                return

    def send(self, count: int) -> None:
        pending: dict[int, Any] = {}
        following, ends = 0, {count // 4, count // 2, count - 1}
        while len(self.acknowledged) < count:
            if self.random.random() < 0.3:
                self.disturb()
            writer = self.open()
            try:
                if following < count:
                    pending[following] = writer.put(self.batch(following), producer="p", sequence=following)
                    following += 1
                for sequence in [n for n in pending if following >= count or self.random.random() < 0.3 or pending[n].done()]:
                    self.acknowledged[sequence] = dict(pending.pop(sequence).wait(PATIENCE))
                if self.random.random() < 0.02 or following in ends:
                    ends.discard(following)
                    self.drop()
            except hg.HeadgateError:
                self.refused += 1
                self.drop()
            if self.writer is None:
                pending = {}
                following = min((n for n in range(count) if n not in self.acknowledged), default=count)
        self.tables.store.clear()


@pytest.mark.parametrize("memtable", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_a13_a15_random_failures_lose_nothing_and_double_nothing(make_tables: MakeTables, seed: int, memtable: bool) -> None:
    tables = make_tables(hg.bucket("id", 3))
    client, count = Client(tables, seed, memtable=memtable), 60
    client.send(count)
    assert client.reopened > 3, "there were failures"
    copies = tables.copies()
    wanted = {(part.shard, "p", n): part.rows for n in range(count) for part in split_rows(tables.rule, client.batch(n))}
    assert copies == dict.fromkeys(wanted, 1)
    for shard in tables.shards():
        for put in tables.puts(shard):
            assert put.rows["id"].equals(wanted[shard, put.producer, put.sequence]["id"]), "whole"
        sequences = [put.sequence for put in tables.puts(shard)]
        assert sequences == sorted(sequences), "in order"
    for sequence, places in client.acknowledged.items():
        assert set(places) == {part.shard for part in split_rows(tables.rule, client.batch(sequence))}


@pytest.mark.parametrize("seed", range(4))
def test_a13_two_processes_that_fence_each_other_double_nothing(make_tables: MakeTables, seed: int) -> None:
    """Both send the same producer's batches, as a failed-over job and its predecessor do."""
    tables = make_tables(hg.bucket("id", 3))
    clients = [Client(tables, 100 * seed + i, memtable=False) for i in range(2)]
    for client in clients:
        client.batches = {n: tables.rows(*range(100 * n, 100 * n + 5)) for n in range(25)}
        client.disturb = lambda: None  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda client: client.send(25), clients))
    wanted = {(part.shard, "p", n) for n in range(25) for part in split_rows(tables.rule, clients[0].batch(n))}
    assert tables.copies() == dict.fromkeys(wanted, 1)
