"""Decoding many small entries fast: what is the same in all of them is looked at once.

Owns: reuse. Does not own: the format (entry): what comes out is what ``decode_entry`` makes, and
whatever does not look like the entry before goes that way.

Most of the time that a small entry takes goes into its schema message and into opening an Arrow
stream. The schema messages of one writer's entries differ in four values of their metadata. So
the message is compared with the last one, all but those values, and the batches of many entries
are read as one stream behind one schema message. Every checksum is checked as ever.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import pyarrow as pa

from headgate.errors import CorruptEntryError, HeadgateError
from headgate.manifest import ChainPoint
from headgate.wal.entry import SEAL_BYTES, Entry, Header, checked_stream, decode_entry, put_of
from headgate.wal.space import WalSpace
from headgate.wal.stencil import place_of

SMALL_BYTES = 64 << 10
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_PREFIX = struct.Struct("<Ii")
_U16, _I32, _I64 = struct.Struct("<H"), struct.Struct("<i"), struct.Struct("<q")
_BODY_LENGTH_FIELD = 3  # of an Arrow message: version, header's type, header, length of the body
_STAMPS = (b"headgate.position", b"headgate.entry_id", b"headgate.durable_through", b"headgate.time")

Raw = tuple[ChainPoint, memoryview | HeadgateError | None]
"""An object as it was read; None: nothing was there."""
Decoded = tuple[ChainPoint, Entry | HeadgateError | None]


@dataclass(frozen=True)
class Likeness:
    """A schema message, taken apart: what must be the same, and where the four values stand."""

    header: Header
    head_bytes: int
    pieces: tuple[tuple[slice, bytes], ...]
    places: tuple[slice, slice, slice, slice]
    schema_message: bytes
    """Of the rows alone, without the entry's metadata."""


