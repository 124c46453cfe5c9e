"""K. Clones and drops: shallow, restartable at every step, pinned; and a table that is dropped stays dropped (F11, F12, G07)."""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate.clock import SYSTEM_CLOCK
from headgate.failpoint import hooked
from headgate.life import clone as clones
from headgate.store.memory import MemoryStore

SCHEMA = pa.schema([pa.field("id", pa.int64(), False), pa.field("value", pa.string())])
STEPS = [
    "clone.begun", "clone.pin", "clone.pinned", "clone.copied", "clone.shard", "clone.shards", "clone.finished", "clone.released",
]  # fmt: skip
DROPS = [
    "drop.begun", "drop.checked", "drop.shard", "drop.fenced", "drop.some", "drop.log", "drop.deleted", "drop.unpinned",
]  # fmt: skip
_names = itertools.count()


def fresh(what: str = "k") -> str:
    return f"memory://clones-{what}-{next(_names)}"


def values(table: hg.Table, **options: Any) -> dict[int, str]:
    rows = table.scan(**options).to_arrow().to_pylist()
    found = {row["id"]: row["value"] for row in rows}
    assert len(found) == len(rows)
    return found


def put(writer: Any, rows: dict[int, str]) -> dict[int, str]:
    writer.put([{"id": id, "value": value} for id, value in rows.items()]).wait(timeout=30)
    return rows


def objects(uri: str, prefix: str = "") -> dict[str, bytes]:
    store = MemoryStore(uri.removeprefix("memory://"))
    return {info.key: bytes(store.get(info.key)) for info in store.list(prefix)}


def delete(uri: str, prefix: str) -> int:
    store = MemoryStore(uri.removeprefix("memory://"))
    keys = [info.key for info in store.list(prefix)]
    store.delete(keys)
    return len(keys)


class Source:
    """A table with runs in two shards, and rows that are in the log only."""

    def __init__(self, **options: Any) -> None:
        self.uri = fresh("source")
        self.table = hg.create_table(self.uri, SCHEMA, key="id", sharding=hg.bucket("id", 2), **options)
        self.config = hg.ShardWriterConfig(max_memtable_age=1e6)
        self.writer = self.table.writer(self.config)
        self.rows = put(self.writer, dict.fromkeys(range(20), "run"))
        self.writer.flush()
        self.rows |= put(self.writer, dict.fromkeys(range(10, 30), "log"))
        self.checkpoint = self.table.checkpoint("then")
        self.then = dict(self.rows)

    def move_on(self) -> None:
        """All that could take away what the checkpoint holds: it is dropped, everything is rewritten and collected."""
        self.rows |= put(self.writer, dict.fromkeys(range(5, 40), "later"))
        self.writer.flush()
        self.writer.delete([{"id": 0}]).wait(timeout=30)
        self.rows.pop(0, None)
        self.writer.flush()
        self.drop_checkpoint()
        self.table.compact(full=True)
        self.table.gc(dry_run=False, min_age=0)

    def drop_checkpoint(self) -> None:
        for known in self.table.checkpoints():
            if known.clone is None:
                self.table.drop_checkpoint(known.id)

    def close(self) -> None:
        self.writer.abort()


@pytest.fixture
def source() -> Iterator[Source]:
    made = Source()
    yield made
    made.close()


@contextmanager
def stopping(step: str, crash: type[Exception], skip: int = 0) -> Iterator[None]:
    """The process dies when it has done ``step`` for the ``skip + 1``-th time."""
    left = [skip]

    def die(name: str) -> None:
        if name == step:
            left[0] -= 1
            if left[0] < 0:
                raise crash(name)

    with hooked(die):
        yield


# -- K05


@pytest.mark.parametrize(("step", "skip"), [*((step, 0) for step in STEPS), ("clone.pin", 1), ("clone.copied", 1), ("clone.shard", 1)])
def test_k05_a_clone_interrupted_after_each_step_and_retried_has_the_same_rows(
    source: Source, step: str, skip: int, crash: type[Exception]
) -> None:
    target = fresh()
    with stopping(step, crash, skip), pytest.raises(crash):
        hg.clone(source.uri, target, checkpoint="then")
    if step in ("clone.finished", "clone.released"):
        assert values(hg.open_table(target)) == source.then
    else:
        before = objects(target)
        with pytest.raises(hg.NotFoundError, match="not finished"):
            hg.open_table(target)
        assert objects(target) == before, "K10: opening it makes nothing of it"
    other = source.table.checkpoint("other")
    with pytest.raises(hg.AlreadyExistsError, match="begun from"):
        hg.clone(source.uri, target, checkpoint=other.id)
    twin = hg.clone(source.uri, target, checkpoint="then")
    source.move_on()
    assert values(twin) == values(hg.open_table(target)) == source.then
    assert twin.verify(deep=True).ok
    assert values(source.table) == source.rows


