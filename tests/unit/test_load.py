"""Loads: versions, marks and places in one shard; cuts of MemTables; a table under loads beside a dict."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import headgate as hg
from headgate.columnar.arrow import ArrowColumnar
from headgate.compact import compact_shard
from headgate.load import announce, place, withdraw
from headgate.manifest.model import AnnouncedLoad, ChainPoint, RunRecord
from headgate.memtable import MemTable
from headgate.view import cut_at
from headgate.wal.entry import Put

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("value", pa.string())])


def put_of(*ids: int) -> Put:
    return Put(pa.RecordBatch.from_pylist([{"id": id, "value": "v"} for id in ids], schema=SCHEMA), "upsert")


# -- cuts


def filled(*entries: tuple[int, int, int]) -> MemTable:
    """Entries as (epoch, position, puts)."""
    memtable = MemTable(ChainPoint(entries[0][0], entries[0][1]))
    for epoch, position, puts in entries:
        memtable.append(epoch, position, [put_of(position, number) for number in range(puts)], 10 * puts, float(position))
    return memtable


def told(memtable: MemTable) -> tuple[object, ...]:
    return memtable.first, memtable.end, memtable.places(), memtable.batches, memtable.entries, memtable.rows, memtable.bytes


def test_a_memtable_is_cut_between_entries_and_both_parts_count_what_they_hold() -> None:
    whole = filled((1, 5, 2), (1, 6, 1), (1, 7, 3))
    pieces = whole.cut(6)
    assert pieces is not None
    older, newer = pieces
    assert told(older) == ((1, 5), (1, 6), (5, 6), 2, 1, 4, 20)
    assert told(newer) == ((1, 6), (1, 8), (6, 8), 4, 2, 8, 40)
    assert older.puts + newer.puts == whole.puts


@pytest.mark.parametrize("at", [0, 5, 8, 99])
def test_a_place_before_or_after_all_entries_cuts_nothing(at: int) -> None:
    whole = filled((1, 5, 1), (1, 7, 1))
    assert whole.cut(at) is None
    assert cut_at((whole,), [at]) == (whole,)


def test_a_place_at_a_seal_between_entries_cuts_there() -> None:
    """Epoch 1 was sealed at 6; a load stands at 6 or at 7: the same cut."""
    whole = filled((1, 5, 1), (2, 7, 1))
    for at in (6, 7):
        pieces = whole.cut(at)
        assert pieces is not None
        assert [piece.places() for piece in pieces] == [(5, 6), (7, 8)]
        assert pieces[1].first == (1, 6), "the seal is past the older part's end"


def test_a_memtable_that_grows_after_a_view_is_cut_by_what_the_view_has() -> None:
    memtable = filled((1, 0, 1), (1, 1, 2))
    fresh = memtable.view()
    memtable.append(1, 2, [put_of(9)], 10, 0.0)
    assert fresh.places() == (0, 2)
    assert [fresh.spans(at) for at in range(4)] == [False, True, False, False]
    assert [memtable.view().spans(at) for at in range(4)] == [False, True, True, False]


@given(st.lists(st.integers(1, 3), min_size=1, max_size=8), st.lists(st.integers(0, 12), max_size=5))
def test_cuts_keep_every_put_in_order_and_no_part_spans_a_place(puts: list[int], places: list[int]) -> None:
    whole = filled(*((1, 2 + position, count) for position, count in enumerate(puts)))
    parts = cut_at((whole,), sorted(places))
    assert [put for part in parts for put in part.puts] == whole.puts
    assert sum(part.bytes for part in parts) == whole.bytes
    assert sum(part.rows for part in parts) == whole.rows
    assert not any(part.view().spans(place) for part in parts for place in places)
    assert [part.places()[1] for part in parts[:-1]] == [part.places()[0] for part in parts[1:]]


# -- steps in one shard


def loaded(bench: Any, version: int = 1, app: str = "app", query: str | None = None) -> AnnouncedLoad:
    log = bench.log()
    path = f"shards/0000-{log.table_id}/runs/a-{log.clock.token()}"
    part = ArrowColumnar(log.wal_store).write(f"{path}/00000.lance", SCHEMA, iter([bench.rows(version)]))
    run = RunRecord(id=path.rsplit("/", 1)[1], first=0, end=0, slices=(part,), fields=((1, "id"), (2, "value")))
    return AnnouncedLoad(runs=(run,), transaction=f"txn/{app}/{version}", app=app, version=version, query=query)


@pytest.fixture
def log(bench: Any) -> Any:
    from headgate.attempt import register

    found = bench.log()
    register(found, "a", "test", 1000.0)
    return found


def test_a_load_is_invisible_until_it_is_placed_and_placed_once(bench: Any, log: Any) -> None:
    for _ in range(2):
        announce(log, "one", loaded(bench), "a")
        assert bench.state() == {}
    assert [place(log, "one", "app", 1), place(log, "one", "app", 1)] == [True, False]
    manifest = bench.manifest
    assert bench.state() == {1: "v1"}
    assert (manifest.announced, len(manifest.runs), manifest.next_load) == ({}, 1, 2)
    assert manifest.transactions["app"].version == 1


def test_what_was_withdrawn_is_not_placed_and_withdrawing_what_was_placed_changes_nothing(bench: Any, log: Any) -> None:
    announce(log, "one", loaded(bench), "a")
    withdraw(log, "one")
    with pytest.raises(hg.TransactionConflictError, match="withdrawn"):
        place(log, "one", "app", 1)
    announce(log, "two", loaded(bench), "a")
    place(log, "two", "app", 1)
    before = bench.manifest.version
    withdraw(log, "two")
    assert bench.manifest.version == before
    assert bench.state() == {1: "v1"}


def test_placing_one_attempt_drops_what_others_announced_for_the_same_version_or_an_earlier_one(bench: Any, log: Any) -> None:
    for id, version, app in (("older", 1, "app"), ("mine", 2, "app"), ("rival", 2, "app"), ("later", 3, "app"), ("other", 1, "other")):
        announce(log, id, loaded(bench, version, app), "a")
    with pytest.raises(hg.TransactionConflictError, match="version 3 of 'app' is on its way"):
        announce(log, "too late", loaded(bench, 2), "a")
    place(log, "mine", "app", 2)
    assert sorted(bench.manifest.announced) == ["later", "other"]
    assert place(log, "rival", "app", 2) is False
    assert place(log, "older", "app", 1) is None, "a later one is there; of this one nothing is known"
    assert place(log, "later", "app", 3)
    assert [run.id for run in bench.manifest.runs] == [load.runs[0].id for load in bench.manifest.loads]


@pytest.mark.parametrize(("version", "query"), [(3, "q"), (2, "q"), (4, "another"), (4, None)])
def test_an_announcement_that_is_not_newer_is_refused_and_nothing_is_written(bench: Any, log: Any, version: int, query: str | None) -> None:
    announce(log, "one", loaded(bench, 3, query="q"), "a")
    place(log, "one", "app", 3)
    before = bench.manifest.version
    with pytest.raises(hg.TransactionConflictError):
        announce(log, "two", loaded(bench, version, query=query), "a")
    assert bench.manifest.version == before


def test_an_empty_load_leaves_its_mark_and_no_place(bench: Any, log: Any) -> None:
    announce(log, "one", AnnouncedLoad(transaction="t", app="app", version=1), "a")
    assert place(log, "one", "app", 1)
    manifest = bench.manifest
    assert (manifest.runs, manifest.loads, manifest.next_load) == ((), (), 1)
    assert manifest.transactions["app"].version == 1


def test_a_load_needs_its_attempt_and_an_active_shard(bench: Any, log: Any) -> None:
    with pytest.raises(hg.CommitConflictError, match="lease"):
        announce(log, "one", loaded(bench), "somebody else's")
    log.manifests.commit(lambda manifest: manifest.but(state="splitting"))
    with pytest.raises(hg.CommitConflictError, match="splitting"):
        announce(log, "one", loaded(bench), "a")
    assert bench.manifest.announced == {}


def test_what_was_announced_before_a_split_began_is_placed_all_the_same(bench: Any, log: Any) -> None:
    announce(log, "one", loaded(bench), "a")
    log.manifests.commit(lambda manifest: manifest.but(state="splitting"))
    assert place(log, "one", "app", 1)


def test_places_never_fall_and_never_lie_before_the_cursor(bench: Any, log: Any) -> None:
    """The tip is read, then the writer goes on and flushes: what lies below the cursor is closed."""
    from headgate.failpoint import hooked

    writer = bench.memtable_writer()
    writer.put(bench.rows(1, value="old")).wait()
    announce(log, "one", loaded(bench, 1), "a")

    def go_on(name: str) -> None:
        if name == "load.tip":
            writer.put(bench.rows(1, value="flushed since")).wait()
            writer.flush()

    with hooked(go_on):
        place(log, "one", "app", 1)
    assert bench.manifest.loads[0].position == 2 == bench.manifest.cursor.position
    assert bench.state() == {1: "v1"}


# -- versions, through the table


def test_a_version_is_brought_in_once_and_lower_ones_and_other_queries_are_refused(bench: Any) -> None:
    table = bench.table
    assert table.load(bench.rows(1, value="five"), app="app", version=5).committed
    assert not table.load(bench.rows(1, value="again"), app="app", version=5).committed
    assert bench.state() == {1: "five"}
    with pytest.raises(hg.TransactionConflictError, match="comes after 5"):
        table.load(bench.rows(1, value="four"), app="app", version=4)
    load = table.bulk_load("app", 6, query="another")
    files = load.write(bench.rows(1, value="six"))
    with pytest.raises(hg.TransactionConflictError, match="query"):
        load.commit([files])
    assert table.load(bench.rows(1, value="other"), app="other", version=1).committed
    assert bench.state() == {1: "other"}


def test_a_load_that_came_in_is_told_so_though_its_attempt_could_not_be_given_back(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(load: Any) -> None:
        raise hg.StoreUnavailableError("no answer", object="")

    monkeypatch.setattr("headgate.bulk.BulkLoad.abort", unavailable)
    assert bench.table.load(bench.rows(1)).committed
    assert bench.state() == {1: "v1"}


def test_loads_on_a_table_without_a_key_are_appended_once(tmp_path: Any) -> None:
    table = hg.create_table(tmp_path / "t", SCHEMA)
    rows = pa.Table.from_pylist([{"id": 1, "value": "a"}, {"id": 1, "value": "b"}], schema=SCHEMA)
    with table.writer() as writer:
        writer.put(rows).wait()
        table.load(rows, app="app", version=1)
        writer.put(rows).wait()
        table.load(rows, app="app", version=1)
        table.load(rows, app="app", version=2)
        for freshness in ("durable", "memory"):
            assert table.scan(freshness=freshness).count() == 8  # type: ignore[arg-type]
        writer.flush()
        assert table.scan().count() == 8
        table.compact(full=True)
        table.gc(dry_run=False, min_age=0)
        assert table.scan().count() == 8
    assert hg.open_table(tmp_path / "t").scan().count() == 8


def test_a_table_that_is_written_in_wal_only_mode_takes_loads_in_their_place(bench: Any) -> None:
    writer = bench.writer()
    writer.put(bench.rows(1, 2, value="log")).wait()
    bench.table.load(bench.rows(1, 3, value="load"))
    writer.put(bench.rows(3, value="newer")).wait()
    want = {1: "load", 2: "log", 3: "newer"}
    assert bench.state() == want
    writer.close()
    assert bench.state() == want
    bench.table.load(bench.rows(4, value="load"))
    again = bench.memtable_writer()
    want[4] = "load"
    assert bench.state(again.view()) == bench.state() == want
    again.close()
    assert bench.state() == want


def test_a_trim_passes_loads_and_leaves_them_readable(bench: Any) -> None:
    writer = bench.writer()
    for number in range(3):
        writer.put(bench.rows(number, value="log")).wait()
    bench.table.load(bench.rows(7, value="load"))
    writer.put(bench.rows(9, value="log")).wait()
    bench.table.trim(3)
    assert bench.state() == {7: "load", 9: "log"}
    bench.table.gc(dry_run=False, min_age=0)
    assert bench.state() == {7: "load", 9: "log"}


# -- beside a dict

IDS = st.integers(0, 4)
ROWS = st.dictionaries(IDS, st.booleans(), min_size=1, max_size=3)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), ROWS),
        st.tuples(st.just("load"), ROWS),
        st.tuples(st.sampled_from(["flush", "compact", "tier", "gc", "reopen", "close", "view", "checkpoint"]), st.none()),
    ),
    min_size=3,
    max_size=16,
)


class Beside:
    """A shard and a dict; nothing happens at once, so the order is the order of the calls."""

    def __init__(self, bench: Any, config: dict[str, Any]) -> None:
        self.bench, self.config = bench, config
        self.writer = bench.memtable_writer(**config)
        self.model: dict[int, str] = {}
        self.pinned: list[tuple[str, dict[int, str]]] = []
        self.reader, self.number = bench.reader(), 0

    def do(self, kind: str, rows: dict[int, bool] | None) -> None:
        self.number += 1
        if rows is not None:
            ops = {id: f"{self.number}" if is_upsert else None for id, is_upsert in rows.items()}
            for id, value in ops.items():
                self.model.pop(id, None)
                if value is not None:
                    self.model[id] = value
            if kind == "load":
                names = ["upsert" if value is not None else "delete" for value in ops.values()]
                self.bench.table.load(pa.RecordBatch.from_pydict({"id": list(ops), "value": list(ops.values()), "_op": names}))
                return
            upserts = [{"id": id, "value": value} for id, value in ops.items() if value is not None]
            deletes = [{"id": id} for id, value in ops.items() if value is None]
            if upserts:
                self.writer.put(upserts).wait()
            if deletes:
                self.writer.delete(deletes).wait()
        elif kind == "flush":
            self.writer.flush()
        elif kind in ("compact", "tier"):
            log = self.bench.log()
            compact_shard(log, ArrowColumnar(log.wal_store), self.bench.rules, max_memory=1 << 28, full=kind == "compact")
        elif kind == "gc":
            self.bench.table.gc(dry_run=False, min_age=0)
        elif kind in ("reopen", "close"):
            if kind == "close":
                self.writer.close()
            self.writer = self.bench.memtable_writer(**self.config)
        elif kind == "checkpoint":
            scope = "all" if self.number % 2 else "durable"
            self.pinned.append((self.writer.checkpoint(scope=scope).id, dict(self.model)))
        else:
            self.writer.view()

    def check(self) -> None:
        assert self.bench.state(self.writer.view()) == self.model, "in the writer's view"
        assert self.bench.state(self.reader.view()) == self.model, "to a reader that goes on"
        assert self.bench.state() == self.model, "to a fresh reader"


@settings(
    max_examples=int(os.environ.get("HEADGATE_LOAD_STORIES", "40")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(steps=STEPS, rows=st.sampled_from([2, 1000]), checks=st.booleans())
def test_puts_loads_and_all_that_moves_them_come_to_what_a_dict_holds(
    make_bench: Callable[..., Any], steps: list[tuple[str, Any]], rows: int, checks: bool
) -> None:
    beside = Beside(make_bench(), {"max_memtable_rows": rows})
    for step in steps:
        beside.do(*step)
        if checks:  # a look cuts MemTables, so now and then there is none
            beside.check()
    beside.check()
    for id, state in beside.pinned:
        assert beside.bench.state(beside.bench.reader().view(id)) == state
    beside.writer.close()
    assert beside.bench.state() == beside.model
    assert beside.bench.table.verify(deep=True).ok
