"""Hazards of a writer whose threads or requests are cut off at a bad moment: nothing acknowledged is dropped, nothing is called clean."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest

import headgate as hg
from headgate.clock import SystemClock, Thread
from headgate.failpoint import hooked
from headgate.store.faulty import Fault


class InterruptedSpawn(SystemClock):
    """The interrupt comes when the thread runs already, and before anybody has its handle."""

    def __init__(self, part: str, times: int) -> None:
        self.part, self.times = part, times

    def spawn(self, run: Callable[[], None], *, name: str) -> Thread:
        thread = super().spawn(run, name=name)
        if self.part in name and self.times > 0:
            self.times -= 1
            raise KeyboardInterrupt
        return thread


def test_r01_an_interrupt_while_the_flusher_is_started_leaves_one_flusher_and_every_row(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(clock=InterruptedSpawn("headgate-flush", 3))
    writer = bench.memtable_writer(max_memtable_age=1e6)
    put = 0
    for _ in range(40):
        for _ in range(5):
            writer.put(bench.rows(put)).wait()
            put += 1
        with contextlib.suppress(KeyboardInterrupt):
            writer.flush()
    writer.flush()
    assert len(bench.state()) == put
    writer.close()
    assert writer.threads_alive() == 0
    assert len(bench.state()) == put
    positions = [(run.first, run.end) for run in bench.manifest.runs]
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(positions))


def test_r01_an_interrupt_between_freeze_and_call_does_not_leave_a_flush_waiting(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from headgate.flush import Generations

    writer = bench.memtable_writer(max_memtable_age=1e6)
    writer.put(bench.rows(1)).wait()
    original = Generations._call

    def interrupted(self: Generations) -> None:
        monkeypatch.setattr(Generations, "_call", original)
        raise KeyboardInterrupt

    monkeypatch.setattr(Generations, "_call", interrupted)
    with pytest.raises(KeyboardInterrupt):
        writer.flush()
    writer.flush()
    writer.close()
    assert bench.manifest.is_clean


def test_r01_a_flush_that_would_pass_rows_nobody_flushed_is_refused_loudly(bench: Any) -> None:
    writer = bench.memtable_writer(max_memtable_age=1e6)
    writer.put(bench.rows(1)).wait()
    generations = writer._generations
    with generations.lock:
        generations.freeze()
        generations._tables = generations._tables[1:]  # a MemTable is lost
    writer.put(bench.rows(2)).wait()
    with pytest.raises(hg.WriterPoisonedError, match="was not flushed"):
        writer.flush()
    assert bench.manifest.cursor.position == 0
    writer.abort()
    bench.memtable_writer().close()
    assert set(bench.state()) == {1, 2}


@pytest.mark.parametrize("how", ["sync", "apply-then-fail", "interrupt"])
def test_k04_a_checkpoint_that_ends_in_doubt_leaves_no_log_called_clean(make_bench: Any, how: Any) -> None:
    """Whatever went wrong after its commit, the next entry says first that the log is needed."""
    bench = make_bench("disk")
    writer = bench.memtable_writer(max_memtable_age=1e6)
    writer.put(bench.rows(1)).wait()
    writer.flush()

    def interrupt(name: str) -> None:
        if name == "commit.created":
            raise KeyboardInterrupt

    if how == "interrupt":
        with hooked(interrupt), pytest.raises(KeyboardInterrupt):
            writer.checkpoint("c")
    else:
        # The commit lands, and whoever made it never hears of it.
        bench.store.add(Fault("create", how, key="manifest/", times=1 if how == "sync" else 50))
        bench.store.add(Fault("list", "fail", key="manifest/", skip=1, times=50))
        with pytest.raises(hg.HeadgateError):
            writer.checkpoint("c")
        bench.store.clear()
    assert bench.manifest.is_clean, "the commit did land"
    with contextlib.suppress(hg.HeadgateError):
        writer.put(bench.rows(2)).wait()
        assert not bench.manifest.is_clean, "acknowledged, and the log is called clean"
    writer.abort()


def test_k03_after_scope_all_the_log_is_clean_until_the_next_entry(bench: Any) -> None:
    writer = bench.memtable_writer(max_memtable_age=1e6)
    writer.put(bench.rows(1)).wait()
    writer.checkpoint("first")
    assert bench.manifest.is_clean
    writer.put(bench.rows(2)).wait()
    assert not bench.manifest.is_clean
    writer.checkpoint("second")
    assert bench.manifest.is_clean
    writer.abort()
