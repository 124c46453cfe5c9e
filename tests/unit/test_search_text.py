"""Text search: BM25 on one scale over all sources, whichever tier a row is in."""

from __future__ import annotations

import gc
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.reading import Shelf, on_disk

from headgate.columnar.arrow import ArrowSlice
from headgate.errors import InvalidInputError
from headgate.query import text
from headgate.query.text import KeptWords, search_text
from headgate.query.words import PLAIN, Cut
from headgate.schema import RowRules

SCHEMA = pa.schema([pa.field("id", pa.int64(), False), ("body", pa.string()), ("v", pa.int64())])
RULES = RowRules(SCHEMA, ("id",))


def row(id: int, body: str | None, v: int = 0) -> dict[str, Any]:
    return {"id": id, "body": body, "v": v}


def ids(found: pa.Table) -> list[int]:
    return found.column("id").to_pylist()  # type: ignore[no-any-return]


def bm25(rows: list[dict[str, Any]], query: str) -> dict[int, float]:
    """The same formula, row by row."""
    texts = {each["id"]: each["body"].lower().split() for each in rows if each["body"] is not None}
    average = sum(map(len, texts.values())) / max(1, len(texts))
    scores: dict[int, float] = {}
    for word, weight in Counter(query.lower().split()).items():
        holding = [id for id, words in texts.items() if word in words]
        rare = math.log(1 + (len(texts) - len(holding) + 0.5) / (len(holding) + 0.5))
        for id in holding:
            often = texts[id].count(word)
            long = 1 - 0.75 + 0.75 * len(texts[id]) / average
            scores[id] = scores.get(id, 0.0) + weight * rare * often * 2.2 / (often + 1.2 * long)
    return scores


STEPS = st.lists(st.sampled_from(["put", "put", "put", "delete", "freeze", "flush", "flush 2", "search"]), min_size=3, max_size=12)
BODIES = st.none() | st.lists(st.sampled_from(["a", "b", "B", "c", "dd", "é"]), max_size=6).map(" ".join)


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(STEPS, st.data())
def test_a_search_finds_and_scores_what_the_formula_does_row_by_row(steps: list[str], data: st.DataObject) -> None:
    shelf = Shelf(RULES)
    for step in [*steps, "search"]:
        keys = data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=4))
        if step == "put":
            shelf.put([row(key, data.draw(BODIES), data.draw(st.integers(0, 3))) for key in keys])
        elif step == "delete":
            shelf.delete([{"id": key} for key in keys])
        elif step == "freeze":
            shelf.freeze()
        elif step.startswith("flush"):
            shelf.flush(slices=2 if step.endswith("2") else 1)
        else:
            query, k = data.draw(st.sampled_from(["a", "b é", "a a dd", "c nowhere"])), data.draw(st.integers(1, 6))
            wanted = bm25(shelf.expected(), query)
            found = search_text(shelf.load, RULES, "body", query, k)
            assert len(found) == min(k, len(wanted))
            got = list(zip(found.column("_score").to_pylist(), ids(found), strict=True))
            assert got == sorted(got, key=lambda pair: (-pair[0], pair[1])), "best first, equal ones by key"
            assert [score for score, _ in got] == pytest.approx(sorted(wanted.values(), reverse=True)[:k], rel=1e-5)
            assert [wanted[id] for _, id in got] == pytest.approx([score for score, _ in got], rel=1e-5)


@pytest.mark.parametrize("disk", [False, True], ids=["memory", "lance"])
def test_a_row_is_worth_the_same_in_every_tier(disk: bool, tmp_path: Path) -> None:
    shelf = Shelf(RULES, on_disk(tmp_path) if disk else None)
    words = ["river", "gate", "water", "level", "lock", "weir"]
    for at in range(0, 120, 30):
        shelf.put([row(id, " ".join(words[(id * step) % 6] for step in range(1, 2 + id % 5)), id % 4) for id in range(at, at + 30)])
        shelf.freeze()

    def results() -> list[pa.Table]:
        found = [search_text(shelf.load, RULES, "body", query, 25) for query in ("river", "gate lock", "weir weir water")]
        return [*found, search_text(shelf.load, RULES, "body", "gate", 5, filter="v = 2")]

    before = results()
    assert before[0].num_rows == 25
    for _ in range(4):
        shelf.flush(slices=2)
        assert all(one.equals(other) for one, other in zip(before, results(), strict=True)), "equal to the last bit"


