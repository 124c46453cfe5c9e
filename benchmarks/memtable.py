"""MemTable mode beside WAL-only mode and Lance MemWAL: puts, indexes, bulk ingest with flushes, replay, memory.

    python benchmarks/memtable.py [--quick] [--rounds N] [--only NAME …] [--out FILE]

Local disk, nothing is synced, as with the peer. Lance has a primary key here, since only then does
it do the same work: one row per key. It is measured at a tick of 1 ms, where it is fastest at the
same guarantee. A time counts only after the rows have been counted.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import headgate as hg
import ours
import peers
from harness import Contestant, Measurements, Question, Scale, Target, main, percentile
from process import Stopwatch, in_child, memory_bytes, reset_peak
from rows import DOCUMENTS, KEY, SCHEMA, data_bytes, documents, rows, rows_of

OURS, WAL_ONLY, NO_FLUSH, NO_KEY = "memtable", "wal-only", "memtable, no flush", "memtable, no key"
LANCE, LANCE_BUFFERED, LANCE_NO_KEY = "lance", "lance buffered", "lance, no key"
TEXT, VECTOR, BOTH, LATER = "text index", "vector index", "both indexes", "both indexes, by a thread"
_TICK: dict[str, Any] = {"durable_write": True, "max_wal_flush_interval_ms": 1}
_NEVER: dict[str, Any] = {
    "max_memtable_size": 1 << 40,
    "max_memtable_rows": 1 << 40,
    "max_memtable_batches": 1 << 40,
    "max_memtable_age": 1e6,
}
_LANCE_LIKE_OURS: dict[str, Any] = {"max_memtable_size": 256 << 20, "max_memtable_rows": 1_000_000, "max_memtable_batches": 8_000}
_POOL = 2000
"""Different puts; then they come again, as updates."""

Indexes = Sequence[str]
_INDEXES: Mapping[str, Indexes] = {
    "no index": (),
    TEXT: ("text",),
    VECTOR: ("vector",),
    BOTH: ("text", "vector"),
    LATER: ("text", "vector"),
}
_CUT_FIRST = (TEXT, BOTH)
"""Whose words are made before a put is acknowledged, which takes what it takes."""


def _settings(name: str) -> dict[str, Any]:
    return {"sync_indexed_write": False} if name == LATER else {}


def _beside_wal_only(name: str, metric: str, wal_only: str, reported: Sequence[str] = ()) -> Target:
    """Words take what they take, before a put is acknowledged or, where all cores are busy, beside it: that is only reported."""
    return Target(f"puts/s over WAL-only, {name}", metric, wal_only, at_least=None if name in (*_CUT_FIRST, *reported) else 0.8)


@lru_cache(maxsize=4)
def pool(count: int, of: str) -> list[pa.RecordBatch]:
    """Batches of ``count`` rows with ids of their own."""
    if of == "rows":
        return [rows(count, number * count) for number in range(_POOL)]
    random = np.random.default_rng(4)
    return [documents(np.arange(number * count, (number + 1) * count), random) for number in range(_POOL)]


def shard_of(folder: Path, of: str, indexes: Indexes = (), key: str | None = KEY) -> Any:
    made = {"text": lambda: hg.text_index("body"), "vector": lambda: hg.vector_index("embedding")}
    options = {"indexes": [made[kind]() for kind in indexes]} if indexes else {}
    return ours.new_shard(folder, SCHEMA if of == "rows" else DOCUMENTS, key, **options)


def lance_of(folder: Path, of: str, indexes: Indexes = (), key: str | None = KEY) -> Any:
    """A base of one row, or of a thousand documents: an index needs some to be made from."""
    base = rows(1) if of == "rows" else documents(np.arange(1000), np.random.default_rng(0))
    kinds = {"text": ("body", "INVERTED"), "vector": ("embedding", "IVF_FLAT")}
    return peers.lance_dataset(folder, peers.lance_table(base, key), dict(kinds[kind] for kind in indexes))


# -- 1, 3. one client, one row


def in_turn(of: str, forms: Mapping[str, Indexes | None]) -> Contestant:
    """Writers of all ``forms`` (None: WAL-only), fifty puts of each in turn: the state of the file system is the same for all."""

    def measure(folder: Path, scale: Scale) -> Measurements:
        taken: dict[str, list[float]] = {name: [] for name in forms}
        batches = pool(1, of)
        with ExitStack() as stack:
            writers = {}
            for number, (name, indexes) in enumerate(forms.items()):
                place = folder / str(number)
                place.mkdir()
                shard = shard_of(place, of, indexes or ())
                options = ours.config(index_configs=[]) if indexes is None else ours.with_memtable(**_settings(name))
                writers[name] = stack.enter_context(shard.writer(options))
            for block in range(2 + scale.of(30)):
                for name, writer in writers.items():
                    for number in range(50):
                        batch = batches[(50 * block + number) % _POOL]
                        start = time.perf_counter()
                        writer.put(batch).wait()
                        if block >= 2:
                            taken[name].append(time.perf_counter() - start)
        found: dict[str, float] = {}
        for name, values in taken.items():
            found |= {f"{name} p50 ms": percentile(values, 0.5) * 1e3, f"{name} puts/s": len(values) / sum(values)}
        return found

    return measure


def one_row_lance(of: str, indexes: Indexes = ()) -> Contestant:
    def measure(folder: Path, scale: Scale) -> Measurements:
        tables = [peers.lance_table(batch, KEY) for batch in pool(1, of)[:500]]
        writer = peers.lance_shard(lance_of(folder, of, indexes), **_TICK)
        taken = []
        try:
            for table in tables[: scale.of(500)]:
                start = time.perf_counter()
                writer.put(table)
                taken.append(time.perf_counter() - start)
        finally:
            writer.close()
        return {"p50 ms": percentile(taken, 0.5) * 1e3, "puts/s": len(taken) / sum(taken)}

    return measure


# -- 2, 4. eight threads, a hundred rows

_THREADS, _ROWS = 8, 100


def threads(of: str, indexes: Indexes | None = (), **options: Any) -> Contestant:
    """``indexes`` None: WAL-only."""

    def measure(folder: Path, scale: Scale) -> Measurements:
        batches, turns = pool(_ROWS, of), [itertools.count(number, _THREADS) for number in range(_THREADS)]
        shard = shard_of(folder, of, indexes or ())
        settings = ours.config(index_configs=[]) if indexes is None else ours.with_memtable(**options)
        with shard.writer(settings) as writer:

            def put(number: int) -> None:
                writer.put(batches[next(turns[number]) % _POOL]).wait()

            rate = peers.in_threads(_THREADS, scale.seconds(3), put)
            found = {"puts/s": rate}
            if indexes is not None:
                found["flushes"] = float(writer.memtable_stats().flushed)
                distinct = sum(min(_POOL // _THREADS, next(turn) // _THREADS) for turn in turns) * _ROWS
                assert writer.scan(columns=[KEY]).count() == distinct, "acknowledged rows are there"
                writer.abort()
            return found

    return measure


def threads_lance(of: str, indexes: Indexes = ()) -> Contestant:
    def measure(folder: Path, scale: Scale) -> Measurements:
        tables, turns = (
            [peers.lance_table(batch, KEY) for batch in pool(_ROWS, of)],
            [itertools.count(n, _THREADS) for n in range(_THREADS)],
        )
        writer = peers.lance_shard(lance_of(folder, of, indexes), **_TICK, **_LANCE_LIKE_OURS)
        try:
            return {"puts/s": peers.in_threads(_THREADS, scale.seconds(3), lambda n: writer.put(tables[next(turns[n]) % _POOL]))}
        finally:
            writer.close()

    return measure


# -- 5. bulk, all rows in generations at the end

_BULK_ROWS = 1_000_000
_BULK_MEMTABLE = 64 << 20


@lru_cache(maxsize=1)
def bulk_rows(total: int, per_put: int, shuffled: bool) -> list[pa.RecordBatch]:
    ids = np.arange(total)
    if shuffled:
        np.random.default_rng(5).shuffle(ids)
    return [rows_of(ids[start : start + per_put]) for start in range(0, total, per_put)]


def bulk(per_put: int, shuffled: bool, key: str | None) -> Contestant:
    def measure(folder: Path, scale: Scale) -> Measurements:
        total = scale.of(_BULK_ROWS)
        batches, shard = bulk_rows(total, per_put, shuffled), shard_of(folder, "rows", key=key)
        writer = shard.writer(ours.with_memtable(max_memtable_size=_BULK_MEMTABLE if total == _BULK_ROWS else _BULK_MEMTABLE // 8))
        with Stopwatch() as watch:
            for batch in batches:
                writer.put(batch)
            writer.flush()
            writer.close()
        runs = ours.opened_shard(folder).log.manifests.load().runs
        assert sum(run.rows for run in runs) == total, "all rows are in generations"
        assert hg.open_table(folder / "table").scan(columns=["id"]).count() == total
        return _ingested(batches, watch, len(runs))

    return measure


def bulk_lance(per_put: int, shuffled: bool, key: str | None, **options: Any) -> Contestant:
    def measure(folder: Path, scale: Scale) -> Measurements:
        total = scale.of(_BULK_ROWS)
        batches = bulk_rows(total, per_put, shuffled)
        tables, dataset = [peers.lance_table(batch, key) for batch in batches], lance_of(folder, "rows", key=key)
        size = _BULK_MEMTABLE if total == _BULK_ROWS else _BULK_MEMTABLE // 8
        writer = peers.lance_shard(dataset, max_memtable_size=size, max_memtable_rows=10_000_000, **options)
        with Stopwatch() as watch:
            for table in tables:
                writer.put(table)
            writer.close()  # the only way to flush
        assert peers.lance_flushed_rows(dataset, writer.shard_id) == total, "all rows are in generations"
        return _ingested(batches, watch, len(peers.lance_generations(dataset, writer.shard_id)))

    return measure


def _ingested(batches: list[pa.RecordBatch], watch: Stopwatch, generations: int) -> Measurements:
    megabytes, count = sum(map(data_bytes, batches)) / 1e6, sum(batch.num_rows for batch in batches)
    return {
        "MB/s": megabytes / watch.seconds,
        "rows/s": count / watch.seconds,
        "MB/CPU s": megabytes / watch.cpu_seconds,
        "generations": generations,
    }


def bulk_question(name: str, title: str, per_put: int, shuffled: bool = False) -> Question:
    return Question(
        name,
        title,
        {
            OURS: bulk(per_put, shuffled, KEY),
            LANCE: bulk_lance(per_put, shuffled, KEY, **_TICK),
            LANCE_BUFFERED: bulk_lance(per_put, shuffled, KEY, durable_write=False),
            NO_KEY: bulk(per_put, shuffled, None),
            LANCE_NO_KEY: bulk_lance(per_put, shuffled, None, durable_write=False),
        },
        [
            Target("MB/s over Lance, each put durable", f"{OURS}.MB/s", f"{LANCE}.MB/s", at_least=2),
            Target("MB/s over Lance, puts buffered", f"{OURS}.MB/s", f"{LANCE_BUFFERED}.MB/s", at_least=2),
            Target("MB/s over Lance, both without a key", f"{NO_KEY}.MB/s", f"{LANCE_NO_KEY}.MB/s"),
        ],
        notes=[
            "MemTables of 64 MiB (quick: 8); the time is up to the end of close(), when all rows are in generations.",
            "lance buffered and without a key: durable_write=False at its default tick, its fastest.",
        ],
    )


# -- 6. replay

_SHARD = "5f0c7a0e-3f6e-4a51-9d0c-6c1b52a0d001"
_REPLAY_CAPS: dict[str, Any] = {"max_memtable_size": 512 << 20, "max_memtable_rows": 2_000_000}


def _write_ours(folder: str, entries: int, count: int) -> Any:
    writer = ours.new_shard(Path(folder)).writer(ours.with_memtable(**_REPLAY_CAPS, max_memtable_age=1e6))
    for number in range(entries):
        writer.put(rows(count, number * count)).wait()
    return writer


def _write_lance(folder: str, entries: int, count: int) -> Any:
    dataset = peers.lance_dataset(Path(folder), peers.lance_table(rows(1), KEY).slice(0, 0))
    writer = peers.lance_shard(dataset, _SHARD, **_TICK, **_REPLAY_CAPS)
    for number in range(entries):
        writer.put(peers.lance_rows(count, number * count, KEY))
    return writer


class Crashed:
    """A table whose writer died; each round opens a copy of it."""

    def __init__(self, write: Callable[..., Any], name: str) -> None:
        self._write, self._name = write, name
        self._made: Path | None = None

    def copy(self, folder: Path, entries: int, count: int) -> Path:
        if self._made is None or not self._made.exists():
            self._made = folder.parent / f"{self._name}-{entries}-{count}"
            self._made.mkdir()
            in_child(self._write, str(self._made), entries, count, crash=True)
        shutil.copytree(self._made, folder, dirs_exist_ok=True, copy_function=os.link)
        return folder


def replay(entries: int, count: int) -> Contestant:
    crashed = Crashed(_write_ours, "ours")

    def measure(folder: Path, scale: Scale) -> Measurements:
        total = scale.of(entries)
        crashed.copy(folder, total, count)
        with Stopwatch() as opening:
            writer = ours.opened_shard(folder).writer(ours.with_memtable(**_REPLAY_CAPS, max_memtable_age=1e6))
        with Stopwatch() as counting:
            found = writer.scan(columns=[KEY]).count()
        stats = writer.memtable_stats()
        writer.abort()
        assert found == total * count == stats.replayed_rows, (found, stats)
        return _opened(opening, counting)

    return measure


def replay_lance(entries: int, count: int) -> Contestant:
    crashed = Crashed(_write_lance, "lance")

    def measure(folder: Path, scale: Scale) -> Measurements:
        import lance

        total = scale.of(entries)
        crashed.copy(folder, total, count)
        with Stopwatch() as opening:
            writer = peers.lance_shard(lance.dataset(str(folder / "lance")), _SHARD, **_TICK, **_REPLAY_CAPS)
        with Stopwatch() as counting:
            found = writer.lsm_scanner().count_rows()
        writer.close()
        assert found == total * count, found
        return _opened(opening, counting)

    return measure


def _opened(opening: Stopwatch, counting: Stopwatch) -> Measurements:
    return {
        "open ms": opening.seconds * 1e3,
        "open, CPU ms": opening.cpu_seconds * 1e3,
        "open and count ms": (opening.seconds + counting.seconds) * 1e3,
    }


def replay_question(entries: int, count: int, at_least: float) -> Question:
    return Question(
        f"replay-{entries}x{count}",
        f"Opening a writer after a crash: {entries:,} entries of {count:,} rows",
        {OURS: replay(entries, count), LANCE: replay_lance(entries, count)},
        [
            Target("times faster than Lance", f"{LANCE}.open ms", f"{OURS}.open ms", at_least=at_least),
            Target("the same in CPU time of all threads", f"{LANCE}.open, CPU ms", f"{OURS}.open, CPU ms"),
            Target("the same with a first count of all rows", f"{LANCE}.open and count ms", f"{OURS}.open and count ms"),
        ],
    )


# -- 7. memory

_MEMORY_ROWS = 20_000_000
_MEMORY_MEMTABLE = 64 << 20
_MEMORY_UNFLUSHED = 256 << 20
_MEMORY_BOUND = _MEMORY_UNFLUSHED + 2 * _MEMORY_MEMTABLE
_SCAN_BOUND = 500_000_000
_STRIDE = 7_368_787
"""Prime to the number of rows: every MemTable gets keys from the whole range."""


def memory(spread: bool) -> Contestant:
    """Each in a process of its own, so that nothing else grows in it."""

    def measure(folder: Path, scale: Scale) -> Measurements:
        total = scale.of(_MEMORY_ROWS)
        return {**in_child(_ingest, str(folder), total, spread), **in_child(_scan, str(folder), total)}

    return measure


def _ingest(folder: str, total: int, spread: bool) -> Measurements:
    config = ours.with_memtable(max_memtable_size=_MEMORY_MEMTABLE, max_unflushed_memtable_bytes=_MEMORY_UNFLUSHED)
    with ours.new_shard(Path(folder)).writer(config) as writer:
        reset_peak()
        before, start = memory_bytes("VmRSS"), time.perf_counter()
        for first in range(0, total, 10_000):
            ids = np.arange(first, first + 10_000)
            writer.put(rows_of(ids * _STRIDE % total if spread else ids))
        writer.flush()
        elapsed = time.perf_counter() - start
        growth = memory_bytes("VmHWM") - before
    return {"ingest growth MiB": growth / (1 << 20), "ingest growth/bound": growth / _MEMORY_BOUND, "ingest rows/s": total / elapsed}


def _scan(folder: str, total: int) -> Measurements:
    table = hg.open_table(Path(folder) / "table")
    reset_peak()
    before, start = memory_bytes("VmRSS"), time.perf_counter()
    found = sum(batch.num_rows for batch in table.scan().to_batches())
    elapsed = time.perf_counter() - start
    growth = memory_bytes("VmHWM") - before
    assert found == total, found
    return {"scan growth MB": growth / 1e6, "scan growth/bound": growth / _SCAN_BOUND, "scan rows/s": total / elapsed}


QUESTIONS = [
    Question(
        "row",
        "A durable put of one row, one client",
        {"in turn": in_turn("rows", {WAL_ONLY: None, OURS: ()}), LANCE: one_row_lance("rows")},
        [
            Target("puts/s over WAL-only", f"in turn.{OURS} puts/s", f"in turn.{WAL_ONLY} puts/s", at_least=0.8),
            Target("p50 over WAL-only", f"in turn.{OURS} p50 ms", f"in turn.{WAL_ONLY} p50 ms"),
            Target("p50 over Lance's", f"in turn.{OURS} p50 ms", f"{LANCE}.p50 ms"),
        ],
    ),
    Question(
        "threads",
        "Durable puts of 100 rows, 8 threads",
        {
            WAL_ONLY: threads("rows", None),
            OURS: threads("rows"),
            NO_FLUSH: threads("rows", **_NEVER),
            LANCE: threads_lance("rows"),
        },
        [
            Target("puts/s over WAL-only", f"{OURS}.puts/s", f"{WAL_ONLY}.puts/s", at_least=0.8),
            Target("the same, MemTable never full", f"{NO_FLUSH}.puts/s", f"{WAL_ONLY}.puts/s", at_least=0.8),
            Target("puts/s over Lance's", f"{OURS}.puts/s", f"{LANCE}.puts/s"),
        ],
        notes=["Flushes go on in the background: the default MemTable is full after 8,000 puts. Lance has the same bounds."],
    ),
    Question(
        "indexed-row",
        "A durable put of one document, one client, with indexes",
        {
            "in turn": in_turn("documents", {WAL_ONLY: None, **_INDEXES}),
            **{f"{LANCE}, {name}": one_row_lance("documents", _INDEXES[name]) for name in (TEXT, VECTOR)},
        },
        [_beside_wal_only(name, f"in turn.{name} puts/s", f"in turn.{WAL_ONLY} puts/s") for name in _INDEXES]
        + [Target(f"puts/s over Lance's, {name}", f"in turn.{name} puts/s", f"{LANCE}, {name}.puts/s") for name in (TEXT, VECTOR)],
    ),
    Question(
        "indexed-threads",
        "Durable puts of 100 documents, 8 threads, with indexes",
        {
            WAL_ONLY: threads("documents", None),
            **{name: threads("documents", indexes, **_settings(name)) for name, indexes in _INDEXES.items()},
            **{f"{LANCE}, {name}": threads_lance("documents", _INDEXES[name]) for name in (TEXT, VECTOR)},
        },
        [_beside_wal_only(name, f"{name}.puts/s", f"{WAL_ONLY}.puts/s", reported=(LATER,)) for name in _INDEXES]
        + [Target(f"puts/s over Lance's, {name}", f"{name}.puts/s", f"{LANCE}, {name}.puts/s") for name in (TEXT, VECTOR)],
        max_rounds=3,
    ),
    bulk_question("bulk-1000", "1 M rows in puts of 1,000, all in generations at the end", 1000),
    bulk_question("bulk-10000", "1 M rows in puts of 10,000, all in generations at the end", 10_000),
    bulk_question("bulk-shuffled", "1 M rows in random order, puts of 10,000, all in generations at the end", 10_000, shuffled=True),
    replay_question(1000, 100, at_least=3),
    replay_question(5000, 10, at_least=3),
    replay_question(100, 10_000, at_least=2),
    Question(
        "memory",
        "Memory of an ingest of 20 M rows, and of a scan of them all in batches",
        {"keys in order": memory(spread=False), "keys spread": memory(spread=True)},
        [
            Target(f"growth of the {what} over its bound, {name}", f"{name}.{what} growth/bound", at_most=1)
            for name in ("keys in order", "keys spread")
            for what in ("ingest", "scan")
        ],
        notes=[
            "Ingest: 64 MiB MemTables, max_unflushed_memtable_bytes 256 MiB; the bound is the latter and two of the former.",
            "Scan: all columns, another process; the bound is 500 MB. Both over the resident memory at the start (quick: 2 M rows).",
            "Keys spread: every generation holds keys from the whole range.",
        ],
        max_rounds=1,
    ),
]

if __name__ == "__main__":
    sys.exit(
        main(
            QUESTIONS, default_out=Path(__file__).parent / "results" / "memtable.json", packages=["headgate", "pyarrow", "pylance", "numpy"]
        )
    )
