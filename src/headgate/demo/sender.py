"""A writer process of the demonstration: sends the changes of its shards, and says how it goes.

    python -m headgate.demo.sender URI FILE SHARD,SHARD… FIRST RATE NAME

FILE holds the changes as Arrow batches, in order; FIRST is the number of the first one to send, RATE
how many rows to send per second. Each change has its number as its sequence, so a successor may send
again what the process before it may or may not have written. Says on stdout, as JSON lines: what was
acknowledged up to now, and how long that took.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from typing import Any

import pyarrow as pa

import headgate as hg

_SAY_SECONDS = 0.25
_AHEAD = 64


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


class _Told:
    """What was acknowledged since the last line."""

    def __init__(self) -> None:
        self.sequence = -1
        self.rows = 0
        self.milliseconds: list[float] = []
        self._said = time.monotonic()

    def note(self, sequence: int, rows: int, seconds: float) -> None:
        self.sequence = sequence
        self.rows += rows
        self.milliseconds.append(seconds * 1e3)
        if time.monotonic() - self._said >= _SAY_SECONDS:
            self.tell()

    def tell(self) -> None:
        ordered = sorted(self.milliseconds)
        if ordered:
            p50, p99 = ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
            say(event="acknowledged", time=time.time(), sequence=self.sequence, rows=self.rows, puts=len(ordered), p50=p50, p99=p99)
        self.rows, self.milliseconds, self._said = 0, [], time.monotonic()


def listen(waiting: queue.Queue[tuple[int, int, float, hg.TableAck] | None], failed: list[BaseException]) -> None:
    told = _Told()
    while (item := waiting.get()) is not None:
        sequence, rows, sent, ack = item
        try:
            ack.wait()
        except hg.HeadgateError as error:
            failed.append(error)
            return
        told.note(sequence, rows, time.perf_counter() - sent)
    told.tell()


def main(uri: str, file: str, shards: str, first: int, rate: float, name: str) -> None:
    table = hg.open_table(uri)
    began = time.perf_counter()
    config = hg.ShardWriterConfig(max_memtable_rows=25_000, max_memtable_age=5.0)
    with table.writer(config, shards=shards.split(",")) as writer:
        epochs = {shard: one.epoch for shard, one in writer.writers.items()}
        say(event="open", time=time.time(), seconds=time.perf_counter() - began, epochs=epochs)
        waiting: queue.Queue[tuple[int, int, float, hg.TableAck] | None] = queue.Queue(_AHEAD)
        failed: list[BaseException] = []
        listener = threading.Thread(target=listen, args=(waiting, failed))
        listener.start()
        start, sent_rows = time.perf_counter(), 0
        try:
            with pa.ipc.open_file(file) as changes:
                for sequence in range(first, changes.num_record_batches):
                    rows, told = changes.get_batch_with_custom_metadata(sequence)
                    pause = start + sent_rows / rate - time.perf_counter()
                    if pause > 0:
                        time.sleep(pause)
                    if failed:
                        break
                    sent = time.perf_counter()
                    if told[b"op"] == b"delete":
                        ack = writer.delete(rows.select(list(table.key)), producer=name, sequence=sequence)
                    else:
                        ack = writer.put(rows, producer=name, sequence=sequence)
                    sent_rows += rows.num_rows
                    waiting.put((sequence, rows.num_rows, sent, ack))
        finally:
            waiting.put(None)
            listener.join()
        if failed:
            raise failed[0]
    say(event="done", time=time.time())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), float(sys.argv[5]), sys.argv[6])
