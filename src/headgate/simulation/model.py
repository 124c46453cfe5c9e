"""The pure protocol of fencing, as a table of steps over immutable states.

Owns: what each actor does next, one store operation at a time. Does not own: the order (explore
takes them all) or the judgement (explore). Nothing here is random and nothing is the real code:
it is the rules of ``wal.fence``, ``wal.collect``, ``wal.appender`` and ``manifest.chain`` again,
small enough that every interleaving of a small scope can be visited.

A state is the objects of the store, what is still under way in the network, and for every actor
its next step and what it remembers. The incumbent A is open in epoch 1. B and C survey, claim,
walk, seal, verify and append. A trimmer archives a prefix and moves the cursor over it; a
collector lists, commits the floor and deletes. Old manifest versions vanish at any time.

What makes the number of states small, and why nothing is lost by it:

- A crash is an actor that never gets its turn again. What must hold is asked in every state, so
  every crash at every step is included without a step of its own.
- A request may be repeated: its reply is lost and the actor sends it again, or a copy of it
  arrives at any later time. A request that is merely late is a step that is taken late.
- A create that finds its name taken reads what stands there in the same step: if that were
  collected in between, the create would be sent again, which is this step taken later.
- LIST and GETs of the search for evidence are one step. What vanishes between them is below the
  cursor, and then verify turns the walk back whatever the search said.
- Ids that nobody waits for are forgotten, and so are names of old manifests that nobody is about to
  create or to read: nobody could tell the difference.
- Where no manifest is ever collected, a commit is one step: its create fails if anything was
  committed since its load, and then nothing has happened.
- B takes its first step before C: they run the same program under other names.
- A step that changes no object, and whose outcome nothing can change any more (reading a seal,
  which is never deleted; learning what became of a create), is taken at once and alone. Taken later
  it leads to the same place. ``Scope.reduced`` turns this off, and a test compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

Point = tuple[int, int]
SEAL = "seal"

RULES = {
    "no-verify": "a claimant appends after its walk without looking at the manifest again",
    "verify-without-commit": "verify looks at the manifest and commits nothing",
    "no-epoch-check": "verify does not ask whether the epoch moved on",
    "no-cursor-check": "verify does not ask whether the log was trimmed under the walk",
    "cursor-check-of-own-seals": "verify asks it of the seals we put, not of those we met",
    "no-seal": "the walk passes the tip of an older epoch without a seal",
    "occupant-ignored": "an entry found where the seal should go is taken for the seal",
    "collect-seals": "collection deletes seals too",
    "past-first-seal-is-void": "collection deletes what lies past the first seal of an epoch's folder",
    "cursor-on-a-seal": "the cursor moves over a seal as if it were data",
    "trim-forgets-ends": "trim does not record the ends of epochs it passes",
    "durable-through-highest": "an entry tells the highest position known durable, not the whole prefix",
    "probe-for-latest": "the latest manifest is found by probing the next name",
    "trust-the-create": "a manifest create that succeeds is taken for a commit",
    "survey-asks-of-its-point": "a survey that finds a hole asks whether the log was trimmed past it, not whether it was trimmed",
    "hole-is-tip": "a missing entry is the tip, whatever later entries say",
    "ack-before-durable": "a put is acknowledged when it is sent",
}


@dataclass(frozen=True)
class Scope:
    """How much there is of everything."""

    puts: tuple[int, ...] = (1, 1, 1)
    """Of the incumbent and of each claimant."""
    window: int = 1
    """Puts in flight at once."""
    trimmers: int = 1
    trims: int = 1
    """Of each trimmer."""
    collections: int = 1
    repeats: int = 0
    """Requests whose reply is lost or of which a second copy arrives later."""
    manifests_collected: bool = False
    listing_apart: bool = False
    """A load is a LIST and a GET, two steps; else one."""
    closing: bool = False
    """The incumbent records what it acknowledged when it has written everything."""
    damage: bool = False
    """An entry that others cover disappears before anybody claims."""
    reduced: bool = True
    broken: str = ""

    @property
    def claimants(self) -> int:
        return len(self.puts) - 1

    @property
    def commits_whole(self) -> bool:
        return self.reduced and not self.manifests_collected and not self.listing_apart


class Entry(NamedTuple):
    """A WAL object. A seal's ``who`` is SEAL and its ``number`` the epoch that put it."""

    who: str
    number: int
    through: int


