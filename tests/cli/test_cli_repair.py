"""`headgate repair`, and what `status --watch` and `verify` say of a table in trouble."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest

import headgate as hg


def entry(table: hg.Table, epoch: int, position: int) -> Path:
    log = table.shard("0000").log
    return Path(table.uri) / log.space(log.manifests.load()).key(epoch, position)


def test_repair_of_a_whole_table_does_nothing(headgate, table):
    for arguments in ([], ["--yes"]):
        ran = headgate("repair", table.uri, *arguments)
        assert ran.code == 0
        assert ran.out == "nothing is broken, nothing was done\n"


def test_repair_says_first_what_it_would_give_up(headgate, table):
    entry(table, 1, 1).unlink()

    ran = headgate("repair", table.uri)

    assert ran.code == 1
    assert "position 1 of the log is missing" in ran.out
    assert "would be done: an empty entry takes the place" in ran.out
    assert "given up: all rows of position 1" in ran.out
    assert "nothing was changed" in ran.out
    assert "--yes repairs" in ran.out
    assert not entry(table, 1, 1).exists()


def test_repair_with_yes_does_it_and_verify_is_content(headgate, table):
    entry(table, 1, 1).unlink()
    assert headgate("verify", table.uri).code == 1

    ran = headgate("repair", table.uri, "--yes")

    assert ran.code == 0, ran.out
    assert "1 repairs done, 1 of them at a loss; all is well" in ran.out
    assert headgate("verify", table.uri, "--deep").code == 0
    assert sorted(row["id"] for row in headgate("scan", table.uri, "--json").lines) == [4], "1 was deleted, 2 and 3 are lost"


def test_repair_tells_machines_everything(headgate, table):
    entry(table, 1, 1).unlink()

    plan = headgate("repair", table.uri, "--json")
    done = headgate("repair", table.uri, "--yes", "--json")

    assert (plan.code, done.code) == (1, 0)
    assert plan.json["dry_run"] is True
    assert plan.json["ok"] is False
    (step,) = done.json["steps"]
    assert (step["kind"], step["shard"], step["first_position"], step["end_position"]) == ("entry", "0000", 1, 2)
    assert done.json["gives_up"] == [f"shard 0000: {step['gives_up']}"]


def test_repair_names_the_copies_it_keeps(headgate, table):
    path = entry(table, 1, 1)
    damaged = path.read_bytes()[:-1] + b"?"
    path.write_bytes(damaged)

    ran = headgate("repair", table.uri, "--yes", "--json")

    (copy,) = ran.json["kept"]
    assert Path(copy).read_bytes() == damaged


def test_a_table_whose_own_manifest_is_damaged_is_repaired_too(headgate, table):
    table.add_columns(hg_schema())
    latest = max((Path(table.uri) / "table").iterdir())
    latest.write_bytes(b"")
    assert headgate("status", table.uri, "--json").error["type"] == "CorruptEntryError"

    plan = headgate("repair", table.uri)
    assert plan.code == 1
    assert "the table: version" in plan.out
    assert "columns, or shards" in plan.out
    assert headgate("repair", table.uri, "--yes").code == 0
    assert [field["name"] for field in headgate("status", table.uri, "--json").json["schema"]["fields"]] == ["id", "note"]


def hg_schema():
    import pyarrow as pa

    return pa.schema([pa.field("extra", pa.string())])


def test_repair_of_a_table_that_is_not_there_is_an_error_with_a_hint(headgate, tmp_path):
    ran = headgate("repair", tmp_path / "none")
    assert ran.code == 1
    assert "there is no table" in ran.err
    assert "hint:" in ran.err


def test_verify_points_to_repair(headgate, table):
    entry(table, 1, 1).unlink()
    assert "headgate repair" in headgate("verify", table.uri).out


def test_a_port_for_metrics_goes_with_watch(headgate, table):
    ran = headgate("status", table.uri, "--metrics-port", 9_999)
    assert ran.code == 2
    assert "--watch" in ran.err


def test_a_watched_status_tells_rates_and_answers_prometheus(process, table):
    pytest.importorskip("prometheus_client")
    for port in range(19_500, 19_540):
        one = process("status", table.uri, "--watch", "--json", "--interval", 0.1, "--metrics-port", port)
        line = one.stdout.readline()
        if line:
            break
        assert "cannot be used" in one.stderr.read()
    assert json.loads(line)["shards"][0]["entries_per_second"] == 0
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    assert f'headgate_lag_entries{{shard="0000",table="{table.uri}"}} 5.0' in text
    with table.shard("0000").writer(hg.ShardWriterConfig(enable_memtable=False)) as writer:
        writer.put([{"id": 9, "note": "nine"}]).wait()
    while json.loads(one.stdout.readline())["shards"][0]["entries_per_second"] == 0:
        continue


def test_a_watched_status_shows_people_the_rate(process, table):
    one = process("status", table.uri, "--watch", "--interval", 0.1)
    assert any("entries/s" in one.stdout.readline() for _ in range(10))
