"""Hazards of indexes and searches: what is found does not depend on where rows are, or on how far an index has come."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import headgate as hg
from headgate.query.scan import Scan
from headgate.query.text import search_text
from headgate.query.vector import search
from headgate.view import ReadView

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("embedding", pa.list_(pa.float32(), 4)),
        pa.field("body", pa.string()),
        pa.field("ts", pa.int64()),
    ]
)
INDEXES = [hg.vector_index("embedding"), hg.text_index("body"), hg.scalar_index("ts")]
WORDS = ["gate", "water", "river", "level", "weir", "lock", "flow"]
AWAY = {"max_memtable_age": 3600.0}

_names = itertools.count()


class Place:
    """A table of one shard, its writer, and what searches find in it, from the writer's memory and from a process of its own."""

    def __init__(self, uri: str, indexes: Sequence[Any] | None = INDEXES, **config: Any) -> None:
        self.uri, self.config = uri, {**AWAY, **config}
        hg.create_table(uri, SCHEMA, key="id", indexes=indexes)
        self.writer = self._open()

    def _open(self) -> Any:
        return hg.open_table(self.uri).shard("0000").writer(hg.ShardWriterConfig(**self.config))

    def put(self, *rows: dict[str, Any]) -> None:
        self.writer.put(pa.Table.from_pylist(list(rows), schema=SCHEMA)).wait(30)

    def delete(self, *ids: int) -> None:
        self.writer.delete(pa.table({"id": pa.array(ids, pa.int64())})).wait(30)

    def freeze(self) -> None:
        """The MemTable is frozen, and stays so until ``flush``."""
        generations = self.writer._generations
        with generations.lock:
            generations._call = lambda: None
            generations.freeze()

    def flush(self) -> None:
        generations = self.writer._generations
        with generations.lock:
            generations.__dict__.pop("_call", None)
            generations._call()
        self.writer.flush()

    def crash(self) -> None:
        self.writer.abort()
        self.writer = self._open()

    def views(self) -> list[Callable[[], list[ReadView]]]:
        shard = hg.open_table(self.uri).shard("0000")
        return [lambda: [self.writer.view()], lambda: [shard.reader.view()]]

    def _everywhere(self, ask: Callable[[Any], pa.Table]) -> pa.Table:
        inside, outside = (ask(load) for load in self.views())
        assert inside.schema.equals(outside.schema)
        assert repr(inside.to_pylist()) == repr(outside.to_pylist()), "the same for everyone, NaNs too"
        return inside

    @property
    def rules(self) -> Any:
        return self.writer.rules

    def nearest(self, query: Sequence[float], k: int, **options: Any) -> pa.Table:
        return self._everywhere(lambda load: search(load, self.rules, "embedding", query, k, **options))

    def having(self, query: str, k: int, **options: Any) -> pa.Table:
        return self._everywhere(lambda load: search_text(load, self.rules, "body", query, k, **options))

    def scan(self, **options: Any) -> list[dict[str, Any]]:
        rows = self._everywhere(lambda load: Scan(load, self.rules, **options).to_arrow().sort_by("id")).to_pylist()
        assert isinstance(rows, list)
        return rows

    def answers(self, queries: Sequence[Sequence[float]]) -> list[pa.Table]:
        """What every kind of search finds."""
        metrics = ("l2", "cosine", "dot")
        found = [self.nearest(query, 8, metric=metric) for query in queries for metric in metrics]
        found += [self.nearest(queries[0], 8, filter="ts > 50"), self.having("gate", 8), self.having("weir water water", 8)]
        return [*found, self.having("flow lock", 8, filter="ts <= 60")]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Place]]:
    made: list[Place] = []

    def new(indexes: Sequence[Any] | None = INDEXES, *, disk: bool = False, **config: Any) -> Place:
        uri = str(tmp_path / f"t{next(_names)}") if disk else f"memory://indexes-{next(_names)}"
        made.append(Place(uri, indexes, **config))
        return made[-1]

    yield new
    for place in made:
        place.writer.abort()


