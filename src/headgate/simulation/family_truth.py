"""What should have come of a family of tables: one order for each shard, that its parts and its clones go on with.

Owns: the order of every shard, and the judgement of puts, reads, checkpoints, clones and loads. Does not own: the workload.

A line is what happened to one shard: where it began, and with which rows; its entries; its loads; and, if it was split, the
lines of its parts, which begin with its rows at its end. What stands in its log past that end is nobody's. A clone's line
begins with the rows that the parent's line had at the checkpoint that the clone's own manifest names. So what a row should
be follows from entries alone, and from where manifests say that shards began and ended; never from files.

A read of a table is right if each shard, or else all of its parts, shows a state of its time.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from headgate.manifest.document import decode_document
from headgate.manifest.model import ChainPoint, ShardManifest, TableManifest
from headgate.sharding import HASHES, ranges_of
from headgate.simulation.family import Family, Member, TableRead, cell_of, hash_of, items_of
from headgate.simulation.reads import Model, State
from headgate.simulation.tables import Row, Write, write_of
from headgate.wal.entry import SEAL_BYTES, decode_entry

Seen = dict[str, tuple[int, int]]
"""By shard: how many entries and loads were seen, at least."""


@dataclass(frozen=True)
class Loaded:
    """A load, as far as a shard has rows of it."""

    number: int
    position: int
    job: int
    write: Write
    placed: int


@dataclass
class Line:
    """What happened to one shard."""

    shard: str
    low: int
    high: int
    base: Model
    first: int
    """Its own entries begin here."""
    loads_before: int
    versions: list[tuple[int, dict[str, Any]]]
    writes: list[tuple[Write, ...]] = field(default_factory=list)
    stood: list[int] = field(default_factory=list)
    loads: list[Loaded] = field(default_factory=list)
    parts: list[Line] = field(default_factory=list)
    _models: dict[tuple[int, int], Model | None] = field(default_factory=dict)

    @property
    def tip(self) -> int:
        return self.first + len(self.writes)

    def tip_at(self, step: int) -> int:
        return self.first + bisect_right(self.stood, step)

    def loads_at(self, step: int) -> int:
        return self.loads_before + bisect_right(self.loads, step, key=lambda load: load.placed)

    @property
    def loads_all(self) -> int:
        return self.loads_before + len(self.loads)

    def inside(self, key: int) -> bool:
        return self.low <= hash_of(key) < self.high

    def model(self, entries: int, loads: int) -> Model | None:
        """After so many entries and loads. None: there is no such state, because a load's place lies past the entries."""
        wanted = (entries, loads)
        if wanted not in self._models:
            self._models[wanted] = self._modelled(entries, self.loads[: loads - self.loads_before])
        return self._models[wanted]

    def _modelled(self, entries: int, loads: list[Loaded]) -> Model | None:
        if loads and loads[-1].position > entries:
            return None
        some: list[tuple[int, int, int, tuple[Write, ...]]] = [(load.position, 0, load.number, (load.write,)) for load in loads]
        some += [(position, 1, 0, self.writes[position - self.first]) for position in range(self.first, entries)]
        model = self.base.copy()
        for _, _, _, writes in sorted(some, key=lambda step: step[:3]):
            for write in writes:
                model.apply(write)
        return model

    def state(self, entries: int, loads: int) -> State | None:
        found = self.model(entries, loads)
        return None if found is None else found.state()

    def last(self) -> State:
        """All of it, parts and all."""
        if self.parts:
            return tuple(sorted(row for part in self.parts for row in part.last()))
        return self.state(self.tip, self.loads_all) or ()

    def every(self) -> Iterator[Line]:
        yield self
        for part in self.parts:
            yield from part.every()

    def untouched(self, step: int, least: Mapping[str, tuple[int, int]]) -> bool:
        """Had nobody been told of anything in it, or in its parts, by then?"""
        entries, loads = least.get(self.shard, (0, 0))
        return (
            entries <= self.first
            and max(loads, self.loads_at(step)) <= self.loads_before
            and all(part.untouched(step, least) for part in self.parts)
        )


# -- lines from what ever stood


