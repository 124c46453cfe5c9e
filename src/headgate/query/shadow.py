"""Shadows among runs: the rows that newer runs hide.

Owns: the masks of a shard's runs, kept from one read to the next. Does not own: what rows in memory
hide (sources).

Runs never change, so a mask holds as long as the runs above are the same. A run added on top hides
further rows of those below, found by its keys alone. For anything else (the first read, a
compaction) all masks are made anew, in one pass from the newest run to the oldest. Keys are dealt
with by ranges when they do not fit the budget, so what is held at once does not grow with the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from headgate.clock import SYSTEM_CLOCK
from headgate.keys import KeyOrder, Keys, NumberKeys, Offsets
from headgate.meters import CACHE_BYTES, CACHE_HITS, CACHE_MISSES, watch
from headgate.query.mask import Mask
from headgate.query.run_index import BLOCK_ROWS, RunIndex
from headgate.schema import RowRules
from headgate.view import ReadView

KEY_BUDGET_BYTES = 64 << 20
RANGE_BUDGET_BYTES = 16 << 20
_ENTRY_BYTES, _BOUND_BYTES, _MASK_BYTES = 200, 130, 600  # about, and without a mask's bits
Bounds = tuple[tuple[int, int], ...]
_DENSE = 8
_DENSE_MAX = 1 << 28
_RANGE_ROWS = 1 << 21
_ADDED_MAX = 4
_SEARCHES_MAX = 8


class RangeMasks:
    """Which rows count in ranges of keys, given by where each is in each run: from and up to which offset.

    Whoever reads a range again, as a worker does that serves one read after the other, need not compare its keys.
    """

    def __init__(self) -> None:
        self._masks: dict[Bounds, tuple[Mask, ...]] = {}
        self._lock = SYSTEM_CLOCK.lock()
        self.kept_bytes = 0

    def get(self, bounds: Bounds) -> tuple[Mask, ...] | None:
        """One mask for each run."""
        found = self._masks.get(bounds)
        (CACHE_MISSES if found is None else CACHE_HITS).add(1, "ranges")
        return found

    def keep(self, bounds: Bounds, masks: tuple[Mask, ...]) -> None:
        """Those that were kept first are forgotten first."""
        size = _bytes_of(bounds, masks)
        if not masks or size > RANGE_BUDGET_BYTES:
            return
        with self._lock:
            if bounds in self._masks:
                return
            while self.kept_bytes + size > RANGE_BUDGET_BYTES:
                first = next(iter(self._masks))
                self.kept_bytes -= _bytes_of(first, self._masks.pop(first))
            self._masks[bounds] = masks
            self.kept_bytes += size


def _bytes_of(bounds: Bounds, masks: Sequence[Mask]) -> int:
    return _ENTRY_BYTES + _BOUND_BYTES * len(bounds) + sum(_MASK_BYTES + (0 if mask.bits is None else mask.rows // 8) for mask in masks)


@dataclass(frozen=True)
class KnownRuns:
    """What reads know of the runs of a shard, as they were last seen. Replaced as a whole."""

    signature: tuple[object, ...]
    indexes: dict[str, RunIndex]
    masks: dict[str, tuple[tuple[str, ...], Mask]] = field(default_factory=dict)
    """For each run, which runs were above it, oldest first, and which of its rows count."""
    merged: dict[tuple[object, ...], dict[str, Mask]] = field(default_factory=dict)
    """The same with what is in memory taken in, for the last read (sources)."""
    ranges: RangeMasks = field(default_factory=RangeMasks)
    """For ranges of keys that were read."""

    @property
    def kept_bytes(self) -> int:
        return sum(index.kept_bytes for index in self.indexes.values())


def known_runs(view: ReadView, order: KeyOrder) -> KnownRuns:
    """What is known of the view's runs; nothing is read."""
    rules = view.rules
    signature = (_key_ids(rules), tuple(map(str, order.types)))
    known = view.cache.masks
    if not isinstance(known, KnownRuns) or known.signature != signature:
        known = KnownRuns(signature, {})
    there = {run.record.id: index for run in view.runs if (index := known.indexes.get(run.record.id)) is not None and index.run is run}
    if list(there) == list(known.indexes) and len(there) == len(view.runs):
        return known
    indexes = {run.record.id: there.get(run.record.id) or RunIndex(run, rules, order) for run in view.runs}
    is_other = any(id in known.indexes and id not in there for id in indexes)  # another run under the same id: what it hides is not known
    masks = {} if is_other else {id: mask for id, mask in list(known.masks.items()) if id in indexes}
    known = KnownRuns(signature, indexes, masks)
    watch(known, lambda kept: [(CACHE_BYTES, kept.kept_bytes, ("keys",)), (CACHE_BYTES, kept.ranges.kept_bytes, ("ranges",))])
    view.cache.masks = known
    return known


