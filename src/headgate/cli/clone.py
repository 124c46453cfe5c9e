"""`headgate clone`, `detach`, `split` and `drop`: tables that come from others, grow apart, and go."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated

import typer

import headgate as hg
from headgate.cli.options import AsJson, StorageOptions, Uri, WalOptions, WalUri, open_table, pairs
from headgate.cli.output import print_json, progress, screen, size


def clone(
    source: Annotated[str, typer.Argument(metavar="SOURCE", show_default=False, help="The table to clone.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", show_default=False, help="Where the clone is to be.")],
    checkpoint: Annotated[
        str | None,
        typer.Option("--checkpoint", metavar="CHECKPOINT", show_default=False, help="Its id or name. By default what is durable now."),
    ] = None,
    wal_uri: Annotated[
        str | None, typer.Option("--wal-uri", metavar="URI", show_default=False, help="Where the clone's log is to be, if not beside it.")
    ] = None,
    source_wal_uri: Annotated[
        str | None,
        typer.Option("--source-wal-uri", metavar="URI", show_default=False, help="Where the source's log is, if not where the table says."),
    ] = None,
    option: StorageOptions = None,
    wal_option: WalOptions = None,
    source_wal_option: Annotated[
        list[str] | None,
        typer.Option("--source-wal-option", metavar="KEY=VALUE", show_default=False, help="A storage option of the source's log."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a table that begins with the rows of another one's checkpoint. No row is copied.

    The clone reads the source's files, which a pin holds there, until compaction has rewritten them or `headgate detach`
    does. If it is interrupted, the same command goes on.
    """
    with progress("cloning", quiet=as_json):
        made = hg.clone(
            source,
            target,
            checkpoint,
            wal_uri=wal_uri,
            storage_options=pairs(option, "-o"),
            wal_storage_options=pairs(wal_option, "--wal-option"),
            source_wal_uri=source_wal_uri,
            source_wal_storage_options=pairs(source_wal_option, "--source-wal-option"),
        )
    if as_json:
        print_json({"uri": made.uri, "source": source, "shards": [shard.id for shard in made.shards]})
    else:
        screen().print(f"{made.uri} is a clone of {source}, with {len(made.shards):,} shards")


def detach(
    uri: Uri,
    max_memory: Annotated[int, typer.Option("--max-memory", metavar="MIB", min=1, help="Memory to use, about.")] = 1024,
    wal_uri: WalUri = None,
    option: StorageOptions = None,
    wal_option: WalOptions = None,
    as_json: AsJson = False,
) -> None:
    """Make a clone a table of its own: copy what it still reads of its parent, and let go of the parent."""
    table = open_table(uri, option, wal_uri, wal_option)
    with progress("copying", quiet=as_json):
        table.detach(max_memory << 20)
    if as_json:
        print_json({"uri": table.uri, "detached": True})
    else:
        screen().print(f"{table.uri} reads files of its own only")


def split(
    uri: Uri,
    shard: Annotated[str, typer.Argument(metavar="SHARD", show_default=False, help="The shard, by its id; see status.")],
    column: Annotated[
        str | None,
        typer.Option(
            "--column",
            metavar="COLUMN",
            show_default=False,
            help="What to split by, if the table has no sharding and no key of one column.",
        ),
    ] = None,
    wal_uri: WalUri = None,
    option: StorageOptions = None,
    wal_option: WalOptions = None,
    as_json: AsJson = False,
) -> None:
    """Split a shard in two, while it is written and read. Writers of the table go on with the parts by themselves."""
    table = open_table(uri, option, wal_uri, wal_option)
    with progress(f"splitting shard {shard}", quiet=as_json):
        parts = table.split_shard(shard, column)
    if as_json:
        print_json({"uri": table.uri, "shard": shard, "parts": list(parts)})
    else:
        screen().print(f"shard {shard} is {' and '.join(parts)} now; compact drops from each the rows of the other")


def drop(
    uri: Uri,
    confirm: Annotated[
        str | None, typer.Option("--confirm", metavar="URI", show_default=False, help="The URI once more, instead of being asked.")
    ] = None,
    wal_uri: WalUri = None,
    option: StorageOptions = None,
    wal_option: WalOptions = None,
    as_json: AsJson = False,
) -> None:
    """Delete a table with all its rows, its log and its checkpoints. Refused while clones read its files."""
    if confirm is None and sys.stdin.isatty() and not as_json:
        confirm = typer.prompt(f"All rows of {uri} will be gone. Type its URI once more")
    if confirm is None:
        raise typer.BadParameter("say the URI once more: all rows will be gone", param_hint="--confirm")
    with progress("dropping", quiet=as_json):
        report = hg.drop_table(uri, confirm, pairs(option, "-o"), wal_uri, pairs(wal_option, "--wal-option"))
    if as_json:
        print_json({"uri": uri, "dropped": True, **asdict(report)})
    else:
        screen().print(f"{uri} is dropped: {report.objects:,} objects, {size(report.bytes)}")