class Manifest(NamedTuple):
    version: int
    id: str
    history: tuple[tuple[int, str], ...]
    epoch: int
    owner: str
    cursor: Point
    segments: tuple[Point, ...]
    last_seen: int
    floor: int
    resume: Point
    archive: tuple[tuple[Point, str, int], ...]
    """What was given up, copied before: the rows that a flush would have put into runs."""

    def walk_from(self) -> Point:
        return self.resume if self.resume[1] >= self.cursor[1] else self.cursor


class Flight(NamedTuple):
    position: int
    number: int
    through: int
    landed: bool


class Actor(NamedTuple):
    """Where a program stands (``at``) and what it remembers. What it no longer needs is reset."""

    name: str
    at: str
    left: int = 0
    """Rounds, or puts, still to do."""
    listed: int = -1
    known: tuple[int, ...] = ()
    """Of the manifest in hand: its last seen position; in the survey its epoch and how far it was trimmed too."""
    proposal: Manifest | None = None
    point: Point = (0, 0)
    ends: tuple[Point, ...] = ()
    first_seal: int = -1
    epoch: int = 0
    first: int = -1
    acked: int = 0
    flights: tuple[Flight, ...] = ()
    todo: tuple[Point, ...] = ()
    taken: tuple[tuple[Point, str, int], ...] = ()
    seen_version: int = 0
    """Only for the prober: the version it knows."""


Objects = tuple[tuple[Point, Entry], ...]
Versions = tuple[tuple[int, Manifest | None], ...]
Request = tuple[str, Point, Entry | Manifest]


class State(NamedTuple):
    wal: Objects
    manifests: Versions
    """By version; the content only of those that somebody may still read."""
    flying: tuple[Request, ...]
    repeats: int
    damaged: bool
    actors: tuple[Actor, ...]

    @property
    def latest(self) -> Manifest:
        found = self.manifests[-1][1]
        assert found is not None
        return found


Step = tuple[str, State, bool]
"""What was done, what came of it, and whether it could as well be done at any other time."""


def initial(scope: Scope) -> State:
    first = Manifest(1, "", (), 1, "A", (1, 0), (), -1, 0, (1, 0), ())
    actors = [_written(scope, Actor("A", "append", left=scope.puts[0], epoch=1, first=0, seen_version=1))]
    actors += [Actor(name, "start", left=puts) for name, puts in zip("BCD", scope.puts[1:])]
    actors += [Actor(f"trimmer{n or ''}", "trim", left=scope.trims) for n in range(scope.trimmers) if scope.trims]
    actors += [Actor("collector", "collect", left=scope.collections)] if scope.collections else []
    return State((), ((1, first),), (), scope.repeats, False, tuple(actors))


def successors(scope: Scope, state: State) -> list[tuple[str, State]]:
    """Every step that can be taken, and where it leads."""
    every: list[tuple[str, State]] = []
    for index, actor in enumerate(state.actors):
        program = PROGRAM.get(actor.at)
        if program is None or (actor.at == "start" and _in_turn(scope, state, index)):
            continue
        steps = list(program(scope, state, index, actor))
        if scope.reduced and len(steps) == 1 and steps[0][2]:
            return [(f"{actor.name}: {steps[0][0]}", forget(scope, steps[0][1]))]
        every += [(f"{actor.name}: {label}", forget(scope, after)) for label, after, _ in steps]
    every += [(label, forget(scope, after)) for label, after, _ in environment(scope, state)]
    return every


def _in_turn(scope: Scope, state: State, index: int) -> bool:
    """Must this claimant wait, because one that is the same but for its name has not begun?"""
    return index > 1 and scope.puts[index] == scope.puts[index - 1] and state.actors[index - 1].at == "start"


def forget(scope: Scope, state: State) -> State:
    """Without what nobody can tell any more: ids, and old manifests, that no actor waits for."""
    latest = state.latest
    if scope.broken == "probe-for-latest" or not (latest.id or latest.history or len(state.manifests) > 1):
        return state
    waited = {(a.proposal.version, a.proposal.id) for a in state.actors if a.proposal is not None}
    sought = {version for version, _ in waited} | {r[1][0] for r in state.flying if r[0] == "manifest"}
    listed = {a.listed for a in state.actors if a.listed >= 0}
    kept = tuple((v, m if v in listed else None) for v, m in state.manifests[:-1] if v in sought or v in listed)
    history = tuple(pair for pair in latest.history if pair in waited)
    name = latest.id if (latest.version, latest.id) in waited else ""
    if history != latest.history or name != latest.id:
        latest = latest._replace(id=name, history=history)
    return state._replace(manifests=(*kept, (latest.version, latest)))


