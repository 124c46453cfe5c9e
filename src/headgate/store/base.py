"""The Store seam: all that the WAL and the manifests ask of storage.

Owns: the contract. Does not own: retries (retry), what a taken name means (exact).

Keys are relative to the store's root: ASCII letters, digits and ``._-/``, never empty parts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headgate.errors import StoreError

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

    is_near = False
    """Is an answer quicker than a switch to another thread? Then objects are read one after another, many in one call."""

    def keys(self, prefix: str, *, start_after: str = "") -> Sequence[str]:
        """The keys that ``list`` would tell of, for those who look at each object anyway."""
        return [info.key for info in self.list(prefix, start_after=start_after)]

    def get_each(self, keys: Sequence[str], most_bytes: int) -> Sequence[memoryview | StoreError]:
        """Each object, or the error that ``get`` would raise, in order: at least one, and no more once they have ``most_bytes``."""
        found: list[memoryview | StoreError] = []
        for key in keys:
            try:
                data = self.get(key)
            except StoreError as error:
                found.append(error)
                continue
            found.append(data)
            most_bytes -= data.nbytes
            if most_bytes <= 0:
                break
        return found

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
