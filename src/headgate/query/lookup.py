"""Lookups: the newest rows of given keys.

Owns: finding keys newest source first, and reading no more than the rows found. Does not own: where
keys are (memory, run_index), views.

A key is settled by the newest source that has it; older ones are not asked. So a lookup needs no
masks, only to know where keys are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
import pyarrow as pa

from headgate.clock import SYSTEM_CLOCK, map_ordered
from headgate.errors import InvalidInputError
from headgate.keys import Bools, KeyOrder, Keys, Offsets
from headgate.query.mask import Mask
from headgate.query.scan import Load, chosen_columns, result_schema, under, whole
from headgate.query.shadow import KEY_BUDGET_BYTES, load_keys
from headgate.query.sources import MemorySource, RunSource, Source, in_memory, load_ahead, runs_of
from headgate.schema import RowRules
from headgate.view import ReadView

_TAKE_ROWS = 256
_FEW_ROWS = 64


def lookup(load: Load, rules: RowRules, keys: Any, columns: Sequence[str] | None = None) -> pa.Table:
    """The newest row of each of these keys that there is one of, each once, in the order first asked for.

    Args:
        load: the views to read, one per shard.
        keys: values of the key column; for several columns tuples, dicts, or anything Arrow that has them.
        columns: which, in this order; None: all.

    Raises:
        InvalidInputError: the table has no key, keys are not of its type, or there is no such column.
    """
    chosen = chosen_columns(rules, columns)
    wanted = asked_keys(rules, keys)
    asked = Asked(wanted, KeyOrder(rules).of(wanted))
    return whole(load, lambda views: _looked_up(views, rules, chosen, asked))


class Asked:
    """Keys that are looked for, each once, ascending."""

    def __init__(self, table: pa.Table, keys: Keys) -> None:
        newest = keys.newest()
        self.keys = keys if newest is None else keys.take(newest)
        at = self.keys.find(keys)
        self.first = np.full(len(self.keys), len(keys), np.int64)
        """Where each was asked for first."""
        np.minimum.at(self.first, at, np.arange(len(keys)))
        self.table = table


def asked_keys(rules: RowRules, keys: Any) -> pa.Table:
    """Keys as a user gives them, as a table of the key columns."""
    if not rules.key:
        raise InvalidInputError("the table has no key to look up by", hint="scan it with a filter")
    types = [rules.schema.field(name).type for name in rules.key]
    try:
        if isinstance(keys, pa.Array | pa.ChunkedArray):
            keys = pa.table([keys], names=list(rules.key)[:1])
        if hasattr(keys, "__arrow_c_stream__") or hasattr(keys, "__arrow_c_array__"):
            table = pa.table(keys) if hasattr(keys, "__arrow_c_stream__") else pa.table(pa.record_batch(keys))
            arrays = [table.column(name).cast(kind) for name, kind in zip(rules.key, types, strict=True)]
        else:
            arrays = _arrays(rules.key, types, list(keys) if not isinstance(keys, str | bytes | Mapping) else None)
    except InvalidInputError:
        raise
    except (pa.ArrowException, KeyError, TypeError, ValueError, OverflowError) as error:
        raise InvalidInputError(
            f"the keys cannot be read: {error}", hint=f"the key is {', '.join(f'{n} {t}' for n, t in zip(rules.key, types, strict=True))}"
        ) from None
    if any(array.null_count for array in arrays):
        raise InvalidInputError("a key is null", hint="no row has such a key: leave it out")
    return pa.table(arrays, names=list(rules.key))


def _arrays(names: Sequence[str], types: Sequence[pa.DataType], keys: list[Any] | None) -> list[pa.Array]:
    if keys is None:
        raise InvalidInputError("the keys are not a list", hint="pass a list of keys, also for one: [key]")
    if keys and isinstance(keys[0], Mapping):
        return [_array([key[name] for key in keys], kind) for name, kind in zip(names, types, strict=True)]
    if len(names) == 1:
        if any(isinstance(key, tuple | list) for key in keys):
            keys = [key[0] if isinstance(key, tuple | list) and len(key) == 1 else key for key in keys]
        return [_array(keys, types[0])]
    if any(not isinstance(key, tuple | list) or len(key) != len(names) for key in keys):
        raise InvalidInputError("a key is no tuple of the key's columns", hint=f"pass tuples of ({', '.join(names)})")
    return [_array([key[number] for key in keys], kind) for number, kind in enumerate(types)]


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_integer(kind) and not set(map(type, values)) <= {int}:  # Arrow would cut 1.5 to 1, and find what nobody asked for
        strange = [value for value in values if value is not None and (isinstance(value, bool) or not isinstance(value, Integral))]
        if strange:
            raise InvalidInputError(f"the key {strange[0]!r} is no whole number", hint=f"the key's type is {kind}")
    return pa.array(values, kind)


def _looked_up(views: Sequence[ReadView], rules: RowRules, columns: Sequence[str], asked: Asked) -> pa.Table:
    stored = [name for name in columns if name not in rules.key]  # the keys are at hand
    found: list[_Found] = []
    left = np.arange(len(asked.keys))
    views = [under(view, rules) for view in views]
    for number in range(len(views)):
        left = _in_view(views[number:], rules, asked.keys, left, KEY_BUDGET_BYTES // len(views), found)
    schema = result_schema(rules, columns)
    if not found:
        return schema.empty_table()
    places = asked.first[np.concatenate([some.numbers for some in found])]
    order = np.argsort(places)
    table = asked.table.take(pa.array(places[order]))
    if stored:
        rows = pa.Table.from_batches(_taken(found, stored)).combine_chunks().take(pa.array(order))
        for name in stored:
            table = table.append_column(name, rows.column(name))
    return pa.Table.from_arrays([table.column(name) for name in columns], schema=schema)


@dataclass(frozen=True)
class _Found:
    """Rows of one source, and the numbers of the keys they are for."""

    source: Source
    offsets: Offsets
    numbers: Offsets
    parallel: int = 1
    """How many reads at once pay there."""


def _in_view(views: Sequence[ReadView], rules: RowRules, keys: Keys, left: Offsets, budget: int, found: list[_Found]) -> Offsets:
    """Find what the first of some shards has of the keys that are left, newest source first; the others are given back."""
    view = views[0]
    for rows in reversed(in_memory(view)):
        if not len(left):
            return left
        at = rows.find(keys.take(left))
        left = _settle(MemorySource(rows, rows.mask), at, rows.is_deleted(at[at >= 0]), left, found)
    if not len(left) or not view.runs:
        return left
    load_ahead(views, key_budget_bytes=budget)  # those of the others, too: most probably they are asked next
    known = runs_of(view)
    load_keys(known, budget)
    for run in reversed(view.runs):
        if not len(left):
            break
        index = known.indexes[run.record.id]
        at = index.find(keys.take(left))
        if run.outside is not None:
            at = np.where((at >= 0) & run.outside[at], -1, at)  # of another shard, which has a newer one
        source = RunSource(run, rules, Mask(run.rows))
        left = _settle(source, at, index.is_deleted(at[at >= 0]), left, found, run.columnar.parallel_reads)
    return left


def _settle(source: Source, at: Offsets, deleted: Bools, left: Offsets, found: list[_Found], parallel: int = 1) -> Offsets:
    here = at >= 0
    live = here.copy()
    live[here] = ~deleted
    if live.any():
        offsets, numbers = at[live], left[live]
        for start in range(0, len(offsets), _TAKE_ROWS):
            found.append(_Found(source, offsets[start : start + _TAKE_ROWS], numbers[start : start + _TAKE_ROWS], parallel))
    return left[~here]


def _taken(found: list[_Found], columns: Sequence[str]) -> list[pa.RecordBatch]:
    """All rows found; many at once where that pays."""
    few = sum(len(some.offsets) for some in found) <= _FEW_ROWS
    parallel = 1 if few else max(some.parallel for some in found)
    return list(map_ordered(SYSTEM_CLOCK, lambda some: some.source.take(some.offsets, columns), found, parallel=parallel))
