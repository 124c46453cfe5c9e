"""`headgate put`: files into tables."""

from __future__ import annotations

import gzip
import json
import time

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

import headgate as hg

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("note", pa.string()),
        ("at", pa.timestamp("us", tz="UTC")),
        ("price", pa.decimal128(10, 2)),
        ("vector", pa.list_(pa.float32(), 2)),
    ]
)
ROWS = pa.table(
    [
        pa.array([1, 2, 3], pa.int64()),
        pa.array(["first", None, ""]),
        pa.array([1_700_000_000_000_000, None, 0], pa.timestamp("us", tz="UTC")),
        pa.array(["12.50", None, "-1.00"]).cast(pa.decimal128(10, 2)),
        pa.array([[1.0, 2.5], None, [0.0, float("nan")]], pa.list_(pa.float32(), 2)),
    ],
    schema=SCHEMA,
)


@pytest.fixture
def keyed(tmp_path):
    return hg.create_table(tmp_path / "t", SCHEMA, key="id", sharding=hg.bucket("id", 2))


@pytest.fixture
def log(tmp_path):
    """A table without a key: whatever is put twice is there twice."""
    return hg.create_table(tmp_path / "log", pa.schema([("n", pa.int64())]))


def in_order(table: hg.Table) -> list[dict[str, object]]:
    return table.scan().to_arrow().sort_by(table.schema.names[0]).to_pylist()


def same(left: list[dict[str, object]], right: list[dict[str, object]]) -> bool:
    return repr(left) == repr(right)  # NaN is not itself


def write(rows: pa.Table, path) -> None:
    if path.suffix == ".parquet":
        parquet.write_table(rows, path)
    elif path.suffix == ".arrow":
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, rows.schema) as writer:
            writer.write_table(rows)
    else:
        raise AssertionError(path)


CSV = 'id,note,at,price,vector\n1,first,2023-11-14T22:13:20Z,12.5,"[1, 2.5]"\n2,,,,\n3,"",1970-01-01 01:00:00+01:00,-1,"[0, ""NaN""]"\n'
JSON = (
    '{"id": 1, "note": "first", "at": "2023-11-14T22:13:20Z", "price": 12.5, "vector": [1, 2.5]}\n\n'
    '{"id": 2}\n'
    '{"vector": [0, "NaN"], "price": "-1.00", "at": "1970-01-01 00:00:00Z", "note": "", "id": 3}'
)


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow"])
def test_files_with_types_of_their_own_are_put(headgate, keyed, tmp_path, name):
    write(ROWS, tmp_path / name)

    ran = headgate("put", keyed.uri, tmp_path / name, "--json")

    assert ran.code == 0, ran.err
    assert (ran.json["rows"], ran.json["batches"], ran.json["op"], ran.json["duplicates"]) == (3, 1, "upsert", 0)
    assert ran.json["receipts"] == {"0000": {"epoch": 1, "position": 0}, "0001": {"epoch": 1, "position": 0}}
    assert same(in_order(keyed), ROWS.to_pylist())


@pytest.mark.parametrize(("name", "text"), [("rows.csv", CSV), ("rows.json", JSON), ("rows.tsv", None), ("list.json", None)])
def test_texts_are_read_with_the_tables_types(headgate, keyed, tmp_path, name, text):
    if name.endswith(".tsv"):
        text = "id\tnote\tat\tprice\tvector\n1\tfirst\t2023-11-14T22:13:20Z\t12.5\t[1, 2.5]\n2\t\t\t\t\n"
        text += '3\t""\t1970-01-01T00:00:00Z\t-1\t"[0, ""NaN""]"\n'
    elif text is None:
        text = f"[{', '.join(line for line in JSON.splitlines() if line)}]"
    (tmp_path / name).write_text(text)

    ran = headgate("put", keyed.uri, tmp_path / name)

    assert ran.code == 0, ran.err
    assert ran.out.startswith("3 rows put in ")
    assert "last position" in ran.out
    assert same(in_order(keyed), ROWS.to_pylist())


@pytest.mark.parametrize("format", ["csv", "json", "parquet", "arrow"])
def test_stdin_needs_a_format_and_is_read_in_each(headgate, keyed, tmp_path, format):
    if format in ("csv", "json"):
        data = (CSV if format == "csv" else JSON).encode()
    else:
        write(ROWS, tmp_path / f"rows.{format}")
        data = (tmp_path / f"rows.{format}").read_bytes()

    assert headgate("put", keyed.uri, "-", stdin=data).code == 2
    ran = headgate("put", keyed.uri, "-", "--format", format, stdin=data)

    assert ran.code == 0, ran.err
    assert same(in_order(keyed), ROWS.to_pylist())


