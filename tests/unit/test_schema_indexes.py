"""Indexes as records of a table: made, kept, opened again."""

from __future__ import annotations

import pickle
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate.clock import SYSTEM_CLOCK
from headgate.manifest.model import ScalarIndex, TableManifest, TextIndex, VectorIndex

SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("body", pa.large_string()),
        ("title", pa.string()),
        ("h", pa.list_(pa.float16(), 8)),
        ("f", pa.list_(pa.float32(), 8)),
        ("d", pa.list_(pa.float64(), 8)),
        ("ts", pa.timestamp("us")),
    ]
)
ALL = [
    hg.vector_index("h"),
    hg.vector_index("f", metric="cosine"),
    hg.vector_index("d", metric="dot"),
    hg.text_index("body"),
    hg.text_index("title", lower_case=False, ascii_folding=True),
    hg.scalar_index("title"),
    hg.scalar_index("ts"),
]


def new_uri() -> str:
    return f"memory://indexes-{SYSTEM_CLOCK.token()}"


def test_a_table_keeps_its_indexes() -> None:
    table = hg.create_table(new_uri(), SCHEMA, key="id", indexes=ALL)
    for handle in (table, hg.open_table(table.uri), pickle.loads(pickle.dumps(table))):
        assert handle.indexes == tuple(ALL)
        assert handle.shard("0000").indexes == tuple(ALL)
        assert [type(index) for index in handle.indexes] == [VectorIndex] * 3 + [TextIndex] * 2 + [ScalarIndex] * 2


def test_a_table_without_indexes_has_none() -> None:
    assert hg.create_table(new_uri(), SCHEMA).indexes == ()
    assert hg.create_table(new_uri(), SCHEMA, indexes=[]).indexes == ()


def test_indexes_are_plain_json_in_the_manifest() -> None:
    manifest = hg.create_table(new_uri(), SCHEMA, indexes=ALL)._manifest
    assert manifest.model_dump(mode="json")["indexes"][1] == {
        "kind": "vector",
        "column": "f",
        "metric": "cosine",
        "approximate_from": 250_000,
    }
    assert TableManifest.model_validate_json(manifest.model_dump_json()) == manifest


def test_an_existing_table_is_opened_if_its_indexes_are_the_same_in_any_order_or_none_are_given() -> None:
    table = hg.create_table(new_uri(), SCHEMA, key="id", indexes=ALL)
    for indexes in (None, ALL, ALL[::-1]):
        assert hg.create_table(table.uri, SCHEMA, key="id", indexes=indexes, if_exists="open") == table
    for indexes in ([], ALL[1:], [*ALL[1:], hg.vector_index("h", metric="dot")]):
        with pytest.raises(hg.SchemaMismatchError, match="indexes"):
            hg.create_table(table.uri, SCHEMA, key="id", indexes=indexes, if_exists="open")


def test_an_index_never_changes() -> None:
    with pytest.raises(ValueError, match="frozen"):
        hg.text_index("body").column = "title"


@pytest.mark.parametrize(
    "make",
    [
        lambda: hg.vector_index("f", metric="hamming"),  # type: ignore[arg-type]
        lambda: hg.vector_index(""),
        lambda: hg.text_index(7),  # type: ignore[arg-type]
        lambda: hg.text_index("body", lower_case="yes"),  # type: ignore[arg-type]
        lambda: hg.scalar_index(["a", "b"]),  # type: ignore[arg-type]
        lambda: hg.create_table(new_uri(), SCHEMA, indexes="body"),
        lambda: hg.create_table(new_uri(), SCHEMA, indexes=hg.text_index("body")),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_index_is_refused_with_a_hint(make: Any) -> None:
    with pytest.raises(hg.InvalidInputError) as caught:
        make()
    assert caught.value.hint
