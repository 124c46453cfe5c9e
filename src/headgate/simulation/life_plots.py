"""Who takes part in the life of a table, and where somebody stops.

Owns: the cast, and plots: a process that stops, or dies, between two steps that must hold together, while others go on.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from headgate.simulation.actors import Client
from headgate.simulation.life import (
    Follower,
    LifeStage,
    LoadClient,
    compactor_process,
    follower_process,
    keeper_process,
    life_collector_process,
    loader_process,
    once,
)
from headgate.simulation.plots import STOPS, Plot
from headgate.simulation.tables import reader_process, table_writer_process
from headgate.simulation.world import Process, World

Start = Callable[[], None]

# Where a process may be made to stop: at a step, or before it asks the store for something.
_STOPS = {
    **STOPS,
    "writer": [*STOPS["writer"], "checkpoint.flushed"],
    "reader": [*STOPS["reader"], "view.tail"],
    "loader": [
        "transaction.announced", "transaction.decided", "transaction.placed", "transaction.resolved", "load.tip", "commit.loaded",
        "commit.created", "store.create.txn", "store.create.shards", "store.get.txn",
    ],
    "compactor": ["compact.registered", "compact.slice", "compact.written", "compact.committed", "commit.loaded", "store.get.shards"],
    "collector": [
        *STOPS["collector"], "gc.intents.listing", "gc.intents.listed", "gc.intents", "gc.runs", "gc.manifests",
        "transaction.resolved", "store.delete.shards", "store.delete.txn",
    ],
    "keeper": ["commit.loaded", "store.get.shards", "store.get.wal"],
    "follower": [
        "consumer.seen", "consumer.claimed", "consumer.advanced", "transaction.resolved", "store.get.wal", "store.get.shards",
        "store.list.wal",
    ],
}  # fmt: skip

LIFE_PLOTS: dict[str, Plot] = {
    "load_is_overtaken": Plot("loader", "load.tip"),
    "load_is_overtaken_and_watched": Plot("loader", "load.tip", seconds=0.5),
    "loader_sleeps_before_it_decides": Plot("loader", "transaction.announced"),
    "loader_sleeps_past_its_lease": Plot("loader", "transaction.announced", seconds=1.5),
    "loader_dies_half_way": Plot("loader", "transaction.placed", dies=True),
    "loader_dies_decided": Plot("loader", "transaction.decided", dies=True),
    "flush_meets_a_load": Plot("writer", "flush.written"),
    "cut_under_a_view": Plot("writer", "view.memory"),
    "compaction_is_overtaken": Plot("compactor", "compact.written"),
    "collection_is_overtaken": Plot("collector", "gc.listed"),
    "collector_sleeps_before_it_deletes": Plot("collector", "gc.committed"),
    "follower_looks_away": Plot("follower", "store.list.wal"),
    "load_under_a_follower": Plot("follower", "commit.loaded"),
    "taken_away_from_a_reader": Plot("reader", "store.get.shards"),
    "load_under_a_reader": Plot("reader", "view.tail"),
    "load_under_a_checkpoint": Plot("keeper", "commit.loaded"),
    "load_under_a_checkpoint_of_all": Plot("writer", "checkpoint.flushed"),
    "acknowledged_late": Plot("writer", "pipeline.persisted"),
}


def cast_life(world: World, stage: LifeStage, plot: Plot | None, rng: random.Random, small: bool) -> list[tuple[Process, Start]]:
    """Who takes part, and who of them will stop for a while, or for good."""
    parts: list[tuple[Process, Start]] = []
    stopped = False
    stage.pins_often = plot is not None and plot.stop == "checkpoint.flushed"
    watched = plot is not None and plot.stop == "load.tip" and plot.seconds is not None
    for table in stage.shards.values():
        if plot is not None and plot.stop == "pipeline.persisted":
            table.beside_chance, table.beside_max = 1.0, 15
        if watched:
            table.puts_max, table.pause_seconds = 20, 0.05

    def add(kind: str, name: str, make: Callable[[Process], Start]) -> Process:
        nonlocal stopped
        process = world.process(f"{kind}{name}", weight=rng.choice([0.1, 0.3, 1.0, 1.0]))
        parts.append((process, make(process)))
        seconds = rng.choice([0.1, 0.5, 2.0])
        if plot is not None and plot.kind == kind and not stopped:
            stopped = True
            skip = rng.choice([0, 0, 1, 2, 3]) if plot.seconds is None else 0
            world.pause(process, plot.stop, skip, seconds=plot.seconds or seconds, dies=plot.dies)
        elif rng.random() < 0.3:
            world.pause(process, rng.choice(_STOPS[kind]), rng.choice([0, 0, 1, 2, 5]), seconds=seconds, dies=rng.random() < 0.3)
        return process

    def wanted(kind: str, chance: float) -> bool:
        return (plot is not None and plot.kind == kind) or rng.random() < chance

    for number, (shard, table) in enumerate(stage.shards.items()):
        exact = rng.random() < 0.3
        items = table.ledger.numbers(rng.randint(1, 3)) if exact else []
        client = Client(f"client{number}", f"producer{number}" if exact else None, items)
        for attempt in range(2 if rng.random() < 0.3 else 1):
            make = partial(table_writer_process, table, client=client, rng=rng, lives=1 if small else 2)
            add("writer", f"{shard}{'ab'[attempt]}", make)
        if wanted("reader", 0.4):
            add("reader", shard, partial(reader_process, table, rng=rng))
    for number in range(1 if small else rng.choice([1, 1, 2])):
        loads = LoadClient(f"app{number}", rng.randint(1, 3))
        rivals = rng.choice([1, 2])
        if plot is not None and plot.kind == "loader":
            rivals = 2 if plot.seconds is None else 1
        for attempt in range(rivals):
            process = add("loader", f"{number}{'ab'[attempt]}", partial(loader_process, stage, client=loads, rng=rng))
            if rivals == 1 and rng.random() < 0.5 and (plot is None or plot.seconds is None):
                loads.app, loads.versions = once(process), 1
    if wanted("compactor", 0.6):
        for number in range(2 if plot is not None and plot.kind == "compactor" else 1):
            add("compactor", f"{number}", partial(compactor_process, stage, rng=rng))
    if wanted("collector", 0.8):
        rounds = 8 if plot is not None and plot.kind in ("reader", "loader") else 3
        add("collector", "", partial(life_collector_process, stage, rng=rng, rounds=rounds))
    if wanted("keeper", 0.4):
        add("keeper", "", partial(keeper_process, stage, rng=rng))
    if watched or wanted("follower", 0.6):
        follower = Follower("follower", rng.choice(list(stage.shards)), rng.choice(["earliest", "earliest", "latest", "snapshot"]))
        stage.ledger.followers.append(follower)
        for attempt in range(rng.choice([1, 1, 2])):
            add("follower", "ab"[attempt], partial(follower_process, stage, follower=follower, rng=rng, looks=40 if watched else 5))
    return parts
