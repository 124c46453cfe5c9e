"""Garbage collection: deleting what nothing can need any more.

Owns: what may go, and the order in which it goes. Does not own: entries of the log (collect).

Three steps, and their order is the argument: (1) LIST; (2) ONE commit, which takes out leases that
are over and raises floors; (3) delete, of what was listed, only what that committed version does
not name and nothing can come to name. Looking at the manifest first and listing after deletes
what was committed in between.

What can nothing come to name? The files of a flush whose number is below ``next_generation``: its
turn is over. The files of an attempt that is not registered: whoever wrote them will find it gone
when he commits. A replaced run, once its record is out of the manifest: reads that began before
hold no claim on it (they raise SnapshotExpiredError), checkpoints and clones pin versions that
name it. The files of a load, once all who follow the changes have passed it and it is out of ``loads``,
which name them for longer than ``runs`` may. No clock decides about safety: ``min_age`` is for the
comfort of readers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from headgate.errors import DataLossError, ObjectMissingError
from headgate.failpoint import failpoint
from headgate.manifest.model import HISTORY_VERSIONS_MAX, ReplacedRun, ShardManifest, TransactionMark
from headgate.meters import GC_BYTES, GC_OBJECTS, GC_PASSES
from headgate.store import ObjectInfo, Store
from headgate.transaction import ONCE, Transactions, attempt_owner
from headgate.wal.collect import collect_entries
from headgate.wal.log import ShardLog

LEASE_GRACE_SECONDS = 60.0
"""How long past its end a lease is honoured, because clocks differ."""
MARK_SECONDS = 3600.0
_DELETES_AT_ONCE = 1000
_VERSIONS_KEPT = HISTORY_VERSIONS_MAX
_FLUSH = re.compile(r"g(\d{10})-[0-9a-z]{26}")


@dataclass(frozen=True, slots=True)
class GcReport:
    """What was deleted, or would be."""

    dry_run: bool
    objects: dict[str, int]
    """By kind: entry, run, orphan, manifest, intent."""
    bytes: dict[str, int]
    held: dict[str, int] = field(default_factory=dict)
    """What would be garbage, if it were not held: objects, by what holds them."""
    leases_ended: tuple[str, ...] = ()

    @classmethod
    def of(cls, parts: Iterable[GcReport], *, dry_run: bool) -> GcReport:
        objects, sizes, held = Counter[str](), Counter[str](), Counter[str]()
        ended: list[str] = []
        for part in parts:
            objects.update(part.objects)
            sizes.update(part.bytes)
            held.update(part.held)
            ended += part.leases_ended
        return cls(dry_run, dict(objects), dict(sizes), dict(held), tuple(ended))


def collect_shard(
    log: ShardLog, table_store: Store, *, dry_run: bool, min_age: float, sweep: bool = False, apps_over: Container[str] = ()
) -> GcReport:
    """Collect one shard. Safe at any moment, beside anything, however often it is interrupted.

    Args:
        apps_over: applications whose one transaction was carried out everywhere; their marks go.
    """
    now = log.clock.now()
    folder = f"shards/{log.shard}-{log.table_id}/runs/"

    # 1. List, before the commit: what comes into being after it is not in the list.
    files = list(table_store.list(folder))
    failpoint("gc.listed")

    # 2. One commit. Its manifest is the one whose word counts.
    ended: list[str] = []
    freed: set[str] = set()

    def end_leases(manifest: ShardManifest) -> ShardManifest:
        ended[:] = [f"checkpoint {id}" for id, c in manifest.checkpoints.items() if _is_over(c.expires_at, now)]
        ended.extend(f"attempt {id}" for id, a in manifest.attempts.items() if _is_over(a.expires_at, now))
        alive = _without_passed_loads(
            manifest.but(
                checkpoints={id: c for id, c in manifest.checkpoints.items() if not _is_over(c.expires_at, now)},
                attempts={id: a for id, a in manifest.attempts.items() if not _is_over(a.expires_at, now)},
                transactions={app: mark for app, mark in manifest.transactions.items() if not _is_forgotten(app, mark, apps_over, now)},
            ),
            now - min_age,
        )
        # What a load names that is still to be followed stays on the list: its attempt may be registered for long.
        followed = {part.path for load in alive.loads for run in load.runs for part in run.slices}
        gone = [run for run in alive.replaced if run.replaced_at + min_age <= now and followed.isdisjoint(p.path for p in run.slices)]
        freed.clear()
        freed.update(part.path for run in gone for part in run.slices)
        runs, replaced = alive.runs, tuple(run for run in alive.replaced if run not in gone)
        if alive.state == "retired":
            # Nobody reads a shard that was split but by its checkpoints, and its parts have pins among them.
            replaced += tuple(ReplacedRun(id=run.id, replaced_at=now, slices=run.slices) for run in runs)
            runs = ()
        # A version of our own even when nothing changes: its create proves that it follows the latest. What a listing
        # alone calls the latest may have been superseded, and collected, while the names were read.
        return alive.but(runs=runs, replaced=replaced)

    committed: ShardManifest | None
    if dry_run:
        manifest = log.manifests.load()
        committed = end_leases(manifest).but(version=manifest.version + 1)
    else:
        committed = log.manifests.commit(end_leases)
    failpoint("gc.committed")

    # 3. Delete what it does not name, and nothing can come to name.
    pinned = _pinned_versions(log, committed)
    objects, sizes, held = Counter[str](), Counter[str](), Counter[str]()
    dead: list[str] = []
    named = {part.path: "the latest manifest" for run in committed.runs for part in run.slices}
    holders = {record.version: "a clone" if record.clone is not None else "a checkpoint" for record in committed.checkpoints.values()}
    for number, version in pinned.items():
        for run in version.runs:
            for part in run.slices:
                named.setdefault(part.path, holders[number])
    for load in committed.loads:
        for run in load.runs:
            for part in run.slices:
                named.setdefault(part.path, "the change feed")
    for announced in committed.announced.values():
        for run in announced.runs:
            for part in run.slices:
                named.setdefault(part.path, "a load")
    for replaced in committed.replaced:
        for part in replaced.slices:
            named.setdefault(part.path, "min_age")
    for info in files:
        attempt, _, rest = info.key[len(folder) :].partition("/")
        path = f"{folder}{attempt}/{rest.split('/', 1)[0]}"
        kind = "run" if path in freed else "orphan"
        # What was in a run once is not named again, though its attempt may go on to write others.
        holder = named.get(path) or (None if kind == "run" else _still_written(attempt, committed))
        if holder is None and kind == "orphan" and info.modified + min_age > now:
            holder = "min_age"
        if holder is None:
            objects[kind] += 1
            sizes[kind] += info.size_bytes
            dead.append(info.key)
        elif holder != "the latest manifest":
            held[holder] += 1
    manifests = list(_old_manifests(log, table_store, committed, set(pinned), now, min_age))
    objects["manifest"] += len(manifests)
    sizes["manifest"] += sum(info.size_bytes for info in manifests)
    if not dry_run:
        _delete(table_store, dead)
        for attempt in {key[len(folder) :].split("/", 1)[0] for key in dead}:
            table_store.prune(f"{folder}{attempt}/")
        failpoint("gc.runs")
        _delete(table_store, [info.key for info in manifests])
        failpoint("gc.manifests")
    entries = collect_entries(log, dry_run=dry_run, sweep=sweep, planned=committed if dry_run else None)
    objects["entry"] += entries.entries
    sizes["entry"] += entries.bytes
    if not dry_run:
        place = (table_store.uri, log.shard)
        GC_PASSES.add(1, *place)
        for kind, count in objects.items():
            GC_OBJECTS.add(count, *place, kind)
            GC_BYTES.add(sizes[kind], *place, kind)
    return GcReport(dry_run, +objects, +sizes, +held, tuple(ended))


def _is_forgotten(app: str, mark: TransactionMark, apps_over: Container[str], now: float) -> bool:
    """Applications that were named for one transaction never come again, once its intent is gone. The hour is for whoever is late."""
    return app in apps_over and mark.time + MARK_SECONDS < now


def collect_intents(
    transactions: Transactions, shards: Callable[[], Sequence[str]], *, dry_run: bool, min_age: float
) -> tuple[GcReport, set[str]]:
    """Delete intents that nobody can come to need. Also which applications, of those for one transaction, are over.

    Announcements whose lease is over are decided first, so that what died half-way does not stay so.

    An intent that is gone leaves its name free, and whoever was stalled since before it was decided may take it:

    t0 A announces in shard 1 and stalls · t1 its lease is over: aborted, withdrawn, and the abort is collected · t2 A
    announces in shard 2, creates the intent, places in shard 2, and finds nothing to place in shard 1.

    So an abort stays until every shard has that version, or a later one: then A's load is refused everywhere. An
    application for one transaction has no later versions; its abort stays until its attempt is over: A cannot announce.

    Args:
        shards: all of the table's as of when it is called: an intent may name one that was made a moment ago.
    """
    # 1. Marks, before the intents are listed: a mark whose intent is not there then is of one that was carried out and collected.
    now = transactions.clock.now()
    marked = {app for shard in shards() for app in transactions.log_of(shard).manifests.load().transactions if app.startswith(ONCE)}
    # 2. List, before the shards are looked up and their manifests read: what comes into being later is not in the list.
    failpoint("gc.intents.listing")
    listed = list(transactions.store.list("txn/"))
    failpoint("gc.intents.listed")
    logs = [transactions.log_of(shard) for shard in shards()]
    if not dry_run:
        for log in logs:
            transactions.resolve(log)
    manifests = [log.manifests.load() for log in logs]
    waited_for = {load.transaction for manifest in manifests for load in manifest.announced.values()}
    owners = {attempt.owner for manifest in manifests for attempt in manifest.attempts.values()}
    marks = {manifest.shard: manifest.transactions for manifest in manifests}
    # 3. Those that nobody needs.
    dead: list[ObjectInfo] = []
    apps_open: set[str] = set()
    held = Counter[str]()
    for info in listed:
        intent = transactions.read(info.key)
        if intent is None:
            continue
        is_done = all(
            shard not in marks or ((mark := marks[shard].get(intent.app)) is not None and mark.version >= intent.version)
            for shard in (intent.loads if intent.state == "committed" else marks)
        )
        is_over = intent.app.startswith(ONCE) and attempt_owner(intent.app) not in owners
        is_over |= intent.table_id is not None and all(intent.table_id != manifest.table_id for manifest in manifests)
        if info.key in waited_for or not (is_done or is_over):
            apps_open.add(intent.app)
            held["a transaction"] += 1
        elif info.modified + min_age > now:
            apps_open.add(intent.app)
            held["min_age"] += 1
        else:
            dead.append(info)
    if not dry_run:
        _delete(transactions.store, [info.key for info in dead])
        failpoint("gc.intents")
    sizes = {"intent": sum(info.size_bytes for info in dead)} if dead else {}
    # Whoever holds the attempt still may commit again, because he does not know that it happened: the mark tells him.
    over = {app for app in marked - apps_open if attempt_owner(app) not in owners}
    return GcReport(dry_run, {"intent": len(dead)} if dead else {}, sizes, dict(held)), over


def _without_passed_loads(manifest: ShardManifest, before: float) -> ShardManifest:
    """Without the loads that nobody will follow any more: all consumers have passed them, and the log before them may go.

    The floor of the log rises with theirs, in the same commit: whoever begins with the earliest change must not find
    entries from before a load without the load.
    """
    floor = max(manifest.wal_floor, manifest.hold_position())
    passed = min((consumer.load for consumer in manifest.consumers.values()), default=manifest.next_load)
    gone = list(takewhile(lambda load: load.number <= passed and load.position <= floor and load.time <= before, manifest.loads))
    if not gone:
        return manifest
    return manifest.but(loads=manifest.loads[len(gone) :], load_floor=gone[-1].number, wal_floor=floor)


def _is_over(expires_at: float | None, now: float) -> bool:
    return expires_at is not None and expires_at + LEASE_GRACE_SECONDS < now


def _still_written(attempt: str, manifest: ShardManifest) -> str | None:
    """May somebody still commit the files of this attempt?"""
    flush = _FLUSH.fullmatch(attempt)
    if flush is not None:
        return None if int(flush.group(1)) < manifest.next_generation else "a flush"
    return "an attempt" if attempt.rsplit("-", 1)[0] in manifest.attempts else None


def _pinned_versions(log: ShardLog, manifest: ShardManifest) -> dict[int, ShardManifest]:
    """What checkpoints pin, read: their runs stay."""
    found: dict[int, ShardManifest] = {}
    for id, record in manifest.checkpoints.items():
        if not record.version or record.version in found:
            continue
        if record.version == manifest.version:
            found[record.version] = manifest
            continue
        try:
            found[record.version] = log.manifests.at(record.version)
        except ObjectMissingError as error:
            if id in log.manifests.load().checkpoints:
                raise DataLossError(f"{error.object} is missing, and checkpoint {id} pins it", object=error.object) from error
            # dropped since, and another collection was faster: it holds nothing any more
    return found


def _old_manifests(
    log: ShardLog, store: Store, manifest: ShardManifest, pinned: set[int], now: float, min_age: float
) -> Iterable[ObjectInfo]:
    """Versions before the newest few that nothing pins.

    A listing of a folder is no snapshot: a name that comes and one that goes while it is read may both be missed. With
    the newest versions kept, whoever lists finds the one that was the latest when he began, or a later one.
    """
    latest = log.manifests.key(max(0, manifest.version - _VERSIONS_KEPT))
    keep = {log.manifests.key(version) for version in pinned}
    for info in store.list(log.manifests.folder):
        if info.key >= latest:
            return
        if info.key not in keep and info.modified + min_age <= now:
            yield info


def _delete(store: Store, keys: list[str]) -> None:
    for start in range(0, len(keys), _DELETES_AT_ONCE):
        try:
            store.delete(keys[start : start + _DELETES_AT_ONCE])
        except ObjectMissingError:
            continue  # somebody else collects too
