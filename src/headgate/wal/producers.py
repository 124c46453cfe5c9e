"""The table of producers: what was accepted from each, so that a retry is not a second copy.

Owns: the marks, their merging and their forgetting. Does not own: who may put (pipeline).
"""

from __future__ import annotations

from collections.abc import Iterable

from headgate.manifest.model import ProducerMark
from headgate.wal.entry import Entry

POSITIONS_KEPT_MIN = 10_000
"""A producer is forgotten only after this many positions, and after the retention's age."""


def marks_of(entry: Entry) -> Iterable[tuple[str, ProducerMark]]:
    """What an entry says of producers."""
    for put in entry.puts:
        if put.producer is not None and put.sequence is not None:
            yield put.producer, ProducerMark(sequence=put.sequence, epoch=entry.epoch, position=entry.position, time=entry.time)


def merge(into: dict[str, ProducerMark], marks: Iterable[tuple[str, ProducerMark]]) -> None:
    """The higher sequence stays, so merging again changes nothing."""
    for name, mark in marks:
        known = into.get(name)
        if known is None or mark.sequence > known.sequence:
            into[name] = mark


def pruned(marks: dict[str, ProducerMark], *, position: int, time: float, retention_seconds: float) -> dict[str, ProducerMark]:
    """Without those that are both old, by the entries' own times, and far behind."""
    return {
        name: mark
        for name, mark in marks.items()
        if time - mark.time <= retention_seconds or position - mark.position <= POSITIONS_KEPT_MIN
    }
