"""The merged read: scans, counts and lookups against a plain dict."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.reading import Shelf, by_key, on_disk

import headgate.query.run_index as run_index
import headgate.query.shadow as shadow
from headgate.query.lookup import lookup
from headgate.query.scan import Scan
from headgate.schema import RowRules

KEYS: dict[str, tuple[list[pa.Field], st.SearchStrategy[tuple[Any, ...]]]] = {
    "int": ([pa.field("id", pa.int64(), False)], st.tuples(st.integers(-5, 15))),
    "sparse int": ([pa.field("id", pa.int64(), False)], st.tuples(st.integers(-5, 15).map(lambda i: i * (1 << 58)))),
    "string": ([pa.field("id", pa.string(), False)], st.tuples(st.text("aé\0", max_size=3))),
    "composite": (
        [pa.field("a", pa.string(), False), pa.field("b", pa.int32(), False)],
        st.tuples(st.sampled_from(["", "a", "a\0", "b"]), st.integers(-2, 2)),
    ),
    "decimal": ([pa.field("id", pa.decimal128(12, 2), False)], st.tuples(st.integers(-5, 9).map(lambda i: Decimal(i * 25).scaleb(-2)))),
}
FILTERS = ["v > 3", "v is null", "v is null or name = 'x'", "name like 'x%'", "abs(v) < 4 and name <> 'y'", "not (v = 2)"]


def rules_of(kind: str) -> RowRules:
    fields = KEYS[kind][0]
    return RowRules(pa.schema([*fields, pa.field("v", pa.int64()), pa.field("name", pa.string())]), tuple(f.name for f in fields))


def matches(text: str, row: dict[str, Any]) -> bool:
    v, name = row["v"], row["name"]
    return bool(
        {
            "v > 3": lambda: v is not None and v > 3,
            "v is null": lambda: v is None,
            "v is null or name = 'x'": lambda: v is None or name == "x",
            "name like 'x%'": lambda: name is not None and name.startswith("x"),
            "abs(v) < 4 and name <> 'y'": lambda: v is not None and abs(v) < 4 and name is not None and name != "y",
            "not (v = 2)": lambda: v is not None and v != 2,
        }[text]()
    )


STEPS = st.lists(st.sampled_from(["put", "put", "put", "delete", "freeze", "flush", "flush 2", "read"]), min_size=3, max_size=14)


def play(shelf: Shelf, kind: str, steps: list[str], data: st.DataObject) -> None:
    play_writes(shelf, kind, steps, data, reads=True)
    check_all(shelf, data)


def play_writes(shelf: Shelf, kind: str, steps: list[str], data: st.DataObject, *, reads: bool = False) -> None:
    names = [f.name for f in KEYS[kind][0]]
    some = st.lists(KEYS[kind][1], min_size=1, max_size=6)
    values = st.tuples(st.none() | st.integers(-6, 6), st.none() | st.sampled_from(["x", "y", "xy"]))
    for step in steps:
        if step == "put":
            rows = [dict(zip(names, key, strict=True)) for key in data.draw(some)]
            shelf.put([row | dict(zip(("v", "name"), data.draw(values), strict=True)) for row in rows])
        elif step == "delete":
            shelf.delete([dict(zip(names, key, strict=True)) for key in data.draw(some)])
        elif step == "freeze":
            shelf.freeze()
        elif step.startswith("flush"):
            shelf.flush(slices=2 if step == "flush 2" else 1)
        elif reads:
            check_all(shelf, data)
    if data.draw(st.booleans()):
        keys = [dict(zip(names, key, strict=True)) for key in data.draw(some)]
        shelf.put([key | {"v": 5, "name": "pending"} for key in keys], pending=True)
        shelf.delete(keys[:1], pending=True)


def check_all(shelf: Shelf, data: st.DataObject) -> None:
    rules = shelf.rules
    expected = by_key(shelf.expected(), rules)
    assert by_key(Scan(shelf.load, rules).to_arrow().to_pylist(), rules) == expected
    assert Scan(shelf.load, rules).count() == len(expected)

    text = data.draw(st.sampled_from(FILTERS))
    found = [row for row in expected if matches(text, row)]
    columns = data.draw(st.permutations(rules.schema.names))[: data.draw(st.integers(0, len(rules.schema)))]
    got = Scan(shelf.load, rules, columns=columns, filter=text)
    assert got.count() == len(found)
    table = got.to_arrow()
    assert table.schema.names == columns
    assert sorted(map(repr, table.to_pylist())) == sorted(repr({name: row[name] for name in columns}) for row in found) or not columns

    limit = data.draw(st.integers(0, 8))
    cut = Scan(shelf.load, rules, filter=text, limit=limit)
    rows = cut.to_arrow().to_pylist()
    assert len(rows) == min(limit, len(found)) == cut.count()
    assert all(row in found for row in rows)
    assert len({repr([row[name] for name in rules.key]) for row in rows}) == len(rows)

    asked = [*shelf.model, *data.draw(st.lists(KEYS[kind_of(rules)][1], max_size=3))]
    asked = data.draw(st.permutations(asked))[:10] * 2
    given_keys = asked if len(rules.key) > 1 else [key[0] for key in asked]
    want = [row for key in dict.fromkeys(asked) if (row := shelf.model.get(key)) is not None]
    assert lookup(shelf.load, rules, given_keys).to_pylist() == want


def kind_of(rules: RowRules) -> str:
    key_types = [rules.schema.field(name).type for name in rules.key]
    return next(kind for kind, (fields, _) in KEYS.items() if [f.type for f in fields] == key_types)


@pytest.mark.parametrize("kind", sorted(KEYS))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), STEPS)
def test_every_form_of_read_equals_a_dict_whatever_tiers_the_rows_are_in(kind: str, data: st.DataObject, steps: list[str]) -> None:
    play(Shelf(rules_of(kind)), kind, steps, data)


@pytest.mark.parametrize("kind", sorted(KEYS))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), STEPS)
def test_the_same_when_no_keys_are_kept_and_blocks_are_small(kind: str, data: st.DataObject, steps: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in [
            (shadow, "_RANGE_ROWS", 5), (run_index, "BLOCK_ROWS", 2), (run_index, "_FEW_BLOCKS", 1), (run_index, "_PROBES", 3),
        ]:  # fmt: skip
            patch.setattr(module, name, value)
        patch.setattr("headgate.query.scan.KEY_BUDGET_BYTES", 0)
        patch.setattr("headgate.query.lookup.KEY_BUDGET_BYTES", 0)
        play(Shelf(rules_of(kind)), kind, steps, data)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(st.data(), STEPS, st.sampled_from(sorted(KEYS)))
def test_the_same_with_lance_on_a_disk(tmp_path_factory: Any, data: st.DataObject, steps: list[str], kind: str) -> None:
    folder: Path = tmp_path_factory.mktemp("a table, 100% ü")
    play(Shelf(rules_of(kind), on_disk(folder)), kind, steps, data)
