"""Entries that are read many at a time are what they are one by one."""

from __future__ import annotations

import random
import struct
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate.errors import CorruptEntryError, HeadgateError, ObjectMissingError, StoreUnavailableError
from headgate.manifest import ChainPoint
from headgate.store import RetryingStore
from headgate.store.local import LocalStore
from headgate.store.memory import MemoryStore
from headgate.wal.appender import EpochWriter
from headgate.wal.block import BlockDecoder, Entries, Found
from headgate.wal.entry import Entry, Put, decode_entry, encoded_bytes
from headgate.wal.fence import open_epoch
from headgate.wal.space import WalSpace

Object = tuple[ChainPoint, memoryview]


def written(bench: Any, count: int, dice: random.Random, *, first: int = 5, mixed: float = 0.0) -> tuple[WalSpace, list[Object]]:
    """Entries of one writer; ``mixed``: how many of them have a put that is not a plain one."""
    writer = EpochWriter(bench.log(), open_epoch(bench.log()))
    found = []
    for position in range(first, first + count):
        puts = []
        for number in range(dice.choice([1, 1, 1, 2, 5])):
            rows = bench.rules.upsert(bench.rows(*range(dice.choice([1, 2, 40])), value="x" * dice.choice([1, 30, 300])))
            puts.append(Put(rows))
            if dice.random() < mixed:
                delete = Put(bench.rules.delete(rows), "delete")
                puts[-1] = dice.choice([delete, Put(rows, "upsert", f"producer {number}", position)])
        size = sum(encoded_bytes(put.rows) for put in puts)
        body = writer.encode(position, position - 1, bench.rules.log_schema, puts, size)
        found.append((ChainPoint(writer.epoch, position), memoryview(bytes(body))))
    return writer.claim.space, found


def alone(space: WalSpace, point: ChainPoint, data: memoryview) -> Entry:
    return decode_entry(data, space.key(*point), space.wal_id, space.shard, *point)


def one_by_one(found: list[Found]) -> list[tuple[ChainPoint, Any]]:
    """Blocks taken apart: (point, puts and size)."""
    rows: list[tuple[ChainPoint, Any]] = []
    for point, entry in found:
        if isinstance(entry, Entries):
            assert point == (entry.epoch, entry.position)
            assert entry.end.position == entry.position + len(entry)
            for number in range(len(entry)):
                part = entry.part(number, number + 1)
                rows.append((ChainPoint(part.epoch, part.position), (part.puts, part.size_bytes)))
        elif isinstance(entry, Entry):
            rows.append((point, (list(entry.puts), entry.size_bytes)))
        else:
            rows.append((point, entry))
    return rows


def assert_as_alone(space: WalSpace, objects: list[Object], found: list[Found]) -> None:
    rows = one_by_one(found)
    assert [point for point, _ in rows] == [point for point, _ in objects]
    for (point, data), (_, (puts, size)) in zip(objects, rows, strict=True):
        entry = alone(space, point, data)
        assert size == entry.size_bytes
        assert [(put.op, put.producer, put.sequence) for put in puts] == [(put.op, put.producer, put.sequence) for put in entry.puts]
        for one, two in zip(puts, entry.puts, strict=True):
            assert one.rows.equals(two.rows)
            assert one.rows.schema.equals(two.rows.schema, check_metadata=True)
            one.rows.validate(full=True)


@pytest.mark.parametrize("mixed", [0.0, 0.02, 0.5])
@pytest.mark.parametrize("together", [1, 3, 64, 1000])
def test_entries_in_blocks_are_what_they_are_one_by_one(bench: Any, mixed: float, together: int) -> None:
    space, objects = written(bench, 120, random.Random(together), mixed=mixed)
    decoder = BlockDecoder(space)
    found = [item for at in range(0, len(objects), together) for item in decoder.decode(objects[at : at + together])]
    assert_as_alone(space, objects, found)


