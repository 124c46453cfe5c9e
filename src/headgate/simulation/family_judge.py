"""The end of a schedule of a family: what was left half done is finished, and every table is compared with its lines.

Owns: the last steps, by somebody whom nothing disturbs. Does not own: what should have come of it (family_truth).
"""

from __future__ import annotations

import random

from headgate.errors import HeadgateError, NotFoundError
from headgate.life.clone import clone_table
from headgate.life.create import load_if_there
from headgate.life.drop import drop
from headgate.query.scan import Scan
from headgate.simulation.family import Family, Member, read_pinned
from headgate.simulation.family_truth import (
    Annals,
    Line,
    check_loads,
    check_pins,
    check_puts,
    check_reads,
    check_whole_loads,
    pinned,
)
from headgate.simulation.tables import Row, random_config, rows_of
from headgate.simulation.world import Process
from headgate.table import Table

_FAR_SECONDS = 1e9
"""All leases are over for whoever judges."""


def judge_family(family: Family, process: Process, rng: random.Random) -> None:
    process.skew_seconds = _FAR_SECONDS
    seen: dict[str, list[tuple[str, str, tuple[Row, ...]]]] = {}
    try:
        alive = _finished(family, process)
        tables = {member.table_id: family.open(process, member) for member in alive}
        for member in alive:
            found = seen[member.table_id] = []
            table = tables[member.table_id]
            for shard in table.shards:  # loads that are decided, and whose loaders died
                table._transactions().resolve(shard.log)
            writer = table.writer(random_config(rng))
            found.append(("at open", "", rows_of(table.scan().to_arrow())))
            writer.close()
            for taken in member.pins:
                read_pinned(family, process, member, table, taken)
        for what in ("collected", "merged and collected"):
            for member in alive:
                tables[member.table_id].gc(dry_run=False, min_age=0.0, sweep=rng.random() < 0.3)
            for member in alive:
                seen[member.table_id] += [(what, shard, rows) for shard, rows in _by_shard(tables[member.table_id])]
                if what == "collected":
                    tables[member.table_id].compact(1 << 20, full=True)
        for member in alive:
            report = tables[member.table_id].verify(deep=True)
            family.problems += [f"VERIFY: {member.name}: {p.kind} {p.object}: {p.message}" for p in report.problems]
    except HeadgateError as error:
        family.problems.append(f"UNOPENABLE: {error!r}")
        return
    annals = Annals(family)
    for member in family.members:
        if annals.first_manifest(member) is None:
            family.problems.append(f"GONE: {member.name} was there, and has no manifest")
            continue
        _check(family, annals, member, seen.get(member.table_id))


def _by_shard(table: Table) -> list[tuple[str, tuple[Row, ...]]]:
    rules = table._watch.rules
    return [(shard.id, rows_of(Scan(lambda shard=shard: [shard.reader.view()], rules).to_arrow())) for shard in table.shards]  # type: ignore[misc]


def _finished(family: Family, process: Process) -> list[Member]:
    """What was begun is carried on; what cannot be is dropped. The tables that are there."""
    alive = [family.first]
    for job in family.clones:
        places = family.places(process, job.target, job.wal)
        chain = places.table_manifests()
        found = load_if_there(chain)
        if found is None or found.state == "dropped":
            continue
        if found.state == "cloning":
            source = next(member for member in reversed(family.members) if member.name == job.source)
            try:
                found = clone_table(family.places(process, source.name, source.wal), places, None)
            except NotFoundError:  # its checkpoint was dropped before it was pinned, or its source
                drop(places)
                continue
        member = family.adopt(job.target, found.table_id, job.wal)
        if found.state == "dropping":
            member.is_dropped = True
            drop(places)
            continue
        alive.append(member)
    return alive


def _check(family: Family, annals: Annals, member: Member, seen: list[tuple[str, str, tuple[Row, ...]]] | None) -> None:
    lines = annals.lines(member)
    every = {line.shard: line for top in lines for line in top.every()}
    if seen is not None:
        last = tuple(sorted(row for line in lines for row in line.last()))
        for what, shard, rows in seen:
            wanted = last if not shard else every[shard].last() if shard in every else None
            if rows != wanted:
                family.problems.append(f"END: {what} the rows of {member.name} {shard} are {rows}, and should be {wanted}")
        leaves = sorted(line.shard for line in every.values() if not line.parts)
        told = sorted({shard for _, shard, _ in seen if shard})
        if told != leaves:
            family.problems.append(f"END: {member.name} has shards {told}, and should have {leaves}")
        check_puts(family, member, every.values())
    if member is family.first:
        check_loads(family, every.values())
    check_reads(family, member, lines)
    check_pins(family, member, lines)
    _check_clone(family, annals, member)


def _check_clone(family: Family, annals: Annals, member: Member) -> None:
    """It is of one state of its parent's, loads and all."""
    first = annals.first_manifest(member)
    if first is None or first.parent is None:
        return
    parent = first.parent
    source = next(m for m in family.members if m.table_id == parent.table_id)
    every: dict[str, Line] = {line.shard: line for top in annals.lines(source) for line in top.every()}
    loads = {shard: pinned(every[shard], parent.checkpoint)[1] for shard in parent.shards}
    check_whole_loads(family, f"clone {member.name}", loads, every)
