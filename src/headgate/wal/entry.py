"""The bytes of a WAL entry.

    Arrow IPC stream · zero padding · trailer (length u64, CRC-32 u32, magic "HGW1"), little endian

Owns: the encoding. Does not own: names, or what an entry means for the chain.

Any Arrow reader opens the stream and ignores what follows it. The length counts stream and
padding, the checksum covers both. Who wrote it and where it belongs stands in the schema's
metadata, so an object under a wrong name is noticed; what each batch does (upsert or delete,
producer, sequence) stands in the batch's own.

A seal is always ``SEAL_BYTES`` long and a data entry always longer: a listing alone tells
them apart, which is how collection can know, without a read, that it never deletes a seal.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import pyarrow as pa

from headgate.errors import CorruptEntryError, InvalidInputError, UnsupportedFormatError

ENTRY_FORMAT = 1
SEAL_BYTES = 1024
TRAILER = struct.Struct("<QI4s")
TRAILER_MAGIC = b"HGW1"
_P = b"headgate."
_P_BYTES = len(_P)
_SEAL_SCHEMA = pa.schema([])
_GROW_MAX = 24
_NARROW_BYTES, _SMALL_BATCH_BYTES = 256, 1 << 16
_MESSAGE_BYTES, _COLUMN_BYTES = 256, 32
IPC_OPTIONS = pa.ipc.IpcWriteOptions()  # made once: without it every stream looks into the environment

Op = Literal["upsert", "delete"]


@dataclass(frozen=True, slots=True)
class Put:
    """The rows of one put in one shard: what they do, and who counted them.

    The rows of a delete have the key columns only.
    """

    rows: pa.RecordBatch = field(repr=False)
    op: Op = "upsert"
    producer: str | None = None
    sequence: int | None = None
    schema: pa.Schema | None = field(default=None, repr=False, compare=False)
    """What the rows were checked against, which says which columns these are. None: their own does."""

    @property
    def columns(self) -> pa.Schema:
        return self.rows.schema if self.schema is None else self.schema


@dataclass(frozen=True, slots=True)
class Header:
    """Where an entry belongs and who wrote it."""

    wal_id: str
    shard: str
    epoch: int
    position: int
    kind: Literal["data", "seal"]
    entry_id: str
    writer_id: str
    durable_through: int
    """Up to this position ALL entries were durable when this one was written."""
    time: float
    by_epoch: int = 0
    """A seal's: the epoch of the claimant that put it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the log, read back."""

    header: Header
    puts: tuple[Put, ...] = field(default=(), repr=False)
    size_bytes: int = 0

    @property
    def epoch(self) -> int:
        return self.header.epoch

    @property
    def position(self) -> int:
        return self.header.position

    @property
    def kind(self) -> Literal["data", "seal"]:
        return self.header.kind

    @property
    def time(self) -> float:
        """When it was written, in seconds since 1970, by the writer's clock."""
        return self.header.time

    @property
    def batches(self) -> list[pa.RecordBatch]:
        """The rows, a batch per put, in the order they were put; ``puts`` says what each does."""
        return [put.rows for put in self.puts]

    @property
    def is_seal(self) -> bool:
        return self.header.kind == "seal"


def metadata_of(header: Header) -> dict[bytes, bytes]:
    return {
        b"headgate.format": b"%d" % ENTRY_FORMAT,
        b"headgate.wal_id": header.wal_id.encode(),
        b"headgate.shard": header.shard.encode(),
        b"headgate.epoch": b"%d" % header.epoch,
        b"headgate.position": b"%d" % header.position,
        b"headgate.kind": header.kind.encode(),
        b"headgate.entry_id": header.entry_id.encode(),
        b"headgate.writer_id": header.writer_id.encode(),
        b"headgate.durable_through": b"%d" % header.durable_through,
        b"headgate.time": repr(header.time).encode(),
        b"headgate.by_epoch": b"%d" % header.by_epoch,
    }


def stamps(position: int, entry_id: str, durable_through: int, time: float) -> dict[bytes, bytes]:
    """The part of the metadata in which the entries of one writer differ."""
    return {
        b"headgate.position": b"%d" % position,
        b"headgate.entry_id": entry_id.encode(),
        b"headgate.durable_through": b"%d" % durable_through,
        b"headgate.time": f"{time:.7f}".encode(),
    }


