"""Clones: another table that begins with the rows of a checkpoint, without copying them.

Owns: making one, detaching it, and the pins by which a parent knows of it. Does not own: reading files
of another table (columnar), what pins hold back (gc), rewriting rows (compact).

A clone names the parent's files until compaction has rewritten them. Four steps, in this order, each of which can be
repeated by anyone:
  1. the clone's own table manifest, "cloning": it says of which table and which checkpoint. Nobody opens it.
  2. a pin in every shard of the parent: a checkpoint without an end that names the clone. It is added by a commit that sees
     the user's checkpoint, so whoever drops that, or lets its lease end, comes before (and the clone is refused) or after.
  3. the shards' manifests, each after its part of the log was copied. Read before the pin, what they name could be
     collected: t0 the manifest is read · t1 the lease ends, collection deletes · t2 the pin holds nothing.
  4. the table manifest, "active".
After that the pin needs nothing of the parent's log any more, and the entries there may go.

A parent that is dropped meanwhile: the dropper says so in its table manifest and looks for pins then; the cloner pins and
looks at the table manifest then. Whichever is second sees the other, and gives up.

What of the log is missing. The entries between the checkpoint's cursor and its end are held, so a missing one was deleted by
hand, or the store is another. If the parent has flushed it since, the runs that cover it are taken instead, as long as they
end at or before the checkpoint's end; where a seal is known to have been, nothing is missing. All else is loss.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from headgate.checkpoint import pin, resolved, unpin
from headgate.clock import map_ordered
from headgate.compact import compact_shard, is_elsewhere
from headgate.errors import (
    AlreadyExistsError,
    CommitConflictError,
    CorruptEntryError,
    InvalidInputError,
    NotFoundError,
    ObjectMissingError,
    ShardSplitError,
    WalHoleError,
)
from headgate.failpoint import failpoint
from headgate.life.create import load_if_there, opened
from headgate.manifest import ChainPoint, ManifestChain, ShardManifest, TableManifest
from headgate.manifest.model import IN_TABLE, CheckpointRecord, ParentRecord, RunRecord, ShardingRule, ShardRange, WalState
from headgate.retired import published
from headgate.shard import Places
from headgate.sharding import first_shards
from headgate.store import create_exactly, probe
from headgate.transaction import Transactions
from headgate.view import find_checkpoint
from headgate.wal.entry import decode_entry
from headgate.wal.fence import over_seals
from headgate.wal.log import ShardLog
from headgate.wal.marker import put_back
from headgate.wal.reader import ChainReader
from headgate.wal.restamp import restamped
from headgate.wal.tip import locate
from headgate.watch import SchemaWatch, rules_of

_LEASE_SECONDS = 3600.0
_TRIES_MAX = 16
_AT_ONCE = 16


def clone_table(source: Places, target: Places, checkpoint: str | None) -> TableManifest:
    """Make the table at ``target`` a clone of the one at ``source``, or finish one that was begun. Its manifest.

    Raises:
        NotFoundError: there is no such table, or no such checkpoint.
        AlreadyExistsError: another table is at the target, or a clone of another checkpoint.
        DataLossError: an entry of the log that the checkpoint needs is gone.
    """
    store = target.table_store()
    chain = target.table_manifests(store)
    existing = load_if_there(chain)
    origin = _Origin.open(source)
    if existing is None or existing.state == "dropped":
        probe(store, target.clock)
        if target.wal_uri is not None:
            probe(target.wal_store(), target.clock)

        # 1. The clone's manifest decides what it is a clone of: of two at once one wins, the other goes on for it or is refused.
        existing = _begun(chain, existing, _first_manifest(origin, target, checkpoint))
        failpoint("clone.begun")
    parent = _check_same(existing, origin, target, checkpoint)
    if existing.state == "cloning":
        # 2. Pin, in every shard, before anything of it is read for the clone (K05, G07).
        pinned = origin.pin(existing, parent, target.table.uri)
        failpoint("clone.pinned")
        # 3. The shards, from what the pins hold.
        for record, log in pinned:
            _clone_shard(origin, log, record, existing, target)
            failpoint("clone.shard")
        failpoint("clone.shards")
        # 4. It is there.
        table_id = existing.table_id
        existing = chain.commit(lambda latest: _finished(latest, table_id, target.table.uri))
        failpoint("clone.finished")
    # The clone has its own copy of the log now.
    origin.release(existing, parent)
    failpoint("clone.released")
    return existing


def pin_id(clone_table_id: str) -> str:
    """The name of a clone's pin in its parent's shards; further ones begin with it."""
    return f"clone-{clone_table_id}"


def pins_of(manifest: ShardManifest, clone_table_id: str) -> dict[str, CheckpointRecord]:
    """All that a clone has in a shard: one, and one more for each later state that a try of it was made from."""
    id = pin_id(clone_table_id)
    return {name: record for name, record in manifest.checkpoints.items() if name == id or name.startswith(f"{id}-")}


@dataclass(frozen=True)
class _Origin:
    """The table to be cloned, with the logs of all shards it has and had."""

    places: Places
    chain: ManifestChain[TableManifest]
    manifest: TableManifest
    known: dict[str, ShardLog] = field(default_factory=dict)

    @classmethod
    def open(cls, places: Places) -> _Origin:
        store = places.table_store()
        chain = places.table_manifests(store)
        found = load_if_there(chain)
        if found is None:
            raise NotFoundError(f"there is no table at {places.table.uri}", hint="check the source's URI and the storage options")
        return cls(places, chain, opened(places, store, chain, found))

    def log(self, shard: str) -> ShardLog:
        known = self.known.get(shard)
        if known is None:
            known = self.known[shard] = self.places.open_log(shard, self.manifest.table_id)
        return known

    def manifests(self) -> list[ShardManifest]:
        """The latest of every shard that it has, and had: those that were split may hold the checkpoint."""
        now = self.chain.load()
        return [self.log(name).manifests.load() for name in (*now.shards, *now.retired)]

    def resolve(self, checkpoint: str) -> tuple[str, str | None, list[str]]:
        """The id of a checkpoint given by id or name, its name, and the shards it is of."""
        manifests = self.manifests()
        id, shards = resolved(manifests, checkpoint)
        record = next(manifest.checkpoints[id] for manifest in manifests if id in manifest.checkpoints)
        if record.clone is not None:
            raise InvalidInputError(f"{checkpoint!r} stands for the clone at {record.clone}", hint="clone a checkpoint of your own")
        return id, record.name, shards

    def take(self) -> tuple[str, list[str]]:
        """A checkpoint of what is durable now, with a lease: whoever dies here leaves nothing for ever."""
        clock = self.places.clock
        for _ in range(_TRIES_MAX):
            id, now, shards = clock.token(), clock.now(), list(self.chain.load().shards)
            expires = now + _LEASE_SECONDS
            try:
                pinned = [pin(self.log(name), id, name=None, created_at=now, expires_at=expires, shards=shards) for name in shards]
            except ShardSplitError as split:  # once more, with the parts; the table may not have been told yet
                for name in shards:
                    unpin(self.log(name), id)
                parent = self.log(split.shard).manifests.load()
                self.chain.commit(lambda latest, parent=parent: published(latest, parent))  # type: ignore[misc]
                continue
            if not Transactions(self.places.table_store(), clock, self.log).finish_those_between(pinned):
                return id, shards
            for name in shards:  # a load was in some shards only
                unpin(self.log(name), id)
        raise CommitConflictError(f"{self.places.table.uri} is split or loaded faster than it can be pinned", hint="try again")

    def pin(self, clone: TableManifest, parent: ParentRecord, uri: str) -> list[tuple[CheckpointRecord, ShardLog]]:
        """One pin per shard; those that are there stay as they are."""
        id = pin_id(clone.table_id)

        def add(manifest: ShardManifest) -> ShardManifest | None:
            if id in manifest.checkpoints:
                return None
            if manifest.state == "dropped":
                raise NotFoundError(f"the table at {self.places.table.uri} was dropped", hint="clone another table")
            record = manifest.checkpoints.get(parent.checkpoint)
            if record is None:
                raise NotFoundError(
                    f"shard {manifest.shard} has no checkpoint {parent.checkpoint!r} any more",
                    hint=f"it was dropped, or its lease is over; drop_table({uri!r}), then clone another one",
                )
            return manifest.but(checkpoints={**manifest.checkpoints, id: record.but(clone=uri, expires_at=None, name=None)})

        pinned = []
        for name in parent.shards:
            log = self.log(name)
            pinned.append((log.manifests.commit(add).checkpoints[id], log))
            failpoint("clone.pin")
        if self.chain.load().state not in ("active", "creating"):
            self.unpin(clone, parent)
            raise NotFoundError(f"the table at {self.places.table.uri} is being dropped", hint="clone another table")
        return pinned

    def unpin(self, clone: TableManifest, parent: ParentRecord) -> None:
        for name in parent.shards:
            drop_pin(self.log(name), clone.table_id)

    def release(self, clone: TableManifest, parent: ParentRecord) -> None:
        """Hold the parent's log no longer; a checkpoint that was made for the clone goes."""

        def change(manifest: ShardManifest) -> ShardManifest | None:
            pins = pins_of(manifest, clone.table_id)
            if all(record.end == record.position for record in pins.values()):
                return None
            return manifest.but(
                checkpoints={**manifest.checkpoints, **{id: record.but(end=record.position) for id, record in pins.items()}}
            )

        for name in parent.shards:
            self.log(name).manifests.commit(change)
            if parent.taken_for_it:
                unpin(self.log(name), parent.checkpoint)


