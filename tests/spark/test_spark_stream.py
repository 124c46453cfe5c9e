"""The streaming source: the changes of a table, each once, whatever happens to the query."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
import headgate.spark as hgs
from headgate.failpoint import hooked

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string()), pa.field("v", pa.float64())])
CONFIG = hg.ShardWriterConfig(fsync=False)
MARKS = ["_op", "_epoch", "_position", "_load", "_time"]


def rows(first: int, last: int, v: float = 0.0) -> pa.Table:
    ids = list(range(first, last))
    return pa.table({"id": ids, "name": [f"n{i}" for i in ids], "v": [v] * len(ids)}, schema=SCHEMA)


def made(place: Path, shards: int = 2) -> hg.Table:
    return hg.create_table(place / "t", SCHEMA, key="id", sharding=hg.bucket("id", shards))


def put(table: hg.Table, *batches: pa.Table) -> None:
    with table.writer(CONFIG) as writer:
        for batch in batches:
            writer.put(batch).wait()
        writer.abort()


class Query:
    """Runs a stream to its end, as often as asked, with one checkpoint; keeps what each batch had."""

    def __init__(self, spark: Any, table: hg.Table, place: Path, **options: Any) -> None:
        self.spark, self.table, self.place = spark, table, place
        self.options = {"startingOffsets": "earliest", **options}
        self.batches: list[list[dict[str, Any]]] = []
        self.fails_at: int | None = None
        self.on_batch: Callable[[int], None] = lambda number: None

    def frame(self) -> Any:
        reader = self.spark.readStream.format("headgate")
        for name, value in self.options.items():
            if value is not None:
                reader = reader.option(name, value)
        return reader.load(self.table.uri)

    def _take(self, frame: Any, number: int) -> None:
        if number == self.fails_at:
            self.fails_at = None
            raise RuntimeError("the batch fails")
        found = frame.toArrow().to_pylist()
        self.on_batch(number)
        while len(self.batches) <= number:
            self.batches.append([])
        self.batches[number] = found

    def start(self, **trigger: Any) -> Any:
        stream = self.frame().writeStream.foreachBatch(self._take).option("checkpointLocation", str(self.place))
        return stream.trigger(**(trigger or {"availableNow": True})).start()

    def run(self) -> Query:
        query = self.start()
        try:
            assert query.awaitTermination(120)
        finally:
            query.stop()
        return self

    @property
    def all(self) -> list[dict[str, Any]]:
        return [row for batch in self.batches for row in batch]

    def offsets(self) -> list[dict[str, Any]]:
        """What Spark wrote down, batch by batch."""
        logs = sorted((self.place / "offsets").iterdir(), key=lambda p: int(p.name)) if (self.place / "offsets").exists() else []
        return [json.loads(log.read_text().splitlines()[-1]) for log in logs if log.name.isdecimal()]


@pytest.fixture
def query(spark: Any, tmp_path: Path) -> Iterator[Callable[..., Query]]:
    hgs.register(spark)

    def begin(table: hg.Table, name: str = "query", **options: Any) -> Query:
        return Query(spark, table, tmp_path / name, **options)

    yield begin
    for running in spark.streams.active:
        running.stop()


def changes(table: hg.Table) -> list[dict[str, Any]]:
    return [row for batch in table.changes(start="earliest") for row in batch.to_pylist()]


def in_order(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(found, key=lambda row: (row["_position"], row["_load"], row["id"], str(row["v"])))


def test_a_stream_gives_all_changes_with_where_they_come_from(query: Callable[..., Query], tmp_path: Path) -> None:
    table = made(tmp_path)
    with table.writer(CONFIG) as writer:
        writer.put(rows(0, 100)).wait()
        writer.delete(pa.table({"id": [3, 4]})).wait()
        writer.abort()
    table.load(rows(50, 150, 1.0))
    stream = query(table).run()
    assert in_order(stream.all) == in_order(changes(table))
    assert stream.frame().columns == [*SCHEMA.names, *MARKS]
    assert {row["_op"] for row in stream.all} == {"upsert", "delete"}
    put(table, rows(200, 210))
    before = len(stream.all)
    stream.run()
    assert len(stream.all) == before + 10
    assert in_order(stream.all) == in_order(changes(table))
