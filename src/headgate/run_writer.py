"""The files of one run, written as its merged rows come.

Owns: how many rows are held, which slices of the oldest run stay as they are, slices that are written while others become
durable. Does not own: the merging (merge), which runs, and how the result is published (compact).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from headgate.ahead import Fed, Task
from headgate.clock import SYSTEM_CLOCK, Clock, map_ordered
from headgate.columnar import Columnar
from headgate.failpoint import failpoint
from headgate.keys import Bools, KeyOrder, Keys
from headgate.manifest.model import SliceRecord
from headgate.merge import Merged, RunMerger
from headgate.run import DELETED, OpenRun
from headgate.schema import RowRules, as_now
from headgate.wal.log import ShardLog

_BATCH_ROWS_MAX = 1 << 17
_BATCH_ROWS_MIN = 1 << 4
_AHEAD_ROWS_LEAST = 1 << 8
_SCANS_AT_ONCE = 4
_SLICES_AT_ONCE = 2
"""While one is finished and becomes durable, the rows of the next are coming."""
_UNWRITTEN = SliceRecord(path="", rows=0, bytes=0)
_LAYERS, _HELD = 36, 64
"""So many times a batch of each run fits into the memory that is allowed; and which part of it merged rows may take that wait."""
_SAMPLE_ROWS = 64

Progress = Callable[[str, int, int], None]
"""Called with the shard, the rows done and the rows to do."""


@dataclass(frozen=True)
class Kept:
    """Slices that were named again."""

    count: int = 0
    rows: int = 0
    bytes: int = 0


def _batch_rows(runs: Sequence[OpenRun], max_memory: int) -> int:
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


def untouched_slices(
    runs: Sequence[OpenRun], rules: RowRules, slice_rows: int, slices_min: int = 2, clock: Clock | None = None
) -> Untouched | None:
    """Find the slices of the oldest run that can stay as they are. None: there are none. ``clock``: by threads of its.

    Only where slices can be named again as they are: same columns of the same types, no tombstones, several of
    them. A slice of less than half the size is kept only between others that are, where it would be written again as
    it is: else slices would only ever get more.
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
    touched = np.array([part.schema.types != types for part in parts])
    large = np.array([part.num_rows >= slice_rows // 2 for part in parts])
    between = np.zeros(len(parts) + 1, np.bool_)  # before each slice, and after the last

    def none_can_stay() -> bool:
        return bool(touched.all()) or (len(parts) > 1 and not (large & ~touched).any())

    if none_can_stay():
        return None

    def hit(run: OpenRun) -> tuple[Bools, Bools]:
        """The slices that a run has keys in, and the gaps between them that it has keys in."""
        slices, gaps = np.zeros(len(parts), np.bool_), np.zeros(len(parts) + 1, np.bool_)
        for batch in run.scan([run.names[id] for id in ids], batch_rows=_BATCH_ROWS_MAX):
            keys = order.of(as_now(batch, run.names, rules, key))
            below = keys.positions(bounds)
            starts, stops = below[0::2], below[1::2] + (keys.find(bounds.take(np.arange(1, 2 * len(parts), 2))) >= 0)
            slices |= stops > starts
            gaps |= np.append(starts, len(keys)) > np.append(0, stops)
            if slices.all():
                break
        return slices, gaps

    with closing(map_ordered(clock or SYSTEM_CLOCK, hit, runs[1:], parallel=1 if clock is None else _SCANS_AT_ONCE)) as hits:
        for slices, gaps in hits:
            touched |= slices
            between |= gaps
            if none_can_stay():
                return None
    kept = ~touched & large
    alone = np.append(True, kept[:-1]) & np.append(kept[1:], True) & ~between[:-1] & ~between[1:]  # nothing beside it will be written
    kept |= ~touched & alone
    return Untouched(tuple(map(bool, kept)), bounds) if kept.any() else None


class RunWriter:
    """Slices of one run, as they come.

    Args:
        clock: reading, merging, writing and syncing go on at the same time, by threads of its. None: one after the other, but for
            syncing, which waits for the disk and needs no core.
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
        self._writing: deque[tuple[int, Fed[pa.RecordBatch, SliceRecord] | Task[SliceRecord]]] = deque()
        self._held_bytes = 1
        self.on_slice: Callable[[], None] = lambda: None
        self.tombstones = self._written = 0
        self.kept = Kept()

    def write(self, runs: Sequence[OpenRun], untouched: Untouched | None, *, drop_tombstones: bool, max_memory: int) -> None:
        """All that the runs come to, durable; slices of the oldest that nothing touches are named again."""
        self._held_bytes = max_memory // _HELD
        try:
            self._write(runs, untouched, drop_tombstones, _batch_rows(runs, max_memory))
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
        oldest_rows = None
        if untouched is not None:
            oldest_rows = sum(part.rows for part, is_kept in zip(runs[0].record.slices, untouched.kept, strict=True) if not is_kept)
        with closing(
            RunMerger(
                runs,
                self._rules,
                drop_tombstones=drop_tombstones,
                batch_rows=batch_rows,
                clock=self._clock,
                held_bytes=self._held_bytes,
                oldest_rows=oldest_rows,
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
                    self._write_here(path, schema, source.up_to(self._slice_rows))
                else:
                    self._hand_over(self._clock, path, schema, source.up_to(self._slice_rows))
                self.on_slice()
                failpoint("compact.slice")

    def _write_here(self, path: str, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> None:
        """Write a slice; while it becomes durable, which takes no core, the rows of the next one are merged."""
        record, sync = self._columnar.write_ahead(path, schema, batches)
        if sync is None:
            self.slices.append(record)
            return

        def synced() -> SliceRecord:
            sync()
            return record

        while len(self._writing) >= _SLICES_AT_ONCE:
            self._settle()
        self._writing.append((len(self.slices), Task(self._log.clock, synced, "headgate-sync")))
        self.slices.append(_UNWRITTEN)

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
        number, work = self._writing[0]
        self.slices[number] = work.result()
        self._writing.popleft()  # only now: whatever interrupts us, no thread is forgotten

    def _give_up(self, failure: BaseException) -> None:
        """No thread stays behind."""
        for _, work in self._writing:
            if isinstance(work, Fed):
                work.end(failure)
        for _, work in self._writing:
            with suppress(BaseException):
                work.result()

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
