"""`headgate columns add|drop|rename|widen`: changes to a table's columns. No row is rewritten."""

from __future__ import annotations

from typing import Annotated

import pyarrow as pa
import typer

from headgate.cli.command import Command
from headgate.cli.options import AsJson, StorageOptions, Uri, WalOptions, WalUri, open_table
from headgate.cli.table import show
from headgate.cli.type_names import parse

app = typer.Typer(
    help="Add, drop, rename or widen columns, also while the table is written. No row is rewritten.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Name = Annotated[str, typer.Argument(metavar="COLUMN", show_default=False, help="The column.")]


@app.command(cls=Command)
def add(
    uri: Uri,
    column: Annotated[
        list[str], typer.Argument(metavar="NAME:TYPE", show_default=False, help="For example note:string price:'decimal128(10, 2)'.")
    ],
    wal_uri: WalUri = None,
    option: StorageOptions = None,
    wal_option: WalOptions = None,
    as_json: AsJson = False,
) -> None:
    """Add nullable columns at the end. Rows that are there have nulls in them.

    Live writers learn of it within about a second, and take only rows that have the new columns from then on.
    """
    fields = []
    for text in column:
        name, colon, kind = text.partition(":")
        if not colon or not name or not kind:
            raise typer.BadParameter(f"{text!r} is not NAME:TYPE, for example note:string", param_hint="NAME:TYPE")
        fields.append(pa.field(name, parse(kind)))
    table = open_table(uri, option, wal_uri, wal_option)
    table.add_columns(pa.schema(fields))
    show(table, as_json=as_json)


@app.command(cls=Command)
def drop(
    uri: Uri,
    column: Annotated[list[str], typer.Argument(metavar="COLUMN", show_default=False, help="The columns.")],
    wal_uri: WalUri = None,
    option: StorageOptions = None,
    wal_option: WalOptions = None,
    as_json: AsJson = False,
) -> None:
    """Drop columns, with their values, for good. Not those of the key, the sharding or an index.

    Writers in other processes learn of it within about a second: wait that long before you use a name again.
    """
    table = open_table(uri, option, wal_uri, wal_option)
    table.drop_columns(column)
    show(table, as_json=as_json)


@app.command(cls=Command)
def rename(
    uri: Uri,
    column: Name,
    new: Annotated[str, typer.Argument(metavar="NEW", show_default=False, help="Its new name.")],
    wal_uri: WalUri = None,
    option: StorageOptions = None,
    wal_option: WalOptions = None,
    as_json: AsJson = False,
) -> None:
    """Give a column another name; its values stay. Key, sharding and indexes follow."""
    table = open_table(uri, option, wal_uri, wal_option)
    table.rename_column(column, new)
    show(table, as_json=as_json)


@app.command(cls=Command)
def widen(
    uri: Uri,
    column: Name,
    type: Annotated[str, typer.Argument(metavar="TYPE", show_default=False, help="For example int64.")],
    wal_uri: WalUri = None,
    option: StorageOptions = None,
    wal_option: WalOptions = None,
    as_json: AsJson = False,
) -> None:
    """Give a column a type that holds all it can hold now: wider integers, floats or decimals, large_string, large_binary."""
    table = open_table(uri, option, wal_uri, wal_option)
    table.widen_column(column, parse(type))
    show(table, as_json=as_json)
