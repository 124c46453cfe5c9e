"""A table under everything that can happen to it, beside a plain dict.

Owns: what is done, step by step, to both. Does not own: the dict (table_model.py), the questions
(forms.py), how many steps (test_table_model.py).

The table is real: its store, its threads, its flushes in the background, through the public API. Chance in a step comes from a number that
Hypothesis draws, so a failing story shrinks and replays, as far as threads allow.
"""

from __future__ import annotations

import itertools
import random
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import polars
import pyarrow as pa
import pytest
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import headgate as hg
import headgate.table as tables
from headgate.failpoint import hooked
from headgate.manifest.model import ShardingRule
from headgate.sharding import split_rows
from headgate.store import memory
from tests.model.forms import Asking
from tests.model.table_model import VECTOR, WIDER, Change, Column, Key, Row, TableModel, tuples, value_of

PATIENCE = 30.0
NAMES = ("a", "b", "c", "Two Words", "käse")
NEW_TYPES = (pa.int8(), pa.int32(), pa.float32(), pa.string(), VECTOR)
SEEDS = st.integers(0, 1 << 16)
STEPS: Counter[str] = Counter()
"""What was done, in all stories."""

_numbers = itertools.count()


class Crash(Exception):
    """A compactor or collector dies here."""


@dataclass(frozen=True)
class Shape:
    """What kind of table."""

    key: str
    sharding: str
    indexes: bool
    required: bool
    """Its key columns are declared as never null."""


KEYS: dict[str, tuple[tuple[str, pa.DataType], ...]] = {
    "int": (("id", pa.int32()),),
    "string": (("id", pa.string()),),
    "composite": (("tenant", pa.string()), ("id", pa.int32())),
    "none": (),
}
SHARDINGS = {"int": ["unsharded", "bucket"], "string": ["unsharded", "bucket"], "composite": ["unsharded", "bucket", "identity"]}
SHAPES = st.sampled_from(sorted(KEYS)).flatmap(
    lambda key: st.builds(
        Shape,
        key=st.just(key),
        sharding=st.sampled_from(SHARDINGS.get(key, ["unsharded", "bucket"])),
        indexes=st.booleans(),
        required=st.booleans(),
    )
)


@st.composite
def configs(draw: st.DrawFn) -> hg.ShardWriterConfig:
    """Caps so small that flushes are constant, or so large that there are none."""
    if draw(st.integers(0, 9)) == 9:
        return hg.ShardWriterConfig(enable_memtable=False)
    return hg.ShardWriterConfig(
        max_memtable_rows=draw(st.sampled_from([1, 4, 30, 1_000_000])),
        max_memtable_batches=draw(st.sampled_from([8_000, 1, 2])),
        max_memtable_size=draw(st.sampled_from([256 << 20, 1, 2_000])),
        max_unflushed_memtable_bytes=draw(st.sampled_from([1 << 30, 1, 5_000])),
        max_pending_generations=draw(st.sampled_from([64, 1, 2])),
        max_wal_buffer_size=draw(st.sampled_from([8 << 20, 1])),
        max_wal_flush_interval=draw(st.sampled_from([0.0, 0.0, 0.02])),
        max_inflight=draw(st.sampled_from([4, 1])),
        durable_write=draw(st.booleans()) and draw(st.booleans()),
        auto_compact=draw(st.booleans()),
        sync_indexed_write=draw(st.booleans()),
        async_index_buffer_rows=draw(st.sampled_from([10_000, 3])),
    )


