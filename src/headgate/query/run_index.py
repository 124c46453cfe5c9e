"""Where keys are in a run.

Owns: a run's keys, as far as they are kept in memory, and finding some among them. Does not own:
which rows count (shadow).

Of every run one key in ``BLOCK_ROWS`` is kept once its keys were read, and all of them as long as
the budget lasts. With all of them a key is found without a read. Without, the blocks that may hold
what is looked for are read, or the whole column when that is most of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from headgate.keys import Bools, KeyOrder, Keys, NumberKeys, Offsets
from headgate.meters import CACHE_HITS, CACHE_MISSES
from headgate.query.mask import Mask
from headgate.run import DELETED, OpenRun
from headgate.schema import RowRules, as_now

BLOCK_ROWS = 1024
KEY_BATCH_ROWS = 1 << 18
_FEW_READS = 8
_READ_COST_ROWS = 200_000  # a read of one block takes about as long as so many rows of a scan
_KEY_BYTES_LEAST = 8  # what any key takes in memory, at least
_PROBES = 64
_PROBES_EACH = 8
_LOADED_ROWS, _LOADED_BYTES = 1 << 20, 64 << 20


class RunIndex:
    """The keys of one run. What it knows grows and never changes."""

    def __init__(self, run: OpenRun, rules: RowRules, order: KeyOrder) -> None:
        self.run, self._rules, self._order = run, rules, order
        self.rows = run.rows
        self.token = run.record.id
        numbers = {name: id for id, name in zip(rules.field_ids, rules.schema.names, strict=True)}
        self._columns = [run.names[numbers[name]] for name in rules.key]
        self.keys: Keys | None = None
        self._sample: Keys | None = None
        self._deleted: Mask | None = None

    @property
    def kept_bytes(self) -> int:
        return sum(keys.nbytes for keys in (self.keys, self._sample) if keys is not None)

    @property
    def is_loaded(self) -> bool:
        """Were its keys read?"""
        return self._sample is not None

    @property
    def most_bytes(self) -> int:
        """What its keys may take in memory, by what is known before they are read: an estimate, and rather too much."""
        samples = self.rows // BLOCK_ROWS + 1
        if isinstance(self._order.none(), NumberKeys):
            return (self.rows + samples) * _KEY_BYTES_LEAST
        return 2 * (self.run.record.bytes + (self.rows + samples) * _KEY_BYTES_LEAST * len(self._columns))

    @property
    def sample(self) -> Keys:
        """One key in ``BLOCK_ROWS``, from the first on; of a run whose keys were read."""
        assert self._sample is not None
        return self._sample

    def load(self, budget_bytes: int) -> None:
        """Read the keys, if that was not done, and keep all of them if they take no more than this."""
        if self._sample is not None:
            CACHE_HITS.add(1, "keys")
            return
        CACHE_MISSES.add(1, "keys")
        kept: list[Keys] | None = [] if self.rows * _KEY_BYTES_LEAST <= budget_bytes else None
        sample, size, at = [], 0, 0
        for keys in self._read(0, self.rows):
            wanted = np.arange(-at % BLOCK_ROWS, len(keys), BLOCK_ROWS)
            sample.append(keys.take(wanted))
            at += len(keys)
            size += keys.nbytes
            if size > budget_bytes:
                kept = None
            elif kept is not None:
                kept.append(keys)
        none = self._order.none()
        if kept is not None:
            self.keys = none.joined(*kept)
        self._sample = none.joined(*sample)

    def deleted(self) -> Mask | None:
        """Which rows are tombstones, or of another shard (what they hide is of that shard, too). None: none is."""
        outside = self.run.outside
        if not self.run.record.tombstones and outside is None:
            return None
        if self._deleted is None:
            if not self.run.record.tombstones:
                assert outside is not None
                self._deleted = Mask.of(outside)
                return self._deleted
            parts = [batch.column(0) for batch in self.run.scan([DELETED], batch_rows=1 << 20)]
            deleted = Mask(self.rows, pa.concat_arrays(parts))
            self._deleted = deleted if outside is None else Mask.of(deleted.bools() | outside)
        return self._deleted

    def deleted_between(self, start: int, stop: int) -> Mask | None:
        """The same for some rows that follow each other; no others are read."""
        if self.run.record.keep is not None:
            self.deleted()
        elif not self.run.record.tombstones:
            return None
        if self._deleted is not None and self._deleted.bits is not None:
            return Mask(stop - start, self._deleted.bits.slice(start, stop - start))
        parts = [batch.column(0) for batch in self.run.scan([DELETED], start=start, stop=stop, batch_rows=1 << 20)]
        return Mask(stop - start, pa.concat_arrays(parts))

    def is_deleted(self, offsets: Offsets) -> Bools:
        deleted = self.deleted()
        return np.zeros(len(offsets), np.bool_) if deleted is None else deleted.at(offsets)

    def between(self, start: int, stop: int) -> Keys:
        """The keys of some rows that follow each other."""
        if self.keys is not None:
            return self.keys.part(start, stop)
        return self._order.none().joined(*self._read(start, stop)) if start < stop else self._order.none()

    def at(self, offsets: Offsets) -> Keys:
        """The keys of some rows."""
        if self.keys is not None or not len(offsets):
            return (self._order.none() if self.keys is None else self.keys).take(offsets)
        return self._keys(self.run.take(offsets, self._columns))

    def chunks(self) -> Iterator[tuple[int, Keys]]:
        """All keys, in order, with the offset of the first of each part."""
        if self.keys is not None:
            yield 0, self.keys
            return
        at = 0
        for keys in self._read(0, self.rows):
            yield at, keys
            at += len(keys)

    def _read(self, start: int, stop: int) -> Iterator[Keys]:
        for batch in self.run.scan(self._columns, start=start, stop=stop, batch_rows=KEY_BATCH_ROWS):
            yield self._keys(batch)

    def _keys(self, batch: pa.RecordBatch) -> Keys:
        return self._order.of(as_now(batch, self.run.names, self._rules, self._rules.key))

    def find(self, keys: Keys) -> Offsets:
        """The offset of each of these keys, which ascend; -1: not there."""
        if self.keys is not None:
            return self.keys.find(keys)
        if self._sample is None or not len(keys) or not self.rows:
            return self._find_by_scan(keys)
        blocks = _last_not_above(self._sample, keys)
        touched = blocks[np.flatnonzero(np.diff(blocks, prepend=-1))]  # each once, as the keys ascend
        groups = np.split(touched, np.flatnonzero(np.diff(touched) > 1) + 1) if len(touched) else []
        if len(groups) > max(_FEW_READS, self.rows // _READ_COST_ROWS):
            return self._find_by_scan(keys)
        found = np.full(len(keys), -1, np.int64)
        for group in groups:
            start = int(group[0]) * BLOCK_ROWS
            first, last = np.searchsorted(blocks, [group[0], group[-1] + 1])
            at = self.between(start, min(self.rows, (int(group[-1]) + 1) * BLOCK_ROWS)).find(keys.part(first, last))
            found[first:last] = np.where(at >= 0, at + start, -1)
        return found

    def overlap(self, keys: Keys) -> Offsets:
        """The offsets of the rows that have one of these keys, which ascend."""
        if self.keys is not None:
            return self.keys.overlap(keys)
        at = self.find(keys)
        return at[at >= 0]

    def _find_by_scan(self, keys: Keys) -> Offsets:
        found = np.full(len(keys), -1, np.int64)
        for start, part in self.chunks():
            first = int(keys.positions(part.part(0, 1))[0])
            last = int(keys.positions(part.part(len(part) - 1, len(part)))[0]) + 1
            at = part.find(keys.part(first, last))
            found[first:last] = np.where(at >= 0, at + start, found[first:last])
        return found

    def lower_bound(self, key: Keys) -> int:
        """How many rows have keys less than this one. Reads few of them."""
        if self.keys is not None:
            return int(self.keys.positions(key)[0])
        low, high = 0, self.rows
        if self._sample is not None:
            block = int(self._sample.positions(key)[0])
            low, high = max(0, block - 1) * BLOCK_ROWS, min(self.rows, block * BLOCK_ROWS)
        while high - low > BLOCK_ROWS:  # each round leaves one part in 64
            probes = np.unique(np.linspace(low, high - 1, _PROBES).astype(np.int64))
            less = int(self.at(probes).positions(key)[0])
            high = int(probes[less]) if less < len(probes) else high
            low = int(probes[less - 1]) + 1 if less else low
        return low + int(self.between(low, high).positions(key)[0])

    def lower_bounds(self, keys: Keys) -> Offsets:
        """The same for many keys, which ascend: all of them are looked for at once, in rounds of few rows each."""
        if self.keys is None and self.rows <= _LOADED_ROWS:
            self.load(_LOADED_BYTES)
        if self.keys is not None or not len(keys):
            return (self._order.none() if self.keys is None else self.keys).positions(keys)
        low, high = np.zeros(len(keys), np.int64), np.full(len(keys), self.rows, np.int64)
        while (low < high).any():
            steps = np.arange(1, _PROBES_EACH + 1)
            probes = np.unique(low[:, None] + (high - low)[:, None] * steps // (_PROBES_EACH + 1))
            probes = probes[probes < self.rows]
            less = self.at(probes).positions(keys)
            low = np.maximum(low, np.where(less > 0, probes[np.maximum(less - 1, 0)] + 1, 0))
            high = np.minimum(high, np.where(less < len(probes), probes[np.minimum(less, len(probes) - 1)], self.rows))
        return low


def _last_not_above(sample: Keys, keys: Keys) -> Offsets:
    """For each key the last sample that is not greater; -1: all are."""
    at = sample.positions(keys)
    inside = np.minimum(at, len(sample) - 1)
    same = (at < len(sample)) & sample.take(inside).equal(keys)
    return at - 1 + same
