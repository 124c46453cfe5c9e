"""The world that the real code runs in: a store behind a network, clocks that lie, processes that die.

Owns: the simulated Store and Clock, and every fault. Does not own: who does what (actors).

A create is a request that travels: it waits in the network until the scheduler delivers it, so
requests overtake each other, arrive after their sender died or gave up, and may arrive twice.
Reads are atomic, with a turn before and after.
"""

from __future__ import annotations

import bisect
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields

from headgate.clock import Condition, Gate, Lock, Thread, ulid
from headgate.errors import DeleteIncompleteError, ObjectExistsError, ObjectMissingError, StoreUnavailableError
from headgate.simulation.scheduler import Owner, Scheduler, SimCondition, SimGate, SimLock, SimThread, Task
from headgate.store.base import Data, ObjectInfo, Store

EPOCH_SECONDS = 1_700_000_000.0
_REMEMBERED = ("/manifest/", "/wal/", "/table/")


@dataclass
class Faults:
    """How often each thing goes wrong: a chance per operation, or per step for crashes and jumps."""

    fail_before: float = 0.0
    """The request never arrives."""
    lost_reply: float = 0.0
    """It is done, and the reply is lost."""
    late: float = 0.0
    """The sender gives up; the request arrives later, if at all."""
    duplicate: float = 0.0
    """The request arrives a second time, later."""
    conflict: float = 0.0
    """409 with nothing there."""
    read_fails: float = 0.0
    """A get, head or list fails."""
    delete_partial: float = 0.0
    """A multi-delete fails half-way."""
    crash: float = 0.0
    """A process dies, per step."""
    stall: float = 0.0
    """A process stops for a while, per step: SIGSTOP, a long collection, a paused machine."""
    clock_jump: float = 0.0
    """A process's wall clock jumps, per step."""

    @classmethod
    def random(cls, rng: random.Random, allowed: frozenset[str] | None = None) -> Faults:
        """Some faults, at some rates: a schedule with all of them at once seldom gets anywhere."""
        faults = cls()
        for f in fields(cls):
            if rng.random() < 0.5 and (allowed is None or f.name in allowed):
                setattr(faults, f.name, rng.choice(_RATES[f.name]))
        return faults


_RATES: dict[str, list[float]] = {
    "fail_before": [0.02, 0.15],
    "lost_reply": [0.02, 0.15],
    "late": [0.02, 0.1],
    "duplicate": [0.05, 0.2],
    "conflict": [0.02, 0.1],
    "read_fails": [0.01, 0.05],
    "delete_partial": [0.1, 0.4],
    "crash": [0.0005, 0.003],
    "stall": [0.001, 0.005],
    "clock_jump": [0.005, 0.02],
}


class Process:
    """A group of tasks that live and die together."""

    def __init__(self, world: World, name: str, weight: float) -> None:
        self.world, self.name, self.weight = world, name, weight
        self.alive = True
        self.tasks: list[Task] = []
        self.skew_seconds = 0.0
        self.stalled_until = 0
        self.tokens = 0
        self.full_weight = weight
        self.runs_through = False
        """Gives up its turn at no store operation: for exhaustive runs, where it is one step."""
        self.protected = False
        """Neither crashes nor stalls: the judge at the end."""

    def start(self, main: Callable[[], None]) -> Task:
        task = self.world.scheduler.spawn(self, main, self.name)
        self.tasks.append(task)
        return task

    def end(self) -> None:
        """All its threads are gone, without a word."""
        self.world.scheduler.kill(self, self.tasks)


@dataclass
class _Request:
    """A create that has not arrived yet."""

    key: str
    body: bytes
    task: Task | None
    """Who waits for the reply; None: nobody any more."""
    process: Process
    applied: bool | None = None


@dataclass
class _Pause:
    """Where a process will stop."""

    failpoint: str
    skip: int
    seconds: float | None
    dies: bool


