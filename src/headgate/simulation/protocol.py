"""The programs of the model's actors: what each does next, one store operation at a time.

Owns: the steps. Does not own: states, objects and commits (model), the order of steps (explore).

Each function is one step, named in ``PROGRAM``. It yields every way the step may go: what is
done, the state after it, and whether it could as well be done at any other time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from headgate.simulation.model import (
    SEAL,
    Actor,
    Entry,
    Flight,
    Manifest,
    Point,
    Program,
    Scope,
    State,
    Step,
    committing,
    covered,
    create_entry,
    entry_name,
    load,
    objects,
    repeated,
    wal_name,
    with_actor,
)


def _stays(scope: Scope, state: State, key: Point, entry: Entry | None) -> bool:
    """Will a read of this key find the same for ever?"""
    if entry is None or scope.damage or scope.broken == "collect-seals":
        return False
    if entry.who == SEAL:
        return True
    others = state.actors[1 + scope.claimants :]
    if all(a.at == "done" for a in others if a.name == "collector"):
        return True
    return not scope.broken and key[1] >= state.latest.cursor[1] and all(a.at == "done" for a in others if a.name != "collector")


def _over_seals(scope: Scope, point: Point, segments: tuple[Point, ...]) -> Point:
    ends = dict(segments)
    while ends.get(point[0]) == point[1]:
        if scope.broken == "cursor-on-a-seal":
            return (point[0], point[1] + 1)
        point = (point[0] + 1, point[1] + 1)
    return point


def _past(actor: Actor, entry: Entry) -> Actor:
    epoch, position = actor.point
    if entry.who == SEAL:
        return actor._replace(point=(epoch + 1, position + 1), ends=(*actor.ends, actor.point))
    return actor._replace(point=(epoch, position + 1))


# -- a claimant: survey, claim, walk, verify


def survey_load(scope: Scope, state: State, index: int, actor: Actor) -> Iterator[Step]:
    m, state, half = load(scope, state, index, actor)
    actor = state.actors[index]
    if m is None:
        yield half, with_actor(state, index, actor._replace(at="survey")), False
        return
    known = (m.last_seen, m.epoch, max(m.cursor[1], m.floor))
    after = actor._replace(at="survey.read", known=known, point=m.walk_from(), ends=())
    yield f"surveys from {wal_name(m.walk_from())}, as manifest/{m.version} says", with_actor(state, index, after), False


def survey_read(scope: Scope, state: State, index: int, actor: Actor) -> Iterator[Step]:
    found = objects(state.wal).get(actor.point)
    after = actor._replace(at="survey.missing") if found is None else _past(actor, found)
    label = f"surveys {wal_name(actor.point)}: {entry_name(found)}"
    yield label, with_actor(state, index, after), _stays(scope, state, actor.point, found)


def survey_missing(scope: Scope, state: State, index: int, actor: Actor) -> Iterator[Step]:
    """Only a name missing in an unmoved log is lost."""
    if not covered(state.wal, actor.known[0], actor.point) or scope.broken == "hole-is-tip":
        yield f"takes {wal_name(actor.point)} for the tip", with_actor(state, index, actor._replace(at="claim.load", known=())), False
    else:
        yield f"finds that {wal_name(actor.point)} was durable", with_actor(state, index, actor._replace(at="survey.again")), False


def survey_again(scope: Scope, state: State, index: int, actor: Actor) -> Iterator[Step]:
    found = objects(state.wal).get(actor.point)
    after = actor._replace(at="survey.moved") if found is None else _past(actor, found)._replace(at="survey.read")
    yield f"reads {wal_name(actor.point)} again: {entry_name(found)}", with_actor(state, index, after), False


def survey_moved(scope: Scope, state: State, index: int, actor: Actor) -> Iterator[Step]:
    now, state, half = load(scope, state, index, actor)
    actor = state.actors[index]
    if now is None:
        yield half, state, False
        return
    passed = actor.point[1] if scope.broken == "survey-asks-of-its-point" else actor.known[2]
    moved = now.epoch != actor.known[1] or max(now.cursor[1], now.floor) > passed
    after = actor._replace(at="survey" if moved else "lost", known=(), point=(0, 0), ends=())
    why = "the log moved on, begins again" if moved else f"{wal_name(actor.point)} is lost"
    yield f"loads manifest/{now.version}: {why}", with_actor(state, index, after), False


def claim(scope: Scope, m: Manifest, actor: Actor) -> tuple[Manifest | None, Actor, str]:
    if m.owner == actor.name:
        return None, claimed(scope, actor, m), "the claim is there already"
    return m._replace(epoch=m.epoch + 1, owner=actor.name), actor, ""


def claimed(scope: Scope, actor: Actor, m: Manifest) -> Actor:
    start = m.walk_from()
    point = actor.point if actor.point[1] >= start[1] else start
    return _on(scope, actor._replace(epoch=m.epoch, known=(m.last_seen,), point=point))


def walk(scope: Scope, state: State, index: int, actor: Actor) -> Iterator[Step]:
    found = objects(state.wal).get(actor.point)
    if found is None:
        missing = "walk.missing" if actor.first_seal < 0 else "walk.seal"
        yield f"walks to {wal_name(actor.point)}: nothing", with_actor(state, index, actor._replace(at=missing)), False
        return
    after = _judged(scope, actor, found)
    yield (
        f"walks over {wal_name(actor.point)}: {entry_name(found)}",
        with_actor(state, index, after),
        _stays(scope, state, actor.point, found),
    )


def _judged(scope: Scope, actor: Actor, found: Entry) -> Actor:
    """What stands there counts, whoever's it is; unless a later claimant put it."""
    if found.who == SEAL and found.number > actor.epoch:
        return _ended(actor, "fenced")
    return _on(scope, _past(actor, found))