def test_an_arrow_stream_is_read_too(headgate, keyed):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, ROWS.schema) as writer:
        writer.write_table(ROWS)

    assert headgate("put", keyed.uri, "-", "--format", "arrow", stdin=sink.getvalue().to_pybytes()).code == 0

    assert keyed.scan().count() == 3


def test_packed_files_are_unpacked(headgate, keyed, tmp_path):
    (tmp_path / "rows.csv.gz").write_bytes(gzip.compress(CSV.encode()))
    with pa.CompressedOutputStream(str(tmp_path / "rows.json.zst"), "zstd") as file:
        file.write(JSON.replace('"id": 1', '"id": 4').encode())

    ran = headgate("put", keyed.uri, tmp_path / "rows.csv.gz", tmp_path / "rows.json.zst", "--producer", "p")

    assert ran.code == 0, ran.err
    assert [row["id"] for row in in_order(keyed)] == [1, 2, 3, 4]


def test_a_type_that_every_value_fits_is_cast_and_another_is_refused(headgate, keyed, tmp_path):
    narrow = pa.table({"id": pa.array([7], pa.int8()), "note": pa.array(["x"]).dictionary_encode(), "at": pa.array([1], pa.timestamp("s"))})
    parquet.write_table(narrow.drop_columns(["at"]), tmp_path / "fits.parquet")
    parquet.write_table(pa.table({"id": ["seven"]}), tmp_path / "not.parquet")

    assert headgate("put", keyed.uri, tmp_path / "fits.parquet").code == 0
    ran = headgate("put", keyed.uri, tmp_path / "not.parquet", "--json")

    assert ran.code == 1
    assert "'id' of type string cannot be int64" in ran.error["message"]
    assert in_order(keyed) == [{"id": 7, "note": "x", "at": None, "price": None, "vector": None}]


def test_delete_takes_the_key_columns_and_ignores_others(headgate, keyed):
    headgate("put", keyed.uri, "-", "--format", "csv", stdin=CSV)

    deleted = headgate("put", keyed.uri, "-", "--format", "csv", "--delete", "--json", stdin="nobody,id,note\nx,1,y\nx,3,\n")
    again = headgate("put", keyed.uri, "-", "--format", "json", "--delete", stdin='{"id": 2, "other": [1]}\n{"id": 99}\n')

    assert (deleted.json["op"], deleted.json["rows"]) == ("delete", 2)
    assert again.out.startswith("2 keys deleted")
    assert keyed.scan().count() == 0


def test_deleting_from_a_table_without_a_key_is_refused(headgate, log):
    ran = headgate("put", log.uri, "-", "--format", "csv", "--delete", "--json", stdin="n\n1\n")

    assert (ran.code, ran.error["type"]) == (1, "InvalidInputError")


def test_a_file_is_cut_into_batches(headgate, log, tmp_path):
    (tmp_path / "n.csv").write_text("n\n" + "".join(f"{n}\n" for n in range(25)))
    parquet.write_table(pa.table({"n": range(25, 50)}), tmp_path / "n.parquet", row_group_size=7)

    ran = headgate("put", log.uri, tmp_path / "n.csv", tmp_path / "n.parquet", "--batch-rows", 10, "--json")

    assert (ran.json["rows"], ran.json["batches"]) == (50, 6)
    sizes = [put.rows.num_rows for entry in log.shard("0000").tail(start=0, follow=False) for put in entry.puts]
    assert sizes == [10, 10, 5, 10, 10, 5]
    assert [row["n"] for row in log.scan().to_arrow().to_pylist()] == list(range(50))


def test_run_again_with_a_producer_a_file_is_there_once(headgate, log, tmp_path):
    (tmp_path / "a.csv").write_text("n\n1\n2\n3\n")
    command = ("put", log.uri, tmp_path / "a.csv", "--producer", "nightly", "--batch-rows", 2)

    first, second = headgate(*command, "--json"), headgate(*command, "--json")

    assert [(ran.json["batches"], ran.json["duplicates"]) for ran in (first, second)] == [(2, 0), (2, 2)]
    assert "2 batches were there already" in headgate(*command).out
    assert in_order(log) == [{"n": 1}, {"n": 2}, {"n": 3}]


def test_another_content_under_the_same_producer_is_not_taken_for_the_first(headgate, log, tmp_path):
    for day, name in enumerate(("monday.csv", "tuesday.csv")):
        (tmp_path / name).write_text(f"n\n{day}\n")
        assert headgate("put", log.uri, tmp_path / name, "--producer", "nightly").code == 0
    headgate("put", log.uri, "-", "--format", "csv", "--producer", "nightly", stdin="n\n2\n")
    headgate("put", log.uri, "-", "--format", "csv", "--producer", "nightly", stdin="n\n2\n")
    headgate("put", log.uri, "-", "--format", "csv", "--producer", "by hand", stdin="n\n2\n")

    assert in_order(log) == [{"n": 0}, {"n": 1}, {"n": 2}, {"n": 2}]


