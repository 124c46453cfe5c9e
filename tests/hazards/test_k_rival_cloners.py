"""K05: several who make one clone, and what one of them has let go of, or dropped, under another. Found by the simulation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from test_k_clones import SCHEMA, Source, entries, fresh, lose, put, stopping, values

import headgate as hg
from headgate.failpoint import hooked
from headgate.table_writer import TableWriter
from headgate.wal.marker import check_place

ROWS = pa.table({"id": list(range(40)), "value": ["loaded"] * 40}, schema=SCHEMA)


@pytest.fixture
def source() -> Source:
    return Source()


def once(step: str, act: Callable[[], object]) -> Callable[[str], None]:
    """Do it at a step, the first time, and nothing at the steps of what it does."""
    done: list[str] = []

    def hook(name: str) -> None:
        if name == step and not done:
            done.append(name)
            act()

    return hook


def test_k05_a_slower_cloner_is_not_told_of_loss_when_a_faster_one_has_let_go_of_the_log(source: Source) -> None:
    target = fresh()

    def overtake() -> None:
        hg.clone(source.uri, target, checkpoint="then")
        put(source.writer, dict.fromkeys(range(50), "after"))
        source.writer.flush()  # one run past the checkpoint: it does not cover
        source.drop_checkpoint()
        source.table.gc(dry_run=False, min_age=0)

    with hooked(once("clone.pinned", overtake)):
        twin = hg.clone(source.uri, target, checkpoint="then")
    assert values(twin) == source.then


def test_k05_a_slower_cloner_does_not_move_the_pin_under_a_clone_that_is_there(source: Source) -> None:
    target = fresh()

    def overtake() -> None:
        hg.clone(source.uri, target, checkpoint="then")
        source.writer.flush()
        source.drop_checkpoint()
        source.table.compact(full=True)  # what covers the log is another run than those that the clone reads
        source.table.gc(dry_run=False, min_age=0)

    with hooked(once("clone.pinned", overtake)):
        hg.clone(source.uri, target, checkpoint="then")
    source.table.gc(dry_run=False, min_age=0)
    twin = hg.open_table(target)
    assert values(twin) == source.then
    assert twin.verify(deep=True).ok


def test_k11_a_cloner_that_pins_a_later_state_takes_nothing_from_one_that_copied_in_time(source: Source, crash: type[Exception]) -> None:
    target = fresh()

    def overtake() -> None:
        source.writer.flush()
        source.table.compact(full=True)
        lose(source, entries(source, "0000"))
        with stopping("clone.copied", crash), pytest.raises(crash):
            hg.clone(source.uri, target, checkpoint="then")  # finds the entries missing, and pins the runs that cover them
        source.drop_checkpoint()
        source.table.gc(dry_run=False, min_age=0)

    with hooked(once("clone.copied", overtake)):
        hg.clone(source.uri, target, checkpoint="then")
    source.table.gc(dry_run=False, min_age=0)
    twin = hg.open_table(target)
    assert values(twin) == source.then
    assert twin.verify(deep=True).ok
    hg.drop_table(target, confirm=target)
    assert source.table.checkpoints() == [], "all pins go with the clone"


def test_k05_a_cloner_whose_clone_is_dropped_is_told_so_and_not_of_loss(source: Source) -> None:
    target = fresh()

    def overtake() -> None:
        hg.drop_table(target, confirm=target)
        source.drop_checkpoint()
        put(source.writer, dict.fromkeys(range(50), "after"))
        source.writer.flush()
        source.table.gc(dry_run=False, min_age=0)

    with hooked(once("clone.pinned", overtake)), pytest.raises(hg.NotFoundError, match="dropped"):
        hg.clone(source.uri, target, checkpoint="then")
    assert values(source.table) == values(hg.open_table(source.uri))


def test_f11_a_compaction_whose_table_is_dropped_under_it_is_told_so_and_not_of_loss(source: Source) -> None:
    put(source.writer, {1: "more"})
    source.writer.close()

    def drop() -> None:
        source.drop_checkpoint()
        hg.drop_table(source.uri, confirm=source.uri)

    table = hg.open_table(source.uri)
    with hooked(once("compact.registered", drop)), pytest.raises(hg.NotFoundError, match="dropped"):
        table.compact(full=True)


def test_f11_a_reader_whose_table_is_dropped_under_it_is_told_so_and_not_of_another_store(source: Source) -> None:
    table = hg.open_table(source.uri)
    shard = table.shard("0000")
    manifest = shard.log.manifests.load()
    source.drop_checkpoint()
    hg.drop_table(source.uri, confirm=source.uri)
    with pytest.raises(hg.NotFoundError, match="dropped"):
        check_place(shard.log, manifest)


def test_f11_a_checkpoint_that_is_gone_before_it_is_given_is_said_to_be(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = TableWriter._pinned

    def overtaken(self: TableWriter, *args: Any) -> Any:
        found = pinned(self, *args)
        source.drop_checkpoint()
        hg.drop_table(source.uri, confirm=source.uri)
        return found

    monkeypatch.setattr(TableWriter, "_pinned", overtaken)
    with pytest.raises(hg.NotFoundError, match="gone already"):
        source.writer.checkpoint(scope="durable")


def test_f11_two_droppers_that_saw_different_versions_leave_one(source: Source) -> None:
    source.drop_checkpoint()
    log = source.table.shard("0000").log

    def other() -> None:
        log.manifests.commit(lambda manifest: manifest.but(next_generation=manifest.next_generation + 1))  # as a collector may
        hg.drop_table(source.uri, confirm=source.uri)

    with hooked(once("drop.fenced", other)):
        hg.drop_table(source.uri, confirm=source.uri)
    assert log.manifests.load().state == "dropped"


@pytest.mark.parametrize("what", ["checkpoint", "clone"])
def test_a_load_that_comes_whole_between_the_pins_of_two_shards_is_in_both_or_in_none(tmp_path: Path, what: str) -> None:
    """The first shard is pinned before the load is announced there, so its version does not show that it comes."""
    table = hg.create_table(str(tmp_path / "t"), ROWS.schema, key="id", sharding=hg.bucket("id", 2))
    pins: list[str] = []

    def hook(name: str) -> None:
        if name == "tip.found":
            pins.append(name)
            if len(pins) == 2:  # the second shard is about to be pinned
                table.load(ROWS, app="stream", version=1)

    with hooked(hook):
        if what == "checkpoint":
            count = table.scan(at=table.checkpoint()).count()
        else:
            count = hg.clone(table.uri, str(tmp_path / "twin")).scan().count()
    assert count in (0, ROWS.num_rows)
