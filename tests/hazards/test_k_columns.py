"""Changes of a table's columns: concurrent ones, interrupted ones, and indexes that cannot be kept."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate.clock import SYSTEM_CLOCK
from headgate.failpoint import hooked
from headgate.store.memory import MemoryStore
from headgate.watch import SchemaWatch

SCHEMA = pa.schema([("id", pa.int64()), ("a", pa.string()), ("b", pa.int8()), ("v", pa.list_(pa.float32(), 4))])


def new_table() -> hg.Table:
    return hg.create_table(f"memory://changes-{SYSTEM_CLOCK.token()}", SCHEMA, key="id")


def in_another_process(table: hg.Table) -> hg.Table:
    """A handle that nobody in this process tells anything."""
    other = hg.open_table(table.uri)
    place = f"another process {SYSTEM_CLOCK.token()}"
    other.__dict__["_watch"] = SchemaWatch(other._places.table_manifests(), place, SYSTEM_CLOCK, table._manifest)
    return other


def names_in(table: hg.Table) -> list[str]:
    return [info.key for info in MemoryStore(table.uri.removeprefix("memory://")).list("")]


Change = Callable[[hg.Table], None]
CHANGES: dict[str, Change] = {
    "add x": lambda table: table.add_columns(pa.schema([("x", pa.int8())])),
    "add y": lambda table: table.add_columns(pa.schema([("y", pa.string())])),
    "drop b": lambda table: table.drop_columns(["b"]),
    "rename a": lambda table: table.rename_column("a", "title"),
    "rename the key": lambda table: table.rename_column("id", "number"),
    "widen a": lambda table: table.widen_column("a", pa.large_string()),
}


@pytest.mark.parametrize(("one", "two"), list(itertools.permutations(CHANGES, 2)))
def test_k12_of_two_changes_at_once_neither_is_lost(crew: Any, one: str, two: str) -> None:
    table = new_table()
    expected = new_table()
    crew.stops = {"commit.loaded"}
    first = crew.actor(lambda: CHANGES[one](in_another_process(table)))
    second = crew.actor(lambda: CHANGES[two](in_another_process(table)))
    first.step_to("commit.loaded")
    second.finish()  # the first has read what is no longer the latest
    if (one, two) == ("widen a", "rename a"):
        with pytest.raises(hg.InvalidInputError, match="'a'"):
            first.finish()
        one = two
    else:
        first.finish()
    for change in dict.fromkeys((two, one)):
        CHANGES[change](expected)
    found = hg.open_table(table.uri)
    assert found.schema.equals(expected.schema)
    assert found.key == expected.key
    assert found._manifest.field_ids == expected._manifest.field_ids
    assert found._manifest.next_field_id == expected._manifest.next_field_id


def test_k12_of_two_who_add_a_column_of_one_name_one_is_refused(crew: Any) -> None:
    table = new_table()
    crew.stops = {"commit.loaded"}
    first = crew.actor(lambda: in_another_process(table).add_columns(pa.schema([("x", pa.int8())])))
    first.step_to("commit.loaded")
    crew.actor(lambda: hg.open_table(table.uri).add_columns(pa.schema([("X", pa.string())]))).finish()
    with pytest.raises(hg.InvalidInputError, match="X"):
        first.finish()
    assert hg.open_table(table.uri).schema.names == [*SCHEMA.names, "X"]


def test_k12_a_change_of_columns_beside_a_new_shard_loses_neither(crew: Any) -> None:
    table = new_table()
    crew.stops = {"commit.loaded"}
    first = crew.actor(lambda: CHANGES["add x"](in_another_process(table)))
    first.step_to("commit.loaded")
    table._watch.commit(lambda manifest: manifest.but(shards=(*manifest.shards, "0001")))
    first.finish()
    found = hg.open_table(table.uri)
    assert found.schema.names[-1] == "x"
    assert found._manifest.shards == ("0000", "0001")


@pytest.mark.parametrize("step", ["commit.loaded", "commit.created"])
def test_a_change_that_dies_is_whole_or_absent_and_can_be_told(step: str, crash: type[Exception]) -> None:
    table = new_table()

    def die(name: str) -> None:
        if name == step:
            raise crash(name)

    with hooked(die), pytest.raises(crash):
        CHANGES["add x"](table)
    found = hg.open_table(table.uri)
    assert ("x" in found.schema.names) == (step == "commit.created")
    assert len(found._manifest.field_ids) == len(found.schema)
    if step == "commit.created":
        with pytest.raises(hg.InvalidInputError, match="already"):
            CHANGES["add x"](found)
    else:
        CHANGES["add x"](found)
    assert found.schema.names == [*SCHEMA.names, "x"]


@pytest.mark.parametrize(
    ("index", "word"),
    [
        (hg.vector_index("a"), "fixed-size list"),
        (hg.vector_index("b"), "fixed-size list"),
        (hg.vector_index("nope"), "nope"),
        (hg.text_index("b"), "strings"),
        (hg.text_index("v"), "strings"),
        (hg.text_index("nope"), "nope"),
        (hg.scalar_index("v"), "plain values"),
        (hg.scalar_index("nope"), "nope"),
        ("b", "hg.scalar_index"),
        ({"kind": "scalar", "column": "b"}, "hg.scalar_index"),
    ],
    ids=str,
)
def test_i05_an_index_that_cannot_be_maintained_is_refused_at_creation(index: Any, word: str) -> None:
    name = f"changes-{SYSTEM_CLOCK.token()}"
    with pytest.raises(hg.InvalidInputError) as caught:
        hg.create_table(f"memory://{name}", SCHEMA, key="id", indexes=[index])
    assert word in str(caught.value)
    assert not list(MemoryStore(name).list(""))


def test_i05_the_same_index_twice_is_refused() -> None:
    name = f"changes-{SYSTEM_CLOCK.token()}"
    for indexes in ([hg.text_index("a"), hg.text_index("a", lower_case=False)], [hg.vector_index("v"), hg.vector_index("v", metric="dot")]):
        with pytest.raises(hg.InvalidInputError, match="two"):
            hg.create_table(f"memory://{name}", SCHEMA, key="id", indexes=indexes)
    assert not list(MemoryStore(name).list(""))


def test_i05_vectors_of_whole_numbers_have_no_index() -> None:
    schema = SCHEMA.append(pa.field("w", pa.list_(pa.int8(), 4)))
    with pytest.raises(hg.InvalidInputError, match="w"):
        hg.create_table(f"memory://changes-{SYSTEM_CLOCK.token()}", schema, key="id", indexes=[hg.vector_index("w")])


@pytest.mark.parametrize("refused", [[hg.text_index("v")], [hg.scalar_index("nope")]])
def test_i05_a_refused_index_leaves_an_existing_table_alone(refused: list[Any]) -> None:
    table = new_table()
    before = names_in(table)
    with pytest.raises(hg.InvalidInputError):
        hg.create_table(table.uri, SCHEMA, key="id", indexes=refused, if_exists="open")
    assert names_in(table) == before
