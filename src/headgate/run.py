"""Runs: what MemTables become, and what reads find below them.

Owns: turning puts into the rows of a run (newest per key, sorted, tombstones), writing them,
and opening what is there. Does not own: when (flush), which of several runs' rows count (query).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa

from headgate.columnar import Columnar, Slice
from headgate.manifest.model import RunRecord

DELETED = "__headgate_deleted"
"""The column that marks tombstones, in runs that have any."""


@dataclass(frozen=True)
class OpenRun:
    """A run of a manifest, open for reading. Its slices follow each other by key; offsets count through all of them."""

    record: RunRecord
    columnar: Columnar

    @property
    def rows(self) -> int:
        return self.record.rows

    @property
    def names(self) -> dict[int, str]:
        """What its columns are called in the files, by field id."""
        return dict(self.record.fields)

    @cached_property
    def slices(self) -> list[Slice]:
        """Opened on first use. Raises ObjectMissingError."""
        return [self.columnar.open(part.path) for part in self.record.slices]

    def scan(self, columns: Sequence[str], *, batch_rows: int = 1 << 16) -> Iterator[pa.RecordBatch]:
        """All rows in order, tombstones included; ``columns`` by their names in the files."""
        for part in self.slices:
            yield from part.scan(columns, batch_rows=batch_rows)
