"""What a writer keeps of its MemTables for searches: in time, in order, and never more than once."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pytest

from headgate.clock import SYSTEM_CLOCK
from headgate.config import ShardWriterConfig
from headgate.indexes import scalar_index, text_index, vector_index
from headgate.manifest.model import ChainPoint
from headgate.memtable import Fresh, MemTable
from headgate.query import fresh_index
from headgate.query.fresh_index import FreshIndexes, cut_of, words_of_fresh, words_of_puts
from headgate.query.words import PLAIN, Cut, Words
from headgate.schema import RowRules
from headgate.wal.entry import Put

SCHEMA = pa.schema([("id", pa.int64()), ("body", pa.string()), ("title", pa.string())])
RULES = RowRules(SCHEMA, ("id",))
TEXT = text_index("body")


def put(first: int, bodies: list[str | None]) -> Put:
    rows = pa.record_batch(
        [pa.array(range(first, first + len(bodies))), pa.array(bodies, pa.string()), pa.nulls(len(bodies), pa.string())], schema=SCHEMA
    )
    return Put(RULES.upsert(rows))


def delete(*keys: int) -> Put:
    return Put(RULES.delete(pa.table({"id": pa.array(keys, pa.int64())})), "delete")


def grow(memtable: MemTable, *puts: Put) -> Fresh:
    memtable.append(1, memtable.end.position, list(puts), 100, 0.0)
    return memtable.view()


def told(parts: tuple[Words, ...]) -> list[list[str]]:
    found = []
    for words in parts:
        terms = words.terms.to_pylist()
        found += [[terms[code] for code in words.codes[words.bounds[r] : words.bounds[r + 1]]] for r in range(words.num_rows)]
    return found


def indexes_of(config: ShardWriterConfig, *indexes: object) -> FreshIndexes:
    return FreshIndexes(config, lambda: indexes or (TEXT,), lambda: RULES, SYSTEM_CLOCK, "0000")


@pytest.fixture
def cut_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows were cut into words, time after time."""
    seen: list[int] = []
    real = fresh_index.words_of

    def counted(texts: pa.Array, cut: Cut = PLAIN) -> Words:
        seen.append(len(texts))
        return real(texts, cut)

    monkeypatch.setattr(fresh_index, "words_of", counted)
    return seen


def test_the_words_of_a_memtable_are_those_of_its_puts_in_order_and_deletes_have_none() -> None:
    memtable = MemTable(ChainPoint(1, 0))
    fresh = grow(memtable, put(0, ["a b", None]), delete(0, 1), put(2, ["c"]))
    assert told(words_of_fresh(fresh, RULES, "body", PLAIN)) == [["a", "b"], [], [], [], ["c"]]
    assert told(words_of_puts(fresh.puts, RULES, "body", PLAIN)) == [["a", "b"], [], [], [], ["c"]]


def test_what_was_cut_once_is_kept_and_only_what_is_new_is_cut(cut_rows: list[int]) -> None:
    memtable = MemTable(ChainPoint(1, 0))
    for number in range(50):
        words_of_fresh(grow(memtable, put(number, [f"w{number}"])), RULES, "body", PLAIN)
    parts = words_of_fresh(memtable.view(), RULES, "body", PLAIN)
    assert told(parts) == [[f"w{number}"] for number in range(50)]
    assert cut_rows == [1] * 50
    assert len(parts) <= 14, "few, however many puts"


def test_an_older_view_gets_its_own_rows_first_from_what_a_later_one_made(cut_rows: list[int]) -> None:
    memtable = MemTable(ChainPoint(1, 0))
    earlier = grow(memtable, put(0, ["a"]))
    words_of_fresh(grow(memtable, put(1, ["b"])), RULES, "body", PLAIN)
    assert told(words_of_fresh(earlier, RULES, "body", PLAIN))[:1] == [["a"]]
    assert cut_rows == [2]


def test_columns_are_known_by_id_whatever_they_are_called_now() -> None:
    memtable = MemTable(ChainPoint(1, 0))
    fresh = grow(memtable, put(0, ["a"]))
    renamed = RowRules(pa.schema([("id", pa.int64()), ("text", pa.large_string()), ("body", pa.string())]), ("id",), (1, 2, 4))
    assert told(words_of_fresh(fresh, renamed, "text", PLAIN)) == [["a"]]
    assert told(words_of_fresh(fresh, renamed, "body", PLAIN)) == [[]], "another column, that took the name over"


def test_ways_of_cutting_are_kept_apart() -> None:
    memtable = MemTable(ChainPoint(1, 0))
    fresh = grow(memtable, put(0, ["Café"]))
    assert told(words_of_fresh(fresh, RULES, "body", PLAIN)) == [["café"]]
    indexes = [vector_index("body"), text_index("title"), text_index("body", lower_case=False, ascii_folding=True)]
    assert told(words_of_fresh(fresh, RULES, "body", cut_of(indexes, "body"))) == [["Cafe"]]
    assert cut_of(indexes, "id") == PLAIN


