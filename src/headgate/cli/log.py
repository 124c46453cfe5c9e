"""`headgate tail` and `trim`: the log of a table's shards."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import islice
from typing import Annotated, Any

import typer

import headgate as hg
from headgate.cli.options import AsJson, StorageOptions, Uri, WalOptions, WalUri, open_table
from headgate.cli.output import print_json, print_table
from headgate.cli.rows import json_rows, one_line

_POLL_SECONDS, _POLL_SECONDS_MAX = 0.05, 1.0
_HEAD = f"{'shard':<5} {'position':>8} {'epoch':>5}  {'time (UTC)':<23} {'rows':>6} {'bytes':>9}  content"


def tail(
    uri: Uri,
    shard: Annotated[
        list[str] | None, typer.Option("--shard", metavar="ID", show_default=False, help="Only this shard. Repeatable.")
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(
            "--start", metavar="POSITION", show_default=False, help="The first position wanted, or 'end': what comes from now on."
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait at the tip for more.")] = False,
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=0, show_default=False, help="Stop after so many entries.")] = None,
    seals: Annotated[bool, typer.Option("--seals", help="Show the seals between the epochs too.")] = False,
    wal_uri: WalUri = None,
    option: StorageOptions = None,
    wal_option: WalOptions = None,
    as_json: AsJson = False,
) -> None:
    """Show the log's entries. Writes nothing and fences nobody.

    With --json: one JSON object per line and entry, with all its rows.
    """
    first = _position(start)
    table = open_table(uri, option, wal_uri, wal_option)
    chosen = [table.shard(name) for name in dict.fromkeys(shard)] if shard else table.shards
    entries = islice(_entries(chosen, first, follow=follow, seals=seals), limit)
    if as_json:
        for one, entry in entries:
            print_json(_document(one, entry))
            if follow:
                sys.stdout.flush()
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    _print_line(_HEAD, width)
    for one, entry in entries:
        for line in _lines(one, entry):
            _print_line(line, width)
        if follow:
            sys.stdout.flush()


def _print_line(line: str, width: int | None) -> None:
    """On a terminal one line stays one line; a file gets all of it."""
    sys.stdout.write((line if width is None or len(line) <= width else line[: width - 1] + "…") + "\n")


def _position(text: str | None) -> int | None:
    """None: the first there is. -1: the tip."""
    if text is None:
        return None
    if text == "end":
        return -1
    if not text.isdigit():
        raise typer.BadParameter(f"{text!r} is no position: a whole number from 0, or 'end'", param_hint="--start")
    return int(text)


def _entries(shards: list[hg.Shard], start: int | None, *, follow: bool, seals: bool) -> Iterator[tuple[hg.Shard, hg.Entry]]:
    """The shards' entries; several followed shards take turns."""
    tailers = [(shard, hg.WalTailer(shard)) for shard in shards]
    nexts = {shard.id: tailer.next_position() if start == -1 else start for shard, tailer in tailers}
    if len(tailers) == 1 and follow:
        shard, tailer = tailers[0]
        for entry in tailer.read(nexts[shard.id], follow=True, include_seals=seals):
            yield shard, entry
        return
    wait = _POLL_SECONDS
    while True:
        wait = min(_POLL_SECONDS_MAX, 2 * wait)
        for shard, tailer in tailers:
            for entry in tailer.read(nexts[shard.id], include_seals=True):
                nexts[shard.id] = entry.position + 1
                wait = _POLL_SECONDS
                if seals or not entry.is_seal:
                    yield shard, entry
        if not follow:
            return
        time.sleep(wait)


def _document(shard: hg.Shard, entry: hg.Entry) -> dict[str, Any]:
    document: dict[str, Any] = {
        "shard": shard.id,
        "epoch": entry.epoch,
        "position": entry.position,
        "kind": entry.kind,
        "time": entry.time,
        "bytes": entry.size_bytes,
    }
    if entry.is_seal:
        return {**document, "by_epoch": entry.header.by_epoch}
    puts = []
    for put in entry.puts:
        who = {"producer": put.producer, "sequence": put.sequence} if put.producer is not None else {}
        puts.append({"op": put.op, **who, "rows": json_rows(put.rows)})
    return {**document, "puts": puts}


def _lines(shard: hg.Shard, entry: hg.Entry) -> Iterator[str]:
    """One line per put; what belongs to the whole entry stands in the first."""
    when = _utc(entry.time)
    rows = "seal" if entry.is_seal else f"{sum(put.rows.num_rows for put in entry.puts):,}"
    head = f"{shard.id:<5} {entry.position:>8} {entry.epoch:>5}  {when} {rows:>6} {entry.size_bytes:>9,}  "
    if entry.is_seal:
        yield f"{head}ends epoch {entry.epoch}, by epoch {entry.header.by_epoch}"
        return
    for put in entry.puts:
        who = f"[{put.producer} {put.sequence}] " if put.producer is not None else ""
        what = "delete " if put.op == "delete" else ""
        yield f"{head}{who}{what}{one_line(put.rows)}"
        head = " " * len(head)


def _utc(moment: float) -> str:
    try:
        return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    except (OverflowError, ValueError, OSError):  # a clock that was far off
        return f"{moment:<23}"


def trim(
    uri: Uri,
    before: Annotated[int, typer.Option("--before", metavar="POSITION", min=0, show_default=False, help="The first position to keep.")],
    shard: Annotated[
        list[str] | None, typer.Option("--shard", metavar="ID", show_default=False, help="Only this shard. Repeatable. None: every shard.")
    ] = None,
    wal_uri: WalUri = None,
    option: StorageOptions = None,
    wal_option: WalOptions = None,
    as_json: AsJson = False,
) -> None:
    """Give up the log before a position, for good. For tables written in WAL-only mode.

    Nothing is deleted yet; collection may delete it from now on.
    """
    table = open_table(uri, option, wal_uri, wal_option)
    chosen = [table.shard(name).id for name in dict.fromkeys(shard)] if shard else [one.id for one in table.shards]
    table.trim(dict.fromkeys(chosen, before))
    states = [state for state in table.status().shards if state.shard in chosen]
    if as_json:
        print_json({"uri": table.uri, "shards": [{"shard": s.shard, "cursor": s.cursor, "tip": s.tip, "lag": s.lag} for s in states]})
        return
    print_table(
        ["shard", "cursor", "tip", "lag"],
        [[s.shard, f"{s.cursor:,}", f"{s.tip:,}", f"{s.lag:,}"] for s in states],
        right=frozenset({"cursor", "tip", "lag"}),
    )
