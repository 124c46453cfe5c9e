"""The Columnar seam: Lance on a disk, on S3, and Arrow files in memory keep one contract."""

from __future__ import annotations

import datetime as dt
import gc
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests import servers
from tests.files import open_files

from headgate.columnar import Columnar
from headgate.columnar import lance as lance_columnar
from headgate.columnar.arrow import ArrowColumnar
from headgate.columnar.expression import Filter
from headgate.columnar.lance import LanceColumnar
from headgate.errors import InvalidInputError, ObjectMissingError
from headgate.schema import RowRules, check_schema
from headgate.store import Location
from headgate.store.memory import MemoryStore

TABLE = pa.table({"id": pa.array(range(1000)), "v": pa.array(np.arange(1000) / 8), "name": [f"n{i % 7}" for i in range(1000)]})

TYPES: dict[str, tuple[pa.DataType, list[Any]]] = {
    "bool": (pa.bool_(), [True, False]),
    "int8": (pa.int8(), [-128, 127]),
    "uint64": (pa.uint64(), [0, 2**64 - 1]),
    "float16": (pa.float16(), [np.float16(1.5), np.float16(-2)]),
    "float32": (pa.float32(), [1.5, float("inf")]),
    "decimal128": (pa.decimal128(38, 4), [Decimal("-1.2345"), Decimal("9" * 34)]),
    "decimal256": (pa.decimal256(60, 2), [Decimal("-1.25"), Decimal("9" * 50)]),
    "date32": (pa.date32(), [dt.date(1900, 1, 1), dt.date(2100, 1, 1)]),
    "date64": (pa.date64(), [dt.date(1900, 1, 1), dt.date(2100, 1, 1)]),
    "time32": (pa.time32("ms"), [dt.time(1), dt.time(23, 59)]),
    "time64": (pa.time64("us"), [dt.time(1), dt.time(23, 59)]),
    "timestamp": (pa.timestamp("us"), [dt.datetime(1900, 1, 1), dt.datetime(2100, 1, 1)]),
    "timestamp with zone": (pa.timestamp("ms", "Europe/Zurich"), [dt.datetime(2000, 1, 1, tzinfo=dt.UTC)] * 2),
    "duration": (pa.duration("us"), [dt.timedelta(1), dt.timedelta(-1)]),
    "string": (pa.string(), ["", "é€😀\0"]),
    "large_string": (pa.large_string(), ["", "x"]),
    "binary": (pa.binary(), [b"", b"\0\xff"]),
    "large_binary": (pa.large_binary(), [b"", b"x"]),
    "fixed_size_binary": (pa.binary(3), [b"abc", b"\0\0\0"]),
    "null": (pa.null(), [None, None]),
    "list": (pa.list_(pa.int64()), [[], [1, None, 3]]),
    "large_list": (pa.large_list(pa.string()), [[], ["a", None, ""]]),
    "list of lists": (pa.list_(pa.list_(pa.int32())), [[], [[1], None, []]]),
    "vector": (pa.list_(pa.float32(), 4), [[1, 2, 3, 4], [0, 0, 0, 0]]),
    "struct": (pa.struct([("a", pa.int64()), ("b", pa.string())]), [{"a": 1, "b": "x"}, {"a": None, "b": None}]),
    "list of structs": (pa.list_(pa.struct([("a", pa.int64())])), [[], [{"a": 1}, {"a": None}, None]]),
    "struct of a list": (pa.struct([("l", pa.list_(pa.int64()))]), [{"l": [1]}, {"l": None}]),
}


@pytest.fixture(params=["disk", "memory"])
def columnar(request: pytest.FixtureRequest, tmp_path: Path) -> Columnar:
    if request.param == "memory":
        return ArrowColumnar(MemoryStore(f"columnar-{tmp_path.name}", ""))
    return LanceColumnar(Location.parse(tmp_path / "a table, 100% of ü"))


def write(columnar: Columnar, table: pa.Table, path: str = "runs/one/00000.lance", batch_rows: int = 100) -> None:
    record = columnar.write(path, table.schema, iter(table.to_batches(max_chunksize=batch_rows)))
    assert record.rows == table.num_rows
    assert record.path == path
    assert record.bytes > 0


