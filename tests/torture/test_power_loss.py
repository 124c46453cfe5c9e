"""Power cuts at every moment of a writer's life: what was acknowledged is there, and the log opens (A14, R17)."""

from __future__ import annotations

import itertools
import os
import random
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pytest
from power_loss import Recorder, after_cut

import headgate as hg
from headgate.store import local
from headgate.store.local import LocalStore
from headgate.store.memory import heap_named
from headgate.wal.collect import collect_entries

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False)])
WAL_ONLY = hg.ShardWriterConfig(enable_memtable=False)
LONG = bool(os.environ.get("HEADGATE_TORTURE_LONG"))
"""Every cut several times over; otherwise each once at its worst, and some of them with luck."""

_names = itertools.count()


def rows(number: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([number], pa.int64())], schema=SCHEMA)


class Run:
    """A table on disk, with everything that happens to it recorded."""

    def __init__(self, folder: Path) -> None:
        self.root = str(folder / "new" / "table")
        self.recorder = Recorder(self.root)

    def create(self) -> hg.Shard:
        shard = hg.create_table(self.root, SCHEMA, key="id").shard("0000")
        self.recorder.note("table")
        return shard

    def put(self, writer: hg.ShardWriter, *numbers: int) -> None:
        acks = [(number, writer.put(rows(number))) for number in numbers]
        for number, ack in acks:
            self.recorder.note("ack", target=(number, ack.wait(30)["0000"][1]))

    def trim(self, shard: hg.Shard, before: int) -> None:
        self.recorder.note("trim", target=before)
        hg.open_table(self.root).trim(before=before)
        collect_entries(shard.log, dry_run=False)


