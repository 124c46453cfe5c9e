"""One schedule from a seed, and many of them.

Owns: how a seed becomes a world, and the report. A failing seed is printed and replays exactly.
"""

from __future__ import annotations

import logging
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal
from unittest.mock import patch

from headgate import compact, transaction, watch
from headgate.failpoint import hooked
from headgate.life import clone, gc, split
from headgate.manifest import chain
from headgate.manifest.document import Model, decode_document
from headgate.manifest.model import RunRecord
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
from headgate.simulation.family import Family
from headgate.simulation.family_judge import judge_family
from headgate.simulation.family_plots import FAMILY_PLOTS, buckets_of, cast_family
from headgate.simulation.life import LifeStage
from headgate.simulation.life_plots import LIFE_PLOTS, cast_life
from headgate.simulation.plots import PLOTS, Plot, cast_table
from headgate.simulation.reads import judge_table
from headgate.simulation.scenes import SCENES, Scene
from headgate.simulation.scheduler import ProcessDied, Scheduler, SimulationStuck
from headgate.simulation.tables import TableLedger, TableStage
from headgate.simulation.truth import judge_life
from headgate.simulation.world import Faults, Process, World
from headgate.wal import fence


@dataclass
class Outcome:
    """What came of one schedule."""

    seed: int
    problems: list[str]
    steps: int
    struck: Counter[str]
    acknowledged: int
    reads: int = 0
    """That were compared with the model."""
    mode: Literal["wal", "memtable", "life", "family"] = "wal"
    loads: int = 0
    """That found their place."""
    splits: int = 0
    clones: int = 0
    """That somebody was told of."""
    trace: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems


Mode = Literal["all", "wal", "memtable", "life", "family"]


def run_schedule(
    seed: int,
    *,
    faults: frozenset[str] | None = None,
    scene: str | None = None,
    small: bool = False,
    trace: bool = False,
    mode: Mode = "all",
) -> Outcome:
    """Play one schedule.

    Args:
        faults: the kinds that may strike; None: all.
        scene: this scene or plot, which says the mode too; None: as the seed says.
        small: few processes and one table, for traces that people read.
        mode: "wal": the log alone. "memtable": rows in memory, in runs, and read. "life": loads, compaction, checkpoints,
            collection and followers beside them, over several shards. "family": shards that are split, and clones.
            "all": as the seed says.
    """
    rng = random.Random(seed)
    if mode == "all":
        mode = _MODES[seed % len(_MODES)]
        if mode == "life" and seed // len(_MODES) % 2:
            mode = "family"
    if scene in FAMILY_PLOTS or (scene is None and mode == "family"):
        return _run_family_schedule(seed, rng, faults, scene, small, trace)
    if scene in LIFE_PLOTS or (scene is None and mode == "life"):
        return _run_life_schedule(seed, rng, faults, scene, small, trace)
    if scene in PLOTS or (scene is None and mode == "memtable"):
        return _run_table_schedule(seed, rng, faults, scene, small, trace)
    small = rng.random() < 0.75 or small  # the tighter the scope, the likelier a race; the wider, the likelier a surprise
    scheduler = Scheduler(rng)
    world = World(scheduler, rng, Faults.random(rng, faults), trace=[] if trace else None)
    # Most schedules are free play; some have a plot first. Two tables may share one WAL store.
    stages = [Stage(world, Ledger())]
    if rng.random() < 0.15 and not small:
        stages.append(Stage(world, Ledger(), "table1", other_wal_id()))
    chosen = SCENES[scene] if scene is not None else SCENES[rng.choice(list(SCENES))] if rng.random() < 0.3 else None
    with hooked(world.at_failpoint), hushed(), _soon_a_barrier(rng):
        problems = _played(world, lambda: play(world, stages, chosen, rng, small))
    problems += [problem for stage in stages for problem in stage.ledger.problems]
    for task, escaped in scheduler.escaped:
        problems.append(f"ESCAPED: {task.name}: {escaped!r}")
    acknowledged = sum(len(stage.ledger.acked) for stage in stages)
    return Outcome(seed, problems, scheduler.steps, world.struck, acknowledged, trace=world.trace or [])


