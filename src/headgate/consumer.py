"""Consumers: named readers of the changes, whose offsets hold collection back.

Owns: registering, taking over, moving and dropping a name in one shard, and over all shards of a table; where
a reader begins. Does not own: what lies between two offsets (feed), what a hold keeps (gc, collect).

Each shard's manifest has the consumer's record for that shard: where it is, who reads by that name now, and the
snapshot it still has to be given, pinned by the same commit that registers it. So there is nothing to keep in step.

Over shards, the first one of the table is registered last: a consumer that stands there stands in all shards that
the table had then. A shard where it is missing came later, and is read from its very beginning. If part of
that was collected before anybody looked, the shard is given as a snapshot and then its changes: what they come to
is the same.

Two readers with one name (P15): whoever opens it takes it over; the other one's next move is refused, and tells so.

    t0 A and B know that the name is new · t1 A registers shard 1 and goes on · t2 B comes to shard 1

B overwrites only what it has seen before it began (a rest of a dropped consumer), else it takes over what stands.
An offset never moves back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from headgate.checkpoint import NAME_CHARACTERS_MAX, with_checkpoint
from headgate.clock import Clock, map_ordered
from headgate.errors import ConsumerTakenError, InvalidInputError, NotFoundError
from headgate.failpoint import failpoint
from headgate.feed import HasFeed, Offset, check_there, earliest, latest, next_shards, past_seals, settled
from headgate.manifest.model import ConsumerRecord, ShardManifest
from headgate.wal.log import ShardLog
from headgate.wal.tip import find_tip

Beginning = Literal["earliest", "latest", "snapshot", "origin"]
"""Where a reader begins. "origin": with the very first change of the shard, or its snapshot if that is gone."""
AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class ConsumerPlace:
    """How far a consumer has read one shard."""

    shard: str
    position: int
    load: int
    lag: int
    """Positions and loads that it has not read yet."""
    snapshot: bool
    """It has not read the whole snapshot that it began with."""
    updated: float


@dataclass(frozen=True, slots=True)
class Consumer:
    """A named reader of a table's changes. Times are seconds since 1970."""

    name: str
    places: tuple[ConsumerPlace, ...]
    created: float
    updated: float
    """When it last moved, in any shard."""
    lag: int
    """Over all shards."""

    @property
    def offset(self) -> dict[str, Offset]:
        return {place.shard: Offset(place.position, place.load) for place in self.places}


@dataclass(frozen=True, slots=True)
class Start:
    """Where one shard is read from: ``snapshot``, the id of a checkpoint, first, if there is one."""

    offset: Offset
    snapshot: str | None = None


def check_consumer_name(name: object) -> str:
    if not isinstance(name, str) or not name.strip() or len(name) > NAME_CHARACTERS_MAX:
        raise InvalidInputError(f"the consumer's name is {name!r}", hint=f"1 to {NAME_CHARACTERS_MAX} characters")
    return name


# -- where to begin


def begin(log: ShardLog, manifest: ShardManifest, tip: int | None, where: Offset | Beginning) -> tuple[Offset, bool]:
    """The offset to begin at, and whether a snapshot comes before. The manifest was read after the tip, if that was read."""
    if isinstance(where, Offset):
        return check_there(log, manifest, where, tip), False
    if where == "earliest":
        return earliest(manifest), False
    if where == "origin":
        start = past_seals(manifest, Offset())
        if start.position >= manifest.wal_floor and manifest.load_floor == 0:
            return start, False
    return settled(manifest, manifest.cursor.position if tip is None else tip), where != "latest"


def start_of(shard: HasFeed, where: Offset | Beginning) -> Start | None:
    """Begin without a name. Writes nothing. None: with a snapshot, which is to be pinned."""
    if where == "snapshot":
        return None
    if where == "latest":
        return Start(latest(shard))
    offset, is_snapshot = begin(shard.log, shard.log.manifests.load(), None, where)
    return None if is_snapshot else Start(offset)


def pin_snapshot(shard: HasFeed, lease_seconds: float, *, id: str | None = None, shards: Sequence[str] = ()) -> Start:
    """Pin a snapshot by a checkpoint with a lease, and say where the changes go on after it.

    Args:
        id: of the checkpoint; the same in all shards that belong together, which ``shards`` names.
    """
    log = shard.log
    tip = find_tip(log)[1].position
    id, now = id or log.clock.token(), log.clock.now()

    def change(current: ShardManifest) -> ShardManifest | None:
        end = settled(current, tip).position
        expires = now + lease_seconds
        return with_checkpoint(log, current, id, name=None, created_at=now, expires_at=expires, end=end, shards=shards or (log.shard,))

    committed = log.manifests.commit(change)
    failpoint("consumer.pinned")
    return Start(snapshot_offset(log, committed, id), id)


