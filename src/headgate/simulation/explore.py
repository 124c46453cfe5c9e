"""All interleavings of the protocol's model, and what must hold in every state.

Owns: the search, the judgement, the trace, the scopes. Does not own: the protocol (model, protocol).

Breadth first over immutable states, each visited once, so the first violation found has a
shortest trace. There is no depth limit: a scope is finite, and is explored to its end.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

from headgate.simulation.model import (
    SEAL,
    Actor,
    Manifest,
    Objects,
    Point,
    Scope,
    State,
    Step,
    covered,
    create_entry,
    create_manifest,
    entry_name,
    objects,
    wal_name,
)
from headgate.simulation.protocol import PROGRAM, after_append

SMALL = {
    "takeover": Scope(),
    "two rounds": Scope(puts=(2, 1), trims=2, collections=2),
    "repeats": Scope(puts=(2, 1), repeats=1),
    "window": Scope(puts=(3, 1), window=2, trims=0, repeats=1, collections=0),
    "manifests": Scope(trims=0, collections=0, manifests_collected=True, repeats=1),
    "late manifests": Scope(puts=(1, 1), manifests_collected=True, repeats=1, collected_last=True),
    "damage": Scope(puts=(3, 1), window=2, trims=0, collections=0, damage=True),
}
"""Explored to the end in seconds."""

LARGE = SMALL | {
    "takeover": Scope(puts=(2, 1, 1), closing=True),
    "two rounds": Scope(puts=(2, 2), trims=3, collections=3),
    "repeats": Scope(puts=(2, 1), repeats=2, trims=2, collections=2),
    "window": Scope(puts=(3, 1), window=2, repeats=1),
    "three claimants": Scope(puts=(1, 1, 1, 1), trims=0, collections=0, repeats=1),
    "two trimmers": Scope(puts=(1, 1, 1), trimmers=2, collected_last=True),
    "manifests": Scope(puts=(1, 1, 1), manifests_collected=True, collected_last=True),
    "late manifests": Scope(manifests_collected=True, repeats=1, collections=0),
}
"""Explored to the end in the time of a meal."""

_TWO = Scope(puts=(1, 1))
_UNTRIMMED = Scope(puts=(0, 0, 0), trims=0, collections=0, manifests_collected=True)

BROKEN = {
    "no-verify": ("LOST", Scope(puts=(1, 1, 0))),
    "verify-without-commit": ("UNTOLD", _TWO),
    "no-epoch-check": ("LOST", Scope(puts=(1, 1, 0))),
    "no-cursor-check": ("LOST", _TWO),
    "cursor-check-of-own-seals": ("LOST", Scope(puts=(1, 0, 1))),
    "no-seal": ("LOST", _TWO),
    "occupant-ignored": ("LOST", _TWO),
    "collect-seals": ("LOST", _TWO),
    "past-first-seal-is-void": ("LOST", Scope(puts=(2, 1), collections=2)),
    "cursor-on-a-seal": ("LOST", _TWO),
    "trim-forgets-ends": ("UNTOLD", Scope(puts=(0, 0, 1))),
    "trim-trusts-its-walk": ("PAST A SEAL", Scope(puts=(1, 0, 0), trimmers=2, collected_last=True)),
    "durable-through-highest": ("FALSE ALARM", Scope(puts=(3, 1), window=2, trims=0, collections=0)),
    "probe-for-latest": ("TWO OWNERS", Scope(puts=(0, 0, 0), collections=0, manifests_collected=True)),
    "trust-the-create": ("TWO OWNERS", _UNTRIMMED),
    "latest-from-one-list": ("UNTOLD", Scope(puts=(1, 1), manifests_collected=True, repeats=1, collected_last=True)),
    "survey-asks-of-its-point": ("FALSE ALARM", Scope(puts=(2, 1, 0), collected_last=True)),
    "hole-is-tip": ("SILENT LOSS", Scope(puts=(2, 1), trims=0, collections=0, damage=True)),
    "ack-before-durable": ("LOST", _TWO),
}
"""For each rule of the model that can be switched off: what comes of it, and the scope that shows it soon."""

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
            if violations := [problem for problem in problems_of(after) if problem.startswith(kind)]:
                found.violation, found.trace = violations[0], _trace(scope, came_from, after)
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


# -- the order of steps: all of them


def initial(scope: Scope) -> State:
    first = Manifest(1, "", (), 1, "A", (1, 0), (), -1, 0, (1, 0), ())
    actors = [after_append(scope, Actor("A", "append", left=scope.puts[0], epoch=1, first=0, seen_version=1))]
    actors += [Actor(name, "start", left=puts) for name, puts in zip("BCD", scope.puts[1:])]
    actors += [Actor(f"trimmer{n or ''}", "trim", left=scope.trims) for n in range(scope.trimmers) if scope.trims]
    actors += [Actor("collector", "collect", left=scope.collections)] if scope.collections else []
    return State((), ((1, first),), (), scope.repeats, False, tuple(actors))


def successors(scope: Scope, state: State) -> list[tuple[str, State]]:
    """Every step that can be taken, and where it leads."""
    every: list[tuple[str, State]] = []
    for index, actor in enumerate(state.actors):
        program = PROGRAM.get(actor.at)
        if program is None or _waits(scope, state, index, actor):
            continue
        steps = list(program(scope, state, index, actor))
        if scope.reduced and len(steps) == 1 and steps[0][2]:
            return [(f"{actor.name}: {steps[0][0]}", forget(scope, steps[0][1]))]
        every += [(f"{actor.name}: {label}", forget(scope, after)) for label, after, _ in steps]
    every += [(label, forget(scope, after)) for label, after, _ in environment(scope, state)]
    return every


def _waits(scope: Scope, state: State, index: int, actor: Actor) -> bool:
    """Has it not begun, and must not yet: because its twin has not, or because the scope says so?"""
    if actor.at == "start":
        return index > 1 and scope.puts[index] == scope.puts[index - 1] and state.actors[index - 1].at == "start"
    return actor.at == "collect" and scope.collected_last and all(a.at != "done" for a in state.actors if a.name.startswith("trimmer"))


def forget(scope: Scope, state: State) -> State:
    """Without what nobody can tell any more: ids, and old manifests, that no actor waits for."""
    latest = state.latest
    if scope.broken == "probe-for-latest" or not (latest.id or latest.history or len(state.manifests) > 1):
        return state
    waited = {(a.proposal.version, a.proposal.id) for a in state.actors if a.proposal is not None}
    sought = {version for version, _ in waited} | {key[0] for key, body in state.flying if isinstance(body, Manifest)}
    listed = {a.listed for a in state.actors if a.listed >= 0}
    kept = tuple((v, m if v in listed else None) for v, m in state.manifests[:-1] if v in sought or v in listed)
    history = tuple(pair for pair in latest.history if pair in waited)
    name = latest.id if (latest.version, latest.id) in waited else ""
    if history != latest.history or name != latest.id:
        latest = latest._replace(id=name, history=history)
    return state._replace(manifests=(*kept, (latest.version, latest)))


def environment(scope: Scope, state: State) -> Iterator[Step]:
    """What happens without an actor: late copies arrive, old manifests are collected, an entry is lost."""
    for request in state.flying:
        key, body = request
        flying = list(state.flying)
        flying.remove(request)
        after = state._replace(flying=tuple(flying))
        if isinstance(body, Manifest):
            yield f"network: a late copy of manifest/{key[0]} arrives", create_manifest(after, body)[0], False
        else:
            yield f"network: a late copy of {entry_name(body)} arrives at {wal_name(key)}", create_entry(after, key, body)[0], False
    if scope.manifests_collected:
        for row in state.manifests[:-1]:
            rest = tuple(other for other in state.manifests if other is not row)
            yield f"manifest/{row[0]} is collected", state._replace(manifests=rest), False
    if scope.damage and not state.damaged and all(a.at == "start" for a in state.actors[1 : 1 + scope.claimants]):
        for key, entry in state.wal:
            rest_of = tuple(row for row in state.wal if row[0] != key)
            if entry.who != SEAL and key[1] >= state.latest.walk_from()[1] and covered(rest_of, state.latest.last_seen, key):
                yield f"store: loses {wal_name(key)}, {entry_name(entry)}", state._replace(wal=rest_of, damaged=True), False


# -- what must hold


def problems_of(state: State) -> list[str]:
    """What is wrong in this state."""
    problems = []
    holders: dict[int, str] = {}
    for actor in state.actors:
        if actor.epoch and holders.setdefault(actor.epoch, actor.name) != actor.name:
            problems.append(f"TWO OWNERS: {actor.name} and {holders[actor.epoch]} both hold epoch {actor.epoch}")
        if actor.at == "lost" and not state.damaged:
            problems.append(f"FALSE ALARM: {actor.name} refuses a log that lost nothing")
        if actor.at == "contradicted":
            problems.append(f"CONTRADICTION: {actor.name} found other ends of epochs than the manifest has")
        if state.damaged and actor.epoch > 1:
            problems.append(f"SILENT LOSS: {actor.name} claimed a log with a hole")
    if not state.damaged:
        written = tuple(_written(actor) for actor in state.actors if actor.first >= 0)
        m = state.latest
        problems += _problems(state.wal, m.cursor, m.resume, m.segments, m.last_seen, m.archive, written)
    return problems


def _written(actor: Actor) -> Written:
    return actor.name, actor.epoch, actor.first, actor.acked + len(actor.flights), actor.acked


@cache
def _problems(
    wal: Objects,
    cursor: Point,
    resume: Point,
    segments: tuple[Point, ...],
    last_seen: int,
    archive: tuple[tuple[Point, str, int], ...],
    written: tuple[Written, ...],
) -> list[str]:
    """The log as a reader finds it, against what each writer was told."""
    passed = list(_chain(wal, cursor))
    found = [(point, objects(wal)[point]) for point in passed[:-1]]
    rows = [*archive, *((point, entry.who, entry.number) for point, entry in found if entry.who != SEAL)]
    tip, ends = passed[-1], dict(segments)
    return [
        *_broken_promises(rows, written),
        *_misleading_ends(rows, written, ends),
        *_unwalkable(wal, cursor, resume, last_seen, passed, tip),
    ]


Rows = list[tuple[Point, str, int]]


def _broken_promises(rows: Rows, written: tuple[Written, ...]) -> Iterator[str]:
    """Every acknowledged value is there, once, where it was acknowledged, in its writer's order."""
    places = {(who, number): point for point, who, number in rows}
    acknowledged: dict[int, str] = {}
    if len(places) != len(rows):
        yield f"DOUBLED: {rows}"
    for name, epoch, first, _, acked in written:
        numbers = [number for _, who, number in rows if who == name]
        if numbers != sorted(numbers):
            yield f"OUT OF ORDER: {name}'s puts are read as {numbers}"
        for number in range(acked):
            place, position = places.get((name, number)), first + number
            if place != (epoch, position):
                where = wal_name(place) if place else "nowhere"
                yield f"LOST: {name}{number} was acknowledged at {wal_name((epoch, position))} and is {where}"
            if acknowledged.setdefault(position, name) != name:
                yield f"TWO AT ONE POSITION: {name} and {acknowledged[position]} both acknowledged at {position}"


