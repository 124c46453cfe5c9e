"""Fencing: how one writer at a time owns a shard.

Owns: the survey, the claim, the walk, the seals, the verification.
Does not own: what replayed rows become (the caller's ``replay``), how entries are encoded (entry).

Entries of an epoch live under the epoch's own prefix, and only its writer puts data there. A
successor ends the epoch by putting a seal at the first position that holds nothing. From then
on the predecessor's next PUT meets the seal. Both race for one name, and the store decides:
either the entry is there, and the successor replays it, or the seal is, and the predecessor
learns that it is fenced. There is no clock in this and no lease.

A claimant may be slow, and the entries it walks over may be collected meanwhile:
t0 B claims · t1 C claims, walks, flushes · t2 GC collects · t3 B finds nothing at its next
point, seals it, and would append into a place that nobody reads. Step 4 stops it: B commits
to the manifest before its first append, and that commit fails because the epoch has moved on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from headgate.errors import (
    CommitConflictError,
    FencedError,
    NotFoundError,
    ObjectMissingError,
    ShardSplitError,
    WalStoreMismatchError,
    WalTruncatedError,
)
from headgate.failpoint import failpoint
from headgate.manifest import ChainPoint, ShardManifest
from headgate.manifest.model import Owner, ProducerMark, Segments, SplitRecord, WalState
from headgate.meters import CLAIM_SECONDS, WALK_SECONDS
from headgate.wal.block import Entries
from headgate.wal.entry import Entry, decode_entry
from headgate.wal.log import ShardLog
from headgate.wal.loss import evidence_of_loss
from headgate.wal.marker import check_marker, put_back, put_seal
from headgate.wal.producers import marks_of, merge
from headgate.wal.reader import ChainReader
from headgate.wal.space import WalSpace
from headgate.wal.tip import locate

_RESTARTS_MAX = 32
SURVEY_KEPT_BYTES = 64 << 20
_RACES_BEFORE_BARRIER = 4
_BARRIER_AHEAD = (64, 1024, 16384)

Replay = Callable[[Entry | Entries], None]
Begin = Callable[[ShardManifest, "Walk"], None]
Split = Callable[[ShardManifest], SplitRecord | None]


@dataclass(frozen=True)
class Claim:
    """The right to write one epoch, from ``first`` on."""

    manifest: ShardManifest
    space: WalSpace
    writer_id: str
    epoch: int
    first: ChainPoint
    producers: dict[str, ProducerMark] = field(repr=False)


@dataclass
class Walk:
    """How far reading got, which epochs ended where, and what was met on the way."""

    point: ChainPoint
    ends: dict[int, int] = field(default_factory=dict)
    epochs: set[int] = field(default_factory=set)
    producers: dict[str, ProducerMark] = field(default_factory=dict)

    def pass_over(self, entry: Entry | Entries) -> None:
        self.epochs.add(entry.epoch)
        if isinstance(entry, Entries):
            self.point = entry.end
        elif entry.is_seal:
            self.ends[entry.epoch] = entry.position
            self.point = self.point.past_seal()
        else:
            merge(self.producers, marks_of(entry))
            self.point = self.point.past_data()


@dataclass
class _Survey:
    """What was found before the claim."""

    manifest: ShardManifest
    wal: WalState
    """The WAL to write; another than the manifest's when the store is changed."""
    walk: Walk
    kept: deque[Entry | Entries]
    """The first data entries, as many as fit the budget, for the replay."""
    kept_through: ChainPoint
    """Where the kept ones end and reading must go on."""
    begun_anew: bool = False
    """The WAL store was empty, and rightly so: what the cursor has passed is not in it."""


