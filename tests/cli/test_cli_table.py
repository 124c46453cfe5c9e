"""`headgate create`, `status` and `verify`."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

import headgate as hg


def test_create_makes_the_table_that_was_asked_for(headgate, schema_file, tmp_path):
    ran = headgate("create", tmp_path / "t", "--schema", schema_file, "--key", "id", "--shards", 4, "--json")

    assert ran.code == 0
    assert ran.json["shards"] == ["0000", "0001", "0002", "0003"]
    table = hg.open_table(tmp_path / "t")
    assert table.key == ("id",)
    assert table.schema.equals(pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("note", pa.string())]))
    assert (table.sharding.kind, table.sharding.column, table.sharding.buckets) == ("bucket", "id", 4)


def test_create_tells_people_what_it_made(headgate, schema_file, tmp_path):
    ran = headgate("create", tmp_path / "t", "--schema", schema_file, "--key", "id")

    assert ran.code == 0
    assert "key id; 1 shard" in ran.out
    assert "id int64 not null" in ran.out


def test_create_takes_the_columns_of_a_parquet_file(headgate, tmp_path):
    rows = pa.table({"id": pa.array([1], pa.int32()), "at": pa.array([0], pa.timestamp("us", tz="UTC"))})
    parquet.write_table(rows, tmp_path / "sample.parquet")

    assert headgate("create", tmp_path / "t", "--schema", tmp_path / "sample.parquet", "--key", "id").code == 0

    assert hg.open_table(tmp_path / "t").schema.equals(rows.schema)


def test_create_takes_the_columns_of_an_arrow_file(headgate, tmp_path):
    rows = pa.table({"id": [1], "name": ["x"]})
    with pa.OSFile(str(tmp_path / "sample.arrow"), "wb") as file, pa.ipc.new_file(file, rows.schema) as writer:
        writer.write_table(rows)

    assert headgate("create", tmp_path / "t", "--schema", tmp_path / "sample.arrow").code == 0

    assert hg.open_table(tmp_path / "t").schema.equals(rows.schema)
    assert hg.open_table(tmp_path / "t").key == ()


def test_create_with_a_composite_key_shards_by_the_column_asked_for(headgate, schema_file, tmp_path):
    ran = headgate(
        "create", tmp_path / "t", "--schema", schema_file, "--key", "id", "--key", "note", "--shards", 2, "--shard-by", "note", "--json"
    )

    assert ran.json["key"] == ["id", "note"]
    assert ran.json["sharding"] == {"kind": "bucket", "column": "note", "buckets": 2}


def test_create_again_is_an_error_unless_asked_to_open(headgate, schema_file, tmp_path):
    create = ("create", tmp_path / "t", "--schema", schema_file, "--key", "id")
    assert headgate(*create).code == 0

    again = headgate(*create)
    opened = headgate(*create, "--if-exists", "open")

    assert (again.code, opened.code) == (1, 0)
    assert again.out == ""
    assert "there is a table" in again.err
    assert "hint:" in again.err


def test_create_with_the_log_elsewhere_is_found_again_without_saying_so(headgate, schema_file, tmp_path):
    headgate("create", tmp_path / "t", "--schema", schema_file, "--wal-uri", tmp_path / "log")

    status = headgate("status", tmp_path / "t", "--json").json

    assert status["shards"][0]["wal_store"] == str(tmp_path / "log")
    assert str(tmp_path / "log") in headgate("status", tmp_path / "t").out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "has no list of fields"),
        ('{"fields": []}', "has no list of fields"),
        ('{"fields": [{"name": "id"}]}', "field 0 lacks a name or a type"),
        ('{"fields": [{"name": "id", "type": "integer"}]}', "'integer' is not a type"),
        ('{"fields": [{"name": "id", "type": "int64", "null": false}]}', "'null', which means nothing here"),
        ('{"fields": [{"name": "id", "type": "int64", "nullable": "no"}]}', "nullable of the field 'id'"),
        ('{"fields": [{"name": "id", "type": "null", "nullable": false}]}', "'id'"),
        ('{"fields": [{"name": "_op", "type": "int64"}]}', "_op"),
    ],
)
def test_a_schema_file_that_cannot_be_used_is_refused_with_a_hint_and_nothing_is_made(headgate, tmp_path, text, message):
    (tmp_path / "bad.json").write_text(text)

    ran = headgate("create", tmp_path / "t", "--schema", tmp_path / "bad.json", "--json")

    assert ran.code == 1
    assert message in ran.error["message"]
    assert ran.error["hint"]
    assert not (tmp_path / "t").exists()


def test_a_damaged_parquet_sample_is_refused(headgate, tmp_path):
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no more")

    ran = headgate("create", tmp_path / "t", "--schema", tmp_path / "bad.parquet", "--json")

    assert ran.code == 1
    assert ran.error["type"] == "InvalidInputError"


@pytest.mark.parametrize(
    "arguments",
    [
        ("create", "t"),
        ("create", "t", "--schema", "no-such-file.json"),
        ("create", "t", "--schema", "SCHEMA", "--shards", "0"),
        ("create", "t", "--schema", "SCHEMA", "--shards", "2"),
        ("create", "t", "--schema", "SCHEMA", "--if-exists", "replace"),
        ("status",),
        ("status", "t", "-o", "secret"),
        ("status", "t", "--wal-option", "=secret"),
        ("tail", "t", "--start", "-3"),
        ("trim", "t"),
        ("nothing",),
    ],
)
def test_a_command_called_wrongly_ends_with_2_and_says_so_on_stderr(headgate, schema_file, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)

    ran = headgate(*(str(schema_file) if a == "SCHEMA" else a for a in arguments))

    assert ran.code == 2
    assert ran.out == ""
    assert "Error" in ran.err
    assert "secret" not in ran.err, "what stands in an option may be a password"
    assert not (tmp_path / "t").exists()


def test_status_shows_every_shard(headgate, table):
    ran = headgate("status", table.uri, "--json")

    first, second = ran.json["shards"]
    assert (first["shard"], first["epoch"], first["tip"], first["cursor"], first["producers"]) == ("0000", 2, 5, 0, 1)
    assert (second["epoch"], second["tip"], second["owner"]) == (0, 0, None)
    text = headgate("status", table.uri).out
    assert "key id; 2 shards, by bucket of id" in text
    assert "0001" in text
    assert "never" in text


def test_the_schema_in_status_can_be_used_to_create_another_table(headgate, table, tmp_path):
    (tmp_path / "copy.json").write_text(json.dumps(headgate("status", table.uri, "--json").json["schema"]))

    headgate("create", tmp_path / "copy", "--schema", tmp_path / "copy.json", "--key", "id")

    assert hg.open_table(tmp_path / "copy").schema.equals(table.schema)


def test_a_table_that_is_not_there_is_an_error_with_a_hint(headgate, tmp_path):
    people = headgate("status", tmp_path / "none")
    machines = headgate("status", tmp_path / "none", "--json")

    assert (people.code, machines.code) == (1, 1)
    assert people.err.startswith("headgate: there is no table at")
    assert "\n  hint: " in people.err
    assert machines.error["type"] == "NotFoundError"
    assert machines.error["retryable"] is False
    assert not (tmp_path / "none").exists()


def test_a_uri_with_credentials_is_refused_without_repeating_them(headgate):
    ran = headgate("status", "s3://key:hunter2@bucket/t")

    assert ran.code == 1
    assert "hunter2" not in ran.err + ran.out


def test_verify_says_that_all_is_well(headgate, table):
    shallow, deep = headgate("verify", table.uri, "--json"), headgate("verify", table.uri, "--deep", "--json")

    assert (shallow.code, deep.code) == (0, 0)
    assert deep.json["ok"] is True
    assert deep.json["problems"] == []
    assert (deep.json["counts"]["entries"], deep.json["counts"]["seals"], deep.json["counts"]["rows"]) == (4, 1, 5)
    assert headgate("verify", table.uri).out.startswith("ok (shards 2")


def test_verify_names_a_damaged_object_and_ends_with_1(headgate, table):
    entry = sorted(Path(table.uri).glob("wal/*/0000/*/*.arrow"))[1]
    damaged = bytearray(entry.read_bytes())
    damaged[100] ^= 1
    entry.write_bytes(damaged)

    machines, people = headgate("verify", table.uri, "--json"), headgate("verify", table.uri)

    assert (machines.code, people.code) == (1, 1)
    (problem,) = machines.json["problems"]
    assert problem["kind"] == "CorruptEntryError"
    assert entry.name in problem["object"]
    assert entry.name in people.out
    assert "hint:" in people.out


def test_verify_notices_a_missing_entry_and_a_missing_seal(headgate, table):
    for number in (2, 3):
        sorted(Path(table.uri).glob("wal/*/0000/0000000001/*.arrow"))[2].unlink()
        kinds = {problem["kind"] for problem in headgate("verify", table.uri, "--json").json["problems"]}
        assert ("WalHoleError" in kinds, "SealMissing" in kinds) == (True, number == 3)


def test_the_version_is_the_package_s(headgate):
    assert headgate("--version").out == f"headgate {hg.__version__}\n"


def test_help_lists_the_commands(headgate):
    ran = headgate("--help")

    assert ran.code == 0
    for command in (
        "create",
        "put",
        "scan",
        "sql",
        "lookup",
        "status",
        "tail",
        "verify",
        "trim",
        "compact",
        "gc",
        "columns",
        "checkpoint",
        "demo",
    ):
        assert f"\n  {command} " in ran.out
        assert headgate(command, "-h").code == 0


# -- indexes, shards by value, status of runs


def test_create_takes_indexes(headgate, tmp_path):
    (tmp_path / "s.json").write_text(
        '{"fields": [{"name": "id", "type": "int64"}, {"name": "body", "type": "string"}, '
        '{"name": "v", "type": "fixed_size_list<float32, 4>"}, {"name": "w", "type": "fixed_size_list<float32, 4>"}]}'
    )
    indexes = [text for one in ("text:body", "vector:v", "vector:w:cosine", "scalar:id") for text in ("--index", one)]

    ran = headgate("create", tmp_path / "t", "--schema", tmp_path / "s.json", "--key", "id", *indexes, "--json")

    assert [(index["kind"], index["column"], index.get("metric")) for index in ran.json["indexes"]] == [
        ("text", "body", None),
        ("vector", "v", "l2"),
        ("vector", "w", "cosine"),
        ("scalar", "id", None),
    ]
    assert len(hg.open_table(tmp_path / "t").indexes) == 4
    assert "body string, text index" in headgate("status", tmp_path / "t").out


@pytest.mark.parametrize("text", ["body", "words:note", "text:", "vector"])
def test_an_index_that_is_none_is_refused(headgate, schema_file, tmp_path, text):
    ran = headgate("create", tmp_path / "t", "--schema", schema_file, "--index", text)

    assert ran.code == 2
    assert not (tmp_path / "t").exists()


def test_an_index_that_cannot_be_kept_is_refused(headgate, schema_file, tmp_path):
    ran = headgate("create", tmp_path / "t", "--schema", schema_file, "--index", "vector:note", "--json")

    assert (ran.code, ran.error["type"]) == (1, "InvalidInputError")
    assert not (tmp_path / "t").exists()


def test_create_with_a_shard_for_each_value(headgate, schema_file, tmp_path):
    command = ("create", tmp_path / "t", "--schema", schema_file, "--key", "note", "--shard-per", "note")
    assert headgate(*command, "--shards", 2).code == 2

    assert headgate(*command, "--json").json["sharding"] == {"kind": "identity", "column": "note"}
    headgate("put", tmp_path / "t", "-", "--format", "csv", stdin="id,note\n1,acme\n2,zeta\n")

    assert [shard["shard"] for shard in headgate("status", tmp_path / "t", "--json").json["shards"]] == ["acme", "zeta"]


def test_status_shows_runs_and_what_is_not_in_them(headgate, table):
    with table.shard("0001").writer() as writer:
        writer.put([{"id": 5, "note": "five"}])
        writer.delete([{"id": 6}])
    with table.shard("0001").writer(hg.ShardWriterConfig(enable_memtable=False)) as writer:
        writer.put([{"id": 7, "note": "seven"}])

    first, second = headgate("status", table.uri, "--json").json["shards"]

    assert (first["runs"], first["rows"], first["lag"], first["pending_generations"]) == (0, 0, 5, 0)
    assert (second["runs"], second["rows"], second["tombstones"], second["lag"], second["clean"]) == (1, 2, 1, 1, False)
    assert second["bytes"] > 0
    head, *_, last = headgate("status", table.uri).out.splitlines()[3:]
    assert head.split()[:10] == ["shard", "state", "epoch", "cursor", "tip", "lag", "runs", "pending", "rows", "size"]
    assert last.split()[:5] == ["all", "6", "1", "1", "2"]


def test_status_is_watched_until_ctrl_c(process, table):
    watching = process("status", table.uri, "--watch", "--interval", "0.1", "--json")
    first, second = (json.loads(watching.stdout.readline()) for _ in range(2))
    assert first["uri"] == second["uri"] == table.uri

    watching.send_signal(signal.SIGINT)
    _, err = watching.communicate(timeout=30)
    assert (watching.returncode, err) == (130, "")
