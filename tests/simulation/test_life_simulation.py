"""A table's life in the simulation: loads over shards, compaction, checkpoints, collection and followers, against the one order."""

from __future__ import annotations

import os

import pytest

from headgate.simulation.life_plots import LIFE_PLOTS
from headgate.simulation.run import run_schedule, simulate
from headgate.simulation.shrink import readable, shrink
from tests.simulation.planted_life_bugs import BUGS

SCHEDULES = int(os.environ.get("HEADGATE_LIFE_SCHEDULES", "500"))
PARTS = 2

# Where chance alone would take long, the plot that shows it.
PLOT_OF: dict[str, str] = {
    "aborted_intents_are_collected": "loader_sleeps_past_its_lease",
    "announcement_is_withdrawn_though_it_was_decided": "loader_dies_half_way",
    "checkpoint_ends_before_the_load_it_shows": "load_under_a_checkpoint",
    "checkpoint_of_all_leaves_a_gap_below_a_load": "load_under_a_checkpoint_of_all",
    "compaction_does_not_check_that_its_inputs_are_there": "compaction_is_overtaken",
    "compaction_takes_what_is_past_the_cursor": "flush_meets_a_load",
    "feed_does_not_wait_for_announced_loads": "load_is_overtaken_and_watched",
    "feed_passes_a_load_before_the_entries_below_it": "follower_looks_away",
    "files_are_written_without_an_attempt": "compaction_is_overtaken",
    "files_of_announced_loads_are_collected": "loader_dies_decided",
    "flush_across_a_load_is_one_run": "flush_meets_a_load",
    "follower_goes_on_where_it_was_before_its_snapshot_was_pinned": "load_under_a_follower",
    "intent_is_not_consulted": "loader_sleeps_before_it_decides",
    "intents_are_collected_before_they_are_carried_out": "loader_dies_half_way",
    "load_is_not_announced": "load_is_overtaken",
    "load_is_placed_below_the_cursor": "load_is_overtaken",
    "memtable_is_not_cut_at_a_load": "cut_under_a_view",
    "run_is_dropped_before_the_commit_that_replaces_it": "compaction_is_overtaken",
    "tip_is_read_once_before_the_announcement": "loader_sleeps_before_it_decides",
    "view_has_a_load_and_not_the_entries_before_it": "acknowledged_late",
}


@pytest.mark.parametrize("part", range(PARTS))
def test_everything_that_was_seen_is_the_one_order_and_nothing_is_lost(part: int) -> None:
    report = simulate(SCHEDULES // PARTS, seed=3000 + part, mode="life")

    assert not report.failures, [(outcome.seed, outcome.problems[:3]) for outcome in report.failures]
    assert report.schedules == SCHEDULES // PARTS
    assert report.acknowledged > report.schedules, "schedules that acknowledge nothing show nothing"
    assert report.reads > 3 * report.schedules, "schedules that read nothing show nothing"
    assert report.loads > report.schedules, "schedules that load nothing show nothing"
    assert len(report.struck) == 12, f"every kind of fault strikes: {report.struck}"


@pytest.mark.parametrize("plot", sorted(LIFE_PLOTS))
def test_each_plot_holds(plot: str) -> None:
    report = simulate(4, seed=7, scene=plot)

    assert not report.failures, [(outcome.seed, outcome.problems[:3]) for outcome in report.failures]


def test_a_seed_replays_to_the_letter() -> None:
    for seed in range(4):
        first, second = (run_schedule(seed, trace=True, mode="life") for _ in range(2))
        assert first.trace == second.trace
        assert (first.steps, first.struck, first.problems) == (second.steps, second.struck, second.problems)


@pytest.mark.parametrize("name", sorted(BUGS))
def test_planted_bug_is_caught(name: str) -> None:
    with BUGS[name]():
        report = simulate(400, seed=11, scene=PLOT_OF.get(name), mode="life")

    assert report.failures, f"{name} went unnoticed in {report.schedules} schedules"
    told = report.failures[0].problems
    assert not any(error in problem for problem in told for error in ("TypeError", "AttributeError", "NameError")), (
        f"it does not fit: {told}"
    )


def test_a_violation_is_told_with_a_trace_that_shows_where_the_load_went() -> None:
    scene = PLOT_OF["memtable_is_not_cut_at_a_load"]
    with BUGS["memtable_is_not_cut_at_a_load"]():
        report = simulate(400, seed=11, scene=scene, mode="life")
        smallest = shrink(report.failures[0], tries=30, scene=scene)

    told = "\n".join(readable(smallest.trace))
    assert smallest.problems
    assert "transaction.placed" in told
    assert "create shards/" in told