class Annals:
    """Everything that ever stood, read once."""

    def __init__(self, family: Family) -> None:
        assert family.world.ever is not None
        self.family, self.ever = family, family.world.ever
        self.by_folder: dict[str, list[tuple[str, int, bytes]]] = {}
        for key, bodies in self.ever.items():
            folder = key.rsplit("/", 1)[0] + "/"
            if folder.endswith(("/manifest/", "/table/")):
                self.by_folder.setdefault(folder, []).extend((key, step, body) for step, body in bodies)
        self._lines: dict[str, list[Line]] = {}

    def first_manifest(self, member: Member) -> TableManifest | None:
        """As the table was begun: of what it is a clone."""
        found = [
            decode_document(body, TableManifest, key)
            for key, _, body in self.by_folder.get(f"{member.name}/table/", [])
            if json.loads(body)["body"]["table_id"] == member.table_id
        ]
        return min(found, key=lambda manifest: manifest.version, default=None)

    def lines(self, member: Member) -> list[Line]:
        """One for each shard that it began with."""
        known = self._lines.get(member.table_id)
        if known is None:
            known = self._lines[member.table_id] = list(self._begun(member))
        return known

    def _begun(self, member: Member) -> Iterator[Line]:
        first = self.first_manifest(member)
        assert first is not None, "it was there"
        if first.parent is None:
            parts = ranges_of(first.sharding)
            for number, part in enumerate(parts):
                high = parts[number + 1].low if number + 1 < len(parts) else HASHES
                line = self._line(member, part.shard, part.low, high, Model(bool(self.family.rules.key)), 0, 0)
                assert line is not None, "it was created"
                yield line
            return
        source = next(m for m in self.family.members if m.table_id == first.parent.table_id)
        theirs = {line.shard: line for top in self.lines(source) for line in top.every()}
        for shard in first.parent.shards:
            line = theirs[shard]
            record, loads = pinned(line, first.parent.checkpoint)
            base = line.model(record["end"], loads) if record is not None and record["end"] <= line.tip else None
            if record is None or base is None:
                self.family.problems.append(f"CLONE: {member.name} is of checkpoint {record} of shard {shard}, which is no state of it")
                continue
            begun = self._line(member, shard, line.low, line.high, base, max(record["end"], record["position"]), loads, copied=line)
            if begun is not None:
                yield begun

    def _versions(self, folder: str) -> list[tuple[int, dict[str, Any]]]:
        """The versions that led to the latest one, oldest first. What else was created under their names counts for nothing."""
        stood: dict[str, tuple[int, dict[str, Any]]] = {}
        for _, step, body in self.by_folder.get(folder, []):
            document = json.loads(body)["body"]
            stood.setdefault(document["id"], (step, document))
        latest = max((key for key in self.family.world.objects if key.startswith(folder)), default=None)
        if latest is None:
            if stood:  # whoever has read one of them, and sleeps, could go on with it
                self.family.problems.append(f"GONE: of {folder} no manifest is left")
            return []
        found = [stood[json.loads(self.family.world.objects[latest])["body"]["id"]]]
        while before := found[-1][1]["history"]:
            found += [stood[id] for id in reversed(before)]
        return found[::-1]

    def _line(
        self, member: Member, shard: str, low: int, high: int, base: Model, first: int, loads: int, copied: Line | None = None
    ) -> Line | None:
        folder = f"{member.name}/shards/{shard}-{member.table_id}/manifest/"
        versions = self._versions(folder)
        if not versions:
            return None
        line = Line(shard, low, high, base, first, loads, versions)
        retired = next((document for _, document in versions if document["state"] == "retired"), None)
        self._walk(member, line, None if retired is None else retired["cursor"][1], copied)
        self._load(line)
        if retired is not None:
            self._split(member, line, retired)
        return line

    def _walk(self, member: Member, line: Line, end: int | None, copied: Line | None) -> None:
        problems, first, latest = self.family.problems, line.versions[0][1], line.versions[-1][1]
        point, wal = ChainPoint(*first["cursor"]), latest["wal"]["id"]
        ends = ShardManifest.model_validate({**latest, "history": ()}).ends()
        step = line.versions[0][0]
        while end is None or point.position < end:
            key = f"{member.wal or member.name}/wal/{wal}/{line.shard}/{point.epoch:010d}/{point.position:020d}.arrow"
            is_seal = ends.end_of(point.epoch) == point.position
            bodies = [(at, body) for at, body in self.ever.get(key, []) if (len(body) == SEAL_BYTES) == is_seal]
            if not bodies and not is_seal:
                break
            if len({body for _, body in bodies}) > 1 and not is_seal:
                problems.append(f"CHANGED: {key} held different bytes at different times")
            writes: tuple[Write, ...] = ()
            if not is_seal:
                step = max(step, bodies[0][0])
                entry = decode_entry(memoryview(bodies[0][1]), key, wal, line.shard, *point)
                writes = tuple(written(put) for put in entry.puts)
            if point.position < line.first:
                if copied is not None and writes != copied.writes[point.position - copied.first]:
                    problems.append(f"COPY: {key} is {writes}")
            else:
                line.writes.append(writes)
                line.stood.append(step)
            point = point.past_seal() if is_seal else point.past_data()
        if point.position < (line.first if end is None else end):
            problems.append(f"HOLE: shard {line.shard} of {member.name} was to reach {end or line.first}, and ends at {point.position}")
        for write in (write for writes in line.writes for write in writes):
            if wrong := [key for key, _ in write.rows if not line.inside(key)]:
                problems.append(f"WRONG SHARD: keys {wrong} are in shard {line.shard} of {member.name}")

    def _load(self, line: Line) -> None:
        placed: dict[int, tuple[int, dict[str, Any]]] = {}
        for step, document in line.versions:
            for load in document["loads"]:
                placed.setdefault(load["number"], (step, load))
        for number, (step, load) in sorted(placed.items()):
            job = int(load["app"].removeprefix("load"))
            whole = self.family.loads[job].write
            mine = Write(job, whole.op, tuple(row for row in whole.rows if line.inside(row[0])))
            line.loads.append(Loaded(number, load["position"], job, mine, step))
        if [load.number for load in line.loads] != list(range(line.loads_before + 1, line.loads_all + 1)):
            self.family.problems.append(f"LOADS: shard {line.shard} has {[load.number for load in line.loads]} from {line.loads_before}")

    def _split(self, member: Member, line: Line, retired: dict[str, Any]) -> None:
        problems, low = self.family.problems, line.low
        whole = line.model(line.tip, line.loads_all)
        for child in retired["split"]["children"]:
            shard, mine = child["shard"], child["range"]
            if mine["low"] != low or not mine["low"] < mine["high"] <= line.high:
                problems.append(f"PARTS: {retired['split']['children']} are not {line.low} to {line.high}")
            low = mine["high"]
            base = part_of(whole, mine["low"], mine["high"], bool(self.family.rules.key)) if whole is not None else Model(True)
            part = self._line(member, shard, mine["low"], mine["high"], base, line.tip, line.loads_all)
            if part is None:
                problems.append(f"PARTS: there is no {shard} of {member.name}")
                continue
            if part.versions[0][1]["cursor"][1] != line.tip:
                problems.append(f"PARTS: {shard} begins at {part.versions[0][1]['cursor']}, and the whole ended at {line.tip}")
            line.parts.append(part)
        if low != line.high:
            problems.append(f"PARTS: {retired['split']['children']} are not {line.low} to {line.high}")


