"""Compaction: fewer runs, the same rows.

Owns: which runs are merged, and how the result takes their place. Does not own: the merging
(merge), deleting what was replaced (gc).

It never claims the shard, so it never fences a writer; it works from the manifest alone, under a
registered attempt, and is visible by one commit. That commit checks that all its inputs are still
there, side by side: of two compactors one wins and the other has written garbage. It may die
anywhere: what it wrote is an attempt that nobody will commit, and collection takes it when its
lease is over.

Tombstones go only when the oldest run is among the inputs: above it they still hide something.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from headgate.ahead import Fed
from headgate.attempt import check_registered, give_back, register, renew, without
from headgate.clock import Clock
from headgate.columnar import Columnar
from headgate.errors import CommitConflictError, DataLossError, NotFoundError, ObjectMissingError
from headgate.failpoint import failpoint
from headgate.keys import Bools, KeyOrder, Keys
from headgate.manifest.model import ReplacedRun, RunRecord, ShardManifest, SliceRecord
from headgate.merge import Merged, RunMerger
from headgate.meters import COMPACTION_BYTES_WRITTEN, COMPACTION_FAILURES, COMPACTION_ROWS_READ, COMPACTION_ROWS_WRITTEN, COMPACTION_SECONDS
from headgate.run import DELETED, OpenRun
from headgate.schema import RowRules, as_now
from headgate.wal.log import ShardLog

SLICE_ROWS = 1 << 20
LEASE_SECONDS = 3600.0
_TIER_RATIO = 2.0
_BATCH_ROWS_MAX = 1 << 17
_BATCH_ROWS_MIN = 1 << 4
_AHEAD_ROWS_LEAST = 1 << 8
_ROUNDS_MAX = 64
_SLICES_AT_ONCE = 2
"""While one is finished and becomes durable, the rows of the next are coming."""
_UNWRITTEN = SliceRecord(path="", rows=0, bytes=0)
_LAYERS, _HELD = 24, 64
"""So many times a batch of each run fits into the memory that is allowed; and which part of it merged rows may take that wait."""
_SAMPLE_ROWS = 64

Progress = Callable[[str, int, int], None]
"""Called with the shard, the rows done and the rows to do."""


@dataclass(frozen=True, slots=True)
class CompactionReport:
    """What a compaction did."""

    runs_before: int
    runs_after: int
    rows_read: int
    rows_written: int
    bytes_written: int
    slices_kept: int
    """Slices that nothing newer touched: named again, not rewritten."""
    seconds: float
    shards: dict[str, int] = field(default_factory=dict)
    """Shard -> runs after."""

    @classmethod
    def of(cls, parts: Sequence[CompactionReport], seconds: float) -> CompactionReport:
        return cls(
            runs_before=sum(part.runs_before for part in parts),
            runs_after=sum(part.runs_after for part in parts),
            rows_read=sum(part.rows_read for part in parts),
            rows_written=sum(part.rows_written for part in parts),
            bytes_written=sum(part.bytes_written for part in parts),
            slices_kept=sum(part.slices_kept for part in parts),
            seconds=seconds,
            shards={shard: runs for part in parts for shard, runs in part.shards.items()},
        )


def pick(runs: Sequence[RunRecord], cursor: int, *, full: bool, detach: bool = False) -> tuple[int, int] | None:
    """Which runs to merge next: from the first index up to the second. None: there is nothing to gain.

    Only what lies below the cursor is closed: nothing can come between those runs any more. Tiered by
    size: the newest runs are merged, back to the oldest that is no more than ``_TIER_RATIO`` times as
    large as all that are newer together, so a row is rewritten a logarithmic number of times.
    Past the cursor nothing can come between loads of one place, either: where nobody writes, and so nobody flushes
    what a dead writer left in the log, loads would only ever get more.
    ``full``: all of them. ``detach``: those with files of another table, and no others. Runs of a shard that was
    split hold rows of the other part, too: they are rewritten together, before anything else.
    """
    closed = sum(1 for run in runs if run.end <= cursor)
    if detach:
        wanted = [number < closed and (run.keep is not None or is_elsewhere(run)) for number, run in enumerate(runs)]
        first = wanted.index(True) if True in wanted else -1
        return None if first < 0 else (first, wanted.index(False, first) if False in wanted[first:] else len(runs))
    if full and closed and (closed > 1 or runs[0].tombstones or runs[0].keep is not None):
        return 0, closed
    split = [run.keep is not None for run in runs[:closed]]
    if True in split:
        first = split.index(True)
        return first, split.index(False, first) if False in split[first:] else closed
    chosen = None if full or closed < 2 else _tier(runs, 0, closed)
    start = closed
    while chosen is None and start < len(runs):
        stop = start
        while stop < len(runs) and runs[stop].end == runs[start].end:
            stop += 1
        if stop - start >= 2:
            chosen = (start, stop) if full else _tier(runs, start, stop)
        start = stop
    return chosen


def _tier(runs: Sequence[RunRecord], start: int, stop: int) -> tuple[int, int] | None:
    first, size = stop - 1, runs[stop - 1].rows
    for number in range(stop - 2, start - 1, -1):  # beyond one that is too large: the newest may be tiny by chance, and would stop it all
        if runs[number].rows <= _TIER_RATIO * size:
            first = number
        size += runs[number].rows
    return (first, stop) if stop - first >= 2 else None


def has_oldest(inputs: Sequence[RunRecord], manifest: ShardManifest) -> bool:
    """Is nothing older than these runs? Then tombstones hide nothing. Past the cursor what is in the log is older."""
    return inputs[0].id == manifest.runs[0].id and inputs[-1].end <= manifest.cursor.position


def compact_shard(
    log: ShardLog,
    columnar: Columnar,
    rules: RowRules | Callable[[], RowRules],
    *,
    max_memory: int,
    full: bool = False,
    detach: bool = False,
    progress: Progress | None = None,
    slice_rows: int = SLICE_ROWS,
) -> CompactionReport:
    """Merge runs of one shard until there is nothing left to gain.

    Args:
        detach: instead, rewrite what is in files of another table.
        rules: the table's columns; if they may change, how to look them up.

    Raises:
        CommitConflictError: another compactor was faster, every time.
    """
    start, before = log.clock.monotonic(), None
    read = written = size = kept = 0
    for _ in range(_ROUNDS_MAX):
        manifest = log.manifests.load()
        before = len(manifest.runs) if before is None else before
        chosen = pick(manifest.runs, manifest.cursor.position, full=full, detach=detach)
        if chosen is None:
            break
        try:
            inputs = manifest.runs[chosen[0] : chosen[1]]
            # The columns are looked up after the runs are known: whoever wrote a run knew no newer ones. The other way
            # round a column that was added in between would be dropped, with its values.
            known = rules() if callable(rules) else rules
            with_oldest = has_oldest(inputs, manifest)
            made, kept_slices = _compact_once(log, columnar, known, inputs, with_oldest, max_memory, progress, slice_rows, detach=detach)
        except CommitConflictError:
            continue  # what we merged was merged by somebody else meanwhile; look again
        except ObjectMissingError as error:
            latest = log.manifests.load()
            if latest.state == "dropped":
                raise NotFoundError(f"shard {log.shard} was dropped", hint="open the table again, if there is one") from error
            if error.object in {part.path for run in latest.runs for part in run.slices}:
                raise DataLossError(f"{error.object} is missing, and the manifest names it", object=error.object) from error
            continue  # merged by somebody else, and collected
        read += sum(run.rows for run in inputs)
        written += made.rows - kept_slices.rows
        size += made.bytes - kept_slices.bytes
        kept += kept_slices.count
        if full:
            break
    else:
        raise CommitConflictError(f"shard {log.shard}: other compactions were faster, {_ROUNDS_MAX} times", hint="try again")
    manifest = log.manifests.load()
    seconds = log.clock.monotonic() - start
    return CompactionReport(before or 0, len(manifest.runs), read, written, size, kept, seconds, {log.shard: len(manifest.runs)})


@dataclass(frozen=True)
class Kept:
    count: int = 0
    rows: int = 0
    bytes: int = 0


def _compact_once(
    log: ShardLog,
    columnar: Columnar,
    rules: RowRules,
    inputs: Sequence[RunRecord],
    with_oldest: bool,
    max_memory: int,
    progress: Progress | None,
    slice_rows: int,
    *,
    detach: bool = False,
) -> tuple[RunRecord, Kept]:
    place, started = (log.manifests.place, log.shard), log.clock.monotonic()
    # 1. Register, before the first object: collection leaves the files of a registered attempt alone (G02).
    attempt = f"c{log.clock.token()}"
    register(log, attempt, "compaction", LEASE_SECONDS)
    failpoint("compact.registered")
    try:
        # 2. Write, under a name that no other try has (C09).
        runs = [OpenRun(record, columnar) for record in inputs]
        folder = f"shards/{log.shard}-{log.table_id}/runs/{attempt}-{log.clock.token()}"
        clock = log.clock if columnar.parallel_reads > 1 else None
        writer = RunWriter(log, columnar, rules, folder, sum(run.rows for run in inputs), progress, slice_rows, clock)
        writer.on_slice = _Renewal(log, attempt).renew
        untouched = untouched_slices(runs, rules, slice_rows) if with_oldest and not detach else None
        writer.write(
            runs, untouched, drop_tombstones=with_oldest, batch_rows=batch_rows_for(runs, max_memory), held_bytes=max_memory // _HELD
        )
        failpoint("compact.written")
        made = RunRecord(
            id=folder.rsplit("/", 1)[1],
            first=inputs[0].first,
            end=inputs[-1].end,
            slices=tuple(writer.slices),
            fields=tuple(zip(rules.field_ids, rules.schema.names, strict=True)),
            tombstones=writer.tombstones,
            created_at=log.clock.now(),
        )
        # 3. Commit: visible at once, as a whole.
        log.manifests.commit(lambda manifest: replaced(log, manifest, inputs, made, attempt))
    except BaseException:
        COMPACTION_FAILURES.add(1, *place)
        withdraw(log, attempt)
        raise
    failpoint("compact.committed")
    COMPACTION_SECONDS.observe(log.clock.monotonic() - started, *place)
    COMPACTION_ROWS_READ.add(sum(run.rows for run in inputs), *place)
    COMPACTION_ROWS_WRITTEN.add(made.rows - writer.kept.rows, *place)
    COMPACTION_BYTES_WRITTEN.add(made.bytes - writer.kept.bytes, *place)
    return made, writer.kept


def is_elsewhere(run: RunRecord) -> bool:
    """Does a run name files of another table?"""
    return any(part.uri is not None for part in run.slices)


class _Renewal:
    """Keeps the lease of a long compaction from ending under it."""

    def __init__(self, log: ShardLog, attempt: str) -> None:
        self._log, self._attempt, self._renewed = log, attempt, log.clock.monotonic()

    def renew(self) -> None:
        clock = self._log.clock
        if clock.monotonic() - self._renewed < LEASE_SECONDS / 4:
            return
        renew(self._log, self._attempt, LEASE_SECONDS)
        self._renewed = clock.monotonic()


def withdraw(log: ShardLog, attempt: str) -> None:
    """Let collection have what we wrote. If this fails too, the lease ends by itself."""
    try:
        give_back(log, attempt)
    except Exception:  # the reason we are here is the one to tell
        return


def replaced(log: ShardLog, manifest: ShardManifest, inputs: Sequence[RunRecord], made: RunRecord, attempt: str) -> ShardManifest | None:
    if any(run.id == made.id for run in manifest.runs):
        return None
    check_registered(log, manifest, attempt)
    ids = [run.id for run in manifest.runs]
    wanted = [run.id for run in inputs]
    at = ids.index(wanted[0]) if wanted[0] in ids else -1
    if at < 0 or ids[at : at + len(wanted)] != wanted:
        raise CommitConflictError(f"shard {log.shard}: another compaction has merged these runs", hint="compact again")
    now, named = log.clock.now(), {part.path for part in made.slices}
    gone = tuple(
        ReplacedRun(id=run.id, replaced_at=now, slices=tuple(part for part in run.slices if part.path not in named)) for run in inputs
    )
    return without(manifest, attempt).but(
        runs=(*manifest.runs[:at], *((made,) if made.slices else ()), *manifest.runs[at + len(wanted) :]),
        replaced=(*manifest.replaced, *gone),
    )


def batch_rows_for(runs: Sequence[OpenRun], max_memory: int) -> int:
    """So that a batch of each run, what it is merged into and what the files' reader and writer hold fit."""
    widest = 64.0
    for run in runs:
        for part in run.slices[:1]:
            sample = next(part.scan(part.schema.names, stop=_SAMPLE_ROWS, batch_rows=_SAMPLE_ROWS), None)
            if sample is not None and sample.num_rows:
                widest = max(widest, sample.nbytes / sample.num_rows)
    return int(min(_BATCH_ROWS_MAX, max(_BATCH_ROWS_MIN, max_memory / (_LAYERS * len(runs) * widest))))


