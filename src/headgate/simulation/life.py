"""What the processes of a simulation do to the life of a table: load, compact, collect, pin, follow.

Owns: the workload beside the writers and readers of ``tables``, and what was promised and seen of it.
Does not own: what should have come of it (truth), who takes part (life_plots).

Several shards, each with writers and readers of its own. Loads go over all of them, in one transaction;
another attempt at the same version has other rows, so that attempts that mix can be told. Every file that a
load writes is written down here first: what a manifest names is compared with that, not with what is in the store.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Literal

import pyarrow as pa

from headgate.attempt import give_back, register
from headgate.checkpoint import pin, unpin
from headgate.compact import compact_shard
from headgate.config import ShardWriterConfig
from headgate.consumer import OpenConsumer, Start
from headgate.errors import (
    ClosedError,
    CommitConflictError,
    ConsumerTakenError,
    HeadgateError,
    NotFoundError,
    ObjectExistsError,
    OutcomeUnknownError,
    SnapshotExpiredError,
    StoreUnavailableError,
    TransactionConflictError,
    WalTruncatedError,
)
from headgate.feed import Offset, horizon, read
from headgate.keys import newest_rows
from headgate.life.gc import collect_intents, collect_shard
from headgate.manifest.model import RunRecord
from headgate.query.scan import Scan
from headgate.run import run_batches, run_schema
from headgate.simulation.actors import POLICY
from headgate.simulation.tables import ROWS_MAX, Row, TableLedger, TableStage, random_config, rows_of
from headgate.simulation.world import Process, SimClock, SimStore, World
from headgate.store import RetryingStore, Store
from headgate.transaction import ONCE, Transactions, attempt_owner
from headgate.wal.entry import Put
from headgate.wal.log import ShardLog
from headgate.writer import ShardWriter

RowOfRun = tuple[int, int | None, bool]
"""Key, value, and whether it is a tombstone."""
_UNKNOWN = (StoreUnavailableError, CommitConflictError, OutcomeUnknownError)


@dataclass
class Attempt:
    """One try at a transaction."""

    id: str
    app: str
    version: int
    shards: set[str] = field(default_factory=set)
    """Where it has rows."""
    outcome: Literal["unknown", "committed", "there already", "refused"] = "unknown"


@dataclass
class Pin:
    """A checkpoint of one shard."""

    id: str
    shard: str
    scope: Literal["all", "durable"]
    began: int
    durable: int
    """Everything before this position had been acknowledged when it was begun."""
    leased: bool
    is_known: bool = False
    """Its call has returned."""
    is_dropped: bool = False
    """Somebody has begun to drop it."""
    reads: list[tuple[Row, ...]] = field(default_factory=list)


Item = tuple[int, int, tuple[tuple[int, int | None], ...]]
"""Of the changes: the position, the load (0: an entry), and its rows, None for deletes."""


@dataclass
class Follower:
    """Somebody who keeps a copy of a shard by its changes, with the offset beside it, whichever process does it."""

    name: str
    shard: str
    where: Literal["earliest", "latest", "snapshot"]
    start: Start | None = None
    snapshot: tuple[Row, ...] | None = None
    offset: Offset | None = None
    items: list[Item] = field(default_factory=list)


@dataclass
class LoadClient:
    """Somebody who wants versions brought in, one after the other, each once."""

    app: str
    versions: int
    done: int = 0


@dataclass
class LifeLedger:
    """What was promised and seen, beside what each shard's own ledger has."""

    files: dict[str, tuple[RowOfRun, ...]] = field(default_factory=dict)
    """Path of a slice -> what was written there."""
    attempts: dict[str, Attempt] = field(default_factory=dict)
    pins: list[Pin] = field(default_factory=list)
    followers: list[Follower] = field(default_factory=list)
    compactions: int = 0
    expired: int = 0
    problems: list[str] = field(default_factory=list)


