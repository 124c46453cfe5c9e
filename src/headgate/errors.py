"""Every error Headgate raises, in one tree.

HeadgateError                     .hint says what to do, .retryable whether trying again can help
├─ InvalidInputError              (ValueError) refused before anything was written
│  └─ SchemaMismatchError         the rows do not fit the table
├─ FencedError                    another writer owns the shard; terminal
├─ WriterPoisonedError            the store failed for good under this writer; reopen
├─ ClosedError                    the handle was closed or aborted
├─ ConsumerTakenError             another reader goes on with this consumer; terminal
├─ SnapshotExpiredError           what was being read has been collected; read again
├─ TransactionConflictError       a transaction was refused
├─ OutOfSequenceError             a producer skipped a sequence number
├─ BackpressureTimeoutError       no room in time; nothing was accepted
├─ OutcomeUnknownError            it may or may not have happened; read before redoing
├─ DataLossError                  something durable is gone
│  ├─ WalHoleError                an entry is missing below entries that cover it
│  ├─ WalTruncatedError           the log ends, or begins, elsewhere than it should
│  └─ CorruptEntryError           an object's bytes are not what was written
├─ WalStoreMismatchError          this is not the WAL store the table was written with
├─ UnsupportedStoreError          the store lacks what the protocol needs
├─ UnsupportedFormatError         written by a newer version of Headgate
├─ CommitConflictError            too many others were committing; try again
│  └─ ShardSplitError             the shard is being split, or was; look at the table again
├─ NotFoundError · AlreadyExistsError
└─ StoreError                     the store did not do what it was asked
   ├─ StoreUnavailableError       it may do so later; the outcome of a write is unknown
   │  └─ DeleteIncompleteError    some of the objects may still be there
   ├─ StoreSyncError              fsync failed: nothing may be assumed of what was written
   ├─ ObjectMissingError          no such object
   └─ ObjectExistsError           create found the name taken
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar


class HeadgateError(Exception):
    """Base of all errors. ``hint`` says what to do; ``retryable`` whether trying again can help."""

    retryable: ClassVar[bool] = False
    outcomes: Mapping[str, Any] = MappingProxyType({})
    """Of a put over several shards: shard -> (epoch, position) where it is durable, or the error there."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross process boundaries (Spark, multiprocessing): rebuild without calling __init__.
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(kind: type[HeadgateError], args: tuple[Any, ...], state: dict[str, Any]) -> HeadgateError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class InvalidInputError(HeadgateError, ValueError):
    """The call was refused before anything was written."""


class SchemaMismatchError(InvalidInputError):
    """The rows do not fit the table's schema."""


class FencedError(HeadgateError):
    """Another writer has claimed the shard. This writer will never write again.

    A put that ends so was not acknowledged; it is durable if ``position`` turns out to lie
    below the end of ``epoch`` (``Shard.outcome`` tells), and never happened otherwise.
    """

    def __init__(
        self, message: str, *, shard: str, epoch: int, position: int | None = None, by_epoch: int | None = None, hint: str = ""
    ) -> None:
        super().__init__(
            message,
            hint=hint or "another writer took over; stop, or back off with jitter, reopen and retry with the same producer sequence",
        )
        self.shard = shard
        self.epoch = epoch
        self.position = position
        self.by_epoch = by_epoch


class WriterPoisonedError(HeadgateError):
    """The writer met a failure it cannot get past. Reopen to go on.

    ``cause`` is what went wrong, ``unacknowledged`` what was accepted and not acknowledged,
    in order: each a ``Put``.
    """

    def __init__(self, message: str, *, cause: BaseException, unacknowledged: Sequence[Any] = (), hint: str = "") -> None:
        super().__init__(
            message, hint=hint or "reopen the writer; put again what it hands back in .unacknowledged, with the same producer sequence"
        )
        self.cause = cause
        self.unacknowledged = list(unacknowledged)


class ClosedError(HeadgateError):
    """The handle was closed or aborted."""


class ConsumerTakenError(HeadgateError):
    """Another reader has taken over this consumer's name. This one moves its offset no more."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint or "stop this reader, or give it a consumer of its own; a name is for one reader at a time")


class SnapshotExpiredError(HeadgateError):
    """What was being read has been collected. Read again."""

    retryable = True


class TransactionConflictError(HeadgateError):
    """A transaction was refused."""


class OutOfSequenceError(InvalidInputError):
    """A producer skipped a sequence number; accepting it would let it overtake."""


class BackpressureTimeoutError(HeadgateError, TimeoutError):
    """No room within the timeout. Nothing was accepted."""

    retryable = True


class OutcomeUnknownError(HeadgateError):
    """It may or may not have happened. Read the state before doing it again."""


class DataLossError(HeadgateError):
    """Something that was durable is gone or damaged. ``object`` names it."""

    def __init__(self, message: str, *, object: str, hint: str = "") -> None:
        super().__init__(
            message,
            hint=hint or "restore the object from a backup or a bucket version, and see `headgate verify`",
        )
        self.object = object


class WalHoleError(DataLossError):
    """A WAL entry is missing although later entries say it was durable."""


class WalTruncatedError(DataLossError):
    """The log ends before a position known to be durable, or begins after the one asked for."""


class CorruptEntryError(DataLossError):
    """An object's bytes are not those that were written."""


class WalStoreMismatchError(HeadgateError):
    """The WAL store is not the one this table was written with."""


class UnsupportedStoreError(HeadgateError):
    """The store lacks something the protocol needs."""


class UnsupportedFormatError(HeadgateError):
    """The object was written in a newer format than this version reads."""


class CommitConflictError(HeadgateError):
    """Others kept committing; the change was not made."""

    retryable = True


class ShardSplitError(CommitConflictError):
    """A shard is being split ("splitting"), or is what its parts are now ("retired")."""

    def __init__(self, message: str, *, shard: str, state: str, hint: str = "") -> None:
        super().__init__(message, hint=hint or "look at the table's shards of now (table.refresh()), and try again")
        self.shard = shard
        self.state = state


class NotFoundError(HeadgateError):
    """No such table, shard, checkpoint or consumer."""


class AlreadyExistsError(HeadgateError):
    """Something of that name is there already."""


class StoreError(HeadgateError):
    """The store did not do what it was asked. ``object`` names what it was asked about."""

    def __init__(self, message: str, *, object: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.object = object


class StoreUnavailableError(StoreError):
    """The store may answer later. The outcome of a write that ended so is unknown."""

    retryable = True


class DeleteIncompleteError(StoreUnavailableError):
    """Some of the objects may still be there: ``keys``."""

    def __init__(self, keys: Sequence[str], cause: object) -> None:
        super().__init__(f"{len(keys)} objects could not be deleted, the first is {keys[0]}: {cause}", object=keys[0])
        self.keys = list(keys)


class StoreSyncError(StoreError):
    """fsync failed: a retry would only find its own bytes in the page cache, so there is none."""


class ObjectMissingError(StoreError):
    """There is no such object."""


class ObjectExistsError(StoreError):
    """Create found the name taken."""