def written(put: Any) -> Write:
    """What a put of the log was; its number is in what it wrote."""
    found = write_of(put)
    return Write(-1, found.op, found.rows)


def part_of(model: Model, low: int, high: int, keyed: bool) -> Model:
    """The rows of a range."""
    part = Model(keyed)
    for key, value in model.state():
        if low <= hash_of(key) < high:
            part.apply(Write(-1, "upsert", ((key, value),)))
    return part


def pinned(line: Line, checkpoint: str) -> tuple[dict[str, Any] | None, int]:
    """A checkpoint as it was taken, and how many loads it has."""
    for _, document in line.versions:
        if checkpoint in document["checkpoints"]:
            return document["checkpoints"][checkpoint], document["next_load"] - 1
    return None, 0


# -- puts


def check_puts(family: Family, member: Member, lines: Iterable[Line]) -> None:
    """Every row that was acknowledged is there once, where its receipt says; nothing is there twice; order is kept in every cell."""
    problems = family.problems
    places: dict[int, list[tuple[str, int]]] = {}
    for line in lines:
        found = [(line.first + at, write) for at, writes in enumerate(line.writes) for write in writes]
        found += [(load.position, load.write) for load in line.loads]
        for position, write in found:
            for item, _ in items_of(write):
                places.setdefault(item, []).append((line.shard, position))
    doubled = {item: found for item, found in places.items() if len(found) > 1}
    if doubled:
        problems.append(f"DOUBLED: in {member.name}: {doubled}")
    for number, receipt in member.acked.items():
        for item, key in items_of(member.puts[number]):
            there = places.get(item, [])
            if not there:
                problems.append(f"LOST: key {key} of put {number} in {member.name}, acknowledged at {receipt}")
            elif receipt is not None and not all(shard in receipt and receipt[shard][1] == position for shard, position in there):
                problems.append(f"MOVED: key {key} of put {number} in {member.name} is at {there}, acknowledged at {receipt}")
    for who, order in member.order.items():
        for cell in {cell_of(key) for number in order for _, key in items_of(member.puts[number])}:
            wanted = [item for number in order for item, key in items_of(member.puts[number]) if cell_of(key) == cell]
            at = [places[item][0][1] for item in wanted if item in places]
            made = [item in places for item in wanted]
            if at != sorted(at) or made != sorted(made, reverse=True):
                problems.append(f"ORDER: {who} put {wanted} into one cell of {member.name}, of which {at} are the places")


