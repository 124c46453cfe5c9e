"""The store on a local disk: atomic, in order, and synced before it says so."""

from __future__ import annotations

import errno
import os
import pickle
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import headgate as hg
from headgate.errors import ObjectExistsError, ObjectMissingError, StoreError, StoreSyncError, StoreUnavailableError
from headgate.store.local import LocalStore
from headgate.store.memory import Heap, MemoryStore


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that were synced, in order."""
    paths: list[str] = []
    real = os.fsync

    def note(descriptor: int) -> None:
        paths.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    return paths


def test_an_object_is_there_as_written_and_only_once(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path / "root"))
    store.create("a/b", b"one")
    with pytest.raises(ObjectExistsError):
        store.create("a/b", b"two")
    assert bytes(store.get("a/b")) == b"one"
    assert bytes(store.get_range("a/b", 1, 9)) == b"ne"
    assert store.head("a/b").size_bytes == 3
    assert sorted(os.listdir(tmp_path / "root" / "a")) == ["b"], "no leftovers"


@pytest.mark.parametrize("body", [b"", b"x" * 3_000_000, memoryview(b"abc"), bytearray(b"abc")])
def test_bodies_of_any_kind_and_size(tmp_path: Path, body: Any) -> None:
    store = LocalStore(str(tmp_path))
    store.create("x", body)
    assert bytes(store.get("x")) == bytes(body)


def test_of_many_creators_one_wins_and_its_bytes_stand(tmp_path: Path) -> None:
    stores = [LocalStore(str(tmp_path), fsync=False) for _ in range(8)]
    for turn in range(10):
        won: list[int] = []
        start = threading.Barrier(len(stores))

        def create(number: int, turn: int = turn, won: list[int] = won, start: threading.Barrier = start) -> None:
            start.wait()
            try:
                stores[number].create(f"k{turn}", str(number).encode() * 1000)
                won.append(number)
            except ObjectExistsError:
                return

        threads = [threading.Thread(target=create, args=(number,)) for number in range(len(stores))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert bytes(stores[0].get(f"k{turn}")) == str(won[0]).encode() * 1000


def test_missing_objects_are_told_and_deleting_them_is_no_error(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    store.create("a/b", b"")
    for call in (store.get, store.head, lambda key: store.get_range(key, 0, 1)):
        for key in ("x", "a/x", "a/b/c"):
            with pytest.raises(ObjectMissingError) as caught:
                call(key)
            assert caught.value.object == key
    store.delete(["x", "a/b", "a/b/c"])
    assert list(store.list("")) == []


# -- listing


names = st.lists(st.sampled_from(["a", "b", "a-", "a.b", "a0", "ab", "A", "0", "_", "z"]), min_size=1, max_size=3).map("/".join)


def tree(keys: set[str]) -> set[str]:
    """Without names that are folders of others: a disk cannot hold both."""
    return {key for key in keys if not any(other.startswith(key + "/") for other in keys)}


@given(
    st.sets(names, max_size=12),
    st.sampled_from(["", "a/", "b/", "a/b/", "a-/", "none/"]),
    names | st.just("") | names.map(lambda n: n + "/"),
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_listings_are_those_of_a_sorted_list_of_keys(tmp_path_factory: Any, keys: set[str], prefix: str, start_after: str) -> None:
    root = tmp_path_factory.mktemp("list")
    stores = [LocalStore(str(root), fsync=False), MemoryStore("m", heap=Heap()), MemoryStore("m", "deep/er/", heap=Heap())]
    expected = sorted(key for key in tree(keys) if key.startswith(prefix) and key > start_after)
    for store in stores:
        for key in tree(keys):
            store.create(key, key.encode())
        found = list(store.list(prefix, start_after=start_after))
        assert [info.key for info in found] == expected, type(store).__name__
        assert [info.size_bytes for info in found] == [len(key) for key in expected]


def test_a_listing_of_memory_goes_on_over_pages_and_deletions() -> None:
    store = MemoryStore("pages", heap=Heap())
    for number in range(2500):
        store.create(f"k/{number:05d}", b"")
    listing = store.list("k/", start_after="k/00099")
    first = [next(listing).key for _ in range(10)]
    store.delete([f"k/{number:05d}" for number in range(1500)])
    rest = [info.key for info in listing]
    assert first[0] == "k/00100"
    # A page that was read stays as it was; the next one is as things are then.
    assert rest == [f"k/{number:05d}" for number in [*range(110, 1100), *range(1500, 2500)]]


def test_files_under_way_are_never_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(str(tmp_path))
    store.create("a/x", b"1")
    seen: list[list[str]] = []
    real = os.link

    def look(source: str, target: str, **options: Any) -> None:
        seen.append([info.key for info in store.list("")])
        assert os.path.exists(source), "the whole file is there under a hidden name"
        real(source, target, **options)

    monkeypatch.setattr(os, "link", look)
    store.create("a/y", b"2")
    assert seen == [["a/x"]]
    assert [info.key for info in store.list("a/")] == ["a/x", "a/y"]


def test_what_a_crash_left_behind_is_not_listed(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    store.create("a/x", b"1")
    (tmp_path / "a" / ".new-y-123-4").write_bytes(b"half")
    assert [info.key for info in store.list("")] == ["a/x"]


# -- syncing


def test_file_folder_and_every_new_folder_above_are_synced(tmp_path: Path, synced: list[str]) -> None:
    root = tmp_path / "one" / "two"
    store = LocalStore(str(root))
    store.create("a/b/x", b"1")
    file, folder = root / "a" / "b", root / "a" / "b"
    assert str(tmp_path) in synced, "the parent of the first new folder"
    for made in (tmp_path / "one", root, root / "a"):
        assert str(made) in synced
    assert synced[-2].startswith(str(file / ".new-")), "the file before its name"
    assert synced[-1] == str(folder), "the folder last"


def test_in_steady_state_a_create_syncs_the_file_and_its_folder(tmp_path: Path, synced: list[str]) -> None:
    store = LocalStore(str(tmp_path))
    store.create("a/x", b"1")
    synced.clear()
    store.create("a/y", b"2")
    assert len(synced) == 2
    assert synced[1] == str(tmp_path / "a")


def test_a_folder_made_by_another_process_is_synced_before_it_is_relied_on(tmp_path: Path, synced: list[str]) -> None:
    LocalStore(str(tmp_path), fsync=False).create("a/b/x", b"1")
    assert synced == []
    LocalStore(str(tmp_path)).create("a/b/y", b"2")
    assert {str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")} <= set(synced)


def test_settle_syncs_the_folder_and_those_that_lead_to_it(tmp_path: Path, synced: list[str]) -> None:
    LocalStore(str(tmp_path), fsync=False).create("a/b/x", b"1")
    store = LocalStore(str(tmp_path))
    store.settle("a/b/")
    assert {str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")} <= set(synced)
    store.settle("not/there/")


def test_without_fsync_nothing_is_synced(tmp_path: Path, synced: list[str]) -> None:
    store = LocalStore(str(tmp_path), fsync=False)
    store.create("a/x", b"1")
    store.settle("a/")
    assert synced == []


@pytest.fixture
def failing_sync(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Set ``what`` to "file" or "folder": syncs of that kind fail from then on."""
    state: dict[str, Any] = {"what": None, "failed": 0}
    real = os.fsync

    def fail(descriptor: int) -> None:
        kind = "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
        if kind == state["what"]:
            state["failed"] += 1
            raise OSError(errno.EIO, "injected")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    yield state
    state["what"] = None


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_failed_fsync_is_told_and_never_retried(tmp_path: Path, failing_sync: dict[str, Any], what: str) -> None:
    store = LocalStore(str(tmp_path))
    store.create("a/x", b"1")
    failing_sync["what"] = what
    with pytest.raises(StoreSyncError):
        store.create("a/y", b"2")
    assert failing_sync["failed"] == 1
    assert not [name for name in os.listdir(tmp_path / "a") if name.startswith(".new-")]
    if what == "file":
        with pytest.raises(ObjectMissingError):
            store.get("a/y")


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_failed_fsync_poisons_the_writer(disk: Any, failing_sync: dict[str, Any], what: str) -> None:
    writer = disk.writer()
    writer.put(disk.rows(1)).wait()
    failing_sync["what"] = what
    with pytest.raises(hg.WriterPoisonedError) as caught:
        writer.put(disk.rows(2)).wait(disk.PATIENCE)
    assert isinstance(caught.value.cause, StoreSyncError)
    assert failing_sync["failed"] == 1
    failing_sync["what"] = None
    with pytest.raises(hg.WriterPoisonedError):
        writer.put(disk.rows(3))


