"""Changes as Arrow rows: the columns of the table of now, and where each row comes from.

Owns: what a batch of changes looks like, rows of any age made into it. Does not own: which rows come, in which order (feed).

Nothing here is done row by row: entries that follow each other are joined, and read by the columns of now as one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headgate.schema import RowRules, as_now
from headgate.wal.entry import Entry, Put

CHANGE_FIELDS = (
    pa.field("_op", pa.string(), False),
    pa.field("_epoch", pa.int64()),
    pa.field("_position", pa.int64(), False),
    pa.field("_load", pa.int64(), False),
    pa.field("_time", pa.timestamp("us", "UTC")),
)
OFFSET = b"headgate.offset"
"""In the metadata of a batch's schema: the offset after it, as JSON: {shard: [position, load]}."""
_OPS = pa.Array.from_buffers(  # pa.array would look for pandas, and load it
    pa.string(), 2, [None, pa.py_buffer(np.array([0, 6, 12], np.int32)), pa.py_buffer(b"upsertdelete")]
)


class Offset(NamedTuple):
    """How far a shard's changes were read: all entries before ``position``, and all loads up to ``load``."""

    position: int = 0
    load: int = 0


class ChangeBatch(NamedTuple):
    """Changes in order, and the offset after them.

    A load is given in several batches, and until its last one the offset is the one before it.
    """

    rows: pa.RecordBatch
    offset: Offset


def change_schema(rules: RowRules) -> pa.Schema:
    """Of all batches: the table's columns, all of which are null in a delete but the key, and where each row comes from."""
    return pa.schema([*(pa.field(f.name, f.type) for f in rules.schema), *CHANGE_FIELDS])


class Form:
    """Turns rows of any age into changes of the table of now."""

    def __init__(self, shard: str, rules: RowRules, newer: Callable[[], RowRules] | None) -> None:
        self._shard, self._newer = shard, newer
        self._use(rules)

    def _use(self, rules: RowRules) -> None:
        self.rules, self.columns = rules, rules.schema.names
        self.schema = change_schema(rules)
        self._highest = max(rules.field_ids)

    def knows(self, names: Mapping[int, str]) -> bool:
        return self._newer is None or max(names, default=0) <= self._highest

    def look(self, names: Mapping[int, str]) -> None:
        """Rows with these columns come: are there newer rules?"""
        if not self.knows(names):
            assert self._newer is not None
            self._use(self._newer())
            self._highest = max(self._highest, *names)  # dropped again since: not asked for twice

    def now(self, rows: pa.RecordBatch, names: Mapping[int, str]) -> pa.RecordBatch:
        return as_now(rows, names, self.rules, self.columns)

    def batch(self, rows: pa.RecordBatch, marks: Sequence[pa.Array], after: Offset) -> ChangeBatch:
        metadata = {OFFSET: json.dumps({self._shard: after})}
        return ChangeBatch(pa.RecordBatch.from_arrays([*rows.columns, *marks], schema=self.schema.with_metadata(metadata)), after)


def together(form: Form, entries: Sequence[Entry], load: int) -> Iterator[ChangeBatch]:
    """One batch; or more, where newer columns begin."""
    alike: list[Entry] = []
    schema: pa.Schema | None = None
    for entry in entries:
        for put in entry.puts:
            if schema is None or not put.rows.schema.equals(schema, check_metadata=True):
                schema = put.rows.schema
                names = form.rules.names_in(schema)
                if not form.knows(names):
                    if alike:
                        yield _joined_batch(form, alike, load)
                        alike = []
                    form.look(names)
        alike.append(entry)
    yield _joined_batch(form, alike, load)


def _joined_batch(form: Form, entries: Sequence[Entry], load: int) -> ChangeBatch:
    puts = [put for entry in entries for put in entry.puts]
    parts = [form.now(_joined(group), form.rules.names_in(group[0].schema)) for group in _groups(puts)]
    rows = _joined(parts)
    lengths = np.array([sum(put.rows.num_rows for put in entry.puts) for entry in entries])

    def per_entry(values: list[int]) -> pa.Array:
        return pa.array(np.repeat(np.array(values, np.int64), lengths))

    deletes = np.array([put.op == "delete" for put in puts], np.int8)
    marks = [
        pc.take(_OPS, pa.array(np.repeat(deletes, [put.rows.num_rows for put in puts])))
        if deletes.any()
        else pa.repeat(_OPS[0], rows.num_rows),
        per_entry([entry.epoch for entry in entries]),
        per_entry([entry.position for entry in entries]),
        pa.array(np.zeros(rows.num_rows, np.int64)),
        _times(per_entry([round(entry.time * 1e6) for entry in entries])),
    ]
    return form.batch(rows, marks, Offset(entries[-1].position + 1, load))


def _groups(puts: Sequence[Put]) -> Iterator[list[pa.RecordBatch]]:
    """Rows that follow each other and look the same: they are read as one."""
    group: list[pa.RecordBatch] = []
    for put in puts:
        rows = put.rows
        if group and not rows.schema.equals(group[0].schema, check_metadata=True):
            yield group
            group = []
        group.append(rows)
    yield group


def _joined(parts: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    return parts[0] if len(parts) == 1 else pa.concat_batches(parts)


def _times(microseconds: pa.Array) -> pa.Array:
    return microseconds.cast(pa.timestamp("us", "UTC"))


def stamped(rows: int, deleted: pa.Array | None, place: int, load: int, time: float) -> list[pa.Array]:
    """The columns that say where rows come from which no entry holds: those of a load, or of a snapshot.

    ``_position`` is that of the last entry before them, so (``_position``, ``_load``) sorts as the changes count.
    """
    return [
        pa.repeat(_OPS[0], rows) if deleted is None else pc.if_else(deleted, "delete", "upsert"),
        pa.nulls(rows, pa.int64()),
        pa.array(np.full(rows, place - 1, np.int64)),
        pa.array(np.full(rows, load, np.int64)),
        _times(pa.array(np.full(rows, round(time * 1e6), np.int64))),
    ]
