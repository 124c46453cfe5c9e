"""Vector search over MemTables and runs: exact, never under-filled, the same in every tier."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.reading import Shelf, on_disk

from headgate.columnar.arrow import ArrowSlice
from headgate.columnar.base import Offsets
from headgate.errors import InvalidInputError
from headgate.indexes import text_index, vector_index
from headgate.query import vector
from headgate.query.distance import METRICS
from headgate.query.vector import metric_of, search
from headgate.schema import RowRules

SCHEMA = pa.schema([pa.field("id", pa.int64(), False), ("e", pa.list_(pa.float32(), 2)), ("v", pa.int64())])
RULES = RowRules(SCHEMA, ("id",))


def row(id: int, e: Sequence[float] | None, v: int = 0) -> dict[str, Any]:
    return {"id": id, "e": None if e is None else list(e), "v": v}


def ids(found: pa.Table) -> list[Any]:
    return found.column("id").to_pylist()  # type: ignore[no-any-return]


def expected(rows: list[dict[str, Any]], query: Sequence[float], metric: str) -> list[tuple[float, Any]]:
    """Distance and key of all rows that have one, nearest first."""
    found = []
    q = np.asarray(query, np.float32)
    for each in rows:
        if each["e"] is None or None in each["e"]:
            continue
        x = np.asarray(each["e"], np.float32)
        if metric == "l2":
            d = ((x - q) ** 2).sum()
        elif metric == "dot":
            d = 1 - x @ q
        else:
            d = 1 - x @ q / (np.sqrt(x @ x) * np.sqrt(q @ q)) if x.any() else np.float32(np.nan)
        if not np.isnan(d):
            found.append((float(d), each["id"]))
    return sorted(found)


STEPS = st.lists(st.sampled_from(["put", "put", "put", "delete", "freeze", "flush", "flush 2", "search"]), min_size=3, max_size=12)
VECTORS = st.none() | st.tuples(st.integers(-3, 3), st.integers(-3, 3))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(STEPS, st.sampled_from(METRICS), st.data())
def test_a_search_finds_what_a_plain_sort_of_the_live_rows_finds(steps: list[str], metric: str, data: st.DataObject) -> None:
    shelf = Shelf(RULES)
    for step in [*steps, "search"]:
        keys = data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=4))
        if step == "put":
            shelf.put([row(key, data.draw(VECTORS), data.draw(st.integers(0, 3))) for key in keys])
        elif step == "delete":
            shelf.delete([{"id": key} for key in keys])
        elif step == "freeze":
            shelf.freeze()
        elif step.startswith("flush"):
            shelf.flush(slices=2 if step.endswith("2") else 1)
        else:
            k, query = data.draw(st.integers(1, 6)), data.draw(st.tuples(st.integers(1, 3), st.integers(-3, 3)))
            filter = data.draw(st.sampled_from([None, None, None, "v > 1", "id < 6 and v <> 2", "abs(v) = 0"]))
            kept = {None: lambda r: True, "v > 1": lambda r: r["v"] > 1, "abs(v) = 0": lambda r: r["v"] == 0}.get(
                filter, lambda r: r["id"] < 6 and r["v"] != 2
            )
            wanted = expected([r for r in shelf.expected() if kept(r)], query, metric)[:k]
            found = search(shelf.load, RULES, "e", query, k, metric=metric, filter=filter)
            assert found.column("_distance").to_pylist() == pytest.approx([d for d, _ in wanted], abs=1e-5)
            if metric == "l2":  # whole numbers: ties are exact
                assert ids(found) == [key for _, key in wanted]


@pytest.mark.parametrize("disk", [False, True], ids=["memory", "lance"])
def test_moving_rows_from_the_memtable_into_runs_changes_nothing(disk: bool, tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    shelf = Shelf(RULES, on_disk(tmp_path) if disk else None)
    rows = [row(id, random.standard_normal(2), id % 7) for id in range(400)]
    queries = [random.standard_normal(2) for _ in range(4)]

    def results() -> list[pa.Table]:
        found = [search(shelf.load, RULES, "e", query, 10, metric=metric) for query in queries for metric in METRICS]
        return [*found, search(shelf.load, RULES, "e", queries[0], 10, filter="v = 3")]

    for at in range(0, 400, 100):
        shelf.put(rows[at : at + 70])
        shelf.put(rows[at + 70 : at + 100])
        shelf.freeze()
    before = results()
    for _ in range(4):
        shelf.flush(slices=2)
        assert all(one.equals(other) for one, other in zip(before, results(), strict=True)), "equal to the last bit"
    assert len(before[0]) == 10


def test_all_columns_come_back_by_default_and_the_distance_is_last() -> None:
    shelf = Shelf(RULES)
    shelf.put([row(1, (0, 1), 5), row(2, (0, 3), 6)])
    found = search(shelf.load, RULES, "e", [0, 0], 5)
    assert found.schema.names == ["id", "e", "v", "_distance"]
    assert found.schema.field("_distance").type == pa.float32()
    assert found.to_pylist() == [{**row(1, (0, 1), 5), "_distance": 1.0}, {**row(2, (0, 3), 6), "_distance": 9.0}]
    assert search(shelf.load, RULES, "e", [0, 0], 1, columns=["v"]).to_pylist() == [{"v": 5, "_distance": 1.0}]
    assert search(shelf.load, RULES, "e", [0, 0], 1, columns=["_distance", "v"]).to_pylist() == [{"v": 5, "_distance": 1.0}]
    assert search(shelf.load, RULES, "e", [0, 0], 2, columns=[]).to_pylist() == [{"_distance": 1.0}, {"_distance": 9.0}]


def test_a_columns_metric_is_its_indexs() -> None:
    assert metric_of([text_index("e"), vector_index("f"), vector_index("e", metric="cosine")], "e") == "cosine"
    assert metric_of([vector_index("f", metric="dot")], "e") == "l2"


def test_nothing_to_find_is_an_empty_table_with_all_its_columns() -> None:
    shelf = Shelf(RULES)
    for _ in range(2):
        found = search(shelf.load, RULES, "e", [0, 0], 5)
        assert found.num_rows == 0
        assert found.schema.names == ["id", "e", "v", "_distance"]
        shelf.put([row(1, None)])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"k": 0}, "k is 0"),
        ({"k": True}, "k is True"),
        ({"k": 1.5}, "k is 1.5"),
        ({"columns": ["x"]}, "no column 'x'"),
        ({"columns": "v"}, "columns are"),
        ({"filter": "nope > 1"}, "filter"),
        ({"filter": ""}, "filter"),
        ({"metric": "l1"}, "metric"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_anything_is_read(options: dict[str, Any], told: str) -> None:
    def load() -> Any:
        raise AssertionError("read")

    with pytest.raises(InvalidInputError, match=told) as caught:
        search(load, RULES, "e", [0, 0], **options)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        (pa.string(), ["b", "a", "é", ""]),
        (pa.decimal128(9, 2), [Decimal("2.5"), Decimal("-1"), Decimal("10")]),
        (pa.bool_(), [True, False]),
        (pa.binary(), [b"\xff", b"\x00", b""]),
    ],
    ids=str,
)
def test_ties_are_broken_by_key_whatever_its_type_and_tier(kind: pa.DataType, keys: list[Any]) -> None:
    rules = RowRules(pa.schema([pa.field("id", kind, False), ("e", pa.list_(pa.float32(), 2)), ("v", pa.int64())]), ("id",))
    shelf = Shelf(rules)
    for key in keys:
        shelf.put([{"id": key, "e": [1, 1], "v": 0}])
        if key == keys[0]:
            shelf.flush()
    for k in range(1, len(keys) + 1):
        assert ids(search(shelf.load, rules, "e", [0, 0], k)) == sorted(keys)[:k]


def test_composite_keys_break_ties_column_by_column_over_all_shards() -> None:
    rules = RowRules(
        pa.schema([pa.field("a", pa.string(), False), pa.field("b", pa.int32(), False), ("e", pa.list_(pa.float32(), 2))]), ("a", "b")
    )
    one, two = Shelf(rules), Shelf(rules)
    one.put([{"a": "x", "b": 2, "e": [1, 1]}, {"a": "w", "b": 9, "e": [1, 1]}])
    two.put([{"a": "x", "b": -1, "e": [1, 1]}, {"a": "y", "b": 0, "e": [1, 0]}])
    two.flush()
    found = search(lambda: [*one.load(), *two.load()], rules, "e", [0, 0], 3)
    assert [(r["a"], r["b"]) for r in found.to_pylist()] == [("y", 0), ("w", 9), ("x", -1)]


def test_without_a_key_every_row_counts_and_ties_come_in_the_order_of_arrival() -> None:
    rules = RowRules(SCHEMA, ())
    shelf = Shelf(rules)
    for v in range(6):
        shelf.put([row(1, (1, 1), v)])
        if v % 2:
            shelf.flush()
    assert search(shelf.load, rules, "e", [0, 0], 4).column("v").to_pylist() == [0, 1, 2, 3]


def test_pending_rows_are_found_and_hide_what_is_older() -> None:
    shelf = Shelf(RULES)
    shelf.put([row(1, (0, 0)), row(2, (5, 5))])
    shelf.flush()
    shelf.put([row(1, (9, 9))], pending=True)
    shelf.delete([{"id": 2}], pending=True)
    assert ids(search(shelf.load, RULES, "e", [0, 0], 5)) == [1]


def test_a_column_that_was_renamed_added_or_widened_is_searched_as_it_is_now() -> None:
    shelf = Shelf(RULES)
    shelf.put([row(1, (1, 0)), row(2, (2, 0))])
    shelf.flush()
    shelf.put([row(3, (3, 0))])
    now = RowRules(
        pa.schema([pa.field("id", pa.int64(), False), ("vec", pa.list_(pa.float64(), 2)), ("e", pa.list_(pa.float32(), 2))]),
        ("id",),
        (1, 2, 4),
    )
    shelf.rules = now
    shelf.put([{"id": 4, "vec": [0.5, 0], "e": [7, 7]}])
    assert ids(search(shelf.load, now, "vec", [0, 0], 9)) == [4, 1, 2, 3]
    assert ids(search(shelf.load, now, "e", [0, 0], 9)) == [4], "the older rows' vectors are not those of this column"


def test_a_filter_that_leaves_few_rows_still_fills_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector, "_BATCH_BYTES", 1)
    shelf = Shelf(RULES)
    shelf.put([row(id, (id, 0), id) for id in range(3000)])
    shelf.flush(slices=3)
    assert ids(search(shelf.load, RULES, "e", [0, 0], 4, filter="v % 700 = 1")) == [1, 701, 1401, 2101]
    assert ids(search(shelf.load, RULES, "e", [0, 0], 2, filter="v % 2 = 1")) == [1, 3]


class IndexedSlice(ArrowSlice):
    """A slice that says it has an index, which is right about what is near and wrong about how near."""

    def __init__(self, table: pa.Table, gives_at_most: int | None = None) -> None:
        super().__init__(table)
        self.asked: list[int] = []
        self.scans = 0
        self._most = gives_at_most

    def nearest(
        self, column: str, query: Any, k: int, metric: str, columns: Sequence[str], *, nprobes: int | None = None
    ) -> tuple[Offsets, npt.NDArray[np.float32]]:
        self.asked.append(k)
        vectors = np.stack(self._table.column(column).to_numpy(zero_copy_only=False))
        offsets = np.argsort(((vectors - query) ** 2).sum(axis=1), kind="stable")[: min(k, self._most or k)]
        return offsets, np.zeros(len(offsets), np.float32)

    def scan(self, columns: Sequence[str], **options: Any) -> Any:
        self.scans += "e" in columns
        return super().scan(columns, **options)


def indexed(shelf: Shelf, **options: Any) -> list[IndexedSlice]:
    """Flush, and give the run's slices an index."""
    shelf.flush(slices=2)
    run = shelf.view().runs[-1]
    run.__dict__["slices"] = [IndexedSlice(part._table, **options) for part in run.slices]  # type: ignore[attr-defined]
    return run.slices  # type: ignore[return-value]