class EntryDecoder:
    """Decodes the entries of one log, in order. One thread at a time."""

    def __init__(self, space: WalSpace) -> None:
        self._space = space
        self._likenesses: dict[int, Likeness] = {}

    def decode(self, raws: Sequence[Raw]) -> list[Decoded]:
        """Each object as an entry, or as the error that it is."""
        found: list[Decoded] = []
        group: list[tuple[int, Header, int, int]] = []  # where in found, header, how many batches, size
        parts: list[memoryview] = []
        likeness: Likeness | None = None
        for point, raw in raws:
            if raw is None or isinstance(raw, HeadgateError):
                found.append((point, raw))
                continue
            try:
                small = self._small(point, raw)
                if small is None:
                    found.append((point, self._plain(point, raw)))
                    continue
                alike, header, batches, count = small
                if likeness is not None and alike.schema_message != likeness.schema_message:
                    self._read_together(likeness, parts, group, found)
                    parts, group = [], []
                likeness = alike
                parts.append(batches)
                group.append((len(found), header, count, raw.nbytes))
                found.append((point, None))
            except HeadgateError as error:
                found.append((point, error))
        if likeness is not None:
            self._read_together(likeness, parts, group, found)
        return found

    def likeness_of(self, raw: memoryview) -> Likeness | None:
        """How an entry looked that was as long up to its rows, and was decoded before."""
        return self._likenesses.get(8 + _I32.unpack_from(raw, 4)[0])

    def _plain(self, point: ChainPoint, raw: memoryview) -> Entry:
        space = self._space
        entry = decode_entry(raw, space.key(*point), space.wal_id, space.shard, *point)
        if not entry.is_seal and raw.nbytes <= SMALL_BYTES:
            self._learn(entry, raw)
        return entry

    def _learn(self, entry: Entry, raw: memoryview) -> None:
        """Later entries may look like this one."""
        head_bytes = 8 + _I32.unpack_from(raw, 4)[0]
        head = bytes(raw[:head_bytes])
        schema = pa.ipc.read_schema(pa.py_buffer(head))
        metadata = dict(schema.metadata or {})
        plain = schema.remove_metadata()
        if bytes(plain.with_metadata(metadata).serialize()) != head or any(name not in metadata for name in _STAMPS):
            return  # another Arrow wrote it: the plain way is always right
        places = [place_of(name, plain, metadata) for name in _STAMPS]
        edges = sorted((place.start, place.stop) for place in places)
        bounds = [0, *(edge for pair in edges for edge in pair), head_bytes]
        pieces = tuple((slice(a, b), head[a:b]) for a, b in zip(bounds[::2], bounds[1::2], strict=True))
        message = bytes(plain.serialize())
        self._likenesses[head_bytes] = Likeness(entry.header, head_bytes, pieces, (places[0], places[1], places[2], places[3]), message)

    def _small(self, point: ChainPoint, raw: memoryview) -> tuple[Likeness, Header, memoryview, int] | None:
        """A small entry that looks like one before: its header and its batches. None: it does not.

        Raises:
            CorruptEntryError: its checksum does not fit.
        """
        size = raw.nbytes
        if size > SMALL_BYTES or size <= SEAL_BYTES:
            return None
        likeness = self._likenesses.get(8 + _I32.unpack_from(raw, 4)[0])
        if likeness is None:
            return None
        space, known = self._space, likeness.header
        stream = checked_stream(raw, space.key(*point))
        head = bytes(stream[: likeness.pieces[-1][0].stop])
        if known.epoch != point.epoch or any(head[piece] != same for piece, same in likeness.pieces):
            return None
        position, entry_id, durable_through, time = (head[place] for place in likeness.places)
        try:
            if int(position) != point.position:
                return None
            header = Header(
                known.wal_id, known.shard, known.epoch, point.position, "data", entry_id.decode(), known.writer_id,
                int(durable_through), float(time), known.by_epoch,
            )  # fmt: skip
            start = len(head)
            end, count = _batches(stream, start)
        except (ValueError, struct.error, IndexError):
            return None
        return likeness, header, stream[start:end], count

    def _read_together(
        self, likeness: Likeness, parts: list[memoryview], group: list[tuple[int, Header, int, int]], found: list[Decoded]
    ) -> None:
        if not group:
            return
        joined = b"".join([likeness.schema_message, *parts, END_OF_STREAM])
        try:
            reader = pa.ipc.open_stream(pa.py_buffer(joined))
            batches = iter(reader.iter_batches_with_custom_metadata())
            for at, header, count, size in group:
                puts = tuple(put_of(*next(batches)) for _ in range(count))
                found[at] = found[at][0], Entry(header, puts, size)
        except (pa.ArrowException, OSError, ValueError, LookupError, TypeError, StopIteration, EOFError) as error:
            self._tell(error, group, found)

    def _tell(self, error: Exception, group: list[tuple[int, Header, int, int]], found: list[Decoded]) -> None:
        """One of them is no entry, though its checksum fits; which one, the plain way tells when the chain leads there."""
        for at, header, _, _ in group:
            if found[at][1] is None:
                key = self._space.key(header.epoch, header.position)
                found[at] = found[at][0], CorruptEntryError(f"{key} is whole, but is no entry: {error}", object=key)


def _batches(stream: memoryview, start: int) -> tuple[int, int]:
    """Where the batches of a stream end, and how many there are."""
    at, count = start, 0
    while True:
        mark, length = _PREFIX.unpack_from(stream, at)
        if mark != 0xFFFFFFFF or length < 0:
            raise ValueError("no message")
        if length == 0:
            return at, count
        root = at + 8 + _I32.unpack_from(stream, at + 8)[0]
        table = root - _I32.unpack_from(stream, root)[0]
        field = 4 + 2 * _BODY_LENGTH_FIELD
        offset = _U16.unpack_from(stream, table + field)[0] if _U16.unpack_from(stream, table)[0] > field else 0
        body = _I64.unpack_from(stream, root + offset)[0] if offset else 0
        if body < 0:
            raise ValueError("no body")
        at += 8 + length + body
        count += 1


Decoded_co = TypeVar("Decoded_co", covariant=True)


class Decoder(Protocol[Decoded_co]):
    def decode(self, raws: Sequence[Raw]) -> Sequence[Decoded_co]: ...


def grouped(raws: Iterator[Raw], decoder: Decoder[Decoded_co], first: int, most: int, most_bytes: int) -> Iterator[Decoded_co]:
    """Decode a stream of objects, a few at first, then many at a time."""
    size, group, held_bytes = first, list[Raw](), 0
    for raw in raws:
        group.append(raw)
        if isinstance(raw[1], memoryview):
            held_bytes += raw[1].nbytes
        if len(group) >= size or held_bytes >= most_bytes:
            yield from decoder.decode(group)
            group, size, held_bytes = [], min(most, size * 4), 0
    yield from decoder.decode(group)
