"""Views made by hand: runs written as a flush writes them, MemTables, pending puts; and what they should read as."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa

from headgate.columnar import Columnar
from headgate.columnar.arrow import ArrowColumnar
from headgate.columnar.lance import LanceColumnar
from headgate.keys import newest_rows
from headgate.manifest.model import FIRST_POINT, RunRecord
from headgate.memtable import Fresh, MemTable
from headgate.run import DELETED
from headgate.schema import RowRules
from headgate.store import Location
from headgate.store.memory import MemoryStore
from headgate.view import ReadView, RunCache
from headgate.wal.entry import Put

_numbers = count()


def in_memory() -> Columnar:
    return ArrowColumnar(MemoryStore(f"reading-{next(_numbers)}", ""))


def on_disk(folder: Path) -> Columnar:
    return LanceColumnar(Location.parse(folder), fsync=False)


class Shelf:
    """One shard's runs and MemTables, and the views that a reader takes of them."""

    def __init__(self, rules: RowRules, columnar: Columnar | None = None) -> None:
        self.rules = rules
        self.columnar = columnar or in_memory()
        self.cache = RunCache(self.columnar)
        self.runs: list[RunRecord] = []
        self.frozen: list[MemTable] = []
        self.active = MemTable(FIRST_POINT)
        self.pending: list[Put] = []
        self.model: dict[Any, dict[str, Any] | None] = {}
        self.version = 0

    # -- writing

    def put(self, rows: Sequence[dict[str, Any]], *, pending: bool = False) -> None:
        self._take(Put(self.rules.upsert(pa.Table.from_pylist(list(rows), schema=self.rules.schema))), pending)
        for row in rows:
            self.model[self._key(row)] = {name: row.get(name) for name in self.rules.schema.names}

    def delete(self, keys: Sequence[dict[str, Any]], *, pending: bool = False) -> None:
        self._take(Put(self.rules.delete(pa.Table.from_pylist(list(keys), schema=self.rules.key_schema)), "delete"), pending)
        for key in keys:
            self.model[self._key(key)] = None

    def _take(self, put: Put, pending: bool) -> None:
        if pending:
            self.pending.append(put)
            return
        assert not self.pending, "what is pending is newest"
        self.active.append(1, self.active.end.position, [put], put.rows.nbytes, 0.0)

    def _key(self, row: dict[str, Any]) -> Any:
        return tuple(row[name] for name in self.rules.key) if self.rules.key else len(self.model)

    def freeze(self) -> None:
        if self.active.puts:
            self.frozen.append(self.active)
            self.active = MemTable(self.active.end)

    def flush(self, *, slices: int = 1) -> None:
        """The oldest frozen MemTable becomes a run."""
        if not self.frozen:
            self.freeze()
        if self.frozen:
            memtable = self.frozen.pop(0)
            self.runs.append(self.run_of(memtable.puts, memtable.first.position, memtable.end.position, slices))
            self.version += 1

    def run_of(self, puts: Sequence[Put], first: int = 0, end: int = 0, slices: int = 1) -> RunRecord:
        merged = newest_rows(puts, self.rules)
        rows = merged.rows
        if merged.deleted is not None:
            rows = rows.append_column(pa.field(DELETED, pa.bool_(), False), pa.array(merged.deleted))
        id = f"run-{next(_numbers)}"
        each = -(-rows.num_rows // slices)
        parts = [rows.slice(start, each) for start in range(0, rows.num_rows, each)]
        records = [
            self.columnar.write(f"runs/{id}/{number:05d}.lance", rows.schema, iter(part.to_batches(max_chunksize=1 << 16)))
            for number, part in enumerate(parts)
        ]
        fields = tuple(zip(self.rules.field_ids, self.rules.schema.names, strict=True))
        return RunRecord(id=id, first=first, end=end, slices=tuple(records), fields=fields, tombstones=merged.tombstones)

    # -- reading

    def view(self) -> ReadView:
        fresh = [Fresh(memtable, len(memtable.puts)) for memtable in [*self.frozen, self.active]]
        runs = self.cache.open(tuple(self.runs))
        return ReadView("0000", self.rules, runs, tuple(fresh), tuple(self.pending), cache=self.cache, version=self.version)

    def load(self) -> list[ReadView]:
        return [self.view()]

    def expected(self) -> list[dict[str, Any]]:
        return [row for row in self.model.values() if row is not None]


def by_key(rows: list[dict[str, Any]], rules: RowRules) -> list[dict[str, Any]]:
    names = rules.key or rules.schema.names
    return sorted(rows, key=lambda row: tuple((row[name] is not None, row[name]) for name in names))
