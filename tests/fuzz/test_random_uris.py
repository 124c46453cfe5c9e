"""Any URI and any storage options: a location, or a typed error that gives no secret away."""

from __future__ import annotations

import os
import pickle
from typing import Any

import pytest
from fuzz_table import LONG
from hypothesis import example, given, settings
from hypothesis import strategies as st

import headgate as hg
from headgate.errors import HeadgateError, InvalidInputError
from headgate.store import Location

SECRET = "wJalrXUtnFEMIxK7MDENGxbPxRfiCYSECRET"

EXAMPLES = 10_000 if LONG else 400
quick = settings(max_examples=EXAMPLES, deadline=None, database=None, derandomize=not LONG)

objects = ["s3", "s3a", "gs", "gcs", "az", "azure", "abfs", "abfss", "http", "hdfs", "S3"]
schemes = st.sampled_from([*objects, "file", "memory", "", "s3:", "ü"])
parts = st.text(alphabet=st.sampled_from("ab/.%:@?#[]{}\\~*^| +=&'\"\0\n\tü日\ud800é\x7f2F0"), max_size=12) | st.text(max_size=8)
names = st.sampled_from(
    [
        "aws_access_key_id", "aws_secret_access_key", "aws_region", "aws_endpoint", "allow_http", "timeout", "azure_storage_account_name",
        "azure_storage_account_key", "azure_endpoint", "google_service_account", "google_service_account_key", "aws_session_token",
        "access_key_id", "token", "proxy_url", "user_agent", "connect_timeout", "aws_conditional_put", "azure_storage_sas_key",
    ]
) | st.text(max_size=10)  # fmt: skip
values: Any = st.text(max_size=12) | st.integers() | st.floats() | st.booleans() | st.none() | st.binary(max_size=4) | st.just([1])


def shown(error: BaseException) -> str:
    return f"{error} {error!r} {vars(error)!r} {error.__cause__!r} {error.args!r}"


@quick
@given(uri=st.builds(lambda scheme, sep, rest: f"{scheme}{sep}{rest}", schemes, st.sampled_from(["://", ":", ":///", "//"]), parts) | parts)
@example(uri="file://[x")
@example(uri="file:///%00")
@example(uri="s3://\ud800/x")
@example(uri="abfss://c@account.dfs.core.windows.net/x")
def test_any_uri_is_a_location_or_a_typed_error(uri):
    try:
        location = Location.parse(uri)
    except InvalidInputError:
        return
    again = pickle.loads(pickle.dumps(location))
    assert again == location
    assert "\0" not in location.uri
    assert Location.parse(location.uri, location.options).uri == location.uri or location.scheme == "file"
    if location.scheme == "file":
        assert os.path.isabs(location.path)
        # What was percent-encoded is not decoded twice.
        assert Location.parse(location.uri).path == location.path or "://" in location.uri


@quick
@given(uri=st.none() | st.integers() | st.binary() | st.lists(st.text()) | st.floats())
def test_what_is_no_string_is_refused(uri):
    for call in (Location.parse, hg.open_table):
        with pytest.raises(InvalidInputError):
            call(uri)


@settings(quick, max_examples=EXAMPLES // 2)
@given(
    scheme=st.sampled_from(["s3", "gs", "az", "memory"]),
    options=st.dictionaries(names, values, max_size=4),
    secret_in=st.sampled_from(["aws_secret_access_key", "azure_storage_account_key", "google_service_account_key", "token", "nonsense"]),
)
def test_any_options_open_a_store_or_are_refused_without_giving_a_secret_away(scheme, options, secret_in):
    said = []
    try:
        location = Location.parse(f"{scheme}://bucket/path", {**options, secret_in: SECRET})
        said += [repr(location), str(location), repr(location.options), str(location.options)]
        store = location.open()
        said += [repr(store), store.uri, repr(vars(store))]
    except HeadgateError as error:
        said.append(shown(error))
    assert not any(SECRET in text for text in said)


@quick
@given(
    scheme=st.sampled_from(objects),
    before=st.text(alphabet="abcAKIA09:/", max_size=8),
    after=st.sampled_from(["@bucket/x", "@bucket", ":x@bucket/p", "/more@bucket/x"]),
)
def test_a_secret_in_a_uri_is_refused_and_not_repeated(scheme, before, after):
    uri = f"{scheme}://key:{before}{SECRET}{after}"
    with pytest.raises(InvalidInputError) as caught:
        hg.open_table(uri)
    assert SECRET not in shown(caught.value)


@pytest.mark.parametrize("query", ["?token={}", "?a=b&sig={}", "#{}"])
@pytest.mark.parametrize("scheme", ["s3", "az", "gs", "file", "memory", "https"])
def test_a_secret_in_a_query_is_refused_and_not_repeated(scheme, query):
    if scheme == "file" and query.startswith("#"):
        pytest.skip("a file's name may have a # in it")
    with pytest.raises(InvalidInputError) as caught:
        Location.parse(f"{scheme}:///folder/x{query.format(SECRET)}" if scheme == "file" else f"{scheme}://b/x{query.format(SECRET)}")
    assert SECRET not in shown(caught.value)


@pytest.mark.parametrize("options", ["aws_region=x", 5, [("a", "b")], b"x"])
def test_options_that_are_no_mapping_are_refused(options):
    with pytest.raises(InvalidInputError):
        Location.parse("s3://b/x", options)
