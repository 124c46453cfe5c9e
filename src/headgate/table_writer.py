"""TableWriter: many shards as one, for writing.

Owns: routing rows to shards, one Ack over several, producers' sequences over all shards, bad rows.
Does not own: what happens inside a shard (writer), which shard a row belongs to (sharding).

A put is atomic in each shard, not across shards. It goes in three steps:
  1. everything that can be refused is: rows, shards that are not held, sequences;
  2. room is reserved in every shard, in the order of their names, so two puts never wait for each other;
  3. the shards get their rows. Nothing blocks or is refused here; a shard that fails says so in the Ack.
So a put that is refused has left nothing anywhere, and its sequence is free.

Producers. A shard remembers the highest sequence it has of a producer, and answers a lower one with
"I have it". That is true only if the sequences of a producer come to every shard in order, and this
is where they are kept in order:
  · within a writer each is one more than the one before, or one that was sent already;
  · t0 sequence 5 fails in shard B, whose writer is dead · t1 the next writer gets 6 first, and B gets
    rows of it · t2 then it gets 5. B would say that it has it. Here it is refused, loudly.
A shard sees gaps where a sequence had no rows for it; that is as it should be.

Splits. A shard of ours may be split by somebody else (heirs). Its writer is fenced then; the next put, wait, flush or close
that meets the fence finds out what became of what was put, opens the parts, sends them what never happened, in order, and only
then lets anything newer through. A row is routed by one rule, to the writers of that rule: the writers are replaced first, the
rule after, so whoever finds the new rule finds its writers, and whoever has the old one and misses a writer begins again.
"""

from __future__ import annotations

import asyncio
import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal

import pyarrow as pa

from headgate.admission import checked_sequence
from headgate.checkpoint import Checkpoint, check_lease, unpin
from headgate.clock import Clock, map_ordered
from headgate.config import Duration, ShardWriterConfig
from headgate.errors import (
    AlreadyExistsError,
    BackpressureTimeoutError,
    ClosedError,
    CommitConflictError,
    FencedError,
    HeadgateError,
    InvalidInputError,
    NotFoundError,
    ObjectMissingError,
    OutOfSequenceError,
    SchemaMismatchError,
    ShardSplitError,
)
from headgate.failpoint import failpoint
from headgate.heirs import Outbox, Sent, failed, is_heir, landed, only_heir, settled
from headgate.manifest.model import Segments, ShardingRule, ShardManifest, ShardRange
from headgate.new_shards import add_shards
from headgate.quarantine import Quarantine, split_bad
from headgate.retired import publish
from headgate.schema import RowRules, one_batch
from headgate.shard import Places, Shard, remember_wal_store
from headgate.sharding import Part, ranges_of, split_rows
from headgate.table_ack import TableAck, failure
from headgate.transaction import Transactions
from headgate.view import find_checkpoint
from headgate.wal.ack import Ack
from headgate.wal.entry import Op
from headgate.watch import SchemaWatch
from headgate.writer import ShardWriter

_AT_ONCE = 16
_ACKS_KEPT_PER_PRODUCER = 1024
_SPLITS_MAX = 64
_FOREVER = 1e9


class _Stale(Exception):
    """Routed by a rule that is no more: a shard was split meanwhile. Nothing was accepted."""


def _no_room(whose: str, timeout: float | None) -> BackpressureTimeoutError:
    return BackpressureTimeoutError(
        f"{whose}: no room for the put within {timeout} s, with others before it; nothing was accepted",
        hint="slow down, or raise max_unflushed_memtable_bytes or put_timeout",
    )


