"""The Store seam: all that the WAL and the manifests ask of storage.

Owns: the contract. Does not own: retries (retry), what a taken name means (exact).

Keys are relative to the store's root: ASCII letters, digits and ``._-/``, never empty parts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Data = bytes | bytearray | memoryview
"""What can be written: bytes, or a C-contiguous memoryview of them."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One row of a listing."""

    key: str
    size_bytes: int
    modified: float
    """Seconds since 1970, by the store's clock. For reports and ``min_age`` only."""


class Store(ABC):
    """Six operations. Each either does what it says or raises a ``StoreError``.

    Linearisable per key: a create that has returned is seen by every later get and list.
    Every method may be called from many threads, and releases the GIL while it waits.
    """

    @property
    @abstractmethod
    def uri(self) -> str:
        """Where this is, for people; carries no credentials."""

    @abstractmethod
    def create(self, key: str, data: Data) -> None:
        """Write an object that is not there yet, atomically and durably.

        Raises:
            ObjectExistsError: the name is taken (or S3 answered 409: read it to find out).
            StoreUnavailableError: the outcome is unknown; the same bytes may be sent again.
            StoreSyncError: fsync failed; nothing may be assumed, and nothing retried.
        """

    @abstractmethod
    def get(self, key: str) -> memoryview:
        """The whole object. Raises ObjectMissingError."""

    @abstractmethod
    def get_range(self, key: str, start: int, length: int) -> memoryview:
        """A part of an object; shorter at its end. Raises ObjectMissingError."""

    @abstractmethod
    def head(self, key: str) -> ObjectInfo:
        """Its size and time. Raises ObjectMissingError."""

    @abstractmethod
    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """All objects whose key starts with ``prefix`` (which ends in ``/`` or is empty), in order
        of their keys, those greater than ``start_after`` only."""

    @abstractmethod
    def delete(self, keys: Sequence[str]) -> None:
        """Delete each; a missing one counts as deleted. Raises DeleteIncompleteError naming
        the keys that may still be there."""

    def settle(self, prefix: str) -> None:  # noqa: B027  # most stores have nothing to do
        """Make durable that the objects seen under ``prefix`` are there.

        On a local disk a name may be visible before its folder was synced; object stores have
        no such state.
        """

    def prune(self, prefix: str) -> None:  # noqa: B027  # most stores have no folders
        """Remove what is left below ``prefix`` when all its objects are deleted: empty folders."""


def sized(data: Data) -> int:
    """Length in bytes, for bytes and memoryviews alike."""
    return data.nbytes if isinstance(data, memoryview) else len(data)
