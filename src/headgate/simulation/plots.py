"""Who takes part in a schedule with a MemTable, and where somebody stops.

Owns: the cast, and plots: a process that stops, or dies, between two steps that must hold
together, while others go on. Chance alone seldom arranges that. Everything else is as the seed says.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from headgate.simulation.actors import Client
from headgate.simulation.tables import TableStage, reader_process, table_collector_process, table_writer_process
from headgate.simulation.world import Process, World

Start = Callable[[], None]

# Where a process may be made to stop: at a step, or before it asks the store for something.
STOPS = {
    "writer": [
        "fence.surveyed", "fence.claimed", "fence.before-seal", "fence.sealed", "fence.walked", "fence.verified",
        "replay.flushed", "flush.merged", "flush.written", "flush.committed", "commit.loaded", "commit.created",
        "view.memory", "pipeline.encoded", "pipeline.persisted", "close.drained", "store.get.shards", "store.create.wal",
    ],
    "reader": ["store.get.wal", "store.get.shards", "store.list.wal", "store.list.shards"],
    "collector": ["gc.listed", "gc.committed", "collect.listed", "collect.committed", "commit.loaded", "store.delete.wal"],
}  # fmt: skip


@dataclass(frozen=True)
class Plot:
    """The first of a kind stops at a step."""

    kind: str
    stop: str
    dies: bool = False
    seconds: float | None = None
    """For so long, the first time; None: as the seed says."""


PLOTS: dict[str, Plot] = {
    "view_across_a_flush": Plot("writer", "view.memory"),
    "flush_is_overtaken": Plot("writer", "flush.written"),
    "dies_after_a_flush": Plot("writer", "flush.committed", dies=True),
    "dies_in_replay": Plot("writer", "replay.flushed", dies=True),
    "flushed_before_the_claim": Plot("writer", "fence.surveyed"),
    "overtaken_reader": Plot("reader", "store.get.wal"),
}


def cast_table(world: World, stage: TableStage, plot: Plot | None, rng: random.Random, small: bool) -> list[tuple[Process, Start]]:
    """Who takes part, and who of them will stop for a while, or for good."""
    parts: list[tuple[Process, Start]] = []
    stopped = False

    def add(kind: str, name: str, make: Callable[[Process], Start]) -> None:
        nonlocal stopped
        process = world.process(f"{kind}{name}", weight=rng.choice([0.05, 0.3, 1.0, 1.0]))
        parts.append((process, make(process)))
        seconds = rng.choice([0.1, 0.5, 2.0])
        if plot is not None and plot.kind == kind and not stopped:
            stopped = True
            world.pause(process, plot.stop, rng.choice([0, 0, 1, 2, 3]), seconds=seconds, dies=plot.dies)
        elif rng.random() < 0.3:
            stop = rng.choice(STOPS[kind])
            world.pause(process, stop, rng.choice([0, 0, 1, 2, 5]), seconds=seconds, dies=rng.random() < 0.3)

    for number in range(2 if plot is not None else rng.randint(1, 2)):
        exact = rng.random() < 0.5
        items = stage.ledger.numbers(rng.randint(1, 4)) if exact else []
        client = Client(f"client{number}", f"producer{number}" if exact else None, items)
        # Two processes of one client: the second may start while the first still lives.
        for attempt in range(2 if exact and rng.random() < 0.5 else 1):
            make = partial(table_writer_process, stage, client=client, rng=rng, lives=1 if small else 2)
            add("writer", f"{number}{'ab'[attempt]}", make)
    readers = rng.choice([0, 1] if small else [0, 1, 1, 2])
    for number in range(max(readers, plot is not None and plot.kind == "reader")):
        add("reader", f"{number}", partial(reader_process, stage, rng=rng))
    if rng.random() < 0.6 or (plot is not None and plot.kind != "writer"):
        # Whoever overtakes a reader comes often.
        rounds = 12 if plot is not None and plot.kind == "reader" else 2 if small else 4
        add("collector", "", partial(table_collector_process, stage, rng=rng, rounds=rounds))
    return parts
