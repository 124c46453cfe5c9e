"""`headgate compact`, `gc` and `checkpoint create|list|refresh|drop`: what keeps a table in shape."""

from __future__ import annotations

import re
import time
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated

import typer

from headgate.cli.command import Command
from headgate.cli.on_spark import Master, Spark, check, place, spark_session
from headgate.cli.options import AsJson, StorageOptions, Uri, WalOptions, WalUri, open_table
from headgate.cli.output import ago, print_json, print_table, progress, screen, size

_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3_600, "d": 86_400, "w": 604_800}


def seconds(text: str, flag: str) -> float:
    """A length of time as it is typed: 90s, 15min, 1h, 7d; a bare number is seconds."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|m|min|h|d|w)?\s*", text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is no length of time: 90s, 15min, 1h, 7d", param_hint=flag)
    return float(match[1]) * _SECONDS[match[2] or "s"]


def compact(
    uri: Uri,
    full: Annotated[bool, typer.Option("--full", help="All runs of a shard into one, whatever their sizes.")] = False,
    shard: Annotated[
        list[str] | None, typer.Option("--shard", metavar="ID", show_default=False, help="Only this shard. Repeatable.")
    ] = None,
    max_memory: Annotated[
        int, typer.Option("--max-memory", metavar="MIB", min=1, help="Memory to use, about; of each task on Spark.")
    ] = 1024,
    spark: Spark = False,
    master: Master = None,
    wal_uri: WalUri = None,
    option: StorageOptions = None,
    wal_option: WalOptions = None,
    as_json: AsJson = False,
) -> None:
    """Merge runs, so that reads have few of them. Beside live writers, which it never stops or fences.

    The files of the runs that were merged stay until gc.
    """
    check(spark, master)
    table = open_table(uri, option, wal_uri, wal_option)
    chosen = list(dict.fromkeys(shard)) if shard else None
    with progress("compacting", quiet=as_json) as tell:

        def told(where: str, done: int, total: int) -> None:
            tell(f"shard {where}: {done:,} of {total:,} rows")

        if spark:
            import headgate.spark as hgs

            with spark_session(master) as session:
                report = hgs.compact(
                    session,
                    uri,
                    max_memory=max_memory << 20,
                    progress=told,
                    full=full,
                    shards=chosen,
                    **place(option, wal_uri, wal_option),
                )
        else:
            report = table.compact(max_memory << 20, told, full=full, shards=chosen)
    if as_json:
        print_json({"uri": table.uri, **asdict(report)})
        return
    kept = f", {report.slices_kept:,} slices kept as they are" if report.slices_kept else ""
    out = screen()
    out.print(f"{report.runs_before:,} runs are {report.runs_after:,} now, in {report.seconds:.1f} s")
    out.print(f"{report.rows_read:,} rows read, {report.rows_written:,} written ({size(report.bytes_written)}){kept}")


def gc(
    uri: Uri,
    yes: Annotated[bool, typer.Option("--yes", help="Delete. Without it, only say what would be deleted.")] = False,
    min_age: Annotated[
        str, typer.Option("--min-age", metavar="TIME", help="Leave alone runs that became garbage within it, for reads that began before.")
    ] = "1h",
    sweep: Annotated[bool, typer.Option("--sweep", help="Look everywhere for what stalled writers left behind. Lists more.")] = False,
    spark: Spark = False,
    master: Master = None,
    wal_uri: WalUri = None,
    option: StorageOptions = None,
    wal_option: WalOptions = None,
    as_json: AsJson = False,
) -> None:
    """Delete what nothing needs any more: log entries, replaced runs, files of attempts that died, old manifests.

    Safe at any moment, beside anything. What a checkpoint or a consumer needs stays, and so do all seals.
    """
    age = seconds(min_age, "--min-age")
    check(spark, master)
    table = open_table(uri, option, wal_uri, wal_option)
    with progress("collecting" if yes else "looking", quiet=as_json):
        if spark:
            import headgate.spark as hgs

            with spark_session(master) as session:
                report = hgs.gc(session, uri, dry_run=not yes, min_age=age, sweep=sweep, **place(option, wal_uri, wal_option))
        else:
            report = table.gc(dry_run=not yes, min_age=age, sweep=sweep)
    if as_json:
        print_json({"uri": table.uri, **asdict(report)})
        return
    out = screen()
    if report.objects:
        kinds = sorted(report.objects)
        print_table(
            ["kind", "objects", "size"],
            [[kind, f"{report.objects[kind]:,}", size(report.bytes.get(kind, 0))] for kind in kinds],
            right=frozenset({"objects", "size"}),
        )
    for holder, count in sorted(report.held.items()):
        out.print(f"{count:,} more held by {holder}")
    for lease in report.leases_ended:
        out.print(f"the lease of {lease} is over")
    total, room = sum(report.objects.values()), size(sum(report.bytes.values()))
    if not total:
        out.print("nothing to delete")
    elif yes:
        out.print(f"{total:,} objects deleted, {room}")
    else:
        out.print(f"{total:,} objects would be deleted, {room}; --yes deletes them")


checkpoint_app = typer.Typer(
    help="Pin a table as it is, and read it later with scan --at.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Which = Annotated[str, typer.Argument(metavar="CHECKPOINT", show_default=False, help="Its id or name.")]
Ttl = Annotated[
    str | None,
    typer.Option("--ttl", metavar="TIME", show_default=False, help="How long it stays: 90s, 1h, 7d. By default until it is dropped."),
]


@checkpoint_app.command(cls=Command)
def create(
    uri: Uri,
    name: Annotated[str | None, typer.Option("--name", show_default=False, help="A name to find it by.")] = None,
    ttl: Ttl = None,
    wal_uri: WalUri = None,
    option: StorageOptions = None,
    wal_option: WalOptions = None,
    as_json: AsJson = False,
) -> None:
    """Pin what is durable now, in every shard, each at its own moment. Fences nobody."""
    lease = None if ttl is None else seconds(ttl, "--ttl")
    made = open_table(uri, option, wal_uri, wal_option).checkpoint(name, ttl=lease)
    if as_json:
        print_json(asdict(made))
    else:
        screen().print(f"checkpoint {made.id}{f' ({made.name})' if made.name else ''}, {_until(made.expires)}")


@checkpoint_app.command("list", cls=Command)
def list_all(
    uri: Uri, wal_uri: WalUri = None, option: StorageOptions = None, wal_option: WalOptions = None, as_json: AsJson = False
) -> None:
    """List the checkpoints, oldest first. Writes nothing."""
    table = open_table(uri, option, wal_uri, wal_option)
    found = table.checkpoints()
    if as_json:
        print_json({"uri": table.uri, "checkpoints": [asdict(one) for one in found]})
        return
    print_table(
        ["id", "name", "created", "stays", "complete"],
        [[one.id, one.name or "", ago(one.created), _until(one.expires), "yes" if one.complete else "no"] for one in found],
    )


@checkpoint_app.command(cls=Command)
def refresh(
    uri: Uri,
    checkpoint: Which,
    ttl: Ttl = None,
    wal_uri: WalUri = None,
    option: StorageOptions = None,
    wal_option: WalOptions = None,
    as_json: AsJson = False,
) -> None:
    """Let a lease end later: --ttl from now, or never."""
    lease = None if ttl is None else seconds(ttl, "--ttl")
    table = open_table(uri, option, wal_uri, wal_option)
    table.refresh_checkpoint(checkpoint, lease)
    if as_json:
        print_json({"uri": table.uri, "refreshed": checkpoint, "ttl": lease})
    else:
        screen().print(f"checkpoint {checkpoint}, {_until(None if lease is None else time.time() + lease)}")


@checkpoint_app.command(cls=Command)
def drop(
    uri: Uri,
    checkpoint: Which,
    wal_uri: WalUri = None,
    option: StorageOptions = None,
    wal_option: WalOptions = None,
    as_json: AsJson = False,
) -> None:
    """Drop a checkpoint. What only it held is garbage then."""
    table = open_table(uri, option, wal_uri, wal_option)
    table.drop_checkpoint(checkpoint)
    if as_json:
        print_json({"uri": table.uri, "dropped": checkpoint})
    else:
        screen().print(f"checkpoint {checkpoint} is dropped")


def _until(expires: float | None) -> str:
    if expires is None:
        return "until it is dropped"
    return f"until {datetime.fromtimestamp(expires, UTC).strftime('%Y-%m-%d %H:%M:%S')} UTC"
