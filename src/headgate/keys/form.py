"""Keys as one number or as bytes, and what can be done with whole columns of them.

Owns: sorting, comparing and finding, exactly. Does not own: how a table's key becomes one of them (order).
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Offsets: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]

_DENSE = 4  # a table by direct address may be this much larger than the keys
_SEARCH_COST = 50
_MANY = 64
_TABLE_LEAST = 1 << 21


class Keys:
    """The keys of some rows, in the rows' order. Never changes."""

    __slots__ = ()

    def __len__(self) -> int:
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        raise NotImplementedError

    def part(self, start: int, stop: int) -> Keys:
        """Some that follow each other; nothing is copied."""
        raise NotImplementedError

    def take(self, offsets: Offsets) -> Keys:
        raise NotImplementedError

    def joined(self, *others: Keys) -> Keys:
        """These and then others, all of one table."""
        raise NotImplementedError

    def owned(self) -> Keys:
        """The same in memory of their own: what they were cut from may go."""
        raise NotImplementedError

    def order(self) -> Offsets:
        """The offsets in key order; equal keys in their own order."""
        raise NotImplementedError

    def same_as_next(self) -> Bools:
        """For each but the last, if the next one is equal."""
        raise NotImplementedError

    def is_ascending(self) -> bool:
        """Each is less than the next, so all are different."""
        raise NotImplementedError

    def positions(self, others: Keys) -> Offsets:
        """Where others would stand among these, which ascend: how many of these are less than each."""
        raise NotImplementedError

    def equal(self, others: Keys) -> Bools:
        """One by one."""
        raise NotImplementedError

    def find(self, others: Keys) -> Offsets:
        """Where others are among these, which ascend; -1 for those that are not."""
        if not len(self) or not len(others):
            return np.full(len(others), -1, np.int64)
        at = self.positions(others)
        inside = np.minimum(at, len(self) - 1)
        return np.where((at < len(self)) & self.take(inside).equal(others), at, -1)

    def overlap(self, others: Keys) -> Offsets:
        """The offsets, ascending, of these that are also among others; both ascend."""
        if not len(self) or not len(others):
            return np.zeros(0, np.int64)
        first, last = self.positions(others.part(0, 1))[0], self.positions(others.part(len(others) - 1, len(others)))[0]
        mine = self.part(first, min(int(last) + 1, len(self)))
        if len(mine) < len(others):  # search the fewer among the more
            return np.asarray(np.flatnonzero(others.find(mine) >= 0) + first)
        found = mine.find(others)
        return np.asarray(found[found >= 0] + first)

    def newest(self) -> Offsets | None:
        """The offsets of the last row of each key, in key order. None: all rows, as they stand."""
        if len(self) <= 1 or self.is_ascending():
            return None
        order = self.order()
        return np.asarray(order[np.append(~self.take(order).same_as_next(), True)])