# -- the store


@cache
def objects(wal: Objects) -> dict[Point, Entry]:
    return dict(wal)


def create_entry(state: State, key: Point, entry: Entry) -> tuple[State, Entry]:
    """Put-if-absent: the state after it, and what stands there then."""
    found = objects(state.wal).get(key)
    if found is not None:
        return state, found
    return state._replace(wal=tuple(sorted((*state.wal, (key, entry))))), entry


def create_manifest(state: State, manifest: Manifest) -> tuple[State, bool]:
    if any(version == manifest.version for version, _ in state.manifests):
        return state, False
    added = sorted((*state.manifests, (manifest.version, manifest)), key=lambda row: row[0])
    return state._replace(manifests=tuple(added)), True


def environment(scope: Scope, state: State) -> Iterator[Step]:
    """What happens without an actor: late copies arrive, old manifests are collected, an entry is lost."""
    for request in state.flying:
        kind, key, body = request
        flying = list(state.flying)
        flying.remove(request)
        after = state._replace(flying=tuple(flying))
        if isinstance(body, Manifest):
            yield f"network: a late copy of manifest/{key[0]} arrives", create_manifest(after, body)[0], False
        else:
            yield f"network: a late copy of {_named(body)} arrives at {_wal(key)}", create_entry(after, key, body)[0], False
    if scope.manifests_collected:
        for row in state.manifests[:-1]:
            rest = tuple(other for other in state.manifests if other is not row)
            yield f"manifest/{row[0]} is collected", state._replace(manifests=rest), False
    if scope.damage and not state.damaged and all(a.at == "start" for a in state.actors[1 : 1 + scope.claimants]):
        for key, entry in state.wal:
            rest_of = tuple(row for row in state.wal if row[0] != key)
            if entry.who != SEAL and key[1] >= state.latest.walk_from()[1] and covered(rest_of, state.latest.last_seen, key):
                yield f"store: loses {_wal(key)}, {_named(entry)}", state._replace(wal=rest_of, damaged=True), False


def covered(wal: Objects, last_seen: int, missing: Point) -> bool:
    """Did anybody know the missing entry durable?"""
    return last_seen >= missing[1] or any(key > missing and entry.through >= missing[1] for key, entry in wal)


def _wal(key: Point) -> str:
    return f"wal/{key[0]}/{key[1]}"


def _named(entry: Entry | None) -> str:
    if entry is None:
        return "nothing"
    return f"the seal of epoch {entry.number}" if entry.who == SEAL else f"{entry.who}{entry.number}"


def _set(state: State, index: int, actor: Actor) -> State:
    return state._replace(actors=(*state.actors[:index], actor, *state.actors[index + 1 :]))


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


def _repeated(state: State, request: Request) -> State:
    return state._replace(repeats=state.repeats - 1, flying=tuple(sorted((*state.flying, request), key=repr)))


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


# -- manifests: load, and commit in three steps


def load(scope: Scope, state: State, index: int, actor: Actor) -> tuple[Manifest | None, State, str]:
    """The latest manifest; or None, the state after half a load and what was done."""
    if scope.broken == "probe-for-latest":
        versions = dict(state.manifests)
        version = actor.seen_version or state.latest.version
        while version + 1 in versions:
            version += 1
        if version in versions:
            return versions[version], _set(state, index, actor._replace(seen_version=version)), ""
        return state.latest, state, ""  # gone: one that knows nothing lists
    if not scope.listing_apart:
        return state.latest, state, ""
    if actor.listed < 0:
        version = state.latest.version
        return None, _set(state, index, actor._replace(listed=version)), f"lists the manifests, the highest is {version}"
    found = dict(state.manifests).get(actor.listed)
    after = _set(state, index, actor._replace(listed=-1))
    return (found, after, "") if found is not None else (None, after, f"finds manifest/{actor.listed} collected, lists again")


