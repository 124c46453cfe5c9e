"""TableWriter: rows go where they belong, refusals leave nothing, and its life is that of all its shards."""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest
from tests.tables import PATIENCE, MakeTables, Tables, make_tables, tables

import headgate as hg
from headgate.failpoint import hooked
from headgate.store.faulty import Fault
from headgate.table_writer import TableWriter

__all__ = ["make_tables", "tables"]
ALL = ["0000", "0001", "0002", "0003"]


def headgate_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("headgate-")]


# -- routing


@pytest.mark.parametrize("memtable", [False, True])
def test_every_row_is_in_its_shard_and_the_receipt_says_where(tables: Tables, memtable: bool) -> None:
    with tables.writer(enable_memtable=memtable) as writer:
        receipt = writer.put(tables.rows(*range(100))).wait(PATIENCE)
    assert dict(receipt) == dict.fromkeys(ALL, (1, 0))
    for shard in ALL:
        assert tables.ids(shard) == [i for i in range(100) if tables.shard_of(i) == shard]
    assert tables.ids() == list(range(100))


@pytest.mark.parametrize("sharding", [hg.unsharded(), hg.bucket("id", 1), hg.bucket("id", 4), hg.identity("id")])
def test_deletes_go_where_their_rows_are(make_tables: MakeTables, sharding: Any) -> None:
    tables = make_tables(sharding)
    with tables.writer() as writer:
        put = writer.put(tables.rows(*range(20))).wait(PATIENCE)
        deleted = writer.delete(pa.table({"id": range(20)})).wait(PATIENCE)
    assert set(put) == set(deleted) == set(tables.shards())
    for shard in tables.shards():
        upserts, deletes = tables.puts(shard)
        assert (upserts.op, deletes.op) == ("upsert", "delete")
        assert upserts.rows["id"].to_pylist() == deletes.rows["id"].to_pylist()


def test_composite_keys_route_by_the_sharding_column_alone(make_tables: MakeTables) -> None:
    schema = pa.schema([("id", pa.int64()), ("tenant", pa.string()), ("n", pa.int64())])
    tables = make_tables(hg.bucket("tenant", 3), schema=schema, key=["id", "tenant"])
    with tables.writer() as writer:
        first = writer.put([{"id": i, "tenant": "acme", "n": i} for i in range(50)]).wait(PATIENCE)
        second = writer.delete(pa.table({"id": [7], "tenant": ["acme"]})).wait(PATIENCE)
    assert len(first) == 1
    assert set(first) == set(second)


def test_append_only_tables_take_nulls_and_repeated_rows(make_tables: MakeTables) -> None:
    tables = make_tables(hg.bucket("id", 4), schema=pa.schema([("id", pa.int64())]), key=None)
    with tables.writer() as writer:
        writer.put([{"id": None}, {"id": 1}, {"id": 1}, {"id": None}]).wait(PATIENCE)
        with pytest.raises(hg.InvalidInputError, match="no key"):
            writer.delete([{"id": 1}])
    assert tables.ids("0000") == [None, None]
    assert tables.ids(tables.shard_of(1)) == [1, 1]


def test_rows_of_every_shape_are_taken(tables: Tables) -> None:
    with tables.writer() as writer:
        for data in (
            tables.rows(1, 2),
            pa.table({"id": [3, 4], "value": ["a", "b"]}),
            [{"id": 5, "value": "c"}, {"id": 6}],
            pa.RecordBatchReader.from_batches(tables.rows(7).schema, [tables.rows(7), tables.rows(8)]),
        ):
            writer.put(data).wait(PATIENCE)
    assert tables.ids() == list(range(1, 9))


def test_a_renamed_sharding_column_moves_no_row(tables: Tables) -> None:
    table = tables.table()
    with tables.writer() as writer:
        writer.put(tables.rows(*range(20))).wait(PATIENCE)
    table.rename_column("id", "number")
    with tables.writer() as writer:
        receipt = writer.delete(pa.table({"number": list(range(20))})).wait(PATIENCE)
    assert set(receipt) == set(ALL)
    for shard in ALL:
        upserts, deletes = tables.puts(shard)
        assert upserts.rows["id"].to_pylist() == deletes.rows.column(0).to_pylist()


