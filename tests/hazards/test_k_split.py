"""K. Splitting a shard: K07, K13, K14. Nothing lost, nothing doubled, nothing in the wrong half, no shard stuck."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate import heirs
from headgate.clock import SYSTEM_CLOCK
from headgate.failpoint import hooked
from headgate.life import split as splits
from headgate.life.split import split_shard
from headgate.sharding import is_inside, range_of, ranges_of, split_rows

SCHEMA = pa.schema([pa.field("id", pa.int64(), False), pa.field("value", pa.string())])
STEPS = ["split.claimed", "split.flushed", "split.pinned", "split.child", "split.retired", "split.publish", "split.published"]
QUIET = hg.ShardWriterConfig(max_memtable_age=1e6)
_names = itertools.count()


class Died(BaseException):
    """A process that is gone: it cleans up nothing."""


def make(key: Any = "id", sharding: Any = None, schema: pa.Schema = SCHEMA) -> hg.Table:
    return hg.create_table(f"memory://split-{next(_names)}", schema, key=key, sharding=sharding or hg.bucket("id", 2))


def again(table: hg.Table) -> hg.Table:
    """As another process has it."""
    return hg.open_table(table.uri)


def values(table: hg.Table, **options: Any) -> dict[int, str]:
    rows = table.scan(**options).to_arrow().to_pylist()
    found = {row["id"]: row["value"] for row in rows}
    assert len(found) == len(rows), "no row twice"
    return found


def ids(table: hg.Table) -> list[int]:
    return sorted(table.scan(["id"]).to_arrow()["id"].to_pylist())


def put(writer: Any, rows: dict[int, str]) -> dict[int, str]:
    writer.put([{"id": id, "value": value} for id, value in rows.items()]).wait(timeout=60)
    return rows


def shards(table: hg.Table) -> list[str]:
    return [shard.id for shard in table.refresh().shards]


def in_the_right_half(table: hg.Table) -> None:
    """Each shard shows its own rows and no others."""
    table.refresh()
    for shard in table.shards:
        low, high = range_of(table.sharding, shard.id) or (0, 0)
        view = shard.reader.view()
        rows = hg.Scan(lambda view=view: [view], view.rules).to_arrow()["id"].combine_chunks()
        assert is_inside(rows, low, high).all(), shard.id


def whole(table: hg.Table, expected: dict[int, str]) -> None:
    for handle in (table, again(table)):
        assert values(handle) == expected
        assert handle.lookup(sorted(expected), ["id"])["id"].to_pylist() == sorted(expected)
    in_the_right_half(again(table))
    report = again(table).verify(deep=True)
    assert report.ok, report.problems


@contextmanager
def dying(step: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The splitter dies after a step."""

    def die(name: str) -> None:
        if name == step:
            raise Died(name)

    with monkeypatch.context() as patch:
        patch.setattr(splits, "_give_up", lambda log, split_id: None)
        with hooked(die), pytest.raises(Died):
            yield


