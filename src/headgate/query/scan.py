"""Scans: the rows of a table that count, filtered, cut to a limit, as Arrow, in order of nothing but their sources.

Owns: what a scan asks for, reading it source by source, and beginning again when a run was collected
underneath. Does not own: which rows count (sources), which view (view, shard).

A run that is named may be replaced and collected while it is read. Nothing is wrong then, and a
newer view has all its rows. But rows of two views must not be mixed: what was given out cannot be
taken back. So the scan begins again only as long as nothing was given out; after that it ends in
``SnapshotExpiredError``. It never just ends early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pyarrow as pa

from headgate.clock import SYSTEM_CLOCK, in_order_ahead
from headgate.columnar.base import rows_without_columns
from headgate.columnar.expression import Filter
from headgate.errors import DataLossError, InvalidInputError, NotFoundError, ObjectMissingError, SnapshotExpiredError
from headgate.meters import ReadMeter
from headgate.query.shadow import KEY_BUDGET_BYTES
from headgate.query.sources import AHEAD_BYTES, RunSource, Source, load_ahead, sources_of
from headgate.schema import RowRules
from headgate.view import ReadView

Load = Callable[[], Sequence[ReadView]]
Result = TypeVar("Result")

_RELOADS_MAX = 8
_LIMIT_SMALL = 1 << 16


class Scan:
    """Rows to be read, as often as wanted: each call reads the table as it is then.

    Args:
        load: the views to read, one per shard.
        rules: the table of now.
        columns: which, in this order; None: all.
        filter: a SQL expression over any of the table's columns.
        limit: at most so many rows.
        meter: where reads are timed.

    Raises:
        InvalidInputError: there is no such column, the filter is no expression over the columns, or
            the limit is no number of rows. Nothing is read before.
    """

    def __init__(
        self,
        load: Load,
        rules: RowRules,
        *,
        columns: Sequence[str] | None = None,
        filter: str | None = None,
        limit: int | None = None,
        meter: ReadMeter | None = None,
    ) -> None:
        self._load, self._rules, self._meter = load, rules, meter
        self.columns = chosen_columns(rules, columns)
        self._filter = None if filter is None else Filter(filter, rules.schema)
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
            raise InvalidInputError(f"the limit is {limit!r}", hint="a whole number of rows, 0 or more, or None")
        self._limit = limit

    @property
    def schema(self) -> pa.Schema:
        """Of the result: the table's, with the columns asked for."""
        return result_schema(self._rules, self.columns)

    def to_batches(self) -> Iterator[pa.RecordBatch]:
        """The rows batch by batch, in bounded memory.

        Raises:
            SnapshotExpiredError: what is being read was collected meanwhile. Scan again.
        """
        schema = self.schema
        batches = streamed(self._load, lambda views: (exactly(rows, schema) for rows in self._rows(views)))
        return batches if self._meter is None else self._meter.streamed(batches)

    def to_arrow(self) -> pa.Table:
        return self._timed(self._to_arrow, lambda table: table.num_rows)

    def _to_arrow(self) -> pa.Table:
        schema = self.schema
        batches = whole(self._load, lambda views: [exactly(rows, schema) for rows in self._rows(views)])
        return pa.Table.from_batches(batches, schema)

    def _timed(self, read: Callable[[], Result], rows: Callable[[Result], int]) -> Result:
        return read() if self._meter is None else self._meter.whole(read, rows)

    def count(self) -> int:
        """How many rows; without a filter none of them is read."""
        return self._timed(self._count, lambda rows: 0)

    def _count(self) -> int:
        if self._filter is None:
            rows = whole(self._load, lambda views: sum(source.mask.count for source in all_sources(views, self._rules)))
        else:
            rows = whole(self._load, lambda views: sum(batch.num_rows for batch in self._rows(views, ())))
        return rows if self._limit is None else min(rows, self._limit)

    def to_pandas(self, **options: Any) -> Any:
        return self.to_arrow().to_pandas(**options)

    def to_polars(self) -> Any:
        import polars

        # polars cannot read vectors with nulls that are cut out of a longer array; joined, they stand alone.
        return polars.from_arrow(_unsliced(self.to_arrow()))

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        reader = pa.RecordBatchReader.from_batches(self.schema, self.to_batches())
        return reader.__arrow_c_stream__(requested_schema)

    def __repr__(self) -> str:
        return f"Scan(columns={self.columns}, filter={self._filter}, limit={self._limit})"

    def _rows(self, views: Sequence[ReadView], columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        wanted = self.columns if columns is None else columns
        # Most sources may not be needed: then each is looked at when the one before it was not enough.
        ahead = (self._limit is None or self._limit > _LIMIT_SMALL) and any(view.cache.columnar.scans_at_once > 1 for view in views)
        sources = all_sources(views, self._rules, ahead=ahead)
        if ahead:
            return limited(rows_ahead(list(sources), wanted, self._filter), self._limit)
        return limited((rows for source in sources for rows in visible_rows(source, wanted, self._filter)), self._limit)


def all_sources(views: Sequence[ReadView], rules: RowRules, *, ahead: bool = True) -> Iterator[Source]:
    """Of all shards, one after the other, read as one table of now; they share what may be kept of keys.

    Args:
        ahead: what must be known of all of them is read first, of many at once where that pays.
    """
    views, budget = [under(view, rules) for view in views], KEY_BUDGET_BYTES // max(1, len(views))
    if ahead:
        load_ahead(views, key_budget_bytes=budget)
    for view in views:
        yield from sources_of(view, key_budget_bytes=budget)


def rows_ahead(sources: Sequence[Source], columns: Sequence[str], filter: Filter | None) -> Iterator[pa.RecordBatch]:
    """The rows of many sources that count and match, in order; where each begins with waiting, many are read at once."""
    read = list(columns) if filter is None else list(dict.fromkeys([*columns, *filter.columns]))
    sizes = [source.ahead_bytes(read) if isinstance(source, RunSource) else None for source in sources]
    parallel = max((source.run.columnar.scans_at_once for source in sources if isinstance(source, RunSource)), default=1)
    return in_order_ahead(
        SYSTEM_CLOCK,
        lambda source: visible_rows(source, columns, filter),
        sources,
        parallel=parallel,
        sizes=sizes,
        budget=AHEAD_BYTES,
    )


def under(view: ReadView, rules: RowRules) -> ReadView:
    """The same state, its rows read by these rules: the schema may have changed since they were looked up."""
    return view if view.rules is rules else replace(view, rules=rules)


def chosen_columns(rules: RowRules, columns: Sequence[str] | None) -> list[str]:
    """The columns asked for, if the table has them."""
    names = rules.schema.names
    if columns is None:
        return list(names)
    if isinstance(columns, str):
        raise InvalidInputError(f"the columns are {columns!r}", hint=f"pass a list: [{columns!r}]")
    chosen = list(columns)
    for name in chosen:
        if name not in names:
            raise InvalidInputError(f"there is no column {name!r}", hint=f"columns are {', '.join(names)}")
    if len(set(chosen)) < len(chosen):
        raise InvalidInputError(f"a column is named twice: {', '.join(chosen)}", hint="name each once")
    return chosen


def result_schema(rules: RowRules, columns: Sequence[str]) -> pa.Schema:
    return pa.schema([rules.schema.field(name) for name in columns])


def visible_rows(source: Source, columns: Sequence[str], filter: Filter | None) -> Iterator[pa.RecordBatch]:
    """The rows of a source that count and match, in order, in batches that have rows."""
    if not source.mask.count:
        return
    if filter is not None:
        found = source.matching(filter, columns)
        if found is not None:
            for offsets, rows in found:
                kept = source.mask.at(offsets)
                if kept.any():
                    yield rows if kept.all() else _only(rows, pa.array(kept))
            return
    wanted = list(columns) if filter is None else list(dict.fromkeys([*columns, *filter.columns]))
    at = 0
    for rows in source.scan(wanted):
        counting = source.mask.part(at, rows.num_rows)
        at += rows.num_rows
        left = counting_rows(rows, counting, columns, filter)
        if left is not None:
            yield left


def counting_rows(
    rows: pa.RecordBatch, counting: pa.BooleanArray | None, columns: Sequence[str], filter: Filter | None
) -> pa.RecordBatch | None:
    """Those of some rows that count and match, with these columns; ``rows`` has them and the filter's. None: no row does."""
    if counting is not None:
        if not counting.true_count:
            return None
        rows = _only(rows, counting)
    if filter is not None:
        offsets = filter.matching(rows)
        if not len(offsets):
            return None
        rows = rows.select(list(columns)) if columns else rows_without_columns(len(offsets))
        if columns and len(offsets) < rows.num_rows:
            rows = rows.take(pa.array(offsets))
    return rows


def limited(batches: Iterator[pa.RecordBatch], limit: int | None) -> Iterator[pa.RecordBatch]:
    """The first rows; what is not needed is not read."""
    if limit is None:
        yield from batches
        return
    left = limit
    while left > 0:
        rows = next(batches, None)
        if rows is None:
            return
        yield rows.slice(0, left) if rows.num_rows > left else rows
        left -= rows.num_rows


def exactly(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(rows.columns, schema=schema) if len(schema) else rows


def _only(rows: pa.RecordBatch, counting: pa.BooleanArray) -> pa.RecordBatch:
    return rows.filter(counting) if rows.num_columns else rows.slice(0, counting.true_count)


def whole(load: Load, read: Callable[[Sequence[ReadView]], Result]) -> Result:
    """What ``read`` makes of one state; begun again while runs are collected underneath."""
    views = load()
    for _ in range(_RELOADS_MAX):
        try:
            return read(views)
        except ObjectMissingError as error:
            views = _reloaded(load, views, error)
    raise SnapshotExpiredError("runs are replaced and collected faster than they can be read", hint="try again")


def streamed(load: Load, read: Callable[[Sequence[ReadView]], Iterator[pa.RecordBatch]]) -> Iterator[pa.RecordBatch]:
    """The same, batch by batch: begun again only until the first batch."""
    views = load()
    for _ in range(_RELOADS_MAX):
        begun = False
        try:
            for rows in read(views):
                begun = True
                yield rows
            return
        except ObjectMissingError as error:
            if begun:
                raise SnapshotExpiredError(
                    f"{error.object} was collected while it was read", hint="scan again, or hold it by a checkpoint"
                ) from error
            views = _reloaded(load, views, error)
    raise SnapshotExpiredError("runs are replaced and collected faster than they can be read", hint="try again")


def _reloaded(load: Load, before: Sequence[ReadView], error: ObjectMissingError) -> Sequence[ReadView]:
    """Newer views. If the newest manifest still names what is missing, it was not collected: it is lost."""
    try:
        views = load()
    except NotFoundError as gone:  # it was there when the read began: its lease ended meanwhile
        raise SnapshotExpiredError(f"what was being read is gone: {gone.message}", hint="read again, at another checkpoint") from error
    old = {(view.shard, view.version) for view in before}
    for view in views:
        named = any(part.path == error.object for run in view.runs for part in run.record.slices)
        if named and (view.shard, view.version) in old:
            raise DataLossError(f"{error.object} is missing, and shard {view.shard} names it", object=error.object) from error
    return views


def _unsliced(table: pa.Table) -> pa.Table:
    columns = []
    for column in table.columns:
        if pa.types.is_fixed_size_list(column.type):
            whole = pa.concat_arrays([*column.chunks, pa.array([], column.type)])
            column = pa.chunked_array([whole.take(pa.array(range(len(whole)), pa.int64())) if whole.offset else whole])
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=table.schema)
