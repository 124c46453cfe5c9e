"""The change feed: entries and loads in one order, offsets, beginnings, consumers."""

from __future__ import annotations

import contextlib
import itertools
import json
import pickle
import random
from collections.abc import Callable, Iterable
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate import feed
from headgate.changes import Changes
from headgate.failpoint import hooked
from headgate.feed import Offset

SCHEMA = pa.schema([pa.field("id", pa.int64(), False), pa.field("value", pa.string())])
_names = itertools.count()


def rows(*ids: int, value: str = "") -> list[dict[str, Any]]:
    return [{"id": id, "value": value or f"v{id}"} for id in ids]


@pytest.fixture
def make() -> Callable[..., hg.Table]:
    def one(schema: pa.Schema = SCHEMA, key: str | None = "id", **options: Any) -> hg.Table:
        return hg.create_table(f"memory://feed-{next(_names)}", schema, key=key, **options)

    return one


@pytest.fixture
def table(make: Callable[..., hg.Table]) -> hg.Table:
    return make()


def flat(batches: Iterable[pa.RecordBatch]) -> list[tuple[str, int, str | None]]:
    return [(row["_op"], row["id"], row["value"]) for batch in batches for row in batch.to_pylist()]


def apply(state: dict[int, str | None], batches: Iterable[pa.RecordBatch]) -> dict[int, str | None]:
    for op, id, value in flat(batches):
        if op == "delete":
            state.pop(id, None)
        else:
            state[id] = value
    return state


def state_of(table: hg.Table) -> dict[int, str]:
    return {row["id"]: row["value"] for row in table.scan().to_arrow().to_pylist()}


def collect(table: hg.Table) -> None:
    table.gc(dry_run=False, min_age=0)


# -- what comes


def test_puts_and_deletes_come_in_order_with_where_they_come_from(table: hg.Table) -> None:
    with table.writer() as writer:
        writer.put(rows(1, 2)).wait()
        writer.delete([{"id": 1}]).wait()
        writer.put(rows(1, value="again")).wait()
        batches = list(table.changes())
    assert flat(batches) == [("upsert", 1, "v1"), ("upsert", 2, "v2"), ("delete", 1, None), ("upsert", 1, "again")]
    (batch,) = batches
    assert batch.column("_position").to_pylist() == [0, 0, 1, 2]
    assert set(batch.column("_epoch").to_pylist()) == {1}
    assert set(batch.column("_load").to_pylist()) == {0}
    assert batch.schema.field("_time").type == pa.timestamp("us", "UTC")
    assert batch.column("_time").null_count == 0


def test_a_load_comes_where_it_stands_among_the_entries(table: hg.Table) -> None:
    with table.writer() as writer:
        writer.put(rows(1, 2)).wait()
        table.load(pa.Table.from_pylist(rows(2, 3, value="loaded"), schema=SCHEMA))
        writer.put(rows(3)).wait()
        batches = list(table.changes())
        seen = apply({}, batches)
        assert seen == state_of(table) == {1: "v1", 2: "loaded", 3: "v3"}
    found = pa.Table.from_batches(batches)
    assert found.column("_load").to_pylist() == [0, 0, 1, 1, 0]
    assert found.column("_position").to_pylist() == [0, 0, 0, 0, 1]
    assert found.column("_epoch").to_pylist() == [1, 1, None, None, 1]
    keys = list(zip(found.column("_position").to_pylist(), found.column("_load").to_pylist(), strict=True))
    assert keys == sorted(keys), "position and load sort as the changes count"


def test_a_load_with_deletes_says_so(table: hg.Table) -> None:
    with table.writer() as writer:
        writer.put(rows(1, 2)).wait()
        table.load(pa.table({"id": [1, 3], "value": [None, "new"], "_op": ["delete", "upsert"]}))
        assert flat(table.changes())[2:] == [("delete", 1, None), ("upsert", 3, "new")]


def test_loads_come_though_they_were_compacted_since(table: hg.Table) -> None:
    table.load(pa.Table.from_pylist(rows(1, 2), schema=SCHEMA))
    table.load(pa.Table.from_pylist(rows(2, value="two"), schema=SCHEMA))
    changes = table.changes(consumer="c")
    table.compact(full=True)
    collect(table)
    assert flat(changes) == [("upsert", 1, "v1"), ("upsert", 2, "v2"), ("upsert", 2, "two")]


