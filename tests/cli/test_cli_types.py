"""Column types as text."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headgate as hg
from headgate.cli.type_names import parse, spell

PLAIN = [
    pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64(), pa.float16(),
    pa.float32(), pa.float64(), pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.binary(16), pa.date32(), pa.date64(),
    pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns"), pa.timestamp("s"), pa.timestamp("us", tz="UTC"),
    pa.timestamp("ns", tz="+01:00"), pa.timestamp("ms", tz="Europe/Berlin"), pa.duration("ns"), pa.decimal128(38, 9),
    pa.decimal256(76, -2),
]  # fmt: skip


def nested(inner: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
    item = st.builds(lambda kind, nullable: pa.field("item", kind, nullable), inner, st.booleans())
    names = st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=3, unique=True)
    return st.one_of(
        item.map(pa.list_),
        item.map(pa.large_list),
        st.builds(pa.list_, item, st.integers(1, 2048)),
        st.builds(lambda ns, kind, null: pa.struct([pa.field(n, kind, null) for n in ns]), names, inner, st.booleans()),
    )


@given(st.recursive(st.sampled_from(PLAIN), nested, max_leaves=4))
def test_every_type_reads_back_from_its_text(kind):
    assert parse(spell(kind)).equals(kind)


@pytest.mark.parametrize(
    "kind",
    [*PLAIN, pa.null(), pa.list_(pa.float32()), pa.list_(pa.float64(), 3), pa.struct([("a", pa.int64()), ("b", pa.list_(pa.string()))])],
    ids=str,
)
def test_what_pyarrow_prints_is_understood_too(kind):
    assert parse(str(kind)).equals(kind)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("double", pa.float64()),
        (" int64 ", pa.int64()),
        ("decimal(10,2)", pa.decimal128(10, 2)),
        ("timestamp[us,UTC]", pa.timestamp("us", tz="UTC")),
        ("list<fixed_size_list<float32,3>>", pa.list_(pa.list_(pa.float32(), 3))),
        (
            "struct<a: int64 not null, b: struct<c: bool>>",
            pa.struct([pa.field("a", pa.int64(), False), ("b", pa.struct([("c", pa.bool_())]))]),
        ),
    ],
)
def test_some_other_spellings_are_understood(text, kind):
    assert parse(text).equals(kind)


@pytest.mark.parametrize(
    "text",
    ["", "int", "int64 x", "list", "list<", "list<int64", "timestamp", "timestamp[h]", "time32[us]", "decimal128(99, 2)", "decimal128(3)",
     "fixed_size_list<int8>", "struct<>", "struct<a int64>", "fixed_size_binary[99999999999]", "map<string, int64>", "<>"],
)  # fmt: skip
def test_what_is_no_type_is_refused_with_a_list_of_those_there_are(text):
    with pytest.raises(hg.InvalidInputError) as caught:
        parse(text)
    assert "timestamp[us, UTC]" in caught.value.hint


@given(st.text(max_size=30))
def test_any_text_is_a_type_or_refused(text):
    try:
        parse(text)
    except hg.InvalidInputError:
        pass
