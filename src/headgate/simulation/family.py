"""A family of tables in the simulation: a table whose shards are split, and the clones that are made of it.

Owns: where the tables are, writing and reading them, and what was promised and seen. Does not own: what else is done
to them (family_life), what should have come of it (family_truth).

All of it goes through the handles that users have: ``Table``, ``TableWriter``, over stores that are simulated. Rows find
their shards by the real hash, so what a row's shard should be follows from its key alone. Every row that is put carries
the number of its put: in its value, or, for a delete, in a key that nobody else uses and that hashes to the same eighth.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import pyarrow as pa

from headgate.errors import (
    ClosedError,
    DataLossError,
    FencedError,
    HeadgateError,
    NotFoundError,
    ObjectExistsError,
    ObjectMissingError,
    OutcomeUnknownError,
    SnapshotExpiredError,
    StoreError,
    WriterPoisonedError,
)
from headgate.life.create import load_if_there, opened
from headgate.manifest.document import decode_document
from headgate.manifest.model import TableManifest
from headgate.schema import encode_schema
from headgate.shard import Places
from headgate.sharding import bucket, first_shards, hash_values, unsharded
from headgate.simulation.actors import EXPECTED, Client
from headgate.simulation.life import roomy_config
from headgate.simulation.tables import KEYED, KEYLESS, MARK, RETRYABLE, ROWS_MAX, Row, Write, rows_of
from headgate.simulation.world import Process, SimClock, SimStore, World
from headgate.store import Location, Store
from headgate.table import Table
from headgate.table_ack import TableAck
from headgate.table_writer import TableWriter

KEYS = range(6)
CELL_BITS = 3
"""Shards are halved so often at most: a cell is an eighth of all hashes."""
_MARKS = 256
"""Keys that a delete may choose its mark from, until one falls into the cell of the key it deletes."""
HASH_BITS = 32


@lru_cache(maxsize=4096)
def hash_of(key: int) -> int:
    """Its place among the hashes, of which shards have ranges."""
    return int(hash_values(pa.array([key], pa.int64()))[0]) >> (64 - HASH_BITS)


def cell_of(key: int) -> int:
    return hash_of(key) >> (HASH_BITS - CELL_BITS)


def mark_of(number: int, key: int) -> int:
    """A key that tells a delete from all others, in every shard that it may come to."""
    first = MARK + number * _MARKS
    cells = hash_values(pa.array(range(first, first + _MARKS), pa.int64())) >> (64 - CELL_BITS)
    return first + next(m for m in range(_MARKS) if int(cells[m]) == cell_of(key))


def number_of(item: int) -> int:
    """Of the put that wrote it."""
    return (item - MARK) // _MARKS if item >= MARK else item // ROWS_MAX


def items_of(write: Write) -> Iterator[tuple[int, int]]:
    """What can be told apart of a put, each with the key that says where it belongs: values, or the marks of deletes."""
    for key, value in write.rows:
        if write.op == "upsert":
            yield value, key
        elif key >= MARK:
            yield key, key


_OF_THE_GONE = (NotFoundError, FencedError, ObjectMissingError, ClosedError)
"""What whoever uses a table may be told, once it is dropped."""


# -- where they are


@dataclass(frozen=True)
class SimLocation(Location):
    """A place in the simulated world, as one process sees it."""

    process: Process = field(kw_only=True, repr=False, compare=False)

    def open(self, *, fsync: bool = True) -> Store:
        return SimStore(self.process, f"{self.path}/")

    def beside(self, uri: str) -> Location:
        return location(self.process, uri.rsplit("/", 1)[1])


def location(process: Process, name: str) -> SimLocation:
    return SimLocation(f"memory://sim/{name}", "memory", "sim", name, process=process)


# -- what was promised and seen


@dataclass(frozen=True)
class TableRead:
    """A read of a whole table that returned."""

    who: str
    rows: tuple[Row, ...]
    began: int
    ended: int
    durable: dict[str, int]
    """By shard: everything before this position had been acknowledged when it began."""


@dataclass
class TablePin:
    """A checkpoint of a table."""

    id: str
    scope: Literal["all", "durable"]
    durable: dict[str, int]
    leased: bool
    is_dropped: bool = False
    reads: list[tuple[Row, ...]] = field(default_factory=list)


@dataclass
class Member:
    """One table, for as long as it is that table: where it is dropped and made again, another one is."""

    name: str
    table_id: str
    wal: str | None = None
    """Where its log is, if it is not beside it."""
    puts: dict[int, Write] = field(default_factory=dict)
    acked: dict[int, Mapping[str, tuple[int, int]] | None] = field(default_factory=dict)
    """Number -> where its receipt says it is; None: somewhere, because a producer may have been told of an earlier copy."""
    order: dict[str, list[int]] = field(default_factory=dict)
    reads: list[TableRead] = field(default_factory=list)
    pins: list[TablePin] = field(default_factory=list)
    watched: list[TableAck] = field(default_factory=list)
    durable: dict[str, int] = field(default_factory=dict)
    writers_opened: int = 0
    is_dropped: bool = False
    """Somebody has begun to."""

    def durable_now(self) -> dict[str, int]:
        """By shard: all positions before this one are durable, as somebody has been told by now, or could have been."""
        open_still = []
        for ack in self.watched:
            parts = ack._parts
            for part in parts.values():
                if part.done() and part._place is not None:
                    shard, _, position = part._place
                    self.durable[shard] = max(self.durable.get(shard, 0), position + 1)
            if not all(part.done() and part._error is None for part in parts.values()):
                open_still.append(ack)  # a part that was fenced may be sent elsewhere
        self.watched = open_still
        return dict(self.durable)


@dataclass
class LoadJob:
    """Somebody who wants rows loaded once, whoever does it."""

    number: int
    write: Write
    is_done: bool = False


@dataclass
class CloneJob:
    """Somebody who wants a clone, whoever makes it."""

    target: str
    wal: str | None
    source: str = "t0"
    checkpoint: TablePin | None = None
    is_begun: bool = False


class Family:
    """The tables, opened for each process."""

    def __init__(self, world: World, *, keyed: bool, buckets: int, salt: int) -> None:
        self.world, self.rules, self.salt = world, KEYED if keyed else KEYLESS, salt
        self.sharding = bucket("id", buckets) if buckets > 1 else unsharded()
        self.members: list[Member] = []
        self.loads: dict[int, LoadJob] = {}
        self.clones: list[CloneJob] = []
        self.problems: list[str] = []
        self.splits = self.clones_made = self.clones_dropped = self.loads_placed = 0
        self.next_number = 0

    @property
    def first(self) -> Member:
        return self.members[0]

    def numbers(self, count: int) -> list[int]:
        self.next_number += count
        return list(range(self.next_number - count, self.next_number))

    def places(self, process: Process, name: str, wal: str | None = None) -> Places:
        return Places(location(process, name), location(process, wal) if wal is not None else None, SimClock(process))

    def create(self, process: Process) -> None:
        places, clock = self.places(process, "t0"), SimClock(process)
        first = TableManifest(
            version=0,
            id=clock.token(),
            table_id=clock.token(),
            arrow_schema=encode_schema(self.rules.schema),
            field_ids=(1, 2),
            next_field_id=3,
            key=self.rules.key,
            sharding=self.sharding,
            shards=first_shards(self.sharding),
            wal_id=clock.token(),
            created_at=clock.now(),
        )
        store = places.table_store()
        chain = places.table_manifests(store)
        assert chain.create_first(first)
        opened(places, store, chain, first)
        self.members.append(Member("t0", first.table_id))

    def open(self, process: Process, member: Member) -> Table:
        """The table, as ``open_table`` gives it; refused if it is another one by now."""
        places = self.places(process, member.name, member.wal)
        store = places.table_store()
        chain = places.table_manifests(store)
        found = load_if_there(chain)
        if found is None or found.table_id != member.table_id:
            raise NotFoundError(f"{member.name} is another table now")
        return Table(places, opened(places, store, chain, found))

    def adopt(self, name: str, table_id: str, wal: str | None) -> Member:
        """The clone at a place, whoever has made it."""
        for member in self.members:
            if (member.name, member.table_id) == (name, table_id):
                return member
        self.members.append(Member(name, table_id, wal))
        return self.members[-1]

    def latest(self, name: str) -> TableManifest:
        """A table's latest manifest, read from outside of the world."""
        key = max(key for key in self.world.objects if key.startswith(f"{name}/table/"))
        return decode_document(self.world.objects[key], TableManifest, key)

    def is_gone(self, member: Member) -> bool:
        """Has somebody begun to drop it?"""
        found = self.latest(member.name)
        return member.is_dropped or found.table_id != member.table_id or found.state in ("dropping", "dropped")

    def trouble(self, who: str, error: HeadgateError, member: Member | None = None) -> None:
        """Nothing was lost, so nobody may say so; and nothing is refused that could be done."""
        cause: BaseException = error
        while isinstance(cause, WriterPoisonedError):
            cause = cause.cause
        if (
            member is not None
            and self.is_gone(member)
            and isinstance(cause, NotFoundError | FencedError | ObjectMissingError | ClosedError)
        ):
            return
        if isinstance(cause, DataLossError):
            self.problems.append(f"FALSE ALARM: {who}: {cause.message}")
        elif cause is not error and not isinstance(cause, (StoreError, *EXPECTED)):
            self.problems.append(f"UNEXPECTED: {who}: {error!r} because of {cause!r}")
        # A store that answers 409 to whoever writes a file is tried again; so is a read that was overtaken.
        elif not isinstance(error, (*EXPECTED, ObjectExistsError, SnapshotExpiredError)):
            self.problems.append(f"UNEXPECTED: {who}: {error!r}")


