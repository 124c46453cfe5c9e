"""What the processes of a simulation do: write, take over, read, collect.

Owns: the workload, and the ledger of what was promised to whom. Does not own: faults (world).
All of it goes through the code that users run.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pyarrow as pa

from headgate.config import ShardWriterConfig
from headgate.errors import (
    CommitConflictError,
    DataLossError,
    FencedError,
    HeadgateError,
    ObjectMissingError,
    OutcomeUnknownError,
    StoreUnavailableError,
    WalTruncatedError,
    WriterPoisonedError,
)
from headgate.manifest import ManifestChain, ShardManifest
from headgate.manifest.document import decode_document
from headgate.manifest.model import WalState
from headgate.schema import RowRules
from headgate.simulation.world import Process, SimClock, SimStore, World
from headgate.store import RetryingStore, RetryPolicy
from headgate.wal.ack import Ack
from headgate.wal.appender import EpochWriter, WalAppender
from headgate.wal.collect import collect_entries, trim
from headgate.wal.entry import Entry
from headgate.wal.fence import open_epoch
from headgate.wal.log import ShardLog
from headgate.wal.tailer import WalTailer
from headgate.writer import ShardWriter

RULES = RowRules(pa.schema([("id", pa.int64())]), ())
POLICY = RetryPolicy(retries=2, base_delay=0.01, max_delay=0.05)
EXPECTED = (FencedError, CommitConflictError, OutcomeUnknownError, StoreUnavailableError, WriterPoisonedError)


@dataclass
class Client:
    """Somebody who wants numbers written exactly once, and outlives the processes that try."""

    name: str
    producer: str | None
    items: list[int]
    acknowledged: int = 0
    """How many of the items are known to be durable, in order (with a producer)."""


@dataclass
class Ledger:
    """What was promised, seen and given up, kept outside of the world."""

    acked: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Number -> (epoch, position) of its receipt."""
    exact: set[int] = field(default_factory=set)
    """Numbers put with a producer's sequence: never twice."""
    order: dict[str, list[int]] = field(default_factory=dict)
    """Writer -> its numbers in the order it put them."""
    fenced: list[tuple[int, int | None, int]] = field(default_factory=list)
    """Epoch, position and number of puts that ended in FencedError."""
    archived: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Position -> numbers, for what was read before it was given up."""
    tailed: list[list[tuple[int, int, tuple[int, ...]]]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    next_number: int = 0

    def numbers(self, count: int) -> list[int]:
        self.next_number += count
        return list(range(self.next_number - count, self.next_number))


def numbers_of(entry: Entry) -> tuple[int, ...]:
    return tuple(n for batch in entry.batches for n in batch.column(0).to_pylist())


def rows_of(number: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([number], pa.int64())], schema=RULES.log_schema)


@dataclass(frozen=True)
class Logged:
    """A shard, as far as readers of its log are concerned."""

    log: ShardLog


class Stage:
    """Opens the shard for each process, and knows the ledger."""

    def __init__(self, world: World, ledger: Ledger, table_id: str = "table0", wal_id: str = "wal0", shard: str = "0000") -> None:
        self.world, self.ledger = world, ledger
        self.table_id, self.wal_id, self.shard = table_id, wal_id, shard
        self.wal_elsewhere: str | None = None
        """The prefix of a separate WAL store; None: beside the table."""

    def log(self, process: Process, policy: RetryPolicy = POLICY) -> ShardLog:
        clock = SimClock(process)
        store = RetryingStore(SimStore(process), clock, policy)
        manifests = ManifestChain(store, self.folder, ShardManifest, clock, policy)
        if self.wal_elsewhere is None:
            return ShardLog(self.table_id, self.shard, manifests, store, None, clock, policy)
        other = SimStore(process, self.wal_elsewhere)
        return ShardLog(self.table_id, self.shard, manifests, RetryingStore(other, clock, policy), other.uri, clock, policy)

    @property
    def folder(self) -> str:
        return f"shards/{self.shard}-{self.table_id}/manifest/"

    def latest(self) -> ShardManifest:
        """The latest manifest, read from outside of the world."""
        key = max(key for key in self.world.objects if key.startswith(self.folder))
        return decode_document(self.world.objects[key], ShardManifest, key)

    def create(self, process: Process) -> None:
        log = self.log(process)
        first = ShardManifest(version=0, id="root", table_id=self.table_id, shard=self.shard, wal=WalState(id=self.wal_id, clean_at=0))
        assert log.manifests.create_first(first)

    def open_problem(self, who: str, error: HeadgateError) -> None:
        """Nothing was lost, so nobody may say so."""
        if isinstance(error, DataLossError):
            self.ledger.problems.append(f"FALSE ALARM: {who}: {error.message}")
        elif not isinstance(error, EXPECTED):
            self.ledger.problems.append(f"UNEXPECTED: {who}: {error!r}")


def writer_process(stage: Stage, process: Process, client: Client, rng: random.Random, lives: int) -> Callable[[], None]:
    """Opens a writer, puts what the client still wants, and goes in one way or another; perhaps again."""

    def main() -> None:
        ledger, clock = stage.ledger, SimClock(process)
        for life in range(rng.randint(1, lives)):
            clock.sleep(rng.choice([0.0, 0.01, 0.5, 3.0]))
            config = ShardWriterConfig(
                enable_memtable=False,
                max_inflight=rng.randint(1, 4),
                max_wal_buffer_size=rng.choice([1, 4096]),
                max_wal_persist_retries=rng.randint(0, 3),
                wal_persist_retry_base_delay=0.01,
                max_unflushed_memtable_bytes=rng.choice([1, 1 << 20]),
                max_wal_flush_interval=rng.choice([0.0, 0.0, 0.01]),
            )
            try:
                writer = ShardWriter(stage.log(process), RULES, config)
            except HeadgateError as error:
                stage.open_problem(process.name, error)
                continue
            who = f"{process.name}.{life}"
            stage.world.note(process.name, f"opened epoch {writer.epoch} at {writer.wal_stats().next_wal_entry_position}")
            pending: list[tuple[int, Ack]] = []
            try:
                _put_all(stage, writer, who, client, pending, rng)
                if rng.random() < 0.3:
                    clock.sleep(rng.choice([0.1, 2.5]))  # idle: long enough for a record
                if rng.random() < 0.8:
                    writer.close()
                    if writer.threads_alive():
                        ledger.problems.append(f"THREADS LEFT: {who}: {writer.threads_alive()} after close")
            except HeadgateError as error:
                stage.open_problem(process.name, error)
            finally:
                settle(stage, writer, client, pending)
            try:
                writer.abort()
            except HeadgateError as error:
                ledger.problems.append(f"ABORT RAISED: {who}: {error!r}")

    return main


def _put_all(stage: Stage, writer: ShardWriter, who: str, client: Client, pending: list[tuple[int, Ack]], rng: random.Random) -> None:
    order = stage.ledger.order.setdefault(who, [])
    if client.producer is not None:
        todo = [(sequence, client.items[sequence]) for sequence in range(client.acknowledged, len(client.items))]
    else:
        todo = [(-1, number) for number in stage.ledger.numbers(rng.randint(0, 5))]
    for sequence, number in todo:
        if client.producer is None:
            order.append(number)
            ack = writer.put(rows_of(number))
        else:
            ack = writer.put(rows_of(number), producer=client.producer, sequence=sequence)
            stage.ledger.exact.add(number)
        pending.append((number, ack))
        if rng.random() < 0.3:
            learn(stage, client, number, ack)


def learn(stage: Stage, client: Client, number: int, ack: Ack) -> None:
    """Wait for one put and write down what was promised."""
    receipt = ack.wait()
    epoch, position = receipt[stage.shard]
    known = stage.ledger.acked.get(number)
    if known is None and not receipt.duplicate:
        stage.ledger.acked[number] = (epoch, position)
    elif known is None:
        stage.ledger.acked[number] = (-1, -1)  # durable somewhere at or before there
    if client.producer is not None:
        client.acknowledged = max(client.acknowledged, client.items.index(number) + 1)


def settle(stage: Stage, writer: ShardWriter, client: Client, pending: list[tuple[int, Ack]]) -> None:
    """What became of each put, as far as its Ack says."""
    for number, ack in pending:
        if not ack.done():
            continue
        try:
            learn(stage, client, number, ack)
        except FencedError as error:
            stage.ledger.fenced.append((error.epoch, error.position, number))
            if stage.latest().epoch <= error.epoch:
                stage.ledger.problems.append(f"FALSELY FENCED: epoch {error.epoch} at {error.position}, and nobody has claimed since")
        except HeadgateError:
            continue


def appender_process(stage: Stage, process: Process, rng: random.Random) -> Callable[[], None]:
    """The synchronous way to write."""

    def main() -> None:
        SimClock(process).sleep(rng.choice([0.0, 0.1, 2.0]))
        order = stage.ledger.order.setdefault(process.name, [])
        try:
            log = stage.log(process)
            appender = WalAppender(EpochWriter(log, open_epoch(log)), RULES)
            for number in stage.ledger.numbers(rng.randint(0, 4)):
                order.append(number)
                stage.ledger.acked[number] = appender.append([rows_of(number)])
            if rng.random() < 0.7:
                appender.close()
        except HeadgateError as error:
            stage.open_problem(process.name, error)

    return main


def tailer_process(stage: Stage, process: Process, rng: random.Random) -> Callable[[], None]:
    """Reads from the start, again and again from where it stopped."""

    def main() -> None:
        clock, tailer = SimClock(process), WalTailer(Logged(stage.log(process)))
        seen: list[tuple[int, int, tuple[int, ...]]] = []
        stage.ledger.tailed.append(seen)
        next_position = 0
        for _ in range(rng.randint(2, 6)):
            try:
                for entry in tailer.read(next_position):
                    seen.append((entry.epoch, entry.position, numbers_of(entry)))
                    next_position = entry.position + 1
            except WalTruncatedError as error:
                try:
                    floor = stage.log(process).manifests.load().wal_floor
                except StoreUnavailableError:
                    continue
                if floor <= next_position:
                    stage.ledger.problems.append(f"FALSE ALARM: {process.name}: {error.message}")
                next_position = max(next_position, floor)
            except HeadgateError as error:
                stage.open_problem(process.name, error)
            clock.sleep(rng.choice([0.0, 0.05, 1.0]))

    return main


def collector_process(stage: Stage, process: Process, rng: random.Random, rounds: int) -> Callable[[], None]:
    """Keeps a copy of what it gives up, as a flush would, then trims, then deletes; old manifests too."""

    def main() -> None:
        clock = SimClock(process)
        for _ in range(rng.randint(1, rounds)):
            clock.sleep(rng.choice([0.0, 0.05, 0.5]))
            try:
                log = stage.log(process)
                if rng.random() < 0.6:
                    archive_and_trim(stage, log, rng)
                if rng.random() < 0.7:
                    collect_entries(log, dry_run=False, sweep=rng.random() < 0.3)
                if rng.random() < 0.5:
                    collect_manifests(log)
            except WalTruncatedError:
                continue  # another collector was faster
            except HeadgateError as error:
                stage.open_problem(process.name, error)

    return main


def archive_and_trim(stage: Stage, log: ShardLog, rng: random.Random, stop_chance: float = 0.15) -> None:
    tailer = WalTailer(Logged(log))
    cursor = log.manifests.load().cursor.position
    taken: dict[int, tuple[int, ...]] = {}
    before = cursor
    for entry in tailer.read(cursor, include_seals=True):
        taken[entry.position] = numbers_of(entry)
        before = entry.position + 1
        if rng.random() < stop_chance:
            break
    stage.ledger.archived.update(taken)
    trim(log, before)


def collect_manifests(log: ShardLog) -> None:
    """Delete all versions below the latest."""
    latest = log.manifests.load()
    store, folder = log.manifests._store, log.manifests.folder
    old = [info.key for info in store.list(folder) if info.key < log.manifests.key(latest.version)]
    if old:
        try:
            store.delete(old)
        except ObjectMissingError:
            return
