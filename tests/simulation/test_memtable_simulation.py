"""MemTable mode in the simulation: flush, replay and reads under all faults, every read compared with a model."""

from __future__ import annotations

import os

import pytest

from headgate.simulation.plots import PLOTS
from headgate.simulation.run import run_schedule, simulate
from headgate.simulation.shrink import readable, shrink
from tests.simulation.planted_memtable_bugs import BUGS

SCHEDULES = int(os.environ.get("HEADGATE_MEMTABLE_SCHEDULES", "1500"))
PARTS = 3

# Where chance alone would take long, the plot that shows it.
PLOT_OF = {
    "flush_forgets_the_producers": "dies_after_a_flush",
    "flush_of_a_fenced_writer_commits": "flush_is_overtaken",
    "missing_entry_is_taken_for_the_tip": "overtaken_reader",
    "pending_puts_that_were_flushed_meanwhile_count_as_newest": "view_across_a_flush",
    "view_takes_the_manifest_before_the_memtables": "view_across_a_flush",
    "what_was_flushed_between_survey_and_claim_is_replayed": "flushed_before_the_claim",
}


@pytest.mark.parametrize("part", range(PARTS))
def test_no_read_differs_from_the_model_and_nothing_is_lost(part: int) -> None:
    report = simulate(SCHEDULES // PARTS, seed=2000 + part, mode="memtable")

    assert not report.failures, [(outcome.seed, outcome.problems[:3]) for outcome in report.failures]
    assert report.schedules == SCHEDULES // PARTS
    assert report.acknowledged > report.schedules, "schedules that acknowledge nothing show nothing"
    assert report.reads > 3 * report.schedules, "schedules that read nothing show nothing"
    assert len(report.struck) == 12, f"every kind of fault strikes: {report.struck}"


@pytest.mark.parametrize("plot", sorted(PLOTS))
def test_each_plot_holds(plot: str) -> None:
    report = simulate(40, seed=7, scene=plot)

    assert not report.failures, [(outcome.seed, outcome.problems[:3]) for outcome in report.failures]


def test_a_seed_replays_to_the_letter() -> None:
    for seed in range(25):
        first, second = (run_schedule(seed, trace=True, mode="memtable") for _ in range(2))
        assert first.trace == second.trace
        assert (first.steps, first.struck, first.problems) == (second.steps, second.struck, second.problems)


def test_all_modes_take_part_unless_one_is_chosen() -> None:
    outcomes = [run_schedule(seed) for seed in range(9)]

    assert {outcome.mode for outcome in outcomes} == {"wal", "memtable", "life"}


@pytest.mark.parametrize("name", sorted(BUGS))
def test_planted_bug_is_caught(name: str) -> None:
    with BUGS[name]():
        report = simulate(600, seed=11, scene=PLOT_OF.get(name), mode="memtable")

    assert report.failures, f"{name} went unnoticed in {report.schedules} schedules"
    told = report.failures[0].problems
    assert not any("TypeError" in problem or "AttributeError" in problem for problem in told), f"the patch no longer fits: {told}"


def test_a_violation_is_told_with_a_trace_that_shows_who_read_what() -> None:
    with BUGS["tombstones_are_dropped_at_flush"]():
        report = simulate(100, seed=11, mode="memtable")
        smallest = shrink(report.failures[0], tries=40)

    told = "\n".join(readable(smallest.trace))
    assert smallest.problems
    assert "flush.committed" in told
    assert "create wal/" in told
