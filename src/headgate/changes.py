"""Following a table: the changes of all its shards, from wherever a reader wants to begin.

Owns: beginnings, the snapshot before the changes, rounds over the shards, waiting for more, and when a named
consumer's offset moves. Does not own: one shard's changes (feed), the records of consumers (consumer).

Shards are read one after the other, round after round; changes of one key are all in one shard, so they
come in order. In each round every shard is asked how far it goes, many at once, and read up to there.

The offset of a consumer moves only over batches that the reader has asked beyond, so whatever it was
doing when it died is given to it again: at least once. It moves every ``commit_interval`` seconds at most, when
the changes end, and by ``commit()``, which says that all that was given is done with.

A shard is missing in the offset as long as its snapshot is being given. A reader that begins at such an offset
begins that shard anew: with its very first change, or if that is gone with a snapshot. So none of it is missed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import pyarrow as pa

from headgate.checkpoint import refresh_pin, unpin
from headgate.clock import Clock, map_ordered
from headgate.consumer import AT_ONCE, Beginning, OpenConsumer, Start, pin_snapshot, start_of
from headgate.errors import InvalidInputError, NotFoundError, SnapshotExpiredError, WalTruncatedError
from headgate.feed import OFFSET, Horizon, Offset, change_schema, horizon, next_shards, read, stamped
from headgate.manifest.model import ShardManifest
from headgate.query.scan import Scan
from headgate.schema import RowRules
from headgate.shard import Shard
from headgate.watch import SchemaWatch

StartOfChanges = Literal["earliest", "latest", "snapshot"] | Mapping[str, Sequence[int]] | str
"""A word, or an offset as it was given: a mapping, or the same as JSON."""
PIN_SECONDS = 600.0
"""The lease of a snapshot without a consumer; renewed while it is read."""
COMMIT_SECONDS = 5.0
POLL_SECONDS = 0.5
_ROUND_ENTRIES = 10_000
_FIRST_WAIT = 0.01
_PLACES_WAIT = 1.0


def parse_start(start: Any) -> Beginning | dict[str, Offset] | None:
    """What a user gave, checked."""
    if start is None or (isinstance(start, str) and start in ("earliest", "latest", "snapshot")):
        return start  # type: ignore[return-value]  # one of the words
    try:
        found = json.loads(start) if isinstance(start, str | bytes) else start
        offset = {}
        for shard, (position, load) in found.items():
            if not isinstance(shard, str) or type(position) is not int or type(load) is not int or position < 0 or load < 0:
                raise ValueError(shard)
            offset[shard] = Offset(position, load)
    except (ValueError, TypeError, AttributeError):
        raise InvalidInputError(
            f"start is {start!r}", hint='"earliest", "latest", "snapshot", or an offset: {"0000": [position, load]}, as a dict or as JSON'
        ) from None
    return offset


@dataclass
class _Line:
    """One shard, and how far it was given."""

    shard: Shard
    start: Start | None = None
    """None: begin with a snapshot, pinned when its turn comes."""
    offset: Offset | None = None
    """None: its snapshot was not all given yet."""
    asked: Offset | None = None
    """What the reader has asked beyond."""
    committed: Offset | None = None
    is_over: bool = False
    """It was split, and all of it was given."""


class Changes(Iterator[pa.RecordBatch]):
    """Changes of a table in order, batch by batch. See ``Table.changes``. One thread at a time; ``close`` from any.

    Each batch has the table's columns and ``_op``, ``_epoch``, ``_position``, ``_load``, ``_time``. The offset
    after it is ``offset``; that of its own shard is also in its schema's metadata, as JSON, under ``headgate.offset``.
    """

    def __init__(
        self,
        watch: SchemaWatch,
        shards: Callable[[], Sequence[Shard]],
        handle: Callable[[str], Shard],
        clock: Clock,
        *,
        start: StartOfChanges | None = None,
        consumer: str | None = None,
        follow: bool = False,
        poll_interval: float = POLL_SECONDS,
        idle_timeout: float | None = None,
        commit_interval: float | None = COMMIT_SECONDS,
        settle: Callable[[Shard, ShardManifest], object] | None = None,
    ) -> None:
        for name, value in (("poll_interval", poll_interval), ("idle_timeout", idle_timeout), ("commit_interval", commit_interval)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf):
                raise InvalidInputError(f"{name} is {value!r}", hint="seconds")
        where = parse_start(start)
        self._watch, self._shards, self._handle, self._clock = watch, shards, handle, clock
        self._follow, self._poll, self._idle_timeout, self._commit_interval = follow, poll_interval, idle_timeout, commit_interval
        self._settle = settle
        self._rules = watch.latest(force=True)
        self._stopped = self._ended = False
        self._consumer: OpenConsumer | None = None
        self._lines: dict[str, _Line] = {}
        self._later: set[str] = set()  # children of shards that are not at their end yet
        self._committed_at = clock.monotonic()
        self._begin(consumer, where)
        self._batches = self._run()

    # -- for the reader

    @property
    def schema(self) -> pa.Schema:
        """Of the batches from here on. In follow mode it changes when the table's columns do."""
        return change_schema(self._rules)

    @property
    def offset(self) -> dict[str, Offset]:
        """After all batches that were given. Pass it, or its JSON, as ``start`` to go on there."""
        return {id: line.offset for id, line in self._lines.items() if line.offset is not None and not line.is_over}

    def commit(self) -> None:
        """All that was given is done with: move the consumer's offset now.

        Raises:
            ConsumerTakenError: another reader goes on with this consumer.
        """
        if self._consumer is None:
            raise InvalidInputError("these changes have no consumer", hint="pass consumer= to changes(); or keep .offset yourself")
        for line in self._lines.values():
            line.asked = line.offset
        self._commit()

    def close(self) -> None:
        """End. The consumer's offset moves over what was asked beyond; not over the last batch, unless ``commit`` was called."""
        self._stopped = True
        try:
            self._batches.close()  # type: ignore[attr-defined]  # a generator
        except ValueError:  # another thread waits in it, and will see that it is to stop
            return
        self._finish()

    def __iter__(self) -> Changes:
        return self

    def __next__(self) -> pa.RecordBatch:
        try:
            return next(self._batches)
        except (NotFoundError, SnapshotExpiredError, WalTruncatedError):
            # What is missing was held for whoever has the consumer: is that still this reader?
            if self._consumer is not None:
                for line in self._lines.values():
                    self._consumer.check(line.shard)
            raise

    def __enter__(self) -> Changes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self._ended = True  # what was being done is done again: nothing moves
        self.close()

    # -- beginnings

    def _begin(self, consumer: str | None, where: Beginning | dict[str, Offset] | None) -> None:
        shards = {shard.id: shard for shard in self._shards()}
        # Shards that were split since are read to their end first; their children come after.
        if isinstance(where, dict):
            unfinished = {id: self._handle(id) for id in where.keys() - shards.keys()}
        else:
            unfinished = self._unfinished(consumer)
        for shard in unfinished.values():
            self._later |= self._descendants(shard)
        shards = {id: shard for id, shard in {**unfinished, **shards}.items() if id not in self._later}
        if consumer is not None:
            self._consumer = OpenConsumer(list(shards.values()), consumer, "earliest" if where is None else where, self._clock)
            self._consumer.hold_parts(shards.values(), self._handle)
            for id, start in self._consumer.starts.items():
                self._lines[id] = self._line(shards[id], start)
            return

        def begin(shard: Shard) -> Start | None:
            # A snapshot without a consumer is pinned when its turn comes: one lease at a time.
            return start_of(shard, where.get(shard.id, "origin") if isinstance(where, dict) else where or "earliest")

        found = map_ordered(self._clock, begin, list(shards.values()), parallel=AT_ONCE)
        self._lines = {shard.id: self._line(shard, one) for shard, one in zip(shards.values(), found, strict=True)}

    def _line(self, shard: Shard, start: Start | None) -> _Line:
        offset = start.offset if start is not None and start.snapshot is None else None
        return _Line(shard, start, offset, offset, offset)

    def _unfinished(self, consumer: str | None) -> dict[str, Shard]:
        """Shards that were split before the consumer had read them to their end."""
        found = {}
        for id in self._watch.manifest.retired if consumer is not None else ():
            shard = self._handle(id)
            manifest = shard.log.manifests.load()
            record = manifest.consumers.get(consumer or "")
            ends = list(next_shards(manifest).values())
            if record is not None and ends and (record.snapshot is not None or (record.position, record.load) < ends[0]):
                found[id] = shard
        return found

    def _descendants(self, shard: Shard) -> set[str]:
        """Into what a shard was split, and those into what."""
        try:
            children = next_shards(shard.log.manifests.load())
        except NotFoundError:
            raise InvalidInputError(
                f"the offset names a shard {shard.id!r} that the table has not", hint="it is of another table"
            ) from None
        return {below for child in children for below in (child, *self._descendants(self._handle(child)))}

    def _find_new(self) -> None:
        """Shards that came since: they begin with their very first change. Those of a split wait for their parent's end."""
        shards = self._shards()
        for id in self._watch.manifest.retired:
            if id in self._lines and not self._lines[id].is_over:
                self._later |= self._descendants(self._lines[id].shard)
        for shard in shards:
            if shard.id not in self._lines and shard.id not in self._later:
                start = start_of(shard, "origin") if self._consumer is None else self._consumer.add(shard)
                self._lines[shard.id] = self._line(shard, start)

    # -- rounds

    def _run(self) -> Iterator[pa.RecordBatch]:
        waits, idle_since = 0, self._clock.monotonic()
        places_by: float | None = None
        while not self._stopped:
            moved = False
            for line in [line for line in self._lines.values() if line.offset is None]:
                moved = True
                yield from self._snapshot(line)
            horizons = self._horizons()
            for line, found in horizons:
                if found.end != line.offset:
                    moved = True
                    yield from self._changes(line, found)
            went_on = self._go_to_children(horizons)
            now = self._clock.monotonic()
            if moved or went_on:
                waits, idle_since = 0, now
            if not self._follow and not went_on:
                # The order goes on past a load as soon as that has its place, which takes a moment.
                places_by = places_by or now + _PLACES_WAIT
                if now >= places_by or not any(found.is_open for _, found in horizons):
                    break
            if not moved and not went_on:
                if self._idle_timeout is not None and now - idle_since >= self._idle_timeout:
                    break
                wait = min(self._poll, _FIRST_WAIT * (1 << min(waits, 16)))
                if self._idle_timeout is not None:
                    wait = min(wait, max(0.0, idle_since + self._idle_timeout - now))
                waits += 1
                self._clock.sleep(wait)
            self._commit_if_due()
            if self._follow:
                self._rules = self._watch.latest()
                self._find_new()
        self._finish()

    def _horizons(self) -> list[tuple[_Line, Horizon]]:
        def look(line: _Line) -> Horizon:
            assert line.offset is not None, "snapshots come first"
            found = horizon(line.shard, line.offset)
            if found.is_open and self._settle is not None:
                self._settle(line.shard, found.manifest)
            return found

        lines = [line for line in self._lines.values() if not line.is_over]
        return list(zip(lines, map_ordered(self._clock, look, lines, parallel=AT_ONCE), strict=True))

    def _changes(self, line: _Line, found: Horizon) -> Iterator[pa.RecordBatch]:
        # Others get their turn, too; and what is read in one go stays bounded.
        end = found.limited(_ROUND_ENTRIES) if self._follow else found.end
        while True:
            try:
                for batch in read(line.shard, line.offset or Offset(), end, rules=self._rules, newer=self._newer):
                    line.offset = batch.offset
                    yield batch.rows
                    line.asked = batch.offset  # the reader came back: it is done with that one
                    self._commit_if_due()
                    if self._stopped:
                        return
            except SnapshotExpiredError:  # rows of a type that was widened since we looked
                before = self._rules
                if self._newer() is before:
                    raise
                continue
            break
        line.offset = line.asked = end

    def _newer(self) -> RowRules:
        self._rules = self._watch.latest(force=True)
        return self._rules

    def _go_to_children(self, horizons: Sequence[tuple[_Line, Horizon]]) -> bool:
        """Shards that were split, and are at their end: their children go on."""
        went_on = False
        for line, found in horizons:
            if found.manifest.state == "retired" and line.offset is not None and line.offset >= found.end:
                line.is_over = True
                for child, offset in next_shards(found.manifest).items():
                    shard = self._handle(child)
                    start = Start(offset) if self._consumer is None else self._consumer.add(shard, offset)
                    self._lines[child] = self._line(shard, start)
                    self._later.discard(child)
                    went_on = True
        return went_on

    # -- snapshots

    def _snapshot(self, line: _Line) -> Iterator[pa.RecordBatch]:
        """The merged rows of a shard, as of a moment; its changes go on right there."""
        shard, clock = line.shard, self._clock
        start = line.start or pin_snapshot(shard, PIN_SECONDS)
        pin, after = start.snapshot, start.offset
        assert pin is not None, "it begins with a snapshot"
        renewed = clock.monotonic()
        rules, schema = self._rules, change_schema(self._rules)
        taken = shard.log.manifests.load().checkpoints.get(pin)
        time = taken.created_at if taken is not None else clock.now()
        try:
            batches = Scan(lambda: [shard.reader.view(pin)], rules).to_batches()
            rows = next(batches, None)
            while rows is not None:
                following = next(batches, None)
                columns = [*rows.columns, *stamped(rows.num_rows, None, after.position, after.load, time)]
                if following is None:
                    line.offset = after
                told = {OFFSET: json.dumps({shard.id: after} if following is None else {})}
                yield pa.RecordBatch.from_arrays(columns, schema=schema.with_metadata(told))
                if self._stopped:
                    return
                if self._consumer is None and clock.monotonic() - renewed > PIN_SECONDS / 4:
                    refresh_pin(shard.log, pin, clock.now() + PIN_SECONDS)
                    renewed = clock.monotonic()
                rows = following
            line.offset = line.asked = after
            if self._commit_interval is not None:
                self._commit_line(line)  # and with it the pin goes
        finally:
            if self._consumer is None:
                unpin(shard.log, pin)

    # -- the consumer's offset

    def _finish(self) -> None:
        ended, self._ended = self._ended, True
        if self._consumer is not None and self._commit_interval is not None and not ended:
            self._commit()

    def _commit_if_due(self) -> None:
        interval = self._commit_interval
        if self._consumer is not None and interval is not None and self._clock.monotonic() - self._committed_at >= interval:
            self._commit()

    def _commit(self) -> None:
        moved = [line for line in self._lines.values() if line.asked != line.committed]
        for _ in map_ordered(self._clock, self._commit_line, moved, parallel=AT_ONCE):
            pass
        self._committed_at = self._clock.monotonic()

    def _commit_line(self, line: _Line) -> None:
        if self._consumer is not None and line.asked is not None and line.asked != line.committed:
            self._consumer.advance(line.shard, line.asked)
            line.committed = line.asked
