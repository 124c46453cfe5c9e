"""One shard's change feed: its log entries and its loads, in the one order in which they count.

Owns: offsets, up to where that order is certain, reading between two of them. Does not own: what a batch looks like (change_rows), who has
read how far (consumer), many shards, waiting and beginnings (changes), where loads are placed (load).

An offset is a cut through the order: all entries before ``position`` and all loads up to number ``load``
are behind it. A load with place q stands after all entries before q, and before the entry at q. Places never
fall, so a cut is two numbers that never fall either. ``plan`` finds a later cut, ``read`` gives what lies
between two; both are functions of a shard and offsets, write nothing, and can be called anywhere, again and
again: what lies between two cuts never changes.

What must not happen: an entry is delivered, and a load comes to stand before it afterwards.

    t0 a load is announced, and reads the tip: 5 · t1 entries 5 to 9 are written · t2 the feed delivers them ·
    t3 the load is placed at 5, with a new number

Delivered next, its old rows would win over those of 5 to 9 in every replica; not delivered, they are missed
(P17). So a cut is taken in this order: the tip, THEN a manifest. If that shows no announced load, whatever is
announced later reads a later tip, and is placed at or after the cut. If it shows one, the cut is where nothing
can be placed any more: no place lies before the manifest's ``last_place``.

Collection may have taken what lies after an offset. That is an error which says what is gone, never fewer
changes. Seals hold no changes: an offset may be moved over those that the manifest knows of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from headgate.change_rows import OFFSET as OFFSET
from headgate.change_rows import ChangeBatch, Form, together
from headgate.change_rows import Offset as Offset
from headgate.change_rows import change_schema as change_schema
from headgate.change_rows import stamped as stamped
from headgate.errors import DataLossError, InvalidInputError, ObjectMissingError, WalTruncatedError
from headgate.manifest.model import PlacedLoad, ShardManifest
from headgate.run import DELETED, OpenRun
from headgate.schema import RowRules
from headgate.view import ShardReader
from headgate.wal.entry import Entry
from headgate.wal.fence import over_seals
from headgate.wal.log import ShardLog
from headgate.wal.tailer import WalTailer
from headgate.wal.tip import find_tip, locate

BATCH_ROWS = 1 << 16
BATCH_BYTES = 16 << 20


class HasFeed(Protocol):
    """A shard, as far as its changes are concerned."""

    @property
    def log(self) -> ShardLog: ...
    @property
    def rules(self) -> RowRules: ...
    @property
    def reader(self) -> ShardReader: ...


# -- cuts


def settled(manifest: ShardManifest, tip: int) -> Offset:
    """The latest cut that is certain, by a tip and a manifest that was read AFTER it."""
    place = manifest.last_place()
    return Offset(place if manifest.announced else max(tip, place), manifest.next_load - 1)


def latest(shard: HasFeed) -> Offset:
    """The end of the changes as of now."""
    manifest, tip = find_tip(shard.log)
    return settled(manifest, tip.position)


def earliest(manifest: ShardManifest) -> Offset:
    """From here on every change is there, with nothing missing in between."""
    gone = [load.number for load in manifest.loads if load.position < manifest.wal_floor]
    return Offset(manifest.wal_floor, max([manifest.load_floor, *gone]))


def past_seals(manifest: ShardManifest, offset: Offset) -> Offset:
    """The same cut, moved over the seals that stand right there."""
    if offset.position >= manifest.cursor.position:
        return offset
    point = locate(manifest, offset.position)
    if point.position != offset.position:
        return offset
    return offset._replace(position=over_seals(point, manifest.ends()).position)


def check_there(log: ShardLog, manifest: ShardManifest, offset: Offset, tip: int | None = None) -> Offset:
    """The offset to read from, if all that comes after it is there.

    Raises:
        WalTruncatedError: some of it was collected.
        InvalidInputError: it lies past the end.
    """
    moved = past_seals(manifest, offset)
    if moved.position < manifest.wal_floor:
        raise WalTruncatedError(
            f"the changes of shard {log.shard} from position {moved.position} to {manifest.wal_floor - 1} were collected",
            object=log.space(manifest).key(locate(manifest, moved.position).epoch, moved.position),
            hint="start at 'earliest' to go on with what is there, or at 'snapshot'; a named consumer holds collection back",
        )
    if moved.load < manifest.load_floor:
        raise WalTruncatedError(
            f"loads {moved.load + 1} to {manifest.load_floor} of shard {log.shard} were collected",
            object=f"load {moved.load + 1}",
            hint="start at 'earliest' to go on with what is there, or at 'snapshot'; a named consumer holds collection back",
        )
    if moved.load >= manifest.next_load or (tip is not None and moved.position > max(tip, manifest.last_place())):
        raise InvalidInputError(
            f"offset {tuple(offset)} lies past the end of shard {log.shard}: position {tip}, load {manifest.next_load - 1}",
            hint="it belongs to another table, or to a later state of this one than its store has",
        )
    return moved


class Horizon(NamedTuple):
    """How far the changes after an offset are certain now."""

    begin: Offset
    """The offset, past seals."""
    end: Offset
    """At or after it."""
    manifest: ShardManifest

    @property
    def is_open(self) -> bool:
        """Is there perhaps more, once loads that are announced have their places?"""
        return bool(self.manifest.announced)

    def limited(self, max_entries: int) -> Offset:
        """At most so many positions and loads further on."""
        return _limited(self.begin, self.end, self._due(), max_entries, None)

    def limited_bytes(self, log: ShardLog, max_entries: int | None, max_bytes: int) -> Offset:
        return _limited(self.begin, self.end, self._due(), max_entries, _Sizes(log, self.manifest, self.begin.position, max_bytes))

    def _due(self) -> list[PlacedLoad]:
        return [load for load in self.manifest.loads if load.number > self.begin.load]


def horizon(shard: HasFeed, start: Offset) -> Horizon:
    """Look how far the changes after an offset go.

    Raises:
        WalTruncatedError: what comes next was collected.
    """
    log = shard.log
    # 1. The tip, THEN a manifest: find_tip reads them in this order.
    manifest, tip = find_tip(log)
    begin = check_there(log, manifest, start, tip.position)
    # 2. Up to where nothing can be placed any more. While a load is announced that may be before what we have.
    end = settled(manifest, tip.position)
    return Horizon(begin, end if end.position >= begin.position else begin, manifest)


def plan(shard: HasFeed, start: Offset, max_entries: int | None = None, max_bytes: int | None = None) -> Offset:
    """A later cut, as far as the order is certain and the limits allow; ``start`` if there is nothing new.

    Args:
        max_entries: at most so many positions and loads.
        max_bytes: stop before the entry or load that would pass it. The first one always fits.

    Raises:
        WalTruncatedError: what comes next was collected.
    """
    for name, value in (("max_entries", max_entries), ("max_bytes", max_bytes)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InvalidInputError(f"{name} is {value!r}", hint="a whole number, 1 or more, or None")
    found = horizon(shard, start)
    if max_bytes is not None:
        return found.limited_bytes(shard.log, max_entries, max_bytes)
    return found.end if max_entries is None else found.limited(max_entries)


def cuts_between(manifest: ShardManifest, start: Offset, end: Offset, max_entries: int) -> list[Offset]:
    """Cuts between two others, in order, with at most so many positions and loads from each to the next."""
    due = [load for load in manifest.loads if start.load < load.number <= end.load]
    found: list[Offset] = []
    at = start
    while True:
        following = _limited(at, end, [load for load in due if load.number > at.load], max_entries, None)
        if following in (at, end):
            return found
        found.append(following)
        at = following


def next_shards(manifest: ShardManifest) -> dict[str, Offset]:
    """Where the changes go on after the end of a shard that was split: its children, and the offsets they begin at.

    Positions and the numbers of loads go on in the children; what they have from before is the parent's.
    """
    if manifest.state != "retired" or manifest.split is None:
        return {}
    end = Offset(manifest.cursor.position, manifest.next_load - 1)
    return {child.shard: end for child in manifest.split.children}


class _Sizes:
    """What the entries from a position on take, as far as ``max_bytes`` reaches; a listing tells."""

    def __init__(self, log: ShardLog, manifest: ShardManifest, position: int, max_bytes: int) -> None:
        self.left = max_bytes
        self._known: dict[int, int] = {}
        listed = 0
        for point, info in log.space(manifest).list_from(*locate(manifest, position)):
            if point.position >= position:
                # Of two entries at one position the later epoch's is the one that counts: the other is past its seal.
                self._known[point.position] = info.size_bytes
                listed += info.size_bytes
                if listed > max_bytes:
                    break

    def takes(self, position: int) -> bool:
        return self.takes_bytes(self._known.get(position, self.left + 1))

    def takes_bytes(self, size: int) -> bool:
        self.left -= size
        return self.left >= 0


def _limited(begin: Offset, end: Offset, due: Sequence[PlacedLoad], max_entries: int | None, sizes: _Sizes | None) -> Offset:
    position, number = begin
    left = end.position - begin.position + len(due) if max_entries is None else max_entries
    first = True
    for load in (*due, None):
        stop = end.position if load is None else load.position
        if sizes is None:
            taken = max(0, min(left, stop - position))
            position, left = position + taken, left - taken
        else:
            while position < stop and left > 0 and (sizes.takes(position) or first):
                position, left, first = position + 1, left - 1, False
        if (
            load is None
            or position < stop
            or left <= 0
            or not (sizes is None or sizes.takes_bytes(sum(run.bytes for run in load.runs)) or first)
        ):
            break
        number, left, first = load.number, left - 1, False
    return Offset(position, number)


# -- reading


def read(
    shard: HasFeed,
    start: Offset,
    end: Offset,
    *,
    rules: RowRules | None = None,
    newer: Callable[[], RowRules] | None = None,
    batch_rows: int = BATCH_ROWS,
) -> Iterator[ChangeBatch]:
    """The changes between two cuts, in order. Fetched ahead and in parallel, in bounded memory.

    Args:
        rules: the columns that the batches have; None: those of when the handle was made.
        newer: called when rows have columns that ``rules`` do not know: the rules from there on.

    Raises:
        WalTruncatedError: some of it was collected.
        WalHoleError, CorruptEntryError: some of it was lost.
    """
    log = shard.log
    manifest = log.manifests.load()
    begin = check_there(log, manifest, start)
    due = [load for load in manifest.loads if begin.load < load.number <= end.load]
    if len(due) < end.load - begin.load:
        raise InvalidInputError(f"shard {log.shard} has no load {end.load}", hint="read up to what plan() gave")
    form = Form(log.shard, rules or shard.rules, newer)
    entries = _Entries(shard, begin.position, end.position)
    try:
        at = begin
        for load in due:
            if load.position > at.position:
                yield from _entries_until(form, entries, Offset(load.position, at.load), batch_rows)
                at = at._replace(position=load.position)
            yield from _load(shard, form, load, at, batch_rows)
            at = at._replace(load=load.number)
        if end.position > at.position:
            yield from _entries_until(form, entries, end, batch_rows)
    finally:
        entries.close()


class _Entries:
    """The entries of a range, one look ahead."""

    def __init__(self, shard: HasFeed, first: int, end: int) -> None:
        self._shard, self._first, self._end = shard, first, end
        self._read: Iterator[Entry] | None = None
        self._next: Entry | None = None

    def before(self, position: int) -> Iterator[Entry]:
        """Those before a position, in order; seals are left out."""
        if self._first >= position:
            return
        if self._read is None:
            self._read = WalTailer(self._shard).read(self._first, include_seals=True)
        while True:
            entry = self._next or next(self._read, None)
            self._next = None
            if entry is None:
                self._missing(position)
            elif entry.position >= position:
                self._next = entry
                return
            else:
                self._first = entry.position + 1
                if not entry.is_seal:
                    yield entry
                if self._first >= position:
                    return

    def _missing(self, position: int) -> None:
        """The log ends before a position that was seen durable."""
        log = self._shard.log
        manifest = log.manifests.load()
        check_there(log, manifest, Offset(self._first, manifest.load_floor))
        key = log.space(manifest).key(locate(manifest, self._first).epoch, self._first)
        raise WalTruncatedError(f"shard {log.shard} ends at {self._first}; entries up to {position - 1} were there", object=key)

    def close(self) -> None:
        if self._read is not None:
            self._read.close()  # type: ignore[attr-defined]  # a generator: ends its threads


def _entries_until(form: Form, entries: _Entries, end: Offset, batch_rows: int) -> Iterator[ChangeBatch]:
    """Small entries go together into one batch; a large one makes its own."""
    held: list[Entry] = []
    rows = size = 0
    for entry in entries.before(end.position):
        held.append(entry)
        rows += sum(put.rows.num_rows for put in entry.puts)
        size += entry.size_bytes
        if rows >= batch_rows or size >= BATCH_BYTES:
            yield from together(form, held, end.load)
            held, rows, size = [], 0, 0
    if held:
        yield from together(form, held, end.load)


def _load(shard: HasFeed, form: Form, load: PlacedLoad, before: Offset, batch_rows: int) -> Iterator[ChangeBatch]:
    """The rows of a load. Until the last batch the offset stays before it: whoever stops in the middle gets it again."""
    left = sum(run.rows for run in load.runs)
    try:
        for run in load.runs:
            names = dict(run.fields)
            form.look(names)
            columns = [names[number] for number in form.rules.field_ids if number in names]
            for rows in OpenRun(run, shard.reader.cache.columnar).scan(
                [*columns, DELETED] if run.tombstones else columns, batch_rows=batch_rows
            ):
                left -= rows.num_rows
                deleted = rows.column(DELETED) if run.tombstones else None
                marks = stamped(rows.num_rows, deleted, load.position, load.number, load.time)
                yield form.batch(form.now(rows, names), marks, before._replace(load=load.number) if left == 0 else before)
    except ObjectMissingError as error:
        manifest = shard.log.manifests.load()
        check_there(shard.log, manifest, Offset(manifest.wal_floor, load.number - 1))
        raise DataLossError(
            f"{error.object} is missing, and load {load.number} of shard {shard.log.shard} names it", object=error.object
        ) from error