def _played(world: World, play: Callable[[], None]) -> list[str]:
    """Play to the end, whatever comes. What is wrong with that itself: nobody could go on."""
    try:
        play()
    except SimulationStuck as error:
        return [f"HANG: {error}"]
    finally:
        for process in world.processes:
            if process.alive:
                process.end()
    return []


_MODES: tuple[Literal["wal", "memtable", "life"], ...] = ("memtable", "wal", "wal", "memtable", "wal", "wal", "life", "wal", "wal")


def _run_table_schedule(
    seed: int, rng: random.Random, faults: frozenset[str] | None, scene: str | None, small: bool, trace: bool
) -> Outcome:
    """One schedule with a MemTable: flushes, replays and reads, each read compared with a model."""
    plot = PLOTS[scene] if scene is not None else PLOTS[rng.choice(list(PLOTS))] if rng.random() < 0.4 else None
    scheduler = Scheduler(rng)
    world = World(scheduler, rng, Faults.random(rng, faults), trace=[] if trace else None, ever={}, dwells=rng.choice([0.0, 0.03, 0.1]))
    ledger = TableLedger()
    stage = TableStage(world, ledger, keyed=rng.random() < 0.7, filters=rng.random() < 0.15, salt=rng.getrandbits(32))
    with hooked(world.at_failpoint), hushed(), _soon_a_barrier(rng):
        problems = _played(world, lambda: play_table(world, stage, plot, rng, small))
    problems += ledger.problems
    problems += [f"ESCAPED: {task.name}: {escaped!r}" for task, escaped in scheduler.escaped]
    return Outcome(seed, problems, scheduler.steps, world.struck, len(ledger.acked), len(ledger.reads), "memtable", trace=world.trace or [])


def _run_life_schedule(
    seed: int, rng: random.Random, faults: frozenset[str] | None, scene: str | None, small: bool, trace: bool
) -> Outcome:
    """One schedule of a table's life: everything that moves rows beside the writers of several shards."""
    plot = LIFE_PLOTS[scene] if scene is not None else LIFE_PLOTS[rng.choice(list(LIFE_PLOTS))] if rng.random() < 0.4 else None
    scheduler = Scheduler(rng)
    world = World(scheduler, rng, Faults.random(rng, faults), trace=[] if trace else None, ever={}, dwells=rng.choice([0.0, 0.03, 0.1]))
    shards = 1 if rng.random() < 0.35 else 2
    stage = LifeStage(world, shards, keyed=rng.random() < 0.8, filters=rng.random() < 0.1, salt=rng.getrandbits(32))
    with hooked(world.at_failpoint), hushed(), _soon_a_barrier(rng), _short_leases(rng, plot), _any_runs(rng), _read_once():
        problems = _played(world, lambda: play_life(world, stage, plot, rng, small))
    problems += stage.problems()
    problems += [f"ESCAPED: {task.name}: {escaped!r}" for task, escaped in scheduler.escaped]
    ledgers = [table.table_ledger for table in stage.shards.values()]
    acknowledged, reads = sum(len(ledger.acked) for ledger in ledgers), sum(len(ledger.reads) for ledger in ledgers)
    return Outcome(seed, problems, scheduler.steps, world.struck, acknowledged, reads, "life", stage.loads, trace=world.trace or [])


_JUMPS = (-20.0, -2.0, 0.0, 3600.0, 1e7)
"""Of clocks, where leases of splits are waited for: a clock that is days behind waits for days."""


