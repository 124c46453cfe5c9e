"""What one read sees of one shard: runs, and what is newer than they are.

Owns: taking an immutable, consistent view, in any process. Does not own: what a writer holds in
memory (memtable), which rows of the sources count (query).

Outside the writer's process the newest rows are in the log's tail, from the cursor on. What was
read of it is kept for the next view, so a poll costs what was written since. The rows before
the cursor are in the runs of the manifest that says where the cursor is, so both must be of one
moment: t0 the manifest says cursor 10 · t1 a flush moves it to 20, collection takes 10 to 19 ·
t2 nothing is found at 10, and it looks like the tip. So a missing entry is the tip only if a
manifest that is read afterwards has its cursor where it was.

A load may stand past the cursor, among entries that are still in the log: it is newer than those
before its place, and older than the rest. Then what is in memory below it is given as a run, too,
and the order is the same as ever: runs, oldest first, and what is newer than all of them. A view
is a prefix of that order: it never has a load without the entries before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headgate.columnar import Columnar
from headgate.errors import (
    CommitConflictError,
    DataLossError,
    NotFoundError,
    ObjectMissingError,
    ShardSplitError,
    SnapshotExpiredError,
)
from headgate.failpoint import failpoint
from headgate.manifest.model import ChainPoint, CheckpointRecord, RunRecord, ShardManifest
from headgate.memtable import Fresh, MemTable
from headgate.run import OpenRun, run_in_memory
from headgate.schema import RowRules
from headgate.wal.entry import Entry, Put
from headgate.wal.log import ShardLog
from headgate.wal.loss import evidence_of_loss
from headgate.wal.marker import check_place
from headgate.wal.reader import ChainReader

_RESTARTS_MAX = 64
_PINNED_MAX = 4


class RunCache:
    """Open runs, and what reads have learnt of them. One per reader or writer of a shard, and one for each state that is pinned."""

    def __init__(self, columnar: Columnar, known: RunCache | None = None) -> None:
        """
        Args:
            known: of another state of the shard. Runs never change, so what both states have need not be opened again.
        """
        self.columnar = columnar
        self._open: dict[str, OpenRun] = {} if known is None else known._open
        self.masks: Any = None if known is None else known.masks
        """For query: what it knows of the runs as they were last seen; replaced as a whole."""

    def open(self, records: tuple[RunRecord, ...]) -> tuple[OpenRun, ...]:
        """The same objects for the same runs as before; those that are no longer named are let go."""
        known, runs = self._open, dict[str, OpenRun]()
        for record in records:
            before = known.get(record.id)
            if before is None or not _has_same_rows(before.record, record):
                before = OpenRun(record, self.columnar)
            runs[record.id] = before
        self._open = runs
        return tuple(runs.values())


def _has_same_rows(one: RunRecord, other: RunRecord) -> bool:
    """It should go without saying for runs of one id. A repair by an earlier version left runs with fewer slices under the same one."""
    if one is other:
        return True
    return (one.slices, one.keep, one.fields, one.tombstones) == (other.slices, other.keep, other.fields, other.tombstones)


@dataclass(frozen=True)
class ReadView:
    """One state of a shard. Never changes, and needs nothing but the objects it names."""

    shard: str
    rules: RowRules
    runs: tuple[OpenRun, ...]
    """Oldest first. Everything before the cursor."""
    fresh: tuple[Fresh, ...]
    """Oldest first, newer than all runs: MemTables, or the log's tail."""
    pending: tuple[Put, ...] = ()
    """Newer than all else, and not durable yet; only for ``freshness="memory"``."""
    cache: RunCache = field(repr=False, kw_only=True)
    version: int = field(default=0, kw_only=True)
    """The manifest it was made from."""


def _check_alive(manifest: ShardManifest) -> None:
    """Is it a shard of the table of now? What it was may be read by its checkpoints."""
    if manifest.state == "retired":
        raise ShardSplitError(f"shard {manifest.shard} was split", shard=manifest.shard, state=manifest.state)
    if manifest.state == "dropped":
        raise NotFoundError(f"shard {manifest.shard} was dropped", hint="open the table again, if there is one")


def find_checkpoint(manifest: ShardManifest, at: str) -> tuple[str, CheckpointRecord] | None:
    """A checkpoint by its id, or by its name."""
    record = manifest.checkpoints.get(at)
    if record is not None:
        return at, record
    return next(((id, record) for id, record in manifest.checkpoints.items() if record.name == at), None)


def arranged(
    manifest: ShardManifest, fresh: Sequence[Fresh], rules: RowRules, cache: RunCache
) -> tuple[tuple[OpenRun, ...], tuple[Fresh, ...]]:
    """The sources of a view, oldest first: runs, what is in memory below loads among them, and what is newer than all of them.

    Args:
        fresh: what is in memory past the cursor, oldest first, cut at the loads' places.
    """
    opened = cache.open(manifest.runs)
    loads = manifest.loads_past_cursor()
    if not loads:
        return opened, tuple(fresh)
    runs = list(opened[: len(opened) - len(loads)])
    left = [part for part in fresh if part.count]
    for load, run in zip(loads, opened[len(opened) - len(loads) :], strict=True):
        while left and left[0].places()[1] <= load.end:
            runs.append(_as_run(left.pop(0), rules))
        runs.append(run)
    return tuple(runs), tuple(left)