# -- writing


def random_write(family: Family, number: int, rng: random.Random) -> Write:
    """Of few keys; a put may name one twice."""
    keys = [rng.choice(KEYS) for _ in range(rng.choice([1, 2, 2, 3]))]
    if family.rules.key and rng.random() < 0.25:
        rows = dict.fromkeys((key, 0) for one in keys[:2] for key in (one, mark_of(number, one)))
        return Write(number, "delete", tuple(rows))
    return Write(number, "upsert", tuple((key, number * ROWS_MAX + row) for row, key in enumerate(keys)))


def batch_of(family: Family, write: Write) -> pa.RecordBatch:
    keys, values = zip(*write.rows, strict=True)
    if write.op == "delete":
        return pa.RecordBatch.from_arrays([pa.array(keys, pa.int64())], schema=family.rules.key_schema)
    return pa.RecordBatch.from_arrays([pa.array(keys, pa.int64()), pa.array(values, pa.int64())], schema=family.rules.schema)


def family_writer_process(family: Family, process: Process, client: Client, rng: random.Random, lives: int) -> Callable[[], None]:
    """Opens a writer of the whole table, puts what the client still wants, reads, and goes in one way or another; perhaps again."""

    def main() -> None:
        for number in range(rng.randint(1, lives)):
            SimClock(process).sleep(rng.choice([0.0, 0.01, 0.2, 1.0]))
            write_some(family, process, family.first, client, rng, f"{process.name}.{number}", puts_max=6)

    return main


