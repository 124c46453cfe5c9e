"""What the processes of the torture do: write, follow, collect, check. See torture.py.

Owns: their lives, and the numbers by which a put is known. Does not own: who is killed when.
"""

from __future__ import annotations

import json
import os
import random
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from torture_driver import STUCK_SECONDS

import headgate as hg
from headgate.wal import appender, fence
from headgate.wal.collect import collect_entries

SCHEMA = pa.schema([("put", pa.int64()), ("part", pa.int32()), ("parts", pa.int32()), ("payload", pa.binary())])
PRODUCERS = ("p0", "p1")
PER_PRODUCER, PER_WRITER, PER_THREAD = 10**13, 10**6, 10**5
"""Number of a put: producer and sequence, or writer, thread and count."""
RECORD = struct.Struct("<cxxxiqqq")
"""What a writer tells: kind, thread, number, epoch, position."""


def payload(number: int) -> bytes:
    return struct.pack("<q", number) * (1 + number * 2654435761 % 97)


def rows_of(number: int) -> pa.RecordBatch:
    parts = 1 + number % 3
    columns = [[number] * parts, range(parts), [parts] * parts, [payload(number)] * parts]
    return pa.RecordBatch.from_arrays([pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], schema=SCHEMA)


def write(uri: str, name: int, seed: int, starts: dict[str, int], puts_max: int, pipe: int) -> None:
    """A writer's life: open, put from several threads, end well or badly or not at all."""
    chance = random.Random(seed)

    def tell(kind: bytes, thread: int = 0, number: int = 0, epoch: int = 0, position: int = 0) -> None:
        os.write(pipe, RECORD.pack(kind, thread, number, epoch, position))

    config = hg.ShardWriterConfig(
        enable_memtable=False,
        max_inflight=chance.choice([1, 2, 4, 8]),
        max_wal_buffer_size=chance.choice([1, 2000, 8 << 20]),
        max_unflushed_memtable_bytes=chance.choice([1, 20_000, 1 << 30]),
        durable_write=chance.random() < 0.2,
    )
    try:
        writer = hg.open_table(uri).shard("0000").writer(config)
    except (hg.FencedError, hg.CommitConflictError):
        tell(b"K")
        return
    tell(b"O", epoch=writer.epoch)
    ended: list[BaseException] = []

    def run(thread: int, numbers: Iterator[tuple[int, dict[str, Any]]], window: int) -> None:
        waiting: list[tuple[int, hg.Ack]] = []
        try:
            for number, options in numbers:
                waiting.append((number, writer.put(rows_of(number), **options)))
                while len(waiting) >= window:
                    settle(thread, *waiting.pop(0))
            while waiting:
                settle(thread, *waiting.pop(0))
        except BaseException as error:  # a thread's end: judged below
            ended.append(error)

    def settle(thread: int, number: int, ack: hg.Ack) -> None:
        receipt = ack.wait(STUCK_SECONDS)
        epoch, position = receipt["0000"]
        tell(b"D" if receipt.duplicate else b"A", thread, number, epoch, position)

    def produced(producer: str, start: int) -> Iterator[tuple[int, dict[str, Any]]]:
        base = (PRODUCERS.index(producer) + 1) * PER_PRODUCER
        for sequence in range(start, start + puts_max):
            yield base + sequence, {"producer": producer, "sequence": sequence}

    def counted(thread: int) -> Iterator[tuple[int, dict[str, Any]]]:
        for count in range(puts_max):
            yield name * PER_WRITER + thread * PER_THREAD + count, {}

    work = [produced(producer, start) for producer, start in starts.items()]
    work += [counted(thread) for thread in range(chance.randint(0 if work else 1, 2))]
    threads = [threading.Thread(target=run, args=(i, numbers, chance.choice([1, 1, 4]))) for i, numbers in enumerate(work)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        if chance.random() < 0.7:
            writer.close()
        elif chance.random() < 0.5:
            writer.abort()
    except hg.FencedError as error:
        ended.append(error)
    for error in ended:
        if not isinstance(error, hg.FencedError):
            raise error
    tell(b"F" if ended else b"C")


def line_of(entry: hg.Entry) -> str:
    """One entry as text; checks that every put in it is whole."""
    numbers = []
    for batch in entry.batches:
        number = batch.column("put")[0].as_py()
        assert batch.equals(rows_of(number)), f"put {number} at {entry.position} is not what was put"
        numbers.append(number)
    return json.dumps([entry.position, entry.epoch, entry.kind, numbers])


def follow(uri: str, output: Path) -> None:
    shard = hg.open_table(uri).shard("0000")
    with output.open("wb", buffering=0) as file:
        for entry in hg.WalTailer(shard, max_poll_interval=0.02).read(0, follow=True, include_seals=True):
            file.write(line_of(entry).encode() + b"\n")


def lines(path: Path) -> list[list[Any]]:
    """The whole lines of a file that somebody may be writing, or was when it was killed."""
    text = path.read_bytes() if path.exists() else b""
    return [json.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]


def collect(uri: str, seed: int, tailed: Path, archive: Path) -> None:
    """Copy, trim, delete: never past the tailer, and nothing that was not copied."""
    chance = random.Random(seed)
    table = hg.open_table(uri)
    shard = table.shard("0000")
    seen, kept = lines(tailed), lines(archive)
    upto = max(0, (seen[-1][0] + 1 if seen else 0) - chance.choice([0, 1, 10]))
    # What was trimmed with the last copied entry, seals, cannot be asked for any more.
    start = max(kept[-1][0] + 1 if kept else 0, hg.WalTailer(shard).first_position())
    with archive.open("ab", buffering=0) as file:
        whole = archive.read_bytes()
        file.truncate(whole.rfind(b"\n") + 1)  # what a killed one left half-written
        for entry in hg.WalTailer(shard).read(start, include_seals=True):
            if entry.position >= upto:
                break
            file.write(line_of(entry).encode() + b"\n")
    if upto:
        table.trim(before=upto)
    collect_entries(shard.log, dry_run=False, sweep=chance.random() < 0.3)


def check(uri: str) -> None:
    report = hg.open_table(uri).verify(deep=True)
    assert report.ok, report.problems


def dump(uri: str, output: Path) -> None:
    check(uri)
    shard = hg.open_table(uri).shard("0000")
    output.write_text("".join(line_of(entry) + "\n" for entry in hg.WalTailer(shard).read(include_seals=True)))


def create(uri: str) -> None:
    hg.create_table(uri, SCHEMA)


# -- planted bugs


def _acknowledge_early() -> None:
    """The entry is on its way, surely that will do."""
    persist = appender.EpochWriter.persist

    def later(self: appender.EpochWriter, position: int, body: memoryview) -> None:
        threading.Thread(target=lambda: (time.sleep(0.01), persist(self, position, body)), daemon=True).start()

    appender.EpochWriter.persist = later  # type: ignore[method-assign]


def _forget_producers() -> None:
    """A successor begins with an empty table of producers."""
    fence.merge = lambda into, marks: None


def _skip_the_seal() -> None:
    """A claimant goes on without ending the epoch before its own."""
    fence.put_seal = lambda *_, **__: None


PLANTS: dict[str, Callable[[], None]] = {
    "acknowledge-early": _acknowledge_early,
    "forget-producers": _forget_producers,
    "skip-the-seal": _skip_the_seal,
}
"""Mistakes that the torture must notice; switched on in every process."""
