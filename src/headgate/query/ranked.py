"""The best rows of a search: chosen over all sources and shards, then read.

Owns: the order of the result, which rows a search may look at, reading no more than it takes. Does
not own: what a row is worth (vector, text), which rows count (sources).

Equal ones come in the order of their keys, so that the same rows give the same result wherever they
are kept; without a key, in the order of shards, sources and rows. Keys are read of those rows only
that may be among the best, and the columns asked for of those that are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headgate.columnar.expression import Filter
from headgate.errors import InvalidInputError
from headgate.keys import KeyOrder, Offsets
from headgate.query.mask import Mask
from headgate.query.scan import chosen_columns, result_schema
from headgate.query.sources import RunSource, Source
from headgate.schema import RowRules

_FEW_ROWS = 64
_TAKE_SHARE = 16
"""If fewer than one row in so many is wanted, only those are read."""


@dataclass(frozen=True)
class Candidates:
    """Rows of one source, and the number by which they are ranked: the least first."""

    source: Source
    offsets: Offsets
    numbers: npt.NDArray[np.float32]


class Asked:
    """What every search is asked: how many rows, which columns, which filter.

    Raises:
        InvalidInputError: something of it cannot be. Nothing is read before.
    """

    def __init__(self, rules: RowRules, k: Any, columns: Sequence[str] | None, filter: str | None, extra: str) -> None:
        if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
            raise InvalidInputError(f"k is {k!r}", hint="how many rows to find: a whole number, at least 1")
        if columns is not None and not isinstance(columns, str):
            columns = [name for name in columns if name != extra]  # it is always there, as the last one
        self.rules, self.k, self.extra = rules, int(k), extra
        self.columns = chosen_columns(rules, columns)
        self.filter = None if filter is None else Filter(filter, rules.schema)

    def is_ordered(self, source: Source) -> bool:
        """Are the source's rows in the order in which equal ones come? Then no more than ``k`` of them matter."""
        return isinstance(source, RunSource) or not self.rules.key

    def best(self, candidates: Sequence[Candidates], *, descending: bool = False) -> pa.Table:
        """The ``k`` least of all, or greatest, with their numbers in a column of their own."""
        candidates = [some for some in candidates if len(some.offsets)]
        numbers = np.concatenate([some.numbers for some in candidates]) if candidates else np.zeros(0, np.float32)
        ranked = -numbers if descending else numbers
        if len(numbers) > self.k:
            near = ranked <= np.partition(ranked, self.k - 1)[self.k - 1]
            at = np.cumsum([0, *(len(some.offsets) for some in candidates)])
            candidates = [
                Candidates(some.source, some.offsets[near[start:stop]], some.numbers[near[start:stop]])
                for some, start, stop in zip(candidates, at[:-1], at[1:], strict=True)
            ]
            numbers, ranked = numbers[near], ranked[near]
        rows, order = self._ordered([some for some in candidates if len(some.offsets)], ranked)
        schema = result_schema(self.rules, self.columns).append(pa.field(self.extra, pa.float32(), False))
        return pa.Table.from_arrays([*rows.columns, pa.array(numbers[order], pa.float32())], schema=schema)

    def _ordered(self, candidates: Sequence[Candidates], ranked: npt.NDArray[np.float32]) -> tuple[pa.Table, Offsets]:
        """The columns asked for of the best, in order, and which of the candidates they are."""
        key, count = self.rules.key, len(ranked)
        if not count:
            return result_schema(self.rules, self.columns).empty_table(), np.zeros(0, np.int64)
        if not key:
            order = np.lexsort((np.arange(count), ranked))[: self.k]
            return self._read(candidates, order), order
        at_once = count <= 2 * self.k + _FEW_ROWS  # what is read in vain costs less than reading twice
        names = list(dict.fromkeys([*key, *self.columns])) if at_once else list(key)
        rows = pa.concat_tables([self._table(some.source, some.offsets, names) for some in candidates])
        ranks = np.empty(count, np.int64)
        ranks[KeyOrder(self.rules).of(rows).order()] = np.arange(count)
        order = np.lexsort((ranks, ranked))[: self.k]
        return rows.select(self.columns).take(pa.array(order)) if at_once else self._read(candidates, order), order

    def _read(self, candidates: Sequence[Candidates], order: Offsets) -> pa.Table:
        """The columns of the chosen ones, in their order; each source is asked once."""
        owners = np.repeat(np.arange(len(candidates)), [len(some.offsets) for some in candidates])[order]
        offsets = np.concatenate([some.offsets for some in candidates])[order]
        tables, places = [], []
        for number in np.flatnonzero(np.bincount(owners)).tolist():
            mine = np.flatnonzero(owners == number)
            tables.append(self._table(candidates[number].source, offsets[mine], self.columns))
            places.append(mine)
        return pa.concat_tables(tables).take(pa.array(np.argsort(np.concatenate(places))))

    def _table(self, source: Source, offsets: Offsets, columns: Sequence[str]) -> pa.Table:
        return pa.Table.from_arrays(source.take(offsets, columns).columns, schema=result_schema(self.rules, columns))


def counting(source: Source, filter: Filter | None) -> Mask:
    """Which rows of a source count and match."""
    if filter is None or not source.mask.count:
        return source.mask
    counts = np.zeros(source.rows, np.bool_)
    found = source.matching(filter, ())
    if found is not None:
        for offsets, _ in found:
            counts[offsets[source.mask.at(offsets)]] = True
        return Mask.of(counts)
    at = 0
    for rows in source.scan(filter.columns):
        offsets = np.arange(at, at + rows.num_rows)
        live = source.mask.part(at, rows.num_rows)
        at += rows.num_rows
        if live is not None:  # what does not count is not looked at: it may hold what the filter cannot take
            offsets = offsets[live.to_numpy(zero_copy_only=False)]
            rows = rows.filter(live) if rows.num_columns else rows.slice(0, len(offsets))
        counts[offsets[filter.matching(rows)]] = True
    return Mask.of(counts)


def matching_at(source: Source, filter: Filter, offsets: Offsets) -> npt.NDArray[np.bool_]:
    """Which of some rows that count match."""
    if len(offsets) * _TAKE_SHARE >= source.rows:
        return counting(source, filter).at(offsets)
    matches = np.zeros(len(offsets), np.bool_)
    if len(offsets):
        matches[filter.matching(source.take(offsets, filter.columns))] = True
    return matches
