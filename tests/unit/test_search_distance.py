"""Distances, and the nearest of many: the numbers are Lance's, and the same in every tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headgate.errors import InvalidInputError
from headgate.query.distance import METRICS, Best, matrix_of, probe

RANDOM = np.random.default_rng(7)


def vectors(rows: Any) -> pa.FixedSizeListArray:
    return pa.array([None if row is None else list(row) for row in rows], pa.list_(pa.float32(), 2))


def schema_of(kind: pa.DataType) -> pa.Schema:
    return pa.schema([("id", pa.int64()), ("e", kind)])


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kind", [pa.float16(), pa.float32(), pa.float64()], ids=str)
def test_distances_are_those_that_lance_reports(tmp_path: Path, metric: str, kind: pa.DataType) -> None:
    import lance

    rows = RANDOM.standard_normal((300, 24)).astype(kind.to_pandas_dtype())
    array = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1), kind), 24)
    query = RANDOM.standard_normal(24).astype(kind.to_pandas_dtype())
    dataset = lance.write_dataset(pa.table({"id": range(300), "e": array}), str(tmp_path / "t.lance"))
    nearest = {"column": "e", "q": query, "k": 20, "metric": metric}
    theirs = dataset.to_table(columns=["id", "_distance"], nearest=nearest)
    sought = probe(schema_of(array.type), "e", query, metric)
    best = Best(20, ordered=True)
    best.add(sought.distances(matrix_of(array)[0]))
    distances, numbers = best.result()
    tolerance = 1e-5 if kind != pa.float16() else 2e-3
    assert distances == pytest.approx(theirs.column("_distance").to_numpy(), rel=tolerance, abs=tolerance)
    if kind != pa.float16():
        assert numbers.tolist() == theirs.column("id").to_pylist()


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("width", [1, 3, 64, 257])
def test_a_rows_distance_does_not_depend_on_the_rows_around_it(metric: str, width: int) -> None:
    rows = RANDOM.standard_normal((5000, width), dtype=np.float32)
    sought = probe(schema_of(pa.list_(pa.float32(), width)), "e", RANDOM.standard_normal(width), metric)
    whole = sought.distances(rows)
    for start, count in [(0, 1), (3, 7), (17, 100), (1234, 3001)]:
        elsewhere = np.empty(count * width + 1, np.float32)[1:].reshape(count, width)  # another alignment
        elsewhere[:] = rows[start : start + count]
        assert np.array_equal(sought.distances(elsewhere), whole[start : start + count])


def test_vectors_are_seen_without_a_copy_whatever_they_were_cut_from() -> None:
    array = vectors([(i, i + 1) for i in range(10)])
    for part, first in [(array, 0), (array.slice(3, 4), 3), (array.slice(3).slice(2, 2), 5)]:
        matrix, valid = matrix_of(part)
        assert valid is None
        assert matrix.tolist() == [[i, i + 1] for i in range(first, first + len(part))]
        assert np.shares_memory(matrix, np.frombuffer(array.values.buffers()[1], np.float32))
    assert matrix_of(vectors([]))[0].shape == (0, 2)


def test_nulls_and_vectors_with_nulls_in_them_are_marked() -> None:
    matrix, valid = matrix_of(vectors([(1, 2), None, (None, 1), (3, 4)]))
    assert valid is not None
    assert valid.tolist() == [True, False, False, True]
    assert matrix.shape == (4, 2)
    assert matrix_of(vectors([None, (1, 2), (None, 3), (4, 5)]).slice(1, 3))[1].tolist() == [True, False, True]  # type: ignore[union-attr]


def test_what_has_no_distance_is_never_among_the_nearest() -> None:
    rows = vectors([(0, 0), (float("nan"), 1), (1, 1), (float("inf"), 0)])
    best = Best(4, ordered=True)
    best.add(probe(schema_of(rows.type), "e", [1, 0], "cosine").distances(matrix_of(rows)[0]))
    assert best.result()[1].tolist() == [2]
    best = Best(4, ordered=True)
    best.add(probe(schema_of(rows.type), "e", [1, 0], "l2").distances(matrix_of(rows)[0]))
    assert best.result()[1].tolist() == [0, 2, 3]  # infinitely far is a distance


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("different", [1, 3, 50, 100_000])
def test_the_best_of_many_chunks_are_the_best_of_all(ordered: bool, different: int) -> None:
    distances = RANDOM.integers(0, different, 20_000).astype(np.float32)
    best = Best(100, ordered=ordered)
    for at in range(0, len(distances), 777):
        best.add(distances[at : at + 777], first=at)
    got, numbers = best.result()
    expected = np.lexsort((np.arange(len(distances)), distances))
    assert numbers[:100].tolist() == expected[:100].tolist()
    limit = distances[expected[99]]
    assert len(got) == (100 if ordered else np.count_nonzero(distances <= limit))


def test_rows_may_come_with_numbers_of_their_own() -> None:
    best = Best(2, ordered=True)
    best.add(np.array([3, 1, np.nan], np.float32), np.array([7, 5, 1]))
    best.add(np.array([1, 2], np.float32), np.array([2, 9]))
    assert [part.tolist() for part in best.result()] == [[1.0, 1.0], [2, 5]]


@pytest.mark.parametrize(
    ("column", "query", "metric", "told"),
    [
        ("nowhere", [1, 2], "l2", "no column"),
        ("id", [1, 2], "l2", "not vectors"),
        ("e", [1, 2, 3], "l2", "vectors of 2"),
        ("e", [[1, 2]], "l2", "vectors of 2"),
        ("e", 1.0, "l2", "vectors of 2"),
        ("e", ["a", "b"], "l2", "no vector"),
        ("e", None, "l2", "vectors of 2"),
        ("e", [1, float("nan")], "l2", "NaN"),
        ("e", [1, 1e300], "l2", "infinity"),
        ("e", [0, 0], "cosine", "zeros"),
        ("e", [1, 2], "hamming", "metric"),
    ],
)
def test_a_query_that_cannot_be_is_refused_with_a_hint(column: str, query: Any, metric: str, told: str) -> None:
    with pytest.raises(InvalidInputError, match=told) as caught:
        probe(schema_of(pa.list_(pa.float32(), 2)), column, query, metric)
    assert caught.value.hint


@pytest.mark.parametrize(
    "query", [[1, 2], (1.0, 2.0), np.array([1, 2]), pa.array([1, 2]), pa.array([[1.0, 2.0]])[0]], ids=lambda q: type(q).__name__
)
def test_a_query_may_be_any_sequence_of_numbers(query: Any) -> None:
    assert probe(schema_of(pa.list_(pa.float32(), 2)), "e", query, "l2").vector.tolist() == [1.0, 2.0]