def open_epoch(
    log: ShardLog,
    *,
    replay: Replay | None = None,
    begin: Begin | None = None,
    keep_bytes: int = SURVEY_KEPT_BYTES,
    writer_id: str | None = None,
    split: Split | None = None,
) -> Claim:
    """Claim the shard, fence whoever held it, and replay what it left. Writes, and fences the incumbent.

    Args:
        replay: called with each data entry from the cursor on, or with several, in order, after the claim. None: the
            rows are not wanted (WAL-only), and the walk starts at ``resume``.
        begin: called once, after the claim and before the first entry is replayed, with the claimed manifest
            and the walk: replayed rows may be flushed on the way, and whoever moves the cursor over the end
            of an epoch records that end with it.
        keep_bytes: how much of what is read before the claim is kept for the replay, so that it is not read again.
        split: asked in the commit of the claim: what the shard is to be split into, begun by that commit; None: nothing. May refuse.

    Raises:
        DataLossError: an entry is missing or damaged; found before the claim, nothing was written; no seal was, in any case.
        WalStoreMismatchError: not the store that the log is in; nothing was written.
        FencedError: another claimant was faster.
    """
    writer_id = writer_id or log.clock.token()
    started = log.clock.monotonic()

    # 1. Survey: everything that can be wrong with the log is found before anything is written,
    #    because a claim fences a healthy incumbent (R13, K08, F09).
    survey = survey_log(log, wanted=replay is not None, keep_bytes=keep_bytes)
    failpoint("fence.surveyed")

    # 2. Claim: the epoch, by compare-and-swap. Of two claimants each gets its own (F04).
    claimed = log.manifests.commit(lambda m: claim_change(log, m, survey, writer_id, flushes=begin is not None, split=split))
    failpoint("fence.claimed")
    claimed_at = log.clock.monotonic()
    CLAIM_SECONDS.observe(claimed_at - started, log.manifests.place, log.shard)
    if begin is not None:
        begin(claimed, survey.walk)

    for _ in range(_RESTARTS_MAX):
        try:
            claim = _take_over(log, claimed, survey, replay, writer_id)
            WALK_SECONDS.observe(log.clock.monotonic() - claimed_at, log.manifests.place, log.shard)
            return claim
        except _TrimmedUnderWalk as trimmed:
            if replay is not None:
                raise CommitConflictError(f"shard {log.shard} was trimmed while its rows were replayed", hint="open it again") from None
            claimed = trimmed.manifest
            survey.walk = Walk(claimed.walk_from(replay=False))
    raise CommitConflictError(f"shard {log.shard} is trimmed faster than it can be opened", hint="try again")


def _take_over(log: ShardLog, claimed: ShardManifest, survey: _Survey, replay: Replay | None, writer_id: str) -> Claim:
    """Steps 3 and 4, for the epoch that was claimed."""
    epoch = claimed.epoch

    # 3. Walk: replay and fencing are one pass, so whatever the predecessor landed below the seal is
    #    replayed and nothing above it counts (F01, F02).
    walk = seal_walk(log, claimed, survey, replay, writer_id)
    space = log.space(claimed)
    for walked in sorted(walk.epochs | {epoch}):
        # The same for seals of others that we only read: before we acknowledge what comes after
        # them, they must be as durable as our own (R17).
        space.store.settle(space.epoch_folder(walked))
    failpoint("fence.walked")

    # 4. Verify, as a commit. A slow claimant may have walked over collected entries; only one whose
    #    epoch still stands may append (F05). The ends of the walked epochs go in with it, and the
    #    cursor moves over seals, so idle reopens leave nothing behind (K01).
    verified = log.manifests.commit(lambda m: verify_change(log, m, epoch, walk, resume=replay is None))
    failpoint("fence.verified")
    return Claim(verified, space, writer_id, epoch, walk.point, verified.producers)


# -- 1. survey


def survey_log(log: ShardLog, *, wanted: bool, keep_bytes: int = SURVEY_KEPT_BYTES) -> _Survey:
    """Read the log to its tip. Writes nothing, unless a clean store was wiped: then what makes it safe."""
    for _ in range(_RESTARTS_MAX):
        manifest = log.manifests.load()
        check_open(log, manifest)
        wal, begun_anew = _wal_to_write(log, manifest)
        start = manifest.walk_from(replay=wanted)
        if not begun_anew and not _last_seen_stands(log, manifest, start):
            continue
        survey = _Survey(manifest, wal, Walk(start), deque(), start, begun_anew)
        reader = ChainReader(log.space(manifest.but(wal=wal)), log.clock, eager=True, blocks=True)
        try:
            if _read_to_tip(log, survey, reader, keep_bytes if wanted else 0):
                return survey
        finally:
            reader.close()
    raise CommitConflictError(f"shard {log.shard} moves on faster than it can be read", hint="try again")


