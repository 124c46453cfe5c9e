"""What users pass in, and what they hold: rows, URIs, tables and shards."""

from __future__ import annotations

import multiprocessing
import pickle
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate.manifest.model import ShardingRule
from headgate.schema import RowRules, check_schema, decode_schema, encode_schema
from headgate.sharding import check_sharding, first_shards
from headgate.store import Location

SCHEMA = pa.schema([pa.field("id", pa.int64()), pa.field("must", pa.string(), nullable=False), pa.field("may", pa.binary())])
RULES = RowRules(*check_schema(SCHEMA, "id"))


def batch(**changes: Any) -> pa.RecordBatch:
    columns = {"id": pa.array([1, 2], pa.int64()), "must": pa.array(["a", "b"]), "may": pa.array([b"x", None], pa.binary())}
    return pa.RecordBatch.from_pydict({**columns, **changes})


class Streams:
    """Rows that only speak Arrow's C interface."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self._table.__arrow_c_stream__(requested_schema)


class Arrays:
    def __init__(self, rows: pa.RecordBatch) -> None:
        self._rows = rows

    def __arrow_c_array__(self, requested_schema: Any = None) -> Any:
        return self._rows.__arrow_c_array__(requested_schema)


def ways() -> list[Any]:
    table = pa.Table.from_batches([batch()])
    return [
        pytest.param(batch(), id="batch"),
        pytest.param(batch().cast(SCHEMA), id="batch with the table's own nullability"),
        pytest.param(table, id="table"),
        pytest.param(pa.Table.from_batches([batch().slice(0, 1), batch().slice(1, 1)]), id="table in chunks"),
        pytest.param(Streams(table), id="stream"),
        pytest.param(Arrays(batch()), id="array"),
        pytest.param([{"id": 1, "must": "a", "may": b"x"}, {"id": 2, "must": "b"}], id="dicts"),
        pytest.param(batch().replace_schema_metadata({"note": "mine"}), id="metadata"),
        pytest.param(batch(must=pa.array(["a", "b"], pa.large_string()), may=pa.array([b"x", None], pa.binary_view())), id="other layouts"),
        pytest.param(pa.RecordBatch.from_pydict({n: batch().column(n) for n in SCHEMA.names}).slice(0), id="slice"),
    ]


@pytest.mark.parametrize("data", ways())
def test_rows_of_every_kind_become_one_batch_of_the_log(data: Any) -> None:
    rows = RULES.upsert(data)
    assert rows.schema.equals(RULES.log_schema)
    assert rows.to_pylist() == batch().to_pylist()


def test_rows_that_fit_are_not_copied() -> None:
    fitting = batch().cast(RULES.log_schema)
    assert RULES.upsert(fitting) is fitting


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (batch(must=pa.array(["a", None])), "must"),
        (batch(id=pa.array([1, None], pa.int64())), "id"),
        (batch(id=pa.array([1, 2], pa.uint64())), "id"),
        (batch(may=pa.array(["x", "y"])), "may"),
        (batch().select(["id", "must"]), "may"),
        (batch(more=pa.array([1, 2])), "more"),
        (batch().select(["must", "id", "may"]), "order"),
        (batch().slice(0, 0), "no rows"),
        (pa.table({"id": pa.array([], pa.int64()), "must": pa.array([], pa.string()), "may": pa.array([], pa.binary())}), "no rows"),
        ([{"id": 2**63, "must": "a"}], "cannot be read"),
        ([{"id": 1, "must": "\ud800"}], "cannot be read"),
        ({"id": 1, "must": "a"}, "dict"),
        (7, "int"),
    ],
)
def test_rows_that_do_not_fit_are_refused_with_the_reason(data: Any, word: str) -> None:
    with pytest.raises(hg.InvalidInputError, match=word):
        RULES.upsert(data)


def test_a_delete_takes_the_key_columns_and_ignores_the_rest() -> None:
    for data in (batch(), batch().select(["id"]), [{"id": 1}, {"id": 2}], pa.table({"id": pa.array([1, 2], pa.int64())})):
        rows = RULES.delete(data)
        assert rows.schema.names == ["id"]
        assert rows.column("id").to_pylist() == [1, 2]


def test_a_delete_from_a_table_without_a_key_is_refused() -> None:
    with pytest.raises(hg.InvalidInputError, match="no key"):
        RowRules(SCHEMA, ()).delete(batch())


def test_a_composite_key_must_be_whole() -> None:
    rules = RowRules(*check_schema(SCHEMA, ["must", "id"]))
    assert rules.delete(batch()).schema.names == ["must", "id"]
    with pytest.raises(hg.SchemaMismatchError, match="must"):
        rules.delete(pa.table({"id": pa.array([1], pa.int64())}))


@pytest.mark.parametrize(
    "kind",
    [
        pa.int8(),
        pa.uint64(),
        pa.string(),
        pa.large_string(),
        pa.binary(),
        pa.binary(4),
        pa.date32(),
        pa.timestamp("us", "UTC"),
        pa.bool_(),
        pa.decimal128(9, 2),
    ],
    ids=str,
)
def test_key_types(kind: pa.DataType) -> None:
    assert check_schema(pa.schema([("k", kind)]), "k")[1] == ("k",)


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1.5, None]),
        pa.array([[1, 2], None], pa.list_(pa.int32())),
        pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32(), 2)),
        pa.array([{"a": 1, "b": ["x"]}, None], pa.struct([("a", pa.int8()), ("b", pa.list_(pa.string()))])),
        pa.array([Decimal("1.25"), None], pa.decimal128(20, 2)),
        pa.array([0, 1], pa.timestamp("ns", "Europe/Berlin")),
        pa.array([b"abcd", None], pa.binary(4)),
        pa.array([None, None], pa.null()),
        pa.array(["x", None], pa.large_string()),
        pa.array([True, None]),
    ],
    ids=lambda c: str(c.type),
)
def test_columns_of_every_kind_go_through_the_log(column: pa.Array) -> None:
    schema = pa.schema([("id", pa.int64()), ("v", column.type)])
    table = hg.create_table(f"memory://kinds-{abs(hash(str(column.type)))}", schema, key="id", if_exists="open")
    rows = pa.RecordBatch.from_arrays([pa.array([1, 2], pa.int64()), column], schema=schema)
    with table.shard("0000").writer(hg.ShardWriterConfig(enable_memtable=False)) as writer:
        receipt = writer.put(rows).wait()
        writer.delete(rows.select(["id"])).wait()
    found = list(table.shard("0000").tail(receipt["0000"][1], follow=False))
    assert found[0].batches[0].column("v").equals(column)
    assert [put.op for entry in found for put in entry.puts] == ["upsert", "delete"]


def test_a_schema_is_stored_with_its_metadata() -> None:
    schema = pa.schema([pa.field("a", pa.int8(), metadata={"unit": "m"})], metadata={"owner": "me"})
    assert decode_schema(encode_schema(schema)).equals(schema, check_metadata=True)


# -- sharding


def test_shards_of_each_rule() -> None:
    assert first_shards(hg.unsharded()) == ("0000",)
    assert first_shards(hg.bucket("id", 3)) == ("0000", "0001", "0002")
    assert first_shards(hg.identity("id")) == ()


@pytest.mark.parametrize("buckets", [0, -1, 10_001, True, 1.5])
def test_a_number_of_buckets_that_cannot_be_is_refused(buckets: Any) -> None:
    with pytest.raises(hg.InvalidInputError):
        hg.bucket("id", buckets)


@pytest.mark.parametrize(("rule", "key"), [(hg.bucket("nope", 2), ("id",)), (hg.bucket("must", 2), ("id",)), (hg.identity("may"), ("id",))])
def test_a_rule_by_which_a_key_could_move_is_refused(rule: ShardingRule, key: tuple[str, ...]) -> None:
    with pytest.raises(hg.InvalidInputError):
        check_sharding(rule, SCHEMA, key)


# -- locations


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("s3://b/p", ("s3", "b", "p", "s3://b/p")),
        ("s3a://b/p/", ("s3", "b", "p", "s3://b/p")),
        ("gs://b", ("gs", "b", "", "gs://b")),
        ("az://c/x//y", ("az", "c", "x/y", "az://c/x/y")),
        ("memory://m/a", ("memory", "m", "a", "memory://m/a")),
        ("/abs/path/", ("file", "", "/abs/path", "/abs/path")),
        ("file:///abs/path", ("file", "", "/abs/path", "/abs/path")),
    ],
)
def test_a_uri_is_taken_apart_and_made_canonical(uri: str, expected: tuple[str, ...]) -> None:
    location = Location.parse(uri)
    assert (location.scheme, location.bucket, location.path, location.uri) == expected
    assert Location.parse(location.uri) == location


def test_an_azure_uri_with_its_account() -> None:
    location = Location.parse("abfss://container@account.dfs.core.windows.net/path")
    assert (location.scheme, location.bucket, location.path) == ("az", "container", "path")
    assert location.options["azure_storage_account_name"] == "account"


def test_a_relative_path_is_anchored_where_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    location = Location.parse("data/events")
    monkeypatch.chdir("/")
    assert location.path == str(tmp_path / "data" / "events")
    assert Location.parse(Path("x")).path == "/x"


@pytest.mark.parametrize("options", [{"a": None}, {"a": ["x"]}, {1: "x"}, {"a": {"b": "c"}}])
def test_options_that_are_no_strings_are_refused(options: Any) -> None:
    with pytest.raises(hg.InvalidInputError):
        Location.parse("s3://b/p", options)


def test_options_of_plain_kinds_become_strings() -> None:
    assert Location.parse("s3://b/p", {"a": True, "b": 5, "c": "x"}).options == {"a": "true", "b": "5", "c": "x"}


# -- handles


def count_in_another_process(table: hg.Table, shard: hg.Shard, results: Any) -> None:
    results.put((table.uri, shard.id, [entry.position for entry in shard.tail(0, follow=False)]))


def test_handles_pickle_and_work_in_another_process(disk: Any) -> None:
    with disk.table.shard("0000").writer(hg.ShardWriterConfig(enable_memtable=False, fsync=False)) as writer:
        writer.put(disk.rows(1)).wait()
    disk.shard.log.manifests.load()  # a used handle pickles too
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=count_in_another_process, args=(disk.table, disk.shard, results), daemon=True)
    process.start()
    assert results.get(timeout=60) == (disk.uri, "0000", [0])
    process.join(30)


def test_a_pickled_handle_is_equal_and_carries_no_connection(bench: Any) -> None:
    bench.shard.log.manifests.load()
    for handle in (bench.table, bench.shard):
        again = pickle.loads(pickle.dumps(handle))
        assert again.__dict__.keys() <= handle.__dict__.keys()
        assert "log" not in again.__dict__
    assert pickle.loads(pickle.dumps(bench.table)).shard("0000").log.manifests.load() == bench.manifest


def test_a_writer_does_not_pickle_and_says_what_to_do(bench: Any) -> None:
    with pytest.raises(TypeError, match="pickle the table"):
        pickle.dumps(bench.writer())


def test_a_table_says_what_it_is(bench: Any) -> None:
    assert bench.table.schema.equals(bench.SCHEMA)
    assert bench.table.key == ("id",)
    assert [shard.id for shard in bench.table.shards] == ["0000"]
    assert "0000" not in repr(bench.table)
    with pytest.raises(hg.NotFoundError, match="0000"):
        bench.table.shard("9999")
    status = bench.table.status().shards[0]
    assert (status.epoch, status.tip, status.cursor, status.lag, status.clean) == (0, 0, 0, 0, True)


def test_a_table_is_created_once_and_opened_as_what_it_is(bench: Any) -> None:
    with pytest.raises(hg.AlreadyExistsError):
        hg.create_table(bench.uri, bench.SCHEMA, key="id")
    again = hg.create_table(bench.uri, bench.SCHEMA, key="id", if_exists="open")
    assert again.shard("0000").table_id == bench.shard.table_id
    for schema, key in ((bench.SCHEMA.append(pa.field("x", pa.int8())), "id"), (bench.SCHEMA, None)):
        with pytest.raises(hg.SchemaMismatchError):
            hg.create_table(bench.uri, schema, key=key, if_exists="open")
    with pytest.raises(hg.InvalidInputError):
        hg.create_table(bench.uri, bench.SCHEMA, key="id", if_exists="maybe")  # type: ignore[arg-type]


@pytest.mark.parametrize("step", ["create.table", "create.shards"])
def test_a_creation_that_died_is_finished_by_whoever_opens_the_table(bench: Any, step: str, crash: type[Exception]) -> None:
    from headgate.clock import SYSTEM_CLOCK
    from headgate.failpoint import hooked

    uri = f"memory://dying-{SYSTEM_CLOCK.token()}"

    def die(name: str) -> None:
        if name == step:
            raise crash(name)

    with hooked(die), pytest.raises(crash):
        hg.create_table(uri, bench.SCHEMA, key="id", sharding=hg.bucket("id", 3))
    table = hg.open_table(uri)
    assert len(table.shards) == 3
    with table.shard("0002").writer(hg.ShardWriterConfig(enable_memtable=False)) as writer:
        writer.put(bench.rows(1)).wait()
    assert table.verify(deep=True).ok
