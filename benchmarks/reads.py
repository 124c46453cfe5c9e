"""Merged reads beside Lance MemWAL and plain Lance: scans, lookups by key, search by vector and by text.

    python benchmarks/reads.py [--quick] [--rounds N] [--only NAME …] [--out FILE]

Everybody reads the same rows: a base of 1 M, five times 100 k updates of random keys, each flushed
to a run of its own, and 50 k updates more that are in the MemTable. "Plain lance" has the final rows
in one dataset, with nothing to merge: it is the limit, not a peer. A time counts only after the
result has been checked, by its number of rows and its sums.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import headgate as hg
import ours
import peers
from harness import Contestant, Measurements, Question, Scale, Target, main
from process import Stopwatch
from rows import DOCUMENTS, KEY, SCHEMA, VECTOR_LENGTH, Ids, documents, rows_of, values_of

OURS, READER, LANCE, PLAIN = "headgate", "headgate, other process", "lance", "plain lance"
_SHARD = "5f0c7a0e-3f6e-4a51-9d0c-6c1b52a0d002"
_STAYS: dict[str, Any] = {"max_memtable_size": 512 << 20, "max_memtable_rows": 4_000_000, "max_memtable_age": 1e6}
_PUT_ROWS = 10_000


def milliseconds(work: Callable[..., Any], *args: Any, **options: Any) -> tuple[float, Any]:
    start = time.perf_counter()
    found = work(*args, **options)
    return (time.perf_counter() - start) * 1e3, found


def batches_of(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    for start in range(0, batch.num_rows, _PUT_ROWS):
        yield batch.slice(start, _PUT_ROWS)


# -- the tables


@dataclass
class Layers:
    """What was written: the base, then updates; and what a merged read must give."""

    base: Ids
    updates: list[Ids]
    """Oldest first; the last one stays in the MemTable."""
    values: Any = field(init=False)
    newest: Any = field(init=False)
    """By id: the layer that holds its newest row, 0 for the base."""

    def __post_init__(self) -> None:
        self.values, self.newest = values_of(self.base), np.zeros(len(self.base), dtype=np.int64)
        for number, ids in enumerate(self.updates, 1):
            self.values[ids], self.newest[ids] = values_of(ids, number), number

    def check(self, found: pa.Table) -> None:
        ids, values = found["id"].to_numpy(), found["v"].to_numpy()
        assert len(ids) == len(self.base), len(ids)
        order = np.argsort(ids)
        assert np.array_equal(ids[order], self.base), "every key is there once"
        assert np.array_equal(values[order], self.values), "the newest rows are there"


class Tables:
    """Made once for each size, in the folder of the run, and read in every round."""

    def __init__(self) -> None:
        self._layers: Layers | None = None
        self._lance: Any = None
        self._plain: Any = None
        self._folder: Path | None = None

    def layers(self, scale: Scale) -> Layers:
        if self._layers is None:
            random, base = np.random.default_rng(6), scale.of(1_000_000)
            sizes = [scale.of(100_000)] * 5 + [scale.of(50_000)]
            self._layers = Layers(np.arange(base), [random.choice(base, size, replace=False) for size in sizes])
        return self._layers

    def folder(self, folder: Path) -> Path:
        return folder.parent / "reads"

    def ours(self, folder: Path, scale: Scale) -> Path:
        """Runs, and a log whose last rows are in no run yet."""
        place = self.folder(folder)
        if not (place / "table").exists():
            layers = self.layers(scale)
            writer = ours.new_shard(place).writer(ours.with_memtable(**_STAYS))
            for number, ids in enumerate([layers.base, *layers.updates]):
                for batch in batches_of(rows_of(ids, number)):
                    writer.put(batch)
                if number < len(layers.updates):
                    writer.flush()
            writer.put(rows_of(layers.updates[-1][:1], len(layers.updates))).wait()
            writer.abort()
        return place

    def lance(self, folder: Path, scale: Scale) -> Any:
        """Its writer stays open: to close it would flush its MemTable."""
        if self._lance is None:
            layers, place = self.layers(scale), self.folder(folder)
            dataset = peers.lance_dataset(place, peers.lance_table(rows_of(layers.base), KEY), {KEY: "BTREE"}, maintained=False)
            writer = peers.lance_shard(dataset, _SHARD, max_memtable_rows=len(layers.updates[0]), durable_write=False)
            for number, ids in enumerate(layers.updates, 1):
                for batch in batches_of(rows_of(ids, number)):
                    writer.put(peers.lance_table(batch, KEY))
            while writer.memtable_stats()["frozen_count"]:
                time.sleep(0.05)
            assert len(peers.lance_generations(dataset, _SHARD)) == 5
            self._lance = writer
        return self._lance

    def plain(self, folder: Path, scale: Scale) -> Any:
        """The final rows, nothing to merge."""
        if self._plain is None:
            import lance

            layers = self.layers(scale)
            final = rows_of(layers.base)
            final = final.set_column(3, SCHEMA.field("v"), pa.array(layers.values))
            self._plain = lance.write_dataset(pa.Table.from_batches([final]), str(self.folder(folder) / "plain"))
        return self._plain


_tables = Tables()


@contextmanager
def reopened(folder: Path, scale: Scale) -> Iterator[Any]:
    """A writer that has just replayed the MemTable and has read nothing yet; it leaves the log as it was."""
    writer = ours.opened_shard(_tables.ours(folder, scale)).writer(ours.with_memtable(**_STAYS))
    try:
        yield writer
    finally:
        writer.abort()


# -- 1. scans

_TURNS = 7


def _our_scan(source: Any, columns: list[str] | None) -> pa.Table:
    return source.scan(columns=columns).to_arrow()


def scan(folder: Path, scale: Scale) -> Measurements:
    """Our merged scan and a plain one in turn: a first one, then seven more of each."""
    layers, plain = _tables.layers(scale), _tables.plain(folder, scale)
    found: dict[str, float] = {}
    for name, columns in (("", ["id", "v"]), ("all columns, ", None)):
        with reopened(folder, scale) as writer:
            plain.to_table(columns=columns)
            with Stopwatch() as first:
                table = _our_scan(writer, columns)
            layers.check(table)
            found |= {f"{name}first ms": first.seconds * 1e3, f"{name}first, CPU ms": first.cpu_seconds * 1e3}
            reads = {"further": partial(_our_scan, writer, columns), PLAIN: partial(plain.to_table, columns=columns)}
            watches: dict[str, list[Stopwatch]] = {which: [] for which in reads}
            for _ in range(_TURNS):
                for which, read in reads.items():
                    with Stopwatch() as watch:
                        table = read()
                    assert table.num_rows == len(layers.base)
                    watches[which].append(watch)
                    del table
            for which, taken in watches.items():
                found[f"{name}{which} ms"] = statistics.median(watch.seconds for watch in taken) * 1e3
                found[f"{name}{which}, CPU ms"] = statistics.median(watch.cpu_seconds for watch in taken) * 1e3
    return found


def scan_reader(folder: Path, scale: Scale) -> Measurements:
    """A handle that has read nothing yet, as in another process: manifest, runs and the log's tail."""
    table: Any = hg.open_table(_tables.ours(folder, scale) / "table")
    first, rows = milliseconds(_our_scan, table, ["id", "v"])
    _tables.layers(scale).check(rows)
    further = [milliseconds(_our_scan, table, ["id", "v"])[0] for _ in range(_TURNS)]
    return {"first ms": first, "further ms": statistics.median(further)}


