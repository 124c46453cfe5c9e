"""K. Checkpoints: what they pin, what of the log they need, and reads at them (Q08)."""

from __future__ import annotations

import itertools
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate.clock import SystemClock
from headgate.columnar.arrow import ArrowColumnar
from headgate.compact import compact_shard
from headgate.failpoint import hooked
from headgate.life.gc import collect_shard
from headgate.query.scan import Scan
from headgate.store.faulty import Fault

SCHEMA = pa.schema([pa.field("id", pa.int64(), False), pa.field("value", pa.string())])
MANIFESTS = "/manifest/"
_names = itertools.count()


class Jumping(SystemClock):
    """A clock that a test may set forward."""

    ahead = 0.0

    def now(self) -> float:
        return super().now() + self.ahead


def compact(bench: Any) -> None:
    log = bench.log()
    compact_shard(log, ArrowColumnar(log.wal_store), bench.rules, max_memory=1 << 28, full=True)


def collect(bench: Any) -> None:
    log = bench.log()
    collect_shard(log, log.wal_store, dry_run=False, min_age=0.0)


def wipe(bench: Any) -> int:
    """Delete the whole wal/ folder. How many objects there were."""
    gone = [info.key for info in bench.inner.list("wal/")]
    bench.inner.delete(gone)
    return len(gone)


def cut_off(store: Any) -> None:
    """What a crash is to everybody else: whatever uses this store changes nothing any more."""
    store.add(Fault("any", "fail"))


def put(writer: Any, rows: dict[int, str]) -> dict[int, str]:
    writer.put([{"id": id, "value": value} for id, value in rows.items()]).wait(timeout=30)
    return rows


def state_at(bench: Any, at: str) -> dict[int, str]:
    return {row["id"]: row["value"] for row in Scan(lambda: [bench.reader().view(at)], bench.rules).to_arrow().to_pylist()}


def values(table: hg.Table, **options: Any) -> dict[int, str]:
    rows = table.scan(**options).to_arrow().to_pylist()
    found = {row["id"]: row["value"] for row in rows}
    assert len(found) == len(rows)
    return found


def memory_table(**options: Any) -> hg.Table:
    return hg.create_table(f"memory://k-{next(_names)}", SCHEMA, **{"key": "id", **options})


def needs_nothing_of_the_log(bench: Any, checkpoint: hg.Checkpoint) -> None:
    record = bench.manifest.checkpoints[checkpoint.id]
    assert record.position == record.end == bench.manifest.cursor.position
    assert bench.manifest.wal.clean_at == record.position


# -- K01, K02, K03


@pytest.mark.parametrize("ends", ["close", "abort", "crash"])
@pytest.mark.parametrize("reopens", [1, 7])
def test_k01_idle_reopens_then_scope_all_needs_nothing_of_the_log(bench: Any, reopens: int, ends: str) -> None:
    with bench.memtable_writer(bench.faulty()) as writer:
        model = put(writer, {1: "a", 2: "b"})
    for _ in range(reopens):
        store = bench.faulty()
        idle = bench.memtable_writer(store)
        if ends == "crash":
            cut_off(store)
        elif ends == "abort":
            idle.abort()
        else:
            idle.close()
    store = bench.faulty()
    checkpoint = bench.memtable_writer(store).checkpoint("all")
    needs_nothing_of_the_log(bench, checkpoint)
    cut_off(store)
    assert wipe(bench) > reopens
    assert state_at(bench, "all") == model, "the checkpoint is read without its log"
    with bench.memtable_writer(bench.faulty()) as writer:
        assert bench.state(writer.view()) == model
        model |= put(writer, {3: "c"})
    assert bench.state() == model
    assert bench.table.verify(deep=True).ok