def write_some(family: Family, process: Process, member: Member, client: Client, rng: random.Random, who: str, *, puts_max: int) -> None:
    """One writer, from open to its end."""
    member.writers_opened += 1
    pending: list[tuple[int, TableAck]] = []
    try:
        table = family.open(process, member)
        memtable = rng.random() < 0.9
        writer = table.writer(roomy_config(rng, memtable))
    except HeadgateError as error:
        family.trouble(f"{who} opening", error, member)
        return
    family.world.note(process.name, f"opened {', '.join(f'{s} epoch {w.epoch}' for s, w in writer.writers.items())}")
    try:
        _put_all(family, process, member, table, writer, client, pending, rng, who, puts_max, memtable=memtable)
        if rng.random() < 0.3:
            SimClock(process).sleep(rng.choice([0.1, 1.5]))
        if rng.random() < 0.8:
            writer.close()
    except HeadgateError as error:
        _fenced(family, member, who, error)
        family.trouble(who, error, member)
    finally:
        _settle(family, member, client, pending, who)
    try:
        writer.abort()
    except HeadgateError as error:
        family.problems.append(f"ABORT RAISED: {who}: {error!r}")


def _put_all(
    family: Family,
    process: Process,
    member: Member,
    table: Table,
    writer: TableWriter,
    client: Client,
    pending: list[tuple[int, TableAck]],
    rng: random.Random,
    who: str,
    puts_max: int,
    *,
    memtable: bool,
) -> None:
    clock = SimClock(process)
    if client.producer is not None:
        todo = [(sequence, client.items[sequence]) for sequence in range(client.acknowledged, len(client.items))]
    else:
        todo = [(-1, number) for number in family.numbers(rng.randint(0, puts_max))]
    order = member.order.setdefault(who, []) if client.producer is None else []
    for sequence, number in todo:
        write = random_write(family, number, random.Random(family.salt + number) if client.producer else rng)
        member.puts[number] = write
        order.append(number)
        producer: dict[str, Any] = {} if client.producer is None else {"producer": client.producer, "sequence": sequence}
        rows = batch_of(family, write)
        ack = writer.delete(rows, **producer) if write.op == "delete" else writer.put(rows, **producer)
        pending.append((number, ack))
        member.watched.append(ack)
        if rng.random() < 0.3:
            _learn(member, client, number, ack)
        if rng.random() < 0.1:
            writer.flush()
        if rng.random() < 0.12:
            taken = TablePin("", "all" if memtable and rng.random() < 0.6 else "durable", member.durable_now(), leased=False)
            taken.id = writer.checkpoint(scope=taken.scope).id
            member.pins.append(taken)
        if rng.random() < 0.3:
            read_table(family, process, member, table, who)
        if rng.random() < 0.6:
            clock.sleep(rng.choice([0.01, 0.1, 0.4]))