def snapshot_offset(log: ShardLog, manifest: ShardManifest, id: str) -> Offset:
    """Where the changes go on after the rows of a pinned snapshot."""
    record = manifest.checkpoints[id]
    pinned = manifest if manifest.version == record.version else log.manifests.at(record.version)
    return Offset(record.end, pinned.next_load - 1)


# -- one shard


def claim(shard: HasFeed, name: str, owner: str, where: Offset | Beginning, seen: ConsumerRecord | None, *, is_new: bool) -> Start:
    """Read by this name from now on: go on where it is, or register it.

    Args:
        where: where it begins if it is new here. An offset counts for one that is there, too: it moves there if that is later.
        seen: the record that was there when it was found to be new; it is a rest, and is replaced.
    """
    log = shard.log
    tip = find_tip(log)[1].position
    now, pin = log.clock.now(), log.clock.token()
    start = Start(Offset())

    def change(manifest: ShardManifest) -> ShardManifest | None:
        nonlocal start
        record = manifest.consumers.get(name)
        if record is not None and record.owner == owner:
            start = Start(Offset(record.position, record.load), record.snapshot)
            return None
        if record is not None and not (is_new and record == seen):
            start = Start(Offset(record.position, record.load), record.snapshot)
            moved = record.but(owner=owner, updated_at=now)
            if isinstance(where, Offset):
                start = Start(check_there(log, manifest, where, tip), None)
                moved = _moved(moved, start.offset, now)
                manifest = _without_pin(manifest, record)
            return _with(manifest, name, moved)
        # New here. The tip was read before this manifest, so the cut is certain; and it is held from this commit on.
        offset, is_snapshot = begin(log, manifest, tip, where)
        start = Start(offset, pin if is_snapshot else None)
        fresh = ConsumerRecord(
            position=offset.position, load=offset.load, created_at=now, updated_at=now, owner=owner, snapshot=start.snapshot
        )
        cleared = _without_pin(manifest, record)
        if is_snapshot:
            pinned = with_checkpoint(
                log, cleared, pin, name=None, created_at=now, expires_at=None, end=offset.position, shards=(log.shard,)
            )
            assert pinned is not None, "the id is fresh"
            cleared = pinned
        return _with(cleared, name, fresh)

    log.manifests.commit(change)
    failpoint("consumer.claimed")
    return start


def advance(log: ShardLog, name: str, owner: str, to: Offset) -> None:
    """All before this offset was read, the snapshot before it included. Never moves back.

    Raises:
        ConsumerTakenError: somebody else reads by this name now.
        NotFoundError: it was dropped.
    """
    now = log.clock.now()

    def change(manifest: ShardManifest) -> ShardManifest | None:
        record = owned(log, manifest, name, owner)
        if to.load >= manifest.next_load:
            raise InvalidInputError(f"offset {tuple(to)} lies past the last load of shard {log.shard}, {manifest.next_load - 1}")
        moved = _moved(record, to, now)
        return None if moved == record else _with(_without_pin(manifest, record), name, moved)

    log.manifests.commit(change)
    failpoint("consumer.advanced")


def owned(log: ShardLog, manifest: ShardManifest, name: str, owner: str) -> ConsumerRecord:
    """The record, if it is there and still ours."""
    record = manifest.consumers.get(name)
    if record is None:
        raise NotFoundError(f"shard {log.shard} has no consumer {name!r}", hint="it was dropped; what it held may be collected")
    if record.owner != owner:
        raise ConsumerTakenError(f"shard {log.shard}: another reader has taken over the consumer {name!r}")
    return record


def drop(log: ShardLog, name: str) -> bool:
    """Forget a consumer, and the snapshot it was still reading. False: this shard has it not."""
    was_there = False

    def change(manifest: ShardManifest) -> ShardManifest | None:
        nonlocal was_there
        record = manifest.consumers.get(name)
        if record is None:
            return None
        was_there = True
        kept = {other: one for other, one in manifest.consumers.items() if other != name}
        return _without_pin(manifest, record).but(consumers=kept)

    log.manifests.commit(change)
    return was_there


def _moved(record: ConsumerRecord, to: Offset, now: float) -> ConsumerRecord:
    """Further on, never back; the snapshot is behind it."""
    position, load = max(record.position, to.position), max(record.load, to.load)
    if (position, load, None) == (record.position, record.load, record.snapshot):
        return record
    return record.but(position=position, load=load, snapshot=None, updated_at=now)


