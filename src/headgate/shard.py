"""A shard: the unit of everything. One log, one chain of manifests, one live writer.

Owns: the handle. It holds no connection and no state, and pickles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import pyarrow as pa

from headgate.clock import SYSTEM_CLOCK, Clock
from headgate.columnar import Columnar, open_columnar
from headgate.config import ShardWriterConfig
from headgate.feed import Offset, change_schema, earliest, latest, plan, read
from headgate.indexes import check_indexes
from headgate.manifest import ManifestChain, ShardManifest, TableManifest
from headgate.manifest.model import AnyIndex
from headgate.quarantine import Quarantine
from headgate.schema import RowRules
from headgate.store import Location, RetryingStore, Store
from headgate.view import ShardReader
from headgate.wal.entry import Entry
from headgate.wal.log import ShardLog
from headgate.wal.tailer import WalTailer
from headgate.watch import SchemaWatch, open_watch
from headgate.writer import ShardWriter

_AT_ONCE_NEAR, _AT_ONCE_FAR = 4, 16
_PATIENCE = 0.005


@dataclass(frozen=True)
class Places:
    """Where a table and its WAL are, and how to open them."""

    table: Location
    wal: Location | None = None
    clock: Clock = field(default=SYSTEM_CLOCK, repr=False, compare=False)

    def table_store(self, *, fsync: bool = True) -> Store:
        return RetryingStore(self.table.open(fsync=fsync), self.clock)

    def wal_store(self, *, fsync: bool = True) -> Store:
        return RetryingStore((self.wal or self.table).open(fsync=fsync), self.clock)

    @property
    def wal_uri(self) -> str | None:
        """None when the WAL is beside the table."""
        return None if self.wal is None or self.wal.uri == self.table.uri else self.wal.uri

    @property
    def at_once(self) -> int:
        """How many shards are dealt with at the same time: few where answers come soon, since more threads only wait for each other."""
        return _AT_ONCE_NEAR if self._are_near else _AT_ONCE_FAR

    @property
    def patience(self) -> float | None:
        """How long a look at one shard may take before several are looked at at the same time (``map_ordered``). None: no time."""
        return _PATIENCE if self._are_near else None

    @property
    def _are_near(self) -> bool:
        """Are the stores such that answers come soon? A disk that is far away, too, is found out by patience."""
        return all(place is None or place.scheme in ("file", "memory") for place in (self.table, self.wal))

    def table_manifests(self, store: Store | None = None) -> ManifestChain[TableManifest]:
        return ManifestChain(store or self.table_store(), "table/", TableManifest, self.clock)

    def manifests(self, store: Store, shard: str, table_id: str) -> ManifestChain[ShardManifest]:
        return ManifestChain(store, f"shards/{shard}-{table_id}/manifest/", ShardManifest, self.clock)

    def columnar(self, *, fsync: bool = True) -> Columnar:
        return open_columnar(self.table, self.table_store(fsync=fsync), fsync=fsync)

    def open_log(self, shard: str, table_id: str, *, fsync: bool = True) -> ShardLog:
        manifests = self.manifests(self.table_store(fsync=fsync), shard, table_id)
        return ShardLog(table_id, shard, manifests, self.wal_store(fsync=fsync), self.wal_uri, self.clock)


def remember_wal_store(watch: SchemaWatch, places: Places) -> None:
    """All shards of a table write to this WAL store now: whoever opens the table without naming one gets it. Can be repeated."""
    if watch.manifest.wal_uri != places.wal_uri:
        watch.commit(lambda latest: latest.but(wal_uri=places.wal_uri) if latest.wal_uri != places.wal_uri else None)


@dataclass(frozen=True)
class Shard:
    """A shard of a table. ``id`` is "0000", "0001", …"""

    id: str
    table_id: str
    places: Places
    schema: pa.Schema = field(repr=False)
    key: tuple[str, ...] = ()
    field_ids: tuple[int, ...] = ()
    names_without_ids: tuple[str, ...] = ()
    indexes: tuple[AnyIndex, ...] = ()

    @classmethod
    def of(cls, id: str, places: Places, watch: SchemaWatch) -> Shard:
        """A shard of the table as a watch has it now; its handle and its writers look through that watch."""
        manifest, rules = watch.seen
        shard = cls(id, manifest.table_id, places, rules.schema, rules.key, rules.field_ids, manifest.names_without_ids, manifest.indexes)
        shard.__dict__.update(watch=watch, rules=rules)  # the cached properties below
        return shard

    @cached_property
    def rules(self) -> RowRules:
        """As of when this handle was made."""
        return RowRules(self.schema, self.key, self.field_ids, self.names_without_ids)

    @cached_property
    def watch(self) -> SchemaWatch:
        """The table as it is now: its writers learn through it of columns that were added, dropped or renamed."""
        return open_watch(self.places.table_manifests(), self.places.table.uri, self.places.clock, self.table_id)

    @cached_property
    def reader(self) -> ShardReader:
        """Views of this shard. What it has read is kept for the next one, as long as this handle lives."""
        return ShardReader(self.log, self.places.columnar(), lambda: self.rules)

    @cached_property
    def log(self) -> ShardLog:
        return self.places.open_log(self.id, self.table_id)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name not in ("rules", "log", "reader", "watch")}

    def writer(
        self,
        config: ShardWriterConfig | None = None,
        *,
        check: Callable[[ShardManifest], None] | None = None,
        writer_id: str | None = None,
    ) -> ShardWriter:
        """Claim the shard for writing. This writes, and fences whoever wrote before.

        Everything that can fail for a local reason is checked first, so a refused call leaves
        the incumbent alone.

        Args:
            check: asked in the commit of the claim, with the manifest as it is then; may raise to refuse.
            writer_id: how the manifest is to name it; a new one every time.
        """
        config = config or ShardWriterConfig()
        if config.index_configs:
            check_indexes(config.index_configs, self.watch.rules.schema)
        log = self.log if config.fsync else self.places.open_log(self.id, self.table_id, fsync=False)
        columnar = self.places.columnar(fsync=config.fsync) if config.enable_memtable else None
        quarantine = None
        if config.on_bad_rows == "quarantine":
            quarantine = Quarantine(self.places.table_store(fsync=config.fsync), self.places.clock, self.id)
        writer = ShardWriter(log, self.rules, config, columnar, self.watch, quarantine, split=check, writer_id=writer_id)
        if self.watch.manifest.shards == (self.id,):
            remember_wal_store(self.watch, self.places)
        return writer

    def tail(self, start: int | None = None, follow: bool = True) -> Iterator[Entry]:
        """The log's entries, from a position on; with ``follow`` it waits at the tip for more."""
        return WalTailer(self).read(start, follow)

    # -- its changes: for those who read shards beside each other, in any process

    @property
    def change_schema(self) -> pa.Schema:
        """Of the batches that ``read_changes`` gives."""
        return change_schema(self.rules)

    def earliest_offset(self) -> Offset:
        """From here on all changes are there."""
        return earliest(self.log.manifests.load())

    def latest_offset(self) -> Offset:
        """The end of the changes as of now."""
        return latest(self)

    def plan_changes(self, start: Offset, max_entries: int | None = None, max_bytes: int | None = None) -> Offset:
        """A later offset, up to which the order of changes is certain; ``start`` if there is nothing new. Writes nothing.

        Args:
            max_entries: at most so many entries and loads.
            max_bytes: about so much at most; one entry or load always fits.

        Raises:
            WalTruncatedError: what comes next was collected.
        """
        return plan(self, Offset(*start), max_entries, max_bytes)

    def read_changes(self, start: Offset, end: Offset) -> Iterator[pa.RecordBatch]:
        """What lies between two offsets that were planned: the same rows however often, wherever it is called. Writes nothing.

        Raises:
            WalTruncatedError: some of it was collected.
        """
        return (batch.rows for batch in read(self, Offset(*start), Offset(*end)))

    def outcome(self, epoch: int, position: int | None) -> Literal["durable", "void", "unknown"]:
        """What became of a put that ended in a FencedError: its ``epoch`` and ``position``.

        "durable": it is in the log. "void": it never happened. "unknown": the successor has not
        finished taking over; ask again.
        """
        if position is None:
            return "void"  # it was still queued: nothing was ever sent
        end = self.log.manifests.load().ends().end_of(epoch)
        if end is None:
            return "unknown"
        return "durable" if position < end else "void"
