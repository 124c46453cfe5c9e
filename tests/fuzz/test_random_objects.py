"""Objects that are whole by their checksum and say anything: JSON, Arrow streams, bytes.

Nobody can write these by accident; still no answer may be anything but a typed error or entries
that are in the log, and every answer comes in bounded time.
"""

from __future__ import annotations

import copy
import json
import random
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from fuzz_table import LONG, Judge, Objects, Unnoticed, append, load, read, tables, verify, watched

import headgate as hg
from headgate.errors import CorruptEntryError, UnsupportedFormatError
from headgate.manifest import ShardManifest, TableManifest
from headgate.manifest.document import decode_document
from headgate.manifest.model import WalMarker
from headgate.wal.entry import Entry, decode_entry

COUNT = 8000 if LONG else 300


@pytest.fixture(scope="module")
def right() -> Objects:
    return tables()


def whole_document(body: Any) -> bytes:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return b'{"crc32":"%08x","body":%s}\n' % (zlib.crc32(raw), raw)


def whole_entry(stream: bytes, size: int = 1024) -> bytes:
    stream = stream.ljust(size - 16, b"\0")
    return stream + struct.pack("<QI4s", len(stream), zlib.crc32(stream), b"HGW1")


WORDS = ("", "active", "dropped", "creating", "splitting", "0000", "0001", "t", "id", "ü", "\0", "../..", "1e5", "null", "x" * 300)


def random_json(chance: random.Random, depth: int = 3) -> Any:
    kind = chance.randrange(9 if depth else 7)
    if kind == 0:
        return chance.choice([None, True, False])
    if kind in (1, 2, 3):
        return chance.choice([0, 1, 2, 3, 5, -1, 64, chance.randrange(-100, 100), 2**31, 2**63, 10**30, -(2**63)])
    if kind == 4:
        return chance.choice([0.5, -1.0, 1e300, float("nan"), float("inf")])
    if kind in (5, 6):
        return chance.choice(WORDS)
    if kind == 7:
        return [random_json(chance, depth - 1) for _ in range(chance.randrange(4))]
    return {chance.choice(WORDS): random_json(chance, depth - 1) for _ in range(chance.randrange(4))}


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in a document where something else could stand."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in list(items):
        yield value, name
        yield from places(inner)


def changed(chance: random.Random, body: bytes) -> Any:
    """A document with one or a few of its values replaced, dropped or added."""
    document = copy.deepcopy(json.loads(body)["body"])
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        holder, name = chance.choice(list(places(document)))
        act = chance.randrange(6)
        if act == 0 and isinstance(holder, dict):
            del holder[name]
        elif act == 1 and isinstance(holder, dict):
            holder[chance.choice([*WORDS, "epoch", "cursor", "segments", "format_version"])] = random_json(chance)
        else:
            holder[name] = random_json(chance)
    return document


def ask(judge: Judge, what: str, objects: Objects, *, only_known: bool, shards: tuple[str, ...] = ("0000",)) -> None:
    """Every path, and nothing but typed errors, and (``only_known``) no entry that was never written."""
    judge.tried[what.split(" ", 1)[0]] += 1
    known = {entry for seen in judge.seen.values() for entry in seen}
    try:
        with watched():
            for shard in shards:
                for path in (read, verify, append):
                    load(objects)
                    try:
                        found = path(shard)
                    except hg.HeadgateError as error:
                        judge.answers[type(error).__name__] += 1
                        continue
                    judge.answers["answered"] += 1
                    if only_known and path is read and not set(found) <= known:
                        raise Unnoticed(f"{what}: {set(found) - known} was never written")
    except hg.HeadgateError:
        raise
    except BaseException as error:
        error.add_note(what)
        raise


DOCUMENTS = {"shard-manifest": "t/shards/0000-", "table-manifest": "t/table/", "marker": "/0000.json"}


def _key(right: Objects, part: str) -> str:
    return [key for key in sorted(right) if key.startswith("t/") and part in key][-1]


@pytest.mark.parametrize(
    "kind",
    [
        "shard-manifest",
        "table-manifest",
        "marker",
    ],
)
def test_any_json_as_a_document_is_a_typed_error_or_no_harm(right, kind):
    judge, key = Judge(right), _key(right, DOCUMENTS[kind])
    for number in range(COUNT):
        chance = random.Random(f"{kind}-{number}")
        body = random_json(chance) if number % 5 == 0 else changed(chance, right[key])
        ask(judge, f"json {number}: {json.dumps(body)[:2000]}", {**right, key: whole_document(body)}, only_known=True)
    judge.report(f"JSON as a {kind}")