def scan_lance(folder: Path, scale: Scale) -> Measurements:
    writer, layers = _tables.lance(folder, scale), _tables.layers(scale)
    taken, rows = milliseconds(writer.lsm_scanner().project(["id", "v"]).to_table)
    layers.check(rows)
    return {"ms": taken}


# -- 2. lookups

_LOOKUPS = 30
_MANY = 1000


def _keys(scale: Scale) -> Ids:
    """Keys whose newest rows are in the MemTable, in every run and in the base, as many of each."""
    layers, random = _tables.layers(scale), np.random.default_rng(7)
    parts = [random.choice(np.flatnonzero(layers.newest == number), _LOOKUPS) for number in range(len(layers.updates) + 1)]
    return np.stack(parts, axis=1).ravel()


def _timed_lookups(scale: Scale, look_up: Callable[[int], pa.Table], keys: Ids) -> dict[str, float]:
    values, taken = _tables.layers(scale).values, []
    look_up(int(keys[0]))
    for key in keys.tolist():
        elapsed, rows = milliseconds(look_up, key)
        assert rows["v"].to_pylist() == [values[key]], (key, rows)
        taken.append(elapsed)
    return {"one key ms": statistics.median(taken), "one key, worst tier ms": max(map(statistics.median, _by_tier(taken)))}


