"""An entry of one log as an entry of another.

Owns: the copy. Does not own: what is copied where (clone).
"""

from __future__ import annotations

import pyarrow as pa

from headgate.wal.entry import IPC_OPTIONS, SEAL_BYTES, checked_stream, finish_data


def restamped(data: memoryview, key: str, *, wal_id: str, shard: str) -> memoryview:
    """A data entry as an entry of another log: the same rows at the same place, written by the same writer. The same bytes every time."""
    source = pa.ipc.open_stream(pa.py_buffer(checked_stream(data, key)))
    stamped = {**source.schema.metadata, b"headgate.wal_id": wal_id.encode(), b"headgate.shard": shard.encode()}
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, source.schema.with_metadata(stamped), options=IPC_OPTIONS) as writer:
        for rows, custom in source.iter_batches_with_custom_metadata():
            writer.write_batch(rows.replace_schema_metadata(stamped), custom)
    stream = sink.getvalue()
    buffer = pa.allocate_buffer(stream.size + SEAL_BYTES + 64)
    view = memoryview(buffer).cast("B")
    view[: stream.size] = memoryview(stream).cast("B")
    return finish_data(view, stream.size)
