"""Batches of changes, planned by cuts: whatever dies and whatever happens to the table, each change once."""

from __future__ import annotations

import itertools
import json
import pickle
import random
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("v", pa.int64())])
_names = itertools.count()


def made(shards: int = 2) -> hg.Table:
    return hg.create_table(f"memory://change-batches-{next(_names)}", SCHEMA, key="id", sharding=hg.bucket("id", shards))


def rows(ids: Any, v: int = 0) -> pa.Table:
    ids = list(ids)
    return pa.table({"id": ids, "v": [v] * len(ids)}, schema=SCHEMA)


def put(table: hg.Table, *batches: pa.Table, flush: bool = False) -> None:
    with table.refresh().writer() as writer:
        for batch in batches:
            writer.put(batch).wait()
        if flush:
            writer.flush()
        else:
            writer.abort()


class Engine:
    """Calls as a streaming engine does: offsets as JSON text, written down before a batch, which is done again if it was cut short."""

    def __init__(self, table: hg.Table, start: str = "earliest", consumer: str | None = None, **limits: Any) -> None:
        self.uri, self.start, self.consumer, self.limits = table.uri, start, consumer, limits
        self.log: list[str] = []
        self.results: dict[int, list[dict[str, Any]]] = {}
        self.done = 0
        self.restart()

    def restart(self) -> None:
        """A new process: nothing is left but the log and the results."""
        self.table = hg.open_table(self.uri)
        self.batches = self.table.change_batches(self.start, self.consumer, fail_on_data_loss=self.limits.get("strict", True))

    def cut(self, number: int) -> Any:
        return self.batches.from_json(json.loads(self.log[number]))

    def step(self, until: Any = None, dies: int | None = None) -> bool:
        """One batch; False: there is nothing new. ``dies``: after so many of its own steps."""
        if not self.log:
            first = self.batches.begin()
            assert self.batches.begin() == first, "asked twice"
            self.log.append(json.dumps(self.batches.to_json(first)))
        if dies == 0:
            return True
        if len(self.log) == self.done + 1:
            start = self.cut(self.done)
            self.batches.resume(start)
            limits = {name: value for name, value in self.limits.items() if name.startswith("max")}
            end = self.batches.plan(start, until=until, **limits)
            if end == start:
                return False
            if dies == 1:
                return True
            if self.done:
                self.batches.done(start)
            self.log.append(json.dumps(self.batches.to_json(end)))
        if dies == 2:
            return True
        start, end = self.cut(self.done), self.cut(self.done + 1)
        self.batches.resume(start)
        parts = self.batches.parts(start, end, parts_min=self.limits.get("parts_min", 1))
        found: list[dict[str, Any]] = []
        for part in parts:
            handle = pickle.loads(pickle.dumps(self.table))
            for batch in handle.read_changes(pickle.loads(pickle.dumps(part)), fail_on_data_loss=self.limits.get("strict", True)):
                found += batch.to_pylist()
            if dies == 3:
                return True
        self.results[self.done] = found
        if dies == 4:
            return True
        self.done += 1
        return True

    def run(self, steps_max: int = 500) -> Engine:
        until = self.batches.latest()
        for _ in range(steps_max):
            if not self.step(until):
                return self
        raise AssertionError("it does not come to an end")

    @property
    def all(self) -> list[dict[str, Any]]:
        return [row for number in sorted(self.results) for row in self.results[number]]


def changes(table: hg.Table) -> list[tuple[Any, ...]]:
    return sorted(tuple(map(str, row.values())) for batch in table.changes(start="earliest") for row in batch.to_pylist())


def seen(engine: Engine) -> list[tuple[Any, ...]]:
    return sorted(tuple(map(str, row.values())) for row in engine.all)


def test_all_changes_once_in_batches_of_any_size() -> None:
    table = made()
    put(table, *[rows(range(n, n + 3)) for n in range(9)])
    table.load(rows(range(50, 60), 1))
    put(table, rows([1, 2], 2))
    for limits in ({}, {"max_entries": 1}, {"max_entries": 5}, {"max_bytes": 1}, {"max_bytes": 3_000}, {"parts_min": 4}):
        assert seen(Engine(table, **limits).run()) == changes(table), limits


def test_a_limit_is_over_all_shards_and_those_furthest_behind_get_most() -> None:
    table = made(4)
    put(table, *[rows(range(8)) for n in range(10)])
    batches = table.change_batches()
    start = batches.begin()
    end = batches.plan(start, max_entries=6)
    assert sum(end[id].position - start[id].position for id in start) == 6
    one = batches.plan(start, max_entries=1)
    assert sum(one[id].position - start[id].position for id in start) == 1


def test_small_shards_share_a_part_and_a_part_has_all_of_a_shard() -> None:
    table = made(8)
    put(table, rows(range(64)))
    batches = table.change_batches()
    start = batches.begin()
    (part,) = batches.parts(start, batches.plan(start))
    assert len(part.stretches) == 8
    put(table, *[rows(range(16)) for _ in range(40)])
    parts = batches.parts(start, batches.plan(start))
    assert sorted(stretch.shard for part in parts for stretch in part.stretches) == sorted(start)
    assert len(parts) == 8