class LifeStage:
    """A table of several shards, opened for each process."""

    def __init__(self, world: World, shards: int, *, keyed: bool, filters: bool, salt: int) -> None:
        self.world, self.ledger = world, LifeLedger()
        self.shards: dict[str, TableStage] = {}
        for number in range(shards):
            stage = TableStage(world, TableLedger(), keyed=keyed, filters=filters, salt=salt)
            stage.shard = f"{number:04d}"
            stage.between = self._between_puts(stage)
            stage.config, stage.puts_max, stage.flush_chance = roomy_config, 7, 0.08
            self.shards[stage.shard] = stage
        self.rules = stage.rules
        self.loads = 0
        """That found their place, as the judge tells."""
        self.pins_often = False

    def log(self, process: Process, shard: str) -> ShardLog:
        return self.shards[shard].log(process)

    def store(self, process: Process) -> Store:
        return RetryingStore(SimStore(process), SimClock(process), POLICY)

    def transactions(self, process: Process) -> Transactions:
        return Transactions(self.store(process), SimClock(process), lambda shard: self.log(process, shard), POLICY)

    def create(self, process: Process) -> None:
        for stage in self.shards.values():
            stage.create(process)

    def problems(self) -> list[str]:
        return [*self.ledger.problems, *(problem for stage in self.shards.values() for problem in stage.ledger.problems)]

    def trouble(self, who: str, error: HeadgateError) -> None:
        """As for a log: nothing was lost, so nobody may say so. A store that answers 409 to whoever writes a file is tried again."""
        if isinstance(error, ObjectExistsError):
            return
        next(iter(self.shards.values())).open_problem(who, error)

    def _between_puts(self, stage: TableStage) -> Callable[[Process, ShardWriter, random.Random], None]:
        def between(process: Process, writer: ShardWriter, rng: random.Random) -> None:
            if rng.random() < 0.7:
                SimClock(process).sleep(rng.choice([0.02, 0.1, 0.3]))  # so that loads come between
            if rng.random() >= (0.8 if self.pins_often else 0.15):
                return
            scope: Literal["all", "durable"] = "all" if rng.random() < 0.6 else "durable"
            taken = begun_pin(self, process, stage.shard, scope, leased=False)

            def beside() -> None:
                try:
                    writer.checkpoint(scope=scope, id=taken.id)
                    taken.is_known = True
                except ClosedError:
                    return
                except HeadgateError as error:
                    stage.open_problem(f"{process.name} at a checkpoint", error)

            if self.pins_often or rng.random() < 0.5:
                SimClock(process).spawn(beside, name=f"{process.name}-checkpoint")  # and puts go on
                return
            writer.checkpoint(scope=scope, id=taken.id)
            taken.is_known = True

        return between


def roomy_config(rng: random.Random, memtable: bool = True) -> ShardWriterConfig:
    """As for a shard alone, but with MemTables that hold some entries, so that loads come to stand among them."""
    config = random_config(rng, memtable)
    if rng.random() < 0.3:
        return config
    return replace(config, max_memtable_size=1 << 20, max_memtable_rows=100, max_memtable_batches=100, max_unflushed_memtable_bytes=1 << 20)


# -- loads


def loader_process(stage: LifeStage, process: Process, client: LoadClient, rng: random.Random) -> Callable[[], None]:
    """Brings in the next version; perhaps the one that another process is at, or died at."""

    def main() -> None:
        for _ in range(rng.randint(1, 3)):
            SimClock(process).sleep(rng.choice([0.0, 0.02, 0.2, 0.6]))
            if client.done >= client.versions:
                return
            version = client.done + (client.versions > 1 and rng.random() < 0.2)  # now and then one is left out, or overtakes another
            attempt = Attempt(f"l{SimClock(process).token()}", client.app, version)
            stage.ledger.attempts[attempt.id] = attempt
            try:
                _load(stage, process, client, attempt, rng)
            except TransactionConflictError as error:
                attempt.outcome = "refused"
                # An intent of one that was aborted, and whose abort was collected, decides nothing: nobody else has its name.
                if "withdrawn" in error.message and not client.app.startswith(ONCE):
                    stage.ledger.problems.append(f"UNDECIDED: {process.name}: {error.message}")
            except HeadgateError as error:
                stage.trouble(process.name, error)

    return main


def _load(stage: LifeStage, process: Process, client: LoadClient, attempt: Attempt, rng: random.Random) -> None:
    transactions, shards, clock = stage.transactions(process), list(stage.shards), SimClock(process)
    if rng.random() < 0.4 and transactions.check(shards, attempt.app, attempt.version, None):
        client.done = max(client.done, attempt.version + 1)
        return
    lease = rng.choice([0.2, 30.0, 600.0])
    runs: dict[str, list[RunRecord]] = {}
    for shard in rng.sample(shards, rng.randint(1, len(shards))):
        attempt.shards.add(shard)
        register(stage.log(process, shard), attempt.id, attempt_owner(attempt.app), lease)
        runs[shard] = [_write_run(stage, process, shard, attempt, rng) for _ in range(rng.choice([1, 1, 2]))]
    committed = transactions.commit(shards, attempt.app, attempt.version, None, runs, attempt.id)
    stage.world.note(process.name, f"version {attempt.version} of {attempt.app}: {'committed' if committed else 'there already'}")
    attempt.outcome = "committed" if committed else "there already"
    client.done = max(client.done, attempt.version + 1)
    if rng.random() < 0.3:
        clock.sleep(rng.choice([0.0, 0.3]))
    for shard in runs:
        give_back(stage.log(process, shard), attempt.id)


