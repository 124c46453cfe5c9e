"""What a shard's manifest says: the whole state of a shard in one small object.

Owns: the fields, and the arithmetic over them (segments, holds). Does not own: how versions
follow each other (chain), who may change what (fence, trim, collect …).

Fields that this version does not know are kept and written back, at every level.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headgate.errors import DataLossError
from headgate.manifest.document import FORMAT_VERSION

HISTORY_VERSIONS_MAX = 64
POSITION_MAX = 10**18
EPOCHS_OPEN_MAX = 1_000_000
IN_TABLE = "shard:"
"""How pins are marked that stand for a part of a shard that was split."""


class ChainPoint(NamedTuple):
    """Where reading goes on: the first position not yet passed, and the epoch whose folder holds it."""

    epoch: int
    position: int

    def past_data(self) -> ChainPoint:
        return ChainPoint(self.epoch, self.position + 1)

    def past_seal(self) -> ChainPoint:
        return ChainPoint(self.epoch + 1, self.position + 1)


FIRST_POINT = ChainPoint(1, 0)


class Record(BaseModel):
    """Immutable; unknown fields survive a round trip."""

    model_config = ConfigDict(frozen=True, extra="allow")

    def but(self, **changes: Any) -> Self:
        """A copy with some fields changed."""
        return self.model_copy(update=changes)


class Manifest(Record):
    """What every chain of versions has: its own number and id, and the ids before it."""

    format_version: int = FORMAT_VERSION
    version: int = Field(ge=0)
    id: str
    history: tuple[str, ...] = ()
    """Ids of the versions right before this one, oldest first, at most 64."""

    @property
    def folder(self) -> str | None:
        """Where it belongs, if it says so."""
        return None

    def contradiction(self) -> str | None:
        """What cannot be, if something in it cannot."""
        return None


class Segment(NamedTuple):
    """``epochs`` epochs from ``epoch`` on, the first sealed at ``end``, each next one at the next position.

    Idle reopens seal one position after another, so any number of them is one row.
    """

    epoch: int
    end: int
    epochs: int = 1


class Segments:
    """Where each finished epoch ended: the position of the seal that ended it."""

    def __init__(self, rows: Iterable[Segment] = ()) -> None:
        self.rows = tuple(Segment(*row) for row in rows)

    def adding(self, ends: dict[int, int]) -> Segments:
        """These and further ones; one that is there already must agree."""
        rows = list(self.rows)
        for epoch, end in sorted(ends.items()):
            known = Segments(rows).end_of(epoch)
            if known is not None:
                if known != end:
                    raise DataLossError(f"epoch {epoch} ended at {known} by the manifest, and at {end} by the log", object=f"epoch {epoch}")
                continue
            last = rows[-1] if rows else None
            if last is not None and epoch < last.epoch + last.epochs:
                raise DataLossError(f"the end of epoch {epoch} is missing in the manifest", object=f"epoch {epoch}")
            if last is not None and epoch == last.epoch + last.epochs and end == last.end + last.epochs:
                rows[-1] = last._replace(epochs=last.epochs + 1)
            else:
                rows.append(Segment(epoch, end))
        return Segments(rows)

    def end_of(self, epoch: int) -> int | None:
        """Where the epoch was sealed, if that is known."""
        for row in reversed(self.rows):
            if row.epoch <= epoch < row.epoch + row.epochs:
                return row.end + epoch - row.epoch
            if row.epoch < epoch:
                return None
        return None

    def ends(self) -> Iterable[ChainPoint]:
        """Every seal, oldest first."""
        for row in self.rows:
            for i in range(row.epochs):
                yield ChainPoint(row.epoch + i, row.end + i)

    def locate(self, position: int, first: ChainPoint = FIRST_POINT) -> ChainPoint:
        """A point of the chain at ``position``, or the last one known before it.

        ``first`` is a point known to be on the chain; positions before it are its own concern.
        """
        point = first
        for row in self.rows:
            if row.epoch + row.epochs - 1 < point.epoch:
                continue
            if position <= row.end:
                return point._replace(position=max(position, point.position))
            inside = min(position - row.end, row.epochs)
            point = ChainPoint(row.epoch + inside, row.end + inside)
            if inside < row.epochs:
                return point
        return point


class WalState(Record):
    """Which WAL this shard writes, and whether nothing in it is needed."""

    id: str
    uri: str | None = None
    """Where a separate WAL store is, for people and as a default; None: beside the table."""
    first_epoch: int = 1
    """The seals of earlier epochs are in the WAL that was written before this one."""
    clean_at: int | None = None
    """The tip, when every row before it is in runs and nothing was in flight; else None."""


class Owner(Record):
    """Who holds the epoch. For people; the epoch alone decides."""

    writer: str
    claimed_at: float
    flushes: bool = False
    """It makes runs of its rows, so only its flushes move the cursor."""
    split: str | None = None
    """It claimed the shard to split it."""
    after: str | None = None
    """Of a splitter: the last writer before it that was none; None: there never was one."""


class ProducerMark(Record):
    """The highest sequence accepted from a producer, and the entry it went into."""

    sequence: int
    epoch: int
    position: int
    time: float


class Hold(Record):
    """Something that needs the WAL from ``position`` on: a consumer or a checkpoint."""

    position: int


class ConsumerRecord(Hold):
    """A named reader of the changes: it has read all before ``position``, and all loads up to ``load``."""

    load: int = 0
    created_at: float = 0.0
    updated_at: float = 0.0
    owner: str | None = None
    """Who reads by this name now; only it may move the offset."""
    snapshot: str | None = None
    """The checkpoint whose rows come before the changes, and were not all given yet. It goes with this mark."""


class CheckpointRecord(Hold):
    """A pin on one version of a manifest: its runs, and the log from ``position`` (its cursor) to ``end``."""

    end: int = 0
    """Past the last position that belongs to it. Equal to ``position``: nothing of the log is needed."""
    version: int = 0
    """The manifest version that added it."""
    name: str | None = None
    created_at: float = 0.0
    expires_at: float | None = None
    """None: it stays until it is dropped."""
    clone: str | None = None
    """The URI of the clone that it stands for; ``shard:<id>``: a part of this shard, since it was split."""
    shards: tuple[str, ...] = ()
    """The shards that the table had then; empty: of this shard alone."""


class AttemptRecord(Record):
    """Files are being written under this id, and must not be taken for garbage before the lease is over."""

    owner: str
    expires_at: float


class SliceRecord(Record):
    """One immutable set of columnar files: part of a run, or all of it."""

    path: str
    """Relative to the table."""
    rows: int = Field(ge=0)
    bytes: int = Field(default=0, ge=0)
    uri: str | None = None
    """The table whose file it is; None: this one. A clone reads what its parent has until it is detached."""


class HashRange(Record):
    """Part of the space of hashes: rows whose column hashes, in its upper 32 bits, to ``low`` or more and less than ``high``."""

    low: int = Field(ge=0)
    high: int = Field(le=1 << 32)
    column: int
    """The id of the column; for ever, whatever it is called."""


class RunRecord(Record):
    """Immutable rows, sorted by key, keys unique, tombstones included: what positions ``first`` to ``end - 1`` came to.

    Without a key: all rows, in the order they came.
    """

    id: str
    first: int = Field(ge=0)
    end: int = Field(ge=0)
    slices: tuple[SliceRecord, ...]
    fields: tuple[tuple[int, str], ...]
    """The id and the name, in the files, of each column."""
    tombstones: int = Field(default=0, ge=0)
    """How many rows only say that their key is deleted. None: the files have no column for it."""
    created_at: float = 0.0
    keep: HashRange | None = None
    """Since its shard was split: only these of the rows belong to it, the others are in the files and nowhere else."""

    @property
    def rows(self) -> int:
        """Tombstones included, and those that do not belong to it."""
        return sum(part.rows for part in self.slices)

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.slices)


class AnnouncedLoad(Record):
    """A load whose files are complete, and whose place is not known yet.

    What is announced holds its files. It is placed, or withdrawn: by its owner, or by anyone once the
    lease is over, after the transaction that it belongs to has been decided.
    """

    runs: tuple[RunRecord, ...] = ()
    """Its files, oldest first; ``first`` and ``end`` mean nothing yet. None: only the transaction is to be noted."""
    transaction: str
    """The name of the object that decides."""
    app: str
    version: int
    query: str | None = None
    expires_at: float = 0.0


class PlacedLoad(Record):
    """A load in the order of changes: after all positions before ``position``, and before the entry there."""

    number: int = Field(ge=1)
    position: int = Field(ge=0)
    runs: tuple[RunRecord, ...]
    """As they were placed, oldest first; their files are there as long as this record is, whatever was compacted."""
    app: str
    version: int
    time: float = 0.0


class TransactionMark(Record):
    """The last transaction of an application that this shard has, with rows or without."""

    version: int
    query: str | None = None
    """Of a stream: which one counts the versions."""
    time: float = 0.0


class ReplacedRun(Record):
    """A run that no read begins with any more."""

    id: str
    replaced_at: float
    slices: tuple[SliceRecord, ...]
    """Those that nothing names any more; a slice may go on in the run that replaced this one."""


class ChildShard(Record):
    """Part of a shard that was split."""

    shard: str
    range: HashRange


class SplitRecord(Record):
    """A split under way, or done: what a shard becomes."""

    id: str
    children: tuple[ChildShard, ...]
    expires_at: float = 0.0
    """When anybody may take it back, unless it is done by then."""


class ShardManifest(Manifest):
    """The state of one shard."""

    table_id: str
    shard: str
    state: Literal["active", "splitting", "retired", "dropped"] = "active"
    """While it is split nobody claims it and no load is placed; retired, it is what ``split`` says, for good."""
    split: SplitRecord | None = None
    splits_begun: int = 0
    """So that no two tries to split it make parts of one name."""
    range: HashRange | None = None
    """The rows that it is for; None: it was never split off."""
    epoch: int = Field(default=0, ge=0)
    owner: Owner | None = None
    cursor: ChainPoint = FIRST_POINT
    segments: tuple[Segment, ...] = ()
    wal: WalState
    wal_position_last_seen: int = -1
    """The highest position known to have been acknowledged when this was written."""
    wal_floor: int = 0
    """Data entries below this position may have been collected."""
    wal_collected: int = 0
    """Data entries below this position, in all epochs that a collection has listed, are deleted."""
    resume: ChainPoint | None = None
    """WAL-only mode: the chain is known whole up to here, with ``producers`` as of then."""
    producers: dict[str, ProducerMark] = {}
    consumers: dict[str, ConsumerRecord] = {}
    checkpoints: dict[str, CheckpointRecord] = {}
    attempts: dict[str, AttemptRecord] = {}
    next_generation: int = 1
    runs: tuple[RunRecord, ...] = ()
    """Oldest first; together they hold every row before the cursor. A load covers no position, and may stand past the cursor:
    what is in the log before its place is older than it, the rest is newer."""
    announced: dict[str, AnnouncedLoad] = {}
    """By the id of the load. Their places are still open, so the order of changes is known only up to here."""
    loads: tuple[PlacedLoad, ...] = ()
    """In order, from ``load_floor`` on: for those who follow the changes."""
    next_load: int = 1
    load_floor: int = 0
    """Loads up to this number may be gone from ``loads``."""
    transactions: dict[str, TransactionMark] = {}
    """By application."""
    replaced: tuple[ReplacedRun, ...] = ()
    """Runs that a compaction has merged into others; their files are there until collection has taken them."""

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        """Checked when read: a manifest that contradicts itself must not lead anybody anywhere."""
        if (wrong := self.contradiction()) is not None:
            raise ValueError(wrong)
        return self

    def contradiction(self) -> str | None:
        """Checked before it is written, too."""
        last = ChainPoint(0, -1)
        for row in self.segments:
            if row.epochs < 1 or row.epoch <= last.epoch or row.end <= last.position or row.epoch + row.epochs > self.epoch:
                return f"segment {tuple(row)} is out of order"
            last = ChainPoint(row.epoch + row.epochs - 1, row.end + row.epochs - 1)
        ends = self.ends()
        for point in (self.cursor, self.resume or self.cursor):
            end = ends.end_of(point.epoch)
            highest = POSITION_MAX if end is None else end
            if not 1 <= point.epoch <= max(1, self.epoch) or not 0 <= point.position <= highest:
                return f"{tuple(point)} is not on the chain"
        if self.epoch - last.epoch > EPOCHS_OPEN_MAX:
            return f"epoch {self.epoch} is out of reach of the last one that ended, {last.epoch}"
        if not all(-1 <= position <= POSITION_MAX for position in (self.wal_position_last_seen, self.wal_floor, self.wal_collected)):
            return "a position is out of range"
        position = 0
        for run in self.runs:
            if not position <= run.first <= run.end or (run.end > self.cursor.position and run.first < run.end):
                return f"run {run.id} is out of order"
            position = run.end
        place, number = 0, self.load_floor
        for load in self.loads:
            if not (number < load.number < self.next_load and place <= load.position <= POSITION_MAX):
                return f"load {load.number} is out of order"
            place, number = load.position, load.number
        return None

    @property
    def folder(self) -> str | None:
        return f"shards/{self.shard}-{self.table_id}/manifest/"

    def unsplit(self) -> Self:
        """As it is when a split that was begun is taken back: the parts never came to be, and hold nothing."""
        kept = {id: record for id, record in self.checkpoints.items() if not (record.clone or "").startswith(IN_TABLE)}
        return self.but(state="active", split=None, checkpoints=kept)

    @property
    def is_clean(self) -> bool:
        """Is nothing in the log needed? Not if anything was acknowledged since it was said to be clean."""
        clean_at = self.wal.clean_at
        return clean_at is not None and clean_at == self.cursor.position and self.wal_position_last_seen < clean_at

    def walk_from(self, *, replay: bool) -> ChainPoint:
        """Where a claimant starts: the cursor if rows are replayed, else as late as is known to be safe."""
        if replay or self.resume is None or self.resume.position < self.cursor.position:
            return self.cursor
        return self.resume

    def ends(self) -> Segments:
        return Segments(self.segments)

    def seals(self) -> list[ChainPoint]:
        """Every seal that must stand in the WAL of now."""
        return [seal for seal in self.ends().ends() if seal.epoch >= self.wal.first_epoch]

    def contradicts(self, ends: dict[int, int]) -> bool:
        """Were some of these seals, met on a walk, put where entries had been collected?

        A slow claimant may seal a name below the cursor. Whoever began to walk before the cursor
        moved may meet that seal and take it for the end of its epoch. It is not, if the epoch is
        known to have ended elsewhere, or to have gone on past it.
        """
        known = self.ends()
        return any(
            known.end_of(epoch) not in (None, position) or (epoch >= self.cursor.epoch and position < self.cursor.position)
            for epoch, position in ends.items()
        )

    def loads_past_cursor(self) -> tuple[RunRecord, ...]:
        """Loads whose place is among what the log still holds, oldest first: the last of ``runs``."""
        cursor, count = self.cursor.position, len(self.runs)
        while count and self.runs[count - 1].end > cursor:
            count -= 1
        return self.runs[count:]

    def last_place(self) -> int:
        """Nothing may be placed before this position: what lies below is closed."""
        return max([self.cursor.position, *(run.end for run in self.runs[-1:]), *(load.position for load in self.loads[-1:])])

    def hold_position(self) -> int:
        """No data entry at or above this position may be collected."""
        holds = [self.cursor.position]
        holds += [hold.position for hold in self.consumers.values()]
        holds += [hold.position for hold in self.checkpoints.values() if hold.end > hold.position or not hold.version]
        return min(holds)


class ShardRange(NamedTuple):
    """Rows that hash to ``low`` or more, up to the next range, are in ``shard``."""

    low: int
    shard: str


class ShardingRule(Record):
    """How rows find their shard."""

    kind: Literal["unsharded", "bucket", "identity"] = "unsharded"
    column: str | None = None
    buckets: int = 1
    ranges: tuple[ShardRange, ...] = ()
    """Once a shard was split: the part of the space of hashes that each shard has, ascending, without a gap. Empty: equal parts."""


class VectorIndex(Record):
    """Nearest neighbours of a vector."""

    kind: Literal["vector"] = "vector"
    column: str
    metric: Literal["l2", "cosine", "dot"] = "l2"
    approximate_from: int | None = None
    """Slices of at least so many rows are searched by an index; None: all rows are always looked at."""


class TextIndex(Record):
    """Words in a text, ranked by BM25."""

    kind: Literal["text"] = "text"
    column: str
    lower_case: bool = True
    ascii_folding: bool = False


class ScalarIndex(Record):
    """Values by equality and range."""

    kind: Literal["scalar"] = "scalar"
    column: str


AnyIndex = Annotated[VectorIndex | TextIndex | ScalarIndex, Field(discriminator="kind")]


class ParentRecord(Record):
    """The table that this one is a clone of."""

    uri: str
    table_id: str
    checkpoint: str
    """Which of the parent's states it began with: the id of a checkpoint, which may be gone."""
    checkpoint_name: str | None = None
    taken_for_it: bool = False
    """The checkpoint was made for this clone, and goes when the clone is finished."""
    shards: tuple[str, ...] = ()
    """The parent's shards that it reads, each of which holds a pin for it."""


