"""Working ahead: the next results of an iterator are made by a thread while the last ones are being used.

Owns: the thread between one who makes and one who takes, a thread for one thing that is wanted later, and one that is fed.
Does not own: what is made, nor many of them at once (clock).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Generic, TypeVar

from headgate.clock import Clock

Item = TypeVar("Item")
Result = TypeVar("Result")


def ahead(clock: Clock, results: Iterator[Result], held: int = 1) -> Generator[Result]:
    """The same results in the same order; while one is used, up to ``held`` further ones are made, by one thread."""
    return worked_ahead(clock, lambda result: result, results, parallel=1, held=held)


def worked_ahead(
    clock: Clock,
    work: Callable[[Item], Result],
    items: Iterator[Item],
    *,
    parallel: int,
    held: int = 1,
    size: Callable[[Result], int] = lambda _: 0,
    held_bytes: int = 1,
) -> Generator[Result]:
    """``work`` of each item, in order, by so many threads; while one result is used, up to ``held`` further ones are made.

    None is begun while those that wait have ``held_bytes`` or more, by ``size``. The items are made one after the other.
    An error is raised where its result would have stood. Leaving the iterator early stops the threads after what they are at.
    """
    making, lock = clock.lock(), clock.lock()
    changed = clock.condition(lock)
    made: dict[int, tuple[Result, int]] = {}
    failures: dict[int, BaseException] = {}
    taken = given = waiting_bytes = 0
    end: int | None = None
    is_left = False

    def fail(number: int, error: BaseException) -> None:
        nonlocal end
        with lock:
            failures[number] = error
            end = number + 1 if end is None else min(end, number + 1)
            changed.notify_all()

    def run() -> None:
        nonlocal taken, end, waiting_bytes
        while True:
            with making:
                with lock:
                    while (taken - given >= held or (made and waiting_bytes >= held_bytes)) and not is_left and end is None:
                        changed.wait()
                    if is_left or end is not None:
                        return
                    number = taken
                try:
                    item = next(items)
                except StopIteration:
                    with lock:
                        end = number
                        changed.notify_all()
                    return
                except BaseException as error:  # a thread's end: raised to the caller below, in its turn
                    fail(number, error)
                    return
                with lock:
                    taken += 1
            try:
                result = work(item)
                result_bytes = size(result)
            except BaseException as error:  # the same
                fail(number, error)
                return
            del item
            with lock:
                made[number] = result, result_bytes
                waiting_bytes += result_bytes
                changed.notify_all()
            del result  # whoever takes it lets it go

    threads = [clock.spawn(run, name=f"headgate-ahead-{number}") for number in range(parallel)]
    try:
        while True:
            with lock:
                while given not in made and given not in failures and (end is None or given < end):
                    changed.wait()
                if given in failures:
                    raise failures[given]
                if given not in made:
                    return
                result, result_bytes = made.pop(given)
                waiting_bytes -= result_bytes
                given += 1
                changed.notify_all()
            yield result
            del result
    finally:
        with lock:
            is_left = True
            changed.notify_all()
        for thread in threads:
            thread.join()


class Task(Generic[Result]):
    """Something that is done meanwhile."""

    def __init__(self, clock: Clock, work: Callable[[], Result], name: str) -> None:
        self._done: list[Result] = []
        self._failure: BaseException | None = None
        self._thread = clock.spawn(lambda: self._run(work), name=name)

    def _run(self, work: Callable[[], Result]) -> None:
        try:
            self._done.append(work())
        except BaseException as error:  # a thread's end: raised to whoever asks for the result
            self._failure = error

    def result(self) -> Result:
        """What came of it, when it is done. Raises what it raised."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        return self._done[0]


class Fed(Generic[Item, Result]):
    """A thread that takes items as they are fed to it. Feeding waits while ``held_bytes`` or more, by ``size``, are not taken yet."""

    def __init__(
        self, clock: Clock, work: Callable[[Iterator[Item]], Result], size: Callable[[Item], int], held_bytes: int, name: str
    ) -> None:
        self._lock = clock.lock()
        self._changed = clock.condition(self._lock)
        self._size, self._held_bytes = size, held_bytes
        self._items: deque[tuple[Item, int]] = deque()
        self._waiting_bytes = 0
        self._is_ended = self._is_over = False
        self._failure: BaseException | None = None
        self._task = Task(clock, lambda: self._run(work), name)

    def feed(self, item: Item) -> None:
        """Raises what the work raised, if it is over."""
        size = self._size(item)
        with self._lock:
            while self._items and self._waiting_bytes >= self._held_bytes and not self._is_over:
                self._changed.wait()
            if not self._is_over:
                self._items.append((item, size))
                self._waiting_bytes += size
                self._changed.notify_all()
                return
        self._task.result()
        raise AssertionError("it ended before its items did")

    def end(self, failure: BaseException | None = None) -> None:
        """No more come; with a failure, those that were not taken are dropped and it is raised to the work. Can be repeated."""
        with self._lock:
            self._is_ended = True
            if failure is not None and self._failure is None:
                self._failure = failure
                self._items.clear()
            self._changed.notify_all()

    def result(self) -> Result:
        """What came of it, when it is done. Raises what it raised."""
        return self._task.result()

    def _run(self, work: Callable[[Iterator[Item]], Result]) -> Result:
        try:
            return work(self._taken())
        finally:
            with self._lock:
                self._is_over = True
                self._items.clear()
                self._changed.notify_all()

    def _taken(self) -> Iterator[Item]:
        while True:
            with self._lock:
                while not self._items and not self._is_ended:
                    self._changed.wait()
                if self._failure is not None:
                    raise self._failure
                if not self._items:
                    return
                item, size = self._items.popleft()
                self._waiting_bytes -= size
                self._changed.notify_all()
            yield item
            del item
