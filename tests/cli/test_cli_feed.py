"""`headgate changes` and `consumers list|drop`."""

from __future__ import annotations

import json


def test_changes_gives_one_json_object_per_batch_with_the_offset_after_it(headgate, table):
    lines = headgate("changes", table.uri, "--json").lines

    rows = [row for line in lines for row in line["rows"]]
    assert [(row["_op"], row["id"], row["_position"]) for row in rows] == [
        ("upsert", 1, 0),
        ("upsert", 2, 1),
        ("upsert", 3, 1),
        ("delete", 1, 2),
        ("upsert", 4, 4),
    ]
    assert lines[-1]["offset"] == {"0000": [5, 0], "0001": [0, 0]}
    assert headgate("changes", table.uri, "--json", "--start", json.dumps({"0000": [4, 0]})).lines[0]["rows"][0]["id"] == 4


def test_changes_shows_people_a_line_per_row(headgate, table):
    head, *lines = headgate("changes", table.uri).out.splitlines()

    assert head.split() == ["position", "load", "time", "(UTC)", "op", "row"]
    assert [line.split()[0] for line in lines] == ["0", "1", "1", "2", "4"]
    assert "delete  id=1" in lines[3]


def test_a_consumer_goes_on_is_listed_and_dropped(headgate, table):
    assert len(headgate("changes", table.uri, "--consumer", "c", "--json").lines) == 1
    assert headgate("changes", table.uri, "--consumer", "c", "--json").out == ""

    found = headgate("consumers", "list", table.uri, "--json").json["consumers"]
    assert [(one["name"], one["lag"], one["offset"]) for one in found] == [("c", 0, {"0000": [5, 0], "0001": [0, 0]})]
    assert headgate("consumers", "list", table.uri).out.splitlines()[1].split()[:5] == ["c", "0000", "5", "0", "0"]

    assert headgate("consumers", "drop", table.uri, "c", "--json").json["dropped"] == "c"
    assert headgate("consumers", "list", table.uri, "--json").json["consumers"] == []
    again = headgate("consumers", "drop", table.uri, "c")
    assert again.code == 1
    assert "no consumer 'c'" in again.err


def test_a_start_that_is_none_is_told(headgate, table):
    ran = headgate("changes", table.uri, "--start", "yesterday")

    assert ran.code == 1
    assert "snapshot" in ran.err