def _last_seen_stands(log: ShardLog, manifest: ShardManifest, start: ChainPoint) -> bool:
    """Is the last entry before ``resume`` there? It is not read again, and would be the first to miss in an older copy of the store.

    False: the log moved on under us, begin again.
    """
    last = start.position - 1
    if last < max(manifest.cursor.position, manifest.wal_floor):
        return True
    space, point = log.space(manifest), locate(manifest, last)
    try:
        space.store.head(space.key(*point))
    except ObjectMissingError:
        if _moved_on(manifest, log.manifests.load(), point):
            return False
        name = space.key(*point)
        raise WalTruncatedError(
            f"{space.store.uri}/{name} is missing; the manifest (version {manifest.version}) has seen position {last} acknowledged",
            object=name,
        ) from None
    return True


def check_open(log: ShardLog, manifest: ShardManifest) -> None:
    """Refuse a shard that takes no writers any more (F11), or not now (K14)."""
    if manifest.state == "active" or split_is_over(log, manifest):
        return
    if manifest.state == "dropped":
        raise NotFoundError(f"shard {log.shard} was dropped", hint="open the table again to see its shards of now")
    told = "is being split" if manifest.state == "splitting" else "was split"
    raise ShardSplitError(f"shard {log.shard} {told}", shard=log.shard, state=manifest.state)


def split_is_over(log: ShardLog, manifest: ShardManifest) -> bool:
    """May anybody take back the split of this shard? Whether it is done by then the same manifest decides, so no clock is trusted."""
    return manifest.state == "splitting" and manifest.split is not None and manifest.split.expires_at <= log.clock.now()


def _wal_to_write(log: ShardLog, manifest: ShardManifest) -> tuple[WalState, bool]:
    """The WAL that the manifest names, if its store is the right one; a new one for another store, if clean.

    The second says whether it begins anew, in an empty store.
    """
    wal = manifest.wal.but(uri=log.wal_uri)
    if check_marker(log, manifest):
        return wal, False
    if log.wal_uri != manifest.wal.uri:
        # A new store, and nothing in the old one is needed: fresh names, so that whoever may still
        # write to the old one meets its seals there and nobody here.
        wal = wal.but(id=log.clock.token(), first_epoch=manifest.cursor.epoch)
        put_back(log, manifest.but(wal=wal))
    else:
        put_back(log, manifest)
    return wal, True


def _read_to_tip(log: ShardLog, survey: _Survey, reader: ChainReader, keep_bytes: int) -> bool:
    """False: the log moved on under us, begin again."""
    manifest, walk, kept_bytes = survey.manifest, survey.walk, 0
    while True:
        entry = reader.read_on(walk.point)
        if entry is None:
            # Read the name again, then the manifest: only a name missing in an unmoved log is lost.
            loss = evidence_of_loss(log.space(manifest.but(wal=survey.wal)), manifest, walk.point)
            if loss is None:
                return True
            if reader.fetch(walk.point) is not None:
                return True  # it came meanwhile: somebody writes. The rest is for the walk after the claim
            if _moved_on(manifest, log.manifests.load(), walk.point):
                return False
            raise loss
        if reader.listed_through is not None and walk.point > reader.listed_through:
            return True  # written since we looked: a busy writer must not keep us from claiming (F10)
        walk.pass_over(entry)
        if kept_bytes < keep_bytes:
            kept_bytes += entry.size_bytes
            survey.kept_through = walk.point
            if not entry.is_seal:
                survey.kept.append(entry)


def _moved_on(before: ShardManifest, now: ShardManifest, point: ChainPoint) -> bool:
    """Is there another reason than loss for a name below the tip to be missing?

    Any move of the cursor is one: what was walked before may have been collected, and sealed by a
    slow claimant after that, so even the point may be wrong.
    """
    moved = now.epoch != before.epoch or now.wal.id != before.wal.id or now.cursor != before.cursor
    return moved or now.wal_floor > point.position


# -- 2. claim


