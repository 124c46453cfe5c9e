"""Tasks that take turns, one at a time, in an order that a seed decides.

Owns: tasks (greenlets), locks and conditions, virtual time, the choice of who runs next.
Does not own: what a step means (world).

A task gives up its turn where a real thread could lose its own in a way that matters: before
it takes a lock, when it waits, sleeps or starts another, at every store operation, and at the
failpoints between protocol steps.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Protocol

import greenlet

STEP_SECONDS_MAX = 0.002


class ProcessDied(BaseException):
    """Thrown into the tasks of a process that was killed."""


class SimulationStuck(Exception):
    """No task can run, or the schedule does not end: a hang."""


class Owner(Protocol):
    """A process, as far as scheduling is concerned."""

    name: str
    weight: float
    alive: bool


class Task:
    """One thread of one process."""

    __slots__ = ("done", "error", "glet", "joiners", "locks_held", "name", "notified", "process", "seen", "wake_at")

    def __init__(self, scheduler: Scheduler, process: Owner, run: Callable[[], None], name: str) -> None:
        self.process, self.name = process, name
        self.wake_at: float | None = None
        self.notified = False
        self.done = False
        self.error: BaseException | None = None
        self.locks_held = 0
        self.seen = 0
        """A digest of all that the task was told by the store: with the objects, its whole state."""
        self.joiners: list[Task] = []
        self.glet = greenlet.greenlet(lambda: self._main(scheduler, run), scheduler.hub)

    def _main(self, scheduler: Scheduler, run: Callable[[], None]) -> None:
        try:
            run()
        except ProcessDied:
            pass
        except BaseException as error:
            self.error = error
            scheduler.escaped.append((self, error))
        finally:
            self.done = True
            for joiner in self.joiners:
                scheduler.make_ready(joiner, notified=True)


class Chooser(Protocol):
    """Decides who runs next."""

    def pick(self, ready: list[Task], current: Task | None) -> Task: ...


class RandomChooser:
    """Any task that can run, processes weighted: some of them stall."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def pick(self, ready: list[Task], current: Task | None) -> Task:
        if len(ready) == 1:
            return ready[0]
        rng = self._rng
        for _ in range(64):
            task = ready[int(rng.random() * len(ready))]
            if rng.random() < task.process.weight:
                return task
        return ready[int(rng.random() * len(ready))]


class Scheduler:
    """Runs tasks until the ones that matter are done."""

    def __init__(self, rng: random.Random, chooser: Chooser | None = None, *, steps_max: int = 60_000) -> None:
        self.rng = rng
        self.hub = greenlet.getcurrent()
        self.time = 0.0
        self.steps = 0
        self.steps_max = steps_max
        self.current: Task | None = None
        self.ready: list[Task] = []
        self.sleeping: list[Task] = []
        self.escaped: list[tuple[Task, BaseException]] = []
        self.before_step: Callable[[], None] | None = None
        self.may_still_happen: Callable[[], bool] | None = None
        self._chooser = chooser or RandomChooser(rng)

    # -- for tasks

    def spawn(self, process: Owner, run: Callable[[], None], name: str) -> Task:
        task = Task(self, process, run, name)
        self.ready.append(task)
        return task

    def turn(self) -> None:
        """Give up the turn; go on when chosen again."""
        task = self._me()
        self.ready.append(task)
        self._switch(task)

    def block(self, timeout: float | None) -> bool:
        """Wait until ``make_ready``, or for ``timeout`` seconds. True: it was not the time."""
        task = self._me()
        task.notified = False
        task.wake_at = None if timeout is None else self.time + max(0.0, timeout)
        if task.wake_at is not None:
            self.sleeping.append(task)
        self._switch(task)
        return task.notified

    def make_ready(self, task: Task, *, notified: bool) -> None:
        if task.done or task in self.ready:
            return
        if task.wake_at is not None:
            task.wake_at = None
            self.sleeping.remove(task)
        task.notified = notified
        self.ready.append(task)

    def _me(self) -> Task:
        task = self.current
        assert task is not None, "only tasks wait"
        if not task.process.alive:
            raise ProcessDied
        return task

    def _switch(self, task: Task) -> None:
        self.hub.switch()
        if not task.process.alive:
            raise ProcessDied

    # -- the hub

    def run(self, until: Callable[[], bool]) -> None:
        """Run until the condition holds. Raises SimulationStuck if it never does."""
        while not until():
            self.steps += 1
            if self.steps > self.steps_max:
                raise SimulationStuck(f"not finished after {self.steps} steps")
            if self.before_step is not None:
                self.before_step()
            self.time += self.rng.random() * STEP_SECONDS_MAX
            self._wake_sleepers()
            if not self.ready:
                if until():
                    return
                if self.may_still_happen is not None and self.may_still_happen():
                    continue
                raise SimulationStuck("nothing can run")
            task = self._chooser.pick(self.ready, self.current)
            self.ready.remove(task)
            self.current = task
            task.glet.switch()

    def _wake_sleepers(self) -> None:
        if not self.sleeping:
            return
        if not self.ready:
            self.time = max(self.time, min(t.wake_at for t in self.sleeping if t.wake_at is not None))
        due = [t for t in self.sleeping if t.wake_at is not None and t.wake_at <= self.time]
        for task in due:
            self.make_ready(task, notified=False)

    def kill(self, process: Owner, tasks: list[Task]) -> None:
        """End a process: its tasks unwind, and nothing they do on the way has an effect."""
        process.alive = False
        for task in tasks:
            if task in self.ready:
                self.ready.remove(task)
            if task.wake_at is not None:
                task.wake_at = None
                self.sleeping.remove(task)
        for task in tasks:
            if not task.done:
                self.current = task
                if task.glet:
                    task.glet.throw(ProcessDied)
                task.done = True
                for joiner in task.joiners:
                    if joiner not in tasks:
                        self.make_ready(joiner, notified=True)


