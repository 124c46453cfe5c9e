"""Acknowledgements: what ``put`` returns, and what it becomes.

Owns: waiting, from threads and from coroutines. Does not own: when a put is durable (pipeline).
"""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, Protocol

from headgate.clock import Clock
from headgate.errors import HeadgateError

_RELAY_SECONDS, _RELAY_SECONDS_EACH = 0.005, 0.0005


class Leader(Protocol):
    """What decides an Ack, as far as those who wait for it can help it on."""

    def lead(self, ack: Ack) -> float | None:
        """Do what can be done now; returns after how many seconds to ask again (None: wait to be told)."""
        ...

    def nudge(self) -> None:
        """See that somebody else does it."""
        ...


class Receipt(Mapping[str, tuple[int, int]]):
    """Where a put went: shard -> (epoch, position).

    ``duplicate`` is True when a producer's sequence had been accepted before: then the first
    copy is where it says, or before.
    """

    __slots__ = ("_places", "duplicate")

    def __init__(self, places: Mapping[str, tuple[int, int]], *, duplicate: bool = False) -> None:
        self._places = dict(places)
        self.duplicate = duplicate

    def __getitem__(self, shard: str) -> tuple[int, int]:
        return self._places[shard]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __repr__(self) -> str:
        places = ", ".join(f"{shard}: epoch {epoch} position {position}" for shard, (epoch, position) in self._places.items())
        return f"Receipt({places}{', duplicate' if self.duplicate else ''})"


class Relay:
    """Those who wait for puts that are decided, and wake each other: each the next one.

    Woken all at once, they would all wait for the interpreter, and each be woken again for nothing whenever it is let go. So
    whoever has been woken wakes the next, and there is always one who is awake: an Ack leaves the line only after it was woken,
    whoever stops waiting for any reason passes on, and whoever does not wait stops nothing. Somebody still has to look in
    (``is_due``, ``rush``): a thread may be interrupted while it passes on, or be long in coming where others hold the interpreter.
    """

    __slots__ = ("_clock", "_is_ended", "_line", "rush_at", "woke_at")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._line: deque[Ack] = deque()
        self._is_ended = False
        self.woke_at = self.rush_at = -1e9
        """When somebody was woken last, and by when all should have been, by the monotonic clock."""

    def __bool__(self) -> bool:
        return bool(self._line)

    def is_due(self) -> bool:
        return bool(self._line) and self._clock.monotonic() >= self.rush_at

    def wake(self, acks: Iterable[Ack]) -> None:
        """Begin with those whose puts were just decided. May be done again."""
        line = self._line
        for ack in acks:
            if ack._waits:
                line.append(ack)
            else:
                ack._wake()
        if line:
            self.rush_at = self._clock.monotonic() + max(_RELAY_SECONDS, _RELAY_SECONDS_EACH * len(line))
        if self._is_ended:  # after the line grew: who ends it wakes all that is in it, after he said so
            self.rush()
        else:
            self.pass_on()

    def pass_on(self) -> None:
        """Wake the next who waits."""
        line = self._line
        while line:
            try:
                ack = line[0]
            except IndexError:  # another thread was faster
                return
            ack._is_next = True
            is_waiting = ack._waits  # then it comes here itself: it looks whether it is next after it has stopped waiting
            self._wake_first(ack)
            if is_waiting:
                self.woke_at = self._clock.monotonic()
                return

    def rush(self) -> None:
        """Wake all."""
        for ack in list(self._line):
            self._wake_first(ack)

    def end(self) -> None:
        """Nobody looks in any more: from now on all are woken at once."""
        self._is_ended = True
        self.rush()

    def _wake_first(self, ack: Ack) -> None:
        ack._wake()
        try:
            self._line.remove(ack)
        except ValueError:  # another thread did the same
            return


