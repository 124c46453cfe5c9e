"""A table whose columns come and go under a live writer, against a plain dict. Each seed is one story; it replays from its number."""

from __future__ import annotations

import pickle
import random
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate.clock import SYSTEM_CLOCK
from headgate.schema import widens
from headgate.watch import SchemaWatch

WIDER = {
    pa.int8(): [pa.int16(), pa.int64()],
    pa.int16(): [pa.int64()],
    pa.float32(): [pa.float64()],
    pa.string(): [pa.large_string()],
}
NEW = [pa.int8(), pa.float32(), pa.string(), pa.list_(pa.float32(), 2), pa.struct([("x", pa.int8())])]
NAMES = ["a", "b", "c", "d", "e", "f"]
STEPS = 24


def value_of(kind: pa.DataType, number: int) -> Any:
    """Something that the narrowest type of its kind holds exactly."""
    if number % 7 == 0:
        return None
    if pa.types.is_fixed_size_list(kind):
        return [float(number % 9), 0.5]
    if pa.types.is_struct(kind):
        return {"x": number % 100}
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return f"v{number}"
    return number % 100


class Story:
    """One table, its writer and its reader in processes of their own, and what the table should hold."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        uri = f"memory://model-{SYSTEM_CLOCK.token()}"
        schema = pa.schema([("k", pa.int8()), ("a", pa.string()), ("b", pa.int8())])
        self.table = hg.create_table(uri, schema, key="k", sharding=hg.bucket("k", self.draw.choice([1, 2])))
        self.reader = self.in_another_process()
        self.writer = self.open_writer()
        self.rows: dict[int, dict[int, Any]] = {}
        self.told: list[str] = []

    def in_another_process(self) -> hg.Table:
        other: hg.Table = pickle.loads(pickle.dumps(self.table))
        place = f"another process {SYSTEM_CLOCK.token()}"
        other.__dict__["_watch"] = SchemaWatch(self.table._places.table_manifests(), place, SYSTEM_CLOCK, self.table._manifest)
        return other

    def open_writer(self) -> hg.TableWriter:
        memtable = self.draw.random() < 0.8
        options: dict[str, Any] = {"max_memtable_rows": self.draw.choice([3, 1000])} if memtable else {}
        return self.in_another_process().writer(hg.ShardWriterConfig(enable_memtable=memtable, **options))

    @property
    def ids(self) -> dict[str, int]:
        return dict(zip(self.table.schema.names, self.table._manifest.field_ids, strict=True))

    def step(self, number: int) -> None:
        ops = ["put"] * 4 + ["delete", "flush", "add", "drop", "rename", "widen", "reopen", "crash"]
        op = self.draw.choice(ops)
        self.told.append(op)
        getattr(self, op)(number)

    def put(self, number: int) -> None:
        (key,) = self.table.key
        rows = []
        for at in range(self.draw.randint(1, 4)):
            row = {f.name: value_of(f.type, 31 * number + 7 * at + place) for place, f in enumerate(self.table.schema, 1)}
            row[key] = self.draw.randint(0, 9)
            rows.append(row)
        schema = pa.schema([f.with_nullable(True) for f in self.table.schema])
        batch = pa.Table.from_pylist(rows, schema=schema)
        # Names that were used again since the writer last looked would go to the columns of before: it is told to look.
        self.writer._watch.refresh()
        self.writer.put(batch).wait()
        for row in rows:
            self.rows[row[key]] = {self.ids[name]: value for name, value in row.items() if name != key}

    def delete(self, number: int) -> None:
        (key,) = self.table.key
        kind = self.table.schema.field(key).type
        keys = [self.draw.randint(0, 9) for _ in range(2)]
        self.writer.delete(pa.table({key: pa.array(keys, kind)})).wait()
        for gone in keys:
            self.rows.pop(gone, None)

    def flush(self, number: int) -> None:
        self.writer.flush()

    def add(self, number: int) -> None:
        free = [name for name in NAMES if name not in self.table.schema.names]
        if free:
            self.table.add_columns(pa.schema([(self.draw.choice(free), self.draw.choice(NEW))]))

    def drop(self, number: int) -> None:
        names = [name for name in self.table.schema.names if name not in self.table.key]
        if names:
            self.table.drop_columns([self.draw.choice(names)])

    def rename(self, number: int) -> None:
        free = [name for name in NAMES if name not in self.table.schema.names]
        if free:
            self.table.rename_column(self.draw.choice(self.table.schema.names), self.draw.choice(free))

    def widen(self, number: int) -> None:
        field = self.draw.choice(list(self.table.schema))
        if field.type in WIDER:
            kind = self.draw.choice(WIDER[field.type])
            assert widens(field.type, kind)
            self.table.widen_column(field.name, kind)

    def reopen(self, number: int) -> None:
        self.writer.close()
        self.writer = self.open_writer()

    def crash(self, number: int) -> None:
        self.writer.abort()
        self.writer = self.open_writer()

    def check(self) -> None:
        (key,) = self.table.key
        expected = [
            {key: number, **{name: row.get(id) for name, id in self.ids.items() if name != key}}
            for number, row in sorted(self.rows.items())
        ]
        for handle in (self.reader, self.table):
            assert sorted(handle.scan().to_arrow().to_pylist(), key=lambda row: row[key]) == expected
            assert handle.scan().to_arrow().schema.equals(self.table.schema)
        asked = list(range(10))
        assert self.reader.lookup(asked).to_pylist() == expected
        assert self.reader.scan(filter=f'"{key}" >= 5').count() == sum(number >= 5 for number in self.rows)
        if self.draw.random() < 0.5 and all(writer._config.enable_memtable for writer in self.writer.writers.values()):
            self.writer._watch.refresh()
            found = [row for writer in self.writer.writers.values() for row in writer.scan().to_arrow().to_pylist()]
            assert sorted(found, key=lambda row: row[key]) == expected


@pytest.mark.parametrize("seed", range(15))
def test_q10_a_table_whose_columns_change_under_a_live_writer_equals_a_dict(seed: int) -> None:
    story = Story(seed)
    try:
        for number in range(STEPS):
            story.step(number)
            if number % 3 == 0:
                story.check()
        story.writer.close()
        story.writer = story.open_writer()
        story.check()
    except BaseException as error:
        error.add_note(f"seed {seed}: {' '.join(story.told)}")
        raise
    finally:
        story.writer.abort()
