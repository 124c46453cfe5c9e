"""Is a shard what it says it is? Reads only, and names what is wrong where.

Owns: the checks. Does not own: mending.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from headgate.columnar import Columnar
from headgate.errors import HeadgateError
from headgate.keys import KeyOrder
from headgate.manifest import ShardManifest
from headgate.run import DELETED, OpenRun
from headgate.schema import RowRules, as_now
from headgate.wal.entry import SEAL_BYTES
from headgate.wal.log import ShardLog
from headgate.wal.loss import evidence_of_loss
from headgate.wal.marker import check_marker
from headgate.wal.reader import ChainReader
from headgate.wal.tip import locate

_ATTEMPTS_MAX = 8


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


def verify_shard(log: ShardLog, *, deep: bool, columnar: Columnar | None = None, rules: RowRules | None = None) -> VerifyReport:
    """Check one shard's manifest, marker, chain and seals, and its runs if it is told how to open them.

    Shallow: from the cursor to the tip, every entry read and its checksum checked; every slice of a run
    is there, with as many rows as the manifest says. ``deep``: from the first entry that is left; every
    key of every run read, and its order checked. What is trimmed, merged or collected meanwhile is read again.
    """
    for attempt in range(_ATTEMPTS_MAX):
        problems: list[Problem] = []
        counts: Counter[str] = Counter(shards=1)
        before: ShardManifest | None = None
        try:
            before = log.manifests.load()
            _verify_chain(log, before, deep, problems, counts)
            if columnar is not None and rules is not None:
                _verify_runs(log, before, columnar, rules, deep, problems, counts)
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
    for record in manifest.runs:
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
    record, names = run.record, run.names
    tombstones = 0
    if record.tombstones:
        for batch in run.scan([DELETED]):
            tombstones += batch.column(0).true_count
    if tombstones != record.tombstones:
        message = f"has {tombstones} tombstones, and the manifest says {record.tombstones}"
        problems.append(Problem(log.shard, "RowsChanged", record.slices[0].path, message))
    if not rules.key:
        return
    order = KeyOrder(rules)
    columns = [names[rules.field_ids[rules.schema.get_field_index(name)]] for name in rules.key]
    last = order.none()
    for batch in run.scan(columns):
        keys = order.of(as_now(batch, names, rules, rules.key))
        if not last.joined(keys).is_ascending():
            problems.append(Problem(log.shard, "OutOfOrder", record.slices[0].path, "a key is there twice, or out of order"))
            return
        last = keys.part(len(keys) - 1, len(keys)).owned()


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
