"""What is broken in a shard: all of it, one by one. Reads only.

Owns: looking at every object that something needs, and naming those that are missing or not what was
written. Does not own: what is done about it (repair), the short answer (verify).

Unlike a walk of the log, which stops at the first thing that is wrong, this goes on behind it: where each
finished epoch ended stands in the manifest, so the names that must be there are known without reading
what is broken. Only past the last known end the log itself leads, up to the highest position that anybody
knew durable.

A store that does not answer is no damage. What cannot be opened is looked at again through the store
before it is called broken: if the store does not give its bytes either, that error is raised.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

import numpy as np
import pyarrow as pa

from headgate.clock import map_ordered
from headgate.columnar import Columnar
from headgate.errors import CorruptEntryError, HeadgateError, ObjectMissingError, StoreUnavailableError
from headgate.manifest import ChainPoint, ManifestChain, ShardManifest
from headgate.manifest.chain import AnyManifest
from headgate.manifest.model import CheckpointRecord, RunRecord, SliceRecord
from headgate.run import OpenRun
from headgate.schema import RowRules, as_now
from headgate.store import Store
from headgate.wal.entry import SEAL_BYTES, decode_entry
from headgate.wal.log import ShardLog
from headgate.wal.marker import marker_stands
from headgate.wal.space import WalSpace
from headgate.wal.tip import locate

_AT_ONCE = 512
_PARALLEL = 16
_NEWEST_READ = 8
REPAIR = "repair"
"""How writers that repair are called; an entry of theirs stands for one that is gone."""

Found = Literal["nothing", "damaged", "data", "seal"]


@dataclass(frozen=True, slots=True)
class BrokenEntry:
    """A name of the log that does not hold what it should."""

    point: ChainPoint
    wanted: Literal["data", "seal"]
    found: Found
    rows: int | None = None
    """Of a damaged entry: how many can still be counted in it."""


@dataclass(frozen=True, slots=True)
class BrokenSlice:
    """Files of a run that are missing or cannot be read."""

    run: RunRecord
    part: SliceRecord
    why: str
    keys: tuple[str, str] | None = None
    """Between which keys its rows were, as far as its neighbours tell."""


@dataclass(frozen=True, slots=True)
class BrokenCheckpoint:
    """A pin on something that is not there."""

    id: str
    record: CheckpointRecord
    why: str


@dataclass(frozen=True)
class Damage:
    """All that is broken in one shard, against one manifest."""

    manifest: ShardManifest
    marker: Literal["fine", "missing", "damaged"] = "fine"
    is_log_gone: bool = False
    """Not one object of the log is there."""
    entries: list[BrokenEntry] = field(default_factory=list)
    slices: list[BrokenSlice] = field(default_factory=list)
    checkpoints: list[BrokenCheckpoint] = field(default_factory=list)

    @property
    def is_none(self) -> bool:
        return self.marker == "fine" and not (self.entries or self.slices or self.checkpoints)


def newest_readable(chain: ManifestChain[AnyManifest]) -> tuple[AnyManifest | None, list[int]]:
    """The newest version that can be read, and the versions after it that cannot, newest first."""
    broken: list[int] = []
    for version in reversed(chain.versions()):
        try:
            return chain.at(version), broken
        except CorruptEntryError:
            broken.append(version)
        except ObjectMissingError:
            continue  # collected since it was listed
    return None, broken


def find_damage(log: ShardLog, manifest: ShardManifest, store: Store, columnar: Columnar, rules: RowRules) -> Damage:
    """Look at everything that this manifest needs.

    Raises:
        WalStoreMismatchError: the log's store belongs to another table.
        StoreError: a store does not answer.
    """
    space = log.space(manifest)
    marker: Literal["fine", "missing", "damaged"] = "fine"
    listed = {point: info.size_bytes for point, info in space.list_from(0)}
    try:
        if not marker_stands(log, space) and not manifest.is_clean:
            marker = "missing"
    except CorruptEntryError:
        marker = "damaged"
    is_log_wanted = marker != "fine" or bool(listed) or not manifest.is_clean
    entries = list(broken_entries(log, manifest, listed)) if is_log_wanted else []
    damage = Damage(manifest, marker, not listed, entries)
    known: dict[str, str | None] = {}
    for run in _named_runs(manifest):
        damage.slices.extend(_broken_slices(run, store, columnar, rules, known))
    damage.checkpoints.extend(_broken_checkpoints(log, manifest, store, columnar, known, {entry.point for entry in entries}))
    return damage


# -- the log


def broken_entries(log: ShardLog, manifest: ShardManifest, listed: dict[ChainPoint, int]) -> Iterator[BrokenEntry]:
    """The names, from the first that is not collected, that hold not what they should; and seals, from the first of all."""
    space, start = log.space(manifest), locate(manifest, manifest.wal_floor)
    for seal in manifest.seals():
        if seal < start and listed.get(seal) != SEAL_BYTES:
            yield BrokenEntry(seal, "seal", "nothing" if seal not in listed else "data")
    wanted, point = _finished(manifest, start), start
    while chunk := list(islice(wanted, _AT_ONCE)):
        for (point, kind), (found, rows) in zip(chunk, _look(log, space, [at for at, _ in chunk]), strict=True):
            if found != kind:
                yield BrokenEntry(point, kind, found, rows)
        point = point.past_seal() if chunk[-1][1] == "seal" else point.past_data()
    yield from _open_end(log, manifest, space, point, _durable_end(manifest, space, listed, point.epoch))


def _finished(manifest: ShardManifest, point: ChainPoint) -> Iterator[tuple[ChainPoint, Literal["data", "seal"]]]:
    """What must stand where, in all epochs whose end is known."""
    ends = manifest.ends()
    while (end := ends.end_of(point.epoch)) is not None:
        while point.position < end:
            yield point, "data"
            point = point.past_data()
        yield point, "seal"
        point = point.past_seal()


def _open_end(log: ShardLog, manifest: ShardManifest, space: WalSpace, point: ChainPoint, durable_end: int) -> Iterator[BrokenEntry]:
    """The rest: what stands there leads on, and what is missing counts up to where all was known durable."""
    while point.epoch <= manifest.epoch:
        chunk = [ChainPoint(point.epoch, point.position + i) for i in range(_AT_ONCE)]
        for at, (found, rows) in zip(chunk, _look(log, space, chunk), strict=True):
            if found == "nothing" and at.position >= durable_end:
                return  # the tip
            if found in ("nothing", "damaged"):
                is_seal = found == "damaged" and _is_seal_sized(space, at)
                yield BrokenEntry(at, "seal" if is_seal else "data", found, rows)
                found = "seal" if is_seal else "data"
            point = at.past_seal() if found == "seal" else at.past_data()
            if found == "seal":
                break


def _durable_end(manifest: ShardManifest, space: WalSpace, listed: dict[ChainPoint, int], epoch: int) -> int:
    """Past the highest position that the manifest, or an entry that can be read, knew durable."""
    known = [manifest.wal_position_last_seen + 1, manifest.cursor.position]
    if manifest.resume is not None:
        known.append(manifest.resume.position)
    newest: dict[tuple[int, bool], deque[ChainPoint]] = {}
    for point in sorted(listed):
        if point.epoch >= epoch:
            newest.setdefault((point.epoch, listed[point] == SEAL_BYTES), deque(maxlen=_NEWEST_READ)).append(point)
    for points in newest.values():
        for point in points:
            key = space.key(*point)
            try:
                entry = decode_entry(space.store.get(key), key, space.wal_id, space.shard, *point)
            except (CorruptEntryError, ObjectMissingError):
                continue
            known.append(entry.header.durable_through + 1)
    return max(known)


def _look(log: ShardLog, space: WalSpace, points: Sequence[ChainPoint]) -> Iterator[tuple[Found, int | None]]:
    def look(point: ChainPoint) -> tuple[Found, int | None]:
        key = space.key(*point)
        try:
            data = space.store.get(key)
        except ObjectMissingError:
            return "nothing", None
        try:
            entry = decode_entry(data, key, space.wal_id, space.shard, *point)
        except CorruptEntryError:
            return "damaged", _rows_in(data)
        return ("seal", None) if entry.is_seal else ("data", sum(put.rows.num_rows for put in entry.puts))

    return map_ordered(log.clock, look, points, parallel=_PARALLEL, ahead=4 * _PARALLEL)


def _is_seal_sized(space: WalSpace, point: ChainPoint) -> bool:
    try:
        return space.store.head(space.key(*point)).size_bytes == SEAL_BYTES
    except ObjectMissingError:
        return False


def _rows_in(data: memoryview) -> int | None:
    """How many rows of a damaged entry Arrow can still read; None: it cannot be told."""
    rows = 0
    try:
        for batch in pa.ipc.open_stream(pa.py_buffer(data)):
            rows += batch.num_rows
    except Exception:  # anything may be wrong with it
        return None
    return rows


# -- runs


def _named_runs(manifest: ShardManifest) -> Iterator[RunRecord]:
    """All runs whose files something needs, each once."""
    seen: set[str] = set()
    placed = [run for load in manifest.loads for run in load.runs]
    announced = [run for load in manifest.announced.values() for run in load.runs]
    for run in (*manifest.runs, *placed, *announced):
        if run.id not in seen:
            seen.add(run.id)
            yield run


def _broken_slices(
    run: RunRecord, store: Store, columnar: Columnar, rules: RowRules, known: dict[str, str | None]
) -> Iterator[BrokenSlice]:
    for part in run.slices:
        why = slice_fault(part, store, columnar, known)
        if why is not None:
            yield BrokenSlice(run, part, why, _keys_around(run, part, columnar, rules))


def slice_fault(part: SliceRecord, store: Store, columnar: Columnar, known: dict[str, str | None]) -> str | None:
    """What is wrong with a slice, every column read; None: nothing."""
    place = f"{part.uri or ''}/{part.path}"
    if place not in known:
        known[place] = _fault(part, store, columnar)
    return known[place]


def _fault(part: SliceRecord, store: Store, columnar: Columnar) -> str | None:
    for attempt in range(2):
        try:
            opened = columnar.open_record(part)
            if opened.num_rows != part.rows:
                return f"has {opened.num_rows:,} of {part.rows:,} rows"
            rows = sum(batch.num_rows for batch in opened.scan(opened.schema.names))
            return None if rows == part.rows else f"gives {rows:,} of {part.rows:,} rows"
        except ObjectMissingError:
            return "is missing"
        except StoreUnavailableError as error:
            # The files' reader says so of damaged files too. The store itself decides: if it has their bytes, they are wrong.
            if part.uri is not None:
                raise  # a parent's files are its own to mend
            for info in store.list(f"{part.path}/"):
                store.get_range(info.key, 0, 1)
            if attempt:
                return f"cannot be read: {error.message}"
        except HeadgateError as error:
            return f"cannot be read: {error.message}"
    return "cannot be read"


def _keys_around(run: RunRecord, broken: SliceRecord, columnar: Columnar, rules: RowRules) -> tuple[str, str] | None:
    """Between which keys a slice's rows are: its own, if they can be read, else those of the slices beside it."""
    if not rules.key or not broken.rows:
        return None
    own = _edges(run, broken, columnar, rules)
    if own is not None:
        return own
    at = run.slices.index(broken)
    before = _edges(run, run.slices[at - 1], columnar, rules) if at else None
    after = _edges(run, run.slices[at + 1], columnar, rules) if at + 1 < len(run.slices) else None
    if before is None and after is None:
        return None
    return (f"after {before[1]}" if before else "the first"), (f"before {after[0]}" if after else "the last")


