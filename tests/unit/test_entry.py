"""The bytes of entries, seals and documents: there and back, and never back when one byte differs."""

from __future__ import annotations

import json
import zlib
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headgate as hg
from headgate.errors import CorruptEntryError, UnsupportedFormatError
from headgate.manifest.document import decode_document, encode_document
from headgate.manifest.model import (
    FIRST_POINT,
    ConsumerRecord,
    Owner,
    ProducerMark,
    Segment,
    ShardingRule,
    ShardManifest,
    TableManifest,
    WalMarker,
    WalState,
)
from headgate.wal.entry import SEAL_BYTES, Header, Put, decode_entry, encode_entry, encode_seal, encoded_bytes

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("value", pa.string())])
KEY = "wal/w/0000/0000000003/00000000000000000007.arrow"


def header(kind: Any = "data", **changes: Any) -> Header:
    fields = {
        "wal_id": "w",
        "shard": "0000",
        "epoch": 3,
        "position": 7,
        "kind": kind,
        "entry_id": "e" * 26,
        "writer_id": "r" * 26,
        "durable_through": 6,
        "time": 1.5,
        "by_epoch": 4 if kind == "seal" else 0,
    }
    return Header(**{**fields, **changes})


def rows(*ids: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(ids, pa.int64()), pa.array([f"v{i}" for i in ids])], schema=SCHEMA)


def decode(data: memoryview | bytes) -> hg.Entry:
    return decode_entry(memoryview(data), KEY, "w", "0000", 3, 7)


def small_entry() -> bytes:
    return bytes(encode_entry(header(), SCHEMA, [Put(rows(1, 2)), Put(rows(3).select(["id"]), "delete", "p", 9)]))


def test_an_entry_comes_back_as_it_was_written() -> None:
    entry = decode(small_entry())
    assert entry.header == header()
    assert [(put.op, put.producer, put.sequence) for put in entry.puts] == [("upsert", None, None), ("delete", "p", 9)]
    assert entry.batches[0].equals(rows(1, 2))
    assert entry.batches[1].equals(rows(3).select(["id"])), "a delete has the key columns only"
    assert (entry.epoch, entry.position, entry.kind, entry.time, entry.is_seal) == (3, 7, "data", 1.5, False)
    assert entry.size_bytes == len(small_entry())


def test_a_seal_comes_back_and_has_always_the_same_size() -> None:
    for position in (0, 10**18):
        seal = encode_seal(header("seal", position=position, by_epoch=10**9, durable_through=position, time=1e300))
        assert seal.nbytes == SEAL_BYTES
    entry = decode(encode_seal(header("seal")))
    assert (entry.is_seal, entry.puts, entry.header.by_epoch) == (True, (), 4)


def test_a_data_entry_is_always_longer_than_a_seal() -> None:
    tiny = pa.schema([("a", pa.null())])
    batch = pa.RecordBatch.from_arrays([pa.nulls(1)], schema=tiny)
    assert encode_entry(header(), tiny, [Put(batch)]).nbytes > SEAL_BYTES
    assert len(small_entry()) > SEAL_BYTES


def test_any_arrow_reader_opens_an_entry() -> None:
    table = pa.ipc.open_stream(pa.py_buffer(small_entry())).read_all()
    assert table.column("id").to_pylist() == [1, 2, 3]


