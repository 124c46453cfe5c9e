"""The protocol's model: every interleaving of the small scopes holds, and every rule that is taken away is missed."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace

import pytest

from headgate.simulation.explore import BROKEN, SMALL, explore, visible
from headgate.simulation.model import RULES, Scope

WIDE = {"survey-asks-of-its-point", "trim-trusts-its-walk"}
"""Their scopes are large; that they hold is shown by the scopes of the same kind in a large run."""

_LINE = re.compile(r" *\d+  (A|B|C|trimmer\d?|collector|network|store|manifest)\b.*")


def test_every_interleaving_of_the_small_scopes_holds() -> None:
    states = 0
    for name, scope in SMALL.items():
        found = explore(scope)
        print(f"{name}: {found.states} states, {found.steps} steps, {found.seconds:.1f} s")
        assert not found.violation, "\n".join([name, *found.trace, found.violation])
        assert found.complete
        states += found.states
    print(f"{states} states")
    assert states > 50_000, "so few states show nothing"


@pytest.mark.parametrize(
    "scope", sorted({scope for rule, (_, scope) in BROKEN.items() if rule not in WIDE}, key=repr), ids=lambda s: str(s.puts)
)
def test_the_scope_that_shows_a_broken_rule_holds_while_all_rules_stand(scope: Scope) -> None:
    found = explore(scope)

    assert found.complete
    assert not found.violation, "\n".join([*found.trace, found.violation])


@pytest.mark.parametrize("rule", [pytest.param(rule, marks=pytest.mark.slow if rule in WIDE else ()) for rule in RULES])
def test_a_broken_rule_is_found(rule: str) -> None:
    kind, scope = BROKEN[rule]

    found = explore(replace(scope, broken=rule), kind=kind)

    print(*found.trace, found.violation, f"{found.states} states, {found.seconds:.1f} s", sep="\n")
    assert found.violation.startswith(kind), f"{rule} went unnoticed in {found.states} states"
    assert found.violation
    assert all(_LINE.fullmatch(line) for line in found.trace), "who did what to which object"
    assert found.trace[0].startswith("  1  ")


def test_the_trace_of_a_claimant_that_was_trimmed_under_tells_the_story() -> None:
    kind, scope = BROKEN["no-cursor-check"]

    found = explore(replace(scope, broken="no-cursor-check"), kind=kind)

    story = "\n".join(found.trace)
    told = ["A: puts A0 at wal/1/0", "trimmer: archives wal/1/0", "collector: deletes wal/1/0", "B: seals wal/1/0", "B: puts B0 at wal/2/1"]
    assert [story.index(line) for line in told] == sorted(story.index(line) for line in told)
    assert found.violation == "LOST: B0 was acknowledged at wal/2/1 and is nowhere"
    assert len(found.trace) <= 16, "a shortest trace has nothing to spare"


@pytest.mark.parametrize(
    "scope",
    [
        Scope(puts=(1, 1)),
        Scope(puts=(2, 1), window=2, trims=0, collections=0),
        Scope(puts=(1, 0, 1), trims=0, collections=0),
        Scope(puts=(0, 0, 0), trims=0, collections=0, manifests_collected=True),
        Scope(puts=(1, 1), trims=0, collections=0, manifests_collected=True, repeats=1),
    ],
    ids=["trimmed", "window", "three", "manifests", "repeats"],
)
def test_what_is_left_out_to_save_states_hides_no_state_of_the_store(scope: Scope) -> None:
    assert visible(scope) == visible(replace(scope, reduced=False))


def test_exploring_twice_finds_the_same() -> None:
    scope = replace(BROKEN["past-first-seal-is-void"][1], broken="past-first-seal-is-void")

    first, second = explore(scope), explore(scope)

    assert (first.states, first.steps, first.trace) == (second.states, second.steps, second.trace)


def test_the_model_runs_from_the_command_line() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "headgate.simulation.model", "--break", "no-seal"], capture_output=True, text=True, check=True, timeout=60
    )

    assert "A: puts A0 at wal/1/0" in run.stdout
    assert "LOST: A0" in run.stdout
