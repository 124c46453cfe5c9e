"""What the processes of the torture of tables do: write, read, compact, collect, judge."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from ledger import COUNTS_PER_EPOCH, KEYS, PER_SEQUENCE, PER_WRITER, PRODUCED, STEADY, Codes, Ledger
from torture_driver import STUCK_SECONDS

import headgate as hg
import headgate.table as tables
from headgate.sharding import split_rows

KEYED = pa.schema([pa.field("k", pa.int64(), nullable=False), ("version", pa.int64()), ("payload", pa.binary())])
APPENDED = pa.schema([("lane", pa.int32()), ("number", pa.int64()), ("payload", pa.binary())])
SHARDS = 3
PRODUCER = "p"

Tell = Callable[[bytes], None]


def payloads(numbers: Codes) -> pa.Array:
    return pa.array([int(number).to_bytes(8, "little") * (1 + int(number) * 2654435761 % 17) for number in numbers], pa.binary())


def keyed_rows(keys: Codes, versions: Codes) -> pa.Table:
    return pa.table([pa.array(keys), pa.array(versions), payloads(keys * 7 + versions)], schema=KEYED)


def appended_rows(numbers: Codes) -> pa.Table:
    return pa.table([pa.array(numbers % 5, pa.int32()), pa.array(numbers), payloads(numbers)], schema=APPENDED)


def create(uri: str) -> None:
    hg.create_table(f"{uri}/keyed", KEYED, key="k", sharding=hg.bucket("k", SHARDS))
    hg.create_table(f"{uri}/appended", APPENDED, sharding=hg.bucket("lane", 2))


# -- writing


def write(uri: str, name: int, slot: int, seed: int, puts_max: int, ledger: Ledger, tell: Tell) -> None:
    """A writer's life: open both tables, put from several threads, end well or badly or not at all."""
    chance = random.Random(seed)
    keyed_table, appended_table = hg.open_table(f"{uri}/keyed"), hg.open_table(f"{uri}/appended")
    some = sorted(chance.sample([shard.id for shard in keyed_table.shards], 2)) if chance.random() < 0.2 else None
    first = int(ledger.next_sequence.max())
    try:
        appended = appended_table.writer(_config(chance))
        keyed = keyed_table.writer(_config(chance), shards=some)
    except (hg.FencedError, hg.CommitConflictError):
        tell(b"K")
        return
    tell(b"O")
    work: list[Iterator[None]] = []
    threads = chance.randint(1, 3)
    pen = Keyed(keyed_table, keyed, ledger, slot)
    for number in range(threads):
        mine = pen.keys[pen.keys % threads == number]
        if len(mine):
            work.append(pen.run(mine, random.Random(chance.random()), puts_max, chance.choice([1, 1, 4]), tell))
    work.append(_append(appended, name, ledger, random.Random(chance.random()), puts_max, chance.choice([1, 4]), tell))
    if chance.random() < 0.7:
        work.append(_produce(appended, first, slot, ledger, puts_max, chance.choice([1, 4]), tell))
    ended: list[BaseException] = []

    def run(steps: Iterator[None]) -> None:
        try:
            for _ in steps:
                pass
        except BaseException as error:  # a thread's end: judged below
            ended.append(error)

    running = [threading.Thread(target=run, args=(steps,)) for steps in work]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    for writer in (keyed, appended):
        how = chance.random()
        try:
            if how < 0.6:
                writer.close()
            elif how < 0.8:
                writer.abort()
        except hg.FencedError as error:
            ended.append(error)
    for error in ended:
        if not isinstance(error, hg.FencedError):
            raise error
    tell(b"F" if ended else b"C")


