"""Splitting a shard in two, while it is written and read.

Owns: the steps, and giving up. Does not own: telling the table (retired), dropping rows of the other part (compact),
writers that go on with the parts (table_writer).

The parent's manifest decides, and nothing else:
  1. claim: the epoch, "splitting" and a lease in one commit. Writers are fenced by it; until the end nobody claims the shard
     and no load is announced. With two commits there would be a moment in which a writer could claim between them.
  2. flush: every row is in runs, and the cursor at the tip. Nothing of the log belongs to the parts.
  3. pin: one checkpoint for each part, in the parent's manifest, which holds the runs that the parts will name.
  4. the parts' first manifests. Their names are of this try alone: a splitter that died, or stalls, leaves manifests of other
     rows behind, which must not be taken for ours.
  5. retire: the moment of the split, final. It happens only if the shard is still splitting, by us.
  6. the table's manifest publishes it; anybody may do that.

A split by the table's manifest alone loses rows: t0 the parts are made · t1 a writer claims the parent, which nothing forbids,
and acknowledges rows there · t2 the table names the parts.

Giving up is a commit on the same manifest, by the splitter, or by anyone who claims the shard once the lease is over. So either
that comes first and retiring fails, or retiring comes first and there is nothing to give up.
"""

from __future__ import annotations

from collections.abc import Callable

from headgate.config import ShardWriterConfig
from headgate.errors import CommitConflictError, HeadgateError, InvalidInputError, NotFoundError, ShardSplitError
from headgate.failpoint import failpoint
from headgate.life.clone import begun_anew, drop_record, held_manifests
from headgate.manifest import ShardManifest, TableManifest
from headgate.manifest.model import IN_TABLE, CheckpointRecord, ChildShard, ConsumerRecord, HashRange, SplitRecord, WalState
from headgate.retired import column_to_split_by, publish
from headgate.shard import Places, Shard
from headgate.sharding import SHARDS_MAX, check_sharding, range_of
from headgate.transaction import Transactions
from headgate.wal.fence import check_epoch
from headgate.wal.log import ShardLog
from headgate.watch import SchemaWatch, rules_of
from headgate.writer import ShardWriter

LEASE_SECONDS = 120.0
"""How long a split may stand still before anybody may take it back."""
_PARTS = 2
_LOADS_WAIT_SECONDS = 0.05
_LOADS_WAITS_MAX = 100
_CONSUMERS_TRIES_MAX = 64


def split_shard(watch: SchemaWatch, places: Places, shard: str, column: str | None = None) -> tuple[str, ...]:
    """Split a shard in two, by the hash of a column. The ids of its parts.

    Raises:
        InvalidInputError: it cannot be split; nothing was written.
        NotFoundError: there is no such shard.
        ShardSplitError: somebody else splits it, or has.
    """
    # Everything that can be refused is, before the claim fences a healthy writer.
    manifest = watch.refresh()
    log = places.open_log(shard, manifest.table_id)
    ranges = _halves(manifest, shard, column)
    transactions = Transactions(places.table_store(), places.clock, lambda name: places.open_log(name, manifest.table_id))
    _wait_for_loads(log, transactions)

    # 1. Claim.
    split_id = places.clock.token()
    writer: ShardWriter | None = None
    try:
        writer = _claimed(watch, places, log, lambda m: _begun(log, m, split_id, ranges))
        epoch = writer.epoch
        failpoint("split.claimed")
        # 2. Flush. Nobody else can put, and we do not.
        writer.flush()
        failpoint("split.flushed")
        # 3. Pin, and see that it is still ours; the lease begins anew.
        state = log.manifests.commit(lambda m: _pinned(log, m, split_id, epoch))
        assert state.split is not None, "it is ours"
        failpoint("split.pinned")
        # 4. The parts.
        for child in state.split.children:
            _make(places, state, child)
            failpoint("split.child")
        # 5. The moment of the split.
        retired = _retire(places, log, state, split_id, epoch)
        failpoint("split.retired")
    except BaseException:
        _give_up(log, split_id)
        raise
    finally:
        if writer is not None:
            writer.abort()
    # 6. Anybody may tell the table.
    publish(watch, retired)
    failpoint("split.published")
    return tuple(child.shard for child in state.split.children)


