"""What the processes of a simulation do to a shard with a MemTable: put, delete, flush, read, collect.

Owns: the workload, and what was promised and seen. Does not own: what a read should have seen (reads).
All of it goes through the code that users run; runs are objects of the simulated store, so
their way there is as rough as that of everything else.

Every put has a number of its own, and what it writes carries it: the values of its rows, or, for
a delete, a key that nobody else uses. Few keys, so that puts, deletes and tombstones meet.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa

from headgate.columnar.arrow import ArrowColumnar
from headgate.config import ShardWriterConfig
from headgate.errors import (
    ClosedError,
    CommitConflictError,
    DataLossError,
    FencedError,
    HeadgateError,
    OutcomeUnknownError,
    SnapshotExpiredError,
    StoreError,
    StoreUnavailableError,
    WriterPoisonedError,
)
from headgate.life.gc import collect_shard
from headgate.query.scan import Scan
from headgate.schema import RowRules
from headgate.simulation.actors import POLICY, Client, Ledger, Stage, learn, settle
from headgate.simulation.world import Process, SimClock, SimStore, World
from headgate.store import RetryingStore
from headgate.view import ShardReader
from headgate.wal.ack import Ack
from headgate.wal.collect import collect_entries
from headgate.wal.entry import Op, Put
from headgate.writer import Freshness, ShardWriter

_SCHEMA = pa.schema([("id", pa.int64()), ("value", pa.int64())])
KEYED = RowRules(_SCHEMA, ("id",))
KEYLESS = RowRules(_SCHEMA, ())
MARK = 1_000_000
"""Keys from here on: one per delete, so that it can be told from all others."""
ROWS_MAX = 8
"""Of a put: the value of its row r is its number times this, plus r."""

RETRYABLE = (StoreUnavailableError, CommitConflictError, SnapshotExpiredError)
"""What a read may end in, beside compaction and collection: asked again, it would be answered."""

Row = tuple[int, int]
Source = Literal["tail", "durable", "memory"]


@dataclass(frozen=True)
class Write:
    """One put or delete."""

    number: int
    op: Op
    rows: tuple[Row, ...]
    """Key and value; of a delete the keys alone count."""


@dataclass
class Life:
    """One writer, from open to its end, as far as its own reads are concerned."""

    name: str
    first_position: int
    begun: list[Write] = field(default_factory=list)
    """What was put and not taken for a duplicate, in order."""
    returned: int = 0
    """For how many of them ``put`` has returned."""


@dataclass(frozen=True)
class Asked:
    """A filter, in SQL and for the model."""

    kind: Literal["divides", "least"]
    number: int

    @property
    def sql(self) -> str:
        return f"value % {self.number} = 0" if self.kind == "divides" else f"value >= {self.number}"

    def matches(self, value: int) -> bool:
        return value % self.number == 0 if self.kind == "divides" else value >= self.number


@dataclass(frozen=True)
class Read:
    """A read that returned."""

    who: str
    source: Source
    rows: tuple[Row, ...] | int
    """Sorted; or how many, if it only counted."""
    began: int
    ended: int
    """Steps."""
    durable: int
    """Everything before this position had been acknowledged when it began."""
    filter: Asked | None
    limit: int | None
    life: Life | None = None
    """The writer that read, if one did; with what it had put when the read began and ended."""
    returned: int = 0
    begun: int = 0


@dataclass
class TableLedger(Ledger):
    """What was promised and seen."""

    reads: list[Read] = field(default_factory=list)
    watched: list[Ack] = field(default_factory=list)
    durable: int = 0

    def acknowledged_before(self) -> int:
        """All positions before this one are durable, as somebody has been told by now, or could have been."""
        open_still = []
        for ack in self.watched:
            if not ack.done():
                open_still.append(ack)
            elif ack._place is not None:
                self.durable = max(self.durable, ack._place[2] + 1)
        self.watched = open_still
        return self.durable


class TableStage(Stage):
    """Opens the shard for each process, with a place for its runs."""

    def __init__(self, world: World, ledger: TableLedger, *, keyed: bool, filters: bool, salt: int) -> None:
        super().__init__(world, ledger)
        self.table_ledger, self.rules, self.filters = ledger, KEYED if keyed else KEYLESS, filters
        self.salt = salt
        """A producer's puts follow from their numbers and this, so that a retry says the same again."""
        self.config: Callable[[random.Random, bool], ShardWriterConfig] = random_config
        self.puts_max, self.flush_chance, self.pause_seconds = 5, 0.2, 0.0
        self.beside_chance, self.beside_max = 0.4, 4
        """How often a thread reads beside the puts, and how many times at most."""
        self.between: Callable[[Process, ShardWriter, random.Random], None] | None = None
        """What a writer with a MemTable does now and then, between two puts."""

    def columnar(self, process: Process) -> ArrowColumnar:
        return ArrowColumnar(RetryingStore(SimStore(process), SimClock(process), POLICY))

    def writer(self, process: Process, config: ShardWriterConfig) -> ShardWriter:
        return ShardWriter(self.log(process), self.rules, config, self.columnar(process))

    def reader(self, process: Process) -> ShardReader:
        return ShardReader(self.log(process), self.columnar(process), lambda: self.rules)

    def open_problem(self, who: str, error: HeadgateError) -> None:
        """As for a log; and a writer is poisoned by the store alone, never by what it finds there."""
        cause: BaseException | None = None
        while isinstance(error, WriterPoisonedError) and isinstance(error.cause, WriterPoisonedError):
            error = error.cause
        if isinstance(error, WriterPoisonedError):
            cause = error.cause
        if isinstance(cause, DataLossError):
            self.ledger.problems.append(f"FALSE ALARM: {who}: {cause.message}")
        elif cause is not None and not isinstance(cause, StoreError | CommitConflictError | OutcomeUnknownError):
            self.ledger.problems.append(f"UNEXPECTED: {who}: {error!r} because of {cause!r}")
        else:
            super().open_problem(who, error)


