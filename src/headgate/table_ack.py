"""The Ack of a put over several shards, and the error that says what became of it in each.

Owns: waiting for all of them. Does not own: what decides each (pipeline), who gets which rows (table_writer).
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Generator, Mapping
from typing import Any

from headgate.clock import Clock
from headgate.errors import FencedError, HeadgateError
from headgate.wal.ack import Ack, Receipt

Outcome = tuple[int, int] | HeadgateError
Recover = Callable[[str, float | None], object]
"""See, by a deadline, whether a shard that was fenced was split, and send again what was not durable."""


class TableAck:
    """A put over several shards: durable when it is so in all of them. ``wait`` for it, or ``await`` it.

    Giving up waiting changes nothing: the put goes on, and is applied in each shard once or not at all.
    """

    __slots__ = ("_clock", "_parts", "_recover")

    def __init__(self, parts: Mapping[str, Ack], clock: Clock, recover: Recover | None = None) -> None:
        self._parts, self._clock, self._recover = dict(parts), clock, recover

    def done(self) -> bool:
        """Is it decided, one way or the other, in every shard?"""
        return all(ack.done() for ack in self._parts.values())

    def wait(self, timeout: float | None = None) -> Receipt:
        """Block until durable in every shard.

        Raises:
            TimeoutError: not decided everywhere in time. The put goes on.
            HeadgateError: it failed in a shard. ``outcomes`` of the error says for each shard where the
                rows are, (epoch, position), or what went wrong there.
        """
        deadline = None if timeout is None else self._clock.monotonic() + timeout
        while True:
            parts = self._parts
            self._hasten()
            for ack in parts.values():
                try:
                    ack.wait(None if deadline is None else max(0.0, deadline - self._clock.monotonic()))
                except HeadgateError:
                    continue  # told below, with what became of the others
            if not self._went_on(parts, deadline):
                return self._outcome()

    def __await__(self) -> Generator[Any, None, Receipt]:
        while True:
            parts = self._parts
            self._hasten()
            for ack in parts.values():
                try:
                    yield from ack.__await__()
                except HeadgateError:
                    continue
            if self._recover is None or not _fenced(parts):
                return self._outcome()
            if not (yield from asyncio.to_thread(self._went_on, parts, None).__await__()):
                return self._outcome()

    def _went_on(self, parts: Mapping[str, Ack], deadline: float | None) -> bool:
        """Has some of it been sent elsewhere, because its shard was split? Then there is more to wait for."""
        fenced = _fenced(parts)
        if self._parts is parts and self._recover is not None:
            for shard in fenced:
                self._recover(shard, deadline)
        return self._parts is not parts

    def _replace(self, shard: str, parts: Mapping[str, Ack]) -> None:
        """For the writer, one thread at a time: the rows of one shard are these now."""
        self._parts = {**{name: ack for name, ack in self._parts.items() if name != shard}, **parts}

    def _hasten(self) -> None:
        """Whoever waits for an Ack writes its entry; the shards after the first must not wait for that."""
        for number, ack in enumerate(self._parts.values()):
            if number and (leader := ack._leader) is not None:
                leader.nudge()

    def _outcome(self) -> Receipt:
        places: dict[str, tuple[int, int]] = {}
        failures: dict[str, HeadgateError] = {}
        is_duplicate = bool(self._parts)
        for shard, ack in self._parts.items():
            try:
                receipt = ack.wait(0.0)
            except HeadgateError as error:
                failures[shard] = error
            else:
                places.update(receipt)
                is_duplicate = is_duplicate and receipt.duplicate
        if failures:
            raise failure(places, failures)
        return Receipt(places, duplicate=is_duplicate)

    def __repr__(self) -> str:
        return f"TableAck({', '.join(self._parts)}{', done' if self.done() else ''})"


def _fenced(parts: Mapping[str, Ack]) -> list[str]:
    return [shard for shard, ack in parts.items() if isinstance(ack._error, FencedError)]


def failure(places: Mapping[str, tuple[int, int]], failures: Mapping[str, HeadgateError]) -> HeadgateError:
    """The first failure, in a copy of its own, with what became of every shard."""
    error = copy.copy(next(iter(failures.values())))  # others may raise the same object
    error.__notes__ = list(getattr(error, "__notes__", ()))
    outcomes: dict[str, Outcome] = {**places, **failures}
    error.outcomes = outcomes
    if len(outcomes) > 1:
        error.add_note(f"the put failed in {', '.join(failures)} and is durable in {', '.join(places) or 'no shard'}")
    return error
