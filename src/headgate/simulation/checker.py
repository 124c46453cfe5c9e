"""What must hold at the end of every schedule.

Owns: the judgement. A fresh writer opens the shard with no faults left; then the whole log is
read and compared with the ledger.
"""

from __future__ import annotations

from collections import Counter

from headgate.config import ShardWriterConfig
from headgate.errors import HeadgateError
from headgate.life.verify import verify_shard
from headgate.manifest.model import ShardManifest
from headgate.simulation.actors import RULES, Ledger, Logged, Stage, numbers_of
from headgate.simulation.world import Process
from headgate.wal.tailer import WalTailer
from headgate.writer import ShardWriter


def judge(stage: Stage, process: Process) -> None:
    """Open, read everything, and write every violation into the ledger."""
    ledger = stage.ledger
    try:
        writer = ShardWriter(stage.log(process), RULES, ShardWriterConfig(enable_memtable=False))
        writer.close()
        log = stage.log(process)
        manifest = log.manifests.load()
        entries = list(WalTailer(Logged(log)).read(manifest.cursor.position, include_seals=True))
        report = verify_shard(log, deep=True)
    except HeadgateError as error:
        ledger.problems.append(f"UNOPENABLE: {error!r}")
        return
    ledger.problems += [f"VERIFY: {p.kind} {p.object}: {p.message}" for p in report.problems]

    chain: dict[int, tuple[int, ...]] = {p: numbers for p, numbers in ledger.archived.items() if p < manifest.cursor.position}
    chain.update((entry.position, numbers_of(entry)) for entry in entries)
    tip = (entries[-1].position + 1) if entries else manifest.cursor.position
    missing = sorted(set(range(tip)) - set(chain) - {seal.position for seal in manifest.ends().ends()})
    if missing or (chain and max(chain) >= tip):
        ledger.problems.append(f"GAP: positions {missing[:5]} are neither in the log nor in what was given up")
    check_chain(ledger, chain)
    check_outcomes(ledger, chain, manifest)
    if manifest.wal_position_last_seen >= tip:
        ledger.problems.append(f"LAST SEEN: {manifest.wal_position_last_seen} was never written, the tip is {tip}")


def check_outcomes(ledger: Ledger, chain: dict[int, tuple[int, ...]], manifest: ShardManifest) -> None:
    """The manifest tells of every fenced put whether it happened."""
    ends = manifest.ends()
    for epoch, position, number in ledger.fenced:
        if position is None:
            continue
        end = ends.end_of(epoch)
        if end is None:
            ledger.problems.append(f"OUTCOME: epoch {epoch} has ended and the manifest does not say where")
            continue
        there = number in chain.get(position, ())
        # A retry with the same sequence may have made it later, even to the same position of a later epoch.
        if there != (position < end) and not (there and number in ledger.exact):
            ledger.problems.append(f"OUTCOME: {number} was fenced at {position}, its epoch ended at {end}; in the log: {there}")


def check_chain(ledger: Ledger, chain: dict[int, tuple[int, ...]]) -> None:
    """Every acknowledged number is there once, where its receipt says, and in order."""
    places: dict[int, list[int]] = {}
    for position in sorted(chain):
        for number in chain[position]:
            places.setdefault(number, []).append(position)
    for number, (_, position) in ledger.acked.items():
        found = places.get(number, [])
        if not found:
            ledger.problems.append(f"LOST: {number} was acknowledged at {position}")
        elif position >= 0 and position not in found:
            ledger.problems.append(f"MOVED: {number} was acknowledged at {position} and is at {found}")
    doubled = {number: found for number, found in places.items() if len(found) > 1}
    if doubled:
        ledger.problems.append(f"DOUBLED: {doubled}")
    twice = [position for position, count in Counter(p for _, p in ledger.acked.values() if p >= 0).items() if count > 1]
    for position in twice:
        numbers = [n for n, (_, p) in ledger.acked.items() if p == position]
        if not set(numbers) <= set(chain.get(position, ())):
            ledger.problems.append(f"TWO WRITERS: {numbers} were acknowledged at position {position}")
    for writer, order in ledger.order.items():
        found = [places[number][0] for number in order if number in places]
        if found != sorted(found):
            ledger.problems.append(f"ORDER: {writer} put {order}, found at {found}")
        # A writer's numbers that made it are a prefix: nothing overtakes what was lost before it.
        made = [number in places for number in order]
        if made != sorted(made, reverse=True):
            ledger.problems.append(f"OVERTAKEN: {writer} put {order}, of which {[n for n in order if n in places]} are there")
    for seen in ledger.tailed:
        positions = [position for _, position, _ in seen]
        if positions != sorted(set(positions)):
            ledger.problems.append(f"TAILER: read positions {positions}")
        for _, position, read in seen:
            if chain.get(position) != read:
                ledger.problems.append(f"TAILER: read {read} at {position}, where {chain.get(position)} is")
                break
