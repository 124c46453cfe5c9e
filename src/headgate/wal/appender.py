"""Appending: one epoch, one position after another.

Owns: an entry's way into the store, and the judgement of a taken name.
Does not own: batching, queues and threads (pipeline).

``EpochWriter`` is what both the synchronous appender and the pipeline write through.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol

import pyarrow as pa

from headgate.errors import ClosedError, CorruptEntryError, FencedError, HeadgateError, InvalidInputError, StoreError, WriterPoisonedError
from headgate.failpoint import failpoint
from headgate.manifest.model import ChainPoint, ProducerMark, ShardManifest
from headgate.store import RetryPolicy, create_exactly
from headgate.wal.entry import Header, Put, decode_entry, metadata_of
from headgate.wal.fence import Claim, check_epoch, open_epoch
from headgate.wal.log import ShardLog
from headgate.wal.producers import merge, pruned
from headgate.wal.stencil import StencilEncoder


class EpochWriter:
    """The right to write one epoch, and how to use it. Safe for many threads."""

    def __init__(self, log: ShardLog, claim: Claim, policy: RetryPolicy | None = None) -> None:
        self.log, self.claim = log, claim
        self._policy = policy or log.policy
        own = Header(claim.space.wal_id, claim.space.shard, claim.epoch, 0, "data", "", claim.writer_id, -1, 0.0)
        self._entry_ids = log.clock.token()
        self._encoder = StencilEncoder(metadata_of(own))

    @property
    def epoch(self) -> int:
        return self.claim.epoch

    def encode(self, position: int, durable_through: int, schema: pa.Schema, puts: Sequence[Put], size_bytes: int = 0) -> memoryview:
        """The bytes of the entry at ``position``. Encoded once: a retry sends the same."""
        clock = self.log.clock
        # Random, one per writer, and numbered: no two entries anywhere share an id.
        entry_id = f"{self._entry_ids}-{position:020d}"
        return self._encoder.encode(position, entry_id, durable_through, clock.now(), schema, puts, size_bytes)

    def persist(self, position: int, body: memoryview) -> None:
        """Make an entry durable: one request when all goes well.

        Raises:
            FencedError: a seal stands there: a successor ended this epoch.
            StoreError: something else stands there, or the store failed for longer than retries last.
        """
        space, epoch = self.claim.space, self.claim.epoch
        key = space.key(epoch, position)
        occupant = create_exactly(space.store, key, body, self.log.clock, self._policy)
        if occupant is None:
            return
        try:
            entry = decode_entry(occupant, key, space.wal_id, space.shard, epoch, position)
        except CorruptEntryError as error:
            raise StoreError(f"{key} is taken by something that is no entry", object=key, hint=_FOREIGN) from error
        if entry.is_seal:
            raise FencedError(
                f"shard {space.shard}: epoch {epoch} was ended at position {position} by epoch {entry.header.by_epoch}",
                shard=space.shard,
                epoch=epoch,
                position=position,
                by_epoch=entry.header.by_epoch,
            )
        raise StoreError(
            f"{key} holds an entry of writer {entry.header.writer_id}, and only {self.claim.writer_id} may write there",
            object=key,
            hint=_FOREIGN,
        )

    # -- what a writer commits to the manifest

    def commit_progress(
        self, acknowledged: ChainPoint, producers: dict[str, ProducerMark], *, resume: bool, clean: bool, retention_seconds: float
    ) -> ShardManifest:
        """Record that everything before ``acknowledged`` was acknowledged, and by whom it was produced.

        ``resume``: later opens may start there (WAL-only). ``clean``: nothing more will be
        written, so if the cursor is there too, the WAL is no longer needed.
        """

        def change(manifest: ShardManifest) -> ShardManifest | None:
            check_epoch(self.log, manifest, self.epoch)
            merged = dict(manifest.producers)
            merge(merged, producers.items())
            newest = max((mark.time for mark in merged.values()), default=0.0)
            changed = manifest.but(
                wal_position_last_seen=max(manifest.wal_position_last_seen, acknowledged.position - 1),
                producers=pruned(merged, position=acknowledged.position, time=newest, retention_seconds=retention_seconds),
            )
            if resume and (manifest.resume is None or manifest.resume.position < acknowledged.position):
                changed = changed.but(resume=acknowledged)
            if clean and manifest.cursor == acknowledged and manifest.hold_position() >= acknowledged.position:
                changed = changed.but(wal=manifest.wal.but(clean_at=acknowledged.position))
            elif manifest.wal.clean_at not in (None, acknowledged.position):
                changed = changed.but(wal=manifest.wal.but(clean_at=None))
            return None if changed == manifest else changed

        return self.log.manifests.commit(change)


_FOREIGN = "the store broke a conditional create, or something else writes below the WAL's folder; run `headgate verify`"


class TakesRows(Protocol):
    """Turns what a user passes into rows of the log, or refuses it."""

    log_schema: pa.Schema

    def upsert(self, data: Any) -> pa.RecordBatch: ...


class Appendable(Protocol):
    """A shard, as far as appending is concerned."""

    @property
    def log(self) -> ShardLog: ...
    @property
    def rules(self) -> TakesRows: ...


class WalAppender:
    """The log, one durable entry per call, synchronously. The lowest way to write.

    ``open`` writes: it claims the shard and fences whoever held it. One thread at a time.

    Example:
        >>> with WalAppender.open(table.shard("0000")) as appender:
        ...     epoch, position = appender.append([batch])
    """

    def __init__(self, writer: EpochWriter, rules: TakesRows) -> None:
        self._writer, self._rules = writer, rules
        self._next = writer.claim.first
        self._producers: dict[str, ProducerMark] = {}
        self._failure: HeadgateError | None = None

    @property
    def epoch(self) -> int:
        return self._writer.epoch

    @property
    def next_position(self) -> int:
        """The position of the next entry; right from the moment ``open`` returns."""
        return self._next.position

    @classmethod
    def open(cls, shard: Appendable) -> WalAppender:
        """Claim the shard: fences the incumbent, walks its log, seals it, and verifies that all held."""
        log = shard.log
        return cls(EpochWriter(log, open_epoch(log)), shard.rules)

    def append(self, batches: Sequence[Any]) -> tuple[int, int]:
        """One durable entry with all the batches, atomically. Returns its epoch and position.

        Raises:
            SchemaMismatchError, InvalidInputError: refused, nothing was written.
            FencedError: another writer has taken over.
            WriterPoisonedError: the store failed for good; reopen.
        """
        puts = [Put(self._rules.upsert(batch)) for batch in batches]
        if not puts:
            raise InvalidInputError("an entry needs at least one batch", hint="append only when there is something to append")
        return self.append_puts(puts)

    def append_puts(self, puts: Sequence[Put]) -> tuple[int, int]:
        """Write one entry of validated puts. Returns its epoch and position once it is durable."""
        if self._failure is not None:
            raise self._failure
        position = self._next.position
        body = self._writer.encode(position, position - 1, self._rules.log_schema, puts)
        failpoint("append.encoded")
        try:
            self._writer.persist(position, body)
        except FencedError as error:
            self._failure = error
            raise
        except HeadgateError as error:
            # Whether it landed is unknown, so the position can be used for nothing else.
            self._failure = WriterPoisonedError(
                f"the entry at position {position} could not be written: {error.message}", cause=error, unacknowledged=list(puts)
            )
            raise self._failure from error
        self._next = self._next.past_data()
        for put in puts:
            if put.producer is not None and put.sequence is not None:
                mark = ProducerMark(sequence=put.sequence, epoch=self.epoch, position=position, time=self._writer.log.clock.now())
                merge(self._producers, [(put.producer, mark)])
        return self.epoch, position

    def close(self) -> None:
        """Record what was acknowledged, so that its loss would be noticed. The shard stays claimed."""
        if isinstance(self._failure, ClosedError):
            return
        failure, self._failure = self._failure, ClosedError("the appender is closed", hint="open another one")
        if failure is None:
            self._writer.commit_progress(self._next, self._producers, resume=True, clean=True, retention_seconds=float("inf"))

    def __enter__(self) -> WalAppender:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
