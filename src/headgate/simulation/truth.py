"""What should have come of the life of a table: the one order of entries and loads, and everything that was seen of it.

Owns: the order, learnt from all manifests that ever stood and from what the loaders have written down; the
judgement of reads, checkpoints, transactions and followers. Does not own: the workload (life).

A state of a shard is two numbers: the entries before a position, and the loads up to a number. A load stands
where the manifest placed it, so a state has no load whose place lies past its entries. Every read must be a state
of its time; a checkpoint one state for ever; what a follower was given is the order itself, nothing missed or doubled.
"""

from __future__ import annotations

import json
import random
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from headgate.compact import compact_shard
from headgate.errors import HeadgateError
from headgate.life.verify import verify_shard
from headgate.manifest.model import ShardManifest
from headgate.query.scan import Scan
from headgate.simulation.checker import check_chain, check_outcomes
from headgate.simulation.life import Follower, Item, LifeStage, Pin, RowOfRun, collect_all, follow, opened_follower, read_pin
from headgate.simulation.reads import Model, State, Truth, shows, true_chain
from headgate.simulation.tables import Read, Row, TableStage, Write, random_config, rows_of
from headgate.simulation.world import Process
from headgate.transaction import ONCE

_FAR_SECONDS = 1e9
_ROUNDS_MAX = 200


@dataclass(frozen=True)
class Placed:
    """A load, as the manifests and its loader tell it."""

    number: int
    position: int
    app: str
    version: int
    attempt: str
    rows: tuple[RowOfRun, ...]
    """Of all its runs, oldest first."""
    announced: int
    """The step of the commit that announced it."""
    placed: int


@dataclass
class Order:
    """The one order of a shard."""

    truth: Truth
    loads: list[Placed]
    versions: list[tuple[int, dict[str, Any]]]
    """Every version of the manifest, with the step it came at."""
    keyed: bool
    _states: dict[tuple[int, int], State] = field(default_factory=dict)

    def loads_at(self, step: int) -> int:
        return bisect_right(self.loads, step, key=lambda load: load.placed)

    def steps(self, entries: int, loads: int) -> list[tuple[int, int, list[Write] | Placed]]:
        """What comes to a state, in order: (position, load), and the entry's writes or the load."""
        some: list[tuple[int, int, int, list[Write] | Placed]] = [
            (load.position, 0, load.number, load) for load in self.loads[:loads] if load.position <= entries
        ]
        some += [(position, 1, 0, list(self.truth.writes[position])) for position in range(entries)]
        return [(position, number, what) for position, _, number, what in sorted(some, key=lambda step: step[:3])]

    def state(self, entries: int, loads: int) -> State | None:
        """None: there is no such state, because a load's place lies past the entries."""
        if loads and self.loads[loads - 1].position > entries:
            return None
        known = self._states.get((entries, loads))
        if known is None:
            model = Model(self.keyed)
            for _, _, what in self.steps(entries, loads):
                apply(model, what)
            known = self._states[entries, loads] = model.state()
        return known


def apply(model: Model, what: list[Write] | Placed) -> None:
    if isinstance(what, Placed):
        for key, value, gone in what.rows:
            model.apply(Write(0, "delete" if gone else "upsert", ((key, value or 0),)))
    else:
        for write in what:
            model.apply(write)


def order_of(stage: LifeStage, table: TableStage, manifest: ShardManifest) -> Order:
    versions = _versions(table, manifest)
    announced: dict[str, int] = {}
    placed: dict[int, tuple[int, dict[str, Any]]] = {}
    for step, document in versions:
        for load in document["announced"].values():
            for run in load["runs"]:
                announced.setdefault(run["id"], step)
        for load in document["loads"]:
            placed.setdefault(load["number"], (step, load))
    loads = []
    for number, (step, load) in sorted(placed.items()):
        paths = [part["path"] for run in load["runs"] for part in run["slices"]]
        attempt = load["runs"][0]["id"].rsplit("-", 1)[0]
        rows = tuple(row for path in paths for row in stage.ledger.files[path])
        at = announced.get(load["runs"][0]["id"], -1)
        loads.append(Placed(number, load["position"], load["app"], load["version"], attempt, rows, at, step))
    if [load.number for load in loads] != list(range(1, len(loads) + 1)):
        stage.ledger.problems.append(f"LOADS: shard {table.shard} has numbers {[load.number for load in loads]}")
    return Order(true_chain(table, manifest), loads, versions, bool(table.rules.key))


