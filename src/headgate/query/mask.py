"""Masks: which rows of a source count.

Owns: one bit per row. Does not own: which bits (shadow, memory).
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from headgate.keys import Bools, Offsets


class Mask:
    """True for each row that counts. Never changes."""

    __slots__ = ("bits", "count", "rows")

    def __init__(self, rows: int, bits: pa.BooleanArray | None = None) -> None:
        self.rows = rows
        self.bits = bits
        """None: all of them count."""
        self.count = rows if bits is None else int(bits.true_count)
        """How many count."""

    @classmethod
    def of(cls, counts: Bools) -> Mask:
        packed = np.packbits(counts, bitorder="little")
        return cls(len(counts), pa.Array.from_buffers(pa.bool_(), len(counts), [None, pa.py_buffer(packed)]))

    @classmethod
    def joined(cls, masks: list[Mask]) -> Mask:
        """Of sources that follow each other as one."""
        if len(masks) == 1:
            return masks[0]
        if all(mask.bits is None for mask in masks):
            return cls(sum(mask.rows for mask in masks))
        return cls.of(np.concatenate([mask.bools() for mask in masks]))

    def bools(self) -> Bools:
        if self.bits is None:
            return np.ones(self.rows, np.bool_)
        packed = np.frombuffer(self.bits.buffers()[1], np.uint8)
        first = self.bits.offset
        return np.unpackbits(packed, count=first + self.rows, bitorder="little")[first:].view(np.bool_)

    def hiding(self, *offsets: Offsets) -> Mask:
        """The same, with further rows that do not count."""
        if not any(map(len, offsets)):
            return self
        counts = self.bools()
        for some in offsets:
            counts[some] = False
        return Mask.of(counts)

    def opposite(self) -> Mask:
        return Mask.of(~self.bools())

    def part(self, start: int, rows: int) -> pa.BooleanArray | None:
        """Of some rows that follow each other; nothing is copied. None: they all count."""
        if self.bits is None:
            return None
        part = self.bits.slice(start, rows)
        return None if part.true_count == rows else part

    def at(self, offsets: Offsets) -> Bools:
        """Which of these rows count."""
        if self.bits is None:
            return np.ones(len(offsets), np.bool_)
        bits = np.frombuffer(self.bits.buffers()[1], np.uint8)
        place = offsets + self.bits.offset
        return np.asarray(bits[place >> 3] >> (place & 7) & 1, np.bool_)
