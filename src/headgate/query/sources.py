"""The sources of a read, with their shadows: runs, MemTables and what is not durable yet, oldest first.

Owns: which rows of which source count, and reading them as the table of now. Does not own: finding
that out for runs (shadow) and for memory (memory), what is done with the rows (scan, lookup, …).

The newest version of a key decides. So a row counts if no newer source has its key; a tombstone
never does, and hides what is older all the same. Filter and limit come after that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import pyarrow as pa
import pyarrow.types as types

from headgate.clock import SYSTEM_CLOCK, map_ordered
from headgate.columnar.base import rows_without_columns
from headgate.columnar.expression import Filter
from headgate.keys import KeyOrder, Offsets
from headgate.query.mask import Mask
from headgate.query.memory import FreshRows, fresh_rows
from headgate.query.run_index import RunIndex
from headgate.query.shadow import KEY_BUDGET_BYTES, KnownRuns, fitting_keys, known_runs, load_keys, masks_of
from headgate.run import OpenRun
from headgate.schema import RowRules, as_now
from headgate.view import ReadView

_BATCH_BYTES = 4 << 20
_BATCH_ROWS_LEAST, _BATCH_ROWS_MOST = 256, 1 << 18
_MEMORY_BATCH_ROWS = 1 << 16
_BATCHES_HELD = 8
"""Of a run that is read ahead, at most: what waits to be taken, and what Lance has read of the next."""
AHEAD_BYTES = 64 << 20
"""What is held of all runs that are read ahead, about."""


class Source(Protocol):
    """Rows at offsets 0 … rows - 1, those of them that count, and their values as the table of now has them."""

    @property
    def rows(self) -> int: ...

    @property
    def mask(self) -> Mask:
        """Which rows count in this view."""
        ...

    def scan(
        self, columns: Sequence[str], *, start: int = 0, stop: int | None = None, batch_rows: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        """All rows in order, also those that do not count. ``columns`` may be empty."""
        ...

    def matching(self, filter: Filter, columns: Sequence[str]) -> Iterator[tuple[Offsets, pa.RecordBatch]] | None:
        """The rows that a filter finds, with their offsets, also those that do not count. None: scan, and filter the rows."""
        ...

    def take(self, offsets: Offsets, columns: Sequence[str]) -> pa.RecordBatch:
        """The rows at these offsets, in this order."""
        ...


@dataclass(frozen=True)
class RunSource:
    """A run."""

    run: OpenRun
    rules: RowRules
    mask: Mask

    @property
    def rows(self) -> int:
        return self.run.rows

    def scan(
        self, columns: Sequence[str], *, start: int = 0, stop: int | None = None, batch_rows: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        for batch in self.run.scan(self._stored(columns), start=start, stop=stop, batch_rows=batch_rows or self._batch_rows(columns)):
            yield as_now(batch, self.run.names, self.rules, columns)

    def matching(self, filter: Filter, columns: Sequence[str]) -> Iterator[tuple[Offsets, pa.RecordBatch]] | None:
        if filter.pushed is None or not self._is_of_now(filter.columns):
            return None
        found = self.run.matching(filter.pushed, self._stored(columns))
        return ((offsets, as_now(batch, self.run.names, self.rules, columns)) for offsets, batch in found)

    def take(self, offsets: Offsets, columns: Sequence[str]) -> pa.RecordBatch:
        stored = self._stored(columns)
        rows = self.run.take(offsets, stored) if stored and len(offsets) else rows_without_columns(len(offsets))
        return as_now(rows, self.run.names, self.rules, columns)

    def _batch_rows(self, columns: Sequence[str]) -> int:
        """So many that a batch stays small, whatever the rows hold."""
        return min(max(_BATCH_BYTES // max(1, self._row_bytes(columns)), _BATCH_ROWS_LEAST), _BATCH_ROWS_MOST)

    def _row_bytes(self, columns: Sequence[str]) -> int:
        kinds = [self.rules.schema.field(name).type for name in columns]
        if all(types.is_primitive(kind) for kind in kinds):
            return sum(int(kind.bit_width) for kind in kinds) // 8
        return self.run.record.bytes // max(1, self.rows)

    def ahead_bytes(self, columns: Sequence[str]) -> int | None:
        """What is held of it, about, while it is scanned ahead. None: that would gain nothing."""
        if self.run.columnar.scans_at_once <= 1 or not self.mask.count:
            return None
        return min(2 * self.rows * self._row_bytes(columns), _BATCHES_HELD * _BATCH_BYTES)  # as in the file, and as rows

    def _then(self, column: str) -> str | None:
        return self.run.names.get(self.rules.field_ids[self.rules.schema.get_field_index(column)])

    def _stored(self, columns: Sequence[str]) -> list[str]:
        """What those of the columns that the files have are called there."""
        return [then for name in columns if (then := self._then(name)) is not None]

    def _is_of_now(self, columns: Sequence[str]) -> bool:
        """Do the files have these columns under the same names and with the same types?"""
        then = self.run.schema
        return all(self._then(name) == name and then.field(name).type.equals(self.rules.schema.field(name).type) for name in columns)


@dataclass(frozen=True)
class MemorySource:
    """A MemTable, or what is not durable yet; offsets count its rows in the order they came."""

    fresh: FreshRows
    mask: Mask

    @property
    def rows(self) -> int:
        return self.fresh.rows

    def scan(
        self, columns: Sequence[str], *, start: int = 0, stop: int | None = None, batch_rows: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        return self.fresh.scan(columns, start=start, stop=stop, batch_rows=batch_rows or _MEMORY_BATCH_ROWS)

    def matching(self, filter: Filter, columns: Sequence[str]) -> Iterator[tuple[Offsets, pa.RecordBatch]] | None:
        return None

    def take(self, offsets: Offsets, columns: Sequence[str]) -> pa.RecordBatch:
        return self.fresh.take(offsets, columns)


def sources_of(view: ReadView, *, key_budget_bytes: int = KEY_BUDGET_BYTES) -> list[RunSource | MemorySource]:
    """All sources of a view, oldest first, with the rows of each that count."""
    rules = view.rules
    load_ahead([view], key_budget_bytes=key_budget_bytes)
    memory = in_memory(view)
    if not rules.key:
        return [
            *(RunSource(run, rules, Mask(run.rows) if run.outside is None else Mask.of(~run.outside)) for run in view.runs),
            *(MemorySource(rows, rows.mask) for rows in memory),
        ]
    masks = _run_masks(view, memory, key_budget_bytes)
    return [
        *(RunSource(run, rules, masks[run.record.id]) for run in view.runs),
        *(
            MemorySource(rows, rows.mask.hiding(*(newer.hidden_in(rows) for newer in memory[number + 1 :])))
            for number, rows in enumerate(memory)
        ),
    ]


def load_ahead(views: Sequence[ReadView], *, key_budget_bytes: int = KEY_BUDGET_BYTES) -> None:
    """Read what reads need to know of runs, of many at once where that pays. What is known is not read, nor what would not be kept."""
    parallel = max((view.cache.columnar.scans_at_once for view in views), default=1)
    if parallel > 1:
        reads = [read for view in views for read in _reads(view, key_budget_bytes)]
        for _ in map_ordered(SYSTEM_CLOCK, lambda read: read(), reads, parallel=parallel):
            pass


def _reads(view: ReadView, key_budget_bytes: int) -> Iterator[Callable[[], object]]:
    """What is to be read of a view's runs, in any order."""
    if not view.rules.key:
        yield from (partial(getattr, run, "outside") for run in view.runs if run.record.keep is not None)
        return
    known = runs_of(view)
    if len(known.indexes) == 1 and not view.pending and not any(fresh.count for fresh in view.fresh):
        yield from (index.deleted for id, index in known.indexes.items() if id not in known.masks)  # nothing hides any of its keys
        return
    fitting = dict(fitting_keys(known, key_budget_bytes))
    for index in known.indexes.values():
        if index in fitting:
            yield partial(_read_index, index, fitting[index])
        elif not index.is_loaded:
            yield partial(getattr, index.run, "slices")  # opened at once, and read in turn


def _read_index(index: RunIndex, most_bytes: int) -> None:
    index.load(most_bytes)
    index.deleted()


def in_memory(view: ReadView) -> list[FreshRows]:
    """What is newer than all runs, oldest first."""
    rules = view.rules
    order = KeyOrder(rules) if rules.key else None
    memory = [fresh_rows(fresh, rules, order) for fresh in view.fresh if fresh.count]
    if view.pending:
        memory.append(FreshRows(rules, (), (), ()).grown(view.pending, order))
    return memory


def runs_of(view: ReadView) -> KnownRuns:
    """What is known of a view's runs."""
    return known_runs(view, KeyOrder(view.rules))


def _run_masks(view: ReadView, memory: Sequence[FreshRows], key_budget_bytes: int) -> dict[str, Mask]:
    known = runs_of(view)
    masks = masks_of(known, key_budget_bytes)
    if not memory or not masks:
        return masks
    now = tuple(rows.token for rows in memory)
    merged = known.merged.get(now)
    if merged is None:
        load_keys(known, key_budget_bytes)
        merged = {id: mask.hiding(*(rows.hidden_in(known.indexes[id]) for rows in memory)) for id, mask in masks.items()}
        known.merged.clear()
        known.merged[now] = merged
    return merged
