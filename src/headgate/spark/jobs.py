"""``hgs.compact``, ``hgs.gc``, ``hgs.verify``: the maintenance of all shards at once, by Spark's tasks.

Owns: who does what where. Does not own: what it means (compact, gc, verify), how tasks are run (tasks).

The driver decides and commits, tasks do the work. Each of these may die anywhere, driver or task, and be run again: what
was written and not committed is garbage, which a later ``gc`` takes once the lease is over.

Shards are compacted beside each other, each by as many tasks as it has ranges of keys, and committed as soon as it is done:
one that takes long, or fails, does not hold up the others. Nothing here stops or fences a live writer.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from threading import Event, Thread
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from headgate import (
    CommitConflictError,
    CompactionReport,
    GcReport,
    InvalidInputError,
    ShardCompaction,
    Table,
    VerifyReport,
    WrittenRange,
    open_table,
)
from headgate.spark.cores import has_cores, on_a_core
from headgate.spark.tasks import answers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MEMORY_BYTES = 512 << 20
"""What a task of a compaction may hold, unless told."""
_SHARDS_AT_ONCE = 16
_ROUNDS_MAX = 64
_RENEW_SECONDS = 900.0
_LOOK_SECONDS = 1.0

Progress = Callable[[str, int, int], None]
"""Called with a shard, the rows done and the rows to do."""
Report = TypeVar("Report")


def compact(
    spark: SparkSession,
    uri: str | os.PathLike[str],
    *,
    max_memory: int = MEMORY_BYTES,
    progress: Progress | None = None,
    full: bool = False,
    shards: Sequence[str] | None = None,
    rows_per_task: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    wal_uri: str | os.PathLike[str] | None = None,
    wal_storage_options: Mapping[str, Any] | None = None,
) -> CompactionReport:
    """Merge runs of all shards, so that reads have few of them: many shards at once, and a large one by several tasks.

    Beside live writers, which it never stops or fences. It may die anywhere and be run again.

    Args:
        max_memory: bytes that each task may hold, about.
        progress: called with a shard, the rows done and the rows to do, about once a second; from several threads.
        full: all runs of a shard into one, whatever their sizes; else by size, so that a row is rewritten seldom.
        shards: only these.
        rows_per_task: about how many rows a task reads.

    Raises:
        CommitConflictError: another compactor was faster, every time.
    """
    table = open_table(uri, storage_options=storage_options, wal_uri=wal_uri, wal_storage_options=wal_storage_options)
    limits: dict[str, Any] = {"max_memory": max_memory, "full": full}
    if rows_per_task is not None:
        limits["range_rows"] = rows_per_task
    for name, value in (("max_memory", max_memory), ("rows_per_task", 1 if rows_per_task is None else rows_per_task)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidInputError(f"{name} is {value!r}", hint="a whole number, 1 or more")
    chosen = [table.shard(id).id for id in shards] if shards is not None else [shard.id for shard in table.shards]
    start, before = monotonic(), Counter(run.shard for run in table.runs())
    with _Watch(progress) as watch, ThreadPoolExecutor(max(1, min(len(chosen), _SHARDS_AT_ONCE))) as pool:
        stop = Event()
        done = [pool.submit(_compact_shard, spark, table, id, limits, watch, stop) for id in chosen]
        try:
            reports = [report for one in done for report in one.result()]
        except BaseException:
            stop.set()  # the others end after what they are at
            raise
    after = Counter(run.shard for run in table.runs())
    whole = CompactionReport.of(reports, monotonic() - start)
    return CompactionReport(
        runs_before=sum(before[id] for id in chosen),
        runs_after=sum(after[id] for id in chosen),
        rows_read=whole.rows_read,
        rows_written=whole.rows_written,
        bytes_written=whole.bytes_written,
        slices_kept=whole.slices_kept,
        seconds=whole.seconds,
        shards={id: after[id] for id in chosen},
    )


def _compact_shard(
    spark: SparkSession, table: Table, shard: str, limits: Mapping[str, Any], watch: _Watch, stop: Event
) -> list[CompactionReport]:
    reports: list[CompactionReport] = []
    for _ in range(_ROUNDS_MAX):
        # 1. Choose, register, cut.
        work = None if stop.is_set() else table.plan_compaction(shard, **limits)
        if work is None:
            return reports
        # 2. All ranges, by tasks. The driver keeps the lease meanwhile.
        try:
            with watch.watching(work):
                written = answers(spark, _on_a_core(work) if has_cores(spark) else work.write, len(work.ranges), WrittenRange)
        except BaseException:
            work.abort()
            raise
        # 3. One commit. Of two compactions one wins; then we look again.
        try:
            reports.append(work.commit(written))
        except CommitConflictError:
            continue
        watch.tell(work, 1.0)
        if limits["full"]:
            return reports
    raise CommitConflictError(f"shard {shard}: other compactions were faster, {_ROUNDS_MAX} times", hint="try again")


def _on_a_core(work: ShardCompaction) -> Callable[[int], WrittenRange]:
    def write(number: int) -> WrittenRange:
        with on_a_core():
            return work.write(number)

    return write


class _Watch:
    """Keeps the leases of what is being done, and tells how far it is."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._open: dict[str, ShardCompaction] = {}
        self._end = Event()
        self._thread = Thread(target=self._run, name="headgate-compaction", daemon=True)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()

    def watching(self, work: ShardCompaction) -> _Watching:
        self.tell(work, 0.0)
        return _Watching(self._open, work)

    def tell(self, work: ShardCompaction, part: float) -> None:
        if self._progress is not None:
            self._progress(work.shard.id, round(work.rows * part), work.rows)

    def _run(self) -> None:
        renewed = monotonic()
        while not self._end.wait(_LOOK_SECONDS):
            is_due = monotonic() - renewed > _RENEW_SECONDS
            for work in list(self._open.values()):
                try:
                    if self._progress is not None:
                        self.tell(work, work.done())
                    if is_due:
                        work.renew()
                except Exception:  # what is wrong with the work, or with its lease, its commit tells
                    continue
            if is_due:
                renewed = monotonic()


