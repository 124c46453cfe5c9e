"""Slices as Lance datasets.

Owns: writing one dataset per slice, syncing it, and reading it by offset. Does not own:
versions: a dataset is written once and stays at its first version. Lance rebases every commit
onto its latest version, so what an attempt left unpublished would come back in the next one.

Lance syncs nothing. The manifest that names a run lets collection delete the log entries the
run replaces, so every file of it, and every folder that leads to it, is synced first.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext, suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headgate.columnar.base import Columnar, Offsets, Slice, VectorColumn, rows_without_columns
from headgate.columnar.passage import passage
from headgate.errors import InvalidInputError, ObjectMissingError, StoreError, StoreUnavailableError
from headgate.manifest.model import SliceRecord
from headgate.store import Location
from headgate.store.local import sync_tree

if TYPE_CHECKING:
    from lance.file import LanceFileSession

logger = logging.getLogger("headgate")

_ROWS_PER_FILE = (1 << 31) - 1  # Lance counts them in 32 bits, and more than fit come to a file per batch
_BYTES_PER_FILE = 1 << 60
_SAMPLES_PER_PARTITION = 32
_SCALAR_ROWS_LEAST = 1 << 16
_PROBES_LEAST, _PROBES_SHARE = 20, 8
_BATCHES_AHEAD = 4
_BATCHES_AHEAD_OF_MERGE = 2  # of each of several runs, from a disk
_AHEAD_BYTES = 64 << 20
_READERS_MAX, _READERS_OF_A_SLICE_MAX = 128, 2  # each holds a file open
_READER_BYTES_MAX = 8 << 20
_BLOCK_BYTES = 1 << 16  # what lies nearer is read at once: many small reads cost more than what lies between


class _Readers:
    """Readers of small files that nobody uses at the moment, of the slices that were read last. One is for one thread at a time.

    Without a lock, since whoever lets a slice go may do so anywhere, also in here: each step is one of a dict's own. Of two
    threads that give something back at once, one may lose it.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._free: dict[object, dict[tuple[str, ...], Any]] = {}

    def taken(self, slice: object, columns: tuple[str, ...]) -> Any:
        """A reader that is free; None: there is none."""
        return self._free.get(slice, {}).pop(columns, None)

    def give_back(self, slice: object, columns: tuple[str, ...], reader: Any) -> None:
        free = self._free.pop(slice, {})
        if len(free) >= _READERS_OF_A_SLICE_MAX:
            free.clear()
        free[columns] = reader
        self._free[slice] = free  # the last one now
        while len(self._free) > self._most:
            with suppress(StopIteration, RuntimeError):  # another thread does the same
                self._free.pop(next(iter(self._free)), None)

    def forget(self, slice: object) -> None:
        """Nobody will read it again. What is deleted takes room as long as it is open."""
        self._free.pop(slice, None)


_READERS = _Readers(_READERS_MAX)


