"""`headgate compact`, `gc` and `checkpoint`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
import typer

import headgate as hg
from headgate.cli import main as cli
from headgate.cli.life import seconds


@pytest.fixture
def flushed(tmp_path):
    """Three runs, in the second of which a key is deleted."""
    table = hg.create_table(tmp_path / "t", pa.schema([("id", pa.int64()), ("note", pa.string())]), key="id")
    with table.writer() as writer:
        for number in range(3):
            writer.put([{"id": number, "note": "x"}, {"id": 10, "note": str(number)}])
            if number == 1:
                writer.delete([{"id": 0}])
            writer.flush()
    return table


def test_compact_merges_runs_and_changes_no_row(headgate, flushed):
    rows = headgate("scan", flushed.uri, "--json").lines

    ran = headgate("compact", flushed.uri, "--full", "--json")

    assert ran.code == 0, ran.err
    assert (ran.json["runs_before"], ran.json["runs_after"], ran.json["rows_written"]) == (3, 1, 3)
    assert headgate("status", flushed.uri, "--json").json["shards"][0]["pending_generations"] == 0
    after = headgate("scan", flushed.uri, "--json").lines
    assert sorted(map(str, after)) == sorted(map(str, rows))
    assert headgate("compact", flushed.uri).out.startswith("1 runs are 1 now")


def test_compact_takes_shards(headgate, flushed):
    assert headgate("compact", flushed.uri, "--shard", "0000", "--max-memory", 64, "--json").json["shards"]["0000"] >= 1
    assert headgate("compact", flushed.uri, "--shard", "7", "--json").error["type"] == "NotFoundError"


def test_gc_says_what_it_would_delete_and_deletes_with_yes(headgate, flushed):
    headgate("compact", flushed.uri, "--full")
    before = sum(path.is_file() for path in Path(flushed.uri).rglob("*"))

    plan = headgate("gc", flushed.uri, "--min-age", "0", "--json")
    assert plan.json["dry_run"] is True
    assert set(plan.json["objects"]) == {"entry", "run"}
    assert "would be deleted" in headgate("gc", flushed.uri, "--min-age", "0s").out
    assert sum(path.is_file() for path in Path(flushed.uri).rglob("*")) == before

    done = headgate("gc", flushed.uri, "--min-age", "0", "--yes")
    assert "objects deleted" in done.out
    assert sum(path.is_file() for path in Path(flushed.uri).rglob("*")) < before
    headgate("gc", flushed.uri, "--min-age", "0", "--yes")  # the manifests before the first one's own commits
    assert headgate("gc", flushed.uri, "--min-age", "0").out == "nothing to delete\n"
    assert headgate("scan", flushed.uri, "--count").out == "3\n"
    assert headgate("verify", flushed.uri, "--deep").code == 0


def test_gc_leaves_young_runs_alone(headgate, flushed):
    headgate("compact", flushed.uri, "--full")

    report = headgate("gc", flushed.uri, "--yes", "--json").json

    assert "run" not in report["objects"]
    assert report["held"]["min_age"] > 0
    assert "more held by min_age" in headgate("gc", flushed.uri).out


def test_a_checkpoint_is_made_listed_read_and_dropped(headgate, flushed):
    made = headgate("checkpoint", "create", flushed.uri, "--name", "before", "--ttl", "1h", "--json").json
    with flushed.writer() as writer:
        writer.put([{"id": 77, "note": "later"}])

    assert made["expires"] - made["created"] == pytest.approx(3600)
    (listed,) = headgate("checkpoint", "list", flushed.uri, "--json").json["checkpoints"]
    assert (listed["id"], listed["name"], listed["complete"]) == (made["id"], "before", True)
    assert "before" in headgate("checkpoint", "list", flushed.uri).out
    assert headgate("scan", flushed.uri, "--count").out == "4\n"
    assert headgate("scan", flushed.uri, "--count", "--at", "before").out == "3\n"

    headgate("compact", flushed.uri, "--full")
    headgate("gc", flushed.uri, "--min-age", "0", "--yes")
    assert headgate("scan", flushed.uri, "--count", "--at", made["id"]).out == "3\n"

    assert "until it is dropped" in headgate("checkpoint", "refresh", flushed.uri, "before").out
    assert headgate("checkpoint", "list", flushed.uri, "--json").json["checkpoints"][0]["expires"] is None
    assert headgate("checkpoint", "drop", flushed.uri, "before").code == 0
    assert headgate("checkpoint", "list", flushed.uri, "--json").json["checkpoints"] == []
    assert headgate("checkpoint", "drop", flushed.uri, "before", "--json").error["type"] == "NotFoundError"


def test_a_name_is_given_once(headgate, flushed):
    assert "checkpoint " in headgate("checkpoint", "create", flushed.uri, "--name", "x").out

    assert headgate("checkpoint", "create", flushed.uri, "--name", "x", "--json").error["type"] == "AlreadyExistsError"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", 0), ("90", 90), ("90s", 90), ("15min", 900), ("2m", 120), ("1.5h", 5400), ("7d", 604_800), (" 1 w ", 604_800)],
)
def test_lengths_of_time(text, expected):
    assert seconds(text, "--ttl") == expected


@pytest.mark.parametrize("text", ["", "h", "-1h", "1y", "1h30", "inf", "nan"])
def test_what_is_no_length_of_time(text):
    with pytest.raises(typer.BadParameter):
        seconds(text, "--ttl")


@pytest.mark.parametrize(
    "arguments",
    [("gc", "t", "--min-age", "soon"), ("checkpoint", "create", "t", "--ttl", "x"), ("checkpoint",), ("checkpoint", "drop", "t"),
     ("compact", "t", "--max-memory", "0")],
)  # fmt: skip
def test_called_wrongly_they_end_with_2(headgate, arguments):
    assert headgate(*arguments).code == 2


# -- on Spark


def test_a_master_goes_with_spark(headgate, flushed):
    for command in ("compact", "gc", "verify"):
        ran = headgate(command, flushed.uri, "--master", "local[1]")
        assert ran.code == 2
        assert "--spark" in ran.err


def test_the_command_shares_memory_among_threads_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    library = SimpleNamespace(mallopt=lambda *arguments: calls.append(arguments))
    monkeypatch.setattr("ctypes.CDLL", lambda _: library)
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    cli._share_memory_among_threads()
    assert calls == [(-8, 2)]
    monkeypatch.setenv("MALLOC_ARENA_MAX", "7")
    cli._share_memory_among_threads()
    assert len(calls) == 1
    monkeypatch.delenv("MALLOC_ARENA_MAX")
    del library.mallopt
    cli._share_memory_among_threads()