def test_rows_in_several_shards_are_scored_on_one_scale() -> None:
    rows = [row(id, f"word{'' if id % 3 else ' rare'} filler {id}") for id in range(30)]
    whole, left, right = Shelf(RULES), Shelf(RULES), Shelf(RULES)
    whole.put(rows)
    left.put([each for each in rows if each["id"] < 25])
    right.put([each for each in rows if each["id"] >= 25])
    right.flush()
    found = search_text(lambda: [*left.load(), *right.load()], RULES, "body", "rare word", 30)
    assert found.equals(search_text(whole.load, RULES, "body", "rare word", 30))


def test_replaced_and_deleted_rows_do_not_count_in_the_statistics() -> None:
    plain, worn = Shelf(RULES), Shelf(RULES)
    rows = [row(1, "red fish"), row(2, "blue fish"), row(3, None), row(4, "one two three four")]
    plain.put(rows)
    worn.put([row(id, "fish fish fish red") for id in range(1, 40)])
    worn.flush()
    worn.put([row(id, "red red") for id in range(1, 20)])
    worn.freeze()
    worn.delete([{"id": id} for id in range(1, 40)])
    worn.put(rows)
    assert search_text(worn.load, RULES, "body", "red fish", 9).equals(search_text(plain.load, RULES, "body", "red fish", 9))
    worn.flush()
    worn.flush()
    assert search_text(worn.load, RULES, "body", "red fish", 9).equals(search_text(plain.load, RULES, "body", "red fish", 9))


def test_a_filter_chooses_among_the_rows_and_changes_no_score() -> None:
    shelf = Shelf(RULES)
    shelf.put([row(id, "word " * (1 + id % 3), id) for id in range(60)])
    shelf.flush()
    shelf.put([row(id, "word", id) for id in range(60, 70)])
    everything = {each["id"]: each["_score"] for each in search_text(shelf.load, RULES, "body", "word", 100).to_pylist()}
    found = search_text(shelf.load, RULES, "body", "word", 100, filter="v >= 58 and v < 62", columns=["id"])
    assert found.to_pylist() == [{"id": id, "_score": everything[id]} for id in sorted(range(58, 62), key=lambda id: (-everything[id], id))]
    assert search_text(shelf.load, RULES, "body", "word", 2, filter="v = 3").num_rows == 1


def test_rare_words_among_many_rows_are_filtered_without_reading_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Shelf(RULES)
    shelf.put([row(id, "common" if id % 50 else "common rare", id) for id in range(500)])
    shelf.flush(slices=2)

    def whole(*_: object) -> None:
        raise AssertionError("the filter was asked about every row")

    monkeypatch.setattr("headgate.query.ranked.counting", whole)
    assert ids(search_text(shelf.load, RULES, "body", "rare", 9, filter="abs(v) >= 300")) == [300, 350, 400, 450]


def test_words_can_be_cut_as_the_index_says() -> None:
    shelf = Shelf(RULES)
    shelf.put([row(1, "Café"), row(2, "cafe")])
    assert ids(search_text(shelf.load, RULES, "body", "CAFÉ")) == [1]
    assert ids(search_text(shelf.load, RULES, "body", "café", cut=Cut(ascii_folding=True))) == [1, 2]
    assert ids(search_text(shelf.load, RULES, "body", "cafe", cut=Cut(lower_case=False))) == [2]


def test_no_row_is_found_that_has_none_of_the_words() -> None:
    shelf = Shelf(RULES)
    for _ in range(2):
        found = search_text(shelf.load, RULES, "body", "word")
        assert (found.num_rows, found.schema.names) == (0, ["id", "body", "v", "_score"])
        shelf.put([row(1, "other"), row(2, None), row(3, "")])