def _write_run(stage: LifeStage, process: Process, shard: str, attempt: Attempt, rng: random.Random) -> RunRecord:
    """A few rows of few keys, as a run that nobody sees yet."""
    rules, number = stage.rules, stage.shards[shard].ledger.numbers(1)[0]
    keys = rng.sample(range(4), rng.choice([1, 2, 3]))
    gone = {key for key in keys if rules.key and rng.random() < 0.35}
    puts = []
    upserts = [key for key in keys if key not in gone]
    if upserts:
        values = [number * ROWS_MAX + row for row in range(len(upserts))]
        arrays = [pa.array(upserts, pa.int64()), pa.array(values, pa.int64())]
        puts.append(Put(pa.RecordBatch.from_arrays(arrays, schema=rules.log_schema), "upsert"))
    if gone:
        puts.append(Put(pa.RecordBatch.from_arrays([pa.array(sorted(gone), pa.int64())], schema=rules.key_schema), "delete"))
    merged = newest_rows(puts, rules)
    folder = f"shards/{shard}-{stage.shards[shard].table_id}/runs/{attempt.id}-{SimClock(process).token()}"
    batches = list(run_batches(merged))
    path = f"{folder}/00000.lance"
    stage.ledger.files[path] = tuple(row for batch in batches for row in rows_of_run(batch))
    part = stage.shards[shard].columnar(process).write(path, run_schema(merged), iter(batches))
    fields = tuple(zip(rules.field_ids, rules.schema.names, strict=True))
    return RunRecord(id=folder.rsplit("/", 1)[1], first=0, end=0, slices=(part,), fields=fields, tombstones=merged.tombstones)


def rows_of_run(batch: pa.RecordBatch) -> list[RowOfRun]:
    marks = batch.column(2).to_pylist() if batch.num_columns > 2 else [False] * batch.num_rows
    return list(zip(batch.column("id").to_pylist(), batch.column("value").to_pylist(), marks, strict=True))


# -- compaction and collection


def compactor_process(stage: LifeStage, process: Process, rng: random.Random) -> Callable[[], None]:
    def main() -> None:
        for _ in range(rng.randint(1, 4)):
            SimClock(process).sleep(rng.choice([0.0, 0.05, 0.3]))
            shard = rng.choice(list(stage.shards))
            try:
                compact_shard(
                    stage.log(process, shard),
                    stage.shards[shard].columnar(process),
                    stage.rules,
                    max_memory=1 << 20,
                    full=rng.random() < 0.5,
                    slice_rows=rng.choice([1, 2, 100]),
                )
                stage.ledger.compactions += 1
            except HeadgateError as error:
                stage.trouble(process.name, error)

    return main


def life_collector_process(stage: LifeStage, process: Process, rng: random.Random, rounds: int) -> Callable[[], None]:
    """Everything at once, with ``min_age=0``, as ``Table.gc`` does it; its clock may be anywhere."""

    def main() -> None:
        for _ in range(rng.randint(1, rounds)):
            SimClock(process).sleep(rng.choice([0.0, 0.05, 0.3]))
            try:
                collect_all(stage, process, rng)
            except HeadgateError as error:
                stage.trouble(process.name, error)

    return main


def collect_all(stage: LifeStage, process: Process, rng: random.Random) -> None:
    _, over = collect_intents(stage.transactions(process), lambda: list(stage.shards), dry_run=False, min_age=0.0)
    for shard in stage.shards:
        collect_shard(stage.log(process, shard), stage.store(process), dry_run=False, min_age=0.0, sweep=rng.random() < 0.2, apps_over=over)


# -- checkpoints


def begun_pin(stage: LifeStage, process: Process, shard: str, scope: Literal["all", "durable"], *, leased: bool) -> Pin:
    durable = stage.shards[shard].table_ledger.acknowledged_before()
    taken = Pin(SimClock(process).token(), shard, scope, stage.world.scheduler.steps, durable, leased)
    stage.ledger.pins.append(taken)
    return taken