def test_a_live_writer_follows_changes_of_the_columns(tables: Tables) -> None:
    table = tables.table()
    with tables.writer() as writer:
        writer.put(tables.rows(*range(20))).wait(PATIENCE)
        table.rename_column("id", "number")
        table.add_columns(pa.schema([("note", pa.string())]))
        new = pa.table({"number": range(20), "value": ["x"] * 20, "note": ["n"] * 20})
        assert set(writer.put(new).wait(PATIENCE)) == set(ALL)
        assert set(writer.delete(pa.table({"number": range(20)})).wait(PATIENCE)) == set(ALL)
    for shard in ALL:
        ids = [put.rows.column(0).to_pylist() for put in tables.puts(shard)]
        assert ids[0] == ids[1] == ids[2]


# -- some of the shards


def test_a_row_for_a_shard_that_is_not_held_is_refused_by_name_before_anything_is_accepted(tables: Tables) -> None:
    writer = tables.writer(shards=["0000", "0002"])
    assert list(writer.writers) == ["0000", "0002"]
    mine, others = tables.id_in("0000"), tables.id_in("0001")
    with pytest.raises(hg.InvalidInputError, match=r"belongs to shard 0001.*does not hold") as caught:
        writer.put(tables.rows(mine, others))
    assert "0000, 0002" in caught.value.hint
    writer.put(tables.rows(mine)).wait(PATIENCE)
    assert tables.ids() == [mine]


def test_writers_of_different_shards_do_not_fence_each_other(tables: Tables) -> None:
    one, two = tables.writer(shards=["0000", "0001"]), tables.writer(shards=["0002", "0003"])
    for writer, shard in ((one, "0000"), (two, "0003"), (one, "0001"), (two, "0002")):
        writer.put(tables.rows(tables.id_in(shard))).wait(PATIENCE)
    one.check_fenced()
    two.check_fenced()


@pytest.mark.parametrize(("shards", "error"), [([], hg.InvalidInputError), ("0000", hg.InvalidInputError), (["0009"], hg.NotFoundError)])
def test_shards_that_cannot_be_held_are_refused_before_any_claim(tables: Tables, shards: Any, error: type[Exception]) -> None:
    before = tables.contents()
    with pytest.raises(error):
        tables.writer(shards=shards)
    assert tables.contents() == before


# -- opening


def test_the_shards_are_opened_side_by_side(make_tables: MakeTables) -> None:
    tables = make_tables(hg.bucket("id", 8))
    meeting = threading.Barrier(4)

    def meet(operation: str, key: str) -> None:
        if operation == "create" and key.endswith(f"/manifest/{1:020d}.json"):
            meeting.wait(PATIENCE)

    tables.another_store(before=meet)
    tables.writer().close()


@pytest.mark.parametrize("broken", ALL)
def test_if_one_shard_cannot_be_opened_none_stays_open(tables: Tables, broken: str) -> None:
    threads = headgate_threads()
    tables.store.add(Fault("create", "refuse", key=f"shards/{broken}-"))
    with pytest.raises(hg.HeadgateError):
        tables.writer()
    assert headgate_threads() == threads
    tables.store.clear()
    with tables.writer() as writer:
        assert len(writer.put(tables.rows(*range(20))).wait(PATIENCE)) == 4


def test_opening_that_is_interrupted_leaves_no_shard_open(tables: Tables) -> None:
    threads = headgate_threads()

    def interrupt(name: str) -> None:
        if name == "table.claimed":
            raise KeyboardInterrupt

    with hooked(interrupt), pytest.raises(KeyboardInterrupt):
        tables.writer()
    assert headgate_threads() == threads


# -- the end


def test_close_closes_all_and_raises_what_went_wrong_first(tables: Tables) -> None:
    writer = tables.writer(max_wal_persist_retries=0)
    for shard in ("0001", "0003"):
        tables.store.add(Fault("create", "fail", key=f"/{shard}/"))
    ack = writer.put(tables.rows(*range(50)))
    with pytest.raises(hg.WriterPoisonedError) as caught:
        writer.close()
    notes = "\n".join(caught.value.__notes__)
    assert "shard 0001" in notes
    assert "shard 0003" in notes
    assert all(not one.threads_alive() for one in writer.writers.values())
    with pytest.raises(hg.WriterPoisonedError):
        ack.wait(PATIENCE)
    with pytest.raises(hg.ClosedError):
        writer.put(tables.rows(1))
    assert tables.ids("0000") == [i for i in range(50) if tables.shard_of(i) == "0000"]
    writer.close()  # can be repeated


