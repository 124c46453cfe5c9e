"""What the tests share: a shard over a store that fails as told, and openers that stop between their steps."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate import meters
from headgate.clock import SYSTEM_CLOCK, Clock
from headgate.columnar.arrow import ArrowColumnar
from headgate.failpoint import hooked
from headgate.manifest import ManifestChain, ShardManifest
from headgate.query.scan import Scan
from headgate.schema import RowRules
from headgate.store import RetryingStore, RetryPolicy, Store
from headgate.store.faulty import FaultyStore
from headgate.store.local import LocalStore
from headgate.store.memory import MemoryStore
from headgate.view import ReadView, ShardReader
from headgate.wal.appender import EpochWriter
from headgate.wal.fence import open_epoch
from headgate.wal.log import ShardLog

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("value", pa.string())])
QUICK = RetryPolicy(retries=3, base_delay=0.0001, max_delay=0.001)
PATIENCE = 30.0
"""How long a test waits for what must happen before it fails; never how long it takes."""

_names = itertools.count()


class Bench:
    """One table with one shard, and its parts: as many logs, appenders and writers as a test wants."""

    PATIENCE = PATIENCE
    QUICK = QUICK
    SCHEMA = SCHEMA

    def __init__(self, uri: str, inner: Store, clock: Clock = SYSTEM_CLOCK) -> None:
        self.uri, self.inner, self.clock = uri, inner, clock
        self.table = hg.create_table(uri, SCHEMA, key="id")
        self.shard = self.table.shard("0000")
        self.store = self.faulty()
        self._open: list[tuple[FaultyStore, hg.ShardWriter]] = []

    def faulty(self, **options: Any) -> FaultyStore:
        """Another way to the same objects, with faults of its own."""
        return FaultyStore(self.inner, **options)

    def log(self, store: Store | None = None, *, clock: Clock | None = None) -> ShardLog:
        """The shard's log as a fresh process has it: nothing cached, retries that take no time."""
        clock = clock or self.clock
        retrying = RetryingStore(store or self.store, clock, QUICK)
        table_id = self.shard.table_id
        chain = ManifestChain(retrying, f"shards/0000-{table_id}/manifest/", ShardManifest, clock, QUICK)
        return ShardLog(table_id, "0000", chain, retrying, None, clock, QUICK)

    @property
    def rules(self) -> RowRules:
        return self.shard.rules

    @property
    def manifest(self) -> ShardManifest:
        """The latest, read now."""
        return self.log(self.inner).manifests.load()

    def entry_key(self, epoch: int, position: int) -> str:
        return self.log(self.inner).space(self.manifest).key(epoch, position)

    def appender(self, store: Store | None = None, **options: Any) -> hg.WalAppender:
        log = self.log(store, **options)
        return hg.WalAppender(EpochWriter(log, open_epoch(log)), self.rules)

    def writer(self, store: FaultyStore | None = None, *, clock: Clock | None = None, **config: Any) -> hg.ShardWriter:
        """A WAL-only writer; aborted when the test ends."""
        store = store or self.store
        config = {"wal_persist_retry_base_delay": 0.0001, **config}
        writer = hg.ShardWriter(self.log(store, clock=clock), self.rules, hg.ShardWriterConfig(enable_memtable=False, **config))
        self._open.append((store, writer))
        return writer

    def memtable_writer(self, store: FaultyStore | None = None, *, clock: Clock | None = None, **config: Any) -> hg.ShardWriter:
        """A writer with a MemTable, its runs in the same store; aborted when the test ends."""
        store = store or self.store
        config = {"wal_persist_retry_base_delay": 0.0001, **config}
        log = self.log(store, clock=clock)
        writer = hg.ShardWriter(log, self.rules, hg.ShardWriterConfig(**config), ArrowColumnar(log.wal_store))
        self._open.append((store, writer))
        return writer

    def reader(self, store: Store | None = None) -> ShardReader:
        """A reader as another process has it."""
        log = self.log(store or self.inner)
        return ShardReader(log, ArrowColumnar(log.wal_store), lambda: self.rules)

    def state(self, view: ReadView | None = None) -> dict[int, str]:
        """The merged rows by key, as a fresh reader sees them, or in a view."""
        rows = Scan(lambda: [view or self.reader().view()], self.rules).to_arrow().to_pylist()
        state = {row["id"]: row["value"] for row in rows}
        assert len(state) == len(rows), "every result has unique keys"
        return state

    def rows(self, *ids: int, value: str = "") -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays([pa.array(ids, pa.int64()), pa.array([value or f"v{i}" for i in ids])], schema=SCHEMA)

    def ids(self, start: int | None = None) -> list[int]:
        """The ids in the log, in order, as a fresh reader sees them."""
        return [row for entry in self.entries(start) for batch in entry.batches for row in batch.column("id").to_pylist()]

    def entries(self, start: int | None = None, *, include_seals: bool = False) -> list[hg.Entry]:
        return list(hg.WalTailer(self.fresh()).read(start, include_seals=include_seals))

    def fresh(self, store: Store | None = None) -> Any:
        """Something with a ``log``, as tailers and appenders take it."""
        return _Holder(self.log(store or self.inner), self.rules)

    def contents(self) -> dict[str, bytes]:
        """Every object and its bytes."""
        return {info.key: bytes(self.inner.get(info.key)) for info in self.inner.list("")}

    def close(self) -> None:
        self.store.clear()
        for store, writer in self._open:
            store.clear()
            writer.abort()


