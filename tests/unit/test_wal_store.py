"""Whose WAL store is this: markers, wipes, and moving from one store to another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import headgate as hg
from headgate.clock import SYSTEM_CLOCK
from headgate.failpoint import hooked
from headgate.manifest.document import encode_document
from headgate.manifest.model import WalMarker
from headgate.store.memory import MemoryStore
from headgate.wal.entry import SEAL_BYTES

CONFIG = hg.ShardWriterConfig(enable_memtable=False)


def named(name: str) -> str:
    return f"{name}-{SYSTEM_CLOCK.token()}"


class Apart:
    """A table with its WAL in another store, both in memory."""

    def __init__(self, schema: Any) -> None:
        self.table_name, self.wal_name = named("table"), named("wal")
        self.table = hg.create_table(f"memory://{self.table_name}", schema, key="id", wal_uri=f"memory://{self.wal_name}")
        self.tables, self.wals = MemoryStore(self.table_name), MemoryStore(self.wal_name)

    def open(self, wal_name: str | None = None) -> hg.Table:
        return hg.open_table(f"memory://{self.table_name}", wal_uri=f"memory://{wal_name}" if wal_name else None)

    def write(self, rows: Any, *, trimmed: bool, wal_name: str | None = None) -> None:
        """Some rows; ``trimmed``: and everything given up, so that the close leaves the log clean."""
        table = self.open(wal_name)
        with table.shard("0000").writer(CONFIG) as writer:
            writer.put(rows).wait()
            if trimmed:
                table.trim(writer.wal_stats().next_wal_entry_position)

    def everything(self) -> dict[str, bytes]:
        return {info.key: bytes(store.get(info.key)) for store in (self.tables, self.wals) for info in store.list("")}

    def wipe(self) -> None:
        self.wals.delete([info.key for info in self.wals.list("")])

    def ids(self, wal_name: str | None = None) -> list[int]:
        shard = self.open(wal_name).shard("0000")
        return [
            i for e in shard.tail(shard.log.manifests.load().cursor.position, False) for b in e.batches for i in b.column("id").to_pylist()
        ]

    @property
    def manifest(self) -> Any:
        return self.open().shard("0000").log.manifests.load()


@pytest.fixture
def apart(bench: Any) -> Apart:
    return Apart(bench.SCHEMA)


def test_the_wal_goes_to_its_store_and_the_manifests_to_theirs(bench: Any, apart: Apart) -> None:
    apart.write(bench.rows(1), trimmed=False)
    assert {info.key.split("/")[0] for info in apart.tables.list("")} == {"table", "shards"}
    assert {info.key.split("/")[0] for info in apart.wals.list("")} == {"wal"}
    assert apart.ids() == [1]


def test_an_empty_store_that_was_not_clean_is_refused_and_nothing_is_written(bench: Any, apart: Apart) -> None:
    apart.write(bench.rows(1), trimmed=False)
    apart.wipe()
    before = apart.everything()
    with pytest.raises(hg.WalStoreMismatchError):
        apart.open().shard("0000").writer(CONFIG)
    assert apart.everything() == before
    assert not apart.open().verify().ok


def test_a_wrong_store_is_refused_and_nothing_is_written(bench: Any, apart: Apart) -> None:
    apart.write(bench.rows(1), trimmed=False)
    other = named("other")
    before = apart.everything()
    with pytest.raises(hg.WalStoreMismatchError):
        apart.open(other).shard("0000").writer(CONFIG)
    assert apart.everything() == before
    assert list(MemoryStore(other).list("")) == []


@pytest.mark.parametrize("field", ["wal_id", "table_id", "shard"])
def test_a_marker_of_another_is_refused_by_name(bench: Any, apart: Apart, field: str) -> None:
    apart.write(bench.rows(1), trimmed=False)
    log = apart.open().shard("0000").log
    space = log.space(log.manifests.load())
    marker = WalMarker(wal_id=space.wal_id, table_id=space.table_id, shard=space.shard).but(**{field: "another"})
    apart.wals.delete([space.marker_key])
    apart.wals.create(space.marker_key, encode_document(marker))
    before = apart.everything()
    with pytest.raises(hg.WalStoreMismatchError, match="another" if field != "wal_id" else "belongs to"):
        apart.open().shard("0000").writer(CONFIG)
    assert apart.everything() == before


def test_a_clean_wiped_store_opens_with_its_seals_put_back(bench: Any, apart: Apart) -> None:
    stalled = hg.WalAppender.open(apart.open().shard("0000"))
    stalled.append([bench.rows(0)])
    apart.write(bench.rows(1), trimmed=True)
    manifest = apart.manifest
    assert manifest.wal.clean_at == manifest.cursor.position
    seals = {info.key for info in apart.wals.list("") if info.size_bytes == SEAL_BYTES}
    assert seals
    apart.wipe()
    apart.write(bench.rows(2), trimmed=False)
    assert seals <= {info.key for info in apart.wals.list("") if info.size_bytes == SEAL_BYTES}
    with pytest.raises(hg.FencedError):
        stalled.append([bench.rows(66)])
    assert apart.ids() == [2]
    assert apart.open().verify().ok


@pytest.mark.parametrize("step", ["marker.seals-back", "marker.made", "fence.surveyed", "fence.claimed", "fence.walked"])
def test_dying_while_a_wiped_store_is_put_right_loses_no_seal(bench: Any, apart: Apart, step: str, crash: type[Exception]) -> None:
    stalled = hg.WalAppender.open(apart.open().shard("0000"))
    apart.write(bench.rows(1), trimmed=True)
    apart.wipe()

    def die(name: str) -> None:
        if name == step:
            raise crash(name)

    with hooked(die), pytest.raises(crash):
        apart.open().shard("0000").writer(CONFIG)
    apart.write(bench.rows(2), trimmed=False)
    with pytest.raises(hg.FencedError):
        stalled.append([bench.rows(66)])
    assert apart.ids() == [2]


def test_a_fenced_writer_that_wrote_after_the_wipe_is_found_and_told(bench: Any, apart: Apart) -> None:
    stalled = hg.WalAppender.open(apart.open().shard("0000"))
    apart.write(bench.rows(1), trimmed=True)
    apart.wipe()
    assert stalled.append([bench.rows(66)]) == (1, 0)  # its seal is gone: this is why wiping by hand is dangerous
    with pytest.raises(hg.DataLossError) as caught:
        apart.open().shard("0000").writer(CONFIG)
    assert caught.value.object.endswith(f"{0:020d}.arrow")


def test_a_writer_that_goes_on_takes_back_that_the_log_is_clean(bench: Any, apart: Apart) -> None:
    apart.write(bench.rows(1), trimmed=True)
    assert apart.manifest.wal.clean_at is not None
    writer = apart.open().shard("0000").writer(CONFIG)
    assert apart.manifest.wal.clean_at is None, "before it can acknowledge anything"
    writer.abort()


def test_a_crash_leaves_the_log_unclean(bench: Any, apart: Apart) -> None:
    appender = hg.WalAppender.open(apart.open().shard("0000"))
    appender.append([bench.rows(1)])
    apart.open().trim(1)
    assert apart.manifest.wal.clean_at is None
    apart.wipe()
    with pytest.raises(hg.WalStoreMismatchError):
        hg.WalAppender.open(apart.open().shard("0000"))


def test_the_wal_store_of_a_clean_table_may_be_changed(bench: Any, apart: Apart) -> None:
    stalled = hg.WalAppender.open(apart.open().shard("0000"))
    apart.write(bench.rows(1), trimmed=True)
    before = apart.manifest.wal.id
    other = named("other")
    apart.write(bench.rows(2), trimmed=False, wal_name=other)
    assert apart.manifest.wal.id != before
    assert apart.manifest.wal.uri == f"memory://{other}"
    assert apart.ids(other) == [2]
    with pytest.raises(hg.FencedError):
        stalled.append([bench.rows(66)])  # in the old store, where its seal stands
    with pytest.raises(hg.WalStoreMismatchError):
        hg.WalAppender.open(apart.open(apart.wal_name).shard("0000"))


def test_the_wal_store_of_an_unclean_table_may_not_be_changed(bench: Any, apart: Apart) -> None:
    apart.write(bench.rows(1), trimmed=False)
    with pytest.raises(hg.WalStoreMismatchError):
        apart.open(named("other")).shard("0000").writer(CONFIG)
    assert apart.ids() == [1]


def test_from_beside_the_table_to_a_store_of_its_own(bench: Any) -> None:
    name, wal = named("beside"), named("wal")
    table = hg.create_table(f"memory://{name}", bench.SCHEMA, key="id")
    with table.shard("0000").writer(CONFIG) as writer:
        writer.put(bench.rows(1)).wait()
    moved = hg.open_table(f"memory://{name}", wal_uri=f"memory://{wal}")
    with pytest.raises(hg.WalStoreMismatchError):
        moved.shard("0000").writer(CONFIG)
    table.trim(1)
    table.shard("0000").writer(CONFIG).close()
    with moved.shard("0000").writer(CONFIG) as writer:
        writer.put(bench.rows(2)).wait()
    assert [info.key for info in MemoryStore(wal).list("") if info.size_bytes > SEAL_BYTES and info.key.endswith(".arrow")]
    assert moved.verify().ok


def test_the_wal_uri_of_a_table_is_remembered(bench: Any, tmp_path: Path) -> None:
    hg.create_table(str(tmp_path / "t"), bench.SCHEMA, key="id", wal_uri=str(tmp_path / "w"))
    opened = hg.open_table(str(tmp_path / "t"))
    with opened.shard("0000").writer(CONFIG) as writer:
        writer.put(bench.rows(1)).wait()
    assert (tmp_path / "w" / "wal").is_dir()
    assert opened.status().shards[0].wal_store == str(tmp_path / "w")
