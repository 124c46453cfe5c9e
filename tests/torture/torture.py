"""Writers that are killed and stalled while others take over: real processes on a real disk (A14).

    python tests/torture/torture.py --kills 500 --stalls 500 --seed 1 [--dir DIR]

One driver, and around it, each a process of its own:
    writers      claim the shard and put from several threads, with producers and without; SIGKILLed
                 and SIGSTOPped at random moments, also while they open, close or wait for a seal
    collectors   copy what the log is about to give up, trim it and delete it; killed like writers
    checkers     ``verify(deep=True)`` under way
    a tailer     follows from the first entry to the last; stalled now and then

A writer tells of a put only after ``ack.wait()`` has returned, by one write to a pipe, so what
the driver has read is what a client could have relied on. In the end the log (what was collected
included) must hold every acknowledged put at the place that its receipt named, none twice, the
numbers of every thread in order, every producer's sequences without a gap, each put whole; and
the tailer must have seen exactly that.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # no threads before the forks

from torture_driver import Child, Figures, Processes, spelled
from torture_processes import (
    PER_PRODUCER,
    PER_THREAD,
    PLANTS,
    PRODUCERS,
    RECORD,
    check,
    collect,
    create,
    dump,
    follow,
    lines,
    write,
)

WRITERS_MAX = 3


@dataclass
class LogFigures(Figures):
    takeovers: int = 0
    acks: int = 0
    duplicates: int = 0
    entries: int = 0
    collected: int = 0

    def __str__(self) -> str:
        return (
            f"kills {spelled(self.kills)} · stalls {spelled(self.stalls)} · takeovers {self.takeovers} · "
            f"acks {self.acks}, {self.duplicates} of them of retries · entries {self.entries}, {self.collected} collected · "
            f"ends {spelled(self.ends)} · {self.seconds:.1f} s · violations {len(self.violations)}"
        )


class Driver(Processes):
    def __init__(self, folder: Path, *, kills: int, stalls: int, seed: int, plant: str | None = None) -> None:
        super().__init__(folder, seed=seed, plant=PLANTS[plant] if plant else None)
        self.kills, self.stalls = kills, stalls
        self.uri = str(folder / "table")
        self.figures: LogFigures = LogFigures()
        self.acks: dict[int, tuple[int, int]] = {}
        self.duplicates: dict[int, tuple[int, int]] = {}
        self.next_sequence = dict.fromkeys(PRODUCERS, 0)
        self.tailed, self.archive = folder / "tailed", folder / "archive"

    # -- processes

    def start_writer(self, *, puts_max: int | None = None, producers: bool | None = None) -> Child:
        chance = self.chance
        starts = {name: n for name, n in self.next_sequence.items() if producers or (producers is None and chance.random() < 0.6)}
        count = puts_max or chance.choice([3, 30, 300, 2000])
        seed, name, uri = chance.getrandbits(40), self.names + 1, self.uri
        return self.start("writer", lambda pipe: write(uri, name, seed, starts, count, pipe))

    def told(self, child: Child, data: bytes) -> int:
        whole = len(data) - len(data) % RECORD.size
        for kind, _, number, epoch, position in RECORD.iter_unpack(data[:whole]):
            if kind in b"AD":
                self.acknowledged(kind, number, (epoch, position))
            else:
                self.figures.ends[{b"O": "opened", b"F": "fenced", b"C": "closed", b"K": "refused"}[kind]] += 1
                self.figures.takeovers += kind == b"O"
                child.opened |= kind == b"O"
        return whole

    def acknowledged(self, kind: bytes, number: int, place: tuple[int, int]) -> None:
        self.figures.acks += 1
        if kind == b"D":
            self.figures.duplicates += 1
            self.duplicates[number] = place
        else:
            if self.acks.get(number, place) != place:
                self.figures.violations.append(f"put {number} was acknowledged at {self.acks[number]} and at {place}")
            self.acks[number] = place
        if number >= PER_PRODUCER:
            index, sequence = divmod(number, PER_PRODUCER)
            name = PRODUCERS[index - 1]
            self.next_sequence[name] = max(self.next_sequence[name], sequence + 1)

    def end(self, child: Child, code: int) -> None:
        if child.kind == "tailer" and not child.killed:
            self.figures.violations.append(f"the tailer ended ({code}): {child.output.read_text()[-1500:]}")
        else:
            super().end(child, code)

    # -- the run

    def run(self) -> Figures:
        began = time.monotonic()
        try:
            self.torment()
            self.calm()
            self.judge()
        finally:
            self.kill_all()
        self.figures.seconds = time.monotonic() - began
        return self.figures

    def torment(self) -> None:
        uri, tailed, archive, chance = self.uri, self.tailed, self.archive, self.chance
        self.start("creator", lambda _: create(uri))
        self.wait_for("the table", lambda: not self.children)
        tailer = self.start("tailer", lambda _: follow(uri, tailed))
        figures = self.figures
        while (figures.kills.total() < self.kills or figures.stalls.total() < self.stalls) and not figures.violations:
            self.pump(chance.choice([0.0005, 0.004, 0.02, 0.06]) * 2 * chance.random())
            writers = self.alive("writer")
            running = [child for child in writers if not child.stopped]
            others = [child for kind in ("collector", "checker") for child in self.alive(kind)]
            if not running and len(writers) < WRITERS_MAX + 2:
                self.start_writer()
                continue
            if chance.random() < 0.7:
                # Most strokes are for those who have got so far as to write; the rest for those who are on their way.
                writers, running = [c for c in writers if c.opened], [c for c in running if c.opened]
            act = chance.random()
            if act < 0.3:
                if len(self.alive("writer")) < WRITERS_MAX:
                    self.start_writer()
            elif act < 0.6:
                victims = writers + [child for child in others if chance.random() < 0.3]
                if figures.kills.total() < self.kills and victims:
                    self.kill(chance.choice(victims))
            elif act < 0.9:
                victims = running + [child for child in [*others, tailer] if not child.stopped and chance.random() < 0.2]
                if figures.stalls.total() < self.stalls and victims:
                    self.stall(chance.choice(victims))
            elif act < 0.97:
                if not self.alive("collector"):
                    seed = chance.getrandbits(40)
                    self.start("collector", lambda _, seed=seed: collect(uri, seed, tailed, archive))
            elif not self.alive("checker"):
                self.start("checker", lambda _: check(uri))

    def calm(self) -> None:
        """Let all run to their end; then one more writer sends again whatever was not acknowledged."""
        self.wake()
        self.pump(1.0)
        for writer in self.alive("writer"):  # it has more to put than we have time
            self.kill(writer)
        self.wait_for("what nobody stops", lambda: all(child.kind == "tailer" for child in self.children.values()))
        self.start_writer(puts_max=5, producers=True)
        self.wait_for("the last writer", lambda: not self.alive("writer"))

    def judge(self) -> None:
        uri, output = self.uri, self.folder / "dumped"
        self.start("dump", lambda _: dump(uri, output))
        self.wait_for("the last reading", lambda: not self.alive("dump"))
        log = {entry[0]: entry for entry in lines(output)}
        kept = {entry[0]: entry for entry in lines(self.archive)}
        # Trimming moves on over the seals that stand right there: they are below the floor and were not copied.
        seals = {entry[0]: entry for entry in lines(self.tailed) if entry[2] == "seal" and log and entry[0] < min(log)}
        chain = [entry for _, entry in sorted((seals | kept | log).items())]
        self.figures.entries, self.figures.collected = len(chain), len(chain) - len(log)
        self.wait_for("the tailer", lambda: len(lines(self.tailed)) >= len(chain))
        wrong = self.figures.violations.append
        if any(log[position] != kept[position] for position in log.keys() & kept.keys()):
            wrong("an entry changed after it was copied")
        if lines(self.tailed) != chain:
            wrong("the tailer saw another log than there is")
        for problem in problems(chain, self.acks, self.duplicates):
            wrong(problem)


def problems(chain: list[list[Any]], acks: dict[int, tuple[int, int]], duplicates: dict[int, tuple[int, int]]) -> Iterator[str]:
    """What is wrong with a log, given what was acknowledged."""
    if [entry[0] for entry in chain] != list(range(len(chain))):
        yield "positions have a gap"
    for before, after in pairwise(chain):
        if after[1] != before[1] + (before[2] == "seal"):
            yield f"position {after[0]} is of epoch {after[1]}, after a {before[2]} entry of epoch {before[1]}"
    found: dict[int, tuple[int, int]] = {}
    last: dict[int, int] = {}
    for position, epoch, _, numbers in chain:
        for number in numbers:
            if number in found:
                yield f"put {number} is there twice, at {found[number]} and {(epoch, position)}"
            found[number] = (epoch, position)
            producer, sequence = divmod(number, PER_PRODUCER)
            if producer:
                if sequence != last.get(-producer, -1) + 1:
                    yield f"producer {producer}: sequence {sequence} follows {last.get(-producer)}"
                last[-producer] = sequence
            else:
                thread = number // PER_THREAD
                if number <= last.get(thread, -1):
                    yield f"put {number} comes after {last[thread]}"
                last[thread] = number
    for number, place in acks.items():
        if found.get(number) != place:
            yield f"put {number} was acknowledged at {place} and is at {found.get(number)}"
    for number, place in duplicates.items():
        if number not in found:
            yield f"put {number} was acknowledged as there already ({place}) and is not there"
        elif found[number] > place:
            yield f"put {number} was acknowledged as at {place} or before, and is at {found[number]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=15)
    parser.add_argument("--stalls", type=int, default=15)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dir", type=Path, help="where to work; kept. Default: a temporary folder")
    parser.add_argument("--plant", choices=list(PLANTS), help="switch on a bug, to see it caught")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headgate-torture-") as temporary:
        folder = options.dir or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        figures = Driver(folder, kills=options.kills, stalls=options.stalls, seed=options.seed, plant=options.plant).run()
    print(f"seed {options.seed}: {figures}")
    for violation in figures.violations[:20]:
        print(f"VIOLATION {violation}")
    return 1 if figures.violations else 0


if __name__ == "__main__":
    sys.exit(main())
