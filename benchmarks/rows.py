"""The rows that all benchmarks write: id, ts, a name of 13 characters, a number, 100 random bytes."""

from __future__ import annotations

import os

import numpy as np
import pyarrow as pa

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


def rows(count: int, first_id: int = 0) -> pa.RecordBatch:
    """``count`` rows with consecutive ids; the payload does not compress."""
    ids = np.arange(first_id, first_id + count, dtype=np.int64)
    names = pa.array([f"name-{i % 100_000_000:08d}" for i in range(first_id, first_id + count)], pa.string())
    offsets = pa.py_buffer(np.arange(0, 100 * count + 1, 100, dtype=np.int32))
    payload = pa.Array.from_buffers(pa.binary(), count, [None, offsets, pa.py_buffer(os.urandom(100 * count))])
    return pa.record_batch([pa.array(ids), pa.array(ids + 1_700_000_000_000), names, pa.array(ids * 0.5), payload], schema=SCHEMA)


def data_bytes(batch: pa.RecordBatch) -> int:
    """What a batch's values take, the measure of all MB/s."""
    return int(batch.nbytes)