def _edges(run: RunRecord, part: SliceRecord, columnar: Columnar, rules: RowRules) -> tuple[str, str] | None:
    opened = OpenRun(run.but(slices=(part,)), columnar)
    names = opened.names
    columns = [names[rules.field_ids[rules.schema.get_field_index(name)]] for name in rules.key]
    try:
        edges = as_now(opened.take(np.array([0, part.rows - 1]), columns), names, rules, rules.key)
    except Exception:  # what is broken may break its reader in any way
        return None
    first, last = ([column[i].as_py() for column in edges.columns] for i in (0, 1))
    return ", ".join(map(str, first)), ", ".join(map(str, last))


# -- checkpoints


def _broken_checkpoints(
    log: ShardLog, manifest: ShardManifest, store: Store, columnar: Columnar, known: dict[str, str | None], broken: set[ChainPoint]
) -> Iterable[BrokenCheckpoint]:
    lost = {point.position for point in broken}
    for id, record in manifest.checkpoints.items():
        if not record.version:
            continue
        held = [position for position in range(record.position, record.end) if position in lost] if lost else []
        try:
            pinned = log.manifests.at(record.version)
        except (CorruptEntryError, ObjectMissingError) as error:
            yield BrokenCheckpoint(id, record, f"version {record.version} of the manifest, which it pins: {error.message}")
            continue
        parts = (part for run in pinned.runs for part in run.slices)
        faults = ((part, slice_fault(part, store, columnar, known)) for part in parts)
        wrong = next((f"{part.path} {why}" for part, why in faults if why is not None), None)
        if wrong is None and held:
            wrong = f"position {held[0]} of the log, which it holds, is gone"
        if wrong is not None:
            yield BrokenCheckpoint(id, record, wrong)
