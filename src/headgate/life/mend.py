"""Mending a damaged shard, step by step, under a claim.

Owns: the writes of a repair. Does not own: what is to be done (repair), the look at the damage (damage).

Before a name is used again, what stood there is copied to ``repair/<id>/…`` below the table. Each step can be done
again, and before each that deletes something the epoch is looked at: of two repairs only the last to claim goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import pyarrow as pa

from headgate.clock import Clock
from headgate.columnar import Columnar
from headgate.errors import CommitConflictError, DataLossError, ObjectMissingError
from headgate.failpoint import failpoint
from headgate.keys import newest_rows
from headgate.life.damage import REPAIR, BrokenCheckpoint, BrokenEntry, BrokenSlice, Damage
from headgate.manifest import ChainPoint, ShardManifest
from headgate.manifest.model import Owner, RunRecord, SliceRecord
from headgate.run import DELETED, OpenRun, run_batches, run_schema
from headgate.schema import RowRules
from headgate.store import RetryPolicy, Store, create_exactly
from headgate.wal.entry import Header, Put, decode_entry, encode_entry
from headgate.wal.fence import check_epoch, check_open
from headgate.wal.log import ShardLog
from headgate.wal.marker import put_back, put_seal
from headgate.wal.reader import ChainReader
from headgate.wal.tip import locate

FOLDER = "repair/"
_TRIES_MAX = 8
_CHECKED_EVERY = 64

Progress = Callable[[str, str], None]
"""Called with the shard, and what is being done."""


class ToDo(Protocol):
    """What is to be done about the damage."""

    seals: list[BrokenEntry]
    floor: int | None
    fillers: list[BrokenEntry]
    rebuilt: list[BrokenSlice]
    dropped: list[BrokenSlice]
    checkpoints: list[BrokenCheckpoint]
    attempts: list[str]


class Aside:
    """Where copies of what is damaged are kept."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store, self._clock, self.id = store, clock, clock.token()
        self.kept: list[str] = []

    def keep(self, store: Store, key: str) -> bool:
        """Copy an object aside, as it is. False: there is nothing to copy."""
        try:
            data = store.get(key)
        except ObjectMissingError:
            return False
        copy = f"{FOLDER}{self.id}/{key}"
        create_exactly(self._store, copy, data, self._clock, RetryPolicy())
        if copy not in self.kept:
            self.kept.append(copy)
        failpoint("repair.kept")
        return True


