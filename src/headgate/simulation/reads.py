"""What reads should have seen, and what must hold at the end of a schedule with a MemTable.

Owns: the model, and the judgement of every read, of the runs, and of the last state.

The model is the log itself. The world remembers every entry that ever stood, so at the end the
chain can be walked from its first position, whatever was collected: it gives the state after
each position. A read must be the state after one position, no earlier than what was acknowledged
when it began and no later than what stood there when it ended; and nobody's reads go back.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field

from headgate.errors import HeadgateError
from headgate.life.verify import verify_shard
from headgate.manifest.model import FIRST_POINT, RunRecord, ShardManifest
from headgate.query.scan import Scan
from headgate.run import DELETED
from headgate.simulation.checker import check_chain, check_outcomes
from headgate.simulation.tables import Read, Row, TableLedger, TableStage, Write, random_config, rows_of, write_of
from headgate.simulation.world import Process
from headgate.wal.entry import SEAL_BYTES, decode_entry

State = tuple[Row, ...]


class Model:
    """The rows of a table, as a plain dictionary; without a key, a list."""

    def __init__(self, keyed: bool) -> None:
        self._keyed = keyed
        self._newest: dict[int, int] = {}
        self._rows: list[Row] = []

    def apply(self, write: Write) -> None:
        for key, value in write.rows:
            if not self._keyed:
                self._rows.append((key, value))
            elif write.op == "delete":
                self._newest.pop(key, None)
            else:
                self._newest[key] = value

    def state(self) -> State:
        return tuple(sorted(self._newest.items())) if self._keyed else tuple(sorted(self._rows))

    def copy(self) -> Model:
        other = Model(self._keyed)
        other._newest, other._rows = dict(self._newest), list(self._rows)
        return other


@dataclass
class Truth:
    """The chain, walked at the end of all things."""

    writes: list[tuple[Write, ...]] = field(default_factory=list)
    """By position; none of a seal."""
    states: list[State] = field(default_factory=list)
    """``states[p]``: of everything before position p."""
    models: list[Model] = field(default_factory=list)
    stood: list[int] = field(default_factory=list)
    """The step by which position p and all before it stood there."""

    @property
    def tip(self) -> int:
        return len(self.writes)

    def tip_at(self, step: int) -> int:
        return bisect_right(self.stood, step)


def true_chain(stage: TableStage, manifest: ShardManifest) -> Truth:
    """From the first position on, all that ever stood there; the manifest says where epochs ended."""
    ever, ends = stage.world.ever, manifest.ends()
    assert ever is not None
    truth, model, point, step = Truth(), Model(bool(stage.rules.key)), FIRST_POINT, 0
    truth.states.append(model.state())
    truth.models.append(model.copy())
    while True:
        key = f"wal/{stage.wal_id}/{stage.shard}/{point.epoch:010d}/{point.position:020d}.arrow"
        is_seal = ends.end_of(point.epoch) == point.position
        bodies = [(at, body) for at, body in ever.get(key, []) if (len(body) == SEAL_BYTES) == is_seal]
        if not bodies:
            return truth
        if len({body for _, body in bodies}) > 1 and not is_seal:
            stage.ledger.problems.append(f"CHANGED: {key} held different bytes at different times")
        step = max(step, bodies[0][0])
        writes: tuple[Write, ...] = ()
        if not is_seal:
            entry = decode_entry(memoryview(bodies[0][1]), key, stage.wal_id, stage.shard, *point)
            writes = tuple(write_of(put) for put in entry.puts)
        for write in writes:
            model.apply(write)
        truth.writes.append(writes)
        truth.states.append(model.state())
        truth.models.append(model.copy())
        truth.stood.append(step)
        point = point.past_seal() if is_seal else point.past_data()


# -- reads


def shows(read: Read, state: State) -> bool:
    """Is this what the read should return of a state?"""
    wanted = [row for row in state if read.filter is None or read.filter.matches(row[1])]
    if isinstance(read.rows, int):
        return read.rows == (len(wanted) if read.limit is None else min(read.limit, len(wanted)))
    if read.limit is None:
        return list(read.rows) == wanted
    return len(read.rows) == min(read.limit, len(wanted)) and not Counter(read.rows) - Counter(wanted)


def check_reads(ledger: TableLedger, truth: Truth) -> None:
    """Every read is the state after some position of its time, and no reader goes back."""
    finished: dict[str, list[tuple[int, int]]] = {}  # by reader: when it was done, and how far it saw at least
    for read in sorted(ledger.reads, key=lambda read: read.began):
        if read.source == "memory":
            _check_memory_read(ledger, truth, read)
            continue
        # What one reader of the log's tail saw cannot vanish for another. A writer shows what is acknowledged: it may be behind them.
        before = finished.setdefault("tail" if read.source == "tail" else read.who, [])
        least = max([read.durable, *(seen for ended, seen in before if ended < read.began)])
        most = truth.tip_at(read.ended)
        seen = next((p for p in range(least, most + 1) if shows(read, truth.states[p])), None)
        if seen is None:
            ledger.problems.append(_misread(read, truth, least, most))
            continue
        before.append((read.ended, seen))


def _misread(read: Read, truth: Truth, least: int, most: int) -> str:
    elsewhere = [p for p in range(truth.tip + 1) if shows(read, truth.states[p])]
    what = "WENT BACK" if elsewhere and elsewhere[-1] < least else "READ AHEAD" if elsewhere and elsewhere[0] > most else "MISREAD"
    asked = f" (asked for {read.filter}, limit {read.limit})" if read.filter or read.limit else ""
    model = {p: truth.states[p] for p in range(least, min(most, least + 3) + 1)}
    return (
        f"{what}: {read.who} ({read.source}) at step {read.began} read {read.rows}{asked}; between {least} and {most} the rows are {model}"
    )


def _check_memory_read(ledger: TableLedger, truth: Truth, read: Read) -> None:
    """What was there when the writer opened, and its own puts in order: all that had returned, perhaps some that were under way."""
    life = read.life
    assert life is not None
    if life.first_position > truth.tip:
        ledger.problems.append(f"LOST: {life.name} opened at {life.first_position}, and the log ends at {truth.tip}")
        return
    model = truth.models[life.first_position].copy()
    for count in range(read.begun + 1):
        if count >= read.returned and shows(read, model.state()):
            return
        if count < read.begun:
            model.apply(life.begun[count])
    puts = life.begun[read.returned : read.begun]
    ledger.problems.append(
        f"MISREAD: {read.who} (memory) at step {read.began} read {read.rows}, asked for {read.filter}, limit {read.limit}; "
        f"it should be {model.state()}, perhaps without {puts}"
    )


# -- the end


def judge_table(stage: TableStage, process: Process, rng: random.Random) -> None:
    """Open with a MemTable, read, close, read again; compare everything with the model."""
    ledger = stage.table_ledger
    try:
        writer = stage.writer(process, random_config(rng))
        in_memory = rows_of(writer.scan().to_arrow())
        writer.close()
        log = stage.log(process)
        manifest = log.manifests.load()
        reader = stage.reader(process)
        outside = rows_of(Scan(lambda: [reader.view()], stage.rules).to_arrow())
        report = verify_shard(log, deep=True)
        truth = true_chain(stage, manifest)
        check_runs(stage, process, manifest, truth)
    except HeadgateError as error:
        ledger.problems.append(f"UNOPENABLE: {error!r}")
        return
    ledger.problems += [f"VERIFY: {p.kind} {p.object}: {p.message}" for p in report.problems]
    for what, rows in (("at open", in_memory), ("in runs", outside)):
        if rows != truth.states[-1]:
            ledger.problems.append(f"END: {what} the rows are {rows}, and the log comes to {truth.states[-1]}")
    if (manifest.cursor.position, manifest.wal.clean_at) != (truth.tip, truth.tip):
        ledger.problems.append(
            f"END: closed with the cursor at {manifest.cursor}, clean at {manifest.wal.clean_at}; the tip is {truth.tip}"
        )
    if manifest.wal_position_last_seen >= truth.tip:
        ledger.problems.append(f"LAST SEEN: {manifest.wal_position_last_seen} was never written, the tip is {truth.tip}")
    chain = {position: tuple(write.number for write in writes) for position, writes in enumerate(truth.writes)}
    check_chain(ledger, chain)
    check_outcomes(ledger, chain, manifest)
    check_reads(ledger, truth)


def check_runs(stage: TableStage, process: Process, manifest: ShardManifest, truth: Truth) -> None:
    """Together they cover every entry below the cursor, once, and each holds what its entries come to."""
    position = 0
    for run in manifest.runs:
        skipped = [p for p in range(position, run.first) if p >= truth.tip or truth.writes[p]]
        # What a compaction of the oldest runs finds all deleted is in no run at all.
        if run.first < position or (skipped and (position or truth.states[run.first])):
            stage.ledger.problems.append(f"RUNS: {run.id} covers {run.first} to {run.end}, and the one before it ended at {position}")
            return
        held, expected = _contents(stage, process, run), _expected(stage, truth, run)
        if run is manifest.runs[0] and run.id.startswith("c"):  # nothing older: tombstones may be gone
            held, expected = ([row for row in rows if not row[2]] for rows in (held, expected))
        position = run.end
        if held != expected:
            stage.ledger.problems.append(f"RUN: {run.id} ({run.first} to {run.end}) holds {held}, and should hold {expected}")
    behind = [p for p in range(position, manifest.cursor.position) if p >= truth.tip or truth.writes[p]]
    if behind and (position or truth.states[manifest.cursor.position]):
        stage.ledger.problems.append(f"RUNS: positions {behind} are below the cursor and in no run")


_Held = list[tuple[int, int | None, bool]]


def _contents(stage: TableStage, process: Process, run: RunRecord) -> _Held:
    """Key, value and whether deleted, in the run's order."""
    held: _Held = []
    columnar = stage.columnar(process)
    for part in run.slices:
        opened = columnar.open(part.path)
        for batch in opened.scan(opened.schema.names):
            gone = batch.column(DELETED).to_pylist() if DELETED in batch.schema.names else [False] * batch.num_rows
            held += zip(batch.column("id").to_pylist(), batch.column("value").to_pylist(), gone, strict=True)
    return held


def _expected(stage: TableStage, truth: Truth, run: RunRecord) -> _Held:
    writes = [write for p in range(run.first, min(run.end, truth.tip)) for write in truth.writes[p]]
    if not stage.rules.key:
        return [(key, value, False) for write in writes for key, value in write.rows]
    newest: dict[int, tuple[int | None, bool]] = {}
    for write in writes:
        for key, value in write.rows:
            newest[key] = (None, True) if write.op == "delete" else (value, False)
    return [(key, *newest[key]) for key in sorted(newest)]
