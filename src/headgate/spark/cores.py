"""The core of a task.

Owns: keeping a task to one core. Does not own: how many tasks there are (Spark), what they do.

Spark runs as many tasks at once as there are cores, so each has one. Lance does not know that: it reads, decodes and writes
with as many threads as the machine has cores, and what they hand to each other goes from core to core. A task alone gains
nothing by it; of several at once each waits for threads that wait for a core. So a task that works through Lance stays on
one core, of which no other task of ours has it: a lock on a file for each core says so, and ends with the process that has it.

Only where all tasks are on this machine (``local[…]``): others may not see each other's locks, and would all take the same core.
Nothing depends on it. Where a core cannot be had, or told, a task runs as ever.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOCAL = re.compile(r"local\[(\d+|\*)(,\s*\d+)?\]")


def has_cores(spark: SparkSession) -> bool:
    """Do the tasks of a session run on this machine, each on one core, and as many of them at once as it has cores?"""
    if not hasattr(os, "sched_getaffinity") or getattr(spark, "sparkContext", None) is None:  # through Connect it may be any machine
        return False
    if spark.conf.get("spark.task.cpus", "1") != "1":
        return False
    match = _LOCAL.fullmatch(spark.conf.get("spark.master", "") or "")
    return match is not None and (match.group(1) == "*" or int(match.group(1)) == len(os.sched_getaffinity(0)))


@contextmanager
def on_a_core() -> Iterator[None]:
    """Keep this process to a core that no other task has, if there is one, until the block ends."""
    before = os.sched_getaffinity(0)
    taken = _taken(before) if len(before) > 1 else None
    if taken is None:
        yield
        return
    core, lock = taken
    pa.cpu_count()  # Arrow counts the cores once, on first use: all of them, for what this process does later
    try:
        _keep_to({core})
        yield
    finally:
        _keep_to(before)
        os.close(lock)


def _taken(cores: set[int]) -> tuple[int, int] | None:
    """A core that nobody has, and the file that says whose it is."""
    import fcntl

    for core in sorted(cores):
        with suppress(OSError):
            path = os.path.join(tempfile.gettempdir(), f"headgate-core-{os.getuid()}-{core}")
            lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(lock)
                continue
            return core, lock
    return None


def _keep_to(cores: set[int]) -> None:
    """All threads of this process, also those that begin meanwhile; later ones do as the one that begins them."""
    done: set[str] = set()
    with suppress(OSError):
        while new := set(os.listdir("/proc/self/task")) - done:
            for thread in new:
                with suppress(OSError):  # it has ended
                    os.sched_setaffinity(int(thread), cores)
            done |= new
