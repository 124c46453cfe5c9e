"""How much a writer holds, and who waits until there is room for more.

Owns: the counts, and the waiting. Does not own: the queue (pipeline), what is held after it was acknowledged (flush).

All of it under the pipeline's lock. The counts are plain numbers that the pipeline sets together with its own, in one
assignment: whatever interrupts it, a put is counted if and only if it was accepted.
"""

from __future__ import annotations

from collections.abc import Callable

from headgate.clock import Clock, Lock
from headgate.errors import BackpressureTimeoutError
from headgate.meters import PipelineCounts


class Room:
    """A bound on bytes, and those who wait for it.

    Args:
        limit_bytes: a put that would make more than this waits, unless it stands alone.
        on_blocked: called when a put finds no room: whoever holds rows on after they are acknowledged should see that they go.
    """

    __slots__ = (
        "_clock",
        "_counts",
        "_freed",
        "_is_crowded",
        "_is_stalled",
        "_limit_bytes",
        "_on_blocked",
        "_retained_bytes",
        "_shard",
        "_waiting",
        "flying_bytes",
        "reserved_bytes",
        "unacknowledged_bytes",
    )

    def __init__(
        self,
        clock: Clock,
        lock: Lock,
        counts: PipelineCounts,
        shard: str,
        limit_bytes: int,
        on_blocked: Callable[[], None] | None,
    ) -> None:
        self._clock, self._freed, self._counts, self._shard = clock, clock.condition(lock), counts, shard
        self._limit_bytes, self._on_blocked = limit_bytes, on_blocked
        self.unacknowledged_bytes = 0
        self.flying_bytes = 0
        """Of these, what is under way: it counts twice, as rows, and as the bytes that they were encoded to."""
        self.reserved_bytes = 0
        """Promised to puts that will come."""
        self._retained_bytes = 0  # acknowledged, and still held
        self._is_crowded = self._is_stalled = False
        self._waiting = 0

    @property
    def held_bytes(self) -> int:
        """Everything that counts against the limit."""
        return self.unacknowledged_bytes + self.flying_bytes + self._retained_bytes + self.reserved_bytes

    def fits(self, size: int) -> bool:
        """Does a put fit? One that stands alone always does."""
        held = self.unacknowledged_bytes + self.flying_bytes + self._retained_bytes + self.reserved_bytes
        return not self._is_stalled and (held == 0 or (not self._is_crowded and held + size <= self._limit_bytes))

    def wait(self, size: int, timeout: float | None, check_open: Callable[[], None]) -> None:
        """Block until the put fits. Whoever ends the writer tells it, and ``check_open`` raises what it is to be told (M03).

        Raises:
            BackpressureTimeoutError: no room in time.
        """
        start, counts = self._clock.monotonic(), self._counts
        counts.blocked_puts += 1
        self._waiting += 1
        try:
            while not self.fits(size):
                left = None if timeout is None else start + timeout - self._clock.monotonic()
                if left is not None and left <= 0:
                    counts.timeouts += 1
                    raise self._timed_out(timeout)
                if self._on_blocked is not None:
                    self._on_blocked()
                    if self.fits(size):
                        break
                self._freed.wait(left)
                check_open()
        finally:
            self._waiting -= 1
            counts.blocked_seconds += self._clock.monotonic() - start

    def _timed_out(self, timeout: float | None) -> BackpressureTimeoutError:
        if self._is_stalled:
            return BackpressureTimeoutError(
                f"shard {self._shard}: too many generations are to be compacted, for {timeout} s now; nothing was accepted",
                hint="compact the table, or raise max_pending_generations; the writer's log says why its own compaction fails",
            )
        return BackpressureTimeoutError(
            f"shard {self._shard}: {self.held_bytes} bytes wait to become durable or to be flushed, and the limit is "
            f"{self._limit_bytes}; no room within {timeout} s, nothing was accepted",
            hint="slow down, raise max_unflushed_memtable_bytes or put_timeout, or raise max_inflight",
        )

    def retain(self, held_bytes: int, *, crowded: bool, stalled: bool) -> None:
        """So much is still held after it was acknowledged. ``crowded``: no put fits, unless it stands alone.

        ``stalled``: none fits at all, until somebody has compacted.
        """
        self._retained_bytes, self._is_crowded, self._is_stalled = held_bytes, crowded, stalled
        self.tell()

    def tell(self) -> None:
        """Those who wait look again."""
        if self._waiting:
            self._freed.notify_all()
