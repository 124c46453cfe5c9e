"""`headgate demo --takeover`, end to end, with its real processes."""

from __future__ import annotations

import json
import os

import pytest

import headgate as hg
from headgate.cli import takeover as demo_module


def test_the_demo_holds_and_leaves_nothing_behind(process, tmp_path):
    ran = process("demo", "--takeover", "--json", cwd=tmp_path)
    out, err = ran.communicate(timeout=120)

    assert (ran.returncode, err) == (0, "")
    document = json.loads(out)
    assert document["ok"] is True
    assert document["kept"] is False
    assert not os.path.exists(document["uri"])
    facts = {step["step"]: step for step in document["steps"]}
    assert facts["B takes over"]["epoch"] == 2
    assert facts["C takes over and sends again, as the same producer"]["epoch"] == 3
    assert len(facts["The log, read back"]["seals"]) == 2
    for pid in document["steps"][0]["pids"]:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_the_demo_tells_its_story_and_keeps_the_folder_it_was_given(headgate, tmp_path):
    ran = headgate("demo", "--takeover", "--dir", tmp_path / "here")

    assert ran.code == 0
    assert "refused with FencedError" in ran.out
    assert "no acknowledged row is missing" in ran.out
    assert f"headgate tail --seals {tmp_path / 'here'}" in ran.out
    assert hg.open_table(tmp_path / "here").verify(deep=True).ok


def test_the_demo_does_not_write_into_a_table_that_is_there(headgate, table):
    before = table.status()

    ran = headgate("demo", "--takeover", "--dir", table.uri, "--json")

    assert ran.code == 1
    assert ran.error["type"] == "AlreadyExistsError"
    assert table.status() == before


def test_the_demo_ends_with_1_and_keeps_the_evidence_when_something_does_not_hold(headgate, monkeypatch):
    # A planted bug in the eyes of the demo: it expects rows that nobody wrote.
    monkeypatch.setattr(demo_module, "_ids", lambda sequence: {-1 - sequence})

    ran = headgate("demo", "--takeover", "--json")

    assert ran.code == 1
    assert "did not hold" in ran.error["message"]
    assert "the table is kept in" in ran.error["hint"]
    kept = ran.error["hint"].rpartition(" ")[2]
    assert hg.open_table(kept).uri == kept
    demo_module.shutil.rmtree(kept)
