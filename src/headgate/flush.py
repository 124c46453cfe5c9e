"""Flush: how the rows that a writer holds in memory become runs.

Owns: the MemTables of one writer (one active, the frozen ones behind it), when they freeze, and
their way into the manifest, in order. Does not own: what a run's rows are (keys), the log
(pipeline), what readers make of it all (view, query).

Only what is acknowledged is ever in a MemTable, so whatever is frozen may be flushed. Flushes
are committed one after another, oldest first. A flush that fails is tried again, and the next
one waits for it: t0 generation 1 fails · t1 generation 2 is committed, its cursor past both ·
t2 crash: nobody replays generation 1. So the cursor never passes a MemTable that is not there.

One commit adds the run and moves the cursor, so a reader finds each row in the log's tail or in
a run. Views take the MemTables first and the manifest after: a flush in between shows twice, and
the cursor tells which of the two is meant; the other way round it would show in neither.

A load that others have placed among the entries of a MemTable is newer than some of them and older
than the rest. So the MemTable is cut there, and becomes a run on each side. Who finds out does it:
a view, or the flush itself, when its commit meets the load: then it begins anew, with the older part.

A replay that outgrows the limits is flushed on the way, before the claim is verified. That is
safe for the same reason as everything else a writer commits: the commit fails if the epoch has
moved on. It must bring along the ends of the epochs that its cursor passes.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from contextlib import closing

import pyarrow as pa

from headgate.ahead import ahead
from headgate.clock import Thread
from headgate.columnar import Columnar
from headgate.compact import pick
from headgate.config import ShardWriterConfig
from headgate.errors import (
    ClosedError,
    CommitConflictError,
    DataLossError,
    FencedError,
    HeadgateError,
    StoreSyncError,
    WriterPoisonedError,
)
from headgate.failpoint import failpoint
from headgate.keys import newest_rows
from headgate.manifest.model import ProducerMark, RunRecord, ShardManifest
from headgate.memtable import Fresh, MemTable, MemTableStats, give_back
from headgate.meters import FLUSH_BYTES, FLUSH_FAILURES, FLUSH_ROWS, FLUSH_SECONDS, REPLAYED_ENTRIES, REPLAYED_ROWS
from headgate.run import run_batches, run_schema
from headgate.schema import RowRules, ids_in
from headgate.store import RetryPolicy
from headgate.view import cut_at
from headgate.wal.block import Entries
from headgate.wal.entry import Entry, Put
from headgate.wal.fence import Claim, Walk, check_epoch, over_seals
from headgate.wal.log import ShardLog
from headgate.wal.pipeline import Pipeline
from headgate.wal.producers import merge

logger = logging.getLogger("headgate")

_TRIES = RetryPolicy(retries=7, base_delay=0.1, max_delay=10.0)
_FINAL = (FencedError, ClosedError, StoreSyncError, DataLossError, WriterPoisonedError)


_GENERATION = re.compile(r"g\d{10}-")


class _LoadInside(Exception):
    """A load stands among the entries of the MemTable that was to be committed as one run."""

    def __init__(self, places: Sequence[int]) -> None:
        super().__init__()
        self.places = places


class Generations:
    """The MemTables of a writer. ``lock`` is its pipeline's too, so that a view is of one moment."""

    def __init__(self, log: ShardLog, columnar: Columnar, config: ShardWriterConfig, rules: Callable[[int], RowRules]) -> None:
        self._log, self._columnar, self._config, self._rules, self._clock = log, columnar, config, rules, log.clock
        self.lock = log.clock.lock()
        self._work = log.clock.condition(self.lock)
        self._flushed = log.clock.condition(self.lock)
        self._stopped = log.clock.condition(self.lock)
        self._tables: tuple[MemTable, ...] = ()
        """Oldest first, the active one last. Replaced as a whole: whatever interrupts a step, it was taken or it was not."""
        self._pipeline: Pipeline | None = None
        self._walk: Walk | None = None
        self._producers: Callable[[], dict[str, ProducerMark]] = dict
        self._thread: Thread | None = None
        self._is_running = False
        self._stopping = False
        self._epoch = 0
        self._generation = 1
        self._place = (log.manifests.place, log.shard)
        self._stalled = False
        self.on_stalled: Callable[[], object] | None = None
        """Called under the lock when a put waits for a compaction."""
        self._flushed_count = self._failures = self._copied_bytes = 0
        self._replayed_entries = self._replayed_rows = 0
        self._schema: pa.Schema | None = None
        self._highest_field = 0  # of all columns that replayed rows have
        self._on_taken: Callable[[MemTable], None] | None = None

    # -- replay

    def begin(self, claimed: ShardManifest, walk: Walk) -> None:
        """The shard is claimed; entries from its cursor on will be replayed."""
        self._epoch, self._walk, self._generation = claimed.epoch, walk, claimed.next_generation
        self._tables = (MemTable(claimed.cursor),)
        self.recount(claimed)

    def replay(self, entry: Entry | Entries) -> None:
        """Take an entry of the log back, or several. Outgrown MemTables are flushed at once, so any log opens in bounded memory."""
        count, rows = 1, sum(put.rows.num_rows for put in entry.puts)
        if isinstance(entry, Entries) and (count := len(entry)) > 1 and not self._fit(entry, rows):
            self.replay(entry.part(0, count // 2))  # a MemTable is full after one of them: their halves tell which
            self.replay(entry.part(count // 2, count))
            return
        if isinstance(entry, Entries) and count > 1:
            self.active.append_all(entry, self._clock.monotonic())
        else:
            self._take(entry.epoch, entry.position, list(entry.puts), entry.size_bytes)
        for put in entry.puts[:1] if isinstance(entry, Entries) else entry.puts:  # several entries have one schema
            if self._schema is None or not put.rows.schema.equals(self._schema, check_metadata=True):
                self._schema = put.rows.schema
                self._highest_field = max(self._highest_field, *ids_in(self._schema), 0)
        self._replayed_entries += count
        self._replayed_rows += rows
        while len(self._tables) > 1:
            if not self._flush_until_done(self._tables[0]):
                continue
            self._tables = self._tables[1:]
            self._flushed_count += 1
            failpoint("replay.flushed")

    def _fit(self, entries: Entries, rows: int) -> bool:
        """Is the active MemTable not full with all of them?"""
        active, config = self.active, self._config
        return (
            active.bytes + entries.size_bytes < config.max_memtable_size
            and active.rows + rows < config.max_memtable_rows
            and active.batches + len(entries.puts) < config.max_memtable_batches
        )

    def start(
        self,
        claim: Claim,
        pipeline: Pipeline,
        producers: Callable[[], dict[str, ProducerMark]],
        on_taken: Callable[[MemTable], None] | None = None,
    ) -> None:
        """The claim is verified: from now on entries come from the pipeline.

        ``on_taken`` is told, under the lock, when the active MemTable has grown: for those who keep indexes of it.
        """
        self._on_taken = on_taken
        with self.lock:
            self._walk, self._pipeline, self._producers = None, pipeline, producers
            if not self.active.entries:
                self._tables = (MemTable(claim.first),)
            elif on_taken is not None:
                on_taken(self.active)
            self._account()
        REPLAYED_ENTRIES.add(self._replayed_entries, *self._place)
        REPLAYED_ROWS.add(self._replayed_rows, *self._place)

    # -- taking entries

    def take(self, position: int, puts: list[Put], size_bytes: int) -> None:
        """Under the lock, in order: an entry was acknowledged. Told again, it changes nothing."""
        self._take(self._epoch, position, puts, size_bytes)
        self._account()

    def _take(self, epoch: int, position: int, puts: list[Put], size_bytes: int) -> None:
        config, active = self._config, self.active
        if active.entries and position >= active.end.position and active.bytes + size_bytes > config.max_memtable_size:
            self.freeze()
            active = self.active
        active.append(epoch, position, puts, size_bytes, self._clock.monotonic())
        if self._on_taken is not None:
            self._on_taken(active)
        if (
            active.bytes >= config.max_memtable_size
            or active.rows >= config.max_memtable_rows
            or active.batches >= config.max_memtable_batches
        ):
            self.freeze()

    def freeze(self) -> None:
        """Under the lock: what the active MemTable holds will be the next generation."""
        active = self.active
        if not active.entries:
            return
        self._tables = (*self._tables, MemTable(active.end))
        if self._pipeline is not None:
            self._account()
            self._call()

    def cut(self, places: Sequence[int]) -> None:
        """Loads stand at these places: no MemTable may have entries on both sides of one.

        One that is being flushed may be cut too: its commit fails, because the load is there by now.
        """
        with self.lock:
            before, self._tables = self._tables, cut_at(self._tables, places)
            if len(self._tables) == len(before) or self._pipeline is None:
                return
            if self._on_taken is not None and self.active is not before[-1]:
                self._on_taken(self.active)
            self._account()
            self._call()

    def _account(self) -> None:
        """Tell the pipeline what is held: puts wait when it is too much, or in too many MemTables."""
        if self._pipeline is not None:
            crowded = len(self._tables) - 1 > self._config.max_pending_generations
            # What is being flushed counts thrice: its rows, the sorted copy of them, and what the files' writer makes of that.
            held = sum([memtable.bytes for memtable in self._tables]) + self._copied_bytes
            self._pipeline.retain(held, crowded=crowded, stalled=self._stalled)

    @property
    def stalled(self) -> bool:
        """Do puts wait for a compaction?"""
        return self._stalled

    def recount(self, manifest: ShardManifest) -> None:
        """Too many generations that nobody compacts, although it would pay, make puts wait: reads would merge ever more (C05)."""
        pending = sum(_GENERATION.match(run.id) is not None for run in manifest.runs)
        too_many = pending > self._config.max_pending_generations
        # Loads past the cursor are no generations: a stream of them must not keep puts waiting.
        closed = [run for run in manifest.runs if run.end <= manifest.cursor.position]
        with self.lock:
            before, self._stalled = self._stalled, too_many and pick(closed, manifest.cursor.position, full=False) is not None
            if self._stalled and not before:
                logger.warning("shard %s: puts wait, %d generations are to be compacted", self._log.shard, pending)
            if self._stalled != before:
                self._account()

    def make_room(self) -> None:
        """Under the lock, for a put that finds none: if nothing is on its way out, see that something is (M02)."""
        if self._stalled:
            if self.on_stalled is not None:
                self.on_stalled()
        elif len(self._tables) == 1:
            self.freeze()
        else:
            self._call()

    def freeze_if_old(self) -> None:
        """Slow writers flush too, so that opening is quick (R14)."""
        with self.lock:
            born = self.active.born
            if born is not None and self._clock.monotonic() - born >= self._config.max_memtable_age:
                self.freeze()

    # -- flushing

    def flush(self) -> None:
        """Wait until all that is in MemTables now is in committed runs. Raises what went wrong."""
        with self.lock:
            self.freeze()
            wanted = self.active.first.position
            if len(self._tables) > 1:
                self._call()  # whoever froze them may have been interrupted before he did
            while self._tables[0].first.position < wanted:
                self._check()
                self._flushed.wait()

    def _check(self) -> None:
        assert self._pipeline is not None
        if self._pipeline.failure is not None:
            raise self._pipeline.failure
        if self._stopping:
            raise ClosedError(f"the writer of shard {self._log.shard} is closed", hint="open another writer")

    def _call(self) -> None:
        # An interrupt may come out of the spawn when the thread runs already: then another comes, and goes again.
        if not self._is_running:
            self._thread = self._clock.spawn(self._run, name=f"headgate-flush-{self._log.shard}")
        self._work.notify()

    def wake(self) -> None:
        """Under the lock: the writer failed, so nobody should wait for a flush."""
        for condition in (self._work, self._flushed, self._stopped):
            condition.notify_all()

    def _run(self) -> None:
        with self.lock:
            if self._is_running or self._stopping:
                return  # one at a time: two would drop a MemTable that only one of them has flushed
            self._is_running = True
        try:
            while self._flush_next():
                continue
        finally:
            with self.lock:
                self._is_running = False
                self._flushed.notify_all()

    def _flush_next(self) -> bool:
        """Wait for a frozen MemTable and flush it. False: no more. (A method of its own, so that nothing of it is held while it waits.)"""
        pipeline = self._pipeline
        assert pipeline is not None
        with self.lock:
            while len(self._tables) == 1 and not self._stopping and pipeline.failure is None:
                self._work.wait()
            if self._stopping or pipeline.failure is not None:
                return False
            memtable = self._tables[0]
            self._copied_bytes = 2 * memtable.bytes
            self._account()
        try:
            is_done = self._flush_until_done(memtable)
        except (FencedError, ClosedError, WriterPoisonedError) as error:
            pipeline.fail(error)
            return False
        except HeadgateError as error:
            pipeline.fail(self._poison(error))
            return False
        except BaseException as error:  # a thread's end: nobody may wait for a flush that will not come
            pipeline.fail(self._poison(error))
            raise
        if not is_done:
            return True
        with self.lock:
            assert self._tables[0] is memtable, "flushed in order, by one thread"
            self._tables, size_bytes = self._tables[1:], memtable.bytes
            self._flushed_count += 1
        del memtable
        give_back(size_bytes)  # before others take the room
        with self.lock:
            self._copied_bytes = 0
            self._account()
            self._flushed.notify_all()
        return True

    def _flush_until_done(self, memtable: MemTable) -> bool:
        """In place, with pauses, a bounded number of times; then it is the end of the writer. The log has the rows.

        False: it was cut, because a load stands in it; its parts take its place.
        """
        for attempt in range(_TRIES.retries + 1):
            try:
                self._flush_once(memtable)
                return True
            except _FINAL:
                raise
            except _LoadInside as met:
                self.cut(met.places)
                return False
            except Exception as error:  # a thread's end: told to the writer's callers, unless a later try succeeds
                self._failures += 1
                FLUSH_FAILURES.add(1, *self._place)
                told = error.message if isinstance(error, HeadgateError) else f"{type(error).__name__}: {error}"
                if attempt == _TRIES.retries:
                    raise self._poison(error) from error
                logger.warning("shard %s: flush of generation %d failed, trying again: %s", self._log.shard, self._generation, told)
            self._pause(_TRIES.delay(attempt, self._clock))
        raise AssertionError("the last try returns or raises")

    def _poison(self, error: BaseException) -> WriterPoisonedError:
        told = error.message if isinstance(error, HeadgateError) else f"{type(error).__name__}: {error}"
        return WriterPoisonedError(
            f"shard {self._log.shard}: generation {self._generation} could not be flushed: {told}",
            cause=error,
            hint="everything acknowledged is in the log: mend the store, then open the writer again",
        )

    def _pause(self, seconds: float) -> None:
        """Sleep, unless the writer is stopped; freezes do not cut it short."""
        if self._pipeline is None:
            self._clock.sleep(seconds)
            return
        with self.lock:
            if not self._stopping and self._pipeline.failure is None:
                self._stopped.wait(seconds)

    def _flush_once(self, memtable: MemTable) -> None:
        """Write a run under a fresh name, then commit it together with the cursor."""
        log, generation, started = self._log, self._generation, self._clock.monotonic()
        # Rows that were replayed may have columns that were added since we last looked at the table: they must be known first.
        rules = self._rules(self._highest_field)
        merged = newest_rows(memtable.puts, rules)
        failpoint("flush.merged")
        # A fresh name for every try: what a failed one left behind can never be taken for this one (C09).
        attempt = f"g{generation:010d}-{self._clock.token()}"
        path = f"shards/{log.shard}-{log.table_id}/runs/{attempt}/00000.lance"
        batches = run_batches(merged)
        if self._columnar.parallel_reads > 1 and not merged.is_sorted:  # the next rows are gathered while the last ones are written
            batches = ahead(self._clock, batches)
        with closing(batches):
            part = self._columnar.write(path, run_schema(merged), batches)
        assert part.rows == merged.num_rows, "every row is in the file"
        # Durable by now, folders too: the manifest that names it lets collection take the entries it replaces (R17).
        failpoint("flush.written")
        record = RunRecord(
            id=attempt,
            first=memtable.first.position,
            end=memtable.end.position,
            slices=(part,),
            fields=tuple(zip(rules.field_ids, rules.schema.names, strict=True)),
            tombstones=merged.tombstones,
            created_at=self._clock.now(),
        )
        if self._walk is not None:
            # The cursor will pass seals that others put: they must be as durable as this commit is (R17).
            space = log.space(log.manifests.load())
            for epoch in sorted(self._walk.epochs):
                space.store.settle(space.epoch_folder(epoch))
        with self.lock:
            if self._pipeline is not None:
                self._check()
            producers = dict(self._producers())
        committed = log.manifests.commit(lambda manifest: self._with_run(manifest, memtable, record, generation, producers))
        failpoint("flush.committed")
        self.recount(committed)
        self._generation = generation + 1
        FLUSH_SECONDS.observe(self._clock.monotonic() - started, *self._place)
        FLUSH_ROWS.add(part.rows, *self._place)
        FLUSH_BYTES.add(part.bytes, *self._place)

    def _with_run(
        self, manifest: ShardManifest, memtable: MemTable, record: RunRecord, generation: int, producers: dict[str, ProducerMark]
    ) -> ShardManifest | None:
        check_epoch(self._log, manifest, self._epoch)
        if manifest.next_generation > generation:
            return None  # only we count generations up: a try before this one, whose outcome was not known, was committed
        if manifest.cursor.position >= memtable.end.position:
            raise DataLossError(
                f"shard {self._log.shard}: the cursor is at {manifest.cursor.position}, past rows that were not flushed",
                object=f"shard {self._log.shard}",
            )
        if manifest.cursor.position < memtable.first.position:
            raise DataLossError(
                f"shard {self._log.shard}: the cursor is at {manifest.cursor.position}, and what lies between it and "
                f"{memtable.first.position} was not flushed",
                object=f"shard {self._log.shard}",
            )
        # Everything has its place in one order: after the loads before its first entry, before those past its last.
        first, end = memtable.places()
        places = [run.end for run in manifest.runs if run.first == run.end]
        if any(first < place < end for place in places):
            raise _LoadInside(places)
        record = record.but(first=max([record.first, *(run.end for run in manifest.runs if run.end <= first)]))
        older = sum(run.end <= record.first for run in manifest.runs)
        segments, walk = manifest.ends(), self._walk
        merged = dict(manifest.producers)
        if walk is not None:
            if manifest.contradicts(walk.ends):
                raise CommitConflictError(f"shard {self._log.shard} was trimmed while its rows were replayed", hint="open it again")
            segments = segments.adding({epoch: end for epoch, end in walk.ends.items() if end < memtable.end.position})
            # A successor starts at the cursor: what it will not read again must be in the manifest (A13).
            merge(merged, walk.producers.items())
        merge(merged, producers.items())
        return manifest.but(
            runs=(*manifest.runs[:older], record, *manifest.runs[older:]),
            segments=segments.rows,
            cursor=over_seals(memtable.end, segments),
            next_generation=max(manifest.next_generation, generation + 1),
            wal_position_last_seen=max(manifest.wal_position_last_seen, memtable.end.position - 1),
            producers=merged,
            resume=None,
            wal=manifest.wal.but(clean_at=None),
        )

    # -- looking

    def views(self) -> tuple[Fresh, ...]:
        """Under the lock: all MemTables as of now, oldest first."""
        return tuple(memtable.view() for memtable in self._tables)

    @property
    def active(self) -> MemTable:
        return self._tables[-1]

    def stats(self) -> MemTableStats:
        with self.lock:
            *frozen, active = self._tables
            return MemTableStats(
                active_rows=active.rows,
                active_batches=active.batches,
                active_bytes=active.bytes,
                frozen=len(frozen),
                frozen_rows=sum(memtable.rows for memtable in frozen),
                frozen_bytes=sum(memtable.bytes for memtable in frozen),
                generation=self._generation + len(frozen),
                flushed=self._flushed_count,
                flush_failures=self._failures,
                replayed_entries=self._replayed_entries,
                replayed_rows=self._replayed_rows,
            )

    def thread_alive(self) -> bool:
        return self._is_running or (self._thread is not None and self._thread.is_alive())

    # -- ends

    def stop(self, seconds: float | None) -> None:
        """End the thread; a flush that is under way is not committed, unless it was already."""
        deadline = None if seconds is None else self._clock.monotonic() + seconds
        with self.lock:
            self._stopping = True
            self.wake()
            while self._is_running:
                left = None if deadline is None else deadline - self._clock.monotonic()
                if left is not None and left <= 0:
                    return
                self._flushed.wait(left)
        if self._thread is not None:
            self._thread.join(seconds)