def _misleading_ends(rows: Rows, written: tuple[Written, ...], ends: dict[int, int]) -> Iterator[str]:
    """Nothing is readable past a seal, and ``segments`` tells what became of every put of a finished epoch."""
    there = {(who, number) for _, who, number in rows}
    for point, who, number in rows:
        if point[1] >= ends.get(point[0], 1 << 30):
            yield f"PAST A SEAL: {who}{number} at {wal_name(point)} is readable, and its epoch ended at {ends[point[0]]}"
    for name, epoch, first, sent, acked in written:
        for number in range(sent):
            if epoch in ends and (first + number < ends[epoch]) != ((name, number) in there):
                yield f"UNTOLD: {name}{number} was put at {wal_name((epoch, first + number))}, and the end {ends[epoch]} tells the opposite"
        if acked and any(older not in ends for older in range(1, epoch)):
            yield f"UNTOLD: {name} acknowledged in epoch {epoch}, and the manifest tells only the ends of {sorted(ends)}"


def _unwalkable(wal: Objects, cursor: Point, resume: Point, last_seen: int, passed: list[Point], tip: Point) -> Iterator[str]:
    """Whoever opens now finds the tip and takes it for one."""
    if covered(wal, last_seen, tip):
        yield f"NOT WALKABLE: from {wal_name(cursor)} the chain ends at {wal_name(tip)}, and that was durable"
    if resume[1] >= cursor[1] and resume not in passed:
        yield f"NOT WALKABLE: resume {wal_name(resume)} is not on the chain from {wal_name(cursor)} to {wal_name(tip)}"


def _chain(wal: Objects, point: Point) -> Iterator[Point]:
    """Every point from the cursor to the tip; the last one holds nothing."""
    yield point
    while (found := objects(wal).get(point)) is not None:
        point = (point[0] + (found.who == SEAL), point[1] + 1)
        yield point
