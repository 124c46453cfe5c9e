"""`headgate create`, `status` and `verify`: a table as a whole."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

import headgate as hg
from headgate.cli.on_spark import Master, Spark, check, place, spark_session
from headgate.cli.options import AsJson, StorageOptions, Uri, WalOptions, WalUri, open_table, pairs
from headgate.cli.output import ago, print_json, print_table, progress, screen, size
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
    shard_per: Annotated[
        str | None,
        typer.Option(
            "--shard-per", metavar="COLUMN", show_default=False, help="Instead: a shard for each value of a column, made on first use."
        ),
    ] = None,
    index: Annotated[
        list[str] | None,
        typer.Option(
            "--index",
            metavar="KIND:COLUMN",
            show_default=False,
            help="text:body, vector:embedding, vector:embedding:cosine (l2, cosine, dot) or scalar:ts. Repeatable.",
        ),
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
    if shard_per is not None and (shards > 1 or shard_by is not None):
        raise typer.BadParameter("either so many shards, or one for each value", param_hint="--shard-per")
    sharding = hg.bucket(str(column), shards) if shards > 1 else hg.unsharded()
    table = hg.create_table(
        uri,
        read_schema(schema),
        list(key) if key else None,
        sharding=sharding if shard_per is None else hg.identity(shard_per),
        storage_options=pairs(option, "-o"),
        wal_uri=wal_uri,
        wal_storage_options=pairs(wal_option, "--wal-option"),
        indexes=[_index(text) for text in index] if index else None,
        if_exists=if_exists.value,
    )
    show(table, as_json=as_json)


def _index(text: str) -> Any:
    """An index as it is typed: its kind, the column, and for vectors perhaps the metric."""
    kind, _, column = text.partition(":")
    if kind == "vector" and column.rpartition(":")[2] in ("l2", "cosine", "dot"):
        column, _, metric = column.rpartition(":")
        return hg.vector_index(column, metric=metric)  # type: ignore[arg-type]
    makers: dict[str, Callable[[str], Any]] = {"vector": hg.vector_index, "text": hg.text_index, "scalar": hg.scalar_index}
    if kind not in makers or not column:
        raise typer.BadParameter(f"{text!r} is none: text:COLUMN, vector:COLUMN[:METRIC] or scalar:COLUMN", param_hint="--index")
    return makers[kind](column)


def status(
    uri: Uri,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show it again and again, until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between two looks, with --watch.")] = 2.0,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            "--metrics-port",
            metavar="PORT",
            min=1,
            max=65_535,
            show_default=False,
            help="With --watch: answer Prometheus on this port of this machine with what was seen.",
        ),
    ] = None,
    wal_uri: WalUri = None,
    option: StorageOptions = None,
    wal_option: WalOptions = None,
    as_json: AsJson = False,
) -> None:
    """Show a table and the state of every shard. Writes nothing.

    cursor: all before it is in runs. tip: the end of the log. lag: entries between them, which the next
    writer replays. pending: runs that were flushed and are not compacted yet. rows and size are those of
    the runs, deleted and replaced rows included. clean: nothing in the log is needed. behind: entries that
    the slowest consumer has not read. With --watch also how many entries came per second since the last look.
    """
    if metrics_port is not None and not watch:
        raise typer.BadParameter("goes with --watch: nobody would answer afterwards", param_hint="--metrics-port")
    table = open_table(uri, option, wal_uri, wal_option)
    stop = _serve(metrics_port) if metrics_port is not None else None
    before: dict[str, tuple[float, int]] = {}
    try:
        while True:
            state, now = table.status(), time.monotonic()
            rates = {s.shard: _rate(before.get(s.shard), now, s.tip) for s in state.shards}
            if as_json:
                shards = [_shard_document(shard, rates[shard.shard] if watch else None) for shard in state.shards]
                print_json({**_description(table), "shards": shards})
            else:
                out = screen()
                if watch and out.is_terminal:
                    out.clear()
                _print_description(table)
                _print_shards(state, rates if watch else {})
            if not watch:
                return
            before = {shard.shard: (now, shard.tip) for shard in state.shards}
            sys.stdout.flush()
            time.sleep(interval)
    finally:
        if stop is not None:
            stop()


def _serve(port: int) -> Callable[[], None]:
    try:
        return hg.metrics.serve(port)
    except OSError as error:
        raise typer.BadParameter(f"{port} cannot be used: {error.strerror}", param_hint="--metrics-port") from None


def _rate(before: tuple[float, int] | None, now: float, tip: int) -> float:
    """Entries per second since the last look."""
    return 0.0 if before is None or now <= before[0] else max(0, tip - before[1]) / (now - before[0])


def _shard_document(shard: hg.ShardStatus, rate: float | None) -> dict[str, Any]:
    document = {**asdict(shard), "pending_generations": shard.generations}
    return document if rate is None else {**document, "entries_per_second": round(rate, 3)}


_NUMBERS: dict[str, Callable[[hg.ShardStatus], int]] = {
    "epoch": lambda shard: shard.epoch,
    "cursor": lambda shard: shard.cursor,
    "tip": lambda shard: shard.tip,
    "lag": lambda shard: shard.lag,
    "runs": lambda shard: shard.runs,
    "pending": lambda shard: shard.generations,
    "rows": lambda shard: shard.rows,
    "size": lambda shard: shard.bytes,
    "tombstones": lambda shard: shard.tombstones,
    "first": lambda shard: shard.first_position,
    "producers": lambda shard: shard.producers,
    "consumers": lambda shard: shard.consumers,
    "behind": lambda shard: shard.consumer_lag,
    "checkpoints": lambda shard: shard.checkpoints,
}
_ALWAYS = ("epoch", "cursor", "tip", "lag", "runs", "pending", "rows", "size")
_ADDED_UP = ("lag", "runs", "pending", "rows", "size", "tombstones")


def _print_shards(state: hg.TableStatus, rates: dict[str, float]) -> None:
    shards = state.shards
    watched = ["entries/s"] if rates else []
    numbers = [name for name, of in _NUMBERS.items() if name in _ALWAYS or any(of(shard) for shard in shards)]
    elsewhere = any(shard.wal_store != state.uri for shard in shards)

    def told(name: str, number: int) -> str:
        return size(number) if name == "size" else f"{number:,}"

    rows = [
        [
            shard.shard,
            shard.state,
            *(told(name, _NUMBERS[name](shard)) for name in numbers),
            *([f"{rates[shard.shard]:,.1f}"] if rates else []),
            "yes" if shard.clean else "no",
            ago(shard.claimed_at),
            shard.owner or "nobody",
            *([shard.wal_store] if elsewhere else []),
        ]
        for shard in shards
    ]
    if len(shards) > 1:
        sums = [told(name, sum(map(_NUMBERS[name], shards))) if name in _ADDED_UP else "" for name in numbers]
        rates_sum = [f"{sum(rates.values()):,.1f}"] if rates else []
        rows.append(["all", "", *sums, *rates_sum, "", "", "", *([""] if elsewhere else [])])
    columns = ["shard", "state", *numbers, *watched, "clean", "claimed", "by", *(["log in"] if elsewhere else [])]
    print_table(columns, rows, right=frozenset([*numbers, *watched]))


def verify(
    uri: Uri,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every entry that is left and every row of every run, and compare the two.")
    ] = False,
    spark: Spark = False,
    master: Master = None,
    wal_uri: WalUri = None,
    option: StorageOptions = None,
    wal_option: WalOptions = None,
    as_json: AsJson = False,
) -> None:
    """Check every shard: manifest, chain, checksums, seals, runs, checkpoints; count what nothing names.

    Writes nothing. Exit code 1 if something is wrong; headgate repair says what can be done about it.
    """
    check(spark, master)
    table = open_table(uri, option, wal_uri, wal_option)
    with progress(f"checking {len(table.shards):,} shards of {table.uri}", quiet=as_json) as tell:
        if spark:
            import headgate.spark as hgs

            with spark_session(master) as session:
                report = hgs.verify(session, uri, deep=deep, **place(option, wal_uri, wal_option))
        else:
            report = table.verify(deep, lambda shard, what: tell(f"shard {shard}: {what}"))
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
            out.print("  hint: nothing was changed; restore the named objects from a backup or a bucket version before opening a writer;")
            out.print("  what cannot be restored: headgate repair says what it would give up")
    if not report.ok:
        raise typer.Exit(1)


def show(table: hg.Table, *, as_json: bool) -> None:
    """What a table is, after it was made or changed."""
    if as_json:
        print_json(_description(table))
    else:
        _print_description(table)


def _description(table: hg.Table) -> dict[str, Any]:
    rule = table.sharding
    sharding: dict[str, Any] = {"kind": rule.kind}
    if rule.column is not None:
        sharding |= {"column": rule.column} | ({"buckets": rule.buckets} if rule.kind == "bucket" else {})
    return {
        "uri": table.uri,
        "key": list(table.key),
        "sharding": sharding,
        "schema": {"fields": describe(table.schema)},
        "indexes": [index.model_dump() for index in table.indexes],
        "shards": [shard.id for shard in table.shards],
    }


def _print_description(table: hg.Table) -> None:
    out = screen()
    rule, count = table.sharding, len(table.shards)
    by = f", by {rule.kind} of {rule.column}" if rule.column is not None else ""
    out.print(f"{table.uri}: key {', '.join(table.key) or 'none (append-only)'}; {count:,} shard{'s' if count != 1 else ''}{by}")
    for field in describe(table.schema):
        kept = [f"{index.kind} index" for index in table.indexes if index.column == field["name"]]
        out.print(f"  {field['name']} {field['type']}{'' if field['nullable'] else ' not null'}{''.join(f', {text}' for text in kept)}")