@pytest.fixture
def leases_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A split that stands still may be taken back at once."""
    monkeypatch.setattr(splits, "LEASE_SECONDS", -1.0)


# -- routing


def test_ranges_say_the_same_as_buckets_and_a_split_moves_no_row_of_another_shard() -> None:
    rows = pa.RecordBatch.from_pydict({"id": pa.array(range(20_000))})
    for buckets in (1, 2, 3, 7, 64):
        rule = hg.bucket("id", buckets)
        before = {part.shard: part.rows["id"].to_pylist() for part in split_rows(rule, rows)}
        written_down = rule.but(ranges=ranges_of(rule))
        assert {part.shard: part.rows["id"].to_pylist() for part in split_rows(written_down, rows)} == before


def test_k07_a_part_holds_no_row_of_the_other_rows_of_the_log_included() -> None:
    table = make(sharding=hg.unsharded())
    writer = table.writer(QUIET)
    expected = put(writer, dict.fromkeys(range(200), "run"))
    writer.flush()
    expected |= put(writer, dict.fromkeys(range(100, 300), "log"))
    writer.delete([{"id": id} for id in range(0, 300, 7)]).wait(timeout=60)
    expected = {id: value for id, value in expected.items() if id % 7}
    writer.abort()
    names = table.split_shard("0000")
    assert shards(table) == list(names)
    whole(table, expected)
    one, two = (
        [row["id"] for row in s.reader.view() and hg.Scan(lambda s=s: [s.reader.view()], s.rules).to_arrow().to_pylist()]
        for s in table.shards
    )
    assert one
    assert two
    assert not set(one) & set(two)
    table.compact()
    assert sum(run.rows for run in table.runs()) <= len(expected) + 90, "rows of the other part are dropped by compaction"
    whole(table, expected)


def test_k13_reads_of_all_kinds_and_checkpoints_from_before(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), False), ("text", pa.string()), ("v", pa.list_(pa.float32(), 2))])
    table = hg.create_table(tmp_path / "t", schema, key="id", indexes=[hg.text_index("text"), hg.vector_index("v")])
    with table.writer() as writer:
        writer.put([{"id": id, "text": f"word{id % 5}", "v": [float(id), 0.0]} for id in range(100)]).wait()
    old = hg.open_table(tmp_path / "t")
    then = table.checkpoint("then")
    texts, near = table.search_text("text", "word3", k=100), table.search("v", [50.2, 0.0], k=5)
    table.split_shard("0000")
    with table.writer() as writer:
        writer.delete([{"id": 3}]).wait()
    for handle in (old, table):
        assert handle.scan().count() == 99
        assert handle.sql("select count(*) as n, min(id) as a from t")["n"].to_pylist() == [99]
        assert handle.search("v", [50.2, 0.0], k=5)["id"].to_pylist() == near["id"].to_pylist()
        assert sorted(handle.search_text("text", "word3", k=100)["id"].to_pylist()) == sorted(set(texts["id"].to_pylist()) - {3})
        assert handle.lookup([3, 4, 5])["id"].to_pylist() == [4, 5]
        assert handle.scan(at="then").count() == 100
        assert handle.lookup([3], at=then)["id"].to_pylist() == [3]
        assert [known.name for known in handle.checkpoints()] == ["then"]
    assert table.checkpoints()[0].complete
    table.refresh_checkpoint("then", ttl=100)
    twin = hg.clone(tmp_path / "t", tmp_path / "twin", checkpoint="then")
    assert twin.scan().count() == 100
    assert [shard.id for shard in twin.shards] == ["0000"]
    now = hg.clone(tmp_path / "t", tmp_path / "now")
    assert now.scan().count() == 99
    assert len(now.shards) == 2
    with now.writer() as writer, twin.writer() as other:
        writer.put([{"id": 1000, "text": "x", "v": None}]).wait()
        other.put([{"id": 1000, "text": "x", "v": None}]).wait()
    assert now.scan().count() == 100
    assert twin.scan().count() == 101


def test_k13_append_only_tables_and_what_is_refused() -> None:
    table = make(key=None, sharding=hg.bucket("id", 1))
    with table.writer() as writer:
        put(writer, dict.fromkeys(range(100), "a"))
        put(writer, dict.fromkeys(range(100), "b"))
    table.split_shard("0000")
    assert ids(table) == sorted([*range(100), *range(100)])
    table.compact()
    assert ids(again(table)) == sorted([*range(100), *range(100)])
    without = make(key=None, sharding=hg.unsharded())
    with pytest.raises(hg.InvalidInputError, match="by which column"):
        without.split_shard("0000")
    with without.writer() as writer:
        put(writer, dict.fromkeys(range(50), "a"))
    without.split_shard("0000", column="id")
    assert ids(without) == list(range(50))
    identity = make(sharding=hg.identity("id"))
    with identity.writer() as writer:
        put(writer, {1: "a"})
    with pytest.raises(hg.InvalidInputError, match="single values"):
        identity.split_shard("1")
    with pytest.raises(hg.NotFoundError, match="was split"):
        table.split_shard("0000")
    with pytest.raises(hg.NotFoundError):
        table.split_shard("nope")
    with pytest.raises(hg.InvalidInputError, match="not by 'value'"):
        table.split_shard(shards(table)[0], column="value")
    assert hg.create_table(without.uri, SCHEMA, if_exists="open").uri == without.uri


def test_k13_back_to_back_splits_until_compaction_and_collection_have_let_all_go() -> None:
    table, expected = make(), {}
    with table.writer() as writer:
        for number in range(6):
            expected |= put(writer, dict.fromkeys(range(number, 400, number + 1), f"{number}"))
            writer.flush()
    for _ in range(5):
        for shard in shards(table)[:2]:
            table.split_shard(shard)
    assert len(shards(table)) == 12
    whole(table, expected)
    table.checkpoint("kept")
    for _ in range(3):
        table.compact()
        table.gc(dry_run=False, min_age=0)
    whole(table, expected)
    assert values(table, at="kept") == expected
    table.drop_checkpoint("kept")
    for _ in range(8):
        table.gc(dry_run=False, min_age=0)
    for name in table._manifest.retired:
        assert not any(shard for shard in table._places.table_store().list(f"shards/{name}-{table._manifest.table_id}/runs/"))
    whole(table, expected)


# -- K14: a splitter that dies, a second one, loads


@pytest.mark.parametrize("step", STEPS)
def test_k14_a_splitter_that_dies_after_each_step_leaves_no_shard_stuck(
    step: str, monkeypatch: pytest.MonkeyPatch, leases_end: None
) -> None:
    table = make()
    writer = table.writer(QUIET)
    expected = put(writer, dict.fromkeys(range(100), "before"))
    with dying(step, monkeypatch):
        again(table).split_shard("0000")
    assert values(again(table)) == values(table) == expected
    expected |= put(writer, dict.fromkeys(range(50, 150), "after"))
    writer.close()
    assert (len(shards(again(table))) == 3) == (step in ("split.retired", "split.publish", "split.published"))
    whole(table, expected)
    # And once more, to the end: what the dead one left behind is in nobody's way.
    first = shards(again(table))[0]
    again(table).split_shard(first)
    again(table).gc(dry_run=False, min_age=0, sweep=True)
    folders = {info.key.split("/")[1] for info in table._places.table_store().list("shards/")}
    known = again(table)._manifest
    assert folders == {f"{name}-{known.table_id}" for name in (*known.shards, *known.retired)}, "what the dead one left is swept"
    whole(again(table), expected)
    for _ in range(3):
        again(table).compact()
        again(table).gc(dry_run=False, min_age=0)
    whole(again(table), expected)


@pytest.mark.parametrize("step", STEPS)
def test_k14_a_second_splitter_while_the_first_stands_still(step: str, leases_end: None) -> None:
    """Of two splits one happens, or both, one after the other; never half of each."""
    table, second = make(), []
    with table.writer() as writer:
        expected = put(writer, dict.fromkeys(range(200), "x"))

    def act(name: str) -> None:
        if name == step and not second:
            second.append("tried")
            other = again(table)
            try:
                other.split_shard("0000")
                second.append("split")
            except hg.HeadgateError:
                second.append("refused")

    with hooked(act):
        try:
            again(table).split_shard("0000")
            first = "split"
        except hg.HeadgateError:
            first = "refused"
    assert "split" in (first, second[1])
    assert len(shards(again(table))) == 3
    whole(again(table), expected)
    with again(table).writer() as writer:
        expected |= put(writer, dict.fromkeys(range(150, 250), "y"))
    whole(again(table), expected)


def test_k14_while_it_is_split_nobody_claims_and_no_load_is_announced() -> None:
    table, seen = make(), Counter[str]()
    with table.writer() as writer:
        expected = put(writer, dict.fromkeys(range(100), "x"))
    shard = table.shard("0000")

    def act(name: str) -> None:
        if name in ("split.claimed", "split.flushed", "split.pinned", "split.child"):
            for claim in (shard.writer, lambda: hg.WalAppender.open(shard), lambda: again(table).split_shard("0000")):
                with pytest.raises(hg.ShardSplitError, match="being split"):
                    claim()
            assert values(again(table)) == expected, "reads go on"
            seen[name] += 1

    with hooked(act):
        table.split_shard("0000")
    assert seen == {"split.claimed": 1, "split.flushed": 1, "split.pinned": 1, "split.child": 2}
    with pytest.raises(hg.ShardSplitError, match="was split"):
        shard.writer()
    whole(table, expected)


def test_k14_a_checkpoint_taken_meanwhile_is_of_the_whole_or_of_the_parts() -> None:
    for step in STEPS:
        table, taken = make(), []
        with table.writer() as writer:
            expected = put(writer, dict.fromkeys(range(60), "x"))

        def act(name: str, step: str = step, table: hg.Table = table, taken: list[Any] = taken) -> None:
            if name == step and not taken:
                taken.append(again(table).checkpoint(step))

        with hooked(act):
            table.split_shard("0000")
        with table.writer() as writer:
            put(writer, dict.fromkeys(range(60), "later"))
        table.compact(full=True)
        table.gc(dry_run=False, min_age=0)
        assert values(again(table), at=step) == expected, step


def test_planted_a_split_by_the_tables_manifest_alone_loses_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that claims the parent between the parts and the table is not refused, and what it acknowledges is in no part."""
    table = make(sharding=hg.unsharded())
    with table.writer() as writer:
        expected = put(writer, dict.fromkeys(range(20), "x"))
    monkeypatch.setattr("headgate.wal.fence.check_open", lambda log, manifest: None)
    publish = splits.publish
    monkeypatch.setattr(splits, "_retired", lambda *args: None)
    monkeypatch.setattr(splits, "publish", lambda watch, parent: publish(watch, parent.but(state="retired", split=kept[0])))
    kept: list[Any] = []

    def act(name: str) -> None:
        if name == "split.child" and not kept:
            kept.append(table.shard("0000").log.manifests.load().split)
            other = again(table).shard("0000").writer(QUIET)
            other.put([{"id": 99, "value": "acknowledged"}]).wait(timeout=60)
            other.abort()

    with hooked(act):
        table.split_shard("0000")
    assert len(shards(again(table))) == 2
    assert values(again(table)) != expected | {99: "acknowledged"}


