"""Meters: what the rooms count while they work.

Owns: every instrument, its name, its labels and its numbers in this process. Does not own: how they
leave the process (metrics).

Counting must cost next to nothing, so there are two ways. What happens often, a put and its Ack, is
counted in plain attributes of a ``PipelineCounts``, under the lock that its pipeline holds anyway; the
numbers are added up when somebody asks. When the pipeline is gone, what it counted is taken into the
total: counters never fall. What happens seldom (a flush, a retry, a read) goes through a lock of its own.
Gauges are asked of those who know (``watch``), at the moment they are wanted, from memory only: no
question of a monitoring system ever reaches a store.

The number of label sets is bounded: what comes after the first ``SERIES_MAX`` is counted as "other".
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, TypeVar
from weakref import ref

from headgate.clock import SYSTEM_CLOCK, Clock

SERIES_MAX = 1000
OTHER = "other"
SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""The upper bounds of the histograms' buckets; one more holds the rest."""
_LEAVERS_CHECKED_EVERY = 64

Labels = tuple[str, ...]
Result = TypeVar("Result")

_lock = SYSTEM_CLOCK.lock()


def _after_fork() -> None:
    global _lock
    _lock = SYSTEM_CLOCK.lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_after_fork)


class Instrument:
    """One name, and a number for each set of labels."""

    kind: Literal["counter", "gauge", "histogram"]

    def __init__(self, name: str, help: str, *labels: str) -> None:
        self.name, self.help, self.labels = name, help, labels
        INSTRUMENTS.append(self)

    def _bounded(self, known: dict[Labels, Any], labels: Labels) -> Labels:
        assert len(labels) == len(self.labels), f"{self.name} has the labels {self.labels}"
        return labels if labels in known or len(known) < SERIES_MAX else (OTHER,) * len(labels)


INSTRUMENTS: list[Instrument] = []


class Counter(Instrument):
    """Only ever grows."""

    kind = "counter"

    def __init__(self, name: str, help: str, *labels: str) -> None:
        super().__init__(name, help, *labels)
        self.values: dict[Labels, float] = {}

    def add(self, amount: float, *labels: str) -> None:
        with _lock:
            self._add(amount, labels)

    def _add(self, amount: float, labels: Labels) -> None:
        labels = self._bounded(self.values, labels)
        self.values[labels] = self.values.get(labels, 0) + amount


class Gauge(Instrument):
    """As it is now. Either set, by whoever looked, or asked of those who know."""

    kind = "gauge"

    def __init__(self, name: str, help: str, *labels: str) -> None:
        super().__init__(name, help, *labels)
        self.values: dict[Labels, float] = {}

    def set(self, value: float, *labels: str) -> None:
        with _lock:
            self.values[self._bounded(self.values, labels)] = value

    def keep_only(self, leading: Labels, rest: Iterable[Labels]) -> None:
        """Forget the series that begin with these labels, but for some: what they told of is gone."""
        wanted = {(*leading, *labels) for labels in rest}
        with _lock:
            for labels in [known for known in self.values if known[: len(leading)] == leading and known not in wanted]:
                del self.values[labels]


class Buckets:
    """Numbers of a histogram: how many fell into each bucket, and their sum."""

    __slots__ = ("counts", "sum")

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.sum = 0.0

    def bucket(self, seconds: float) -> int:
        return bisect_left(SECONDS, seconds)

    def add(self, seconds: float, times: int = 1) -> None:
        self.counts[bisect_left(SECONDS, seconds)] += times
        self.sum += seconds * times

    def take(self, other: Buckets) -> None:
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.sum += other.sum


class Histogram(Instrument):
    """Lengths of time, by size."""

    kind = "histogram"

    def __init__(self, name: str, help: str, *labels: str) -> None:
        super().__init__(name, help, *labels)
        self.values: dict[Labels, Buckets] = {}

    def observe(self, seconds: float, *labels: str) -> None:
        with _lock:
            self._of(labels).add(seconds)

    def _of(self, labels: Labels) -> Buckets:
        return self.values.setdefault(self._bounded(self.values, labels), Buckets())


_SHARD = ("table", "shard")