def test_nearly_all_plain_entries_come_in_blocks_also_where_positions_get_longer(bench: Any) -> None:
    space, objects = written(bench, 300, random.Random(0), first=900)
    found = BlockDecoder(space).decode(objects)
    in_blocks = sum(len(entry) for _, entry in found if isinstance(entry, Entries))
    assert in_blocks >= 290
    assert_as_alone(space, objects, found)


def test_a_flipped_bit_is_told_of_its_own_entry_and_no_other(bench: Any) -> None:
    space, objects = written(bench, 30, random.Random(1))
    dice = random.Random(2)
    for _ in range(300):
        which = dice.randrange(len(objects))
        point, data = objects[which]
        damaged = bytearray(data)
        damaged[dice.randrange(len(damaged))] ^= 1 << dice.randrange(8)
        rows = one_by_one(BlockDecoder(space).decode([*objects[:which], (point, memoryview(bytes(damaged))), *objects[which + 1 :]]))
        assert len(rows) == len(objects)
        for number, (_, entry) in enumerate(rows):
            assert isinstance(entry, CorruptEntryError) == (number == which)
        assert rows[which][1].object == space.key(*point)


def test_changed_bytes_whose_checksum_fits_are_read_as_one_by_one_would(bench: Any) -> None:
    """Whoever makes a checksum right makes an entry: it says what its bytes say, and nothing that they do not."""
    space, objects = written(bench, 12, random.Random(3))
    dice = random.Random(4)
    differed = 0
    for _ in range(600):
        which = dice.randrange(1, len(objects))
        point, data = objects[which]
        body = bytearray(data[:-16])
        body[dice.randrange(len(body))] ^= 1 << dice.randrange(8)
        changed = memoryview(bytes(body) + struct.pack("<QI4s", len(body), zlib.crc32(body), bytes(data[-4:])))
        (_, got) = one_by_one(BlockDecoder(space).decode([*objects[:which], (point, changed)]))[which]
        try:
            wanted = alone(space, point, changed)
            for put in wanted.puts:
                put.rows.validate(full=True)
        except pa.ArrowException:
            continue  # offsets that lead nowhere: nothing to compare
        except HeadgateError:
            # A header that says what no entry says (an id that is no text, say) may be let pass: nobody asks for it here.
            differed += not isinstance(got, HeadgateError)
            continue
        assert not isinstance(got, HeadgateError)
        assert [(put.op, put.producer, put.sequence) for put in got[0]] == [(put.op, put.producer, put.sequence) for put in wanted.puts]
        assert all(one.rows.equals(two.rows) for one, two in zip(got[0], wanted.puts, strict=True))
    assert differed < 60


def test_an_entry_under_another_ones_name_is_noticed(bench: Any) -> None:
    space, objects = written(bench, 20, random.Random(5))
    (point, _), (_, body) = objects[3], objects[9]
    rows = one_by_one(BlockDecoder(space).decode([*objects[:3], (point, body), *objects[4:]]))
    assert [isinstance(entry, HeadgateError) for _, entry in rows] == [number == 3 for number in range(20)]


def test_a_block_ends_where_a_position_is_missing(bench: Any) -> None:
    space, objects = written(bench, 60, random.Random(6))
    kept = [*objects[:20], (objects[20][0], None), *objects[21:40], *objects[45:]]
    rows = one_by_one(BlockDecoder(space).decode(kept))  # type: ignore[arg-type]
    assert [point for point, _ in rows] == [point for point, _ in kept]
    assert rows[20][1] is None


def test_parts_of_a_block_are_whole_entries(bench: Any) -> None:
    space, objects = written(bench, 40, random.Random(7))
    block = max((entry for _, entry in BlockDecoder(space).decode(objects) if isinstance(entry, Entries)), key=len)
    older, newer = block.part(0, 7), block.since(block.position + 7)
    assert (older.end, newer.end) == ((block.epoch, newer.position), block.end)
    assert [*older.puts, *newer.puts] == block.puts
    assert older.size_bytes + newer.size_bytes == block.size_bytes


