"""Tables: a schema, an optional key, a sharding rule and a list of shards.

Owns: the handle. Does not own: how one comes by it (tables), what happens inside a shard, what a change
of columns means (life), how rows are read (query).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Literal

import pyarrow as pa

from headgate.bulk import MEMORY_BYTES as LOAD_MEMORY_BYTES
from headgate.bulk import BadRows, BulkLoad, LoadReport, begin_load, shard_ids
from headgate.change_batches import PIN_SECONDS, ChangeBatches, HasShards, read_part
from headgate.changes import COMMIT_SECONDS, POLL_SECONDS, Changes, StartOfChanges, parse_start
from headgate.checkpoint import Checkpoint, check_lease, listed, pin, refresh_pin, resolved, unpin
from headgate.clock import map_ordered
from headgate.compact import CompactionReport, compact_shard
from headgate.compact_ranges import RANGE_ROWS, ShardCompaction, plan_compaction
from headgate.config import Duration, ShardWriterConfig, check_memory
from headgate.consumer import Consumer, OpenConsumer, check_consumer_name, drop_all, listed_consumers, pin_snapshot
from headgate.cuts import ChangePart
from headgate.errors import (
    AlreadyExistsError,
    CommitConflictError,
    HeadgateError,
    InvalidInputError,
    NotFoundError,
    ShardSplitError,
)
from headgate.feed import Offset, change_schema
from headgate.indexes import indexed_scalars, indexed_vectors
from headgate.life.alter import with_columns, with_renamed, with_widened, without_columns
from headgate.life.clone import detach_table, drop_record, is_orphan, let_go
from headgate.life.gc import GcReport, collect_intents, collect_shard
from headgate.life.mend import Progress as RepairProgress
from headgate.life.repair import RepairReport, repair_shard, shown
from headgate.life.split import let_parts_go, split_shard, sweep_parts
from headgate.life.status import RunInfo, TableStatus, shard_runs, shard_status
from headgate.life.verify import VerifyReport, verify_shard
from headgate.manifest import ShardManifest, TableManifest
from headgate.manifest.model import AnyIndex, ShardingRule
from headgate.meters import ReadMeter
from headgate.query.fresh_index import cut_of
from headgate.query.lookup import asked_keys, lookup
from headgate.query.scan import Load, Scan
from headgate.query.text import search_text
from headgate.query.vector import metric_of, search
from headgate.retired import published
from headgate.run_writer import Progress
from headgate.schema import RowRules
from headgate.shard import Places, Shard
from headgate.sharding import shards_of
from headgate.snapshot import Snapshot, State, unpinned
from headgate.table_writer import TableWriter
from headgate.transaction import Transactions
from headgate.view import ReadView
from headgate.wal.collect import check_trim, trim
from headgate.wal.entry import Op
from headgate.watch import SchemaWatch
from headgate.writer import Freshness, live_view

_VIEWS_AT_ONCE = 16
_SPLITS_MAX = 32

RunOnShards = Callable[[Callable[[str], Any], Sequence[str]], Sequence[Any]]
"""Does some work for each of these shards, and gives what came of it, in order. What it gets pickles."""


class Table:
    """A handle on a table. Pickles, and can be used from many threads.

    It shows the table as last seen: when it was opened, or by ``refresh``, a read or a change through
    it. Reads always look at the latest. It keeps what its shards have read for the next read; nothing
    of that is pickled.
    """

    def __init__(self, places: Places, manifest: TableManifest) -> None:
        self._places, self._first = places, manifest
        self._known: tuple[TableManifest, RowRules, dict[str, Shard]] | None = None

    @cached_property
    def _watch(self) -> SchemaWatch:
        return SchemaWatch(self._places.table_manifests(), self.uri, self._places.clock, self._first)

    @property
    def _manifest(self) -> TableManifest:
        return self._watch.manifest

    def __getstate__(self) -> dict[str, object]:
        return {"_places": self._places, "_first": self._manifest, "_known": None}

    def __eq__(self, other: object) -> bool:
        """Is it the same table, in the same place?"""
        return isinstance(other, Table) and (self._places, self._first.table_id) == (other._places, other._first.table_id)

    def __hash__(self) -> int:
        return hash((self.uri, self._first.table_id))

    # -- what it is

    @property
    def uri(self) -> str:
        return self._places.table.uri

    @property
    def schema(self) -> pa.Schema:
        return self._watch.rules.schema

    @property
    def key(self) -> tuple[str, ...]:
        return self._manifest.key

    @property
    def sharding(self) -> ShardingRule:
        return self._manifest.sharding

    @property
    def indexes(self) -> tuple[AnyIndex, ...]:
        return self._manifest.indexes

    @property
    def shards(self) -> list[Shard]:
        """The same objects as before, as long as rows look the same: they keep what they have read."""
        return list(self._shards().values())

    def shard(self, id: str) -> Shard:
        """One shard, by its id."""
        shards = self._shards()
        if id not in shards:
            raise NotFoundError(f"{self.uri} has no shard {id!r}", hint=f"it has {', '.join(list(shards)[:20]) or 'none yet'}")
        return shards[id]

    def _shards(self) -> dict[str, Shard]:
        return {name: shard for name, shard in self._every_shard().items() if name not in self._manifest.retired}

    def _every_shard(self) -> dict[str, Shard]:
        """Those that were split as well: checkpoints from before, and consumers that are behind, need them."""
        manifest, rules = self._watch.seen
        known = self._known
        if known is not None and known[0] is manifest:
            return known[2]
        same = known[2] if known is not None and known[1] is rules else {}
        names = (*manifest.shards, *manifest.retired)
        shards = {name: same.get(name) or Shard.of(name, self._places, self._watch) for name in names}
        self._known = manifest, rules, shards
        return shards

    def _manifests(self) -> list[ShardManifest]:
        """The latest of every shard."""
        return [shard.log.manifests.load() for shard in self._every_shard().values()]

    def refresh(self) -> Table:
        """Look at the latest table manifest: columns and shards that others changed. Returns this handle.

        Raises:
            NotFoundError: the table was dropped.
        """
        self._watch.refresh()
        return self

    def status(self) -> TableStatus:
        """The state of every shard, read now. Writes nothing."""
        self.refresh()
        return TableStatus(uri=self.uri, shards=tuple(shard_status(shard.log) for shard in self.shards))

    def runs(self) -> list[RunInfo]:
        """Every run and slice with its URI: plain Lance datasets, sorted by key, for any Lance reader. Reads only."""
        self.refresh()
        return [run for shard in self.shards for run in shard_runs(shard.log, self.uri)]

    def verify(self, deep: bool = False, progress: RepairProgress | None = None, *, run: RunOnShards | None = None) -> VerifyReport:
        """Walk every shard's log, look at every run, and say what is wrong where. Writes nothing.

        Args:
            deep: read every entry that is left and every row of every run, too, and compare the two.
            progress: called with a shard and what is being looked at.
            run: has the work done, shard by shard, wherever; None: here, one after the other.
        """
        work = partial(self._verify_one, deep=deep, progress=progress)
        return VerifyReport.of((run or _here)(work, list(self.refresh()._every_shard())))

    def _verify_one(self, shard: str, deep: bool, progress: RepairProgress | None) -> VerifyReport:
        columnar, store = self._places.columnar(), self._places.table_store()
        log, rules = self._shard_once(shard).log, self._watch.rules
        return verify_shard(log, deep=deep, columnar=columnar, rules=rules, store=store, progress=progress)

    def repair(self, dry_run: bool = True, progress: RepairProgress | None = None) -> RepairReport:
        """Say what is broken, what would be done about it and what that gives up; with ``dry_run=False`` do it.

        First restore what you can from a backup or from bucket versions: this is for what is gone. Reads everything.
        Shards that are whole are not touched. A broken one is claimed, which fences its writer; what is damaged is
        copied to ``repair/`` below the table before it is replaced. May be interrupted, and begun again.

        Args:
            progress: called with a shard and what is being done there.

        Raises:
            WalStoreMismatchError: this is not the store that the log was written to. Nothing was written.
        """
        self.refresh()
        columnar, rules, store = self._places.columnar(), self._watch.rules, self._places.table_store()
        parts = [repair_shard(s.log, store, columnar, rules, dry_run=dry_run, progress=progress) for s in self.shards]
        return shown(RepairReport.of(parts, dry_run=dry_run), self.uri)

    def writer(self, config: ShardWriterConfig | None = None, shards: Sequence[str] | None = None) -> TableWriter:
        """Claim the table for writing. This writes, and fences whoever wrote before.

        Args:
            shards: claim these only; a row for another is refused, with its shard's name. None: all of them.
        """
        return TableWriter(self._watch, self._places, config, shards)

    def scan(
        self,
        columns: Sequence[str] | None = None,
        filter: str | None = None,
        limit: int | None = None,
        at: str | Checkpoint | None = None,
        freshness: Freshness = "durable",
    ) -> Scan:
        """Read rows: the newest version of each key, then the filter, then the limit. Writes nothing.

        Args:
            columns: which, in this order; None: all.
            filter: a SQL expression, e.g. ``"value > 0.5 and name like 'a%'"``.
            at: a checkpoint, or its id or name: the rows as of then, with the columns of now.
            freshness: "durable": what a crash cannot take back. "memory": also what writers in this process
                hold and nobody has acknowledged yet.

        Raises:
            InvalidInputError: no such column, no expression over the columns, or options that exclude each other.
            NotFoundError: there is no such checkpoint (when rows are read).
        """
        rules = self._watch.latest(force=True)
        return Scan(self._loading(rules, at, freshness), rules, columns=columns, filter=filter, limit=limit, meter=self._meter("scan"))

    def _meter(self, kind: str) -> ReadMeter:
        return ReadMeter(self._places.clock, self.uri, kind)

    def lookup(self, keys: Any, columns: Sequence[str] | None = None, at: str | Checkpoint | None = None) -> pa.Table:
        """The newest rows of these keys, each once, in the order first asked for; keys that are not there are left out.

        Args:
            keys: a list of values; for a key of several columns a list of tuples, or an Arrow table with them.
            columns: which, in this order; None: all.
            at: a checkpoint, its id or its name: the table as of then.

        Raises:
            InvalidInputError: the table has no key, keys are not of its type, or there is no such column.
        """
        rules = self._watch.latest(force=True)
        wanted = asked_keys(rules, keys)
        load = self._loading(rules, at, keys=wanted)
        return self._meter("lookup").whole(lambda: lookup(load, rules, wanted, columns), _rows)

    def sql(self, query: str, at: str | Checkpoint | None = None) -> pa.Table:
        """The result of a SQL query in which the table is called ``t``, e.g. ``"select count(*) from t"``. Writes nothing.

        All of the query sees one state of each shard; with ``at`` that of a checkpoint.

        Raises:
            InvalidInputError: it is no query, or not over this table.
        """
        from headgate.query.sql import sql  # brings pandas along, a second to load: only those who ask pay

        rules = self._watch.latest(force=True)
        return self._meter("sql").whole(lambda: sql(self._loading(rules, at), rules, query), _rows)

    def search(
        self,
        column: str,
        query: Any,
        k: int = 10,
        filter: str | None = None,
        columns: Sequence[str] | None = None,
        at: str | Checkpoint | None = None,
        *,
        exact: bool = False,
    ) -> pa.Table:
        """The ``k`` rows whose vectors are nearest to ``query``, nearest first, with a column ``_distance``.

        By the metric of the column's ``vector_index``; without one by "l2". Only the newest version of a row is
        found, and fewer than ``k`` only if no more rows that match have a vector.

        Args:
            query: as many numbers as a vector has.
            filter: a SQL expression that the rows must meet.
            columns: which, in this order; None: all.
            exact: look at all rows, also where large slices have an index, which may miss some of the nearest.

        Raises:
            InvalidInputError: there is no such column, or ``query`` is no such vector.
        """
        self._watch.refresh()
        manifest, rules = self._watch.seen
        metric = metric_of(manifest.indexes, column)
        load = self._loading(rules, at)
        return self._meter("search").whole(
            lambda: search(load, rules, column, query, k, metric=metric, filter=filter, columns=columns, exact=exact), _rows
        )

    def search_text(
        self,
        column: str,
        query: str,
        k: int = 10,
        filter: str | None = None,
        columns: Sequence[str] | None = None,
        at: str | Checkpoint | None = None,
    ) -> pa.Table:
        """The ``k`` rows whose text fits the words of ``query`` best, best first, with a column ``_score`` (BM25).

        Words are cut as the column's ``text_index`` says; a column without one can be searched too. Rows with
        none of the words are not found.

        Args:
            filter: a SQL expression that the rows must meet.
            columns: which, in this order; None: all.

        Raises:
            InvalidInputError: there is no such column, or no word in ``query``.
        """
        self._watch.refresh()
        manifest, rules = self._watch.seen
        cut = cut_of(manifest.indexes, column)
        load = self._loading(rules, at)
        return self._meter("search_text").whole(
            lambda: search_text(load, rules, column, query, k, cut=cut, filter=filter, columns=columns), _rows
        )

    def snapshot(self, at: str | Checkpoint | None = None, ttl: Duration | None = None) -> Snapshot:
        """One state of the table that many processes read beside each other, in parts.

        Args:
            at: a checkpoint, its id or its name: its state. Writes nothing.
            ttl: else the state as of now, held by a checkpoint with so long a lease, whose id it has; drop that
                when it is no longer needed. None: nothing holds it, and nothing is written; once collection has
                taken some of it, reads end in SnapshotExpiredError.

        Raises:
            NotFoundError: there is no such checkpoint.
        """
        if at is not None and ttl is not None:
            raise InvalidInputError("a checkpoint has its own lease", hint="leave out ttl=, or at=; see refresh_checkpoint")
        self.refresh()
        id = at.id if isinstance(at, Checkpoint) else at
        states: tuple[State, ...] = ()
        shards = self.shards
        if ttl is not None and shards:  # without shards there is nothing to hold
            id, shards = self.checkpoint(ttl=ttl).id, self.shards
        if id is not None:
            id, held = resolved(self._manifests(), id)
            shards = [self._every_shard()[name] for name in held]
        else:
            states = unpinned(shards)
        return Snapshot(self._places.clock.token(), self.uri, tuple(shards), self._watch.rules, id, states)

    def _loading(
        self,
        rules: RowRules,
        at: str | Checkpoint | None = None,
        freshness: Freshness = "durable",
        keys: pa.Table | None = None,
    ) -> Load:
        """How a read gets its views: one per shard, of the latest table, all by the same rules.

        ``keys``: only the shards are looked at in which these can be.
        """
        if freshness not in ("durable", "memory"):
            raise InvalidInputError(f"freshness is {freshness!r}", hint='"durable" or "memory"')
        id = at.id if isinstance(at, Checkpoint) else at
        if id is not None and (not isinstance(id, str) or not id):
            raise InvalidInputError(f"at is {at!r}", hint="a checkpoint, its id or its name")
        if id is not None and freshness == "memory":
            raise InvalidInputError("a checkpoint holds what was durable", hint='leave out at=, or freshness="memory"')

        def view(shard: Shard, pinned: str | None) -> ReadView:
            taken = (live_view(shard.log) if freshness == "memory" else None) or shard.reader.view(pinned)
            # The table may have changed since the read began: what it was promised is what it gets.
            return taken if taken.rules is rules else replace(taken, rules=rules)

        def load() -> list[ReadView]:
            for _ in range(_SPLITS_MAX):
                self._watch.latest()  # for those who read a scan again later: shards may have come
                manifest, every = self._manifest, self._every_shard()
                names, pinned = [name for name in every if name in manifest.shards], None
                if id is not None:
                    pinned, held = resolved([shard.log.manifests.load() for shard in every.values()], id)
                if keys is not None and (pinned is None or set(held) == set(names)):
                    wanted = {shard for rows in keys.combine_chunks().to_batches() for shard in shards_of(manifest.sharding, rows)}
                    names = [name for name in names if name in wanted]
                elif pinned is not None:
                    names = [name for name in every if name in held]
                at_once = partial(view, pinned=pinned)
                wanted_shards, places = [every[name] for name in names], self._places
                try:
                    return list(map_ordered(places.clock, at_once, wanted_shards, parallel=places.at_once, patience=places.patience))
                except ShardSplitError as split:
                    self._follow(split.shard)
            raise CommitConflictError(f"{self.uri} is split faster than it can be read", hint="try again")

        return load

    def _follow(self, shard: str) -> None:
        """A shard turned out to be split: look at the table of now; if nobody has told it yet, at what it will be. Writes nothing."""
        self.refresh()
        found = self._every_shard().get(shard)
        if found is not None and shard in self._manifest.shards:
            derived = published(self._manifest, found.log.manifests.load())
            if derived is not None:
                self._watch.assume(derived)

    # -- its changes

    def changes(
        self,
        start: StartOfChanges | None = None,
        consumer: str | None = None,
        *,
        follow: bool = False,
        poll_interval: float = POLL_SECONDS,
        idle_timeout: float | None = None,
        commit_interval: float | None = COMMIT_SECONDS,
    ) -> Changes:
        """Changes in order: what writers put and deleted, and what was loaded beside them.

        An iterator of Arrow batches with the table's columns of now and ``_op`` ("upsert" or "delete"; a delete has nulls
        outside the key), ``_epoch``, ``_position``, ``_load``, ``_time``. Those of one key come in order; shards take turns.

        Args:
            start: "earliest": what is there. "latest": what comes from now on. "snapshot": the rows of now, as upserts,
                then all changes since. Or an offset: ``changes.offset`` as it was, a dict or its JSON. None: where the
                consumer is; without one "earliest". A word counts only for a new consumer; an offset always.
            consumer: a name under which the offset is kept with the table. It holds back collection, until it is dropped.
                It moves past a batch when the next one is asked for, or by ``changes.commit()``: at least once.
            follow: wait for more at the end, for ever, or for ``idle_timeout`` seconds in which nothing comes.
            poll_interval: the longest wait between two looks, in seconds.
            commit_interval: least seconds between two moves of the consumer's offset. None: only ``changes.commit()`` moves it.

        Raises:
            InvalidInputError: there is no such start.
            WalTruncatedError: what comes next was collected (now, or while it is read).
            ConsumerTakenError: while it is read: another reader goes on with this consumer.

        Example:
            >>> for batch in table.changes(start="snapshot", consumer="search-index", follow=True):
            ...     apply(batch)
        """
        self.refresh()
        return Changes(
            self._watch,
            lambda: self.refresh().shards,
            self._shard_once,
            self._places.clock,
            start=start,
            consumer=consumer,
            follow=follow,
            poll_interval=poll_interval,
            idle_timeout=idle_timeout,
            commit_interval=commit_interval,
            settle=lambda shard, manifest: self._transactions().resolve(shard.log, manifest, decided=True),
        )

    def _transactions(self) -> Transactions:
        return Transactions(self._places.table_store(), self._places.clock, lambda shard: self._shard_once(shard).log)

    def _shard_once(self, id: str) -> Shard:
        """A shard, also one that was split since."""
        return self._shards().get(id) or Shard.of(id, self._places, self._watch)

    def consumers(self) -> list[Consumer]:
        """Those who follow the changes by name, with their lag. Each holds what it has not read yet. Writes nothing."""
        return listed_consumers(self.refresh()._every_shard().values())

    def open_consumer(self, name: str, start: StartOfChanges | None = None) -> OpenConsumer:
        """Go on with a consumer, for those who read the changes of shards by themselves (``shard.plan_changes``).

        Whoever had it before can move it no more.
        """
        check_consumer_name(name)
        shards = self.refresh().shards
        consumer = OpenConsumer(shards, name, parse_start(start) or "earliest", self._places.clock)
        consumer.hold_parts(shards, self._shard_once)
        return consumer

    def pin_changes(self, ttl: Duration) -> tuple[Checkpoint, dict[str, Offset]]:
        """A checkpoint, and the offset at which the changes go on right after it: nothing between is missed or doubled."""
        seconds = check_lease(None, ttl)
        assert seconds is not None, "there is a lease"
        clock, shards = self._places.clock, self.refresh().shards
        id, now = clock.token(), clock.now()
        names = [shard.id for shard in shards]
        found = map_ordered(clock, lambda s: pin_snapshot(s, seconds, id=id, shards=names).offset, shards, parallel=_VIEWS_AT_ONCE)
        return Checkpoint(id, None, now, now + seconds), dict(zip(names, found, strict=True))

    @property
    def change_schema(self) -> pa.Schema:
        """Of changes: the columns of the table as last seen, and ``_op``, ``_epoch``, ``_position``, ``_load``, ``_time``."""
        return change_schema(self._watch.rules)

    def change_batches(
        self,
        start: StartOfChanges | None = None,
        consumer: str | None = None,
        *,
        fail_on_data_loss: bool = True,
        pin_ttl: Duration = PIN_SECONDS,
    ) -> ChangeBatches:
        """Changes for engines: batches of them are planned in one place, and their parts are read in many (``read_changes``).

        Args:
            start, consumer: as for ``changes``.
            fail_on_data_loss: False: what was collected before it was read is passed over.
            pin_ttl: how long a snapshot to begin with is held, where no consumer holds it.
        """
        seconds = check_lease(None, pin_ttl)
        assert seconds is not None, "there is a lease"
        if consumer is not None:
            check_consumer_name(consumer)
        where = parse_start(start) or "earliest"
        return ChangeBatches(self._followed, where, consumer, fail_on_data_loss=fail_on_data_loss, pin_seconds=seconds)

    def read_changes(self, part: ChangePart, *, fail_on_data_loss: bool = True) -> Iterator[pa.RecordBatch]:
        """The rows of one part of such a batch: the same however often, wherever it is called. Writes nothing."""
        self.refresh()  # rows that were planned may have columns that came since
        return read_part(self._followed, part, fail_on_data_loss=fail_on_data_loss)

    @cached_property
    def _followed(self) -> HasShards:
        return HasShards(
            lambda: self.refresh().shards,
            self._shard_once,
            lambda shard, manifest: self._transactions().resolve(shard.log, manifest, decided=True),
            self._places.clock,
        )

    def drop_consumer(self, name: str) -> None:
        """Forget a consumer: what only it held can be collected.

        Raises:
            NotFoundError: there is none of that name.
        """
        check_consumer_name(name)
        if not drop_all(list(self.refresh()._every_shard().values()), name):
            raise NotFoundError(f"{self.uri} has no consumer {name!r}", hint="see table.consumers()")

    # -- many rows at once

    def bulk_load(
        self,
        app: str | None = None,
        version: int | None = None,
        *,
        query: str | None = None,
        on_bad_rows: BadRows = "fail",
        lease: Duration | None = None,
        max_memory: int = LOAD_MEMORY_BYTES,
        often: bool = False,
    ) -> BulkLoad:
        """Begin a load: rows are written as files by any number of processes, and brought in at once, beside live writers.

        Args:
            app, version: who loads, and which of his loads this is. The same version again is acknowledged and changes
                nothing; a lower one is refused. None: no other attempt at this load will ever be made.
            query: for streams: who counts the versions; another one is refused.
            lease: within this time it is committed, or renewed; else collection may take what was written. None: a day.
            max_memory: bytes that one ``write`` may hold, about.
            often: one of many small ones of an app: they share an attempt, so that to begin and to end one writes nothing.
        """
        return begin_load(self._places, self._watch, app, version, query, on_bad_rows, check_lease(None, lease), max_memory, often)

    def shard_ids(self, rows: pa.RecordBatch) -> pa.DictionaryArray:
        """The shard of each row, of which only the column that the table is sharded by is needed: for those who sort rows out first."""
        return shard_ids(self.sharding, rows)

    def load(
        self,
        data: Any,
        op: Op = "upsert",
        *,
        app: str | None = None,
        version: int | None = None,
        on_bad_rows: BadRows = "fail",
        max_memory: int = LOAD_MEMORY_BYTES,
    ) -> LoadReport:
        """Bring in many rows at once, without the log: all of them or none, newer than everything that was durable before.

        Args:
            data: Arrow batches, a table, or an iterator of them, of any length. A column ``_op`` says "upsert" or "delete".
            op: what rows without it do.
            app, version: makes it safe to repeat; see ``bulk_load``.
            max_memory: bytes that it may hold, about. Rows that do not come in the order of the key become a run for every third of it.
        """
        load = self.bulk_load(app, version, on_bad_rows=on_bad_rows, max_memory=max_memory)
        try:
            if app is not None and load.is_committed():
                return LoadReport(load.app, load.version, committed=False, rows=0, bytes=0)
            return load.commit([load.write(data, op)])
        finally:
            with suppress(HeadgateError):  # its lease ends by itself: what came of the load is what counts
                load.abort()

    # -- its life

    def compact(
        self,
        max_memory: int = 1 << 30,
        progress: Progress | None = None,
        *,
        full: bool = False,
        shards: Sequence[str] | None = None,
        fsync: bool = True,
    ) -> CompactionReport:
        """Merge runs, so that reads have few of them. Beside a live writer, which it never stops or fences.

        Args:
            max_memory: bytes that it may hold, about.
            progress: called with a shard, the rows done and the rows to do.
            full: all runs into one, whatever their sizes; else by size, so that a row is rewritten seldom.
            fsync: on a local disk, sync the new files before they take the place of the old ones. False: a power cut may
                lose rows that were compacted.
        """
        check_memory(max_memory)
        self.refresh()
        clock = self._places.clock
        start, columnar = clock.monotonic(), self._places.columnar(fsync=fsync)
        columnar.vectors, columnar.scalars = indexed_vectors(self.indexes), indexed_scalars(self.indexes)
        parts = [
            compact_shard(shard.log, columnar, partial(self._watch.latest, force=True), max_memory=max_memory, full=full, progress=progress)
            for shard in self._chosen(shards)
        ]
        return CompactionReport.of(parts, clock.monotonic() - start)

    def plan_compaction(
        self, shard: str, *, max_memory: int = 1 << 30, full: bool = False, range_rows: int = RANGE_ROWS
    ) -> ShardCompaction | None:
        """Begin a compaction of one shard that many processes carry out, each with some ranges of keys. None: nothing to gain.

        Args:
            max_memory: bytes that each may hold, about.
            range_rows: about how many rows a range has.
        """
        for name, value in (("max_memory", max_memory), ("range_rows", range_rows)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidInputError(f"{name} is {value!r}", hint="a whole number, 1 or more")
        latest = partial(self._watch.latest, force=True)
        return plan_compaction(self.shard(shard), latest, max_memory=max_memory, full=full, range_rows=range_rows)

    def gc(self, dry_run: bool = True, min_age: Duration = 3600.0, *, sweep: bool = False, run: RunOnShards | None = None) -> GcReport:
        """Delete what nothing needs any more: log entries, replaced runs, files of attempts that died, old manifests.

        Safe at any moment, beside anything, however often it is interrupted, also with ``min_age=0``.

        Args:
            dry_run: only say what would be deleted.
            min_age: for the comfort of readers that began before: leave alone what became garbage within it.
            sweep: look everywhere for what stalled writers left behind, not only where something new may be.
            run: has the work done, shard by shard, wherever; None: here, one after the other.
        """
        seconds = check_lease(None, min_age) if min_age else 0.0
        self.refresh()
        store = self._places.table_store()
        if not dry_run and self._manifest.retired:
            let_parts_go(self._places, self._manifest)  # compaction may have rewritten the last of what they read
        if not dry_run and sweep:
            sweep_parts(self._places, self._manifest)
        transactions = Transactions(store, self._places.clock, lambda shard: self._shard_once(shard).log)
        intents, apps_over = collect_intents(
            transactions, lambda: [shard.id for shard in self.refresh().shards], dry_run=dry_run, min_age=seconds or 0.0
        )
        work = partial(self._collect_one, dry_run=dry_run, min_age=seconds or 0.0, sweep=sweep, apps_over=frozenset(apps_over))
        parts = (run or _here)(work, list(self._every_shard()))
        if not dry_run and self._manifest.parent is not None:
            let_go(self._watch, self._places)  # compaction may have rewritten the last of the parent's files
        return GcReport.of([intents, *parts], dry_run=dry_run)

    def _collect_one(self, shard: str, dry_run: bool, min_age: float, sweep: bool, apps_over: Container[str]) -> GcReport:
        store = self._places.table_store()
        return collect_shard(self._shard_once(shard).log, store, dry_run=dry_run, min_age=min_age, sweep=sweep, apps_over=apps_over)

    def checkpoint(self, name: str | None = None, scope: Literal["durable"] = "durable", ttl: Duration | None = None) -> Checkpoint:
        """Pin what is durable now, in every shard; read it with ``at=``. Each shard is pinned at its own moment; a load is in all or none.

        Args:
            scope: "durable". A checkpoint that needs nothing of the log is taken by the writer: ``writer.checkpoint(scope="all")``.
            ttl: how long it stays; None: until it is dropped.
        """
        if scope != "durable":
            raise InvalidInputError(
                f"scope is {scope!r}", hint='"durable"; scope="all" flushes, so only the writer can: writer.checkpoint()'
            )
        seconds = check_lease(name, ttl)
        self.refresh()
        clock = self._places.clock
        if name is not None and any(known.name == name for known in self.checkpoints()):
            raise AlreadyExistsError(f"{self.uri} has a checkpoint {name!r}", hint="drop it first, or choose another name")
        for _ in range(_SPLITS_MAX):
            id, now = clock.token(), clock.now()
            expires = None if seconds is None else now + seconds
            shards = self.shards
            try:
                names = [shard.id for shard in shards]
                pinned = [pin(shard.log, id, name=name, created_at=now, expires_at=expires, shards=names) for shard in shards]
                if self._transactions().finish_those_between(pinned):  # a load was in some shards only
                    for shard in shards:
                        unpin(shard.log, id)
                    continue
            except ShardSplitError as split:  # what was pinned is of a table that is no more: once more, of its parts
                for shard in shards:
                    unpin(shard.log, id)
                self._follow(split.shard)
                continue
            return Checkpoint(id, name, now, expires)
        raise CommitConflictError(f"{self.uri} is split faster than it can be pinned", hint="try again")

    def checkpoints(self) -> list[Checkpoint]:
        """All of them, oldest first."""
        self.refresh()
        return listed(self._manifests())

    def refresh_checkpoint(self, id: str, ttl: Duration | None = None) -> None:
        """Let a lease end later, ``ttl`` from now; None: never.

        Raises:
            NotFoundError: it is gone; what it held may be collected.
        """
        seconds = check_lease(None, ttl)
        expires = None if seconds is None else self._places.clock.now() + seconds
        self.refresh()
        id, pinned = resolved(self._manifests(), id)
        for name in pinned:
            refresh_pin(self._every_shard()[name].log, id, expires)

    def drop_checkpoint(self, id: str) -> None:
        """Drop a checkpoint, by its id or name. What only it held is garbage then.

        The pin of a clone goes with the clone, or when it is detached; it can be dropped only if there is no such table any more.
        """
        self.refresh()
        dropped = [self._drop_orphan(shard, id) or unpin(shard.log, id) for shard in self._every_shard().values()]
        if not any(dropped):
            raise NotFoundError(f"{self.uri} has no checkpoint {id!r}", hint="see table.checkpoints()")

    def detach(self, max_memory: int = 1 << 30) -> None:
        """Make a clone a table of its own: copy what it still reads of its parent, then let go of the parent. Else nothing happens.

        Args:
            max_memory: bytes that it may hold, about.

        Raises:
            InvalidInputError: a checkpoint of the clone still needs the parent's files.
        """
        check_memory(max_memory)
        detach_table(self._watch, self._places, max_memory)

    def _drop_orphan(self, shard: Shard, id: str) -> bool:
        record = shard.log.manifests.load().checkpoints.get(id)
        if record is None or not is_orphan(self._places, id, record):
            return False
        drop_record(shard.log, id)
        return True

    def split_shard(self, id: str, column: str | None = None) -> tuple[str, ...]:
        """Split a shard in two, each with half of its part of the space of hashes, while it is written and read.

        No row is copied: each part reads the rows of the whole and shows its own, until compaction has rewritten them.
        A ``TableWriter`` that held the shard goes on with the parts by itself; nothing is lost or doubled.

        Args:
            column: for a table without sharding, and no key or one of several columns: the column to split by.

        Returns:
            The ids of the parts.

        Raises:
            InvalidInputError: it cannot be split. Nothing was written.
            ShardSplitError: somebody else splits it, or has.
        """
        return split_shard(self._watch, self._places, id, column)

    def _chosen(self, shards: Sequence[str] | None) -> list[Shard]:
        return self.shards if shards is None else [self.shard(name) for name in shards]

    # -- its columns

    def add_columns(self, columns: pa.Schema) -> None:
        """Add nullable columns at the end. Rows that are there have nulls in them. No row is rewritten.

        A live writer learns of it when a put does not fit what it knows, and within about a second by
        itself; from then on it takes only rows that have the new columns (dicts may leave them out).

        Raises:
            InvalidInputError: a name is taken (whatever its case) or reserved, a type cannot be stored,
                or a column is not nullable. Nothing was written.
        """
        self._watch.commit(lambda manifest: with_columns(manifest, columns))

    def drop_columns(self, names: Sequence[str]) -> None:
        """Drop columns, with their values. A column that is added later under the same name starts empty.

        Writers in other processes learn of it within about a second. Until then they take rows with the
        dropped columns, whose values are not kept. So wait that long before you use a name again.

        Raises:
            InvalidInputError: there is no such column, it belongs to the key, the sharding or an index, or it
                is the last one. Nothing was written.
        """
        self._watch.commit(lambda manifest: without_columns(manifest, names))

    def rename_column(self, old: str, new: str) -> None:
        """Give a column another name; its values stay. Key, sharding and indexes follow.

        Raises:
            InvalidInputError: there is no such column, or the new name cannot be. Nothing was written.
        """
        self._watch.commit(lambda manifest: with_renamed(manifest, old, new))

    def widen_column(self, name: str, type: pa.DataType) -> None:
        """Give a column a type that holds every value it can hold now, in the same order.

        Integers become wider integers (unsigned ones also wider signed ones), floats wider floats,
        decimals of the same scale more precise ones, ``string`` ``large_string``, ``binary``
        ``large_binary``. Key columns too. Nothing else: not integers to floats, not parts of lists or structs.

        Raises:
            InvalidInputError: there is no such column, or some value might not fit. Nothing was written.
        """
        self._watch.commit(lambda manifest: with_widened(manifest, name, type))

    # -- its log

    def trim(self, before: int | Mapping[str, int]) -> None:
        """Give up the log before a position, for good. For tables written in WAL-only mode.

        Args:
            before: a position for every shard, or one per shard id. Nothing is deleted yet; collection may then.
        """
        wanted = before if isinstance(before, Mapping) else {shard.id: before for shard in self.shards}
        logs = [(self.shard(name).log, position) for name, position in wanted.items()]
        for log, position in logs:
            check_trim(log, position)  # all are checked before any is trimmed
        for log, position in logs:
            trim(log, position)

    def __repr__(self) -> str:
        return f"Table({self.uri!r}, key={list(self.key)}, shards={len(self._manifest.shards)})"


def _here(work: Callable[[str], Any], shards: Sequence[str]) -> list[Any]:
    return [work(shard) for shard in shards]


def _rows(found: pa.Table) -> int:
    return int(found.num_rows)
