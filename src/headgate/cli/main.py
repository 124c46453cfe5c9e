"""The `headgate` command: its list of commands."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from typing import Annotated

import typer

import headgate as hg
from headgate.cli import bench, columns, demo, feed, life, log, put, read, repair, simulate, table
from headgate.cli.clone import clone, detach, drop, split
from headgate.cli.command import Command

_M_ARENA_MAX = -8  # of glibc's malloc.h

app = typer.Typer(
    name="headgate",
    help="Durable, low-latency, fenced writes into columnar tables on object storage.",
    epilog="Every command takes --json for machines. Credentials come from the environment or from -o key=value.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headgate {hg.__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")] = False,
) -> None:
    """Durable, low-latency, fenced writes into columnar tables on object storage."""


for _run in (
    table.create,
    put.put,
    read.scan,
    read.sql,
    read.lookup,
    table.status,
    log.tail,
    feed.changes,
    table.verify,
    repair.repair,
    log.trim,
    life.compact,
    life.gc,
    clone,
    detach,
    split,
    drop,
    demo.demo,
    simulate.simulate,
):
    app.command(cls=Command)(_run)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})(bench.bench)
app.add_typer(columns.app, name="columns")
app.add_typer(life.checkpoint_app, name="checkpoint")
app.add_typer(feed.consumers_app, name="consumers")


def _share_memory_among_threads() -> None:
    """Let threads free memory for each other, as MALLOC_ARENA_MAX=2 does: else each of Lance's keeps what it once needed.

    A compaction of four million rows took 570 MB instead of 755 MB, the whole process counted.
    For a process of ours only: a library has no say in it.
    """
    if "MALLOC_ARENA_MAX" not in os.environ and "arena_max" not in os.environ.get("GLIBC_TUNABLES", ""):
        with suppress(OSError, AttributeError, TypeError):  # another C library, another system
            ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)


def main() -> None:
    """The entry point. HEADGATE_PROGRAM: how it was called, when not by its own name, for hints that can be copied."""
    _share_memory_among_threads()
    app(prog_name=os.environ.get("HEADGATE_PROGRAM") or "headgate")


if __name__ == "__main__":
    main()
