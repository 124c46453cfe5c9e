"""Bulk loads: many rows, written as runs by any number of processes, and brought in at once.

Owns: rows into files, shard by shard, in bounded memory, and the handle that travels between
processes. Does not own: how the files come in (transaction, load), the shards' rules (sharding).

    load = table.bulk_load(app="backfill", version=1)       # registers an attempt in every shard
    files = [load.write(batches) for … in any process]      # runs that nobody sees yet
    load.commit(files)                                      # all of them, in every shard, once

No log, no claim: a live writer is not fenced, and does not notice but for the rows. What a load
brings is newer than everything that was durable when it was committed. Rows of one load have no
order among processes; within one ``write`` the last row of a key counts.

Loads that come often, such as those of a stream, share an attempt: it has a new name every day, is
registered in a shard by whoever first writes there, and is not given back. So most loads register
nothing, and what dead tasks of a stream left behind can still be collected, days later.

A shard may be split while a load is made. t0 a task writes rows of shard A · t1 A is split into B and C ·
t2 the commit finds no A. Nobody can announce anything in A any more, so the committer reads back what
was written for A, and writes it again, for B and C. t1 between two announcements: B refuses, all that
was announced is withdrawn, and it goes on as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from headgate.attempt import give_back, register, renew
from headgate.attempt import join as join_attempt
from headgate.bulk_files import OP, Fit, MarkedRows, RunFiles, batches_of, gathered, join, read_back
from headgate.clock import SYSTEM_CLOCK, map_ordered
from headgate.config import check_memory
from headgate.errors import CommitConflictError, InvalidInputError, ObjectMissingError
from headgate.failpoint import failpoint
from headgate.manifest.model import RunRecord, ShardingRule
from headgate.new_shards import add_shards
from headgate.quarantine import Quarantine
from headgate.retired import publish
from headgate.schema import RowRules
from headgate.shard import Places
from headgate.sharding import split_rows
from headgate.transaction import ONCE, Transactions, attempt_owner
from headgate.wal.entry import Op
from headgate.wal.log import ShardLog
from headgate.watch import SchemaWatch, open_watch

LEASE_SECONDS = 86_400.0
MEMORY_BYTES = 256 << 20
_OFTEN_LEASE_SECONDS = 3 * 86_400.0
_OFTEN_SECONDS = 86_400.0
_REGISTERED_SECONDS = 3600.0
_SHARDS_AT_ONCE = 8
_SPLITS_MAX = 8
_SPLIT_SECONDS = 60.0
_SPLIT_POLL_SECONDS = 0.05
_ROOMS_MAX = 4

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
    shards: tuple[str, ...] = ()
    """Where the attempt was registered when it began; elsewhere whoever writes there first does it."""
    lease_seconds: float = LEASE_SECONDS
    often: bool = False

    def __getstate__(self) -> dict[str, object]:
        return {part.name: getattr(self, part.name) for part in fields(self)}

    # -- writing

    def write(self, batches: Any, op: Op = "upsert", fit: Fit | None = None) -> LoadedFiles:
        """Write rows as runs that nobody sees yet, each in its shard. In any process, as often as needed.

        Args:
            batches: Arrow batches, or anything that becomes one; columns are matched by name. A column ``_op`` says
                "upsert" or "delete" row by row.
            op: what rows without it do.
            fit: makes of each batch, with the table's schema and key, one that fits it, and one of bad rows with their reasons.

        Raises:
            SchemaMismatchError, InvalidInputError: a row that the table cannot take; nothing of it counts.
        """
        watch = self._rooms.watch()
        routes = _Routes(self, watch)
        quarantine = Quarantine(self._rooms.store, self.places.clock) if self.on_bad_rows == "quarantine" else None
        # Named by whose it is and which, so that a task that is run again does not keep the same rows again.
        name = None if self.app.startswith(ONCE) else (self.app, self.version)
        files = RunFiles(
            watch.rules, self.places.columnar(fsync=self.fsync), self._fresh_folder, self.max_memory, quarantine, self.places.clock, name
        )
        for batch in gathered(batches_of(batches)):
            fitting: pa.RecordBatch | None = batch
            if fit is not None:
                fitting, bad = fit(batch, files.rules.schema, files.rules.key)
                files.keep_aside(bad)
            if fitting is not None and fitting.num_rows:
                for put in files.fitted(fitting, op):
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
        return f"shards/{shard}-{self.table_id}/runs/{self.ensure_registered(shard)}-{self.places.clock.token()}"

    # -- ends

    def commit(self, files: Sequence[LoadedFiles]) -> LoadReport:
        """Bring in what was written: in all shards, or in none, and once for (app, version), whoever repeats it.

        Raises:
            TransactionConflictError: a lower version than the last one, or another query's; nothing was brought in.
            CommitConflictError: the lease is over, or a split does not end; nothing was brought in. Load again.
            BackpressureTimeoutError: a shard has too many runs; nothing was brought in.
        """
        runs: dict[str, list[RunRecord]] = {}
        for part in files:
            for shard, written in part.runs.items():
                runs.setdefault(shard, []).extend(RunRecord.model_validate_json(text) for text in written)
        for some in runs.values():
            if len({run.id for run in some}) < len(some):
                raise InvalidInputError("the files of one write were given twice", hint="pass what each write() returned, once")
        columnar = self.places.columnar(fsync=self.fsync)
        for _ in range(_SPLITS_MAX):
            watch = self._rooms.watch()
            shards = list(watch.manifest.shards)
            if gone := sorted(set(runs) - set(shards)):
                runs = self._rerouted(runs, gone)  # P14
                failpoint("bulk.rerouted")
                continue
            joined = {shard: join(some, watch.rules, columnar) for shard, some in runs.items()}
            failpoint("bulk.joined")
            try:
                committed = self._transactions().commit(shards, self.app, self.version, self.query, joined, self.attempt)
            except CommitConflictError:
                if not self._split_went_by(shards):
                    self._rooms.registered.clear()  # the lease may be over: the next attempt registers anew
                    raise
                continue
            return LoadReport(
                app=self.app,
                version=self.version,
                committed=committed,
                rows=sum(part.rows for part in files),
                bytes=sum(part.bytes for part in files),
                runs={shard: len(some) for shard, some in joined.items()} if committed else {},
                quarantined_rows=sum(part.quarantined_rows for part in files),
            )
        raise CommitConflictError(f"shards were split {_SPLITS_MAX} times while {self.app!r} was committed", hint="load again")

    def _rerouted(self, runs: Mapping[str, Sequence[RunRecord]], gone: Sequence[str]) -> dict[str, list[RunRecord]]:
        """What was written for shards that are no more, written again for those that have their rows now."""
        found = {shard: list(some) for shard, some in runs.items() if shard not in gone}
        columnar, rules = self.places.columnar(fsync=self.fsync), self._rooms.watch().rules
        for shard in gone:
            try:
                written = self.write(batch for run in runs[shard] for batch in read_back(run, rules, columnar))
            except ObjectMissingError as error:
                raise CommitConflictError(
                    f"shard {shard} was split, and what was written for it is gone: {error}", hint="nothing was brought in; load again"
                ) from error
            for other, texts in written.runs.items():
                found.setdefault(other, []).extend(RunRecord.model_validate_json(text) for text in texts)
        return found

    def _split_went_by(self, shards: Sequence[str]) -> bool:
        """Was it because of a split? Then wait until it is over, one way or the other."""
        rooms, clock = self._rooms, self.places.clock
        if list(rooms.watch().manifest.shards) != list(shards):
            return True
        split = [shard for shard in shards if rooms.log(shard).manifests.load().state != "active"]
        until = clock.monotonic() + _SPLIT_SECONDS
        while split and clock.monotonic() < until:
            for shard in split:
                found = rooms.log(shard).manifests.load()
                if found.state == "retired":  # it is decided: if nobody has told the table, we do
                    publish(rooms.watch(), found)
            if list(rooms.watch().manifest.shards) != list(shards):
                return True
            if all(rooms.log(shard).manifests.load().state == "active" for shard in split):
                return True
            clock.sleep(_SPLIT_POLL_SECONDS)
        return False

    def is_committed(self) -> bool:
        """Is this version there already? What was left half done is finished.

        Raises:
            TransactionConflictError: it can never be committed.
        """
        return self._transactions().check(list(self._rooms.watch().manifest.shards), self.app, self.version, self.query)

    def abort(self) -> None:
        """Nothing more will be written or committed under this attempt. What was named by a manifest or an intent stays."""
        if not self.often:
            self._each(lambda shard: give_back(self._rooms.log(shard), self.attempt))

    def renew(self, lease_seconds: float = LEASE_SECONDS) -> None:
        """A longer lease. Raises CommitConflictError if it is over."""

        def one(shard: str) -> None:
            try:
                renew(self._rooms.log(shard), self.attempt, lease_seconds)
            except CommitConflictError:
                if shard in self.shards:
                    raise  # else nobody has written there yet

        self._each(one)

    def ensure_registered(self, shard: str) -> str:
        """Before the first file in a shard: the id to write under. What this process has seen registered is believed for a while."""
        if shard in self.shards:
            return self.attempt
        known, now = self._rooms.registered, self.places.clock.monotonic()
        id, until = known.get((self.attempt, shard), ("", now))
        if until <= now:
            owner = "streams" if self.often else attempt_owner(self.app)
            id = join_attempt(self._rooms.log(shard), self.attempt, owner, self.lease_seconds)
            known[self.attempt, shard] = id, now + _REGISTERED_SECONDS
        return id

    def _each(self, act: Callable[[str], None]) -> None:
        list(map_ordered(self.places.clock, act, list(self._rooms.watch().manifest.shards), parallel=_SHARDS_AT_ONCE))

    @cached_property
    def _rooms(self) -> _Rooms:
        if not self.often or type(self.places.clock) is not type(SYSTEM_CLOCK):
            return _Rooms(self.places, self.table_id, self.fsync)
        wanted = (self.places, self.table_id, self.fsync)
        with _kept_lock:
            for known, rooms in _kept:
                if known == wanted:
                    return rooms
            _kept.append((wanted, _Rooms(*wanted)))
            del _kept[:-_ROOMS_MAX]
            return _kept[-1][1]

    def _transactions(self) -> Transactions:
        return Transactions(self._rooms.store, self.places.clock, self._rooms.log)


class _Rooms:
    """What is open of a table. Loads that come often share it: manifests that were read are not read again."""

    def __init__(self, places: Places, table_id: str, fsync: bool) -> None:
        self._places, self._table_id, self._fsync = places, table_id, fsync
        self.store = places.table_store(fsync=fsync)
        self.registered: dict[tuple[str, str], tuple[str, float]] = {}
        """(attempt, shard) -> the id that it is registered by there, and until when that is believed."""
        self._logs: dict[str, ShardLog] = {}
        self._watch: SchemaWatch | None = None

    def watch(self) -> SchemaWatch:
        """The table as of now."""
        if self._watch is None:
            self._watch = open_watch(self._places.table_manifests(self.store), self._places.table.uri, self._places.clock, self._table_id)
        else:
            self._watch.refresh()
        return self._watch

    def log(self, shard: str) -> ShardLog:
        found = self._logs.get(shard)
        if found is None:
            found = self._logs[shard] = self._places.open_log(shard, self._table_id, fsync=self._fsync)
        return found


_kept: list[tuple[tuple[Places, str, bool], _Rooms]] = []
_kept_lock = SYSTEM_CLOCK.lock()


def begin_load(
    places: Places,
    watch: SchemaWatch,
    app: str | None,
    version: int | None,
    query: str | None,
    on_bad_rows: BadRows,
    lease_seconds: float | None,
    max_memory: int,
    often: bool,
) -> BulkLoad:
    """Check, then register an attempt in every shard, unless it is one of many."""
    if app is None:
        if version is not None:
            raise InvalidInputError(f"version {version} of no application", hint="give app and version, or neither")
        app, version = f"{ONCE}{places.clock.token()}", 0
        often = False  # whether such a load may still come is told by its attempt, so it has one of its own
    elif not isinstance(app, str) or not app or len(app) > 256 or app.startswith(ONCE):
        raise InvalidInputError(f"app is {app!r}", hint=f"a name of 1 to 256 characters that does not begin with {ONCE!r}")
    if isinstance(version, bool) or not isinstance(version, int) or version < 0:
        raise InvalidInputError(f"version is {version!r}", hint="a whole number from 0; each load of an app has a higher one")
    if on_bad_rows not in ("fail", "quarantine"):
        raise InvalidInputError(f"on_bad_rows is {on_bad_rows!r}", hint='"fail" or "quarantine"')
    check_memory(max_memory)
    manifest = watch.refresh()
    shards = () if often else manifest.shards
    attempt = f"s{int(places.clock.now() // _OFTEN_SECONDS):06d}" if often else f"l{places.clock.token()}"
    lease = lease_seconds or (_OFTEN_LEASE_SECONDS if often else LEASE_SECONDS)
    load = BulkLoad(
        places, manifest.table_id, attempt, app, version, query, on_bad_rows, max_memory, shards=shards, lease_seconds=lease, often=often
    )
    log_of = load._rooms.log
    list(map_ordered(places.clock, lambda s: register(log_of(s), attempt, attempt_owner(app), lease), shards, parallel=_SHARDS_AT_ONCE))
    return load


class _Routes:
    """Which shard a row belongs to; identity shards are made when they are first needed."""

    def __init__(self, load: BulkLoad, watch: SchemaWatch) -> None:
        self._load, self._watch = load, watch
        manifest = watch.manifest
        self._rule = manifest.sharding
        self._there = set(manifest.shards)
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
            if part.shard not in self._there:
                add_shards(self._watch, self._load.places, {part.shard: part.value})
                self._there.add(part.shard)
            self._load.ensure_registered(part.shard)
            if put.deleted is None:
                yield part.shard, MarkedRows(part.rows, None)
            else:
                marks = np.asarray(part.rows.column(OP).to_numpy(zero_copy_only=False))
                yield part.shard, MarkedRows(part.rows.drop_columns([OP]), marks if marks.any() else None)


def shard_ids(rule: ShardingRule, rows: pa.RecordBatch) -> pa.DictionaryArray:
    """The shard of each row."""
    numbered = pa.RecordBatch.from_arrays([*rows.columns, pa.array(np.arange(rows.num_rows))], names=[*rows.schema.names, OP])
    places = np.zeros(rows.num_rows, np.int32)
    names: list[str] = []
    for part in split_rows(rule, numbered):
        places[part.rows.column(OP).to_numpy()] = len(names)
        names.append(part.shard)
    return pa.DictionaryArray.from_arrays(pa.array(places), pa.array(names, pa.string()))
