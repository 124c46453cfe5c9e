"""Ranges of keys: each read by itself, together the whole table."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.reading import Shelf, by_key
from tests.unit.test_query_scan import KEYS, STEPS, play_writes, rules_of

import headgate.query.ranges as ranges
import headgate.query.run_index as run_index
from headgate.errors import InvalidInputError
from headgate.query.ranges import cut_ranges, scan_range, split_points
from headgate.schema import RowRules


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