def test_batches_make_one_table_also_when_there_are_none(table: hg.Table) -> None:
    changes = table.changes()
    assert pa.Table.from_batches(changes, schema=changes.schema).num_rows == 0
    assert changes.schema.names == ["id", "value", "_op", "_epoch", "_position", "_load", "_time"]


def test_old_rows_come_with_the_columns_of_now(table: hg.Table) -> None:
    with table.writer() as writer:
        writer.put(rows(1)).wait()
        table.load(pa.Table.from_pylist(rows(2), schema=SCHEMA))
        table.add_columns(pa.schema([pa.field("more", pa.int32())]))
        table.rename_column("value", "text")
        writer.put([{"id": 3, "text": "three", "more": 3}]).wait()
        found = pa.Table.from_batches(table.changes())
    assert found.select(["id", "text", "more"]).to_pylist() == [
        {"id": 1, "text": "v1", "more": None},
        {"id": 2, "text": "v2", "more": None},
        {"id": 3, "text": "three", "more": 3},
    ]


def test_a_follower_learns_of_columns_that_come(table: hg.Table) -> None:
    with table.writer() as writer, table.changes(follow=True, idle_timeout=0.0) as changes:
        writer.put(rows(1)).wait()
        assert next(changes).num_columns == 7
        other = hg.open_table(table.uri)
        other.add_columns(pa.schema([pa.field("more", pa.int32())]))
        other.widen_column("value", pa.large_string())
        writer.put(pa.table({"id": [2], "value": pa.array(["x"], pa.large_string()), "more": pa.array([5], pa.int32())})).wait()
        (batch,) = list(changes)
        assert batch.column("more").to_pylist() == [5]
        assert batch.schema.field("value").type == pa.large_string()


def test_a_table_without_a_key_gives_all_its_rows(make: Callable[..., hg.Table]) -> None:
    table = make(key=None)
    with table.writer() as writer:
        writer.put(rows(1, 1)).wait()
        table.load(pa.Table.from_pylist(rows(1), schema=SCHEMA))
        writer.put(rows(1)).wait()
        assert len(flat(table.changes())) == 4
        assert len(flat(table.changes(start="snapshot"))) == 4


def test_small_entries_share_a_batch_and_a_large_load_is_given_in_parts(table: hg.Table, monkeypatch: pytest.MonkeyPatch) -> None:
    with table.writer() as writer:
        for id in range(20):
            writer.put(rows(id)).wait()
        table.load(pa.Table.from_pylist(rows(*range(100, 130)), schema=SCHEMA))
        shard = table.shard("0000")
        end = shard.plan_changes(Offset())
        assert end == (20, 1)
        batches = list(feed.read(shard, Offset(), end, batch_rows=10))
    assert [batch.rows.num_rows for batch in batches] == [10] * 5
    assert [batch.offset for batch in batches] == [(10, 0), (20, 0), (20, 0), (20, 0), (20, 1)]


# -- offsets


def test_every_batch_carries_the_offset_after_it(table: hg.Table) -> None:
    with table.writer() as writer:
        writer.put(rows(1)).wait()
        changes = table.changes()
        batch = next(changes)
        assert json.loads(batch.schema.metadata[b"headgate.offset"]) == {"0000": [1, 0]}
        assert changes.offset == {"0000": (1, 0)}
        writer.put(rows(2)).wait()
        for start in (changes.offset, json.dumps(changes.offset), {"0000": [1, 0]}):
            assert flat(table.changes(start=start)) == [("upsert", 2, "v2")]


def test_reading_at_any_cut_and_going_on_gives_all_of_it_once(table: hg.Table) -> None:
    with table.writer() as writer:
        for id in range(6):
            writer.put(rows(id)).wait()
            if id % 2:
                table.load(pa.Table.from_pylist(rows(10 + id), schema=SCHEMA))
                table.load(pa.Table.from_pylist(rows(20 + id), schema=SCHEMA))
        shard = table.shard("0000")
        whole = flat(shard.read_changes(Offset(), shard.plan_changes(Offset())))
        assert len(whole) == 12
        for step in range(1, 13):
            at, got = Offset(), []
            while (end := shard.plan_changes(at, max_entries=step)) != at:
                part = flat(shard.read_changes(at, end))
                assert 0 < len(part) <= step
                got += part
                at = end
            assert got == whole


