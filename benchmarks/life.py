"""The life of a table beside Lance and Delta Lake: merging updates into a base, cycles, clones.

    python benchmarks/life.py [--quick] [--rounds N] [--only NAME …] [--out FILE]

Everybody has the same base and the same updates, sorted or not as its own writer leaves them. Each
contestant prepares and works in a process of its own, whose peak of memory is measured over what it
had before the work began. What is in the table afterwards is checked: its number of rows and a sum.

merge     5 M updates, 30 % of them of keys that are there, spread over a base of 10 M rows
clustered the same updates, all within a tenth of the range of keys
cycles    open and scan after 1,000 times put, flush, compact and collect, and after 10
clone     the time of a clone of a small table, and of one with ten times the data
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import headgate as hg
from harness import Contestant, Measurements, NotHere, Question, Scale, Target, main
from process import in_child, memory_bytes, reset_peak
from rows import KEY, SCHEMA, Ids, rows_of, values_of

OURS, SYNCED, LANCE, DELTA = "headgate", "headgate, synced to disk", "lance merge_insert", "delta merge"
MAX_MEMORY = 1 << 30
_BASE_ROWS, _UPDATE_ROWS, _KNOWN_SHARE = 10_000_000, 5_000_000, 0.3
_SPACING = 10
_BATCH_ROWS = 100_000
_UPDATE_RUNS = 5
_CYCLE_ROWS = 200


def updates(base: int, count: int, clustered: bool) -> Ids:
    """Ids of the updates, each once, in random order: multiples of ``_SPACING`` are in the base, the others are new."""
    random = np.random.default_rng(7)
    low, high = (base * 4 // 10, base * 5 // 10) if clustered else (0, base)
    known = min(int(count * _KNOWN_SHARE), high - low)
    old = _SPACING * (low + random.choice(high - low, known, replace=False))
    between = random.choice((high - low) * (_SPACING - 1), count - known, replace=False)
    new = _SPACING * (low + between // (_SPACING - 1)) + 1 + between % (_SPACING - 1)
    ids = np.concatenate([old, new]).astype(np.int64)
    random.shuffle(ids)
    return ids


def base_batches(base: int) -> Iterator[pa.RecordBatch]:
    for start in range(0, base, _BATCH_ROWS):
        yield rows_of(_SPACING * np.arange(start, min(base, start + _BATCH_ROWS), dtype=np.int64))


def update_batches(ids: Ids) -> Iterator[pa.RecordBatch]:
    for start in range(0, len(ids), _BATCH_ROWS):
        yield rows_of(ids[start : start + _BATCH_ROWS], version=1)


def expected(base: int, ids: Ids) -> tuple[int, float]:
    old = ids[ids % _SPACING == 0]
    return base + len(ids) - len(old), float(values_of(_SPACING * np.arange(base)).sum() - values_of(old).sum() + values_of(ids, 1).sum())


def check(count: int, total: float, base: int, ids: Ids) -> None:
    rows, value = expected(base, ids)
    assert count == rows, f"{count} rows, {rows} expected"
    assert abs(total - value) <= 1e-9 * abs(value), f"the sum is {total}, {value} expected"


class _Work:
    """Time and peak memory of what is done inside. What was prepared is on the disk before it begins, whoever prepared it."""

    def __enter__(self) -> _Work:
        os.sync()
        reset_peak()
        self._before, self._start = memory_bytes("VmRSS"), time.perf_counter()
        return self

    def __exit__(self, *exc: object) -> None:
        self.seconds = time.perf_counter() - self._start
        self.peak_bytes = memory_bytes("VmHWM") - self._before


def _measured(work: _Work, rows: int) -> Measurements:
    return {"seconds": work.seconds, "updates/s": rows / work.seconds, "peak MB": work.peak_bytes / 1e6}


def merge_ours(folder: str, base: int, count: int, clustered: bool, synced: bool = False) -> Measurements:
    ids = updates(base, count, clustered)
    table = hg.create_table(folder, SCHEMA, key=KEY)
    table.load(base_batches(base))
    table.compact(max_memory=MAX_MEMORY, full=True)
    size = -(-count // _UPDATE_RUNS)
    for start in range(0, count, size):
        table.load(update_batches(ids[start : start + size]), max_memory=MAX_MEMORY)
    assert len(table.runs()) == 1 + _UPDATE_RUNS
    pa.default_memory_pool().release_unused()
    with _Work() as work:
        table.compact(max_memory=MAX_MEMORY, full=True, fsync=synced)
    found = table.sql("select count(*) as n, sum(v) as s from t").to_pylist()[0]
    check(found["n"], found["s"], base, ids)
    return {**_measured(work, count), "share of max_memory": work.peak_bytes / MAX_MEMORY}


def merge_lance(folder: str, base: int, count: int, clustered: bool) -> Measurements:
    import lance

    ids = updates(base, count, clustered)
    dataset = lance.write_dataset(
        pa.RecordBatchReader.from_batches(SCHEMA, base_batches(base)),
        f"{folder}/t.lance",
        max_rows_per_file=1 << 20,
        data_storage_version="2.0",
    )
    source = f"{folder}/source.lance"
    lance.write_dataset(pa.RecordBatchReader.from_batches(SCHEMA, update_batches(ids)), source)
    with _Work() as work:
        rows = lance.dataset(source).scanner().to_reader()
        dataset.merge_insert(KEY).when_matched_update_all().when_not_matched_insert_all().execute(rows)
    found = lance.dataset(f"{folder}/t.lance").to_table(columns=["v"])
    check(found.num_rows, float(np.asarray(found.column("v")).sum()), base, ids)
    return _measured(work, count)


def merge_delta(folder: str, base: int, count: int, clustered: bool) -> Measurements:
    import deltalake

    ids = updates(base, count, clustered)
    deltalake.write_deltalake(folder, pa.RecordBatchReader.from_batches(SCHEMA, base_batches(base)))
    source = f"{folder}-source"
    deltalake.write_deltalake(source, pa.RecordBatchReader.from_batches(SCHEMA, update_batches(ids)))
    rows = pa.table(deltalake.DeltaTable(source).to_pyarrow_table())
    with _Work() as work:
        (
            deltalake.DeltaTable(folder)
            .merge(rows, predicate="t.id = s.id", source_alias="s", target_alias="t")
            .when_matched_update_all()
            .when_not_matched_insert_all()
            .execute()
        )
    found = deltalake.DeltaTable(folder).to_pyarrow_table(columns=["v"])
    check(found.num_rows, float(np.asarray(found.column("v")).sum()), base, ids)
    return _measured(work, count)


def merging(work: Callable[..., Measurements], needs: str | None, clustered: bool) -> Contestant:
    def run(place: Path, scale: Scale) -> Measurements:
        if needs is not None:
            try:
                __import__(needs)
            except ImportError:
                raise NotHere(f"{needs} is not installed") from None
        found: Measurements = in_child(work, str(place / "table"), scale.of(_BASE_ROWS), scale.of(_UPDATE_ROWS), clustered)
        return found

    return run


def _milliseconds(work: Callable[[], Any]) -> float:
    times = []
    for _ in range(7):
        start = time.perf_counter()
        work()
        times.append((time.perf_counter() - start) * 1e3)
    return float(np.median(times))


def cycles(place: Path, scale: Scale) -> Measurements:
    """The same rows put again and again, each time flushed, compacted and collected."""
    uri = str(place / "table")
    table = hg.create_table(uri, SCHEMA, key=KEY)
    rows = rows_of(np.arange(_CYCLE_ROWS, dtype=np.int64))
    found: dict[str, float] = {}

    def read_all() -> None:
        assert hg.open_table(uri).scan().to_arrow().num_rows == _CYCLE_ROWS

    with table.shard("0000").writer() as writer:
        for number in range(1, scale.of(1000) + 1):
            writer.put(rows)
            writer.flush()
            if number % 10 == 0:
                table.compact()
                table.gc(dry_run=False, min_age=0)
            if number == 10:
                found |= {"open, early ms": _milliseconds(partial(hg.open_table, uri)), "scan, early ms": _milliseconds(read_all)}
    found |= {"open, late ms": _milliseconds(partial(hg.open_table, uri)), "scan, late ms": _milliseconds(read_all)}
    return found


def clones(place: Path, scale: Scale) -> Measurements:
    found: dict[str, float] = {}
    for name, rows in (("small", scale.of(1_000_000)), ("large", scale.of(10_000_000))):
        uri = str(place / name)
        table = hg.create_table(uri, SCHEMA, key=KEY)
        table.load(base_batches(rows))
        checkpoint = table.checkpoint(scope="durable")
        times = []
        for number in range(5):
            start = time.perf_counter()
            hg.clone(uri, str(place / f"{name}-clone-{number}"), checkpoint=checkpoint.id)
            times.append((time.perf_counter() - start) * 1e3)
        found[f"{name} ms"] = float(np.median(times))
    return found


def _merge_question(name: str, title: str, clustered: bool, targets: list[Target]) -> Question:
    return Question(
        name,
        title,
        {
            OURS: merging(merge_ours, None, clustered),
            SYNCED: merging(partial(merge_ours, synced=True), None, clustered),
            LANCE: merging(merge_lance, "lance", clustered),
            DELTA: merging(merge_delta, "deltalake", clustered),
        },
        targets,
        notes=[
            f"max_memory is {MAX_MEMORY >> 20} MiB for us. Lance reads its source from a file, Delta has it in memory.",
            "As everywhere here nothing is synced to disk, since the others do not; with it, and beside it, is what our users have.",
            "Ours are in five runs that were loaded; the others have all updates in one source.",
        ],
        max_rounds=3,
    )


QUESTIONS = [
    _merge_question(
        "merge",
        "Merge 5 M updates (30 % of keys that are there) into 10 M rows",
        False,
        [
            Target("updates/s beside Delta", f"{OURS}.updates/s", f"{DELTA}.updates/s", at_least=2),
            Target("updates/s beside Lance", f"{OURS}.updates/s", f"{LANCE}.updates/s", at_least=1),
            Target("peak memory within max_memory", f"{OURS}.share of max_memory", at_most=1),
        ],
    ),
    _merge_question(
        "clustered",
        "Merge 5 M updates, all within a tenth of the keys, into 10 M rows",
        True,
        [Target("updates/s beside Lance", f"{OURS}.updates/s", f"{LANCE}.updates/s", at_least=3)],
    ),
    Question(
        "cycles",
        "Open and scan after 1,000 flushes with compaction and collection, beside after 10",
        {OURS: cycles},
        [
            Target("open, after 1,000 beside after 10", f"{OURS}.open, late ms", f"{OURS}.open, early ms", at_most=1.5),
            Target("scan, after 1,000 beside after 10", f"{OURS}.scan, late ms", f"{OURS}.scan, early ms", at_most=1.5),
        ],
        max_rounds=2,
    ),
    Question(
        "clone",
        "A clone of 1 M rows, and of 10 M",
        {OURS: clones},
        [Target("ten times the data beside once", f"{OURS}.large ms", f"{OURS}.small ms", at_most=1.5)],
        max_rounds=3,
    ),
]

if __name__ == "__main__":
    here = Path(__file__).parent
    sys.exit(main(QUESTIONS, default_out=here / "results" / "life.json", packages=["headgate", "pylance", "deltalake", "pyarrow"]))
