"""Many clients at once beside Lance MemWAL and SlateDB: threads by number and rows, tasks, and how long each waits.

python benchmarks/crowd.py [--quick] [--rounds N] [--only NAME …] [--out FILE]
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ours
import peers
from harness import Contestant, Measurements, Question, Scale, Target, main, percentile
from rows import rows

OURS, LANCE, LANCE_DEFAULT, SLATE = "headgate", "lance 1 ms", "lance 100 ms (default)", "slatedb 1 ms"


class _Timed:
    """A put whose times are kept."""

    def __init__(self, threads: int, put: Callable[[int], Any]) -> None:
        self._put, self._taken = put, [[] for _ in range(threads)]  # type: ignore[var-annotated]

    def __call__(self, number: int) -> None:
        start = time.perf_counter()
        self._put(number)
        self._taken[number].append(time.perf_counter() - start)

    def measurements(self, rate: float) -> Measurements:
        taken = [seconds * 1e3 for some in self._taken for seconds in some]
        p50, p99 = percentile(taken, 0.5), percentile(taken, 0.99)
        return {"puts/s": rate, "p50 ms": p50, "p99 ms": p99, "p99/p50": p99 / p50}


def many(threads: int, count: int) -> Contestant:
    def measure(folder: Path, scale: Scale) -> Measurements:
        batches = [rows(count, number * count) for number in range(threads)]
        with ours.writer(folder) as writer:
            timed = _Timed(threads, lambda number: writer.put(batches[number]).wait())
            rate = peers.in_threads(threads, scale.seconds(2.0), timed)
            stats = writer.wal_stats()
            written = stats.puts_acknowledged * count
            return {**timed.measurements(rate), "entries/M rows": stats.entries_written / written * 1e6}

    return measure


def many_lance(threads: int, count: int, **options: Any) -> Contestant:
    def measure(folder: Path, scale: Scale) -> Measurements:
        tables = [peers.lance_rows(count, number * count) for number in range(threads)]
        writer = peers.lance_writer(folder, durable_write=True, **options)
        timed = _Timed(threads, lambda number: writer.put(tables[number]))
        try:
            rate = peers.in_threads(threads, scale.seconds(2.0), timed)
        finally:
            writer.close()
        entries = sum(1 for path in (folder / "lance" / "_mem_wal").rglob("*") if path.is_file() and "wal" in path.parent.name)
        puts = sum(len(some) for some in timed._taken)
        return {**timed.measurements(rate), "entries/M rows": entries / max(1, puts * count) * 1e6}

    return measure


def tasks(clients: int, count: int) -> Contestant:
    def measure(folder: Path, scale: Scale) -> Measurements:
        batches = [rows(count, number * count) for number in range(clients)]
        taken: list[float] = []

        async def run() -> float:
            async def put(number: int) -> None:
                start = time.perf_counter()
                await writer.put(batches[number])
                taken.append((time.perf_counter() - start) * 1e3)

            return await peers.in_tasks(clients, scale.seconds(2.0), put)

        with ours.writer(folder) as writer:
            rate = asyncio.run(run())
        return {"puts/s": rate, "p50 ms": percentile(taken, 0.5), "p99 ms": percentile(taken, 0.99)}

    return measure


def slate_tasks(clients: int, count: int) -> Contestant:
    def measure(folder: Path, scale: Scale) -> Measurements:
        pairs = [peers.slate_rows(count, number * count) for number in range(clients)]

        async def work(db: Any) -> float:
            async def put(number: int) -> None:
                await (await peers.slate_put(db, pairs[number])).await_durable()

            return await peers.in_tasks(clients, scale.seconds(2.0), put)

        return {"puts/s": peers.with_slate(folder, "1ms", work)}

    return measure


def contestants(threads: int, count: int) -> dict[str, Contestant]:
    return {
        OURS: many(threads, count),
        LANCE: many_lance(threads, count, max_wal_flush_interval_ms=1),
        LANCE_DEFAULT: many_lance(threads, count),
    }


QUESTIONS = [
    Question(
        "threads-64",
        "Durable puts of 10 rows, 64 threads",
        contestants(64, 10),
        [
            Target("puts/s over Lance at its default", f"{OURS}.puts/s", f"{LANCE_DEFAULT}.puts/s", at_least=50),
            Target("puts/s over Lance at 1 ms", f"{OURS}.puts/s", f"{LANCE}.puts/s", at_least=8),
            Target("p99 over p50", f"{OURS}.p99/p50", at_most=5),
        ],
    ),
    Question(
        "threads-1",
        "Durable puts of 100 rows, one thread",
        contestants(1, 100),
        [Target("puts/s over Lance at 1 ms", f"{OURS}.puts/s", f"{LANCE}.puts/s")],
        max_rounds=3,
    ),
    Question(
        "rows",
        "Durable puts, 8 threads, by rows per put",
        {f"{OURS}, {count} rows": many(8, count) for count in (1, 10, 100, 1000)}
        | {f"{LANCE}, {count} rows": many_lance(8, count, max_wal_flush_interval_ms=1) for count in (1, 10, 100, 1000)},
        [
            Target(f"{count} rows: puts/s over Lance at 1 ms", f"{OURS}, {count} rows.puts/s", f"{LANCE}, {count} rows.puts/s")
            for count in (1, 10, 100, 1000)
        ],
        max_rounds=3,
    ),
    Question(
        "tasks",
        "Durable puts of 10 rows, 64 asyncio clients",
        {OURS: tasks(64, 10), SLATE: slate_tasks(64, 10)},
        [Target("puts/s over SlateDB at 1 ms", f"{OURS}.puts/s", f"{SLATE}.puts/s")],
        max_rounds=3,
    ),
]

if __name__ == "__main__":
    here = Path(__file__).parent
    sys.exit(main(QUESTIONS, default_out=here / "results" / "crowd.json", packages=["headgate", "pyarrow", "pylance", "slatedb"]))