# -- writing
PUTS = Counter("puts", "Puts acknowledged.", *_SHARD)
ROWS = Counter("rows", "Rows acknowledged, deletes included.", *_SHARD)
ACK_SECONDS = Histogram("ack_seconds", "From put to its acknowledgement.", *_SHARD)
WAL_ENTRIES = Counter("wal_entries", "Entries of the log written.", *_SHARD)
WAL_BYTES = Counter("wal_bytes", "Bytes of entries written.", *_SHARD)
BACKPRESSURE_WAITS = Counter("backpressure_waits", "Puts that found no room and had to wait.", *_SHARD)
BACKPRESSURE_SECONDS = Counter("backpressure_seconds", "Seconds that puts waited for room.", *_SHARD)
BACKPRESSURE_TIMEOUTS = Counter("backpressure_timeouts", "Puts that were refused because no room came in time.", *_SHARD)
FENCES = Counter("fences", "Writers of this process that another writer has fenced.", *_SHARD)
POISONINGS = Counter("poisonings", "Writers of this process that failed for good.", *_SHARD)
QUARANTINED_ROWS = Counter("quarantined_rows", "Rows that could not be taken and are kept under quarantine/.", "table")
WRITERS = Gauge("writers", "Open writers in this process.", *_SHARD)
WRITER_EPOCH = Gauge("writer_epoch", "The epoch of the open writer.", *_SHARD)
WAL_QUEUED_PUTS = Gauge("wal_queued_puts", "Puts that wait for an entry.", *_SHARD)
WAL_QUEUED_BYTES = Gauge("wal_queued_bytes", "Bytes that wait for an entry.", *_SHARD)
WAL_INFLIGHT_ENTRIES = Gauge("wal_inflight_entries", "Entries under way to the store.", *_SHARD)
HELD_BYTES = Gauge("held_bytes", "All that counts against the limit: not acknowledged, not flushed, or reserved.", *_SHARD)
HELD_BYTES_LIMIT = Gauge("held_bytes_limit", "Above it puts wait: max_unflushed_memtable_bytes.", *_SHARD)
MEMTABLE_ROWS = Gauge("memtable_rows", "Rows in MemTables.", *_SHARD, "state")
MEMTABLE_BYTES = Gauge("memtable_bytes", "Bytes in MemTables.", *_SHARD, "state")
FROZEN_MEMTABLES = Gauge("frozen_memtables", "MemTables that wait to be flushed.", *_SHARD)
PENDING_GENERATIONS_LIMIT = Gauge(
    "pending_generations_limit", "More frozen MemTables, or more generations not compacted, than this make puts wait.", *_SHARD
)

# -- opening
CLAIM_SECONDS = Histogram("claim_seconds", "From the look at the log to the claim, for each writer opened.", *_SHARD)
WALK_SECONDS = Histogram("walk_seconds", "From the claim to the first position of one's own: seals, replay, verification.", *_SHARD)
REPLAYED_ENTRIES = Counter("replayed_entries", "Entries replayed by opening writers.", *_SHARD)
REPLAYED_ROWS = Counter("replayed_rows", "Rows replayed by opening writers.", *_SHARD)

# -- flushing, compacting, collecting
FLUSH_SECONDS = Histogram("flush_seconds", "From a frozen MemTable to its committed generation.", *_SHARD)
FLUSH_ROWS = Counter("flush_rows", "Rows written by flushes.", *_SHARD)
FLUSH_BYTES = Counter("flush_bytes", "Bytes written by flushes.", *_SHARD)
FLUSH_FAILURES = Counter("flush_failures", "Flushes that failed and were tried again.", *_SHARD)
COMPACTION_SECONDS = Histogram("compaction_seconds", "Each merge of runs that was committed.", *_SHARD)
COMPACTION_ROWS_READ = Counter("compaction_rows_read", "Rows of the runs that were merged.", *_SHARD)
COMPACTION_ROWS_WRITTEN = Counter("compaction_rows_written", "Rows written by compactions.", *_SHARD)
COMPACTION_BYTES_WRITTEN = Counter("compaction_bytes_written", "Bytes written by compactions.", *_SHARD)
COMPACTION_FAILURES = Counter("compaction_failures", "Merges that came to nothing: an error, or another compactor was faster.", *_SHARD)
LOADS = Counter("loads", "Loads placed beside the writer, in each shard.", *_SHARD)
LOAD_ROWS = Counter("load_rows", "Rows of loads placed.", *_SHARD)
GC_PASSES = Counter("gc_passes", "Collections of a shard that deleted, or would have.", *_SHARD)
GC_OBJECTS = Counter("gc_objects", "Objects that collection deleted.", *_SHARD, "kind")
GC_BYTES = Counter("gc_bytes", "Bytes that collection deleted.", *_SHARD, "kind")
MANIFEST_COMMITS = Counter("manifest_commits", "Versions of manifests committed.", "store")
MANIFEST_CONFLICTS = Counter("manifest_conflicts", "Commits that others overtook, and that were tried again.", "store")

