"""Attempts: the right to write files that no manifest names yet.

Owns: registering, renewing and giving back. Does not own: what is written (flush numbers its own; compaction, loads).

Files come into being before the commit that names them. Collection must leave them alone until
then, and must be able to tell when nobody will name them any more. So whoever writes registers
first, with a lease; whoever commits checks, in that commit, that he still is registered; and
collection takes only the files of attempts that its own commit does not list. No clock decides:
an attempt whose lease is over is ended by a commit, and what comes after it fails.
"""

from __future__ import annotations

from collections.abc import Iterable

from headgate.errors import CommitConflictError
from headgate.manifest.model import AttemptRecord, RunRecord, ShardManifest
from headgate.wal.log import ShardLog


def register(log: ShardLog, id: str, owner: str, lease_seconds: float) -> None:
    """Before the first file. Can be repeated: then the lease is longer."""
    lease = AttemptRecord(owner=owner, expires_at=log.clock.now() + lease_seconds)
    log.manifests.commit(lambda manifest: manifest.but(attempts={**manifest.attempts, id: lease}))


def join(log: ShardLog, name: str, owner: str, lease_seconds: float) -> str:
    """Take part in what many processes write under one name: the id of its registration, made if there is none.

    t0 A registers a name and writes · t1 the lease is over, and collection takes A's files · t2 B registers the same name ·
    t3 A's files are committed. With one id they would pass for files of B's registration. So each registration has its own.
    """
    fresh = found = f"{name}.{log.clock.token()}"
    until = log.clock.now() + lease_seconds

    def change(manifest: ShardManifest) -> ShardManifest:
        nonlocal found
        found = next((id for id in manifest.attempts if is_named(id, name)), fresh)
        known = manifest.attempts.get(found)
        lease = AttemptRecord(owner=owner, expires_at=until if known is None else max(until, known.expires_at))
        return manifest.but(attempts={**manifest.attempts, found: lease})

    log.manifests.commit(change)
    return found


def is_named(id: str, name: str) -> bool:
    """Is it a registration of this name?"""
    return id == name or id.startswith(f"{name}.")


def written_under(load: Iterable[RunRecord]) -> set[str]:
    """The attempts that the files of runs were written under: their folders say so."""
    return {part.path.rsplit("/", 2)[-2].rsplit("-", 1)[0] for run in load for part in run.slices}


def renew(log: ShardLog, id: str, lease_seconds: float) -> None:
    """A later end, if it is registered still: an id, or whatever is registered by a name.

    Raises:
        CommitConflictError: it is not; what was written may be gone.
    """

    def change(manifest: ShardManifest) -> ShardManifest:
        found = [known for known in manifest.attempts if is_named(known, id)]
        for known in found or [id]:
            check_registered(log, manifest, known)
        until = log.clock.now() + lease_seconds
        return manifest.but(attempts={**manifest.attempts, **{known: manifest.attempts[known].but(expires_at=until) for known in found}})

    log.manifests.commit(change)


def check_registered(log: ShardLog, manifest: ShardManifest, id: str) -> None:
    """Within the commit that names its files."""
    if id not in manifest.attempts:
        raise CommitConflictError(
            f"shard {log.shard}: the lease of attempt {id} is over, and what it wrote may have been collected", hint="begin again"
        )


def give_back(log: ShardLog, id: str) -> None:
    """Nothing more will be written or named: collection may have what is left."""
    log.manifests.commit(lambda m: without(m, id) if any(is_named(known, id) for known in m.attempts) else None)


def without(manifest: ShardManifest, id: str) -> ShardManifest:
    return manifest.but(attempts={other: record for other, record in manifest.attempts.items() if not is_named(other, id)})
