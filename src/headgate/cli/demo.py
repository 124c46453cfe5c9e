"""`headgate demo`: the main job, end to end, and a report of it."""

from __future__ import annotations

import os
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from headgate.cli.options import AsJson
from headgate.cli.output import print_json, progress, screen
from headgate.cli.takeover import show_takeover

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_REPORT = Path("headgate-demo.html")


class _Told:
    """Tells each step as it happens, or keeps it for the JSON document."""

    def __init__(self, *, as_json: bool, say: Any) -> None:
        self.steps: list[dict[str, Any]] = []
        self._out = None if as_json else screen()
        self._say = say

    def __call__(self, kind: str, text: str) -> None:
        if kind == "progress":
            self._say(text)
            return
        if kind == "step":
            self.steps.append({"step": text, "facts": []})
        else:
            self.steps[-1]["facts"].append(text)
        if self._out is None:
            return
        if kind == "step":
            self._out.print(Text(f"\n{len(self.steps)}. {text}", style="bold"))
        elif kind == "held":
            self._out.print(Text.assemble("   ", ("✓ ", "green"), text))
        else:
            self._out.print(Text(f"   {text}"))

    def end(self, *lines: str) -> None:
        if self._out is not None:
            self._out.print("\n" + "\n".join(lines))


def demo(
    context: typer.Context,
    folder: Annotated[
        Path | None,
        typer.Option("--dir", metavar="PATH", show_default=False, help="Where to make the tables. By default a temporary folder."),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the temporary folder, to look at it afterwards.")] = False,
    data: Annotated[
        Path | None, typer.Option("--data", metavar="FILE", show_default=False, help="A Parquet file instead of the flight records.")
    ] = None,
    key: Annotated[str, typer.Option("--key", metavar="COLUMNS", help="Its key: one or more columns, with commas.")] = "",
    group: Annotated[
        str | None, typer.Option("--group", metavar="COLUMN", show_default=False, help="The column by which the stream adds up.")
    ] = None,
    writers: Annotated[int, typer.Option("--writers", min=1, max=4, help="Writer processes.")] = 2,
    seconds: Annotated[float, typer.Option("--seconds", min=1.0, help="How long the writers take, about.")] = 45.0,
    report: Annotated[Path, typer.Option("--report", metavar="FILE", help="Where the page with the plots is written.")] = _REPORT,
    takeover: Annotated[bool, typer.Option("--takeover", help="Only a takeover and a crash, step by step, without Spark.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run the main job, end to end, and check all of it.

    Writer processes stream real flight records into a table of four shards. One is killed and succeeded; corrections
    come as upserts, cancellations as deletes. Spark follows the changes and compacts while writing goes on; a checkpoint and a
    clone are made, garbage is collected. In the end Spark's merged read, the local one and the source are compared row by row.
    """
    program = context.find_root().info_name
    if takeover:
        show_takeover(program, folder, keep=keep, as_json=as_json)
        return
    from headgate.demo.records import flights, from_file
    from headgate.demo.story import DemoFailedError, Story
    from headgate.spark.environment import require_java, require_pyspark

    require_pyspark()
    require_java()
    place = folder if folder is not None else Path(tempfile.mkdtemp(prefix="headgate-demo-"))
    place.mkdir(parents=True, exist_ok=True)
    kept = keep or folder is not None
    try:
        with progress("the pipeline", quiet=as_json) as say:
            told = _Told(as_json=as_json, say=say)
            records = flights() if data is None else from_file(data, [name for name in key.split(",") if name], group)
            story = Story(records, place, writers=writers, seconds=seconds, tell=told)
            page = story.run(partial(_session, place / "spark.log"))
        report.write_text(page.html(), encoding="utf-8")
    except BaseException as error:
        if isinstance(error, DemoFailedError):
            kept = True  # the table is the evidence
            error.hint += f"\n  the table is kept in {place}"
        raise
    finally:
        if not kept:
            shutil.rmtree(place, ignore_errors=True)
    if as_json:
        print_json(
            {
                "ok": True,
                "uri": story.uri,
                "kept": kept,
                "report": str(report),
                "facts": story.facts,
                "held": story.held,
                "steps": told.steps,
            }
        )
        return
    lines = [f"All of it held, in {story.facts['seconds']:.0f} s. The report, with plots: {report}"]
    if kept:
        lines += ["To look further:", *(f"  {program} {what} {story.uri}" for what in ("status", "verify --deep", "checkpoint list"))]
    else:
        lines += ["To look further, keep the table:", f"  {program} demo --keep"]
    told.end(*lines)


def _session(log: Path) -> SparkSession:
    """A small one: the writers need memory and cores, too. What its JVM has to say goes to a file."""
    import headgate.spark as hgs

    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    cores = min(2, os.cpu_count() or 1)
    config = {
        "spark.driver.memory": "1g",
        "spark.sql.shuffle.partitions": "2",
        "spark.log.level": "ERROR",
        "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    }
    errors = os.dup(2)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 2)  # the JVM keeps what it is started with
    try:
        return hgs.session(f"local[{cores}]", app_name="headgate-demo", config=config)
    finally:
        os.dup2(errors, 2)
        os.close(errors)
