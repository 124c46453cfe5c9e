"""`--spark [--master …]`: the same command, by Spark's tasks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from headgate.cli.options import pairs

Spark = Annotated[bool, typer.Option("--spark", help="All shards at once, and large ones by several tasks, on Spark.")]
Master = Annotated[
    str | None,
    typer.Option("--master", metavar="URL", show_default=False, help="Where Spark runs, e.g. spark://host:7077. None: here, on all cores."),
]


def check(spark: bool, master: str | None) -> None:
    if master is not None and not spark:
        raise typer.BadParameter("it goes with --spark", param_hint="--master")


@contextmanager
def spark_session(master: str | None) -> Iterator[Any]:
    """One of our own, that ends with the command; or the one that is there, which stays."""
    import headgate.spark as hgs  # PySpark takes a while to load: only those who ask pay

    make = hgs.session  # without PySpark this says what to install
    from pyspark.sql import SparkSession

    was_there = SparkSession.getActiveSession() is not None
    session = make(master, config={"spark.log.level": "ERROR"})
    try:
        yield session
    finally:
        if not was_there:
            session.stop()


def place(option: list[str] | None, wal_uri: str | None, wal_option: list[str] | None) -> dict[str, Any]:
    """Where a table is, as the functions for Spark take it."""
    return {
        "storage_options": pairs(option, "-o"),
        "wal_uri": wal_uri,
        "wal_storage_options": pairs(wal_option, "--wal-option"),
    }
