"""A small table in memory with one of everything, and what can be seen of it.

Owns: the objects before they are damaged, and the three ways to look at them. Does not own: damage.

``look`` answers with what a fresh process would get: all entries of all shards, or a typed
error. Anything else, an untyped exception or an entry that nobody wrote, is what fuzzing is for.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

import headgate as hg
from headgate.store.memory import heap_named
from headgate.wal.collect import collect_entries
from headgate.wal.entry import Entry

LONG = bool(os.environ.get("HEADGATE_FUZZ_LONG"))
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("value", pa.string()), pa.field("tags", pa.list_(pa.string()))])
WAL_ONLY = hg.ShardWriterConfig(enable_memtable=False)
NAME = "fuzz"
HANG_SECONDS = 90

Objects = dict[str, bytes]
Seen = list[tuple[Any, ...]]


class Hang(BaseException):
    """It did not come back in time."""


class Unnoticed(AssertionError):
    """Damage that changed what is read, and nobody said so."""


def rows(*ids: int) -> pa.RecordBatch:
    columns = [pa.array(ids, pa.int64()), pa.array([f"v{i}" for i in ids]), pa.array([["a", "b"][: i % 3] for i in ids])]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def make(path: str) -> hg.Table:
    """Two shards with different pasts: takeovers, a producer, a delete, something trimmed and collected."""
    table = hg.create_table(f"memory://{NAME}/{path}", SCHEMA, key="id", sharding=hg.bucket("id", 2))
    first, second = table.shard("0000"), table.shard("0001")
    with first.writer(WAL_ONLY) as writer:
        writer.put(rows(1, 2)).wait()
        writer.put(rows(3)).wait()
    with first.writer(WAL_ONLY) as writer:
        writer.put(rows(4), producer="p", sequence=0).wait()
        writer.delete(pa.table({"id": [1]})).wait()
        writer.put(rows(5, 6)).wait()
    with second.writer(WAL_ONLY) as writer:
        for number in (11, 12, 13):
            writer.put(rows(number)).wait()
    table.trim(before={"0001": 2})
    collect_entries(second.log, dry_run=False)
    for number in (14, 15):
        with second.writer(WAL_ONLY) as writer:
            writer.put(rows(number)).wait()
    return table


def load(objects: Objects) -> None:
    heap = heap_named(NAME)
    heap.objects = {key: (body, 0.0) for key, body in objects.items()}
    heap.keys = sorted(heap.objects)


def stored() -> Objects:
    return {key: body for key, (body, _) in heap_named(NAME).objects.items()}


def tables() -> Objects:
    """Two tables, ``t`` and ``u``, as they should be."""
    load({})
    make("t")
    make("u")
    return stored()


def seen_of(entry: Entry) -> tuple[Any, ...]:
    puts = tuple((put.op, put.producer, put.sequence, str(put.rows.to_pylist())) for put in entry.puts)
    return entry.epoch, entry.position, entry.kind, puts


def read(shard: str, start: int | None = None) -> Seen:
    table = hg.open_table(f"memory://{NAME}/t")
    return [(shard, *seen_of(entry)) for entry in hg.WalTailer(table.shard(shard)).read(start, include_seals=True)]


def verify(shard: str) -> bool:
    report = hg.open_table(f"memory://{NAME}/t").verify(deep=True)
    return not any(problem.shard == shard for problem in report.problems)


def append(shard: str) -> None:
    with hg.WalAppender.open(hg.open_table(f"memory://{NAME}/t").shard(shard)) as appender:
        appender.append([rows(99)])


@contextmanager
def watched() -> Iterator[None]:
    """Whatever does not come back within HANG_SECONDS hangs."""

    def hang(*_: Any) -> None:
        raise Hang(f"not back after {HANG_SECONDS} s")

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(HANG_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Judge:
    """Counts what was tried and how it was answered; raises what must not be."""

    def __init__(self, right: Objects) -> None:
        self.right = right
        self.began = time.monotonic()
        self.tried: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()
        load(right)
        self.seen = {shard: read(shard) for shard in ("0000", "0001")}
        assert all(verify(shard) for shard in self.seen)
        assert all(len(seen) >= 5 for seen in self.seen.values())

    def look(self, what: str, objects: Objects, *, deep: bool, write: bool, shards: tuple[str, ...] = ("0000",)) -> bool:
        """Was the damage noticed? Raises if something wrong was read or an error was not ours."""
        self.tried[what.split(" ", 1)[0]] += 1
        noticed = False
        with watched():
            for shard in shards:
                load(objects)
                noticed |= self._reads(what, shard)
                if deep:
                    noticed |= self._verifies(what, shard)
                if write:
                    noticed |= self._writes(what, shard, objects)
        self.answers["noticed" if noticed else "no effect"] += 1
        return noticed

    def _reads(self, what: str, shard: str) -> bool:
        try:
            found = read(shard)
        except hg.HeadgateError as error:
            self.answers[type(error).__name__] += 1
            return True
        if found != self.seen[shard]:
            raise Unnoticed(f"{what}: shard {shard} reads {found} instead of {self.seen[shard]}")
        return False

    def _verifies(self, what: str, shard: str) -> bool:
        try:
            return not verify(shard)
        except hg.HeadgateError:
            return True

    def _writes(self, what: str, shard: str, objects: Objects) -> bool:
        """Opening either refuses and leaves everything as it is, or goes on from where the log really ends."""
        try:
            append(shard)
        except hg.HeadgateError as error:
            if isinstance(error, hg.DataLossError | hg.WalStoreMismatchError) and stored() != objects:
                raise Unnoticed(f"{what}: opening shard {shard} failed ({error.message}) and wrote") from error
            return True
        try:
            found = read(shard)
        except hg.HeadgateError:
            return True
        before = self.seen[shard]
        new = found[len(before) :]
        if found[: len(before)] != before or [entry[3] for entry in new] != ["seal", "data"] or "99" not in str(new[1]):
            raise Unnoticed(f"{what}: after a write shard {shard} reads {found}, before it {before}")
        return False

    def report(self, title: str) -> None:
        answers = ", ".join(f"{name} {count}" for name, count in sorted(self.answers.items()))
        tried = ", ".join(f"{name} {count}" for name, count in sorted(self.tried.items()))
        print(f"{title}: {self.tried.total()} mutations ({tried}) in {time.monotonic() - self.began:.1f} s: {answers}; unnoticed 0")
