"""Many small entries read as one: for those who replay a log and ask no more of it than its rows.

Owns: the entries that look alike, checked and decoded together. Does not own: the format (entry), or what does not look
like the entry before, which goes one by one (decode).

Nearly all that an entry of one writer says, the last one said too: its schema message differs in four values, the messages
of its batches in numbers that Arrow reads itself. So one entry is taken apart, and of the others it is compared, for all at
once, that they are the same where they must be: every byte of the schema message but the four values, the position among
these, and of each batch's message the parts that say what kind of message it is and that it is a plain put. Every checksum
is checked as ever. Then their batches are read as one Arrow stream.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headgate.errors import HeadgateError
from headgate.manifest import ChainPoint
from headgate.wal.decode import END_OF_STREAM, SMALL_BYTES, EntryDecoder, Likeness, Raw
from headgate.wal.entry import SEAL_BYTES, TRAILER, TRAILER_MAGIC, Entry, Put, is_plain_upsert
from headgate.wal.space import WalSpace

_U16, _U32, _I32 = struct.Struct("<H"), struct.Struct("<I"), struct.Struct("<i")
_TAIL = np.dtype([("end", "<u8"), ("length", "<u8"), ("checksum", "<u4"), ("magic", "S4")])
_END_MARK = b"\xff\xff\xff\xff"
_END_NUMBER = int.from_bytes(END_OF_STREAM, "little")
_LENGTH, _CUSTOM = 3, 4  # fields of an Arrow message: version, header's type, header, length of the body, custom metadata
_FEW = 16
_STRIDE_MAX = 64

Bytes = npt.NDArray[np.uint8]


class Entries:
    """Data entries that follow each other in one epoch, and hold plain puts only."""

    __slots__ = ("counts", "epoch", "position", "puts", "sizes")
    is_seal = False

    def __init__(self, epoch: int, position: int, puts: list[Put], counts: list[int], sizes: list[int]) -> None:
        self.epoch, self.position, self.puts = epoch, position, puts
        self.counts, self.sizes = counts, sizes
        """How many puts each has, and its size in bytes."""

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def size_bytes(self) -> int:
        return sum(self.sizes)

    @property
    def end(self) -> ChainPoint:
        """Past the last one."""
        return ChainPoint(self.epoch, self.position + len(self.sizes))

    @property
    def batches(self) -> list[pa.RecordBatch]:
        """The rows, a batch per put, in order."""
        return [put.rows for put in self.puts]

    def part(self, start: int, stop: int) -> Entries:
        """Those from number ``start`` up to number ``stop``."""
        ends = [0, *accumulate(self.counts)]
        puts = self.puts[ends[start] : ends[stop]]
        return Entries(self.epoch, self.position + start, puts, self.counts[start:stop], self.sizes[start:stop])

    def since(self, position: int) -> Entries:
        return self.part(max(0, position - self.position), len(self.sizes))


Found = tuple[ChainPoint, Entry | Entries | HeadgateError | None]


@dataclass(frozen=True)
class _Look:
    """Entries that look alike: a schema message with four values, and messages of plain puts."""

    likeness: Likeness
    head: Bytes
    is_value: npt.NDArray[np.bool_]
    position: slice
    powers: npt.NDArray[np.int64]
    numbers: tuple[slice, slice]
    message_bytes: int
    front: npt.NDArray[np.int64]
    """Offsets in a message, from its start: those that must be the same, then the eight of the length of its body."""
    front_same: Bytes


class BlockDecoder:
    """Decodes the objects of one log, in order. One thread at a time."""

    def __init__(self, space: WalSpace) -> None:
        self._one_by_one = EntryDecoder(space)
        self._looks: dict[int, _Look] = {}
        self._stride = 1

    def decode(self, raws: Sequence[Raw]) -> list[Found]:
        """Each object as an entry, alone or among others, or as the error that it is."""
        found: list[Found] = []
        at = 0
        while at < len(raws):
            entries = self._alike(raws, at)
            if entries is not None:
                found.append((raws[at][0], entries))
                at += len(entries)
                self._stride = 1 if len(entries) >= _FEW else min(_STRIDE_MAX, 2 * self._stride)
            if at < len(raws):  # whatever does not look like the one before: that one may
                alone = raws[at : at + self._stride]
                self._stride = min(_STRIDE_MAX, 2 * self._stride)
                decoded = self._one_by_one.decode(alone)
                found += decoded
                self._learn(alone[-1][1], decoded[-1][1])
                at += len(alone)
        return found

    # -- what entries look like

    def _learn(self, raw: memoryview | HeadgateError | None, entry: Entry | HeadgateError | None) -> None:
        if not isinstance(raw, memoryview) or not isinstance(entry, Entry) or entry.is_seal or raw.nbytes > SMALL_BYTES:
            return
        if len(entry.puts) != 1 or not is_plain_upsert(entry.puts[0]):
            return
        likeness = self._one_by_one.likeness_of(raw)
        if likeness is None:
            return
        size = likeness.head_bytes
        known = self._looks.get(size)
        if known is None or known.likeness is not likeness:
            try:
                self._looks[size] = _look_of(likeness, raw)
            except (struct.error, ValueError, IndexError):
                return  # another Arrow wrote it: one by one is always right

    # -- entries that look so

    def _alike(self, raws: Sequence[Raw], at: int) -> Entries | None:
        """As many from ``at`` on as look alike and are whole; None: not even the first."""
        (epoch, position), raw = raws[at]
        if not isinstance(raw, memoryview) or raw.nbytes <= SEAL_BYTES:
            return None
        look = self._looks.get(8 + _I32.unpack_from(raw, 4)[0])
        if look is None or look.likeness.header.epoch != epoch:
            return None
        size = look.likeness.head_bytes
        least, views = max(SEAL_BYTES + 1, size + _TAIL.itemsize), list[memoryview]()
        for number in range(at, len(raws)):
            point, raw = raws[number]
            if not isinstance(raw, memoryview) or not least <= raw.nbytes <= SMALL_BYTES or point != (epoch, position + len(views)):
                break
            views.append(raw)
        if not views:
            return None

        # 1. Each is whole, says the same as the one that was taken apart, and where it belongs.
        heads = np.frombuffer(b"".join([view[:size] for view in views]), np.uint8).reshape(-1, size)
        tails = np.frombuffer(b"".join([view[-_TAIL.itemsize :] for view in views]), _TAIL)
        sizes = [view.nbytes for view in views]
        checksums = [zlib.crc32(view[: -TRAILER.size]) for view in views]
        good = ((heads == look.head) | look.is_value).all(axis=1)
        good &= tails["checksum"] == np.array(checksums, np.uint32)
        good &= (tails["length"] == np.array(sizes, np.uint64) - np.uint64(TRAILER.size)) & (tails["magic"] == TRAILER_MAGIC)
        digits = heads[:, look.position].astype(np.int64) - ord("0")
        good &= ((digits >= 0) & (digits <= 9)).all(axis=1)
        good &= digits @ look.powers == np.arange(position, position + len(views))
        for place in look.numbers:
            values = heads[:, place]
            good &= ((values >= ord("-")) & (values <= ord("9")) & (values != ord("/"))).all(axis=1)

        # 2. Where its batches are: the stream's end stands right before the trailer, or before a padding of zeros.
        parts: list[memoryview] = []
        for view, is_good, end in zip(views, good.tolist(), tails["end"].tolist()):
            part = view[size : -_TAIL.itemsize] if end == _END_NUMBER else _unpadded(view, size)
            if not is_good or part is None:
                break
            parts.append(part)
        if not parts:
            return None

        # 3. Each of its messages is a plain put.
        message = look.likeness.schema_message
        joined = b"".join([message, *parts, END_OF_STREAM, bytes(look.message_bytes)])
        starts = list(accumulate((part.nbytes for part in parts), initial=len(message)))
        counts = _plain_messages(np.frombuffer(joined, np.uint8), np.array(starts), look)
        if not counts:
            return None
        if len(counts) < len(parts):
            joined = joined[: starts[len(counts)]] + END_OF_STREAM
        try:
            batches = list(pa.ipc.open_stream(pa.py_buffer(joined)))
        except (pa.ArrowException, OSError, ValueError, EOFError):
            return None  # one of them is no entry, though its checksum fits: one by one tells which
        if len(batches) != sum(counts):
            return None
        return Entries(epoch, position, [Put(rows) for rows in batches], counts, sizes[: len(counts)])


def _unpadded(view: memoryview, start: int) -> memoryview | None:
    stripped = bytes(view[start : -TRAILER.size]).rstrip(b"\0")
    end = len(stripped) - len(_END_MARK)
    return view[start : start + end] if stripped.endswith(_END_MARK) and end % 8 == 0 else None


def _plain_messages(flat: Bytes, bounds: npt.NDArray[np.int64], look: _Look) -> list[int]:
    """How many messages each part has, for as many parts from the first on as consist of messages that look so."""
    at, ends = bounds[:-1].copy(), bounds[1:]
    counts = np.zeros(len(at), np.int64)
    good, alive = len(at), np.arange(len(at))
    while alive.size:  # one round for each message of the entry that has most
        here = at[alive]
        fronts = flat[here[:, None] + look.front]
        bodies = np.ascontiguousarray(fronts[:, -8:]).view("<i8")[:, 0]
        fits = (fronts[:, :-8] == look.front_same).all(axis=1) & (bodies >= 0) & (bodies <= SMALL_BYTES)
        following = here + look.message_bytes + bodies
        fits &= following <= ends[alive]
        if not fits.all():
            good = min(good, int(alive[~fits][0]))
        counts[alive] += 1
        at[alive] = following
        alive = alive[fits & (following < ends[alive])]
        alive = alive[alive < good]
    return [int(count) for count in counts[:good]]


def _look_of(likeness: Likeness, raw: memoryview) -> _Look:
    """Take an entry of one plain put apart."""
    size, places = likeness.head_bytes, likeness.places
    is_value = np.zeros(size, np.bool_)
    for place in places:
        is_value[place] = True
    message = bytes(raw[size:])
    metadata_bytes = _I32.unpack_from(message, 4)[0]
    same, body_at = _parts_that_stay(message)
    if not same or max(same) >= 8 + metadata_bytes or body_at + 8 > 8 + metadata_bytes:
        raise ValueError("no message")
    return _Look(
        likeness=likeness,
        head=np.frombuffer(bytes(raw[:size]), np.uint8),
        is_value=is_value,
        position=places[0],
        powers=10 ** np.arange(places[0].stop - places[0].start, dtype=np.int64)[::-1],
        numbers=(places[2], places[3]),
        message_bytes=8 + metadata_bytes,
        front=np.array([*same, *range(body_at, body_at + 8)], np.int64),
        front_same=np.frombuffer(bytes(message[at] for at in same), np.uint8),
    )


def _parts_that_stay(message: bytes) -> tuple[list[int], int]:
    """Offsets of what says that a message is a batch with this metadata of its own; and where the length of its body stands."""
    root = 8 + _U32.unpack_from(message, 8)[0]
    table, fields = _table(message, root)
    body_at = root + fields[_LENGTH]
    parts = [range(12), *table]
    vector = _led_to(message, root + fields[_CUSTOM])
    count = _U32.unpack_from(message, vector)[0]
    parts.append(range(vector, vector + 4 + 4 * count))
    for number in range(count):
        pair = _led_to(message, vector + 4 + 4 * number)
        table, fields = _table(message, pair)
        parts += table
        for field in (0, 1):
            text = _led_to(message, pair + fields[field])
            parts.append(range(text, text + 4 + _U32.unpack_from(message, text)[0]))
    return sorted({at for part in parts for at in part} - set(range(body_at, body_at + 8))), body_at


def _table(message: bytes, at: int) -> tuple[Iterator[range], list[int]]:
    """The bytes of a table and of what describes it, and its fields' offsets; an absent field is an error."""
    described = at - _I32.unpack_from(message, at)[0]
    described_bytes, table_bytes = _U16.unpack_from(message, described)[0], _U16.unpack_from(message, described + 2)[0]
    fields = [_U16.unpack_from(message, described + offset)[0] for offset in range(4, described_bytes, 2)]
    if 0 in fields:
        raise ValueError("a field is left out")
    return iter((range(described, described + described_bytes), range(at, at + table_bytes))), fields


def _led_to(message: bytes, at: int) -> int:
    return int(at + _U32.unpack_from(message, at)[0])
