"""Entries decoded together are what they are one by one."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest

from headgate.errors import CorruptEntryError, HeadgateError
from headgate.manifest import ChainPoint
from headgate.wal.appender import EpochWriter
from headgate.wal.decode import EntryDecoder
from headgate.wal.entry import Entry, Put, decode_entry, encode_seal
from headgate.wal.fence import open_epoch
from headgate.wal.space import WalSpace

Object = tuple[ChainPoint, memoryview]


def entries_of(bench: Any, count: int, seed: int) -> tuple[WalSpace, list[Object]]:
    """What a writer would write: one row or many, several puts, deletes, producers; positions over a power of ten."""
    dice = random.Random(seed)
    writer = EpochWriter(bench.log(), open_epoch(bench.log()))
    found = []
    for position in range(5, 5 + count):
        puts = []
        for number in range(dice.choice([1, 1, 1, 3])):
            rows = bench.rules.upsert(bench.rows(*range(dice.choice([1, 2, 40, 3000])), value="x" * dice.choice([1, 30])))
            if dice.random() < 0.2:
                puts.append(Put(bench.rules.delete(rows), "delete"))
            elif dice.random() < 0.3:
                puts.append(Put(rows, "upsert", f"producer {number}", position))
            else:
                puts.append(Put(rows))
        body = writer.encode(position, position - 1, bench.rules.log_schema, puts, sum(p.rows.nbytes + 512 for p in puts))
        found.append((ChainPoint(writer.epoch, position), memoryview(bytes(body))))
    return writer.claim.space, found


def alone(space: WalSpace, point: ChainPoint, data: memoryview) -> Entry:
    return decode_entry(data, space.key(*point), space.wal_id, space.shard, *point)


def assert_same(one: Entry, two: Entry) -> None:
    assert one.header == two.header
    assert one.size_bytes == two.size_bytes
    assert [(p.op, p.producer, p.sequence) for p in one.puts] == [(p.op, p.producer, p.sequence) for p in two.puts]
    for a, b in zip(one.puts, two.puts, strict=True):
        assert a.rows.equals(b.rows)
        assert a.rows.schema.equals(b.rows.schema, check_metadata=True)
        a.rows.validate(full=True)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("together", [1, 2, 7, 64])
def test_entries_decoded_together_are_what_they_are_one_by_one(bench: Any, seed: int, together: int) -> None:
    space, objects = entries_of(bench, 40, seed)
    decoder = EntryDecoder(space)
    found = [item for at in range(0, len(objects), together) for item in decoder.decode(objects[at : at + together])]
    assert [point for point, _ in found] == [point for point, _ in objects]
    for (point, data), (_, entry) in zip(objects, found, strict=True):
        assert isinstance(entry, Entry)
        assert_same(entry, alone(space, point, data))


def test_most_small_entries_take_the_short_way(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    space, objects = entries_of(bench, 60, 1)
    plain = []
    original = EntryDecoder._plain
    monkeypatch.setattr(EntryDecoder, "_plain", lambda self, *rest: (plain.append(1), original(self, *rest))[1])
    EntryDecoder(space).decode(objects)
    assert len(plain) <= 20, "the first of each look, and large ones"


def test_a_flipped_bit_is_told_of_its_own_entry_and_no_other(bench: Any) -> None:
    space, objects = entries_of(bench, 12, 3)
    dice = random.Random(0)
    for _ in range(300):
        which = dice.randrange(len(objects))
        point, data = objects[which]
        damaged = bytearray(data)
        damaged[dice.randrange(len(damaged))] ^= 1 << dice.randrange(8)
        found = EntryDecoder(space).decode([*objects[:which], (point, memoryview(bytes(damaged))), *objects[which + 1 :]])
        for number, (_, entry) in enumerate(found):
            if number == which:
                assert isinstance(entry, CorruptEntryError)
                assert entry.object == space.key(*point)
            else:
                assert isinstance(entry, Entry)


def test_an_entry_under_another_ones_name_is_noticed(bench: Any) -> None:
    space, objects = entries_of(bench, 20, 4)
    (first, _), (_, body) = objects[3], objects[9]
    found = EntryDecoder(space).decode([*objects[:3], (first, body), *objects[4:]])
    assert isinstance(found[3][1], CorruptEntryError)
    assert sum(isinstance(entry, HeadgateError) for _, entry in found) == 1


def test_seals_missing_ones_and_errors_keep_their_places(bench: Any) -> None:
    space, objects = entries_of(bench, 8, 5)
    entry = alone(space, *objects[0])
    header = entry.header
    seal = encode_seal(type(header)(**{**{f: getattr(header, f) for f in header.__slots__}, "kind": "seal", "position": 6, "by_epoch": 9}))
    error = HeadgateError("no answer")
    raws = [
        objects[0],
        (ChainPoint(header.epoch, 6), seal),
        (ChainPoint(header.epoch, 7), None),
        objects[3],
        (ChainPoint(header.epoch, 9), error),
    ]
    found = EntryDecoder(space).decode(raws)
    assert [type(entry) for _, entry in found] == [Entry, Entry, type(None), Entry, HeadgateError]
    assert found[1][1].is_seal  # type: ignore[union-attr]


def test_rows_of_a_group_have_one_schema(bench: Any) -> None:
    """Readers that look at it once per schema look once."""
    space, objects = entries_of(bench, 30, 6)
    entries = [entry for _, entry in EntryDecoder(space).decode(objects) if isinstance(entry, Entry)]
    assert isinstance(entries[-1].puts[0].rows, pa.RecordBatch)
    assert entries[-1].puts[0].rows.schema.metadata is None
