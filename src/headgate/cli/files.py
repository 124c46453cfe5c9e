"""Rows from files: Parquet, CSV, JSON lines, Arrow.

Owns: the formats, cutting a file into batches, fitting its columns to the table's. Does not own:
what a single text or JSON value means (values), writing files (export).

A file is cut by its rows alone, so the same file comes to the same batches each time it is read:
what a producer sends again must be what it sent before.
"""

from __future__ import annotations

import csv
import hashlib
import io
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as types
import typer

from headgate import InvalidInputError
from headgate.cli.values import arrow_schema, from_arrow_json, parse_json, read_column

STDIN = "-"
_COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
_CHUNK_BYTES_MAX = 1 << 30
_MARK = b"\xef\xbb\xbf"  # some programs begin a text with it


class Format(StrEnum):
    """What a file holds."""

    parquet = "parquet"
    csv = "csv"
    json = "json"
    arrow = "arrow"


_SUFFIXES = {
    ".parquet": Format.parquet,
    ".pq": Format.parquet,
    ".csv": Format.csv,
    ".tsv": Format.csv,
    ".json": Format.json,
    ".jsonl": Format.json,
    ".ndjson": Format.json,
    ".arrow": Format.arrow,
    ".feather": Format.arrow,
    ".ipc": Format.arrow,
}


def format_of(name: str, given: Format | None, flag: str) -> Format:
    """The format of a file: what was said, or what its name says."""
    suffixes = [suffix.lower() for suffix in Path(name).suffixes]
    if suffixes and suffixes[-1] in _COMPRESSIONS:
        suffixes.pop()
    found = given or (_SUFFIXES.get(suffixes[-1]) if suffixes else None)
    if found is None:
        what = "stdin has no name to tell its format by" if name == STDIN else f"the name {name!r} does not tell the format"
        raise typer.BadParameter(f"{what}: {flag}", param_hint=name)
    return found


# -- reading


@dataclass(frozen=True)
class Source:
    """A file to read rows from, or stdin."""

    name: str
    format: Format

    @property
    def told(self) -> str:
        return "stdin" if self.name == STDIN else self.name

    @contextmanager
    def opened(self, *, fingerprint: bool = False) -> Iterator[tuple[IO[bytes], str]]:
        """Its bytes, unpacked, and what tells them from those of another file, if that is asked for.

        Stdin is then kept in a temporary file first: it must be known before the first row is put.
        """
        with (
            _Stdin() if self.name == STDIN else open(self.name, "rb") as file,
            tempfile.TemporaryFile() if fingerprint and self.name == STDIN else _nothing() as kept,
        ):
            if kept is not None:
                shutil.copyfileobj(file, kept)
                kept.seek(0)
                file = kept
            digest = ""
            if fingerprint:
                digest = hashlib.file_digest(file, partial(hashlib.blake2b, digest_size=16)).hexdigest()
                file.seek(0)
            packed = _COMPRESSIONS.get(Path(self.name).suffix.lower())
            yield (file if packed is None else _unpacked(file, packed)), digest

    def batches(self, file: IO[bytes], schema: pa.Schema, rows: int, *, ignore_others: bool) -> Iterator[pa.Table]:
        """Its rows with exactly these columns, so many at a time, in order.

        Columns that it has not are null. ``ignore_others``: it may have others.

        Raises:
            InvalidInputError: it is damaged, or does not fit; batches before that were fine.
        """
        reader = {Format.parquet: _parquet, Format.arrow: _arrow, Format.csv: _csv, Format.json: _json}[self.format]
        try:
            yield from reader(self, file, schema, rows, ignore_others)
        except (pa.ArrowException, csv.Error, UnicodeDecodeError, EOFError) as error:
            told = str(error).strip().splitlines()[0]
            raise InvalidInputError(f"{self.told} cannot be read as {self.format}: {told}", hint="see --format") from None

    def chosen(self, names: Sequence[str], schema: pa.Schema, ignore_others: bool) -> list[str]:
        """Which of the columns the file has, in its order."""
        twice = next((name for number, name in enumerate(names) if name in names[:number]), None)
        if twice is not None:
            raise InvalidInputError(f"{self.told} has two columns {twice!r}", hint="rename one")
        unknown = next((name for name in names if name not in schema.names), None)
        if unknown is not None and not ignore_others:
            raise InvalidInputError(
                f"{self.told} has a column {unknown!r} that the table has not", hint=f"columns are {', '.join(schema.names)}"
            )
        missing = next((f.name for f in schema if not f.nullable and f.name not in names), None)
        if missing is not None:
            raise InvalidInputError(f"{self.told} has no column {missing!r}", hint=f"it has {', '.join(map(repr, names)) or 'none'}")
        return [name for name in names if name in schema.names]