@pytest.mark.parametrize("kind", sorted(TYPES))
def test_q11_every_type_comes_back_as_it_was_with_and_without_nulls(columnar: Columnar, kind: str) -> None:
    type, values = TYPES[kind]
    schema, _ = check_schema(pa.schema([pa.field("id", pa.int64(), False), pa.field("x", type)]), "id")
    rules = RowRules(schema, ("id",))
    for number, some in enumerate([values, [values[0], None, values[1]], [None, None]]):
        table = pa.table([pa.array(range(len(some))), pa.array(some, schema.field("x").type)], schema=rules.log_schema)
        write(columnar, table, f"runs/{number}/0.lance")
        opened = columnar.open(f"runs/{number}/0.lance")
        got = pa.Table.from_batches(opened.scan(["id", "x"]))
        assert [got.schema.field(n).type for n in ("id", "x")] == [schema.field(n).type for n in ("id", "x")]
        assert got.column("x").to_pylist() == some
        assert opened.take(np.array([len(some) - 1]), ["x"]).column(0).to_pylist() == some[-1:]


def test_rows_come_in_the_order_they_were_written_by_any_range(columnar: Columnar) -> None:
    write(columnar, TABLE)
    opened = columnar.open("runs/one/00000.lance")
    assert opened.num_rows == 1000
    assert opened.schema.names == ["id", "v", "name"]
    for start, stop in [(0, None), (0, 1), (7, 500), (999, 1000), (500, 500), (990, 5000)]:
        batches = list(opened.scan(["name", "id"], start=start, stop=stop, batch_rows=64))
        assert all(0 < batch.num_rows <= 64 for batch in batches)
        assert all(batch.schema.names == ["name", "id"] for batch in batches)
        assert [i for batch in batches for i in batch.column("id").to_pylist()] == list(range(1000))[start:stop]
    assert [batch.num_rows for batch in opened.scan([], start=10, stop=30, batch_rows=15)] == [15, 5]


def test_rows_are_taken_in_the_order_asked_for_and_twice_if_asked_twice(columnar: Columnar) -> None:
    write(columnar, TABLE)
    opened = columnar.open("runs/one/00000.lance")
    asked = [5, 3, 999, 3, 0]
    assert opened.take(np.array(asked), ["id", "name"]).to_pydict() == {"id": asked, "name": [f"n{i % 7}" for i in asked]}
    assert opened.take(np.array([], np.int64), ["id"]).num_rows == 0


def test_matching_rows_come_with_their_offsets(columnar: Columnar) -> None:
    write(columnar, TABLE)
    found = list(columnar.open("runs/one/00000.lance").matching("(`v` >= 10.0 AND `name` = 'n3')", ["id"]))
    want = [i for i in range(1000) if i / 8 >= 10 and i % 7 == 3]
    assert [o for offsets, _ in found for o in offsets.tolist()] == want
    assert [i for _, rows in found for i in rows.column("id").to_pylist()] == want
    assert [o for offsets, _ in columnar.open("runs/one/00000.lance").matching("`id` = 7", []) for o in offsets.tolist()] == [7]


def test_a_filter_that_cannot_be_used_is_refused_as_such(columnar: Columnar) -> None:
    write(columnar, TABLE)
    with pytest.raises(InvalidInputError):
        list(columnar.open("runs/one/00000.lance").matching("nope > 1", ["id"]))


def test_what_is_missing_is_missing_whenever_that_is_noticed(columnar: Columnar, tmp_path: Path) -> None:
    with pytest.raises(ObjectMissingError) as caught:
        columnar.open("runs/none/00000.lance")
    assert caught.value.object == "runs/none/00000.lance"
    write(columnar, TABLE)
    columnar.drop("runs/one/00000.lance")
    columnar.drop("runs/one/00000.lance")
    with pytest.raises(ObjectMissingError):
        columnar.open("runs/one/00000.lance")


