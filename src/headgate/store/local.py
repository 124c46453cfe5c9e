"""A store on a local disk: atomic create, and fsync that means it.

Owns: file, folder and new folders durable before create returns. Does not own: retries; a
failed fsync is never retried, because the kernel may have dropped the dirty pages and would
then report success for bytes that are not there.

A create writes a hidden file beside its place, syncs it, links it to its name (the link
fails if the name is taken, so the object appears whole or not at all), removes the hidden
name, and syncs the folder. What a reader sees is therefore always a whole, synced file; only
its folder's entry may still be unsynced, which ``settle`` mends for those who build on it.
"""

from __future__ import annotations

import errno
import os
import secrets
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import count

from headgate.errors import (
    DeleteIncompleteError,
    ObjectExistsError,
    ObjectMissingError,
    StoreError,
    StoreSyncError,
    StoreUnavailableError,
)
from headgate.store.base import Data, ObjectInfo, Store, sized

_HIDDEN = ".new-"
_READ_BYTES = 1 << 15
_RESCANS_MAX = 8
_TRANSIENT = {
    errno.EINTR,
    errno.EAGAIN,
    errno.EBUSY,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ETIMEDOUT,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.ESTALE,
}
_numbers = count()
_salts: dict[int, str] = {}


def _salt() -> str:
    """Random, one per process: a forked child must not share its parent's hidden names."""
    pid = os.getpid()
    return _salts.get(pid) or _salts.setdefault(pid, secrets.token_hex(6))


