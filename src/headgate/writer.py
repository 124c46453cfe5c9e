"""ShardWriter: the one live writer of a shard.

Owns: putting the rooms together (rules, pipeline, producers, records in the manifest), and the
writer's life: open, put, close, abort. Does not own: any protocol; that is in ``wal``.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import pyarrow as pa

from headgate.clock import Thread
from headgate.config import ShardWriterConfig
from headgate.errors import FencedError, HeadgateError, InvalidInputError, OutOfSequenceError
from headgate.failpoint import failpoint
from headgate.manifest.model import ChainPoint, ProducerMark
from headgate.schema import RowRules
from headgate.store import RetryPolicy
from headgate.wal.ack import Ack, decided
from headgate.wal.appender import EpochWriter
from headgate.wal.entry import Op, Put, encoded_bytes
from headgate.wal.fence import check_epoch, open_epoch
from headgate.wal.log import ShardLog
from headgate.wal.pipeline import Pipeline

logger = logging.getLogger("headgate")

_RECORD_IDLE_SECONDS = 1.0
_RECORD_SECONDS = 30.0
_RECORD_ENTRIES = 4096
_PUT_BYTES_MAX = (1 << 31) - (1 << 20)
_ACKS_KEPT_PER_PRODUCER = 1024
_ABORT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class WalStats:
    """The log of a writer. Right from the moment ``open`` returns."""

    epoch: int
    next_wal_entry_position: int
    acknowledged_position: int
    queued_puts: int
    queued_bytes: int
    inflight_entries: int
    entries_written: int
    puts_acknowledged: int
    bytes_written: int


@dataclass(frozen=True, slots=True)
class BackpressureStats:
    """How often and how long ``put`` had to wait for room."""

    limit_bytes: int
    unacknowledged_bytes: int
    blocked_puts: int
    blocked_seconds: float
    timeouts: int


class _Producer:
    """What this writer accepted from one producer."""

    __slots__ = ("acks", "mark", "sequence", "used")

    def __init__(self, mark: ProducerMark | None) -> None:
        self.mark = mark
        self.sequence = mark.sequence if mark is not None else -1
        self.used = False
        self.acks: OrderedDict[int, Ack] = OrderedDict()


class ShardWriter:
    """Writes one shard. Opening it claims the shard and fences whoever wrote before.

    Use as a context manager, sync or async. Safe for many threads. After a ``FencedError`` it
    is done for good: it never reopens by itself.
    """

    def __init__(self, log: ShardLog, rules: RowRules, config: ShardWriterConfig) -> None:
        if config.enable_memtable:
            raise InvalidInputError(
                "MemTable mode is not available in this version", hint="pass ShardWriterConfig(enable_memtable=False) for the WAL-only mode"
            )
        if config.on_bad_rows == "quarantine":
            raise InvalidInputError("on_bad_rows='quarantine' is not available in WAL-only mode", hint="use on_bad_rows='fail'")
        self._log, self._rules, self._config, self._clock = log, rules, config, log.clock
        policy = RetryPolicy(retries=config.max_wal_persist_retries, base_delay=config.wal_persist_retry_base_delay)
        self._writer = EpochWriter(log, open_epoch(log), policy)
        claim = self._writer.claim
        self._pipeline = Pipeline(
            self._writer,
            self._clock,
            max_entry_bytes=config.max_wal_buffer_size,
            min_interval=config.max_wal_flush_interval,
            max_inflight=config.max_inflight,
            max_unacknowledged_bytes=config.max_unflushed_memtable_bytes,
            on_acknowledged=self._acknowledged,
        )
        self._producers = {name: _Producer(mark) for name, mark in claim.producers.items()}
        self._marks: dict[str, ProducerMark] = {}
        self._closed = False

        self._recorded = claim.first.position  # everything before it is in the manifest as seen
        self._keeper_lock = self._clock.lock()
        self._keeper_wake = self._clock.condition(self._keeper_lock)
        self._keeper_stop = False
        self._keeper: Thread = self._clock.spawn(self._keep_records, name=f"headgate-records-{log.shard}")

    # -- writing

    @property
    def shard(self) -> str:
        return self._log.shard

    @property
    def epoch(self) -> int:
        return self._writer.epoch

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
        return self._submit(self._rules.upsert(data), "upsert", producer, sequence)

    def delete(self, keys: Any, *, producer: str | None = None, sequence: int | None = None) -> Ack:
        """Delete rows by key: data with the key columns (others are ignored). Otherwise as ``put``."""
        return self._submit(self._rules.delete(keys), "delete", producer, sequence)

    def _submit(self, rows: pa.RecordBatch, op: Op, producer: str | None, sequence: int | None) -> Ack:
        size = encoded_bytes(rows)
        if size > _PUT_BYTES_MAX:
            raise InvalidInputError(f"one put of {size} bytes", hint="a put is one object: put fewer rows at a time, 2 GiB at most")
        config = self._config
        if producer is None and sequence is None:
            ack = self._pipeline.submit(Put(rows, op), self._rules.log_schema, size, timeout=config.put_timeout)
        else:
            name, number = _checked_sequence(producer, sequence)
            ack = self._pipeline.submit(
                Put(rows, op, name, number),
                self._rules.log_schema,
                size,
                timeout=config.put_timeout,
                admit=lambda ack: self._admit(name, number, ack),
            )
        if config.durable_write:
            ack.wait()
        return ack

    def _admit(self, name: str, sequence: int, ack: Ack) -> Ack | None:
        """Under the pipeline's lock, right before a put is accepted: a duplicate gets the first copy's Ack.

        Two threads with the same sequence: one is accepted, the other gets its Ack, whatever the
        order. A put refused for lack of room never came here, so its sequence is still free (A15).
        """
        known = self._producers.get(name)
        if known is None:
            known = _Producer(None)
        if sequence <= known.sequence:
            first = known.acks.get(sequence)
            if first is not None:
                return first
            assert known.mark is not None, "what is no longer kept was acknowledged"
            return decided(self._clock, self.shard, known.mark.epoch, known.mark.position)
        if known.used and sequence != known.sequence + 1:
            raise OutOfSequenceError(
                f"producer {name!r} sent sequence {sequence} after {known.sequence}",
                hint=f"send {known.sequence + 1}: sequences follow each other, so that nothing overtakes",
            )
        self._producers[name] = known
        known.used = True
        known.sequence = sequence
        known.acks[sequence] = ack
        return None

    def _acknowledged(self, position: int, puts: list[Put]) -> None:
        """Under the pipeline's lock, in order."""
        for put in puts:
            if put.producer is None or put.sequence is None:
                continue
            mark = ProducerMark(sequence=put.sequence, epoch=self.epoch, position=position, time=self._clock.now())
            self._marks[put.producer] = mark
            known = self._producers[put.producer]
            known.mark = mark
            while len(known.acks) > _ACKS_KEPT_PER_PRODUCER and next(iter(known.acks.values())).done():
                known.acks.popitem(last=False)

    def flush(self) -> None:
        """Wait until everything put so far is durable. (In WAL-only mode there are no generations.)"""
        self._pipeline.drain()

    # -- looking

    def check_fenced(self) -> None:
        """Look at the latest manifest; raise FencedError if another writer has claimed the shard."""
        if isinstance(self._pipeline.failure, FencedError):
            raise self._pipeline.failure
        check_epoch(self._log, self._log.manifests.load(), self.epoch)

    def wal_stats(self) -> WalStats:
        stats = self._pipeline.stats()
        return WalStats(
            epoch=self.epoch,
            next_wal_entry_position=stats.next_position,
            acknowledged_position=stats.acknowledged_position,
            queued_puts=stats.queued_puts,
            queued_bytes=stats.queued_bytes,
            inflight_entries=stats.inflight_entries,
            entries_written=stats.entries,
            puts_acknowledged=stats.puts,
            bytes_written=stats.bytes,
        )

    def backpressure_stats(self) -> BackpressureStats:
        stats = self._pipeline.stats()
        return BackpressureStats(
            limit_bytes=self._config.max_unflushed_memtable_bytes,
            unacknowledged_bytes=self._pipeline.unacknowledged_bytes,
            blocked_puts=stats.blocked_puts,
            blocked_seconds=stats.blocked_seconds,
            timeouts=stats.timeouts,
        )

    def threads_alive(self) -> int:
        """How many threads of this writer still run; none after ``close``."""
        return self._pipeline.threads_alive() + self._keeper.is_alive()

    def memtable_stats(self) -> Any:
        raise self._no_memtable("memtable_stats")

    def active_memtable(self) -> Any:
        raise self._no_memtable("active_memtable")

    def scan(self, columns: Any = None, filter: Any = None, limit: Any = None, freshness: str = "durable") -> Any:
        raise self._no_memtable("scan")

    def _no_memtable(self, what: str) -> InvalidInputError:
        return InvalidInputError(
            f"{what} needs a MemTable, and this writer is WAL-only",
            hint="read the log with shard.tail()",
        )

    # -- records: what the manifest knows of the acknowledged

    def _keep_records(self) -> None:
        """Commit progress when idle, and every so often when busy, so that a later loss is noticed."""
        last_position, last_change, last_record = self._recorded, self._clock.monotonic(), self._clock.monotonic()
        while True:
            with self._keeper_lock:
                if not self._keeper_stop:
                    self._keeper_wake.wait(_RECORD_IDLE_SECONDS)
                if self._keeper_stop:
                    return
            if self._pipeline.failure is not None:
                return
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

    def _record(self, *, clean: bool) -> None:
        pipeline = self._pipeline
        with pipeline.lock:
            acknowledged = ChainPoint(self.epoch, pipeline.acknowledged_position + 1)
            marks = dict(self._marks)
        self._writer.commit_progress(
            acknowledged, marks, resume=True, clean=clean, retention_seconds=self._config.producer_retention.total_seconds()
        )
        self._recorded = acknowledged.position

    def _stop_keeper(self, seconds: float | None) -> None:
        with self._keeper_lock:
            self._keeper_stop = True
            self._keeper_wake.notify_all()
        self._keeper.join(seconds)

    # -- ends

    def close(self) -> None:
        """Finish what was put, record it, end the threads. Raises what went wrong. Can be repeated."""
        if self._closed:
            return
        self._closed = True
        try:
            self._pipeline.close()
        finally:
            self._stop_keeper(None)
        failpoint("close.drained")
        self._record(clean=True)

    def abort(self) -> None:
        """Stop now, in bounded time: what is not acknowledged fails with ClosedError. Can be repeated."""
        if self._closed:
            return
        self._closed = True
        ended = self._pipeline.abort(_ABORT_SECONDS)
        self._stop_keeper(_ABORT_SECONDS)
        if ended and not self._keeper.is_alive() and not isinstance(self._pipeline.failure, FencedError):
            recorder = self._clock.spawn(self._record_quietly, name=f"headgate-abort-{self.shard}")
            recorder.join(_ABORT_SECONDS)

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


def _checked_sequence(producer: str | None, sequence: int | None) -> tuple[str, int]:
    if not isinstance(producer, str) or not producer or len(producer) > 256:
        raise InvalidInputError(f"the producer is {producer!r}", hint="a name of 1 to 256 characters, with a sequence")
    if isinstance(sequence, bool) or not isinstance(sequence, int) or sequence < 0:
        raise InvalidInputError(
            f"the sequence of producer {producer!r} is {sequence!r}", hint="a whole number from 0, one more with each put"
        )
    return producer, sequence
