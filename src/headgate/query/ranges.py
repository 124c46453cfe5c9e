"""Ranges of keys: parts of a shard that many workers read beside each other, each by itself.

Owns: cutting a view into ranges, and merging one of them. Does not own: whole scans (scan).

A range is read from each source alone: where it begins is found by a few keys, by whoever cuts, and only
its own keys are compared. So a worker reads about its share of the files, and needs to know nothing of the
others. Ranges are given by rows of the key's columns: ``lo`` belongs to the range, ``hi`` does not.

The oldest source of a range, most often the largest by far, hides nothing. So its keys are not gathered:
they come with its rows, batch by batch, and are looked for among those of the newer ones. Which rows count is
kept, and a range that is read again is read without its keys.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa

from headgate.clock import SYSTEM_CLOCK, map_ordered
from headgate.columnar.base import rows_without_columns
from headgate.columnar.expression import Filter
from headgate.errors import InvalidInputError
from headgate.keys import KeyOrder, Keys, Offsets
from headgate.query.mask import Mask
from headgate.query.memory import FreshRows
from headgate.query.run_index import RunIndex
from headgate.query.scan import chosen_columns, counting_rows, exactly, limited, result_schema, visible_rows
from headgate.query.shadow import KnownRuns, shadowed
from headgate.query.sources import RunSource, Source, in_memory, runs_of, sources_of
from headgate.schema import RowRules
from headgate.view import ReadView

_SAMPLES = 32
_PART_ROWS = 1 << 21
_PARTS_MAX = 1 << 16
_TAKE_ROWS = 1 << 16
_HELD_BYTES = 16 << 20


def split_points(view: ReadView, n: int) -> pa.RecordBatch:
    """Keys that cut a view into about ``n`` ranges of about as many rows: ascending, at most n - 1 of them.

    With p of them there are p + 1 ranges: up to the first, between each and the next, and from the last on.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise InvalidInputError(f"a view cannot be cut into {n!r} ranges", hint="a whole number, 1 or more")
    rules, order = view.rules, _order(view)
    indexes, memory = list(runs_of(view).indexes.values()), in_memory(view)
    total = sum(index.rows for index in indexes) + sum(rows.rows for rows in memory)
    none = pa.RecordBatch.from_arrays([pa.array([], f.type) for f in rules.key_schema], schema=rules.key_schema)
    if n == 1 or not total:
        return none
    tables, weights = [], []
    for index in indexes:
        offsets = _spread(index.rows, _share(index.rows, total, n))
        if len(offsets):
            tables.append(pa.table(RunSource(index.run, rules, Mask(index.rows)).take(offsets, rules.key)))
            weights.append(np.full(len(offsets), index.rows / len(offsets)))
    for rows in memory:
        offsets = _spread(rows.rows, _share(rows.rows, total, n))
        if len(offsets):
            tables.append(pa.table(rows.take(offsets, rules.key)))
            weights.append(np.full(len(offsets), rows.rows / len(offsets)))
    samples = pa.concat_tables([pa.table(table.columns, names=list(rules.key)) for table in tables])
    keys, weight = order.of(samples), np.concatenate(weights)
    ascending = keys.order()
    before = np.cumsum(weight[ascending]) - weight[ascending]
    chosen = np.searchsorted(before, total * np.arange(1, n) / n)
    chosen = np.unique(chosen[chosen < len(ascending)])
    picked = keys.take(ascending[chosen])
    different = np.append(True, ~picked.same_as_next()) if len(chosen) else np.zeros(0, np.bool_)
    points = samples.take(pa.array(ascending[chosen[different]])).combine_chunks()
    return pa.RecordBatch.from_arrays([_one(column) for column in points.columns], schema=rules.key_schema)


def _share(rows: int, total: int, n: int) -> int:
    return max(1, round(_SAMPLES * n * rows / total))