def test_bytes_that_are_no_json_are_a_typed_error():
    chance = random.Random(3)
    deep = b"[" * 100_000 + b"]" * 100_000
    bodies = [
        b"",
        b"{",
        b'"',
        b"\xff\xfe",
        b"NaN",
        b"1" * 5000,
        deep,
        b'{"format_version":' + b"9" * 5000 + b"}",
        b'{"format_version":"1"}',
    ]
    bodies += [chance.randbytes(chance.randrange(200)) for _ in range(500)]
    for body in bodies:
        for kind in (ShardManifest, TableManifest, WalMarker):
            with pytest.raises((CorruptEntryError, UnsupportedFormatError)):
                decode_document(whole_document(body), kind, "key")


def test_a_newer_format_is_refused_by_name(right):
    for part in DOCUMENTS.values():
        key = _key(right, part)
        document = json.loads(right[key])["body"] | {"format_version": 2}
        load({**right, key: whole_document(document)})
        with pytest.raises(UnsupportedFormatError, match="format"):
            append("0000")


# -- Arrow


def random_batch(chance: random.Random) -> pa.RecordBatch:
    count = chance.choice([0, 1, 3])
    makers = [
        lambda: pa.array([chance.randrange(100) for _ in range(count)], pa.int64()),
        lambda: pa.array(["x"] * count),
        lambda: pa.nulls(count),
        lambda: pa.array([{"a": 1}] * count, pa.struct([("a", pa.int8())])),
        lambda: pa.array([[1, 2]] * count, pa.list_(pa.int32())),
        lambda: pa.array(["x"] * count).dictionary_encode(),
        lambda: pa.array([b"x"] * count, pa.binary_view()),
        lambda: pa.array([chance.random() for _ in range(count)], pa.float32()),
    ]
    columns = [chance.choice(makers)() for _ in range(chance.randrange(4))]
    names = [chance.choice(["id", "value", "tags", "", "id", "ü"]) for _ in columns]
    return pa.RecordBatch.from_arrays(columns, names=names)


def random_entry(chance: random.Random, header: dict[bytes, bytes]) -> bytes:
    """An Arrow stream with a header that is right, half right, or missing, and batches of any kind."""
    metadata = dict(header) if chance.random() < 0.8 else {}
    for name in chance.sample(sorted(metadata), min(len(metadata), chance.choice([0, 0, 1, 2]))):
        if chance.random() < 0.3:
            del metadata[name]
        else:
            metadata[name] = chance.choice([b"", b"0", b"-1", b"1", b"seal", b"data", b"nan", b"\xff\xfe", b"9" * 5000, b"1e999", b"2"])
    batch = random_batch(chance)
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=chance.choice([None, None, "lz4", "zstd"]))
    with pa.ipc.new_stream(sink, batch.schema.with_metadata(metadata), options=options) as writer:
        for _ in range(chance.randrange(3)):
            custom = {b"headgate.op": chance.choice([b"upsert", b"delete", b"other", b"", b"\xff"])}
            columns = [b'["id"]', b'["none"]', b"[0]", b"[99]", b"[-1]", b"5", b"{}", b"null", b"x", b"[null]", b'[["id"]]', b"[" * 5000]
            if chance.random() < 0.7:
                custom[b"headgate.columns"] = chance.choice(columns)
            if chance.random() < 0.4:
                custom[b"headgate.producer"] = chance.choice([b"p", b"", b"\xff"])
                if chance.random() < 0.8:
                    custom[b"headgate.sequence"] = chance.choice([b"0", b"-5", b"x", b"9" * 5000, b"1.5"])
            writer.write_batch(batch, custom if chance.random() < 0.8 else None)
    return whole_entry(sink.getvalue().to_pybytes(), chance.choice([1024, 1032, 2000]))


def _header(body: bytes) -> dict[bytes, bytes]:
    return dict(pa.ipc.open_stream(pa.py_buffer(body[:-16])).schema.metadata)


def test_any_arrow_stream_as_an_entry_is_a_typed_error_or_an_entry(right):
    judge = Judge(right)
    entries = [key for key in sorted(right) if key.startswith("t/wal/") and "/0000/" in key]
    for number in range(COUNT):
        chance = random.Random(f"arrow-{number}")
        key = chance.choice(entries)
        ask(judge, f"arrow {number} as {key}", {**right, key: random_entry(chance, _header(right[key]))}, only_known=False)
    judge.report("Arrow streams as entries")


def test_bytes_that_are_no_arrow_are_a_typed_error(right):
    chance = random.Random(4)
    key = next(key for key in sorted(right) if key.endswith(".arrow"))
    stream = right[key][:-16]
    for number in range(COUNT):
        size = chance.choice([8, 100, 1008, 3000])
        body = chance.randbytes(size) if number % 2 else stream[: chance.randrange(len(stream))] + chance.randbytes(size)
        try:
            entry = decode_entry(memoryview(whole_entry(body)), key, "wal", "0000", 1, 0)
        except (CorruptEntryError, UnsupportedFormatError):
            continue
        assert isinstance(entry, Entry)