def row(id: int, embedding: Sequence[float] | None = None, body: str | None = None, ts: int | None = None) -> dict[str, Any]:
    return {"id": id, "embedding": None if embedding is None else [float(x) for x in embedding], "body": body, "ts": ts}


def random_row(id: int, random: np.random.Generator) -> dict[str, Any]:
    body = " ".join(random.choice(WORDS, random.integers(1, 6)))
    return row(id, random.standard_normal(4), body, int(random.integers(0, 100)))


def random_rows(ids: Sequence[int], seed: int) -> list[dict[str, Any]]:
    random = np.random.default_rng(seed)
    return [
        row(id, random.standard_normal(4), " ".join(random.choice(WORDS, random.integers(1, 6))), int(random.integers(0, 100)))
        for id in ids
    ]


QUERIES = [[0.5, -1.0, 0.25, 1.0], [-1.0, 0.1, 0.0, 2.0]]


@pytest.mark.parametrize("disk", [False, True], ids=["memory", "lance"])
def test_i01_recall_is_the_same_before_and_after_each_flush(make: Callable[..., Place], disk: bool) -> None:
    place = make(disk=disk)
    for generation in range(3):
        place.put(*random_rows(range(generation * 30, generation * 30 + 50), generation))  # twenty of them replace older ones
        place.delete(*range(generation * 30 + 3, generation * 30 + 6))
        before = place.answers(QUERIES)
        assert all(len(found) == 8 for found in before)
        place.flush()
        after = place.answers(QUERIES)
        assert all(one.equals(other) for one, other in zip(before, after, strict=True)), f"generation {generation}"
    place.crash()
    assert all(one.equals(other) for one, other in zip(after, place.answers(QUERIES), strict=True))


def test_i02_searches_and_scans_are_the_same_with_indexes_and_without(make: Callable[..., Place]) -> None:
    later = {"sync_indexed_write": False, "async_index_buffer_rows": 1_000_000, "async_index_interval": 3600.0}
    soon = {"sync_indexed_write": False, "async_index_buffer_rows": 1, "async_index_interval": 0.0}
    places = [make(), make(None), make(index_configs=[]), make(index_configs=[INDEXES[1]]), make(**later), make(**soon)]
    results = []
    for place in places:
        for number in range(6):
            place.put(*random_rows(range(number * 7, number * 7 + 15), number))
            place.delete(number, number * 7 + 1)
            if number == 2:
                place.flush()
        results.append([place.scan(), place.scan(filter="ts > 40"), *(found.to_pylist() for found in place.answers(QUERIES[:1]))])
    assert all(result == results[0] for result in results)
    assert places[0].writer.index_stats().waiting_rows == 0
    assert places[0].writer.index_stats().indexed_rows > 0
    assert places[2].writer.index_stats().indexed_rows == 0
    assert places[4].writer.index_stats().waiting_rows > 0, "searches found them all the same"


@pytest.mark.parametrize("flushed", [False, True])
def test_i03_nulls_and_tombstones_in_every_indexed_column(make: Callable[..., Place], flushed: bool) -> None:
    place = make(disk=flushed)
    place.put(row(1, None, None, None), row(2, [1, 0, 0, 0], None, 1), row(3, None, "gate", 2), row(4, [2, 0, 0, 0], "", None))
    place.put(row(5, [float("nan"), 0, 0, 0], "gate gate", 3), row(6, [3, 0, 0, 0], "gate", 4), row(7, [0, 0, 0, 0], "gate", 5))
    place.delete(6, 7, 99)
    if flushed:
        place.flush()
        place.put(row(8, None, None, None))
        place.delete(8)
    for metric in ("l2", "cosine", "dot"):
        assert sorted(place.nearest([1, 0, 0, 0], 9, metric=metric).column("id").to_pylist()) == [2, 4]
    assert place.nearest([1, 0, 0, 0], 9, filter="ts is null").column("id").to_pylist() == [4]
    assert place.having("gate", 9).column("id").to_pylist() == [5, 3]
    assert place.having("gate", 9, filter="ts = 2").column("id").to_pylist() == [3]
    assert [each["id"] for each in place.scan()] == [1, 2, 3, 4, 5]
    place.delete(1, 2, 3, 4, 5)
    assert place.nearest([1, 0, 0, 0], 9).num_rows == 0
    assert place.having("gate", 9).num_rows == 0