def claim_change(
    log: ShardLog, manifest: ShardManifest, survey: _Survey, writer_id: str, *, flushes: bool = False, split: Split | None = None
) -> ShardManifest | None:
    """One epoch more, ours. A split whose lease is over is taken back with it; one that begins, begins with it."""
    check_open(log, manifest)
    if manifest.owner is not None and manifest.owner.writer == writer_id:
        return None
    if manifest.wal.id != survey.manifest.wal.id:
        raise CommitConflictError(f"the WAL store of shard {log.shard} was changed meanwhile", hint="open it again")
    if survey.wal.id != manifest.wal.id and not manifest.is_clean:
        raise WalStoreMismatchError(
            f"shard {log.shard} is being written to its old WAL store ({manifest.wal.uri or 'beside the table'})",
            hint="stop that writer, or open with its wal_uri, give up or flush what is in the log, and close",
        )
    begun = split(manifest) if split is not None else None
    owner = Owner(writer=writer_id, claimed_at=log.clock.now(), flushes=flushes)
    if begun is not None:
        last = manifest.owner
        owner = owner.but(split=begun.id, after=None if last is None else last.writer if last.split is None else last.after)
    # What the cursor had passed when the store was found empty is not in it; what others wrote since is.
    floor = max(manifest.wal_floor, survey.manifest.cursor.position) if survey.begun_anew else manifest.wal_floor
    return (manifest if manifest.state == "active" else manifest.unsplit()).but(
        epoch=manifest.epoch + 1,
        owner=owner,
        wal=survey.wal.but(clean_at=manifest.wal.clean_at),
        wal_floor=floor,
        state="active" if begun is None else "splitting",
        split=begun,
        splits_begun=manifest.splits_begun + (begun is not None),
    )


# -- 3. walk


def seal_walk(log: ShardLog, claimed: ShardManifest, survey: _Survey, replay: Replay | None, writer_id: str) -> Walk:
    """From the cursor to our own epoch, sealing each older one at its first free position."""
    me, space = claimed.epoch, log.space(claimed)
    start = claimed.walk_from(replay=replay is not None)
    walk = survey.walk
    merge(walk.producers, claimed.producers.items())
    if claimed.contradicts(walk.ends):
        if replay is not None:
            raise CommitConflictError(f"shard {log.shard} was trimmed while its rows were replayed", hint="open it again")
        walk.point, walk.ends = start, {}
    elif replay is not None:
        # Rows that were flushed between survey and claim are in runs by now: not again (R03, R18).
        while survey.kept:  # what is replayed is held by whoever replays it
            entry = survey.kept.popleft()
            if entry.position >= start.position:
                replay(entry)
            elif isinstance(entry, Entries) and entry.end.position > start.position:
                replay(entry.since(start.position))
        walk.point = survey.kept_through
    if walk.point.position < start.position:
        walk.point = start
    races, sealed = 0, False
    settled: set[int] = set()
    reader = ChainReader(space, log.clock, eager=True, blocks=True)
    try:
        while walk.point.epoch < me:
            found = reader.read_on(walk.point)
            if found is None:
                if not sealed:
                    check_not_lost(log, claimed, reader, walk.point)
                # A seal vouches for all before it, so their names must be durable first: a power cut may
                # keep the seal and forget a name beside it that nobody had synced yet (R17).
                for walked in sorted(walk.epochs - settled | {walk.point.epoch}):
                    space.store.settle(space.epoch_folder(walked))
                settled |= walk.epochs - {walk.point.epoch}
                # A missing entry in an older epoch gets a seal, and what stands there then counts, whoever's it is (F16, A05).
                failpoint("fence.before-seal")
                occupant = put_seal(log, space, walk.point, by_epoch=me, durable_through=walk.point.position - 1, writer_id=writer_id)
                sealed = True
                failpoint("fence.sealed")
                if occupant is None:
                    walk.epochs.add(walk.point.epoch)
                    walk.ends[walk.point.epoch] = walk.point.position
                    walk.point = walk.point.past_seal()
                    continue
                found = decode_entry(occupant, space.key(*walk.point), space.wal_id, space.shard, *walk.point)
            entry = found
            if not isinstance(entry, Entries) and entry.is_seal and entry.header.by_epoch > me:
                raise _fenced(log, me, entry.header.by_epoch)
            if not entry.is_seal and (reader.listed_through is None or walk.point > reader.listed_through):
                before, races = races, races + (len(entry) if isinstance(entry, Entries) else 1)
                if before < _RACES_BEFORE_BARRIER <= races:
                    _put_barrier(log, space, walk.point, me, writer_id)
            walk.pass_over(entry)
            if replay is not None and not entry.is_seal:
                replay(entry)
    finally:
        reader.close()
    return walk