def _config(chance: random.Random) -> hg.ShardWriterConfig:
    """Caps so small that flushes are constant."""
    return hg.ShardWriterConfig(
        max_memtable_rows=chance.choice([1, 5, 50, 1_000_000]),
        max_memtable_batches=chance.choice([1, 3, 20, 8_000]),
        max_memtable_size=chance.choice([1, 3_000, 256 << 20]),
        max_memtable_age=chance.choice([0.02, 0.2, 60.0]),
        max_unflushed_memtable_bytes=chance.choice([1, 20_000, 1 << 30]),
        max_pending_generations=chance.choice([1, 2, 64]),
        max_inflight=chance.choice([1, 2, 4]),
        max_wal_buffer_size=chance.choice([1, 2_000, 8 << 20]),
        durable_write=chance.random() < 0.2,
        auto_compact=chance.random() < 0.3,
    )


class Keyed:
    """Upserts and deletes. A key belongs to one thread, so its versions come to the log in order."""

    def __init__(self, table: hg.Table, writer: hg.TableWriter, ledger: Ledger, slot: int) -> None:
        self._writer, self._ledger, self._slot = writer, ledger, slot
        self._base = np.zeros(KEYS, np.int64)
        self._count, self._lock = 0, threading.Lock()
        held = []
        for part in split_rows(table.sharding, pa.RecordBatch.from_arrays([pa.array(np.arange(KEYS))], ["k"])):
            if part.shard in writer.writers:
                keys = part.rows.column(0).to_numpy()
                self._base[keys] = writer.writers[part.shard].epoch * COUNTS_PER_EPOCH
                held.append(keys)
        self.keys: Codes = np.sort(np.concatenate(held))

    def _versions(self, keys: Codes) -> Codes:
        with self._lock:
            first, self._count = self._count + 1, self._count + len(keys)
        return self._base[keys] + first + np.arange(len(keys))

    def put(self, keys: Codes) -> tuple[Codes, Codes, hg.TableAck]:
        """Keys may be there twice: the last one counts."""
        versions = self._versions(keys)
        self._ledger.sent[self._slot][keys] = versions * 2  # of equal keys the last, by numpy's promise
        return keys, versions * 2, self._writer.put(keyed_rows(keys, versions))

    def delete(self, keys: Codes) -> tuple[Codes, Codes, hg.TableAck]:
        codes = self._versions(keys) * 2 + 1
        self._ledger.sent[self._slot][keys] = codes
        self._ledger.deleted[self._slot][keys] = codes
        return keys, codes, self._writer.delete(pa.table({"k": pa.array(keys)}))

    def settle(self, keys: Codes, codes: Codes, ack: hg.TableAck, tell: Tell) -> None:
        ack.wait(STUCK_SECONDS)
        self._ledger.acked[self._slot][keys] = codes
        tell(b"A")

    def run(self, mine: Codes, chance: random.Random, puts_max: int, window: int, tell: Tell) -> Iterator[None]:
        waiting: list[tuple[Codes, Codes, hg.TableAck]] = []
        mortal = mine[mine >= STEADY]
        for _ in range(puts_max):
            if len(mortal) and chance.random() < 0.25:
                gone = np.unique(chance.choices(list(mortal), k=chance.randint(1, 4)))
                waiting.append(self.delete(gone.astype(np.int64)))
            else:
                keys = np.array(chance.choices(list(mine), k=chance.choice([1, 3, 20])), np.int64)
                waiting.append(self.put(keys))
            while len(waiting) >= window:
                self.settle(*waiting.pop(0), tell)
            yield
        while waiting:
            self.settle(*waiting.pop(0), tell)


def _append(writer: hg.TableWriter, name: int, ledger: Ledger, chance: random.Random, puts_max: int, window: int, tell: Tell) -> Any:
    start, waiting = PRODUCED + name * PER_WRITER, []
    stop = start + PER_WRITER
    for _ in range(puts_max):
        numbers = np.arange(start, min(stop, start + chance.choice([1, 2, 9])))
        if not len(numbers):
            break
        start += len(numbers)
        ledger.sent_rows[numbers] = 1
        waiting.append((numbers, writer.put(appended_rows(numbers))))
        while len(waiting) >= window:
            _settle_rows(ledger, *waiting.pop(0), tell)
        yield
    while waiting:
        _settle_rows(ledger, *waiting.pop(0), tell)