# -- 1. the clone's manifest


def _first_manifest(origin: _Origin, target: Places, checkpoint: str | None) -> TableManifest:
    if checkpoint is None:
        name = None
        id, shards = origin.take()
    else:
        id, name, shards = origin.resolve(checkpoint)
    # The columns are looked up after the checkpoint stands: whoever wrote its rows knew no newer ones.
    now, clock = origin.chain.load(), target.clock
    return now.but(
        version=0,
        id=clock.token(),
        history=(),
        table_id=clock.token(),
        sharding=_rule_then(now, shards),
        shards=tuple(shards),
        shard_values={shard: value for shard, value in now.shard_values.items() if shard in shards},
        retired={},
        wal_id=clock.token(),
        wal_uri=target.wal_uri,
        state="cloning",
        created_at=clock.now(),
        parent=ParentRecord(
            uri=origin.places.table.uri,
            table_id=now.table_id,
            checkpoint=id,
            checkpoint_name=name,
            taken_for_it=checkpoint is None,
            shards=tuple(shards),
        ),
    )


def _rule_then(manifest: TableManifest, shards: Sequence[str]) -> ShardingRule:
    """How rows found their shard when these were the shards."""
    rule = manifest.sharding
    if rule.kind == "identity" or not rule.ranges or list(shards) == list(manifest.shards):
        return rule
    if sorted(shards) == sorted(first_shards(rule)):
        return rule.but(ranges=(), column=None if rule.kind == "unsharded" else rule.column)
    lows = {**manifest.retired, **{part.shard: part.low for part in rule.ranges}}
    return rule.but(ranges=tuple(sorted(ShardRange(lows[shard], shard) for shard in shards)))