_PLAIN_UPSERT = pa.KeyValueMetadata({b"headgate.op": b"upsert"})


def _put_metadata(put: Put) -> pa.KeyValueMetadata | dict[bytes, bytes]:
    if put.producer is None and put.op == "upsert":
        return _PLAIN_UPSERT
    metadata = {b"headgate.op": put.op.encode()}
    if put.producer is not None:
        metadata[b"headgate.producer"] = put.producer.encode()
        metadata[b"headgate.sequence"] = str(put.sequence).encode()
    if put.op == "delete":
        metadata[b"headgate.columns"] = json.dumps(put.rows.schema.names).encode()
    return metadata


def encoded_bytes(rows: pa.RecordBatch) -> int:
    """What a batch takes in an entry, nearly: its IPC message."""
    held = int(rows.get_total_buffer_size())
    if held <= _NARROW_BYTES * rows.num_rows + _MESSAGE_BYTES and held <= _SMALL_BATCH_BYTES:
        # Few bytes a row: so these are all that its buffers hold, or nearly. Arrow's own count takes ten times as long, and lets go
        # of the interpreter: where many threads put, each of them would be woken for nothing.
        return held + _MESSAGE_BYTES + _COLUMN_BYTES * int(rows.num_columns)
    return int(pa.ipc.get_record_batch_size(rows))


def encode_entry(header: Header, schema: pa.Schema, puts: Sequence[Put], size_hint_bytes: int = 0) -> memoryview:
    """The bytes of a data entry, all of whose rows are written with ``schema``.

    ``size_hint_bytes`` is the sum of ``encoded_bytes`` of the puts, if the caller knows it: then
    the rows are copied once, into memory of the right size.
    """
    return encode_stamped(metadata_of(header), schema, puts, size_hint_bytes)


def encode_stamped(metadata: dict[bytes, bytes], schema: pa.Schema, puts: Sequence[Put], size_hint_bytes: int = 0) -> memoryview:
    """The same, for a writer that keeps the metadata of its entries at hand."""
    size = size_hint_bytes or sum(encoded_bytes(put.rows) for put in puts)
    capacity = size + 4096 + 512 * len(puts) + 128 * len(schema)
    stamped = schema.with_metadata(metadata)
    for _ in range(_GROW_MAX):
        buffer = pa.allocate_buffer(capacity)
        sink = pa.FixedSizeBufferWriter(buffer)
        try:
            with pa.ipc.new_stream(sink, stamped, options=IPC_OPTIONS) as writer:
                for put in puts:
                    write_put(writer, put, schema)
        except (OSError, pa.ArrowInvalid) as error:
            if "size" not in str(error) and "bounds" not in str(error) and "beyond" not in str(error):
                raise
            capacity *= 2  # long names, or a delete padded with columns: more room, once more
            continue
        return finish_data(memoryview(buffer).cast("B"), sink.tell())
    raise InvalidInputError(f"an entry of {capacity} bytes cannot be encoded", hint="put fewer rows at a time")


def write_put(writer: pa.RecordBatchStreamWriter, put: Put, schema: pa.Schema) -> None:
    rows = put.rows if put.op == "upsert" else _padded(put.rows, schema)
    writer.write_batch(rows, _put_metadata(put))


def finish_data(view: memoryview, stream_bytes: int) -> memoryview:
    """A data entry whose stream stands in ``view``: with padding and trailer, always longer than a seal."""
    return _finish(view, stream_bytes, SEAL_BYTES + 8)


