"""Hazards of queries: the newest version decides, then the filter, then the limit; one state, whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations_with_replacement, product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.reading import Shelf, by_key, on_disk
from tests.unit.test_columnar import TYPES

import headgate.query.scan as scan_module
from headgate.columnar import lance as lance_columnar
from headgate.errors import DataLossError, ObjectMissingError, SnapshotExpiredError
from headgate.query.lookup import lookup
from headgate.query.ranges import scan_range
from headgate.query.scan import Scan
from headgate.query.sql import sql
from headgate.schema import RowRules, check_schema
from headgate.view import ReadView
from headgate.wal.entry import Header, Put, decode_entry, encode_entry

RULES = RowRules(pa.schema([pa.field("id", pa.int64(), False), pa.field("v", pa.int64())]), ("id",))
TIERS = ["base", "run", "frozen", "active", "pending"]
PAIRS = list(combinations_with_replacement(TIERS, 2))
Write = Callable[[Shelf, bool], None]


def tiered(writes: dict[str, list[Write]], shelf: Shelf | None = None) -> Shelf:
    """Writes by the tier that they are in when the table is read; other rows are in every tier."""
    shelf = shelf or Shelf(RULES)
    for number, tier in enumerate(TIERS):
        pending = tier == "pending"
        shelf.put([{"id": 1000 + number, "v": number}, {"id": 1999, "v": number}], pending=pending)
        for write in writes.get(tier, []):
            write(shelf, pending)
        if tier in ("base", "run"):
            shelf.flush()
        elif tier == "frozen":
            shelf.freeze()
    return shelf


def put(id: int, v: int | None) -> Write:
    return lambda shelf, pending: shelf.put([{"id": id, "v": v}], pending=pending)


def delete(id: int) -> Write:
    return lambda shelf, pending: shelf.delete([{"id": id}], pending=pending)


def in_order(older: str, first: Write, newer: str, then: Write) -> dict[str, list[Write]]:
    return {older: [first, then]} if older == newer else {older: [first], newer: [then]}


@pytest.fixture(params=["memory", "lance"])
def shelf(request: pytest.FixtureRequest, tmp_path: Path) -> Shelf:
    return Shelf(RULES, on_disk(tmp_path) if request.param == "lance" else None)


@pytest.mark.parametrize(("older", "newer"), PAIRS)
def test_q01_a_lookup_finds_the_newest_version_at_every_pair_of_tiers(older: str, newer: str) -> None:
    shelf = tiered(in_order(older, put(7, 1), newer, put(7, 2)))
    assert lookup(shelf.load, RULES, [7]).to_pylist() == [{"id": 7, "v": 2}]
    gone = tiered(in_order(older, put(7, 1), newer, delete(7)))
    assert lookup(gone.load, RULES, [7]).num_rows == 0
    back = tiered(in_order(older, delete(7), newer, put(7, 3)))
    assert lookup(back.load, RULES, [7], columns=["v"]).to_pylist() == [{"v": 3}]


def test_q01_many_updates_of_one_key_through_every_tier(shelf: Shelf) -> None:
    for number in range(12):
        shelf.put([{"id": 7, "v": number}, {"id": 8, "v": -number}])
        assert lookup(shelf.load, RULES, [8, 7]).column("v").to_pylist() == [-number, number]
        if number % 3 == 0:
            shelf.flush()
        elif number % 3 == 1:
            shelf.freeze()
        assert lookup(shelf.load, RULES, [8, 7]).column("v").to_pylist() == [-number, number]


def test_q02_every_form_of_read_has_each_key_once(shelf: Shelf) -> None:
    random = np.random.default_rng(2)
    for number in range(9):
        keys = random.integers(0, 200, 80).tolist()
        shelf.put([{"id": key, "v": number} for key in keys])
        shelf.delete([{"id": key} for key in random.integers(0, 200, 10).tolist()])
        if number % 3 == 0:
            shelf.flush(slices=2)
        elif number % 4 == 0:
            shelf.freeze()
        alive = sorted(row["id"] for row in shelf.expected())
        batches = [batch.column("id").to_pylist() for batch in Scan(shelf.load, RULES).to_batches()]
        ranged = [batch.column("id").to_pylist() for batch in scan_range(shelf.view(), ["id"])]
        forms = {
            "to_arrow": Scan(shelf.load, RULES, columns=["id"]).to_arrow().column(0).to_pylist(),
            "to_batches": [id for batch in batches for id in batch],
            "filter": Scan(shelf.load, RULES, filter="v >= 0").to_arrow().column("id").to_pylist(),
            "stream": pa.table(Scan(shelf.load, RULES)).column("id").to_pylist(),
            "lookup": lookup(shelf.load, RULES, list(range(200)) * 2).column("id").to_pylist(),
            "sql": sql(shelf.load, RULES, "select id from t").column("id").to_pylist(),
            "range": [id for batch in ranged for id in batch],
        }
        assert {form: sorted(ids) for form, ids in forms.items()} == dict.fromkeys(forms, alive)
        assert Scan(shelf.load, RULES).count() == len(alive)


FILTERS = ["v = 1", "v < 2", "abs(v) = 1"]
"""The first two are given to Lance, the last one is not."""


@pytest.mark.parametrize(("older", "newer"), PAIRS)
def test_q04_a_row_updated_out_of_the_predicate_does_not_come_back_with_its_old_value(older: str, newer: str, tmp_path: Path) -> None:
    shelf = tiered(in_order(older, put(7, 1), newer, put(7, 5)), Shelf(RULES, on_disk(tmp_path)))
    gone = tiered(in_order(older, put(7, 1), newer, delete(7)), Shelf(RULES, on_disk(tmp_path / "gone")))
    nulled = tiered(in_order(older, put(7, 1), newer, put(7, None)), Shelf(RULES, on_disk(tmp_path / "null")))
    for text, one in product(FILTERS, (shelf, gone, nulled)):
        assert 7 not in Scan(one.load, RULES, filter=text).to_arrow().column("id").to_pylist()
        found = [row for row in one.expected() if row["v"] is not None and (row["v"] == 1 or (text == "v < 2" and row["v"] < 2))]
        assert Scan(one.load, RULES, filter=text).count() == len(found)
    assert Scan(nulled.load, RULES, filter="v is null").to_arrow().column("id").to_pylist() == [7]
    assert Scan(gone.load, RULES, filter="v is null").count() == 0, "a tombstone has no values, and is no row"


def test_q06_a_limit_counts_rows_that_are_there(shelf: Shelf) -> None:
    shelf.put([{"id": i, "v": i % 5} for i in range(60)])
    shelf.flush()
    shelf.delete([{"id": i} for i in range(25)])
    shelf.flush()
    shelf.put([{"id": i, "v": 9} for i in range(25, 35)])
    expected = shelf.expected()
    for limit, text in product(range(0, 45, 3), [None, "v < 3", "abs(v) < 3"]):
        found = [row for row in expected if text is None or row["v"] < 3]
        rows = Scan(shelf.load, RULES, filter=text, limit=limit).to_arrow().to_pylist()
        assert len(rows) == min(limit, len(found))
        assert all(row in found for row in rows)
        assert sum(batch.num_rows for batch in Scan(shelf.load, RULES, filter=text, limit=limit).to_batches()) == len(rows)


def test_q09_keys_whose_hashes_collide_are_all_there(tmp_path: Path) -> None:
    modulus = (1 << 61) - 1
    numbers = [-1, -2, 0, modulus, 1, 1 + modulus, -(1 << 63), (1 << 63) - 1]
    assert hash(-1) == hash(-2)
    assert hash(1) == hash(1 + modulus)
    shelf = Shelf(RULES, on_disk(tmp_path))
    for id in numbers:
        shelf.put([{"id": id, "v": 0}])
        shelf.flush()
        shelf.put([{"id": id, "v": 1}])
    assert by_key(Scan(shelf.load, RULES).to_arrow().to_pylist(), RULES) == [{"id": id, "v": 1} for id in sorted(numbers)]
    assert lookup(shelf.load, RULES, numbers).column("id").to_pylist() == numbers


@pytest.mark.parametrize(
    "keys",
    [
        [("a", "bc"), ("ab", "c"), ("abc", ""), ("", "abc")],
        [("a\0", "b"), ("a", "\0b"), ("a\0\0", ""), ("a", ""), ("a\0\xff", "")],
    ],
)
def test_q09_composite_keys_that_read_alike_when_joined_are_told_apart_in_every_tier(keys: list[tuple[str, str]]) -> None:
    schema = pa.schema([pa.field("a", pa.string(), False), pa.field("b", pa.string(), False), pa.field("v", pa.int64())])
    rules = RowRules(schema, ("a", "b"))
    shelf = Shelf(rules)
    for number, (a, b) in enumerate(keys):
        shelf.put([{"a": a, "b": b, "v": number}])
        shelf.flush() if number % 2 else shelf.freeze()
    shelf.delete([{"a": keys[0][0], "b": keys[0][1]}])
    assert lookup(shelf.load, rules, keys).column("v").to_pylist() == list(range(1, len(keys)))
    assert sorted(Scan(shelf.load, rules).to_arrow().column("v").to_pylist()) == list(range(1, len(keys)))


@pytest.mark.parametrize("kind", sorted(TYPES))
def test_q11_every_type_is_the_same_in_the_log_in_memory_and_in_runs(kind: str, tmp_path: Path) -> None:
    type, values = TYPES[kind]
    schema, _ = check_schema(pa.schema([pa.field("id", pa.int64(), False), pa.field("x", type)]), "id")
    rules = RowRules(schema, ("id",))
    rows = rules.upsert(pa.table([pa.array([0, 1, 2]), pa.array([*values, None], schema.field("x").type)], schema=schema))
    header = Header("w", "0000", 1, 0, "data", "e", "me", -1, 0.0)
    replayed = decode_entry(encode_entry(header, rules.log_schema, [Put(rows)]), "key", "w", "0000", 1, 0).puts[0]
    shelf = Shelf(rules, on_disk(tmp_path))
    shelf._take(Put(rows), False)
    for step in ("memory", "frozen", "run", "below a tombstone"):
        if step == "frozen":
            shelf.freeze()
        elif step == "run":
            shelf.flush()
        elif step == "below a tombstone":
            shelf.delete([{"id": 7}])
            shelf.flush()
        table = Scan(shelf.load, rules).to_arrow()
        assert table.schema.equals(schema)
        assert table.column("x").to_pylist() == [*values, None]
        assert lookup(shelf.load, rules, [2, 1]).column("x").to_pylist() == [None, values[1]]
    assert replayed.rows.column("x").to_pylist() == [*values, None]


# -- Q14


class Collected:
    """A table whose runs are rewritten, and the old ones collected, at a chosen moment of a scan."""

    def __init__(self, folder: Path) -> None:
        self.shelf = Shelf(RULES, on_disk(folder))
        self.loads = 0
        for start in (0, 50_000):
            self.shelf.put([{"id": i, "v": 1} for i in range(start, start + 50_000)])
            self.shelf.flush()
        self.rows = len(self.shelf.expected())

    def load(self) -> list[ReadView]:
        self.loads += 1
        return self.shelf.load()

    def compact(self) -> None:
        """All runs become one, and are deleted."""
        rows = Scan(self.shelf.load, RULES).to_arrow()
        old, self.shelf.runs = self.shelf.runs, []
        self.shelf.runs.append(self.shelf.run_of([Put(RULES.upsert(rows.combine_chunks().to_batches()[0]))]))
        self.shelf.version += 1
        for run in old:
            self.shelf.columnar.drop(run.slices[0].path)
        lance_columnar._READERS._free.clear()  # what is open on a disk can be read on


def test_q14_a_scan_that_loses_an_object_after_its_first_row_says_so_and_gives_no_mix(tmp_path: Path) -> None:
    table = Collected(tmp_path)
    batches = Scan(table.load, RULES).to_batches()
    first = next(batches)
    table.compact()
    seen = [first]
    with pytest.raises(SnapshotExpiredError) as caught:
        seen.extend(batches)
    assert caught.value.retryable
    assert sum(batch.num_rows for batch in seen) < table.rows
    assert table.loads == 1
    assert Scan(table.load, RULES).to_arrow().num_rows == table.rows


@pytest.mark.parametrize(
    "read",
    [
        lambda load: sum(batch.num_rows for batch in Scan(load, RULES).to_batches()),
        lambda load: Scan(load, RULES).to_arrow().num_rows,
        lambda load: Scan(load, RULES, filter="v = 1").count(),
        lambda load: Scan(load, RULES).count(),
        lambda load: lookup(load, RULES, list(range(100_000))).num_rows,
        lambda load: pa.table(Scan(load, RULES)).num_rows,
    ],
)
def test_q14_an_object_lost_before_the_first_row_begins_the_read_again(read: Callable[..., int], tmp_path: Path) -> None:
    table = Collected(tmp_path)

    def load() -> list[ReadView]:
        views = table.load()
        if table.loads == 1:
            table.compact()
        return views

    assert read(load) == table.rows
    assert table.loads <= 2  # the compaction reads once too


def test_q14_a_scan_to_the_end_begins_again_whenever_it_loses_an_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = Collected(tmp_path)
    original = scan_module.visible_rows
    calls = 0

    def interrupted(*args: Any) -> Iterator[pa.RecordBatch]:
        nonlocal calls
        calls += 1
        yield from original(*args)
        if calls == 1:  # after the first run was read, before the second
            table.compact()

    monkeypatch.setattr(scan_module, "visible_rows", interrupted)
    assert Scan(table.load, RULES).to_arrow().num_rows == table.rows
    assert table.loads == 2


def test_q14_a_run_that_is_named_and_gone_is_loss_and_is_told_as_loss(tmp_path: Path) -> None:
    table = Collected(tmp_path)
    lost = table.shelf.runs[0].slices[0].path
    table.shelf.columnar.drop(lost)
    for read in (
        lambda: list(Scan(table.load, RULES).to_batches()),
        lambda: Scan(table.load, RULES).to_arrow(),
        lambda: lookup(table.load, RULES, [1]),
    ):
        with pytest.raises(DataLossError) as caught:
            read()
        assert caught.value.object == lost


def test_q14_runs_that_are_collected_again_and_again_end_the_read_in_bounded_time() -> None:
    loads = 0

    def load() -> list[ReadView]:
        nonlocal loads
        loads += 1
        shelf = Shelf(RULES)
        shelf.version = loads
        shelf.put([{"id": 1, "v": 1}])
        shelf.flush()
        view = shelf.view()
        shelf.columnar.drop(shelf.runs[0].slices[0].path)
        return [view]

    with pytest.raises(SnapshotExpiredError):
        Scan(load, RULES).to_arrow()
    with pytest.raises(SnapshotExpiredError):
        list(Scan(load, RULES).to_batches())
    assert loads < 30
    with pytest.raises(ObjectMissingError):
        list(scan_range(load()[0]))
