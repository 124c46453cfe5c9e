"""Reading the log as it grows.

Owns: telling "not yet written" from "collected" from "lost". Does not own: merging rows.

A reader writes nothing. Any entry that follows without a gap from a point of the chain is on
the chain for good: a claimant seals the first position that holds nothing, and this one holds
something. So it is safe to show at once. A missing entry is the tip only if a manifest read
afterwards agrees.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from headgate.errors import InvalidInputError, NotFoundError, WalTruncatedError
from headgate.manifest import ChainPoint, ShardManifest
from headgate.wal.entry import Entry
from headgate.wal.log import ShardLog
from headgate.wal.loss import evidence_of_loss
from headgate.wal.reader import ChainReader
from headgate.wal.tip import find_tip, locate

_POLLS_PER_MANIFEST = 16


class HasLog(Protocol):
    """A shard, as far as the log is concerned."""

    @property
    def log(self) -> ShardLog: ...


class WalTailer:
    """Reads a shard's log. Writes nothing; any number of them, in any process.

    Args:
        poll_interval: seconds between looks at the tip when following; grows to
            ``max_poll_interval`` while nothing comes.

    Example:
        >>> for entry in WalTailer(table.shard("0000")).read(start=0):
        ...     print(entry.position, [batch.num_rows for batch in entry.batches])
    """

    def __init__(self, shard: HasLog, *, poll_interval: float = 0.01, max_poll_interval: float = 0.5, ahead_bytes: int = 64 << 20) -> None:
        self._log = shard.log
        self._poll, self._max_poll, self._ahead_bytes = poll_interval, max(poll_interval, max_poll_interval), ahead_bytes

    def first_position(self) -> int:
        """The first position that is certain to be readable; what lies before may have been collected."""
        return self._log.manifests.load().wal_floor

    def next_position(self) -> int:
        """The tip: the first position with no entry."""
        return find_tip(self._log)[1].position

    def read_entry(self, position: int) -> Entry:
        """The entry at a position, seal or data.

        Raises:
            WalTruncatedError: it was collected.
            NotFoundError: it is not written yet.
        """
        for entry in self.read(position, include_seals=True):
            return entry
        raise NotFoundError(f"shard {self._log.shard} has no entry at position {position} yet", hint="follow the log to wait for it")

    def read(self, start: int | None = None, follow: bool = False, *, include_seals: bool = False) -> Iterator[Entry]:
        """Entries from a position on, in order.

        Args:
            start: the first position wanted; None: the first there is.
            follow: at the tip wait for more, for ever, instead of ending.
            include_seals: show the seals between the epochs too.

        Raises:
            WalTruncatedError: what comes next was collected.
            WalHoleError: what comes next was durable and is gone.
        """
        if start is not None and (not isinstance(start, int) or start < 0):
            raise InvalidInputError(f"start is {start!r}", hint="positions are whole numbers from 0")
        log = self._log
        manifest = log.manifests.load()
        wanted = manifest.wal_floor if start is None else start
        self._check_floor(manifest, wanted)
        point = locate(manifest, wanted)
        reader = self._reader(manifest)
        misses = 0
        passed: dict[int, int] = {}  # seals met since a manifest last agreed with them
        try:
            while True:
                entry = reader.read(point)
                if entry is None:
                    if misses % _POLLS_PER_MANIFEST == 0:
                        now = log.manifests.load()
                        onward = max(point, locate(now, wanted)) if point.position < wanted else point
                        if now.wal.id != manifest.wal.id or onward != point:
                            # The log goes on in another store, or what led to the start was collected.
                            reader.close()
                            manifest, reader, point = now, self._reader(now), onward
                            continue
                        manifest = now
                        if now.contradicts(passed):
                            # A seal that does not end its epoch: what stood there was collected under us.
                            self._check_floor(now, min(passed.values()))
                        passed.clear()
                        entry = self._reread_unless_tip(manifest, reader, point, wanted)
                    if entry is None:
                        if not follow:
                            return
                        log.clock.sleep(min(self._max_poll, self._poll * (1 << min(misses, 16))))
                        misses += 1
                        continue
                misses = 0
                if entry.is_seal:
                    passed[point.epoch] = point.position
                at, point = point, point.past_seal() if entry.is_seal else point.past_data()
                if at.position >= wanted and (include_seals or not entry.is_seal):
                    yield entry
        finally:
            reader.close()

    def _reader(self, manifest: ShardManifest) -> ChainReader:
        return ChainReader(self._log.space(manifest), self._log.clock, ahead_bytes=self._ahead_bytes)

    def _check_floor(self, manifest: ShardManifest, position: int) -> None:
        if position < manifest.wal_floor:
            name = self._log.space(manifest).key(locate(manifest, position).epoch, position)
            raise WalTruncatedError(
                f"position {position} of shard {self._log.shard} was collected; the log begins at {manifest.wal_floor}",
                object=name,
                hint=f"start at {manifest.wal_floor}; a named consumer holds collection back",
            )

    def _reread_unless_tip(self, manifest: ShardManifest, reader: ChainReader, point: ChainPoint, wanted: int) -> Entry | None:
        """None: it is the tip. The entry, if it came meanwhile. Raises if it was collected or lost."""
        self._check_floor(manifest, max(point.position, wanted))
        loss = evidence_of_loss(self._log.space(manifest), manifest, point)
        if loss is None:
            return None
        entry = reader.fetch(point)
        if entry is None:
            self._check_floor(self._log.manifests.load(), point.position)
            raise loss
        return entry