def a_writers_life(run: Run) -> None:
    """Create, write from threads, take over, trim and collect, take over again, close."""
    shard = run.create()
    with shard.writer(WAL_ONLY) as writer:
        run.put(writer, 1)
        run.put(writer, 2, 3)
        threads = [threading.Thread(target=run.put, args=(writer, 10 * i, 10 * i + 1)) for i in (1, 2, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    second = hg.open_table(run.root).shard("0000").writer(WAL_ONLY)
    run.put(second, 50, 51)
    run.trim(shard, 2)
    with hg.open_table(run.root).shard("0000").writer(WAL_ONLY) as third:
        run.put(third, 60)
    second.abort()


def two_that_died_before_their_folder_was_synced(run: Run) -> None:
    """A writer's entry and a claimant's seal are visible, and their names not durable; a third one builds on them."""
    shard = run.create()
    first = shard.writer(WAL_ONLY)
    run.put(first, 1)
    sync = LocalStore._sync_folder

    def die(store: LocalStore, folder: str) -> None:
        """The name is there, as position 1 or 2; the sync that would make it durable is the one that never was."""
        if folder.endswith("/0000000001") and len(os.listdir(folder)) == linked:
            raise hg.HeadgateError("died here")
        sync(store, folder)

    with mock.patch.object(LocalStore, "_sync_folder", die):
        linked = 2
        with pytest.raises(hg.HeadgateError):
            first.put(rows(2)).wait(30)
        linked = 3
        with pytest.raises(hg.HeadgateError, match="died here"):
            hg.open_table(run.root).shard("0000").writer(WAL_ONLY)
    with hg.open_table(run.root).shard("0000").writer(WAL_ONLY) as third:
        run.put(third, 3)
    first.abort()


def wrong_after(run: Run, cut: int, chance: random.Random | None) -> str | None:
    """What is wrong with what a power cut leaves; None: nothing."""
    name = f"cut-{next(_names)}"
    heap = heap_named(name)
    heap.objects = {key: (body, 0.0) for key, body in after_cut(run.recorder.events, cut, run.root, chance).items() if ".new-" not in key}
    heap.keys = sorted(heap.objects)
    past = run.recorder.events[:cut]
    floor = max((event.target for event in past if event.kind == "trim"), default=0)
    acknowledged = {event.target[0] for event in past if event.kind == "ack" and event.target[1] >= floor}
    try:
        try:
            table = hg.open_table(f"memory://{name}")
        except hg.NotFoundError:
            return "the table is gone" if any(event.kind == "table" for event in past) else None
        shard = table.shard("0000")
        report = table.verify(deep=True)
        if not report.ok:
            return str(report.problems)
        before = numbers(shard)
        with shard.writer(WAL_ONLY) as writer:
            writer.put(rows(99)).wait(30)
        after = numbers(shard)
    except hg.HeadgateError as error:
        return f"{type(error).__name__}: {error.message}"
    finally:
        heap.objects.clear()
        heap.keys.clear()
    if not acknowledged <= set(before):
        return f"{sorted(acknowledged - set(before))} were acknowledged and are gone"
    if len(before) != len(set(before)) or after != [*before, 99]:
        return f"{before} became {after}"
    return None


def numbers(shard: hg.Shard) -> list[int]:
    return [number for entry in shard.tail(follow=False) for batch in entry.batches for number in batch.column("id").to_pylist()]


def cuts_that_lose(run: Run, live: Callable[[Run], None], step: int = 1) -> list[str]:
    with run.recorder.recording():
        live(run)
    events = len(run.recorder.events)
    wrong, tried = [], 0
    for cut in [*range(0, events, step), events]:
        for chance in [None, *(random.Random(f"{cut}-{i}") for i in range(10 if LONG else cut % 3 == 0))]:
            tried += 1
            if (problem := wrong_after(run, cut, chance)) is not None:
                wrong.append(f"after {cut} of {events} events: {problem}")
    print(f"{tried} power cuts over {events} events, {len(wrong)} of them lost something")
    return wrong


@pytest.mark.parametrize("live", [a_writers_life, two_that_died_before_their_folder_was_synced])
def test_r17_a_power_cut_at_any_moment_loses_nothing_acknowledged(tmp_path, live):
    wrong = cuts_that_lose(Run(tmp_path), live)

    assert not wrong, wrong[:3]


def test_r17_every_object_is_written_synced_linked_and_its_folder_synced_in_this_order(tmp_path):
    run = Run(tmp_path)
    with run.recorder.recording():
        a_writers_life(run)

    events = run.recorder.events
    links = [(number, event) for number, event in enumerate(events) if event.kind == "link"]
    assert len(links) > 20
    for number, link in links:
        written = max(n for n, event in enumerate(events) if event.kind == "write" and event.target[0] == link.target)
        synced = min(n for n, event in enumerate(events) if event.kind == "sync-file" and event.target == link.target)
        assert written < synced < number
        folder = os.path.dirname(link.path)
        assert any(event.kind == "sync-folder" and event.path == folder and event.begun > number for event in events), link.path


def _no_folder_sync() -> AbstractContextManager[object]:
    return mock.patch.object(LocalStore, "_sync_folder", return_value=None)


def _no_file_sync() -> AbstractContextManager[object]:
    sync = local._sync
    return mock.patch.object(local, "_sync", lambda descriptor, name: sync(descriptor, name) if os.path.isdir(name) else None)


def _no_parent_sync() -> AbstractContextManager[object]:
    def make(self: LocalStore, folder: str) -> None:
        os.makedirs(folder, exist_ok=True)
        self._made_folders.add(folder)

    return mock.patch.object(LocalStore, "_make_folder", make)


def _no_settling() -> AbstractContextManager[object]:
    return mock.patch.object(LocalStore, "settle", return_value=None)


@pytest.mark.parametrize(
    ("plant", "live"),
    [
        (_no_folder_sync, a_writers_life),
        (_no_file_sync, a_writers_life),
        (_no_parent_sync, a_writers_life),
        (_no_settling, two_that_died_before_their_folder_was_synced),
    ],
)
def test_a_sync_left_out_is_noticed(tmp_path, plant, live):
    with plant():
        wrong = cuts_that_lose(Run(tmp_path), live, step=7)

    assert wrong