def _produce(writer: hg.TableWriter, first: int, slot: int, ledger: Ledger, puts_max: int, window: int, tell: Tell) -> Any:
    """From the first sequence that nobody has acknowledged: what others sent and could not tell of is sent again."""
    waiting = []

    def settle(sequence: int, numbers: Codes, ack: hg.TableAck) -> None:
        _settle_rows(ledger, numbers, ack, tell)
        ledger.next_sequence[slot] = sequence + 1

    for sequence in range(first, min(first + puts_max, PRODUCED // PER_SEQUENCE)):
        numbers = np.arange(sequence * PER_SEQUENCE, (sequence + 1) * PER_SEQUENCE)
        ledger.sent_rows[numbers] = 1
        waiting.append((sequence, numbers, writer.put(appended_rows(numbers), producer=PRODUCER, sequence=sequence)))
        while len(waiting) >= window:
            settle(*waiting.pop(0))
        yield
    while waiting:
        settle(*waiting.pop(0))


def _settle_rows(ledger: Ledger, numbers: Codes, ack: hg.TableAck, tell: Tell) -> None:
    ack.wait(STUCK_SECONDS)
    ledger.acked_rows[numbers] = 1
    tell(b"A")


def finish(uri: str, slot: int, ledger: Ledger, tell: Tell) -> None:
    """The last writer: every key once more, and what the producer has not heard of."""
    table = hg.open_table(f"{uri}/keyed")
    with table.writer() as writer:
        keyed = Keyed(table, writer, ledger, slot)
        keyed.settle(*keyed.put(np.arange(KEYS)), tell)
        keyed.settle(*keyed.delete(np.arange(STEADY, KEYS, 2)), tell)
    with hg.open_table(f"{uri}/appended").writer() as appended:
        for _ in _produce(appended, int(ledger.next_sequence.max()), slot, ledger, 5, 1, tell):
            pass


# -- reading


def read(uri: str, slot: int, seed: int, reads_max: int, ledger: Ledger, tell: Tell) -> None:
    """A reader's life: one handle on each table, read in all ways; each read is compared with the ledger."""
    chance = random.Random(seed)
    keyed, appended = hg.open_table(f"{uri}/keyed"), hg.open_table(f"{uri}/appended")
    ways: list[Callable[[], list[str]]] = [
        lambda: read_keys(keyed, slot, chance, ledger),
        lambda: read_keys(keyed, slot, chance, ledger),
        lambda: look_up(keyed, slot, chance, ledger),
        lambda: read_rows(appended, chance, ledger),
        lambda: count(keyed, appended, ledger),
    ]
    for _ in range(reads_max):
        try:
            problems = chance.choice(ways)()
        except (hg.SnapshotExpiredError, hg.CommitConflictError):  # those that say "try again"
            tell(b"X")
            continue
        if problems:
            sys.stderr.write("\n".join(problems[:20]) + "\n")
            raise AssertionError(f"{len(problems)} problems")
        tell(b"R")
        time.sleep(chance.choice([0.0, 0.0, 0.02]))


def _scanned(table: hg.Table, columns: list[str], chance: random.Random) -> pa.Table:
    scan = table.scan(columns)
    if chance.random() < 0.5:
        return scan.to_arrow()
    batches = []
    for batch in scan.to_batches():
        batches.append(batch)
        if chance.random() < 0.3:
            time.sleep(0.01)  # what is left to read may be replaced and collected meanwhile
    return pa.Table.from_batches(batches, scan.schema)


def _checked_payload(found: pa.Table, numbers: Codes) -> list[str]:
    return [] if found.column("payload").combine_chunks().equals(payloads(numbers)) else ["a row is not what was put"]


def read_keys(table: hg.Table, slot: int, chance: random.Random, ledger: Ledger) -> list[str]:
    began = ledger.now()
    found = _scanned(table, ["payload", "k", "version"], chance)
    return _judged_keys(found, began, np.arange(KEYS), slot, ledger)


def look_up(table: hg.Table, slot: int, chance: random.Random, ledger: Ledger) -> list[str]:
    asked = np.array(chance.sample(range(KEYS), chance.choice([1, 10, 60])), np.int64)
    began = ledger.now()
    return _judged_keys(table.lookup(asked.tolist()), began, asked, slot, ledger)


def _judged_keys(found: pa.Table, began: Any, asked: Codes, slot: int, ledger: Ledger) -> list[str]:
    keys, versions = found.column("k").to_numpy(), found.column("version").to_numpy()
    return ledger.wrong_keys(began, keys, versions, asked, slot) + _checked_payload(found, keys * 7 + versions)


def read_rows(table: hg.Table, chance: random.Random, ledger: Ledger) -> list[str]:
    began = ledger.now()
    found = _scanned(table, ["number", "payload"], chance)
    numbers = found.column("number").to_numpy()
    return ledger.wrong_rows(began, numbers) + _checked_payload(found, numbers)


def count(keyed: hg.Table, appended: hg.Table, ledger: Ledger) -> list[str]:
    """By numbers alone."""
    began = ledger.now()
    steady = keyed.scan(filter=f"k < {STEADY}").count()
    rows, distinct = keyed.sql("select count(*), count(distinct k) from t").to_pylist()[0].values()
    appended_count = appended.scan().count()
    problems = [] if rows == distinct else [f"{rows} rows of {distinct} keys"]
    if steady < began.steady:
        problems.append(f"{steady} of the steady keys, after {began.steady}")
    if appended_count < len(began.numbers):
        problems.append(f"{appended_count} appended rows, after {len(began.numbers)}")
    return problems


# -- compaction, collection


def _tables(uri: str) -> list[hg.Table]:
    return [hg.open_table(f"{uri}/{name}") for name in ("keyed", "appended")]


def compact(uri: str, seed: int, rounds: int, tell: Tell) -> None:
    """Of two compactors one may be slower, and its inputs collected: it looks again, or says that it was beaten."""
    chance = random.Random(seed)
    for _ in range(rounds):
        for table in _tables(uri):
            tables.compact_shard.__kwdefaults__["slice_rows"] = chance.choice([20, 200, 1 << 20])
            try:
                table.compact(1 << 20, full=chance.random() < 0.5)
                tell(b"P")
            except hg.CommitConflictError:
                tell(b"B")


def collect(uri: str, seed: int, rounds: int, tell: Tell) -> None:
    chance = random.Random(seed)
    for _ in range(rounds):
        for table in _tables(uri):
            table.gc(dry_run=False, min_age=0.0, sweep=chance.random() < 0.2)
            tell(b"G")
        time.sleep(chance.choice([0.0, 0.05]))


def check(uri: str) -> None:
    for table in _tables(uri):
        report = table.verify(deep=True)
        assert report.ok, report.problems


# -- the end


def judge(uri: str, slot: int, ledger: Ledger) -> None:
    """Nothing is under way any more, and the last word on every key was acknowledged: table and ledger are one."""
    check(uri)
    keyed, appended = hg.open_table(f"{uri}/keyed"), hg.open_table(f"{uri}/appended")
    for _ in range(2):
        codes = ledger.acked.max(0)
        found = keyed.scan().to_arrow()
        shown = dict(zip(found.column("k").to_pylist(), found.column("version").to_pylist(), strict=True))
        right = {key: int(code) // 2 for key, code in enumerate(codes) if code % 2 == 0}
        assert shown == right, {key: (shown.get(key), right.get(key)) for key in range(KEYS) if shown.get(key) != right.get(key)}
        assert found.num_rows == len(right), "a key is there twice"
        chance = random.Random(0)
        problems = read_keys(keyed, slot, chance, ledger) + read_rows(appended, chance, ledger)
        assert not problems, problems[:20]
        status = [shard for table in (keyed, appended) for shard in table.status().shards]
        assert all(shard.lag == 0 for shard in status), status
        compact(uri, 1, 1, lambda _: None)
        collect(uri, 1, 1, lambda _: None)