def _on(scope: Scope, actor: Actor) -> Actor:
    """The walk goes on, or is at its end: in our own epoch."""
    if actor.point[0] < actor.epoch:
        return actor._replace(at="walk")
    return opened(scope, actor) if scope.broken == "no-verify" else actor._replace(at="verify.load", known=())


def _ended(actor: Actor, at: str) -> Actor:
    return actor._replace(at=at, known=(), proposal=None, point=(0, 0), ends=(), first_seal=-1, listed=-1)


def walk_missing(scope: Scope, state: State, index: int, actor: Actor) -> Iterator[Step]:
    """Before the first seal: is this the tip, or a hole?"""
    if not covered(state.wal, actor.known[0], actor.point) or scope.broken == "hole-is-tip":
        yield f"takes {wal_name(actor.point)} for the tip", with_actor(state, index, actor._replace(at="walk.seal")), False
    else:
        yield f"finds that {wal_name(actor.point)} was durable", with_actor(state, index, actor._replace(at="walk.again")), False


def walk_again(scope: Scope, state: State, index: int, actor: Actor) -> Iterator[Step]:
    found = objects(state.wal).get(actor.point)
    after = actor._replace(at="walk.moved" if found is None else "walk.seal")
    yield f"reads {wal_name(actor.point)} again: {entry_name(found)}", with_actor(state, index, after), False


def walk_moved(scope: Scope, state: State, index: int, actor: Actor) -> Iterator[Step]:
    now, state, half = load(scope, state, index, actor)
    actor = state.actors[index]
    if now is None:
        yield half, state, False
    elif now.epoch != actor.epoch:
        yield f"loads manifest/{now.version}: fenced", with_actor(state, index, _ended(actor, "fenced")), False
    elif now.cursor[1] <= actor.point[1]:
        yield f"loads manifest/{now.version}: {wal_name(actor.point)} is lost", with_actor(state, index, _ended(actor, "lost")), False
    else:
        yield (
            f"loads manifest/{now.version}: goes on at the cursor",
            with_actor(state, index, _on(scope, actor._replace(point=now.cursor))),
            False,
        )


def walk_seal(scope: Scope, state: State, index: int, actor: Actor) -> Iterator[Step]:
    seal = Entry(SEAL, actor.epoch, actor.point[1] - 1)
    first = actor.point[1] if actor.first_seal < 0 else actor.first_seal
    if scope.broken == "no-seal":
        after, found = state, seal
    else:
        after, found = create_entry(state, actor.point, seal)
    label = f"seals {wal_name(actor.point)}" if found == seal else f"would seal {wal_name(actor.point)} and finds {entry_name(found)}"
    counts = seal if scope.broken == "occupant-ignored" else found
    went_on = with_actor(after, index, _judged(scope, actor._replace(first_seal=first), counts))
    yield label, went_on, False
    if state.repeats:
        yield f"{label}, and the reply is lost", after._replace(repeats=state.repeats - 1), False
        yield f"{label}, and a copy is under way", repeated(went_on, (actor.point, seal)), False


def verify(scope: Scope, m: Manifest, actor: Actor) -> tuple[Manifest | None, Actor, str]:
    """The epoch still stands and the walk was not led astray: record what it found."""
    if m.epoch != actor.epoch and scope.broken != "no-epoch-check":
        return None, _ended(actor, "fenced"), "fenced"
    if _astray(scope, m, actor):
        again = actor._replace(known=(m.last_seen,), point=m.walk_from(), ends=(), first_seal=-1)
        return None, _on(scope, again), f"trimmed to {wal_name(m.cursor)} under the walk, begins again"
    if scope.broken == "verify-without-commit":
        return None, opened(scope, actor, m), "verified without a commit"
    known = dict(m.segments)
    if any(known.get(epoch, end) != end for epoch, end in actor.ends):
        return None, _ended(actor, "contradicted"), f"its walk {actor.ends} contradicts the ends {m.segments}"
    segments = tuple(sorted((known | dict(actor.ends)).items()))
    cursor = _over_seals(scope, m.cursor, segments)
    last_seen = max(m.last_seen, actor.point[1] - 1)
    return m._replace(segments=segments, cursor=cursor, last_seen=last_seen, resume=actor.point), actor, ""


