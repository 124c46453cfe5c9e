"""The merged read: scans, counts and lookups against a plain dict."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.reading import Shelf, by_key, on_disk

import headgate.query.run_index as run_index
import headgate.query.shadow as shadow
from headgate.errors import InvalidInputError, SnapshotExpiredError
from headgate.query.lookup import lookup
from headgate.query.scan import Scan
from headgate.run import DELETED
from headgate.schema import RowRules
from headgate.wal.entry import Put

KEYS: dict[str, tuple[list[pa.Field], st.SearchStrategy[tuple[Any, ...]]]] = {
    "int": ([pa.field("id", pa.int64(), False)], st.tuples(st.integers(-5, 15))),
    "sparse int": ([pa.field("id", pa.int64(), False)], st.tuples(st.integers(-5, 15).map(lambda i: i * (1 << 58)))),
    "string": ([pa.field("id", pa.string(), False)], st.tuples(st.text("aé\0", max_size=3))),
    "composite": (
        [pa.field("a", pa.string(), False), pa.field("b", pa.int32(), False)],
        st.tuples(st.sampled_from(["", "a", "a\0", "b"]), st.integers(-2, 2)),
    ),
    "numbers": (
        [pa.field("a", pa.int64(), False), pa.field("b", pa.int32(), False)],
        st.tuples(st.sampled_from([-1, 0, 1, 1 << 40]), st.integers(-2, 2)),
    ),
    "decimal": ([pa.field("id", pa.decimal128(12, 2), False)], st.tuples(st.integers(-5, 9).map(lambda i: Decimal(i * 25).scaleb(-2)))),
}
FILTERS = ["v > 3", "v is null", "v is null or name = 'x'", "name like 'x%'", "abs(v) < 4 and name <> 'y'", "not (v = 2)"]


def rules_of(kind: str) -> RowRules:
    fields = KEYS[kind][0]
    return RowRules(pa.schema([*fields, pa.field("v", pa.int64()), pa.field("name", pa.string())]), tuple(f.name for f in fields))


def matches(text: str, row: dict[str, Any]) -> bool:
    v, name = row["v"], row["name"]
    return bool(
        {
            "v > 3": lambda: v is not None and v > 3,
            "v is null": lambda: v is None,
            "v is null or name = 'x'": lambda: v is None or name == "x",
            "name like 'x%'": lambda: name is not None and name.startswith("x"),
            "abs(v) < 4 and name <> 'y'": lambda: v is not None and abs(v) < 4 and name is not None and name != "y",
            "not (v = 2)": lambda: v is not None and v != 2,
        }[text]()
    )


STEPS = st.lists(st.sampled_from(["put", "put", "put", "delete", "freeze", "flush", "flush 2", "read"]), min_size=3, max_size=14)


def play(shelf: Shelf, kind: str, steps: list[str], data: st.DataObject) -> None:
    play_writes(shelf, kind, steps, data, reads=True)
    check_all(shelf, data)


def play_writes(shelf: Shelf, kind: str, steps: list[str], data: st.DataObject, *, reads: bool = False) -> None:
    names = [f.name for f in KEYS[kind][0]]
    some = st.lists(KEYS[kind][1], min_size=1, max_size=6)
    values = st.tuples(st.none() | st.integers(-6, 6), st.none() | st.sampled_from(["x", "y", "xy"]))
    for step in steps:
        if step == "put":
            rows = [dict(zip(names, key, strict=True)) for key in data.draw(some)]
            shelf.put([row | dict(zip(("v", "name"), data.draw(values), strict=True)) for row in rows])
        elif step == "delete":
            shelf.delete([dict(zip(names, key, strict=True)) for key in data.draw(some)])
        elif step == "freeze":
            shelf.freeze()
        elif step.startswith("flush"):
            shelf.flush(slices=2 if step == "flush 2" else 1)
        elif reads:
            check_all(shelf, data)
    if data.draw(st.booleans()):
        keys = [dict(zip(names, key, strict=True)) for key in data.draw(some)]
        shelf.put([key | {"v": 5, "name": "pending"} for key in keys], pending=True)
        shelf.delete(keys[:1], pending=True)


def check_all(shelf: Shelf, data: st.DataObject) -> None:
    rules = shelf.rules
    expected = by_key(shelf.expected(), rules)
    assert by_key(Scan(shelf.load, rules).to_arrow().to_pylist(), rules) == expected
    assert Scan(shelf.load, rules).count() == len(expected)

    text = data.draw(st.sampled_from(FILTERS))
    found = [row for row in expected if matches(text, row)]
    columns = data.draw(st.permutations(rules.schema.names))[: data.draw(st.integers(0, len(rules.schema)))]
    got = Scan(shelf.load, rules, columns=columns, filter=text)
    assert got.count() == len(found)
    table = got.to_arrow()
    assert table.schema.names == columns
    assert sorted(map(repr, table.to_pylist())) == sorted(repr({name: row[name] for name in columns}) for row in found) or not columns

    limit = data.draw(st.integers(0, 8))
    cut = Scan(shelf.load, rules, filter=text, limit=limit)
    rows = cut.to_arrow().to_pylist()
    assert len(rows) == min(limit, len(found)) == cut.count()
    assert all(row in found for row in rows)
    assert len({repr([row[name] for name in rules.key]) for row in rows}) == len(rows)

    asked = [*shelf.model, *data.draw(st.lists(KEYS[kind_of(rules)][1], max_size=3))]
    asked = data.draw(st.permutations(asked))[:10] * 2
    given_keys = asked if len(rules.key) > 1 else [key[0] for key in asked]
    want = [row for key in dict.fromkeys(asked) if (row := shelf.model.get(key)) is not None]
    assert lookup(shelf.load, rules, given_keys).to_pylist() == want


def kind_of(rules: RowRules) -> str:
    key_types = [rules.schema.field(name).type for name in rules.key]
    return next(kind for kind, (fields, _) in KEYS.items() if [f.type for f in fields] == key_types)


@pytest.mark.parametrize("kind", sorted(KEYS))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), STEPS)
def test_every_form_of_read_equals_a_dict_whatever_tiers_the_rows_are_in(kind: str, data: st.DataObject, steps: list[str]) -> None:
    play(Shelf(rules_of(kind)), kind, steps, data)


@pytest.mark.parametrize("kind", sorted(KEYS))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), STEPS)
def test_the_same_when_no_keys_are_kept_and_blocks_are_small(kind: str, data: st.DataObject, steps: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in [
            (shadow, "_RANGE_ROWS", 5), (run_index, "BLOCK_ROWS", 2), (run_index, "_FEW_READS", 2), (run_index, "_PROBES", 3),
        ]:  # fmt: skip
            patch.setattr(module, name, value)
        patch.setattr("headgate.query.scan.KEY_BUDGET_BYTES", 0)
        patch.setattr("headgate.query.lookup.KEY_BUDGET_BYTES", 0)
        play(Shelf(rules_of(kind)), kind, steps, data)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(st.data(), STEPS, st.sampled_from(sorted(KEYS)))
def test_the_same_with_lance_on_a_disk(tmp_path_factory: Any, data: st.DataObject, steps: list[str], kind: str) -> None:
    folder: Path = tmp_path_factory.mktemp("a table, 100% ü")
    play(Shelf(rules_of(kind), on_disk(folder)), kind, steps, data)


PLAIN = RowRules(pa.schema([pa.field("id", pa.int64(), False), pa.field("v", pa.int64()), pa.field("name", pa.string())]), ("id",))


def some_rows(columnar: Any = None) -> Shelf:
    shelf = Shelf(PLAIN, columnar)
    shelf.put([{"id": i, "v": i, "name": f"n{i}"} for i in range(10)])
    shelf.flush()
    shelf.put([{"id": 3, "v": 33, "name": "new"}])
    shelf.delete([{"id": 4}])
    return shelf


def test_results_are_arrow_pandas_and_polars_with_the_tables_own_schema() -> None:
    scan = Scan(some_rows().load, PLAIN, columns=["name", "id"])
    assert scan.to_arrow().schema.equals(pa.schema([pa.field("name", pa.string()), pa.field("id", pa.int64(), False)]))
    assert all(batch.schema.equals(scan.schema) for batch in scan.to_batches())
    assert pa.table(scan).schema.equals(scan.schema)
    assert pa.table(scan).num_rows == scan.count() == 9
    assert sorted(scan.to_pandas()["id"]) == sorted(scan.to_polars()["id"]) == [0, 1, 2, 3, 5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    "options",
    [
        {"columns": ["nope"]}, {"columns": "id"}, {"columns": ["id", "id"]}, {"filter": "nope = 1"}, {"filter": ""}, {"filter": "v +"},
        {"limit": -1}, {"limit": 1.5}, {"limit": True}, {"limit": "3"},
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_with_a_hint_before_anything_is_loaded(options: dict[str, Any]) -> None:
    def load() -> list[Any]:
        raise AssertionError("nothing is to be read")

    with pytest.raises(InvalidInputError) as caught:
        Scan(load, PLAIN, **options)
    assert caught.value.hint


@pytest.mark.parametrize("keys", [5, "5", {"id": 1}, [None], ["x"], [(1, 2)], [1.5], pa.table({"other": [1]}), [2**70]])
def test_keys_that_are_none_are_refused(keys: Any) -> None:
    with pytest.raises(InvalidInputError) as caught:
        lookup(some_rows().load, PLAIN, keys)
    assert caught.value.hint


def test_keys_may_come_in_any_form_that_holds_them() -> None:
    shelf = some_rows()
    want = [{"id": 7, "v": 7}, {"id": 3, "v": 33}]
    forms: list[Any] = [
        [7, 3], (7, 3, 7), np.array([7, 3]), pa.array([7, 3], pa.int32()), pa.chunked_array([[7], [3]]),
        pa.table({"id": [7, 3], "x": [0, 0]}),
        pa.record_batch({"id": [7, 3]}), [(7,), (3,)], [{"id": 7}, {"id": 3}], iter([7, 3]), range(7, 2, -4),
    ]  # fmt: skip
    for keys in forms:
        assert lookup(shelf.load, PLAIN, keys, columns=["id", "v"]).to_pylist() == want
    assert lookup(shelf.load, PLAIN, []).schema.equals(PLAIN.schema)
    assert lookup(shelf.load, PLAIN, [4, 100]).num_rows == 0
    assert lookup(shelf.load, PLAIN, [5], columns=["id"]).to_pylist() == [{"id": 5}]
    with pytest.raises(InvalidInputError):
        lookup(shelf.load, RowRules(PLAIN.schema, ()), [1])


def test_tables_without_a_key_keep_every_row_in_the_order_it_came(tmp_path: Path) -> None:
    rules = RowRules(PLAIN.schema, ())
    shelf = Shelf(rules, on_disk(tmp_path))
    for number in range(6):
        shelf.put([{"id": 1, "v": number, "name": None}, {"id": 1, "v": number, "name": "x"}])
        shelf.flush() if number % 2 else shelf.freeze()
    assert Scan(shelf.load, rules).to_arrow().column("v").to_pylist() == [n for n in range(6) for _ in "ab"]
    assert Scan(shelf.load, rules).count() == 12
    assert Scan(shelf.load, rules, filter="name = 'x' and v > 1", limit=3).to_arrow().column("v").to_pylist() == [2, 3, 4]


def test_a_limit_reads_no_more_than_it_needs() -> None:
    shelf = some_rows()
    for _ in range(3):
        shelf.flush()
        shelf.put([{"id": 1, "v": 1, "name": "x"}])
    shelf.flush()
    view = shelf.view()
    Scan(lambda: [view], PLAIN).count()  # what is hidden is known
    read: list[str] = []
    for run in view.runs:
        for part in run.slices:
            original = part.scan
            part.scan = lambda *args, original=original, id=run.record.id, **kw: read.append(id) or original(*args, **kw)  # type: ignore
    assert Scan(lambda: [view], PLAIN, limit=2).to_arrow().num_rows == 2
    assert set(read) == {view.runs[0].record.id}


def test_old_runs_and_puts_are_read_as_the_table_of_now(tmp_path: Path) -> None:
    then = RowRules(pa.schema([pa.field("id", pa.int32(), False), ("a", pa.int64()), ("b", pa.string())]), ("id",), (1, 2, 3))
    now = RowRules(pa.schema([pa.field("key", pa.int64(), False), ("b", pa.int64()), ("c", pa.string())]), ("key",), (1, 2, 4))
    shelf = Shelf(then, on_disk(tmp_path))
    shelf.put([{"id": i, "a": i * 10, "b": "old"} for i in range(4)])
    shelf.flush()
    shelf.put([{"id": 3, "a": 33, "b": "old"}])
    Scan(shelf.load, then).to_arrow()  # what was learnt under the old schema is not taken for the new one
    shelf.freeze()
    shelf.rules = now
    shelf.put([{"key": 0, "b": -1, "c": "new"}, {"key": 2**40, "b": 5, "c": "new"}])
    shelf.delete([{"key": 1}])
    rows = [
        {"key": 0, "b": -1, "c": "new"}, {"key": 2, "b": 20, "c": None}, {"key": 3, "b": 33, "c": None}, {"key": 2**40, "b": 5, "c": "new"},
    ]  # fmt: skip
    for _ in range(2):
        assert by_key(Scan(shelf.load, now).to_arrow().to_pylist(), now) == rows
        assert by_key(Scan(shelf.load, now, filter="b > 10").to_arrow().to_pylist(), now) == rows[1:3]
        assert by_key(Scan(shelf.load, now, filter="c is null", columns=["key"]).to_arrow().to_pylist(), now) == [{"key": 2}, {"key": 3}]
        assert lookup(shelf.load, now, [3, 2, 1]).to_pylist() == [rows[2], rows[1]]
        shelf.flush()
        shelf.flush()
    with pytest.raises(SnapshotExpiredError):  # one who still has the old schema cannot hold the new keys
        Scan(shelf.load, then, columns=["a"]).to_arrow()


def test_what_was_learnt_of_a_memtable_is_added_to_and_never_shown_to_an_older_view() -> None:
    shelf = Shelf(PLAIN)
    shelf.put([{"id": i, "v": 0, "name": None} for i in range(20)])
    shelf.flush()
    views, expected = [], []
    for number in range(40):
        shelf.put([{"id": number % 25, "v": number, "name": None}])
        if number % 7 == 0:
            shelf.delete([{"id": number % 3}])
        views.append(shelf.view())
        expected.append(by_key(shelf.expected(), PLAIN))
        assert by_key(Scan(lambda: [views[-1]], PLAIN).to_arrow().to_pylist(), PLAIN) == expected[-1]
    for view, rows in zip(reversed(views), reversed(expected), strict=True):
        assert by_key(Scan(lambda view=view: [view], PLAIN).to_arrow().to_pylist(), PLAIN) == rows
        assert Scan(lambda view=view: [view], PLAIN).count() == len(rows)


def test_masks_of_runs_are_kept_and_only_added_to_when_a_run_comes_on_top(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Shelf(PLAIN)
    anew, original = [], shadow._anew
    monkeypatch.setattr(shadow, "_anew", lambda known, budget: anew.append(1) or original(known, budget))
    for number in range(6):
        shelf.put([{"id": i, "v": number, "name": None} for i in range(number, 20, 2)])
        shelf.delete([{"id": number}])
        shelf.flush()
        for _ in range(2):
            assert by_key(Scan(shelf.load, PLAIN).to_arrow().to_pylist(), PLAIN) == by_key(shelf.expected(), PLAIN)
    assert len(anew) == 1
    first, second, *rest = shelf.runs  # a compaction: two adjacent runs become one
    puts = [
        Put(PLAIN.upsert(batch.select(PLAIN.schema.names))) for run in (first, second) for batch in batches_of(shelf, run, deleted=False)
    ]
    gone = [Put(PLAIN.delete(batch.select(["id"])), "delete") for run in (first, second) for batch in batches_of(shelf, run, deleted=True)]
    shelf.runs = [shelf.run_of([puts[0], gone[0], puts[1], gone[1]]), *rest]
    assert by_key(Scan(shelf.load, PLAIN).to_arrow().to_pylist(), PLAIN) == by_key(shelf.expected(), PLAIN)
    assert len(anew) == 2


def batches_of(shelf: Shelf, record: Any, *, deleted: bool) -> list[pa.RecordBatch]:
    [run] = [run for run in shelf.cache.open(tuple(shelf.runs)) if run.record == record]
    return [batch.filter(batch.column(DELETED) if deleted else pc.invert(batch.column(DELETED))) for batch in run.scan(run.schema.names)]


def test_several_shards_are_one_table() -> None:
    one, two = some_rows(), Shelf(PLAIN)
    two.put([{"id": 100 + i, "v": i, "name": "two"} for i in range(5)])
    two.flush()
    two.delete([{"id": 101}])

    def load() -> list[Any]:
        return [*one.load(), *two.load()]

    assert Scan(load, PLAIN).count() == 13
    assert lookup(load, PLAIN, [104, 3, 101, 0]).column("v").to_pylist() == [4, 33, 0]
    assert Scan(load, PLAIN, filter="name = 'two'", limit=3).count() == 3


def test_many_readers_at_once_share_what_is_known_and_all_read_right(tmp_path: Path) -> None:
    shelf = some_rows(on_disk(tmp_path))
    for number in range(3):
        shelf.put([{"id": i, "v": number, "name": "x"} for i in range(number, 2000, 3)])
        shelf.flush()
    shelf.put([{"id": 1, "v": -1, "name": "y"}])
    expected = by_key(shelf.expected(), PLAIN)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: by_key(Scan(shelf.load, PLAIN).to_arrow().to_pylist(), PLAIN), range(16)))
    assert all(rows == expected for rows in results)