@pytest.mark.parametrize("crash", [False, True], ids=["", "crash"])
@pytest.mark.parametrize(
    "caps",
    [
        {"max_memtable_rows": 7},
        {"max_memtable_batches": 5},
        {"max_memtable_size": 4000},
        {"max_memtable_rows": 7, "max_pending_generations": 1},
    ],
    ids=lambda caps: ",".join(caps),
)
@pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])
def test_i04_many_tiny_rows_past_every_cap(make: Callable[..., Place], caps: dict[str, int], crash: bool, sync: bool) -> None:
    place = make(sync_indexed_write=sync, async_index_buffer_rows=3, async_index_interval=0.001, **caps)
    acks = [place.writer.put(pa.Table.from_pylist([row(id % 40, [id, 0, 0, 0], f"gate w{id}", id)], schema=SCHEMA)) for id in range(120)]
    for ack in acks:
        ack.wait(30)
    if crash:
        place.crash()
    assert place.nearest([0, 0, 0, 0], 100).column("id").to_pylist() == list(range(40)), "each once, the newest"
    assert place.nearest([0, 0, 0, 0], 100).column("ts").to_pylist() == list(range(80, 120))
    assert sorted(place.having("gate", 100).column("id").to_pylist()) == list(range(40))
    assert place.having("w79", 10).num_rows == 0
    assert place.having("w80", 10).column("id").to_pylist() == [0]


def test_r04_crashing_again_and_again_indexes_no_row_twice(make: Callable[..., Place]) -> None:
    place = make()
    place.put(*random_rows(range(20), 1))
    before = place.answers(QUERIES[:1])
    for _ in range(3):
        place.crash()
        assert all(one.equals(other) for one, other in zip(before, place.answers(QUERIES[:1]), strict=True))


STEPS: dict[str, Callable[[Place], None]] = {
    "nothing": lambda place: None,
    "freeze": Place.freeze,
    "flush": Place.flush,
    "crash": Place.crash,
}


@pytest.mark.parametrize("between", STEPS)
@pytest.mark.parametrize("after", STEPS)
def test_q03_a_stale_row_at_the_query_point_is_not_returned(make: Callable[..., Place], between: str, after: str) -> None:
    place = make()
    point = [1, 1, 1, 1]
    place.put(row(1, point, "gate gate", 1), row(2, [5, 5, 5, 5], "gate", 1))
    STEPS[between](place)
    place.put(row(1, [90, 90, 90, 90], "weir", 2))
    STEPS[after](place)
    found = place.nearest(point, 1)
    assert found.select(["id", "_distance"]).to_pylist() == [{"id": 2, "_distance": 64.0}]
    assert place.nearest(point, 2).column("id").to_pylist() == [2, 1]
    assert place.nearest(point, 1, filter="ts = 1").column("id").to_pylist() == [2], "the newest version decides, then the filter"
    assert place.nearest(point, 9, filter="id = 1 and ts = 1").num_rows == 0
    assert place.having("gate", 1).column("id").to_pylist() == [2]
    assert place.having("gate", 9, filter="id = 1").num_rows == 0


def test_q05_insert_freeze_delete_search_before_the_flush(make: Callable[..., Place]) -> None:
    place = make()
    point = [1, 1, 1, 1]
    place.put(row(1, point, "gate"), row(2, [2, 2, 2, 2], "gate"))
    place.freeze()
    place.delete(1)
    assert place.nearest(point, 1).column("id").to_pylist() == [2]
    assert place.having("gate", 5).column("id").to_pylist() == [2]
    place.crash()
    assert place.nearest(point, 1).column("id").to_pylist() == [2]
    place.flush()
    assert place.nearest(point, 1).column("id").to_pylist() == [2]
    assert place.having("gate", 5).column("id").to_pylist() == [2]