def _begun(chain: ManifestChain[TableManifest], dropped: TableManifest | None, first: TableManifest) -> TableManifest:
    """Where a table was dropped, its versions go on."""
    if dropped is not None or not chain.create_first(first):
        chain.commit(lambda latest: first if latest.state == "dropped" else None)
    return chain.load()


def _check_same(existing: TableManifest, origin: _Origin, target: Places, checkpoint: str | None) -> ParentRecord:
    parent, uri = existing.parent, target.table.uri
    if parent is None or parent.table_id != origin.manifest.table_id or existing.state not in ("cloning", "active"):
        raise AlreadyExistsError(f"there is a table at {uri}", hint="clone to another URI, or drop that table first")
    if checkpoint is None or checkpoint == parent.checkpoint:
        return parent
    manifests = origin.manifests()
    now = next((found[0] for manifest in manifests if (found := find_checkpoint(manifest, checkpoint)) is not None), None)
    if now == parent.checkpoint or (now is None and checkpoint == parent.checkpoint_name):
        return parent
    raise AlreadyExistsError(
        f"the clone at {uri} was begun from checkpoint {parent.checkpoint!r}, and not from {checkpoint!r}",
        hint=f"clone that one again to finish it, or drop_table({uri!r}) first",
    )


def _finished(latest: TableManifest, table_id: str, uri: str) -> TableManifest | None:
    if latest.table_id != table_id or latest.state not in ("cloning", "active"):
        raise NotFoundError(f"the table at {uri} was dropped while it was cloned", hint="clone it again")
    return latest.but(state="active") if latest.state == "cloning" else None


