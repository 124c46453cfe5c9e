"""How text is cut into words, and finding them again."""

from __future__ import annotations

import unicodedata

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.query.words import Cut, Words, join, no_words, words_in, words_of


def rows_of(words: Words) -> list[list[str]]:
    terms = words.terms.to_pylist()
    return [[terms[code] for code in words.codes[words.bounds[r] : words.bounds[r + 1]]] for r in range(words.num_rows)]


def by_characters(text: str) -> list[str]:
    """The same rule, one character after another."""
    found = "".join(c if unicodedata.category(c)[0] in "LMN" else " " for c in text).split(" ")
    return [word for word in found if word]


def test_words_are_runs_of_letters_marks_and_numbers_in_lower_case() -> None:
    assert words_in("The Quick, brown-fox; x_y don't 3.14 E-Mail!") == [
        "the",
        "quick",
        "brown",
        "fox",
        "x",
        "y",
        "don",
        "t",
        "3",
        "14",
        "e",
        "mail",
    ]
    assert words_in("Café “Ünïcode” — ΑΒΓ, 日本語 naïve\u00a0x 😀y") == ["café", "ünïcode", "αβγ", "日本語", "naïve", "x", "y"]


@pytest.mark.parametrize("text", ["", " ", "...", "\t\n", "—", "😀😀"])
def test_a_text_may_have_no_words(text: str) -> None:
    assert words_in(text) == []


def test_folding_takes_accents_away_and_case_can_be_kept() -> None:
    assert words_in("Café e\u0301te", Cut(ascii_folding=True)) == ["cafe", "ete"]
    assert words_in("Café É", Cut(lower_case=False)) == ["Café", "É"]
    assert words_in("Plain ASCII", Cut(lower_case=False, ascii_folding=True)) == ["Plain", "ASCII"]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_words_never_run_over_from_one_text_into_the_next(kind: pa.DataType) -> None:
    texts = pa.array(["ab", "cd ef", "", None, "gh", " ij", "kl"], kind)
    assert rows_of(words_of(texts)) == [["ab"], ["cd", "ef"], [], [], ["gh"], ["ij"], ["kl"]]
    assert rows_of(words_of(texts.slice(1, 4))) == [["cd", "ef"], [], [], ["gh"]]
    assert rows_of(words_of(texts.slice(1, 4).cast(pa.large_string()))) == [["cd", "ef"], [], [], ["gh"]], "its first offset is not 0"


def test_a_null_is_no_text_and_an_empty_string_is_one() -> None:
    words = words_of(pa.array(["a", None, ""]))
    assert words.present is not None
    assert words.present.tolist() == [True, False, True]
    assert words_of(pa.array(["a", ""])).present is None


def test_a_word_is_found_with_its_rows_and_how_often() -> None:
    words = words_of(pa.array(["b a b", "", "c", "B", None, "a"]))
    rows, times = words.find("b")
    assert (rows.tolist(), times.tolist()) == ([0, 3], [2, 1])
    assert words.find("nowhere")[0].tolist() == []
    assert words.lengths.tolist() == [3, 0, 1, 1, 0, 1]


def test_joined_words_are_those_of_the_joined_rows() -> None:
    texts = pa.array(["b a", None, "c a", "", "d b d", "é"])
    whole = words_of(texts)
    parts = [words_of(texts.slice(0, 1)), no_words(0), words_of(texts.slice(1, 3)), words_of(texts.slice(4)), no_words(2)]
    together = join(parts)
    assert rows_of(together) == [*rows_of(whole), [], []]
    assert together.present is not None
    assert together.present.tolist() == [True, False, True, True, True, True, False, False]
    assert together.find("b")[0].tolist() == whole.find("b")[0].tolist()
    assert join([]).num_rows == 0


CHARACTERS = " ,.-_'09AazZ\x00\x7f\u00a0é\u0301ßñÅΑω日本\u06f2²½—“😀क\u093f\u200b"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.none() | st.text(CHARACTERS, max_size=12), max_size=8), st.integers(0, 3))
def test_cutting_bytes_finds_what_cutting_characters_finds(texts: list[str | None], skip: int) -> None:
    array = pa.array(texts, pa.string()).slice(min(skip, len(texts)))
    expected = [by_characters(text or "") for text in texts[min(skip, len(texts)) :]]
    assert rows_of(words_of(array, Cut(lower_case=False))) == expected
    assert rows_of(words_of(array.cast(pa.large_string()), Cut(lower_case=False))) == expected


def test_many_texts_are_cut_in_pieces_that_join_again(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = pa.array([f"w{i % 7} é{i % 3}" if i % 5 else None for i in range(500)])
    whole = words_of(texts)
    monkeypatch.setattr("headgate.query.words._PIECE_BYTES", 256)
    pieces = words_of(texts)
    assert rows_of(pieces) == rows_of(whole)
    assert np.array_equal(pieces.present, whole.present)
