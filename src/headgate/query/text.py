"""Text search: the rows whose text has given words, ranked by BM25.

Owns: what a row is worth, the words of runs, the search over all sources. Does not own: how text is
cut (words), what a writer keeps of its MemTables (fresh_index), which rows count (sources).

A word is worth more the fewer texts have it; a text, the more often it has the word and the shorter
it is: for each word of the query, as often as it stands there,

    ln(1 + (N - n + 0.5) / (n + 0.5)) · f (k1 + 1) / (f + k1 (1 - b + b · length / average length))

with k1 = 1.2 and b = 0.75; N texts, n of them with the word, f times in this one. N, n and the
average are counted over all live rows of all sources and shards, of which no source has a share of
its own: so a row is worth the same whichever tier it is in, and a flush changes nothing. Rows that
are deleted or replaced do not count. A filter chooses among the rows found, and changes no score.

It is exact: every text is looked at. What costs is cutting the texts of a run for the first time;
their words are kept, up to ``KEPT_BYTES_MAX`` in a process, the least used ones going first. A
run of more rows than fit is cut anew by every search, part by part, in bounded memory.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from weakref import ref

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as types

from headgate.columnar import Slice
from headgate.errors import InvalidInputError
from headgate.keys import Offsets
from headgate.meters import CACHE_BYTES, CACHE_HITS, CACHE_MISSES, watch
from headgate.query.fresh_index import words_of_fresh, words_of_puts
from headgate.query.mask import Mask
from headgate.query.ranked import Asked, Candidates, matching_at
from headgate.query.scan import Load, whole
from headgate.query.shadow import KEY_BUDGET_BYTES
from headgate.query.sources import RunSource, Source, load_ahead, sources_of
from headgate.query.words import PLAIN, Cut, Words, words_in, words_of
from headgate.schema import RowRules
from headgate.view import ReadView

K1, B = 1.2, 0.75
SCORE = "_score"
KEPT_BYTES_MAX = 512 << 20
_PART_ROWS = 1 << 17


def search_text(
    load: Load,
    rules: RowRules,
    column: str,
    query: str,
    k: int = 10,
    *,
    cut: Cut = PLAIN,
    filter: str | None = None,
    columns: Sequence[str] | None = None,
) -> pa.Table:
    """The ``k`` rows whose text has most of the words of ``query``, best first, with a column ``_score``.

    Rows that have none of them are not found.

    Args:
        load: the views to search, one per shard.
        rules: the table of now.
        column: the texts.
        query: words; how they are combined is up to the score, and all else separates them.
        cut: how text is cut into words, by the column's index.
        filter: a SQL expression that the rows must meet.
        columns: which; None: all.

    Raises:
        InvalidInputError: there is no such column, or no word in the query; with a hint. Nothing is read before.
    """
    sought = _checked(rules, column, query, cut)
    asked = Asked(rules, k, columns, filter, SCORE)

    def read(views: Sequence[ReadView]) -> pa.Table:
        tally = Tally(list(sought))
        budget = KEY_BUDGET_BYTES // max(1, len(views))
        load_ahead(views, key_budget_bytes=budget)
        found = [(source, tally.count(parts, source)) for view in views for source, parts in _words(view, rules, column, cut, budget)]
        weights = list(sought.values())
        return asked.best([_scored(source, hits, tally, weights, asked) for source, hits in found], descending=True)

    return whole(load, read)


def _checked(rules: RowRules, column: str, query: str, cut: Cut) -> dict[str, int]:
    """The words of a query, and how often each stands in it."""
    names = rules.schema.names
    if column not in names:
        raise InvalidInputError(f"there is no column {column!r}", hint=f"columns are {', '.join(names)}")
    kind = rules.schema.field(column).type
    if not (types.is_string(kind) or types.is_large_string(kind)):
        texts = [field.name for field in rules.schema if types.is_string(field.type) or types.is_large_string(field.type)]
        raise InvalidInputError(
            f"the column {column!r} has type {kind}, not text", hint=f"columns with text are {', '.join(texts) or 'none'}"
        )
    if not isinstance(query, str):
        raise InvalidInputError(f"the query is {query!r}", hint="a string of words to find")
    words = Counter(words_in(query, cut))
    if not words:
        raise InvalidInputError(f"the query {query!r} has no words", hint="words are letters and numbers; all else separates them")
    return dict(sorted(words.items()))


def _words(view: ReadView, rules: RowRules, column: str, cut: Cut, budget: int) -> Iterator[tuple[Source, Iterable[tuple[int, Words]]]]:
    """All sources of a view that have the column, with their words."""
    fresh = [some for some in view.fresh if some.count]
    number = rules.field_ids[rules.schema.get_field_index(column)]
    in_memory = 0
    for source in sources_of(view, key_budget_bytes=budget):
        if isinstance(source, RunSource):
            name = source.run.names.get(number)
            if name is not None:
                yield source, _of_run(source, name, cut)
            continue
        if in_memory < len(fresh):
            yield source, _numbered(words_of_fresh(fresh[in_memory], rules, column, cut))
        else:
            yield source, _numbered(words_of_puts(view.pending, rules, column, cut))
        in_memory += 1


def _of_run(source: RunSource, name: str, cut: Cut) -> Iterator[tuple[int, Words]]:
    for start, part in zip(source.run.starts, source.run.slices, strict=False):
        for first, words in KEPT.words(part, name, cut):
            yield int(start) + first, words


def _numbered(parts: Iterable[Words]) -> Iterator[tuple[int, Words]]:
    first = 0
    for words in parts:
        yield first, words
        first += words.num_rows


def _scored(source: Source, hits: Found, tally: Tally, weights: Sequence[int], asked: Asked) -> Candidates:
    rows, scores = tally.scores(hits, weights)
    if asked.filter is not None:
        matches = matching_at(source, asked.filter, rows)
        rows, scores = rows[matches], scores[matches]
    if len(rows) > asked.k:
        good = scores >= np.partition(scores, -asked.k)[-asked.k]
        rows, scores = rows[good], scores[good]
    if len(rows) > asked.k and asked.is_ordered(source):
        first = np.argsort(-scores, kind="stable")[: asked.k]
        rows, scores = rows[first], scores[first]
    return Candidates(source, rows, scores)


@dataclass
class Tally:
    """What the sources have of a query's words: how much in all, and where."""

    words: Sequence[str]
    texts: int = 0
    length: int = 0
    """Of all texts together, in words."""
    holding: npt.NDArray[np.int64] = field(init=False)
    """How many texts have each word."""

    def __post_init__(self) -> None:
        self.holding = np.zeros(len(self.words), np.int64)

    def count(self, parts: Iterable[tuple[int, Words]], source: Source) -> Found:
        """Take a source in: its words part by part, each with the number of its first row. Rows beyond the source are passed over."""
        found = Found(len(self.words))
        for first, words in parts:
            size = min(words.num_rows, source.rows - first)
            if size <= 0:
                break
            counts = _both(source.mask, first, size, words.present)
            lengths = words.lengths[:size]
            self.texts += size if counts is None else int(np.count_nonzero(counts))
            self.length += int(lengths.sum() if counts is None else lengths[counts].sum())
            for number, word in enumerate(self.words):
                at, times = words.find(word)
                keep = at < size
                if counts is not None:
                    keep[keep] = counts[at[keep]]
                at, times = at[keep], times[keep]
                self.holding[number] += len(at)
                found.add(number, at + first, times, lengths[at])
        return found

    def scores(self, found: Found, weights: Sequence[int]) -> tuple[Offsets, npt.NDArray[np.float32]]:
        """The rows that have any of the words, in order, and what they are worth; when all sources are in."""
        rows = found.rows()
        total = np.zeros(len(rows), np.float64)
        average = self.length / max(1, self.texts)
        for number, weight in enumerate(weights):  # in one order for every row, so that sums are equal to the last bit
            at, times, lengths = found.of(number)
            rare = np.log1p((self.texts - self.holding[number] + 0.5) / (self.holding[number] + 0.5))
            often = times * (K1 + 1) / (times + K1 * (1 - B + B * lengths / average))
            total[np.searchsorted(rows, at)] += weight * rare * often
        return rows, total.astype(np.float32)