def _by_tier(taken: list[float]) -> list[list[float]]:
    tiers = len(taken) // _LOOKUPS
    return [taken[tier::tiers] for tier in range(tiers)]


def lookup(folder: Path, scale: Scale) -> Measurements:
    """By a handle on the table, as in any process: it looks at the manifest and the log's tail every time."""
    table: Any = hg.open_table(_tables.ours(folder, scale) / "table")
    layers, keys = _tables.layers(scale), _keys(scale)
    first, _ = milliseconds(table.lookup, [int(keys[0])])
    found = {"first ms": first, **_timed_lookups(scale, lambda key: table.lookup([key]), keys)}
    absent = [milliseconds(table.lookup, [len(layers.base) + number]) for number in range(_LOOKUPS)]
    assert not any(rows.num_rows for _, rows in absent)
    found["absent key ms"] = statistics.median(taken for taken, _ in absent)
    many, taken = np.random.default_rng(8).choice(len(layers.base), _MANY, replace=False), []
    wanted = many.tolist()
    for _ in range(5):
        elapsed, rows = milliseconds(table.lookup, wanted)
        assert sorted(rows["id"].to_pylist()) == sorted(wanted)
        assert np.array_equal(np.sort(rows["v"].to_numpy()), np.sort(layers.values[many]))
        taken.append(elapsed)
    found["1,000 keys ms"] = statistics.median(taken)
    return found


def lookup_lance(folder: Path, scale: Scale) -> Measurements:
    writer = _tables.lance(folder, scale)
    found = _timed_lookups(scale, lambda key: writer.lsm_scanner().filter(f"id = {key}").to_table(), _keys(scale))
    ten = ", ".join(map(str, _keys(scale)[:10].tolist()))
    found["10 keys ms"], _ = milliseconds(writer.lsm_scanner().filter(f"id in ({ten})").to_table)
    return found


def lookup_plain(folder: Path, scale: Scale) -> Measurements:
    plain = _tables.plain(folder, scale)
    return _timed_lookups(scale, lambda key: plain.to_table(filter=f"id = {key}"), _keys(scale)[:_LOOKUPS])


# -- 3. search

_NEAREST = 10
_QUERIES = 20


