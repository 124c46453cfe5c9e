"""Processes: one of its own for work that is to crash, or whose memory is measured; and what this one has used."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any


def in_child(work: Callable[..., Any], *args: Any, crash: bool = False) -> Any:
    """What ``work`` returns, from a fresh process. With ``crash`` that process ends at once, and closes nothing."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(sender, work, args, crash))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        raise RuntimeError(f"{work.__name__} failed in its process, see above") from None
    finally:
        process.join()


def _run(sender: Any, work: Callable[..., Any], args: tuple[Any, ...], crash: bool) -> None:
    if not crash:
        sender.send(work(*args))
        return
    kept = work(*args)  # what it holds open stays open
    sender.send(None)
    sender.close()
    os._exit(0 if kept is not None else 1)


class Stopwatch:
    """Time on the clock and on the cores. The latter says more on a busy machine."""

    seconds = cpu_seconds = 0.0

    def __enter__(self) -> Stopwatch:
        self._start, self._cpu_start = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.seconds, self.cpu_seconds = time.perf_counter() - self._start, time.process_time() - self._cpu_start


def memory_bytes(name: str) -> int:
    """``VmRSS`` now, or ``VmHWM``, its peak."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(f"{name}:"))


def reset_peak() -> None:
    """The peak is counted from now on."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