def _spread(rows: int, count: int) -> Offsets:
    """Offsets in the middle of ``count`` parts of a source."""
    count = min(rows, count)
    return ((2 * np.arange(count, dtype=np.int64) + 1) * rows // max(1, 2 * count)).astype(np.int64)


def _one(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


@dataclass(frozen=True)
class KeyRange:
    """Keys from ``low`` up to, not including, ``high``, and where they are in each run: from and up to which offset."""

    low: pa.RecordBatch | None
    high: pa.RecordBatch | None
    bounds: tuple[tuple[int, int], ...]


def cut_ranges(view: ReadView, n: int) -> list[KeyRange]:
    """A view in about ``n`` ranges of about as many rows; together they are all of it."""
    points = split_points(view, n)
    keys = _order(view).of(points)
    found = [[0, *map(int, index.lower_bounds(keys)), index.rows] for index in runs_of(view).indexes.values()]
    cuts = [None, *(points.take(pa.array([at], pa.int64())) for at in range(points.num_rows)), None]
    return [
        KeyRange(low, high, tuple((offsets[at], max(offsets[at], offsets[at + 1])) for offsets in found))
        for at, (low, high) in enumerate(pairwise(cuts))
    ]


def scan_range(
    view: ReadView,
    columns: Sequence[str] | None = None,
    lo: pa.RecordBatch | None = None,
    hi: pa.RecordBatch | None = None,
    *,
    filter: str | None = None,
    limit: int | None = None,
    bounds: Sequence[tuple[int, int]] | None = None,
) -> Iterator[pa.RecordBatch]:
    """The rows that count with keys from ``lo`` up to, not including, ``hi``; each one row of the key's columns, or None: no bound.

    Args:
        bounds: where that is in each run, if it is known (``cut_ranges``); else it is looked for.

    Raises:
        ObjectMissingError: a run was collected meanwhile; take a new view.
    """
    rules, order = view.rules, _order(view)
    chosen = chosen_columns(rules, columns)
    condition = None if filter is None else Filter(filter, rules.schema)
    schema = result_schema(rules, chosen)
    low, high = (None if bound is None else _bound(order, bound) for bound in (lo, hi))
    known, memory = runs_of(view), in_memory(view)

    def read() -> Iterator[pa.RecordBatch]:
        for part in _parts(list(known.indexes.values()), low, high, bounds):
            for rows in _merged(view, order, known, memory, part, chosen, condition):
                yield exactly(rows, schema)

    return limited(read(), limit)


def count_rows(view: ReadView) -> int:
    """How many rows its sources have together, also those that do not count. None is read."""
    return sum(run.rows for run in view.runs) + sum(rows.rows for rows in in_memory(view))


def scan_offsets(
    view: ReadView,
    columns: Sequence[str] | None = None,
    start: int = 0,
    stop: int | None = None,
    *,
    filter: str | None = None,
) -> Iterator[pa.RecordBatch]:
    """The same for a table without a key, whose rows all count: those at some offsets, counted through all sources, oldest first."""
    rules = view.rules
    if rules.key:
        raise InvalidInputError("the table has a key, so rows of one source may hide others", hint="read ranges of keys")
    chosen = chosen_columns(rules, columns)
    condition = None if filter is None else Filter(filter, rules.schema)
    schema = result_schema(rules, chosen)
    first = 0
    for source in sources_of(view):
        low, high = max(start - first, 0), min(source.rows, source.rows if stop is None else stop - first)
        first += source.rows
        if low < high:
            bits = source.mask.bits
            mask = Mask(high - low, None if bits is None else bits.slice(low, high - low))
            for rows in visible_rows(_PartOfSource(source, low, high, mask), chosen, condition):
                yield exactly(rows, schema)


def _order(view: ReadView) -> KeyOrder:
    if not view.rules.key:
        raise InvalidInputError("the table has no key, so no ranges of keys", hint="read its runs one by one")
    return KeyOrder(view.rules)


def _bound(order: KeyOrder, bound: pa.RecordBatch) -> Keys:
    if bound.num_rows != 1:
        raise InvalidInputError(f"a bound has {bound.num_rows} rows", hint="one row of the key's columns")
    table = pa.table([bound.column(name).cast(kind) for name, kind in zip(order.names, order.types, strict=True)], names=list(order.names))
    return order.of(table)


class _Range:
    """Where a range is in each run: from and up to which offset. Its bounds tell which rows in memory it has."""

    def __init__(self, bounds: list[tuple[int, int]], low: Keys | None, high: Keys | None) -> None:
        self.bounds, self.low, self.high = bounds, low, high


def _parts(indexes: Sequence[RunIndex], low: Keys | None, high: Keys | None, bounds: Sequence[tuple[int, int]] | None) -> Iterator[_Range]:
    """The range in parts, of which each has few enough keys to hold."""
    if bounds is None:
        starts = [0 if low is None else index.lower_bound(low) for index in indexes]
        stops = [index.rows if high is None else index.lower_bound(high) for index in indexes]
    else:
        assert len(bounds) == len(indexes), "bounds of another view"
        starts, stops = [start for start, _ in bounds], [stop for _, stop in bounds]
    sizes = [max(0, stop - start) for start, stop in zip(starts, stops, strict=True)]
    gathered = sum([size for size in sizes if size][1:])  # not those of the oldest
    count = min(_PARTS_MAX, 1 + gathered // _PART_ROWS)
    largest = int(np.argmax(sizes)) if sizes else 0
    cuts: list[Keys | None] = [low]
    for number in range(1, count):
        offset = starts[largest] + sizes[largest] * number // count
        cuts.append(indexes[largest].at(np.array([offset], np.int64)))
    cuts.append(high)
    for first, last in pairwise(cuts):
        begins = starts
        starts = stops if last is high else [index.lower_bound(last) for index in indexes if last is not None]
        yield _Range([(a, max(a, b)) for a, b in zip(begins, starts, strict=True)], first, last)


def _merged(
    view: ReadView,
    order: KeyOrder,
    known: KnownRuns,
    memory: Sequence[FreshRows],
    part: _Range,
    columns: Sequence[str],
    condition: Filter | None,
) -> Iterator[pa.RecordBatch]:
    """The rows of a range that count and match, source by source."""
    runs = [(index, start, stop) for index, (start, stop) in zip(known.indexes.values(), part.bounds, strict=True) if start < stop]
    fresh = [(rows, *rows.between(part.low, part.high)) for rows in memory]
    bounds = None if any(len(keys) for _, keys, _ in fresh) else tuple(part.bounds)  # of runs alone: then it holds as long as they do
    masks = None if bounds is None else known.ranges.get(bounds)
    if masks is not None:
        for (index, start, stop), mask in zip(runs, masks, strict=True):
            yield from visible_rows(_PartOfSource(RunSource(index.run, view.rules, mask), start, stop, mask), columns, condition)
        return
    wanted = list(dict.fromkeys([*columns, *(condition.columns if condition else ())]))
    at_once = view.cache.columnar.scans_at_once  # all of it is held anyway
    held = list(map_ordered(SYSTEM_CLOCK, lambda run: _held(view.rules, order, *run, wanted), runs[1:], parallel=at_once))
    newer = [keys for keys, _ in held] + [keys for _, keys, _ in fresh if len(keys)]
    hidden = shadowed(newer)
    found: list[Mask] = []
    if runs:
        found.append((yield from _oldest(view.rules, order, *runs[0], newer, columns, condition)))
    for number, (index, start, stop) in enumerate(runs[1:]):
        deleted = index.deleted_between(start, stop)
        own = Mask(stop - start) if deleted is None else deleted.opposite()
        mask, at, batches = own.hiding(hidden[number]), 0, held[number][1]
        found.append(mask)
        if batches is None:
            yield from visible_rows(_PartOfSource(RunSource(index.run, view.rules, own), start, stop, mask), columns, condition)
            continue
        for batch in batches:
            kept = counting_rows(batch, mask.part(at, batch.num_rows), columns, condition)
            at += batch.num_rows
            if kept is not None:
                yield kept
    if bounds is not None:
        known.ranges.keep(bounds, tuple(found))
    number = len(held)
    for rows, keys, offsets in fresh:
        if len(keys):
            newest = np.ones(len(offsets), np.bool_)
            newest[hidden[number]] = False
            number += 1
            chosen = offsets[newest]
            yield from visible_rows(_RowsOfMemory(rows, np.sort(chosen[rows.mask.at(chosen)])), columns, condition)


def _held(
    rules: RowRules, order: KeyOrder, index: RunIndex, start: int, stop: int, wanted: Sequence[str]
) -> tuple[Keys, list[pa.RecordBatch] | None]:
    """The keys of some rows of a run that follow each other, and the rows, if they are few: then they are read once, not twice."""
    record = index.run.record
    if not wanted or index.keys is not None or record.bytes // max(1, record.rows) * (stop - start) > _HELD_BYTES:
        return index.between(start, stop), None
    read = list(dict.fromkeys([*wanted, *order.names]))
    batches = list(RunSource(index.run, rules, Mask(index.rows)).scan(read, start=start, stop=stop))
    keys = [order.of(batch) for batch in batches]
    return order.none().joined(*keys) if len(keys) != 1 else keys[0], [batch.select(list(wanted)) for batch in batches]


def _oldest(
    rules: RowRules,
    order: KeyOrder,
    index: RunIndex,
    start: int,
    stop: int,
    newer: Sequence[Keys],
    columns: Sequence[str],
    condition: Filter | None,
) -> Generator[pa.RecordBatch, None, Mask]:
    """Some rows of the oldest run that follow each other, without those whose keys newer sources have. Returns which are left."""
    deleted = index.deleted_between(start, stop)
    mask = Mask(stop - start) if deleted is None else deleted.opposite()
    source = RunSource(index.run, rules, mask)
    newer = [keys for keys in newer if len(keys)]
    if not newer:
        yield from visible_rows(_PartOfSource(source, start, stop, mask), columns, condition)
        return mask
    together = newer[0] if len(newer) == 1 else newer[0].joined(*newer[1:])
    newest = together.newest()
    together = together if newest is None else together.take(newest)
    wanted = list(dict.fromkeys([*columns, *(condition.columns if condition else ())]))
    read, at, hidden = list(dict.fromkeys([*wanted, *order.names])), 0, []
    for rows in source.scan(read, start=start, stop=stop):
        part = mask.part(at, rows.num_rows)
        found = order.of(rows).overlap(together)
        if len(found):
            hidden.append(found + at)
            counts = np.ones(rows.num_rows, np.bool_) if part is None else np.asarray(part.to_numpy(zero_copy_only=False)).copy()
            counts[found] = False
            part = Mask.of(counts).bits
        at += rows.num_rows
        kept = counting_rows(rows.select(wanted) if wanted else rows_without_columns(rows.num_rows), part, columns, condition)
        if kept is not None:
            yield kept
    return mask.hiding(*hidden)


@dataclass(frozen=True)
class _PartOfSource:
    """Rows of a source that follow each other; offsets count from the first of them."""

    source: Source
    start: int
    stop: int
    mask: Mask

    @property
    def rows(self) -> int:
        return self.stop - self.start

    def scan(
        self, columns: Sequence[str], *, start: int = 0, stop: int | None = None, batch_rows: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        end = self.stop if stop is None else min(self.stop, self.start + stop)
        return self.source.scan(columns, start=self.start + start, stop=end, batch_rows=batch_rows)

    def matching(self, filter: Filter, columns: Sequence[str]) -> None:
        return None

    def take(self, offsets: Offsets, columns: Sequence[str]) -> pa.RecordBatch:
        return self.source.take(offsets + self.start, columns)


@dataclass(frozen=True)
class _RowsOfMemory:
    """Some rows in memory, all of which count."""

    fresh: FreshRows
    offsets: Offsets

    @property
    def rows(self) -> int:
        return len(self.offsets)

    @property
    def mask(self) -> Mask:
        return Mask(self.rows)

    def scan(
        self, columns: Sequence[str], *, start: int = 0, stop: int | None = None, batch_rows: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        chosen = self.offsets[start:stop]
        for at in range(0, len(chosen), batch_rows or _TAKE_ROWS):
            yield self.fresh.take(chosen[at : at + (batch_rows or _TAKE_ROWS)], columns)

    def matching(self, filter: Filter, columns: Sequence[str]) -> None:
        return None

    def take(self, offsets: Offsets, columns: Sequence[str]) -> pa.RecordBatch:
        return self.fresh.take(self.offsets[offsets], columns)