# -- 3. a shard


def _clone_shard(origin: _Origin, log: ShardLog, record: CheckpointRecord, clone: TableManifest, target: Places) -> None:
    mine = target.open_log(log.shard, clone.table_id)
    state, end = log.manifests.at(record.version), record.end
    for _ in range(_TRIES_MAX):
        first = _first_of_shard(origin, state, record, clone, target)
        try:
            ends = _copy_entries(log, state, end, mine, first)
        except _Missing as missing:
            # t0 A and B copy · t1 A is done, and lets go of the parent's log · t2 it is collected under B. Nothing is lost.
            if _is_there(mine):
                return
            state = _flushed_since(log, state, record, missing.point, clone)
            continue
        first = first.but(segments=first.ends().adding(ends).rows)
        if end > state.cursor.position:
            put_back(mine, first)
        failpoint("clone.copied")
        mine.manifests.create_first(first)  # False: another try was faster, and its log is there too
        return
    raise CommitConflictError(f"shard {log.shard} is compacted faster than it can be cloned", hint="try again")


def _is_there(mine: ShardLog) -> bool:
    """Has another try made this shard of the clone?"""
    try:
        mine.manifests.load()
    except NotFoundError:
        return False
    return True


def inherited(runs: Sequence[RunRecord], uri: str | None) -> tuple[RunRecord, ...]:
    """Runs for a table elsewhere: the same files, where they are."""
    return tuple(run.but(slices=tuple(part.but(uri=part.uri or uri) for part in run.slices)) for run in runs)


def _first_of_shard(origin: _Origin, state: ShardManifest, record: CheckpointRecord, clone: TableManifest, target: Places) -> ShardManifest:
    cursor, end = state.cursor, max(record.end, state.cursor.position)
    wal = WalState(
        id=clone.wal_id, uri=target.wal_uri, first_epoch=cursor.epoch, clean_at=cursor.position if end == cursor.position else None
    )
    return begun_anew(state, target.clock.token(), end=end).but(
        table_id=clone.table_id, wal=wal, runs=inherited(state.runs, origin.places.table.uri)
    )


def begun_anew(state: ShardManifest, id: str, *, end: int) -> ShardManifest:
    """The first manifest of another shard that goes on where this one ended: the same rows, epochs and positions, nobody's yet.

    What was accepted from a producer past ``end`` is not there, so it is not said to be.
    """
    segments = tuple(row._replace(epochs=min(row.epochs, end - row.end)) for row in state.segments if row.end < end)
    return state.but(
        version=0,
        id=id,
        history=(),
        state="active",
        split=None,
        splits_begun=0,
        owner=None,
        segments=segments,
        wal_position_last_seen=end - 1,
        wal_floor=state.cursor.position,
        wal_collected=state.cursor.position,
        resume=None,
        producers={name: mark for name, mark in state.producers.items() if mark.position < end},
        consumers={},
        checkpoints={},
        attempts={},
        announced={},
        loads=(),
        load_floor=state.next_load - 1,
        replaced=(),
    )


class _Missing(Exception):
    def __init__(self, point: ChainPoint) -> None:
        self.point = point