@contextmanager
def _nothing() -> Iterator[None]:
    yield None


class _Stdin(io.RawIOBase):
    """Stdin's bytes. Closing it leaves stdin alone."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = sys.stdin.buffer.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def __enter__(self) -> Any:
        return io.BufferedReader(self, 1 << 20)


class _Unpacking(io.RawIOBase):
    def __init__(self, file: IO[bytes], compression: str) -> None:
        self._stream = pa.CompressedInputStream(file, compression)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data: bytes = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _unpacked(file: IO[bytes], compression: str) -> IO[bytes]:
    return io.BufferedReader(_Unpacking(file, compression), 1 << 20)


def _seekable(file: IO[bytes]) -> Any:
    return file if file.seekable() else pa.BufferReader(file.read())


def _parquet(source: Source, file: IO[bytes], schema: pa.Schema, rows: int, ignore_others: bool) -> Iterator[pa.Table]:
    import pyarrow.parquet as parquet  # only those who need it pay for loading it

    with parquet.ParquetFile(_seekable(file)) as found:
        names = source.chosen(found.schema_arrow.names, schema, ignore_others)
        yield from _cut(source, found.iter_batches(min(rows, 1 << 16), columns=names), schema, rows)


def _arrow(source: Source, file: IO[bytes], schema: pa.Schema, rows: int, ignore_others: bool) -> Iterator[pa.Table]:
    seekable = _seekable(file)
    magic = seekable.read(6)
    seekable.seek(0)
    if magic == b"ARROW1":
        whole = pa.ipc.open_file(seekable)
        found, batches = whole.schema, (whole.get_batch(number) for number in range(whole.num_record_batches))
    else:
        stream = pa.ipc.open_stream(seekable)
        found, batches = stream.schema, iter(stream)
    names = source.chosen(found.names, schema, ignore_others)
    yield from _cut(source, (batch.select(names) for batch in batches), schema, rows)


def _cut(source: Source, batches: Iterator[pa.RecordBatch], schema: pa.Schema, rows: int) -> Iterator[pa.Table]:
    """Batches of any size, fitted, as tables of so many rows."""
    waiting: list[pa.RecordBatch] = []
    count = 0
    for batch in batches:
        at = 0
        while at < batch.num_rows:
            part = batch.slice(at, rows - count)
            waiting.append(part)
            at, count = at + part.num_rows, count + part.num_rows
            if count == rows:
                yield _fitted(source, pa.Table.from_batches(waiting), schema)
                waiting, count = [], 0
    if count:
        yield _fitted(source, pa.Table.from_batches(waiting), schema)


def _fitted(source: Source, table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Exactly these columns; a type is cast if every value fits."""
    columns = []
    for field in schema:
        if field.name not in table.schema.names:
            columns.append(pa.nulls(table.num_rows, field.type))
            continue
        column = table.column(field.name)
        try:
            columns.append(column if column.type.equals(field.type) else column.cast(field.type))
        except pa.ArrowException as error:
            told = str(error).splitlines()[0]
            raise InvalidInputError(
                f"{source.told}: the column {field.name!r} of type {column.type} cannot be {field.type}: {told}",
                hint="convert it before, or choose another type for the table's column",
            ) from None
    return pa.table(columns, schema=pa.schema([pa.field(f.name, f.type) for f in schema]))