def test_a_sync_writer_indexes_a_put_when_it_is_acknowledged(cut_rows: list[int]) -> None:
    indexes = indexes_of(ShardWriterConfig(sync_indexed_write=True))
    memtable = MemTable(ChainPoint(1, 0))
    indexes.taken(grow(memtable, put(0, ["a", "b"])).memtable)
    indexes.taken(grow(memtable, put(2, ["c"]), put(3, ["d"])).memtable)
    assert cut_rows == [2, 2]
    assert (indexes.stats().indexed_rows, indexes.stats().waiting_rows) == (4, 0)
    indexes.taken(grow(MemTable(ChainPoint(1, 2)), put(9, ["e"])).memtable)
    assert indexes.stats().indexed_rows == 5, "rows of the next MemTable are counted from its start"
    words_of_fresh(memtable.view(), RULES, "body", PLAIN)
    assert cut_rows == [2, 2, 1], "a search finds them made"


def test_an_async_writer_leaves_rows_waiting_and_a_search_covers_them(cut_rows: list[int]) -> None:
    indexes = indexes_of(ShardWriterConfig(sync_indexed_write=False, async_index_buffer_rows=1000, async_index_interval=1000.0))
    memtable = MemTable(ChainPoint(1, 0))
    fresh = grow(memtable, put(0, ["a", "b"]))
    indexes.taken(fresh.memtable)
    assert indexes.stats().waiting_rows == 2
    assert cut_rows == []
    assert told(words_of_fresh(fresh, RULES, "body", PLAIN)) == [["a"], ["b"]]
    assert indexes.catch_up() == 2
    assert (indexes.stats().indexed_rows, indexes.stats().waiting_rows) == (2, 0)
    assert indexes.catch_up() == 0
    assert cut_rows == [2], "what the search made is not made again"
    indexes.stop()


def eventually(holds: Callable[[], bool]) -> None:
    until = SYSTEM_CLOCK.monotonic() + 10
    while not holds():
        assert SYSTEM_CLOCK.monotonic() < until
        SYSTEM_CLOCK.sleep(0.002)


def test_an_async_pass_runs_when_enough_rows_wait() -> None:
    indexes = indexes_of(ShardWriterConfig(sync_indexed_write=False, async_index_buffer_rows=3, async_index_interval=1000.0))
    memtable = MemTable(ChainPoint(1, 0))
    for number in range(3):
        assert indexes.stats().indexed_rows == 0
        indexes.taken(grow(memtable, put(number, ["a"])).memtable)
    eventually(lambda: indexes.stats().indexed_rows == 3)
    indexes.stop()


def test_an_async_pass_runs_when_its_interval_is_over() -> None:
    indexes = indexes_of(ShardWriterConfig(sync_indexed_write=False, async_index_buffer_rows=1000, async_index_interval=0.01))
    memtable = MemTable(ChainPoint(1, 0))
    for number in range(3):
        indexes.taken(grow(memtable, put(number, ["a"])).memtable)
        eventually(lambda n=number: indexes.stats().indexed_rows == n + 1)  # type: ignore[misc]
    indexes.stop()


def test_only_the_indexes_that_a_writer_is_given_are_maintained(cut_rows: list[int]) -> None:
    memtable = MemTable(ChainPoint(1, 0))
    fresh = grow(memtable, put(0, ["a"]))
    indexes_of(ShardWriterConfig(index_configs=[]), TEXT).taken(fresh.memtable)
    indexes_of(ShardWriterConfig(index_configs=[scalar_index("id"), vector_index("v")]), TEXT).taken(fresh.memtable)
    indexes_of(ShardWriterConfig(), text_index("dropped_since")).taken(fresh.memtable)
    assert cut_rows == []
    indexes_of(ShardWriterConfig(index_configs=[text_index("body")]), text_index("title")).taken(fresh.memtable)
    assert cut_rows == [1]


def test_stopping_ends_the_thread_and_what_went_wrong_in_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    indexes = indexes_of(ShardWriterConfig(sync_indexed_write=False, async_index_buffer_rows=1))
    began = SYSTEM_CLOCK.gate()

    def broken(*_: object) -> None:
        began.open()
        raise MemoryError("no room")

    monkeypatch.setattr(fresh_index, "words_of_fresh", broken)
    indexes.taken(grow(MemTable(ChainPoint(1, 0)), put(0, ["a"])).memtable)
    assert began.wait(10)
    with pytest.raises(MemoryError):
        indexes.stop()
    indexes.taken(grow(MemTable(ChainPoint(1, 0)), put(0, ["a"])).memtable)
    assert indexes.stats().indexed_rows == 0
