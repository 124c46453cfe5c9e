"""`headgate clone`, `detach`, `split`, `drop`."""

from __future__ import annotations

import pyarrow as pa
import pytest

import headgate as hg

SCHEMA = pa.schema([pa.field("id", pa.int64(), False), ("value", pa.string())])


@pytest.fixture
def table(tmp_path):
    made = hg.create_table(tmp_path / "t", SCHEMA, key="id", sharding=hg.bucket("id", 2))
    with made.writer() as writer:
        writer.put([{"id": id, "value": "a"} for id in range(100)]).wait()
    return made


def test_a_table_is_cloned_detached_and_dropped(headgate, table, tmp_path):
    twin = str(tmp_path / "twin")
    headgate("checkpoint", "create", table.uri, "--name", "then")
    made = headgate("clone", table.uri, twin, "--checkpoint", "then", "--json")
    assert made.json == {"uri": twin, "source": table.uri, "shards": ["0000", "0001"]}
    assert "is a clone of" in headgate("clone", table.uri, twin, "--checkpoint", "then").out
    refused = headgate("drop", table.uri, "--confirm", table.uri, "--json")
    assert refused.code == 1
    assert twin in refused.error["message"]
    assert headgate("scan", twin, "--json").out.count("\n") == 100
    assert headgate("detach", twin, "--json").json == {"uri": twin, "detached": True}
    dropped = headgate("drop", table.uri, "--confirm", table.uri, "--json")
    assert dropped.json["dropped"]
    assert dropped.json["objects"] > 5
    assert headgate("status", table.uri).code == 1
    assert headgate("scan", twin, "--json").out.count("\n") == 100


def test_another_checkpoint_is_refused_with_a_hint(headgate, table, tmp_path):
    twin = str(tmp_path / "twin")
    assert headgate("clone", table.uri, twin).code == 0
    other = headgate("checkpoint", "create", table.uri, "--json").json["id"]
    ran = headgate("clone", table.uri, twin, "--checkpoint", other, "--json")
    assert ran.code == 1
    assert ran.error["type"] == "AlreadyExistsError"
    assert ran.error["hint"]


def test_a_shard_is_split(headgate, table):
    assert headgate("split", table.uri, "0000", "--json").json == {"uri": table.uri, "shard": "0000", "parts": ["0000-0", "0000-1"]}
    again = headgate("split", table.uri, "0000")
    assert again.code == 1
    assert "was split" in again.err
    shown = headgate("split", table.uri, "0001").out
    assert "0001-0 and 0001-1" in shown
    assert headgate("scan", table.uri, "--json").out.count("\n") == 100
    assert [shard["shard"] for shard in headgate("status", table.uri, "--json").json["shards"]] == ["0000-0", "0000-1", "0001-0", "0001-1"]


def test_a_drop_needs_the_uri_once_more(headgate, table):
    assert headgate("drop", table.uri).code == 2
    assert headgate("drop", table.uri, "--confirm", "yes").code == 1
    assert headgate("scan", table.uri, "--json").out.count("\n") == 100
