"""Small scope, exhaustive: all interleavings with few preemptions, on the real code.

Owns: the enumeration. Does not own: the protocol (it is the real one) or the judgement (checker).

Two claimants and an incumbent with an append in flight, around a collection. A task runs until
it ends; a preemption takes its turn away before a store operation and gives it to another. Most
bugs of this kind need one or two preemptions, so all placements of at most three is far more
than chance finds.

Stateless: each run starts anew and follows a plan of choices. What a task does next depends on
nothing but what it has seen, so (objects, what each task has seen, who runs, preemptions left)
is the whole state: a state met before is not explored again.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from unittest.mock import patch

from headgate.errors import HeadgateError
from headgate.failpoint import hooked
from headgate.manifest.document import decode_document
from headgate.simulation.actors import RULES, Ledger, Stage, archive_and_trim, collect_manifests, rows_of
from headgate.simulation.checker import judge
from headgate.simulation.run import hushed
from headgate.simulation.scheduler import ProcessDied, Scheduler, SimulationStuck, Task
from headgate.simulation.world import Faults, Process, World
from headgate.wal.appender import EpochWriter, WalAppender
from headgate.wal.collect import collect_entries
from headgate.wal.entry import Entry, decode_entry
from headgate.wal.fence import open_epoch

Plan = tuple[int, ...]


class _Steady(random.Random):
    """No chance at all: no extra turns, and names that depend only on who asks and how often."""

    def random(self) -> float:
        return 0.9

    def getrandbits(self, k: int) -> int:
        raise AssertionError("names come from the process")


class _Visited(Exception):
    """The rest of this run was seen before."""


@dataclass
class Explored:
    """What an exhaustive run found."""

    runs: int = 0
    states: int = 0
    seconds: float = 0.0
    complete: bool = True
    failures: list[tuple[Plan, list[str]]] = field(default_factory=list)


class _PlanChooser:
    """Follows a plan, then lets each task run on; notes every other way that could have been taken."""

    def __init__(self, plan: Plan, preemptions_max: int, visited: dict[tuple[object, ...], int]) -> None:
        self.plan, self.preemptions_max, self.visited = plan, preemptions_max, visited
        self.taken: list[int] = []
        self.branches: list[Plan] = []
        self.preemptions = 0
        self.state: Callable[[Task | None], tuple[object, ...]] | None = None

    def pick(self, ready: list[Task], current: Task | None) -> Task:
        if self.state is None:
            return ready[0]
        candidates = sorted(ready, key=lambda task: task.name)
        stay = candidates.index(current) if current in candidates else None
        step = len(self.taken)
        if step < len(self.plan):
            choice = self.plan[step]
        else:
            choice = stay if stay is not None else 0
            self._branch(candidates, choice, stay, current)
        if stay is not None and choice != stay:
            self.preemptions += 1
        self.taken.append(choice)
        return candidates[choice]

    def _branch(self, candidates: list[Task], choice: int, stay: int | None, current: Task | None) -> None:
        assert self.state is not None
        key = self.state(current)
        left = self.preemptions_max - self.preemptions
        if self.visited.get(key, -1) >= left:
            raise _Visited
        self.visited[key] = left
        cost = 0 if stay is None else 1
        if cost > left:
            return
        for other in range(len(candidates)):
            if other != choice:
                self.branches.append((*self.taken, other))


def explore(
    *,
    preemptions: int = 2,
    split_collection: bool = True,
    seconds_max: float = 3600.0,
    failures_max: int = 1,
    part: tuple[int, int] = (0, 1),
    tell: Callable[[Explored], None] | None = None,
) -> Explored:
    """All interleavings with at most ``preemptions``; stops at the first violation.

    Args:
        split_collection: others may run between any two steps of the collection; else it is one step, anywhere.
        part: (number, of how many): only those whose first choice that differs falls to this part, so that
            several processes do all of them together.
        tell: called now and then with what was found so far.
    """
    found, start = Explored(), time.monotonic()
    visited: dict[tuple[object, ...], int] = {}
    judged: set[object] = set()
    plans: list[Plan] = [()]
    while plans:
        if time.monotonic() - start > seconds_max:
            found.complete = False
            break
        plan = plans.pop()
        chooser = _PlanChooser(plan, preemptions, visited)
        found.runs += 1
        problems = _play(chooser, split_collection, judged=judged)
        branches = chooser.branches if plan else chooser.branches[part[0] :: part[1]]
        plans += reversed(branches)
        if tell is not None and found.runs % 5000 == 0:
            found.states, found.seconds = len(visited), time.monotonic() - start
            tell(found)
        if problems:
            found.failures.append((tuple(chooser.taken), problems))
            if len(found.failures) >= failures_max:
                break
    found.states, found.seconds = len(visited), time.monotonic() - start
    return found


def replay(plan: Plan, *, split_collection: bool = True) -> list[str]:
    """The trace of one plan, and what was wrong with it."""
    trace: list[str] = []
    problems = _play(_PlanChooser(plan, 1 << 30, {}), split_collection, trace)
    return trace + problems


def _play(chooser: _PlanChooser, split_collection: bool, trace: list[str] | None = None, judged: set[object] | None = None) -> list[str]:
    rng = _Steady()
    scheduler = Scheduler(rng, chooser, steps_max=5000)
    world = World(scheduler, rng, Faults(), trace=trace)
    world.atomic = True
    stage = Stage(world, Ledger())
    escaped = scheduler.escaped
    with hushed(), hooked(lambda name: None), _no_read_ahead():
        try:
            _scenario(world, stage, chooser, split_collection, judged)
        except _Visited:
            return []
        except SimulationStuck as error:
            stage.ledger.problems.append(f"HANG: {error}")
        finally:
            chooser.state = None
            for process in world.processes:
                if process.alive:
                    process.end()
    return stage.ledger.problems + [f"ESCAPED: {task.name}: {error!r}" for task, error in escaped if not isinstance(error, ProcessDied)]


def _scenario(world: World, stage: Stage, chooser: _PlanChooser, split_collection: bool, judged: set[object] | None) -> None:
    ledger, scheduler = stage.ledger, world.scheduler
    box: dict[str, WalAppender] = {}

    def open_incumbent() -> None:
        stage.create(incumbent)
        log = stage.log(incumbent)
        box["incumbent"] = WalAppender(EpochWriter(log, open_epoch(log)), RULES)
        number = ledger.numbers(1)[0]
        ledger.acked[number] = box["incumbent"].append([rows_of(number)])

    incumbent = world.process("incumbent", protected=True)
    opening = incumbent.start(open_incumbent)
    scheduler.run(lambda: opening.done)

    def append_one(appender: WalAppender, number: int) -> None:
        try:
            ledger.acked[number] = appender.append([rows_of(number)])
        except HeadgateError as error:
            stage.open_problem("append", error)

    def claim(process: Process, number: int) -> None:
        try:
            log = stage.log(process)
            append_one(WalAppender(EpochWriter(log, open_epoch(log)), RULES), number)
        except HeadgateError as error:
            stage.open_problem(process.name, error)

    def collect(process: Process) -> None:
        try:
            log = stage.log(process)
            archive_and_trim(stage, log, world.rng, stop_chance=0.0)
            collect_entries(log, dry_run=False, sweep=True)
            collect_manifests(log)
        except HeadgateError as error:
            stage.open_problem(process.name, error)

    numbers = ledger.numbers(3)
    b, c, gc = (world.process(name, protected=True) for name in ("b", "c", "gc"))
    gc.runs_through = not split_collection
    tasks = [
        incumbent.start(lambda: append_one(box["incumbent"], numbers[0])),
        b.start(lambda: claim(b, numbers[1])),
        c.start(lambda: claim(c, numbers[2])),
        gc.start(lambda: collect(gc)),
    ]
    chooser.state = lambda current: (world.digest(), tuple(task.seen for task in tasks), current.name if current is not None else "")
    scheduler.run(lambda: all(task.done for task in tasks))
    chooser.state = None
    # The judgement depends on nothing but the objects and what was promised: the same end is judged once.
    end = (world.digest(), tuple(sorted(ledger.acked.items())), tuple(sorted(ledger.archived.items())), tuple(ledger.fenced))
    if judged is not None and end in judged:
        return
    last = world.process("judge", protected=True)
    verdict = last.start(lambda: judge(stage, last))
    scheduler.run(lambda: verdict.done)
    if judged is not None:
        judged.add(end)


@contextmanager
def _no_read_ahead() -> Iterator[None]:
    """One thread per process: reading ahead starts others, and finds the same objects. The same bytes are decoded once."""
    with ExitStack() as patches:
        patches.enter_context(patch("headgate.wal.reader._LISTED_MAX", 1))
        for module in ("reader", "fence", "loss", "appender"):
            patches.enter_context(patch(f"headgate.wal.{module}.decode_entry", _decoded_entry))
        patches.enter_context(patch("headgate.manifest.chain.decode_document", _decoded_document))
        yield


def _decoded_entry(data: memoryview | bytes, *rest: Any) -> Entry:
    return _entry_of(bytes(data), *rest)


@lru_cache(maxsize=50_000)
def _entry_of(data: bytes, *rest: Any) -> Entry:
    return decode_entry(memoryview(data), *rest)


def _decoded_document(data: memoryview | bytes, kind: type[Any], key: str) -> Any:
    return _document_of(bytes(data), kind, key)  # type: ignore[arg-type]


@lru_cache(maxsize=50_000)
def _document_of(data: bytes, kind: type[Any], key: str) -> Any:
    return decode_document(data, kind, key)


def main() -> None:
    """``python -m headgate.simulation.exhaustive``: explore a scope, and say what came of it."""
    parser = argparse.ArgumentParser(description="Every interleaving with few preemptions, on the real code.")
    parser.add_argument("--preemptions", type=int, default=1)
    parser.add_argument("--whole-collection", action="store_true", help="the collection is one step")
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop after so long")
    parser.add_argument("--part", default="0/1", help="1/2: the second of two parts, for several processes")
    options = parser.parse_args()
    number, of = (int(word) for word in options.part.split("/"))
    found = explore(
        preemptions=options.preemptions,
        split_collection=not options.whole_collection,
        seconds_max=options.seconds,
        part=(number, of),
        tell=lambda f: print(f"{f.runs:,} runs, {f.states:,} states, {f.seconds:.0f} s …", file=sys.stderr, flush=True),
    )
    print(f"{found.runs:,} runs, {found.states:,} states, {found.seconds:.0f} s, {'all of them' if found.complete else 'not finished'}")
    for plan, problems in found.failures:
        print("\n".join([*replay(plan, split_collection=not options.whole_collection), *problems]))
    raise SystemExit(1 if found.failures else 0)


if __name__ == "__main__":
    main()
