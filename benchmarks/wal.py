"""The WAL beside Lance MemWAL, SlateDB and plain obstore: latency, throughput, reading, opening, memory.

    python benchmarks/wal.py [--quick] [--rounds N] [--only NAME …] [--out FILE]

Local disk; nothing is synced, as with the peers, unless a question says so. Lance has two
settings: its default tick of 100 ms, and 1 ms, where it is fastest at the same guarantee.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import obstore
import pyarrow as pa
from obstore.store import LocalStore as PlainStore

import ours
import peers
from harness import Contestant, Measurements, Question, Scale, Target, main, percentile
from headgate import WalAppender, WalTailer
from headgate.store.faulty import FaultyStore
from headgate.store.local import LocalStore
from headgate.wal.entry import encoded_bytes
from headgate.wal.fence import open_epoch
from process import in_child, memory_bytes, reset_peak
from rows import data_bytes, rows

PLAIN, OURS = "plain obstore", "headgate"
LANCE, LANCE_DEFAULT = "lance 1 ms", "lance default"
SLATE, SLATE_DEFAULT = "slatedb 1 ms", "slatedb default"
_BULK_BATCHES = 20
_SHARES = (("p50", 0.5), ("p99", 0.99))


def latencies(count: int, put: Callable[[int], Any]) -> dict[str, float]:
    for number in range(max(5, count // 20)):
        put(-1 - number)
    taken = []
    for number in range(count):
        start = time.perf_counter()
        put(number)
        taken.append(time.perf_counter() - start)
    return {"p50 ms": percentile(taken, 0.5) * 1e3, "p99 ms": percentile(taken, 0.99) * 1e3}


def megabytes_per_second(count: int, megabytes: float, run: Callable[[], None]) -> dict[str, float]:
    start = time.perf_counter()
    run()
    elapsed = time.perf_counter() - start
    return {"MB/s": megabytes / elapsed, "rows/s": count / elapsed}


# -- 1. one client, one row


def one_row(**options: Any) -> Contestant:
    def measure(folder: Path, scale: Scale) -> Measurements:
        batch = rows(1)
        with ours.writer(folder, **options) as writer:
            return latencies(scale.of(1000), lambda _: writer.put(batch).wait())

    return measure


def _one_entry(folder: Path) -> bytes:
    shard = ours.new_shard(folder)
    with shard.writer(ours.config()) as writer:
        writer.put(rows(1)).wait()
    return ours.entry_bytes(shard)


def one_row_plain(folder: Path, scale: Scale) -> Measurements:
    body, store = _one_entry(folder), PlainStore(folder)
    return latencies(scale.of(1000), lambda number: obstore.put(store, f"wal/{number:020d}.arrow", body, mode="create"))


def one_row_in_turn(folder: Path, scale: Scale) -> Measurements:
    """Ours and a plain create of the same bytes, fifty of each in turn: the state of the file system is the same for both."""
    batch, body, store = rows(1), _one_entry(folder / "plain"), PlainStore(folder)
    taken: dict[str, list[float]] = {OURS: [], PLAIN: []}
    with ours.writer(folder) as writer:
        for block in range(2 + scale.of(30)):
            for name in taken:
                for number in range(50):
                    start = time.perf_counter()
                    if name == OURS:
                        writer.put(batch).wait()
                    else:
                        obstore.put(store, f"wal/{50 * block + number:020d}.arrow", body, mode="create")
                    if block >= 2:
                        taken[name].append(time.perf_counter() - start)
    return {f"{name} {metric} ms": percentile(values, share) * 1e3 for name, values in taken.items() for metric, share in _SHARES}


def one_row_lance(**options: Any) -> Contestant:
    def measure(folder: Path, scale: Scale) -> Measurements:
        table, writer = peers.lance_rows(1), peers.lance_writer(folder, durable_write=True, **options)
        try:
            return latencies(scale.of(500 if options else 20), lambda _: writer.put(table))
        finally:
            writer.close()

    return measure


def one_row_slate(flush_interval: str) -> Contestant:
    def measure(folder: Path, scale: Scale) -> Measurements:
        async def work(db: Any) -> Measurements:
            taken = []
            for _ in range(scale.of(300 if flush_interval == "1ms" else 20)):
                start = time.perf_counter()
                await (await peers.slate_put(db, peers.slate_rows(1))).await_durable()
                taken.append(time.perf_counter() - start)
            return {"p50 ms": percentile(taken, 0.5) * 1e3, "p99 ms": percentile(taken, 0.99) * 1e3}

        return peers.with_slate(folder, flush_interval, work)

    return measure


# -- 2, 3. many clients


def many(threads: int, count: int, **options: Any) -> Contestant:
    def measure(folder: Path, scale: Scale) -> Measurements:
        batches = [rows(count, number * count) for number in range(threads)]
        with ours.writer(folder, **options) as writer:
            rate = peers.in_threads(threads, scale.seconds(1.5), lambda number: writer.put(batches[number]).wait())
            stats = writer.wal_stats()
            return {"puts/s": rate, "puts/entry": stats.puts_acknowledged / stats.entries_written}

    return measure


def many_lance(threads: int, count: int, **options: Any) -> Contestant:
    def measure(folder: Path, scale: Scale) -> Measurements:
        tables = [peers.lance_rows(count, number * count) for number in range(threads)]
        writer = peers.lance_writer(folder, durable_write=True, **options)
        try:
            return {"puts/s": peers.in_threads(threads, scale.seconds(1.5), lambda number: writer.put(tables[number]))}
        finally:
            writer.close()

    return measure


def many_slate(threads: int, count: int, flush_interval: str) -> Contestant:
    def measure(folder: Path, scale: Scale) -> Measurements:
        pairs = [peers.slate_rows(count, number * count) for number in range(threads)]

        async def work(db: Any) -> float:
            async def put(number: int) -> None:
                await (await peers.slate_put(db, pairs[number])).await_durable()

            return await peers.in_tasks(threads, scale.seconds(1.5), put)

        return {"puts/s": peers.with_slate(folder, flush_interval, work)}

    return measure


def many_peers(threads: int, count: int) -> dict[str, Contestant]:
    return {
        OURS: many(threads, count),
        LANCE: many_lance(threads, count, max_wal_flush_interval_ms=1),
        LANCE_DEFAULT: many_lance(threads, count),
        SLATE: many_slate(threads, count, "1ms"),
    }


# -- 4. bulk


def bulk(**options: Any) -> Contestant:
    def measure(folder: Path, scale: Scale) -> Measurements:
        batches, count = [rows(1000, number * 1000) for number in range(_BULK_BATCHES)], scale.of(2000)
        with ours.writer(folder, **options) as writer:
            writer.put(batches[0]).wait()

            def run() -> None:
                for number in range(count):
                    writer.put(batches[number % _BULK_BATCHES])
                writer.flush()

            return megabytes_per_second(count * 1000, count * data_bytes(batches[0]) / 1e6, run)

    return measure


def bulk_plain(folder: Path, scale: Scale) -> Measurements:
    total = scale.of(2000) * data_bytes(rows(1000))
    body, store = os.urandom(8 << 20), PlainStore(folder)
    count = max(1, round(total / len(body)))

    def run() -> None:
        for number in range(count):
            obstore.put(store, f"wal/{number:020d}.arrow", body, mode="create")

    return megabytes_per_second(scale.of(2000) * 1000, count * len(body) / 1e6, run)


def bulk_lance(*, durable_write: bool, **options: Any) -> Contestant:
    def measure(folder: Path, scale: Scale) -> Measurements:
        tables, count = [peers.lance_rows(1000, number * 1000) for number in range(_BULK_BATCHES)], scale.of(1000)
        writer = peers.lance_writer(folder, durable_write=durable_write, **options)

        def run() -> None:
            for number in range(count):
                writer.put(tables[number % _BULK_BATCHES])
            if not durable_write:
                writer.close()  # the only way to know that all of it is durable

        try:
            return megabytes_per_second(count * 1000, count * tables[0].nbytes / 1e6, run)
        finally:
            if durable_write:
                writer.close()

    return measure


def bulk_slate(folder: Path, scale: Scale) -> Measurements:
    pairs, count = peers.slate_rows(1000), scale.of(30)

    async def work(db: Any) -> Measurements:
        start, handle = time.perf_counter(), None
        for _ in range(count):
            handle = await peers.slate_put(db, pairs)
        await handle.await_durable()
        elapsed = time.perf_counter() - start
        return {"MB/s": count * data_bytes(rows(1000)) / 1e6 / elapsed, "rows/s": count * 1000 / elapsed}

    return peers.with_slate(folder, "1ms", work)


# -- 5. with fsync


def synced(folder: Path, scale: Scale) -> Measurements:
    """All four of the above, ours, with fsync."""
    found: dict[str, float] = {}
    parts: list[tuple[str, Contestant]] = [
        ("1 row", one_row(fsync=True)),
        ("8 × 100", many(8, 100, fsync=True)),
        ("32 × 10", many(32, 10, fsync=True)),
        ("bulk", bulk(fsync=True)),
    ]
    for name, part in parts:
        place = folder / name.replace(" ", "")
        place.mkdir()
        found |= {f"{name} {metric}": value for metric, value in part(place, scale).items()}
    return found


def synced_by_hand(folder: Path, scale: Scale) -> Measurements:
    """The limit: the same bytes written and synced, file and folder, by nothing but system calls."""
    body, descriptor = _one_entry(folder), os.open(folder, os.O_RDONLY | os.O_DIRECTORY)

    def put(number: int) -> None:
        file = os.open(folder / f"{number}.arrow", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.write(file, body)
        os.fsync(file)
        os.close(file)
        os.fsync(descriptor)

    try:
        return {f"1 row {metric}": value for metric, value in latencies(scale.of(1000), put).items()}
    finally:
        os.close(descriptor)


# -- 6. a slow store

_SLOW = 0.02


def _slow(store: Any) -> FaultyStore:
    return FaultyStore(store, latency=_SLOW)


def slow_row(folder: Path, scale: Scale) -> Measurements:
    batch = rows(1)
    with ours.writer_on(ours.new_shard(folder), _slow) as writer:
        return latencies(scale.of(100), lambda _: writer.put(batch).wait())


def slow_put(folder: Path, scale: Scale) -> Measurements:
    body, store = _one_entry(folder), _slow(LocalStore(str(folder), fsync=False))
    return latencies(scale.of(100), lambda number: store.create(f"wal/{number:020d}.arrow", body))


def slow_bulk(max_inflight: int) -> Contestant:
    """Entries of 64 kB, more puts than the store can take: only overlapping requests help."""

    def measure(folder: Path, scale: Scale) -> Measurements:
        batches, count = [rows(100, number * 100) for number in range(_BULK_BATCHES)], scale.of(200) * max_inflight
        with ours.writer_on(ours.new_shard(folder), _slow, max_inflight=max_inflight, max_wal_buffer_size=64 << 10) as writer:
            writer.put(batches[0]).wait()

            def run() -> None:
                for number in range(count):
                    writer.put(batches[number % _BULK_BATCHES])
                writer.flush()

            return megabytes_per_second(count * 100, count * data_bytes(batches[0]) / 1e6, run)

    return measure


# -- 7. what the condition costs


def conditional(mode: str, size: int) -> Contestant:
    def measure(folder: Path, scale: Scale) -> Measurements:
        body, store = os.urandom(size), PlainStore(folder)
        return latencies(scale.of(500), lambda number: obstore.put(store, f"wal/{number:020d}.arrow", body, mode=mode))

    return measure


def conditional_ours(size: int) -> Contestant:
    def measure(folder: Path, scale: Scale) -> Measurements:
        body, store = os.urandom(size), LocalStore(str(folder), fsync=False)
        return latencies(scale.of(500), lambda number: store.create(f"wal/{number:020d}.arrow", body))

    return measure


# -- 8. the tailer


def tailing(entries: int, count: int) -> Contestant:
    def measure(folder: Path, scale: Scale) -> Measurements:
        shard, batch, total = ours.new_shard(folder), rows(count), scale.of(entries)
        _append(shard, total, batch)
        start = time.perf_counter()
        found = sum(entry.batches[0].num_rows for entry in WalTailer(shard).read(start=0))
        elapsed = time.perf_counter() - start
        assert found == total * count
        return {"entries/s": total / elapsed, "MB/s": total * data_bytes(batch) / 1e6 / elapsed}

    return measure


def _append(shard: Any, entries: int, batch: Any) -> None:
    """Entries that no manifest knows of: the appender is left as a crash would leave it."""
    log = shard.places.open_log(shard.id, shard.table_id, fsync=False)
    appender = WalAppender(ours.epoch_writer(log), shard.rules)
    for _ in range(entries):
        appender.append([batch])


# -- 9. requests


def requests(folder: Path, scale: Scale) -> Measurements:
    """All requests to the log's store and the manifests', from an open writer to the last of many entries."""
    counted: list[FaultyStore] = []

    def count(store: Any) -> FaultyStore:
        counted.append(FaultyStore(store))
        return counted[-1]

    batch = rows(10)
    with ours.writer_on(ours.new_shard(folder), count, count) as writer:
        before, entries = sum(s.requests.total() for s in counted), writer.wal_stats().entries_written
        for _ in range(scale.of(1000)):
            writer.put(batch).wait()
        after, written = sum(s.requests.total() for s in counted), writer.wal_stats().entries_written
    return {"requests/entry": (after - before) / (written - entries), "entries": written - entries}


# -- 10. opening

_OPEN_LATENCY = 0.01
_OPEN_ENTRIES = 5000
_OPEN_GETS = 200


class _Template:
    """A table with many entries that no manifest knows of; each round opens a copy."""

    def __init__(self) -> None:
        self._made: Path | None = None

    def copy(self, folder: Path, entries: int) -> Any:
        if self._made is None or not self._made.exists():
            self._made = folder.parent / "opening"
            self._made.mkdir()
            _append(ours.new_shard(self._made), entries, rows(10))
        shutil.copytree(self._made / "table", folder / "table", copy_function=os.link)
        return ours.opened_shard(folder)


_template = _Template()


def opening(folder: Path, scale: Scale) -> Measurements:
    entries = scale.of(_OPEN_ENTRIES)
    shard = _template.copy(folder, entries)
    log = ours.log_on(shard, lambda s: FaultyStore(s, latency=_OPEN_LATENCY), lambda s: FaultyStore(s, latency=_OPEN_LATENCY))
    start = time.perf_counter()
    claim = open_epoch(log)
    elapsed = time.perf_counter() - start
    assert claim.first.position == entries + 1, claim.first
    return {"seconds": elapsed, "entries/s": entries / elapsed}


def opening_one_by_one(folder: Path, scale: Scale) -> Measurements:
    entries = scale.of(_OPEN_ENTRIES)
    shard = _template.copy(folder, entries)
    store = FaultyStore(LocalStore(shard.places.table.path, fsync=False), latency=_OPEN_LATENCY)
    keys = [info.key for info in store.list("wal/") if info.key.endswith(".arrow")][:_OPEN_GETS]
    start = time.perf_counter()
    for key in keys:
        store.get(key)
    per_get = (time.perf_counter() - start) / len(keys)
    return {"seconds": per_get * entries, "entries/s": 1 / per_get}


# -- 11. memory

_BUDGET = 128 << 20


def memory(allocator: str) -> Contestant:
    """In a process of its own, so that nothing else grows in it."""

    def measure(folder: Path, scale: Scale) -> Measurements:
        found: Measurements = in_child(_fill, str(folder), scale.of(2000), allocator)
        return found

    return measure


def _fill(folder: str, batches: int, allocator: str) -> Measurements:
    pool = {"malloc": pa.system_memory_pool, "default": pa.default_memory_pool}[allocator]()
    pa.set_memory_pool(pool)
    pattern = rows(2000)
    size = encoded_bytes(pattern)
    start = time.perf_counter()
    for _ in range(200):
        _copied(pattern)
    offered = 200 * size / (time.perf_counter() - start)
    # Four requests of 1 MiB at once, so slow that they take a tenth of what the producer offers.
    latency = 4 * (1 << 20) / (offered / 10)
    shard = ours.new_shard(Path(folder))
    with ours.writer_on(
        shard, lambda store: FaultyStore(store, latency=latency), max_unflushed_memtable_bytes=_BUDGET, max_wal_buffer_size=1 << 20
    ) as writer:
        writer.put(_copied(pattern)).wait()
        reset_peak()
        before, queued = memory_bytes("VmRSS"), 0
        while writer.backpressure_stats().blocked_puts == 0:
            writer.put(_copied(pattern))
        start = time.perf_counter()
        for _ in range(batches):
            writer.put(_copied(pattern))
            queued = max(queued, writer.backpressure_stats().unacknowledged_bytes)
        taken = batches * size / (time.perf_counter() - start)
        growth = memory_bytes("VmHWM") - before
    return {
        "growth MiB": growth / (1 << 20),
        "growth/budget": growth / _BUDGET,
        "Arrow bytes/budget": pool.max_memory() / _BUDGET,
        "queued/budget": queued / _BUDGET,
        "offered/taken": offered / taken,
    }


def _copied(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The same rows in memory of their own, of the right size: what is queued is held by the writer alone."""
    columns = []
    for column in batch.columns:
        buffers: list[pa.Buffer | None] = []
        for buffer in column.buffers():
            if buffer is not None:
                copy = pa.allocate_buffer(buffer.size)
                memoryview(copy).cast("B")[:] = memoryview(buffer).cast("B")
                buffer = copy
            buffers.append(buffer)
        columns.append(pa.Array.from_buffers(column.type, len(column), buffers))
    return pa.record_batch(columns, schema=batch.schema)


