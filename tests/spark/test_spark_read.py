"""Batch reads: the merged table at one snapshot, as a function and as a format."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from test_spark_types import COLUMNS, TABLE

import headgate as hg
import headgate.spark as hgs
from headgate.spark.types import to_table

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string()), pa.field("v", pa.float64())])
CONFIG = hg.ShardWriterConfig(fsync=False)
Read = Callable[..., Any]


def rows(first: int, last: int, v: float = 0.0) -> pa.Table:
    ids = list(range(first, last))
    return pa.table({"id": ids, "name": [f"n{i}" for i in ids], "v": [v] * len(ids)}, schema=SCHEMA)


def filled(place: Path, key: str | None = "id", shards: int = 1) -> hg.Table:
    """Two runs that overlap, a log that is in none, and deletes."""
    table = hg.create_table(place / "t", SCHEMA, key=key, sharding=hg.bucket("id", shards))
    with table.writer(CONFIG) as writer:
        writer.put(rows(0, 4_000)).wait()
        writer.flush()
        writer.put(rows(3_000, 5_000, 1.0)).wait()
        writer.flush()
        writer.put(rows(4_500, 5_500, 2.0)).wait()
        if key:
            writer.delete(pa.table({"id": [1, 2, 3_500, 5_499]})).wait()
        writer.abort()
    return hg.open_table(place / "t")


def by_function(spark: Any, table: hg.Table, **options: Any) -> Any:
    return hgs.read(spark, table.uri, **options)


def by_format(spark: Any, table: hg.Table, **options: Any) -> Any:
    names = {"lease_ttl": "leaseTtl", "rows_per_partition": "rowsPerPartition"}
    reader = spark.read.format("headgate")
    for name, value in options.items():
        reader = reader.option(names.get(name, name), ",".join(value) if isinstance(value, list) else str(value))
    return reader.load(table.uri)


both = pytest.mark.parametrize("read", [by_function, by_format])


def in_order(table: pa.Table) -> list[dict[str, Any]]:
    return table.sort_by([("id", "ascending"), ("v", "ascending")]).to_pylist() if table.num_rows else []


@both
@pytest.mark.parametrize(("key", "shards"), [("id", 1), (None, 2)])
def test_a_read_is_the_merged_table_in_as_many_tasks_as_wanted(
    spark: Any, tmp_path: Path, read: Read, key: str | None, shards: int
) -> None:
    table = filled(tmp_path, key, shards)
    frame = read(spark, table, rows_per_partition=2_000)
    assert frame.rdd.getNumPartitions() >= 3, "one large shard is read by several tasks"
    assert in_order(frame.toArrow()) == in_order(table.scan().to_arrow())


@both
def test_columns_and_filter_are_applied_by_the_workers(spark: Any, tmp_path: Path, read: Read) -> None:
    table = filled(tmp_path)
    frame = read(spark, table, columns=["v", "id"], filter="name like 'n45%' and v > 0")
    assert frame.columns == ["v", "id"]
    assert in_order(frame.toArrow()) == in_order(table.scan(["v", "id"], "name like 'n45%' and v > 0").to_arrow())


@both
def test_a_read_at_a_checkpoint_and_one_without_a_lease_write_nothing(spark: Any, tmp_path: Path, read: Read) -> None:
    table = filled(tmp_path)
    table.checkpoint(name="then")
    count = table.scan().count()
    with table.writer(CONFIG) as writer:
        writer.put(rows(9_000, 9_100)).wait()
    before = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert read(spark, table, at="then").count() == count
    assert read(spark, table, lease_ttl=0).count() == count + 100
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == before


@both
def test_a_read_is_held_for_a_day_unless_told(spark: Any, tmp_path: Path, read: Read) -> None:
    table = filled(tmp_path)
    read(spark, table).count()
    read(spark, table, lease_ttl=60).count()
    lengths = [(pin.expires or 0) - pin.created for pin in table.checkpoints()]
    assert lengths == pytest.approx([86_400, 60])


def test_a_snapshot_lets_go_of_its_pin(spark: Any, tmp_path: Path) -> None:
    table = filled(tmp_path)
    with hgs.snapshot(spark, table.uri, columns=["id"], lease_ttl=timedelta(hours=1)) as frame:
        assert len(table.checkpoints()) == 1
        assert frame.count() == table.scan().count()
    assert table.checkpoints() == []
    with pytest.raises(Exception, match="SnapshotExpiredError"):
        frame.count()


@both
def test_an_empty_table_reads_as_no_rows(spark: Any, tmp_path: Path, read: Read) -> None:
    table = hg.create_table(tmp_path / "t", SCHEMA, key=["name", "id"], sharding=hg.identity("name"))
    frame = read(spark, table)
    assert frame.count() == 0
    assert frame.columns == SCHEMA.names


@both
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"columns": ["id", "vv"]}, "no column 'vv'"),
        ({"filter": "vv > 1"}, "vv"),
        ({"at": "never"}, "no checkpoint 'never'"),
        ({"rows_per_partition": 0}, "1 or more"),
        ({"nanoseconds": "round"}, "truncate"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_written(
    spark: Any, tmp_path: Path, read: Read, options: dict[str, Any], says: str
) -> None:
    table = hg.create_table(tmp_path / "t", SCHEMA, key="id")
    with pytest.raises(Exception, match=says):
        read(spark, table, **options).count()
    assert table.checkpoints() == []


def test_an_unknown_option_is_refused_with_the_closest_name(spark: Any, tmp_path: Path) -> None:
    table = hg.create_table(tmp_path / "t", SCHEMA, key="id")
    with pytest.raises(Exception, match="did you mean 'filter'"):
        spark.read.format("headgate").option("fliter", "id > 1").load(table.uri)


def test_a_schema_of_ones_own_may_choose_columns_and_must_have_their_types(spark: Any, tmp_path: Path) -> None:
    table = filled(tmp_path)
    frame = spark.read.format("headgate").schema("v double, id bigint not null").load(table.uri)
    assert in_order(frame.toArrow()) == in_order(table.scan(["v", "id"]).to_arrow())
    with pytest.raises(Exception, match="is double, not string"):
        spark.read.format("headgate").schema("v string").load(table.uri).count()


def test_the_format_is_known_to_a_session_that_was_told(spark: Any, tmp_path: Path) -> None:
    hgs.register(spark)
    assert spark.read.format("headgate").load(filled(tmp_path).uri).where("id < 10").count() == 8


@both
def test_p06_the_same_frame_used_twice_with_different_filters_gives_each_its_own(spark: Any, tmp_path: Path, read: Read) -> None:
    table = filled(tmp_path)
    frame = read(spark, table, rows_per_partition=2_000)
    few, many = frame.where("id < 10"), frame.where("v = 2")
    assert few.count() == 8
    assert frame.count() == table.scan().count()
    assert many.count() == table.scan(filter="v = 2").count()
    assert few.union(many).count() == 8 + table.scan(filter="v = 2").count()


@both
def test_p07_filters_that_spark_cannot_hand_down_are_applied_all_the_same(spark: Any, tmp_path: Path, read: Read) -> None:
    from pyspark.sql import functions as f

    table = filled(tmp_path)
    odd = f.udf(lambda name: name.endswith("7"), "boolean")
    frame = read(spark, table, filter="id < 1000").where(odd("name")).where("rand(3) >= 0 and length(name) = 4")
    assert frame.count() == 90, "n107 … n997"
    assert frame.where("id > 500").limit(7).count() == 7


@both
def test_p08_a_writer_compaction_and_collection_beside_a_job_leave_it_one_snapshot(spark: Any, tmp_path: Path, read: Read) -> None:
    table = hg.create_table(tmp_path / "t", SCHEMA, key="id")
    ended, troubles = threading.Event(), []

    def churn() -> None:
        mine, number = hg.open_table(table.uri), 0
        try:
            with mine.writer(hg.ShardWriterConfig(fsync=False, max_memtable_rows=5_000)) as writer:
                while not ended.is_set() or number < 3:
                    number += 1
                    writer.put(rows(0, 3_000, float(number))).wait()
                    if number % 2:
                        writer.flush()
                    if number % 3 == 0:
                        mine.compact(full=True)
                        mine.gc(dry_run=False, min_age=0)
        except BaseException as error:
            troubles.append(error)

    with table.writer(CONFIG) as writer:
        writer.put(rows(0, 3_000)).wait()
    thread = threading.Thread(target=churn)
    thread.start()
    try:
        seen = []
        for _ in range(3):
            frame = read(spark, table, rows_per_partition=1_000)
            for _ in range(2):  # once, and again when the table has long gone on
                found = frame.groupBy("v").count().collect()
                assert [(row["count"]) for row in found] == [3_000], found
                seen.append(found[0]["v"])
            assert seen[-1] == seen[-2]
    finally:
        ended.set()
        thread.join()
    assert not troubles
    assert seen == sorted(seen)
    assert seen[-1] > seen[0], "it did go on meanwhile"


@both
def test_p13_a_frame_used_after_its_lease_ends_in_snapshot_expired(spark: Any, tmp_path: Path, read: Read) -> None:
    table = filled(tmp_path)
    frame = read(spark, table, lease_ttl=3600)
    assert frame.count() == table.scan().count()
    pin = table.checkpoints()[0]
    table.refresh_checkpoint(pin.id, ttl=1e-6)  # time passes
    table.compact(full=True)
    table.gc(dry_run=False, min_age=0)
    with pytest.raises(Exception, match="SnapshotExpiredError") as ended:
        frame.count()
    assert "longer lease" in str(ended.value)


@both
@pytest.mark.parametrize("zone", ["America/New_York", "UTC"])
def test_p16_types_and_zones_there_and_back(spark: Any, tmp_path: Path, read: Read, zone: str) -> None:
    names = [name for name in COLUMNS if name not in ("dec256",)]
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), *(TABLE.schema.field(name) for name in names)])
    data = pa.table([pa.array([0, 1]), *(TABLE.column(name) for name in names)], schema=schema)
    table = hg.create_table(tmp_path / "t", schema, key="id")
    with table.writer(CONFIG) as writer:
        writer.put(data).wait()
    expected = table.scan().to_arrow().sort_by("id").combine_chunks().to_batches()[0]
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        frame = read(spark, table)

        def back(batches: Any) -> Any:  # as a writer has it: Spark's rows, in the session's zone
            for batch in batches:
                for at, row in enumerate(batch.column(0).to_pylist()):
                    same = to_table(batch.slice(at, 1), schema)
                    differ = [name for name in schema.names if not same.column(name).equals(expected.slice(row, 1).column(name))]
                    yield pa.record_batch({"differ": pa.array([",".join(differ)])})

        assert [row[0] for row in frame.mapInArrow(back, "differ string").collect()] == ["", ""]
        shown = frame.where("id = 0").selectExpr("string(ts_utc)", "string(ts_us)").collect()[0]
        assert tuple(shown) == (
            {"UTC": "2024-03-31 12", "America/New_York": "2024-03-31 08"}[zone] + ":00:00.123456",
            "2024-03-31 12:00:00.123456",
        )
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)


def test_p16_nanoseconds_are_refused_or_cut_off_as_told(spark: Any, tmp_path: Path) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("t", pa.timestamp("ns"))])
    table = hg.create_table(tmp_path / "t", schema, key="id")
    with table.writer(CONFIG) as writer:
        writer.put(pa.table({"id": [1], "t": pa.array([1_001], pa.timestamp("ns"))}, schema=schema)).wait()
    with pytest.raises(Exception, match="truncate"):
        hgs.read(spark, table.uri).collect()
    for frame in (hgs.read(spark, table.uri, nanoseconds="truncate"), by_format(spark, table, nanoseconds="truncate")):
        assert frame.toArrow().column("t").cast(pa.int64()).to_pylist() == [1]


def test_p16_a_column_that_spark_has_no_type_for_is_refused_and_can_be_left_out(spark: Any, tmp_path: Path) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("wide", pa.decimal256(60, 2))])
    table = hg.create_table(tmp_path / "t", schema, key="id")
    with pytest.raises(hg.InvalidInputError, match="'wide'"):
        hgs.read(spark, table.uri)
    with pytest.raises(Exception, match="'wide'"):
        spark.read.format("headgate").load(table.uri)
    assert hgs.read(spark, table.uri, columns=["id"]).count() == 0
