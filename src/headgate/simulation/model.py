"""The pure protocol of fencing, as a table of steps over immutable states.

Owns: states, objects, and how a manifest is loaded and committed. Does not own: the actors' steps
(protocol), their order (explore takes them all) or the judgement (explore). Nothing here is random
and nothing is the real code: it is the rules of ``wal.fence``, ``wal.collect``, ``wal.appender`` and
``manifest.chain`` again, small enough that every interleaving of a small scope can be visited.

    python -m headgate.simulation.model [--scope small|large] [--break RULE]

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
- A load is LIST, GET, and a LIST that finds the same name highest; else it begins again. What was the
  highest throughout was not collected and made again by a late copy, so it is one step, the last.
- B takes its first step before C: they run the same program under other names.
- A step that changes no object, and whose outcome nothing can change any more (reading a seal,
  which is never deleted; learning what became of a create), is taken at once and alone. Taken later
  it leads to the same place. ``Scope.reduced`` turns this off, and a test compares.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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
    "trim-trusts-its-walk": "trim does not ask whether another trimmed under its walk",
    "durable-through-highest": "an entry tells the highest position known durable, not the whole prefix",
    "probe-for-latest": "the latest manifest is found by probing the next name",
    "trust-the-create": "a manifest create that succeeds is taken for a commit",
    "latest-from-one-list": "the highest name of a LIST is read, and no second LIST says that it still is the highest",
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
    collected_last: bool = False
    """The collector begins when a trimmer has ended; else at any time."""
    repeats: int = 0
    """Requests whose reply is lost or of which a second copy arrives later."""
    manifests_collected: bool = False
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
        return self.reduced and not self.manifests_collected


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
Request = tuple[Point, Entry | Manifest]


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


def covered(wal: Objects, last_seen: int, missing: Point) -> bool:
    """Did anybody know the missing entry durable?"""
    return last_seen >= missing[1] or any(key > missing and entry.through >= missing[1] for key, entry in wal)


def wal_name(key: Point) -> str:
    return f"wal/{key[0]}/{key[1]}"


def entry_name(entry: Entry | None) -> str:
    if entry is None:
        return "nothing"
    return f"the seal of epoch {entry.number}" if entry.who == SEAL else f"{entry.who}{entry.number}"


def with_actor(state: State, index: int, actor: Actor) -> State:
    return state._replace(actors=(*state.actors[:index], actor, *state.actors[index + 1 :]))


def repeated(state: State, request: Request) -> State:
    return state._replace(repeats=state.repeats - 1, flying=tuple(sorted((*state.flying, request), key=repr)))


# -- manifests: load, and commit in three steps


def load(scope: Scope, state: State, index: int, actor: Actor) -> tuple[Manifest | None, State, str]:
    """The latest manifest; or None, the state after half a load and what was done."""
    if scope.broken == "probe-for-latest":
        versions = dict(state.manifests)
        version = actor.seen_version or state.latest.version
        while version + 1 in versions:
            version += 1
        if version in versions:
            return versions[version], with_actor(state, index, actor._replace(seen_version=version)), ""
        return state.latest, state, ""  # gone: one that knows nothing lists
    if scope.broken != "latest-from-one-list":
        return state.latest, state, ""
    if actor.listed < 0:
        version = state.latest.version
        return None, with_actor(state, index, actor._replace(listed=version)), f"lists the manifests, the highest is {version}"
    found = dict(state.manifests).get(actor.listed)
    after = with_actor(state, index, actor._replace(listed=-1))
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
            yield f"loads manifest/{manifest.version}: {why}", with_actor(state, index, actor), False
            return
        if scope.commits_whole:
            changed = changed._replace(version=manifest.version + 1)
            done = with_actor(create_manifest(state, changed)[0], index, then(scope, actor, changed))
            yield f"commits manifest/{changed.version}: {what}", done, False
            return
        history = (*manifest.history, (manifest.version, manifest.id)) if manifest.id else manifest.history
        changed = changed._replace(version=manifest.version + 1, id=f"{actor.name}.{what}", history=history)
        yield (
            f"loads manifest/{manifest.version} to {what}",
            with_actor(state, index, actor._replace(at=f"{what}.create", proposal=changed)),
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
            yield label, with_actor(after, index, then_), False
            return
        checking = with_actor(after, index, actor._replace(at=f"{what}.check"))
        yield label, checking, False
        if state.repeats:
            yield f"{label}, and the reply is lost", after._replace(repeats=state.repeats - 1), False
            yield f"{label}, and a copy is under way", repeated(checking, ((proposal.version, 0), proposal)), False

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
        sure = scope.broken not in ("probe-for-latest", "latest-from-one-list")
        yield (
            f"reads manifest/{latest.version}: its {what} {'happened' if happened else 'did not happen'}",
            with_actor(state, index, after),
            sure,
        )

    return {f"{what}.load": loading, f"{what}.create": creating, f"{what}.check": checking}


def main(arguments: list[str] | None = None) -> int:
    """Explore a scope and say what was found; or break one rule and show what comes of it."""
    from headgate.simulation.explore import BROKEN, LARGE, SMALL, explore

    parser = argparse.ArgumentParser(prog="python -m headgate.simulation.model", description="All interleavings of the fencing protocol.")
    parser.add_argument("--scope", choices=["small", "large"], default="small", help="how much of everything there is")
    parser.add_argument("--break", dest="rule", choices=sorted(RULES), metavar="RULE", help="switch one rule off: " + ", ".join(RULES))
    options = parser.parse_args(arguments)
    if options.rule:
        kind, scope = BROKEN[options.rule]
        found = explore(replace(scope, broken=options.rule), kind=kind)
        print(f"{options.rule}: {RULES[options.rule]}", *found.trace, found.violation or "no violation", sep="\n")
        print(f"{found.states:,} states, {found.seconds:.1f} s")
        return 0 if found.violation else 1
    for name, scope in (SMALL if options.scope == "small" else LARGE).items():
        found = explore(scope)
        print(
            f"{name:16} {found.states:>10,} states {found.steps:>10,} steps {found.seconds:7.1f} s  {found.violation or 'holds'}",
            flush=True,
        )
        if found.violation:
            print(*found.trace, sep="\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
