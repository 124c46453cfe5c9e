"""K14, P14: those who follow the changes of a shard, and come or are at their snapshot while it is split."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest

import headgate as hg
from headgate.failpoint import hooked

SCHEMA = pa.schema([pa.field("id", pa.int64(), False), pa.field("v", pa.string())])


@pytest.fixture
def table(tmp_path: Path) -> hg.Table:
    table = hg.create_table(tmp_path / "t", SCHEMA, key="id")
    put(table, *range(20))
    return table


def put(table: hg.Table, *ids: int) -> None:
    with table.writer() as writer:
        writer.put([{"id": id, "v": "a"} for id in ids]).wait()


def ids(changes: hg.Changes) -> list[int]:
    return sorted(id for batch in changes for id in batch.column("id").to_pylist())


def test_p14_a_reader_whose_shard_is_split_while_its_snapshot_is_given_goes_on_with_the_parts(table: hg.Table) -> None:
    changes = table.changes(start="snapshot", consumer="c")
    table.split_shard("0000")
    assert ids(changes) == list(range(20))
    changes.close()
    put(table.refresh(), 100)
    with table.changes(consumer="c") as changes:
        assert ids(changes) == [100]


@pytest.mark.parametrize("step", ["split.claimed", "split.flushed", "split.pinned", "split.child"])
def test_p14_a_consumer_that_registers_while_its_shard_is_split_holds_the_log_of_the_parts(table: hg.Table, step: str) -> None:
    # Held by nobody, what is written to the parts before it comes to them would be collected under it.
    registered = iter([True])

    def hook(name: str) -> None:
        if name == step and next(registered, False):
            table.changes(start="earliest", consumer="c").close()

    with hooked(hook):
        table.split_shard("0000")
    put(table.refresh(), *range(100, 110))
    table.gc(dry_run=False, min_age=0)
    with table.changes(consumer="c") as changes:
        assert ids(changes) == [*range(20), *range(100, 110)]


def test_p14_a_consumer_that_is_dropped_while_its_shard_is_split_holds_nothing_in_the_parts(table: hg.Table) -> None:
    table.changes(start="earliest", consumer="c").close()
    dropped = iter([True])

    def hook(name: str) -> None:
        if name == "split.child" and next(dropped, False):
            table.drop_consumer("c")

    with hooked(hook):
        table.split_shard("0000")
    assert table.refresh().consumers() == []


class Died(BaseException):
    """A process that is gone."""


@pytest.mark.parametrize("by", ["changes", "batches", "open_consumer", "an offset from before"])
def test_p14_a_consumer_that_registers_in_a_shard_that_was_split_holds_the_log_of_its_parts(table: hg.Table, by: str) -> None:
    # Nobody has told the table of the split yet; or the offset to begin at is from before.
    def hook(name: str) -> None:
        if name == "split.retired" and by != "an offset from before":
            raise Died

    with hooked(hook), suppress(Died):
        table.split_shard("0000")
    if by == "batches":
        table.change_batches(start="earliest", consumer="c").begin()
    elif by == "open_consumer":
        table.open_consumer("c")
    else:
        table.changes(start={"0000": [0, 0]} if by.startswith("an offset") else "earliest", consumer="c").close()
    put(table.refresh(), *range(100, 110))
    table.gc(dry_run=False, min_age=0)
    with table.changes(consumer="c") as changes:
        assert ids(changes) == [*range(20), *range(100, 110)]