def test_after_an_error_in_the_middle_the_rest_is_put_by_the_same_command(headgate, log, tmp_path):
    (tmp_path / "a.csv").write_text("n\n1\n2\n")
    command = ("put", log.uri, tmp_path / "a.csv", tmp_path / "b.csv", "--producer", "p", "--json")

    failed = headgate(*command)
    (tmp_path / "b.csv").write_text("n\n3\n")
    mended = headgate(*command)

    assert failed.code == 1
    assert "b.csv cannot be read" in failed.error["message"]
    assert "2 rows were acknowledged" in failed.error["hint"]
    assert "not put twice" in failed.error["hint"]
    assert (mended.json["rows"], mended.json["duplicates"]) == (3, 1)
    assert in_order(log) == [{"n": 1}, {"n": 2}, {"n": 3}]


def test_killed_in_the_middle_and_run_again_every_row_is_there_once(headgate, process, log, tmp_path):
    (tmp_path / "n.csv").write_text("n\n" + "".join(f"{n}\n" for n in range(100_000)))
    command = ("put", log.uri, tmp_path / "n.csv", "--producer", "p", "--batch-rows", 100)

    killed = process(*command)
    while log.status().shards[0].tip < 5:
        assert killed.poll() is None
        time.sleep(0.01)
    killed.kill()
    killed.wait()
    ran = headgate(*command, "--json")

    assert (ran.code, ran.json["rows"]) == (0, 100_000)
    assert log.scan().to_arrow().column("n").to_pylist() == list(range(100_000))


@pytest.mark.parametrize(
    ("format", "text", "message"),
    [
        ("csv", "", "is empty"),
        ("csv", "id,nope\n1,2\n", "has a column 'nope'"),
        ("csv", "note\nx\n", "has no column 'id'"),
        ("csv", "id,id\n1,2\n", "two columns 'id'"),
        ("csv", "id,note\n1,x\ntwo,y\n", "row 2, column 'id'"),
        ("csv", "id,note\n1\n", "cannot be read as csv"),
        ("csv", "id,at\n1,2024-02-29T12:00:00\n", "zone offset"),
        ("csv", 'id,vector\n1,"[1, 2, 3]"\n', "column 'vector'"),
        ("json", "{\n", "line 1 is not JSON"),
        ("json", '{"id": 1}\n[2]\n', "line 2 is no object"),
        ("json", '{"id": 1}\n\n{"id": 2, "nope": 1}\n', "line 3 has a column 'nope'"),
        ("json", '{"id": 1.5}\n', "1.5 is no int64"),
        ("json", '{"id": true}\n', "true is no int64"),
        ("json", '{"id": 1, "note": 5}\n', "5 is no string"),
        ("json", '{"id": 1, "price": 1.005}\n', "column 'price'"),
        ("json", '{"id": 99999999999999999999}\n', "column 'id'"),
        ("json", '{"id": 1} {"id": 2}\n', "line 1 is not JSON"),
        ("json", '{"note": "x"}\n', "'id' has nulls"),
        ("parquet", "PAR1 no more", "cannot be read as parquet"),
        ("arrow", "ARROW1 no more", "cannot be read as arrow"),
    ],
)
def test_what_cannot_be_read_is_named_and_nobody_is_fenced_for_it(headgate, keyed, format, text, message):
    with keyed.writer() as incumbent:
        ran = headgate("put", keyed.uri, "-", "--format", format, "--json", stdin=text)
        incumbent.put([{"id": 5}]).wait()

    assert ran.code == 1
    assert message in ran.error["message"]
    assert ran.error["hint"]


def test_a_file_without_rows_is_no_error_and_takes_nothing_over(headgate, keyed):
    ran = headgate("put", keyed.uri, "-", "--format", "csv", "--json", stdin="id,note\n")

    assert (ran.code, ran.json["rows"], ran.json["receipts"]) == (0, 0, {})
    assert [shard.epoch for shard in keyed.status().shards] == [0, 0]


def test_a_file_that_is_not_there_is_an_error(headgate, keyed, tmp_path):
    ran = headgate("put", keyed.uri, tmp_path / "none.csv")

    assert ran.code == 1
    assert "none.csv cannot be read" in ran.err


