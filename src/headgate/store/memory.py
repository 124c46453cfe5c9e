"""A store in memory, shared by name within a process. For tests, examples and the simulation."""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Iterator, Sequence

from headgate.errors import ObjectExistsError, ObjectMissingError
from headgate.store.base import Data, ObjectInfo, Store

_PAGE = 1000


class Heap:
    """The objects themselves, sorted by key."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.objects: dict[str, tuple[bytes, float]] = {}
        self.keys: list[str] = []


_heaps: dict[str, Heap] = {}
_heaps_lock = threading.Lock()


def heap_named(name: str) -> Heap:
    with _heaps_lock:
        return _heaps.setdefault(name, Heap())


class MemoryStore(Store):
    """Objects in a dict. Two stores of the same name are the same store."""

    def __init__(self, name: str, prefix: str = "", heap: Heap | None = None) -> None:
        self._name, self._prefix = name, prefix
        self._heap = heap if heap is not None else heap_named(name)

    def __getstate__(self) -> tuple[str, str]:
        return self._name, self._prefix  # the objects stay in their process

    def __setstate__(self, state: tuple[str, str]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    @property
    def uri(self) -> str:
        return f"memory://{self._name}/{self._prefix}".rstrip("/")

    def create(self, key: str, data: Data) -> None:
        body, heap = bytes(data), self._heap
        full = self._prefix + key
        with heap.lock:
            if full in heap.objects:
                raise ObjectExistsError(f"{key} exists", object=key)
            heap.objects[full] = (body, time.time())
            bisect.insort(heap.keys, full)

    def _body(self, key: str) -> tuple[bytes, float]:
        found = self._heap.objects.get(self._prefix + key)
        if found is None:
            raise ObjectMissingError(f"{key} does not exist", object=key)
        return found

    def get(self, key: str) -> memoryview:
        return memoryview(self._body(key)[0])

    def get_range(self, key: str, start: int, length: int) -> memoryview:
        return memoryview(self._body(key)[0])[start : start + length]

    def head(self, key: str) -> ObjectInfo:
        body, modified = self._body(key)
        return ObjectInfo(key, len(body), modified)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        heap, cut = self._heap, len(self._prefix)
        low, bound = self._prefix + prefix, self._prefix + start_after if start_after else ""
        while True:
            page: list[ObjectInfo] = []
            with heap.lock:
                at = bisect.bisect_right(heap.keys, bound) if bound >= low else bisect.bisect_left(heap.keys, low)
                for full in heap.keys[at : at + _PAGE]:
                    if not full.startswith(low):
                        break
                    body, modified = heap.objects[full]
                    page.append(ObjectInfo(full[cut:], len(body), modified))
            yield from page
            if len(page) < _PAGE:
                return
            bound = self._prefix + page[-1].key

    def delete(self, keys: Sequence[str]) -> None:
        heap = self._heap
        with heap.lock:
            for key in keys:
                full = self._prefix + key
                if heap.objects.pop(full, None) is not None:
                    del heap.keys[bisect.bisect_left(heap.keys, full)]
