"""What a table should hold: plain dicts, and what queries over them should give.

Owns: the columns by id, the rows of each shard by key (or, without a key, all of them), puts that
nobody has acknowledged yet, predicates with SQL's three values, BM25. Does not own: the table it is
compared with (test_table_model.py).

A put that is not acknowledged may be durable or not, shard by shard, but only in order: what a shard
holds is what a prefix of its puts left. ``ShardModel.states`` are these prefixes.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.types as types

Key = tuple[Any, ...]
Row = Mapping[int, Any]
"""Values by the id of their column. What is not there is null."""
Rows = Counter[tuple[Any, ...]]
"""Rows as tuples of their values, and how often each is there."""

WIDER: dict[pa.DataType, list[pa.DataType]] = {
    pa.int8(): [pa.int16(), pa.int32(), pa.int64()],
    pa.int32(): [pa.int64()],
    pa.float32(): [pa.float64()],
    pa.string(): [pa.large_string()],
}
VECTOR = pa.list_(pa.float32(), 2)
WORDS = ("red", "green", "blue", "Blue", "käse", "x1", "the")
STRINGS = ("", "a", "b", "aa", "a\x00", "ä", "Zoë", "quote's", "long " * 9)


@dataclass
class Column:
    id: int
    name: str
    type: pa.DataType
    nullable: bool = True
    text: bool = False
    """Its values are made of words."""

    @property
    def field(self) -> pa.Field:
        return pa.field(self.name, self.type, self.nullable)

    @property
    def quoted(self) -> str:
        return '"' + self.name + '"'


def value_of(column: Column, chance: random.Random) -> Any:
    """A value that every width of the column's type holds exactly."""
    kind = column.type
    if column.nullable and chance.random() < 0.2:
        return None
    if types.is_fixed_size_list(kind):
        return (chance.randrange(-8, 9) / 4, chance.randrange(-8, 9) / 4)
    if types.is_integer(kind):
        return chance.choice([0, 1, -1, 2, 3, 5, 100, -(1 << (kind.bit_width - 1)), (1 << (kind.bit_width - 1)) - 1])
    if types.is_floating(kind):
        return chance.randrange(-20, 21) / 8
    if column.text:
        return " ".join(chance.choices(WORDS, k=chance.randrange(6)))
    return chance.choice(STRINGS)


@dataclass
class Change:
    """What one put or delete means to one shard: rows, or None for a key that is deleted."""

    rows: list[tuple[Key, Row | None]]


@dataclass
class ShardModel:
    has_key: bool
    rows: dict[Any, Row] = field(default_factory=dict)
    """By key; without one, by a number."""
    pending: list[tuple[int, Change]] = field(default_factory=list)
    """With the number of their put."""

    def _after(self, changes: Iterable[Change]) -> dict[Any, Row]:
        rows = dict(self.rows)
        for change in changes:
            for key, row in change.rows:
                if not self.has_key:
                    assert row is not None
                    rows[len(rows)] = row
                elif row is None:
                    rows.pop(key, None)
                else:
                    rows[key] = row
        return rows

    def states(self, acknowledged: int) -> list[dict[Any, Row]]:
        """What the shard may hold if all puts up to number ``acknowledged`` are durable, newest first."""
        least = sum(number <= acknowledged for number, _ in self.pending)
        changes = [change for _, change in self.pending]
        return [self._after(changes[:count]) for count in range(len(changes), least - 1, -1)]

    def newest(self) -> dict[Any, Row]:
        return self._after(change for _, change in self.pending)

    def settle(self, rows: dict[Any, Row]) -> None:
        self.rows, self.pending = rows, []


class TableModel:
    """The table as a dict."""

    def __init__(self, columns: Sequence[Column], key: Sequence[int]) -> None:
        self.columns = list(columns)
        self.key = tuple(key)
        self.next_id = max(column.id for column in columns) + 1
        self.shards: dict[str, ShardModel] = {}
        self.shard_of: dict[Any, str] = {}
        """Where the rows of a key, or of a value of the sharding column, are."""
        self.puts = 0

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([column.field for column in self.columns])

    def column(self, id: int) -> Column:
        return next(column for column in self.columns if column.id == id)

    def named(self, name: str) -> Column:
        return next(column for column in self.columns if column.name == name)

    def shard(self, name: str) -> ShardModel:
        return self.shards.setdefault(name, ShardModel(bool(self.key)))

    def put(self, changes: Mapping[str, Change]) -> int:
        """Not acknowledged yet. Returns its number."""
        self.puts += 1
        for name, change in changes.items():
            self.shard(name).pending.append((self.puts, change))
        return self.puts

    def settle(self) -> None:
        """All puts so far are acknowledged."""
        for shard in self.shards.values():
            shard.settle(shard.newest())

    @property
    def has_pending(self) -> bool:
        return any(shard.pending for shard in self.shards.values())

    def rows(self) -> list[Row]:
        """Of all shards, with all puts."""
        return [row for shard in self.shards.values() for row in shard.newest().values()]

    def as_tuples(self, rows: Iterable[Row], columns: Sequence[Column] | None = None) -> Rows:
        chosen = self.columns if columns is None else columns
        return Counter(tuple(row.get(column.id) for column in chosen) for row in rows)


