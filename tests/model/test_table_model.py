"""The whole table against a plain dict (Q10). The long form: ``HEADGATE_MODEL_LONG=1``."""

from __future__ import annotations

import os
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.model.machine import STEPS, TableMachine

LONG = int(os.environ.get("HEADGATE_MODEL_LONG") or 0)
"""Not 0: stories of 100 steps, 150 times this many in each place; other ones each time."""
SHRINK = os.environ.get("HEADGATE_MODEL_SHRINK", "1") != "0"
"""A failing story is made as short as it gets, which takes minutes."""

pytestmark = [pytest.mark.slow, *([pytest.mark.timeout(0)] if LONG else [])]


class InMemory(TableMachine):
    place: ClassVar[str] = "memory"


@pytest.mark.parametrize("machine", [TableMachine, InMemory], ids=["disk", "memory"])
def test_q10_a_table_equals_a_dict_whatever_happens_to_it(machine: type[TableMachine]) -> None:
    chosen = settings(
        max_examples=150 * LONG if LONG else 12,
        stateful_step_count=100 if LONG else 30,
        derandomize=not LONG,
        deadline=None,
        database=None,
        print_blob=True,
        phases=[Phase.generate, *([Phase.shrink] if SHRINK else [])],
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=chosen)
    print(f"{machine.place}: {STEPS[machine.place]} steps")
