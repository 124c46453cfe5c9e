"""Snapshots: one state of a table that many processes read beside each other, in parts.

Owns: which states of its shards it is made of, cutting it into parts, reading one of them anywhere.
Does not own: how a range of keys is merged (query), who holds it (checkpoint), where parts run (spark).

A snapshot travels to other processes, and a part to one of them, so both are small and hold no rows.
Each process opens the same states by itself. Held by a checkpoint, they stay for as long as its lease;
else until collection takes them. Whatever is gone then is an error, never fewer rows: a part that has
begun is not begun again in another state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TypeVar

import pyarrow as pa
import pyarrow.types as types

from headgate.clock import map_ordered
from headgate.errors import DataLossError, InvalidInputError, ObjectMissingError, SnapshotExpiredError
from headgate.query.ranges import count_rows, cut_ranges, scan_offsets, scan_range
from headgate.query.scan import chosen_columns
from headgate.schema import RowRules
from headgate.shard import Shard
from headgate.view import ReadView, find_checkpoint
from headgate.wal.tip import find_tip

PART_ROWS = 1 << 21
"""About how many rows a part has, at most."""
PART_BYTES = 64 << 20
_PART_ROWS_LEAST = 1 << 12
Result = TypeVar("Result")
_HINT = "read the table again; a longer lease holds it longer"


@dataclass(frozen=True)
class Part:
    """Rows of one shard: keys from ``low`` up to, not including, ``high``; without a key offsets from ``start`` up to ``stop``."""

    shard: int
    low: bytes | None = None
    high: bytes | None = None
    start: int = 0
    stop: int | None = None
    bounds: tuple[tuple[int, int], ...] | None = None
    """Where these keys are in each run."""


@dataclass(frozen=True)
class State:
    """Which state of a shard, where no checkpoint says it."""

    version: int
    id: str
    end: int


@dataclass(frozen=True)
class Snapshot:
    """A state of a table. Pickles; every process reads the same rows from it, with the columns of when it was taken."""

    id: str
    """Its own: no two have the same."""
    uri: str
    shards: tuple[Shard, ...] = field(repr=False)
    rules: RowRules = field(repr=False, compare=False)
    checkpoint: str | None = None
    """The id of the checkpoint that holds it. None: nothing does."""
    states: tuple[State, ...] = ()

    @property
    def schema(self) -> pa.Schema:
        return self.rules.schema

    def views(self) -> list[ReadView]:
        """Of all its shards, opened in this process.

        Raises:
            SnapshotExpiredError: the lease is over, or part of it was collected.
        """
        if not self.shards:
            return []
        places = self.shards[0].places
        return list(map_ordered(places.clock, self._view, range(len(self.shards)), parallel=places.at_once, patience=places.patience))

    def parts(self, columns: Sequence[str] | None = None, *, part_rows: int | None = None, parts_min: int = 1) -> list[Part]:
        """Parts of about as many rows each, for so many workers; together they are all of it.

        Args:
            columns: those that will be read: parts of few narrow columns have more rows.
            part_rows: about how many rows one has at most; None: as many as make a worker's start worth it.
            parts_min: at least so many, if there are as many rows.
        """
        for name, value in (("part_rows", 1 if part_rows is None else part_rows), ("parts_min", parts_min)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidInputError(f"{name} is {value!r}", hint="a whole number, 1 or more")
        chosen = chosen_columns(self.rules, columns)
        views = self.views()
        counts = [count_rows(view) for view in views]
        most = part_rows or _worth(self.rules, chosen, views, sum(counts))
        most = max(1, min(most, sum(counts) // parts_min))
        cut: list[Part] = []
        for number, (view, rows) in enumerate(zip(views, counts, strict=True)):
            if rows:
                cut += self._expecting(number, partial(self._cut, number, view, rows, -(-rows // most)))
        return cut

    def _cut(self, number: int, view: ReadView, rows: int, count: int) -> list[Part]:
        if not self.rules.key:
            bounds = [rows * at // count for at in range(count + 1)]
            return [Part(number, start=start, stop=stop) for start, stop in pairwise(bounds) if start < stop]
        return [Part(number, _sent(cut.low), _sent(cut.high), bounds=cut.bounds) for cut in cut_ranges(view, count)]

    def read(self, part: Part, columns: Sequence[str] | None = None, filter: str | None = None) -> Iterator[pa.RecordBatch]:
        """The rows of a part that count, then those of them that match the filter.

        Raises:
            SnapshotExpiredError: the lease is over, or part of it was collected.
        """
        view = self._view(part.shard)
        if self.rules.key:
            low, high = (self._bound(bound) for bound in (part.low, part.high))
            rows = scan_range(view, columns, low, high, filter=filter, bounds=part.bounds)
        else:
            rows = scan_offsets(view, columns, part.start, part.stop, filter=filter)
        while (batch := self._expecting(part.shard, lambda: next(rows, None))) is not None:
            yield batch

    def _bound(self, bound: bytes | None) -> pa.RecordBatch | None:
        return None if bound is None else pa.ipc.read_record_batch(pa.py_buffer(bound), self.rules.key_schema)

    def _view(self, number: int) -> ReadView:
        return self._expecting(number, lambda: self._opened(number))

    def _opened(self, number: int) -> ReadView:
        shard = self.shards[number]
        if self.checkpoint is None:
            state = self.states[number]
            return shard.reader.view_of(state.version, state.end, state.id)
        # A lease that is over ends reads, whether something was collected or not: what a program may do must not depend on that.
        found = find_checkpoint(shard.log.manifests.load(), self.checkpoint)
        if found is None or (found[1].expires_at is not None and found[1].expires_at <= shard.places.clock.now()):
            raise SnapshotExpiredError(f"the lease of the snapshot of {self.uri} is over", hint=_HINT)
        return shard.reader.view_of(found[1].version, found[1].end, held_by=self.checkpoint)

    def _expecting(self, number: int, read: Callable[[], Result]) -> Result:
        """What is missing was collected, unless the checkpoint is there that holds it: then it is lost."""
        try:
            return read()
        except ObjectMissingError as error:
            shard = self.shards[number]
            if self.checkpoint is not None and find_checkpoint(shard.log.manifests.load(), self.checkpoint) is not None:
                raise DataLossError(
                    f"{error.object} is missing, and checkpoint {self.checkpoint!r} of shard {shard.id} holds it", object=error.object
                ) from error
            raise SnapshotExpiredError(f"{error.object} was collected before it was read", hint=_HINT) from error


def _sent(bound: pa.RecordBatch | None) -> bytes | None:
    return None if bound is None else bytes(bound.serialize())


def unpinned(shards: Sequence[Shard]) -> tuple[State, ...]:
    """The states of some shards as of now, each with all that was durable. Writes nothing, and nothing holds them."""

    def state(shard: Shard) -> State:
        manifest, tip = find_tip(shard.log)
        return State(manifest.version, manifest.id, max(tip.position, manifest.last_place()))

    if not shards:
        return ()
    places = shards[0].places
    return tuple(map_ordered(places.clock, state, shards, parallel=places.at_once, patience=places.patience))


def _worth(rules: RowRules, columns: Sequence[str], views: Sequence[ReadView], rows: int) -> int:
    """How many rows make a part: no more than a worker holds easily, and enough to be worth its start."""
    kinds = [rules.schema.field(name).type for name in columns]
    if all(types.is_primitive(kind) for kind in kinds):
        row_bytes = sum(int(kind.bit_width) for kind in kinds) // 8
    else:
        stored = [run.record for view in views for run in view.runs]
        row_bytes = sum(run.bytes for run in stored) // max(1, sum(run.rows for run in stored))
    return min(max(PART_BYTES // max(1, row_bytes), _PART_ROWS_LEAST), PART_ROWS)