def _put_barrier(log: ShardLog, space: WalSpace, point: ChainPoint, me: int, writer_id: str) -> None:
    """A seal ahead of an incumbent that writes faster than we can seal its next position (F10).

    It cannot pass the barrier, so the race for its next position ends. Which seal ends the epoch is
    still for the walk to find: the barrier, if the entries reach it, or one that we put before it.
    It vouches for no more than was walked.
    """
    for ahead in _BARRIER_AHEAD:
        at = ChainPoint(point.epoch, point.position + ahead)
        occupant = put_seal(log, space, at, by_epoch=me, durable_through=point.position - 1, writer_id=writer_id)
        if occupant is None or decode_entry(occupant, space.key(*at), space.wal_id, space.shard, *at).is_seal:
            return


def check_not_lost(log: ShardLog, claimed: ShardManifest, reader: ChainReader, point: ChainPoint) -> None:
    """Before our first seal: is this the tip, or a hole? A seal in a hole would bury what was lost (R13)."""
    loss = evidence_of_loss(log.space(claimed), claimed, point)
    if loss is None or reader.fetch(point) is not None:
        return
    now = log.manifests.load()
    if now.epoch != claimed.epoch:
        raise _fenced(log, claimed.epoch, now.epoch)  # collected under a superseded claimant (F06)
    if _moved_on(claimed, now, point):
        raise _TrimmedUnderWalk(now)
    raise loss


# -- 4. verify


class _TrimmedUnderWalk(Exception):
    """The walk took a name below the cursor of now for the tip: it has to be done again from there."""

    def __init__(self, manifest: ShardManifest) -> None:
        self.manifest = manifest


def verify_change(log: ShardLog, manifest: ShardManifest, epoch: int, walk: Walk, *, resume: bool) -> ShardManifest:
    """Our epoch still stands: record what the walk found."""
    check_epoch(log, manifest, epoch)
    if manifest.contradicts(walk.ends):
        # The log was trimmed and collected under the walk, so what looked like the tip was not:
        # t0 we claim · t1 trim to 2, GC takes 0 and 1 · t2 we find nothing at 0 and seal it, or we
        # find the seal of another claimant who did.
        raise _TrimmedUnderWalk(manifest)
    segments = manifest.ends().adding(walk.ends)
    last_seen = max(manifest.wal_position_last_seen, walk.point.position - 1)
    producers = dict(manifest.producers)  # a trim may have added some since the claim, of entries that are gone by now
    merge(producers, walk.producers.items())
    return manifest.but(
        segments=segments.rows,
        cursor=over_seals(manifest.cursor, segments),
        wal=manifest.wal.but(clean_at=None),
        wal_position_last_seen=last_seen,
        resume=walk.point if resume else None,
        producers=producers,
    )


def check_epoch(log: ShardLog, manifest: ShardManifest, epoch: int, position: int | None = None) -> None:
    """Raise FencedError if the epoch is no longer ours. Part of every commit of a writer."""
    if manifest.epoch != epoch or manifest.state in ("retired", "dropped"):
        raise _fenced(log, epoch, manifest.epoch, position)


def over_seals(point: ChainPoint, segments: Segments) -> ChainPoint:
    """The same place in the log, past the seals that stand right there: they hold no rows."""
    while segments.end_of(point.epoch) == point.position:
        point = point.past_seal()
    return point


def _fenced(log: ShardLog, epoch: int, by_epoch: int, position: int | None = None) -> FencedError:
    return FencedError(
        f"shard {log.shard}: epoch {epoch} was superseded by epoch {by_epoch}",
        shard=log.shard,
        epoch=epoch,
        position=position,
        by_epoch=by_epoch,
    )
