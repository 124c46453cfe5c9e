"""From a failing schedule to a short, readable trace.

Owns: the search for a smaller schedule with a violation. A schedule cannot be cut
without changing every choice that comes after, so instead smaller worlds are tried: fewer
processes, fewer kinds of fault, and of all that fail the one with the fewest steps.
"""

from __future__ import annotations

from dataclasses import fields

from headgate.simulation.family_plots import FAMILY_PLOTS
from headgate.simulation.life_plots import LIFE_PLOTS
from headgate.simulation.plots import PLOTS
from headgate.simulation.run import Outcome, run_schedule
from headgate.simulation.scenes import SCENES
from headgate.simulation.world import Faults

_WORDS = (
    ": done|: name taken|delete |dies|stalls|stops|opened|reads |lost|409|no answer|wipe|damage|fence.|flush.|view.|replay.|close."
    "|load.|transaction.|compact.|gc.|follows|version |split.|clone.|detach.|drop.|table."
)


def shrink(failure: Outcome, *, tries: int = 400, scene: str | None = None) -> Outcome:
    """The smallest schedule found that violates anything at all, with its trace."""
    struck = frozenset(failure.struck) & {f.name for f in fields(Faults)}
    mode = failure.mode
    plays = {"wal": list(SCENES), "memtable": list(PLOTS), "life": list(LIFE_PLOTS), "family": list(FAMILY_PLOTS)}[mode]
    best, settings = failure, (None, scene, False)
    worlds: list[tuple[frozenset[str] | None, str | None, bool]] = [(frozenset(), None, True)]
    worlds += [(frozenset({fault}), None, True) for fault in sorted(struck)]
    worlds += [(frozenset(), name, True) for name in ([scene] if scene else plays)]
    worlds += [(struck, scene, True)]
    for faults, plot, small in worlds:
        for seed in range(failure.seed, failure.seed + max(1, tries // len(worlds))):
            outcome = run_schedule(seed, faults=faults, scene=plot, small=small, mode=mode)
            if not outcome.ok and outcome.steps < best.steps:
                best, settings = outcome, (faults, plot, small)  # type: ignore[assignment]
    faults, plot, small = settings
    return run_schedule(best.seed, faults=faults, scene=plot, small=small, trace=True, mode=mode)


def readable(trace: list[str]) -> list[str]:
    """Who did what to which object: the lines that change or decide something."""
    return [line for line in trace if any(word in line for word in _WORDS.split("|"))]
