"""The streaming source: the changes of a table, each once, whatever happens to the query."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from torture_source import torture

import headgate as hg
import headgate.spark as hgs
from headgate.failpoint import hooked

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string()), pa.field("v", pa.float64())])
CONFIG = hg.ShardWriterConfig(fsync=False)
MARKS = ["_op", "_epoch", "_position", "_load", "_time"]


def rows(first: int, last: int, v: float = 0.0) -> pa.Table:
    ids = list(range(first, last))
    return pa.table({"id": ids, "name": [f"n{i}" for i in ids], "v": [v] * len(ids)}, schema=SCHEMA)


def made(place: Path, shards: int = 2) -> hg.Table:
    return hg.create_table(place / "t", SCHEMA, key="id", sharding=hg.bucket("id", shards))


def put(table: hg.Table, *batches: pa.Table) -> None:
    with table.writer(CONFIG) as writer:
        for batch in batches:
            writer.put(batch).wait()
        writer.abort()


class Query:
    """Runs a stream to its end, as often as asked, with one checkpoint; keeps what each batch had."""

    def __init__(self, spark: Any, table: hg.Table, place: Path, **options: Any) -> None:
        self.spark, self.table, self.place = spark, table, place
        self.options = {"startingOffsets": "earliest", **options}
        self.batches: list[list[dict[str, Any]]] = []
        self.fails_at: int | None = None
        self.on_batch: Callable[[int], None] = lambda number: None

    def frame(self) -> Any:
        reader = self.spark.readStream.format("headgate")
        for name, value in self.options.items():
            if value is not None:
                reader = reader.option(name, value)
        return reader.load(self.table.uri)

    def _take(self, frame: Any, number: int) -> None:
        if number == self.fails_at:
            self.fails_at = None
            raise RuntimeError("the batch fails")
        found = frame.toArrow().to_pylist()
        self.on_batch(number)
        while len(self.batches) <= number:
            self.batches.append([])
        self.batches[number] = found

    def start(self, **trigger: Any) -> Any:
        stream = self.frame().writeStream.foreachBatch(self._take).option("checkpointLocation", str(self.place))
        return stream.trigger(**(trigger or {"availableNow": True})).start()

    def run(self) -> Query:
        for attempt in range(8):
            query = self.start()
            try:
                assert query.awaitTermination(300)
                break
            except Exception as error:
                if "failed to connect back" not in str(error) or attempt == 7:
                    raise  # else: Spark gives the process of a source 10 seconds to start, and this machine is busy
            finally:
                query.stop()
        return self

    @property
    def all(self) -> list[dict[str, Any]]:
        return [row for batch in self.batches for row in batch]

    def offsets(self) -> list[dict[str, Any]]:
        """What Spark wrote down, batch by batch."""
        logs = sorted((log for log in (self.place / "offsets").iterdir() if log.name.isdecimal()), key=lambda log: int(log.name))
        return [json.loads(log.read_text().splitlines()[-1]) for log in logs]


@pytest.fixture
def query(spark: Any, tmp_path: Path) -> Iterator[Callable[..., Query]]:
    hgs.register(spark)

    def begin(table: hg.Table, name: str = "query", **options: Any) -> Query:
        return Query(spark, table, tmp_path / name, **options)

    yield begin
    for running in spark.streams.active:
        running.stop()


def changes(table: hg.Table) -> list[dict[str, Any]]:
    return [row for batch in table.changes(start="earliest") for row in batch.to_pylist()]


def in_order(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(found, key=lambda row: (row["_position"], row["_load"], row["id"], str(row["v"])))


def test_a_stream_gives_all_changes_with_where_they_come_from(query: Callable[..., Query], tmp_path: Path) -> None:
    table = made(tmp_path)
    with table.writer(CONFIG) as writer:
        writer.put(rows(0, 100)).wait()
        writer.delete(pa.table({"id": [3, 4]})).wait()
        writer.abort()
    table.load(rows(50, 150, 1.0))
    stream = query(table).run()
    assert in_order(stream.all) == in_order(changes(table))
    assert stream.frame().columns == [*SCHEMA.names, *MARKS]
    assert {row["_op"] for row in stream.all} == {"upsert", "delete"}
    put(table, rows(200, 210))
    before = len(stream.all)
    stream.run()
    assert len(stream.all) == before + 10
    assert in_order(stream.all) == in_order(changes(table))


# -- limits and ends


def test_limits_cut_the_changes_into_batches_and_the_query_ends(query: Callable[..., Query], tmp_path: Path) -> None:
    table = made(tmp_path)
    put(table, *[rows(10 * n, 10 * n + 10) for n in range(12)])
    by_entries = query(table, "entries", maxEntriesPerTrigger=6).run()
    assert len(by_entries.batches) == 4, "24 entries in all, 12 in each shard"
    assert in_order(by_entries.all) == in_order(changes(table))
    by_bytes = query(table, "bytes", maxBytesPerTrigger="1k").run()
    assert len(by_bytes.batches) >= 6
    assert in_order(by_bytes.all) == in_order(changes(table))


def test_p05_an_end_that_has_not_moved_ends_the_query_and_makes_no_batch(query: Callable[..., Query], tmp_path: Path) -> None:
    table = made(tmp_path)
    stream = query(table, maxEntriesPerTrigger=5).run()
    assert stream.all == []
    put(table, rows(0, 10))
    stream.run()
    written = len(stream.offsets())
    stream.run().run()
    assert len(stream.offsets()) == written, "nothing new, nothing written down"
    for _ in range(3):
        with table.writer(CONFIG):  # seals, and nothing else
            pass
    stream.run()
    assert len(stream.all) == 10


def test_p12_the_start_is_found_once_and_nothing_past_the_target_is_read(query: Callable[..., Query], tmp_path: Path) -> None:
    table = made(tmp_path)
    put(table, *[rows(10 * n, 10 * n + 10) for n in range(6)])
    stream = query(table, startingOffsets="snapshot", consumer="index", maxEntriesPerTrigger=2)
    stream.on_batch = lambda number: put(table, rows(1_000 + number, 1_001 + number))  # never stops coming
    stream.run()
    first = len(stream.all)
    assert first <= 60, "what came after the query began is for the next one"
    (consumer,) = table.consumers()
    assert all(not place.snapshot for place in consumer.places) or len(stream.batches) < 3
    assert len(table.checkpoints()) <= 2, "one for each shard at most, however often the start was asked for"
    stream.on_batch = lambda number: None
    stream.run()
    assert {row["id"] for row in stream.all} == {row["id"] for row in table.scan(["id"]).to_arrow().to_pylist()}


def test_p12_the_last_batch_is_never_committed_and_the_next_query_catches_up(query: Callable[..., Query], tmp_path: Path) -> None:
    table = made(tmp_path, 1)
    put(table, rows(0, 5), rows(5, 10))
    stream = query(table, consumer="index").run()
    assert len(stream.all) == 10
    assert table.consumers()[0].lag > 0, "Spark told of no commit"
    stream.run()
    assert table.consumers()[0].lag == 0, "what the query begins after is done with"
    assert len(stream.all) == 10


# -- beginnings


def test_a_stream_begins_where_it_is_told(query: Callable[..., Query], tmp_path: Path) -> None:
    table = made(tmp_path, 1)
    put(table, rows(0, 5))
    latest = query(table, "latest", startingOffsets="latest").run()
    offset = query(table, "offset", startingOffsets=json.dumps({"0000": table.shard("0000").latest_offset()}))
    put(table, rows(5, 10))
    assert [row["id"] for row in latest.run().all] == list(range(5, 10))
    assert [row["id"] for row in offset.run().all] == list(range(5, 10))
    chosen = query(table, "columns", columns="v,id").run()
    assert list(chosen.all[0]) == ["v", "id", *MARKS]


def test_a_snapshot_comes_first_in_parts_and_its_changes_after_it(query: Callable[..., Query], tmp_path: Path) -> None:
    table = made(tmp_path)
    with table.writer(CONFIG) as writer:
        writer.put(rows(0, 2_000)).wait()
        writer.flush()
        writer.put(rows(1_000, 1_500, 1.0)).wait()
        writer.delete(pa.table({"id": [5]})).wait()
        writer.flush()
    table.compact(full=True)
    table.gc(dry_run=False, min_age=0)
    stream = query(table, startingOffsets="snapshot")
    stream.on_batch = lambda number: put(table, rows(0, 3, 9.0)) if number == 0 else None
    stream.run()
    assert {(row["id"], row["v"]) for row in stream.all} == {(i, 1.0 if 1_000 <= i < 1_500 else 0.0) for i in range(2_000) if i != 5}
    assert len(stream.all) == 1_999
    stream.run()
    assert sorted((row["id"], row["v"]) for row in stream.all[1_999:]) == [(0, 9.0), (1, 9.0), (2, 9.0)]
    put(table, rows(7, 8, 9.0))
    stream.run()
    assert len(stream.all) == 2_003
    assert table.checkpoints() == [], "whoever goes on after the snapshot lets go of its pins"


def test_a_stream_without_an_option_of_streams_is_refused_with_what_to_do(query: Callable[..., Query], tmp_path: Path) -> None:
    table = made(tmp_path, 1)
    with pytest.raises(Exception, match="startingOffsets"):
        query(table, startingOffsets=None).run()
    with pytest.raises(Exception, match="earliest, latest, snapshot"):
        query(table, startingOffsets="sometime").frame()
    with pytest.raises(Exception, match="did you mean 'maxEntriesPerTrigger'"):
        query(table, maxEntriesPerTriger=3).frame()


# -- what goes wrong


def test_a_batch_that_failed_is_given_again_as_it_was(query: Callable[..., Query], tmp_path: Path) -> None:
    table = made(tmp_path)
    put(table, *[rows(10 * n, 10 * n + 10) for n in range(4)])
    stream = query(table, maxEntriesPerTrigger=4, consumer="index")
    stream.fails_at = 1
    with pytest.raises(Exception, match="the batch fails"):
        stream.run()
    put(table, rows(500, 510))
    table.compact(full=True)
    table.gc(dry_run=False, min_age=0)
    stream.run()
    assert sorted(row["id"] for row in stream.all) == [*range(40), *range(500, 510)], "each once"
    assert len(stream.batches[1]) == len(stream.batches[0])


def test_a_consumer_holds_what_the_stream_has_not_read(query: Callable[..., Query], tmp_path: Path) -> None:
    table = made(tmp_path, 1)
    with table.writer(CONFIG) as writer:
        writer.put(rows(0, 5)).wait()
        stream = query(table, consumer="index").run()
        writer.put(rows(5, 10)).wait()
        writer.flush()
    table.load(rows(20, 25))
    table.gc(dry_run=False, min_age=0)
    assert [row["id"] for row in stream.run().all] == [*range(10), *range(20, 25)]


def test_what_was_collected_fails_the_query_or_is_passed_over(query: Callable[..., Query], tmp_path: Path) -> None:
    table = made(tmp_path, 1)
    put(table, rows(0, 5))
    strict, lenient = query(table, "strict").run(), query(table, "lenient", failOnDataLoss="false").run()
    with table.writer(CONFIG) as writer:
        writer.put(rows(5, 10)).wait()
        writer.flush()
    table.gc(dry_run=False, min_age=0)
    put(table, rows(10, 15))
    with pytest.raises(Exception, match="WalTruncatedError"):
        strict.run()
    assert [row["id"] for row in lenient.run().all] == [*range(5), *range(10, 15)]


def test_p15_of_two_queries_with_one_consumer_the_later_one_goes_on(query: Callable[..., Query], tmp_path: Path) -> None:
    table = made(tmp_path, 1)
    put(table, *[rows(n, n + 1) for n in range(6)])
    first = query(table, "first", consumer="index", maxEntriesPerTrigger=1)
    second = query(table, "second", consumer="index")

    def other(number: int) -> None:
        if number == 2:
            second.run()

    first.on_batch = other
    with pytest.raises(Exception, match="ConsumerTakenError"):
        first.run()
    assert {row["id"] for row in first.all} | {row["id"] for row in second.all} == set(range(6))
    put(table, rows(6, 7))
    assert second.run().all[-1]["id"] == 6


def test_p17_a_load_announced_before_and_placed_after_a_batch_is_delivered_once(query: Callable[..., Query], tmp_path: Path) -> None:
    table = made(tmp_path, 1)
    put(table, rows(0, 3))
    stream = query(table)

    def between(name: str) -> None:
        if name == "load.tip":  # announced, its tip is read, and it has no place yet
            put(table, rows(1, 4, 5.0))
            stream.run()

    with hooked(between):
        table.load(rows(2, 10, 1.0))
    stream.run()
    assert in_order(stream.all) == in_order(changes(table))
    assert len(stream.all) == 3 + 3 + 8
    state: dict[int, float] = {}
    for row in stream.all:
        state[row["id"]] = row["v"]
    assert state == {row["id"]: row["v"] for row in table.scan().to_arrow().to_pylist()}, "in the order in which they count"


def test_p14_a_stream_goes_on_over_a_split(query: Callable[..., Query], tmp_path: Path) -> None:
    table = made(tmp_path, 1)
    put(table, rows(0, 20))
    stream = query(table, consumer="index", maxEntriesPerTrigger=3).run()
    put(table, rows(20, 40))
    parts = hg.open_table(table.uri).split_shard("0000")
    table.refresh()
    put(table, rows(40, 60))
    stream.run()
    assert sorted(row["id"] for row in stream.all) == list(range(60)), "each once"
    hg.open_table(table.uri).split_shard(parts[0])
    put(table.refresh(), rows(60, 80))
    stream.run().run()
    assert sorted(row["id"] for row in stream.all) == list(range(80))
    fresh = query(table, "fresh", startingOffsets="snapshot").run()
    assert sorted(row["id"] for row in fresh.all) == list(range(80))


def test_p08_a_stream_reads_beside_a_writer_compaction_and_collection(query: Callable[..., Query], tmp_path: Path) -> None:
    table = made(tmp_path, 2)
    put(table, rows(0, 100))
    stream = query(table, startingOffsets="snapshot", consumer="index", maxEntriesPerTrigger=3)

    def meanwhile(number: int) -> None:
        with hg.open_table(table.uri).writer(CONFIG) as writer:
            writer.put(rows(number, 50 + number, float(number + 1))).wait()
            writer.flush()
        table.compact(full=True)
        table.gc(dry_run=False, min_age=0)

    stream.on_batch = meanwhile
    stream.run().run()
    stream.on_batch = lambda number: None
    stream.run()
    state: dict[int, float] = {}
    for row in sorted(stream.all, key=lambda row: (row["_position"], row["_load"])):
        state[row["id"]] = row["v"]
    assert state == {row["id"]: row["v"] for row in table.scan().to_arrow().to_pylist()}


def test_new_shards_join_a_running_stream_and_small_ones_share_a_task(query: Callable[..., Query], tmp_path: Path) -> None:
    table = hg.create_table(tmp_path / "t", SCHEMA, key=["name", "id"], sharding=hg.identity("name"))
    stream = query(table)
    running = stream.start(processingTime="0 seconds")
    try:
        put(table, rows(0, 3))
        running.processAllAvailable()
        put(table.refresh(), rows(0, 6, 1.0))
        running.processAllAvailable()
    finally:
        running.stop()
    assert sorted((row["id"], row["v"]) for row in stream.all) == sorted([(i, 0.0) for i in range(3)] + [(i, 1.0) for i in range(6)])
    batches = hg.open_table(table.uri).change_batches("earliest")
    start = batches.begin()
    end = batches.plan(start)
    assert len(end) == 6
    assert len(batches.parts(start, end)) == 1
    assert len(batches.parts(start, end, parts_min=6)) >= 6


@pytest.mark.slow
def test_a_stream_by_real_executors_gives_all_changes_once(on_cluster: Callable[..., Any], tmp_path: Path) -> None:
    table = made(tmp_path, 2)
    put(table, *[rows(50 * n, 50 * n + 50) for n in range(4)])
    table.load(rows(500, 700, 1.0))
    said = on_cluster(
        """
        hgs.register(spark)
        seen = []
        stream = spark.readStream.format("headgate").option("startingOffsets", "earliest").option("maxEntriesPerTrigger", 4)
        writer = stream.load(args[0]).writeStream.option("checkpointLocation", args[1])
        def take(frame, number):
            seen.extend(row["id"] for row in frame.collect())
        writer.foreachBatch(take).trigger(availableNow=True).start().awaitTermination()
        report = hgs.compact(spark, args[0], full=True, rows_per_task=200)
        answer({"ids": sorted(seen), "runs": report.runs_after, "ok": hgs.verify(spark, args[0], deep=True).ok})
        """,
        table.uri,
        str(tmp_path / "checkpoint"),
    )
    assert said["ids"] == [*range(200), *range(500, 700)]
    assert said["ok"]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_driver_that_is_killed_follows_the_changes_exactly_once(spark_environment: dict[str, str], tmp_path: Path) -> None:
    """The short form of ``python tests/spark/torture_source.py --kills 30``."""
    found = torture(tmp_path / "torture", 2, 5, spark_environment, tell=lambda line: None)
    assert sum(found["kills"].values()) == 2
    assert found["changes"] > 50