def _versions(table: TableStage, latest: ShardManifest) -> list[tuple[int, dict[str, Any]]]:
    """The versions that led to the latest one, oldest first. What else was created under their names counts for nothing."""
    ever = table.world.ever
    assert ever is not None
    stood: dict[str, tuple[int, dict[str, Any]]] = {}
    for key, bodies in ever.items():
        if key.startswith(table.folder):
            for step, body in bodies:
                document = json.loads(body)["body"]
                stood.setdefault(document["id"], (step, document))
    found = [stood[latest.id]]
    while True:
        before = found[-1][1]["history"]
        if not before:
            return found[::-1]
        found += [stood[id] for id in reversed(before)]


# -- loads and transactions


def check_loads(stage: LifeStage, table: TableStage, order: Order) -> None:
    """Each stands after everything that was durable when it was announced, and after the one before it."""
    problems, place = stage.ledger.problems, 0
    for load in order.loads:
        if load.announced < 0:
            problems.append(f"LOAD: {load.number} of shard {table.shard} was placed and never announced")
        elif load.position < order.truth.tip_at(load.announced):
            durable = order.truth.tip_at(load.announced)
            problems.append(f"LOAD: {load.number} of shard {table.shard} stands at {load.position}; {durable} were durable before it")
        if load.position < place:
            problems.append(f"LOAD: {load.number} of shard {table.shard} stands at {load.position}, and the one before it at {place}")
        place = load.position


def check_transactions(stage: LifeStage, orders: dict[str, Order], manifests: dict[str, ShardManifest]) -> None:
    """All of an attempt or nothing, one attempt per version, and what was said of it is so."""
    ledger = stage.ledger
    placed: dict[tuple[str, int], dict[str, set[str]]] = {}
    for shard, order in orders.items():
        for load in order.loads:
            by_shard = placed.setdefault((load.app, load.version), {})
            if shard in by_shard:
                ledger.problems.append(f"DOUBLED: version {load.version} of {load.app} was placed twice in shard {shard}")
            by_shard.setdefault(shard, set()).add(load.attempt)
    for (app, version), by_shard in placed.items():
        attempts = set.union(*by_shard.values())
        told = f"version {version} of {app} is { ({shard: sorted(some) for shard, some in by_shard.items()}) }"
        if len(attempts) > 1:
            ledger.problems.append(f"MIXED: {told}")
            continue
        attempt = ledger.attempts[next(iter(attempts))]
        if attempt.shards != set(by_shard):
            ledger.problems.append(f"HALF: {told}, and has rows for {sorted(attempt.shards)}")
        if attempt.outcome == "refused" and "there" not in {a.outcome.split()[0] for a in ledger.attempts.values() if a.app == app}:
            ledger.problems.append(f"REFUSED: {told}, and its loader was told that nothing was brought in")
    for attempt in ledger.attempts.values():
        if attempt.outcome in ("committed", "there already") and (attempt.app, attempt.version) not in placed and attempt.shards:
            ledger.problems.append(f"LOST: {attempt.id} was told that version {attempt.version} of {attempt.app} is there")
    for shard, manifest in manifests.items():
        if manifest.announced:
            ledger.problems.append(f"LEFT: shard {shard} has announced {list(manifest.announced)} at the end")
        for (app, version), by_shard in placed.items():
            mark = manifest.transactions.get(app)
            if not app.startswith(ONCE) and (mark is None or mark.version < version):
                ledger.problems.append(f"MARK: version {version} of {app} is in {sorted(by_shard)}, and shard {shard} has {mark}")


# -- reads and checkpoints


