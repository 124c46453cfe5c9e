"""`headgate scan`, `sql` and `lookup`, and rows as a table."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headgate as hg
from headgate.cli.rows import fitting, print_rows


@pytest.fixture
def people(tmp_path):
    """30 rows in runs, of which one was replaced and one deleted since, in the log only."""
    schema = pa.schema([("id", pa.int64()), ("name", pa.string()), ("height", pa.float64())])
    table = hg.create_table(tmp_path / "people", schema, key="id", sharding=hg.bucket("id", 2))
    with table.writer() as writer:
        writer.put([{"id": n, "name": f"n{n}", "height": n / 2} for n in range(30)])
    with table.writer(hg.ShardWriterConfig(enable_memtable=False)) as writer:
        writer.put([{"id": 7, "name": "seven", "height": None}])
        writer.delete([{"id": 8}])
    return table


def test_scan_shows_the_newest_rows_and_where_they_are_cut(headgate, people):
    ran = headgate("scan", people.uri)

    head, *lines = ran.out.splitlines()
    assert head.split() == ["id", "name", "height"]
    assert len(lines) == 21
    assert lines[-1].startswith("… the first 20 rows")
    assert len(headgate("scan", people.uri, "--limit", 100).out.splitlines()) == 30
    assert len(headgate("scan", people.uri, "--limit", 5).out.splitlines()) == 6


def test_scan_takes_columns_and_filters_after_the_newest_version_was_chosen(headgate, people):
    lines = headgate("scan", people.uri, "--columns", "name,id", "--filter", "id in (6, 7, 8) or name = 'n7'", "--json").lines

    assert sorted(line["id"] for line in lines) == [6, 7]
    assert {line["name"] for line in lines} == {"n6", "seven"}
    assert list(lines[0]) == ["name", "id"]
    assert list(headgate("scan", people.uri, "--columns", "name", "--columns", "height", "-n", 1, "--json").lines[0]) == ["name", "height"]


def test_scan_as_json_gives_all_rows_unless_there_is_a_limit(headgate, people):
    assert len(headgate("scan", people.uri, "--json").lines) == 29
    assert len(headgate("scan", people.uri, "--json", "--limit", 3).lines) == 3
    assert headgate("scan", people.uri, "--json", "--limit", 0).out == ""


def test_scan_counts(headgate, people):
    assert headgate("scan", people.uri, "--count").out == "29\n"
    assert headgate("scan", people.uri, "--count", "--filter", "height > 10", "--json").json == {"uri": people.uri, "rows": 9}


@pytest.mark.parametrize("suffix", ["parquet", "csv", "json", "arrow"])
def test_scan_writes_a_file(headgate, people, tmp_path, suffix):
    path = tmp_path / f"out.{suffix}"

    ran = headgate("scan", people.uri, "--columns", "id", "--output", path)
    machines = headgate("scan", people.uri, "--columns", "id", "--output", path, "--json")

    assert ran.out == f"29 rows in {path}\n"
    assert machines.json == {"output": str(path), "rows": 29}
    if suffix == "parquet":
        assert parquet.read_table(path).num_rows == 29
    elif suffix == "arrow":
        assert pa.ipc.open_file(path).read_all().num_rows == 29
    else:
        assert len(path.read_text().splitlines()) == 29 + (suffix == "csv")


def test_a_file_that_cannot_be_written_is_an_error_and_leaves_nothing(headgate, people, tmp_path):
    unknown = headgate("scan", people.uri, "--output", tmp_path / "out.xml")
    nowhere = headgate("scan", people.uri, "--output", tmp_path / "no" / "out.csv", "--json")

    assert unknown.code == 2
    assert nowhere.code == 1
    assert "cannot be written" in nowhere.error["message"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["people"]


def test_scan_as_of_a_checkpoint(headgate, people):
    with people.shard("0000").writer() as first, people.shard("0001").writer() as second:
        for writer in (first, second):
            writer.checkpoint(name="before", id="c1")
        first.put([{"id": 100, "name": "new", "height": 1.0}]).wait()

    assert headgate("scan", people.uri, "--count").out == "30\n"
    assert headgate("scan", people.uri, "--count", "--at", "before").out == "29\n"
    assert headgate("scan", people.uri, "--at", "never", "--json").error["type"] == "NotFoundError"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("scan", "--columns", "nope"), "no column 'nope'"),
        (("scan", "--filter", "nope > 1"), "nope"),
        (("sql", "select nope from t"), "nope"),
        (("sql", "drop table t"), "cannot be answered"),
        (("lookup", "seven"), "'seven'"),
        (("lookup", "1", "--columns", "nope"), "no column 'nope'"),
    ],
)
def test_what_cannot_be_asked_is_refused_with_a_hint(headgate, people, arguments, message):
    command, *rest = arguments
    ran = headgate(command, people.uri, *rest, "--json")

    assert ran.code == 1
    assert message in ran.error["message"]
    assert ran.error["hint"]


def test_sql_answers(headgate, people, tmp_path):
    query = "select count(*) as n, max(height) as tallest from t where id < 10"

    assert headgate("sql", people.uri, query, "--json").lines == [{"n": 9, "tallest": 4.5}]
    assert headgate("sql", people.uri, query).out.split() == ["n", "tallest", "9", "4.5"]
    assert len(headgate("sql", people.uri, "select id from t order by id").out.splitlines()) == 30
    headgate("sql", people.uri, query, "--output", tmp_path / "answer.parquet")
    assert parquet.read_table(tmp_path / "answer.parquet").to_pylist() == [{"n": 9, "tallest": 4.5}]


def test_lookup_gives_the_rows_in_the_order_asked_for(headgate, people):
    assert [line["name"] for line in headgate("lookup", people.uri, 12, 7, 8, 12, "--json").lines] == ["n12", "seven"]
    text = headgate("lookup", people.uri, 7, 8, 8, "--columns", "name").out
    assert text.split()[:2] == ["name", "seven"]
    assert "1 of the keys is not there" in text
    assert headgate("lookup", people.uri, "--json", "--", "-5").out == ""


def test_lookup_reads_keys_with_the_keys_types(headgate, tmp_path):
    schema = pa.schema([("day", pa.date32()), ("who", pa.string()), ("n", pa.int32())])
    table = hg.create_table(tmp_path / "t", schema, key=["day", "who"])
    with table.writer() as writer:
        writer.put(pa.table({"day": pa.array([0, 1], pa.date32()), "who": ["a", "b,c"], "n": pa.array([1, 2], pa.int32())}))

    def found(*keys):
        return [line["n"] for line in headgate("lookup", table.uri, *keys, "--json").lines]

    assert found("1970-01-01,a") == [1]
    assert found('["1970-01-02", "b,c"]', '{"who": "a", "day": "1970-01-01"}') == [2, 1]
    for wrong in ("a", "1970-01-01,b,c", '["1970-01-01"]', '{"day": "1970-01-01"}', "[", "never,a", "[1, 2]"):
        ran = headgate("lookup", table.uri, wrong, "--json")
        assert ran.code == 1, wrong
        assert wrong in ran.error["message"].replace("\\'", "'")
        assert ran.error["hint"]


def test_lookup_in_a_table_without_a_key_is_refused(headgate, tmp_path):
    table = hg.create_table(tmp_path / "t", pa.schema([("n", pa.int64())]))

    assert "no key" in headgate("lookup", table.uri, "1", "--json").error["message"]


def test_an_empty_table_can_be_read(headgate, tmp_path):
    table = hg.create_table(tmp_path / "t", pa.schema([("n", pa.int64())]), key="n")

    assert headgate("scan", table.uri).out.split() == ["n"]
    assert headgate("scan", table.uri, "--count").out == "0\n"
    assert headgate("lookup", table.uri, "1", "--json").out == ""
    assert headgate("sql", table.uri, "select * from t", "--json").out == ""


# -- rows as a table


@given(st.lists(st.integers(0, 80), min_size=1, max_size=40), st.integers(20, 200))
def test_columns_fit_the_terminal_or_are_left_out_at_the_end(natural, width):
    widths = fitting(natural, width)

    assert 1 <= len(widths) <= len(natural)
    assert sum(wide + 2 for wide in widths) <= width or len(widths) == 1
    assert all(got <= wanted for got, wanted in zip(widths, natural))
    assert all(got == wanted or got >= 8 for got, wanted in zip(widths, natural))


def test_on_a_terminal_rows_are_cut_and_columns_without_a_place_are_named(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "dumb")
    rows = pa.table({"id": [1, 2], "text": ["x" * 500, "\x1b[2J\n"], **{f"c{n}": ["abcdefghijkl"] * 2 for n in range(6)}})

    print_rows(rows)

    *lines, last = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 40 for line in lines[:3])
    assert "…" in lines[1]
    assert "\x1b" not in lines[2]
    assert "more columns" in "".join([*lines[3:], last])
    assert last.endswith("c5")


def test_in_a_pipe_no_column_is_left_out(headgate, tmp_path):
    table = hg.create_table(tmp_path / "t", pa.schema([(f"column_{n}", pa.string()) for n in range(60)]))
    with table.writer() as writer:
        writer.put([{f"column_{n}": json.dumps(n) * 20 for n in range(60)}])

    head, row = headgate("scan", table.uri).out.splitlines()
    assert (len(head.split()), len(row.split())) == (60, 60)
