"""A store that fails as told. For tests of this package and of what is built on it.

    store = FaultyStore(inner)
    store.add(Fault("create", "apply-then-fail", key="wal/", times=1))

Faults: ``delay`` (seconds), ``hang`` (until ``release()``), ``fail`` (before anything is
done), ``apply-then-fail`` (done, the reply lost), ``conflict`` (409: "exists", with nothing
there), ``throttle`` (503), ``refuse`` (403), ``sync`` (a failed fsync, after the write),
``truncate`` (get returns a part), ``missing`` (get and head find nothing).
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from headgate.errors import (
    DeleteIncompleteError,
    ObjectExistsError,
    ObjectMissingError,
    StoreError,
    StoreSyncError,
    StoreUnavailableError,
)
from headgate.store.base import Data, ObjectInfo, Store

Operation = Literal["create", "get", "head", "list", "delete", "any"]
Kind = Literal["delay", "hang", "fail", "apply-then-fail", "conflict", "throttle", "refuse", "sync", "truncate", "missing"]


@dataclass
class Fault:
    """What happens to the next ``times`` operations of that kind whose key contains ``key``."""

    operation: Operation
    kind: Kind
    key: str = ""
    times: int = 1_000_000_000
    seconds: float = 0.0
    skip: int = 0


class FaultyStore(Store):
    """Another store with faults, and a count of what was asked of it."""

    def __init__(self, inner: Store, *, latency: float = 0.0, before: Callable[[str, str], None] | None = None) -> None:
        self.inner = inner
        self.latency = latency
        self.requests: Counter[str] = Counter()
        self.asked: list[tuple[str, str]] = []
        self._before = before
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._released = threading.Event()

    @property
    def uri(self) -> str:
        return self.inner.uri

    def add(self, *faults: Fault) -> None:
        with self._lock:
            self._faults += faults

    def clear(self) -> None:
        """No more faults; those that hang go on."""
        with self._lock:
            self._faults = []
        self.release()

    def release(self) -> None:
        """Let the hanging operations go on."""
        self._released.set()

    def _meet(self, operation: Operation, key: str) -> Fault | None:
        with self._lock:
            self.requests[operation] += 1
            self.asked.append((operation, key))
            fault = None
            for candidate in self._faults:
                if candidate.operation in (operation, "any") and candidate.key in key and candidate.times > 0:
                    if candidate.skip > 0:
                        candidate.skip -= 1
                        continue
                    candidate.times -= 1
                    fault = candidate
                    break
        if self._before is not None:
            self._before(operation, key)
        if self.latency:
            time.sleep(self.latency)
        if fault is None:
            return None
        if fault.kind == "delay":
            time.sleep(fault.seconds)
            return None
        if fault.kind == "hang":
            self._released.wait()
            return None
        if fault.kind in ("fail", "throttle"):
            raise StoreUnavailableError(f"injected {fault.kind} of {operation} {key}", object=key)
        if fault.kind == "refuse":
            raise StoreError(f"injected refusal of {operation} {key}", object=key)
        return fault

    def create(self, key: str, data: Data) -> None:
        fault = self._meet("create", key)
        if fault is None:
            return self.inner.create(key, data)
        if fault.kind == "conflict":
            raise ObjectExistsError(f"injected 409 for {key}", object=key)
        self.inner.create(key, data)
        if fault.kind == "sync":
            raise StoreSyncError(f"injected fsync failure of {key}", object=key)
        raise StoreUnavailableError(f"injected lost reply for {key}", object=key)

    def _read(self, operation: Operation, key: str) -> Fault | None:
        fault = self._meet(operation, key)
        if fault is not None and fault.kind == "missing":
            raise ObjectMissingError(f"injected absence of {key}", object=key)
        return fault

    def get(self, key: str) -> memoryview:
        fault, body = self._read("get", key), self.inner.get(key)
        return body[: len(body) // 2] if fault is not None and fault.kind == "truncate" else body

    def get_range(self, key: str, start: int, length: int) -> memoryview:
        self._read("get", key)
        return self.inner.get_range(key, start, length)

    def head(self, key: str) -> ObjectInfo:
        self._read("head", key)
        return self.inner.head(key)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        self._meet("list", prefix)
        return self.inner.list(prefix, start_after=start_after)

    def delete(self, keys: Sequence[str]) -> None:
        fault = self._meet("delete", keys[0] if keys else "")
        if fault is not None and fault.kind == "apply-then-fail":
            half = len(keys) // 2
            self.inner.delete(keys[:half])
            raise DeleteIncompleteError(list(keys[half:]), "injected")
        self.inner.delete(keys)

    def settle(self, prefix: str) -> None:
        self.inner.settle(prefix)