def _both(mask: Mask, first: int, size: int, present: npt.NDArray[np.bool_] | None) -> npt.NDArray[np.bool_] | None:
    """Which rows count and have a text. None: all."""
    part = mask.part(first, size)
    if part is None:
        return None if present is None else present[:size]
    counts: npt.NDArray[np.bool_] = part.to_numpy(zero_copy_only=False)
    return counts if present is None else counts & present[:size]


class Found:
    """Where a source has each word, how often, and how long those texts are."""

    def __init__(self, words: int) -> None:
        self._parts: list[list[tuple[Offsets, Offsets, Offsets]]] = [[] for _ in range(words)]

    def add(self, number: int, rows: Offsets, times: Offsets, lengths: Offsets) -> None:
        if len(rows):
            self._parts[number].append((rows, times, lengths))

    def of(self, number: int) -> tuple[Offsets, Offsets, Offsets]:
        parts = self._parts[number]
        if not parts:
            nothing = np.zeros(0, np.int64)
            return nothing, nothing, nothing
        rows, times, lengths = (np.concatenate([part[i] for part in parts]) for i in range(3))
        return rows, times, lengths

    def rows(self) -> Offsets:
        some = [rows for parts in self._parts for rows, _, _ in parts]
        if not some:
            return np.zeros(0, np.int64)
        rows: Offsets = np.sort(np.concatenate(some))
        different: Offsets = rows[np.append(True, rows[1:] != rows[:-1])]
        return different