class Corpus:
    """Documents: 100 k in a base, 5 k of them updated and flushed, 5 k updated in the MemTable."""

    def __init__(self) -> None:
        self._batches: list[pa.RecordBatch] = []
        self._plain: Any = None
        self._lance: Any = None

    def batches(self, scale: Scale) -> list[pa.RecordBatch]:
        if not self._batches:
            random, count = np.random.default_rng(9), scale.of(100_000)
            updates = [random.choice(count, count // 20, replace=False) for _ in range(2)]
            self._batches = [documents(ids, random) for ids in (np.arange(count), *updates)]
        return self._batches

    def final(self, scale: Scale) -> pa.Table:
        """The newest documents, by id."""
        everything = pa.Table.from_batches(self.batches(scale))
        newest = np.zeros(scale.of(100_000), dtype=np.int64)
        newest[everything["id"].to_numpy()] = np.arange(everything.num_rows)  # the last one stays
        return everything.take(pa.array(newest)).combine_chunks()

    def ours(self, folder: Path, scale: Scale) -> Path:
        place = folder.parent / "corpus"
        if not (place / "table").exists():
            shard = ours.new_shard(place, DOCUMENTS, indexes=[hg.vector_index("embedding"), hg.text_index("body")])
            writer = shard.writer(ours.with_memtable(**_STAYS))
            base, flushed, fresh = self.batches(scale)
            for layer in (base, flushed):
                for batch in batches_of(layer):
                    writer.put(batch)
                writer.flush()
            for batch in batches_of(fresh):
                writer.put(batch).wait()
            writer.abort()
        return place

    def lance(self, folder: Path, scale: Scale) -> Any:
        """Dataset and snapshot. Its planner needs an index in every part, and sees no MemTable: all is flushed."""
        if self._lance is None:
            from lance.mem_wal import ShardSnapshot

            base, *updates = self.batches(scale)
            dataset = peers.lance_dataset(folder.parent / "corpus", peers.lance_table(base, KEY), {"embedding": "IVF_FLAT"})
            writer = peers.lance_shard(dataset, _SHARD, max_memtable_rows=updates[0].num_rows, durable_write=False)
            for update in updates:
                for batch in batches_of(update):
                    writer.put(peers.lance_table(batch, KEY))
            writer.close()
            snapshot = ShardSnapshot(_SHARD)
            for number, name in peers.lance_generations(dataset, _SHARD):
                snapshot = snapshot.with_sstable(number, name)
            self._lance = dataset, snapshot
        return self._lance

    def plain(self, folder: Path, scale: Scale) -> Any:
        if self._plain is None:
            import lance

            self._plain = lance.write_dataset(self.final(scale), str(folder.parent / "corpus" / "plain"))
            self._plain.create_scalar_index("body", "INVERTED")
        return self._plain


_corpus = Corpus()


def _vectors(scale: Scale) -> tuple[Any, list[set[int]]]:
    """Queries, and the ids that are truly nearest to each."""
    queries = np.random.default_rng(10).random((_QUERIES, VECTOR_LENGTH), dtype=np.float32)
    final = _corpus.final(scale)
    vectors = final["embedding"].combine_chunks().flatten().to_numpy().reshape(-1, VECTOR_LENGTH)
    distances = (vectors**2).sum(axis=1)[None, :] - 2 * queries @ vectors.T
    ids = final["id"].to_numpy()
    return queries, [set(ids[np.argpartition(row, _NEAREST)[:_NEAREST]].tolist()) for row in distances]


def _searched(search: Callable[[Any], pa.Table], scale: Scale) -> dict[str, float]:
    queries, truth = _vectors(scale)
    search(queries[0])
    taken, right = [], 0
    for query, nearest in zip(queries, truth):
        elapsed, rows = milliseconds(search, query)
        taken.append(elapsed)
        right += len(nearest & set(rows["id"].to_pylist()))
    return {"ms": statistics.median(taken), "recall": right / (_QUERIES * _NEAREST)}


def vector(form: str) -> Contestant:
    def measure(folder: Path, scale: Scale) -> Measurements:
        if form == PLAIN:
            plain = _corpus.plain(folder, scale)
            return _searched(
                lambda query: plain.to_table(columns=["id", "_distance"], nearest={"column": "embedding", "q": query, "k": _NEAREST}), scale
            )
        if form == LANCE:
            from lance.mem_wal import LsmVectorSearchPlanner

            dataset, snapshot = _corpus.lance(folder, scale)
            planner = LsmVectorSearchPlanner(dataset, [snapshot], "embedding", distance_type="l2")
            return _searched(
                lambda query: planner.plan_search(pa.array(query), k=_NEAREST, nprobes=1000, columns=["id", "_distance"]).to_table(), scale
            )
        table: Any = hg.open_table(_corpus.ours(folder, scale) / "table")
        search = partial(_our_vector, table)
        first, _ = milliseconds(search, np.zeros(VECTOR_LENGTH, dtype=np.float32))
        found = _searched(search, scale)
        assert found["recall"] == 1, "our search is exact"
        return {"first ms": first, **found}

    return measure


_TEXTS = ("word7 word42", "word1", "word4999 word3 word812", "word100 word200 word300", "word2500")


def text(form: str) -> Contestant:
    def measure(folder: Path, scale: Scale) -> Measurements:
        import pyarrow.compute as pc

        found: dict[str, float] = {}
        if form == PLAIN:
            plain = _corpus.plain(folder, scale)
            search = partial(_plain_text, plain)
        else:
            table: Any = hg.open_table(_corpus.ours(folder, scale) / "table")
            found["first ms"], _ = milliseconds(_our_text, table, "word1")
            search = partial(_our_text, table)
        final, taken = _corpus.final(scale), []
        for words in _TEXTS:
            pattern = rf"\b({words.replace(' ', '|')})\b"
            wanted = min(_NEAREST, pc.sum(pc.match_substring_regex(final["body"], pattern)).as_py() or 0)
            for _ in range(5):
                elapsed, rows = milliseconds(search, words)
                assert rows.num_rows == wanted, (words, rows.num_rows, wanted)
                assert pc.all(pc.match_substring_regex(rows["body"], pattern)).as_py() is not False
                taken.append(elapsed)
        return {**found, "ms": statistics.median(taken)}

    return measure


def _our_vector(table: Any, query: Any) -> pa.Table:
    return table.search("embedding", query, k=_NEAREST, columns=["id"])


def _our_text(table: Any, words: str) -> pa.Table:
    return table.search_text("body", words, k=_NEAREST, columns=["id", "body"])


def _plain_text(plain: Any, words: str) -> pa.Table:
    return plain.to_table(columns=["id", "body", "_score"], full_text_query={"columns": ["body"], "query": words}, limit=_NEAREST)


QUESTIONS = [
    Question(
        "scan",
        "Merged scan: 1 M base, 5 × 100 k runs, 50 k MemTable",
        {OURS: scan, READER: scan_reader, LANCE: scan_lance},
        [
            Target("times faster than Lance, first scan of a view", f"{LANCE}.ms", f"{OURS}.first ms", at_least=50),
            Target("times faster than Lance, further ones", f"{LANCE}.ms", f"{OURS}.further ms", at_least=50),
            Target("first over a plain scan of the final rows", f"{OURS}.first ms", f"{OURS}.{PLAIN} ms", at_most=7),
            Target("further over a plain scan", f"{OURS}.further ms", f"{OURS}.{PLAIN} ms", at_most=3),
            Target("all columns, first", f"{OURS}.all columns, first ms", f"{OURS}.all columns, {PLAIN} ms"),
            Target("all columns, further", f"{OURS}.all columns, further ms", f"{OURS}.all columns, {PLAIN} ms", at_most=2),
            Target("first, in CPU time", f"{OURS}.first, CPU ms", f"{OURS}.{PLAIN}, CPU ms"),
            Target("further, in CPU time", f"{OURS}.further, CPU ms", f"{OURS}.{PLAIN}, CPU ms"),
            Target("all columns, further, in CPU time", f"{OURS}.all columns, further, CPU ms", f"{OURS}.all columns, {PLAIN}, CPU ms"),
            Target("in another process, first", f"{READER}.first ms", f"{OURS}.{PLAIN} ms"),
            Target("in another process, further", f"{READER}.further ms", f"{OURS}.{PLAIN} ms"),
        ],
        notes=[
            "Two columns, id and v, unless it says all. A first scan is the first one of a writer, or of a reader, that was just opened.",
            "Plain lance is read in turn with ours; its median is of seven warm scans.",
        ],
    ),
    Question(
        "lookup",
        "Rows by key, all columns, through all tiers",
        {OURS: lookup, LANCE: lookup_lance, PLAIN: lookup_plain},
        [
            Target("one key over Lance's filter on the key", f"{OURS}.one key ms", f"{LANCE}.one key ms", at_most=1),
            Target("1,000 keys in one call over one key", f"{OURS}.1,000 keys ms", f"{OURS}.one key ms", at_most=20),
            Target("a key that is not there over Lance's median", f"{OURS}.absent key ms", f"{LANCE}.one key ms"),
        ],
        notes=[
            "Keys whose newest row is in the MemTable, in each run and in the base, as many of each.",
            "Lance: its scanner with a filter, a BTREE on the base's key; its planner for lookups sees no MemTable and was slower.",
        ],
    ),
    Question(
        "vector",
        "The 10 nearest of 100 k vectors of 64 floats",
        {OURS: vector(OURS), LANCE: vector(LANCE), PLAIN: vector(PLAIN)},
        [
            Target("over an exact search of plain Lance", f"{OURS}.ms", f"{PLAIN}.ms"),
            Target("over Lance MemWAL", f"{OURS}.ms", f"{LANCE}.ms"),
        ],
        notes=[
            "Ours and plain Lance are exact. Lance MemWAL finds nothing without an index (IVF_FLAT here, all partitions probed;"
            " HNSW in its MemTables) and sees no MemTable from Python: all its rows are flushed.",
        ],
    ),
    Question(
        "text",
        "Text search over 100 k documents of ten words",
        {OURS: text(OURS), PLAIN: text(PLAIN)},
        [Target("over plain Lance with an inverted index", f"{OURS}.ms", f"{PLAIN}.ms")],
        notes=["Lance MemWAL has no text search from Python: plain Lance has all final rows in one index."],
    ),
]

if __name__ == "__main__":
    sys.exit(
        main(
            QUESTIONS,
            default_out=Path(__file__).parent / "results" / "reads.json",
            packages=["headgate", "pyarrow", "pylance", "numpy", "datafusion"],
        )
    )
