"""What was sent, acknowledged and seen: memory that all processes of a torture share and no kill takes away.

Owns: the arrays, and what a read may show between two moments. Does not own: reading and writing tables.

Every process writes only to rows of its own (slots), so no two stores meet; a store is one aligned
word. A slot is given to another process only when its owner is dead.

    a keyed row    carries a version, which grows along the log: the epoch of its shard, then a count. An
                   operation is a code: twice its version, one more for a delete. So what is newer is larger
    an appended    row carries a number of its own, and exists once
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

STEADY, DELETED = 150, 50
KEYS = STEADY + DELETED
"""The first are never deleted; the last are, now and then."""
PRODUCED = 200_000
"""Numbers below are a producer's: three for each sequence."""
PER_SEQUENCE = 3
PER_WRITER = 3_000
WRITERS = 4_000
COUNTS_PER_EPOCH = 1_000_000
SLOTS = 24

Codes = npt.NDArray[np.int64]
Marks = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Moment:
    """What a read that begins now must show at least."""

    codes: Codes
    numbers: Marks
    steady: int


class Ledger:
    def __init__(self, folder: Path) -> None:
        def shared(name: str, shape: tuple[int, ...], kind: type) -> np.memmap:
            return np.memmap(folder / name, dtype=kind, mode="w+", shape=shape)

        self.sent: Codes = shared("sent", (SLOTS, KEYS), np.int64)
        self.deleted: Codes = shared("deleted", (SLOTS, KEYS), np.int64)
        """The last delete that was sent."""
        self.acked: Codes = shared("acked", (SLOTS, KEYS), np.int64)
        self.seen: Codes = shared("seen", (SLOTS, KEYS), np.int64)
        self.steady: Codes = shared("steady", (SLOTS,), np.int64)
        """How many of the steady keys were seen."""
        rows = PRODUCED + WRITERS * PER_WRITER
        self.sent_rows: Marks = shared("sent-rows", (rows,), np.uint8)
        self.acked_rows: Marks = shared("acked-rows", (rows,), np.uint8)
        self.seen_rows: Marks = shared("seen-rows", (rows,), np.uint8)
        self.next_sequence: Codes = shared("next-sequence", (SLOTS,), np.int64)

    def now(self) -> Moment:
        codes = np.maximum(self.acked.max(0), self.seen.max(0))
        return Moment(codes, np.flatnonzero(self.acked_rows | self.seen_rows), int(self.steady.max()))

    def wrong_keys(self, began: Moment, keys: Codes, versions: Codes, asked: Codes, slot: int) -> list[str]:
        """What is wrong with these rows, read since ``began``, of those whose key was ``asked`` for."""
        problems = [f"key {key} is there twice" for key in _twice(keys)]
        found = np.zeros(KEYS, np.int64)
        found[keys] = versions * 2
        floor, asked_for = began.codes, np.zeros(KEYS, np.bool_)
        asked_for[asked] = True
        for key in np.flatnonzero((found > 0) & ~asked_for):
            problems.append(f"key {key} was not asked for")
        for key in np.flatnonzero((found > 0) & (found < floor)):
            problems.append(f"key {key} is {found[key] / 2}, after {floor[key] / 2} was acknowledged or seen")
        for key in np.flatnonzero(found > self.sent.max(0)):
            problems.append(f"key {key} is {found[key] / 2}, which nobody has sent")
        may_be_gone = (floor == 0) | (floor % 2 == 1) | (self.deleted.max(0) > floor)
        for key in np.flatnonzero(asked_for & (found == 0) & ~may_be_gone):
            problems.append(f"key {key} is missing; {floor[key] / 2} was acknowledged or seen")
        if len(asked) == KEYS:
            steady = int(np.count_nonzero(found[:STEADY]))
            if steady < began.steady:
                problems.append(f"{steady} of the steady keys, after {began.steady}")
            self.steady[slot] = max(int(self.steady[slot]), steady)
        self.seen[slot] = np.maximum(self.seen[slot], found)
        return problems

    def wrong_rows(self, began: Moment, numbers: Codes) -> list[str]:
        problems = [f"appended row {number} is there twice" for number in _twice(numbers)]
        found = np.zeros(len(self.sent_rows), np.bool_)
        found[numbers] = True
        for number in began.numbers[~found[began.numbers]]:
            what = "acknowledged" if self.acked_rows[number] else "seen"
            problems.append(f"appended row {number} is missing; it was {what}")
        for number in numbers[self.sent_rows[numbers] == 0]:
            problems.append(f"appended row {number} was never sent")
        self.seen_rows[numbers] = 1
        return problems


def _twice(values: Codes) -> Sequence[int]:
    unique, counts = np.unique(values, return_counts=True)
    return list(unique[counts > 1])