def test_files_that_go_while_a_slice_is_open_are_missing_too(tmp_path: Path) -> None:
    columnar = LanceColumnar(Location.parse(tmp_path), fsync=False)
    write(columnar, TABLE)
    opened = columnar.open("runs/one/00000.lance")
    shutil.rmtree(tmp_path / "runs")
    for read in (
        lambda: list(opened.scan(["id"])),
        lambda: opened.take(np.array([1]), ["id"]),
        lambda: list(opened.matching("`id` = 1", ["id"])),
    ):
        with pytest.raises(ObjectMissingError) as caught:
            read()
        assert caught.value.object == "runs/one/00000.lance"


def test_a_slice_is_one_file_however_many_batches_it_was_written_in(tmp_path: Path) -> None:
    columnar = LanceColumnar(Location.parse(tmp_path), fsync=False)
    write(columnar, TABLE, batch_rows=10)
    assert len(list((tmp_path / "runs/one/00000.lance/data").iterdir())) == 1


def test_an_empty_slice_can_be_written_and_read(columnar: Columnar) -> None:
    columnar.write("runs/e/0.lance", TABLE.schema, iter([]))
    opened = columnar.open("runs/e/0.lance")
    assert opened.num_rows == 0
    assert list(opened.scan(["id"])) == []


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    with servers.moto_server() as server:
        yield server


def test_the_contract_holds_on_s3(s3: Any) -> None:
    columnar = LanceColumnar(Location.parse(f"s3://{servers.BUCKET}/a table/100% ü", s3.options))
    write(columnar, TABLE)
    opened = columnar.open("runs/one/00000.lance")
    assert [i for batch in opened.scan(["id"], start=10, stop=20) for i in batch.column(0).to_pylist()] == list(range(10, 20))
    assert opened.take(np.array([7, 3]), ["id"]).column(0).to_pylist() == [7, 3]
    with pytest.raises(ObjectMissingError):
        columnar.open("runs/none/0.lance")
    columnar.drop("runs/one/00000.lance")
    with pytest.raises(ObjectMissingError):
        columnar.open("runs/one/00000.lance")


# -- filters

FLOATS = [0.0, -0.0, 1.5, float("nan"), float("inf"), float("-inf"), None, 2.0**53, 1e-300]
FILTERED = pa.table(
    {
        "f": FLOATS,
        "i": pa.array([0, -1, 1, 2**53 + 1, -(2**63), 2**63 - 1, None, 7, 8]),
        "u": pa.array([0, 1, 2, 2**63, 2**64 - 1, 5, None, 7, 8], pa.uint64()),
        "s": ["", "a", "it's", "é", "A", None, "a\\b", "%", "`"],
        "B c": [True, False, None, True, False, None, True, False, None],
    }
)
EXPRESSIONS = [
    *(f"f {op} {value}" for op in ("=", "<>", "<", "<=", ">", ">=") for value in ("0", "0.0", "-0.0", "1.5", "9007199254740993", "1e-300")),
    *(f"i {op} {value}" for op in ("=", "!=", "<", ">=") for value in ("0", "9007199254740993", "-9223372036854775808", "0.5", "'1'")),
    *(f"u {op} {value}" for op in ("=", "<", ">") for value in ("0", "5", "9223372036854775808", "18446744073709551615", "-1")),
    *(f"s {op} {value}" for op in ("=", "<", ">=", "<>") for value in ("''", "'it''s'", "'a\\b'", "'é'", "'%'")),
    "s like 'a%'", "s in ('a', '', 'x')", "s not in ('a', 'x')", "i in (0, 7, 100)", "i not in (0, 7)", "f in (0, 1.5)",
    "f between 0 and 2", "f not between 0 and 2", "not (f > 1)", "not f is null and i < 5", '"B c"', "not `B c`", "`B c` is null",
    '"B c" = true', "(f > 1 or i = 7) and s is not null", "i = null", "1 = 1", "f is not null or u = 5",
]  # fmt: skip


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_a_filter_that_is_given_to_lance_finds_there_what_it_finds_in_memory(text: str, filtered: Any) -> None:
    filter = Filter(text, FILTERED.schema)
    found = filter.matching(FILTERED)
    if filter.pushed is not None:
        assert [o for offsets, _ in filtered.matching(filter.pushed, []) for o in offsets.tolist()] == found.tolist()


