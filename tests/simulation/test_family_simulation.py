"""Splits and clones in the simulation: a family of tables, against the one order that parts and clones go on with."""

from __future__ import annotations

import os

import pytest

from headgate.simulation.family_plots import FAMILY_PLOTS
from headgate.simulation.run import run_schedule, simulate
from tests.simulation.planted_family_bugs import BUGS

SCHEDULES = int(os.environ.get("HEADGATE_FAMILY_SCHEDULES", "80"))

# Where chance alone would take long, the plot that shows it.
PLOT_OF: dict[str, str] = {
    "checkpoint_does_not_see_what_came_between_its_pins": "load_between_two_pins",
    "clone_has_no_pin": "cloner_sleeps_with_all_shards",
    "clone_leaves_the_ends_of_epochs_open": "cloner_dies_half_way",
    "clone_lets_go_of_the_log_before_it_has_copied": "cloner_sleeps_past_its_lease",
    "clone_of_now_has_half_of_a_load": "load_between_two_pins_of_a_clone",
    "clone_pins_after_it_has_copied": "cloner_sleeps_before_it_copies",
    "detached_before_its_rows_are_copied": "clone_is_rewritten_slowly",
    "fenced_writer_sends_everything_again": "split_under_an_acknowledgement",
    "heir_lets_newer_rows_through_first": "split_under_a_put",
    "load_is_announced_in_a_shard_that_is_split": "load_for_a_shard_that_was_split",
    "parts_of_every_try_have_the_same_names": "splitter_dies_with_a_part",
    "pin_of_a_clone_ends_with_the_lease_of_its_checkpoint": "cloner_sleeps_before_it_copies",
    "producers_are_not_handed_on": "splitter_sleeps_flushed",
    "reader_goes_on_with_a_shard_that_was_split": "split_under_a_reader",
    "shard_that_is_split_is_claimed": "splitter_sleeps_with_its_parts",
    "split_does_not_wait_for_loads": "load_for_a_shard_that_was_split",
    "splitter_does_not_see_that_its_split_was_taken_back": "splitter_sleeps_with_its_parts",
}

# Where the first schedules do not show it, others that do.
SEED_OF: dict[str, int] = {
    "checkpoints_of_a_clone_do_not_hold_its_parent": 13,
    "fenced_writer_sends_everything_again": 15,
    "heir_lets_newer_rows_through_first": 13,
    "reader_goes_on_with_a_shard_that_was_split": 13,
    "split_does_not_wait_for_loads": 13,
}


def test_nothing_is_lost_doubled_or_in_the_wrong_part_and_clones_are_what_was_pinned() -> None:
    report = simulate(SCHEDULES, seed=4000, mode="family")

    assert not report.failures, [(outcome.seed, outcome.problems[:3]) for outcome in report.failures]
    assert report.schedules == SCHEDULES
    assert report.acknowledged > report.schedules, "schedules that acknowledge nothing show nothing"
    assert report.reads > 3 * report.schedules, "schedules that read nothing show nothing"
    assert report.splits > report.schedules // 3, "schedules that split nothing show nothing"
    assert report.clones > report.schedules // 3, "schedules that clone nothing show nothing"
    assert len(report.struck) == 12, f"every kind of fault strikes: {report.struck}"


@pytest.mark.parametrize("plot", sorted(FAMILY_PLOTS))
def test_each_plot_holds(plot: str) -> None:
    report = simulate(1, seed=7, scene=plot)

    assert not report.failures, [(outcome.seed, outcome.problems[:3]) for outcome in report.failures]


def test_a_seed_replays_to_the_letter() -> None:
    for seed in range(3):
        first, second = (run_schedule(seed, trace=True, mode="family") for _ in range(2))
        assert first.trace == second.trace
        assert (first.steps, first.struck, first.problems) == (second.steps, second.struck, second.problems)


@pytest.mark.parametrize("name", sorted(BUGS))
def test_planted_bug_is_caught(name: str) -> None:
    with BUGS[name]():
        report = simulate(400, seed=SEED_OF.get(name, 11), scene=PLOT_OF.get(name), mode="family")

    assert report.failures, f"{name} went unnoticed in {report.schedules} schedules"
    told = report.failures[0].problems
    assert not any(error in problem for problem in told for error in ("TypeError", "AttributeError", "NameError", "KeyError")), (
        f"it does not fit: {told}"
    )
