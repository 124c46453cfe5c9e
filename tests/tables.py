"""A table with several shards over a store that fails as told, for the tests of what writes it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import headgate as hg
from headgate.sharding import split_rows
from headgate.store import Location, Store
from headgate.store.faulty import FaultyStore
from headgate.store.memory import Heap, MemoryStore
from headgate.table_writer import TableWriter
from headgate.wal.entry import Put

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("value", pa.string())])
PATIENCE = 30.0

_names = itertools.count()


class Tables:
    """One table; as many writers on it as a test wants, each as a process of its own would have it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, sharding: Any = None, *, schema: pa.Schema = SCHEMA, key: Any = "id") -> None:
        self.inner: Store = MemoryStore("tables", heap=Heap())
        self.store = FaultyStore(self.inner)
        self.uri = f"memory://tables-{next(_names)}"
        monkeypatch.setattr(Location, "open", lambda location, fsync=True: self.store)
        # Retries that take no time: the policies are defaults of the classes.
        monkeypatch.setattr("headgate.clock.SystemClock.sleep", lambda clock, seconds: None)
        self.rule = sharding or hg.bucket("id", 4)
        hg.create_table(self.uri, schema, key=key, sharding=self.rule)
        self.made: list[TableWriter] = []
        self.stores = [self.store]

    def another_store(self, **options: Any) -> FaultyStore:
        """What is opened from now on goes another way to the same objects, with faults of its own."""
        self.store = FaultyStore(self.inner, **options)
        self.stores.append(self.store)
        return self.store

    def table(self) -> hg.Table:
        return hg.open_table(self.uri)

    def writer(self, shards: Any = None, **config: Any) -> TableWriter:
        """A WAL-only writer, as a fresh process has it; aborted when the test ends."""
        config = {"enable_memtable": False, "wal_persist_retry_base_delay": 0.0, **config}
        table = self.table()
        writer = TableWriter(table._watch, table._places, hg.ShardWriterConfig(**config), shards)
        self.made.append(writer)
        return writer

    def rows(self, *ids: int, value: str = "") -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays([pa.array(ids, pa.int64()), pa.array([value or f"v{i}" for i in ids])], schema=SCHEMA)

    def shard_of(self, id: int) -> str:
        return split_rows(self.rule, self.rows(id))[0].shard

    def id_in(self, shard: str, skip: int = 0) -> int:
        """An id that belongs to a shard."""
        return self._ids_of[shard][skip]

    @cached_property
    def _ids_of(self) -> dict[str, list[int]]:
        return {part.shard: part.rows["id"].to_pylist() for part in split_rows(self.rule, self.rows(*range(1000)))}

    @contextmanager
    def faultless(self) -> Iterator[None]:
        before, self.store = self.store, FaultyStore(self.inner)
        try:
            yield
        finally:
            self.store = before

    def puts(self, shard: str) -> list[Put]:
        """All that is in a shard's log, as a fresh reader sees it."""
        with self.faultless():
            table = self.table()
            if shard not in [known.id for known in table.shards]:
                return []
            return [put for entry in hg.WalTailer(table.shard(shard)).read(0) for put in entry.puts]

    def ids(self, shard: str | None = None) -> list[int]:
        """The ids in a shard's log, in order; or in all logs, sorted."""
        if shard is None:
            return sorted(id for known in self.shards() for id in self.ids(known))
        return [id for put in self.puts(shard) for id in put.rows.column("id").to_pylist()]

    def shards(self) -> list[str]:
        with self.faultless():
            return [shard.id for shard in self.table().shards]

    def copies(self) -> Counter[tuple[str, str | None, int | None]]:
        """How often each (shard, producer, sequence) is in the logs."""
        return Counter((shard, put.producer, put.sequence) for shard in self.shards() for put in self.puts(shard))

    def contents(self) -> dict[str, bytes]:
        return {info.key: bytes(self.inner.get(info.key)) for info in self.inner.list("")}

    def quarantined(self) -> dict[str, pa.Table]:
        keys = [info.key for info in self.inner.list("quarantine/")]
        return {key: pq.read_table(pa.BufferReader(bytes(self.inner.get(key)))) for key in keys}

    def close(self) -> None:
        for store in self.stores:
            store.clear()
        for writer in self.made:
            writer.abort()


MakeTables = Callable[..., Tables]


@pytest.fixture
def make_tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeTables]:
    made: list[Tables] = []

    def make(sharding: Any = None, **options: Any) -> Tables:
        made.append(Tables(monkeypatch, sharding, **options))
        return made[-1]

    yield make
    for tables in made:
        tables.close()


@pytest.fixture
def tables(make_tables: MakeTables) -> Tables:
    """Four buckets by id."""
    return make_tables()
