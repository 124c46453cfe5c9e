"""Processes that are killed and stalled: what both tortures drive.

Owns: starting, stopping, waking and killing processes, reading what they tell, and the figures of
it. Does not own: what the processes do, or what must be true of it (torture.py, torture_table.py).

The driver has no threads of its own: it forks its processes, warm, from itself.
"""

from __future__ import annotations

import heapq
import os
import random
import selectors
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

STUCK_SECONDS = 90.0


@dataclass
class Child:
    pid: int
    kind: str
    name: int
    pipe: int
    output: Path
    buffer: bytes = b""
    opened: bool = False
    stopped: bool = False
    killed: bool = False


@dataclass
class Figures:
    kills: Counter[str] = field(default_factory=Counter)
    stalls: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    violations: list[str] = field(default_factory=list)


def spelled(counts: Counter[str]) -> str:
    return f"{counts.total()} ({', '.join(f'{what} {n}' for what, n in sorted(counts.items()))})"


class Processes:
    """All processes of a torture. A subclass says what is told (``told``) and which ends are right (``end``)."""

    figures: Figures

    def __init__(self, folder: Path, *, seed: int, plant: Callable[[], None] | None = None) -> None:
        self.folder, self.seed, self.plant = folder, seed, plant
        self.chance = random.Random(seed)
        self.children: dict[int, Child] = {}
        self.selector = selectors.DefaultSelector()
        self.wakes: list[tuple[float, int]] = []
        self.names = 0

    def told(self, child: Child, data: bytes) -> int:
        """What a process wrote into its pipe; how many bytes of it are done with."""
        raise NotImplementedError

    def start(self, kind: str, run: Callable[[int], None]) -> Child:
        self.names += 1
        output = self.folder / f"{kind}-{self.names}.log"
        reader, pipe = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(reader)
                log = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
                os.dup2(log, 1)
                os.dup2(log, 2)
                if self.plant is not None:
                    self.plant()
                run(pipe)
                code = 0
            except BaseException:
                os.write(2, traceback.format_exc().encode())
            finally:
                os._exit(code)
        os.close(pipe)
        child = Child(pid, kind, self.names, reader, output)
        self.children[pid] = child
        self.selector.register(reader, selectors.EVENT_READ, child)
        return child

    def signal(self, child: Child, number: signal.Signals) -> None:
        os.kill(child.pid, number)  # not yet reaped, so still its own

    def kill(self, child: Child) -> None:
        child.killed = True
        self.figures.kills[child.kind] += 1
        self.signal(child, signal.SIGKILL)

    def stall(self, child: Child) -> None:
        child.stopped = True
        self.figures.stalls[child.kind] += 1
        self.signal(child, signal.SIGSTOP)
        seconds = self.chance.choice([0.002, 0.02, 0.1, 0.4]) * self.chance.random()
        heapq.heappush(self.wakes, (time.monotonic() + seconds, child.pid))

    def wake(self, now: float = float("inf")) -> None:
        while self.wakes and self.wakes[0][0] <= now:
            child = self.children.get(heapq.heappop(self.wakes)[1])
            if child is not None:
                child.stopped = False
                self.signal(child, signal.SIGCONT)

    def pump(self, seconds: float) -> None:
        """Listen for so long."""
        deadline = time.monotonic() + seconds
        while True:
            now = time.monotonic()
            self.wake(now)
            until = min(deadline, self.wakes[0][0] if self.wakes else deadline)
            for key, _ in self.selector.select(max(0.0, until - now)):
                self.read(key.data)
            if time.monotonic() >= deadline:
                return

    def read(self, child: Child) -> None:
        data = os.read(child.pipe, 1 << 16)
        if not data:
            self.selector.unregister(child.pipe)
            os.close(child.pipe)
            _, status = os.waitpid(child.pid, 0)
            del self.children[child.pid]
            self.end(child, os.waitstatus_to_exitcode(status))
            return
        data = child.buffer + data
        child.buffer = data[self.told(child, data) :]

    def end(self, child: Child, code: int) -> None:
        if code != 0 and not (child.killed and code == -signal.SIGKILL):
            self.figures.violations.append(f"{child.kind} {child.name} failed ({code}): {child.output.read_text()[-1500:]}")
        elif child.output.exists() and not child.output.stat().st_size:
            child.output.unlink()

    def alive(self, kind: str) -> list[Child]:
        return [child for child in self.children.values() if child.kind == kind and not child.killed]

    def wait_for(self, what: str, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + STUCK_SECONDS
        while not done():
            if time.monotonic() > deadline:
                self.figures.violations.append(f"stuck: {what}")
                return
            self.pump(0.01)

    def kill_all(self) -> None:
        for child in list(self.children.values()):
            child.killed = True
            self.signal(child, signal.SIGKILL)
        self.wait_for("processes that were killed", lambda: not self.children)
