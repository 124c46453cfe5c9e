"""Rows into the files of a load: sorted runs, shard by shard, in bounded memory.

Owns: fitting rows, holding them until there are enough, writing them; and making few runs of the
slices that many processes wrote. Does not own: who may write (attempt), how the files come in (bulk).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headgate.clock import Clock, map_ordered
from headgate.columnar import Columnar
from headgate.errors import InvalidInputError, SchemaMismatchError
from headgate.failpoint import failpoint
from headgate.keys import Bools, KeyOrder, Keys, RunRows, rows_of
from headgate.manifest.model import RunRecord, SliceRecord
from headgate.quarantine import Quarantine, split_bad
from headgate.run import DELETED, SLICE_ROWS, OpenRun, run_batches, run_schema
from headgate.schema import RowRules, as_now
from headgate.wal.entry import Op, Put

OP = "_op"
"""The column that says what a row does, where rows of both kinds come together."""
_TYPES = "types"
"""Goes along with a run of a load: a number that tells its columns' types from others."""
_JOINED_MAX = 4096
_SMALL_BYTES = 16 << 20
_GATHERED_ROWS = 1 << 16
_GATHERED_BYTES = 8 << 20
_WRITES_AT_ONCE = 8

Fit = Callable[[pa.RecordBatch, pa.Schema, tuple[str, ...]], tuple[pa.RecordBatch | None, pa.RecordBatch | None]]
"""Makes of rows, for a schema and a key, those that fit, and those that do not, with their reasons."""


@dataclass(frozen=True)
class MarkedRows:
    """Rows with the log's columns, and which of them are tombstones."""

    rows: pa.RecordBatch
    deleted: Bools | None

    def marks(self) -> Bools:
        return np.zeros(self.rows.num_rows, np.bool_) if self.deleted is None else self.deleted