@dataclass
class World:
    """Everything that is shared: the objects, the network, the trace."""

    scheduler: Scheduler
    rng: random.Random
    faults: Faults
    objects: dict[str, bytes] = field(default_factory=dict)
    keys: list[str] = field(default_factory=list)
    network: list[_Request] = field(default_factory=list)
    processes: list[Process] = field(default_factory=list)
    struck: Counter[str] = field(default_factory=Counter)
    held: str | None = None
    """A create of this name does not arrive."""
    pauses: dict[str, _Pause] = field(default_factory=dict)
    paused: set[str] = field(default_factory=set)
    trace: list[str] | None = None
    ever: dict[str, list[tuple[int, bytes]]] | None = None
    """Every entry and manifest that ever stood, with the step it came at, deleted or not; None: not remembered."""
    dwells: float = 0.0
    """How often a task takes its time at a step or before it asks the store."""
    jumps: Sequence[float] = (-1e6, -60.0, 0.0, 3600.0, 1e7)
    """By how many seconds a clock that jumps is off."""
    doomed: list[Process] = field(default_factory=list)
    """Die before the next step."""
    quiet: bool = False
    """No faults any more."""
    atomic: bool = False
    """Requests arrive the moment they are sent: for exhaustive runs, where the turn before is delay enough."""
    _digest: int = 0

    def __post_init__(self) -> None:
        self.scheduler.before_step = self._before_step
        self.scheduler.may_still_happen = lambda: any(request.key != self.held for request in self.network)

    def process(self, name: str, *, weight: float = 1.0, protected: bool = False) -> Process:
        process = Process(self, name, weight)
        process.protected = protected
        self.processes.append(process)
        return process

    # -- pausing a process at a named step

    def pause(self, process: Process, failpoint: str, skip: int = 0, *, seconds: float | None = None, dies: bool = False) -> None:
        """The process stops when it gets to the step for the ``skip``-th time, until ``resume``.

        With ``seconds`` it stops for so long, once, and goes on by itself, or dies there.
        """
        self.pauses[process.name] = _Pause(failpoint, skip, seconds, dies)

    def resume(self, process: Process) -> None:
        self.pauses.pop(process.name, None)
        self.paused.discard(process.name)

    def is_paused(self, process: Process) -> bool:
        return process.name in self.paused

    def at_failpoint(self, name: str) -> None:
        """Called by the code at each named step: a turn for the others, perhaps a long one."""
        task = self.scheduler.current
        if task is None or not task.process.alive or task.locks_held:
            return
        who = task.process.name
        self.note(who, f"at {name}")
        self.scheduler.turn()
        self.may_stop(task, name)

    def may_stop(self, task: Task, name: str) -> None:
        """A task is at a step, or about to ask the store for something: ``store.get.wal``, ``store.list.shards``."""
        if self.dwells and not self.quiet and self.rng.random() < self.dwells:
            self.scheduler.block(self.rng.choice([0.01, 0.05, 0.2]))
        who = task.process.name
        wanted = self.pauses.get(who)
        if wanted is None or wanted.failpoint != name:
            return
        if wanted.skip > 0:
            wanted.skip -= 1
        elif wanted.seconds is not None:
            self._stop_for(task.process, wanted)
        else:
            self.paused.add(who)
            while who in self.paused:
                self.scheduler.block(1.0)

    def _stop_for(self, process: Owner, wanted: _Pause) -> None:
        assert isinstance(process, Process)
        self.pauses.pop(process.name)
        self.note(process.name, f"stops there for {wanted.seconds} s")
        self.struck["pause"] += 1
        self.scheduler.block(wanted.seconds)
        if wanted.dies:
            self.struck["dies at a step"] += 1
            self.doomed.append(process)
            self.scheduler.turn()

    def note(self, who: str, what: str) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.scheduler.steps:6d} {self.scheduler.time:8.3f}s {who:14s} {what}")

    def strikes(self, fault: str) -> bool:
        """Does the fault happen here? Counted."""
        chance = getattr(self.faults, fault)
        if chance and not self.quiet and self.rng.random() < chance:
            self.struck[fault] += 1
            return True
        return False

    # -- per step: the network delivers, processes die, stall and wake

    def _before_step(self) -> None:
        while self.doomed:
            process = self.doomed.pop()
            self.note(process.name, "dies")
            process.end()
        # A request arrives every other step; at once if nothing else can run.
        if self.network and (not self.scheduler.ready or self.rng.random() < 0.5):
            request = self.network[int(self.rng.random() * len(self.network))]
            if request.key != self.held:
                self.deliver(request)
        faults = self.faults
        if self.quiet or not (faults.crash or faults.stall or faults.clock_jump):
            return
        for process in self.processes:
            if process.stalled_until and self.scheduler.steps >= process.stalled_until:
                process.stalled_until = 0
                process.weight = process.full_weight
        victim = self.processes[int(self.rng.random() * len(self.processes))]
        if not victim.alive or victim.protected:
            return
        if self.strikes("crash"):
            self.note(victim.name, "dies")
            victim.end()
        elif self.strikes("stall"):
            victim.stalled_until = self.scheduler.steps + self.rng.choice([50, 300, 1500])
            victim.weight = 0.0001
            self.note(victim.name, "stalls")
        elif self.strikes("clock_jump"):
            victim.skew_seconds = self.rng.choice(self.jumps)
            self.note(victim.name, f"clock off by {victim.skew_seconds:.0f} s")

    def deliver(self, request: _Request) -> None:
        """A create arrives."""
        self.network.remove(request)
        request.applied = self.apply(request.key, request.body)
        self.note("network", f"{request.process.name}'s create {request.key}: {'done' if request.applied else 'name taken'}")
        if request.task is not None and not request.task.done:
            self.scheduler.make_ready(request.task, notified=True)

    def apply(self, key: str, body: bytes) -> bool:
        if key in self.objects:
            return False
        self.objects[key] = body
        if self.ever is not None and (key.startswith("wal/") or any(part in key for part in _REMEMBERED)):
            self.ever.setdefault(key, []).append((self.scheduler.steps, body))
        bisect.insort(self.keys, key)
        self._digest ^= hash((key, body))
        return True

    def remove(self, key: str) -> None:
        body = self.objects.pop(key, None)
        if body is not None:
            self._digest ^= hash((key, body))
            del self.keys[bisect.bisect_left(self.keys, key)]

    def drop_held(self) -> None:
        """The request that was held up never arrives."""
        self.network = [request for request in self.network if request.key != self.held]

    def digest(self) -> int:
        """Of all objects; the same objects, the same digest, whatever the order they came in."""
        return self._digest

    def settle_network(self) -> None:
        """What is still under way arrives now, or never."""
        for request in list(self.network):
            if self.rng.random() < 0.5:
                self.deliver(request)
        self.network.clear()