def _copy_entries(log: ShardLog, state: ShardManifest, end: int, mine: ShardLog, first: ShardManifest) -> dict[int, int]:
    """Copy the log from the cursor to the end. Where epochs ended on the way."""
    if end <= state.cursor.position:
        return {}
    theirs, ours = log.space(state), mine.space(first)
    points, ends = _walk(log, state, end)

    def copy(point: ChainPoint) -> None:
        try:
            data = theirs.store.get(theirs.key(*point))
        except ObjectMissingError:
            raise _Missing(point) from None
        body, key = restamped(data, theirs.key(*point), wal_id=ours.wal_id, shard=ours.shard), ours.key(*point)
        occupant = create_exactly(ours.store, key, body, mine.clock, mine.policy)
        if occupant is not None:
            there = decode_entry(occupant, key, ours.wal_id, ours.shard, *point)
            wanted = decode_entry(data, theirs.key(*point), theirs.wal_id, theirs.shard, *point)
            if there.header.entry_id != wanted.header.entry_id:
                raise CorruptEntryError(f"{key} is not the copy of {theirs.key(*point)}", object=key)

    for _ in map_ordered(mine.clock, copy, points, parallel=_AT_ONCE):
        pass
    for epoch in sorted({point.epoch for point in points}):
        ours.store.settle(ours.epoch_folder(epoch))
    return ends


def _walk(log: ShardLog, state: ShardManifest, end: int) -> tuple[list[ChainPoint], dict[int, int]]:
    points: list[ChainPoint] = []
    ends: dict[int, int] = {}
    point, reader = state.cursor, ChainReader(log.space(state), log.clock, eager=True)
    known = log.manifests.load().ends()
    try:
        while point.position < end:
            entry = reader.read(point)
            is_seal = known.end_of(point.epoch) == point.position if entry is None else entry.is_seal
            if entry is None and not is_seal:
                raise _Missing(point)
            if is_seal:
                ends[point.epoch] = point.position
                point = point.past_seal()
            else:
                points.append(point)
                point = point.past_data()
    finally:
        reader.close()
    return points, ends


def _flushed_since(
    log: ShardLog, state: ShardManifest, record: CheckpointRecord, missing: ChainPoint, clone: TableManifest
) -> ShardManifest:
    """A later state of the shard whose runs have what is missing of the log, and nothing past the checkpoint; pinned, too.

    By one pin more: the first one stays. t0 A has copied what B then misses · t1 B pins a later state instead · t2 the runs of the
    first one are merged and collected · t3 A makes the clone's shard, of runs that are gone.

    Raises:
        WalHoleError: there is none.
        NotFoundError: the clone was dropped.
    """
    name = log.space(state).key(*missing)
    id = pin_id(clone.table_id)
    found: list[ShardManifest] = []

    def look(latest: ShardManifest) -> ShardManifest:
        if id not in latest.checkpoints:
            raise NotFoundError(f"the clone at {record.clone} was dropped while it was made", hint="clone it again")
        runs = tuple(takewhile(lambda run: run.end <= record.end, latest.runs))
        after = latest.runs[len(runs) : len(runs) + 1]
        reach = min(latest.cursor.position, record.end, *(run.first for run in after))
        if reach <= missing.position or latest.next_load != state.next_load:
            raise WalHoleError(
                f"{log.wal_store.uri}/{name} is missing; the checkpoint needs the log up to {record.end}, and the runs of shard "
                f"{log.shard} that end there or before cover it up to {reach}",
                object=name,
                hint="pass the source_wal_uri that the table was written with, restore the object, or clone a checkpoint of now",
            )
        point = over_seals(locate(latest, reach), latest.ends())
        producers = {**state.producers, **{name: mark for name, mark in latest.producers.items() if mark.position < record.end}}
        found[:] = [state.but(runs=runs, cursor=point, segments=latest.segments, epoch=latest.epoch, wal=latest.wal, producers=producers)]
        # The runs of now are not those that the checkpoint pins: this very version is pinned, too.
        return latest.but(
            checkpoints={**latest.checkpoints, f"{id}-{latest.version + 1}": record.but(version=latest.version + 1, expires_at=None)}
        )

    log.manifests.commit(look)
    return found[0]


# -- letting go of the parent


