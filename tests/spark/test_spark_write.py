"""Batch writes: rows of Spark's into a table, once, beside its live writers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from test_spark_types import COLUMNS, TABLE

import headgate as hg
import headgate.spark as hgs

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string()), pa.field("v", pa.float64())])
CONFIG = hg.ShardWriterConfig(fsync=False)


def rows(first: int, last: int, v: float = 0.0) -> pa.Table:
    ids = list(range(first, last))
    return pa.table({"id": ids, "name": [f"n{i}" for i in ids], "v": [v] * len(ids)}, schema=SCHEMA)


def frame(spark: Any, first: int, last: int, v: float = 0.0, tasks: int = 2) -> Any:
    return spark.range(first, last, 1, tasks).selectExpr("id", "concat('n', id) name", f"{v}D v")


def write(df: Any, table: hg.Table, **options: Any) -> None:
    df.write.format("headgate").mode("append").options(**{name: str(value) for name, value in options.items()}).save(table.uri)


def found(table: hg.Table) -> dict[int, float]:
    data = hg.open_table(table.uri).scan(["id", "v"]).to_arrow()
    return dict(zip(data.column("id").to_pylist(), data.column("v").to_pylist(), strict=True))


@pytest.fixture
def table(tmp_path: Path) -> hg.Table:
    return hg.create_table(tmp_path / "t", SCHEMA, key="id", sharding=hg.bucket("id", 2))


def test_a_write_upserts_by_key_and_fences_no_live_writer(spark: Any, table: hg.Table) -> None:
    with table.writer(CONFIG) as writer:
        writer.put(rows(0, 100)).wait()
        write(frame(spark, 50, 150, 1.0), table)
        assert found(table) == {i: 0.0 if i < 50 else 1.0 for i in range(150)}
        writer.put(rows(140, 160, 2.0)).wait()
        assert found(table) == {i: 0.0 if i < 50 else 1.0 if i < 140 else 2.0 for i in range(160)}
    assert table.verify(deep=True).ok


def test_keys_are_deleted_by_an_option_or_row_by_row(spark: Any, table: hg.Table) -> None:
    write(frame(spark, 0, 10), table)
    write(spark.range(0, 3), table, op="delete")
    assert sorted(found(table)) == list(range(3, 10))
    mixed = frame(spark, 3, 12, 1.0).selectExpr("V", "if(id % 2 = 0, 'delete', 'upsert') _OP", "Name", "ID")
    write(mixed, table)
    assert found(table) == dict.fromkeys(range(3, 12, 2), 1.0)


def test_a_version_is_written_once_and_an_older_one_is_refused(spark: Any, table: hg.Table) -> None:
    write(frame(spark, 0, 10), table, appId="backfill", txnVersion=1)
    write(frame(spark, 0, 10, 9.0), table, appId="backfill", txnVersion=1)
    assert set(found(table).values()) == {0.0}
    write(frame(spark, 5, 15, 2.0), table, appId="backfill", txnVersion=2)
    with pytest.raises(Exception, match="version 1 of 'backfill' comes after 2"):
        write(frame(spark, 0, 10, 9.0), table, appId="backfill", txnVersion=1)
    assert found(table) == {i: 0.0 if i < 5 else 2.0 for i in range(15)}
    assert all(not shard.log.manifests.load().attempts for shard in table.shards), "each gave its attempt back"


@pytest.mark.parametrize(
    ("columns", "options", "says"),
    [
        (["id", "name", "v"], {"appId": "a"}, "txnVersion"),
        (["id", "name", "v"], {"txnVersion": "1"}, "appId"),
        (["id", "name", "v"], {"appid": "a", "txnversion": "-1"}, "whole number"),
        (["id", "name", "v"], {"op": "merge"}, "upsert"),
        (["id", "name", "v"], {"appID": "~a", "txnVersion": "1"}, "app is"),
        (["id", "name", "v"], {"opp": "delete"}, "did you mean 'op'"),
        (["id", "name", "v as value"], {}, "no column 'value'"),
        (["name", "v"], {}, "'id' is missing"),
        (["id", "v as name", "v"], {}, "'name' is double, and the table's is string"),
        (["id", "name", "cast(v as string) v"], {}, "'v' is string"),
        (["id", "name", "v", "1 as _op"], {}, "'_op' is int"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_written(
    spark: Any, table: hg.Table, tmp_path: Path, columns: list[str], options: dict[str, str], says: str
) -> None:
    before = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    with pytest.raises(Exception, match=says):
        write(frame(spark, 0, 3).selectExpr(*columns), table, **options)
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == before


def test_overwriting_is_refused_with_what_to_do_instead(spark: Any, table: hg.Table) -> None:
    with pytest.raises(Exception, match="upserts by key"):
        frame(spark, 0, 3).write.format("headgate").mode("overwrite").save(table.uri)


def test_a_table_without_a_key_gets_every_row_and_takes_no_deletes(spark: Any, tmp_path: Path) -> None:
    table = hg.create_table(tmp_path / "t", SCHEMA)
    for _ in range(2):
        write(frame(spark, 0, 10), table)
    assert table.scan().count() == 20
    with pytest.raises(Exception, match="no key"):
        write(spark.range(3), table, op="delete")


def test_bad_rows_fail_the_write_or_are_set_aside(spark: Any, tmp_path: Path) -> None:
    schema = pa.schema(
        [pa.field("id", pa.int64(), nullable=False), pa.field("small", pa.uint8()), pa.field("vec", pa.list_(pa.float32(), 2))]
    )
    table = hg.create_table(tmp_path / "t", schema, key="id")
    df = spark.range(0, 100, 1, 2).selectExpr(
        "if(id = 7, null, id) id", "if(id = 8, 1000, id) small", "if(id = 9, array(1D), array(id * 1D, 2D)) vec"
    )
    with pytest.raises(Exception, match=r"small|vec|'id' has nulls"):
        write(df, table)
    assert table.scan().count() == 0
    write(df, table, onBadRows="quarantine", appId="a", txnVersion=1)
    assert sorted(table.scan(["id"]).to_arrow().column("id").to_pylist()) == [i for i in range(100) if i not in (7, 8, 9)]
    kept = [pa.parquet.read_table(path) for path in (tmp_path / "t" / "quarantine").iterdir()]
    reasons = sorted(reason for part in kept for reason in part.column("_reason").to_pylist())
    assert [word in reason for word, reason in zip(["small", "vec", "'id' is null"], reasons, strict=True)] == [True] * 3


@pytest.mark.parametrize("zone", ["America/New_York", "UTC"])
def test_p16_types_and_zones_into_a_table_and_back(spark: Any, tmp_path: Path, zone: str) -> None:
    names = [name for name in COLUMNS if name not in ("dec256", "nothing")]
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), *(TABLE.schema.field(name) for name in names)])
    data = pa.table([pa.array([0, 1]), *(TABLE.column(name) for name in names)], schema=schema)
    one, two = (hg.create_table(tmp_path / name, schema, key="id") for name in ("one", "two"))
    with one.writer(CONFIG) as writer:
        writer.put(data).wait()
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        write(hgs.read(spark, one.uri), two)
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)
    assert two.scan().to_arrow().sort_by("id").equals(one.scan().to_arrow().sort_by("id"))


def test_rows_partitioned_by_shard_make_one_file_for_each(spark: Any, tmp_path: Path) -> None:
    table = hg.create_table(tmp_path / "t", SCHEMA, key="id", sharding=hg.bucket("id", 4))
    write(hgs.partition_by_shard(frame(spark, 0, 1_000, 1.0, tasks=5), table.uri), table)
    assert [len(shard.log.manifests.load().runs) for shard in table.shards] == [1] * 4
    assert table.scan().count() == 1_000
    write(hgs.partition_by_shard(frame(spark, 0, 1_000, 2.0, tasks=5), table.uri, tasks_per_shard=2), table)
    assert sum(len(run.slices) for shard in table.shards for run in shard.log.manifests.load().runs[1:]) == 8
    assert set(found(table).values()) == {2.0}


def test_identity_shards_are_made_by_the_tasks(spark: Any, tmp_path: Path) -> None:
    table = hg.create_table(tmp_path / "t", SCHEMA, key=["name", "id"], sharding=hg.identity("name"))
    df = spark.range(0, 90, 1, 3).selectExpr("id", "concat('n', id % 3) name", "1D v")
    write(df, table)
    write(hgs.partition_by_shard(df.withColumn("v", df.v + 1), table.uri), table)
    assert [shard.id for shard in table.refresh().shards] == ["n0", "n1", "n2"]
    assert set(found(table).values()) == {2.0}


def test_too_many_runs_are_refused_with_what_to_do_or_compacted(spark: Any, table: hg.Table, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        write(frame(spark, 0, 10, float(number)), table, autoCompact="true")
    assert max(len(shard.log.manifests.load().runs) for shard in table.shards) == 1
    load = table.bulk_load("app", 1)
    monkeypatch.setattr("headgate.load.RUNS_MAX", 1)
    with pytest.raises(hg.BackpressureTimeoutError) as refused:
        load.commit([load.write(rows(0, 10))])
    assert "compact" in refused.value.hint


def test_p09_abort_after_a_commit_that_raised_deletes_nothing_that_may_be_named(spark: Any, table: hg.Table) -> None:
    from headgate.failpoint import hooked
    from headgate.spark.sink import batch_writer

    class Gone(Exception):
        pass

    def fail(name: str) -> None:
        if name == "transaction.decided":
            raise Gone

    options = {"path": table.uri, "appId": "a", "txnVersion": "1"}
    schema = hgs.spark_schema(SCHEMA)
    writer = batch_writer(options, schema, overwrite=False)
    message = writer.write(iter(rows(0, 10, 1.0).to_batches()))
    with hooked(fail), pytest.raises(Gone):
        writer.commit([message])
    writer.abort([message])
    table.gc(dry_run=False, min_age=0)
    again = batch_writer(options, schema, overwrite=False)  # the same again, with other files
    again.commit([again.write(iter(rows(0, 10, 2.0).to_batches()))])
    assert set(found(table).values()) == {1.0}, "what was decided came in, and the second attempt did not"
    assert table.verify(deep=True).ok