def test_planted_parts_named_alike_in_every_try_show_what_a_dead_splitter_left(monkeypatch: pytest.MonkeyPatch, leases_end: None) -> None:
    table = make(sharding=hg.unsharded())
    with table.writer() as writer:
        put(writer, {1: "old", 2: "old"})
    begun = splits._begun
    monkeypatch.setattr(splits, "_begun", lambda log, m, id, ranges: begun(log, m.but(splits_begun=0), id, ranges))
    with dying("split.child", monkeypatch):
        again(table).split_shard("0000")
    with again(table).writer() as writer:
        put(writer, {1: "new", 2: "new"})
    with pytest.raises(hg.CommitConflictError, match="already"):  # it is refused, at least: the parts are there
        again(table).split_shard("0000")


LOAD_STEPS = ["bulk.joined", "transaction.announced", "transaction.decided", "load.tip", "transaction.placed"]


@pytest.mark.parametrize("step", LOAD_STEPS)
@pytest.mark.parametrize("key", ["id", None])
def test_k14_a_split_in_the_middle_of_a_load_waits_for_it_or_comes_before_it(step: str, key: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    table, tried = make(key=key), []
    with table.writer() as writer:
        put(writer, dict.fromkeys(range(100), "x"))
    monkeypatch.setattr(splits, "_LOADS_WAITS_MAX", 2)

    def act(name: str) -> None:
        if name == step and not tried:
            tried.append(name)
            try:
                again(table).split_shard("0000")
            except hg.CommitConflictError:
                tried.append("waits")

    with hooked(act):
        assert table.load(pa.table({"id": range(100, 200), "value": ["y"] * 100}, schema=SCHEMA), app="a", version=1).rows == 100
    assert tried
    if "0000" in shards(again(table)):
        again(table).split_shard("0000")
    assert not again(table).load(pa.table({"id": range(100, 200), "value": ["z"] * 100}, schema=SCHEMA), app="a", version=1).committed
    assert ids(again(table)) == list(range(200))
    in_the_right_half(again(table))


@pytest.mark.parametrize("step", STEPS)
def test_k14_a_load_in_the_middle_of_a_split_is_there_once(step: str) -> None:
    table, threads, failures = make(key=None), [], []
    with table.writer() as writer:
        put(writer, dict.fromkeys(range(100), "x"))

    def load() -> None:
        try:
            again(table).load(pa.table({"id": range(100, 200), "value": ["y"] * 100}, schema=SCHEMA))
        except BaseException as error:
            failures.append(error)

    def act(name: str) -> None:
        if name == step and not threads:
            threads.append(threading.Thread(target=load))
            threads[0].start()
            threads[0].join(0.05)

    with hooked(act):
        table.split_shard("0000")
    threads[0].join(60)
    assert not failures, failures
    assert ids(again(table)) == list(range(200))
    again(table).compact(full=True)
    assert ids(again(table)) == list(range(200))
    in_the_right_half(again(table))


# -- writers


@pytest.mark.parametrize("key", ["id", None])
@pytest.mark.parametrize("memtable", [True, False])
def test_k13_a_writer_that_was_fenced_by_a_split_goes_on_with_the_parts(key: Any, memtable: bool) -> None:
    table = make(key=key)
    config = hg.ShardWriterConfig(max_memtable_age=1e6, enable_memtable=memtable)
    writer = table.writer(config)
    put(writer, dict.fromkeys(range(50), "a"))
    again(table).split_shard("0000")
    acks = [writer.put([{"id": id, "value": "b"}]) for id in range(50, 100)]
    for ack in acks:
        ack.wait(timeout=60)
    assert set(writer.writers) == {"0000-0", "0000-1", "0001"}
    again(table).split_shard("0000-1")
    again(table).split_shard("0001")
    writer.put([{"id": id, "value": "c"} for id in range(100, 150)])
    writer.close()
    if memtable:
        assert ids(again(table)) == list(range(150))
        in_the_right_half(again(table))
    else:
        logged = [row["id"] for s in again(table).shards for e in hg.WalTailer(s).read() for b in e.batches for row in b.to_pylist()]
        with again(table).writer():
            pass
        assert len(logged) == len(set(logged))
        assert ids(again(table)) == list(range(150))


@pytest.mark.parametrize("how", ["nobody waits", "wait", "flush", "close", "await", "checkpoint"])
def test_k13_whoever_meets_the_fence_sends_again_what_never_happened(how: str) -> None:
    """Puts that are queued or under way when the shard is claimed: some landed, some did not."""
    import asyncio

    table = make(key=None, sharding=hg.bucket("id", 1))
    writer = table.writer(QUIET)
    put(writer, {-1: "first"})
    entered, go_on = threading.Event(), threading.Event()

    def hold(name: str) -> None:
        if name == "pipeline.encoded" and threading.current_thread().name.startswith("headgate-wal"):
            entered.set()
            assert go_on.wait(60)

    with hooked(hold):
        acks = [writer.put([{"id": id, "value": "x"}]) for id in range(40)]
        assert entered.wait(60)
        split_shard(again(table)._watch, table._places, "0000")
        acks += [writer.put([{"id": id, "value": "y"}]) for id in range(40, 50)] if how != "nobody waits" else []
        go_on.set()
        if how == "wait":
            for ack in acks:
                assert set(ack.wait(timeout=60)) <= {"0000", "0000-0", "0000-1"}
        elif how == "await":

            async def all_of_them() -> None:
                for ack in acks:
                    await ack

            asyncio.run(all_of_them())
        elif how == "flush":
            writer.flush()
        elif how == "checkpoint":
            writer.checkpoint("all")
    writer.close()
    count = 40 if how == "nobody waits" else 50
    assert ids(again(table)) == list(range(-1, count))
    for ack in acks:
        ack.wait(timeout=60)
    if how == "checkpoint":
        assert len(again(table).scan(at="all").to_arrow()) == 51


def test_k13_what_landed_before_the_seal_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A put whose reply is lost: durable by the log, not acknowledged to anybody."""
    table = make(key=None, sharding=hg.bucket("id", 1))
    writer = table.writer(QUIET)
    put(writer, {0: "a"})

    def split(name: str) -> None:
        if name == "pipeline.persisted" and not done:
            done.append(name)
            split_shard(again(table)._watch, table._places, "0000")

    done: list[str] = []
    with hooked(split):
        receipt = writer.put([{"id": 1, "value": "b"}]).wait(timeout=60)
    assert done
    assert set(receipt) <= {"0000", "0000-0", "0000-1"}
    put(writer, {2: "c"})
    writer.close()
    assert ids(again(table)) == [0, 1, 2]


def landed_and_not_known() -> list[int]:
    """The shard is split after an entry has landed and before its writer knows. What the table has in the end."""
    table = make(key=None, sharding=hg.bucket("id", 1))
    writer = table.writer(QUIET)
    put(writer, {0: "a"})
    persisted, go_on = threading.Event(), threading.Event()

    def hold(name: str) -> None:
        if name == "pipeline.persisted" and threading.current_thread().name.startswith("headgate-wal"):
            persisted.set()
            assert go_on.wait(60)

    with hooked(hold):
        ack = writer.put([{"id": 1, "value": "b"}])
        later = [writer.put([{"id": id, "value": "c"}]) for id in range(2, 5)]
        writer.writers["0000"]._pipeline.nudge()
        assert persisted.wait(60)
        split_shard(again(table)._watch, table._places, "0000")
        writer.check_fenced()  # finds the fence, and goes on with the parts
        go_on.set()
        assert set(ack.wait(timeout=60)) <= {"0000", "0000-0", "0000-1"}
        for one in later:
            one.wait(timeout=60)
    writer.close()
    return ids(again(table))


def test_k13_what_landed_is_not_sent_again_though_nobody_was_told() -> None:
    assert landed_and_not_known() == [0, 1, 2, 3, 4]


def test_planted_a_writer_that_does_not_look_at_the_segments_doubles_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heirs.Sent, "durable_at", lambda sent, ends: None)
    assert landed_and_not_known() != [0, 1, 2, 3, 4]


@pytest.mark.parametrize("seed", range(6))
def test_k13_puts_that_race_with_splits_are_there_once_each(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """A split right after an entry has landed and before its writer knows, at every so many entries."""
    table, random_ = make(key=None, sharding=hg.bucket("id", 1)), random.Random(seed)
    writer = table.writer(hg.ShardWriterConfig(max_memtable_age=1e6, max_inflight=3))
    busy = threading.Lock()

    def split(name: str) -> None:
        if (
            name in ("pipeline.persisted", "pipeline.encoded")
            and len(made) < 4
            and (not made or random_.random() < 0.2)
            and busy.acquire(blocking=False)
        ):
            try:
                made.append(name)
                fresh = again(table)
                split_shard(fresh._watch, table._places, random_.choice([shard.id for shard in fresh.shards]))
            except hg.ShardSplitError:
                pass
            finally:
                busy.release()

    made: list[str] = []
    with hooked(split):
        acks = [writer.put([{"id": 3 * number + i, "value": "x"} for i in range(3)]) for number in range(60)]
        for ack in acks:
            ack.wait(timeout=60)
    writer.close()
    assert made
    assert ids(again(table)) == list(range(180))
    in_the_right_half(again(table))


def test_k13_newer_versions_of_a_key_stay_newer_through_splits() -> None:
    table = make(sharding=hg.bucket("id", 1))
    writer = table.writer(hg.ShardWriterConfig(max_memtable_age=1e6, max_inflight=3))
    stop = threading.Event()
    failures: list[BaseException] = []

    def split() -> None:
        try:
            for _ in range(4):
                fresh = again(table)
                split_shard(fresh._watch, table._places, fresh.shards[0].id)
                stop.wait(0.05)
        except BaseException as error:
            failures.append(error)
        finally:
            stop.set()

    thread = threading.Thread(target=split)
    thread.start()
    number = 0
    while not stop.is_set() or number % 50:
        number += 1
        writer.put([{"id": id, "value": str(number)} for id in range(4)])
    thread.join()
    writer.close()
    assert not failures, failures
    assert values(again(table)) == dict.fromkeys(range(4), str(number))


def test_k13_producers_go_on_with_the_parts_and_repeats_are_known_there() -> None:
    table = make(key=None, sharding=hg.bucket("id", 2))
    writer = table.writer(QUIET)
    for sequence in range(5):
        writer.put([{"id": 10 * sequence + i, "value": "x"} for i in range(10)], producer="p", sequence=sequence).wait(timeout=60)
    again(table).split_shard("0000")
    for sequence in range(3, 8):
        writer.put([{"id": 10 * sequence + i, "value": "x"} for i in range(10)], producer="p", sequence=sequence).wait(timeout=60)
    writer.close()
    with again(table).writer() as other:
        for sequence in range(8):
            receipt = other.put([{"id": 10 * sequence + i, "value": "x"} for i in range(10)], producer="p", sequence=sequence)
            assert receipt.wait(timeout=60).duplicate
    assert ids(again(table)) == list(range(80))


def test_k14_a_writer_fenced_by_another_writer_does_not_take_the_parts_from_it() -> None:
    table = make()
    dead = table.writer(QUIET)
    put(dead, {1: "dead"})
    healthy = again(table).writer(QUIET)
    expected = {1: "dead"} | put(healthy, {2: "healthy"})
    again(table).split_shard("0000")
    again(table).split_shard("0001")
    with pytest.raises(hg.FencedError):
        dead.put([{"id": id, "value": "no"} for id in range(50)]).wait(timeout=60)
    expected |= put(healthy, dict.fromkeys(range(3, 50), "yes"))
    with pytest.raises(hg.FencedError):
        dead.close()
    healthy.close()
    whole(table, expected)


def test_k14_parts_that_another_writer_has_claimed_are_left_to_it() -> None:
    table = make()
    slow = table.writer(QUIET)
    expected = put(slow, dict.fromkeys(range(20), "a"))
    again(table).split_shard("0000")
    again(table).split_shard("0001")
    fast = again(table).writer(QUIET)
    expected |= put(fast, dict.fromkeys(range(10, 30), "b"))
    with pytest.raises(hg.FencedError):
        slow.put([{"id": id, "value": "c"} for id in range(30)]).wait(timeout=60)
    expected |= put(fast, {40: "d"})
    slow.abort()
    fast.close()
    whole(table, expected)


@pytest.mark.parametrize("step", ["fence.surveyed", "fence.claimed", "fence.before-seal", "fence.walked", "fence.verified"])
def test_k14_a_part_that_is_split_while_it_is_opened_is_followed_further(step: str) -> None:
    """Found under load: the claim of the heir was fenced by the next splitter, and taken for another writer's."""
    table = make(key=None, sharding=hg.bucket("id", 1))
    writer = table.writer(QUIET)
    put(writer, dict.fromkeys(range(30), "a"))
    again(table).split_shard("0000")
    done: list[str] = []

    def act(name: str) -> None:
        if name == step and not done:
            done.append(name)
            opening = "0000-0" if again(table).shard("0000-0").log.manifests.load().owner is not None else "0000-1"
            again(table).split_shard(opening)

    with hooked(act):
        put(writer, dict.fromkeys(range(30, 60), "b"))
    put(writer, dict.fromkeys(range(60, 90), "c"))
    writer.close()
    assert done
    assert len(shards(again(table))) == 3
    assert ids(again(table)) == list(range(90))


@pytest.mark.parametrize("step", ["table.heirs", "table.sent-again"])
def test_k14_a_recovery_that_is_cut_short_is_done_again(step: str) -> None:
    table = make(key=None, sharding=hg.bucket("id", 1))
    writer = table.writer(QUIET)
    put(writer, {0: "a"})
    again(table).split_shard("0000")
    failed: list[str] = []

    def act(name: str) -> None:
        if name == step and not failed:
            failed.append(name)
            raise hg.StoreUnavailableError("not now")

    ack = writer.put([{"id": 1, "value": "b"}])
    with hooked(act), pytest.raises(hg.StoreUnavailableError):
        ack.wait(timeout=60)
    put(writer, {2: "c"})
    ack.wait(timeout=60)
    writer.close()
    assert failed
    assert ids(again(table)) == [0, 1, 2]


def test_k14_a_put_waits_for_a_split_and_no_longer_than_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    table = make(sharding=hg.unsharded())
    writer = table.writer(hg.ShardWriterConfig(max_memtable_age=1e6, put_timeout=0.2))
    expected = put(writer, {1: "a"})
    with dying("split.flushed", monkeypatch):
        again(table).split_shard("0000")
    with pytest.raises((hg.BackpressureTimeoutError, TimeoutError)):
        writer.put([{"id": 2, "value": "b"}]).wait(timeout=0.2)
    now = SYSTEM_CLOCK.now()
    monkeypatch.setattr("headgate.clock.SystemClock.now", lambda clock: now + 1000)
    expected |= put(writer, {3: "c"})
    writer.close()
    found = values(again(table))
    assert found.items() >= expected.items()
    assert set(found) <= {1, 2, 3}


def test_k14_a_table_is_opened_for_writing_while_its_shards_are_split() -> None:
    table, opened = make(), []
    with table.writer() as writer:
        expected = put(writer, dict.fromkeys(range(50), "x"))
    stale = again(table)
    again(table).split_shard("0000")
    with stale.writer() as writer:
        expected |= put(writer, dict.fromkeys(range(40, 60), "y"))
        assert set(writer.writers) == {"0000-0", "0000-1", "0001"}

    def act(name: str) -> None:
        if name == "split.flushed" and not opened:
            thread = threading.Thread(target=lambda: opened.append(again(table).writer(QUIET)))
            threads.append(thread)
            thread.start()

    threads: list[threading.Thread] = []
    with hooked(act):
        again(table).split_shard("0001")
    threads[0].join(60)
    expected |= put(opened[0], dict.fromkeys(range(55, 70), "z"))
    opened[0].close()
    whole(table, expected)


def test_some_shards_only_go_on_as_the_parts_of_those() -> None:
    table = make()
    one, two = table.writer(QUIET, shards=["0000"]), again(table).writer(QUIET, shards=["0001"])
    again(table).split_shard("0000")
    parts = {
        part.shard: part.rows["id"].to_pylist() for part in split_rows(hg.bucket("id", 2), pa.RecordBatch.from_pydict({"id": range(50)}))
    }
    expected = put(one, dict.fromkeys(parts["0000"], "one")) | put(two, dict.fromkeys(parts["0001"], "two"))
    with pytest.raises(hg.InvalidInputError, match="does not hold"):
        one.put([{"id": parts["0001"][0], "value": "no"}])
    one.close()
    two.close()
    whole(table, expected)


# -- collection


@pytest.mark.parametrize("step", STEPS)
def test_k14_collection_and_compaction_at_every_step_take_nothing_of_the_parts(step: str) -> None:
    table, done = make(), []
    with table.writer() as writer:
        expected = put(writer, dict.fromkeys(range(100), "a"))
        writer.flush()
        expected |= put(writer, dict.fromkeys(range(50, 150), "b"))

    def act(name: str) -> None:
        if name == step and not done:
            done.append(name)
            for _ in range(2):
                again(table).compact(full=True)
                again(table).gc(dry_run=False, min_age=0, sweep=True)

    with hooked(act):
        again(table).split_shard("0000")
    for _ in range(3):
        again(table).gc(dry_run=False, min_age=0, sweep=True)
    whole(again(table), expected)
    again(table).compact(full=True)
    for _ in range(3):
        again(table).gc(dry_run=False, min_age=0, sweep=True)
    whole(again(table), expected)


def test_planted_parts_without_pins_lose_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    table = make()
    with table.writer() as writer:
        expected = put(writer, dict.fromkeys(range(100), "a"))
    pinned = splits._pinned
    monkeypatch.setattr(splits, "_pinned", lambda *args: pinned(*args).but(checkpoints={}))
    table.split_shard("0000")
    for _ in range(3):
        table.gc(dry_run=False, min_age=0)
    with pytest.raises(hg.HeadgateError):
        assert values(again(table)) == expected


def test_dropping_a_table_that_was_split_drops_all_its_shards() -> None:
    table = make()
    with table.writer() as writer:
        put(writer, dict.fromkeys(range(100), "a"))
    shard = table.shard("0000")
    table.split_shard("0000")
    hg.drop_table(table.uri, confirm=table.uri)
    with pytest.raises(hg.NotFoundError):
        shard.writer()
    left = [info.key for info in table._places.table_store().list("")]
    assert len([key for key in left if key.startswith("shards/")]) == 4
    assert not [key for key in left if "/runs/" in key or key.startswith("wal/")]
