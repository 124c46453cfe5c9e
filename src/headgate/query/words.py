"""Words: how text is cut, and the words of many rows in a form that is quick to count.

Owns: the tokeniser, and the numbers of each row's words. Does not own: which rows count, or what
a word is worth (text).

A word is a longest run of letters, marks and numbers, as Unicode classes them (L, M, N), in lower
case unless the index says otherwise. Everything else separates: spaces, punctuation, underscores,
apostrophes, emoji. With ``ascii_folding`` characters are first taken apart (NFKD) and their marks
dropped, so that "café" is "cafe"; without it there is no normal form, and é and e + ´ differ.
There is no stemming and no list of stop words, and scripts that write no spaces are not cut into
words: a run of their characters is one word. A query is cut in the same way.

Text is cut on its bytes: in UTF-8 every byte of a character beyond ASCII is 128 or more, so once
the separators beyond ASCII are replaced by spaces, the class of a byte says whether it belongs to a word.

The words are kept row by row, as numbers into a dictionary, not as lists of rows by word: that is
made in a fifth of the time, grows at its end, and finding one word in a hundred thousand short
texts takes a millisecond.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Rows = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_SEPARATORS_BEYOND_ASCII = r"[^\p{L}\p{M}\p{N}\x00-\x7F]+"
_MARKS = r"\p{M}+"
_SEPARATORS = bytes(byte for byte in range(128) if not chr(byte).isalnum())
_LOWER = bytes(range(256)).lower()
_IS_WORD = bytes(byte >= 128 or chr(byte).isalnum() for byte in range(256))
_PIECE_BYTES = 64 << 20
_NO_TERMS = pa.nulls(0, pa.large_string())  # pa.array would look for pandas, and load it


@dataclass(frozen=True)
class Cut:
    """How text is cut."""

    lower_case: bool = True
    ascii_folding: bool = False


PLAIN = Cut()


@dataclass(frozen=True)
class Words:
    """The words of some rows, in order. Row ``r`` has the words ``codes[bounds[r]:bounds[r + 1]]``."""

    terms: pa.LargeStringArray
    """Each word once."""
    codes: npt.NDArray[np.int32]
    bounds: Rows
    present: Mask | None
    """Which rows have a text at all; None: every one."""

    @property
    def num_rows(self) -> int:
        return len(self.bounds) - 1

    @property
    def nbytes(self) -> int:
        present = 0 if self.present is None else self.present.nbytes
        return int(self.terms.nbytes) + self.codes.nbytes + self.bounds.nbytes + present

    @cached_property
    def lengths(self) -> Rows:
        """The number of words of each row."""
        return np.diff(self.bounds)

    def find(self, word: str) -> tuple[Rows, Rows]:
        """The rows that have a word, in order, and how often."""
        code = pc.index(self.terms, pa.scalar(word, pa.large_string())).as_py()
        if code < 0:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        rows = np.searchsorted(self.bounds, np.flatnonzero(self.codes == code), side="right") - 1
        first = np.flatnonzero(np.diff(rows, prepend=-1))
        return rows[first], np.diff(first, append=len(rows))


def words_of(texts: pa.Array, cut: Cut = PLAIN) -> Words:
    """The words of an array of text; a null has none, and is no text."""
    return join([_cut(piece, cut) for piece in _pieces(texts)])


def words_in(text: str, cut: Cut = PLAIN) -> list[str]:
    """The words of one text, in order."""
    found = words_of(pa.array([text], pa.large_string()), cut)
    words: list[str] = found.terms.take(pa.array(found.codes)).to_pylist()
    return words


def no_words(rows: int) -> Words:
    """Rows without a text."""
    return Words(_NO_TERMS, np.zeros(0, np.int32), np.zeros(rows + 1, np.int64), np.zeros(rows, np.bool_))


def join(parts: Sequence[Words]) -> Words:
    """The rows of all parts, one after the other."""
    parts = [part for part in parts if part.num_rows]
    if len(parts) <= 1:
        return parts[0] if parts else no_words(0)
    together = pa.concat_arrays([part.terms for part in parts]).dictionary_encode()
    numbers = together.indices.to_numpy()
    codes, bounds, at, total = [], [np.zeros(1, np.int64)], 0, 0
    for part in parts:
        codes.append(numbers[at : at + len(part.terms)][part.codes])
        bounds.append(part.bounds[1:] + total)
        at += len(part.terms)
        total += len(part.codes)
    present = None
    if any(part.present is not None for part in parts):
        present = np.concatenate([np.ones(part.num_rows, np.bool_) if part.present is None else part.present for part in parts])
    return Words(together.dictionary, np.concatenate(codes), np.concatenate(bounds), present)


def _pieces(texts: pa.Array) -> list[pa.Array]:
    """Parts small enough that what is made of each on the way does not matter."""
    if texts.nbytes <= _PIECE_BYTES or len(texts) <= 1:
        return [texts]
    half = len(texts) // 2
    return _pieces(texts.slice(0, half)) + _pieces(texts.slice(half))


def _cut(texts: pa.Array, cut: Cut) -> Words:
    present = None
    if texts.null_count:
        present = texts.is_valid().to_numpy(zero_copy_only=False)
        texts = texts.fill_null("")
    if not len(texts):
        return no_words(0)
    bounds, data = _bytes_of(texts)
    if len(data) and data.max() >= 128:
        bounds, data = _bytes_of(_plain(texts, cut))
    if not len(data):
        return Words(_NO_TERMS, np.zeros(0, np.int32), np.zeros(len(texts) + 1, np.int64), present)
    raw = data.tobytes()
    is_word = np.frombuffer(raw.translate(_IS_WORD), np.bool_)
    starts = is_word.copy()
    starts[1:] &= ~is_word[:-1]
    ends = is_word.copy()
    ends[:-1] &= ~is_word[1:]
    # Texts lie side by side with nothing between them: a word ends where its text does.
    inner = bounds[1:-1]
    inner = inner[(inner > 0) & (inner < len(data))]
    starts[inner] = is_word[inner]
    ends[inner - 1] = is_word[inner - 1]
    first = np.flatnonzero(starts)
    offsets = np.zeros(len(first) + 1, np.int64)
    np.cumsum(np.flatnonzero(ends) + 1 - first, out=offsets[1:])
    # Not by Arrow's ascii_lower: it takes the wrong bytes of arrays whose first offset is not 0, and casts make such.
    joined = raw.translate(_LOWER if cut.lower_case else None, _SEPARATORS)
    words = pa.LargeStringArray.from_buffers(len(first), pa.py_buffer(offsets), pa.py_buffer(joined)).dictionary_encode()
    return Words(words.dictionary, words.indices.to_numpy(), np.searchsorted(first, bounds), present)


def _plain(texts: pa.Array, cut: Cut) -> pa.Array:
    """With nothing beyond ASCII that is not of a word."""
    if cut.ascii_folding:
        texts = pc.replace_substring_regex(pc.utf8_normalize(texts, "NFKD"), _MARKS, "")
    if cut.lower_case:
        texts = pc.utf8_lower(texts)
    return pc.replace_substring_regex(texts, _SEPARATORS_BEYOND_ASCII, " ")


def _bytes_of(texts: pa.Array) -> tuple[Rows, npt.NDArray[np.uint8]]:
    """Where each text begins, and the bytes of all of them, without a copy."""
    kind = np.int64 if pa.types.is_large_string(texts.type) else np.int32
    _, offsets, data = texts.buffers()
    bounds = np.frombuffer(offsets, kind, len(texts) + 1, texts.offset * np.dtype(kind).itemsize).astype(np.int64)
    everything = np.frombuffer(data, np.uint8) if data is not None and data.size else np.zeros(0, np.uint8)
    return bounds - bounds[0], everything[bounds[0] : bounds[-1]]