class _Watching:
    def __init__(self, watched: dict[str, ShardCompaction], work: ShardCompaction) -> None:
        self._watched, self._work = watched, work

    def __enter__(self) -> None:
        self._watched[self._work.attempt] = self._work

    def __exit__(self, *error: object) -> None:
        self._watched.pop(self._work.attempt, None)


def gc(
    spark: SparkSession,
    uri: str | os.PathLike[str],
    *,
    dry_run: bool = True,
    min_age: timedelta | float = 3600.0,
    sweep: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    wal_uri: str | os.PathLike[str] | None = None,
    wal_storage_options: Mapping[str, Any] | None = None,
) -> GcReport:
    """Delete what nothing needs any more, in all shards at once. Safe at any moment, beside anything; see ``Table.gc``.

    Args:
        dry_run: only say what would be deleted.
        min_age: for the comfort of readers that began before: leave alone what became garbage within it.
        sweep: look everywhere for what stalled writers left behind.
    """
    table = open_table(uri, storage_options=storage_options, wal_uri=wal_uri, wal_storage_options=wal_storage_options)
    return table.gc(dry_run, min_age, sweep=sweep, run=partial(_on_shards, spark, GcReport))


def verify(
    spark: SparkSession,
    uri: str | os.PathLike[str],
    *,
    deep: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    wal_uri: str | os.PathLike[str] | None = None,
    wal_storage_options: Mapping[str, Any] | None = None,
) -> VerifyReport:
    """Walk every shard's log, look at every run, and say what is wrong where, all shards at once. Writes nothing.

    Args:
        deep: read every entry that is left and every row of every run, too.
    """
    table = open_table(uri, storage_options=storage_options, wal_uri=wal_uri, wal_storage_options=wal_storage_options)
    return table.verify(deep, run=partial(_on_shards, spark, VerifyReport))


def _on_shards(spark: SparkSession, kind: type[Report], work: Callable[[str], Report], shards: Sequence[str]) -> list[Report]:
    """A task for each shard."""
    names = list(shards)

    def one(number: int) -> Report:
        return work(names[number])

    return answers(spark, one, len(names), kind)