def _run_family_schedule(
    seed: int, rng: random.Random, faults: frozenset[str] | None, scene: str | None, small: bool, trace: bool
) -> Outcome:
    """One schedule of a table whose shards are split, and of its clones, beside everything else."""
    plot = FAMILY_PLOTS[scene] if scene is not None else FAMILY_PLOTS[rng.choice(list(FAMILY_PLOTS))] if rng.random() < 0.5 else None
    scheduler = Scheduler(rng)
    world = World(scheduler, rng, Faults.random(rng, faults), trace=[] if trace else None, ever={}, dwells=rng.choice([0.0, 0.03, 0.1]))
    world.jumps = _JUMPS
    family = Family(world, keyed=rng.random() < 0.8, buckets=buckets_of(plot, rng), salt=rng.getrandbits(32))
    with (
        hooked(world.at_failpoint),
        hushed(),
        _soon_a_barrier(rng),
        _short_leases(rng, None),
        _short_holds(rng, plot),
        _any_runs(rng),
        _read_once(),
        _watches_of_each(scheduler),
    ):
        problems = _played(world, lambda: play_family(world, family, plot, rng, small))
    problems += family.problems
    problems += [f"ESCAPED: {task.name}: {escaped!r}" for task, escaped in scheduler.escaped]
    acknowledged = sum(len(member.acked) for member in family.members)
    reads = sum(len(member.reads) + sum(len(taken.reads) for taken in member.pins) for member in family.members)
    return Outcome(
        seed,
        problems,
        scheduler.steps,
        world.struck,
        acknowledged,
        reads,
        "family",
        family.loads_placed,
        family.splits,
        family.clones_made,
        world.trace or [],
    )


@contextmanager
def _short_holds(rng: random.Random, plot: Plot | None) -> Iterator[None]:
    """The leases of splits and clones; and stores are believed: a probe of one that fails at times says nothing."""
    outlived = plot is not None and plot.kind == "cloner" and plot.seconds is not None
    with (
        patch.object(split, "LEASE_SECONDS", rng.choice([0.3, 2.0, 8.0])),
        patch.object(clone, "_LEASE_SECONDS", 0.1 if outlived else rng.choice([0.1, 0.5, 3600.0])),
        patch.object(gc, "LEASE_GRACE_SECONDS", 0.0 if outlived else rng.choice([0.0, 60.0])),
        patch.object(clone, "probe", lambda store, clock: None),
    ):
        yield


class _WatchesOfEach:
    """What changes in a process is told to the watches of that process."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._known: dict[str, list[Any]] = {}

    def _mine(self) -> list[Any]:
        task = self._scheduler.current
        return self._known.setdefault(task.process.name if task is not None else "", [])

    def add(self, one: Any) -> None:
        self._mine().append(one)

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._mine()))


@contextmanager
def _watches_of_each(scheduler: Scheduler) -> Iterator[None]:
    with patch.object(watch, "_watches", _WatchesOfEach(scheduler)):
        yield


@contextmanager
def _short_leases(rng: random.Random, plot: Plot | None) -> Iterator[None]:
    """So short that they end while somebody stops; whatever the clock says, nothing may depend on them."""
    with (
        patch.object(transaction, "LEASE_SECONDS", 0.2 if plot is not None and plot.seconds else rng.choice([0.2, 2.0, 600.0])),
        patch.object(compact, "LEASE_SECONDS", rng.choice([0.2, 600.0])),
        patch.object(gc, "LEASE_GRACE_SECONDS", rng.choice([0.0, 60.0])),
        patch.object(gc, "MARK_SECONDS", rng.choice([0.5, 3600.0])),
    ):
        yield


@contextmanager
def _soon_a_barrier(rng: random.Random) -> Iterator[None]:
    """Simulated writers are slow; the barrier against fast ones must come early to be met at all."""
    with patch.object(fence, "_RACES_BEFORE_BARRIER", rng.choice([1, 1, 2, 4])), patch.object(fence, "_BARRIER_AHEAD", (2, 8)):
        yield


@contextmanager
def _any_runs(rng: random.Random) -> Iterator[None]:
    """Tables are small, so all runs would be merged every time; some of them is allowed as well."""
    original = compact.pick

    def some(runs: Sequence[RunRecord], cursor: int, *, full: bool, detach: bool = False) -> tuple[int, int] | None:
        found = original(runs, cursor, full=full, detach=detach)
        if found is None or full or detach or found[1] - found[0] < 2 or rng.random() < 0.5:
            return found
        first = rng.randrange(found[0], found[1] - 1)
        return first, rng.randint(first + 2, found[1])

    with patch.object(compact, "pick", some):
        yield


@contextmanager
def _read_once() -> Iterator[None]:
    """A manifest that was read is the same for the next reader: half of the time goes into reading them."""
    known: dict[tuple[bytes, str], Any] = {}

    def decode(data: memoryview | bytes, kind: type[Model], key: str) -> Model:
        wanted = (bytes(data), key)
        found: Model | None = known.get(wanted)
        if found is None:
            found = known[wanted] = decode_document(data, kind, key)
        return found

    with patch.object(chain, "decode_document", decode):
        yield


@contextmanager
def hushed() -> Iterator[None]:
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


def other_wal_id() -> str:
    """The second table's WAL id: random in life, different here."""
    return "wal1"