class KeptWords:
    """The words of runs, as many as fit. Slices never change, so what was made of one stays right while it is open.

    Not locked: every step leaves it whole, and the worst that two at once can do is to make the same words twice.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._kept: OrderedDict[tuple[int, int, str, Cut], tuple[ref[Slice], Words]] = OrderedDict()

    @property
    def nbytes(self) -> int:
        return sum(words.nbytes for _, words in list(self._kept.values()))

    def words(self, part: Slice, column: str, cut: Cut) -> Iterator[tuple[int, Words]]:
        """Of all rows of a slice, part by part, with the number of each part's first row."""
        for first in range(0, part.num_rows, _PART_ROWS):
            yield first, self._part(part, first, column, cut)

    def _part(self, part: Slice, first: int, column: str, cut: Cut) -> Words:
        key = (id(part), first, column, cut)
        known = self._kept.get(key)
        if known is not None and known[0]() is part:  # a number is given again when its object is gone
            CACHE_HITS.add(1, "words")
            self._kept.pop(key, None)
            self._kept[key] = known  # the last to go
            return known[1]
        CACHE_MISSES.add(1, "words")
        batches = list(part.scan([column], start=first, stop=first + _PART_ROWS))
        texts = [batch.column(0).cast(pa.large_string()) for batch in batches]
        words = words_of(texts[0] if len(texts) == 1 else pa.concat_arrays(texts), cut)
        if words.nbytes <= self.bytes_max:
            self._kept[key] = (ref(part), words)
            self._make_room(key)
        return words

    def _make_room(self, newest: tuple[int, int, str, Cut]) -> None:
        for key, (part, _) in list(self._kept.items()):
            if part() is None:
                self._kept.pop(key, None)
        total = self.nbytes
        for key, (_, words) in list(self._kept.items()):
            if total <= self.bytes_max:
                return
            if key != newest and self._kept.pop(key, None) is not None:
                total -= words.nbytes


KEPT = KeptWords(KEPT_BYTES_MAX)
watch(KEPT, lambda kept: [(CACHE_BYTES, kept.nbytes, ("words",))])