def _as_run(part: Fresh, rules: RowRules) -> OpenRun:
    memtable = part.memtable
    known = memtable.run
    if known is None or known[0] != part.count or known[1] is not rules:
        known = (part.count, rules, run_in_memory(part.puts, rules, *part.places()))
        memtable.run = known  # of two readers at once one is forgotten: both are right
    run: OpenRun = known[2]
    return run


def cut_at(memtables: Sequence[MemTable], places: Sequence[int]) -> tuple[MemTable, ...]:
    """The same entries, in MemTables that have each place before, after or between them."""
    parts: list[MemTable] = []
    for memtable in memtables:
        for place in places:
            pieces = memtable.cut(place)
            if pieces is not None:
                parts.append(pieces[0])
                memtable = pieces[1]
        parts.append(memtable)
    return tuple(parts)


class _Tail:
    """The log from the cursor on, as far as it was read."""

    def __init__(self, wal_id: str, cursor: ChainPoint) -> None:
        self.wal_id = wal_id
        self.entries: deque[Entry] = deque()
        self.end = cursor
        self.memtables: tuple[MemTable, ...] = (MemTable(cursor),)
        """Oldest first, cut where loads were placed; only the last one grows."""
        self.seals: dict[int, int] = {}

    @property
    def first(self) -> ChainPoint:
        return self.memtables[0].first

    def fits(self, manifest: ShardManifest) -> bool:
        cursor = manifest.cursor
        return self.wal_id == manifest.wal.id and self.first.position <= cursor.position <= self.end.position

    def views(self, manifest: ShardManifest) -> tuple[Fresh, ...]:
        """What was read, cut where the manifest has loads."""
        self.memtables = cut_at(self.memtables, [load.end for load in manifest.loads_past_cursor()])
        return tuple(memtable.view() for memtable in self.memtables)

    def drop_before(self, cursor: ChainPoint) -> None:
        """What is before the cursor is in runs. Views that were taken keep what they have."""
        if cursor.position <= self.first.position:
            return
        while self.entries and self.entries[0].position < cursor.position:
            self.entries.popleft()
        self.memtables = (MemTable(cursor),)
        self.seals = {epoch: position for epoch, position in self.seals.items() if position >= cursor.position}
        for entry in self.entries:
            self._append(entry)
        self.end = max(self.end, cursor)

    def pass_over(self, entry: Entry) -> None:
        if entry.is_seal:
            self.seals[entry.epoch] = entry.position
            self.end = self.end.past_seal()
            return
        self.end = self.end.past_data()
        self.entries.append(entry)
        self._append(entry)

    def _append(self, entry: Entry) -> None:
        self.memtables[-1].append(entry.epoch, entry.position, list(entry.puts), entry.size_bytes, 0.0)


