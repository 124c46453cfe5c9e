"""Bulk loads: many rows, written as runs by any number of processes, and brought in at once.

Owns: rows into files, shard by shard, in bounded memory, and the handle that travels between
processes. Does not own: how the files come in (transaction, load), the shards' rules (sharding).

    load = table.bulk_load(app="backfill", version=1)       # registers an attempt in every shard
    files = [load.write(batches) for … in any process]      # runs that nobody sees yet
    load.commit(files)                                      # all of them, in every shard, once

No log, no claim: a live writer is not fenced, and does not notice but for the rows. What a load
brings is newer than everything that was durable when it was committed. Rows of one load have no
order among processes; within one ``write`` the last row of a key counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from headgate.attempt import give_back, register, renew
from headgate.bulk_files import OP, MarkedRows, RunFiles, batches_of, join
from headgate.clock import map_ordered
from headgate.errors import CommitConflictError, InvalidInputError
from headgate.failpoint import failpoint
from headgate.manifest.model import RunRecord, ShardingRule
from headgate.new_shards import add_shards
from headgate.quarantine import Quarantine
from headgate.schema import RowRules
from headgate.shard import Places
from headgate.sharding import split_rows
from headgate.transaction import ONCE, Transactions
from headgate.wal.entry import Op
from headgate.wal.log import ShardLog
from headgate.watch import SchemaWatch, open_watch

LEASE_SECONDS = 86_400.0
MEMORY_BYTES = 256 << 20
_SHARDS_AT_ONCE = 8

BadRows = Literal["fail", "quarantine"]


@dataclass(frozen=True)
class LoadedFiles:
    """What one ``write`` made: small, and nothing but names and numbers."""

    runs: dict[str, tuple[str, ...]]
    """Shard -> its runs, as JSON, oldest first."""
    rows: int = 0
    bytes: int = 0
    quarantined_rows: int = 0


@dataclass(frozen=True)
class LoadReport:
    """What a load brought in."""

    app: str
    version: int
    committed: bool
    """False: this version was there already, and nothing was done."""
    rows: int
    bytes: int
    runs: dict[str, int] = field(default_factory=dict)
    """Shard -> how many runs it got."""
    quarantined_rows: int = 0


@dataclass(frozen=True)
class BulkLoad:
    """A load in the making. Pickles, so that others can write for it."""

    places: Places
    table_id: str
    attempt: str
    app: str
    version: int
    query: str | None = None
    on_bad_rows: BadRows = "fail"
    max_memory: int = MEMORY_BYTES
    fsync: bool = True

    # -- writing

    def write(self, batches: Any, op: Op = "upsert") -> LoadedFiles:
        """Write rows as runs that nobody sees yet, each in its shard. In any process, as often as needed.

        Args:
            batches: Arrow batches, or anything that becomes one; columns are matched by name. A column ``_op`` says
                "upsert" or "delete" row by row.
            op: what rows without it do.

        Raises:
            SchemaMismatchError, InvalidInputError: a row that the table cannot take; nothing of it counts.
        """
        watch = self._watch()
        routes = _Routes(self, watch)
        quarantine = Quarantine(self.places.table_store(fsync=self.fsync), self.places.clock) if self.on_bad_rows == "quarantine" else None
        files = RunFiles(watch.latest(force=True), self.places.columnar(fsync=self.fsync), self._fresh_folder, self.max_memory, quarantine)
        for batch in batches_of(batches):
            if batch.num_rows:
                for put in files.fitted(batch, op):
                    for shard, rows in routes.split(files.rules, put):
                        files.take(shard, rows)
        runs = files.finish()
        return LoadedFiles(
            runs={shard: tuple(run.model_dump_json() for run in some) for shard, some in runs.items()},
            rows=files.num_rows,
            bytes=sum(run.bytes for some in runs.values() for run in some),
            quarantined_rows=files.quarantined_rows,
        )

    def _fresh_folder(self, shard: str) -> str:
        """A name for every run: what one try left behind is never taken for another's (C09)."""
        return f"shards/{shard}-{self.table_id}/runs/{self.attempt}-{self.places.clock.token()}"

    # -- ends

    def commit(self, files: Sequence[LoadedFiles]) -> LoadReport:
        """Bring in what was written: in all shards, or in none, and once for (app, version), whoever repeats it.

        Raises:
            TransactionConflictError: a lower version than the last one, or another query's; nothing was brought in.
            CommitConflictError: the table was split since, or the lease is over; nothing was brought in. Load again.
        """
        watch = self._watch()
        rules, shards = watch.latest(force=True), list(watch.manifest.shards)
        runs: dict[str, list[RunRecord]] = {}
        for part in files:
            for shard, written in part.runs.items():
                runs.setdefault(shard, []).extend(RunRecord.model_validate_json(text) for text in written)
        gone = sorted(set(runs) - set(shards))
        if gone:
            raise CommitConflictError(f"the table has no shard {gone[0]} any more", hint="it was split while this was written; load again")
        columnar = self.places.columnar(fsync=self.fsync)
        joined = {shard: join(some, rules, columnar) for shard, some in runs.items()}
        failpoint("bulk.joined")
        committed = self._transactions().commit(shards, self.app, self.version, self.query, joined, self.attempt)
        return LoadReport(
            app=self.app,
            version=self.version,
            committed=committed,
            rows=sum(part.rows for part in files),
            bytes=sum(part.bytes for part in files),
            runs={shard: len(some) for shard, some in joined.items()} if committed else {},
            quarantined_rows=sum(part.quarantined_rows for part in files),
        )

    def is_committed(self) -> bool:
        """Is this version there already? What was left half done is finished.

        Raises:
            TransactionConflictError: it can never be committed.
        """
        watch = self._watch()
        return self._transactions().check(list(watch.refresh().shards), self.app, self.version, self.query)

    def abort(self) -> None:
        """Nothing more will be written or committed under this attempt. What was named by a manifest or an intent stays."""
        self._each(lambda shard: give_back(self._log(shard), self.attempt))

    def register(self, lease_seconds: float = LEASE_SECONDS) -> None:
        """Before the first file; again, for a longer lease."""
        self._each(lambda shard: register(self._log(shard), self.attempt, f"load of {self.app}", lease_seconds))

    def renew(self, lease_seconds: float = LEASE_SECONDS) -> None:
        """A longer lease. Raises CommitConflictError if it is over."""
        self._each(lambda shard: renew(self._log(shard), self.attempt, lease_seconds))

    def _each(self, act: Callable[[str], None]) -> None:
        list(map_ordered(self.places.clock, act, list(self._watch().manifest.shards), parallel=_SHARDS_AT_ONCE))

    def _watch(self) -> SchemaWatch:
        return open_watch(self.places.table_manifests(), self.places.table.uri, self.places.clock, self.table_id)

    def _log(self, shard: str) -> ShardLog:
        return self.places.open_log(shard, self.table_id, fsync=self.fsync)

    def _transactions(self) -> Transactions:
        return Transactions(self.places.table_store(fsync=self.fsync), self.places.clock, self._log)


