"""The Clock seam: time, threads and randomness.

Owns: what the real ones are. Does not own: policy (who sleeps how long).
Every wait, thread, lock and random number of the protocol comes from here, so a simulation
that swaps the clock decides every interleaving and runs the code that users run.

Rule for all code that uses it: no store operation while a lock is held. The simulation
checks it.
"""

from __future__ import annotations

import _thread
import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Protocol, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class Lock(Protocol):
    def __enter__(self) -> Any: ...
    def __exit__(self, *exc: Any) -> Any: ...


class Condition(Protocol):
    """A condition over a lock; several may share one."""

    def wait(self, timeout: float | None = None) -> bool: ...
    def notify(self, n: int = 1) -> None: ...
    def notify_all(self) -> None: ...


class Gate(Protocol):
    """Closed at first, opened once, for good. Cheaper than an event."""

    def open(self) -> None: ...
    def wait(self, timeout: float | None = None) -> bool: ...


class Thread(Protocol):
    def join(self, timeout: float | None = None) -> None: ...
    def is_alive(self) -> bool: ...


class Clock(Protocol):
    """Time, threads and randomness."""

    def now(self) -> float:
        """Seconds since 1970. May jump: nothing the protocol proves depends on it."""
        ...

    def monotonic(self) -> float:
        """Seconds from some point on; never backwards."""
        ...

    def sleep(self, seconds: float) -> None: ...
    def lock(self) -> Lock: ...
    def condition(self, lock: Lock) -> Condition: ...
    def gate(self) -> Gate: ...

    def spawn(self, run: Callable[[], None], *, name: str) -> Thread:
        """Start ``run`` in a thread that does not keep the process alive."""
        ...

    def token(self) -> str:
        """A fresh random name: 26 lower-case characters that sort by time (a ULID)."""
        ...

    def jitter(self) -> float:
        """A random number in [0.5, 1.0)."""
        ...


_WAIT_MAX = threading.TIMEOUT_MAX


class _LockGate:
    __slots__ = ("_is_open", "_lock")

    def __init__(self) -> None:
        self._is_open = False
        self._lock = _thread.allocate_lock()
        self._lock.acquire()

    def open(self) -> None:
        self._is_open = True
        try:
            self._lock.release()
        except RuntimeError:  # open already
            return

    def wait(self, timeout: float | None = None) -> bool:
        try:
            self._lock.acquire(timeout=-1 if timeout is None or timeout > _WAIT_MAX else max(0.0, timeout))
        finally:
            if self._is_open:
                self.open()  # for the next waiter; also if an interrupt came with the lock in our hands
        return self._is_open


_CROCKFORD = "0123456789abcdefghjkmnpqrstvwxyz"


def ulid(milliseconds: int, entropy: int) -> str:
    """A ULID in lower case: 48 bits of time, then 80 bits of ``entropy``."""
    value = ((milliseconds & (1 << 48) - 1) << 80) | entropy
    return "".join(_CROCKFORD[(value >> shift) & 31] for shift in range(125, -1, -5))


