"""One schedule from a seed, and many of them.

Owns: how a seed becomes a world, and the report. A failing seed is printed and replays exactly.
"""

from __future__ import annotations

import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from headgate.failpoint import hooked
from headgate.simulation.actors import (
    Client,
    Ledger,
    Stage,
    appender_process,
    collector_process,
    tailer_process,
    writer_process,
)
from headgate.simulation.checker import judge
from headgate.simulation.scheduler import ProcessDied, Scheduler, SimulationStuck
from headgate.simulation.world import Faults, Process, World


@dataclass
class Outcome:
    """What came of one schedule."""

    seed: int
    problems: list[str]
    steps: int
    struck: Counter[str]
    acknowledged: int
    trace: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems


def run_schedule(seed: int, *, faults: frozenset[str] | None = None, trace: bool = False) -> Outcome:
    """Play one schedule. ``faults``: the kinds that may strike; None: all."""
    rng = random.Random(seed)
    scheduler = Scheduler(rng)
    world = World(scheduler, rng, Faults.random(rng, faults), trace=[] if trace else None)
    ledger = Ledger()
    stage = Stage(world, ledger)
    with hooked(lambda name: _failpoint(world, name)), _hushed():
        try:
            play(world, stage, cast(world, stage, rng))
        except SimulationStuck as error:
            ledger.problems.append(f"HANG: {error}")
        finally:
            for process in world.processes:
                if process.alive:
                    process.end()
    for task, escaped in scheduler.escaped:
        ledger.problems.append(f"ESCAPED: {task.name}: {escaped!r}")
    return Outcome(seed, ledger.problems, scheduler.steps, world.struck, len(ledger.acked), world.trace or [])


@contextmanager
def _hushed() -> Iterator[None]:
    """No warnings of simulated writers, and none about the last words of the dead."""
    logger = logging.getLogger("headgate")
    level, hook = logger.level, sys.unraisablehook
    logger.setLevel(logging.CRITICAL)
    sys.unraisablehook = lambda info: None if isinstance(info.exc_value, ProcessDied) else hook(info)
    try:
        yield
    finally:
        logger.setLevel(level)
        sys.unraisablehook = hook


def _failpoint(world: World, name: str) -> None:
    task = world.scheduler.current
    if task is not None and task.process.alive and task.locks_held == 0:
        if world.trace is not None:
            world.note(task.process.name, f"at {name}")
        world.scheduler.turn()


Start = Callable[[], None]


def cast(world: World, stage: Stage, rng: random.Random) -> list[tuple[Process, Start]]:
    """Who takes part."""
    parts: list[tuple[Process, Start]] = []

    def add(name: str, make: Callable[[Process], Start]) -> None:
        process = world.process(name, weight=rng.choice([0.05, 0.3, 1.0, 1.0]))
        parts.append((process, make(process)))

    for number in range(rng.randint(1, 3)):
        exact = rng.random() < 0.5
        items = stage.ledger.numbers(rng.randint(1, 5)) if exact else []
        client = Client(f"client{number}", f"producer{number}" if exact else None, items)
        for attempt in range(2 if exact and rng.random() < 0.5 else 1):
            name = f"writer{number}{'ab'[attempt]}"
            add(name, lambda process, client=client: writer_process(stage, process, client, rng))  # type: ignore[misc]
    if rng.random() < 0.4:
        add("appender", lambda process: appender_process(stage, process, rng))
    if rng.random() < 0.5:
        add("tailer", lambda process: tailer_process(stage, process, rng))
    for number in range(rng.choice([0, 1, 1, 2])):
        add(f"collector{number}", lambda process: collector_process(stage, process, rng))
    return parts


def play(world: World, stage: Stage, parts: list[tuple[Process, Start]]) -> None:
    """Create the shard, let the processes run to their ends, then judge with all faults off."""
    scheduler = world.scheduler
    world.quiet = True
    founder = world.process("founder", protected=True)
    task = founder.start(lambda: stage.create(founder))
    scheduler.run(lambda: task.done)
    world.quiet = False
    mains = [(process, process.start(main)) for process, main in parts]
    scheduler.run(lambda: all(main.done or not process.alive for process, main in mains))
    for process, _ in mains:
        if process.alive:
            process.end()
    world.quiet = True
    world.settle_network()
    judge_process = world.process("judge", protected=True)
    verdict = judge_process.start(lambda: judge(stage, judge_process))
    scheduler.run(lambda: verdict.done)


@dataclass
class Report:
    """Many schedules."""

    schedules: int = 0
    failures: list[Outcome] = field(default_factory=list)
    struck: Counter[str] = field(default_factory=Counter)
    acknowledged: int = 0
    steps: int = 0
    seconds: float = 0.0

    def add(self, outcome: Outcome) -> None:
        self.schedules += 1
        self.struck.update(outcome.struck)
        self.acknowledged += outcome.acknowledged
        self.steps += outcome.steps
        if not outcome.ok:
            self.failures.append(outcome)


def seeds_of(seed: int, schedules: int) -> Iterable[int]:
    """The seeds of a run: different runs share none."""
    return range(seed * 1_000_000_007, seed * 1_000_000_007 + schedules)


def outcomes(seeds: Iterable[int], *, faults: frozenset[str] | None = None) -> Iterator[Outcome]:
    for seed in seeds:
        yield run_schedule(seed, faults=faults)


def simulate(schedules: int, seed: int = 0, *, faults: frozenset[str] | None = None, failures_max: int = 1) -> Report:
    """Play many schedules in this process; stop at ``failures_max`` violations."""
    report, start = Report(), time.monotonic()
    for outcome in outcomes(seeds_of(seed, schedules), faults=faults):
        report.add(outcome)
        if len(report.failures) >= failures_max:
            break
    report.seconds = time.monotonic() - start
    return report
