"""All interleavings of the protocol's model, and what must hold in every state.

Owns: the search, the judgement, the trace. Does not own: the protocol (model).

Breadth first over immutable states, each visited once, so the first violation found has a
shortest trace. There is no depth limit: a scope is finite, and is explored to its end.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

from headgate.simulation.model import SEAL, Actor, Objects, Point, Scope, State, covered, initial, objects, successors

Written = tuple[str, int, int, int, int]
"""Of a writer: its name, epoch, first position, puts sent, puts acknowledged."""


@dataclass
class Exploration:
    """What a search found."""

    states: int = 0
    steps: int = 0
    seconds: float = 0.0
    complete: bool = False
    violation: str = ""
    trace: list[str] = field(default_factory=list)


def explore(scope: Scope, *, kind: str = "", states_max: int = 1 << 62) -> Exploration:
    """Visit every reachable state, up to the first in which something does not hold.

    Args:
        kind: look for this kind of violation only, e.g. "LOST"; a broken rule may show in several ways.
    """
    found, began = Exploration(), time.perf_counter()
    start = initial(scope)
    came_from: dict[State, State | None] = {start: None}
    queue = deque([start])
    while queue and not found.violation and len(came_from) < states_max:
        state = queue.popleft()
        for _, after in successors(scope, state):
            found.steps += 1
            if after in came_from:
                continue
            came_from[after] = state
            queue.append(after)
            if (problem := problem_of(after)) and problem.startswith(kind):
                found.violation, found.trace = problem, _trace(scope, came_from, after)
                break
    found.complete = not queue
    found.states, found.seconds = len(came_from), time.perf_counter() - began
    return found


def _trace(scope: Scope, came_from: dict[State, State | None], last: State) -> list[str]:
    lines: list[str] = []
    while (before := came_from[last]) is not None:
        lines.append(next(label for label, after in successors(scope, before) if after == last))
        last = before
    return [f"{number:3}  {line}" for number, line in enumerate(reversed(lines), 1)]


def visible(scope: Scope) -> set[tuple[object, ...]]:
    """Every state as an onlooker sees it: the objects, and what was promised."""
    start = initial(scope)
    seen, queue = {start}, [start]
    while queue:
        for _, after in successors(scope, queue.pop()):
            if after not in seen:
                seen.add(after)
                queue.append(after)
    return {(s.wal, s.latest[3:], s.flying, tuple(a.acked for a in s.actors)) for s in seen}


# -- what must hold


def problem_of(state: State) -> str:
    """What is wrong in this state; empty if nothing is."""
    holders: dict[int, str] = {}
    for actor in state.actors:
        if actor.epoch and holders.setdefault(actor.epoch, actor.name) != actor.name:
            return f"TWO OWNERS: {actor.name} and {holders[actor.epoch]} both hold epoch {actor.epoch}"
        if actor.at == "lost" and not state.damaged:
            return f"FALSE ALARM: {actor.name} refuses a log that lost nothing"
        if actor.at == "contradicted":
            return f"CONTRADICTION: {actor.name} found other ends of epochs than the manifest has"
        if state.damaged and actor.epoch > 1:
            return f"SILENT LOSS: {actor.name} claimed a log with a hole"
    if state.damaged:
        return ""
    written = tuple(_written(actor) for actor in state.actors if actor.first >= 0)
    m = state.latest
    return _problem(state.wal, m.cursor, m.resume, m.segments, m.last_seen, m.archive, written)


def _written(actor: Actor) -> Written:
    return actor.name, actor.epoch, actor.first, actor.acked + len(actor.flights), actor.acked


@cache
def _problem(
    wal: Objects,
    cursor: Point,
    resume: Point,
    segments: tuple[Point, ...],
    last_seen: int,
    archive: tuple[tuple[Point, str, int], ...],
    written: tuple[Written, ...],
) -> str:
    """The log as a reader finds it, against what each writer was told."""
    ends = dict(segments)
    passed = list(_chain(wal, cursor))
    tip = passed[-1]
    rows = [*archive, *((point, *objects(wal)[point][:2]) for point in passed[:-1] if objects(wal)[point].who != SEAL)]
    places = {(who, number): point for point, who, number in rows}

    if covered(wal, last_seen, tip):
        return f"NOT WALKABLE: the chain from {cursor} ends at {tip}, and that was durable"
    if resume[1] >= cursor[1] and resume not in passed:
        return f"NOT WALKABLE: resume {resume} is not on the chain from {cursor} to {tip}"
    if len(places) != len(rows):
        return f"DOUBLED: {rows}"
    for point, who, number in rows:
        if point[1] >= ends.get(point[0], 1 << 30):
            return f"PAST A SEAL: {who}{number} at {point} is readable, and its epoch ended at {ends[point[0]]}"
    acknowledged: dict[int, str] = {}
    for name, epoch, first, sent, acked in written:
        numbers = [number for _, who, number in rows if who == name]
        if numbers != sorted(numbers):
            return f"OUT OF ORDER: {name}'s puts are read as {numbers}"
        for number in range(sent):
            place, position = places.get((name, number)), first + number
            if number < acked:
                if place != (epoch, position):
                    return f"LOST: {name}{number} was acknowledged at {(epoch, position)} and is {'nowhere' if place is None else place}"
                if acknowledged.setdefault(position, name) != name:
                    return f"TWO AT ONE POSITION: {name} and {acknowledged[position]} both acknowledged at {position}"
            if epoch in ends and (position < ends[epoch]) != (place is not None):
                return f"UNTOLD: {name}{number} at {(epoch, position)} is {place}, and its epoch ended at {ends[epoch]}"
        if acked and any(older not in ends for older in range(1, epoch)):
            return f"UNTOLD: {name} acknowledged in epoch {epoch}, and the manifest has only the ends {segments}"
    return ""


def _chain(wal: Objects, point: Point) -> Iterator[Point]:
    """Every point from the cursor to the tip; the last one holds nothing."""
    yield point
    while (found := objects(wal).get(point)) is not None:
        point = (point[0] + (found.who == SEAL), point[1] + 1)
        yield point