class SystemClock:
    """The real thing."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def lock(self) -> Lock:
        return threading.Lock()

    def condition(self, lock: Lock) -> Condition:
        return threading.Condition(lock)  # type: ignore[arg-type]  # ours are threading locks

    def gate(self) -> Gate:
        return _LockGate()

    def spawn(self, run: Callable[[], None], *, name: str) -> Thread:
        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    def token(self) -> str:
        return ulid(int(time.time() * 1000), secrets.randbits(80))

    def jitter(self) -> float:
        return random.uniform(0.5, 1.0)


SYSTEM_CLOCK = SystemClock()


def map_ordered(
    clock: Clock,
    work: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    parallel: int,
    ahead: int | None = None,
    patience: float | None = None,
) -> Generator[Result]:
    """``work`` of each item, in order, up to ``parallel`` at once and ``ahead`` results held.

    An error is raised where its result would have stood. Leaving the iterator early stops the
    threads after the item they are at.

    Args:
        patience: for work that may be so short that threads would take longer: as long as each item takes no more seconds than
            this, it is done here, one after the other. None: threads from the first one on.
    """
    while patience is not None and len(items) > 1:
        began = clock.monotonic()
        first = work(items[0])
        if clock.monotonic() - began > patience:
            patience = None
        items = items[1:]
        yield first
    parallel = min(parallel, len(items))
    if parallel <= 1:
        yield from map(work, items)
        return
    ahead = max(parallel, ahead or 2 * parallel)
    lock = clock.lock()
    changed = clock.condition(lock)
    results: dict[int, tuple[Result | None, BaseException | None]] = {}
    taken = given = 0
    stop = False

    def run() -> None:
        nonlocal taken
        while True:
            with lock:
                while not stop and taken < len(items) and taken - given >= ahead:
                    changed.wait()
                if stop or taken >= len(items):
                    return
                number = taken
                taken += 1
            result: Result | None = None
            failure: BaseException | None = None
            try:
                result = work(items[number])
            except BaseException as error:  # a thread's end: stored, raised to the caller below
                failure = error
            with lock:
                results[number] = (result, failure)
                changed.notify_all()

    threads = [clock.spawn(run, name=f"headgate-map-{i}") for i in range(parallel)]
    try:
        for number in range(len(items)):
            with lock:
                while number not in results:
                    changed.wait()
                result, failure = results.pop(number)
                given = number + 1
                changed.notify_all()
            if failure is not None:
                raise failure
            yield result  # type: ignore[misc]  # no failure: there is a result
    finally:
        with lock:
            stop = True
            changed.notify_all()
        for thread in threads:
            thread.join()


def in_order_ahead(
    clock: Clock,
    read: Callable[[Item], Iterator[Result]],
    items: Sequence[Item],
    *,
    parallel: int,
    sizes: Sequence[int | None],
    budget: int,
    held: int = 2,
) -> Iterator[Result]:
    """All results of each item, in order, while up to ``parallel`` items are read at once.

    What is held is bounded, however slowly it is taken: up to ``held`` results of an item, of ``2 * parallel`` items
    at most, and of so many that their sizes are within the budget. The one that is waited for is always read, so
    nothing stands still if a single one is too large.

    An error is raised after the results that its item gave before it. Leaving the iterator early stops the threads
    after the result they are at. One at once: no threads, and nothing is read that was not asked for.

    Args:
        read: the results of an item; it is read by one thread, from first to last.
        sizes: what of each item is held at most, in the budget's unit. None: nothing is gained by reading it ahead,
            and the caller's thread reads it when its turn has come.
    """
    ahead = [number for number, size in enumerate(sizes) if size is not None]
    parallel = min(parallel, len(ahead))
    if parallel <= 1:
        for item in items:
            yield from read(item)
        return
    lock = clock.lock()
    arrived, wanted = clock.condition(lock), clock.condition(lock)
    results: dict[int, deque[Result]] = {number: deque() for number in ahead}
    ended: dict[int, BaseException | None] = {}
    taken = given = begun = 0  # of those that are read ahead; and the size of what was taken and not given yet
    stop = False

    def stopped() -> bool:
        return stop

    def may_begin() -> bool:
        return taken == given or (taken - given < 2 * parallel and begun + (sizes[ahead[taken]] or 0) <= budget)

    def run() -> None:
        nonlocal taken, begun
        while True:
            with lock:
                while not stopped() and taken < len(ahead) and not may_begin():
                    wanted.wait()
                if stopped() or taken >= len(ahead):
                    return
                number = ahead[taken]
                taken += 1
                begun += sizes[number] or 0
            failure: BaseException | None = None
            try:
                for result in read(items[number]):
                    with lock:
                        while not stopped() and len(results[number]) >= held:
                            wanted.wait()
                        if stopped():
                            return
                        results[number].append(result)
                        arrived.notify()
            except BaseException as error:  # a thread's end: stored, raised to the caller below
                failure = error
            with lock:
                ended[number] = failure
                arrived.notify()

    threads = [clock.spawn(run, name=f"headgate-ahead-{i}") for i in range(parallel)]
    try:
        for number, item in enumerate(items):
            if number not in results:
                yield from read(item)
                continue
            while True:
                with lock:
                    while not results[number] and number not in ended:
                        arrived.wait()
                    if not results[number]:
                        break
                    result = results[number].popleft()
                    wanted.notify_all()
                yield result
                del result  # not held while the next one is waited for
            with lock:
                failure = ended.pop(number)
                given += 1
                begun -= sizes[number] or 0
                wanted.notify_all()
            if failure is not None:
                raise failure
    finally:
        with lock:
            stop = True
            wanted.notify_all()
        for thread in threads:
            thread.join()
