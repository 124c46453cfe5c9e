"""The changes of a table in batches that are planned in one place and read in many.

Owns: cuts through all shards, how a batch ends, which parts it has, and what follows when one is done with.
Does not own: one shard's changes (feed), the records of consumers (consumer), who runs the parts (spark).

A cut says for each shard how far it was read: an offset, and as long as its snapshot has not been given the
pin that holds it. Whoever plans keeps nothing but cuts, so it may die anywhere and go on from the last one: what lies
between two cuts is the same rows however often it is read.

    cut A  {"0000": (0, 0, pin)}            the rows of the pin come first
    cut B  {"0000": (17, 2)}                they were given; changes go on there
    cut C  {"0000": (40, 2), "0001": …}     changes, and a shard that came since: it is added before anything of it is read

A shard enters a cut in a batch that reads nothing of it, so where it begins stands in the cut and is not found out twice.
The children of a shard that was split enter when it was read to its end, and it leaves.

Parts of one batch are read beside each other. Unless more parts are asked for than that gives, all changes of a shard are
in one part, in order: whoever takes the rows of a part as they come sees those of one key in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from headgate.checkpoint import unpin
from headgate.clock import Clock, map_ordered
from headgate.consumer import AT_ONCE, Beginning, OpenConsumer, Start, pin_snapshot, start_of
from headgate.cuts import ChangePart, Cut, CutPlace, Stretch, cut_from_json, cut_to_json
from headgate.errors import NotFoundError, SnapshotExpiredError, WalTruncatedError
from headgate.feed import Horizon, Offset, change_schema, cuts_between, earliest, horizon, latest, next_shards, read, stamped
from headgate.manifest.model import ShardManifest
from headgate.shard import Shard
from headgate.snapshot import Snapshot

PIN_SECONDS = 86_400.0
"""The lease of a snapshot without a consumer."""
TASK_ENTRIES = 32
"""Shards with fewer new entries are read together: a task costs more than reading them."""
_PLACES_SECONDS = 1.0
_SNAPSHOTS_KEPT = 8
_LOOK_SECONDS = 0.02


class HasShards:
    """A table, as far as its changes are concerned; what it has opened it keeps."""

    def __init__(
        self,
        shards: Callable[[], Sequence[Shard]],
        handle: Callable[[str], Shard],
        settle: Callable[[Shard, ShardManifest], object],
        clock: Clock,
    ) -> None:
        """
        Args:
            shards: those of now.
            handle: one by its id, also one that was split since.
            settle: have announcements decided whose lease is over.
        """
        self.shards, self.handle, self.settle, self.clock = shards, handle, settle, clock
        self._kept: dict[tuple[str, str], Snapshot] = {}

    def snapshot(self, shard: str, pin: str) -> Snapshot:
        """What a checkpoint holds of one shard, with what this process has opened of it."""
        known = self._kept.pop((shard, pin), None)
        if known is None:
            handle = self.handle(shard)
            if pin not in handle.log.manifests.load().checkpoints:
                raise SnapshotExpiredError(
                    f"the snapshot {pin} of shard {shard} is gone", hint="begin again with a new checkpoint; leaseTtl holds it longer"
                )
            known = Snapshot(f"{shard}/{pin}", handle.places.table.uri, (handle,), handle.rules, pin)
        while len(self._kept) >= _SNAPSHOTS_KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[shard, pin] = known
        return known

    def descendants(self, id: str) -> set[str]:
        """The shards that a shard was split into, and what those were split into."""
        found: set[str] = set()
        waiting = [id]
        while waiting:
            children = next_shards(self.handle(waiting.pop()).log.manifests.load()).keys() - found
            found |= children
            waiting += children
        return found


class ChangeBatches:
    """Plans batches of changes, from wherever a reader wants to begin. See ``Table.change_batches``."""

    def __init__(
        self,
        table: HasShards,
        start: Beginning | Mapping[str, Offset],
        consumer: str | None = None,
        *,
        fail_on_data_loss: bool = True,
        pin_seconds: float = PIN_SECONDS,
    ) -> None:
        self._table, self._start, self._name = table, start, consumer
        self._fails, self._pin_seconds = fail_on_data_loss, pin_seconds
        self._begin: Cut | None = None
        self._consumer: OpenConsumer | None = None
        self._done: Cut = {}
        self._let_go: set[tuple[str, str]] = set()
        self.seen: Cut = {}
        """The end of the changes, as of the last look."""

    to_json = staticmethod(cut_to_json)
    from_json = staticmethod(cut_from_json)

    # -- beginnings

    def begin(self) -> Cut:
        """Where it all begins. The same again, however often it is asked for (P12). With a consumer: where that is."""
        if self._begin is None:
            shards = list(self._lines(self._start if isinstance(self._start, Mapping) else ()).values())
            if self._name is not None:
                self._consumer = self._open(shards, self._start)
                self._begin = {id: _place(start) for id, start in self._consumer.starts.items()}
            else:
                self._begin = dict(zip((s.id for s in shards), self._each(self._begin_of, shards), strict=True))
        return dict(self._begin)

    def _begin_of(self, shard: Shard) -> CutPlace:
        where: Offset | Beginning = self._start if not isinstance(self._start, Mapping) else self._start.get(shard.id, "origin")
        if isinstance(where, Offset):
            where = self._there(shard, where)
        return _place(start_of(shard, where) or pin_snapshot(shard, self._pin_seconds))

    def resume(self, cut: Mapping[str, CutPlace]) -> None:
        """All before this cut is done with: go on there. A consumer is taken over, and moved there; pins that were given go."""
        if self._name is None:
            given = {(id, place.given) for id, place in cut.items() if place.given is not None} - self._let_go
            self._each(lambda one: unpin(self._table.handle(one[0]).log, one[1]), sorted(given))
            self._let_go |= given
        if self._name is None or self._consumer is not None:
            return
        shards = self._lines(cut)
        begun = [(shards[id], place.offset) for id, place in cut.items() if place.snapshot is None]
        there = self._each(lambda one: self._there(*one), begun)
        self._consumer = self._open(list(shards.values()), {one[0].id: offset for one, offset in zip(begun, there, strict=True)})
        self._done = {id: place for id, place in cut.items() if place.snapshot is None}

    def _lines(self, read: Iterable[str]) -> dict[str, Shard]:
        """The shards to read, if these are being read: those that were split since first, and their children after them."""
        shards = {shard.id: shard for shard in self._table.shards()}
        split = [id for id in read if id not in shards]
        later = set().union(*(self._table.descendants(id) for id in split))
        return {id: self._table.handle(id) for id in split} | {id: shard for id, shard in shards.items() if id not in later}

    def _open(self, shards: Sequence[Shard], where: Beginning | Mapping[str, Offset]) -> OpenConsumer:
        assert self._name is not None
        consumer = OpenConsumer(shards, self._name, where, self._table.clock)
        consumer.hold_parts(shards, self._table.handle)
        return consumer

    def _there(self, shard: Shard, offset: Offset) -> Offset:
        """Where reading goes on if what comes next may be gone, and that is to be passed over."""
        if self._fails:
            return offset
        return _clipped(offset, earliest(shard.log.manifests.load()))

    # -- batches

    def latest(self) -> Cut:
        """The end of the changes as of now: what is announced has a moment to be placed."""
        table, shards = self._table, self._table.shards()
        deadline = table.clock.monotonic() + _PLACES_SECONDS
        while True:
            manifests = self._each(lambda shard: shard.log.manifests.load(), shards)
            waiting = [one for one in zip(shards, manifests, strict=True) if one[1].announced]
            for shard, manifest in waiting:
                table.settle(shard, manifest)
            if not waiting or table.clock.monotonic() >= deadline:
                break
            table.clock.sleep(_LOOK_SECONDS)
        return {shard.id: CutPlace(*offset) for shard, offset in zip(shards, self._each(latest, shards), strict=True)}

    def plan(
        self,
        cut: Mapping[str, CutPlace],
        *,
        max_entries: int | None = None,
        max_bytes: int | None = None,
        until: Mapping[str, CutPlace] | None = None,
    ) -> Cut:
        """Where the next batch ends; ``cut`` itself if there is nothing new. Never before it, and never past ``until``.

        Args:
            max_entries: at most so many entries and loads, over all shards; those that are furthest behind get the most.
            max_bytes: about so much at most, divided among the shards that have something; one entry or load of each fits.

        Raises:
            WalTruncatedError: what comes next was collected, and that is not to be passed over.
        """
        shards = {shard.id: shard for shard in self._table.shards()}
        lines = {id: shards.get(id) or self._table.handle(id) for id in cut}
        reading = [id for id, place in cut.items() if place.snapshot is None]
        found = dict(zip(reading, self._each(lambda id: self._horizon(lines[id], cut[id].offset), reading), strict=True))
        end: Cut = dict(cut)
        # 1. Snapshots that were not given yet: all of them, or where there are limits one shard's.
        waiting = [id for id in sorted(cut) if cut[id].snapshot is not None]
        for id in waiting[:1] if max_entries is not None or max_bytes is not None else waiting:
            end[id] = CutPlace(*cut[id].offset, given=cut[id].snapshot if self._name is None else None)
        # 2. Changes, up to where the order is certain, and the limits.
        ends = {id: _before(one.end, until, id, cut[id].offset) for id, one in found.items()}
        lags = {id: _lag(found[id].begin, ends[id]) for id in reading if _lag(found[id].begin, ends[id]) > 0}
        shares = _shares(lags, max_entries) if max_entries is not None else {}
        for id in lags:
            most = shares.get(id)
            if most == 0:
                continue
            one = found[id]
            if max_bytes is not None:
                share = max(1, max_bytes // len(lags))
                limit = one.limited_bytes(lines[id].log, most, share)
            else:
                limit = one.end if most is None else one.limited(most)
            end[id] = CutPlace(*_before(limit, until, id, one.begin))
        # 3. Shards that came since, and children of those that were read to their end. Nothing of them is read yet.
        self._let_in(cut, end, shards, found, until)
        self.seen = {id: CutPlace(*one.end) for id, one in found.items()}
        return end

    def _horizon(self, shard: Shard, offset: Offset) -> Horizon:
        try:
            found = horizon(shard, offset)
        except WalTruncatedError:
            if self._fails:
                raise
            found = horizon(shard, self._there(shard, offset))
        if found.is_open:
            self._table.settle(shard, found.manifest)
        return found

    def _let_in(
        self,
        cut: Mapping[str, CutPlace],
        end: Cut,
        shards: Mapping[str, Shard],
        found: Mapping[str, Horizon],
        until: Mapping[str, CutPlace] | None,
    ) -> None:
        for id, one in found.items():
            children = next_shards(one.manifest)
            if not children or one.begin < one.end:
                continue
            # A child that is not there any more was split itself: what it came to may be below ``until``.
            if until is None or all(child in until or child not in shards for child in children):
                del end[id]
                for child, offset in children.items():
                    end[child] = self._enter(self._table.handle(child), offset)
        for id, shard in self._lines(end).items():
            if id not in end and (until is None or id in until):
                end[id] = self._enter(shard, None)

    def _enter(self, shard: Shard, offset: Offset | None) -> CutPlace:
        if self._consumer is not None:
            return _place(self._consumer.add(shard, offset or "origin"))
        if offset is not None:
            return CutPlace(*offset)
        return _place(start_of(shard, "origin") or pin_snapshot(shard, self._pin_seconds))

    # -- parts

    def parts(
        self, start: Mapping[str, CutPlace], end: Mapping[str, CutPlace], columns: Sequence[str] | None = None, *, parts_min: int = 1
    ) -> list[ChangePart]:
        """What lies between two cuts, for workers. Small shards go together.

        Args:
            columns: those of the table that will be read.
            parts_min: at least so many, if there are as many entries and loads. Then changes of one shard may be in several.
        """
        stretches: list[Stretch] = []
        found: list[ChangePart] = []
        for id, place in sorted(end.items()):
            before = start.get(id)
            if before is None:
                continue  # it enters here
            if before.snapshot is not None:
                if place.snapshot is None:
                    found += [ChangePart((one,)) for one in self._snapshot_parts(id, before, columns)]
            elif before.offset != place.offset:
                stretches.append(Stretch(id, before.offset, place.offset))
        if parts_min > 1:
            stretches = self._cut_up(stretches, parts_min)
            return found + [ChangePart((one,)) for one in stretches]
        return found + [ChangePart(tuple(some)) for some in _together(stretches)]

    def _snapshot_parts(self, id: str, place: CutPlace, columns: Sequence[str] | None) -> Iterator[Stretch]:
        assert place.snapshot is not None
        for part in self._table.snapshot(id, place.snapshot).parts(columns):
            yield Stretch(id, place.offset, place.offset, place.snapshot, part)

    def _cut_up(self, stretches: Sequence[Stretch], parts_min: int) -> list[Stretch]:
        total = sum(_lag(one.start, one.end) for one in stretches)
        most = max(1, total // parts_min)

        def pieces(one: Stretch) -> list[Stretch]:
            manifest = self._table.handle(one.shard).log.manifests.load()
            cuts = cuts_between(manifest, one.start, one.end, most)
            return [Stretch(one.shard, low, high) for low, high in zip([one.start, *cuts], [*cuts, one.end], strict=True)]

        return [piece for some in self._each(pieces, stretches) for piece in some]

    # -- ends

    def done(self, cut: Mapping[str, CutPlace]) -> None:
        """All before this cut is done with: the consumer's offset moves there; pins of snapshots that were given go.

        Raises:
            ConsumerTakenError: somebody else reads by this name now (P15).
        """
        self.resume(cut)
        if self._consumer is not None:
            moved = [(id, place.offset) for id, place in cut.items() if place.snapshot is None and self._done.get(id) != place]
            advance = self._consumer.advance
            self._each(lambda one: advance(self._table.handle(one[0]), one[1]), moved)
            self._done = {id: place for id, place in cut.items() if place.snapshot is None}

    def _each(self, work: Callable[[Any], Any], some: Sequence[Any]) -> list[Any]:
        return list(map_ordered(self._table.clock, work, list(some), parallel=AT_ONCE)) if some else []


def _place(start: Start) -> CutPlace:
    return CutPlace(*start.offset, start.snapshot)


def _clipped(offset: Offset, least: Offset) -> Offset:
    return Offset(max(offset.position, least.position), max(offset.load, least.load))


def _before(end: Offset, until: Mapping[str, CutPlace] | None, id: str, begin: Offset) -> Offset:
    """The earlier of two cuts, and not before ``begin``. What ``until`` does not name was split before: it is read to its end."""
    if until is None or id not in until:
        return end
    limit = until[id].offset
    earlier = end if end.position <= limit.position and end.load <= limit.load else limit
    return earlier if earlier.position >= begin.position and earlier.load >= begin.load else begin


def _lag(start: Offset, end: Offset) -> int:
    return max(0, end.position - start.position) + max(0, end.load - start.load)


def _shares(lags: Mapping[str, int], budget: int) -> dict[str, int]:
    """A budget, divided: nobody gets more than it has, and what one leaves the others get; the last ones in line are those with most."""
    shares = {}
    waiting = sorted(lags, key=lambda id: (lags[id], id))
    for number, id in enumerate(waiting):
        shares[id] = min(lags[id], budget // (len(waiting) - number))
        budget -= shares[id]
    return shares


def _together(stretches: Sequence[Stretch]) -> Iterator[list[Stretch]]:
    """Shards in groups that are worth a task; one with a load has its own."""
    group: list[Stretch] = []
    size = 0
    for one in stretches:
        weight = _lag(one.start, one.end) if one.start.load == one.end.load else TASK_ENTRIES
        if group and size + weight > TASK_ENTRIES:
            yield group
            group, size = [], 0
        group.append(one)
        size += weight
    if group:
        yield group


# -- reading, anywhere


def read_part(table: HasShards, part: ChangePart, *, fail_on_data_loss: bool = True) -> Iterator[pa.RecordBatch]:
    """The rows of a part, with the table's columns of now and the marks of changes. Writes nothing.

    Raises:
        WalTruncatedError: some of it was collected, and that is not to be passed over.
        SnapshotExpiredError: the snapshot's lease is over.
    """
    for stretch in part.stretches:
        if stretch.part is not None:
            yield from _read_snapshot(table, stretch)
        else:
            yield from _read_changes(table.handle(stretch.shard), stretch, fail_on_data_loss)


def _read_changes(shard: Shard, stretch: Stretch, fail_on_data_loss: bool) -> Iterator[pa.RecordBatch]:
    at = stretch.start
    while at != stretch.end:
        try:
            for batch in read(shard, at, stretch.end):
                at = batch.offset
                yield batch.rows
            return
        except WalTruncatedError:
            least = earliest(shard.log.manifests.load())
            beyond = _clipped(at, least)
            if fail_on_data_loss or beyond == at:
                raise
            if beyond.position > stretch.end.position:
                return
            at = Offset(beyond.position, min(beyond.load, stretch.end.load))


def _read_snapshot(table: HasShards, stretch: Stretch) -> Iterator[pa.RecordBatch]:
    assert stretch.snapshot is not None
    assert stretch.part is not None
    snapshot = table.snapshot(stretch.shard, stretch.snapshot)
    time = _taken_at(table.handle(stretch.shard), stretch.snapshot)
    schema = change_schema(snapshot.rules)
    for rows in snapshot.read(stretch.part):
        marks = stamped(rows.num_rows, None, stretch.start.position, stretch.start.load, time)
        yield pa.RecordBatch.from_arrays([*rows.columns, *marks], schema=schema)


def _taken_at(shard: Shard, pin: str) -> float:
    try:
        return shard.log.manifests.load().checkpoints[pin].created_at
    except (KeyError, NotFoundError):  # just dropped: reading will tell
        return 0.0