def test_k02_put_then_scope_all_with_the_flush_timer_off(bench: Any) -> None:
    store = bench.faulty()
    writer = bench.memtable_writer(store, max_memtable_age=1e6)
    model = put(writer, {1: "a", 2: "b"})
    writer.delete([{"id": 1}]).wait(timeout=30)
    del model[1]
    checkpoint = writer.checkpoint()
    needs_nothing_of_the_log(bench, checkpoint)
    cut_off(store)
    wipe(bench)
    assert state_at(bench, checkpoint.id) == model
    with bench.memtable_writer(bench.faulty()) as successor:
        assert bench.state(successor.view()) == model


def test_k02_scope_all_of_a_table_that_never_had_a_row(bench: Any) -> None:
    store = bench.faulty()
    checkpoint = bench.memtable_writer(store).checkpoint("empty")
    needs_nothing_of_the_log(bench, checkpoint)
    cut_off(store)
    wipe(bench)
    assert state_at(bench, "empty") == {}
    with bench.memtable_writer(bench.faulty()) as writer:
        assert put(writer, {1: "a"}) == bench.state(writer.view())
    assert state_at(bench, "empty") == {}


def test_k03_the_log_may_be_wiped_after_scope_all_though_the_writer_was_killed(bench: Any) -> None:
    """And after whatever else keeps the log out of it: records of the keeper, compaction, collection, further checkpoints."""
    store = bench.faulty()
    writer = bench.memtable_writer(store, max_memtable_rows=2)
    model: dict[int, str] = {}
    for number in range(7):
        model |= put(writer, {number: "a", 0: f"{number}"})
    writer.checkpoint("one")
    writer._record(clean=False)
    compact(bench)
    collect(bench)
    writer.checkpoint("two")
    bench.table.checkpoint("three")
    assert bench.manifest.wal.clean_at is not None
    cut_off(store)
    wipe(bench)
    for name in ("one", "two", "three"):
        assert state_at(bench, name) == model
    with bench.memtable_writer(bench.faulty()) as successor:
        assert bench.state(successor.view()) == model
        model |= put(successor, {50: "x"})
    assert bench.state() == model
    collect(bench)
    assert state_at(bench, "one") == {id: value for id, value in model.items() if id != 50}


KILLED = """
import os, sys, headgate as hg
table = hg.open_table(sys.argv[1])
writer = table.writer()
for number in range(20):
    writer.put([{"id": number, "value": "a"}])
writer.checkpoint("all", scope="all")
os._exit(9)
"""


def test_k03_a_process_killed_after_scope_all_its_log_store_deleted_and_the_table_opened_with_every_row(tmp_path: Path) -> None:
    table = hg.create_table(tmp_path / "t", SCHEMA, key="id", sharding=hg.bucket("id", 3), wal_uri=tmp_path / "wal")
    assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "t")], timeout=120, check=False).returncode == 9
    shutil.rmtree(tmp_path / "wal")
    expected = dict.fromkeys(range(20), "a")
    table = hg.open_table(tmp_path / "t")
    assert values(table) == values(table, at="all") == expected
    with table.writer() as writer:
        writer.put([{"id": 99, "value": "b"}]).wait()
    assert values(table) == expected | {99: "b"}
    assert values(table, at="all") == expected
    assert table.verify(deep=True).ok


def test_k03_one_entry_past_the_checkpoint_and_the_wipe_is_refused(bench: Any) -> None:
    store = bench.faulty()
    writer = bench.memtable_writer(store, max_memtable_age=1e6)
    model = put(writer, {1: "a"})
    checkpoint = writer.checkpoint()
    put(writer, {2: "b"})
    cut_off(store)
    wipe(bench)
    before = bench.contents()
    with pytest.raises(hg.WalStoreMismatchError):
        bench.memtable_writer(bench.faulty())
    assert bench.contents() == before, "nothing was written"
    assert state_at(bench, checkpoint.id) == model, "the checkpoint is still whole"


