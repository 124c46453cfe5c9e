"""A waiter that writes the entry itself, and the bytes that a reused encoder makes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from headgate.failpoint import hooked
from headgate.wal.entry import Header, Put, decode_entry, encode_stamped, encoded_bytes, metadata_of, stamps
from headgate.wal.stencil import StencilEncoder

PATIENCE = 30.0
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("value", pa.string())])


def test_who_waits_for_a_lone_put_writes_it(bench: Any) -> None:
    writer = bench.writer()
    writer.put(bench.rows(0)).wait()
    wrote: list[str] = []

    def look(name: str) -> None:
        if name == "pipeline.persisted":
            wrote.append(threading.current_thread().name)

    with hooked(look):
        for number in range(1, 50):
            writer.put(bench.rows(number)).wait()
    assert threading.current_thread().name in wrote
    assert len(wrote) == 49


@pytest.mark.parametrize("step", ["pipeline.encoded", "pipeline.persisted"])
def test_an_interrupted_wait_changes_nothing_the_put_goes_on(bench: Any, step: str) -> None:
    store = bench.faulty()
    writer = bench.writer(store)
    main, interrupted = threading.current_thread(), 0

    def interrupt(name: str) -> None:
        nonlocal interrupted
        if name == step and threading.current_thread() is main:
            interrupted += 1
            raise KeyboardInterrupt

    acks = []
    with hooked(interrupt):
        for number in range(20):
            acks.append(writer.put(bench.rows(number)))
            try:
                acks[-1].wait()
            except KeyboardInterrupt:
                acks[-1].wait(PATIENCE)
    assert interrupted > 0
    assert all(ack.done() for ack in acks)
    writer.close()
    assert bench.ids() == list(range(20)), "each once, in order"


def test_what_nobody_waits_for_is_written_all_the_same(bench: Any) -> None:
    writer = bench.writer()
    for number in range(20):
        writer.put(bench.rows(2 * number)).wait()
        last = writer.put(bench.rows(2 * number + 1))
    assert dict(last.wait(PATIENCE))
    writer.put(bench.rows(40))
    writer.flush()
    assert bench.ids() == list(range(41))


def test_a_coroutine_that_waits_calls_a_slot(bench: Any) -> None:
    writer = bench.writer()
    writer.put(bench.rows(0)).wait()

    async def put_some() -> None:
        for number in range(1, 20):
            await asyncio.wait_for(_awaited(writer.put(bench.rows(number))), PATIENCE)

    asyncio.run(put_some())
    assert bench.ids() == list(range(20))


async def _awaited(ack: Any) -> Any:
    return await ack


def test_many_threads_that_wait_share_entries_and_nobody_is_forgotten(bench: Any) -> None:
    writer = bench.writer()

    def put_some(start: int) -> None:
        for number in range(start, start + 50):
            writer.put(bench.rows(number)).wait()

    threads = [threading.Thread(target=put_some, args=(100 * number,), daemon=True) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert sorted(bench.ids()) == sorted(100 * thread + number for thread in range(8) for number in range(50))


# -- the reused encoder


def _puts(count: int) -> Iterator[Put]:
    yield Put(pa.record_batch([pa.array(range(count), pa.int64()), pa.array(["x" * count] * count)], schema=SCHEMA))
    yield Put(pa.record_batch([pa.array([1]), pa.array([None], pa.string())], schema=SCHEMA), "upsert", "producer", count)
    yield Put(pa.record_batch([pa.array([7])], schema=SCHEMA.remove(1)), "delete")


def test_a_reused_encoder_gives_the_bytes_of_the_plain_one() -> None:
    own = metadata_of(Header("w" * 26, "0000", 3, 0, "data", "", "x" * 26, -1, 0.0))
    encoder = StencilEncoder(own)
    for position in [*range(120), 999, 1000, 99_999, 10**12]:
        for count in (1, 3, 200):
            puts = list(_puts(count))
            size, time = sum(encoded_bytes(put.rows) for put in puts), 1_700_000_000 + position / 7
            body = encoder.encode(position, f"{position:026d}", position - 1, time, SCHEMA, puts, size)
            values = stamps(position, f"{position:026d}", position - 1, time)
            assert body == encode_stamped({**own, **values}, SCHEMA, puts, size)
            entry = decode_entry(body, "key", "w" * 26, "0000", 3, position)
            assert entry.header.durable_through == position - 1
            assert entry.time == pytest.approx(time, abs=1e-6)
            assert [put.op for put in entry.puts] == ["upsert", "upsert", "delete"]
    assert not encoder._is_plain


def test_what_was_encoded_stays_as_it_was() -> None:
    own = metadata_of(Header("w" * 26, "0000", 3, 0, "data", "", "x" * 26, -1, 0.0))
    encoder, bodies = StencilEncoder(own), []
    for position in range(10, 90):
        puts = list(_puts(position % 5 + 1))
        bodies.append(encoder.encode(position, "e" * 26, 9, 1.5, SCHEMA, puts, sum(encoded_bytes(put.rows) for put in puts)))
    for position, body in zip(range(10, 90), bodies, strict=True):
        assert decode_entry(body, "key", "w" * 26, "0000", 3, position).puts[0].rows.num_rows == position % 5 + 1
