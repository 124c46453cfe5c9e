"""What is done to a family of tables beside writing and reading: split, clone, detach, drop, load, compact, collect, pin.

Owns: the workload. Does not own: what should have come of it (family_truth), who takes part (family_plots).

Whoever clones has rivals at the same work: each goes on where the other stopped, or died, uses the clone, and may drop it
under the other. Whoever splits may find that another does, or has; what a dead one left is taken back by a writer.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from headgate.errors import AlreadyExistsError, HeadgateError, InvalidInputError, NotFoundError, TransactionConflictError
from headgate.life.clone import clone_table
from headgate.life.drop import drop
from headgate.simulation.actors import Client
from headgate.simulation.family import (
    CELL_BITS,
    CloneJob,
    Family,
    LoadJob,
    Member,
    TablePin,
    batch_of,
    read_pinned,
    read_table,
    write_some,
)
from headgate.simulation.world import Process, SimClock
from headgate.table import Table

_MEMORY_BYTES = 1 << 20


# -- splits


def splitter_process(family: Family, process: Process, rng: random.Random, rounds: int) -> Callable[[], None]:
    def main() -> None:
        for _ in range(rng.randint(1, rounds)):
            SimClock(process).sleep(rng.choice([0.0, 0.05, 0.3, 0.8]))
            try:
                table = family.open(process, family.first)
                fitting = [shard.id for shard in table.shards if shard.id.count("-") < CELL_BITS - (family.sharding.kind == "bucket")]
                if fitting:
                    table.split_shard(rng.choice(fitting), "id")
                    family.splits += 1
            except NotFoundError as error:
                if "it was split" not in error.message:
                    family.trouble(process.name, error)
            except HeadgateError as error:
                family.trouble(process.name, error)

    return main


# -- clones


def cloner_process(
    family: Family, process: Process, job: CloneJob, rng: random.Random, *, drops: float, detaches: float
) -> Callable[[], None]:
    """Makes the clone, or goes on with it; uses it; and perhaps drops it. Then perhaps once more."""

    def main() -> None:
        for number in range(rng.randint(1, 2)):
            SimClock(process).sleep(rng.choice([0.0, 0.1, 0.5, 1.0]))
            try:
                member = _cloned(family, process, job, rng)
                if member is not None:
                    _use(family, process, member, rng, f"{process.name}.{number}", detaches)
                if rng.random() < drops:
                    _drop(family, process, job)
            except HeadgateError as error:
                family.trouble(process.name, error)

    return main


def _cloned(family: Family, process: Process, job: CloneJob, rng: random.Random) -> Member | None:
    if not job.is_begun:
        job.is_begun = True
        sources = [m for m in family.members if m.name < job.target and not m.is_dropped] if rng.random() < 0.2 else [family.first]
        source = rng.choice(sources or [family.first])
        job.source = source.name
        pins = [taken for taken in source.pins if not taken.is_dropped]
        if pins and rng.random() < 0.5:
            job.checkpoint = rng.choice(pins)
    source = next(member for member in reversed(family.members) if member.name == job.source)
    target, taken = family.places(process, job.target, job.wal), job.checkpoint
    try:
        manifest = clone_table(family.places(process, source.name, source.wal), target, taken.id if taken is not None else None)
    except NotFoundError as error:
        # It may be dropped while it is made; and a checkpoint that nobody holds may go before the pin.
        held = taken is not None and not (taken.is_dropped or taken.leased or source.is_dropped)
        if held and "checkpoint" in error.message:
            family.problems.append(f"PIN GONE: {process.name}: {error.message}")
        return None
    except AlreadyExistsError as error:
        found = family.latest(job.target)
        if found.parent is not None and found.state != "dropping":  # else it was detached, and is a clone no more; or dropped
            family.problems.append(f"UNEXPECTED: {process.name}: {error!r}")
        return None
    family.clones_made += 1
    return family.adopt(job.target, manifest.table_id, job.wal)


def _use(family: Family, process: Process, member: Member, rng: random.Random, who: str, detaches: float) -> None:
    try:
        table = family.open(process, member)
        read_table(family, process, member, table, process.name)
        if rng.random() < 0.5:
            write_some(family, process, member, Client(who, None, []), rng, who, puts_max=3)
        if rng.random() < 0.3:
            table.compact(_MEMORY_BYTES, full=rng.random() < 0.5)
        if rng.random() < detaches:
            _detach(table)
        if rng.random() < 0.4:
            table.gc(dry_run=False, min_age=0.0)
        read_table(family, process, member, table, process.name)
    except HeadgateError as error:
        family.trouble(f"{who} in {member.name}", error, member)


def _detach(table: Table) -> None:
    try:
        table.detach(_MEMORY_BYTES)
    except InvalidInputError:
        return  # a checkpoint of the clone, or a load that is not flushed, still needs the parent


def _drop(family: Family, process: Process, job: CloneJob) -> None:
    for member in family.members:
        if member.name == job.target:
            member.is_dropped = True
    try:
        drop(family.places(process, job.target, job.wal))
        family.clones_dropped += 1
    except (InvalidInputError, NotFoundError):
        return  # there is none, or clones of it hold it


# -- all the rest


def family_loader_process(family: Family, process: Process, job: LoadJob, rng: random.Random) -> Callable[[], None]:
    def main() -> None:
        for _ in range(rng.randint(1, 3)):
            SimClock(process).sleep(rng.choice([0.0, 0.1, 0.4]))
            if job.is_done:
                return
            try:
                table = family.open(process, family.first)
                table.load(batch_of(family, job.write), job.write.op, app=f"load{job.number}", version=0)
                job.is_done = True
            except TransactionConflictError as error:
                if "was aborted" not in error.message:  # too slow: once more, the same version
                    family.trouble(process.name, error)
            except HeadgateError as error:
                family.trouble(process.name, error)

    return main


def _someone(family: Family, rng: random.Random) -> Member:
    alive = [member for member in family.members if not member.is_dropped]
    return family.first if rng.random() < 0.6 else rng.choice(alive)


def family_compactor_process(family: Family, process: Process, rng: random.Random) -> Callable[[], None]:
    def main() -> None:
        for _ in range(rng.randint(1, 3)):
            SimClock(process).sleep(rng.choice([0.05, 0.3, 0.8]))
            member = _someone(family, rng)
            try:
                family.open(process, member).compact(_MEMORY_BYTES, full=rng.random() < 0.5)
            except HeadgateError as error:
                family.trouble(f"{process.name} in {member.name}", error, member)

    return main


def family_collector_process(family: Family, process: Process, rng: random.Random, rounds: int) -> Callable[[], None]:
    """With ``min_age=0``, and a clock that may be anywhere."""

    def main() -> None:
        for _ in range(rng.randint(2, rounds)):
            SimClock(process).sleep(rng.choice([0.05, 0.2, 0.5]))
            member = _someone(family, rng)
            try:
                family.open(process, member).gc(dry_run=False, min_age=0.0, sweep=rng.random() < 0.2)
            except HeadgateError as error:
                family.trouble(f"{process.name} in {member.name}", error, member)

    return main


def family_keeper_process(family: Family, process: Process, rng: random.Random) -> Callable[[], None]:
    """Takes checkpoints, reads them, and drops them, also under those who clone them."""

    def main() -> None:
        clock, member = SimClock(process), family.first
        for _ in range(rng.randint(2, 4)):
            clock.sleep(rng.choice([0.0, 0.05, 0.3]))
            try:
                table = family.open(process, member)
                if rng.random() < 0.6 or not member.pins:
                    taken = TablePin("", "durable", member.durable_now(), leased=rng.random() < 0.3)
                    taken.id = table.checkpoint(ttl=0.3 if taken.leased else None).id
                    member.pins.append(taken)
                elif rng.random() < 0.5:
                    read_pinned(family, process, member, table, rng.choice(member.pins))
                else:
                    dropped = rng.choice(member.pins)
                    dropped.is_dropped = True
                    table.drop_checkpoint(dropped.id)
            except NotFoundError:
                continue  # it was dropped before
            except HeadgateError as error:
                family.trouble(process.name, error)

    return main