@pytest.mark.parametrize("limit", [{"max_memtable_rows": 7}, {"max_memtable_batches": 5}, {"max_memtable_size": 9000}, {}])
def test_a_log_replayed_in_blocks_makes_the_same_memtables(tmp_path: Path, limit: dict[str, int]) -> None:
    """As many generations as a writer makes that takes the same entries one by one, with the same rows."""
    schema = pa.schema([pa.field("id", pa.int64(), False), ("v", pa.string())])
    table = hg.create_table(tmp_path / "table", schema, key="id")
    config = hg.ShardWriterConfig(fsync=False, max_memtable_age=1e6, **limit)  # type: ignore[arg-type]
    appender = hg.WalAppender.open(table.shards[0])
    for number in range(100):
        appender.append([[{"id": number * 3 + row, "v": "x" * 50} for row in range(number % 3 + 1)]])
    writer = table.shards[0].writer(config)
    stats = writer.memtable_stats()
    assert stats.replayed_entries == 100
    assert stats.replayed_rows == sum(number % 3 + 1 for number in range(100))
    runs = [(run.first, run.end) for run in writer.manifest().runs]
    other = hg.create_table(tmp_path / "other", schema, key="id")
    with other.shards[0].writer(config) as live:
        for number in range(100):
            live.put([{"id": number * 3 + row, "v": "x" * 50} for row in range(number % 3 + 1)]).wait()
        live.flush()
    with other.shards[0].writer(config) as successor:
        made = [(run.first, run.end) for run in successor.manifest().runs]
    if limit and "max_memtable_size" not in limit:
        assert runs == made[: len(runs)]
        assert len(made) - len(runs) <= 1
    assert writer.scan().to_arrow().num_rows == stats.replayed_rows
    writer.abort()


# -- what stores do for it


def test_a_local_store_tells_the_same_keys_with_and_without_sizes(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path), fsync=False)
    keys = [f"{folder}{name}" for folder in ("", "a/", "a/b/", "a-b/", "b/") for name in ("1", "2.x", "aa", "z")]
    for key in keys:
        store.create(key, b"x")
    for prefix in ("", "a/", "a/b/", "a-b/", "b/", "c/"):
        for after in ("", *keys, "a/", "a/b/", "a/b/zz", "a/c", "zzz"):
            assert list(store.keys(prefix, start_after=after)) == [info.key for info in store.list(prefix, start_after=after)]


def test_many_objects_in_one_call_are_those_of_many_calls(tmp_path: Path) -> None:
    for store in (LocalStore(str(tmp_path), fsync=False), MemoryStore("get-each")):
        sizes = [0, 1, 5000, (1 << 15) - 1, 1 << 15, 100_000]
        for size in sizes:
            store.create(f"k/{size}", bytes(size))
        found = store.get_each([*(f"k/{size}" for size in sizes), "k/none"], 1 << 30)
        assert [len(data) for data in found[:-1]] == sizes  # type: ignore[arg-type]
        assert isinstance(found[-1], ObjectMissingError)
        assert len(store.get_each([f"k/{size}" for size in sizes], 5001)) == 3
        assert len(store.get_each(["k/100000", "k/1"], 1)) == 1


def test_a_failure_among_many_is_tried_again_alone(bench: Any) -> None:
    class Flaky(MemoryStore):
        failures = 2

        def get(self, key: str) -> memoryview:
            if key == "b" and self.failures:
                self.failures -= 1
                raise StoreUnavailableError("no answer", object=key)
            return super().get(key)

    store = Flaky("flaky-each")
    for key in "abc":
        store.create(key, key.encode())
    found = RetryingStore(store, bench.clock, bench.QUICK).get_each(["a", "b", "c"], 1000)
    assert [bytes(data) for data in found] == [b"a", b"b", b"c"]  # type: ignore[arg-type]
