"""Vector search: the rows whose vectors are nearest to a given one.

Owns: the search over all sources. Does not own: distances (distance), which rows count (sources),
the order of the result (ranked).

The newest version of a key decides, then the filter, then ``k``: the rows that count are known
before any distance is, so a row that was replaced or deleted is never in the way of another.

It is exact over MemTables and over runs without an index: every live vector is looked at, in
chunks, so memory is bounded and the result does not depend on where rows are kept. A slice with an
index of its own (compaction builds them on large runs) is asked for more than is wanted, and for
twice as many as long as too few of them count; their distances are then made exact, so that they
can be compared with those of other sources. If the index has no more to give, all its rows are
looked at: there are never fewer rows than there could be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from headgate.columnar import Slice
from headgate.keys import Offsets
from headgate.manifest.model import AnyIndex, VectorIndex
from headgate.query.distance import Best, Probe, matrix_of, probe
from headgate.query.mask import Mask
from headgate.query.ranked import Asked, Candidates, counting
from headgate.query.scan import Load, whole
from headgate.query.shadow import KEY_BUDGET_BYTES
from headgate.query.sources import RunSource, Source, load_ahead, sources_of
from headgate.schema import RowRules
from headgate.view import ReadView

DISTANCE = "_distance"
_FEW_ROWS = 4096
"""So many are looked at one by one, index or not."""
_TAKE_SHARE = 16
"""If fewer than one row in so many counts, only those are read."""
_BATCH_BYTES = 4 << 20


def search(
    load: Load,
    rules: RowRules,
    column: str,
    query: Any,
    k: int = 10,
    *,
    metric: str = "l2",
    filter: str | None = None,
    columns: Sequence[str] | None = None,
    exact: bool = False,
) -> pa.Table:
    """The ``k`` rows whose vectors are nearest to ``query``, nearest first, with a column ``_distance``.

    Fewer only if no more rows have a distance: a row without a vector, or with a null or NaN in it, has none.

    Args:
        load: the views to search, one per shard.
        rules: the table of now.
        column: the vectors.
        query: as many numbers as a vector has.
        metric: "l2" (the square of the distance), "cosine" (1 - cos) or "dot" (1 - the product).
        filter: a SQL expression that the rows must meet.
        columns: which; None: all.
        exact: look at all rows, also where there is an index.

    Raises:
        InvalidInputError: there is no such column, or no such vector can be; with a hint. Nothing is read before.
    """
    sought = probe(rules.schema, column, query, metric)
    asked = Asked(rules, k, columns, filter, DISTANCE)

    def read(views: Sequence[ReadView]) -> pa.Table:
        budget = KEY_BUDGET_BYTES // max(1, len(views))
        load_ahead(views, key_budget_bytes=budget)
        sources = (source for view in views for source in sources_of(view, key_budget_bytes=budget))
        return asked.best([nearest_in(source, sought, asked, exact=exact) for source in sources])

    return whole(load, read)


def metric_of(indexes: Iterable[AnyIndex], column: str) -> str:
    """The metric of a column: its index's, or l2."""
    return next((index.metric for index in indexes if isinstance(index, VectorIndex) and index.column == column), "l2")


def nearest_in(source: Source, sought: Probe, asked: Asked, *, exact: bool = False) -> Candidates:
    """The rows of one source that may be among the nearest of all."""
    counts = counting(source, asked.filter)
    best = Best(asked.k, ordered=asked.is_ordered(source))
    for start, stop, part, name in _parts(source, sought):
        live = counts.count if (start, stop) == (0, source.rows) else _count(counts, start, stop)
        if not live:
            continue
        if exact or part is None or live <= _FEW_ROWS or not _add_by_index(best, part, name, sought, asked.k, counts, live, start):
            _add_all(best, source, sought, counts, live, start, stop)
    distances, offsets = best.result()
    return Candidates(source, offsets, distances)


def _parts(source: Source, sought: Probe) -> Iterator[tuple[int, int, Slice | None, str]]:
    """Rows from … to, and the slice that may have an index of them, with the column's name there."""
    if not isinstance(source, RunSource):
        yield 0, source.rows, None, ""
        return
    rules, run = source.rules, source.run
    index = rules.schema.get_field_index(sought.column)
    name = run.names.get(rules.field_ids[index])
    if name is None:
        return  # the column was added later: no row of the run has a vector
    kind = rules.schema.field(index).type
    for number, part in enumerate(run.slices):
        same = part.schema.field(name).type.value_type.equals(kind.value_type)
        yield int(run.starts[number]), int(run.starts[number + 1]), part if same else None, name


def _count(counts: Mask, start: int, stop: int) -> int:
    part = counts.part(start, stop - start)
    return stop - start if part is None else int(part.true_count)


def _add_by_index(best: Best, part: Slice, name: str, sought: Probe, k: int, counts: Mask, live: int, start: int) -> bool:
    """By a slice's own index. False: it has none, or cannot give enough, and nothing was added."""
    ask = max(2 * k, 2 * k * part.num_rows // live)
    while ask < part.num_rows:  # it doubles: no more often than the rows do
        found = part.nearest(name, sought.vector, ask, sought.metric, [])
        if found is None:
            return False
        offsets = found[0][counts.at(found[0] + start)]
        if len(offsets) >= min(k, live):
            vectors, _ = matrix_of(part.take(offsets, [name]).column(0))
            best.add(sought.distances(vectors), offsets + start)
            return True
        if len(found[0]) < ask:
            return False
        ask *= 2
    return False


def _add_all(best: Best, source: Source, sought: Probe, counts: Mask, live: int, start: int, stop: int) -> None:
    """All rows that count, one by one."""
    rows = int(np.clip(_BATCH_BYTES // (sought.dimension * sought.vector.itemsize), 1024, 1 << 16))
    if live * _TAKE_SHARE < stop - start:
        part = counts.part(start, stop - start)
        assert part is not None
        offsets = np.flatnonzero(part.to_numpy(zero_copy_only=False)) + start
        for at in range(0, len(offsets), rows):
            some = offsets[at : at + rows]
            _add(best, sought, source.take(some, [sought.column]).column(0), some)
        return
    at = start
    for batch in source.scan([sought.column], start=start, stop=stop, batch_rows=rows):
        numbers: Offsets = np.arange(at, at + batch.num_rows)
        vectors = batch.column(0)
        part = counts.part(at, batch.num_rows)
        at += batch.num_rows
        chosen = None if part is None else np.flatnonzero(part.to_numpy(zero_copy_only=False))
        _add(best, sought, vectors, numbers, chosen)


def _add(best: Best, sought: Probe, vectors: pa.FixedSizeListArray, numbers: Offsets, chosen: Offsets | None = None) -> None:
    """Vectors with their rows' numbers; ``chosen``: only these of them."""
    matrix, valid = matrix_of(vectors)
    if valid is not None:
        chosen = np.flatnonzero(valid) if chosen is None else chosen[valid[chosen]]
    if chosen is None:
        best.add(sought.distances(matrix), numbers)
    elif 2 * len(chosen) < len(matrix):
        best.add(sought.distances(matrix[chosen]), numbers[chosen])
    else:
        best.add(sought.distances(matrix)[chosen], numbers[chosen])
