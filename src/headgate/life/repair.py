"""Repair: making a damaged shard whole again, and saying what that gives up.

Owns: what is done about each kind of damage, in which order, and what is lost by it. Does not own:
finding the damage (damage), the claim (fence).

| damage | what is done | given up |
| --- | --- | --- |
| latest manifest unreadable | the newest readable version goes on, as a version after it | what the unreadable ones changed |
| marker of the log missing or damaged | put back, with the seals | nothing |
| seal missing or damaged | put back from the manifest | nothing; a foreign entry in its place is kept aside |
| entry missing or damaged, needed by nobody | the floor is raised past it | nothing |
| entry missing or damaged, else | an empty entry takes its place | its rows, if they are in no run; its changes |
| files of a generation, all its entries still in the log | written again from the log | nothing |
| files of any other run | the run goes on without them | their rows; what they hid in older runs shows again |
| a checkpoint of something that is gone | dropped, unless a clone needs it | the checkpoint |
| leases of attempts that are over | ended | nothing |

An empty entry, and not a shorter log: positions are never used twice, so consumers and segments stay right, and
a writer that stalled before the damage still meets its seal.

Nothing that is damaged is lost from sight: its bytes are copied to ``repair/<id>/…`` below the table before the
name is used again. Only the names of broken entries, seals and markers are ever deleted.

It is safe beside anything, and may be interrupted anywhere and begun again:
  a live writer: it is fenced by the claim, which comes first; what it still acknowledges lies on the chain, before
    the seal, and is counted by the look at the damage after the claim.
  another repair: its claim ends ours: each step asks first whether the epoch is still ours.
  compaction: a run that it has merged meanwhile is not named any more, and the commit that would mend it does nothing.
  collection: what it takes is below the floor, where nothing is looked at.
  a fenced writer, between the deletion of a damaged seal and its return: its entry is found in the seal's place,
    kept aside and named in the report.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from headgate.clock import Clock
from headgate.columnar import Columnar
from headgate.errors import CommitConflictError, DataLossError, NotFoundError, WalStoreMismatchError
from headgate.failpoint import failpoint
from headgate.keys import newest_rows
from headgate.life.damage import BrokenEntry, BrokenSlice, Damage, find_damage, newest_readable
from headgate.life.gc import LEASE_GRACE_SECONDS
from headgate.life.mend import Aside, Mender, Progress, puts_of
from headgate.life.verify import Problem, VerifyReport, verify_shard
from headgate.manifest import ManifestChain, ShardManifest, TableManifest
from headgate.schema import RowRules
from headgate.store import Store
from headgate.wal.fence import check_open, open_epoch
from headgate.wal.log import ShardLog
from headgate.wal.tip import locate

_LOOKS_MAX = 8
_FILLED_MAX = 1_000_000
_REBUILT_ROWS_MAX = 20_000_000
_GENERATION = re.compile(r"g\d{10}-")


@dataclass(frozen=True, slots=True)
class RepairStep:
    """One thing that is wrong, and what is done about it."""

    shard: str
    kind: str
    """manifest, marker, seal, entry, slice, checkpoint or attempt."""
    object: str
    problem: str
    action: str
    gives_up: str = ""
    """What is lost by it, for good. Empty: nothing."""
    first_position: int | None = None
    end_position: int | None = None
    """Past the last position concerned."""
    rows: int | None = None
    """How many rows are given up. None: none, or it cannot be known."""
    keys: tuple[str, str] | None = None
    """Between which keys they are, as far as can be told."""


@dataclass(frozen=True, slots=True)
class RepairReport:
    """What was mended, or would be."""

    dry_run: bool
    ok: bool
    """Nothing is wrong: from the start, or after the repair."""
    steps: tuple[RepairStep, ...] = ()
    left: tuple[Problem, ...] = ()
    """What it can do nothing about."""
    kept: tuple[str, ...] = ()
    """Copies of what was damaged, below the table."""

    @property
    def gives_up(self) -> tuple[str, ...]:
        """All that is lost by it, for good."""
        return tuple(f"shard {step.shard}: {step.gives_up}" for step in self.steps if step.gives_up)

    @classmethod
    def of(cls, parts: Sequence[RepairReport], *, dry_run: bool) -> RepairReport:
        return cls(
            dry_run,
            all(part.ok for part in parts),
            tuple(step for part in parts for step in part.steps),
            tuple(problem for part in parts for problem in part.left),
            tuple(key for part in parts for key in part.kept),
        )


def repair_shard(
    log: ShardLog, store: Store, columnar: Columnar, rules: RowRules, *, dry_run: bool, progress: Progress | None = None
) -> RepairReport:
    """Find what is broken in a shard, and with ``dry_run=False`` mend it. A shard that is whole is not touched.

    Args:
        store: the table's.

    Raises:
        WalStoreMismatchError: this is not the log's store.
        FencedError: another writer, or another repair, has claimed the shard meanwhile.
        DataLossError: no version of the manifest can be read.
    """
    tell = progress or (lambda shard, what: None)
    # 1. Look. Nothing is written yet, and nothing is if nothing is wrong.
    tell(log.shard, "looking")
    manifest, broken = _readable(log)
    damage = _settled_damage(log, manifest if broken else None, store, columnar, rules)
    plan = _Plan(log, damage, rules)
    steps = [*_manifest_steps(log, manifest, broken), *plan.steps()]
    failpoint("repair.looked")
    if dry_run or not steps:
        return RepairReport(dry_run, not steps and not plan.left, tuple(steps), tuple(plan.left))

    mender = Mender(log, store, columnar, rules, tell)
    # 2. Claim. The writer of now is fenced; an unreadable manifest is followed by a readable one in the same step.
    mender.claim(manifest, broken)
    failpoint("repair.claimed")
    # 3. Look again: what the fenced writer did until now, others since, and what it comes to with the manifest of now.
    damage = _settled_damage(log, None, store, columnar, rules)
    plan = _Plan(log, damage, rules)
    steps = [*_manifest_steps(log, manifest, broken), *plan.steps()]
    # 4. Mend: the log first, because runs may be written again from it.
    mender.mend(damage, plan)
    failpoint("repair.mended")
    # 5. Take the log over: seals, and the commit that verifies the claim. From here on any writer can open it.
    tell(log.shard, "taking over")
    open_epoch(log, writer_id=mender.writer_id)
    failpoint("repair.opened")
    # 6. See for ourselves.
    tell(log.shard, "verifying")
    verified: VerifyReport = verify_shard(log, deep=True, columnar=columnar, rules=rules)
    left = (*plan.left, *(problem for problem in verified.problems if problem not in plan.left))
    return RepairReport(False, not left, tuple(steps), left, tuple(mender.kept))


def _readable(log: ShardLog) -> tuple[ShardManifest, list[int]]:
    manifest, broken = newest_readable(log.manifests)
    if manifest is None:
        name = log.manifests.key(broken[0]) if broken else log.manifests.folder
        raise DataLossError(f"no version of the manifest of shard {log.shard} can be read", object=name)
    check_open(log, manifest)
    return manifest, broken


def _settled_damage(log: ShardLog, fixed: ShardManifest | None, store: Store, columnar: Columnar, rules: RowRules) -> Damage:
    """Damage against a manifest that was still the latest afterwards: what was merged or collected meanwhile is none."""
    for _ in range(_LOOKS_MAX):
        before = fixed or log.manifests.load()
        damage = find_damage(log, before, store, columnar, rules)
        if fixed is not None or damage.is_none or log.manifests.load().version == before.version:
            return damage
        now = log.manifests.load()
        named = [part.path for run in now.runs for part in run.slices]
        if now.cursor == before.cursor and now.wal_floor == before.wal_floor and {s.part.path for s in damage.slices} <= {*named}:
            return damage
    raise CommitConflictError(f"shard {log.shard} changes faster than it can be looked at", hint="stop its writers, then try again")


def _manifest_steps(log: ShardLog, good: ShardManifest, broken: Sequence[int]) -> Iterator[RepairStep]:
    for version in broken:
        yield RepairStep(
            log.shard,
            "manifest",
            log.manifests.key(version),
            f"version {version} of the manifest cannot be read",
            f"version {good.version}, the newest that can be, goes on as version {broken[0] + 1}, with a later epoch",
            f"what version {version} changed, if the log does not show it: a checkpoint, a consumer's offset, a compaction or a load",
        )


def without_lease(manifest: ShardManifest, now: float) -> list[str]:
    """Attempts whose lease is over: whoever began them is gone."""
    return [id for id, attempt in manifest.attempts.items() if attempt.expires_at + LEASE_GRACE_SECONDS < now]


class _Plan:
    """What is done about the damage of one shard, and in words."""

    def __init__(self, log: ShardLog, damage: Damage, rules: RowRules) -> None:
        self.log, self.damage, self._rules = log, damage, rules
        manifest = damage.manifest
        self.left: list[Problem] = []
        self.hold = manifest.hold_position()
        needed = [entry for entry in damage.entries if entry.wanted == "seal" or entry.point.position >= self.hold]
        self.seals = [entry for entry in needed if entry.wanted == "seal"]
        self.fillers = [entry for entry in needed if entry.wanted == "data"]
        below = [e.point.position + 1 for e in damage.entries if e.wanted == "data" and e.point.position < self.hold]
        self.floor = max(below, default=None)
        self.floor_first = min(below, default=1) - 1
        if damage.is_log_gone and damage.marker != "fine" and log.wal_uri != manifest.wal.uri:
            raise WalStoreMismatchError(
                f"shard {log.shard}: {log.wal_store.uri} holds nothing of its log, which was written to "
                f"{manifest.wal.uri or 'the table itself'}",
                hint="pass the wal_uri that the table was written with; repair gives up a log only in its own place",
            )
        if len(self.fillers) > _FILLED_MAX:
            raise DataLossError(
                f"shard {log.shard} misses {len(self.fillers):,} entries of its log", object=log.space(manifest).key(*self.fillers[0].point)
            )
        lost = {entry.point.position for entry in self.fillers}
        self.rebuilt = [broken for broken in damage.slices if self._can_rebuild(broken, lost)]
        self.dropped = [broken for broken in damage.slices if broken not in self.rebuilt]
        self.checkpoints = [broken for broken in damage.checkpoints if broken.record.clone is None]
        for pinned in damage.checkpoints:
            if pinned.record.clone is not None:
                message = f"the clone at {pinned.record.clone} needs what is gone: {pinned.why}"
                self.left.append(Problem(log.shard, "ClonePinBroken", pinned.id, message))
        self.attempts = without_lease(manifest, log.clock.now()) if not damage.is_none else []

    def _can_rebuild(self, broken: BrokenSlice, lost: set[int]) -> bool:
        """Is every entry that a flush made this run of still in the log?"""
        run, manifest = broken.run, self.damage.manifest
        if not _GENERATION.match(run.id) or run.first < manifest.wal_floor or run.rows > _REBUILT_ROWS_MAX or run.first == run.end:
            return False
        if (self.floor is not None and self.floor > run.first) or any(run.first <= position < run.end for position in lost):
            return False
        try:
            return newest_rows(puts_of(self.log, manifest, run), self._rules).num_rows == run.rows
        except DataLossError:
            return False

    def steps(self) -> Iterator[RepairStep]:
        shard, manifest, space = self.log.shard, self.damage.manifest, self.log.space(self.damage.manifest)
        if self.damage.marker != "fine":
            problem = f"the marker of the log is {self.damage.marker}" + (", and so is the whole log" if self.damage.is_log_gone else "")
            yield RepairStep(shard, "marker", space.marker_key, problem, "it is put back, after the seals")
        for entry in self.seals:
            foreign = entry.found == "data"
            yield RepairStep(
                shard,
                "seal",
                space.key(*entry.point),
                f"the seal that ended epoch {entry.point.epoch} is {'not there, and an entry is' if foreign else _told(entry)}; "
                "a life-cycle rule that expires objects does that, and a writer stalled since then could write again",
                "it is put back" + (", and what stands there is kept aside" if foreign else ""),
                "the rows of an entry that a fenced writer put where its seal had been; put them again from the copy" if foreign else "",
                entry.point.position,
                entry.point.position + 1,
                entry.rows if foreign else None,
            )
        if self.floor is not None:
            yield RepairStep(
                shard,
                "entry",
                space.key(*locate(manifest, self.floor_first)),
                "entries of the log that no consumer and no checkpoint needs are missing or damaged",
                f"the log begins at position {self.floor} from now on; the rows before it are in runs",
                "",
                self.floor_first,
                self.floor,
            )
        for first, last in _stretches(self.fillers):
            yield self._entry_step(first, last, [e for e in self.fillers if first.point <= e.point <= last.point])
        for broken in self.damage.slices:
            yield self._slice_step(broken)
        for pinned in self.checkpoints:
            name = f"checkpoint {pinned.record.name or pinned.id}"
            yield RepairStep(
                shard, "checkpoint", pinned.id, f"{name} is broken: {pinned.why}", "it is dropped", f"{name}: it cannot be read"
            )
        for id in self.attempts:
            yield RepairStep(shard, "attempt", id, f"the lease of attempt {id} is over", "it is ended; collection takes what it wrote")

    def _entry_step(self, first: BrokenEntry, last: BrokenEntry, entries: Sequence[BrokenEntry]) -> RepairStep:
        manifest, space = self.damage.manifest, self.log.space(self.damage.manifest)
        start, end, cursor = first.point.position, last.point.position + 1, manifest.cursor.position
        where = f"position {start}" if end == start + 1 else f"positions {start} to {end - 1}"
        rows = None if any(entry.rows is None for entry in entries) else sum(entry.rows or 0 for entry in entries)
        if start >= cursor:
            told = f"all rows of {where} of the log, which are in no run" + (f": {rows:,} rows" if rows is not None else "")
        elif end <= cursor:
            holders = [f"consumer {name!r}" for name, hold in manifest.consumers.items() if hold.position < end]
            holders += [f"checkpoint {hold.name or id}" for id, hold in manifest.checkpoints.items() if hold.position < end]
            told = f"{where} of the changes, for {', '.join(holders)}; the rows are in runs"
            rows = None
        else:
            told = f"all rows of positions {cursor} to {end - 1} of the log, which are in no run, and the changes from {start} on"
        return RepairStep(
            self.log.shard,
            "entry",
            space.key(*first.point),
            f"{where} of the log {'is' if end == start + 1 else 'are'} {_told(first)}",
            "an empty entry takes the place"
            + (" of each" if end > start + 1 else "")
            + ("; what stands there is kept aside" if first.found != "nothing" else ""),
            told,
            start,
            end,
            rows,
        )

    def _slice_step(self, broken: BrokenSlice) -> RepairStep:
        run, part = broken.run, broken.part
        what = f"{part.path} {broken.why}"
        if broken in self.rebuilt:
            return RepairStep(
                self.log.shard,
                "slice",
                part.path,
                what,
                f"it is written again from positions {run.first} to {run.end - 1} of the log",
                first_position=run.first,
                end_position=run.end,
            )
        whence = f"positions {run.first} to {run.end - 1}" if run.first < run.end else f"a load placed at position {run.end}"
        where = f" with keys from {broken.keys[0]} to {broken.keys[1]}" if broken.keys else ""
        return RepairStep(
            self.log.shard,
            "slice",
            part.path,
            what,
            f"run {run.id} goes on without it",
            f"{part.rows:,} rows{where}, of {whence}; older versions of their keys, and keys that they "
            "deleted, show again if an older run has them",
            run.first,
            run.end,
            part.rows,
            broken.keys,
        )


def _told(entry: BrokenEntry) -> str:
    if entry.found == "seal":
        return "taken by a seal that does not end the epoch"
    return "missing" if entry.found == "nothing" else "damaged"


def _stretches(entries: Sequence[BrokenEntry]) -> Iterator[tuple[BrokenEntry, BrokenEntry]]:
    """The first and the last of those that follow each other and are broken alike."""
    start = 0
    for at in range(1, len(entries) + 1):
        previous = entries[at - 1]
        if at < len(entries) and entries[at].point == previous.point.past_data() and entries[at].found == previous.found:
            continue
        yield entries[start], previous
        start = at


def shown(report: RepairReport, uri: str) -> RepairReport:
    """The same, with the copies' places as a user finds them."""
    return replace(report, kept=tuple(f"{uri}/{key}" for key in report.kept))