Start = Callable[[], None]


def cast(world: World, stage: Stage, rng: random.Random, small: bool) -> list[tuple[Process, Start]]:
    """Who takes part."""
    parts: list[tuple[Process, Start]] = []
    suffix = stage.table_id[-1]

    def add(name: str, make: Callable[[Process], Start]) -> None:
        process = world.process(f"{name}.{suffix}", weight=rng.choice([0.05, 0.3, 1.0, 1.0]))
        parts.append((process, make(process)))

    for number in range(2 if small else rng.randint(1, 3)):
        exact = rng.random() < 0.5
        items = stage.ledger.numbers(rng.randint(1, 3 if small else 5)) if exact else []
        client = Client(f"client{number}", f"producer{number}" if exact else None, items)
        # Two processes of one client: the second may start while the first still lives.
        for attempt in range(2 if exact and rng.random() < 0.5 else 1):
            add(f"writer{number}{'ab'[attempt]}", partial(writer_process, stage, client=client, rng=rng, lives=1 if small else 2))
    if rng.random() < 0.4 and not small:
        add("appender", partial(appender_process, stage, rng=rng))
    if rng.random() < 0.5 and not small:
        add("tailer", partial(tailer_process, stage, rng=rng))
    for number in range(rng.choice([0, 1] if small else [0, 1, 1, 2])):
        add(f"collector{number}", partial(collector_process, stage, rng=rng, rounds=2 if small else 6))
    return parts


def play(world: World, stages: list[Stage], scene: Scene | None, rng: random.Random, small: bool) -> None:
    """Create the shards, play the scene, let the processes run to their ends, then judge with all faults off."""
    scheduler = world.scheduler
    world.quiet = True
    for stage in stages:
        alone(world, f"founder.{stage.table_id[-1]}", lambda process, stage=stage: stage.create(process))  # type: ignore[misc]
    if scene is not None:
        scene(world, stages[0], rng)
    world.quiet = False
    mains = []
    if scene is None or not small:
        mains = [(process, process.start(main)) for stage in stages for process, main in cast(world, stage, rng, small)]
    scheduler.run(lambda: all(main.done or not process.alive for process, main in mains))
    for process, _ in mains:
        if process.alive:
            process.end()
    world.quiet = True
    world.settle_network()
    for stage in stages:
        alone(world, f"judge.{stage.table_id[-1]}", lambda process, stage=stage: judge(stage, process))  # type: ignore[misc]


def play_table(world: World, stage: TableStage, plot: Plot | None, rng: random.Random, small: bool) -> None:
    cast = partial(cast_table, world, stage, plot, rng, small)
    _play_one(world, stage.create, cast, lambda process: judge_table(stage, process, rng))


def play_life(world: World, stage: LifeStage, plot: Plot | None, rng: random.Random, small: bool) -> None:
    cast = partial(cast_life, world, stage, plot, rng, small)
    _play_one(world, stage.create, cast, lambda process: judge_life(stage, process, rng))


