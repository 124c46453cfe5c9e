"""Hazards of the change feed that need no Spark: P12, P14, P15, P17, and F14, G01, G07, I06 where changes are followed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import headgate as hg
from headgate.failpoint import hooked
from headgate.feed import Offset
from headgate.store import Location

SCHEMA = pa.schema([pa.field("id", pa.int64(), False), pa.field("value", pa.string())])
LOADER_STOPS = ["transaction.announced", "transaction.decided", "load.tip", "commit.loaded", "commit.created", "transaction.placed"]
_names = itertools.count()


@pytest.fixture
def table() -> hg.Table:
    return hg.create_table(f"memory://p-feed-{next(_names)}", SCHEMA, key="id")


def rows(*ids: int, value: str = "") -> list[dict[str, Any]]:
    return [{"id": id, "value": value or f"v{id}"} for id in ids]


def loaded(*ids: int, value: str = "") -> pa.Table:
    return pa.Table.from_pylist(rows(*ids, value=value), schema=SCHEMA)


def flat(batches: Iterable[pa.RecordBatch]) -> list[tuple[int, str | None]]:
    return [(row["id"], row["value"] if row["_op"] == "upsert" else None) for batch in batches for row in batch.to_pylist()]


def replica(changes: Iterable[tuple[int, str | None]]) -> dict[int, str]:
    state: dict[int, str] = {}
    for id, value in changes:
        if value is None:
            state.pop(id, None)
        else:
            state[id] = value
    return state


def state_of(table: hg.Table) -> dict[int, str]:
    return {row["id"]: row["value"] for row in table.scan().to_arrow().to_pylist()}


class Reader:
    """Takes the changes of a shard batch by batch, as a stream would: plan, then read."""

    def __init__(self, table: hg.Table, at: Offset | None = None) -> None:
        self.shard = hg.open_table(table.uri).shard("0000")
        self.at = at or Offset()
        self.got: list[tuple[int, str | None]] = []

    def batch(self, max_entries: int | None = None) -> int:
        end = self.shard.plan_changes(self.at, max_entries)
        found = flat(self.shard.read_changes(self.at, end))
        self.got += found
        self.at = end
        return len(found)


# -- P12


def test_p12_a_plan_that_is_made_again_is_the_same_or_later_and_reads_the_same(table: hg.Table) -> None:
    with table.writer() as writer:
        writer.put(rows(1)).wait()
        reader = Reader(table)
        first = reader.shard.plan_changes(Offset())
        assert reader.shard.plan_changes(Offset()) == first
        table.load(loaded(2))
        writer.put(rows(3)).wait()
        assert flat(reader.shard.read_changes(Offset(), first)) == [(1, "v1")], "whatever came since"
        assert reader.shard.plan_changes(Offset()) == (2, 1)
        assert flat(reader.shard.read_changes(first, Offset(2, 1))) == [(2, "v2"), (3, "v3")]


def test_p12_a_consumer_that_is_opened_twice_begins_at_the_same_place(table: hg.Table) -> None:
    with table.writer() as writer:
        writer.put(rows(1)).wait()
        starts = table.open_consumer("c", "latest").starts
        writer.put(rows(2)).wait()
        assert table.open_consumer("c", "latest").starts == starts
        assert table.open_consumer("c").starts == starts


def test_p12_the_last_batch_that_was_never_committed_comes_again(table: hg.Table) -> None:
    with table.writer() as writer:
        writer.put(rows(1)).wait()
        writer.put(rows(2)).wait()
        consumer = table.open_consumer("c", "earliest")
        shard = table.shard("0000")
        middle = shard.plan_changes(consumer.starts["0000"].offset, max_entries=1)
        consumer.advance(shard, middle)
        end = shard.plan_changes(middle)
        assert flat(shard.read_changes(middle, end)) == [(2, "v2")]
        writer.flush()
        table.gc(dry_run=False, min_age=0)
        again = table.open_consumer("c").starts["0000"].offset
        assert flat(shard.read_changes(again, end)) == [(2, "v2")]


# -- P14


def split_every_shard(table: hg.Table) -> None:
    for shard in list(table.refresh().shards):
        table.split_shard(shard.id)


@pytest.fixture
def sharded() -> hg.Table:
    return hg.create_table(f"memory://p-feed-{next(_names)}", SCHEMA, key="id", sharding=hg.bucket("id", 1))


def test_p14_a_follower_goes_on_with_the_parts_of_a_shard(sharded: hg.Table) -> None:
    with sharded.writer() as writer:
        writer.put(rows(*range(20))).wait()
        follower = sharded.changes(follow=True, idle_timeout=0.0, poll_interval=0.001)
        got = flat([next(follower)])
        writer.put(rows(*range(5, 10), value="before")).wait()
        split_every_shard(sharded)
        writer.put(rows(*range(8, 25), value="after")).wait()
        sharded.load(loaded(30, 31))
        rest = flat(follower)
        assert len(rest) == 5 + 17 + 2
        assert replica(got + rest) == state_of(sharded)
        writer.put(rows(1, 2)).wait()
        assert len(flat(sharded.changes(start=follower.offset))) == 2


@pytest.mark.parametrize("kept_by", ["consumer", "offset"])
def test_p14_a_reader_that_was_away_for_two_splits_misses_and_doubles_nothing(sharded: hg.Table, kept_by: str) -> None:
    name = "c" if kept_by == "consumer" else None
    with sharded.writer() as writer:
        writer.put(rows(*range(20))).wait()
        changes = sharded.changes(consumer=name)
        got = flat(changes)
        start = None if name else changes.offset
        writer.put(rows(*range(5, 10), value="before")).wait()
        split_every_shard(sharded)
        writer.put(rows(*range(8, 25), value="between")).wait()
        split_every_shard(sharded)
        writer.put(rows(*range(40, 50), value="after")).wait()
        if name:
            writer.flush()
            sharded.gc(dry_run=False, min_age=0)
        rest = flat(sharded.changes(start, name))
        assert len(rest) == 5 + 17 + 10
        assert replica(got + rest) == state_of(sharded)
        assert replica(flat(sharded.changes("snapshot"))) == replica(flat(sharded.changes({}))) == state_of(sharded)
        if name:
            assert flat(sharded.changes(consumer=name)) == []
            assert sharded.consumers()[0].lag == 0


# -- P15


def test_p15_whoever_opens_a_consumer_takes_it_over_and_the_other_is_told(table: hg.Table) -> None:
    with table.writer() as writer:
        for id in range(4):
            writer.put(rows(id)).wait()
        first = table.changes(consumer="c", commit_interval=None)
        next(first)
        second = table.changes(consumer="c", commit_interval=None)
        with pytest.raises(hg.ConsumerTakenError):
            first.commit()
        assert table.consumers()[0].offset == {"0000": (0, 0)}
        next(second)
        second.commit()
        with pytest.raises(hg.ConsumerTakenError):
            first.commit()
        assert table.consumers()[0].offset == {"0000": (4, 0)}


def test_p15_an_offset_never_moves_back(table: hg.Table) -> None:
    with table.writer() as writer:
        for id in range(4):
            writer.put(rows(id)).wait()
        consumer, shard = table.open_consumer("c", "earliest"), table.shard("0000")
        consumer.advance(shard, Offset(3, 0))
        consumer.advance(shard, Offset(1, 0))
        assert table.consumers()[0].offset == {"0000": (3, 0)}
        table.open_consumer("c", {"0000": (1, 0)})
        assert table.consumers()[0].offset == {"0000": (3, 0)}


@pytest.mark.parametrize("seed", range(12))
def test_p15_two_that_register_one_name_at_once_agree_on_where_it_is(table: hg.Table, crew: Any, seed: int) -> None:
    """Whoever comes last has it, at what stands; nothing that either began with is lost."""
    chance = random.Random(seed)
    with table.writer() as writer:
        writer.put(rows(1, 2)).wait()
        crew.stops = {"consumer.seen", "consumer.claimed", "commit.loaded", "commit.created", "tip.found"}
        handles = [hg.open_table(table.uri) for _ in range(2)]
        words = [chance.choice(["earliest", "latest", "snapshot"]) for _ in handles]
        actors = [crew.actor(lambda t=t, w=w: t.changes(w, "c")) for t, w in zip(handles, words, strict=True)]
        while not all(actor.ended for actor in actors):
            chance.choice([actor for actor in actors if not actor.ended]).step()
            if chance.random() < 0.1:
                writer.put(rows(3, value=f"x{chance.random()}")).wait()
        both = [actor.finish() for actor in actors]
        writer.put(rows(4)).wait()
        (record,) = table.shard("0000").log.manifests.load().consumers.values()
        holders = [one for one in both if one._consumer._owner == record.owner]
        assert len(holders) == 1
        assert replica(flat(holders[0])).get(4) == "v4"
        loser = next(one for one in both if one is not holders[0])
        with pytest.raises(hg.ConsumerTakenError):
            list(loser)
        assert table.consumers()[0].lag == 0
        assert table.checkpoints() == [], "no pin is left behind"


def test_p15_a_slow_registration_does_not_undo_what_another_has_read(crew: Any) -> None:
    """t0 A and B find the name new · t1 A registers and reads on · t2 B comes to the shards that A has moved."""
    table = hg.create_table(f"memory://p-feed-{next(_names)}", SCHEMA, key="id", sharding=hg.bucket("id", 2))
    with table.writer() as writer:
        writer.put(rows(*range(10))).wait()
        crew.stops = {"consumer.seen"}
        slow = crew.actor(lambda: hg.open_table(table.uri).changes("latest", "c"))
        slow.step_to("consumer.seen")
        assert len(flat(table.changes("earliest", "c"))) == 10
        before = table.consumers()[0].offset
        writer.put(rows(*range(10), value="more")).wait()
        slow.finish()
        assert table.consumers()[0].offset == before, "what A has not read is not passed over"
        assert len(flat(table.changes(consumer="c"))) == 10


# -- P17


@pytest.mark.parametrize("stop", LOADER_STOPS)
@pytest.mark.parametrize("flushes", [False, True])
def test_p17_a_load_announced_before_and_placed_after_a_batch_is_delivered_once(
    table: hg.Table, crew: Any, stop: str, flushes: bool
) -> None:
    crew.stops = {stop}
    with table.writer() as writer:
        writer.put(rows(1, 2, value="before")).wait()
        reader = Reader(table)
        loader = crew.actor(lambda: hg.open_table(table.uri).load(loaded(2, 3, value="loaded"), app="a", version=1))
        for times in itertools.count():
            loader.step()
            if loader.ended or times == 12:
                break
            writer.put(rows(3, value=f"{times}")).wait()
            if flushes and times % 2:
                writer.flush()
            reader.batch()
        loader.finish()
        while reader.batch():
            pass
        assert sorted(value for id, value in reader.got if id == 2) == ["before", "loaded"]
        assert len(reader.got) == 2 + 2 + times
        assert replica(reader.got) == state_of(table)


def test_p17_the_tip_is_read_before_the_manifest_that_says_what_is_announced(table: hg.Table, crew: Any) -> None:
    """t0 the reader looks · t1 a load is announced, and reads the tip · t2 entries come · t3 the reader goes on."""
    crew.stops = {"tip.found", "load.tip"}
    with table.writer() as writer:
        writer.put(rows(1, value="before")).wait()
        reader = Reader(table)
        reading = crew.actor(reader.batch)
        reading.step_to("tip.found")
        loader = crew.actor(lambda: hg.open_table(table.uri).load(loaded(1, value="loaded")))
        loader.step_to("load.tip")
        writer.put(rows(1, value="after")).wait()
        reading.finish()
        loader.finish()
        while reader.batch():
            pass
        assert reader.got == [(1, "before"), (1, "loaded"), (1, "after")]


@pytest.mark.parametrize("seed", range(25))
def test_p17_readers_and_loaders_stop_anywhere(table: hg.Table, crew: Any, seed: int) -> None:
    """Two loaders, two readers and a writer take turns at every step; every change comes once, in the order of the table."""
    chance = random.Random(seed)
    values = itertools.count()
    crew.stops = {*LOADER_STOPS, "tip.found", "gc.committed"}
    with table.writer() as writer:
        consumer = table.open_consumer("c", "earliest")
        readers = [Reader(table), Reader(table)]
        put: list[str] = []

        def load() -> None:
            ids = chance.sample(range(6), 3)
            value = f"l{next(values)}"
            put.extend([value] * 3)
            hg.open_table(table.uri).load(loaded(*ids, value=value))

        def read(reader: Reader) -> None:
            reader.batch(chance.choice([None, 1, 2, 5]))

        def collect() -> None:
            hg.open_table(table.uri).gc(dry_run=False, min_age=0)

        def one() -> Callable[[], None]:
            kind = chance.random()
            return load if kind < 0.4 else collect if kind < 0.5 else (lambda: None)

        busy: list[Any] = []
        reading: dict[int, Any] = {}
        for _ in range(40):
            if len(busy) < 2:
                busy.append(crew.actor(one()))
            for number, reader in enumerate(readers):
                if number not in reading and chance.random() < 0.5:
                    reading[number] = crew.actor(lambda reader=reader: read(reader))
            if chance.random() < 0.4:
                value = f"w{next(values)}"
                ids = chance.sample(range(6), 2)
                put.extend([value] * 2)
                writer.put(rows(*ids, value=value)).wait()
            if chance.random() < 0.1:
                writer.flush()
            for actor in chance.sample([*busy, *reading.values()], k=min(3, len(busy) + len(reading))):
                if actor.step() is None:
                    actor.finish()
            busy = [actor for actor in busy if not actor.ended]
            reading = {number: actor for number, actor in reading.items() if not actor.ended}
        for actor in (*busy, *reading.values()):
            actor.finish()
        for reader in readers:
            while reader.batch():
                pass
            assert sorted(str(value) for _, value in reader.got) == sorted(put), f"seed {seed}: each once"
            assert replica(reader.got) == state_of(table), f"seed {seed}: in order"
        assert consumer.starts["0000"].offset == (0, 0)


def test_p17_while_a_load_is_announced_the_feed_goes_as_far_as_is_certain(table: hg.Table, crew: Any) -> None:
    crew.stops = {"transaction.announced"}
    with table.writer() as writer:
        writer.put(rows(1)).wait()
        writer.flush()
        loader = crew.actor(lambda: hg.open_table(table.uri).load(loaded(2)))
        loader.step_to("transaction.announced")
        writer.put(rows(3)).wait()
        reader = Reader(table)
        reader.batch()
        assert reader.got == [(1, "v1")], "what lies below the cursor is closed"
        assert reader.shard.latest_offset() == (1, 0)
        beginning = table.changes(start="snapshot")
        loader.finish()
        reader.batch()
        assert reader.got == [(1, "v1"), (2, "v2"), (3, "v3")] or reader.got == [(1, "v1"), (3, "v3"), (2, "v2")]
        assert replica(flat(beginning)) == state_of(table)


def test_p17_a_loader_that_died_does_not_hold_up_the_feed_for_ever(table: hg.Table, crash: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.transaction.LEASE_SECONDS", -1.0)

    def dies(point: str) -> None:
        if point == "transaction.announced":
            raise crash

    with table.writer() as writer:
        writer.put(rows(1)).wait()
        with pytest.raises(crash), hooked(dies):
            hg.open_table(table.uri).load(loaded(2))
        writer.put(rows(3)).wait()
        assert flat(table.changes()) == [(1, "v1"), (3, "v3")]


# -- F14


def test_f14_seals_do_not_bother_those_who_follow(table: hg.Table) -> None:
    """An offset at the tip is passed by the seals of idle reopens, and by the floor of collection: nothing is missing."""
    with table.writer() as writer:
        writer.put(rows(1)).wait()
        writer.flush()
        follower = table.changes(follow=True, idle_timeout=0.0, poll_interval=0.0)
        assert flat([next(follower)]) == [(1, "v1")]
        offset = follower.offset
    for _ in range(5):
        table.writer().close()
    table.gc(dry_run=False, min_age=0, sweep=True)
    assert table.shard("0000").log.manifests.load().wal_floor > offset["0000"].position
    with table.writer() as writer:
        writer.put(rows(2)).wait()
        for changes in (follower, table.changes(start=offset)):
            assert flat(changes) == [(2, "v2")]


def test_f14_a_lag_counts_no_seals_that_are_known(table: hg.Table) -> None:
    with table.writer() as writer:
        writer.put(rows(1)).wait()
    list(table.changes(consumer="c"))
    for _ in range(3):
        table.writer().close()
    assert table.consumers()[0].lag == 0
    with table.writer() as writer:
        writer.put(rows(2)).wait()
        assert flat(table.changes(consumer="c")) == [(2, "v2")]


# -- G01, G07


def objects_of(table: hg.Table) -> set[str]:
    return {info.key for info in Location.parse(table.uri).open().list("")}


def test_g01_what_consumers_have_not_read_is_there_after_collection(table: hg.Table) -> None:
    with table.writer() as writer:
        ahead, behind = table.open_consumer("ahead"), table.open_consumer("behind")
        for id in range(3):
            writer.put(rows(id)).wait()
            table.load(loaded(10 + id))
        writer.flush()
        table.compact(full=True)
        shard = table.shard("0000")
        ahead.advance(shard, Offset(3, 3))
        behind.advance(shard, Offset(1, 1))
        table.gc(dry_run=False, min_age=0)
        manifest = shard.log.manifests.load()
        assert (manifest.wal_floor, manifest.load_floor) == (1, 1)
        assert flat(shard.read_changes(Offset(1, 1), Offset(3, 3))) == [(1, "v1"), (11, "v11"), (2, "v2"), (12, "v12")]
        held = objects_of(table)
        for load in manifest.loads:
            for part in (part for run in load.runs for part in run.slices):
                assert any(key.startswith(part.path) for key in held)
        table.drop_consumer("behind")
        report = table.gc(dry_run=False, min_age=0)
        assert report.objects["entry"] == 2
        assert report.objects.get("run", 0) + report.objects.get("orphan", 0) > 0, "the files of the loads"
        assert shard.log.manifests.load().loads == ()
        assert table.verify(deep=True).ok


@pytest.mark.parametrize("word", ["earliest", "latest", "snapshot"])
@pytest.mark.parametrize("stop", ["tip.found", "consumer.seen", "commit.loaded", "commit.created", "consumer.claimed"])
def test_g07_collection_beside_a_consumer_that_registers(table: hg.Table, crew: Any, word: str, stop: str) -> None:
    crew.stops = {stop}
    with table.writer() as writer:
        writer.put(rows(1)).wait()
        table.load(loaded(2))
        actor = crew.actor(lambda: hg.open_table(table.uri).changes(word, "c"))
        for id in range(3, 6):
            actor.step()
            writer.put(rows(id)).wait()
            writer.flush()
            table.compact(full=True)
            table.gc(dry_run=False, min_age=0)
        changes = actor.finish()
        writer.put(rows(6)).wait()
        got = replica(flat(changes))
        now = state_of(table)
        assert got == (now if word == "snapshot" else {key: now[key] for key in got})
        assert 6 in got, "what came after it registered"


@pytest.mark.parametrize("stop", ["gc.listed", "gc.committed", "collect.listed", "collect.committed", "gc.runs"])
def test_g07_a_consumer_that_registers_beside_collection(table: hg.Table, crew: Any, stop: str) -> None:
    crew.stops = {stop}
    with table.writer() as writer:
        writer.put(rows(1)).wait()
        table.load(loaded(2))
        writer.put(rows(3)).wait()
        writer.flush()
        table.compact(full=True)
        collector = crew.actor(lambda: hg.open_table(table.uri).gc(dry_run=False, min_age=0))
        collector.step_to(stop)
        changes = table.changes("earliest", "c")
        begins = changes.offset["0000"]
        table.load(loaded(4))
        collector.finish()
        got = flat(changes)
        assert got[-1] == (4, "v4")
        whole = [(1, "v1"), (2, "v2"), (3, "v3"), (4, "v4")]
        assert got == whole[-len(got) :], f"from {begins} on nothing is missing in between"


@pytest.mark.parametrize("stop", LOADER_STOPS)
def test_g07_collection_beside_a_load_that_is_announced(table: hg.Table, crew: Any, stop: str) -> None:
    crew.stops = {stop}
    with table.writer() as writer:
        changes = table.changes("earliest", "c")
        writer.put(rows(1)).wait()
        loader = crew.actor(lambda: hg.open_table(table.uri).load(loaded(2)))
        for _ in range(4):
            loader.step()
            writer.flush()
            table.gc(dry_run=False, min_age=0)
        loader.finish()
        table.compact(full=True)
        table.gc(dry_run=False, min_age=0)
        assert flat(changes) == [(1, "v1"), (2, "v2")]
        assert state_of(table) == {1: "v1", 2: "v2"}


# -- I06


def test_i06_rows_that_came_after_the_base_was_indexed_are_found(tmp_path: Path) -> None:
    """The index knows the base only; what was put, flushed and loaded since is looked at beside it."""
    schema = pa.schema([pa.field("id", pa.int64(), False), pa.field("v", pa.list_(pa.float32(), 8))])
    table = hg.create_table(tmp_path / "t", schema, key="id", indexes=[hg.vector_index("v", approximate_from=256)])
    chance = np.random.default_rng(0)

    def made(ids: Iterable[int], at: float) -> pa.Table:
        ids = list(ids)
        vectors = (chance.random((len(ids), 8)) * 0.01 + at).astype(np.float32)
        return pa.table({"id": pa.array(ids, pa.int64()), "v": pa.FixedSizeListArray.from_arrays(vectors.ravel(), 8)}, schema=schema)

    with table.writer() as writer:
        table.load(made(range(1000), at=5.0))
        table.compact(full=True)
        table.load(made([1001], at=0.0))
        writer.put(made([1002], at=0.0)).wait()
        writer.flush()
        writer.put(made([1003, 7], at=0.0)).wait()
        found = table.search("v", [0.0] * 8, k=4)
        assert sorted(found.column("id").to_pylist()) == [7, 1001, 1002, 1003]
        assert table.search("v", [5.0] * 8, k=5).num_rows == 5
        assert 7 not in table.search("v", [5.0] * 8, k=1000).column("id").to_pylist()[:900], "the old version is not found"
