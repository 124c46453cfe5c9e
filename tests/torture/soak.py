"""A long life: everything that can happen to a table, at once, for as long as asked, on a real disk.

    python tests/torture/soak.py --minutes 20 [--seed 1] [--dir DIR]

Each a process of its own:
    writers     two at a time claim the table, one after the other, and move amounts between accounts of a branch; they are
                closed, killed, stopped and resumed, and taken over from
    keeper      loads, compacts, collects with ``min_age=0``, takes and drops checkpoints, makes clones, writes to them,
                detaches and drops them, splits shards
    readers     scan all the time, with one handle each

A put moves an amount between two accounts of one branch, and a branch is in one shard, so a put is atomic
there: whoever reads finds that the amounts of each branch add up to nothing, and that no account is missing.
Loads bring and take away rows that add up to nothing, too. Each account counts its versions; a writer
notes a version in a file once it is acknowledged, so that a row that went back is noticed.

In the end the table is opened, compacted and collected: the sums hold, no acknowledged version is missing, verify
finds nothing, and the folder is about as large as when it began.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import headgate as hg

BRANCHES, ACCOUNTS, LOADED = 16, 24, 40
SHARDS, SHARDS_MAX = 2, 8
SCHEMA = pa.schema(
    [
        pa.field("branch", pa.int64(), False),
        pa.field("account", pa.int64(), False),
        pa.field("amount", pa.int64()),
        pa.field("version", pa.int64()),
        pa.field("note", pa.string()),
    ]
)
_CONFIG = hg.ShardWriterConfig(max_memtable_rows=400, max_memtable_age=0.5, max_unflushed_memtable_bytes=8 << 20, put_timeout=60)
_CONTEXT = multiprocessing.get_context("forkserver")  # the imports take seconds: once
_CONTEXT.set_forkserver_preload(["headgate", "lance", "numpy", "pyarrow.compute"])
Process = multiprocessing.context.ForkServerProcess
_EXPECTED = (
    hg.FencedError, hg.CommitConflictError, hg.SnapshotExpiredError, hg.TransactionConflictError, hg.BackpressureTimeoutError,
)  # fmt: skip
"""What others may do to one; the next try makes up for it."""


def rows_of(branches: Any, accounts: Any, amounts: Any, versions: Any, note: str) -> pa.RecordBatch:
    count = len(accounts)
    columns = [pa.array(np.asarray(values, np.int64)) for values in (branches, accounts, amounts, versions)]
    return pa.record_batch([*columns, pa.array([note] * count, pa.string())], schema=SCHEMA)


def check(rows: pa.Table, where: str) -> int:
    """Every branch adds up to nothing, and has all its accounts. Raises AssertionError."""
    sums = rows.group_by("branch").aggregate([("amount", "sum")])
    wrong = sums.filter(pc.not_equal(sums["amount_sum"], 0)).to_pylist()
    assert not wrong, f"{where}: {wrong[:3]}"
    accounts = rows.filter(pc.less(rows["account"], ACCOUNTS))
    assert accounts.num_rows == BRANCHES * ACCOUNTS, f"{where}: {accounts.num_rows} accounts of {BRANCHES * ACCOUNTS}"
    keys = rows.select(["branch", "account"]).group_by(["branch", "account"]).aggregate([])
    assert keys.num_rows == rows.num_rows, f"{where}: a key is there twice"
    return rows.num_rows


def drop_what_is_there(target: str) -> None:
    try:
        hg.drop_table(target, confirm=target)
    except hg.NotFoundError:
        return  # dropped to the end, but for the folder


class Told:
    """What a process did, for the driver, and its end."""

    def __init__(self, file: str) -> None:
        self._file, self._counts, self._said = file, Counter[str](), 0.0

    def count(self, what: str, number: int = 1) -> None:
        self._counts[what] += number
        if time.monotonic() - self._said > 1:
            self.say()

    def say(self) -> None:
        self._said = time.monotonic()
        fresh = f"{self._file}.new"
        Path(fresh).write_text(json.dumps(self._counts))
        os.replace(fresh, self._file)


# -- the processes


def write(uri: str, ledger: str, told: Told, seed: int) -> None:
    """Move amounts, until fenced, killed, or told to end by SIGTERM."""
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
    draw = random.Random(seed)
    table = hg.open_table(uri)
    with table.writer(_CONFIG) as writer, open(ledger, "ab", buffering=0) as notes:
        told.count("takeovers")
        rows = table.scan(filter=f"account < {ACCOUNTS}").to_arrow()  # after the claim: nobody else writes them now
        check(rows, "a writer, after its claim")
        state = {(r["branch"], r["account"]): [r["amount"], r["version"]] for r in rows.to_pylist()}
        waiting: list[tuple[hg.TableAck, bytes]] = []
        while not ended:
            branch = draw.randrange(BRANCHES)
            one, two = draw.sample(range(ACCOUNTS), 2)
            amount = draw.randint(1, 1000)
            changed = []
            for account, change in ((one, -amount), (two, amount)):
                known = state[branch, account]
                known[0], known[1] = known[0] + change, known[1] + 1
                changed.append((branch, account, known[0], known[1]))
            branches, accounts, amounts, versions = zip(*changed, strict=True)
            ack = writer.put(rows_of(branches, accounts, amounts, versions, "moved"))
            waiting.append((ack, b"".join(b"%d %d %d\n" % (b, a, v) for b, a, _, v in changed)))
            if len(waiting) >= 16:
                for pending, line in waiting:
                    pending.wait()
                    notes.write(line)  # one write: whole, or not there, whatever kills us
                told.count("puts", len(waiting))
                waiting.clear()
                time.sleep(draw.random() * 0.02)


def read(uri: str, told: Told, seed: int) -> None:
    draw = random.Random(seed)
    table = hg.open_table(uri)
    while True:
        try:
            check(table.scan().to_arrow(), "a reader")
            told.count("reads")
            if draw.random() < 0.3:
                branch, account = draw.randrange(BRANCHES), draw.randrange(ACCOUNTS)
                assert table.lookup([(branch, account)]).num_rows == 1, f"account {branch}/{account} is missing"
                told.count("lookups")
        except _EXPECTED:
            told.count("reads to be tried again")
        time.sleep(draw.random() * 0.1)


def keep(uri: str, told: Told, seed: int) -> None:
    """All that happens to a table beside writing and reading."""
    draw = random.Random(seed)
    table = hg.open_table(uri)
    pins: list[tuple[str, int]] = []
    clones = [str(path) for path in Path(uri).parent.glob(f"{Path(uri).name}-clone-*") if path.is_dir()]
    version = 0
    for left in table.checkpoints():  # of a keeper that was killed: it would hold everything since, for good
        if left.clone is None:
            table.drop_checkpoint(left.id)

    def load() -> None:
        nonlocal version
        version += 1
        branches = draw.sample(range(BRANCHES), draw.randint(1, 6))
        accounts = np.arange(ACCOUNTS, ACCOUNTS + LOADED)
        parts = []
        for branch in branches:
            amounts = np.array([draw.randint(-100, 100) for _ in range(LOADED - 1)])
            amounts = np.append(amounts, -amounts.sum())
            parts.append(rows_of([branch] * LOADED, accounts, amounts, [version] * LOADED, f"load {version}"))
        rows = pa.Table.from_batches(parts)
        if draw.random() < 0.3:
            table.load(rows.select(["branch", "account"]), "delete")
        else:
            table.load(rows, app=f"keeper-{seed}", version=version)

    def compact() -> None:
        table.compact(full=draw.random() < 0.3)

    def collect() -> None:
        table.gc(dry_run=False, min_age=0, sweep=draw.random() < 0.05)

    def pin() -> None:
        made = table.checkpoint(ttl=draw.choice([None, 3600.0]))
        pins.append((made.id, check(table.scan(at=made.id).to_arrow(), "a checkpoint, when it was made")))
        while len(pins) > 4:
            table.drop_checkpoint(pins.pop(draw.randrange(len(pins)))[0])

    def look_back() -> None:
        if pins:
            id, rows = draw.choice(pins)
            now = check(table.scan(at=id).to_arrow(), "a checkpoint, later")
            assert now == rows, f"checkpoint {id} had {rows} rows, and has {now}"

    def clone() -> None:
        if not pins or len(clones) >= 3:
            return drop_clone()
        id, rows = draw.choice(pins)
        target = f"{uri}-clone-{seed}-{told._counts['clones']}"
        twin = hg.clone(uri, target, checkpoint=id)
        clones.append(target)
        assert check(twin.scan().to_arrow(), "a clone") == rows, "a clone has other rows than its checkpoint"
        with twin.writer(_CONFIG) as writer:
            writer.put(rows_of([0, 0], [ACCOUNTS + LOADED, ACCOUNTS + LOADED + 1], [5, -5], [1, 1], "of the clone")).wait()
        assert check(twin.scan().to_arrow(), "a clone that was written to") == rows + 2
        if draw.random() < 0.4:
            twin.compact(full=True)
        if draw.random() < 0.4:
            twin.detach()
            assert check(twin.scan().to_arrow(), "a detached clone") == rows + 2
            told.count("detached")
        return None

    def drop_clone() -> None:
        if clones:
            target = clones.pop(draw.randrange(len(clones)))
            try:
                twin = hg.open_table(target)
            except hg.NotFoundError:
                twin = None  # whoever made it, or dropped it, was killed half-way
            if twin is not None:
                check(twin.scan().to_arrow(), "a clone, before it is dropped")
            drop_what_is_there(target)
            told.count("clones dropped")

    def split() -> None:
        shards = table.refresh().shards
        if len(shards) < SHARDS_MAX and draw.random() < 0.25:
            table.split_shard(draw.choice(shards).id)
            told.count("splits")

    acts = {"loads": load, "compactions": compact, "collections": collect, "checkpoints": pin, "looks back": look_back, "clones": clone}
    weights = {"loads": 6, "compactions": 4, "collections": 4, "checkpoints": 2, "looks back": 3, "clones": 1, "splits tried": 1}
    acts["splits tried"] = split
    while True:
        name = draw.choices(list(weights), list(weights.values()))[0]
        try:
            acts[name]()
            told.count(name)
        except _EXPECTED as error:
            told.count(f"{name} to be tried again ({type(error).__name__})")
        time.sleep(draw.random() * 0.2)


def main_of(role: str, uri: str, file: str, seed: int) -> None:
    told = Told(file)
    try:
        if role == "write":
            write(uri, f"{file}.ledger", told, seed)
        else:
            (read if role == "read" else keep)(uri, told, seed)
    except _EXPECTED as error:
        told.count(f"writers ended by {type(error).__name__}")
    except BaseException:
        Path(f"{file}.failed").write_text(traceback.format_exc())
        raise
    finally:
        told.say()


# -- the driver


class Soak:
    """Starts, kills, stops and counts."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.uri, self._folder, self._draw = str(folder / "table"), folder, random.Random(seed)
        self._number = 0
        self.kills = self.stalls = 0
        self.sizes: list[int] = []
        table = hg.create_table(self.uri, SCHEMA, key=["branch", "account"], sharding=hg.bucket("branch", SHARDS))
        branches, accounts = (grid.reshape(-1) for grid in np.meshgrid(np.arange(BRANCHES), np.arange(ACCOUNTS), indexing="ij"))
        zeros = np.zeros(len(branches), np.int64)
        table.load(rows_of(branches, accounts, zeros, zeros, "opened"))

    def start(self, role: str) -> Process:
        self._number += 1
        file = self._folder / f"{role}-{self._number:05d}"
        process = _CONTEXT.Process(target=main_of, args=(role, self.uri, str(file), self._draw.randrange(1 << 30)), daemon=True)
        process.start()
        return process

    def run(self, seconds: float, say: Any) -> None:
        until = time.monotonic() + seconds
        readers, keeper, writers = [self.start("read")], self.start("keep"), [self.start("write")]
        sampled = 0.0
        try:
            while time.monotonic() < until:
                time.sleep(self._draw.uniform(0.5, 3.0))
                self._trouble(writers)
                keeper = self._revived(keeper, "keep", 0.02)
                readers = [self._revived(one, "read", 0.01) for one in readers]
                self.look()
                if time.monotonic() - sampled > 5:
                    sampled = time.monotonic()
                    self.sizes.append(self.size_bytes())
                    say(f"{until - sampled:6.0f} s left, {self.sizes[-1] / 1e6:.1f} MB, {dict(sorted(self.counts().items()))}")
        finally:
            for process in (*readers, keeper, *writers):
                process.kill()
                process.join()

    def size_bytes(self) -> int:
        total = 0
        for parent, _, names in os.walk(self.uri):
            for name in names:
                try:
                    total += os.stat(os.path.join(parent, name)).st_size
                except FileNotFoundError:
                    continue  # collected meanwhile
        return total

    def _trouble(self, writers: list[Process]) -> None:
        """Take over, kill, stop and resume."""
        writers[:] = [one for one in writers if one.is_alive()]
        chance = self._draw.random()
        if not writers or chance < 0.3:
            writers.append(self.start("write"))
        if writers and chance > 0.8:
            self._draw.choice(writers).kill()
            self.kills += 1
        elif writers and chance > 0.65:
            victim = self._draw.choice(writers)
            os.kill(victim.pid, signal.SIGSTOP)
            writers.append(self.start("write"))
            time.sleep(self._draw.uniform(0.2, 1.0))
            os.kill(victim.pid, signal.SIGCONT)
            self.stalls += 1
        elif writers and chance > 0.55:
            writers[0].terminate()  # it closes: all that was put is flushed
        while len(writers) > 3:
            writers.pop(0).kill()

    def _revived(self, process: Process, role: str, chance: float) -> Process:
        if self._draw.random() < chance:
            process.kill()
            self.kills += 1
        return self.start(role) if not process.is_alive() else process

    def look(self) -> None:
        """Has anybody seen something that may not be?"""
        for failed in self._folder.glob("*.failed"):
            raise AssertionError(f"{failed.name}: {failed.read_text()}")

    def counts(self) -> Counter[str]:
        found = Counter[str]()
        for file in self._folder.iterdir():
            if file.is_file() and not file.suffix:
                found.update(json.loads(file.read_text() or "{}"))
        return found

    def end(self) -> dict[str, Any]:
        """What is left, when all is quiet."""
        self.look()
        table = hg.open_table(self.uri)
        with table.writer() as writer:  # a last takeover: what was acknowledged is replayed
            writer.flush()
        rows = check(table.scan().to_arrow(), "in the end")
        versions = {(r["branch"], r["account"]): r["version"] for r in table.scan(filter=f"account < {ACCOUNTS}").to_arrow().to_pylist()}
        noted = 0
        for ledger in self._folder.glob("*.ledger"):
            for line in ledger.read_bytes().splitlines():
                branch, account, version = (int(word) for word in line.split())
                noted += 1
                assert versions[branch, account] >= version, (
                    f"{branch}/{account} is at {versions[branch, account]}, {version} was acknowledged"
                )
        for checkpoint in table.checkpoints():
            if checkpoint.clone is None:
                if checkpoint.complete:  # a keeper may have been killed while it took one
                    check(table.scan(at=checkpoint.id).to_arrow(), "a checkpoint, in the end")
                table.drop_checkpoint(checkpoint.id)
        for file in self._folder.glob("table-clone-*"):
            drop_what_is_there(str(file))
        table.compact(full=True)
        table.gc(dry_run=False, min_age=0, sweep=True)
        table.gc(dry_run=False, min_age=0)
        report = table.verify(deep=True)
        assert report.ok, report.problems
        assert check(table.scan().to_arrow(), "after a last compaction") == rows
        half = self.sizes[len(self.sizes) // 2 :]
        return {
            "rows": rows,
            "shards": len(table.refresh().shards),
            "acknowledged changes noted": noted,
            "kills": self.kills,
            "stalls": self.stalls,
            "MB, at most": round(max(self.sizes, default=0) / 1e6, 1),
            "MB, median of the first half": round(float(np.median(self.sizes[: len(self.sizes) // 2] or [0])) / 1e6, 1),
            "MB, median of the second half": round(float(np.median(half or [0])) / 1e6, 1),
            "MB, in the end": round(self.size_bytes() / 1e6, 1),
            **dict(sorted(self.counts().items())),
        }


def soak(folder: Path, seconds: float, seed: int, say: Any = print) -> dict[str, Any]:
    made = Soak(folder, seed)
    made.run(seconds, say)
    return made.end()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A table's whole life, for as long as asked.")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dir", type=Path, default=None)
    asked = parser.parse_args()
    place = asked.dir or Path(tempfile.mkdtemp(prefix="headgate-soak-"))
    place.mkdir(parents=True, exist_ok=True)
    print(f"seed {asked.seed}, in {place}", flush=True)
    print(json.dumps(soak(place, asked.minutes * 60, asked.seed, lambda text: print(text, flush=True)), indent=1))