def _astray(scope: Scope, m: Manifest, actor: Actor) -> bool:
    """Did the walk take a seal for an epoch's end that the manifest knows to be none?

    Such a seal was put, by us or by another slow claimant, where trimmed entries had been collected.
    """
    if scope.broken == "no-cursor-check":
        return False
    if scope.broken == "cursor-check-of-own-seals":
        return -1 < actor.first_seal < m.cursor[1]
    return _contradicts(m, actor)


def _contradicts(m: Manifest, actor: Actor) -> bool:
    """Does an end that the walk met stand below the cursor, in an epoch that did not end there?"""
    known = dict(m.segments)
    return any(known.get(epoch, end) != end or (epoch >= m.cursor[0] and end < m.cursor[1]) for epoch, end in actor.ends)


def opened(scope: Scope, actor: Actor, _: Manifest | None = None) -> Actor:
    return after_append(scope, _ended(actor, "append")._replace(epoch=actor.epoch, first=actor.point[1]))


# -- a writer: append and close


def append(scope: Scope, state: State, index: int, actor: Actor) -> Iterator[Step]:
    in_flight = sum(not flight.landed for flight in actor.flights)
    if actor.left and in_flight < scope.window:
        number = actor.acked + len(actor.flights)
        landed = [flight.position for flight in actor.flights if flight.landed]
        through = actor.first + actor.acked - 1
        if scope.broken == "durable-through-highest":
            through = max([through, *landed])
        flight = Flight(actor.first + number, number, through, False)
        sent = actor._replace(left=actor.left - 1, flights=(*actor.flights, flight))
        if scope.broken == "ack-before-durable":
            sent = after_append(scope, sent._replace(acked=sent.acked + 1, flights=()))
            yield f"sends {actor.name}{number} and acknowledges it", with_actor(state, index, sent), False
        elif scope.window == 1:
            yield from land(scope, state, index, sent, flight)
        else:
            label = f"sends {actor.name}{number} to {wal_name((actor.epoch, flight.position))}, durable through {through}"
            yield label, with_actor(state, index, sent), False
    for flight in actor.flights:
        if not flight.landed:
            yield from land(scope, state, index, actor, flight)


def after_append(scope: Scope, actor: Actor) -> Actor:
    """On to the end, if there is nothing more to write."""
    if actor.left or actor.flights:
        return actor
    return actor._replace(at="close.load" if scope.closing and actor.name == "A" else "done")


def land(scope: Scope, state: State, index: int, actor: Actor, flight: Flight) -> Iterator[Step]:
    key, entry = (actor.epoch, flight.position), Entry(actor.name, flight.number, flight.through)
    after, found = create_entry(state, key, entry)
    what = f"{actor.name}{flight.number} at {wal_name(key)}"
    if found != entry:
        ended = _ended(actor, "fenced" if found.who == SEAL else "poisoned")
        label, went_on = f"puts {what} and finds {entry_name(found)}: {ended.at}", with_actor(after, index, ended)
    else:
        flights = [f if f.position != flight.position else f._replace(landed=True) for f in actor.flights]
        acked = actor.acked
        while flights and flights[0].landed:
            flights.pop(0)
            acked += 1
        label = f"puts {what}, acknowledged through {actor.first + acked - 1}"
        went_on = with_actor(after, index, after_append(scope, actor._replace(flights=tuple(flights), acked=acked)))
    yield label, went_on, found.who == SEAL and _stays(scope, state, key, found)
    if state.repeats:
        yield f"puts {what}, and the reply is lost", with_actor(after, index, actor)._replace(repeats=state.repeats - 1), False
        yield f"puts {what}, and a copy is under way", repeated(went_on, (key, entry)), False


def close(scope: Scope, m: Manifest, actor: Actor) -> tuple[Manifest | None, Actor, str]:
    if m.epoch != actor.epoch:
        return None, _ended(actor, "fenced"), "fenced"
    through = (actor.epoch, actor.first + actor.acked)
    return m._replace(last_seen=max(m.last_seen, through[1] - 1), resume=max(m.resume, through, key=lambda p: p[1])), actor, ""


# -- trim and collect