def test_a_plan_by_bytes_always_goes_on_and_seldom_too_far(table: hg.Table) -> None:
    with table.writer() as writer:
        for id in range(10):
            writer.put(rows(*range(100 * id, 100 * id + 100))).wait()
        table.load(pa.Table.from_pylist(rows(1), schema=SCHEMA))
        shard = table.shard("0000")
        sizes = [entry.size_bytes for entry in hg.WalTailer(shard).read()]
        assert shard.plan_changes(Offset(), max_bytes=1) == (1, 0)
        assert shard.plan_changes(Offset(), max_bytes=sum(sizes[:4])) == (4, 0)
        assert shard.plan_changes(Offset(9, 0), max_bytes=sizes[9]) == (10, 0)
        assert shard.plan_changes(Offset(10, 0), max_bytes=1) == (10, 1)
        assert shard.plan_changes(Offset(), max_bytes=1 << 30) == (10, 1)
        assert shard.plan_changes(Offset(), max_entries=3, max_bytes=1 << 30) == (3, 0)


@pytest.mark.parametrize("start", ["newest", "[]", '{"0000": 1}', {"0000": (-1, 0)}, {"0000": (1.0, 0)}, 5, {"nope": (0, 0)}])
def test_a_start_that_is_none_is_refused(table: hg.Table, start: Any) -> None:
    with pytest.raises(hg.InvalidInputError):
        table.changes(start=start)


def test_an_offset_past_the_end_is_refused(table: hg.Table) -> None:
    for offset in ((1, 0), (0, 1)):
        with pytest.raises(hg.InvalidInputError, match="past the end"):
            list(table.changes(start={"0000": offset}))


def test_shards_and_offsets_travel_to_other_processes(table: hg.Table) -> None:
    with table.writer() as writer:
        writer.put(rows(1)).wait()
        shard, start, end = pickle.loads(pickle.dumps((table.shard("0000"), Offset(), table.shard("0000").plan_changes(Offset()))))
        assert flat(shard.read_changes(start, end)) == [("upsert", 1, "v1")]


# -- beginnings


def test_latest_gives_what_comes_from_the_call_on(table: hg.Table) -> None:
    with table.writer() as writer:
        writer.put(rows(1)).wait()
        changes = table.changes(start="latest")
        writer.put(rows(2)).wait()
        assert flat(changes) == [("upsert", 2, "v2")]


def test_earliest_gives_what_is_there_and_what_is_gone_is_an_error(table: hg.Table) -> None:
    with table.writer() as writer:
        writer.put(rows(1)).wait()
        writer.flush()
        collect(table)
        writer.put(rows(2)).wait()
        assert flat(table.changes()) == [("upsert", 2, "v2")]
        with pytest.raises(hg.WalTruncatedError, match="from position 0 to 0 were collected"):
            list(table.changes(start={"0000": (0, 0)}))


def test_a_load_that_is_gone_is_an_error_and_earliest_begins_after_it(table: hg.Table) -> None:
    with table.writer() as writer:
        writer.put(rows(1)).wait()
        table.load(pa.Table.from_pylist(rows(2), schema=SCHEMA))
        writer.flush()
        writer.put(rows(3)).wait()
        collect(table)
        with pytest.raises(hg.WalTruncatedError, match="loads 1 to 1"):
            list(table.changes(start={"0000": (1, 0)}))
        assert flat(table.changes()) == [("upsert", 3, "v3")]


def test_earliest_never_begins_before_a_load_that_is_gone(table: hg.Table) -> None:
    """A checkpoint holds the log; a load in it must not be dropped alone, or its older rows would seem to be newest."""
    with table.writer() as writer:
        writer.put(rows(1, value="old")).wait()
        table.checkpoint("hold")
        table.load(pa.Table.from_pylist(rows(1, value="new"), schema=SCHEMA))
        writer.flush()
        collect(table)
        assert apply({}, table.changes()) == {1: "new"}
        table.drop_checkpoint("hold")
        collect(table)
        assert flat(table.changes()) == []


def test_a_snapshot_and_its_changes_miss_and_double_nothing(table: hg.Table) -> None:
    with table.writer() as writer:
        writer.put(rows(1, 2, 3)).wait()
        writer.flush()
        writer.delete([{"id": 2}]).wait()
        table.load(pa.Table.from_pylist(rows(4), schema=SCHEMA))
        changes = table.changes(start="snapshot")
        first = next(changes)
        assert first.column("_op").to_pylist() == ["upsert"] * first.num_rows
        writer.put(rows(1, value="later")).wait()
        got = flat(itertools.chain([first], changes))
        assert sorted(got[:3]) == [("upsert", 1, "v1"), ("upsert", 3, "v3"), ("upsert", 4, "v4")]
        assert got[3:] == [("upsert", 1, "later")]
        assert table.checkpoints() == []


