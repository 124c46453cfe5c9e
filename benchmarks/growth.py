"""How cost grows: with entries, runs, shards, rows and history. Where it grows faster than the work, something is wrong.

    python benchmarks/growth.py [--quick] [--rounds N] [--only NAME …] [--out FILE]

Each contestant is a size. A target compares what a unit costs at the largest with what it costs at a smaller one: 1 is
linear. The smaller one is the least at which the unit is most of the cost: one run is few milliseconds of anything but runs,
one shard is claimed without threads, and after ten cycles there are fewer manifests than the 64 that collection leaves.
Opening must not grow with what was compacted and collected, nor a lookup with the rows but for a search.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import headgate as hg
import ours
from harness import Contestant, Measurements, Question, Scale, Target, main
from rows import KEY, SCHEMA, rows, rows_of

_TIMES = 5


def _median_ms(work: Callable[[], Any], times: int = _TIMES) -> float:
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        taken.append((time.perf_counter() - start) * 1e3)
    return float(np.median(taken))


def replay(entries: int) -> Contestant:
    def measure(folder: Path, scale: Scale) -> Measurements:
        count, shard = scale.of(entries), ours.new_shard(folder)
        with shard.writer(ours.config(max_inflight=1)) as writer:
            for number in range(count):
                writer.put(rows(10, 10 * number)).wait()
        start = time.perf_counter()
        writer = ours.opened_shard(folder).writer(ours.with_memtable(max_memtable_age=1e6))
        seconds = time.perf_counter() - start
        writer.abort()
        return {"ms": seconds * 1e3, "µs/entry": seconds / count * 1e6}

    return measure


def scan(runs: int) -> Contestant:
    total = 400_000

    def measure(folder: Path, scale: Scale) -> Measurements:
        table = hg.create_table(folder / "table", SCHEMA, KEY)
        count = scale.of(total)
        ids = np.random.default_rng(1).permutation(count).astype(np.int64)
        for part in np.array_split(ids, runs):
            table.load(rows_of(np.sort(part)))
        table.scan(columns=["id", "v"]).count()
        ms = _median_ms(lambda: table.scan(columns=["id", "v"]).to_arrow())
        return {"ms": ms, "ms/run": ms / runs}

    return measure


def opening(shards: int) -> Contestant:
    def measure(folder: Path, scale: Scale) -> Measurements:
        uri = folder / "table"
        table = hg.create_table(uri, SCHEMA, KEY, sharding=hg.bucket(KEY, shards))
        config = ours.with_memtable()
        with table.writer(config) as writer:
            writer.put(rows(shards * 20)).wait()

        def claim() -> None:
            hg.open_table(uri).writer(config).abort()

        claimed = _median_ms(claim, 3)
        read = _median_ms(lambda: hg.open_table(uri).scan().count(), 3)
        return {"claim ms/shard": claimed / shards, "read ms/shard": read / shards}

    return measure


def lookup(count: int) -> Contestant:
    def measure(folder: Path, scale: Scale) -> Measurements:
        table, number = hg.create_table(folder / "table", SCHEMA, KEY), scale.of(count)
        for start in range(0, number, 1 << 20):
            table.load(rows(min(1 << 20, number - start), start))
        table.compact(full=True)
        draw = np.random.default_rng(2)
        table.lookup([0])
        return {"one key ms": _median_ms(lambda: table.lookup([int(draw.integers(number))]), 30)}

    return measure


def history(cycles: int) -> Contestant:
    def measure(folder: Path, scale: Scale) -> Measurements:
        uri, config = folder / "table", ours.with_memtable()
        table = hg.create_table(uri, SCHEMA, KEY)
        with table.shard("0000").writer(config) as writer:
            for number in range(1, scale.of(cycles) + 1):
                writer.put(rows(100))
                writer.flush()
                if number % 10 == 0:
                    table.compact()
                    table.gc(dry_run=False, min_age=0)
        opened = _median_ms(lambda: hg.open_table(uri).shard("0000").writer(config).abort())
        return {"claim ms": opened, "scan ms": _median_ms(lambda: hg.open_table(uri).scan().count())}

    return measure


def feed(entries: int) -> Contestant:
    def measure(folder: Path, scale: Scale) -> Measurements:
        count, shard = scale.of(entries), ours.new_shard(folder)
        with shard.writer(ours.config()) as writer:
            for number in range(count):
                writer.put(rows(100, 100 * number))
        start = time.perf_counter()
        read = sum(batch.num_rows for batch in hg.open_table(folder / "table").changes("earliest"))
        seconds = time.perf_counter() - start
        assert read == 100 * count
        return {"rows/s": read / seconds, "ns/row": seconds / read * 1e9}

    return measure


def _curve(
    name: str,
    title: str,
    make: Callable[[int], Contestant],
    sizes: tuple[int, ...],
    metrics: dict[str, float],
    unit: str,
    since: int | None = None,
) -> Question:
    """``since``: the size that the largest is compared with; None: the least."""
    least, most = since or sizes[0], sizes[-1]
    return Question(
        name,
        title,
        {f"{size:,} {unit}": make(size) for size in sizes},
        [
            Target(f"{metric}: {most:,} over {least:,} {unit}", f"{most:,} {unit}.{metric}", f"{least:,} {unit}.{metric}", at_most=bound)
            for metric, bound in metrics.items()
        ],
        max_rounds=2,
    )


QUESTIONS = [
    _curve("replay", "Replay, by entries of 10 rows", replay, (1000, 2000, 4000, 8000), {"µs/entry": 1.3}, "entries"),
    _curve("runs", "A warm merged scan of two columns, 400,000 rows, by runs", scan, (1, 4, 16, 64), {"ms/run": 1.3}, "runs", 16),
    _curve("shards", "Claim and read, by shards", opening, (1, 4, 16, 64, 256), {"claim ms/shard": 1.3, "read ms/shard": 1.3}, "shards", 4),
    _curve("rows", "Lookup of one key, by rows", lookup, (100_000, 1_000_000, 4_000_000), {"one key ms": 2.0}, "rows"),
    _curve(
        "history",
        "Claim and scan after cycles of flush, compaction, collection",
        history,
        (10, 100, 1000),
        {"claim ms": 1.5, "scan ms": 1.5},
        "cycles",
        100,
    ),
    _curve("feed", "Following the changes, by entries of 100 rows", feed, (500, 2000, 8000), {"ns/row": 1.3}, "entries"),
]

if __name__ == "__main__":
    here = Path(__file__).parent
    sys.exit(main(QUESTIONS, default_out=here / "results" / "growth.json", packages=["headgate", "pyarrow", "pylance", "numpy"]))