def _halves(manifest: TableManifest, shard: str, column: str | None) -> tuple[HashRange, HashRange]:
    name, column_id = column_to_split_by(manifest, column)
    if shard not in manifest.shards:
        gone = " any more: it was split" if shard in manifest.retired else ""
        raise NotFoundError(f"the table has no shard {shard!r}{gone}", hint=f"it has {', '.join(manifest.shards[:20])}")
    rules = rules_of(manifest)
    check_sharding(manifest.sharding.but(kind="bucket", column=name), rules.schema, rules.key)
    found = range_of(manifest.sharding, shard)
    assert found is not None, "every shard of the table has its range"
    low, high = found
    middle = (low + high) // 2
    if middle == low or len(manifest.shards) + 1 > SHARDS_MAX:
        raise InvalidInputError(f"shard {shard} cannot be split: there are too many", hint=f"{SHARDS_MAX} shards at most")
    if len(shard) > 56:
        raise InvalidInputError(f"shard {shard} was split off too often", hint="copy the rows into a table with more buckets")
    return HashRange(low=low, high=middle, column=column_id), HashRange(low=middle, high=high, column=column_id)


def _wait_for_loads(log: ShardLog, transactions: Transactions) -> None:
    """What is announced may be committed in other shards, so it gets its place here before the split begins."""
    for _ in range(_LOADS_WAITS_MAX):
        if transactions.resolve(log):
            return
        log.clock.sleep(_LOADS_WAIT_SECONDS)
    raise CommitConflictError(f"shard {log.shard} has loads that are being brought in", hint="split it when they are done")


def _claimed(watch: SchemaWatch, places: Places, log: ShardLog, split: Callable[[ShardManifest], SplitRecord]) -> ShardWriter:
    handle = Shard.of(log.shard, places, watch)
    return ShardWriter(log, handle.rules, ShardWriterConfig(), places.columnar(), watch, split=split)


def _begun(log: ShardLog, manifest: ShardManifest, split_id: str, ranges: tuple[HashRange, ...]) -> SplitRecord:
    if manifest.announced:
        raise CommitConflictError(f"shard {log.shard} has loads that are being brought in", hint="split it when they are done")
    assert len(ranges) == _PARTS, "names are counted so"
    first = _PARTS * manifest.splits_begun
    children = tuple(ChildShard(shard=f"{log.shard}-{first + number}", range=part) for number, part in enumerate(ranges))
    return SplitRecord(id=split_id, children=children, expires_at=log.clock.now() + LEASE_SECONDS)


def _check_mine(log: ShardLog, manifest: ShardManifest, split_id: str, epoch: int) -> SplitRecord:
    check_epoch(log, manifest, epoch)
    split = manifest.split
    if manifest.state != "splitting" or split is None or split.id != split_id:
        raise ShardSplitError(
            f"the split of shard {log.shard} was taken back: its lease was over",
            shard=log.shard,
            state=manifest.state,
            hint="split it again",
        )
    return split


def pin_of(child: str) -> str:
    """The id of the pin in the parent's manifest that holds what a part of it reads."""
    return f"split-{child}"


def _pinned(log: ShardLog, manifest: ShardManifest, split_id: str, epoch: int) -> ShardManifest:
    split = _check_mine(log, manifest, split_id, epoch)
    now, position = log.clock.now(), manifest.cursor.position
    assert manifest.cursor.epoch == epoch, "flushed: the cursor is past all that others wrote"
    pins = {
        pin_of(child.shard): CheckpointRecord(
            position=position, end=position, version=manifest.version + 1, created_at=now, clone=f"{IN_TABLE}{child.shard}"
        )
        for child in split.children
    }
    renewed = split.but(expires_at=now + LEASE_SECONDS)
    return manifest.but(checkpoints={**manifest.checkpoints, **pins}, split=renewed)


def _make(places: Places, state: ShardManifest, child: ChildShard) -> None:
    """A part begins where the parent ended: the same runs, of which its own rows count; an empty log of its own."""
    position = state.cursor.position
    first = begun_anew(state, places.clock.token(), end=position).but(
        shard=child.shard,
        range=child.range,
        wal=WalState(id=state.wal.id, uri=state.wal.uri, first_epoch=state.cursor.epoch, clean_at=position),
        runs=tuple(run.but(keep=child.range) for run in state.runs),
        consumers=_handed_on(state),
    )
    if not places.manifests(places.table_store(), child.shard, state.table_id).create_first(first):
        raise CommitConflictError(f"there is a shard {child.shard} already", hint="split it again")


