"""Rows into files: Parquet, CSV, JSON lines, Arrow. What is written, ``files`` reads back the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Protocol

import pyarrow as pa
import pyarrow.types as types

from headgate import InvalidInputError
from headgate.cli.files import Format
from headgate.cli.rows import json_rows, json_text, plain_type


class _RowWriter(Protocol):
    def write(self, rows: pa.RecordBatch) -> Any: ...

    def close(self) -> Any: ...


class _JsonWriter:
    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, rows: pa.RecordBatch) -> None:
        self._file.writelines(json_text(row).encode() + b"\n" for row in json_rows(rows))

    def close(self) -> None:
        pass


class _CsvWriter:
    """What is neither a number nor true or false becomes text, as in JSON; lists and structs become JSON."""

    def __init__(self, file: IO[bytes], schema: pa.Schema) -> None:
        import pyarrow.csv as arrow_csv  # only those who need it pay for loading it

        kinds = [
            f.type if types.is_integer(f.type) or types.is_boolean(f.type) or types.is_floating(f.type) else pa.string() for f in schema
        ]
        self._schema = pa.schema(list(zip(schema.names, kinds, strict=True)))
        self._writer = arrow_csv.CSVWriter(file, self._schema)

    def write(self, rows: pa.RecordBatch) -> None:
        columns = [_as_csv(column, field.type) for column, field in zip(rows.columns, self._schema, strict=True)]
        self._writer.write(pa.RecordBatch.from_arrays(columns, schema=self._schema))

    def close(self) -> None:
        self._writer.close()


def _as_csv(column: pa.Array, kind: pa.DataType) -> pa.Array:
    if column.type.equals(kind):
        return column
    if not types.is_nested(column.type) and plain_type(column.type).equals(kind):
        return column.cast(kind)
    values = (row["x"] for row in json_rows(pa.RecordBatch.from_arrays([column], ["x"])))
    return pa.array([value if value is None or isinstance(value, str) else json_text(value) for value in values], kind)


def write_file(path: Path, format: Format, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> int:
    """Write rows to a file that is there when it is whole, and not before; returns how many."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    count = 0
    try:
        with open(part, "wb") as file:
            writer = _writer(file, format, schema)
            for rows in batches:
                writer.write(rows)
                count += rows.num_rows
            writer.close()
        os.replace(part, path)
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be written: {error.strerror or error}", hint="choose another --output") from None
    except (pa.ArrowException, NotImplementedError) as error:
        told = str(error).splitlines()[0]
        raise InvalidInputError(f"{path} cannot be written as {format}: {told}", hint="choose another format, or --columns") from None
    finally:
        part.unlink(missing_ok=True)
    return count


def _writer(file: IO[bytes], format: Format, schema: pa.Schema) -> _RowWriter:
    if format is Format.json:
        return _JsonWriter(file)
    if format is Format.csv:
        return _CsvWriter(file, schema)
    if format is Format.arrow:
        made: _RowWriter = pa.ipc.new_file(file, schema)
        return made
    import pyarrow.parquet as parquet  # only those who need it pay for loading it

    found: _RowWriter = parquet.ParquetWriter(file, schema)
    return found
