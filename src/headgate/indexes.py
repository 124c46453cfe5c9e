"""Indexes that a table keeps: what they are, and which of them can be kept.

Owns: making and checking them. Does not own: their maintenance or their use (query).

A table's indexes are fixed when it is created. They follow their columns when these are renamed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import pyarrow as pa
import pyarrow.types as types

from headgate.columnar import VectorColumn
from headgate.errors import InvalidInputError
from headgate.manifest.model import AnyIndex, ScalarIndex, TextIndex, VectorIndex

APPROXIMATE_FROM_ROWS = 250_000
"""About half of a slice, if it is full. Looking at so many short vectors takes some 40 ms."""
_METRICS = ("l2", "cosine", "dot")
_SCALARS = (
    types.is_boolean, types.is_integer, types.is_floating, types.is_decimal128, types.is_date, types.is_time, types.is_timestamp,
    types.is_duration, types.is_string, types.is_large_string, types.is_binary, types.is_large_binary, types.is_fixed_size_binary,
)  # fmt: skip


def vector_index(
    column: str, *, metric: Literal["l2", "cosine", "dot"] = "l2", approximate_from: int | None = APPROXIMATE_FROM_ROWS
) -> VectorIndex:
    """For ``table.search``: the rows whose vectors are nearest to a given one.

    Args:
        column: vectors of one length: a fixed-size list of float16, float32 or float64.
        metric: "l2" (squared Euclidean distance), "cosine" (1 - cosine similarity) or "dot" (1 - dot product).
        approximate_from: compaction builds an index on slices of at least so many rows (a slice has about half a million
            at most), and searches use it: faster, and some of the nearest may be missed. None: searches are always exact.
    """
    if metric not in _METRICS:
        raise InvalidInputError(f"the metric of the index on {column!r} is {metric!r}", hint=f"one of {', '.join(_METRICS)}")
    if approximate_from is not None and (
        isinstance(approximate_from, bool) or not isinstance(approximate_from, int) or approximate_from < 1
    ):
        raise InvalidInputError(f"approximate_from is {approximate_from!r}", hint="a number of rows, or None for exact searches only")
    return VectorIndex(column=_checked_name(column), metric=metric, approximate_from=approximate_from)


def indexed_scalars(indexes: Iterable[AnyIndex]) -> tuple[str, ...]:
    return tuple(index.column for index in indexes if isinstance(index, ScalarIndex))


def indexed_vectors(indexes: Iterable[AnyIndex]) -> tuple[VectorColumn, ...]:
    """What large slices are to have an index of."""
    return tuple(
        VectorColumn(index.column, index.metric, index.approximate_from)
        for index in indexes
        if isinstance(index, VectorIndex) and index.approximate_from is not None
    )


def text_index(column: str, *, lower_case: bool = True, ascii_folding: bool = False) -> TextIndex:
    """For ``table.search_text``: the rows whose text has given words, ranked by BM25.

    Args:
        column: strings. Words are runs of letters and digits.
        lower_case: "Word" and "word" are the same.
        ascii_folding: "café" and "cafe" are the same.
    """
    if not isinstance(lower_case, bool) or not isinstance(ascii_folding, bool):
        raise InvalidInputError(
            f"an option of the index on {column!r} is not True or False", hint="lower_case and ascii_folding are switches"
        )
    return TextIndex(column=_checked_name(column), lower_case=lower_case, ascii_folding=ascii_folding)


def scalar_index(column: str) -> ScalarIndex:
    """For filters on a column that is not the key: equality and ranges."""
    return ScalarIndex(column=_checked_name(column))


def _checked_name(column: Any) -> str:
    if not isinstance(column, str) or not column:
        raise InvalidInputError(f"an index is on {column!r}", hint="pass the name of one column")
    return column


def check_indexes(indexes: Sequence[Any] | None, schema: pa.Schema) -> tuple[AnyIndex, ...]:
    """The indexes that a table gets, refused if one of them could not be kept (I05).

    Raises:
        InvalidInputError: an unknown column, a type that cannot be indexed so, or the same index twice.
    """
    if indexes is None:
        return ()
    if isinstance(indexes, str | bytes) or not isinstance(indexes, Sequence):
        raise InvalidInputError(f"the indexes are {indexes!r}", hint='pass a list, e.g. [hg.scalar_index("ts")]')
    seen: set[tuple[str, str]] = set()
    for index in indexes:
        if not isinstance(index, VectorIndex | TextIndex | ScalarIndex):
            raise InvalidInputError(f"{index!r} is no index", hint="use hg.vector_index, hg.text_index or hg.scalar_index")
        if index.column not in schema.names:
            raise InvalidInputError(
                f"the {index.kind} index is on a column {index.column!r} that the table has not",
                hint=f"columns are {', '.join(schema.names)}",
            )
        if (index.kind, index.column) in seen:
            raise InvalidInputError(f"there are two {index.kind} indexes on {index.column!r}", hint="leave one out")
        seen.add((index.kind, index.column))
        _check_type(index, schema.field(index.column).type)
    return tuple(indexes)


def _check_type(index: VectorIndex | TextIndex | ScalarIndex, kind: pa.DataType) -> None:
    if isinstance(index, VectorIndex):
        fits = types.is_fixed_size_list(kind) and types.is_floating(kind.value_type)
        hint = "a vector index needs a fixed-size list of floats, e.g. pa.list_(pa.float32(), 128)"
    elif isinstance(index, TextIndex):
        fits = types.is_string(kind) or types.is_large_string(kind)
        hint = "a text index needs a column of strings"
    else:
        fits = any(check(kind) for check in _SCALARS)
        hint = "a scalar index needs plain values: numbers, strings, bytes, booleans, dates or times"
    if not fits:
        raise InvalidInputError(f"the column {index.column!r} has type {kind}, which cannot have a {index.kind} index", hint=hint)