@pytest.mark.parametrize(
    ("column", "query", "options", "told"),
    [
        ("nowhere", "a", {}, "no column"),
        ("v", "a", {}, "not text"),
        ("body", "", {}, "no words"),
        ("body", " ?!", {}, "no words"),
        ("body", None, {}, "the query is None"),
        ("body", "a", {"k": 0}, "k is 0"),
        ("body", "a", {"filter": "w > 1"}, "filter"),
        ("body", "a", {"columns": ["w"]}, "no column"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_anything_is_read(column: str, query: Any, options: Any, told: str) -> None:
    def load() -> Any:
        raise AssertionError("read")

    with pytest.raises(InvalidInputError, match=told) as caught:
        search_text(load, RULES, column, query, **options)
    assert caught.value.hint


def test_pending_rows_are_found_and_hide_what_is_older() -> None:
    shelf = Shelf(RULES)
    shelf.put([row(1, "old"), row(2, "old")])
    shelf.put([row(1, "new")], pending=True)
    assert ids(search_text(shelf.load, RULES, "body", "old new")) == [1, 2]
    assert ids(search_text(shelf.load, RULES, "body", "old")) == [2]


def test_an_older_view_of_a_memtable_does_not_see_what_came_later() -> None:
    shelf = Shelf(RULES)
    shelf.put([row(1, "word")])
    earlier = shelf.view()
    before = search_text(lambda: [earlier], RULES, "body", "word")
    shelf.put([row(1, "other"), row(2, "word word")])
    assert ids(search_text(shelf.load, RULES, "body", "word")) == [2]
    assert search_text(lambda: [earlier], RULES, "body", "word").equals(before)


def test_a_view_that_ends_within_a_joined_part_does_not_see_the_rest_of_it() -> None:
    shelf = Shelf(RULES)
    views, results = [], []
    for id in range(20):
        shelf.put([row(id, "word")])
        views.append(shelf.view())
    search_text(shelf.load, RULES, "body", "word")  # makes and keeps the words of all of them, in one part
    for number, view in enumerate(views):
        found = search_text(lambda view=view: [view], RULES, "body", "word", 50)  # type: ignore[misc]
        assert ids(found) == list(range(number + 1))
        results.append(found.column("_score")[0].as_py())
    assert len(set(results)) == 20, "each by the statistics of its own rows"


def test_a_column_that_was_renamed_or_added_is_searched_as_it_is_now() -> None:
    shelf = Shelf(RULES)
    shelf.put([row(1, "word")])
    shelf.flush()
    shelf.put([row(2, "word")])
    now = RowRules(pa.schema([pa.field("id", pa.int64(), False), ("text", pa.large_string()), ("body", pa.string())]), ("id",), (1, 2, 4))
    shelf.rules = now
    shelf.put([{"id": 3, "text": "none", "body": "word"}])
    assert ids(search_text(shelf.load, now, "text", "word")) == [1, 2]
    assert ids(search_text(shelf.load, now, "body", "word")) == [3]


class Counted(ArrowSlice):
    scans = 0

    def scan(self, columns: Any, **options: Any) -> Any:
        self.scans += 1
        return super().scan(columns, **options)


def test_the_words_of_runs_are_kept_within_a_budget_the_least_used_going_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_PART_ROWS", 100)
    slices = [Counted(pa.table({"body": [f"w{i} x" for i in range(100)]})) for _ in range(3)]
    kept = KeptWords(1 << 30)
    first = [words for _, words in kept.words(slices[0], "body", PLAIN)]
    assert [words for _, words in kept.words(slices[0], "body", PLAIN)] == first
    assert slices[0].scans == 1
    list(kept.words(slices[0], "body", Cut(lower_case=False)))
    assert slices[0].scans == 2, "cut in another way"
    kept = KeptWords(int(2.5 * first[0].nbytes))
    for number in (0, 1, 0, 2, 0, 1):
        list(kept.words(slices[number], "body", PLAIN))
        assert kept.nbytes <= kept.bytes_max
    assert [part.scans for part in slices] == [3, 2, 1]
    slices.clear()
    gc.collect()
    list(kept.words(Counted(pa.table({"body": ["a"]})), "body", PLAIN))
    assert kept.nbytes < first[0].nbytes, "what nobody has open any more is not kept"


def test_words_are_those_of_the_slice_itself_even_if_another_had_its_number() -> None:
    kept = KeptWords(1 << 30)
    gone, part = Counted(pa.table({"body": ["old"]})), Counted(pa.table({"body": ["new"]}))
    list(kept.words(gone, "body", PLAIN))
    kept._kept[(id(part), 0, "body", PLAIN)] = kept._kept.pop((id(gone), 0, "body", PLAIN))
    assert [words.terms.to_pylist() for _, words in kept.words(part, "body", PLAIN)] == [["new"]]


def test_a_run_that_does_not_fit_the_budget_is_searched_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_PART_ROWS", 16)
    monkeypatch.setattr(text, "KEPT", KeptWords(10))
    shelf = Shelf(RULES)
    shelf.put([row(id, "word" if id % 2 else f"w{id}") for id in range(100)])
    shelf.flush(slices=2)
    for _ in range(2):
        assert ids(search_text(shelf.load, RULES, "body", "word w40", 4)) == [40, 1, 3, 5]
    assert text.KEPT.nbytes == 0
