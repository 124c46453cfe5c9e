"""K12: concurrent changes of different fields of a manifest lose none of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
from headgate.manifest.model import AttemptRecord, ConsumerRecord, ShardManifest, TransactionMark
from headgate.store.faulty import Fault

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("note", pa.string())])

Change = Callable[[ShardManifest], ShardManifest]


def fields(number: int) -> list[Change]:
    """Changes of different fields, each as its owner makes it, number ``number`` of its kind."""
    name = f"n{number}"
    return [
        lambda m: m.but(attempts={**m.attempts, name: AttemptRecord(owner="test", expires_at=1e12)}),
        lambda m: m.but(consumers={**m.consumers, name: ConsumerRecord(position=m.cursor.position)}),
        lambda m: m.but(transactions={**m.transactions, name: TransactionMark(version=number)}),
        lambda m: m.but(wal_position_last_seen=max(m.wal_position_last_seen, number)),
        lambda m: m.but(next_generation=max(m.next_generation, number + 2)),
        lambda m: m.but(future_field={**(m.model_extra or {}).get("future_field", {}), name: number}),
    ]


def commit_all(bench: Any, logs: int, each: int) -> None:
    """Every kind of change by a process of its own, all at once."""
    start = threading.Barrier(logs)
    failures: list[BaseException] = []

    def run(kind: int) -> None:
        log = bench.log()
        start.wait(bench.PATIENCE)
        try:
            for number in range(each):
                log.manifests.commit(fields(number)[kind])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(kind,)) for kind in range(logs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(bench.PATIENCE)
    assert not failures
    manifest = bench.manifest
    names = {f"n{number}" for number in range(each)}
    assert set(manifest.attempts) == set(manifest.consumers) == set(manifest.transactions) == names
    assert manifest.wal_position_last_seen == each - 1
    assert manifest.next_generation == each + 1
    assert set(manifest.model_extra["future_field"]) == names


def test_k12_changes_of_different_fields_lose_none(bench: Any) -> None:
    before = bench.manifest.version
    commit_all(bench, 6, 10)  # fewer than a manifest's history names: a thread may sleep through all of them
    assert bench.manifest.version == before + 6 * 10, "each is a version of its own"


@pytest.mark.parametrize("kind", ["apply-then-fail", "fail", "conflict"])
def test_k12_nor_when_replies_are_lost(bench: Any, kind: Any) -> None:
    for number in range(12):
        bench.store.add(Fault("create", kind, key="/manifest/", times=1, skip=2 + 5 * number))
    commit_all(bench, 6, 8)


@pytest.mark.parametrize("first", range(6))
def test_k12_any_two_at_once_both_count(bench: Any, crew: Any, first: int) -> None:
    """The second commits between the first one's look and its create, for every pair of fields."""
    crew.stops = {"commit.loaded"}
    for second in range(6):
        number = second + 1
        one = crew.actor(lambda number=number: bench.log().manifests.commit(fields(number)[first]))
        one.step_to("commit.loaded")
        bench.log().manifests.commit(fields(number + 100)[second])
        one.finish()
        manifest = bench.manifest
        assert fields(number)[first](manifest) == manifest, "applied twice is applied once, so it is there"
        assert fields(number + 100)[second](manifest) == manifest


def test_k12_a_busy_table_keeps_what_everybody_did(tmp_path: Path) -> None:
    """Flushes, checkpoints, compaction and collection, all through their own doors."""
    table = hg.create_table(tmp_path / "t", SCHEMA, key="id")
    rounds, failures = 12, []

    def guarded(run: Callable[[], None]) -> Callable[[], None]:
        def body() -> None:
            try:
                run()
            except BaseException as error:
                failures.append(error)

        return body

    def write() -> None:
        with table.writer() as writer:
            for id in range(rounds):
                writer.put([{"id": id, "note": "x"}], producer="p", sequence=id).wait()
                writer.flush()

    def pin() -> None:
        other = hg.open_table(table.uri)
        for number in range(rounds):
            other.checkpoint(f"c{number}")

    def tidy() -> None:
        other = hg.open_table(table.uri)
        for _ in range(rounds // 2):
            other.compact()
            other.gc(dry_run=False, min_age=0)

    threads = [threading.Thread(target=guarded(run)) for run in (write, pin, tidy)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    manifest = table.shard("0000").log.manifests.load()
    assert sorted(record.name for record in manifest.checkpoints.values()) == sorted(f"c{n}" for n in range(rounds))
    assert manifest.producers["p"].sequence == rounds - 1
    assert manifest.next_generation == rounds + 1
    assert table.scan().count() == rounds
    assert table.verify(deep=True).ok
