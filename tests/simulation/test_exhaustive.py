"""Small scope, exhaustive: the real code with every interleaving of few preemptions."""

from __future__ import annotations

import pytest

from headgate.simulation.exhaustive import explore, replay
from tests.simulation.planted_bugs import BUGS


@pytest.mark.parametrize("split_collection", [False, True])
def test_no_interleaving_with_one_preemption_violates_the_protocol(split_collection: bool) -> None:
    found = explore(preemptions=1, split_collection=split_collection)

    assert not found.failures, found.failures[0][1]
    assert found.complete
    assert found.states > 10_000, "a scope without states shows nothing"


@pytest.mark.parametrize(
    "name",
    [
        "predecessor_is_not_sealed",
        "entry_found_instead_of_the_seal_is_ignored",
        "seal_taken_for_success",
        "verify_does_not_look_at_the_cursor",
    ],
)
def test_a_planted_bug_is_found_by_enumeration(name: str) -> None:
    with BUGS[name]():
        found = explore(preemptions=2, split_collection=False, seconds_max=100)
        assert found.failures, f"{name}: {found.runs} runs found nothing"
        trace = replay(found.failures[0][0], split_collection=False)

    assert any("create" in line for line in trace), "the trace says who did what to which object"
