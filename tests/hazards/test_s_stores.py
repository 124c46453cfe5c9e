"""Hazards of stores: liars are refused, failures are bounded, secrets stay."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

import headgate as hg
from headgate.clock import SYSTEM_CLOCK, SystemClock
from headgate.errors import DeleteIncompleteError, ObjectExistsError, ObjectMissingError, StoreError, StoreUnavailableError
from headgate.store import Data, Location, ObjectInfo, Options, RetryingStore, RetryPolicy, probe
from headgate.store.faulty import Fault, FaultyStore
from headgate.store.memory import Heap, MemoryStore
from headgate.wal.collect import collect_entries, trim

# -- S01


class Overwriting(MemoryStore):
    """Ignores If-None-Match."""

    def create(self, key: str, data: Data) -> None:
        self.delete([key])
        super().create(key, data)


class Swallowing(MemoryStore):
    """Says yes to the second create and keeps the first."""

    def create(self, key: str, data: Data) -> None:
        try:
            super().create(key, data)
        except ObjectExistsError:
            return


class Lagging(MemoryStore):
    """Its listings show nothing new."""

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        return iter(())


class Deaf(MemoryStore):
    """Its listings begin where they like."""

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        return super().list(prefix)


class Mangling(MemoryStore):
    """Returns other bytes than it was given."""

    def get(self, key: str) -> memoryview:
        return memoryview(bytes(super().get(key)) + b"!")


class Forgetting(MemoryStore):
    """What was written is not there yet."""

    def get(self, key: str) -> memoryview:
        raise ObjectMissingError(f"{key} is not there yet", object=key)


LIARS = [Overwriting, Swallowing, Lagging, Deaf, Mangling, Forgetting]


@pytest.mark.parametrize("liar", LIARS)
def test_s01_a_store_that_lacks_what_is_needed_is_refused_at_creation(bench: Any, liar: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = liar("liar", heap=Heap())
    monkeypatch.setattr(Location, "open", lambda self, fsync=True: store)
    with pytest.raises(hg.UnsupportedStoreError):
        hg.create_table("memory://liar", bench.SCHEMA, key="id")
    assert store._heap.objects == {}, "the probe cleans up, and nothing else was written"


@pytest.mark.parametrize("liar", [Overwriting, Lagging])
def test_s01_a_wal_store_that_lacks_what_is_needed_is_refused_too(bench: Any, liar: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stores = {"memory://table": MemoryStore("table", heap=Heap()), "memory://wal": liar("wal", heap=Heap())}
    monkeypatch.setattr(Location, "open", lambda self, fsync=True: stores[self.uri])
    with pytest.raises(hg.UnsupportedStoreError):
        hg.create_table("memory://table", bench.SCHEMA, key="id", wal_uri="memory://wal")
    assert all(store._heap.objects == {} for store in stores.values())


def test_s01_an_honest_store_passes_whatever_replies_it_loses() -> None:
    for number in range(3):
        store = FaultyStore(MemoryStore("honest", heap=Heap()))
        store.add(Fault("create", "apply-then-fail", times=number))
        probe(store, QuickClock())
        assert list(store.list("")) == []


# -- S02


class QuickClock(SystemClock):
    """Counts its sleeps and takes no time for them."""

    def __init__(self) -> None:
        self.sleeps: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)


POLICY = RetryPolicy(retries=4, base_delay=0.1, max_delay=0.4)


def calls() -> dict[str, Any]:
    return {
        "get": lambda s: s.get("a/x"),
        "get_range": lambda s: s.get_range("a/x", 0, 1),
        "head": lambda s: s.head("a/x"),
        "list": lambda s: list(s.list("a/")),
        "delete": lambda s: s.delete(["a/x"]),
    }


def prepared(clock: QuickClock) -> tuple[FaultyStore, RetryingStore]:
    faulty = FaultyStore(MemoryStore("s02", heap=Heap()))
    faulty.create("a/x", b"body")
    faulty.requests.clear()
    return faulty, RetryingStore(faulty, clock, POLICY)


@pytest.mark.parametrize("kind", ["fail", "throttle"])
@pytest.mark.parametrize("call", list(calls()))
def test_s02_a_storm_is_retried_a_bounded_number_of_times_and_then_told(call: str, kind: Any) -> None:
    clock = QuickClock()
    faulty, store = prepared(clock)
    faulty.add(Fault("any", kind))
    with pytest.raises(StoreUnavailableError) as caught:
        calls()[call](store)
    assert caught.value.retryable
    assert sum(faulty.requests.values()) == POLICY.retries + 1
    assert len(clock.sleeps) == POLICY.retries
    assert all(0.05 <= seconds <= POLICY.max_delay for seconds in clock.sleeps)
    assert clock.sleeps[-1] > clock.sleeps[0], "the waits grow"


@pytest.mark.parametrize("call", list(calls()))
def test_s02_a_storm_that_ends_in_time_is_not_noticed(call: str) -> None:
    faulty, store = prepared(QuickClock())
    faulty.add(Fault("any", "throttle", times=POLICY.retries))
    calls()[call](store)


@pytest.mark.parametrize("call", list(calls()))
def test_s02_a_refusal_is_not_retried(call: str) -> None:
    clock = QuickClock()
    faulty, store = prepared(clock)
    faulty.add(Fault("any", "refuse"))
    with pytest.raises(StoreError) as caught:
        calls()[call](store)
    assert not caught.value.retryable
    assert sum(faulty.requests.values()) == 1
    assert clock.sleeps == []


def test_s02_a_listing_that_breaks_goes_on_where_it_was() -> None:
    class Breaking(MemoryStore):
        broken = 0

        def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
            for number, info in enumerate(super().list(prefix, start_after=start_after)):
                if number == 3:
                    self.broken += 1
                    raise StoreUnavailableError("reset", object=prefix)
                yield info

    inner = Breaking("breaking", heap=Heap())
    for number in range(20):
        inner.create(f"a/{number:02d}", b"")
    found = [info.key for info in RetryingStore(inner, QuickClock(), POLICY).list("a/")]
    assert found == [f"a/{number:02d}" for number in range(20)]
    assert inner.broken == 6


def test_s02_a_deletion_that_failed_in_part_is_finished_and_never_taken_for_success() -> None:
    faulty = FaultyStore(MemoryStore("s02", heap=Heap()))
    names = [f"a/{number}" for number in range(8)]
    for name in names:
        faulty.create(name, b"")
    store = RetryingStore(faulty, QuickClock(), POLICY)
    faulty.add(Fault("delete", "apply-then-fail", times=2))
    store.delete(names)
    assert list(faulty.inner.list("")) == []
    faulty.create("b", b"")
    faulty.add(Fault("delete", "apply-then-fail"))
    with pytest.raises(DeleteIncompleteError) as caught:
        store.delete(["b"])
    assert caught.value.keys == ["b"]


def test_s02_a_storm_over_an_open_writer_ends_in_a_typed_error(bench: Any) -> None:
    writer = bench.writer(max_wal_persist_retries=2)
    bench.store.add(Fault("any", "throttle"))
    with pytest.raises(hg.WriterPoisonedError):
        writer.put(bench.rows(1)).wait(bench.PATIENCE)
    with pytest.raises(StoreUnavailableError):
        writer.check_fenced()


@pytest.mark.parametrize("operation", ["get", "list", "create"])
def test_s02_a_storm_over_an_open_ends_in_a_typed_error_and_a_bounded_number_of_requests(bench: Any, operation: Any) -> None:
    with bench.appender() as appender:
        appender.append([bench.rows(1)])
    bench.store.requests.clear()
    bench.store.add(Fault(operation, "throttle"))
    with pytest.raises((StoreUnavailableError, hg.OutcomeUnknownError)):
        bench.appender()
    assert sum(bench.store.requests.values()) < 40


def test_s02_a_truncated_body_is_a_typed_error_that_names_it(bench: Any) -> None:
    with bench.appender() as appender:
        appender.append([bench.rows(1)])
    bench.store.add(Fault("get", "truncate", key=".arrow"))
    with pytest.raises(hg.CorruptEntryError) as caught:
        list(hg.WalTailer(bench.fresh(bench.store)).read(0))
    assert caught.value.object == bench.entry_key(1, 0)


@pytest.mark.parametrize("part", ["/manifest/", "0000.json"])
def test_s02_a_truncated_manifest_or_marker_is_a_typed_error_and_writes_nothing(bench: Any, part: str) -> None:
    bench.appender()
    before = bench.contents()
    store = bench.faulty()
    store.add(Fault("get", "truncate", key=part))
    with pytest.raises(hg.CorruptEntryError):
        bench.appender(store)
    assert bench.contents() == before


# -- S03


@pytest.mark.parametrize("call", ["get", "get_range", "head"])
def test_s03_not_found_is_an_answer_and_is_not_retried(call: str) -> None:
    clock = QuickClock()
    faulty, store = prepared(clock)
    faulty.inner.delete(["a/x"])
    with pytest.raises(ObjectMissingError):
        calls()[call](store)
    assert sum(faulty.requests.values()) == 1
    assert clock.sleeps == []


def test_s03_a_table_that_is_not_there_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FaultyStore(MemoryStore("nothing", heap=Heap()))
    monkeypatch.setattr(Location, "open", lambda self, fsync=True: store)
    with pytest.raises(hg.NotFoundError):
        hg.open_table("memory://nothing")
    assert sum(store.requests.values()) == 1


def test_s03_a_manifest_that_is_listed_and_never_found_ends_in_a_typed_error(bench: Any) -> None:
    bench.store.add(Fault("get", "missing", key="/manifest/"))
    with pytest.raises(hg.CommitConflictError):
        bench.log().manifests.load()
    assert bench.store.requests["get"] <= 64


def test_s03_entries_that_vanish_between_listing_and_reading_are_not_waited_for(bench: Any) -> None:
    with bench.appender() as appender:
        for number in range(5):
            appender.append([bench.rows(number)])
    trim(bench.log(), 3)
    once = []

    def vanish(operation: str, key: str) -> None:
        if operation == "get" and key.endswith(".arrow") and not once:
            once.append(key)
            collect_entries(bench.log(bench.inner), dry_run=False)

    tailer = hg.WalTailer(bench.fresh(bench.faulty(before=vanish)))
    with pytest.raises(hg.WalTruncatedError):
        list(tailer.read(0))
    assert [entry.position for entry in tailer.read()] == [3, 4]


# -- S04

SECRETS = {
    "aws_access_key_id": "AKIDSECRETSECRET",
    "aws_secret_access_key": "verysecretkey/with+chars",
    "aws_session_token": "tokentokentoken",
}


@pytest.fixture
def unreachable() -> dict[str, str]:
    """Options with secrets, and an endpoint where nobody listens."""
    return {
        **SECRETS,
        "aws_endpoint": "http://127.0.0.1:9",
        "aws_region": "eu-1",
        "allow_http": "true",
        "timeout": "1s",
        "connect_timeout": "1s",
    }


def assert_no_secret(text: str) -> None:
    for value in SECRETS.values():
        assert value not in text


def test_s04_no_repr_shows_a_credential(unreachable: dict[str, str]) -> None:
    location = Location.parse("s3://bucket/table", unreachable)
    store = location.open()
    for thing in (location, location.options, Options(unreachable), store, RetryingStore(store, SYSTEM_CLOCK)):
        assert_no_secret(repr(thing))
        assert_no_secret(str(thing))
        assert_no_secret(f"{thing}")
    assert_no_secret(store.uri)
    assert_no_secret(repr(copy.copy(location.options)))


def test_s04_no_error_shows_a_credential(unreachable: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SystemClock, "sleep", lambda self, seconds: None)
    with pytest.raises(StoreUnavailableError) as caught:
        hg.open_table("s3://bucket/table", unreachable)
    error: BaseException | None = caught.value
    while error is not None:
        assert_no_secret(str(error) + repr(error) + repr(error.__dict__))
        error = error.__cause__ or error.__context__
    assert_no_secret(pickle.dumps(caught.value).decode("latin-1"))


def test_s04_an_option_that_is_refused_is_refused_without_its_value(unreachable: dict[str, str]) -> None:
    for options in ({**unreachable, "aws_no_such_option": "verysecretkey"}, {**unreachable, "timeout": "verysecretkey"}):
        with pytest.raises(hg.InvalidInputError) as caught:
            hg.open_table("s3://bucket/table", options)
        assert "verysecretkey" not in str(caught.value)


@pytest.mark.parametrize(
    "uri", ["s3://AKID:verysecretkey@bucket/x", "az://user:verysecretkey@container/x", "s3://bucket/x?sig=verysecretkey"]
)
def test_s04_a_uri_with_credentials_is_refused_without_them(uri: str) -> None:
    with pytest.raises(hg.InvalidInputError) as caught:
        hg.open_table(uri)
    assert "verysecretkey" not in str(caught.value)


def test_s04_no_object_and_no_log_line_holds_a_credential(
    bench: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    store = MemoryStore("s04", heap=Heap())
    monkeypatch.setattr(Location, "open", lambda self, fsync=True: store)
    table = hg.create_table(
        "s3://bucket/table", bench.SCHEMA, key="id", storage_options=SECRETS, wal_uri="s3://wal/x", wal_storage_options=SECRETS
    )
    for _ in range(2):
        with table.shard("0000").writer(hg.ShardWriterConfig(enable_memtable=False)) as writer:
            writer.put(bench.rows(1), producer="p", sequence=0).wait()
    assert_no_secret(repr(table) + repr(table.shards) + repr(table.status()) + repr(table.verify(deep=True)) + repr(writer))
    assert_no_secret(caplog.text)
    assert len(store._heap.objects) > 5
    for key, (body, _) in store._heap.objects.items():
        assert_no_secret(key)
        assert_no_secret(body.decode("latin-1"))


def test_s04_a_pickled_handle_carries_them_and_shows_them_nowhere() -> None:
    location = Location.parse("s3://bucket/table", SECRETS)
    again = pickle.loads(pickle.dumps(location))
    assert again == location
    assert again.options == SECRETS  # a worker elsewhere must be able to open it
    assert isinstance(again.options, Options)
    assert_no_secret(repr(again))
