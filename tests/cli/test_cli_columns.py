"""`headgate columns`."""

from __future__ import annotations

import pyarrow as pa
import pytest

import headgate as hg


@pytest.fixture
def small(tmp_path):
    schema = pa.schema([pa.field("id", pa.int32(), nullable=False), ("note", pa.string())])
    table = hg.create_table(tmp_path / "t", schema, key="id", indexes=[hg.text_index("note")])
    with table.writer() as writer:
        writer.put([{"id": 1, "note": "x"}])
    return table


def fields(document) -> dict[str, str]:
    return {field["name"]: field["type"] for field in document["schema"]["fields"]}


def test_columns_are_added_renamed_widened_and_dropped(headgate, small):
    added = headgate("columns", "add", small.uri, "price:decimal128(10, 2)", "tags:list<string>", "deep:struct<a: int64>", "--json")
    assert list(fields(added.json)) == ["id", "note", "price", "tags", "deep"]
    assert fields(added.json)["price"] == "decimal128(10, 2)"

    assert list(fields(headgate("columns", "rename", small.uri, "note", "text", "--json").json))[1] == "text"
    assert fields(headgate("columns", "widen", small.uri, "id", "int64", "--json").json)["id"] == "int64"
    assert list(fields(headgate("columns", "drop", small.uri, "tags", "deep", "--json").json)) == ["id", "text", "price"]
    assert headgate("scan", small.uri, "--json").lines == [{"id": 1, "text": "x", "price": None}]
    assert headgate("status", small.uri, "--json").json["indexes"][0]["column"] == "text"


def test_people_are_shown_the_columns_after_a_change(headgate, small):
    ran = headgate("columns", "rename", small.uri, "note", "text")

    assert ran.code == 0
    assert "  text string, text index" in ran.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("add", "note:string"), "has a column 'note' already"),
        (("add", "more:integer"), "'integer' is not a type"),
        (("drop", "id"), "part of the key"),
        (("drop", "note"), "text index"),
        (("drop", "nope"), "no column 'nope'"),
        (("rename", "nope", "x"), "no column 'nope'"),
        (("rename", "note", "ID"), "has a column 'id' already"),
        (("widen", "id", "int16"), "cannot become int16"),
        (("widen", "id", "wide"), "'wide' is not a type"),
    ],
)
def test_a_change_that_cannot_be_is_refused_with_a_hint_and_changes_nothing(headgate, small, arguments, message):
    command, *rest = arguments
    ran = headgate("columns", command, small.uri, *rest, "--json")

    assert ran.code == 1
    assert message in ran.error["message"]
    assert ran.error["hint"]
    assert hg.open_table(small.uri).schema.equals(small.schema)


@pytest.mark.parametrize("arguments", [("add", "t"), ("add", "t", "note"), ("add", "t", ":string"), ("rename", "t", "a"), ("shrink", "t")])
def test_columns_called_wrongly_ends_with_2(headgate, arguments):
    assert headgate("columns", *arguments).code == 2


def test_columns_alone_lists_what_there_is(headgate):
    ran = headgate("columns", "--help")

    assert ran.code == 0
    for command in ("add", "drop", "rename", "widen"):
        assert f"\n  {command} " in ran.out