class SimLock:
    """A lock that is really held: another task that wants it waits."""

    __slots__ = ("_holder", "_scheduler", "_waiters")

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._holder: Task | None = None
        self._waiters: list[Task] = []

    def __enter__(self) -> SimLock:
        scheduler = self._scheduler
        if scheduler.rng.random() < 0.5:
            scheduler.turn()
        self.take()
        return self

    def take(self) -> None:
        scheduler = self._scheduler
        me = scheduler._me()
        while self._holder is not None and self._holder.process.alive:
            assert self._holder is not me, "the lock is not reentrant"
            self._waiters.append(me)
            scheduler.block(None)
        self._holder = me
        me.locks_held += 1

    def release(self) -> None:
        holder, self._holder = self._holder, None
        if holder is not None:
            holder.locks_held -= 1
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            self._scheduler.make_ready(waiter, notified=True)

    def __exit__(self, *exc: Any) -> None:
        if self._holder is self._scheduler.current:
            self.release()


class SimCondition:
    """A condition over a SimLock."""

    __slots__ = ("_lock", "_scheduler", "_waiters")

    def __init__(self, scheduler: Scheduler, lock: SimLock) -> None:
        self._scheduler, self._lock = scheduler, lock
        self._waiters: list[Task] = []

    def wait(self, timeout: float | None = None) -> bool:
        me = self._scheduler._me()
        self._waiters.append(me)
        self._lock.release()
        notified = self._scheduler.block(timeout)
        if me in self._waiters:
            self._waiters.remove(me)
        self._lock.take()
        return notified

    def notify(self, n: int = 1) -> None:
        for _ in range(min(n, len(self._waiters))):
            # Which waiter wakes is not promised, so any may.
            waiter = self._waiters.pop(int(self._scheduler.rng.random() * len(self._waiters)))
            self._scheduler.make_ready(waiter, notified=True)

    def notify_all(self) -> None:
        self.notify(len(self._waiters))


class SimGate:
    """Opened once, for good."""

    __slots__ = ("_open", "_scheduler", "_waiters")

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._open = False
        self._waiters: list[Task] = []

    def open(self) -> None:
        self._open = True
        for waiter in self._waiters:
            self._scheduler.make_ready(waiter, notified=True)
        self._waiters = []

    def wait(self, timeout: float | None = None) -> bool:
        if not self._open:
            me = self._scheduler._me()
            self._waiters.append(me)
            self._scheduler.block(timeout)
            if me in self._waiters:
                self._waiters.remove(me)
        return self._open


class SimThread:
    """A task, as a thread."""

    __slots__ = ("_scheduler", "_task")

    def __init__(self, scheduler: Scheduler, task: Task) -> None:
        self._scheduler, self._task = scheduler, task

    def join(self, timeout: float | None = None) -> None:
        if not self._task.done:
            me = self._scheduler._me()
            self._task.joiners.append(me)
            self._scheduler.block(timeout)
            if me in self._task.joiners:
                self._task.joiners.remove(me)

    def is_alive(self) -> bool:
        return not self._task.done
