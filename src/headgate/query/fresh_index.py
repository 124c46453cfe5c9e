"""What a writer keeps of its MemTables for those who search them.

Owns: the words of a MemTable's rows, and when they are made. Does not own: which of the rows count
(query), what a word is worth (text), what is kept by key (query).

For text it is the words of every row, in the order of the puts. For vectors it is nothing: the
search is exact, and reads the vectors as they were put. For scalar columns it is nothing too: a
filter looks at every fresh row. So an index changes the time that a search takes and never what
it finds: rows whose words were not made yet have them made by the search, and it keeps them.

Nothing here is locked. What is known of a MemTable is one object that never changes, and whoever
knows more puts another in its place. Two at once do some work twice, and the longer one stays or
is made again by the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import pyarrow as pa

from headgate.clock import Clock, Thread
from headgate.config import ShardWriterConfig
from headgate.keys import rows_of
from headgate.manifest.model import TextIndex
from headgate.memtable import Fresh, MemTable
from headgate.query.words import PLAIN, Cut, Words, join, no_words, words_of
from headgate.schema import RowRules
from headgate.wal.entry import Put

_PIECE_BYTES = 64 << 20
_JOINED = 8


@dataclass(frozen=True)
class FreshWords:
    """The words of a MemTable's first ``count`` puts, in parts, the small ones at the end."""

    count: int = 0
    parts: tuple[Words, ...] = ()

    def extended(self, puts: Sequence[Put], rules: RowRules, column: str, cut: Cut) -> FreshWords:
        """With the puts that follow. The rows of deletes count, and have no text."""
        parts = list(self.parts)
        for texts in _texts(puts, rules, column):
            parts.append(words_of(texts, cut) if texts.null_count < len(texts) else no_words(len(texts)))
            # Parts of like size are joined, several at once: a row is joined again only when its part has grown that much.
            while len(parts) >= _JOINED and parts[-_JOINED].num_rows < _JOINED * parts[-1].num_rows:
                parts[-_JOINED:] = [join(parts[-_JOINED:])]
        return FreshWords(self.count + len(puts), tuple(parts))


def _texts(puts: Sequence[Put], rules: RowRules, column: str) -> Iterator[pa.Array]:
    """The column of some puts, in few arrays."""
    chunks = rows_of(puts, rules, [column]).column(0).chunks
    first = size = 0
    for number, chunk in enumerate(chunks, 1):
        size += chunk.nbytes
        if size > _PIECE_BYTES or number == len(chunks):
            yield chunk if number - first == 1 else pa.concat_arrays(chunks[first:number])
            first, size = number, 0


_known: WeakKeyDictionary[MemTable, dict[tuple[int, Cut], FreshWords]] = WeakKeyDictionary()


def words_of_fresh(fresh: Fresh, rules: RowRules, column: str, cut: Cut) -> tuple[Words, ...]:
    """The words of at least the rows of ``fresh``, in order; of those that follow, the caller takes no notice."""
    memtable = fresh.memtable
    kept = _known.setdefault(memtable, {})
    key = (rules.field_ids[rules.schema.get_field_index(column)], cut)
    known = kept.get(key) or FreshWords()
    if known.count < fresh.count:
        known = known.extended(fresh.puts[known.count :], rules, column, cut)
        newer = kept.get(key)
        if newer is None or newer.count < known.count:
            kept[key] = known
    return known.parts


def words_of_puts(puts: Sequence[Put], rules: RowRules, column: str, cut: Cut) -> tuple[Words, ...]:
    """The same for puts that are not in a MemTable yet."""
    return FreshWords().extended(puts, rules, column, cut).parts


def cut_of(indexes: Iterable[Any], column: str) -> Cut:
    """How the text of a column is cut: as its index says, or plainly."""
    index = next((index for index in indexes if isinstance(index, TextIndex) and index.column == column), None)
    return PLAIN if index is None else Cut(index.lower_case, index.ascii_folding)