class Ack:
    """A put that will be durable, is, or failed. ``wait`` for it, or ``await`` it.

    Giving up waiting changes nothing: the put goes on, and is applied once or not at all.
    """

    __slots__ = ("_accepted", "_callbacks", "_done", "_duplicate", "_error", "_gate", "_is_next", "_leader", "_place", "_relay", "_waits")

    def __init__(self, clock: Clock, leader: Leader | None = None, relay: Relay | None = None) -> None:
        self._gate = clock.gate()
        self._leader = leader
        self._relay = relay
        self._waits = self._is_next = False  # a thread does, and passes on when it was woken by the one before it
        self._accepted = False  # in the queue, for good; set in one step with that
        self._done = False
        self._error: HeadgateError | None = None
        self._place: tuple[str, int, int] | None = None
        self._duplicate = False
        self._callbacks: list[Callable[[], None]] = []

    def done(self) -> bool:
        """Is it decided, one way or the other?"""
        return self._done

    def wait(self, timeout: float | None = None) -> Receipt:
        """Block until durable.

        Args:
            timeout: seconds; None: as long as it takes.

        Raises:
            TimeoutError: not decided in time. The put goes on.
            FencedError, WriterPoisonedError, ClosedError: it was not acknowledged.
        """
        if timeout is not None:
            if (leader := self._leader) is not None:
                leader.nudge()  # leading takes as long as it takes
            if not self._done and not self._gate.wait(timeout) and not self._done:
                raise TimeoutError(f"not durable within {timeout} s; the put goes on, wait again or retry it with a producer sequence")
        elif not self._done:
            self._wait_in_line()
        return self._outcome()

    def _wait_in_line(self) -> None:
        leader, relay = self._leader, self._relay
        try:
            self._waits = relay is not None
            while not self._done:
                patience = leader.lead(self) if leader is not None else None
                if self._done or self._gate.wait(patience):
                    break
        finally:
            self._waits = False
            if self._is_next and relay:
                relay.pass_on()

    def __await__(self) -> Generator[Any, None, Receipt]:
        if not self._done:
            loop = asyncio.get_running_loop()
            waiter: asyncio.Future[None] = loop.create_future()

            def wake() -> None:
                if not waiter.done():
                    waiter.set_result(None)

            def tell() -> None:
                try:
                    loop.call_soon_threadsafe(wake)
                except RuntimeError:  # the loop is closed: nobody waits there any more
                    return

            self._when_done(tell)
            if (leader := self._leader) is not None:
                leader.nudge()
            yield from waiter.__await__()
        return self._outcome()

    def _when_done(self, callback: Callable[[], None]) -> None:
        # It is in the list before _done is looked at, and _done is set before the list is taken:
        # whichever order the two threads run in, the callback runs, perhaps twice, which is harmless.
        self._callbacks.append(callback)
        if self._done:
            callback()

    def _outcome(self) -> Receipt:
        if self._error is not None:
            raise copy.copy(self._error)  # many threads may raise it: each its own traceback
        if self._place is None:
            return Receipt({})  # nothing was left to put
        shard, epoch, position = self._place
        receipt = Receipt.__new__(Receipt)
        receipt._places, receipt.duplicate = {shard: (epoch, position)}, self._duplicate
        return receipt

    # -- for the pipeline; decide first, under its lock and in order, then wake

    def _decide(self, place: tuple[str, int, int] | None, error: HeadgateError | None = None) -> None:
        self._place, self._error = place, error
        self._leader = None
        self._done = True

    def _wake(self) -> None:
        self._gate.open()
        if self._callbacks:
            for callback in list(self._callbacks):
                callback()


def decided(clock: Clock, shard: str, epoch: int, position: int) -> Ack:
    """The Ack of a duplicate whose first copy is durable."""
    ack = Ack(clock)
    ack._accepted = ack._duplicate = True
    ack._decide((shard, epoch, position))
    ack._wake()
    return ack


def nothing(clock: Clock) -> Ack:
    """The Ack of a put of which no row was left."""
    ack = Ack(clock)
    ack._accepted = True
    ack._decide(None)
    ack._wake()
    return ack
