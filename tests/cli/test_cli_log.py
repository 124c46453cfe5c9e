"""`headgate tail` and `trim`, and how commands end."""

from __future__ import annotations

import json
import signal

import pyarrow as pa

import headgate as hg

WAL_ONLY = hg.ShardWriterConfig(enable_memtable=False)


def test_tail_gives_one_json_object_per_entry_with_its_rows(headgate, table):
    lines = headgate("tail", table.uri, "--json").lines

    assert [(line["shard"], line["epoch"], line["position"], line["kind"]) for line in lines] == [
        ("0000", 1, 0, "data"),
        ("0000", 1, 1, "data"),
        ("0000", 1, 2, "data"),
        ("0000", 2, 4, "data"),
    ]
    assert lines[0]["puts"] == [{"op": "upsert", "rows": [{"id": 1, "note": "one"}]}]
    assert (lines[1]["puts"][0]["producer"], lines[1]["puts"][0]["sequence"]) == ("p", 0)
    assert lines[2]["puts"] == [{"op": "delete", "rows": [{"id": 1}]}]
    assert lines[3]["puts"][0]["rows"] == [{"id": 4, "note": None}]


def test_tail_shows_people_a_line_per_put(headgate, table):
    ran = headgate("tail", table.uri, "--seals")

    head, *lines = ran.out.splitlines()
    assert head.split() == ["shard", "position", "epoch", "time", "(UTC)", "rows", "bytes", "content"]
    assert [line.split()[1] for line in lines] == ["0", "1", "2", "3", "4"]
    assert "[p 0] id=2 note=two (+1 rows)" in lines[1]
    assert "delete id=1" in lines[2]
    assert "ends epoch 1, by epoch 2" in lines[3]
    assert "note=null" in lines[4]


def test_tail_starts_stops_and_shows_seals_as_asked(headgate, table):
    def positions(*arguments):
        return [line["position"] for line in headgate("tail", table.uri, "--json", *arguments).lines]

    assert positions("--start", 2) == [2, 4]
    assert positions("--start", 3, "--seals") == [3, 4]
    assert positions("--limit", 2) == [0, 1]
    assert positions("--limit", 0) == []
    assert positions("--start", "end") == []
    assert positions("--start", 99) == []
    assert positions("--shard", "0001") == []
    assert positions("--shard", "0000", "--shard", "0000", "--limit", 9) == [0, 1, 2, 4]


def test_tail_of_an_unknown_shard_names_those_there_are(headgate, table):
    ran = headgate("tail", table.uri, "--shard", "7", "--json")

    assert ran.code == 1
    assert ran.error["hint"] == "it has 0000, 0001"


def test_every_kind_of_value_becomes_json(headgate, tmp_path):
    rows = pa.table(
        {
            "bytes": pa.array([b"\x00\xff"]),
            "at": pa.array([1_600_000_000_000_000_001], pa.timestamp("ns", tz="UTC")),
            "day": pa.array([0], pa.date32()),
            "clock": pa.array([1], pa.time64("ns")),
            "took": pa.array([5], pa.duration("ms")),
            "price": pa.array(["12.50"]).cast(pa.decimal128(10, 2)),
            "half": pa.array([float("nan")], pa.float64()),
            "far": pa.array([float("-inf")], pa.float32()),
            "vector": pa.array([[1.0, 2.0]], pa.list_(pa.float32(), 2)),
            "deep": pa.array([{"times": [0], "raw": b"a"}], pa.struct([("times", pa.list_(pa.timestamp("ns"))), ("raw", pa.binary())])),
        }
    )
    table = hg.create_table(tmp_path / "t", rows.schema)
    with table.shard("0000").writer(WAL_ONLY) as writer:
        writer.put(rows).wait()

    ran = headgate("tail", table.uri, "--json")

    (row,) = ran.lines[0]["puts"][0]["rows"]
    assert row == {
        "bytes": "AP8=",
        "at": "2020-09-13 12:26:40.000000001Z",
        "day": "1970-01-01",
        "clock": "00:00:00.000000001",
        "took": 5,
        "price": "12.50",
        "half": "NaN",
        "far": "-Infinity",
        "vector": [1.0, 2.0],
        "deep": {"times": ["1970-01-01 00:00:00.000000000"], "raw": "YQ=="},
    }
    assert headgate("tail", table.uri).code == 0


def test_a_row_cannot_command_the_terminal(headgate, tmp_path):
    table = hg.create_table(tmp_path / "t", pa.schema([("note", pa.string())]))
    with table.shard("0000").writer(WAL_ONLY) as writer:
        writer.put([{"note": "\x1b[2Jgone\nnext"}]).wait()

    out = headgate("tail", table.uri).out

    assert "\x1b" not in out
    assert len(out.splitlines()) == 2


def test_trim_moves_the_cursor_of_every_shard_or_of_one(headgate, table):
    one = headgate("trim", table.uri, "--before", 2, "--shard", "0000", "--json")

    assert one.json["shards"] == [{"shard": "0000", "cursor": 2, "tip": 5, "lag": 3}]
    assert headgate("trim", table.uri, "--before", 0).code == 0
    assert [shard.cursor for shard in table.status().shards] == [2, 0]


def test_trim_beyond_the_tip_is_refused(headgate, table):
    ran = headgate("trim", table.uri, "--before", 9, "--shard", "0000", "--json")

    assert ran.code == 1
    assert ran.error["hint"] == "trim to 5 at most"


def test_tail_follows_a_shard_and_ctrl_c_ends_it_quietly(process, table):
    following = process("tail", table.uri, "--shard", "0000", "--start", "4", "--follow", "--json")
    assert json.loads(following.stdout.readline())["position"] == 4

    with table.shard("0000").writer(WAL_ONLY) as writer:
        writer.put([{"id": 5, "note": "five"}]).wait()
    assert json.loads(following.stdout.readline())["position"] == 6

    following.send_signal(signal.SIGINT)
    out, err = following.communicate(timeout=30)
    assert (out, err) == ("", "")
    assert following.returncode == 130


def test_tail_follows_several_shards(process, table):
    following = process("tail", table.uri, "--start", "4", "--follow", "--json", "--limit", "3")
    assert json.loads(following.stdout.readline())["position"] == 4

    with table.shard("0001").writer(WAL_ONLY) as writer:
        for _ in range(6):
            writer.put([{"id": 5, "note": "five"}]).wait()

    out, err = following.communicate(timeout=30)
    assert [(line["shard"], line["position"]) for line in map(json.loads, out.splitlines())] == [("0001", 4), ("0001", 5)]
    assert (following.returncode, err) == (0, "")


def test_a_closed_pipe_ends_a_command_quietly(process, table):
    with table.shard("0000").writer(WAL_ONLY) as writer:
        for number in range(200):
            writer.put([{"id": number, "note": "x" * 1000}])

    tail = process("tail", table.uri, "--json")
    tail.stdout.readline()
    tail.stdout.close()
    err = tail.stderr.read()
    tail.wait(timeout=30)

    assert err == ""
    assert tail.returncode == 141


def test_an_error_in_a_process_is_words_and_never_a_traceback(process, tmp_path):
    ran = process("status", tmp_path / "none")
    out, err = ran.communicate(timeout=30)

    assert ran.returncode == 1
    assert out == ""
    assert "Traceback" not in err
    assert "hint:" in err