def check_loads(family: Family, lines: Iterable[Line]) -> None:
    """All of it or nothing."""
    found = {item for line in lines for load in line.loads for item, _ in items_of(load.write)}
    for job in family.loads.values():
        items = {item for item, _ in items_of(job.write)}
        there = items & found
        if there and there != items:
            family.problems.append(f"HALF: load {job.number} has {sorted(items)}, and {sorted(there)} came in")
        if job.is_done and not there:
            family.problems.append(f"LOST: load {job.number} was said to be in")
        family.loads_placed += bool(there)


# -- reads


def check_reads(family: Family, member: Member, lines: list[Line]) -> None:
    """Every read is of its time, in every shard; and what was seen does not go away."""
    finished: list[tuple[int, Seen]] = []
    for read in sorted(member.reads, key=lambda read: read.began):
        least: Seen = {shard: (entries, 0) for shard, entries in read.durable.items()}
        for ended, seen in finished:
            if ended < read.began:
                for shard, (entries, loads) in seen.items():
                    known = least.get(shard, (0, 0))
                    least[shard] = max(known[0], entries), max(known[1], loads)
        found: Seen = {}
        wrong = next((line for line in lines if not _fits(line, read, least, found)), None)
        if wrong is not None:
            family.problems.append(_misread(member, wrong, read, least))
            continue
        finished.append((read.ended, found))


def _fits(line: Line, read: TableRead, least: Seen, found: Seen) -> bool:
    mine = tuple(row for row in read.rows if line.inside(row[0]))
    if all(part.untouched(read.began, least) for part in line.parts):
        entries, loads = least.get(line.shard, (0, 0))
        for some in range(max(loads, line.loads_at(read.began)), line.loads_at(read.ended) + 1):
            for position in range(max(entries, line.first), line.tip_at(read.ended) + 1):
                if line.state(position, some) == mine:
                    found[line.shard] = position, some
                    return True
    return bool(line.parts) and all(_fits(part, read, least, found) for part in line.parts)


def _misread(member: Member, line: Line, read: TableRead, least: Seen) -> str:
    mine = tuple(row for row in read.rows if line.inside(row[0]))
    shown = {
        part.shard: {
            (position, some): part.state(position, some)
            for position in range(max(least.get(part.shard, (0, 0))[0], part.first), part.tip_at(read.ended) + 1)
            for some in range(part.loads_at(read.began), part.loads_at(read.ended) + 1)
        }
        for part in line.every()
    }
    return f"MISREAD: {read.who} from step {read.began} to {read.ended} read {mine} in {member.name}, shard {line.shard}: {shown}"


def check_pins(family: Family, member: Member, lines: list[Line]) -> None:
    """A checkpoint is one state of every shard, with all that was durable when it was begun, and the same for ever."""
    every = {line.shard: line for top in lines for line in top.every()}
    for taken in member.pins:
        told = f"{taken.id} ({taken.scope}) of {member.name}"
        records = {shard: found for shard, line in every.items() if (found := pinned(line, taken.id))[0] is not None}
        rows: list[Row] = []
        for shard, (record, loads) in records.items():
            line = every[shard]
            assert record is not None
            state = line.state(record["end"], loads) if record["end"] <= line.tip else None
            if state is None or record["end"] < taken.durable.get(shard, 0):
                family.problems.append(f"PIN: {told} ends at {record['end']} in {shard}: {taken.durable} were durable")
            if taken.scope == "all" and record["end"] != record["position"]:
                family.problems.append(f"PIN: {told} needs the log of {shard} from {record['position']} to {record['end']}")
            missed = [p.shard for part in line.parts for p in part.every() if taken.durable.get(p.shard, 0) > p.first]
            if missed:
                family.problems.append(f"PIN: {told} is of {shard}, and rows of its parts {missed} were durable")
            rows += state or ()
        if sum(every[shard].high - every[shard].low for shard in records) != HASHES:
            family.problems.append(f"PIN: {told} is of {sorted(records)}, which is not the whole table")
        check_whole_loads(family, told, {shard: loads for shard, (_, loads) in records.items()}, every)
        wrong = [found for found in taken.reads if found != tuple(sorted(rows))]
        if wrong:
            family.problems.append(f"PIN: {told} was read as {wrong[0]}, and is {sorted(rows)}")


def check_whole_loads(family: Family, told: str, loads: Mapping[str, int], every: Mapping[str, Line]) -> None:
    """What was pinned has a load in all shards or in none."""
    inside = {load.job for shard, count in loads.items() for load in every[shard].loads[: max(0, count - every[shard].loads_before)]}
    for shard, count in loads.items():
        late = [load.job for load in every[shard].loads[max(0, count - every[shard].loads_before) :] if load.job in inside]
        if late:
            family.problems.append(f"HALF: {told} has load {late[0]} in some shards, and in {shard} it has not")
