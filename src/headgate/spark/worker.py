"""The Python processes that run Spark's tasks.

Owns: what they do once, for all their tasks. Does not own: the tasks.
"""

from __future__ import annotations

import gc
from itertools import count

from pyspark import TaskContext

_tasks = count(1)


def begin_task() -> None:
    """To be called as a task begins.

    Spark has a process collect garbage after each of its tasks, before the next one can begin. That looks at the objects of all
    modules that are loaded, which took 45 ms each time. When the second task begins they are there, and what was garbage has
    just been collected: so nothing is kept that could go, and the objects of now are not looked at again.
    """
    if TaskContext.get() is not None and next(_tasks) == 2:
        gc.freeze()
