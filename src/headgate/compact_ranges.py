"""One compaction by many workers, each with its own range of keys.

Owns: cutting a compaction into ranges, writing one of them anywhere, and making one run of what came back.
Does not own: which runs are merged, and the commit's checks (compact), the merging (merge), where ranges run (spark).

    work = plan_compaction(shard, …)                # registers an attempt, and cuts
    written = [work.write(n) for n in ranges]       # anywhere, in any order, as often as it takes
    work.commit(written)                            # one commit, with the checks of any other compaction

Ranges do not overlap and together are all keys, so what they come to, side by side, is sorted: one run. A range
may be written twice, by a task that was retried or overtaken: each try has a folder of its own, and only what
is handed to ``commit`` counts. All is under one registered attempt, so collection leaves it alone until that is over;
if whoever planned dies, the lease ends, and nobody will ever name the files.

    t0 we plan a merge of runs 1 to 4 · t1 another compactor commits one of 3 and 4 · t2 we commit

The commit finds 3 and 4 gone, and fails; nothing is lost but work. All ranges are written with the columns of
one moment, looked up after the runs: a range that knew more columns than its neighbour would make two kinds of slices.

Where the oldest run is large, ranges begin where its slices do: then those that nothing newer touches are named again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
import pyarrow as pa

from headgate.attempt import register, renew
from headgate.columnar import Columnar, Slice
from headgate.columnar.base import Offsets
from headgate.compact import LEASE_SECONDS, CompactionReport, has_oldest, pick, replaced, withdraw
from headgate.errors import CommitConflictError, DataLossError, InvalidInputError, ObjectMissingError
from headgate.failpoint import failpoint
from headgate.indexes import indexed_scalars, indexed_vectors
from headgate.keys import KeyOrder, Keys
from headgate.manifest.model import RunRecord, SliceRecord
from headgate.meters import COMPACTION_BYTES_WRITTEN, COMPACTION_FAILURES, COMPACTION_ROWS_READ, COMPACTION_ROWS_WRITTEN
from headgate.query.ranges import split_points
from headgate.query.run_index import RunIndex
from headgate.run import SLICE_ROWS, OpenRun
from headgate.run_writer import Progress, RunWriter, untouched_slices
from headgate.schema import RowRules, as_now
from headgate.shard import Shard
from headgate.view import ReadView, RunCache

RANGE_ROWS = 1 << 21
"""About how many rows a range reads: enough to be worth a worker's start."""
_RANGES_MAX = 4096


@dataclass(frozen=True)
class KeyRange:
    """Keys from ``low`` up to, not including, ``high``; without a key rows from ``start`` up to ``stop``, counted through all runs."""

    low: bytes | None = None
    high: bytes | None = None
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True)
class WrittenRange:
    """What one range came to. Small: names and numbers."""

    number: int
    slices: tuple[str, ...]
    """As JSON, in order."""
    tombstones: int = 0
    slices_kept: int = 0
    rows_kept: int = 0
    bytes_kept: int = 0
    missing: str | None = None
    """A file that was not there any more; nothing was written. Writing it again would not help."""


