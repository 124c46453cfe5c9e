"""The streaming sink: every batch once, whatever happens to the query."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

import headgate as hg
import headgate.spark as hgs
from headgate.failpoint import hooked

pytest.importorskip("pyspark")

from pyspark.sql.datasource import DataSourceStreamArrowWriter

from headgate.spark.sink import stream_writer
from headgate.spark.source import HeadgateDataSource

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string()), pa.field("v", pa.float64())])
CONFIG = hg.ShardWriterConfig(fsync=False)
FILE_ROWS = 20


def rows(first: int, last: int, v: float = 0.0) -> pa.Table:
    ids = list(range(first, last))
    return pa.table({"id": ids, "name": [f"n{i}" for i in ids], "v": [v] * len(ids)}, schema=SCHEMA)


class Troubled(HeadgateDataSource):
    """The sink, but for what happens at points of a commit: the n-th batch has the n-th trouble, once."""

    @classmethod
    def name(cls) -> str:
        return "troubled"

    def streamWriter(self, schema: Any, overwrite: bool) -> Any:  # noqa: N802  # Spark's name
        options = {name: value for name, value in self.options.items() if name not in ("troubles", "flags")}
        return TroubledSink(stream_writer(options, schema, overwrite), self.options["troubles"].split(","), self.options["flags"])


class TroubledSink(DataSourceStreamArrowWriter):
    def __init__(self, sink: Any, troubles: list[str], flags: str) -> None:
        self.sink, self.troubles, self.flags = sink, troubles, flags

    def write(self, iterator: Any) -> Any:
        return self.sink.write(iterator)

    def commit(self, messages: Any, batchId: int) -> None:  # noqa: N803  # Spark's name
        point, _, what = (self.troubles[batchId] if batchId < len(self.troubles) else "").partition(":")

        def trouble(name: str) -> None:
            flag = f"{self.flags}/{batchId}"
            if name != point or os.path.exists(flag):
                return
            with open(flag, "x"):
                pass
            if what == "dies":
                os._exit(9)
            if what == "raises":
                raise OSError(f"trouble at {name}")
            if what == "splits":
                hg.open_table(self.sink._place.uri).split_shard("0000")

        with hooked(trouble):
            self.sink.commit(messages, batchId)
            trouble("returned")

    def abort(self, messages: Any, batchId: int) -> None:  # noqa: N803  # Spark's name
        self.sink.abort(messages, batchId)
        hg.open_table(self.sink._place.uri).gc(dry_run=False, min_age=0)  # what an abort may have let go of is gone at once


class Stream:
    """A query over files, one for each batch, that can be stopped and started again."""

    def __init__(self, spark: Any, place: Path) -> None:
        self.spark, self.place = spark, place
        self.files, self.checkpoint, self.flags = place / "files", place / "checkpoint", place / "flags"
        for folder in (self.files, self.flags):
            folder.mkdir()

    def feed(self, *numbers: int) -> None:
        for number in numbers:
            path = self.files / f"{number:04d}.parquet"
            pyarrow.parquet.write_table(rows(number * FILE_ROWS, (number + 1) * FILE_ROWS, float(number)), path)
            os.utime(path, (1_000_000 + number, 1_000_000 + number))  # files come in the order of their times

    def run(self, table: hg.Table, format: str = "headgate", **options: Any) -> None:
        frame = self.spark.readStream.schema("id bigint, name string, v double").option("maxFilesPerTrigger", 1).parquet(str(self.files))
        writer = frame.repartition(2).writeStream.format(format).option("checkpointLocation", str(self.checkpoint))
        query = writer.options(**options).trigger(availableNow=True).start(table.uri)
        try:
            assert query.awaitTermination(300)
        finally:
            query.stop()


@pytest.fixture
def stream(spark: Any, tmp_path: Path) -> Iterator[Stream]:
    from pyspark import cloudpickle

    by_value: Any = cloudpickle
    by_value.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import this module
    hgs.register(spark)
    spark.dataSource.register(Troubled)
    yield Stream(spark, tmp_path)
    by_value.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def table(tmp_path: Path) -> hg.Table:
    """Without a key: a row that comes twice is there twice."""
    return hg.create_table(tmp_path / "t", SCHEMA, sharding=hg.bucket("id", 2))


def ids(table: hg.Table) -> list[int]:
    return sorted(hg.open_table(table.uri).scan(["id"]).to_arrow().column("id").to_pylist())


def marks(table: hg.Table) -> set[tuple[str, int]]:
    return {(app, mark.version) for shard in table.refresh().shards for app, mark in shard.log.manifests.load().transactions.items()}


def test_a_stream_comes_in_batch_by_batch_beside_a_live_writer(stream: Stream, table: hg.Table) -> None:
    with table.writer(CONFIG) as writer:
        writer.put(rows(1_000, 1_010)).wait()
        stream.feed(0, 1)
        stream.run(table, appId="orders")
        writer.put(rows(1_010, 1_020)).wait()
        stream.feed(2)
        stream.run(table, appId="orders")
    assert ids(table) == [*range(3 * FILE_ROWS), *range(1_000, 1_020)]
    assert marks(table) == {("orders", 2)}
    assert {len(shard.log.manifests.load().attempts) for shard in table.shards} == {1}, "registered once, not for every batch"
    assert table.verify(deep=True).ok


def test_p01_p04_p09_p11_a_commit_that_dies_after_any_step_comes_in_once(stream: Stream, table: hg.Table) -> None:
    steps = ["bulk.joined", "transaction.announced", "transaction.decided", "load.tip", "transaction.placed", "returned"]
    troubles = [f"{step}:{what}" for what in ("dies", "raises") for step in steps]
    stream.feed(*range(len(troubles) + 1))
    failures = 0
    for _ in range(len(troubles) + 1):
        try:
            stream.run(table, "troubled", appId="orders", troubles=",".join(troubles), flags=str(stream.flags))
            break
        except Exception:  # as a driver that died: the query begins again where its checkpoint is
            failures += 1
    assert failures == len(troubles)
    assert ids(table) == list(range((len(troubles) + 1) * FILE_ROWS))
    assert marks(table) == {("orders", len(troubles))}
    assert all(not shard.log.manifests.load().announced for shard in table.shards)
    table.compact(full=True)
    table.gc(dry_run=False, min_age=0)
    assert table.verify(deep=True).ok
    assert ids(table) == list(range((len(troubles) + 1) * FILE_ROWS))


def test_p03_p10_a_new_checkpoint_of_the_same_application_is_refused_with_what_to_do(stream: Stream, table: hg.Table) -> None:
    stream.feed(0, 1)
    stream.run(table, appId="orders")
    shutil.rmtree(stream.checkpoint)
    for _ in range(2):  # however often it is started
        with pytest.raises(Exception, match="choose another appId"):
            stream.run(table, appId="orders")
    assert ids(table) == list(range(2 * FILE_ROWS))


def test_p03_without_a_name_a_new_checkpoint_is_another_application_and_a_key_keeps_rows_single(stream: Stream, tmp_path: Path) -> None:
    table = hg.create_table(tmp_path / "keyed", SCHEMA, key="id")
    stream.feed(0)
    stream.run(table)
    shutil.rmtree(stream.checkpoint)
    stream.run(table)
    assert ids(table) == list(range(FILE_ROWS))
    assert len(marks(table)) == 2


def test_p03_a_checkpoint_that_was_restored_from_a_copy_is_refused(stream: Stream, table: hg.Table, tmp_path: Path) -> None:
    stream.feed(0)
    stream.run(table, appId="orders")
    shutil.copytree(stream.checkpoint, tmp_path / "copy")
    stream.feed(1, 2)
    stream.run(table, appId="orders")
    shutil.rmtree(stream.checkpoint)
    shutil.move(tmp_path / "copy", stream.checkpoint)
    with pytest.raises(Exception, match=r"version 1 of 'orders' comes after 2"):
        stream.run(table, appId="orders")
    assert ids(table) == list(range(3 * FILE_ROWS))


def test_p14_a_split_under_a_commit_loses_and_doubles_nothing(stream: Stream, table: hg.Table) -> None:
    stream.feed(0, 1, 2)
    stream.run(table, "troubled", appId="orders", troubles=",bulk.joined:splits", flags=str(stream.flags))
    assert len(table.refresh().shards) == 3
    assert ids(table) == list(range(3 * FILE_ROWS))
    assert marks(table) == {("orders", 2)}
    assert table.verify(deep=True).ok


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"txnVersion": "1"}, "no option 'txnversion'"),
        ({"autoCompact": "often"}, "true or false"),
        ({"op": "delete"}, "no key"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_written(
    stream: Stream, table: hg.Table, options: dict[str, str], says: str
) -> None:
    stream.feed(0)
    with pytest.raises(Exception, match=says):
        stream.run(table, **options)
    assert ids(table) == []
    assert marks(table) == set()


def test_replacing_the_table_with_every_batch_is_refused(spark: Any, stream: Stream, table: hg.Table) -> None:
    with pytest.raises(hg.InvalidInputError, match="complete"):
        stream_writer({"path": table.uri}, hgs.spark_schema(SCHEMA), overwrite=True)


@pytest.mark.long
def test_p02_executors_that_run_tasks_again_bring_in_every_row_once(on_cluster: Callable[..., Any], tmp_path: Path) -> None:
    """Also the short run of writes and of the sink on executors of their own."""
    one, two = (hg.create_table(tmp_path / name, SCHEMA, sharding=hg.bucket("id", 2)) for name in ("one", "two"))
    (tmp_path / "files").mkdir()
    for number in range(3):
        pyarrow.parquet.write_table(rows(number * 100, (number + 1) * 100), tmp_path / "files" / f"{number}.parquet")
    answer = on_cluster(
        """
        one, two, place = args

        def first_time_dies(batches):  # after its rows went to the writer: its files are there, and nobody names them
            from pyspark import TaskContext
            yield from batches
            if TaskContext.get().attemptNumber() == 0:
                raise RuntimeError("the first attempt of every task fails")

        schema = "id bigint, name string, v double"
        frame = spark.range(0, 300, 1, 3).selectExpr("id", "'x' name", "1D v").mapInArrow(first_time_dies, schema)
        frame.write.format("headgate").mode("append").option("appId", "a").option("txnVersion", 1).option("maxMemory", "1k").save(one)
        frame = spark.readStream.schema(schema).option("maxFilesPerTrigger", 2).parquet(f"{place}/files").repartition(3)
        writer = frame.mapInArrow(first_time_dies, schema).writeStream.option("checkpointLocation", f"{place}/checkpoint")
        query = writer.format("headgate").option("maxMemory", "1k").trigger(availableNow=True).start(two)
        query.awaitTermination()
        answer({"rows": hgs.read(spark, one).count(), "query": query.id, "batch": query.lastProgress["batchId"]})
        """,
        one.uri,
        two.uri,
        str(tmp_path),
        settings={"spark.task.maxFailures": "4"},
    )
    assert answer["rows"] == 300
    assert marks(two) == {(answer["query"], answer["batch"])}, "without a name it is the query's id"
    for table, name in ((one, "one"), (two, "two")):
        assert ids(table) == list(range(300))
        named = sum(len(run.slices) for run in table.runs())
        assert len(list((tmp_path / name).rglob("*.lance"))) > named, "the tasks that died had written"
        table.gc(dry_run=False, min_age=0)
        assert table.verify(deep=True).ok


# -- many batches, without Spark around them


class Batches:
    """The sink as Spark calls it, batch by batch: a new writer for the tasks, and another one for the commit."""

    def __init__(self, table: hg.Table, monkeypatch: pytest.MonkeyPatch, **options: str) -> None:
        self.options = {"path": table.uri, "appId": "orders", **options}
        self.batch = 0
        monkeypatch.setattr("headgate.spark.sink.TaskContext", type("Task", (), {"get": classmethod(lambda cls: self)}))

    def getLocalProperty(self, name: str) -> str:  # noqa: N802  # Spark's name
        return {"sql.streaming.queryId": "q", "streaming.sql.batchId": str(self.batch)}[name]

    def run(self, *tasks: pa.Table) -> None:
        schema = hgs.spark_schema(SCHEMA)
        messages: list[Any] = [stream_writer(self.options, schema, False).write(iter(task.to_batches())) for task in tasks]
        stream_writer(self.options, schema, False).commit(messages, self.batch)
        self.batch += 1


def test_auto_compact_keeps_runs_and_records_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = hg.create_table(tmp_path / "t", SCHEMA, key="id", sharding=hg.bucket("id", 2))
    monkeypatch.setattr("headgate.spark.sink._COMFORT_SECONDS", 0.0)
    batches = Batches(table, monkeypatch, autoCompact="true")
    most_runs = most_loads = 0
    for number in range(140):
        batches.run(rows(number * 10, number * 10 + 10))
        manifest = table.shards[0].log.manifests.load()
        most_runs, most_loads = max(most_runs, len(manifest.runs)), max(most_loads, len(manifest.loads))
    assert most_runs <= 24
    assert most_loads <= 34
    assert ids(table) == list(range(1_400))
    assert table.verify(deep=True).ok


def test_a_stream_without_auto_compact_is_refused_when_runs_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = hg.create_table(tmp_path / "t", SCHEMA, key="id")
    monkeypatch.setattr("headgate.load.RUNS_MAX", 3)
    batches = Batches(table, monkeypatch)
    for number in range(3):
        batches.run(rows(0, 10, float(number)))
    with pytest.raises(hg.BackpressureTimeoutError) as refused:
        batches.run(rows(0, 10, 9.0))
    assert "compact" in refused.value.hint
    table.compact()
    batches.run(rows(0, 10, 9.0))
    assert set(table.scan(["v"]).to_arrow().column("v").to_pylist()) == {9.0}


def test_a_batch_without_tasks_is_no_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = hg.create_table(tmp_path / "t", SCHEMA, key="id")
    batches = Batches(table, monkeypatch)
    batches.run()
    batches.run(rows(0, 10))
    batches.run(rows(0, 0))
    assert ids(table) == list(range(10))
    assert marks(table) == {("orders", 2)}


def test_a_table_that_took_the_place_of_a_dropped_one_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        table = hg.create_table(tmp_path / "t", SCHEMA, key="id")
        Batches(table, monkeypatch).run(rows(0, 10))
        assert ids(table) == list(range(10))
        hg.drop_table(table.uri, confirm=table.uri)


def test_tidying_up_that_fails_fails_no_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = hg.create_table(tmp_path / "t", SCHEMA, key="id")
    monkeypatch.setattr("headgate.spark.sink._RUNS_BETWEEN", 1)

    def fail(self: hg.Table, **options: Any) -> None:
        raise hg.StoreUnavailableError("away")

    monkeypatch.setattr(hg.Table, "compact", fail)
    Batches(table, monkeypatch, autoCompact="true").run(rows(0, 10))
    assert ids(table) == list(range(10))


def test_files_of_another_batch_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = hg.create_table(tmp_path / "t", SCHEMA, key="id")
    batches = Batches(table, monkeypatch)
    sink = stream_writer(batches.options, hgs.spark_schema(SCHEMA), False)
    message = sink.write(iter(rows(0, 10).to_batches()))
    with pytest.raises(hg.CommitConflictError):
        sink.commit([message], 1)
    assert ids(table) == []


@pytest.mark.long
@pytest.mark.timeout(900)
def test_p04_a_driver_that_is_killed_again_and_again_brings_in_every_row_once(spark_environment: dict[str, str], tmp_path: Path) -> None:
    """The short form; ``python tests/spark/torture_sink.py`` is the long one."""
    from torture_sink import torture

    outcome = torture(tmp_path, kills=3, seed=7, patience=900.0, environment=spark_environment)
    assert outcome.kills == 3
