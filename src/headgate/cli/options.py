"""The options that many commands share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

import headgate as hg

Uri = Annotated[str, typer.Argument(metavar="URI", help="The table: a path, or s3://…, gs://…, az://…", show_default=False)]

AsJson = Annotated[bool, typer.Option("--json", help="JSON for machines instead of text for people.")]

StorageOptions = Annotated[
    list[str] | None,
    typer.Option(
        "-o",
        "--option",
        metavar="KEY=VALUE",
        envvar="HEADGATE_STORAGE_OPTIONS",
        show_envvar=False,
        show_default=False,
        help="A storage option, by object_store's name (aws_…, azure_…, google_…). Repeatable. The usual variables of the "
        "environment (AWS_…, AZURE_…, GOOGLE_…) count too, and HEADGATE_STORAGE_OPTIONS holds several, separated by spaces.",
    ),
]

WalUri = Annotated[
    str | None, typer.Option("--wal-uri", metavar="URI", show_default=False, help="Where the log is, if not beside the table.")
]

WalOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--wal-option",
        metavar="KEY=VALUE",
        envvar="HEADGATE_WAL_STORAGE_OPTIONS",
        show_envvar=False,
        show_default=False,
        help="A storage option of the log's store. Repeatable. None: those of -o.",
    ),
]


def pairs(texts: Sequence[str] | None, flag: str) -> dict[str, str] | None:
    """``key=value`` texts as a dict. What is wrong with one is said without its value: it may be a secret."""
    if not texts:
        return None
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise typer.BadParameter("expected KEY=VALUE, for example aws_region=eu-central-1", param_hint=flag)
        found[name.strip()] = value
    return found


def open_table(uri: str, option: Sequence[str] | None, wal_uri: str | None, wal_option: Sequence[str] | None) -> hg.Table:
    """The table that a command's options name."""
    return hg.open_table(uri, pairs(option, "-o"), wal_uri, pairs(wal_option, "--wal-option"))