def test_an_acknowledged_entry_was_synced_before_the_ack(disk: Any, synced: list[str]) -> None:
    writer = disk.writer()
    synced.clear()
    writer.put(disk.rows(1)).wait()
    entry = Path(disk.uri) / disk.entry_key(1, 0)
    assert str(entry.parent) in synced
    assert [path for path in synced if entry.name in path], "the file itself, under its hidden name"


def test_the_walk_settles_the_epochs_it_passes(disk: Any, synced: list[str]) -> None:
    disk.appender().append([disk.rows(1)])
    synced.clear()
    disk.appender()
    assert str((Path(disk.uri) / disk.entry_key(1, 0)).parent) in synced


# -- errors


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, StoreUnavailableError), (errno.EMFILE, StoreUnavailableError), (errno.EACCES, StoreError)]
)
def test_errors_of_the_disk_are_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]) -> None:
    store = LocalStore(str(tmp_path), fsync=False)
    store.create("a/x", b"1")

    def fail(*args: Any, **options: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(kind) as caught:
        store.create("a/y", b"2")
    assert type(caught.value) is kind
    monkeypatch.undo()
    assert [info.key for info in store.list("")] == ["a/x"]


def test_a_folder_removed_under_a_store_is_made_again(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path / "r"))
    store.create("a/x", b"1")
    os.unlink(tmp_path / "r" / "a" / "x")
    os.rmdir(tmp_path / "r" / "a")
    store.create("a/x", b"2")
    assert bytes(store.get("a/x")) == b"2"


def test_a_local_store_pickles_with_its_setting(tmp_path: Path, synced: list[str]) -> None:
    again = pickle.loads(pickle.dumps(LocalStore(str(tmp_path), fsync=False)))
    again.create("x", b"1")
    assert again.uri == str(tmp_path)
    assert synced == []