@pytest.fixture(scope="module")
def filtered(tmp_path_factory: pytest.TempPathFactory) -> Any:
    columnar = LanceColumnar(Location.parse(tmp_path_factory.mktemp("filtered")), fsync=False)
    write(columnar, FILTERED)
    return columnar.open("runs/one/00000.lance")


def test_plain_comparisons_are_given_to_lance_and_others_are_not() -> None:
    pushed = {text: Filter(text, FILTERED.schema).pushed is not None for text in EXPRESSIONS}
    assert pushed["f > 1.5"]
    assert pushed["i in (0, 7, 100)"]
    assert pushed["s = 'it''s'"]
    assert not pushed["i = 0.5"]
    assert not pushed["s like 'a%'"]
    assert not pushed["u = 18446744073709551615"]


@pytest.mark.parametrize(
    "text", ["", " ", "nope = 1", "f", "f +", "count(*) > 1", "exists (select 1)", "f in (select 1.0)", "f = $1", "s = 1; drop table t", 7]
)
def test_what_is_no_expression_over_the_columns_is_refused(text: Any) -> None:
    with pytest.raises(InvalidInputError) as caught:
        Filter(text, FILTERED.schema)
    assert caught.value.hint


def test_a_filter_knows_the_columns_it_looks_at() -> None:
    assert Filter("abs(f) > 1 and S is null", FILTERED.schema.append(pa.field("x", pa.int64()))).columns == ("f", "s")
    assert Filter("1 = 1", FILTERED.schema).columns == ()
    assert Filter("F > 1", FILTERED.schema).columns == ("f",)


def test_an_error_that_only_values_bring_is_the_filters(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError):
        Filter("cast(s as int) = 1", FILTERED.schema).matching(FILTERED)


def test_a_dataset_that_somebody_wrote_in_parts_and_deleted_from_reads_as_lance_reads_it(tmp_path: Path) -> None:
    import lance

    place = tmp_path / "parts"
    lance.write_dataset(TABLE, place, max_rows_per_file=300)
    lance.dataset(place).delete("id >= 10 and id < 20")
    found = pa.Table.from_batches(LanceColumnar(Location.parse(tmp_path)).open("parts").scan(["name", "id"], start=5, stop=15))
    assert found.column_names == ["name", "id"]
    assert found["id"].to_pylist() == [*range(5, 10), *range(20, 25)]


def test_readers_of_many_slices_and_columns_keep_few_files_open(tmp_path: Path) -> None:
    columnar = LanceColumnar(Location.parse(tmp_path), fsync=False)
    most = lance_columnar._READERS_MAX
    slices = []
    for number in range(most + 20):
        write(columnar, TABLE.slice(number, 2), f"runs/{number}/00000.lance")
        slices.append(columnar.open(f"runs/{number}/00000.lance"))
    for _ in range(2):
        for number, part in enumerate(slices):
            for columns in (["id"], ["v", "id"], ["id", "name"]):
                (batch,) = part.scan(columns)
                assert batch.schema.names == columns
                assert batch.column("id").to_pylist() == [number, number + 1]
    bound = lance_columnar._READERS_OF_A_SLICE_MAX * most
    assert open_files(tmp_path, bound) <= bound
    del part, slices
    gc.collect()
    assert open_files(tmp_path) == 0, "what nobody will read is not kept open"


def test_a_large_file_is_not_kept_open_after_it_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columnar = LanceColumnar(Location.parse(tmp_path), fsync=False)
    write(columnar, TABLE)
    part = columnar.open("runs/one/00000.lance")
    monkeypatch.setattr(lance_columnar, "_READER_BYTES_MAX", 10)
    assert sum(batch.num_rows for batch in part.scan(["id"], batch_rows=7)) == 1000
    assert open_files(tmp_path) == 0


def test_one_slice_is_read_by_many_threads_at_once(tmp_path: Path) -> None:
    columnar = LanceColumnar(Location.parse(tmp_path), fsync=False)
    write(columnar, TABLE)
    part = columnar.open("runs/one/00000.lance")

    def read(start: int) -> bool:
        rows = pa.Table.from_batches(part.scan(["id"], start=start, stop=start + 50, batch_rows=7))
        return bool(rows["id"].to_pylist() == list(range(start, start + 50)))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, [*range(0, 900, 3)]))
