"""S3 through a proxy that refuses, resets, delays, slows and cuts (S02, A05, A16).

Random tests print their seed; HEADGATE_SEEDS=100 runs that many.
"""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from collections.abc import Callable

import pytest
from stores_support import SCHEMA, ids_of, rows

import headgate as hg
from headgate.clock import SYSTEM_CLOCK
from headgate.errors import FencedError, HeadgateError, ObjectExistsError, StoreError, StoreUnavailableError, WriterPoisonedError
from headgate.store import Location, RetryingStore, RetryPolicy, Store, create_exactly
from servers import FAULTS, Plan, Proxy

QUICK = RetryPolicy(retries=4, base_delay=0.002, max_delay=0.01)
WRITER = hg.ShardWriterConfig(enable_memtable=False, max_wal_persist_retries=3, wal_persist_retry_base_delay=0.005)
SEEDS = range(int(os.environ.get("HEADGATE_SEEDS", "4")))

pytestmark = pytest.mark.timeout(600)


def raw_store(proxy: Proxy, name: str) -> Store:
    return Location.parse(proxy.server.uri(f"faults/{name}"), {**proxy.server.options, "timeout": "5s"}).open()


OPERATIONS: dict[str, Callable[[Store], object]] = {
    "get": lambda store: bytes(store.get("a")),
    "range": lambda store: bytes(store.get_range("a", 2, 100)),
    "head": lambda store: store.head("a").size_bytes,
    "list": lambda store: [info.key for info in store.list("")],
    "delete": lambda store: store.delete(["b"]),
}


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "409"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_s02_each_fault_is_a_typed_error_and_a_retry_mends_it(proxy, operation, fault):
    store, ask = raw_store(proxy, f"{operation}-{fault}"), OPERATIONS[operation]
    store.create("a", bytes(range(200)))
    store.create("b", b"x")
    right = ask(store)

    proxy.hurt(Plan(rate=1.0, faults=(fault,)))
    if fault == "slow":
        assert ask(store) == right
    else:
        with pytest.raises(StoreUnavailableError):
            ask(store)
    proxy.hurt(Plan(rate=1.0, faults=(fault,), in_a_row_max=3))
    assert ask(RetryingStore(store, SYSTEM_CLOCK, QUICK)) == right


@pytest.mark.parametrize("fault", FAULTS)
def test_a16_a_create_under_each_fault_happens_once(proxy, fault):
    store = raw_store(proxy, f"create-{fault}")
    proxy.hurt(Plan(rate=1.0, faults=(fault,), methods="PUT", in_a_row_max=1))

    assert create_exactly(store, "a", b"ours", SYSTEM_CLOCK, QUICK) is None
    occupant = create_exactly(store, "a", b"theirs", SYSTEM_CLOCK, QUICK)
    proxy.calm()

    assert bytes(occupant or b"") == b"ours"
    assert bytes(store.get("a")) == b"ours"


def test_a16_a_409_is_told_as_taken_although_nothing_is_there(proxy):
    """What object_store makes of S3's 409: the reason why a taken name is always read."""
    store = raw_store(proxy, "conflict")
    proxy.hurt(Plan(rate=1.0, faults=("409",), in_a_row_max=1))

    with pytest.raises(ObjectExistsError):
        store.create("a", b"x")

    assert list(store.list("")) == []
    store.create("a", b"x")


@pytest.mark.parametrize("fault", ["503", "429", "reset-before"])
def test_s02_a_storm_without_end_ends_in_a_typed_error_after_a_few_requests(proxy, fault):
    uri, options = proxy.server.uri(f"faults/storm-{fault}"), proxy.server.options
    shard = hg.create_table(uri, SCHEMA, key="id", storage_options=options).shard("0000")
    writer = shard.writer(WRITER)
    writer.put(rows(1)).wait(30)

    proxy.hurt(Plan(rate=1.0, faults=(fault,)))
    with pytest.raises(WriterPoisonedError) as caught:
        writer.put(rows(2)).wait(30)
    puts = [request for request in proxy.requests if request.method == "PUT" and request.path.endswith(".arrow")]
    with pytest.raises(WriterPoisonedError):
        writer.put(rows(3))
    with pytest.raises(HeadgateError):
        hg.open_table(uri, options)
    opening = len(proxy.requests)
    proxy.calm()
    writer.abort()

    assert isinstance(caught.value.cause, StoreError)
    assert [put.rows.column("id").to_pylist() for put in caught.value.unacknowledged] == [[2]]
    assert len(puts) == 1 + WRITER.max_wal_persist_retries
    assert opening < 20
    assert ids_of(hg.open_table(uri, options).shard("0000")) == [1]


