"""The main job, told as it happens: writers, a crash, Spark beside them, and what came of it.

Owns: the order of things, and the checks. Does not own: the records (records), how a writer sends
(sender), the page (report).

1. Several writer processes stream records into a table of four shards. Records are put as planned, then
   corrected by upserts; those that were cancelled are deleted.
2. A stream on Spark follows the changes and adds up per group.
3. One writer is killed with SIGKILL. Its successor claims the same shards and goes on.
4. Spark compacts all shards while writing goes on; a checkpoint and a clone are made; garbage is collected.
5. In the end Spark's merged read, the local one and the source are compared, row for row.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

import headgate as hg
from headgate.demo.records import Records, sorted_by_key
from headgate.demo.report import Page, Plot, per_second

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SHARDS = 4
CONSUMER = "per-group"
_SILENT_SECONDS = 90.0
_SAMPLE_SECONDS = 0.5
_RESENT = 5
_STARTS_MAX = 3

Tell = Callable[[str, str], None]
"""Called with a kind ("step", "fact", "held", "progress") and a text."""


class DemoFailedError(hg.HeadgateError):
    """Something that is promised did not hold."""

    def __init__(self, message: str) -> None:
        super().__init__(message, hint="this should never happen: please report it, with the folder of the table")


@dataclass
class Measured:
    """What was seen while it ran; times in seconds since it began."""

    began: float = field(default_factory=time.time)
    acknowledged: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    p50: list[tuple[float, float]] = field(default_factory=list)
    p99: list[tuple[float, float]] = field(default_factory=list)
    lag: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    runs: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    marks: list[tuple[float, str]] = field(default_factory=list)

    def now(self) -> float:
        return time.time() - self.began

    def mark(self, label: str) -> None:
        self.marks.append((self.now(), label))


class Writer:
    """One place of writing: a process, and after a crash its successor."""

    def __init__(
        self, name: str, uri: str, file: Path, shards: Sequence[str], puts: int, rows: int, rate: float, measured: Measured
    ) -> None:
        self.name, self.shards, self.puts, self.rows, self._rate = name, list(shards), puts, rows, rate
        self._uri, self._file, self._measured = uri, file, measured
        self._heard = threading.Condition()
        self.sequence = -1
        """The last one that was acknowledged."""
        self.sent_rows = 0
        self.opened: list[dict[str, Any]] = []
        self.is_done = False
        self.error = ""
        self.process = self._start(0)

    def _start(self, first: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "headgate.demo.sender", self._uri, str(self._file), ",".join(self.shards), str(first)]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        process = subprocess.Popen([*command, str(self._rate), self.name], stdout=subprocess.PIPE, stderr=self._errors, text=True)
        threading.Thread(target=self._listen, args=(process, self._errors), daemon=True).start()
        return process

    def _listen(self, process: subprocess.Popen[str], errors: Any) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.endswith("\n"):  # one that is killed may stop in the middle of a word
                self._hear(json.loads(line))
        code = process.wait()
        with self._heard:
            if code not in (0, -signal.SIGKILL):
                errors.seek(0)
                self.error = errors.read().decode(errors="replace").strip()[-2000:] or f"exit code {code}"
            self._heard.notify_all()

    def _hear(self, said: dict[str, Any]) -> None:
        measured = self._measured
        at = said["time"] - measured.began
        with self._heard:
            if said["event"] == "open":
                self.opened.append(said)
            elif said["event"] == "acknowledged":
                self.sequence = max(self.sequence, said["sequence"])
                self.sent_rows += said["rows"]
                measured.acknowledged.setdefault(self.name, []).append((at, said["rows"]))
                measured.p50.append((at, said["p50"]))
                measured.p99.append((at, said["p99"]))
            else:
                self.is_done = True
            self._heard.notify_all()

    @property
    def share(self) -> float:
        return (self.sequence + 1) / self.puts

    def wait(self, until: Callable[[], bool]) -> None:
        with self._heard:
            while not until():
                if self.error:
                    raise DemoFailedError(f"writer {self.name} failed: {self.error}")
                if not self._heard.wait(_SILENT_SECONDS):
                    raise DemoFailedError(f"writer {self.name} says nothing for {_SILENT_SECONDS:g} s")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def succeed(self) -> float:
        """A successor, which sends again the last few that the other may have written. Seconds until it may write."""
        began = time.perf_counter()
        opened = len(self.opened)
        self.process = self._start(max(0, self.sequence + 1 - _RESENT))
        self.wait(lambda: len(self.opened) > opened)
        return time.perf_counter() - began

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class Story:
    """Runs it, tells it, checks it."""

    def __init__(self, records: Records, place: Path, *, writers: int, seconds: float, tell: Tell) -> None:
        self._records, self._place, self._tell = records, place, tell
        self._count, self._seconds = writers, seconds
        self.uri = str(place / "table")
        self.measured = Measured()
        self.held: list[str] = []
        self.facts: dict[str, Any] = {"records": records.name, "rows": records.rows.num_rows}
        self._writers: list[Writer] = []
        self._stop = threading.Event()

    # -- telling

    def _step(self, text: str) -> None:
        self._tell("step", text)

    def _fact(self, text: str) -> None:
        self._tell("fact", text)

    def _holds(self, condition: bool, text: str) -> None:
        if not condition:
            raise DemoFailedError(f"this did not hold: {text}")
        self.held.append(text)
        self._tell("held", text)

    # -- the job

    def run(self, spark: Callable[[], SparkSession]) -> Page:
        """All of it. ``spark`` makes the session, while the table is being prepared."""
        began = time.perf_counter()
        sampler: threading.Thread | None = None
        try:
            self._step(f"A table of {SHARDS} shards for {self._records.rows.num_rows:,} records: {self._records.name}")
            session, table = self._prepared(spark)
            self._step("A stream on Spark will follow the changes")
            query = self._follow(session)
            self._step(f"{self._count} writer processes stream the records in: as planned, then corrected or cancelled")
            self.measured.began = time.time()
            self._start_writers(table)
            sampler = threading.Thread(target=self._sample, daemon=True)
            sampler.start()
            self._crash()
            self._compact(session)
            self._checkpoint_and_clone(table)
            self._collect(table)
            self._step("The rest of the records")
            for writer in self._writers:
                writer.wait(lambda writer=writer: writer.is_done)  # type: ignore[misc]
            self.measured.mark("written")
            self._fact(f"{sum(writer.sent_rows for writer in self._writers):,} rows were acknowledged in {self.measured.now():.0f} s")
            self._check_stream(session, table, query)
            self._check_reads(session, table)
        finally:
            self._stop.set()
            for writer in self._writers:
                writer.end()
            if sampler is not None:
                sampler.join(10)
        self.facts["seconds"] = round(time.perf_counter() - began, 1)
        return self._page()

    def _prepared(self, spark: Callable[[], SparkSession]) -> tuple[SparkSession, hg.Table]:
        found: list[SparkSession | BaseException] = []

        def start() -> None:
            try:
                found.append(spark())
            except BaseException as error:  # a thread's end: raised below
                found.append(error)

        thread = threading.Thread(target=start)
        thread.start()
        records = self._records
        table = hg.create_table(self.uri, records.schema, key=list(records.key), sharding=hg.bucket(records.key[-1], SHARDS))
        thread.join()
        if isinstance(found[0], BaseException):
            raise found[0]
        self._fact(f"Spark {found[0].version} is there; the key is ({', '.join(records.key)})")
        return found[0], table

    def _start_writers(self, table: hg.Table) -> None:
        records = self._records
        keys = records.rows.select([records.key[-1]]).combine_chunks().to_batches()[0]
        of_shard = table.shard_ids(keys).cast(pa.string())
        shards = [shard.id for shard in table.shards]
        for number in range(self._count):
            mine = shards[number :: self._count]
            rows = pc.indices_nonzero(pc.is_in(of_shard, value_set=pa.array(mine)))
            file = self._place / f"changes-{number}.arrow"
            puts, total = self._write_changes(file, rows)
            name = f"writer-{number}"
            self._writers.append(Writer(name, self.uri, file, mine, puts, total, total / self._seconds, self.measured))
            self._fact(f"{name}: shards {', '.join(mine)}, {total:,} changes in {puts:,} puts")
        for writer in self._writers:
            writer.wait(lambda writer=writer: bool(writer.opened))  # type: ignore[misc]

    def _write_changes(self, file: Path, rows: pa.Array) -> tuple[int, int]:
        schema = pa.schema([f.with_nullable(True) for f in self._records.schema])
        puts = total = 0
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, schema) as out:
            for op, change in self._records.changes(rows):
                names = change.schema.names
                columns = [change.column(f.name) if f.name in names else pa.nulls(change.num_rows, f.type) for f in schema]
                out.write_batch(pa.record_batch(columns, schema=schema), {"op": op})
                puts, total = puts + 1, total + change.num_rows
        return puts, total

    def _follow(self, spark: SparkSession) -> Any:
        """Start the stream, and see that it runs: on a busy machine Spark may give up on its worker, before anything was read."""
        for attempt in range(_STARTS_MAX):
            query = self._start_stream(spark, self._place / f"checkpoint-{attempt}")
            while query.isActive and query.status["message"] in ("Initializing sources", "Initializing StreamExecution"):
                time.sleep(0.1)
            if query.isActive:
                break
        else:
            raise DemoFailedError(f"the stream does not start: {query.exception()}")
        self._fact(f"it adds up per {self._records.group}, as consumer {CONSUMER!r}: collection leaves what it has not read")
        return query

    def _start_stream(self, spark: SparkSession, checkpoint: Path) -> Any:
        import pyspark.sql.functions as f

        records = self._records
        changes = spark.readStream.format("headgate").option("startingOffsets", "earliest").option("consumer", CONSUMER).load(self.uri)
        is_planned = f.lit(True)
        for name in records.late:
            is_planned = is_planned & f.col(name).isNull()
        is_delete = f.col("_op") == "delete"
        if not records.late:  # nothing tells a correction from what it corrects: count what happened
            is_planned = ~is_delete
        sums = [
            f.sum(f.when(is_delete, 1).otherwise(0)).alias("deleted"),
            f.count(f.lit(1)).alias("changes"),
        ]
        if records.measure is not None:
            sums.append(f.sum(f.when(is_delete | is_planned, 0.0).otherwise(f.coalesce(f.col(records.measure), f.lit(0.0)))).alias("total"))
        per_group: DataFrame = changes.groupBy(records.group).agg(*sums)
        return (
            per_group.writeStream.outputMode("complete")
            .format("memory")
            .queryName("per_group")
            .option("checkpointLocation", str(checkpoint))
            .trigger(processingTime="2 seconds")
            .start()
        )

    def _wait_for(self, share: float) -> None:
        while min(writer.share for writer in self._writers) < share:
            for writer in self._writers:
                if writer.error:
                    raise DemoFailedError(f"{writer.name} failed: {writer.error}")
            done = sum(writer.sent_rows for writer in self._writers)
            self._tell("progress", f"{done:,} of {sum(writer.rows for writer in self._writers):,} rows acknowledged")
            time.sleep(0.1)

    def _crash(self) -> None:
        self._wait_for(0.25)
        victim = self._writers[0]
        self._step(f"{victim.name} is killed, in the middle of its puts")
        before = victim.sequence
        victim.kill()
        self.measured.mark("kill -9")
        seconds = victim.succeed()
        self.measured.mark("takeover")
        epochs = victim.opened[-1]["epochs"]
        self._fact(
            f"its successor claimed shards {', '.join(sorted(epochs))} (epoch {max(epochs.values())}) and wrote on after {seconds:.2f} s"
        )
        self._fact(f"{before + 1:,} puts had been acknowledged; the last {_RESENT} are sent again, and count once")
        self.facts["takeover_seconds"] = round(seconds, 3)

    def _compact(self, spark: SparkSession) -> None:
        import headgate.spark as hgs

        self._wait_for(0.45)
        self._step("Spark compacts all shards, while writing goes on")
        self.measured.mark("compaction")
        report = hgs.compact(spark, self.uri)
        self._fact(
            f"{report.runs_before} runs became {report.runs_after}, {report.rows_written:,} rows rewritten, in {report.seconds:.1f} s"
        )
        self._holds(all(writer.error == "" for writer in self._writers), "no writer was fenced or stopped by it")

    def _checkpoint_and_clone(self, table: hg.Table) -> None:
        self._wait_for(0.6)
        self._step("A checkpoint, and a clone of it")
        pinned = table.checkpoint("demo")
        began = time.perf_counter()
        twin = hg.clone(self.uri, str(self._place / "clone"), checkpoint=pinned.id)
        seconds = time.perf_counter() - began
        self.measured.mark("clone")
        then, there = table.scan(at="demo").count(), twin.scan().count()
        self._fact(f"the clone took {seconds * 1e3:.0f} ms and copied no data; it has its own log and may be written to")
        self._holds(then == there, f"the clone has the {there:,} rows of the checkpoint, while the table went on")
        self.facts["clone_seconds"] = round(seconds, 3)

    def _collect(self, table: hg.Table) -> None:
        self._wait_for(0.75)
        self._step("Garbage is collected, with no grace at all, while everything runs")
        report = table.gc(dry_run=False, min_age=0)
        self.measured.mark("gc")
        told = ", ".join(f"{count:,} × {kind}" for kind, count in sorted(report.objects.items())) or "nothing"
        held = ", ".join(f"{count:,} for {why}" for why, count in sorted(report.held.items()))
        self._fact(f"deleted: {told} ({sum(report.bytes.values()) / 1e6:.1f} MB){'; held: ' + held if held else ''}")

    # -- checking

    def _check_stream(self, spark: SparkSession, table: hg.Table, query: Any) -> None:
        self._step("The stream's sums beside the table's")
        query.processAllAvailable()
        rows = {row[0]: row.asDict() for row in spark.sql("select * from per_group").collect()}
        query.stop()
        if query.exception() is not None:
            raise DemoFailedError(f"the stream failed: {query.exception()}")
        records, source = self._records, self._records.rows
        wanted = source.append_column("gone", pc.cast(records.cancelled, pa.int64())).group_by(records.group).aggregate([("gone", "sum")])
        deleted = dict(zip(wanted[records.group].to_pylist(), wanted["gone_sum"].to_pylist(), strict=True))
        found = {group: row["deleted"] for group, row in rows.items()}
        self._holds(found == deleted, f"every deletion was seen once: {sum(deleted.values()):,} in {len(deleted)} groups")
        changes = sum(row["changes"] for row in rows.values())
        sent = sum(writer.rows for writer in self._writers)
        self._holds(changes == sent, f"every change was seen once: {changes:,}, though a writer was killed and sent some again")
        if records.measure is not None:
            left = records.outcome().group_by(records.group).aggregate([(records.measure, "sum")])
            sums = dict(zip(left[records.group].to_pylist(), left[f"{records.measure}_sum"].to_pylist(), strict=True))
            same = all(
                abs((rows[group].get("total") or 0.0) - (total or 0.0)) <= 1e-6 * max(1.0, abs(total or 0.0))
                for group, total in sums.items()
            )
            self._holds(same, f"the sum of {records.measure} per {records.group} is that of the source")
            self.facts["groups"] = {
                str(group): [rows[group]["changes"], rows[group]["deleted"], sums.get(group)] for group in sorted(rows, key=str)
            }

    def _check_reads(self, spark: SparkSession, table: hg.Table) -> None:
        import headgate.spark as hgs

        self._step("Spark's merged read, the local one, and the source")
        wanted = self._records.outcome()
        local = sorted_by_key(table.scan().to_arrow(), self._records.key)
        self._holds(_same(local, wanted), f"the local merged read is the source, row for row: {wanted.num_rows:,} rows")
        began = time.perf_counter()
        with hgs.snapshot(spark, self.uri) as frame:
            there = sorted_by_key(frame.toArrow(), self._records.key)
        self._fact(f"Spark read it in {time.perf_counter() - began:.1f} s")
        self._holds(_same(there, wanted), f"Spark's merged read is the source, row for row: {there.num_rows:,} rows")
        report = table.verify()
        self._holds(report.ok, "verify finds nothing wrong")

    # -- looking

    def _sample(self) -> None:
        table = hg.open_table(self.uri)
        while not self._stop.wait(_SAMPLE_SECONDS):
            try:
                now = self.measured.now()
                for shard in table.status().shards:
                    self.measured.runs.setdefault(f"shard {shard.shard}", []).append((now, shard.runs))
                    self.measured.lag.setdefault(f"shard {shard.shard}", []).append((now, shard.lag))
                for consumer in table.consumers():
                    self.measured.lag.setdefault(f"stream {consumer.name}", []).append((now, consumer.lag))
            except hg.HeadgateError:
                continue  # a look that failed is one point less

    def _page(self) -> Page:
        measured, records = self.measured, self._records
        rows = sum(writer.sent_rows for writer in self._writers)
        written = next((at for at, label in measured.marks if label == "written"), measured.now())
        p50 = sorted(value for _, value in measured.p50)
        self.facts |= {
            "acknowledged_rows": rows,
            "rows_per_second": round(rows / max(written, 1e-9)),
            "durable_ms_p50": round(p50[len(p50) // 2], 2) if p50 else None,
        }
        page = Page(
            "Headgate: the pipeline, end to end",
            f"{records.rows.num_rows:,} records ({records.name}), {self._count} writer processes, {SHARDS} shards, "
            f"on {os.cpu_count()} cores; every acknowledged row was synced to disk first.",
        )
        page.cards = [
            ("rows acknowledged", f"{rows:,}"),
            ("rows per second", f"{rows / max(written, 1e-9):,.0f}"),
            ("durable put, p50", f"{p50[len(p50) // 2]:.1f} ms" if p50 else "–"),
            ("takeover after kill -9", f"{self.facts.get('takeover_seconds', 0):.2f} s"),
            ("clone", f"{self.facts.get('clone_seconds', 0) * 1e3:.0f} ms"),
            ("all of it", f"{self.facts['seconds']:.0f} s"),
        ]
        page.held = self.held
        page.plots = [
            Plot(
                "Throughput", "rows acknowledged per second", {n: per_second(p) for n, p in measured.acknowledged.items()}, measured.marks
            ),
            Plot(
                "Durable latency",
                "ms from put to acknowledgement",
                {"p50": sorted(measured.p50), "p99": sorted(measured.p99)},
                measured.marks,
            ),
            Plot("Lag", "entries not in a run yet; changes not read yet", measured.lag, measured.marks),
            Plot("Runs", "per shard", measured.runs, measured.marks),
        ]
        if "groups" in self.facts:
            page.tables.append(
                (
                    f"Per {records.group}, from the stream",
                    [records.group, "changes", "deleted", f"sum of {records.measure}"],
                    [[group, f"{n:,}", f"{gone:,}", f"{total or 0:,.0f}"] for group, (n, gone, total) in self.facts["groups"].items()],
                )
            )
        page.tables.append(("Events", ["what", "after"], [[label, f"{at:.1f} s"] for at, label in measured.marks]))
        return page


def _same(one: pa.Table, two: pa.Table) -> bool:
    """Equal row for row, whatever Spark calls nullable."""
    if one.num_rows != two.num_rows or one.schema.names != two.schema.names:
        return False
    return all(_plain(a).equals(_plain(b)) for a, b in zip(one.columns, two.columns, strict=True))


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return pa.chunked_array([column.combine_chunks()]) if column.num_chunks != 1 else column
