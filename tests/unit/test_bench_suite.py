"""What the benchmark suite makes of its measurements: the comparison, the page, the README's table."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def suite() -> ModuleType:
    about = importlib.util.spec_from_file_location("headgate_bench_suite", ROOT / "benchmarks" / "suite.py")
    assert about is not None
    assert about.loader is not None
    module = importlib.util.module_from_spec(about)
    about.loader.exec_module(module)
    return module


def question(
    name: str = "bulk",
    rounds: tuple[float, ...] = (2.0, 2.1, 2.2),
    at_least: float | None = 2.0,
    at_most: float | None = None,
    subject: str = "headgate.MB/s",
) -> dict[str, Any]:
    measured = sorted(rounds)[len(rounds) // 2]
    holds = (at_least is None or measured >= at_least) and (at_most is None or measured <= at_most)
    target = {
        "says": "beside Lance", "subject": subject, "rival": "lance.MB/s", "at_least": at_least, "at_most": at_most,
        "measured": measured, "rounds": list(rounds), "holds": holds,
    }  # fmt: skip
    values = {who: {"median": 1.0, "min": 0.5, "max": 2.0} for who in ("headgate.MB/s", "lance.MB/s")}
    return {"name": name, "title": "bulk", "values": values, "targets": [target], "notes": ["a note"], "missing": {}}


def report(*questions: dict[str, Any], file: str = "wal") -> dict[str, Any]:
    environment = {"system": "Linux", "cores": 2, "python": "3.11", "time": "today", "versions": {"pylance": "14"}}
    return {"quick": False, "environment": environment, "files": {file: {"environment": environment, "questions": list(questions)}}}


def test_names_choose_files_and_questions(suite: ModuleType) -> None:
    assert suite.wanted(["wal.bulk", "wal.tail", "reads"], spark=False) == {"wal": ["bulk", "tail"], "reads": []}
    assert "spark" not in suite.wanted([], spark=False)
    assert set(suite.SPARK) <= set(suite.wanted([], spark=True))
    with pytest.raises(SystemExit, match="no benchmark 'wall'"):
        suite.wanted(["wall"], spark=False)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(question(), question(rounds=(1.2, 1.3, 1.4)), id="less-of-what-should-be-much"),
        pytest.param(
            question(rounds=(1.0, 1.1, 1.2), at_least=None, at_most=2.0, subject="headgate.p50 ms"),
            question(rounds=(1.6, 1.7, 1.8), at_least=None, at_most=2.0, subject="headgate.p50 ms"),
            id="more-of-what-should-be-little",
        ),
    ],
)
def test_what_got_slower_is_flagged(suite: ModuleType, before: dict[str, Any], after: dict[str, Any]) -> None:
    assert len(suite.compare(report(before), report(after))) == 1
    assert suite.compare(report(after), report(before)) == []
    assert suite.compare(report(before), report(before)) == []


def test_what_the_noise_may_explain_is_not_flagged(suite: ModuleType) -> None:
    noisy = question(rounds=(1.0, 1.2, 2.0, 3.1, 3.4))
    assert suite.compare(report(noisy), report(question(rounds=(1.3, 1.4, 1.5)))) == []
    assert suite.compare(report(question()), report(question(rounds=(1.95, 2.0, 2.1)))) == []


def test_a_question_that_was_not_asked_before_is_not_compared(suite: ModuleType) -> None:
    assert suite.compare(report(question()), report(question("tail", rounds=(0.1,)))) == []


def test_questions_of_an_older_run_are_kept_and_asked_ones_replaced(suite: ModuleType) -> None:
    old = report(question("bulk"), question("tail"))
    new = report(question("bulk", rounds=(9.0,)))
    both = dict(suite.questions_of(suite.kept(old, new)))
    assert sorted(both) == ["wal.bulk", "wal.tail"]
    assert both["wal.bulk"]["targets"][0]["measured"] == 9.0
    other = suite.kept(old, report(question("scan"), file="reads"))
    assert {name for name, _ in suite.questions_of(other)} == {"wal.bulk", "wal.tail", "reads.scan"}


def test_a_missed_target_and_a_file_that_failed_are_told(suite: ModuleType) -> None:
    bad = report(question(rounds=(1.0,)))
    bad["files"]["reads"] = {"failed": "ended with 1 and no report", "questions": []}
    assert suite.missed(bad) == ["reads: ended with 1 and no report", "wal.bulk: beside Lance: 1, ≥ 2"]
    assert suite.missed(report(question())) == []


def test_the_page_shows_values_targets_and_plots(suite: ModuleType, tmp_path: Path) -> None:
    page = suite.markdown(report(question(rounds=(1.0,))), tmp_path / "plots")
    assert "**missed**" in page
    assert "## wal.bulk: bulk" in page
    assert "- a note" in page
    plot = tmp_path / "plots" / "wal.bulk-mb-s.svg"
    assert f"plots/{plot.name}" in page
    assert plot.read_text().count("<rect") == 3


def test_the_readme_has_a_place_for_the_table_and_only_that_changes(suite: ModuleType) -> None:
    readme = (ROOT / "README.md").read_text()
    table = suite.readme_table(report(question()))
    changed = suite.with_table(readme, table)
    assert "| 2.1 × | 2–2.2 | ≥ 2 | ✓ |" in changed
    assert suite.with_table(changed, "") == suite.with_table(readme, "")
    with pytest.raises(ValueError, match="the README has no lines"):
        suite.with_table("# A README", table)


def test_the_readme_tells_what_was_missed_and_one_thing_of_each_question(suite: ModuleType) -> None:
    several = question(rounds=(3.0,))
    good, bad = dict(several["targets"][0], says="another"), dict(several["targets"][0], says="too slow", measured=1.0, holds=False)
    unasked = dict(several["targets"][0], says="by the way", at_least=None, holds=None)
    table = suite.readme_table(report({**several, "targets": [unasked, *several["targets"], good, bad]}))
    assert ["beside Lance" in table, "too slow" in table] == [True, True]
    assert ["another" in table, "by the way" in table] == [False, False]
    assert "1 rounds" in table


def test_comparing_a_report_with_itself_finds_nothing_and_says_so(
    suite: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "suite.json"
    file.write_text(json.dumps(report(question(rounds=(1.0,)))))
    page = tmp_path / "page.md"
    assert suite.main(["--report", str(file), "--markdown", str(page)]) == 1  # a target was missed
    assert suite.main(["--report", str(file), "--markdown", str(page), "--compare", str(file), "--json"]) == 0
    out, told = capsys.readouterr()
    assert "nothing got slower than the noise" in told
    assert json.loads(out[out.index("{") :])["files"]["wal"]["questions"][0]["name"] == "bulk"
