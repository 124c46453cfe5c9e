"""Waiters who wake each other: none is forgotten, whatever happens to the others."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from headgate.clock import SYSTEM_CLOCK, Gate
from headgate.errors import ClosedError
from headgate.wal.ack import Ack, Relay
from headgate.wal.entry import Put
from headgate.wal.pipeline import Pipeline

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


class Fault:
    """The first of the waiters is interrupted where it should pass on: the line stands still."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.struck = threading.Event()
        pass_on = Relay.pass_on

        def interrupted(relay: Relay) -> None:
            if threading.current_thread().name.startswith("waiter") and not self.struck.is_set():
                self.struck.set()
                raise KeyboardInterrupt
            pass_on(relay)

        monkeypatch.setattr(Relay, "pass_on", interrupted)


class SlowWriter:
    """As much of an epoch's writer as a pipeline needs, with a store as slow as wanted."""

    epoch = 1

    def __init__(self) -> None:
        self.seconds, self.released = 0.0, threading.Event()
        self.claim = SimpleNamespace(space=SimpleNamespace(shard="0000"), first=SimpleNamespace(position=0))
        self.log = SimpleNamespace(manifests=SimpleNamespace(place="table"))

    def encode(self, *_: Any) -> memoryview:
        return memoryview(b"entry")

    def persist(self, *_: Any) -> None:
        self.released.wait(self.seconds)


ROWS = pa.record_batch({"id": [1]})


class Crowd:
    """Threads that wait for puts of one entry, and a pipeline that they share."""

    def __init__(self, *, max_inflight: int = 4, min_interval: float = 0.0) -> None:
        self.writer: Any = SlowWriter()
        self.pipeline = Pipeline(
            self.writer,
            SYSTEM_CLOCK,
            max_entry_bytes=1 << 22,
            min_interval=min_interval,
            max_inflight=max_inflight,
            max_unacknowledged_bytes=1 << 30,
        )
        self.back: list[int] = []
        self.threads: list[threading.Thread] = []

    def end(self) -> None:
        """No thread stays behind, for whoever counts them in another test."""
        self.writer.released.set()
        assert self.pipeline.abort(PATIENCE)

    def put(self) -> Ack:
        return self.pipeline.submit(Put(ROWS), ROWS.schema, 10)

    def begin(self, count: int) -> None:
        """While an entry is under way, so that they share the next one."""
        self.writer.seconds = 0.1
        self.put()
        time.sleep(0.02)
        acks = [self.put() for _ in range(count)]
        self.threads = [
            threading.Thread(target=self._wait, args=(number, ack), name=f"waiter {number}", daemon=True) for number, ack in enumerate(acks)
        ]
        for thread in self.threads:
            thread.start()

    def _wait(self, number: int, ack: Ack) -> None:
        try:
            ack.wait()
        except (KeyboardInterrupt, ClosedError):  # a put that was not decided when the writer ended
            pass
        self.back.append(number)

    def all_back(self) -> bool:
        for thread in self.threads:
            thread.join(PATIENCE)
        return len(self.back) == len(self.threads)


@pytest.mark.parametrize("max_inflight", [1, 4])
def test_a_slot_that_goes_off_with_an_entry_leaves_no_line_behind(monkeypatch: pytest.MonkeyPatch, max_inflight: int) -> None:
    fault, crowd = Fault(monkeypatch), Crowd(max_inflight=max_inflight)
    crowd.begin(6)
    assert fault.struck.wait(PATIENCE)
    crowd.writer.seconds = 2 * PATIENCE
    crowd.put()
    assert crowd.all_back(), "although the next entry takes longer than anybody waits"
    crowd.end()


def test_a_slot_that_waits_for_its_time_looks_in_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    fault, crowd = Fault(monkeypatch), Crowd(min_interval=0.5)
    crowd.begin(6)
    assert fault.struck.wait(PATIENCE)
    crowd.pipeline._min_interval = 2 * PATIENCE
    crowd.put()
    assert crowd.all_back()
    crowd.end()