def held_manifests(log: ShardLog) -> dict[str, ShardManifest]:
    """The latest manifest of a shard and all that its checkpoints pin, by what holds them."""
    latest = log.manifests.load()
    held = {"the latest manifest": latest}
    for id, record in latest.checkpoints.items():
        if record.version == latest.version:
            continue
        try:
            held[f"checkpoint {record.name or id}"] = log.manifests.at(record.version)
        except ObjectMissingError:
            if id in log.manifests.load().checkpoints:
                raise
            # dropped since, and collected: it holds nothing any more
    return held


def drop_pin(log: ShardLog, clone_table_id: str) -> None:
    """The clone needs nothing of this shard any more. Can be repeated."""
    drop_records(log, lambda manifest: pins_of(manifest, clone_table_id))


def is_orphan(places: Places, id: str, record: CheckpointRecord) -> bool:
    """Is a pin that of a clone which is not there any more? Then nobody will ever drop it but by hand."""
    if record.clone is None or record.clone.startswith(IN_TABLE):
        return False
    found = load_if_there(Places(places.table.beside(record.clone), None, places.clock).table_manifests())
    return found is None or found.state == "dropped" or not id.startswith(pin_id(found.table_id))


def drop_record(log: ShardLog, id: str) -> None:
    """Take a pin out of a shard's manifest, whoever it is for. Can be repeated."""
    drop_records(log, lambda manifest: {id})


def drop_records(log: ShardLog, which: Callable[[ShardManifest], Container[str]]) -> None:
    def change(manifest: ShardManifest) -> ShardManifest | None:
        gone = which(manifest)
        kept = {id: record for id, record in manifest.checkpoints.items() if id not in gone}
        return manifest.but(checkpoints=kept) if len(kept) < len(manifest.checkpoints) else None

    log.manifests.commit(change)


def drop_pins(places: Places, clone_table_id: str, parent: ParentRecord) -> None:
    """Tell the parent that the clone is gone, or needs it no more. A parent that is gone itself need not know."""
    theirs = Places(places.table.beside(parent.uri), None, places.clock)
    found = load_if_there(theirs.table_manifests())
    if found is None or found.table_id != parent.table_id:
        return
    for name in parent.shards:
        drop_pin(theirs.open_log(name, parent.table_id), clone_table_id)


def holders(places: Places, manifest: TableManifest) -> list[str]:
    """What still names files of the parent: shard and manifest."""
    found = []
    for name in (*manifest.shards, *manifest.retired):
        for holder, state in held_manifests(places.open_log(name, manifest.table_id)).items():
            if any(is_elsewhere(run) for run in state.runs) and not (state.state == "retired" and holder == "the latest manifest"):
                found.append(f"{holder} of shard {name}")
    return found


def let_go(watch: SchemaWatch, places: Places) -> bool:
    """Drop the pins on the parent if nothing names its files any more. False: something does.

    What once names none of them never will again: a checkpoint pins the latest state, and compaction only makes files of ours.
    """
    manifest = watch.refresh()
    if manifest.parent is None:
        return True
    if holders(places, manifest):
        return False
    drop_pins(places, manifest.table_id, manifest.parent)
    failpoint("detach.unpinned")
    watch.commit(lambda latest: latest.but(parent=None) if latest.parent is not None else None)
    return True


def detach_table(watch: SchemaWatch, places: Places, max_memory: int) -> None:
    """Rewrite what is still the parent's, then drop the pins.

    Raises:
        InvalidInputError: a checkpoint of the clone, or a load that is not flushed, still names files of the parent.
    """
    manifest = watch.refresh()
    columnar = places.columnar()
    for name in manifest.shards:
        log = places.open_log(name, manifest.table_id)
        compact_shard(log, columnar, lambda: rules_of(watch.refresh()), max_memory=max_memory, detach=True)
        failpoint("detach.shard")
    if not let_go(watch, places):
        names = holders(places, watch.manifest)
        raise InvalidInputError(
            f"{places.table.uri} still reads its parent's files: {', '.join(names[:5])}",
            hint="drop those checkpoints, or flush with a writer; then detach again. The rows of now are copied already",
        )
