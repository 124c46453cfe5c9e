"""Tables whose writers are killed while others take over, read and compact: real processes on a real disk (A14, R07, C08, G02).

    python tests/torture/torture_table.py --kills 300 --stalls 300 --seed 1 [--dir DIR]

One driver, and around it, each a process of its own:
    writers      claim a table of several shards (all of them, or some) and one without a key, and put
                 and delete from several threads, with caps so small that flushes are constant
    readers      scan, stream, look up, count and query, with handles that live through takeovers
    compactors   two at a time, with small slices
    collectors   ``min_age=0``: what may go goes at once
All of them are SIGKILLed and SIGSTOPped at random moments.

A writer marks an operation in a ledger of shared memory before it sends it, and again when its
``ack.wait()`` has returned. A reader looks at the ledger, reads, and compares: no acknowledged row is
missing, doubled or older than acknowledged before the read began; whatever any reader has seen
stays; the count of keys that are never deleted never falls. In the end the last writer has
acknowledged something for every key, and tables and ledger are equal.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # no threads before the forks

import lance  # noqa: F401  # warm, for all that are forked; its threads start with its first use, and not here
from ledger import SLOTS, Ledger
from torture_driver import Child, Figures, Processes, spelled
from torture_table_processes import check, collect, compact, create, finish, judge, read, write

warnings.filterwarnings("ignore", message="lance is not fork-safe")

WRITERS_MAX, READERS_MAX, COMPACTORS_MAX, COLLECTORS_MAX = 3, 3, 2, 1
TOLD = {
    b"O": "writers opened", b"K": "writers refused", b"F": "writers fenced", b"C": "writers ended", b"A": "acks",
    b"R": "reads", b"X": "reads to be tried again", b"P": "compactions", b"B": "compactions beaten", b"G": "collections",
}  # fmt: skip
BUGS = (
    "cursor_is_one_past",
    "dedup_keeps_the_oldest",
    "entries_replayed_twice",
    "tail_is_not_cut_at_the_cursor",
    "flushes_under_way_are_collected",
    "collected_above_the_cursor",
    "tombstones_are_dropped_at_flush",
    "masks_of_runs_are_not_renewed",
)
"""Of the simulation's planted bugs those that also show here."""


@dataclass
class TableFigures(Figures):
    told: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        told = " · ".join(f"{what} {self.told[what]}" for what in TOLD.values())
        strokes = f"kills {spelled(self.kills)} · stalls {spelled(self.stalls)}"
        return f"{strokes} · {told} · {self.seconds:.1f} s · violations {len(self.violations)}"


def plant(name: str) -> Callable[[], None]:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from tests.simulation import planted_memtable_bugs as planted

    held = []

    def switch_on() -> None:
        held.append(planted.BUGS[name]())
        held[0].__enter__()

    return switch_on