class TableMachine(RuleBasedStateMachine):
    """One table's story."""

    place: ClassVar[str] = "disk"

    def __init__(self) -> None:
        super().__init__()
        self.folder: Path | None = None
        self.writer: hg.TableWriter | None = None
        self.config = hg.ShardWriterConfig()
        self.acks: list[tuple[int, hg.TableAck]] = []
        self.checkpoints: dict[str, list[Row]] = {}
        self.sent: tuple[int, pa.Table] | None = None
        """The last put of the producer."""
        self.sequence = 0
        self.steps = 0

    @initialize(shape=SHAPES, config=configs())
    def create(self, shape: Shape, config: hg.ShardWriterConfig) -> None:
        if self.place == "disk":
            self.folder = Path(tempfile.mkdtemp(prefix="headgate-model-"))
            self.uri = str(self.folder / "table")
        else:
            self.heap = f"model-{next(_numbers)}"
            self.uri = f"memory://{self.heap}"
        self.shape, self.config = shape, config
        wanted = [
            *(Column(0, name, kind, nullable=not shape.required) for name, kind in KEYS[shape.key]),
            Column(0, "n", pa.int32(), nullable=shape.key != "none" or shape.sharding != "bucket"),
            Column(0, "s", pa.string()),
            Column(0, "f", pa.float32()),
            Column(0, "body", pa.string(), text=True),
            Column(0, "e", VECTOR),
        ]
        for number, column in enumerate(wanted, 1):
            column.id = number
        self.model = TableModel(wanted, [column.id for column in wanted[: len(KEYS[shape.key])]])
        self.sharding_id = None
        rule: ShardingRule | None = None
        if shape.sharding != "unsharded":
            self.sharding_id = 1  # the first column: of the key, if there is one, else "n"
            rule = hg.bucket(wanted[0].name, 2) if shape.sharding == "bucket" else hg.identity(wanted[0].name)
        indexes = [hg.text_index("body"), hg.vector_index("e"), hg.scalar_index("f")] if shape.indexes else None
        self.fixed = {*self.model.key, self.sharding_id}
        if indexes is not None:
            self.fixed |= {self.model.named(name).id for name in ("body", "e", "f")}
        key = [column.name for column in wanted[: len(self.model.key)]]
        self.table = hg.create_table(self.uri, self.model.schema, key or None, sharding=rule, indexes=indexes)
        self.reader = hg.open_table(self.uri)
        note(f"{shape}\n{config}")

    def teardown(self) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, Exception):
            # Threads may not do it again, and then Hypothesis tells of nothing but that.
            sys.stderr.write("".join(traceback.format_exception(error)))
        if self.writer is not None:
            self.writer.abort()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        elif hasattr(self, "heap"):
            memory._heaps.pop(self.heap, None)

    # -- keys and rows

    def keys(self) -> list[Key]:
        """A few that come up again and again."""
        if self.shape.key == "int":
            return [(number,) for number in (0, 1, 2, 3, 5, 8, -1, 1 << 30)]
        if self.shape.key == "string":
            return [(text,) for text in ("", "a", "a\x00", "aa", "b", "ä", "long " * 9)]
        return [(tenant, number) for tenant in ("", "x", "x\x00") for number in (0, 1, -1)]

    def made(self, keys: list[Key], chance: random.Random) -> list[Row]:
        rows: list[Row] = []
        for key in keys:
            row = {column.id: value_of(column, chance) for column in self.model.columns if column.id not in self.model.key}
            rows.append({**row, **dict(zip(self.model.key, key, strict=False))})
        return rows

    def arrow(self, rows: list[Row]) -> pa.Table:
        columns = self.model.columns
        arrays = [pa.array([row[column.id] for row in rows], column.type) for column in columns]
        return pa.Table.from_arrays(arrays, schema=self.model.schema)

    def changes(self, rows: list[Row], *, deleted: bool = False) -> dict[str, Change]:
        """What they mean to each shard. A key never moves."""
        model = self.model
        if self.sharding_id is None:
            places = ["0000"] * len(rows)
        else:
            column = model.column(self.sharding_id)
            values = [row[self.sharding_id] for row in rows]
            for value in set(values) - model.shard_of.keys():
                one = pa.RecordBatch.from_arrays([pa.array([value], column.type)], [column.name])
                (part,) = split_rows(self.table.refresh().sharding, one)
                model.shard_of[value] = part.shard
            places = [model.shard_of[value] for value in values]
        changes: dict[str, Change] = {}
        for shard, row in zip(places, rows, strict=True):
            key = tuple(row[id] for id in model.key)
            changes.setdefault(shard, Change([])).rows.append((key, None if deleted else row))
        return changes

    # -- writing

    def open_writer(self) -> hg.TableWriter:
        if self.writer is None:
            self.writer = self.table.writer(self.config)
        return self.writer

    def given(self, rows: list[Row], form: int) -> Any:
        table = self.arrow(rows)
        if form == 1:
            return table.combine_chunks().to_batches()[0]
        if form == 2:
            return polars.from_arrow(table)
        if form == 3:
            named = {column.id: column.name for column in self.model.columns}
            return [{named[id]: value for id, value in row.items() if value is not None} for row in rows]
        return table

    def accept(self, ack: hg.TableAck, changes: dict[str, Change], wait: bool) -> None:
        self.acks.append((self.model.put(changes), ack))
        if wait:
            self.settle()

    def settle(self) -> None:
        for _, ack in self.acks:
            ack.wait(PATIENCE)
        self.acks.clear()
        self.model.settle()

    @rule(picks=st.lists(st.integers(0, 99), min_size=1, max_size=6), seed=SEEDS, form=st.integers(0, 3), wait=st.booleans())
    def put(self, picks: list[int], seed: int, form: int, wait: bool) -> None:
        """A few rows; a key may be there several times, and the last one counts."""
        known = self.keys()
        rows = self.made([known[pick % len(known)] for pick in picks], random.Random(seed))
        ack = self.open_writer().put(self.given(rows, form))
        self.accept(ack, self.changes(rows), wait)

    @rule(start=st.integers(0, 150), count=st.integers(1, 120), seed=SEEDS, wait=st.booleans())
    def put_many(self, start: int, count: int, seed: int, wait: bool) -> None:
        chance = random.Random(seed)
        numbers = list(range(start, start + count))
        chance.shuffle(numbers)
        if self.shape.key == "composite":
            keys: list[Key] = [(f"{'x' * (number % 3)}", number) for number in numbers]
        else:
            keys = [(f"{number:x}",) if self.shape.key == "string" else (number,) for number in numbers]
        rows = self.made(keys, chance)
        self.accept(self.open_writer().put(self.arrow(rows)), self.changes(rows), wait)

    @precondition(lambda self: self.shape.key != "none")
    @rule(picks=st.lists(st.integers(0, 99), min_size=1, max_size=5), many=st.integers(0, 60), wait=st.booleans())
    def delete(self, picks: list[int], many: int, wait: bool) -> None:
        """Keys that are there and keys that are not."""
        known = self.keys()
        gone = [known[pick % len(known)] for pick in picks]
        if many > 40:
            there = [tuple(row[id] for id in self.model.key) for row in self.model.rows()]
            gone += random.Random(many).sample(there, len(there) // 2)
        rows: list[Row] = [dict(zip(self.model.key, key, strict=True)) for key in gone]
        parts = [self.model.column(id) for id in self.model.key]
        table = pa.table({part.name: pa.array([row[part.id] for row in rows], part.type) for part in parts})
        ack = self.open_writer().delete(table)
        self.accept(ack, self.changes(rows, deleted=True), wait)

    @rule(picks=st.lists(st.integers(0, 99), min_size=1, max_size=3), seed=SEEDS)
    def produce(self, picks: list[int], seed: int) -> None:
        known = self.keys()
        rows = self.made([known[pick % len(known)] for pick in picks], random.Random(seed))
        self.sequence += 1
        table = self.arrow(rows)
        ack = self.open_writer().put(table, producer="p", sequence=self.sequence)
        self.sent = self.sequence, table
        self.accept(ack, self.changes(rows), True)

    @precondition(lambda self: self.sent is not None and self.sent[1].schema.equals(self.model.schema))
    @rule()
    def produce_again(self) -> None:
        """What was acknowledged once is there once."""
        assert self.sent is not None
        self.open_writer().put(self.sent[1], producer="p", sequence=self.sent[0]).wait(PATIENCE)

    @rule()
    def flush(self) -> None:
        self.open_writer().flush()
        if self.config.enable_memtable:
            self.settle()
            assert all(status.lag == 0 for status in self.table.status().shards)

    # -- the writer's life

    @rule(config=configs(), stay_closed=st.booleans())
    def close(self, config: hg.ShardWriterConfig, stay_closed: bool) -> None:
        if self.writer is None:
            return
        self.writer.close()
        self.settle()
        if self.config.enable_memtable:
            assert all(status.lag == 0 for status in self.table.status().shards)
        self.writer, self.config = None, config
        if not stay_closed:
            self.open_writer()

    @rule(config=configs())
    def crash(self, config: hg.ShardWriterConfig) -> None:
        """What was acknowledged is there; of the rest, a prefix in each shard."""
        if self.writer is not None:
            self.writer.abort()
            self.writer = None
        self.config = config
        self.outcome()
        self.open_writer()

    @rule(config=configs())
    def take_over(self, config: hg.ShardWriterConfig) -> None:
        """Another writer opens while this one is at it; then it finds that it is fenced."""
        old, self.config = self.writer, config
        self.writer = self.table.writer(config)
        self.outcome()
        if old is not None and old.writers:
            with pytest.raises(hg.FencedError):
                old.check_fenced()
            # One row, of a shard that it held: what it puts into a shard that nobody has claimed since is as good as any.
            rows = [row for row in self.made(self.keys(), random.Random(0)) if self.changes([row]).keys() <= old.writers.keys()]
            if rows:
                with pytest.raises(hg.FencedError):
                    old.put(self.arrow(rows[:1])).wait(PATIENCE)
            old.abort()

    def outcome(self) -> None:
        """The fate of what was pending, as far as the acks and the table tell."""
        acknowledged: Counter[str] = Counter()
        for number, ack in self.acks:
            try:
                for shard in ack.wait(PATIENCE):
                    acknowledged[shard] = number
            except (hg.FencedError, hg.ClosedError):
                continue
        self.acks.clear()
        self.match(acknowledged, settle=True)

    def match(self, acknowledged: Counter[str], *, settle: bool = False, handle: hg.Table | None = None) -> None:
        """Every shard holds what some prefix of its puts left, with all that were acknowledged before the read."""
        model = self.model
        found: dict[str, Counter[Any]] = {}
        for row in tuples((handle or self.reader).scan().to_arrow()):
            found.setdefault(self.shard_of(row), Counter())[row] += 1
        assert found.keys() <= model.shards.keys()
        for name, shard in model.shards.items():
            states = shard.states(acknowledged[name])
            held = found.get(name, Counter())
            state = next((state for state in states if model.as_tuples(state.values()) == held), None)
            newest = model.as_tuples(states[0].values())
            assert state is not None, f"shard {name}: missing {newest - held}, too much {held - newest}; {len(states)} states"
            if settle:
                shard.settle(state)

    def shard_of(self, row: tuple[Any, ...]) -> str:
        if self.sharding_id is None:
            return "0000"
        place = next(number for number, column in enumerate(self.model.columns) if column.id == self.sharding_id)
        return self.model.shard_of[row[place]]

    # -- columns

    def changer(self, other: bool) -> hg.Table:
        """Who changes the columns: the writer's handle, or another one."""
        self.settle()  # a put that is pending was made for the columns of before
        return self.reader if other else self.table

    @rule(pick=st.integers(0, 99), kind=st.sampled_from(NEW_TYPES), text=st.booleans(), other=st.booleans())
    def add_column(self, pick: int, kind: pa.DataType, text: bool, other: bool) -> None:
        taken = {column.name for column in self.model.columns}
        free = [name for name in (*NAMES, "n", "s") if name not in taken]
        if free and len(taken) < 10:
            column = Column(self.model.next_id, free[pick % len(free)], kind, text=text and kind == pa.string())
            self.changer(other).add_columns(pa.schema([column.field]))
            self.model.columns.append(column)
            self.model.next_id += 1

    @rule(pick=st.integers(0, 99), other=st.booleans())
    def drop_column(self, pick: int, other: bool) -> None:
        loose = [column for column in self.model.columns if column.id not in self.fixed]
        if len(loose) > 1:
            column = loose[pick % len(loose)]
            self.changer(other).drop_columns([column.name])
            self.model.columns.remove(column)

    @rule(pick=st.integers(0, 99), name=st.sampled_from((*NAMES, "n", "s")), other=st.booleans())
    def rename_column(self, pick: int, name: str, other: bool) -> None:
        column = self.model.columns[pick % len(self.model.columns)]
        if all(name != other.name for other in self.model.columns):
            self.changer(other).rename_column(column.name, name)
            column.name = name

    @rule(pick=st.integers(0, 99), step=st.integers(0, 9), other=st.booleans())
    def widen_column(self, pick: int, step: int, other: bool) -> None:
        loose = [column for column in self.model.columns if column.type in WIDER]
        if loose:
            column = loose[pick % len(loose)]
            kind = WIDER[column.type][step % len(WIDER[column.type])]
            self.changer(other).widen_column(column.name, kind)
            column.type = kind

    # -- compaction, collection, checkpoints

    @contextmanager
    def dying(self, at: str | None, skip: int) -> Iterator[None]:
        """Whatever is done inside stops for good when it comes to this step."""
        if at is None:
            yield
            return
        left = itertools.count(skip, -1)

        def hook(name: str) -> None:
            if name == at and next(left) <= 0:
                raise Crash

        with hooked(hook):
            try:
                yield
            except Crash:
                note(f"died at {at}")

    @rule(
        full=st.booleans(),
        slice_rows=st.sampled_from([1 << 20, 3, 20]),
        die_at=st.sampled_from([None, None, None, "compact.registered", "compact.slice", "compact.written", "compact.committed"]),
        skip=st.integers(0, 3),
    )
    def compact(self, full: bool, slice_rows: int, die_at: str | None, skip: int) -> None:
        options = tables.compact_shard.__kwdefaults__
        assert "slice_rows" in options
        with patch.dict(options, slice_rows=slice_rows), self.dying(die_at, skip):
            self.reader.compact(1 << 20, full=full)

    @rule(sweep=st.booleans(), die_at=st.sampled_from([None, None, "gc.listed", "gc.committed", "gc.runs", "gc.manifests"]))
    def collect(self, sweep: bool, die_at: str | None) -> None:
        with self.dying(die_at, 0):
            self.reader.gc(dry_run=False, min_age=0.0, sweep=sweep)

    @precondition(lambda self: self.shape.sharding != "identity" and self.config.enable_memtable)
    @rule(scope=st.sampled_from(["all", "durable"]))
    def checkpoint(self, scope: Any) -> None:
        if len(self.checkpoints) < 3:
            self.settle()
            name = f"checkpoint {next(_numbers)}"
            if scope == "all":
                self.open_writer().checkpoint(name)
            else:
                self.reader.checkpoint(name)
            self.checkpoints[name] = self.model.rows()

    @precondition(lambda self: self.checkpoints)
    @rule(pick=st.integers(0, 2))
    def drop_checkpoint(self, pick: int) -> None:
        name = sorted(self.checkpoints)[pick % len(self.checkpoints)]
        self.table.drop_checkpoint(name)
        del self.checkpoints[name]
        with pytest.raises(hg.NotFoundError):
            self.reader.scan(at=name).count()

    # -- reading

    @rule()
    def reopen_reader(self) -> None:
        """A handle that knows nothing yet."""
        self.reader = hg.open_table(self.uri)

    @rule(seed=SEEDS, own=st.booleans())
    def ask(self, seed: int, own: bool) -> None:
        """Every form of read, of the writer's handle or another one."""
        self.settle()
        Asking(self.table if own else self.reader, self.model, random.Random(seed)).all(self.keys())

    @precondition(lambda self: self.checkpoints)
    @rule(seed=SEEDS)
    def ask_a_checkpoint(self, seed: int) -> None:
        chance = random.Random(seed)
        name = chance.choice(sorted(self.checkpoints))
        Asking(self.reader, self.model, chance).scan(name, self.checkpoints[name])

    @invariant()
    def check(self) -> None:
        """After every step: what may be seen, and some form of read if there is one right answer."""
        if not hasattr(self, "table"):
            return
        self.steps += 1
        STEPS[self.place] += 1
        chance = random.Random(self.steps)
        if self.acks:
            acknowledged: Counter[str] = Counter()
            for number, ack in self.acks:
                if ack.done():
                    for shard in ack.wait(0):
                        acknowledged[shard] = number
            self.match(acknowledged, handle=chance.choice([self.table, self.reader]))
            self.check_memory()
            return
        asking = Asking(chance.choice([self.table, self.reader]), self.model, chance)
        asking.everything()
        forms: list[Callable[[], None]] = [
            asking.scan,
            asking.scan,
            asking.count,
            asking.sql,
            asking.search,
            asking.search_text,
            self.check_memory,
            lambda: asking.lookup(self.keys()),
        ]
        chance.choice(forms)()

    def check_memory(self) -> None:
        """The writer shows all that it took, acknowledged or not."""
        if self.writer is None:
            return
        if not self.config.enable_memtable:
            for writer in self.writer.writers.values():
                with pytest.raises(hg.InvalidInputError):
                    writer.scan(freshness="memory").count()
            return
        right = self.model.as_tuples(self.model.rows())
        by_shard = [writer.scan(freshness="memory") for writer in self.writer.writers.values()]
        by_table = [handle.scan(freshness="memory") for handle in (self.table, self.reader)]
        for scans in (by_shard, by_table[:1], by_table[1:]):
            found = Counter(row for scan in scans for row in tuples(scan.to_arrow()))
            assert found == right, f"memory: missing {right - found}, too much {found - right}"
