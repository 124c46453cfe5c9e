"""Is a shard what it says it is? Reads only, and names what is wrong where.

Owns: the checks. Does not own: the list of all that is broken (damage), mending (repair).

What it checks: the manifest; the marker and the seals (a life-cycle rule of the bucket that expires objects deletes
those first, and without a sound); the chain of the log; every file that a run, a load or a checkpoint names; that no
row got lost between the log and the generations made of it; and it counts what nothing names.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from headgate.columnar import Columnar
from headgate.errors import HeadgateError, ObjectMissingError
from headgate.keys import KeyOrder, newest_rows
from headgate.life.damage import REPAIR
from headgate.manifest import ChainPoint, ShardManifest
from headgate.manifest.model import RunRecord
from headgate.run import DELETED, OpenRun
from headgate.schema import RowRules, as_now
from headgate.store import Store
from headgate.wal.entry import SEAL_BYTES, Put
from headgate.wal.log import ShardLog
from headgate.wal.loss import evidence_of_loss
from headgate.wal.marker import check_marker
from headgate.wal.reader import ChainReader
from headgate.wal.tip import locate

_ATTEMPTS_MAX = 8
_FLUSH = re.compile(r"g(\d{10})-[0-9a-z]{26}")


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong."""

    shard: str
    kind: str
    object: str
    message: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was looked at, and what is wrong with it."""

    ok: bool
    problems: tuple[Problem, ...]
    counts: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, parts: Sequence[VerifyReport]) -> VerifyReport:
        counts: Counter[str] = Counter()
        for part in parts:
            counts.update(part.counts)
        problems = tuple(problem for part in parts for problem in part.problems)
        return cls(not problems, problems, dict(counts))


def verify_shard(
    log: ShardLog,
    *,
    deep: bool,
    columnar: Columnar | None = None,
    rules: RowRules | None = None,
    store: Store | None = None,
    progress: Callable[[str, str], None] | None = None,
) -> VerifyReport:
    """Check one shard's manifest, marker, chain and seals, and its runs if it is told how to open them.

    Shallow: from the cursor to the tip, every entry read and its checksum checked; every slice of a run, a load or a
    checkpoint is there, with as many rows as the manifest says. ``deep``: from the first entry that is left; every
    row of every run read, the order of its keys checked; every generation whose entries are all still there compared with
    them. What is trimmed, merged or collected meanwhile is read again.

    Args:
        store: the table's, to count the files that nothing names.
        progress: called with the shard and what is being looked at.
    """
    tell = progress or (lambda shard, what: None)
    for attempt in range(_ATTEMPTS_MAX):
        problems: list[Problem] = []
        counts: Counter[str] = Counter(shards=1)
        before: ShardManifest | None = None
        try:
            before = log.manifests.load()
            tell(log.shard, "log")
            _verify_chain(log, before, deep, problems, counts)
            if columnar is not None and rules is not None:
                tell(log.shard, f"{len(before.runs):,} runs")
                _verify_runs(log, before, columnar, rules, deep, problems, counts)
                pinned = _verify_checkpoints(log, before, columnar, problems, counts)
                if deep and not problems:
                    _verify_conservation(log, before, rules, problems, counts)
                if store is not None:
                    _count_orphans(log, store, [before, *pinned], counts)
        except HeadgateError as error:
            problems.append(_problem(log, error))
        if not problems or before is None or attempt == _ATTEMPTS_MAX - 1:
            break
        now = log.manifests.load()
        unmoved = now.cursor == before.cursor and now.wal_floor == before.wal_floor and now.wal.id == before.wal.id
        if unmoved and [run.id for run in now.runs] == [run.id for run in before.runs]:
            break
    return VerifyReport(not problems, tuple(problems), dict(counts))


def _verify_chain(log: ShardLog, manifest: ShardManifest, deep: bool, problems: list[Problem], counts: Counter[str]) -> None:
    if not check_marker(log, manifest):
        return  # clean, and the log is gone or was never begun: nothing in it is needed
    space = log.space(manifest)
    _verify_seals(log, manifest, problems, counts)
    ends = manifest.ends()
    point = locate(manifest, manifest.wal_floor) if deep else manifest.cursor
    reader = ChainReader(space, log.clock, eager=True)
    try:
        while True:
            entry = reader.read(point)
            if entry is None:
                loss = evidence_of_loss(space, manifest, point)
                if loss is None:
                    break
                if (entry := reader.fetch(point)) is None:
                    problems.append(_problem(log, loss))
                    break
            counts["seals" if entry.is_seal else "entries"] += 1
            counts["rows"] += sum(put.rows.num_rows for put in entry.puts)
            counts["bytes"] += entry.size_bytes
            end = ends.end_of(point.epoch)
            if entry.is_seal != (end == point.position) and end is not None:
                what = "has a seal" if entry.is_seal else "goes on"
                message = f"epoch {point.epoch} ended at {end} by the manifest, and {what} at {point.position}"
                problems.append(Problem(log.shard, "ChainMismatch", space.key(*point), message))
                break
            point = point.past_seal() if entry.is_seal else point.past_data()
    finally:
        reader.close()


def _verify_runs(
    log: ShardLog,
    manifest: ShardManifest,
    columnar: Columnar,
    rules: RowRules,
    deep: bool,
    problems: list[Problem],
    counts: Counter[str],
) -> None:
    """Every run is what the manifest says: all its slices, all its rows, its keys in order and each once."""
    for record in _all_runs(manifest):
        counts["runs"] += 1
        run = OpenRun(record, columnar)
        try:
            for part, opened in zip(record.slices, run.slices, strict=True):
                counts["run_rows"] += opened.num_rows
                if opened.num_rows != part.rows:
                    message = f"has {opened.num_rows} rows, and the manifest says {part.rows}"
                    problems.append(Problem(log.shard, "RowsMissing", part.path, message))
            if deep:
                _verify_rows(log, run, rules, problems)
        except HeadgateError as error:
            problems.append(_problem(log, error))


def _verify_rows(log: ShardLog, run: OpenRun, rules: RowRules, problems: list[Problem]) -> None:
    """Every column of every row is read: the files have no checksum, so what cannot be decoded is what can be found."""
    record, names = run.record, run.names
    tombstones, order = 0, KeyOrder(rules) if rules.key else None
    last = order.none() if order is not None else None
    keys_of = [names[rules.field_ids[rules.schema.get_field_index(name)]] for name in rules.key]
    for batch in run.scan([*names.values(), *([DELETED] if record.tombstones else [])]):
        if record.tombstones:
            tombstones += batch.column(DELETED).true_count
        if order is None or last is None or not batch.num_rows:
            continue
        keys = order.of(as_now(batch.select(keys_of), names, rules, rules.key))
        if not last.joined(keys).is_ascending():
            problems.append(Problem(log.shard, "OutOfOrder", record.slices[0].path, "a key is there twice, or out of order"))
            return
        last = keys.part(len(keys) - 1, len(keys)).owned()
    if tombstones != record.tombstones:
        message = f"has {tombstones} tombstones, and the manifest says {record.tombstones}"
        problems.append(Problem(log.shard, "RowsChanged", record.slices[0].path, message))


def _all_runs(manifest: ShardManifest) -> Iterator[RunRecord]:
    """Those that reads merge, and those that the feed of changes still has as loads, each once."""
    placed = (run for load in manifest.loads for run in load.runs)
    announced = (run for load in manifest.announced.values() for run in load.runs)
    yield from {run.id: run for run in (*manifest.runs, *placed, *announced)}.values()


def _verify_checkpoints(
    log: ShardLog, manifest: ShardManifest, columnar: Columnar, problems: list[Problem], counts: Counter[str]
) -> list[ShardManifest]:
    """All that a checkpoint pins is there: the version of the manifest, its files, its part of the log. Gives the versions."""
    checked = {part.path for run in _all_runs(manifest) for part in run.slices}
    space, found = log.space(manifest), []
    for id, record in manifest.checkpoints.items():
        if not record.version:
            continue
        counts["checkpoints"] += 1
        name = f"checkpoint {record.name or id}"
        try:
            pinned = log.manifests.at(record.version)
            found.append(pinned)
            for part in (part for run in pinned.runs for part in run.slices if part.path not in checked):
                checked.add(part.path)
                if (rows := columnar.open_record(part).num_rows) != part.rows:
                    problems.append(Problem(log.shard, "RowsMissing", part.path, f"has {rows} rows, and {name} says {part.rows}"))
            for position in range(record.position, record.end):
                space.store.head(space.key(*locate(manifest, position)))
        except HeadgateError as error:
            kind = "CheckpointBroken" if isinstance(error, ObjectMissingError) else type(error).__name__
            problems.append(Problem(log.shard, kind, getattr(error, "object", ""), f"{name} needs it: {error.message}"))
    return found


def _verify_conservation(log: ShardLog, manifest: ShardManifest, rules: RowRules, problems: list[Problem], counts: Counter[str]) -> None:
    """A generation has the newest row of each key of its entries, no more and no less; as long as all of them are there."""
    runs = [run for run in manifest.runs if _FLUSH.fullmatch(run.id) and manifest.wal_floor <= run.first < run.end]
    if not runs:
        return
    reader = ChainReader(log.space(manifest), log.clock, eager=True)
    point: ChainPoint = locate(manifest, runs[0].first)
    try:
        for run in runs:
            puts: list[Put] = []
            is_whole = True
            while point.position < run.end:
                entry = reader.read(point)
                if entry is None:
                    return  # collected since, or found missing by the walk
                if point.position >= run.first:
                    puts.extend(entry.puts)
                    is_whole = is_whole and (entry.is_seal or not entry.header.writer_id.startswith(REPAIR))
                point = point.past_seal() if entry.is_seal else point.past_data()
            if not is_whole:
                continue  # what stood there was given up; the run has its rows
            merged = newest_rows(puts, rules)
            counts["generations_compared"] += 1
            if (merged.num_rows, merged.tombstones) != (run.rows, run.tombstones):
                message = (
                    f"has {run.rows} rows and {run.tombstones} tombstones; positions {run.first} to {run.end - 1} of the log, which it was "
                    f"made of, come to {merged.num_rows} and {merged.tombstones}"
                )
                problems.append(Problem(log.shard, "RowsNotConserved", run.slices[0].path if run.slices else run.id, message))
    finally:
        reader.close()


def _count_orphans(log: ShardLog, store: Store, manifests: Sequence[ShardManifest], counts: Counter[str]) -> None:
    """Files that nothing names and nobody may name any more. Nothing is wrong with that: collection takes them."""
    latest = manifests[0]
    named = {part.path for manifest in manifests for run in _all_runs(manifest) for part in run.slices}
    named |= {part.path for run in latest.replaced for part in run.slices}
    folder = f"shards/{log.shard}-{log.table_id}/runs/"
    for info in store.list(folder):
        attempt, _, rest = info.key[len(folder) :].partition("/")
        if f"{folder}{attempt}/{rest.split('/', 1)[0]}" in named:
            continue
        flush = _FLUSH.fullmatch(attempt)
        if flush is not None and int(flush.group(1)) >= latest.next_generation:
            continue  # a flush that is under way
        if flush is None and attempt.rsplit("-", 1)[0] in latest.attempts:
            continue
        counts["orphan_objects"] += 1
        counts["orphan_bytes"] += info.size_bytes


def _verify_seals(log: ShardLog, manifest: ShardManifest, problems: list[Problem], counts: Counter[str]) -> None:
    """Every seal still stands: life-cycle rules of a bucket that expire objects delete seals too."""
    space = log.space(manifest)
    present = {point for point, info in space.list_from(0) if info.size_bytes == SEAL_BYTES}
    for seal in manifest.seals():
        if seal not in present:
            problems.append(
                Problem(
                    log.shard,
                    "SealMissing",
                    space.key(*seal),
                    f"the seal that ended epoch {seal.epoch} is gone; a writer stalled since then could write again. "
                    "Does a life-cycle rule expire objects in this bucket?",
                )
            )
        else:
            counts["seals_standing"] += 1


def _problem(log: ShardLog, error: HeadgateError) -> Problem:
    return Problem(log.shard, type(error).__name__, getattr(error, "object", ""), error.message)