class Driver(Processes):
    def __init__(self, folder: Path, *, kills: int, stalls: int, seed: int, bug: str | None = None) -> None:
        super().__init__(folder, seed=seed, plant=plant(bug) if bug else None)
        self.kills, self.stalls = kills, stalls
        self.uri = str(folder)
        self.figures: TableFigures = TableFigures()
        (folder / "ledger").mkdir()
        self.ledger = Ledger(folder / "ledger")
        self.slots: dict[int, int] = {}

    def told(self, child: Child, data: bytes) -> int:
        for number in data:
            self.figures.told[TOLD[bytes([number])]] += 1
        child.opened |= b"O" in data or child.kind != "writer"
        return len(data)

    def slot(self) -> int:
        """One that no living process has."""
        taken = {slot for pid, slot in self.slots.items() if pid in self.children}
        return next(slot for slot in range(SLOTS) if slot not in taken)

    def begin(self, kind: str, run: Callable[[int, int, Callable[[bytes], None]], None]) -> Child:
        """A process with a slot, a seed and something to tell by."""
        slot, seed = self.slot(), self.chance.getrandbits(40)
        child = self.start(kind, lambda pipe: run(slot, seed, lambda data: _tell(pipe, data)))
        self.slots[child.pid] = slot
        return child

    def start_some(self, kind: str) -> None:
        uri, ledger, chance = self.uri, self.ledger, self.chance
        if kind == "writer":
            name, puts = self.names + 1, chance.choice([3, 30, 300])
            self.begin(kind, lambda slot, seed, tell: write(uri, name, slot, seed, puts, ledger, tell))
        elif kind == "reader":
            reads = chance.choice([5, 100, 1000])
            self.begin(kind, lambda slot, seed, tell: read(uri, slot, seed, reads, ledger, tell))
        elif kind == "compactor":
            self.begin(kind, lambda _, seed, tell: compact(uri, seed, 5, tell))
        elif kind == "collector":
            self.begin(kind, lambda _, seed, tell: collect(uri, seed, 10, tell))
        else:
            self.begin(kind, lambda *_: check(uri))

    # -- the run

    def run(self) -> TableFigures:
        began = time.monotonic()
        try:
            self.torment()
            if not self.figures.violations:
                self.calm()
        finally:
            self.kill_all()
        self.figures.seconds = time.monotonic() - began
        return self.figures

    def torment(self) -> None:
        uri, chance, figures = self.uri, self.chance, self.figures
        self.start("creator", lambda _: create(uri))
        self.wait_for("the tables", lambda: not self.children)
        most = {"writer": WRITERS_MAX, "reader": READERS_MAX, "compactor": COMPACTORS_MAX, "collector": COLLECTORS_MAX, "checker": 1}
        wanted = ["writer"] * 4 + ["reader"] * 3 + ["compactor"] * 2 + ["collector"] * 2 + ["checker"]
        while (figures.kills.total() < self.kills or figures.stalls.total() < self.stalls) and not figures.violations:
            self.pump(chance.choice([0.01, 0.05, 0.15, 0.4]) * 2 * chance.random())
            for kind in ("writer", "reader"):
                if not any(not child.stopped for child in self.alive(kind)) and len(self.alive(kind)) < most[kind] + 2:
                    self.start_some(kind)
            act = chance.random()
            if act < 0.45:
                kind = chance.choice(wanted)
                if len(self.alive(kind)) < most[kind]:
                    self.start_some(kind)
                continue
            # Most strokes are for writers who have got so far as to write; the rest for anybody.
            victims = [child for child in self.children.values() if not child.killed]
            if chance.random() < 0.6:
                victims = [child for child in victims if child.kind == "writer" and child.opened]
            if act < 0.72:
                if figures.kills.total() < self.kills and victims:
                    self.kill(chance.choice(victims))
            else:
                victims = [child for child in victims if not child.stopped]
                if figures.stalls.total() < self.stalls and victims:
                    self.stall(chance.choice(victims))

    def calm(self) -> None:
        """Kill what writes, read once more as it is; then one more writer has the last word."""
        uri, ledger = self.uri, self.ledger
        self.wake()
        self.pump(0.5)
        for kind in ("writer", "reader"):
            for child in self.alive(kind):
                self.kill(child)
        self.wait_for("what nobody stops", lambda: not self.children)
        for kind, last in {
            "reader": lambda slot, seed, tell: read(uri, slot, seed, 8, ledger, tell),
            "finisher": lambda slot, seed, tell: finish(uri, slot, ledger, tell),
            "judge": lambda slot, seed, tell: judge(uri, slot, ledger),
        }.items():
            self.begin(kind, last)
            self.wait_for(f"the last {kind}", lambda: not self.children)


def _tell(pipe: int, data: bytes) -> None:
    os.write(pipe, data)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--stalls", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dir", type=Path, help="where to work; kept. Default: a temporary folder")
    parser.add_argument("--plant", choices=BUGS, help="switch on a bug, to see it caught")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headgate-torture-") as temporary:
        folder = options.dir or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        figures = Driver(folder, kills=options.kills, stalls=options.stalls, seed=options.seed, bug=options.plant).run()
    print(f"seed {options.seed}: {figures}")
    for violation in figures.violations[:20]:
        print(f"VIOLATION {violation}")
    return 1 if figures.violations else 0


if __name__ == "__main__":
    sys.exit(main())