def random_config(rng: random.Random, memtable: bool = True) -> ShardWriterConfig:
    """Limits so tight that everything is flushed soon, in one way or another."""
    return ShardWriterConfig(
        enable_memtable=memtable,
        max_inflight=rng.randint(1, 3),
        max_wal_buffer_size=rng.choice([1, 1, 4096]),
        max_wal_persist_retries=rng.randint(0, 3),
        wal_persist_retry_base_delay=0.01,
        max_memtable_size=rng.choice([1, 900, 1 << 20]),
        max_memtable_rows=rng.choice([1, 2, 3, 5]),
        max_memtable_batches=rng.choice([1, 2, 100]),
        max_memtable_age=rng.choice([0.1, 60.0, 60.0]),
        max_unflushed_memtable_bytes=rng.choice([1, 3000, 1 << 20]),
        max_pending_generations=rng.randint(1, 2),
    )


# -- writing


def random_write(stage: TableStage, number: int, rng: random.Random) -> Write:
    """Of few keys; a put may name one twice."""
    keys = [rng.randrange(4) for _ in range(rng.choice([1, 1, 2, 3]))]
    if stage.rules.key and rng.random() < 0.3:
        return Write(number, "delete", ((keys[0], 0), (MARK + number, 0)))
    return Write(number, "upsert", tuple((key, number * ROWS_MAX + row) for row, key in enumerate(keys)))