def _key_ids(rules: RowRules) -> tuple[int, ...]:
    return tuple(rules.field_ids[rules.schema.get_field_index(name)] for name in rules.key)


def fitting_keys(known: KnownRuns, budget_bytes: int) -> list[tuple[RunIndex, int]]:
    """The runs whose keys can be read in any order, and what each may keep of them: newest first, as long as all fit."""
    left = budget_bytes - sum(index.kept_bytes for index in known.indexes.values())
    fitting = []
    for index in reversed(known.indexes.values()):
        if index.is_loaded:
            continue
        left -= index.most_bytes
        if left < 0:
            break  # who may keep how much is only known when those that are newer were read
        fitting.append((index, index.most_bytes))
    return fitting


def load_keys(known: KnownRuns, budget_bytes: int) -> None:
    """Read the keys of all runs; those of the newest ones are kept first."""
    left = budget_bytes - sum(index.kept_bytes for index in known.indexes.values())
    for index in reversed(known.indexes.values()):
        before = index.kept_bytes
        index.load(max(0, left))
        left -= index.kept_bytes - before


def masks_of(known: KnownRuns, budget_bytes: int) -> dict[str, Mask]:
    """Which rows of each run count among the runs: neither hidden by newer ones nor tombstones."""
    ids = list(known.indexes)
    above = {id: tuple(ids[number + 1 :]) for number, id in enumerate(ids)}
    if all(id in known.masks and known.masks[id][0] == above[id] for id in ids):
        return {id: known.masks[id][1] for id in ids}
    load_keys(known, budget_bytes) if len(ids) > 1 else None
    masks = _with_added(known, above) or _anew(known, budget_bytes)
    known.masks.update({id: (above[id], mask) for id, mask in masks.items()})
    return masks


def _with_added(known: KnownRuns, above: dict[str, tuple[str, ...]]) -> dict[str, Mask] | None:
    """The masks of before, with what few runs added on top hide. None: more has changed."""
    ids = list(known.indexes)
    old = [id for id in ids if id in known.masks]
    added = ids[len(old) :]
    if not old or old != ids[: len(old)] or len(added) > _ADDED_MAX:
        return None
    if any(known.masks[id][0] != above[id][: len(above[id]) - len(added)] for id in old):
        return None
    if any(known.indexes[id].keys is None for id in added):
        return None
    masks = {id: known.masks[id][1] for id in old}
    for new in added:
        index = known.indexes[new]
        assert index.keys is not None
        for id in masks:
            masks[id] = masks[id].hiding(known.indexes[id].overlap(index.keys))
        masks[new] = _own(index)
    return masks


def _own(index: RunIndex) -> Mask:
    deleted = index.deleted()
    return Mask(index.rows) if deleted is None else deleted.opposite()


