"""Group commit: many puts, few entries, acknowledged in order.

Owns: the queue, the slots, the order of acknowledgement, backpressure, poison.
Does not own: encoding and the judgement of a taken name (appender), validation (schema).

There is no tick. An entry starts as soon as a slot is free and something is pending; what
arrives while it is under way shares the next one. So an idle writer pays one PUT of latency
and a busy one batches by itself. Slots beyond the first open only when the entry before has
been under way for a moment or much is waiting: on a fast store one larger entry beats two
smaller ones, on a slow one the moment does not count.

Handing work to another thread costs more than a PUT to a fast store. So when nothing is under
way, whoever waits for an Ack leads: it takes the queue and writes the entry itself. A slot, a
thread of ours, comes for what nobody waits for, and for every entry beside the first. While
waiters lead, no put wakes a slot; one looks in every ``_DOZE_SECONDS``. Callers of an entry that landed wake each other, one
after the other; the slot wakes the rest of them if that takes longer than it should.

When an entry with several puts lands, its callers come back soon. The next entry waits for as many as there
were, until ``_COMPANY_SECONDS`` per caller after the last of them was woken; else the first to come back
would go alone and the others after it, twice the entries for the same puts. A lone caller never
waits for company, nor does the first put after a pause.

The interleavings that matter, with entries p and p+1 in flight:
  p+1 lands first: it waits for p; nobody is told before everything before it is durable.
  p meets a seal: fenced; p+1, landed or not, is never acknowledged. It lies past the seal.
  p fails for good: poison; p+1 may have landed and is not acknowledged: the successor seals p.

A waiter, and whoever puts, may be interrupted (Ctrl-C) anywhere Python lets a signal in: at a call, never within an
assignment. So each step is one assignment of what was made before: a put is accepted, together with its producer's sequence,
or never came; puts are in the queue or in a flight. What stands in the queue besides is swept out by the next step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa

from headgate.clock import Clock, Lock, Thread
from headgate.errors import ClosedError, FencedError, HeadgateError, WriterPoisonedError
from headgate.failpoint import failpoint
from headgate.meters import FENCES, POISONINGS, pipeline_counts
from headgate.wal.ack import Ack, Relay
from headgate.wal.appender import EpochWriter
from headgate.wal.entry import Put
from headgate.wal.room import Room

_OVERLAP_AFTER_SECONDS = 0.002
_OVERLAP_AT_BYTES = 1 << 20
_COMPANY_SECONDS = 0.0001
_COMPANY_SECONDS_MAX = 0.002
_DOZE_SECONDS = 0.002
_JOIN_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class PipelineStats:
    """A moment of a pipeline, and its counts since it was opened."""

    next_position: int
    acknowledged_position: int
    queued_puts: int
    queued_bytes: int
    inflight_entries: int
    entries: int
    puts: int
    bytes: int
    blocked_puts: int
    blocked_seconds: float
    timeouts: int


class _Item:
    __slots__ = ("ack", "born", "number", "put", "schema", "size")

    def __init__(self, number: int, put: Put, schema: pa.Schema, size: int, ack: Ack, born: float) -> None:
        self.number, self.put, self.schema, self.size, self.ack, self.born = number, put, schema, size, ack, born


class _Flight:
    __slots__ = ("body", "decided", "items", "landed", "position", "size", "started", "written")

    def __init__(self) -> None:
        self.position, self.items, self.size, self.started = -1, list[_Item](), 0, 0.0
        self.body: memoryview | None = None
        self.written = self.landed = False
        self.decided: list[_Flight] = []


Admit = Callable[[Ack], Ack | None]
Acknowledged = Callable[[int, list[Put], int], None]


class Pipeline:
    """Puts in, entries out. Safe for many threads.

    Args:
        max_entry_bytes: an entry takes no further put once it has this much; one put is never split.
        min_interval: seconds between the starts of two entries; bounds the number of requests.
        max_inflight: entries under way at once.
        max_unacknowledged_bytes: ``submit`` blocks above this.
        on_acknowledged: called with each entry's position, puts and size, in order, under the lock.
        on_blocked: called under the lock when a put finds no room: whoever holds rows on after they are
            acknowledged (``retain``) should see that they go.
        on_failed: called under the lock, once, when the writer has failed for good.
        lock: shared with whoever must see the queue and his own state at one moment.
    """

    def __init__(
        self,
        writer: EpochWriter,
        clock: Clock,
        *,
        max_entry_bytes: int,
        min_interval: float,
        max_inflight: int,
        max_unacknowledged_bytes: int,
        on_acknowledged: Acknowledged | None = None,
        on_blocked: Callable[[], None] | None = None,
        on_failed: Callable[[], None] | None = None,
        lock: Lock | None = None,
    ) -> None:
        self._writer, self._clock = writer, clock
        self._shard, self._table = writer.claim.space.shard, writer.log.manifests.place
        self._max_entry_bytes, self._min_interval = max_entry_bytes, min_interval
        self._max_inflight = max_inflight
        self._overlap_at_bytes = min(_OVERLAP_AT_BYTES, max_entry_bytes)
        self._on_acknowledged, self._on_failed = on_acknowledged, on_failed

        self.lock = lock or clock.lock()
        self._work = clock.condition(self.lock)
        self._settled = clock.condition(self.lock)

        self._queue: deque[_Item] = deque()
        self._flights: tuple[_Flight, ...] = ()
        self._queued_bytes = 0
        self.before_persist: Callable[[], None] | None = None
        """Called, without the lock, before an entry is sent, while it is set."""
        self._accepted = self._departed = 0  # puts; those between the two are in the queue
        self._next = writer.claim.first.position
        self._acked = self._next - 1
        self._last_start = -1e9
        self._failure: HeadgateError | None = None
        self._closing = False
        self._idle_slots = 0
        self._watching, self._looks_at = False, 0.0  # one slot waits with a time limit, and looks at the queue when it is over
        self._led = False  # a waiter has led since a slot last looked
        self._company = 0  # as many puts as the next entry may wait for
        self._last_landed = -1e9
        self._pacer: Ack | None = None
        self._relay = Relay(clock)
        self._draining = 0
        self._threads: list[Thread] = []

        self._puts = 0
        self._counts = pipeline_counts(self, self._table, self._shard)
        self._room = Room(clock, self.lock, self._counts, self._shard, max_unacknowledged_bytes, on_blocked)

    # -- putting

    def submit(self, put: Put, schema: pa.Schema, size: int, *, timeout: float | None = None, admit: Admit | None = None) -> Ack:
        """Queue a put. Returns at once, unless there is no room.

        ``admit`` is asked under the lock, right before the put is accepted: it may return
        another put's Ack (a duplicate) or raise. What it refuses leaves no trace.

        Raises:
            BackpressureTimeoutError: no room in time; nothing was accepted.
        """
        ack, born = Ack(self._clock, self, self._relay), self._clock.monotonic()
        with self.lock:
            if self._failure is not None or self._closing:
                raise self._refusal()
            if not self._room.fits(size):
                self._room.wait(size, timeout, self._check_open)
            if admit is not None and (first := admit(ack)) is not None:
                return first
            self._enqueue(_Item(self._accepted, put, schema, size, ack, born), reserved=0)
        return ack

    def _enqueue(self, item: _Item, reserved: int) -> None:
        if len(self._queue) != self._accepted - self._departed:
            self._sweep()
        self._queue.append(item)
        room = self._room
        self._accepted, self._queued_bytes, room.unacknowledged_bytes, room.reserved_bytes, item.ack._accepted = (
            self._accepted + 1,
            self._queued_bytes + item.size,
            room.unacknowledged_bytes + item.size,
            room.reserved_bytes - reserved,
            True,
        )
        if not self._watching or self._queued_bytes >= self._overlap_at_bytes:
            self._call_slot()

    def _sweep(self) -> None:
        """Take out of the queue what an interrupted put or departure left there."""
        queue = self._queue
        while queue and queue[0].number < self._departed:
            queue.popleft()
        while queue and queue[-1].number >= self._accepted:
            queue.pop()

    # -- room

    def reserve(self, size: int, *, timeout: float | None = None) -> None:
        """Take room for a put that will come. Blocks like ``submit``, and raises what it raises."""
        with self.lock:
            self._check_open()
            if not self._room.fits(size):
                self._room.wait(size, timeout, self._check_open)
            self._room.reserved_bytes += size

    def release(self, size: int) -> None:
        """Give back what was reserved."""
        with self.lock:
            self._unreserve(size)

    def _unreserve(self, size: int) -> None:
        self._room.reserved_bytes -= size
        self._room.tell()

    def submit_reserved(self, put: Put, schema: pa.Schema, size: int, *, admit: Admit | None = None) -> Ack:
        """Queue a put whose room was reserved. Never blocks; a writer that failed meanwhile says so in the Ack."""
        ack, born = Ack(self._clock, self, self._relay), self._clock.monotonic()
        with self.lock:
            if self._failure is None and not self._closing:
                if admit is not None and (first := admit(ack)) is not None:
                    self._unreserve(size)
                    return first
                self._enqueue(_Item(self._accepted, put, schema, size, ack, born), reserved=size)
                return ack
            self._unreserve(size)
            ack._decide(None, self._failure_for(None) if self._failure is not None else self._refusal())
        ack._wake()
        return ack

    def retain(self, held_bytes: int, *, crowded: bool = False, stalled: bool = False) -> None:
        """Under the lock: so much is still held after it was acknowledged. ``crowded``: no put fits, unless it stands alone.

        ``stalled``: none fits at all, until somebody has compacted.
        """
        self._room.retain(held_bytes, crowded=crowded, stalled=stalled)

    def _check_open(self) -> None:
        if self._failure is not None or self._closing:
            raise self._refusal()

    def _refusal(self) -> HeadgateError:
        if self._failure is not None:
            return self._failure
        return ClosedError(f"the writer of shard {self._shard} is closed", hint="open another writer")

    # -- leading: a waiter writes the entry itself

    def lead(self, ack: Ack) -> float | None:
        """For a thread that waits for ``ack``: if nothing is under way, write what is queued.

        Returns how many seconds to wait before asking again; None: until it is told.
        """
        if self._flights:  # whoever lands the last of them looks at the queue afterwards
            return None
        pacer = self._pacer
        if pacer is not None and pacer is not ack and self._accepted - self._departed < self._company:
            return None  # it takes ours too: what was put before it departs goes with it, or after it
        flight = _Flight()
        try:
            with self.lock:
                if ack.done() or self._accepted == self._departed or self._flights or self._failure is not None:
                    return None
                delay = self._delay()
                if delay > 0.0:
                    if self._pacer is None:
                        self._pacer = ack  # one of those who wait looks at the time; the others are told
                    return delay if self._pacer is ack else None
                self._depart(flight)
                self._led = True
            self._fly_led(flight)
        except BaseException:
            self._hand_over(flight)
            raise
        return 0.0

    def _hand_over(self, flight: _Flight) -> None:
        """The waiter was interrupted. Giving up waiting changes nothing: another thread sends the same bytes again,
        finds them there if they had landed, and tells whoever was not told."""
        with self.lock:
            is_under_way = flight in self._flights or bool(flight.decided)
        if is_under_way:
            self._clock.spawn(lambda: self._fly_led(flight), name=f"headgate-wal-{self._shard}-again")
        else:
            self.nudge()

    def _fly_led(self, flight: _Flight) -> None:
        """Not by a slot, which would look at what there is to do afterwards."""
        self._fly_or_fail(flight)
        if self._accepted > self._departed or (self._relay and not self._is_watched(_DOZE_SECONDS)):
            self.nudge()

    def nudge(self) -> None:
        """Somebody waits who cannot lead: see that a slot comes for what is queued, and for those who wake each other."""
        with self.lock:
            self._call_for_the_rest()

    # -- slots

    def _call_for_the_rest(self) -> None:
        """See that a slot comes for what is queued, and looks in at those who wake each other. If none can, they are all woken now."""
        is_unwatched = bool(self._relay) and not self._is_watched(_DOZE_SECONDS)
        if (self._accepted > self._departed or is_unwatched) and not self._call_slot() and is_unwatched:
            self._relay.rush()

    def _call_slot(self) -> bool:
        """False: every slot is under way, and looks at the queue when it lands."""
        if self._idle_slots or self._watching:
            self._work.notify()
        elif len(self._threads) < self._max_inflight:
            self._start_slot()
        else:
            return False
        return True

    def _start_slot(self) -> None:
        number = len(self._threads)
        self._threads.append(self._clock.spawn(self._run_slot, name=f"headgate-wal-{self._shard}-{number}"))

    def _run_slot(self) -> None:
        while True:
            with self.lock:
                flight = self._take()
            if flight is None:
                return
            self._fly_or_fail(flight)
            del flight  # its rows, while we wait for the next

    def _fly_or_fail(self, flight: _Flight) -> None:
        try:
            self._fly(flight)
        except HeadgateError as error:
            self.fail(error)
        except Exception as error:  # a thread's end: the waiters learn of it
            self.fail(HeadgateError(f"unexpected {type(error).__name__} in the WAL pipeline: {error}"), error)

    def _take(self) -> _Flight | None:
        """Wait for work, then take as much as one entry holds. None: no more work for this slot."""
        while True:
            delay: float | None = None
            if self._failure is not None:
                return None
            if self._relay.is_due():
                self._relay.rush()
            if self._accepted == self._departed:
                if self._closing:
                    return None
                if self._led:
                    delay, self._led = _DOZE_SECONDS, False
            elif sum(not flight.landed for flight in self._flights) < self._max_inflight:
                delay = self._delay()
                if delay <= 0.0:
                    break
            if self._relay:
                delay = _DOZE_SECONDS if delay is None else min(delay, _DOZE_SECONDS)
            if delay is None or self._is_watched(delay):
                self._idle_slots += 1
                self._work.wait()
                self._idle_slots -= 1
            else:
                self._watching, self._looks_at = True, self._clock.monotonic() + delay
                self._work.wait(delay)
                self._watching = False
        flight = _Flight()
        self._depart(flight)
        self._call_for_the_rest()
        return flight

    def _is_watched(self, seconds: float) -> bool:
        """Does a slot look at things by itself within so many seconds?"""
        return self._watching and self._looks_at <= self._clock.monotonic() + seconds

    def _depart(self, flight: _Flight) -> None:
        """Take as much of the queue as one entry holds, at the next position."""
        if len(self._queue) != self._accepted - self._departed:
            self._sweep()
        queue, items, size = self._queue, flight.items, 0
        schema = queue[0].schema
        for item in queue:
            if items and (size + item.size > self._max_entry_bytes or item.schema is not schema):
                break
            size += item.size
            items.append(item)
        flight.position, flight.size, flight.started = self._next, size, self._clock.monotonic()
        rest: deque[_Item] = deque() if len(items) == len(queue) else queue
        room = self._room
        self._queue, self._flights, self._next, self._departed, self._queued_bytes, room.flying_bytes, self._last_start, self._pacer = (
            rest,
            (*self._flights, flight),
            self._next + 1,
            items[-1].number + 1,
            self._queued_bytes - size,
            room.flying_bytes + size,
            flight.started,
            None,
        )
        if rest:
            self._sweep()

    def _delay(self) -> float:
        """How long the pending puts should wait for company, or for the rate."""
        now = self._clock.monotonic()
        delay = self._last_start + self._min_interval - now if self._min_interval > 0 else 0.0
        if self._queued_bytes < self._overlap_at_bytes:
            if self._flights:
                delay = max(delay, self._flights[-1].started + _OVERLAP_AFTER_SECONDS - now)
            elif self._accepted - self._departed < self._company:
                # Who was not woken yet cannot come back yet.
                woken = max(self._last_landed, min(self._relay.woke_at, self._relay.rush_at))
                delay = max(delay, woken + min(_COMPANY_SECONDS_MAX, _COMPANY_SECONDS * self._company) - now)
        return delay

    def _fly(self, flight: _Flight) -> None:
        """Encode once, write, and acknowledge what is complete from the front."""
        if not flight.written:
            if flight.body is None:
                # All up to _acked is durable; what is in flight besides is not counted, even if it landed.
                puts = [item.put for item in flight.items]
                flight.body = self._writer.encode(flight.position, self._acked, flight.items[0].schema, puts, flight.size)
            failpoint("pipeline.encoded")
            before = self.before_persist
            if before is not None:
                before()
            self._writer.persist(flight.position, flight.body)
            flight.written = True
            failpoint("pipeline.persisted")
        with self.lock:
            if flight.body is not None:
                counts = self._counts
                counts.entries, counts.bytes, flight.body = counts.entries + 1, counts.bytes + flight.body.nbytes, None
            flight.landed = True
            self._acknowledge(flight)
            is_failed = self._failure is not None and flight in self._flights
        if is_failed:
            assert self._failure is not None
            self.fail(self._failure)  # once more: whoever failed may have been interrupted before all were told
        self._relay.wake([item.ack for decided in flight.decided for item in decided.items])
        flight.decided.clear()  # it holds itself, and with it the rows

    def _acknowledge(self, landed: _Flight) -> None:
        """Decide all that is complete from the front; ``landed.decided`` are those whose callers are to be told.

        Whatever interrupts it, it can be done again: an entry leaves the queue last, and told twice is as good as once.
        """
        if self._failure is not None:
            return
        epoch, room, decided = self._writer.epoch, self._room, 0
        while self._flights and self._flights[0].landed:
            flight = self._flights[0]
            if flight.position > self._acked:
                assert flight.position == self._acked + 1, "acknowledged strictly in order"
                if self._on_acknowledged is not None:
                    self._on_acknowledged(flight.position, [item.put for item in flight.items], flight.size)
                place = (self._shard, epoch, flight.position)
                for item in flight.items:
                    item.ack._decide(place)
                self._acked, room.unacknowledged_bytes, room.flying_bytes, self._puts = (
                    flight.position,
                    room.unacknowledged_bytes - flight.size,
                    room.flying_bytes - flight.size,
                    self._puts + len(flight.items),
                )
                self._count(flight.items)
            decided += len(flight.items)
            landed.decided.append(flight)
            self._flights = self._flights[1:]
        if decided:
            self._company = max(decided + self._accepted - self._departed, self._company * 3 // 4)
            self._last_landed = self._clock.monotonic()
            room.tell()
            if self._draining:
                self._settled.notify_all()

    def _count(self, items: list[_Item]) -> None:
        """How many, and how long they took. They came in order, so mostly the first and the last fall into one bucket, and all between."""
        counts, seconds, now = self._counts, self._counts.ack_seconds, self._clock.monotonic()
        counts.puts += len(items)
        longest, shortest = now - items[0].born, now - items[-1].born
        if len(items) == 1:
            counts.rows += items[0].put.rows.num_rows
            seconds.add(longest)
            return
        counts.rows += sum([item.put.rows.num_rows for item in items])
        if seconds.bucket(longest) == seconds.bucket(shortest):
            seconds.add((longest + shortest) / 2, len(items))
        else:
            for item in items:
                seconds.add(now - item.born)

    # -- ends

    def fail(self, error: HeadgateError, cause: BaseException | None = None) -> None:
        """Poison: every waiter and every later call gets the error, at once. The first error stays; once more tells who was not told."""
        with self.lock:
            self._sweep()
            waiting: list[tuple[_Item, int | None]] = [(item, f.position) for f in self._flights for item in f.items]
            waiting += [(item, None) for item in self._queue]
            if self._failure is None:
                self._failure = self._final(error, cause, [item.put for item, _ in waiting])
                if not isinstance(self._failure, ClosedError):
                    (FENCES if isinstance(self._failure, FencedError) else POISONINGS).add(1, self._table, self._shard)
            for item, position in waiting:
                item.ack._decide(None, self._failure_for(position))
            self._relay.end()  # the slots do, and look in no more
            for condition in (self._work, self._settled):
                condition.notify_all()
            self._room.tell()
            if self._on_failed is not None:
                self._on_failed()
        for item, _ in waiting:
            item.ack._wake()
        with self.lock:  # nothing is accepted any more, so these are the same
            empty: deque[_Item] = deque()
            self._queue, self._flights, self._departed = empty, (), self._accepted
            self._queued_bytes = self._room.unacknowledged_bytes = self._room.flying_bytes = 0

    def _final(self, error: HeadgateError, cause: BaseException | None, left: list[Put]) -> HeadgateError:
        if isinstance(error, FencedError | ClosedError):
            return error
        if isinstance(error, WriterPoisonedError):
            left = error.unacknowledged or left
            return WriterPoisonedError(error.message, cause=error.cause or error, unacknowledged=left, hint=error.hint)
        told = f"shard {self._shard}: the log cannot be written: {error.message}"
        return WriterPoisonedError(told, cause=cause or error, unacknowledged=left)

    def _failure_for(self, position: int | None) -> HeadgateError:
        """A fenced put says at which position it was sent, so that its outcome can be looked up."""
        failure = self._failure
        assert failure is not None
        if isinstance(failure, FencedError):
            return FencedError(
                failure.message, shard=failure.shard, epoch=failure.epoch, position=position, by_epoch=failure.by_epoch, hint=failure.hint
            )
        return failure

    def drain(self) -> None:
        """Wait until all that was accepted before is acknowledged; what comes meanwhile does not hold it up. Raises what went wrong."""
        with self.lock:
            if self._accepted > self._departed:
                self._call_slot()
            wanted = self._accepted
            self._draining += 1
            try:
                while self._puts < wanted and self._failure is None:
                    self._settled.wait()
            finally:
                self._draining -= 1
            if self._failure is not None:
                raise self._failure

    def close(self) -> None:
        """Take no more, finish what was accepted, end the threads. Raises what went wrong."""
        with self.lock:
            self._closing = True
            self._relay.end()
            self._work.notify_all()
            self._room.tell()
        try:
            self.drain()
        finally:
            self.join(_JOIN_SECONDS)

    def abort(self, seconds: float) -> bool:
        """Stop now; what was not acknowledged fails. True: all threads ended within ``seconds``."""
        with self.lock:
            self._closing = True
        self.fail(
            ClosedError(f"the writer of shard {self._shard} was aborted", hint="open another writer; what was put may or may not be there")
        )
        return self.join(seconds)

    def join(self, seconds: float) -> bool:
        with self.lock:
            self._work.notify_all()  # those that waited for others to take the queue: it is empty now
        deadline = self._clock.monotonic() + seconds
        for thread in list(self._threads):
            thread.join(max(0.0, deadline - self._clock.monotonic()))
        return not self.threads_alive()

    def threads_alive(self) -> int:
        return sum(thread.is_alive() for thread in self._threads)

    # -- looking

    @property
    def failure(self) -> HeadgateError | None:
        return self._failure

    @property
    def acknowledged_position(self) -> int:
        """The highest position such that it and all before it are durable."""
        return self._acked

    @property
    def unacknowledged_bytes(self) -> int:
        return self._room.unacknowledged_bytes

    @property
    def held_bytes(self) -> int:
        """Everything that counts against the limit."""
        return self._room.held_bytes

    def is_idle(self) -> bool:
        """Under the lock: nothing queued, nothing under way."""
        return self._accepted == self._departed and not self._flights

    def pending(self) -> list[Put]:
        """Under the lock: what was accepted and is not acknowledged, in order."""
        return [item.put for flight in self._flights for item in flight.items] + [
            item.put for item in self._queue if self._departed <= item.number < self._accepted
        ]

    def stats(self) -> PipelineStats:
        with self.lock:
            return PipelineStats(
                next_position=self._next,
                acknowledged_position=self._acked,
                queued_puts=self._accepted - self._departed,
                queued_bytes=self._queued_bytes,
                inflight_entries=len(self._flights),
                entries=self._counts.entries,
                puts=self._puts,
                bytes=self._counts.bytes,
                blocked_puts=self._counts.blocked_puts,
                blocked_seconds=self._counts.blocked_seconds,
                timeouts=self._counts.timeouts,
            )