def _with(manifest: ShardManifest, name: str, record: ConsumerRecord) -> ShardManifest:
    return manifest.but(consumers={**manifest.consumers, name: record})


def _without_pin(manifest: ShardManifest, record: ConsumerRecord | None) -> ShardManifest:
    if record is None or record.snapshot not in manifest.checkpoints:
        return manifest
    return manifest.but(checkpoints={id: one for id, one in manifest.checkpoints.items() if id != record.snapshot})


# -- all shards


class OpenConsumer:
    """A consumer, as the one reader that goes on with it has it. Pickles.

    Args:
        shards: all shards of the table, in its order.
        where: where a new consumer begins; or an offset, which counts in any case: shards that it does not name
            begin at their origin.
    """

    def __init__(self, shards: Sequence[HasFeed], name: str, where: Beginning | Mapping[str, Offset], clock: Clock) -> None:
        self.name, self._owner = check_consumer_name(name), clock.token()
        self.starts = self._claim_all(shards, where, clock)
        """Where each shard goes on."""

    def _claim_all(self, shards: Sequence[HasFeed], where: Beginning | Mapping[str, Offset], clock: Clock) -> dict[str, Start]:
        if not shards:
            return {}
        manifests = map_ordered(clock, lambda shard: shard.log.manifests.load(), shards, parallel=AT_ONCE)
        seen = {manifest.shard: manifest.consumers.get(self.name) for manifest in manifests}
        is_new = seen[shards[0].log.shard] is None
        failpoint("consumer.seen")

        def one(shard: HasFeed) -> Start:
            id = shard.log.shard
            if isinstance(where, Mapping):
                begins: Offset | Beginning = where.get(id, "origin")
            else:
                begins = where if is_new else "origin"
            return claim(shard, self.name, self._owner, begins, seen[id], is_new=is_new)

        # The first shard last: what is registered there is registered everywhere.
        others = list(map_ordered(clock, one, shards[1:], parallel=AT_ONCE))
        return dict(zip((shard.log.shard for shard in shards), [one(shards[0]), *others], strict=True))

    def add(self, shard: HasFeed, where: Offset | Beginning = "origin") -> Start:
        """A shard that came since."""
        return claim(shard, self.name, self._owner, where, None, is_new=False)

    def hold_parts(self, shards: Iterable[HasFeed], handle: Callable[[str], HasFeed]) -> None:
        """Hold the parts of shards that were split before this consumer was registered there; one that was there before has them.

        t0 a shard is split, which the table or whoever gave the offset does not know yet · t1 a consumer registers in it · t2 what
        is written to the parts is collected, before the consumer comes to them.
        """
        for shard in shards:
            manifest = shard.log.manifests.seen or shard.log.manifests.load()  # as of the claim, or later
            children = [(handle(child), offset) for child, offset in next_shards(manifest).items()]
            for child, offset in children:
                if self.name not in child.log.manifests.load().consumers:
                    self.add(child, offset)
            self.hold_parts([child for child, _ in children], handle)

    def check(self, shard: HasFeed) -> None:
        """Is it still ours? Raises what ``advance`` would."""
        owned(shard.log, shard.log.manifests.load(), self.name, self._owner)

    def advance(self, shard: HasFeed, to: Offset) -> None:
        """All before this offset was read, the snapshot before it included. Never moves back.

        Raises:
            ConsumerTakenError: somebody else reads by this name now.
            NotFoundError: it was dropped.
        """
        advance(shard.log, self.name, self._owner, to)


def listed_consumers(shards: Iterable[HasFeed]) -> list[Consumer]:
    """The consumers of a table, by name, with their lag as of now."""
    places: dict[str, list[tuple[ConsumerPlace, float]]] = {}
    for shard in shards:
        log = shard.log
        if not log.manifests.load().consumers:
            continue
        manifest, tip = find_tip(log)
        for name, record in manifest.consumers.items():
            lag = max(0, tip.position - past_seals(manifest, Offset(record.position, record.load)).position)
            lag += max(0, manifest.next_load - 1 - record.load)
            place = ConsumerPlace(log.shard, record.position, record.load, lag, record.snapshot is not None, record.updated_at)
            places.setdefault(name, []).append((place, record.created_at))
    return [
        Consumer(
            name,
            tuple(place for place, _ in rows),
            min(created for _, created in rows),
            max(place.updated for place, _ in rows),
            sum(place.lag for place, _ in rows),
        )
        for name, rows in sorted(places.items())
    ]


def drop_all(shards: Sequence[HasFeed], name: str) -> bool:
    """Forget a consumer in all shards. Cut short, it is a new one to the next reader, and can be dropped again."""
    dropped = [drop(shard.log, name) for shard in shards]
    return any(dropped)