class SimClock:
    """The Clock seam of one process."""

    def __init__(self, process: Process) -> None:
        self._process, self._world = process, process.world
        self._scheduler = process.world.scheduler

    def now(self) -> float:
        return EPOCH_SECONDS + (0.0 if self._world.atomic else self._scheduler.time) + self._process.skew_seconds

    def monotonic(self) -> float:
        return self._scheduler.time

    def sleep(self, seconds: float) -> None:
        self._scheduler.block(seconds)

    def lock(self) -> Lock:
        return SimLock(self._scheduler)

    def condition(self, lock: Lock) -> Condition:
        assert isinstance(lock, SimLock)
        return SimCondition(self._scheduler, lock)

    def gate(self) -> Gate:
        return SimGate(self._scheduler)

    def spawn(self, run: Callable[[], None], *, name: str) -> Thread:
        task = self._scheduler.spawn(self._process, run, name)
        self._process.tasks.append(task)
        return SimThread(self._scheduler, task)

    def token(self) -> str:
        if self._world.atomic:  # names that depend on the process alone
            self._process.tokens += 1
            return f"{self._process.name}-{self._process.tokens}"
        return ulid(int(self._scheduler.time * 1000), self._world.rng.getrandbits(80))

    def jitter(self) -> float:
        return 0.5 + 0.5 * self._world.rng.random()