def repair_table_manifest(store: Store, chain: ManifestChain[TableManifest], clock: Clock, *, dry_run: bool) -> RepairReport:
    """The table's own manifest: if its latest version cannot be read, the newest that can be goes on after it.

    Raises:
        DataLossError: no version can be read.
    """
    good, broken = newest_readable(chain)
    if good is None:
        if not broken:
            raise NotFoundError(f"there is no table at {store.uri}", hint="check the URI and the storage options")
        raise DataLossError(f"no version of the table's manifest in {store.uri} can be read", object=chain.key(broken[0]))
    if not broken:
        return RepairReport(dry_run, ok=True)
    ending = f"-{good.table_id}"
    folders = {info.key.split("/")[1] for info in store.list("shards/")}
    unnamed = sorted(
        name.removesuffix(ending) for name in folders if name.endswith(ending) and name.removesuffix(ending) not in good.shards
    )
    added = f", and the shards {', '.join(unnamed)}, which no readable version names" if unnamed else ""
    steps = tuple(
        RepairStep(
            "",
            "manifest",
            chain.key(version),
            f"version {version} of the table's manifest cannot be read",
            f"version {good.version}, the newest that can be, goes on as version {broken[0] + 1}",
            f"what version {version} changed: columns, or shards{added}",
        )
        for version in broken
    )
    if dry_run:
        return RepairReport(dry_run=True, ok=False, steps=steps)
    aside = Aside(store, clock)
    for version in broken:
        aside.keep(store, chain.key(version))
    chain.restore(good, broken[0])
    return RepairReport(dry_run=False, ok=True, steps=steps, kept=tuple(aside.kept))