def _learn(member: Member, client: Client, number: int, ack: TableAck) -> None:
    """Wait for one put and write down what was promised."""
    receipt = ack.wait()
    member.acked.setdefault(number, None if client.producer is not None else dict(receipt))
    if client.producer is not None:
        client.acknowledged = max(client.acknowledged, client.items.index(number) + 1)


def _settle(family: Family, member: Member, client: Client, pending: list[tuple[int, TableAck]], who: str) -> None:
    """What became of each put, as far as its Ack says."""
    for number, ack in pending:
        if not ack.done():
            continue
        try:
            _learn(member, client, number, ack)
        except HeadgateError as error:
            _fenced(family, member, who, error)


def _fenced(family: Family, member: Member, who: str, error: HeadgateError) -> None:
    """Splitters came after the only writer there ever was: it goes on with the parts, and is never told that it was fenced."""
    if isinstance(error, FencedError) and member.writers_opened == 1 and not member.is_dropped:
        family.problems.append(f"NO HEIR: {who} was fenced, and nobody else has written: {error.message}")


# -- reading


def read_table(family: Family, process: Process, member: Member, table: Table, who: str) -> bool:
    """Write down what is seen. False: not now."""
    scheduler = family.world.scheduler
    began, durable = scheduler.steps, member.durable_now()
    try:
        rows = rows_of(table.scan().to_arrow())
    except RETRYABLE:
        return False
    family.world.note(process.name, f"reads {member.name}: {rows}")
    member.reads.append(TableRead(who, rows, began, scheduler.steps, durable))
    return True


def read_pinned(family: Family, process: Process, member: Member, table: Table, taken: TablePin) -> None:
    """The same rows for ever, or an error that says it is gone, and it is."""
    try:
        taken.reads.append(rows_of(table.scan(at=taken.id).to_arrow()))
    except (NotFoundError, SnapshotExpiredError) as error:
        if not (taken.is_dropped or taken.leased or member.is_dropped):
            family.problems.append(f"PIN GONE: {process.name}: checkpoint {taken.id} of {member.name}: {error.message}")
    except (OutcomeUnknownError, *RETRYABLE):
        return


def family_reader_process(family: Family, process: Process, rng: random.Random) -> Callable[[], None]:
    """Reads the table from outside, again and again, with one handle, and clones that are there."""

    def main() -> None:
        clock = SimClock(process)
        handles: dict[str, Table] = {}
        for _ in range(rng.randint(2, 5)):
            clock.sleep(rng.choice([0.0, 0.05, 0.3, 1.0]))
            alive = [member for member in family.members if not member.is_dropped]
            member = family.first if rng.random() < 0.7 else rng.choice(alive)
            try:
                if member.table_id not in handles:
                    handles[member.table_id] = family.open(process, member)
                read_table(family, process, member, handles[member.table_id], process.name)
                if member.pins and rng.random() < 0.3:
                    read_pinned(family, process, member, handles[member.table_id], rng.choice(member.pins))
            except HeadgateError as error:
                family.trouble(f"{process.name} reading {member.name}", error, member)

    return main