def _anew(known: KnownRuns, budget_bytes: int) -> dict[str, Mask]:
    indexes = list(known.indexes.values())
    masks = [_own(index) for index in indexes]
    if len(indexes) > 1:
        hidden: list[list[Offsets]] = [[] for _ in indexes]
        for starts, pieces in _ranges(indexes, budget_bytes):
            for number, offsets in enumerate(shadowed(pieces)):
                hidden[number].append(offsets + starts[number])
        masks = [mask.hiding(*some) for mask, some in zip(masks, hidden, strict=True)]
    return {index.token: mask for index, mask in zip(indexes, masks, strict=True)}


def _ranges(indexes: Sequence[RunIndex], budget_bytes: int) -> Iterator[tuple[list[int], list[Keys]]]:
    """The keys of all runs, range after range: the offset of each run's first one, and the keys."""
    rows = sum(index.rows for index in indexes)
    if all(index.keys is not None for index in indexes):
        yield [0] * len(indexes), [index.between(0, index.rows) for index in indexes]
        return
    cuts = _cuts([index.sample for index in indexes], 1 + rows // _RANGE_ROWS)
    bounds = [[0, *(index.lower_bound(cut) for cut in cuts), index.rows] for index in indexes]
    for number in range(len(cuts) + 1):
        parts = [(bound[number], bound[number + 1]) for bound in bounds]
        yield [start for start, _ in parts], [index.between(*part) for index, part in zip(indexes, parts, strict=True)]


def _cuts(samples: Sequence[Keys], count: int) -> list[Keys]:
    """Keys that cut all rows into ``count`` ranges of about as many rows each."""
    first, *rest = samples
    together = first.joined(*rest)
    together = together.take(together.order())
    places = np.unique(np.linspace(0, len(together), count + 1).astype(np.int64)[1:-1])
    keys = [together.part(place, place + 1) for place in places if place < len(together)]
    return [keys[0], *(b for a, b in pairwise(keys) if not a.equal(b)[0])] if keys else []


def shadowed(pieces: Sequence[Keys]) -> list[Offsets]:
    """For each of some lists of keys, oldest first, which of its keys are in a later one, some perhaps twice. Each ascends."""
    hidden = [np.zeros(0, np.int64) for _ in pieces]
    if _by_address(pieces, hidden):
        return hidden
    newer: list[Keys] = []
    for number in reversed(range(len(pieces))):
        piece = pieces[number]
        if newer:
            hidden[number] = np.concatenate([piece.overlap(keys) for keys in newer])
        if number:
            newer.append(piece)
            while len(newer) > _SEARCHES_MAX and len(newer[-2]) <= 2 * len(newer[-1]):  # few searches for each, and few merges
                newer[-2:] = [_union(newer[-2], newer[-1])]
    return hidden


def _by_address(pieces: Sequence[Keys], hidden: list[Offsets]) -> bool:
    """Numbers that are dense: a place for each that there may be. False: they are not."""
    values = [piece.values for piece in pieces if isinstance(piece, NumberKeys)]
    present = [some for some in values if len(some)]
    if len(values) < len(pieces) or not present:
        return False
    least, most = min(int(some[0]) for some in present), max(int(some[-1]) for some in present)
    size = most - least + 1
    if size > _DENSE_MAX or size > _DENSE * sum(map(len, present)):
        return False
    seen = np.zeros(size, np.bool_)
    for number in reversed(range(len(values))):
        some = values[number]
        places = (some - some.dtype.type(least) if least else some).astype(np.int64, copy=False)
        hidden[number] = np.flatnonzero(seen[places])
        if number:
            seen[places] = True
    return True


def _union(one: Keys, two: Keys) -> Keys:
    together = one.joined(two)
    newest = together.newest()
    return together if newest is None else together.take(newest)


__all__ = [
    "BLOCK_ROWS",
    "KEY_BUDGET_BYTES",
    "RANGE_BUDGET_BYTES",
    "Bounds",
    "KnownRuns",
    "RangeMasks",
    "fitting_keys",
    "known_runs",
    "load_keys",
    "masks_of",
    "shadowed",
]