def test_rows_that_cannot_be_taken_are_kept_aside_on_request(headgate, keyed):
    ran = headgate("put", keyed.uri, "-", "--format", "csv", "--quarantine", "--json", stdin="id,note\n1,x\n,y\n")

    assert (ran.code, ran.json["quarantined_rows"]) == (0, 1)
    assert [row["id"] for row in in_order(keyed)] == [1]
    assert "1 rows could not be taken" in headgate("put", keyed.uri, "-", "--format", "csv", "--quarantine", stdin='id\n2\n""\n').out


def test_wal_only_leaves_the_rows_in_the_log_where_reads_find_them(headgate, keyed):
    ran = headgate("put", keyed.uri, "-", "--format", "csv", "--wal-only", stdin=CSV)

    assert ran.code == 0
    states = headgate("status", keyed.uri, "--json").json["shards"]
    assert [(state["runs"], state["lag"]) for state in states] == [(0, 1), (0, 1)]
    assert len(headgate("scan", keyed.uri, "--json").lines) == 3

    headgate("put", keyed.uri, "-", "--format", "csv", stdin="id\n9\n")
    states = headgate("status", keyed.uri, "--json").json["shards"]
    assert all((state["runs"], state["pending_generations"], state["lag"], state["clean"]) == (1, 1, 0, True) for state in states)
    assert sum(state["rows"] for state in states) == 4


def test_a_marked_and_windows_like_text_is_read(headgate, keyed):
    headgate("put", keyed.uri, "-", "--format", "csv", stdin=b"\xef\xbb\xbfid,note\r\n1,x\r\n")
    headgate("put", keyed.uri, "-", "--format", "json", stdin=b'\xef\xbb\xbf{"id": 2, "note": "y"}\r\n')

    assert [(row["id"], row["note"]) for row in in_order(keyed)] == [(1, "x"), (2, "y")]


@pytest.mark.parametrize(
    "arguments",
    [("put", "t"), ("put", "t", "rows"), ("put", "t", "-", "-", "--format", "csv"), ("put", "t", "a.csv", "--producer", ""),
     ("put", "t", "a.csv", "--batch-rows", "0"), ("put", "t", "a.csv", "--format", "xml")],
)  # fmt: skip
def test_put_called_wrongly_ends_with_2(headgate, arguments):
    ran = headgate(*arguments)

    assert (ran.code, ran.out) == (2, "")


def test_what_scan_writes_put_takes_back(headgate, tmp_path):
    """Every type, through every format."""
    rows = pa.table(
        {
            "id": pa.array([1, 2], pa.uint64()),
            "bytes": pa.array([b"\x00\xff", None]),
            "fixed": pa.array([b"ab", None], pa.binary(2)),
            "at": pa.array([1_600_000_000_000_000_001, None], pa.timestamp("ns", tz="Europe/Berlin")),
            "day": pa.array([19_000, None], pa.date32()),
            "clock": pa.array([86_399_999_999_999, None], pa.time64("ns")),
            "took": pa.array([-5, None], pa.duration("ms")),
            "price": pa.array(["12.50", None]).cast(pa.decimal128(10, 2)),
            "yes": pa.array([True, None]),
            "half": pa.array([1.5, None], pa.float16()),
            "far": pa.array([float("-inf"), None], pa.float32()),
            "exact": pa.array([0.1, None], pa.float64()),
            "text": pa.array(['q"u,\n\t', ""]),
            "deep": pa.array(
                [{"times": [1, None], "raw": b"a", "at": 1, "clock": 3}, None],
                pa.struct([("times", pa.list_(pa.timestamp("ns"))), ("raw", pa.binary()), ("at", pa.date32()), ("clock", pa.time32("s"))]),
            ),
        }
    )
    first = hg.create_table(tmp_path / "first", rows.schema, key="id")
    with first.writer() as writer:
        writer.put(rows).wait()

    for suffix in ("parquet", "csv", "json", "arrow"):
        copy = hg.create_table(tmp_path / suffix, rows.schema, key="id")
        assert headgate("scan", first.uri, "--output", tmp_path / f"rows.{suffix}").code == 0
        ran = headgate("put", copy.uri, tmp_path / f"rows.{suffix}")
        assert ran.code == 0, ran.err
        assert copy.scan().to_arrow().equals(first.scan().to_arrow()), suffix
        assert not list(tmp_path.glob(".*part"))

    copy = hg.create_table(tmp_path / "piped", rows.schema, key="id")
    piped = headgate("scan", first.uri, "--json")
    assert all(json.loads(line)["id"] for line in piped.out.splitlines())
    headgate("put", copy.uri, "-", "--format", "json", stdin=piped.out)
    assert copy.scan().to_arrow().equals(first.scan().to_arrow())
