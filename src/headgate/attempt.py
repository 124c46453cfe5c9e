"""Attempts: the right to write files that no manifest names yet.

Owns: registering, renewing and giving back. Does not own: what is written (flush numbers its own; compaction, loads).

Files come into being before the commit that names them. Collection must leave them alone until
then, and must be able to tell when nobody will name them any more. So whoever writes registers
first, with a lease; whoever commits checks, in that commit, that he still is registered; and
collection takes only the files of attempts that its own commit does not list. No clock decides:
an attempt whose lease is over is ended by a commit, and what comes after it fails.
"""

from __future__ import annotations

from headgate.errors import CommitConflictError
from headgate.manifest.model import AttemptRecord, ShardManifest
from headgate.wal.log import ShardLog


def register(log: ShardLog, id: str, owner: str, lease_seconds: float) -> None:
    """Before the first file. Can be repeated: then the lease is longer."""
    lease = AttemptRecord(owner=owner, expires_at=log.clock.now() + lease_seconds)
    log.manifests.commit(lambda manifest: manifest.but(attempts={**manifest.attempts, id: lease}))


def renew(log: ShardLog, id: str, lease_seconds: float) -> None:
    """A later end, if it is registered still.

    Raises:
        CommitConflictError: it is not; what was written may be gone.
    """

    def change(manifest: ShardManifest) -> ShardManifest:
        check_registered(log, manifest, id)
        lease = manifest.attempts[id].but(expires_at=log.clock.now() + lease_seconds)
        return manifest.but(attempts={**manifest.attempts, id: lease})

    log.manifests.commit(change)


def check_registered(log: ShardLog, manifest: ShardManifest, id: str) -> None:
    """Within the commit that names its files."""
    if id not in manifest.attempts:
        raise CommitConflictError(
            f"shard {log.shard}: the lease of attempt {id} is over, and what it wrote may have been collected", hint="begin again"
        )


def give_back(log: ShardLog, id: str) -> None:
    """Nothing more will be written or named: collection may have what is left."""
    log.manifests.commit(lambda m: without(m, id) if id in m.attempts else None)


def without(manifest: ShardManifest, id: str) -> ShardManifest:
    return manifest.but(attempts={other: record for other, record in manifest.attempts.items() if other != id})