def check_reads(table: TableStage, order: Order) -> None:
    """Every read is a state of its time, and no reader goes back."""
    ledger = table.table_ledger
    finished: dict[str, list[tuple[int, int, int]]] = {}
    for read in sorted(ledger.reads, key=lambda read: read.began):
        if read.source == "memory":
            _check_memory_read(table, order, read)
            continue
        before = finished.setdefault("tail" if read.source == "tail" else read.who, [])
        least = max([read.durable, *(seen for ended, seen, _ in before if ended < read.began)])
        loads = max([order.loads_at(read.began), *(some for ended, _, some in before if ended < read.began)])
        most, loads_most = order.truth.tip_at(read.ended), order.loads_at(read.ended)
        fitting = [
            (entries, some)
            for entries in range(least, most + 1)
            for some in range(loads, loads_most + 1)
            if (state := order.state(entries, some)) is not None and shows(read, state)
        ]
        if not fitting:
            some = {(e, n): order.state(e, n) for e in range(least, min(most, least + 3) + 1) for n in range(loads, loads_most + 1)}
            ledger.problems.append(
                f"MISREAD: {read.who} ({read.source}) of shard {table.shard} from step {read.began} to {read.ended} read {read.rows}, "
                f"asked for {read.filter}, limit {read.limit}; from ({least}, {loads}) to ({most}, {loads_most}) the rows are {some}"
            )
            continue
        before.append((read.ended, min(entries for entries, _ in fitting), min(some for _, some in fitting)))


def _check_memory_read(table: TableStage, order: Order, read: Read) -> None:
    """What was there when the writer opened, its own puts in order, and the loads of the time, each in its place."""
    life, truth = read.life, order.truth
    assert life is not None
    if life.first_position > truth.tip:
        table.ledger.problems.append(f"LOST: {life.name} opened at {life.first_position}, and the log ends at {truth.tip}")
        return
    places = {write.number: p for p in range(life.first_position, truth.tip) for write in truth.writes[p]}
    own = [(places.get(write.number, truth.tip), 1, number, [write]) for number, write in enumerate(life.begun[: read.begun])]
    older = [(position, 1, 0, list(truth.writes[position])) for position in range(life.first_position)]
    for loads in range(order.loads_at(read.began), order.loads_at(read.ended) + 1):
        some = [(load.position, 0, load.number, load) for load in order.loads[:loads]]
        for count in range(read.returned, read.begun + 1):
            model = Model(order.keyed)
            for *_, what in sorted([*older, *own[:count], *some], key=lambda step: step[:3]):
                apply(model, what)  # type: ignore[arg-type]
            if shows(read, model.state()):
                return
    table.ledger.problems.append(
        f"MISREAD: {read.who} (memory) of shard {table.shard} from step {read.began} to {read.ended} read {read.rows}, asked for "
        f"{read.filter}, limit {read.limit}; it should be {model.state()}"
    )


def check_pins(stage: LifeStage, orders: dict[str, Order]) -> None:
    """A checkpoint is one state: with all that was durable when it was begun, and the same for ever."""
    for taken in stage.ledger.pins:
        order = orders[taken.shard]
        added = next((document for _, document in order.versions if taken.id in document["checkpoints"]), None)
        if added is None:
            if taken.is_known:
                stage.ledger.problems.append(f"PIN: {taken.id} of shard {taken.shard} was never committed")
            continue
        record, loads = added["checkpoints"][taken.id], added["next_load"] - 1
        state = order.state(record["end"], loads) if record["end"] <= order.truth.tip else None
        if state is None or record["end"] < taken.durable or loads < order.loads_at(taken.began):
            stage.ledger.problems.append(f"PIN: {_told(taken)} ends at {record['end']} with {loads} loads: {taken.durable} were durable")
        if taken.scope == "all" and record["end"] != record["position"]:
            stage.ledger.problems.append(f"PIN: {_told(taken)} needs the log from {record['position']} to {record['end']}")
        wrong = [rows for rows in taken.reads if rows != state]
        if wrong:
            stage.ledger.problems.append(f"PIN: {_told(taken)} was read as {wrong[0]}, and is {state}")


def _told(taken: Pin) -> str:
    return f"checkpoint {taken.id} ({taken.scope}) of shard {taken.shard}"


# -- followers