class TableManifest(Manifest):
    """What a table is. Created first: once it stands, the table exists."""

    table_id: str
    arrow_schema: str
    """The Arrow schema as an IPC message, base64."""
    field_ids: tuple[int, ...] = ()
    """One per column, never used again: a column is known by it, whatever its name. Empty: 1, 2, 3 …"""
    next_field_id: int = 0
    names_without_ids: tuple[str, ...] = ()
    """What columns 1, 2, 3 … were called in rows that carry no ids. Empty: what they are called now."""
    key: tuple[str, ...] = ()
    indexes: tuple[AnyIndex, ...] = ()
    sharding: ShardingRule = ShardingRule()
    shards: tuple[str, ...]
    shard_values: dict[str, str | None] = {}
    """Identity sharding: the value that each shard is for, as ``sharding.identity_values`` spells it."""
    wal_id: str
    wal_uri: str | None = None
    state: Literal["creating", "cloning", "active", "dropping", "dropped"] = "creating"
    """A table is being created until the manifests of all its shards stand; whoever opens it finishes that. A clone that is
    not finished is finished by cloning again, and never opened. A drop that is begun is finished by dropping again."""
    parent: ParentRecord | None = None
    """Of a clone, as long as it may read what is its parent's."""
    retired: dict[str, int] = {}
    """Shards that were split, each with where its part of the space of hashes began. Checkpoints from before may need them."""
    created_at: float = 0.0


class WalMarker(Record):
    """Stands in a WAL store and says whose it is."""

    format_version: int = FORMAT_VERSION
    wal_id: str
    table_id: str
    shard: str


class Intent(Record):
    """What decides about a transaction over several shards."""

    format_version: int = FORMAT_VERSION
    id: str
    app: str
    version: int
    query: str | None = None
    state: Literal["committed", "aborted"]
    table_id: str | None = None
    """Of which table; one may have been dropped here, and another made."""
    loads: dict[str, str] = {}
    """Shard -> id of its load."""
