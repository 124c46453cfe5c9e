"""Bounded retries for reads, listings and deletions.

Owns: how often and how long. Does not own: creates, whose outcome must be read (exact).
NotFound is an answer, not a failure: it is never retried here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from headgate.clock import Clock
from headgate.errors import DeleteIncompleteError, ObjectMissingError, StoreError, StoreUnavailableError
from headgate.meters import STORE_ERRORS, STORE_RETRIES
from headgate.store.base import Data, ObjectInfo, Store

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """``retries`` after the first try, the wait doubling from ``base_delay`` to ``max_delay`` seconds, with jitter."""

    retries: int = 4
    base_delay: float = 0.05
    max_delay: float = 2.0

    def delay(self, attempt: int, clock: Clock) -> float:
        """How long to wait after failed attempt number ``attempt``, from 0."""
        return min(self.max_delay, self.base_delay * (1 << min(attempt, 20))) * clock.jitter()


class RetryingStore(Store):
    """Another store, with transient failures of everything but create tried again."""

    def __init__(self, inner: Store, clock: Clock, policy: RetryPolicy | None = None) -> None:
        self.inner, self._clock, self._policy = inner, clock, policy or RetryPolicy()

    @property
    def uri(self) -> str:
        return self.inner.uri

    def _again(self, operation: str, call: Callable[[], Result]) -> Result:
        for attempt in range(self._policy.retries + 1):
            try:
                return call()
            except ObjectMissingError:
                raise
            except StoreError as error:
                self._count(operation, attempt, error)
                if attempt == self._policy.retries or not isinstance(error, StoreUnavailableError):
                    raise
            self._clock.sleep(self._policy.delay(attempt, self._clock))
        raise AssertionError("the last try returns or raises")

    def _count(self, operation: str, attempt: int, error: StoreError) -> None:
        STORE_ERRORS.add(1, self.uri, type(error).__name__)
        if attempt < self._policy.retries and isinstance(error, StoreUnavailableError):
            STORE_RETRIES.add(1, self.uri, operation)

    def create(self, key: str, data: Data) -> None:
        self.inner.create(key, data)

    def get(self, key: str) -> memoryview:
        return self._again("get", lambda: self.inner.get(key))

    @property
    def is_near(self) -> bool:  # type: ignore[override]  # as the other one is
        return self.inner.is_near

    def keys(self, prefix: str, *, start_after: str = "") -> Sequence[str]:
        return self._again("list", lambda: self.inner.keys(prefix, start_after=start_after))

    def get_each(self, keys: Sequence[str], most_bytes: int) -> Sequence[memoryview | StoreError]:
        found = list(self.inner.get_each(keys, most_bytes))
        for number, answer in enumerate(found):
            if isinstance(answer, StoreUnavailableError):
                try:
                    found[number] = self.get(keys[number])
                except StoreError as error:
                    found[number] = error
        return found

    def get_range(self, key: str, start: int, length: int) -> memoryview:
        return self._again("get", lambda: self.inner.get_range(key, start, length))

    def head(self, key: str) -> ObjectInfo:
        return self._again("head", lambda: self.inner.head(key))

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        attempt = 0
        while True:
            try:
                for info in self.inner.list(prefix, start_after=start_after):
                    yield info
                    start_after, attempt = info.key, 0
                return
            except StoreUnavailableError as error:
                self._count("list", attempt, error)
                if attempt >= self._policy.retries:
                    raise
                self._clock.sleep(self._policy.delay(attempt, self._clock))
                attempt += 1

    def delete(self, keys: Sequence[str]) -> None:
        left = list(keys)
        for attempt in range(self._policy.retries + 1):
            try:
                self.inner.delete(left)
                return
            except StoreUnavailableError as error:
                self._count("delete", attempt, error)
                if attempt == self._policy.retries:
                    raise
                left = error.keys if isinstance(error, DeleteIncompleteError) else left
            self._clock.sleep(self._policy.delay(attempt, self._clock))

    def settle(self, prefix: str) -> None:
        self.inner.settle(prefix)

    def prune(self, prefix: str) -> None:
        self.inner.prune(prefix)