# -- the state of a shard, as last seen by a writer or a status of this process
LAG_ENTRIES = Gauge("lag_entries", "Entries between cursor and tip: in no run yet.", *_SHARD)
RUNS = Gauge("runs", "Runs that a read merges.", *_SHARD)
PENDING_GENERATIONS = Gauge("pending_generations", "Runs that were flushed and are not compacted yet.", *_SHARD)
RUN_ROWS = Gauge("run_rows", "Rows in runs, tombstones and old versions included.", *_SHARD)
RUN_BYTES = Gauge("run_bytes", "Bytes of runs.", *_SHARD)
CHECKPOINTS = Gauge("checkpoints", "Checkpoints that hold collection back.", *_SHARD)
CONSUMERS = Gauge("consumers", "Named readers of the changes.", *_SHARD)
CONSUMER_LAG_ENTRIES = Gauge("consumer_lag_entries", "Entries that a consumer has not read yet.", *_SHARD, "consumer")

# -- reading
READ_SECONDS = Histogram(
    "read_seconds", "Reads by kind (scan, lookup, sql, search, search_text), without the caller's time.", "table", "kind"
)
READ_ROWS = Counter("read_rows", "Rows given out by reads.", "table", "kind")
CACHE_BYTES = Gauge("cache_bytes", "Memory that caches of reads hold.", "cache")
CACHE_HITS = Counter("cache_hits", "What reads found in a cache.", "cache")
CACHE_MISSES = Counter("cache_misses", "What reads had to fetch.", "cache")

# -- stores
STORE_RETRIES = Counter(
    "store_retries", "Requests sent again after a failure that may pass; create is the PUT of entries and manifests.", "store", "operation"
)
STORE_ERRORS = Counter("store_errors", "Failed requests, retried or not, by the class of the error.", "store", "kind")


class ReadMeter:
    """Times the reads of one kind. What the caller does between two batches does not count."""

    def __init__(self, clock: Clock, table: str, kind: str) -> None:
        self._clock, self._labels = clock, (table, kind)

    def whole(self, read: Callable[[], Result], rows: Callable[[Result], int] = lambda result: 0) -> Result:
        start = self._clock.monotonic()
        result = read()
        self._note(self._clock.monotonic() - start, rows(result))
        return result

    def streamed(self, batches: Iterator[Any]) -> Iterator[Any]:
        seconds, rows, start = 0.0, 0, self._clock.monotonic()
        try:
            for batch in batches:
                seconds, rows = seconds + self._clock.monotonic() - start, rows + batch.num_rows
                yield batch
                start = self._clock.monotonic()
            seconds += self._clock.monotonic() - start
        finally:
            self._note(seconds, rows)

    def _note(self, seconds: float, rows: int) -> None:
        READ_SECONDS.observe(seconds, *self._labels)
        READ_ROWS.add(rows, *self._labels)


class PipelineCounts:
    """What one pipeline has counted. Changed under its lock only."""

    __slots__ = ("ack_seconds", "blocked_puts", "blocked_seconds", "bytes", "entries", "puts", "rows", "timeouts")

    def __init__(self) -> None:
        self.entries = self.bytes = self.puts = self.rows = 0
        self.blocked_puts = self.timeouts = 0
        self.blocked_seconds = 0.0
        self.ack_seconds = Buckets()

    def numbers(self) -> Iterator[tuple[Counter, float]]:
        yield PUTS, self.puts
        yield ROWS, self.rows
        yield WAL_ENTRIES, self.entries
        yield WAL_BYTES, self.bytes
        yield BACKPRESSURE_WAITS, self.blocked_puts
        yield BACKPRESSURE_SECONDS, self.blocked_seconds
        yield BACKPRESSURE_TIMEOUTS, self.timeouts