QUESTIONS = [
    Question(
        "one-row",
        "A durable put of one row, one client",
        {
            OURS: one_row(),
            PLAIN: one_row_plain,
            "in turn": one_row_in_turn,
            LANCE: one_row_lance(max_wal_flush_interval_ms=1),
            LANCE_DEFAULT: one_row_lance(),
            SLATE: one_row_slate("1ms"),
            SLATE_DEFAULT: one_row_slate("100ms"),
        },
        [
            Target("p50 over a plain create of the same bytes", f"{OURS}.p50 ms", f"{PLAIN}.p50 ms", at_most=2.0),
            Target("the same, fifty of each in turn", f"in turn.{OURS} p50 ms", f"in turn.{PLAIN} p50 ms", at_most=2.0),
            Target("p50 over Lance at 1 ms", f"{OURS}.p50 ms", f"{LANCE}.p50 ms", at_most=0.5),
            Target("p99 over a plain create's", f"{OURS}.p99 ms", f"{PLAIN}.p99 ms"),
        ],
    ),
    Question(
        "threads-8",
        "Durable puts of 100 rows, 8 threads",
        many_peers(8, 100),
        [Target("puts/s over Lance at 1 ms", f"{OURS}.puts/s", f"{LANCE}.puts/s", at_least=8)],
    ),
    Question(
        "threads-32",
        "Durable puts of 10 rows, 32 threads",
        many_peers(32, 10),
        [Target("puts/s over Lance at 1 ms", f"{OURS}.puts/s", f"{LANCE}.puts/s", at_least=9)],
    ),
    Question(
        "bulk",
        "Batches of 1,000 rows, all durable at the end",
        {
            OURS: bulk(),
            PLAIN: bulk_plain,
            LANCE: bulk_lance(durable_write=True, max_wal_flush_interval_ms=1),
            "lance buffered": bulk_lance(durable_write=False, max_wal_flush_interval_ms=10),
            SLATE: bulk_slate,
        },
        [
            Target("MB/s over Lance, each put durable", f"{OURS}.MB/s", f"{LANCE}.MB/s", at_least=2),
            Target("MB/s over Lance, puts buffered and then closed", f"{OURS}.MB/s", "lance buffered.MB/s", at_least=2),
            Target("MB/s over plain creates of 8 MiB", f"{OURS}.MB/s", f"{PLAIN}.MB/s", at_least=0.5),
        ],
        notes=["lance buffered: durable_write=False, a 10 ms tick, close() at the end, which flushes its MemTable too."],
    ),
    Question(
        "fsync",
        "The same with fsync of file and folder, ours",
        {OURS: synced, "system calls": synced_by_hand},
        [Target("1 row, p50 over create, fsync, fsync of the folder", f"{OURS}.1 row p50 ms", "system calls.1 row p50 ms")],
        max_rounds=3,
    ),
    Question(
        "slow-row",
        "One row, one client, 20 ms added to each request",
        {OURS: slow_row, "one PUT": slow_put},
        [Target("p50 over one PUT", f"{OURS}.p50 ms", "one PUT.p50 ms", at_most=1.2)],
        max_rounds=3,
    ),
    Question(
        "slow-inflight",
        "Entries of 64 kB, 20 ms added to each request, by max_inflight",
        {f"{number} in flight": slow_bulk(number) for number in (1, 2, 4, 8)},
        [Target(f"MB/s of {2 * n} in flight over {n}", f"{2 * n} in flight.MB/s", f"{n} in flight.MB/s", at_least=1.3) for n in (1, 2, 4)],
        max_rounds=3,
    ),
    Question(
        "conditional",
        "What create-if-absent costs beside a plain PUT, 15 kB",
        {
            "obstore create": conditional("create", 15_000),
            "obstore overwrite": conditional("overwrite", 15_000),
            "headgate create": conditional_ours(15_000),
        },
        [
            Target("p50 of obstore's create over its overwrite", "obstore create.p50 ms", "obstore overwrite.p50 ms"),
            Target("p50 of our create over obstore's overwrite", "headgate create.p50 ms", "obstore overwrite.p50 ms"),
            Target("p50 of our create over obstore's create", "headgate create.p50 ms", "obstore create.p50 ms"),
        ],
        notes=["obstore's overwrite renames a temporary file, its create links it."],
    ),
    Question(
        "tailer",
        "Reading the log from its first entry to its tip",
        {"5,000 × 10 rows": tailing(5000, 10), "1,000 × 100 rows": tailing(1000, 100), "200 × 10,000 rows": tailing(200, 10_000)},
        [
            Target("entries/s, small entries", "5,000 × 10 rows.entries/s"),
            Target("MB/s, large entries", "200 × 10,000 rows.MB/s"),
        ],
        max_rounds=3,
    ),
    Question(
        "requests",
        "Requests per entry in steady state, counted, manifests included",
        {OURS: requests},
        [Target("requests per entry", f"{OURS}.requests/entry", at_most=1, at_least=1)],
        max_rounds=3,
    ),
    Question(
        "opening",
        "Opening a shard with 5,000 entries past the last record, 10 ms added to each request",
        {OURS: opening, "one GET after another": opening_one_by_one},
        [Target("times faster", "one GET after another.seconds", f"{OURS}.seconds", at_least=10)],
        notes=[f"one GET after another: {_OPEN_GETS} are timed and multiplied, nothing is decoded; a listing counts as one request."],
        max_rounds=3,
    ),
    Question(
        "memory",
        "Memory of a WAL-only writer whose producer is ten times faster than the store",
        {OURS: memory("default"), "with malloc": memory("malloc")},
        [
            Target("queued and in flight over the budget", f"{OURS}.queued/budget", at_most=1.0),
            Target("bytes held, encoded entries included, over the budget", f"{OURS}.Arrow bytes/budget"),
            Target("growth of the process over the budget", f"{OURS}.growth/budget"),
            Target("the same with Arrow on malloc", "with malloc.growth/budget"),
            Target("offered over taken", f"{OURS}.offered/taken", at_least=9),
        ],
        notes=[
            "The budget is 128 MiB and bounds what is queued and in flight; entries under way are encoded besides, 4 × 1 MiB.",
            "The growth of the process is its peak RSS; Arrow's default allocator rounds sizes up by as much as a fifth.",
        ],
        max_rounds=3,
    ),
]

if __name__ == "__main__":
    sys.exit(
        main(
            QUESTIONS,
            default_out=Path(__file__).parent / "results" / "wal.json",
            packages=["headgate", "pyarrow", "obstore", "pylance", "slatedb"],
        )
    )
