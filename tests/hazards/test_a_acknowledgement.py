"""Hazards of acknowledgement: what a caller was told is durable is there once, whatever the store answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate.clock import SYSTEM_CLOCK
from headgate.errors import ObjectExistsError, StoreError, StoreUnavailableError
from headgate.failpoint import hooked
from headgate.manifest import ManifestChain, TableManifest
from headgate.manifest.document import encode_document
from headgate.manifest.model import WalMarker
from headgate.store import Location, ObjectInfo, Store
from headgate.store.faulty import Fault, FaultyStore
from headgate.store.memory import Heap, MemoryStore
from headgate.wal.collect import collect_entries, trim
from headgate.wal.entry import SEAL_BYTES, Put
from headgate.wal.fence import open_epoch
from headgate.wal.marker import put_seal

KINDS = ["table manifest", "manifest", "marker", "entry", "seal"]


def headgate_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("headgate-")]


@pytest.fixture
def shared(bench: Any, monkeypatch: pytest.MonkeyPatch) -> FaultyStore:
    """Every store that a Location opens is this one; nothing is in it yet."""
    store = FaultyStore(MemoryStore("shared", heap=Heap()))
    monkeypatch.setattr(Location, "open", lambda self, fsync=True: store)
    # Retries that take no time: the policies are defaults of the classes.
    monkeypatch.setattr("headgate.clock.SystemClock.sleep", lambda self, seconds: None)
    return store


def a_whole_life(rows: Callable[..., pa.RecordBatch], schema: pa.Schema) -> list[int]:
    """Create a table, write, take over, write: every kind of object is made. Returns the ids read back."""
    table = hg.create_table("memory://shared", schema, key="id")
    config = hg.ShardWriterConfig(enable_memtable=False, wal_persist_retry_base_delay=0.0)
    with table.shard("0000").writer(config) as first:
        first.put(rows(1)).wait()
    with table.shard("0000").writer(config) as second:
        second.put(rows(2)).wait()
    return [i for entry in table.shard("0000").tail(follow=False) for batch in entry.batches for i in batch.column("id").to_pylist()]


def key_part(kind: str) -> str:
    return {"table manifest": "table/", "manifest": "/manifest/", "marker": "/0000.json", "entry": ".arrow", "seal": ".arrow"}[kind]


class OnlyKind(FaultyStore):
    """Meets its faults only for creates of one kind of object, told by name and size."""

    def __init__(self, inner: Store, kind: str) -> None:
        super().__init__(inner)
        self.kind = kind
        self._size = threading.local()

    def create(self, key: str, data: Any) -> None:
        self._size.bytes = len(memoryview(data).cast("B"))
        super().create(key, data)

    def _meet(self, operation: Any, key: str) -> Fault | None:
        size_bytes = getattr(self._size, "bytes", 0)
        is_kind = self.kind not in ("entry", "seal") or (size_bytes == SEAL_BYTES) == (self.kind == "seal")
        return super()._meet(operation, key) if operation == "create" and key_part(self.kind) in key and is_kind else None


@pytest.fixture(params=KINDS)
def one_kind(request: pytest.FixtureRequest, bench: Any, monkeypatch: pytest.MonkeyPatch) -> OnlyKind:
    store = OnlyKind(MemoryStore("shared", heap=Heap()), request.param)
    monkeypatch.setattr(Location, "open", lambda self, fsync=True: store)
    monkeypatch.setattr("headgate.clock.SystemClock.sleep", lambda self, seconds: None)
    return store


# -- A01


def test_a01_a_durable_put_returns_only_when_the_hanging_store_lets_go(bench: Any, arrivals: Any) -> None:
    came = arrivals("create", ".arrow")
    store = bench.faulty(before=came)
    writer = bench.writer(store, durable_write=True)
    store.add(Fault("create", "hang", key=".arrow"))
    with ThreadPoolExecutor(1) as pool:
        put = pool.submit(writer.put, bench.rows(1))
        came.wait_for(1)
        assert bench.ids() == []
        assert not put.done()
        with pytest.raises(TimeoutError):
            put.result(timeout=0.05)
        store.release()
        assert put.result(timeout=bench.PATIENCE).done()
    assert bench.ids() == [1]


def test_a01_an_ack_is_not_done_while_the_put_hangs(bench: Any, arrivals: Any) -> None:
    came = arrivals("create", ".arrow")
    store = bench.faulty(before=came)
    writer = bench.writer(store)
    store.add(Fault("create", "hang", key=".arrow"))
    ack = writer.put(bench.rows(1))
    came.wait_for(1)
    with pytest.raises(TimeoutError):
        ack.wait(timeout=0.02)
    assert not ack.done()
    store.release()
    assert ack.wait(bench.PATIENCE)["0000"] == (1, 0)


def test_a01_no_entry_is_acknowledged_before_the_one_in_front_of_it(bench: Any, arrivals: Any) -> None:
    came = arrivals("create", ".arrow")
    store = bench.faulty(before=came)
    writer = bench.writer(store, max_wal_buffer_size=1, max_inflight=4)
    store.add(Fault("create", "hang", key=f"{0:020d}.arrow"))
    acks = [writer.put(bench.rows(i)) for i in range(4)]
    came.wait_for(4)
    with pytest.raises(TimeoutError):
        acks[3].wait(timeout=0.02)
    assert [ack.done() for ack in acks] == [False] * 4
    assert writer.wal_stats().acknowledged_position == -1
    store.release()
    assert [ack.wait(bench.PATIENCE)["0000"] for ack in acks] == [(1, 0), (1, 1), (1, 2), (1, 3)]


# -- A04


@pytest.mark.parametrize("retries", [0, 2])
def test_a04_one_failure_more_than_retries_poisons_everything_at_once(bench: Any, arrivals: Any, retries: int) -> None:
    came = arrivals("create", ".arrow")
    store = bench.faulty(before=came)
    writer = bench.writer(store, max_wal_persist_retries=retries)
    writer.put(bench.rows(1)).wait()
    store.add(Fault("create", "fail", key=".arrow"))
    came.hold()
    acks = [writer.put(bench.rows(i)) for i in (2, 3, 4)]
    came.let_go()
    errors = []
    for ack in acks:
        with pytest.raises(hg.WriterPoisonedError) as caught:
            ack.wait(bench.PATIENCE)
        errors.append(caught.value)
    assert came.count >= 1 + retries + 1
    for call in (lambda: writer.put(bench.rows(5)), writer.flush, writer.close):
        with pytest.raises(hg.WriterPoisonedError) as caught:
            call()
        errors.append(caught.value)
    assert len({error.message for error in errors}) == 1
    assert isinstance(errors[0].cause, StoreUnavailableError)
    assert [put.rows.column("id").to_pylist() for put in errors[0].unacknowledged] == [[2], [3], [4]]

    store.clear()  # only now: an entry that another slot still retries might land in a store that is well again
    again = bench.writer()
    again.put(bench.rows(6)).wait()
    assert bench.ids() == [1, 6]


def test_a04_exactly_the_configured_number_of_attempts_is_made_for_an_entry(bench: Any) -> None:
    writer = bench.writer(max_wal_persist_retries=3)
    bench.store.add(Fault("create", "fail", key=".arrow"))
    before = bench.store.requests["create"]
    with pytest.raises(hg.WriterPoisonedError):
        writer.put(bench.rows(1)).wait(bench.PATIENCE)
    assert bench.store.requests["create"] - before == 4


def test_a04_as_many_failures_as_retries_are_survived(bench: Any) -> None:
    writer = bench.writer(max_wal_persist_retries=3)
    bench.store.add(Fault("create", "fail", key=".arrow", times=3))
    assert writer.put(bench.rows(1)).wait(bench.PATIENCE)["0000"] == (1, 0)
    assert bench.ids() == [1]


def test_a04_a_poisoned_entry_that_did_land_is_there_after_reopen(bench: Any) -> None:
    writer = bench.writer(max_wal_persist_retries=1)
    # Lands, its reply is lost; the retry and every read of it fail too: nobody knows, so nobody is told.
    bench.store.add(Fault("create", "apply-then-fail", key=".arrow", times=1), Fault("create", "fail", key=".arrow"))
    with pytest.raises(hg.WriterPoisonedError):
        writer.put(bench.rows(1), producer="p", sequence=0).wait(bench.PATIENCE)
    bench.store.clear()
    again = bench.writer()
    assert bench.ids() == [1]
    assert again.put(bench.rows(1), producer="p", sequence=0).wait().duplicate
    assert bench.ids() == [1]


def test_a04_a_poisoned_appender_says_so_ever_after(bench: Any) -> None:
    appender = bench.appender()
    bench.store.add(Fault("create", "fail", key=".arrow"))
    with pytest.raises(hg.WriterPoisonedError) as first:
        appender.append([bench.rows(1)])
    bench.store.clear()
    with pytest.raises(hg.WriterPoisonedError) as second:
        appender.append([bench.rows(2)])
    assert second.value is first.value
    assert bench.ids() == []


def test_a04_a_failed_fsync_is_never_retried(bench: Any) -> None:
    writer = bench.writer(max_wal_persist_retries=3)
    bench.store.add(Fault("create", "sync", key=".arrow", times=1))
    before = bench.store.requests["create"]
    with pytest.raises(hg.WriterPoisonedError, match="fsync"):
        writer.put(bench.rows(1)).wait(bench.PATIENCE)
    assert bench.store.requests["create"] - before == 1


# -- A05


@pytest.mark.parametrize("lost", [1, 2])
def test_a05_a_lost_reply_for_any_object_leaves_it_there_exactly_once(one_kind: OnlyKind, bench: Any, lost: int) -> None:
    fault = Fault("create", "apply-then-fail", times=1)
    one_kind.add(fault)
    if lost == 2:
        one_kind.add(Fault("create", "fail", times=1))  # and the first retry does not arrive at all
    assert a_whole_life(bench.rows, bench.SCHEMA) == [1, 2]
    assert fault.times == 0, "the fault was met"
    assert hg.open_table("memory://shared").verify(deep=True).ok
    epochs = [shard.epoch for shard in hg.open_table("memory://shared").status().shards]
    assert epochs == [2], "a claim whose reply was lost is not made twice"


def test_a05_every_create_of_a_life_may_lose_its_reply(shared: FaultyStore, bench: Any) -> None:
    shared.add(*[Fault("create", "apply-then-fail", times=1, skip=0) for _ in range(3)])
    assert a_whole_life(bench.rows, bench.SCHEMA) == [1, 2]
    total = shared.requests["create"]
    for number in range(total):
        shared.inner.delete([info.key for info in shared.inner.list("")])
        shared.clear()
        shared.add(Fault("create", "apply-then-fail", skip=number, times=1))
        assert a_whole_life(bench.rows, bench.SCHEMA) == [1, 2], f"create number {number}"
        assert hg.open_table("memory://shared").status().shards[0].epoch == 2


def test_a05_a_seal_whose_reply_is_lost_does_not_fence_its_own_claimant(bench: Any) -> None:
    bench.appender().append([bench.rows(1)])
    bench.store.add(Fault("create", "apply-then-fail", key=f"{1:020d}.arrow", times=1))
    second = bench.appender()
    assert second.append([bench.rows(2)]) == (2, 2)
    assert [entry.kind for entry in bench.entries(include_seals=True)] == ["data", "seal", "data"]


# -- A06


class BodyOnly(MemoryStore):
    """A store that keeps bytes and nothing else: no size, no time, no metadata can be asked for."""

    def head(self, key: str) -> ObjectInfo:
        raise StoreError(f"no head of {key}", object=key)


def test_a06_identity_is_in_the_body_so_a_lost_reply_needs_nothing_but_get(bench: Any) -> None:
    store = FaultyStore(BodyOnly("", heap=bench.inner._heap))
    writer = bench.writer(store)
    store.add(Fault("create", "apply-then-fail", key=".arrow", times=1))
    before = store.requests.copy()
    assert writer.put(bench.rows(1)).wait(bench.PATIENCE)["0000"] == (1, 0)
    made = store.requests - before
    assert (made["create"], made["get"], made["list"], made["head"]) == (2, 1, 0, 0)
    assert bench.ids() == [1]


def test_a06_the_same_rows_of_another_writer_are_not_taken_for_our_own(bench: Any) -> None:
    appender = bench.appender()
    writer = appender._writer
    twins = [bytes(writer.encode(0, -1, bench.rules.log_schema, [Put(bench.rows(1))])) for _ in range(2)]
    assert twins[0] != twins[1]
    bench.inner.create(bench.entry_key(1, 0), twins[0])
    with pytest.raises(hg.WriterPoisonedError) as caught:
        appender.append([bench.rows(1)])
    assert isinstance(caught.value.cause, StoreError)


# -- A07


def test_a07_fencing_a_writer_ends_every_put_in_flight_and_in_the_queue(bench: Any, arrivals: Any) -> None:
    came = arrivals("create", ".arrow")
    slow = bench.faulty(before=came)
    fenced = bench.writer(slow, max_wal_buffer_size=1, max_inflight=3)
    fenced.put(bench.rows(0)).wait()
    slow.add(Fault("create", "hang", key=".arrow"))
    acks = [fenced.put(bench.rows(i)) for i in range(1, 9)]
    came.wait_for(4)
    successor = bench.writer()
    slow.release()
    outcomes = []
    for ack in acks:
        with pytest.raises(hg.FencedError) as caught:
            ack.wait(bench.PATIENCE)
        assert caught.value.by_epoch == 2
        outcomes.append(bench.shard.outcome(caught.value.epoch, caught.value.position))
    assert outcomes == ["void"] * 8
    with pytest.raises(hg.FencedError):
        fenced.put(bench.rows(99))
    successor.put(bench.rows(10)).wait()
    assert bench.ids() == [0, 10]


def test_a07_an_entry_that_landed_below_the_seal_is_durable_though_its_put_was_fenced(bench: Any, arrivals: Any) -> None:
    zero, one = arrivals("create", f"{0:020d}.arrow"), arrivals("create", f"{1:020d}.arrow")
    first_may_go_on = threading.Event()

    def before(operation: str, key: str) -> None:
        zero(operation, key)
        one(operation, key)
        if operation == "create" and key.endswith(f"{0:020d}.arrow") and zero.count == 2:
            first_may_go_on.wait(bench.PATIENCE)

    slow = bench.faulty(before=before)
    fenced = bench.writer(slow, max_wal_buffer_size=1, max_inflight=2)
    # Position 0 lands, its reply is lost, and the request is sent again only after position 1 met the seal.
    slow.add(Fault("create", "apply-then-fail", key=f"{0:020d}.arrow", times=1), Fault("create", "hang", key=f"{1:020d}.arrow"))
    acks = [fenced.put(bench.rows(i)) for i in (0, 1)]
    zero.wait_for(2)
    one.wait_for(1)
    bench.writer()
    slow.release()
    places = []
    for ack in reversed(acks):
        with pytest.raises(hg.FencedError) as caught:
            ack.wait(bench.PATIENCE)
        places.append((caught.value.epoch, caught.value.position))
    first_may_go_on.set()
    assert places == [(1, 1), (1, 0)]
    assert [bench.shard.outcome(*place) for place in places] == ["void", "durable"]
    assert bench.ids() == [0]


# -- A08


def test_a08_close_raises_what_its_last_put_met_and_leaves_no_thread(bench: Any) -> None:
    writer = bench.writer(max_wal_persist_retries=1)
    bench.store.add(Fault("create", "fail", key=".arrow"))
    ack = writer.put(bench.rows(1))
    with pytest.raises(hg.WriterPoisonedError):
        writer.close()
    assert ack.done()
    assert headgate_threads() == []


def test_a08_close_raises_when_its_record_in_the_manifest_fails(bench: Any) -> None:
    writer = bench.writer()
    writer.put(bench.rows(1)).wait()
    bench.store.add(Fault("create", "fail", key="/manifest/"))
    with pytest.raises(hg.HeadgateError):
        writer.close()
    assert headgate_threads() == []
    writer.close()  # can be repeated


def test_a08_an_exception_in_the_with_block_is_not_hidden_by_a_failing_close(bench: Any) -> None:
    def block() -> None:
        with bench.writer(max_wal_persist_retries=0) as writer:
            bench.store.add(Fault("create", "fail", key=".arrow"))
            writer.put(bench.rows(1))
            raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        block()
    assert any("closing the writer failed" in note for note in caught.value.__notes__)
    assert headgate_threads() == []


def test_a08_a_clean_close_leaves_no_thread_and_is_final(bench: Any) -> None:
    writer = bench.writer()
    writer.put(bench.rows(1))
    writer.close()
    assert headgate_threads() == []
    assert bench.ids() == [1]
    with pytest.raises(hg.ClosedError):
        writer.put(bench.rows(2))


# -- A10


def bad_batches() -> Iterator[Any]:
    good = {"id": pa.array([1], pa.int64()), "value": pa.array(["x"])}
    batch = pa.RecordBatch.from_pydict
    yield pytest.param(batch({**good, "id": pa.array([None], pa.int64())}), id="null in the key")
    yield pytest.param(batch({**good, "id": pa.array([1], pa.int32())}), id="narrower type")
    yield pytest.param(batch({**good, "id": pa.array(["1"])}), id="wrong type")
    yield pytest.param(batch({**good, "value": pa.array([1.5])}), id="wrong type of a value")
    yield pytest.param(batch({"value": good["value"], "id": good["id"]}), id="other order")
    yield pytest.param(batch({"id": good["id"]}), id="missing column")
    yield pytest.param(batch({**good, "extra": pa.array([1])}), id="extra column")
    yield pytest.param(batch({**good, "value": pa.array(["x"]).dictionary_encode()}), id="dictionary")
    yield pytest.param(batch({"id": pa.array([], pa.int64()), "value": pa.array([], pa.string())}), id="zero rows")
    yield pytest.param([], id="an empty list")
    yield pytest.param([{"id": 1, "vaule": "x"}], id="a misspelt column")
    yield pytest.param([{"id": "one", "value": "x"}], id="a value that does not convert")
    yield pytest.param([{"value": "x"}], id="a dict without the key")
    yield pytest.param([1, 2], id="a list of numbers")
    yield pytest.param("id", id="a string")
    yield pytest.param(None, id="nothing")


@pytest.mark.parametrize("bad", list(bad_batches()))
def test_a10_a_batch_that_replay_could_not_take_is_refused_before_the_wal(bench: Any, bad: Any) -> None:
    writer = bench.writer()
    writer.put(bench.rows(1)).wait()
    before = bench.contents()
    with pytest.raises(hg.InvalidInputError):
        writer.put(bad)
    with pytest.raises(hg.InvalidInputError):
        writer.put(bad, producer="p", sequence=0)
    assert bench.contents() == before
    writer.put(bench.rows(2), producer="p", sequence=0).wait()  # the refused one used up no sequence
    bench.writer().put(bench.rows(3)).wait()
    assert bench.ids() == [1, 2, 3]


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(pa.table({"id": pa.array([None], pa.int64())}), id="null key"),
        pytest.param(pa.table({"value": ["x"]}), id="no key"),
        pytest.param(pa.table({"id": ["1"]}), id="wrong type"),
        pytest.param(pa.table({"id": pa.array([], pa.int64())}), id="zero rows"),
    ],
)
def test_a10_a_delete_that_replay_could_not_take_is_refused_before_the_wal(bench: Any, bad: pa.Table) -> None:
    writer = bench.writer()
    before = bench.contents()
    with pytest.raises(hg.InvalidInputError):
        writer.delete(bad)
    assert bench.contents() == before


def test_a10_an_entry_of_no_batches_or_one_bad_batch_is_refused_whole(bench: Any) -> None:
    appender = bench.appender()
    before = bench.contents()
    for batches in ([], [bench.rows(1), bench.rows()]):
        with pytest.raises(hg.InvalidInputError):
            appender.append(batches)
    assert bench.contents() == before
    assert appender.append([bench.rows(1)]) == (1, 0)


@pytest.mark.parametrize("kind", [pa.string_view(), pa.large_string(), pa.string()])
def test_a10_layouts_of_text_are_normalised(bench: Any, kind: pa.DataType) -> None:
    batch = pa.RecordBatch.from_arrays(
        [pa.array([1], pa.int64()), pa.array(["a long enough text to need a buffer"]).cast(kind)], ["id", "value"]
    )
    bench.writer().put(batch).wait()
    (entry,) = bench.entries()
    assert entry.batches[0].schema.field("value").type == pa.string()
    assert entry.batches[0].column("value").to_pylist() == ["a long enough text to need a buffer"]


@pytest.mark.parametrize(
    ("schema", "key"),
    [
        pytest.param(pa.schema([("id", pa.dictionary(pa.int8(), pa.string()))]), None, id="dictionary"),
        pytest.param(pa.schema([("id", pa.map_(pa.string(), pa.string()))]), None, id="map"),
        pytest.param(pa.schema([("id", pa.struct([]))]), None, id="empty struct"),
        pytest.param(pa.schema([("id", pa.month_day_nano_interval())]), None, id="interval"),
        pytest.param(pa.schema([("id", pa.list_view(pa.int8()))]), None, id="list view"),
        pytest.param(pa.schema([("id", pa.sparse_union([pa.field("a", pa.int8())]))]), None, id="union"),
        pytest.param(pa.schema([("id", pa.run_end_encoded(pa.int32(), pa.int8()))]), None, id="run ends"),
        pytest.param(pa.schema([("id", pa.list_(pa.int8(), 0))]), None, id="fixed-size list of size 0"),
        pytest.param(pa.schema([("id", pa.list_(pa.struct([("a", pa.int8())]), 2))]), None, id="fixed-size list of structs"),
        pytest.param(pa.schema([("id", pa.list_(pa.string(), 2))]), None, id="fixed-size list of strings"),
        pytest.param(pa.schema([("id", pa.struct([("a", pa.int8()), ("a", pa.int8())]))]), None, id="struct with a name twice"),
        pytest.param(pa.schema([("id", pa.struct([("a", pa.int8()), ("A", pa.int8())]))]), None, id="struct names that differ in case"),
        pytest.param(pa.schema([("id", pa.float64())]), "id", id="float key"),
        pytest.param(pa.schema([("id", pa.list_(pa.int8()))]), "id", id="list key"),
        pytest.param(pa.schema([("id", pa.int8())]), "other", id="key that is no column"),
        pytest.param(pa.schema([("id", pa.int8())]), ["id", "id"], id="key twice"),
        pytest.param(pa.schema([("id", pa.int8()), ("ID", pa.int8())]), None, id="names that differ in case"),
        pytest.param(pa.schema([("_rowid", pa.int8())]), None, id="reserved"),
        pytest.param(pa.schema([("a.b", pa.int8())]), None, id="dot"),
        pytest.param(pa.schema([("", pa.int8())]), None, id="empty name"),
        pytest.param(pa.schema([]), None, id="no columns"),
    ],
)
def test_a10_a_schema_that_could_not_be_stored_is_refused_at_creation(schema: pa.Schema, key: Any) -> None:
    heap_name = f"a10-{SYSTEM_CLOCK.token()}"
    with pytest.raises(hg.InvalidInputError):
        hg.create_table(f"memory://{heap_name}", schema, key=key)
    assert list(MemoryStore(heap_name).list("")) == []


def test_a10_a_null_where_a_nested_field_allows_none_is_refused_before_the_wal(bench: Any) -> None:
    nested = pa.struct([pa.field("x", pa.int64(), nullable=False)])
    table = hg.create_table("memory://a10-nested", pa.schema([("id", pa.int64()), ("v", nested)]), key="id", if_exists="open")
    inner = pa.StructArray.from_arrays([pa.array([None, 1], pa.int64())], fields=[nested.field(0)])
    batch = pa.RecordBatch.from_arrays([pa.array([1, 2], pa.int64()), inner], schema=table.schema)
    with table.shard("0000").writer(hg.ShardWriterConfig(enable_memtable=False)) as writer, pytest.raises(hg.InvalidInputError):
        writer.put(batch)


# -- A11


def test_a11_a_put_is_whole_in_one_entry_whatever_the_sizes(bench: Any) -> None:
    writer = bench.writer(max_wal_buffer_size=1, max_inflight=4)
    many = pa.Table.from_batches([bench.rows(*range(start, start + 50)) for start in range(0, 500, 50)])
    acks = [writer.put(many), writer.put(bench.rows(1000)), writer.put(many)]
    places = [ack.wait()["0000"] for ack in acks]
    found = {entry.position: [batch.num_rows for batch in entry.batches] for entry in bench.entries()}
    assert [found[position] for _, position in places] == [[500], [1], [500]]


@pytest.mark.parametrize("step", ["pipeline.encoded", "pipeline.persisted"])
def test_a11_a_writer_that_dies_leaves_each_put_whole_or_absent(bench: Any, step: str, crash: type[Exception]) -> None:
    writer = bench.writer(max_wal_buffer_size=1, max_inflight=1)
    writer.put(bench.rows(0)).wait()
    all_put = threading.Event()

    def die(name: str) -> None:
        all_put.wait(bench.PATIENCE)
        if name == step:
            raise crash(name)

    with hooked(die):
        acks = [writer.put(bench.rows(*range(10 * i, 10 * i + 7))) for i in (1, 2, 3)]
        all_put.set()
        for ack in acks:
            with pytest.raises(hg.WriterPoisonedError):
                ack.wait(bench.PATIENCE)
    bench.writer()
    sizes = [batch.num_rows for entry in bench.entries() for batch in entry.batches]
    assert sizes == ([1] if step == "pipeline.encoded" else [1, 7])


def test_a11_a_receipt_names_each_shard(bench: Any) -> None:
    table = hg.create_table("memory://a11-shards", bench.SCHEMA, key="id", sharding=hg.bucket("id", 2), if_exists="open")
    config = hg.ShardWriterConfig(enable_memtable=False)
    with table.shard("0000").writer(config) as zero, table.shard("0001").writer(config) as one:
        receipts = [zero.put(bench.rows(1)).wait(), one.put(bench.rows(2)).wait()]
    assert [list(receipt) for receipt in receipts] == [["0000"], ["0001"]]


# -- A12


def test_a12_a_caller_that_times_out_leaves_the_put_and_later_acks_right(bench: Any, arrivals: Any) -> None:
    came = arrivals("create", ".arrow")
    store = bench.faulty(before=came)
    writer = bench.writer(store, max_wal_buffer_size=1, max_inflight=1)
    store.add(Fault("create", "hang", key=".arrow"))
    first = writer.put(bench.rows(1))
    came.wait_for(1)
    second = writer.put(bench.rows(2))
    for ack in (first, second):
        with pytest.raises(TimeoutError):
            ack.wait(timeout=0.0)
    store.release()
    assert second.wait(bench.PATIENCE)["0000"] == (1, 1)
    assert first.wait(bench.PATIENCE)["0000"] == (1, 0)
    assert bench.ids() == [1, 2]


def test_a12_a_cancelled_coroutine_changes_nothing(bench: Any, arrivals: Any) -> None:
    came = arrivals("create", ".arrow")
    store = bench.faulty(before=came)
    writer = bench.writer(store, max_wal_buffer_size=1, max_inflight=1)
    store.add(Fault("create", "hang", key=".arrow"))

    async def story() -> list[tuple[int, int]]:
        async def wait_for(ack: hg.Ack) -> hg.Receipt:
            return await ack

        first, second = writer.put(bench.rows(1)), writer.put(bench.rows(2))
        given_up = asyncio.create_task(wait_for(first))
        kept = asyncio.create_task(wait_for(second))
        await asyncio.to_thread(came.wait_for, 1)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        store.release()
        receipts = [await asyncio.wait_for(kept, bench.PATIENCE), await first, await writer.put(bench.rows(3))]
        return [receipt["0000"] for receipt in receipts]

    assert asyncio.run(story()) == [(1, 1), (1, 0), (1, 2)]
    assert bench.ids() == [1, 2, 3]


def test_a12_a_retry_with_a_sequence_after_a_timeout_is_applied_once(bench: Any, arrivals: Any) -> None:
    came = arrivals("create", ".arrow")
    store = bench.faulty(before=came)
    writer = bench.writer(store)
    store.add(Fault("create", "hang", key=".arrow"))
    with pytest.raises(TimeoutError):
        writer.put(bench.rows(1), producer="p", sequence=0).wait(timeout=0.0)
    again = writer.put(bench.rows(1), producer="p", sequence=0)
    came.wait_for(1)
    store.release()
    assert again.wait(bench.PATIENCE)["0000"] == (1, 0)
    assert bench.ids() == [1]


# -- A13


@pytest.mark.parametrize("landed", [True, False])
@pytest.mark.parametrize("between", ["crash", "takeover", "many takeovers", "trim", "collected", "trim, then a close"])
def test_a13_a_retry_after_an_unknown_outcome_is_there_exactly_once(bench: Any, landed: bool, between: str) -> None:
    first = bench.writer(max_wal_persist_retries=0)
    first.put(bench.rows(1), producer="p", sequence=7).wait()
    bench.store.add(Fault("create", "apply-then-fail" if landed else "fail", key=".arrow"))
    with pytest.raises(hg.WriterPoisonedError):
        first.put(bench.rows(2), producer="p", sequence=8).wait(bench.PATIENCE)
    bench.store.clear()

    given_up: list[int] = []
    if between == "many takeovers":
        for _ in range(3):
            bench.writer().close()
    elif between in ("takeover", "trim", "collected", "trim, then a close"):
        middle = bench.writer()
        middle.put(bench.rows(50)).wait()
        if between != "takeover":
            given_up = bench.ids()
            trim(bench.log(), middle.wal_stats().next_wal_entry_position)
        if between == "collected":
            collect_entries(bench.log(), dry_run=False, sweep=True)
        if between == "trim, then a close":
            middle.close()

    last = bench.writer()
    retry = last.put(bench.rows(2), producer="p", sequence=8).wait()
    assert retry.duplicate == landed
    assert last.put(bench.rows(3), producer="p", sequence=9).wait().duplicate is False
    cursor = bench.manifest.cursor.position
    assert (given_up + bench.ids(cursor)).count(2) == 1
    assert (given_up + bench.ids(cursor)).count(3) == 1


def test_a13_an_entry_past_the_seal_does_not_count_as_accepted(bench: Any, arrivals: Any) -> None:
    came = arrivals("create", ".arrow")
    slow = bench.faulty(before=came)
    fenced = bench.writer(slow, max_wal_buffer_size=1, max_inflight=2)
    slow.add(Fault("create", "hang", key=f"{0:020d}.arrow"))
    acks = [fenced.put(bench.rows(i), producer="p", sequence=i) for i in (0, 1)]
    came.wait_for(2)
    second = bench.writer()  # position 0 was missing: sealed, and what may lie at 1 is void
    slow.release()
    for ack in acks:
        with pytest.raises(hg.FencedError):
            ack.wait(bench.PATIENCE)
    fenced.abort()  # ends its threads
    assert bench.inner.head(bench.entry_key(1, 1)), "the second entry landed in the void"
    for i in (0, 1):
        assert not second.put(bench.rows(i), producer="p", sequence=i).wait().duplicate
    assert bench.ids() == [0, 1]


def test_a13_producers_survive_many_epochs_without_being_heard_of(bench: Any) -> None:
    with bench.writer() as writer:
        writer.put(bench.rows(1), producer="p", sequence=3).wait()
    for i in range(5):
        with bench.writer() as writer:
            writer.put(bench.rows(100 + i), producer="q", sequence=i).wait()
    receipt = bench.writer().put(bench.rows(1), producer="p", sequence=3).wait()
    assert receipt.duplicate
    assert receipt["0000"] == (1, 0)
    assert bench.ids().count(1) == 1


# -- A15


def test_a15_a_retry_in_flight_gets_the_ack_of_the_first_copy(bench: Any, arrivals: Any) -> None:
    came = arrivals("create", ".arrow")
    store = bench.faulty(before=came)
    writer = bench.writer(store)
    store.add(Fault("create", "hang", key=".arrow"))
    first = writer.put(bench.rows(1), producer="p", sequence=0)
    came.wait_for(1)
    retry = writer.put(bench.rows(1), producer="p", sequence=0)
    assert not retry.done()
    store.release()
    assert retry.wait(bench.PATIENCE)["0000"] == first.wait(bench.PATIENCE)["0000"]
    assert bench.ids() == [1]


def test_a15_a_retry_of_a_put_that_fails_is_not_acknowledged_either(bench: Any, arrivals: Any) -> None:
    came = arrivals("create", ".arrow")
    store = bench.faulty(before=came)
    writer = bench.writer(store, max_wal_persist_retries=0, max_inflight=1)
    store.add(Fault("create", "hang", key=".arrow", times=1))
    store.add(Fault("create", "fail", key=".arrow"))
    blocker = writer.put(bench.rows(0))
    came.wait_for(1)
    copies = [writer.put(bench.rows(1), producer="p", sequence=0) for _ in range(2)]
    store.release()
    blocker.wait(bench.PATIENCE)
    for copy in copies:
        with pytest.raises(hg.WriterPoisonedError):
            copy.wait(bench.PATIENCE)
    assert bench.ids() == [0]


def test_a15_a_skipped_sequence_is_refused_and_uses_up_nothing(bench: Any) -> None:
    writer = bench.writer()
    writer.put(bench.rows(1), producer="p", sequence=5).wait()
    for wrong in (7, 100):
        with pytest.raises(hg.OutOfSequenceError):
            writer.put(bench.rows(wrong), producer="p", sequence=wrong)
    writer.put(bench.rows(6), producer="p", sequence=6).wait()
    assert bench.ids() == [1, 6]


def test_a15_a_put_refused_for_lack_of_room_keeps_its_sequence_free(bench: Any, arrivals: Any) -> None:
    came = arrivals("create", ".arrow")
    store = bench.faulty(before=came)
    writer = bench.writer(store, max_unflushed_memtable_bytes=1, put_timeout=0.01)
    store.add(Fault("create", "hang", key=".arrow"))
    writer.put(bench.rows(0))
    came.wait_for(1)
    with pytest.raises(hg.BackpressureTimeoutError):
        writer.put(bench.rows(1), producer="p", sequence=0)
    with pytest.raises(hg.BackpressureTimeoutError):
        writer.put(bench.rows(1), producer="p", sequence=0)
    store.release()
    writer.flush()
    assert not writer.put(bench.rows(1), producer="p", sequence=0).wait(bench.PATIENCE).duplicate
    assert bench.ids() == [0, 1]


def test_a15_two_threads_on_one_producer_double_nothing(bench: Any) -> None:
    writer = bench.writer(max_wal_buffer_size=1)
    count = 60
    start = threading.Barrier(2)

    def produce() -> list[tuple[int, int]]:
        start.wait()
        places = []
        for sequence in range(count):
            places.append(writer.put(bench.rows(sequence), producer="p", sequence=sequence))
        return [ack.wait(bench.PATIENCE)["0000"] for ack in places]

    with ThreadPoolExecutor(2) as pool:
        one, two = (job.result() for job in [pool.submit(produce), pool.submit(produce)])
    assert one == two
    assert bench.ids() == list(range(count))


@pytest.mark.parametrize(("producer", "sequence"), [("p", None), (None, 1), ("", 1), ("p", -1), ("p", True), ("p", 1.0), ("x" * 257, 1)])
def test_a15_half_a_producer_is_refused(bench: Any, producer: Any, sequence: Any) -> None:
    writer = bench.writer()
    before = bench.contents()
    with pytest.raises(hg.InvalidInputError):
        writer.put(bench.rows(1), producer=producer, sequence=sequence)
    assert bench.contents() == before


# -- A16: a name is taken: 409 with nothing there, our own bytes, a seal (or its like), something foreign


@pytest.mark.parametrize("times", [1, 2])
def test_a16_a_409_with_nothing_there_is_tried_again_for_every_kind_of_object(one_kind: OnlyKind, bench: Any, times: int) -> None:
    fault = Fault("create", "conflict", times=times)
    one_kind.add(fault)
    assert a_whole_life(bench.rows, bench.SCHEMA) == [1, 2]
    assert fault.times == 0, "the fault was met"
    assert hg.open_table("memory://shared").status().shards[0].epoch == 2


def test_a16_a_409_for_ever_ends_in_a_typed_error_for_every_kind_of_object(one_kind: OnlyKind, bench: Any) -> None:
    one_kind.add(Fault("create", "conflict"))
    expected = {
        "table manifest": StoreUnavailableError,
        "manifest": (hg.OutcomeUnknownError, StoreUnavailableError),
        "marker": StoreUnavailableError,
        "entry": hg.WriterPoisonedError,
        "seal": StoreUnavailableError,
    }[one_kind.kind]
    with pytest.raises(expected):
        a_whole_life(bench.rows, bench.SCHEMA)
    assert one_kind.requests["create"] < 20, "bounded"


def test_a16_our_own_bytes_under_the_name_are_success_for_every_kind_of_object(one_kind: OnlyKind, bench: Any) -> None:
    # The reply is lost and the resent request is answered 409: what stands there decides.
    faults = [Fault("create", "apply-then-fail", times=1), Fault("create", "conflict", times=1)]
    one_kind.add(*faults)
    assert a_whole_life(bench.rows, bench.SCHEMA) == [1, 2]
    assert [fault.times for fault in faults] == [0, 0], "both were met"
    assert hg.open_table("memory://shared").status().shards[0].epoch == 2


def test_a16_an_entry_meets_a_seal_and_is_fenced_for_good(bench: Any) -> None:
    appender = bench.appender()
    log = bench.log()
    manifest = bench.manifest
    put_seal(log, log.space(manifest), manifest.cursor, by_epoch=9, durable_through=-1, writer_id="other")
    for _ in range(2):
        with pytest.raises(hg.FencedError) as caught:
            appender.append([bench.rows(1)])
        assert (caught.value.epoch, caught.value.position, caught.value.by_epoch) == (1, 0, 9)


@pytest.mark.parametrize("foreign", [b"", b"not an entry", bytes(2000)])
def test_a16_an_entry_meets_something_foreign_and_is_poisoned(bench: Any, foreign: bytes) -> None:
    writer = bench.writer()
    key = bench.entry_key(1, 0)
    bench.inner.create(key, foreign)
    with pytest.raises(hg.WriterPoisonedError) as caught:
        writer.put(bench.rows(1)).wait(bench.PATIENCE)
    assert isinstance(caught.value.cause, StoreError)
    assert caught.value.cause.object == key
    assert bytes(bench.inner.get(key)) == foreign


def test_a16_a_seal_meets_rows_that_landed_first_and_passes_over_them(bench: Any, crew: Any) -> None:
    first = bench.appender()
    first.append([bench.rows(1)])
    second = crew.actor(bench.appender)
    second.step_to("fence.before-seal")
    first.append([bench.rows(2)])  # takes the name that the seal was meant for
    appender = second.finish()
    assert appender.append([bench.rows(3)]) == (2, 3)
    with pytest.raises(hg.FencedError):
        first.append([bench.rows(4)])
    assert bench.ids() == [1, 2, 3]


def test_a16_a_seal_meets_another_claimants_seal_and_is_fenced_by_it(bench: Any, crew: Any) -> None:
    bench.appender().append([bench.rows(1)])
    slow = crew.actor(bench.appender)
    slow.step_to("fence.before-seal")
    quick = bench.appender()
    with pytest.raises(hg.FencedError) as caught:
        slow.finish()
    assert (caught.value.epoch, caught.value.by_epoch) == (2, 3)
    quick.append([bench.rows(2)])
    assert bench.ids() == [1, 2]


def test_a16_a_seal_meets_an_older_claimants_seal_and_goes_on(bench: Any, crew: Any) -> None:
    bench.appender().append([bench.rows(1)])
    older, younger = crew.actor(bench.appender), crew.actor(bench.appender)
    older.step_to("fence.before-seal")
    younger.step_to("fence.before-seal")
    older.step_to("fence.sealed")
    assert younger.finish().append([bench.rows(2)])[0] == 3
    with pytest.raises(hg.FencedError):
        older.finish()
    assert bench.ids() == [1, 2]


def test_a16_a_seal_meets_something_foreign_and_says_so(bench: Any, crew: Any) -> None:
    bench.appender().append([bench.rows(1)])
    slow = crew.actor(bench.appender)
    slow.step_to("fence.before-seal")
    key = bench.entry_key(1, 1)
    bench.inner.create(key, b"foreign")
    with pytest.raises(hg.CorruptEntryError) as caught:
        slow.finish()
    assert caught.value.object == key


def test_a16_a_manifest_meets_anothers_and_is_made_again_on_top_of_it(bench: Any, crew: Any) -> None:
    chain = bench.log().manifests
    slow = crew.actor(lambda: chain.commit(lambda m: m.but(next_generation=m.next_generation + 10)))
    slow.step_to("commit.loaded")
    other = bench.log().manifests.commit(lambda m: m.but(wal_floor=3))
    mine = slow.finish()
    assert mine.version == other.version + 1
    assert (mine.wal_floor, mine.next_generation) == (3, 11)


def test_a16_a_manifest_meets_something_foreign_and_says_so(bench: Any) -> None:
    chain = bench.log().manifests
    key = chain.key(chain.load().version + 1)
    bench.inner.create(key, b"foreign")
    with pytest.raises(hg.CorruptEntryError) as caught:
        chain.commit(lambda m: m.but(wal_floor=1))
    assert caught.value.object == key


def test_a16_a_marker_meets_anothers_marker_and_refuses_the_store(bench: Any) -> None:
    log, manifest = bench.log(), bench.manifest
    space = log.space(manifest)
    bench.inner.create(space.marker_key, encode_document(WalMarker(wal_id=space.wal_id, table_id="another", shard="0000")))
    before = bench.contents()
    with pytest.raises(hg.WalStoreMismatchError):
        open_epoch(log)
    assert bench.contents() == before


def test_a16_a_marker_that_another_opener_made_first_is_as_good_as_ours(bench: Any, crew: Any) -> None:
    openers = [crew.actor(bench.appender) for _ in range(2)]
    for opener in openers:
        opener.step_to("marker.seals-back")
    openers[0].finish()
    assert openers[1].finish().append([bench.rows(1)])[0] == 2


def test_a16_a_marker_meets_something_foreign_and_says_so(bench: Any) -> None:
    key = bench.log().space(bench.manifest).marker_key
    bench.inner.create(key, b"foreign")
    with pytest.raises(hg.CorruptEntryError) as caught:
        bench.appender()
    assert caught.value.object == key


def test_a16_a_table_manifest_meets_anothers_and_the_first_one_stands(shared: FaultyStore, bench: Any) -> None:
    chain: ManifestChain[TableManifest] = ManifestChain(shared, "table/", TableManifest, SYSTEM_CLOCK, bench.QUICK)
    first = TableManifest(version=0, id="a", table_id="t", arrow_schema="", shards=("0000",), wal_id="w")
    assert chain.create_first(first)
    assert not chain.create_first(first.but(id="b"))
    assert chain.load().id == "a"


def test_a16_two_creators_of_a_table_end_with_one_table(shared: FaultyStore, bench: Any, crew: Any) -> None:
    def create() -> hg.Table:
        return hg.create_table("memory://shared", bench.SCHEMA, key="id")

    slow = crew.actor(create)
    slow.step_to("create.table")
    with pytest.raises(hg.AlreadyExistsError):
        create()
    opened = hg.open_table("memory://shared")  # finishes what the slow one began
    assert slow.finish().shard("0000").table_id == opened.shard("0000").table_id


def test_a16_a_table_manifest_meets_something_foreign_and_says_so(shared: FaultyStore, bench: Any) -> None:
    key = f"table/{0:020d}.json"
    shared.inner.create(key, b"foreign")
    with pytest.raises(hg.CorruptEntryError) as caught:
        hg.create_table("memory://shared", bench.SCHEMA, key="id")
    assert caught.value.object == key


# -- the cost


def test_in_steady_state_an_entry_costs_exactly_one_request(bench: Any) -> None:
    writer = bench.writer(max_wal_buffer_size=1)
    before = bench.store.requests.copy()
    count = 50
    acks = [writer.put(bench.rows(i)) for i in range(count)]
    for ack in acks:
        ack.wait(bench.PATIENCE)
    made = bench.store.requests - before
    assert writer.wal_stats().entries_written == count
    entries = [key for operation, key in bench.store.asked if operation == "create" and key.endswith(".arrow")]
    assert len(entries) == len(set(entries)) == count
    # A record in the manifest, should one fall due meanwhile, is no entry's; nothing else is asked.
    assert [kind for kind in made if kind not in ("create", "list", "get")] == []
    assert made["create"] - count <= 2


def test_in_steady_state_the_appender_asks_for_nothing_but_its_entries(bench: Any) -> None:
    appender = bench.appender()
    before = len(bench.store.asked)
    for i in range(20):
        appender.append([bench.rows(i)])
    made: Sequence[tuple[str, str]] = bench.store.asked[before:]
    assert list(made) == [("create", bench.entry_key(1, i)) for i in range(20)]


def test_a_name_taken_is_an_error_only_where_nobody_may_write(bench: Any) -> None:
    # Guards the tests above: the store they use does refuse a second create.
    bench.inner.create("x", b"1")
    with pytest.raises(ObjectExistsError):
        bench.inner.create("x", b"1")