def keeper_process(stage: LifeStage, process: Process, rng: random.Random) -> Callable[[], None]:
    """Takes checkpoints, reads them, its own and others', and drops them."""

    def main() -> None:
        clock = SimClock(process)
        for _ in range(rng.randint(2, 5)):
            clock.sleep(rng.choice([0.0, 0.05, 0.3]))
            try:
                if rng.random() < 0.5:
                    shard, leased = rng.choice(list(stage.shards)), rng.random() < 0.3
                    taken, now = begun_pin(stage, process, shard, "durable", leased=leased), clock.now()
                    pin(stage.log(process, shard), taken.id, name=None, created_at=now, expires_at=now + 0.3 if leased else None)
                    taken.is_known = True
                elif stage.ledger.pins:
                    read_pin(stage, process, rng.choice(stage.ledger.pins))
                if stage.ledger.pins and rng.random() < 0.3:
                    dropped = rng.choice(stage.ledger.pins)
                    dropped.is_dropped = True
                    unpin(stage.log(process, dropped.shard), dropped.id)
            except HeadgateError as error:
                stage.trouble(process.name, error)

    return main


def read_pin(stage: LifeStage, process: Process, taken: Pin) -> None:
    """The same rows for ever, or an error that says it is gone, and it is."""
    reader = stage.shards[taken.shard].reader(process)
    try:
        taken.reads.append(rows_of(Scan(lambda: [reader.view(taken.id)], stage.rules).to_arrow()))
    except (NotFoundError, SnapshotExpiredError) as error:
        if taken.is_known and not taken.is_dropped and not taken.leased:
            stage.ledger.problems.append(f"PIN GONE: {process.name}: checkpoint {taken.id} of shard {taken.shard}: {error.message}")
    except _UNKNOWN:
        return


# -- followers


def follower_process(stage: LifeStage, process: Process, follower: Follower, rng: random.Random, looks: int = 5) -> Callable[[], None]:
    """Goes on where the copy is, whoever made it so far; looks so many times at most."""

    def main() -> None:
        clock = SimClock(process)
        for _ in range(rng.randint(1, 2)):
            clock.sleep(rng.choice([0.0, 0.05, 0.4]))
            try:
                shard, consumer = opened_follower(stage, process, follower)
                for _ in range(rng.randint(1, looks)):
                    follow(stage, process, follower, shard, rng.choice([1, 2, None]))
                    if rng.random() < 0.6 and follower.offset is not None:
                        consumer.advance(shard, follower.offset)
                    clock.sleep(rng.choice([0.0, 0.02, 0.2]))
            except (ConsumerTakenError, _Overtaken):
                continue
            except HeadgateError as error:
                stage.trouble(process.name, error)

    return main


class _Overtaken(Exception):
    """The other process of a follower has gone on, and what this one was about to read is no longer held."""


def opened_follower(stage: LifeStage, process: Process, follower: Follower) -> tuple[Any, OpenConsumer]:
    table = stage.shards[follower.shard]
    shard = SimpleNamespace(log=table.log(process), rules=stage.rules, reader=table.reader(process))
    consumer = OpenConsumer([shard], follower.name, follower.where, SimClock(process))
    start = consumer.starts[follower.shard]
    if follower.start is None:
        follower.start = start
    if follower.offset is None and start.snapshot is None:
        follower.offset = start.offset
    elif follower.offset is None:
        try:
            found = rows_of(Scan(lambda: [shard.reader.view(start.snapshot)], stage.rules).to_arrow())
        except (NotFoundError, SnapshotExpiredError):
            if follower.offset is None:
                raise
            raise _Overtaken from None
        if follower.offset is None:
            follower.snapshot, follower.offset = found, start.offset
    return shard, consumer


def follow(stage: LifeStage, process: Process, follower: Follower, shard: Any, max_entries: int | None) -> bool:
    """One batch. The copy and its offset move together, if nobody else has moved them. False: there is nothing new."""
    start = follower.offset
    assert start is not None, "it was opened"
    try:
        found = horizon(shard, start)
        if found.is_open:
            stage.transactions(process).resolve(shard.log, found.manifest)
        end = found.end if max_entries is None else found.limited(max_entries)
        if end == start:
            return False
        items = [item for batch in read(shard, start, end) for item in _items(batch.rows)]
    except WalTruncatedError:
        if follower.offset == start:
            raise
        raise _Overtaken from None
    if follower.offset == start:
        follower.items += items
        follower.offset = end
        stage.world.note(process.name, f"follows {follower.name} to {tuple(end)}: {items}")
    return True


def _items(rows: pa.RecordBatch) -> list[Item]:
    """Rows of one entry or load, put together."""
    items: list[Item] = []
    columns = [rows.column(name).to_pylist() for name in ("_position", "_load", "_op", "id", "value")]
    for position, load, op, key, value in zip(*columns, strict=True):
        row = (key, None if op == "delete" else value)
        if items and items[-1][:2] == (position, load):
            items[-1] = (position, load, (*items[-1][2], row))
        else:
            items.append((position, load, (row,)))
    return items


def once(process: Process) -> str:
    """An application for one transaction."""
    return f"{ONCE}{SimClock(process).token()}"
