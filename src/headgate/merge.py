"""Merging runs into one: newest row of each key, in key order, in bounded memory.

Owns: the rows. Does not own: which runs, and how the result is published (compact).

All runs are sorted by key, so they are read side by side, a batch at a time. Up to the least of
the batches' last keys nothing new can come from any of them: so far they are merged, by whole
columns, and written on. What is held is a batch or two of each run, however large the runs are.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing

import numpy as np
import pyarrow as pa

from headgate.ahead import ahead, worked_ahead
from headgate.clock import SYSTEM_CLOCK, Clock, map_ordered
from headgate.keys import Bools, KeyOrder, Keys
from headgate.run import DELETED, OpenRun
from headgate.schema import RowRules, as_now

_AHEAD_MAX = 16
"""So many runs are read ahead: the others are small beside them."""
_LOADS_AT_ONCE = 4
_STEPS_AT_ONCE, _STEPS_HELD = 2, 16
_SHARE_LEAST, _SHARE_MOST = 0.25, 1.0

_Part = tuple[pa.RecordBatch, Keys, Bools | None]
"""Rows of one run, their keys, and which of them are tombstones (None: none)."""


class _Cursor:
    """One run, read from its start on: the rows that were read and not merged yet; none before the first ``load``."""

    def __init__(
        self, run: OpenRun, rules: RowRules, order: KeyOrder, batch_rows: int, slices: Sequence[int], clock: Clock | None = None
    ) -> None:
        self._rules, self._order, self._names = rules, order, run.names
        batches = self.read(run, batch_rows, slices)
        self._batches = batches if clock is None else ahead(clock, batches)
        self.close = self._batches.close
        self.rows: pa.RecordBatch | None = None
        self.keys: Keys = order.none()
        self.deleted: Bools | None = None

    @staticmethod
    def read(run: OpenRun, batch_rows: int, slices: Sequence[int]) -> Generator[pa.RecordBatch]:
        for number in slices:
            part, record = run.slices[number], run.record
            # Another table, or the other part of a shard that was split, may read the same file, and go on with it.
            is_ours = record.keep is None and record.slices[number].uri is None
            batches = part.read_through(batch_rows=batch_rows) if is_ours else part.scan(part.schema.names, batch_rows=batch_rows)
            for batch in batches:
                yield run.belonging(batch)

    def load(self) -> None:
        """The next batch, when the last one is used up."""
        while self.rows is None or not self.rows.num_rows:
            batch = next(self._batches, None)
            if batch is None:
                self.rows, self.keys, self.deleted = None, self._order.none(), None
                return
            if DELETED in batch.schema.names:
                marks = np.asarray(batch.column(DELETED).to_numpy(zero_copy_only=False), np.bool_)
                self.deleted = marks if marks.any() else None
            else:
                self.deleted = None
            self.rows = as_now(batch, self._names, self._rules, self._rules.schema.names)
            self.keys = self._order.of(self.rows)

    def begins_before(self, limit: Keys | None) -> bool:
        return self.rows is not None and (limit is None or int(self.keys.positions(limit)[0]) > 0)

    def last(self) -> Keys:
        return self.keys.part(len(self.keys) - 1, len(self.keys))

    def take(self, upto: Keys, *, inclusive: bool) -> _Part | None:
        """Give out all rows up to a key, or before it. None: there are none."""
        assert self.rows is not None
        end = int(self.keys.positions(upto)[0])
        if inclusive and end < len(self.keys) and bool(self.keys.part(end, end + 1).equal(upto)[0]):
            end += 1
        if end == 0:
            return None
        taken = self.rows.slice(0, end), self.keys.part(0, end), None if self.deleted is None else self.deleted[:end]
        self.rows, self.keys = self.rows.slice(end), self.keys.part(end, len(self.keys))
        self.deleted = None if self.deleted is None else self.deleted[end:]
        self.load()
        return taken


Merged = tuple[pa.RecordBatch, Bools | None]
"""Rows of the log's schema, and which of them are tombstones (None: none)."""


