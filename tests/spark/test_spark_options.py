"""Options: read whatever the case of their names, refused before anything is done."""

from __future__ import annotations

import pytest

import headgate as hg
from headgate.spark import options as o
from headgate.spark.plan import READ_OPTIONS


def test_where_a_table_is_comes_from_options_that_are_the_same_everywhere() -> None:
    place, values = o.parsed(
        {
            "PATH": "s3://b/t",
            "storage.aws_region": "eu",
            "Storage.AWS_ENDPOINT": "http://x",
            "waluri": "s3://w/l",
            "WAL.storage.aws_region": "us",
            "Filter": "v > 1",
        },
        READ_OPTIONS,
    )
    assert place == o.Place("s3://b/t", {"aws_region": "eu", "aws_endpoint": "http://x"}, "s3://w/l", {"aws_region": "us"})
    assert values == {"filter": "v > 1"}
    assert "eu" not in repr(place)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("fliter", "did you mean 'filter'"),
        ("column", "did you mean 'columns'"),
        ("lease", "did you mean 'leaseTtl'"),
        ("storages.x", "did you mean 'storage.<name>'"),
        ("zzz", "options are"),
    ],
)
def test_an_unknown_option_is_refused_with_the_closest_name(given: str, says: str) -> None:
    with pytest.raises(hg.InvalidInputError, match=given) as refused:
        o.parsed({"path": "x", given: "1"}, READ_OPTIONS)
    assert says in refused.value.hint


def test_a_table_must_be_named() -> None:
    with pytest.raises(hg.InvalidInputError, match="no table"):
        o.parsed({}, READ_OPTIONS)


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (o.duration, "24h", 86400.0), (o.duration, "90 s", 90.0), (o.duration, "500ms", 0.5), (o.duration, "0", 0.0),
        (o.duration, "1.5 Hours", 5400.0), (o.duration, "2d", 172800.0),
        (o.size, "64m", 64 << 20), (o.size, "1 GiB", 1 << 30), (o.size, "512kb", 512 << 10), (o.size, "1000", 1000),
        (o.size, "1000B", 1000),
        (o.names, "id,value", ["id", "value"]), (o.names, " id , `a,b` ", ["id", "a,b"]), (o.names, "`x``y`", ["x`y"]),
        (o.whole, "8", 8), (o.number, "0", 0), (o.truth, "TRUE", True), (o.truth, "false", False), (o.one_of("a", "b"), "A", "a"),
    ],
)  # fmt: skip
def test_values_are_read(parse: o.Parse, text: str, value: object) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (o.duration, "24 parsecs"), (o.duration, "-1s"), (o.duration, ""), (o.size, "many"), (o.size, "1x"), (o.names, ""),
        (o.names, "a,,b"),
        (o.names, "`a"), (o.whole, "0"), (o.whole, "1.5"), (o.number, "-1"), (o.truth, "yes"), (o.one_of("a", "b"), "c"), (o.text, " "),
    ],
)  # fmt: skip
def test_values_that_make_no_sense_are_refused(parse: o.Parse, text: str) -> None:
    with pytest.raises(hg.InvalidInputError) as refused:
        parse(text)
    assert refused.value.hint


def test_a_refused_value_names_its_option() -> None:
    with pytest.raises(hg.InvalidInputError, match="'leaseTtl' is 'soon'") as refused:
        o.parsed({"path": "x", "leasettl": "soon"}, READ_OPTIONS)
    assert "24h" in refused.value.hint
