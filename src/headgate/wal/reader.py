"""Reading entries one after another, fetched ahead and in parallel.

Owns: read-ahead. Does not own: where the chain leads (its caller asks for the next point) or
what a missing entry means (loss, tailer).

A listing only says what may be worth fetching. What was fetched is immutable, so having it
early is as good as having it late; what was not there early is asked for again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from headgate.clock import Clock, map_ordered
from headgate.errors import HeadgateError, ObjectMissingError
from headgate.manifest import ChainPoint
from headgate.wal.block import BlockDecoder, Entries, Found
from headgate.wal.decode import EntryDecoder, Raw, grouped
from headgate.wal.entry import Entry, decode_entry
from headgate.wal.space import WalSpace

_LISTED_MAX = 20_000
_HITS_BEFORE_LISTING = 2
_SECONDS_PER_THREAD = 0.0003
_PROBES = 4
_DECODED_AT_ONCE = 64
_BLOCK_ENTRIES = 512
_BLOCK_BYTES = 4 << 20


class ChainReader:
    """Entries of one shard, asked for in ascending order. One thread at a time.

    Args:
        parallel: how many requests at once.
        ahead_bytes: how much may be fetched before it is asked for.
        eager: list at once, for a reader that expects many entries; otherwise only after a few
            reads in a row found something, so that following the tip costs one request a poll.
        blocks: for a reader that uses ``read_on``: small entries come many at a time.
    """

    def __init__(
        self,
        space: WalSpace,
        clock: Clock,
        *,
        parallel: int = 32,
        ahead_bytes: int = 64 << 20,
        eager: bool = False,
        blocks: bool = False,
    ) -> None:
        self._space, self._clock, self._blocks = space, clock, blocks
        self._parallel, self._ahead_bytes = parallel, ahead_bytes
        self._hits = _HITS_BEFORE_LISTING if eager else 0
        self._ahead: Iterator[Found] | None = None
        self._next: Found | None = None
        self.listed_through: ChainPoint | None = None
        """The last name there was at the first look; what comes after it was written since. None: not known yet."""

    def read(self, point: ChainPoint) -> Entry | None:
        """The entry at a point; None if nothing is there now.

        Raises:
            CorruptEntryError: something is there, and it is not that entry.
        """
        found = self.read_on(point)
        assert not isinstance(found, Entries), "only who reads blocks gets them"
        return found

    def read_on(self, point: ChainPoint) -> Entry | Entries | None:
        """The same, or that entry and those that follow it."""
        if self._ahead is None and self._hits >= _HITS_BEFORE_LISTING:
            self._list_from(point)
        found = self._take(point)
        if found is None:
            found = self.fetch(point)  # never listed, or not there when it was fetched ahead
            self._hits = self._hits + 1 if found is not None else 0
        return found

    def fetch(self, point: ChainPoint) -> Entry | None:
        """The entry at a point, asked of the store now, whatever was fetched before."""
        space, key = self._space, self._space.key(*point)
        try:
            data = space.store.get(key)
        except ObjectMissingError:
            return None
        return decode_entry(data, key, space.wal_id, space.shard, *point)

    # -- ahead

    def _list_from(self, point: ChainPoint) -> None:
        if self._space.store.is_near:
            names = self._space.names_from(*point)[:_LISTED_MAX]
            points, largest_bytes = [listed for listed, _ in names], 0
        else:
            rows = list(islice(self._space.list_from(*point), _LISTED_MAX))
            points, largest_bytes = [listed for listed, _ in rows], max((info.size_bytes for _, info in rows), default=0)
        self._hits = 0
        if self.listed_through is None and len(points) < _LISTED_MAX:
            self.listed_through = points[-1] if points else point
        if len(points) < 2:
            return
        self._ahead = self._decoded(points, largest_bytes)
        self._next = next(self._ahead, None)

    def _decoded(self, points: list[ChainPoint], largest_bytes: int) -> Iterator[Found]:
        """What stands at each point, in order. An error counts only if the chain leads there: what lies past a seal is never read."""
        raws = self._fetched(points, largest_bytes)
        try:
            if self._blocks:
                yield from grouped(raws, BlockDecoder(self._space), 1, _BLOCK_ENTRIES, _BLOCK_BYTES)
            else:
                yield from grouped(raws, EntryDecoder(self._space), 1, _DECODED_AT_ONCE, self._ahead_bytes)
        finally:
            raws.close()  # type: ignore[attr-defined]  # a generator: ends its threads

    def _fetched(self, points: list[ChainPoint], largest_bytes: int) -> Iterator[Raw]:
        """Each point's object, in order. The first fetch tells how far the store is: threads pay where there is something to wait for."""
        near, took = self._space.store.is_near, float("inf")
        probes = points[: _PROBES if near else 1]
        for point in probes:
            start = self._clock.monotonic()
            raw = self._fetch_quietly(point)
            took = min(took, self._clock.monotonic() - start)
            yield raw
        rest, worth = points[len(probes) :], 1 + int(took / _SECONDS_PER_THREAD)
        if near and worth == 1:
            yield from self._one_after_another(rest)
            return
        if near and rest:
            largest_bytes = max((info.size_bytes for _, info in self._space.list_from(*rest[0])), default=0)
        fitting = self._ahead_bytes // max(1, largest_bytes)
        parallel = max(1, min(self._parallel, worth, fitting))
        fetched = map_ordered(self._clock, self._fetch_quietly, rest, parallel=parallel, ahead=max(parallel, min(1024, fitting)))
        try:
            yield from fetched
        finally:
            fetched.close()

    def _one_after_another(self, points: Sequence[ChainPoint]) -> Iterator[Raw]:
        store, key, at, count = self._space.store, self._space.key, 0, _PROBES
        most_bytes = min(self._ahead_bytes, _BLOCK_BYTES)
        while at < len(points):
            some = points[at : at + count]
            answers = store.get_each([key(*point) for point in some], most_bytes)
            for point, answer in zip(some, answers):
                yield point, None if isinstance(answer, ObjectMissingError) else answer
            at, count = at + len(answers), min(_BLOCK_ENTRIES, 4 * count)

    def _fetch_quietly(self, point: ChainPoint) -> Raw:
        try:
            return point, self._space.store.get(self._space.key(*point))
        except ObjectMissingError:
            return point, None
        except HeadgateError as error:
            return point, error

    def _take(self, point: ChainPoint) -> Entry | Entries | None:
        while self._next is not None and self._next[0] < point:
            self._advance()
        if self._next is None or self._next[0] != point:
            return None
        _, found = self._next
        self._advance()
        if isinstance(found, HeadgateError):
            raise found
        return found

    def _advance(self) -> None:
        assert self._ahead is not None
        self._next = next(self._ahead, None)
        if self._next is None:
            self._ahead = None
            self._hits = _HITS_BEFORE_LISTING  # there may be more: list again

    def close(self) -> None:
        """Stop fetching ahead."""
        ahead, self._ahead, self._next = self._ahead, None, None
        if ahead is not None:
            ahead.close()  # type: ignore[attr-defined]  # a generator: ends its threads