def test_nothing_past_what_was_there_when_it_began_and_it_ends_though_more_comes() -> None:
    table = made()
    put(table, *[rows(range(4)) for _ in range(5)])
    engine = Engine(table, max_entries=2)
    until = engine.batches.latest()
    for number in range(100):
        put(table, rows([number], 7))
        if not engine.step(until):
            break
    else:
        raise AssertionError("it does not end")
    assert {row["v"] for row in engine.all} == {0}
    assert seen(engine.run()) == changes(table)


def test_idle_reopens_make_no_endless_batches() -> None:
    table = made(1)
    put(table, rows([1]))
    engine = Engine(table).run()
    for _ in range(5):
        put(table)
    engine.run(3)
    assert len(engine.all) == 1


@pytest.mark.parametrize("consumer", [None, "index"])
def test_a_snapshot_comes_before_its_changes_and_its_pin_goes(consumer: str | None) -> None:
    table = made()
    put(table, rows(range(20)), flush=True)
    put(table, rows(range(10), 1), flush=True)
    table.compact(full=True)
    table.gc(dry_run=False, min_age=0)
    engine = Engine(table, "snapshot", consumer, max_entries=3)
    engine.step()
    assert table.checkpoints()
    put(table, rows(range(5), 2), flush=True)
    table.compact(full=True)
    if consumer:
        table.gc(dry_run=False, min_age=0)
    engine.restart()
    engine.run()
    state = {}
    for row in engine.all:
        state[row["id"]] = row["v"]
    assert state == {row["id"]: row["v"] for row in table.scan().to_arrow().to_pylist()}
    assert len(engine.all) == 20 + 5
    put(table, rows([30]))
    engine.run()
    assert table.checkpoints() == []


def test_what_was_collected_is_an_error_or_is_passed_over() -> None:
    table = made(1)
    put(table, rows([1]))
    strict, lenient = Engine(table).run(), Engine(table, strict=False).run()
    stale = Engine(table, strict=False)
    stale.step(dies=3)  # planned, and not read
    put(table, rows([2]), flush=True)
    table.gc(dry_run=False, min_age=0)
    put(table, rows([3]))
    with pytest.raises(hg.WalTruncatedError):
        strict.run()
    assert [row["id"] for row in lenient.run().all] == [1, 3]
    stale.restart()
    assert [row["id"] for row in stale.run().all] == [3]


def test_of_two_with_one_name_the_later_one_goes_on() -> None:
    table = made()
    put(table, *[rows(range(4)) for _ in range(3)])
    first, second = Engine(table, consumer="index", max_entries=2), Engine(table, consumer="index", max_entries=2)
    first.step()
    second.step()
    with pytest.raises(hg.ConsumerTakenError):
        first.run()
    second.run()
    assert len(second.all) == 12


@pytest.mark.parametrize("consumer", [None, "index"])
def test_a_stream_goes_on_over_splits_of_splits(consumer: str | None) -> None:
    table = made(1)
    put(table, rows(range(20)))
    engine = Engine(table, consumer=consumer, max_entries=1).run()
    behind = Engine(table, consumer="behind")
    behind.step(dies=0)
    put(table, rows(range(20, 40)))
    left, _ = table.split_shard("0000")
    table.refresh()
    put(table, rows(range(40, 60)))
    table.split_shard(left)
    put(table, rows(range(60, 80)))
    engine.restart()
    assert sorted(row["id"] for row in engine.run().all) == list(range(80))
    put(table, rows(range(80, 90)))
    assert sorted(row["id"] for row in engine.run().all) == list(range(90))
    behind.restart()
    assert sorted(row["id"] for row in behind.run().all) == list(range(90))


@pytest.mark.parametrize("seed", range(12))
def test_killed_anywhere_beside_anything_each_change_counts_once(seed: int) -> None:
    pick = random.Random(seed)
    table = made(pick.choice([1, 3]))
    consumer = "index"
    start = pick.choice(["earliest", "snapshot"])
    put(table, rows(range(30)), flush=True)
    engine = Engine(table, start, consumer, max_entries=pick.choice([None, 1, 4]), parts_min=pick.choice([1, 5]))
    engine.step(dies=0)
    expected = 0
    splits = 0
    for number in range(1, 60):
        what = pick.random()
        if what < 0.3:
            put(table, rows(pick.sample(range(40), 4), number), flush=pick.random() < 0.4)
        elif what < 0.4:
            table.load(rows(pick.sample(range(40), 6), number))
        elif what < 0.5:
            table.compact(full=True)
            table.gc(dry_run=False, min_age=0)
        elif what < 0.53 and splits < 3:
            splits += 1
            table.split_shard(pick.choice(table.refresh().shards).id)
        elif what < 0.8:
            engine.step(dies=pick.choice([None, None, 1, 2, 3, 4]))
        else:
            engine.restart()
        expected = number
    engine.restart()
    engine.run()
    assert expected
    state, order = {}, {}
    for row in engine.all:
        place = (row["_position"], row["_load"])
        if place >= order.get(row["id"], (-1, -1)):
            state[row["id"]], order[row["id"]] = row["v"], place
    assert state == {row["id"]: row["v"] for row in table.refresh().scan().to_arrow().to_pylist()}, seed
    whole = [(row["id"], row["_position"], row["_load"], row["v"]) for row in engine.all]
    assert len(set(whole)) == len(whole), f"seed {seed}: something was given twice"