class NumberKeys(Keys):
    """Keys that fit 64 bits: int64, or uint64 where that is what orders them."""

    __slots__ = ("_table", "values")

    def __init__(self, values: npt.NDArray[Any]) -> None:
        self.values = values
        self._table: tuple[int, Bools] | None = None

    def __len__(self) -> int:
        return len(self.values)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def part(self, start: int, stop: int) -> NumberKeys:
        return NumberKeys(self.values[start:stop])

    def take(self, offsets: Offsets) -> NumberKeys:
        return NumberKeys(self.values[offsets])

    def joined(self, *others: Keys) -> NumberKeys:
        return NumberKeys(np.concatenate([self.values, *(other.values for other in others if isinstance(other, NumberKeys))]))

    def owned(self) -> NumberKeys:
        return NumberKeys(self.values.copy())

    def order(self) -> Offsets:
        return np.argsort(self.values, kind="stable")

    def same_as_next(self) -> Bools:
        return np.asarray(self.values[1:] == self.values[:-1])

    def is_ascending(self) -> bool:
        return bool((self.values[1:] > self.values[:-1]).all())

    def positions(self, others: Keys) -> Offsets:
        assert isinstance(others, NumberKeys)
        return np.searchsorted(self.values, others.values)

    def equal(self, others: Keys) -> Bools:
        assert isinstance(others, NumberKeys)
        return np.asarray(self.values == others.values)

    def overlap(self, others: Keys) -> Offsets:
        assert isinstance(others, NumberKeys)
        if not len(self) or not len(others):
            return np.zeros(0, np.int64)
        wanted = others.values
        first, last = np.searchsorted(self.values, wanted[[0, -1]])
        mine = self.values[first : last + 1]
        if len(mine) and mine[-1] > wanted[-1]:
            mine = mine[:-1]
        table = others._by_address() if len(mine) <= _SEARCH_COST * len(wanted) else None
        if table is None:
            return super().overlap(others)
        least, there = table
        return np.asarray(np.flatnonzero(there[_places(mine, least)]) + first)

    def _by_address(self) -> tuple[int, Bools] | None:
        """For each number from the least of these to the greatest, if it is one of them. None: they are too far apart.

        Looking up each of many in it costs about a fiftieth of a search among them. It is kept for the next ones.
        """
        if self._table is None:
            least, most = int(self.values[0]), int(self.values[-1])
            if most - least >= max(_DENSE * len(self), _TABLE_LEAST):
                return None
            if 0 < least <= most - least:
                least = 0
            there = np.zeros(most - least + 1, np.bool_)
            there[_places(self.values, least)] = True
            self._table = least, there
        return self._table

    def newest(self) -> Offsets | None:
        values = self.values
        if len(values) <= 1 or self.is_ascending():
            return None
        least, most = int(values.min()), int(values.max())
        if most - least < _DENSE * len(values):
            last = np.full(most - least + 1, -1, np.int64)
            last[_places(values, least)] = np.arange(len(values))  # of equal ones the last stays
            return last[last >= 0]
        order = np.argsort(values)  # not stable, and twice as fast: the last of equal ones is the greatest offset
        ordered = values[order]
        starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
        return np.maximum.reduceat(order, starts) if len(starts) < len(order) else order


def _places(values: npt.NDArray[Any], least: int) -> Offsets:
    return (values - values.dtype.type(least) if least else values).astype(np.int64, copy=False)


