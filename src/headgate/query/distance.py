"""Distances between vectors, and the nearest of many.

Owns: the metrics, checking a query vector, the best rows of a stream of chunks. Does not own:
which rows count, or where they are (vector).

The numbers are Lance's: ``l2`` is the square of the distance, ``cosine`` is 1 - cos, ``dot`` is
1 - the product. They are float32, and the arithmetic is too, unless the column is wider. A row's
number depends on nothing but its own vector and the query: it is the same in every tier, and in
chunks of any size. So no sums by matrix products, whose rounding depends on their shape: a product
row by row takes the same time, stays in one thread, and holds no lock.

A row without a distance is not found: no vector, a null or NaN in it, or, for cosine, nothing but zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as types

from headgate.errors import InvalidInputError

Metric = Literal["l2", "cosine", "dot"]
METRICS: tuple[str, ...] = get_args(Metric)

Floats = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]
Offsets = npt.NDArray[np.int64]

_CHUNK_BYTES = 1 << 18  # stays in the processor's cache between the steps
_NONE = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Probe:
    """A query vector, checked, in the numbers its column is compared in."""

    column: str
    vector: Floats
    metric: Metric

    @property
    def dimension(self) -> int:
        return len(self.vector)

    def distances(self, vectors: Floats) -> npt.NDArray[np.float32]:
        """Of every row of a matrix, in chunks that fit the cache. NaN: none."""
        found = np.empty(len(vectors), np.float32)
        step = max(16, _CHUNK_BYTES // max(1, self.dimension * self.vector.itemsize))
        with np.errstate(all="ignore"):  # overflow is infinity, and zeros have no direction: that is what is meant
            for at in range(0, len(vectors), step):
                found[at : at + step] = self._of(vectors[at : at + step])
        return found

    def _of(self, vectors: Floats) -> Floats:
        query = self.vector
        if vectors.dtype != query.dtype:
            vectors = vectors.astype(query.dtype)
        if self.metric == "l2":
            apart = vectors - query
            return np.asarray(np.vecdot(apart, apart))
        product = np.vecdot(vectors, query)
        if self.metric == "cosine":
            product = product / (np.sqrt(np.vecdot(vectors, vectors)) * np.sqrt(np.vecdot(query, query)))
        return np.asarray(1 - product)


def probe(schema: pa.Schema, column: str, query: Any, metric: str) -> Probe:
    """Check what to look for.

    Raises:
        InvalidInputError: no such column, no vectors in it, a metric, dimension or number that cannot be.
    """
    if column not in schema.names:
        raise InvalidInputError(f"there is no column {column!r}", hint=f"columns are {', '.join(schema.names)}")
    kind = schema.field(column).type
    if not is_vector(kind):
        vectors = [field.name for field in schema if is_vector(field.type)]
        raise InvalidInputError(
            f"the column {column!r} has type {kind}, not vectors",
            hint=f"columns with vectors are {', '.join(vectors)}"
            if vectors
            else "vectors are fixed-size lists, e.g. pa.list_(pa.float32(), 64)",
        )
    if metric not in METRICS:
        raise InvalidInputError(f"the metric is {metric!r}", hint='"l2", "cosine" or "dot"')
    narrow = types.is_float32(kind.value_type) or types.is_float16(kind.value_type)
    try:
        if isinstance(query, pa.Array | pa.ChunkedArray | pa.ListScalar | pa.FixedSizeListScalar):
            query = query.to_pylist() if isinstance(query, pa.Array | pa.ChunkedArray) else query.as_py()
        with np.errstate(over="ignore"):  # what is too large for the column becomes infinite, and is refused below
            vector = np.asarray(query, np.float32 if narrow else np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInputError(f"the query is no vector: {error}", hint="a list or numpy array of numbers") from None
    if vector.shape != (kind.list_size,):
        raise InvalidInputError(
            f"the query has the shape {vector.shape}, and {column!r} has vectors of {kind.list_size} numbers",
            hint=f"pass one vector of {kind.list_size} numbers",
        )
    if not np.isfinite(vector).all():
        raise InvalidInputError("the query has a NaN or an infinity in it", hint="pass finite numbers")
    if metric == "cosine" and not vector.any():
        raise InvalidInputError("the query is all zeros, which have no direction", hint='pass another one, or use the metric "l2"')
    return Probe(column, vector, metric)  # type: ignore[arg-type]


def is_vector(kind: pa.DataType) -> bool:
    """Fixed-size lists of numbers."""
    if not types.is_fixed_size_list(kind):
        return False
    return bool(types.is_floating(kind.value_type) or types.is_integer(kind.value_type))


def matrix_of(vectors: pa.FixedSizeListArray) -> tuple[Floats, Mask | None]:
    """A row of numbers for each vector, without a copy where there are no nulls, and which rows have one; None: all."""
    width = vectors.type.list_size
    values = vectors.values.slice(vectors.offset * width, len(vectors) * width)
    valid: Mask | None = None
    if vectors.null_count:
        valid = vectors.is_valid().to_numpy(zero_copy_only=False)
    if values.null_count:
        whole = values.is_valid().to_numpy(zero_copy_only=False).reshape(len(vectors), width).all(axis=1)
        valid = whole if valid is None else valid & whole
    _, data = values.buffers()
    kind = values.type.to_pandas_dtype()
    if data is None or not len(vectors):
        return np.zeros((len(vectors), width), kind), valid
    flat = np.frombuffer(data, kind, len(vectors) * width, values.offset * np.dtype(kind).itemsize)
    return flat.reshape(len(vectors), width), valid


class Best:
    """The ``k`` least of numbered rows that come in chunks, and all that tie with the last of them.

    ``ordered``: of equal distance the lower number comes first, so ties beyond ``k`` need not be kept.
    """

    def __init__(self, k: int, *, ordered: bool) -> None:
        self._k, self._ordered = k, ordered
        self._limit = np.float32(np.inf)
        self._kept: list[tuple[npt.NDArray[np.float32], Offsets]] = []
        self._waiting = 0

    def add(self, distances: npt.NDArray[np.float32], numbers: Offsets | None = None, first: int = 0) -> None:
        """Rows ``first``, ``first + 1`` …, or those with these numbers. NaN is passed over."""
        good = np.flatnonzero(distances <= self._limit)
        if len(good) > 4 * self._k:  # far too many: cut before they are copied
            self._limit = np.partition(distances[good], self._k - 1)[self._k - 1]
            good = good[distances[good] <= self._limit]
        if not len(good):
            return
        self._kept.append((distances[good], good + first if numbers is None else numbers[good]))
        self._waiting += len(good)
        if self._waiting > 8 * self._k + 4096:
            self._cut()

    def _cut(self) -> None:
        distances = np.concatenate([d for d, _ in self._kept])
        numbers = np.concatenate([n for _, n in self._kept])
        if len(distances) > self._k:
            self._limit = np.partition(distances, self._k - 1)[self._k - 1]
            good = distances <= self._limit
            distances, numbers = distances[good], numbers[good]
        if self._ordered and len(distances) > self._k:
            order = np.lexsort((numbers, distances))[: self._k]
            distances, numbers = distances[order], numbers[order]
        self._kept, self._waiting = [(distances, numbers)], 0

    def result(self) -> tuple[npt.NDArray[np.float32], Offsets]:
        """Distances and numbers, nearest first; what ties with the last one too, unless ordered."""
        if not self._kept:
            return np.zeros(0, np.float32), _NONE
        self._cut()
        distances, numbers = self._kept[0]
        order = np.lexsort((numbers, distances))
        return distances[order], numbers[order]