class _Holder:
    def __init__(self, log: ShardLog, rules: RowRules) -> None:
        self.log, self.rules = log, rules


class Arrivals:
    """Counts requests as they reach a store, for tests that wait for the n-th. Pass it as ``before``.

    ``hold()`` keeps those that come afterwards, before any fault of theirs, until ``let_go()``.
    """

    def __init__(self, operation: str, part: str) -> None:
        self._operation, self._part = operation, part
        self._changed = threading.Condition()
        self._open = threading.Event()
        self._open.set()
        self.count = 0

    def hold(self) -> None:
        self._open.clear()

    def let_go(self) -> None:
        self._open.set()

    def __call__(self, operation: str, key: str) -> None:
        if operation == self._operation and self._part in key:
            with self._changed:
                self.count += 1
                self._changed.notify_all()
            self._open.wait(PATIENCE)

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.count >= count, PATIENCE), f"{self.count} of {count} requests came"


class Crash(Exception):
    """A process dies here."""


class Actor:
    """One of several callables that take turns."""

    def __init__(self, run: Callable[[], Any], crew: Crew) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self.at: str | None = None
        self.ended = False
        self.free = False
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._run, self._crew = run, crew
        self.thread = threading.Thread(target=self._body, daemon=True)
        self.thread.start()

    def _body(self) -> None:
        self._go.acquire()
        try:
            self.result = self._run()
        except BaseException as error:
            self.error = error
        self.ended, self.at = True, None
        self.free = True  # another thread may get this one's number
        self._back.release()

    def pause(self, name: str) -> None:
        self.at = name
        self._back.release()
        self._go.acquire()

    def step(self) -> str | None:
        """Run to the next stop and say which; None: to the end."""
        if self.ended:
            return None
        self._go.release()
        assert self._back.acquire(timeout=PATIENCE), f"stuck after {self.at}"
        return self.at

    def step_to(self, name: str) -> None:
        """Run until it stops at ``name``."""
        while not self.ended:
            if self.step() == name:
                return
        raise AssertionError(f"ended without coming to {name}: {self.error!r}")

    def finish(self) -> Any:
        """Run to the end; its result, or its error."""
        while not self.ended:
            self.step()
        if self.error is not None:
            raise self.error
        return self.result


class Crew:
    """Actors that stop at failpoints, one running at a time."""

    def __init__(self) -> None:
        self._actors: dict[int, Actor] = {}
        self.stops: set[str] = set()

    def actor(self, run: Callable[[], Any]) -> Actor:
        actor = Actor(run, self)
        assert actor.thread.ident is not None
        self._actors[actor.thread.ident] = actor
        return actor

    def hook(self, name: str) -> None:
        actor = self._actors.get(threading.get_ident())
        if actor is not None and not actor.free and (not self.stops or name in self.stops):
            actor.pause(name)

    def dismiss(self) -> None:
        for actor in self._actors.values():
            actor.free = True
            if not actor.ended:
                actor.step()


meters.SERIES_MAX = 1_000_000  # one process makes more tables here than a user's does: each is to be counted by itself


@pytest.fixture
def crew() -> Iterator[Crew]:
    made = Crew()
    with hooked(made.hook):
        yield made
        made.dismiss()


@pytest.fixture
def make_bench(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(kind: str = "memory", clock: Clock = SYSTEM_CLOCK) -> Bench:
        name = f"bench-{next(_names)}"
        if kind == "memory":
            benches.append(Bench(f"memory://{name}", MemoryStore(name), clock))
        else:
            path = str(tmp_path / name)
            benches.append(Bench(path, LocalStore(path), clock))
        return benches[-1]

    yield make
    for bench in benches:
        bench.close()


@pytest.fixture
def bench(make_bench: Callable[..., Bench]) -> Bench:
    """A shard in memory."""
    return make_bench()


@pytest.fixture
def disk(make_bench: Callable[..., Bench]) -> Bench:
    """A shard on a local disk."""
    return make_bench("disk")


@pytest.fixture
def arrivals() -> type[Arrivals]:
    return Arrivals


@pytest.fixture
def crash() -> type[Crash]:
    return Crash
