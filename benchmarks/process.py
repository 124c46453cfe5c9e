"""Work in a process of its own: where it is to crash, and where its memory is measured."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
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


def memory_bytes(name: str) -> int:
    """``VmRSS`` now, or ``VmHWM``, its peak."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(f"{name}:"))


def reset_peak() -> None:
    """The peak is counted from now on."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
