"""Who takes part in the life of a family of tables, and where somebody stops.

Owns: the cast, and plots: somebody who splits or clones stops, or dies, between two steps, while others go on.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from headgate.simulation.actors import Client
from headgate.simulation.family import CloneJob, Family, LoadJob, family_reader_process, family_writer_process, random_write
from headgate.simulation.family_life import (
    cloner_process,
    family_collector_process,
    family_compactor_process,
    family_keeper_process,
    family_loader_process,
    splitter_process,
)
from headgate.simulation.plots import STOPS, Plot
from headgate.simulation.world import Process, World

Start = Callable[[], None]

_STOPS = {
    "writer": [*STOPS["writer"], "table.claimed", "table.placed", "table.fenced", "split.publish", "checkpoint.flushed"],
    "reader": [*STOPS["reader"], "store.list.table", "store.get.table"],
    "splitter": [
        "fence.claimed", "fence.walked", "split.claimed", "split.flushed", "split.pinned", "split.child", "split.retired",
        "split.publish", "split.published", "commit.loaded", "commit.created", "flush.written",
    ],
    "cloner": [
        "tip.found", "clone.begun", "clone.pin", "clone.pinned", "clone.copied", "clone.shard", "clone.shards", "clone.finished",
        "clone.released", "store.get.wal", "store.create.wal", "commit.loaded", "detach.shard", "detach.unpinned", "drop.begun",
        "drop.checked", "drop.shard", "drop.fenced", "drop.log", "drop.deleted", "drop.unpinned",
    ],
    "loader": ["transaction.announced", "transaction.decided", "transaction.placed", "bulk.joined", "bulk.rerouted", "commit.loaded"],
    "compactor": ["compact.registered", "compact.written", "compact.committed", "commit.loaded", "store.get.shards"],
    "collector": ["gc.listed", "gc.committed", "gc.runs", "collect.listed", "collect.committed", "commit.loaded", "store.delete.wal"],
    "keeper": ["tip.found", "commit.loaded"],
}  # fmt: skip

_BETWEEN_PINS = "tip.found"
"""Of two shards: one is pinned, the other is about to be."""

FAMILY_PLOTS: dict[str, Plot] = {
    "splitter_dies_claimed": Plot("splitter", "split.claimed", dies=True),
    "splitter_sleeps_flushed": Plot("splitter", "split.flushed"),
    "splitter_dies_with_a_part": Plot("splitter", "split.child", dies=True),
    "splitter_sleeps_with_its_parts": Plot("splitter", "split.child", seconds=2.0),
    "splitter_dies_before_it_tells_the_table": Plot("splitter", "split.retired", dies=True),
    "split_under_a_put": Plot("writer", "pipeline.encoded"),
    "split_under_an_entry": Plot("writer", "store.create.wal"),
    "split_under_an_acknowledgement": Plot("writer", "pipeline.persisted"),
    "heir_stops_between_the_parts": Plot("writer", "table.fenced"),
    "split_under_a_reader": Plot("reader", "store.get.shards"),
    "split_under_a_load": Plot("loader", "transaction.announced"),
    "load_for_a_shard_that_was_split": Plot("loader", "bulk.joined"),
    "cloner_sleeps_before_its_pin": Plot("cloner", "clone.begun"),
    "cloner_dies_pinned": Plot("cloner", "clone.pinned", dies=True),
    "cloner_sleeps_pinned": Plot("cloner", "clone.pinned"),
    "cloner_sleeps_past_its_lease": Plot("cloner", "clone.pinned", seconds=1.0),
    "cloner_sleeps_before_it_copies": Plot("cloner", "store.get.wal"),
    "cloner_dies_half_way": Plot("cloner", "clone.copied", dies=True),
    "cloner_sleeps_with_all_shards": Plot("cloner", "clone.shards", seconds=1.0),
    "load_between_two_pins": Plot("keeper", "tip.found"),
    "load_between_two_pins_of_a_clone": Plot("cloner", "tip.found"),
    "clone_is_rewritten_slowly": Plot("cloner", "compact.registered", seconds=1.0),
    "clone_is_detached_slowly": Plot("cloner", "detach.shard"),
    "clone_is_dropped_half": Plot("cloner", "drop.log", dies=True),
    "clone_is_dropped_under_its_writer": Plot("cloner", "drop.fenced"),
}


def buckets_of(plot: Plot | None, rng: random.Random) -> int:
    """How many shards the table begins with."""
    return 2 if plot is not None and plot.stop == _BETWEEN_PINS else rng.choice([1, 1, 2])


def cast_family(world: World, family: Family, plot: Plot | None, rng: random.Random, small: bool) -> list[tuple[Process, Start]]:
    """Who takes part, and who of them will stop for a while, or for good."""
    parts: list[tuple[Process, Start]] = []
    stopped = False
    step = plot.stop if plot is not None else ""

    def add(kind: str, name: str, make: Callable[[Process], Start]) -> None:
        nonlocal stopped
        process = world.process(f"{kind}{name}", weight=rng.choice([0.1, 0.3, 1.0, 1.0]))
        parts.append((process, make(process)))
        seconds = rng.choice([0.1, 0.5, 2.0])
        if plot is not None and plot.kind == kind and not stopped:
            stopped = True
            skip = rng.choice([1, 1, 3]) if plot.stop == _BETWEEN_PINS else rng.choice([0, 0, 0, 1])
            world.pause(process, plot.stop, skip, seconds=plot.seconds or seconds, dies=plot.dies)
        elif rng.random() < 0.3:
            world.pause(process, rng.choice(_STOPS[kind]), rng.choice([0, 0, 1, 2]), seconds=seconds, dies=rng.random() < 0.3)

    def wanted(kind: str, chance: float) -> bool:
        return (plot is not None and plot.kind == kind) or rng.random() < chance

    is_about_clones = plot is not None and plot.kind == "cloner"
    is_about_splits = plot is not None and plot.kind not in ("cloner", "keeper")
    for number in range(1 if small or rng.random() < 0.6 else 2):
        exact = rng.random() < 0.3
        items = family.numbers(rng.randint(2, 5)) if exact else []
        client = Client(f"client{number}", f"producer{number}" if exact else None, items)
        for attempt in range(2 if exact and rng.random() < 0.4 else 1):
            make = partial(family_writer_process, family, client=client, rng=rng, lives=1 if small or rng.random() < 0.5 else 2)
            add("writer", f"{number}{'ab'[attempt]}", make)
    if is_about_splits or rng.random() < (0.25 if is_about_clones else 0.7):
        for number in range(rng.choice([1, 2]) if is_about_splits else 1):
            add("splitter", "ab"[number], partial(splitter_process, family, rng=rng, rounds=2))
    if is_about_clones or rng.random() < (0.2 if is_about_splits else 0.6):
        for number in range(1 if small or rng.random() < 0.8 else 2):
            job = CloneJob(f"u{number}", f"w{number}" if rng.random() < 0.3 else None)
            family.clones.append(job)
            drops, detaches = 0.9 if step.startswith("drop.") else 0.35, 0.9 if step.startswith(("detach.", "compact.")) else 0.35
            for attempt in range(rng.choice([1, 2])):
                make = partial(cloner_process, family, job=job, rng=rng, drops=drops, detaches=detaches)
                add("cloner", f"{number}{'ab'[attempt]}", make)
    if wanted("reader", 0.5):
        add("reader", "", partial(family_reader_process, family, rng=rng))
    if wanted("loader", 1.0 if step == _BETWEEN_PINS else 0.35):
        number = family.numbers(1)[0]
        job_of_load = family.loads[number] = LoadJob(number, random_write(family, number, rng))
        for attempt in range(rng.choice([1, 2])):
            add("loader", "ab"[attempt], partial(family_loader_process, family, job=job_of_load, rng=rng))
    if rng.random() < (0.8 if is_about_clones else 0.4):
        add("compactor", "", partial(family_compactor_process, family, rng=rng))
    if is_about_clones or rng.random() < 0.7:
        add("collector", "", partial(family_collector_process, family, rng=rng, rounds=6 if is_about_clones else 4))
    if wanted("keeper", 0.6 if is_about_clones else 0.2):
        add("keeper", "", partial(family_keeper_process, family, rng=rng))
    return parts
