"""Measuring side by side: rounds, medians, spread, targets, a table and a JSON file.

Owns: the order of measuring and what is made of the numbers. Does not own: what is measured.

A time on a shared machine holds only beside another one taken at the same moment. So every
round measures all contestants of a question once, in an order that rotates, and a ratio is
taken within a round; the median of those ratios is what counts, and their spread is shown.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Measurements = Mapping[str, float]
_LARGE_BYTES = 1 << 20


@dataclass(frozen=True)
class Scale:
    """How long to measure. ``of(n)`` is ``n`` in a full run and a part of it in a quick one."""

    quick: bool = False

    def of(self, full: int) -> int:
        return max(1, full // 10) if self.quick else full

    def seconds(self, full: float) -> float:
        return full / 5 if self.quick else full


Contestant = Callable[[Path, Scale], Measurements]
"""Measures once, in an empty folder of its own, and returns metric -> value."""


@dataclass(frozen=True)
class Target:
    """What must hold: ``subject``'s metric, over ``rival``'s if there is one, within a bound.

    A metric is written "contestant.metric".
    """

    says: str
    subject: str
    rival: str | None = None
    at_most: float | None = None
    at_least: float | None = None

    @property
    def bound(self) -> str:
        parts = [f"≤ {self.at_most:g}"] if self.at_most is not None else []
        parts += [f"≥ {self.at_least:g}"] if self.at_least is not None else []
        return " and ".join(parts) or "report"

    def holds(self, value: float) -> bool | None:
        if self.at_most is None and self.at_least is None:
            return None
        return (self.at_most is None or value <= self.at_most) and (self.at_least is None or value >= self.at_least)


@dataclass(frozen=True)
class Question:
    """One thing to find out, who is asked, and what should come out."""

    name: str
    title: str
    contestants: Mapping[str, Contestant]
    targets: Sequence[Target] = ()
    notes: Sequence[str] = ()
    max_rounds: int | None = None


@dataclass
class Answer:
    """All measurements of one question: "contestant.metric" -> a value per round."""

    question: Question
    values: dict[str, list[float]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def ratios(self, target: Target) -> list[float]:
        subject = self.values.get(target.subject, [])
        if target.rival is None:
            return subject
        return [ours / theirs for ours, theirs in zip(subject, self.values.get(target.rival, [])) if theirs]


class NotHere(Exception):
    """A peer is not installed: its column is left out."""


def measure(question: Question, rounds: int, scale: Scale, folder: Path, say: Callable[[str], None]) -> Answer:
    """Ask every contestant once per round, in rotating order."""
    answer = Answer(question)
    names = list(question.contestants)
    for number in range(min(rounds, question.max_rounds or rounds)):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            if name in answer.missing:
                continue
            say(f"{question.name}: round {number + 1}, {name}")
            place = calm_place(folder)
            gc.collect()
            try:
                for metric, value in question.contestants[name](place, scale).items():
                    answer.values.setdefault(f"{name}.{metric}", []).append(float(value))
            except NotHere as absent:
                answer.missing[name] = str(absent)
            finally:
                _free(place)
    return answer


_PROBES, _CALM_SECONDS, _CALM_WAIT = 64, 100e-6, 2.0
_patience = 120.0
"""Seconds that a run waits for the disk, at most."""


def calm_place(folder: Path) -> Path:
    """An empty folder in which files are made as fast as on this disk at other times.

    Some file systems (ext4) look for a new inode past every one that was freed in the last minutes, whoever did it: there a file
    takes up to forty times as long. That would decide what is measured, so it is waited for, whoever's turn it is.
    """
    global _patience
    while _patience > 0 and _create_seconds(folder) > _CALM_SECONDS:
        time.sleep(_CALM_WAIT)
        _patience -= _CALM_WAIT
    return Path(tempfile.mkdtemp(prefix="bench-", dir=folder))


def _create_seconds(folder: Path) -> float:
    """How long it takes to make a small file. They are left to the end, for the same reason."""
    place = tempfile.mkdtemp(prefix="probe-", dir=folder)
    start = time.perf_counter()
    for number in range(_PROBES):
        with open(f"{place}/{number}", "xb") as file:
            file.write(b"x")
    return (time.perf_counter() - start) / _PROBES


def _free(folder: Path) -> None:
    """Give back the space, and leave small files for the end.

    Some file systems look for a new inode past every one that was freed in the last minute, so
    cleaning up after one contestant would slow the next.
    """
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            if path.stat().st_size > _LARGE_BYTES:
                path.unlink()


def percentile(values: Iterable[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def environment(packages: Sequence[str]) -> dict[str, Any]:
    """What the numbers depend on."""
    versions = {}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # a source checkout, or not there
            try:
                versions[name] = str(getattr(import_module(name), "__version__", "unknown"))
            except ImportError:
                versions[name] = "not installed"
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "cores": os.cpu_count(),
        "load_average": [round(x, 2) for x in os.getloadavg()],
        "versions": versions,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _shown(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def show(answers: Sequence[Answer], console: Console) -> None:
    """Tables for people: the measurements of each question, then all targets."""
    for answer in answers:
        table = Table(title=answer.question.title, title_justify="left", title_style="bold")
        for column in ("contestant", "metric"):
            table.add_column(column)
        for column in ("median", "min", "max", "rounds"):
            table.add_column(column, justify="right")
        for name, values in answer.values.items():
            contestant, metric = name.split(".", 1)
            table.add_row(contestant, metric, *(_shown(f(values)) for f in (statistics.median, min, max)), str(len(values)))
        console.print(table)
        for name, why in answer.missing.items():
            console.print(f"  {name}: {why}")
        for note in answer.question.notes:
            console.print(f"  [dim]{note}[/dim]")
    table = Table(title="Targets", title_justify="left", title_style="bold")
    for column in ("question", "what"):
        table.add_column(column, overflow="fold")
    for column in ("measured", "spread", "target", ""):
        table.add_column(column, justify="right")
    for answer in answers:
        for target in answer.question.targets:
            ratios = answer.ratios(target)
            if not ratios:
                table.add_row(answer.question.name, target.says, "–", "–", target.bound, "not measured")
                continue
            value = statistics.median(ratios)
            holds = target.holds(value)
            verdict = "" if holds is None else "[green]pass[/green]" if holds else "[red]FAIL[/red]"
            times = "" if target.rival is None else " ×"
            table.add_row(
                answer.question.name,
                target.says,
                f"{_shown(value)}{times}",
                f"{_shown(min(ratios))}–{_shown(max(ratios))}",
                target.bound,
                verdict,
            )
    console.print(table)


def document(answers: Sequence[Answer], about: Mapping[str, Any]) -> dict[str, Any]:
    """The same for machines."""
    questions = []
    for answer in answers:
        targets = []
        for target in answer.question.targets:
            ratios = answer.ratios(target)
            value = statistics.median(ratios) if ratios else None
            targets.append(
                {
                    "says": target.says,
                    "subject": target.subject,
                    "rival": target.rival,
                    "at_most": target.at_most,
                    "at_least": target.at_least,
                    "measured": value,
                    "rounds": ratios,
                    "holds": None if value is None else target.holds(value),
                }
            )
        questions.append(
            {
                "name": answer.question.name,
                "title": answer.question.title,
                "notes": list(answer.question.notes),
                "values": {
                    name: {"median": statistics.median(values), "min": min(values), "max": max(values), "rounds": values}
                    for name, values in answer.values.items()
                },
                "missing": answer.missing,
                "targets": targets,
            }
        )
    return {**about, "questions": questions}


def main(questions: Sequence[Question], *, default_out: Path, packages: Sequence[str], argv: Sequence[str] | None = None) -> int:
    """The command line of a benchmark file. Exit code 1: a target was missed."""
    parser = argparse.ArgumentParser(description="Measures headgate beside its peers.")
    parser.add_argument("--quick", action="store_true", help="little work and one round: does it run at all?")
    parser.add_argument("--rounds", type=int, default=None, help="how often each contestant is measured (default 5)")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[q.name for q in questions], help="these questions only")
    parser.add_argument("--out", type=Path, default=default_out, help="the JSON file (default %(default)s)")
    parser.add_argument("--folder", type=Path, default=None, help="where to write the data (default: the system's temporary folder)")
    parser.add_argument("--leave", action="store_true", help="leave the small files in the folder: whoever asked removes them, later")
    asked = parser.parse_args(argv)
    scale = Scale(asked.quick)
    rounds = asked.rounds or (1 if asked.quick else 5)
    console = Console()
    about = {"environment": environment(packages), "rounds": rounds, "quick": asked.quick}
    answers = []
    place = Path(tempfile.mkdtemp(prefix="headgate-bench-", dir=asked.folder))
    try:
        with console.status("") as status:
            for question in questions:
                if asked.only is None or question.name in asked.only:
                    answers.append(measure(question, rounds, scale, place, status.update))
    finally:
        if asked.leave:
            _free(place)
        else:
            shutil.rmtree(place, ignore_errors=True)
    show(answers, console)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(document(answers, about), indent=1) + "\n")
    console.print(f"written to {asked.out}")
    missed = [t for a in answers for t in a.question.targets if (r := a.ratios(t)) and t.holds(statistics.median(r)) is False]
    return 1 if missed else 0