class ByteKeys(Keys):
    """All other keys: bytes (``large_binary``) that are ordered as the keys are.

    Most work is done on words: eight bytes of each key, from where not all of them are alike, as a
    number of the same order. Where words differ they decide; keys with equal words are compared whole.
    """

    __slots__ = ("_words", "values")

    def __init__(self, values: pa.LargeBinaryArray) -> None:
        self.values = values
        self._words: tuple[int, npt.NDArray[np.uint64]] | None = None

    def __len__(self) -> int:
        return len(self.values)

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes) + (0 if self._words is None else self._words[1].nbytes)

    def part(self, start: int, stop: int) -> ByteKeys:
        part = ByteKeys(self.values.slice(start, max(0, stop - start)))
        if self._words is not None:
            part._words = self._words[0], self._words[1][start : max(start, stop)]
        return part

    def take(self, offsets: Offsets) -> ByteKeys:
        return ByteKeys(self.values.take(pa.array(offsets)))

    def joined(self, *others: Keys) -> ByteKeys:
        return ByteKeys(pa.concat_arrays([self.values, *(other.values for other in others if isinstance(other, ByteKeys))]))

    def owned(self) -> ByteKeys:
        return ByteKeys(pa.concat_arrays([self.values, self.values.slice(0, 0)]))

    def order(self) -> Offsets:
        bounds = pc.min_max(self.values)
        words = self._words_from(_alike(bounds["min"].as_py() or b"", bounds["max"].as_py() or b""))
        order = np.argsort(words, kind="stable")
        ordered = words[order]
        same = ordered[1:] == ordered[:-1]
        tied = np.flatnonzero(np.append(same, False) | np.append(False, same))
        if len(tied):
            rows = np.sort(order[tied])
            order[tied] = rows[pc.sort_indices(self.values.take(pa.array(rows))).to_numpy()]
        return order

    def _words_from(self, alike: int) -> npt.NDArray[np.uint64]:
        """The words of keys whose first ``alike`` bytes are the same; those that are too short end in zeros."""
        count = len(self.values)
        _, ends_buffer, data = self.values.buffers()
        ends = np.frombuffer(ends_buffer, np.int64)[self.values.offset : self.values.offset + count + 1] if count else np.zeros(1, np.int64)
        if data is None or ends[-1] == ends[0]:
            return np.zeros(count, np.uint64)
        padded = np.append(np.frombuffer(data, np.uint8)[ends[0] : ends[-1]], np.zeros(8, np.uint8))
        words = np.ndarray(len(padded) - 7, ">u8", padded, strides=(1,))
        starts = np.minimum(ends[:-1] + alike, ends[1:]) - ends[0]
        found: npt.NDArray[np.uint64] = words[starts].astype(np.uint64)
        have = ends[1:] - ends[0] - starts
        if have.min() >= 8:
            return found
        drop = ((8 - np.minimum(have, 8)) * 8).astype(np.uint64)
        kept = np.where(have == 0, np.uint64(0), ~np.uint64(0) << np.minimum(drop, np.uint64(63)))
        return found & kept

    def _known_words(self) -> tuple[int, npt.NDArray[np.uint64]]:
        """Of keys that ascend: how many bytes they share, and their words; kept."""
        if self._words is None:
            alike = _alike(self.values[0].as_py(), self.values[-1].as_py())
            self._words = alike, self._words_from(alike)
        return self._words

    def overlap(self, others: Keys) -> Offsets:
        for keys in (self, others):
            if len(keys) >= _MANY and isinstance(keys, ByteKeys):
                keys._known_words()  # once for all parts of them
        return super().overlap(others)

    def find(self, others: Keys) -> Offsets:
        if len(others) < _MANY or len(self) < _MANY or not others.is_ascending():
            return super().find(others)
        assert isinstance(others, ByteKeys)
        found = np.full(len(others), -1, np.int64)
        # What lies between two of these begins as both do: its word tells it from all that have another.
        low, high = others.positions(self.part(0, 1))[0], others.positions(self.part(len(self) - 1, len(self)))[0]
        wanted = others.part(low, min(int(high) + 1, len(others)))
        if len(wanted) and pc.greater(wanted.values[-1], self.values[-1]).as_py():
            wanted = wanted.part(0, len(wanted) - 1)
        if not len(wanted):
            return found
        alike, words = self._known_words()
        theirs = wanted._words_from(alike)
        at = np.searchsorted(words, theirs)  # none is greater than the last of these, nor is its word
        likely = np.flatnonzero(words[at] == theirs)
        following = at[likely] + 1
        is_only = (following == len(words)) | (words[np.minimum(following, len(words) - 1)] != theirs[likely])
        only, several = likely[is_only], likely[~is_only]
        only = only[self.take(at[only]).equal(wanted.take(only))]
        found[low + only] = at[only]
        if len(several):
            found[low + several] = Keys.find(self, wanted.take(several))
        return found

    def same_as_next(self) -> Bools:
        return _bools(pc.equal(self.values.slice(1), self.values.slice(0, max(0, len(self.values) - 1))))

    def is_ascending(self) -> bool:
        return bool(_bools(pc.greater(self.values.slice(1), self.values.slice(0, max(0, len(self.values) - 1)))).all())

    def positions(self, others: Keys) -> Offsets:
        assert isinstance(others, ByteKeys)
        if hasattr(pc, "search_sorted"):
            return np.asarray(pc.search_sorted(self.values, others.values)).astype(np.int64)
        return _positions(self.values, others.values)

    def equal(self, others: Keys) -> Bools:
        assert isinstance(others, ByteKeys)
        return _bools(pc.equal(self.values, others.values))


def _alike(least: bytes, most: bytes) -> int:
    """How many bytes all keys from one to the other begin with."""
    return next((i for i, (a, b) in enumerate(zip(least, most, strict=False)) if a != b), min(len(least), len(most)))


def _bools(array: pa.BooleanArray) -> Bools:
    return np.asarray(array.to_numpy(zero_copy_only=False), np.bool_)


def _positions(values: pa.Array, wanted: pa.Array) -> Offsets:
    """Search by halves, all at once: for versions of Arrow that cannot do it."""
    low, high = np.zeros(len(wanted), np.int64), np.full(len(wanted), len(values), np.int64)
    for _ in range(len(values).bit_length()):
        middle = (low + high) // 2
        inside = np.minimum(middle, max(0, len(values) - 1))
        less = _bools(pc.less(values.take(pa.array(inside)), wanted)) & (low < high)
        low, high = np.where(less, middle + 1, low), np.where(less, high, middle)
    return low
