"""Vector indexes on large slices: compaction builds them, searches use them, and nothing is missed but a near tie."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import headgate as hg

LENGTH, ROWS = 8, 12_000
SCHEMA = pa.schema([pa.field("id", pa.int64(), False), pa.field("kind", pa.int64()), pa.field("e", pa.list_(pa.float32(), LENGTH))])


def rows_of(ids: np.ndarray, vectors: np.ndarray) -> pa.Table:
    column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.astype(np.float32).reshape(-1)), LENGTH)
    return pa.table([pa.array(ids), pa.array(ids % 7), column], schema=SCHEMA)


def clustered(count: int, seed: int = 3) -> np.ndarray:
    random = np.random.default_rng(seed)
    return random.normal(size=(40, LENGTH))[random.integers(0, 40, count)] * 10 + random.normal(size=(count, LENGTH))


@pytest.fixture(params=["l2", "cosine"])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> hg.Table:
    index = hg.vector_index("e", metric=request.param, approximate_from=1000)
    made = hg.create_table(str(tmp_path / "t"), SCHEMA, key="id", indexes=[index])
    vectors = clustered(ROWS)
    made.load(rows_of(np.arange(ROWS), vectors))
    made.load(rows_of(np.arange(0, ROWS, 50), vectors[::50] + 1))
    made.compact(full=True)
    return made


def has_index(table: hg.Table) -> bool:
    import lance

    return all(lance.dataset(part.uri).describe_indices() for run in table.runs() for part in run.slices)


def test_compaction_indexes_large_slices_and_searches_find_the_same(table: hg.Table) -> None:
    assert has_index(table)
    for number in range(10):
        query = clustered(1, seed=100 + number)[0]
        by_index = table.search("e", query, k=10, columns=["id"])["id"].to_pylist()
        exact = table.search("e", query, k=10, columns=["id"], exact=True)["id"].to_pylist()
        assert len(set(by_index) & set(exact)) >= 9, "recall"


def test_rows_replaced_since_are_neither_found_nor_in_the_way(table: hg.Table) -> None:
    query = clustered(1, seed=5)[0]
    first = table.search("e", query, k=20, columns=["id"])["id"].to_pylist()
    with table.writer() as writer:
        writer.delete(pa.table({"id": first[:15]})).wait()
        found = table.search("e", query, k=20, columns=["id"])["id"].to_pylist()
    assert len(found) == 20
    assert not set(found) & set(first[:15])


def test_a_filter_that_few_rows_meet_leaves_no_result_short(table: hg.Table) -> None:
    found = table.search("e", clustered(1, seed=9)[0], k=10, filter="kind = 3 and id < 200", columns=["id", "kind"])
    assert found["kind"].to_pylist() == [3] * 10


def test_small_slices_and_those_of_flushes_have_no_index(tmp_path: Path) -> None:
    table = hg.create_table(str(tmp_path / "t"), SCHEMA, key="id", indexes=[hg.vector_index("e")])
    table.load(rows_of(np.arange(ROWS), clustered(ROWS)))
    table.load(rows_of(np.arange(10), clustered(10)))
    table.compact(full=True)
    assert not has_index(table)


def test_a_threshold_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(hg.InvalidInputError, match="approximate_from"):
        hg.vector_index("e", approximate_from=0)


def test_compaction_indexes_the_values_of_large_slices_and_filters_find_the_same(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), False), pa.field("ts", pa.int64())])
    count = 1 << 16
    table = hg.create_table(str(tmp_path / "t"), schema, key="id", indexes=[hg.scalar_index("ts")])
    table.load(pa.table([pa.array(np.arange(count)), pa.array(np.arange(count)[::-1].copy())], schema=schema))
    table.load(pa.table([pa.array([count]), pa.array([77])], schema=schema))
    table.compact(full=True)
    assert has_index(table)
    with table.writer() as writer:  # a row that was replaced since is not found by its old value
        writer.put([{"id": count, "ts": -1}]).wait()
        assert table.scan(filter="ts = 77").to_arrow()["id"].to_pylist() == [count - 78]
        assert sorted(table.scan(filter="ts < 3").to_arrow()["ts"].to_pylist()) == [-1, 0, 1, 2]
