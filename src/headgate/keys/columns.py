"""The third form of keys: several columns of whole numbers that do not fit 64 bits together by their types.

Owns: sorting, comparing and finding them, exactly. Does not own: how a table's key becomes one (order).

By their values they fit most often: an order's number and the number of a line within it. So each column
counts from its least value here, and together they are one number (packed): of the same order, and
different for different keys. It is good for the keys at hand only, so keys that come from elsewhere are
packed by the ranges of these, and those that lie outside are none of these. Where even that does not fit
64 bits, columns are compared one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import numpy.typing as npt

from headgate.keys.form import Bools, Keys, NumberKeys, Offsets

Column = npt.NDArray[np.int64]
_FEW = 64
_PACKED_MAX = (1 << 63) - 1


class _Packing:
    """How the values of each column become parts of one number."""

    __slots__ = ("least", "most", "spans")

    def __init__(self, least: Sequence[int], most: Sequence[int]) -> None:
        self.least, self.most = tuple(least), tuple(most)
        self.spans = tuple(high - low + 1 for low, high in zip(least, most, strict=True))

    @property
    def fits(self) -> bool:
        return prod(self.spans) <= _PACKED_MAX

    def pack(self, columns: Sequence[Column]) -> Column:
        packed = columns[0] - self.least[0]
        for column, low, span in zip(columns[1:], self.least[1:], self.spans[1:], strict=True):
            if span > 1:
                packed *= span
                packed += column
                packed -= low
        return packed

    def holds(self, columns: Sequence[Column]) -> Bools:
        inside = np.ones(len(columns[0]), np.bool_)
        for column, low, high in zip(columns, self.least, self.most, strict=True):
            inside &= (column >= low) & (column <= high)
        return inside


class ColumnKeys(Keys):
    """Keys of several columns, each int64."""

    __slots__ = ("_packed", "columns")

    def __init__(self, columns: Sequence[Column]) -> None:
        self.columns = tuple(columns)
        self._packed: tuple[_Packing, Column] | None = None

    def __len__(self) -> int:
        return len(self.columns[0])

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in self.columns) + (0 if self._packed is None else self._packed[1].nbytes)

    def part(self, start: int, stop: int) -> ColumnKeys:
        part = ColumnKeys([column[start : max(start, stop)] for column in self.columns])
        if self._packed is not None:
            part._packed = self._packed[0], self._packed[1][start : max(start, stop)]
        return part

    def take(self, offsets: Offsets) -> ColumnKeys:
        return ColumnKeys([column[offsets] for column in self.columns])

    def joined(self, *others: Keys) -> ColumnKeys:
        all_keys = [self, *(other for other in others if isinstance(other, ColumnKeys))]
        return ColumnKeys([np.concatenate(columns) for columns in zip(*(keys.columns for keys in all_keys), strict=True)])

    def owned(self) -> ColumnKeys:
        return ColumnKeys([column.copy() for column in self.columns])

    def packed(self) -> tuple[_Packing, Column] | None:
        """As one number each, kept. None: they do not fit."""
        if self._packed is None and len(self):
            packing = _Packing([int(column.min()) for column in self.columns], [int(column.max()) for column in self.columns])
            if packing.fits:
                self._packed = packing, packing.pack(self.columns)
        return self._packed

    def order(self) -> Offsets:
        packed = self.packed()
        return np.lexsort(self.columns[::-1]) if packed is None else np.argsort(packed[1], kind="stable")

    def newest(self) -> Offsets | None:
        if len(self) <= 1 or self.is_ascending():
            return None
        packed = self.packed()
        return super().newest() if packed is None else NumberKeys(packed[1]).newest()

    def same_as_next(self) -> Bools:
        return self.part(1, len(self)).equal(self.part(0, max(0, len(self) - 1)))

    def is_ascending(self) -> bool:
        if self._packed is not None:
            return bool((self._packed[1][1:] > self._packed[1][:-1]).all())
        return bool(_less([column[:-1] for column in self.columns], [column[1:] for column in self.columns]).all())

    def equal(self, others: Keys) -> Bools:
        assert isinstance(others, ColumnKeys)
        same = self.columns[0] == others.columns[0]
        for mine, theirs in zip(self.columns[1:], others.columns[1:], strict=True):
            same = same & (mine == theirs)
        return np.asarray(same)

    def positions(self, others: Keys) -> Offsets:
        assert isinstance(others, ColumnKeys)
        if len(others) >= _FEW and len(self):
            # What lies outside these ranges in a column may still lie between two of these: only with ranges for both it is one number.
            both = [(int(min(a.min(), b.min())), int(max(a.max(), b.max()))) for a, b in zip(self.columns, others.columns, strict=True)]
            packing = _Packing([low for low, _ in both], [high for _, high in both])
            if packing.fits:
                return np.searchsorted(packing.pack(self.columns), packing.pack(others.columns))
        if len(others) < _FEW:
            return np.array([self._position([column[at] for column in others.columns]) for at in range(len(others))], np.int64)
        low, high = np.zeros(len(others), np.int64), np.full(len(others), len(self), np.int64)
        for _ in range(len(self).bit_length()):
            middle = (low + high) // 2
            inside = np.minimum(middle, max(0, len(self) - 1))
            less = _less([column[inside] for column in self.columns], others.columns) & (low < high)
            low, high = np.where(less, middle + 1, low), np.where(less, high, middle)
        return low

    def _position(self, key: Sequence[np.int64]) -> int:
        """How many of these, which ascend, are less than one key."""
        low, high = 0, len(self)
        for column, value in zip(self.columns, key, strict=True):
            part = column[low:high]
            low, high = low + int(np.searchsorted(part, value)), low + int(np.searchsorted(part, value, "right"))
        return low

    def overlap(self, others: Keys) -> Offsets:
        if not len(self) or not len(others):
            return np.zeros(0, np.int64)
        ends = self.take(np.array([0, len(self) - 1]))
        first, last = others.positions(ends)
        return super().overlap(others.part(int(first), int(last) + 1))

    def find(self, others: Keys) -> Offsets:
        assert isinstance(others, ColumnKeys)
        packed = self.packed() if len(others) >= _FEW else None
        if packed is None:
            return super().find(others)
        packing, mine = packed
        inside = packing.holds(others.columns)
        if inside.all():
            return _found(mine, packing.pack(others.columns))
        found = np.full(len(others), -1, np.int64)
        chosen = np.flatnonzero(inside)
        found[chosen] = _found(mine, packing.pack([column[chosen] for column in others.columns]))
        return found


def _found(mine: Column, wanted: Column) -> Offsets:
    if not len(mine):
        return np.full(len(wanted), -1, np.int64)
    at = np.searchsorted(mine, wanted)
    return np.where((at < len(mine)) & (mine[np.minimum(at, len(mine) - 1)] == wanted), at, -1)


def _less(one: Sequence[Column], two: Sequence[Column]) -> Bools:
    """One by one, by the first column that differs."""
    less = np.asarray(one[-1] < two[-1])
    for a, b in zip(reversed(one[:-1]), reversed(two[:-1]), strict=True):
        less = (a < b) | ((a == b) & less)
    return less