@dataclass(frozen=True)
class ShardCompaction:
    """A compaction of one shard in the making. Pickles, so that others can write for it."""

    shard: Shard
    attempt: str
    rules: RowRules = field(repr=False, compare=False)
    inputs: tuple[str, ...] = field(repr=False)
    """The runs that are merged, as JSON, oldest first."""
    ranges: tuple[KeyRange, ...]
    with_oldest: bool
    keeps_slices: bool
    """Every range has whole slices of the oldest run."""
    max_memory: int
    slice_rows: int = SLICE_ROWS

    @cached_property
    def records(self) -> list[RunRecord]:
        return [RunRecord.model_validate_json(text) for text in self.inputs]

    @property
    def rows(self) -> int:
        """That are read, all ranges together."""
        return sum(run.rows for run in self.records)

    def write(self, number: int, progress: Progress | None = None) -> WrittenRange:
        """Merge one range into slices that nobody sees yet. In any process, as often as needed."""
        try:
            return self._write(number, progress)
        except ObjectMissingError as error:
            return WrittenRange(number, (), missing=error.object)

    def _write(self, number: int, progress: Progress | None) -> WrittenRange:
        log, columnar = self.shard.log, self.shard.places.columnar()
        columnar.vectors, columnar.scalars = indexed_vectors(self.shard.indexes), indexed_scalars(self.shard.indexes)
        runs = [OpenRun(record, columnar) for record in self.records]
        parts = list(_windows(runs, self.rules, self.ranges[number]))
        total = sum(run.rows for run in parts)
        # Even slices, not large ones and a rest: a small one is written again the next time.
        slice_rows = -(-total // max(1, -(-total // self.slice_rows))) or 1
        folder = f"shards/{log.shard}-{log.table_id}/runs/{self.attempt}-{log.clock.token()}"
        writer = RunWriter(log, columnar, self.rules, folder, total, progress, slice_rows)  # a worker has one core
        untouched = None
        if self.keeps_slices and parts[0].record.slices:
            untouched = untouched_slices(parts, self.rules, self.slice_rows, slices_min=1)
        writer.write(parts, untouched, drop_tombstones=self.with_oldest, max_memory=self.max_memory)
        failpoint("compact_ranges.written")
        kept = writer.kept
        slices = tuple(part.model_dump_json() for part in writer.slices)
        return WrittenRange(number, slices, writer.tombstones, kept.count, kept.rows, kept.bytes)

    def commit(self, written: Sequence[WrittenRange]) -> CompactionReport:
        """Make one run of all ranges, in place of those that were merged.

        Raises:
            CommitConflictError: another compaction was faster, or the lease is over. Nothing was changed.
            DataLossError: a file of the runs is lost.
        """
        self._check_there(written)
        by_number = {one.number: one for one in written}
        missing = [number for number in range(len(self.ranges)) if number not in by_number]
        if missing:
            raise InvalidInputError(f"range {missing[0]} of {len(self.ranges)} was not written", hint="write all of them, then commit")
        log, inputs = self.shard.log, self.records
        ordered = [by_number[number] for number in range(len(self.ranges))]
        slices = tuple(SliceRecord.model_validate_json(text) for one in ordered for text in one.slices)
        made = RunRecord(
            id=f"{self.attempt}-{log.clock.token()}",
            first=inputs[0].first,
            end=inputs[-1].end,
            slices=slices,
            fields=tuple(zip(self.rules.field_ids, self.rules.schema.names, strict=True)),
            tombstones=sum(one.tombstones for one in ordered),
            created_at=log.clock.now(),
        )
        try:
            committed = log.manifests.commit(lambda manifest: replaced(log, manifest, inputs, made, self.attempt))
        except BaseException:
            self.abort()
            raise
        failpoint("compact_ranges.committed")
        rows_written, bytes_written = made.rows - sum(one.rows_kept for one in ordered), made.bytes - sum(one.bytes_kept for one in ordered)
        place = (log.manifests.place, log.shard)
        COMPACTION_ROWS_READ.add(self.rows, *place)
        COMPACTION_ROWS_WRITTEN.add(rows_written, *place)
        COMPACTION_BYTES_WRITTEN.add(bytes_written, *place)
        after = len(committed.runs)
        return CompactionReport(
            runs_before=after - (1 if slices else 0) + len(inputs),
            runs_after=after,
            rows_read=self.rows,
            rows_written=rows_written,
            bytes_written=bytes_written,
            slices_kept=sum(one.slices_kept for one in ordered),
            seconds=0.0,
            shards={log.shard: after},
        )

    def _check_there(self, written: Sequence[WrittenRange]) -> None:
        missing = next((one.missing for one in written if one.missing is not None), None)
        if missing is None:
            return
        named = {part.path for run in self.shard.log.manifests.load().runs for part in run.slices}
        self.abort()
        if missing in named:
            raise DataLossError(f"{missing} is missing, and the manifest names it", object=missing)
        raise CommitConflictError(f"{missing} was merged by another compaction, and collected", hint="compact again")

    def done(self) -> float:
        """About how much of the work is written, from 0 to 1, by what is in the store. Slices that are kept count when all is done."""
        log = self.shard.log
        prefix = f"shards/{log.shard}-{log.table_id}/runs/{self.attempt}-"
        names = (info.key[len(prefix) :].split("/")[:2] for info in self.shard.places.table_store().list(prefix))
        count = len({tuple(name) for name in names})
        return min(1.0, count / max(len(self.ranges), -(-self.rows // self.slice_rows)))

    def renew(self) -> None:
        """A longer lease, for work that takes long. Raises CommitConflictError if it is over."""
        renew(self.shard.log, self.attempt, LEASE_SECONDS)

    def abort(self) -> None:
        """Nothing more will be written or committed. What is left is garbage; if this fails, when the lease is over."""
        log = self.shard.log
        COMPACTION_FAILURES.add(1, log.manifests.place, log.shard)
        withdraw(log, self.attempt)


def plan_compaction(
    shard: Shard,
    rules: Callable[[], RowRules],
    *,
    max_memory: int,
    full: bool = False,
    range_rows: int = RANGE_ROWS,
    slice_rows: int = SLICE_ROWS,
) -> ShardCompaction | None:
    """Choose what to merge, register, and cut it into ranges. None: there is nothing to gain."""
    log = shard.log
    manifest = log.manifests.load()
    chosen = pick(manifest.runs, manifest.cursor.position, full=full)
    if chosen is None:
        return None
    inputs = manifest.runs[chosen[0] : chosen[1]]
    known = rules()  # after the runs: whoever wrote one knew no newer columns
    # Registered before the first object, and before the cuts are read: what they need is held by nobody.
    attempt = f"c{log.clock.token()}"
    register(log, attempt, "compaction", LEASE_SECONDS)
    failpoint("compact_ranges.registered")
    try:
        columnar = shard.places.columnar()
        runs = [OpenRun(record, columnar) for record in inputs]
        with_oldest = has_oldest(inputs, manifest)
        ranges, keeps = _cut(log.shard, runs, known, with_oldest, range_rows)
    except BaseException:
        withdraw(log, attempt)
        raise
    texts = tuple(run.model_dump_json() for run in inputs)
    return ShardCompaction(shard, attempt, known, texts, tuple(ranges), with_oldest, keeps, max_memory, slice_rows)


# -- cutting


def _cut(shard: str, runs: Sequence[OpenRun], rules: RowRules, with_oldest: bool, range_rows: int) -> tuple[list[KeyRange], bool]:
    rows = sum(run.rows for run in runs)
    count = max(1, min(_RANGES_MAX, -(-rows // range_rows)))
    if not rules.key:
        bounds = [rows * number // count for number in range(count + 1)]
        return [KeyRange(start=start, stop=stop) for start, stop in pairwise(bounds)], False
    base = runs[0]
    keeps = with_oldest and len(base.record.slices) > 1 and base.record.keep is None
    if count == 1:
        return [KeyRange()], keeps
    if keeps and 2 * base.rows >= rows:
        points = _slice_starts(base, rules, count)
    else:
        keeps = False
        view = ReadView(shard, rules, tuple(runs), (), cache=RunCache(base.columnar))
        points = split_points(view, count)
    cuts = [None, *(points.slice(at, 1).serialize().to_pybytes() for at in range(points.num_rows)), None]
    return [KeyRange(low, high) for low, high in pairwise(cuts)], keeps


def _slice_starts(base: OpenRun, rules: RowRules, count: int) -> pa.RecordBatch:
    """The first keys of some slices of a run, so that ranges between them have about as many rows."""
    starts = base.starts
    wanted = np.searchsorted(starts, [base.rows * number / count for number in range(1, count)])
    numbers = np.unique(wanted[(wanted > 0) & (wanted < len(starts) - 1)])
    key = list(rules.key)
    names = [base.names[rules.field_ids[rules.schema.get_field_index(name)]] for name in key]
    rows = as_now(base.take(starts[numbers], names), base.names, rules, key)
    return pa.RecordBatch.from_arrays(
        [column.cast(f.type) for column, f in zip(rows.columns, rules.key_schema, strict=True)], schema=rules.key_schema
    )


# -- windows


def _windows(runs: Sequence[OpenRun], rules: RowRules, part: KeyRange) -> Iterator[OpenRun]:
    """What each run has of a range, as runs of their own."""
    if not rules.key:
        first = 0
        for run in runs:
            low, high = max(part.start - first, 0), min(run.rows, run.rows if part.stop is None else part.stop - first)
            first += run.rows
            yield _window(run, low, max(low, high))
        return
    order = KeyOrder(rules)
    low_key, high_key = (_bound(order, rules, bound) for bound in (part.low, part.high))
    for run in runs:
        index = RunIndex(run, rules, order)
        low = 0 if low_key is None else index.lower_bound(low_key)
        high = run.rows if high_key is None else index.lower_bound(high_key)
        yield _window(run, low, max(low, high))


def _bound(order: KeyOrder, rules: RowRules, bound: bytes | None) -> Keys | None:
    if bound is None:
        return None
    return order.of(pa.ipc.read_record_batch(pa.py_buffer(bound), rules.key_schema))


def _window(run: OpenRun, low: int, high: int) -> OpenRun:
    """The rows ``low`` to ``high - 1`` of a run. Slices that are whole stay what they are."""
    parts: list[SliceRecord] = []
    windows: dict[str, tuple[int, int]] = {}
    for number, part in enumerate(run.record.slices):
        first = int(run.starts[number])
        start, stop = max(low - first, 0), min(high - first, part.rows)
        if start >= stop:
            continue
        if (start, stop) == (0, part.rows):
            parts.append(part)
        else:
            parts.append(part.but(rows=stop - start, bytes=part.bytes * (stop - start) // max(1, part.rows)))
            windows[part.path] = (start, stop)
    return OpenRun(run.record.but(slices=tuple(parts)), _Windows(run.columnar, windows) if windows else run.columnar)


class _Windows(Columnar):
    """Some slices are only seen in part."""

    def __init__(self, columnar: Columnar, windows: dict[str, tuple[int, int]]) -> None:
        self._columnar, self._windows = columnar, windows
        self.parallel_reads, self.scans_at_once = columnar.parallel_reads, columnar.scans_at_once
        self.elsewhere = columnar.elsewhere

    def write(self, path: str, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> SliceRecord:
        raise NotImplementedError("for reading")

    def open(self, path: str) -> Slice:
        return self._seen(path, self._columnar.open(path))

    def open_record(self, part: SliceRecord) -> Slice:
        return self._seen(part.path, self._columnar.open_record(part))

    def _seen(self, path: str, whole: Slice) -> Slice:
        return _Window(whole, *self._windows[path]) if path in self._windows else whole

    def drop(self, path: str) -> None:
        raise NotImplementedError("for reading")


class _Window(Slice):
    """Some rows of a slice that follow each other."""

    def __init__(self, whole: Slice, start: int, stop: int) -> None:
        self._whole, self._start = whole, start
        self.num_rows, self.schema = stop - start, whole.schema

    def scan(
        self, columns: Sequence[str], *, start: int = 0, stop: int | None = None, batch_rows: int = 1 << 16
    ) -> Iterator[pa.RecordBatch]:
        end = self.num_rows if stop is None else min(stop, self.num_rows)
        return self._whole.scan(columns, start=self._start + start, stop=self._start + end, batch_rows=batch_rows)

    def read_through(self, *, start: int = 0, stop: int | None = None, batch_rows: int = 1 << 16) -> Iterator[pa.RecordBatch]:
        end = self.num_rows if stop is None else min(stop, self.num_rows)
        return self._whole.read_through(start=self._start + start, stop=self._start + end, batch_rows=batch_rows)

    def take(self, offsets: Offsets, columns: Sequence[str]) -> pa.RecordBatch:
        return self._whole.take(np.asarray(offsets) + self._start, columns)

    def matching(self, filter: str, columns: Sequence[str]) -> Iterator[tuple[Offsets, pa.RecordBatch]]:
        raise NotImplementedError("a merge reads all rows")

    def nearest(self, *args: object, **others: object) -> None:
        return None
