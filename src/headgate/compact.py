"""Compaction: fewer runs, the same rows.

Owns: which runs are merged, and how the result takes their place. Does not own: the merging
(merge), the files that it comes to (run_writer), deleting what was replaced (gc).

It never claims the shard, so it never fences a writer; it works from the manifest alone, under a
registered attempt, and is visible by one commit. That commit checks that all its inputs are still
there, side by side: of two compactors one wins and the other has written garbage. It may die
anywhere: what it wrote is an attempt that nobody will commit, and collection takes it when its
lease is over.

Tombstones go only when the oldest run is among the inputs: above it they still hide something.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headgate.attempt import check_registered, give_back, register, renew, without
from headgate.columnar import Columnar
from headgate.errors import CommitConflictError, DataLossError, NotFoundError, ObjectMissingError
from headgate.failpoint import failpoint
from headgate.manifest.model import ReplacedRun, RunRecord, ShardManifest
from headgate.meters import COMPACTION_BYTES_WRITTEN, COMPACTION_FAILURES, COMPACTION_ROWS_READ, COMPACTION_ROWS_WRITTEN, COMPACTION_SECONDS
from headgate.run import SLICE_ROWS, OpenRun
from headgate.run_writer import Kept, Progress, RunWriter, untouched_slices
from headgate.schema import RowRules
from headgate.wal.log import ShardLog

LEASE_SECONDS = 3600.0
_TIER_RATIO = 2.0
_ROUNDS_MAX = 64


@dataclass(frozen=True, slots=True)
class CompactionReport:
    """What a compaction did."""

    runs_before: int
    runs_after: int
    rows_read: int
    rows_written: int
    bytes_written: int
    slices_kept: int
    """Slices that nothing newer touched: named again, not rewritten."""
    seconds: float
    shards: dict[str, int] = field(default_factory=dict)
    """Shard -> runs after."""

    @classmethod
    def of(cls, parts: Sequence[CompactionReport], seconds: float) -> CompactionReport:
        return cls(
            runs_before=sum(part.runs_before for part in parts),
            runs_after=sum(part.runs_after for part in parts),
            rows_read=sum(part.rows_read for part in parts),
            rows_written=sum(part.rows_written for part in parts),
            bytes_written=sum(part.bytes_written for part in parts),
            slices_kept=sum(part.slices_kept for part in parts),
            seconds=seconds,
            shards={shard: runs for part in parts for shard, runs in part.shards.items()},
        )


def pick(runs: Sequence[RunRecord], cursor: int, *, full: bool, detach: bool = False) -> tuple[int, int] | None:
    """Which runs to merge next: from the first index up to the second. None: there is nothing to gain.

    Only what lies below the cursor is closed: nothing can come between those runs any more. Tiered by
    size: the newest runs are merged, back to the oldest that is no more than ``_TIER_RATIO`` times as
    large as all that are newer together, so a row is rewritten a logarithmic number of times.
    Past the cursor nothing can come between loads of one place, either: where nobody writes, and so nobody flushes
    what a dead writer left in the log, loads would only ever get more.
    ``full``: all of them. ``detach``: those with files of another table, and no others. Runs of a shard that was
    split hold rows of the other part, too: they are rewritten together, before anything else.
    """
    closed = sum(1 for run in runs if run.end <= cursor)
    if detach:
        wanted = [number < closed and (run.keep is not None or is_elsewhere(run)) for number, run in enumerate(runs)]
        first = wanted.index(True) if True in wanted else -1
        return None if first < 0 else (first, wanted.index(False, first) if False in wanted[first:] else len(runs))
    if full and closed and (closed > 1 or runs[0].tombstones or runs[0].keep is not None):
        return 0, closed
    split = [run.keep is not None for run in runs[:closed]]
    if True in split:
        first = split.index(True)
        return first, split.index(False, first) if False in split[first:] else closed
    chosen = None if full or closed < 2 else _tier(runs, 0, closed)
    start = closed
    while chosen is None and start < len(runs):
        stop = start
        while stop < len(runs) and runs[stop].end == runs[start].end:
            stop += 1
        if stop - start >= 2:
            chosen = (start, stop) if full else _tier(runs, start, stop)
        start = stop
    return chosen


def _tier(runs: Sequence[RunRecord], start: int, stop: int) -> tuple[int, int] | None:
    first, size = stop - 1, runs[stop - 1].rows
    for number in range(stop - 2, start - 1, -1):  # beyond one that is too large: the newest may be tiny by chance, and would stop it all
        if runs[number].rows <= _TIER_RATIO * size:
            first = number
        size += runs[number].rows
    return (first, stop) if stop - first >= 2 else None


def has_oldest(inputs: Sequence[RunRecord], manifest: ShardManifest) -> bool:
    """Is nothing older than these runs? Then tombstones hide nothing. Past the cursor what is in the log is older."""
    return inputs[0].id == manifest.runs[0].id and inputs[-1].end <= manifest.cursor.position


def compact_shard(
    log: ShardLog,
    columnar: Columnar,
    rules: RowRules | Callable[[], RowRules],
    *,
    max_memory: int,
    full: bool = False,
    detach: bool = False,
    progress: Progress | None = None,
    slice_rows: int = SLICE_ROWS,
) -> CompactionReport:
    """Merge runs of one shard until there is nothing left to gain.

    Args:
        detach: instead, rewrite what is in files of another table.
        rules: the table's columns; if they may change, how to look them up.

    Raises:
        CommitConflictError: another compactor was faster, every time.
    """
    start, before = log.clock.monotonic(), None
    read = written = size = kept = 0
    for _ in range(_ROUNDS_MAX):
        manifest = log.manifests.load()
        before = len(manifest.runs) if before is None else before
        chosen = pick(manifest.runs, manifest.cursor.position, full=full, detach=detach)
        if chosen is None:
            break
        try:
            inputs = manifest.runs[chosen[0] : chosen[1]]
            # The columns are looked up after the runs are known: whoever wrote a run knew no newer ones. The other way
            # round a column that was added in between would be dropped, with its values.
            known = rules() if callable(rules) else rules
            with_oldest = has_oldest(inputs, manifest)
            made, kept_slices = _compact_once(log, columnar, known, inputs, with_oldest, max_memory, progress, slice_rows, detach=detach)
        except CommitConflictError:
            continue  # what we merged was merged by somebody else meanwhile; look again
        except ObjectMissingError as error:
            latest = log.manifests.load()
            if latest.state == "dropped":
                raise NotFoundError(f"shard {log.shard} was dropped", hint="open the table again, if there is one") from error
            if error.object in {part.path for run in latest.runs for part in run.slices}:
                raise DataLossError(f"{error.object} is missing, and the manifest names it", object=error.object) from error
            continue  # merged by somebody else, and collected
        read += sum(run.rows for run in inputs)
        written += made.rows - kept_slices.rows
        size += made.bytes - kept_slices.bytes
        kept += kept_slices.count
        if full:
            break
    else:
        raise CommitConflictError(f"shard {log.shard}: other compactions were faster, {_ROUNDS_MAX} times", hint="try again")
    manifest = log.manifests.load()
    seconds = log.clock.monotonic() - start
    return CompactionReport(before or 0, len(manifest.runs), read, written, size, kept, seconds, {log.shard: len(manifest.runs)})


def _compact_once(
    log: ShardLog,
    columnar: Columnar,
    rules: RowRules,
    inputs: Sequence[RunRecord],
    with_oldest: bool,
    max_memory: int,
    progress: Progress | None,
    slice_rows: int,
    *,
    detach: bool = False,
) -> tuple[RunRecord, Kept]:
    place, started = (log.manifests.place, log.shard), log.clock.monotonic()
    # 1. Register, before the first object: collection leaves the files of a registered attempt alone (G02).
    attempt = f"c{log.clock.token()}"
    register(log, attempt, "compaction", LEASE_SECONDS)
    failpoint("compact.registered")
    try:
        # 2. Write, under a name that no other try has (C09).
        runs = [OpenRun(record, columnar) for record in inputs]
        folder = f"shards/{log.shard}-{log.table_id}/runs/{attempt}-{log.clock.token()}"
        clock = log.clock if columnar.parallel_reads > 1 else None
        writer = RunWriter(log, columnar, rules, folder, sum(run.rows for run in inputs), progress, slice_rows, clock)
        writer.on_slice = _Renewal(log, attempt).renew
        untouched = untouched_slices(runs, rules, slice_rows, clock=clock) if with_oldest and not detach else None
        writer.write(runs, untouched, drop_tombstones=with_oldest, max_memory=max_memory)
        failpoint("compact.written")
        made = RunRecord(
            id=folder.rsplit("/", 1)[1],
            first=inputs[0].first,
            end=inputs[-1].end,
            slices=tuple(writer.slices),
            fields=tuple(zip(rules.field_ids, rules.schema.names, strict=True)),
            tombstones=writer.tombstones,
            created_at=log.clock.now(),
        )
        # 3. Commit: visible at once, as a whole.
        log.manifests.commit(lambda manifest: replaced(log, manifest, inputs, made, attempt))
    except BaseException:
        COMPACTION_FAILURES.add(1, *place)
        withdraw(log, attempt)
        raise
    failpoint("compact.committed")
    COMPACTION_SECONDS.observe(log.clock.monotonic() - started, *place)
    COMPACTION_ROWS_READ.add(sum(run.rows for run in inputs), *place)
    COMPACTION_ROWS_WRITTEN.add(made.rows - writer.kept.rows, *place)
    COMPACTION_BYTES_WRITTEN.add(made.bytes - writer.kept.bytes, *place)
    return made, writer.kept


def is_elsewhere(run: RunRecord) -> bool:
    """Does a run name files of another table?"""
    return any(part.uri is not None for part in run.slices)


class _Renewal:
    """Keeps the lease of a long compaction from ending under it."""

    def __init__(self, log: ShardLog, attempt: str) -> None:
        self._log, self._attempt, self._renewed = log, attempt, log.clock.monotonic()

    def renew(self) -> None:
        clock = self._log.clock
        if clock.monotonic() - self._renewed < LEASE_SECONDS / 4:
            return
        renew(self._log, self._attempt, LEASE_SECONDS)
        self._renewed = clock.monotonic()


def withdraw(log: ShardLog, attempt: str) -> None:
    """Let collection have what we wrote. If this fails too, the lease ends by itself."""
    try:
        give_back(log, attempt)
    except Exception:  # the reason we are here is the one to tell
        return


def replaced(log: ShardLog, manifest: ShardManifest, inputs: Sequence[RunRecord], made: RunRecord, attempt: str) -> ShardManifest | None:
    if any(run.id == made.id for run in manifest.runs):
        return None
    check_registered(log, manifest, attempt)
    ids = [run.id for run in manifest.runs]
    wanted = [run.id for run in inputs]
    at = ids.index(wanted[0]) if wanted[0] in ids else -1
    if at < 0 or ids[at : at + len(wanted)] != wanted:
        raise CommitConflictError(f"shard {log.shard}: another compaction has merged these runs", hint="compact again")
    now, named = log.clock.now(), {part.path for part in made.slices}
    gone = tuple(
        ReplacedRun(id=run.id, replaced_at=now, slices=tuple(part for part in run.slices if part.path not in named)) for run in inputs
    )
    return without(manifest, attempt).but(
        runs=(*manifest.runs[:at], *((made,) if made.slices else ()), *manifest.runs[at + len(wanted) :]),
        replaced=(*manifest.replaced, *gone),
    )
