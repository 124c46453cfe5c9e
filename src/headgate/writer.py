"""ShardWriter: the one live writer of a shard.

Owns: putting the rooms together (rules, pipeline, producers, records in the manifest), and the
writer's life: open, put, close, abort. Does not own: any protocol; that is in ``wal``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Literal
from weakref import WeakValueDictionary

import pyarrow as pa

from headgate import meters
from headgate.admission import Admission, checked_sequence
from headgate.auto_compact import AutoCompact
from headgate.checkpoint import Checkpoint, check_lease, with_checkpoint
from headgate.cleanness import CleanMark
from headgate.clock import Clock, Thread
from headgate.columnar import Columnar
from headgate.config import Duration, ShardWriterConfig
from headgate.errors import (
    ClosedError,
    CommitConflictError,
    FencedError,
    HeadgateError,
    InvalidInputError,
    SchemaMismatchError,
    WriterPoisonedError,
)
from headgate.failpoint import failpoint
from headgate.flush import Generations
from headgate.keys import rows_of
from headgate.manifest.model import ChainPoint, ShardManifest
from headgate.memtable import MemTable, MemTableStats, unpinned
from headgate.quarantine import Quarantine, split_bad
from headgate.query.fresh_index import FreshIndexes, FreshIndexStats
from headgate.query.scan import Scan
from headgate.schema import RowRules, one_batch
from headgate.store import RetryPolicy
from headgate.view import ReadView, RunCache, arranged
from headgate.wal.ack import Ack, nothing
from headgate.wal.appender import EpochWriter
from headgate.wal.entry import Op, Put, encoded_bytes
from headgate.wal.fence import Split, check_epoch, open_epoch
from headgate.wal.log import ShardLog
from headgate.wal.pipeline import Pipeline
from headgate.watch import SchemaWatch
from headgate.writer_stats import BackpressureStats, WalStats, backpressure_stats, gauges, wal_stats

logger = logging.getLogger("headgate")

_RECORD_IDLE_SECONDS = 1.0
_TICK_SECONDS_MIN = 0.05
_RECORD_SECONDS = 30.0
_RECORD_ENTRIES = 4096
_PUT_BYTES_MAX = (1 << 31) - (1 << 20)
_ABORT_SECONDS = 5.0
_VIEWS_MAX = 64
_LOAD_PAUSE_SECONDS = 0.002
_LOAD_PAUSE_SECONDS_MAX = 0.25
_REPLAY_KEPT_BYTES_MAX = 1 << 30

Freshness = Literal["durable", "memory"]


class _LoadAbove(Exception):
    """A load stands past the cursor: what it is newer than is still in the log."""


class ShardWriter:
    """Writes one shard. Opening it claims the shard and fences whoever wrote before.

    Use as a context manager, sync or async. Safe for many threads. After a ``FencedError`` it
    is done for good: it never reopens by itself.
    """

    def __init__(
        self,
        log: ShardLog,
        rules: RowRules,
        config: ShardWriterConfig,
        columnar: Columnar | None = None,
        watch: SchemaWatch | None = None,
        quarantine: Quarantine | None = None,
        split: Split | None = None,
        writer_id: str | None = None,
    ) -> None:
        if config.on_bad_rows == "quarantine" and quarantine is None:
            raise InvalidInputError("bad rows need a place to be kept", hint="open the writer with shard.writer()")
        if watch is not None:
            watch.refresh()  # the predecessor may have known columns that this handle has not heard of
        self._first_rules, self._watch, self._columnar = rules, watch, columnar
        self._log, self._config, self._clock, self._quarantine = log, config, log.clock, quarantine
        policy = RetryPolicy(retries=config.max_wal_persist_retries, base_delay=config.wal_persist_retry_base_delay)
        self._generations: Generations | None = None
        self._runs: RunCache | None = None
        if config.enable_memtable:
            if columnar is None:
                raise InvalidInputError("a writer with a MemTable needs a place for its runs", hint="open it with shard.writer()")
            self._generations = Generations(log, columnar, config, self._rules_for)
            self._runs = RunCache(columnar)
            kept = min(config.max_memtable_size, config.max_unflushed_memtable_bytes, _REPLAY_KEPT_BYTES_MAX)
            replay, begin = self._generations.replay, self._generations.begin
            claim = open_epoch(log, replay=replay, begin=begin, keep_bytes=kept, split=split, writer_id=writer_id)
        else:
            claim = open_epoch(log, split=split, writer_id=writer_id)
        self._writer = EpochWriter(log, claim, policy)
        self.range = claim.manifest.range
        """The rows that the shard is for, if it was split off another."""
        generations = self._generations
        self._pipeline = Pipeline(
            self._writer,
            self._clock,
            max_entry_bytes=config.max_wal_buffer_size,
            min_interval=config.max_wal_flush_interval,
            max_inflight=config.max_inflight,
            max_unacknowledged_bytes=config.max_unflushed_memtable_bytes,
            on_acknowledged=self._acknowledged,
            on_blocked=generations.make_room if generations is not None else None,
            on_failed=generations.wake if generations is not None else None,
            lock=generations.lock if generations is not None else None,
        )
        self._admission = Admission(log.shard, self.epoch, self._clock, claim.producers)
        self._clean_mark = CleanMark(log, self.epoch, self._pipeline)
        self._closed = False
        self._indexes: FreshIndexes | None = None
        self._compactor: AutoCompact | None = None
        if generations is not None:
            assert columnar is not None, "refused above"
            self._indexes = FreshIndexes(
                config, lambda: watch.manifest.indexes if watch is not None else (), lambda: self.rules, self._clock, log.shard
            )
            self._compactor = AutoCompact(
                log,
                columnar,
                generations,
                self._pipeline,
                lambda: self._rules_for(1),
                watch,
                epoch=self.epoch,
                is_wanted=config.auto_compact,
                max_memory=config.max_memtable_size,
            )
            generations.start(claim, self._pipeline, lambda: self._admission.marks, self._index)
            generations.on_stalled = self._compactor.start

        self._recorded = claim.first.position  # everything before it is in the manifest as seen
        self._keeper_lock = self._clock.lock()
        self._keeper_wake = self._clock.condition(self._keeper_lock)
        self._keeper_stop = False
        self._tick_seconds = _RECORD_IDLE_SECONDS
        if config.enable_memtable:
            self._tick_seconds = min(_RECORD_IDLE_SECONDS, max(_TICK_SECONDS_MIN, config.max_memtable_age))
        if generations is not None:
            _live[_place_of(log)] = self
        self._keeper: Thread = self._clock.spawn(self._keep_records, name=f"headgate-records-{log.shard}")
        meters.watch(self, _gauges)

    # -- writing

    @property
    def shard(self) -> str:
        return self._log.shard

    @property
    def epoch(self) -> int:
        return self._writer.epoch

    @property
    def clock(self) -> Clock:
        return self._clock

    @property
    def failure(self) -> HeadgateError | None:
        """Why it writes no more; None: it does, as far as it knows."""
        return self._pipeline.failure

    def end_fenced(self) -> None:
        """Another has the shard: nothing more is acknowledged, and what was not says at which position it was sent."""
        told = f"shard {self.shard}: epoch {self.epoch} was superseded"
        self._pipeline.fail(FencedError(told, shard=self.shard, epoch=self.epoch))

    def put(self, data: Any, *, producer: str | None = None, sequence: int | None = None) -> Ack:
        """Upsert rows (append, on a table without a key). Returns at once; the Ack says when it is durable.

        Args:
            data: a RecordBatch, a Table, anything with ``__arrow_c_stream__`` or ``__arrow_c_array__``
                (pandas, polars, …), or a list of dicts. Atomic: all of it in one entry, or none.
            producer, sequence: makes retries safe. A sequence that was accepted before gets the Ack of
                its first copy; sequences of a producer follow each other without a gap.

        Raises:
            SchemaMismatchError, InvalidInputError: refused, nothing was accepted.
            BackpressureTimeoutError: no room within ``put_timeout``, nothing was accepted.
            FencedError, WriterPoisonedError, ClosedError: this writer writes no more.
        """
        return self._submit("upsert", data, producer, sequence)

    def delete(self, keys: Any, *, producer: str | None = None, sequence: int | None = None) -> Ack:
        """Delete rows by key: data with the key columns (others are ignored). Otherwise as ``put``."""
        return self._submit("delete", keys, producer, sequence)

    def _submit(self, op: Op, data: Any, producer: str | None, sequence: int | None) -> Ack:
        named = (None, None) if producer is None and sequence is None else checked_sequence(producer, sequence)
        if self._quarantine is not None:
            rules, rows = self._without_bad(op, data, *named)
            if rows is None:
                return self._nothing_left(*named)
        elif self._watch is not None:
            rules, rows = self._watch.upsert(data) if op == "upsert" else self._watch.delete(data)
        else:
            rules = self._first_rules
            rows = rules.checked(data) if op == "upsert" else rules.delete(data)
        ack = self.put_rows(rows, op, *named, rules=rules)
        if self._config.durable_write:
            ack.wait()
        return ack

    def _without_bad(self, op: Op, data: Any, producer: str | None, sequence: int | None) -> tuple[RowRules, pa.RecordBatch | None]:
        """The rows that can be taken; the others are kept in quarantine first, so nothing is dropped without a trace."""
        assert self._quarantine is not None
        rules = self.rules
        if type(data) is not pa.RecordBatch and not isinstance(data, list | tuple):
            data = one_batch(data, rules.schema if op == "upsert" else rules.key_schema)
        try:
            good, bad = split_bad(rules, data, op)
        except SchemaMismatchError:
            if self._watch is None or (latest := self._watch.latest(force=True)) is rules:
                raise
            rules = latest
            good, bad = split_bad(rules, data, op)
        if bad is not None:
            self._quarantine.keep(bad, producer, sequence)
        return rules, good

    def _nothing_left(self, producer: str | None, sequence: int | None) -> Ack:
        """All rows were bad, and are kept: done. A producer's sequence counts all the same."""
        ack = nothing(self._clock)
        if producer is None or sequence is None:
            return ack
        with self._pipeline.lock:
            put = Put(pa.RecordBatch.from_pylist([], schema=self.rules.key_schema), "delete", producer, sequence)
            return self._admission.admit(put, ack, consecutive=True) or ack

    @property
    def quarantined_rows(self) -> int:
        """How many rows this writer could not take and has put under ``quarantine/``."""
        return self._quarantine.rows if self._quarantine is not None else 0

    # -- for those who have checked the rows already (TableWriter)

    def put_rows(
        self,
        rows: pa.RecordBatch,
        op: Op,
        producer: str | None = None,
        sequence: int | None = None,
        *,
        rules: RowRules | None = None,
        consecutive: bool = True,
    ) -> Ack:
        """Queue rows that ``rules`` have passed. ``consecutive``: a producer's sequences follow each other in this shard."""
        size = self.size_of(rows)
        schema, timeout = (rules or self.rules).log_schema, self._config.put_timeout
        put = Put(unpinned(rows, size), op, producer, sequence, schema if op == "upsert" else None)
        if producer is None or sequence is None:
            return self._pipeline.submit(put, schema, size, timeout=timeout)
        return self._pipeline.submit(put, schema, size, timeout=timeout, admit=lambda ack: self._admission.admit(put, ack, consecutive))

    def reserve(self, size_bytes: int, *, timeout: float | None = None) -> None:
        """Take room for rows that will come. Blocks, and raises, as ``put`` does; ``timeout`` instead of ``put_timeout``."""
        self._pipeline.reserve(size_bytes, timeout=self._config.put_timeout if timeout is None else timeout)

    def release(self, size_bytes: int) -> None:
        """Give back what was reserved and is not needed."""
        self._pipeline.release(size_bytes)

    def put_reserved(
        self,
        rows: pa.RecordBatch,
        op: Op,
        producer: str | None,
        sequence: int | None,
        size_bytes: int,
        *,
        rules: RowRules | None = None,
        consecutive: bool = True,
    ) -> Ack:
        """Queue rows for which there is room. Never blocks; if the writer has failed meanwhile, the Ack has."""
        schema = (rules or self.rules).log_schema
        put = Put(unpinned(rows, size_bytes), op, producer, sequence, schema if op == "upsert" else None)
        if producer is None or sequence is None:
            return self._pipeline.submit_reserved(put, schema, size_bytes)
        return self._pipeline.submit_reserved(put, schema, size_bytes, admit=lambda ack: self._admission.admit(put, ack, consecutive))

    def size_of(self, rows: pa.RecordBatch) -> int:
        """What rows take in the log, nearly. Refuses what no entry can hold."""
        size = encoded_bytes(rows)
        if size > _PUT_BYTES_MAX:
            raise InvalidInputError(f"one put of {size} bytes", hint="a put is one object: put fewer rows at a time, 2 GiB at most")
        return size

    def producer_sequence(self, name: str) -> int | None:
        """The highest sequence accepted from a producer; None: never heard of."""
        with self._pipeline.lock:
            return self._admission.sequence(name)

    @property
    def rules(self) -> RowRules:
        """What rows may look like now."""
        return self._watch.rules if self._watch is not None else self._first_rules

    def _rules_for(self, field_id: int) -> RowRules:
        """Rules for a flush. Rows of a predecessor (those have a ``field_id``) may be of columns and types newer than we know."""
        if self._watch is not None and field_id > 0:
            self._watch.refresh()
        return self.rules

    def _acknowledged(self, position: int, puts: list[Put], size_bytes: int) -> None:
        """Under the pipeline's lock, in order."""
        if self._generations is not None:
            self._generations.take(position, puts, size_bytes)
        self._admission.acknowledged(position, puts)

    def _index(self, memtable: MemTable) -> None:
        """Under the lock: rows were taken. A row that cannot be indexed is no reason to fail its put: searches look at it themselves."""
        try:
            assert self._indexes is not None
            self._indexes.taken(memtable)
        except Exception as error:
            logger.warning("shard %s: fresh rows could not be indexed: %s", self.shard, error)

    def flush(self) -> None:
        """Wait until everything put so far is in a committed generation. WAL-only: until it is durable. Raises what went wrong."""
        self._pipeline.drain()
        if self._generations is not None:
            self._generations.flush()

    def checkpoint(
        self,
        name: str | None = None,
        scope: Literal["all", "durable"] = "all",
        ttl: Duration | None = None,
        *,
        id: str | None = None,
        shards: Sequence[str] = (),
    ) -> Checkpoint:
        """Pin the shard as it is.

        Args:
            scope: "all": flush first, so that the checkpoint needs nothing of the log: when nothing was put meanwhile, the
                WAL store may be wiped. "durable": pin what is durable, its part of the log included.
            ttl: how long it stays; None: until it is dropped.
        """
        seconds = check_lease(name, ttl)
        if scope not in ("all", "durable"):
            raise InvalidInputError(f"scope is {scope!r}", hint='"all" or "durable"')
        now, id = self._clock.now(), id or self._clock.token()
        expires = None if seconds is None else now + seconds
        if scope == "durable":
            with self._pipeline.lock:
                end = self._pipeline.acknowledged_position + 1

            def add(manifest: ShardManifest) -> ShardManifest | None:
                check_epoch(self._log, manifest, self.epoch)  # else what a successor has acknowledged would be missing
                return with_checkpoint(self._log, manifest, id, name=name, created_at=now, expires_at=expires, end=end, shards=shards)

            self._log.manifests.commit(add)
            return Checkpoint(id, name, now, expires)
        self._with_memtable('scope="all"')
        for _ in range(_VIEWS_MAX):
            self.flush()
            failpoint("checkpoint.flushed")
            try:
                return self._checkpoint_flushed(id, name, now, expires, shards)
            except _LoadAbove:
                continue  # placed since the flush, after entries that were put since
        raise CommitConflictError(f"shard {self.shard}: others load faster than it can be flushed", hint="try again")

    def _checkpoint_flushed(self, id: str, name: str | None, now: float, expires: float | None, shards: Sequence[str]) -> Checkpoint:
        with self._clean_mark.held() as (tip, committed):

            def add(manifest: ShardManifest) -> ShardManifest | None:
                check_epoch(self._log, manifest, self.epoch)
                if manifest.loads_past_cursor():
                    raise _LoadAbove
                # What was put since the flush stays in the log, past the cut: still replayed, and not part of this (K04).
                end = manifest.cursor.position
                pinned = with_checkpoint(self._log, manifest, id, name=name, created_at=now, expires_at=expires, end=end, shards=shards)
                if pinned is None or tip is None or manifest.cursor != tip or manifest.hold_position() < tip.position:
                    return pinned
                return pinned.but(wal=pinned.wal.but(clean_at=tip.position))

            committed(self._log.manifests.commit(add))
        return Checkpoint(id, name, now, expires)

    # -- looking

    def check_fenced(self) -> None:
        """Look at the latest manifest; raise FencedError if another writer has claimed the shard."""
        if isinstance(self._pipeline.failure, FencedError):
            raise self._pipeline.failure
        check_epoch(self._log, self._log.manifests.load(), self.epoch)

    def manifest(self) -> ShardManifest:
        """The shard's latest manifest, read now."""
        return self._log.manifests.load()

    def wal_stats(self) -> WalStats:
        return wal_stats(self.epoch, self._pipeline)

    def backpressure_stats(self) -> BackpressureStats:
        return backpressure_stats(self._config.max_unflushed_memtable_bytes, self._pipeline)

    def threads_alive(self) -> int:
        """How many threads of this writer still run; none after ``close``."""
        flushing = self._generations is not None and self._generations.thread_alive()
        compacting = self._compactor is not None and self._compactor.is_alive()
        return self._pipeline.threads_alive() + self._keeper.is_alive() + flushing + compacting

    def index_stats(self) -> FreshIndexStats:
        """How far the words of fresh rows are made, for text searches."""
        self._with_memtable("index_stats")
        assert self._indexes is not None
        return self._indexes.stats()

    def memtable_stats(self) -> MemTableStats:
        """The rows that are in no committed generation yet. Right from the moment ``open`` returns."""
        return self._with_memtable("memtable_stats").stats()

    def active_memtable(self) -> pa.Table:
        """The upserted rows of the active MemTable, in the order they came, every version of a key."""
        generations = self._with_memtable("active_memtable")
        with generations.lock:
            fresh = generations.active.view()
        rules = self.rules
        return rows_of([put for put in fresh.puts if put.op == "upsert"], rules, rules.schema.names).cast(
            pa.schema([f.with_nullable(True) for f in rules.schema]).remove_metadata()
        )

    def view(self, freshness: Freshness = "durable") -> ReadView:
        """One state of the shard: what is in memory here, and all runs that the latest manifest names.

        Raises:
            FencedError: another writer has claimed the shard.
            WriterPoisonedError, ClosedError: this writer is done; read the table.
        """
        generations = self._with_memtable("a view")
        if freshness not in ("durable", "memory"):
            raise InvalidInputError(f"freshness is {freshness!r}", hint='"durable" or "memory"')
        assert self._runs is not None
        for look in range(_VIEWS_MAX):
            # The MemTables first, the manifest after: a flush in between shows in both, and the cursor tells (R07, R08).
            with generations.lock:
                if self._pipeline.failure is not None:
                    raise self._pipeline.failure
                fresh = generations.views()
                pending = tuple(self._pipeline.pending()) if freshness == "memory" else ()
                acknowledged = self._pipeline.acknowledged_position
            if self._closed:
                raise ClosedError(f"the writer of shard {self.shard} is closed", hint="read the table instead")
            failpoint("view.memory")
            manifest = self._log.manifests.load()
            check_epoch(self._log, manifest, self.epoch)
            cursor = manifest.cursor.position
            if pending and cursor > acknowledged + 1:
                continue  # what was pending may be in a run by now, and below something newer
            places = [load.end for load in manifest.loads_past_cursor()]
            if places and places[-1] > acknowledged + 1:
                # Entries before its place are durable, and not here yet: they come first. A lost reply is asked for again, that takes time.
                self._clock.sleep(min(_LOAD_PAUSE_SECONDS * (1 << look), _LOAD_PAUSE_SECONDS_MAX))
                continue
            # By what was taken of each: a MemTable may have grown since, been cut at a load, and its older part flushed.
            fresh = tuple(part for part in fresh if part.count and part.places()[1] > cursor)
            if any(part.spans(place) for part in fresh for place in (cursor, *places)):
                # A MemTable that the cursor stands in was cut since, at a load, and its older part flushed: take them again.
                generations.cut(places)
                continue
            rules = self.rules
            runs, fresh = arranged(manifest, fresh, rules, self._runs)
            return ReadView(self.shard, rules, runs, fresh, pending, cache=self._runs, version=manifest.version)
        raise CommitConflictError(
            f"shard {self.shard} flushes, or is loaded into, faster than it can be read", hint='try again, or read with freshness="durable"'
        )

    def scan(
        self,
        columns: Sequence[str] | None = None,
        filter: str | None = None,
        limit: int | None = None,
        freshness: Freshness = "durable",
    ) -> Scan:
        """Read the shard, with what is in memory here.

        Args:
            freshness: "durable": what a crash cannot take back. "memory": rows not yet acknowledged too.
        """
        self._with_memtable("scan")
        return Scan(lambda: [self.view(freshness)], self.rules, columns=columns, filter=filter, limit=limit)

    def _with_memtable(self, what: str) -> Generations:
        if self._generations is None:
            raise InvalidInputError(f"{what} needs a MemTable, and this writer is WAL-only", hint="read the log with shard.tail()")
        return self._generations

    # -- records: what the manifest knows of the acknowledged

    def _keep_records(self) -> None:
        """Commit progress when idle, and every so often when busy, so that a later loss is noticed."""
        last_position, last_change, last_record = self._recorded, self._clock.monotonic(), self._clock.monotonic()
        while True:
            with self._keeper_lock:
                if not self._keeper_stop:
                    self._keeper_wake.wait(self._tick_seconds)
                if self._keeper_stop:
                    return
            if self._pipeline.failure is not None:
                return
            if self._generations is not None:
                self._generations.freeze_if_old()
            if self._compactor is not None:
                self._compactor.tick()
            if self._watch is not None:
                self._look_at_the_table(self._watch)
            now, position = self._clock.monotonic(), self._pipeline.acknowledged_position + 1
            if position != last_position:
                last_position, last_change = position, now
            if position == self._recorded:
                last_record = now
                continue
            idle = now - last_change >= _RECORD_IDLE_SECONDS
            if idle or position - self._recorded >= _RECORD_ENTRIES or now - last_record >= _RECORD_SECONDS:
                try:
                    self._record(clean=False)
                except FencedError as error:
                    self._pipeline.fail(error)
                    return
                except HeadgateError as error:  # a record is a safeguard: the next one makes up for it
                    logger.warning("shard %s: progress could not be recorded, trying again later: %s", self.shard, error.message)
                last_record = now

    def _look_at_the_table(self, watch: SchemaWatch) -> None:
        """Learn of columns that others have changed."""
        try:
            watch.latest()
        except HeadgateError as error:  # the next look makes up for it; a put that does not fit looks by itself
            logger.debug("shard %s: the table's manifest could not be read: %s", self.shard, error.message)

    def _record(self, *, clean: bool) -> None:
        pipeline = self._pipeline
        with pipeline.lock:
            acknowledged = ChainPoint(self.epoch, pipeline.acknowledged_position + 1)
            marks = dict(self._admission.marks)
        retention = self._config.producer_retention.total_seconds()
        wal_only = self._generations is None
        self._writer.commit_progress(acknowledged, marks, resume=wal_only, clean=clean, retention_seconds=retention)
        self._recorded = acknowledged.position

    def _stop_keeper(self, seconds: float | None) -> None:
        with self._keeper_lock:
            self._keeper_stop = True
            self._keeper_wake.notify_all()
        self._keeper.join(seconds)

    # -- ends

    def close(self) -> None:
        """Finish what was put, flush it, record it, end the threads. Raises what went wrong. Can be repeated."""
        if self._closed:
            return
        self._end()
        try:
            self._pipeline.close()
            if self._generations is not None:
                self._generations.flush()
        finally:
            self._stop_keeper(None)
            if self._generations is not None:
                self._generations.stop(None)
            if self._indexes is not None:
                self._indexes.stop()
            if self._compactor is not None:
                self._compactor.join()
        failpoint("close.drained")
        self._record(clean=True)

    def abort(self) -> None:
        """Stop now, in bounded time, and flush nothing: what is not acknowledged fails with ClosedError. Can be repeated."""
        if self._closed:
            return
        self._end()
        ended = self._pipeline.abort(_ABORT_SECONDS)
        self._stop_keeper(_ABORT_SECONDS)
        if self._generations is not None:
            self._generations.stop(_ABORT_SECONDS)
        if self._indexes is not None:
            self._indexes.stop()
        if ended and not self._keeper.is_alive() and not isinstance(self._pipeline.failure, FencedError):
            recorder = self._clock.spawn(self._record_quietly, name=f"headgate-abort-{self.shard}")
            recorder.join(_ABORT_SECONDS)

    def _end(self) -> None:
        self._closed = True
        if self._compactor is not None:
            self._compactor.stop()

    def _record_quietly(self) -> None:
        try:
            self._record(clean=False)
        except FencedError:
            return  # the successor has recorded more than we know
        except HeadgateError as error:
            logger.warning("shard %s: progress could not be recorded at abort: %s", self.shard, error.message)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
            return
        try:
            self.close()
        except HeadgateError as failure:
            # The error on its way out is the one to tell; this one is its company.
            if error is not None:
                error.add_note(f"and closing the writer failed: {failure.message}")

    async def __aenter__(self) -> ShardWriter:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        import asyncio

        await asyncio.to_thread(self.__exit__, kind, error, trace)

    def __reduce__(self) -> Any:
        raise TypeError("a ShardWriter holds a claim and threads, and cannot be pickled; pickle the table and open a writer there")

    def __repr__(self) -> str:
        return f"ShardWriter(shard={self.shard!r}, epoch={self.epoch}, {'closed' if self._closed else 'open'})"


_live: WeakValueDictionary[tuple[str, str, str], ShardWriter] = WeakValueDictionary()
"""The last writer with a MemTable that this process opened of each shard."""


def _gauges(writer: ShardWriter) -> Iterator[tuple[meters.Gauge, float, meters.Labels]]:
    if not writer._closed and writer._pipeline.failure is None:
        yield from gauges(writer._log, writer.epoch, writer._pipeline, writer._generations, writer._config)


def _place_of(log: ShardLog) -> tuple[str, str, str]:
    return log.manifests.place, log.table_id, log.shard


def live_view(log: ShardLog) -> ReadView | None:
    """What a writer of this process has in memory of a shard, not yet durable rows included. None: there is none, or it is done."""
    writer = _live.get(_place_of(log))
    if writer is None:
        return None
    try:
        return writer.view("memory")
    except (FencedError, ClosedError, WriterPoisonedError):
        return None  # what it held in memory only is not coming: the log and the runs are all there is
