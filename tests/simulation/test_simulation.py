"""The simulation itself: many schedules hold, a seed replays exactly, and every planted bug is caught."""

from __future__ import annotations

import os

import pytest

from headgate.simulation.run import run_schedule, simulate
from headgate.simulation.scenes import SCENES
from tests.simulation.planted_bugs import BUGS

SCHEDULES = int(os.environ.get("HEADGATE_SCHEDULES", "5000"))
PARTS = 4

# Where chance alone would take long, the scene that shows it.
SCENE_OF = {
    "a_waiter_who_was_woken_wakes_nobody": "crowd",
    "durable_through_is_the_highest_known": "gap",
    "past_a_seal_is_void": "several_seals",
    "only_own_seals_are_checked_against_the_cursor": "several_seals",
    "reply_of_a_manifest_create_is_trusted": "slow_claimant",
    "seals_are_forgotten_after_a_wipe": "wipe",
    "verify_does_not_check_the_epoch": "several_seals",
    "verify_does_not_look_at_the_cursor": "several_seals",
    "trim_forgets_the_ends_of_epochs": "dies_after_its_seal",
    "walk_takes_a_hole_for_the_tip": "damage",
    "a_cut_entry_is_skipped": "damage",
}


@pytest.mark.parametrize("part", range(PARTS))
def test_no_schedule_violates_the_protocol(part: int) -> None:
    report = simulate(SCHEDULES // PARTS, seed=1000 + part, mode="wal")

    assert not report.failures, [(outcome.seed, outcome.problems[:3]) for outcome in report.failures]
    assert report.schedules == SCHEDULES // PARTS
    assert report.acknowledged > report.schedules, "schedules that acknowledge nothing show nothing"
    assert len(report.struck) == 10, f"every kind of fault strikes: {report.struck}"


@pytest.mark.parametrize("scene", sorted(SCENES))
def test_each_scene_holds(scene: str) -> None:
    report = simulate(60, seed=7, scene=scene)

    assert not report.failures, [(outcome.seed, outcome.problems[:3]) for outcome in report.failures]


def test_a_seed_replays_to_the_letter() -> None:
    for seed in range(40):
        first, second = run_schedule(seed, trace=True), run_schedule(seed, trace=True)
        assert first.trace == second.trace
        assert (first.steps, first.struck, first.problems) == (second.steps, second.struck, second.problems)


@pytest.mark.parametrize("name", sorted(BUGS))
def test_planted_bug_is_caught(name: str) -> None:
    with BUGS[name]():
        report = simulate(1200, seed=11, scene=SCENE_OF.get(name), mode="wal")

    assert report.failures, f"{name} went unnoticed in {report.schedules} schedules"
    told = report.failures[0].problems
    assert not any("TypeError" in problem or "AttributeError" in problem for problem in told), f"the patch no longer fits: {told}"
