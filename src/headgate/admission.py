"""Puts that may come twice: which sequence of which producer a writer has accepted.

Owns: the answer to a repeated put, and the marks of what was acknowledged. Does not own: where marks are kept (manifest),
nor how a put is queued (pipeline).

All of it happens under the pipeline's lock, right before a put is accepted. So of two threads with the same sequence one is
accepted and the other gets its Ack, whatever the order; and a put that was refused for lack of room never came here, so its
sequence is still free (A15).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from headgate.clock import Clock
from headgate.errors import InvalidInputError, OutOfSequenceError
from headgate.manifest.model import ProducerMark
from headgate.wal.ack import Ack, decided
from headgate.wal.entry import Put

_ACKS_KEPT_PER_PRODUCER = 1024


class _Producer:
    """What this writer accepted from one producer."""

    __slots__ = ("acks", "mark", "offered", "sequence", "used")

    def __init__(self, mark: ProducerMark | None) -> None:
        self.mark = mark
        self.sequence = mark.sequence if mark is not None else -1
        self.used = False
        self.acks: OrderedDict[int, Ack] = OrderedDict()
        self.offered: tuple[int, Ack] | None = None

    def settle(self) -> None:
        """Under the lock: what was offered counts if its put was accepted. An interrupt may come between the two, or here."""
        if self.offered is None:
            return
        sequence, ack = self.offered
        if ack._accepted:
            self.acks[sequence] = ack
            self.sequence, self.used = sequence, True
        self.offered = None


class Admission:
    """The producers of one writer, from the marks that its claim found. To be called under the pipeline's lock."""

    def __init__(self, shard: str, epoch: int, clock: Clock, marks: Mapping[str, ProducerMark]) -> None:
        self._shard, self._epoch, self._clock = shard, epoch, clock
        self._known = {name: _Producer(mark) for name, mark in marks.items()}
        self.marks: dict[str, ProducerMark] = {}
        """What this writer has acknowledged of each."""

    def admit(self, put: Put, ack: Ack, consecutive: bool) -> Ack | None:
        """None: it is new. Else the Ack of its first copy.

        Args:
            consecutive: a producer's sequences follow each other in this shard.

        Raises:
            OutOfSequenceError: one is missing before it.
        """
        name, sequence = put.producer, put.sequence
        assert name is not None, "only counted puts come here"
        assert sequence is not None, "only counted puts come here"
        known = self._known.get(name)
        if known is None:
            known = _Producer(None)
        known.settle()
        if sequence <= known.sequence:
            first = known.acks.get(sequence)
            if first is not None:
                return first
            if known.mark is None or known.mark.sequence < sequence:  # only where numbers may be skipped
                raise OutOfSequenceError(
                    f"producer {name!r} sent sequence {sequence} after {known.sequence}, and this shard never got it",
                    hint=f"send {known.sequence + 1}: sequences follow each other, so that nothing overtakes",
                )
            return decided(self._clock, self._shard, known.mark.epoch, known.mark.position)
        if consecutive and known.used and sequence != known.sequence + 1:
            raise OutOfSequenceError(
                f"producer {name!r} sent sequence {sequence} after {known.sequence}",
                hint=f"send {known.sequence + 1}: sequences follow each other, so that nothing overtakes",
            )
        self._known[name] = known
        known.offered = sequence, ack
        return None

    def acknowledged(self, position: int, puts: Sequence[Put]) -> None:
        """An entry with these puts is durable, and everything before it."""
        for put in puts:
            if put.producer is None or put.sequence is None:
                continue
            mark = ProducerMark(sequence=put.sequence, epoch=self._epoch, position=position, time=self._clock.now())
            self.marks[put.producer] = mark
            known = self._known[put.producer]
            known.mark = mark
            while len(known.acks) > _ACKS_KEPT_PER_PRODUCER and next(iter(known.acks.values())).done():
                known.acks.popitem(last=False)

    def sequence(self, name: str) -> int | None:
        """The highest sequence accepted from a producer; None: never heard of."""
        known = self._known.get(name)
        if known is None:
            return None
        known.settle()
        return known.sequence if known.sequence >= 0 else None


def checked_sequence(producer: str | None, sequence: int | None) -> tuple[str, int]:
    if not isinstance(producer, str) or not producer or len(producer) > 256:
        raise InvalidInputError(f"the producer is {producer!r}", hint="a name of 1 to 256 characters, with a sequence")
    if isinstance(sequence, bool) or not isinstance(sequence, int) or sequence < 0:
        raise InvalidInputError(
            f"the sequence of producer {producer!r} is {sequence!r}", hint="a whole number from 0, one more with each put"
        )
    return producer, sequence
