"""`headgate demo --takeover`: a takeover, a stalled writer that is refused, a crash, and a log that holds all of it.

Three real processes write one shard. A is stopped (SIGSTOP) in the middle of its puts, B takes
over, A wakes up and is refused; B is killed (SIGKILL) in the middle of its puts, C takes over and
sends again what B may or may not have written. Then the log is read back and compared with what
each process was told.
"""

from __future__ import annotations

import json
import queue
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.text import Text

import headgate as hg
from headgate.cli.output import print_json, screen
from headgate.cli.takeover_worker import ROWS_PER_PUT

_ANSWER_SECONDS = 60.0
_PRODUCER = "till-7"
_PUTS_BEFORE_STALL, _PUTS_BEFORE_KILL, _PUTS_AFTER, _PUTS_REPEATED = 25, 25, 5, 3
_B_STARTS_AT = 1_000


class DemoFailedError(hg.HeadgateError):
    """Something that is promised did not hold."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint or "this should never happen: please report it, with the folder of the table")


class _Writer:
    """One writer process, and what it said so far."""

    def __init__(self, name: str, uri: str) -> None:
        self.name = name
        self._said: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headgate.cli.takeover_worker", name, uri],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self.sent: list[int] = []
        self.acknowledged: dict[int, dict[str, Any]] = {}
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.endswith("\n"):  # a process that is killed may stop in the middle of a word
                self._said.put(json.loads(line))
        self._said.put(None)

    def tell(self, do: str, **what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **what}) + "\n")
        self.process.stdin.flush()

    def hear(self, *events: str) -> dict[str, Any]:
        """The next answer of a kind; what is said on the way is remembered."""
        while True:
            said = self._next()
            if said is None:
                self._errors.seek(0)
                words = self._errors.read().decode(errors="replace").strip().split("\n")
                raise DemoFailedError(f"writer {self.name} ended unexpectedly: {words[-1]}")
            if said["event"] in events:
                return said

    def hear_acknowledgements(self, wanted: int) -> None:
        while len(self.acknowledged) < wanted:
            self.hear("acknowledged")

    def hear_the_rest(self) -> None:
        """All it said before it died."""
        while self._next() is not None:
            pass

    def _next(self) -> dict[str, Any] | None:
        try:
            said = self._said.get(timeout=_ANSWER_SECONDS)
        except queue.Empty:
            raise DemoFailedError(f"writer {self.name} (process {self.pid}) says nothing", hint="is the machine very busy?") from None
        if said is not None and said["event"] == "sent":
            self.sent.append(said["sequence"])
        elif said is not None and said["event"] == "acknowledged":
            self.acknowledged[said["sequence"]] = said
        return said

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()  # also ends one that is stopped
        self.process.wait()
        for pipe in (self.process.stdin, self._errors):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:  # what it was told last, it never read
                    pass


class _Story:
    """Tells each step as it happens, or keeps it for the JSON document."""

    def __init__(self, *, as_json: bool) -> None:
        self.steps: list[dict[str, Any]] = []
        self._out = None if as_json else screen()

    def step(self, title: str) -> None:
        self.steps.append({"step": title, "facts": []})
        if self._out is not None:
            self._out.print(Text(f"\n{len(self.steps)}. {title}", style="bold"))

    def fact(self, text: str, **values: Any) -> None:
        self.steps[-1]["facts"].append(text)
        self.steps[-1] |= values
        if self._out is not None:
            self._out.print(Text(f"   {text}"))

    def holds(self, condition: bool, text: str, **values: Any) -> None:
        """A promise, checked."""
        if not condition:
            raise DemoFailedError(f"this did not hold: {text}")
        self.steps[-1]["facts"].append(text)
        self.steps[-1] |= values
        if self._out is not None:
            self._out.print(Text.assemble("   ", ("✓ ", "green"), text))

    def end(self, *lines: str) -> None:
        if self._out is not None:
            self._out.print("\n" + "\n".join(lines))


def show_takeover(program: str | None, folder: Path | None, *, keep: bool, as_json: bool) -> None:
    """Three real processes write one shard. One stalls, its successor takes over, and when it wakes up it is refused; the
    successor is killed, and the next one sends again what may or may not have been written."""
    began = time.perf_counter()
    place = folder if folder is not None else Path(tempfile.mkdtemp(prefix="headgate-demo-"))
    story = _Story(as_json=as_json)
    writers: list[_Writer] = []
    kept = keep or folder is not None
    try:
        _run(story, str(place), writers)
    except BaseException as error:
        kept = kept or isinstance(error, DemoFailedError)  # the table is the evidence
        if isinstance(error, DemoFailedError):
            error.hint += f"\n  the table is kept in {place}"
        raise
    finally:
        for writer in writers:
            writer.end()
        if not kept:
            shutil.rmtree(place, ignore_errors=True)
    seconds = time.perf_counter() - began
    if as_json:
        print_json({"ok": True, "uri": str(place), "kept": kept, "seconds": round(seconds, 3), "steps": story.steps})
    elif kept:
        story.end(
            f"All of it held, in {seconds:.1f} s. To look further:",
            *(f"  {program} {what} {place}" for what in ("tail --seals", "status", "verify --deep")),
        )
    else:
        story.end(f"All of it held, in {seconds:.1f} s. To look further, keep the table:", f"  {program} demo --takeover --keep")


def _run(story: _Story, uri: str, writers: list[_Writer]) -> None:
    story.step("A table with one shard")
    table = hg.create_table(uri, pa.schema([("id", pa.int64()), ("writer", pa.string()), ("amount", pa.float64())]), key="id")
    shard = table.shard("0000")
    writers += [_Writer(name, uri) for name in "ABC"]
    a, b, c = writers
    for writer in writers:
        writer.hear("ready")
    story.fact(f"in {uri}")
    story.fact(f"three processes may write it: A is {a.pid}, B is {b.pid}, C is {c.pid}", pids=[w.pid for w in writers])

    story.step("A writes")
    _open(story, a, expected_epoch=1)
    a.tell("stream", sequence=0)
    a.hear_acknowledgements(_PUTS_BEFORE_STALL)
    first = [said["seconds"] for said in a.acknowledged.values()]
    story.fact(
        f"puts of {ROWS_PER_PUT} rows, each acknowledged when it is on disk (fsync): median {1000 * statistics.median(first):.1f} ms"
    )

    story.step("A stalls: SIGSTOP in the middle of its puts")
    a.signal(signal.SIGSTOP)
    story.fact(f"{len(a.acknowledged)} puts acknowledged and more on the way; A believes that it owns the shard")

    story.step("B takes over")
    opened = _open(story, b, expected_epoch=2)
    sealed = opened["first"] - 1
    story.fact(f"a seal now stands at position {sealed}, where A's next entry would go; no clock and no lease took part", sealed_at=sealed)
    b.tell("read")
    ids = set(b.hear("read")["ids"])
    story.holds(
        all(_ids(sequence) <= ids for sequence in a.acknowledged),
        f"B reads back every put that A was told is durable: {len(ids)} rows in the log",
    )

    story.step(f"B writes, as producer {_PRODUCER!r} with sequence numbers")
    b.tell("stream", sequence=_B_STARTS_AT, producer=_PRODUCER)
    b.hear_acknowledgements(_PUTS_BEFORE_KILL)
    story.fact(f"{len(b.acknowledged)} puts acknowledged so far")

    story.step("A wakes up (SIGCONT) and goes on as if nothing had happened")
    a.signal(signal.SIGCONT)
    while (said := a.hear("acknowledged", "fenced"))["event"] == "acknowledged":
        # What had landed before the seal may still be told; it is in the log that B took over.
        story.holds(said["position"] < sealed, f"put {said['sequence']} had landed at position {said['position']} before the stall")
    fenced = said
    told = f"epoch {fenced['epoch']} is over, epoch {fenced['by_epoch']} owns the shard"
    story.holds(fenced["epoch"] == 1, f"A's next put is refused with FencedError: {told}", refused=fenced)
    late = [said for said in a.acknowledged.values() if said["position"] >= sealed]
    story.holds(not late, f"A was told of {len(a.acknowledged)} durable puts, all before the seal at position {sealed}")
    outcome = shard.outcome(fenced["epoch"], fenced["position"])
    story.fact(f"put {fenced['sequence']} ended in an error, so its outcome is looked up: Shard.outcome says {outcome!r}", outcome=outcome)
    a.tell("put", sequence=fenced["sequence"] + 1)
    story.holds(a.hear("acknowledged", "fenced")["event"] == "fenced", "and A stays refused, for good")

    story.step("B dies: kill -9 in the middle of its puts")
    b.signal(signal.SIGKILL)
    b.process.wait()
    b.hear_the_rest()
    last = max(b.acknowledged)
    unknown = [sequence for sequence in b.sent if sequence > last]
    open_end = f"; put {unknown[0]} was on its way, and nobody knows whether it happened" if unknown else ""
    story.fact(f"{len(b.acknowledged)} puts acknowledged, the last is {last}{open_end}", last_acknowledged=last, unknown=unknown)

    story.step("C takes over and sends again, as the same producer")
    _open(story, c, expected_epoch=3)
    again = list(range(last - _PUTS_REPEATED + 1, last + 1 + _PUTS_AFTER))
    for sequence in again:
        c.tell("put", sequence=sequence, producer=_PRODUCER)
        c.hear("acknowledged")
    duplicates = [sequence for sequence in again if c.acknowledged[sequence]["duplicate"]]
    story.holds(
        set(again[:_PUTS_REPEATED]) <= set(duplicates),
        f"puts {again[0]} to {last}, which B had been told are durable: recognised, not written twice",
        repeated=again,
        duplicates=duplicates,
    )
    if unknown:
        happened = unknown[0] in duplicates
        story.fact(
            f"put {unknown[0]}, the unknown one: {'it had landed, so it' if happened else 'it had not landed; now it'} is there once"
        )
    story.fact(f"and it goes on to put {again[-1]}")
    c.tell("close")
    c.hear("closed")

    story.step("The log, read back")
    _compare(story, shard, writers, fenced, outcome)

    story.step("headgate verify --deep")
    report = table.verify(deep=True)
    looked_at = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in report.counts.items())
    story.holds(report.ok, f"every checksum, every seal and the whole chain: {looked_at}", counts=report.counts)


def _open(story: _Story, writer: _Writer, *, expected_epoch: int) -> dict[str, Any]:
    writer.tell("open")
    opened = writer.hear("opened")
    story.holds(
        opened["epoch"] == expected_epoch,
        f"{writer.name} claims the shard: epoch {opened['epoch']}, from position {opened['first']}, in {1000 * opened['seconds']:.0f} ms",
        epoch=opened["epoch"],
        first=opened["first"],
    )
    return opened


def _ids(sequence: int) -> set[int]:
    return set(range(ROWS_PER_PUT * sequence, ROWS_PER_PUT * (sequence + 1)))


def _compare(story: _Story, shard: hg.Shard, writers: list[_Writer], fenced: dict[str, Any], outcome: str) -> None:
    """What the log holds beside what each process was told."""
    entries = list(hg.WalTailer(shard).read(include_seals=True))
    positions = [entry.position for entry in entries]
    seals = [entry.position for entry in entries if entry.is_seal]
    story.holds(
        positions == list(range(len(entries))) and len(seals) == 2,
        f"{len(entries)} positions without a gap: {len(entries) - 2} entries and 2 seals, at {seals[0]} and {seals[1]}",
        entries=len(entries) - 2,
        seals=seals,
    )
    rows = Counter(n for entry in entries for batch in entry.batches for n in batch.column("id").to_pylist())
    at = {entry.position: {n for batch in entry.batches for n in batch.column("id").to_pylist()} for entry in entries}
    acknowledged = {sequence for writer in writers for sequence in writer.acknowledged}
    wanted = Counter(n for sequence in acknowledged for n in _ids(sequence))
    story.holds(wanted.keys() <= rows.keys(), f"no acknowledged row is missing: {len(wanted)} of {len(wanted)}", rows=len(rows))
    story.holds(max(rows.values()) == 1, "no row is there twice")
    places = [(said["position"], sequence) for writer in writers for sequence, said in writer.acknowledged.items() if not said["duplicate"]]
    story.holds(all(_ids(sequence) <= at[position] for position, sequence in places), "each one at the position it was acknowledged with")
    expected = wanted.keys() | (_ids(fenced["sequence"]) if outcome == "durable" else set())
    story.holds(rows.keys() == expected, "and no row that was refused")