@pytest.mark.parametrize("end", ["close", "abort"])
def test_the_end_of_a_writer_wakes_all(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    fault, crowd = Fault(monkeypatch), Crowd()
    crowd.begin(6)
    if end == "close":
        crowd.pipeline.close()
    else:
        assert fault.struck.wait(PATIENCE)
        crowd.pipeline.abort(PATIENCE)
    assert crowd.all_back()
    crowd.end()


def test_a_line_that_begins_after_the_end_is_woken_at_once() -> None:
    relay = Relay(SYSTEM_CLOCK)
    waiters = Waiters(relay, 5)
    waiters.start()
    decide(waiters.acks)
    relay.end()
    waiters.acks[0]._gate = Interrupting(waiters.acks[0]._gate)
    relay.wake(waiters.acks)
    assert not relay
    waiters.join()


def test_puts_that_nobody_waited_for_are_no_company_for_long() -> None:
    crowd = Crowd()
    crowd.writer.seconds = 0.05
    for _ in range(3000):
        crowd.put()
    crowd.pipeline.drain()
    crowd.writer.seconds = 0.0
    for _ in range(40):
        crowd.put().wait()
    assert crowd.pipeline._company <= 1
    crowd.end()


def test_a_decided_put_is_no_timeout_although_it_stands_in_line() -> None:
    ack = Ack(SYSTEM_CLOCK, None, Relay(SYSTEM_CLOCK))

    class Slow:
        def open(self) -> None: ...

        def wait(self, timeout: float | None = None) -> bool:
            ack._decide(("0000", 1, 3))
            return False

    ack._gate = Slow()
    assert dict(ack.wait(0.01)) == {"0000": (1, 3)}


def test_a_gate_that_is_opened_twice_and_left_by_an_interrupt_stays_open() -> None:
    gate: Any = SYSTEM_CLOCK.gate()
    gate.open()
    gate._lock.acquire()  # as a waiter has it that was let through, and is interrupted before it gives it back
    gate.open()
    assert gate.wait(0)
    gate.open()
    assert gate.wait(0)


def test_who_fails_may_be_interrupted_before_all_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd, wake, struck = Crowd(), Ack._wake, threading.Event()
    crowd.begin(6)
    crowd.writer.seconds = 2 * PATIENCE
    while crowd.pipeline.stats().inflight_entries < 2:
        time.sleep(0.001)

    def interrupted(ack: Ack) -> None:
        if not struck.is_set():
            struck.set()
            raise KeyboardInterrupt
        wake(ack)

    monkeypatch.setattr(Ack, "_wake", interrupted)
    with pytest.raises(KeyboardInterrupt):
        crowd.pipeline.fail(ClosedError("the end"))
    assert not crowd.back
    crowd.writer.released.set()  # what is under way lands, and tells all that the writer has failed
    assert crowd.all_back()
    crowd.end()


def test_coroutines_of_two_loops_may_wait_for_one_put() -> None:
    """Both may begin to wait at one moment: neither makes a list of its own, which the other would not be in."""
    ack, told = Ack(SYSTEM_CLOCK), list[int]()
    callbacks = ack._callbacks
    for number in range(2):
        ack._when_done(lambda number=number: told.append(number))
        assert ack._callbacks is callbacks

    async def wait() -> Any:
        return dict(await ack)

    answers: list[Any] = []
    loops = [threading.Thread(target=lambda: answers.append(asyncio.run(wait())), daemon=True) for _ in range(2)]
    for loop in loops:
        loop.start()
    while len(callbacks) < 4:
        time.sleep(0.001)
    ack._decide(("0000", 1, 0))
    ack._wake()
    for loop in loops:
        loop.join(PATIENCE)
    assert told == [0, 1]
    assert answers == [{"0000": (1, 0)}] * 2
