"""`headgate bench`: the benchmarks of a checkout, as one suite."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import typer

import headgate as hg


def bench(context: typer.Context) -> None:
    """Measure Headgate beside its peers: `headgate bench [NAME …]`, see `headgate bench --help`.

    Ratios within one run are the result, with a JSON file and a Markdown page; `--compare OLD.json` tells what got slower.
    """
    suite = Path(hg.__file__).parent.parent.parent / "benchmarks" / "suite.py"
    if not suite.exists():
        raise hg.NotFoundError("the benchmarks are not installed", hint="run this from a checkout of the project: ./headgate bench")
    raise typer.Exit(subprocess.run([sys.executable, str(suite), *context.args], check=False).returncode)
