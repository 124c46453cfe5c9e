"""A writer's own compaction: in the background, or because puts wait for one.

Owns: when it is tried, one at a time, and what comes of a failure. Does not own: compaction itself (compact), nor how many
generations are too many (flush).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import copy

from headgate.clock import Thread
from headgate.columnar import Columnar
from headgate.compact import compact_shard
from headgate.errors import ClosedError, FencedError, HeadgateError
from headgate.flush import Generations
from headgate.indexes import indexed_scalars, indexed_vectors
from headgate.schema import RowRules
from headgate.wal.fence import check_epoch
from headgate.wal.log import ShardLog
from headgate.wal.pipeline import Pipeline
from headgate.watch import SchemaWatch

logger = logging.getLogger("headgate")


class AutoCompact:
    """Of one writer with a MemTable.

    Args:
        is_wanted: compact whenever there is something to gain (``auto_compact``); else only when puts wait for it (C05).
        max_memory: bytes that a compaction may hold, about.
    """

    def __init__(
        self,
        log: ShardLog,
        columnar: Columnar,
        generations: Generations,
        pipeline: Pipeline,
        rules: Callable[[], RowRules],
        watch: SchemaWatch | None,
        *,
        epoch: int,
        is_wanted: bool,
        max_memory: int,
    ) -> None:
        self._log, self._columnar, self._generations, self._pipeline = log, columnar, generations, pipeline
        self._rules, self._watch, self._epoch, self._is_wanted, self._max_memory = rules, watch, epoch, is_wanted, max_memory
        self._thread: Thread | None = None
        self._compacted_at = 0
        self._has_failed = self._is_stopped = False

    def tick(self) -> None:
        """Every so often: compact if it is wanted, or if puts wait for it."""
        self._has_failed = False
        if self._generations.stalled:
            self.recount()  # somebody else may have compacted
            if self._generations.stalled:
                self.start()
            return
        flushed = self._generations.stats().flushed
        if self._is_wanted and flushed != self._compacted_at and self.start():
            self._compacted_at = flushed

    def start(self) -> bool:
        """Whoever was to compact. After a failure only the next tick tries again. False: not now."""
        if self._is_stopped or self._has_failed or self.is_alive():
            return False
        self._thread = self._log.clock.spawn(self._run, name=f"headgate-compact-{self._log.shard}")
        return True

    def recount(self) -> None:
        """See how many generations there are now."""
        try:
            manifest = self._log.manifests.load()
            check_epoch(self._log, manifest, self._epoch)
            self._generations.recount(manifest)
        except FencedError as error:
            self._pipeline.fail(error)  # whoever waits for room would wait for ever (M03)
        except HeadgateError as error:  # the next tick looks again
            logger.debug("shard %s: its manifest could not be read: %s", self._log.shard, error.message)

    def stop(self) -> None:
        """Begin none any more; one that runs gives up at its next step."""
        self._is_stopped = True

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _run(self) -> None:
        columnar = copy(self._columnar)  # what it writes is large and stays, unlike what is flushed
        indexes = self._watch.manifest.indexes if self._watch is not None else ()
        columnar.vectors, columnar.scalars = indexed_vectors(indexes), indexed_scalars(indexes)
        try:
            compact_shard(self._log, columnar, self._rules, max_memory=self._max_memory, progress=self._give_up_if_stopped)
        except ClosedError:
            return
        except Exception as error:  # a thread's end, and it is a convenience: the next one makes up for it
            self._has_failed = True
            logger.warning("shard %s: compaction failed, trying again later: %s", self._log.shard, error)
        self.recount()

    def _give_up_if_stopped(self, shard: str, done: int, total: int) -> None:
        if self._is_stopped or self._pipeline.failure is not None:
            raise ClosedError(f"the writer of shard {shard} is closed", hint="what was merged so far is given up")