@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.none() | st.text(max_size=20)), min_size=1, max_size=6),
            st.booleans(),
            st.none() | st.tuples(st.text(min_size=1, max_size=300), st.integers(0, 2**62)),
        ),
        min_size=1,
        max_size=5,
    )
)
@settings(max_examples=60, deadline=None)
def test_any_puts_come_back_as_they_were_written(puts: Any) -> None:
    made = []
    for values, is_delete, producer in puts:
        batch = pa.RecordBatch.from_arrays(
            [pa.array([v[0] for v in values], pa.int64()), pa.array([v[1] for v in values], pa.string())], schema=SCHEMA
        )
        name, sequence = producer or (None, None)
        made.append(Put(batch.select(["id"]) if is_delete else batch, "delete" if is_delete else "upsert", name, sequence))
    for hint in (0, sum(encoded_bytes(put.rows) for put in made)):
        entry = decode(encode_entry(header(), SCHEMA, made, hint))
        assert [(p.op, p.producer, p.sequence) for p in entry.puts] == [(p.op, p.producer, p.sequence) for p in made]
        assert all(a.rows.equals(b.rows) for a, b in zip(entry.puts, made, strict=True))


def test_a_wrong_hint_of_its_size_costs_room_and_nothing_else() -> None:
    many = [Put(rows(*range(i, i + 50)), "upsert", "p" * 250, i) for i in range(40)]
    assert len(decode(encode_entry(header(), SCHEMA, many, 1)).puts) == 40


@pytest.mark.parametrize("kind", ["entry", "seal"])
def test_every_flipped_byte_of_an_entry_is_noticed(kind: str) -> None:
    body = bytearray(small_entry() if kind == "entry" else encode_seal(header("seal")))
    for at in range(len(body)):
        body[at] ^= 0x41
        with pytest.raises(CorruptEntryError) as caught:
            decode(bytes(body))
        assert caught.value.object == KEY
        body[at] ^= 0x41
    decode(bytes(body))


@pytest.mark.parametrize("kind", ["entry", "seal"])
def test_every_cut_of_an_entry_is_noticed(kind: str) -> None:
    body = small_entry() if kind == "entry" else bytes(encode_seal(header("seal")))
    for length in range(len(body)):
        with pytest.raises(CorruptEntryError):
            decode(body[:length])
    for longer in (body + b"\0", b"\0" + body, body + body):
        with pytest.raises(CorruptEntryError):
            decode(longer)


@pytest.mark.parametrize("changes", [{"wal_id": "x"}, {"shard": "0001"}, {"epoch": 4}, {"position": 8}])
def test_an_entry_that_belongs_elsewhere_is_noticed(changes: dict[str, Any]) -> None:
    with pytest.raises(CorruptEntryError):
        decode(encode_entry(header(**changes), SCHEMA, [Put(rows(1))]))


def test_an_entry_of_a_newer_format_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.wal.entry.ENTRY_FORMAT", 2)
    body = bytes(encode_seal(header("seal")))
    monkeypatch.setattr("headgate.wal.entry.ENTRY_FORMAT", 1)
    with pytest.raises(UnsupportedFormatError, match="format 2"):
        decode(body)


# -- documents


def a_manifest() -> ShardManifest:
    return ShardManifest(
        version=4,
        id="i",
        history=("g", "h"),
        table_id="t",
        shard="0000",
        epoch=3,
        owner=Owner(writer="w", claimed_at=2.5),
        segments=(Segment(1, 5, 2),),
        wal=WalState(id="w"),
        producers={"p": ProducerMark(sequence=1, epoch=2, position=3, time=4.0)},
        consumers={"c": ConsumerRecord(position=2)},
    )


def a_table() -> TableManifest:
    return TableManifest(
        version=0, id="i", table_id="t", arrow_schema="x", key=("id",), sharding=ShardingRule(), shards=("0000",), wal_id="w"
    )


DOCUMENTS: list[Any] = [a_manifest(), a_table(), WalMarker(wal_id="w", table_id="t", shard="0000")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: type(d).__name__)
def test_a_document_comes_back_as_it_was_written(document: Any) -> None:
    again = decode_document(encode_document(document), type(document), "k")
    assert again == document
    assert type(again) is type(document)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: type(d).__name__)