def test_the_pin_of_a_snapshot_goes_when_the_reader_stops_in_the_middle(table: hg.Table) -> None:
    with table.writer() as writer:
        writer.put(rows(1, 2)).wait()
        with table.changes(start="snapshot") as changes:
            next(changes)
            assert len(table.checkpoints()) == 1
        assert table.checkpoints() == []


def test_an_offset_from_the_middle_of_a_snapshot_begins_it_again(make: Callable[..., hg.Table]) -> None:
    table = make(sharding=hg.bucket("id", 4))
    with table.writer() as writer:
        writer.put(rows(*range(40))).wait()
        writer.flush()
        changes = table.changes(start="snapshot")
        for _ in range(2):
            next(changes)
        offset = changes.offset
        assert len(offset) == 2, "what is not all given is not in it"
        changes.close()
        collect(table)
        state = apply({}, table.changes(start=offset))
        assert len(state) >= 20
        assert apply({}, table.changes(start={})) == state_of(table)


def test_a_pinned_beginning_for_readers_in_parts(make: Callable[..., hg.Table]) -> None:
    table = make(sharding=hg.bucket("id", 2))
    with table.writer() as writer:
        writer.put(rows(*range(10))).wait()
        checkpoint, offset = table.pin_changes(ttl=60)
        writer.put(rows(*range(5, 15), value="new")).wait()
        state = {row["id"]: row["value"] for row in table.scan(at=checkpoint).to_arrow().to_pylist()}
        assert apply(state, table.changes(start=offset)) == state_of(table)


# -- following


def test_following_gives_what_comes_and_ends_when_nothing_does(table: hg.Table) -> None:
    with table.writer() as writer, table.changes(follow=True, idle_timeout=0.05, poll_interval=0.001) as changes:
        got = []
        for id in range(5):
            writer.put(rows(id)).wait()
            got += flat([next(changes)])
        assert [id for _, id, _ in got] == [0, 1, 2, 3, 4]
        assert list(changes) == []


def test_following_ends_when_another_thread_closes_it(table: hg.Table) -> None:
    import threading

    changes = table.changes(follow=True, poll_interval=0.01)
    reader = threading.Thread(target=lambda: list(changes))
    reader.start()
    changes.close()
    reader.join(30)
    assert not reader.is_alive()


def test_following_finds_the_shards_of_new_values(make: Callable[..., hg.Table]) -> None:
    table = make(key=None, sharding=hg.identity("value"))
    with table.writer() as writer, table.changes(follow=True, idle_timeout=0.05, consumer="c") as changes:
        writer.put(rows(1, value="a")).wait()
        assert flat([next(changes)]) == [("upsert", 1, "a")]
        writer.put(rows(2, value="b")).wait()
        assert flat([next(changes)]) == [("upsert", 2, "b")]
        assert list(changes) == []
    assert [place.shard for place in table.consumers()[0].places] == [shard.id for shard in table.refresh().shards]


def test_a_consumer_gets_all_of_a_shard_that_came_and_was_collected_while_it_was_away(make: Callable[..., hg.Table]) -> None:
    table = make(key=None, sharding=hg.identity("value"))
    with table.writer() as writer:
        writer.put(rows(1, value="a")).wait()
        assert len(flat(table.changes(consumer="c"))) == 1
        writer.put(rows(2, 3, value="b")).wait()
        writer.flush()
        collect(table)
        writer.put(rows(4, value="b")).wait()
        assert sorted(flat(table.changes(consumer="c"))) == [("upsert", 2, "b"), ("upsert", 3, "b"), ("upsert", 4, "b")]
        assert flat(table.changes(consumer="c")) == []


# -- consumers


def _reads_and_dies(changes: Changes, batches: int) -> None:
    with contextlib.suppress(RuntimeError), changes:
        for _ in range(batches):
            next(changes)
        raise RuntimeError


def test_a_consumer_goes_on_where_it_was(table: hg.Table) -> None:
    with table.writer() as writer:
        writer.put(rows(1)).wait()
        assert len(flat(table.changes(consumer="c"))) == 1
        writer.put(rows(2)).wait()
        assert flat(table.changes(start="earliest", consumer="c")) == [("upsert", 2, "v2")]
        assert flat(table.changes(consumer="c")) == []


