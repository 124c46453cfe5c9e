"""`headgate repair`: what is broken, what would be done about it, and what that gives up."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

import headgate as hg
from headgate.cli.options import AsJson, StorageOptions, Uri, WalOptions, WalUri, pairs
from headgate.cli.output import print_json, progress, screen


def repair(
    uri: Uri,
    yes: Annotated[bool, typer.Option("--yes", help="Do it. Without it, only say what would be done, and what that gives up.")] = False,
    wal_uri: WalUri = None,
    option: StorageOptions = None,
    wal_option: WalOptions = None,
    as_json: AsJson = False,
) -> None:
    """Make a damaged table whole again, giving up what is gone. Reads everything.

    First restore what you can from a backup or from bucket versions. A shard that is whole is not touched; a broken one is
    claimed, which fences its writer. What is damaged is copied to repair/ below the table before it is replaced.
    Exit code 1 if something is broken and was not mended.
    """
    with progress("looking for what is broken", quiet=as_json) as tell:
        report = hg.repair_table(
            uri,
            not yes,
            storage_options=pairs(option, "-o"),
            wal_uri=wal_uri,
            wal_storage_options=pairs(wal_option, "--wal-option"),
            progress=lambda shard, what: tell(f"shard {shard}: {what}"),
        )
    if as_json:
        print_json({"uri": uri, **asdict(report), "gives_up": list(report.gives_up)})
    else:
        _show(report, yes=yes)
    if not report.ok:
        raise typer.Exit(1)


def _show(report: hg.RepairReport, *, yes: bool) -> None:
    out = screen()
    for step in report.steps:
        out.print(f"{f'shard {step.shard}' if step.shard else 'the table'}: {step.problem}")
        out.print(f"  object: {step.object}")
        out.print(f"  {'done' if yes else 'would be done'}: {step.action}")
        if step.gives_up:
            out.print(f"  given up: {step.gives_up}")
    for problem in report.left:
        out.print(f"shard {problem.shard}: {problem.kind}: {problem.message}")
        out.print("  nothing can be done about it here")
    for copy in report.kept:
        out.print(f"kept: {copy}")
    if not report.steps and not report.left:
        out.print("nothing is broken, nothing was done")
        return
    loses = sum(bool(step.gives_up) for step in report.steps)
    told = f"{loses:,} of them at a loss" if loses else "none of them at a loss"
    if not yes:
        out.print(f"{len(report.steps):,} repairs to do, {told}; nothing was changed")
        out.print(
            "  hint: restore the objects from a backup or a bucket version, if you can; --yes repairs, and gives up what is said above"
        )
    else:
        out.print(
            f"{len(report.steps):,} repairs done, {told}; {'all is well' if report.ok else f'{len(report.left):,} problems are left'}"
        )