@pytest.mark.parametrize("step", STEPS[1:])
def test_k05_what_the_parent_loses_between_two_tries_is_pinned(source: Source, step: str, crash: type[Exception]) -> None:
    target = fresh()
    with stopping(step, crash), pytest.raises(crash):
        hg.clone(source.uri, target, checkpoint=source.checkpoint)
    if step != "clone.pin":  # else one shard was pinned, the other not
        source.move_on()
    twin = hg.clone(source.uri, target, checkpoint=source.checkpoint)
    assert values(twin) == source.then
    with twin.writer() as writer:
        extra = put(writer, {100: "mine"})
    assert values(twin) == source.then | extra
    assert values(source.table) == source.rows


def test_k05_a_checkpoint_that_goes_before_the_pin_is_refused_and_nothing_of_the_parent_is_held(
    source: Source, crash: type[Exception]
) -> None:
    target = fresh()
    with stopping("clone.begun", crash), pytest.raises(crash):
        hg.clone(source.uri, target, checkpoint="then")
    source.move_on()
    with pytest.raises(hg.NotFoundError, match="no checkpoint"):
        hg.clone(source.uri, target, checkpoint="then")
    assert source.table.checkpoints() == []
    hg.drop_table(target, confirm=target)
    again = source.table.checkpoint()
    assert values(hg.clone(source.uri, target, checkpoint=again)) == source.rows


def test_k05_without_a_checkpoint_it_is_what_is_durable_now_and_no_checkpoint_is_left(source: Source, crash: type[Exception]) -> None:
    source.drop_checkpoint()
    target = fresh()
    with stopping("clone.pinned", crash), pytest.raises(crash):
        hg.clone(source.uri, target)
    put(source.writer, {1000: "too late"})
    twin = hg.clone(source.uri, target)
    assert values(twin) == source.then
    assert [known.clone for known in source.table.checkpoints()] == [target]
    assert hg.clone(source.uri, target) == twin


def test_k05_two_at_once_make_one_clone(source: Source) -> None:
    target, busy = fresh(), []

    def other(name: str) -> None:
        if name in STEPS and not busy:
            busy.append(name)
            hg.clone(source.uri, target, checkpoint="then")
            busy.clear()

    with hooked(other):
        twin = hg.clone(source.uri, target, checkpoint="then")
    assert values(twin) == source.then
    assert twin.verify(deep=True).ok


def collection_at(step: str, source: Source) -> Callable[[str], None]:
    done: list[str] = []

    def act(name: str) -> None:
        if name == step and not done:
            done.append(name)
            source.move_on()

    return act


@pytest.mark.parametrize("step", ["clone.pinned", "clone.copied", "clone.shard", "clone.shards", "clone.finished", "clone.released"])
def test_g07_a_parent_that_compacts_and_collects_while_it_is_cloned_loses_nothing_of_the_clone(source: Source, step: str) -> None:
    with hooked(collection_at(step, source)):
        twin = hg.clone(source.uri, fresh(), checkpoint="then")
    assert values(twin) == source.then
    assert twin.verify(deep=True).ok
    assert values(source.table) == source.rows