def test_a_consumer_moves_only_past_what_was_asked_beyond(make: Callable[..., hg.Table], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "BATCH_ROWS", 1)
    monkeypatch.setattr(feed.read, "__kwdefaults__", {**feed.read.__kwdefaults__, "batch_rows": 1})
    table = make()
    with table.writer() as writer:
        for id in range(4):
            writer.put(rows(id)).wait()
        place = lambda: table.consumers()[0].places[0].position  # noqa: E731
        with table.changes(consumer="c", commit_interval=0) as changes:
            next(changes)
            assert place() == 0
            next(changes)
            assert place() == 1
        assert place() == 1, "the last one may not be done with"
        _reads_and_dies(table.changes(consumer="c"), batches=2)
        assert place() == 1, "what failed is given again"
        with table.changes(consumer="c") as changes:
            next(changes)
            changes.commit()
        assert place() == 2
        assert len(list(table.changes(consumer="c", commit_interval=None))) == 2
        assert place() == 2, "only commit() moves it"


def test_a_consumer_holds_entries_and_loads_until_it_has_read_them(table: hg.Table) -> None:
    table.changes(consumer="slow").close()
    with table.writer() as writer:
        writer.put(rows(1)).wait()
        table.load(pa.Table.from_pylist(rows(2), schema=SCHEMA))
        writer.put(rows(3)).wait()
        writer.flush()
        table.compact(full=True)
        collect(table)
        assert table.consumers()[0].lag == 3
        assert [id for _, id, _ in flat(table.changes(consumer="slow"))] == [1, 2, 3]
        assert table.consumers()[0].lag == 0
        collect(table)
        manifest = table.shard("0000").log.manifests.load()
        assert (manifest.wal_floor, manifest.load_floor, manifest.loads) == (2, 1, ())
        assert table.verify(deep=True).ok


def test_a_dropped_consumer_holds_nothing_and_its_reader_is_told(table: hg.Table) -> None:
    with table.writer() as writer:
        writer.put(rows(1)).wait()
        changes = table.changes(start="snapshot", consumer="c")
        next(changes)
        table.drop_consumer("c")
        assert table.checkpoints() == []
        with pytest.raises(hg.NotFoundError):
            changes.commit()
        with pytest.raises(hg.NotFoundError):
            table.drop_consumer("c")


def test_a_consumer_begins_its_snapshot_again_until_it_has_all_of_it(table: hg.Table) -> None:
    with table.writer() as writer:
        writer.put(rows(1, 2)).wait()
        _reads_and_dies(table.changes(start="snapshot", consumer="c"), batches=1)
        assert table.consumers()[0].places[0].snapshot
        writer.put(rows(1, value="later")).wait()
        writer.flush()
        collect(table)
        got = flat(table.changes(start="snapshot", consumer="c"))
        assert got == [("upsert", 1, "v1"), ("upsert", 2, "v2"), ("upsert", 1, "later")]
        assert table.checkpoints() == []


def test_a_registration_that_was_cut_short_is_begun_again(make: Callable[..., hg.Table]) -> None:
    table = make(sharding=hg.bucket("id", 3))

    class Crash(Exception):
        pass

    claims = 0

    def dies(point: str) -> None:
        nonlocal claims
        claims += point == "consumer.claimed"
        if claims == 2:
            raise Crash

    with table.writer() as writer:
        writer.put(rows(*range(30))).wait()
        with pytest.raises(Crash), hooked(dies):
            table.changes(start="snapshot", consumer="c")
        writer.put(rows(*range(20, 40), value="x")).wait()
        writer.flush()
        collect(table)
        assert apply({}, table.changes(start="snapshot", consumer="c")) == state_of(table)
        assert table.checkpoints() == []


def test_an_offset_of_ones_own_wins_over_the_consumers_and_moves_it(table: hg.Table) -> None:
    with table.writer() as writer:
        for id in range(4):
            writer.put(rows(id)).wait()
        table.changes(consumer="c").close()
        changes = table.changes(start={"0000": (2, 0)}, consumer="c")
        assert table.consumers()[0].offset == {"0000": (2, 0)}
        assert [id for _, id, _ in flat(changes)] == [2, 3]
        again = table.changes(start={"0000": (1, 0)}, consumer="c")
        assert [id for _, id, _ in flat(again)] == [1, 2, 3]
        assert table.consumers()[0].offset == {"0000": (4, 0)}, "it never moves back"