class SimStore(Store):
    """The Store seam of one process: a shared heap of objects behind a network."""

    def __init__(self, process: Process, prefix: str = "") -> None:
        self._process, self._world, self._prefix = process, process.world, prefix

    @property
    def uri(self) -> str:
        return f"sim://{self._prefix}".rstrip("/")

    def _begin(self, what: str, key: str) -> str:
        scheduler = self._world.scheduler
        task = scheduler.current
        assert task is not None
        assert task.locks_held == 0, f"{what} {key} while a lock is held"
        if not self._process.runs_through:
            scheduler.turn()
        if self._world.pauses or self._world.dwells:
            self._world.may_stop(task, f"store.{what}.{key.partition('/')[0]}")
        return self._prefix + key

    def create(self, key: str, data: Data) -> None:
        world, full = self._world, self._begin("create", key)
        body = bytes(data)
        who = self._process.name
        if world.strikes("fail_before"):
            world.note(who, f"create {full}: lost on the way")
            raise StoreUnavailableError(f"no answer to create {key}", object=key)
        if full not in world.objects and world.strikes("conflict"):
            world.note(who, f"create {full}: 409 with nothing there")
            raise ObjectExistsError(f"{key} exists", object=key)
        request = _Request(full, body, world.scheduler.current, self._process)
        if world.atomic:
            applied = world.apply(full, body)
            world.note(who, f"create {full}: {'done' if applied else 'name taken'}")
            self._saw("create", full, applied)
            if not applied:
                raise ObjectExistsError(f"{key} exists", object=key)
            return
        world.network.append(request)
        if world.strikes("late"):
            request.task = None
            world.note(who, f"create {full}: no answer, still under way")
            world.scheduler.turn()
            raise StoreUnavailableError(f"no answer to create {key}", object=key)
        while request.applied is None:
            world.scheduler.block(None)
        request.task = None
        if world.strikes("duplicate"):
            world.network.append(_Request(full, body, None, self._process))
        if world.strikes("lost_reply"):
            world.note(who, f"create {full}: the reply is lost")
            raise StoreUnavailableError(f"no answer to create {key}", object=key)
        if not request.applied:
            raise ObjectExistsError(f"{key} exists", object=key)

    def _saw(self, *what: object) -> None:
        task = self._world.scheduler.current
        if self._world.atomic and task is not None:
            task.seen = hash((task.seen, what))

    def _read(self, what: str, key: str) -> str:
        full = self._begin(what, key)
        if self._world.strikes("read_fails"):
            raise StoreUnavailableError(f"no answer to {what} {key}", object=key)
        return full

    def get(self, key: str) -> memoryview:
        full = self._read("get", key)
        body = self._world.objects.get(full)
        self._saw("get", full, body)
        self._world.note(self._process.name, f"get {full}: {'missing' if body is None else f'{len(body)} bytes'}")
        if self._world.rng.random() < 0.3:
            self._world.scheduler.turn()
        if body is None:
            raise ObjectMissingError(f"{key} does not exist", object=key)
        return memoryview(body)

    def get_range(self, key: str, start: int, length: int) -> memoryview:
        return self.get(key)[start : start + length]

    def head(self, key: str) -> ObjectInfo:
        return ObjectInfo(key, len(self.get(key)), 0.0)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        full = self._read("list", prefix)
        world, cut = self._world, len(self._prefix)
        at = bisect.bisect_left(world.keys, full)
        if start_after:
            at = max(at, bisect.bisect_right(world.keys, self._prefix + start_after))
        rows = []
        while at < len(world.keys) and world.keys[at].startswith(full):
            rows.append(ObjectInfo(world.keys[at][cut:], len(world.objects[world.keys[at]]), 0.0))
            at += 1
        self._saw("list", full, start_after, tuple(rows))
        if world.rng.random() < 0.3:
            world.scheduler.turn()
        return iter(rows)

    def delete(self, keys: Sequence[str]) -> None:
        for number, key in enumerate(keys):
            full = self._begin("delete", key)
            if self._world.strikes("delete_partial"):
                raise DeleteIncompleteError(list(keys[number:]), "the store gave up")
            self._world.note(self._process.name, f"delete {full}")
            self._saw("delete", full)
            self._world.remove(full)