@pytest.fixture
def far() -> Shelf:
    """Two thousand rows, the nearest first."""
    shelf = Shelf(RULES)
    shelf.put([row(id, (id, 0), id) for id in range(2000)])
    return shelf


def test_an_index_is_asked_and_its_distances_are_made_exact(far: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector, "_FEW_ROWS", 10)
    slices = indexed(far)
    far.put([row(5000, (1.5, 0))])
    found = search(far.load, RULES, "e", [0, 0], 4)
    assert ids(found) == [0, 1, 5000, 2]
    assert found.column("_distance").to_pylist() == [0, 1, 2.25, 4]
    assert [part.asked for part in slices] == [[8], [8]]
    assert not any(part.scans for part in slices)


def test_an_index_is_asked_for_more_until_enough_rows_count(far: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector, "_FEW_ROWS", 10)
    slices = indexed(far)
    far.delete([{"id": id} for id in range(50)])
    assert ids(search(far.load, RULES, "e", [0, 0], 3)) == [50, 51, 52]
    assert slices[0].asked == [6, 12, 24, 48, 96]
    assert not any(part.scans for part in slices)


@pytest.mark.parametrize(("most", "k"), [(20, 2), (None, 20), (5, 20)])
def test_an_index_that_cannot_give_enough_is_left_aside(far: Shelf, monkeypatch: pytest.MonkeyPatch, most: int | None, k: int) -> None:
    monkeypatch.setattr(vector, "_FEW_ROWS", 1)
    slices = indexed(far, gives_at_most=most)
    far.delete([{"id": id} for id in range(2000) if id % 100 != 99])
    assert ids(search(far.load, RULES, "e", [0, 0], k)) == [100 * i + 99 for i in range(k)]
    assert len(slices[0].asked) <= 8