Program = Callable[[Scope, State, int, Actor], Iterator[Step]]
Change = Callable[[Scope, Manifest, Actor], tuple[Manifest | None, Actor, str]]
"""The changed manifest; or None, the actor that goes on without a commit, and why."""


def committing(what: str, change: Change, then: Callable[[Scope, Actor, Manifest], Actor]) -> dict[str, Program]:
    """The three steps of a commit. ``then``: how the actor goes on after it."""

    def loading(scope: Scope, state: State, index: int, actor: Actor) -> Iterator[Step]:
        manifest, state, half = load(scope, state, index, actor)
        actor = state.actors[index]
        if manifest is None:
            yield half, state, False
            return
        changed, actor, why = change(scope, manifest, actor)
        if changed is None:
            yield f"loads manifest/{manifest.version}: {why}", _set(state, index, actor), False
            return
        if scope.commits_whole:
            changed = changed._replace(version=manifest.version + 1)
            done = _set(create_manifest(state, changed)[0], index, then(scope, actor, changed))
            yield f"commits manifest/{changed.version}: {what}", done, False
            return
        history = (*manifest.history, (manifest.version, manifest.id)) if manifest.id else manifest.history
        changed = changed._replace(version=manifest.version + 1, id=f"{actor.name}.{what}", history=history)
        yield (
            f"loads manifest/{manifest.version} to {what}",
            _set(state, index, actor._replace(at=f"{what}.create", proposal=changed)),
            False,
        )

    def creating(scope: Scope, state: State, index: int, actor: Actor) -> Iterator[Step]:
        proposal = actor.proposal
        assert proposal is not None
        after, created = create_manifest(state, proposal)
        label = f"creates manifest/{proposal.version} ({what}): {'made' if created else 'the name is taken'}"
        if scope.broken == "trust-the-create":
            gone = actor._replace(proposal=None)
            then_ = then(scope, gone, proposal) if created else gone._replace(at=f"{what}.load")
            yield label, _set(after, index, then_), False
            return
        checking = _set(after, index, actor._replace(at=f"{what}.check"))
        yield label, checking, False
        if state.repeats:
            yield f"{label}, and the reply is lost", after._replace(repeats=state.repeats - 1), False
            yield f"{label}, and a copy is under way", _repeated(checking, ("manifest", (proposal.version, 0), proposal)), False

    def checking(scope: Scope, state: State, index: int, actor: Actor) -> Iterator[Step]:
        latest, state, half = load(scope, state, index, actor)
        actor, proposal = state.actors[index], actor.proposal
        if latest is None:
            yield half, state, False
            return
        assert proposal is not None
        ours = (proposal.version, proposal.id)
        happened = ours == (latest.version, latest.id) or ours in latest.history
        gone = actor._replace(proposal=None)
        after = then(scope, gone, proposal) if happened else gone._replace(at=f"{what}.load")
        sure = not scope.listing_apart and scope.broken != "probe-for-latest"
        yield f"reads manifest/{latest.version}: its {what} {'happened' if happened else 'did not happen'}", _set(state, index, after), sure

    return {f"{what}.load": loading, f"{what}.create": creating, f"{what}.check": checking}


# -- a claimant: survey, claim, walk, verify


def survey_load(scope: Scope, state: State, index: int, actor: Actor) -> Iterator[Step]:
    m, state, half = load(scope, state, index, actor)
    actor = state.actors[index]
    if m is None:
        yield half, state._replace(actors=_set(state, index, actor._replace(at="survey")).actors), False
        return
    known = (m.last_seen, m.epoch, max(m.cursor[1], m.floor))
    after = actor._replace(at="survey.read", known=known, point=m.walk_from(), ends=())
    yield f"surveys from {_wal(m.walk_from())}, as manifest/{m.version} says", _set(state, index, after), False


def survey_read(scope: Scope, state: State, index: int, actor: Actor) -> Iterator[Step]:
    found = objects(state.wal).get(actor.point)
    after = actor._replace(at="survey.missing") if found is None else _past(actor, found)
    yield f"surveys {_wal(actor.point)}: {_named(found)}", _set(state, index, after), _stays(scope, state, actor.point, found)