def begin_load(
    places: Places,
    watch: SchemaWatch,
    app: str | None,
    version: int | None,
    query: str | None,
    on_bad_rows: BadRows,
    lease_seconds: float,
    max_memory: int,
) -> BulkLoad:
    """Check, then register an attempt in every shard."""
    if app is None:
        if version is not None:
            raise InvalidInputError(f"version {version} of no application", hint="give app and version, or neither")
        app, version = f"{ONCE}{places.clock.token()}", 0
    elif not isinstance(app, str) or not app or len(app) > 256 or app.startswith(ONCE):
        raise InvalidInputError(f"app is {app!r}", hint=f"a name of 1 to 256 characters that does not begin with {ONCE!r}")
    if isinstance(version, bool) or not isinstance(version, int) or version < 0:
        raise InvalidInputError(f"version is {version!r}", hint="a whole number from 0; each load of an app has a higher one")
    if on_bad_rows not in ("fail", "quarantine"):
        raise InvalidInputError(f"on_bad_rows is {on_bad_rows!r}", hint='"fail" or "quarantine"')
    manifest = watch.refresh()
    load = BulkLoad(places, manifest.table_id, f"l{places.clock.token()}", app, version, query, on_bad_rows, max_memory)
    load.register(lease_seconds)
    return load


class _Routes:
    """Which shard a row belongs to; identity shards are made when they are first needed."""

    def __init__(self, load: BulkLoad, watch: SchemaWatch) -> None:
        self._load, self._watch = load, watch
        manifest = watch.manifest
        self._rule = manifest.sharding
        self._ready = set(manifest.shards)
        self._column = None
        if self._rule.column is not None:
            self._column = watch.rules.field_ids[watch.rules.schema.get_field_index(self._rule.column)]

    def _now(self, rules: RowRules) -> ShardingRule:
        if self._column is None:
            return self._rule
        return self._rule.but(column=rules.schema.names[rules.field_ids.index(self._column)])

    def split(self, rules: RowRules, put: MarkedRows) -> Iterator[tuple[str, MarkedRows]]:
        rows = put.rows
        if put.deleted is not None:  # the mark goes along, as one more column
            rows = rows.append_column(OP, pa.array(put.deleted))
        for part in split_rows(self._now(rules), rows):
            if part.shard not in self._ready:
                add_shards(self._watch, self._load.places, {part.shard: part.value})
                register(self._load._log(part.shard), self._load.attempt, f"load of {self._load.app}", LEASE_SECONDS)
                self._ready.add(part.shard)
            if put.deleted is None:
                yield part.shard, MarkedRows(part.rows, None)
            else:
                marks = np.asarray(part.rows.column(OP).to_numpy(zero_copy_only=False))
                yield part.shard, MarkedRows(part.rows.drop_columns([OP]), marks if marks.any() else None)
