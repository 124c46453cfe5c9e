"""Working ahead: order, errors, bounds, and leaving early."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import count

import pytest

from headgate.ahead import Fed, Task, ahead, worked_ahead
from headgate.clock import SYSTEM_CLOCK

PATIENCE = 30.0


@pytest.mark.parametrize("parallel", [1, 2, 5])
@pytest.mark.parametrize("held", [1, 3])
def test_results_come_in_order_however_long_each_takes(parallel: int, held: int) -> None:
    turns = threading.Barrier(2, timeout=5) if parallel > 1 and held > 1 else None

    def work(number: int) -> int:
        if turns is not None and number < 2:
            turns.wait()  # two at once
        return number * number

    assert list(worked_ahead(SYSTEM_CLOCK, work, iter(range(100)), parallel=parallel, held=held)) == [n * n for n in range(100)]


@pytest.mark.parametrize("parallel", [1, 3])
def test_an_error_comes_where_its_result_would_have_stood(parallel: int) -> None:
    def work(number: int) -> int:
        if number == 7:
            raise ValueError("seven")
        return number

    results = worked_ahead(SYSTEM_CLOCK, work, iter(range(100)), parallel=parallel, held=parallel)
    assert [next(results) for _ in range(7)] == list(range(7))
    with pytest.raises(ValueError, match="seven"):
        next(results)


def test_work_that_runs_out_of_something_is_an_error_and_no_end() -> None:
    def work(number: int) -> int:
        return next(iter([number] if number < 3 else []))

    results = worked_ahead(SYSTEM_CLOCK, work, iter(range(9)), parallel=2, held=2)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(RuntimeError):
        next(results)


def test_an_error_of_the_items_comes_after_what_they_gave() -> None:
    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise OSError("no more")

    results = ahead(SYSTEM_CLOCK, items())
    assert [next(results), next(results)] == [1, 2]
    with pytest.raises(OSError, match="no more"):
        next(results)


@pytest.mark.parametrize(("parallel", "held"), [(1, 1), (1, 4), (3, 3)])
def test_no_more_is_made_than_may_be_held(parallel: int, held: int) -> None:
    made = 0

    def items() -> Iterator[int]:
        nonlocal made
        for number in range(60):
            made += 1
            yield number

    for given, _ in enumerate(worked_ahead(SYSTEM_CLOCK, lambda n: n, items(), parallel=parallel, held=held), start=1):
        assert made <= given + held


def test_whoever_leaves_early_leaves_no_thread_behind_and_nothing_half_made() -> None:
    before, is_closed = threading.active_count(), False

    def items() -> Iterator[int]:
        nonlocal is_closed
        try:
            yield from count()
        finally:
            is_closed = True

    source = items()
    results = worked_ahead(SYSTEM_CLOCK, lambda n: n, source, parallel=3, held=3)
    assert [next(results) for _ in range(10)] == list(range(10))
    results.close()
    assert threading.active_count() == before
    source.close()  # type: ignore[attr-defined]
    assert is_closed


def test_nothing_runs_before_the_first_result_is_asked_for() -> None:
    before = threading.active_count()
    results = ahead(SYSTEM_CLOCK, iter([1]))
    assert threading.active_count() == before
    assert list(results) == [1]


def test_a_task_gives_what_came_of_it_or_raises_what_it_raised() -> None:
    assert Task(SYSTEM_CLOCK, lambda: 5, "five").result() == 5

    def fails() -> None:
        raise OSError("the disk is full")

    failed = Task(SYSTEM_CLOCK, fails, "fails")
    for _ in range(2):
        with pytest.raises(OSError, match="full"):
            failed.result()


def test_a_result_whose_size_cannot_be_told_is_an_error() -> None:
    with pytest.raises(ZeroDivisionError):
        list(worked_ahead(SYSTEM_CLOCK, lambda n: n, iter(range(3)), parallel=2, held=2, size=lambda n: n // 0))


@pytest.mark.parametrize("parallel", [1, 3])
def test_what_waits_is_bounded_by_its_size_too(parallel: int) -> None:
    begun: list[int] = []

    def work(number: int) -> int:
        begun.append(number)
        return number

    results = worked_ahead(SYSTEM_CLOCK, work, iter(range(200)), parallel=parallel, held=100, size=lambda _: 10, held_bytes=30)
    for given, result in enumerate(results, start=1):
        assert result == given - 1
        time.sleep(0.0005)
        # Three that wait, and one more of each thread that had begun before the last of them was there.
        assert len(begun) <= given + 3 + parallel
    assert len(begun) == 200


# -- fed


def test_a_fed_thread_takes_all_in_order_and_answers() -> None:
    fed = Fed(SYSTEM_CLOCK, list, lambda _: 1, 3, name="eater")
    for number in range(100):
        fed.feed(number)
    fed.end()
    assert fed.result() == list(range(100))


def test_feeding_waits_while_too_much_is_not_taken() -> None:
    go_on, fed_so_far = threading.Event(), list[int]()

    def work(items: Iterator[int]) -> list[int]:
        go_on.wait(PATIENCE)
        return list(items)

    fed = Fed(SYSTEM_CLOCK, work, lambda _: 10, 25, name="eater")

    def feed() -> None:
        for number in range(10):
            fed.feed(number)
            fed_so_far.append(number)
        fed.end()

    feeder = threading.Thread(target=feed)
    feeder.start()
    feeder.join(0.05)
    assert len(fed_so_far) == 3, "the third is fed while less than the bound waits, and passes it"
    go_on.set()
    assert fed.result() == list(range(10))
    feeder.join(PATIENCE)


@pytest.mark.parametrize("held_bytes", [0, 1])
def test_however_little_may_wait_all_of_it_gets_through(held_bytes: int) -> None:
    fed = Fed(SYSTEM_CLOCK, list, lambda _: 10, held_bytes, name="eater")
    for number in range(20):
        fed.feed(number)
    fed.end()
    assert fed.result() == list(range(20))
    worked = worked_ahead(SYSTEM_CLOCK, lambda n: n, iter(range(20)), parallel=2, held=5, size=lambda _: 10, held_bytes=held_bytes)
    assert list(worked) == list(range(20))


def test_who_feeds_is_told_what_went_wrong() -> None:
    def work(items: Iterator[int]) -> None:
        next(items)
        raise OSError("the disk is full")

    fed = Fed(SYSTEM_CLOCK, work, lambda _: 1, 2, name="eater")

    def feed_all() -> None:
        for number in count():
            fed.feed(number)

    with pytest.raises(OSError, match="the disk is full"):
        feed_all()
    with pytest.raises(OSError, match="the disk is full"):
        fed.result()


def test_who_is_fed_is_told_that_no_more_will_come() -> None:
    taken: list[int] = []

    def work(items: Iterator[int]) -> None:
        taken.extend(items)

    fed = Fed(SYSTEM_CLOCK, work, lambda _: 1, 2, name="eater")
    fed.feed(0)
    fed.end(KeyError("what was to come"))
    fed.end(KeyError("told twice"))
    with pytest.raises(KeyError, match="what was to come"):
        fed.result()
    assert taken == []