class LanceColumnar(Columnar):
    """Datasets below a table's place."""

    parallel_reads = 4

    def __init__(self, place: Location, *, fsync: bool = True) -> None:
        import lance  # noqa: F401  # now, and not in the middle of the first flush: it takes a moment, and memory

        self._place, self._fsync = place, fsync
        if place.scheme != "file":  # every read begins with waiting for answers
            self.parallel_reads, self.scans_at_once = 16, 16
        self._options = dict(place.options) or None
        self._session: LanceFileSession | None = None

    @property
    def _files(self) -> LanceFileSession:
        """Reads files below the table's place, over connections that they share."""
        if self._session is None:
            from lance.file import LanceFileSession

            self._session = LanceFileSession(self._place.uri, self._options)
        return self._session

    def uri(self, path: str) -> str:
        return f"{self._place.uri}/{path}"

    def write(self, path: str, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> SliceRecord:
        record, sync = self.write_ahead(path, schema, batches)
        if sync is not None:
            sync()
        return record

    def write_ahead(self, path: str, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> tuple[SliceRecord, Callable[[], None] | None]:
        import lance

        rows = 0
        failure: Exception | None = None
        has_decimals = any(_has(field.type, pa.types.is_decimal) for field in schema)

        def counted() -> Iterator[pa.RecordBatch]:
            nonlocal rows, failure
            try:
                for batch in batches:
                    rows += batch.num_rows
                    yield _aligned(batch) if has_decimals else batch
            except Exception as error:  # Lance would tell it as its own: whoever gave us the rows should hear what he said
                failure = error
                raise

        reader = pa.RecordBatchReader.from_batches(schema, counted())
        try:
            dataset = lance.write_dataset(
                reader,
                self.uri(path),
                mode="create",
                max_rows_per_file=_ROWS_PER_FILE,
                max_bytes_per_file=_BYTES_PER_FILE,
                storage_options=self._options,
                data_storage_version=_storage_version(schema),
            )
        except BaseException as error:
            if failure is not None:
                raise failure from None
            if _is_panic(error):
                raise StoreError(f"{path} could not be written: Lance gave up: {error}", object=path) from error
            if not isinstance(error, OSError):
                raise
            raise StoreUnavailableError(f"{path} could not be written: {_told(error)}", object=path) from error
        size = sum(file.file_size_bytes or 0 for fragment in dataset.get_fragments() for file in fragment.data_files())
        for vector in self.vectors:
            if rows >= vector.rows_least and vector.name in schema.names:
                _index_vectors(dataset, vector, rows, path)
        for name in self.scalars:
            if rows >= _SCALAR_ROWS_LEAST and name in schema.names:
                _index_values(dataset, name, path)
        is_synced = self._place.scheme != "file" or not self._fsync
        return SliceRecord(path=path, rows=rows, bytes=size), (
            None if is_synced else partial(sync_tree, self.uri(path), above=self._place.path)
        )

    def open(self, path: str) -> Slice:
        return LanceSlice(self.uri(path), path, self._options, self._files, self._place.path if self._place.scheme == "file" else None)

    def drop(self, path: str) -> None:
        import lance

        try:
            lance.LanceDataset.drop(self.uri(path), storage_options=self._options)
        except (OSError, ValueError):
            if self._place.scheme == "file" and os.path.exists(self.uri(path)):
                raise


def _index_vectors(dataset: Any, vector: VectorColumn, rows: int, path: str) -> None:
    """An index for nearest neighbours: vectors by partition, as they are. One that cannot be made is not missed: all are looked at."""
    try:
        dataset.create_index(
            vector.name, "IVF_FLAT", metric=vector.metric, num_partitions=_partitions(rows), sample_rate=_SAMPLES_PER_PARTITION
        )
    except Exception as error:  # whatever it is, the rows are there, and so is the search
        logger.warning("%s: no index of %s: %s", path, vector.name, _told(error))


def _index_values(dataset: Any, name: str, path: str) -> None:
    """An index of a column's values in order. Lance uses it for filters by itself."""
    try:
        dataset.create_scalar_index(name, "BTREE")
    except Exception as error:  # as above
        logger.warning("%s: no index of %s: %s", path, name, _told(error))


def _partitions(rows: int) -> int:
    return max(1, int(rows**0.5))


def _aligned(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Lance takes decimals at multiples of 16 bytes only; what another process sent lies at multiples of 8."""
    columns = [
        pa.concat_arrays([column, column.slice(0, 0)])  # a copy
        if _has(column.type, pa.types.is_decimal) and any(b is not None and b.address % 16 for b in column.buffers())
        else column
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def _storage_version(schema: pa.Schema) -> Literal["2.0"] | None:
    """The file format: 2.0 is written and scanned in about half the time of the default, for files a fifth larger.

    It cannot tell a struct that is null from one whose fields are, so tables with structs get the default.
    """
    return None if any(_has(field.type, _is_struct) for field in schema) else "2.0"


def _is_struct(kind: pa.DataType) -> bool:
    return bool(pa.types.is_struct(kind) or pa.types.is_map(kind))


def _has(kind: pa.DataType, is_one: Callable[[pa.DataType], bool]) -> bool:
    """Is it one of these, or any part of it?"""
    return is_one(kind) or (bool(pa.types.is_nested(kind)) and any(_has(kind.field(i).type, is_one) for i in range(kind.num_fields)))


class LanceSlice(Slice):
    """A slice that is a Lance dataset, at its only version."""

    def __init__(self, uri: str, path: str, options: dict[str, str] | None, files: LanceFileSession, on_disk: str | None = None) -> None:
        import lance

        self._path, self._on_disk = path, on_disk
        try:
            self._dataset = lance.dataset(uri, storage_options=options, block_size=_BLOCK_BYTES)
        except (ValueError, OSError) as error:
            if _is_missing(error):
                raise ObjectMissingError(f"{path} is missing", object=path) from error
            raise StoreUnavailableError(f"{path} could not be opened: {_told(error)}", object=path) from error
        self.num_rows, self.schema = self._dataset.count_rows(), self._dataset.schema
        self._files, self._token = files, object()
        weakref.finalize(self, _READERS.forget, self._token)
        fragments = self._dataset.get_fragments()
        parts = [file for fragment in fragments for file in fragment.data_files()]
        is_whole = len(parts) == 1 and all(fragment.deletion_file() is None for fragment in fragments)
        self._file = f"{path}/data/{parts[0].path}" if is_whole else None
        """The one file of it, as we wrote it. None: somebody else wrote the dataset, in parts or with rows deleted."""
        self._file_bytes = sum(file.file_size_bytes or _READER_BYTES_MAX for file in parts)

    @cached_property
    def _starts(self) -> Offsets:
        """Where each fragment's rows begin: one fragment, unless somebody else wrote the dataset."""
        counts = [fragment.count_rows() for fragment in self._dataset.get_fragments()]
        return np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64)

    def scan(
        self, columns: Sequence[str], *, start: int = 0, stop: int | None = None, batch_rows: int = 1 << 16
    ) -> Iterator[pa.RecordBatch]:
        return self._scan(columns, start, self.num_rows if stop is None else min(stop, self.num_rows), batch_rows, _BATCHES_AHEAD)

    def _scan(self, columns: Sequence[str], start: int, end: int, batch_rows: int, batches_ahead: int) -> Iterator[pa.RecordBatch]:
        if not columns:
            for at in range(start, end, batch_rows):
                yield rows_without_columns(min(batch_rows, end - at))
            return
        if self._file is None:
            yield from self._reading(self._scanned(columns, start, end, batch_rows))
            return
        # The file itself: planning a query of a dataset takes longer than reading many a run. Lance reads ahead as fast as it
        # can, whatever is taken of it: a few batches at a time keep it in bounds.
        wanted, step = tuple(columns), batches_ahead * batch_rows
        reader = _READERS.taken(self._token, wanted) or next(
            self._reading(iter([partial(self._files.open_reader, self._file, list(columns))]))
        )
        for first in range(start, end, step):
            rows = min(end, first + step) - first
            batches = reader.read_range(first, rows, batch_size=batch_rows, batch_readahead=batches_ahead).to_batches()
            for batch in self._reading(batches):
                yield batch if batch.schema.names == list(columns) else batch.select(list(columns))
        if self._file_bytes <= _READER_BYTES_MAX:
            _READERS.give_back(self._token, wanted, reader)

    def read_through(self, *, start: int = 0, stop: int | None = None, batch_rows: int = 1 << 16) -> Iterator[pa.RecordBatch]:
        if self._on_disk is None or self._file is None or self._file_bytes <= _READER_BYTES_MAX:
            yield from self.scan(self.schema.names, start=start, stop=stop, batch_rows=batch_rows)
            return
        end, row = self.num_rows if stop is None else min(stop, self.num_rows), start
        file = self._file
        way = passage(f"{self._on_disk}/{file}", lambda: self._files.open_reader(file).metadata(), start)
        with closing(way) if way is not None else nullcontext():
            for batch in self._scan(self.schema.names, start, end, batch_rows, _BATCHES_AHEAD_OF_MERGE):
                yield batch
                row += batch.num_rows
                if way is not None:
                    way.passed(row)

    def _scanned(self, columns: Sequence[str], start: int, end: int, batch_rows: int) -> Iterator[pa.RecordBatch]:
        step = _BATCHES_AHEAD * batch_rows
        for first in range(start, end, step):
            scanner = self._dataset.scanner(
                columns=list(columns),
                batch_size=batch_rows,
                scan_in_order=True,
                offset=first,
                limit=min(end, first + step) - first,
                io_buffer_size=_AHEAD_BYTES,
            )
            yield from scanner.to_batches()

    def matching(self, filter: str, columns: Sequence[str]) -> Iterator[tuple[Offsets, pa.RecordBatch]]:
        scanner = self._dataset.scanner(
            columns=list(columns), filter=filter, with_row_address=True, scan_in_order=True, io_buffer_size=_AHEAD_BYTES
        )
        for batch in self._reading(scanner.to_batches()):
            if batch.num_rows:
                yield self._offsets(batch.column("_rowaddr")), batch.select(list(columns))

    def take(self, offsets: Offsets, columns: Sequence[str]) -> pa.RecordBatch:
        if not len(offsets):
            return pa.RecordBatch.from_pylist([], schema=pa.schema([self.schema.field(name) for name in columns]))
        table = next(self._reading(iter([lambda: self._dataset.take(offsets, columns=list(columns))])))
        return table.combine_chunks().to_batches()[0]

    def nearest(
        self, column: str, query: Any, k: int, metric: str, columns: Sequence[str], *, nprobes: int | None = None
    ) -> tuple[Offsets, npt.NDArray[np.float32]] | None:
        if not any(column in index.field_names for index in self._dataset.describe_indices()):
            return None
        probes = nprobes or max(_PROBES_LEAST, _partitions(self.num_rows) // _PROBES_SHARE)
        nearest = {"column": column, "q": query, "k": k, "metric": metric, "nprobes": probes}
        scanner = self._dataset.scanner(columns=["_distance"], nearest=nearest, with_row_address=True)
        found = next(self._reading(iter([scanner.to_table])))
        return self._offsets(found.column("_rowaddr").combine_chunks()), found.column("_distance").to_numpy()

    def _offsets(self, addresses: pa.Array) -> Offsets:
        rows: npt.NDArray[np.uint64] = addresses.to_numpy(zero_copy_only=False)
        local = (rows & np.uint64(0xFFFFFFFF)).astype(np.int64)
        if len(self._starts) <= 1:
            return local
        return local + self._starts[(rows >> np.uint64(32)).astype(np.int64)]

    def _reading(self, results: Iterator[Any]) -> Iterator[Any]:
        """What Lance raises, as errors of ours."""
        try:
            for result in results:
                yield result() if callable(result) else result
        except (OSError, ValueError) as error:
            if _is_missing(error):
                raise ObjectMissingError(f"{self._path} is missing", object=self._path) from error
            if isinstance(error, ValueError):
                raise InvalidInputError(f"{self._path}: {_told(error)}") from error
            raise StoreUnavailableError(f"{self._path} could not be read: {_told(error)}", object=self._path) from error
        except BaseException as error:
            if _is_panic(error):
                raise StoreError(f"{self._path} could not be read: Lance gave up: {error}", object=self._path) from error
            raise


def _is_panic(error: BaseException) -> bool:
    """Rust's panics come as no Exception at all: nobody would catch them."""
    return not isinstance(error, Exception) and type(error).__name__ == "PanicException"


def _is_missing(error: Exception) -> bool:
    text = str(error).lower()
    return isinstance(error, FileNotFoundError) or "not found" in text or "notfound" in text or "no such file" in text


def _told(error: Exception) -> str:
    """The first line: Lance tells its own source lines after it."""
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