def _padded(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The key columns of a delete among nulls: one stream has one schema."""
    names = set(rows.schema.names)
    columns = [rows.column(f.name) if f.name in names else pa.nulls(rows.num_rows, f.type) for f in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def encode_seal(header: Header) -> memoryview:
    """The bytes of a seal."""
    buffer = pa.allocate_buffer(2 * SEAL_BYTES)
    sink = pa.FixedSizeBufferWriter(buffer)
    with pa.ipc.new_stream(sink, _SEAL_SCHEMA.with_metadata(metadata_of(header))):
        pass
    sealed = _finish(memoryview(buffer).cast("B"), sink.tell(), SEAL_BYTES)
    assert sealed.nbytes == SEAL_BYTES, "names are bounded, so a seal fits its size"
    return sealed


def _finish(view: memoryview, stream_bytes: int, least_bytes: int) -> memoryview:
    length = max(stream_bytes, least_bytes - TRAILER.size)
    view[stream_bytes:length] = bytes(length - stream_bytes)
    view[length : length + TRAILER.size] = TRAILER.pack(length, zlib.crc32(view[:length]), TRAILER_MAGIC)
    return view[: length + TRAILER.size]


def decode_entry(data: memoryview, key: str, wal_id: str, shard: str, epoch: int, position: int) -> Entry:
    """Check and read an entry; it must be the one that its name says.

    Raises:
        CorruptEntryError: a flipped bit, a cut tail, or an object that belongs elsewhere.
    """
    stream = checked_stream(data, key)
    try:
        reader = pa.ipc.open_stream(pa.py_buffer(stream))
        header = _header(reader.schema.metadata or {}, key)
        puts = tuple(_read_puts(reader))
    except (CorruptEntryError, UnsupportedFormatError):
        raise
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError, RecursionError, EOFError) as error:
        raise CorruptEntryError(f"{key} is whole, but is no entry: {error}", object=key) from None
    if (header.wal_id, header.shard, header.epoch, header.position) != (wal_id, shard, epoch, position):
        raise CorruptEntryError(
            f"{key} holds entry {header.epoch}/{header.position} of shard {header.shard}, WAL {header.wal_id}", object=key
        )
    if header.kind == "seal" and (puts or data.nbytes != SEAL_BYTES):
        raise CorruptEntryError(f"{key} says that it is a seal and is not", object=key)
    return Entry(header, puts, data.nbytes)


def checked_stream(data: memoryview, key: str) -> memoryview:
    """The stream, if the trailer fits it."""
    size = data.nbytes
    if size < SEAL_BYTES:
        raise CorruptEntryError(f"{key} is cut: {size} bytes", object=key)
    length, checksum, magic = TRAILER.unpack(data[size - TRAILER.size :])
    if magic != TRAILER_MAGIC or length != size - TRAILER.size:
        raise CorruptEntryError(f"{key} is damaged: its trailer does not fit its {size} bytes", object=key)
    stream = data[:length]
    if zlib.crc32(stream) != checksum:
        raise CorruptEntryError(f"{key} is damaged: its checksum does not fit its {size} bytes", object=key)
    return stream


def _header(metadata: dict[bytes, bytes], key: str) -> Header:
    got = {name[_P_BYTES:].decode(): value.decode() for name, value in metadata.items() if name.startswith(_P)}
    if int(got["format"]) > ENTRY_FORMAT:
        raise UnsupportedFormatError(f"{key} has entry format {got['format']}", hint="upgrade headgate to read this table")
    kind = got["kind"]
    if kind not in ("data", "seal"):
        raise ValueError(f"kind {kind!r}")
    return Header(
        wal_id=got["wal_id"],
        shard=got["shard"],
        epoch=int(got["epoch"]),
        position=int(got["position"]),
        kind="seal" if kind == "seal" else "data",
        entry_id=got["entry_id"],
        writer_id=got["writer_id"],
        durable_through=int(got["durable_through"]),
        time=float(got["time"]),
        by_epoch=int(got["by_epoch"]),
    )


def _read_puts(reader: pa.RecordBatchStreamReader) -> Iterator[Put]:
    for rows, custom in reader.iter_batches_with_custom_metadata():
        # The stream's schema carries the entry's header; the rows' need not.
        yield put_of(rows.replace_schema_metadata(None), custom)


def is_plain_upsert(put: Put) -> bool:
    """Does its batch say nothing but that it is an upsert?"""
    return put.op == "upsert" and put.producer is None


def put_of(rows: pa.RecordBatch, custom: pa.KeyValueMetadata | None) -> Put:
    """A batch and its own metadata, as it was put."""
    if custom is not None and custom == _PLAIN_UPSERT:
        return Put(rows)
    metadata = dict(custom or {})
    op = metadata[b"headgate.op"].decode()
    producer = metadata.get(b"headgate.producer")
    if op == "delete":
        rows = rows.select(json.loads(metadata[b"headgate.columns"]))
    elif op != "upsert":
        raise ValueError(f"op {op!r}")
    if producer is None:
        return Put(rows, "delete" if op == "delete" else "upsert")
    return Put(rows, "delete" if op == "delete" else "upsert", producer.decode(), int(metadata[b"headgate.sequence"]))
