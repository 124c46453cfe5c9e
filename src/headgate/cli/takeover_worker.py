"""A writer process of the demonstration. Takes commands as JSON lines on stdin, answers on stdout.

    {"do": "open"}                          claims the shard
    {"do": "read"}                          the ids in the log
    {"do": "put", "sequence": n, …}         one put, and its end
    {"do": "stream", "sequence": n, …}      one put after another until it is fenced or killed

A put has three rows with ids 3n, 3n+1 and 3n+2; with a "producer" it carries its sequence.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import count
from typing import Any

import headgate as hg

ROWS_PER_PUT = 3


def say(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def put(writer: hg.ShardWriter, name: str, sequence: int, producer: str | None) -> bool:
    """Put, wait, tell. False: the writer is fenced."""
    rows = [{"id": ROWS_PER_PUT * sequence + i, "writer": name, "amount": sequence + i / 10} for i in range(ROWS_PER_PUT)]
    say(event="sent", sequence=sequence)
    began = time.perf_counter()
    try:
        receipt = writer.put(rows, producer=producer, sequence=sequence if producer else None).wait()
    except hg.FencedError as error:
        say(event="fenced", sequence=sequence, message=error.message, epoch=error.epoch, position=error.position, by_epoch=error.by_epoch)
        return False
    epoch, position = receipt[writer.shard]
    seconds = time.perf_counter() - began
    say(event="acknowledged", sequence=sequence, epoch=epoch, position=position, duplicate=receipt.duplicate, seconds=seconds)
    return True


def main() -> None:
    name, uri = sys.argv[1:]
    shard = hg.open_table(uri).shard("0000")
    writer: hg.ShardWriter | None = None
    say(event="ready")
    for line in sys.stdin:
        command = json.loads(line)
        producer = command.get("producer")
        if command["do"] == "open":
            began = time.perf_counter()
            writer = shard.writer(hg.ShardWriterConfig(enable_memtable=False))
            seconds = time.perf_counter() - began
            say(event="opened", epoch=writer.epoch, first=writer.wal_stats().next_wal_entry_position, seconds=seconds)
        elif command["do"] == "read":
            ids = [n for entry in shard.tail(follow=False) for batch in entry.batches for n in batch.column("id").to_pylist()]
            say(event="read", ids=ids)
        elif writer is not None and command["do"] == "put":
            put(writer, name, command["sequence"], producer)
        elif writer is not None and command["do"] == "stream":
            for sequence in count(command["sequence"]):
                if not put(writer, name, sequence, producer):
                    break
        elif writer is not None and command["do"] == "close":
            writer.close()
            say(event="closed")


if __name__ == "__main__":
    main()