def trim_load(scope: Scope, state: State, index: int, actor: Actor) -> Iterator[Step]:
    m, state, half = load(scope, state, index, actor)
    if m is None:
        yield half, state, False
        return
    after = state.actors[index]._replace(at="trim.read", left=actor.left - 1, point=m.cursor)
    yield f"begins to archive at {wal_name(m.cursor)}, as manifest/{m.version} says", with_actor(state, index, after), False


def trim_read(scope: Scope, state: State, index: int, actor: Actor) -> Iterator[Step]:
    found = objects(state.wal).get(actor.point)
    if actor.taken or actor.ends:
        yield from PROGRAM["trim.load"](scope, state, index, actor)
    elif found is None:
        yield "finds nothing to archive", with_actor(state, index, _trimmed(scope, actor, state.latest)), False
    if found is not None:
        after = _past(actor, found)
        if found.who != SEAL:
            after = after._replace(taken=(*actor.taken, (actor.point, found.who, found.number)))
        yield f"archives {wal_name(actor.point)}: {entry_name(found)}", with_actor(state, index, after), False


def trim(scope: Scope, m: Manifest, actor: Actor) -> tuple[Manifest | None, Actor, str]:
    before = actor.point[1]
    if before <= m.cursor[1]:
        return None, _trimmed(scope, actor, m), "trimmed already"
    if scope.broken != "trim-trusts-its-walk" and _contradicts(m, actor):
        return None, _trimmed(scope, actor, m), "trimmed by another under its walk, gives up"
    segments = m.segments if scope.broken == "trim-forgets-ends" else tuple(sorted((dict(m.segments) | dict(actor.ends)).items()))
    archive = m.archive + tuple(row for row in actor.taken if row[0][1] >= m.cursor[1])
    return m._replace(cursor=_over_seals(scope, actor.point, segments), segments=segments, archive=archive), actor, ""


def _trimmed(scope: Scope, actor: Actor, m: Manifest) -> Actor:
    return Actor(actor.name, "trim" if actor.left else "done", left=actor.left, seen_version=actor.seen_version)


def collect_list(scope: Scope, state: State, index: int, actor: Actor) -> Iterator[Step]:
    listed = tuple(key for key, entry in state.wal if entry.who != SEAL or scope.broken == "collect-seals")
    void: tuple[Point, ...] = ()
    if scope.broken == "past-first-seal-is-void":
        seals: dict[int, int] = {}
        for key, entry in state.wal:
            if entry.who == SEAL:
                seals.setdefault(*key)
        void = tuple(key for key in listed if key[1] > seals.get(key[0], 99))
    after = actor._replace(at="floor.load", left=actor.left - 1, todo=listed, ends=void)
    yield f"lists {', '.join(map(wal_name, listed)) or 'nothing'}", with_actor(state, index, after), False


def raise_floor(scope: Scope, m: Manifest, actor: Actor) -> tuple[Manifest | None, Actor, str]:
    if m.cursor[1] > m.floor:
        return m._replace(floor=m.cursor[1]), actor, ""
    return None, floor_raised(scope, actor, m), f"the floor is {m.floor}"


def floor_raised(scope: Scope, actor: Actor, m: Manifest) -> Actor:
    dead = tuple(key for key in actor.todo if key[1] < m.floor or key in actor.ends)
    return _collected(actor._replace(at="delete", todo=dead, ends=()))


def _collected(actor: Actor) -> Actor:
    return actor if actor.todo else actor._replace(at="collect" if actor.left else "done")


def delete(scope: Scope, state: State, index: int, actor: Actor) -> Iterator[Step]:
    for key in actor.todo:
        rest = tuple(row for row in state.wal if row[0] != key)
        after = _collected(actor._replace(todo=tuple(other for other in actor.todo if other != key)))
        yield f"deletes {wal_name(key)}", with_actor(state._replace(wal=rest), index, after), rest == state.wal and len(actor.todo) == 1


def committed(at: str) -> Callable[[Scope, Actor, Manifest], Actor]:
    return lambda scope, actor, m: _ended(actor, at)


PROGRAM: dict[str, Program] = {
    "start": survey_load,
    "survey": survey_load,
    "survey.read": survey_read,
    "survey.missing": survey_missing,
    "survey.again": survey_again,
    "survey.moved": survey_moved,
    **committing("claim", claim, claimed),
    "walk": walk,
    "walk.missing": walk_missing,
    "walk.again": walk_again,
    "walk.moved": walk_moved,
    "walk.seal": walk_seal,
    **committing("verify", verify, opened),
    "append": append,
    **committing("close", close, committed("done")),
    "trim": trim_load,
    "trim.read": trim_read,
    **committing("trim", trim, _trimmed),
    "collect": collect_list,
    **committing("floor", raise_floor, floor_raised),
    "delete": delete,
}