class RunMerger:
    """Adjacent runs, oldest first, given out merged, from the least key on.

    Args:
        drop_tombstones: nothing older is left that they would have to hide.
        batch_rows: rows of a run that are read at once, on the average.
        clock: the largest runs are read, and rows merged, ahead, by threads of its. None: no threads.
        held_bytes: merged rows that wait; whoever writes them takes many at a time, and none for a while.
        oldest_rows: so many of the oldest run will be asked for; None: all.
    """

    def __init__(
        self,
        runs: Sequence[OpenRun],
        rules: RowRules,
        *,
        drop_tombstones: bool,
        batch_rows: int,
        clock: Clock | None = None,
        held_bytes: int = 1,
        oldest_rows: int | None = None,
    ) -> None:
        self._runs, self._rules, self._batch_rows, self._drop_tombstones = runs, rules, batch_rows, drop_tombstones
        self._order, self._clock, self._held_bytes = KeyOrder(rules), clock, held_bytes
        self._rows = {run.record.id: run.rows for run in runs}
        if oldest_rows is not None:
            self._rows[runs[0].record.id] = oldest_rows
        self._large = {run.record.id for run in sorted(runs, key=lambda run: run.rows)[-_AHEAD_MAX:] if run.rows > batch_rows}
        self._newer: list[_Cursor] = []
        try:
            for run in runs[1:] if rules.key else ():
                self._newer.append(self._cursor(run, range(len(run.record.slices))))
            parallel = _LOADS_AT_ONCE if clock is not None else 1
            list(map_ordered(clock or SYSTEM_CLOCK, _Cursor.load, self._newer, parallel=parallel))
        except BaseException:
            self.close()
            raise

    def _cursor(self, run: OpenRun, slices: Sequence[int]) -> _Cursor:
        clock = self._clock if run.record.id in self._large and slices else None
        # Large runs in large batches: then all come to about the same key, and little of any waits for the others.
        share = len(self._runs) * self._rows[run.record.id] / max(1, sum(self._rows.values()))
        rows = max(1, int(self._batch_rows * min(max(share, _SHARE_LEAST), _SHARE_MOST)))
        return _Cursor(run, self._rules, self._order, rows, slices, clock)

    def merged(self, slices: Sequence[int] | None = None, limit: Keys | None = None) -> Generator[Merged]:
        """The merged rows of these slices of the oldest run (None: all) with what newer runs have before ``limit`` (None: to the end).

        To be called for one stretch of slices after the other. Without a key: all rows, in order.
        """
        oldest = range(len(self._runs[0].record.slices)) if slices is None else slices
        if not self._rules.key:
            for number, run in enumerate(self._runs):
                for batch in _Cursor.read(run, self._batch_rows, oldest if number == 0 else range(len(run.record.slices))):
                    yield _logged(as_now(batch, run.names, self._rules, self._rules.schema.names), self._rules), None
            return
        with (
            closing(self._cursor(self._runs[0], oldest)) as cursor,
            closing(self._worked(self._steps([cursor, *self._newer], limit))) as found,
        ):
            yield from ((rows, deleted) for rows, deleted in found if rows.num_rows)

    def close(self) -> None:
        """No more is wanted: no thread stays behind."""
        for cursor in self._newer:
            cursor.close()

    def _worked(self, steps: Iterator[list[_Part]]) -> Generator[Merged]:
        if self._clock is not None:
            return worked_ahead(
                self._clock,
                self._step,
                steps,
                parallel=_STEPS_AT_ONCE,
                held=_STEPS_HELD,
                size=lambda merged: int(merged[0].nbytes),
                held_bytes=self._held_bytes,
            )
        return (self._step(parts) for parts in steps)

    def _steps(self, cursors: Sequence[_Cursor], limit: Keys | None) -> Iterator[list[_Part]]:
        """What is merged at once, oldest first: up to the least last key of all batches nothing more can come from any run."""
        cursors[0].load()
        while live := [cursor for cursor in cursors if cursor.begins_before(limit)]:
            last, inclusive = _least([cursor.last() for cursor in live]), True
            if limit is not None and not _is_less(last, limit):
                last, inclusive = limit, False
            yield [part for cursor in live if (part := cursor.take(last, inclusive=inclusive)) is not None]

    def _step(self, parts: Sequence[_Part]) -> Merged:
        rows, deleted = _newest(parts)
        if deleted is not None and self._drop_tombstones:
            rows, deleted = rows.take(pa.array(np.flatnonzero(~deleted))), None
        return _logged(rows, self._rules), deleted


def _is_less(one: Keys, other: Keys) -> bool:
    return int(one.positions(other)[0]) == 1


def _least(keys: Sequence[Keys]) -> Keys:
    least = keys[0]
    for other in keys[1:]:
        if _is_less(other, least):
            least = other
    return least


def _newest(parts: Sequence[_Part]) -> Merged:
    if len(parts) == 1:
        rows, _, deleted = parts[0]
        return rows, deleted if deleted is not None and deleted.any() else None
    rows = pa.concat_batches([part[0] for part in parts])
    chosen = parts[0][1].joined(*(part[1] for part in parts[1:])).newest()
    deleted = None
    if any(part[2] is not None for part in parts):
        deleted = np.concatenate([part[2] if part[2] is not None else np.zeros(part[0].num_rows, np.bool_) for part in parts])
    if chosen is not None:
        rows = rows.take(pa.array(chosen))
        deleted = None if deleted is None else deleted[chosen]
    return rows, deleted if deleted is not None and deleted.any() else None


def _logged(rows: pa.RecordBatch, rules: RowRules) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(rows.columns, schema=rules.log_schema)
