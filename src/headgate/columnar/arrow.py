"""Slices as single Arrow files in a Store: for memory and for the simulation.

Owns: the same contract over whole objects. It reads a slice into memory at once, so it is for
tables that are in memory anyway; everything else is Lance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headgate.columnar.base import Columnar, Offsets, Slice, rows_without_columns
from headgate.columnar.expression import matching_rows
from headgate.errors import ObjectMissingError
from headgate.manifest.model import SliceRecord
from headgate.store import Store


class ArrowColumnar(Columnar):
    """One object per slice, ``<path>/rows.arrow``."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def write(self, path: str, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> SliceRecord:
        sink = pa.BufferOutputStream()
        rows = 0
        with pa.ipc.new_file(sink, schema) as writer:
            for batch in batches:
                rows += batch.num_rows
                writer.write_batch(batch)
        body = sink.getvalue()
        self._store.create(_key(path), memoryview(body).cast("B"))
        return SliceRecord(path=path, rows=rows, bytes=body.size)

    def open(self, path: str) -> Slice:
        try:
            data = self._store.get(_key(path))
        except ObjectMissingError as error:
            raise ObjectMissingError(f"{path} is missing", object=path) from error
        return ArrowSlice(pa.ipc.open_file(pa.py_buffer(data)).read_all())

    def drop(self, path: str) -> None:
        self._store.delete([_key(path)])


def _key(path: str) -> str:
    return f"{path}/rows.arrow"


class ArrowSlice(Slice):
    """A slice that is an Arrow table."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table.combine_chunks()
        self.num_rows, self.schema = table.num_rows, table.schema

    def scan(
        self, columns: Sequence[str], *, start: int = 0, stop: int | None = None, batch_rows: int = 1 << 16
    ) -> Iterator[pa.RecordBatch]:
        end = self.num_rows if stop is None else min(stop, self.num_rows)
        chosen = self._table.select(list(columns))
        for at in range(start, end, batch_rows):
            yield _one(chosen.slice(at, min(batch_rows, end - at)), min(batch_rows, end - at))

    def matching(self, filter: str, columns: Sequence[str]) -> Iterator[tuple[Offsets, pa.RecordBatch]]:
        offsets = matching_rows(self._table, filter)
        if len(offsets):
            yield offsets, self.take(offsets, columns)

    def take(self, offsets: Offsets, columns: Sequence[str]) -> pa.RecordBatch:
        return _one(self._table.select(list(columns)).take(pa.array(offsets)), len(offsets))

    def nearest(
        self, column: str, query: Any, k: int, metric: str, columns: Sequence[str], *, nprobes: int | None = None
    ) -> tuple[Offsets, npt.NDArray[np.float32]] | None:
        return None


def _one(table: pa.Table, rows: int) -> pa.RecordBatch:
    if not table.num_columns:
        return rows_without_columns(rows)
    if not rows:
        return pa.RecordBatch.from_arrays([pa.array([], f.type) for f in table.schema], schema=table.schema)
    return table.combine_chunks().to_batches()[0]
