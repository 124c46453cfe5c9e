"""Ranges of keys: each read by itself, together the whole table."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.reading import Shelf, by_key
from tests.unit.test_query_scan import KEYS, STEPS, play_writes, rules_of

import headgate.query.ranges as ranges
import headgate.query.run_index as run_index
import headgate.query.shadow as shadow
from headgate.errors import InvalidInputError
from headgate.query.mask import Mask
from headgate.query.ranges import cut_ranges, scan_range, split_points
from headgate.schema import RowRules
from headgate.view import ReadView


def read(shelf: Shelf, points: pa.RecordBatch, **options: Any) -> list[list[dict[str, Any]]]:
    cuts = [None, *(points.slice(i, 1) for i in range(points.num_rows)), None]
    return [[row for batch in scan_range(shelf.view(), None, lo, hi, **options) for row in batch.to_pylist()] for lo, hi in pairwise(cuts)]


@pytest.mark.parametrize("kind", sorted(KEYS))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), STEPS, st.integers(1, 5))
def test_ranges_are_disjoint_and_together_the_whole_table(kind: str, data: st.DataObject, steps: list[str], n: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        small = [(run_index, "BLOCK_ROWS", 2), (run_index, "_PROBES", 3), (run_index, "_PROBES_EACH", 2), (ranges, "_PART_ROWS", 4)]
        few = [(run_index, "_LOADED_ROWS", 0), (ranges, "_HELD_BYTES", 0)] if data.draw(st.booleans()) else []
        for module, name, value in small + few:
            patch.setattr(module, name, value)
        shelf = Shelf(rules_of(kind))
        play_writes(shelf, kind, steps, data)
        points = split_points(shelf.view(), n)
        assert points.num_rows < n
        parts = read(shelf, points)
        rows = [row for part in parts for row in part]
        assert by_key(rows, shelf.rules) == by_key(shelf.expected(), shelf.rules)
        cut = [
            row
            for part in cut_ranges(shelf.view(), n)
            for batch in scan_range(shelf.view(), None, part.low, part.high, bounds=part.bounds)
            for row in batch.to_pylist()
        ]
        assert by_key(cut, shelf.rules) == by_key(shelf.expected(), shelf.rules)
        assert read(shelf, points) == parts, "and again, by what is known of them"
        matching = [row for part in read(shelf, points, filter="v > 2") for row in part]
        assert by_key(matching, shelf.rules) == by_key([r for r in shelf.expected() if r["v"] is not None and r["v"] > 2], shelf.rules)


def test_split_points_cut_about_as_many_rows_each_and_a_range_reads_its_share_only() -> None:
    rules = RowRules(pa.schema([pa.field("id", pa.int64(), False), pa.field("v", pa.int64())]), ("id",))
    shelf = Shelf(rules)
    shelf.put([{"id": i, "v": i} for i in range(20_000)])
    shelf.flush(slices=3)
    shelf.put([{"id": i, "v": -i} for i in range(0, 20_000, 10)])
    shelf.flush()
    points = split_points(shelf.view(), 4)
    parts = read(shelf, points)
    assert [len(part) for part in parts] == pytest.approx([5000] * 4, rel=0.1)

    view = shelf.view()
    seen: list[int] = []
    for run in view.runs:
        for part in run.slices:
            original = part.scan

            def counted(*args: Any, original: Any = original, **kwargs: Any) -> Any:
                for batch in original(*args, **kwargs):
                    seen.append(batch.num_rows)
                    yield batch

            part.scan = counted  # type: ignore[method-assign]
    rows = [row for batch in scan_range(view, ["v"], points.slice(0, 1), points.slice(1, 1)) for row in batch.to_pylist()]
    assert len(rows) == len(parts[1])
    assert sum(seen) < 2 * 5500 + 4 * run_index.BLOCK_ROWS  # keys and values of its share, and what it takes to find it


def counting_columns(view: ReadView, patch: pytest.MonkeyPatch) -> set[str]:
    """The columns that are read of a view's files from now on."""
    seen: set[str] = set()
    for part in (part for run in view.runs for part in run.slices):

        def scan(columns: Any, *args: Any, original: Any = part.scan, **options: Any) -> Any:
            seen.update(columns)
            return original(columns, *args, **options)

        patch.setattr(part, "scan", scan)
    return seen


def test_a_range_that_is_read_again_is_read_without_its_keys_until_the_runs_change(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = RowRules(pa.schema([pa.field("id", pa.int64(), False), pa.field("v", pa.int64())]), ("id",))
    shelf = Shelf(rules)
    shelf.put([{"id": i, "v": i} for i in range(1000)])
    shelf.flush()
    shelf.put([{"id": i, "v": -i} for i in range(0, 1000, 10)])
    shelf.delete([{"id": 5}])
    shelf.flush()

    def values(filter: str | None = None) -> list[int]:
        return sorted(v for batch in scan_range(shelf.view(), ["v"], filter=filter) for v in batch.column(0).to_pylist())

    first = values()
    assert first == sorted(row["v"] for row in shelf.expected())
    seen = counting_columns(shelf.view(), monkeypatch)
    assert values() == first
    assert seen == {"v"}
    assert values("v < 0") == [v for v in first if v < 0]
    next(scan_range(shelf.view(), ["v"], limit=1))

    shelf.put([{"id": 7, "v": 10**6}])
    assert values() == sorted(row["v"] for row in shelf.expected()), "what is in memory hides rows, too"
    shelf.flush()
    assert values() == sorted(row["v"] for row in shelf.expected())


def test_what_is_kept_of_ranges_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = [Mask.of(np.arange(8000) % 2 == 0)]
    monkeypatch.setattr(shadow, "RANGE_BUDGET_BYTES", 5000)
    ranges = shadow.RangeMasks()
    for at in range(10):
        ranges.keep(((at, at + 8000),), tuple(masks))
        ranges.keep(((at, at + 8000),), tuple(masks))
        assert 0 < ranges.kept_bytes <= 5000
        assert ranges.get(((at, at + 8000),)) == tuple(masks)
    assert ranges.get(((0, 8000),)) is None, "the first were forgotten"
    before = ranges.kept_bytes
    ranges.keep(((0, 80_000),), (Mask.of(np.arange(80_000) % 2 == 0),))
    assert ranges.get(((0, 80_000),)) is None, "more than all of it is not kept"
    ranges.keep(((5, 5),), ())
    assert ranges.get(((5, 5),)) is None, "nor what is nothing"
    assert ranges.kept_bytes == before


def test_bounds_are_one_row_of_the_key_and_tables_without_a_key_have_no_ranges() -> None:
    rules = RowRules(pa.schema([pa.field("id", pa.int64(), False), pa.field("v", pa.int64())]), ("id",))
    shelf = Shelf(rules)
    with pytest.raises(InvalidInputError):
        list(scan_range(shelf.view(), None, pa.record_batch({"id": [1, 2]})))
    with pytest.raises(InvalidInputError):
        split_points(shelf.view(), 0)
    with pytest.raises(InvalidInputError):
        split_points(Shelf(RowRules(rules.schema, ())).view(), 2)
    assert list(scan_range(shelf.view())) == []
