"""A disk that forgets: what is left after a power cut, at any moment of a recorded run.

Owns: recording what a process asks of the file system, and the disk's side of the contract:
    a file's bytes are there for sure only if an fsync of the file began after they were written
    a name is there, or gone, for sure only if an fsync of its folder began after it was made or removed
    anything else may have reached the disk or not: each on its own, in any order
Does not own: what a log must survive (test_power_loss.py).

No real file system is so careless with order; whoever survives this one survives them all.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock


@dataclass(frozen=True)
class Event:
    """One call that returned. ``begun``: how many events there were when it was made."""

    kind: str
    path: str = ""
    target: Any = None
    begun: int = 0


@dataclass
class Recorder:
    """What a process does below ``root``; and what else the test wants noted, in one order."""

    root: str
    events: list[Event] = field(default_factory=list)
    _lock: Any = field(default_factory=threading.Lock)
    _open: dict[int, tuple[str, int]] = field(default_factory=dict)
    _inodes: dict[str, int] = field(default_factory=dict)

    def note(self, kind: str, path: str = "", target: Any = None, begun: int = 0) -> None:
        with self._lock:
            self.events.append(Event(kind, path, target, begun))

    def _ours(self, path: Any) -> bool:
        return isinstance(path, str) and (path == self.root or path.startswith(self.root + "/") or self.root.startswith(path + "/"))

    @contextmanager
    def recording(self) -> Iterator[None]:
        real = {name: getattr(os, name) for name in ("open", "close", "write", "fsync", "link", "unlink", "mkdir")}

        def open_(path: Any, flags: int, *rest: Any, **named: Any) -> int:
            descriptor: int = real["open"](path, flags, *rest, **named)
            if self._ours(path):
                with self._lock:
                    if flags & os.O_CREAT:
                        self._inodes[path] = len(self.events)
                        self.events.append(Event("create", path, self._inodes[path]))
                    self._open[descriptor] = (path, self._inodes.get(path, -1))
            return descriptor

        def close(descriptor: int) -> None:
            with self._lock:
                self._open.pop(descriptor, None)
            real["close"](descriptor)

        def write(descriptor: int, data: Any) -> int:
            count: int = real["write"](descriptor, data)
            if descriptor in self._open:
                self.note("write", target=(self._open[descriptor][1], bytes(memoryview(data).cast("B")[:count])))
            return count

        def fsync(descriptor: int) -> None:
            path, inode = self._open.get(descriptor, ("", -1))
            begun = len(self.events)
            real["fsync"](descriptor)
            if path:
                self.note("sync-file" if inode >= 0 else "sync-folder", path, inode, begun)

        def link(source: str, target: str, **named: Any) -> None:
            real["link"](source, target, **named)
            if self._ours(target):
                self.note("link", target, self._inodes[source])

        def unlink(path: Any, **named: Any) -> None:
            real["unlink"](path, **named)
            if self._ours(path):
                self.note("unlink", path)

        def mkdir(path: Any, *rest: Any, **named: Any) -> None:
            real["mkdir"](path, *rest, **named)
            if self._ours(path):
                self.note("mkdir", path)

        fakes: dict[str, Callable[..., Any]] = {
            "open": open_, "close": close, "write": write, "fsync": fsync, "link": link, "unlink": unlink, "mkdir": mkdir,
        }  # fmt: skip
        with mock.patch.multiple(os, **fakes):
            yield


def after_cut(events: list[Event], cut: int, root: str, chance: random.Random | None) -> dict[str, bytes]:
    """The files below ``root`` when the power goes after the first ``cut`` events.

    ``chance`` decides what became of the unsynced; None: all of it is gone.
    """
    past = events[:cut]
    synced_folders: dict[str, int] = {}
    synced_files: dict[int, int] = {}
    for event in past:
        if event.kind == "sync-folder":
            synced_folders[event.path] = max(synced_folders.get(event.path, 0), event.begun)
        elif event.kind == "sync-file":
            synced_files[event.target] = max(synced_files.get(event.target, 0), event.begun)
    names: dict[str, int | None] = {}  # path -> inode; None: a folder
    content: dict[int, bytes] = {}
    for number, event in enumerate(past):
        if event.kind in ("create", "link", "unlink", "mkdir"):
            certain = number < synced_folders.get(os.path.dirname(event.path), 0)
            if certain or (chance is not None and chance.random() < 0.5):
                if event.kind == "unlink":
                    names.pop(event.path, None)
                else:
                    names[event.path] = None if event.kind == "mkdir" else event.target
        elif event.kind == "write":
            inode, data = event.target
            if number >= synced_files.get(inode, 0):
                data = data[: chance.randrange(len(data) + 1)] if chance is not None else b""
            content[inode] = content.get(inode, b"") + data

    def reachable(path: str) -> bool:
        folder = os.path.dirname(path)
        return folder == os.path.dirname(root) or (folder in names and reachable(folder))

    return {
        path[len(root) + 1 :]: content.get(inode, b"")
        for path, inode in names.items()
        if inode is not None and path.startswith(root + "/") and reachable(path)
    }