Read = Callable[[Any], Iterable[tuple[Gauge, float, Labels]]]

_counting: list[tuple[ref[Any], Labels, PipelineCounts]] = []
_watched: list[tuple[ref[Any], Read]] = []


def pipeline_counts(owner: object, table: str, shard: str) -> PipelineCounts:
    """Where a pipeline counts; part of the totals as long as it lives, and after."""
    counts = PipelineCounts()
    with _lock:
        _counting.append((ref(owner), (table, shard), counts))
        if len(_counting) % _LEAVERS_CHECKED_EVERY == 0:
            _take_over()
    return counts


def watch(owner: object, read: Read) -> None:
    """Ask ``read(owner)`` for gauges whenever somebody wants them, while ``owner`` lives. It must not touch a store."""
    with _lock:
        _watched.append((ref(owner), read))
        if len(_watched) % _LEAVERS_CHECKED_EVERY == 0:
            _watched[:] = [row for row in _watched if row[0]() is not None]


def _take_over() -> None:
    """Under the lock: what pipelines that are gone have counted goes into the totals."""
    alive = []
    for row in _counting:
        owner, labels, counts = row
        if owner() is not None:
            alive.append(row)
            continue
        for counter, number in counts.numbers():
            counter._add(number, labels)
        ACK_SECONDS._of(labels).take(counts.ack_seconds)
    _counting[:] = alive


def read_counters() -> dict[Counter, dict[Labels, float]]:
    """Every counter's numbers as of now."""
    with _lock:
        _take_over()
        found = {one: dict(one.values) for one in INSTRUMENTS if isinstance(one, Counter)}
        for _, labels, counts in _counting:
            for counter, number in counts.numbers():
                series = found[counter]
                labels = counter._bounded(series, labels)
                series[labels] = series.get(labels, 0) + number
    return found


def read_histograms() -> dict[Histogram, dict[Labels, Buckets]]:
    """Every histogram's numbers as of now."""
    with _lock:
        _take_over()
        found = {one: {labels: _copied(b) for labels, b in one.values.items()} for one in INSTRUMENTS if isinstance(one, Histogram)}
        for _, labels, counts in _counting:
            series = found[ACK_SECONDS]
            series.setdefault(ACK_SECONDS._bounded(series, labels), Buckets()).take(counts.ack_seconds)
    return found


def _copied(buckets: Buckets) -> Buckets:
    copy = Buckets()
    copy.take(buckets)
    return copy


def read_gauges() -> dict[Gauge, dict[Labels, float]]:
    """Every gauge as of now: asked of those who live, else as last set."""
    with _lock:
        found = {one: dict(one.values) for one in INSTRUMENTS if isinstance(one, Gauge)}
        sources = list(_watched)
    asked: dict[tuple[Gauge, Labels], float] = {}
    for owner, read in sources:
        if (alive := owner()) is not None:
            for gauge, value, labels in read(alive):
                at = (gauge, gauge._bounded(found[gauge], labels))
                asked[at] = asked.get(at, 0) + value
    for (gauge, labels), value in asked.items():
        found[gauge][labels] = value
    return found


def show_shard(
    table: str, shard: str, *, lag: int, runs: Sequence[Any], generations: int, checkpoints: int, consumers: dict[str, int]
) -> None:
    """Somebody has looked at a shard: remember what he saw."""
    labels = (table, shard)
    for gauge, value in (
        (LAG_ENTRIES, lag),
        (RUNS, len(runs)),
        (PENDING_GENERATIONS, generations),
        (RUN_ROWS, sum(run.rows for run in runs)),
        (RUN_BYTES, sum(run.bytes for run in runs)),
        (CHECKPOINTS, checkpoints),
        (CONSUMERS, len(consumers)),
    ):
        gauge.set(value, *labels)
    CONSUMER_LAG_ENTRIES.keep_only(labels, [(name,) for name in consumers])
    for name, entries in consumers.items():
        CONSUMER_LAG_ENTRIES.set(entries, *labels, name)
