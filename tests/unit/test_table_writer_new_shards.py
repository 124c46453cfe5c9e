"""Identity sharding: a shard for each value, made on first use, once, whoever is there first and whoever dies."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest
from tests.tables import PATIENCE, MakeTables, Tables, make_tables

import headgate as hg
from headgate.failpoint import hooked
from headgate.new_shards import add_shards
from headgate.sharding import SHARDS_MAX, identity_shard
from headgate.store.faulty import Fault

__all__ = ["make_tables"]
SCHEMA = pa.schema([pa.field("tenant", pa.string(), nullable=False), ("id", pa.int64())])


@pytest.fixture
def tenants(make_tables: MakeTables) -> Tables:
    return make_tables(hg.identity("tenant"), schema=SCHEMA, key=["tenant", "id"])


def of(tenant: str, *ids: int) -> list[dict[str, Any]]:
    return [{"tenant": tenant, "id": id} for id in ids]


def manifest(tables: Tables) -> Any:
    with tables.faultless():
        return tables.table()._manifest


def test_a_table_starts_without_shards_and_gets_one_for_each_value(tenants: Tables) -> None:
    assert tenants.shards() == []
    with tenants.writer() as writer:
        assert writer.writers == {}
        receipt = writer.put(of("acme", 1, 2) + of("Ärger & Co", 3)).wait(PATIENCE)
        writer.put(of("acme", 4)).wait(PATIENCE)
    strange = identity_shard("Ärger & Co")
    assert dict(receipt) == {"acme": (1, 0), strange: (1, 0)}
    assert (tenants.ids("acme"), tenants.ids(strange)) == ([1, 2, 4], [3])
    assert manifest(tenants).shard_values == {"acme": "acme", strange: "Ärger & Co"}


def test_a_second_writer_finds_the_shards_and_makes_none_again(tenants: Tables) -> None:
    with tenants.writer() as writer:
        writer.put(of("a", 1) + of("b", 2)).wait(PATIENCE)
    before = manifest(tenants).version
    with tenants.writer() as writer:
        assert list(writer.writers) == ["a", "b"]
        assert writer.put(of("a", 3)).wait(PATIENCE)["a"] == (2, 2)
    assert manifest(tenants).version == before
    assert tenants.ids("a") == [1, 3]


def test_a_shard_made_by_another_process_is_found_on_first_use(tenants: Tables) -> None:
    one, two = tenants.writer(), tenants.writer()
    one.put(of("a", 1)).wait(PATIENCE)
    assert two.put(of("a", 2)).wait(PATIENCE)["a"] == (2, 2), "it takes over, as anybody who opens a shard"
    with pytest.raises(hg.FencedError):
        one.put(of("a", 3)).wait(PATIENCE)
    assert tenants.ids("a") == [1, 2]
    assert tenants.shards() == ["a"]


def test_threads_that_meet_a_new_value_at_once_share_its_shard(tenants: Tables) -> None:
    writer = tenants.writer()
    with ThreadPoolExecutor(8) as pool:
        acks = list(pool.map(lambda i: writer.put(of(f"t{i % 3}", i)), range(48)))
    for ack in acks:
        ack.wait(PATIENCE)
    assert sorted(tenants.shards()) == ["t0", "t1", "t2"]
    assert [one.epoch for one in writer.writers.values()] == [1, 1, 1]
    assert tenants.ids() == list(range(48))


def test_many_processes_that_make_shards_at_once_lose_none(tenants: Tables) -> None:
    handles = [tenants.table() for _ in range(8)]

    def make(number: int) -> None:
        table = handles[number]
        values = [f"v{number}", "shared", f"v{(number + 1) % 8}"]
        add_shards(table._watch, table._places, {identity_shard(value): value for value in values})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(make, range(8)))
    latest = manifest(tenants)
    assert sorted(latest.shards) == sorted([*(f"v{i}" for i in range(8)), "shared"])
    assert set(latest.shard_values) == set(latest.shards)
    with tenants.faultless():
        assert all(shard.log.manifests.load().epoch == 0 for shard in tenants.table().shards)


@pytest.mark.parametrize("point", ["identity.shards", "commit.loaded", "commit.created"])
def test_whoever_dies_while_making_a_shard_leaves_nothing_in_the_way(tenants: Tables, crash: type[Exception], point: str) -> None:
    def die(name: str) -> None:
        if name == point:
            raise crash

    writer = tenants.writer()
    with hooked(die), pytest.raises(crash):
        writer.put(of("a", 1))
    with tenants.writer() as successor:
        successor.put(of("a", 2)).wait(PATIENCE)
    assert tenants.shards() == ["a"]
    assert tenants.ids() == [2]


@pytest.mark.parametrize("kind", ["apply-then-fail", "fail", "conflict"])
@pytest.mark.parametrize("key", ["shards/a-", "table/"])
def test_lost_requests_and_replies_make_one_shard(tenants: Tables, kind: Any, key: str) -> None:
    tenants.store.add(Fault("create", kind, key=key, times=2))
    with tenants.writer() as writer:
        writer.put(of("a", 1)).wait(PATIENCE)
    assert (tenants.shards(), tenants.ids()) == (["a"], [1])


def test_a_shard_that_cannot_be_made_refuses_the_put_and_may_be_made_later(tenants: Tables) -> None:
    writer = tenants.writer()
    writer.put(of("a", 1)).wait(PATIENCE)
    tenants.store.add(Fault("create", "refuse", key="shards/b-"))
    with pytest.raises(hg.HeadgateError):
        writer.put(of("a", 2) + of("b", 3), producer="p", sequence=0)
    assert (tenants.shards(), tenants.ids()) == (["a"], [1])
    tenants.store.clear()
    writer.put(of("a", 2) + of("b", 3), producer="p", sequence=0).wait(PATIENCE)
    assert tenants.ids() == [1, 2, 3]


def test_the_number_of_shards_is_bounded(tenants: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    assert SHARDS_MAX == 10_000
    monkeypatch.setattr("headgate.new_shards.SHARDS_MAX", 3)
    writer = tenants.writer()
    writer.put(of("a", 1) + of("b", 2)).wait(PATIENCE)
    before = tenants.contents()
    with pytest.raises(hg.InvalidInputError, match=r"2 more would be too many"):
        writer.put(of("a", 3) + of("c", 3) + of("d", 4))
    assert tenants.contents() == before
    writer.put(of("c", 3)).wait(PATIENCE)
    assert tenants.ids() == [1, 2, 3]


def test_a_value_too_long_for_a_shard_refuses_the_put(tenants: Tables) -> None:
    writer = tenants.writer()
    with pytest.raises(hg.InvalidInputError, match="bytes long"):
        writer.put(of("a", 1) + of("x" * 1000, 2))
    assert tenants.shards() == []


def test_a_shard_that_is_for_another_value_is_never_written(tenants: Tables) -> None:
    with tenants.writer() as writer:
        writer.put(of("A", 1)).wait(PATIENCE)
    (shard,) = tenants.shards()
    table = tenants.table()
    table._watch.commit(lambda m: m.but(shard_values={shard: "B"}))
    with pytest.raises(hg.CorruptEntryError, match="is for the value 'B'"):
        add_shards(table._watch, table._places, {shard: "A"})


def test_a_writer_of_some_shards_makes_those_on_first_use_and_no_others(tenants: Tables) -> None:
    writer = tenants.writer(shards=["a", "b"])
    writer.put(of("a", 1)).wait(PATIENCE)
    assert tenants.shards() == ["a"]
    with pytest.raises(hg.InvalidInputError, match=r"shard c \(of 'c'\), which this writer does not hold"):
        writer.put(of("b", 2) + of("c", 3))
    assert tenants.shards() == ["a"]
    writer.put(of("b", 2)).wait(PATIENCE)
    assert tenants.ids() == [1, 2]


def test_nulls_have_a_shard_in_a_table_without_a_key(make_tables: MakeTables) -> None:
    tables = make_tables(hg.identity("tenant"), schema=pa.schema([("tenant", pa.string()), ("id", pa.int64())]), key=None)
    with tables.writer() as writer:
        writer.put([{"tenant": None, "id": 1}, {"tenant": "null", "id": 2}]).wait(PATIENCE)
    assert (tables.ids("x-null"), tables.ids("null")) == ([1], [2])
    assert manifest(tables).shard_values == {"null": "null", "x-null": None}


def test_a_dropped_table_gets_no_new_shards(tenants: Tables) -> None:
    writer = tenants.writer()
    tenants.table()._watch.commit(lambda m: m.but(state="dropped"))
    with pytest.raises(hg.NotFoundError, match="dropped"):
        writer.put(of("a", 1))


def test_a_closed_writer_opens_no_shard_behind_its_own_back(tenants: Tables) -> None:
    writer = tenants.writer()

    def close(name: str) -> None:
        if name == "table.claimed":
            writer.abort()

    with hooked(close), pytest.raises(hg.ClosedError):
        writer.put(of("a", 1))
    assert writer.writers == {}
    assert tenants.ids() == []


def test_the_manifest_says_it_in_plain_json(tenants: Tables) -> None:
    with tenants.writer() as writer:
        writer.put(of("Ä", 1)).wait(PATIENCE)
    newest = max(info.key for info in tenants.inner.list("table/"))
    body = json.loads(bytes(tenants.inner.get(newest)))["body"]
    assert body["shard_values"] == {identity_shard("Ä"): "Ä"}
