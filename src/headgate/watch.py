"""What a table is now, for those who hold it open: handles, readers and live writers.

Owns: the table's manifest as last seen, the rules for rows that follow from it, and when to look
again. Does not own: changing it (life), the rules themselves (schema).

One watch belongs to a table handle and to all its shards and writers, so a thousand writers that
look every second cost one LIST a second. A change that is made in this process is told to every
watch of the table at once. Others learn of it when they look: t0 another process drops a column
and adds one of the same name · t1 a writer here has not looked since, and takes a row · the row's
value belongs to the dropped column, and the new one is null in it. By then the writer was at most
a tick behind; whoever cannot have that waits a tick between dropping and adding.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from headgate.clock import SYSTEM_CLOCK, Clock
from headgate.errors import NotFoundError, SchemaMismatchError
from headgate.manifest import ManifestChain, TableManifest
from headgate.schema import RowRules, decode_schema, one_batch

_LOOK_SECONDS = 1.0
_watches: weakref.WeakSet[SchemaWatch] = weakref.WeakSet()
_watches_lock = SYSTEM_CLOCK.lock()


def rules_of(manifest: TableManifest) -> RowRules:
    """What rows of a table may look like."""
    return RowRules(decode_schema(manifest.arrow_schema), manifest.key, manifest.field_ids, manifest.names_without_ids)


def open_watch(chain: ManifestChain[TableManifest], place: str, clock: Clock, table_id: str) -> SchemaWatch:
    """A watch of a table of which only the id is known. Reads its manifest."""
    manifest = chain.load()
    if manifest.table_id != table_id:
        raise _dropped(place)
    watch = SchemaWatch(chain, place, clock, manifest)
    watch.check(manifest)
    return watch


def _dropped(place: str) -> NotFoundError:
    return NotFoundError(f"the table at {place} was dropped", hint="open_table opens what is there now, if anything is")


class SchemaWatch:
    """A table's manifest as last seen. Safe for many threads.

    Args:
        place: where the table is; watches of one place and one table tell each other.
        manifest: what was seen already, if anything was.
    """

    def __init__(self, chain: ManifestChain[TableManifest], place: str, clock: Clock, manifest: TableManifest) -> None:
        self.chain, self._place, self._clock = chain, place, clock
        self._lock = clock.lock()
        self.seen = manifest, rules_of(manifest)
        """The manifest and its rules, of one moment."""
        self._looked_at = clock.monotonic()
        with _watches_lock:
            _watches.add(self)

    @property
    def manifest(self) -> TableManifest:
        """As last seen."""
        return self.seen[0]

    @property
    def rules(self) -> RowRules:
        """As last seen; the same object as long as nothing changed that rows could tell."""
        return self.seen[1]

    def latest(self, *, force: bool = False) -> RowRules:
        """The rules of now; looked up by one LIST if the last look was a second ago, or with ``force`` at once.

        Raises:
            NotFoundError: the table was dropped.
        """
        if force or self._clock.monotonic() - self._looked_at >= _LOOK_SECONDS:
            self.refresh()
        return self.rules

    def refresh(self) -> TableManifest:
        """Look now."""
        self._looked_at = self._clock.monotonic()
        found = self.chain.load()
        self.check(found)
        self._take(found)
        return self.manifest

    def commit(self, change: Callable[[TableManifest], TableManifest | None]) -> TableManifest:
        """Change the table by one commit on its latest manifest, and tell every watch in this process."""

        def checked(manifest: TableManifest) -> TableManifest | None:
            self.check(manifest)
            return change(manifest)

        committed = self.chain.commit(checked)
        with _watches_lock:
            watches = list(_watches)
        for watch in watches:
            if watch._place == self._place and watch.manifest.table_id == committed.table_id:
                watch._take(committed)
        return committed

    def assume(self, found: TableManifest) -> None:
        """What the version that was last seen comes to with something that is decided and not in it yet. The next version says it."""
        with self._lock:
            if found.version == self.seen[0].version:
                self.seen = found, self.seen[1]

    def check(self, found: TableManifest) -> None:
        """Is it still the table that this watch is of?"""
        if found.state in ("dropping", "dropped") or found.table_id != self.manifest.table_id:
            raise _dropped(self._place)

    def _take(self, found: TableManifest) -> None:
        with self._lock:
            manifest, rules = self.seen
            if found.version <= manifest.version:
                return
            self.seen = found, rules if _same_rows(manifest, found) else rules_of(found)

    # -- rows

    def upsert(self, data: Any) -> tuple[RowRules, pa.RecordBatch]:
        """Rows to put, as they are, and the rules that they keep to. What does not fit is tried once more against the latest table."""
        return self._fitted(data, RowRules.checked)

    def delete(self, keys: Any) -> tuple[RowRules, pa.RecordBatch]:
        """The same for keys to delete."""
        return self._fitted(keys, RowRules.delete)

    def _fitted(self, data: Any, fit: Callable[[RowRules, Any], pa.RecordBatch]) -> tuple[RowRules, pa.RecordBatch]:
        rules = self.rules
        if type(data) is not pa.RecordBatch and not isinstance(data, list | tuple):
            data = one_batch(data, rules.schema)  # a stream can be read once only
        try:
            return rules, fit(rules, data)
        except SchemaMismatchError:
            latest = self.latest(force=True)
            if latest is rules:
                raise
        return latest, fit(latest, data)


def _same_rows(one: TableManifest, two: TableManifest) -> bool:
    return (one.arrow_schema, one.key, one.field_ids, one.names_without_ids) == (
        two.arrow_schema,
        two.key,
        two.field_ids,
        two.names_without_ids,
    )
