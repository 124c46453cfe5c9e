"""`headgate changes` and `consumers list|drop`: following a table."""

from __future__ import annotations

import sys
from datetime import datetime
from itertools import islice
from typing import Annotated, Any

import typer

import headgate as hg
from headgate.cli.command import Command
from headgate.cli.options import AsJson, StorageOptions, Uri, WalOptions, WalUri, open_table
from headgate.cli.output import ago, print_json, print_table, screen
from headgate.cli.rows import json_rows, one_line

_MARKS = ("_op", "_epoch", "_position", "_load", "_time")
_HEAD = f"{'position':>8} {'load':>5}  {'time (UTC)':<23} {'op':<6}  row"


def changes(
    uri: Uri,
    start: Annotated[
        str | None,
        typer.Option(
            "--start",
            metavar="WHERE",
            show_default=False,
            help="earliest, latest, snapshot (the rows of now, then their changes), or an offset as --json shows it. By default "
            "where the consumer is, else earliest.",
        ),
    ] = None,
    consumer: Annotated[
        str | None,
        typer.Option(
            "--consumer", metavar="NAME", show_default=False, help="Keep the offset with the table under this name. Holds back gc."
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait at the end for more.")] = False,
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=0, show_default=False, help="Stop after so many batches.")] = None,
    wal_uri: WalUri = None,
    option: StorageOptions = None,
    wal_option: WalOptions = None,
    as_json: AsJson = False,
) -> None:
    """Show what was put, deleted and loaded, in order. Without --consumer it writes nothing, but for the pin of a snapshot.

    With --json: one JSON object per line and batch, with its rows and the offset after it.
    """
    table = open_table(uri, option, wal_uri, wal_option)
    with table.changes(start, consumer, follow=follow) as found:
        if not as_json:
            sys.stdout.write(_HEAD + "\n")
        for batch in islice(found, limit):
            if as_json:
                print_json({"rows": json_rows(batch), "offset": found.offset})
            else:
                _print_rows(batch)
            if follow:
                sys.stdout.flush()
        if consumer is not None:
            found.commit()  # all of it was shown


def _print_rows(batch: Any) -> None:
    content = batch.drop_columns(list(_MARKS))
    marks = batch.select(list(_MARKS)).to_pylist()
    for number, mark in enumerate(marks):
        when = mark["_time"].strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] if isinstance(mark["_time"], datetime) else ""
        load = mark["_load"] or ""
        sys.stdout.write(f"{mark['_position']:>8} {load:>5}  {when:<23} {mark['_op']:<6}  {one_line(content.slice(number, 1))}\n")


consumers_app = typer.Typer(help="Those who follow a table by name, and hold back gc.", no_args_is_help=True, rich_markup_mode=None)


@consumers_app.command("list", cls=Command)
def list_all(
    uri: Uri, wal_uri: WalUri = None, option: StorageOptions = None, wal_option: WalOptions = None, as_json: AsJson = False
) -> None:
    """List the consumers, shard by shard, with how far they have read and their lag. Writes nothing."""
    table = open_table(uri, option, wal_uri, wal_option)
    found = table.consumers()
    if as_json:
        print_json({"uri": table.uri, "consumers": [_document(one) for one in found]})
        return
    rows = [
        [one.name, place.shard, f"{place.position:,}", f"{place.load:,}", f"{place.lag:,}", ago(place.updated), _note(place)]
        for one in found
        for place in one.places
    ]
    print_table(["name", "shard", "position", "load", "lag", "moved", ""], rows, right=frozenset({"position", "load", "lag"}))


def _note(place: hg.ConsumerPlace) -> str:
    return "its snapshot is not read yet" if place.snapshot else ""


def _document(one: hg.Consumer) -> dict[str, Any]:
    return {
        "name": one.name,
        "lag": one.lag,
        "created": one.created,
        "updated": one.updated,
        "offset": one.offset,
        "shards": [
            {"shard": place.shard, "position": place.position, "load": place.load, "lag": place.lag, "snapshot": place.snapshot}
            for place in one.places
        ],
    }


@consumers_app.command(cls=Command)
def drop(
    uri: Uri,
    name: Annotated[str, typer.Argument(metavar="NAME", show_default=False, help="The consumer.")],
    wal_uri: WalUri = None,
    option: StorageOptions = None,
    wal_option: WalOptions = None,
    as_json: AsJson = False,
) -> None:
    """Forget a consumer. What only it held can be collected."""
    table = open_table(uri, option, wal_uri, wal_option)
    table.drop_consumer(name)
    if as_json:
        print_json({"uri": table.uri, "dropped": name})
    else:
        screen().print(f"consumer {name} is dropped")