class _Turns:
    """One at a time for each name. No lock is held meanwhile, so whoever has a turn may wait and talk to the store."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = clock.lock()
        self._given_back = clock.condition(self._lock)
        self._taken: set[str] = set()
        self._waiting = 0

    @contextmanager
    def turn(self, name: str, timeout: float | None = None) -> Iterator[None]:
        with self._lock:
            deadline = None if timeout is None else self._clock.monotonic() + timeout
            self._waiting += 1
            try:
                while name in self._taken:
                    left = None if deadline is None else deadline - self._clock.monotonic()
                    if left is not None and left <= 0:
                        raise _no_room(f"producer {name!r}", timeout)
                    self._given_back.wait(left)
            finally:
                self._waiting -= 1
            self._taken.add(name)
        try:
            yield
        finally:
            with self._lock:
                self._taken.discard(name)
                if self._waiting:
                    self._given_back.notify_all()


@dataclass(frozen=True, slots=True)
class _Batch:
    """What one put comes to: the rules that its rows keep to, the rows of each shard, and those that cannot be taken."""

    rules: RowRules
    op: Op
    parts: Sequence[Part]
    bad: pa.RecordBatch | None


class _Producer:
    """What this writer took from one producer: ``first`` to ``last``, without a gap."""

    __slots__ = ("acks", "before", "first", "last")

    def __init__(self) -> None:
        self.first = self.last = -1
        self.acks: OrderedDict[int, TableAck] = OrderedDict()
        self.before: dict[str, int | None] = {}
        """What each shard had of it before this writer's first."""

    def take(self, sequence: int, ack: TableAck) -> None:
        if self.last < 0:
            self.first = sequence
        self.last = max(self.last, sequence)
        self.acks[sequence] = ack
        while len(self.acks) > _ACKS_KEPT_PER_PRODUCER and next(iter(self.acks.values())).done():
            self.acks.popitem(last=False)