def play_family(world: World, family: Family, plot: Plot | None, rng: random.Random, small: bool) -> None:
    cast = partial(cast_family, world, family, plot, rng, small)
    _play_one(world, family.create, cast, lambda process: judge_family(family, process, rng))


def _play_one(
    world: World, create: Callable[[Process], None], cast: Callable[[], Sequence[tuple[Process, Start]]], judge: Callable[[Process], None]
) -> None:
    """Create it, let the processes run to their ends, then judge with all faults off."""
    world.quiet = True
    alone(world, "founder", create)
    world.quiet = False
    mains = [(process, process.start(main)) for process, main in cast()]
    world.scheduler.run(lambda: all(main.done or not process.alive for process, main in mains))
    for process, _ in mains:
        if process.alive:
            process.end()
    world.quiet = True
    world.settle_network()
    alone(world, "judge", judge)


def alone(world: World, name: str, main: Callable[[Process], None]) -> None:
    """Run one process to its end."""
    process = world.process(name, protected=True)
    task = process.start(lambda: main(process))
    world.scheduler.run(lambda: task.done)
    process.end()


@dataclass
class Report:
    """Many schedules."""

    schedules: int = 0
    failures: list[Outcome] = field(default_factory=list)
    struck: Counter[str] = field(default_factory=Counter)
    acknowledged: int = 0
    reads: int = 0
    loads: int = 0
    splits: int = 0
    clones: int = 0
    steps: int = 0
    seconds: float = 0.0

    def merge(self, part: Report) -> None:
        self.schedules += part.schedules
        self.struck.update(part.struck)
        self.acknowledged += part.acknowledged
        self.reads += part.reads
        self.loads += part.loads
        self.splits += part.splits
        self.clones += part.clones
        self.steps += part.steps
        self.failures += part.failures

    def add(self, outcome: Outcome) -> None:
        self.schedules += 1
        self.struck.update(outcome.struck)
        self.acknowledged += outcome.acknowledged
        self.reads += outcome.reads
        self.loads += outcome.loads
        self.splits += outcome.splits
        self.clones += outcome.clones
        self.steps += outcome.steps
        if not outcome.ok:
            self.failures.append(outcome)


def seeds_of(seed: int, schedules: int) -> range:
    """The seeds of a run: different runs share none."""
    return range(seed * 1_000_000_007, seed * 1_000_000_007 + schedules)


Tell = Callable[[Report], None]


def simulate(
    schedules: int,
    seed: int = 0,
    *,
    faults: frozenset[str] | None = None,
    scene: str | None = None,
    failures_max: int = 1,
    jobs: int = 1,
    tell: Tell | None = None,
    mode: Mode = "all",
) -> Report:
    """Play many schedules; stop at ``failures_max`` violations.

    Args:
        mode: see ``run_schedule``.
        jobs: processes to spread them over.
        tell: called with the report so far, now and then.
    """
    report, start = Report(), time.monotonic()
    seeds = seeds_of(seed, schedules)
    chunks = [seeds[at : at + _CHUNK] for at in range(0, len(seeds), _CHUNK)]
    play_some = partial(_play_chunk, faults=faults, scene=scene, failures_max=failures_max, mode=mode)
    with _mapped(play_some, chunks, jobs) as parts:
        for part in parts:
            report.merge(part)
            report.seconds = time.monotonic() - start
            if tell is not None:
                tell(report)
            if len(report.failures) >= failures_max:
                break
    return report


_CHUNK = 100


def _play_chunk(seeds: range, *, faults: frozenset[str] | None, scene: str | None, failures_max: int, mode: Mode) -> Report:
    part = Report()
    for seed in seeds:
        part.add(run_schedule(seed, faults=faults, scene=scene, mode=mode))
        if len(part.failures) >= failures_max:
            break
    return part


@contextmanager
def _mapped(work: Callable[[range], Report], chunks: list[range], jobs: int) -> Iterator[Iterator[Report]]:
    if jobs <= 1:
        yield map(work, chunks)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield pool.imap_unordered(work, chunks)