class Client:
    """Puts numbers until all are acknowledged, through as many writers as it takes."""

    def __init__(self, uri: str, options: dict[str, object], producer: str | None, first: int, count: int) -> None:
        self.uri, self.options, self.producer = uri, options, producer
        self.numbers = list(range(first, first + count))
        self.first = first
        self.acknowledged: dict[int, tuple[int, int]] = {}
        self.sent: Counter[int] = Counter()
        self.errors: Counter[str] = Counter()
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            for _ in range(200):
                if not self.numbers:
                    return
                try:
                    with hg.open_table(self.uri, self.options).shard("0000").writer(WRITER) as writer:
                        self._put_all(writer)
                except HeadgateError as error:
                    self.errors[type(error).__name__] += 1
            raise AssertionError(f"{len(self.numbers)} numbers left after 200 writers: {self.errors}")
        except BaseException as error:  # a thread's end: the test raises it
            self.failure = error

    def _put_all(self, writer: hg.ShardWriter) -> None:
        while self.numbers:
            number = self.numbers[0]
            self.sent[number] += 1
            if self.producer is None:
                self.numbers.pop(0)  # without a sequence nothing is sent twice
                ack = writer.put(rows(number))
            else:
                ack = writer.put(rows(number), producer=self.producer, sequence=number - self.first)
            receipt = ack.wait(60)
            self.acknowledged[number] = receipt["0000"] if not receipt.duplicate else (-1, -1)
            if self.producer is not None:
                self.numbers.pop(0)


@pytest.mark.parametrize("seed", SEEDS)
def test_s02_under_random_faults_nothing_acknowledged_is_lost_or_doubled(proxy, seed):
    chance = random.Random(seed)
    uri, options = proxy.server.uri(f"faults/random-{seed}"), {**proxy.server.options, "timeout": "5s"}
    shard = hg.create_table(uri, SCHEMA, key="id", storage_options=options).shard("0000")
    clients = [Client(uri, options, "p", 0, 25), Client(uri, options, None, 1000, 25)]
    proxy.hurt(Plan(seed=seed, rate=chance.choice([0.1, 0.2, 0.35])))

    threads = [threading.Thread(target=client.run) for client in clients[: 1 + seed % 2]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    faults = Counter(request.fault for request in proxy.requests if request.fault)
    proxy.calm()

    for client in clients:
        if client.failure is not None:
            raise client.failure
    assert not any(thread.is_alive() for thread in threads)
    entries = list(hg.WalTailer(shard).read(0))
    found = [(number, (entry.epoch, entry.position)) for entry in entries for b in entry.batches for number in b.column("id").to_pylist()]
    places = dict(found)
    print(f"seed {seed}: {sum(faults.values())} faults {dict(faults)}, errors {[dict(client.errors) for client in clients]}")
    assert len(found) == len(places), "a number is there twice"
    assert [number for number, _ in found if number < 1000] == list(range(25))
    for client in clients:
        for number, place in client.acknowledged.items():
            assert number in places
            assert place in ((-1, -1), places[number])
        assert all(number in client.sent for number in places if (number >= 1000) == (client.producer is None))
    report = hg.open_table(uri, options).verify(deep=True)
    assert report.ok, report.problems


def test_s02_a_fenced_writer_learns_it_through_faults(proxy):
    uri, options = proxy.server.uri("faults/fenced"), proxy.server.options
    shard = hg.create_table(uri, SCHEMA, key="id", storage_options=options).shard("0000")
    first = shard.writer(WRITER)
    first.put(rows(1)).wait(30)
    with hg.open_table(uri, options).shard("0000").writer(WRITER) as second:
        second.put(rows(2)).wait(30)

    proxy.hurt(Plan(rate=1.0, faults=("reset-after", "reset-before", "503"), in_a_row_max=2))
    with pytest.raises(FencedError):
        first.put(rows(3)).wait(30)
    first.abort()
    proxy.calm()

    assert ids_of(shard) == [1, 2]


def test_s02_a_table_is_created_through_faults(proxy):
    uri, options = proxy.server.uri("faults/created"), proxy.server.options
    proxy.hurt(Plan(rate=1.0, faults=("409", "503"), methods="PUT", in_a_row_max=1))

    table = hg.create_table(uri, SCHEMA, key="id", storage_options=options)

    assert table.verify(deep=True).ok