def test_k03_a_writer_that_lives_on_after_the_wipe_leaves_a_log_that_opens(bench: Any) -> None:
    store = bench.faulty()
    writer = bench.memtable_writer(store, max_memtable_age=1e6)
    model = put(writer, {1: "a"})
    writer.checkpoint()
    wipe(bench)
    model |= put(writer, {2: "b"})
    assert bench.state() == bench.state(writer.view()) == model
    cut_off(store)
    with bench.memtable_writer(bench.faulty()) as successor:
        assert bench.state(successor.view()) == model


def test_k03_producers_are_known_after_a_kill_and_a_wipe(bench: Any) -> None:
    """Rows of a WAL-only writer, taken over by one with a MemTable."""
    with bench.writer(bench.faulty()) as wal_only:
        for number in range(3):
            wal_only.put(bench.rows(number), producer="p", sequence=number).wait(timeout=30)
    store = bench.faulty()
    writer = bench.memtable_writer(store, max_memtable_age=1e6)
    writer.put(bench.rows(3), producer="p", sequence=3).wait(timeout=30)
    needs_nothing_of_the_log(bench, writer.checkpoint())
    cut_off(store)
    wipe(bench)
    with bench.memtable_writer(bench.faulty()) as successor:
        for number in (2, 3):
            assert successor.put(bench.rows(number), producer="p", sequence=number).wait(timeout=30).duplicate
        successor.put(bench.rows(4), producer="p", sequence=4).wait(timeout=30)
    assert sorted(bench.state()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("scope_all", [False, True])
def test_k03_a_log_that_a_durable_checkpoint_needs_is_not_called_clean(bench: Any, scope_all: bool) -> None:
    writer = bench.memtable_writer(bench.faulty(), max_memtable_age=1e6)
    then = put(writer, {1: "a"})
    bench.table.checkpoint("durable")
    now = then | put(writer, {1: "b"})
    if scope_all:
        writer.checkpoint("all")
    writer.close()
    assert bench.manifest.wal.clean_at is None
    collect(bench)
    assert state_at(bench, "durable") == then
    bench.table.drop_checkpoint("durable")
    bench.memtable_writer(bench.faulty()).close()
    clean_at: int | None = bench.log().manifests.load().wal.clean_at
    assert clean_at is not None
    wipe(bench)
    with bench.memtable_writer(bench.faulty()) as successor:
        assert bench.state(successor.view()) == now


# -- K04


def test_k04_a_row_put_after_the_cut_is_not_part_of_it_and_is_replayed(bench: Any) -> None:
    store = bench.faulty()
    writer = bench.memtable_writer(store, max_memtable_age=1e6)
    model = put(writer, {1: "a", 2: "b"})

    def late(name: str) -> None:
        if name == "checkpoint.flushed":
            put(writer, {2: "late", 3: "late"})

    with hooked(late):
        checkpoint = writer.checkpoint()
    assert bench.manifest.wal.clean_at is None
    record = bench.manifest.checkpoints[checkpoint.id]
    assert record.end == record.position
    assert state_at(bench, checkpoint.id) == model
    cut_off(store)
    with bench.memtable_writer(bench.faulty()) as successor:
        assert bench.state(successor.view()) == model | {2: "late", 3: "late"}
    assert state_at(bench, checkpoint.id) == model


def test_k04_and_a_wipe_is_refused_then(bench: Any) -> None:
    store = bench.faulty()
    writer = bench.memtable_writer(store, max_memtable_age=1e6)
    put(writer, {1: "a"})

    def late(name: str) -> None:
        if name == "checkpoint.flushed":
            put(writer, {3: "late"})

    with hooked(late):
        writer.checkpoint()
    cut_off(store)
    wipe(bench)
    with pytest.raises(hg.WalStoreMismatchError):
        bench.memtable_writer(bench.faulty())


def test_k04_the_clean_mark_is_gone_before_the_next_entry_is_written(bench: Any) -> None:
    writer = bench.memtable_writer(bench.faulty(), max_memtable_age=1e6)
    put(writer, {1: "a"})
    writer.checkpoint()
    assert bench.manifest.wal.clean_at is not None
    marks: list[int | None] = []

    def look(name: str) -> None:
        if name == "pipeline.persisted":
            marks.append(bench.manifest.wal.clean_at)

    with hooked(look):
        put(writer, {2: "b"})
        put(writer, {3: "c"})
    assert marks == [None, None]
    checkpoint = writer.checkpoint()
    needs_nothing_of_the_log(bench, checkpoint)


def test_k04_a_put_whose_entry_waits_while_the_mark_is_set_takes_it_away_first(bench: Any, crew: Any) -> None:
    """The put comes while the checkpoint is being committed: it waits for that, then says that the log is needed."""
    writer = bench.memtable_writer(bench.faulty(), max_memtable_age=1e6)
    model = put(writer, {1: "a"})
    writer.flush()
    crew.stops = {"commit.loaded"}
    checkpointing = crew.actor(writer.checkpoint)
    checkpointing.step_to("commit.loaded")
    ack = writer.put([{"id": 2, "value": "b"}])
    time.sleep(0.05)
    assert not ack.done(), "it is not decided yet whether the log is clean"
    crew.stops = {"nowhere"}
    checkpoint = checkpointing.finish()
    ack.wait(timeout=30)
    assert bench.manifest.wal.clean_at is None
    assert state_at(bench, checkpoint.id) == model
    assert bench.state() == model | {2: "b"}


def test_k04_a_checkpoint_with_an_unknown_outcome_leaves_a_writer_that_marks_its_log_as_needed(bench: Any) -> None:
    store = bench.faulty()
    writer = bench.memtable_writer(store, max_memtable_age=1e6)
    model = put(writer, {1: "a"})
    writer.flush()

    def fail(name: str) -> None:
        if name == "commit.loaded":
            store.add(
                Fault("create", "apply-then-fail", key=MANIFESTS, times=1), Fault("list", "fail", key=MANIFESTS), Fault("get", "fail")
            )

    with hooked(fail), pytest.raises(hg.HeadgateError):
        writer.checkpoint("lost")
    store.clear()
    assert bench.manifest.wal.clean_at is not None, "it was committed, and the reply is lost"
    model |= put(writer, {2: "b"})
    assert bench.manifest.wal.clean_at is None
    cut_off(store)
    with bench.memtable_writer(bench.faulty()) as successor:
        assert bench.state(successor.view()) == model


def test_k04_a_writer_that_cannot_take_the_mark_away_sends_nothing(bench: Any) -> None:
    store = bench.faulty()
    writer = bench.memtable_writer(store, max_memtable_age=1e6, max_wal_persist_retries=1)
    model = put(writer, {1: "a"})
    writer.checkpoint()
    store.add(Fault("create", "fail", key=MANIFESTS))
    ack = writer.put([{"id": 2, "value": "b"}])
    with pytest.raises(hg.HeadgateError):
        ack.wait(timeout=30)
    cut_off(store)
    assert wipe(bench)
    with bench.memtable_writer(bench.faulty()) as successor:
        assert bench.state(successor.view()) == model


def test_k04_a_fenced_writer_cannot_mark_the_log_as_clean(bench: Any) -> None:
    fenced = bench.memtable_writer(bench.faulty(), max_memtable_age=1e6)
    put(fenced, {1: "a"})
    fenced.flush()
    store = bench.faulty()
    successor = bench.memtable_writer(store, max_memtable_age=1e6)
    put(successor, {2: "b"})
    with pytest.raises(hg.FencedError):
        fenced.checkpoint()
    assert bench.manifest.wal.clean_at is None
    assert bench.manifest.checkpoints == {}


@pytest.mark.parametrize("seed", range(4))
def test_k04_checkpoints_beside_a_thread_that_puts_hold_a_prefix_of_it(bench: Any, seed: int) -> None:
    store = bench.faulty()
    writer = bench.memtable_writer(store, max_memtable_rows=random.Random(seed).choice([3, 1000]))
    acked, stop = [-1], threading.Event()

    def putting() -> None:
        for number in itertools.count():
            if stop.wait(0.001):  # with room for others: in memory, on a busy machine, they would miss 64 versions at once
                return
            put(writer, {number: f"v{number}"})
            acked[0] = number

    thread = threading.Thread(target=putting, daemon=True)
    thread.start()
    taken = []
    for number in range(8):
        before = acked[0]
        checkpoint = writer.checkpoint(scope="all" if number % 3 else "durable")
        after = acked[0] + 1  # one more may be durable and not told yet
        taken.append((checkpoint, before, after))
        if number % 4 == 3:
            compact(bench)
            collect(bench)
    stop.set()
    thread.join(30)
    for checkpoint, before, after in taken:
        rows = state_at(bench, checkpoint.id)
        assert sorted(rows) == list(range(len(rows)))
        assert before < len(rows) <= after + 1
    cut_off(store)
    with bench.memtable_writer(bench.faulty()) as successor:
        assert sorted(bench.state(successor.view())) == list(range(acked[0] + 1))


def test_scope_all_needs_a_memtable_and_options_are_checked(bench: Any) -> None:
    wal_only = bench.writer()
    with pytest.raises(hg.InvalidInputError):
        wal_only.checkpoint(scope="all")
    put(wal_only, {1: "a"})
    assert wal_only.checkpoint(scope="durable").expires is None
    for wrong in ({"scope": "some"}, {"ttl": 0}, {"ttl": -1}, {"ttl": True}, {"ttl": "1h"}, {"name": ""}, {"name": "x" * 201}):
        with pytest.raises(hg.InvalidInputError):
            wal_only.checkpoint(**wrong)
        if "scope" not in wrong:
            with pytest.raises(hg.InvalidInputError):
                bench.table.checkpoint(**wrong)
    with pytest.raises(hg.InvalidInputError):
        bench.table.checkpoint(scope="all")
    assert len(bench.table.checkpoints()) == 1


# -- K09


@pytest.mark.parametrize("kind", ["memory", "disk"])
@pytest.mark.parametrize("begun", [False, True])
def test_k09_a_lease_shorter_than_a_stall_gives_right_rows_or_says_that_it_is_over(kind: str, begun: bool, tmp_path: Path) -> None:
    table = memory_table() if kind == "memory" else hg.create_table(tmp_path / "t", SCHEMA, key="id")
    clock = Jumping()
    with table.shard("0000").writer() as writer:
        writer.put(pa.table({"id": range(200_000), "value": ["old"] * 200_000}, schema=SCHEMA))
        writer.flush()
        checkpoint = table.checkpoint(ttl=5.0)
        writer.put([{"id": id, "value": "new"} for id in range(10)])
        writer.flush()
        scan = table.scan(at=checkpoint)
        batches = scan.to_batches()
        got = [next(batches)] if begun else []
        table.compact(full=True)
        log = table.shard("0000").log
        clock.ahead = 100.0
        late = table._places.open_log("0000", log.table_id)
        object.__setattr__(late, "clock", clock)
        report = collect_shard(late, table._places.table_store(), dry_run=False, min_age=0.0)
        assert len(report.leases_ended) == 1
        assert report.objects["run"] >= 1
        try:
            got += list(batches)
        except hg.SnapshotExpiredError:
            assert begun
        except hg.NotFoundError:
            assert not begun, "a read that has begun is told that its snapshot expired"
        else:
            whole = pa.Table.from_batches(got)
            assert whole.num_rows == 200_000
            assert set(whole.column("value").to_pylist()) == {"old"}
        with pytest.raises(hg.NotFoundError):
            table.scan(at=checkpoint.id).count()
    assert values(table)[0] == "new"
    assert table.scan().count() == 200_000


def test_k09_a_lease_that_ends_while_the_log_of_a_checkpoint_is_read(make_bench: Any, crew: Any) -> None:
    clock = Jumping()
    bench = make_bench(clock=clock)
    writer = bench.memtable_writer(bench.faulty(), max_memtable_age=1e6)
    for number in range(5):
        put(writer, {number: "a"})
    checkpoint = writer.checkpoint(scope="durable", ttl=1.0)
    writer.flush()
    done: list[str] = []

    def end(operation: str, key: str) -> None:
        if operation == "get" and key.startswith("wal/") and not done:
            done.append(key)
            clock.ahead = 3600.0
            collect(bench)

    reader = bench.reader(bench.faulty(before=end))
    try:
        rows = Scan(lambda: [reader.view(checkpoint.id)], bench.rules).to_arrow().num_rows
    except (hg.SnapshotExpiredError, hg.NotFoundError):
        rows = None
    assert done
    assert rows in (None, 5)


# -- Q08: reads at a checkpoint


def test_q08_at_excludes_everything_newer_also_after_compaction_and_collection() -> None:
    table = memory_table(sharding=hg.bucket("id", 3))
    writer = table.writer()
    expected: dict[str, dict[int, str]] = {}
    model: dict[int, str] = {}
    pick = random.Random(8)
    for number in range(8):
        rows = {pick.randrange(30): f"{number}" for _ in range(6)}
        writer.put([{"id": id, "value": value} for id, value in rows.items()]).wait()
        model |= rows
        gone = pick.randrange(30)
        writer.delete([{"id": gone}]).wait()
        model.pop(gone, None)
        if number % 3 == 0:
            writer.flush()
        name = f"cp{number}"
        taken = table.checkpoint(name) if number % 2 else writer.checkpoint(name)
        expected[name] = dict(model)
        assert values(table, at=taken) == values(table, at=taken.id) == values(table, at=name) == model
        if number % 4 == 1:
            table.compact(full=number % 8 == 1)
        if number % 4 == 2:
            table.gc(dry_run=False, min_age=0)
        for handle in (table, hg.open_table(table.uri)):
            for known, rows in expected.items():
                assert values(handle, at=known) == rows
    writer.close()
    table.compact(full=True)
    table.gc(dry_run=False, min_age=0)
    for known, rows in expected.items():
        scan = table.scan(at=known, filter="value >= '3'")
        wanted = {id for id, value in rows.items() if value >= "3"}
        assert {row["id"] for row in scan.to_arrow().to_pylist()} == wanted
        assert scan.count() == len(wanted)
        assert table.scan(at=known, limit=2).count() == min(2, len(rows))
    for known in list(expected)[::2]:
        table.drop_checkpoint(known)
        table.gc(dry_run=False, min_age=0)
        del expected[known]
        with pytest.raises(hg.NotFoundError):
            table.scan(at=known).count()
        for other, rows in expected.items():
            assert values(hg.open_table(table.uri), at=other) == rows
    assert values(table) == model


def test_q08_options_that_cannot_be_honoured_raise() -> None:
    table = memory_table()
    with pytest.raises(hg.NotFoundError):
        table.scan(at="none").count()
    for wrong in ("", 7):
        with pytest.raises(hg.InvalidInputError):
            table.scan(at=wrong)  # type: ignore[arg-type]
    table.checkpoint("x")
    with pytest.raises(hg.InvalidInputError):
        table.scan(at="x", freshness="memory")
    assert table.scan(at="x").count() == 0


def test_q08_a_checkpoint_is_read_with_the_columns_of_now() -> None:
    table = memory_table()
    with table.shard("0000").writer() as writer:
        writer.put([{"id": 1, "value": "a"}])
        writer.flush()
        writer.put([{"id": 2, "value": "b"}]).wait()
        table.checkpoint("x")
        table.add_columns(pa.schema([pa.field("more", pa.int64())]))
        table.rename_column("value", "text")
        writer.put([{"id": 1, "text": "c", "more": 1}, {"id": 3, "text": "c", "more": 1}])
        writer.flush()
        table.compact(full=True)
        table.gc(dry_run=False, min_age=0)
        for handle in (table, hg.open_table(table.uri)):
            rows = sorted(handle.scan(at="x").to_arrow().to_pylist(), key=lambda row: row["id"])
            assert rows == [{"id": 1, "text": "a", "more": None}, {"id": 2, "text": "b", "more": None}]


def _by_tenant() -> tuple[hg.Table, Any]:
    schema = pa.schema([pa.field("id", pa.int64(), False), pa.field("tenant", pa.string(), False)])
    table = hg.create_table(f"memory://k-{next(_names)}", schema, key=["tenant", "id"], sharding=hg.identity("tenant"))
    return table, table.writer()


def test_q08_a_shard_that_was_made_after_a_checkpoint_is_not_part_of_it() -> None:
    table, writer = _by_tenant()
    writer.put([{"id": 1, "tenant": "m"}]).wait()
    checkpoint = table.checkpoint("x", ttl=1000.0)
    for tenant in ("a", "z"):
        writer.put([{"id": 2, "tenant": tenant}]).wait()
    writer.flush()
    for handle in (table, hg.open_table(table.uri)):
        assert handle.scan(at="x").to_arrow().to_pylist() == [{"id": 1, "tenant": "m"}]
    assert [known.complete for known in table.checkpoints()] == [True]
    table.refresh_checkpoint(checkpoint.id, ttl=2000.0)
    table.drop_checkpoint("x")
    assert table.checkpoints() == []
    writer.close()


def test_q08_a_second_checkpoint_of_the_same_name_is_refused_and_changes_nothing() -> None:
    """Also on shards that have none of that name, because they were made later."""
    table, writer = _by_tenant()
    writer.put([{"id": 1, "tenant": "m"}]).wait()
    table.checkpoint("x")
    writer.put([{"id": 2, "tenant": "a"}, {"id": 2, "tenant": "m"}]).wait()
    with pytest.raises(hg.AlreadyExistsError):
        table.checkpoint("x")
    with pytest.raises(hg.HeadgateError):
        writer.checkpoint("x")
    assert table.scan(at="x").to_arrow().to_pylist() == [{"id": 1, "tenant": "m"}]
    assert len(table.checkpoints()) == 1
    writer.close()


def test_a_table_checkpoint_cut_short_is_told_as_such_and_can_be_dropped(crash: Any) -> None:
    table = memory_table(sharding=hg.bucket("id", 3))
    with table.writer() as writer:
        writer.put([{"id": id, "value": "a"} for id in range(10)])
        writer.flush()
    met = 0

    def die(name: str) -> None:
        nonlocal met
        met += name == "commit.created"
        if met == 2:
            raise crash

    with hooked(die), pytest.raises(crash):
        table.checkpoint("x")
    assert [known.complete for known in table.checkpoints()] == [False]
    with pytest.raises(hg.NotFoundError):
        table.scan(at="x").count()
    with pytest.raises(hg.AlreadyExistsError):
        table.checkpoint("x")
    table.gc(dry_run=False, min_age=0)
    assert table.scan().count() == 10
    table.drop_checkpoint("x")
    assert table.checkpoints() == []
    table.checkpoint("x")
    assert table.scan(at="x").count() == 10


def test_leases_are_refreshed_listed_and_dropped() -> None:
    table = memory_table(sharding=hg.bucket("id", 2))
    one = table.checkpoint("one", ttl=60.0)
    two = table.checkpoint()
    assert [known.id for known in table.checkpoints()] == [one.id, two.id]
    assert one.expires is not None
    table.refresh_checkpoint("one", ttl=600.0)
    later = table.checkpoints()[0]
    assert later.expires is not None
    assert later.expires > one.expires + 500
    table.refresh_checkpoint(one.id)
    assert table.checkpoints()[0].expires is None
    table.drop_checkpoint("one")
    for action in (table.drop_checkpoint, table.refresh_checkpoint):
        with pytest.raises(hg.NotFoundError):
            action("one")
    assert [known.id for known in table.checkpoints()] == [two.id]