class TableWriter:
    """Writes a table: routes every row to its shard. Opening it claims the shards and fences whoever wrote before.

    Use as a context manager, sync or async. Safe for many threads. If a shard's writer is fenced or
    poisoned, puts for that shard fail from then on; the others go on. Close it and open another. A shard
    that is split is no such case: its parts are opened, and all goes on.

    Args:
        watch: the table as it is now.
        places: where the table is.
        shards: hold these only; a row for another is refused. None: all of them. An identity-sharded
            table may be given shards that are not there yet: they are made on first use.
    """

    def __init__(
        self,
        watch: SchemaWatch,
        places: Places,
        config: ShardWriterConfig | None = None,
        shards: Sequence[str] | None = None,
    ) -> None:
        self._config = config = config or ShardWriterConfig()
        self._watch, self._places, self._clock = watch, places, places.clock
        # Bad rows are taken out here, and waiting is done here, once for all shards.
        self._shard_config = replace(config, on_bad_rows="fail", durable_write=False)
        self._quarantine: Quarantine | None = None
        if config.on_bad_rows == "quarantine":
            self._quarantine = Quarantine(places.table_store(fsync=config.fsync), self._clock)
        watch.refresh()
        manifest, rules = watch.seen
        self._rule = manifest.sharding
        self._routing = rules, self._rule, self._rule
        self._column_id = _column_id(rules, manifest.sharding)
        self._outbox = Outbox()
        self._ids: set[str] = set()
        self._held = None if shards is None else _checked_shards(shards, manifest.shards, manifest.sharding)
        self._turns, self._opening = _Turns(self._clock), _Turns(self._clock)
        self._lock = self._clock.lock()
        self._producers: dict[str, _Producer] = {}
        self._writers: dict[str, ShardWriter] = {}
        self._closing = self._closed = False
        self._open([name for name in manifest.shards if self._held is None or name in self._held])
        if self._held is None:
            remember_wal_store(watch, places)

    @property
    def writers(self) -> dict[str, ShardWriter]:
        """The writers of the shards that are held, by shard id."""
        return dict(self._writers)

    @property
    def quarantined_rows(self) -> int:
        """How many rows this writer could not take and has put under ``quarantine/``."""
        return self._quarantine.rows if self._quarantine is not None else 0

    # -- writing

    def put(self, data: Any, *, producer: str | None = None, sequence: int | None = None) -> TableAck:
        """Upsert rows (append, on a table without a key), each into its shard. Returns at once; the Ack says when it is durable.

        Args:
            data: a RecordBatch, a Table, anything with ``__arrow_c_stream__`` or ``__arrow_c_array__``
                (pandas, polars, …), or a list of dicts. Atomic in each shard, not across shards.
            producer, sequence: makes retries safe, in every shard. Each sequence is one more than the one before;
                one that was accepted before gets the Ack of its first copy. After a failure open another writer
                and send all that was not acknowledged again, in order, the same rows under the same sequence.

        Raises:
            SchemaMismatchError, InvalidInputError: refused, nothing was accepted; among others because a row
                belongs to a shard that this writer does not hold.
            BackpressureTimeoutError: no room in a shard within ``put_timeout``, nothing was accepted in any.
            FencedError, WriterPoisonedError, ClosedError: a shard's writer writes no more; nothing was accepted in any.
        """
        return self._submit("upsert", data, producer, sequence)

    def delete(self, keys: Any, *, producer: str | None = None, sequence: int | None = None) -> TableAck:
        """Delete rows by key, each in its shard: data with the key columns (others are ignored). Otherwise as ``put``."""
        return self._submit("delete", keys, producer, sequence)

    def _submit(self, op: Op, data: Any, producer: str | None, sequence: int | None) -> TableAck:
        named = None if producer is None and sequence is None else checked_sequence(producer, sequence)
        if self._closing:
            raise ClosedError("the writer of the table is closed", hint="open another writer")
        rules, rows, bad = self._fitted(op, data)
        ack = self._routed(rules, op, rows, bad, named)
        if self._config.durable_write:
            ack.wait()
        return ack

    def _routed(
        self, rules: RowRules, op: Op, rows: pa.RecordBatch | None, bad: pa.RecordBatch | None, named: tuple[str, int] | None
    ) -> TableAck:
        """Place rows in the shards of now; if one of them is found to be split, in those it has become."""
        timeout = self._config.put_timeout
        deadline = None if timeout is None else self._clock.monotonic() + timeout
        for _ in range(_SPLITS_MAX):
            rule = self._rule
            parts = split_rows(self._routed_by(rules, rule), rows) if rows is not None else []
            batch = _Batch(rules, op, parts, bad)
            try:
                self._see_held(parts, rule)
                return self._place(batch, None, None) if named is None else self._place_in_order(batch, *named)
            except _Stale:
                continue
            except FencedError as fence:  # nothing of it was accepted anywhere
                try:
                    if not self._recover(fence.shard, deadline):
                        raise
                except TimeoutError as late:
                    raise _no_room(f"shard {fence.shard}", timeout) from late
        raise CommitConflictError("the table is split faster than it can be written", hint="try again; nothing was accepted")

    def _fitted(self, op: Op, data: Any) -> tuple[RowRules, pa.RecordBatch | None, pa.RecordBatch | None]:
        """The rules that the rows keep to, those that do, and those that cannot be taken."""
        if self._quarantine is None:
            rules, rows = self._watch.upsert(data) if op == "upsert" else self._watch.delete(data)
            return rules, rows, None
        rules = self._watch.rules
        if type(data) is not pa.RecordBatch and not isinstance(data, list | tuple):
            data = one_batch(data, rules.schema if op == "upsert" else rules.key_schema)
        try:
            return rules, *split_bad(rules, data, op)
        except SchemaMismatchError:
            latest = self._watch.latest(force=True)
            if latest is rules:
                raise
        return latest, *split_bad(latest, data, op)

    def _routed_by(self, rules: RowRules, base: ShardingRule) -> ShardingRule:
        """The sharding rule, its column called as these rules call it."""
        known, of, rule = self._routing
        if known is not rules or of is not base:
            column_id = self._column_id
            rule = base if column_id is None else base.but(column=rules.schema.names[rules.field_ids.index(column_id)])
            self._routing = rules, base, rule
        return rule

    def _see_held(self, parts: Sequence[Part], rule: ShardingRule) -> None:
        """Every part's shard has a writer here, or none of them gets anything."""
        absent = [part for part in parts if part.shard not in self._writers]
        if absent and self._rule is not rule:
            raise _Stale
        for part in absent:
            if self._rule.kind != "identity" or (self._held is not None and part.shard not in self._held):
                value = f" (of {part.value!r})" if self._rule.kind == "identity" else ""
                raise InvalidInputError(
                    f"a row belongs to shard {part.shard}{value}, which this writer does not hold",
                    hint=f"it holds {', '.join(sorted(self._held or self._writers)) or 'none'}; put the row where that shard is written",
                )
        if not absent:
            return
        with self._opening.turn(""):
            absent = [part for part in absent if part.shard not in self._writers]
            add_shards(self._watch, self._places, {part.shard: part.value for part in absent})
            self._open([part.shard for part in absent])

    def _place_in_order(self, batch: _Batch, producer: str, sequence: int) -> TableAck:
        """One producer's puts go in one after another, so that none overtakes in any shard."""
        with self._turns.turn(producer, self._config.put_timeout):
            known = self._producers.get(producer) or _Producer()
            if (first := known.acks.get(sequence)) is not None:
                return first
            self._check_order(known, batch.parts, producer, sequence)
            for part in batch.parts:
                if part.shard not in known.before:
                    known.before[part.shard] = self._writer(part.shard).producer_sequence(producer)
            ack = self._place(batch, producer, sequence)
            known.take(sequence, ack)
            self._producers[producer] = known
            return ack

    def _check_order(self, known: _Producer, parts: Sequence[Part], producer: str, sequence: int) -> None:
        if known.last < 0:
            return  # the first that this writer hears of it: it may begin anywhere
        if sequence > known.last + 1:
            raise OutOfSequenceError(
                f"producer {producer!r} sent sequence {sequence} after {known.last}",
                hint=f"send {known.last + 1}: sequences follow each other, so that nothing overtakes",
            )
        if sequence >= known.first:
            return
        for part in parts:
            before = known.before.get(part.shard, self._writer(part.shard).producer_sequence(producer))
            if before is None or before < sequence:
                raise OutOfSequenceError(
                    f"producer {producer!r} sent sequence {sequence} after {known.first}, and shard {part.shard} never got it",
                    hint="open another writer, and send all that was not acknowledged again, in order",
                )

    def _writer(self, shard: str) -> ShardWriter:
        writer = self._writers.get(shard)
        if writer is None:
            raise _Stale
        return writer

    def _place(self, batch: _Batch, producer: str | None, sequence: int | None) -> TableAck:
        """Hand over the rows, and remember them until they are durable: a split may send them elsewhere."""
        whole = self._place_once(batch, producer, sequence)
        acks = whole._parts
        for part in batch.parts:
            self._outbox.add(part.shard, Sent(part.rows, batch.op, producer, sequence, batch.rules, acks[part.shard], whole))
        for part in batch.parts:
            # Fenced by now: this comes before whatever is put next. (What is fenced later is found by whoever meets the fence.)
            if isinstance(acks[part.shard]._error, FencedError):
                self._recover(part.shard)
        return whole

    def _place_once(self, batch: _Batch, producer: str | None, sequence: int | None) -> TableAck:
        """Reserve room everywhere, keep the bad rows, then hand over the good ones."""
        writers, parts, rules, op = self._writers, batch.parts, batch.rules, batch.op
        if any(part.shard not in writers for part in parts):
            raise _Stale
        if len(parts) == 1 and batch.bad is None:
            shard, rows = parts[0].shard, parts[0].rows
            try:
                ack = writers[shard].put_rows(rows, op, producer, sequence, rules=rules, consecutive=False)
            except HeadgateError as error:
                raise failure({}, {shard: error}) from error
            return TableAck({shard: ack}, self._clock, self._recover)
        acks: dict[str, Ack] = {}
        timeout, start = self._config.put_timeout, self._clock.monotonic()
        with ExitStack() as reserved:
            sizes = [writers[part.shard].size_of(part.rows) for part in parts]
            for part, size in zip(parts, sizes, strict=True):
                try:
                    left = None if timeout is None else max(0.0, start + timeout - self._clock.monotonic())
                    writers[part.shard].reserve(size, timeout=left)
                except HeadgateError as error:
                    raise failure({}, {part.shard: error}) from error
                reserved.callback(_release, writers[part.shard], size, acks)
            failpoint("table.reserved")
            if batch.bad is not None:
                assert self._quarantine is not None
                self._quarantine.keep(batch.bad, producer, sequence)
            for part, size in zip(parts, sizes, strict=True):
                writer = writers[part.shard]
                acks[part.shard] = writer.put_reserved(part.rows, op, producer, sequence, size, rules=rules, consecutive=False)
                failpoint("table.placed")
        return TableAck(acks, self._clock, self._recover)

    # -- splits

    def _recover(self, shard: str, deadline: float | None = None) -> bool:
        """A shard was fenced. If that was a split, go on with what it has become. False: another writer has it.

        Raises:
            TimeoutError: it is being split, and was not by the deadline.
        """
        with self._opening.turn("", None if deadline is None else max(0.0, deadline - self._clock.monotonic())):
            if self._closed:
                return False
            log = Shard.of(shard, self._places, self._watch).log
            writer = self._writers.get(shard)
            # 1. Others may have been faster; then only what came too late for them is left to be sent.
            now = log.manifests.load()
            if now.state == "dropped":
                return False
            if writer is None or (writer.failure is None and now.epoch == writer.epoch and now.state != "retired"):
                self._send_again(shard, now.ends(), self._writers, self._rule)
                return True
            # 2. Was it a split, and were we the ones who held the shard before it?
            if not is_heir(settled(log, deadline), self._ids):
                return False
            # 3. Nothing more of ours is acknowledged there, and everything says how far it came.
            writer.end_fenced()
            failpoint("table.fenced")
            # 4. The parts, or the shard itself, if the split was given up; unless somebody else has claimed them since.
            try:
                opened = self._claimed([shard], only_heir(self._ids))
            except FencedError:
                return False
            try:
                failpoint("table.heirs")
                # 5. What never happened, in order, before anything newer can come.
                writers = {**{name: known for name, known in self._writers.items() if name != shard}, **{one.shard: one for one in opened}}
                rule = self._rule_with([shard], opened)
                self._send_again(shard, log.manifests.load().ends(), writers, rule)
                failpoint("table.sent-again")
                self._take_writers(writers, opened, shard, rule)
            except BaseException:
                for one in opened:  # what they were given is sent again the next time
                    one.end_fenced()
                    one.abort()
                raise
        writer.abort()
        return True

    def _send_again(self, shard: str, ends: Segments, writers: Mapping[str, ShardWriter], rule: ShardingRule) -> None:
        for number, sent in self._outbox.fenced(shard):
            place = sent.durable_at(ends)
            if place is not None:
                sent.whole._replace(shard, {shard: landed(self._clock, shard, place)})
            else:
                parts = split_rows(self._routed_by(sent.rules, rule), sent.rows)
                acks = {part.shard: _sent_to(writers[part.shard], part.rows, sent) for part in parts}
                sent.whole._replace(shard, acks)
                for part in parts:
                    self._outbox.add(part.shard, replace(sent, rows=part.rows, ack=acks[part.shard]))
            self._outbox.remove(shard, number)

    def _rule_with(self, names: Sequence[str], opened: Sequence[ShardWriter]) -> ShardingRule:
        """The rule by which these writers get the rows of those shards. The table's may be ahead of us: they may be split again."""
        rule = self._rule
        gone = [name for name in names if name not in {one.shard for one in opened}]
        parts = [(one.shard, one.range) for one in opened if one.shard not in names and one.range is not None]
        if not parts:
            return rule
        self._column_id = parts[0][1].column
        kept = [part for part in ranges_of(rule) if part.shard not in gone]
        column = rule.column or self._watch.rules.schema.names[self._watch.rules.field_ids.index(self._column_id)]
        return rule.but(column=column, ranges=tuple(sorted([*kept, *(ShardRange(part.low, shard) for shard, part in parts)])))

    def _take_writers(self, writers: Mapping[str, ShardWriter], opened: Sequence[ShardWriter], shard: str, rule: ShardingRule) -> None:
        with self._lock:
            if self._closed:
                raise ClosedError("the writer of the table is closed", hint="open another writer")
            if self._held is not None:
                self._held = (self._held - {shard}) | {one.shard for one in opened}
            # The rule last: whoever routes by it finds the writers.
            self._writers = dict(sorted(writers.items()))
            self._rule = rule

    def _recover_all(self, failures: Mapping[str, HeadgateError]) -> bool:
        """Go on where shards were split, also for puts that nobody waits for. False: there is nothing to go on with."""
        fenced = [shard for shard, error in failures.items() if isinstance(error, FencedError)]
        gone_on = [shard for shard in dict.fromkeys([*fenced, *self._outbox.shards()]) if self._recover(shard)]
        return bool(gone_on)

    def flush(self) -> None:
        """Wait until everything put so far is in a committed generation, in every shard. WAL-only: until it is durable."""
        self._each("flush", lambda writer: writer.flush())

    def checkpoint(self, name: str | None = None, scope: Literal["all", "durable"] = "all", ttl: Duration | None = None) -> Checkpoint:
        """Pin the table as it is; each shard at its own moment. ``scope="all"``: flushed first, so it needs nothing of the log."""
        seconds = check_lease(name, ttl)
        for _ in range(_SPLITS_MAX):
            id, now = self._clock.token(), self._clock.now()
            before = self._writers
            failures = self._tried(lambda writer: writer.check_fenced()) or self._pinned(id, name, scope, ttl)
            if not failures and self._writers is before and not self._is_half_loaded(id):
                return Checkpoint(id, name, now, None if seconds is None else now + seconds)
            for writer in {**before, **self._writers}.values():
                unpin(Shard.of(writer.shard, self._places, self._watch).log, id)
            if failures and not self._recover_all(failures):
                raise _told("checkpoint", failures)
        raise CommitConflictError("the table is split faster than it can be pinned", hint="try again")

    def _is_half_loaded(self, id: str) -> bool:
        """Does the checkpoint have a load in some shards only? Then the load is carried out, and the checkpoint taken again."""
        logs = {name: Shard.of(name, self._places, self._watch).log for name in self._writers}
        try:
            versions = [log.manifests.at(log.manifests.load().checkpoints[id].version) for log in logs.values()]
        except (KeyError, ObjectMissingError):
            raise NotFoundError(
                f"checkpoint {id} of {self._places.table.uri} is gone already", hint="its lease was over, or the table was dropped"
            ) from None
        return Transactions(self._places.table_store(), self._clock, logs.__getitem__).finish_those_between(versions)

    def _pinned(self, id: str, name: str | None, scope: Literal["all", "durable"], ttl: Duration | None) -> dict[str, HeadgateError]:
        shards = list(self._writers)
        absent = [name for name in self._watch.refresh().shards if name not in shards]
        if absent:
            raise InvalidInputError(
                f"this writer does not hold shard {absent[0]}",
                hint="a checkpoint is of all shards: table.checkpoint(), or a writer of all of them",
            )

        if name is not None and any(find_checkpoint(writer.manifest(), name) for writer in self._writers.values()):
            raise AlreadyExistsError(f"there is a checkpoint {name!r}", hint="drop it first, or choose another name")

        def pin_one(writer: ShardWriter) -> None:
            writer.checkpoint(name, scope, ttl, id=id, shards=shards)

        return self._tried(pin_one)

    def check_fenced(self) -> None:
        """Look at the latest manifests; raise FencedError if another writer has claimed one of the shards."""
        self._each("check", lambda writer: writer.check_fenced())

    # -- life

    def _open(self, names: Sequence[str]) -> None:
        """Claim shards, several at once. If one cannot be opened, those that were are let go, and nothing has changed."""
        opened = self._claimed(names)
        with self._lock:
            if not self._closed:
                self._writers = dict(sorted({**self._writers, **{writer.shard: writer for writer in opened}}.items()))
                if self._held is not None:
                    self._held |= {writer.shard for writer in opened}
                self._rule = self._rule_with(names, opened)
                return
        for writer in opened:
            writer.abort()
        raise ClosedError("the writer of the table is closed", hint="open another writer")

    def _claimed(self, names: Sequence[str], check: Callable[[ShardManifest], None] | None = None) -> list[ShardWriter]:
        """Writers of these shards, or of what they have become since they were split. All of them, or none.

        Args:
            check: asked in the commit of each claim; may refuse.
        """
        opened: list[ShardWriter] = []
        split: list[str] = []

        def claim(name: str) -> None:
            shard, id = Shard.of(name, self._places, self._watch), self._clock.token()
            self._ids.add(id)
            try:
                opened.append(shard.writer(self._shard_config, check=check, writer_id=id))
            except ShardSplitError:
                split.append(name)
            except FencedError:  # by a splitter, before it was open?
                owner = shard.log.manifests.load().owner
                if owner is None or owner.after != id:
                    raise
                split.append(name)

        wanted = list(names)
        try:
            for _ in range(_SPLITS_MAX):
                with closing(map_ordered(self._clock, claim, wanted, parallel=self._places.at_once)) as claims:
                    for _ in claims:
                        failpoint("table.claimed")
                if not split:
                    return opened
                wanted = [heir for name in split for heir in self._become(name)]
                split.clear()
            raise CommitConflictError("the table is split faster than it can be opened", hint="try again")
        except BaseException as error:
            for writer in opened:
                try:
                    writer.abort()
                except HeadgateError as other:
                    error.add_note(f"and letting go of shard {writer.shard} failed: {other.message}")
            raise

    def _become(self, shard: str) -> list[str]:
        """What a shard is now. The table is told before anything is written to its parts."""
        manifest = settled(Shard.of(shard, self._places, self._watch).log)
        if manifest.state != "retired" or manifest.split is None:
            return [shard]  # the split was given up, or may be taken back
        publish(self._watch, manifest)
        return [child.shard for child in manifest.split.children]

    def close(self) -> None:
        """Close every shard's writer: finish what was put, flush it. Raises the first thing that went wrong, after all are closed."""
        with self._lock:
            self._closing = True
        with self._opening.turn(""):  # whoever is opening a shard gives up, or is done
            pass
        failures: dict[str, HeadgateError] = {}
        for _ in range(_SPLITS_MAX):
            failures |= self._tried(lambda writer: writer.close())
            if not failures and not any(self._outbox.shards()):
                break
            if self._closed or not self._recover_all(failures):
                break
            alive = {shard for shard, writer in self._writers.items() if writer.failure is None}
            gone = failures.keys() - self._writers.keys()
            failures = {s: error for s, error in failures.items() if not isinstance(error, FencedError) or s not in alive | gone}
        with self._lock:
            self._closed = True
        if failures:
            raise _told("close", failures)

    def abort(self) -> None:
        """Stop now, in bounded time, in every shard: what is not acknowledged fails with ClosedError."""
        with self._lock:
            self._closing = self._closed = True
        failures = self._tried(lambda writer: writer.abort())
        if failures:
            raise _told("abort", failures)

    def _each(self, what: str, act: Callable[[ShardWriter], None]) -> None:
        """All of them, also when one fails. Where shards were split, once more."""
        for _ in range(_SPLITS_MAX):
            before = self._writers
            failures = self._tried(act)
            if failures and not self._recover_all(failures):
                raise _told(what, failures)
            if not failures and not any(self._outbox.shards()) and self._writers is before:
                return
            if not failures and not self._recover_all({}) and self._writers is before:
                return
        raise CommitConflictError("the table is split faster than it can be written", hint="try again")

    def _tried(self, act: Callable[[ShardWriter], None]) -> dict[str, HeadgateError]:
        """What went wrong, by shard; several at once."""

        def attempt(writer: ShardWriter) -> tuple[str, HeadgateError] | None:
            try:
                act(writer)
            except HeadgateError as error:
                return writer.shard, error
            return None

        outcomes = map_ordered(self._clock, attempt, list(self._writers.values()), parallel=_AT_ONCE)
        return dict(outcome for outcome in outcomes if outcome is not None)

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.close()
        except HeadgateError as failure:
            if error is None:
                raise
            # The error on its way out is the one to tell; this one is its company.
            error.add_note(f"and closing the writer failed: {failure.message}")

    async def __aenter__(self) -> TableWriter:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await asyncio.to_thread(self.__exit__, kind, error, trace)

    def __reduce__(self) -> Any:
        raise TypeError("a TableWriter holds claims and threads, and cannot be pickled; pickle the table and open a writer there")

    def __repr__(self) -> str:
        shards = list(self._writers)
        shown = ", ".join(shards[:8]) + (f", … {len(shards)} in all" if len(shards) > 8 else "")
        return f"TableWriter({shown}, {'closed' if self._closed else 'open'})"