def test_few_rows_that_count_are_looked_at_one_by_one_index_or_not(far: Shelf) -> None:
    slices = indexed(far)
    assert ids(search(far.load, RULES, "e", [0, 0], 2)) == [0, 1]
    assert [part.asked for part in slices] == [[], []]


def test_lances_own_index_gives_candidates(tmp_path: Path) -> None:
    import lance

    rules = RowRules(pa.schema([pa.field("id", pa.int64(), False), ("e", pa.list_(pa.float32(), 8))]), ("id",))
    random = np.random.default_rng(5)
    vectors = random.standard_normal((6000, 8)).astype(np.float32)
    shelf = Shelf(rules, on_disk(tmp_path))
    shelf.put([{"id": id, "e": vectors[id].tolist()} for id in range(6000)])
    shelf.flush()
    exact = search(shelf.load, rules, "e", vectors[17], 10)
    dataset = lance.dataset(str(tmp_path / shelf.runs[0].slices[0].path))
    dataset.create_index("e", "IVF_FLAT", metric="l2", num_partitions=4)
    again = Shelf(rules, shelf.columnar)
    again.runs = shelf.runs
    assert search(again.load, rules, "e", vectors[17], 10).equals(exact)
    nearest = ids(exact)
    again.delete([{"id": id} for id in nearest[:5]])
    again.put([{"id": nearest[5], "e": [9.0] * 8}])
    found = search(again.load, rules, "e", vectors[17], 4)
    assert ids(found) == nearest[6:10]
