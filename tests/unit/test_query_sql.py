"""SQL over the merged table."""

from __future__ import annotations

import math

import pyarrow as pa
import pytest
from tests.reading import Shelf
from tests.unit.test_columnar import TYPES

from headgate.errors import DataLossError, InvalidInputError
from headgate.query.scan import Scan
from headgate.query.sql import sql
from headgate.schema import RowRules, check_schema
from headgate.view import ReadView

RULES = RowRules(pa.schema([pa.field("Id", pa.int64(), False), pa.field("v", pa.float64()), pa.field("name", pa.string())]), ("Id",))


@pytest.fixture
def shelf() -> Shelf:
    shelf = Shelf(RULES)
    shelf.put([{"Id": i, "v": i / 2, "name": f"n{i % 3}"} for i in range(10)])
    shelf.flush()
    shelf.put([{"Id": 1, "v": 100.0, "name": "new"}])
    shelf.delete([{"Id": 2}])
    shelf.flush()
    shelf.put([{"Id": 11, "v": math.nan, "name": None}])
    return shelf


def test_every_row_counts_once_and_deleted_ones_do_not(shelf: Shelf) -> None:
    assert sql(shelf.load, RULES, "select count(*) as n from t").to_pydict() == {"n": [10]}
    assert sql(shelf.load, RULES, "select v from t where Id = 1").to_pydict() == {"v": [100.0]}
    assert sql(shelf.load, RULES, "SELECT COUNT(*) AS n FROM t WHERE name IS NULL").to_pydict() == {"n": [1]}


def test_joins_see_one_state_and_groups_come_as_plain_text(shelf: Shelf) -> None:
    got = sql(shelf.load, RULES, "select a.name, count(*) as n from t a join t b on a.Id = b.Id group by a.name order by n desc, a.name")
    assert got.schema.field("name").type == pa.string()
    assert got.to_pydict() == {"name": ["n0", "n1", "n2", "new", None], "n": [4, 2, 2, 1, 1]}


def test_a_filter_means_the_same_as_in_a_scan(shelf: Shelf) -> None:
    for text in ("v > 3", "v = v", "v <> 3 or name is null"):
        found = Scan(shelf.load, RULES, filter=text, columns=["Id"]).to_arrow().column(0).to_pylist()
        assert sorted(sql(shelf.load, RULES, f"select Id from t where {text}").column(0).to_pylist()) == sorted(found)


def test_names_are_taken_as_spelled_or_else_in_lower_case(shelf: Shelf) -> None:
    assert sql(shelf.load, RULES, "select NAME from T where V = 100").num_rows == 1
    assert sql(shelf.load, RULES, 'select "Id" from t limit 2').num_rows == 2


@pytest.mark.parametrize(
    "query", ["", "select nope from t", "drop table t", "create table u as select 1", "select", "insert into t values (1)"]
)
def test_what_is_no_query_over_the_table_is_refused_before_anything_is_read(query: str) -> None:
    def load() -> list[ReadView]:
        raise AssertionError("nothing is to be read")

    with pytest.raises(InvalidInputError):
        sql(load, RULES, query)


def test_a_table_without_rows_is_a_table(shelf: Shelf) -> None:
    assert sql(Shelf(RULES).load, RULES, "select count(*) as n, sum(v) as s from t").to_pydict() == {"n": [0], "s": [None]}
    assert sql(Shelf(RULES).load, RULES, "select * from t").schema.names == ["Id", "v", "name"]


def test_q14_a_run_collected_under_a_query_begins_it_again(shelf: Shelf) -> None:
    loads = 0

    def load() -> list[ReadView]:
        nonlocal loads
        loads += 1
        if loads == 1:
            broken = Shelf(RULES, shelf.columnar)
            broken.put([{"Id": 1, "v": 1.0, "name": "old"}])
            broken.flush()
            view = broken.view()
            broken.columnar.drop(broken.runs[0].slices[0].path)
            return [view]
        return shelf.load()

    assert sql(load, RULES, "select count(*) as n, count(distinct name) as m from t").to_pydict() == {"n": [10], "m": [4]}
    assert loads == 2


def test_q14_what_stays_missing_is_no_error_of_the_query(shelf: Shelf) -> None:
    shelf.columnar.drop(shelf.runs[0].slices[0].path)
    with pytest.raises(DataLossError, match=shelf.runs[0].slices[0].path):
        sql(shelf.load, RULES, "select sum(v) from t")


def test_q11_filters_and_queries_take_tables_with_every_type() -> None:
    schema, _ = check_schema(pa.schema([pa.field("id", pa.int64(), False), *(pa.field(n, t) for n, (t, _) in TYPES.items())]), "id")
    rules = RowRules(schema, ("id",))
    shelf = Shelf(rules)
    shelf.put([{"id": 1} | {name: values[0] for name, (_, values) in TYPES.items()}, {"id": 2}])
    shelf.flush()
    shelf.put([{"id": 3} | {name: values[1] for name, (_, values) in TYPES.items()}])
    assert Scan(shelf.load, rules, filter="id <> 2 and string is not null").count() == 2
    got = sql(shelf.load, rules, "select * from t order by id")
    assert got.to_pylist() == sorted(Scan(shelf.load, rules).to_arrow().to_pylist(), key=lambda row: row["id"])
