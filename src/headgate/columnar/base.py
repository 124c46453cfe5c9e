"""The Columnar seam: all that a shard asks of the files that hold its runs.

Owns: the contract. Does not own: which rows go into a run (memtable, compaction) or which of
them count (query).

A slice is written once, under a fresh name, and never changed. It does not exist until a
manifest names it, so nothing here is atomic and nothing needs to be; what it must be is
durable before that manifest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headgate.manifest.model import SliceRecord

Offsets = npt.NDArray[np.int64]


class Slice(ABC):
    """One slice, open for reading. Rows have offsets 0 … num_rows - 1, in the order they were written.

    Safe for many threads. What is missing raises ``ObjectMissingError``.
    """

    num_rows: int
    schema: pa.Schema
    """As it was written."""

    @abstractmethod
    def scan(
        self, columns: Sequence[str], *, start: int = 0, stop: int | None = None, batch_rows: int = 1 << 16
    ) -> Iterator[pa.RecordBatch]:
        """The rows ``start`` to ``stop - 1``, in order, in batches of at most ``batch_rows``; columns in the order asked for.

        With no columns the batches have only their numbers of rows.
        """

    def read_through(self, *, start: int = 0, stop: int | None = None, batch_rows: int = 1 << 16) -> Iterator[pa.RecordBatch]:
        """The same, with all columns, for whoever replaces these rows by others: hardly anybody will read them again."""
        return self.scan(self.schema.names, start=start, stop=stop, batch_rows=batch_rows)

    @abstractmethod
    def matching(self, filter: str, columns: Sequence[str]) -> Iterator[tuple[Offsets, pa.RecordBatch]]:
        """The rows for which a SQL expression is true, with their offsets, in order; names are those in the files."""

    @abstractmethod
    def take(self, offsets: Offsets, columns: Sequence[str]) -> pa.RecordBatch:
        """The rows at these offsets, in the order asked for."""

    @abstractmethod
    def nearest(
        self, column: str, query: Any, k: int, metric: str, columns: Sequence[str], *, nprobes: int | None = None
    ) -> tuple[Offsets, npt.NDArray[np.float32]] | None:
        """By this slice's own vector index: offsets and distances of about the ``k`` nearest rows, nearest first. None: no index."""


class VectorColumn(NamedTuple):
    """A column of vectors that is searched: slices of at least so many rows get an index of it."""

    name: str
    metric: str
    rows_least: int


class Columnar(ABC):
    """Writes and opens slices below a table."""

    vectors: tuple[VectorColumn, ...] = ()
    """Whose slices are large and stay for long, as compaction's do, says here what to index in them."""
    scalars: tuple[str, ...] = ()
    """The same for columns that filters compare: slices of many rows get an index of their values."""

    parallel_reads: int = 1
    """How many reads at once pay, by threads of the caller's. 1: none, as where a simulation decides who runs."""
    scans_at_once: int = 1
    """How many slices are opened and scanned at once where each begins with waiting. 1: one after the other, and no threads."""
    elsewhere: Callable[[str], Columnar] | None = None
    """How to get at the files of another table, by its URI; None: there are none to get at."""

    @abstractmethod
    def write(self, path: str, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> SliceRecord:
        """Write a slice under a fresh name, and make it durable, its folders too, before returning.

        Raises:
            StoreUnavailableError: it may be tried again, under another name.
            StoreSyncError: fsync failed: nothing may be assumed, and nothing retried.
        """

    def write_ahead(self, path: str, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> tuple[SliceRecord, Callable[[], None] | None]:
        """The same, for whoever has other work meanwhile: it is durable when what comes with it has been called, by any thread.

        None: it is durable already.
        """
        return self.write(path, schema, batches), None

    @abstractmethod
    def open(self, path: str) -> Slice:
        """Raises ObjectMissingError."""

    def open_record(self, part: SliceRecord) -> Slice:
        """A slice that a manifest names: this table's, or that of the table it was cloned from. Raises ObjectMissingError."""
        if part.uri is None:
            return self.open(part.path)
        assert self.elsewhere is not None, "only what open_columnar gave reads clones"
        return self.elsewhere(part.uri).open(part.path)

    @abstractmethod
    def drop(self, path: str) -> None:
        """Delete a slice; what is missing counts as deleted."""


def rows_without_columns(rows: int) -> pa.RecordBatch:
    """So many rows, and nothing in them."""
    return pa.RecordBatch.from_struct_array(pa.Array.from_buffers(pa.struct([]), rows, [None]))
