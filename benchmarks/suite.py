"""All benchmarks as one suite: one report, a comparison with an older one, and the README's table.

    headgate bench [NAME …] [--quick] [--rounds N] [--out FILE] [--markdown FILE] [--compare OLD.json]
                   [--keep] [--readme] [--json]

A NAME is a file of this folder (``wal``), or a question of it (``wal.bulk``); none: all but those on Spark,
which are asked for by name or with ``--spark``. Each file runs in a process of its own, one after the
other; within it everybody is measured in turn. The report is JSON with every round, and a Markdown page
with plots beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FILES = ("wal", "crowd", "network", "memtable", "reads", "life", "growth")
SPARK = ("spark", "spark_write", "spark_jobs")
README_BEGIN, README_END = "<!-- begin: headgate bench --readme -->", "<!-- end: headgate bench --readme -->"
_NOISE = 0.10
_COLOURS = ("#2f6fdb", "#d9822b", "#2a9d5c", "#a04bb5", "#c23b3b", "#3aa6b9", "#7a7f87")

Report = dict[str, Any]


def wanted(names: Sequence[str], *, spark: bool) -> dict[str, list[str]]:
    """Which questions of which files; no question: all of a file."""
    if not names:
        return {name: [] for name in (*FILES, *(SPARK if spark else ())) if (HERE / f"{name}.py").exists()}
    found: dict[str, list[str]] = {}
    for name in names:
        file, _, question = name.partition(".")
        if file not in (*FILES, *SPARK) or not (HERE / f"{file}.py").exists():
            raise SystemExit(
                f"there is no benchmark {file!r}; there are {', '.join((*FILES, *SPARK))}, and their questions as file.question"
            )
        found.setdefault(file, [])
        if question:
            found[file].append(question)
    return found


def run(files: Mapping[str, Sequence[str]], *, quick: bool, rounds: int | None, folder: Path | None) -> Report:
    """Run them, one after the other, and put their reports together."""
    report: Report = {"quick": quick, "files": {}}
    with tempfile.TemporaryDirectory(prefix="headgate-suite-", dir=folder, ignore_cleanup_errors=True) as place:
        for file, questions in files.items():
            out = Path(place) / f"{file}.json"
            command = [sys.executable, str(HERE / f"{file}.py"), "--out", str(out)]
            command += ["--quick"] if quick else []
            command += ["--rounds", str(rounds)] if rounds else []
            command += ["--folder", place, "--leave"]  # many files deleted now would slow those that are made next
            command += ["--only", *questions] if questions else []
            print(f"\n=== {file} ===", file=sys.stderr, flush=True)
            code = subprocess.run(command, check=False, stdout=sys.stderr).returncode
            if not out.exists():
                report["files"][file] = {"failed": f"ended with {code} and no report", "questions": []}
                continue
            report["files"][file] = json.loads(out.read_text())
            report.setdefault("environment", report["files"][file]["environment"])
    return report


def kept(old: Report, new: Report) -> Report:
    """The new report, with the questions of the old one that it did not ask."""
    both: Report = {**old, **new, "files": dict(old["files"])}
    for file, part in new["files"].items():
        asked = {question["name"] for question in part["questions"]}
        before = old["files"].get(file, {}).get("questions", [])
        both["files"][file] = {**part, "questions": [*(q for q in before if q["name"] not in asked), *part["questions"]]}
    return both


def questions_of(report: Report) -> Iterator[tuple[str, dict[str, Any]]]:
    for file, part in report["files"].items():
        for question in part["questions"]:
            yield f"{file}.{question['name']}", question


def missed(report: Report) -> list[str]:
    found = [f"{file}: {part['failed']}" for file, part in report["files"].items() if "failed" in part]
    for name, question in questions_of(report):
        for target in question["targets"]:
            if target["holds"] is False:
                found.append(f"{name}: {target['says']}: {target['measured']:.3g}, {_bound(target)}")
    return found


def _bound(target: Mapping[str, Any]) -> str:
    parts = [f"≤ {target['at_most']:g}"] if target["at_most"] is not None else []
    parts += [f"≥ {target['at_least']:g}"] if target["at_least"] is not None else []
    return " and ".join(parts) or "–"


# -- comparing


def compare(old: Report, new: Report) -> list[str]:
    """What got slower than the noise: ratios to others in the same run, which a busy machine changes least.

    A ratio is worse if its median moved the wrong way by more than a tenth and by more than either run's rounds spread.
    """
    before = {(name, target["says"]): target for name, question in questions_of(old) for target in question["targets"]}
    found = []
    for name, question in questions_of(new):
        for target in question["targets"]:
            then = before.get((name, target["says"]))
            if then is None or then["measured"] is None or target["measured"] is None or not then["measured"]:
                continue
            grows_better = target["at_least"] is not None or "/s" in target["subject"]
            change = target["measured"] / then["measured"]
            worse = 1 / change - 1 if grows_better else change - 1
            noise = max(_NOISE, _spread(then["rounds"]), _spread(target["rounds"]))
            if worse > noise:
                found.append(
                    f"{name}: {target['says']}: {then['measured']:.3g} → {target['measured']:.3g}, worse by {worse:.0%} (noise {noise:.0%})"
                )
    return found


def _spread(values: Sequence[float]) -> float:
    """Half the distance of the middle half of the rounds, over their median."""
    if len(values) < 2:
        return 0.0
    ordered = sorted(values)
    low, high = ordered[len(ordered) // 4], ordered[(3 * len(ordered) - 1) // 4]
    middle = statistics.median(ordered)
    return abs(high - low) / abs(middle) if middle else 0.0


# -- telling


def shown(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def markdown(report: Report, plots: Path) -> str:
    """The page. Plots are written as SVG files into a folder beside it."""
    plots.mkdir(parents=True, exist_ok=True)
    lines = ["# Benchmarks", "", f"{_machine(report)}; {report.get('environment', {}).get('time', '')}.", ""]
    bad = missed(report)
    lines += ["**Missed:**", "", *(f"- {text}" for text in bad), ""] if bad else ["Every target was met.", ""]
    for name, question in questions_of(report):
        lines += [f"## {name}: {question['title']}", ""]
        lines += ["| contestant | metric | median | least | most |", "| --- | --- | ---: | ---: | ---: |"]
        for key, value in question["values"].items():
            contestant, metric = key.split(".", 1)
            lines.append(f"| {contestant} | {metric} | {shown(value['median'])} | {shown(value['min'])} | {shown(value['max'])} |")
        if question["targets"]:
            lines += ["", "| what | measured | rounds | target | |", "| --- | ---: | ---: | ---: | --- |"]
            for target in question["targets"]:
                verdict = {None: "", True: "held", False: "**missed**"}[target["holds"]]
                value = "–" if target["measured"] is None else shown(target["measured"]) + (" ×" if target["rival"] else "")
                spread = f"{shown(min(target['rounds']))}–{shown(max(target['rounds']))}" if target["rounds"] else "–"
                lines.append(f"| {target['says']} | {value} | {spread} | {_bound(target)} | {verdict} |")
        for metric, bars in _plotted(question).items():
            file = plots / f"{name}-{_slug(metric)}.svg"
            file.write_text(_bars(metric, bars))
            lines += ["", f"![{metric}]({plots.name}/{file.name})"]
        lines += ["", *(f"- {note}" for note in question.get("notes", [])), ""]
        lines += [f"- {who}: {why}" for who, why in question.get("missing", {}).items()]
    return "\n".join(lines) + "\n"


def _machine(report: Report) -> str:
    about = report.get("environment", {})
    versions = {
        name: version for part in report["files"].values() for name, version in part.get("environment", {}).get("versions", {}).items()
    }
    told = ", ".join(f"{name} {version}" for name, version in versions.items() if name != "headgate")
    return f"{str(about.get('system', '')).split(' ')[0]}, {about.get('cores', '?')} cores, Python {about.get('python', '')}; {told}"


def _slug(text: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in text.lower()).strip("-")


def _plotted(question: Mapping[str, Any]) -> dict[str, list[tuple[str, float]]]:
    """Metrics that at least two contestants have."""
    found: dict[str, list[tuple[str, float]]] = {}
    for key, value in question["values"].items():
        contestant, metric = key.split(".", 1)
        found.setdefault(metric, []).append((contestant, value["median"]))
    return {metric: bars for metric, bars in found.items() if len(bars) > 1}


def _bars(metric: str, bars: Sequence[tuple[str, float]]) -> str:
    most = max((abs(value) for _, value in bars), default=0.0) or 1.0
    height = 24 * len(bars) + 34
    parts = [f'<text x="8" y="18" font-weight="bold">{escape(metric)}</text>']
    for number, (name, value) in enumerate(bars):
        y, width = 30 + 24 * number, 380 * abs(value) / most
        colour = _COLOURS[number % len(_COLOURS)]
        parts.append(f'<text x="190" y="{y + 13}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<rect x="198" y="{y}" width="{max(width, 1):.1f}" height="17" rx="3" fill="{colour}"/>')
        parts.append(f'<text x="{204 + width:.1f}" y="{y + 13}">{shown(value)}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 680 {height}" width="680" height="{height}"'
    style = 'font-family="system-ui,sans-serif" font-size="12" fill="#444"'
    return f'{head} {style}><rect width="680" height="{height}" fill="#fff"/>{"".join(parts)}</svg>\n'


def readme_table(report: Report) -> str:
    """The table of the README: of each question the first thing that was asked of it, and whatever was missed."""
    told = [(name, question, target) for name, question in questions_of(report) for target in _told(question)]
    counts = [len(target["rounds"]) for _, _, target in told] or [0]
    rounds = str(min(counts)) if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    lines = [
        README_BEGIN,
        f"{_machine(report)}.",
        f"Medians of ratios within a round, {rounds} rounds, and their spread; `./headgate bench --readme` repeats it and writes this",
        "table, with the first thing that was asked of each question and whatever was missed; its page has all of it.",
        "",
        "| what | measured | rounds | asked | |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    for name, question, target in told:
        verdict = "✓" if target["holds"] else "missed"
        value = shown(target["measured"]) + (" ×" if target["rival"] else "")
        spread = f"{shown(min(target['rounds']))}–{shown(max(target['rounds']))}"
        lines.append(f"| {question['title']}: {target['says']} (`{name}`) | {value} | {spread} | {_bound(target)} | {verdict} |")
    return "\n".join([*lines, README_END])


def _told(question: Mapping[str, Any]) -> list[dict[str, Any]]:
    judged = [target for target in question["targets"] if target["measured"] is not None and target["holds"] is not None]
    return [target for number, target in enumerate(judged) if number == 0 or not target["holds"]]


def with_table(readme: str, table: str) -> str:
    """The README with its table replaced.

    Raises:
        ValueError: it has no place for one.
    """
    begin, end = readme.find(README_BEGIN), readme.find(README_END)
    if begin < 0 or end < begin:
        raise ValueError(f"the README has no lines {README_BEGIN} and {README_END}")
    return readme[:begin] + table + readme[end + len(README_END) :]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="headgate bench", description="Measures headgate beside its peers.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="a file (wal) or a question (wal.bulk); none: all but Spark's")
    parser.add_argument("--spark", action="store_true", help="those on Spark too")
    parser.add_argument("--quick", action="store_true", help="little work and one round: does it run at all?")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--folder", type=Path, default=None, help="where to write the data")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "suite.json", help="the JSON file (default %(default)s)")
    parser.add_argument("--markdown", type=Path, default=None, help="the page (default: beside the JSON file)")
    parser.add_argument("--compare", type=Path, default=None, metavar="OLD", help="an older JSON file: what got slower than the noise?")
    parser.add_argument("--report", type=Path, default=None, metavar="FILE", help="measure nothing: use this JSON file")
    parser.add_argument("--keep", action="store_true", help="questions not asked now stay in the JSON file as they were")
    parser.add_argument("--readme", action="store_true", help="write the README's table")
    parser.add_argument("--json", action="store_true", help="the report on stdout, for machines; all else goes to stderr")
    asked = parser.parse_args(argv)
    readme = HERE.parent / "README.md"
    if asked.readme:
        with_table(readme.read_text(), "")  # better now than after an hour
    if asked.report is not None:
        report = json.loads(asked.report.read_text())
    else:
        report = run(wanted(asked.names, spark=asked.spark), quick=asked.quick, rounds=asked.rounds, folder=asked.folder)
        if asked.keep and asked.out.exists():
            report = kept(json.loads(asked.out.read_text()), report)
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(json.dumps(report, indent=1) + "\n")
    page = asked.markdown or asked.out.with_suffix(".md")
    page.write_text(markdown(report, page.with_suffix("")))
    said = [f"written to {asked.out if asked.report is None else asked.report} and {page}"]
    if asked.readme:
        readme.write_text(with_table(readme.read_text(), readme_table(report)))
        said.append("the README's table is that of this report")
    bad = missed(report)
    said += [f"missed: {text}" for text in bad]
    failed = bool(bad)
    if asked.compare is not None:
        slower = compare(json.loads(asked.compare.read_text()), report)
        said += [f"slower: {text}" for text in slower] or ["nothing got slower than the noise"]
        failed = bool(slower)  # compared with itself a report that misses a target is no worse
    print("\n".join(["", *said]), file=sys.stderr if asked.json else sys.stdout)
    if asked.json:
        print(json.dumps(report))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