def survey_missing(scope: Scope, state: State, index: int, actor: Actor) -> Iterator[Step]:
    """Only a name missing in an unmoved log is lost."""
    if not covered(state.wal, actor.known[0], actor.point) or scope.broken == "hole-is-tip":
        yield f"takes {_wal(actor.point)} for the tip", _set(state, index, actor._replace(at="claim.load", known=())), False
    else:
        yield f"finds that {_wal(actor.point)} was durable", _set(state, index, actor._replace(at="survey.again")), False


def survey_again(scope: Scope, state: State, index: int, actor: Actor) -> Iterator[Step]:
    found = objects(state.wal).get(actor.point)
    after = actor._replace(at="survey.moved") if found is None else _past(actor, found)._replace(at="survey.read")
    yield f"reads {_wal(actor.point)} again: {_named(found)}", _set(state, index, after), False


def survey_moved(scope: Scope, state: State, index: int, actor: Actor) -> Iterator[Step]:
    now, state, half = load(scope, state, index, actor)
    actor = state.actors[index]
    if now is None:
        yield half, state, False
        return
    passed = actor.point[1] if scope.broken == "survey-asks-of-its-point" else actor.known[2]
    moved = now.epoch != actor.known[1] or max(now.cursor[1], now.floor) > passed
    after = actor._replace(at="survey" if moved else "lost", known=(), point=(0, 0), ends=())
    why = "the log moved on, begins again" if moved else f"{_wal(actor.point)} is lost"
    yield f"loads manifest/{now.version}: {why}", _set(state, index, after), False


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
        yield f"walks to {_wal(actor.point)}: nothing", _set(state, index, actor._replace(at=missing)), False
        return
    after = _judged(scope, actor, found)
    yield f"walks over {_wal(actor.point)}: {_named(found)}", _set(state, index, after), _stays(scope, state, actor.point, found)


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
        yield f"takes {_wal(actor.point)} for the tip", _set(state, index, actor._replace(at="walk.seal")), False
    else:
        yield f"finds that {_wal(actor.point)} was durable", _set(state, index, actor._replace(at="walk.again")), False


def walk_again(scope: Scope, state: State, index: int, actor: Actor) -> Iterator[Step]:
    found = objects(state.wal).get(actor.point)
    after = actor._replace(at="walk.moved" if found is None else "walk.seal")
    yield f"reads {_wal(actor.point)} again: {_named(found)}", _set(state, index, after), False


def walk_moved(scope: Scope, state: State, index: int, actor: Actor) -> Iterator[Step]:
    now, state, half = load(scope, state, index, actor)
    actor = state.actors[index]
    if now is None:
        yield half, state, False
    elif now.epoch != actor.epoch:
        yield f"loads manifest/{now.version}: fenced", _set(state, index, _ended(actor, "fenced")), False
    elif now.cursor[1] <= actor.point[1]:
        yield f"loads manifest/{now.version}: {_wal(actor.point)} is lost", _set(state, index, _ended(actor, "lost")), False
    else:
        yield f"loads manifest/{now.version}: goes on at the cursor", _set(state, index, _on(scope, actor._replace(point=now.cursor))), False


def walk_seal(scope: Scope, state: State, index: int, actor: Actor) -> Iterator[Step]:
    seal = Entry(SEAL, actor.epoch, actor.point[1] - 1)
    first = actor.point[1] if actor.first_seal < 0 else actor.first_seal
    if scope.broken == "no-seal":
        after, found = state, seal
    else:
        after, found = create_entry(state, actor.point, seal)
    label = f"seals {_wal(actor.point)}" if found == seal else f"would seal {_wal(actor.point)} and finds {_named(found)}"
    counts = seal if scope.broken == "occupant-ignored" else found
    went_on = _set(after, index, _judged(scope, actor._replace(first_seal=first), counts))
    yield label, went_on, False
    if state.repeats:
        yield f"{label}, and the reply is lost", after._replace(repeats=state.repeats - 1), False
        yield f"{label}, and a copy is under way", _repeated(went_on, ("entry", actor.point, seal)), False


