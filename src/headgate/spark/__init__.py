"""The data pipeline on Spark: ``import headgate.spark as hgs``.

Owns: the public names. Importing it needs neither PySpark nor Java; using it does, and says so.

All input and output is done by Python workers, in Arrow, so there is no jar: the package has to be
importable where the workers run, and that is all. Nothing here uses ``sparkContext``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headgate.spark.frame import read, snapshot
    from headgate.spark.jobs import compact, gc, verify
    from headgate.spark.route import partition_by_shard
    from headgate.spark.start import register, session
    from headgate.spark.transfer import load, reshard
    from headgate.spark.types import arrow_schema, spark_schema

# The module of each name. No module is called like one of them: once it was imported it would stand in its place.
_ROOMS = {
    "read": "frame",
    "snapshot": "frame",
    "compact": "jobs",
    "gc": "jobs",
    "verify": "jobs",
    "load": "transfer",
    "reshard": "transfer",
    "partition_by_shard": "route",
    "register": "start",
    "session": "start",
    "arrow_schema": "types",
    "spark_schema": "types",
}

__all__ = [
    "arrow_schema",
    "compact",
    "gc",
    "load",
    "partition_by_shard",
    "read",
    "register",
    "reshard",
    "session",
    "snapshot",
    "spark_schema",
    "verify",
]


def __getattr__(name: str) -> Any:
    """The public names, found when they are first used: PySpark takes a while to load, and may not be there."""
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from headgate.spark.environment import require_pyspark

    require_pyspark()
    return getattr(import_module(f"{__name__}.{_ROOMS[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
