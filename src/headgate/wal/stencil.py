"""Encoding small entries fast: the part that is always the same is made once.

Owns: reuse. Does not own: the format (entry). What comes out is, byte for byte, what
``encode_stamped`` makes; every new head is checked against it.

Most of the time that a small entry takes goes into its schema message, which differs from the
last entry's in four values of the metadata, and into opening an Arrow stream. So the message is
kept, as a head whose four values are filled in, and the stream stays open: it writes the batches
of one entry after another's onto a sheet of memory, from which each is copied behind its head.
Values change their width rarely (a position, every power of ten); then there is a new head.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from headgate.wal.entry import IPC_OPTIONS, SEAL_BYTES, Put, encode_stamped, finish_data, stamps, write_put

_ENTRY_BYTES_MAX = 32 << 10
_SHEET_BYTES = 1 << 20
_SHEETS_MAX = 8
_BATCH_SLACK_BYTES = 512
_TAIL_BYTES = 64
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


class StencilEncoder:
    """Encodes the entries of one writer. Safe for many threads: each takes a sheet and puts it back."""

    def __init__(self, metadata: dict[bytes, bytes]) -> None:
        self._metadata = metadata
        self._head: _Head | None = None
        self._sheets: list[_Sheet] = []
        self._is_plain = False

    def encode(
        self, position: int, entry_id: str, durable_through: int, time: float, schema: pa.Schema, puts: Sequence[Put], size_bytes: int
    ) -> memoryview:
        """The entry's bytes. ``size_bytes`` is the sum of ``encoded_bytes`` of the puts; 0: unknown."""
        values = stamps(position, entry_id, durable_through, time)
        room = size_bytes + _BATCH_SLACK_BYTES * len(puts)
        if self._is_plain or not size_bytes or room > _ENTRY_BYTES_MAX:
            return encode_stamped({**self._metadata, **values}, schema, puts, size_bytes)
        head = self._head
        if head is not None and head.schema is schema and head.fits(values):
            body = self._onto_sheet(head, values, puts, room)
            return body if body is not None else encode_stamped({**self._metadata, **values}, schema, puts, size_bytes)
        body = encode_stamped({**self._metadata, **values}, schema, puts, size_bytes)
        head = _Head(schema, {**self._metadata, **values}, list(values))
        if self._onto_sheet(head, values, puts, room) == body:
            self._head = head
        else:  # another Arrow, another layout: the plain way is always right
            self._is_plain = True
        return body

    def _onto_sheet(self, head: _Head, values: dict[bytes, bytes], puts: Sequence[Put], room: int) -> memoryview | None:
        """None: there was no room."""
        try:
            sheet = self._sheets.pop()
        except IndexError:
            sheet = _Sheet(head.schema)
        if sheet.schema is not head.schema or not sheet.has_room(room):
            sheet = _Sheet(head.schema)
        batches = sheet.write(puts)
        if batches is None:
            return None
        body = head.filled(values, batches)
        if len(self._sheets) < _SHEETS_MAX:
            self._sheets.append(sheet)
        return body


class _Head:
    """A schema message, and where in it the values stand that differ from entry to entry."""

    __slots__ = ("_bytes", "_places", "_widths", "schema")

    def __init__(self, schema: pa.Schema, metadata: dict[bytes, bytes], names: Sequence[bytes]) -> None:
        self.schema = schema
        self._bytes = bytes(schema.with_metadata(metadata).serialize())
        self._places = [place_of(name, schema, metadata) for name in names]
        self._widths = [len(metadata[name]) for name in names]

    def fits(self, values: dict[bytes, bytes]) -> bool:
        return list(map(len, values.values())) == self._widths

    def filled(self, values: dict[bytes, bytes], batches: memoryview) -> memoryview:
        start = len(self._bytes)
        end = start + len(batches)
        body = memoryview(bytearray(max(end, SEAL_BYTES) + _TAIL_BYTES))
        body[:start] = self._bytes
        for value, place in zip(values.values(), self._places):
            body[place] = value
        body[start:end] = batches
        body[end : end + len(_END_OF_STREAM)] = _END_OF_STREAM
        return finish_data(body, end + len(_END_OF_STREAM))


def place_of(name: bytes, schema: pa.Schema, metadata: dict[bytes, bytes]) -> slice:
    """Where a value stands: where two messages with different values differ."""
    width = len(metadata[name])
    one, two = (bytes(schema.with_metadata({**metadata, name: fill * width}).serialize()) for fill in (b"1", b"2"))
    start = next(at for at in range(len(one)) if one[at] != two[at])
    return slice(start, start + width)


class _Sheet:
    """Memory with an open Arrow stream on it."""

    __slots__ = ("_sink", "_view", "_writer", "schema")

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        memory = pa.allocate_buffer(_SHEET_BYTES)
        self._view = memoryview(memory).cast("B")
        self._sink = pa.FixedSizeBufferWriter(memory)
        self._writer = pa.ipc.new_stream(self._sink, schema, options=IPC_OPTIONS)
        # The stream's own schema message, which nobody reads, goes out with the first batch.
        self._writer.write_batch(pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema))

    def has_room(self, room: int) -> bool:
        return bool(self._sink.tell() + room <= _SHEET_BYTES)

    def write(self, puts: Sequence[Put]) -> memoryview | None:
        """The batches' messages; None: there was no room, and the sheet is spoilt."""
        start = self._sink.tell()
        try:
            for put in puts:
                write_put(self._writer, put, self.schema)
        except (OSError, pa.ArrowInvalid):
            return None
        return self._view[start : self._sink.tell()]