class ShardReader:
    """Views of a shard for those who do not write it. Writes nothing. Safe for many threads."""

    def __init__(self, log: ShardLog, columnar: Columnar, rules: Callable[[], RowRules]) -> None:
        self._log, self._rules = log, rules
        self.cache = RunCache(columnar)
        self._lock = log.clock.lock()
        self._returned = log.clock.condition(self._lock)
        self._taken = False  # one thread at a time extends the tail; no lock is held while it reads
        self._tail: _Tail | None = None
        self._pinned: dict[str, ReadView] = {}

    def view(self, at: str | None = None) -> ReadView:
        """The shard as of now: every row that was durable when this was called, and perhaps later ones.

        Args:
            at: the id or name of a checkpoint: the shard as of then.

        Raises:
            DataLossError: an entry of the log is missing or damaged.
            NotFoundError: there is no such checkpoint.
        """
        if at is not None:
            return self._view_at(at)
        with self._lock:
            while self._taken:
                self._returned.wait()
            self._taken = True
        rules = self._rules()
        try:
            manifest, fresh = self._read()
            _check_alive(manifest)
            runs, fresh = arranged(manifest, fresh, rules, self.cache)
        finally:
            with self._lock:
                self._taken = False
                self._returned.notify()
        return ReadView(self._log.shard, rules, runs, fresh, cache=self.cache, version=manifest.version)

    def _view_at(self, at: str) -> ReadView:
        """What a checkpoint pins: the runs of the version that added it, and the log up to where it was then."""
        log = self._log
        found = find_checkpoint(log.manifests.load(), at)
        if found is None:
            self._pinned.clear()
            raise NotFoundError(f"shard {log.shard} has no checkpoint {at!r}", hint="see table.checkpoints(); leases expire")
        id, record = found
        known = self._pinned.get(id)
        if known is None:
            try:
                known = self._keep(id, log.manifests.at(record.version), record.end)
            except ObjectMissingError as error:
                if find_checkpoint(log.manifests.load(), id) is not None:
                    raise DataLossError(f"{error.object} is missing, and checkpoint {at!r} holds it", object=error.object) from error
                raise SnapshotExpiredError(
                    f"checkpoint {at!r} expired while it was read", hint="take another one, with a longer lease"
                ) from error
        return replace(known, rules=self._rules())

    def view_of(self, version: int, end: int, id: str | None = None, *, held_by: str | None = None) -> ReadView:
        """The shard as of a version of its manifest, with the log up to ``end``.

        Args:
            held_by: the id of the checkpoint that holds it. Numbers of versions come again where a table is restored from a copy.
            id: the version's, where nothing holds it. What was collected may stand there again: a version
                made anew by a late request, a seal where an entry was. So the version must be the one of
                that id, and of a log that is read the floor must lie at or below its first entry still,
                by a manifest that is read afterwards.

        Raises:
            ObjectMissingError: some of it was collected.
        """
        name = f"{version}:{end}:{held_by or id}"
        known = self._pinned.get(name)
        if known is None:
            log = self._log
            manifest = log.manifests.at(version)
            if id not in (None, manifest.id):
                raise ObjectMissingError(f"version {version} of shard {log.shard} was collected", object=log.manifests.key(version))
            known = self._keep(name, manifest, end)
            if id is not None and manifest.cursor.position < end:
                latest, first = log.manifests.load(), manifest.cursor
                if latest.wal_floor > first.position or latest.wal.id != manifest.wal.id:
                    self._pinned.pop(name, None)
                    raise ObjectMissingError(f"position {first.position} was collected", object=log.space(manifest).key(*first))
        return replace(known, rules=self._rules())

    def _keep(self, name: str, manifest: ShardManifest, end: int) -> ReadView:
        rules, fresh = self._rules(), self._pinned_tail(manifest, end)
        before = next(reversed(list(self._pinned.values())), None)
        cache = RunCache(self.cache.columnar, None if before is None else before.cache)
        runs, fresh = arranged(manifest, fresh, rules, cache)
        known = ReadView(self._log.shard, rules, runs, fresh, cache=cache, version=manifest.version)
        while len(self._pinned) >= _PINNED_MAX:
            self._pinned.pop(next(iter(list(self._pinned)), ""), None)
        self._pinned[name] = known
        return known

    def _pinned_tail(self, manifest: ShardManifest, end: int) -> tuple[Fresh, ...]:
        """The entries up to ``end``. None of those that a checkpoint holds can be collected."""
        log, tail = self._log, _Tail(manifest.wal.id, manifest.cursor)
        reader = ChainReader(log.space(manifest), log.clock)
        try:
            while tail.end.position < end:
                entry = reader.read(tail.end)
                if entry is None:
                    raise ObjectMissingError(f"position {tail.end.position} is missing", object=log.space(manifest).key(*tail.end))
                tail.pass_over(entry)
        finally:
            reader.close()
        return tail.views(manifest)

    def _read(self) -> tuple[ShardManifest, tuple[Fresh, ...]]:
        log = self._log
        manifest = log.manifests.load()
        for _ in range(_RESTARTS_MAX):
            check_place(log, manifest)
            tail = self._tail
            if tail is None or not tail.fits(manifest):
                tail = _Tail(manifest.wal.id, manifest.cursor)
            self._tail = None  # only what a manifest has agreed with is kept
            tail.drop_before(manifest.cursor)
            agreed, manifest = self._extend(tail, manifest)
            if agreed:
                tail.drop_before(manifest.cursor)
                self._tail = tail
                if manifest.last_place() <= tail.end.position:
                    return manifest, tail.views(manifest)
                # A load was placed after what was written while we read: read on, so that what is older than it is there too.
        raise CommitConflictError(f"shard {log.shard} moves on faster than it can be read", hint="try again")

    def _extend(self, tail: _Tail, manifest: ShardManifest) -> tuple[bool, ShardManifest]:
        """Read on to the tip. True: with the manifest that agrees. False: the log moved on under us, begin again from there.

        A manifest agrees that a missing name was the tip if it was read afterwards and its cursor has not
        passed that name: then it cannot have been collected. That the cursor moved meanwhile is no harm,
        as long as it is still within what was read and the seals that were met are real.
        """
        log, space = self._log, self._log.space(manifest)
        reader = ChainReader(space, log.clock)
        try:
            while True:
                # What is written while we read need not be in the view: a fast writer must not keep us for ever.
                late = reader.listed_through is not None and tail.end > reader.listed_through
                entry = None if late else reader.read(tail.end)
                if entry is not None:
                    tail.pass_over(entry)
                    continue
                failpoint("view.tail")
                manifest = log.manifests.load()
                if not tail.fits(manifest) or manifest.contradicts(tail.seals):
                    return False, manifest
                loss = None if late else evidence_of_loss(space, manifest, tail.end)
                if loss is None:
                    return True, manifest
                entry = reader.fetch(tail.end)
                if entry is not None:
                    tail.pass_over(entry)
                    continue
                manifest = log.manifests.load()
                if not tail.fits(manifest):
                    return False, manifest
                raise loss
        finally:
            reader.close()
