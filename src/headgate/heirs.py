"""What becomes of a writer's puts when a shard of its table is split.

Owns: what was sent and is not known to be durable, waiting for a split to end, who may go on with the parts.
Does not own: routing and opening (table_writer), the split itself (life).

A split fences the writer of the shard, like any other claim. A put that ends so was sent or not, and landed or not; the
shard's ``segments`` tell: below the end of its epoch it is durable, else it never happened. Those that never happened are
sent again, to the parts, in the order in which they were put, before anything newer. So nothing is lost, and nothing is
doubled, on tables without a key too.

Who goes on? The writer that held the shard when the split began, and nobody else: t0 writer A · t1 writer B takes over, A is
fenced · t2 the shard is split · t3 A wakes up, finds the parts and claims them, and B, the healthy one, is fenced by a dead
one. So a splitter notes after whom it came; and parts that somebody has claimed since are left to him. We may have claimed
a part ourselves and lost it before it was open: to the next splitter, or because the store failed. So we know our writers by
their ids, all that we ever opened.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from itertools import count

import pyarrow as pa

from headgate.clock import Clock
from headgate.errors import FencedError, HeadgateError
from headgate.manifest.model import Segments, ShardManifest
from headgate.schema import RowRules
from headgate.table_ack import TableAck
from headgate.wal.ack import Ack
from headgate.wal.entry import Op
from headgate.wal.fence import split_is_over
from headgate.wal.log import ShardLog

_LOOK_SECONDS, _LOOK_SECONDS_MAX = 0.01, 0.5


@dataclass(frozen=True, slots=True)
class Sent:
    """Rows that one shard's writer was given."""

    rows: pa.RecordBatch = field(repr=False)
    op: Op
    producer: str | None
    sequence: int | None
    rules: RowRules = field(repr=False)
    ack: Ack = field(repr=False)
    whole: TableAck = field(repr=False)

    @property
    def fence(self) -> FencedError | None:
        error = self.ack._error
        return error if isinstance(error, FencedError) else None

    def durable_at(self, ends: Segments) -> tuple[int, int] | None:
        """Where it is, if it is. None: it never happened."""
        fence = self.fence
        assert fence is not None, "only what was fenced is asked about"
        if fence.position is None:
            return None
        end = ends.end_of(fence.epoch)
        assert end is not None, "whoever took over has recorded where the epoch ended"
        return (fence.epoch, fence.position) if fence.position < end else None


class Outbox:
    """What the shards of a table were given and have not made durable yet, in the order it was put."""

    def __init__(self) -> None:
        self._numbers = count()
        self._sent: dict[str, dict[int, Sent]] = {}

    def add(self, shard: str, sent: Sent) -> None:
        """Remember it until it is durable, or has failed for another reason than a fence."""
        ack, number = sent.ack, next(self._numbers)
        if ack._done and ack._error is None:
            return
        known = self._sent.get(shard)
        if known is None:
            known = self._sent.setdefault(shard, {})
        known[number] = sent

        def settle() -> None:
            if not isinstance(ack._error, FencedError):
                known.pop(number, None)

        ack._when_done(settle)

    def fenced(self, shard: str) -> list[tuple[int, Sent]]:
        """What is left of a shard that was fenced."""
        return sorted((number, sent) for number, sent in list(self._sent.get(shard, {}).items()) if sent.fence is not None)

    def remove(self, shard: str, number: int) -> None:
        self._sent.get(shard, {}).pop(number, None)

    def shards(self) -> Iterator[str]:
        """Those with something left that was fenced."""
        return (shard for shard in list(self._sent) if self.fenced(shard))


def landed(clock: Clock, shard: str, place: tuple[int, int]) -> Ack:
    """The Ack of a put that turned out to be durable."""
    ack = Ack(clock)
    ack._accepted = True
    ack._decide((shard, *place))
    ack._wake()
    return ack


def failed(clock: Clock, error: HeadgateError) -> Ack:
    """The Ack of a put that never was."""
    ack = Ack(clock)
    ack._decide(None, error)
    ack._wake()
    return ack


def settled(log: ShardLog, deadline: float | None = None) -> ShardManifest:
    """The shard's manifest once it is not being split any more, or its split may be taken back.

    Raises:
        TimeoutError: not by the deadline.
    """
    clock, wait = log.clock, _LOOK_SECONDS
    while True:
        manifest = log.manifests.load()
        if manifest.state != "splitting" or split_is_over(log, manifest):
            return manifest
        if deadline is not None and clock.monotonic() >= deadline:
            raise TimeoutError(f"shard {log.shard} is being split, and was not in time")
        clock.sleep(wait)
        wait = min(_LOOK_SECONDS_MAX, 2 * wait)


def is_heir(manifest: ShardManifest, ours: Container[str]) -> bool:
    """Has nobody but splitters claimed the shard since one of our writers did, if any had? ``ours``: their ids."""
    owner = manifest.owner
    if owner is None:
        return True
    last = owner.writer if owner.split is None else owner.after
    return last is None or last in ours


def only_heir(ours: Container[str]) -> Callable[[ShardManifest], None]:
    """Asked in the commit of a claim: refuses a part that somebody else has claimed since."""

    def check(manifest: ShardManifest) -> None:
        if not is_heir(manifest, ours):
            raise FencedError(
                f"shard {manifest.shard}: another writer has claimed it since the split",
                shard=manifest.shard,
                epoch=manifest.epoch,
                by_epoch=manifest.epoch,
            )

    return check
