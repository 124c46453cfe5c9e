"""How every command ends.

Owns: exit codes, and what is said on stderr. 0: done. 1: an error, or something is wrong with the
table. 2: the command was called wrongly. 130: Ctrl-C. 141: the reader of our output went away, as
for any program that SIGPIPE ends.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import typer
from typer.core import TyperCommand

import headgate as hg

_INTERRUPTED, _PIPE_CLOSED = 130, 141


class Command(TyperCommand):
    """A command whose errors are told in words, or with ``--json`` as one JSON object; never as a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except hg.HeadgateError as error:
            _tell(error, as_json=bool(ctx.params.get("as_json")))
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            raise typer.Exit(_INTERRUPTED) from None
        except BrokenPipeError:
            _let_go_of_stdout()
            raise typer.Exit(_PIPE_CLOSED) from None
        return result


def error_document(error: hg.HeadgateError) -> dict[str, Any]:
    """An error for machines: its type, what happened, what to do, and what it names."""
    about: dict[str, Any] = {
        "type": type(error).__name__,
        "message": error.message,
        "hint": error.hint,
        "retryable": error.retryable,
    }
    for name in ("object", "shard", "epoch", "position", "by_epoch"):
        value = getattr(error, name, None)
        if value not in (None, ""):
            about[name] = value
    return {"error": about}


def _tell(error: hg.HeadgateError, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(error_document(error), ensure_ascii=False), err=True)
        return
    typer.echo(f"headgate: {error.message}", err=True)
    if error.hint:
        typer.echo(f"  hint: {error.hint}", err=True)


def _let_go_of_stdout() -> None:
    """Nobody reads it any more: what is still buffered must not fail again when Python ends."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (OSError, ValueError):  # stdout is no file: there is nothing to let go of
        return
