"""The mark that nothing in the log is needed any more, and how a writer takes it back before it writes again.

Owns: who waits for whom between a checkpoint that sets ``clean_at`` and the next entry. Does not own: what a checkpoint
pins (checkpoint), nor what a clean log may suffer (fence).

While the manifest says so, the WAL store may be wiped. So an entry may be sent only after a manifest without the mark is
committed, and a checkpoint may set it only while nothing is under way:
t0 the checkpoint finds the pipeline idle, and from here on whoever wants to send waits · t1 it commits, with or without the
mark · t2 those who wait learn which. With the mark, the first of them takes it back by a commit of its own (K03, K04).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from headgate.manifest.model import ChainPoint, ShardManifest
from headgate.wal.fence import check_epoch
from headgate.wal.log import ShardLog
from headgate.wal.marker import marker_stands, put_back
from headgate.wal.pipeline import Pipeline

_State = Literal["dirty", "deciding", "clean"]


class CleanMark:
    """Of one writer."""

    def __init__(self, log: ShardLog, epoch: int, pipeline: Pipeline) -> None:
        self._log, self._epoch, self._pipeline = log, epoch, pipeline
        self._state: _State = "dirty"
        self._decided = log.clock.condition(pipeline.lock)

    @contextmanager
    def held(self) -> Iterator[tuple[ChainPoint | None, Callable[[ShardManifest], None]]]:
        """For a commit that may set the mark: the tip at which it may, or None, and what is to be told of the manifest that came of it."""
        quiet = False
        state: _State = "clean"  # until a manifest tells: whatever goes wrong within, it may say so
        try:
            with self._pipeline.lock:
                quiet = self._pipeline.is_idle() and self._state == "dirty"
                if quiet:
                    # From here on whoever wants to send an entry waits until it is decided whether the log is clean.
                    self._state, self._pipeline.before_persist = "deciding", self._take_back
                tip = ChainPoint(self._epoch, self._pipeline.acknowledged_position + 1)

            def committed(manifest: ShardManifest) -> None:
                nonlocal state
                state = "clean" if manifest.wal.clean_at is not None else "dirty"

            yield tip if quiet else None, committed
        finally:
            if quiet:
                self._decide(state)

    def _decide(self, state: _State) -> None:
        with self._pipeline.lock:
            self._state = state
            if state == "dirty":
                self._pipeline.before_persist = None
            self._decided.notify_all()

    def _take_back(self) -> None:
        """Before an entry is sent: the manifest must no longer say that nothing in the log is needed."""
        with self._pipeline.lock:
            while self._state == "deciding":
                self._decided.wait()
            if self._state == "dirty":
                return
            self._state = "deciding"
        state: _State = "clean"
        try:
            # While it was clean the store may have been wiped: what makes it this shard's again comes first.
            manifest = self._log.manifests.load()
            check_epoch(self._log, manifest, self._epoch)
            if not marker_stands(self._log, self._log.space(manifest)):
                put_back(self._log, manifest)
            self._log.manifests.commit(self._without)
            state = "dirty"
        finally:
            self._decide(state)

    def _without(self, manifest: ShardManifest) -> ShardManifest | None:
        """Always a new version, also when the latest says nothing of it: a commit that is still on its way finds its name taken."""
        check_epoch(self._log, manifest, self._epoch)
        return manifest.but(wal=manifest.wal.but(clean_at=None))
