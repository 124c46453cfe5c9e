"""Waiters who wake each other: none is forgotten, whatever happens to the others."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from headgate.clock import SYSTEM_CLOCK, Gate
from headgate.wal.ack import Ack, Relay

PATIENCE = 30.0


class Waiters:
    """Threads, each of which waits for an Ack of its own."""

    def __init__(self, relay: Relay, count: int) -> None:
        self.acks = [Ack(SYSTEM_CLOCK, None, relay) for _ in range(count)]
        self.outcomes: dict[int, Any] = {}
        self.threads = [threading.Thread(target=self._wait, args=(number,), daemon=True) for number in range(count)]

    def start(self) -> None:
        for thread in self.threads:
            thread.start()
        for ack in self.acks:
            while not ack._waits:
                threading.Event().wait(0.001)

    def _wait(self, number: int) -> None:
        try:
            self.outcomes[number] = dict(self.acks[number].wait())
        except BaseException as error:
            self.outcomes[number] = type(error)

    def join(self) -> None:
        for thread in self.threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()


def decide(acks: list[Ack]) -> None:
    for position, ack in enumerate(acks):
        ack._decide(("0000", 1, position))


class Interrupting:
    """A gate whose waiter is interrupted right after it was let through."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def open(self) -> None:
        self._gate.open()

    def wait(self, timeout: float | None = None) -> bool:
        self._gate.wait(timeout)
        raise KeyboardInterrupt


def test_each_wakes_the_next() -> None:
    relay = Relay(SYSTEM_CLOCK)
    waiters = Waiters(relay, 20)
    waiters.start()
    decide(waiters.acks)
    relay.wake(waiters.acks)
    waiters.join()
    assert waiters.outcomes == {number: {"0000": (1, number)} for number in range(20)}
    assert not relay


def test_who_is_interrupted_passes_on() -> None:
    relay = Relay(SYSTEM_CLOCK)
    waiters = Waiters(relay, 20)
    for number in range(0, 20, 3):
        waiters.acks[number]._gate = Interrupting(waiters.acks[number]._gate)
    waiters.start()
    decide(waiters.acks)
    relay.wake(waiters.acks)
    waiters.join()
    assert [waiters.outcomes[number] is KeyboardInterrupt for number in range(20)] == [number % 3 == 0 for number in range(20)]


def test_puts_that_nobody_waits_for_stop_nothing() -> None:
    relay = Relay(SYSTEM_CLOCK)
    waiters = Waiters(relay, 6)
    waiters.start()
    left = [Ack(SYSTEM_CLOCK, None, relay) for _ in range(6)]
    acks = [ack for pair in zip(left, waiters.acks, strict=True) for ack in pair]
    decide(acks)
    relay.wake(acks)
    waiters.join()
    assert all(ack.wait(0) for ack in left)


def test_who_left_the_line_meanwhile_stops_nothing() -> None:
    relay = Relay(SYSTEM_CLOCK)
    waiters = Waiters(relay, 3)
    waiters.start()
    gone = [Ack(SYSTEM_CLOCK, None, relay) for _ in range(2)]
    for ack in gone:
        ack._waits = True
    first, *others = waiters.acks
    acks = [first, *gone, *others]
    decide(acks)
    relay._line.extend(acks)
    for ack in gone:  # as a thread does that gives up now, after it was put into the line
        ack._waits = False
    relay.pass_on()
    waiters.join()


def test_told_twice_is_as_good_as_once() -> None:
    relay = Relay(SYSTEM_CLOCK)
    waiters = Waiters(relay, 5)
    waiters.start()
    decide(waiters.acks)
    relay.wake(waiters.acks[:2])
    relay.wake(waiters.acks)
    waiters.join()
    relay.pass_on()
    assert not relay


def test_a_line_that_stands_still_is_woken_by_the_writer(bench: Any) -> None:
    """A thread that was interrupted while it passed on, or that waits for the interpreter: the others do not wait for it."""
    writer = bench.writer()
    relay = writer._pipeline._relay
    stuck = Ack(SYSTEM_CLOCK, None, relay)
    stuck._waits = True  # and never passes on
    stuck._decide(("0000", 1, 0))
    waiters = Waiters(relay, 3)
    waiters.start()
    decide(waiters.acks)
    relay._line.extend([stuck, *waiters.acks])
    relay.pass_on()
    assert relay, "nobody passed on"
    writer.put(bench.rows(1)).wait()
    waiters.join()
    assert not relay


@pytest.mark.parametrize("threads", [2, 5, 24])
def test_nobody_is_forgotten_among_waiters_of_all_kinds(bench: Any, threads: int) -> None:
    """Some wait, some wait for a while only, some do not wait, some give up."""
    writer = bench.writer()

    def put_some(start: int) -> None:
        for number in range(start, start + 40):
            ack = writer.put(bench.rows(number))
            kind = number % 7
            if kind == 0:
                continue
            if kind == 1:
                try:
                    ack.wait(0.0)
                except TimeoutError:
                    continue
            elif kind == 2:
                ack.wait(PATIENCE)
            else:
                ack.wait()

    running = [threading.Thread(target=put_some, args=(100 * number,), daemon=True) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    writer.close()
    assert sorted(bench.ids()) == sorted(100 * thread + number for thread in range(threads) for number in range(40))