def write_of(put: Put) -> Write:
    """What a put of the log was."""
    keys = put.rows.column("id").to_pylist()
    if put.op == "delete":
        return Write(keys[-1] - MARK, "delete", tuple((key, 0) for key in keys))
    values = put.rows.column("value").to_pylist()
    return Write(values[0] // ROWS_MAX, "upsert", tuple(zip(keys, values, strict=True)))


def submit(writer: ShardWriter, write: Write, **producer: Any) -> Ack:
    if write.op == "delete":
        return writer.delete([{"id": key} for key, _ in write.rows], **producer)
    keys, values = zip(*write.rows, strict=True)
    rows = pa.RecordBatch.from_arrays([pa.array(keys, pa.int64()), pa.array(values, pa.int64())], schema=writer.rules.log_schema)
    return writer.put(rows, **producer)


def table_writer_process(stage: TableStage, process: Process, client: Client, rng: random.Random, lives: int) -> Callable[[], None]:
    """Opens a writer, puts what the client still wants, reads, flushes, and goes in one way or another; perhaps again."""

    def main() -> None:
        clock = SimClock(process)
        for number in range(rng.randint(1, lives)):
            clock.sleep(rng.choice([0.0, 0.01, 0.2, 1.0]))
            memtable = rng.random() < 0.85
            try:
                writer = stage.writer(process, stage.config(rng, memtable))
            except HeadgateError as error:
                stage.open_problem(process.name, error)
                continue
            life = Life(f"{process.name}.{number}", writer.wal_stats().next_wal_entry_position)
            stage.world.note(process.name, f"opened epoch {writer.epoch} at {life.first_position}")
            if memtable and rng.random() < stage.beside_chance:
                clock.spawn(lambda: _read_beside(stage, process, writer, life, rng), name=f"{process.name}-reads")  # noqa: B023
            _live(stage, process, writer, life, client, rng, memtable=memtable)

    return main


def _live(
    stage: TableStage, process: Process, writer: ShardWriter, life: Life, client: Client, rng: random.Random, *, memtable: bool
) -> None:
    ledger, clock = stage.table_ledger, SimClock(process)
    pending: list[tuple[int, Ack]] = []
    try:
        _put_all(stage, process, writer, life, client, pending, rng, memtable=memtable)
        if rng.random() < 0.3:
            clock.sleep(rng.choice([0.1, 1.5]))
        if rng.random() < 0.7:
            writer.close()
            if writer.threads_alive():
                ledger.problems.append(f"THREADS LEFT: {life.name}: {writer.threads_alive()} after close")
    except HeadgateError as error:
        stage.open_problem(process.name, error)
    finally:
        settle(stage, writer, client, pending)
    try:
        writer.abort()
    except HeadgateError as error:
        ledger.problems.append(f"ABORT RAISED: {life.name}: {error!r}")


def _put_all(
    stage: TableStage,
    process: Process,
    writer: ShardWriter,
    life: Life,
    client: Client,
    pending: list[tuple[int, Ack]],
    rng: random.Random,
    *,
    memtable: bool,
) -> None:
    ledger = stage.table_ledger
    if client.producer is not None:
        todo = [(sequence, client.items[sequence]) for sequence in range(client.acknowledged, len(client.items))]
    else:
        todo = [(-1, number) for number in ledger.numbers(rng.randint(0, stage.puts_max))]
    order = ledger.order.setdefault(life.name, []) if client.producer is None else []
    for sequence, number in todo:
        write = random_write(stage, number, random.Random(stage.salt + number) if client.producer else rng)
        producer: dict[str, Any] = {} if client.producer is None else {"producer": client.producer, "sequence": sequence}
        known = writer.producer_sequence(client.producer) if client.producer is not None else None
        if known is None or known < sequence:
            life.begun.append(write)
        order.append(number)
        ack = submit(writer, write, **producer)
        life.returned = len(life.begun)
        if client.producer is not None:
            ledger.exact.add(number)
        pending.append((number, ack))
        ledger.watched.append(ack)
        if rng.random() < 0.3:
            learn(stage, client, number, ack)
        if rng.random() < stage.flush_chance:
            writer.flush()
        if memtable and stage.between is not None:
            stage.between(process, writer, rng)
        if memtable and rng.random() < 0.4:
            read_own(stage, process, writer, life, rng)
        if stage.pause_seconds:
            SimClock(process).sleep(stage.pause_seconds)


# -- reading


def result_of(scan: Scan, rng: random.Random) -> tuple[Row, ...] | int:
    return scan.count() if rng.random() < 0.1 else rows_of(scan.to_arrow())


def rows_of(table: pa.Table) -> tuple[Row, ...]:
    return tuple(sorted(zip(table.column("id").to_pylist(), table.column("value").to_pylist(), strict=True)))


def _asked(stage: TableStage, rng: random.Random) -> tuple[Asked | None, int | None]:
    """A filter and a limit, now and then."""
    asked = None
    if stage.filters and rng.random() < 0.5:
        highest = stage.ledger.next_number * ROWS_MAX
        asked = Asked("divides", rng.choice([2, 3])) if rng.random() < 0.5 else Asked("least", rng.randint(0, highest))
    return asked, rng.randint(1, 3) if rng.random() < 0.2 else None


def read_own(stage: TableStage, process: Process, writer: ShardWriter, life: Life, rng: random.Random) -> None:
    """A read in the writer's process. What it raises is what the writer would."""
    ledger, scheduler = stage.table_ledger, stage.world.scheduler
    source: Freshness = "durable" if rng.random() < 0.5 else "memory"
    asked, limit = _asked(stage, rng)
    began, durable, returned = scheduler.steps, ledger.acknowledged_before(), life.returned
    try:
        found = result_of(writer.scan(filter=asked.sql if asked else None, limit=limit, freshness=source), rng)
    except RETRYABLE:
        return
    stage.world.note(process.name, f"reads ({source}) {found}")
    ledger.reads.append(Read(life.name, source, found, began, scheduler.steps, durable, asked, limit, life, returned, len(life.begun)))


def _read_beside(stage: TableStage, process: Process, writer: ShardWriter, life: Life, rng: random.Random) -> None:
    """A thread that reads while others write."""
    for _ in range(rng.randint(1, stage.beside_max)):
        try:
            read_own(stage, process, writer, life, rng)
        except ClosedError:
            return
        except HeadgateError as error:
            stage.open_problem(f"{process.name} reading", error)
            if isinstance(error, FencedError | WriterPoisonedError):
                return
        SimClock(process).sleep(rng.choice([0.0, 0.01, 0.05]))


def reader_process(stage: TableStage, process: Process, rng: random.Random) -> Callable[[], None]:
    """Reads the shard from outside, again and again."""

    def main() -> None:
        ledger, scheduler, clock = stage.table_ledger, stage.world.scheduler, SimClock(process)
        reader = stage.reader(process)
        for _ in range(rng.randint(2, 7)):
            clock.sleep(rng.choice([0.0, 0.02, 0.2, 1.0]))
            asked, limit = _asked(stage, rng)
            began, durable = scheduler.steps, ledger.acknowledged_before()
            try:
                scan = Scan(lambda: [reader.view()], stage.rules, filter=asked.sql if asked else None, limit=limit)
                found = result_of(scan, rng)
            except RETRYABLE:
                continue
            except HeadgateError as error:
                stage.open_problem(process.name, error)
                continue
            stage.world.note(process.name, f"reads {found}")
            ledger.reads.append(Read(process.name, "tail", found, began, scheduler.steps, durable, asked, limit))

    return main


# -- collecting


def table_collector_process(stage: TableStage, process: Process, rng: random.Random, rounds: int) -> Callable[[], None]:
    """Deletes entries that runs have replaced, old manifests, and what flushes left behind."""

    def main() -> None:
        clock = SimClock(process)
        store = RetryingStore(SimStore(process), clock, POLICY)
        for _ in range(rng.randint(1, rounds)):
            clock.sleep(rng.choice([0.0, 0.05, 0.5]))
            log = stage.log(process)
            try:
                if rng.random() < 0.6:
                    collect_shard(log, store, dry_run=False, min_age=0.0, sweep=rng.random() < 0.3)
                else:
                    collect_entries(log, dry_run=False, sweep=rng.random() < 0.3)
            except HeadgateError as error:
                stage.open_problem(process.name, error)

    return main
