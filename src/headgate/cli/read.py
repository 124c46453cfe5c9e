"""`headgate scan`, `sql` and `lookup`: the rows of a table as they are now."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import typer

import headgate as hg
from headgate.cli.export import write_file
from headgate.cli.files import format_of
from headgate.cli.options import AsJson, StorageOptions, Uri, WalOptions, WalUri, open_table
from headgate.cli.output import print_json, progress, screen
from headgate.cli.rows import json_rows, json_text, print_rows
from headgate.cli.values import parse_json, read_column

_SHOWN_ROWS = 20

Columns = Annotated[
    list[str] | None,
    typer.Option("--columns", metavar="NAME,…", show_default=False, help="Which columns, in this order. By default all."),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        metavar="FILE",
        dir_okay=False,
        show_default=False,
        help="Write the rows to a file: .parquet, .csv, .json (an object per line) or .arrow.",
    ),
]


def scan(
    uri: Uri,
    columns: Columns = None,
    filter: Annotated[
        str | None, typer.Option("--filter", metavar="SQL", show_default=False, help='Only these, e.g. "value > 0.5".')
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", "-n", min=0, show_default=False, help=f"At most so many rows. By default {_SHOWN_ROWS} as a table, all otherwise."
        ),
    ] = None,
    at: Annotated[
        str | None, typer.Option("--at", metavar="CHECKPOINT", show_default=False, help="As of a checkpoint: its id or name.")
    ] = None,
    count: Annotated[bool, typer.Option("--count", help="Only how many rows there are.")] = False,
    output: Output = None,
    wal_uri: WalUri = None,
    option: StorageOptions = None,
    wal_option: WalOptions = None,
    as_json: AsJson = False,
) -> None:
    """Show rows: the newest version of each key, what is only in the log included. Writes nothing.

    With --json: one JSON object per line and row.
    """
    table = open_table(uri, option, wal_uri, wal_option)
    chosen = _names(columns, table)
    if count:
        with progress("counting", quiet=as_json):
            found = table.scan(filter=filter, limit=limit, at=at).count()
        if as_json:
            print_json({"uri": table.uri, "rows": found})
        else:
            screen().print(f"{found:,}")
        return
    as_table = not as_json and output is None
    one_more = (_SHOWN_ROWS if limit is None else limit) + 1  # to see whether there are others
    rows = table.scan(chosen, filter, one_more if as_table else limit, at)
    if not as_table:
        _hand_over(rows.schema, rows.to_batches(), output, as_json=as_json)
        return
    with progress("reading", quiet=False):
        shown = rows.to_arrow()
    print_rows(shown.slice(0, one_more - 1))
    if limit is None and shown.num_rows == one_more:
        screen().print(f"… the first {_SHOWN_ROWS} rows; --limit for more, --count for how many there are")


def sql(
    uri: Uri,
    query: Annotated[str, typer.Argument(metavar="QUERY", show_default=False, help='For example "select count(*) from t".')],
    output: Output = None,
    wal_uri: WalUri = None,
    option: StorageOptions = None,
    wal_option: WalOptions = None,
    as_json: AsJson = False,
) -> None:
    """Answer a SQL query in which the table is called t. Writes nothing.

    With --json: one JSON object per line and row.
    """
    table = open_table(uri, option, wal_uri, wal_option)
    with progress("reading", quiet=as_json):
        found = table.sql(query)
    if as_json or output is not None:
        _hand_over(found.schema, iter(found.to_batches()), output, as_json=as_json)
    else:
        print_rows(found)


def lookup(
    uri: Uri,
    key: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY", show_default=False, help='Keys; of several columns as a,b or as JSON: ["a", "b"]. Negative numbers after --.'
        ),
    ],
    columns: Columns = None,
    output: Output = None,
    wal_uri: WalUri = None,
    option: StorageOptions = None,
    wal_option: WalOptions = None,
    as_json: AsJson = False,
) -> None:
    """Show the newest rows of keys, in the order asked for; those that are not there are left out. Writes nothing.

    With --json: one JSON object per line and row.
    """
    table = open_table(uri, option, wal_uri, wal_option)
    if not table.key:
        raise hg.InvalidInputError("the table has no key to look up by", hint="headgate scan --filter finds rows by their values")
    keys = _keys(key, table)
    found = table.lookup(keys, _names(columns, table))
    if as_json or output is not None:
        _hand_over(found.schema, iter(found.to_batches()), output, as_json=as_json)
        return
    print_rows(found)
    missing = keys.group_by(list(table.key)).aggregate([]).num_rows - found.num_rows
    if missing:
        screen().print(f"{missing:,} of the keys {'is' if missing == 1 else 'are'} not there")


def _names(columns: Sequence[str] | None, table: hg.Table) -> list[str] | None:
    """``a,b`` and several of them; a name with a comma in it is taken as it is."""
    if columns is None:
        return None
    known = table.schema.names
    return [name for text in columns for name in ([text] if text in known else [part.strip() for part in text.split(",")])]


def _hand_over(schema: pa.Schema, batches: Iterator[pa.RecordBatch], output: Path | None, *, as_json: bool) -> None:
    """Rows for machines: lines of JSON on stdout, or a file."""
    if output is None:
        for batch in batches:
            sys.stdout.writelines(json_text(row) + "\n" for row in json_rows(batch))
        return
    format = format_of(output.name, None, "end it in .parquet, .csv, .json or .arrow")
    with progress(f"writing {output}", quiet=as_json) as tell:
        written = write_file(output, format, schema, _telling(batches, tell))
    if as_json:
        print_json({"output": str(output), "rows": written})
    else:
        screen().print(f"{written:,} rows in {output}")


def _telling(batches: Iterator[pa.RecordBatch], tell: Callable[[str], None]) -> Iterator[pa.RecordBatch]:
    rows = 0
    for batch in batches:
        yield batch
        rows += batch.num_rows
        tell(f"{rows:,} rows written")


def _keys(texts: Sequence[str], table: hg.Table) -> pa.Table:
    """Keys as they were typed, with the types of the key's columns."""
    fields = [table.schema.field(name) for name in table.key]

    if len(fields) == 1:
        return pa.table([read_column(pa.array(texts, pa.string()), fields[0], partial(_key_at, texts))], names=list(table.key))
    columns: list[list[pa.Array]] = [[] for _ in fields]
    for text in texts:
        for column, field, value in zip(columns, fields, _parts(text, table.key), strict=True):
            one = pa.array([value], pa.string()) if isinstance(value, str) else [value]
            column.append(read_column(one, field, partial(_key_at, [text])))
    return pa.table([pa.concat_arrays(column) for column in columns], names=list(table.key))


def _key_at(texts: Sequence[str], offset: int) -> str:
    return f"the key {texts[offset]!r}"


def _parts(text: str, names: Sequence[str]) -> list[Any]:
    """The parts of a key of several columns: ``a,b``, or a JSON list or object."""
    parts: list[Any] = text.split(",")
    if text.lstrip()[:1] in ("[", "{"):
        try:
            found = parse_json(text)
        except ValueError as error:
            raise hg.InvalidInputError(f"the key {text!r} is not JSON: {error}", hint=_spelled(names)) from None
        if isinstance(found, dict):
            found = [found.get(name) for name in names] if set(found) == set(names) else []
        parts = found
    if len(parts) != len(names):
        raise hg.InvalidInputError(f"the key {text!r} does not have {len(names)} parts", hint=_spelled(names))
    return parts


def _spelled(names: Sequence[str]) -> str:
    quoted = ", ".join(f'"{name}"' for name in names)
    return f"write {','.join(names)} or, if a comma is in a value, [{quoted}], with values for the names"