@dataclass(frozen=True)
class FreshIndexStats:
    """A moment of what a writer keeps for searches."""

    indexed_rows: int
    """Rows of this writer's MemTables so far whose words it has made."""
    waiting_rows: int
    """Rows whose words are still to be made; searches find them all the same."""


class FreshIndexes:
    """The indexes that one writer maintains. ``taken`` is to be told of every entry that was acknowledged.

    With ``sync_indexed_write`` words are made there and then. Otherwise a thread of its own makes
    them, when ``async_index_buffer_rows`` rows are waiting or ``async_index_interval`` is over.
    """

    def __init__(
        self, config: ShardWriterConfig, indexes: Callable[[], Sequence[Any]], rules: Callable[[], RowRules], clock: Clock, shard: str
    ) -> None:
        """``indexes``: the table's. Those of ``config.index_configs`` are maintained; None: all of them."""
        self._config, self._indexes, self._rules, self._clock, self._shard = config, indexes, rules, clock, shard
        self._lock = clock.lock()
        self._due = clock.condition(self._lock)
        self._growing: ref[MemTable] | None = None  # weak: once it is flushed, nobody needs it
        self._rows = 0  # of the growing one, as far as they were told of
        self._waiting: dict[MemTable, Fresh] = {}
        self._waiting_rows = self._working_rows = self._indexed_rows = 0
        self._thread: Thread | None = None
        self._stopping = False
        self._failure: Exception | None = None

    def taken(self, memtable: MemTable) -> None:
        """It has grown. In order, by one thread at a time; it waits for no store."""
        if not self._texts():
            self._growing = None  # should one come, all rows are new to it
            return
        fresh = memtable.view()
        with self._lock:
            if self._growing is None or self._growing() is not fresh.memtable:
                self._growing, self._rows = ref(fresh.memtable), 0
            new = fresh.memtable.rows - self._rows
            self._rows += new
            if self._stopping:
                return
            self._waiting[fresh.memtable] = fresh
            self._waiting_rows += new
            if not self._config.sync_indexed_write:
                if self._thread is None:
                    self._thread = self._clock.spawn(self._run, name=f"headgate-index-{self._shard}")
                elif self._waiting_rows == new or self._waiting_rows >= self._config.async_index_buffer_rows:
                    self._due.notify()
                return
        self.catch_up()

    def catch_up(self) -> int:
        """Index all that is waiting now; how many rows that was."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
            rows, self._waiting_rows = self._waiting_rows, 0
            self._working_rows += rows
        rules = self._rules()
        for fresh in waiting.values():
            for index in self._texts():
                words_of_fresh(fresh, rules, index.column, cut_of([index], index.column))
        with self._lock:
            self._working_rows -= rows
            self._indexed_rows += rows
        return rows

    def stats(self) -> FreshIndexStats:
        with self._lock:
            return FreshIndexStats(self._indexed_rows, self._waiting_rows + self._working_rows)

    def stop(self) -> None:
        """End the thread. What is waiting stays so. Raises what went wrong in it."""
        with self._lock:
            self._stopping = True
            self._waiting.clear()
            self._due.notify_all()
        if self._thread is not None:
            self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _texts(self) -> list[TextIndex]:
        chosen = self._config.index_configs
        indexes = self._indexes() if chosen is None else chosen
        if not indexes:
            return []
        schema = self._rules().schema
        return [index for index in indexes if isinstance(index, TextIndex) and index.column in schema.names]

    def _run(self) -> None:
        clock, config = self._clock, self._config
        try:
            while True:
                with self._lock:
                    while not self._waiting and not self._stopping:
                        self._due.wait()
                    until = clock.monotonic() + config.async_index_interval
                    while not self._stopping and self._waiting_rows < config.async_index_buffer_rows:
                        left = until - clock.monotonic()
                        if left <= 0:
                            break
                        self._due.wait(left)
                    if self._stopping:
                        return
                self.catch_up()
        except Exception as error:  # a thread's end: searches make the words themselves, and stop() tells
            self._failure = error