class Mender:
    """Does it, under a claim."""

    def __init__(self, log: ShardLog, store: Store, columnar: Columnar, rules: RowRules, tell: Progress) -> None:
        self._log, self._store, self._columnar, self._rules, self._tell = log, store, columnar, rules, tell
        self._aside = Aside(store, log.clock)
        self.writer_id = f"{REPAIR}-{self._aside.id}"
        self._epoch = 0

    @property
    def kept(self) -> list[str]:
        return self._aside.kept

    def claim(self, good: ShardManifest, broken: Sequence[int]) -> None:
        """One epoch more, ours. Later than any that an unreadable version may have claimed."""
        log = self._log
        owner = Owner(writer=self.writer_id, claimed_at=log.clock.now())
        if broken:
            for version in broken:
                self._aside.keep(self._store, log.manifests.key(version))
            restored = good.but(epoch=good.epoch + broken[0] - good.version + 1, owner=owner, wal=good.wal.but(clean_at=None))
            log.manifests.restore(restored, broken[0])
            failpoint("repair.restored")

        def change(manifest: ShardManifest) -> ShardManifest | None:
            check_open(log, manifest)
            if manifest.owner is not None and manifest.owner.writer == self.writer_id:
                return None
            return manifest.but(epoch=manifest.epoch + 1, owner=owner)

        self._epoch = log.manifests.commit(change).epoch

    def _check(self) -> ShardManifest:
        manifest = self._log.manifests.load()
        check_epoch(self._log, manifest, self._epoch)
        return manifest

    def mend(self, damage: Damage, plan: ToDo) -> None:
        log, manifest = self._log, damage.manifest
        space = log.space(manifest)
        # a. Seals, then the marker: a stalled writer must meet its seal before the store counts as ours again.
        for entry in plan.seals:
            self._tell(log.shard, f"seal of epoch {entry.point.epoch}")
            self._check()
            if entry.found != "nothing":
                self._keep_and_delete(log.wal_store, space.key(*entry.point))
            self._seal(manifest, entry.point)
        if damage.marker != "fine":
            self._check()
            if damage.marker == "damaged":
                self._keep_and_delete(log.wal_store, space.marker_key)
            put_back(log, manifest)
        failpoint("repair.sealed")
        # b. Entries: from the oldest on, so that each may vouch for those before it.
        if plan.floor is not None:
            floor = plan.floor
            log.manifests.commit(lambda m: self._with_floor(m, floor))
        for number, entry in enumerate(plan.fillers):
            self._tell(log.shard, f"entry {number + 1:,} of {len(plan.fillers):,}")
            if number % _CHECKED_EVERY == 0 or entry.found != "nothing":
                self._check()
            if entry.found != "nothing":
                self._keep_and_delete(log.wal_store, space.key(*entry.point))
            self._fill(manifest, entry.point)
        failpoint("repair.filled")
        # c. Runs.
        for run in _each_run(plan.rebuilt):
            self._tell(log.shard, f"run {run.id} from the log")
            self._rebuild(run, [broken.part for broken in plan.rebuilt if broken.run.id == run.id])
        for run in _each_run(plan.dropped):
            parts = [broken.part for broken in plan.dropped if broken.run.id == run.id]
            for part in parts:
                self._keep_files(part)
            self._drop(run, parts)
        failpoint("repair.runs")
        # d. What hangs on what is gone.
        gone = {pinned.id for pinned in plan.checkpoints}
        ended = set(plan.attempts)

        def change(manifest: ShardManifest) -> ShardManifest | None:
            check_epoch(log, manifest, self._epoch)
            changed = manifest.but(
                checkpoints={id: record for id, record in manifest.checkpoints.items() if id not in gone},
                attempts={id: record for id, record in manifest.attempts.items() if id not in ended},
            )
            return changed if changed != manifest else None

        log.manifests.commit(change)

    # -- the log

    def _seal(self, manifest: ShardManifest, point: ChainPoint) -> None:
        space = self._log.space(manifest)
        for _ in range(_TRIES_MAX):
            occupant = put_seal(self._log, space, point, by_epoch=self._epoch, durable_through=point.position - 1, writer_id=self.writer_id)
            if occupant is None or decode_entry(occupant, space.key(*point), space.wal_id, space.shard, *point).is_seal:
                return
            self._keep_and_delete(self._log.wal_store, space.key(*point))  # a fenced writer was faster: its entry counts for nothing
        raise CommitConflictError(
            f"{space.key(*point)} is written again and again", hint="stop the writer that is fenced, then repair again"
        )

    def _fill(self, manifest: ShardManifest, point: ChainPoint) -> None:
        """An entry without rows. If the real one turns up meanwhile, it stays."""
        log, space, schema = self._log, self._log.space(manifest), self._rules.log_schema
        header = Header(
            wal_id=space.wal_id,
            shard=space.shard,
            epoch=point.epoch,
            position=point.position,
            kind="data",
            entry_id=log.clock.token(),
            writer_id=self.writer_id,
            durable_through=point.position - 1,
            time=log.clock.now(),
        )
        empty = pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)
        create_exactly(space.store, space.key(*point), encode_entry(header, schema, [Put(empty)]), log.clock, log.policy)

    def _with_floor(self, manifest: ShardManifest, floor: int) -> ShardManifest | None:
        check_epoch(self._log, manifest, self._epoch)
        wanted = min(floor, manifest.hold_position())
        return manifest.but(wal_floor=wanted) if wanted > manifest.wal_floor else None

    # -- runs

    def _rebuild(self, run: RunRecord, parts: Sequence[SliceRecord]) -> None:
        """Write a generation again, from the entries that it was made of."""
        log, manifest = self._log, self._check()
        merged = newest_rows(puts_of(log, manifest, run), self._rules)
        if merged.num_rows != run.rows:
            raise DataLossError(
                f"run {run.id} had {run.rows:,} rows, and the log from {run.first} to {run.end - 1} comes to {merged.num_rows:,}",
                object=parts[0].path,
            )
        for part in parts:
            self._keep_files(part)
        # Under the number of the next flush, which nobody else can use: the epoch is ours. Its commit takes that number.
        attempt = f"g{manifest.next_generation:010d}-{log.clock.token()}"
        path = f"shards/{log.shard}-{log.table_id}/runs/{attempt}/00000.lance"
        written = self._columnar.write(path, run_schema(merged), run_batches(merged))
        failpoint("repair.rebuilt")
        fields = tuple(zip(self._rules.field_ids, self._rules.schema.names, strict=True))
        made = run.but(id=attempt, slices=(written,), fields=fields, tombstones=merged.tombstones)

        def change(manifest: ShardManifest) -> ShardManifest | None:
            check_epoch(log, manifest, self._epoch)
            if not any(known.id == run.id for known in manifest.runs):
                return None  # merged by a compaction that could read it, or mended already
            runs = tuple(made if known.id == run.id else known for known in manifest.runs)
            return manifest.but(runs=runs, next_generation=manifest.next_generation + 1)

        log.manifests.commit(change)

    def _drop(self, run: RunRecord, parts: Sequence[SliceRecord]) -> None:
        """The run, and the load that it came by, without what is gone."""
        gone = {part.path for part in parts}
        left = tuple(part for part in run.slices if part.path not in gone)
        tombstones = 0
        if run.tombstones and left:
            for batch in OpenRun(run.but(slices=left), self._columnar).scan([DELETED]):
                tombstones += batch.column(0).true_count
        # Another id, since it is another run: whoever knows runs by their ids must not take it for the one of before.
        shorter = run.but(id=f"{run.id}-{self._log.clock.token()}", slices=left, tombstones=tombstones)

        def mended(runs: Iterable[RunRecord]) -> tuple[RunRecord, ...]:
            return tuple(shorter if known.id == run.id else known for known in runs if known.id != run.id or left)

        def change(manifest: ShardManifest) -> ShardManifest | None:
            check_epoch(self._log, manifest, self._epoch)
            changed = manifest.but(
                runs=mended(manifest.runs),
                loads=tuple(load.but(runs=mended(load.runs)) for load in manifest.loads),
                announced={id: load.but(runs=mended(load.runs)) for id, load in manifest.announced.items()},
            )
            return changed if changed != manifest else None

        self._log.manifests.commit(change)

    # -- evidence

    def _keep_and_delete(self, store: Store, key: str) -> None:
        """Dying after the deletion leaves the name empty, which the next repair finds."""
        if self._aside.keep(store, key):
            store.delete([key])
            failpoint("repair.deleted")

    def _keep_files(self, part: SliceRecord) -> None:
        """The files themselves stay where they are until collection, which takes what nothing names; a parent's are its own."""
        for info in self._store.list(f"{part.path}/") if part.uri is None else ():
            self._aside.keep(self._store, info.key)


def _each_run(broken: Sequence[BrokenSlice]) -> list[RunRecord]:
    return list({one.run.id: one.run for one in broken}.values())


def puts_of(log: ShardLog, manifest: ShardManifest, run: RunRecord) -> list[Put]:
    """All that was put in the positions of a run."""
    found: list[Put] = []
    point = locate(manifest, run.first)
    reader = ChainReader(log.space(manifest), log.clock, eager=True)
    try:
        while point.position < run.end:
            entry = reader.read(point)
            if entry is None:
                name = log.space(manifest).key(*point)
                raise DataLossError(f"{name} is missing", object=name)
            if not entry.is_seal and point.position >= run.first:
                found.extend(entry.puts)
            point = point.past_seal() if entry.is_seal else point.past_data()
    finally:
        reader.close()
    return found
