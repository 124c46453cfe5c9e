"""`headgate create`, `status` and `verify`: a table as a whole."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

import headgate as hg
from headgate.cli.options import AsJson, StorageOptions, Uri, WalOptions, WalUri, open_table, pairs
from headgate.cli.output import ago, print_json, print_table, progress, screen
from headgate.cli.schema_file import describe, read_schema


class IfExists(StrEnum):
    """What to do when there is a table already."""

    error = "error"
    open = "open"


def create(
    uri: Uri,
    schema: Annotated[
        Path,
        typer.Option(
            "--schema",
            metavar="FILE",
            exists=True,
            dir_okay=False,
            show_default=False,
            help="schema.json, or a Parquet or Arrow file as a sample.",
        ),
    ],
    key: Annotated[
        list[str] | None,
        typer.Option("--key", metavar="COLUMN", show_default=False, help="A key column. Repeatable. None: append-only."),
    ] = None,
    shards: Annotated[int, typer.Option("--shards", min=1, help="How many shards, by a hash of a column.")] = 1,
    shard_by: Annotated[
        str | None, typer.Option("--shard-by", metavar="COLUMN", show_default=False, help="That column. By default the first of the key.")
    ] = None,
    if_exists: Annotated[IfExists, typer.Option("--if-exists", help="What to do when there is a table already.")] = IfExists.error,
    wal_uri: WalUri = None,
    option: StorageOptions = None,
    wal_option: WalOptions = None,
    as_json: AsJson = False,
) -> None:
    """Create a table."""
    column = shard_by or (key[0] if key else None)
    if shards > 1 and column is None:
        raise typer.BadParameter("several shards need a column to choose by: pass --key or --shard-by", param_hint="--shards")
    table = hg.create_table(
        uri,
        read_schema(schema),
        list(key) if key else None,
        sharding=hg.bucket(str(column), shards) if shards > 1 else hg.unsharded(),
        storage_options=pairs(option, "-o"),
        wal_uri=wal_uri,
        wal_storage_options=pairs(wal_option, "--wal-option"),
        if_exists=if_exists.value,
    )
    if as_json:
        print_json(_description(table))
    else:
        _print_description(table)


def status(uri: Uri, wal_uri: WalUri = None, option: StorageOptions = None, wal_option: WalOptions = None, as_json: AsJson = False) -> None:
    """Show a table and the state of every shard. Writes nothing."""
    table = open_table(uri, option, wal_uri, wal_option)
    state = table.status()
    if as_json:
        print_json({**_description(table), "shards": [asdict(shard) for shard in state.shards]})
        return
    _print_description(table)
    always = ("epoch", "cursor", "tip", "lag")
    numbers = always + tuple(
        name  # only where there are any
        for name in ("first_position", "producers", "consumers", "checkpoints")
        if any(getattr(shard, name) for shard in state.shards)
    )
    elsewhere = any(shard.wal_store != state.uri for shard in state.shards)
    print_table(
        ["shard", "state", *(name.removesuffix("_position") for name in numbers), "clean", "claimed", *(["log in"] if elsewhere else [])],
        [
            [
                shard.shard,
                shard.state,
                *(f"{getattr(shard, name):,}" for name in numbers),
                "yes" if shard.clean else "no",
                ago(shard.claimed_at),
                *([shard.wal_store] if elsewhere else []),
            ]
            for shard in state.shards
        ],
        right=frozenset(name.removesuffix("_position") for name in numbers),
    )


def verify(
    uri: Uri,
    deep: Annotated[bool, typer.Option("--deep", help="Read every entry that is left, not only those after the cursor.")] = False,
    wal_uri: WalUri = None,
    option: StorageOptions = None,
    wal_option: WalOptions = None,
    as_json: AsJson = False,
) -> None:
    """Check every shard: manifest, chain, checksums, seals.

    Writes nothing. Exit code 1 if something is wrong.
    """
    table = open_table(uri, option, wal_uri, wal_option)
    with progress(f"checking {len(table.shards):,} shards of {table.uri}", quiet=as_json):
        report = table.verify(deep=deep)
    if as_json:
        print_json({"uri": table.uri, "deep": deep, **asdict(report)})
    else:
        out = screen()
        for problem in report.problems:
            out.print(f"shard {problem.shard}: {problem.kind}: {problem.message}")
            if problem.object:
                out.print(f"  object: {problem.object}")
        looked_at = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in report.counts.items())
        out.print(f"{'ok' if report.ok else f'{len(report.problems):,} problems'} ({looked_at})")
        if not report.ok:
            out.print("  hint: nothing was changed; restore the named objects from a backup or a bucket version before opening a writer")
    if not report.ok:
        raise typer.Exit(1)


def _description(table: hg.Table) -> dict[str, Any]:
    rule = table.sharding
    sharding: dict[str, Any] = {"kind": rule.kind}
    if rule.column is not None:
        sharding |= {"column": rule.column, "buckets": rule.buckets}
    return {
        "uri": table.uri,
        "key": list(table.key),
        "sharding": sharding,
        "schema": {"fields": describe(table.schema)},
        "shards": [shard.id for shard in table.shards],
    }


def _print_description(table: hg.Table) -> None:
    out = screen()
    rule, count = table.sharding, len(table.shards)
    by = f", by {rule.kind} of {rule.column}" if rule.column is not None else ""
    out.print(f"{table.uri}: key {', '.join(table.key) or 'none (append-only)'}; {count:,} shard{'s' if count != 1 else ''}{by}")
    for field in describe(table.schema):
        out.print(f"  {field['name']} {field['type']}{'' if field['nullable'] else ' not null'}")