def _handed_on(state: ShardManifest) -> dict[str, ConsumerRecord]:
    """Those who follow the changes read the parent to its end; from there on the parts hold the log for them.

    A snapshot that was not given yet is the parent's, and given before.
    """
    end = {"position": state.cursor.position, "load": state.next_load - 1, "snapshot": None}
    return {name: held.but(**end) for name, held in state.consumers.items()}


class _ConsumersChanged(Exception):
    """Somebody follows the changes, or does no more, since the parts were made."""


def _retire(places: Places, log: ShardLog, state: ShardManifest, split_id: str, epoch: int) -> ShardManifest:
    """Retire the shard, with parts that hold the log for all who follow its changes by then."""
    for _ in range(_CONSUMERS_TRIES_MAX):
        known = state
        try:
            return log.manifests.commit(lambda m: _retired(log, m, split_id, epoch, known))  # noqa: B023  # called at once
        except _ConsumersChanged:
            state = log.manifests.load()
        followers = _handed_on(state)
        for child in _check_mine(log, state, split_id, epoch).children:
            chain = places.manifests(places.table_store(), child.shard, state.table_id)
            chain.commit(lambda m: m.but(consumers=followers) if m.consumers != followers else None)  # noqa: B023  # called at once
            failpoint("split.followers")
    raise CommitConflictError(f"consumers of shard {log.shard} come and go faster than it can be split", hint="split it again")


def _retired(log: ShardLog, manifest: ShardManifest, split_id: str, epoch: int, known: ShardManifest) -> ShardManifest | None:
    if manifest.state == "retired" and manifest.split is not None and manifest.split.id == split_id:
        return None
    split = _check_mine(log, manifest, split_id, epoch)
    assert manifest.cursor.position == known.cursor.position, "nobody else writes"
    # t0 the parts are made · t1 a consumer registers here · t2 it is split, and what is written to the parts is collected under it
    if manifest.consumers.keys() != known.consumers.keys():
        raise _ConsumersChanged
    return manifest.but(state="retired", split=split)


def _give_up(log: ShardLog, split_id: str) -> None:
    """Take the split back, unless it has happened. If this fails too, the lease ends by itself."""
    try:
        log.manifests.commit(lambda m: _taken_back(m, split_id))
    except HeadgateError:  # the reason we are here is the one to tell
        return


def _taken_back(manifest: ShardManifest, split_id: str) -> ShardManifest | None:
    if manifest.state != "splitting" or manifest.split is None or manifest.split.id != split_id:
        return None
    return manifest.unsplit()


def let_parts_go(places: Places, manifest: TableManifest) -> None:
    """Drop the pins of parts that name no files but their own any more.

    A part of a part may name files of the first of them all, which it is held by through the one in the middle. So what counts
    is whether they are its own, and not whose they are.
    """
    for name in manifest.retired:
        log = places.open_log(name, manifest.table_id)
        for id, record in log.manifests.load().checkpoints.items():
            if record.clone is None or not record.clone.startswith(IN_TABLE):
                continue
            part = places.open_log(record.clone.removeprefix(IN_TABLE), manifest.table_id)
            states = [state for holder, state in held_manifests(part).items() if not _is_spent(holder, state)]
            own = f"shards/{part.shard}-{manifest.table_id}/"
            if all(piece.path.startswith(own) or piece.uri is not None for s in states for run in s.runs for piece in run.slices):
                drop_record(log, id)


def sweep_parts(places: Places, manifest: TableManifest) -> int:
    """Delete the first manifests of parts that never came to be: their splitters died, or gave up. How many there were."""
    store, swept = places.table_store(), 0
    for name in (*manifest.shards, *manifest.retired):
        state = places.open_log(name, manifest.table_id).manifests.load()
        live = {child.shard for child in state.split.children} if state.split is not None else set[str]()
        for number in range(_PARTS * state.splits_begun):
            part = f"{name}-{number}"
            if part not in live:
                keys = [info.key for info in store.list(f"shards/{part}-{manifest.table_id}/")]
                store.delete(keys)
                store.prune(f"shards/{part}-{manifest.table_id}/")
                swept += len(keys)
    return swept


def _is_spent(holder: str, state: ShardManifest) -> bool:
    return state.state == "retired" and holder == "the latest manifest"
