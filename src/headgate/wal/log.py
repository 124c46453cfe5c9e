"""One shard's log: its manifests, its WAL store and its clock, held together.

Owns: nothing but the references. Everything in this folder works on a ``ShardLog``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headgate.clock import Clock
from headgate.manifest import ManifestChain, ShardManifest
from headgate.store import RetryPolicy, Store
from headgate.wal.space import WalSpace


@dataclass(frozen=True)
class ShardLog:
    """What is needed to read or write the log of one shard."""

    table_id: str
    shard: str
    manifests: ManifestChain[ShardManifest]
    wal_store: Store
    wal_uri: str | None
    """None when the WAL is beside the table."""
    clock: Clock
    policy: RetryPolicy = field(default_factory=RetryPolicy)
    wals_seen: set[str] = field(default_factory=set, repr=False, compare=False)
    """Ids of WALs whose marker was seen in ``wal_store``."""

    def space(self, manifest: ShardManifest) -> WalSpace:
        """The names of the WAL that a manifest speaks of."""
        return WalSpace(self.wal_store, manifest.wal.id, self.table_id, self.shard)
