"""The rows that all benchmarks write: id, ts, a name of 13 characters, a number, 100 random bytes.

Documents, for the indexes, have an id, a text of ten words and a vector of 64 floats.
"""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("ts", pa.int64()),
        pa.field("name", pa.string()),
        pa.field("v", pa.float64()),
        pa.field("payload", pa.binary()),
    ]
)
KEY = "id"
ROW_BYTES = 8 + 8 + 13 + 8 + 100
VECTOR_LENGTH = 64
DOCUMENTS = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("body", pa.string()),
        pa.field("embedding", pa.list_(pa.float32(), VECTOR_LENGTH)),
    ]
)
_WORDS = pa.array([f"word{number}" for number in range(5000)])
_WORDS_PER_TEXT = 10
_VERSION_STEP = 1e9

Ids = npt.NDArray[np.int64]


def rows(count: int, first_id: int = 0) -> pa.RecordBatch:
    """``count`` rows with consecutive ids; the payload does not compress."""
    return rows_of(np.arange(first_id, first_id + count, dtype=np.int64))


def rows_of(ids: Ids, version: int = 0) -> pa.RecordBatch:
    """Rows with these ids; ``v`` tells the version, so a sum tells whether the newest rows were read."""
    count = len(ids)
    offsets = pa.py_buffer(np.arange(0, 100 * count + 1, 100, dtype=np.int32))
    payload = pa.Array.from_buffers(pa.binary(), count, [None, offsets, pa.py_buffer(os.urandom(100 * count))])
    return pa.record_batch(
        [pa.array(ids), pa.array(ids + 1_700_000_000_000), _names(ids), pa.array(values_of(ids, version)), payload], schema=SCHEMA
    )


def values_of(ids: Ids, version: int = 0) -> npt.NDArray[np.float64]:
    """The column ``v`` of these rows."""
    return np.asarray(ids * 0.5 + version * _VERSION_STEP, dtype=np.float64)


def _names(ids: Ids) -> pa.StringArray:
    """name-00000042, without a Python object per row."""
    text = np.empty((len(ids), 13), dtype=np.uint8)
    text[:, :5] = np.frombuffer(b"name-", dtype=np.uint8)
    rest = ids % 100_000_000
    for place in range(12, 4, -1):
        rest, digit = np.divmod(rest, 10)
        text[:, place] = digit + ord("0")
    offsets = np.arange(0, 13 * len(ids) + 1, 13, dtype=np.int32)
    return pa.StringArray.from_buffers(len(ids), pa.py_buffer(offsets), pa.py_buffer(text))


def documents(ids: Ids, random: np.random.Generator) -> pa.RecordBatch:
    """Documents with these ids; few words are frequent and many are rare."""
    count = len(ids)
    words = _WORDS.take(pa.array(random.zipf(1.3, count * _WORDS_PER_TEXT) % len(_WORDS)))
    lists = pa.ListArray.from_arrays(np.arange(0, count * _WORDS_PER_TEXT + 1, _WORDS_PER_TEXT, dtype=np.int32), words)
    vectors = pa.array(random.random(count * VECTOR_LENGTH, dtype=np.float32))
    return pa.record_batch(
        [pa.array(ids), pc.binary_join(lists, " "), pa.FixedSizeListArray.from_arrays(vectors, VECTOR_LENGTH)], schema=DOCUMENTS
    )


def data_bytes(batch: pa.RecordBatch) -> int:
    """What a batch's values take, the measure of all MB/s."""
    return int(batch.nbytes)