def check_follower(stage: LifeStage, follower: Follower, order: Order) -> None:
    """What it was given after its beginning is the order, nothing missed, doubled or turned round (P17)."""
    start = follower.start
    assert start is not None, "it was drained"
    if follower.snapshot is not None and follower.snapshot != order.state(*start.offset):
        stage.ledger.problems.append(f"FOLLOWER: {follower.name} began with {follower.snapshot}, which is not the state at {start.offset}")
    wanted: list[Item] = []
    for position, number, what in order.steps(order.truth.tip, len(order.loads)):
        if isinstance(what, Placed) and number > start.offset.load:
            wanted.append((position - 1, number, tuple((key, None if gone else value) for key, value, gone in what.rows)))
        elif not isinstance(what, Placed) and position >= start.offset.position and what:
            rows = tuple((key, None if write.op == "delete" else value) for write in what for key, value in write.rows)
            wanted.append((position, 0, rows))
    given = [(*at, tuple(row for item in some for row in item[2])) for at, some in groupby(follower.items, key=lambda item: item[:2])]
    if given != wanted:
        at = next((n for n, (a, b) in enumerate(zip(given, wanted, strict=False)) if a != b), min(len(given), len(wanted)))
        stage.ledger.problems.append(
            f"FOLLOWER: {follower.name} of shard {follower.shard} from {tuple(start.offset)} was given {given[at : at + 3]} where "
            f"{wanted[at : at + 3]} comes"
        )


# -- the end


def judge_life(stage: LifeStage, process: Process, rng: random.Random) -> None:
    """With no faults left and all leases over: open, decide, follow, merge, collect; then compare everything with the order."""
    process.skew_seconds = _FAR_SECONDS
    seen: dict[str, list[tuple[str, tuple[Row, ...]]]] = {shard: [] for shard in stage.shards}
    manifests: dict[str, ShardManifest] = {}
    try:
        for shard, table in stage.shards.items():
            writer = table.writer(process, random_config(rng))
            stage.transactions(process).resolve(stage.log(process, shard))
            seen[shard].append(("at open", rows_of(writer.scan().to_arrow())))
            writer.close()
        for taken in stage.ledger.pins:
            read_pin(stage, process, taken)
        for follower in stage.ledger.followers:
            _drain(stage, process, follower)
        for shard in stage.shards:
            manifests[shard] = stage.log(process, shard).manifests.load()
        for what in ("collected", "merged and collected"):
            collect_all(stage, process, rng)
            for shard, table in stage.shards.items():
                reader = table.reader(process)
                seen[shard].append((what, rows_of(Scan(lambda reader=reader: [reader.view()], stage.rules).to_arrow())))  # type: ignore[misc]
                if what == "collected":
                    compact_shard(stage.log(process, shard), table.columnar(process), stage.rules, max_memory=1 << 20, full=True)
        reports = [
            verify_shard(stage.log(process, shard), deep=True, columnar=table.columnar(process), rules=stage.rules)
            for shard, table in stage.shards.items()
        ]
        orders = {shard: order_of(stage, table, stage.log(process, shard).manifests.load()) for shard, table in stage.shards.items()}
    except HeadgateError as error:
        stage.ledger.problems.append(f"UNOPENABLE: {error!r}")
        return
    stage.loads = sum(len(order.loads) for order in orders.values())
    stage.ledger.problems += [f"VERIFY: {p.kind} {p.object}: {p.message}" for report in reports for p in report.problems]
    for shard, table in stage.shards.items():
        order, manifest = orders[shard], manifests[shard]
        truth, last = order.truth, order.state(order.truth.tip, len(order.loads))
        for what, rows in seen[shard]:
            if rows != last:
                table.ledger.problems.append(f"END: {what} the rows of shard {shard} are {rows}, and the order comes to {last}")
        if manifest.cursor.position != truth.tip:
            table.ledger.problems.append(f"END: closed with the cursor at {manifest.cursor}, and the tip is {truth.tip}")
        chain = {position: tuple(write.number for write in writes) for position, writes in enumerate(truth.writes)}
        check_chain(table.ledger, chain)
        check_outcomes(table.ledger, chain, manifest)
        check_loads(stage, table, order)
        check_reads(table, order)
    check_transactions(stage, orders, manifests)
    check_pins(stage, orders)
    for follower in stage.ledger.followers:
        check_follower(stage, follower, orders[follower.shard])


def _drain(stage: LifeStage, process: Process, follower: Follower) -> None:
    shard, _ = opened_follower(stage, process, follower)
    for _ in range(_ROUNDS_MAX):
        if not follow(stage, process, follower, shard, None):
            return
    stage.ledger.problems.append(f"FOLLOWER: {follower.name} does not come to an end")