def tuples(table: pa.Table | pa.RecordBatch) -> list[tuple[Any, ...]]:
    """Rows as the model has them."""
    if not table.num_columns:
        return [()] * table.num_rows
    return list(zip(*([_hashable(value) for value in column.to_pylist()] for column in table.columns), strict=True))


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


# -- predicates


@dataclass(frozen=True)
class Predicate:
    sql: str
    test: Callable[[Row], bool | None]

    def __call__(self, row: Row) -> bool:
        return self.test(row) is True


def predicate(columns: Sequence[Column], chance: random.Random, depth: int = 2) -> Predicate:
    """Something to filter by; nulls are neither true nor false."""
    if depth and chance.random() < 0.4:
        left, right = predicate(columns, chance, depth - 1), predicate(columns, chance, depth - 1)
        if chance.random() < 0.3:
            return Predicate(f"not ({left.sql})", lambda row: None if (is_left := left.test(row)) is None else not is_left)
        if chance.random() < 0.5:
            return Predicate(f"({left.sql}) and ({right.sql})", lambda row: _both(left.test(row), right.test(row)))
        return Predicate(f"({left.sql}) or ({right.sql})", lambda row: _either(left.test(row), right.test(row)))
    plain = [column for column in columns if not types.is_fixed_size_list(column.type)]
    column = chance.choice(plain or list(columns))
    id, name = column.id, column.quoted
    if not plain or chance.random() < 0.15:
        return Predicate(f"{name} is null", lambda row: row.get(id) is None)
    value = value_of(Column(0, "", column.type, nullable=False), chance)
    if isinstance(value, str):
        value = value.replace("\x00", "")
    spelled = "'" + value.replace("'", "''") + "'" if isinstance(value, str) else str(value)
    if chance.random() < 0.2:
        return Predicate(f"{name} in ({spelled}, {spelled})", lambda row: _compared(row.get(id), lambda v: v == value))
    compare: dict[str, Callable[[Any], bool]] = {
        "=": lambda v: bool(v == value),
        "<>": lambda v: bool(v != value),
        "<": lambda v: bool(v < value),
        ">=": lambda v: bool(v >= value),
    }
    operator = chance.choice(list(compare))
    return Predicate(f"{name} {operator} {spelled}", lambda row: _compared(row.get(id), compare[operator]))


def _compared(value: Any, test: Callable[[Any], bool]) -> bool | None:
    return None if value is None else test(value)


def _both(one: bool | None, two: bool | None) -> bool | None:
    if one is False or two is False:
        return False
    return None if one is None or two is None else True


def _either(one: bool | None, two: bool | None) -> bool | None:
    if one is True or two is True:
        return True
    return None if one is None or two is None else False


# -- searches


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def scores(rows: Sequence[Row], column: Column, query: str) -> list[float | None]:
    """BM25 of each row; None: it has none of the words."""
    texts = [None if row.get(column.id) is None else Counter(_words(row[column.id])) for row in rows]
    there = [text for text in texts if text is not None]
    average = sum(text.total() for text in there) / len(there) if there else 0.0
    found: list[float | None] = []
    for text in texts:
        score = 0.0
        for word, times in Counter(_words(query)).items():
            if text and text[word]:
                having = sum(word in other for other in there)
                weight = math.log(1 + (len(there) - having + 0.5) / (having + 0.5))
                score += times * weight * text[word] * 2.2 / (text[word] + 1.2 * (0.25 + 0.75 * text.total() / average))
        found.append(score or None)
    return found


def distances(rows: Sequence[Row], column: Column, query: Sequence[float]) -> list[float | None]:
    """Squared; None: the row has no vector."""
    vectors = [row.get(column.id) for row in rows]
    return [None if v is None else sum((a - b) ** 2 for a, b in zip(v, query, strict=True)) for v in vectors]