def test_an_error_on_its_way_out_keeps_its_place(tables: Tables) -> None:
    def fail() -> None:
        with tables.writer(max_wal_persist_retries=0) as writer:
            tables.store.add(Fault("create", "fail", key=".arrow"))
            writer.put(tables.rows(1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        fail()
    assert "closing the writer failed" in caught.value.__notes__[0]


def test_abort_ends_everything_in_bounded_time(tables: Tables) -> None:
    writer = tables.writer()
    tables.store.add(Fault("create", "hang", key="wal/"))
    acks = [writer.put(tables.rows(*range(20))) for _ in range(3)]
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(writer.abort)
        for ack in acks:
            with pytest.raises(hg.ClosedError) as caught:
                ack.wait(PATIENCE)
            assert set(caught.value.outcomes) == set(ALL)  # type: ignore[attr-defined]
        tables.store.clear()
        ended.result(PATIENCE)
    with pytest.raises(hg.ClosedError):
        writer.put(tables.rows(1))


def test_flush_waits_for_every_shard_and_raises_if_one_failed(tables: Tables) -> None:
    writer = tables.writer(max_wal_persist_retries=0)
    ack = writer.put(tables.rows(*range(20)))
    writer.flush()
    assert ack.done()
    tables.store.add(Fault("create", "fail", key="/0002/"))
    ack = writer.put(tables.rows(*range(20)))
    with pytest.raises(hg.WriterPoisonedError, match="0002"):
        writer.flush()
    assert ack.done(), "the others were waited for"


def test_a_fence_in_one_shard_is_noticed_and_leaves_the_others_writing(tables: Tables) -> None:
    writer = tables.writer()
    writer.check_fenced()
    other = tables.writer(shards=["0001"])
    with pytest.raises(hg.FencedError, match="0001"):
        writer.check_fenced()
    with pytest.raises(hg.FencedError):
        writer.put(tables.rows(tables.id_in("0001"))).wait(PATIENCE)
    writer.put(tables.rows(tables.id_in("0000"))).wait(PATIENCE)
    other.put(tables.rows(tables.id_in("0001"))).wait(PATIENCE)
    assert len(tables.ids()) == 2


def test_a_writer_is_not_pickled_and_its_errors_are(tables: Tables) -> None:
    writer = tables.writer(max_wal_persist_retries=0)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(writer)
    tables.store.add(Fault("create", "fail", key="/0002/"))
    with pytest.raises(hg.WriterPoisonedError) as caught:
        writer.put(tables.rows(*range(20))).wait(PATIENCE)
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.outcomes.keys() == set(ALL)
    assert again.outcomes["0000"] == (1, 0)
    assert isinstance(again.outcomes["0002"], hg.WriterPoisonedError)


# -- waiting


def test_it_works_from_a_coroutine(tables: Tables) -> None:
    async def write() -> hg.Receipt:
        async with tables.writer() as writer:
            acks = [writer.put(tables.rows(i, i + 1)) for i in range(0, 20, 2)]
            receipts = [await ack for ack in acks]
            return receipts[-1]

    assert asyncio.run(write())
    assert tables.ids() == list(range(20))


def test_waiting_shards_are_written_side_by_side(tables: Tables) -> None:
    """One after the other would take as many round trips as there are shards."""
    meeting = threading.Barrier(4)

    def meet(operation: str, key: str) -> None:
        if operation == "create" and key.endswith(f"{0:020d}.arrow"):
            meeting.wait(PATIENCE)

    tables.another_store(before=meet)
    writer = tables.writer()
    assert len(writer.put(tables.rows(*range(20))).wait()) == 4


def test_giving_up_waiting_changes_nothing(tables: Tables) -> None:
    writer = tables.writer()
    tables.store.add(Fault("create", "hang", key="/0001/"))
    ack = writer.put(tables.rows(*range(20)))
    with pytest.raises(TimeoutError):
        ack.wait(0.01)
    assert not ack.done()
    tables.store.clear()
    assert set(ack.wait(PATIENCE)) == set(ALL)
    assert ack.done()
    assert tables.ids() == list(range(20))


def test_a_durable_write_returns_when_all_shards_have_it(tables: Tables) -> None:
    writer = tables.writer(durable_write=True)
    tables.store.add(Fault("create", "hang", key="/0003/"))
    with ThreadPoolExecutor(1) as pool:
        put = pool.submit(writer.put, tables.rows(*range(20)))
        with pytest.raises(TimeoutError):
            put.result(0.05)
        tables.store.clear()
        assert put.result(PATIENCE).done()


# -- room


def held(writer: TableWriter) -> list[int]:
    return [one.backpressure_stats().held_bytes for one in writer.writers.values()]


def test_a_put_without_room_in_one_shard_leaves_nothing_in_any(tables: Tables) -> None:
    writer = tables.writer(max_unflushed_memtable_bytes=1000, put_timeout=0.02)
    tables.store.add(Fault("create", "hang", key="/0003/"))
    crowd = writer.put(tables.rows(tables.id_in("0003"), value="x" * 2000))
    with pytest.raises(hg.BackpressureTimeoutError, match="0003") as caught:
        writer.put(tables.rows(*range(20)), producer="p", sequence=0)
    assert set(caught.value.outcomes) == {"0003"}  # type: ignore[attr-defined]
    assert held(writer)[:3] == [0, 0, 0], "what was reserved in the others was given back"
    tables.store.clear()
    crowd.wait(PATIENCE)
    assert tables.ids() == [tables.id_in("0003")]
    assert writer.put(tables.rows(*range(20)), producer="p", sequence=0).wait(PATIENCE)
    assert not writer.put(tables.rows(*range(20)), producer="p", sequence=1).wait(PATIENCE).duplicate


def test_a_put_for_a_fenced_shard_leaves_nothing_in_the_others(tables: Tables) -> None:
    writer = tables.writer()
    tables.writer(shards=["0002"])
    with pytest.raises(hg.FencedError):
        writer.put(tables.rows(tables.id_in("0002"))).wait(PATIENCE)
    with pytest.raises(hg.FencedError) as caught:
        writer.put(tables.rows(*range(20)))
    assert set(caught.value.outcomes) == {"0002"}  # type: ignore[attr-defined]
    deadline = time.monotonic() + PATIENCE
    while any(held(writer)) and time.monotonic() < deadline:  # whoever waits is told first, and then it is counted
        time.sleep(0.001)
    assert held(writer) == [0, 0, 0, 0]
    assert tables.ids() == []


def test_many_large_puts_in_little_room_all_get_through(tables: Tables) -> None:
    """Each holds room in some shards while it waits for others; in one order, so nobody waits for nobody."""
    writer = tables.writer(max_unflushed_memtable_bytes=3000)

    def some(number: int) -> None:
        for i in range(10):
            first = 1000 * number + 40 * i
            writer.put(tables.rows(*range(first, first + 40), value="x" * 50)).wait(PATIENCE)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(some, range(8)))
    assert held(writer) == [0, 0, 0, 0]
    assert len(tables.ids()) == len(set(tables.ids())) == 3200


def test_close_wakes_those_who_wait_for_room_and_gives_back_what_they_held(tables: Tables) -> None:
    writer = tables.writer(max_unflushed_memtable_bytes=1000)
    tables.store.add(Fault("create", "hang", key="/0003/"))
    crowd = writer.put(tables.rows(tables.id_in("0003"), value="x" * 2000))
    with ThreadPoolExecutor(2) as pool:
        blocked = pool.submit(writer.put, tables.rows(*range(20)))
        with pytest.raises(TimeoutError):
            blocked.result(0.05)
        closed = pool.submit(writer.close)
        with pytest.raises(hg.ClosedError):
            blocked.result(PATIENCE)
        tables.store.clear()
        closed.result(PATIENCE)
    assert crowd.wait(PATIENCE)
    assert len(tables.ids()) == 1


def test_a_put_that_no_entry_can_hold_is_refused_whole(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.writer._PUT_BYTES_MAX", 400)
    writer = tables.writer()
    with pytest.raises(hg.InvalidInputError, match="one put of"):
        writer.put(tables.rows(tables.id_in("0000"), *(tables.id_in("0003", skip) for skip in range(50))))
    assert held(writer) == [0, 0, 0, 0]
    assert tables.ids() == []