def verify(scope: Scope, m: Manifest, actor: Actor) -> tuple[Manifest | None, Actor, str]:
    """The epoch still stands and the walk was not led astray: record what it found."""
    if m.epoch != actor.epoch and scope.broken != "no-epoch-check":
        return None, _ended(actor, "fenced"), "fenced"
    if _astray(scope, m, actor):
        again = actor._replace(known=(m.last_seen,), point=m.walk_from(), ends=(), first_seal=-1)
        return None, _on(scope, again), f"trimmed to {_wal(m.cursor)} under the walk, begins again"
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
    known = dict(m.segments)
    return any(known.get(epoch, end) != end or (epoch >= m.cursor[0] and end < m.cursor[1]) for epoch, end in actor.ends)


def opened(scope: Scope, actor: Actor, _: Manifest | None = None) -> Actor:
    return _written(scope, _ended(actor, "append")._replace(epoch=actor.epoch, first=actor.point[1]))


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
            sent = _written(scope, sent._replace(acked=sent.acked + 1, flights=()))
            yield f"sends {actor.name}{number} and acknowledges it", _set(state, index, sent), False
        elif scope.window == 1:
            yield from land(scope, state, index, sent, flight)
        else:
            label = f"sends {actor.name}{number} to {_wal((actor.epoch, flight.position))}, durable through {through}"
            yield label, _set(state, index, sent), False
    for flight in actor.flights:
        if not flight.landed:
            yield from land(scope, state, index, actor, flight)


def _written(scope: Scope, actor: Actor) -> Actor:
    """On to the end, if there is nothing more to write."""
    if actor.left or actor.flights:
        return actor
    return actor._replace(at="close.load" if scope.closing and actor.name == "A" else "done")


def land(scope: Scope, state: State, index: int, actor: Actor, flight: Flight) -> Iterator[Step]:
    key, entry = (actor.epoch, flight.position), Entry(actor.name, flight.number, flight.through)
    after, found = create_entry(state, key, entry)
    what = f"{actor.name}{flight.number} at {_wal(key)}"
    if found != entry:
        ended = _ended(actor, "fenced" if found.who == SEAL else "poisoned")
        label, went_on = f"puts {what} and finds {_named(found)}: {ended.at}", _set(after, index, ended)
    else:
        flights = [f if f.position != flight.position else f._replace(landed=True) for f in actor.flights]
        acked = actor.acked
        while flights and flights[0].landed:
            flights.pop(0)
            acked += 1
        label = f"puts {what}, acknowledged through {actor.first + acked - 1}"
        went_on = _set(after, index, _written(scope, actor._replace(flights=tuple(flights), acked=acked)))
    yield label, went_on, found.who == SEAL and _stays(scope, state, key, found)
    if state.repeats:
        yield f"puts {what}, and the reply is lost", _set(after, index, actor)._replace(repeats=state.repeats - 1), False
        yield f"puts {what}, and a copy is under way", _repeated(went_on, ("entry", key, entry)), False


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
    yield f"begins to archive at {_wal(m.cursor)}, as manifest/{m.version} says", _set(state, index, after), False


def trim_read(scope: Scope, state: State, index: int, actor: Actor) -> Iterator[Step]:
    found = objects(state.wal).get(actor.point)
    if actor.taken or actor.ends:
        yield from PROGRAM["trim.load"](scope, state, index, actor)
    elif found is None:
        yield "finds nothing to archive", _set(state, index, _trimmed(scope, actor, state.latest)), False
    if found is not None:
        after = _past(actor, found)
        if found.who != SEAL:
            after = after._replace(taken=(*actor.taken, (actor.point, found.who, found.number)))
        yield f"archives {_wal(actor.point)}: {_named(found)}", _set(state, index, after), False


def trim(scope: Scope, m: Manifest, actor: Actor) -> tuple[Manifest | None, Actor, str]:
    before = actor.point[1]
    if before <= m.cursor[1]:
        return None, _trimmed(scope, actor, m), "trimmed already"
    known = dict(m.segments)
    if any(known.get(epoch, end) != end or (epoch >= m.cursor[0] and end < m.cursor[1]) for epoch, end in actor.ends):
        return None, _trimmed(scope, actor, m), "trimmed by another under its walk, gives up"
    segments = m.segments if scope.broken == "trim-forgets-ends" else tuple(sorted((known | dict(actor.ends)).items()))
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
    yield f"lists {', '.join(map(_wal, listed)) or 'nothing'}", _set(state, index, after), False


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
        yield f"deletes {_wal(key)}", _set(state._replace(wal=rest), index, after), rest == state.wal and len(actor.todo) == 1


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