def test_a_log_without_a_memtable_has_changes_and_consumers_hold_what_is_trimmed(table: hg.Table) -> None:
    with table.writer(hg.ShardWriterConfig(enable_memtable=False)) as writer:
        for id in range(3):
            writer.put(rows(id)).wait()
        with table.changes(consumer="c") as changes:
            next(changes)
            with pytest.raises(hg.InvalidInputError, match="the consumer 'c' still needs position 0"):
                table.trim(before=2)
            changes.commit()
        table.trim(before=2)
        collect(table)
        assert [id for _, id, _ in flat(table.changes())] == [2]


@pytest.mark.parametrize("name", ["", " ", "x" * 201, 5])
def test_a_name_that_is_none_is_refused(table: hg.Table, name: Any) -> None:
    with pytest.raises(hg.InvalidInputError):
        table.changes(consumer=name)
    assert table.consumers() == []


def test_changes_without_a_consumer_cannot_commit(table: hg.Table) -> None:
    with pytest.raises(hg.InvalidInputError):
        table.changes().commit()


# -- everything at once


class Follower:
    """A replica that stops and goes on at any moment, by a name or by an offset of its own."""

    def __init__(self, table: hg.Table, random: random.Random, start: str) -> None:
        self.table, self.random, self.start = table, random, start
        self.state: dict[int, str | None] = {}
        self.seen: list[tuple[int, int]] = []
        self.consumer = f"c-{start}"
        self.open: Changes | None = None

    def step(self, *, to_the_end: bool = False) -> None:
        if self.open is None:
            self.open = self.table.changes(start=self.start, consumer=self.consumer, commit_interval=None)
        for _ in range(1000 if to_the_end else self.random.randrange(4)):
            batch = next(self.open, None)
            if batch is None:
                self.open.commit()
                self.open = None
                return
            apply(self.state, [batch])
            if batch.schema.metadata[b"headgate.offset"] != b"{}":
                self._note(batch)
            if self.random.random() < 0.5:
                self.open.commit()
        if self.random.random() < 0.3:
            self.open.commit()  # a clean stop
            self.open.close()
            self.open = None

    def _note(self, batch: pa.RecordBatch) -> None:
        for position, load in zip(batch.column("_position").to_pylist(), batch.column("_load").to_pylist(), strict=True):
            self.seen.append((position, load))


@pytest.mark.parametrize("seed", range(12))
def test_a_replica_that_follows_is_the_table(make: Callable[..., hg.Table], seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed.read, "__kwdefaults__", {**feed.read.__kwdefaults__, "batch_rows": 3})
    chance = random.Random(seed)
    table = make()
    writer = table.shard("0000").writer(hg.ShardWriterConfig(max_memtable_rows=chance.choice([7, 1000])))
    followers = [Follower(table, chance, start) for start in ("earliest", "latest", "snapshot")]
    followers[1].step()  # latest of an empty table: all of it
    followers[0].step()
    value = itertools.count()

    def ids() -> list[int]:
        return chance.sample(range(12), chance.randrange(1, 6))

    for _ in range(60):
        what = chance.choice(["put"] * 4 + ["delete"] * 2 + ["load"] * 2 + ["flush", "compact", "gc", "reopen"] + ["feed"] * 6)
        if what == "put":
            writer.put(rows(*ids(), value=f"w{next(value)}")).wait()
        elif what == "delete":
            writer.delete([{"id": id} for id in ids()]).wait()
        elif what == "load":
            table.load(
                pa.Table.from_pylist([{**row, "_op": chance.choice(["upsert", "delete"])} for row in rows(*ids(), value=f"l{next(value)}")])
            )
        elif what == "flush":
            writer.flush()
        elif what == "compact":
            table.compact(full=chance.random() < 0.5)
        elif what == "gc":
            collect(table)
        elif what == "reopen":
            writer.close()
            writer = table.shard("0000").writer(hg.ShardWriterConfig(max_memtable_rows=7))
        else:
            chance.choice(followers).step()
    for follower in followers:
        if follower.open is not None:  # it ends at what was there when it was opened
            follower.step(to_the_end=True)
        follower.step(to_the_end=True)
        assert follower.state == state_of(table), f"seed {seed}, {follower.start}"
    for follower in followers[:2]:
        pairs = [pair for pair, _ in itertools.groupby(follower.seen)]
        assert pairs == sorted(set(pairs)), f"seed {seed}: every entry and every load once, in order"
    writer.close()