def _told(what: str, failures: Mapping[str, HeadgateError]) -> HeadgateError:
    """The first failure; the others go along as notes."""
    error = copy.copy(next(iter(failures.values())))
    error.__notes__ = [*getattr(error, "__notes__", ())]
    for shard, other in failures.items():
        error.add_note(f"{what} of shard {shard}: {other.message}")
    return error


def _release(writer: ShardWriter, size_bytes: int, placed: Mapping[str, Ack]) -> None:
    """Give back what was not used: the put ended on the way."""
    if writer.shard not in placed:
        writer.release(size_bytes)


def _sent_to(writer: ShardWriter, rows: pa.RecordBatch, sent: Sent) -> Ack:
    """Put rows that are owed to somebody. What fails says so in the Ack, and is sent again if that was a split, too."""
    try:
        size = writer.size_of(rows)
        writer.reserve(size, timeout=_FOREVER)
    except HeadgateError as error:
        if isinstance(error, FencedError):  # it was never sent
            error = FencedError(error.message, shard=error.shard, epoch=error.epoch, by_epoch=error.by_epoch, hint=error.hint)
        return failed(writer.clock, error)
    return writer.put_reserved(rows, sent.op, sent.producer, sent.sequence, size, rules=sent.rules, consecutive=False)


def _column_id(rules: RowRules, rule: ShardingRule) -> int | None:
    """The sharding column for ever, whatever it is called."""
    return None if rule.column is None else rules.field_ids[rules.schema.names.index(rule.column)]


def _checked_shards(wanted: Sequence[str], known: Sequence[str], rule: ShardingRule) -> frozenset[str]:
    if isinstance(wanted, str) or not all(isinstance(name, str) for name in wanted):
        raise InvalidInputError(f"shards is {wanted!r}", hint='a list of ids, e.g. ["0000"]')
    if not wanted:
        raise InvalidInputError("no shards to write", hint="name at least one, or pass None for all of them")
    unknown = [name for name in wanted if name not in known]
    if unknown and rule.kind != "identity":
        raise NotFoundError(f"there is no shard {unknown[0]!r}", hint=f"there are {', '.join(known[:20])}")
    return frozenset(wanted)
