"""Spark sessions: one of our own where there is none, and telling one of ours about the format.

Owns: how a session that we make is set up. Does not own: sessions of the user's, which are taken as they are.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING

from headgate.spark.environment import require_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOCAL = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "4",
}
_SOCKET_PLACE_LONGEST = 40  # our folder's name has 17 more, a socket's some 40, and a system allows about 100


def session(master: str | None = None, *, app_name: str = "headgate", config: Mapping[str, str] | None = None) -> SparkSession:
    """A Spark session that knows ``format("headgate")``: the active one, else one of our own.

    Args:
        master: where it runs, e.g. ``spark://host:7077``; None: in this process, on all cores.
        config: further settings of Spark's, which win over ours.

    Raises:
        NotFoundError: there is no Java, or none that is new enough.
    """
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    if active is not None:
        register(active)
        return active
    os.environ.setdefault("JAVA_HOME", str(require_java()))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # the workers' Python must have this package
    where = master or "local[*]"
    settings = {**(_LOCAL | _unix_sockets() if where.startswith("local") else {}), **(config or {})}
    builder = SparkSession.builder.appName(app_name).master(where)
    for name, value in settings.items():
        builder = builder.config(name, value)
    made = builder.getOrCreate()
    register(made)
    return made


def _unix_sockets() -> dict[str, str]:
    """Settings: Spark talks to its Python processes through Unix sockets. An empty task takes 20 ms so, and 60 ms by TCP."""
    if os.name != "posix" or len(tempfile.gettempdir()) > _SOCKET_PLACE_LONGEST:
        return {}
    folder = tempfile.mkdtemp(prefix="headgate-")  # nobody else may look into it
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return {"spark.python.unix.domain.socket.enabled": "true", "spark.python.unix.domain.socket.dir": folder}


def register(spark: SparkSession) -> None:
    """Tell a session about ``format("headgate")``. Where the package is installed Spark finds it by itself."""
    from headgate.spark.source import HeadgateDataSource

    spark.dataSource.register(HeadgateDataSource)
