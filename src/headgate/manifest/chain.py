"""The chain of a manifest's versions: finding the latest, adding the next.

Owns: compare-and-swap over create-if-absent, and what to believe of its outcome.
Does not own: what changes (the callers' functions).

Two things look simpler and lose data:

Probing the next name for the latest version. t0 A knows version 5 · t1 others commit 6 to 9 ·
t2 collection deletes 5 to 8 · t3 A probes 6, finds nothing and believes that 5 is the latest,
for ever. So the latest is the highest name of a LIST, always.

Believing a create's reply. t0 A loads 5 and stalls · t1 others commit 6 and 7 · t2 collection
deletes 6 · t3 A creates 6 and is told that it succeeded: its change is in a version nobody
will read. So after a create, whatever its reply, the committer reads the latest and looks for
its own id in it or in its history.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from headgate.clock import Clock
from headgate.errors import (
    CommitConflictError,
    CorruptEntryError,
    DataLossError,
    NotFoundError,
    ObjectMissingError,
    OutcomeUnknownError,
    StoreUnavailableError,
)
from headgate.failpoint import failpoint
from headgate.manifest.document import decode_document, encode_document
from headgate.manifest.model import HISTORY_VERSIONS_MAX, Manifest
from headgate.meters import MANIFEST_COMMITS, MANIFEST_CONFLICTS
from headgate.store import RetryPolicy, Store, create_exactly

AnyManifest = TypeVar("AnyManifest", bound=Manifest)

_LOADS_MAX = 64
_COMMITS_MAX = 256
_CONFLICT_WAIT = RetryPolicy(retries=0, base_delay=0.002, max_delay=0.25)


class ManifestChain(Generic[AnyManifest]):
    """The versions below one folder. Safe for many threads."""

    def __init__(self, store: Store, folder: str, kind: type[AnyManifest], clock: Clock, policy: RetryPolicy | None = None) -> None:
        self._store, self._folder, self._kind, self._clock = store, folder, kind, clock
        self._policy = policy or RetryPolicy()
        self._latest: AnyManifest | None = None  # the highest version seen so far; only ever a lower bound
        self._proposed: tuple[bytes, AnyManifest | None] = (b"", None)  # what a commit under way has sent

    @property
    def folder(self) -> str:
        return self._folder

    @property
    def place(self) -> str:
        """Where the store is that it is in."""
        return self._store.uri

    @property
    def seen(self) -> AnyManifest | None:
        """The latest version that was read or committed here: nothing is asked. For those who watch."""
        return self._latest

    def key(self, version: int) -> str:
        return f"{self._folder}{version:020d}.json"

    def load(self) -> AnyManifest:
        """The latest version, found by LIST.

        Raises:
            NotFoundError: there is none.
        """
        for _ in range(_LOADS_MAX):
            version = self._highest_version()
            if version is None:
                raise NotFoundError(
                    f"nothing is at {self._store.uri}/{self._folder}", hint="check the URI; `headgate create` makes a table"
                )
            known = self._latest
            # Only the highest name of a listing is ever remembered, and that one is never
            # collected while it is the highest: the same number is the same object.
            if known is not None and known.version == version:
                return known
            try:
                found = self._read(version)
            except ObjectMissingError:  # collected between LIST and GET: a later one is there
                continue
            # Between LIST and GET it may have been collected and, by a late copy of somebody's
            # request, made again with other bytes. If it is still the highest, it never was collected.
            if self._highest_version() != version:
                continue
            self._remember(found)
            return found
        raise CommitConflictError(f"{self._folder} changes faster than it can be read", hint="try again")

    def _highest_version(self) -> int | None:
        start = self._latest.version - 1 if self._latest is not None else -1
        highest = None
        for info in self._store.list(self._folder, start_after=self.key(start) if start >= 0 else ""):
            name = info.key[len(self._folder) :]
            if len(name) == 25 and name.endswith(".json") and name[:20].isdigit():
                highest = int(name[:20])
        return highest

    def versions(self) -> list[int]:
        """All that are there, readable or not, oldest first. For those who look for damage."""
        names = (info.key[len(self._folder) :] for info in self._store.list(self._folder))
        return [int(name[:20]) for name in names if len(name) == 25 and name.endswith(".json") and name[:20].isdigit()]

    def restore(self, good: AnyManifest, damaged: int) -> bool:
        """Go on with ``good`` after a latest version, ``damaged``, that nobody can read. False: somebody else was faster.

        As long as the latest cannot be read nobody can commit, so there is nobody to race with but another repair. The ids
        of the versions between are not known: whoever committed one of them learns that it did not happen, and does it again.
        """
        unknown = ("unreadable",) * (damaged - good.version)
        proposal = good.but(version=damaged + 1, id=self._clock.token(), history=(*good.history, good.id, *unknown)[-HISTORY_VERSIONS_MAX:])
        return create_exactly(self._store, self.key(proposal.version), encode_document(proposal), self._clock, self._policy) is None

    def _read(self, version: int) -> AnyManifest:
        key = self.key(version)
        data, (mine, proposal) = self._store.get(key), self._proposed
        if proposal is not None and proposal.version == version and bytes(data) == mine:
            return proposal  # byte for byte what was sent: nothing else is to be found in it
        found = decode_document(data, self._kind, key)
        if found.version != version:
            raise CorruptEntryError(f"{key} holds version {found.version}", object=key)
        if found.folder not in (None, self._folder):
            raise CorruptEntryError(f"{key} holds a manifest of {found.folder}", object=key)
        return found

    def at(self, version: int) -> AnyManifest:
        """One version, which something pins.

        Raises:
            ObjectMissingError: it was collected.
        """
        return self._read(version)

    def _remember(self, found: AnyManifest) -> None:
        if self._latest is None or found.version > self._latest.version:
            self._latest = found

    def create_first(self, first: AnyManifest) -> bool:
        """Create version 0 of a chain that has none. False: somebody else's stands there."""
        occupant = create_exactly(self._store, self.key(0), encode_document(first), self._clock, self._policy)
        return occupant is None

    def commit(self, change: Callable[[AnyManifest], AnyManifest | None]) -> AnyManifest:
        """Apply ``change`` to the latest version, and make the result the latest.

        ``change`` is called once per try, may raise to refuse, returns None when there is
        nothing to do, and must be written so that applying it twice is applying it once.

        Raises:
            CommitConflictError: others were faster, 256 times.
            OutcomeUnknownError: the change may or may not have been made.
        """
        for attempt in range(_COMMITS_MAX):
            current = self.load()
            changed = change(current)
            if changed is None:
                return current
            proposal = changed.but(
                version=current.version + 1,
                id=self._clock.token(),
                history=(*current.history, current.id)[-HISTORY_VERSIONS_MAX:],
            )
            if (wrong := proposal.contradiction()) is not None:  # nobody could read it: better no change than that
                raise DataLossError(
                    f"{self.place} was not changed, because it would contradict itself: {wrong}", object=self.key(proposal.version)
                )
            failpoint("commit.loaded")
            if self._create(proposal):
                MANIFEST_COMMITS.add(1, self.place)
                return proposal
            MANIFEST_CONFLICTS.add(1, self.place)
            self._clock.sleep(_CONFLICT_WAIT.delay(attempt, self._clock))
        raise CommitConflictError(f"{self._folder}: {_COMMITS_MAX} commits in a row were overtaken", hint="try again")

    def _create(self, proposal: AnyManifest) -> bool:
        """Create one version and find out, by reading, whether it was a commit."""
        unavailable: StoreUnavailableError | None = None
        data = encode_document(proposal)
        self._proposed = (data, proposal)
        try:
            create_exactly(self._store, self.key(proposal.version), data, self._clock, self._policy)
        except StoreUnavailableError as error:
            unavailable = error
        failpoint("commit.created")
        try:
            latest = self.load()
        except StoreUnavailableError as error:
            raise self._unknown(proposal, str(error)) from error
        finally:
            self._proposed = (b"", None)
        happened = contains(latest, proposal)
        if happened is None:
            if unavailable is not None and latest.version < proposal.version:
                raise self._unknown(proposal, str(unavailable)) from unavailable
            raise self._unknown(proposal, f"version {latest.version} no longer names it")
        return happened

    def _unknown(self, proposal: AnyManifest, why: str) -> OutcomeUnknownError:
        return OutcomeUnknownError(
            f"whether {self.key(proposal.version)} was committed is unknown: {why}",
            hint="read the state (`headgate status`) before doing it again",
        )


def contains(latest: Manifest, proposal: Manifest) -> bool | None:
    """Is ``proposal`` among the versions that led to ``latest``? None: it cannot be known."""
    if latest.version == proposal.version:
        return latest.id == proposal.id
    if latest.version < proposal.version:
        return None
    back = latest.version - proposal.version
    if back > len(latest.history):
        return None
    return latest.history[-back] == proposal.id