class RunFiles:
    """Rows of all shards, held until there are enough of them, and then written, sorted by key."""

    def __init__(
        self,
        rules: RowRules,
        columnar: Columnar,
        fresh_folder: Callable[[str], str],
        max_memory: int,
        quarantine: Quarantine | None,
        clock: Clock,
        load: tuple[str, int] | None = None,
    ) -> None:
        """``fresh_folder`` makes a new place for a run of a shard; ``load`` is (app, version), if it may come again."""
        self.rules, self._columnar, self._fresh_folder, self._max_memory = rules, columnar, fresh_folder, max_memory
        self._quarantine, self._clock, self._load = quarantine, clock, load or (None, None)
        self._order = KeyOrder(rules) if rules.key else None
        self._held: dict[str, list[MarkedRows]] = {}
        self._bytes: dict[str, int] = {}
        self._runs: dict[str, list[_Open]] = {}
        self.num_rows = self.quarantined_rows = 0

    def fitted(self, batch: pa.RecordBatch, op: Op) -> Iterator[MarkedRows]:
        """The rows as the table has them; bad ones fail, or are kept aside."""
        if OP not in batch.schema.names:
            rows = self._good(batch, op)
            if rows is not None:
                yield self._whole([Put(rows, op)])
            return
        ops = batch.column(OP)
        if isinstance(ops, pa.DictionaryArray):
            ops = ops.dictionary_decode()
        marks = np.asarray(pc.fill_null(pc.equal(ops, "delete"), False))
        known = pc.is_in(ops, value_set=pa.array(["upsert", "delete"], ops.type))
        if not pc.all(known).as_py():
            strange = ops.filter(pc.invert(known))[0].as_py()
            raise InvalidInputError(f"{OP} is {strange!r}", hint='"upsert" or "delete"')
        rest = batch.drop_columns([OP])
        # Rows that follow each other and do the same are taken together, so that the last one of a key stays the last.
        if not marks.any() or marks.all():
            rows = self._good(rest, "delete" if marks.any() else "upsert")
            if rows is not None:
                yield self._whole([Put(rows, "delete" if marks.any() else "upsert")])
            return
        upserts, deletes = self._good(rest.filter(pa.array(~marks)), "upsert"), self._good(rest.filter(pa.array(marks)), "delete")
        puts = [Put(rows, kind) for rows, kind in ((upserts, "upsert"), (deletes, "delete")) if rows is not None]  # type: ignore[arg-type]
        whole = self._whole(puts)
        if whole.rows.num_rows != batch.num_rows or whole.deleted is None:
            yield whole  # some are in quarantine: those that are left keep the order upserts, then deletes
            return
        back = np.argsort(np.concatenate([np.flatnonzero(~marks), np.flatnonzero(marks)]), kind="stable")
        yield MarkedRows(whole.rows.take(pa.array(back)), whole.deleted[back])

    def _good(self, rows: pa.RecordBatch, op: Op) -> pa.RecordBatch | None:
        rows = _by_name(rows, self.rules, op)
        if self._quarantine is None:
            return self.rules.upsert(rows) if op == "upsert" else self.rules.delete(rows)
        good, bad = split_bad(self.rules, rows, op)
        self.keep_aside(bad)
        return good

    def keep_aside(self, bad: pa.RecordBatch | None) -> None:
        """Rows that cannot be taken, with their reasons."""
        if bad is not None:
            assert self._quarantine is not None, "else they fail"
            self._quarantine.keep(bad, *self._load)
            self.quarantined_rows += bad.num_rows

    def _whole(self, puts: Sequence[Put]) -> MarkedRows:
        table = rows_of(puts, self.rules, self.rules.schema.names).combine_chunks()
        counts = [put.rows.num_rows for put in puts]
        deleted = np.repeat(np.array([put.op == "delete" for put in puts]), counts) if any(p.op == "delete" for p in puts) else None
        batches = table.to_batches()
        assert len(batches) == 1, "one batch came in"
        return MarkedRows(batches[0], deleted)

    def take(self, shard: str, rows: MarkedRows) -> None:
        self._held.setdefault(shard, []).append(rows)
        self._bytes[shard] = self._bytes.get(shard, 0) + rows.rows.nbytes
        self.num_rows += rows.rows.num_rows
        # What is written is held about three times: as it came, sorted, and by the files' writer.
        while sum(self._bytes.values()) * 3 > self._max_memory:
            self._write(max(self._bytes, key=lambda name: self._bytes[name]))

    def finish(self) -> dict[str, list[RunRecord]]:
        """Write what is held; the runs of each shard, oldest first."""
        if sum(self._bytes.values()) <= _SMALL_BYTES:  # then what takes long is the store: all shards wait for it together
            list(map_ordered(self._clock, self._write, sorted(self._held), parallel=_WRITES_AT_ONCE))
        for shard in sorted(self._held):
            self._write(shard)
        return {shard: [run.record(self.rules) for run in some] for shard, some in self._runs.items()}

    def _write(self, shard: str) -> None:
        held = self._held.pop(shard)
        del self._bytes[shard]
        rows = pa.Table.from_batches([part.rows for part in held])
        deleted = None
        if any(part.deleted is not None for part in held):
            deleted = np.concatenate(
                [part.deleted if part.deleted is not None else np.zeros(part.rows.num_rows, np.bool_) for part in held]
            )
        del held
        first = last = None
        merged = RunRows(rows)
        if self._order is not None:
            keys = self._order.of(rows)
            newest = keys.newest()
            ordered = keys if newest is None else keys.take(newest)
            first, last = ordered.part(0, 1), ordered.part(len(ordered) - 1, len(ordered))
            if deleted is not None and newest is not None:
                deleted = deleted[newest]
            merged = RunRows(rows, newest, deleted if deleted is not None and deleted.any() else None)
            del keys, ordered
        runs = self._runs.setdefault(shard, [])
        if not runs or not runs[-1].can_take(first, merged.deleted is not None):
            runs.append(_Open(self._fresh_folder(shard), merged.deleted is not None))
        run = runs[-1]
        run.last = last
        source, count = _Stretches(run_batches(merged)), max(1, -(-merged.num_rows // SLICE_ROWS))
        slice_rows = -(-merged.num_rows // count)  # all about the same: compaction does not keep one that is small
        while not source.is_done():
            path = f"{run.folder}/{len(run.slices):05d}.lance"
            run.slices.append(self._columnar.write(path, run_schema(merged), source.up_to(slice_rows)))
            failpoint("bulk.slice")
        run.tombstones += merged.tombstones


@dataclass
class _Open:
    """A run as it is written: slices in the order of their keys."""

    folder: str
    has_marks: bool
    slices: list[SliceRecord] = field(default_factory=list)
    tombstones: int = 0
    last: Keys | None = None

    def can_take(self, first: Keys | None, has_marks: bool) -> bool:
        """Do keys from ``first`` on come after all that is here? (Without keys: always.)"""
        if has_marks != self.has_marks:
            return False
        return first is None or self.last is None or _comes_after(first, self.last)

    def record(self, rules: RowRules) -> RunRecord:
        return RunRecord(
            id=self.folder.rsplit("/", 1)[1],
            first=0,
            end=0,
            slices=tuple(self.slices),
            fields=tuple(zip(rules.field_ids, rules.schema.names, strict=True)),
            tombstones=self.tombstones,
            **{_TYPES: f"{zlib.crc32(str(rules.log_schema.types).encode()):08x}"},  # type: ignore[arg-type]  # beside the fields
        )


class _Stretches:
    """A stream of batches, given out in stretches of so many rows."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._rest = next(batches, None)

    def is_done(self) -> bool:
        return self._rest is None

    def up_to(self, rows: int) -> Iterator[pa.RecordBatch]:
        while rows > 0 and self._rest is not None:
            batch = self._rest.slice(0, rows)
            rows -= batch.num_rows
            self._rest = self._rest.slice(batch.num_rows) if batch.num_rows < self._rest.num_rows else next(self._batches, None)
            yield batch


def batches_of(data: Any) -> Iterator[pa.RecordBatch]:
    if isinstance(data, pa.RecordBatch):
        yield data
    elif isinstance(data, pa.Table):
        yield from data.combine_chunks().to_batches()
    elif hasattr(data, "__arrow_c_stream__"):
        yield from pa.RecordBatchReader.from_stream(data)
    elif isinstance(data, Iterable):
        for part in data:
            yield from batches_of(part)
    else:
        raise InvalidInputError(f"rows come as {type(data).__name__}", hint="Arrow batches, a table, or an iterator of them")


def gathered(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in larger batches: what is done once for each batch and shard is done less often."""
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        if held and not batch.schema.equals(held[0].schema):
            yield from _together(held)
            held, rows, size = [], 0, 0
        held.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if rows >= _GATHERED_ROWS or size >= _GATHERED_BYTES:
            yield from _together(held)
            held, rows, size = [], 0, 0
    yield from _together(held)


def _together(held: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    return held if len(held) < 2 else pa.Table.from_batches(held).combine_chunks().to_batches()


def _by_name(rows: pa.RecordBatch, rules: RowRules, op: Op) -> pa.RecordBatch:
    """The columns in the table's order; those that the table has not are refused."""
    names = rules.schema.names if op == "upsert" else list(rules.key)
    have = rows.schema.names
    strange = [name for name in have if name not in rules.schema.names]
    missing = [name for name in names if name not in have]
    if strange or missing:
        what = f"there is no column {strange[0]!r} in the table" if strange else f"column {missing[0]!r} is missing"
        raise SchemaMismatchError(what, hint=f"the table has {', '.join(rules.schema.names)}")
    return rows.select(names)


def read_back(record: RunRecord, rules: RowRules, columnar: Columnar) -> Iterator[pa.RecordBatch]:
    """The rows of a run as they can be written again: the table's columns, and what each row does where there are tombstones."""
    run, names = OpenRun(record, columnar), rules.schema.names
    for batch in run.scan(run.schema.names):
        rows = as_now(batch, run.names, rules, names)
        if DELETED in batch.schema.names:
            rows = rows.append_column(OP, pc.if_else(batch.column(DELETED), "delete", "upsert"))
        yield rows


def join(runs: Sequence[RunRecord], rules: RowRules, columnar: Columnar) -> tuple[RunRecord, ...]:
    """As few runs as the same slices make: those whose keys do not overlap, or all where there is no key.

    A load that was written by many tasks, each with its own range of keys, becomes one run.
    """
    runs = [run for run in runs if run.rows]
    if len(runs) < 2 or sum(len(run.slices) for run in runs) > _JOINED_MAX:
        return tuple(runs)
    found: list[RunRecord] = []
    # A column may have been widened between two tasks: slices of one run have the same types.
    for _, alike in groupby(runs, key=lambda run: (run.fields, run.tombstones > 0, (run.model_extra or {}).get(_TYPES))):
        found += _joined(list(alike), rules, columnar)
    return tuple(found)


def _joined(runs: list[RunRecord], rules: RowRules, columnar: Columnar) -> list[RunRecord]:
    if len(runs) < 2:
        return runs
    if not rules.key:
        return [_one_of(runs)]
    order, key = KeyOrder(rules), list(rules.key)
    ids = [rules.field_ids[rules.schema.get_field_index(name)] for name in key]
    edges = []
    for record in runs:
        run = OpenRun(record, columnar)
        rows = run.take(np.array([0, run.rows - 1]), [run.names[id] for id in ids])
        edges.append(as_now(rows, run.names, rules, key))
    bounds = order.of(pa.Table.from_batches(edges))
    at = bounds.take(np.arange(0, 2 * len(runs), 2)).order()
    apart = all(_comes_after(bounds.part(2 * b, 2 * b + 1), bounds.part(2 * a + 1, 2 * a + 2)) for a, b in pairwise(at.tolist()))
    return [_one_of([runs[number] for number in at])] if apart else runs


def _comes_after(key: Keys, other: Keys) -> bool:
    return bool(other.positions(key)[0] == 1)


def _one_of(runs: Sequence[RunRecord]) -> RunRecord:
    return runs[0].but(slices=tuple(part for run in runs for part in run.slices), tombstones=sum(run.tombstones for run in runs))
