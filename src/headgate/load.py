"""Loads: runs that were written elsewhere come into a shard beside its live writer.

Owns: announce, place, withdraw: the steps in one shard. Does not own: the files (bulk), what ties
shards together (transaction), where MemTables are cut (view, flush).

A load needs a place among the entries of a log that somebody else is writing. It gets it in two
commits. Reading the tip and committing in one go does not do:

t0 the loader reads the tip, 10 · t1 the writer acknowledges 10 to 19 and flushes, the cursor is at
20 · t2 the loader commits "after 9": below the cursor, where all is closed; readers and feeds that
went by there never see it, and rows older than it win.

So it is ANNOUNCED first, by a commit; then the tip is read; then it is PLACED, after everything
that was durable after the announcement, never before the cursor of the manifest that it is
committed to, never before an earlier load. Whoever follows the changes and sees an announcement
waits: what he has not seen yet may come before what he would hand out. A load never fences.

t0 A announces · t1 A's lease ends, and somebody withdraws it, by a commit · t2 A places: the
announcement is gone, so it fails; of two commits on one manifest one comes first.

Placing a transaction that the shard has already does nothing, so every step can be repeated by
anyone. The mark of the transaction, the runs and the place are one commit.
"""

from __future__ import annotations

from headgate.attempt import check_registered, is_named, written_under
from headgate.errors import BackpressureTimeoutError, CommitConflictError, NotFoundError, TransactionConflictError
from headgate.failpoint import failpoint
from headgate.manifest.model import AnnouncedLoad, PlacedLoad, ShardManifest, TransactionMark
from headgate.meters import LOAD_ROWS, LOADS
from headgate.wal.log import ShardLog
from headgate.wal.tip import find_tip

RUNS_MAX = 1000
"""No load is announced in a shard with more runs than this: somebody should compact first. A live writer is never held up."""


def announce(log: ShardLog, id: str, load: AnnouncedLoad, attempt: str) -> ShardManifest:
    """The files are complete: from here on the manifest, which is returned, holds them. Can be repeated.

    Raises:
        TransactionConflictError: the shard has this transaction already, or a later one, or one of another query.
        CommitConflictError: the attempt is over, or the shard takes no loads any more (it was split); nothing was done.
        BackpressureTimeoutError: the shard has too many runs.
    """

    def change(manifest: ShardManifest) -> ShardManifest | None:
        check_new(log, manifest, load)
        if id in manifest.announced:
            return None
        if manifest.state != "active":
            raise CommitConflictError(
                f"shard {log.shard} is {manifest.state} and takes no loads", hint="open the table again: its rows have other shards now"
            )
        # By the files, not by whom we are: of what was written before the lease was over, and registered anew, nothing is left.
        for written in written_under(load.runs):
            check_registered(log, manifest, written if is_named(written, attempt) else attempt)
        if load.runs and len(manifest.runs) + len(load.runs) > RUNS_MAX:
            raise BackpressureTimeoutError(
                f"shard {log.shard} has {len(manifest.runs)} runs, and {len(load.runs)} more would be too many",
                hint=f"{RUNS_MAX} at most: compact the table (headgate compact), or load fewer and larger runs",
            )
        return manifest.but(announced={**manifest.announced, id: load})

    return log.manifests.commit(change)


def check_new(log: ShardLog, manifest: ShardManifest, load: AnnouncedLoad) -> None:
    mark = manifest.transactions.get(load.app)
    if mark is not None and (mark.version >= load.version or mark.query != load.query):
        raise TransactionConflictError(
            f"shard {log.shard} has version {mark.version} of {load.app!r}, and {load.version} was to follow it",
            hint="it was committed by another attempt, or the application's versions went back",
        )
    later = max((a.version for a in manifest.announced.values() if a.app == load.app), default=load.version)
    if later > load.version:
        raise TransactionConflictError(
            f"version {later} of {load.app!r} is on its way into shard {log.shard}, and {load.version} was to follow it",
            hint="versions of one application come one after the other; this one is too late",
        )


def place(log: ShardLog, id: str, app: str, version: int) -> bool | None:
    """Give an announced load its place. False: the shard has its transaction already. Can be repeated.

    None: it has a later one, and nothing is left that tells whether this one came before it, or not at all.

    Raises:
        TransactionConflictError: it was withdrawn.
    """
    manifest = log.manifests.load()
    if has_mark(manifest, app, version):
        return _passed(manifest, app, version)
    _check_announced(log, manifest, id)
    # The tip is read after the announcement: everything acknowledged until then comes before the load.
    tip = find_tip(log)[1].position
    failpoint("load.tip")
    placed = False

    def change(manifest: ShardManifest) -> ShardManifest | None:
        nonlocal placed
        placed = False
        if has_mark(manifest, app, version):
            return None
        _check_announced(log, manifest, id)
        load = manifest.announced[id]
        now = log.clock.now()
        position = max(tip, manifest.last_place())
        runs = tuple(run.but(first=position, end=position) for run in load.runs if run.rows)
        # Other attempts at the same transaction can never win now.
        announced = {other: a for other, a in manifest.announced.items() if a.app != app or a.version > version}
        mark = TransactionMark(version=version, query=load.query, time=now)
        changed = manifest.but(announced=announced, transactions={**manifest.transactions, app: mark})
        placed = True
        if not runs:
            return changed
        number = manifest.next_load
        record = PlacedLoad(number=number, position=position, runs=runs, app=app, version=version, time=now)
        return changed.but(runs=(*manifest.runs, *runs), loads=(*manifest.loads, record), next_load=number + 1)

    committed = log.manifests.commit(change)
    if placed:
        rows = sum(run.rows for load in committed.loads if (load.app, load.version) == (app, version) for run in load.runs)
        LOADS.add(1, log.manifests.place, log.shard)
        LOAD_ROWS.add(rows, log.manifests.place, log.shard)
        return True
    return _passed(committed, app, version)


def withdraw(log: ShardLog, id: str) -> None:
    """It will not be placed. Only when that is decided: its owner gave up before the transaction, or the transaction did."""
    log.manifests.commit(
        lambda m: m.but(announced={other: a for other, a in m.announced.items() if other != id}) if id in m.announced else None
    )


def has_mark(manifest: ShardManifest, app: str, version: int) -> bool:
    """Has the shard this transaction of an application, or a later one?"""
    mark = manifest.transactions.get(app)
    return mark is not None and mark.version >= version


def _passed(manifest: ShardManifest, app: str, version: int) -> bool | None:
    is_known = manifest.transactions[app].version == version or any((load.app, load.version) == (app, version) for load in manifest.loads)
    return False if is_known else None


def _check_announced(log: ShardLog, manifest: ShardManifest, id: str) -> None:
    if manifest.state == "dropped":
        raise NotFoundError(f"shard {log.shard} was dropped", hint="its table was; nothing was brought in")
    if id not in manifest.announced:
        raise TransactionConflictError(
            f"shard {log.shard}: load {id} was withdrawn", hint="its lease was over, or another attempt took its place; load again"
        )