class LocalStore(Store):
    """Files below a folder. ``fsync=False`` trades power-loss safety for speed."""

    def __init__(self, root: str, *, fsync: bool = True) -> None:
        self._root = os.path.abspath(root)
        self._fsync = fsync
        self._made_folders: set[str] = set()

    @property
    def uri(self) -> str:
        return self._root

    def __getstate__(self) -> tuple[str, bool]:
        return self._root, self._fsync

    def __setstate__(self, state: tuple[str, bool]) -> None:
        self.__init__(state[0], fsync=state[1])  # type: ignore[misc]

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def create(self, key: str, data: Data) -> None:
        path = f"{self._root}/{key}"
        folder, name = path.rsplit("/", 1)
        if folder not in self._made_folders:
            self._make_folder(folder)
        hidden = f"{folder}/{_HIDDEN}{name}-{_salt()}-{next(_numbers)}"
        try:
            try:
                self._write(hidden, data)
            except FileNotFoundError:  # somebody removed the folder since we made it
                self._made_folders.clear()
                self._make_folder(folder)
                self._write(hidden, data)
            os.link(hidden, path)
        except FileExistsError:
            raise ObjectExistsError(f"{key} exists", object=key) from None
        except OSError as error:
            raise _store_error("create", key, error) from error
        finally:
            try:
                os.unlink(hidden)
            except OSError:
                pass  # it was never made; or it stays, hidden, and hurts nobody
        if self._fsync:
            self._sync_folder(folder)

    def _write(self, path: str, data: Data) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            size = sized(data)
            written = os.write(descriptor, data)
            while written < size:
                written += os.write(descriptor, memoryview(data)[written:])
            if self._fsync:
                _sync(descriptor, path)
        finally:
            os.close(descriptor)

    def _make_folder(self, folder: str) -> None:
        """Make a folder and those above it, and sync each into its parent.

        Another process may have made them and not synced yet, so the first use of a folder by
        this store syncs all that lead to it, whoever made them.
        """
        new: set[str] = set()
        probe = folder
        while not os.path.isdir(probe) and os.path.dirname(probe) != probe:
            new.add(probe)
            probe = os.path.dirname(probe)
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise _store_error("create folder", folder, error) from error
        above = folder
        while self._fsync and (above in new or above.startswith(self._root)):
            above = os.path.dirname(above)
            self._sync_folder(above)
        self._made_folders.add(folder)

    def _sync_folder(self, folder: str) -> None:
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise _store_error("open folder", folder, error) from error
        try:
            _sync(descriptor, folder)
        finally:
            os.close(descriptor)

    def settle(self, prefix: str) -> None:
        folder = self._path(prefix.rstrip("/")).rstrip("/")
        if not self._fsync or not os.path.isdir(folder):
            return
        self._make_folder(folder)
        self._sync_folder(folder)

    def get(self, key: str) -> memoryview:
        try:
            descriptor = os.open(f"{self._root}/{key}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                data = os.read(descriptor, _READ_BYTES)
                if len(data) < _READ_BYTES:  # most objects are small, and this is their end
                    return memoryview(data)
                with open(descriptor, "rb", buffering=0, closefd=False) as file:
                    file.seek(0)
                    return memoryview(file.readall())
            finally:
                os.close(descriptor)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise ObjectMissingError(f"{key} does not exist", object=key) from None
        except OSError as error:
            raise _store_error("read", key, error) from error

    is_near = True

    def get_each(self, keys: Sequence[str], most_bytes: int) -> Sequence[memoryview | StoreError]:
        found: list[memoryview | StoreError] = []
        root, left, open_, read, close = self._root, most_bytes, os.open, os.read, os.close
        for key in keys:
            try:
                descriptor = open_(f"{root}/{key}", os.O_RDONLY | os.O_CLOEXEC)
                try:
                    data = memoryview(read(descriptor, _READ_BYTES))
                finally:
                    close(descriptor)
                if data.nbytes == _READ_BYTES:
                    data = self.get(key)
            except StoreError as error:
                found.append(error)
                continue
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                found.append(ObjectMissingError(f"{key} does not exist", object=key))
                continue
            except OSError as error:
                found.append(_store_error("read", key, error))
                continue
            found.append(data)
            left -= data.nbytes
            if left <= 0:
                break
        return found

    def keys(self, prefix: str, *, start_after: str = "") -> Sequence[str]:
        try:
            return self._keys(prefix, start_after)
        except OSError as error:
            raise _store_error("list", prefix, error) from error

    def _keys(self, prefix: str, start_after: str) -> Sequence[str]:
        """As ``_walk``, without a look at each file. A folder that changes meanwhile may show some of its names only."""
        if start_after > prefix and not start_after.startswith(prefix):
            return []
        head = _head(prefix, start_after)
        try:
            with os.scandir(self._path(prefix).rstrip("/") or "/") as entries:
                names = sorted(
                    [
                        name + "/" if entry.is_dir(follow_symlinks=False) else name
                        for entry in entries
                        if ((name := entry.name) >= head or head.startswith(name)) and not name.startswith(_HIDDEN)
                    ]
                )
        except (FileNotFoundError, NotADirectoryError):
            return []
        found: list[str] = []
        for name in names:
            key = prefix + name
            if name.endswith("/"):
                if key > start_after or start_after.startswith(key):
                    found += self._keys(key, start_after)
            elif key > start_after:
                found.append(key)
        return found

    def get_range(self, key: str, start: int, length: int) -> memoryview:
        try:
            descriptor = os.open(self._path(key), os.O_RDONLY)
            try:
                return memoryview(os.pread(descriptor, length, start))
            finally:
                os.close(descriptor)
        except (FileNotFoundError, NotADirectoryError):
            raise ObjectMissingError(f"{key} does not exist", object=key) from None
        except OSError as error:
            raise _store_error("read", key, error) from error

    def head(self, key: str) -> ObjectInfo:
        try:
            status = os.stat(self._path(key))
        except (FileNotFoundError, NotADirectoryError):
            raise ObjectMissingError(f"{key} does not exist", object=key) from None
        except OSError as error:
            raise _store_error("look at", key, error) from error
        return ObjectInfo(key, status.st_size, status.st_mtime)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        try:
            yield from self._walk(prefix, start_after)
        except OSError as error:
            raise _store_error("list", prefix, error) from error

    def _walk(self, prefix: str, start_after: str, again: int = _RESCANS_MAX) -> Iterator[ObjectInfo]:
        """Depth first, in order of keys. A folder sorts by its name with the slash.

        Reading a folder's names is no snapshot: where one has vanished, another may have come. So it is read again from there.
        """
        head = _head(prefix, start_after)
        try:
            with os.scandir(self._path(prefix).rstrip("/") or "/") as entries:
                rows = sorted(
                    [
                        (name + "/" if entry.is_dir(follow_symlinks=False) else name, entry)
                        for entry in entries
                        if ((name := entry.name) >= head or head.startswith(name)) and not name.startswith(_HIDDEN)
                    ]
                )
        except (FileNotFoundError, NotADirectoryError):
            return
        first = 0
        if start_after.startswith(prefix):
            # Skip what sorts at or before start_after, but not the folder that leads to it.
            rest = start_after[len(prefix) :]
            first = bisect_right(rows, rest, key=lambda row: row[0])
            if "/" in rest:
                lead = rest.split("/", 1)[0] + "/"
                while first > 0 and rows[first - 1][0] >= lead:
                    first -= 1
        elif start_after > prefix:
            return
        for name, entry in rows[first:]:
            key = prefix + name
            if name.endswith("/"):
                yield from self._walk(key, start_after)
                continue
            if key <= start_after:
                continue
            try:
                status = entry.stat()
            except FileNotFoundError:  # deleted since
                if again == 0:
                    continue
                yield from self._walk(prefix, start_after, again - 1)
                return
            yield ObjectInfo(key, status.st_size, status.st_mtime)
            start_after = key

    def delete(self, keys: Sequence[str]) -> None:
        failed: dict[str, OSError] = {}
        for key in keys:
            try:
                os.unlink(self._path(key))
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                failed[key] = error
        if failed:
            raise DeleteIncompleteError(list(failed), next(iter(failed.values())))

    def prune(self, prefix: str) -> None:
        for folder, _, _ in os.walk(self._path(prefix).rstrip("/"), topdown=False):
            try:
                os.rmdir(folder)
            except OSError:
                continue  # not empty, or somebody else was faster


def _head(prefix: str, start_after: str) -> str:
    """A name in the folder ``prefix`` that is less than this, and no beginning of it, leads to nothing after ``start_after``."""
    return start_after[len(prefix) :].split("/", 1)[0] if start_after.startswith(prefix) else ""


def sync_tree(folder: str, *, above: str) -> None:
    """Sync every file and folder below ``folder``, and the folders from it up to ``above``.

    For files that somebody else wrote: once this returns, they survive a power cut.

    Raises:
        StoreSyncError: nothing may be assumed of them.
    """

    def refuse(error: OSError) -> None:
        raise _store_error("list", folder, error) from error

    for place, _, files in os.walk(folder, topdown=False, onerror=refuse):
        for name in files:
            _sync_path(f"{place}/{name}")
        _sync_path(place)
    above = os.path.dirname(os.path.abspath(above))
    while (folder := os.path.dirname(folder)) and len(folder) >= len(above):
        _sync_path(folder)
        if folder == os.path.dirname(folder):
            break


def _sync_path(path: str) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise _store_error("open", path, error) from error
    try:
        _sync(descriptor, path)
    finally:
        os.close(descriptor)


def _sync(descriptor: int, name: str) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise StoreSyncError(
            f"fsync of {name} failed: {error.strerror}", object=name, hint="check the disk, then reopen the writer"
        ) from error


def _store_error(verb: str, name: str, error: OSError) -> StoreError:
    if error.errno in _TRANSIENT:
        return StoreUnavailableError(f"cannot {verb} {name}: {error.strerror}", object=name)
    return StoreError(f"cannot {verb} {name}: {error.strerror}", object=name, hint="check the path, its permissions and the disk")
