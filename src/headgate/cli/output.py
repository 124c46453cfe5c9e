"""What goes to stdout: a document for machines, or text for people."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table


class _Screen(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # ends the command the same way, whoever wrote last (command)


def screen() -> Console:
    """Where people look. Made when it is needed, so that it writes to the stdout of now."""
    return _Screen(highlight=False, soft_wrap=not sys.stdout.isatty(), markup=False)


def print_json(document: Any) -> None:
    """One JSON document on one line."""
    sys.stdout.write(json.dumps(document, ensure_ascii=False) + "\n")


def print_table(columns: list[str], rows: list[list[str]], *, right: frozenset[str] = frozenset()) -> None:
    """Aligned columns without decoration."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    out = screen()
    out.width = 10_000  # a long line is better than a number with its end cut off
    out.print(table)


@contextmanager
def progress(what: str, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A spinner with the time, on stderr and only on a terminal, while something long runs. Gives what tells how far it is."""
    err = Console(stderr=True)
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=err,
        transient=True,
        disable=quiet or not err.is_terminal,
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda text: bar.update(task, description=text)


def size(count: int) -> str:
    """Bytes, in one unit."""
    for unit, one in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= one:
            return f"{count / one:.1f} {unit}"
    return f"{count:,} B"


def ago(moment: float | None) -> str:
    """How long ago, in one unit."""
    if moment is None:
        return "never"
    seconds = max(0.0, time.time() - moment)
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
