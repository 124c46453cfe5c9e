"""Tasks that stay on one core, where each has one."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

import headgate as hg
import headgate.spark as hgs
from headgate.spark import cores
from headgate.spark.cores import has_cores, on_a_core
from headgate.spark.tasks import answers

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no core can be chosen here")
ALL = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
needs_two = pytest.mark.skipif(len(ALL) < 2, reason="one core only")


@pytest.fixture(autouse=True)
def _own_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@needs_two
def test_all_threads_stay_on_a_core_that_nobody_else_has_and_are_free_afterwards() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    assert thread.native_id is not None
    try:
        with on_a_core():
            (mine,) = os.sched_getaffinity(0)
            assert os.sched_getaffinity(thread.native_id) == {mine}
            with pytest.MonkeyPatch.context() as patch:  # another process, which may use all cores
                patch.setattr(os, "sched_getaffinity", lambda _: ALL)
                taken = cores._taken(ALL)
            assert taken is not None
            assert taken[0] != mine
            os.close(taken[1])
        assert os.sched_getaffinity(0) == os.sched_getaffinity(thread.native_id) == ALL
        with pytest.raises(KeyError), on_a_core():
            raise KeyError
        assert os.sched_getaffinity(0) == ALL
        with on_a_core():
            assert os.sched_getaffinity(0) == {mine}, "it was given back"
    finally:
        stop.set()
        thread.join()


def test_where_no_core_is_left_or_locks_cannot_be_had_a_task_runs_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [taken for _ in ALL if (taken := cores._taken(ALL)) is not None]
    assert {core for core, _ in held} == ALL
    with on_a_core():
        assert os.sched_getaffinity(0) == ALL
    for _, lock in held:
        os.close(lock)
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere/at/all")
    with on_a_core():
        assert os.sched_getaffinity(0) == ALL


@pytest.mark.parametrize(
    ("master", "cpus", "are_there"),
    [
        (f"local[{len(ALL)}]", "1", True),
        ("local[*]", "1", True),
        (f"local[{len(ALL)},3]", "1", True),
        (f"local[{len(ALL) + 1}]", "1", False),
        (f"local[{len(ALL) - 1}]", "1", False),
        ("local[*]", "2", False),
        ("local-cluster[2,1,1024]", "1", False),
        ("spark://here:7077", "1", False),
        ("k8s://https://here", "1", False),
        (None, None, False),
    ],
)
def test_only_tasks_that_are_all_on_this_machine_have_a_core_each(master: str | None, cpus: str | None, are_there: bool) -> None:
    settings = {"spark.master": master, "spark.task.cpus": cpus}

    def get(name: str, default: str) -> str:
        return settings[name] or default

    conf = SimpleNamespace(get=get)
    assert has_cores(SimpleNamespace(conf=conf, sparkContext=object())) is are_there  # type: ignore[arg-type]
    assert not has_cores(SimpleNamespace(conf=conf)), "through Connect it may be any machine"  # type: ignore[arg-type]


@needs_two
def test_after_a_compaction_whose_tasks_had_a_core_each_others_have_all_of_them(spark: Any, tmp_path: Path) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), False), ("v", pa.int64())])
    table = hg.create_table(tmp_path / "t", schema, key="id", sharding=hg.bucket("id", 2))
    with table.writer(hg.ShardWriterConfig(fsync=False)) as writer:
        for turn in range(2):
            writer.put(pa.table({"id": range(5000), "v": [turn] * 5000}, schema=schema)).wait()
            writer.flush()
    report = hgs.compact(spark, table.uri, full=True)
    assert report.shards == {"0000": 1, "0001": 1}
    assert table.scan(filter="v = 1").count() == table.scan().count() == 5000

    def look(number: int) -> hg.WrittenRange:
        return hg.WrittenRange(number, (), rows_kept=len(os.sched_getaffinity(0)))

    assert {said.rows_kept for said in answers(spark, look, 4, hg.WrittenRange)} == {len(ALL)}
