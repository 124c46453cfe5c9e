"""Every form of read, compared with the model.

Owns: asking a table, and saying what is wrong with the answer. Does not own: what the table should
hold (table_model.py), what happens to it between two reads (machine.py).

All forms here are for a moment in which nothing is pending, so there is one right answer.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.types as types
import pytest

import headgate as hg
from tests.model.table_model import (
    WORDS,
    Column,
    Key,
    Predicate,
    Row,
    TableModel,
    distances,
    predicate,
    scores,
    tuples,
    value_of,
)


class Asking:
    """One handle, one model, and chance to choose what is asked."""

    def __init__(self, table: hg.Table, model: TableModel, chance: random.Random) -> None:
        self.table, self.model, self.chance = table, model, chance
        self.rows = model.rows()

    def columns(self) -> list[Column] | None:
        """Some, in any order; None: all."""
        if self.chance.random() < 0.3:
            return None
        return self.chance.sample(self.model.columns, self.chance.randrange(1, len(self.model.columns) + 1))

    def filter(self) -> Predicate | None:
        return None if self.chance.random() < 0.4 else predicate(self.model.columns, self.chance)

    def scan(self, at: str | None = None, rows: Sequence[Row] | None = None) -> None:
        """Columns, filter and limit, in one of the ways in which rows come out."""
        model, chance = self.model, self.chance
        rows = self.rows if rows is None else rows
        chosen, test = self.columns(), self.filter()
        limit = chance.choice([None, None, 0, 1, 2, 7, 1000])
        scan = self.table.scan(names(chosen), filter=sql_of(test), limit=limit, at=at)
        right = model.as_tuples([row for row in rows if test is None or test(row)], chosen)
        told = f"{scan!r}"
        if chance.random() < 0.3:
            assert scan.count() == min(right.total(), 1 << 60 if limit is None else limit), told
        found = chance.choice(OUTPUTS)(scan)
        assert found.schema.names == [column.name for column in chosen or model.columns], told
        self.same(Counter(tuples(found)), right, limit, told)

    def same(self, found: Counter[Any], right: Counter[Any], limit: int | None, told: str) -> None:
        if limit is None:
            assert found == right, f"{told}: missing {right - found}, too much {found - right}"
        else:
            assert not found - right, f"{told}: too much {found - right}"
            assert found.total() == min(limit, right.total()), told

    def everything(self) -> None:
        """The whole table, with the types that it has."""
        found = self.table.scan().to_arrow()
        assert found.schema.equals(self.model.schema), (found.schema, self.model.schema)
        self.same(Counter(tuples(found)), self.model.as_tuples(self.rows), None, "scan()")

    def count(self) -> None:
        assert self.table.scan().count() == len(self.rows)
        test = predicate(self.model.columns, self.chance)
        assert self.table.scan(filter=test.sql).count() == sum(map(test, self.rows)), test.sql

    def lookup(self, keys: Sequence[Key]) -> None:
        """Of present and absent keys, some of them twice: the rows in the order asked for."""
        model, chance = self.model, self.chance
        if not model.key:
            with pytest.raises(hg.InvalidInputError):
                self.table.lookup([1])
            return
        there = {tuple(row[id] for id in model.key): row for row in self.rows}
        asked = chance.choices(list(keys), k=chance.randrange(1, 8)) + chance.sample(list(there), min(len(there), 3))
        chosen = self.columns()
        if chance.random() < 0.5:
            given: Any = [key[0] for key in asked] if len(model.key) == 1 else asked
        else:
            parts = [model.column(id) for id in model.key]
            given = pa.table({part.name: pa.array([key[i] for key in asked], part.type) for i, part in enumerate(parts)})
        found = tuples(self.table.lookup(given, names(chosen)))
        right = [there[key] for key in dict.fromkeys(asked) if key in there]
        assert found == [tuple(row.get(column.id) for column in chosen or model.columns) for row in right], f"lookup({asked})"

    def sql(self) -> None:
        """Counts, sums and groups."""
        numbers = [column for column in self.model.columns if types.is_integer(column.type)]
        if not numbers:
            return
        number, group, test = self.chance.choice(numbers), self.chance.choice(plain(self.model)), predicate(self.model.columns, self.chance)
        select = f"select {group.quoted} as g, count(*) as c, min({number.quoted}) as low, max({number.quoted}) as high"
        query = f"{select} from t where {test.sql} group by 1"
        groups: dict[Any, list[Any]] = {}
        for row in filter(test, self.rows):
            groups.setdefault(row.get(group.id), []).append(row.get(number.id))
        right = set()
        for value, members in groups.items():
            known = [member for member in members if member is not None]
            right.add((value, len(members), min(known, default=None), max(known, default=None)))
        assert set(tuples(self.table.sql(query))) == right, query
        query = f"select count(*), count({number.quoted}), sum(cast({number.quoted} as decimal(38, 0))) from t"
        known = [row[number.id] for row in self.rows if row.get(number.id) is not None]
        assert tuples(self.table.sql(query)) == [(len(self.rows), len(known), sum(known) if known else None)], query

    def search(self) -> None:
        for column in self.model.columns:
            if types.is_fixed_size_list(column.type):
                query = list(value_of(Column(0, "", column.type, nullable=False), self.chance))
                ask: Ask = lambda k, test, column=column, query=query: self.table.search(column.name, query, k, sql_of(test))  # noqa: E731
                self.ranked(ask, distances(self.rows, column, query), f"search({column.name!r}, {query})")

    def search_text(self) -> None:
        for column in self.model.columns:
            if column.text:
                query = " ".join(self.chance.choices(WORDS, k=self.chance.randrange(1, 4)))
                ask: Ask = lambda k, test, column=column, query=query: self.table.search_text(column.name, query, k, sql_of(test))  # noqa: E731
                worth = [None if score is None else -score for score in scores(self.rows, column, query)]
                self.ranked(ask, worth, f"search_text({column.name!r}, {query!r})", sign=-1)

    def ranked(self, ask: Ask, worth: Sequence[float | None], told: str, sign: int = 1) -> None:
        """The best first, none of them stale, as many as there are: of equals any may come."""
        k, test = self.chance.choice([1, 2, 5, 1000]), self.filter()
        found = ask(k, test)
        told += f", k={k}, filter={sql_of(test)}"
        by_row: dict[tuple[Any, ...], list[float]] = {}
        for row, value in zip(self.rows, worth, strict=True):
            if value is not None and (test is None or test(row)):
                by_row.setdefault(tuple(row.get(column.id) for column in self.model.columns), []).append(value)
        right = sorted(value for values in by_row.values() for value in values)[:k]
        numbers = [sign * number for number in found.column(found.num_columns - 1).to_pylist()]
        assert numbers == pytest.approx(right, rel=1e-5, abs=1e-6), told
        given = tuples(found.select(list(range(found.num_columns - 1))))
        assert not Counter(given) - Counter({row: len(values) for row, values in by_row.items()}), told
        for row, number in zip(given, numbers, strict=True):
            assert min(abs(number - value) for value in by_row[row]) < 1e-5, (told, row)

    def all(self, keys: Sequence[Key]) -> None:
        self.everything()
        self.scan()
        self.count()
        self.lookup(keys)
        self.sql()
        self.search()
        self.search_text()


Ask = Callable[[int, Predicate | None], pa.Table]


def names(columns: Sequence[Column] | None) -> list[str] | None:
    return None if columns is None else [column.name for column in columns]


def sql_of(test: Predicate | None) -> str | None:
    return None if test is None else test.sql


def plain(model: TableModel) -> list[Column]:
    return [column for column in model.columns if not types.is_fixed_size_list(column.type)]


def _by_pandas(scan: hg.Scan) -> pa.Table:
    """With Arrow's own types: pandas' would turn integers with nulls into floats."""
    import pandas as pd

    frame = scan.to_pandas(types_mapper=pd.ArrowDtype)
    return pa.Table.from_pandas(frame, preserve_index=False)


def _by_polars(scan: hg.Scan) -> pa.Table:
    """Not vectors: polars cannot read a part of an array of them that has nulls."""
    vectors = any(types.is_fixed_size_list(field.type) for field in scan.schema)
    return scan.to_arrow() if vectors else scan.to_polars().to_arrow()


OUTPUTS: list[Callable[[hg.Scan], pa.Table]] = [
    lambda scan: scan.to_arrow(),
    lambda scan: pa.Table.from_batches(scan.to_batches(), scan.schema),
    lambda scan: pa.table(scan),
    _by_polars,
    _by_pandas,
]