@dataclass(frozen=True)
class Untouched:
    """Which slices of the oldest run no newer run has a key in."""

    kept: tuple[bool, ...]
    bounds: Keys
    """The first and the last key of each slice."""

    def first_of(self, number: int) -> Keys:
        return self.bounds.part(2 * number, 2 * number + 1)


def untouched_slices(runs: Sequence[OpenRun], rules: RowRules, slice_rows: int, slices_min: int = 2) -> Untouched | None:
    """Find the slices of the oldest run that can stay as they are. None: there are none.

    Only where slices can be named again as they are: same columns of the same types, no tombstones, several of
    them. A slice of less than half the size is not kept: slices would only ever get more.
    """
    base, parts = runs[0], runs[0].slices
    fields = tuple(zip(rules.field_ids, rules.schema.names, strict=True))
    if len(parts) < slices_min or base.record.tombstones or base.record.fields != fields or not rules.key or base.record.keep is not None:
        return None
    order, key = KeyOrder(rules), list(rules.key)
    ids = [rules.field_ids[rules.schema.get_field_index(name)] for name in key]
    edges = [part.take(np.array([0, part.num_rows - 1]), [base.names[id] for id in ids]) for part in parts]
    bounds = order.of(pa.Table.from_batches([as_now(edge, base.names, rules, key) for edge in edges]))
    types = rules.log_schema.types
    touched = np.array([part.schema.types != types or part.num_rows < slice_rows // 2 for part in parts])
    for run in runs[1:]:
        for batch in run.scan([run.names[id] for id in ids], batch_rows=_BATCH_ROWS_MAX):
            keys = order.of(as_now(batch, run.names, rules, key))
            below = keys.positions(bounds)
            last = keys.find(bounds.take(np.arange(1, 2 * len(parts), 2)))
            touched |= (below[1::2] > below[0::2]) | (last >= 0)
    return Untouched(tuple(not hit for hit in touched), bounds) if not touched.all() else None


class RunWriter:
    """Slices of one run, as they come.

    Args:
        clock: reading, merging, writing and syncing go on at the same time, by threads of its. None: one after the other.
    """

    def __init__(
        self,
        log: ShardLog,
        columnar: Columnar,
        rules: RowRules,
        folder: str,
        total: int,
        progress: Progress | None,
        slice_rows: int,
        clock: Clock | None = None,
    ) -> None:
        self._log, self._columnar, self._rules, self._folder = log, columnar, rules, folder
        self._clock = clock
        self._total, self._done, self._progress, self._slice_rows = total, 0, progress, slice_rows
        self.slices: list[SliceRecord] = []
        self._writing: deque[tuple[int, Fed[pa.RecordBatch, SliceRecord]]] = deque()
        self._held_bytes = 1
        self.on_slice: Callable[[], None] = lambda: None
        self.tombstones = self._written = 0
        self.kept = Kept()

    def write(
        self, runs: Sequence[OpenRun], untouched: Untouched | None, *, drop_tombstones: bool, batch_rows: int, held_bytes: int = 1
    ) -> None:
        """All that the runs come to, durable; slices of the oldest that nothing touches are named again."""
        self._held_bytes = held_bytes
        try:
            self._write(runs, untouched, drop_tombstones, batch_rows)
            while self._writing:
                self._settle()
        except BaseException as error:
            self._give_up(error)
            raise

    def _write(self, runs: Sequence[OpenRun], untouched: Untouched | None, drop_tombstones: bool, batch_rows: int) -> None:
        with_marks = not drop_tombstones and any(run.record.tombstones for run in runs)
        # Files are read, rows merged and others written at the same time: each takes about as long. Rows so wide that few of
        # them fit are held no more than once.
        if batch_rows < _AHEAD_ROWS_LEAST:
            self._clock = None
        with closing(
            RunMerger(
                runs, self._rules, drop_tombstones=drop_tombstones, batch_rows=batch_rows, clock=self._clock, held_bytes=self._held_bytes
            )
        ) as merger:
            self._write_merged(merger, runs, untouched, with_marks)

    def _write_merged(self, merger: RunMerger, runs: Sequence[OpenRun], untouched: Untouched | None, with_marks: bool) -> None:
        if untouched is None:
            self._write_slices(merger.merged(), with_marks)
            return
        base, start, count = runs[0].record, 0, len(untouched.kept)
        while start < count:
            stop = start
            while stop < count and untouched.kept[stop] == untouched.kept[start]:
                stop += 1
            if untouched.kept[start]:
                # What is newer and lies in the gaps between these slices comes before or after each of them.
                for number in range(start, stop):
                    self._write_slices(merger.merged((), untouched.first_of(number)), with_marks)
                    self._keep(base.slices[number])
            else:
                limit = untouched.first_of(stop) if stop < count else None
                self._write_slices(merger.merged(range(start, stop), limit), with_marks)
            start = stop
        self._write_slices(merger.merged(()), with_marks)

    def _keep(self, part: SliceRecord) -> None:
        self.slices.append(part)
        self.kept = Kept(self.kept.count + 1, self.kept.rows + part.rows, self.kept.bytes + part.bytes)
        self._note(part.rows, None)

    def _write_slices(self, merged: Generator[Merged], with_marks: bool) -> None:
        schema = self._rules.log_schema
        if with_marks:
            schema = schema.append(pa.field(DELETED, pa.bool_(), False))
        with closing(merged):
            source = _Rebatched(merged, schema, with_marks, self._note)
            while not source.is_done():
                path = f"{self._folder}/{self._written:05d}.lance"
                self._written += 1
                if self._clock is None:
                    self.slices.append(self._columnar.write(path, schema, source.up_to(self._slice_rows)))
                else:
                    self._hand_over(self._clock, path, schema, source.up_to(self._slice_rows))
                self.on_slice()
                failpoint("compact.slice")

    def _hand_over(self, clock: Clock, path: str, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> None:
        """Let a thread write a slice, and make it durable, while the rows of the next one are merged and written."""

        def write(rows: Iterator[pa.RecordBatch]) -> SliceRecord:
            return self._columnar.write(path, schema, rows)

        while len(self._writing) >= _SLICES_AT_ONCE:
            self._settle()
        fed = Fed(clock, write, lambda batch: int(batch.nbytes), self._held_bytes, name="headgate-slice")
        self._writing.append((len(self.slices), fed))
        self.slices.append(_UNWRITTEN)
        for batch in batches:
            fed.feed(batch)
        fed.end()

    def _settle(self) -> None:
        """Wait until the oldest slice that is being written is durable."""
        number, fed = self._writing.popleft()
        self.slices[number] = fed.result()

    def _give_up(self, failure: BaseException) -> None:
        """No thread stays behind."""
        for _, fed in self._writing:
            fed.end(failure)
        for _, fed in self._writing:
            with suppress(BaseException):
                fed.result()

    def _note(self, rows: int, deleted: Bools | None) -> None:
        self._done += rows
        self.tombstones += 0 if deleted is None else int(deleted.sum())
        if self._progress is not None:
            self._progress(self._log.shard, min(self._done, self._total), self._total)


class _Rebatched:
    """A stream of merged rows, given out in stretches of so many rows."""

    def __init__(self, merged: Iterator[Merged], schema: pa.Schema, with_marks: bool, note: Callable[[int, Bools | None], None]) -> None:
        self._merged, self._schema, self._with_marks, self._note = merged, schema, with_marks, note
        self._rest: pa.RecordBatch | None = None
        self._load()

    def _load(self) -> None:
        found = next(self._merged, None)
        if found is None:
            self._rest = None
            return
        rows, deleted = found
        self._note(rows.num_rows, deleted)
        columns = list(rows.columns)
        if self._with_marks:
            columns.append(pa.array(deleted if deleted is not None else np.zeros(rows.num_rows, np.bool_)))
        self._rest = pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def is_done(self) -> bool:
        return self._rest is None

    def up_to(self, rows: int) -> Iterator[pa.RecordBatch]:
        left = rows
        while left > 0 and self._rest is not None:
            batch = self._rest.slice(0, left)
            left -= batch.num_rows
            if batch.num_rows < self._rest.num_rows:
                self._rest = self._rest.slice(batch.num_rows)
            else:
                self._load()
            yield batch
