"""Rows and configs that the tests of stores share."""

from __future__ import annotations

import pyarrow as pa

import headgate as hg

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("value", pa.string())])
WAL_ONLY = hg.ShardWriterConfig(enable_memtable=False, wal_persist_retry_base_delay=0.005)


def rows(*ids: int, value: str = "") -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(ids, pa.int64()), pa.array([value or f"v{i}" for i in ids])], schema=SCHEMA)


def ids_of(shard: hg.Shard, start: int | None = None) -> list[int]:
    return [number for entry in hg.WalTailer(shard).read(start) for batch in entry.batches for number in batch.column("id").to_pylist()]