def _csv(source: Source, file: IO[bytes], schema: pa.Schema, rows: int, ignore_others: bool) -> Iterator[pa.Table]:
    """A header, then rows. Nothing between two separators is null; "" is an empty text in a column of text."""
    import pyarrow.csv as arrow_csv  # only those who need it pay for loading it

    delimiter = "\t" if ".tsv" in Path(source.name).suffixes else ","
    head = file.readline().removeprefix(_MARK).decode()
    names = next(csv.reader([head], delimiter=delimiter), [])
    if not names:
        raise InvalidInputError(f"{source.told} is empty", hint="the first line of a CSV file names its columns")
    chosen = source.chosen(names, schema, ignore_others)
    if not file.peek(1):  # type: ignore[attr-defined]  # all of them are buffered
        return
    reader = arrow_csv.open_csv(
        file,
        arrow_csv.ReadOptions(column_names=names),
        arrow_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
        arrow_csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()),
            include_columns=chosen,
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        ),
    )
    as_text = pa.schema([pa.field(name, pa.string()) for name in chosen])
    before = 0
    for texts in _cut(source, reader, as_text, rows):
        where = partial(_row_of, source, before + 1)
        columns = [
            read_column(_csv_texts(texts.column(f.name), f.type), f, where) if f.name in chosen else pa.nulls(texts.num_rows, f.type)
            for f in schema
        ]
        before += texts.num_rows
        yield pa.table(columns, schema=pa.schema([pa.field(f.name, f.type) for f in schema]))


def _csv_texts(column: pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    """Some programs quote everything: only to a text is "" something else than nothing."""
    texts = column.combine_chunks()
    return texts if types.is_string(kind) or types.is_large_string(kind) else pc.if_else(pc.equal(texts, ""), None, texts)


def _row_of(source: Source, first: int, offset: int) -> str:
    return f"{source.told}: row {first + offset:,}"


def _json(source: Source, file: IO[bytes], schema: pa.Schema, rows: int, ignore_others: bool) -> Iterator[pa.Table]:
    """An object per line, or one list of objects."""
    start = file.peek(1 << 12).removeprefix(_MARK).lstrip()[:1]  # type: ignore[attr-defined]  # all of them are buffered
    if start == b"[":
        document = parse_json(file.read().removeprefix(_MARK))
        for at in range(0, len(document), rows):
            yield _from_objects(source, document[at : at + rows], schema, ignore_others, partial(_row_of, source, at + 1))
        return
    asked = None if ignore_others else arrow_schema(schema)
    lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
    while chunk := list(islice(lines, rows)):
        if chunk[0][0] == 1:
            chunk[0] = 1, chunk[0][1].removeprefix(_MARK)
        found = _by_arrow([line for _, line in chunk], schema, asked)
        yield found if found is not None else _by_line(source, chunk, schema, ignore_others)


def _by_arrow(lines: list[bytes], schema: pa.Schema, asked: pa.Schema | None) -> pa.Table | None:
    if asked is None or sum(map(len, lines)) > _CHUNK_BYTES_MAX:
        return None
    try:
        found = from_arrow_json(b"".join(lines), schema, asked)
    except (pa.ArrowException, ValueError):
        return None
    return found if found.num_rows == len(lines) else None  # several objects in a line are not JSON lines


def _by_line(source: Source, chunk: list[tuple[int, bytes]], schema: pa.Schema, ignore_others: bool) -> pa.Table:
    objects = []
    for number, line in chunk:
        try:
            objects.append(parse_json(line))
        except ValueError as error:
            raise InvalidInputError(f"{source.told}: line {number:,} is not JSON: {error}", hint="an object per line is expected") from None
    return _from_objects(source, objects, schema, ignore_others, lambda offset: f"{source.told}: line {chunk[offset][0]:,}")


def _from_objects(source: Source, objects: list[Any], schema: pa.Schema, ignore_others: bool, where: Any) -> pa.Table:
    known = set(schema.names)
    for offset, one in enumerate(objects):
        if not isinstance(one, dict):
            raise InvalidInputError(f"{where(offset)} is no object", hint='write objects: {"id": 1, "note": "first"}')
        unknown = next((name for name in one if name not in known), None)
        if unknown is not None and not ignore_others:
            raise InvalidInputError(
                f"{where(offset)} has a column {unknown!r} that the table has not", hint=f"columns are {', '.join(schema.names)}"
            )
    columns = [read_column([one.get(f.name) for one in objects], f, where) for f in schema]
    return pa.table(columns, schema=pa.schema([pa.field(f.name, f.type) for f in schema]))