def test_planted_a_pin_after_the_copy_loses_rows(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above would notice it."""

    def not_yet(self: Any, clone: Any, parent: Any, uri: str) -> list[Any]:
        return [(self.log(name).manifests.load().checkpoints[parent.checkpoint], self.log(name)) for name in parent.shards]

    monkeypatch.setattr(clones._Origin, "pin", not_yet)

    def cloned() -> dict[int, str]:
        return values(hg.clone(source.uri, fresh(), checkpoint="then"))

    with pytest.raises(hg.HeadgateError), hooked(collection_at("clone.pinned", source)):
        cloned()


def test_g07_a_lease_that_ends_beside_the_pin_is_before_it_or_after_it(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """Collection takes leases out by a commit, and the pin is added by one that sees the lease: no clock decides."""
    for step, expected in (("clone.begun", "refused"), ("clone.pinned", "cloned")):
        lease = source.table.checkpoint(ttl=5)
        rows, target = dict(source.rows), fresh()
        ended: list[str] = []

        def end(name: str, step: str = step, ended: list[str] = ended) -> None:
            if name == step and not ended:
                with monkeypatch.context() as patch:
                    start = SYSTEM_CLOCK.now()
                    patch.setattr("headgate.clock.SystemClock.now", lambda clock: start + 1000)
                    report = source.table.gc(dry_run=False, min_age=0)
                ended.extend(report.leases_ended)
                source.table.compact(full=True)
                source.table.gc(dry_run=False, min_age=0)

        with hooked(end):
            if expected == "refused":
                with pytest.raises(hg.NotFoundError):
                    hg.clone(source.uri, target, checkpoint=lease)
            else:
                assert values(hg.clone(source.uri, target, checkpoint=lease)) == rows
        assert ended


# -- K06


def test_k06_a_chain_of_clones_whose_ancestors_checkpoints_are_dropped(source: Source) -> None:
    first = hg.clone(source.uri, fresh(), checkpoint="then")
    source.move_on()
    with first.writer() as writer:
        mine = source.then | put(writer, {50: "first"})
    second = hg.clone(first.uri, fresh(), wal_uri=fresh("wal"))
    with first.writer() as writer:
        writer.delete([{"id": id} for id in mine]).wait(timeout=30)
    first.compact(full=True)
    first.gc(dry_run=False, min_age=0)
    source.table.gc(dry_run=False, min_age=0)
    assert values(first) == {}
    assert values(second) == mine
    third = hg.clone(second.uri, fresh())
    assert [known.clone for known in first.checkpoints()] == [second.uri]
    assert [known.clone for known in source.table.checkpoints()] == [first.uri], "the first clone's checkpoint names its files"
    assert values(third) == values(second) == mine
    third.detach()
    second.detach()
    first.detach()
    assert [table.checkpoints() for table in (source.table, first, second)] == [[], [], []]
    source.table.gc(dry_run=False, min_age=0)
    hg.drop_table(source.uri, confirm=source.uri)
    assert values(third) == values(second) == mine
    assert third.verify(deep=True).ok
    assert {part.uri.split("/shards/")[0] for run in third.runs() for part in run.slices} == {third.uri}


def test_k06_a_clone_in_the_middle_that_lets_go_early_would_lose_its_own_clone(source: Source) -> None:
    """It reads the grandparent's files through the pin of the one in the middle."""
    first = hg.clone(source.uri, fresh(), checkpoint="then")
    second = hg.clone(first.uri, fresh())
    source.move_on()
    with pytest.raises(hg.InvalidInputError, match="still reads its parent's files: checkpoint"):
        first.detach()
    source.table.gc(dry_run=False, min_age=0)
    assert values(second) == values(first) == source.then
    second.detach()
    first.detach()
    assert source.table.checkpoints() == []


def test_detach_is_held_back_by_a_checkpoint_of_the_clone_and_goes_on_without_it(source: Source) -> None:
    twin = hg.clone(source.uri, fresh(), checkpoint="then")
    twin.checkpoint("old")
    with pytest.raises(hg.InvalidInputError, match="checkpoint old"):
        twin.detach()
    source.move_on()
    assert values(twin, at="old") == source.then
    twin.drop_checkpoint("old")
    twin.detach()
    assert source.table.checkpoints() == []
    twin.detach()
    source.table.gc(dry_run=False, min_age=0)
    assert values(twin) == source.then


def test_compaction_detaches_step_by_step_and_collection_lets_go_of_the_parent(source: Source) -> None:
    twin = hg.clone(source.uri, fresh(), checkpoint="then")
    source.drop_checkpoint()
    twin.gc(dry_run=False, min_age=0)
    assert [known.clone for known in source.table.checkpoints()] == [twin.uri]
    with twin.writer() as writer:
        rows = source.then | put(writer, dict.fromkeys(range(200), "new"))
    twin.compact(full=True)
    assert [known.clone for known in source.table.checkpoints()] == [twin.uri], "not before collection has looked"
    twin.gc(dry_run=False, min_age=0)
    assert source.table.checkpoints() == []
    assert values(twin) == rows


@pytest.mark.parametrize("step", ["detach.shard", "detach.unpinned"])
def test_detach_interrupted_and_repeated(source: Source, step: str, crash: type[Exception]) -> None:
    twin = hg.clone(source.uri, fresh(), checkpoint="then")
    with stopping(step, crash), pytest.raises(crash):
        twin.detach()
    source.move_on()
    assert values(twin) == source.then
    twin.detach()
    assert source.table.checkpoints() == []
    assert values(twin) == source.then


def test_a_users_drop_of_the_pin_is_refused_and_a_clones_collection_leaves_the_parents_files_alone(source: Source) -> None:
    twin = hg.clone(source.uri, fresh(), checkpoint="then")
    (pin,) = [known for known in source.table.checkpoints() if known.clone]
    with pytest.raises(hg.InvalidInputError, match="detach"):
        source.table.drop_checkpoint(pin.id)
    before = objects(source.uri, "shards/")
    twin.compact(full=True)
    with twin.writer() as writer:
        put(writer, dict.fromkeys(range(100), "x"))
    twin.gc(dry_run=False, min_age=0, sweep=True)
    after = objects(source.uri, "shards/")
    assert {key for key in before if "/runs/" in key} <= set(after)


def test_producers_are_known_to_the_clone_and_go_their_own_way(source: Source) -> None:
    source.writer.put([{"id": 1, "value": "p"}], producer="p", sequence=7).wait(timeout=30)
    at = source.table.checkpoint()
    source.writer.put([{"id": 1, "value": "q"}], producer="p", sequence=8).wait(timeout=30)
    source.writer.flush()
    twin = hg.clone(source.uri, fresh(), checkpoint=at)
    with twin.writer() as writer:
        assert writer.put([{"id": 1, "value": "again"}], producer="p", sequence=7).wait(timeout=30).duplicate
        assert not writer.put([{"id": 1, "value": "mine"}], producer="p", sequence=8).wait(timeout=30).duplicate
    assert values(twin)[1] == "mine"
    assert values(source.table)[1] == "q"


# -- K10, K11


def test_k10_a_clone_that_should_exist_is_never_made_empty(source: Source) -> None:
    target = fresh()
    with pytest.raises(hg.NotFoundError):
        hg.clone(source.uri, target, checkpoint="no such")
    with pytest.raises(hg.NotFoundError):
        hg.clone(fresh("nowhere"), target)
    assert objects(target) == {}
    with pytest.raises(hg.NotFoundError):
        hg.open_table(target)
    hg.create_table(target, SCHEMA)
    with pytest.raises(hg.AlreadyExistsError):
        hg.clone(source.uri, target, checkpoint="then")
    with pytest.raises(hg.AlreadyExistsError):
        hg.clone(source.uri, source.uri, checkpoint="then")


def entries(source: Source, shard: str) -> list[str]:
    log = source.table.shard(shard).log
    manifest = log.manifests.load()
    record = manifest.checkpoints[source.checkpoint.id]
    pinned = log.manifests.at(record.version)
    points = [point for point, info in log.space(manifest).list_from(0) if pinned.cursor.position <= point.position < record.end]
    return [log.space(manifest).key(*point) for point in points]


def lose(source: Source, keys: list[str]) -> None:
    MemoryStore(source.uri.removeprefix("memory://")).delete(keys)


def test_k11_a_missing_entry_is_taken_from_the_runs_that_cover_it(source: Source) -> None:
    source.writer.flush()  # exactly up to where the checkpoint ends
    lost = entries(source, "0000")
    assert lost
    lose(source, lost)
    target = fresh()
    twin = hg.clone(source.uri, target, checkpoint="then")
    assert values(twin) == source.then
    source.move_on()
    assert values(hg.open_table(target)) == source.then, "the pin holds the runs that were taken"
    assert twin.verify(deep=True).ok


def test_k11_a_missing_entry_that_no_run_covers_is_loss(source: Source) -> None:
    lose(source, entries(source, "0000"))
    target = fresh()
    with pytest.raises(hg.WalHoleError) as caught:
        hg.clone(source.uri, target, checkpoint="then")
    assert "source_wal_uri" in caught.value.hint
    with pytest.raises(hg.NotFoundError, match="not finished"):
        hg.open_table(target)


def test_k11_a_run_that_goes_past_the_checkpoint_does_not_cover(source: Source) -> None:
    """It holds rows that came after: the clone would show what was not there then."""
    lost = entries(source, "0000")
    put(source.writer, dict.fromkeys(range(60), "after"))
    source.writer.flush()
    lose(source, lost)
    with pytest.raises(hg.WalHoleError):
        hg.clone(source.uri, fresh(), checkpoint="then")


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_k11_runs_cover_the_start_of_the_range_and_the_log_has_the_rest(lost: int, crash: type[Exception]) -> None:
    """A missing entry of the start is taken from a run; a missing one of the rest is an error."""
    uri, rows = fresh("source"), {}
    table = hg.create_table(uri, SCHEMA, key="id")
    with table.writer(hg.ShardWriterConfig(enable_memtable=False)) as writer:
        for number in range(3):
            rows |= put(writer, {number: "x", 10: f"{number}"})
    at = table.checkpoint()
    with stopping("replay.flushed", crash), pytest.raises(crash):
        table.writer(hg.ShardWriterConfig(max_memtable_batches=1))
    log = table.shard("0000").log
    manifest = log.manifests.load()
    assert manifest.cursor.position == 1
    log.wal_store.delete([log.space(manifest).key(1, lost)])
    if lost:
        with pytest.raises(hg.WalHoleError):
            hg.clone(uri, fresh(), checkpoint=at)
        return
    twin = hg.clone(uri, fresh(), checkpoint=at)
    assert values(twin) == rows
    with twin.writer() as other:
        rows |= put(other, {11: "y"})
    assert values(twin) == rows


def test_k11_a_seal_that_is_missing_is_known_from_the_manifest() -> None:
    uri = fresh("source")
    table = hg.create_table(uri, SCHEMA, key="id")
    config, rows = hg.ShardWriterConfig(max_memtable_age=1e6), {}
    for number in range(3):
        writer = table.writer(config)
        rows |= put(writer, {number: "x"})
        writer.abort()
    at = table.checkpoint()
    writer = table.writer(config)  # knows where all epochs ended
    store = MemoryStore(uri.removeprefix("memory://"))
    seals = [info.key for info in store.list("wal/") if info.size_bytes == 1024]
    assert len(seals) == 3
    store.delete(seals)
    twin = hg.clone(uri, fresh(), checkpoint=at)
    assert values(twin) == rows
    with twin.writer() as other:
        rows |= put(other, {9: "y"})
    assert values(twin) == rows
    assert twin.verify(deep=True).ok
    writer.abort()


# -- the scenario of the whole, K03, K08


def scenario(tmp_path: Path, *, all_covered: bool) -> tuple[Path, hg.Checkpoint | None, dict[int, str]]:
    table = hg.create_table(tmp_path / "t", SCHEMA, key="id", sharding=hg.bucket("id", 2), wal_uri=tmp_path / "wal")
    with table.writer() as writer:
        rows = put(writer, dict.fromkeys(range(50), "a"))
    for _ in range(4):
        table.writer().close()
        table.writer().abort()
    writer = table.writer(hg.ShardWriterConfig(max_memtable_age=1e6))
    rows |= put(writer, dict.fromkeys(range(40, 60), "b"))
    at = writer.checkpoint("all", scope="all")
    if not all_covered:
        put(writer, {7: "not covered"})
        writer.abort()
    else:
        writer.close()
    return tmp_path, at, rows


def test_k03_idle_reopens_scope_all_the_log_deleted_parent_and_clone_open_with_every_row(tmp_path: Path) -> None:
    _, at, rows = scenario(tmp_path, all_covered=True)
    assert at is not None
    shutil.rmtree(tmp_path / "wal")
    table = hg.open_table(tmp_path / "t")
    twin = hg.clone(tmp_path / "t", tmp_path / "twin", checkpoint=at.id, wal_uri=tmp_path / "wal2")
    assert not (tmp_path / "wal").exists(), "nothing of the log was needed, or made"
    assert values(table) == values(twin) == rows
    with table.writer() as writer, twin.writer() as other:
        mine, theirs = rows | put(writer, {1: "mine"}), rows | put(other, {1: "theirs"})
    assert values(hg.open_table(tmp_path / "t")) == mine
    assert values(hg.open_table(tmp_path / "twin")) == theirs
    assert table.verify(deep=True).ok
    assert twin.verify(deep=True).ok
    assert (tmp_path / "wal2").exists()
    assert not (tmp_path / "twin" / "wal").exists(), "its log is in its own store"


def test_k03_with_one_uncovered_entry_the_parent_is_refused_and_a_durable_clone_too(tmp_path: Path) -> None:
    _, at, rows = scenario(tmp_path, all_covered=False)
    durable = hg.open_table(tmp_path / "t").checkpoint("durable")
    shutil.rmtree(tmp_path / "wal")
    table = hg.open_table(tmp_path / "t")
    with pytest.raises(hg.WalStoreMismatchError) as caught:
        table.writer()
    assert "wal_uri" in caught.value.hint
    with pytest.raises(hg.WalStoreMismatchError):
        values(table)
    with pytest.raises(hg.WalHoleError):
        hg.clone(tmp_path / "t", tmp_path / "twin", checkpoint=durable.id, wal_uri=tmp_path / "wal2")
    with pytest.raises(hg.WalStoreMismatchError):
        hg.clone(tmp_path / "t", tmp_path / "now")
    assert at is not None
    assert values(hg.clone(tmp_path / "t", tmp_path / "twin2", checkpoint=at.id, wal_uri=tmp_path / "wal2")) == rows


def test_a_clone_on_disk_is_read_and_written_by_lance(tmp_path: Path) -> None:
    table = hg.create_table(tmp_path / "t", SCHEMA, key="id")
    with table.writer() as writer:
        rows = put(writer, dict.fromkeys(range(100), "a"))
        writer.flush()
        rows |= put(writer, dict.fromkeys(range(50, 150), "b"))
    twin = hg.clone(tmp_path / "t", tmp_path / "twin")
    assert values(twin) == rows
    assert twin.lookup([7, 60])["value"].to_pylist() == ["a", "b"]
    assert twin.sql("select count(*) as n from t")["n"].to_pylist() == [150]
    assert all(part.uri.startswith(str(tmp_path / "t")) for run in twin.runs() for part in run.slices)
    twin.detach()
    assert all(part.uri.startswith(str(tmp_path / "twin")) for run in twin.runs() for part in run.slices)
    hg.drop_table(tmp_path / "t", confirm=tmp_path / "t")
    assert values(hg.open_table(tmp_path / "twin")) == rows


def test_a_clone_takes_as_many_requests_however_many_rows_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for rows in (10, 10_000):
        uri, asked = fresh("source"), Counter[str]()
        table = hg.create_table(uri, SCHEMA, key="id")
        with table.writer() as writer:
            put(writer, dict.fromkeys(range(rows), "x"))
        at = table.checkpoint()
        with monkeypatch.context() as patch:
            for name in ("get", "list", "create", "head"):
                real = getattr(MemoryStore, name)

                def counted(self: Any, *args: Any, name: str = name, real: Any = real, asked: Any = asked, **options: Any) -> Any:
                    asked[name] += 1
                    assert name != "list" or "/runs/" not in args[0], "no data is listed"
                    return real(self, *args, **options)

                patch.setattr(MemoryStore, name, counted)
            hg.clone(uri, fresh(), checkpoint=at)
        counts.append(asked)
    assert counts[0] == counts[1]


# -- dropping


@pytest.mark.parametrize("step", DROPS)
def test_f11_a_drop_interrupted_after_each_step_is_not_opened_and_dropping_again_ends_it(
    source: Source, step: str, crash: type[Exception]
) -> None:
    target = fresh()
    hg.clone(source.uri, target, checkpoint="then")
    with stopping(step, crash), pytest.raises(crash):
        hg.drop_table(target, confirm=target)
    with pytest.raises(hg.NotFoundError):
        hg.open_table(target)
    with pytest.raises(hg.HeadgateError):
        hg.create_table(target, SCHEMA)
    hg.drop_table(target, confirm=target)
    assert [known.clone for known in source.table.checkpoints()] == [None], "its pins are gone, the user's checkpoint is not"
    assert {key.split("/")[0] for key in objects(target)} == {"table", "shards"}
    assert len(objects(target)) == 3, "one object for the table, one for each shard"
    with pytest.raises(hg.NotFoundError):
        hg.drop_table(target, confirm=target)
    again = hg.create_table(target, SCHEMA, key="id")
    with again.writer() as writer:
        rows = put(writer, {1: "new"})
    assert values(hg.open_table(target)) == rows


def test_f11_a_dropped_table_cannot_be_claimed_by_whoever_opened_it_before(source: Source) -> None:
    table, shard = hg.open_table(source.uri), source.table.shard("0000")
    hg.drop_table(source.uri, confirm=source.uri)
    for claim in (table.writer, shard.writer, lambda: hg.WalAppender.open(shard)):
        with pytest.raises(hg.NotFoundError):
            claim()
    with pytest.raises(hg.FencedError):
        source.writer.check_fenced()
    with pytest.raises(hg.NotFoundError):
        values(table)


def test_f11_f12_a_claimant_that_stalls_over_the_drop_learns_that_its_claim_did_not_happen(source: Source) -> None:
    shard, dropped = hg.open_table(source.uri).shard("0000"), []

    def drop(name: str) -> None:
        if name == "commit.loaded" and not dropped:
            dropped.append(name)
            hg.drop_table(source.uri, confirm=source.uri)

    with hooked(drop), pytest.raises(hg.NotFoundError):
        shard.writer()
    assert dropped


def test_f12_a_change_of_columns_that_stalls_over_drop_and_create_does_not_come_back(source: Source) -> None:
    table, dropped = hg.open_table(source.uri), []

    def drop(name: str) -> None:
        if name == "commit.loaded" and not dropped:
            dropped.append(name)
            hg.drop_table(source.uri, confirm=source.uri)
            hg.create_table(source.uri, SCHEMA, key="id")

    with hooked(drop), pytest.raises(hg.NotFoundError):
        table.add_columns(pa.schema([("late", pa.string())]))
    assert dropped
    assert hg.open_table(source.uri).schema.names == ["id", "value"]
    assert values(hg.open_table(source.uri)) == {}


def test_a_drop_is_refused_while_clones_read_the_table_and_nothing_has_changed(source: Source) -> None:
    twin = hg.clone(source.uri, fresh(), checkpoint="then")
    with pytest.raises(hg.InvalidInputError, match=twin.uri):
        hg.drop_table(source.uri, confirm=source.uri)
    put(source.writer, {1: "still"})
    assert values(hg.open_table(source.uri))[1] == "still"
    hg.drop_table(twin.uri, confirm=twin.uri)
    hg.drop_table(source.uri, confirm=source.uri)


def test_a_drop_needs_the_uri_twice(source: Source) -> None:
    with pytest.raises(hg.InvalidInputError, match="confirm"):
        hg.drop_table(source.uri, confirm="yes")
    assert values(source.table) == source.rows


@pytest.mark.parametrize("step", ["drop.begun", "drop.checked", "drop.fenced"])
def test_a_clone_begun_while_its_source_is_dropped_is_refused_or_holds_it(source: Source, step: str) -> None:
    target, outcome = fresh(), []

    def clone(name: str) -> None:
        if name == step and not outcome:
            outcome.append("begun")
            with pytest.raises(hg.NotFoundError):
                hg.clone(source.uri, target, checkpoint="then")

    with hooked(clone):
        hg.drop_table(source.uri, confirm=source.uri)
    assert outcome
    with pytest.raises(hg.NotFoundError):
        hg.open_table(target)


@pytest.mark.parametrize("step", ["clone.begun", "clone.pin", "clone.pinned", "clone.shard", "clone.finished"])
def test_a_source_dropped_while_it_is_cloned_is_kept_or_the_clone_is_refused(source: Source, step: str) -> None:
    target, outcome = fresh(), []

    def drop(name: str) -> None:
        if name == step and not outcome:
            outcome.append("tried")
            try:
                hg.drop_table(source.uri, confirm=source.uri)
                outcome.append("dropped")
            except hg.InvalidInputError:
                outcome.append("kept")

    with hooked(drop):
        try:
            twin = hg.clone(source.uri, target, checkpoint="then")
        except hg.NotFoundError:
            assert outcome[1] == "dropped"
            return
    assert outcome[1] == "kept"
    assert values(twin) == source.then
    assert values(hg.open_table(source.uri)) == source.rows


def test_planted_a_cloner_that_does_not_look_again_loses_its_rows(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dropper has looked for pins, then the clone is pinned: without the look at the table's manifest it reads what is deleted."""
    made: list[hg.Table] = []

    def clone_in_between(name: str) -> None:
        if name == "drop.checked" and not made:
            made.append(hg.Table(target, clones.clone_table(parent, target, "then")))

    parent = source.table._places
    target = type(parent)(type(parent.table).parse(fresh()))
    origin = clones._Origin.open(parent)
    monkeypatch.setattr(clones._Origin, "open", lambda places: origin)
    stale = origin.chain.load()
    monkeypatch.setattr(origin.chain, "load", lambda: stale)
    with hooked(clone_in_between):
        hg.drop_table(source.uri, confirm=source.uri)
    with pytest.raises(hg.HeadgateError):
        values(made[0])


# -- K08: another WAL store


@pytest.mark.parametrize("single", [True, False])
def test_k08_the_store_of_the_log_is_changed_once_it_is_clean_and_found_by_whoever_opens_the_table(tmp_path: Path, single: bool) -> None:
    sharding = hg.unsharded() if single else hg.bucket("id", 2)
    table = hg.create_table(tmp_path / "t", SCHEMA, key="id", sharding=sharding)
    writer = table.writer(hg.ShardWriterConfig(max_memtable_age=1e6))
    rows = put(writer, dict.fromkeys(range(20), "a"))
    writer.abort()
    moved = hg.open_table(tmp_path / "t", wal_uri=tmp_path / "fast")
    with pytest.raises(hg.WalStoreMismatchError) as caught:
        moved.writer()
    assert caught.value.hint
    assert not (tmp_path / "fast" / "wal").exists(), "nothing was written"
    table.writer().close()  # with the old store at hand: claim, seal, flush
    with moved.writer() if not single else moved.shard("0000").writer() as writer:
        rows |= put(writer, dict.fromkeys(range(10, 30), "b"))
        writer.flush()
        rows |= put(writer, {1: "c"})
    found = hg.open_table(tmp_path / "t")
    assert values(found) == rows
    assert all(shard.wal_store == str(tmp_path / "fast") for shard in found.status().shards)
    with found.writer() as writer:
        rows |= put(writer, {2: "d"})
    assert values(hg.open_table(tmp_path / "t")) == rows
    assert found.verify(deep=True).ok
    # And back beside the table.
    with hg.open_table(tmp_path / "t", wal_uri=tmp_path / "t").writer() as writer:
        rows |= put(writer, {3: "e"})
    shutil.rmtree(tmp_path / "fast")
    assert values(hg.open_table(tmp_path / "t")) == rows


def test_k08_a_clone_does_not_inherit_the_parents_store(tmp_path: Path) -> None:
    table = hg.create_table(tmp_path / "t", SCHEMA, key="id", wal_uri=tmp_path / "wal")
    with table.writer() as writer:
        rows = put(writer, dict.fromkeys(range(20), "a"))
    writer = table.writer(hg.ShardWriterConfig(max_memtable_age=1e6))
    rows |= put(writer, {1: "in the log"})
    twin = hg.clone(tmp_path / "t", tmp_path / "twin")
    writer.abort()
    shutil.rmtree(tmp_path / "wal")
    assert values(twin) == values(hg.open_table(tmp_path / "twin")) == rows
    assert [shard.wal_store for shard in twin.status().shards] == [str(tmp_path / "twin")]
    with twin.writer() as other:
        rows |= put(other, {2: "b"})
    assert values(twin) == rows


# -- a clone that is split


def test_a_clone_is_split_and_detached_and_nothing_of_the_parent_is_left(source: Source) -> None:
    twin = hg.clone(source.uri, fresh(), checkpoint="then")
    first = twin.split_shard("0000")[0]
    twin.split_shard(first)
    source.move_on()
    assert values(twin) == source.then
    with twin.writer() as writer:
        rows = source.then | put(writer, dict.fromkeys(range(25, 60), "x"))
    with pytest.raises(hg.InvalidInputError, match="still reads"):
        twin.detach()  # what was split pins the states that it had then
    assert values(twin) == rows
    for _ in range(4):
        twin.gc(dry_run=False, min_age=0)
    twin.detach()
    assert source.table.checkpoints() == []
    source.table.gc(dry_run=False, min_age=0)
    assert values(hg.open_table(twin.uri)) == rows
    assert twin.verify(deep=True).ok


@pytest.mark.parametrize("step", ["split.claimed", "split.child", "split.retired", "split.published"])
def test_a_table_whose_shard_is_being_split_is_cloned_as_it_is(source: Source, step: str) -> None:
    source.writer.close()
    made: list[hg.Table] = []

    def clone(name: str) -> None:
        if name == step and not made:
            made.append(hg.clone(source.uri, fresh()))

    stale = hg.open_table(source.uri)
    with hooked(clone):
        source.table.split_shard("0000")
    made.append(hg.clone(stale.uri, fresh()))
    for twin in made:
        assert values(twin) == source.rows
    assert [known.clone for known in source.table.checkpoints() if known.name is None] == [twin.uri for twin in made]


def test_the_pin_of_a_clone_that_was_deleted_by_hand_can_be_dropped(source: Source) -> None:
    twin = hg.clone(source.uri, fresh(), checkpoint="then")
    (pin,) = [known.id for known in source.table.checkpoints() if known.clone]
    with pytest.raises(hg.InvalidInputError):
        source.table.drop_checkpoint(pin)
    delete(twin.uri, "")
    source.table.drop_checkpoint(pin)
    assert [known.name for known in source.table.checkpoints()] == ["then"]


def test_a_table_that_is_only_a_log_is_cloned_with_all_of_it() -> None:
    table = hg.create_table(fresh("source"), SCHEMA)
    config = hg.ShardWriterConfig(enable_memtable=False)
    for number in range(3):
        with table.writer(config) as writer:
            put(writer, {number: "x"})
    table.trim(1)
    twin = hg.clone(table.uri, fresh())
    logged = [row["id"] for entry in twin.shards[0].tail(follow=False) for batch in entry.batches for row in batch.to_pylist()]
    assert logged == [1, 2]
    with twin.writer(config) as writer:
        put(writer, {9: "y"})
    assert twin.verify(deep=True).ok
