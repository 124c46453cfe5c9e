"""The command line on S3: options by flag and by environment."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

SECRET = "not-to-be-seen"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    boto3.client("s3", endpoint_url=address, region_name="us-east-1", aws_access_key_id="k", aws_secret_access_key=SECRET).create_bucket(
        Bucket="bucket"
    )
    yield address
    server.stop()


def options(endpoint: str) -> dict[str, str]:
    return {
        "aws_endpoint": endpoint,
        "aws_access_key_id": "key",
        "aws_secret_access_key": SECRET,
        "aws_region": "us-east-1",
        "allow_http": "true",
    }


def test_storage_options_come_by_flag_or_by_environment(headgate, endpoint, schema_file):
    flags = [text for name, value in options(endpoint).items() for text in ("-o", f"{name}={value}")]
    one_variable = {"HEADGATE_STORAGE_OPTIONS": " ".join(f"{name}={value}" for name, value in options(endpoint).items())}

    created = headgate("create", "s3://bucket/t", "--schema", schema_file, "--key", "id", *flags, "--json")
    by_flag = headgate("verify", "s3://bucket/t", *flags, "--json")
    by_variable = headgate("verify", "s3://bucket/t", "--json", env=one_variable)

    assert [ran.code for ran in (created, by_flag, by_variable)] == [0, 0, 0], created.err + by_variable.err
    assert by_flag.json == by_variable.json
    assert SECRET not in created.out + by_flag.out


def test_the_usual_variables_of_the_environment_count(headgate, endpoint, schema_file):
    usual = {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }
    http = ("-o", "allow_http=true")  # a test server without TLS

    created = headgate("create", "s3://bucket/by-environment", "--schema", schema_file, *http, "--json", env=usual)

    assert created.code == 0, created.err


def test_a_log_in_another_bucket_has_options_of_its_own(headgate, endpoint, schema_file, tmp_path):
    flags = [text for name, value in options(endpoint).items() for text in ("--wal-option", f"{name}={value}")]

    created = headgate("create", tmp_path / "t", "--schema", schema_file, "--wal-uri", "s3://bucket/log", *flags, "--json")
    status = headgate("status", tmp_path / "t", *flags, "--json")

    assert (created.code, status.code) == (0, 0), created.err + status.err
    assert status.json["shards"][0]["wal_store"] == "s3://bucket/log"


def test_a_store_that_refuses_is_an_error_that_repeats_no_secret(headgate, endpoint):
    wrong = [
        text for name, value in {**options(endpoint), "aws_endpoint": "http://127.0.0.1:1"}.items() for text in ("-o", f"{name}={value}")
    ]

    ran = headgate("status", "s3://bucket/t", *wrong, "--json")

    assert ran.code == 1
    assert ran.error["type"] == "StoreUnavailableError"
    assert ran.error["retryable"] is True
    assert SECRET not in ran.err


def test_an_option_that_is_none_is_named(headgate):
    ran = headgate("status", "s3://bucket/t", "-o", f"aws_passwort={SECRET}", "--json")

    assert ran.code == 1
    assert "aws_passwort" in ran.error["message"]
    assert SECRET not in ran.err


def test_rows_are_put_and_read_by_flag_and_by_environment(headgate, endpoint, schema_file):
    flags = [text for name, value in options(endpoint).items() for text in ("-o", f"{name}={value}")]
    usual = {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}
    http = ("-o", "allow_http=true")
    uri = "s3://bucket/rows"
    headgate("create", uri, "--schema", schema_file, "--key", "id", "--shards", 2, *flags)

    by_flag = headgate("put", uri, "-", "--format", "csv", *flags, "--json", stdin="id,note\n1,a\n2,b\n")
    by_variable = headgate("put", uri, "-", "--format", "json", *http, "--json", stdin='{"id": 2, "note": "B"}\n', env=usual)

    assert (by_flag.code, by_variable.code) == (0, 0), by_flag.err + by_variable.err
    assert sorted(line["note"] for line in headgate("scan", uri, "--json", *flags).lines) == ["B", "a"]
    assert headgate("lookup", uri, "2", "--json", *http, env=usual).lines == [{"id": 2, "note": "B"}]
    assert headgate("sql", uri, "select count(*) as n from t", "--json", *flags).lines == [{"n": 2}]