def test_every_flip_and_every_cut_of_a_document_is_noticed(document: Any) -> None:
    body = bytearray(encode_document(document))
    for at in range(len(body)):
        for bit in (0x01, 0x20):
            body[at] ^= bit
            with pytest.raises(CorruptEntryError) as caught:
                decode_document(bytes(body), type(document), "the key")
            assert caught.value.object == "the key"
            body[at] ^= bit
        with pytest.raises(CorruptEntryError):
            decode_document(bytes(body[:at]), type(document), "the key")
    for longer in (bytes(body) + b"\n", bytes(body) + b" ", b" " + bytes(body)):
        with pytest.raises(CorruptEntryError):
            decode_document(longer, type(document), "the key")


def test_a_document_of_a_newer_format_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedFormatError, match="format version 2"):
        decode_document(encode_document(a_manifest().but(format_version=2)), ShardManifest, "k")


@pytest.mark.parametrize(
    "changes", [{"version": -1}, {"epoch": "x"}, {"state": "odd"}, {"cursor": (1,)}, {"wal": None}, {"segments": ((1, "x"),)}]
)
def test_a_whole_document_with_a_wrong_value_is_refused_with_its_place(changes: dict[str, Any]) -> None:
    body = json.dumps({**json.loads(a_manifest().model_dump_json()), **changes}).encode()
    with pytest.raises(CorruptEntryError) as caught:
        decode_document(b'{"crc32":"%08x","body":%s}\n' % (zlib.crc32(body), body), ShardManifest, "k")
    assert next(iter(changes)) in str(caught.value)


def test_a_whole_document_that_is_no_object_is_refused() -> None:
    for body in (b"[]", b"{}", b"nonsense"):
        with pytest.raises(CorruptEntryError):
            decode_document(b'{"crc32":"%08x","body":%s}\n' % (zlib.crc32(body), body), ShardManifest, "k")


def test_an_unknown_field_survives_at_every_level() -> None:
    extra = {"from_the_future": {"a": [1, {"b": None}]}}

    def grown(record: Any) -> Any:
        return type(record).model_validate({**record.model_dump(), **extra})

    manifest = a_manifest()
    manifest = grown(
        manifest.but(
            owner=grown(manifest.owner),
            wal=grown(manifest.wal),
            producers={"p": grown(manifest.producers["p"])},
            consumers={"c": grown(manifest.consumers["c"])},
        )
    )
    read = decode_document(encode_document(manifest), ShardManifest, "k")
    changed = read.but(epoch=9, wal=read.wal.but(clean_at=3), owner=read.owner.but(writer="x") if read.owner else None)
    again = decode_document(encode_document(changed), ShardManifest, "k").model_dump()
    for level in (again, again["owner"], again["wal"], again["producers"]["p"], again["consumers"]["c"]):
        assert level["from_the_future"] == extra["from_the_future"]
    assert again["epoch"] == 9
    assert again["wal"]["clean_at"] == 3

    table = a_table()
    table = grown(table.but(sharding=grown(table.sharding)))
    dumped = decode_document(encode_document(table.but(state="active")), TableManifest, "k").model_dump()
    for level in (dumped, dumped["sharding"]):
        assert level["from_the_future"] == extra["from_the_future"]


def test_unknown_fields_survive_claims_writes_and_closes(bench: Any) -> None:
    bench.log().manifests.commit(
        lambda m: type(m).model_validate({**m.model_dump(), "novelty": {"x": 1}, "wal": {**m.wal.model_dump(), "new": 2}})
    )
    for number in range(2):
        with bench.writer() as writer:
            writer.put(bench.rows(number)).wait()
    bench.table.trim(1)
    dumped = bench.manifest.model_dump()
    assert dumped["novelty"] == {"x": 1}
    assert dumped["wal"]["new"] == 2


def test_a_manifest_starts_at_the_first_point() -> None:
    fresh = ShardManifest(version=0, id="i", table_id="t", shard="0000", wal=WalState(id="w"))
    assert (fresh.epoch, fresh.cursor, fresh.wal_position_last_seen) == (0, FIRST_POINT, -1)
