"""`headgate put`: the rows of files into a table.

A file and its content are one producer, its batches are numbered from 0. So the same command can be
run again after whatever ended it, and every batch is in the table once; and another file under the
same name is never taken for one that was put before.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Annotated, Any

import pyarrow as pa
import typer

import headgate as hg
from headgate.cli.files import STDIN, Format, Source, format_of
from headgate.cli.options import AsJson, StorageOptions, Uri, WalOptions, WalUri, open_table
from headgate.cli.output import print_json, print_table, progress, screen

_UNDER_WAY_MAX = 64
_PRODUCER_CHARACTERS_MAX = 200


@dataclass
class _Tally:
    """What was put so far, and where it went."""

    rows: int = 0
    batches: int = 0
    duplicates: int = 0
    acknowledged_rows: int = 0
    places: dict[str, tuple[int, int]] = field(default_factory=dict)
    waiting: deque[tuple[hg.TableAck, int]] = field(default_factory=deque)

    def add(self, ack: hg.TableAck, rows: int) -> None:
        self.waiting.append((ack, rows))
        self.rows += rows
        self.batches += 1

    def settle(self, leave: int) -> None:
        """Wait for the oldest puts, until so many are left."""
        while len(self.waiting) > leave or (self.waiting and self.waiting[0][0].done()):
            ack, rows = self.waiting[0]
            receipt = ack.wait()
            self.waiting.popleft()
            self.acknowledged_rows += rows
            self.duplicates += receipt.duplicate
            for shard, place in receipt.items():
                self.places[shard] = max(place, self.places.get(shard, place))

    def told(self, producer: str | None) -> str:
        """What to know after an error; nothing if nothing was put."""
        if not self.batches:
            return ""
        try:
            self.settle(len(self.waiting))  # closing the writer may have finished some
        except hg.HeadgateError:
            pass  # the first one that failed ends the rows that are known to be durable
        before = f"{self.acknowledged_rows:,} rows were acknowledged before"
        if producer is not None:
            return f"{before}; run the same command again, and they are not put twice"
        return f"{before}, and {self.rows - self.acknowledged_rows:,} more may have been put"


def put(
    uri: Uri,
    file: Annotated[list[str], typer.Argument(metavar="FILE", show_default=False, help="Files with rows; - is stdin.")],
    format: Annotated[
        Format | None, typer.Option("--format", show_default=False, help="What they hold. By default as their names say.")
    ] = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete the rows with these keys; columns besides the key are ignored.")] = False,
    producer: Annotated[
        str | None,
        typer.Option(
            "--producer",
            metavar="NAME",
            show_default=False,
            help="Put the content of each file once under this name, however often this is run.",
        ),
    ] = None,
    batch_rows: Annotated[int, typer.Option("--batch-rows", min=1, help="Rows in a put. Each put is atomic in each shard.")] = 10_000,
    quarantine: Annotated[
        bool,
        typer.Option("--quarantine", help="Keep rows with nulls where there may be none under quarantine/, with the reason, and go on."),
    ] = False,
    wal_only: Annotated[
        bool, typer.Option("--wal-only", help="Write the log only, and leave making runs of it to the next writer without this.")
    ] = False,
    wal_uri: WalUri = None,
    option: StorageOptions = None,
    wal_option: WalOptions = None,
    as_json: AsJson = False,
) -> None:
    """Put the rows of files into a table. Takes the table over from whoever writes it.

    Upserts by key; a table without a key is appended to. Files are Parquet, CSV (with a header), JSON (an
    object per line, or one list) or Arrow, also packed (.gz, .bz2, .zst, .lz4). Values are read with the
    table's types. Columns that a file has not are null.

    With --producer the same command can be run again after an error or a crash: what was put is not put a
    second time. A file counts as the same if its bytes are, with the same --batch-rows.
    """
    if file.count(STDIN) > 1:
        raise typer.BadParameter("stdin can be read once", param_hint=STDIN)
    if producer is not None and not 0 < len(producer) <= _PRODUCER_CHARACTERS_MAX:
        raise typer.BadParameter(f"1 to {_PRODUCER_CHARACTERS_MAX} characters", param_hint="--producer")
    sources = [Source(name, format_of(name, format, "pass --format")) for name in file]
    table = open_table(uri, option, wal_uri, wal_option)
    schema = _wanted(table, delete)
    config = hg.ShardWriterConfig(enable_memtable=not wal_only, on_bad_rows="quarantine" if quarantine else "fail")
    tally, quarantined, began = _Tally(), 0, time.perf_counter()
    batches = _batches(sources, schema, producer, delete=delete, rows=batch_rows)
    if not quarantine:
        batches = _without_nulls(batches, schema)
    with progress("reading", quiet=as_json) as tell:
        try:
            # Files that are not there or do not fit are no reason to fence anybody.
            first = next(batches, None)
            if first is not None:
                quarantined = _put_all(table, config, chain([first], batches), tally, tell, delete=delete)
        except hg.HeadgateError as error:
            error.hint = "; ".join(text for text in (error.hint, tally.told(producer)) if text)
            raise
        except OSError as error:
            raise hg.InvalidInputError(
                f"{error.filename or 'a file'} cannot be read: {error.strerror}", hint=tally.told(producer)
            ) from None
    _report(table, tally, time.perf_counter() - began, quarantined, delete=delete, as_json=as_json)


def _wanted(table: hg.Table, delete: bool) -> pa.Schema:
    """The columns that are read: all, or those of the key, which cannot be missing."""
    if delete and not table.key:
        raise hg.InvalidInputError("the table has no key, so nothing can be deleted by key", hint="append-only tables keep every row")
    chosen = [f for f in table.schema if not delete or f.name in table.key]
    return pa.schema([f.with_nullable(f.nullable and f.name not in table.key) for f in chosen])


@dataclass(frozen=True)
class _Batch:
    """Rows of a file, and what they are called if they may be put once only."""

    source: Source
    rows: pa.Table
    counted: dict[str, Any]


def _batches(sources: list[Source], schema: pa.Schema, producer: str | None, *, delete: bool, rows: int) -> Iterator[_Batch]:
    for source in sources:
        with source.opened(fingerprint=producer is not None) as (stream, digest):
            # Its content, and how it is cut, are part of the name: a sequence stands for the same rows for ever.
            name = f"{producer}@{digest[:16]}-{'d' if delete else 'u'}{rows}"
            for number, part in enumerate(source.batches(stream, schema, rows, ignore_others=delete)):
                yield _Batch(source, part, {} if producer is None else {"producer": name, "sequence": number})


def _without_nulls(batches: Iterator[_Batch], schema: pa.Schema) -> Iterator[_Batch]:
    """Refuse here what the writer would refuse, with the name of the file."""
    required = [field.name for field in schema if not field.nullable]
    for batch in batches:
        wrong = next((name for name in required if batch.rows.column(name).null_count), None)
        if wrong is not None:
            raise hg.InvalidInputError(
                f"{batch.source.told}: the column {wrong!r} has nulls", hint="drop those rows, give them a value, or pass --quarantine"
            )
        yield batch


def _put_all(
    table: hg.Table, config: hg.ShardWriterConfig, batches: Iterator[_Batch], tally: _Tally, tell: Callable[[str], None], *, delete: bool
) -> int:
    """Put them, and wait until all is durable and flushed; returns how many rows could not be taken."""
    tell("opening")
    with table.writer(config) as writer:
        act = writer.delete if delete else writer.put
        for batch in batches:
            tally.add(act(batch.rows, **batch.counted), batch.rows.num_rows)
            tally.settle(_UNDER_WAY_MAX)
            tell(f"{batch.source.told}: {tally.rows:,} rows, {tally.acknowledged_rows:,} of them durable")
        tally.settle(0)
        tell(f"{tally.rows:,} rows are durable; flushing")
        return writer.quarantined_rows


def _report(table: hg.Table, tally: _Tally, seconds: float, quarantined: int, *, delete: bool, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "uri": table.uri,
                "op": "delete" if delete else "upsert",
                "rows": tally.rows,
                "batches": tally.batches,
                "duplicates": tally.duplicates,
                "quarantined_rows": quarantined,
                "seconds": round(seconds, 3),
                "receipts": {shard: {"epoch": epoch, "position": at} for shard, (epoch, at) in sorted(tally.places.items())},
            }
        )
        return
    out = screen()
    what = "keys deleted" if delete else "rows put"
    out.print(f"{tally.rows:,} {what} in {seconds:.1f} s, in {tally.batches:,} batch{'es' if tally.batches != 1 else ''}; all are durable")
    if tally.duplicates:
        were = "batch was" if tally.duplicates == 1 else "batches were"
        out.print(f"{tally.duplicates:,} {were} there already, and not put again")
    if quarantined:
        out.print(f"{quarantined:,} rows could not be taken; they are under {table.uri}/quarantine, with the reason")
    if tally.places:
        print_table(
            ["shard", "epoch", "last position"],
            [[shard, f"{epoch:,}", f"{position:,}"] for shard, (epoch, position) in sorted(tally.places.items())],
            right=frozenset({"epoch", "last position"}),
        )
